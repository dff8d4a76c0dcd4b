// Ends before the end: sequences that are aborted, and an engine that is restarted.
//
// Theory. An aborted sequence leaves at once: its blocks are free when abort() returns, nobody waits behind
// it, it yields no further token. Steps that were scheduled with it run as they were, as on the GPU nothing
// can be taken back; so its slot must not name another until references() says that no step names it. A
// restarted engine is a new one: the same arrivals end as they would on one that was never used.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"
#include "tests/serving/driver.hpp"

namespace pdsim {
namespace {

constexpr Nanos kStep = 100;  // of LinearClock{}

/// What was to be seen of one sequence after each boundary's launch.
struct Sight {
  Nanos now;
  std::int32_t free_blocks;
  bool referenced;
  SeqStatus status;
};

struct Watched {
  SeqId seq;
  std::vector<Sight> sights;

  const Sight& at(Nanos now) const {
    for (const Sight& s : sights) {
      if (s.now == now) return s;
    }
    throw InternalError("no boundary then");
  }
};

void watch(Driver& d, Watched& watched) {
  d.context = &watched;
  d.at_boundary = [](Driver& w, Nanos now) {
    Watched& seen = *static_cast<Watched*>(w.context);
    seen.sights.push_back(
        {now, w.engine.pool().free_blocks(), w.engine.references(seen.seq), w.sequences[seen.seq].status});
  };
}

// ---------------------------------------------------------------------------------------- waiting

// One slot, which A has until 300. B is first in line and leaves at 150: C gets the slot.
TEST(Abort, WhoWaitsLeavesTheQueue) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 1, 64, async), LinearClock{}, 20);
    d.arrive(0, 4, 3);
    const SeqId b = d.arrive(10, 4, 2), c = d.arrive(20, 4, 1);
    d.abort_at(150, b);
    d.run();
    EXPECT_TRUE(d.fates[b].tokens.empty());
    EXPECT_LT(d.fates[b].finish, 0);
    EXPECT_EQ(d.sequences[b].status, SeqStatus::finished);
    EXPECT_EQ(d.sequences[b].known, 4);
    EXPECT_EQ(d.fates[c].first, 4 * kStep);
    EXPECT_EQ(d.engine.pool().free_blocks(), 20);
    EXPECT_FALSE(d.engine.has_requests());
  }
}

// Gone before the scheduler ever looked: not even that is noted of it, as its slot may name another by then.
TEST(Abort, BeforeItWasConsidered) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 20);
  d.arrive(0, 4, 4);
  const SeqId b = d.arrive(110, 4, 1);
  d.abort_at(120, b);
  d.run();
  EXPECT_EQ(d.sequences[b].considered, -1);
  EXPECT_EQ(d.steps.size(), 4u);
}

// The head of the queue needs more blocks than A leaves for long; C behind it would fit. Nothing is freed
// and nothing else heard, yet once B has gone C is admitted, in the next step that is scheduled. So B was
// in nobody's way, neither in runs nor without them.
TEST(Abort, NobodyWaitsBehindIt) {
  for (const bool async : {false, true}) {
    for (const bool step_by_step : {false, true}) {
      EngineLimits limits = limits_of(4, 8, 64, async);
      limits.step_by_step = step_by_step;
      Driver d(limits, LinearClock{}, 20, false);
      d.arrive(0, 4, 60);
      const SeqId b = d.arrive(0, 80, 1), c = d.arrive(0, 4, 1);
      d.abort_at(1050, b);
      d.run();
      EXPECT_EQ(d.sequences[c].admitted, 1100);
      EXPECT_EQ(d.fates[c].first, 1100 + (async ? 2 : 1) * kStep);
    }
  }
}

// ---------------------------------------------------------------------------------------- running

