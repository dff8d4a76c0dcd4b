#include "sim/transfer/pull.hpp"

#include <algorithm>

#include "sim/core/error.hpp"

namespace pdsim {

PullLayout pull_layout(std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp,
                       std::int32_t regions, double decode_bytes_per_token) {
  PullLayout layout;
  layout.ranks = decode_tp;
  layout.regions = regions;
  layout.bytes_per_token = decode_bytes_per_token;
  if (kv_heads == 0) return layout;
  // More ranks than heads replicate heads: the parts that differ are at most kv_heads.
  const std::int32_t prefill_parts = std::min(prefill_tp, kv_heads);
  const std::int32_t decode_parts = std::min(decode_tp, kv_heads);
  layout.sources = std::max(1, prefill_parts / decode_parts);
  layout.mergeable = prefill_parts == decode_parts;
  return layout;
}

std::int32_t source_rank(const PullLayout& layout, std::int32_t prefill_tp, std::int32_t rank,
                         std::int32_t source) {
  // Ranks cover the heads in order on both sides, so position in the order is what they share.
  const std::int64_t parts = std::int64_t{layout.ranks} * layout.sources;
  return static_cast<std::int32_t>((std::int64_t{rank} * layout.sources + source) * prefill_tp / parts);
}

std::int64_t descriptors(const PullLayout& layout, std::int32_t runs, std::int32_t blocks) {
  return std::int64_t{layout.regions} * layout.sources * (layout.mergeable ? runs : blocks);
}

Nanos posting_time(const PullLayout& layout, Nanos fixed, Nanos per_descriptor, std::int64_t descriptors) {
  return layout.sources * fixed + descriptors * per_descriptor;
}

}  // namespace pdsim
