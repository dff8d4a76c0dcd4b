// Theory: a benchmark that pdsim itself made with known overheads has a best fit, those overheads. Of a
// synchronous engine a step takes max(kernels, launches) + gpu + step + request x rows, so that loads of
// different batch sizes tell `request` from the rest, prompts of different lengths the front end's two parts,
// and nothing tells gpu from step: their sum is what comes back. And what cannot be fitted is one line,
// status 2, and no file.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "models/overheads.hpp"
#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

const std::string kScenario = R"({
  "name": "one worker", "model": "llama-3.1-8b",
  "pools": [{"role": "colocated", "instance": "p5en.48xlarge",
             "engine": {"max_model_len": 16384, "async_scheduling": false, "overheads": "start.json"}}],
  "workload": {"synthetic": {"isl": 100, "osl": 10, "requests": 10, "concurrency": 1, "range_ratio": 0.5}}
})";

Overheads start() {
  Overheads o;
  o.name = "start";
  o.front_end = 3'000e3;
  o.front_end_token = 1e3;
  o.step = 640e3;
  o.request = 8e3;
  o.gpu = 100e3;
  o.rank = 3e3;
  o.launch[1] = 40e3;
  o.launch[2] = 120e3;
  o.source = "a test";
  return o;
}

Overheads truth() {
  Overheads o = start();
  o.front_end = 9'000e3;
  o.front_end_token = 3e3;
  o.step = 1'100e3;
  o.request = 25e3;
  return o;
}

/// What vllm bench serve would have written of a closed loop with `overheads`.
json bench_of(const Folder& folder, const std::string& overheads, int concurrency, int isl, int osl,
              int requests) {
  const auto set = [](const std::string& path, const auto& value) {
    std::ostringstream text;
    text << " --set " << path << '=' << value;
    return text.str();
  };
  const std::string synthetic = "workload.synthetic.";
  const Ran ran =
      run(folder, "replay scenario.json --quiet --out made" + set("pools.0.engine.overheads", overheads) +
                      set(synthetic + "isl", isl) + set(synthetic + "osl", osl) +
                      set(synthetic + "requests", requests) + set(synthetic + "concurrency", concurrency));
  EXPECT_EQ(ran.status, 0) << ran.err;
  json out = {{"model_id", "meta-llama/Llama-3.1-8B"},
              {"date", "20260401-120000"},
              {"request_rate", "inf"},
              {"max_concurrency", concurrency}};
  std::istringstream csv(bytes_of(folder / "made/requests.csv"));
  std::vector<std::string> names;
  double end = 0;
  for (std::string line; std::getline(csv, line);) {
    std::istringstream cells(line);
    std::vector<std::string> row;
    for (std::string cell; std::getline(cells, cell, ',');) row.push_back(cell);
    if (names.empty()) {
      names = row;
      continue;
    }
    const auto value = [&](const char* name) {
      return std::stod(
          row[static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin())]);
    };
    const double arrival = value("arrival_ns") / 1e9, ttft = value("ttft_ns") / 1e9,
                 e2e = value("e2e_ns") / 1e9;
    const int output = static_cast<int>(value("output_tokens"));
    out["input_lens"].push_back(static_cast<int>(value("prompt_tokens")));
    out["output_lens"].push_back(output);
    out["ttfts"].push_back(ttft);
    out["itls"].push_back(
        std::vector<double>(static_cast<std::size_t>(output - 1), (e2e - ttft) / (output - 1)));
    out["start_times"].push_back(5 + arrival);
    end = std::max(end, arrival + e2e);
  }
  out["duration"] = end;
  return out;
}

void prepare(const Folder& folder) {
  folder.file("scenario.json", kScenario);
  folder.file("start.json", to_json(start()));
  folder.file("truth.json", to_json(truth()));
}

const json& parameter(const json& report, const std::string& name) {
  for (const json& p : report["parameters"]) {
    if (p["name"] == name) return p;
  }
  throw std::out_of_range(name);
}