// Sequence 0 runs with B and leaves at 350. The step that ends at 400 still yields it a token: the abort is
// acted on after the outputs. With async scheduling the next step was scheduled with it, computes it, and
// yields it nothing; that step names it until it ends.
TEST(Abort, WhoRunsYieldsNoTokenFromStepsAlreadyScheduled) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 64, async), LinearClock{}, 20, false);
    const SeqId a = d.arrive(0, 4, 10);
    d.arrive(0, 4, 10);
    d.abort_at(350, a);
    Watched w{a, {}};
    watch(d, w);
    d.run();
    EXPECT_EQ(d.sequences[a].known, 4 + 4);
    EXPECT_EQ(d.sequences[a].last_token, 400);
    EXPECT_EQ(d.sequences[a].longest_gap, kStep);
    EXPECT_EQ(d.gaps.distribution(1).n, 3u + 9u);
    EXPECT_LT(d.fates[a].finish, 0);
    EXPECT_EQ(text(d.steps[3]), "A1* B1*");
    EXPECT_EQ(text(d.steps[4]), async ? "A1* B1*" : "B1*");
    EXPECT_EQ(text(d.steps[5]), "B1*");
    EXPECT_EQ(d.fates[1].finish, 10 * kStep);  // B loses nothing

    EXPECT_EQ(w.at(300).status, SeqStatus::running);
    EXPECT_TRUE(w.at(300).referenced);
    EXPECT_EQ(w.at(400).status, SeqStatus::finished);
    EXPECT_EQ(w.at(400).referenced, async);
    EXPECT_FALSE(w.at(500).referenced);
    // B alone: 8 tokens known at 400, of which 8 are computed by the step that starts then, 9 by the next.
    EXPECT_EQ(w.at(400).free_blocks, 20 - (async ? 3 : 2));
    EXPECT_EQ(d.engine.pool().free_blocks(), 20);
  }
}

// Its blocks are another's in the same boundary: B waits for blocks that A has, and gets them in the first
// step that is scheduled, though without a further step's end.
TEST(Abort, BlocksOfWhoRanAreFreeAtOnce) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 64, async), LinearClock{}, 6, false);
    const SeqId a = d.arrive(0, 16, 8);
    const SeqId b = d.arrive(0, 20, 1);
    d.abort_at(150, a);
    d.run();
    EXPECT_EQ(d.sequences[b].admitted, 200);
    EXPECT_EQ(d.fates[b].first, 200 + (async ? 2 : 1) * kStep);
  }
}

// In the middle of its prompt: the chunk that is scheduled runs, no other follows.
TEST(Abort, BetweenChunks) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 8, async), LinearClock{}, 20);
    const SeqId a = d.arrive(0, 40, 2);
    d.abort_at(50, a);
    d.run();
    EXPECT_EQ(texts(d), async ? (Texts{"A8", "A8"}) : (Texts{"A8"}));
    EXPECT_EQ(d.sequences[a].known, 40);
    EXPECT_EQ(d.engine.pool().free_blocks(), 20);
    EXPECT_FALSE(d.engine.has_requests());
  }
}

// Its last token is being sampled: it is neither yielded nor is its sequence among the finished.
TEST(Abort, BeforeTheLastTokenIsNoEnd) {
  Driver d(limits_of(4, 8, 64, true), LinearClock{}, 20);
  const SeqId a = d.arrive(0, 4, 3);
  d.abort_at(150, a);  // acted on at 200; the third token comes from the step that ends at 300
  d.run();
  EXPECT_EQ(d.fates[a].tokens, (std::vector<Nanos>{100, 200}));
  EXPECT_LT(d.fates[a].finish, 0);
  EXPECT_EQ(d.steps.size(), 3u);
}

// What it computed to the end stays cached, as far as it was published: here the prompt's two blocks.
TEST(Abort, WhatItComputedCanBeHit) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 20);
  const SeqId a = d.arrive(0, 9, 20, identity_of(7, 2, 11, 5));
  d.abort_at(150, a);
  const SeqId b = d.arrive(1000, 9, 1, identity_of(7, 2, 12, 0));
  d.run();
  EXPECT_EQ(d.sequences[b].hit_tokens, 8);
}

