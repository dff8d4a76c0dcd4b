// Equal hashes exactly where content is equal from the beginning on, and as many blocks as are full.
#include "sim/cluster/identity.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "sim/core/random.hpp"
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
  prompt_identity(trace, SessionChains(), request, block, out);
  return out;
}

std::vector<HashRun> sequence(const Trace& trace, std::uint32_t request, std::int32_t block,
                              std::int32_t tokens) {
  std::vector<HashRun> out;
  sequence_identity(trace, SessionChains(), request, block, tokens, out);
  return out;
}

using Names = std::vector<std::pair<std::uint64_t, std::int32_t>>;  // of blocks: hash of the run, index in it

Names names(const std::vector<HashRun>& identity) {
  Names out;
  for (const HashRun& run : identity) {
    for (std::int32_t i = 0; i < run.blocks; ++i) out.emplace_back(run.hash, i);
  }
  return out;
}

Names prompt_names(const Trace& trace, const SessionChains& chains, std::uint32_t r, std::int32_t block) {
  std::vector<HashRun> out = {{99, 99}};  // is cleared
  prompt_identity(trace, chains, r, block, out);
  return names(out);
}

Names sequence_names(const Trace& trace, const SessionChains& chains, std::uint32_t r, std::int32_t block) {
  std::vector<HashRun> out = {{99, 99}};  // is cleared
  sequence_identity(trace, chains, r, block,
                    trace.requests[r].prompt_tokens + trace.requests[r].output_tokens, out);
  return names(out);
}

std::int32_t common(const Names& a, const Names& b) {
  std::size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return static_cast<std::int32_t>(n);
}

// Conversations written out token by token: the reference. The trace's ids follow from the tokens: a hash
// block has the id of all tokens up to its end, the last one up to the prompt's end.
struct Conversations {
  using Tokens = std::vector<std::int32_t>;
  Trace trace;
  std::vector<Tokens> tokens;        // of each request: prompt and answer
  std::vector<std::int32_t> before;  // the turn that it extends, by construction; -1 = none

  void add(std::int32_t session, Tokens prompt, std::int32_t output, std::int32_t extended) {
    Request r = request_at(static_cast<Nanos>(tokens.size()) * kSecond,
                           static_cast<std::int32_t>(prompt.size()), output);
    r.session = session;
    if (trace.hash_block_tokens > 0) {
      r.hash_begin = trace.hash_ids.size();
      for (std::size_t at = 0; at < prompt.size(); at += 512) {
        Tokens head(prompt.begin(),
                    prompt.begin() + static_cast<std::ptrdiff_t>(std::min(prompt.size(), at + 512)));
        trace.hash_ids.push_back(ids_.try_emplace(std::move(head), ids_.size()).first->second);
        ++r.hash_count;
      }
    }
    trace.requests.push_back(r);
    for (std::int32_t i = 0; i < output; ++i) prompt.push_back(next_token_++);
    tokens.push_back(std::move(prompt));
    before.push_back(extended);
  }
  void write(Tokens& prompt, std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) prompt.push_back(next_token_++);
  }
  // Equal blocks are those of which all tokens up to the end are.
  std::int32_t common_blocks(std::size_t a, std::size_t b, std::int32_t block) const {
    const auto end = std::ranges::mismatch(tokens[a], prompt_of(b)).in1;
    return static_cast<std::int32_t>(end - tokens[a].begin()) / block;
  }
  Tokens prompt_of(std::size_t r) const {
    return {tokens[r].begin(), tokens[r].begin() + trace.requests[r].prompt_tokens};
  }

 private:
  std::int32_t next_token_ = 0;
  std::map<Tokens, std::uint64_t> ids_;
};

