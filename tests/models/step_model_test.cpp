// Step time against what it is made of.
//
//   time = sum over operators, from tables: equal to evaluating each operator (breakdown), rounded up.
//   It does not fall when context grows, nor when tokens double; a prompt in chunks costs at least the
//   prompt.
//   Beside kernels that take g on the GPU (models/overheads.hpp):
//     asynchronous   max(g + gpu, step + request x sequences + layers x launch)
//     synchronous    max(g, layers x launch) + gpu + step + request x sequences
//   with `launch` by how the step's kernels are launched, and `rank` in g on each collective.
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
                   const std::string& gpu = "h200", StepOptions options = {}) {
  options.max_num_batched_tokens = 16384;
  return {load_model(name), parallelism, weights, Dtype::bf16, find_gpu(gpu, ""), load_profile(gpu), options};
}

/// Unlike figures, so that each shows.
Overheads some_overheads() {
  Overheads o;
  o.step = 640'000;
  o.request = 5'000;
  o.gpu = 70'000;
  o.rank = 3'000;
  o.launch[0] = 2'000;
  o.launch[1] = 40'000;
  o.launch[2] = 120'000;
  return o;
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
  EXPECT_EQ(graph_size(1990, 2048), 2000);
  EXPECT_EQ(graph_size(497, 500), 500);  // the largest is captured whatever the steps
  EXPECT_EQ(graph_size(501, 500), 501);
  EXPECT_EQ(graph_size(100, 64), 100);
}

