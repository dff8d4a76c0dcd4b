// Theory: a plan is what trying everything would find. Of a small menu and a short trace everything can be
// tried: every layout's capacity by itself, every step of the grid. Runs that are given up could not have
// kept up, whatever came after; prices only multiply; whole instances are billed until the last answer.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/histogram.hpp"
#include "sim/core/random.hpp"
#include "tests/traces/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/plan.hpp"
#include "tools/study/plan_search.hpp"
#include "traces/reshape.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

// ------------------------------------------------------------------------------------- giving runs up

HopelessIf rule_of(double q, double ms, const char* metric = "ttft_ms") {
  return {{{metric, "p", q, ms}}, true, true};
}

RequestRecord served(Nanos arrival, Nanos first, Nanos end, std::int32_t output) {
  RequestRecord r;
  r.arrival = arrival;
  r.first_token = first;
  r.end = end;
  r.prompt_tokens = 10;
  r.output_tokens = output;
  r.status = RequestStatus::completed;
  r.counted = true;
  return r;
}

std::vector<RequestRecord> random_run(std::uint64_t seed) {
  Random random(seed, Purpose::lengths);
  std::vector<RequestRecord> run(1 + random.below(40));
  Nanos arrival = 0;
  for (RequestRecord& r : run) {
    const Nanos first = arrival + static_cast<Nanos>(random.below(40)) * kMillisecond;
    const auto output = static_cast<std::int32_t>(1 + random.below(5));
    const Nanos each = static_cast<Nanos>(random.below(8)) * kMillisecond;
    r = served(arrival, first, first + each * (output - 1), output);
    arrival += static_cast<Nanos>(random.below(10)) * kMillisecond;
  }
  return run;
}

// What could be seen of a run at `now`.
std::vector<RequestRecord> seen_at(std::vector<RequestRecord> run, Nanos now) {
  for (RequestRecord& r : run) {
    if (r.arrival > now) {
      r = RequestRecord{};
      continue;
    }
    if (r.first_token > now) r.first_token = -1;
    if (r.end > now) {
      r.end = -1;
      r.status = RequestStatus::in_flight;
    }
  }
  return run;
}

double percentile_in(const std::vector<RequestRecord>& run, const Bound& bound) {
  std::vector<double> values;
  for (const RequestRecord& r : run) {
    if (bound.metric == "ttft_ms") values.push_back(to_ms(r.first_token - r.arrival));
    if (bound.metric == "tpot_ms" && r.has_tpot()) values.push_back(to_ms(r.tpot()));
  }
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : quantile_sorted(values, bound.q);
}

// At no time is a run given up that meets its percentile in the end.
TEST(Hopeless, NeverOfARunThatKeepsUp) {
  int given_up = 0, early = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    const std::vector<RequestRecord> run = random_run(seed);
    const char* metric = seed % 2 == 0 ? "ttft_ms" : "tpot_ms";
    const double q = std::array{0.5, 0.9, 0.95, 0.99}[seed % 4];
    const HopelessIf rule = rule_of(q, seed % 2 == 0 ? 20 : 4, metric);
    const double reached = percentile_in(run, rule.bounds[0]);
    bool before = false;
    for (Nanos now = 0; now < 500 * kMillisecond; now += kMillisecond) {
      const bool lost = hopeless(rule, now, seen_at(run, now));
      EXPECT_TRUE(!lost || reached > rule.bounds[0].ms) << "seed " << seed << " at " << now;
      EXPECT_FALSE(before && !lost) << "hope came back, seed " << seed;
      early += lost && !before && now < run.back().arrival ? 1 : 0;
      before = lost;
    }
    given_up += before ? 1 : 0;
  }
  EXPECT_GT(given_up, 100);
  EXPECT_GT(early, 20);
}

// When all is known, of n requests it takes exactly n - floor(q (n - 1)) above the bound.
TEST(Hopeless, ExactlyWhenThePercentileIsPast) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    const std::vector<RequestRecord> run = random_run(seed);
    const double q = std::array{0.5, 0.9, 0.95, 0.99}[seed % 4];
    std::vector<double> values;
    for (const RequestRecord& r : run) values.push_back(to_ms(r.first_token - r.arrival));
    std::sort(values.begin(), values.end());
    const double below = values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
    for (const double bound : {below - 0.5, below, below + 0.5}) {
      EXPECT_EQ(hopeless(rule_of(q, bound), 1000 * kSecond, run), below > bound) << "seed " << seed;
    }
  }
}

