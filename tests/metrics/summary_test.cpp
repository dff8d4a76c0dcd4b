// The summary and the table of requests from records made by hand: every number is computed here again,
// from the contract's words.
#include "sim/metrics/summary.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

namespace pdsim {
namespace {

using Json = nlohmann::ordered_json;

constexpr Nanos kMs = kMillisecond;

RequestRecord completed(Nanos arrival, std::array<Nanos, kStageNames.size()> stages, std::int32_t prompt,
                        std::int32_t output) {
  RequestRecord r;
  r.arrival = r.mark = arrival;
  r.prompt_tokens = prompt;
  r.output_tokens = output;
  r.counted = true;
  r.status = RequestStatus::completed;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (i == static_cast<std::size_t>(Stage::decode)) r.first_token = r.mark;
    r.charge(static_cast<Stage>(i), r.mark + stages[i]);
  }
  r.end = r.mark;
  return r;
}

std::array<Nanos, kStageNames.size()> stages(Nanos router, Nanos queue, Nanos prefill, Nanos decode) {
  std::array<Nanos, kStageNames.size()> s{};
  s[static_cast<std::size_t>(Stage::router)] = router * kMs;
  s[static_cast<std::size_t>(Stage::prefill_queue)] = queue * kMs;
  s[static_cast<std::size_t>(Stage::prefill)] = prefill * kMs;
  s[static_cast<std::size_t>(Stage::decode)] = decode * kMs;
  return s;
}

struct Fixture {
  RunResult run;
  RunContext context;
  Trace trace;

