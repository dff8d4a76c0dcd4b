// Theory: the pool is a free queue in LRU order, reference counts, and an index from identity to the
// blocks that hold it. First the rules one by one on pools small enough to do by hand; then random
// streams of operations on which the pool and the plain per-block reference must agree in everything
// that can be seen: every id of every table, the whole queue, what is cached, what was evicted.
#include "sim/serving/block_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "sim/core/random.hpp"
#include "tests/serving/reference_pool.hpp"

namespace pdsim {
namespace {

using Ids = std::vector<BlockId>;
using Runs = std::vector<HashRun>;
constexpr std::int32_t kAll = 1 << 30;

Ids ids_of(const BlockPool& pool, TableId table) {
  Ids ids(static_cast<std::size_t>(pool.size(table)));
  pool.ids(table, 0, pool.size(table), ids.data());
  return ids;
}

/// A table that hits what it can, takes the rest of `blocks` new and publishes all of them.
TableId filled(BlockPool& pool, const Runs& identity, std::int32_t blocks) {
  const TableId table = pool.open(identity);
  const std::int32_t hits = pool.cached_prefix(identity, blocks);
  EXPECT_TRUE(pool.allocate(table, hits, blocks - hits));
  pool.publish(table, blocks);
  return table;
}

TEST(BlockPool, HandsOutIdsInOrderAndTakesThemBackTailFirst) {
  BlockPool pool(100, true);
  const TableId a = filled(pool, {}, 40);
  const TableId b = filled(pool, {}, 2);
  Ids expected(40);
  for (BlockId i = 0; i < 40; ++i) expected[static_cast<std::size_t>(i)] = i;
  EXPECT_EQ(ids_of(pool, a), expected);
  EXPECT_EQ(ids_of(pool, b), (Ids{40, 41}));

  // a and then b come back, each from its tail: 42 .. 99, 39 .. 0, 41, 40.
  pool.release(a);
  pool.release(b);
  expected.clear();
  for (BlockId i = 42; i < 100; ++i) expected.push_back(i);
  for (BlockId i = 39; i >= 0; --i) expected.push_back(i);
  expected.insert(expected.end(), {41, 40});
  EXPECT_EQ(pool.free_queue(), expected);
  EXPECT_EQ(pool.evicted_blocks(), 0u) << "blocks without identity are not evicted";
  pool.check();
}

TEST(BlockPool, ReleasedBlocksStayCachedUntilTheyAreHandedOut) {
  const Runs run{{7, 4}};
  BlockPool pool(6, true);
  pool.release(filled(pool, run, 4));
  EXPECT_EQ(pool.free_blocks(), 6);
  EXPECT_EQ(pool.cached_prefix(run, kAll), 4);

  // The queue is 4 5 3 2 1 0: the third block to be taken is the prompt's last one.
  const TableId other = pool.open({});
  EXPECT_TRUE(pool.allocate(other, 0, 2));
  EXPECT_EQ(pool.cached_prefix(run, kAll), 4);
  EXPECT_TRUE(pool.extend(other, 1));
  EXPECT_EQ(pool.id(other, 2), 3);
  EXPECT_EQ(pool.cached_prefix(run, kAll), 3);
  EXPECT_EQ(pool.evicted_blocks(), 1u);
  EXPECT_EQ(pool.cached_blocks(), 3);
  pool.check();
}

TEST(BlockPool, AHitOnAFreeBlockLeavesTheQueueBeforeNewBlocksAreTaken) {
  const Runs run{{7, 4}};
  BlockPool pool(6, true);
  pool.release(filled(pool, run, 4));  // queue 4 5 3 2 1 0
  const TableId b = pool.open(run);
  EXPECT_TRUE(pool.allocate(b, 3, 3));  // hits 0 1 2; then 4 5 and 3, the rest of the run
  EXPECT_EQ(ids_of(pool, b), (Ids{0, 1, 2, 4, 5, 3}));
  EXPECT_EQ(pool.free_blocks(), 0);
  EXPECT_EQ(pool.evicted_blocks(), 1u);
  pool.check();
}

TEST(BlockPool, HitsShareBlocksAndTheLastOwnerFreesThem) {
  const Runs run{{7, 4}};
  BlockPool pool(8, true);
  const TableId a = filled(pool, run, 4);
  const TableId b = pool.open(run);
  EXPECT_TRUE(pool.allocate(b, 3, 1));  // the caller computes the last block again
  EXPECT_EQ(ids_of(pool, b), (Ids{0, 1, 2, 4}));
  EXPECT_EQ(pool.free_blocks(), 3);
  pool.release(a);  // only 3 has no other owner
  EXPECT_EQ(pool.free_queue(), (Ids{5, 6, 7, 3}));
  pool.release(b);
  EXPECT_EQ(pool.free_queue(), (Ids{5, 6, 7, 3, 4, 2, 1, 0}));
  pool.check();
}

TEST(BlockPool, WithoutRoomNothingChanges) {
  const Runs run{{7, 4}};
  BlockPool pool(6, true);
  pool.release(filled(pool, run, 4));
  const Ids queue = pool.free_queue();
  const TableId b = pool.open(run);
  // 4 hits are free themselves: 4 + 3 > 6, although 3 new blocks alone would fit.
  EXPECT_FALSE(pool.allocate(b, 4, 3));
  EXPECT_EQ(pool.size(b), 0);
  EXPECT_EQ(pool.free_queue(), queue);
  EXPECT_TRUE(pool.allocate(b, 4, 2));
  EXPECT_FALSE(pool.extend(b, 1));
  // Owned hits need no room: the pool is full, and yet c fits.
  const TableId c = pool.open(run);
  EXPECT_TRUE(pool.allocate(c, 4, 0));
  EXPECT_EQ(ids_of(pool, c), (Ids{0, 1, 2, 3}));
  pool.check();
}

TEST(BlockPool, OfDuplicatesTheFirstCachedIsHitAndEvictingItLeavesTheOther) {
  const Runs run{{7, 2}};
  BlockPool pool(4, true);
  const TableId a = pool.open(run), b = pool.open(run);
  EXPECT_TRUE(pool.allocate(a, 0, 2));
  EXPECT_TRUE(pool.allocate(b, 0, 2));
  pool.publish(b, 2);  // ids 2 3 first, although a was allocated first
  pool.publish(a, 2);
  EXPECT_EQ(pool.cached_blocks(), 4);
  pool.release(b);
  const TableId c = filled(pool, run, 2);
  EXPECT_EQ(ids_of(pool, c), (Ids{2, 3})) << "first cached wins even while it is free and the other is not";
  pool.release(c);
  const TableId d = pool.open({});
  EXPECT_TRUE(pool.allocate(d, 0, 2));  // evicts 3 and 2
  EXPECT_EQ(pool.evicted_blocks(), 2u);
  EXPECT_EQ(pool.cached_prefix(run, kAll), 2);
  EXPECT_EQ(ids_of(pool, filled(pool, run, 2)), (Ids{0, 1}));
  pool.check();
}

TEST(BlockPool, OrderOfCachingIsPerBlockNotPerCopy) {
  // a caches block 0, then b both, then a block 1: 0 is a's, 1 is b's.
  const Runs run{{7, 2}};
  BlockPool pool(4, true);
  const TableId a = pool.open(run), b = pool.open(run);
  EXPECT_TRUE(pool.allocate(a, 0, 2));
  EXPECT_TRUE(pool.allocate(b, 0, 2));
  pool.publish(a, 1);
  pool.publish(b, 2);
  pool.publish(a, 2);
  EXPECT_EQ(ids_of(pool, filled(pool, run, 2)), (Ids{0, 3}));
  pool.check();
}

TEST(BlockPool, PrefixEndsAtTheFirstBlockThatIsNotCached) {
  const Runs chain{{1, 2}, {2, 2}, {3, 1}};
  BlockPool pool(10, true);
  const TableId a = pool.open(chain);
  EXPECT_TRUE(pool.allocate(a, 0, 6));
  pool.publish(a, 1);
  EXPECT_EQ(pool.cached_prefix(chain, kAll), 1);
  pool.publish(a, 3);
  pool.publish(a, 2);  // smaller than before: nothing
  EXPECT_EQ(pool.cached_prefix(chain, kAll), 3);
  EXPECT_EQ(pool.cached_prefix(chain, 2), 2);
  pool.publish(a, 6);  // the sixth lies beyond the identity
  EXPECT_EQ(pool.cached_prefix(chain, kAll), 5);
  EXPECT_EQ(pool.cached_blocks(), 5);
  EXPECT_EQ(pool.cached_prefix(Runs{{2, 2}}, kAll), 2);
  EXPECT_EQ(pool.cached_prefix(Runs{{9, 2}, {1, 2}}, kAll), 0);
  pool.check();
}

TEST(BlockPool, TruncationReturnsTheTailAsReleaseWould) {
  const Runs run{{7, 4}, {8, 4}};
  BlockPool pool(10, true);
  const TableId a = filled(pool, run, 8);
  pool.truncate(a, 8);
  EXPECT_EQ(pool.free_queue(), (Ids{8, 9}));
  pool.truncate(a, 3);
  EXPECT_EQ(ids_of(pool, a), (Ids{0, 1, 2}));
  EXPECT_EQ(pool.free_queue(), (Ids{8, 9, 7, 6, 5, 4, 3}));
  EXPECT_EQ(pool.cached_prefix(run, kAll), 8) << "given up is not forgotten";
  EXPECT_EQ(pool.evicted_blocks(), 0u);
  pool.release(a);
  EXPECT_EQ(pool.free_queue(), (Ids{8, 9, 7, 6, 5, 4, 3, 2, 1, 0})) << "as in one go";
  pool.check();
}

TEST(BlockPool, TruncationLeavesBlocksThatOthersOwn) {
  const Runs run{{7, 4}};
  BlockPool pool(6, true);
  const TableId a = filled(pool, run, 4);
  const TableId b = filled(pool, run, 3);
  pool.truncate(a, 1);
  EXPECT_EQ(pool.free_queue(), (Ids{4, 5, 3}));
  EXPECT_EQ(ids_of(pool, b), (Ids{0, 1, 2}));
  pool.truncate(b, 2);
  EXPECT_EQ(pool.free_queue(), (Ids{4, 5, 3, 2}));
  pool.release(b);
  EXPECT_EQ(pool.free_queue(), (Ids{4, 5, 3, 2, 1})) << "0 is a's";
  pool.check();
}

TEST(BlockPool, ATruncatedTableGoesOnAsIfItHadNeverHadMore) {
  const Runs run{{7, 2}, {8, 2}};
  BlockPool pool(6, true);
  const TableId a = filled(pool, run, 4);
  pool.truncate(a, 1);
  EXPECT_TRUE(pool.extend(a, 5));  // 4 5 and then its own old ones: evicted, 3 and 2 of hash 8, 1 of 7
  EXPECT_EQ(ids_of(pool, a), (Ids{0, 4, 5, 3, 2, 1}));
  EXPECT_EQ(pool.cached_prefix(run, kAll), 1);
  EXPECT_EQ(pool.evicted_blocks(), 3u);
  pool.publish(a, 6);
  EXPECT_EQ(pool.cached_prefix(run, kAll), 4);
  pool.truncate(a, 0);
  EXPECT_EQ(pool.size(a), 0);
  EXPECT_EQ(pool.free_queue(), (Ids{1, 2, 3, 5, 4, 0}));
  EXPECT_TRUE(pool.allocate(a, 3, 1));
  EXPECT_EQ(ids_of(pool, a), (Ids{0, 4, 5, 1}));
  pool.check();
}

TEST(BlockPool, WithoutPrefixCachingNothingHasAnIdentity) {
  const Runs run{{7, 4}};
  BlockPool pool(8, false);
  pool.release(filled(pool, run, 4));
  EXPECT_EQ(pool.cached_prefix(run, kAll), 0);
  EXPECT_EQ(pool.cached_blocks(), 0);
}

TEST(BlockPool, ResetForgetsEveryIdentityButOnlyWhenIdle) {
  const Runs run{{7, 4}};
  BlockPool pool(8, true);
  const TableId a = filled(pool, run, 4);
  EXPECT_FALSE(pool.reset_cache());
  EXPECT_EQ(pool.cached_prefix(run, kAll), 4);
  pool.release(a);
  const Ids queue = pool.free_queue();
  EXPECT_TRUE(pool.reset_cache());
  EXPECT_EQ(pool.cached_prefix(run, kAll), 0);
  EXPECT_EQ(pool.free_queue(), queue);
  EXPECT_EQ(pool.evicted_blocks(), 0u);
  pool.check();
}

TEST(BlockPool, EventsTellHowManyLeadingBlocksOfARunAreCached) {
  const Runs run{{7, 4}};
  BlockPool pool(6, true);
  const auto seen = [&pool] {
    std::vector<std::tuple<std::uint64_t, std::int32_t, bool>> events;
    for (const CacheEvent& e : pool.events()) events.emplace_back(e.hash, e.blocks, e.stored);
    pool.events().clear();
    return events;
  };
  using Events = decltype(seen());
  pool.release(filled(pool, Runs{{5, 1}}, 1));
  EXPECT_EQ(seen(), Events{}) << "nothing is kept before it is asked for";
  pool.enable_events(true);
  const TableId a = pool.open(run);
  EXPECT_TRUE(pool.allocate(a, 0, 4));
  EXPECT_EQ(seen(), Events{});
  pool.publish(a, 3);
  EXPECT_EQ(seen(), (Events{{7, 3, true}}));
  pool.publish(a, 4);
  pool.release(a);
  const TableId b = pool.open({});
  EXPECT_TRUE(pool.allocate(b, 0, 1));  // takes 5, which had no identity
  EXPECT_TRUE(pool.extend(b, 1));       // 0, of hash 5: released before the others
  EXPECT_EQ(seen(), (Events{{7, 4, true}, {5, 0, false}}));
  EXPECT_TRUE(pool.extend(b, 1));
  EXPECT_TRUE(pool.extend(b, 1));
  EXPECT_EQ(seen(), (Events{{7, 2, false}})) << "one by one, and yet one event";
  EXPECT_EQ(pool.cached_prefix(run, kAll), 2);
}

TEST(BlockPool, MisuseIsABug) {
  const Runs run{{7, 4}};
  BlockPool pool(8, true);
  const TableId a = pool.open(run);
  EXPECT_THROW(pool.allocate(a, 1, 0), InternalError);  // no such block is cached
  EXPECT_TRUE(pool.allocate(a, 0, 2));
  EXPECT_THROW(pool.allocate(a, 0, 1), InternalError);
  EXPECT_THROW(pool.publish(a, 3), InternalError);
  EXPECT_THROW(pool.id(a, 2), InternalError);
  EXPECT_THROW(pool.truncate(a, 3), InternalError);
  EXPECT_THROW(pool.truncate(a, -1), InternalError);
  Random random(1, Purpose::fragmentation);
  EXPECT_THROW(pool.fragment(0.5, random), InternalError);
  pool.release(a);
  EXPECT_THROW(pool.release(a), InternalError);
  EXPECT_THROW(pool.size(17), InternalError);
}

TEST(CommonRuns, CountsMaximalRunsConsecutiveOnBothSides) {
  BlockPool a(64, true), b(64, true);
  std::vector<BlockId> scratch;
  const TableId ta = filled(a, {}, 40);
  const TableId tb = filled(b, {}, 50);
  // Both are 0, 1, 2, ...: one run, wherever each starts.
  EXPECT_EQ(common_runs(a, ta, 0, b, tb, 7, 40, scratch), 1);
  EXPECT_EQ(common_runs(a, ta, 3, b, tb, 0, 0, scratch), 0);
  // c is 40 .. 63 and then a's 39, 38, ...: descending ids never merge.
  a.release(ta);
  const TableId tc = filled(a, {}, 30);
  EXPECT_EQ(common_runs(a, tc, 0, b, tb, 0, 24, scratch), 1);
  EXPECT_EQ(common_runs(a, tc, 0, b, tb, 0, 30, scratch), 7);
  EXPECT_EQ(common_runs(b, tb, 0, a, tc, 0, 30, scratch), 7);
  EXPECT_EQ(common_runs(a, tc, 24, a, tc, 24, 6, scratch), 6);
}

// ---- initial fragmentation ----------------------------------------------------------------------
//
// Theory: positions i and i + 1 of the queue hold i and i + 1 still when neither was displaced, a chance
// of (1 - share)^2 = s. Of n ids 1 + (n - 1) (1 - s) runs remain, less the neighbours that arise by
// chance: share of them where both places were refilled (1/n each of n share^2, over share^2) plus
// 2 (1 - share) where one was, together at most 2. Events at i depend only on places i and i + 1, so the
// number of runs varies by n (s (1 - s) + 2 share (1 - share)^3).

std::int32_t runs_of(const Ids& ids) {
  std::int32_t runs = 1;
  for (std::size_t i = 1; i < ids.size(); ++i) runs += ids[i] != ids[i - 1] + 1;
  return runs;
}

Ids fragmented(std::int32_t blocks, double share, std::uint64_t entity) {
  BlockPool pool(blocks, true);
  Random random(1, Purpose::fragmentation, entity);
  pool.fragment(share, random);
  pool.check();
  return pool.free_queue();
}

TEST(Fragmentation, NoneLeavesTheIdsInOrder) {
  Ids ordered(1000);
  std::iota(ordered.begin(), ordered.end(), 0);
  EXPECT_EQ(fragmented(1000, 0, 1), ordered);
  EXPECT_EQ(fragmented(1, 1, 1), Ids{0});
  EXPECT_EQ(fragmented(0, 1, 1), Ids{});
}

TEST(Fragmentation, DisplacesTheShareAndLosesNoId) {
  constexpr std::int32_t kBlocks = 20'000;
  for (const double share : {0.1, 0.5, 1.0}) {
    const Ids queue = fragmented(kBlocks, share, 1);
    std::int32_t moved = 0;
    for (std::int32_t i = 0; i < kBlocks; ++i) moved += queue[static_cast<std::size_t>(i)] != i;
    EXPECT_NEAR(moved, share * kBlocks, 5 * std::sqrt(kBlocks * share * (1 - share)) + 6) << share;
    Ids sorted = queue;
    std::ranges::sort(sorted);
    for (std::int32_t i = 0; i < kBlocks; ++i) ASSERT_EQ(sorted[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(fragmented(kBlocks, share, 1), queue) << "the same stream, the same queue";
    EXPECT_NE(fragmented(kBlocks, share, 2), queue);
  }
}

TEST(Fragmentation, EveryPermutationIsEquallyLikely) {
  constexpr int kTrials = 24'000;  // 1000 for each of the 24 orders of four ids
  std::map<Ids, int> seen;
  for (int i = 0; i < kTrials; ++i) ++seen[fragmented(4, 1, static_cast<std::uint64_t>(i))];
  EXPECT_EQ(seen.size(), 24u);
  for (const auto& [queue, times] : seen) EXPECT_NEAR(times, 1000, 5 * std::sqrt(1000.0));
}

TEST(Fragmentation, LeavesTheExpectedNumberOfRuns) {
  constexpr std::int32_t kBlocks = 1000;
  constexpr int kTrials = 400;
  for (const double share : {0.02, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0}) {
    const double stay = 1 - share, together = stay * stay;
    const double expected = 1 + (kBlocks - 1) * (1 - together) - 2 * stay - share;
    const double variance = kBlocks * (together * (1 - together) + 2 * share * stay * stay * stay) + 3;
    double sum = 0;
    for (int i = 0; i < kTrials; ++i)
      sum += runs_of(fragmented(kBlocks, share, static_cast<std::uint64_t>(i)));
    EXPECT_NEAR(sum / kTrials, expected, 5 * std::sqrt(variance / kTrials)) << "share " << share;
  }
}

TEST(Fragmentation, OfEitherSideBreaksTheRunsOfATransfer) {
  // A run goes on where neither side was displaced, at neither place: n (1 - ((1 - a) (1 - b))^2) of them.
  constexpr std::int32_t kBlocks = 50'000;
  std::vector<BlockId> scratch;
  for (const double share : {0.0, 0.2, 1.0}) {
    BlockPool a(kBlocks, true), b(kBlocks, true);
    Random random_a(1, Purpose::fragmentation, 1), random_b(1, Purpose::fragmentation, 2);
    a.fragment(0.1, random_a);
    b.fragment(share, random_b);
    const std::int32_t runs =
        common_runs(a, filled(a, {}, kBlocks), 0, b, filled(b, {}, kBlocks), 0, kBlocks, scratch);
    const double stay = 0.9 * (1 - share);
    EXPECT_NEAR(runs, kBlocks * (1 - stay * stay), 5 * std::sqrt(0.5 * kBlocks)) << share;
  }
}

// ---- against the reference ----------------------------------------------------------------------

/// What a random stream of operations is like.
struct Stream {
  std::uint64_t seed;
  std::int32_t blocks;      ///< in the pool
  std::int32_t run_blocks;  ///< longest run
  std::uint64_t branches;   ///< different runs that can follow a prefix; few = much is shared
  std::int32_t runs;        ///< longest identity
  std::size_t tables;       ///< open at once, at most
  int operations;
  double fragmentation;  ///< of the pool, at first
};

void PrintTo(const Stream& s, std::ostream* out) {
  *out << "seed " << s.seed << ", " << s.blocks << " blocks";
}

class AgainstReference : public testing::TestWithParam<Stream> {};

struct OpenTable {
  TableId pool, reference;
  std::unique_ptr<Runs> identity;  // must not move: the pool keeps a span
  std::int32_t full = 0;
  bool allocated = false;
};

TEST_P(AgainstReference, EverythingThatCanBeSeenIsEqual) {
  const Stream stream = GetParam();
  Random random(stream.seed, Purpose::prefixes);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(n)));
  };
  BlockPool pool(stream.blocks, true);
  Random fragmentation(stream.seed, Purpose::fragmentation);
  pool.fragment(stream.fragmentation, fragmentation);
  ReferencePool reference(pool.free_queue());
  std::vector<OpenTable> tables;
  std::map<std::uint64_t, std::int32_t> leading;  // as the events tell
  pool.enable_events(true);

