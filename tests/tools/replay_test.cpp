// Theory: replay ends with the status that the contract gives; whatever it refuses is one line that names the
// place, the value and what was expected, and leaves nothing behind; what it writes appears together.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kQuickstart = "'" PDSIM_SOURCE_DIR "/scenarios/quickstart.json'";

TEST(Replay, WhatCannotWorkIsOneLineAndStatus2) {
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"nosuch.json", "nosuch.json: cannot be read"},
      {kQuickstart + " --trace nosuch.jsonl", "nosuch.jsonl: "},
      {kQuickstart + " --set pools.decode.engine.max_num_seq=4", "did you mean 'max_num_seqs'?"},
      {kQuickstart + " --set transfer.kv_lease_duration_s=30s", "expected a number of seconds"},
      {kQuickstart + " --set transfer.kv_lease_duration_s=-3", "/transfer/kv_lease_duration_s: is -3"},
      {kQuickstart + " --set model=llama-3.1-70b", "the weights of llama-3.1-70b do not fit"},
      {kQuickstart + " --set pools.decode.tensor_parallel=3", "32 attention heads"},
      {kQuickstart + " --set pools.decode.role=prefill", "no decode pool"},
      {kQuickstart + " --set router.policy=round-robin", "round_robin"},
      {kQuickstart + " --set transfer.mode=push --set transfer.bidirectional=true", "vllm#46473"},
      {kQuickstart + " --set transfer.mode=pushed", "did you mean 'push'?"},
      {kQuickstart + " --set transfer.seed_first_token=true", "is not simulated yet"},
      {kQuickstart + R"( --set 'faults=[{"kind":"backend_tcp","at_s":1}]')", "is not simulated yet"},
      {kQuickstart + " --set transfer.num_threads=8", "is not simulated yet"},
      {kQuickstart + " --set pools.0.engine.block_size=1024 --set pools.1.engine.block_size=1024",
       "expected a divisor of the 512 tokens"},
      {kQuickstart + " --set pools.0.engine.num_gpu_blocks_override=1", "no room for KV cache"},
      {kQuickstart + " --set workload.time_scale=0", "/workload/time_scale"},
      {kQuickstart + " --jsn", "did you mean '--json'?"},
      {kQuickstart + " --prices nosuch.json", "nosuch.json: cannot be read"},
      {"- --trace -", "stdin more than once"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const Folder folder;
    const Ran ran = run(folder, "replay " + c.arguments + " --quiet --out results");
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_TRUE(ran.err.starts_with("pdsim: ")) << ran.err;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), 0u);
  }
}

// A result's name that is taken by a folder is noticed before anything is simulated, and nothing is written.
TEST(Replay, ResultsAppearTogetherOrNotAtAll) {
  const Folder folder;
  std::filesystem::create_directories(folder / "results/requests.csv");
  const Ran refused = run(folder, "replay " + kQuickstart + " --quiet --out results");
  EXPECT_EQ(refused.status, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "results"), {}), 1);
  std::filesystem::remove(folder / "results/requests.csv");
  const Ran ran = run(folder, "replay " + kQuickstart + " --quiet --out results");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  for (const char* name : {"summary.json", "requests.csv", "blocks.csv", "scenario.json", "run.json"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / (std::string("results/") + name))) << name;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "results"), {}), 5);
}

std::vector<std::vector<std::string>> table_of(const std::string& csv) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream in(csv);
  for (std::string line; std::getline(in, line);) {
    std::istringstream cells(line + ",");
    rows.emplace_back();
    for (std::string cell; std::getline(cells, cell, ',');) rows.back().push_back(cell);
  }
  return rows;
}

const std::string kMultiTurn =
    " --format mooncake --trace '" PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl'";

