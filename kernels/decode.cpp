#include "kernels/decode.hpp"

#include <fmt/format.h>

#include <numeric>

#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

double tokens(std::span<const std::int32_t> lengths) {
  return static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
}

}  // namespace

double decode_bytes(std::span<const std::int32_t> lengths, std::int32_t kv_heads, std::int32_t head_dim,
                    std::int32_t element_bytes) {
  return 2 * tokens(lengths) * kv_heads * head_dim * element_bytes;
}

double decode_flops(std::span<const std::int32_t> lengths, std::int32_t heads, std::int32_t head_dim) {
  return 4 * tokens(lengths) * heads * head_dim;
}

void check_decode(const DecodeOutput& to, std::int32_t kv_heads, std::int32_t head_dim,
                  std::int32_t page_shift) {
  const auto refuse = [](const std::string& problem) { throw InputError("decode", problem); };
  if (head_dim != 64 && head_dim != 128) refuse(fmt::format("head_dim {}; expected 64 or 128", head_dim));
  if (kv_heads < 1 || to.heads < 1 || to.heads % kv_heads != 0 || to.heads / kv_heads > kMaxGroup) {
    refuse(fmt::format("{} heads with {} KV heads; expected 1 to {} times as many", to.heads, kv_heads,
                       kMaxGroup));
  }
  check_output(to, page_shift);
}

void check_output(const DecodeOutput& to, std::int32_t page_shift) {
  constexpr std::int32_t kMostInGrid = 65535;  // of y and z
  const auto refuse = [](const std::string& problem) { throw InputError("decode", problem); };
  const std::int32_t page = std::int32_t{1} << page_shift;
  if (page < kLeastPage) refuse(fmt::format("pages of {} tokens; expected at least {}", page, kLeastPage));
  if (to.chunk_tokens < page || to.chunk_tokens % page != 0) {
    refuse(fmt::format("chunks of {} tokens; expected whole pages of {}", to.chunk_tokens, page));
  }
  if (to.requests < 0 || to.requests > kMostInGrid || to.splits < 1 || to.splits > kMostInGrid) {
    refuse(fmt::format("{} requests in {} splits; expected at most {} of each", to.requests, to.splits,
                       kMostInGrid));
  }
  if (to.splits > 1 && (to.part_out == nullptr || to.part_state == nullptr)) {
    refuse(fmt::format("{} splits without room for parts", to.splits));
  }
}

}  // namespace pdsim::kernels
