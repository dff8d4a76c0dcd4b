// Theory: our transcendental functions agree with libm to 1e-13; distributions have their moments;
// percentiles are numpy's; histograms err by at most 0.1 %.
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/histogram.hpp"
#include "sim/core/math.hpp"
#include "sim/core/random.hpp"
#include "sim/core/time.hpp"

namespace pdsim {
namespace {

TEST(Time, RoundsUpOnce) {
  EXPECT_EQ(ceil_ns(0.0), 0);
  EXPECT_EQ(ceil_ns(1.0), 1);
  EXPECT_EQ(ceil_ns(1.0000001), 2);
  EXPECT_EQ(ceil_ns(2.9999), 3);
  EXPECT_EQ(ceil_ns(1e18), 1'000'000'000'000'000'000);
}

TEST(Math, LogAndExpAgreeWithLibm) {
  for (double x = 1e-300; x < 1e300; x *= 1.37) {
    EXPECT_NEAR(math::log(x), std::log(x), 1e-14 * std::max(1.0, std::abs(std::log(x)))) << x;
  }
  EXPECT_NEAR(math::log(5e-324), std::log(5e-324), 1e-11);
  for (double x = -699.0; x < 700.0; x += 0.613) {
    EXPECT_NEAR(math::exp(x) / std::exp(x), 1.0, 1e-13) << x;
  }
  EXPECT_EQ(math::exp(0.0), 1.0);
  EXPECT_EQ(math::log(1.0), 0.0);
  EXPECT_TRUE(std::isinf(math::exp(1000.0)));
  EXPECT_EQ(math::exp(-1000.0), 0.0);
}

TEST(Math, SmoothMaximum) {
  EXPECT_DOUBLE_EQ(math::smooth_max(3.0, 4.0, 2.0), 5.0);
  EXPECT_DOUBLE_EQ(math::smooth_max(0.0, 4.0, 2.0), 4.0);
  EXPECT_NEAR(math::smooth_max(3.0, 4.0, 1.0), 7.0, 1e-12);
  EXPECT_NEAR(math::smooth_max(3.0, 4.0, 60.0), 4.0, 1e-7);
  EXPECT_DOUBLE_EQ(math::smooth_max(1e300, 1e300, 1.0), 2e300);
}

// Known answers of Philox4x32-10 (Random123's kat_vectors).
TEST(Random, PhiloxKnownAnswers) {
  using C = std::array<std::uint32_t, 4>;
  EXPECT_EQ(Random::philox({0, 0, 0, 0}, {0, 0}), (C{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Random::philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (C{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Random, StreamsAreIndependentOfEachOther) {
  Random a(1, Purpose::arrivals), b(1, Purpose::lengths), c(1, Purpose::arrivals), d(1, Purpose::arrivals, 9);
  const std::uint64_t first = a.bits();
  EXPECT_NE(first, b.bits());
  EXPECT_NE(first, d.bits());
  EXPECT_EQ(first, c.bits());
}

TEST(Random, Moments) {
  const int n = 200000;
  double u = 0, uu = 0, e = 0, z = 0, zz = 0;
  Random random(3, Purpose::lengths);
  for (int i = 0; i < n; ++i) {
    const double x = random.uniform();
    ASSERT_TRUE(x >= 0 && x < 1);
    u += x, uu += x * x;
    e += random.exponential(2.0);
    const double g = random.normal();
    z += g, zz += g * g;
    ASSERT_LT(random.below(7), 7u);
  }
  EXPECT_NEAR(u / n, 0.5, 4 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(uu / n, 1.0 / 3, 0.003);
  EXPECT_NEAR(e / n, 2.0, 4 * 2.0 / std::sqrt(n));
  EXPECT_NEAR(z / n, 0.0, 4 / std::sqrt(n));
  EXPECT_NEAR(zz / n, 1.0, 0.015);
}

// numpy.percentile([1, 2, 4, 8], [50, 90, 95]) = 3.0, 6.8, 7.4
TEST(Percentiles, AreNumpysLinearOnes) {
  const Distribution d = distribution_of({8, 1, 4, 2});
  EXPECT_DOUBLE_EQ(d.p50, 3.0);
  EXPECT_DOUBLE_EQ(d.p90, 6.8);
  EXPECT_DOUBLE_EQ(d.p95, 7.4);
  EXPECT_DOUBLE_EQ(d.max, 8.0);
  EXPECT_DOUBLE_EQ(d.mean, 3.75);
  EXPECT_EQ(d.n, 4u);
  EXPECT_EQ(distribution_of({}).n, 0u);
  EXPECT_DOUBLE_EQ(distribution_of({5}).p99, 5.0);
}

TEST(Histogram, ErrsByAtMostATenthOfAPercent) {
  for (Nanos value = 1; value < kSecond * 1000; value += value / 3 + 1) {
    Histogram h;
    h.add(value);
    h.add(value * 5);
    EXPECT_NEAR(h.quantile(0.0), static_cast<double>(value), 0.001 * static_cast<double>(value));
    EXPECT_EQ(h.quantile(1.0), static_cast<double>(value * 5));
  }
}

// Of few values, far apart, a percentile lies between two of them: numpy's does, and so does this one.
TEST(Histogram, InterpolatesBetweenFarValues) {
  Histogram h;
  std::vector<double> values;
  for (const double ms : {4.8, 4.9, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7, 188.0}) {
    h.add(static_cast<Nanos>(ms * 1e6));
    values.push_back(ms);
  }
  const Distribution exact = distribution_of(values), near = h.distribution(1e6);
  EXPECT_NEAR(near.p95, exact.p95, 0.001 * exact.p95);
  EXPECT_NEAR(near.p99, exact.p99, 0.001 * exact.p99);
}

TEST(Histogram, AgreesWithTheExactDistribution) {
  Random random(5, Purpose::lengths);
  std::vector<double> values;
  Histogram h;
  for (int i = 0; i < 20000; ++i) {
    const auto v = static_cast<Nanos>(random.exponential(3e7));
    values.push_back(static_cast<double>(v) / 1e6);
    h.add(v);
  }
  const Distribution exact = distribution_of(values), near = h.distribution(1e6);
  EXPECT_NEAR(near.mean, exact.mean, 1e-9 * exact.mean);
  EXPECT_DOUBLE_EQ(near.max, exact.max);
  EXPECT_NEAR(near.p50, exact.p50, 0.001 * exact.p50);
  EXPECT_NEAR(near.p90, exact.p90, 0.001 * exact.p90);
  EXPECT_NEAR(near.p99, exact.p99, 0.001 * exact.p99);
  Histogram weighted, repeated;
  weighted.add(1234567, 3);
  for (int i = 0; i < 3; ++i) repeated.add(1234567);
  EXPECT_EQ(weighted.n(), repeated.n());
  EXPECT_EQ(weighted.quantile(0.5), repeated.quantile(0.5));
}

TEST(Errors, SuggestTheNearestName) {
  const std::vector<std::string_view> names = {"round_robin", "random", "least_loaded"};
  EXPECT_EQ(nearest("round-robin", names), "round_robin");
  EXPECT_EQ(nearest("leastloaded", names), "least_loaded");
  EXPECT_EQ(nearest("quantum", names), "");
  EXPECT_EQ(did_you_mean("rondom", names), " (did you mean 'random'?)");
  EXPECT_STREQ(InputError("a.json: /pools/0", "expected > 0").what(), "a.json: /pools/0: expected > 0");
}

}  // namespace
}  // namespace pdsim
