#include "sim/cluster/deployment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "models/profile.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

namespace {

// A node of a pool that names a GPU alone: eight of them, as every instance here has.
constexpr std::int32_t kGpusOfANode = 8;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// The instance whose network cards a GPU named alone is taken to have.
const Instance* instance_with(std::string_view gpu) {
  for (const std::string& name : instance_names()) {
    const Instance& instance = find_instance(name, "");
    if (instance.gpu == gpu) return &instance;
  }
  return nullptr;
}

void check_roles(const LoadedScenario& loaded, Deployment& d) {
  std::array<int, 3> count{};
  for (const PoolPlan& pool : d.pools) ++count[static_cast<std::size_t>(pool.role)];
  const auto [prefill, decode, colocated] = count;
  d.disaggregated = colocated == 0;
  if (colocated > 0 && prefill + decode > 0) {
    throw InputError(
        loaded.place("/pools"),
        "colocated pools beside prefill or decode pools: a request goes one way or the other; expected "
        "either only colocated pools or prefill and decode pools");
  }
  if (d.disaggregated && (prefill == 0 || decode == 0)) {
    throw InputError(
        loaded.place("/pools"),
        fmt::format("no {} pool: no request could be served; expected at least one of each, or colocated "
                    "pools",
                    prefill == 0 ? "prefill" : "decode"));
  }
}

PoolPlan plan_pool(const LoadedScenario& loaded, std::size_t index, const Deployment& d) {
  const PoolConfig& config = loaded.scenario.pools[index];
  const std::string at = fmt::format("/pools/{}", index);
  PoolPlan pool;
  pool.name = config.name;
  pool.role = config.role;
  pool.replicas = config.replicas;
  pool.parallelism = {config.tensor_parallel, config.pipeline_parallel, config.data_parallel,
                      config.expert_parallel};
  if (!config.instance.empty()) {
    pool.instance = &find_instance(config.instance, loaded.place(at + "/instance"));
    pool.gpu = &find_gpu(pool.instance->gpu, loaded.place(at + "/instance"));
  } else {
    pool.gpu = &find_gpu(config.gpu, loaded.place(at + "/gpu"));
  }
  check_parallelism(d.model, pool.parallelism, loaded.place(at), d.weights);
  pool.engine = resolve_engine(config.engine, pool.gpu->name, pool.gpu->memory_bytes, d.model.max_position,
                               loaded.place(at + "/engine"));
  return pool;
}

// vLLM's own refusals (config/speculative.py) are kept.
std::optional<Drafter> drafter_of(const LoadedScenario& loaded, const std::string& at, const PoolPlan& pool,
                                  const Deployment& d) {
  if (!pool.engine.speculative) return {};
  const SpeculativeConfig& c = *pool.engine.speculative;
  const auto fail = [&](std::string_view key, const std::string& what) {
    throw InputError(loaded.place(fmt::format("{}/{}", at, key)), what);
  };
  switch (c.method) {
    case SpeculativeMethod::ngram:
      return {};
    case SpeculativeMethod::mtp: {
      const std::int32_t layers = d.model.mtp_layers;
      if (layers == 0) {
        fail("method", fmt::format("is mtp, but {} has no multi-token-prediction layer; expected eagle, "
                                   "eagle3, ngram or draft_model",
                                   d.model.name));
      }
      if (c.num_speculative_tokens % layers != 0) {
        fail("num_speculative_tokens",
             fmt::format("is {}, expected a multiple of the {} multi-token-prediction layers of {} (vLLM)",
                         c.num_speculative_tokens, layers, d.model.name));
      }
      return mtp_drafter(d.model, d.weights);
    }
    case SpeculativeMethod::eagle:
      return eagle_drafter(d.model, 2);  // the last hidden state, and the next token's embedding
    case SpeculativeMethod::eagle3:
      return eagle_drafter(d.model, 3);  // three hidden states
    case SpeculativeMethod::draft_model:
      break;
  }
  Drafter drafter;
  const std::string place = loaded.place(at + "/model");
  drafter.model = load_model(c.model, place);
  drafter.weights = drafter.model.weights_dtype;
  drafter.ends = true;
  check_parallelism(drafter.model, drafter_parallelism(pool.parallelism), place, drafter.weights);
  if (drafter.model.vocab != d.model.vocab) {
    fail("model",
         fmt::format("is {} with a vocabulary of {}, expected a model with the {} tokens of {} (vLLM)",
                     drafter.model.name, drafter.model.vocab, d.model.vocab, d.model.name));
  }
  return drafter;
}

// KV blocks = (memory x utilisation - weights - activations - state of max_num_seqs sequences) / block.
void size_memory(const LoadedScenario& loaded, std::size_t index, Deployment& d) {
  PoolPlan& pool = d.pools[index];
  const std::string at = fmt::format("/pools/{}", index);
  const EngineConfig& e = pool.engine;
  pool.footprint =
      footprint(d.model, pool.parallelism, d.weights, d.kv, e.max_num_batched_tokens, e.max_num_seqs);
  pool.drafter = drafter_of(loaded, at + "/engine/speculative", pool, d);
  if (pool.drafter) {
    const Drafter& a = *pool.drafter;
    const Footprint own = footprint(a.model, drafter_parallelism(pool.parallelism), a.weights, d.kv,
                                    e.max_num_batched_tokens, e.max_num_seqs, a.ends);
    pool.footprint = with_drafter(pool.footprint, own, a.held);
  }
  const Footprint& f = pool.footprint;
  pool.usable_bytes =
      static_cast<Bytes>(static_cast<double>(pool.gpu->memory_bytes) * e.gpu_memory_utilization);
  pool.reserved_bytes = (f.state_bytes_per_sequence + f.window_bytes_per_sequence) * e.max_num_seqs;
  pool.kv_bytes_per_block = f.kv_bytes_per_token * e.block_size;
  const double left = static_cast<double>(pool.usable_bytes) - static_cast<double>(f.weight_bytes) -
                      static_cast<double>(f.activation_bytes) - static_cast<double>(pool.reserved_bytes);
  const std::string needs = fmt::format(
      "{:.1f} GiB of weights, {:.1f} of activations and {:.1f} of per-sequence state against {:.1f} GiB "
      "usable on {} "
      "at tensor_parallel {}",
      static_cast<double>(f.weight_bytes) / kGiB, static_cast<double>(f.activation_bytes) / kGiB,
      static_cast<double>(pool.reserved_bytes) / kGiB, static_cast<double>(pool.usable_bytes) / kGiB,
      pool.gpu->name, pool.parallelism.tensor);
  if (static_cast<double>(f.weight_bytes) > static_cast<double>(pool.usable_bytes)) {
    throw InputError(loaded.place(at),
                     fmt::format("pool '{}': the weights of {} do not fit: {}; expected more GPUs a "
                                 "replica or a smaller weights_dtype",
                                 pool.name, d.model.name, needs));
  }
  const double blocks =
      e.num_gpu_blocks_override > 0 ? e.num_gpu_blocks_override : std::floor(left / pool.kv_bytes_per_block);
  // vLLM keeps block 0 as the null block; one more must be left to serve anything.
  if (!(blocks >= 2)) {
    throw InputError(
        loaded.place(at),
        fmt::format("pool '{}' has no room for KV cache, so no request could use it: {}", pool.name, needs));
  }
  pool.blocks = static_cast<std::int32_t>(std::min(blocks, 2e9)) - 1;
}

// Colocated pools hand nothing over: a node without a known network is fine there.
NodeSpec node_spec(const LoadedScenario& loaded, const PoolPlan& pool, std::size_t number,
                   bool disaggregated) {
  const Instance* instance = pool.instance != nullptr ? pool.instance : instance_with(pool.gpu->name);
  NodeSpec node;
  node.name = fmt::format("node{}", number);
  node.gpus = pool.instance != nullptr ? pool.instance->gpus : kGpusOfANode;
  node.nvlink_rate = pool.gpu->nvlink_bytes_per_ns;
  node.pcie_rate = pool.gpu->pcie_bytes_per_ns;
  const std::string_view fabric = loaded.scenario.network.fabric;
  const bool known = instance != nullptr && (fabric != "efa" || instance->efa_version > 0);
  if (!known && disaggregated) {
    throw InputError(
        loaded.place("/network/fabric"),
        fmt::format("is '{}', but no source states the EFA generation of {}; expected 'roce' or 'tcp', or "
                    "pools on an instance with EFA",
                    fabric, instance != nullptr ? instance->name : pool.gpu->name));
  }
  if (known) {
    node.nics = instance->nics;
    node.nic_rate = instance->nic_bytes_per_ns();
    node.fabric = &find_fabric(fabric, instance->efa_version, loaded.place("/network/fabric"));
    // A GPU named alone has no EC2 instance's cards: one NIC for each, at the fabric's rate together.
    if (pool.instance == nullptr && fabric != "efa") {
      node.nics = kGpusOfANode;
      node.nic_rate = node.fabric->line / kGpusOfANode;
    }
    node.nic_rate *= loaded.scenario.network.bandwidth_scale;
  }
  return node;
}

// Puts what was measured into the nodes whose fabric it is of.
void put_measured(const LoadedScenario& loaded, std::vector<NodeSpec>& nodes, Deployment& d) {
  const std::string& path = loaded.scenario.network.profile;
  if (path.empty()) return;
  const std::string at = loaded.place("/network/profile");
  const NetworkProfile& profile = d.network.emplace(load_network_profile(path, at));
  std::string others;
  for (NodeSpec& node : nodes) {
    if (node.fabric == nullptr) continue;
    if (node.fabric->name != profile.fabric) {
      if (others.find(node.fabric->name) == std::string::npos) {
        others.append(others.empty() ? "" : ", ").append(node.fabric->name);
      }
      continue;
    }
    if (!d.measured_fabric) {
      const auto points = [](const std::vector<RatePoint>& curve) {
        std::vector<CurvePoint> out;
        for (const RatePoint& point : curve) out.push_back({point.bytes, point.rate});
        return out;
      };
      d.measured_fabric = measured_fabric(
          *node.fabric,
          {profile.line, points(profile.write), points(profile.read), profile.operations, profile.latency,
           fmt::format("network profile {}, and pdsim's own where it is silent: {}", profile.name,
                       node.fabric->sentence)});
    }
    node.fabric = &d.measured_fabric->fabric;
  }
  if (d.measured_fabric) return;
  throw InputError(at, fmt::format("is of fabric {}, expected one of the nodes' own: {}", profile.fabric,
                                   others.empty() ? "they have none" : others));
}

/// Where the replicas go: for each pool, each replica, the (node, GPU within it) of its GPUs in rank order.
struct Places {
  std::vector<std::int32_t> pool_of_node;
  std::vector<std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>>> gpus;
};

std::int32_t gpus_of_a_node(const PoolPlan& pool) {
  return pool.instance != nullptr ? pool.instance->gpus : kGpusOfANode;
}

void place_pool(const LoadedScenario& loaded, std::size_t index, const PoolPlan& pool, PlacementPolicy policy,
                Places& places) {
  const std::int32_t per_node = gpus_of_a_node(pool);
  const std::int32_t need = pool.parallelism.gpus();
  const auto first_node = static_cast<std::int32_t>(places.pool_of_node.size());
  auto& replicas = places.gpus[index];
  if (need > per_node && need % per_node != 0) {
    throw InputError(
        loaded.place(fmt::format("/pools/{}", index)),
        fmt::format("a replica of pool '{}' takes {} GPUs, expected at most the {} of a node or whole "
                    "nodes",
                    pool.name, need, per_node));
  }
  if (pool.parallelism.tensor > per_node) {
    throw InputError(loaded.place(fmt::format("/pools/{}/tensor_parallel", index)),
                     fmt::format("is {}, expected at most the {} GPUs that NVLink joins on a node",
                                 pool.parallelism.tensor, per_node));
  }
  const std::int32_t fit = std::max(1, per_node / need);         // replicas on a node
  const std::int32_t nodes_each = std::max(1, need / per_node);  // nodes of a replica
  const std::int32_t groups = (pool.replicas + fit - 1) / fit;   // nodes, or groups of nodes_each
  for (std::int32_t r = 0; r < pool.replicas; ++r) {
    const std::int32_t group = policy == PlacementPolicy::pack ? r / fit : r % groups;
    const std::int32_t slot = policy == PlacementPolicy::pack ? r % fit : r / groups;
    std::vector<std::pair<std::int32_t, std::int32_t>> gpus;
    for (std::int32_t g = 0; g < need; ++g) {
      const std::int32_t local = slot * need + g;
      gpus.emplace_back(first_node + group * nodes_each + local / per_node, local % per_node);
    }
    replicas.push_back(std::move(gpus));
  }
  places.pool_of_node.insert(places.pool_of_node.end(), static_cast<std::size_t>(groups * nodes_each),
                             static_cast<std::int32_t>(index));
}

// Loading has checked names, replicas and numbers of GPUs; what a node is, is known only here.
void place_by_list(const LoadedScenario& loaded, const Deployment& d, Places& places) {
  const auto fail = [&](std::size_t entry, const std::string& what) {
    throw InputError(loaded.place(fmt::format("/placement/{}", entry)), what);
  };
  for (std::size_t p = 0; p < d.pools.size(); ++p) {
    places.gpus[p].resize(static_cast<std::size_t>(d.pools[p].replicas));
  }
  const auto& list = loaded.scenario.placement_list;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const PlacementConfig& entry = list[i];
    const auto found = std::ranges::find(d.pools, entry.pool, &PoolPlan::name);
    const auto p = static_cast<std::size_t>(found - d.pools.begin());
    if (!entry.nics.empty()) fail(i, "a list of NICs is not simulated yet; expected each GPU with its own");
    const auto node = static_cast<std::size_t>(entry.node);
    if (node >= places.pool_of_node.size()) places.pool_of_node.resize(node + 1, -1);
    std::int32_t& owner = places.pool_of_node[node];
    if (owner < 0) owner = static_cast<std::int32_t>(p);
    const PoolPlan& first = d.pools[static_cast<std::size_t>(owner)];
    if (first.instance != found->instance || first.gpu != found->gpu) {
      fail(i, fmt::format("node {} would be of two kinds: that of pool '{}' and that of '{}'", node,
                          first.name, found->name));
    }
    for (const std::int32_t gpu : entry.gpus) {
      if (gpu >= gpus_of_a_node(*found)) {
        fail(i, fmt::format("GPU {} of a node that has {}", gpu, gpus_of_a_node(*found)));
      }
      places.gpus[p][static_cast<std::size_t>(entry.replica)].emplace_back(entry.node, gpu);
    }
  }
  for (std::size_t n = 0; n < places.pool_of_node.size(); ++n) {
    if (places.pool_of_node[n] < 0) {
      throw InputError(loaded.place("/placement"),
                       fmt::format("node {} holds nothing; expected nodes 0, 1, ... without gaps", n));
    }
  }
}

