// What a summary says of a run, where a plausible wrong number would be easy: shares of the hardware never
// pass 1, a wait is booked where it was spent, the verdict names what binds, the measuring window cuts every
// statistic, and the epoch of a trace's stamps means nothing.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

std::vector<Request> burst(int n, Nanos gap, std::int32_t prompt, std::int32_t output) {
  std::vector<Request> requests;
  for (int i = 0; i < n; ++i) requests.push_back(request_at(i * gap, prompt, output));
  return requests;
}

double stage_mean(const Outcomes& o, const char* stage) {
  return o.summary["stages_ms"][stage]["mean"].get<double>();
}

// One long prompt and many single-token steps read very different numbers of experts: the mean step's
// would be nearly all of them every time, and more bytes than the memory can move.
TEST(Verdict, SharesOfTheHardwareAreAtMostOne) {
  for (const char* model : {"minimax-m2", "gpt-oss-120b", "qwen3.5-397b-a17b"}) {
    const Trace trace = made_trace(burst(6, 3 * kSecond, 8000, 100));
    const Outcomes o = run_text(kColocated, trace,
                                {std::string("model=") + model, "pools.0.replicas=1",
                                 std::string("pools.0.tensor_parallel=") + (model[0] == 'q' ? "8" : "4")});
    for (const auto& worker : o.summary["workers"]) {
      EXPECT_GT(worker["hbm_fraction"], 0.0) << model;
      EXPECT_LE(worker["hbm_fraction"], 1.0) << model;
      EXPECT_LE(worker["mfu"], 1.0) << model;
    }
  }
}

// Decode has two places. A request whose KV has landed waits for one: that is admission; what is left for
// the first token is the pipeline's three steps at most.
TEST(Verdict, AWaitForADecodeSlotIsAdmission) {
  const Trace trace = made_trace(burst(40, 20 * kMillisecond, 1500, 200));
  const Outcomes o = run_text(kDisaggregated, trace, {"pools.decode.engine.max_num_seqs=1"});
  EXPECT_GT(stage_mean(o, "decode_admission"), 1000);
  EXPECT_LT(o.summary["stages_ms"]["first_token"]["max"].get<double>(), 30);
  EXPECT_EQ(o.summary["bound_by"]["code"], "decode_slots");
}

// The same load and three different scarcities.
TEST(Verdict, NamesWhatBinds) {
  const Trace trace = made_trace(burst(40, 20 * kMillisecond, 1500, 200));
  const auto code = [&](const std::string& scenario, const Sets& sets) {
    return run_text(scenario, trace, sets).summary["bound_by"]["code"].get<std::string>();
  };
  EXPECT_EQ(code(kDisaggregated, {}), "decode_compute");
  EXPECT_EQ(code(kDisaggregated, {"pools.decode.engine.num_gpu_blocks_override=120"}), "decode_kv_blocks");
  EXPECT_EQ(code(kColocated, {"pools.0.engine.max_num_seqs=1"}), "prefill_slots");
  EXPECT_EQ(code(kColocated, {"pools.0.engine.num_gpu_blocks_override=120"}), "prefill_kv_blocks");
}

// A decode worker told to compute prompts itself prefills: that is no wait for step boundaries.
TEST(Verdict, APromptComputedOnDecodeIsPrefill) {
  const Trace trace = made_trace(burst(5, kSecond, 6000, 10));
  const Outcomes o = run_text(kDisaggregated, trace, {"transfer.pd_recompute_threshold=100000"});
  EXPECT_EQ(o.summary["transfers"]["count"], 0);
  EXPECT_EQ(stage_mean(o, "first_token"), 0);
  EXPECT_GT(stage_mean(o, "prefill"), 100);
}

// Long silences are no stall, whatever leases outlive them.
TEST(Verdict, SilenceIsNoStall) {
  const Trace trace = made_trace({request_at(0, 600, 5), request_at(10'000 * kSecond, 600, 5)});
  const Outcomes o = run_text(kDisaggregated, trace, {"transfer.kv_lease_duration_s=30000"});
  EXPECT_EQ(o.run.status, RunStatus::finished) << o.run.stall;
  const Outcomes slow = run_text(kDisaggregated, trace, {"transfer.handshake_ms=4000000"});
  EXPECT_EQ(slow.run.status, RunStatus::finished) << slow.run.stall;
}

// Stamps of another epoch are the same trace: every byte but the trace's own name is the same.
TEST(Verdict, TheEpochOfATraceMeansNothing) {
  const Trace trace = small_trace(80, 8, kMillisecond);
  Trace shifted = trace;
  for (Request& r : shifted.requests) r.arrival += 1'760'000'000 * kSecond;
  const Sets window = {"workload.warmup_s=2", "workload.measure_s=5"};
  EXPECT_EQ(first_difference(run_text(kDisaggregated, trace, window).text(),
                             run_text(kDisaggregated, shifted, window).text()),
            "");
}

// Requests outside the window are simulated and counted, and in no other statistic of requests.
TEST(Verdict, TheWindowCutsEveryStatistic) {
  const Trace trace = made_trace(burst(50, 200 * kMillisecond, 1500, 20));
  const Outcomes o = run_text(kDisaggregated, trace, {"workload.warmup_s=2", "workload.measure_s=4"});
  EXPECT_EQ(o.summary["requests"]["completed"], 50);
  EXPECT_EQ(o.summary["latency_ms"]["ttft"]["n"], 20);
  EXPECT_EQ(o.summary["cache"]["prompt_tokens"], 20 * 1500);
  EXPECT_EQ(o.summary["transfers"]["count"], 20);
  EXPECT_EQ(o.summary["transfers"]["post_ms"]["n"], 20);
  EXPECT_EQ(o.summary["transfers"]["wire_ms"]["n"], 20);
}

// A session's name comes from outside and may hold anything; a row still has one field a column.
TEST(Verdict, CsvQuotesWhatComesFromOutside) {
  Trace trace = made_trace({request_at(0, 600, 5)});
  trace.sessions = {"a,b\"c\nd"};
  trace.requests[0].session = 0;
  const Outcomes o = run_text(kColocated, trace);
  EXPECT_NE(o.csv.find("\n0,\"a,b\"\"c\nd\",0,completed,"), std::string::npos) << o.csv;
}

}  // namespace
}  // namespace pdsim
