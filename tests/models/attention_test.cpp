// Attention kernels against what their formula promises.
//
//   Sums: n queries after p keys see sum_i min(p + i, w) pairs; a prompt's pairs are the same however it is
//   chunked, and chunks never cost less than the whole.
//   Tiles: a request shorter than a tile costs as much as a whole one; the longest block bounds a small
//   batch, all blocks together a large one.
//   Split-KV: a walk is cut among idle multiprocessors, so below one wave the walk's time does not rise with
//   fewer blocks; the combining launch comes in between a context of 256 and 512.
//   L2: what fits costs its discount, 1.5 times that costs none, and between them time never falls.
//   Correction: exact at the nodes, linear in octaves between, constant beyond, the factor of all terms.
#include "models/attention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "models/attention_row.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"

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

TEST(Attention, SparsePromptsPayForEveryPlace) {
  // 100 new tokens behind nothing see 5,050 keys and behind a million 2,048 each: the same arithmetic, while
  // the work that counts as useful differs.
  Operator op = deepseek(OpKind::dsa_attention);
  op.index_heads = 0;  // the tokens of an earlier layer: no walk over all keys
  const AttentionForm form = attention_form(op, Dtype::bf16, false);
  Coefficients fit;
  fit.flops_per_ns = 5e5;
  const AttentionKernel kernel(form, fit, 132);
  const AttentionShape bare = attention_rows(1, 100, 0, 0), deep = attention_rows(1, 100, 1e6, 0);
  EXPECT_DOUBLE_EQ(kernel.time(bare).ns, kernel.time(deep).ns);
  EXPECT_LT(form.work(bare).flops, form.work(deep).flops);
}

TEST(Attention, GroupsThatDivideNoTileLeaveRowsEmpty) {
  Coefficients fit;
  fit.flops_per_ns = 1e3;
  fit.tile_m = 128;
  const auto per_head = [&](std::int32_t group) {
    const AttentionKernel kernel(attention_form(heads_of(group, 1, 128), Dtype::bf16, false), fit, 132);
    return kernel.time(attention_rows(1, 4096, 0, 0)).ns / group;
  };
  EXPECT_DOUBLE_EQ(per_head(6), per_head(8));
  fit.ragged = 1.2;
  EXPECT_DOUBLE_EQ(per_head(6), 1.2 * per_head(8));
}

Coefficients prefill_fit() {
  Coefficients fit;
  fit.launch_ns = 12'000;
  fit.flops_per_ns = 6e5;
  fit.bytes_per_ns = 1400;
  fit.overlap = 0.25;
  fit.tile_m = 128;
  fit.hidden_keys = 40;
  fit.spread = 0.5;
  fit.wave_ns = 1500;
  fit.tail = 0.8;
  fit.tail_overlap = 0.9;
  return fit;
}

Coefficients decode_fit() {
  Coefficients fit;
  fit.launch_ns = 11'000;
  fit.bytes_per_ns = 4200;
  fit.overlap = 0.6;
  fit.wave_ns = 3500;
  fit.walk_ns = 10;
  fit.walk_waves = 15;
  fit.split_ns = 2000;
  return fit;
}

double decode_ns(const AttentionKernel& kernel, double batch, double context) {
  return kernel.time({batch, batch * context, batch * context, batch}).ns;
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
  EXPECT_DOUBLE_EQ(form.selected({4, 4 * 1000.0, 4 * 1000.0, 4}), 4 * 1000);
  EXPECT_DOUBLE_EQ(form.selected({4, 4 * 9000.0, 4 * 9000.0, 4}), 4 * 2048);
}

