// Theory: a route is the way up to where the two GPUs meet and down again: 2 links under one switch or leaf,
// 4 across the spine. Latencies add along it. Pools have the summed rate of their healthy rails.
#include "sim/network/topology.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tests/network/nodes.hpp"

namespace pdsim {
namespace {

using testing::nodes;
using testing::p5en;
using Names = std::vector<std::string>;

Names names(const Topology& t, const Route& r) {
  Names out;
  for (std::int32_t i = 0; i < r.links; ++i) {
    out.push_back(t.link_names[static_cast<std::size_t>(r.link[static_cast<std::size_t>(i)])]);
  }
  return out;
}

double capacity(const Topology& t, const std::string& name) {
  for (std::size_t l = 0; l < t.links.size(); ++l) {
    if (t.link_names[l] == name) return t.links[l].capacity;
  }
  return -1;
}

std::string error_of(const std::vector<NodeSpec>& specs, const CoreSpec& core) {
  try {
    build_topology(specs, core, "a.json: /network");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Topology, PeersOnOneNodeUseNvlink) {
  const Topology t = build_topology(nodes(2, p5en()), {}, "test");
  const Route r = route(t, t.gpu(1, 2), t.gpu(1, 5));
  EXPECT_EQ(r.transport, Transport::local);
  EXPECT_EQ(names(t, r), (Names{"node1/gpu2/nvlink-tx", "node1/gpu5/nvlink-rx"}));
  EXPECT_EQ(r.latency, 5'300);
  EXPECT_EQ(capacity(t, "node1/gpu2/nvlink-tx"), 450);
}

TEST(Topology, NodesUnderOneLeafMeetThere) {
  const Topology t = build_topology(nodes(2, p5en()), {}, "test");
  const Route r = route(t, t.gpu(0, 3), t.gpu(1, 0));
  EXPECT_EQ(r.transport, Transport::fabric);
  EXPECT_EQ(names(t, r), (Names{"node0/gpu3/efa-tx", "node1/gpu0/efa-rx"}));
  EXPECT_EQ(r.latency, 17'300);
  EXPECT_EQ(capacity(t, "node0/gpu3/efa-tx"), 50);
  EXPECT_EQ(t.rails[static_cast<std::size_t>(t.gpu(0, 3))], 2);
  EXPECT_EQ(capacity(t, "leaf0/up"), -1) << "one leaf: nothing above it";
}

TEST(Topology, LeavesMeetAtTheSpine) {
  const CoreSpec core{.nodes_per_leaf = 2, .oversubscription = 4, .spine_latency = 500};
  const Topology t = build_topology(nodes(5, p5en()), core, "test");
  EXPECT_EQ(names(t, route(t, t.gpu(0, 0), t.gpu(1, 0))), (Names{"node0/gpu0/efa-tx", "node1/gpu0/efa-rx"}));
  const Route r = route(t, t.gpu(3, 7), t.gpu(0, 1));
  EXPECT_EQ(names(t, r), (Names{"node3/gpu7/efa-tx", "leaf1/up", "leaf0/down", "node0/gpu1/efa-rx"}));
  EXPECT_EQ(r.latency, 17'300 + 2 * 500);
  EXPECT_EQ(capacity(t, "leaf1/up"), 2 * 400 / 4.0);
  EXPECT_EQ(capacity(t, "leaf2/down"), 400 / 4.0) << "the last leaf has one node";
}

TEST(Topology, AFailedRailLeavesThePoolTheRest) {
  const Topology t = build_topology(nodes(2, p5en()), {.failed_rails = {{1, 4, 0}}}, "test");
  EXPECT_EQ(capacity(t, "node1/gpu4/efa-tx"), 25);
  EXPECT_EQ(capacity(t, "node1/gpu4/efa-rx"), 25);
  EXPECT_EQ(capacity(t, "node1/gpu5/efa-rx"), 50);
  EXPECT_EQ(t.rails[static_cast<std::size_t>(t.gpu(1, 4))], 1);
}

// p4d.24xlarge: 4 NICs for 8 GPUs, two share one.
TEST(Topology, FewerNicsThanGpusAreShared) {
  auto specs = nodes(2, find_fabric("efa", 1, "test"));
  for (NodeSpec& node : specs) node.nics = 4, node.nic_rate = 12.5;
  const Topology t = build_topology(specs, {}, "test");
  EXPECT_EQ(names(t, route(t, t.gpu(0, 5), t.gpu(1, 0))),
            (Names{"node0/gpu4-5/efa-tx", "node1/gpu0-1/efa-rx"}));
  EXPECT_EQ(capacity(t, "node0/gpu4-5/efa-tx"), 12.5);
}

TEST(Topology, WithoutNvlinkPeersUsePcie) {
  auto specs = nodes(1, p5en());
  specs[0].nvlink_rate = 0;
  const Topology t = build_topology(specs, {}, "test");
  EXPECT_EQ(names(t, route(t, 0, 1)), (Names{"node0/gpu0/pcie-tx", "node0/gpu1/pcie-rx"}));
  EXPECT_EQ(capacity(t, "node0/gpu0/pcie-tx"), 64);
}

TEST(Topology, WithoutAnyPeerLinkTheyMeetAtTheLeaf) {
  auto specs = nodes(1, p5en());
  specs[0].nvlink_rate = specs[0].pcie_rate = 0;
  const Topology t = build_topology(specs, {}, "test");
  EXPECT_EQ(names(t, route(t, 0, 1)), (Names{"node0/gpu0/efa-tx", "node0/gpu1/efa-rx"}));
}

TEST(Topology, WithoutNicsThereIsNoRouteToAnotherNode) {
  auto specs = nodes(2, p5en());
  specs[1].nics = 0;
  const Topology t = build_topology(specs, {}, "test");
  EXPECT_EQ(route(t, 0, 8).transport, Transport::none);
  EXPECT_EQ(route(t, 8, 0).links, 0);
  EXPECT_EQ(route(t, 8, 9).transport, Transport::local);
}

TEST(Topology, TcpDoesNotReachTheLine) {
  const Topology t = build_topology(nodes(2, find_fabric("tcp", 0, "test")), {}, "test");
  EXPECT_EQ(capacity(t, "node0/gpu0/tcp-tx"), 0.3);
  EXPECT_EQ(route(t, 0, 8).latency, 50'000);
}

// Every pair of a mixed cluster: no link twice, and the way back is the pairs in reverse.
TEST(Topology, RoutesAreSymmetric) {
  auto specs = nodes(4, p5en());
  specs[1].nics = 4;
  specs[2].nvlink_rate = 0;
  specs[3].gpus = 4;
  const Topology t = build_topology(specs, {.nodes_per_leaf = 2}, "test");
  ASSERT_EQ(t.gpus(), 28);
  for (GpuId a = 0; a < t.gpus(); ++a) {
    for (GpuId b = 0; b < t.gpus(); ++b) {
      if (a == b) continue;
      const Route there = route(t, a, b), back = route(t, b, a);
      ASSERT_NE(there.transport, Transport::none);
      ASSERT_EQ(there.links, back.links);
      ASSERT_EQ(there.latency, back.latency);
      for (std::int32_t i = 0; i < there.links; ++i) {
        const auto forward = static_cast<std::size_t>(i),
                   reverse = static_cast<std::size_t>(there.links - 1 - i);
        EXPECT_EQ(there.link[forward] ^ 1, back.link[reverse]);
        for (std::size_t j = 0; j < forward; ++j) EXPECT_NE(there.link[j], there.link[forward]);
      }
    }
  }
}

TEST(Topology, WhatCannotBeBuilt) {
  const auto specs = nodes(2, p5en());
  EXPECT_EQ(error_of({}, {}), "a.json: /network: no nodes; expected at least one");
  EXPECT_EQ(error_of(specs, {.oversubscription = 0}),
            "a.json: /network/oversubscription: 0; expected more than 0");
  EXPECT_EQ(error_of(specs, {.failed_rails = {{0, 0, 0}, {2, 0, 0}}}),
            "a.json: /network/failed_rails/1: node 2; expected 0 to 1");
  EXPECT_EQ(error_of(specs, {.failed_rails = {{0, 8, 0}}}),
            "a.json: /network/failed_rails/0: GPU 8; expected 0 to 7");
  EXPECT_EQ(error_of(specs, {.failed_rails = {{0, 0, 2}}}),
            "a.json: /network/failed_rails/0: rail 2; expected 0 to 1");
  EXPECT_EQ(error_of(specs, {.failed_rails = {{0, 3, 1}, {0, 3, 1}}}),
            "a.json: /network/failed_rails/1: the same rail as failed_rails/0");
  EXPECT_EQ(
      error_of(specs, {.failed_rails = {{0, 3, 1}, {0, 3, 0}}}),
      "a.json: /network/failed_rails/1: the last rail of node0 GPU 3; expected at least one healthy rail");
  auto odd = specs;
  odd[1].nics = 12;
  EXPECT_EQ(error_of(odd, {}),
            "a.json: /network: node1 has 12 NICs for 8 GPUs; expected a multiple or a divisor of them");
  odd[1].nics = 0;
  EXPECT_EQ(error_of(odd, {.failed_rails = {{1, 0, 0}}}),
            "a.json: /network/failed_rails/0: node1 has no NICs; expected a node that has");
  odd[1].nics = 16, odd[1].nic_rate = 0;
  EXPECT_EQ(error_of(odd, {}), "a.json: /network: node1: expected a rate and a fabric for its NICs");
}

// 2,048 GPUs are flattened once, in memory linear in them.
TEST(Topology, LargeClusters) {
  const Topology t = build_topology(nodes(256, p5en()), {.nodes_per_leaf = 8}, "test");
  EXPECT_EQ(t.gpus(), 2048);
  EXPECT_EQ(t.links.size(), 2048u * 4 + 32 * 2);
  EXPECT_EQ(route(t, 0, 2047).links, 4);
}

}  // namespace
}  // namespace pdsim