// Eight sessions that open with one of two system prompts; some turns cut the earlier one's answer off and
// some are edited in the middle of its prompt (with ids only: nothing else shows that).
Conversations random_conversations(std::uint64_t seed, std::int32_t hash_block) {
  constexpr std::int32_t kSessions = 8;
  Random random(seed, Purpose::conversations);
  const auto length = [&](std::int32_t most) {
    return 1 + static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(most)));
  };
  Conversations c;
  c.trace = made_trace({}, hash_block);
  Conversations::Tokens system[2];
  c.write(system[0], 1300);
  c.write(system[1], 512);
  std::vector<std::int32_t> last(kSessions, -1);
  for (std::int32_t s = 0; s < kSessions; ++s) c.trace.sessions.push_back("s" + std::to_string(s));
  for (int turn = 0; turn < 40; ++turn) {
    const auto session = static_cast<std::int32_t>(random.below(kSessions));
    std::int32_t& previous = last[static_cast<std::size_t>(session)];
    Conversations::Tokens prompt =
        previous < 0 ? system[session % 2] : c.tokens[static_cast<std::size_t>(previous)];
    std::int32_t extended = previous;
    const auto what = random.below(6);
    if (previous >= 0 && what == 0) {  // without the answer, and no longer than it
      prompt = c.prompt_of(static_cast<std::size_t>(previous));
      c.write(prompt, length(c.trace.requests[static_cast<std::size_t>(previous)].output_tokens) - 1);
      extended = -1;
    } else if (previous >= 0 && what == 1 && hash_block > 0 &&
               prompt.size() > 1024) {  // as long, but from token 300 on new
      const auto size = static_cast<std::int32_t>(prompt.size());
      prompt.resize(300);
      c.write(prompt, size);
      extended = -1;
    } else {
      c.write(prompt, length(turn % 3 == 0 ? 20 : 900));
    }
    previous = static_cast<std::int32_t>(c.tokens.size());
    c.add(session, std::move(prompt), length(700), extended);
  }
  c.trace.report.rows_read = c.trace.report.rows_used = c.trace.requests.size();
  return c;
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

// Blocks of 16 over a prompt of 1200 and 1800 more: the ids' runs, then runs of 32 of its own.
TEST(Identity, WithoutSessionsChainsChangeNothing) {
  const Trace trace = two_prompts(1200, {1, 2, 3}, 1200, {1, 2, 3});
  const SessionChains chains(trace);
  EXPECT_EQ(chains.extensions(), 0u);
  std::vector<HashRun> with;
  for (std::uint32_t r = 0; r < 2; ++r) {
    prompt_identity(trace, chains, r, 16, with);
    EXPECT_EQ(names(with), names(prompt(trace, r, 16)));
    sequence_identity(trace, chains, r, 16, 3000, with);
    EXPECT_EQ(names(with), names(sequence(trace, r, 16, 3000)));
    std::vector<std::int32_t> runs;
    for (const HashRun& run : with) runs.push_back(run.blocks);
    EXPECT_EQ(runs, (std::vector<std::int32_t>{32, 32, 11, 32, 32, 32, 16}));
  }
}

class SessionIdentity : public testing::TestWithParam<std::int32_t> {};  // of hash blocks' tokens

