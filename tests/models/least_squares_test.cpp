// Corrections and their fit.
//
//   octave(x) is log2 at powers of two and linear between them.
//   A grid is multilinear in octaves and constant beyond its ends.
//   Rows made by a function that the grid can hold give that function back; a node without rows is filled
//   so that second differences and interactions are least: where values are a(n) + b(k), it gets exactly
//   that sum; a few wild rows move nothing.
//   Least squares in the logarithm return the coefficients that rows were made with.
#include "models/fit/least_squares.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace pdsim {
namespace {

TEST(Octave, IsLog2AtPowersOfTwoAndLinearBetween) {
  for (int e = -20; e <= 40; ++e) EXPECT_DOUBLE_EQ(octave(std::ldexp(1.0, e)), e);
  EXPECT_DOUBLE_EQ(octave(3), 1.5);
  EXPECT_DOUBLE_EQ(octave(5), 2.25);
  EXPECT_DOUBLE_EQ(octave(12288), 13.5);
}

Correction grid_2x3() {
  Correction grid;
  grid.axes = {{"a", {1, 4}}, {"b", {2, 4, 16}}};
  grid.permille = {0, 100, 300, 1000, 1100, 1300};
  return grid;
}

TEST(Correction, IsMultilinearInOctavesAndConstantBeyond) {
  const Correction grid = grid_2x3();
  const auto log_at = [&](double a, double b) {
    const double at[] = {a, b};
    return 1000 * std::log(grid.factor(at));
  };
  EXPECT_NEAR(log_at(1, 2), 0, 1e-9);
  EXPECT_NEAR(log_at(4, 16), 1300, 1e-9);
  EXPECT_NEAR(log_at(2, 4), 600, 1e-9);       // half way in octaves from 1 to 4
  EXPECT_NEAR(log_at(1, 8), 200, 1e-9);       // half way from 4 to 16
  EXPECT_NEAR(log_at(2, 3), 500 + 50, 1e-9);  // octave(3) is half way from 2 to 4
  EXPECT_NEAR(log_at(0.1, 1), 0, 1e-9);       // below both
  EXPECT_NEAR(log_at(1e9, 1e9), 1300, 1e-9);  // above both
  EXPECT_NEAR(log_at(1e9, 4), 1100, 1e-9);
  EXPECT_DOUBLE_EQ(Correction().factor({}), 1);  // none: the formula alone
}

TEST(Correction, FixedAlongAnAxisIsTheSameFunction) {
  const Correction grid = grid_2x3();
  const Correction row = grid.fix(0, 2), column = grid.fix(1, 8);
  ASSERT_EQ(row.axes.size(), 1u);
  EXPECT_EQ(row.axes[0].name, "b");
  EXPECT_EQ(column.axes[0].name, "a");
  for (const double b : {1.0, 2.0, 3.0, 10.0, 99.0}) {
    const double whole[] = {2, b}, part[] = {b};
    EXPECT_NEAR(row.factor(part), grid.factor(whole), 1e-9) << b;
  }
  for (const double a : {1.0, 3.0, 9.0}) {
    const double whole[] = {a, 8}, part[] = {a};
    EXPECT_NEAR(column.factor(part), grid.factor(whole), 1e-9) << a;
  }
}

class Numbers {  // a deterministic stream of uniform numbers
 public:
  double in(double low, double high) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * static_cast<double>(state_ >> 11) * 0x1p-53;
  }

 private:
  std::uint64_t state_ = 1;
};

TEST(FitCorrection, ReturnsAFunctionThatTheGridHolds) {
  Correction grid;
  grid.axes = {{"m", {1, 8, 64}}, {"n", {32, 128, 512, 2048}}};
  const auto truth = [](double m, double n) { return 0.1 * octave(m) - 0.05 * octave(n); };
  CorrectionRows rows;
  Numbers random;
  for (int i = 0; i < 2000; ++i) {
    const double m = std::exp2(random.in(0, 6)), n = std::exp2(random.in(5, 11));
    rows.at.insert(rows.at.end(), {m, n});
    rows.log_ratio.push_back(i % 50 == 0 ? 3 : truth(m, n));  // one in fifty is wild
    rows.weight.push_back(1);
  }
  fit_correction(grid, {0, 0}, 0, rows);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 4; ++j) {
      EXPECT_NEAR(grid.permille[i * 4 + j], 1000 * truth(grid.axes[0].nodes[i], grid.axes[1].nodes[j]), 25);
    }
  }
}

