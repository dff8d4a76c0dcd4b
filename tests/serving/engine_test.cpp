// The engine against vLLM V1's scheduling rules, one rule a test, on steps that can be counted by hand;
// then runs against step by step, on random worlds.
#include "sim/serving/engine.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "sim/core/random.hpp"
#include "tests/serving/driver.hpp"

namespace pdsim {
namespace {

constexpr Nanos kStep = 100;  // of LinearClock{}

// ------------------------------------------------------------------------------------- batches

// Running sequences first, in order of admission, one token each or the next chunk; then waiting ones
// first come first served; all within one budget of tokens.
TEST(Batch, RunningFirstThenWaitingInOrderOfArrival) {
  Driver d(limits_of(4, 8, 8, false), LinearClock{}, 100);
  d.arrive(0, 4, 3);
  d.arrive(0, 6, 2);
  d.arrive(0, 2, 1);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A4* B4", "A1* B2* C2*", "A1* B1*"}));
  EXPECT_EQ(d.fates[0].finish, 3 * kStep);
  EXPECT_EQ(d.fates[2].first, 2 * kStep);
}

// A prompt longer than the budget takes ceil(prompt / budget) steps; only the last one yields a token.
TEST(Batch, PromptIsCutIntoChunks) {
  Driver d(limits_of(16, 8, 32, false), LinearClock{}, 100);
  d.arrive(0, 100, 2);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A32", "A32", "A32", "A4*", "A1*"}));
}

// Decodes keep their place: the chunk gets what they leave.
TEST(Batch, ChunkGetsWhatDecodesLeave) {
  Driver d(limits_of(16, 8, 32, false), LinearClock{}, 100);
  d.arrive(0, 10, 4);
  d.arrive(1, 50, 1);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A10*", "A1* B31", "A1* B19*", "A1*"}));
}

// Without chunked prefill a prompt waits until the whole of it fits into what the decodes leave.
TEST(Batch, WithoutChunksAPromptWaitsForAWholeBudget) {
  EngineLimits limits = limits_of(16, 8, 32, false);
  limits.chunked_prefill = false;
  Driver d(limits, LinearClock{}, 100);
  d.arrive(0, 10, 3);
  d.arrive(0, 32, 1);
  d.arrive(0, 1, 1);  // would fit, but may not pass
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A10*", "A1*", "A1*", "B32*", "C1*"}));
}

TEST(Batch, NoMoreThanMaxNumSeqs) {
  Driver d(limits_of(4, 2, 64, false), LinearClock{}, 100);
  for (int i = 0; i < 5; ++i) d.arrive(0, 4, 2);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A4* B4*", "A1* B1*", "C4* D4*", "C1* D1*", "E4*", "E1*"}));
}

// Every sequence of p + n tokens computes p + n - 1 of them: the last token is never fed back. Neither
// pipeline may schedule one step more, in whatever company.
TEST(Batch, NothingIsComputedBeyondTheFinalToken) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 16, async), LinearClock{}, 100);
    Random random(1, Purpose::lengths, async);
    for (int i = 0; i < 40; ++i) {
      d.arrive(i * 70, 1 + static_cast<std::int32_t>(random.below(30)),
               1 + static_cast<std::int32_t>(random.below(9)));
    }
    d.run();
    std::vector<std::int32_t> tokens(d.sequences.size(), 0), sampled(d.sequences.size(), 0);
    for (const Driver::Started& step : d.steps) {
      EXPECT_LE(step.shape.tokens(), 16);
      EXPECT_FALSE(step.items.empty());
      for (const Step::Item& item : step.items) {
        tokens[item.seq] += item.tokens;
        sampled[item.seq] += item.sampled ? 1 : 0;
      }
    }
    for (std::size_t i = 0; i < d.sequences.size(); ++i) {
      EXPECT_EQ(d.sequences[i].preemptions, 0);
      EXPECT_EQ(tokens[i], d.sequences[i].final - 1) << i;
      EXPECT_EQ(sampled[i], d.sequences[i].final - d.sequences[i].prompt) << i;
      EXPECT_EQ(d.fates[i].tokens.size(), static_cast<std::size_t>(sampled[i])) << i;
    }
  }
}

// ------------------------------------------------------------------------------------ pipeline

// News during step n (here: an arrival in [200, 300), the third step) is first acted on in step n + 1
// without async scheduling, in n + 2 with it: step n + 1 was scheduled when n started.
TEST(Pipeline, NewsDuringAStepIsActedOnInTheNextButOneWhenAsync) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 64, async), LinearClock{}, 100);
    d.arrive(0, 4, 20);
    const SeqId b = d.arrive(250, 4, 1);
    d.run();
    const Nanos starts = async ? 400 : 300;
    EXPECT_EQ(d.fates[b].first, starts + kStep);
    EXPECT_EQ(text(d.steps[static_cast<std::size_t>(starts / kStep)]), "A1* B4*");
  }
}

// An idle engine has nothing in the pipeline: it acts on an arrival at once.
TEST(Pipeline, AnIdleEngineActsAtOnce) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 64, async), LinearClock{}, 100);
    d.arrive(0, 4, 2);
    d.arrive(1234, 4, 2);
    d.run();
    EXPECT_EQ(d.fates[1].first, 1234 + kStep);
  }
}

// A slot that a finished sequence frees is filled in the step that starts at its end without async
// scheduling, one step later with it, unless that step would have been empty.
TEST(Pipeline, AFreedSlotIsFilledOneStepLaterWhenAsync) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 2, 64, async), LinearClock{}, 100);
    d.arrive(0, 4, 2);
    d.arrive(0, 4, 9);
    d.arrive(0, 4, 1);
    d.run();
    EXPECT_EQ(d.fates[0].finish, 2 * kStep);
    EXPECT_EQ(d.fates[2].first, (async ? 4 : 3) * kStep);
  }
}

// ----------------------------------------------------------------------------------- preemption

// Two sequences of 4 + 8 tokens in 5 blocks of 4. Both hold 1 block, then 2 from their first decode on
// (token 5), and need a third at token 9: the first one gets it (5 of 5), the second is preempted.
// With caching its 2 full blocks (8 tokens) survive in the free queue until the first takes them; as the
// first needs no more (12 tokens, 3 blocks), both are there on return and one token is computed.
TEST(Preemption, TheLatestGoesAndFindsItsOwnBlocksAgain) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 5);
  d.arrive(0, 4, 8, identity_of(1, 1, 11, 2));
  d.arrive(0, 4, 8, identity_of(2, 1, 12, 2));
  d.run();
  EXPECT_EQ(d.sequences[0].preemptions, 0);
  EXPECT_EQ(d.sequences[1].preemptions, 1);
  EXPECT_EQ(d.engine.statistics().preemptions, 1);
  // Steps 1-5 compute tokens 1-4, 5, 6, 7, 8 of both; step 6 has A's ninth only; then A ends with its
  // twelfth token sampled in step 8, and B returns in step 9 with a hit of 8 tokens.
  EXPECT_EQ(texts(d), (Texts{"A4* B4*", "A1* B1*", "A1* B1*", "A1* B1*", "A1* B1*", "A1*", "A1*", "A1*",
                             "B1*", "B1*", "B1*"}));
  EXPECT_EQ(d.sequences[1].recomputed, 0);
}