// One setting is all that it takes to compare modes. Each says what it is, and whether a release has it.
TEST(Replay, EveryModeIsOneSettingAway) {
  const struct {
    const char* mode;
    bool unreleased;
  } cases[] = {{"pull", false}, {"push", false}, {"push_layerwise", true}, {"push_progressive", true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.mode);
    const Folder folder;
    const Ran ran = run(folder, "replay " + kQuickstart + " --quiet --out o --set transfer.mode=" + c.mode);
    ASSERT_EQ(ran.status, 0) << ran.err;
    const json s = json::parse(bytes_of(folder / "o/summary.json"));
    EXPECT_EQ(s["transfers"]["mode"], c.mode);
    EXPECT_EQ(s["releases"]["unreleased"], c.unreleased);
    EXPECT_EQ(ran.out.find("\nunreleased ") != std::string::npos, c.unreleased);
    EXPECT_NE(ran.out.find(std::string(" by ") + c.mode + ", "), std::string::npos);
    EXPECT_FALSE(s.contains("retention") || s.contains("hypothetical"));
    std::istringstream lines(ran.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110u) << line;
    // Every hand-over has an end, and a request's time before its first token is somebody's.
    std::int64_t ends = 0;
    for (const auto& [outcome, n] : s["transfers"]["by_outcome"].items()) ends += n.get<std::int64_t>();
    EXPECT_EQ(ends, 500);
    double waited = s["waited_for"]["others"]["ms"], stages = 0;
    for (const json& row : s["waited_for"]["rows"]) waited += row["ms"].get<double>();
    for (const auto& [stage, d] : s["stages_ms"].items()) {
      if (stage != "decode" && stage != "router") stages += d["mean"].get<double>() * d["n"].get<double>();
    }
    EXPECT_NEAR(waited, stages, 1e-3);
  }
}

// blocks.csv integrates to what summary.json says of the run, and never holds more than there is.
TEST(Replay, BlocksOverTimeAreThoseOfTheSummary) {
  const Folder folder;
  const Ran ran = run(
      folder, "replay " + kQuickstart + kMultiTurn + " --quiet --out o --set transfer.bidirectional=true");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json s = json::parse(bytes_of(folder / "o/summary.json"));
  const auto rows = table_of(bytes_of(folder / "o/blocks.csv"));
  const double end = s["simulated_s"], width = std::stod(rows[3][0]);
  ASSERT_EQ(rows[0].size(), 7u);
  for (const char* side : {"prefill", "decode"}) {
    double integral[4] = {}, most[4] = {};
    for (std::size_t i = 1; i < rows.size(); ++i) {
      const auto& row = rows[i];
      if (row[1] != side) continue;
      const double length = std::min(width, end - std::stod(row[0]));
      for (std::size_t c = 0; c < 4; ++c) {
        integral[c] += std::stod(row[2 + c]) * length;
        most[c] = std::max(most[c], std::stod(row[2 + c]));
      }
      EXPECT_LE(std::stod(row[6]), s["blocks_held"][side]["capacity"].get<double>());
    }
    const char* causes[] = {"running", "in_transfer", "leased", "pinned"};
    for (std::size_t c = 0; c < 4; ++c) {
      EXPECT_NEAR(integral[c] / end, s["blocks_held"][side][causes[c]]["mean"].get<double>(), 0.001)
          << side << causes[c];
      EXPECT_NEAR(most[c], s["blocks_held"][side][causes[c]]["max"].get<double>(), 0.001);
    }
  }
  EXPECT_GT(s["blocks_held"]["decode"]["pinned"]["mean"].get<double>(), 0);
  EXPECT_EQ(s["blocks_held"]["prefill"]["pinned"]["max"], 0.0);
}

