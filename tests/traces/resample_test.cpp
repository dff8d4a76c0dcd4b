// Theory: a resample is another draw of the same users. Session i begins when session i did and is one drawn
// with probability 1/n each, so that a session is drawn Poisson(1)-like often: mean 1, variance 1 - 1/n, none
// with probability (1 - 1/n)^n. What the users had in common (ids of several sessions) stays common; what one
// of them had alone is its own in each copy, so that a session drawn twice is no cache hit.
#include "traces/resample.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_set>

#include "sim/core/error.hpp"
#include "traces/generate.hpp"
#include "traces/reader.hpp"
#include "traces/sessions.hpp"
#include "traces/stats.hpp"

namespace pdsim {
namespace {

struct Row {
  Nanos arrival;
  std::int32_t prompt;
  std::vector<std::uint64_t> ids;
  std::int32_t session = -1, turn = 0;
  Nanos think = -1;
};

Trace trace_of(const std::vector<Row>& rows, std::int32_t block = 512) {
  Trace trace;
  trace.name = "made";
  trace.hash_block_tokens = block;
  for (const Row& row : rows) {
    Request r;
    r.arrival = row.arrival;
    r.prompt_tokens = row.prompt;
    r.output_tokens = row.prompt / 10;
    r.session = row.session;
    r.turn = row.turn;
    r.think_time = row.think;
    r.hash_begin = trace.hash_ids.size();
    r.hash_count = static_cast<std::int32_t>(row.ids.size());
    trace.hash_ids.insert(trace.hash_ids.end(), row.ids.begin(), row.ids.end());
    trace.requests.push_back(r);
    while (row.session >= static_cast<std::int32_t>(trace.sessions.size())) {
      trace.sessions.push_back("user-" + std::to_string(trace.sessions.size()));
    }
  }
  return trace;
}

// Three users whose lengths tell them apart; 7 is a system prompt that the first two share.
Trace three_users() {
  return trace_of({{0, 1000, {7, 10}, 0, 0},
                   {2 * kSecond, 2000, {7, 20}, 1, 0},
                   {3 * kSecond, 1100, {7, 10, 11}, 0, 1, kSecond},
                   {5 * kSecond, 3000, {30}, 2, 0},
                   {9 * kSecond, 1200, {7, 10, 11, 12}, 0, 2, 4 * kSecond}});
}

struct Session {
  std::vector<Request> requests;
  std::vector<std::vector<std::uint64_t>> ids;
};

std::vector<Session> sessions_of(const Trace& trace) {
  std::vector<Session> all(trace.sessions.size());
  for (const Request& r : trace.requests) {
    Session& s = all.at(static_cast<std::size_t>(r.session));
    s.requests.push_back(r);
    const auto ids = trace.ids_of(r);
    s.ids.emplace_back(ids.begin(), ids.end());
  }
  return all;
}

TEST(Resample, BeginsStayAndTheRestIsTheDrawnSessions) {
  const Trace trace = three_users();
  const std::vector<Session> from = sessions_of(trace);
  const Nanos begins[] = {0, 2 * kSecond, 5 * kSecond};
  std::map<std::int32_t, int> drawn;  // by first prompt
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Trace other = resample_sessions(trace, seed);
    ASSERT_EQ(other.sessions.size(), 3u);
    EXPECT_TRUE(std::ranges::is_sorted(other.requests, {}, &Request::arrival));
    const std::vector<Session> sessions = sessions_of(other);
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const Session& copy = sessions[i];
      ASSERT_FALSE(copy.requests.empty());
      EXPECT_EQ(copy.requests[0].arrival, begins[i]);
      const auto original = std::ranges::find_if(from, [&](const Session& s) {
        return s.requests[0].prompt_tokens == copy.requests[0].prompt_tokens;
      });
      ASSERT_NE(original, from.end());
      ++drawn[copy.requests[0].prompt_tokens];
      ASSERT_EQ(copy.requests.size(), original->requests.size());
      for (std::size_t t = 0; t < copy.requests.size(); ++t) {
        const Request &a = copy.requests[t], &b = original->requests[t];
        EXPECT_EQ(a.arrival - copy.requests[0].arrival, b.arrival - original->requests[0].arrival);
        EXPECT_EQ(a.prompt_tokens, b.prompt_tokens);
        EXPECT_EQ(a.output_tokens, b.output_tokens);
        EXPECT_EQ(a.think_time, b.think_time);
        EXPECT_EQ(a.turn, b.turn);
        EXPECT_EQ(a.hash_count, b.hash_count);
      }
    }
  }
  // 600 draws of three: 200 each, standard deviation 11.5.
  for (const auto& [prompt, times] : drawn) EXPECT_NEAR(times, 200, 46) << prompt;
  EXPECT_EQ(drawn.size(), 3u);
}