// Without prefix caching all that was computed is computed again: 4 + 4 tokens, and the ninth is new.
TEST(Preemption, WithoutCachingEverythingIsComputedAgain) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 5, false);
  d.arrive(0, 4, 8);
  d.arrive(0, 4, 8);
  d.run();
  EXPECT_EQ(d.sequences[1].preemptions, 1);
  EXPECT_EQ(d.sequences[1].recomputed, 8);
  EXPECT_EQ(text(d.steps[8]), "B9*");
}

// What is taken meanwhile is lost, the tail first: C's prompt takes 1 block while B waits... but B waits
// at the front, so nobody admitted later can overtake it; only the growth of A can evict B's blocks.
TEST(Preemption, ThePreemptedWaitsAtTheFrontAndLosesItsTailFirst) {
  Driver d(limits_of(4, 2, 64, false), LinearClock{}, 6);
  d.arrive(0, 4, 20, identity_of(1, 1, 11, 5));  // A alone needs 6 blocks
  d.arrive(0, 4, 20, identity_of(2, 1, 12, 5));
  d.arrive(0, 4, 1, identity_of(3, 1, 13, 1));
  d.run();
  EXPECT_EQ(d.sequences[0].preemptions, 0);
  EXPECT_GE(d.sequences[1].preemptions, 1);
  EXPECT_LT(d.fates[0].finish, d.fates[1].tokens.back());
  EXPECT_GT(d.fates[2].first, d.fates[0].finish);
  // B is preempted with 12 tokens (3 blocks) computed when A needs its fourth block; A then takes its
  // fourth (B's third), fifth (B's second) and sixth block (B's first): nothing is left to hit.
  EXPECT_EQ(d.sequences[1].recomputed, 12);
}

// A step that preempts admits nobody. The one preempted could not come back (it lacks what was taken), but
// A, whose load has landed and who holds all its blocks, could take the free slot: one step later.
TEST(Preemption, NobodyIsAdmittedInAStepThatPreempts) {
  Driver d(limits_of(4, 2, 64, false), LinearClock{}, 7, false);
  d.arrive(0, 8, 2);
  d.lies_elsewhere(0, 10);
  d.arrive(0, 4, 8);  // B and C as in the tests above: 5 blocks between them
  d.arrive(0, 4, 8);
  d.run();
  EXPECT_EQ(text(d.steps[4]), "B1* C1*");
  EXPECT_EQ(text(d.steps[5]), "B1*");
  EXPECT_EQ(text(d.steps[6]), "B1* A1*");
}

// One slot, four blocks: A has loaded and holds two, B runs, outgrows the other two and preempts itself. The
// step is empty and nothing will be heard; A must get the slot at once, and B go on after it.
TEST(Preemption, WhoPreemptsItselfMakesWayForWhoHasLoaded) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 1, 64, async), LinearClock{}, 4, false);
    d.arrive(0, 8, 1);
    d.lies_elsewhere(0, 10);
    d.arrive(0, 4, 8);
    d.run();
    EXPECT_EQ(d.sequences[1].preemptions, 1);
    EXPECT_EQ(d.fates[0].finish, 6 * kStep);
    EXPECT_GT(d.fates[1].finish, d.fates[0].finish);
  }
}

// With async scheduling a sequence can lose its blocks while its last token is being sampled: it ends,
// and does not come back.
TEST(Preemption, ALastTokenInFlightStillCounts) {
  EngineLimits limits = limits_of(4, 8, 64, true);
  Driver d(limits, LinearClock{}, 4, false);
  d.arrive(0, 7, 9);  // 2 blocks; the third when its ninth token is computed, in step 3
  d.arrive(0, 7, 2);  // 2 blocks; its last token is sampled in step 2
  d.run();
  EXPECT_EQ(d.sequences[1].preemptions, 1);
  EXPECT_EQ(d.fates[1].finish, 2 * kStep);
  EXPECT_EQ(d.sequences[1].recomputed, 0);
  EXPECT_EQ(d.engine.pool().free_blocks(), 4);
}

// A block is published when its tokens are both known and computed. While the step that computes the last
// of them runs, a preemption does not publish it: vLLM caches num_computed_tokens less the tokens still
// being sampled.
TEST(Preemption, ABlockThatIsStillBeingComputedIsNotPublished) {
  // Both know 8 tokens at 100, where step 2 starts, which computes the eighth, and step 3 is scheduled, for
  // which A needs a third block of 4. B's second block goes from hand to hand: nothing cached is evicted.
  Driver d(limits_of(4, 8, 64, true), LinearClock{}, 4);
  d.arrive(0, 7, 4, identity_of(1, 1, 11, 1));
  d.arrive(0, 7, 4, identity_of(2, 1, 12, 1));
  d.at_boundary = [](Driver& w, Nanos now) {
    if (now != 100) return;
    EXPECT_EQ(w.sequences[1].preemptions, 1);
    EXPECT_EQ(w.engine.pool().size(w.sequences[0].table), 3);
    EXPECT_EQ(w.engine.pool().evicted_blocks(), 0u);
  };
  d.run();
  EXPECT_EQ(d.sequences[1].recomputed, 4);  // of 8 tokens its first block is found again
}

// ------------------------------------------------------------------------------------ admission

// The head of the queue needs 5 blocks where 3 are free: who comes behind it waits, though it would fit.
TEST(Admission, ABlockedHeadLetsNobodyPass) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 8);
  d.arrive(0, 17, 4);  // 5 blocks
  d.arrive(0, 17, 1);
  d.arrive(0, 1, 1);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A17*", "A1*", "A1*", "A1*", "B17* C1*"}));
}

// Blocks that one sequence computes in a step are there for the next one admitted to the same step: vLLM
// caches full blocks when it allocates them. 2 of 3 blocks hit, as the last token is always computed.
TEST(Admission, BlocksPublishedInAStepAreHitInTheSameStep) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 20);
  d.arrive(0, 12, 1, identity_of(7, 3, 11, 0));
  d.arrive(0, 12, 1, identity_of(7, 3, 12, 0));
  d.arrive(0, 13, 1, identity_of(7, 3, 13, 0));
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A12* B4* C1*"}));
  EXPECT_EQ(d.sequences[1].hit_tokens, 8);
  EXPECT_EQ(d.sequences[2].hit_tokens, 12);
}