// The rows of requests add up to the totals; a decision is there when something was retained.
TEST(Replay, WhatWasReadBackIsInEveryOutput) {
  const Folder folder;
  const Ran ran = run(
      folder, "replay " + kQuickstart + kMultiTurn + " --quiet --out o --set transfer.bidirectional=true");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json s = json::parse(bytes_of(folder / "o/summary.json"));
  const auto rows = table_of(bytes_of(folder / "o/requests.csv"));
  const std::size_t last = rows[0].size() - 1;
  EXPECT_EQ(rows[0][last - 2], "read_back_bytes");
  const auto took =
      static_cast<std::size_t>(std::ranges::find(rows[0], "reuse_transfer_ns") - rows[0].begin());
  std::int64_t bytes = 0, decisions = 0, tokens = 0, lost = 0;
  for (std::size_t i = 1; i < rows.size(); ++i) {
    bytes += std::stoll(rows[i][last - 2]);
    tokens += std::stoll(rows[i][11]);
    if (rows[i][last].empty()) continue;
    ++decisions;
    // A read costs what it took, what was not read what computing it was predicted to.
    const std::int64_t compute = std::stoll(rows[i][last]);
    const bool read = rows[i][18].starts_with("hit");
    const std::int64_t excess =
        read ? std::stoll(rows[i][took]) - compute : compute - std::stoll(rows[i][last - 1]);
    lost += excess > 0 ? 1 : 0;
  }
  EXPECT_EQ(s["transfers"]["read_back"]["bytes"], bytes);
  EXPECT_EQ(s["retention"]["hit_tokens"], tokens);
  EXPECT_EQ(s["reuse_decisions"]["n"], decisions);
  EXPECT_EQ(s["reuse_decisions"]["regret_ms"]["n"], lost);
  EXPECT_GT(decisions, 100);
  const json& r = s["retention"];
  EXPECT_EQ(r["pins"].get<int>(), r["read"].get<int>() + r["notified"].get<int>() + r["expired"].get<int>() +
                                      r["let_go"].get<int>() + r["outstanding"].get<int>());
  EXPECT_NE(ran.out.find("\nreuse  "), std::string::npos);
  EXPECT_NE(ran.out.find("\nretention           ttl: "), std::string::npos);
}

TEST(Replay, WhatNoEngineCombinesIsCalledHypothetical) {
  const Folder folder;
  const std::string both = "replay " + kQuickstart + kMultiTurn +
                           " --quiet --set transfer.bidirectional=true --set transfer.mode=push --set "
                           "transfer.hypothetical=true";
  EXPECT_EQ(json::parse(run(folder, both + " --json").out)["hypothetical"], true);
  EXPECT_NE(run(folder, both + " --out results").out.find("\nhypothetical  "), std::string::npos);
  for (const char* name : {"summary.json", "run.json"}) {
    EXPECT_EQ(json::parse(bytes_of(folder / (std::string("results/") + name)))["hypothetical"], true) << name;
  }
  for (const char* name : {"requests.csv", "blocks.csv"}) {
    std::istringstream rows(bytes_of(folder / (std::string("results/") + name)));
    std::string row;
    ASSERT_TRUE(std::getline(rows, row)) << name;
    EXPECT_TRUE(row.ends_with(",hypothetical")) << row;
    while (std::getline(rows, row)) EXPECT_TRUE(row.ends_with(",1")) << row;
  }
}

TEST(Replay, WhereNothingCompletesTheStatusIs3AndSaysWhy) {
  const Folder folder;
  const Ran ran = run(folder, "replay " + kQuickstart +
                                  " --quiet --json --set pools.0.engine.max_model_len=100 --set "
                                  "pools.1.engine.max_model_len=100");
  EXPECT_EQ(ran.status, 3);
  EXPECT_EQ(ran.err, "pdsim: no request completed: 500 exceeds_max_model_len\n");
  const json summary = json::parse(ran.out);
  EXPECT_EQ(summary["requests"]["rejected"], 500);
  EXPECT_EQ(summary["requests"]["by_reason"]["exceeds_max_model_len"], 500);
}

// Ctrl-C: what is done so far, marked so.
TEST(Replay, AnInterruptedRunKeepsWhatIsDone) {
  const Folder folder;
  folder.file("s.json", R"({"model": "llama-3.1-8b", "pools": [{"role": "colocated", "replicas": 8,
    "instance": "p5en.48xlarge"}], "workload": {"synthetic": {"requests": 400000, "rate": 1, "isl": 600, "osl": 2000}}})");
  const Ran ran = run(folder, "replay s.json --quiet --json --out results", interrupted_after("3"));
  EXPECT_EQ(ran.status, 130) << ran.err;
  const json summary = json::parse(ran.out);
  EXPECT_EQ(summary["status"], "interrupted");
  EXPECT_EQ(json::parse(bytes_of(folder / "results/summary.json")), summary);
  const json& requests = summary["requests"];
  EXPECT_EQ(requests["injected"].get<int>(),
            requests["completed"].get<int>() + requests["in_flight"].get<int>());
}

}  // namespace
}  // namespace pdsim
