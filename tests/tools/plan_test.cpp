// Theory: plan ends with the status that the contract gives; what it refuses is one line with the place, the
// value and what was expected, and nothing is written; an interrupted plan says that it is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

Ran run_plan(const Folder& folder, const std::string& arguments, const std::string& before = "") {
  return run(folder, "plan " + arguments, before);
}

constexpr const char* kScenario = R"({"model": "llama-3.1-8b",
  "pools": [{"name": "w", "role": "colocated", "instance": "p5en.48xlarge"}],
  "workload": {"synthetic": {"requests": 40, "rate": 20, "isl": 800, "osl": 16}}})";

// A plan with some of its parts replaced (RFC 7396); null leaves one out.
std::string plan_text(const std::string& changes = "{}") {
  json plan = json::parse(R"({"scenario": "scenario.json", "slo": {"ttft_ms": 500, "tpot_ms": 50},
    "menu": [{"instance": "p5en.48xlarge"}], "tensor_parallel": [8], "max_instances": 1,
    "deployments": ["colocated"]})");
  plan.merge_patch(json::parse(changes));
  return plan.dump();
}

TEST(PlanCommand, WhatCannotWorkIsOneLineAndStatus2) {
  const struct {
    std::string changes, arguments, expected;
  } cases[] = {
      {R"({"slo": null})", "", "has no slo"},
      {R"({"slo": {"ttft": 500}})", "", "plan.json: /slo/ttft"},
      {R"({"slo": {"ttft_ms": 0}})", "", "/slo/ttft_ms: is 0"},
      {R"({"menu": []})", "", "/menu: is []: expected at least one instance"},
      {R"({"menu": null})", "", "menu"},
      {R"({"menu": [{"instance": "p5em.48xlarge"}]})", "", "did you mean 'p5e"},
      {R"({"menu": [{"instance": "p6-b300.48xlarge"}]})", "", "no source gives a price of p6-b300.48xlarge"},
      {R"({"menu": [{"instance": "p5en.48xlarge", "usd_per_hour": -1}]})", "", "usd_per_hour"},
      {R"({"menu": [{"instance": "p5en.48xlarge"}, {"instance": "p5en.48xlarge"}]})", "",
       "each instance once"},
      {R"({"max_instances": 0})", "", "/max_instances: is 0"},
      {R"({"max_instances": 1000000})", "", "/max_instances: is 1000000"},
      {R"({"max_instances": null})", "", "max_instances"},
      {R"({"tensor_parallel": [0]})", "", "/tensor_parallel"},
      {R"({"rate": 0})", "", "/rate: is 0: expected requests per second, above 0"},
      {"{}", "--rate 0", "--rate: is 0, expected requests per second, above 0"},
      {"{}", "--rate -1", "--rate: is -1"},
      {R"({"deployments": ["pul"]})", "", "did you mean 'pull'?"},
      {R"({"scenario": "nosuch.json"})", "", "nosuch.json: cannot be read"},
      {R"({"scenaro": "x"})", "", "did you mean 'scenario'?"},
      {R"({"schema": "pdsim.plan/2"})", "", "expected \"pdsim.plan/1\""},
      {R"({"set": {"model": "llama-3"}})", "", "llama-3"},
      {R"({"set": {"workload.synthetic.rat": 1}})", "", "plan.json: /workload/synthetic/rat"},
      {"{}", "--set workload.synthetic.rat=1", "--set: /workload/synthetic/rat"},
      {"{}", "--trace nosuch.jsonl --format mooncake", "nosuch.jsonl"},
      {"{}", "--prices nosuch.json", "nosuch.json: cannot be read"},
      {"{}", "--memo .", "--memo: . is a folder"},
      {"{}", "--memo scenario.json/memo.md", "is not a folder"},
      {"{}", "--quiet --memo plan.json", "--memo: plan.json is what the plan is made from"},
      {"{}", "--quiet --memo ./scenario.json", "--memo: ./scenario.json is what the plan is made from"},
      {"{}", "--set workload.sessions=closed", "/workload/sessions: is \"closed\""},
      {"{}", "--set workload.max_concurrency=4", "expected 0 (--set workload.max_concurrency=0)"},
      {"{}", "--set workload.warmup_s=1", "expected 0, every request (--set workload.warmup_s=0)"},
      {"{}", "--set workload.measure_s=1", "expected 0, every request (--set workload.measure_s=0)"},
      {"{}", "--job 2", "did you mean '--jobs'?"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.changes + " " + c.arguments);
    const Folder folder;
    folder.file("scenario.json", kScenario);
    folder.file("plan.json", plan_text(c.changes));
    const Ran ran = run_plan(folder, "plan.json " + c.arguments);
    EXPECT_EQ(ran.status, 2) << ran.out;
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), 2u);
  }
}

