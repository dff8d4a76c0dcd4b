// Theory: a figure is arithmetic over the summaries that replay would write, judged by the source's own
// number
// (|simulated / published - 1| <= tolerance) or by the sign that the source gives; nothing else turns a
// verdict. Whatever is wrong in a published file is one line that names file, pointer, value and expectation.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kShipped = "'" PDSIM_SOURCE_DIR "/scenarios/published'";

// Four requests of 160 tokens, one after the other, on one GPU each; "vary" has 160, 320 and 640.
constexpr const char* kRuns = R"(
    "a": {"scenario": {"model": "llama-3.1-8b", "pools": [
            {"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge"},
            {"name": "decode", "role": "decode", "instance": "p5en.48xlarge"}],
          "workload": {"synthetic": {"requests": 4, "concurrency": 1, "isl": 160, "osl": 8}}}},
    "pushed": {"base": "a", "set": {"transfer.mode": "push"}},
    "length": {"base": "a", "vary": {"paths": ["workload.synthetic.isl"], "values": [160, 320, 640]}})";

std::string document(const std::string& figures, const std::string& runs = kRuns,
                     const std::string& name = "test", bool specified = true) {
  return R"({"schema": "pdsim.published/1", "name": ")" + name +
         R"(", "title": "t", "source": "s", "specified": )" + (specified ? "true" : "false") +
         ", \"runs\": {" + runs + "}, \"figures\": [" + figures + "]}  // and a comment\n";
}

std::string figure(const std::string& published, const std::string& simulated, const std::string& more = "") {
  return R"({"metric": "m", "unit": "ms", "published": )" + published + ", \"simulated\": " + simulated +
         (more.empty() ? "" : ", " + more) + "}";
}

json report_of(const Folder& folder, const std::string& options = "") {
  const Ran ran = run("validate published '" + (folder / "") + "' --quiet --json " + options);
  EXPECT_EQ(ran.status, 0) << ran.err;
  return json::parse(ran.out);
}

// One figure's value: 3 tokens x 4 is in no summary, 640 prompt tokens are.
TEST(Published, ExpressionsAreArithmeticOverSummaries) {
  const struct {
    std::string expression;
    double value;
  } cases[] = {
      {"3", 3},
      {R"({"op": "+", "args": [1, 2, 3.5]})", 6.5},
      {R"({"op": "-", "args": [10, 2, 3]})", 5},
      {R"({"op": "*", "args": [2, {"op": "/", "args": [12, 4]}]})", 6},
      {R"({"op": "min", "args": [3, 2, 5]})", 2},
      {R"({"op": "max", "args": [3, 2, 5]})", 5},
      {R"("a:cache.prompt_tokens")", 4 * 160},
      {R"("length@320:cache.prompt_tokens")", 4 * 320},
      // Half way between 160 and 320, and a quarter beyond 320 of the way to 640.
      {R"({"op": "crosses", "level": 960, "over": [160, 320, 640], "of": "length@*:cache.prompt_tokens"})",
       240},
      {R"({"op": "crosses", "level": 1600, "over": [160, 320, 640], "of": "length@*:cache.prompt_tokens"})",
       400},
      {R"({"op": "crosses", "level": 1600, "way": "up", "over": [160, 320, 640], "of": "length@*:cache.prompt_tokens"})",
       400},
      {R"({"op": "crosses", "level": 960, "way": "down", "over": [640, 320, 160], "of": "length@*:cache.prompt_tokens"})",
       240},
      {R"({"op": "-", "args": ["a:workers.prefill-0.steps", "a:workers.0.steps"]})", 0},
  };
  std::string figures;
  for (const auto& c : cases) figures += (figures.empty() ? "" : ",\n") + figure("1", c.expression);
  const Folder folder;
  folder.file("x.json", document(figures));
  const json rows = report_of(folder)["rows"];
  ASSERT_EQ(rows.size(), std::size(cases));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_DOUBLE_EQ(rows[i]["simulated"].get<double>(), cases[i].value) << cases[i].expression;
  }
}