  // A path through a tree of hashes, as chained ones are. Now and then a run is cut short, also in the
  // middle, and now and then a hash occurs twice.
  const auto random_identity = [&] {
    auto runs = std::make_unique<Runs>();
    std::uint64_t hash = 1;
    const bool cuts = random.below(4) == 0;
    for (std::int32_t r = below(stream.runs + 1); r > 0; --r) {
      if (random.below(50) != 0) hash = hash * 31 + random.below(stream.branches);
      const bool cut = r == 1 || (cuts && random.below(3) == 0);
      runs->push_back({hash, cut ? below(stream.run_blocks + 1) : stream.run_blocks});
    }
    return runs;
  };
  std::uint64_t hits = 0, refusals = 0, shared_cuts = 0;

  for (int operation = 0; operation < stream.operations; ++operation) {
    const std::uint64_t what = random.below(16);
    if (what < 3 && tables.size() < stream.tables) {
      OpenTable t{0, 0, random_identity()};
      t.pool = pool.open(*t.identity);
      t.reference = reference.open(*t.identity);
      tables.push_back(std::move(t));
    } else if (what == 15 && random.below(50) == 0) {
      for (; !tables.empty() && random.below(4) != 0; tables.pop_back()) {
        pool.release(tables.back().pool);
        reference.release(tables.back().reference);
      }
      const bool reset = reference.reset_cache();
      ASSERT_EQ(pool.reset_cache(), reset);
    } else if (!tables.empty()) {
      const std::size_t which = random.below(tables.size());
      OpenTable& t = tables[which];
      const std::int32_t size = pool.size(t.pool);
      if (!t.allocated) {
        const std::int32_t limit = random.below(3) == 0 ? below(stream.blocks) : stream.blocks;
        const std::int32_t hit = reference.cached_prefix(*t.identity, limit);
        ASSERT_EQ(pool.cached_prefix(*t.identity, limit), hit);
        const std::int32_t fresh = below(stream.run_blocks * (random.below(4) == 0 ? stream.runs : 2) + 1);
        t.allocated = reference.allocate(t.reference, hit, fresh);
        ASSERT_EQ(pool.allocate(t.pool, hit, fresh), t.allocated);
        t.full = t.allocated ? hit : 0;
        hits += t.allocated ? static_cast<std::uint64_t>(hit) : 0;
        refusals += !t.allocated;
      } else if (what < 8) {
        const std::int32_t more = random.below(2) == 0 ? 1 : below(2 * stream.run_blocks);
        const bool fits = reference.extend(t.reference, more);
        ASSERT_EQ(pool.extend(t.pool, more), fits);
        refusals += !fits;
      } else if (what < 13) {
        t.full = std::max(t.full, random.below(2) == 0 ? size : below(size + 1));
        pool.publish(t.pool, t.full);
        reference.publish(t.reference, t.full);
      } else if (what == 13) {
        const std::int32_t keep = below(size + 1);
        const std::int32_t free = pool.free_blocks();
        pool.truncate(t.pool, keep);
        reference.truncate(t.reference, keep);
        shared_cuts += pool.free_blocks() - free < size - keep;
        t.full = std::min(t.full, keep);
        t.allocated = keep > 0;
      } else {
        pool.release(t.pool);
        reference.release(t.reference);
        tables.erase(tables.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }

    ASSERT_NO_THROW(pool.check()) << "after operation " << operation;
    ASSERT_EQ(pool.free_queue(), reference.free_queue()) << "after operation " << operation;
    ASSERT_EQ(pool.free_blocks(), reference.free_blocks());
    ASSERT_EQ(pool.cached_blocks(), reference.cached_blocks());
    ASSERT_EQ(pool.evicted_blocks(), reference.evicted_blocks());
    for (const OpenTable& t : tables) {
      ASSERT_EQ(ids_of(pool, t.pool), reference.ids(t.reference)) << "after operation " << operation;
    }
    if (const std::int32_t size = tables.empty() ? 0 : pool.size(tables[0].pool); size > 0) {
      const std::int32_t first = below(size), count = below(size - first + 1);
      Ids part(static_cast<std::size_t>(count));
      pool.ids(tables[0].pool, first, count, part.data());
      const Ids& all = reference.ids(tables[0].reference);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first));
      ASSERT_EQ(pool.id(tables[0].pool, first), all[static_cast<std::size_t>(first)]);
    }

    if (operation % 4 != 3) continue;
    for (const CacheEvent& event : pool.events()) {
      std::int32_t& blocks = leading[event.hash];
      ASSERT_NE(event.blocks, blocks) << "an event without a change";
      ASSERT_EQ(event.stored, event.blocks > blocks);
      blocks = event.blocks;
    }
    pool.events().clear();
    if (operation % 16 != 15) continue;
    for (const auto& [hash, blocks] : leading) {
      ASSERT_EQ(reference.cached_prefix(Runs{{hash, kAll}}, kAll), blocks) << "hash " << hash;
      ASSERT_EQ(pool.cached_prefix(Runs{{hash, kAll}}, kAll), blocks) << "hash " << hash;
    }
  }
  // The stream did what it is for.
  EXPECT_GT(hits, 100u);
  EXPECT_GT(refusals, 10u);
  EXPECT_GT(reference.evicted_blocks(), 100u);
  EXPECT_GT(shared_cuts, 10u) << "truncations that gave up blocks of others";
}

INSTANTIATE_TEST_SUITE_P(Streams, AgainstReference,
                         testing::Values(Stream{1, 24, 4, 2, 4, 6, 150'000, 0},     // tiny: all is shared
                                         Stream{2, 60, 5, 1, 6, 8, 120'000, 0.3},   // one chain, duplicates
                                         Stream{3, 97, 7, 3, 6, 8, 40'000, 0},      // odd sizes
                                         Stream{4, 400, 32, 2, 5, 8, 30'000, 0.5},  // Mooncake's 512 / 16
                                         Stream{5, 500, 75, 2, 3, 6, 20'000, 1},    // runs beyond a segment
                                         Stream{6, 64, 1, 2, 24, 8, 40'000, 0},     // one block a run
                                         Stream{7, 300, 8, 6, 8, 24, 20'000, 0}));  // many tables

}  // namespace
}  // namespace pdsim
