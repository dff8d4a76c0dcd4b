// Which links a transfer between two GPUs crosses.
//
//   GPU ── NVSwitch ── GPU                      peers on one node: NVLink (PCIe where there is none)
//   GPU ── NIC group ── leaf ── spine ── leaf ── NIC group ── GPU      peers on two nodes
//
// The topology is built as a graph, shortest paths are found in it by latency, and the result is
// flattened into the arrays below: a route is then a few array reads, and memory is linear in GPUs.
//
// What is a link, and why
//  - A GPU's rails are one pool per direction, of their summed capacity. EFA sprays packets and libfabric
//    stripes or round-robins operations over the rails, so with healthy rails the pool and the rails
//    agree, at 2 constraints a flow instead of 2 per rail. A failed rail leaves the pool the rest.
//  - A node with fewer NICs than GPUs (p4d) has one pool per NIC, shared by its GPUs.
//  - A leaf's uplinks are one pool per direction (sprayed, not hashed to paths); the spine does not block.
//    Under one leaf there is no such link.
//  - PCIe between GPU and NIC is no link: 64 GB/s on Gen5 x16 against 50 GB/s of rails at most.
//
// Invariants: links come in pairs, 2k away from the GPU (tx, up) and 2k + 1 towards it (rx, down); a
// route crosses no link twice; route(a, b) and route(b, a) are each other's pairs in reverse.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/network/efficiency.hpp"

namespace pdsim {

using GpuId = std::int32_t;  ///< over all nodes, node by node
using LinkId = std::int32_t;

struct NodeSpec {
  std::string name;  ///< "node0", the beginning of its links' names
  std::int32_t gpus = 0;
  double nvlink_rate = 0;          ///< bytes/ns per GPU and direction; 0 = none
  double pcie_rate = 0;            ///< bytes/ns per GPU and direction; between peers where there is no NVLink
  std::int32_t nics = 0;           ///< 0 = the node reaches no other; else divides gpus or is divided by it
  double nic_rate = 0;             ///< line rate of one NIC, bytes/ns per direction
  const Fabric* fabric = nullptr;  ///< of its NICs; required when nics > 0
};

struct FailedRail {
  std::int32_t node = 0;
  std::int32_t gpu = 0;   ///< within the node
  std::int32_t rail = 0;  ///< within the GPU's NICs
};

struct CoreSpec {
  std::int32_t nodes_per_leaf = 0;  ///< 0 = all nodes under one leaf
  double oversubscription = 1;      ///< a leaf's NIC capacity over its uplink capacity, > 0
  Nanos spine_latency = 0;          ///< one way, leaf to spine; the fabric's own latency is end to end
  std::vector<FailedRail> failed_rails = {};
};

enum class Transport : std::uint8_t { none, local, fabric };

inline constexpr int kMaxRouteLinks = 4;

struct Route {
  std::array<LinkId, kMaxRouteLinks> link{};  ///< in the order that data crosses them
  std::int32_t links = 0;
  Transport transport = Transport::none;  ///< none: the two cannot reach each other
  Nanos latency = 0;  ///< one way, of a small operation; a READ's request travels it before the data
};

struct Link {
  double capacity = 0;             ///< bytes/ns
  const Fabric* fabric = nullptr;  ///< whose efficiency a flow pays here; null in the core, which loses none
};

/// The flattened graph. Plain data; build_topology() makes it.
struct Topology {
  std::vector<NodeSpec> nodes;
  std::vector<Link> links;
  std::vector<std::string> link_names;      ///< "node0/gpu3/nvlink-tx", "node0/gpu3/efa-rx", "leaf0/up"
  std::vector<GpuId> first_gpu;             ///< by node, and one past the last
  std::vector<std::int32_t> node_of;        ///< by GPU
  std::vector<std::int32_t> leaf_of;        ///< by node
  std::vector<LinkId> local_tx, fabric_tx;  ///< by GPU; -1 = none; the other direction is + 1
  std::vector<LinkId> leaf_up;              ///< by leaf; -1 = none
  std::vector<Nanos> local_latency;         ///< by GPU: to its NVSwitch
  std::vector<Nanos> leaf_latency;          ///< by GPU: to its leaf
  std::vector<Nanos> spine_latency;         ///< by leaf: to the spine
  std::vector<std::int32_t> rails;          ///< by GPU: healthy rails, of a shared NIC too

  GpuId gpu(std::int32_t node, std::int32_t local) const {
    return first_gpu[static_cast<std::size_t>(node)] + local;
  }
  std::int32_t gpus() const { return static_cast<std::int32_t>(node_of.size()); }
};

/// Builds and flattens the graph. Throws InputError (place, or "place/failed_rails/3") when NICs cannot be
/// shared out evenly, a rail does not exist or all of a GPU's have failed, or a rate is not positive.
/// Leaves are filled in order of node. O((GPUs + nodes) log).
Topology build_topology(std::vector<NodeSpec> nodes, const CoreSpec& core, std::string_view place);

/// The route that data takes from `source` to `destination`. Requires two different GPUs. O(1).
Route route(const Topology& topology, GpuId source, GpuId destination);

}  // namespace pdsim
