// What moving some blocks asks of the two workers that it is between: the arithmetic of
// transfer/layout.hpp with the deployment's own layout, costs and rails put in. The simulation runs by it,
// `describe` predicts by it.
#pragma once

#include <cstdint>

#include "sim/cluster/deployment.hpp"
#include "sim/network/network.hpp"
#include "sim/transfer/layout.hpp"

namespace pdsim {

/// One batch of READs or WRITEs, as every posting rank runs it.
struct TransferPlan {
  Layout layout;
  Op op = Op::read;
  std::int64_t descriptors = 0;  ///< of one posting rank
  std::int32_t posters = 1;      ///< ranks that post
  double descriptor_bytes = 0;   ///< mean
  Bytes part_bytes = 0;          ///< of one flow: one rank from one other
  Bytes operation_bytes = 0;     ///< on the wire, after striping
  double rate_cap = kUnbounded;  ///< bytes/ns of a flow: descriptors are not posted faster
  Nanos fixed = 0;               ///< before the first descriptor to a remote rank
  Nanos posting = 0;             ///< on the thread that posts, which has it to itself
  Nanos latency = 0;             ///< beyond the flow itself

  std::int32_t parts() const { return layout.ranks * layout.sources; }
  Bytes bytes() const { return part_bytes * parts(); }
  std::int64_t all_descriptors() const { return descriptors * posters; }
  /// When the flows of a posting rank's n-th turn begin, after the posting has begun.
  Nanos flow_start(std::int32_t turn) const { return turn * (posting / layout.remotes(op)) + fixed; }
};

/// How KV goes from workers of pool `from` to workers of pool `to`.
Layout layout_between(const Deployment& deployment, const TransferConfig& transfer, std::size_t from,
                      std::size_t to);

/// `blocks` blocks, in `runs` runs consecutive on both sides, go from worker `from` to worker `to`.
/// `contention` >= 1 stretches the posting (a thread beside the forward thread). Requires
/// blocks >= runs >= 1 and that the two can reach each other. O(1).
TransferPlan plan_transfer(const Deployment& deployment, const TransferConfig& transfer, Op op,
                           std::uint32_t from, std::uint32_t to, std::int32_t blocks, std::int32_t runs,
                           double contention = 1);

/// How long first contact keeps the background thread of worker `who`: one remote rank after the other,
/// each with a handshake and, unless only notifications will go there, the preparation of a descriptor
/// for every block and region of its pool. `op` is what `who` will post there. O(1).
Nanos first_contact_time(const Deployment& deployment, const TransferConfig& transfer, Op op,
                         std::uint32_t who, std::uint32_t remote, bool notifications_only);

/// Bytes/ns at which `plan` would move with nothing else on the links. O(1).
double unloaded_rate(const Deployment& deployment, const TransferPlan& plan, std::uint32_t from,
                     std::uint32_t to);

}  // namespace pdsim
