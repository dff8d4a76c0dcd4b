// Each policy's promise, and that none favours a worker for its number.
#include "sim/routing/policies.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "sim/scenario/names.hpp"

namespace pdsim {
namespace {

struct Router {
  std::vector<WorkerLoad> load;
  std::vector<std::int32_t> hits;
  std::vector<std::uint32_t> candidates;
  RouterState state;
  Random random{1, Purpose::routing};
  RouterView view;

  explicit Router(std::size_t workers) : load(workers), hits(workers), candidates(workers) {
    std::iota(candidates.begin(), candidates.end(), 0u);
    view.load = load;
    view.hit_tokens = hits;
    view.prompt_tokens = 1000;
  }
  std::uint32_t choose(std::string_view policy) {
    return routing_policy(policy).choose(view, candidates, state, random);
  }
  std::vector<int> count(std::string_view policy, int draws) {
    std::vector<int> counts(load.size());
    for (int i = 0; i < draws; ++i) ++counts[choose(policy)];
    return counts;
  }
};

/// Sum of (observed - expected)^2 / expected; for n - 1 degrees of freedom 99.9 % lie below the bounds used.
double chi_square(const std::vector<int>& counts, const std::vector<double>& expected) {
  double sum = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    sum += (counts[i] - expected[i]) * (counts[i] - expected[i]) / expected[i];
  }
  return sum;
}

TEST(Policies, TableHasTheNamesOfTheScenario) {
  const auto table = routing_policies();
  ASSERT_EQ(table.size(), std::size(kRouterPolicies));
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(table[i].name, kRouterPolicies[i].name);
    EXPECT_EQ(&routing_policy(table[i].name), &table[i]);
    EXPECT_EQ(table[i].uses_cache, table[i].name == "prefix_aware");
  }
}

// Whatever the view: the choice is a candidate, and the same view, state and draws give the same choice.
TEST(Policies, ChooseACandidateAndRepeat) {
  Random random(2, Purpose::routing);
  for (const RoutingPolicy& policy : routing_policies()) {
    for (int i = 0; i < 2000; ++i) {
      Router a(8);
      a.candidates.clear();
      for (std::uint32_t w = 0; w < 8; ++w) {
        if (random.below(2) == 0) a.candidates.push_back(w);
        a.load[w] = {static_cast<std::int32_t>(random.below(5)),
                     static_cast<std::int64_t>(random.below(9000)),
                     static_cast<std::int64_t>(random.below(9000))};
        a.hits[w] = static_cast<std::int32_t>(random.below(1000));
      }
      if (a.candidates.empty()) a.candidates.push_back(3);
      a.view.session = random.below(4);
      a.state.turn = random.below(100);
      RouterState again = a.state;
      Random draws = a.random;
      const std::uint32_t chosen = a.choose(policy.name);
      EXPECT_TRUE(std::ranges::count(a.candidates, chosen) == 1) << policy.name;
      EXPECT_EQ(policy.choose(a.view, a.candidates, again, draws), chosen) << policy.name;
    }
  }
}

// Equal workers get equal shares: a tie never goes to worker 0 for being worker 0.
TEST(Policies, TiesAreShared) {
  for (const RoutingPolicy& policy : routing_policies()) {
    if (policy.name == "session_affinity") continue;  // below: shares of sessions
    Router router(5);
    const std::vector<int> counts = router.count(policy.name, 5000);
    EXPECT_LT(chi_square(counts, std::vector<double>(5, 1000)), 18.5) << policy.name;
  }
}

TEST(RoundRobin, EachInTurnWhateverTheLoad) {
  Router router(3);
  router.load[0].context_tokens = 1 << 30;
  router.candidates = {0, 2};
  EXPECT_EQ((std::vector<std::uint32_t>{router.choose("round_robin"), router.choose("round_robin"),
                                        router.choose("round_robin"), router.choose("round_robin")}),
            (std::vector<std::uint32_t>{0, 2, 0, 2}));
}

TEST(LeastLoaded, FewestTokensThenFewestRequests) {
  Router router(4);
  router.load = {{9, 100, 400}, {1, 300, 199}, {5, 0, 500}, {1, 200, 300}};
  router.view.load = router.load;
  for (int i = 0; i < 8; ++i) EXPECT_EQ(router.choose("least_loaded"), 1u);  // 499 tokens
  router.load[1].context_tokens = 200;  // all 500: 1 and 3 have one request
  const std::vector<int> counts = router.count("least_loaded", 400);
  EXPECT_EQ(counts[0] + counts[2], 0);
  EXPECT_GT(counts[1], 0);
  EXPECT_GT(counts[3], 0);
  // Prompts still to compute and context in memory weigh the same.
  router.load[0].context_tokens = 10;
  EXPECT_EQ(router.choose("least_loaded"), 0u);
}