// Preempted, as in Preemption.TheLatestGoesAndFindsItsOwnBlocksAgain, B waits at the front for 3 blocks where
// A leaves 2, and C behind it. B's tokens were yielded before; it leaves the queue like anyone else.
TEST(Abort, ThePreemptedLeavesTheQueue) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 5, false);
  const SeqId a = d.arrive(0, 4, 8), b = d.arrive(0, 4, 8);
  const SeqId c = d.arrive(510, 4, 1);
  d.abort_at(550, b);
  Watched w{b, {}};
  watch(d, w);
  d.run();
  EXPECT_EQ(d.sequences[b].preemptions, 1);
  EXPECT_EQ(w.at(500).status, SeqStatus::waiting);
  EXPECT_EQ(d.fates[b].tokens.size(), 5u);
  EXPECT_EQ(d.sequences[c].admitted, 600);
  EXPECT_EQ(d.fates[a].finish, 8 * kStep);
  EXPECT_EQ(d.engine.pool().free_blocks(), 5);
}

// ----------------------------------------------------------------------------------------- loaded

// Loaded, but without a slot: the blocks that came from elsewhere are free, and held for nobody.
TEST(Abort, WhoHasLoadedGivesBackItsBlocks) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 1, 64, async), LinearClock{}, 20, false);
    const SeqId a = d.arrive(0, 16, 2);
    d.lies_elsewhere(a, 120);
    d.arrive(0, 4, 12);
    d.abort_at(450, a);
    Watched w{a, {}};
    watch(d, w);
    d.run();
    EXPECT_EQ(w.at(400).status, SeqStatus::loaded);
    EXPECT_EQ(w.at(500).status, SeqStatus::finished);
    // B has 8 tokens computed by the step that ends at 500 and one more by the next, two when async.
    EXPECT_EQ(w.at(500).free_blocks, 20 - 3);
    EXPECT_EQ(w.at(400).free_blocks, 20 - 4 - (async ? 3 : 2));
    EXPECT_EQ(d.engine.held(Hold::loading), 0);
    EXPECT_TRUE(d.fates[a].tokens.empty());
    EXPECT_FALSE(d.engine.references(a));
  }
}

// A load cannot be called back: the sequence goes, and its blocks with it, when the load has ended.
TEST(Abort, WhoLoadsIsNotTheirsToAbort) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 20, false);
  const SeqId a = d.arrive(0, 16, 2);
  d.lies_elsewhere(a, 420);
  d.arrive(0, 4, 12);
  d.abort_at(150, a);
  Watched w{a, {}};
  watch(d, w);
  d.run();
  EXPECT_EQ(w.at(400).status, SeqStatus::loading);
  EXPECT_EQ(w.at(400).free_blocks, 20 - 4 - 2);
  EXPECT_EQ(w.at(500).free_blocks, 20 - 3);
  EXPECT_TRUE(d.fates[a].tokens.empty());
}

TEST(Abort, OfOneThatLoadsOrHasEndedIsABug) {
  for (const SeqStatus status : {SeqStatus::loading, SeqStatus::finished}) {
    LinearClock clock;
    Engine engine(limits_of(4, 8, 64, false), clock.clock(), 20, false, false);
    Sequences sequences(1);
    sequences[0].status = status;
    EXPECT_THROW(engine.abort(0, sequences), InternalError);
  }
}

// ---------------------------------------------------------------------------------------- in steps

// Scheduled for the first time by the step after this one, aborted before that starts: it never started.
TEST(Abort, WhoNeverStartedIsNotAmongTheStarted) {
  LinearClock clock;
  Engine engine(limits_of(4, 8, 64, true), clock.clock(), 20, false, false);
  Sequences sequences(2);
  for (Sequence& s : sequences) {
    s.prompt = s.known = 4;
    s.final = 8;
  }
  Outcome outcome;
  Histogram gaps;
  engine.enqueue(0);
  ASSERT_TRUE(engine.begin(0, sequences));
  engine.enqueue(1);
  engine.launch(0, 0, 50, sequences, outcome);  // schedules the next step, with both
  EXPECT_EQ(outcome.started, std::vector<SeqId>{0});
  EXPECT_TRUE(engine.references(1));
  engine.finish_step(100, sequences, outcome, gaps);
  engine.abort(1, sequences);
  EXPECT_EQ(engine.pool().free_blocks(), 20 - 2);
  ASSERT_TRUE(engine.begin(100, sequences));
  engine.launch(100, 0, 50, sequences, outcome);
  EXPECT_EQ(outcome.started, std::vector<SeqId>{0});
  EXPECT_EQ(engine.current().items.size(), 2u);
  EXPECT_TRUE(engine.references(1));
  engine.finish_step(200, sequences, outcome, gaps);
  EXPECT_EQ(outcome.first_tokens, std::vector<SeqId>{0});
  EXPECT_FALSE(engine.references(1));
  EXPECT_EQ(sequences[1].known, 4);
}