  Fixture() {
    trace.name = "trace.jsonl";
    trace.format = "mooncake";
    context.scenario = "scenario";
  }
  void add(const RequestRecord& r, std::int32_t session = -1, std::int32_t turn = 0) {
    run.requests.push_back(r);
    Request request;
    request.arrival = r.arrival;
    request.prompt_tokens = r.prompt_tokens;
    request.output_tokens = r.output_tokens;
    request.session = session;
    request.turn = turn;
    trace.requests.push_back(request);
    run.end = std::max(run.end, r.end);
  }
  Json summary() const { return summarize(run, context, trace); }
};

/// Two requests done, one without output, one rejected, one failed, one under way, one outside the window.
Fixture mixed() {
  Fixture f;
  f.add(completed(0, stages(1, 2, 30, 67), 100, 11));       // TTFT 33, TPOT 6.7, 100
  f.add(completed(10 * kMs, stages(1, 0, 9, 40), 300, 5));  // TTFT 10, TPOT 10, 50
  RequestRecord silent = completed(20 * kMs, stages(1, 0, 19, 0), 50, 0);
  silent.first_token = -1;
  f.add(silent);  // 20
  RequestRecord rejected;
  rejected.arrival = rejected.mark = rejected.end = 30 * kMs;
  rejected.prompt_tokens = 1 << 20;
  rejected.counted = true;
  rejected.status = RequestStatus::rejected;
  rejected.reason = Reason::exceeds_max_model_len;
  f.add(rejected);
  RequestRecord failed = completed(40 * kMs, stages(1, 0, 9, 0), 70, 4);
  failed.status = RequestStatus::failed;
  failed.reason = Reason::kv_lease_expired;
  failed.first_token = -1;
  f.add(failed);
  RequestRecord under_way;
  under_way.arrival = under_way.mark = 50 * kMs;
  under_way.prompt_tokens = 10;
  under_way.output_tokens = 10;
  under_way.counted = true;
  f.add(under_way);
  RequestRecord outside = completed(60 * kMs, stages(1, 0, 9, 990), 100, 100);
  outside.counted = false;
  f.add(outside);
  return f;
}

TEST(Summary, RequestsAreConserved) {
  const Json s = mixed().summary();
  const Json& r = s["requests"];
  EXPECT_EQ(r["injected"], 7);
  EXPECT_EQ(r["completed"], 4);
  EXPECT_EQ(r["rejected"], 1);
  EXPECT_EQ(r["failed"], 1);
  EXPECT_EQ(r["cancelled"], 0);
  EXPECT_EQ(r["in_flight"], 1);
  EXPECT_EQ(r["by_reason"], (Json{{"exceeds_max_model_len", 1}, {"kv_lease_expired", 1}}));
}

// A request that an interrupted run never got to is not injected.
TEST(Summary, WhatNeverArrivedIsNotInjected) {
  Fixture f = mixed();
  f.run.status = RunStatus::interrupted;
  f.add(RequestRecord{});
  const Json s = f.summary();
  EXPECT_EQ(s["requests"]["injected"], 7);
  EXPECT_EQ(s["status"], "interrupted");
}

// Percentiles are over completed requests inside the window, as numpy's: of 100, 50 and 20 ms the median is
// 50 and p90 is 50 + 0.8 x 50 = 90. A request without output has no TTFT, one of a single token no TPOT.
TEST(Summary, Latencies) {
  Fixture f = mixed();
  f.add(completed(70 * kMs, stages(1, 0, 4, 0), 10, 1));  // TTFT 5, no TPOT, 5
  const Json s = f.summary();
  const Json& e2e = s["latency_ms"]["e2e"];
  EXPECT_EQ(e2e["n"], 4);
  EXPECT_DOUBLE_EQ(e2e["mean"], (100 + 50 + 20 + 5) / 4.0);
  EXPECT_DOUBLE_EQ(e2e["p50"], 35);
  EXPECT_DOUBLE_EQ(e2e["p90"], 50 + 0.7 * 50);
  EXPECT_DOUBLE_EQ(e2e["max"], 100);
  const Json& ttft = s["latency_ms"]["ttft"];
  EXPECT_EQ(ttft["n"], 3);
  EXPECT_DOUBLE_EQ(ttft["mean"], (33 + 10 + 5) / 3.0);
  const Json& tpot = s["latency_ms"]["tpot"];
  EXPECT_EQ(tpot["n"], 2);
  EXPECT_DOUBLE_EQ(tpot["mean"], (6.7 + 10) / 2);
}

TEST(Summary, MeansOfStagesSumToTheMeanEndToEnd) {
  const Json s = mixed().summary();
  double sum = 0;
  std::vector<std::string> names;
  for (const auto& [name, d] : s["stages_ms"].items()) {
    EXPECT_EQ(d["n"], 3) << name;
    sum += d["mean"].get<double>();
    names.push_back(name);
  }
  EXPECT_NEAR(sum, s["latency_ms"]["e2e"]["mean"].get<double>(), 1e-9);
  EXPECT_EQ(names, std::vector<std::string>(kStageNames.begin(), kStageNames.end()));
  EXPECT_DOUBLE_EQ(s["stages_ms"]["prefill"]["mean"], (30 + 9 + 19) / 3.0);
}

// Rates are over the counted requests' own span, from the first arrival (0) to the last end (100 ms).
TEST(Summary, Throughput) {
  Fixture f = mixed();
  f.context.nodes = {{98.0, "2026-11", 8, 3}, {98.0, "2026-11", 8, 1}};
  const Json s = f.summary();
  const Json& t = s["throughput"];
  EXPECT_DOUBLE_EQ(t["requests_per_s"], 3 / 0.1);
  EXPECT_DOUBLE_EQ(t["prompt_tokens_per_s"], 450 / 0.1);
  EXPECT_DOUBLE_EQ(t["output_tokens_per_s"], 16 / 0.1);
  EXPECT_DOUBLE_EQ(t["output_tokens_per_s_per_gpu"], 16 / 0.1 / 4);
}

// A request meets the SLO by its own TTFT and TPOT; a metric that it does not have cannot fail it. The
// fraction is of all counted requests: who is rejected or fails has not met it.
TEST(Summary, GoodputIsByOwnLatencies) {
  Fixture f = mixed();
  f.context.slo = {{"ttft_ms", {{"p95", 33.0}}}, {"tpot_ms", {{"p95", 10.0}}}};
  Json s = f.summary();
  EXPECT_DOUBLE_EQ(s["goodput"]["fraction"], 3.0 / 6);
  EXPECT_DOUBLE_EQ(s["goodput"]["requests_per_s"], 3 / 0.1);
  EXPECT_TRUE(s["goodput"]["slo"]["ttft_ms"]["p95"]["met"].get<bool>());
  EXPECT_DOUBLE_EQ(s["goodput"]["slo"]["ttft_ms"]["p95"]["bound"], 33);
  EXPECT_DOUBLE_EQ(s["goodput"]["slo"]["ttft_ms"]["p95"]["value"], 10 + 0.95 * 23);

  f.context.slo["ttft_ms"]["p95"] = 32.0;  // the first misses, though the p95 of both does not
  s = f.summary();
  EXPECT_DOUBLE_EQ(s["goodput"]["fraction"], 2.0 / 6);
  EXPECT_TRUE(s["goodput"]["slo"]["ttft_ms"]["p95"]["met"].get<bool>());

  // Of several percentiles a single request is held to the highest one's bound.
  f.context.slo = {{"ttft_ms", {{"p50", 5.0}, {"p99", 40.0}}}};
  s = f.summary();
  EXPECT_DOUBLE_EQ(s["goodput"]["fraction"], 3.0 / 6);
  EXPECT_FALSE(s["goodput"]["slo"]["ttft_ms"]["p50"]["met"].get<bool>());

  f.context.slo.clear();  // none: everything that completed
  EXPECT_DOUBLE_EQ(f.summary()["goodput"]["fraction"], 3.0 / 6);
}

// billed: whole instances from the first arrival to the last completion; used: the GPUs that the pools hold.
TEST(Summary, Cost) {
  Fixture f;
  f.add(completed(3600 * kSecond, stages(0, 0, 1'800'000, 1'800'000), 100, 1001));  // one hour
  f.add(completed(3600 * kSecond, stages(0, 0, 900'000, 900'000), 100, 999));
  f.context.nodes = {{80.0, "2026-11", 8, 8}, {80.0, "2026-10", 8, 2}};
  f.context.slo = {{"ttft_ms", {{"p95", 1'000'000.0}}}};
  const Json c = f.summary()["cost"];
  EXPECT_DOUBLE_EQ(c["billed_usd"], 160);
  EXPECT_DOUBLE_EQ(c["used_usd"], 80 + 20);
  EXPECT_DOUBLE_EQ(c["usd_per_completed_request"], 80);
  EXPECT_DOUBLE_EQ(c["usd_per_request_in_slo"], 160);
  EXPECT_DOUBLE_EQ(c["usd_per_million_output_tokens"], 160 / 0.002);
  EXPECT_DOUBLE_EQ(c["gpu_hours"], 10);
  EXPECT_EQ(c["prices_as_of"], "2026-10, 2026-11");

  f.context.nodes[1].usd_per_hour.reset();  // a price that nobody has published makes all unknown
  const Json unknown = f.summary()["cost"];
  EXPECT_TRUE(unknown["billed_usd"].is_null());
  EXPECT_TRUE(unknown["usd_per_completed_request"].is_null());
  EXPECT_DOUBLE_EQ(unknown["gpu_hours"], 10);
}

TEST(Summary, NothingCompletedIsAllZerosAndNulls) {
  Fixture f;
  RequestRecord rejected;
  rejected.prompt_tokens = 5;
  rejected.end = 0;
  rejected.counted = true;
  rejected.status = RequestStatus::rejected;
  rejected.reason = Reason::exceeds_kv_cache;
  f.add(rejected);
  f.context.nodes = {{80.0, "2026-11", 8, 8}};
  f.context.slo = {{"ttft_ms", {{"p95", 1.0}}}};
  const Json s = f.summary();
  EXPECT_EQ(s["latency_ms"]["ttft"]["n"], 0);
  EXPECT_EQ(s["latency_ms"]["ttft"]["max"], 0.0);
  EXPECT_EQ(s["throughput"]["requests_per_s"], 0.0);
  EXPECT_EQ(s["goodput"]["fraction"], 0.0);
  EXPECT_FALSE(s["goodput"]["slo"]["ttft_ms"]["p95"]["met"].get<bool>());
  EXPECT_TRUE(s["cost"]["usd_per_completed_request"].is_null());
  EXPECT_EQ(s["bound_by"]["code"], "none");
  EXPECT_FALSE(summary_table(s).empty());
}

// hit + computed = prompt, over completed requests inside the window; what is computed again is counted
// apart.
TEST(Summary, CacheTokens) {
  Fixture f = mixed();
  f.run.requests[0].local_hit_tokens = 64;
  f.run.requests[1].local_hit_tokens = 256;
  f.run.requests[1].remote_hit_tokens = 16;
  f.run.requests[1].recomputed_tokens = 7;
  f.run.requests[0].preemptions = 2;
  f.run.workers.resize(2);
  f.run.workers[0].evicted_blocks = 3;
  f.run.workers[1].evicted_blocks = 4;
  const Json c = f.summary()["cache"];
  EXPECT_EQ(c["prompt_tokens"], 100 + 300 + 50);
  EXPECT_EQ(c["local_hit_tokens"], 320);
  EXPECT_EQ(c["remote_hit_tokens"], 16);
  EXPECT_EQ(c["computed_tokens"], 450 - 336);
  EXPECT_EQ(c["recomputed_tokens"], 7);
  EXPECT_EQ(c["preemptions"], 2);
  EXPECT_EQ(c["evicted_blocks"], 7);
}

// Where most of the completed requests' time goes.
TEST(Summary, BoundBy) {
  struct Case {
    Stage stage;
    const char* code;
  };
  for (const Case& c :
       {Case{Stage::prefill_queue, "prefill_queue"}, Case{Stage::prefill, "prefill_compute"},
        Case{Stage::decode_admission, "decode_admission"}, Case{Stage::transfer_post, "transfer_post"},
        Case{Stage::transfer_wire, "transfer_wire"}, Case{Stage::transfer_poll, "step_alignment"},
        Case{Stage::decode, "decode_compute"}, Case{Stage::router, "router"}}) {
    Fixture f;
    std::array<Nanos, kStageNames.size()> s{};
    s.fill(1 * kMs);
    s[static_cast<std::size_t>(c.stage)] = 39 * kMs;
    f.add(completed(0, s, 10, 2));
    const Json b = f.summary()["bound_by"];
    EXPECT_EQ(b["code"], c.code);
    EXPECT_GE(b["share"].get<double>(), 39.0 / 50);
    EXPECT_LE(b["share"].get<double>(), 1.0);
    EXPECT_FALSE(b["text"].get<std::string>().empty());
  }
}

TEST(Summary, WorkersLinksAndTransfers) {
  Fixture f;
  f.add(completed(0, stages(1, 0, 9, 990), 10, 2));  // ends at 1 s
  WorkerReport w;
  w.name = "prefill-0";
  w.role = "prefill";
  w.steps = 10;
  w.busy = 250 * kMs;
  w.work = {5e13, 1e11};
  w.peak_flops_per_ns = 1e6;  // 1 PFLOP/s
  w.peak_bytes_per_ns = 4000;
  w.kv_usage_mean = 0.25;
  w.kv_usage_max = 0.5;
  f.run.workers.push_back(w);
  f.run.extrapolated_steps = 4;
  f.run.events = 123;
  f.run.links.push_back({"node0/gpu0/efa-tx", 77, 0.1, 0.9});
  f.run.transfers.count = 2;
  f.run.transfers.bytes = 77;
  f.run.transfers.descriptors = 320;
  f.run.transfers.post_ms = {1, 3};
  f.run.transfers.wire_ms = {10, 30};
  f.run.transfers.prefill_byte_seconds = 5;
  const Json s = f.summary();
  EXPECT_DOUBLE_EQ(s["workers"][0]["busy_fraction"], 0.25);
  EXPECT_DOUBLE_EQ(s["workers"][0]["mfu"], 5e13 / (0.25e9 * 1e6));
  EXPECT_DOUBLE_EQ(s["workers"][0]["hbm_fraction"], 1e11 / (0.25e9 * 4000));
  EXPECT_DOUBLE_EQ(s["workers"][0]["kv_usage"]["max"], 0.5);
  EXPECT_DOUBLE_EQ(s["cost_model"]["extrapolated_step_fraction"], 0.4);
  EXPECT_EQ(s["links"][0]["bytes"], 77);
  EXPECT_DOUBLE_EQ(s["links"][0]["utilization"]["max"], 0.9);
  EXPECT_DOUBLE_EQ(s["transfers"]["post_ms"]["mean"], 2);
  EXPECT_DOUBLE_EQ(s["transfers"]["wire_ms"]["max"], 30);
  EXPECT_DOUBLE_EQ(s["transfers"]["kv_byte_seconds_held"]["prefill"], 5);
  EXPECT_DOUBLE_EQ(s["simulated_s"], 1.0);
  EXPECT_EQ(s["events"], 123);
}

std::vector<std::string> keys(const Json& j) {
  std::vector<std::string> out;
  for (const auto& [key, value] : j.items()) out.push_back(key);
  return out;
}

// CONTRACT's summary.json, in its order; what is below a section may be more, never less.
TEST(Summary, HasTheKeysOfTheContract) {
  Fixture f = mixed();
  f.run.workers.resize(1);
  f.run.links.resize(1);
  const Json s = f.summary();
  EXPECT_EQ(keys(s),
            (std::vector<std::string>{
                "schema",    "scenario",   "trace",    "seed",   "status",     "requests",    "latency_ms",
                "stages_ms", "throughput", "goodput",  "cache",  "transfers",  "workers",     "links",
                "cost",      "reuse",      "bound_by", "inputs", "cost_model", "simulated_s", "events"}));
  EXPECT_EQ(s["schema"], "pdsim.summary/1");
  const std::vector<std::pair<Json, std::vector<const char*>>> sections = {
      {s["requests"], {"injected", "completed", "rejected", "failed", "cancelled", "in_flight", "by_reason"}},
      {s["latency_ms"], {"ttft", "tpot", "itl", "e2e"}},
      {s["latency_ms"]["ttft"], {"mean", "p50", "p90", "p95", "p99", "max", "n"}},
      {s["throughput"],
       {"requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "output_tokens_per_s_per_gpu"}},
      {s["goodput"], {"slo", "fraction", "requests_per_s"}},
      {s["cache"],
       {"prompt_tokens", "local_hit_tokens", "remote_hit_tokens", "computed_tokens", "recomputed_tokens",
        "evicted_blocks", "preemptions"}},
      {s["transfers"],
       {"count", "failed", "retried", "bytes", "descriptors", "post_ms", "wire_ms", "kv_byte_seconds_held"}},
      {s["transfers"]["kv_byte_seconds_held"], {"prefill", "decode"}},
      {s["workers"][0], {"name", "role", "busy_fraction", "mfu", "hbm_fraction", "steps", "kv_usage"}},
      {s["workers"][0]["kv_usage"], {"mean", "max"}},
      {s["links"][0], {"name", "bytes", "utilization"}},
      {s["links"][0]["utilization"], {"mean", "max"}},
      {s["cost"],
       {"billed_usd", "used_usd", "usd_per_completed_request", "usd_per_request_in_slo",
        "usd_per_million_output_tokens", "gpu_hours", "prices_as_of"}},
      {s["bound_by"], {"code", "share", "text"}},
      {s["inputs"], {"scenario", "trace", "profile", "prices"}},
      {s["cost_model"], {"profile", "extrapolated_step_fraction"}},
  };
  for (const auto& [section, names] : sections) {
    for (const char* name : names) EXPECT_TRUE(section.contains(name)) << name;
  }
  EXPECT_FALSE(summary_table(s).empty());
}

// ---------------------------------------------------------------------------------- requests.csv

std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> out;
  std::stringstream in(line);
  for (std::string cell; std::getline(in, cell, ',');) out.push_back(cell);
  return out;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> out;
  std::stringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

TEST(RequestsCsv, HasTheColumnsOfTheContractInOrder) {
  const Fixture f = mixed();
  const std::vector<std::string> rows = lines(requests_csv(f.run, f.trace, {}));
  EXPECT_EQ(rows[0],
            "request_id,session_id,turn,status,reason,arrival_ns,prompt_tokens,output_tokens,prefill_worker,"
            "decode_worker,local_hit_tokens,remote_hit_tokens,decode_hit_tokens,transferred_tokens,"
            "transfer_bytes,descriptors,preemptions,retries,reuse_outcome,prefill_changed,decode_changed,"
            "concurrency_at_arrival,ttft_ns,tpot_ns,itl_max_ns,e2e_ns,failed_attempts_ns,router_ns,"
            "prefill_queue_ns,reuse_transfer_ns,prefill_ns,handoff_dispatch_ns,decode_admission_ns,"
            "transfer_post_ns,transfer_wire_ns,transfer_poll_ns,first_token_ns,decode_ns");
  EXPECT_EQ(rows.size(), 1 + 7u);
  for (const std::string& row : rows)
    EXPECT_EQ(std::ranges::count(row, ','), std::ranges::count(rows[0], ','));
}

TEST(RequestsCsv, StagesSumToTheEndToEndTime) {
  const Fixture f = mixed();
  for (const std::string& row : lines(requests_csv(f.run, f.trace, {}))) {
    const std::vector<std::string> c = cells(row);
    if (c[0] == "request_id" || c[25].empty()) continue;
    std::int64_t sum = 0;
    for (std::size_t i = 26; i < c.size(); ++i) sum += std::stoll(c[i]);
    EXPECT_EQ(sum, std::stoll(c[25])) << row;
  }
}

TEST(RequestsCsv, ValuesAndWhatIsAbsent) {
  Fixture f = mixed();
  f.run.requests[0].prefill_worker = 0;
  f.run.requests[0].decode_worker = 1;
  f.run.requests[0].longest_gap = 9 * kMs;
  const std::vector<std::string> rows = lines(requests_csv(f.run, f.trace, {"prefill-0", "decode-0"}));
  const std::vector<std::string> done = cells(rows[1]), silent = cells(rows[3]), rejected = cells(rows[4]);
  EXPECT_EQ(done[1] + done[2], "");  // no session, no turn
  EXPECT_EQ(done[3], "completed");
  EXPECT_EQ(done[8] + " " + done[9], "prefill-0 decode-0");
  EXPECT_EQ(done[22], "33000000");
  EXPECT_EQ(done[23], "6700000");
  EXPECT_EQ(done[24], "9000000");
  EXPECT_EQ(done[25], "100000000");
  EXPECT_EQ(silent[22] + silent[23] + silent[24], "");  // no token, so no token latency
  EXPECT_EQ(silent[25], "20000000");
  EXPECT_EQ(rejected[3] + " " + rejected[4], "rejected exceeds_max_model_len");
  EXPECT_EQ(rejected[25], "0");
  EXPECT_EQ(cells(rows[6])[25], "");  // under way
}

// Whether a session's turn went elsewhere than its turn before.
TEST(RequestsCsv, ChangesOfWorkerWithinASession) {
  Fixture f;
  f.trace.sessions = {"a", "b"};
  const std::uint32_t workers[][2] = {{0, 2}, {1, 2}, {0, 2}, {1, 3}};
  const std::int32_t sessions[] = {0, 1, 0, 0};
  for (int i = 0; i < 4; ++i) {
    RequestRecord r = completed(i * kMs, stages(1, 0, 1, 1), 10, 2);
    r.prefill_worker = workers[i][0];
    r.decode_worker = workers[i][1];
    f.add(r, sessions[i], i);
  }
  const std::vector<std::string> rows = lines(requests_csv(f.run, f.trace, {"p0", "p1", "d0", "d1"}));
  std::string changes;
  for (int i = 0; i < 4; ++i) {
    const std::vector<std::string> c = cells(rows[static_cast<std::size_t>(i) + 1]);
    changes += c[1] + c[19] + c[20] + " ";
  }
  EXPECT_EQ(changes, "a00 b00 a00 a11 ");
}

}  // namespace
}  // namespace pdsim
