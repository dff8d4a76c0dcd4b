// Step time against what it is made of.
//
//   time = sum over operators, from tables: equal to evaluating each operator (breakdown), rounded up.
//   It does not fall when context grows, nor when tokens double; a prompt in chunks costs at least the
//   prompt; asynchronous scheduling hides the host's work but for a floor.
//   Work: 2 flops per weight and token; weights once a step, 131,072 bytes of KV per token of context.
//   Composed for Llama-3.1-70B, step time gives the served time per output token:
//   TPOT = decode step at the mean context + concurrency x prefill step / output length.
#include "models/step_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

StepModel model_of(const std::string& name, Parallelism parallelism, Dtype weights,
                   const std::string& gpu = "h200", bool async_scheduling = true) {
  return {load_model(name),  parallelism,       weights, Dtype::bf16,
          find_gpu(gpu, ""), load_profile(gpu), 16384,   async_scheduling};
}

StepShape decode(std::int32_t batch, std::int64_t context, std::int64_t window = 128) {
  StepShape shape;
  shape.decode_requests = shape.sampled_requests = batch;
  shape.decode_context = batch * context;
  shape.decode_window_context = batch * std::min(context, window);
  return shape;
}

/// One prompt's n tokens after p.
StepShape prefill(std::int64_t n, std::int64_t p = 0) {
  StepShape shape;
  shape.prefill_requests = shape.sampled_requests = 1;
  shape.prefill_tokens = static_cast<std::int32_t>(n);
  shape.prefill_pairs = n * p + n * (n + 1) / 2;
  shape.prefill_context = p + n;
  shape.prefill_window_pairs = std::min<std::int64_t>(shape.prefill_pairs, 128 * n);
  shape.prefill_window_context = std::min<std::int64_t>(p, 127) + n;
  return shape;
}

TEST(GraphSize, IsVllmsList) {
  for (const auto& [tokens, size] : std::map<int, int>{{1, 1},
                                                       {2, 2},
                                                       {3, 4},
                                                       {4, 4},
                                                       {5, 8},
                                                       {8, 8},
                                                       {9, 16},
                                                       {250, 256},
                                                       {256, 256},
                                                       {257, 272},
                                                       {512, 512},
                                                       {513, 513},
                                                       {9000, 9000}}) {
    EXPECT_EQ(graph_size(tokens), size);
  }
}

