// Speculative decoding in the scheduler. Theory: a decode step of a sequence verifies k drafts; the first
// i + 1 of them are accepted with probability A_i, so it yields 1 + sum of A_i tokens on average, which for
// an even acceptance a (A_i = a^(i+1)) is (1 - a^(k+1)) / (1 - a). What is rejected leaves no trace but time.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "sim/core/random.hpp"
#include "tests/serving/driver.hpp"

namespace pdsim {
namespace {

Speculation even(std::int32_t k, double a, std::int32_t lookahead = 0) {
  Speculation s;
  s.tokens = k;
  s.lookahead = lookahead;
  s.seed = 7;
  double all = 1;
  for (std::int32_t i = 0; i < k; ++i) s.accepted.push_back(all *= a);
  return s;
}

EngineLimits with(EngineLimits limits, const Speculation& speculation) {
  limits.speculation = speculation;
  return limits;
}

/// Nobody has blocks, and every token computed is a prompt's, an output's, computed again, or in vain.
void expect_conserved(const Driver& d) {
  EXPECT_EQ(d.engine.pool().free_blocks(), d.engine.pool().total_blocks());
  d.engine.pool().check();
  const Engine::Statistics& st = d.engine.statistics();
  std::int64_t due = 0;
  for (std::size_t i = 0; i < d.sequences.size(); ++i) {
    const Sequence& s = d.sequences[i];
    ASSERT_FALSE(d.fates[i].dead);
    EXPECT_EQ(s.known, s.final) << i;
    EXPECT_EQ(std::ssize(d.fates[i].tokens), s.final - s.prompt) << i;
    const std::int32_t found = std::min(s.hit_tokens + s.load_tokens, s.prompt - 1);  // its last is computed
    due += s.final - 1 - found + s.recomputed;
  }
  EXPECT_EQ(st.totals.decode_requests + st.totals.draft_tokens + st.totals.prefill_tokens,
            due + st.rejected_tokens - st.found_later);
  EXPECT_EQ(st.drafting.drafted,
            std::accumulate(st.drafting.drafted_at.begin(), st.drafting.drafted_at.end(), std::int64_t{0}));
  EXPECT_EQ(st.drafting.accepted,
            std::accumulate(st.drafting.by_position.begin(), st.drafting.by_position.end(), std::int64_t{0}));
  EXPECT_LE(st.drafting.yielded, st.drafting.rows + st.drafting.accepted);
}

TEST(Speculation, ExpectedTokensPerStep) {
  constexpr std::int32_t k = 4;
  for (const double a : {0.3, 0.8}) {
    Driver d(with(limits_of(16, 8, 4096, true), even(k, a)), {}, 4000);
    d.keep_steps = false;
    for (int i = 0; i < 8; ++i) d.arrive(0, 16, 3000);
    d.run();
    expect_conserved(d);
    const Engine::Drafting& got = d.engine.statistics().drafting;
    const auto rows = static_cast<double>(got.rows);
    double mean = 0, square = 0;  // of the accepted: P(n) = a^n (1 - a), the last one a^k
    for (std::int32_t n = 0; n <= k; ++n) {
      const double p = std::pow(a, n) * (n < k ? 1 - a : 1);
      mean += p * n;
      square += p * n * n;
    }
    EXPECT_NEAR(1 + mean, (1 - std::pow(a, k + 1)) / (1 - a), 1e-12);
    const double four_sigma = 4 * std::sqrt((square - mean * mean) / rows);
    EXPECT_NEAR(static_cast<double>(got.accepted) / rows, mean, four_sigma);
    EXPECT_NEAR(static_cast<double>(got.yielded) / rows, 1 + mean, four_sigma + 8.0 * k / rows);  // ends
    for (std::int32_t i = 0; i < k; ++i) {
      const double p = std::pow(a, i + 1), n = rows;
      EXPECT_NEAR(static_cast<double>(got.by_position[static_cast<std::size_t>(i)]) / n, p,
                  4 * std::sqrt(p * (1 - p) / n));
    }
  }
}

// No draft accepted: the tokens come as without speculation, step for step; each step has k + 1 tokens.
TEST(Speculation, NoneAcceptedIsTheSameSequenceAtAHigherCost) {
  for (const bool async : {false, true}) {
    const EngineLimits plain = limits_of(4, 4, 64, async);
    LinearClock clock;
    Driver a(plain, clock, 200), b(with(plain, even(3, 0)), clock, 200);
    clock.per_token = 5;
    Driver c(plain, clock, 200), e(with(plain, even(3, 0)), clock, 200);
    for (Driver* d : {&a, &b, &c, &e}) {
      for (int i = 0; i < 3; ++i) d->arrive(130 * i, 10 + 7 * i, 12 + i);
      d->run();
    }
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (std::size_t i = 0; i < a.fates.size(); ++i) {
      EXPECT_EQ(a.fates[i].tokens, b.fates[i].tokens);
      EXPECT_EQ(a.sequences[i].longest_gap, b.sequences[i].longest_gap);
      EXPECT_GT(e.fates[i].finish, c.fates[i].finish);
    }
    for (std::size_t i = 0; i < a.steps.size(); ++i) {
      EXPECT_EQ(a.steps[i].shape.decode_requests, b.steps[i].shape.decode_requests);
      EXPECT_EQ(b.steps[i].shape.draft_tokens, 3 * b.steps[i].shape.decode_requests);
      // Each row reads 3 tokens more: also what was scheduled before the outcome of the step before.
      EXPECT_EQ(b.steps[i].shape.decode_context,
                a.steps[i].shape.decode_context + 3 * a.steps[i].shape.decode_requests);
    }
    expect_conserved(b);
  }
}

// All accepted: k + 1 tokens a step. Prompt 10, 9 more: 11, 15, 19. The asynchronous scheduler is not sure
// that the third step is the last one: a fourth is thrown away.
TEST(Speculation, AllAccepted) {
  Driver sync(with(limits_of(4, 4, 64, false), even(3, 1)), {}, 100);
  Driver async(with(limits_of(4, 4, 64, true), even(3, 1)), {}, 100);
  for (Driver* d : {&sync, &async}) {
    d->arrive(0, 10, 9);
    d->run();
    EXPECT_EQ(d->fates[0].tokens, (std::vector<Nanos>{100, 200, 200, 200, 200, 300, 300, 300, 300}));
    expect_conserved(*d);
  }
  EXPECT_EQ(texts(sync), (Texts{"A10*", "A4*", "A4*"}));
  EXPECT_EQ(texts(async), (Texts{"A10*", "A4*", "A4*", "A4*"}));
  EXPECT_EQ(sync.engine.statistics().rejected_tokens, 0);
  EXPECT_EQ(async.engine.statistics().rejected_tokens, 4);
  // Eight gaps: two of a step, and none between tokens of one step.
  EXPECT_EQ(sync.gaps.n(), 8u);
  EXPECT_EQ(sync.gaps.distribution(1).max, 100);
  EXPECT_EQ(sync.gaps.distribution(1).mean, 200.0 / 8);
}

// An output ends in the middle of a step: what is beyond is thrown away.
TEST(Speculation, NeverBeyondTheOutput) {
  for (std::int32_t output = 1; output <= 12; ++output) {
    for (const bool async : {false, true}) {
      Driver d(with(limits_of(4, 4, 64, async), even(5, 1)), {}, 100);
      d.arrive(0, 6, output);
      d.run();
      EXPECT_EQ(std::ssize(d.fates[0].tokens), output);
      EXPECT_EQ(d.fates[0].finish, 100 * (1 + (output - 1 + 5) / 6));
      expect_conserved(d);
    }
  }
}

// Slots: a step's tokens, and `lookahead` beyond them; not so at admission (vLLM's effective_lookahead).
TEST(Speculation, SlotsAheadOfTheStep) {
  Driver d(with(limits_of(4, 4, 64, true), even(3, 0, 3)), {}, 100);
  d.arrive(0, 4, 20);
  std::vector<std::int32_t> sizes;
  d.context = &sizes;
  d.at_boundary = [](Driver& self, Nanos) {
    static_cast<std::vector<std::int32_t>*>(self.context)
        ->push_back(self.engine.pool().total_blocks() - self.engine.pool().free_blocks());
  };
  d.run();
  // At 0 prompt and first decode step: 4 + 4 + 3 slots. At 100 the step after it, for all four accepted:
  // 8 + 4 + 3. At 200 three are known to be rejected: 5 tokens, of which the step in flight makes 9: 9 + 7.
  ASSERT_GE(sizes.size(), 4u);
  EXPECT_EQ(sizes[0], 3);
  EXPECT_EQ(sizes[1], 4);
  EXPECT_EQ(sizes[2], 4);
  EXPECT_EQ(sizes[3], 5);
  expect_conserved(d);
}

// Drafts and slots end at max_model_len; the sequence that reaches it still gets every token.
TEST(Speculation, EndsAtTheModelsLength) {
  for (const double a : {0.0, 0.6, 1.0}) {
    for (const bool async : {false, true}) {
      EngineLimits limits = with(limits_of(4, 4, 64, async), even(5, a, 5));
      limits.max_model_len = 32;
      Driver d(limits, {}, 8);  // which is all that the pool holds
      d.arrive(0, 12, 20);
      d.run();
      expect_conserved(d);
      for (const Driver::Started& step : d.steps) EXPECT_LE(step.shape.decode_context, 31);
    }
  }
}

// What is left of the budget goes to fewer drafts; who gets none in a step has no drafts in the next, for
// the asynchronous scheduler reserves them for one step.
TEST(Speculation, CountsAgainstTheBudget) {
  Driver d(with(limits_of(4, 4, 6, true), even(3, 0)), {}, 100);
  d.arrive(0, 3, 8);
  d.arrive(0, 3, 8);
  d.run();
  const Texts all = texts(d);
  EXPECT_EQ(Texts(all.begin(), all.begin() + 3), (Texts{"A3* B3*", "A4* B2*", "A4* B2*"}));
  expect_conserved(d);
  Driver starved(with(limits_of(4, 4, 4, true), even(3, 0)), {}, 100);
  starved.arrive(0, 2, 4);
  starved.arrive(0, 2, 4);
  starved.run();
  const Texts some = texts(starved);
  EXPECT_EQ(Texts(some.begin(), some.begin() + 5), (Texts{"A2* B2*", "A4*", "A4*", "A4*", "B1*"}));
  expect_conserved(starved);
}

// The last hit block is computed again where the drafter needs its hidden states.
TEST(Speculation, LastHitDropped) {
  for (const bool drops : {false, true}) {
    Speculation s = even(2, 0.5, 2);
    s.drops_last_hit = drops;
    Driver d(with(limits_of(4, 4, 64, true), s), {}, 100);
    d.arrive(0, 18, 5, identity_of(1, 4, 2, 2));
    d.arrive(5000, 18, 5, identity_of(1, 4, 3, 2));
    d.run();
    EXPECT_EQ(d.sequences[1].hit_tokens, drops ? 12 : 16);
    expect_conserved(d);
  }
}

// The last token's KV counts as not computed, also where it was an accepted draft (vLLM: num_computed_tokens
// less what is still expected): of 8 tokens one block of 4 is cached.
TEST(Speculation, WhatAFinishedSequenceLeavesInTheCache) {
  for (const bool async : {false, true}) {
    Driver d(with(limits_of(4, 4, 64, async), even(3, 1)), {}, 100);
    d.arrive(0, 4, 4, identity_of(1, 2, 0, 0));
    d.arrive(5000, 9, 1, identity_of(1, 2, 0, 0));
    d.run();
    EXPECT_EQ(d.sequences[1].hit_tokens, 4);
  }
}

// A handed-over sequence has no drafts in its first step: nobody has drafted for it here.
TEST(Speculation, AfterAHandOver) {
  Driver d(with(limits_of(4, 4, 64, true), even(2, 1, 2)), {}, 100);
  d.lies_elsewhere(d.arrive(0, 18, 5), 1000);
  d.run();
  Texts computed;
  for (const std::string& text : texts(d)) {
    if (!text.empty()) computed.push_back(text);
  }
  EXPECT_EQ(computed, (Texts{"A1*", "A3*", "A3*"}));  // 1, 4 and the one that is thrown away: 19, 22, 23
  expect_conserved(d);
}

/// Crowds that do not fit: preemption, hits, loads. Aborts make tokens that nobody is due.
void crowd(Driver& d, std::uint64_t seed, bool aborts) {
  Random random(seed, Purpose::lengths);
  Nanos time = 0;
  for (int i = 0; i < 60; ++i) {
    time += static_cast<Nanos>(random.below(400));
    const auto prompt = static_cast<std::int32_t>(1 + random.below(60));
    const auto output = static_cast<std::int32_t>(1 + random.below(40));
    const auto name = 1 + random.below(3);
    const SeqId id = d.arrive(time, prompt, output,
                              identity_of(name, prompt / 4, 100 + static_cast<std::uint64_t>(i),
                                          (prompt + output) / 4 - prompt / 4));
    if (random.below(4) == 0) d.lies_elsewhere(id, static_cast<Nanos>(random.below(900)));
    if (aborts && random.below(5) == 0) d.abort_at(time + static_cast<Nanos>(random.below(3000)), id);
  }
  d.run();
}

TEST(Speculation, TokensAndBlocksAreConserved) {
  std::int64_t preemptions = 0, vain = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    for (const bool async : {false, true}) {
      Speculation s = even(static_cast<std::int32_t>(1 + seed % 4), 0.6, seed % 2 == 0 ? 0 : 3);
      s.drops_last_hit = seed % 3 == 0;
      LinearClock clock;
      clock.per_context = 1;
      clock.per_token = 3;
      Driver d(with(limits_of(4, 8, 40, async), s), clock, 60);
      crowd(d, seed, false);
      SCOPED_TRACE(seed);
      expect_conserved(d);
      preemptions += d.engine.statistics().preemptions;
      vain += d.engine.statistics().rejected_tokens;
    }
  }
  EXPECT_GT(preemptions, 100);  // the case is met
  EXPECT_GT(vain, 1000);
}

TEST(Speculation, WhoGoesAwayLeavesNothing) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    for (const bool async : {false, true}) {
      Driver d(with(limits_of(4, 8, 40, async), even(3, 0.7, 3)), {}, 60);
      crowd(d, seed, true);
      EXPECT_EQ(d.engine.pool().free_blocks(), d.engine.pool().total_blocks());
      EXPECT_FALSE(d.engine.has_requests());
      d.engine.pool().check();
      for (std::size_t i = 0; i < d.fates.size(); ++i) {
        if (d.fates[i].dead) continue;
        EXPECT_EQ(std::ssize(d.fates[i].tokens), d.sequences[i].final - d.sequences[i].prompt);
      }
    }
  }
}