TEST(FromBench, KnownOverheadsComeBack) {
  const Folder folder;
  prepare(folder);
  folder.file("c1.json", bench_of(folder, "truth.json", 1, 500, 30, 12).dump());
  folder.file("long.json", bench_of(folder, "truth.json", 1, 8000, 20, 10).dump());
  folder.file("c8.json", bench_of(folder, "truth.json", 8, 1500, 40, 40).dump());
  folder.file("c32.json", bench_of(folder, "truth.json", 32, 600, 60, 96).dump());
  folder.file("c16.json", bench_of(folder, "truth.json", 16, 300, 50, 64).dump());
  const std::string files = "c1.json long.json c8.json c32.json c16.json";
  const Ran ran =
      run(folder, "fit --from-bench " + files + " --scenario scenario.json --json --out fitted.json");
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_TRUE(ran.err.starts_with("5 loads: at most ")) << "the cost is said before: " << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["schema"], "pdsim.fit-bench/1");
  EXPECT_EQ(report["status"], "finished");
  EXPECT_EQ(report["start"].get<std::string>().substr(report["start"].get<std::string>().rfind('/') + 1),
            "start.json");

  const Overheads fitted = load_overheads(folder / "fitted.json"), known = truth();
  EXPECT_NEAR(fitted.front_end, known.front_end, 0.03 * known.front_end);
  EXPECT_NEAR(fitted.front_end_token, known.front_end_token, 0.06 * known.front_end_token);
  EXPECT_NEAR(fitted.request, known.request, 0.05 * known.request);
  EXPECT_NEAR(fitted.step + fitted.gpu, known.step + known.gpu, 0.03 * known.step);
  // Of the two that cannot be told apart one stays where it was, and says why; so does what moves nothing.
  const json& gpu = parameter(report, "gpu_us");
  EXPECT_EQ(gpu["determined"], false);
  EXPECT_EQ(gpu["start"], gpu["end"]);
  EXPECT_NE(gpu["why_not"].get<std::string>().find("most like step_us"), std::string::npos) << gpu;
  EXPECT_EQ(parameter(report, "rank_us")["determined"], false) << "one GPU has no ranks";
  EXPECT_EQ(fitted.rank, start().rank);
  EXPECT_EQ(fitted.name, "fitted");
  EXPECT_EQ(fitted.date, "2026-04-01") << "the benchmark's, not today";
  EXPECT_NE(fitted.source.find("c1.json, long.json, c8.json"), std::string::npos) << fitted.source;

  // The fifth is not fitted; that its error falls, too, is what the fit is worth.
  EXPECT_EQ(report["loads"][4]["held_out"], true);
  const json& out = report["errors"]["held_out"];
  EXPECT_EQ(report["errors"]["fitted"]["mean_ttft"]["after"]["n"], 4);
  EXPECT_GT(out["mean_tpot"]["before"]["median_ape"], 0.05);
  EXPECT_LT(out["mean_tpot"]["after"]["median_ape"], 0.01);
  EXPECT_LT(out["mean_ttft"]["after"]["median_ape"], 0.05);

  // What is reported is what the file gives: the same errors as a fit that starts there finds.
  const Ran again =
      run(folder, "fit --from-bench " + files +
                      " --scenario scenario.json --overheads fitted.json --quiet --json --out again.json");
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(again.err, "");
  const json reread = json::parse(again.out);
  for (std::size_t i = 0; i < 5; ++i) {
    for (const char* figure : {"mean_ttft_ms", "mean_tpot_ms"}) {
      const json &written = report["loads"][i]["figures"][figure],
                 &read = reread["loads"][i]["figures"][figure];
      EXPECT_NEAR(read["before"].get<double>(), written["after"].get<double>(),
                  2e-3 * read["before"].get<double>());
    }
  }
}

