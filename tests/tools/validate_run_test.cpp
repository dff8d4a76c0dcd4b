// Theory: a benchmark that measured what pdsim simulates agrees with it: written from a replay's own results,
// in either format, open or closed, every error is that of writing the figures down. And what cannot be
// compared is one line with the file and the field, and leaves nothing behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kScenario = R"({
  "name": "one worker", "model": "llama-3.1-8b",
  "pools": [{"role": "colocated", "instance": "p5en.48xlarge", "engine": {"max_model_len": 32768}}],
  "workload": {"trace": "trace.jsonl", "format": "mooncake", "warmup_s": 0.5}
})";

struct Row {
  double arrival = 0, ttft = 0, e2e = 0;  // s
  int prompt = 0, output = 0;
};

// 60 requests of unlike lengths, no prefix alike, some of one token.
std::string trace_text() {
  std::string text;
  for (int i = 0; i < 60; ++i) {
    const int prompt = 200 + 97 * (i % 13);
    std::string ids;
    for (int block = 0; block * 512 < prompt; ++block) {
      ids += (ids.empty() ? "" : ", ") + std::to_string(i * 100 + block);
    }
    text += "{\"timestamp\": " + std::to_string(40 * i) + ", \"input_length\": " + std::to_string(prompt) +
            ", \"output_length\": " + std::to_string(1 + i * 7 % 90) + ", \"hash_ids\": [" + ids + "]}\n";
  }
  return text;
}

std::vector<Row> replayed(const Folder& folder, const std::string& sets) {
  folder.file("scenario.json", kScenario);
  folder.file("trace.jsonl", trace_text());
  const Ran ran = run(folder, "replay scenario.json --quiet --out made" + sets);
  EXPECT_EQ(ran.status, 0) << ran.err;
  std::istringstream csv(bytes_of(folder / "made/requests.csv"));
  std::vector<std::string> names;
  std::vector<Row> rows;
  for (std::string line; std::getline(csv, line);) {
    std::istringstream cells(line);
    std::vector<std::string> row;
    for (std::string cell; std::getline(cells, cell, ',');) row.push_back(cell);
    if (names.empty()) {
      names = row;
      continue;
    }
    const auto value = [&](const char* name) {
      const auto at = std::find(names.begin(), names.end(), name) - names.begin();
      return std::stod("0" + row[static_cast<std::size_t>(at)]);
    };
    rows.push_back({value("arrival_ns") / 1e9, value("ttft_ns") / 1e9, value("e2e_ns") / 1e9,
                    static_cast<int>(value("prompt_tokens")), static_cast<int>(value("output_tokens"))});
  }
  EXPECT_EQ(rows.size(), 60u);
  return rows;
}

// As vllm bench serve would have written it. Gaps of a request are alike: the sum is what e2e is made from.
json vllm_of(const std::vector<Row>& rows, bool starts) {
  json out = {
      {"backend", "vllm"}, {"request_rate", "inf"}, {"burstiness", 1.0}, {"max_concurrency", nullptr}};
  double end = 0, first = 1e9;
  for (const Row& row : rows) {
    out["input_lens"].push_back(row.prompt);
    out["output_lens"].push_back(row.output);
    out["ttfts"].push_back(row.ttft);
    out["itls"].push_back(std::vector<double>(static_cast<std::size_t>(row.output - 1),
                                              row.output > 1 ? (row.e2e - row.ttft) / (row.output - 1) : 0));
    out["errors"].push_back("");
    if (starts) out["start_times"].push_back(353400.125 + row.arrival);
    end = std::max(end, row.arrival + row.e2e);
    first = std::min(first, row.arrival);
  }
  out["duration"] = end - first;
  return out;
}

void expect_agreement(const json& report, bool gaps = true) {
  for (const auto& [metric, entry] : report["metrics"].items()) {
    if (metric == "itl_ms") {  // equal gaps in the file have the mean of the true ones, not their spread
      if (!gaps) continue;
      EXPECT_EQ(entry["n_measured"], entry["n_simulated"]);
      EXPECT_NEAR(entry["mean"]["error"].get<double>(), 0, 1e-6);
      continue;
    }
    for (const char* figure : {"mean", "p50", "p90", "p95", "p99"}) {
      EXPECT_NEAR(entry[figure]["error"].get<double>(), 0, 1e-6) << metric << " " << figure;
    }
  }
  ASSERT_EQ(report["throughput"].size(), 3u);
  for (const auto& [rate, entry] : report["throughput"].items()) {
    EXPECT_NEAR(entry["error"].get<double>(), 0, 1e-6) << rate;
  }
}

