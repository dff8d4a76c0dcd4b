// Theory: pops come sorted by (time, phase, kind, entity, counter), whatever the order of pushes.
#include "sim/core/event_queue.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "sim/core/random.hpp"

namespace pdsim {
namespace {

using Key = std::tuple<Nanos, int, std::uint32_t, std::uint32_t, std::uint32_t>;

std::vector<Key> some_keys(std::size_t n) {
  Random random(7, Purpose::arrivals);
  std::vector<Key> keys;
  for (std::size_t i = 0; i < n; ++i) {
    keys.emplace_back(static_cast<Nanos>(random.below(20)), static_cast<int>(random.below(4)),
                      static_cast<std::uint32_t>(random.below(5)),
                      static_cast<std::uint32_t>(random.below(9)), static_cast<std::uint32_t>(i));
  }
  return keys;
}

std::vector<Key> drained(EventQueue& queue) {
  std::vector<Key> out;
  while (!queue.empty()) {
    const Event e = queue.pop();
    out.emplace_back(e.time, static_cast<int>(e.order >> 62), e.kind(), queue.entity(e),
                     static_cast<std::uint32_t>(e.arg));
  }
  return out;
}

void push_all(EventQueue& queue, const std::vector<Key>& keys) {
  for (const auto& [time, phase, kind, entity, counter] : keys) {
    queue.push(time, static_cast<Phase>(phase), kind, entity, counter, counter);
  }
}

TEST(EventQueue, PopsInTheStatedOrder) {
  const auto keys = some_keys(5000);
  EventQueue queue;
  push_all(queue, keys);
  auto expected = keys;
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(drained(queue), expected);
  EXPECT_EQ(queue.pops(), keys.size());
}

TEST(EventQueue, InsertionOrderDoesNotMatter) {
  auto keys = some_keys(2000);
  EventQueue forward, backward;
  push_all(forward, keys);
  std::reverse(keys.begin(), keys.end());
  push_all(backward, keys);
  EXPECT_EQ(drained(forward), drained(backward));
}

TEST(EventQueue, PermutationMovesEntitiesOnlyWithinTimePhaseAndKind) {
  const auto keys = some_keys(3000);
  EventQueue plain, permuted(12345);
  push_all(plain, keys);
  push_all(permuted, keys);
  auto a = drained(plain), b = drained(permuted);
  EXPECT_NE(a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(std::get<0>(a[i]), std::get<0>(b[i]));
    EXPECT_EQ(std::get<1>(a[i]), std::get<1>(b[i]));
    EXPECT_EQ(std::get<2>(a[i]), std::get<2>(b[i]));
  }
  std::sort(b.begin(), b.end());
  EXPECT_EQ(a, b);  // the same events, entities recovered exactly
}

TEST(EventQueue, RefusesThePast) {
  EventQueue queue;
  queue.push(10, Phase::arrival, 0, 0, 0, 0);
  queue.pop();
  EXPECT_THROW(queue.push(9, Phase::arrival, 0, 0, 0, 0), InternalError);
  EXPECT_NO_THROW(queue.push(10, Phase::arrival, 0, 0, 0, 0));
}

}  // namespace
}  // namespace pdsim
