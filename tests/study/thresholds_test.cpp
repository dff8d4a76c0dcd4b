// Theory: a threshold and a TTL act on the turns that come back. When reading is always cheaper than
// computing, the best threshold is none; when everybody pauses for 30 s, a TTL is worth nothing until decode
// keeps the blocks, and the router their address, for longer than that, and beyond it nothing changes while
// there is memory. Where memory is short, what is kept for long keeps others out.
#include "tools/study/thresholds.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

// Prefill forgets every prompt: a later turn is read back or computed.
const std::string kScenario = R"({
  "name": "talk", "model": "llama-3.1-8b",
  "pools": [
    {"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge",
     "engine": {"max_model_len": 32768, "enable_prefix_caching": false}},
    {"name": "decode", "role": "decode", "instance": "p5en.48xlarge", "engine": {"max_model_len": 32768}}
  ],
  "transfer": {"warm_start": true},
  "workload": {"trace": "made by the test", "format": "mooncake", "sessions": "closed"},
  "slo": {"ttft_ms": 2000, "tpot_ms": 50}
})";

// Conversations of three turns or so with a pause of 30 s, always.
const std::string kPauses =
    R"({"requests": 30, "rate": 1, "system_prompts": 0, "multi_turn_share": 1, "turns": 3,
  "think_time_s": 30, "think_time_sigma": 0, "first_message": {"mean": 6000, "sigma": 0.3, "max": 12000},
  "message": {"mean": 300, "sigma": 0.5, "max": 1000}, "output": {"mean": 60, "sigma": 0.5, "max": 200},
  "max_prompt_tokens": 20000})";

ThresholdsConfig config_of(std::vector<std::string> sets = {}, const std::string& generate = kPauses) {
  ThresholdsConfig config;
  config.base.text = kScenario;
  config.base.file = "talk.json";
  config.base.generate = generate;
  config.base.options.quiet = true;
  config.base.options.sets = std::move(sets);
  config.loads = {1};
  config.objective = find_objective("ttft_mean", "--objective");
  return config;
}

const Tried* find(const LoadAnswer& load, std::int32_t threshold, double ttl) {
  const auto found = std::ranges::find_if(
      load.pairs, [&](const Tried& t) { return t.setting.threshold == threshold && t.setting.ttl_s == ttl; });
  return found == load.pairs.end() ? nullptr : &*found;
}

TEST(Thresholds, TheRouterForgetsBeforeDecodeDoes) {
  EXPECT_DOUBLE_EQ(router_ttl(480, 5), 450);  // vLLM's
  EXPECT_DOUBLE_EQ(router_ttl(960, 5), 900);
  EXPECT_DOUBLE_EQ(router_ttl(41, 5), 31);
  EXPECT_DOUBLE_EQ(router_ttl(160, 5), 150);  // where the two meet
  EXPECT_LE(router_ttl(10, 5), 0);
  EXPECT_DOUBLE_EQ(router_ttl(16, 0), 15);
}

TEST(Thresholds, RegretIsLossAgainstTheReference) {
  Objective less, more;
  more.less_is_better = false;
  EXPECT_DOUBLE_EQ(*regret(less, 110, 100), 0.1);
  EXPECT_DOUBLE_EQ(*regret(less, 90, 100), -0.1);
  EXPECT_DOUBLE_EQ(*regret(more, 90, 100), 0.1);
  EXPECT_FALSE(regret(less, {}, 100));
  EXPECT_FALSE(regret(less, 100, {}));
}