TEST(ValidateRun, WhatPdsimSimulatedItFindsAgain) {
  const Folder folder;
  const std::vector<Row> open = replayed(folder, "");
  folder.file("bench.json", vllm_of(open, true).dump());
  const Ran ran =
      run(folder, "validate run scenario.json --bench bench.json --quiet --json --out out --csv rows.csv");
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["schema"], "pdsim.validate-run/1");
  EXPECT_EQ(report["arrivals"]["how"], "recorded");
  EXPECT_EQ(report["notes"].size(), 0u) << report["notes"];
  EXPECT_EQ(report["metrics"]["ttft_ms"]["n_simulated"], 60)
      << "the scenario's warm-up is not the benchmark's";
  expect_agreement(report);
  EXPECT_EQ(json::parse(bytes_of(folder / "out/validate.json")), report);
  EXPECT_EQ(bytes_of(folder / "out/requests.csv"), bytes_of(folder / "rows.csv"));
  // The scenario that was replayed is one that replay takes, from anywhere.
  const Folder apart;
  const Ran again = run(apart, "replay '" + (folder / "out/scenario.json") + "' --quiet --json");
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(json::parse(again.out)["latency_ms"],
            json::parse(bytes_of(folder / "out/summary.json"))["latency_ms"]);

  // What pdsim is compared with makes no difference to what it simulates, so errors are those of the file.
  json slower = vllm_of(open, true);
  for (json& ttft : slower["ttfts"]) ttft = 2 * ttft.get<double>();
  folder.file("slower.json", slower.dump());
  const json halved =
      json::parse(run(folder, "validate run scenario.json --bench slower.json --quiet --json").out);
  EXPECT_NEAR(halved["metrics"]["ttft_ms"]["p90"]["error"].get<double>(), -0.5, 1e-6);
  EXPECT_NEAR(halved["metrics"]["tpot_ms"]["p90"]["error"].get<double>(), 0, 1e-6);
}

// A closed loop without start times is simulated as one, in the order of the file.
TEST(ValidateRun, AClosedLoopIsReplayedAsOne) {
  const Folder folder;
  const std::vector<Row> closed = replayed(folder, " --set workload.concurrency=5 --set workload.warmup_s=0");
  json bench = vllm_of(closed, false);
  bench["max_concurrency"] = 5;
  folder.file("bench.json", bench.dump());
  const Ran ran = run(folder, "validate run scenario.json --bench bench.json --json");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["arrivals"]["how"], "closed_loop");
  EXPECT_EQ(report["arrivals"]["concurrency"], 5);
  EXPECT_NE(ran.err.find("no start times: the client kept at most 5 in flight"), std::string::npos)
      << ran.err;
  expect_agreement(report);
  // Recorded starts of such a client agree too, and a note says what they are.
  json recorded = vllm_of(closed, true);
  recorded["max_concurrency"] = 5;
  folder.file("recorded.json", recorded.dump());
  const json open =
      json::parse(run(folder, "validate run scenario.json --bench recorded.json --json --quiet").out);
  expect_agreement(open);
  ASSERT_EQ(open["notes"].size(), 1u);
  EXPECT_NE(open["notes"][0].get<std::string>().find("workload.concurrency=5"), std::string::npos);
  const json forced = json::parse(run(folder,
                                      "validate run scenario.json --bench recorded.json --json --quiet --set "
                                      "workload.concurrency=5")
                                      .out);
  expect_agreement(forced);
}

// A rate without start times is drawn anew: with the seed, and as a limit holds it back.
TEST(ValidateRun, ARateIsDrawnAndSaid) {
  const Folder folder;
  json bench = vllm_of(replayed(folder, ""), false);
  bench["request_rate"] = 30.0;
  bench["max_concurrency"] = 4;
  folder.file("bench.json", bench.dump());
  const auto report = [&](const std::string& more) {
    const Ran ran = run(folder, "validate run scenario.json --bench bench.json --json" + more);
    EXPECT_EQ(ran.status, 0) << ran.err;
    EXPECT_NE(ran.err.find("drawn anew as the client draws them (rate 30/s, burstiness 1)"),
              std::string::npos)
        << ran.err;
    return json::parse(ran.out);
  };
  const json one = report(""), again = report(" --seed 1"), two = report(" --seed 2");
  EXPECT_EQ(one["arrivals"]["how"], "drawn");
  EXPECT_EQ(one["arrivals"]["max_concurrency"], 4);
  EXPECT_EQ(one["metrics"], again["metrics"]);
  EXPECT_NE(one["metrics"], two["metrics"]);
}

