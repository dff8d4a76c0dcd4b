// Theory: bucket b of a series holds the sum, over all that was added, of value x the time which
// [from, until) shares with [b w, (b + 1) w), where w is the least power of two, 2^20 ns or more, such that
// the latest time is within w x max_buckets. That depends on the set of additions alone: not on their order,
// and not on how one was cut.
#include "sim/core/timeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "sim/core/random.hpp"

namespace pdsim {
namespace {

constexpr Nanos kFirstWidth = Nanos{1} << 20;

struct Addition {
  std::size_t series;
  Nanos from, until;
  std::int64_t value;
};

/// Width, then every integral, bucket by bucket.
using Contents = std::pair<Nanos, std::vector<std::vector<__int128>>>;

Contents contents(const Timeline& timeline) {
  Contents all{timeline.width(), {}};
  for (std::size_t b = 0; b < timeline.buckets(); ++b) {
    all.second.emplace_back();
    for (std::size_t s = 0; s < timeline.series(); ++s) all.second[b].push_back(timeline.integral(s, b));
  }
  return all;
}

Timeline timeline_of(const std::vector<Addition>& additions, std::size_t series, std::size_t max_buckets) {
  Timeline timeline(series, max_buckets);
  for (const Addition& a : additions) timeline.add(a.series, a.from, a.until, a.value);
  return timeline;
}

Contents expected(const std::vector<Addition>& additions, std::size_t series, std::size_t max_buckets) {
  Nanos latest = 0;
  for (const Addition& a : additions) latest = std::max(latest, a.until);
  Nanos width = kFirstWidth;
  while (static_cast<__int128>(width) * static_cast<__int128>(max_buckets) < latest) width *= 2;
  Contents all{width, {}};
  for (Nanos begin = 0; begin < latest; begin += width) {
    all.second.emplace_back(series, 0);
    for (const Addition& a : additions) {
      const Nanos overlap = std::min(a.until, begin + width) - std::max(a.from, begin);
      if (overlap > 0) all.second.back()[a.series] += static_cast<__int128>(a.value) * overlap;
    }
  }
  return all;
}

std::vector<Addition> some_additions(std::uint64_t seed, Nanos longest, std::size_t series) {
  Random random(seed, Purpose::lengths);
  std::vector<Addition> additions;
  Nanos reach = 2000;  // so that small times come before large ones, as in a run, but not strictly
  for (int i = 0; i < 300; ++i) {
    reach = std::min(longest, reach + reach / 16);
    const auto bound = static_cast<std::uint64_t>(reach);
    const auto from = static_cast<Nanos>(random.below(bound));
    const auto length = static_cast<Nanos>(random.below(random.below(2) == 0 ? bound : bound / 100)) + 1;
    const auto value = static_cast<std::int64_t>(random.below(100'000)) - 1000;
    additions.push_back({random.below(series), from, from + length, value == 0 ? 1 : value});
  }
  return additions;
}

template <class T>
void shuffle(std::vector<T>& values, Random& random) {
  for (std::size_t n = values.size(); n > 1; --n) std::swap(values[n - 1], values[random.below(n)]);
}

TEST(Timeline, OneIntervalByHand) {
  Timeline timeline(2);
  EXPECT_EQ(timeline.buckets(), 0u);
  EXPECT_EQ(timeline.width(), kFirstWidth);
  // 5 from the middle of bucket 0 to the first quarter of bucket 2.
  timeline.add(1, kFirstWidth / 2, 2 * kFirstWidth + kFirstWidth / 4, 5);
  EXPECT_EQ(timeline.buckets(), 3u);
  EXPECT_DOUBLE_EQ(timeline.mean(1, 0), 2.5);
  EXPECT_DOUBLE_EQ(timeline.mean(1, 1), 5);
  EXPECT_DOUBLE_EQ(timeline.mean(1, 2), 1.25);
  EXPECT_EQ(timeline.total(1), 5 * (kFirstWidth + 3 * kFirstWidth / 4));
  EXPECT_EQ(timeline.total(0), 0);
}

TEST(Timeline, DoublesWhenTimePassesTheLastBucketAndNotBefore) {
  Timeline timeline(1, 4);
  for (Nanos b = 0; b < 4; ++b) timeline.add(0, b * kFirstWidth, (b + 1) * kFirstWidth, 1 + b);
  EXPECT_EQ(timeline.width(), kFirstWidth) << "the end of the last bucket is in it";
  timeline.add(0, 4 * kFirstWidth, 4 * kFirstWidth + 1, 9);
  EXPECT_EQ(timeline.width(), 2 * kFirstWidth);
  EXPECT_EQ(timeline.buckets(), 3u);
  EXPECT_EQ(timeline.integral(0, 0), 3 * kFirstWidth);
  EXPECT_EQ(timeline.integral(0, 1), 7 * kFirstWidth);
  EXPECT_EQ(timeline.integral(0, 2), 9);
}

TEST(Timeline, NothingAddedIsNothing) {
  Timeline timeline(1, 4);
  timeline.add(0, 100 * kFirstWidth, 100 * kFirstWidth, 7);
  timeline.add(0, 0, 100 * kFirstWidth, 0);
  EXPECT_EQ(timeline.buckets(), 0u);
  EXPECT_EQ(timeline.width(), kFirstWidth);
  EXPECT_EQ(timeline.total(0), 0);
}

TEST(Timeline, IsTheSumOfOverlaps) {
  for (const std::size_t max_buckets : {1u, 7u, 64u, 256u}) {
    for (const Nanos longest : {Nanos{10'000'000}, 3 * kSecond, 7200 * kSecond}) {
      const auto additions = some_additions(max_buckets, longest, 3);
      const Timeline timeline = timeline_of(additions, 3, max_buckets);
      EXPECT_TRUE(contents(timeline) == expected(additions, 3, max_buckets)) << longest;
      EXPECT_LE(timeline.buckets(), max_buckets);
    }
  }
}

TEST(Timeline, OrderAndCutsDoNotMatter) {
  Random random(3, Purpose::lengths);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    auto additions = some_additions(seed, 600 * kSecond, 4);
    const Contents whole = contents(timeline_of(additions, 4, 32));
    std::ranges::reverse(additions);
    EXPECT_TRUE(contents(timeline_of(additions, 4, 32)) == whole) << "reversed";

    // Each cut into up to nine, some of them empty, and all in any order.
    std::vector<Addition> cut;
    for (const Addition& a : additions) {
      std::vector<Nanos> at{a.from, a.until};
      for (std::uint64_t n = random.below(9); n > 0; --n) {
        at.push_back(a.from + static_cast<Nanos>(random.below(static_cast<std::uint64_t>(a.until - a.from))));
      }
      std::ranges::sort(at);
      for (std::size_t i = 1; i < at.size(); ++i) cut.push_back({a.series, at[i - 1], at[i], a.value});
    }
    shuffle(cut, random);
    EXPECT_GT(cut.size(), additions.size());
    EXPECT_TRUE(contents(timeline_of(cut, 4, 32)) == whole) << "cut and shuffled";
  }
}

TEST(Timeline, MergingIsAddingAll) {
  for (const auto& [span_a, span_b] :
       {std::pair{2 * kSecond, 900 * kSecond}, {900 * kSecond, 2 * kSecond}, {Nanos{1000}, Nanos{1000}}}) {
    auto a = some_additions(1, span_a, 2);
    const auto b = some_additions(2, span_b, 2);
    Timeline merged = timeline_of(a, 2, 33);
    merged.merge(timeline_of(b, 2, 33));
    merged.merge(Timeline(2, 33));
    a.insert(a.end(), b.begin(), b.end());
    EXPECT_TRUE(contents(merged) == contents(timeline_of(a, 2, 33)));
  }
}

TEST(Timeline, IsExactAtTheEndsOfItsRange) {
  constexpr Nanos kEnd = Nanos{1} << 62;
  for (const std::size_t max_buckets : {1u, 3u, 256u}) {
    Timeline timeline(1, max_buckets);
    timeline.add(0, 0, kEnd, INT64_MAX);
    timeline.add(0, 0, kEnd, -(INT64_MAX / 2));
    timeline.add(0, 1, 2, -1);
    EXPECT_TRUE(timeline.total(0) == static_cast<__int128>(INT64_MAX - INT64_MAX / 2) * kEnd - 1);
    EXPECT_LE(timeline.buckets(), max_buckets);
  }
}

TEST(Timeline, MisuseIsABug) {
  EXPECT_THROW(Timeline(1, 0), InternalError);
  Timeline timeline(2, 4);
  timeline.add(0, 0, kSecond, 1);
  EXPECT_THROW(timeline.add(2, 0, 1, 1), InternalError);
  EXPECT_THROW(timeline.add(0, 2, 1, 1), InternalError);
  EXPECT_THROW(timeline.add(0, -1, 1, 1), InternalError);
  EXPECT_THROW(timeline.add(0, -5, -1, 1), InternalError);
  EXPECT_THROW(timeline.add(0, 0, kNever, 1), InternalError);
  EXPECT_THROW(timeline.integral(0, 4), InternalError);
  EXPECT_THROW(timeline.total(2), InternalError);
  EXPECT_THROW(timeline.merge(Timeline(2, 8)), InternalError);
  EXPECT_TRUE(timeline.total(0) == kSecond) << "and leaves no trace";
}

}  // namespace
}  // namespace pdsim