TEST(FitCorrection, FillsAHoleFromWhatItsRowAndColumnDo) {
  // a(n) + b(k), rough in both, one node in the middle without rows: no interaction but there gives it
  // a(n) + b(k), where second differences alone would smooth a and b away.
  const double a[] = {0, 0.3, -0.2, 0.4, 0.1}, b[] = {0.2, -0.1, 0.25, 0, -0.3};
  const auto hole = [&](double stiffness, double interaction) {
    Correction grid;
    grid.axes = {{"n", {64, 128, 256, 512, 1024}}, {"k", {64, 128, 256, 512, 1024}}};
    CorrectionRows rows;
    for (std::size_t i = 0; i < 5; ++i) {
      for (std::size_t j = 0; j < 5; ++j) {
        if (i == 2 && j == 2) continue;
        rows.at.insert(rows.at.end(), {grid.axes[0].nodes[i], grid.axes[1].nodes[j]});
        rows.log_ratio.push_back(a[i] + b[j]);
        rows.weight.push_back(1);
      }
    }
    fit_correction(grid, {stiffness, stiffness}, interaction, rows);
    return grid.permille[12] / 1000.0;
  };
  EXPECT_NEAR(hole(1e-4, 0.1), a[2] + b[2], 0.02);
  EXPECT_GT(std::abs(hole(0.01, 0) - (a[2] + b[2])), 0.05);
}

TEST(FitCorrection, LeavesTheFormulaAloneWhereNothingIsKnown) {
  Correction grid;
  grid.axes = {{"n", {1, 2, 4, 8}}};
  CorrectionRows rows;
  rows.at = {1};
  rows.log_ratio = {0.5};
  rows.weight = {1};
  fit_correction(grid, {0}, 0, rows);
  EXPECT_NEAR(grid.permille[0], 500, 1);
  EXPECT_EQ(grid.permille[2], 0);
  EXPECT_EQ(grid.permille[3], 0);
}

TEST(FitCurve, ReturnsTheCoefficientsAndSparesGroups) {
  // t = (3 us + M(x / F, y / B)) times a ripple in y that the formula knows nothing of.
  struct Row {
    double x, y;
  };
  std::vector<Row> rows;
  std::vector<Sample> samples;
  const auto ripple = [](double y) { return std::fmod(octave(y), 2) < 1 ? 1.1 : 1 / 1.1; };
  const auto formula = [](double launch, double flops, double bytes, double o, const Row& r) {
    return launch + overlapped(r.x / flops, r.y / bytes, o);
  };
  for (double x = 1e6; x <= 1e12; x *= 4) {
    for (double y = 1024; y <= 1e9; y *= 2) {
      rows.push_back({x, y});
      samples.push_back({formula(3000, 5e5, 2000, 0.9, rows.back()) * ripple(y), hash_of({x, y}), 1});
    }
  }
  CurvePlan plan;
  Coefficients start;
  start.launch_ns = 5000;
  start.flops_per_ns = 7e5;
  start.bytes_per_ns = 3000;
  start.overlap = 0.8;
  plan.starts = {start};
  plan.free = {{&Coefficients::launch_ns, 500, 1e6},
               {&Coefficients::flops_per_ns, 1e4, 2e7},
               {&Coefficients::bytes_per_ns, 10, 1e5},
               {&Coefficients::overlap, 0, 1}};
  plan.kernel = [&](const Coefficients& c, std::size_t i) {
    return formula(c.launch_ns, c.flops_per_ns, c.bytes_per_ns, c.overlap, rows[i]);
  };
  std::vector<double> nodes;
  for (double y = 1024; y <= 1e9; y *= 2) nodes.push_back(y);
  plan.grids = {{{{"y", nodes}}, {1e-4}}};
  plan.point = [&](std::size_t i, double* at) { *at = rows[i].y; };
  Curve curve;
  fit_curve(curve, plan, samples);
  ASSERT_EQ(curve.regimes.size(), 1u);
  EXPECT_NEAR(curve.regimes[0].flops_per_ns, 5e5, 0.1 * 5e5);
  EXPECT_NEAR(curve.regimes[0].bytes_per_ns, 2000, 0.1 * 2000);
  EXPECT_FALSE(curve.correction.empty());
  EXPECT_GT(curve.error.rows, 20);
  EXPECT_LT(curve.error.rows, static_cast<std::int64_t>(samples.size()) / 2);
  EXPECT_LT(curve.error.median_ape, 0.02);  // the ripple is 10 %
  // A table of few rows holds each of them out once, and still learns the ripple.
  plan.coarse = plan.grids;
  Curve few;
  fit_curve(few, plan, samples);
  EXPECT_NEAR(few.regimes[0].flops_per_ns, 5e5, 0.1 * 5e5);
  EXPECT_FALSE(few.correction.empty());
  EXPECT_FALSE(few.in_sample);
  EXPECT_EQ(few.error.rows, static_cast<std::int64_t>(samples.size()));
  EXPECT_LT(few.error.median_ape, 0.02);
  // Without the grid the ripple stays.
  plan.coarse.clear();
  plan.grids.clear();
  Curve plain;
  fit_curve(plain, plan, samples);
  EXPECT_GT(plain.error.median_ape, 0.07);
}

}  // namespace
}  // namespace pdsim