TEST(Attention, ChunksConservePairsAndNeverCostLess) {
  Numbers random;
  for (const Operator& op : {heads_of(16, 2, 128), deepseek(OpKind::mla_attention)}) {
    const AttentionKernel kernel(attention_form(op, Dtype::bf16, false), prefill_fit(), 132);
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

TEST(Attention, SumsOfWindowedRowsCountEveryPair) {
  for (const double n : {1.0, 7.0, 64.0}) {
    for (const double p : {0.0, 5.0, 100.0}) {
      for (const double window : {0.0, 8.0, 66.0, 1000.0}) {
        double pairs = 0, first = p + n;  // the first key that any query sees, from 0
        for (double i = 1; i <= n; ++i) {
          const double seen = window > 0 ? std::min(p + i, window) : p + i;
          pairs += seen;
          first = std::min(first, p + i - seen);
        }
        const AttentionShape rows = attention_rows(3, n, p, window);
        EXPECT_EQ(rows.requests, 3);
        EXPECT_EQ(rows.tokens, 3 * n);
        EXPECT_EQ(rows.pairs, 3 * pairs);
        EXPECT_EQ(rows.context, 3 * (p + n - first));
      }
    }
  }
}

TEST(Attention, ShortRequestsPayForWholeTiles) {
  // 8 query heads share a KV head: a tile of 128 rows is 16 queries. Arithmetic on 16 queries of 1,000
  // keys each is paid for by any request that has fewer.
  Coefficients fit;
  fit.flops_per_ns = 1e3;
  fit.tile_m = 128;
  const AttentionKernel kernel(attention_form(heads_of(16, 2, 128), Dtype::bf16, false), fit, 132);
  const double tile = 4.0 * 16 * 128 * 16 * 1000 / 1e3;
  EXPECT_DOUBLE_EQ(kernel.time({16, 16 * 1000.0, 1000, 1}).ns, tile);
  EXPECT_DOUBLE_EQ(kernel.time({1, 1000, 1000, 1}).ns, tile);
  EXPECT_DOUBLE_EQ(kernel.time({10, 10 * 1000.0, 5000, 5}).ns, 5 * tile);  // a tile each
  EXPECT_DOUBLE_EQ(kernel.time({32, 32 * 1000.0, 1000, 1}).ns, 2 * tile);
  // A tile of one head's queries holds 128 of them.
  fit.tile_n = 1;
  const AttentionKernel single(attention_form(heads_of(16, 2, 128), Dtype::bf16, false), fit, 132);
  EXPECT_DOUBLE_EQ(single.time({16, 16 * 1000.0, 1000, 1}).ns, 8 * tile);
}

TEST(Attention, TheLongestBlockBoundsSmallBatchesOnly) {
  Coefficients fit;
  fit.flops_per_ns = 6e5;
  fit.tile_m = 128;
  fit.tail = 1;
  Coefficients free = fit;
  free.tail = 0;
  const AttentionForm form = attention_form(heads_of(16, 2, 128), Dtype::bf16, false);
  const AttentionKernel kernel(form, fit, 132), all(form, free, 132);
  // One request of 128 queries: 2 x 8 blocks on 132 multiprocessors, the last of which sees 128 keys.
  const AttentionShape few = attention_rows(1, 128, 0, 0), many = attention_rows(64, 128, 0, 0);
  EXPECT_DOUBLE_EQ(kernel.time(few).ns, 4.0 * 128 * 128 * 128 / (6e5 / 132));
  EXPECT_GT(kernel.time(few).ns, all.time(few).ns);
  EXPECT_DOUBLE_EQ(kernel.time(many).ns, all.time(many).ns);
  // A prefix is walked by idle multiprocessors too: 16 of 132 have a block, so it costs 16 / 132.
  const double key = 4.0 * 128 * 128 / (6e5 / 132);
  EXPECT_NEAR(kernel.time(attention_rows(1, 128, 1320, 0)).ns,
              std::max(key * (128 + 160), all.time(attention_rows(1, 128, 1320, 0)).ns), 1e-6);
}

TEST(Attention, AWindowBoundsWhatABlockSees) {
  // Behind any prefix longer than the window the cost is the same.
  Operator op = heads_of(16, 2, 128);
  op.window = 128;
  const AttentionKernel kernel(attention_form(op, Dtype::bf16, false), prefill_fit(), 132, op.window);
  const double ns = kernel.time(attention_rows(2, 512, 1000, 128)).ns;
  EXPECT_DOUBLE_EQ(kernel.time(attention_rows(2, 512, 50'000, 128)).ns, ns);
  const AttentionKernel full(attention_form(heads_of(16, 2, 128), Dtype::bf16, false), prefill_fit(), 132);
  EXPECT_LT(ns, full.time(attention_rows(2, 512, 1000, 0)).ns);
}

TEST(Attention, TheLongestBlockSeesItsWindowAndItsTile) {
  // A tile of 16 queries inside a window of 128 sees 128 + 16 keys, however long the prompt.
  Operator op = heads_of(16, 2, 128);
  op.window = 128;
  Coefficients fit;
  fit.flops_per_ns = 6e5;
  fit.tile_m = 128;
  fit.tail = 100;  // the longest block alone
  const AttentionKernel kernel(attention_form(op, Dtype::bf16, false), fit, 132, op.window);
  EXPECT_DOUBLE_EQ(kernel.time(attention_rows(1, 4096, 0, 128)).ns,
                   100 * (128 + 16) * 4.0 * 128 * 128 / (6e5 / 132));
}

TEST(Attention, AWindowThatBeginsInsideABlockReadsAllOfIt) {
  Operator op = heads_of(8, 1, 128);
  op.window = 128;
  Coefficients fit;
  fit.bytes_per_ns = 1;
  fit.hidden_keys = 64;
  const AttentionForm form = attention_form(op, Dtype::bf16, true);
  const AttentionKernel kernel(form, fit, 132, op.window);
  const auto keys = [&](double held) {  // read by each of 3 requests
    AttentionShape rows = attention_rows(3, 1, held - 1, 128);
    rows.context = rows.pairs;
    rows.held = 3 * held;
    return (kernel.time(rows).memory / 3 - form.bytes_token) / form.bytes_context;
  };
  EXPECT_NEAR(keys(100), 100, 1e-9);
  EXPECT_NEAR(keys(150), 150, 1e-9);
  EXPECT_NEAR(keys(5000), 128 + 64, 1e-9);
}

TEST(Attention, DecodeRisesWithContextAndBatch) {
  const AttentionKernel kernel(attention_form(heads_of(16, 2, 128), Dtype::bf16, true), decode_fit(), 132);
  double before = 0;
  for (double context = 1; context <= 131'072; context *= 2) {
    const double ns = decode_ns(kernel, 64, context);
    EXPECT_GT(ns, before);
    EXPECT_GT(decode_ns(kernel, 128, context), ns);
    before = ns;
  }
  // The split's launch is paid in full from twice the context at which it begins.
  const double least = AttentionKernel::kSplitContext;
  EXPECT_NEAR(kernel.time({64, 0, 64 * least, 64}).launch, 11'000, 1e-9);
  EXPECT_NEAR(kernel.time({64, 0, 64 * least * 1.5, 64}).launch, 12'000, 1e-9);
  EXPECT_NEAR(kernel.time({64, 0, 64 * least * 2, 64}).launch, 13'000, 1e-9);
}

TEST(Attention, IdleMultiprocessorsShareAWalk) {
  // walk_waves = 1: 132 blocks walk their keys apiece, 66 blocks half of theirs.
  Coefficients fit;
  fit.walk_ns = 10;
  fit.walk_waves = 1;
  const AttentionKernel kernel(attention_form(heads_of(8, 1, 128), Dtype::bf16, true), fit, 132);
  EXPECT_DOUBLE_EQ(decode_ns(kernel, 132, 100), 1000);
  EXPECT_DOUBLE_EQ(decode_ns(kernel, 66, 100), 500);
  EXPECT_DOUBLE_EQ(decode_ns(kernel, 264, 100), 1000);
}

TEST(Attention, WhatFitsTheCacheIsReadFromIt) {
  Coefficients fit;
  fit.bytes_per_ns = 1000;
  fit.cache_bytes = 40e6;
  fit.cache_bytes_per_ns = 4000;
  const AttentionForm form = attention_form(heads_of(8, 1, 128), Dtype::bf16, true);
  const AttentionKernel kernel(form, fit, 132);
  const auto memory = [&](double bytes) {
    const double context = (bytes - form.bytes_token) / form.bytes_context;
    return kernel.time({1, context, context, 1}).memory;
  };
  EXPECT_NEAR(memory(40e6), 40e6 / 4000, 1e-3);
  EXPECT_NEAR(memory(60e6), 60e6 / 1000, 1e-3);
  double before = 0;
  for (double bytes = 1e6; bytes < 100e6; bytes += 1e6) {
    EXPECT_GT(memory(bytes), before);
    before = memory(bytes);
  }
}

TEST(OctaveGrid, IsExactAtNodesLinearBetweenAndConstantBeyond) {
  Correction correction;
  correction.axes = {{"requests", {1, 4, 16}}, {"context", {2, 1024}}};
  correction.permille = {100, -200, 50, 300, -400, 0};
  const OctaveGrid grid(correction);
  for (const double x : {1.0, 4.0, 16.0}) {
    for (const double y : {2.0, 1024.0}) {
      const double at[] = {x, y};
      EXPECT_NEAR(grid.at(x, y), correction.factor(at), 1e-7);
    }
  }
  EXPECT_DOUBLE_EQ(grid.at(100, 5000), grid.at(16, 1024));
  EXPECT_DOUBLE_EQ(grid.at(1, 1), grid.at(1, 2));
  EXPECT_NEAR(grid.at(3, 2), 0.5 * (grid.at(2, 2) + grid.at(4, 2)), 1e-7);
  EXPECT_EQ(OctaveGrid().at(7, 9), 1);
  for (double x = 1; x < 16; x *= 1.01) EXPECT_NEAR(grid.at(x * 1.001, 40) / grid.at(x, 40), 1, 2e-3);
}

TEST(AttentionKernel, TakesItsCurvesCorrectionAtTheOperatorsHeads) {
  Curve curve;
  curve.op = CurveOp::attention_decode;
  curve.regimes = {decode_fit()};
  curve.correction.axes = {
      {"kv_heads", {1, 8}}, {"heads_per_kv_head", {1, 8}}, {"kv_rows", {1, 64}}, {"context", {1, 1024}}};
  curve.correction.permille = {0, 0, 0, 0, 1000, 1000, 1000, 1000, 0, 0, 0, 0, 0, 0, 500, 0};
  const AttentionForm form = attention_form(heads_of(8, 1, 128), Dtype::bf16, true);
  const AttentionKernel bare(form, decode_fit(), 132);
  // One KV head with 8 queries: e; 8 KV heads with 8: e^0.5 at 64 rows of KV heads, that is 8 requests, and
  // a context of 1.
  EXPECT_NEAR(decode_ns(attention_kernel(curve, 132, heads_of(8, 1, 128), Dtype::bf16), 3, 700),
              std::exp(1.0) * decode_ns(bare, 3, 700), 0.01);
  const AttentionKernel wide(attention_form(heads_of(64, 8, 128), Dtype::bf16, true), decode_fit(), 132);
  EXPECT_NEAR(decode_ns(attention_kernel(curve, 132, heads_of(64, 8, 128), Dtype::bf16), 8, 1),
              std::exp(0.5) * decode_ns(wide, 8, 1), 0.01);
}

TEST(AttentionRow, ReadsASingleTokenAsDecode) {
  KernelTable table;
  table.models = {"deepseek-ai/DeepSeek-V3", "somebody/else"};
  KernelRow row;
  row.op = CurveOp::attention_prefill;
  row.shape = {1, 0, 4, 16, 2, 128, 0};  // tokens prefix requests heads kv_heads head_dim window
  EXPECT_EQ(attention_row(table, row)->op, CurveOp::attention_decode);
  row.shape[1] = 7;  // behind a prefix it was measured as a prompt
  EXPECT_EQ(attention_row(table, row)->op, CurveOp::attention_prefill);
  EXPECT_EQ(attention_row(table, row)->context, 8);
  row.op = CurveOp::mla_prefill;
  row.shape = {1, 0, 4, 16};
  EXPECT_EQ(attention_row(table, row)->op, CurveOp::mla_decode);
  row.op = CurveOp::dsa_prefill;
  EXPECT_EQ(attention_row(table, row)->op, CurveOp::dsa_prefill);
  row.model = 1;
  EXPECT_FALSE(attention_row(table, row).has_value());
}

}  // namespace
}  // namespace pdsim