TEST(Resample, SharedIdsStayAndPrivateOnesAreOneCopysOwn) {
  const Trace trace = three_users();
  bool twice = false;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const Trace other = resample_sessions(trace, seed);
    std::map<std::uint64_t, std::size_t> owner;
    std::set<std::int32_t> first;
    const std::vector<Session> sessions = sessions_of(other);
    for (std::size_t s = 0; s < sessions.size(); ++s) {
      const Session& session = sessions[s];
      twice = twice || !first.insert(session.requests[0].prompt_tokens).second;
      for (std::size_t t = 0; t < session.ids.size(); ++t) {
        const auto& ids = session.ids[t];
        EXPECT_EQ(ids[0] == 7, session.requests[0].prompt_tokens < 3000);
        for (const std::uint64_t id : ids) {
          if (id == 7) continue;
          EXPECT_EQ(owner.try_emplace(id, s).first->second, s) << "id " << id << " is in two copies";
        }
        // Within a session the prompt still begins with the one before.
        if (t > 0) {
          EXPECT_TRUE(std::equal(session.ids[t - 1].begin(), session.ids[t - 1].end(), ids.begin()));
        }
        EXPECT_EQ(std::set<std::uint64_t>(ids.begin(), ids.end()).size(), ids.size());
      }
    }
  }
  EXPECT_TRUE(twice);
}

TEST(Resample, WithNothingPrivateNoIdChanges) {
  const Trace trace =
      trace_of({{0, 1000, {1, 2}, 0, 0}, {kSecond, 1000, {1, 2}, 1, 0}, {2 * kSecond, 1000, {1, 2}, 2, 0}});
  const Trace other = resample_sessions(trace, 3);
  EXPECT_EQ(other.hash_ids, trace.hash_ids);
}

// Ids are hashes: any 64 bits. A new one meets none of the trace's, at the very end of the range neither.
TEST(Resample, NewIdsAreNoneOfTheTraces) {
  const Trace trace = trace_of({{0, 1000, {UINT64_MAX, 0}, 0, 0},
                                {kSecond, 1000, {UINT64_MAX, 1}, 1, 0},
                                {2 * kSecond, 1000, {UINT64_MAX, 2}, 2, 0}});
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Trace other = resample_sessions(trace, seed);
    std::set<std::uint64_t> mine;
    for (const Request& r : other.requests) {
      EXPECT_EQ(other.ids_of(r)[0], UINT64_MAX);
      EXPECT_GT(other.ids_of(r)[1], 2u);
      mine.insert(other.ids_of(r)[1]);
    }
    EXPECT_EQ(mine.size(), 3u);
  }
}

// n draws of n: a session is drawn Binomial(n, 1/n) often.
TEST(Resample, MultiplicityIsPoissonLike) {
  std::vector<Row> rows;
  constexpr std::int32_t kSessions = 100;
  for (std::int32_t i = 0; i < kSessions; ++i) rows.push_back({i * kSecond, i + 1, {}, -1});
  const Trace trace = trace_of(rows, 0);
  std::vector<double> times(kSessions);
  double squares = 0, none = 0;
  constexpr int kSeeds = 400;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    std::vector<int> count(kSessions);
    const Trace other = resample_sessions(trace, seed);
    ASSERT_EQ(other.requests.size(), static_cast<std::size_t>(kSessions));
    for (const Request& r : other.requests) ++count.at(static_cast<std::size_t>(r.prompt_tokens - 1));
    for (std::size_t i = 0; i < count.size(); ++i) {
      times[i] += count[i];
      squares += count[i] * count[i];
      none += count[i] == 0 ? 1 : 0;
    }
  }
  constexpr double kDraws = kSessions * kSeeds;
  EXPECT_NEAR(squares / kDraws, 2 - 1.0 / kSessions, 0.05);  // E[X^2] = variance + 1
  EXPECT_NEAR(none / kDraws, std::pow(1 - 1.0 / kSessions, kSessions), 0.01);
  for (const double t : times) EXPECT_NEAR(t, kSeeds, 5 * std::sqrt(kSeeds));
}

TEST(Resample, TheSameSeedGivesTheSameBytesAndAnotherOthers) {
  const Trace trace = three_users();
  const auto bytes = [&](std::uint64_t seed) {
    const Trace other = resample_sessions(trace, seed);
    std::string text = other.report.sessions + "\n";
    for (const Request& r : other.requests) {
      text += fmt::format("{} {} {}", r.arrival, r.prompt_tokens, r.session);
      for (const std::uint64_t id : other.ids_of(r)) text += fmt::format(" {}", id);
    }
    return text;
  };
  EXPECT_EQ(bytes(5), bytes(5));
  std::set<std::vector<std::int32_t>> different;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    std::vector<std::int32_t> prompts;
    for (const Request& r : resample_sessions(trace, seed).requests) prompts.push_back(r.prompt_tokens);
    different.insert(prompts);
  }
  EXPECT_GT(different.size(), 15u);  // of 27 outcomes, 23 to be expected in 50 draws
}