// A chunk publishes what it has computed and no more: B, admitted a step later, hits one chunk.
TEST(Admission, AChunkPublishesOnlyItself) {
  Driver d(limits_of(4, 8, 8, false), LinearClock{}, 20);
  d.arrive(0, 16, 1, identity_of(7, 4, 11, 0));
  d.arrive(0, 16, 1, identity_of(7, 4, 12, 0));
  d.run();
  // A computes 8, then 8; nothing of the budget is left for B, who then hits 12 (its last block is its
  // own to compute).
  EXPECT_EQ(texts(d), (Texts{"A8", "A8*", "B4*"}));
}

// Blocks go back in order of sequences finished, each one's tail first, to the end of the queue.
TEST(Admission, FinishedSequencesReturnTheirTailFirst) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 8);
  d.arrive(0, 12, 1);  // blocks 0 1 2
  d.arrive(0, 8, 1);   // blocks 3 4
  d.run();
  EXPECT_EQ(d.engine.pool().free_queue(), (std::vector<BlockId>{5, 6, 7, 2, 1, 0, 4, 3}));
}

// ---------------------------------------------------------------------------------- remote loads

struct LoadWorld {
  Driver d;
  SeqId running, remote;
  explicit LoadWorld(const EngineLimits& limits, std::int32_t blocks = 40, std::int32_t prompt = 16,
                     Nanos wire = 220)
      : d(limits, LinearClock{}, blocks) {
    running = d.arrive(0, 4, 12, identity_of(1, 1, 11, 3));
    remote = d.arrive(0, prompt, 2, identity_of(2, prompt / limits.block_size, 12, 1));
    d.lies_elsewhere(remote, wire);
  }
};

// Admitted to a load at 0: blocks for all 16 tokens at once, no tokens in the step. Posted with the first
// step, landed at 220, polled at 300, promoted in the step after next (async) or the next: that step
// recomputes the last prompt token alone and yields token 1.
TEST(Load, BlocksAtAdmissionPollAtStepEndLastTokenAgain) {
  for (const bool async : {false, true}) {
    LoadWorld w(limits_of(4, 8, 64, async));
    std::int32_t after_first_step = -1;
    w.d.context = &after_first_step;
    w.d.at_boundary = [](Driver& d, Nanos) {
      auto& seen = *static_cast<std::int32_t*>(d.context);
      if (seen < 0) seen = d.engine.pool().size(d.sequences[1].table);
    };
    w.d.run();
    EXPECT_EQ(after_first_step, 4);
    EXPECT_EQ(w.d.steps[0].loads, std::vector<SeqId>{w.remote});
    EXPECT_EQ(text(w.d.steps[0]), "A4*");
    EXPECT_EQ(w.d.sequences[w.remote].load_tokens, 16);
    EXPECT_EQ(w.d.sequences[w.remote].admitted, 0);
    const std::size_t acted = async ? 4 : 3;
    EXPECT_EQ(text(w.d.steps[acted]), "A1* B1*");
    EXPECT_EQ(w.d.steps[acted].shape.decode_requests, 2);  // a row like any decode: one token after 15
    EXPECT_EQ(w.d.fates[w.remote].first, static_cast<Nanos>(acted + 1) * kStep);
  }
}

// Posting delays everyone in the step; the load's own wire time runs beside the steps.
TEST(Load, PostingDelaysEveryoneInTheStep) {
  LoadWorld w(limits_of(4, 8, 64, false));
  w.d.posting = 70;
  w.d.run();
  EXPECT_EQ(w.d.fates[w.running].first, kStep + 70);
  EXPECT_EQ(w.d.fates[w.running].tokens[1], 2 * kStep + 70);
  EXPECT_EQ(w.d.engine.statistics().posting, 70);
}

// A loaded sequence goes before those that wait, even those that came before it; a loading one lets
// others pass.
TEST(Load, PromotedBeforeWaiting) {
  EngineLimits limits = limits_of(4, 2, 64, false);
  Driver d(limits, LinearClock{}, 40);
  d.arrive(0, 8, 1);  // A: loads
  d.arrive(0, 4, 4);  // B and C run meanwhile and take both slots
  d.arrive(0, 4, 6);
  d.arrive(0, 4, 1);  // D waits
  d.lies_elsewhere(0, 150);
  d.sequences[0].final = 8 + 2;
  d.run();
  // A has landed by 200 but both slots are taken until B ends at 400: then A, not D.
  EXPECT_EQ(text(d.steps[0]), "B4* C4*");
  EXPECT_EQ(text(d.steps[4]), "C1* A1*");
  EXPECT_EQ(text(d.steps[6]), "D4*");
}

// The blocks of a landed prompt are hit by the next prompt that begins alike; not while it is loading.
TEST(Load, ALoadedPromptIsPublishedWhenItHasLanded) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 40);
  d.arrive(0, 16, 1, identity_of(7, 4, 11, 0));
  d.arrive(0, 16, 1, identity_of(7, 4, 12, 0));
  d.arrive(250, 16, 1, identity_of(7, 4, 13, 0));
  d.lies_elsewhere(0, 120);
  d.lies_elsewhere(1, 120);
  d.run();
  EXPECT_EQ(d.steps[0].loads.size(), 2u);  // the second finds nothing: the first is still loading
  EXPECT_EQ(d.sequences[2].hit_tokens, 12);
}

// The last block of a prompt that ends with it is complete once its last token has been computed again: it
// is published with that step, and hit by who is admitted to the same one.
TEST(Load, TheLastBlockIsPublishedWithTheLastToken) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 40);
  d.arrive(0, 16, 3, identity_of(7, 4, 11, 0));
  d.arrive(100, 20, 1, identity_of(7, 4, 12, 1));
  d.lies_elsewhere(0, 90);
  d.run();
  // Step [0, 50) only posts; the poll at 100 sees the load, and the arrival is there.
  EXPECT_EQ(text(d.steps[1]), "A1* B4*");
  EXPECT_EQ(d.sequences[1].hit_tokens, 16);
}

// All that is known of a sequence must fit at admission, not only its first chunk (vLLM's
// scheduler_reserve_full_isl); the blocks are still taken chunk by chunk.
TEST(Admission, TheWholePromptMustFit) {
  Driver d(limits_of(4, 8, 8, false), LinearClock{}, 10, false);
  d.arrive(0, 17, 4);  // 5 blocks, in three chunks
  d.arrive(0, 24, 1);  // 6 blocks; 5 are left
  d.at_boundary = [](Driver& w, Nanos now) {
    if (now == 0) {
      EXPECT_EQ(w.engine.pool().free_blocks(), 8);
    }
  };
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A8", "A8", "A1*", "A1*", "A1*", "A1*", "B8", "B8", "B8*"}));
}