void place(const LoadedScenario& loaded, Deployment& d) {
  const Scenario& s = loaded.scenario;
  Places places;
  places.gpus.resize(d.pools.size());
  if (s.placement == PlacementPolicy::list) {
    place_by_list(loaded, d, places);
  } else {
    for (std::size_t p = 0; p < d.pools.size(); ++p) place_pool(loaded, p, d.pools[p], s.placement, places);
  }

  std::vector<NodeSpec> nodes;
  for (std::size_t n = 0; n < places.pool_of_node.size(); ++n) {
    const auto p = static_cast<std::size_t>(places.pool_of_node[n]);
    const PoolPlan& pool = d.pools[p];
    nodes.push_back(node_spec(loaded, pool, n, d.disaggregated));
    NodePlan node;
    node.instance = pool.instance;
    node.gpu = pool.gpu;
    if (pool.instance != nullptr) {
      const auto own = s.pricing.usd_per_hour.find(pool.instance->name);
      const auto listed = pool.instance->prices.find(s.pricing.plan);
      if (own != s.pricing.usd_per_hour.end()) {
        node.usd_per_hour = own->second;
        node.price_as_of = "scenario";
      } else if (s.pricing.plan != PricingConfig{}.plan) {
        const Price& price = find_price(*pool.instance, s.pricing.plan, loaded.place("/pricing/plan"));
        node.usd_per_hour = price.usd_per_hour;
        node.price_as_of = price.as_of;
      } else if (listed != pool.instance->prices.end()) {
        node.usd_per_hour = listed->second.usd_per_hour;
        node.price_as_of = listed->second.as_of;
      }
    }
    d.nodes.push_back(node);
  }
  put_measured(loaded, nodes, d);
  CoreSpec core;
  core.nodes_per_leaf = s.network.nodes_per_leaf;
  core.oversubscription = s.network.oversubscription;
  for (const auto& rail : s.network.failed_rails)
    core.failed_rails.push_back({rail.node, rail.gpu, rail.rail});
  d.topology = build_topology(std::move(nodes), core, loaded.place("/network"));

  for (std::size_t p = 0; p < d.pools.size(); ++p) {
    const Parallelism& parallel = d.pools[p].parallelism;
    const std::int32_t group = parallel.tensor * parallel.pipeline;
    for (std::size_t r = 0; r < places.gpus[p].size(); ++r) {
      const auto& gpus = places.gpus[p][r];
      for (std::int32_t rank = 0; rank < parallel.data; ++rank) {
        WorkerPlan worker;
        worker.name = fmt::format("{}-{}", d.pools[p].name, r);
        if (parallel.data > 1) worker.name += fmt::format(".dp{}", rank);
        worker.pool = static_cast<std::int32_t>(p);
        worker.first_peer = static_cast<std::uint32_t>(d.workers.size()) - static_cast<std::uint32_t>(rank);
        for (std::int32_t g = 0; g < group; ++g) {
          const auto [node, gpu] = gpus[static_cast<std::size_t>(rank * group + g)];
          worker.gpus.push_back(d.topology.gpu(node, gpu));
          ++d.nodes[static_cast<std::size_t>(node)].gpus_held;
        }
        d.workers.push_back(std::move(worker));
      }
    }
  }
}

