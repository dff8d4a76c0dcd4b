// Theory: describe says before a run what a replay then does. Its figures are those of the model's own
// config worked out by hand, and those that a replay of one request measures; the scenario that it prints
// is the one in force, whatever spelling and defaults it came from.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"
#include "tests/traces/schema.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

const std::string kScenarios = PDSIM_SOURCE_DIR "/scenarios/";
const std::string kPair = kScenarios + "p5en-1p1d-qwen3-32b.json";
// Both of its workers on one node.
const std::string kOneNode = R"( --set 'placement=[{"pool":"prefill","replica":0,"node":0,"gpus":[0,1,2,3]},)"
                             R"({"pool":"decode","replica":0,"node":0,"gpus":[4,5,6,7]}]')";
constexpr double kGiB = 1024.0 * 1024 * 1024;

ordered_json described(const std::string& arguments) {
  const Ran ran = run("describe --json " + arguments);
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  return ordered_json::parse(ran.out);
}

std::vector<std::string> shipped() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(kScenarios)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".json") && !name.ends_with("schema.json")) paths.push_back(entry.path().string());
  }
  std::ranges::sort(paths);
  return paths;
}

// Qwen3-32B (Hugging Face config.json): hidden 5120, 64 layers, 64 heads and 8 KV heads of 128, feed-forward
// 25600, vocabulary 151936 untied, bf16. A layer has 5120 x 8192 (q), 2 x 5120 x 1024 (k, v), 8192 x 5120
// (o), 3 x 5120 x 25600 (gate, up, down) weights, norms of 2 x 5120 and, per head, 2 x 128.
constexpr std::int64_t kMatrices = 2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600;
constexpr std::int64_t kNorms = 2 * 5120 + 2 * 128;
constexpr std::int64_t kEmbedding = 151'936LL * 5120;

