// Theory: a space is the product of its levels less what constraints rule out, in an order that the file
// alone decides; a Latin hypercube has one point in each of as many equal parts of every axis; and what is
// wrong in a file is said before anything runs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tests/traces/files.hpp"
#include "tools/study/runs.hpp"
#include "tools/study/space.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

constexpr const char* kScenario = R"({
  "model": "llama-3.1-8b",
  "pools": [{"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge"},
            {"name": "decode", "role": "decode", "instance": "p5en.48xlarge"}],
  "workload": {"synthetic": {"requests": 4, "rate": 1, "isl": 160, "osl": 8}}})";

ReplayOptions quiet(std::vector<std::string> sets = {}) {
  ReplayOptions options;
  options.sets = std::move(sets);
  options.quiet = true;
  return options;
}

std::string sweep(const std::string& parameters, const std::string& more = "") {
  return std::string(R"({"schema": "pdsim.sweep/1", // comments are allowed
    "scenario": )") +
         kScenario + ", \"parameters\": {" + parameters + "}" + (more.empty() ? "" : ", " + more) + "}";
}

Space read(const std::string& text, const ReplayOptions& options = quiet(), std::uint64_t most = 1'000'000) {
  const Folder folder;
  return read_space(folder.file("sweep.json", text), options, most);
}

std::string labels_at(const Space& space, const SweepPoint& point) {
  std::string out;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    out += (p == 0 ? "" : " ") + space.parameters[p].labels[point.levels[p]];
  }
  return out;
}

TEST(Space, AGridIsTheProductTheLastParameterFastest) {
  const Space space = read(sweep(R"("transfer.mode": ["pull", "push"],
    "block": {"paths": ["pools.prefill.engine.block_size", "pools.decode.engine.block_size"], "values": [16, 32]},
    "rate": {"path": "workload.time_scale", "from": 0.5, "to": 2, "steps": 4})"));
  ASSERT_EQ(space.points.size(), 16u);
  EXPECT_EQ(space.parameters[2].labels, (std::vector<std::string>{"0.5", "1", "1.5", "2"}));
  EXPECT_TRUE(space.parameters[2].numeric);
  EXPECT_FALSE(space.parameters[0].numeric);
  EXPECT_EQ(labels_at(space, space.points[0]), "pull 16 0.5");
  EXPECT_EQ(labels_at(space, space.points[1]), "pull 16 1");
  EXPECT_EQ(labels_at(space, space.points[4]), "pull 32 0.5");
  EXPECT_EQ(labels_at(space, space.points[15]), "push 32 2");
  for (std::size_t i = 0; i < space.points.size(); ++i) EXPECT_EQ(space.points[i].number, i);

  const LoadedScenario loaded = load_run(space.spec_of(space.points[15]));
  EXPECT_EQ(loaded.scenario.transfer.mode, TransferMode::push);
  EXPECT_EQ(loaded.scenario.pools[0].engine.block_size, 32);
  EXPECT_EQ(loaded.scenario.pools[1].engine.block_size, 32);
  EXPECT_EQ(loaded.scenario.workload.time_scale, 2);
}

// The key order of the text is the order of the axes: "z" before "a" varies slowest.
TEST(Space, TheOrderIsThatOfTheText) {
  const Space space = read(sweep(R"("z": {"path": "seed", "values": [1, 2]},
                                    "a": {"path": "workload.time_scale", "values": [4, 3]})"));
  EXPECT_EQ(space.parameters[0].name, "z");
  EXPECT_EQ(labels_at(space, space.points[1]), "1 3");
}

// Equal ratios between the levels of a logarithmic range, ends exact, integers rounded, equal ones joined.
TEST(Space, LogarithmicAndIntegerRanges) {
  const auto labels = [](const std::string& range) {
    return read(sweep(R"("x": {"path": "transfer.kv_recompute_threshold", )" + range + "}"))
        .parameters[0]
        .labels;
  };
  EXPECT_EQ(labels(R"("from": 64, "to": 16384, "steps": 9, "scale": "log", "integer": true)"),
            (std::vector<std::string>{"64", "128", "256", "512", "1024", "2048", "4096", "8192", "16384"}));
  EXPECT_EQ(labels(R"("from": 1, "to": 5, "steps": 9, "integer": true)"),
            (std::vector<std::string>{"1", "2", "3", "4", "5"}));
  EXPECT_EQ(labels(R"("from": 10, "to": 0, "steps": 3)"), (std::vector<std::string>{"10", "5", "0"}));
  const Space thirds = read(sweep(R"("x": {"path": "workload.time_scale", "from": 1, "to": 2, "steps": 4})"));
  EXPECT_EQ(thirds.parameters[0].labels, (std::vector<std::string>{"1", "1.33333", "1.66667", "2"}));
  EXPECT_EQ(load_run(thirds.spec_of(thirds.points[1])).scenario.workload.time_scale, 1.33333);
}

TEST(Space, OptionsSetWhatTheyList) {
  const Space space = read(sweep(R"("deployment": {"options": {
      "one": {"pools": [{"name": "all", "role": "colocated", "instance": "p5en.48xlarge"}]},
      "two": {"transfer.mode": "push", "pools.decode.replicas": 2}}},
    "rate": {"path": "workload.time_scale", "values": [1, 2]})"));
  ASSERT_EQ(space.points.size(), 4u);
  EXPECT_EQ(load_run(space.spec_of(space.points[0])).scenario.pools.size(), 1u);
  const Scenario two = load_run(space.spec_of(space.points[3])).scenario;
  EXPECT_EQ(two.pools[1].replicas, 2);
  EXPECT_EQ(two.transfer.mode, TransferMode::push);
  EXPECT_EQ(two.workload.time_scale, 2);
}

// A knob of the generated trace goes into the trace, over those that all points have.
TEST(Space, KnobsOfAGeneratedTrace) {
  const Space space = read(sweep(R"("think": {"path": "generate.think_time_s", "values": [5, 20]},
                                    "generate.output.mean": [10, 20])",
                                 R"("generate": {"requests": 7, "output": {"sigma": 0}})"));
  const RunSpec spec = space.spec_of(space.points[3]);
  EXPECT_EQ(json::parse(spec.generate),
            json::parse(R"({"requests": 7, "think_time_s": 20, "output": {"mean": 20, "sigma": 0}})"));
  TraceStore traces;
  const auto trace = traces.get(load_run(spec), spec.generate);
  ASSERT_EQ(trace->requests.size(), 7u);
  EXPECT_EQ(trace->requests[0].output_tokens, 20);
  EXPECT_EQ(json::parse(read(sweep(R"("generate.rate": [1])"), quiet({"generate.requests=9"})).base.generate),
            json::parse(R"({"requests": 9})"));
}