// Blocks short: the load waits like anyone else, and nothing is reserved for it.
TEST(Load, WaitsForBlocksOfItsWholePrompt) {
  LoadWorld w(limits_of(4, 8, 64, false), 6, 16, 10);  // A grows to 16 tokens: 4 blocks; B needs 4 at once
  w.d.run();
  EXPECT_EQ(w.d.sequences[w.running].preemptions, 0);
  // A holds 2 blocks (one spare at admission of 4 tokens) until its ninth token; 6 - 1 = 5 are free at 0.
  EXPECT_EQ(w.d.sequences[w.remote].admitted, 0);
  LoadWorld v(limits_of(4, 8, 64, false), 4, 16, 10);  // 3 free at 0: not before A's end
  v.d.run();
  EXPECT_EQ(v.d.sequences[v.remote].considered, 0);
  EXPECT_EQ(v.d.sequences[v.remote].admitted, v.d.fates[v.running].finish);
}

// A decode worker that lacks no more than full_hit_tokens, or fewer than pd_recompute_threshold, computes
// the rest itself; one token more is loaded.
TEST(Load, FullHitAndRecomputeThreshold) {
  struct Case {
    std::int32_t cached_blocks, prompt, full_hit, threshold;
    bool loads;
  };
  const Case cases[] = {
      {4, 20, 4, 0, false},  // lacks 4 <= 4
      {4, 21, 4, 0, true},   // lacks 5
      {4, 20, 3, 0, true},   // lacks 4 > 3
      {4, 20, 0, 0, true},   // strict
      {4, 24, 4, 9, false},  // lacks 8 < 9
      {4, 24, 4, 8, true},   // lacks 8
      {0, 6, 0, 64, false},  // nothing cached, but a short prompt
      {0, 6, 0, 6, true},
  };
  for (const Case& c : cases) {
    Driver d(limits_of(4, 8, 64, false), LinearClock{}, 40);
    d.full_hit_tokens = c.full_hit;
    d.recompute_threshold = c.threshold;
    if (c.cached_blocks > 0) d.arrive(0, 4 * c.cached_blocks + 1, 1, identity_of(7, c.cached_blocks, 11, 0));
    const SeqId b = d.arrive(200, c.prompt, 1, identity_of(7, c.prompt / 4, 12, 0));
    d.lies_elsewhere(b, 10);
    d.run();
    const Driver::Started& step = d.steps[c.cached_blocks > 0 ? 1 : 0];
    const std::string what = "lacks " + std::to_string(c.prompt - 4 * c.cached_blocks) + " of full hit " +
                             std::to_string(c.full_hit) + ", threshold " + std::to_string(c.threshold);
    EXPECT_EQ(step.loads.size(), c.loads ? 1u : 0u) << what;
    EXPECT_EQ(step.declined.size(), c.loads ? 0u : 1u) << what;
    EXPECT_EQ(d.sequences[b].load_tokens, c.loads ? c.prompt - 4 * c.cached_blocks : 0) << what;
    if (!c.loads) {
      EXPECT_EQ(step.shape.tokens(), c.prompt - 4 * c.cached_blocks) << what;
    }
    EXPECT_GE(d.fates[b].finish, 0) << what;
  }
}

// Only the first 10 of 30 tokens lie elsewhere: blocks for these 10 alone are taken at admission, though all
// 30 must fit; what is left is computed in chunks of the budget, and only the last of them yields a token.
TEST(Load, APartOfThePromptIsLoadedAndTheRestComputedInChunks) {
  for (const bool async : {false, true}) {
    Driver d(limits_of(4, 8, 8, async), LinearClock{}, 40);
    const SeqId a = d.arrive(0, 30, 1);
    d.lies_elsewhere(a, 220, 10);
    std::vector<std::int32_t> blocks, loading;
    std::pair seen{&blocks, &loading};
    d.context = &seen;
    d.at_boundary = [](Driver& w, Nanos) {
      const auto& [sizes, held] = *static_cast<decltype(seen)*>(w.context);
      if (w.sequences[0].table == kNoTable) return;
      sizes->push_back(w.engine.pool().size(w.sequences[0].table));
      held->push_back(w.engine.held(Hold::loading));
    };
    d.run();
    EXPECT_EQ(texts(d), (Texts{"", "A8", "A8", "A4*"}));
    EXPECT_EQ(d.sequences[a].load_tokens, 10);
    EXPECT_EQ(d.sequences[a].remote_tokens, 0);
    EXPECT_EQ(d.steps[1].shape.prefill_pairs, 11 + 12 + 13 + 14 + 15 + 16 + 17 + 18);
    // ceil(10 / 4) when posted and when that step ends, then ceil(18 / 4), ceil(26 / 4), ceil(30 / 4); the
    // pipeline is a step ahead when async.
    EXPECT_EQ(blocks, async ? (std::vector<std::int32_t>{3, 3, 7, 8, 8})
                            : (std::vector<std::int32_t>{3, 3, 5, 7, 8}));
    EXPECT_EQ(loading, (std::vector<std::int32_t>{3, 3, 0, 0, 0}));
    EXPECT_EQ(d.fates[a].first, 250 + 3 * kStep);  // [0, 50) posts; polls at 100, 150, 200, 250 >= 220
  }
}

// Of 10 tokens elsewhere 8 are cached here: 2 are loaded, behind the hits. Of 8, none: nobody is asked.
TEST(Load, WhatIsCachedHereIsNotLoaded) {
  for (const std::int32_t elsewhere : {10, 9, 8, 3}) {
    Driver d(limits_of(4, 8, 64, false), LinearClock{}, 40);
    d.full_hit_tokens = -100;  // whoever is asked wants a load
    d.arrive(0, 9, 1, identity_of(7, 2, 11, 0));
    const SeqId b = d.arrive(200, 20, 1, identity_of(7, 2, 12, 3));
    d.lies_elsewhere(b, 10, elsewhere);
    d.run();
    const bool loads = elsewhere > 8;
    EXPECT_EQ(d.sequences[b].hit_tokens, 8);
    EXPECT_EQ(d.sequences[b].load_tokens, loads ? elsewhere - 8 : 0);
    EXPECT_EQ(d.steps[1].loads.size(), loads ? 1u : 0u) << elsewhere;
    EXPECT_EQ(d.steps[1].declined.size(), loads ? 0u : 1u) << elsewhere;
    EXPECT_EQ(d.steps.back().shape.tokens(), 20 - std::max(8, elsewhere)) << elsewhere;
  }
}