TEST(Hopeless, WhatIsNotServedIsEnough) {
  std::vector<RequestRecord> run = random_run(3);
  EXPECT_FALSE(hopeless(rule_of(0.5, 1e9), kSecond, run));
  run[0].status = RequestStatus::rejected;
  EXPECT_TRUE(hopeless(rule_of(0.5, 1e9), kSecond, run));
}

// --------------------------------------------------------------------------------------- keeping up

RunResult result_of(std::vector<RequestRecord> requests) {
  RunResult run;
  run.requests = std::move(requests);
  return run;
}

// Requests come every 10 ms and take `service` of a server that takes one at a time: beyond 10 ms it is
// overloaded.
RunResult queue_of(int n, Nanos service) {
  std::vector<RequestRecord> run;
  Nanos free = 0;
  for (int i = 0; i < n; ++i) {
    const Nanos arrival = i * 10 * kMillisecond;
    free = std::max(free, arrival) + service;
    run.push_back(served(arrival, free, free, 1));
  }
  return result_of(std::move(run));
}

TEST(KeepsUp, NotWhenTheQueueOnlyGrows) {
  const std::vector<Bound> lax{{"ttft_ms", "p95", 0.95, 1e9}};
  EXPECT_EQ(judge_run(lax, queue_of(1000, 9 * kMillisecond)).verdict, LoadVerdict::kept_up);
  EXPECT_EQ(judge_run(lax, queue_of(1000, 13 * kMillisecond)).verdict, LoadVerdict::saturated);
  const std::vector<Bound> tight{{"ttft_ms", "p95", 0.95, 5}};
  EXPECT_EQ(judge_run(tight, queue_of(1000, 9 * kMillisecond)).verdict, LoadVerdict::slo);
  RunResult lost = queue_of(100, kMillisecond);
  lost.requests[7].status = RequestStatus::failed;
  EXPECT_EQ(judge_run(lax, lost).verdict, LoadVerdict::unserved);
}

// Answers of one token have no time between tokens: a bound on it asks nothing of them.
TEST(KeepsUp, WhateverABoundWithoutValuesSays) {
  const std::vector<Bound> bounds{{"tpot_ms", "p95", 0.95, 10}, {"ttft_ms", "p95", 0.95, 1e9}};
  const Reached reached = judge_run(bounds, queue_of(100, 9 * kMillisecond));
  EXPECT_EQ(reached.verdict, LoadVerdict::kept_up);
  EXPECT_EQ(reached.ms[0], -1);
}

// Single failures, or two in a row, are passed over; three end it.
TEST(Capacity, EndsBeforeThreeStepsThatFail) {
  const auto found = [](std::vector<int> failing) {
    return highest_step(
        [&](int step) {
          return step <= 20 && std::find(failing.begin(), failing.end(), step) == failing.end();
        },
        0);
  };
  EXPECT_EQ(found({13}), 20);
  EXPECT_EQ(found({12, 13}), 20);
  EXPECT_EQ(found({12, 13, 14}), 11);
}

TEST(Capacity, IsTheStepThatAScanFinds) {
  for (int limit = kLowestStep - 1; limit <= kHighestStep; limit += 7) {
    for (const int start : {kLowestStep, -13, 0, limit, 40, kHighestStep}) {
      if (start < kLowestStep) continue;
      int calls = 0;
      const auto found = highest_step(
          [&](int step) {
            EXPECT_GE(step, kLowestStep);
            EXPECT_LE(step, kHighestStep);
            ++calls;
            return step <= limit;
          },
          start);
      EXPECT_EQ(found.value_or(kLowestStep - 1), limit);
      EXPECT_LE(calls, 20);
    }
  }
  EXPECT_EQ(highest_step([](int step) { return step <= 9; }, 0, 5), 9);
  EXPECT_EQ(highest_step([](int step) { return step <= 5; }, 0, 5), 5);
}

// ----------------------------------------------------------------------------------------- whole plans

// A model of 24 heads, so that three GPUs make a worker and two of eight stay idle.
constexpr const char* kModel = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "num_hidden_layers": 16, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 24,
  "intermediate_size": 8448, "vocab_size": 32256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"})";