// Under every constraint, exactly the combinations for which a brute force finds it true, in grid order.
TEST(Space, ConstraintsAgainstBruteForce) {
  const std::string parameters = R"("transfer.mode": ["pull", "push"],
    "pools.prefill.replicas": {"from": 1, "to": 7, "steps": 7, "integer": true},
    "pools.decode.replicas": [1, 2, 3, 4, 5, 6, 7],
    "network.bandwidth_scale": [0.5, 1, 2],
    "transfer.warm_start": [true, false])";
  struct Case {
    const char* text;
    bool (*holds)(bool push, int p, int d, double scale, bool warm);
  };
  const Case cases[] = {
      {R"(pools.prefill.replicas + pools.decode.replicas == 8)",
       [](bool, int p, int d, double, bool) { return p + d == 8; }},
      {R"(!(transfer.mode == 'push') || pools.prefill.replicas < 3)",
       [](bool push, int p, int, double, bool) { return !push || p < 3; }},
      {R"(transfer.mode != \"push\" && network.bandwidth_scale*2 >= 1.5e0)",
       [](bool push, int, int, double s, bool) { return !push && s * 2 >= 1.5; }},
      {R"(max(pools.prefill.replicas, pools.decode.replicas) <= 4 || transfer.warm_start)",
       [](bool, int p, int d, double, bool warm) { return std::max(p, d) <= 4 || warm; }},
      {R"(transfer.warm_start == false && pools.decode.replicas > 1)",
       [](bool, int, int d, double, bool warm) { return !warm && d > 1; }},
      {R"(pools.prefill.replicas >= pools.decode.replicas ? network.bandwidth_scale == 0.5 : true)",
       [](bool, int p, int d, double s, bool) { return p >= d ? s == 0.5 : true; }},
  };
  for (const Case& c : cases) {
    const Space space = read(sweep(parameters, std::string("\"constraints\": [\"") + c.text + "\"]"));
    std::vector<std::string> expected, found;
    for (const bool push : {false, true}) {
      for (int p = 1; p <= 7; ++p) {
        for (int d = 1; d <= 7; ++d) {
          for (const double s : {0.5, 1.0, 2.0}) {
            for (const bool warm : {true, false}) {
              if (!c.holds(push, p, d, s, warm)) continue;
              expected.push_back(std::string(push ? "push " : "pull ") + std::to_string(p) + " " +
                                 std::to_string(d) +
                                 (s == 0.5 ? " 0.5 "
                                  : s == 1 ? " 1 "
                                           : " 2 ") +
                                 (warm ? "true" : "false"));
            }
          }
        }
      }
    }
    for (const SweepPoint& point : space.points) found.push_back(labels_at(space, point));
    EXPECT_EQ(found, expected) << c.text;
    EXPECT_EQ(space.excluded + space.points.size(), 2u * 7 * 7 * 3 * 2) << c.text;
  }
}

