// Theory: a token is kept as the first configured range that covers it says, but never longer, nor at a
// higher priority, than any token before it: what lies behind a gap is useless. So along a sequence
// priority and expiry are running minima, and the ranges are where one of them changes.
//
// Pieces of one size, each wanted once more at a known time or never, are intervals, of which no more may
// overlap than there is room for. Letting go of the interval that ends last whenever there are too many
// keeps as many as any choice does (Belady's rule, here with the newest among those that may go).
#include "sim/transfer/retention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "sim/core/random.hpp"

namespace pdsim {
namespace {

constexpr Nanos kTtl = 480 * kSecond, kNow = 1000 * kSecond;

RetentionConfig by_priority(std::vector<RetentionRange> ranges) {
  return {.policy = Retention::priority, .budget_gib = 0, .ranges = std::move(ranges)};
}

struct Kept {
  std::int32_t priority;
  Nanos expiry;
  bool operator==(const Kept&) const = default;
};

/// Token by token, from the configuration alone.
std::vector<Kept> token_by_token(const RetentionConfig& config, Nanos ttl, std::int32_t tokens, Nanos now) {
  std::vector<Kept> out;
  for (std::int32_t t = 0; t < tokens; ++t) {
    Kept kept{35, now + ttl};
    for (const RetentionRange& r : config.ranges) {
      if (t < r.from_token || (r.to_token != 0 && t >= r.to_token)) continue;
      kept = {r.priority, now + (r.duration != 0 ? r.duration : ttl)};
      break;
    }
    if (t > 0) {
      kept = {std::min(kept.priority, out.back().priority), std::min(kept.expiry, out.back().expiry)};
    }
    out.push_back(kept);
  }
  return out;
}

std::vector<Kept> spread(const std::vector<RetainedRange>& ranges) {
  std::vector<Kept> out;
  for (const RetainedRange& r : ranges) {
    EXPECT_GT(r.until, static_cast<std::int32_t>(out.size())) << "an empty range";
    out.resize(static_cast<std::size_t>(std::max(0, r.until)), {r.priority, r.expiry});
  }
  return out;
}

// vLLM's TTL and LRU know one sequence, one time; whatever ranges are configured.
TEST(RetainedRanges, OneForTtlAndLru) {
  for (const Retention policy : {Retention::ttl, Retention::lru}) {
    RetentionConfig config = by_priority({{0, 10, 90, kSecond}});
    config.policy = policy;
    const auto ranges = retained_ranges(config, kTtl, 77, kNow);
    ASSERT_EQ(ranges.size(), 1u);
    EXPECT_EQ(ranges[0].until, 77);
    EXPECT_EQ(ranges[0].priority, 35);  // TensorRT-LLM's default
    EXPECT_EQ(ranges[0].expiry, kNow + kTtl);
  }
}

// Who knows what will be asked for needs no time limit.
TEST(RetainedRanges, WithoutEndForBelady) {
  RetentionConfig config = by_priority({{0, 10, 90, kSecond}});
  config.policy = Retention::belady;
  const auto ranges = retained_ranges(config, kTtl, 77, kNow);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].until, 77);
  EXPECT_EQ(ranges[0].expiry, kNever);
}

// Without ranges all tokens have the default priority and the TTL.
TEST(RetainedRanges, ByPriorityWithoutRangesIsTheTtl) {
  const auto ranges = retained_ranges(by_priority({}), kTtl, 77, kNow);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(spread(ranges), std::vector<Kept>(77, {35, kNow + kTtl}));
}

// A system prompt of 100 tokens kept for an hour, the rest as usual: cut where the range ends, if it does.
TEST(RetainedRanges, CutWhereTheRangeEnds) {
  const RetentionConfig config = by_priority({{0, 100, 90, 3600 * kSecond}});
  const auto ranges = retained_ranges(config, kTtl, 250, kNow);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[0].until, 100);
  EXPECT_EQ(ranges[0].priority, 90);
  EXPECT_EQ(ranges[0].expiry, kNow + 3600 * kSecond);
  EXPECT_EQ(ranges[1].until, 250);
  EXPECT_EQ(ranges[1].priority, 35);
  EXPECT_EQ(ranges[1].expiry, kNow + kTtl);
  for (const std::int32_t tokens : {1, 99, 100}) {
    const auto whole = retained_ranges(config, kTtl, tokens, kNow);
    ASSERT_EQ(whole.size(), 1u);
    EXPECT_EQ(whole[0].until, tokens);
    EXPECT_EQ(whole[0].priority, 90);
  }
  EXPECT_EQ(retained_ranges(config, kTtl, 101, kNow).size(), 2u);
}