struct Job {
  std::string menu = R"([{"instance": "p5en.48xlarge", "usd_per_hour": 40}])";
  std::string deployments = R"(["colocated", "pull", "push"])";
  std::string degrees = "[4, 8]";
  std::string slo = R"({"ttft_ms": {"p95": 400}, "tpot_ms": {"p95": 12}})";
  std::string more;
  int max_instances = 1, requests = 150, osl = 24;
  double rate = 40;
};

PlanInput input_of(const Folder& folder, const Job& job, const PlanOptions& options = {}) {
  folder.file("model.json", kModel);
  const std::string scenario =
      R"({"model": "model.json", "pools": [{"name": "w", "role": "colocated", "instance": "p5en.48xlarge",
          "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "step_by_step": true}}],
          "workload": {"synthetic": {"requests": )" +
      std::to_string(job.requests) + R"(, "rate": 20, "isl": 1800, "osl": )" + std::to_string(job.osl) +
      R"(, "range_ratio": )" + (job.osl > 1 ? "0.3" : "1") + "}}}";
  const std::string plan =
      R"({"scenario": )" + scenario + R"(, "slo": )" + job.slo + R"(, "rate": )" + std::to_string(job.rate) +
      R"(, "menu": )" + job.menu + R"(, "tensor_parallel": )" + job.degrees + R"(, "max_instances": )" +
      std::to_string(job.max_instances) + R"(, "deployments": )" + job.deployments + job.more + "}";
  PlanOptions quiet = options;
  quiet.replay.quiet = true;
  return read_plan(folder.file("plan.json", plan), quiet);
}

ordered_json plan_of(const Folder& folder, const Job& job, PlanOptions options = {}) {
  options.replay.quiet = true;
  const PlanInput input = input_of(folder, job, options);
  return make_plan(input, options);
}

// Each layout and kind by itself, to its end, without any order or shortcut.
TEST(Plan, FindsWhatTryingEverythingFinds) {
  const Folder folder;
  PlanOptions options;
  const Job job;
  const PlanInput input = input_of(folder, job, options);
  const ordered_json report = make_plan(input, options);
  const Candidates all = candidates_of(input.base, input.menu, true, true);
  ASSERT_EQ(all.layouts.size(), 3u);  // 2 x TP4, 1 x TP8; 1P TP4 + 1D TP4
  EXPECT_TRUE(all.excluded.empty());
  options.abandon = false;
  LoadTests tests(input, options, {});
  std::map<std::string, int> most;  // by class
  std::map<std::string, std::string> by;
  for (const WorkerLayout& layout : all.layouts) {
    for (std::size_t kind = 0; kind < 3; ++kind) {
      if (kKinds[kind].disaggregated != layout.disaggregated()) continue;
      int low = kLowestStep, high = kHighestStep + 1;
      ASSERT_TRUE(tests.keeps_up(layout, kind, low));
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (tests.keeps_up(layout, kind, middle) ? low : high) = middle;
      }
      const std::string side = layout.disaggregated() ? "disaggregated" : "colocated";
      if (most.contains(side) && most[side] >= low) continue;  // of equals the simpler
      most[side] = low;
      by[side] = workers_of(layout) + ", " + std::string(kKinds[kind].name);
    }
  }
  ASSERT_EQ(report["options"].size(), 2u);
  for (const ordered_json& option : report["options"]) {
    const std::string side = option["class"];
    EXPECT_DOUBLE_EQ(option["most"]["capacity"], rate_at(job.rate, most[side])) << side;
    EXPECT_EQ(option["most"]["name"], "1 x p5en.48xlarge: " + by[side]) << side;
    EXPECT_EQ(option["suffices"], most[side] >= 0);
  }
  // One price: whoever suffices costs the same, and the simpler wins.
  ASSERT_GE(most["colocated"], 0);
  EXPECT_EQ(report["recommendation"]["kind"], "colocated");
  EXPECT_EQ(report["verdict"]["decision"], most["disaggregated"] >= 0 ? "tie" : "decided");
}

// Around the capacity every step is tried: all below keep up, none above does.
TEST(Plan, ACapacityIsWhereAScanStops) {
  const Folder folder;
  PlanOptions options;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  const PlanInput input = input_of(folder, job, options);
  const ordered_json report = make_plan(input, options);
  const Candidates all = candidates_of(input.base, input.menu, true, false);
  LoadTests tests(input, options, {});
  int last = kLowestStep - 1;
  const double capacity = report["recommendation"]["capacity"];
  const int found = static_cast<int>(std::lround(std::log(capacity / job.rate) / std::log(kGridStep)));
  for (int step = found - 12; step <= found + 12; ++step) {
    if (tests.keeps_up(all.layouts[0], 0, step)) last = step;
  }
  EXPECT_EQ(last, found);
}