// McKay et al. (1979): cut into as many equal parts as there are points, every part of every axis has one.
TEST(Space, ALatinHypercubeHitsEachPartOfEachAxisOnce) {
  constexpr int kPoints = 200;
  const std::string text = sweep(R"(
    "linear": {"path": "workload.time_scale", "from": 1000, "to": 1001},
    "log": {"path": "network.bandwidth_scale", "from": 0.01, "to": 100, "scale": "log"},
    "falling": {"path": "transfer.initial_fragmentation", "from": 1, "to": 0},
    "steps": {"path": "transfer.kv_recompute_threshold", "from": 1, "to": 3, "steps": 3, "integer": true},
    "transfer.mode": ["pull", "push", "push_layerwise"])",
                                 R"("sample": {"method": "latin_hypercube", "points": 200, "seed": 7})");
  const Space space = read(text);
  ASSERT_EQ(space.points.size(), std::size_t{kPoints});
  EXPECT_TRUE(space.sampled);
  std::vector<std::multiset<int>> parts(3);
  std::map<std::string, int> words, steps;
  for (const SweepPoint& point : space.points) {
    const auto value = [&](std::size_t p) {
      return std::strtod(space.parameters[p].labels[point.levels[p]].c_str(), nullptr);
    };
    parts[0].insert(static_cast<int>(std::floor((value(0) - 1000) * kPoints)));
    parts[1].insert(static_cast<int>(std::floor((std::log10(value(1)) + 2) / 4 * kPoints)));
    parts[2].insert(static_cast<int>(std::floor((1 - value(2)) * kPoints)));
    ++steps[space.parameters[3].labels[point.levels[3]]];
    ++words[space.parameters[4].labels[point.levels[4]]];
  }
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (int i = 0; i < kPoints; ++i) EXPECT_EQ(parts[p].count(i), 1u) << "axis " << p << ", part " << i;
  }
  for (const auto& counts : {words, steps}) {
    ASSERT_EQ(counts.size(), 3u);
    for (const auto& [label, n] : counts) EXPECT_NEAR(n, kPoints / 3.0, 1) << label;
  }
  // Most have six digits, and the value run is the label.
  for (const std::string& label : space.parameters[1].labels) EXPECT_LE(label.size(), 10u) << label;
  const SweepPoint& point = space.points[17];
  EXPECT_EQ(load_run(space.spec_of(point)).scenario.network.bandwidth_scale,
            std::strtod(space.parameters[1].labels[point.levels[1]].c_str(), nullptr));

  // The same file is the same sample; another seed another.
  const Space again = read(text);
  for (std::size_t i = 0; i < space.points.size(); ++i)
    EXPECT_EQ(space.points[i].levels, again.points[i].levels);
  EXPECT_EQ(space.sha256, again.sha256);
  std::string other = text;
  other.replace(other.find("\"seed\": 7"), 9, "\"seed\": 8");
  const Space reseeded = read(other);
  EXPECT_NE(labels_at(space, space.points[0]), labels_at(reseeded, reseeded.points[0]));
  EXPECT_NE(space.sha256, reseeded.sha256);
}

// No two axes go together: over 400 points the correlation of two axes is within four standard errors of 0.
TEST(Space, AxesOfALatinHypercubeAreIndependent) {
  const Space space = read(sweep(R"("a": {"path": "workload.time_scale", "from": 1, "to": 2},
    "b": {"path": "network.bandwidth_scale", "from": 1, "to": 2},
    "c": {"path": "workload.prompt_scale", "from": 1, "to": 2})",
                                 R"("sample": {"method": "latin_hypercube", "points": 400})"));
  for (const auto& [x, y] : {std::pair<std::size_t, std::size_t>{0, 1}, {0, 2}, {1, 2}}) {
    double sum = 0;
    for (const SweepPoint& point : space.points) {
      sum += (point.levels[x] - 199.5) * (point.levels[y] - 199.5);
    }
    EXPECT_LT(std::abs(sum / (400 * (400.0 * 400 - 1) / 12)), 4 / std::sqrt(400.0));
  }
}

