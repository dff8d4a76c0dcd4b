#include "sim/scenario/fields.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "models/network_profile.hpp"
#include "sim/core/error.hpp"
#include "traces/reader.hpp"

namespace pdsim {

namespace {

constexpr std::string_view kVllm = "vLLM 0.24";
constexpr std::int64_t kMany = INT32_MAX;
constexpr double kReaderContention = 1.8;  // for the interpreter's lock
constexpr std::int64_t kMostBlocks =
    50'000'000;  // 800 M tokens of 16: more than any machine holds, and 1 GB here

// Events are ordered within an instant (DESIGN, rule 2): what one entity does at an instant must not
// reach another at that same instant, or the result would depend on who is visited first.
constexpr std::string_view kNoZeroDelay = ": nothing reaches another worker at the instant it happens";

/// Where a default comes from that a network profile gives.
std::string by_profile(const NetworkProfile& profile, std::string_view quantity) {
  const auto found = profile.evidence.find(std::string(quantity));
  return fmt::format("network profile {}{}", profile.name,
                     found == profile.evidence.end() ? "" : fmt::format(" ({})", found->second));
}

/// A network profile whose names are known here.
NetworkProfile measured_network(const std::string& path, std::string_view place) {
  NetworkProfile profile = load_network_profile(path, place);
  if (!profile.posting) return profile;
  std::vector<std::string_view> known;
  for (const TransferBackend& backend : kTransferBackends) known.push_back(backend.name);
  const std::string& named = profile.posting->backend;
  if (std::find(known.begin(), known.end(), named) == known.end()) {
    throw InputError(path + ": /posting/backend",
                     fmt::format("is \"{}\", expected one of {}{}", named, fmt::join(known, ", "),
                                 did_you_mean(named, known)));
  }
  return profile;
}

/// The names of a table whose rows say more.
std::vector<Named> named(const auto& table) {
  std::vector<Named> names;
  for (const auto& row : table) names.push_back({row.name, row.sentence});
  return names;
}

// The same acceptance at each position, so that on average `mean` of `drafts` are accepted: the root of
// a + a^2 + ... + a^drafts = mean, by bisection.
double even_acceptance(double mean, std::int32_t drafts) {
  double low = 0, high = 1;
  for (int i = 0; i < 60; ++i) {
    const double a = (low + high) / 2;
    double sum = 0, power = 1;
    for (std::int32_t d = 0; d < drafts; ++d) sum += power *= a;
    (sum < mean ? low : high) = a;
  }
  return high;
}

void read_speculative(Reader& r, SpeculativeConfig& c) {
  r.choice("method", c.method, kSpeculativeMethods, {kRequired, "Who drafts."});
  r.integer("num_speculative_tokens", c.num_speculative_tokens, 1, 1024,
            {kRequired, "Drafts that each decode step verifies."});
  const std::string_view method = kSpeculativeMethods[static_cast<std::size_t>(c.method)].name;
  const bool model =
      r.path("model", c.model, {kAbsent, "draft_model: that model, as the scenario's own."}, ".json");
  if (model != (c.method == SpeculativeMethod::draft_model) && !r.describes()) {
    r.fail("model", model ? fmt::format("is given with method {}, expected with draft_model only: what the "
                                        "others draft with follows from the model served",
                                        method)
                          : "is missing, expected the model that drafts (method draft_model)");
  }

  const std::int32_t k = c.num_speculative_tokens;
  const auto drafts = static_cast<std::size_t>(k);
  std::vector<double> each;  // probability of a draft once those before it are accepted
  double even = 0, mean = 0, length = 1;
  constexpr Limits kProbability{.min = 0, .max = 1};
  const Row acceptance{kAbsent,
                       "Probability that a draft is accepted once those before it were; one for all, or one "
                       "for each position."};
  const bool list = r.is("acceptance", "array");
  int given = 0;
  if (!list || r.describes()) given += r.number("acceptance", even, kProbability, acceptance) ? 1 : 0;
  if (list || r.describes()) given += r.numbers("acceptance", each, kProbability, acceptance) ? 1 : 0;
  const bool by_mean =
      r.number("mean_accepted", mean, {},
               {kAbsent, "Or the drafts accepted in a step on average, at an even acceptance."});
  const bool by_rates = r.numbers("synthetic_acceptance_rates", c.accepted, kProbability,
                                  {kAbsent,
                                   "Or, as vLLM has it: probability that all drafts up to each position are "
                                   "accepted; falling."});
  const bool by_length = r.number("synthetic_acceptance_length", length, {.min = 1},
                                  {kAbsent,
                                   "Or, as vLLM has it: tokens that a step yields on average, and of that "
                                   "the whole part always."});
  if (r.describes()) return;
  given += (by_mean ? 1 : 0) + (by_rates ? 1 : 0) + (by_length ? 1 : 0);
  if (given != 1) {
    r.fail("", fmt::format("has {} of acceptance, mean_accepted, synthetic_acceptance_rates and "
                           "synthetic_acceptance_length, expected one of them",
                           given == 0 ? "none" : "more than one"));
  }
  const auto count = [&](std::string_view key, std::size_t n) {
    if (n != drafts) {
      r.fail(key, fmt::format("has {} entries, expected num_speculative_tokens = {}", n, k));
    }
  };
  if (by_rates) {
    count("synthetic_acceptance_rates", c.accepted.size());
    if (!std::is_sorted(c.accepted.rbegin(), c.accepted.rend())) {
      r.fail("synthetic_acceptance_rates", "rises, expected each to be at most the one before it");
    }
    return;
  }
  if (by_length) {
    if (length > k + 1) {
      r.fail("synthetic_acceptance_length",
             fmt::format("is {}, expected at most num_speculative_tokens + 1 = {}", length, k + 1));
    }
    for (std::int32_t i = 0; i < k; ++i) c.accepted.push_back(std::clamp(length - 1 - i, 0.0, 1.0));
    return;
  }
  if (by_mean && mean > k) {
    r.fail("mean_accepted", fmt::format("is {}, expected at most num_speculative_tokens = {}", mean, k));
  }
  if (list) {
    count("acceptance", each.size());
  } else {
    each.assign(drafts, by_mean ? even_acceptance(mean, k) : even);
  }
  double all = 1;
  for (const double a : each) c.accepted.push_back(all *= a);
}

void read_engine(Reader& r, EngineConfig& e) {
  r.integer("block_size", e.block_size, 1, 1024, {kVllm, "Tokens in a KV block, a power of two."});
  if (e.block_size <= 0 || (e.block_size & (e.block_size - 1)) != 0) {
    r.fail("block_size", fmt::format("is {}, expected a power of two", e.block_size));
  }
  r.integer("max_num_seqs", e.max_num_seqs, 0, kMany,
            {"vLLM 0.24: 1024 on GPUs of 70 GiB and more but A100, else 256",
             "Sequences in a step at most; 0 = vLLM's default for the GPU."});
  r.integer("max_num_batched_tokens", e.max_num_batched_tokens, 0, kMany,
            {"vLLM 0.24: 8192 on GPUs of 70 GiB and more but A100, else 2048",
             "Tokens in a step at most; 0 = vLLM's default for the GPU."});
  r.integer("max_model_len", e.max_model_len, 0, kMany,
            {"the model's max_position_embeddings",
             "Prompt and output together at most, in tokens; 0 = what the model can."});
  r.flag("enable_prefix_caching", e.enable_prefix_caching, {kVllm, "Keep full blocks for later prompts."});
  r.flag("enable_chunked_prefill", e.enable_chunked_prefill, {kVllm, "A prompt may take several steps."});
  r.object("speculative", {kAbsent, "Speculative decoding, as vLLM's speculative_config."},
           [&](Reader& speculative) { read_speculative(speculative, e.speculative.emplace()); });
  const bool by_host = !r.describes() && e.speculative && e.speculative->method == SpeculativeMethod::ngram;
  if (by_host) e.async_scheduling = false;
  r.flag("async_scheduling", e.async_scheduling, {kVllm, "Step n+1 is scheduled while n runs."});
  if (by_host && e.async_scheduling) {
    r.fail("async_scheduling",
           "is true with speculative method ngram, expected false: the host drafts from what a step yielded "
           "(vLLM refuses it)");
  }
  r.number(
      "gpu_memory_utilization", e.gpu_memory_utilization, {.min = 0, .max = 1, .above = true},
      {"vLLM since 0.21 (vllm#38284; 0.9 before)", "Share of the GPU's memory that the engine may use."});
  r.integer("num_gpu_blocks_override", e.num_gpu_blocks_override, 0, kMostBlocks,
            {kVllm, "KV blocks of a GPU; 0 = as many as memory holds."});
  r.duration("idle_step_us", e.idle_step, kMicrosecond, 1,
             {"inferred: an empty step is scheduling and polling only",
              "How long a step takes that computes nothing but looks for transfers."},
             kNoZeroDelay);
  r.choice(
      "cudagraph_mode", e.cudagraph_mode, kCudagraphModes,
      {"vLLM since 0.11 (vllm#25444)", "How the kernels of a step within the largest graph are launched."});
  r.integer("max_cudagraph_capture_size", e.max_cudagraph_capture_size, 0, kMany,
            {"vLLM 0.24: twice max_num_seqs, at most 512",
             "Tokens of the largest captured graph; 0 = vLLM's default."});
  r.flag("fuse_allreduce_rms", e.fuse_allreduce_rms,
         {"vLLM since 0.17 (vllm#34299)", "All-reduces take the norm after them along, up to a size."});
  r.choice("float32_matmul_precision", e.float32_matmul_precision, kFloat32Precisions,
           {kVllm, "How products of 32-bit weights (routers of some models) are computed."});
  r.path("overheads", e.overheads,
         {kOwn,
          "What serving takes beside kernels: a preset of models/overheads.json, or a path ending in .json."},
         ".json");
  r.object("kernels", {kAbsent, "Kernels other than a profile's first choice."}, [&](Reader& kernels) {
    for (const std::string_view op : kKernelOperators) {
      std::string name;
      if (kernels.text(op, name, {kAbsent, "A part of the kernel's name in the profile."})) {
        e.kernels[std::string(op)] = name;
      }
    }
  });
  r.flag("step_by_step", e.step_by_step, {kOwn, "Every step through the event queue; same results, slower."});
}

void read_pool(Reader& r, PoolConfig& p) {
  r.choice("role", p.role, kRoles, {kRequired, "What the pool's workers do."});
  p.name = kRoles[static_cast<std::size_t>(p.role)].name;
  r.text("name", p.name, {"the role", "How outputs and --set call it: letters, digits, - and _.", {}, true});
  const auto plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
  };
  if (!std::all_of(p.name.begin(), p.name.end(), plain) || (p.name[0] >= '0' && p.name[0] <= '9')) {
    r.fail("name", fmt::format("is \"{}\", expected letters, digits, - and _, and no digit first", p.name));
  }
  r.integer("replicas", p.replicas, 1, 1'000'000, {kOwn, "Workers in the pool."});
  r.text("instance", p.instance, {kAbsent, "EC2 instance type: gives GPU, links and price."});
  r.text("gpu", p.gpu, {kAbsent, "A GPU's name, without an instance around it."});
  r.integer("tensor_parallel", p.tensor_parallel, 1, 1024, {kVllm, "GPUs that share each layer."});
  r.integer("pipeline_parallel", p.pipeline_parallel, 1, 1024, {kVllm, "Stages of layers."});
  r.integer("data_parallel", p.data_parallel, 1, 1024, {kVllm, "Engines of a replica that share experts."});
  r.integer("expert_parallel", p.expert_parallel, 1, 1024, {kVllm, "GPUs that the experts are spread over."});
  r.object("engine", {kVllm, "The engine's own knobs, as vLLM spells them."},
           [&](Reader& engine) { read_engine(engine, p.engine); });
}

void read_placement(Reader& r, PlacementConfig& p) {
  r.text("pool", p.pool, {kRequired, "A pool's name."});
  r.integer("replica", p.replica, 0, kMany, {kRequired, "Which of its replicas, from 0."});
  r.integer("node", p.node, 0, kMany, {kRequired, "The node, from 0."});
  r.integers("gpus", p.gpus, 1023, {kRequired, "GPUs of that node."});
  r.integers("nics", p.nics, 1023, {"the ones next to its GPUs", "NICs of that node.", {}, true});
}

void read_router(Reader& r, RouterConfig& c) {
  r.choice("policy", c.policy, kRouterPolicies, {kOwn, "How workers are chosen."});
  r.integer("max_retries", c.max_retries, 0, 1000, {kOwn, "Further attempts of a failed request."});
  r.integer("local_prefill_threshold", c.local_prefill_threshold, 0, kMany,
            {kOwn, "Decode computes prompts that lack fewer tokens than this itself; 0 = always hand over."});
  r.duration(
      "hop_ms", c.hop, kMillisecond, 1,
      {"inferred: a proxy's HTTP hop takes 1 to 5 ms",
       "What the proxy adds to each request that it sends to an engine: HTTP both ways, tokenisation."},
      kNoZeroDelay);
  r.duration("cache_event_delay_us", c.cache_event_delay, kMicrosecond, 1,
             {"inferred: one message", "From the step that publishes cache events until the router knows."},
             kNoZeroDelay);
  r.number("load_weight", c.load_weight, {},
           {kOwn, "prefix_aware: tokens in flight count this much against tokens to compute."});
  r.flag("sequential_dispatch", c.sequential_dispatch,
         {kOwn, "Push: decode's leg leaves after prefill's answer (vllm-project/router#187), not with it."});
  r.number("reroute_fraction", c.reroute_fraction, {.min = 0, .max = 1},
           {kOwn, "Later turns moved to another prefill worker than their session's last, by chance."});
  r.duration("session_kv_ttl_s", c.session_kv_ttl, kSecond, 1,
             {"vLLM 0.24: its multi-turn proxy; below decoder_kv_blocks_ttl_s",
              "Bidirectional: how long the router keeps where a session's KV is."});
}

void read_retention(Reader& r, RetentionConfig& c) {
  r.choice("policy", c.policy, kRetentions, {kVllm, "What decode lets go of, and when."});
  r.number("budget_gib", c.budget_gib, {},
           {kOwn, "lru, priority, belady: retained KV on one GPU at most, GiB; 0 = no bound."});
  r.list<RetentionRange>(
      "ranges", c.ranges, {kOwn, "priority: what is kept how long; tokens in none have priority 35."},
      [](Reader& range, RetentionRange& t) {
        range.integer("from_token", t.from_token, 0, kMany, {kOwn, "First token."});
        range.integer("to_token", t.to_token, 0, kMany, {kOwn, "One past the last; 0 = the end."});
        range.integer("priority", t.priority, 0, 100,
                      {"TensorRT-LLM's KvCacheRetentionConfig", "The least goes first."});
        range.duration("duration_s", t.duration, kSecond, 0, {kOwn, "How long; 0 = the TTL."});
      });
}

// The members' values on entry are the defaults: of the whole scenario, or of the pair's parent. `measured`,
// of the whole scenario or null, decides what posting takes where the backend is its own.
void read_transfer(Reader& r, TransferConfig& t, const NetworkProfile* measured, bool pair = false) {
  r.aliases("kv_connector_extra_config",
            {kAbsent, "These keys as vLLM spells them, as its option has them."});
  r.choice("mode", t.mode, kTransferModes, {kVllm, "Who moves the KV, and when."});
  r.flag("hypothetical", t.hypothetical,
         {kOwn, "Allows combinations that no engine has; every output says so."});
  r.flag("bidirectional", t.bidirectional,
         {kVllm, "Prefill reads back what decode holds of a conversation.", "bidirectional_kv_xfer"});
  r.integer(
      "kv_recompute_threshold", t.kv_recompute_threshold, 0, kMany,
      {kVllm, "Bidirectional: fewer tokens than this are recomputed, not read.", "kv_recompute_threshold"});
  r.integer("pd_recompute_threshold", t.pd_recompute_threshold, 0, kMany,
            {"vLLM 0.24: it has none (unreleased: vllm#55801)",
             "Decode recomputes fewer tokens than this instead of transferring them."});
  r.integer("full_hit_tokens", t.full_hit_tokens, 0, kMany,
            {"one block of the decode pool",
             "Decode lacks no more than this: nothing is transferred, the tail is recomputed; 0 = strict.",
             {},
             true});
  const bool lease_given = r.duration(
      "kv_lease_duration_s", t.kv_lease_duration, kSecond, 1,
      {kVllm, "Prefill keeps finished blocks this long unless heartbeats renew it.", "kv_lease_duration"});
  if (lease_given) {
    t.heartbeat_interval = std::max<Nanos>(1, t.kv_lease_duration / 6);
    t.heartbeat_extension = std::max<Nanos>(1, t.kv_lease_duration * 2 / 3);
  }
  r.duration("heartbeat_interval_s", t.heartbeat_interval, kSecond, 1,
             {"vLLM 0.24: a sixth of the lease",
              "Pull: how often decode renews the leases that it waits for.",
              {},
              true});
  r.duration(
      "heartbeat_extension_s", t.heartbeat_extension, kSecond, 1,
      {"vLLM 0.24: two thirds of the lease", "A heartbeat's lease, from when prefill sees it.", {}, true});
  r.choice("lease_reaper", t.lease_reaper, kLeaseReapers, {kVllm, "How leases that have run out are found."});
  const bool ttl_given =
      r.duration("decoder_kv_blocks_ttl_s", t.decoder_kv_blocks_ttl, kSecond, 1,
                 {kVllm, "Bidirectional: decode keeps a finished turn this long.", "decoder_kv_blocks_ttl"});
  if (ttl_given) t.push_registration_timeout = t.decoder_kv_blocks_ttl;
  r.duration("push_registration_timeout_s", t.push_registration_timeout, kSecond, 1,
             {"vLLM 0.24: decoder_kv_blocks_ttl_s", "Push: decode drops a registration without a completion.",
              "push_registration_timeout", true});
  r.duration("engine_ttl_s", t.engine_ttl, kSecond, 1,
             {kVllm, "Idle remote state is forgotten, and the handshake repeated.", "engine_ttl"});
  r.choice("kv_load_failure_policy", t.kv_load_failure_policy, kLoadFailurePolicies,
           {kVllm, "What becomes of a request whose KV does not arrive."});
  r.choice("reuse_policy", t.reuse_policy, kReusePolicies,
           {kVllm, "Bidirectional: what prefill reads back and what it computes again."});
  r.object("retention", {kVllm, "Bidirectional: how decode keeps finished turns."},
           [&](Reader& retention) { read_retention(retention, t.retention); });
  r.duration(
      "expiry_margin_s", t.expiry_margin, kSecond, 0,
      {"vLLM 0.26: hard-coded (vllm#47021)",
       "Bidirectional: nothing is read that decode keeps for less; 0 = a router that drops the expiry."});
  r.number("clock_error_s", t.clock_error_s, {.min = -3600, .max = 3600},
           {kOwn, "Bidirectional: prefill takes decode's deadlines for this much later than they are."});
  r.flag("stale_guard", t.stale_guard,
         {"pdsim: no engine has it; off, blocks that have changed hands are read and written, and counted",
          "A block's ownership is checked before it is read or written."});
  r.duration("push_poll_ms", t.push_poll, kMillisecond, 1,
             {"vLLM 0.24: hard-coded", "Push: how often prefill looks for a registration that it lacks."});
  r.flag("push_fail", t.push_fail,
         {"vLLM 0.24: it has none (unreleased: vllm#50754, #55470)",
          "Push: a write that fails is reported to decode."});
  r.flag("wait_for_siblings", t.wait_for_siblings,
         {"vLLM 0.30 or later (vllm#56104)",
          "A failed transfer is given up when all its parts have stopped; false = at once."});

  const std::string parents = t.backend;
  r.choice("backend", t.backend, named(kTransferBackends),
           {"pdsim: on EFA vLLM's own default, UCX, falls back to TCP", "What posts transfers between nodes.",
            "backends"});
  std::string posting = "the backend's";
  for (const TransferBackend& backend : kTransferBackends) {
    if (backend.name != t.backend || r.describes()) continue;
    posting = fmt::format("{}: {}", backend.name, backend.source);
    if (t.backend != parents) {
      t.post_fixed = backend.post_fixed;
      t.post_per_descriptor = backend.post_per_descriptor;
    }
    if (measured == nullptr || !measured->posting || measured->posting->backend != t.backend) continue;
    posting = by_profile(*measured, "posting");
    if (pair && t.backend == parents) continue;  // what the pair's parent has
    t.post_fixed = measured->posting->fixed;
    t.post_per_descriptor = measured->posting->per_descriptor;
  }
  r.duration("post_fixed_us", t.post_fixed, kMicrosecond, 0,
             {posting, "CPU time before a transfer's first descriptor is posted.", {}, true});
  r.duration("post_us_per_descriptor", t.post_per_descriptor, kMicrosecond, 0,
             {posting, "CPU time to post one descriptor.", {}, true});
  r.duration("handshake_ms", t.handshake, kMillisecond, 0,
             {"inferred: 0.2 to 1 ms round trip over ZMQ, its upper end",
              "First contact with one remote rank, beside its descriptors."});
  r.duration("prep_us_per_descriptor", t.prep_per_descriptor, kMicrosecond, 0,
             {"1,461 ms for 6.5 M descriptors (vllm#48209: 0.032 since 0.26)",
              "First contact: for each descriptor of the remote rank's whole pool."});
  r.duration("handshake_timeout_s", t.handshake_timeout, kSecond, 1,
             {"vLLM 0.24: hard-coded", "A handshake without an answer fails after this."});
  r.flag("warm_start", t.warm_start, {kOwn, "Every first contact was made before the run."});
  r.number("initial_fragmentation", t.initial_fragmentation, {.min = 0, .max = 1},
           {kOwn,
            "Share of each pool's free blocks out of order at the start, as on a server that has run long."});
  r.duration("slow_submit_ms", t.slow_submit, kMillisecond, 1,
             {"vLLM 0.24: hard-coded warning", "Posts that take longer are counted as slow."});
  std::string one_way = "fi_pingpong over EFA, 256 bytes, on H100 nodes";
  if (measured != nullptr && measured->latency > 0) {
    one_way = by_profile(*measured, "latency_us");
    if (!pair) t.notification = measured->latency;
  }
  r.duration("notification_us", t.notification, kMicrosecond, 1,
             {one_way, "One way of a notification between workers."}, kNoZeroDelay);
  r.integer("num_threads", t.num_threads, 1, 1024,
            {kVllm, "Posting threads of UCX as the only backend.", "num_threads"});
  r.flag("enforce_handshake_compat", t.enforce_handshake_compat,
         {kVllm, "Workers whose KV layouts differ refuse each other.", "enforce_handshake_compat"});
  r.flag("enable_cross_layers_blocks", t.enable_cross_layers_blocks,
         {kVllm, "One region holds a block's layers side by side.", "enable_cross_layers_blocks"});
  constexpr std::string_view kUnreleased = "vLLM 0.24: it has none (an open pull request)";
  const bool parents_receiver = t.background_receiver;
  r.flag("background_receiver", t.background_receiver,
         {kUnreleased, "Pull: transfers are posted by a thread of their own.", "background_receiver"});
  if (t.background_receiver != parents_receiver) {  // push has its writer's thread already
    t.thread_contention = t.background_receiver && t.mode == TransferMode::pull ? kReaderContention : 1.0;
  }
  r.number("thread_contention", t.thread_contention, {.min = 1},
           {"1.8 with background_receiver: posts took 11.9 for 6.7 ms (vllm#50913); else 1",
            "Posting by a thread of its own takes this many times as long as on the forward thread.",
            {},
            true});
  r.flag("seed_first_token", t.seed_first_token,
         {kUnreleased, "Decode starts from prefill's token.", "seed_first_token"});
  r.flag("fast_kv_dispatch", t.fast_kv_dispatch,
         {kUnreleased, "Transfers start without waiting for a step.", "fast_kv_dispatch"});
  r.flag("fast_kv_notify", t.fast_kv_notify,
         {kUnreleased, "Completions are seen without waiting for a step.", "fast_kv_notify"});
  bool progressive = t.mode == TransferMode::push_progressive;
  const bool as_mode = progressive;
  r.flag("progressive_push", progressive,
         {kAbsent, "vLLM's spelling of mode push_progressive.", "progressive_push"});
  if (progressive != as_mode) {
    r.fail("progressive_push", fmt::format("is {}, but mode is {}: only push_progressive has it", progressive,
                                           kTransferModes[static_cast<std::size_t>(t.mode)].name));
  }
}

bool read_network_profile(Reader& r, std::string& path) {
  return r.path("profile", path,
                {kAbsent, "What was measured of it: a file that pdsim calibrate network writes."});
}

void read_network(Reader& r, NetworkConfig& n) {
  r.choice("fabric", n.fabric, kFabrics, {kOwn, "What nodes are connected by."});
  r.integer("nodes_per_leaf", n.nodes_per_leaf, 0, kMany,
            {kOwn, "Nodes under one leaf switch; 0 = all of them."});
  r.number("oversubscription", n.oversubscription, {.min = 1},
           {kOwn, "A leaf's capacity to its nodes over its capacity to the spine."});
  r.number("bandwidth_scale", n.bandwidth_scale, {.above = true},
           {kOwn, "Times the line rate of every network card: what if the network were faster, or slower."});
  read_network_profile(r, n.profile);
  r.list<NetworkConfig::FailedRail>(
      "failed_rails", n.failed_rails, {kOwn, "NICs that are down."},
      [](Reader& rail, NetworkConfig::FailedRail& f) {
        rail.integer("node", f.node, 0, kMany, {kRequired, "The node, from 0."});
        rail.integer("gpu", f.gpu, 0, 1023, {kRequired, "The GPU of that node that the NIC belongs to."});
        rail.integer("rail", f.rail, 0, 1023, {kRequired, "Which of that GPU's NICs, from 0."});
      });
}

void read_synthetic(Reader& r, SyntheticConfig& s) {
  r.integer("requests", s.requests, 1, 100'000'000, {kRequired, "Requests in all."});
  r.number("rate", s.rate, {}, {kOwn, "Requests per second, open loop; 0 = closed loop."});
  r.integer("concurrency", s.concurrency, 0, kMany,
            {kOwn, "Requests in flight, closed loop; 0 = open loop."});
  r.integer("isl", s.isl, 1, kMany, {kRequired, "Prompt tokens."});
  r.integer("osl", s.osl, 0, kMany, {kRequired, "Output tokens."});
  r.number("range_ratio", s.range_ratio, {.min = 0, .max = 1, .above = true},
           {kOwn, "Lengths are even in [ratio x length, length]; 1 = fixed."});
  r.integer("shared_prefix", s.shared_prefix, 0, kMany, {kOwn, "Leading tokens that all prompts share."});
  r.flag("poisson", s.poisson, {kOwn, "Open loop: exponential gaps; false = even ones."});
  r.integer("distinct_prompts", s.distinct_prompts, 0, kMany,
            {kOwn, "Prompts repeat in turn after so many; 0 = all differ."});
  r.choice("draw", s.draw, kLengthDraws, {kOwn, "How lengths are drawn."});
}

void read_workload(Reader& r, WorkloadConfig& w) {
  r.path("trace", w.trace, {kAbsent, "A trace: a path relative to this file, or - for stdin."});
  r.choice("format", w.format, named(trace_formats()), {kAbsent, "The trace's format."});
  r.object("synthetic", {kAbsent, "Made requests instead of a trace."},
           [&](Reader& synthetic) { read_synthetic(synthetic, w.synthetic.emplace()); });
  r.integer("concurrency", w.concurrency, 0, kMany,
            {kOwn,
             "Closed loop over the trace: arrivals are ignored, and a request is sent, in the trace's order, "
             "whenever fewer than this are in flight; 0 = as they arrive."});
  r.integer(
      "max_concurrency", w.max_concurrency, 0, kMany,
      {kOwn,
       "The client's limit, as of vllm bench serve: what arrives when this many are in flight is sent, and "
       "timed, when one of them ends; 0 = none."});
  r.number("time_scale", w.time_scale, {.above = true}, {kOwn, "2 = twice the rate."});
  r.number("prompt_scale", w.prompt_scale, {.above = true},
           {kOwn, "2 = prompts twice as long, sharing their prefixes in the same proportion."});
  r.choice("sessions", w.sessions, kSessions, {kOwn, "When a session's next turn arrives."});
  r.duration("warmup_s", w.warmup, kSecond, 0,
             {kOwn, "Requests that arrive earlier are not in the statistics."});
  r.duration("measure_s", w.measure, kSecond, 0,
             {kOwn, "Nor are those that arrive later than this after the warm-up; 0 = no end."});
  r.duration("client_timeout_s", w.client_timeout, kSecond, 0,
             {kOwn, "Clients cancel after this; 0 = they wait for ever."});
  r.flag("infer_sessions", w.infer_sessions, {kOwn, "Finds the sessions of a trace that has none."});
  r.number("reference_ttft_ms", w.reference_ttft_ms, {},
           {kAbsent, "Closed sessions: the time to first token that recorded gaps between turns contain."});
  r.number("reference_tpot_ms", w.reference_tpot_ms, {},
           {kAbsent, "And the time per output token after it."});
}

// A metric's bounds: {"p95": 2000}, or a bare number for p95.
void read_objective(Reader& r, std::string_view metric, std::string_view sentence, Slo& slo) {
  constexpr std::string_view kPercentiles[] = {"p50", "p90", "p95", "p99"};
  const auto bound = [&](Reader& reader, std::string_view key, std::string_view percentile, const Row& row) {
    double ms = 0.0;
    if (reader.number(key, ms, {.above = true}, row)) slo[std::string(metric)][std::string(percentile)] = ms;
  };
  const Row row{kAbsent, sentence};
  const bool bare = r.is(metric, "number");
  if (bare || r.describes()) bound(r, metric, "p95", row);
  if (bare) return;
  r.object(metric, row, [&](Reader& percentiles) {
    for (const std::string_view p : kPercentiles) {
      bound(percentiles, p, p, {kAbsent, "Milliseconds at this percentile."});
    }
  });
}

void read_pricing(Reader& r, PricingConfig& c, const std::vector<std::string>& instances) {
  const Row given{kAbsent, "USD per hour of a whole instance, for all or by instance; overrides the plan."};
  const bool own = r.is("plan", "object");
  if (own || r.describes()) {
    r.object("plan", {kOwn, "Which of the prices known."},
             [&](Reader& plan) { plan.prices("usd_per_hour", c.usd_per_hour, instances, given); });
  }
  if (!own) {
    r.choice("plan", c.plan, kPricingPlans, {kOwn, "Which of the prices known."});
    r.prices("usd_per_hour", c.usd_per_hour, instances, given);
    return;
  }
  c.plan = "usd_per_hour";
  for (const std::string& instance : instances) {
    if (!c.usd_per_hour.contains(instance)) {
      r.fail("plan", fmt::format("has no price of {}, expected usd_per_hour of each instance", instance));
    }
  }
}

void read_fault(Reader& r, FaultConfig& f) {
  r.choice("kind", f.kind, kFaultKinds, {kRequired, "What happens."});
  r.text("target", f.target, {kAbsent, "To which worker, pool, link or message; any when not given."});
  const bool once = r.duration("at_s", f.at, kSecond, 0, {kAbsent, "When, in seconds of the run."});
  const bool often =
      r.number("rate_per_hour", f.rate_per_hour, {.above = true}, {kAbsent, "How often on average."});
  if (once == often && !r.describes()) {
    r.fail("", once ? "has both at_s and rate_per_hour, expected one of them"
                    : "has neither at_s nor rate_per_hour, expected one of them");
  }
  r.duration("duration_s", f.duration, kSecond, 0, {kOwn, "Until it heals; 0 = what the kind itself takes."});
  if (f.kind != FaultKind::message_lost || r.describes()) return;
  std::vector<std::string_view> known;
  for (const Named& message : kMessages) known.push_back(message.name);
  if (std::find(known.begin(), known.end(), f.target) == known.end()) {
    r.fail("target", fmt::format("is \"{}\", expected a message: {}{}", f.target, fmt::join(known, ", "),
                                 did_you_mean(f.target, known)));
  }
}

std::vector<std::string> instances_of(const Scenario& s) {
  std::set<std::string> names;
  for (const PoolConfig& pool : s.pools) {
    if (!pool.instance.empty()) names.insert(pool.instance);
  }
  return {names.begin(), names.end()};
}

bool has_role(const Scenario& s, Role role) {
  return std::any_of(s.pools.begin(), s.pools.end(), [&](const PoolConfig& p) { return p.role == role; });
}

std::string_view name_of(Role role) {
  return kRoles[static_cast<std::size_t>(role)].name;
}

void read_dtype(Reader& r, std::string_view key, std::string& value, std::span<const Named> names,
                std::string_view sentence) {
  value = names[0].name;
  r.choice(key, value, names, {"the model's own config", sentence});
  if (value == names[0].name) value.clear();
}

}  // namespace

