#include "sim/cluster/pull_plan.hpp"

namespace pdsim {

namespace {

// Between GPUs of one node NIXL copies through UCX, whatever carries bytes between nodes.
constexpr const TransferBackend& kWithinNode = kTransferBackends[1];
static_assert(kWithinNode.name == "ucx");

}  // namespace

PullLayout layout_between(const Deployment& d, std::size_t from, std::size_t to) {
  const PoolPlan& reader = d.pools[to];
  return pull_layout(d.model.latent > 0 ? 0 : d.model.kv_heads, d.pools[from].parallelism.tensor,
                     reader.parallelism.tensor, reader.footprint.kv_regions,
                     reader.footprint.kv_bytes_per_token);
}

PullPlan plan_pull(const Deployment& d, const TransferConfig& transfer, std::uint32_t from, std::uint32_t to,
                   std::int32_t blocks, std::int32_t runs) {
  const WorkerPlan &source = d.workers[from], &reader = d.workers[to];
  const Route path = route(d.topology, source.gpus[0], reader.gpus[0]);
  const bool local = path.transport == Transport::local;
  const Nanos each = local ? kWithinNode.post_per_descriptor : transfer.post_per_descriptor;
  const auto pool = static_cast<std::size_t>(reader.pool);

  PullPlan plan;
  plan.layout = layout_between(d, static_cast<std::size_t>(source.pool), pool);
  plan.descriptors = descriptors(plan.layout, runs, blocks);
  plan.fixed = local ? kWithinNode.post_fixed : transfer.post_fixed;
  plan.posting = posting_time(plan.layout, plan.fixed, each, plan.descriptors);
  const double rank_bytes = blocks * d.pools[pool].engine.block_size * plan.layout.bytes_per_token;
  plan.part_bytes = static_cast<Bytes>(rank_bytes / plan.layout.sources);
  plan.descriptor_bytes = rank_bytes / static_cast<double>(plan.descriptors);
  plan.operation_bytes =
      wire_operation_bytes(std::max<Bytes>(1, static_cast<Bytes>(plan.descriptor_bytes)),
                           local ? 1 : d.topology.rails[static_cast<std::size_t>(reader.gpus[0])]);
  if (each > 0) plan.rate_cap = plan.descriptor_bytes / static_cast<double>(each);
  plan.latency = 2 * path.latency;  // a READ's request travels before its data
  return plan;
}

}  // namespace pdsim