// Pull is between one rank and another: pipeline stages that hold different layers, and pairs of
// workers that cannot reach each other, are not simulated.
void check_pairs(const LoadedScenario& loaded, const Deployment& d) {
  if (!d.disaggregated) return;
  for (std::size_t p = 0; p < d.pools.size(); ++p) {
    if (d.pools[p].parallelism.pipeline > 1) {
      throw InputError(loaded.place(fmt::format("/pools/{}/pipeline_parallel", p)),
                       "is more than 1 in a pool that hands KV over, which is not simulated yet; expected 1");
    }
  }
  // A drafter's KV is handed over with the model's.
  const auto drafts_with = [](const PoolPlan& pool) {
    return pool.drafter ? pool.drafter->model.name : std::string("nothing");
  };
  for (std::size_t p = 1; p < d.pools.size(); ++p) {
    if (drafts_with(d.pools[p]) == drafts_with(d.pools[0])) continue;
    throw InputError(
        loaded.place(fmt::format("/pools/{}/engine/speculative", p)),
        fmt::format("pool '{}' would hold KV of {} beside the model's, pool '{}' of {}: they hand KV over, "
                    "expected the same drafter in both, or one without KV (ngram)",
                    d.pools[p].name, drafts_with(d.pools[p]), d.pools[0].name, drafts_with(d.pools[0])));
  }
  for (const PoolPlan& from : d.pools) {
    for (std::size_t p = 0; p < d.pools.size(); ++p) {
      const auto [less, more] = std::minmax(from.parallelism.tensor, d.pools[p].parallelism.tensor);
      if (more % less != 0) {
        throw InputError(
            loaded.place(fmt::format("/pools/{}/tensor_parallel", p)),
            fmt::format("is {} beside {} in pool '{}': KV is handed over between ranks, expected one to "
                        "divide the other",
                        d.pools[p].parallelism.tensor, from.parallelism.tensor, from.name));
      }
    }
  }
  if (loaded.scenario.transfer.enable_cross_layers_blocks && d.model.latent == 0) {
    for (const PoolPlan& pool : d.pools) {
      const auto heads = [&](const PoolPlan& p) { return std::min(p.parallelism.tensor, d.model.kv_heads); };
      if (heads(pool) == heads(d.pools[0])) continue;
      throw InputError(
          loaded.place("/transfer/enable_cross_layers_blocks"),
          fmt::format(
              "is true, but pools '{}' and '{}' hold different numbers of KV heads a GPU; expected equal "
              "tensor_parallel, or false",
              d.pools[0].name, pool.name));
    }
  }
  for (const WorkerPlan& worker : d.workers) {
    for (const GpuId gpu : worker.gpus) {
      if (d.topology.node_of[static_cast<std::size_t>(gpu)] !=
          d.topology.node_of[static_cast<std::size_t>(worker.gpus[0])]) {
        throw InputError(
            loaded.place("/placement"),
            fmt::format("{} lies on two nodes, which is not simulated where KV is handed over", worker.name));
      }
    }
  }
  for (const WorkerPlan& from : d.workers) {
    if (d.pools[static_cast<std::size_t>(from.pool)].role != Role::prefill) continue;
    for (const WorkerPlan& to : d.workers) {
      if (d.pools[static_cast<std::size_t>(to.pool)].role != Role::decode) continue;
      if (route(d.topology, from.gpus[0], to.gpus[0]).transport == Transport::none) {
        throw InputError(loaded.place("/pools"),
                         fmt::format("{} and {} cannot reach each other: their nodes have no "
                                     "network cards in common",
                                     from.name, to.name));
      }
    }
  }
}

}  // namespace

