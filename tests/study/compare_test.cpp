// Theory: a comparison pairs the same requests. A deployment does not differ from itself; what one gains on
// another the other loses; stages account for every difference; the matrix changes who does what on the same
// GPUs and nothing else; replications are the same worlds for every run, whatever the threads. What would
// make the figures incomparable is refused unless it is allowed by name.
#include "tools/study/compare.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/study/matrix.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

constexpr const char* kPair = R"({
  "name": "pair", "model": "llama-3.1-8b",
  "pools": [{"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge"},
            {"name": "decode", "role": "decode", "instance": "p5en.48xlarge"}],
  "workload": {"synthetic": {"requests": 30, "rate": 12, "isl": 3000, "osl": 30, "range_ratio": 0.1}},
  "slo": {"ttft_ms": 500, "tpot_ms": 50}})";

RunSpec spec_of(std::vector<std::string> sets = {}, const char* text = kPair) {
  RunSpec spec;
  spec.text = text;
  spec.file = "pair.json";
  spec.options.sets = std::move(sets);
  spec.options.quiet = true;
  return spec;
}

Subject subject(const std::string& name, std::vector<std::string> sets = {}) {
  return {name, spec_of(std::move(sets)), "", ""};
}

CompareOptions quiet() {
  CompareOptions options;
  options.quiet = true;
  options.jobs = 1;
  return options;
}

std::vector<Subject> matrix(const RunSpec& base, std::vector<std::string_view> kinds = {}) {
  if (kinds.empty()) kinds.assign(std::begin(kMatrixKinds), std::end(kMatrixKinds));
  std::vector<Subject> subjects;
  for (Variant& v : matrix_of(base, kinds)) subjects.push_back({v.kind, v.spec, v.note, v.cannot});
  return subjects;
}

std::string message_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

bool says(const std::string& text, std::string_view what) {
  return text.find(what) != std::string::npos;
}

double sum_of(const std::array<double, kStageNames.size()>& stages) {
  return std::accumulate(stages.begin(), stages.end(), 0.0);
}

TEST(Compare, ADeploymentDoesNotDifferFromItself) {
  const Comparison c = compare({subject("pair"), subject("pair")}, quiet());
  EXPECT_EQ(c.runs[1].subject.name, "pair (2)");
  EXPECT_EQ(c.verdict.decision, Decision::tie);
  EXPECT_FALSE(c.verdict.winner);
  EXPECT_EQ(c.verdict.margin, 0);
  EXPECT_EQ(comparison_json(c)["verdict"]["winner"], nullptr);
  ASSERT_EQ(c.differences.size(), 1u);
  const RunDifference& d = c.differences[0];
  EXPECT_EQ(d.both, 30u);
  EXPECT_EQ(d.ttft.same, 30u);
  EXPECT_EQ(d.e2e.same, 30u);
  for (const double ms : d.stages_ms) EXPECT_EQ(ms, 0);
  for (const double ms : d.e2e.quantiles_ms) EXPECT_EQ(ms, 0);
  EXPECT_TRUE(c.equal.gpus);
  EXPECT_EQ(c.equal.usd_per_hour, true);
  EXPECT_TRUE(regressions(c).empty());
}

TEST(Compare, WhatOneGainsTheOtherLoses) {
  const Comparison one = compare(matrix(spec_of(), {"colocated", "pull"}), quiet());
  CompareOptions turned = quiet();
  turned.baseline = "pull";
  const Comparison other = compare(matrix(spec_of(), {"colocated", "pull"}), turned);
  const RunDifference &a = one.differences[0], &b = other.differences[0];
  EXPECT_EQ(a.run, 1u);
  EXPECT_EQ(b.run, 0u);
  for (const auto shift : {&RunDifference::ttft, &RunDifference::e2e}) {
    EXPECT_NE((a.*shift).mean_ms, 0);
    EXPECT_NEAR((a.*shift).mean_ms, -(b.*shift).mean_ms, 1e-9);
    for (std::size_t q = 0; q < kShiftQuantiles.size(); ++q) {
      EXPECT_NEAR((a.*shift).quantiles_ms[q], -(b.*shift).quantiles_ms[kShiftQuantiles.size() - 1 - q], 1e-9);
    }
  }
  EXPECT_EQ(one.verdict.text, other.verdict.text);
}

