#include "sim/network/topology.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <utility>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr LinkId kNoLink = -1;

struct Edge {
  LinkId pair = kNoLink;  ///< its links: pair away from the GPU, pair + 1 towards it
  Nanos latency = 0;
};
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::undirectedS, boost::no_property, Edge>;
using Vertex = boost::graph_traits<Graph>::vertex_descriptor;

/// Vertices: the spine, the leaves, the GPUs, then each node's switch and NIC pools as they come.
struct ClusterGraph {
  static constexpr Vertex kSpine = 0;
  std::size_t leaves;
  Graph edges;

  Vertex leaf(std::size_t l) const { return 1 + l; }
  Vertex gpu(std::size_t g) const { return 1 + leaves + g; }
};

std::size_t index(std::int32_t i) {
  return static_cast<std::size_t>(i);
}

/// Pools of NICs on one node: as many as the scarcer of NICs and GPUs.
struct NicPools {
  std::int32_t count = 0, gpus_each = 0, nics_each = 0;
};

NicPools nic_pools(const NodeSpec& node, std::string_view place) {
  if (node.nics == 0) return {};
  const std::int32_t count = std::min(node.nics, node.gpus);
  if (node.nics % count != 0 || node.gpus % count != 0) {
    throw InputError(
        place, fmt::format("{} has {} NICs for {} GPUs; expected a multiple or a divisor of them", node.name,
                           node.nics, node.gpus));
  }
  return {count, node.gpus / count, node.nics / count};
}

void check_node(const NodeSpec& node, std::string_view place) {
  const auto require = [&](bool good, const char* expected) {
    if (!good) throw InputError(place, node.name + ": expected " + expected);
  };
  require(node.gpus > 0, "at least one GPU");
  require(node.nvlink_rate >= 0 && node.pcie_rate >= 0, "link rates of at least 0");
  require(node.nics >= 0, "a number of NICs of at least 0");
  require(node.nics == 0 || (node.nic_rate > 0 && node.fabric != nullptr),
          "a rate and a fabric for its NICs");
}

/// Healthy rails of each NIC pool, node by node.
std::vector<std::vector<std::int32_t>> healthy_rails(const Topology& t, const CoreSpec& core,
                                                     std::string_view place) {
  std::vector<std::vector<std::int32_t>> healthy;
  for (const NodeSpec& node : t.nodes) {
    const NicPools pools = nic_pools(node, place);
    healthy.emplace_back(index(pools.count), pools.nics_each);
  }
  for (std::size_t i = 0; i < core.failed_rails.size(); ++i) {
    const FailedRail& rail = core.failed_rails[i];
    const std::string where = fmt::format("{}/failed_rails/{}", place, i);
    const auto require = [&](std::int32_t value, std::int32_t count, std::string_view what) {
      if (value < 0 || value >= count) {
        throw InputError(where, fmt::format("{} {}; expected 0 to {}", what, value, count - 1));
      }
    };
    require(rail.node, static_cast<std::int32_t>(t.nodes.size()), "node");
    const NodeSpec& node = t.nodes[index(rail.node)];
    if (node.nics == 0) {
      throw InputError(where, fmt::format("{} has no NICs; expected a node that has", node.name));
    }
    const NicPools pools = nic_pools(node, place);
    require(rail.gpu, node.gpus, "GPU");
    require(rail.rail, pools.nics_each, "rail");
    for (std::size_t j = 0; j < i; ++j) {
      const FailedRail& other = core.failed_rails[j];
      if (other.node == rail.node && other.gpu / pools.gpus_each == rail.gpu / pools.gpus_each &&
          other.rail == rail.rail) {
        throw InputError(where, fmt::format("the same rail as failed_rails/{}", j));
      }
    }
    if (--healthy[index(rail.node)][index(rail.gpu / pools.gpus_each)] == 0) {
      throw InputError(where, fmt::format("the last rail of {} GPU {}; expected at least one healthy rail",
                                          node.name, rail.gpu));
    }
  }
  return healthy;
}

LinkId add_pair(Topology& t, double capacity, const Fabric* fabric, std::string_view name,
                std::string_view away, std::string_view towards) {
  const auto pair = static_cast<LinkId>(t.links.size());
  t.links.insert(t.links.end(), 2, Link{capacity, fabric});
  t.link_names.push_back(fmt::format("{}{}", name, away));
  t.link_names.push_back(fmt::format("{}{}", name, towards));
  return pair;
}

