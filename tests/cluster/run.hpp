// One simulation as a test sees it: a scenario written in the test, a trace made in it, everything that
// comes out, and what must hold of it whatever it was.
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

inline Outcomes run_text(const std::string& scenario, const Trace& trace, const Sets& sets = {}) {
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
  std::int64_t bytes = 0, descriptors = 0, transfers = 0;
  std::uint64_t gaps = 0;
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
    if (r.status != RequestStatus::completed) continue;
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
  // A gap for each token but the first (of requests that failed on the way there are none here to count).
  EXPECT_EQ(run.gaps.n(), gaps);
  // Bytes: of requests = of transfers = what the links carried out of one side and into the other.
  EXPECT_EQ(bytes, run.transfers.bytes);
  EXPECT_EQ(descriptors, run.transfers.descriptors);
  EXPECT_EQ(transfers, run.transfers.count);
  EXPECT_EQ(run.transfers.post_ms.size(), static_cast<std::size_t>(run.transfers.count));
  if (run.transfers.failed == 0) {
    Bytes sent = 0, received = 0;
    for (const LinkReport& link : run.links) {
      if (link.name.ends_with("-tx")) sent += link.bytes;
      if (link.name.ends_with("-rx")) received += link.bytes;
      EXPECT_LE(link.max, 1 + 1e-9) << link.name;
      EXPECT_LE(link.mean, link.max + 1e-12) << link.name;
    }
    EXPECT_EQ(sent, run.transfers.bytes);
    EXPECT_EQ(received, run.transfers.bytes);
    EXPECT_EQ(run.transfers.wire_ms.size(), static_cast<std::size_t>(run.transfers.count));
  }
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