TEST(FromBench, WhatFitsStays) {
  const Folder folder;
  prepare(folder);
  folder.file("c1.json", bench_of(folder, "start.json", 1, 500, 30, 10).dump());
  folder.file("c8.json", bench_of(folder, "start.json", 8, 1500, 40, 32).dump());
  const std::string arguments = "fit --from-bench c1.json c8.json --scenario scenario.json --out ";
  const Ran ran = run(folder, arguments + "same.json");
  ASSERT_EQ(ran.status, 0) << ran.err;
  Overheads same = load_overheads(folder / "same.json"), was = start();
  for (const OverheadField& field : kOverheadFields) {
    EXPECT_NEAR(field.of(same), field.of(was), 1e-3 * field.of(was)) << field.key;
  }
  EXPECT_NE(ran.out.find("not determined: moves nothing here"), std::string::npos) << ran.out;
  // To stdout: the same file but for its name, and the table goes to stderr.
  const Ran piped = run(folder, arguments + "- --name same --jobs 1");
  ASSERT_EQ(piped.status, 0) << piped.err;
  EXPECT_EQ(piped.out, bytes_of(folder / "same.json"));
  EXPECT_NE(piped.err.find("parameter"), std::string::npos);
}

const std::string kHeader =
    "model,gpu,engine,engine_version,precision,mode,tp,isl,osl,concurrency,ttft_ms,tpot_ms\n";

// Rows become scenarios by rules: here measured by pdsim itself, with other overheads than the rules name.
TEST(FromBench, RowsOfATableAreLoads) {
  const Folder folder;
  prepare(folder);
  std::string rows;
  for (const char* load : {"256,64,1", "4096,32,1", "512,64,4", "512,64,16", "1024,64,8", "2048,64,2"}) {
    rows += std::string("llama-3.1-8b,h200,vllm,0.9.0,bf16,agg,1,") + load + ",1000,1000\n";
  }
  folder.file("asked.csv", kHeader + rows);
  const Ran made = run(folder,
                       "validate serving asked.csv --json --quiet --set pools.0.engine.overheads=truth.json "
                       "--set pools.0.engine.async_scheduling=false");
  ASSERT_EQ(made.status, 0) << made.err;
  std::string measured = kHeader;
  std::istringstream lines(rows);
  const json simulated = json::parse(made.out);
  for (const json& row : simulated["rows"]) {
    std::string line;
    std::getline(lines, line);
    ASSERT_FALSE(row["simulated"].is_null()) << row;
    std::ostringstream text;
    text.precision(12);
    text << line.substr(0, line.find(",1000,1000")) << ',' << row["simulated"]["ttft_ms"] << ','
         << row["simulated"]["tpot_ms"] << '\n';
    measured += text.str();
  }
  measured += "llama-3.1-8b,h200,vllm,0.9.0,bf16,disagg,1,512,64,4,100,10\n";
  folder.file("measured.csv", measured);
  const std::string arguments =
      "fit --from-bench measured.csv --overheads start.json --set pools.0.engine.async_scheduling=false "
      "--quiet "
      "--json --out fitted.json";
  const Ran ran = run(folder, arguments);
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["loads"].size(), 6u);
  ASSERT_EQ(report["set_aside"].size(), 1u) << "the row that is not simulated is counted, with its reason";
  EXPECT_EQ(report["set_aside"][0]["loads"], 1);
  const Overheads fitted = load_overheads(folder / "fitted.json"), known = truth();
  EXPECT_NEAR(fitted.front_end, known.front_end, 0.05 * known.front_end);
  EXPECT_NEAR(fitted.step + fitted.gpu, known.step + known.gpu, 0.03 * known.step);
  EXPECT_LT(report["errors"]["fitted"]["mean_ttft"]["after"]["median_ape"], 0.01);
  EXPECT_LT(report["errors"]["fitted"]["mean_tpot"]["after"]["median_ape"], 0.01);

  const Ran one = run(folder, arguments + " --only isl=256");
  EXPECT_EQ(one.status, 2);
  EXPECT_NE(one.err.find("1 row cannot determine 2 parameters"), std::string::npos) << one.err;
}

