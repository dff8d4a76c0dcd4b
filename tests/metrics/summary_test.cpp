// The summary and the table of requests from records made by hand: every number is computed here again,
// from the contract's words.
#include "sim/metrics/summary.hpp"

#include <fmt/format.h>
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

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> out;
  std::stringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
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
        Case{Stage::transfer_wire, "transfer_wire"}, Case{Stage::reuse_transfer, "reuse_transfer"},
        Case{Stage::transfer_poll, "step_alignment"}, Case{Stage::decode, "decode_compute"},
        Case{Stage::router, "router"}}) {
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

// Blocks that only retained turns lack decode of are named as theirs.
TEST(Summary, BoundByPinnedBlocks) {
  Fixture f;
  std::array<Nanos, kStageNames.size()> s{};
  s[static_cast<std::size_t>(Stage::decode_admission)] = 40 * kMs;
  f.add(completed(0, s, 10, 2));
  WorkerReport w;
  w.role = "decode";
  w.waits = {0, 0, 40 * kMs, 0, 0};  // for blocks
  f.run.workers.push_back(w);
  EXPECT_EQ(f.summary()["bound_by"]["code"], "decode_kv_blocks");
  f.run.workers.back().waits = {0, 0, 21 * kMs, 0, 19 * kMs};  // for blocks, and for those that pins hold
  EXPECT_EQ(f.summary()["bound_by"]["code"], "decode_kv_blocks");
  f.run.workers.back().waits = {0, 0, 19 * kMs, 0, 21 * kMs};
  EXPECT_EQ(f.summary()["bound_by"]["code"], "decode_pinned_blocks");
}

// Prefill out of blocks because decode does not fetch its prompts, for want of blocks that pins hold: the
// pins are named. Where prefill's own prompts fill it, or decode waits for nothing, they are not.
TEST(Summary, BoundByPinnedBlocksBehindPrefill) {
  Fixture f;
  std::array<Nanos, kStageNames.size()> s{};
  s[static_cast<std::size_t>(Stage::prefill_queue)] = 40 * kMs;
  f.add(completed(0, s, 10, 2));
  WorkerReport prefill, decode;
  prefill.role = "prefill";
  prefill.waits = {0, 0, 40 * kMs, 0, 0};
  prefill.blocks.add(0, 0, kMs, 3);  // running
  prefill.blocks.add(2, 0, kMs, 4);  // leased
  decode.role = "decode";
  decode.waits = {0, 0, 1 * kMs, 0, 9 * kMs};
  f.run.workers = {prefill, decode};
  EXPECT_EQ(f.summary()["bound_by"]["code"], "decode_pinned_blocks");
  f.run.workers[0].blocks.add(0, 0, kMs, 2);
  EXPECT_EQ(f.summary()["bound_by"]["code"], "prefill_kv_blocks");
  prefill.blocks.add(2, 0, kMs, 9);
  decode.waits = {0, 0, 0, 0, 0};
  f.run.workers = {prefill, decode};
  EXPECT_EQ(f.summary()["bound_by"]["code"], "prefill_kv_blocks");
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

// What is counted is what the run counted; outcomes that never happened are not there.
TEST(Summary, TransfersSayHowTheyEnded) {
  Fixture f;
  f.add(completed(0, stages(1, 0, 9, 990), 10, 2));
  EXPECT_TRUE(f.summary()["transfers"]["mode"].is_null());  // nothing is handed over
  f.context.mode = "push";
  TransferTotals& t = f.run.transfers;
  t.outcomes[static_cast<std::size_t>(TransferOutcome::completed)] = 12;  // three of them read back
  t.read_back_outcomes[static_cast<std::size_t>(TransferOutcome::completed)] = 3;
  t.read_back_outcomes[static_cast<std::size_t>(TransferOutcome::skipped)] = 2;
  t.outcomes[static_cast<std::size_t>(TransferOutcome::skipped)] = 2;
  t.batches = 31;
  t.slow_posts = 1;
  t.read_backs = 3;
  t.read_back_bytes = 300;
  t.read_back_descriptors = 30;
  t.stale_reads = 4;
  t.stale_reads_prevented = 5;
  t.stale_writes = 6;
  t.stale_writes_prevented = 7;
  t.watchdogs = 8;
  t.messages_lost = 10;
  t.handshakes = 2;
  t.handshake_time = 1500 * kMs;
  const Json s = f.summary()["transfers"];
  EXPECT_EQ(s["mode"], "push");
  EXPECT_EQ(s["by_outcome"], (Json{{"completed", 9}}));
  EXPECT_EQ(s["batches"], 31);
  EXPECT_EQ(s["slow_posts"], 1);
  EXPECT_EQ(s["read_back"], (Json{{"count", 3},
                                  {"bytes", 300},
                                  {"descriptors", 30},
                                  {"by_outcome", {{"completed", 3}, {"skipped", 2}}}}));
  EXPECT_EQ(s["stale_reads"], 4);
  EXPECT_EQ(s["stale_reads_prevented"], 5);
  EXPECT_EQ(s["stale_writes"], 6);
  EXPECT_EQ(s["stale_writes_prevented"], 7);
  EXPECT_EQ(s["watchdogs"], 8);
  EXPECT_EQ(s["messages_lost"], 10);
  EXPECT_EQ(s["handshakes"], (Json{{"count", 2}, {"seconds", 1.5}}));
}

TEST(Summary, RetentionIsThereWhenTransfersAreBidirectional) {
  Fixture f = mixed();
  EXPECT_FALSE(f.summary().contains("retention"));
  f.context.retention = "lru";
  RetentionTotals& r = f.run.retention;
  r.pins = 15;
  r.read = 1;
  r.notified = 2;
  r.expired = 3;
  r.let_go = 4;
  r.outstanding = 5;
  r.hit_tokens = 640;
  r.byte_seconds = 1e12;
  r.peak_bytes = 2e9;
  r.admissions_delayed = 6;
  r.admission_delay = 30 * kMs;
  r.prefill_gpu_s_avoided = 2.5;
  r.usd_avoided = 0.25;
  const Json s = f.summary()["retention"];
  EXPECT_EQ(s["policy"], "lru");
  EXPECT_EQ(s["pins"].get<int>(), s["read"].get<int>() + s["notified"].get<int>() + s["expired"].get<int>() +
                                      s["let_go"].get<int>() + s["outstanding"].get<int>());
  EXPECT_EQ(s["hit_tokens"], 640);
  EXPECT_EQ(s["byte_seconds"], 1e12);
  EXPECT_EQ(s["peak_bytes"], 2e9);
  EXPECT_EQ(s["admissions_delayed"], 6);
  EXPECT_EQ(s["admission_delay_ms"], 30.0);
  EXPECT_EQ(s["prefill_gpu_s_avoided"], 2.5);
  EXPECT_EQ(s["usd_avoided"], 0.25);
  EXPECT_TRUE(s["usd_held"].is_null());  // no price
}

// A choice is judged by the two predictions at its instant: reading at 30 ms where computing takes 10 loses
// 20, computing at 12 where reading takes 8 loses 4, and of equals neither loses. Requests outside the
// window, and those that had nothing to decide, are not judged.
TEST(Summary, ChoicesThatLostAndTheirRegret) {
  Fixture f;
  const auto add = [&](Nanos read, Nanos compute, bool chosen, bool counted = true) {
    RequestRecord r = completed(0, stages(1, 0, 9, 40), 10, 2);
    r.predicted_read = read;
    r.predicted_compute = compute;
    r.read_chosen = chosen;
    r.counted = counted;
    f.add(r);
  };
  EXPECT_EQ(f.summary()["reuse_decisions"]["share_lost"], 0.0);
  add(30 * kMs, 10 * kMs, true);
  add(8 * kMs, 12 * kMs, false);
  add(5 * kMs, 5 * kMs, true);
  add(3 * kMs, 50 * kMs, true);
  add(-1, -1, false);
  add(99 * kMs, 1 * kMs, true, false);
  const Json d = f.summary()["reuse_decisions"];
  EXPECT_EQ(d["n"], 4);
  EXPECT_EQ(d["read"], 3);
  EXPECT_DOUBLE_EQ(d["share_lost"], 0.5);
  EXPECT_EQ(d["regret_ms"]["n"], 2);
  EXPECT_DOUBLE_EQ(d["regret_ms"]["mean"], 12);
  EXPECT_DOUBLE_EQ(d["regret_ms"]["max"], 20);
}

// ------------------------------------------------------------------------------------------- blocks held

// Two decode workers and one prefill worker over two and a half buckets of the least width w:
//   decode-0  10 blocks run over [0, w), 6 are pinned throughout
//   decode-1  20 blocks run over [w/2, w), 8 load over [w, 2w)
//   prefill   7 blocks leased over the last half bucket
Fixture holding() {
  Fixture f;
  const Nanos w = Timeline(1).width();
  f.run.end = 2 * w + w / 2;
  f.run.workers.resize(3);
  const char* roles[] = {"decode", "decode", "prefill"};
  for (std::size_t i = 0; i < 3; ++i) {
    f.run.workers[i].role = roles[i];
    f.run.workers[i].kv_blocks = 100;
  }
  f.run.workers[0].blocks.add(0, 0, w, 10);
  f.run.workers[0].blocks.add(3, 0, f.run.end, 6);
  f.run.workers[1].blocks.add(0, w / 2, w, 20);
  f.run.workers[1].blocks.add(1, w, 2 * w, 8);
  f.run.workers[2].blocks.add(2, 2 * w, f.run.end, 7);
  return f;
}

TEST(BlocksHeld, MeanOverTheRunAndTheMostOfABucket) {
  const Json b = holding().summary()["blocks_held"];
  EXPECT_EQ(b["decode"]["capacity"], 200);
  EXPECT_EQ(b["prefill"]["capacity"], 100);
  EXPECT_FALSE(b.contains("colocated"));
  EXPECT_DOUBLE_EQ(b["decode"]["running"]["mean"], (10 + 20 * 0.5) / 2.5);
  EXPECT_DOUBLE_EQ(b["decode"]["running"]["max"], 20);
  EXPECT_DOUBLE_EQ(b["decode"]["in_transfer"]["mean"], 8 / 2.5);
  EXPECT_DOUBLE_EQ(b["decode"]["in_transfer"]["max"], 8);
  EXPECT_DOUBLE_EQ(b["decode"]["pinned"]["mean"], 6);
  EXPECT_DOUBLE_EQ(b["decode"]["pinned"]["max"], 6);  // the last bucket is only half a one
  EXPECT_DOUBLE_EQ(b["decode"]["leased"]["max"], 0);
  EXPECT_DOUBLE_EQ(b["prefill"]["leased"]["mean"], 7 * 0.5 / 2.5);
  EXPECT_DOUBLE_EQ(b["prefill"]["leased"]["max"], 7);
}

TEST(BlocksHeld, OverTimeAsATable) {
  const double w = to_seconds(Timeline(1).width());
  const std::string text = blocks_csv(holding().run);
  EXPECT_EQ(text, fmt::format("time_s,side,running,in_transfer,leased,pinned,total\n"
                              "0.000000000,prefill,0.000,0.000,0.000,0.000,0.000\n"
                              "0.000000000,decode,20.000,0.000,0.000,6.000,26.000\n"
                              "{0:.9f},prefill,0.000,0.000,0.000,0.000,0.000\n"
                              "{0:.9f},decode,0.000,8.000,0.000,6.000,14.000\n"
                              "{1:.9f},prefill,0.000,0.000,7.000,0.000,7.000\n"
                              "{1:.9f},decode,0.000,0.000,0.000,6.000,6.000\n",
                              w, 2 * w));
}

// However long the run, one grid for all sides: the widths of two timelines that end at different times
// differ.
TEST(BlocksHeld, AllSidesShareTheirBuckets) {
  Fixture f = holding();
  f.run.end = 5000 * Timeline(1).width();
  f.run.workers[0].blocks.add(0, 0, f.run.end, 1);  // prefill's ends after a bucket or two
  std::istringstream in(blocks_csv(f.run));
  std::vector<std::string> times[2];
  double prefill = 0;
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const bool decode = line.find("decode") != std::string::npos;
    times[decode ? 1 : 0].push_back(line.substr(0, line.find(',')));
    if (!decode) prefill += std::stod(line.substr(line.rfind(',') + 1));
  }
  EXPECT_EQ(times[0], times[1]);
  EXPECT_LE(times[0].size(), 256u);
  EXPECT_GT(times[0].size(), 128u);
  EXPECT_NEAR(prefill * std::stod(times[0][1]), 7 * 0.5 * to_seconds(Timeline(1).width()), 0.01);
}

TEST(BlocksHeld, NothingOfARunOfNothing) {
  Fixture f;
  EXPECT_TRUE(f.summary()["blocks_held"].empty());
  EXPECT_EQ(blocks_csv(f.run), "time_s,side,running,in_transfer,leased,pinned,total\n");
}

// ------------------------------------------------------------------------------------ who waited for whom

// Every stage counts against whom it waits for; posting against who posts, which the mode decides.
TEST(WaitedFor, StagesCountAgainstWorkers) {
  Fixture f;
  for (const char* name : {"p0", "d0", "d1"}) {
    f.run.workers.emplace_back();
    f.run.workers.back().name = name;
  }
  std::array<Nanos, kStageNames.size()> s{};
  for (std::size_t i = 0; i < s.size(); ++i) s[i] = static_cast<Nanos>(i + 1) * kMs;
  RequestRecord r = completed(0, s, 10, 2);
  r.prefill_worker = 0;
  r.decode_worker = 1;
  r.reuse_worker = 2;
  f.add(r);
  r.decode_worker = 2;
  f.add(r);
  r.counted = false;
  f.add(r);
  const auto of = [&](const char* mode, const Json& workers) {
    f.context.mode = mode;
    std::string found;
    const Json summary = f.summary();
    for (const Json& row : summary["waited_for"]["rows"]) {
      if (row["workers"] != workers) continue;
      found += fmt::format("{} {} x{}; ", row["stage"].get<std::string>(), row["ms"].get<double>(),
                           row["requests"].get<int>());
    }
    return found;
  };
  EXPECT_EQ(of("pull", Json::array({"p0"})), "prefill 10 x2; prefill_queue 6 x2; ");
  EXPECT_EQ(of("pull", Json::array({"d1"})),
            "first_token 11 x1; transfer_poll 10 x1; transfer_post 8 x1; decode_admission 7 x1; "
            "handoff_dispatch 6 x1; ");
  EXPECT_EQ(of("pull", Json::array({"p0", "d0"})), "transfer_wire 9 x1; ");
  EXPECT_EQ(of("pull", Json::array({"p0", "d1"})), "transfer_wire 9 x1; ");
  EXPECT_EQ(of("pull", Json::array({"d1", "p0"})), "reuse_transfer 8 x2; ");
  EXPECT_EQ(of("push", Json::array({"p0"})),
            "transfer_post 16 x2; handoff_dispatch 12 x2; prefill 10 x2; prefill_queue 6 x2; ");
  EXPECT_EQ(of("push_layerwise", Json::array({"d1"})),
            "first_token 11 x1; transfer_poll 10 x1; decode_admission 7 x1; ");
}

// The rows and the rest are all the time that completed requests spent before their first token, but for the
// router's.
TEST(WaitedFor, TheLargestFirstAndTheRestTogether) {
  Fixture f;
  Nanos all = 0;
  for (std::uint32_t i = 0; i < 60; ++i) {
    f.run.workers.emplace_back();
    f.run.workers.back().name = fmt::format("p{}", i);
    RequestRecord r = completed(0, stages(1, 0, i + 1, 40), 10, 2);
    r.prefill_worker = i;
    all += (i + 1) * kMs;
    f.add(r);
  }
  const Json w = f.summary()["waited_for"];
  ASSERT_EQ(w["rows"].size(), 50u);
  double sum = w["others"]["ms"], before = 1e9;
  for (const Json& row : w["rows"]) {
    EXPECT_LE(row["ms"].get<double>(), before);
    before = row["ms"];
    sum += before;
  }
  EXPECT_EQ(w["rows"][0],
            (Json{{"stage", "prefill"}, {"workers", Json::array({"p59"})}, {"ms", 60.0}, {"requests", 1}}));
  EXPECT_EQ(w["others"]["rows"], 10);
  EXPECT_DOUBLE_EQ(w["others"]["ms"], 55);
  EXPECT_DOUBLE_EQ(sum, to_ms(all));
}

// ------------------------------------------------------------------------------- what no engine, no release
// has

TEST(Summary, WhatIsHypotheticalOrUnreleasedSaysSo) {
  Fixture f = mixed();
  EXPECT_FALSE(f.summary().contains("hypothetical"));
  EXPECT_EQ(f.summary()["releases"], (Json{{"unreleased", false}, {"features", Json::array()}}));
  f.run.hypothetical = true;
  f.context.releases = {{"a", "0.24", "x#1"}, {"b", kNoEngine, "y"}};
  Json s = f.summary();
  EXPECT_EQ(s["hypothetical"], true);
  EXPECT_EQ(s["releases"]["unreleased"], false);
  EXPECT_EQ(s["releases"]["features"][0], (Json{{"feature", "a"}, {"since", "0.24"}, {"source", "x#1"}}));
  f.context.releases.push_back({"c", kUnreleased, "z#2"});
  s = f.summary();
  EXPECT_EQ(s["releases"]["unreleased"], true);
  const std::string table = summary_table(s);
  EXPECT_NE(table.find("hypothetical  "), std::string::npos);
  EXPECT_NE(table.find("unreleased          c (z#2)\n"), std::string::npos);
}

// Lines that have nothing to say are not there, and none is longer than 110 columns however much there is.
TEST(SummaryTable, SaysWhatHappenedWithinItsColumns) {
  Fixture f = mixed();
  f.context.mode = "push_progressive";
  f.run.requests[0].transferred_tokens = 100;
  f.run.requests[0].transfer_bytes = 987'654'321'000;
  f.run.requests[0].descriptors = 123'456'789;
  TransferTotals& t = f.run.transfers;
  t.outcomes[0] = 1;
  std::string table = summary_table(f.summary());
  for (const char* absent : {"reuse ", "retention", "outcomes", "stale", "hypothetical", "unreleased"}) {
    EXPECT_EQ(table.find(absent), std::string::npos) << absent;
  }
  EXPECT_NE(table.find("\ntransfers           1 by push_progressive, 987.7 GB"), std::string::npos) << table;

  t.outcomes.fill(123'456);
  t.leases_expired = 1;
  t.slow_posts = t.watchdogs = t.messages_lost = 123'456;
  t.stale_reads = t.stale_reads_prevented = t.stale_writes = t.stale_writes_prevented = 123'456;
  for (std::size_t i = 0; i < f.run.requests.size(); ++i) {
    RequestRecord& r = f.run.requests[i];
    r.reuse = static_cast<Reuse>(i + 1);
    r.predicted_read = 123'456'789'000;
    r.predicted_compute = 1;
  }
  f.context.retention = "priority";
  RetentionTotals& r = f.run.retention;
  r.pins = r.read = r.notified = r.expired = r.let_go = r.outstanding = 1'234'567;
  r.byte_seconds = 1e18;
  r.peak_bytes = 1e12;
  r.admissions_delayed = 1'234'567;
  r.admission_delay = kSecond * 1'234'567;
  r.prefill_gpu_s_avoided = 1e6;
  r.usd_avoided = r.usd_held = 12'345.678;
  f.run.hypothetical = true;
  f.context.releases = {{"transfer.retention.policy priority", kUnreleased, std::string_view("a source")}};
  f.context.nodes = {{98'765.4, "2026-08", 8, 8}};
  table = summary_table(f.summary());
  for (const char* there :
       {"\nreuse  ", "\nretention  ", "\n  outcomes  ", "1 lease expired;", "\n  stale  ", "\nhypothetical  ",
        "\nunreleased  ", "123456 READS OF BLOCKS THAT HAD CHANGED HANDS"}) {
    EXPECT_NE(table.find(there), std::string::npos) << there << table;
  }
  for (const std::string& line : lines(table)) EXPECT_LE(line.size(), 110u) << line;
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
            (std::vector<std::string>{"schema",   "scenario",   "trace",           "seed",        "status",
                                      "requests", "latency_ms", "stages_ms",       "throughput",  "goodput",
                                      "cache",    "transfers",  "workers",         "blocks_held", "links",
                                      "cost",     "reuse",      "reuse_decisions", "waited_for",  "bound_by",
                                      "inputs",   "cost_model", "releases",        "simulated_s", "events"}));
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

TEST(RequestsCsv, HasTheColumnsOfTheContractInOrder) {
  const Fixture f = mixed();
  const std::vector<std::string> rows = lines(requests_csv(f.run, f.trace, {}));
  EXPECT_EQ(rows[0],
            "request_id,session_id,turn,status,reason,arrival_ns,prompt_tokens,output_tokens,prefill_worker,"
            "decode_worker,local_hit_tokens,remote_hit_tokens,decode_hit_tokens,transferred_tokens,"
            "transfer_bytes,descriptors,preemptions,retries,reuse_outcome,prefill_changed,decode_changed,"
            "concurrency_at_arrival,ttft_ns,tpot_ns,itl_max_ns,e2e_ns,failed_attempts_ns,router_ns,"
            "prefill_queue_ns,reuse_transfer_ns,prefill_ns,handoff_dispatch_ns,decode_admission_ns,"
            "transfer_post_ns,transfer_wire_ns,transfer_poll_ns,first_token_ns,decode_ns,"
            "read_back_bytes,predicted_read_ns,predicted_compute_ns");
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
    for (std::size_t i = 26; i < 26 + kStageNames.size(); ++i) sum += std::stoll(c[i]);
    EXPECT_EQ(sum, std::stoll(c[25])) << row;
  }
}

TEST(RequestsCsv, ValuesAndWhatIsAbsent) {
  Fixture f = mixed();
  f.run.requests[0].prefill_worker = 0;
  f.run.requests[0].decode_worker = 1;
  f.run.requests[0].longest_gap = 9 * kMs;
  f.run.requests[0].read_back_bytes = 4096;
  f.run.requests[0].predicted_read = 7;
  f.run.requests[0].predicted_compute = 0;
  const std::vector<std::string> rows = lines(requests_csv(f.run, f.trace, {"prefill-0", "decode-0"}));
  const std::vector<std::string> done = cells(rows[1]), silent = cells(rows[3]), rejected = cells(rows[4]);
  EXPECT_EQ(done[1] + done[2], "");  // no session, no turn
  EXPECT_EQ(done[3], "completed");
  EXPECT_EQ(done[8] + " " + done[9], "prefill-0 decode-0");
  EXPECT_EQ(done[22], "33000000");
  EXPECT_EQ(done[23], "6700000");
  EXPECT_EQ(done[24], "9000000");
  EXPECT_EQ(done[25], "100000000");
  EXPECT_EQ(done[38] + " " + done[39] + " " + done[40], "4096 7 0");
  EXPECT_EQ(rows[3].substr(rows[3].rfind(',', rows[3].size() - 3)), ",0,,");  // nothing to decide
  EXPECT_EQ(silent[22] + silent[23] + silent[24], "");                        // no token, so no token latency
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
