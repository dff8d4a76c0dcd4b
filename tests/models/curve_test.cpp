// Kernel curves against what their formulas promise.
//
//   M(a, b) is the larger root of t^2 - (a + b) t + o a b = 0: max for o = 1, sum for o = 0, rising in a
//   and b, and subadditive: M(x + y) <= M(x) + M(y).
//   A gemm pays for ceil(tiles / slots) whole waves of tiles.
#include "models/gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

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

}  // namespace
}  // namespace pdsim
