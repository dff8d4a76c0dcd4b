// Theory: compare ends with the status that the contract gives, writes what replay would beside the
// comparison, and on bad input writes nothing.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kQuickstart = "'" PDSIM_SOURCE_DIR "/scenarios/quickstart.json'";
const std::string kSynthetic =
    " --set 'workload={\"synthetic\": {\"requests\": 20, \"rate\": 10, \"isl\": 900, \"osl\": 20}}'";

TEST(Compare, WhatCannotWorkIsOneLineAndStatus2) {
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"", "compare: has nothing to compare, expected two scenarios or more, or --matrix SCENARIO"},
      {kQuickstart, "compare: has one run to compare"},
      {kQuickstart + " nosuch.json", "nosuch.json: cannot be read"},
      {kQuickstart + " " + kQuickstart + " --baseline quickstrat", "(did you mean 'quickstart'?)"},
      {kQuickstart + " " + kQuickstart + " --objective godput", "(did you mean 'goodput'?)"},
      {kQuickstart + " " + kQuickstart + " --objective min:cache.hits", "--objective: cache has no 'hits'"},
      {kQuickstart + " " + kQuickstart + " --allow nothing", "--allow: 'nothing'"},
      {kQuickstart + " " + kQuickstart + " --fail-on slow", "--fail-on"},
      {kQuickstart + " " + kQuickstart + " --fail-on slo --set slo={}", "--fail-on: is slo, but"},
      {kQuickstart + " " + kQuickstart + " --replications 0", "--replications"},
      {kQuickstart + " " + kQuickstart + " --modes pull", "--modes: says which variants"},
      {"--matrix " + kQuickstart + " --modes pul", "(did you mean 'pull'?)"},
      {"- -", "stands for stdin more than once"},
  };
  for (const auto& [arguments, expected] : cases) {
    SCOPED_TRACE(arguments);
    const Folder folder;
    const Ran ran = run(folder, "compare " + arguments + " --quiet --out made" +
                                    (arguments.find("slo={}") == std::string::npos ? kSynthetic : ""));
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), 0u);
  }
}

TEST(Compare, WritesWhatReplayWouldBesideIt) {
  const Folder folder;
  const Ran ran = run(folder, "compare --quiet --json --out made --matrix " + kQuickstart + kSynthetic);
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  const json document = json::parse(ran.out);
  EXPECT_EQ(ran.out, bytes_of(folder / "made/comparison.json"));
  ASSERT_EQ(document["runs"].size(), 4u);
  for (const json& of : document["runs"]) {
    const std::string made = folder / ("made/" + of["scenario"].get<std::string>());
    EXPECT_EQ(json::parse(bytes_of(made + "/summary.json")), of["summary"]);
    // What is written replays to the same bytes.
    const Ran again = run(folder, "replay --quiet --json '" + made + "/scenario.json'");
    json before = of["summary"], after = json::parse(again.out);
    before.erase("inputs"), after.erase("inputs");
    EXPECT_EQ(before, after);
    EXPECT_TRUE(std::filesystem::exists(made + "/requests.csv"));
  }
  EXPECT_TRUE(bytes_of(folder / "made/differences.csv").starts_with("request_id,colocated:ttft_ns,"));
  const Ran table = run(folder, "compare --quiet --jobs 2 --matrix " + kQuickstart + kSynthetic);
  EXPECT_EQ(table.status, 0);
  EXPECT_NE(table.out.find("equal spend"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("\nverdict "), std::string::npos) << table.out;
}

TEST(Compare, FailsOnASloAndOnARegression) {
  const Folder folder;
  const std::string strict = " --set 'slo={\"ttft_ms\": 1}'" + kSynthetic,
                    both = kQuickstart + " " + kQuickstart;
  const Ran missed = run(folder, "compare --quiet --fail-on slo " + both + strict);
  EXPECT_EQ(missed.status, 4);
  EXPECT_NE(missed.err.find("misses its SLO: ttft_ms p95 is "), std::string::npos) << missed.err;
  EXPECT_NE(missed.out.find("\nverdict "), std::string::npos);
  EXPECT_EQ(run(folder, "compare --quiet " + both + strict).status, 0);
  EXPECT_EQ(run(folder, "compare --quiet --fail-on slo,regression " + both + kSynthetic +
                            " --set 'slo={\"ttft_ms\": 60000}'")
                .status,
            0);

  const std::string pools = R"("model": "llama-3.1-8b", "workload": {"synthetic": {"requests": 20, "rate": 10,
      "isl": 900, "osl": 20}}, "slo": {"ttft_ms": 60000}, "pools": [{"role": "colocated",
      "instance": "p5en.48xlarge", "replicas": )";
  folder.file("small.json", R"({"name": "small", )" + pools + "1}]}");
  folder.file("large.json", R"({"name": "large", )" + pools + "32}]}");
  const Ran worse = run(folder, "compare --quiet --fail-on regression small.json large.json");
  EXPECT_EQ(worse.status, 4);
  EXPECT_NE(worse.err.find("--fail-on regression: small is "), std::string::npos) << worse.err;
  EXPECT_EQ(run(folder, "compare --quiet --fail-on regression large.json small.json").status, 0);
}

TEST(Compare, AStalledReplicationIsStatus3) {
  const Folder folder;
  folder.file("push.json", R"({"name": "push", "model": "llama-3.1-8b", "transfer": {"mode": "push"},
      "pools": [{"role": "prefill", "instance": "p5en.48xlarge"}, {"role": "decode", "instance": "p5en.48xlarge"}],
      "faults": [{"kind": "message_lost", "at_s": 0, "target": "completion"}]})");
  const Ran ran = run(folder, "compare --quiet --replications 2 push.json push.json" + kSynthetic);
  EXPECT_EQ(ran.status, 3);
  EXPECT_NE(ran.err.find("pdsim: replication 2 of 'push' stalled"), std::string::npos) << ran.err;
}

TEST(Replay, FailsOnAMissedSlo) {
  const Folder folder;
  const std::string base = "replay --quiet --json " + kQuickstart + kSynthetic;
  const Ran plain = run(folder, base + " --set 'slo={\"ttft_ms\": 1}'");
  EXPECT_EQ(plain.status, 0);
  const Ran missed = run(folder, base + " --set 'slo={\"ttft_ms\": 1}' --fail-on slo");
  EXPECT_EQ(missed.status, 4);
  EXPECT_EQ(missed.out, plain.out);
  EXPECT_NE(missed.err.find("--fail-on slo: ttft_ms p95 is "), std::string::npos) << missed.err;
  EXPECT_EQ(run(folder, base + " --set 'slo={\"ttft_ms\": 60000}' --fail-on slo").status, 0);
  EXPECT_EQ(run(folder, base + " --set slo={} --fail-on slo").status, 2);
  EXPECT_EQ(run(folder, base + " --fail-on regression").status, 2);
}

}  // namespace
}  // namespace pdsim