// The fate of a request's drafts is its own: alone, in a crowd, in fast mode and step by step.
TEST(Speculation, DrawsAreTheRequestsOwn) {
  const EngineLimits limits = with(limits_of(4, 8, 4096, true), even(3, 0.6));
  EngineLimits fast = limits;
  fast.step_by_step = false;
  Driver crowded(limits, {}, 2000), runs(fast, {}, 2000);
  for (Driver* d : {&crowded, &runs}) {
    for (int i = 0; i < 6; ++i) d->arrive(37 * i, 5 + i, 60);
    d->run();
  }
  for (std::size_t i = 0; i < 6; ++i) {
    Driver alone(limits, {}, 2000);
    alone.arrive(0, 5 + static_cast<std::int32_t>(i), 60);
    alone.sequences[0].request = static_cast<std::uint32_t>(i);
    alone.run();
    std::vector<std::int32_t> mine = alone.fates[0].yields;
    std::erase(mine, 0);  // of the step that is thrown away
    std::vector<std::int32_t> theirs = crowded.fates[i].yields;
    std::erase(theirs, 0);
    EXPECT_EQ(mine, theirs);
    EXPECT_EQ(crowded.fates[i].tokens, runs.fates[i].tokens);
    EXPECT_EQ(crowded.fates[i].yields, runs.fates[i].yields);
  }
  EXPECT_EQ(crowded.engine.statistics().totals.decode_context,
            runs.engine.statistics().totals.decode_context);
}

