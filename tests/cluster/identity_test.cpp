// Equal hashes exactly where content is equal from the beginning on, and as many blocks as are full.
#include "sim/cluster/identity.hpp"

#include <gtest/gtest.h>

#include <set>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

Trace two_prompts(std::int32_t prompt_a, std::vector<std::uint64_t> a, std::int32_t prompt_b,
                  std::vector<std::uint64_t> b) {
  Trace trace = made_trace({request_at(0, prompt_a, 100), request_at(0, prompt_b, 100)}, 512);
  trace.requests[0].hash_count = static_cast<std::int32_t>(a.size());
  trace.requests[1].hash_begin = a.size();
  trace.requests[1].hash_count = static_cast<std::int32_t>(b.size());
  trace.hash_ids = std::move(a);
  trace.hash_ids.insert(trace.hash_ids.end(), b.begin(), b.end());
  return trace;
}

std::vector<HashRun> prompt(const Trace& trace, std::uint32_t request, std::int32_t block) {
  std::vector<HashRun> out = {{99, 99}};  // is cleared
  prompt_identity(trace, request, block, out);
  return out;
}

std::vector<HashRun> sequence(const Trace& trace, std::uint32_t request, std::int32_t block,
                              std::int32_t tokens) {
  std::vector<HashRun> out;
  sequence_identity(trace, request, block, tokens, out);
  return out;
}

std::int32_t blocks(const std::vector<HashRun>& identity) {
  std::int32_t sum = 0;
  for (const HashRun& run : identity) sum += run.blocks;
  return sum;
}

// 1200 tokens are two hash blocks of 512 and 176 tokens: 32 + 32 + 11 blocks of 16, 2 blocks of 512.
TEST(Identity, OnlyFullBlocksCount) {
  const Trace trace = two_prompts(1200, {1, 2, 3}, 1, {4});
  for (const std::int32_t block : {1, 16, 64, 256, 512}) {
    EXPECT_EQ(blocks(prompt(trace, 0, block)), 1024 / block + 176 / block) << block;
    EXPECT_EQ(blocks(prompt(trace, 1, block)), 1 / block) << block;
  }
  EXPECT_EQ(prompt(trace, 0, 16).size(), 3u);
  EXPECT_EQ(prompt(trace, 0, 512).size(), 2u);
}

// Hashes are chained: the same id after another beginning is other content.
TEST(Identity, EqualUpToTheFirstDifference) {
  const Trace trace = two_prompts(2048, {1, 2, 3, 4}, 2048, {1, 2, 9, 4});
  const auto a = prompt(trace, 0, 16), b = prompt(trace, 1, 16);
  EXPECT_EQ(a[0].hash, b[0].hash);
  EXPECT_EQ(a[1].hash, b[1].hash);
  EXPECT_NE(a[2].hash, b[2].hash);
  EXPECT_NE(a[3].hash, b[3].hash);
  const Trace repeated = two_prompts(1024, {7, 7}, 512, {7});
  EXPECT_NE(prompt(repeated, 0, 16)[0].hash, prompt(repeated, 0, 16)[1].hash);
  EXPECT_EQ(prompt(repeated, 0, 16)[0].hash, prompt(repeated, 1, 16)[0].hash);
}

// What is generated is the request's own, from the first block that a named one does not fill.
TEST(Identity, WhatIsGeneratedIsItsOwn) {
  const Trace trace = two_prompts(1200, {1, 2, 3}, 1200, {1, 2, 3});
  const auto a = sequence(trace, 0, 16, 3000), b = sequence(trace, 1, 16, 3000);
  EXPECT_EQ(blocks(a), 3000 / 16);
  std::set<std::uint64_t> hashes;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (i < 3) {
      EXPECT_EQ(a[i].hash, b[i].hash);
    } else {
      EXPECT_TRUE(hashes.insert(a[i].hash).second && hashes.insert(b[i].hash).second) << i;
    }
  }
  // A longer sequence has the same beginning: a prefill leg's and a decode leg's agree on the prompt.
  const auto leg = sequence(trace, 0, 16, 1201);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(leg[i].hash, a[i].hash);
}

TEST(Identity, ATraceWithoutIdsSharesNothing) {
  const Trace trace = made_trace({request_at(0, 1000, 10), request_at(0, 1000, 10)});
  EXPECT_TRUE(prompt(trace, 0, 16).empty());
  const auto a = sequence(trace, 0, 16, 1010), b = sequence(trace, 1, 16, 1010);
  EXPECT_EQ(blocks(a), 63);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NE(a[i].hash, b[i].hash);
}

}  // namespace
}  // namespace pdsim