// What follows a range of low priority, or one that is soon over, can have no more, whatever was configured;
// it can have less.
TEST(RetainedRanges, NothingOutlivesWhatComesBeforeIt) {
  const auto ranges = retained_ranges(
      by_priority({{0, 10, 20, 0}, {10, 20, 80, 5 * kSecond}, {20, 30, 10, kTtl}, {30, 0, 90, 0}}), kTtl, 40,
      kNow);
  ASSERT_EQ(ranges.size(), 3u);
  EXPECT_EQ(spread(ranges)[5], (Kept{20, kNow + kTtl}));
  EXPECT_EQ(spread(ranges)[15], (Kept{20, kNow + 5 * kSecond}));
  EXPECT_EQ(spread(ranges)[25], (Kept{10, kNow + 5 * kSecond}));
  EXPECT_EQ(spread(ranges)[39], (Kept{10, kNow + 5 * kSecond}));
  EXPECT_EQ(ranges.back().until, 40);
}

// Of ranges that overlap the first listed counts, whether it begins before the other or after.
TEST(RetainedRanges, TheFirstThatCoversATokenWins) {
  const auto inner_first = retained_ranges(by_priority({{10, 20, 50, 0}, {0, 0, 60, 0}}), kTtl, 30, kNow);
  EXPECT_EQ(spread(inner_first)[9].priority, 60);
  EXPECT_EQ(spread(inner_first)[10].priority, 50);
  EXPECT_EQ(spread(inner_first)[20].priority, 50);  // 60 again, but behind 50
  EXPECT_EQ(inner_first.size(), 2u);
  const auto outer_first = retained_ranges(by_priority({{0, 0, 60, 0}, {10, 20, 50, 0}}), kTtl, 30, kNow);
  EXPECT_EQ(outer_first.size(), 1u);
  EXPECT_EQ(spread(outer_first), std::vector<Kept>(30, {60, kNow + kTtl}));
}

// Random configurations against the definition, token by token. Ranges are in order, not empty, end with the
// sequence, and no two neighbours are alike.
TEST(RetainedRanges, AgreeWithTheDefinition) {
  std::size_t cut = 0;
  for (std::uint64_t seed = 1; seed <= 5000; ++seed) {
    Random random(seed, Purpose::lengths);
    const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random.below(n)); };
    std::vector<RetentionRange> configured(random.below(6));
    for (RetentionRange& r : configured) {
      r.from_token = below(3) == 0 ? 0 : below(40);
      r.to_token = below(3) == 0 ? 0 : below(45);  // at times before its beginning: then it covers nothing
      r.priority = below(4) * 30;
      r.duration = below(3) * 240 * kSecond;
    }
    const std::int32_t tokens = 1 + below(50);
    const RetentionConfig config = by_priority(configured);
    const auto ranges = retained_ranges(config, kTtl, tokens, kNow);
    ASSERT_EQ(spread(ranges), token_by_token(config, kTtl, tokens, kNow)) << seed;
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      ASSERT_FALSE(ranges[i].priority == ranges[i - 1].priority && ranges[i].expiry == ranges[i - 1].expiry);
      ASSERT_LE(ranges[i].priority, ranges[i - 1].priority);
      ASSERT_LE(ranges[i].expiry, ranges[i - 1].expiry);
    }
    cut += ranges.size() - 1;
  }
  EXPECT_GT(cut, 1500u);
}

// ------------------------------------------------------------------------------------- first to go

std::uint32_t goes_first(Retention policy, const std::vector<RetainedTail>& tails) {
  return tails[first_to_go(policy, tails)].id;
}

TEST(FirstToGo, TheOldestOfAll) {
  EXPECT_EQ(goes_first(Retention::lru, {{1, 10, 300}, {2, 90, 100}, {3, 50, 200}}), 2u);
  EXPECT_EQ(goes_first(Retention::lru, {{7, 0, 0}}), 7u);
}

TEST(FirstToGo, TheOldestOfTheLeastPriority) {
  EXPECT_EQ(goes_first(Retention::priority, {{1, 90, 100}, {2, 10, 300}, {3, 10, 200}, {4, 50, 50}}), 3u);
}

TEST(FirstToGo, WhatIsAskedForLast) {
  EXPECT_EQ(goes_first(Retention::belady, {{1, 0, 100, 500}, {2, 0, 300, 900}, {3, 0, 200, 700}}), 2u);
  EXPECT_EQ(goes_first(Retention::belady, {{1, 0, 100, 500}, {2, 0, 300, kNever}, {3, 0, 200, 700}}), 2u);
  EXPECT_EQ(goes_first(Retention::belady, {{1, 9, 100, 500}, {2, 0, 300, -1}, {3, 0, 200, 0}}), 1u);
  EXPECT_EQ(goes_first(Retention::belady, {{1, 0, 200, 500}, {2, 0, 100, 500}}), 2u) << "then the oldest";
  EXPECT_EQ(goes_first(Retention::belady, {{4, 0, 200, 500}, {3, 0, 200, 500}}), 3u) << "then the lower id";
}

