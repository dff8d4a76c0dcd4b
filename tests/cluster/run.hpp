// One simulation as a test sees it: a scenario written in the test, a trace made in it, everything that
// comes out, what must hold of it whatever it was, and the arithmetic by which a test foretells it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/metrics/summary.hpp"
#include "sim/network/network.hpp"
#include "sim/transfer/layout.hpp"
#include "traces/generate.hpp"

namespace pdsim {

struct Outcomes {
  LoadedScenario loaded;
  Deployment deployment;
  RunResult run;
  nlohmann::ordered_json summary;
  std::string csv;

  std::string text() const { return summary.dump(2) + "\n" + csv; }
};

using Sets = std::vector<std::string>;

inline Outcomes run_loaded(LoadedScenario loaded, const Trace& trace) {
  Outcomes o{std::move(loaded), {}, {}, {}, {}};
  o.deployment = plan_deployment(o.loaded);
  RunHooks hooks;
  hooks.check_pools = true;
  o.run = simulate(o.deployment, o.loaded, trace, hooks);
  RunContext context;
  context.scenario = o.loaded.scenario.name;
  context.scenario_sha256 = o.loaded.sha256;
  context.profile = o.deployment.profile;
  context.seed = o.loaded.scenario.seed;
  context.slo = o.loaded.scenario.slo;
  const TransferConfig& transfer = o.loaded.scenario.transfer;
  if (o.deployment.disaggregated) {
    context.mode = kTransferModes[static_cast<std::size_t>(transfer.mode)].name;
    if (transfer.bidirectional) {
      context.retention = kRetentions[static_cast<std::size_t>(transfer.retention.policy)].name;
    }
  }
  for (std::size_t n = 0; n < o.deployment.nodes.size(); ++n) {
    const NodePlan& node = o.deployment.nodes[n];
    context.nodes.push_back(
        {node.usd_per_hour, node.price_as_of, o.deployment.topology.nodes[n].gpus, node.gpus_held});
  }
  o.summary = summarize(o.run, context, trace);
  std::vector<std::string> names;
  for (const WorkerPlan& worker : o.deployment.workers) names.push_back(worker.name);
  o.csv = requests_csv(o.run, trace, names);
  return o;
}

/// With engines that have a request a hop after the proxy sends it, as tests foretell it: no front end.
inline LoadedScenario hop_alone(LoadedScenario loaded) {
  for (auto& pool : loaded.scenario.pools) {
    if (pool.engine.overheads == "vllm") {
      pool.engine.overheads = PDSIM_SOURCE_DIR "/tests/cluster/hop_alone.json";
    }
  }
  return loaded;
}

inline Outcomes run_text(const std::string& scenario, const Trace& trace, const Sets& sets = {}) {
  return run_loaded(hop_alone(parse_scenario(scenario, "test.json", "", sets)), trace);
}

/// With the overheads that ship.
inline Outcomes run_shipped(const std::string& scenario, const Trace& trace, const Sets& sets = {}) {
  return run_loaded(parse_scenario(scenario, "test.json", "", sets), trace);
}

/// Two pools of one-GPU workers of Llama-3.1-8B on two p5en.
inline const std::string kDisaggregated = R"({
  "name": "disaggregated", "model": "llama-3.1-8b",
  "pools": [
    {"name": "prefill", "role": "prefill", "replicas": 2, "instance": "p5en.48xlarge",
     "engine": {"max_model_len": 32768}},
    {"name": "decode", "role": "decode", "replicas": 2, "instance": "p5en.48xlarge",
     "engine": {"max_model_len": 32768}}
  ],
  "workload": {"trace": "made by the test", "format": "mooncake"},
  "slo": {"ttft_ms": 2000, "tpot_ms": 50}
})";

/// Three workers that each do both.
inline const std::string kColocated = R"({
  "name": "colocated", "model": "llama-3.1-8b",
  "pools": [
    {"name": "worker", "role": "colocated", "replicas": 3, "instance": "p5en.48xlarge",
     "engine": {"max_model_len": 32768}}
  ],
  "workload": {"trace": "made by the test", "format": "mooncake"},
  "slo": {"ttft_ms": 2000, "tpot_ms": 50}
})";