// The hook is asked again whenever the head is looked at, and what it says then is what counts: here it
// wants a load as long as fewer than two blocks are cached, and those come while the head waits for room.
TEST(Load, TheLastAnswerCounts) {
  Driver d(limits_of(4, 1, 64, false), LinearClock{}, 40);
  d.full_hit_tokens = 8;
  d.arrive(0, 9, 3, identity_of(7, 2, 11, 0));
  const SeqId b = d.arrive(0, 16, 1, identity_of(7, 4, 12, 0));
  d.lies_elsewhere(b, 10);  // lacks 16 at first, 8 when A has gone
  d.run();
  EXPECT_EQ(d.sequences[b].load_tokens, 0);
  EXPECT_EQ(text(d.steps[3]), "B8*");
}

// A part that could not be loaded is computed here with all the rest: from what was cached on.
TEST(Load, APartThatFailsIsComputedHere) {
  Driver d(limits_of(4, 8, 8, false), LinearClock{}, 40);
  const SeqId a = d.arrive(0, 20, 1);
  d.lies_elsewhere(a, 60, 12);
  d.fates[a].post = Driver::Fate::Post::recompute;
  d.run();
  EXPECT_EQ(texts(d), (Texts{"", "", "A8", "A8", "A4*"}));
  EXPECT_EQ(d.engine.held(Hold::loading), 0);
}

// Without chunked prefill what is left of a loaded prompt waits for a whole budget, like any prompt.
TEST(Load, WithoutChunksTheRestWaitsForAWholeBudget) {
  EngineLimits limits = limits_of(16, 8, 32, false);
  limits.chunked_prefill = false;
  Driver d(limits, LinearClock{}, 100);
  d.full_hit_tokens = 0;
  d.arrive(0, 10, 3);
  const SeqId b = d.arrive(0, 42, 1);
  d.lies_elsewhere(b, 10, 10);
  d.run();
  EXPECT_EQ(texts(d), (Texts{"A10*", "A1*", "A1*", "B32*"}));
}

// What lies elsewhere would fit, all of the prompt does not: it waits, and holds nothing.
TEST(Load, AllOfThePromptMustFitThoughAPartIsLoaded) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 8);
  const SeqId a = d.arrive(0, 12, 3);  // 3 of 8 blocks, 4 when it ends
  const SeqId b = d.arrive(0, 24, 1);  // 6
  d.lies_elsewhere(b, 10, 8);
  d.run();
  EXPECT_EQ(d.sequences[b].admitted, d.fates[a].finish);
  EXPECT_EQ(d.sequences[b].load_tokens, 8);
}

// An engine with nothing but loading sequences takes empty steps of idle_step: a load that lands at 10 +
// 220 is seen at the first multiple of 50 since the step that posted it ended.
TEST(Load, AnEngineThatOnlyWaitsPollsAtIdleSteps) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 40);
  d.arrive(10, 8, 1);
  d.lies_elsewhere(0, 220);
  d.run();
  // Step [10, 60) is empty but for the post; polls at 110, 160, 210, 260 >= 230; one step.
  EXPECT_EQ(d.fates[0].first, 260 + kStep);
  EXPECT_EQ(d.engine.statistics().busy, kStep);  // empty steps are not work
}

// ----------------------------------------------------------------------------------------- sums

// Each row sees, for each of its tokens, all tokens before it and itself; with a window of w the nearest
// w of them. The step's sums against loops over tokens.
TEST(Shape, SumsAgreeWithLoopsOverTokens) {
  for (const std::int32_t window : {0, 1, 5, 16, 64}) {
    LinearClock clock;
    clock.window = window;
    Driver d(limits_of(4, 6, 24, window % 2 == 0), clock, 200);
    Random random(2, Purpose::lengths, static_cast<std::uint64_t>(window));
    for (int i = 0; i < 60; ++i) {
      d.arrive(i * 130, 1 + static_cast<std::int32_t>(random.below(60)),
               1 + static_cast<std::int32_t>(random.below(40)));
    }
    d.run();
    std::map<SeqId, std::int64_t> computed;
    for (const Driver::Started& step : d.steps) {
      StepShape want;
      for (const Step::Item& item : step.items) {
        const std::int64_t p = computed[item.seq], n = item.tokens;
        std::int64_t pairs = 0, window_pairs = 0;
        for (std::int64_t q = p; q < p + n; ++q) {
          pairs += q + 1;
          window_pairs += std::min<std::int64_t>(q + 1, window);
        }
        // Keys that some query of the row reads: from the first query's oldest visible one on.
        const std::int64_t window_context = p + n - std::max<std::int64_t>(0, p + 1 - window);
        if (n == 1 && item.sampled) {
          ++want.decode_requests;
          want.decode_context += pairs;
          want.decode_window_context += window_pairs;
        } else {
          ++want.prefill_requests;
          want.prefill_tokens += item.tokens;
          want.prefill_pairs += pairs;
          want.prefill_context += p + n;
          if (window > 0) {
            want.prefill_window_pairs += window_pairs;
            want.prefill_window_context += window_context;
          }
        }
        want.sampled_requests += item.sampled ? 1 : 0;
        computed[item.seq] = d.sequences[item.seq].preemptions > 0 ? -1 : p + n;
        ASSERT_GE(computed[item.seq], 0) << "no preemption here";
      }
      EXPECT_EQ(step.shape.decode_requests, want.decode_requests);
      EXPECT_EQ(step.shape.prefill_requests, want.prefill_requests);
      EXPECT_EQ(step.shape.prefill_tokens, want.prefill_tokens);
      EXPECT_EQ(step.shape.sampled_requests, want.sampled_requests);
      EXPECT_EQ(step.shape.decode_context, want.decode_context);
      EXPECT_EQ(step.shape.decode_window_context, want.decode_window_context) << "window " << window;
      EXPECT_EQ(step.shape.prefill_pairs, want.prefill_pairs);
      EXPECT_EQ(step.shape.prefill_context, want.prefill_context);
      EXPECT_EQ(step.shape.prefill_window_pairs, want.prefill_window_pairs) << "window " << window;
      EXPECT_EQ(step.shape.prefill_window_context, want.prefill_window_context) << "window " << window;
    }
  }
}

