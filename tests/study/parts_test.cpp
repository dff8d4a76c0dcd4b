// Theory: the parts that studies are made of. Work is done once each whatever the threads; statistics are
// those of textbooks; an objective is a place in a summary.
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"
#include "tools/study/objective.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/statistics.hpp"
#include "tools/study/text.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

TEST(Parallel, EachPieceOnceWhateverTheThreads) {
  for (const unsigned jobs : {1u, 2u, 7u}) {
    std::vector<std::atomic<int>> times(100);
    std::uint64_t last = 0;
    parallel_for(
        times.size(), jobs, [&](std::size_t i) { ++times[i]; },
        [&](std::uint64_t done, std::uint64_t total) {
          EXPECT_EQ(done, last + 1);
          EXPECT_EQ(total, 100u);
          last = done;
        });
    for (const auto& n : times) EXPECT_EQ(n, 1);
    EXPECT_EQ(last, 100u);
  }
  parallel_for(0, 2, [](std::size_t) { FAIL(); });
}

// Of several that fail, the first by number is reported, and nothing begins after one has failed.
TEST(Parallel, TheFirstFailureIsThrown) {
  std::atomic<int> begun{0};
  const auto work = [&](std::size_t i) {
    ++begun;
    if (i == 3 || i == 5) throw std::runtime_error(std::to_string(i));
  };
  try {
    parallel_for(1000, 1, work);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "3");
  }
  EXPECT_EQ(begun, 4);
}

// Student (1908): of 1, 2, 3, 4 the mean is 2.5, s = 1.2910, t(0.975, 3) = 3.1824, half-width 2.0543.
TEST(Statistics, StudentsInterval) {
  const std::vector<double> values{1, 2, 3, 4};
  const auto interval = interval_of(values, Replicated::seeds);
  ASSERT_TRUE(interval);
  EXPECT_DOUBLE_EQ(interval->mean, 2.5);
  EXPECT_NEAR(interval->high - interval->mean, 2.0543, 1e-4);
  EXPECT_NEAR(interval->mean - interval->low, 2.0543, 1e-4);
  EXPECT_EQ(interval->n, 4);
  for (const Replicated how : {Replicated::seeds, Replicated::sessions}) {
    EXPECT_FALSE(interval_of(std::vector<double>{1}, how));
  }
  // Of one trace drawn anew, s is the error of the figure itself: 3.1824 x 1.2910 = 4.1085.
  const auto bootstrap = interval_of(values, Replicated::sessions);
  EXPECT_DOUBLE_EQ(bootstrap->mean, 2.5);
  EXPECT_NEAR(bootstrap->high - bootstrap->mean, 4.1085, 1e-4);
}

// Means of exponential data drawn anew: their interval holds the true mean about 95 times in 100 however many
// they are, while that of a mean of seeds, s / sqrt(n), would shrink onto the one sample that there is.
TEST(Statistics, TheBootstrapsIntervalCoversAndDoesNotShrink) {
  constexpr int kTrials = 400, kData = 100;
  constexpr double kTrue = 1;
  Random random(1, Purpose::sampling);
  const auto half = [](const Interval& i) { return (i.high - i.low) / 2; };
  int covered = 0, covered_as_seeds = 0;
  double halves_of_20 = 0, halves_of_80 = 0, seeds_of_20 = 0, seeds_of_80 = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> data(kData), means;
    for (double& x : data) x = random.exponential(kTrue);
    for (int r = 0; r < 80; ++r) {
      double sum = 0;
      for (int i = 0; i < kData; ++i) sum += data[random.below(kData)];
      means.push_back(sum / kData);
    }
    const std::span<const double> all(means), few = all.first(20);
    const Interval of_20 = *interval_of(few, Replicated::sessions);
    const Interval as_seeds = *interval_of(few, Replicated::seeds);
    covered += of_20.low <= kTrue && kTrue <= of_20.high ? 1 : 0;
    covered_as_seeds += as_seeds.low <= kTrue && kTrue <= as_seeds.high ? 1 : 0;
    halves_of_20 += half(of_20);
    halves_of_80 += half(*interval_of(all, Replicated::sessions));
    seeds_of_20 += half(as_seeds);
    seeds_of_80 += half(*interval_of(all, Replicated::seeds));
  }
  EXPECT_GE(covered, 0.85 * kTrials);
  EXPECT_LE(covered, 0.99 * kTrials);
  EXPECT_LT(covered_as_seeds, 0.6 * kTrials);
  EXPECT_GT(halves_of_80 / halves_of_20, 0.9);  // t(0.975, 79) / t(0.975, 19) = 0.951
  EXPECT_LT(seeds_of_80 / seeds_of_20, 0.5);    // ... / 2
}

