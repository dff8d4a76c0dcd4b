// Theory: prompts that are f times as long are the same conversation told f times as broadly. What two of
// them had in common at their beginning, m whole blocks, is f m blocks long now, of which floor(f m) are
// whole; everything else stays different. So ids are equal exactly where prefixes are.
#include "traces/reshape.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"
#include "traces/generate.hpp"

namespace pdsim {
namespace {

constexpr std::int32_t kBlock = 512;

/// Prompts that branch off each other at random: each takes whole blocks of an earlier one, then its own.
Trace branching(std::uint64_t seed, std::int32_t requests = 40) {
  Random random(seed, Purpose::lengths);
  Trace trace;
  trace.name = "branching";
  trace.hash_block_tokens = kBlock;
  std::uint64_t next = 0;
  for (std::int32_t i = 0; i < requests; ++i) {
    Request r;
    r.arrival = i;
    r.prompt_tokens = 1 + static_cast<std::int32_t>(random.below(8 * kBlock));
    if (random.below(4) == 0) r.prompt_tokens = kBlock * (1 + static_cast<std::int32_t>(random.below(8)));
    r.output_tokens = 7;
    r.hash_begin = trace.hash_ids.size();
    r.hash_count = (r.prompt_tokens - 1) / kBlock + 1;
    std::int32_t taken = 0;
    if (i > 0) {
      const Request& other = trace.requests[random.below(static_cast<std::uint64_t>(i))];
      taken = static_cast<std::int32_t>(random.below(
          static_cast<std::uint64_t>(std::min(other.prompt_tokens, r.prompt_tokens) / kBlock + 1)));
      for (std::int32_t b = 0; b < taken; ++b) {
        trace.hash_ids.push_back(trace.hash_ids[other.hash_begin + static_cast<std::uint64_t>(b)]);
      }
    }
    for (std::int32_t b = taken; b < r.hash_count; ++b) trace.hash_ids.push_back(next++);
    trace.requests.push_back(r);
  }
  return trace;
}

std::int32_t common(const Trace& trace, std::size_t a, std::size_t b) {
  const auto x = trace.ids_of(trace.requests[a]), y = trace.ids_of(trace.requests[b]);
  return static_cast<std::int32_t>(std::ranges::mismatch(x, y).in1 - x.begin());
}

TEST(ScalePrompts, OneChangesNothing) {
  const Trace before = branching(1);
  Trace after = before;
  scale_prompts(after, 1);
  EXPECT_EQ(after.hash_ids, before.hash_ids);
  for (std::size_t i = 0; i < before.requests.size(); ++i) {
    EXPECT_EQ(after.requests[i].prompt_tokens, before.requests[i].prompt_tokens);
  }
}

TEST(ScalePrompts, TokensAreRoundedAndAnswersStay) {
  for (const double factor : {0.001, 0.3, 0.5, 1.5, 2.0, 7.25}) {
    const Trace before = branching(2);
    Trace after = before;
    scale_prompts(after, factor);
    for (std::size_t i = 0; i < before.requests.size(); ++i) {
      const Request &a = before.requests[i], &b = after.requests[i];
      EXPECT_NEAR(b.prompt_tokens, std::max(1.0, a.prompt_tokens * factor), 0.5);
      EXPECT_EQ(b.output_tokens, a.output_tokens);
      EXPECT_EQ(b.arrival, a.arrival);
      EXPECT_EQ(b.hash_count, (b.prompt_tokens - 1) / kBlock + 1);
    }
  }
}

// The whole of it, pair by pair.
TEST(ScalePrompts, WhatWasSharedIsSharedInProportion) {
  std::int64_t shared = 0;
  for (const double factor : {0.1, 0.5, 0.75, 0.9, 1.1, 1.5, 2.0, 3.0, 10.0 / 3}) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      const Trace before = branching(seed);
      Trace after = before;
      scale_prompts(after, factor);
      for (std::size_t a = 0; a < before.requests.size(); ++a) {
        for (std::size_t b = 0; b < a; ++b) {
          const bool equal =
              std::ranges::equal(before.ids_of(before.requests[a]), before.ids_of(before.requests[b]));
          const std::int32_t now = common(after, a, b);
          if (equal) {
            ASSERT_EQ(now, after.requests[a].hash_count);
            continue;
          }
          ASSERT_EQ(now, static_cast<std::int32_t>(std::floor(common(before, a, b) * factor)))
              << "factor " << factor << " seed " << seed << ": " << a << " and " << b;
          shared += now;
        }
      }
    }
  }
  EXPECT_GT(shared, 10'000);
}

// An id is one prefix: at one place only, and always after the same ids.
TEST(ScalePrompts, AnIdIsOnePrefix) {
  for (const double factor : {0.3, 0.5, 1.5, 2.7}) {
    Trace trace = branching(5, 100);
    scale_prompts(trace, factor);
    std::map<std::uint64_t, std::vector<std::uint64_t>> before;
    for (const Request& r : trace.requests) {
      const auto ids = trace.ids_of(r);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::vector<std::uint64_t> prefix(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i));
        ASSERT_EQ(before.try_emplace(ids[i], prefix).first->second, prefix);
      }
    }
  }
}

// Conversations go on as they did: a turn still begins with all whole blocks of the one before it.
TEST(ScalePrompts, ConversationsGoOn) {
  GenerateConfig config;
  config.requests = 200;
  config.multi_turn_share = 1;
  const Trace before = generate_trace(config);
  Trace after = before;
  scale_prompts(after, 2);
  std::map<std::int32_t, std::size_t> last;
  int turns = 0;
  for (std::size_t i = 0; i < after.requests.size(); ++i) {
    const auto found = last.find(after.requests[i].session);
    if (found != last.end()) {
      ++turns;
      EXPECT_GE(common(after, found->second, i), 2 * (before.requests[found->second].prompt_tokens / kBlock));
    }
    last[after.requests[i].session] = i;
  }
  EXPECT_GT(turns, 50);
}

// Ids of whole blocks only (as some formats have them): what has none gets none.
TEST(ScalePrompts, ATailWithoutAnIdStaysWithout) {
  Trace trace = branching(3, 1);
  trace.requests = {trace.requests[0], trace.requests[0]};
  trace.hash_ids = {1, 1};
  for (std::size_t i = 0; i < 2; ++i) {
    trace.requests[i].hash_begin = i;
    trace.requests[i].hash_count = 1;
    trace.requests[i].prompt_tokens = 700;
  }
  scale_prompts(trace, 2);
  for (const Request& r : trace.requests) {
    EXPECT_EQ(r.prompt_tokens, 1400);
    EXPECT_EQ(r.hash_count, 2);
  }
  EXPECT_EQ(common(trace, 0, 1), 2);
}

TEST(ScalePrompts, WithoutIdsAndTooLong) {
  Trace trace;
  trace.name = "lengths";
  Request r;
  r.prompt_tokens = 1000;
  trace.requests = {r};
  scale_prompts(trace, 2.5);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 2500);
  EXPECT_TRUE(trace.hash_ids.empty());
  try {
    scale_prompts(trace, 1e6);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "lengths: prompt scale 1000000: a prompt of 2500 tokens would pass 2^31 - 1");
  }
}

}  // namespace
}  // namespace pdsim