void read_scenario(Reader& r, Scenario& s) {
  std::string schema;
  r.text("$schema", schema, {kAbsent, "The schema, for editors."});
  r.text("name", s.name, {"the file's name", "What outputs call this scenario.", {}, true});
  r.path("model", s.model,
         {kRequired,
          "A name in models/, a Hugging Face id, or the path of a config.json, relative to this file."},
         ".json");
  read_dtype(r, "weights_dtype", s.weights_dtype, kWeightsDtypes, "Element type of the weights.");
  read_dtype(r, "kv_dtype", s.kv_dtype, kKvDtypes, "Element type of the KV cache.");
  r.path("gpu_profile", s.gpu_profile,
         {kAbsent,
          "A fitted kernel profile instead of the one of each pool's GPU; a path when it ends in .json."},
         ".json");
  r.list<PoolConfig>("pools", s.pools, {kRequired, "The workers."}, read_pool);
  const bool listed = r.is("placement", "array");
  const Row placement{kOwn, "Which GPUs each replica has: a policy, or a list of them all."};
  if (!listed) r.choice("placement", s.placement, kPlacements, placement);
  if (listed || r.describes()) {
    r.list<PlacementConfig>("placement", s.placement_list, placement, read_placement);
  }
  if (listed) s.placement = PlacementPolicy::list;
  r.object("router", {kOwn, "Who serves what."}, [&](Reader& router) { read_router(router, s.router); });

  const auto decode = std::find_if(s.pools.begin(), s.pools.end(),
                                   [](const PoolConfig& p) { return p.role == Role::decode; });
  s.transfer.full_hit_tokens =
      decode != s.pools.end() ? decode->engine.block_size : EngineConfig{}.block_size;
  std::optional<NetworkProfile> profile;
  r.ahead("network", [&](Reader& network) {
    std::string path;
    if (read_network_profile(network, path)) profile = measured_network(path, network.place("profile"));
  });
  const NetworkProfile* measured = profile ? &*profile : nullptr;
  r.object("transfer", {kVllm, "How KV moves from prefill to decode."}, [&](Reader& transfer) {
    read_transfer(transfer, s.transfer, measured);
    transfer.list<TransferPair>("pairs", s.transfer_pairs,
                                {kOwn, "What differs between two pools: from, to and any key of transfer."},
                                [measured](Reader& pair, TransferPair& p) {
                                  pair.inherit_from("/transfer");
                                  pair.text("from", p.from, {kRequired, "The prefill pool."});
                                  pair.text("to", p.to, {kRequired, "The decode pool."});
                                  read_transfer(pair, p.transfer, measured, true);
                                },
                                {{}, {}, s.transfer});
  });
  r.object("network", {kOwn, "Between nodes."}, [&](Reader& network) { read_network(network, s.network); });
  r.object("workload", {kRequired, "What requests there are."},
           [&](Reader& workload) { read_workload(workload, s.workload); });
  r.object("slo", {kOwn, "Objectives; a request meets them by its own TTFT and TPOT."}, [&](Reader& slo) {
    read_objective(slo, "ttft_ms", "Time to first token; a bare number is p95.", s.slo);
    read_objective(slo, "tpot_ms", "Time per output token; a bare number is p95.", s.slo);
  });
  const std::vector<std::string> instances = instances_of(s);
  r.object("pricing", {kOwn, "What an hour costs."},
           [&](Reader& pricing) { read_pricing(pricing, s.pricing, instances); });
  r.list<FaultConfig>("faults", s.faults, {kOwn, "What breaks."}, read_fault);
  r.integer("seed", s.seed, 0, INT64_MAX, {kOwn, "Of every random stream."});
  r.integer("permute_ties", s.permute_ties, 0, UINT32_MAX,
            {kOwn, "For tests: another order among simultaneous events; 0 = the usual one."});
}

