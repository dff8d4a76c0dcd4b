#include "kernels/kv_layout.cuh"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

constexpr std::int64_t kAligned = 16;

void require_aligned(std::int64_t bytes, const char* what) {
  if (bytes % kAligned == 0) return;
  throw InputError("KV copy",
                   fmt::format("{} is {} bytes; expected a multiple of {}", what, bytes, kAligned));
}

}  // namespace

KvLayout nhd(std::uint8_t* base, const std::int32_t* pages, std::int64_t pages_held, std::int32_t page_tokens,
             std::int32_t first_head, std::int32_t heads, std::int64_t head_bytes) {
  const std::int64_t token = heads * head_bytes, page = page_tokens * token;
  return {base,       pages, page_tokens, first_head, heads,
          head_bytes, token, head_bytes,  page,       pages_held * page};
}

KvLayout hnd(std::uint8_t* base, const std::int32_t* pages, std::int64_t pages_held, std::int32_t page_tokens,
             std::int32_t first_head, std::int32_t heads, std::int64_t head_bytes) {
  const std::int64_t head = page_tokens * head_bytes, page = heads * head;
  return {base, pages, page_tokens, first_head, heads, head_bytes, head_bytes, head, page, pages_held * page};
}

KvCopy make_copy(const KvLayout& from, const KvLayout& to, std::int32_t tokens, std::int32_t regions) {
  if (from.head_bytes != to.head_bytes) {
    throw InputError("KV copy", fmt::format("vectors are {} bytes here and {} there; expected one format",
                                            from.head_bytes, to.head_bytes));
  }
  for (const KvLayout* side : {&from, &to}) {
    require_aligned(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(side->base)), "an address");
    require_aligned(side->head_bytes, "a vector");  // and with it every stride that nhd() and hnd() make
  }
  KvCopy copy{from, to, tokens, regions};
  copy.first_head = std::max(from.first_head, to.first_head);
  copy.heads = std::min(from.first_head + from.heads, to.first_head + to.heads) - copy.first_head;
  if (copy.heads <= 0) {
    throw InputError("KV copy", fmt::format("heads {} to {} and {} to {}: no head is in both ranks",
                                            from.first_head, from.first_head + from.heads - 1, to.first_head,
                                            to.first_head + to.heads - 1));
  }
  if (from.head_stride == from.head_bytes && to.head_stride == to.head_bytes) copy.run_heads = copy.heads;
  const std::int64_t token = copy.run_heads * from.head_bytes;
  if (from.token_stride == token && to.token_stride == token)
    copy.run_tokens = static_cast<std::int32_t>(std::gcd(from.page_tokens.by, to.page_tokens.by));
  if (double{1} * tokens * copy.heads * regions > 0x7fffffff)
    throw InputError("KV copy", "more vectors than 31 bits can count; expected several copies");
  copy.head_groups = copy.heads / copy.run_heads;
  copy.token_groups = std::max((tokens + copy.run_tokens - 1) / copy.run_tokens, 1);
  return copy;
}

}  // namespace pdsim::kernels