// Gaps between a sequence's tokens: the histogram's count, mean and maximum, and each sequence's longest,
// from the list of all token times. Silent and uncounted sequences stay out.
TEST(Gaps, AgreeWithTheListOfTokenTimes) {
  LinearClock clock;
  clock.per_token = 3;
  clock.per_context = 1;
  Driver d(limits_of(4, 6, 24, true), clock, 30);
  Random random(3, Purpose::lengths);
  for (int i = 0; i < 40; ++i) {
    const SeqId id = d.arrive(i * 150, 1 + static_cast<std::int32_t>(random.below(30)),
                              1 + static_cast<std::int32_t>(random.below(30)));
    d.sequences[id].counted = i % 5 != 0;
    if (i % 7 == 0) d.sequences[id].silent = true;
  }
  d.run();
  std::uint64_t n = 0;
  double sum = 0;
  Nanos most = 0;
  for (std::size_t i = 0; i < d.fates.size(); ++i) {
    Nanos longest = 0;
    for (std::size_t t = 1; t < d.fates[i].tokens.size(); ++t) {
      const Nanos gap = d.fates[i].tokens[t] - d.fates[i].tokens[t - 1];
      longest = std::max(longest, gap);
      if (!d.sequences[i].counted || d.sequences[i].silent) continue;
      ++n;
      sum += static_cast<double>(gap);
      most = std::max(most, gap);
    }
    if (!d.sequences[i].silent) {
      EXPECT_EQ(d.sequences[i].longest_gap, longest) << i;
    }
  }
  const Distribution got = d.gaps.distribution(1);
  EXPECT_GT(n, 300u);
  EXPECT_EQ(got.n, n);
  EXPECT_DOUBLE_EQ(got.mean, sum / static_cast<double>(n));
  EXPECT_DOUBLE_EQ(got.max, static_cast<double>(most));
}

// Blocks in use, integrated over time: three blocks for one step of 100 ns, and nothing before or after.
TEST(Statistics, IntegralOfBlocksInUse) {
  Driver d(limits_of(4, 8, 64, false), LinearClock{}, 10, false);
  d.arrive(1000, 12, 1);
  d.run();
  EXPECT_EQ(static_cast<double>(d.engine.statistics().used_block_ns), 3.0 * kStep);
  EXPECT_EQ(d.engine.statistics().max_used_blocks, 3);
  EXPECT_EQ(d.engine.statistics().busy, kStep);
}

// Request-time in the queue by what the first of it waits for, counted from the schedule that first saw it.
TEST(Statistics, WaitsByReason) {
  const auto wait = [](const Driver& d, Engine::Wait why) {
    return d.engine.statistics().waits[static_cast<std::size_t>(why)];
  };
  const auto expect = [&](const Driver& d, Nanos slot, Nanos blocks, Nanos budget) {
    EXPECT_EQ(wait(d, Engine::Wait::slot), slot);
    EXPECT_EQ(wait(d, Engine::Wait::blocks), blocks);
    EXPECT_EQ(wait(d, Engine::Wait::budget), budget);
  };
  Driver slots(limits_of(4, 2, 64, false), LinearClock{}, 100);  // A B, then C D, then E: two steps each
  for (int i = 0; i < 5; ++i) slots.arrive(0, 4, 2);
  slots.run();
  expect(slots, 3 * 2 * kStep + 1 * 2 * kStep, 0, 0);

  Driver blocks(limits_of(4, 8, 64, false), LinearClock{}, 8);  // A alone for four steps
  for (int i = 0; i < 3; ++i) blocks.arrive(0, 17, i == 0 ? 4 : 1);
  blocks.run();
  expect(blocks, 0, 2 * 4 * kStep + kStep, 0);  // then B, and C after it

  Driver budget(limits_of(4, 8, 8, false), LinearClock{}, 100);  // A in two steps, then B
  for (int i = 0; i < 2; ++i) budget.arrive(0, 16, 1);
  budget.run();
  expect(budget, 0, 0, 2 * kStep);
}

// ----------------------------------------------------------------------------------------- runs

// A run is an optimisation of the event queue, not of the model. Theory: let F be the boundaries that the
// engine with runs goes through in full, S those that the other goes through (all). Then F is a subset of
// S; at each time in F both engines are in the same state, down to block ids and the order of the free
// queue; whenever a run is settled at t, the pools and the published cache events at t are the same; and
// at the end everything that was counted is.

struct Hash {
  std::uint64_t value = 1469598103934665603u;
  template <typename T>
  void add(T x) {
    value = (value ^ static_cast<std::uint64_t>(x)) * 1099511628211u;
  }
};

void add_pool(Hash& h, const Driver& d) {
  for (const BlockId id : d.engine.pool().free_queue()) h.add(id);
  h.add(d.engine.pool().cached_blocks());
  h.add(d.engine.pool().evicted_blocks());
  std::vector<BlockId> ids;
  for (const Sequence& s : d.sequences) {
    if (s.table == kNoTable) continue;
    ids.resize(static_cast<std::size_t>(d.engine.pool().size(s.table)));
    d.engine.pool().ids(s.table, 0, static_cast<std::int32_t>(ids.size()), ids.data());
    h.add(-1);
    for (const BlockId id : ids) h.add(id);
  }
}

std::uint64_t state_of(const Driver& d) {
  Hash h;
  for (const Sequence& s : d.sequences) {
    for (const std::int64_t x :
         {std::int64_t{s.known}, std::int64_t{s.pending}, std::int64_t{s.computed},
          std::int64_t{s.hit_tokens}, std::int64_t{s.load_tokens}, std::int64_t{s.preemptions},
          std::int64_t{s.recomputed}, std::int64_t{s.lost}, std::int64_t(s.status),
          std::int64_t{s.remote_tokens}, std::int64_t{s.started}, s.considered, s.admitted, s.last_token,
          s.longest_gap}) {
      h.add(x);
    }
  }
  add_pool(h, d);
  h.add(d.engine.waiting());
  h.add(d.engine.parked());
  h.add(d.engine.running());
  h.add(d.engine.stepping() ? d.engine.step_end() : -1);
  return h.value;
}

struct Seen {
  std::map<Nanos, std::uint64_t> boundaries;
  std::vector<std::uint64_t> settles;
  // Blocks by who has them, counted table by table, and their sums over time: right where every boundary is
  // seen, as nothing changes between two.
  std::array<std::int32_t, 1 + kHolds> blocks{};
  std::array<__int128, 1 + kHolds> block_ns{};
  Nanos since = 0;

  void count(const Driver& d, Nanos now) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      block_ns[i] += static_cast<__int128>(blocks[i]) * (now - since);
    }
    since = now;
    blocks = {};
    const auto at = [&](Hold hold) -> std::int32_t& { return blocks[1 + static_cast<std::size_t>(hold)]; };
    for (const Sequence& s : d.sequences) {
      if (s.status != SeqStatus::loading && s.status != SeqStatus::loaded) continue;
      at(Hold::loading) += d.engine.pool().size(s.table);
    }
    for (const SeqId id : d.kept()) at(d.kept_as(id)) += d.engine.pool().size(d.sequences[id].table);
    const std::int32_t held = std::accumulate(blocks.begin() + 1, blocks.end(), 0);
    blocks[0] = std::max(0, d.engine.pool().total_blocks() - d.engine.pool().free_blocks() - held);
  }
};

