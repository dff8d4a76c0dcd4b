// Theory of the list. Every point is one that a kernel here can run and that means what its axes say; none
// comes twice; a quick list fits its budget; and what a point is said to ask of the GPU is the textbook's
// count.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels/copy_shape.hpp"
#include "kernels/noise.cuh"
#include "kernels/shapes.hpp"
#include "kernels/work.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

/// Layers as models have them, and some that no kernel here takes.
ModelShapes models() {
  ModelShapes shapes;
  for (const std::int64_t n : {1024, 2560, 5120, 6400, 12800, 28672, 38016})
    for (const std::int64_t k : {2048, 5120}) shapes.linear.push_back({n, k});
  shapes.linear.push_back({1024, 2048});  // again
  shapes.linear.push_back({1000, 2048});  // rows that fp8 cannot have
  shapes.attention = {{16, 2, 128}, {32, 8, 128}, {16, 2, 64}, {16, 2, 128}, {32, 1, 128}, {8, 8, 96}};
  shapes.latent_heads = {16, 128, 24};
  shapes.experts = {{4096, 1536, 128, 8, 4, 1}};
  return shapes;
}

std::vector<Point> of(const std::vector<Point>& all, Op op) {
  std::vector<Point> some;
  std::copy_if(all.begin(), all.end(), std::back_inserter(some), [op](const Point& p) { return p.op == op; });
  return some;
}

/// As a list of the fewest shapes has them.
std::vector<Point> few() {
  return {{Op::gemm, Format::fp8, Copy::gather, {64, 1024, 5120}, 0},
          {Op::attention_prefill, Format::bf16, Copy::gather, {128, 0, 2, 16, 2, 128}, 0},
          {Op::attention_decode, Format::bf16, Copy::gather, {16, 2048, 16, 2, 64}, 0},
          {Op::mla_decode, Format::bf16, Copy::gather, {16, 2048, 32}, 0},
          {Op::moe, Format::bf16, Copy::gather, {64, 4096, 1536, 128, 8, 4, 1}, 0}};
}

TEST(CalibrateShapes, NoPointComesTwiceAndEveryOperationComes) {
  std::vector<Point> twice = few();
  twice.push_back(twice.front());
  for (const std::vector<Point>& all : {full_plan(models()), quick_plan(twice)}) {
    std::set<std::string> seen;
    for (const Point& point : all) {
      EXPECT_TRUE(seen.insert(describe(point)).second) << describe(point);
      EXPECT_GT(point.budget_s, 0);
    }
    for (const Op op : kOps) EXPECT_FALSE(of(all, op).empty()) << name(op);
  }
}

// The shapes of a quick list are those it was given, and its copies some of a full list's.
TEST(CalibrateShapes, AQuickListIsTheGivenShapesAndSomeCopies) {
  std::set<std::string> full;
  for (const Point& point : full_plan(models())) full.insert(describe(point));
  const std::vector<Point> quick = quick_plan(few());
  for (std::size_t i = 0; i < few().size(); ++i) EXPECT_EQ(describe(quick[i]), describe(few()[i]));
  for (std::size_t i = few().size(); i < quick.size(); ++i) {
    EXPECT_TRUE(quick[i].op == Op::kv_copy || quick[i].op == Op::interference);
    EXPECT_TRUE(full.contains(describe(quick[i]))) << describe(quick[i]);
  }
}

TEST(CalibrateShapes, TheQuickListFitsItsBudget) {
  EXPECT_LT(budget_seconds(quick_plan(few())), kQuickSeconds);
  EXPECT_LE(kQuickSeconds, 120);
  std::vector<Point> many;  // more shapes, less time for each point
  for (std::int64_t m = 1; m <= 2000; ++m)
    many.push_back({Op::gemm, Format::bf16, Copy::gather, {m, 1024, 1024}, 0});
  const std::vector<Point> quick = quick_plan(many);
  EXPECT_NEAR(budget_seconds(quick), kQuickSeconds, 1e-6);
  double sum = 0;
  for (const Point& point : quick) sum += point.budget_s;
  EXPECT_DOUBLE_EQ(sum, budget_seconds(quick));
}

// What is due takes share x budgets, and beside them what set-up took before: together what is left of the
// time.
TEST(CalibrateShapes, ALateListHasLessForEachPoint) {
  std::vector<Point> points;
  for (std::int64_t m = 1; m <= 10; ++m)
    points.push_back({Op::gemm, Format::bf16, Copy::gather, {m, 1024, 1024}, 2.0});
  EXPECT_DOUBLE_EQ(share_of_budget(points, 0, 0, 0, 25), 1);
  EXPECT_DOUBLE_EQ(share_of_budget(points, 0, 0, 0, 10), 0.5);
  EXPECT_DOUBLE_EQ(share_of_budget(points, 5, 10, 10, 25), 1);  // in time
  EXPECT_DOUBLE_EQ(share_of_budget(points, 5, 5, 10, 25), 1);   // early: points ended before their budgets
  EXPECT_DOUBLE_EQ(share_of_budget(points, 5, 14, 10, 25), (11.0 - 4) / 10);
  EXPECT_DOUBLE_EQ(share_of_budget(points, 5, 40, 10, 25), 0.1);  // never nothing
  double elapsed = 0, granted = 0;                                // with 1.2 s of set-up for each
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double budget = 2.0 * share_of_budget(points, i, elapsed, granted, 25);
    granted += budget;
    elapsed += 1.2 + budget;
  }
  EXPECT_NEAR(elapsed, 25, 0.5);
}

