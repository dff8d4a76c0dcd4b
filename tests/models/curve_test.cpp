// Kernel curves against what their formulas promise.
//
//   M(a, b) is the larger root of t^2 - (a + b) t + o a b = 0: max for o = 1, sum for o = 0, rising in a
//   and b, and subadditive: M(x + y) <= M(x) + M(y).
//   A gemm pays for ceil(tiles / slots) whole waves of tiles.
//   T independent tokens that pick k of E experts meet E (1 - (1 - k / E)^T) of them.
//   Attention: a prompt's (query, key) pairs are the same however it is chunked, and chunks never cost
//   less than the whole.
#include "models/curve.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "models/model.hpp"

namespace pdsim {
namespace {

class Numbers {  // a deterministic stream of uniform numbers
 public:
  double in(double low, double high) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * static_cast<double>(state_ >> 11) * 0x1p-53;
  }

 private:
  std::uint64_t state_ = 1;
};

TEST(Overlapped, IsMaxOrSumAtItsEnds) {
  EXPECT_DOUBLE_EQ(overlapped(3, 5, 1), 5);
  EXPECT_DOUBLE_EQ(overlapped(3, 5, 0), 8);
  EXPECT_DOUBLE_EQ(overlapped(0, 5, 0.3), 5);
  EXPECT_DOUBLE_EQ(overlapped(0, 0, 0.5), 0);
  EXPECT_DOUBLE_EQ(overlapped(1e300 / 1e290, 1e10, 1), 1e10);  // equal terms: no negative under the root
}

TEST(Overlapped, SolvesItsEquationAndIsSubadditive) {
  Numbers random;
  for (int i = 0; i < 10'000; ++i) {
    const double a = random.in(0, 10), b = random.in(0, 10), c = random.in(0, 10), d = random.in(0, 10);
    const double o = random.in(0, 1), t = overlapped(a, b, o);
    EXPECT_NEAR(t * t - (a + b) * t + o * a * b, 0, 1e-10);
    EXPECT_GE(t, std::max(a, b) - 1e-12);
    EXPECT_LE(t, a + b + 1e-12);
    EXPECT_GE(overlapped(a + 0.1, b, o), t);
    EXPECT_LE(overlapped(a + c, b + d, o), t + overlapped(c, d, o) + 1e-10);
  }
}

TEST(Gemm, PaysForWholeWavesOfTiles) {
  Coefficients fit;
  fit.launch_ns = 100;
  fit.flops_per_ns = 1000;
  fit.tile_m = 64;
  fit.tile_n = 128;
  const std::int32_t sms = 10;
  const double wave = 10 * 64 * 128 * 2 * 256 / 1000.0;  // ns: ten tiles at k = 256
  // n = 1280 is ten tiles: one wave for up to 64 rows, two for 65.
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {1, 1280, 256, Dtype::bf16}).ns, 100 + wave);
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {64, 1280, 256, Dtype::bf16}).ns, 100 + wave);
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {65, 1280, 256, Dtype::bf16}).ns, 100 + 2 * wave);
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {64, 1281, 256, Dtype::bf16}).ns, 100 + 2 * wave);
  // In clusters of two along m, 1 row costs what 128 do: ten clusters on five slots, two waves.
  fit.cluster = 2;
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {1, 1280, 256, Dtype::bf16}).ns, 100 + 2 * wave);
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {128, 1280, 256, Dtype::bf16}).ns, 100 + 2 * wave);
  // Rows that are no multiple of 16 compute slower by `ragged`.
  fit.ragged = 1.25;
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {129, 1280, 256, Dtype::bf16}).ns, 100 + 4 * wave * 1.25);
  EXPECT_DOUBLE_EQ(gemm_time(fit, sms, {144, 1280, 256, Dtype::bf16}).ns, 100 + 4 * wave);
}

TEST(Gemm, CountsBytesByFormat) {
  EXPECT_DOUBLE_EQ(gemm_work({2, 30, 500, Dtype::bf16}).bytes, 2 * (30 * 500 + 2 * 500 + 2 * 30));
  EXPECT_DOUBLE_EQ(gemm_work({2, 30, 500, Dtype::fp8}).bytes, 30 * 500 + 2 * 500 + 2 * (2 * 30));
  EXPECT_DOUBLE_EQ(gemm_work({2, 30, 500, Dtype::fp8}).flops, 2 * 2 * 30 * 500);
  // 4-bit weights are widened on the way: 16-bit activations.
  EXPECT_DOUBLE_EQ(gemm_work({2, 30, 500, Dtype::mxfp4}).bytes,
                   30 * 500 * bytes_per_element(Dtype::mxfp4) + 2 * (2 * 500 + 2 * 30));
}

TEST(Moe, MeetsDistinctExperts) {
  MoeShape shape;
  shape.experts = 128;
  shape.topk = 8;
  shape.tokens = 1;
  EXPECT_NEAR(active_experts(shape), 8, 1e-9);
  shape.tokens = 2;
  EXPECT_NEAR(active_experts(shape), 128 * (1 - 0.9375 * 0.9375), 1e-9);
  shape.tokens = 100'000;
  EXPECT_NEAR(active_experts(shape), 128, 1e-9);
  shape.expert_parallel = 4;
  EXPECT_NEAR(active_experts(shape), 32, 1e-9);
}