// Tokens that are computed once the current step has run: those scheduled for the next one do not count.
TEST(Abort, TheNextStepsTokensAreNotTheCurrentOnes) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 8, async), LinearClock{}, 20);
    d.arrive(0, 22, 3);
    std::map<Nanos, std::int32_t> after;
    d.context = &after;
    d.at_boundary = [](Driver& w, Nanos now) {
      if (w.engine.stepping()) {
        (*static_cast<std::map<Nanos, std::int32_t>*>(w.context))[now] =
            w.engine.computed_after_current(0, w.sequences);
      }
    };
    d.run();
    EXPECT_EQ(after, (std::map<Nanos, std::int32_t>{{0, 8}, {100, 16}, {200, 22}, {300, 23}, {400, 24}}));
  }
}

// ---------------------------------------------------------------------------------------- restart

/// Everything at once: A runs, B loads, C's blocks are leased, D's pinned, E waits for a slot.
struct Busy {
  Driver d;
  explicit Busy(const EngineLimits& limits) : d(limits, LinearClock{}, 60, true, true) {
    d.arrive(0, 8, 40, identity_of(1, 2, 11, 10));
    const SeqId b = d.arrive(0, 16, 4, identity_of(2, 4, 12, 1));
    d.lies_elsewhere(b, 5000);
    const SeqId c = d.arrive(0, 12, 1, identity_of(3, 3, 13, 0));
    d.sequences[c].silent = true;
    d.fates[c].hold = 5000;
    const SeqId e = d.arrive(0, 12, 1, identity_of(4, 3, 14, 0));
    d.fates[e].pin = 5000;
    for (int i = 0; i < 4; ++i) d.arrive(400, 8, 40, identity_of(5, 2, 15 + static_cast<unsigned>(i), 9));
  }
};

TEST(Restart, LeavesAnEmptyPoolAndNoCache) {
  for (const bool async : {false, true}) {
    for (const bool step_by_step : {false, true}) {
      EngineLimits limits = limits_of(4, 3, 64, async);
      limits.step_by_step = step_by_step;
      Busy w(limits);
      Driver& d = w.d;
      d.crash_at(1234);
      d.at_crash = [](Driver& x, Nanos) {
        EXPECT_EQ(x.engine.running(), 3u);  // the world is what it is meant to be
        EXPECT_EQ(x.engine.parked(), 1u);
        EXPECT_EQ(x.engine.waiting(), 2u);
        EXPECT_TRUE(x.engine.stepping());
        EXPECT_EQ(x.engine.held(Hold::loading), 4);
        EXPECT_EQ(x.engine.held(Hold::leased), 3);
        EXPECT_EQ(x.engine.held(Hold::pinned), 3);
        EXPECT_GT(x.engine.pool().cached_blocks(), 8);
      };
      bool looked = false;
      d.context = &looked;
      d.settle_at(1235);
      d.at_settle = [](Driver& x, Nanos) {
        *static_cast<bool*>(x.context) = true;
        const Engine& engine = x.engine;
        EXPECT_FALSE(engine.stepping() || engine.has_next() || engine.has_requests());
        EXPECT_EQ(engine.pool().free_blocks(), 60);
        EXPECT_EQ(engine.pool().cached_blocks(), 0);
        engine.pool().check();
        for (const Hold hold : {Hold::loading, Hold::leased, Hold::pinned}) EXPECT_EQ(engine.held(hold), 0);
        for (SeqId id = 0; id < x.sequences.size(); ++id) EXPECT_FALSE(engine.references(id));
        // Whoever replays its cache events knows of no block any more, from the crash on.
        std::map<std::uint64_t, std::int32_t> cached;
        Nanos latest = 0;
        for (const LoggedCacheEvent& e : engine.cache_log()) {
          cached[e.event.hash] = e.event.blocks;
          EXPECT_GE(e.published, latest);
          latest = e.published;
        }
        EXPECT_EQ(latest, 1234);
        EXPECT_GE(cached.size(), 4u);
        for (const auto& [hash, blocks] : cached) EXPECT_EQ(blocks, 0) << hash;
      };
      d.run();
      EXPECT_TRUE(looked);
      for (const Driver::Fate& fate : d.fates) {
        EXPECT_TRUE(fate.dead || fate.finish < 1234);
        EXPECT_TRUE(fate.tokens.empty() || fate.tokens.back() < 1234);
      }
    }
  }
}