/// Adds the links and joins their ends.
ClusterGraph build_graph(Topology& t, const CoreSpec& core,
                         const std::vector<std::vector<std::int32_t>>& healthy, std::string_view place) {
  const std::size_t leaves = index(t.leaf_of.back()) + 1;
  ClusterGraph cluster{leaves, Graph(1 + leaves + index(t.gpus()))};
  const auto join = [&](Vertex a, Vertex b, LinkId pair, Nanos latency) {
    boost::add_edge(a, b, Edge{pair, latency}, cluster.edges);
  };

  std::vector<double> line(leaves, 0.0);  // of the NICs under each leaf, failed or not
  for (std::size_t n = 0; n < t.nodes.size(); ++n) {
    line[index(t.leaf_of[n])] += t.nodes[n].nics * t.nodes[n].nic_rate;
  }
  for (std::size_t l = 0; l < leaves; ++l) {
    const LinkId pair = leaves == 1 ? kNoLink
                                    : add_pair(t, line[l] / core.oversubscription, nullptr,
                                               fmt::format("leaf{}", l), "/up", "/down");
    t.leaf_up.push_back(pair);
    join(cluster.leaf(l), ClusterGraph::kSpine, pair, core.spine_latency);
  }
  for (std::size_t n = 0; n < t.nodes.size(); ++n) {
    const NodeSpec& node = t.nodes[n];
    const auto gpu = [&](std::int32_t local) { return cluster.gpu(index(t.first_gpu[n] + local)); };
    const Fabric& peers = node.nvlink_rate > 0 ? kNvlink : kPcie;
    const double peer_rate = node.nvlink_rate > 0 ? node.nvlink_rate : node.pcie_rate;
    if (node.gpus > 1 && peer_rate > 0) {
      const Vertex island = boost::add_vertex(cluster.edges);
      for (std::int32_t g = 0; g < node.gpus; ++g) {
        const std::string name = fmt::format("{}/gpu{}/{}", node.name, g, peers.label);
        join(gpu(g), island, add_pair(t, peer_rate, &peers, name, "-tx", "-rx"), peers.latency / 2);
      }
    }
    const NicPools pools = nic_pools(node, place);
    for (std::int32_t p = 0; p < pools.count; ++p) {
      const std::int32_t first = p * pools.gpus_each, last = first + pools.gpus_each - 1;
      const double rate = std::min(healthy[n][index(p)] * node.nic_rate,
                                   node.fabric->gpu_limit * static_cast<double>(pools.gpus_each));
      const std::string sharers = last > first ? fmt::format("{}-{}", first, last) : fmt::to_string(first);
      const std::string name = fmt::format("{}/gpu{}/{}", node.name, sharers, node.fabric->label);
      const Vertex pool = boost::add_vertex(cluster.edges);
      join(pool, cluster.leaf(index(t.leaf_of[n])), add_pair(t, rate, node.fabric, name, "-tx", "-rx"),
           node.fabric->latency / 2);
      for (std::int32_t g = first; g <= last; ++g) join(gpu(g), pool, kNoLink, 0);
    }
  }
  return cluster;
}

