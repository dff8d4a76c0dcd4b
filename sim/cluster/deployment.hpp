// What a scenario means on real machines: which GPUs each worker has, what fits in them, what they cost.
//
// Everything that can be known before the first request arrives is decided here, and a configuration
// that cannot work is an InputError that names the field of the scenario.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/cost_sources.hpp"
#include "models/drafter.hpp"
#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/network_profile.hpp"
#include "models/step_model.hpp"
#include "sim/network/topology.hpp"
#include "sim/scenario/load.hpp"

namespace pdsim {

/// One pool with everything looked up.
struct PoolPlan {
  std::string name;
  Role role = Role::colocated;
  EngineConfig engine;  ///< no field left to a default
  const Gpu* gpu = nullptr;
  const Instance* instance = nullptr;  ///< null when the scenario names a GPU alone
  Parallelism parallelism;
  std::int32_t replicas = 0;
  std::optional<Drafter> drafter;  ///< of speculative decoding; none = nothing is drafted, or by the host
  Footprint footprint;             ///< the drafter's included
  Bytes usable_bytes = 0;          ///< memory x gpu_memory_utilization
  Bytes reserved_bytes = 0;        ///< state and windows of max_num_seqs sequences
  double kv_bytes_per_block = 0;   ///< of one GPU
  std::int32_t blocks = 0;         ///< that requests can use: vLLM keeps one as its null block
  std::unique_ptr<StepModel> step_model;

  std::int64_t kv_tokens() const { return std::int64_t{blocks} * engine.block_size; }
};

/// One engine: a tensor-parallel group with its own scheduler and block pool.
struct WorkerPlan {
  std::string name;  ///< "prefill-0"
  std::int32_t pool = 0;
  std::vector<GpuId> gpus;       ///< by tensor-parallel rank
  std::uint32_t first_peer = 0;  ///< of its replica's data-parallel ranks, which follow one another
};

struct NodePlan {
  const Instance* instance = nullptr;  ///< null: no price
  const Gpu* gpu = nullptr;
  std::int32_t gpus_held = 0;          ///< by the pools
  std::optional<double> usd_per_hour;  ///< of the whole node
  std::string price_as_of;
};

struct Deployment {
  ModelSpec model;
  Dtype weights{}, kv{};
  std::vector<PoolPlan> pools;
  std::vector<WorkerPlan> workers;
  std::vector<NodePlan> nodes;
  Topology topology;
  std::string profile, profile_sha256;                    ///< names and digests of the fitted profiles in use
  std::optional<NetworkProfile> network;                  ///< what the scenario's network.profile holds
  std::shared_ptr<const MeasuredFabric> measured_fabric;  ///< the topology's, where it has one of that kind
  bool datasheet = false;                                 ///< one of them is another GPU's, scaled
  CostSources sources;                                    ///< of those that are calibrations
  bool disaggregated = false;
};

/// Looks up models, GPUs and prices, places the pools, computes what fits. Cost: the step models'
/// tables, some milliseconds a pool. InputError at the scenario's own place for whatever cannot work:
/// an unknown name, a degree of parallelism that does not divide, weights that do not fit, pools that
/// no request could use, replicas that no node holds.
Deployment plan_deployment(const LoadedScenario& loaded);

/// Writes the engine knobs whose defaults the GPU and the model decide into the scenario in force.
void put_defaults_by_gpu(LoadedScenario& loaded, const Deployment& deployment);

}  // namespace pdsim