void watch(Driver& d, Seen& seen) {
  d.keep_steps = false;
  d.context = &seen;
  d.at_boundary = [](Driver& w, Nanos now) {
    static_cast<Seen*>(w.context)->boundaries[now] = state_of(w);
    static_cast<Seen*>(w.context)->count(w, now);
  };
  d.at_crash = [](Driver& w, Nanos now) {
    static_cast<Seen*>(w.context)->count(w, now);
    static_cast<Seen*>(w.context)->blocks = {};
  };
  d.at_settle = [](Driver& w, Nanos) {
    Hash h;
    add_pool(h, w);
    for (const LoggedCacheEvent& e : w.engine.cache_log()) {
      if (e.published == kNever) break;
      h.add(e.event.hash);
      h.add(e.published);
    }
    h.add(w.engine.statistics().totals.steps);
    static_cast<Seen*>(w.context)->settles.push_back(h.value);
  };
}

struct World {
  EngineLimits limits;
  LinearClock clock;
  std::int32_t blocks = 0;
  bool caching = true;
  std::function<void(Driver&)> script;
};

World random_world(std::uint64_t seed) {
  World w;
  Random r(seed, Purpose::arrivals);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(r.below(n)); };
  const std::int32_t block = 1 << below(5);
  w.limits = limits_of(block, 1 + below(8), 8 + below(60), r.below(2) == 0);
  const std::int32_t threshold = r.below(4) == 0 ? below(20) : 0;
  const std::int32_t full_hit = r.below(4) == 0 ? 0 : block;
  w.limits.max_num_batched_tokens = std::max(w.limits.max_num_batched_tokens, w.limits.max_num_seqs);
  w.clock.base = 50 + below(100);
  w.clock.per_token = below(4);
  w.clock.per_request = below(4);
  w.clock.per_context = below(3);
  w.clock.per_window_context = below(3);
  w.clock.per_window_pair = below(2);
  w.clock.wobble = r.below(2) == 0 ? 0 : below(200);
  w.clock.window = r.below(2) == 0 ? 0 : 1 + below(50);
  w.caching = r.below(4) != 0;
  const std::int32_t longest_prompt = 1 + below(50), longest_output = 1 + below(120);
  const std::int32_t longest = longest_prompt + longest_output;
  if (r.below(6) == 0) {  // without chunks whatever waits must fit into one step
    w.limits.chunked_prefill = false;
    w.limits.max_num_batched_tokens = std::max(w.limits.max_num_batched_tokens, longest);
  }
  w.blocks = (longest + block - 1) / block + below(static_cast<std::uint64_t>(3 * longest / block + 2));
  const std::int32_t requests = 1 + below(14);
  const Nanos spread = 1 + below(8000);
  const bool remote = r.below(2) == 0, silent = r.below(3) == 0, failing = r.below(2) == 0;
  const bool pins = r.below(2) == 0, reclaims = r.below(2) == 0, parts = r.below(2) == 0;
  const std::int32_t aborts = r.below(3) == 0 ? below(6) : 0, crashes = r.below(6) == 0 ? 1 + below(2) : 0;
  w.script = [=](Driver& d) {
    Random q(seed, Purpose::lengths);
    const auto draw = [&](std::int64_t n) {
      return static_cast<std::int32_t>(q.below(static_cast<std::uint64_t>(std::max<std::int64_t>(1, n))));
    };
    d.recompute_threshold = threshold;
    d.full_hit_tokens = full_hit;
    d.idle_step = 20 + draw(100);
    d.posting = draw(60);
    std::vector<Nanos> arrivals;
    for (std::int32_t i = 0; i < requests; ++i) arrivals.push_back(draw(spread));
    std::sort(arrivals.begin(), arrivals.end());
    for (std::int32_t i = 0; i < requests; ++i) {
      const std::int32_t prompt = 1 + draw(longest_prompt), output = 1 + draw(longest_output);
      const std::int32_t shared = draw(prompt / block + 1);  // its first blocks are common property
      const std::int32_t all = (prompt + output) / block;
      std::vector<HashRun> identity;
      for (std::int32_t b = 0; b < shared; ++b) identity.push_back({100 + static_cast<std::uint64_t>(b), 1});
      const auto own = 1000 + static_cast<std::uint64_t>(i) * 100;
      for (std::int32_t b = shared; b < all; b += 7) {
        identity.push_back({own + static_cast<std::uint64_t>(b), std::min(7, all - b)});
      }
      const SeqId id = d.arrive(arrivals[static_cast<std::size_t>(i)], prompt, output, std::move(identity));
      d.sequences[id].counted = draw(5) != 0;
      const Nanos wire = draw(2000);
      d.fates[id].hold = draw(1500);
      if (remote && draw(2) == 0) d.lies_elsewhere(id, wire);
      if (failing && draw(4) == 0) d.fates[id].post = static_cast<Driver::Fate::Post>(1 + draw(2));
      if (silent && draw(2) == 0) {
        d.sequences[id].silent = true;
        d.sequences[id].final = prompt + 1;  // a prefill leg
      }
    }
    for (std::int32_t i = draw(12); i > 0; --i) d.nudge(draw(3 * spread + 3000));
    for (std::int32_t i = draw(12); i > 0; --i) d.settle_at(draw(3 * spread + 3000));
    for (std::int32_t i = draw(8); i > 0; --i) d.timers.push_back(draw(3 * spread + 3000));
    std::sort(d.timers.begin(), d.timers.end());
    d.reclaims = reclaims;
    for (std::size_t i = 0; i < d.sequences.size(); ++i) {
      Sequence& s = d.sequences[i];
      if (pins && draw(2) == 0) d.fates[i].pin = draw(4000);
      if (parts && s.remote_tokens > 0) s.remote_tokens = 1 + draw(s.prompt);
    }
    for (std::int32_t i = 0; i < aborts; ++i) {
      d.abort_at(draw(spread + 2000), static_cast<SeqId>(draw(requests)));
    }
    for (std::int32_t i = 0; i < crashes; ++i) d.crash_at(draw(spread + 1000));
  };
  return w;
}