TEST(Resample, RequestsWithoutSessionAmongSessionsAreSessionsOfTheirOwn) {
  const Trace trace =
      trace_of({{0, 1000, {1}, 0, 0}, {kSecond, 500, {2}}, {2 * kSecond, 1100, {1, 3}, 0, 1}});
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Trace other = resample_sessions(trace, seed);
    std::size_t alone = 0, first = 0;
    for (const Request& r : other.requests) {
      alone += r.session < 0 ? 1u : 0u;
      first += r.session >= 0 && r.turn == 0 ? 1u : 0u;
      EXPECT_EQ(r.session < 0, r.prompt_tokens == 500);
    }
    EXPECT_EQ(alone + first, 2u);
    EXPECT_EQ(other.sessions.size(), first);
  }
}

TEST(Resample, EmptyAndBeyondTheClock) {
  EXPECT_TRUE(resample_sessions(trace_of({}), 1).requests.empty());
  constexpr Nanos kFar = Nanos{1} << 62;
  const Trace trace = trace_of({{0, 1, {}, 0, 0}, {kFar, 2, {}, 0, 1}, {kFar, 3, {}, 1, 0}}, 0);
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    try {
      resample_sessions(trace, seed);
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("2^62"), std::string::npos);
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

double prompt_mean(const Trace& trace) {
  double sum = 0;
  for (const Request& r : trace.requests) sum += r.prompt_tokens;
  return sum / static_cast<double>(trace.requests.size());
}

// Share of prompt tokens that a cache without limit finds: leading full blocks seen before, never the last
// token.
double hit_share(const Trace& trace) {
  std::unordered_set<std::uint64_t> seen;
  std::int64_t hits = 0, tokens = 0;
  for (const Request& r : trace.requests) {
    const auto ids = trace.ids_of(r);
    std::int64_t blocks = 0;
    const std::int64_t most = (r.prompt_tokens - 1) / trace.hash_block_tokens;
    while (blocks < most && blocks < r.hash_count && seen.contains(ids[static_cast<std::size_t>(blocks)]))
      ++blocks;
    seen.insert(ids.begin(), ids.end());
    hits += blocks * trace.hash_block_tokens;
    tokens += r.prompt_tokens;
  }
  return static_cast<double>(hits) / static_cast<double>(tokens);
}

// The users' lengths, and what a cache finds, lie about the original's. Where the file has no sessions they
// are inferred, for the drawing alone.
void scatters(const std::string& file, bool recorded, int seeds, double prompt_tolerance,
              double hit_tolerance) {
  const Trace trace = read_trace(file, "mooncake");
  ASSERT_EQ(trace.sessions.empty(), !recorded);
  const double prompt = prompt_mean(trace), hits = hit_share(trace);
  double prompts = 0, shares = 0, least = HUGE_VAL, most = 0, least_share = 1, most_share = 0;
  for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(seeds); ++seed) {
    const Trace other = resample_sessions(trace, seed);
    EXPECT_EQ(other.sessions.empty(), !recorded);
    const bool inferred = other.report.sessions.find("inferred from hash ids") != std::string::npos;
    EXPECT_EQ(inferred, !recorded);
    if (!recorded) {
      EXPECT_TRUE(std::ranges::all_of(other.requests, [](const Request& r) { return r.session < 0; }));
    }
    EXPECT_TRUE(seed > 1 || trace_stats(other).unchained_ids == trace_stats(trace).unchained_ids);
    const double mean = prompt_mean(other), share = hit_share(other);
    prompts += mean / seeds;
    shares += share / seeds;
    least = std::min(least, mean);
    most = std::max(most, mean);
    least_share = std::min(least_share, share);
    most_share = std::max(most_share, share);
  }
  testing::Test::RecordProperty(
      "figures", fmt::format("prompt {:.0f}: {:.0f}..{:.0f}, mean {:.0f}; hits {:.4f}: "
                             "{:.4f}..{:.4f}, mean {:.4f}",
                             prompt, least, most, prompts, hits, least_share, most_share, shares));
  EXPECT_LT(least, prompt);
  EXPECT_GT(most, prompt);
  EXPECT_LT(least_share, hits);
  EXPECT_GT(most_share, hits);
  EXPECT_NEAR(prompts / prompt, 1, prompt_tolerance);
  EXPECT_NEAR(shares, hits, hit_tolerance);
}

TEST(Resample, AConversationTraceScattersAboutItself) {
  scatters(PDSIM_SOURCE_DIR "/traces/samples/conversation.jsonl", true, 20, 0.03, 0.02);
}

TEST(Resample, TheWholeConversationTrace) {
  const std::string file = PDSIM_SOURCE_DIR "/../shared/traces/conversation_trace.jsonl";
  if (!std::filesystem::exists(file)) GTEST_SKIP() << "no " << file;
  scatters(file, false, 8, 0.02, 0.01);
}

}  // namespace
}  // namespace pdsim