// A contrast needs its levels with all else equal: they are crossed with the sample.
TEST(Space, ContrastsAreCrossedWithASample) {
  const Space space = read(sweep(
      R"("transfer.mode": ["pull", "push"], "rate": {"path": "workload.time_scale", "from": 1, "to": 2})",
      R"("sample": {"method": "latin_hypercube", "points": 10},
               "constraints": ["rate < 1.5 || transfer.mode == 'pull'"],
               "objectives": ["ttft_p95"], "contrasts": [{"parameter": "transfer.mode", "objective": "goodput"}])"));
  EXPECT_EQ(space.points.size(), 15u);
  EXPECT_EQ(space.excluded, 5u);
  std::map<std::uint32_t, int> modes;
  for (const SweepPoint& point : space.points) ++modes[point.levels[1]];
  int twice = 0;
  for (const auto& [level, n] : modes) twice += n == 2;
  EXPECT_EQ(modes.size(), 10u);
  EXPECT_EQ(twice, 5);
  ASSERT_EQ(space.objectives.size(), 2u);  // the contrast's joins them
  EXPECT_EQ(space.objectives[1].name, "goodput");
}

// Of a wholly discrete space a sample larger than it is all of it, once.
TEST(Space, ASampleRunsNothingTwice) {
  const Space space = read(sweep(R"("transfer.mode": ["pull", "push"], "workload.time_scale": [1, 2])",
                                 R"("sample": {"method": "latin_hypercube", "points": 100})"));
  EXPECT_EQ(space.points.size(), 4u);
  EXPECT_EQ(space.repeated, 96u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(space.points[i].number, i);
}

// The identity is of what decides results: neither prose nor what they are judged by, but every value.
TEST(Space, TheIdentityIsOfWhatDecidesResults) {
  const std::string parameters = R"("workload.time_scale": [1, 2])";
  const std::string id = read(sweep(parameters)).sha256;
  EXPECT_EQ(id.size(), 64u);
  EXPECT_EQ(id, read(sweep(parameters, R"("title": "x", "note": "y", "objectives": ["goodput"])")).sha256);
  EXPECT_EQ(id, read(sweep("/* why */ " + parameters)).sha256);
  EXPECT_NE(id, read(sweep(R"("workload.time_scale": [2, 1])")).sha256);
  EXPECT_NE(id, read(sweep(R"("workload.time_scale": [1, 3])")).sha256);
  EXPECT_NE(read(sweep(R"("seed": [1, 2], "workload.time_scale": [1, 2])")).sha256,
            read(sweep(R"("workload.time_scale": [1, 2], "seed": [1, 2])")).sha256);  // other numbers
  EXPECT_NE(id, read(sweep(parameters, R"("set": {"seed": 2})")).sha256);
  EXPECT_NE(id, read(sweep(parameters, R"("constraints": ["workload.time_scale < 2"])")).sha256);
  EXPECT_NE(id, read(sweep(parameters), quiet({"transfer.mode=push"})).sha256);
  ReplayOptions seeded = quiet();
  seeded.seed = 9;
  EXPECT_NE(id, read(sweep(parameters), seeded).sha256);

  // Files count by their bytes, wherever they lie.
  const auto with_trace = [](const std::string& bytes) {
    const Folder folder;
    folder.file("trace.jsonl", bytes);
    folder.file("scenario.json", R"({"model": "llama-3.1-8b", "pools": [{"role": "colocated", "gpu": "h200"}],
      "workload": {"trace": "trace.jsonl", "format": "mooncake"}})");
    const std::string file =
        folder.file("sweep.json", R"({"schema": "pdsim.sweep/1", "scenario": "scenario.json",
      "parameters": {"workload.time_scale": [1, 2]}})");
    return read_space(file, quiet()).sha256;
  };
  const std::string line = R"({"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]})";
  EXPECT_EQ(with_trace(line), with_trace(line));
  EXPECT_NE(with_trace(line), with_trace(line + "\n" + line));
}

// Files that a sweep names are relative to it, in its scenario as in its levels.
TEST(Space, FilesAreRelativeToTheSweep) {
  const Folder folder;
  folder.file("trace.jsonl", R"({"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]})");
  const std::string file = folder.file("sweep.json", R"({"schema": "pdsim.sweep/1",
    "scenario": {"model": "llama-3.1-8b", "pools": [{"role": "colocated", "gpu": "h200"}],
                 "workload": {"trace": "other.jsonl", "format": "mooncake"}},
    "parameters": {"workload.trace": ["trace.jsonl", "../x/trace.jsonl"]}})");
  const Space space = read_space(file, quiet());
  EXPECT_EQ(space.parameters[0].labels[0], "trace.jsonl");
  const RunSpec spec = space.spec_of(space.points[0]);
  TraceStore traces;
  EXPECT_EQ(traces.get(load_run(spec))->requests.size(), 1u);
  const std::string outside = std::filesystem::path(file).parent_path().parent_path() / "x/trace.jsonl";
  EXPECT_EQ(load_run(space.spec_of(space.points[1])).scenario.workload.trace, outside);
}

