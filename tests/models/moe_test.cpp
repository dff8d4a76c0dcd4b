// Routed experts against what their formulas promise.
//
//   Balanced routing: E tokens give every expert k rows; one token meets one expert every ceil(E / k).
//   Power law: T tokens are T k rows whatever the draw; the most loaded of R ranks has at least a
//     R-th of them, at most T for each of its experts, and no smaller share of its fair part on more ranks.
//     An expert whose load x has the density x^-a on [1, b], b = 0.8 T, keeps a row when rounding spares it,
//     x > m E / (2 T k) for the mean load m: a share (b^p - y^p) / (b^p - 1), p = 1 - a, of them.
//   Time: launch + element T k hidden + inner T k intermediate + expert A + M(padded flops / F, bytes / B).
//   A layer that was measured is predicted through its own correction, any other by the formula alone.
#include "models/moe.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "models/fit/fits.hpp"
#include "models/kernel_time.hpp"
#include "models/profile.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

MoeShape qwen(double tokens, double routing, double ranks = 1) {  // Qwen3-235B's layer
  MoeShape shape{tokens, 4096, 1536, 128, 8, ranks, Dtype::bf16};
  shape.routing = routing;
  return shape;
}

TEST(Moe, BalancedRoutingIsEven) {
  for (const double ranks : {1.0, 4.0, 128.0}) {
    const ExpertLoad load = expert_load(qwen(128, 0, ranks));
    EXPECT_EQ(load.rows, 128 * 8 / ranks);
    EXPECT_EQ(load.active, 128 / ranks);
    EXPECT_EQ(load.in_tiles(16), 128 / ranks * 16);  // eight rows in a tile of sixteen
    EXPECT_EQ(load.in_tiles(0), load.rows);
    EXPECT_EQ(expert_load(qwen(12'800, 0, ranks)).rows, 12'800 * 8 / ranks);
  }
  // One token's experts are 0, 16, 32, ...: eight of all, one of the first eight.
  EXPECT_EQ(expert_load(qwen(1, 0)).active, 8);
  EXPECT_EQ(expert_load(qwen(1, 0, 16)).active, 1);
  EXPECT_EQ(expert_load(qwen(16, 0)).active, 128);
  // Two tokens start half a stride apart: the second meets none of the first eight.
  EXPECT_EQ(expert_load(qwen(2, 0, 16)).rows, 1);
  // E no multiple of k: strides wrap, every expert still has its turn.
  MoeShape odd{512, 2048, 5120, 512, 22, 1, Dtype::bf16};
  odd.routing = 0;
  EXPECT_EQ(expert_load(odd).rows, 512 * 22);
  EXPECT_EQ(expert_load(odd).active, 512);
}

TEST(Moe, SkewedRoutingConservesRows) {
  for (const double routing : {1.01, 1.2, 1.0}) {
    for (const double tokens : {1.0, 2.0, 5.0, 16.0, 17.0, 100.0, 3000.0, 65'536.0}) {
      const ExpertLoad load = expert_load(qwen(tokens, routing));
      EXPECT_NEAR(load.rows, tokens * 8, 1e-6 * tokens * 8) << tokens << ' ' << routing;
      EXPECT_LE(load.active, std::min(128.0, tokens * 8) + 1e-9);
      EXPECT_GE(load.active, 7);
      double before = load.rows;
      for (const std::int32_t tile : ExpertLoad::kTiles) {
        EXPECT_GE(load.in_tiles(tile), before - 1e-6);
        EXPECT_LE(load.in_tiles(tile), load.rows + load.active * tile);
        before = load.in_tiles(tile);
      }
    }
  }
}

TEST(Moe, TheMostLoadedRankHasMoreThanItsShare) {
  for (const double routing : {1.01, 1.2}) {
    double before = 1;
    for (double ranks = 2; ranks <= 128; ranks *= 2) {
      const ExpertLoad load = expert_load(qwen(4096, routing, ranks));
      const double excess = load.rows * ranks / (4096 * 8);
      EXPECT_GE(excess, before * 0.995) << ranks;
      EXPECT_LE(load.rows, 4096 * 128 / ranks);
      EXPECT_LE(load.active, 128 / ranks);
      before = excess;
    }
    EXPECT_GT(before, 3);  // the hottest expert of 128
  }
  // Two of eight experts a token: a hot one would have more rows than there are tokens.
  MoeShape mixtral{4096, 4096, 14'336, 8, 2, 8, Dtype::bf16};
  mixtral.routing = 1.6;
  EXPECT_LE(expert_load(mixtral).rows, 4096);
  EXPECT_GT(expert_load(mixtral).rows, 0.75 * 4096);
  EXPECT_GT(expert_load(qwen(4096, 1.2, 8)).rows, expert_load(qwen(4096, 1.01, 8)).rows);
  EXPECT_GT(expert_load(qwen(4096, 1.01, 8)).rows, expert_load(qwen(4096, 0, 8)).rows);
}

TEST(Moe, RoundingSparesAsManyExpertsAsTheLawSays) {
  for (const double routing : {1.01, 1.2}) {
    for (const double tokens : {32.0, 64.0, 1024.0}) {
      const double b = 0.8 * tokens, p = 1 - routing;
      const double mean = (std::pow(b, p + 1) - 1) / (p + 1) / ((std::pow(b, p) - 1) / p);
      const double y = std::max(1.0, mean * 128 / (2 * tokens * 8));
      const double spared = 128 * (std::pow(b, p) - std::pow(y, p)) / (std::pow(b, p) - 1);
      // Leftover rows go to experts without any: somewhat more.
      EXPECT_GT(expert_load(qwen(tokens, routing)).active, 0.96 * spared) << tokens;
      EXPECT_LT(expert_load(qwen(tokens, routing)).active, 1.08 * spared) << tokens;
    }
  }
}

TEST(Moe, WorkCountsRowsAndWeights) {
  MoeShape shape{1, 100, 10, 8, 2, 1, Dtype::bf16};
  shape.routing = 0;
  EXPECT_DOUBLE_EQ(moe_work(shape).flops, 2 * 3 * 100 * 10 * 2);
  EXPECT_DOUBLE_EQ(moe_work(shape).bytes, 2 * 3 * 100 * 10 * 2 + 2 * (2 * 100 + 3 * 10) * 2);
  shape.gated = false;
  EXPECT_DOUBLE_EQ(moe_work(shape).flops, 2 * 2 * 100 * 10 * 2);
  EXPECT_DOUBLE_EQ(moe_work(shape).bytes, 2 * 2 * 100 * 10 * 2 + 2 * (2 * 100 + 2 * 10) * 2);
  EXPECT_FALSE(gated_experts(2688, 1856, 128, 6));
  EXPECT_TRUE(gated_experts(7168, 2048, 256, 8));
}

Coefficients some() {
  Coefficients fit;
  fit.launch_ns = 20'000;
  fit.flops_per_ns = 4e5;
  fit.bytes_per_ns = 3500;
  fit.overlap = 0.9;
  fit.element_ns = 1e-3;
  fit.inner_ns = 2e-3;
  fit.expert_ns = 40;
  fit.parallel_ns = 7000;
  fit.tile_m = 16;
  return fit;
}

TEST(Moe, TimeIsItsFormula) {
  const Coefficients fit = some();
  MoeShape shape{128, 4096, 112, 128, 8, 4, Dtype::fp8};
  shape.routing = 0;
  const KernelTime t = moe_time(fit, shape, expert_load(shape));
  // 32 experts of eight rows in tiles of 16; 112 columns are computed as 128, 224 as 256.
  const double flops = 2 * 4096.0 * (32 * 16) * (128 + 256),
               bytes = 32 * 3 * 4096.0 * 112 + 256 * (2 * 4096 + 3 * 112) * 2.0;
  EXPECT_DOUBLE_EQ(t.launch, 20'000 + 7000 + 1e-3 * 1024 * 4096 + 2e-3 * 1024 * 112 + 40 * 32);
  EXPECT_DOUBLE_EQ(t.compute, flops / 4e5);
  EXPECT_DOUBLE_EQ(t.memory, bytes / 3500);
  EXPECT_DOUBLE_EQ(t.ns, t.launch + overlapped(t.compute, t.memory, 0.9));
  EXPECT_NEAR(t.useful, 8.0 / 16 * 336 / 384, 1e-12);
  shape.expert_parallel = 1;
  EXPECT_DOUBLE_EQ(moe_time(fit, shape, expert_load(shape)).launch, t.launch - 7000 + 40 * 96);
}

TEST(Moe, ColumnsThatNoWideLoadFitsAreSlow) {
  Coefficients fit = some();
  const auto work = [&](double columns) {
    const MoeShape shape{256, 2816, columns, 128, 8, 1, Dtype::bf16};
    const KernelTime t = moe_time(fit, shape, expert_load(shape));
    return t.ns - t.launch;
  };
  const double before = work(88), even = work(96);
  fit.ragged = 2.5;
  EXPECT_DOUBLE_EQ(work(88), 2.5 * before);
  EXPECT_DOUBLE_EQ(work(96), even);
}

TEST(Moe, OnlyABenchmarksLoopFindsWeightsInCache) {
  Coefficients fit = some();
  fit.cache_bytes = 1e8;
  fit.cache_bytes_per_ns = 20'000;
  MoeShape shape{1, 2048, 768, 128, 8, 1, Dtype::bf16};  // 75 MB of weights
  const double cold = moe_time(fit, shape, expert_load(shape)).memory;
  shape.warm = true;
  const double warm = moe_time(fit, shape, expert_load(shape)).memory;
  EXPECT_LT(warm, 0.4 * cold);
  shape.tokens = 8;  // several times the cache: all of it from memory
  const double large = moe_time(fit, shape, expert_load(shape)).memory;
  shape.warm = false;
  EXPECT_NEAR(large / moe_time(fit, shape, expert_load(shape)).memory, 1, 1e-3);
}

TEST(Moe, RisesWithTokens) {
  for (const double routing : {0.0, 1.01}) {
    double before = 0;
    for (double tokens = 1; tokens <= 32'768; tokens *= 2) {
      const MoeShape shape = qwen(tokens, routing, 8);
      const double ns = moe_time(some(), shape, expert_load(shape)).ns;
      EXPECT_GE(ns, before) << tokens;
      before = ns;
    }
  }
}

Curve curve_of(const std::string& kernel, Dtype dtype, Range ranks) {
  Curve curve;
  curve.op = CurveOp::moe;
  curve.dtype = dtype;
  curve.kernel = kernel;
  curve.range["expert_parallel"] = ranks;
  curve.regimes = {some()};
  return curve;
}

TEST(Moe, TheKernelThatAnEngineWouldRun) {
  Profile profile;
  profile.curves = {curve_of("slow", Dtype::fp8, {1, 64}), curve_of("triton", Dtype::fp8_block, {1, 1}),
                    curve_of("cutlass", Dtype::fp8_block, {2, 256}),
                    curve_of("trtllm", Dtype::bf16, {1, 256}), curve_of("other", Dtype::bf16, {1, 256})};
  profile.curves[0].special = true;
  profile.curves[4].families = {{2816, 704, 128, 8}};
  const auto kernel = [&](MoeShape shape, Dtype dtype, bool stand_in) {
    shape.dtype = dtype;
    const CurveChoice choice = find_moe_curve(profile, shape, "here");
    EXPECT_EQ(choice.stand_in, stand_in);
    return choice.curve->kernel;
  };
  EXPECT_EQ(kernel(qwen(1, 0, 1), Dtype::fp8_block, false), "triton");
  EXPECT_EQ(kernel(qwen(1, 0, 8), Dtype::fp8_block, false), "cutlass");
  EXPECT_EQ(kernel(qwen(1, 0, 8), Dtype::fp8, true), "cutlass");  // never the special one
  EXPECT_EQ(kernel(qwen(1, 0, 8), Dtype::bf16, false), "trtllm");
  EXPECT_EQ(kernel({1, 2816, 352, 128, 8, 1}, Dtype::bf16, false), "other");  // measured on this layer
  EXPECT_EQ(kernel(qwen(1, 0, 1), Dtype::nvfp4, true), "trtllm");
  profile.curves.clear();
  EXPECT_THROW(kernel(qwen(1, 0), Dtype::bf16, false), InputError);
}

TEST(Moe, CorrectsTheLayersThatWereMeasured) {
  Curve curve = curve_of("k", Dtype::bf16, {1, 256});
  curve.families = {{2048, 768, 128, 8}, {4096, 1536, 128, 8}};
  curve.correction.axes = {{"family", {1, 2}},
                           {"cut", {kUncut / 4, kUncut, 4 * kUncut}},
                           {"tokens", {1, 1024}},
                           {"routing", {1, 2.01}}};
  curve.correction.permille.assign(2 * 3 * 2 * 2, 0);
  const auto set = [&](std::size_t family, std::size_t cut, std::int16_t value) {
    for (std::size_t i = 0; i < 4; ++i) curve.correction.permille[(family * 3 + cut) * 4 + i] = value;
  };
  set(1, 0, 100);
  set(1, 1, 200);
  set(1, 2, 300);
  const auto factor = [&](const MoeShape& s) {
    return std::log(moe_time(curve, s).ns / moe_time(curve.regimes[0], s, expert_load(s)).ns);
  };
  EXPECT_NEAR(factor(qwen(32, 1.01)), 0.2, 1e-12);
  EXPECT_NEAR(factor(qwen(32, 0, 4)), 0.1, 1e-12);
  MoeShape cut = qwen(32, 0);
  cut.intermediate /= 2;  // two of four ways: between the nodes
  EXPECT_NEAR(factor(cut), 0.25, 1e-12);
  cut.expert_parallel = 2;  // both ways: never measured
  EXPECT_LT(factor(cut), 0.2);
  // A layer that was not measured borrows: much from one like it, little from one far off, never more than
  // the formula's own weight leaves.
  MoeShape like = qwen(32, 0), far = qwen(32, 0);
  like.topk = 7;
  far.hidden = 65'536;
  EXPECT_GT(factor(like), 0.5 * 0.2);
  EXPECT_LT(factor(like), 0.2 / 1.5);
  EXPECT_NEAR(factor(far), 0, 1e-3);
  // ... and nothing from DeepSeek-V3, whose groups change the routing.
  curve.families[1] = kGroupLimited;
  MoeShape glm = qwen(32, 0);
  glm.hidden = 6144;
  glm.intermediate = 2048;
  glm.experts = 256;
  EXPECT_NEAR(factor(glm), 0, 1e-3);
}

/// Measurements by the formula at known coefficients, `slower` for one family.
KernelTable made(const Coefficients& fit, double slower) {
  KernelTable table;
  table.kernels = {"made"};
  table.files = {"made.csv"};
  const MoeFamily families[] = {{2048, 768, 128, 8},  {4096, 1536, 128, 8}, {7168, 2048, 256, 8},
                                {6144, 2560, 160, 8}, {4096, 14336, 8, 2},  {3072, 1024, 256, 8},
                                {5120, 8192, 128, 1}, {4096, 2048, 256, 6}};
  for (const MoeFamily& f : families) {
    for (const double tensor : {1.0, 2.0, 4.0, 8.0}) {
      for (const double ranks : {1.0, 2.0, 8.0}) {
        if (tensor > 1 && ranks > 1) continue;
        for (double tokens = 1; tokens <= 16'384; tokens *= 2) {
          KernelRow row;
          row.op = CurveOp::moe;
          row.shape = {tokens, f.hidden, f.intermediate, f.experts, f.topk, tensor, ranks, 1.01};
          const MoeShape shape = moe_shape(row);
          row.ns = moe_time(fit, shape, expert_load(shape)).ns * (f.topk == 1 ? slower : 1);
          table.rows.push_back(row);
        }
      }
    }
  }
  return table;
}

TEST(Moe, FitFindsTheFormulaAndTheLayersOwnWays) {
  Profile profile;
  profile.name = profile.gpu = "h200";
  profile.sms = 132;
  const Gpu& gpu = find_gpu("h200", "");
  const KernelTable table = made(some(), 1.3);
  fit_moe(profile, table, gpu);
  ASSERT_EQ(profile.curves.size(), 1u);
  EXPECT_LT(profile.curves[0].error.median_ape, 0.03);  // of layers that it has not seen
  EXPECT_GT(profile.curves[0].error.rows, 0);
  EXPECT_EQ(profile.curves[0].families.size(), 8u);
  // What is read back from JSON predicts every measured row, the slower layer's too.
  const auto file = std::filesystem::temp_directory_path() / "pdsim_moe_test.json";
  std::ofstream(file) << to_json(profile);
  const Profile read = load_profile(file.string());
  std::filesystem::remove(file);
  EXPECT_EQ(read.curves[0].families, profile.curves[0].families);
  double worst = 0;
  for (const KernelRow& row : table.rows) {
    worst = std::max(worst, std::abs(predict(read, gpu, table, row).time.ns / row.ns - 1));
  }
  EXPECT_LT(worst, 0.02);
}

}  // namespace
}  // namespace pdsim
