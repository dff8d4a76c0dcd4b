// A scenario as plain validated structs: what CONTRACT's JSON becomes.
//
// Every value here is in range and every name is known, but nothing has been looked up yet: models,
// instances and traces are still names. Times are nanoseconds, sizes bytes, rates as named.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

enum class Role : std::uint8_t { prefill, decode, colocated };

struct EngineConfig {
  std::int32_t block_size = 16;
  std::int32_t max_num_seqs = 0;            ///< 0 = vLLM's default for the GPU
  std::int32_t max_num_batched_tokens = 0;  ///< 0 = vLLM's default for the GPU
  std::int32_t max_model_len = 0;           ///< 0 = the model's max_position_embeddings
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool async_scheduling = true;
  bool step_by_step = false;  ///< every decode step through the event queue
  double gpu_memory_utilization = 0.9;
  std::int32_t num_gpu_blocks_override = 0;  ///< 0 = from memory
  Nanos idle_step = 0;                       ///< an empty step of an engine with parked requests only
};

struct PoolConfig {
  std::string name;
  Role role = Role::colocated;
  std::int32_t replicas = 1;
  std::string instance;  ///< an EC2 instance type, or empty when `gpu` is given
  std::string gpu;       ///< a GPU name, or empty when `instance` is given
  std::int32_t tensor_parallel = 1, pipeline_parallel = 1, data_parallel = 1, expert_parallel = 1;
  EngineConfig engine;
};

/// Which GPUs one replica has, when the scenario lists them.
struct PlacementConfig {
  std::string pool;
  std::int32_t replica = 0;
  std::int32_t node = 0;
  std::vector<std::int32_t> gpus;
};

enum class PlacementPolicy : std::uint8_t { pack, spread, list };

struct RouterConfig {
  std::string policy = "prefix_aware";
  std::int32_t max_retries = 0;
  std::int32_t local_prefill_threshold = 0;  ///< tokens; fewer to compute than this: no hand-over
  Nanos hop = 0;                             ///< one message between proxy and engine, tokenisation included
  Nanos cache_event_delay = 0;  ///< from the step that publishes cache events until the router knows
  double load_weight = 1.0;     ///< prefix_aware: tokens in flight count this much against tokens saved
};

enum class TransferMode : std::uint8_t { pull, push, push_layerwise, push_progressive };

struct TransferConfig {
  TransferMode mode = TransferMode::pull;
  bool bidirectional = false;
  std::int32_t kv_recompute_threshold = 64;
  std::int32_t pd_recompute_threshold = 0;
  std::int32_t full_hit_tokens = -1;  ///< -1 = one block of the decode pool; 0 = strict
  Nanos kv_lease_duration = 0;
  Nanos decoder_kv_blocks_ttl = 0;
  std::string kv_load_failure_policy = "fail";
  std::string backend = "libfabric";  ///< whose posting costs apply between nodes
  Nanos post_fixed = 0;               ///< before the first descriptor of a transfer is posted
  Nanos post_per_descriptor = 0;
  Nanos handshake = 0;     ///< first contact with one remote rank
  Nanos notification = 0;  ///< one-way time of a notification
};

struct NetworkConfig {
  std::string fabric = "efa";
  std::int32_t nodes_per_leaf = 0;  ///< 0 = all nodes under one leaf
  double oversubscription = 1.0;    ///< leaf down-capacity over up-capacity
  struct FailedRail {
    std::int32_t node = 0, gpu = 0, rail = 0;
  };
  std::vector<FailedRail> failed_rails;
};

struct SyntheticConfig {
  std::int32_t requests = 0;
  double rate = 0;               ///< requests per second, open loop; 0 = closed
  std::int32_t concurrency = 0;  ///< requests in flight, closed loop; 0 = open
  std::int32_t isl = 0, osl = 0;
  double range_ratio = 1.0;        ///< lengths uniform in [ratio x, x]; 1 = fixed
  std::int32_t shared_prefix = 0;  ///< leading tokens that all prompts have in common
  bool poisson = true;             ///< exponential gaps; false = constant ones
};

enum class Sessions : std::uint8_t { open, closed };

struct WorkloadConfig {
  std::string trace;   ///< a path ready to open, "-" for stdin, or empty when synthetic
  std::string format;  ///< empty = from the file's name or first row is an error: must be given
  std::optional<SyntheticConfig> synthetic;
  double time_scale = 1.0;  ///< 2 = twice the rate
  Sessions sessions = Sessions::open;
  Nanos warmup = 0, measure = 0;  ///< 0, 0 = every request counts
  Nanos client_timeout = 0;       ///< 0 = clients wait for ever
};

/// An objective: metric ("ttft_ms", "tpot_ms") -> percentile ("p95") -> bound in ms.
using Slo = std::map<std::string, std::map<std::string, double>>;

struct PricingConfig {
  std::string plan = "on_demand";
  std::map<std::string, double> usd_per_hour;  ///< per instance, overrides the plan
};

struct Scenario {
  std::string name;
  std::string model;
  std::string weights_dtype, kv_dtype;  ///< empty = as the model's own config says
  std::string gpu_profile;              ///< empty = the fitted profile of each pool's GPU
  std::vector<PoolConfig> pools;
  PlacementPolicy placement = PlacementPolicy::spread;
  std::vector<PlacementConfig> placement_list;
  RouterConfig router;
  TransferConfig transfer;
  NetworkConfig network;
  WorkloadConfig workload;
  Slo slo;
  PricingConfig pricing;
  std::uint64_t seed = 1;
  std::uint32_t permute_ties = 0;  ///< a test mode; see sim/core/event_queue.hpp
};

}  // namespace pdsim