struct Piece {
  Nanos ends;   ///< retained from here on
  Nanos asked;  ///< kNever = not
};

/// How many pieces are there when they are asked for, with room for `room` of them.
std::int32_t served(Retention policy, const std::vector<Piece>& pieces, std::size_t room) {
  std::vector<RetainedTail> tails;
  std::int32_t hits = 0;
  for (Nanos now = 0; now <= 100; ++now) {
    for (std::uint32_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].asked == now) {
        hits += static_cast<std::int32_t>(std::erase_if(tails, [&](const auto& t) { return t.id == i; }));
      }
      if (pieces[i].ends == now) tails.push_back({i, static_cast<std::int32_t>(i) % 3, now, pieces[i].asked});
    }
    while (tails.size() > room) {
      tails.erase(tails.begin() + static_cast<std::ptrdiff_t>(first_to_go(policy, tails)));
    }
  }
  return hits;
}

/// The most that any choice of what to keep can serve.
std::int32_t most_served(const std::vector<Piece>& pieces, std::size_t room) {
  std::int32_t most = 0;
  for (std::uint32_t chosen = 0; chosen < 1u << pieces.size(); ++chosen) {
    bool fits = true;
    std::int32_t hits = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if ((chosen >> i & 1) == 0) continue;
      hits += pieces[i].asked != kNever ? 1 : 0;
      std::size_t beside = 0;  // when i comes
      for (std::size_t j = 0; j < pieces.size(); ++j) {
        beside +=
            (chosen >> j & 1) != 0 && pieces[j].ends <= pieces[i].ends && pieces[j].asked > pieces[i].ends
                ? 1
                : 0;
      }
      fits = fits && beside <= room;
    }
    if (fits) most = std::max(most, hits);
  }
  return most;
}

// Every choice of what to keep, for a thousand small instances: none serves more than Belady's rule, and the
// others often serve fewer.
TEST(FirstToGo, NoChoiceServesMoreThanBeladys) {
  int lru_less = 0, priority_less = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    Random random(seed, Purpose::lengths);
    std::vector<Nanos> times(100);
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = static_cast<Nanos>(i);
    for (std::size_t i = times.size() - 1; i > 0; --i) std::swap(times[i], times[random.below(i + 1)]);
    std::vector<Piece> pieces(2 + random.below(8));
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto [ends, asked] = std::minmax(times[2 * i], times[2 * i + 1]);
      pieces[i] = {ends, random.below(5) == 0 ? kNever : asked};
    }
    const std::size_t room = 1 + random.below(3);
    const std::int32_t most = most_served(pieces, room);
    ASSERT_EQ(served(Retention::belady, pieces, room), most) << seed;
    ASSERT_LE(served(Retention::lru, pieces, room), most) << seed;
    ASSERT_LE(served(Retention::priority, pieces, room), most) << seed;
    lru_less += served(Retention::lru, pieces, room) < most ? 1 : 0;
    priority_less += served(Retention::priority, pieces, room) < most ? 1 : 0;
  }
  EXPECT_GT(lru_less, 300);
  EXPECT_GT(priority_less, 300);
}

// At one instant the lower id goes, so the choice never depends on how the list is ordered: every order of
// every small list, against a sort.
TEST(FirstToGo, DoesNotDependOnTheOrderOfTheList) {
  std::vector<RetainedTail> all;
  for (const std::int32_t priority : {0, 1}) {
    for (const Nanos since : {0, 1}) {
      for (std::uint32_t n = 0; n < 2; ++n) {
        all.push_back({static_cast<std::uint32_t>(all.size() * 5 % 8), priority, since});
      }
    }
  }
  for (std::uint32_t chosen = 1; chosen < 1u << all.size(); ++chosen) {
    std::vector<RetainedTail> tails;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((chosen >> i & 1) != 0) tails.push_back(all[i]);
    }
    if (tails.size() > 4) continue;
    const auto by_id = [](const RetainedTail& a, const RetainedTail& b) { return a.id < b.id; };
    const auto age = [](const RetainedTail& t) { return std::pair{t.since, t.id}; };
    const auto rank = [](const RetainedTail& t) { return std::pair{t.priority, std::pair{t.since, t.id}}; };
    const std::uint32_t oldest = std::ranges::min(tails, {}, age).id,
                        least = std::ranges::min(tails, {}, rank).id;
    std::sort(tails.begin(), tails.end(), by_id);
    do {
      ASSERT_EQ(goes_first(Retention::lru, tails), oldest);
      ASSERT_EQ(goes_first(Retention::priority, tails), least);
    } while (std::next_permutation(tails.begin(), tails.end(), by_id));
  }
}

}  // namespace
}  // namespace pdsim
