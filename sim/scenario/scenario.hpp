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

/// Speculative decoding: each decode step verifies so many drafted tokens.
struct SpeculativeConfig {
  SpeculativeMethod method = SpeculativeMethod::mtp;
  std::int32_t num_speculative_tokens = 0;
  std::string model;             ///< of draft_model, as Scenario::model
  std::vector<double> accepted;  ///< [i]: probability that the first i + 1 drafts of a step are accepted
};

struct EngineConfig {
  std::int32_t block_size = 16;
  std::int32_t max_num_seqs = 0;            ///< 0 = vLLM's default for the GPU
  std::int32_t max_num_batched_tokens = 0;  ///< 0 = vLLM's default for the GPU
  std::int32_t max_model_len = 0;           ///< 0 = the model's max_position_embeddings
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  std::optional<SpeculativeConfig> speculative;
  bool async_scheduling = true;
  bool step_by_step = false;  ///< every decode step through the event queue
  double gpu_memory_utilization = 0.92;
  std::int32_t num_gpu_blocks_override = 0;  ///< 0 = from memory
  Nanos idle_step = 500 * kMicrosecond;      ///< an empty step of an engine with parked requests only
  CudagraphMode cudagraph_mode = CudagraphMode::full_and_piecewise;
  std::int32_t max_cudagraph_capture_size = 0;  ///< tokens; 0 = vLLM's: min(2 x max_num_seqs, 512)
  bool fuse_allreduce_rms = true;
  std::string float32_matmul_precision = "highest";
  std::string overheads = "vllm";              ///< a preset or a .json path: models/overheads.hpp
  std::map<std::string, std::string> kernels;  ///< operator -> a part of a kernel's name in the profile
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
      kMillisecond;                  ///< from the step that publishes cache events until the router knows
  double load_weight = 1.0;          ///< prefix_aware: tokens in flight count this much against tokens saved
  bool sequential_dispatch = false;  ///< push: decode's leg leaves after prefill's answer
  double reroute_fraction = 0;       ///< of later turns, those moved to another prefill worker
  Nanos session_kv_ttl = 450 * kSecond;  ///< bidirectional: how long the router keeps an address
};

/// Leading tokens of a retained sequence and how they are kept (retention by priority).
struct RetentionRange {
  std::int32_t from_token = 0, to_token = 0;  ///< [from, to); to 0 = the end
  std::int32_t priority = 35;                 ///< 0 to 100; the least goes first
  Nanos duration = 0;                         ///< 0 = the TTL
};

struct RetentionConfig {
  Retention policy = Retention::ttl;
  double budget_gib = 0;  ///< of one GPU; 0 = no bound
  std::vector<RetentionRange> ranges;
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
  Nanos handshake = kMillisecond;   ///< first contact with one remote rank, beside its descriptors
  Nanos notification = 17'300;      ///< one-way time of a notification
  Nanos prep_per_descriptor = 225;  ///< first contact: for each descriptor of the remote pool
  bool warm_start = false;          ///< every contact has been made before the first request
  std::int32_t num_threads = 4;     ///< of UCX as the only backend
  bool enforce_handshake_compat = true;
  bool enable_cross_layers_blocks = false;
  bool background_receiver = false;  ///< this and the next three: open vLLM pull requests
  bool seed_first_token = false;
  bool fast_kv_dispatch = false;
  bool fast_kv_notify = false;
  double thread_contention = 1;   ///< posting beside the forward thread takes this many times as long
  bool push_fail = false;         ///< a write that fails to post is reported to decode at once
  bool wait_for_siblings = true;  ///< a failure is reported when the transfer's other parts have stopped
  Nanos push_poll = kMillisecond;
  Nanos handshake_timeout = 5 * kSecond;
  Nanos slow_submit = 200 * kMillisecond;    ///< posts that take longer are counted
  Nanos heartbeat_interval = 5 * kSecond;    ///< loading makes it a sixth of the lease unless given
  Nanos heartbeat_extension = 20 * kSecond;  ///< and this two thirds
  LeaseReaper lease_reaper = LeaseReaper::in_order;

  ReusePolicy reuse_policy = ReusePolicy::threshold;
  RetentionConfig retention;
  Nanos expiry_margin = 5 * kSecond;  ///< nothing is read that decode keeps for less; 0 = no such guard
  double clock_error_s = 0;           ///< what is left of decode's clock offset after the handshake
  bool stale_guard = true;            ///< blocks that have changed hands are neither read nor written
  bool hypothetical = false;          ///< allows combinations that no engine has
  double initial_fragmentation = 0;   ///< share of a pool's free blocks out of order at the start
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
  double bandwidth_scale = 1.0;     ///< times the line rate of every network card
  std::string profile;              ///< a path to a network profile, or empty: models/network_profile.hpp
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
  LengthDraw draw = LengthDraw::pdsim;
  std::int32_t distinct_prompts = 0;  ///< prompts repeat in turn after so many; 0 = never
};

struct WorkloadConfig {
  std::string trace;   ///< a path ready to open, "-" for stdin, or empty when synthetic
  std::string format;  ///< one of trace_formats(); empty only when synthetic
  std::optional<SyntheticConfig> synthetic;
  std::int32_t concurrency = 0;      ///< of a trace, closed loop: arrivals are ignored; 0 = as they arrive
  std::int32_t max_concurrency = 0;  ///< the client's limit on requests in flight; 0 = none
  double time_scale = 1.0;           ///< 2 = twice the rate
  double prompt_scale = 1.0;         ///< 2 = prompts twice as long
  Sessions sessions = Sessions::open;
  Nanos warmup = 0, measure = 0;  ///< 0, 0 = every request counts
  Nanos client_timeout = 0;       ///< 0 = clients wait for ever
  bool infer_sessions = false;    ///< of a trace without sessions, from its prompts
  double reference_ttft_ms = -1;  ///< closed: what the recorded gaps between turns contain; -1 = not stated
  double reference_tpot_ms = -1;
};

/// An objective: metric ("ttft_ms", "tpot_ms") -> percentile ("p95") -> bound in ms.
using Slo = std::map<std::string, std::map<std::string, double>>;

struct PricingConfig {
  std::string plan = "on_demand";              ///< "usd_per_hour" = the scenario prices every instance itself
  std::map<std::string, double> usd_per_hour;  ///< by instance; overrides the plan
};

/// Something that breaks: once, at a time, or again and again at a rate.
struct FaultConfig {
  FaultKind kind = FaultKind::worker_crash;
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