TEST(Compare, StagesAccountForEveryDifference) {
  const Comparison c = compare(matrix(spec_of(), {"colocated", "pull", "push"}), quiet());
  ASSERT_EQ(c.differences.size(), 2u);
  for (const RunDifference& d : c.differences) {
    EXPECT_NEAR(sum_of(d.stages_ms), d.e2e.mean_ms, 1e-9);
    EXPECT_NEAR(sum_of(d.e2e.faster_stages_ms), d.e2e.faster_ms, 1e-9);
    EXPECT_NEAR(sum_of(d.e2e.slower_stages_ms), d.e2e.slower_ms, 1e-9);
    EXPECT_NEAR(sum_of(d.ttft.faster_stages_ms), d.ttft.faster_ms, 1e-9);
    EXPECT_NEAR(sum_of(d.ttft.slower_stages_ms), d.ttft.slower_ms, 1e-9);
    EXPECT_EQ(d.ttft.faster + d.ttft.slower + d.ttft.same, d.both);
    EXPECT_GT(d.ttft.faster + d.ttft.slower, 0u);
    // The groups of a kind are parts of the whole.
    std::size_t requests = 0;
    double ttft = 0;
    for (const ShiftGroup& g : d.groups) {
      if (g.by != "prompt tokens") continue;
      requests += g.requests;
      ttft += g.ttft_ms * static_cast<double>(g.requests);
    }
    EXPECT_EQ(requests, d.both);
    EXPECT_NEAR(ttft / static_cast<double>(requests), d.ttft.mean_ms, 1e-9);
  }
  // Against colocated, a handed-over request waits for the wire and posts.
  const auto wire = static_cast<std::size_t>(Stage::transfer_wire);
  EXPECT_GT(c.differences[0].stages_ms[wire], 0);
  EXPECT_EQ(c.runs[0].outcome.summary->at("transfers").at("bytes"), 0);
}

TEST(Compare, WhatIsIncomparableIsRefusedUnlessAllowed) {
  const struct {
    std::vector<std::string> sets;
    std::string allow, expected;
  } cases[] = {
      {{"workload.time_scale=2"}, "workload", "/workload/time_scale is 2.0, but 1.0"},
      {{"workload.synthetic.isl=2000"}, "workload", "/workload/synthetic/isl is 2000, but 3000"},
      {{"workload.warmup_s=1"}, "workload", "/workload/warmup_s is 1, but 0"},
      {{"seed=7"}, "workload", "/seed, of the synthetic requests, is 7, but 1"},
      {{"slo.ttft_ms=400"}, "slo", "/slo/ttft_ms is 400"},
      {{"pricing.plan=capacity_block"}, "prices", "/pricing/plan is \"capacity_block\", but \"on_demand\""},
      {{"pricing.usd_per_hour={\"p5en.48xlarge\": 40}"},
       "prices",
       "an hour of p5en.48xlarge is 40 USD, but 63"},
      {{"pools.0.instance=p5.48xlarge", "pools.1.instance=p5.48xlarge"},
       "profiles",
       "its steps are timed by"},
      {{"kv_dtype=fp8"},
       "model",
       "serves llama-3.1-8b in bf16 with KV in fp8, but llama-3.1-8b in bf16 with KV in bf16"},
  };
  for (const auto& c : cases) {
    const std::vector<std::string>& sets = c.sets;
    const std::string &allow = c.allow, &expected = c.expected;
    SCOPED_TRACE(expected);
    std::atomic<int> runs{0};
    CompareOptions options = quiet();
    options.progress = [&](std::uint64_t, std::uint64_t) { ++runs; };
    const auto both = [&] { return std::vector<Subject>{subject("a"), subject("b", sets)}; };
    const std::string message = message_of([&] { compare(both(), options); });
    EXPECT_TRUE(says(message, expected)) << message;
    EXPECT_TRUE(says(message, "only with --allow " + allow)) << message;
    EXPECT_EQ(runs, 0);
    options.allow = {allow};
    EXPECT_EQ(message_of([&] { compare(both(), options); }), "");
  }
  CompareOptions options = quiet();
  options.allow = {"price"};
  EXPECT_TRUE(says(message_of([&] { compare({subject("a")}, options); }), "(did you mean 'prices'?)"));
  options = quiet();
  options.baseline = "aa";
  EXPECT_TRUE(
      says(message_of([&] { compare({subject("a")}, options); }), "--baseline: 'aa' is none of the runs"));
}