// What arrives at a restarted engine, prompts that it once had included, goes as on a new one.
TEST(Restart, GoesOnLikeANewEngine) {
  for (const bool async : {false, true}) {
    for (const bool step_by_step : {false, true}) {
      EngineLimits limits = limits_of(4, 3, 16, async);
      limits.step_by_step = step_by_step;
      Busy w(limits);
      Driver& old = w.d;
      Driver fresh(limits, LinearClock{}, 60, true, true);
      const std::size_t before = old.sequences.size();
      old.crash_at(1234);
      Random random(5, Purpose::lengths);
      for (unsigned i = 0; i < 12; ++i) {
        const Nanos time = 2000 + static_cast<Nanos>(random.below(4000)) / 12 + i * 300;
        const auto prompt = 8 + static_cast<std::int32_t>(random.below(30));
        const auto output = 1 + static_cast<std::int32_t>(random.below(40));
        const std::vector<HashRun> identity = identity_of(1 + i % 5, 2, 100 + i, 12);
        const auto wire = static_cast<Nanos>(random.below(700));
        for (Driver* d : {&old, &fresh}) {
          const SeqId id = d->arrive(time, prompt, output, identity);
          if (i % 3 == 0) d->lies_elsewhere(id, wire);
        }
      }
      old.run();
      fresh.run();
      for (std::size_t i = 0; i < fresh.fates.size(); ++i) {
        EXPECT_EQ(old.fates[before + i].first, fresh.fates[i].first);
        EXPECT_EQ(old.fates[before + i].finish, fresh.fates[i].finish);
        EXPECT_EQ(old.sequences[before + i].longest_gap, fresh.sequences[i].longest_gap);
        EXPECT_EQ(old.sequences[before + i].hit_tokens, fresh.sequences[i].hit_tokens);
        EXPECT_EQ(old.sequences[before + i].considered, fresh.sequences[i].considered);
        EXPECT_GE(fresh.fates[i].finish, 0);
      }
    }
  }
}

// Time in the queue until the crash counts in full, whatever the engine's last look at it, and none after it:
// two wait for A's slot from 400 to 1234. Who came last was never considered, nor is it afterwards.
TEST(Restart, WaitsUntilTheCrashCount) {
  for (const bool async : {false, true}) {
    for (const bool step_by_step : {false, true}) {
      EngineLimits limits = limits_of(4, 1, 64, async);
      limits.step_by_step = step_by_step;
      Driver d(limits, LinearClock{}, 60);
      d.arrive(0, 8, 40);
      for (int i = 0; i < 2; ++i) d.arrive(390, 8, 4);
      const SeqId last = d.arrive(1230, 8, 4);
      d.crash_at(1234);
      d.arrive(5000, 8, 4);
      d.run();
      EXPECT_EQ(d.sequences[last].considered, -1);
      EXPECT_EQ(d.engine.statistics().waits[static_cast<std::size_t>(Engine::Wait::slot)], 2 * (1234 - 400));
    }
  }
}

TEST(Restart, WithBlocksInUseIsABug) {
  LinearClock clock;
  Engine engine(limits_of(4, 8, 64, false), clock.clock(), 20, false, false);
  Sequences sequences(1);
  sequences[0].prompt = sequences[0].known = 4;
  sequences[0].final = 8;
  engine.enqueue(0);
  ASSERT_TRUE(engine.begin(0, sequences));
  EXPECT_THROW(engine.restart(10), InternalError);
}

}  // namespace
}  // namespace pdsim