void put_defaults_by_gpu(LoadedScenario& loaded, const Deployment& d) {
  for (std::size_t i = 0; i < d.pools.size(); ++i) {
    const EngineConfig &asked = loaded.scenario.pools[i].engine, &resolved = d.pools[i].engine;
    const std::string at = fmt::format("/pools/{}/engine/", i);
    const std::string by_gpu = fmt::format("vLLM 0.24 on {}", d.pools[i].gpu->name);
    if (asked.max_num_seqs == 0) put_resolved(loaded, at + "max_num_seqs", resolved.max_num_seqs, by_gpu);
    if (asked.max_num_batched_tokens == 0) {
      put_resolved(loaded, at + "max_num_batched_tokens", resolved.max_num_batched_tokens, by_gpu);
    }
    if (asked.max_cudagraph_capture_size == 0) {
      put_resolved(loaded, at + "max_cudagraph_capture_size", resolved.max_cudagraph_capture_size,
                   "twice max_num_seqs, at most 512 (vLLM)");
    }
    if (asked.max_model_len == 0) {
      put_resolved(loaded, at + "max_model_len", resolved.max_model_len,
                   "the model's max_position_embeddings");
    }
  }
}

// What carries tokens to experts on other nodes: EFA as measured on the GPU's generation, or InfiniBand, as
// which any other fabric counts.
std::string expert_fabric(std::string_view fabric, const Gpu& gpu) {
  if (fabric != "efa") return "infiniband";
  return gpu.compute_capability >= 100 ? "efa-b200" : "efa-h100";
}

