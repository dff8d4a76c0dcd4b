// Theory: reuse figures are those of caches simulated block by block; the JSON is what its schema says.
#include "traces/stats.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <list>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/traces/schema.hpp"
#include "traces/generate.hpp"
#include "traces/reader.hpp"

namespace pdsim {
namespace {

// Prompt tokens that an LRU cache of so many blocks holds when a request comes, by plain lists. A request
// uses its blocks from last to first.
double lru_share(const Trace& trace, std::size_t capacity) {
  std::list<std::uint64_t> stack;  // latest first
  double hits = 0, tokens = 0;
  for (const Request& request : trace.requests) {
    const auto ids = trace.ids_of(request);
    tokens += request.prompt_tokens;
    for (int i = 0; i < (request.prompt_tokens - 1) / trace.hash_block_tokens; ++i) {
      const auto end =
          std::next(stack.begin(), static_cast<std::ptrdiff_t>(std::min(capacity, stack.size())));
      if (std::find(stack.begin(), end, ids[static_cast<std::size_t>(i)]) == end) break;
      hits += trace.hash_block_tokens;
    }
    for (std::size_t i = ids.size(); i-- > 0;) {
      stack.remove(ids[i]);
      stack.push_front(ids[i]);
    }
  }
  return hits / tokens;
}

Trace small_trace() {
  GenerateConfig config;
  config.requests = 250;
  config.system_prompts = 3;
  config.first_message = {3000, 0.8, 1, 20000};
  return generate_trace(config);
}

TEST(Stats, LruSharesAreThoseOfSimulatedCaches) {
  const Trace trace = small_trace();
  const TraceStats stats = trace_stats(trace);
  ASSERT_GT(stats.lru.size(), 5u);
  for (const auto& [tokens, share] : stats.lru) {
    EXPECT_NEAR(share, lru_share(trace, static_cast<std::size_t>(tokens / 512)), 1e-12) << tokens;
  }
  EXPECT_NEAR(stats.ideal_hit_share, lru_share(trace, SIZE_MAX / 2), 1e-12);
  EXPECT_DOUBLE_EQ(stats.lru.back().hit_share, stats.ideal_hit_share);
  EXPECT_EQ(stats.unchained_ids, 0u);
}

TEST(Stats, CountsBlocksSeenBefore) {
  const Trace trace = small_trace();
  std::set<std::uint64_t> seen;
  double again = 0;
  for (const std::uint64_t id : trace.hash_ids) again += seen.insert(id).second ? 0 : 1;
  const TraceStats stats = trace_stats(trace);
  EXPECT_EQ(stats.blocks, trace.hash_ids.size());
  EXPECT_EQ(stats.distinct_blocks, seen.size());
  EXPECT_DOUBLE_EQ(stats.seen_before_share, again / static_cast<double>(trace.hash_ids.size()));
  EXPECT_EQ(stats.reuse_gap_s.n, static_cast<std::uint64_t>(again));
}

// Renaming ids changes nothing, be they small (used as they are) or large (ranked).
TEST(Stats, DoNotDependOnTheNamesOfIds) {
  Trace trace = small_trace();
  const std::string plain = stats_json(trace_stats(trace));
  for (std::uint64_t& id : trace.hash_ids) id = ~(id * 0x9E3779B97F4A7C15u);
  EXPECT_EQ(stats_json(trace_stats(trace)), plain);
}

Request request_at(Nanos arrival, std::int32_t prompt, std::uint64_t begin, std::int32_t count) {
  Request request;
  request.arrival = arrival;
  request.prompt_tokens = prompt;
  request.hash_begin = begin;
  request.hash_count = count;
  return request;
}

// The last token is always computed, so a repeated prompt of 1,024 tokens hits one block of two; a
// partial block never counts; a block after a miss does not either.
TEST(Stats, IdealHitsAreLeadingFullBlocksBeforeTheLastToken) {
  Trace trace;
  trace.hash_block_tokens = 512;
  trace.hash_ids = {1, 2, 1, 2, 9, 2};
  trace.requests = {request_at(0, 1024, 0, 2), request_at(0, 1024, 2, 2),
                    request_at(3 * kSecond, 1024, 4, 2)};
  const TraceStats stats = trace_stats(trace);
  EXPECT_DOUBLE_EQ(stats.ideal_hit_share, 512.0 / 3072);
  EXPECT_DOUBLE_EQ(stats.seen_before_share, 3.0 / 6);
  EXPECT_EQ(stats.unchained_ids, 1u);  // 2 stands after 1 and after 9
  EXPECT_EQ(stats.stamps, 2u);
  EXPECT_EQ(stats.requests_per_stamp.max, 2);
  EXPECT_DOUBLE_EQ(stats.gap_cv, 1);  // gaps of 0 s and 3 s: mean 1.5, deviation 1.5
  EXPECT_DOUBLE_EQ(stats.reuse_gap_s.max, 3);
}

TEST(Stats, OfASingleRequestWithoutIdentity) {
  Trace trace;
  trace.requests = {request_at(5, 10, 0, 0)};
  const TraceStats stats = trace_stats(trace);
  EXPECT_EQ(stats.span_s, 0);
  EXPECT_EQ(stats.rate, 0);
  EXPECT_EQ(stats.gap_cv, 0);
  EXPECT_NE(stats_table(stats).find("no prefix identity"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(stats_json(stats))["reuse"]["blocks"], 0);
}

TEST(Stats, TheJsonIsWhatItsSchemaSays) {
  const auto schema = nlohmann::ordered_json::parse(stats_schema());
  const auto document = nlohmann::ordered_json::parse(stats_json(trace_stats(small_trace())));
  EXPECT_EQ(document["schema"], schema["$id"]);
  conform(document, schema, true);
}

// Counts that a few lines of Python give for the published file.
TEST(Stats, OfThePublishedConversationTrace) {
  const std::string path = PDSIM_SOURCE_DIR "/../shared/traces/conversation_trace.jsonl";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
  const TraceStats stats = trace_stats(read_trace(path, "mooncake"));
  EXPECT_EQ(stats.blocks, 288500u);
  EXPECT_EQ(stats.distinct_blocks, 182790u);
  EXPECT_EQ(stats.stamps, 1180u);
  EXPECT_NEAR(stats.rate, 3.40, 0.005);
  EXPECT_EQ(stats.unchained_ids, 0u);
}

}  // namespace
}  // namespace pdsim
