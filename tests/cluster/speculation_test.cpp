// Speculative decoding in whole runs. Theory: with an even acceptance a and k drafts a sequence gets
// (1 - a^(k+1)) / (1 - a) tokens a step; requests, tokens, blocks and bytes are conserved whatever is
// accepted; a run is the same step by step and in fast mode; what is not speculated on does not change.
#include <gtest/gtest.h>

#include <cmath>

#include "sim/core/error.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

Sets speculating(const std::vector<std::string>& pools, const std::string& config, Sets more = {}) {
  for (const std::string& pool : pools) {
    more.push_back("pools." + pool + ".engine.speculative=" + config);
  }
  return more;
}

std::string eagle(double acceptance, int drafts = 3) {
  return R"({"method": "eagle", "num_speculative_tokens": )" + std::to_string(drafts) +
         R"(, "acceptance": )" + std::to_string(acceptance) + "}";
}

/// Runs it in both modes, which must agree to the byte, and conserve what there is.
Outcomes run_both(const std::string& scenario, const Trace& trace, const std::vector<std::string>& pools,
                  const Sets& sets) {
  Outcomes o = run_text(scenario, trace, sets);
  expect_conserved(o, trace);
  Sets slow = sets;
  for (const std::string& pool : pools) slow.push_back("pools." + pool + ".engine.step_by_step=true");
  EXPECT_EQ(first_difference(o.text(), run_text(scenario, trace, slow).text()), "");
  return o;
}

double tpot(const Outcomes& o) {
  return o.summary["latency_ms"]["tpot"]["mean"].get<double>();
}

const Sets kSmall = {"pools.worker.replicas=1", "pools.worker.engine.num_gpu_blocks_override=640"};

TEST(SpeculatingCluster, ColocatedInBothModes) {
  const Trace trace = small_trace(150, 4, 100 * kMillisecond);
  const Outcomes plain = run_both(kColocated, trace, {"worker"}, {});
  EXPECT_FALSE(plain.summary.contains("speculation"));
  double before = tpot(plain);
  for (const double a : {0.6, 0.9}) {
    const Outcomes o = run_both(kColocated, trace, {"worker"}, speculating({"worker"}, eagle(a)));
    const auto& s = o.summary["speculation"];
    const double expected = (1 - std::pow(a, 4)) / (1 - a);
    // An output's end cuts its last step, by less than k tokens of some 60.
    EXPECT_NEAR(s["tokens_per_step"].get<double>(), expected, 0.12 * expected);
    EXPECT_NEAR(s["acceptance"].get<double>(), (expected - 1) / 3, 0.03);
    EXPECT_LT(tpot(o), before);
    before = tpot(o);
  }
}

TEST(SpeculatingCluster, NothingAcceptedCostsTime) {
  const Trace trace = small_trace(60, 2, kMillisecond);
  const Outcomes plain = run_text(kColocated, trace);
  const Outcomes o = run_both(kColocated, trace, {"worker"}, speculating({"worker"}, eagle(0)));
  EXPECT_EQ(o.summary["speculation"]["accepted"], 0);
  EXPECT_EQ(o.summary["speculation"]["tokens_per_step"], 1.0);
  EXPECT_GT(tpot(o), tpot(plain));
}

TEST(SpeculatingCluster, PreemptionAndPrefixCaching) {
  Trace trace = small_trace(120, 60, kMillisecond);
  for (Request& r : trace.requests) r.output_tokens *= 6;
  for (const char* async : {"true", "false"}) {
    Sets sets = kSmall;
    sets.push_back("pools.worker.engine.max_model_len=8192");
    sets.push_back(std::string("pools.worker.engine.async_scheduling=") + async);
    const Outcomes o = run_both(kColocated, trace, {"worker"}, speculating({"worker"}, eagle(0.7), sets));
    EXPECT_GT(o.summary["cache"]["preemptions"].get<int>(), 0);
    EXPECT_GT(o.summary["cache"]["recomputed_tokens"].get<int>(), 0);
    EXPECT_GT(o.summary["cache"]["local_hit_tokens"].get<int>(), 0);
  }
}

TEST(SpeculatingCluster, HandedOver) {
  const Trace trace = small_trace(100, 4, kMillisecond);
  for (const char* mode : {"pull", "push", "push_layerwise", "push_progressive"}) {
    SCOPED_TRACE(mode);
    const Outcomes o =
        run_both(kDisaggregated, trace, {"prefill", "decode"},
                 speculating({"prefill", "decode"}, eagle(0.7), {std::string("transfer.mode=") + mode}));
    EXPECT_GT(o.summary["transfers"]["count"].get<int>(), 0);
    EXPECT_GT(o.summary["speculation"]["tokens_per_step"].get<double>(), 2.0);
    // The drafter's layer is handed over with the model's 32.
    EXPECT_EQ(o.deployment.pools[1].footprint.kv_regions, 66);
  }
  // Retained turns are read back; pins and reads are conserved as well.
  const Outcomes back =
      run_both(kDisaggregated, trace, {"prefill", "decode"},
               speculating({"prefill", "decode"}, eagle(0.7), {"transfer.bidirectional=true"}));
  EXPECT_GT(back.summary["transfers"]["read_back"]["count"].get<int>(), 0);
}