/// Conversations with shared prompts, arrivals on a grid of `grid`, lengths that a small pool can hold.
inline Trace small_trace(std::int32_t requests, double rate, Nanos grid, std::uint64_t seed = 1) {
  GenerateConfig config;
  config.requests = requests;
  config.rate = rate;
  config.stamp_grid = grid;
  config.system_prompts = 4;
  config.system_prompt = {600, 0.5, 1, 2000};
  config.first_message = {700, 0.8, 1, 3000};
  config.message = {200, 0.8, 1, 1000};
  config.output = {60, 0.9, 1, 300};
  config.max_prompt_tokens = 6000;
  config.think_time_s = 2;
  config.seed = seed;
  return generate_trace(config);
}

/// Requests one by one, each with content of its own unless `ids` says otherwise.
inline Trace made_trace(std::vector<Request> requests, std::int32_t hash_block = 0,
                        std::vector<std::uint64_t> ids = {}) {
  Trace trace;
  trace.name = "made";
  trace.format = "mooncake";
  trace.hash_block_tokens = hash_block;
  trace.hash_ids = std::move(ids);
  trace.requests = std::move(requests);
  trace.report.rows_read = trace.report.rows_used = trace.requests.size();
  return trace;
}

inline Request request_at(Nanos arrival, std::int32_t prompt, std::int32_t output) {
  Request r;
  r.arrival = arrival;
  r.prompt_tokens = prompt;
  r.output_tokens = output;
  return r;
}

/// A conversation with whole hash blocks of 512 tokens: turn n begins with all blocks of turn n - 1. Each
/// {arrival, prompt, output} is a turn of session 0; blocks not shared with the turn before have new ids.
inline Trace conversation(const std::vector<Request>& turns) {
  Trace trace = made_trace({}, 512);
  trace.sessions = {"talk"};
  for (Request r : turns) {
    r.session = 0;
    r.turn = static_cast<std::int32_t>(trace.requests.size());
    r.hash_begin = trace.hash_ids.size();
    r.hash_count = (r.prompt_tokens + 511) / 512;
    for (std::int32_t i = 0; i < r.hash_count; ++i) {
      // The last id of a prompt that ends within its block is of that beginning only.
      const bool whole = (i + 1) * 512 <= r.prompt_tokens;
      trace.hash_ids.push_back(static_cast<std::uint64_t>(i + 1) +
                               (whole ? 0 : 1000 * static_cast<std::uint64_t>(r.turn + 1)));
    }
    trace.requests.push_back(r);
  }
  trace.report.rows_read = trace.report.rows_used = trace.requests.size();
  return trace;
}