// What never happens has no value: crossing a level that lies outside, or in the other direction.
TEST(Published, WhatNeverCrossesIsOffWhereItIsJudged) {
  const std::string never =
      R"({"op": "crosses", "level": 1e6, "over": [160, 320], "of": "length@*:cache.prompt_tokens"})";
  const std::string other_way =
      R"({"op": "crosses", "level": 960, "way": "down", "over": [160, 320], "of": "length@*:cache.prompt_tokens"})";
  const Folder folder;
  folder.file("x.json",
              document(figure("null", never, R"("expect": {"above": 0})") + "," + figure("null", other_way)));
  const json rows = report_of(folder)["rows"];
  EXPECT_TRUE(rows[0]["simulated"].is_null());
  EXPECT_EQ(rows[0]["judgement"], "off");
  EXPECT_TRUE(rows[1]["simulated"].is_null());
  EXPECT_EQ(rows[1]["judgement"], "none");
}

TEST(Published, JudgesByToleranceOrBySign) {
  const struct {
    std::string figure, judgement;
  } cases[] = {
      {figure("100", "109.9"), "within"},  // 10 % unless the figure says otherwise
      {figure("100", "110.1"), "off"},
      {figure("100", "90.1"), "within"},
      {figure("100", "89.9"), "off"},
      {figure("-100", "-109"), "within"},
      {figure("100", "102", R"("tolerance": 0.01)"), "off"},
      {figure("100", "100", R"("tolerance": 0)"), "within"},
      {figure("100", "150", R"("expect": {"above": 1})"), "within"},
      {figure("100", "100", R"("expect": {"above": 100})"), "off"},
      {figure("100", "150", R"("expect": {"above": 1, "below": 140})"), "off"},
      {figure(R"({"min": 2, "max": 3})", "3.2"), "within"},
      {figure(R"({"min": 2, "max": 3})", "3.4"), "off"},
      {figure(R"({"min": 2})", "1.7"), "off"},
      {figure("null", "7"), "none"},
      {figure("7", "null"), "none"},
      {figure("100", "500", R"("specified": false)"), "none"},
      {figure("100", "500", R"("specified": false, "tolerance": 0.1)"), "off"},
  };
  std::string figures;
  for (const auto& c : cases) figures += (figures.empty() ? "" : ",\n") + c.figure;
  const Folder folder;
  folder.file("x.jsonc", document(figures));
  const json report = report_of(folder);
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    EXPECT_EQ(report["rows"][i]["judgement"], cases[i].judgement) << cases[i].figure;
  }
  EXPECT_DOUBLE_EQ(report["rows"][1]["error"].get<double>(), 110.1 / 100 - 1);
  const json& verdict = report["verdict"];
  EXPECT_EQ(verdict["figures"], 11);
  EXPECT_EQ(verdict["figures_within"], 5);
  EXPECT_EQ(verdict["relations"], 3);
  EXPECT_EQ(verdict["relations_hold"], 1);
  EXPECT_EQ(verdict["not_judged"], 3);
}

TEST(Published, ForMakesOneRowForEachValue) {
  const Folder folder;
  folder.file("x.json",
              document(R"({"metric": "{} tokens", "unit": "", "for": [160, 320], "labels": ["few", "many"],
      "published": [640, 1280], "tolerance": 0, "simulated": "length@*:cache.prompt_tokens"})"));
  const json rows = report_of(folder)["rows"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["metric"], "few tokens");
  EXPECT_EQ(rows[1]["metric"], "many tokens");
  EXPECT_EQ(rows[0]["judgement"], "within");
  EXPECT_EQ(rows[1]["published"], 1280);
  EXPECT_EQ(rows[1]["judgement"], "within");
}

// The verdict turns the exit status only when that was asked for.
TEST(Published, FailsOnRegressionOnlyWhenAsked) {
  const Folder good, bad;
  good.file("x.json", document(figure("100", "100")));
  bad.file("x.json", document(figure("100", "120")));
  for (const char* options : {"", "--json"}) {
    EXPECT_EQ(run("validate published '" + (good / "") + "' --fail-on regression " + options).status, 0);
    EXPECT_EQ(run("validate published '" + (bad / "") + "' " + options).status, 0);
    EXPECT_EQ(run("validate published '" + (bad / "") + "' --fail-on regression " + options).status, 4);
  }
  EXPECT_NE(run("validate published '" + (bad / "x.json") + "'").out.find("OFF"), std::string::npos);
}