TEST(ValidateRun, AiperfAgreesToo) {
  const Folder folder;
  const std::vector<Row> rows = replayed(folder, "");
  std::string text;
  for (const Row& row : rows) {
    const auto ms = [](double s) { return json{{"value", s * 1e3}, {"unit", "ms"}}; };
    text += json{{"metadata",
                  {{"request_start_ns", 1759813207532900363 + std::llround(row.arrival * 1e9)},
                   {"benchmark_phase", "profiling"}}},
                 {"metrics",
                  {{"input_sequence_length", {{"value", row.prompt}, {"unit", "tokens"}}},
                   {"output_sequence_length", {{"value", row.output}, {"unit", "tokens"}}},
                   {"time_to_first_token", ms(row.ttft)},
                   {"request_latency", ms(row.e2e)}}}}
                .dump() +
            "\n";
  }
  folder.file("profile_export.jsonl", text);
  const Ran ran = run(folder, "validate run scenario.json --bench profile_export.jsonl --json --quiet");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json report = json::parse(ran.out);
  expect_agreement(report, false);
  EXPECT_EQ(report["metrics"]["itl_ms"]["n_measured"], 0);
  EXPECT_FALSE(report["metrics"]["itl_ms"].contains("mean"));
  const Ran table = run(folder, "validate run scenario.json --bench profile_export.jsonl --quiet");
  EXPECT_NE(table.out.find("aiperf: time_to_first_token:"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("pdsim: from arrival at the router"), std::string::npos);
  EXPECT_NE(table.out.find("not measured"), std::string::npos);
}

// What makes the two sides unlike is said: chunks of several tokens, requests that the cluster would not
// take.
TEST(ValidateRun, WhatIsNotAlikeIsNoted) {
  const Folder folder;
  json bench = vllm_of(replayed(folder, ""), true);
  for (json& gaps : bench["itls"]) {
    const std::size_t chunks = gaps.size() / 2;
    const double sum = gaps.empty() ? 0 : gaps[0].get<double>() * static_cast<double>(gaps.size());
    gaps = std::vector<double>(chunks, chunks > 0 ? sum / static_cast<double>(chunks) : 0);
  }
  bench["input_lens"][3] = 40000;
  folder.file("bench.json", bench.dump());
  const Ran ran = run(folder, "validate run scenario.json --bench bench.json --json --quiet");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const std::string notes = json::parse(ran.out)["notes"].dump();
  EXPECT_NE(notes.find("a chunk holds 2.0"), std::string::npos) << notes;
  EXPECT_NE(notes.find("1 of 60 requests did not complete"), std::string::npos) << notes;
}

TEST(ValidateRun, WhatCannotBeComparedIsOneLineAndStatus2) {
  const Folder folder;
  json bench = vllm_of(replayed(folder, ""), true);
  const std::string whole = bench.dump();
  folder.file("cut.json", whole.substr(0, whole.size() / 2));
  folder.file("empty.json", "");
  json missing = bench, lengths = bench;
  missing.erase("itls");
  folder.file("missing.json", missing.dump());
  lengths["ttfts"].erase(0);
  folder.file("lengths.json", lengths.dump());
  folder.file("bench.json", whole);
  const std::size_t files = folder.files();
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"scenario.json --bench nosuch.json", "nosuch.json: cannot be opened"},
      {"scenario.json --bench cut.json", "cut.json: is not one complete JSON document"},
      {"scenario.json --bench empty.json", "empty.json: is empty"},
      {"scenario.json --bench missing.json", "missing.json: 'itls' is missing"},
      {"scenario.json --bench lengths.json", "lengths.json: /ttfts: has 59 entries, expected 60"},
      {"scenario.json --bench trace.jsonl", "trace.jsonl: is not one complete JSON document"},
      {"scenario.json --bench bench.json --bench-format vllm-bnch", "did you mean 'vllm-bench'?"},
      {"scenario.json --bench bench.json --set workload.concurency=3", "did you mean 'concurrency'?"},
      {"scenario.json --bench bench.json --set model=llama-3.1-70b", "do not fit"},
      {"nosuch.json --bench bench.json", "nosuch.json: cannot be read"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const Ran ran = run(folder, "validate run " + c.arguments + " --quiet --out results");
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), files);
  }
}

// The report has what its schema demands, and at its top nothing else.
TEST(ValidateRun, TheReportIsWhatItsSchemaSays) {
  const Folder folder;
  folder.file("bench.json", vllm_of(replayed(folder, ""), true).dump());
  const json schema = json::parse(run(folder, "schema validate-run").out);
  const json report =
      json::parse(run(folder, "validate run scenario.json --bench bench.json --json --quiet").out);
  EXPECT_EQ(schema["$id"], report["schema"]);
  EXPECT_EQ(schema["required"].size(), report.size());
  for (const json& key : schema["required"]) EXPECT_TRUE(report.contains(key.get<std::string>())) << key;
  for (const auto& [key, value] : report.items()) {
    for (const json& member : schema["properties"][key].value("required", json::array())) {
      EXPECT_TRUE(value.contains(member.get<std::string>())) << key << member;
    }
  }
}

}  // namespace
}  // namespace pdsim
