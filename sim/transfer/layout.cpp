#include "sim/transfer/layout.hpp"

#include <algorithm>

namespace pdsim {

Layout kv_layout(std::int32_t kv_heads, std::int32_t source_tp, std::int32_t destination_tp,
                 std::int32_t regions, double bytes_per_token) {
  Layout layout;
  layout.ranks = destination_tp;
  layout.regions = regions;
  layout.bytes_per_token = bytes_per_token;
  if (kv_heads > 0) {
    // More ranks than heads replicate heads: the parts that differ are at most kv_heads.
    const std::int32_t source_parts = std::min(source_tp, kv_heads);
    const std::int32_t destination_parts = std::min(destination_tp, kv_heads);
    layout.sources = std::max(1, source_parts / destination_parts);
    layout.mergeable = source_parts == destination_parts;
  }
  layout.targets = std::max(1, layout.ranks * layout.sources / source_tp);
  return layout;
}

std::int32_t source_rank(const Layout& layout, std::int32_t source_tp, std::int32_t rank,
                         std::int32_t source) {
  // Ranks cover the heads in order on both sides, so position in the order is what they share.
  const std::int64_t parts = std::int64_t{layout.ranks} * layout.sources;
  return static_cast<std::int32_t>((std::int64_t{rank} * layout.sources + source) * source_tp / parts);
}

std::int32_t turn_of(const Layout& layout, Op op, std::int32_t rank, std::int32_t source) {
  return op == Op::read ? source : (rank * layout.sources + source) % layout.targets;
}

std::int64_t descriptors(const Layout& layout, Op op, std::int32_t runs, std::int32_t blocks) {
  return std::int64_t{layout.regions} * layout.remotes(op) * (layout.mergeable ? runs : blocks);
}

Nanos posting_time(const Layout& layout, Op op, Nanos fixed, Nanos per_descriptor, std::int64_t descriptors) {
  return layout.remotes(op) * fixed + descriptors * per_descriptor;
}

}  // namespace pdsim