TEST(Runs, EqualStepByStepOnRandomWorlds) {
  std::uint64_t full = 0, all = 0, preemptions = 0, loads = 0, evictions = 0, dead = 0, delays = 0, asked = 0;
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    const World w = random_world(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": block " + std::to_string(w.limits.block_size) +
                 (w.limits.async ? ", async" : ", sync") + ", window " + std::to_string(w.clock.window) +
                 ", blocks " + std::to_string(w.blocks));
    EngineLimits with_runs = w.limits;
    with_runs.step_by_step = false;
    Driver a(with_runs, w.clock, w.blocks, w.caching, true);
    Driver b(w.limits, w.clock, w.blocks, w.caching, true);
    Seen seen_a, seen_b;
    watch(a, seen_a);
    watch(b, seen_b);
    w.script(a);
    w.script(b);
    a.run();
    b.run();

    for (const auto& [time, state] : seen_a.boundaries) {
      const auto there = seen_b.boundaries.find(time);
      ASSERT_TRUE(there != seen_b.boundaries.end()) << "no step ends at " << time;
      ASSERT_EQ(state, there->second) << "at " << time;
    }
    ASSERT_EQ(seen_a.settles, seen_b.settles);
    ASSERT_EQ(a.timers_at, b.timers_at);

    ASSERT_EQ(a.sequences.size(), b.sequences.size());
    for (std::size_t i = 0; i < a.sequences.size(); ++i) {
      ASSERT_TRUE(b.fates[i].finish >= 0 || b.fates[i].dead) << i;
      ASSERT_EQ(a.fates[i].dead, b.fates[i].dead) << i;
      dead += b.fates[i].dead ? 1 : 0;
      ASSERT_EQ(a.fates[i].first, b.fates[i].first) << i;
      ASSERT_EQ(a.fates[i].finish, b.fates[i].finish) << i;
      ASSERT_EQ(a.sequences[i].longest_gap, b.sequences[i].longest_gap) << i;
      loads += b.sequences[i].load_tokens > 0 ? 1 : 0;
    }
    ASSERT_EQ(state_of(a), state_of(b));
    ASSERT_EQ(a.in_system_ns, b.in_system_ns);
    a.engine.pool().check();
    ASSERT_EQ(a.engine.pool().free_blocks(), w.blocks);

    const Engine::Statistics &p = a.engine.statistics(), &q = b.engine.statistics();
    ASSERT_EQ(p.totals.steps, q.totals.steps);
    ASSERT_EQ(p.totals.decode_requests, q.totals.decode_requests);
    ASSERT_EQ(p.totals.prefill_tokens, q.totals.prefill_tokens);
    ASSERT_EQ(p.totals.sampled_requests, q.totals.sampled_requests);
    ASSERT_EQ(p.totals.decode_context, q.totals.decode_context);
    ASSERT_EQ(p.totals.decode_window_context, q.totals.decode_window_context);
    ASSERT_EQ(p.totals.prefill_pairs, q.totals.prefill_pairs);
    ASSERT_EQ(p.totals.prefill_context, q.totals.prefill_context);
    ASSERT_EQ(p.totals.prefill_window_pairs, q.totals.prefill_window_pairs);
    ASSERT_EQ(p.totals.prefill_window_context, q.totals.prefill_window_context);
    ASSERT_EQ(p.totals.sampling_steps, q.totals.sampling_steps);
    ASSERT_EQ(p.totals.steps_of_tokens, q.totals.steps_of_tokens);
    ASSERT_EQ(p.waits, q.waits);
    ASSERT_EQ(p.extrapolated_steps, q.extrapolated_steps);
    ASSERT_EQ(p.busy, q.busy);
    ASSERT_EQ(p.posting, q.posting);
    ASSERT_EQ(p.preemptions, q.preemptions);
    ASSERT_EQ(p.max_used_blocks, q.max_used_blocks);
    ASSERT_EQ(p.used_block_ns, q.used_block_ns);
    ASSERT_EQ(p.pin_delays, q.pin_delays);
    ASSERT_EQ(p.pin_delay, q.pin_delay);
    delays += static_cast<std::uint64_t>(q.pin_delays);
    asked += b.asked.size();

    seen_b.count(b, b.now());
    const Timeline &t = a.engine.timeline(), &u = b.engine.timeline();
    ASSERT_EQ(t.width(), u.width());
    ASSERT_EQ(t.buckets(), u.buckets());
    for (std::size_t i = 0; i < t.series(); ++i) {
      ASSERT_TRUE(u.total(i) == seen_b.block_ns[i]) << "series " << i;
      for (std::size_t bucket = 0; bucket < t.buckets(); ++bucket) {
        ASSERT_TRUE(t.integral(i, bucket) == u.integral(i, bucket)) << "series " << i;
      }
    }

    const auto &log_a = a.engine.cache_log(), &log_b = b.engine.cache_log();
    ASSERT_EQ(log_a.size(), log_b.size());
    for (std::size_t i = 0; i < log_a.size(); ++i) {
      ASSERT_EQ(log_a[i].event.hash, log_b[i].event.hash) << i;
      ASSERT_EQ(log_a[i].event.blocks, log_b[i].event.blocks) << i;
      ASSERT_EQ(log_a[i].event.stored, log_b[i].event.stored) << i;
      ASSERT_EQ(log_a[i].step, log_b[i].step) << i;
      ASSERT_EQ(log_a[i].published, log_b[i].published) << i;
    }
    const Distribution x = a.gaps.distribution(1), y = b.gaps.distribution(1);
    ASSERT_EQ(x.n, y.n);
    ASSERT_EQ(x.mean, y.mean);
    ASSERT_EQ(x.max, y.max);
    for (int t = 0; x.n > 0 && t <= 100; ++t)
      ASSERT_EQ(a.gaps.quantile(t / 100.0), b.gaps.quantile(t / 100.0));

    full += seen_a.boundaries.size();
    all += seen_b.boundaries.size();
    preemptions += static_cast<std::uint64_t>(q.preemptions);
    evictions += b.engine.pool().evicted_blocks();
  }
  // The worlds are what they are meant to be: runs happen, and so does what could break them.
  EXPECT_LT(full, all * 2 / 3);
  EXPECT_GT(preemptions, 3000u);
  EXPECT_GT(loads, 3500u);
  EXPECT_GT(evictions, 4000u);
  EXPECT_GT(dead, 500u);
  EXPECT_GT(delays, 300u);
  EXPECT_GT(asked, 300u);
}

// The integral of blocks in use must not depend on how often it is brought up to date, also where it
// exceeds the 53 bits of a double: 100,000 blocks for 35 minutes are 2 x 10^17.
TEST(Runs, TheIntegralOfBlocksIsExact) {
  LinearClock clock;
  clock.base = 70 * kMillisecond + 13;
  EngineLimits limits = limits_of(16, 8, 1'600'000, true);
  double used[2];
  for (const bool step_by_step : {false, true}) {
    limits.step_by_step = step_by_step;
    Driver d(limits, clock, 103'000, false);
    d.keep_steps = false;
    d.arrive(0, 1'599'990, 30'011);
    d.run();
    used[step_by_step] = static_cast<double>(d.engine.statistics().used_block_ns);
  }
  EXPECT_EQ(used[0], used[1]);
}

}  // namespace
}  // namespace pdsim