TEST(Plan, GivingUpChangesNothing) {
  std::int64_t abandoned = 0;
  for (const char* slo : {R"({"ttft_ms": {"p95": 400}, "tpot_ms": {"p95": 12}})", R"({"ttft_ms": 60})"}) {
    const Folder folder;
    PlanOptions to_the_end;
    to_the_end.abandon = false;
    Job job;
    job.slo = slo;
    job.degrees = "[4]";
    ordered_json with = plan_of(folder, job), without = plan_of(folder, job, to_the_end);
    abandoned += with["search"]["abandoned"].get<std::int64_t>();
    EXPECT_EQ(without["search"]["abandoned"], 0);
    EXPECT_EQ(with["search"]["runs"], without["search"]["runs"]);
    with.erase("search");
    without.erase("search");
    EXPECT_EQ(with, without) << slo;
  }
  EXPECT_GT(abandoned, 10);
}

TEST(Plan, ThreadsChangeNothing) {
  const Folder folder;
  PlanOptions one, three;
  one.jobs = 1;
  three.jobs = 3;
  const Job job;
  EXPECT_EQ(plan_of(folder, job, one).dump(), plan_of(folder, job, three).dump());
}

// Wherever it is stopped, a plan is a document that can be shown, marked as what it is.
TEST(Plan, InterruptedAnywhereItCanBeShown) {
  const Folder folder;
  PlanOptions options;
  options.jobs = 1;
  Job job;
  job.requests = 40;
  job.degrees = "[8]";
  job.deployments = R"(["colocated", "push_layerwise"])";
  job.max_instances = 2;
  const PlanInput input = input_of(folder, job, options);
  const ordered_json whole = make_plan(input, options);
  const auto runs = whole["search"]["runs"].get<std::uint64_t>();
  ASSERT_EQ(whole["status"], "finished");
  bool between = false;  // recommended already, its capacity not yet looked at
  for (std::uint64_t last = 1; last <= runs; ++last) {
    const ordered_json report = make_plan(input, options, [&](std::uint64_t ran) {
      if (ran == last) throw Interrupted{};
    });
    SCOPED_TRACE(last);
    EXPECT_EQ(report["status"], "interrupted");
    const std::string table = plan_table(report);
    EXPECT_NE(table.find("INTERRUPTED"), std::string::npos);
    EXPECT_EQ(table.find("recommended"), std::string::npos);
    const ordered_json& best = report["recommendation"];
    if (best.is_null()) continue;
    between = between || best["at_capacity"].is_null();
    EXPECT_EQ(best["name"], whole["recommendation"]["name"]);
    EXPECT_NE(plan_memo(report, "pdsim plan").find("INTERRUPTED"), std::string::npos);
  }
  EXPECT_TRUE(between);
}

// A step beyond its capacity a deployment misses what limits it, and nothing else.
TEST(Plan, SaysWhatLimitsACapacity) {
  const Folder folder;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  const ordered_json report = plan_of(folder, job);
  const ordered_json& best = report["recommendation"];
  const ordered_json& limit = best["at_capacity"]["limit"];
  EXPECT_DOUBLE_EQ(limit["rate"], best["capacity"].get<double>() * kGridStep);
  ASSERT_FALSE(limit["missed"].empty());
  for (const ordered_json& b : limit["missed"]) EXPECT_GT(b["value"], b["bound"]);
  EXPECT_EQ(limit["by"], limit["missed"][0]["metric"]);
  EXPECT_NE(plan_table(report).find(limit["text"].get<std::string>().substr(0, 20)), std::string::npos);
}

