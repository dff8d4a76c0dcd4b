// Theory: the max-min rates of small problems have closed forms; those of any problem are proved by the
// bottleneck certificate, and are unique, so a plain solver that shares no code must find the same.
#include "sim/network/fair_share.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "sim/core/random.hpp"

namespace pdsim {
namespace {

using Crossings = std::vector<std::pair<std::uint32_t, double>>;  // link, weight

struct Flows {
  std::vector<double> capacity, bound = {}, weight = {};
  std::vector<std::uint32_t> first = {0}, link = {};

  void add(const Crossings& crossings, double limit = kUnbounded) {
    for (const auto& [l, w] : crossings) link.push_back(l), weight.push_back(w);
    first.push_back(static_cast<std::uint32_t>(link.size()));
    bound.push_back(limit);
  }
  FairShareProblem problem() const { return {capacity, bound, first, link, weight}; }
  std::vector<double> solve() const {
    FairShare solver;
    std::vector<double> rate(bound.size()), used(capacity.size());
    solver.solve(problem(), rate, used);
    std::string why;
    EXPECT_TRUE(certificate(problem(), rate, 1e-9, &why)) << why;
    return rate;
  }
};

using Rates = std::vector<double>;

TEST(FairShare, OneFlowTakesTheLeastOfItsLinks) {
  Flows f{.capacity = {50, 20, 80}};
  f.add({{0, 1}, {1, 1}, {2, 1}});
  EXPECT_EQ(f.solve(), (Rates{20}));
}

TEST(FairShare, NIntoOneGetAnNthEach) {
  Flows f{.capacity = {50}};
  for (int i = 0; i < 8; ++i) f.add({{0, 1}});
  EXPECT_EQ(f.solve(), Rates(8, 6.25));
}

// Parking lot: k links in a row, a long flow over all and a short one on each. All get half.
TEST(FairShare, ParkingLot) {
  Flows f{.capacity = Rates(5, 10.0)};
  f.add({{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}});
  for (std::uint32_t l = 0; l < 5; ++l) f.add({{l, 1}});
  EXPECT_EQ(f.solve(), Rates(6, 5.0));
}

// Two levels: link 0 (10) holds a, b; link 1 (100) holds b, c. a = b = 5, then c = 95.
TEST(FairShare, WhatABottleneckLeavesIsTakenElsewhere) {
  Flows f{.capacity = {10, 100}};
  f.add({{0, 1}});
  f.add({{0, 1}, {1, 1}});
  f.add({{1, 1}});
  EXPECT_EQ(f.solve(), (Rates{5, 5, 95}));
}

// Rates are equal, not shares of the link: x (1 + 2) = 30.
TEST(FairShare, WeightsCountInTheLinkAndNotInTheShare) {
  Flows f{.capacity = {30}};
  f.add({{0, 1}});
  f.add({{0, 2}});
  EXPECT_EQ(f.solve(), (Rates{10, 10}));
  Flows half{.capacity = {30}};  // efficiency 0.5 alone: half the line rate
  half.add({{0, 2}});
  EXPECT_EQ(half.solve(), (Rates{15}));
}

// One flow bounded at 2 of 20: the other two share 18.
TEST(FairShare, BoundsFreeCapacityForOthers) {
  Flows f{.capacity = {20}};
  f.add({{0, 1}}, 2);
  f.add({{0, 1}});
  f.add({{0, 1}}, 9.5);
  EXPECT_EQ(f.solve(), (Rates{2, 9, 9}));
}

TEST(FairShare, EdgeCases) {
  EXPECT_EQ(Flows{.capacity = {1}}.solve(), Rates{});
  Flows bound_only{.capacity = {}};
  bound_only.add({}, 7);
  EXPECT_EQ(bound_only.solve(), (Rates{7}));
  Flows dead{.capacity = {0, 10}};
  dead.add({{0, 1}, {1, 1}});
  dead.add({{1, 1}});
  EXPECT_EQ(dead.solve(), (Rates{0, 10}));
}

TEST(FairShare, TheCertificateRefusesWhatIsNotMaxMin) {
  Flows f{.capacity = {10, 100}};
  f.add({{0, 1}});
  f.add({{0, 1}, {1, 1}}, 8);
  std::string why;
  EXPECT_TRUE(certificate(f.problem(), Rates{5, 5}));
  EXPECT_FALSE(certificate(f.problem(), Rates{5, 5.1}, 1e-9, &why));
  EXPECT_EQ(why, "link 0 carries 10.1 of 10");
  EXPECT_FALSE(certificate(f.problem(), Rates{5, 4.9}, 1e-9, &why));
  EXPECT_EQ(why, "flow 0 could be faster: nothing holds it back");
  EXPECT_FALSE(certificate(f.problem(), Rates{6, 4}, 1e-9, &why)) << "full, but not fair";
  EXPECT_EQ(why, "flow 1 could be faster: nothing holds it back");
  Flows bounded{.capacity = {10}};
  bounded.add({{0, 1}}, 8);
  EXPECT_FALSE(certificate(bounded.problem(), Rates{9}, 1e-9, &why));
  EXPECT_EQ(why, "flow 0 has rate 9, bound 8");
}

Flows random_flows(Random& random, std::uint32_t links, std::uint64_t flows) {
  Flows f;
  for (std::uint32_t l = 0; l < links; ++l) {
    f.capacity.push_back(random.below(20) == 0 ? 0.0 : 1.0 + 100.0 * random.uniform());
  }
  const bool round = random.below(2) == 0;  // equal numbers make ties
  if (round) std::ranges::fill(f.capacity, 50.0);
  for (std::uint64_t i = 0; i < flows; ++i) {
    Crossings crossings;
    const std::uint64_t length = 1 + random.below(5);
    while (crossings.size() < std::min<std::uint64_t>(length, links)) {
      const auto l = static_cast<std::uint32_t>(random.below(links));
      if (std::ranges::any_of(crossings, [&](auto& c) { return c.first == l; })) continue;
      crossings.emplace_back(l, round ? 1.0 : 1.0 + 3.0 * random.uniform());
    }
    f.add(crossings, random.below(3) == 0 ? 0.01 + 30.0 * random.uniform() : kUnbounded);
  }
  return f;
}

// Raises all moving flows by the least step that fills a link or reaches a bound, in long double.
Rates plain_max_min(const Flows& f) {
  const std::size_t flows = f.bound.size(), links = f.capacity.size();
  std::vector<long double> rate(flows, 0.0L);
  std::vector<bool> stopped(flows, false);
  for (std::size_t left = flows; left > 0;) {
    std::vector<long double> room(f.capacity.begin(), f.capacity.end()), weight(links, 0.0L);
    const auto each = [&](std::size_t flow, auto&& visit) {
      for (std::uint32_t e = f.first[flow]; e < f.first[flow + 1]; ++e) visit(f.link[e], f.weight[e]);
    };
    for (std::size_t i = 0; i < flows; ++i) {
      each(i, [&](std::uint32_t l, double w) {
        room[l] -= w * rate[i];
        if (!stopped[i]) weight[l] += w;
      });
    }
    long double step = 1e30L;
    for (std::size_t l = 0; l < links; ++l) {
      if (weight[l] > 0) step = std::min(step, std::max(0.0L, room[l]) / weight[l]);
    }
    for (std::size_t i = 0; i < flows; ++i) {
      if (!stopped[i]) step = std::min(step, f.bound[i] - rate[i]);
    }
    for (std::size_t i = 0; i < flows; ++i) {
      if (!stopped[i]) rate[i] += step;
    }
    for (std::size_t i = 0; i < flows; ++i) {
      if (stopped[i]) continue;
      bool stop = rate[i] >= f.bound[i] * (1 - 1e-15L);
      each(i, [&](std::uint32_t l, double) {
        stop = stop || room[l] - weight[l] * step <= 1e-13L * f.capacity[l];
      });
      if (stop) stopped[i] = true, --left;
    }
  }
  return {rate.begin(), rate.end()};
}

TEST(FairShare, RandomProblemsHoldTheCertificateAndAgreeWithAPlainSolver) {
  Random random(7, Purpose::lengths);
  for (int i = 0; i < 4000; ++i) {
    const Flows f =
        random_flows(random, static_cast<std::uint32_t>(1 + random.below(30)), 1 + random.below(60));
    const Rates rate = f.solve(), plain = plain_max_min(f);
    for (std::size_t j = 0; j < rate.size(); ++j) {
      ASSERT_NEAR(rate[j], plain[j], 1e-9 * (1 + plain[j])) << "problem " << i << " flow " << j;
    }
  }
}

// Two problems side by side, their flows interleaved, have the bits of each alone.
TEST(FairShare, FlowsThatShareNothingDoNotMoveEachOtherByABit) {
  Random random(8, Purpose::lengths);
  for (int i = 0; i < 500; ++i) {
    const Flows a = random_flows(random, 12, 30), b = random_flows(random, 9, 30);
    Flows both{.capacity = a.capacity};
    both.capacity.insert(both.capacity.end(), b.capacity.begin(), b.capacity.end());
    for (std::size_t j = 0; j < 30; ++j) {
      for (const Flows* part : {&a, &b}) {
        Crossings crossings;
        for (std::uint32_t e = part->first[j]; e < part->first[j + 1]; ++e) {
          crossings.emplace_back(part->link[e] + (part == &b ? 12 : 0), part->weight[e]);
        }
        both.add(crossings, part->bound[j]);
      }
    }
    const Rates rate = both.solve(), of_a = a.solve(), of_b = b.solve();
    for (std::size_t j = 0; j < 30; ++j) {
      ASSERT_EQ(rate[2 * j], of_a[j]);
      ASSERT_EQ(rate[2 * j + 1], of_b[j]);
    }
  }
}

}  // namespace
}  // namespace pdsim
