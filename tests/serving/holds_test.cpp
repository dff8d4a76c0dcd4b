// Who has the blocks: what runs, what is on its way here, what is leased or pinned for others; and what it
// costs those that wait.
//
// Theory. Each cause is a step function of time, so its integral is a sum of blocks x time that can be done
// by hand, and the four sum to that of blocks in use as long as none is shared. A sequence is held up by
// pins, and counted once, from the first look at which it would have fitted had no pinned block been in
// use until it is admitted; whatever else keeps it out does not count.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "tests/serving/driver.hpp"

namespace pdsim {
namespace {

constexpr Nanos kStep = 100;  // of LinearClock{}

using Totals = std::array<std::int64_t, 1 + kHolds>;  // running, loading, leased, pinned

Totals totals(const Driver& d) {
  Totals out{};
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::int64_t>(d.engine.timeline().total(i));
  }
  return out;
}

EngineLimits stepping(bool async, bool step_by_step) {
  EngineLimits limits = limits_of(4, 8, 64, async);
  limits.step_by_step = step_by_step;
  return limits;
}

// --------------------------------------------------------------------------------------- timeline

// B runs from 0 to 1200, C loads 8 of its 12 tokens until 300 and is pinned from 400 to 800 (its pin is let
// go of at 710, which is seen at 800), A is leased from 100 to 400 (350). Without a shared block.
TEST(Timeline, BlocksByCauseAgainstHandSums) {
  for (const bool step_by_step : {true, false}) {
    Driver d(stepping(false, step_by_step), LinearClock{}, 20, false);
    const SeqId a = d.arrive(0, 8, 1);
    d.sequences[a].silent = true;
    d.fates[a].hold = 250;
    d.arrive(0, 4, 12);
    const SeqId c = d.arrive(0, 12, 1);
    d.lies_elsewhere(c, 220, 8);
    d.fates[c].pin = 310;
    d.run();
    // B computes 4 tokens in its first step and one in each of eleven more: 1, 4 x 2, 4 x 3, 3 x 4 blocks.
    const std::int64_t b = (1 + 4 * 2 + 4 * 3 + 3 * 4) * kStep;
    const Totals want{b + 2 * kStep + 3 * kStep, 2 * 300, 2 * 300, 3 * 400};
    EXPECT_EQ(totals(d), want);
    EXPECT_EQ(d.engine.statistics().used_block_ns, want[0] + want[1] + want[2] + want[3]);
  }
}

// The same with a pipeline: blocks of a step's tokens are taken when it is scheduled, a step earlier.
TEST(Timeline, AStepEarlierWhenAsync) {
  for (const bool step_by_step : {true, false}) {
    Driver d(stepping(true, step_by_step), LinearClock{}, 20, false);
    d.arrive(0, 4, 12);
    d.run();
    // Tokens allocated for while step k runs: 3 + (k + 1), but 15 at most.
    EXPECT_EQ(totals(d), (Totals{(4 * 2 + 4 * 3 + 4 * 4) * kStep, 0, 0, 0}));
  }
}

// Blocks that a pinned sequence shares with a running one are the pin's; two pins count them twice, and what
// is left for what runs is never less than nothing.
TEST(Timeline, SharedBlocksAreTheHolders) {
  Driver d(stepping(false, true), LinearClock{}, 20);
  const SeqId a = d.arrive(0, 9, 1, identity_of(7, 2, 11, 0));
  d.fates[a].pin = 1000;  // 3 blocks from 100 on, seen to be let go of at the end: 1100
  d.arrive(200, 12, 1, identity_of(7, 2, 12, 1));  // runs [200, 300) with 3 blocks, 2 of them A's
  const SeqId c = d.arrive(400, 9, 1, identity_of(7, 2, 13, 0));
  d.fates[c].pin = 600;  // runs [400, 500) with one of its own, then pins 3; let go of at 1100
  d.run();
  const std::int64_t pinned = 3 * 1000 + 3 * 600;
  EXPECT_EQ(totals(d), (Totals{3 * kStep + kStep + kStep, 0, 0, pinned}));
  const std::int64_t used = 3 * kStep + 3 * 100 + 4 * 100 + 3 * 100 + 4 * kStep + 4 * 600;
  EXPECT_EQ(d.engine.statistics().used_block_ns, static_cast<double>(used));
}

// A part of a pin given up: its last blocks go, and whoever waited for them is admitted.
TEST(Timeline, ATruncatedPinHoldsLess) {
  LinearClock clock;
  Engine engine(limits_of(4, 8, 64, false), clock.clock(), 8, false, false);
  Sequences sequences(2);
  sequences[0].prompt = sequences[0].known = 20;
  sequences[0].final = 21;
  sequences[1].prompt = sequences[1].known = 16;
  sequences[1].final = 17;
  Outcome outcome;
  Histogram gaps;
  const auto step = [&](Nanos now) {
    engine.account_blocks(now);
    if (engine.stepping()) engine.finish_step(now, sequences, outcome, gaps);
  };
  engine.enqueue(0);
  ASSERT_TRUE(engine.begin(0, sequences));
  engine.launch(0, 0, 50, sequences, outcome);
  step(100);
  engine.hold(Hold::pinned, 5);
  engine.enqueue(1);
  EXPECT_FALSE(engine.begin(100, sequences));  // 3 blocks free, 4 needed
  step(250);
  engine.truncate(0, 4, sequences);
  engine.hold(Hold::pinned, -1);
  EXPECT_EQ(engine.pool().size(sequences[0].table), 4);
  EXPECT_TRUE(engine.begin(250, sequences));
  engine.launch(250, 0, 50, sequences, outcome);
  step(350);
  EXPECT_EQ(engine.held(Hold::pinned), 4);
  EXPECT_EQ(static_cast<std::int64_t>(engine.timeline().total(3)), 5 * 150 + 4 * 100);
  EXPECT_EQ(engine.statistics().pin_delays, 1);
  EXPECT_EQ(engine.statistics().pin_delay, 150);
}

// ------------------------------------------------------------------------------------- pin delays

/// A ends at 100 and its 4 of 10 blocks stay pinned until they are let go of, as seen at 1200. B needs `need`
/// blocks from 200 on. A clock runs until 400; after it B, if it waits, is looked at after every nudge.
struct Pinned {
  Driver d;
  SeqId a, clock, b;
  Pinned(const EngineLimits& limits, std::int32_t need, std::int32_t blocks = 10)
      : d(limits, LinearClock{}, blocks + 1, false) {
    clock = d.arrive(0, 1, 4);  // in a block of its own
    a = d.arrive(0, 16, 1);
    d.fates[a].pin = 1050;
    b = d.arrive(200, 4 * need, 1);
    for (Nanos t = 450; t < 1400; t += 100) d.nudge(t);
  }
};

// 6 blocks are free, 8 needed: 2 of the pinned would do. Without the pin B would have run at once.
TEST(PinDelays, AdmissionsThatOnlyPinsHeldUp) {
  for (const bool async : {false, true}) {
    for (const bool step_by_step : {false, true}) {
      Pinned w(stepping(async, step_by_step), 8);
      w.d.run();
      const Sequence& b = w.d.sequences[w.b];
      EXPECT_EQ(w.d.engine.statistics().pin_delays, 1);
      EXPECT_EQ(w.d.engine.statistics().pin_delay, b.admitted - b.considered);
      EXPECT_GE(b.admitted, 1150);
      EXPECT_EQ(w.d.engine.timeline().total(3), 4 * (b.admitted - 100));
    }
  }
}

// It fits: no delay. It would not fit without the pin either (11 > 10, until the clock's block is free): not
// one that pins made, until the clock has gone at 400. From then on it is.
TEST(PinDelays, NotWhatFitsNorWhatWouldNotFitAnyway) {
  for (const bool step_by_step : {false, true}) {
    Pinned fits(stepping(false, step_by_step), 6);
    fits.d.run();
    EXPECT_EQ(fits.d.sequences[fits.b].admitted, 200);
    EXPECT_EQ(fits.d.engine.statistics().pin_delays, 0);
    EXPECT_EQ(fits.d.engine.statistics().pin_delay, 0);

    Pinned large(stepping(false, step_by_step), 11);
    large.d.run();
    EXPECT_EQ(large.d.sequences[large.b].considered, 200);
    EXPECT_EQ(large.d.engine.statistics().pin_delays, 1);
    EXPECT_EQ(large.d.engine.statistics().pin_delay, large.d.sequences[large.b].admitted - 400);
  }
}

// Blocks that are leased, or in use by a load, are not pinned ones.
TEST(PinDelays, NotWhatLeasesHoldUp) {
  Pinned w(stepping(false, true), 8);
  w.d.sequences[w.a].silent = true;
  w.d.fates[w.a].hold = 1050;
  w.d.run();
  EXPECT_GE(w.d.sequences[w.b].admitted, 1150);
  EXPECT_EQ(w.d.engine.statistics().pin_delays, 0);
}

// No slot: the pool was not asked.
TEST(PinDelays, NotWhoWaitsForASlot) {
  EngineLimits limits = limits_of(4, 1, 64, false);
  Driver d(limits, LinearClock{}, 10, false);
  const SeqId a = d.arrive(0, 16, 1);
  d.fates[a].pin = 450;
  d.arrive(0, 4, 6);                      // has the slot from 100 to 700
  const SeqId c = d.arrive(0, 4 * 8, 1);  // the pin has gone by then
  d.run();
  EXPECT_EQ(d.sequences[c].admitted, 700);
  EXPECT_EQ(d.engine.statistics().pin_delays, 0);
}

// A load is an admission like any other: blocks of what lies elsewhere and room for the rest.
TEST(PinDelays, OfALoad) {
  Pinned w(stepping(false, true), 8);
  w.d.lies_elsewhere(w.b, 10, 8);
  w.d.run();
  EXPECT_EQ(w.d.engine.statistics().pin_delays, 1);
  EXPECT_EQ(w.d.sequences[w.b].load_tokens, 8);
}

// Of B's 5 blocks 4 are hits that R has in use until 500: it needs one more, and that is pinned until 900.
TEST(PinDelays, HitsInUseAreNotNeededAgain) {
  Driver d(stepping(false, true), LinearClock{}, 7);
  const SeqId pinned = d.arrive(0, 4, 1);
  d.fates[pinned].pin = 750;
  d.arrive(0, 20, 5, identity_of(7, 4, 11, 2));
  const SeqId b = d.arrive(150, 17, 1, identity_of(7, 4, 12, 0));
  d.run();
  EXPECT_EQ(d.sequences[b].hit_tokens, 16);
  EXPECT_EQ(d.sequences[b].admitted, 500);
  EXPECT_EQ(d.engine.statistics().pin_delays, 1);
  EXPECT_EQ(d.engine.statistics().pin_delay, 500 - 200);
}

// Who is aborted while pins hold it up was never admitted.
TEST(PinDelays, NotWhoNeverCameIn) {
  Pinned w(stepping(false, true), 8);
  w.d.abort_at(700, w.b);
  w.d.run();
  EXPECT_EQ(w.d.engine.statistics().pin_delays, 0);
}

// -------------------------------------------------------------------------------------- reclaiming

// Asked once, and only when it does not fit as it is. The pinned blocks are let go of, it is admitted in the
// very schedule that asked, and no delay was there.
TEST(Reclaim, AdmitsInTheScheduleThatAsked) {
  for (const bool async : {false, true}) {
    for (const std::int32_t need : {6, 7, 10}) {
      Pinned w(stepping(async, true), need);
      w.d.reclaims = true;
      w.d.run();
      EXPECT_EQ(w.d.sequences[w.b].admitted, 200);
      EXPECT_EQ(w.d.asked.size(), need > 6 ? 1u : 0u);
      EXPECT_EQ(w.d.engine.statistics().pin_delays, 0);
      EXPECT_EQ(w.d.engine.held(Hold::pinned), 0);
      EXPECT_EQ(w.d.engine.pool().free_blocks(), 11);
    }
  }
}

// Two pins of 2 blocks each, 1 block short: the older goes, the other stays.
TEST(Reclaim, NoMoreThanIsNeeded) {
  Driver d(stepping(false, true), LinearClock{}, 8, false);
  const SeqId older = d.arrive(0, 8, 1), newer = d.arrive(100, 8, 1);
  d.fates[older].pin = d.fates[newer].pin = 5000;
  const SeqId b = d.arrive(300, 20, 1);
  d.reclaims = true;
  d.at_boundary = [](Driver& w, Nanos now) {
    if (now >= 300) {
      EXPECT_EQ(w.kept(), std::vector<SeqId>{1});
    }
  };
  d.run();
  EXPECT_EQ(d.sequences[b].admitted, 300);
  EXPECT_EQ(d.asked, std::vector<std::int32_t>{5});
}

// As in PinDelays.HitsInUseAreNotNeededAgain: the one pinned block is enough.
TEST(Reclaim, HitsInUseAreNotAskedFor) {
  Driver d(stepping(false, true), LinearClock{}, 7);
  const SeqId pinned = d.arrive(0, 4, 1);
  d.fates[pinned].pin = 5000;
  d.arrive(0, 20, 5, identity_of(7, 4, 11, 2));
  const SeqId b = d.arrive(150, 17, 1, identity_of(7, 4, 12, 0));
  d.reclaims = true;
  d.run();
  EXPECT_EQ(d.sequences[b].admitted, 200);
}

// The next turn of a pinned one: B's hits are what A has pinned, and one block more, which an older pin can
// give. A stays. (At 400 R has 3 blocks, A 5, the older pin the last.)
TEST(Reclaim, APinThatIsHitStays) {
  Driver d(stepping(false, true), LinearClock{}, 9);
  const SeqId older = d.arrive(0, 4, 1), a = d.arrive(10, 17, 1, identity_of(7, 4, 11, 0));
  d.fates[older].pin = d.fates[a].pin = 5000;
  d.arrive(20, 9, 4);
  const SeqId b = d.arrive(350, 17, 1, identity_of(7, 4, 12, 0));
  d.reclaims = true;
  d.at_boundary = [](Driver& w, Nanos now) {
    if (now == 400) {
      EXPECT_EQ(w.kept(), std::vector<SeqId>{1});
    }
  };
  d.run();
  EXPECT_EQ(d.sequences[b].admitted, 400);
  EXPECT_EQ(d.sequences[b].hit_tokens, 16);
}

// A is the older pin, and all its 4 blocks are hits of B's: when it is let go of, B needs them from the free
// blocks, and is as short as before. The other pin goes as well, in the same schedule.
TEST(Reclaim, GoesOnUntilItFits) {
  Driver d(stepping(false, true), LinearClock{}, 8);
  const SeqId a = d.arrive(0, 16, 1, identity_of(7, 4, 11, 0)), newer = d.arrive(10, 4, 1);
  d.fates[a].pin = d.fates[newer].pin = 5000;
  d.arrive(20, 9, 4);
  const SeqId b = d.arrive(350, 17, 1, identity_of(7, 4, 12, 0));
  d.reclaims = true;
  d.run();
  EXPECT_EQ(d.sequences[b].admitted, 400);
  EXPECT_EQ(d.sequences[b].hit_tokens, 16);
  EXPECT_EQ(d.engine.statistics().pin_delays, 0);
}

// B lacks 6 blocks, R has 7 of 10 until 500 and 2 are pinned: they would not make the room, and stay.
TEST(Reclaim, NothingIsLetGoOfForNothing) {
  Driver d(stepping(false, true), LinearClock{}, 10, false);
  const SeqId pinned = d.arrive(0, 8, 1);
  d.fates[pinned].pin = 450;  // as seen at 600
  d.arrive(0, 24, 5);
  const SeqId b = d.arrive(150, 24, 1);
  d.reclaims = true;
  d.run();
  EXPECT_TRUE(d.asked.empty());
  EXPECT_EQ(d.sequences[b].admitted, 500);
  EXPECT_EQ(d.engine.timeline().total(3), 2 * (600 - 100));
}

// With nothing pinned there is nobody to ask.
TEST(Reclaim, NobodyIsAskedWithoutPins) {
  Pinned w(stepping(false, true), 8);
  w.d.fates[w.a].pin = -1;
  w.d.sequences[w.a].silent = true;
  w.d.fates[w.a].hold = 1050;
  w.d.reclaims = true;
  w.d.run();
  EXPECT_TRUE(w.d.asked.empty());
}

}  // namespace
}  // namespace pdsim
