#include "kernels/mla_decode.hpp"

#include <fmt/format.h>

#include <numeric>

#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

double tokens(std::span<const std::int32_t> lengths) {
  return static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
}

}  // namespace

double mla_decode_bytes(std::span<const std::int32_t> lengths) {
  return tokens(lengths) * kMlaRow * static_cast<double>(sizeof(bf16));
}

double mla_decode_flops(std::span<const std::int32_t> lengths, std::int32_t heads) {
  return tokens(lengths) * heads * 2 * (kMlaRow + kMlaLatent);
}

void check_mla_decode(const MlaDecodeArgs& args) {
  const auto refuse = [](const std::string& problem) { throw InputError("MLA decode", problem); };
  if (args.to.heads < 1 || args.to.heads % kMlaHeads != 0)
    refuse(fmt::format("{} heads; expected a multiple of {}", args.to.heads, kMlaHeads));
  if (args.latent.kv_heads != 1 || args.latent.head_dim != kMlaRow) {
    refuse(fmt::format("{} rows of {} a token; expected one of {}", args.latent.kv_heads,
                       args.latent.head_dim, kMlaRow));
  }
  check_output(args.to, args.latent.page_shift);
}

}  // namespace pdsim::kernels