TEST(Describe, FiguresOfAModelAreThoseOfItsConfig) {
  const ordered_json doc = described(kPair);
  const ordered_json& model = doc["model"];
  EXPECT_EQ(model["parameters"], 64 * (kMatrices + kNorms) + 2 * kEmbedding + 5120);
  EXPECT_EQ(model["active_parameters"], 64 * (kMatrices + kNorms) + kEmbedding + 5120);
  EXPECT_EQ(model["attention"]["full"]["layers"], 64);
  EXPECT_TRUE(model["experts"].is_null());

  const ordered_json& pool = doc["pools"][1];
  // TP4: each rank has a quarter of the matrices and of both embeddings, and all norms; 2 bytes each.
  const std::int64_t rank = 64 * (kMatrices / 4 + kNorms) + 2 * kEmbedding / 4 + 5120;
  EXPECT_EQ(pool["gpu_memory_bytes"]["weights"], 2 * rank);
  // K and V of 2 of the 8 heads: 2 x 64 layers x 2 x 128 x 2 bytes.
  EXPECT_EQ(pool["kv"]["bytes_per_token_per_gpu"], 65536);
  EXPECT_EQ(pool["kv"]["bytes_per_token_per_worker"], 4 * 65536);
  EXPECT_EQ(pool["kv"]["bytes_per_block_per_gpu"], 16 * 65536);
  EXPECT_EQ(pool["kv"]["regions_per_gpu"], 2 * 64);
  EXPECT_EQ(pool["kv"]["state_bytes_per_sequence"], 0);

  // H200: 143771 MiB, of which 0.92 may be used. Blocks are what fits, but for vLLM's null block.
  const ordered_json& memory = pool["gpu_memory_bytes"];
  EXPECT_EQ(memory["total"], 143'771LL << 20);
  EXPECT_EQ(memory["usable"], static_cast<std::int64_t>(static_cast<double>(143'771LL << 20) * 0.92));
  const double left = memory["usable"].get<double>() - memory["weights"].get<double>() -
                      memory["activations"].get<double>() - memory["per_sequence_state"].get<double>();
  const double blocks = std::floor(left / (16 * 65536)) - 1;
  EXPECT_EQ(pool["kv"]["blocks"], blocks);
  EXPECT_EQ(pool["kv"]["tokens"], 16 * blocks);
  EXPECT_EQ(pool["kv"]["longest_request"], 32768);
  EXPECT_NEAR(pool["kv"]["max_concurrency"].get<double>(), blocks / (32768 / 16), 1e-9);
  EXPECT_GT(left / kGiB, 100);  // 129 GiB less 15.3 of weights and some activations

  // What is read at least: the weights and the KV of 64 requests, at the data sheet's 4.8 TB/s.
  const ordered_json& steps = pool["steps"];
  const double bytes = 2.0 * static_cast<double>(rank - kEmbedding / 4) + 64.0 * 8192 * 65536;
  EXPECT_GT(steps["decode_64"]["us"].get<double>(), bytes / 4800e3);
  EXPECT_LT(steps["decode_64"]["us"].get<double>(), 2 * bytes / 4800e3);
  EXPECT_EQ(steps["decode_64"]["regime"], "bandwidth");
  EXPECT_EQ(steps["prefill"]["regime"], "compute");
  for (const auto& [name, step] : steps.items()) {
    double sum = 0;
    for (const ordered_json& op : step["operators"]) sum += op["us"].get<double>();
    EXPECT_NEAR(sum, step["us"].get<double>(), 0.002) << name;
  }
}

// One decode rank reads 512 blocks of 128 regions of 8 KiB from one prefill rank.
//   in one run     128 descriptors of 4 MiB: 71 + 128 x 2.43 us of posting; striped over two rails, 2 MiB
//   READs
//                  reach 303.78 of 400 GB/s, so 37.97 of a GPU's 50
//   no two blocks  65536 descriptors of 8 KiB: 97.11 GB/s / 64 KiB operations a second over 8 GPUs bind
TEST(Describe, HandOverByHand) {
  const ordered_json h = described(kPair)["hand_overs"][0];
  EXPECT_EQ(h["prompt_tokens"], 8192);
  EXPECT_EQ(h["blocks"], 512);
  EXPECT_EQ(h["bytes"], 4LL * 512 * 1024 * 1024);
  EXPECT_EQ(h["gpus"], 4);
  EXPECT_EQ(h["sources_per_gpu"], 1);
  EXPECT_EQ(h["blocks_merge"], true);

  const double rank_bytes = 512.0 * 1024 * 1024, latency = 2 * 17.3;  // the request's and the data's
  const ordered_json& one = h["one_run"];
  const double post = 71 + 128 * 2.43;
  EXPECT_EQ(one["descriptors_per_gpu"], 128);
  EXPECT_EQ(one["descriptor_bytes"], 4 << 20);
  EXPECT_EQ(one["wire_operation_bytes"], 2 << 20);
  EXPECT_NEAR(one["post_us"].get<double>(), post, 1e-6);
  EXPECT_NEAR(one["total_us"].get<double>(), 71 + rank_bytes / (50e3 * 303.78 / 400) + latency, 0.01);
  EXPECT_NEAR(one["wire_us"].get<double>(), one["total_us"].get<double>() - post, 1e-6);

  const ordered_json& apart = h["no_two_together"];
  EXPECT_EQ(apart["descriptors_per_gpu"], 128 * 512);
  EXPECT_EQ(apart["wire_operation_bytes"], 8192);
  EXPECT_NEAR(apart["post_us"].get<double>(), 71 + 65536 * 2.43, 1e-6);
  EXPECT_NEAR(apart["total_us"].get<double>(), 71 + rank_bytes / (97.11e3 / 65536 * 8192 / 8) + latency,
              0.01);
}

// A WRITE of the same 2 MiB operations reaches 366.87 of 400 GB/s, and its data need no request to travel
// first; prefill's own thread posts it. First contact: one handshake of 1 ms, and a descriptor prepared for
// each of 128 regions of each block of decode's pool.
TEST(Describe, APushByHand) {
  const ordered_json doc = described(kPair + " --set transfer.mode=push");
  const ordered_json& h = doc["hand_overs"][0];
  EXPECT_EQ(h["operation"], "write");
  EXPECT_EQ(h["posted_by"], "prefill");
  EXPECT_EQ(h["posted_on"], "its own thread");
  EXPECT_EQ(h["posting_gpus"], 4);
  EXPECT_EQ(h["remotes_per_gpu"], 1);
  EXPECT_EQ(h["contention"], 1.0);
  const ordered_json& one = h["one_run"];
  EXPECT_NEAR(one["post_us"].get<double>(), 71 + 128 * 2.43, 1e-6);
  EXPECT_NEAR(one["total_us"].get<double>(), 71 + 512.0 * 1024 * 1024 / (50e3 * 366.87 / 400) + 17.3, 0.01);
  EXPECT_NEAR(h["first_contact_ms"].get<double>(),
              1 + 128 * doc["pools"][1]["kv"]["blocks"].get<double>() * 225e-6, 1e-6);
  EXPECT_EQ(described(kPair + " --set transfer.warm_start=true")["hand_overs"][0]["first_contact_ms"], 0.0);
}

// Only a thread beside the forward thread has to share the CPU with it.
TEST(Describe, PostingOnAThreadOfItsOwn) {
  const ordered_json forward = described(kPair + " --set transfer.thread_contention=3")["hand_overs"][0];
  const ordered_json reader = described(kPair + " --set transfer.background_receiver=true")["hand_overs"][0];
  EXPECT_EQ(forward["posted_on"], "the forward thread");
  EXPECT_NEAR(forward["one_run"]["post_us"].get<double>(), 71 + 128 * 2.43, 1e-6);
  EXPECT_EQ(reader["posted_on"], "its own thread");
  EXPECT_NEAR(reader["one_run"]["post_us"].get<double>(), 1.8 * (71 + 128 * 2.43), 0.01);
}

// What a pair of pools says of its own is what its hand-over is planned with.
TEST(Describe, APairsOwnSettings) {
  const ordered_json h = described(
      kPair +
      R"( --set 'transfer.pairs=[{"from":"prefill","to":"decode","backend":"ucx"}]')")["hand_overs"][0];
  EXPECT_NEAR(h["one_run"]["post_us"].get<double>(), 128 * 3.75, 1e-6);
}

TEST(Describe, ReadsBackWhenBidirectional) {
  EXPECT_TRUE(described(kPair)["read_backs"].empty());
  const ordered_json doc = described(kPair + " --set transfer.bidirectional=true");
  ASSERT_EQ(doc["read_backs"].size(), 1u);
  const ordered_json& back = doc["read_backs"][0];
  EXPECT_EQ(back["from"], "decode");
  EXPECT_EQ(back["to"], "prefill");
  EXPECT_EQ(back["operation"], "read");
  EXPECT_EQ(back["posted_by"], "prefill");
  EXPECT_EQ(back["posted_on"], "the forward thread");
  EXPECT_EQ(back["one_run"], doc["hand_overs"][0]["one_run"]);  // both sides are alike
  EXPECT_FALSE(doc.contains("hypothetical"));
}

TEST(Describe, WhatNoEngineCombinesIsCalledHypothetical) {
  const std::string both = kPair +
                           " --set transfer.mode=push_layerwise --set transfer.bidirectional=true --set "
                           "transfer.hypothetical=true";
  const ordered_json doc = described(both);
  EXPECT_EQ(doc["hypothetical"], true);
  EXPECT_EQ(doc["hand_overs"][0]["operation"], "write");
  EXPECT_EQ(doc["read_backs"][0]["operation"], "read");
  EXPECT_EQ(doc["releases"]["unreleased"], true);
  const std::string text = run("describe " + both).out;
  for (const char* part :
       {"\n  Hypothetical: no engine", "\nRead back of 8,192 tokens, decode to prefill", "\n  written by",
        "\n  transfer.bidirectional with push                  no engine       vllm#46473",
        "\n  transfer.mode push_layerwise                      unreleased      vllm#56874\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
}

// A replay of one request of the described length measures what describe said.
TEST(Describe, AReplayDoesWhatWasDescribed) {
  for (const std::string& sets :
       {std::string(), kOneNode, std::string(" --set pools.decode.tensor_parallel=8"),
        std::string(" --set pools.decode.tensor_parallel=2"), std::string(" --set transfer.mode=push"),
        std::string(" --set transfer.mode=push --set pools.decode.tensor_parallel=8"),
        std::string(" --set transfer.mode=push --set pools.decode.tensor_parallel=2"),
        std::string(" --set transfer.background_receiver=true")}) {
    SCOPED_TRACE(sets);
    const std::string workload =
        R"( --set 'workload={"synthetic":{"requests":1,"concurrency":1,"isl":8192,"osl":1}}')";
    const ordered_json doc = described(kPair + sets + workload);
    const Ran ran = run("replay --json --quiet " + kPair + sets + workload);
    ASSERT_EQ(ran.status, 0) << ran.err;
    const ordered_json summary = ordered_json::parse(ran.out);
    const ordered_json &h = doc["hand_overs"][0], &pull = h["one_run"], &transfers = summary["transfers"];
    EXPECT_EQ(transfers["count"], 1);
    EXPECT_EQ(transfers["bytes"], h["bytes"]);
    EXPECT_EQ(transfers["descriptors"],
              pull["descriptors_per_gpu"].get<int>() * h["posting_gpus"].get<int>());
    EXPECT_NEAR(transfers["post_ms"]["mean"].get<double>(), pull["post_us"].get<double>() / 1e3, 1e-9);
    EXPECT_NEAR(transfers["wire_ms"]["mean"].get<double>(), pull["wire_us"].get<double>() / 1e3, 1e-9);
    EXPECT_EQ(summary["releases"], doc["releases"]);
    EXPECT_NEAR(summary["stages_ms"]["prefill"]["mean"].get<double>(),
                doc["pools"][0]["steps"]["prefill"]["us"].get<double>() / 1e3, 1e-9);
  }
}

// TP8 decode of 8 KV heads behind TP4 prefill: half the bytes a rank, the heads of a block apart.
TEST(Describe, UnequalSplitsOfHeadsDoNotMerge) {
  const ordered_json h = described(kPair + " --set pools.decode.tensor_parallel=8")["hand_overs"][0];
  EXPECT_EQ(h["gpus"], 8);
  EXPECT_EQ(h["bytes"], 4LL * 512 * 1024 * 1024);
  EXPECT_EQ(h["blocks_merge"], false);
  EXPECT_EQ(h["one_run"]["descriptors_per_gpu"], 128 * 512);
  EXPECT_EQ(h["one_run"]["descriptor_bytes"], 4096);
}

TEST(Describe, PlacementRoutesAndPrices) {
  const ordered_json two = described(kPair);
  EXPECT_EQ(two["placement"][1]["worker"], "decode-0");
  EXPECT_EQ(two["placement"][1]["nodes"], ordered_json::parse(R"([{"node":"node1","gpus":[0,1,2,3]}])"));
  EXPECT_EQ(two["routes"].size(), 1u);
  EXPECT_EQ(two["routes"][0]["fabric"], "efa-v3");
  EXPECT_EQ(two["routes"][0]["latency_us"], 17.3);
  EXPECT_EQ(two["prices"]["gpus"], 16);
  EXPECT_EQ(two["prices"]["gpus_held"], 8);
  EXPECT_NEAR(two["prices"]["usd_per_hour"].get<double>(), 2 * 63.296, 1e-9);
  EXPECT_NEAR(two["prices"]["usd_per_hour_held"].get<double>(), 63.296, 1e-9);
  EXPECT_EQ(two["prices"]["nodes"][0]["as_of"], "2026-08");
  std::int64_t efa = 0;
  for (const ordered_json& link : two["links"]) {
    if (link["class"] == "efa") efa += link["number"].get<int>();
  }
  EXPECT_EQ(efa, 16);  // a pool of rails for each GPU

  const ordered_json one = described(kPair + kOneNode);
  EXPECT_EQ(one["routes"][0]["transport"], "local");
  EXPECT_EQ(one["routes"][0]["fabric"], "nvlink");
  EXPECT_LT(one["hand_overs"][0]["one_run"]["total_us"].get<double>(),
            two["hand_overs"][0]["one_run"]["total_us"].get<double>() / 5);

  const ordered_json colocated = described(kScenarios + "p5en-colocated-qwen3-32b.json");
  EXPECT_TRUE(colocated["routes"].empty());
  EXPECT_TRUE(colocated["hand_overs"].empty());

  const ordered_json bare =
      described(kPair + " --set pools.0='{\"role\":\"prefill\",\"gpu\":\"h200\",\"tensor_parallel\":4}'");
  EXPECT_TRUE(bare["prices"]["usd_per_hour"].is_null());
  EXPECT_TRUE(bare["pools"][0]["instance"].is_null());
}

// Every leaf of the scenario in force says where it came from; a default that depends on the GPU or the
// model has its value.
TEST(Describe, OriginsCoverTheScenario) {
  const ordered_json doc =
      described(kScenarios + "quickstart.json --seed 7 --set pools.decode.engine.max_num_seqs=64");
  const ordered_json &scenario = doc["scenario"], &origins = doc["origins"];
  const ordered_json leaves = scenario.flatten();
  for (const auto& [pointer, value] : leaves.items()) {
    std::string at = pointer;
    while (!at.empty() && !origins.contains(at)) at.erase(at.rfind('/'));
    EXPECT_FALSE(at.empty()) << pointer;
  }
  for (const auto& [pointer, from] : origins.items()) {
    EXPECT_TRUE(scenario.contains(ordered_json::json_pointer(pointer))) << pointer;
  }
  EXPECT_EQ(scenario["pools"][0]["engine"]["max_num_seqs"], 1024);
  EXPECT_EQ(origins["/pools/0/engine/max_num_seqs"], "default: vLLM 0.24 on h200");
  EXPECT_EQ(scenario["pools"][0]["engine"]["max_num_batched_tokens"], 8192);
  EXPECT_EQ(scenario["pools"][0]["engine"]["max_model_len"], 131072);
  EXPECT_EQ(origins["/pools/0/engine/max_model_len"], "default: the model's max_position_embeddings");
  EXPECT_EQ(scenario["pools"][1]["engine"]["max_num_seqs"], 64);
  EXPECT_EQ(origins["/pools/1/engine/max_num_seqs"], "--set");
  EXPECT_EQ(origins["/model"], "scenario");
  EXPECT_EQ(scenario["seed"], 7);
  EXPECT_EQ(origins["/seed"], "--seed");
}

TEST(Describe, TheScenarioInForceDescribesItself) {
  const Folder folder;
  folder.file("prices.json", R"({"p5en.48xlarge": 41.5, "p4d.24xlarge": 3})");
  std::vector<std::string> cases = shipped();
  cases.push_back(kPair + " --set transfer.kv_lease_duration=12 --prices '" + folder / "prices.json'");
  cases.push_back(kPair + " --set pricing.plan='{\"usd_per_hour\":50}' --prices '" + folder / "prices.json'");
  for (const std::string& arguments : cases) {
    SCOPED_TRACE(arguments);
    ordered_json first = described(arguments);
    ordered_json second = described("- <'" + folder.file("again.json", first["scenario"].dump()) + "'");
    for (const auto& [pointer, from] : second["origins"].items()) EXPECT_EQ(from, "scenario") << pointer;
    if (arguments.find("--prices") != std::string::npos) {
      EXPECT_NEAR(first["prices"]["usd_per_hour"].get<double>(), 2 * 41.5, 1e-9);
    }
    first.erase("origins");
    second.erase("origins");
    EXPECT_EQ(first.dump(1), second.dump(1));
  }
}

TEST(Describe, TextIsForPeople) {
  std::vector<std::string> cases = shipped();
  for (std::string& path : cases) path = "'" + path + "'";
  cases.push_back(kPair +
                  " --set transfer.mode=push_progressive --set transfer.bidirectional=true --set "
                  "transfer.hypothetical=true --set transfer.thread_contention=1.5");
  for (const std::string& arguments : cases) {
    SCOPED_TRACE(arguments);
    const Ran ran = run("describe " + arguments);
    EXPECT_EQ(ran.status, 0);
    EXPECT_EQ(ran.err, "");
    std::istringstream lines(ran.out);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_FALSE(line.ends_with(' ')) << line;
      if (line.find(PDSIM_SOURCE_DIR) == std::string::npos) {
        EXPECT_LE(line.size(), 100u) << line;
      }
    }
  }
  const std::string text = run("describe '" + kPair + "'").out;
  for (const char* line : {
           "p5en-1p1d-qwen3-32b: qwen3-32b, 1 x prefill + 1 x decode, on 8 of 16 GPUs of 2 x p5en.48xlarge\n",
           "  parameters                32.76 B, of which a token meets 31.98 B\n",
           "  a token, on one GPU       64 KiB                  64 KiB\n",
           "  descriptors of a GPU      128                     65,536\n",
           "  node1                     decode-0[0-3]\n",
           "  in all                    126.59 USD an hour for 16 GPUs\n",
           "    max_model_len               32768                 scenario\n",
       }) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
}

TEST(Describe, WhatCannotWorkIsOneLineAndStatus2) {
  struct Refused {
    std::string arguments, expected;
  };
  const Refused cases[] = {
      {"none.json", "none.json: cannot be read: No such file or directory"},
      {kPair + " --set model=kimi-k2", "/pools/0: pool 'prefill': the weights of kimi-k2 do not fit"},
      {kPair + " --set pools.decode.tensor_parallel=3", "/pools/1: tensor_parallel is 3"},
      {kPair + " --set pools.decode.tensor_paralel=4",
       "--set: /pools/1/tensor_paralel: unknown key (did you mean"},
      {kPair + " --set pools.0.engine.max_model_len=99999",
       "/pools/0/engine/max_model_len: is 99999, expected at most"},
      {kPair + " --set pools.1.engine.gpu_memory_utilization=0.11", "has no room for KV cache"},
      {kPair + " --set pools.1.role=prefill", "there is no decode pool"},
      {kPair + " --prices none.json", "none.json: cannot be read"},
      {kPair + " --jsn", "(did you mean '--json'?)"},
  };
  for (const auto& [arguments, expected] : cases) {
    for (const char* json : {"", " --json"}) {
      SCOPED_TRACE(arguments + json);
      const Ran ran = run("describe " + arguments + json);
      EXPECT_EQ(ran.status, 2);
      EXPECT_EQ(ran.out, "");
      EXPECT_TRUE(ran.err.starts_with("pdsim: ")) << ran.err;
      EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1);
      EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
    }
  }
}

// A schema, what conforms to it, and what does not, for every keyword: a check that never fails checks
// nothing.
TEST(Schemas, EveryKeywordCanBeBroken) {
  const std::vector<std::string> rows[] = {
      {R"({"$ref": "#/definitions/n", "definitions": {"n": {"type": "number"}}})", "1", "true"},
      {R"({"const": "a"})", R"("a")", R"("b")"},
      {R"({"enum": [1, null]})", "null", "2"},
      {R"({"type": ["integer", "null"]})", "1", "1.5"},
      {R"({"type": "number"})", "1", R"("number")"},
      {R"({"minimum": 1})", "1", "0.5"},
      {R"({"exclusiveMinimum": 1})", "1.5", "1"},
      {R"({"maximum": 1})", "1", "2"},
      {R"({"minLength": 1})", R"("a")", R"("")"},
      {R"({"pattern": "^[a-z]+$"})", R"("a")", R"("a1")"},
      {R"({"minItems": 1})", "[1]", "[]"},
      {R"({"uniqueItems": true})", "[1, 2]", "[1, 2, 1]"},
      {R"({"items": {"type": "null"}})", "[null]", "[null, 1]"},
      {R"({"minProperties": 1})", R"({"a": 1})", "{}"},
      {R"({"required": ["a"]})", R"({"a": 1})", R"({"b": 1})"},
      {R"({"propertyNames": {"pattern": "^a"}})", R"({"a": 1})", R"({"b": 1})"},
      {R"({"properties": {"a": {"type": "null"}}})", R"({"a": null})", R"({"a": 1})"},
      {R"({"additionalProperties": {"type": "null"}})", R"({"a": null})", R"({"a": 1})"},
      {R"({"additionalProperties": false})", "{}", R"({"a": 1})"},
      {R"({"anyOf": [{"minimum": 3}, {"maximum": 1}]})", "1", "2"},
      {R"({"oneOf": [{"minimum": 1}, {"maximum": 3}]})", "0", "2"}};
  for (const std::vector<std::string>& row : rows) {
    const ordered_json schema = ordered_json::parse(row[0]);
    EXPECT_TRUE(breaches_of(ordered_json::parse(row[1]), schema, schema, false).empty()) << row[0];
    EXPECT_FALSE(breaches_of(ordered_json::parse(row[2]), schema, schema, false).empty()) << row[0];
  }
  const ordered_json open = ordered_json::parse(R"({"properties": {"a": {}}})"), b{{"b", 1}};
  EXPECT_TRUE(breaches_of(b, open, open, false).empty());
  EXPECT_FALSE(breaches_of(b, open, open, true).empty());
  const ordered_json unknown{{"multipleOf", 2}};
  EXPECT_FALSE(breaches_of(2, unknown, unknown, false).empty());
}

// Every schema that pdsim prints, against each document that pdsim reads or writes under that name.
TEST(Schemas, DocumentsConform) {
  const Folder folder;
  std::set<std::string> checked;
  const auto conforms = [&](const std::string& name, const std::string& text) {
    const Ran schema = run("schema " + name);
    ASSERT_EQ(schema.status, 0) << schema.err;
    const ordered_json root = ordered_json::parse(schema.out);
    EXPECT_EQ(root["$id"], "pdsim." + name + "/1");
    conform(ordered_json::parse(text, nullptr, true, true), root, true);
    checked.insert(name);
  };
  const auto check = [&](const std::string& name, const std::string& arguments, int status = 0) {
    SCOPED_TRACE(name + ": " + arguments);
    const Ran doc = run(folder, arguments);
    ASSERT_EQ(doc.status, status) << doc.err;
    conforms(name, doc.out);
  };
  const auto check_files = [&](const std::string& name, const std::string& beneath) {
    for (const auto& entry : std::filesystem::directory_iterator(beneath)) {
      if (entry.path().extension() != ".json" || entry.path().string().ends_with("schema.json")) continue;
      SCOPED_TRACE(name + ": " + entry.path().string());
      conforms(name, bytes_of(entry.path().string()));
    }
  };
  for (const std::string& path : shipped()) check("describe", "describe --json '" + path + "'");
  check("describe", "describe --json '" + kPair + "' --set model=gpt-oss-120b --set weights_dtype=mxfp4");
  check("describe", "describe --json '" + kPair + "' --set pools.1.instance=p5.48xlarge");
  const std::string both =
      " --set transfer.mode=push --set transfer.bidirectional=true --set transfer.hypothetical=true";
  check("describe", "describe --json '" + kPair + "'" + both);
  check("summary", "replay --json --quiet '" + kScenarios + "quickstart.json'" + both +
                       " --format mooncake --trace '" PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl'");
  check("cost", "cost gemm --gpu h200 m=64 n=8192 k=8192 dtype=bf16 --json");
  check("cost", "cost step --gpu h200 model=qwen3-32b tp=4 batch=64 context=4096 --json");
  check("summary", "replay --json --quiet '" + kScenarios + "quickstart.json'");
  check("comparison", "compare --json --quiet --replications 2 --matrix '" + kScenarios + "quickstart.json'");
  check("trace-stats",
        "trace stats --quiet --json --format mooncake '" PDSIM_SOURCE_DIR "/traces/samples/short.jsonl'");

  check("thresholds", "thresholds --json --quiet --loads 1,2 --thresholds 0,never --ttls 60 '" + kScenarios +
                          "thresholds.json'");

  folder.file("kernels.csv", "op,dtype,kernel,latency_us,m,n,k\ngemm,bf16,cublas,12,64,4096,4096\n");
  check("kernel-report", "validate kernels --json --gpu h200 '" + (folder / "kernels.csv") + "'");
  folder.file("bench.json", R"({"backend": "vllm", "request_rate": "inf", "burstiness": 1.0, "duration": 1.5,
    "max_concurrency": null, "input_lens": [300, 200], "output_lens": [3, 1], "ttfts": [0.1, 0.2],
    "itls": [[0.01, 0.02], []], "errors": ["", ""], "start_times": [1.0, 1.5]})");
  check("validate-run", "validate run --json --quiet '" + kScenarios + "quickstart.json' --bench '" +
                            (folder / "bench.json") + "'");
  // A measured GPU, one that is not, and a row that cannot be.
  folder.file("points.csv",
              "model,gpu,engine,precision,tp,isl,osl,concurrency,rate_rps,ttft_ms,tpot_ms\n"
              "llama-3.1-8b,h200,vllm,bf16,1,128,16,1,,20,5\nllama-3.1-8b,h200,vllm,bf16,1,128,16,,,20,5\n");
  check("validate-serving", "validate serving --json --quiet '" + (folder / "points.csv") + "'");
  check("evidence", "validate evidence --quiet --serving '" + (folder / "points.csv") + "' --published '" +
                        kScenarios + "published/posting.json'");
  check("published-report", "validate published --json --quiet '" + kScenarios + "published/posting.json'");
  check_files("published", kScenarios + "published");

  // A sweep of which one point fails, and one of which none has a value.
  const std::string scenario = R"({"model": "llama-3.1-8b",
    "pools": [{"name": "w", "role": "colocated", "instance": "p5en.48xlarge"}],
    "workload": {"synthetic": {"requests": 40, "rate": 20, "isl": 800, "osl": 16}}})";
  const std::string sweep = R"({"schema": "pdsim.sweep/1", "scenario": )" + scenario +
                            R"(, "parameters": {"pools.w.engine.gpu_memory_utilization": [)";
  folder.file("sweep.json", sweep + "0.05, 0.9]}}");
  folder.file("fails.json", sweep + "0.05]}}");
  check("sweep-report", "sweep sweep.json --quiet --json --db a.db");
  check("sweep-report", "merge a.db --json --db b.db");
  check("sweep-report", "sweep fails.json --quiet --json --db c.db", 3);
  check_files("sweep", kScenarios + "sweeps");

  folder.file("scenario.json", scenario);
  const std::string plan = R"({"scenario": "scenario.json", "menu": [{"instance": "p5en.48xlarge"}],
    "tensor_parallel": [4, 8], "max_instances": 1, "deployments": ["colocated", "pull"], "slo": )";
  folder.file("plan.json", plan + R"({"ttft_ms": 500, "tpot_ms": 50}})");
  folder.file("nothing.json", plan + R"({"ttft_ms": 1}})");
  check("plan-report", "plan plan.json --quiet --json");
  check("plan-report", "plan nothing.json --quiet --json", 3);
  check_files("plan", kScenarios + "plans");

  EXPECT_EQ(run(folder, "replay scenario.json --quiet --out made").status, 0);
  conforms("run", bytes_of(folder / "made/run.json"));
  conforms("scenario", described("'" + kPair + "'")["scenario"].dump());
  folder.file("pings",
              "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
              "64      10      =10      1.2k        0.00s      1.77      36.16       0.03\n"
              "256     10      =10      5k          0.00s     14.80      16.00       0.06\n");
  EXPECT_EQ(run(folder, "calibrate network pings --instance p5en.48xlarge --out network.json").status, 0);
  conforms("network-profile", bytes_of(folder / "network.json"));
  check("fit-bench",
        "fit --from-bench bench.json --scenario scenario.json --json --quiet --out overheads.json");
  conforms("overheads", bytes_of(folder / "overheads.json"));

  check_files("profile", PDSIM_SOURCE_DIR "/models/profiles");
  conforms("serving-rules", bytes_of(kScenarios + "serving/rules.json"));
  folder.file("device.json",
              R"({"schema": "pdsim.device/1", "device": "NVIDIA L40S", "driver": "580.65", "runtime": 13000,
                  "sms": 142, "l2_bytes": 100663296, "clock_mhz": 2000, "power_limit_w": null,
                  "date": "2026-11-30", "peaks": {"copy_gb_s": 690.5}, "status": "finished"})");
  conforms("device", bytes_of(folder / "device.json"));

  std::istringstream list(run("schema").out);
  for (std::string line; std::getline(list, line);) {
    std::string name;
    std::istringstream(line) >> name;
    EXPECT_TRUE(checked.contains(name)) << "no document is checked against " << name;
  }
}

TEST(Schemas, AreListedAndFoundByNameOrId) {
  const Ran list = run("schema");
  EXPECT_EQ(list.status, 0);
  std::istringstream lines(list.out);
  int schemas = 0;
  for (std::string line; std::getline(lines, line); ++schemas) {
    std::string name, id;
    std::istringstream(line) >> name >> id;
    const Ran by_name = run("schema " + name), by_id = run("schema " + id);
    EXPECT_EQ(by_name.status, 0);
    EXPECT_EQ(by_name.out, by_id.out);
    EXPECT_EQ(ordered_json::parse(by_name.out)["$id"], id);
  }
  EXPECT_GE(schemas, 11);
  const Ran none = run("schema summery");
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("(did you mean 'summary'?)"), std::string::npos) << none.err;
}

}  // namespace
}  // namespace pdsim