TEST(Compare, EqualGpusAndEqualSpendAreTwoThings) {
  // Twice the GPUs of a node that is paid for anyway.
  const Comparison idle = compare({subject("one"), subject("two", {"pools.decode.replicas=2"})}, quiet());
  EXPECT_FALSE(idle.equal.gpus);
  EXPECT_EQ(idle.equal.usd_per_hour, true);
  EXPECT_TRUE(says(idle.equal.text, "NOT equal GPUs: one 2 h200, two 3 h200; equal spend: 126.59 USD/h each"))
      << idle.equal.text;
  const Comparison nodes = compare({subject("one"), subject("two", {"pools.decode.replicas=9"})}, quiet());
  EXPECT_EQ(nodes.equal.usd_per_hour, false);
  // A GPU named alone has no price.
  const std::vector<std::string> alone = {R"(pools=[{"name": "prefill", "role": "prefill", "gpu": "h200"},
                                                    {"name": "decode", "role": "decode", "gpu": "h200"}])"};
  const Comparison unknown = compare({subject("one", alone), subject("two", alone)}, quiet());
  EXPECT_TRUE(unknown.equal.gpus);
  EXPECT_FALSE(unknown.equal.usd_per_hour);
  EXPECT_EQ(comparison_json(unknown)["equal"]["usd_per_hour"], nullptr);
  EXPECT_EQ(unknown.objective.name, "goodput");
}

std::set<std::pair<std::int32_t, GpuId>> gpus_of(const Deployment& d) {
  std::set<std::pair<std::int32_t, GpuId>> held;
  for (const WorkerPlan& worker : d.workers) {
    for (const GpuId gpu : worker.gpus) held.emplace(d.topology.node_of[static_cast<std::size_t>(gpu)], gpu);
  }
  return held;
}

double bill_of(const Deployment& d) {
  double usd = 0;
  for (const NodePlan& node : d.nodes) usd += node.usd_per_hour.value();
  return usd;
}

// Whichever it is made from, every variant holds the same GPUs of the same nodes and costs the same.
TEST(Matrix, TheSameGpusAndTheSameBill) {
  const std::vector<std::string> colocated = {
      R"(pools=[{"name": "w", "role": "colocated", "instance": "p5en.48xlarge", "replicas": 5, "tensor_parallel": 2}])"};
  const std::vector<std::string> wide = {"pools.prefill.replicas=2", "pools.decode.tensor_parallel=2"};
  const std::vector<std::string> ranks = {"pools.prefill.replicas=4", "pools.decode.data_parallel=2"};
  for (const auto& sets : {colocated, wide, ranks}) {
    const RunSpec base = spec_of(sets);
    const Deployment own = plan_deployment(load_run(base));
    const auto held = gpus_of(own);
    const double bill = bill_of(own);
    for (const Variant& v : matrix_of(base, kMatrixKinds)) {
      SCOPED_TRACE(v.kind + ": " + v.note);
      ASSERT_EQ(v.cannot, "");
      const LoadedScenario loaded = load_run(v.spec);
      const Deployment d = plan_deployment(loaded);
      EXPECT_EQ(gpus_of(d), held);
      EXPECT_EQ(bill_of(d), bill);
      EXPECT_EQ(v.kind == "bidirectional" ? "pull, bidirectional" : v.kind, deployment_kind(loaded.scenario));
    }
  }
  // Of five colocated workers two prefill.
  const auto variants = matrix_of(spec_of(colocated), kMatrixKinds);
  const Scenario pull = load_run(variants[1].spec).scenario;
  EXPECT_EQ(pull.pools[0].role, Role::prefill);
  EXPECT_EQ(pull.pools[0].replicas, 2);
  EXPECT_EQ(pull.pools[1].replicas, 3);
  EXPECT_EQ(variants[1].note, "2 of the 5 workers prefill, 3 decode, on the same GPUs");
}

