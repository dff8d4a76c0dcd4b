// Theory: a trace is a function of its configuration and seed; equal ids mean equal prefixes and nothing
// else does; means and spreads are those asked for, within four standard errors.
#include "traces/generate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "sim/core/error.hpp"
#include "tests/traces/files.hpp"
#include "traces/reshape.hpp"
#include "traces/stats.hpp"
#include "traces/writer.hpp"

namespace pdsim {
namespace {

std::string text_of(const Trace& trace) {
  const Folder folder;
  write_trace(trace, folder / "t", "mooncake");
  return bytes_of(folder / "t");
}

GenerateConfig conversations(std::int32_t requests) {
  GenerateConfig config;
  config.requests = requests;
  return config;
}

TEST(Generate, TheSameSeedGivesTheSameBytes) {
  GenerateConfig config = conversations(500);
  const std::string text = text_of(generate_trace(config));
  EXPECT_EQ(text_of(generate_trace(config)), text);
  config.seed = 2;
  EXPECT_NE(text_of(generate_trace(config)), text);
}

TEST(Generate, AShorterTraceIsAPrefixOfALongerOne) {
  for (const Nanos grid : {kMillisecond, 3 * kSecond}) {
    GenerateConfig config = conversations(300);
    config.stamp_grid = grid;
    const std::string few = text_of(generate_trace(config));
    config.requests = 900;
    EXPECT_TRUE(text_of(generate_trace(config)).starts_with(few));
  }
}

TEST(Generate, EqualIdsAreEqualPrefixes) {
  GenerateConfig config = conversations(3000);
  config.system_prompts = 5;
  const Trace trace = generate_trace(config);
  std::map<std::uint64_t, std::uint64_t> before;  // the id that stands before an id
  std::map<std::uint64_t, int> uses;
  std::map<int, const Request*> last;  // of a session
  std::uint64_t next_id = 0;
  for (const Request& request : trace.requests) {
    const auto ids = trace.ids_of(request);
    ASSERT_EQ(request.hash_count, (request.prompt_tokens + 511) / 512);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto [known, is_new] = before.try_emplace(ids[i], i == 0 ? UINT64_MAX : ids[i - 1]);
      ASSERT_EQ(known->second, i == 0 ? UINT64_MAX : ids[i - 1]);
      if (is_new) {
        ASSERT_EQ(ids[i], next_id++);  // numbered by first appearance
      }
      ++uses[ids[i]];
    }
    const Request*& previous = last[request.session];
    ASSERT_EQ(request.turn, previous == nullptr ? 0 : previous->turn + 1);
    if (previous != nullptr) {
      // The prompt continues the one before and its answer; their ids agree as far as full blocks of it go.
      ASSERT_GT(request.prompt_tokens, previous->prompt_tokens + previous->output_tokens);
      ASSERT_GE(request.arrival, previous->arrival);
      ASSERT_GE(request.think_time, 0);
      const auto earlier = trace.ids_of(*previous);
      for (std::size_t i = 0; i < earlier.size(); ++i) {
        ASSERT_EQ(ids[i] == earlier[i], i < static_cast<std::size_t>(previous->prompt_tokens / 512));
      }
    } else {
      ASSERT_EQ(request.think_time, -1);
    }
    previous = &request;
  }
  for (const Request& request : trace.requests) {
    if (request.prompt_tokens % 512 != 0) {
      ASSERT_EQ(uses[trace.ids_of(request).back()], 1);
    }
  }
}

// One system prompt of 1,300 tokens: first turns share its two full blocks and no more.
TEST(Generate, SystemPromptsAreSharedInFullBlocks) {
  GenerateConfig config = conversations(200);
  config.system_prompts = 1;
  config.system_prompt = {1300, 0, 1, 10000};
  config.multi_turn_share = 0;
  const Trace trace = generate_trace(config);
  EXPECT_TRUE(trace.sessions.empty());
  std::set<std::uint64_t> third;
  for (const Request& request : trace.requests) {
    ASSERT_GT(request.prompt_tokens, 1300);
    ASSERT_EQ(request.session, -1);
    const auto ids = trace.ids_of(request);
    ASSERT_EQ(ids[0], 0u);
    ASSERT_EQ(ids[1], 1u);
    ASSERT_TRUE(third.insert(ids[2]).second);
  }
}

TEST(Generate, LengthsAndRateAreThoseAskedFor) {
  const double n = 20000;
  GenerateConfig config = conversations(20000);
  config.rate = 5;
  config.system_prompts = 0;
  config.multi_turn_share = 0;
  config.first_message = {2000, 0.7, 1, 10'000'000};
  config.output = {300, 1.0, 1, 10'000'000};
  config.max_prompt_tokens = INT32_MAX;
  const TraceStats stats = trace_stats(generate_trace(config));
  // Lognormal: variance = mean^2 (exp(sigma^2) - 1), median = mean exp(-sigma^2 / 2).
  EXPECT_NEAR(stats.prompt_tokens.mean, 2000, 4 * 2000 * std::sqrt((std::exp(0.49) - 1) / n));
  EXPECT_NEAR(stats.prompt_tokens.p50, 2000 * std::exp(-0.245), 40);
  EXPECT_NEAR(stats.output_tokens.mean, 300, 4 * 300 * std::sqrt((std::exp(1.0) - 1) / n));
  EXPECT_NEAR(stats.rate, 5, 4 * 5 / std::sqrt(n));
  EXPECT_NEAR(stats.gap_cv, 1, 0.03);
  EXPECT_EQ(stats.seen_before_share, 0);
}

TEST(Generate, LengthsStayWithinTheirBounds) {
  GenerateConfig config = conversations(2000);
  config.output = {100, 2.0, 50, 200};
  config.max_prompt_tokens = 6000;
  const Trace trace = generate_trace(config);
  for (const Request& request : trace.requests) {
    ASSERT_TRUE(request.output_tokens >= 50 && request.output_tokens <= 200);
    ASSERT_TRUE(request.prompt_tokens >= 1 && request.prompt_tokens <= 6000);
  }
}

// Gamma gaps of shape k have a coefficient of variation of 1 / sqrt(k).
TEST(Generate, BurstinessIsTheShapeOfTheGaps) {
  for (const double shape : {0.25, 1.0, 4.0}) {
    GenerateConfig config = conversations(40000);
    config.multi_turn_share = 0;
    config.burstiness = shape;
    config.stamp_grid = 1;
    const TraceStats stats = trace_stats(generate_trace(config));
    EXPECT_NEAR(stats.gap_cv * std::sqrt(shape), 1, 0.04) << shape;
    EXPECT_NEAR(stats.rate, config.rate, 0.04 * config.rate) << shape;
  }
}

TEST(Generate, StampsLieOnTheGrid) {
  GenerateConfig config = conversations(2000);
  config.stamp_grid = 3 * kSecond;
  const Trace trace = generate_trace(config);
  for (const Request& request : trace.requests) ASSERT_EQ(request.arrival % (3 * kSecond), 0);
  // Poisson on a grid: 3.4 requests per second are 10.2 a stamp.
  EXPECT_NEAR(trace_stats(trace).requests_per_stamp.mean, 10.2, 0.8);
}

// Steady state: rate = conversations per second x turns. Zipf: the k-th prompt has weight 1 / k.
TEST(Generate, ConversationsAreThoseAskedFor) {
  GenerateConfig config = conversations(60000);
  config.system_prompts = 4;
  config.system_prompt = {600, 0, 1, 1000};
  config.first_message = {800, 0.5, 1, 10000};
  config.multi_turn_share = 0.4;
  config.turns = 5;
  const Trace trace = generate_trace(config);
  const TraceStats stats = trace_stats(trace);
  EXPECT_NEAR(stats.rate, config.rate, 0.03 * config.rate);
  const auto sessions = static_cast<double>(stats.sessions);
  EXPECT_NEAR(stats.turns.mean, 1 + 0.4 * 4, 0.06);
  EXPECT_NEAR(static_cast<double>(stats.multi_turn_sessions) / sessions, 0.4, 4 * std::sqrt(0.24 / sessions));
  EXPECT_NEAR(stats.think_time_s.mean, 20, 4 * 20 * std::sqrt((std::exp(0.64) - 1) / 36000));
  std::map<std::uint64_t, double> first;  // block of first turns -> conversations
  for (const Request& request : trace.requests) {
    if (request.turn == 0) first[trace.ids_of(request)[0]] += 1;
  }
  ASSERT_EQ(first.size(), 4u);
  std::vector<double> counts;
  for (const auto& [id, count] : first) counts.push_back(count);
  std::sort(counts.rbegin(), counts.rend());
  const double harmonic = 1 + 1.0 / 2 + 1.0 / 3 + 1.0 / 4;
  for (int k = 1; k <= 4; ++k) {
    const double p = 1 / (harmonic * k);
    EXPECT_NEAR(counts[static_cast<std::size_t>(k - 1)] / sessions, p, 4 * std::sqrt(p * (1 - p) / sessions));
  }
}

TEST(Generate, RefusesKnobsOutOfRange) {
  const auto refused = [](auto change) {
    GenerateConfig config;
    change(config);
    try {
      generate_trace(config);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused([](auto& c) { c.requests = 0; }), "generate: requests: is 0, expected at least 1");
  EXPECT_EQ(refused([](auto& c) { c.rate = NAN; }).substr(0, 14), "generate: rate");
  EXPECT_EQ(refused([](auto& c) { c.rate = 1e-9; }).substr(0, 14), "generate: rate");
  EXPECT_EQ(refused([](auto& c) { c.burstiness = 0; }).substr(0, 20), "generate: burstiness");
  EXPECT_EQ(refused([](auto& c) { c.stamp_grid = 0; }).substr(0, 23), "generate: stamp_grid_ms");
  EXPECT_EQ(refused([](auto& c) { c.output.mean = -1; }),
            "generate: output: mean: is -1, expected 1 to 1e9 tokens");
  EXPECT_EQ(refused([](auto& c) { c.message.min = 9, c.message.max = 8; }).substr(0, 22),
            "generate: message: max");
  EXPECT_EQ(refused([](auto& c) { c.turns = 1.5; }).substr(0, 15), "generate: turns");
  EXPECT_EQ(refused([](auto& c) { c.multi_turn_share = 1.1; }).substr(0, 26), "generate: multi_turn_share");
  EXPECT_EQ(refused([](auto&) {}), "accepted");
}

// A shared prefix of s tokens is floor(s / block) shared blocks, whatever the two are.
TEST(Synthetic, SharingIsExactToTheBlock) {
  for (const std::int32_t block : {16, 64}) {
    for (const std::int32_t shared : {0, 1, 15, 16, 100, 512, 700, 1024, 2000}) {
      SyntheticWorkload workload;
      workload.requests = 5;
      workload.isl = 3000;
      workload.osl = 10;
      workload.shared_prefix = shared;
      const Trace trace = synthetic_trace(workload, block, 1);
      ASSERT_EQ(trace.hash_block_tokens % block, 0);
      ASSERT_LE(trace.hash_block_tokens, 512);
      std::map<std::uint64_t, int> uses;
      for (const std::uint64_t id : trace.hash_ids) ++uses[id];
      std::int32_t common = 0;
      for (const auto& [id, count] : uses) {
        ASSERT_TRUE(count == 1 || count == 5);
        common += count == 5 ? trace.hash_block_tokens / block : 0;
      }
      EXPECT_EQ(common, shared / block) << shared << " by " << block;
    }
  }
}

TEST(Synthetic, LengthsAndArrivals) {
  SyntheticWorkload workload;
  workload.requests = 20000;
  workload.isl = 1000;
  workload.osl = 100;
  workload.range_ratio = 0.8;
  workload.rate = 10;
  const Trace open = synthetic_trace(workload, 16, 3);
  const TraceStats stats = trace_stats(open);
  // Uniform over the integers 800..1000: mean 900, variance (201^2 - 1) / 12.
  EXPECT_NEAR(stats.prompt_tokens.mean, 900, 4 * 58.02 / std::sqrt(20000.0));
  EXPECT_EQ(stats.prompt_tokens.max, 1000);
  EXPECT_NEAR(stats.output_tokens.mean, 90, 4 * 6.06 / std::sqrt(20000.0));
  EXPECT_NEAR(stats.rate, 10, 4 * 10 / std::sqrt(20000.0));
  EXPECT_NEAR(stats.gap_cv, 1, 0.03);
  EXPECT_EQ(open.requests.front().arrival, 0);
  EXPECT_EQ(open.hash_block_tokens, 512);

  workload.poisson = false;
  const Trace even = synthetic_trace(workload, 16, 3);
  EXPECT_EQ(even.requests[7].arrival, 7 * kSecond / 10);
  EXPECT_EQ(even.requests[7].prompt_tokens, open.requests[7].prompt_tokens);

  workload.rate = 0;  // closed: the simulator paces it
  workload.range_ratio = 1;
  const Trace closed = synthetic_trace(workload, 16, 3);
  EXPECT_EQ(span_of(closed), 0);
  EXPECT_EQ(trace_stats(closed).prompt_tokens.mean, 1000);
}

// Drawn as numpy's legacy generator draws, from seed 0 whatever pdsim's: np.random.seed(0), then
// randint(int(ratio x isl), isl + 1, n) and the same for outputs. The figures are numpy 1.24's.
TEST(Synthetic, NumpyDrawsAreNumpys) {
  SyntheticWorkload workload;
  workload.requests = 40;
  workload.isl = workload.osl = 1024;
  workload.range_ratio = 0.8;
  workload.numpy = true;
  const Trace trace = synthetic_trace(workload, 16, 1);
  const std::vector<std::int32_t> inputs = {991, 866, 936, 1011, 886, 1014},
                                  outputs = {851, 1012, 828, 1004, 946, 851};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(trace.requests[i].prompt_tokens, inputs[i]) << i;
    EXPECT_EQ(trace.requests[i].output_tokens, outputs[i]) << i;
  }
  EXPECT_EQ(text_of(synthetic_trace(workload, 16, 7)), text_of(trace));

  const struct {
    std::int32_t requests, isl, osl;
    double ratio;
    std::int64_t inputs, outputs;  ///< sums; 700 draws pass the twister's 624 words
  } cases[] = {{1, 8192, 1024, 0.8, 7237, 866},
               {3, 1000, 7, 0.5, 1836, 15},
               {700, 1024, 1024, 0.8, 646158, 645226},
               {5, 1, 1, 1, 5, 5},
               {4, 100'000, 3, 0.33, 285'314, 8}};
  for (const auto& c : cases) {
    workload.requests = c.requests;
    workload.isl = c.isl;
    workload.osl = c.osl;
    workload.range_ratio = c.ratio;
    std::int64_t prompts = 0, answers = 0;
    const Trace drawn = synthetic_trace(workload, 16, 1);
    for (const Request& request : drawn.requests) {
      prompts += request.prompt_tokens;
      answers += request.output_tokens;
    }
    EXPECT_EQ(prompts, c.inputs) << c.isl;
    EXPECT_EQ(answers, c.outputs) << c.osl;
  }

  // Truncation may not leave an empty prompt, and a shared prefix is below the shortest: 819, not 820.
  workload.requests = 100;
  workload.isl = 3;
  workload.osl = 1;
  workload.range_ratio = 0.2;
  const Trace tiny = synthetic_trace(workload, 16, 1);
  for (const Request& request : tiny.requests) {
    EXPECT_GE(request.prompt_tokens, 1);
    EXPECT_EQ(request.output_tokens, 1);
  }
  workload.isl = 1024;
  workload.range_ratio = 0.8;
  workload.shared_prefix = 819;
  EXPECT_THROW(synthetic_trace(workload, 16, 1), InputError);
  workload.numpy = false;
  EXPECT_NO_THROW(synthetic_trace(workload, 16, 1));
}

// Request i has prompt i mod N, block for block, and an output and an arrival of its own.
TEST(Synthetic, DistinctPromptsComeInTurn) {
  SyntheticWorkload workload;
  workload.requests = 25;
  workload.isl = 2000;
  workload.osl = 500;
  workload.range_ratio = 0.5;
  workload.rate = 3;
  const Trace apart = synthetic_trace(workload, 16, 1);
  workload.distinct_prompts = 7;
  const Trace trace = synthetic_trace(workload, 16, 1);
  std::set<std::uint64_t> ids;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const Request &request = trace.requests[i], &first = trace.requests[i % 7];
    EXPECT_EQ(request.prompt_tokens, first.prompt_tokens);
    EXPECT_TRUE(std::ranges::equal(trace.ids_of(request), trace.ids_of(first)));
    EXPECT_EQ(request.output_tokens, apart.requests[i].output_tokens);
    EXPECT_EQ(request.arrival, apart.requests[i].arrival);
    if (i >= 7) continue;
    EXPECT_EQ(request.prompt_tokens, apart.requests[i].prompt_tokens);
    for (const std::uint64_t id : trace.ids_of(request)) EXPECT_TRUE(ids.insert(id).second) << id;
  }
  EXPECT_NE(trace.requests[0].output_tokens, trace.requests[7].output_tokens);
  EXPECT_EQ(trace.hash_ids.size(), ids.size());
  workload.distinct_prompts = 25;
  EXPECT_EQ(text_of(synthetic_trace(workload, 16, 1)), text_of(apart));
  workload.distinct_prompts = -1;
  EXPECT_THROW(synthetic_trace(workload, 16, 1), InputError);
}

TEST(Synthetic, RefusesWhatCannotWork) {
  SyntheticWorkload workload;
  workload.requests = 1;
  workload.isl = 100;
  workload.range_ratio = 0.5;
  workload.shared_prefix = 49;
  EXPECT_NO_THROW(synthetic_trace(workload, 16, 1));
  workload.shared_prefix = 50;  // the shortest prompt would be no prompt of its own
  EXPECT_THROW(synthetic_trace(workload, 16, 1), InputError);
  workload.shared_prefix = 0;
  workload.range_ratio = 0;
  EXPECT_THROW(synthetic_trace(workload, 16, 1), InputError);
  workload.range_ratio = 1;
  workload.isl = 0;
  EXPECT_THROW(synthetic_trace(workload, 16, 1), InputError);
}

}  // namespace
}  // namespace pdsim