// By the grid that the trace gives.
TEST(Thresholds, ReadsEverythingThatIsCheaperToReadAndKeepsItForThePause) {
  const ThresholdsAnswer a = find_thresholds(config_of());
  ASSERT_EQ(a.loads.size(), 1u);
  const LoadAnswer& load = a.loads[0];
  ASSERT_TRUE(load.best.value);
  EXPECT_EQ(load.thresholds.low, 0);
  EXPECT_TRUE(load.thresholds.to_the_least);
  EXPECT_GT(load.thresholds.high, 1000) << "later turns share thousands of tokens";
  EXPECT_LT(load.thresholds.high, kNeverRead);
  EXPECT_GT(load.ttls.low, 30);
  EXPECT_LT(load.ttls.low, 45);
  EXPECT_TRUE(load.ttls.to_the_most) << "there is memory";
  ASSERT_TRUE(load.gain);
  EXPECT_GT(*load.gain, 0.05);
  EXPECT_NE(a.pays, Pays::no);
  // vLLM's own values are as good here, so nothing is to be changed.
  ASSERT_TRUE(a.recommended);
  EXPECT_EQ(a.recommended->threshold, 64);
  EXPECT_EQ(a.recommended->ttl_s, 480);
  EXPECT_NE(a.text.find("eep vLLM's kv_recompute_threshold 64 and decoder_kv_blocks_ttl 480 s"),
            std::string::npos)
      << a.text;
  EXPECT_EQ(a.pays == Pays::yes, a.measured && *load.gain > a.error);
  EXPECT_EQ(a.text.starts_with("UNDECIDED"), a.pays == Pays::undecided);
  EXPECT_EQ(a.config,
            R"({"bidirectional_kv_xfer": true, "kv_recompute_threshold": 64, "decoder_kv_blocks_ttl": 480})");
  EXPECT_GT(a.ttl_plateau.low, 30);
  // Nobody reads more than who knows what will be read, and knows no time limit.
  EXPECT_GT(load.oracle.hit_tokens, 0);
  for (const Tried& t : load.pairs)
    EXPECT_LE(t.hit_tokens, load.oracle.hit_tokens + load.oracle.hit_tokens / 1000);
  EXPECT_EQ(load.without.hit_tokens, 0);
}

// By a given grid: the plateau begins between the pause and the next value above it.
TEST(Thresholds, TheTtlsPlateauBeginsAboveThePause) {
  ThresholdsConfig config = config_of();
  config.thresholds = {0, 4096, kNeverRead};
  config.ttls = {10, 20, 35, 45, 60, 100};
  const ThresholdsAnswer a = find_thresholds(config);
  EXPECT_EQ(a.thresholds, (std::vector<std::int32_t>{0, 64, 4096, kNeverRead})) << "and vLLM's";
  EXPECT_EQ(a.ttls, (std::vector<double>{10, 20, 35, 45, 60, 100, 480}));
  const LoadAnswer& load = a.loads[0];
  EXPECT_EQ(load.pairs.size(), 28u);
  EXPECT_EQ(load.ttls.low, 45) << "35 s in decode are 25 s at the router";
  EXPECT_EQ(find(load, 0, 35)->hit_tokens, 0);
  EXPECT_GT(find(load, 0, 45)->hit_tokens, 0);
  EXPECT_EQ(find(load, 0, 45)->hit_tokens, find(load, 0, 480)->hit_tokens);
  EXPECT_EQ(find(load, kNeverRead, 480)->hit_tokens, 0);
  for (const Tried& t : load.pairs) {
    ASSERT_TRUE(t.usable()) << t.why;
    EXPECT_GE(*regret(a.objective, t.value, load.best.value), 0);
    EXPECT_LE(*regret(a.objective, t.value, load.best.value), load.spread);
  }
  const std::string table = thresholds_table(a);
  EXPECT_NE(table.find("vLLM's defaults"), std::string::npos);
  EXPECT_NE(table.find("kv_connector_extra_config: {"), std::string::npos);
}

// Twice the load halves the pauses as well (time_scale does); one pair is judged at both.
TEST(Thresholds, OnePairForAllLoads) {
  ThresholdsConfig config = config_of();
  config.loads = {0.5, 2};
  config.thresholds = {0, kNeverRead};
  config.ttls = {30, 80};
  const ThresholdsAnswer a = find_thresholds(config);
  ASSERT_EQ(a.loads.size(), 2u);
  EXPECT_NEAR(a.loads[1].requests_per_s, 4 * a.loads[0].requests_per_s, 1e-6);
  EXPECT_EQ(a.loads[0].ttls.low, 80) << "the pause is a minute";
  EXPECT_EQ(a.loads[1].ttls.low, 30) << "or 15 s";
  ASSERT_TRUE(a.recommended);
  EXPECT_GE(a.recommended->ttl_s, 80);
  EXPECT_EQ(a.ttl_plateau.low, 80);
}