// The scenario's own way to serve is left as it is: the same bytes but for its name.
TEST(Matrix, TheScenariosOwnKindIsTheScenario) {
  TraceStore traces;
  ordered_json own = *run(spec_of(), traces).summary;
  ordered_json made = *run(matrix_of(spec_of(), kMatrixKinds)[1].spec, traces).summary;
  for (ordered_json* summary : {&own, &made}) {
    summary->erase("scenario");
    summary->erase("inputs");
  }
  EXPECT_EQ(own.dump(), made.dump());
}

TEST(Matrix, WhatCannotWorkSaysWhyAndIsShown) {
  const auto cannot = [](std::vector<std::string> sets, std::size_t kind) {
    return matrix_of(spec_of(std::move(sets)), kMatrixKinds)[kind].cannot;
  };
  const std::string one = R"(pools=[{"name": "w", "role": "colocated", "instance": "p5en.48xlarge"}])";
  EXPECT_EQ(cannot({one}, 0), "");
  EXPECT_TRUE(says(cannot({one}, 1), "its one worker cannot be split")) << cannot({one}, 1);
  EXPECT_TRUE(says(cannot({"pools.0.instance=p5.48xlarge"}, 0), "the pools are on different machines"));
  // A GPU and two: neither TP shares out three, one node with one and one with two.
  const std::string uneven = cannot(
      {"pools.prefill.tensor_parallel=4", "pools.prefill.replicas=3", "pools.decode.tensor_parallel=8"}, 0);
  EXPECT_EQ(uneven, "");  // five workers of TP4: prefill's, where decode's leaves four over
  EXPECT_TRUE(says(matrix_of(spec_of({"pools.prefill.tensor_parallel=4", "pools.prefill.replicas=3",
                                      "pools.decode.tensor_parallel=8"}),
                             kMatrixKinds)[0]
                       .note,
                   "5 workers of TP4"));
  EXPECT_TRUE(says(message_of([] {
                     const std::string_view kinds[] = {"bidirectonal"};
                     matrix_of(spec_of(), kinds);
                   }),
                   "--modes: 'bidirectonal' is no way to serve (did you mean 'bidirectional'?)"));

  const Comparison c = compare(matrix(spec_of({one})), quiet());
  ASSERT_EQ(c.runs.size(), 4u);
  EXPECT_TRUE(c.runs[0].outcome.summary);
  EXPECT_FALSE(c.runs[1].outcome.summary);
  EXPECT_EQ(c.verdict.winner, 0u);
  EXPECT_TRUE(says(comparison_table(c), "'pull' is not run: its one worker cannot be split"));
  EXPECT_EQ(comparison_json(c)["runs"][1]["status"], "cannot work");
}

TEST(Compare, ReadingBackWithoutSessionsIsSaidToChangeNothing) {
  const Comparison c = compare(matrix(spec_of(), {"pull", "bidirectional"}), quiet());
  EXPECT_TRUE(says(comparison_table(c), "reading back changes nothing in 'bidirectional'"));
  EXPECT_EQ(c.verdict.decision, Decision::tie);
  EXPECT_EQ(c.verdict.winner, 0u);
}