TEST(CalibrateShapes, OnlyWhatTheKernelsAreMadeFor) {
  const std::vector<Point> all = full_plan(models());
  for (const Point& p : of(all, Op::gemm)) {
    EXPECT_EQ(p.at("n") % 16, 0);
    EXPECT_EQ(p.at("k") % 16, 0);
  }
  for (const Op op : {Op::attention_prefill, Op::attention_decode}) {
    for (const Point& p : of(all, op)) {
      EXPECT_TRUE(p.at("head_dim") == 64 || p.at("head_dim") == 128);
      EXPECT_LE(p.at("heads") / p.at("kv_heads"), 16);
    }
  }
  for (const Point& p : of(all, Op::mla_decode)) EXPECT_EQ(p.at("heads") % 16, 0);
}

// Theory: `run_bytes` and `runs` of a copy kernel's row are those of the copy it makes.
TEST(CalibrateShapes, CopyKernelsHaveTheRunsThatTheirAxesSay) {
  alignas(16) std::uint8_t nowhere[16];
  std::set<Copy> seen;
  for (const Point& p : full_plan(models())) {
    if (p.op != Op::kv_copy || !on_multiprocessors(p.copy)) continue;
    seen.insert(p.copy);
    const CopyShape shape = copy_shape(p.copy, p.at("run_bytes"), p.at("runs"));
    const std::int32_t pages[] = {0};  // of a pool that is never touched
    const KvCopy copy = shape.copy(nowhere, pages, nowhere, pages);
    EXPECT_EQ(copy.run_bytes(), p.at("run_bytes")) << describe(p);
    EXPECT_EQ(copy.runs(), p.at("runs")) << describe(p);
    EXPECT_EQ(copy.run_bytes() * copy.runs(),
              std::int64_t{copy.tokens} * copy.heads * shape.head_bytes * copy.regions);
  }
  EXPECT_EQ(seen.size(), 5u);
}

// Addresses from one end of the pools to the other, on memory that is really there.
TEST(CalibrateShapes, CopiesStayInsideTheirMemory) {
  for (const Copy kind : {Copy::gather, Copy::scatter, Copy::layout, Copy::reshard, Copy::block}) {
    const CopyShape shape = copy_shape(kind, 256, 256);
    const auto from_pages = page_table(shape.pages, 2 * shape.pages, 1),
               to_pages = page_table(shape.pages, 2 * shape.pages, 2);
    std::vector<Vec16> from(static_cast<std::size_t>(shape.from_bytes() / 16)),
        to(static_cast<std::size_t>(shape.to_bytes() / 16));
    auto* const begin = reinterpret_cast<std::uint8_t*>(to.data());
    const KvCopy copy =
        shape.copy(reinterpret_cast<std::uint8_t*>(from.data()), from_pages.data(), begin, to_pages.data());
    std::set<const std::uint8_t*> starts;
    for (std::uint32_t i = 0; i < copy.runs(); ++i) {
      const KvRun run = copy.run(i);
      EXPECT_GE(run.to, begin);
      EXPECT_LE(run.to + run.bytes, begin + shape.to_bytes());
      EXPECT_GE(run.from, reinterpret_cast<const std::uint8_t*>(from.data()));
      EXPECT_LE(run.from + run.bytes,
                reinterpret_cast<const std::uint8_t*>(from.data()) + shape.from_bytes());
      EXPECT_TRUE(starts.insert(run.to).second) << name(kind);
    }
  }
}

TEST(CalibrateShapes, ARunThatNoLayoutHasIsRefused) {
  EXPECT_THROW(copy_shape(Copy::gather, 8, 16), InputError);
  EXPECT_THROW(copy_shape(Copy::gather, 300, 16), InputError);
  EXPECT_THROW(copy_shape(Copy::layout, 256, 8 * 16 + 8), InputError);  // a page and a half
  EXPECT_NO_THROW(copy_shape(Copy::layout, 256, 8 * 16));
}

TEST(CalibrateShapes, PageTablesAreShuffledSubsets) {
  const std::vector<std::int32_t> table = page_table(100, 200, 3), again = page_table(100, 200, 3);
  EXPECT_EQ(table, again);
  EXPECT_NE(table, page_table(100, 200, 4));
  const std::set<std::int32_t> distinct(table.begin(), table.end());
  EXPECT_EQ(distinct.size(), 100u);
  EXPECT_GE(*distinct.begin(), 0);
  EXPECT_LT(*distinct.rbegin(), 200);
  std::vector<std::int32_t> all = page_table(50, 50, 1);
  std::sort(all.begin(), all.end());
  for (std::int32_t i = 0; i < 50; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i);
}