// A level that makes sense in company only is none of the file's errors; the points will tell.
TEST(Space, ALevelMayNeedCompany) {
  EXPECT_EQ(read(sweep(R"("deployment": {"options": {
      "one": {"pools": [{"name": "all", "role": "colocated", "instance": "p5en.48xlarge"}]},
      "two": {"pools": [{"name": "p", "role": "prefill", "instance": "p5en.48xlarge"},
                        {"name": "d", "role": "decode", "instance": "p5en.48xlarge"}]}}},
    "pools.d.replicas": [1, 2])",
                       R"("constraints": ["deployment == 'two' || pools.d.replicas == 1"])"))
                .points.size(),
            3u);
  // Contradicting fields are left to the points too: 8,192 sequences in steps of 4,096 tokens.
  EXPECT_EQ(read(sweep(R"("pools.decode.engine.max_num_seqs": [64, 8192],
                          "pools.decode.engine.max_num_batched_tokens": [4096, 16384])"))
                .points.size(),
            4u);
}

TEST(Space, OptionsComeBetweenTheFileAndItsParameters) {
  const Space space =
      read(sweep(R"("workload.time_scale": [2])", R"("set": {"seed": 5, "transfer.mode": "push"})"),
           quiet({"transfer.mode=pull"}));
  const Scenario scenario = load_run(space.spec_of(space.points[0])).scenario;
  EXPECT_EQ(scenario.seed, 5u);
  EXPECT_EQ(scenario.transfer.mode, TransferMode::pull);
  ReplayOptions seeded = quiet();
  seeded.seed = 9;
  const Space other = read(sweep(R"("workload.time_scale": [2])", R"("set": {"seed": 5})"), seeded);
  EXPECT_EQ(load_run(other.spec_of(other.points[0])).scenario.seed, 9u);
}

TEST(Space, AHundredThousandPointsAreReadAtOnce) {
  const Space space =
      read(sweep(R"("a": {"path": "seed", "from": 1, "to": 100, "steps": 100, "integer": true},
    "b": {"path": "workload.time_scale", "from": 1, "to": 2, "steps": 100},
    "c": {"path": "network.bandwidth_scale", "from": 1, "to": 2, "steps": 20})",
                 R"("constraints": ["a + b > 3 && c < 1.96"])"));
  EXPECT_GT(space.points.size(), 100'000u);
}

std::string error_of(const std::string& text, const ReplayOptions& options = quiet(),
                     std::uint64_t most = 1000) {
  try {
    const Space space = read(text, options, most);
    return "none: " + std::to_string(space.points.size()) + " points";
  } catch (const InputError& error) {
    return error.what();
  }
}