// Decode holds some three prompts. What is kept for minutes keeps others out of it, as nothing but time frees
// it; who knows the future gives way.
TEST(Thresholds, WhereMemoryIsShortKeepingForLongHurts) {
  ThresholdsConfig config = config_of({"pools.decode.engine.num_gpu_blocks_override=1400"});
  config.thresholds = {0, kNeverRead};
  config.ttls = {1, 45};
  const ThresholdsAnswer a = find_thresholds(config);
  const LoadAnswer& load = a.loads[0];
  const Tried* brief = find(load, 0, 1);
  const Tried* lasting = find(load, 0, 480);
  ASSERT_TRUE(brief != nullptr && brief->value && lasting != nullptr && lasting->value);
  EXPECT_GT(*lasting->value, 2 * *brief->value);
  EXPECT_LT(load.best.setting.ttl_s, 480);
  EXPECT_FALSE(load.ttls.to_the_most);
  ASSERT_TRUE(a.recommended);
  EXPECT_LT(a.recommended->ttl_s, 480);
  ASSERT_TRUE(load.oracle.value);
  EXPECT_LT(*load.oracle.value, *lasting->value);
}

// A clock that is off by more than the TTL: each read is declined, and what was to read fails. Such pairs are
// shown, with the reason, and are no choice.
TEST(Thresholds, WhatLosesRequestsIsShownAndNotChosen) {
  ThresholdsConfig config = config_of({"transfer.clock_error_s=-1000"});
  config.thresholds = {0, kNeverRead};
  config.ttls = {60};
  const ThresholdsAnswer a = find_thresholds(config);
  const LoadAnswer& load = a.loads[0];
  const Tried* reads = find(load, 0, 60);
  ASSERT_NE(reads, nullptr);
  EXPECT_FALSE(reads->usable());
  EXPECT_GT(reads->failed, 0u);
  EXPECT_EQ(reads->why, fmt::format("{} requests more do not complete", reads->failed));
  EXPECT_TRUE(find(load, kNeverRead, 60)->usable());
  ASSERT_TRUE(a.recommended);
  EXPECT_EQ(a.recommended->threshold, kNeverRead);
  EXPECT_EQ(a.config, R"({"bidirectional_kv_xfer": false})");
  EXPECT_NE(thresholds_table(a).find("4 of 6 pairs cannot be chosen: "), std::string::npos)
      << thresholds_table(a);
  EXPECT_NE(thresholds_csv(a).find("requests more do not complete"), std::string::npos);
}

// Prefill has room for every conversation: nothing is to be read, whatever the settings.
TEST(Thresholds, SaysWhenItDoesNotMatter) {
  ThresholdsConfig config = config_of({"pools.prefill.engine.enable_prefix_caching=true"});
  config.objective = find_objective("e2e_mean", "--objective");
  config.thresholds = {0, 1024, kNeverRead};
  config.ttls = {60};
  const ThresholdsAnswer a = find_thresholds(config);
  EXPECT_LE(a.loads[0].spread, kPlateau);
  EXPECT_NE(a.loads[0].text.find("Neither setting matters at this load"), std::string::npos)
      << a.loads[0].text;
  EXPECT_TRUE(a.loads[0].thresholds.to_the_least && a.loads[0].thresholds.to_the_most);
  EXPECT_TRUE(a.loads[0].ttls.to_the_least && a.loads[0].ttls.to_the_most);
}

/// The scenario that ships, at half its load.
ThresholdsConfig shipped() {
  ThresholdsConfig config;
  ReplayOptions options;
  options.quiet = true;
  config.base = read_run(PDSIM_SOURCE_DIR "/scenarios/thresholds.json", options);
  config.loads = {0.5};
  config.objective = find_objective("ttft_mean", "--objective");
  return config;
}