// Along a chain of extensions, what an earlier turn leaves and what a later one asks for are equal in
// exactly the blocks in which the tokens are. Anywhere else equal names mean equal tokens at least, and
// full hash blocks that two prompts share are shared blocks.
TEST_P(SessionIdentity, IsThatOfTheTokens) {
  const std::int32_t hash_block = GetParam();
  int along = 0, beyond_hash_blocks = 0, across = 0;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const Conversations c = random_conversations(seed, hash_block);
    const SessionChains chains(c.trace);
    const auto n = static_cast<std::uint32_t>(c.tokens.size());
    EXPECT_EQ(chains.extensions(),
              static_cast<std::uint64_t>(std::ranges::count_if(c.before, [](auto b) { return b >= 0; })));
    for (const std::int32_t block : {16, 64, 128}) {
      std::vector<Names> prompts, sequences;
      for (std::uint32_t r = 0; r < n; ++r) {
        prompts.push_back(prompt_names(c.trace, chains, r, block));
        sequences.push_back(sequence_names(c.trace, chains, r, block));
        ASSERT_EQ(sequences[r].size(), c.tokens[r].size() / static_cast<std::size_t>(block));
        ASSERT_EQ(common(prompts[r], sequences[r]), static_cast<std::int32_t>(prompts[r].size()));
        ASSERT_LE(prompts[r].size(), static_cast<std::size_t>(c.trace.requests[r].prompt_tokens / block));
        ASSERT_EQ((std::set<Names::value_type>(sequences[r].begin(), sequences[r].end()).size()),
                  sequences[r].size());
      }
      for (std::uint32_t a = 0; a < n; ++a) {
        for (std::uint32_t b = 0; b < n; ++b) {
          if (a == b) continue;
          SCOPED_TRACE(testing::Message()
                       << "seed " << seed << " block " << block << ": " << a << " then " << b);
          std::int32_t first = static_cast<std::int32_t>(b);
          while (first > static_cast<std::int32_t>(a)) first = c.before[static_cast<std::size_t>(first)];
          const std::int32_t named = common(sequences[a], prompts[b]), equal = c.common_blocks(a, b, block);
          if (first == static_cast<std::int32_t>(a)) {
            ASSERT_EQ(named, equal);
            ASSERT_EQ(named, static_cast<std::int32_t>(c.tokens[a].size()) / block);
            ++along;
            beyond_hash_blocks += named * block > c.trace.requests[a].prompt_tokens ? 1 : 0;
            continue;
          }
          ASSERT_LE(named, equal);
          if (hash_block == 0) continue;
          const std::int32_t full =
              std::min({c.common_blocks(a, b, 512), c.trace.requests[a].prompt_tokens / 512,
                        c.trace.requests[b].prompt_tokens / 512});
          ASSERT_GE(named, full * 512 / block);
          across += full > 0 && c.trace.requests[a].session != c.trace.requests[b].session ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(along, 300);
  EXPECT_GT(beyond_hash_blocks, 300);
  EXPECT_EQ(across > 300, hash_block > 0);
}

INSTANTIATE_TEST_SUITE_P(, SessionIdentity, testing::Values(512, 0));

// 1000 + 300 tokens are said again in the second prompt, not in one of 1299, of which only the full hash
// block (32 blocks of 16) is known to be the same. Across an edit nothing but its full hash blocks is.
TEST(Identity, APromptThatCutsTheAnswerBeginsAnew) {
  for (const auto& [second, shared] : {std::pair{1300, 81}, {1299, 32}}) {
    Trace trace = two_prompts(1000, {1, 2}, second, {1, 3, 4});
    trace.sessions = {"a"};
    trace.requests[0].output_tokens = 300;
    trace.requests[0].session = trace.requests[1].session = 0;
    trace.requests[1].turn = 1;
    SessionChains chains(trace);
    EXPECT_EQ(chains.last(0), second == 1300 ? 1u : 0u);
    EXPECT_EQ(common(sequence_names(trace, chains, 0, 16), prompt_names(trace, chains, 1, 16)), shared);
    EXPECT_EQ(
        common(sequence_names(trace, SessionChains(), 0, 16), prompt_names(trace, SessionChains(), 1, 16)),
        32);
    trace.hash_ids[2] = 9;  // the second prompt begins otherwise
    chains = SessionChains(trace);
    EXPECT_EQ(chains.extensions(), 0u);
    EXPECT_EQ(common(sequence_names(trace, chains, 0, 16), prompt_names(trace, chains, 1, 16)), 0);
  }
}

// A prefill leg's sequence ends one token into the answer, a decode leg's at its end; both begin alike.
TEST(Identity, ALongerSequenceBeginsLikeAShorterOne) {
  for (const std::int32_t hash_block : {512, 0}) {
    const Conversations c = random_conversations(7, hash_block);
    const SessionChains chains(c.trace);
    for (std::uint32_t r = 0; r < c.tokens.size(); ++r) {
      const Names all = sequence_names(c.trace, chains, r, 16);
      for (const std::int32_t more : {0, 1, c.trace.requests[r].output_tokens / 2}) {
        std::vector<HashRun> leg;
        const std::int32_t tokens = c.trace.requests[r].prompt_tokens + more;
        sequence_identity(c.trace, chains, r, 16, tokens, leg);
        ASSERT_EQ(blocks(leg), tokens / 16);
        ASSERT_EQ(common(names(leg), all), tokens / 16) << r;
      }
    }
  }
}

}  // namespace
}  // namespace pdsim