StepOptions step_options(const EngineConfig& engine, const std::string& place) {
  StepOptions options;
  options.max_num_batched_tokens = engine.max_num_batched_tokens;
  options.async_scheduling = engine.async_scheduling;
  options.graphs = static_cast<Launch>(engine.cudagraph_mode);
  options.max_graph = std::min(engine.max_cudagraph_capture_size, engine.max_num_batched_tokens);
  options.overheads = load_overheads(engine.overheads, place + "/overheads");
  options.kernels = engine.kernels;
  options.fuse_allreduce_rms = engine.fuse_allreduce_rms;
  options.tf32 = engine.float32_matmul_precision == "high";
  return options;
}

Deployment plan_deployment(const LoadedScenario& loaded) {
  const Scenario& s = loaded.scenario;
  Deployment d;
  d.model = load_model(s.model, loaded.place("/model"));
  d.weights = s.weights_dtype.empty() ? d.model.weights_dtype
                                      : dtype_of(s.weights_dtype, loaded.place("/weights_dtype"));
  d.kv = s.kv_dtype.empty() ? d.model.dtype : dtype_of(s.kv_dtype, loaded.place("/kv_dtype"));
  for (std::size_t i = 0; i < s.pools.size(); ++i) d.pools.push_back(plan_pool(loaded, i, d));
  check_roles(loaded, d);
  for (std::size_t i = 0; i < s.pools.size(); ++i) size_memory(loaded, i, d);
  place(loaded, d);
  check_pairs(loaded, d);
  std::map<std::string, std::string> profiles;
  for (std::size_t i = 0; i < s.pools.size(); ++i) {
    PoolPlan& pool = d.pools[i];
    const Profile profile =
        load_profile(s.gpu_profile.empty() ? pool.gpu->name : s.gpu_profile,
                     loaded.place(s.gpu_profile.empty() ? fmt::format("/pools/{}", i) : "/gpu_profile"));
    profiles[profile.label()] = profile.sha256;
    d.datasheet = d.datasheet || profile.datasheet;
    StepOptions options = step_options(pool.engine, loaded.place(fmt::format("/pools/{}/engine", i)));
    options.gpus_per_node = std::max(gpus_of_a_node(pool), pool.gpu->nvlink_gpus);
    options.expert_fabric = expert_fabric(s.network.fabric, *pool.gpu);
    pool.step_model =
        std::make_unique<StepModel>(d.model, pool.parallelism, d.weights, d.kv, *pool.gpu, profile, options);
    if (pool.drafter) {
      StepOptions own = options;
      own.overheads = {};
      own.overheads.rank = options.overheads.rank;
      pool.step_model->draft_with(
          std::make_shared<const StepModel>(pool.drafter->model, drafter_parallelism(pool.parallelism),
                                            pool.drafter->weights, d.kv, *pool.gpu, profile, own),
          pool.engine.speculative->num_speculative_tokens);
    }
    d.sources.add(pool.step_model->sources());
  }
  for (const auto& [name, digest] : profiles) {
    const char* comma = d.profile.empty() ? "" : ", ";
    d.profile += comma + name;
    d.profile_sha256 += comma + digest;
  }
  return d;
}

}  // namespace pdsim
