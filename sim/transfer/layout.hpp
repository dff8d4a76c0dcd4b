// What one hand-over moves between the ranks of two workers, and what posting it costs.
//
// KV lies in regions: one a layer for MLA, two (K and V) otherwise, one more for a sparse indexer; with
// cross-layer blocks all layers of a block side by side in one region. A descriptor is a run of blocks of
// one region whose ids increase by one on both sides at once: NIXL merges no more than that, and never
// across regions. Where the two sides hold different numbers of heads (heterogeneous tensor parallelism)
// their slices of a block are not contiguous, and every block is a descriptor of its own.
//
// A READ is posted by the destination's ranks, a WRITE by the source's. A rank posts to one remote rank
// after the other; ranks work side by side, all alike.
#pragma once

#include <cstdint>

#include "sim/core/time.hpp"
#include "sim/network/efficiency.hpp"

namespace pdsim {

struct Layout {
  std::int32_t ranks = 1;      ///< of the destination
  std::int32_t sources = 1;    ///< source ranks that one destination rank's KV comes from
  std::int32_t targets = 1;    ///< destination ranks that one source rank's KV goes to
  std::int32_t regions = 0;    ///< KV regions of a rank
  bool mergeable = true;       ///< consecutive blocks are one descriptor: both sides hold the same heads
  double bytes_per_token = 0;  ///< that one destination rank receives

  /// Remote ranks that a posting rank deals with.
  std::int32_t remotes(Op op) const { return op == Op::read ? sources : targets; }
};

/// `kv_heads` 0 means MLA: the latent is on every rank, so each destination rank gets all of it from one
/// source rank. Otherwise heads are split: a destination rank gets its KV from as many source ranks as
/// hold its heads. Requires that one degree divides the other.
Layout kv_layout(std::int32_t kv_heads, std::int32_t source_tp, std::int32_t destination_tp,
                 std::int32_t regions, double bytes_per_token);

/// The source rank of part `source` of destination rank `rank`.
std::int32_t source_rank(const Layout& layout, std::int32_t source_tp, std::int32_t rank,
                         std::int32_t source);

/// In which turn, from 0, the posting rank comes to that part: remotes(op) turns in all.
std::int32_t turn_of(const Layout& layout, Op op, std::int32_t rank, std::int32_t source);

/// Descriptors that one rank posts for `blocks` blocks in `runs` runs consecutive on both sides.
std::int64_t descriptors(const Layout& layout, Op op, std::int32_t runs, std::int32_t blocks);

/// What a rank's thread spends on posting them: `fixed` for each remote rank, and each descriptor's own.
Nanos posting_time(const Layout& layout, Op op, Nanos fixed, Nanos per_descriptor, std::int64_t descriptors);

}  // namespace pdsim
