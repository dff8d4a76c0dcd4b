// The router's view of the caches: against a map of maps under random events, and against the pool whose
// events it is fed.
#include "sim/routing/cache_view.hpp"

#include <gtest/gtest.h>

#include <map>

#include "sim/core/random.hpp"

namespace pdsim {
namespace {

// A worker's match is the sum over leading runs of what it holds of each, up to the first that it does
// not hold whole.
std::int32_t brute_match(const std::map<std::uint64_t, std::int32_t>& held, std::span<const HashRun> identity,
                         std::int32_t max_blocks) {
  std::int32_t blocks = 0;
  for (const HashRun& run : identity) {
    const auto found = held.find(run.hash);
    const std::int32_t have = found == held.end() ? 0 : std::min(found->second, run.blocks);
    blocks += have;
    if (have < run.blocks) break;
  }
  return std::min(blocks, max_blocks);
}

TEST(CacheView, EqualsAMapOfMaps) {
  constexpr std::uint32_t kWorkers = 5;
  CacheView view(kWorkers);
  std::vector<std::map<std::uint64_t, std::int32_t>> truth(kWorkers);
  Random random(3, Purpose::prefixes);
  std::vector<std::int32_t> matched;
  int hits = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto worker = static_cast<std::uint32_t>(random.below(kWorkers));
    const CacheEvent event{1 + random.below(40), static_cast<std::int32_t>(random.below(9)), true};
    view.apply(worker, event);
    truth[worker][event.hash] = event.blocks;
    if (i % 4 != 0) continue;
    std::vector<HashRun> identity;
    for (std::uint64_t r = random.below(6); r > 0; --r) {
      identity.push_back({1 + random.below(40), 1 + static_cast<std::int32_t>(random.below(4))});
    }
    const auto max_blocks = static_cast<std::int32_t>(random.below(16));
    view.match(identity, max_blocks, matched);
    ASSERT_EQ(matched.size(), kWorkers);
    for (std::uint32_t w = 0; w < kWorkers; ++w) {
      ASSERT_EQ(matched[w], brute_match(truth[w], identity, max_blocks)) << "event " << i << " worker " << w;
      hits += matched[w] > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(hits, 3000);
}

// Once every event has been applied the view is the truth: what it predicts is what the pool would find.
TEST(CacheView, FollowsAPool) {
  constexpr std::int32_t kBlocks = 60;
  BlockPool pool(kBlocks, true);
  pool.enable_events(true);
  CacheView view(3);
  Random random(4, Purpose::prefixes);
  // Prompts of one to four runs along a tree of common beginnings.
  std::vector<std::vector<HashRun>> prompts;
  for (std::uint64_t i = 0; i < 40; ++i) {
    std::vector<HashRun> identity;
    std::uint64_t node = 1;
    for (std::uint64_t r = 1 + random.below(4); r > 0; --r) {
      node = node * 3 + random.below(3);
      identity.push_back({node, 4});
    }
    prompts.push_back(std::move(identity));
  }
  std::vector<TableId> open;
  std::vector<std::int32_t> matched;
  std::uint64_t found = 0;
  for (int i = 0; i < 5000; ++i) {
    if (!open.empty() && (open.size() > 4 || random.below(3) == 0)) {
      const std::size_t j = random.below(open.size());
      pool.release(open[j]);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(j));
    } else {
      const auto& prompt = prompts[random.below(prompts.size())];
      const auto blocks = static_cast<std::int32_t>(prompt.size()) * 4;
      const std::int32_t hits = pool.cached_prefix(prompt, blocks);
      const TableId table = pool.open(prompt);
      if (pool.allocate(table, hits, blocks - hits)) {
        pool.publish(table, static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(blocks) + 1)));
        open.push_back(table);
      } else {
        pool.release(table);
      }
    }
    for (const CacheEvent& event : pool.events()) view.apply(1, event);
    pool.events().clear();
    const auto& prompt = prompts[random.below(prompts.size())];
    view.match(prompt, 100, matched);
    ASSERT_EQ(matched[1], pool.cached_prefix(prompt, 100)) << i;
    ASSERT_EQ(matched[0] + matched[2], 0);
    found += static_cast<std::uint64_t>(matched[1]);
  }
  EXPECT_GT(found, 10'000u);
  EXPECT_GT(pool.evicted_blocks(), 1000u);
}

}  // namespace
}  // namespace pdsim