// What is carried beyond what is asked counts when it exceeds what the limiting figure is off by.
TEST(Plan, HeadroomWithinItsOwnErrorIsUndecided) {
  const Folder folder;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  job.max_instances = 2;
  const ordered_json ample = plan_of(folder, job);
  const ordered_json& known = ample["recommendation"]["margin"];
  ASSERT_GT(known["error"], 2 * (kGridStep - 1)) << known;
  for (const double share : {0.5, 1.5}) {  // of that error
    job.rate = ample["recommendation"]["capacity"].get<double>() / (1 + share * known["error"].get<double>());
    const ordered_json report = plan_of(folder, job);
    const ordered_json& margin = report["recommendation"]["margin"];
    EXPECT_EQ(margin["decided"], margin["margin"] >= margin["error"]) << margin;
    EXPECT_EQ(margin["decided"], share > 1) << margin;
    EXPECT_EQ(plan_table(report).find("UNDECIDED whether it") == std::string::npos, share > 1);
    EXPECT_EQ(plan_memo(report, "").find("UNDECIDED whether it") == std::string::npos, share > 1);
    ASSERT_EQ(margin["next"].is_null(), share > 1) << margin;
    if (share < 1) {
      EXPECT_EQ(margin["next"]["usd_per_hour"], 80);
    }
  }
}

TEST(Plan, ABoundThatDoesNotApplyIsSaidAndNotShown) {
  const Folder folder;
  Job job;
  job.osl = 1;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  const ordered_json report = plan_of(folder, job);
  ASSERT_FALSE(report["recommendation"].is_null());
  ASSERT_EQ(report["recommendation"]["at_rate"]["slo"].size(), 1u);
  EXPECT_EQ(report["recommendation"]["at_rate"]["slo"][0]["metric"], "ttft_ms");
  EXPECT_NE(report["notes"].dump().find("tpot_ms does not apply"), std::string::npos)
      << report["notes"].dump(1);
  EXPECT_EQ(plan_table(report).find("is -1"), std::string::npos) << plan_table(report);
  job.slo = R"({"tpot_ms": 10})";
  EXPECT_THROW(plan_of(folder, job), InputError);
}

// Its rates are no better than what they rest on, and where the trace is short they are worse.
TEST(Plan, TheCurveSaysWhatItRestsOn) {
  const Folder folder;
  Job job;
  job.degrees = "[8]";
  job.deployments = R"(["colocated"])";
  const ordered_json curve = plan_of(folder, job)["curve"];
  const std::string basis = curve["basis"];
  EXPECT_NE(basis.find("Evidence: " + curve["evidence"]["grade"].get<std::string>()), std::string::npos)
      << basis;
  EXPECT_NE(basis.find("lasts less than 60 s: 1 of the 1 ranges"), std::string::npos)
      << basis;  // 150 requests
  EXPECT_NE(basis.find("steps of 2 %"), std::string::npos) << basis;
}

// Two instances with the same GPUs: the cheaper wins, until prices have it otherwise.
TEST(Plan, PricesFlipItWhereArithmeticSays) {
  const Folder folder;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  job.menu =
      R"([{"instance": "p5en.48xlarge", "usd_per_hour": 40}, {"instance": "p5e.48xlarge", "usd_per_hour": 44}])";
  const ordered_json report = plan_of(folder, job);
  EXPECT_EQ(report["recommendation"]["rented"], "1 x p5en.48xlarge");
  int rows = 0;
  for (const ordered_json& row : report["flips"]) {
    if (row["parameter"] != "price") continue;
    ++rows;
    const bool first = row["instance"] == "p5en.48xlarge", up = row["factor"] > 1;
    EXPECT_EQ(row["flips"], first == up) << row;  // 48 against 44; 40 against 35.2
    const double at = row["at"].is_null() ? 0 : row["at"].get<double>();
    EXPECT_NEAR(at, first != up ? 0 : first ? 44.0 / 40 : 40.0 / 44, 1e-5);
    // Then the other, at 44; or the same, at 32; nothing while the other is dearer; the other at 35.2.
    EXPECT_NEAR(row["colocated"]["usd_per_hour_percent"], first ? (up ? 10 : -20) : (up ? 0 : -12), 1e-9)
        << row;
  }
  EXPECT_EQ(rows, 4);
  job.menu =
      R"([{"instance": "p5en.48xlarge", "usd_per_hour": 80}, {"instance": "p5e.48xlarge", "usd_per_hour": 44}])";
  EXPECT_EQ(plan_of(folder, job)["recommendation"]["rented"], "1 x p5e.48xlarge");
}