// A sliding window: pairs and keys of rows with several queries, against the sum over the queries.
TEST(Speculation, PairsInAndOutOfTheWindow) {
  LinearClock clock;
  clock.window = 10;
  Driver d(with(limits_of(4, 4, 64, false), even(3, 1)), clock, 100);
  d.arrive(0, 5, 13);
  d.run();
  std::int64_t p = 5;  // the token sampled last has no KV yet
  ASSERT_EQ(d.steps.size(), 4u);
  for (std::size_t i = 1; i < d.steps.size(); ++i, p += 4) {
    const StepShape& s = d.steps[i].shape;
    std::int64_t pairs = 0, window_pairs = 0;
    for (std::int64_t q = 1; q <= 4; ++q) {
      pairs += p + q;
      window_pairs += std::min<std::int64_t>(p + q, 10);
    }
    EXPECT_EQ(s.decode_context, p + 4);
    EXPECT_EQ(s.decode_context + s.draft_pairs, pairs);
    EXPECT_EQ(s.decode_window_context, std::min<std::int64_t>(p, 9) + 4);
    EXPECT_EQ(s.decode_window_context + s.draft_window_pairs, window_pairs);
    EXPECT_EQ(s.sampled_requests, 4);
    EXPECT_EQ(s.tokens(), 4);
  }
}

}  // namespace
}  // namespace pdsim
