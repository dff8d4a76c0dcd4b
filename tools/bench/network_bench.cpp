// What the network costs: one max-min solve, and whole flows through start, re-timing and completion.
//
// Traffic: "all-to-all" joins any two nodes of 64, so everything is one component; "pairs" is prefill and
// decode workers of TP 1 handing over between their own GPUs, as many small components.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sim/core/random.hpp"
#include "sim/network/network.hpp"

namespace pdsim {
namespace {

std::vector<NodeSpec> p5en_nodes(std::int32_t count) {
  std::vector<NodeSpec> nodes;
  for (std::int32_t n = 0; n < count; ++n) {
    nodes.push_back({.name = "node" + std::to_string(n),
                     .gpus = 8,
                     .nvlink_rate = 450,
                     .pcie_rate = 64,
                     .nics = 16,
                     .nic_rate = 25,
                     .fabric = &find_fabric("efa", 3, "bench")});
  }
  return nodes;
}

FlowRequest random_flow(Random& random, GpuId sources, GpuId destinations, std::uint64_t tag) {
  FlowRequest request{
      .source = static_cast<GpuId>(random.below(static_cast<std::uint64_t>(sources))),
      .destination = sources + static_cast<GpuId>(random.below(static_cast<std::uint64_t>(destinations))),
      .bytes = static_cast<Bytes>(1e9 * (0.5 + random.uniform())),
      .op = Op::read,
      .operation_bytes = Bytes{4096} << random.below(8),
      .tag = tag};
  if (random.below(2) == 0) request.rate_cap = static_cast<double>(request.operation_bytes) / 2430;
  return request;
}

/// One start or cancellation with `flows` in flight on 64 nodes under 8 leaves at 4:1, solved at once.
void change_all_to_all(benchmark::State& state) {
  const Topology t = build_topology(p5en_nodes(64), {.nodes_per_leaf = 8, .oversubscription = 4}, "bench");
  Network network(t);
  Random random(1, Purpose::arrivals);
  std::vector<FlowId> flows;
  std::uint64_t tag = 0;
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    flows.push_back(network.start(0, random_flow(random, 256, 256, tag++)));
  }
  network.next_completion(0);
  for (auto _ : state) {
    FlowId& victim = flows[random.below(flows.size())];
    network.cancel(0, victim);
    benchmark::DoNotOptimize(network.next_completion(0));
    victim = network.start(0, random_flow(random, 256, 256, tag++));
    benchmark::DoNotOptimize(network.next_completion(0));
  }
  state.counters["changes/s"] =
      benchmark::Counter(2 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
BENCHMARK(change_all_to_all)->Arg(200)->Arg(1000)->Arg(4000)->Unit(benchmark::kMicrosecond);

/// Whole flows, Poisson arrivals: `workers` prefill and as many decode workers of one GPU each, whose rails
/// are busy for `percent` of the time (prompts of Llama-3.1-8B at full prefill speed: 10).
void hand_overs(benchmark::State& state) {
  const auto workers = static_cast<std::int32_t>(state.range(0));
  const std::int32_t nodes = 2 * std::max(1, workers / 8);
  const Topology t = build_topology(p5en_nodes(nodes), {}, "bench");
  std::uint64_t flows = 0;
  double in_flight = 0;
  for (auto _ : state) {
    Network network(t);
    Random random(2, Purpose::arrivals);
    std::vector<Completion> done;
    const double load = static_cast<double>(state.range(1)) / 100;
    const double mean_gap = 1e9 / 37.9 / load / workers;  // a read of 1 GB at 37.9 bytes/ns
    Nanos now = 0, arrival = 0;
    for (std::uint64_t started = 0; started < 20'000;) {
      const Nanos end = network.next_completion(now);
      now = std::min(end, arrival);
      if (end == now) network.complete(now, done);
      if (arrival == now) {
        FlowRequest request = random_flow(random, workers, workers, started++);
        request.operation_bytes = 1 << 20;
        request.rate_cap = 200;
        network.start(now, request);
        arrival += ceil_ns(random.exponential(mean_gap));
        in_flight += static_cast<double>(network.in_flight());
      }
    }
    flows += 20'000;
  }
  state.counters["flows/s"] = benchmark::Counter(static_cast<double>(flows), benchmark::Counter::kIsRate);
  state.counters["in_flight"] = in_flight / static_cast<double>(flows);
}
BENCHMARK(hand_overs)
    ->ArgNames({"workers", "percent"})
    ->Args({8, 10})
    ->Args({8, 50})
    ->Args({128, 10})
    ->Args({128, 50})
    ->Unit(benchmark::kMillisecond);

/// Building and flattening the graph of a cluster of that many nodes.
void build(benchmark::State& state) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(build_topology(p5en_nodes(static_cast<std::int32_t>(state.range(0))),
                                            {.nodes_per_leaf = 8}, "bench"));
  }
}
BENCHMARK(build)->Arg(2)->Arg(256)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace pdsim