TEST(Compare, ReplicationsAreTheSameWhateverTheThreads) {
  CompareOptions options = quiet();
  options.replications = 3;
  const std::string one = comparison_json(compare(matrix(spec_of(), {"colocated", "push"}), options)).dump();
  options.jobs = 3;
  const Comparison c = compare(matrix(spec_of(), {"colocated", "push"}), options);
  EXPECT_EQ(comparison_json(c).dump(), one);
  EXPECT_EQ(c.replicated_by, "seeds");
  // The first is the scenario itself, the others are it with the next seeds.
  TraceStore traces;
  double sum = 0;
  for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}}) {
    RunSpec spec = matrix(spec_of(), {"push"})[0].spec;
    spec.options.seed = seed;
    const double ttft = (*run(spec, traces).summary)["latency_ms"]["ttft"]["mean"].get<double>();
    EXPECT_EQ(ttft, c.runs[1].figures[2][seed - 1]);
    sum += ttft;
  }
  const ordered_json interval = ordered_json::parse(one)["runs"][1]["intervals"]["latency_ms.ttft.mean"];
  EXPECT_NEAR(interval["mean"].get<double>(), sum / 3, 1e-9);
  EXPECT_LT(interval["low"], interval["mean"]);
  EXPECT_EQ(interval["n"], 3);
}

// Sessions drawn anew are the same ones for every run, so that one does not differ from itself in any.
TEST(Compare, ReplicationsArePaired) {
  RunSpec spec;
  spec.text = kPair;
  spec.file = "pair.json";
  spec.options.quiet = true;
  spec.options.trace = PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl";
  spec.options.format = "mooncake";
  CompareOptions options = quiet();
  options.replications = 3;
  const Comparison c = compare({{"a", spec, "", ""}, {"b", spec, "", ""}}, options);
  EXPECT_EQ(c.replicated_by, "sessions drawn anew");
  EXPECT_EQ(c.runs[0].objective, c.runs[1].objective);
  EXPECT_NE(c.runs[0].objective[0], c.runs[0].objective[1]);
  EXPECT_NE(c.runs[0].objective[1], c.runs[0].objective[2]);
  ASSERT_TRUE(c.verdict.difference);
  EXPECT_EQ(c.verdict.difference->low, 0);
  EXPECT_EQ(c.verdict.difference->high, 0);
}

// Four nodes for the work of two, beyond any error: the first is better whichever way they are given.
TEST(Compare, AWorseOneIsARegressionOnlyAfterTheBetter) {
  const auto small = [] { return subject("small"); };
  const auto large = [] { return subject("large", {"pools.decode.replicas=24"}); };
  const Comparison worse = compare({small(), large()}, quiet());
  EXPECT_EQ(worse.verdict.decision, Decision::decided) << worse.verdict.text;
  ASSERT_EQ(regressions(worse).size(), 1u);
  EXPECT_TRUE(says(regressions(worse)[0], "small is")) << regressions(worse)[0];
  EXPECT_TRUE(regressions(compare({large(), small()}, quiet())).empty());
}

// The first of the matrix cannot work: what comes after is held against the first that can.
TEST(Compare, ARegressionIsAgainstTheFirstThatCouldBeRun) {
  Subject none = subject("none");
  none.cannot = "it has nothing to run on";
  const Comparison c =
      compare({none, subject("small"), subject("large", {"pools.decode.replicas=24"})}, quiet());
  const std::vector<std::string> worse = regressions(c);
  ASSERT_EQ(worse.size(), 1u);
  EXPECT_TRUE(worse[0].starts_with("against 'small', the first that could be run: small is")) << worse[0];
}

// A figure that one replication lacks has no mean, no interval and no win anywhere, and the notes say so.
TEST(Compare, AReplicationWithoutAFigureLeavesNone) {
  const std::vector<std::string> one = {"workload.synthetic.requests=1"};
  CompareOptions options = quiet();
  options.replications = 3;
  const Comparison before = compare({subject("a", one), subject("b", one)}, options);
  const std::vector<double>& ttft = before.runs[0].figures[2];
  const auto [least, most] = std::ranges::minmax(ttft);
  ASSERT_LT(least, most);
  std::vector<std::string> tight = one;
  tight.push_back("slo.ttft_ms=" + std::to_string((least + most) / 2));
  const Comparison c = compare({subject("a", tight), subject("b", tight)}, options);
  ASSERT_TRUE(std::ranges::any_of(c.runs[0].objective, [](double v) { return std::isfinite(v); }));
  const std::string path = "cost.usd_per_request_in_slo";
  const ordered_json run = comparison_json(c)["runs"][0];
  EXPECT_TRUE(run["objective"].is_null());
  EXPECT_FALSE(run["intervals"].contains(path));
  EXPECT_TRUE(run["intervals"].contains("latency_ms.ttft.mean"));
  EXPECT_EQ(c.verdict.decision, Decision::nobody) << c.verdict.text;
  const std::string table = comparison_table(c);
  const std::size_t row = table.find("  USD / 1,000 in SLO");
  EXPECT_EQ(table.substr(row, table.find('\n', row) - row).find_first_of("0123456789", 21),
            std::string::npos);
  EXPECT_TRUE(std::ranges::any_of(
      c.notes, [&](const std::string& note) { return says(note, " of 'a' has no ") && says(note, path); }));
}