namespace {

void check_pools(const Document& d, const Scenario& s) {
  if (s.pools.empty()) d.fail("/pools", "is empty, expected at least one pool");
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < s.pools.size(); ++i) {
    const PoolConfig& pool = s.pools[i];
    const std::string at = fmt::format("/pools/{}", i);
    if (!names.insert(pool.name).second) {
      d.fail(at + "/name", fmt::format("\"{}\" is the name of an earlier pool, expected another", pool.name));
    }
    if (pool.instance.empty() == pool.gpu.empty()) {
      d.fail(at, pool.gpu.empty() ? "has neither instance nor gpu, expected one of them"
                                  : "has both instance and gpu, expected one of them");
    }
    const std::int64_t gpus = std::int64_t{pool.tensor_parallel} * pool.data_parallel;
    if (gpus % pool.expert_parallel != 0) {
      d.fail(at + "/expert_parallel",
             fmt::format("is {}, expected a divisor of tensor_parallel x data_parallel = {}",
                         pool.expert_parallel, gpus));
    }
  }
  const bool colocated = has_role(s, Role::colocated);
  for (const auto& [role, other] :
       {std::pair(Role::prefill, Role::decode), std::pair(Role::decode, Role::prefill)}) {
    if (!has_role(s, role) || has_role(s, other)) continue;
    const auto unused = std::find_if(s.pools.begin(), s.pools.end(),
                                     [role = role](const PoolConfig& p) { return p.role == role; });
    d.fail(colocated ? fmt::format("/pools/{}", unused - s.pools.begin()) : "/pools",
           fmt::format("there is no {} pool: no request could use pool '{}', expected one with role {}",
                       name_of(other), unused->name, name_of(other)));
  }
}