TEST(StepModel, TablesEqualTheOperators) {
  for (const char* name : {"llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "glm-5", "qwen3.5-397b-a17b"}) {
    const ModelSpec spec = load_model(name);
    const StepModel model = model_of(name, {8, 1, 1, 1}, spec.weights_dtype);
    for (StepShape shape :
         {decode(1, 1), decode(7, 300), decode(300, 4000), prefill(1), prefill(2048, 512)}) {
      for (int mixed = 0; mixed < 2; ++mixed) {
        double us = 0;
        for (const OpTime& op : model.breakdown(shape)) us += op.us;
        EXPECT_NEAR(static_cast<double>(model.time(shape).ns), us * 1e3, 2) << name;
        shape.prefill_requests = 1;
        shape.prefill_tokens += 700;
        shape.prefill_pairs += 700 * 701 / 2;
        shape.prefill_context += 700;
        shape.prefill_window_pairs += 700 * 128;
        shape.prefill_window_context += 700;
      }
    }
  }
}

TEST(StepModel, EmptyStepCostsNothing) {
  const StepModel model = model_of("llama-3.1-8b", {}, Dtype::bf16);
  EXPECT_EQ(model.time({}).ns, 0);
  EXPECT_TRUE(model.breakdown({}).empty());
}

TEST(StepModel, SameInputsSameTimes) {
  const StepModel a = model_of("qwen3-32b", {4, 1, 1, 1}, Dtype::bf16);
  const StepModel b = model_of("qwen3-32b", {4, 1, 1, 1}, Dtype::bf16);
  for (std::int32_t batch = 1; batch < 300; batch += 7) {
    EXPECT_EQ(a.time(decode(batch, 1000)).ns, b.time(decode(batch, 1000)).ns);
  }
}

TEST(StepModel, RisesWithContextAndTokens) {
  for (const char* name : {"llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "glm-5"}) {
    const StepModel model = model_of(name, {8, 1, 1, 1}, load_model(name).weights_dtype);
    Nanos before = 0;
    for (std::int64_t context = 1; context < 120'000; context = context * 5 / 4 + 1) {
      const Nanos ns = model.time(decode(32, context)).ns;
      EXPECT_GE(ns, before) << name << " context " << context;
      before = ns;
    }
    before = 0;
    for (std::int32_t batch = 1; batch <= 1024; batch *= 2) {
      const Nanos ns = model.time(decode(batch, 1000)).ns;
      EXPECT_GE(ns, before) << name << " batch " << batch;
      before = ns;
    }
    before = 0;
    for (std::int64_t tokens = 16; tokens <= 16384; tokens *= 2) {
      const Nanos ns = model.time(prefill(tokens)).ns;
      EXPECT_GE(ns, before) << name << " tokens " << tokens;
      before = ns;
    }
  }
}

TEST(StepModel, ChunksCostAtLeastThePrompt) {
  const StepModel model = model_of("llama-3.1-70b", {4, 1, 1, 1}, Dtype::fp8);
  for (const std::int64_t prompt : {4096, 8192, 16384}) {
    const Nanos whole = model.time(prefill(prompt)).ns;
    for (const std::int64_t chunk : {256, 512, 2048}) {
      Nanos sum = 0;
      std::int64_t pairs = 0;
      for (std::int64_t done = 0; done < prompt; done += chunk) {
        sum += model.time(prefill(chunk, done)).ns;
        pairs += prefill(chunk, done).prefill_pairs;
      }
      EXPECT_EQ(pairs, prefill(prompt).prefill_pairs);
      EXPECT_GE(sum, whole) << prompt << " in chunks of " << chunk;
    }
  }
}

TEST(StepModel, HostWorkIsAFloorOrComesOnTop) {
  constexpr Nanos kHost = 640'000;
  const StepModel async = model_of("qwen3-8b", {8, 1, 1, 1}, Dtype::bf16);
  const StepModel sync = model_of("qwen3-8b", {8, 1, 1, 1}, Dtype::bf16, "h200", false);
  const Nanos large = async.time(decode(256, 8000)).ns;
  EXPECT_GT(large, kHost);
  EXPECT_EQ(sync.time(decode(256, 8000)).ns, large + kHost);
  EXPECT_GE(async.time(decode(1, 1)).ns, kHost);
}

TEST(StepModel, ExtrapolationIsFlaggedOutsideTheRange) {
  const StepModel model = model_of("llama-3.1-8b", {}, Dtype::bf16);
  EXPECT_FALSE(model.time(decode(16, 131'072)).extrapolated);
  EXPECT_TRUE(model.time(decode(16, 131'073)).extrapolated);  // the mean row is longer than any measured one
  EXPECT_FALSE(model.time(prefill(8192, 8192)).extrapolated);
  EXPECT_TRUE(model.time(prefill(8192, 80'000)).extrapolated);
  for (const OpTime& op : model.breakdown(decode(16, 1000))) {
    EXPECT_EQ(op.extrapolated, op.name == "lm_head") << op.name;  // 128,256 columns: tables end at 65,536
  }
  // A profile of another GPU is never "measured".
  const StepModel other(load_model("llama-3.1-8b"), {}, Dtype::bf16, Dtype::bf16, find_gpu("h100", ""),
                        load_profile("h200"), 64);
  EXPECT_TRUE(other.time(decode(16, 1000)).extrapolated);
}

TEST(StepModel, NoCurveIsAnError) {
  Profile profile = load_profile("h200");
  std::erase_if(profile.curves, [](const Curve& curve) { return curve.op == CurveOp::moe; });
  EXPECT_THROW(StepModel(load_model("mixtral-8x7b"), {2, 1, 1, 1}, Dtype::bf16, Dtype::bf16,
                         find_gpu("h200", ""), profile, 64),
               InputError);
}

TEST(StepModel, PipelineStagesRunInTurn) {
  const StepModel one = model_of("llama-3.1-70b", {4, 1, 1, 1}, Dtype::bf16);
  const StepModel two = model_of("llama-3.1-70b", {4, 2, 1, 1}, Dtype::bf16);
  const StepModel three = model_of("llama-3.1-70b", {4, 3, 1, 1}, Dtype::bf16);  // 27 of 80 layers: 81 in all
  const double a = static_cast<double>(one.time(decode(16, 1000)).ns);
  const double b = static_cast<double>(two.time(decode(16, 1000)).ns);
  const double c = static_cast<double>(three.time(decode(16, 1000)).ns);
  EXPECT_NEAR(b - a, 10'000 + 16 * 8192 * 2 / 450.0, 20);  // one send over NVLink, 80 layers as before
  EXPECT_GT(c, a * 81 / 80 * 0.99);
  EXPECT_LT(c, a * 81 / 80 * 1.01 + 25'000);
}

TEST(StepModel, WorkOfADenseModel) {
  const StepModel model = model_of("llama-3.1-8b", {}, Dtype::bf16);
  const ModelSpec spec = load_model("llama-3.1-8b");
  StepTotals totals;
  totals.steps = totals.sampling_steps = 10;
  totals.decode_requests = 10 * 32;
  totals.sampled_requests = 10 * 32;
  totals.decode_context = 10 * 32 * 2000;
  const Work work = model.work(totals);
  const double matrices = flops_per_token(spec) * 320;
  const double attention = 4.0 * 32 * 128 * 32 * 640'000;  // heads, head size, layers, pairs
  EXPECT_NEAR(work.flops, matrices + attention, 1e-6 * work.flops);
  // Ten readings of 8.03 B weights less the embedding table, and the context's KV; activations are small.
  const double weights = 2.0 * static_cast<double>(parameter_count(spec) - spec.vocab * spec.hidden);
  const double bytes = 10 * weights + 131'072.0 * 640'000;
  EXPECT_GT(work.hbm_bytes, bytes);
  EXPECT_LT(work.hbm_bytes, bytes * 1.02);
  totals.steps = 0;
  EXPECT_EQ(model.work(totals).flops, 0);
}

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::stringstream stream(line);
  for (std::string field; std::getline(stream, field, ',');) fields.push_back(field);
  return fields;
}

TEST(StepModel, ComposesToServedTpot) {
  const std::filesystem::path file(PDSIM_SOURCE_DIR "/../shared/validation/e2e.csv");
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not here";
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  const std::vector<std::string> header = fields_of(line);
  const auto column = [&](const std::string& name) {
    return static_cast<std::size_t>(std::find(header.begin(), header.end(), name) - header.begin());
  };
  for (const auto& [gpu, bound] : std::map<std::string, double>{{"h200", 0.08}, {"h100", 0.08}}) {
    std::map<int, StepModel> models;
    std::vector<double> errors;
    in.clear();
    in.seekg(0);
    while (std::getline(in, line)) {
      const std::vector<std::string> row = fields_of(line);
      if (row[column("model")] != "meta-llama/Llama-3.1-70B" || row[column("gpu")] != gpu + "_sxm" ||
          row[column("engine")] != "vllm" || row[column("mode")] != "agg") {
        continue;
      }
      const int tp = static_cast<int>(std::stod(row[column("tp")]));
      const auto concurrency = static_cast<std::int32_t>(std::stod(row[column("concurrency")]));
      // Lengths vary evenly from 0.8 to 1.0 of the nominal ones.
      const double isl = 0.9 * std::stod(row[column("isl")]), osl = 0.9 * std::stod(row[column("osl")]);
      if (!models.contains(tp)) models.emplace(tp, model_of("llama-3.1-70b", {tp, 1, 1, 1}, Dtype::fp8, gpu));
      const StepModel& model = models.at(tp);
      const double step = to_ms(model.time(decode(concurrency, std::llround(isl + osl / 2))).ns);
      const double prompt = to_ms(model.time(prefill(std::llround(isl))).ns);
      errors.push_back(std::abs((step + concurrency * prompt / osl) / std::stod(row[column("tpot_ms")]) - 1));
    }
    ASSERT_GE(errors.size(), 40u);
    std::sort(errors.begin(), errors.end());
    RecordProperty(gpu + "_median_ape", std::to_string(errors[errors.size() / 2]));
    EXPECT_LT(errors[errors.size() / 2], bound) << gpu;
    EXPECT_LT(errors[errors.size() * 9 / 10], 0.15) << gpu;
  }
}

}  // namespace
}  // namespace pdsim