TEST(CalibrateShapes, BalancedRowsAreAllThereAndAsEqualAsCanBe) {
  for (const std::int64_t tokens : {1, 2, 16, 100, 4096}) {
    for (const std::int64_t ep : {1, 4}) {
      const Experts experts{4096, 1536, 128, 8, 1, ep};
      const std::vector<std::int64_t> rows = balanced_rows(tokens, experts);
      EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), (tokens * 8 + ep - 1) / ep);
      EXPECT_LE(static_cast<std::int64_t>(rows.size()), 128 / ep);
      const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
      EXPECT_GE(*least, 1);
      EXPECT_LE(*most - *least, 1);
      EXPECT_TRUE(std::is_sorted(rows.rbegin(), rows.rend()));  // two groups at most
    }
  }
}

TEST(CalibrateShapes, WorkIsTheTextbooks) {
  const Work gemm = work({Op::gemm, Format::fp8, Copy::gather, {16, 1024, 512}, 0});
  EXPECT_EQ(gemm.flops, 2.0 * 16 * 1024 * 512);
  EXPECT_EQ(gemm.memory_bytes, 1024 * 512 + 16 * 512 + 2 * 16 * 1024);

  // Three new tokens after five see 6 + 7 + 8 keys.
  const Work prefill = work({Op::attention_prefill, Format::bf16, Copy::gather, {3, 5, 2, 4, 1, 64}, 0});
  EXPECT_EQ(prefill.flops, 2 * 21 * 4.0 * 4 * 64);
  EXPECT_EQ(prefill.memory_bytes, 2 * (2.0 * 3 * 2 * 4 * 64) + 2 * 2.0 * (8 * 2 * 64));

  const Work decode = work({Op::attention_decode, Format::fp8, Copy::gather, {8, 100, 32, 8, 128}, 0});
  EXPECT_EQ(decode.memory_bytes, 8 * 100 * 8 * 128 * 2.0);
  EXPECT_EQ(decode.flops, 8 * 100 * 4.0 * 32 * 128);

  const Work latent = work({Op::mla_decode, Format::bf16, Copy::gather, {2, 50, 16}, 0});
  EXPECT_EQ(latent.memory_bytes, 100 * 1152);
  EXPECT_EQ(latent.flops, 100 * 16 * 2.0 * (576 + 512));

  // Two tokens of eight experts each touch sixteen of 128, whose weights are read once.
  const Work moe = work({Op::moe, Format::bf16, Copy::gather, {2, 4096, 1536, 128, 8, 4, 1}, 0});
  EXPECT_EQ(moe.flops, 16 * 6.0 * 4096 * 384);
  EXPECT_EQ(moe.memory_bytes, 16 * 3.0 * 4096 * 384 * 2 + 2.0 * 16 * (2 * 4096 + 3 * 384));

  EXPECT_EQ(work({Op::kv_copy, Format::bf16, Copy::gather, {256, 10, 4}, 0}).memory_bytes, 5120);
  EXPECT_EQ(work({Op::kv_copy, Format::bf16, Copy::batch_h2d, {256, 10, 0}, 0}).link_bytes, 2560);
}

// Uniform on [-1, 1): mean 0, variance 1/3, lag correlations 0, to within four standard errors.
TEST(Noise, IsUniformAndIndependent) {
  constexpr int kCount = 1 << 16;
  double sum = 0, squares = 0, products = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = double{noise(5, static_cast<std::uint64_t>(i))};
    EXPECT_GE(x, -1);
    EXPECT_LT(x, 1);
    sum += x;
    squares += x * x;
    products += x * double{noise(5, static_cast<std::uint64_t>(i) + 1)};
  }
  const double error = 4 / std::sqrt(kCount);
  EXPECT_NEAR(sum / kCount, 0, error * std::sqrt(1.0 / 3));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, error * std::sqrt(4.0 / 45));
  EXPECT_NEAR(products / kCount, 0, error / 3);
  EXPECT_NE(noise(1, 0), noise(2, 0));
}

TEST(CalibrateShapes, APointWithoutTheAxisIsAMistakeOfOurs) {
  EXPECT_THROW((Point{Op::gemm, Format::bf16, Copy::gather, {1, 2, 3}, 0}.at("heads")), std::logic_error);
  EXPECT_EQ((Point{Op::gemm, Format::bf16, Copy::gather, {1, 2, 3}, 0}.at("k")), 3);
  EXPECT_EQ(describe({Op::gemm, Format::fp8, Copy::gather, {1, 2, 3}, 0}), "gemm fp8 m=1 n=2 k=3");
  EXPECT_EQ(describe({Op::kv_copy, Format::bf16, Copy::batch_h2d, {256, 10, 0}, 0}),
            "kv-copy batch-h2d run_bytes=256 runs=10 sms=0");
}

}  // namespace
}  // namespace pdsim::kernels