TEST(Published, TheSameBytesWhateverTheJobs) {
  const Folder folder;
  folder.file("b.json", document(figure("1", R"("pushed:latency_ms.ttft.mean")"), kRuns, "second"));
  folder.file("a.json", document(R"({"metric": "{}", "published": null, "for": [160, 320, 640],
      "simulated": "length@*:latency_ms.ttft.mean"})",
                                 kRuns, "first"));
  const std::string all = "validate published '" + (folder / "") + "' --json --jobs ";
  const std::string one = run(all + "1").out;
  EXPECT_EQ(one, run(all + "3").out);
  const json report = json::parse(one);
  EXPECT_EQ(report["schema"], "pdsim.published-report/1");
  ASSERT_EQ(report["rows"].size(), 4u);
  EXPECT_EQ(report["rows"][0]["name"], "first");  // by file name
  EXPECT_EQ(report["rows"][3]["name"], "second");
  EXPECT_EQ(report_of(folder, "--only second")["rows"].size(), 1u);
}

// What the runs are: exactly what replay does with that scenario and those --sets.
TEST(Published, ARunIsAReplay) {
  const Folder folder;
  folder.file("x.json", document(figure("1", R"("pushed:latency_ms.e2e.mean")")));
  const json file = json::parse(bytes_of(folder / "x.json"), nullptr, true, true);
  const Folder apart;
  const std::string scenario = apart.file("s.json", file["runs"]["a"]["scenario"].dump());
  const Ran ran = run("replay '" + scenario + "' --quiet --json --set transfer.mode=push");
  EXPECT_EQ(report_of(folder)["rows"][0]["simulated"], json::parse(ran.out)["latency_ms"]["e2e"]["mean"]);
}

// Closed sessions on a generated trace, whose knobs can be set and varied like the scenario's values.
TEST(Published, TracesAreGeneratedFromKnobs) {
  const Folder folder;
  folder.file("x.json", document(figure("null", R"("talk@100:requests.completed")") + "," +
                                     figure("null", R"("talk@900:cache.prompt_tokens")"),
                                 R"("talk": {"scenario": {"model": "llama-3.1-8b",
            "pools": [{"role": "colocated", "instance": "p5en.48xlarge"}], "workload": {"sessions": "closed"}},
          "generate": {"requests": 1, "multi_turn_share": 1, "system_prompts": 0, "first_message": {"mean": 5}},
          "set": {"generate.requests": 12},
          "vary": {"paths": ["generate.first_message.mean"], "values": [100, 900]}})"));
  const json rows = report_of(folder)["rows"];
  EXPECT_EQ(rows[0]["simulated"], 12);
  EXPECT_GE(rows[1]["simulated"], 12 * 900);
}

