// Theory: replay ends with the status that the contract gives; whatever it refuses is one line that names the
// place, the value and what was expected, and leaves nothing behind; what it writes appears together.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kQuickstart = "'" PDSIM_SOURCE_DIR "/scenarios/quickstart.json'";

struct Ran {
  int status = -1;
  std::string out, err;
};

// Runs "pdsim ARGUMENTS" through a shell in `folder`, which `before` may do something to.
Ran run(const Folder& folder, const std::string& arguments, const std::string& before = "") {
  const Folder apart;
  const std::string command = "cd '" + (folder / "") + "' && " + before + " '" PDSIM_BINARY "' " + arguments +
                              " >'" + (apart / "out") + "' 2>'" + (apart / "err") + "' </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, bytes_of(apart / "out"), bytes_of(apart / "err")};
}

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
      {kQuickstart + " --set transfer.mode=push", "is not simulated yet"},
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
  for (const char* name : {"summary.json", "requests.csv", "scenario.json", "run.json"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / (std::string("results/") + name))) << name;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "results"), {}), 4);
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
  const Ran ran = run(folder, "replay s.json --quiet --json --out results",
                      "timeout --foreground --preserve-status -s INT 3");
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
