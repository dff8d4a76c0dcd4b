// Theory: a run is a replay, and runs of the same workload share one trace.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {
namespace {

const std::string kQuickstart = PDSIM_SOURCE_DIR "/scenarios/quickstart.json";

RunSpec quickstart(std::vector<std::string> sets = {}) {
  ReplayOptions options;
  options.sets = std::move(sets);
  options.quiet = true;
  return read_run(kQuickstart, options);
}

TEST(Runs, WhatIsTheSameWorkloadIsOneTrace) {
  TraceStore traces;
  const auto trace = [&](std::vector<std::string> sets, const std::string& generate = "") {
    RunSpec spec = quickstart(std::move(sets));
    spec.generate = generate;
    return traces.get(load_run(spec), generate);
  };
  const auto plain = trace({});
  EXPECT_EQ(plain, trace({"transfer.mode=push"}));
  EXPECT_EQ(plain, trace({"pools.decode.replicas=2"}));
  const auto fast = trace({"workload.time_scale=2"});
  EXPECT_NE(plain, fast);
  EXPECT_EQ(fast, trace({"workload.time_scale=2"}));
  EXPECT_EQ(plain->requests.back().arrival, 2 * fast->requests.back().arrival);
  const auto generated = trace({}, R"({"requests": 20, "seed": 3})");
  EXPECT_EQ(generated->requests.size(), 20u);
  EXPECT_EQ(generated, trace({}, R"({"seed": 3, "requests": 20})"));
  EXPECT_NE(generated, trace({}, R"({"requests": 20, "seed": 4})"));
  EXPECT_THROW(trace({}, R"({"request": 20})"), InputError);
}

// A seed makes another trace only where it is drawn from.
TEST(Runs, SeedsMakeOtherTracesWhereTheyAreDrawnFrom) {
  TraceStore traces;
  const auto trace = [&](const std::string& seed, const std::string& generate,
                         std::vector<std::string> sets) {
    sets.push_back("seed=" + seed);
    RunSpec spec = quickstart(std::move(sets));
    spec.generate = generate;
    return traces.get(load_run(spec), generate);
  };
  const std::vector<std::string> file = {
      "workload.trace=" PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl", "workload.format=mooncake"};
  EXPECT_EQ(trace("1", "", file), trace("2", "", file));
  const std::string own = R"({"requests": 20, "seed": 3})", none = R"({"requests": 20})";
  EXPECT_EQ(trace("1", own, {}), trace("2", own, {}));
  EXPECT_EQ(trace("3", none, {}), trace("1", own, {}));
  EXPECT_NE(trace("1", none, {})->requests.back().arrival, trace("2", none, {})->requests.back().arrival);
}

// Many threads ask for the same trace; it is made once, and every run is the one that runs alone.
TEST(Runs, RunsBesideOthersAreTheSameBytes) {
  TraceStore alone, shared;
  const auto spec = [&](std::size_t i) {
    return quickstart({i % 2 == 0 ? "transfer.mode=pull" : "transfer.mode=push",
                       i % 3 == 0 ? "workload.time_scale=1" : "workload.time_scale=1.5"});
  };
  std::vector<std::string> beside(12);
  parallel_for(beside.size(), 4, [&](std::size_t i) { beside[i] = run(spec(i), shared).summary->dump(); });
  for (std::size_t i = 0; i < beside.size(); ++i) EXPECT_EQ(beside[i], run(spec(i), alone).summary->dump());
}

TEST(Runs, AHopelessRunIsAbandoned) {
  TraceStore traces;
  RunHooks hooks;
  std::size_t seen = 0;
  hooks.hopeless = [&](Nanos now, std::span<const RequestRecord> requests) {
    seen = requests.size();
    return now > 20 * kSecond;
  };
  const RunOutcome out = run(quickstart(), traces, hooks);
  EXPECT_EQ(out.result.status, RunStatus::abandoned);
  EXPECT_EQ(out.summary, nullptr);
  EXPECT_EQ(seen, 500u);
  EXPECT_LT(out.result.end, 40 * kSecond);
}

}  // namespace
}  // namespace pdsim