inline Sets with(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

inline const Sets kOneEach = {"pools.prefill.replicas=1", "pools.decode.replicas=1"};

inline Nanos stage(const RequestRecord& r, Stage s) {
  return r.stages[static_cast<std::size_t>(s)];
}

inline std::int64_t outcome(const RunResult& run, TransferOutcome o) {
  return run.transfers.outcomes[static_cast<std::size_t>(o)];
}

// ------------------------------------------------------------------------------ what a test foretells

/// `n` tokens of one prompt after `p`.
inline StepShape prefill_shape(std::int64_t p, std::int64_t n, bool last) {
  StepShape s;
  s.prefill_requests = 1;
  s.prefill_tokens = static_cast<std::int32_t>(n);
  s.prefill_pairs = n * p + n * (n + 1) / 2;
  s.prefill_context = p + n;
  s.sampled_requests = last ? 1 : 0;
  return s;
}

inline StepShape decode_shape(std::int64_t context) {
  StepShape s;
  s.decode_requests = s.sampled_requests = 1;
  s.decode_context = context;
  return s;
}

/// Two prompts' tokens in one step.
inline StepShape both(StepShape a, const StepShape& b) {
  a.prefill_requests += b.prefill_requests;
  a.prefill_tokens += b.prefill_tokens;
  a.prefill_pairs += b.prefill_pairs;
  a.prefill_context += b.prefill_context;
  a.sampled_requests += b.sampled_requests;
  return a;
}

/// Steps that compute the tokens [from, prompt) of one prompt alone.
inline Nanos prefill_time(const PoolPlan& pool, std::int32_t prompt, std::int32_t from = 0) {
  Nanos sum = 0;
  for (std::int32_t p = from; p < prompt; p += pool.engine.max_num_batched_tokens) {
    const std::int32_t n = std::min(prompt - p, pool.engine.max_num_batched_tokens);
    sum += pool.step_model->time(prefill_shape(p, n, p + n == prompt)).ns;
  }
  return sum;
}

/// Steps that yield tokens `first` to `last` (from 1): the t-th reads the prompt and the t - 1 before it.
inline Nanos decode_time(const PoolPlan& pool, std::int32_t prompt, std::int32_t first, std::int32_t last) {
  Nanos sum = 0;
  for (std::int32_t t = first; t <= last; ++t) {
    sum += pool.step_model->time(decode_shape(prompt + t - 1)).ns;
  }
  return sum;
}

/// The first multiple of `step` after `origin` that is not before `time`, one step on at least.
inline Nanos on_grid(Nanos origin, Nanos step, Nanos time) {
  return origin + std::max<Nanos>(1, (time - origin + step - 1) / step) * step;
}

/// How KV goes between two workers, from the two degrees and the model's heads.
inline Layout layout_of(const Outcomes& o, std::uint32_t from, std::uint32_t to) {
  const ModelSpec& model = o.deployment.model;
  const auto tp = [&](std::uint32_t worker) {
    return static_cast<std::int32_t>(o.deployment.workers[worker].gpus.size());
  };
  const Footprint& f = o.deployment.pools[static_cast<std::size_t>(o.deployment.workers[to].pool)].footprint;
  return kv_layout(model.latent > 0 ? 0 : model.kv_heads, tp(from), tp(to), f.kv_regions,
                   f.kv_bytes_per_token);
}

/// What goes from one worker to another at once, foretold from the facts: descriptors of whole prompts of a
/// fresh pool (one run of blocks), posted one after the other from `begin` on.
struct Foretold {
  Op op = Op::write;
  std::uint32_t from = 0, to = 1;
  std::int32_t blocks = 0;
  Nanos begin = 0;
  double contention = 1;           ///< of a thread beside the forward thread
  std::int32_t parts = 1, of = 1;  ///< `parts` of `of` equal shares of the bytes
  Nanos lasts = 0;                 ///< > 0: those shares come to be one after the other over this time

  Layout layout{};               ///< from here on: foretell()
  std::int64_t descriptors = 0;  ///< of a posting rank
  Nanos fixed = 0, posting = 0;
  Bytes part = 0;  ///< of one flow
  double cap = 0;
  Bytes operation = 0;
  std::int64_t all_descriptors() const {
    return descriptors * (layout.ranks * layout.sources / layout.remotes(op));
  }
  Bytes bytes() const { return part * layout.ranks * layout.sources; }
  Nanos post_end() const { return begin + posting; }
};

inline Foretold foretell(const Outcomes& o, Foretold f) {
  const TransferConfig& t = o.loaded.scenario.transfer;
  const std::vector<GpuId>& from = o.deployment.workers[f.from].gpus;
  const std::vector<GpuId>& to = o.deployment.workers[f.to].gpus;
  f.layout = layout_of(o, f.from, f.to);
  const Nanos each = ceil_ns(static_cast<double>(t.post_per_descriptor) * f.contention);
  f.fixed = ceil_ns(static_cast<double>(t.post_fixed) * f.contention);
  const std::int64_t all = descriptors(f.layout, f.op, 1, f.blocks);
  const Nanos posting = posting_time(f.layout, f.op, f.fixed, each, all);
  const double rank_bytes = f.blocks * o.deployment.pools[0].engine.block_size * f.layout.bytes_per_token;
  const double descriptor = rank_bytes / f.layout.sources * f.layout.remotes(f.op) / static_cast<double>(all);
  const auto part = static_cast<Bytes>(rank_bytes / f.layout.sources);
  const bool rest = f.parts == 1;  // takes what rounding leaves over
  const auto share = [&](std::int64_t whole) {
    return f.parts == f.of ? whole : rest ? whole - whole * (f.of - 1) / f.of : whole * f.parts / f.of;
  };
  f.part = share(part);
  f.descriptors = std::max<std::int64_t>(1, share(all));
  f.posting = posting;
  if (f.parts != f.of) {  // some layers: a post of its own for each of their regions
    const Nanos first = f.layout.remotes(f.op) * f.fixed;
    f.posting = first * std::max(1, f.layout.regions * f.parts / f.of) +
                ceil_ns(static_cast<double>(posting - first) * (static_cast<double>(f.parts) / f.of));
  }
  const GpuId poster = f.op == Op::read ? to[0] : from[0];
  f.operation = wire_operation_bytes(static_cast<Bytes>(descriptor),
                                     o.deployment.topology.rails[static_cast<std::size_t>(poster)]);
  f.cap = descriptor / static_cast<double>(each);
  if (f.lasts > 0) f.cap = std::min(f.cap, static_cast<double>(f.part) / static_cast<double>(f.lasts));
  return f;
}

/// When all of `batches` (one hand-over's), or the first `count` of them with the others in the way, has
/// landed: their flows on a network of their own, which has tests of its own, and 2 latencies of a READ, 1 of
/// a WRITE; but not before it has been posted.
inline Nanos foretell_landing(const Outcomes& o, const std::vector<Foretold>& batches,
                              std::size_t count = SIZE_MAX) {
  struct Start {
    Nanos time;
    FlowRequest flow;
  };
  std::vector<Start> starts;
  std::uint64_t counted = 0;  // tags below this
  Nanos landed = 0;
  for (std::size_t batch = 0; batch < batches.size(); ++batch) {
    const Foretold& f = batches[batch];
    const std::vector<GpuId>& from = o.deployment.workers[f.from].gpus;
    const std::vector<GpuId>& to = o.deployment.workers[f.to].gpus;
    if (batch < count) landed = std::max(landed, f.post_end());
    for (std::int32_t rank = 0; rank < f.layout.ranks; ++rank) {
      for (std::int32_t source = 0; source < f.layout.sources; ++source) {
        // Part n of a poster is posted after its n-th share of the posting.
        const std::int32_t remotes = f.layout.remotes(f.op);
        const std::int32_t turn =
            f.op == Op::read ? source : (rank * f.layout.sources + source) % f.layout.targets;
        Start s;
        s.time = f.begin + turn * (f.posting / remotes) + f.fixed;
        s.flow.source = from[static_cast<std::size_t>(
            source_rank(f.layout, static_cast<std::int32_t>(from.size()), rank, source))];
        s.flow.destination = to[static_cast<std::size_t>(rank)];
        s.flow.bytes = f.part;
        s.flow.op = f.op;
        s.flow.operation_bytes = f.operation;
        s.flow.rate_cap = f.cap;
        s.flow.tag = starts.size();
        starts.push_back(s);
      }
    }
    if (batch < count) counted = starts.size();
  }
  std::stable_sort(starts.begin(), starts.end(),
                   [](const Start& a, const Start& b) { return a.time < b.time; });
  const Foretold& first = batches.front();
  const Nanos latency = route(o.deployment.topology, o.deployment.workers[first.from].gpus[0],
                              o.deployment.workers[first.to].gpus[0])
                            .latency;
  Network network(o.deployment.topology);
  std::vector<Completion> done;
  Nanos now = 0;
  const auto drain_until = [&](Nanos until) {
    for (;;) {
      const Nanos next = network.next_completion(now);
      if (next > until) return;
      now = next;
      network.complete(next, done);
      for (const Completion& flow : done) {
        if (flow.tag < counted) landed = std::max(landed, now + (first.op == Op::read ? 2 : 1) * latency);
      }
    }
  };
  for (std::size_t i = 0; i < starts.size(); ++i) {
    if (i > 0 && starts[i].time > now) drain_until(starts[i].time);
    now = starts[i].time;
    network.start(now, starts[i].flow);
  }
  drain_until(kNever - 1);
  return landed;
}

/// First contact: remote ranks one after the other, each a handshake, and a descriptor for every block and
/// region of its pool unless only notifications go there.
inline Nanos foretell_contact(const Outcomes& o, std::int32_t remotes, std::int32_t regions, std::size_t pool,
                              bool notifications_only) {
  const TransferConfig& t = o.loaded.scenario.transfer;
  const Nanos prepared = std::int64_t{regions} * o.deployment.pools[pool].blocks * t.prep_per_descriptor;
  return remotes * (t.handshake + (notifications_only ? 0 : prepared));
}

// -------------------------------------------------------------------------------- what must always hold

inline std::size_t count(const RunResult& run, RequestStatus status) {
  return static_cast<std::size_t>(
      std::ranges::count_if(run.requests, [&](const RequestRecord& r) { return r.status == status; }));
}

/// Nothing when equal, else the first line that differs: a page of JSON twice helps nobody.
inline std::string first_difference(const std::string& a, const std::string& b) {
  if (a == b) return {};
  std::istringstream in_a(a), in_b(b);
  std::string x, y;
  for (int line = 1;; ++line) {
    const bool more_a = static_cast<bool>(std::getline(in_a, x)),
               more_b = static_cast<bool>(std::getline(in_b, y));
    if (!more_a) x = "(no more)";
    if (!more_b) y = "(no more)";
    if (x != y || (!more_a && !more_b)) return "line " + std::to_string(line) + "\n  " + x + "\n  " + y;
  }
}

/// What is conserved, checked from outside the simulation.
inline void expect_conserved(const Outcomes& o, const Trace& trace) {
  const RunResult& run = o.run;
  ASSERT_EQ(run.requests.size(), trace.requests.size());
  EXPECT_EQ(run.status, RunStatus::finished) << run.stall;
  const TransferTotals& totals = run.transfers;
  std::int64_t bytes = 0, descriptors = 0, transfers = 0, read_back_bytes = 0, read_backs = 0,
               handed_over = 0;
  std::uint64_t gaps = 0;
  bool cut_short = false;  // a request ended between its first token and its last
  Nanos last = 0;
  for (std::size_t i = 0; i < run.requests.size(); ++i) {
    const RequestRecord& r = run.requests[i];
    SCOPED_TRACE("request " + std::to_string(i));
    // Requests: each has an end, and a reason exactly if it did not complete.
    ASSERT_NE(r.status, RequestStatus::in_flight);
    EXPECT_EQ(r.status == RequestStatus::completed, r.reason == Reason::none);
    EXPECT_EQ(r.prompt_tokens, trace.requests[i].prompt_tokens);
    EXPECT_EQ(r.output_tokens, trace.requests[i].output_tokens);
    EXPECT_GE(r.end, r.arrival);
    last = std::max(last, r.end);
    // Time: stages are its end-to-end time, none negative.
    EXPECT_EQ(std::accumulate(r.stages.begin(), r.stages.end(), Nanos{0}), r.e2e());
    for (const Nanos stage : r.stages) EXPECT_GE(stage, 0);
    bytes += r.transfer_bytes;
    descriptors += r.descriptors;
    transfers += r.transfer_bytes > 0 ? 1 : 0;
    read_back_bytes += r.read_back_bytes;
    read_backs += r.read_back_bytes > 0 ? 1 : 0;
    // Retained KV: what was read was decided on, and counts as remote.
    const bool hit = r.reuse == Reuse::hit || r.reuse == Reuse::hit_slower_than_recompute;
    EXPECT_EQ(r.remote_hit_tokens > 0, hit);
    if (hit) {
      EXPECT_GT(r.read_back_bytes, 0);
      EXPECT_TRUE(r.read_chosen);
    }
    if (r.read_chosen) {
      EXPECT_GE(r.predicted_read, 0);
      EXPECT_GE(r.predicted_compute, 0);
    }
    if (r.status != RequestStatus::completed) {
      cut_short = cut_short || r.first_token >= 0;
      continue;
    }
    handed_over += r.output_tokens > 0 && r.prefill_worker != r.decode_worker ? 1 : 0;
    // Tokens: at least the last one of a prompt is computed; what decode has is found or moved there.
    EXPECT_LT(r.local_hit_tokens + r.remote_hit_tokens, r.prompt_tokens);
    if (r.output_tokens > 0) {
      EXPECT_GT(r.first_token, r.arrival);
      EXPECT_LE(r.first_token, r.end);
      EXPECT_EQ(r.output_tokens == 1, r.first_token == r.end);
    } else {
      EXPECT_EQ(r.first_token, -1);
    }
    if (r.transferred_tokens > 0) {
      EXPECT_NE(r.prefill_worker, r.decode_worker);
      EXPECT_EQ(r.transferred_tokens + r.decode_hit_tokens, r.prompt_tokens);
      EXPECT_GT(r.descriptors, 0);
      EXPECT_GT(r.transfer_bytes, 0);
    }
    if (r.counted && r.output_tokens > 0) gaps += static_cast<std::uint64_t>(r.output_tokens - 1);
  }
  EXPECT_EQ(last, run.end);
  // A gap for each token but the first; of requests that ended on the way there are some more.
  if (cut_short) {
    EXPECT_GE(run.gaps.n(), gaps);
  } else {
    EXPECT_EQ(run.gaps.n(), gaps);
  }
  // Bytes: of requests = of transfers = what the links carried out of one side and into the other. A
  // transfer of several batches is one, and its descriptors are those of all of them.
  EXPECT_EQ(bytes, totals.bytes);
  EXPECT_EQ(descriptors, totals.descriptors);
  EXPECT_EQ(read_back_bytes, totals.read_back_bytes);
  EXPECT_EQ(read_backs, totals.read_backs);
  EXPECT_GE(totals.batches, transfers + read_backs);
  EXPECT_EQ(totals.post_ms.size(), static_cast<std::size_t>(totals.count));
  EXPECT_GE(std::accumulate(totals.outcomes.begin(), totals.outcomes.end(), std::int64_t{0}), handed_over);
  if (totals.failed == 0 && outcome(run, TransferOutcome::part_failed) == 0 &&
      count(run, RequestStatus::cancelled) == 0 && count(run, RequestStatus::failed) == 0) {
    EXPECT_EQ(transfers, totals.count);
    Bytes sent = 0, received = 0;
    for (const LinkReport& link : run.links) {
      if (link.name.ends_with("-tx")) sent += link.bytes;
      if (link.name.ends_with("-rx")) received += link.bytes;
      EXPECT_LE(link.max, 1 + 1e-9) << link.name;
      EXPECT_LE(link.mean, link.max + 1e-12) << link.name;
    }
    EXPECT_EQ(sent, totals.bytes + totals.read_back_bytes);
    EXPECT_EQ(received, totals.bytes + totals.read_back_bytes);
    EXPECT_EQ(totals.wire_ms.size(), static_cast<std::size_t>(totals.count));
  }
  // Every pin has one end, and tokens read back are those of the requests that read them.
  const RetentionTotals& kept = run.retention;
  EXPECT_EQ(kept.pins, kept.read + kept.notified + kept.expired + kept.let_go + kept.lost + kept.outstanding);
  EXPECT_EQ(
      std::accumulate(run.requests.begin(), run.requests.end(), std::int64_t{0},
                      [](std::int64_t sum, const RequestRecord& r) { return sum + r.remote_hit_tokens; }),
      kept.hit_tokens);
  for (const WorkerReport& w : run.workers) {
    EXPECT_LE(w.busy, run.end) << w.name;
    EXPECT_LE(w.kv_usage_mean, w.kv_usage_max + 1e-12) << w.name;
    EXPECT_LE(w.kv_usage_max, 1.0) << w.name;
  }
  const auto& q = o.summary["requests"];
  EXPECT_EQ(q["injected"].get<std::size_t>(), trace.requests.size());
  EXPECT_EQ(q["injected"].get<std::int64_t>(),
            q["completed"].get<std::int64_t>() + q["rejected"].get<std::int64_t>() +
                q["failed"].get<std::int64_t>() + q["cancelled"].get<std::int64_t>() +
                q["in_flight"].get<std::int64_t>());
  const auto& c = o.summary["cache"];
  EXPECT_EQ(c["prompt_tokens"].get<std::int64_t>(), c["local_hit_tokens"].get<std::int64_t>() +
                                                        c["remote_hit_tokens"].get<std::int64_t>() +
                                                        c["computed_tokens"].get<std::int64_t>());
  double stages = 0;
  for (const auto& [name, d] : o.summary["stages_ms"].items()) stages += d["mean"].get<double>();
  const double e2e = o.summary["latency_ms"]["e2e"]["mean"].get<double>();
  EXPECT_NEAR(stages, e2e, 1e-9 * e2e);
}

}  // namespace pdsim