void check_placement(const Document& d, const Scenario& s) {
  if (s.placement != PlacementPolicy::list) return;
  std::vector<std::string_view> names;
  for (const PoolConfig& pool : s.pools) names.push_back(pool.name);
  std::map<std::pair<std::size_t, std::int32_t>, std::int64_t> gpus;  // of (pool, replica)
  std::set<std::pair<std::int32_t, std::int32_t>> taken;              // (node, GPU)
  for (std::size_t i = 0; i < s.placement_list.size(); ++i) {
    const PlacementConfig& p = s.placement_list[i];
    const std::string at = fmt::format("/placement/{}", i);
    const auto name = std::find(names.begin(), names.end(), p.pool);
    if (name == names.end()) {
      d.fail(at + "/pool", fmt::format("\"{}\" is no pool, expected one of {}{}", p.pool,
                                       fmt::join(names, ", "), did_you_mean(p.pool, names)));
    }
    const auto pool = static_cast<std::size_t>(name - names.begin());
    if (p.replica >= s.pools[pool].replicas) {
      d.fail(at + "/replica", fmt::format("is {}, expected less than the {} of pool '{}'", p.replica,
                                          s.pools[pool].replicas, p.pool));
    }
    for (const std::int32_t gpu : p.gpus) {
      if (!taken.emplace(p.node, gpu).second) {
        d.fail(at + "/gpus", fmt::format("GPU {} of node {} is taken by an earlier entry", gpu, p.node));
      }
    }
    gpus[{pool, p.replica}] += std::ssize(p.gpus);
  }
  for (std::size_t i = 0; i < s.pools.size(); ++i) {
    const PoolConfig& pool = s.pools[i];
    const std::int64_t needed =
        std::int64_t{pool.tensor_parallel} * pool.pipeline_parallel * pool.data_parallel;
    for (std::int32_t replica = 0; replica < pool.replicas; ++replica) {
      const auto found = gpus.find({i, replica});
      const std::int64_t listed = found == gpus.end() ? 0 : found->second;
      if (listed != needed) {
        d.fail("/placement",
               fmt::format("gives replica {} of pool '{}' {} GPUs, expected {} (tensor x pipeline x "
                           "data parallel)",
                           replica, pool.name, listed, needed));
      }
    }
  }
}