// Two workers of three GPUs leave two of eight idle; all eight are paid for, until the last answer.
TEST(Plan, WholeInstancesAreBilledUntilTheLastAnswer) {
  const Folder folder;
  PlanOptions options;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[3]";
  const PlanInput input = input_of(folder, job, options);
  const ordered_json report = make_plan(input, options);
  const ordered_json& best = report["recommendation"];
  EXPECT_EQ(best["workers"], "2 workers TP3");
  EXPECT_EQ(best["gpus"], 8);
  EXPECT_EQ(best["idle_gpus"], 2);
  EXPECT_DOUBLE_EQ(best["usd_per_hour"], 40);
  EXPECT_DOUBLE_EQ(best["usd_per_month"], 40 * 730);
  const double arrivals = to_seconds(span_of(*input.trace)) * input.recorded_rate / job.rate;
  const double drain = best["at_rate"]["drain_s"], billed = best["at_rate"]["billed_s"];
  EXPECT_GT(drain, 0.01);
  EXPECT_NEAR(billed, arrivals + drain, 1e-6);
  double tokens = 0;
  for (const Request& r : input.trace->requests) tokens += r.output_tokens;
  EXPECT_NEAR(best["at_rate"]["usd_per_million_output_tokens"], 40 * billed / 3600 / tokens * 1e6, 1e-6);
}

// What is recommended is a scenario; replayed, it is the run that the plan speaks of.
TEST(Plan, ItsScenarioIsWhatItSays) {
  const Folder folder;
  Job job;
  job.deployments = R"(["pull"])";
  const ordered_json report = plan_of(folder, job);
  const ordered_json& best = report["recommendation"];
  ASSERT_FALSE(best.is_null());
  ReplayOptions quiet;
  quiet.quiet = true;
  TraceStore traces;
  const RunOutcome out =
      run(read_run(folder.file("deployed.json", report["scenario"].dump()), quiet), traces);
  EXPECT_EQ((*out.summary)["cost"]["usd_per_million_output_tokens"],
            best["at_rate"]["usd_per_million_output_tokens"]);
  EXPECT_EQ((*out.summary)["bound_by"], best["at_rate"]["bound_by"]);
  EXPECT_EQ((*out.summary)["latency_ms"]["tpot"]["p95"], best["at_rate"]["slo"][0]["value"]);
  EXPECT_EQ((*out.summary)["latency_ms"]["ttft"]["p95"], best["at_rate"]["slo"][1]["value"]);
  EXPECT_EQ(report["question"]["rate"], job.rate);
  EXPECT_EQ(out.deployment.nodes.size(), 1u);  // prefill and decode share the instance
}

