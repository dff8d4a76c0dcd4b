// The engine as a queue with a closed form. With steps of one fixed length it is a server (M/D/1), or k of
// them (M/M/k), and Little's law holds whatever it is.
//
// A simulated mean is compared within 3.5 standard errors, which are estimated from batch means: waits in
// a queue are correlated over a busy period, so the run is cut into batches much longer than one, whose
// means are nearly independent. The standard error itself must be small, or the test would prove nothing.
#include <gtest/gtest.h>

#include <cmath>

#include "sim/core/random.hpp"
#include "tests/serving/driver.hpp"

namespace pdsim {
namespace {

constexpr Nanos kService = 1'000'000;

struct Estimate {
  double mean = 0, error = 0;
};

Estimate batch_means(const std::vector<double>& values) {
  constexpr std::size_t kBatches = 25;
  const std::size_t n = values.size() / kBatches;
  Estimate e;
  double sum = 0, squares = 0;
  for (std::size_t b = 0; b < kBatches; ++b) {
    double batch = 0;
    for (std::size_t i = 0; i < n; ++i) batch += values[b * n + i];
    batch /= static_cast<double>(n);
    sum += batch;
    squares += batch * batch;
  }
  e.mean = sum / kBatches;
  e.error = std::sqrt((squares / kBatches - e.mean * e.mean) / (kBatches - 1));
  return e;
}

EngineLimits servers(std::int32_t k, bool async, bool step_by_step = false) {
  EngineLimits limits;
  limits.block_size = 16;
  limits.max_num_seqs = k;
  limits.async = async;
  limits.step_by_step = step_by_step;
  return limits;
}

LinearClock fixed_step(Nanos ns) {
  LinearClock clock;
  clock.base = ns;
  return clock;
}

/// Little's law over a run that begins and ends empty: the integral of the number in the system equals the
/// sum of the times in it. The left side is what the engine says is in it, the right its arrivals and ends.
void expect_littles_law(const Driver& d) {
  double times = 0;
  for (const Driver::Fate& fate : d.fates) times += static_cast<double>(fate.finish - fate.arrival);
  EXPECT_NEAR(d.in_system_ns, times, 1e-12 * times);
}

// M/D/1: Poisson arrivals of rate lambda, one at a time, one step D each. Pollaczek-Khinchine:
//   E[wait] = rho D / (2 (1 - rho)),  rho = lambda D.
TEST(Queueing, MD1WaitIsPollaczekKhinchine) {
  for (const bool async : {false, true}) {
    for (const double rho : {0.3, 0.7, 0.85}) {
      SCOPED_TRACE("rho " + std::to_string(rho) + (async ? ", async" : ", sync"));
      Driver d(servers(1, async), fixed_step(kService), 100, false);
      d.keep_steps = false;
      Random random(11, Purpose::arrivals, static_cast<std::uint64_t>(rho * 100));
      double time = 0;
      for (int i = 0; i < 150'000; ++i) {
        time += random.exponential(static_cast<double>(kService) / rho);
        d.arrive(ceil_ns(time), 1, 1);
      }
      d.run();
      std::vector<double> waits;
      for (const Driver::Fate& fate : d.fates) {
        waits.push_back(static_cast<double>(fate.finish - fate.arrival - kService));
        ASSERT_GE(waits.back(), 0);
      }
      const Estimate e = batch_means(waits);
      const double theory = rho * static_cast<double>(kService) / (2 * (1 - rho));
      EXPECT_LT(e.error, 0.05 * theory);
      EXPECT_NEAR(e.mean, theory, 3.5 * e.error);
      expect_littles_law(d);
    }
  }
}

/// Erlang C: the probability that an arrival waits at k servers with offered load a = lambda / mu.
double erlang_c(int k, double a) {
  double inverse_b = 1;  // of Erlang B, by its recursion 1 / B(k) = 1 + k / (a B(k-1))
  for (int i = 1; i <= k; ++i) inverse_b = 1 + i / a * inverse_b;
  const double b = 1 / inverse_b;
  return b / (1 - a / k * (1 - b));
}

TEST(Queueing, ErlangCOfOneServerIsItsLoad) {
  EXPECT_NEAR(erlang_c(1, 0.6), 0.6, 1e-12);
  EXPECT_NEAR(erlang_c(2, 1.0), 1.0 / 3, 1e-12);
}

// M/M/k: k slots (max_num_seqs), a sequence holds one for a geometric number of steps with mean m. That is
// the exponential service of mean S = m D on a grid of D. E[wait] = C(k, a) S / (k (1 - rho)).
// The grid: a slot that is free at an arrival is entered at the next step's start, at most D later; a slot
// that is taken is handed over at a step's end, as in theory. So the mean lies in [theory, theory + D].
TEST(Queueing, MMkWaitIsErlangC) {
  constexpr int kSlots = 4;
  constexpr double kMeanSteps = 60;
  for (const double rho : {0.5, 0.8}) {
    SCOPED_TRACE("rho " + std::to_string(rho));
    constexpr Nanos kStep = 10'000;
    Driver d(servers(kSlots, false), fixed_step(kStep), 10'000, false);
    d.keep_steps = false;
    Random arrivals(12, Purpose::arrivals, static_cast<std::uint64_t>(rho * 100));
    Random lengths(12, Purpose::lengths, static_cast<std::uint64_t>(rho * 100));
    const double service = kMeanSteps * static_cast<double>(kStep);
    double time = 0;
    std::vector<std::int32_t> steps;
    for (int i = 0; i < 100'000; ++i) {
      time += arrivals.exponential(service / kSlots / rho);
      // P(steps > n) = (1 - 1/m)^n: an exponential rounded up.
      const double drawn = lengths.exponential(-1 / std::log1p(-1 / kMeanSteps));
      steps.push_back(1 + static_cast<std::int32_t>(drawn));
      d.arrive(ceil_ns(time), 1, steps.back());
    }
    d.run();
    std::vector<double> waits;
    for (std::size_t i = 0; i < d.fates.size(); ++i) {
      waits.push_back(static_cast<double>(d.fates[i].finish - d.fates[i].arrival - steps[i] * kStep));
      ASSERT_GE(waits.back(), 0);
    }
    const Estimate e = batch_means(waits);
    const double theory = erlang_c(kSlots, kSlots * rho) * service / (kSlots * (1 - rho));
    EXPECT_LT(e.error, 0.05 * theory);
    EXPECT_GT(e.mean, theory - 3.5 * e.error);
    EXPECT_LT(e.mean, theory + static_cast<double>(kStep) + 3.5 * e.error);
    expect_littles_law(d);
  }
}

// Little's law needs no assumption at all: mixed lengths, chunks, preemptions, loads.
TEST(Queueing, LittlesLawWithPreemptionsAndLoads) {
  for (const bool async : {false, true}) {
    LinearClock clock = fixed_step(500);
    clock.per_token = 7;
    clock.per_context = 1;
    EngineLimits limits = servers(12, async);
    limits.block_size = 4;
    limits.max_num_batched_tokens = 64;
    Driver d(limits, clock, 60);
    d.keep_steps = false;
    Random random(13, Purpose::lengths, async);
    Nanos time = 0;
    for (int i = 0; i < 3000; ++i) {
      time += static_cast<Nanos>(random.below(4000));
      const SeqId id = d.arrive(time, 1 + static_cast<std::int32_t>(random.below(100)),
                                1 + static_cast<std::int32_t>(random.below(60)));
      const bool remote = random.below(3) == 0;
      const auto wire = static_cast<Nanos>(random.below(9000));
      if (remote) d.lies_elsewhere(id, wire);
    }
    d.run();
    EXPECT_GT(d.engine.statistics().preemptions, 100);
    expect_littles_law(d);
  }
}

}  // namespace
}  // namespace pdsim