// Of workers with distinct loads, the i-th of n in order of load (from 0) is the lesser of the two with
// probability 2 (n - 1 - i) / (n (n - 1)); the most loaded never.
TEST(PowerOfTwo, NeverTheMoreLoadedOfTwo) {
  Router router(5);
  for (std::uint32_t w = 0; w < 5; ++w) router.load[w].context_tokens = (w * 3 + 2) % 5;  // 2 0 3 1 4
  const std::vector<int> counts = router.count("power_of_two", 10'000);
  EXPECT_EQ(counts[4], 0);
  std::vector<double> expected(5);
  for (std::uint32_t w = 0; w < 4; ++w) {
    expected[w] = 10'000 * 2.0 * static_cast<double>(4 - router.load[w].context_tokens) / 20;
  }
  EXPECT_LT(chi_square({counts.begin(), counts.end() - 1}, {expected.begin(), expected.end() - 1}), 16.3);

  router.candidates = {1, 4};
  EXPECT_EQ(router.count("power_of_two", 100)[1], 100);
  router.candidates = {4};
  EXPECT_EQ(router.choose("power_of_two"), 4u);
}

// cost = tokens to compute + load_weight x tokens in flight. A hit of 600 of 1000 tokens is worth 600
// tokens of load at weight 1, 300 at weight 2, any load at weight 0.
TEST(PrefixAware, WeighsTokensSavedAgainstLoad) {
  struct Case {
    double weight;
    std::int64_t load;
    std::uint32_t chosen;
  };
  for (const Case& c : {Case{1, 599, 0}, Case{1, 601, 1}, Case{2, 299, 0}, Case{2, 301, 1},
                        Case{0, 1'000'000, 0}, Case{0.5, 1199, 0}, Case{0.5, 1201, 1}}) {
    Router router(2);
    router.hits[0] = 600;
    router.load[0].context_tokens = c.load;
    router.view.load_weight = c.weight;
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(router.choose("prefix_aware"), c.chosen) << c.weight << " x " << c.load;
    }
  }
}

TEST(SessionAffinity, AnyTurnOfASessionGoesToItsWorker) {
  Router router(7);
  std::map<std::uint64_t, std::uint32_t> home;
  for (int turn = 0; turn < 3; ++turn) {
    for (std::uint64_t session = 1; session <= 500; ++session) {
      router.view.session = session;
      router.load[static_cast<std::size_t>(turn)].context_tokens += 1000;  // matters to no session
      const std::uint32_t worker = router.choose("session_affinity");
      EXPECT_EQ(home.emplace(session, worker).first->second, worker);
    }
  }
}

TEST(SessionAffinity, SessionsSpreadEvenly) {
  Router router(6);
  std::vector<int> counts(6);
  for (std::uint64_t session = 1; session <= 6000; ++session) {
    router.view.session = session;
    ++counts[router.choose("session_affinity")];
  }
  EXPECT_LT(chi_square(counts, std::vector<double>(6, 1000)), 20.6);
}

// Rendezvous hashing: without worker w exactly the sessions of w move, each anywhere; so 1 / n of them.
TEST(SessionAffinity, WithoutAWorkerOnlyItsSessionsMove) {
  Router all(8), fewer(8);
  fewer.candidates = {0, 1, 2, 4, 5, 6, 7};
  int moved = 0;
  std::vector<int> to(8);
  for (std::uint64_t session = 1; session <= 8000; ++session) {
    all.view.session = fewer.view.session = session;
    const std::uint32_t before = all.choose("session_affinity"), after = fewer.choose("session_affinity");
    if (before != 3) {
      EXPECT_EQ(before, after);
    } else {
      ++moved;
      ++to[after];
    }
  }
  EXPECT_NEAR(moved, 1000, 4 * 29.6);  // binomial(8000, 1/8)
  EXPECT_GT(*std::min_element(to.begin(), to.begin() + 3), moved / 14);
}

TEST(SessionAffinity, NoSessionGoesToTheLeastLoaded) {
  Router router(3);
  router.load[0].context_tokens = router.load[2].context_tokens = 5;
  EXPECT_EQ(router.choose("session_affinity"), 1u);
}

}  // namespace
}  // namespace pdsim