// One line that names the place, what stands there and what was expected.
TEST(Space, WhatIsWrongIsSaidWhereItStands) {
  const std::string rate = R"("rate": {"path": "workload.time_scale", "values": [1, 2]})";
  struct Case {
    std::string text;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"{", {"sweep.json:1: is not valid JSON"}},
      {"[]", {"sweep.json: expected an object"}},
      {R"({"schema": "pdsim.sweep/2"})",
       {"sweep.json: /schema: is \"pdsim.sweep/2\": expected 'pdsim.sweep/1'"}},
      {R"({"schema": "pdsim.sweep/1", "parameters": {"x": [1]}})",
       {"/scenario: is absent", "the path of a scenario"}},
      {sweep(rate, R"("titel": "x")"), {"/titel: is no key here (did you mean 'title'?)"}},
      {sweep(rate + "," + rate), {"'rate' is given twice"}},
      {sweep(""), {"/parameters: is {}: expected at least one"}},
      {sweep(R"("transfer.mode": [])"), {"/parameters/transfer.mode: has no level"}},
      {sweep(R"("transfer.mode": "push")"),
       {"/parameters/transfer.mode: is \"push\": expected a list of values"}},
      {sweep(R"("transfer.mode": ["push", "push"])"), {"/parameters/transfer.mode/1: push is given twice"}},
      {sweep(R"("x y": [1])"), {"/parameters/x y: expected a name of letters"}},
      {sweep(R"("x": {"path": "transfer..mode", "values": [1]})"),
       {"/parameters/x/path: 'transfer..mode' is no path"}},
      {sweep(R"("x": {"path": "seed"})"), {"/parameters/x: has no levels, expected \"values\""}},
      {sweep(R"("x": {"path": "seed", "paths": ["seed"], "values": [1]})"),
       {"expected either \"path\" or \"paths\""}},
      {sweep(R"("x": {"path": "seed", "values": [1], "from": 1})"),
       {"/parameters/x/from: is 1: expected none beside \"values\""}},
      {sweep(R"("x": {"path": "seed", "valeus": [1]})"),
       {"/parameters/x/valeus: is no key here (did you mean 'values'?)"}},
      {sweep(R"("x": {"path": "seed", "values": [[1]]})"),
       {"/parameters/x/values/0: is [1], expected a number"}},
      {sweep(R"("x": {"path": "seed", "from": 1, "to": 9})"),
       {"/parameters/x/steps: is absent: expected how many levels"}},
      {sweep(R"("x": {"path": "seed", "from": 1, "to": 9, "steps": 1})"), {"/parameters/x/steps: is 1"}},
      {sweep(R"("x": {"path": "seed", "from": 1, "to": 1, "steps": 2})"),
       {"/parameters/x/to: is 1: expected another number"}},
      {sweep(R"("x": {"path": "seed", "from": 0, "to": 9, "steps": 3, "scale": "log"})"),
       {"/parameters/x/from: is 0: expected a number above 0"}},
      {sweep(R"("x": {"path": "seed", "from": 1.5, "to": 9, "steps": 3, "integer": true})"),
       {"/parameters/x/from: is 1.5: expected an integer"}},
      {sweep(R"("x": {"path": "seed", "from": 1, "to": 9, "steps": 3, "scale": "logarithmic"})"),
       {"expected linear or log"}},
      // paths and values, with the loader's own words
      {sweep(R"("transfer.mod": ["push"])"),
       {"/parameters/transfer.mod: at push: /transfer/mod: unknown key (did you mean 'mode'?)"}},
      {sweep(R"("pools.decod.replicas": [1])"),
       {"/parameters/pools.decod.replicas: at 1: pools has no 'decod'", "(did you mean 'decode'?)"}},
      {sweep(R"("transfer.mode": ["pull", "psuh"])"),
       {"at psuh: /transfer/mode: is \"psuh\", expected one of pull, push", "(did you mean 'push'?)"}},
      {sweep(R"("transfer.mode": [1])"), {"at 1: /transfer/mode: is 1, expected one of"}},
      {sweep(R"("pools.decode.engine.block_size": [16, 24])"),
       {"at 24: /pools/1/engine/block_size: is 24, expected a power of two"}},
      {sweep(R"("workload.time_scale": {"from": 0, "to": 2, "steps": 3})"),
       {"at 0: /workload/time_scale: is 0"}},
      {sweep(R"("d": {"options": {"a": {"transfer.mode": "push"}, "b": {"transfer.mdoe": "pull"}}})"),
       {"/parameters/d: at b: /transfer/mdoe: unknown key"}},
      {sweep(R"("d": {"options": {}})"), {"/parameters/d/options: is {}: expected at least one name"}},
      {sweep(R"("generate.thinktime": [1])"),
       {"/parameters/generate.thinktime: at 1: generate: /thinktime: is no key here",
        "did you mean 'think_time_s'?"}},
      {sweep(R"("generate.rate": ["fast"])"),
       {"/parameters/generate.rate: at fast: generate: /rate: is \"fast\""}},
      {sweep(R"("generate.rate": [1], "generate.rate.mean": [1])"), {"/parameters/generate.rate.mean"}},
      {sweep(R"("generate.rate": [1])", R"("generate": {"reqests": 5})"),
       {"/generate/reqests: is no key here (did you mean 'requests'?)"}},
      {sweep(rate, R"("set": {"transfer.mod": "push"})"), {"/set: /transfer/mod: unknown key"}},
      // what undoes something else
      {sweep(rate + R"(, "workload.time_scale": [3])"),
       {"/parameters/workload.time_scale: sets workload.time_scale, as 'rate' does"}},
      {sweep(
           rate +
           R"(, "d": {"options": {"a": {"workload": {"synthetic": {"requests": 1, "rate": 1, "isl": 1, "osl": 1}}}}})"),
       {"/parameters/d: sets workload, and with it workload.time_scale of 'rate' before it"}},
      {sweep(R"("x": {"paths": ["seed", "seed"], "values": [1]})"),
       {"/parameters/x/paths: 'seed' is given twice"}},
      {sweep(rate, R"("set": {"workload.time_scale": 3})"),
       {"/set: sets workload.time_scale, which the parameter 'rate' varies"}},
      {sweep(R"("generate.rate": [1], "workload.trace": ["x"])"), {"this sweep generates its traces"}},
      // constraints
      {sweep(rate, R"("constraints": ["rte < 2"])"),
       {"/constraints/0: there is no parameter 'rte' (did you mean 'rate'?)"}},
      {sweep(rate, R"("constraints": ["rate > 0", "rate <"])"),
       {"/constraints/1: 'rate <' is not understood", "expected a condition such as"}},
      {sweep(rate, R"("constraints": ["(rate > 1"])"), {"/constraints/0: '(rate > 1' is not understood"}},
      {sweep(rate, R"("constraints": ["rate = 2"])"),
       {"/constraints/0: 'rate = 2' has a single '=', expected '=='"}},
      {sweep(rate, R"("constraints": ["rate + 2"])"),
       {"/constraints/0: 'rate + 2' is 3 at rate 1, expected a condition"}},
      {sweep(rate, R"("constraints": ["rate > 1, rate < 3"])"), {"/constraints/0", "is not understood"}},
      {sweep(rate, R"("constraints": [""])"), {"/constraints/0: '' is not understood"}},
      {sweep(rate, R"("constraints": [3])"), {"/constraints/0: is 3, expected a condition in quotes"}},
      {sweep(rate, R"("constraints": ["rate == 'pull"])"), {"has a quote that does not end"}},
      {sweep(R"("transfer.mode": ["pull", "push"])", R"("constraints": ["transfer.mode == 'psuh'"])"),
       {"/constraints/0: no parameter has the level 'psuh' (did you mean 'push'?)"}},
      {sweep(R"("transfer.mode": ["pull", "push"])", R"("constraints": ["transfer.mode == push"])"),
       {"/constraints/0: there is no parameter 'push' (a level is written 'push' in quotes)"}},
      {sweep(rate, R"("constraints": ["rate > 5"])"), {"/constraints: exclude all 2 combinations"}},
      // how many
      {sweep(
           R"("a": {"path": "seed", "from": 1, "to": 1000, "steps": 1000}, "b": {"path": "workload.time_scale", "from": 1, "to": 2, "steps": 1000})"),
       {"/parameters: make a grid of 1000 x 1000 = 1000000 combinations, expected at most 1000",
        "latin_hypercube"}},
      {sweep(
           R"("a": {"path": "seed", "from": 1, "to": 1000, "steps": 1000}, "b": {"path": "workload.time_scale", "from": 1, "to": 2, "steps": 10})",
           R"("constraints": ["a > 1"])"),
       {"/parameters: make more than 1000 points"}},
      {sweep(rate, R"("sample": {"method": "random"})"),
       {"/sample/method: is \"random\": expected grid or latin_hypercube"}},
      {sweep(rate, R"("sample": {"method": "latin_hypercube"})"), {"/sample/points: is absent"}},
      {sweep(rate, R"("sample": {"method": "latin_hypercube", "points": 5000})"),
       {"/sample/points: is 5000: expected at most 1000"}},
      {sweep(rate, R"("sample": {"method": "grid", "points": 5})"), {"/sample/points: is no key here"}},
      // objectives and contrasts
      {sweep(rate, R"("objectives": [])"), {"/objectives: is []: expected at least one"}},
      {sweep(rate, R"("objectives": ["godput"])"),
       {"/objectives/0: 'godput' is no objective (did you mean 'goodput'?)"}},
      {sweep(rate, R"("objectives": ["goodput", "max:goodput.requests_per_s"])"),
       {"/objectives/1", "is given twice"}},
      {sweep(rate, R"("contrasts": [{"parameter": "rat"}])"),
       {"/contrasts/0/parameter: there is no parameter 'rat' (did you mean 'rate'?)"}},
      {sweep(R"("seed": [1])", R"("contrasts": [{"parameter": "seed"}])"),
       {"/contrasts/0/parameter: is \"seed\": expected one with two levels"}},
  };
  for (const Case& c : cases) {
    const std::string error = error_of(c.text);
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    for (const std::string& part : c.parts)
      EXPECT_NE(error.find(part), std::string::npos) << error << "\n" << part;
  }
}

// Ten axes of a hundred levels are 10^20 combinations: no count overflows, nothing hangs.
TEST(Space, AbsurdlyManyAreCountedNotMade) {
  std::string parameters;
  for (const char* knob : {"requests", "rate", "zipf", "turns", "system_prompts", "burstiness",
                           "think_time_s", "first_token_ms", "output_token_ms", "stamp_grid_ms"}) {
    parameters += std::string(parameters.empty() ? "" : ", ") + "\"generate." + knob +
                  R"(": {"from": 1, "to": 100, "steps": 100})";
  }
  EXPECT_NE(error_of(sweep(parameters)).find("= 1.0e+20 combinations"), std::string::npos)
      << error_of(sweep(parameters));
  EXPECT_NE(
      error_of(sweep(parameters, R"("constraints": ["generate.rate < 2"])")).find("1.0e+20 combinations"),
      std::string::npos);
}

TEST(Space, OptionsThatWouldDoNothingAreRefused) {
  const std::string rate = R"("rate": {"path": "workload.time_scale", "values": [1, 2]})";
  EXPECT_NE(error_of(sweep(rate), quiet({"workload.time_scale=3"}))
                .find("--set: sets workload.time_scale, which the "
                      "parameter 'rate' varies"),
            std::string::npos);
  EXPECT_NE(error_of(sweep(rate), quiet({"transfer.mod=push"})).find("--set: /transfer/mod: unknown key"),
            std::string::npos);
  ReplayOptions options = quiet();
  options.trace = "x.jsonl";
  EXPECT_NE(
      error_of(sweep(R"("workload.synthetic.isl": [5])"), options).find("--trace: sets what the parameter"),
      std::string::npos);
  EXPECT_NE(
      error_of(sweep(R"("generate.rate": [5])"), options).find("--trace: is given, but this sweep generates"),
      std::string::npos);
  options = quiet();
  options.seed = 3;
  EXPECT_NE(error_of(sweep(R"("seed": [1, 2])"), options).find("--seed: sets seed"), std::string::npos);
  options = quiet();
  options.prices = "-";
  EXPECT_NE(error_of(sweep(rate), options).find("--prices: is '-'"), std::string::npos);
  try {
    read_space("no-such-sweep.json", quiet());
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "no-such-sweep.json: cannot be read; expected a sweep file (JSON)");
  }
}