void check_transfer(const Document& d, const Scenario& s) {
  // vLLM's NIXL connector compares block sizes at the handshake.
  std::size_t first = s.pools.size();
  for (std::size_t i = 0; i < s.pools.size(); ++i) {
    if (s.pools[i].role == Role::colocated) continue;
    if (first == s.pools.size()) first = i;
    if (s.pools[i].engine.block_size != s.pools[first].engine.block_size) {
      d.fail(
          fmt::format("/pools/{}/engine/block_size", i),
          fmt::format("is {}, expected {} as pool '{}' has (vLLM's NIXL connector pairs equal blocks only)",
                      s.pools[i].engine.block_size, s.pools[first].engine.block_size, s.pools[first].name));
    }
  }
  const auto check = [&](const TransferConfig& t, const std::string& at) {
    const RetentionConfig& r = t.retention;
    if (t.bidirectional && r.policy == Retention::lru && r.budget_gib <= 0) {
      d.fail(at + "/retention/budget_gib",
             "is 0 with policy lru, expected the GiB that may be retained on a GPU");
    }
    for (std::size_t i = 0; i < r.ranges.size(); ++i) {
      if (r.ranges[i].to_token == 0 || r.ranges[i].to_token > r.ranges[i].from_token) continue;
      d.fail(fmt::format("{}/retention/ranges/{}/to_token", at, i),
             fmt::format("is {}, expected more than from_token = {}, or 0", r.ranges[i].to_token,
                         r.ranges[i].from_token));
    }
    if (t.bidirectional && t.mode != TransferMode::pull && !t.hypothetical) {
      d.fail(at + "/bidirectional",
             fmt::format("is true with mode {}, expected mode pull (vLLM refuses the rest: "
                         "vllm#46473), or hypothetical true to see what it would do",
                         kTransferModes[static_cast<std::size_t>(t.mode)].name));
    }
  };
  check(s.transfer, "/transfer");
  std::set<std::pair<std::string_view, std::string_view>> pairs;
  for (std::size_t i = 0; i < s.transfer_pairs.size(); ++i) {
    const TransferPair& pair = s.transfer_pairs[i];
    const std::string at = fmt::format("/transfer/pairs/{}", i);
    const auto pool = [&](std::string_view key, std::string_view name, Role role) {
      std::vector<std::string_view> known;
      for (const PoolConfig& p : s.pools) {
        if (p.role == role) known.push_back(p.name);
      }
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        d.fail(join_pointer(at, key),
               fmt::format("\"{}\" is no {} pool, expected one of {}{}", name, name_of(role),
                           fmt::join(known, ", "), did_you_mean(name, known)));
      }
    };
    pool("from", pair.from, Role::prefill);
    pool("to", pair.to, Role::decode);
    if (!pairs.emplace(pair.from, pair.to).second) d.fail(at, "an earlier entry has the same pools");
    check(pair.transfer, at);
    if (pair.transfer.mode != s.transfer.mode || pair.transfer.bidirectional != s.transfer.bidirectional) {
      d.fail(at,
             "has another mode or another bidirectional than /transfer, expected the same (vllm#50620: "
             "unlike connectors refuse each other)");
    }
    if ((pair.transfer.retention.policy == Retention::belady) !=
        (s.transfer.retention.policy == Retention::belady)) {
      const auto name = [](const TransferConfig& t) {
        return kRetentions[static_cast<std::size_t>(t.retention.policy)].name;
      };
      d.fail(at + "/retention/policy",
             fmt::format("is {}, expected {} as /transfer has: who knows the future knows it for all pools",
                         name(pair.transfer), name(s.transfer)));
    }
  }
}

