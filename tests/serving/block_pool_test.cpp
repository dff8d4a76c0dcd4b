// Theory: the pool is a free queue in LRU order, reference counts, and an index from identity to the
// blocks that hold it. First the rules one by one on pools small enough to do by hand; then random
// streams of operations on which the pool and the plain per-block reference must agree in everything
// that can be seen: every id of every table, the whole queue, what is cached, what was evicted.
#include "sim/serving/block_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
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
  ReferencePool reference(stream.blocks);
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
  std::uint64_t hits = 0, refusals = 0;

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
}

INSTANTIATE_TEST_SUITE_P(Streams, AgainstReference,
                         testing::Values(Stream{1, 24, 4, 2, 4, 6, 150'000},     // tiny: all is shared
                                         Stream{2, 60, 5, 1, 6, 8, 120'000},     // one chain, duplicates
                                         Stream{3, 97, 7, 3, 6, 8, 40'000},      // odd sizes
                                         Stream{4, 400, 32, 2, 5, 8, 30'000},    // Mooncake's 512 / 16
                                         Stream{5, 500, 75, 2, 3, 6, 20'000},    // runs longer than a segment
                                         Stream{6, 64, 1, 2, 24, 8, 40'000},     // one block a run
                                         Stream{7, 300, 8, 6, 8, 24, 20'000}));  // many tables

}  // namespace
}  // namespace pdsim