// A pair that is a little better than vLLM's own is not worth a setting.
TEST(Thresholds, KeepsTheDefaultsWhereTheyAreAsGood) {
  ThresholdsConfig config = shipped();
  config.thresholds = {0};
  config.ttls = {480};
  const ThresholdsAnswer a = find_thresholds(config);
  const LoadAnswer& load = a.loads[0];
  EXPECT_EQ(load.best.setting.threshold, 0);
  const double loss = *regret(a.objective, load.defaults.value, load.best.value);
  EXPECT_GT(loss, 0);
  ASSERT_LE(loss, kPlateau);
  EXPECT_EQ(a.recommended->threshold, 64);
  EXPECT_DOUBLE_EQ(a.worst_regret, loss);
}

// A plateau is not what happened to be tried: all values of one axis were, the other held at its best.
TEST(Thresholds, LooksAtAllOfAnAxisBeforeItSaysWhereAPlateauEnds) {
  ThresholdsConfig config = shipped();
  config.loads = {0.5, 2};
  config.ttls = {24, 73};
  const ThresholdsAnswer a = find_thresholds(config);
  for (const LoadAnswer& load : a.loads) {
    for (const std::int32_t t : a.thresholds) EXPECT_NE(find(load, t, load.best.setting.ttl_s), nullptr) << t;
    for (const double t : a.ttls) EXPECT_NE(find(load, load.best.setting.threshold, t), nullptr) << t;
    EXPECT_FALSE(load.thresholds.to_the_least && load.thresholds.to_the_most);
    EXPECT_GT(a.ttls.size() * a.thresholds.size(), load.pairs.size()) << "not at everything";
  }
}

TEST(Thresholds, DoesNotDependOnThreads) {
  ThresholdsConfig config = config_of();
  config.loads = {1, 3};
  config.thresholds = {0, kNeverRead};
  config.jobs = 1;
  const ThresholdsAnswer alone = find_thresholds(config);
  config.jobs = 4;
  const ThresholdsAnswer beside = find_thresholds(config);
  EXPECT_EQ(thresholds_json(alone).dump(2), thresholds_json(beside).dump(2));
  EXPECT_EQ(thresholds_csv(alone), thresholds_csv(beside));
  EXPECT_EQ(thresholds_table(alone), thresholds_table(beside));
}

std::string error_of(const ThresholdsConfig& config) {
  try {
    find_thresholds(config);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Thresholds, RefusesWhatHasNoAnswer) {
  EXPECT_EQ(
      error_of(config_of({"transfer.mode=push"})),
      "talk.json: /transfer/mode: is push, which cannot be bidirectional in vLLM (vllm#46473); expected "
      "pull, or transfer.hypothetical true to see what it would do");
  const std::string once = R"({"requests": 10, "multi_turn_share": 0})";
  EXPECT_EQ(
      error_of(config_of({"workload.sessions=open"}, once)),
      "generated: has no session of two turns or more, and only those can read back what was kept; expected "
      "--infer-sessions to look for them in the prompts");
  ThresholdsConfig colocated = config_of();
  colocated.base.text =
      R"({"model": "llama-3.1-8b", "pools": [{"role": "colocated", "instance": "p5en.48xlarge"}],
    "workload": {"trace": "made by the test", "format": "mooncake"}})";
  EXPECT_EQ(error_of(colocated),
            "talk.json: /pools: are colocated; expected prefill and decode pools: bidirectional transfer is "
            "between "
            "them");
  EXPECT_NE(error_of(config_of({"transfer.mode=sideways"})).find("sideways"), std::string::npos);
  EXPECT_EQ(
      error_of(config_of({R"(transfer.pairs=[{"from": "prefill", "to": "decode"}])"})),
      "talk.json: /transfer/pairs: has settings of its own for some pools; expected one transfer for all, as "
      "one pair of values is looked for");
}

}  // namespace
}  // namespace pdsim