void check_workload(const Document& d, const WorkloadConfig& w) {
  if (w.trace.empty() != w.synthetic.has_value()) {
    d.fail("/workload", w.trace.empty() ? "has neither trace nor synthetic, expected one of them"
                                        : "has both trace and synthetic, expected one of them");
  }
  if (!w.trace.empty() && w.format.empty()) {
    std::vector<std::string_view> known;
    for (const TraceFormat& format : trace_formats()) known.push_back(format.name);
    d.fail("/workload", fmt::format("'format' is missing, expected one of {}", fmt::join(known, ", ")));
  }
  if (w.concurrency > 0) {
    const auto refuse = [&](std::string_view why) {
      d.fail("/workload/concurrency", fmt::format("is {} {}", w.concurrency, why));
    };
    if (w.synthetic) refuse("beside synthetic, expected it as synthetic.concurrency");
    if (w.sessions == Sessions::closed) refuse("with sessions closed, expected one of the two closed loops");
    if (w.time_scale != 1) refuse("with a time_scale, expected 0: a closed loop ignores arrivals");
  }
  if (w.max_concurrency > 0 && (w.concurrency > 0 || (w.synthetic && w.synthetic->concurrency > 0))) {
    d.fail("/workload/max_concurrency",
           fmt::format("is {} beside concurrency, expected one of the two", w.max_concurrency));
  }
  if (!w.synthetic) return;
  const SyntheticConfig& s = *w.synthetic;
  if ((s.rate > 0.0) == (s.concurrency > 0)) {
    d.fail("/workload/synthetic", s.rate > 0.0
                                      ? "has both rate and concurrency, expected one of them above 0"
                                      : "has neither rate nor concurrency, expected one of them above 0");
  }
  if (s.shared_prefix > s.isl) {
    d.fail("/workload/synthetic/shared_prefix",
           fmt::format("is {}, expected at most isl = {}", s.shared_prefix, s.isl));
  }
}

}  // namespace

void check_scenario(const Document& document, const Scenario& scenario) {
  check_pools(document, scenario);
  check_placement(document, scenario);
  check_transfer(document, scenario);
  check_workload(document, scenario.workload);
}

}  // namespace pdsim
