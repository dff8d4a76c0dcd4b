// What one pull asks of the two machines it is between: the arithmetic of transfer/pull.hpp with the
// deployment's own layout, costs and rails put in. The simulation runs by it, `describe` predicts by it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sim/cluster/deployment.hpp"
#include "sim/network/network.hpp"
#include "sim/transfer/pull.hpp"

namespace pdsim {

/// One pull, as every decode rank runs it.
struct PullPlan {
  PullLayout layout;
  std::int64_t descriptors = 0;  ///< of one rank
  double descriptor_bytes = 0;   ///< mean
  Bytes part_bytes = 0;          ///< of one flow: one rank from one source
  Bytes operation_bytes = 0;     ///< on the wire, after striping
  double rate_cap = kUnbounded;  ///< bytes/ns: descriptors are not posted faster
  Nanos fixed = 0;               ///< before the first descriptor of a source
  Nanos posting = 0;             ///< on the forward thread
  Nanos latency = 0;             ///< beyond the flow itself

  std::int32_t parts() const { return layout.ranks * layout.sources; }
  /// When the flows from a rank's n-th source begin, after the posting has begun.
  Nanos flow_start(std::int32_t source) const { return source * (posting / layout.sources) + fixed; }
};

/// How workers of pool `to` read from workers of pool `from`.
PullLayout layout_between(const Deployment& deployment, std::size_t from, std::size_t to);

/// Worker `to` reads `blocks` blocks, in `runs` runs consecutive on both sides, from worker `from`.
/// Requires blocks >= runs >= 1 and that the two can reach each other. O(1).
PullPlan plan_pull(const Deployment& deployment, const TransferConfig& transfer, std::uint32_t from,
                   std::uint32_t to, std::int32_t blocks, std::int32_t runs);

}  // namespace pdsim
