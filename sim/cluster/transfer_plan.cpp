#include "sim/cluster/transfer_plan.hpp"

#include <algorithm>

namespace pdsim {

namespace {

// Between GPUs of one node NIXL copies through UCX's cuda_ipc, whatever carries bytes between nodes. An
// operation of up to 8 KiB takes 2.3 us, its thread's share (openucx/ucx#3740); what larger ones take beyond
// that is the link's (network/efficiency.cpp).
constexpr Nanos kWithinNodePost = 2'310;

Nanos stretched(Nanos time, double contention) {
  return contention == 1 ? time : ceil_ns(static_cast<double>(time) * contention);
}

}  // namespace

Layout layout_between(const Deployment& d, const TransferConfig& transfer, std::size_t from, std::size_t to) {
  const PoolPlan& destination = d.pools[to];
  Layout layout = kv_layout(d.model.latent > 0 ? 0 : d.model.kv_heads, d.pools[from].parallelism.tensor,
                            destination.parallelism.tensor, destination.footprint.kv_regions,
                            destination.footprint.kv_bytes_per_token);
  if (transfer.enable_cross_layers_blocks) layout.regions = 1;
  return layout;
}

TransferPlan plan_transfer(const Deployment& d, const TransferConfig& transfer, Op op, std::uint32_t from,
                           std::uint32_t to, std::int32_t blocks, std::int32_t runs, double contention) {
  const WorkerPlan &source = d.workers[from], &destination = d.workers[to];
  const WorkerPlan& poster = op == Op::read ? destination : source;
  const Route path = route(d.topology, source.gpus[0], destination.gpus[0]);
  const bool local = path.transport == Transport::local;
  const Nanos each = stretched(local ? kWithinNodePost : transfer.post_per_descriptor, contention);
  const auto pool = static_cast<std::size_t>(destination.pool);

  TransferPlan plan;
  plan.op = op;
  plan.layout = layout_between(d, transfer, static_cast<std::size_t>(source.pool), pool);
  plan.posters = plan.parts() / plan.layout.remotes(op);
  plan.descriptors = descriptors(plan.layout, op, runs, blocks);
  plan.fixed = stretched(local ? 0 : transfer.post_fixed, contention);
  plan.posting = posting_time(plan.layout, op, plan.fixed, each, plan.descriptors);
  const double rank_bytes = blocks * d.pools[pool].engine.block_size * plan.layout.bytes_per_token;
  const double part_bytes = rank_bytes / plan.layout.sources;
  plan.part_bytes = static_cast<Bytes>(part_bytes);
  plan.descriptor_bytes = part_bytes * plan.layout.remotes(op) / static_cast<double>(plan.descriptors);
  plan.operation_bytes =
      wire_operation_bytes(std::max<Bytes>(1, static_cast<Bytes>(plan.descriptor_bytes)),
                           local ? 1 : d.topology.rails[static_cast<std::size_t>(poster.gpus[0])]);
  if (each > 0) plan.rate_cap = plan.descriptor_bytes / static_cast<double>(each);
  plan.latency =
      op == Op::read ? 2 * path.latency : path.latency;  // a READ's request travels before its data
  return plan;
}

Nanos first_contact_time(const Deployment& d, const TransferConfig& transfer, Op op, std::uint32_t who,
                         std::uint32_t remote, bool notifications_only) {
  const auto mine = static_cast<std::size_t>(d.workers[who].pool);
  const auto theirs = static_cast<std::size_t>(d.workers[remote].pool);
  const Layout layout =
      op == Op::read ? layout_between(d, transfer, theirs, mine) : layout_between(d, transfer, mine, theirs);
  Nanos each = transfer.handshake;
  if (!notifications_only) {
    each += std::int64_t{layout.regions} * d.pools[theirs].blocks * transfer.prep_per_descriptor;
  }
  return layout.remotes(op) * each;
}

double unloaded_rate(const Deployment& d, const TransferPlan& plan, std::uint32_t from, std::uint32_t to) {
  const Route path = route(d.topology, d.workers[from].gpus[0], d.workers[to].gpus[0]);
  double rate = plan.rate_cap;
  for (std::int32_t i = 0; i < path.links; ++i) {
    const Link& link = d.topology.links[static_cast<std::size_t>(path.link[static_cast<std::size_t>(i)])];
    const double share = link.fabric == nullptr ? 1 : efficiency(*link.fabric, plan.op, plan.operation_bytes);
    // A source rank's way out carries its targets' parts at once, a destination rank's way in its sources'.
    const std::int32_t flows = std::max(plan.layout.sources, plan.layout.targets);
    rate = std::min(rate, link.capacity * share / flows);
  }
  return rate * plan.parts();
}

}  // namespace pdsim
