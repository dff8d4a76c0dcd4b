// Theory of the measuring rule. A series x_1 .. x_n with mean m and standard deviation s (n - 1 in the
// denominator) has spread s / m. It ends when enough was measured and
//   s / m < noise            the result is as sharp as asked                  (noise)
//   spread(n) >= spread(n/2) what is left is not chance that averages away    (steady)
// and otherwise when the time is up (timeout). Samples below 75 % of the nominal clock are no part of it.
#include "kernels/statistics.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace pdsim::kernels {
namespace {

constexpr StopRule kRule = {.least_seconds = 0, .timeout_seconds = 1, .noise = 0.005, .least_samples = 10};

TEST(Statistics, MedianOfEvenAndOddCounts) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median({7}), 7);
}

TEST(Statistics, AQuietSeriesEndsAtTheLeastCount) {
  Series series(kRule, 0);
  for (int i = 0; i < 9; ++i) {
    series.add(100, 0, 0);
    ASSERT_EQ(series.stop(), Stop::none) << i;
  }
  series.add(100, 0, 0);
  EXPECT_EQ(series.stop(), Stop::noise);
  EXPECT_EQ(series.result().samples, 10);
  EXPECT_EQ(series.result().median_us, 100);
  EXPECT_EQ(series.result().spread, 0);
}

TEST(Statistics, EnoughIsAlsoMeasuredTime) {
  StopRule rule = kRule;
  rule.least_seconds = 0.002;  // 20 samples of 100 us
  Series series(rule, 0);
  int n = 0;
  while (series.stop() == Stop::none) {
    series.add(100, 0, 0);
    ++n;
  }
  EXPECT_EQ(n, 20);
}

TEST(Statistics, SpreadIsTheStandardDeviationOverTheMean) {
  Series series(kRule, 0);
  for (const double us : {90.0, 110.0, 90.0, 110.0}) series.add(us, 0, 0);
  EXPECT_NEAR(series.result().spread, std::sqrt(400.0 / 3) / 100, 1e-12);
}

// Alternating 90 and 110 has s / m = 0.1 sqrt(n / (n - 1)), which falls for ever towards 0.1 and would never
// be below 0.005; the drift 100, 101, 102 ... has a spread that grows: measuring on makes it worse.
TEST(Statistics, NoiseThatGrowsEndsAsSteadyAndNoiseThatFallsAtTheTimeout) {
  Series drift(kRule, 0);
  int n = 0;
  while (drift.stop() == Stop::none) drift.add(100 + n++, 0, 0);
  EXPECT_EQ(drift.stop(), Stop::steady);
  EXPECT_EQ(n, 20);  // the first n whose half has the least count

  Series falling(kRule, 0);
  for (int i = 0; i < 1000; ++i) {
    falling.add(i % 2 == 0 ? 90 : 110, 0, 0.001 * i);
    ASSERT_EQ(falling.stop(), Stop::none) << i;
  }
  falling.add(100, 0, 1);
  EXPECT_EQ(falling.stop(), Stop::timeout);
}

TEST(Statistics, SamplesAtALowClockAreCountedAndNotUsed) {
  Series series(kRule, 2000);
  series.add(100, 1500, 0);  // exactly the threshold: kept
  EXPECT_EQ(series.pause_seconds(), 0);
  series.add(900, 1499, 0);
  EXPECT_DOUBLE_EQ(series.pause_seconds(), 0.05);
  series.add(900, 1000, 0);
  EXPECT_DOUBLE_EQ(series.pause_seconds(), 0.1);
  for (int i = 0; i < 20; ++i) series.add(900, 1000, 0);
  EXPECT_DOUBLE_EQ(series.pause_seconds(), 2);
  series.add(102, 1900, 0);
  EXPECT_EQ(series.pause_seconds(), 0);
  const Measured measured = series.result();
  EXPECT_EQ(measured.samples, 2);
  EXPECT_EQ(measured.throttled, 22);
  EXPECT_EQ(measured.median_us, 101);
  EXPECT_EQ(measured.clock_mhz, 1700);
}

TEST(Statistics, AGpuThatIsNeverAtFullClockHasNoResult) {
  Series series(kRule, 2000);
  for (int i = 0; i < 50; ++i) series.add(100, 300, 0.01 * i);
  EXPECT_EQ(series.stop(), Stop::none);
  series.add(100, 300, 1);
  EXPECT_EQ(series.stop(), Stop::throttled);
  EXPECT_EQ(series.result().samples, 0);
}

TEST(Statistics, AnUnknownClockThrowsNothingAway) {
  Series unknown(kRule, 0), unsampled(kRule, 2000);
  unknown.add(100, 300, 0);
  unsampled.add(100, 0, 0);
  EXPECT_EQ(unknown.result().throttled + unsampled.result().throttled, 0);
}

}  // namespace
}  // namespace pdsim::kernels
