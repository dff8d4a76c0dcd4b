// Data-parallel ranks of a model with experts: each schedules for itself, all meet in every layer.
//
//   A rank that decodes while another computes a prompt of time P yields no token for P at least, once for
//   each such step. With CUDA graphs every rank is padded to as many tokens; without them the prompt's step
//   meets the tokens in flight on the other ranks: StepModel::time of its shape with other_tokens.
//   None of that depends on how a run is made: step by step or not, in which order ties are visited.
#include <gtest/gtest.h>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

// Two ranks of one replica, whose experts they share.
const std::string kRanks = R"({
  "name": "ranks", "model": "qwen3-235b-a22b", "weights_dtype": "fp8",
  "pools": [
    {"name": "worker", "role": "colocated", "replicas": 1, "instance": "p5en.48xlarge", "tensor_parallel": 1,
     "data_parallel": 8, "expert_parallel": 8, "engine": {"max_model_len": 32768}}
  ],
  "router": {"policy": "round_robin"},
  "workload": {"trace": "made by the test", "format": "mooncake"},
  "slo": {"ttft_ms": 2000, "tpot_ms": 50}
})";

TEST(DataParallel, RanksWaitForAnothersPrompt) {
  Nanos padded = 0;
  for (const bool graphs : {true, false}) {
    const Sets sets = {std::string("pools.worker.engine.cudagraph_mode=") +
                       (graphs ? "full_and_piecewise" : "none")};
    // The first request decodes on rank 0 for long; a second one brings rank 1 a prompt of one step.
    const Trace trace = made_trace({request_at(0, 500, 400), request_at(kSecond, 8000, 2)});
    const Outcomes o = run_text(kRanks, trace, sets);
    const Outcomes alone = run_text(kRanks, made_trace({request_at(0, 500, 400)}), sets);
    const PoolPlan& pool = o.deployment.pools[0];
    StepShape prompt = prefill_shape(0, 8000, true);
    if (!graphs) prompt.other_tokens = 1;
    const Nanos step = pool.step_model->time(prompt).ns;
    const Nanos gap = o.run.requests[0].longest_gap;
    EXPECT_GE(gap, step);
    EXPECT_LT(gap, step + step / 4);
    const Nanos longer = o.run.requests[0].end - alone.run.requests[0].end;
    EXPECT_GT(longer, step / 2);
    EXPECT_LT(longer, step);
    // Alone on its replica it would wait for nobody.
    EXPECT_LT(alone.run.requests[0].longest_gap, step / 4);
    EXPECT_EQ(stage(o.run.requests[1], Stage::prefill), step);
    if (graphs)
      padded = step;
    else
      EXPECT_LT(step, padded / 2);
  }
}

TEST(DataParallel, StepByStepAndAnyOrderOfTiesIsByteIdentical) {
  for (const char* async : {"true", "false"}) {
    for (const Nanos grid : {Nanos{3 * kSecond}, Nanos{kMillisecond}}) {
      const Trace trace = small_trace(120, 30, grid, 5);
      const Sets sets = {std::string("pools.worker.engine.async_scheduling=") + async,
                         "pools.worker.engine.num_gpu_blocks_override=450"};
      const Outcomes fast = run_text(kRanks, trace, sets);
      const Outcomes slow = run_text(kRanks, trace, with(sets, {"pools.worker.engine.step_by_step=true"}));
      ASSERT_EQ(first_difference(fast.text(), slow.text()), "");
      EXPECT_LT(fast.run.queue_pops, slow.run.queue_pops);
      expect_conserved(fast, trace);
    }
  }
  // Requests alike, one a rank, in turns: boundaries tie all the time.
  std::vector<Request> requests;
  for (int i = 0; i < 48; ++i) requests.push_back(request_at(i / 8 * kSecond + i % 8, 600, 90));
  const Outcomes one = run_text(kRanks, made_trace(requests));
  for (const char* ties : {"1", "77"}) {
    EXPECT_EQ(run_text(kRanks, made_trace(requests), {std::string("permute_ties=") + ties}).csv, one.csv);
  }
}

}  // namespace
}  // namespace pdsim