TEST(FromBench, WhatCannotWorkIsOneLineAndStatus2) {
  const Folder folder;
  prepare(folder);
  json bench = {
      {"input_lens", {100, 100}}, {"output_lens", {5, 5}},
      {"ttfts", {0.01, 0.01}},    {"itls", json::parse("[[0.01,0.01,0.01,0.01],[0.01,0.01,0.01,0.01]]")},
      {"start_times", {1, 2}},    {"duration", 2}};
  folder.file("good.json", bench.dump());
  bench["model_id"] = "Qwen/Qwen3-32B";
  folder.file("qwen.json", bench.dump());
  bench.erase("ttfts");
  folder.file("short.json", bench.dump());
  folder.file("rows.csv", kHeader +
                              "llama-3.1-8b,h200,vllm,0.9.0,bf16,agg,1,512,64,4,100,10\n"
                              "llama-3.1-8b,h200,sglang,0.5.0,bf16,agg,1,512,64,4,100,10\n");
  const std::string with = " --scenario scenario.json --out out.json";
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"--from-bench nosuch.json" + with, "nosuch.json: cannot be opened"},
      {"--from-bench short.json" + with, "short.json: 'ttfts' is missing"},
      {"--from-bench qwen.json" + with,
       "qwen.json: /model_id: is 'Qwen/Qwen3-32B', which is qwen3-32b: expected llama-3.1-8b"},
      {"--from-bench good.json --out out.json", "good.json: is a benchmark's own file, expected --scenario"},
      {"--from-bench rows.csv" + with, "rows.csv: is no JSON, expected a benchmark's file"},
      {"--from-bench good.json --overheads strt.json" + with, "strt.json"},
      {"--from-bench good.json --overheads vlm" + with,
       "--overheads: no overheads 'vlm' (did you mean 'vllm'?)"},
      {"--from-bench good.json --scenario scenario.json --out out.txt",
       "out.txt: expected a path that ends in .json"},
      {"--from-bench good.json --scenario scenario.json --json --out -", "cannot be with --json"},
      {"--from-bench good.json --gpu h200" + with, "are of kernels, not of --from-bench"},
      {"kernels.csv --from-bench good.json" + with, "expected tables of kernel times, or --from-bench"},
      {"kernels.csv" + with, "are of --from-bench, not of tables"},
      {"--out out.json", "expected tables of kernel times, or --from-bench"},
  };
  for (const auto& [arguments, expected] : cases) {
    const Ran ran = run(folder, "fit " + arguments + (arguments.starts_with("--from") ? " --quiet" : ""));
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_NE(ran.err.find(expected), std::string::npos) << arguments << '\n' << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_EQ(ran.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder / "out.json")) << arguments;
  }
  // Of another model by a name that nobody knows: said, not refused.
  bench = json::parse(bytes_of(folder / "good.json"));
  bench["model_id"] = "me/mine";
  folder.file("mine.json", bench.dump());
  const Ran unknown = run(folder, "fit --from-bench mine.json --quiet" + with);
  EXPECT_EQ(unknown.status, 0) << unknown.err;
  EXPECT_NE(unknown.out.find("whether its model 'me/mine' is the scenario's"), std::string::npos)
      << unknown.out;
}

TEST(FromBench, AnInterruptLeavesAWholeFileOrNone) {
  const Folder folder;
  prepare(folder);
  folder.file("c64.json", bench_of(folder, "truth.json", 64, 500, 200, 1500).dump());
  const Ran ran = run(folder, "fit --from-bench c64.json --scenario scenario.json --out out.json --jobs 1",
                      interrupted_after("0.3"));
  EXPECT_EQ(ran.status, 130) << ran.err;
  if (std::filesystem::exists(folder / "out.json")) {
    EXPECT_NE(load_overheads(folder / "out.json").source.find("interrupted"), std::string::npos);
  }
}

}  // namespace
}  // namespace pdsim