// With "mixed" prefill and decode may be on instances of different kinds. Decode lives on memory bandwidth,
// of which an H200 has more than an H100: a bound between their TPOTs wants H200 for decode, and prefill is
// as fast on the cheaper one. What both cost adds up wherever it is said, and each worker is on its own kind.
TEST(Plan, MixedInstancesAddUp) {
  const Folder folder;
  Job job;
  job.menu =
      R"([{"instance": "p5en.48xlarge", "usd_per_hour": 40}, {"instance": "p5.48xlarge", "usd_per_hour": 25}])";
  job.deployments = R"(["pull"])";
  job.degrees = "[8]";
  job.more = R"(, "mixed": true)";
  job.max_instances = 2;
  const std::map<std::string, double> price = {{"p5en.48xlarge", 40}, {"p5.48xlarge", 25}};
  std::map<std::string, double> tpot;
  const ordered_json loose = plan_of(folder, job);
  for (const ordered_json& option : loose["options"]) {
    tpot[option["rented"]] = option["at_rate"]["slo"][0]["value"];
  }
  const double h200 = tpot.at("2 x p5en.48xlarge"), h100 = tpot.at("2 x p5.48xlarge");
  ASSERT_LT(h200, h100);
  job.slo = fmt::format(R"({{"ttft_ms": {{"p95": 400}}, "tpot_ms": {{"p95": {}}}}})", (h200 + h100) / 2);
  PlanOptions options;
  const PlanInput input = input_of(folder, job, options);
  const Candidates all = candidates_of(input.base, input.menu, true, true);
  ASSERT_EQ(all.rents.size(), 5u);  // one or two of each, and one of both
  int mixed = 0;
  for (const WorkerLayout& layout : all.layouts) {
    SCOPED_TRACE(workers_of(layout) + " on " + name_of(all.rents[layout.rent], input.menu.offers));
    const std::vector<int>& counts = all.rents[layout.rent].counts;
    const bool both = counts[0] > 0 && counts[1] > 0;
    if (both) {
      ++mixed;
      ASSERT_TRUE(layout.disaggregated()) << "a pool is of one kind";
      EXPECT_NE(layout.groups[0].offer, layout.groups[1].offer);
      EXPECT_DOUBLE_EQ(all.rents[layout.rent].usd_per_hour, 65);
    }
    std::set<std::pair<int, int>> taken;  // node, GPU
    std::size_t held = 0;
    for (const WorkerLayout::Place& place : layout.places) {
      const Group& group = layout.groups[static_cast<std::size_t>(place.group)];
      EXPECT_EQ(place.gpus.size(), static_cast<std::size_t>(group.tensor_parallel));
      EXPECT_EQ(place.node < counts[0], group.offer == 0) << "on a node of another kind";
      for (const int gpu : place.gpus) {
        EXPECT_TRUE(gpu >= 0 && gpu < 8);
        EXPECT_TRUE(taken.emplace(place.node, gpu).second) << "a GPU with two workers";
        ++held;
      }
    }
    EXPECT_EQ(static_cast<std::size_t>(layout.gpus - layout.idle), held);
    EXPECT_EQ(layout.gpus, 8 * (counts[0] + counts[1]));
  }
  EXPECT_EQ(mixed, 2);  // either way round

  const ordered_json report = make_plan(input, options);
  EXPECT_EQ(report["question"]["mixed"], true);
  const ordered_json& best = report["recommendation"];
  ASSERT_FALSE(best.is_null()) << report.dump(1);
  EXPECT_EQ(best["rented"], "1 x p5en.48xlarge + 1 x p5.48xlarge");
  EXPECT_EQ(best["class"], "disaggregated");
  EXPECT_EQ(best["pools"][0]["instance"], "p5.48xlarge");
  EXPECT_EQ(best["pools"][1]["instance"], "p5en.48xlarge");
  for (const ordered_json& option : report["options"]) {
    double usd = 0;
    int instances = 0;
    for (const auto& [name, n] : option["instances"].items()) {
      usd += price.at(name) * n.get<int>();
      instances += n.get<int>();
    }
    EXPECT_DOUBLE_EQ(option["usd_per_hour"], usd) << option["name"];
    EXPECT_DOUBLE_EQ(option["usd_per_month"], 730 * usd) << option["name"];
    EXPECT_EQ(option["gpus"], 8 * instances) << option["name"];
  }
  for (const ordered_json& row :
       report["flips"]) {  // a fifth of its price dearer, while it is still the best
    if (row["parameter"] != "price" || row["factor"] < 1 || row["flips"]) continue;
    const double more = 0.2 * price.at(row["instance"]) / 65;
    EXPECT_NEAR(row["disaggregated"]["usd_per_hour_percent"], 100 * more, 1e-9) << row;
  }

  ReplayOptions quiet;
  quiet.quiet = true;
  TraceStore traces;
  const RunOutcome out =
      run(read_run(folder.file("deployed.json", report["scenario"].dump()), quiet), traces);
  ASSERT_EQ(out.deployment.nodes.size(), 2u);
  EXPECT_DOUBLE_EQ(*out.deployment.nodes[0].usd_per_hour + *out.deployment.nodes[1].usd_per_hour, 65);
  const double billed = best["at_rate"]["billed_s"];
  EXPECT_NEAR((*out.summary)["cost"]["billed_usd"], 65 * billed / 3600, 1e-9);
  EXPECT_EQ((*out.summary)["cost"]["usd_per_million_output_tokens"],
            best["at_rate"]["usd_per_million_output_tokens"]);
  EXPECT_EQ((*out.summary)["latency_ms"]["tpot"]["p95"], best["at_rate"]["slo"][0]["value"]);
  Job apart = job;
  apart.more = "";
  EXPECT_EQ(plan_of(folder, apart)["recommendation"]["usd_per_hour"], 80) << "what mixing has spared";
}