TEST(Moe, RowsAndWeights) {
  MoeShape shape{1, 100, 10, 8, 2, 1, Dtype::bf16};
  EXPECT_NEAR(moe_work(shape).flops, 2 * 3 * 100 * 10 * 2, 1e-9);
  EXPECT_NEAR(moe_work(shape).bytes, 2 * 3 * 100 * 10 * 2 + 2 * (2 * 100 + 3 * 10) * 2, 1e-6);
}

Operator heads_of(std::int32_t heads, std::int32_t kv_heads, std::int32_t head_dim) {
  Operator op;
  op.kind = OpKind::attention;
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.head_dim = op.v_head_dim = head_dim;
  return op;
}

Operator deepseek(OpKind kind) {  // one rank of eight
  Operator op;
  op.kind = kind;
  op.heads = 16;
  op.kv_heads = 1;
  op.head_dim = 128;
  op.v_head_dim = 128;
  op.latent = 512;
  op.rope = 64;
  op.index_topk = 2048;
  op.index_heads = 64;
  op.index_head_dim = 128;
  return op;
}

TEST(Attention, CountsKvBytesAndFlops) {
  // Llama-3.1-70B at TP 8: one KV head of 128, so K and V of a token are 512 bytes in bf16.
  const AttentionForm decode = attention_form(heads_of(8, 1, 128), Dtype::bf16, true);
  EXPECT_DOUBLE_EQ(decode.bytes_context, 512);
  EXPECT_DOUBLE_EQ(decode.flops_pair, 4 * 8 * 128);
  EXPECT_DOUBLE_EQ(attention_form(heads_of(8, 1, 128), Dtype::fp8, true).bytes_context, 256);
  // MLA: latent 512 + rope 64, once for all heads; decode multiplies in the latent space.
  const AttentionForm mla = attention_form(deepseek(OpKind::mla_attention), Dtype::bf16, true);
  EXPECT_DOUBLE_EQ(mla.bytes_context, 1152);
  EXPECT_DOUBLE_EQ(mla.flops_pair, 2 * 16 * (512 + 64 + 512));
  EXPECT_DOUBLE_EQ(mla.flops_token, 2 * 512 * 16 * 256);
  // fp8_ds_mla: 512 + 4 scales of 4 bytes + 64 in bf16 = 656 bytes a token.
  EXPECT_DOUBLE_EQ(attention_form(deepseek(OpKind::dsa_attention), Dtype::fp8, true).bytes_selected, 656);
}

TEST(Attention, SparseRowsReadAtMostTopk) {
  const AttentionForm form = attention_form(deepseek(OpKind::dsa_attention), Dtype::bf16, true);
  EXPECT_DOUBLE_EQ(form.selected({4, 4 * 1000.0, 4 * 1000.0}), 4 * 1000);
  EXPECT_DOUBLE_EQ(form.selected({4, 4 * 9000.0, 4 * 9000.0}), 4 * 2048);
}

TEST(Attention, ChunksConservePairsAndNeverCostLess) {
  Coefficients fit;
  fit.launch_ns = 12'000;
  fit.flops_per_ns = 6e5;
  fit.bytes_per_ns = 1400;
  fit.overlap = 0.25;
  Numbers random;
  for (const Operator& op : {heads_of(16, 2, 128), deepseek(OpKind::mla_attention)}) {
    const AttentionKernel kernel(attention_form(op, Dtype::bf16, false), fit, 132);
    for (int i = 0; i < 1000; ++i) {
      const double prompt = std::floor(random.in(2, 32'768));
      const AttentionShape whole{prompt, prompt * (prompt + 1) / 2, prompt};
      double pairs = 0, ns = 0;
      for (double done = 0; done < prompt;) {
        const double n = std::min(prompt - done, std::floor(random.in(1, 8192)));
        const AttentionShape chunk{n, n * done + n * (n + 1) / 2, done + n};
        pairs += chunk.pairs;
        ns += kernel.time(chunk).ns;
        done += n;
      }
      EXPECT_DOUBLE_EQ(pairs, whole.pairs);
      EXPECT_GE(ns, kernel.time(whole).ns * (1 - 1e-12));
    }
  }
}

TEST(Attention, DecodeRisesWithContextAndBatch) {
  Coefficients fit;
  fit.launch_ns = 11'000;
  fit.bytes_per_ns = 4200;
  fit.overlap = 0.6;
  fit.wave_ns = 3500;
  fit.walk_ns = 10;
  fit.walk_waves = 15;
  fit.split_ns = 2000;
  const AttentionKernel kernel(attention_form(heads_of(16, 2, 128), Dtype::bf16, true), fit, 132);
  double before = 0;
  for (double context = 1; context <= 131'072; context *= 2) {
    const double ns = kernel.time({64, 64 * context, 64 * context}).ns;
    EXPECT_GT(ns, before);
    EXPECT_GT(kernel.time({128, 128 * context, 128 * context}).ns, ns);
    before = ns;
  }
  // The split's launch is paid from a mean context of 512 on.
  const double step =
      kernel.time({64, 64 * 512.0, 64 * 512.0}).ns - kernel.time({64, 64 * 511.0, 64 * 511.0}).ns;
  EXPECT_GT(step, 2000);
  EXPECT_LT(step, 2100);
}

}  // namespace
}  // namespace pdsim