/// Reads each GPU's ways out of the graph. Shortest paths from the spine are the ways up: two GPUs on
/// different nodes meet where theirs do, at their leaf or at the spine.
void flatten(Topology& t, const ClusterGraph& cluster) {
  const Graph& graph = cluster.edges;
  std::vector<Vertex> towards_spine(boost::num_vertices(graph));
  std::vector<Nanos> distance(boost::num_vertices(graph));
  boost::dijkstra_shortest_paths(graph, ClusterGraph::kSpine,
                                 boost::weight_map(boost::get(&Edge::latency, graph))
                                     .predecessor_map(towards_spine.data())
                                     .distance_map(distance.data())
                                     .distance_inf(kNever));

  for (std::size_t l = 0; l < cluster.leaves; ++l) t.spine_latency.push_back(distance[cluster.leaf(l)]);
  const std::size_t gpus = index(t.gpus());
  t.local_tx.assign(gpus, kNoLink);
  t.fabric_tx.assign(gpus, kNoLink);
  t.local_latency.assign(gpus, 0);
  t.leaf_latency.assign(gpus, 0);
  for (std::size_t g = 0; g < gpus; ++g) {
    // A GPU's own edges with a link lead to its island; those without, to its NIC pool.
    for (auto [edge, end] = boost::out_edges(cluster.gpu(g), graph); edge != end; ++edge) {
      if (graph[*edge].pair == kNoLink) continue;
      t.local_tx[g] = graph[*edge].pair;
      t.local_latency[g] = graph[*edge].latency;
    }
    if (distance[cluster.gpu(g)] == kNever) continue;  // no NICs
    const Vertex leaf = cluster.leaf(index(t.leaf_of[index(t.node_of[g])]));
    for (Vertex v = cluster.gpu(g); v != leaf; v = towards_spine[v]) {
      const LinkId pair = graph[boost::edge(v, towards_spine[v], graph).first].pair;
      if (pair != kNoLink) t.fabric_tx[g] = pair;
    }
    t.leaf_latency[g] = distance[cluster.gpu(g)] - distance[leaf];
  }
}

}  // namespace

Topology build_topology(std::vector<NodeSpec> nodes, const CoreSpec& core, std::string_view place) {
  if (nodes.empty()) throw InputError(place, "no nodes; expected at least one");
  if (!(core.oversubscription > 0)) {
    throw InputError(fmt::format("{}/oversubscription", place),
                     fmt::format("{}; expected more than 0", core.oversubscription));
  }
  if (core.spine_latency < 0) throw InputError(place, "a negative spine latency; expected at least 0");
  for (const NodeSpec& node : nodes) check_node(node, place);

  Topology t;
  t.nodes = std::move(nodes);
  const auto count = static_cast<std::int32_t>(t.nodes.size());
  const std::int32_t per_leaf = core.nodes_per_leaf > 0 ? core.nodes_per_leaf : count;
  t.first_gpu.push_back(0);
  for (std::int32_t n = 0; n < count; ++n) {
    const std::int32_t gpus = t.nodes[index(n)].gpus;
    t.first_gpu.push_back(t.first_gpu.back() + gpus);
    t.node_of.insert(t.node_of.end(), index(gpus), n);
    t.leaf_of.push_back(n / per_leaf);
  }
  const auto healthy = healthy_rails(t, core, place);
  flatten(t, build_graph(t, core, healthy, place));
  for (std::int32_t n = 0; n < count; ++n) {
    const NicPools pools = nic_pools(t.nodes[index(n)], place);
    for (std::int32_t g = 0; g < t.nodes[index(n)].gpus; ++g) {
      t.rails.push_back(pools.count == 0 ? 0 : healthy[index(n)][index(g / pools.gpus_each)]);
    }
  }
  return t;
}

Route route(const Topology& t, GpuId source, GpuId destination) {
  PDSIM_CHECK(source != destination, "a route needs two different GPUs");
  const std::size_t s = index(source), d = index(destination);
  const std::size_t s_node = index(t.node_of[s]), d_node = index(t.node_of[d]);
  Route r;
  const auto cross = [&](LinkId link) { r.link[index(r.links++)] = link; };
  if (s_node == d_node && t.local_tx[s] != kNoLink) {
    r.transport = Transport::local;
    r.latency = t.local_latency[s] + t.local_latency[d];
    cross(t.local_tx[s]);
    cross(t.local_tx[d] + 1);
    return r;
  }
  if (t.fabric_tx[s] == kNoLink || t.fabric_tx[d] == kNoLink) return r;
  r.transport = Transport::fabric;
  r.latency = t.leaf_latency[s] + t.leaf_latency[d];
  cross(t.fabric_tx[s]);
  const std::size_t s_leaf = index(t.leaf_of[s_node]), d_leaf = index(t.leaf_of[d_node]);
  if (s_leaf != d_leaf) {
    r.latency += t.spine_latency[s_leaf] + t.spine_latency[d_leaf];
    cross(t.leaf_up[s_leaf]);
    cross(t.leaf_up[d_leaf] + 1);
  }
  cross(t.fabric_tx[d] + 1);
  return r;
}

}  // namespace pdsim