// numpy.percentile([10, 20, 40], [0, 25, 50, 90, 100]) = 10, 15, 20, 36, 40.
TEST(Statistics, PercentilesAreNumpysLinearOnes) {
  const std::vector<double> values{40, 10, 20};
  EXPECT_DOUBLE_EQ(percentile_of(values, 0), 10);
  EXPECT_DOUBLE_EQ(percentile_of(values, 25), 15);
  EXPECT_DOUBLE_EQ(percentile_of(values, 50), 20);
  EXPECT_DOUBLE_EQ(percentile_of(values, 90), 36);
  EXPECT_DOUBLE_EQ(percentile_of(values, 100), 40);
}

TEST(Objective, IsANameOrAPath) {
  EXPECT_EQ(find_objective("goodput", "x").path, "goodput.requests_per_s");
  EXPECT_FALSE(find_objective("goodput", "x").less_is_better);
  EXPECT_TRUE(find_objective("ttft_p95", "x").less_is_better);
  EXPECT_TRUE(find_objective("min:cache.preemptions", "x").less_is_better);
  EXPECT_EQ(find_objective("max:cache.local_hit_tokens", "x").path, "cache.local_hit_tokens");
  try {
    find_objective("ttft_p9", "--objective");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'ttft_p95'"), std::string::npos) << error.what();
  }
}

TEST(Objective, PathsLeadToNumbers) {
  const auto summary = ordered_json::parse(
      R"({"a": {"b": 1.5, "n": null}, "workers": [{"name": "prefill-0", "busy": 0.5}], "t": "text"})");
  EXPECT_EQ(number_at(summary, "a.b", "x"), 1.5);
  EXPECT_EQ(number_at(summary, "a.n", "x"), std::nullopt);
  EXPECT_EQ(number_at(summary, "workers.prefill-0.busy", "x"), 0.5);
  EXPECT_EQ(number_at(summary, "workers.0.busy", "x"), 0.5);
  const auto message = [&](const char* path) -> std::string {
    try {
      number_at(summary, path, "--objective");
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("a.zzzz"), "--objective: a has no 'zzzz', expected one of b, n");
  EXPECT_EQ(
      message("workrs"),
      "--objective: the summary has no 'workrs' (did you mean 'workers'?), expected one of a, workers, t");
  EXPECT_EQ(message("t"), "--objective: t is string, expected a number");
}

TEST(Text, WholeDigitsStandInThrees) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(-1234567.891, 2), "-1,234,567.89");
  EXPECT_EQ(grouped(999.96, 1), "1,000.0");
  EXPECT_EQ(grouped(-0.04, 1), "0.0");
}

// A word that would pass the width begins a line; a number keeps its per cent sign, a joined blank its words;
// columns are code points.
TEST(Text, LinesEndBetweenWords) {
  std::string out = "label ";
  wrap(out, 6, "one two 12 % end", 12);
  EXPECT_EQ(out, "label one\n      two\n      12 %\n      end\n");
  out.clear();
  wrap(out, 2, std::string("a") + kJoined + "b c", 4);
  EXPECT_EQ(out, "a b\n  c\n");
  out.clear();
  wrap(out, 0, "\u00b1\u00b1 \u00b1", 4);
  EXPECT_EQ(out, "\u00b1\u00b1 \u00b1\n");
  EXPECT_EQ(wrapped("", 3), "");
  EXPECT_EQ(wrapped("x", 3), "   x\n");
}

// Ties go to what is simpler to operate.
TEST(Objective, ColocatedIsSimplerThanPullThanPushThanBidirectional) {
  Scenario colocated, pull, push, both;
  colocated.pools.resize(1);
  pull.pools.resize(2);
  pull.pools[0].role = Role::prefill;
  pull.pools[1].role = Role::decode;
  push = both = pull;
  push.transfer.mode = TransferMode::push;
  both.transfer.bidirectional = true;
  EXPECT_LT(complexity(colocated), complexity(pull));
  EXPECT_LT(complexity(pull), complexity(push));
  EXPECT_LT(complexity(push), complexity(both));
  EXPECT_EQ(deployment_kind(colocated), "colocated");
  EXPECT_EQ(deployment_kind(both), "pull, bidirectional");
}

}  // namespace
}  // namespace pdsim