// Every point of every sweep that ships is a scenario that can be loaded, and says what it asks.
TEST(Space, ShippedSweepsCanBeRun) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(PDSIM_SOURCE_DIR "/scenarios/sweeps")) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    const Space space = read_space(entry.path().string(), quiet());
    EXPECT_GT(space.points.size(), 0u) << entry.path();
    EXPECT_LT(space.points.size(), 2000u) << entry.path();
    EXPECT_EQ(space.name, entry.path().stem()) << entry.path();
    EXPECT_FALSE(space.title.empty()) << entry.path();
    for (std::size_t i = 0; i < space.points.size(); i += 7) {
      EXPECT_NO_THROW(load_run(space.spec_of(space.points[i]))) << entry.path() << ", point " << i;
    }
  }
  EXPECT_GE(files, 4u);
}

Space shipped(const std::string& name) {
  return read_space(fmt::format("{}/scenarios/sweeps/{}.json", PDSIM_SOURCE_DIR, name), quiet());
}

// An address that the router keeps for longer than decode keeps the KV is a request that fails, and a setting
// that fails the slow requests looks fast. vLLM's own 450 s of 480 s are 15/16; two margins less is what is
// never declined for want of time.
TEST(Space, NoShippedSweepLetsTheRouterOutliveTheKv) {
  const Space space = shipped("ttl-threshold-think");
  std::set<double> ttls;
  for (const SweepPoint& point : space.points) {
    const Scenario s = load_run(space.spec_of(point)).scenario;
    const double ttl = to_seconds(s.transfer.decoder_kv_blocks_ttl);
    const double margin = to_seconds(s.transfer.expiry_margin);
    EXPECT_DOUBLE_EQ(to_seconds(s.router.session_kv_ttl), ttl - std::max(ttl / 16, 2 * margin)) << ttl;
    ttls.insert(ttl);
  }
  EXPECT_EQ(ttls.size(), 4u);
}

// Splits are compared at one bill: every point has all eight GPUs of one instance.
TEST(Space, TheSplitsThatShipBillTheSameInstance) {
  const Space space = shipped("xpyd-rate");
  for (const SweepPoint& point : space.points) {
    const Scenario s = load_run(space.spec_of(point)).scenario;
    std::set<std::int32_t> gpus;
    for (const PlacementConfig& place : s.placement_list) {
      EXPECT_EQ(place.node, 0);
      gpus.insert(place.gpus.begin(), place.gpus.end());
    }
    EXPECT_EQ(gpus.size(), 8u);
    EXPECT_EQ(s.pools[0].replicas + s.pools[1].replicas, 8);
    const std::string& split = space.parameters[0].labels[point.levels[0]];
    const bool colocated = s.pools[0].role == Role::colocated && s.pools[1].role == Role::colocated;
    EXPECT_EQ(split,
              colocated ? "colocated" : fmt::format("{}p{}d", s.pools[0].replicas, s.pools[1].replicas));
  }
}

}  // namespace
}  // namespace pdsim
