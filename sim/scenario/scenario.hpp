// A scenario as plain validated structs: what CONTRACT's JSON becomes.
//
// Every value here is in range and every name is known, but nothing has been looked up yet: models,
// instances and traces are still names. Times are nanoseconds, sizes bytes, rates as named.
//
// A member's initial value is the default of its key, and stands nowhere else; fields.cpp says where
// it comes from.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/scenario/names.hpp"

namespace pdsim {

struct EngineConfig {
  std::int32_t block_size = 16;
  std::int32_t max_num_seqs = 0;            ///< 0 = vLLM's default for the GPU
  std::int32_t max_num_batched_tokens = 0;  ///< 0 = vLLM's default for the GPU
  std::int32_t max_model_len = 0;           ///< 0 = the model's max_position_embeddings
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool async_scheduling = true;
  bool step_by_step = false;  ///< every decode step through the event queue
  double gpu_memory_utilization = 0.92;
  std::int32_t num_gpu_blocks_override = 0;  ///< 0 = from memory
  Nanos idle_step = 500 * kMicrosecond;      ///< an empty step of an engine with parked requests only
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

/// Which GPUs of one node a replica has, when the scenario lists them. A replica that spans nodes has
/// one entry for each; together they name tensor x pipeline x data parallel GPUs.
struct PlacementConfig {
  std::string pool;
  std::int32_t replica = 0;
  std::int32_t node = 0;
  std::vector<std::int32_t> gpus;
  std::vector<std::int32_t> nics;  ///< empty = the ones next to its GPUs
};

struct RouterConfig {
  std::string policy = "prefix_aware";
  std::int32_t max_retries = 0;
  std::int32_t local_prefill_threshold = 0;  ///< tokens; fewer to compute than this: no hand-over
  Nanos hop = kMillisecond;                  ///< what the proxy adds to each request to an engine
  Nanos cache_event_delay =
      kMillisecond;          ///< from the step that publishes cache events until the router knows
  double load_weight = 1.0;  ///< prefix_aware: tokens in flight count this much against tokens saved
};

struct TransferConfig {
  TransferMode mode = TransferMode::pull;
  bool bidirectional = false;
  std::int32_t kv_recompute_threshold = 64;  ///< tokens; decode-to-prefill reads, when bidirectional
  std::int32_t pd_recompute_threshold = 0;   ///< tokens; prefill-to-decode transfers
  std::int32_t full_hit_tokens = -1;  ///< -1 = one block of the decode pool (loading resolves it); 0 = strict
  Nanos kv_lease_duration = 30 * kSecond;
  Nanos decoder_kv_blocks_ttl = 480 * kSecond;
  Nanos push_registration_timeout = 480 * kSecond;  ///< loading makes it the TTL above unless given
  Nanos engine_ttl = 3600 * kSecond;                ///< idle remote state is forgotten after this
  std::string kv_load_failure_policy = "fail";
  std::string backend{kTransferBackends[0].name};      ///< whose posting costs apply between nodes
  Nanos post_fixed = kTransferBackends[0].post_fixed;  ///< before a transfer's first descriptor
  Nanos post_per_descriptor = kTransferBackends[0].post_per_descriptor;
  Nanos handshake = 50 * kMillisecond;  ///< first contact with one remote rank
  Nanos notification = 17'300;          ///< one-way time of a notification
  std::int32_t num_threads = 4;         ///< of UCX as the only backend
  bool enforce_handshake_compat = true;
  bool enable_cross_layers_blocks = false;
  bool background_receiver = false;  ///< this and the next three: open vLLM pull requests
  bool seed_first_token = false;
  bool fast_kv_dispatch = false;
  bool fast_kv_notify = false;
};

/// What differs for transfers from one pool to another; `transfer` is complete.
struct TransferPair {
  std::string from, to;
  TransferConfig transfer;
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

struct WorkloadConfig {
  std::string trace;   ///< a path ready to open, "-" for stdin, or empty when synthetic
  std::string format;  ///< one of trace_formats(); empty only when synthetic
  std::optional<SyntheticConfig> synthetic;
  double time_scale = 1.0;  ///< 2 = twice the rate
  Sessions sessions = Sessions::open;
  Nanos warmup = 0, measure = 0;  ///< 0, 0 = every request counts
  Nanos client_timeout = 0;       ///< 0 = clients wait for ever
};

/// An objective: metric ("ttft_ms", "tpot_ms") -> percentile ("p95") -> bound in ms.
using Slo = std::map<std::string, std::map<std::string, double>>;

struct PricingConfig {
  std::string plan = "on_demand";              ///< "usd_per_hour" = the scenario prices every instance itself
  std::map<std::string, double> usd_per_hour;  ///< by instance; overrides the plan
};

/// Something that breaks: once, at a time, or again and again at a rate.
struct FaultConfig {
  std::string kind;            ///< a name in kFaultKinds
  std::string target;          ///< a worker, a pool, a link or a message; empty = any
  Nanos at = -1;               ///< -1 = by rate
  double rate_per_hour = 0.0;  ///< 0 = once
  Nanos duration = 0;          ///< until it heals; 0 = the kind's own
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
  std::vector<TransferPair> transfer_pairs;
  NetworkConfig network;
  WorkloadConfig workload;
  Slo slo;
  PricingConfig pricing;
  std::vector<FaultConfig> faults;
  std::uint64_t seed = 1;
  std::uint32_t permute_ties = 0;  ///< a test mode; see sim/core/event_queue.hpp
};

}  // namespace pdsim