TEST(StepModel, TablesEqualTheOperators) {
  for (const char* name : {"llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "glm-5", "qwen3.5-397b-a17b"}) {
    const ModelSpec spec = load_model(name);
    for (const bool async : {true, false}) {
      StepOptions options;
      options.async_scheduling = async;
      options.overheads = some_overheads();
      const StepModel model = model_of(name, {8, 1, 1, 1}, spec.weights_dtype, "h200", options);
      for (StepShape shape :
           {decode(1, 1), decode(7, 300), decode(300, 4000), prefill(1), prefill(2048, 512)}) {
        for (int mixed = 0; mixed < 2; ++mixed) {
          double us = 0;
          for (const OpTime& op : model.breakdown(shape)) us += op.us;
          EXPECT_NEAR(static_cast<double>(model.time(shape).ns), us * 1e3, 2) << name << " async " << async;
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

// A table of launches one by one shows its host's floor and not the kernel below it. What a product takes
// there is bounded by what one of more rows takes: nothing else is known.
TEST(StepModel, ProductsBelowAHostsFloorAreBoundedByLargerOnes) {
  const Profile profile = load_profile("h200");
  const Curve& curve = *find_curve(profile, CurveOp::gemm, Dtype::fp8_block, "test").curve;
  for (const double n : {2112.0, 4096.0, 7168.0}) {
    const auto ns = [&](double m) {
      return gemm_time(curve, profile.sms, {m, n, 7168, Dtype::fp8_block}).ns;
    };
    ASSERT_LT(ns(64), gemm_floor(curve.at(64), 64));
    for (const double m : {1, 8, 16, 31, 32, 48, 64}) {
      for (const double more : {65, 128, 256}) EXPECT_LE(ns(m), ns(more)) << n << " " << m << " " << more;
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
  StepOptions options;
  options.overheads.step = kHost;
  const StepModel async = model_of("qwen3-8b", {8, 1, 1, 1}, Dtype::bf16, "h200", options);
  options.async_scheduling = false;
  const StepModel sync = model_of("qwen3-8b", {8, 1, 1, 1}, Dtype::bf16, "h200", options);
  const Nanos large = async.time(decode(256, 8000)).ns;
  EXPECT_GT(large, kHost);
  EXPECT_EQ(sync.time(decode(256, 8000)).ns, large + kHost);
  EXPECT_GE(async.time(decode(1, 1)).ns, kHost);
}

// A prompt's chunk beside decode rows.
StepShape mixed(std::int32_t batch, std::int64_t context, std::int64_t chunk) {
  StepShape shape = decode(batch, context), rows = prefill(chunk);
  shape.prefill_requests = rows.prefill_requests;
  shape.sampled_requests += rows.sampled_requests;
  shape.prefill_tokens = rows.prefill_tokens;
  shape.prefill_pairs = rows.prefill_pairs;
  shape.prefill_context = rows.prefill_context;
  shape.prefill_window_pairs = rows.prefill_window_pairs;
  shape.prefill_window_context = rows.prefill_window_context;
  return shape;
}

// Both formulas at the head of this file, on steps of which each term of max is the larger one somewhere.
// Full graphs serve decode-only steps, piecewise ones steps with prefill, none more than max_graph tokens.
TEST(StepModel, OverheadsAreTheirFormula) {
  StepOptions bare;
  bare.max_graph = 300;
  const StepModel kernels = model_of("llama-3.1-8b", {8, 1, 1, 1}, Dtype::bf16, "h200", bare);
  Overheads o = some_overheads();
  o.rank = 0;  // it is in g
  constexpr double kLayers = 32;
  std::map<std::string, int> larger;
  for (const Launch graphs : {Launch::full, Launch::piecewise, Launch::none}) {
    for (const bool async : {true, false}) {
      StepOptions options = bare;
      options.overheads = o;
      options.graphs = graphs;
      options.async_scheduling = async;
      const StepModel model = model_of("llama-3.1-8b", {8, 1, 1, 1}, Dtype::bf16, "h200", options);
      const struct {
        StepShape shape;
        Launch most;  ///< what its kernels can be launched by at best
      } cases[] = {{decode(1, 100), Launch::full},      {decode(300, 8000), Launch::full},
                   {decode(301, 8000), Launch::none},   {mixed(40, 100, 260), Launch::piecewise},
                   {mixed(40, 100, 261), Launch::none}, {prefill(16), Launch::piecewise},
                   {prefill(16000), Launch::none}};
      for (const auto& [shape, most] : cases) {
        const Launch how = std::max(most, graphs);  // in the order of the enum
        const double g = static_cast<double>(kernels.time(shape).ns);
        const double host = o.step + o.request * (shape.decode_requests + shape.prefill_requests);
        const double launch = kLayers * o.launch[static_cast<std::size_t>(how)];
        const double expected =
            async ? std::max(g + o.gpu, host + launch) : std::max(g, launch) + o.gpu + host;
        EXPECT_NEAR(static_cast<double>(model.time(shape).ns), expected, 2)
            << shape.decode_requests << " and " << shape.prefill_tokens << " tokens, async " << async;
        ++larger[async ? (g + o.gpu > host + launch ? "gpu" : "host") : (g > launch ? "kernels" : "launch")];
      }
    }
  }
  for (const char* term : {"gpu", "host", "kernels", "launch"}) EXPECT_GT(larger[term], 0) << term;
}

// Every collective waits `rank`: on the GPU, so that it counts in both schedules. A layer of a dense model
// has two; the embeddings' sum and the gathering of logits come once, the latter where any are sampled.
// Fused with the norm (Hopper at TP 8: up to 1 MiB, 128 tokens of 8 KiB) an all-reduce does not wait.
TEST(StepModel, RanksWaitOnEachCollective) {
  StepOptions options;
  options.overheads.rank = 3'000;
  options.fuse_allreduce_rms = false;
  for (const bool async : {true, false}) {
    options.async_scheduling = async;
    const auto more = [&](std::int32_t tensor, const StepShape& shape) {
      const Parallelism cut{tensor, 1, 1, 1};
      StepOptions at_once = options;
      at_once.overheads.rank = 0;
      return model_of("llama-3.1-8b", cut, Dtype::bf16, "h200", options).time(shape).ns -
             model_of("llama-3.1-8b", cut, Dtype::bf16, "h200", at_once).time(shape).ns;
    };
    EXPECT_EQ(more(1, decode(8, 1000)), 0);
    for (const std::int32_t tensor : {2, 8}) {
      EXPECT_NEAR(static_cast<double>(more(tensor, decode(8, 1000))), 3'000 * (2 * 32 + 2), 1);
      StepShape chunk = prefill(4096);
      chunk.sampled_requests = 0;
      EXPECT_NEAR(static_cast<double>(more(tensor, chunk)), 3'000 * (2 * 32 + 1), 1);
    }
    options.fuse_allreduce_rms = true;
    StepShape chunk = prefill(128);
    chunk.sampled_requests = 0;
    EXPECT_EQ(more(8, chunk), 0);
    chunk = prefill(129);
    chunk.sampled_requests = 0;
    EXPECT_NEAR(static_cast<double>(more(8, chunk)), 3'000 * (2 * 32 + 1), 1);
    options.fuse_allreduce_rms = false;
  }
}

// A profile with two kernels of an operator, the second twice as slow and special: a model takes the first,
// or the one that it is told to, and then as if there were no other.
TEST(StepModel, KernelsAreChosenByName) {
  const Profile shipped = load_profile("h200");
  const auto is = [](const Curve& curve, std::string_view op) { return name(curve.op).starts_with(op); };
  const auto slow_of = [](Curve curve) {
    curve.kernel = "slow twin";
    for (Coefficients& regime : curve.regimes) {
      regime.launch_ns *= 2;
      regime.flops_per_ns /= 2;
      regime.bytes_per_ns /= 2;
    }
    return curve;
  };
  const auto model = [](const char* name, const Profile& profile, const StepOptions& options) {
    return StepModel(load_model(name), {2, 1, 1, 1}, Dtype::bf16, Dtype::bf16, find_gpu("h200", ""), profile,
                     options);
  };
  for (const auto& [op, half] : {std::pair<std::string, std::string>{"moe", "moe"},
                                 {"attention", "attention-prefill"},
                                 {"gemm", "gemm"}}) {
    const Profile& fast = shipped;
    Profile both = shipped, slow = shipped, mix = shipped;
    for (Curve& curve : slow.curves) {
      if (!is(curve, op)) continue;
      curve = slow_of(curve);
      both.curves.push_back(curve);
      both.curves.back().special = true;
    }
    for (Curve& curve : mix.curves) {
      if (is(curve, half)) curve = slow_of(curve);
    }
    const auto chosen = [&](const std::string& operation, const std::string& kernel) {
      StepOptions options;
      options.kernels[operation] = kernel;
      return model("mixtral-8x7b", both, options);
    };
    const StepModel first = model("mixtral-8x7b", both, {}), twin = chosen(op, "twin"),
                    part = chosen(half, "twin");
    const StepModel as_first = model("mixtral-8x7b", fast, {}), as_twin = model("mixtral-8x7b", slow, {}),
                    as_part = model("mixtral-8x7b", mix, {});
    for (const StepShape& shape : {decode(4, 6000), decode(100, 2000), prefill(4000)}) {
      EXPECT_EQ(first.time(shape).ns, as_first.time(shape).ns) << op;
      EXPECT_EQ(twin.time(shape).ns, as_twin.time(shape).ns) << op;
      EXPECT_EQ(part.time(shape).ns, as_part.time(shape).ns) << half;
      EXPECT_GT(twin.time(shape).ns, first.time(shape).ns) << op;
    }
  }
  // None of that name: the message names the profile, what was asked for and what there is.
  StepOptions options;
  options.kernels["moe"] = "no such kernel";
  try {
    model("mixtral-8x7b", shipped, options);
    FAIL();
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("profile 'h200' has no moe kernel with 'no such kernel' in its name"),
              std::string::npos)
        << text;
    int kernels = 0;
    for (const Curve& curve : shipped.curves) {
      if (!is(curve, "moe")) continue;
      ++kernels;
      EXPECT_NE(text.find(curve.kernel), std::string::npos) << text;
    }
    EXPECT_GT(kernels, 0);
  }
}

double us_of(const StepModel& model, const StepShape& shape, std::string_view name) {
  double us = 0;
  for (const OpTime& op : model.breakdown(shape)) us += op.name == name ? op.us : 0;
  return us;
}

// A router in 32 bits: 2 m n k operations a layer take at least as long as the GPU's 32-bit units need,
// unless they may go to the tensor cores, which are far faster.
TEST(StepModel, ARouterIn32BitsGoesWithoutTensorCores) {
  const ModelSpec spec = load_model("minimax-m2");
  ASSERT_TRUE(spec.fp32_router);
  StepOptions options;
  options.tf32 = true;
  const StepModel exact = model_of("minimax-m2", {4, 1, 1, 1}, spec.weights_dtype),
                  tf32 = model_of("minimax-m2", {4, 1, 1, 1}, spec.weights_dtype, "h200", options);
  constexpr double kTokens = 8192;
  const StepShape shape = prefill(static_cast<std::int64_t>(kTokens));
  const double flops =
      2 * kTokens * spec.experts * static_cast<double>(spec.hidden) * static_cast<double>(spec.layers.size());
  const double least_us = flops / (find_gpu("h200", "").fp32_tflops * 1e6);
  EXPECT_GT(us_of(exact, shape, "router"), least_us);
  EXPECT_LT(us_of(exact, shape, "router"), 2 * least_us);
  EXPECT_LT(us_of(tf32, shape, "router"), 0.5 * least_us);
  EXPECT_GT(us_of(tf32, shape, "router"), 0);
  EXPECT_NEAR(static_cast<double>(exact.time(shape).ns - tf32.time(shape).ns),
              1e3 * (us_of(exact, shape, "router") - us_of(tf32, shape, "router")), 2);
  // A router in 16 bits does not care.
  EXPECT_EQ(model_of("mixtral-8x7b", {4, 1, 1, 1}, Dtype::bf16, "h200", options).time(shape).ns,
            model_of("mixtral-8x7b", {4, 1, 1, 1}, Dtype::bf16).time(shape).ns);
}

// Shared experts on a stream of their own, up to 256 tokens as padded: what that saves is no more than they
// take, and no more than the routed experts beside which they run.
TEST(StepModel, SharedExpertsRunBesideRoutedOnes) {
  for (const char* name : {"deepseek-v3", "glm-5", "qwen3.5-397b-a17b"}) {
    const StepModel model = model_of(name, {8, 1, 1, 1}, load_model(name).weights_dtype);
    for (const std::int32_t tokens : {1, 4, 31, 128, 256}) {
      const StepShape shape = decode(tokens, 1000);
      const double saved = -us_of(model, shape, "shared beside routed");
      const double shared = us_of(model, shape, "shared_gate_up_proj") +
                            us_of(model, shape, "shared_down_proj") + us_of(model, shape, "shared_gate");
      EXPECT_GT(saved, 0) << name << ' ' << tokens;
      EXPECT_LT(saved, shared) << name << ' ' << tokens;  // memory serves one of the two at a time
      EXPECT_LE(saved, us_of(model, shape, "experts")) << name << ' ' << tokens;
    }
    EXPECT_EQ(us_of(model, decode(257, 1000), "shared beside routed"), 0) << name;
  }
  for (const char* name : {"mixtral-8x7b", "llama-3.1-8b"}) {
    EXPECT_EQ(us_of(model_of(name, {2, 1, 1, 1}, Dtype::bf16), decode(8, 1000), "shared beside routed"), 0);
  }
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
                        load_profile("h200"));
  EXPECT_TRUE(other.time(decode(16, 1000)).extrapolated);
}

TEST(StepModel, NoCurveIsAnError) {
  Profile profile = load_profile("h200");
  std::erase_if(profile.curves, [](const Curve& curve) { return curve.op == CurveOp::moe; });
  EXPECT_THROW(StepModel(load_model("mixtral-8x7b"), {2, 1, 1, 1}, Dtype::bf16, Dtype::bf16,
                         find_gpu("h200", ""), profile),
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
  StepOptions served;  // as the rows were: vLLM of October 2025, asynchronous, with piecewise graphs
  served.graphs = Launch::piecewise;
  served.overheads = load_overheads("vllm");
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
      if (!models.contains(tp)) {
        models.emplace(tp, model_of("llama-3.1-70b", {tp, 1, 1, 1}, Dtype::fp8, gpu, served));
      }
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
