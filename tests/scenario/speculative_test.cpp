// pools[].engine.speculative. Theory: however acceptance is spelt, it means A_i, the probability that the
// first i + 1 drafts of a step are accepted: products of conditional ones; for a mean the root a of
// a + ... + a^k = mean; vLLM's own spellings as vLLM reads them (config/speculative.py).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/scenario/load.hpp"

namespace pdsim {
namespace {

LoadedScenario load(const std::string& speculative, const std::vector<std::string>& sets = {}) {
  return parse_scenario(R"({"model": "m", "workload": {"trace": "t.jsonl", "format": "mooncake"},
    "pools": [{"role": "colocated", "gpu": "h200", "engine": {"speculative": )" +
                            speculative + "}}]}",
                        "s.json", "", sets);
}

EngineConfig engine(const std::string& speculative) {
  return load(speculative).scenario.pools[0].engine;
}

std::vector<double> accepted(const std::string& how) {
  return engine(R"({"method": "mtp", "num_speculative_tokens": 3, )" + how + "}").speculative->accepted;
}

/// The error's text; "" when there is none.
std::string error(const std::string& speculative, const std::vector<std::string>& sets = {}) {
  try {
    load(speculative, sets);
  } catch (const InputError& e) {
    return e.what();
  }
  return "";
}

TEST(Speculative, AcceptanceInAllItsSpellings) {
  EXPECT_EQ(accepted(R"("acceptance": 0.5)"), (std::vector<double>{0.5, 0.25, 0.125}));
  EXPECT_EQ(accepted(R"("acceptance": [0.5, 1, 0.5])"), (std::vector<double>{0.5, 0.5, 0.25}));
  EXPECT_EQ(accepted(R"("synthetic_acceptance_rates": [0.9, 0.5, 0.5])"),
            (std::vector<double>{0.9, 0.5, 0.5}));
  EXPECT_EQ(accepted(R"("synthetic_acceptance_length": 2.25)"), (std::vector<double>{1, 0.25, 0}));
  EXPECT_EQ(accepted(R"("synthetic_acceptance_length": 4)"), (std::vector<double>{1, 1, 1}));
  for (const double mean : {0.0, 0.3, 1.5, 2.9, 3.0}) {
    const std::vector<double> all = accepted("\"mean_accepted\": " + std::to_string(mean));
    EXPECT_NEAR(all[0] + all[1] + all[2], mean, 1e-12);
    EXPECT_NEAR(all[1], all[0] * all[0], 1e-15);
    EXPECT_NEAR(all[2], all[0] * all[1], 1e-15);
  }
}

TEST(Speculative, NoneByDefault) {
  const LoadedScenario loaded = parse_scenario(
      R"({"model": "m", "workload": {"trace": "t", "format": "mooncake"}, "pools": [{"role": "colocated", "gpu": "h200"}]})",
      "s.json", "");
  EXPECT_FALSE(loaded.scenario.pools[0].engine.speculative);
  EXPECT_EQ(loaded.in_force.find("speculative"), std::string::npos);
}

// What is in force is a scenario that means the same.
TEST(Speculative, InForceLoadsToTheSame) {
  for (const std::string how :
       {R"("method": "ngram", "acceptance": [0.5, 0.25])", R"("method": "eagle3", "mean_accepted": 1.25)",
        R"("method": "draft_model", "model": "llama-3.1-8b", "synthetic_acceptance_rates": [0.5, 0.25])"}) {
    const LoadedScenario first = load("{\"num_speculative_tokens\": 2, " + how + "}");
    const LoadedScenario second = parse_scenario(first.in_force, "s.json", "");
    EXPECT_EQ(first.in_force, second.in_force);
    const EngineConfig &a = first.scenario.pools[0].engine, &b = second.scenario.pools[0].engine;
    EXPECT_EQ(a.speculative->accepted, b.speculative->accepted);
    EXPECT_EQ(a.speculative->model, b.speculative->model);
    EXPECT_EQ(a.async_scheduling, b.async_scheduling);
  }
}

// The host drafts from what a step has yielded, so vLLM does not schedule ahead of it.
TEST(Speculative, NgramIsNotAsynchronous) {
  EXPECT_FALSE(
      engine(R"({"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5})").async_scheduling);
  EXPECT_TRUE(
      engine(R"({"method": "eagle", "num_speculative_tokens": 2, "acceptance": 0.5})").async_scheduling);
  EXPECT_NE(
      error(R"({"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5})",
            {"pools.0.engine.async_scheduling=true"})
          .find("/pools/0/engine/async_scheduling: is true with speculative method ngram, expected false"),
      std::string::npos);
}

TEST(Speculative, ErrorsSayWhereAndWhatWasExpected) {
  const std::string at = "s.json: /pools/0/engine/speculative";
  const auto expect = [&](const std::string& speculative, const std::string& text) {
    EXPECT_EQ(error(speculative).substr(0, (at + text).size()), at + text);
  };
  expect(
      R"({"method": "eagel", "num_speculative_tokens": 2, "acceptance": 0.5})",
      "/method: is \"eagel\", expected one of mtp, eagle, eagle3, ngram, draft_model (did you mean 'eagle'");
  expect(R"({"num_speculative_tokens": 2, "acceptance": 0.5})", ": 'method' is missing, expected one of mtp");
  expect(R"({"method": "mtp", "acceptance": 0.5})", ": 'num_speculative_tokens' is missing");
  expect(R"({"method": "mtp", "num_speculative_tokens": 0, "acceptance": 0.5})",
         "/num_speculative_tokens: is 0, expected an integer from 1 to 1024");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "acceptance": 1.5})",
         "/acceptance: is 1.5, expected a number from 0 to 1");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "acceptance": [0.5]})",
         "/acceptance: has 1 entries, expected num_speculative_tokens = 2");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "acceptance": [0.5, "x"]})",
         "/acceptance: is [0.5,\"x\"], expected a list, each a number from 0 to 1");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2})", ": has none of acceptance, mean_accepted");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "acceptance": 0.5, "mean_accepted": 1})",
         ": has more than one of acceptance, mean_accepted");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "mean_accepted": 2.5})",
         "/mean_accepted: is 2.5, expected at most num_speculative_tokens = 2");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_length": 3.5})",
         "/synthetic_acceptance_length: is 3.5, expected at most num_speculative_tokens + 1 = 3");
  expect(R"({"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.5, 0.6]})",
         "/synthetic_acceptance_rates: rises");
  expect(R"({"method": "draft_model", "num_speculative_tokens": 2, "acceptance": 0.5})",
         "/model: is missing, expected the model that drafts");
  expect(R"({"method": "eagle", "model": "x", "num_speculative_tokens": 2, "acceptance": 0.5})",
         "/model: is given with method eagle, expected with draft_model only");
  expect(R"({"method": "eagle", "num_speculative_token": 2, "acceptance": 0.5})",
         "/num_speculative_token: unknown key (did you mean 'num_speculative_tokens'");
}

}  // namespace
}  // namespace pdsim