// Push without patience waits for ever for a completion that was lost, in whatever world.
TEST(Compare, AStalledReplicationIsSaidAndHasNoFigures) {
  CompareOptions options = quiet();
  options.replications = 2;
  const Comparison c =
      compare({subject("pull"),
               subject("push", {"transfer.mode=push",
                                R"(faults=[{"kind": "message_lost", "at_s": 0, "target": "completion"}])"})},
              options);
  for (const std::string& stall : c.runs[1].stalls) EXPECT_NE(stall, "");
  for (const std::string& stall : c.runs[0].stalls) EXPECT_EQ(stall, "");
  EXPECT_EQ(c.verdict.winner, 0u);
  const ordered_json run = comparison_json(c)["runs"][1];
  EXPECT_TRUE(run["objective"].is_null());
  EXPECT_FALSE(run["intervals"].contains("latency_ms.ttft.mean"));
  EXPECT_TRUE(run["intervals"].contains("requests.completed"));
  for (const char* which : {"Replication 1 of 'push' stalled", "Replication 2 of 'push' stalled"}) {
    EXPECT_TRUE(std::ranges::any_of(c.notes, [&](const std::string& n) { return n.starts_with(which); }));
  }
}

// Clients that go away leave the rest to a faster deployment, which is no win by latency.
TEST(Compare, CompletedRequestsAreWhatLatenciesAreOf) {
  CompareOptions options = quiet();
  options.objective = "ttft_mean";
  options.allow = {"workload"};
  const Comparison c =
      compare({subject("patient"), subject("leaving", {"workload.client_timeout_s=0.3"})}, options);
  ASSERT_LT(c.runs[1].completed(), 0.99);
  ASSERT_GT(c.runs[1].completed(), 0);
  EXPECT_DOUBLE_EQ(c.runs[0].completed(), 1);
  EXPECT_EQ(c.verdict.winner, 0u) << c.verdict.text;
  EXPECT_TRUE(says(c.verdict.text, "leaving completed ")) << c.verdict.text;
}

TEST(Compare, TheIntervalsSayWhichTheyAre) {
  CompareOptions options = quiet();
  options.replications = 2;
  EXPECT_TRUE(says(comparison_table(compare({subject("a"), subject("b")}, options)), "Student's t"));
  RunSpec spec = spec_of();
  spec.options.trace = PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl";
  spec.options.format = "mooncake";
  const Comparison drawn = compare({{"a", spec, "", ""}, {"b", spec, "", ""}}, options);
  EXPECT_TRUE(says(comparison_table(drawn), "by the bootstrap"));
  const std::vector<double>& ttft = drawn.runs[0].figures[2];
  const Interval expected = *interval_of(ttft, Replicated::sessions);
  EXPECT_NE(expected.low, expected.high);
  EXPECT_EQ(comparison_json(drawn)["runs"][0]["intervals"]["latency_ms.ttft.mean"]["low"], expected.low);
}