TEST(SpeculatingCluster, OnlyDecodeMaySpeculateWithoutKv) {
  const Trace trace = small_trace(40, 4, kMillisecond);
  const std::string ngram = R"({"method": "ngram", "num_speculative_tokens": 4, "mean_accepted": 1.5})";
  const Outcomes o = run_both(kDisaggregated, trace, {"decode"}, speculating({"decode"}, ngram));
  EXPECT_NEAR(
      o.summary["speculation"]["accepted"].get<double>() / o.summary["speculation"]["steps"].get<double>(),
      1.5, 0.12);
  EXPECT_FALSE(o.deployment.pools[1].engine.async_scheduling);
  EXPECT_THROW(run_text(kDisaggregated, trace, speculating({"decode"}, eagle(0.5))), InputError);
}

TEST(SpeculatingCluster, CancelledClients) {
  const Trace trace = small_trace(100, 8, kMillisecond);
  LoadedScenario loaded =
      parse_scenario(kColocated, "test.json", "", speculating({"worker"}, eagle(0.8), kSmall));
  for (int i = 1; i <= 20; ++i) {
    FaultConfig fault;
    fault.kind = FaultKind::client_cancel;
    fault.at = i * 500 * kMillisecond;
    loaded.scenario.faults.push_back(fault);
  }
  const Outcomes o = run_loaded(std::move(loaded), trace);
  EXPECT_GT(count(o.run, RequestStatus::cancelled), 5u);
  expect_conserved(o, trace);
}

// A drafter takes memory: its layer's weights and a 33rd layer's KV; the host's n-grams take none.
TEST(SpeculatingCluster, DraftersTakeMemory) {
  const Trace trace = small_trace(2, 1, kMillisecond);
  const auto pool = [&](const Sets& sets) {
    return std::move(run_text(kColocated, trace, sets).deployment.pools[0]);
  };
  const PoolPlan plain = pool({}), with_eagle = pool(speculating({"worker"}, eagle(0.5)));
  const PoolPlan with_model = pool(speculating(
      {"worker"},
      R"({"method": "draft_model", "model": "llama-3.1-8b", "num_speculative_tokens": 2, "acceptance": 0.5})"));
  const double h = 4096, ffn = 14336, kv = 1024;
  const double layer = 2 * h * h + 2 * kv * h + 3 * h * ffn + 2 * h + 2 * h * h + 2 * h;  // joined from two
  EXPECT_EQ(with_eagle.footprint.weight_bytes - plain.footprint.weight_bytes, static_cast<Bytes>(2 * layer));
  EXPECT_DOUBLE_EQ(with_eagle.footprint.kv_bytes_per_token, plain.footprint.kv_bytes_per_token * 33 / 32);
  EXPECT_EQ(with_model.footprint.weight_bytes, 2 * plain.footprint.weight_bytes);
  EXPECT_DOUBLE_EQ(with_model.footprint.kv_bytes_per_token, 2 * plain.footprint.kv_bytes_per_token);
  EXPECT_LT(with_eagle.blocks, plain.blocks);
  EXPECT_LT(with_model.blocks, with_eagle.blocks);
}

// k passes of the drafter's layers follow a step: with the model as its own drafter a decode step of k = 1
// takes two passes of about one step each, and with k = 2 three.
TEST(SpeculatingCluster, DraftingTakesItsPasses) {
  const Trace trace = small_trace(2, 1, kMillisecond);
  const auto decode_us = [&](int drafts) {
    Sets sets;
    if (drafts > 0) {
      sets = speculating({"worker"}, R"({"method": "draft_model", "model": "llama-3.1-8b", "acceptance": 0.5,
                                          "num_speculative_tokens": )" +
                                         std::to_string(drafts) + "}");
    }
    const Outcomes o = run_text(kColocated, trace, sets);
    StepShape shape;
    shape.decode_requests = 8;
    shape.draft_tokens = 8 * drafts;
    shape.sampled_requests = 8 * (1 + drafts);
    shape.decode_context = 8 * 4096;
    shape.draft_pairs = std::int64_t{8} * drafts * 4096;
    double us = 0;
    for (const OpTime& op : o.deployment.pools[0].step_model->breakdown(shape)) {
      us += op.name == "host" || op.name == "sampling" ? 0 : op.us;
    }
    return us;
  };
  const double one = decode_us(0);
  EXPECT_NEAR(decode_us(1) / one, 2, 0.25);
  EXPECT_NEAR(decode_us(2) / one, 3, 0.4);
}

}  // namespace
}  // namespace pdsim