TEST(PlanCommand, ClosedLoopsHaveNoRate) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  folder.file("plan.json", plan_text());
  const Ran ran =
      run_plan(folder,
               "plan.json --set 'workload.synthetic={\"requests\": 9, \"concurrency\": 3, \"isl\": 9, "
               "\"osl\": 9}'");
  EXPECT_EQ(ran.status, 2);
  EXPECT_NE(ran.err.find("is a closed loop"), std::string::npos) << ran.err;
}

TEST(PlanCommand, AKeyGivenTwiceIsNone) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  std::string text = plan_text();
  text.insert(text.rfind('}'), ", \"max_instances\": 2");
  folder.file("plan.json", text);
  const Ran ran = run_plan(folder, "plan.json");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.err, "pdsim: plan.json: 'max_instances' is given twice in one object, expected once\n");
}

// The page is written last: what was computed is on stdout even when the page cannot be written.
TEST(PlanCommand, TheTableOutlivesAPageThatFails) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  folder.file("plan.json", plan_text());
  // A name that there is no room for beside which to write.
  const Ran ran = run_plan(folder, "plan.json --quiet --memo " + std::string(255, 'm'));
  EXPECT_EQ(ran.status, 2);
  EXPECT_NE(ran.out.find("recommended   1 x p5en.48xlarge"), std::string::npos) << ran.out;
  EXPECT_EQ(ran.out.find("wrote "), std::string::npos) << ran.out;
  EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  EXPECT_EQ(folder.files(), 2u);
}

TEST(PlanCommand, AnswersAndWritesItsPage) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  folder.file("plan.json", plan_text());
  const Ran ran = run_plan(folder, "plan.json --quiet --memo memo.md");
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  EXPECT_NE(ran.out.find("recommended   1 x p5en.48xlarge: 1 worker TP8, colocated"), std::string::npos)
      << ran.out;
  EXPECT_NE(ran.out.find("wrote         ./memo.md"), std::string::npos) << ran.out;
  const std::string memo = bytes_of(folder / "memo.md");
  EXPECT_NE(memo.find("pdsim plan plan.json\n"), std::string::npos) << memo;
  const Ran as_json = run_plan(folder, "plan.json --quiet --json --jobs 1 --prices prices.json",
                               "echo '{\"p5en.48xlarge\": 50}' > prices.json;");
  ASSERT_EQ(as_json.status, 0) << as_json.err;
  const json report = json::parse(as_json.out);
  EXPECT_EQ(report["schema"], "pdsim.plan-report/1");
  EXPECT_EQ(report["recommendation"]["usd_per_hour"], 50);
  EXPECT_EQ(report["question"]["menu"][0]["as_of"], "as --prices says");
}

TEST(PlanCommand, NothingThatSufficesIsStatus3) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  folder.file("plan.json", plan_text(R"({"slo": {"ttft_ms": 1}})"));
  const Ran ran = run_plan(folder, "plan.json --quiet");
  EXPECT_EQ(ran.status, 3);
  EXPECT_NE(ran.out.find("NOTHING"), std::string::npos) << ran.out;
  EXPECT_NE(ran.out.find("above 1."), std::string::npos) << ran.out;
  EXPECT_NE(ran.err.find("nothing on the menu meets the SLO"), std::string::npos) << ran.err;
}

TEST(PlanCommand, InterruptedItSaysSo) {
  const Folder folder;
  folder.file("scenario.json", kScenario);
  folder.file("plan.json", plan_text(R"({"tensor_parallel": [1, 2, 4, 8], "max_instances": 12,
                                         "deployments": ["colocated", "pull", "push"]})"));
  const Ran ran = run_plan(folder, "plan.json --quiet --json --memo memo.md", interrupted_after("2"));
  EXPECT_EQ(ran.status, 130) << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["status"], "interrupted");
  EXPECT_TRUE(report["recommendation"].is_null());
  EXPECT_EQ(folder.files(), 2u);
}

}  // namespace
}  // namespace pdsim