TEST(Compare, TheSloIsMissedByName) {
  TraceStore traces;
  EXPECT_TRUE(missed_slo(*run(spec_of({"slo={\"ttft_ms\": {\"p50\": 60000}}"}), traces).summary).empty());
  const auto missed = missed_slo(*run(spec_of({"slo={\"ttft_ms\": {\"p50\": 1}}"}), traces).summary);
  ASSERT_EQ(missed.size(), 1u);
  EXPECT_TRUE(missed[0].starts_with("ttft_ms p50 is ")) << missed[0];
  EXPECT_TRUE(missed[0].ends_with(", above 1")) << missed[0];
  CompareOptions options = quiet();
  options.needs_slo = true;
  EXPECT_TRUE(says(message_of([&] { compare({subject("a", {"slo={}"})}, options); }), "--fail-on"));
  const Comparison none = compare({subject("a", {"slo={}"}), subject("b", {"slo={}"})}, quiet());
  EXPECT_TRUE(says(comparison_table(none), "No SLO is set"));
}

TEST(Compare, FewRequestsBeyondAPercentileAreSaid) {
  const std::string table = comparison_table(compare({subject("a"), subject("b")}, quiet()));
  EXPECT_TRUE(says(table, "Of 30 requests fewer than 10 lie beyond p95 and p99")) << table;
}

TEST(Compare, AnInterruptedOneSaysSoAndJudgesNothing) {
  CompareOptions options = quiet();
  std::atomic<int> polls{0};
  std::atomic<bool> stop{false};
  options.progress = [&](std::uint64_t done, std::uint64_t) { stop = stop || done >= 30; };
  options.interrupted = [&] { return ++polls > 0 && stop; };
  const Comparison c = compare({subject("a"), subject("b"), subject("c")}, options);
  EXPECT_TRUE(c.interrupted);
  EXPECT_TRUE(c.runs[0].outcome.summary);
  EXPECT_FALSE(c.runs[2].outcome.summary);
  EXPECT_EQ(c.verdict.decision, Decision::nobody);
  const std::string table = comparison_table(c);
  EXPECT_TRUE(says(table, "INTERRUPTED"));
  EXPECT_TRUE(says(table, "not run"));
  EXPECT_EQ(comparison_json(c)["status"], "interrupted");
}

// Lines fit a terminal, and many runs go below one another.
TEST(Compare, TheTableIsAtMost110ColumnsWide) {
  CompareOptions options = quiet();
  options.replications = 2;
  std::vector<Subject> many =
      matrix(spec_of(), {"colocated", "pull", "push", "push_layerwise", "bidirectional"});
  many.push_back(subject("another-one-of-a-longer-name"));
  const std::string table = comparison_table(compare(std::move(many), options));
  std::size_t begin = 0;
  for (std::size_t end = table.find('\n'); end != std::string::npos; end = table.find('\n', begin)) {
    const std::string line = table.substr(begin, end - begin);
    const auto width =
        std::ranges::count_if(line, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
    EXPECT_LE(width, 110) << line;
    EXPECT_FALSE(line.ends_with(' ')) << line;
    begin = end + 1;
  }
}

TEST(Compare, RowsPerRequestAddUp) {
  const Comparison c = compare(matrix(spec_of(), {"colocated", "pull"}), quiet());
  std::istringstream csv(differences_csv(c));
  std::string line;
  std::getline(csv, line);
  EXPECT_EQ(line,
            "request_id,colocated:ttft_ns,colocated:e2e_ns,pull:ttft_ns,pull:e2e_ns,pull:ttft_change_ns,"
            "pull:e2e_change_ns,pull:largest_stage,pull:largest_stage_change_ns");
  double sum = 0;
  int rows = 0;
  for (; std::getline(csv, line); ++rows) {
    std::vector<std::string> cells;
    std::istringstream row(line);
    for (std::string cell; std::getline(row, cell, ',');) cells.push_back(cell);
    ASSERT_EQ(cells.size(), 9u) << line;
    EXPECT_EQ(std::stoll(cells[4]) - std::stoll(cells[2]), std::stoll(cells[6]));
    EXPECT_EQ(std::stoll(cells[3]) - std::stoll(cells[1]), std::stoll(cells[5]));
    sum += std::stod(cells[6]);
  }
  EXPECT_EQ(rows, 30);
  EXPECT_NEAR(sum / rows / 1e6, c.differences[0].e2e.mean_ms, 1e-6);
}

}  // namespace
}  // namespace pdsim