// The next rate beyond what one instance carries takes two.
TEST(Plan, MoreLoadTakesMoreInstances) {
  const Folder folder;
  Job job;
  job.deployments = R"(["colocated"])";
  job.degrees = "[8]";
  job.max_instances = 2;
  const ordered_json one = plan_of(folder, job);
  const double capacity = one["recommendation"]["capacity"];
  EXPECT_DOUBLE_EQ(one["recommendation"]["usd_per_hour"], 40);
  job.rate = capacity * 1.2;
  const ordered_json two = plan_of(folder, job);
  EXPECT_DOUBLE_EQ(two["recommendation"]["usd_per_hour"], 80);
  EXPECT_EQ(two["curve"]["text"], "Only colocated deployments could be tried.");
  job.max_instances = 1;
  const ordered_json none = plan_of(folder, job);
  EXPECT_EQ(none["status"], "nothing_feasible");
  EXPECT_TRUE(none["recommendation"].is_null());
  EXPECT_NE(none["nearest_miss"]["help"].get<std::string>().find("about 2 such instances"), std::string::npos)
      << none["nearest_miss"];
}

TEST(Plan, UnreleasedOnlyWhenAllowed) {
  const Folder folder;
  Job job;
  job.deployments = R"(["push_layerwise"])";
  const ordered_json refused = plan_of(folder, job);
  EXPECT_TRUE(refused["recommendation"].is_null());
  ASSERT_EQ(refused["undeployable"].size(), 1u);
  EXPECT_EQ(refused["undeployable"][0]["needs"][0]["feature"], "transfer.mode push_layerwise");
  EXPECT_TRUE(refused["undeployable"][0]["would_be_cheaper"]);
  PlanOptions allowed;
  allowed.allow_unreleased = true;
  const ordered_json report = plan_of(folder, job, allowed);
  EXPECT_EQ(report["recommendation"]["kind"], "push_layerwise");
  EXPECT_TRUE(report["undeployable"].empty());
}

TEST(Plan, WhatCannotWorkIsCounted) {
  const Folder folder;
  Job job;
  job.degrees = "[5, 8]";
  job.menu = R"([{"instance": "p5en.48xlarge", "usd_per_hour": 40}, {"instance": "p6-b300.48xlarge"}])";
  job.deployments = R"(["colocated"])";
  const ordered_json report = plan_of(folder, job);
  ASSERT_EQ(report["excluded"].size(), 2u);
  EXPECT_EQ(report["excluded"][0]["reason"], "no price is published of this instance");
  EXPECT_EQ(report["excluded"][1]["candidates"], 1);
  EXPECT_NE(report["excluded"][1]["reason"].get<std::string>().find("24 attention heads"), std::string::npos)
      << report["excluded"];
}

// The shipped example is a plan of some hundred candidates.
TEST(Plan, TheExampleCanBeRead) {
  PlanOptions options;
  options.replay.quiet = true;
  const PlanInput input = read_plan(PDSIM_SOURCE_DIR "/scenarios/plans/example.json", options);
  EXPECT_DOUBLE_EQ(input.rate, 3.4);
  EXPECT_EQ(input.menu.offers.size(), 3u);
  for (const Offer& offer : input.menu.offers) EXPECT_TRUE(offer.usd_per_hour) << offer.instance->name;
  EXPECT_EQ(input.bounds.size(), 2u);
}

TEST(Plan, ThePageHasAllItsParts) {
  const Folder folder;
  const ordered_json report = plan_of(folder, {});
  const std::string memo = plan_memo(report, "pdsim plan plan.json");
  std::size_t at = 0;
  for (const char* part :
       {"# plan: the cheapest", "## Recommendation", "USD a month", "## Assumed", "at most 400 ms",
        "## Rejected", "| why not |", "## Evidence", "Grade: ", "Not modelled", "## What flips it",
        "## Check it on real GPUs", "vllm serve ", "vllm bench serve", "pdsim validate run", "## Reproduce",
        "pdsim plan plan.json", "SHA-256"}) {
    const std::size_t found = memo.find(part, at);
    EXPECT_NE(found, std::string::npos) << part << "\n" << memo;
    if (found != std::string::npos) at = found;
  }
  EXPECT_LE(std::count(memo.begin(), memo.end(), '\n'), 60) << memo;
  ordered_json long_one = report;  // however long its lists
  for (int i = 0; i < 50; ++i) {
    long_one["notes"].push_back("another");
    long_one["excluded"].push_back({{"reason", "it is"}, {"candidates", 1}, {"example", "one"}});
    long_one["options"].push_back(report["options"].back());
  }
  const std::string page = plan_memo(long_one, "pdsim plan plan.json");
  EXPECT_LE(std::count(page.begin(), page.end(), '\n'), 70) << page;
  std::istringstream lines(plan_table(report));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110u) << line;
}

}  // namespace
}  // namespace pdsim