TEST(Published, WhatIsWrongIsOneLineAndStatus2) {
  const std::string a = R"("a": {"scenario": {"model": "llama-3.1-8b", "pools": [{"role": "colocated",
    "instance": "p5en.48xlarge"}], "workload": {"synthetic": {"requests": 1, "concurrency": 1, "isl": 9, "osl": 2}}}})";
  const auto one = [&](const std::string& simulated, const std::string& more = "") {
    return document(figure("1", simulated, more), a);
  };
  const struct {
    std::string text, expected;
  } cases[] = {
      {"{\"schema\": ", "x.json:1: is not valid JSON"},
      {document(figure("1", "1"), a + "," + a), "'a' is given twice"},
      {R"({"schema": "pdsim.published/2"})", "x.json: /schema: is \"pdsim.published/2\""},
      {R"({"schema": "pdsim.published/1", "nam": "x"})",
       "x.json: /nam: is no key here (did you mean 'name'?)"},
      {document("", R"("a": {})"), "/runs/a: expected either a scenario or the run that it is based on"},
      {document("", R"("a": {"base": "b"}, "b": {"base": "a"})"), "is based on itself"},
      {document("", R"("a@1": {"base": "b"})"), "expected none of them"},
      {document("", R"("aa": {"base": "ab"}, "b": {"scenario": {}})"), "/runs/aa/base: there is no run 'ab'"},
      {document("", a + R"(, "b": {"base": "a", "vary": {"paths": [], "values": [1]}})"),
       "/runs/b/vary/paths"},
      {one("true"), "/figures/0/simulated: is true, expected a number"},
      {one(R"("a")"), "/figures/0/simulated: is 'a', expected \"run:path"},
      {one(R"("b:latency_ms.ttft.mean")"), "/figures/0/simulated: there is no run 'b'"},
      {one(R"("a:latency_ms.tft.mean")"), "a:latency_ms has no 'tft' (did you mean 'ttft'?)"},
      {one(R"("a:latency_ms.ttft")"), "a:latency_ms.ttft is object, expected a number"},
      {one(R"({"op": "^", "args": [1, 2]})"), "/figures/0/simulated/op: is \"^\": expected one of +, -"},
      {one(R"({"op": "+", "args": [1]})"), "two expressions at least"},
      {one(R"({"op": "crosses", "level": 1, "over": [1], "of": 1, "way": "out"})"), "up, down or either"},
      {one("1", R"("tolerance": -1)"), "/figures/0/tolerance"},
      {one("1", R"("expect": {})"), "/figures/0/expect"},
      {one("1", R"("labels": ["x"])"), "/figures/0/labels"},
      {document(figure("[1, 2]", "1", R"("for": [1, 2, 3])"), a), "one for each of the 3 values"},
      {document(R"({"metric": "m", "simulated": 1})", a), "/figures/0/published"},
      {document(figure("1", R"("b:seed")"),
                a + R"(, "b": {"base": "a", "set": {"pools.0.tensor_paralel": 2}})"),
       "/runs/b: --set: /pools/0/tensor_paralel: unknown key (did you mean"},
      {document(figure("1", R"("b:seed")"), a + R"(, "b": {"base": "a", "set": {"model": "llama-3.1-70b"}})"),
       "/runs/b: scenario: /pools/0: "},
      {document(figure("1", R"("b:seed")"), a + R"(, "b": {"base": "a", "generate": {"request": 3}})"),
       "/runs/b: generate: /request: is no key here (did you mean 'requests'?)"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.expected);
    const Folder folder;
    folder.file("x.json", c.text);
    const Ran ran = run("validate published '" + (folder / "") + "' --quiet");
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find("x.json"), std::string::npos) << ran.err;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << ran.err;
  }
  const Folder folder;
  folder.file("x.json", one("1"));
  folder.file("y.json", one("1"));
  EXPECT_NE(run("validate published '" + (folder / "") + "'").err.find("y.json: /name: 'test' is another"),
            std::string::npos);
  EXPECT_NE(
      run("validate published '" + (folder / "x.json") + "' --only tset").err.find("did you mean 'test'?"),
      std::string::npos);
  EXPECT_EQ(run("validate published '" + (folder / "none") + "'").status, 2);
  const Folder empty;
  EXPECT_NE(run("validate published '" + (empty / "") + "'").err.find("holds no published results"),
            std::string::npos);
}

TEST(Published, ItsSchemasAreShipped) {
  for (const char* name : {"published", "published-report"}) {
    const Ran ran = run(std::string("schema ") + name);
    EXPECT_EQ(ran.status, 0) << ran.err;
    EXPECT_EQ(json::parse(ran.out)["$id"], std::string("pdsim.") + name + "/1");
  }
}

TEST(Published, WhereNothingCompletesTheStatusIs3) {
  const Folder folder;
  folder.file("x.json",
              document(figure("1", R"("a:seed")"), R"("a": {"scenario": {"model": "llama-3.1-8b", "pools": [
      {"role": "colocated", "instance": "p5en.48xlarge", "engine": {"max_model_len": 10}}],
      "workload": {"synthetic": {"requests": 1, "concurrency": 1, "isl": 90, "osl": 2}}}})"));
  const Ran ran = run("validate published '" + (folder / "") + "' --quiet");
  EXPECT_EQ(ran.status, 3);
  EXPECT_NE(ran.err.find("/runs/a: no request completed"), std::string::npos) << ran.err;
}

// All shipped files are read, and their scenarios with them, whichever are replayed. These are the quick
// ones.
TEST(Published, TheShippedResultsHold) {
  const Ran ran = run("validate published " + kShipped +
                      " --quiet --json --fail-on regression --only posting --only p5en-curves --only "
                      "mooncake-1p1d --only recompute-threshold");
  EXPECT_EQ(ran.status, 0) << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["verdict"]["figures_within"], report["verdict"]["figures"]);
  EXPECT_EQ(report["verdict"]["figures"], 4 + 12 + 18);
  EXPECT_EQ(report["verdict"]["relations_hold"], 4);
  for (const json& row : report["rows"]) {
    for (const char* key : {"name", "metric", "unit", "published", "simulated", "specified", "source"}) {
      EXPECT_TRUE(row.contains(key)) << key;
    }
    EXPECT_FALSE(row["source"].get<std::string>().empty());
  }
}

}  // namespace
}  // namespace pdsim
