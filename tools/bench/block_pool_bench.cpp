// What a block costs. A Mooncake-like stream of conversations goes through one pool with 16-token
// blocks and with 512-token blocks: the same tokens, 32 times the blocks. By segments both should
// cost nearly the same per request; per block the small ones should cost nearly nothing.
//
// A request hits what is cached, takes and publishes the rest in chunks of 8192 tokens, as chunked
// prefill does, grows block by block while it decodes, and is released when 48 younger ones live.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sim/core/random.hpp"
#include "sim/serving/block_pool.hpp"

namespace pdsim {
namespace {

constexpr std::int32_t kRunTokens = 512;       // one hash id of the Mooncake traces
constexpr std::int32_t kChunkTokens = 8192;    // max_num_batched_tokens
constexpr std::int32_t kPoolTokens = 900'000;  // an 8-billion-parameter GQA model on an H200
constexpr std::size_t kLive = 48;
constexpr int kRequests = 2000;

struct Prompt {
  std::vector<std::uint64_t> hashes;
  std::int32_t tokens, output;
};

/// Turns of conversations: half of them open one, the others append to one of the latest 100. About
/// 12,000 tokens in and 340 out, 40 % of the prompt seen before.
std::vector<Prompt> conversations() {
  Random random(1, Purpose::conversations);
  std::vector<Prompt> prompts;
  std::uint64_t next_hash = 0;
  for (int i = 0; i < kRequests; ++i) {
    Prompt prompt;
    std::int32_t fresh = 1 + static_cast<std::int32_t>(random.exponential(8000.0));
    if (i > 0 && random.below(2) == 0) {
      const std::uint64_t back = 1 + random.below(static_cast<std::uint64_t>(std::min(i, 100)));
      prompt.hashes = prompts[static_cast<std::size_t>(i) - back].hashes;
      prompt.hashes.pop_back();  // the previous turn's last id was of a partial block
    }
    prompt.tokens = static_cast<std::int32_t>(prompt.hashes.size()) * kRunTokens + fresh;
    prompt.tokens = std::min(prompt.tokens, 120'000);
    prompt.output = 1 + static_cast<std::int32_t>(random.exponential(340.0));
    prompt.hashes.resize(static_cast<std::size_t>((prompt.tokens + kRunTokens - 1) / kRunTokens));
    for (std::size_t h = 0; h < prompt.hashes.size(); ++h) {
      if (prompt.hashes[h] == 0) prompt.hashes[h] = ++next_hash;
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

void replay(benchmark::State& state) {
  const auto block_tokens = static_cast<std::int32_t>(state.range(0));
  const std::vector<Prompt> prompts = conversations();
  std::vector<std::vector<HashRun>> identities;
  for (const Prompt& prompt : prompts) {
    std::vector<HashRun> runs;
    std::int32_t full = prompt.tokens / block_tokens;
    for (std::uint64_t hash : prompt.hashes) {
      runs.push_back({hash, std::min(full, kRunTokens / block_tokens)});
      full -= runs.back().blocks;
    }
    identities.push_back(std::move(runs));
  }

  std::int64_t blocks = 0, hits = 0, segments = 0;
  for ([[maybe_unused]] auto iteration : state) {
    BlockPool pool(kPoolTokens / block_tokens, true);
    std::vector<TableId> live(kLive, -1);
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const std::int32_t prompt = prompts[i].tokens;
      const auto blocks_for = [&](std::int32_t tokens) { return (tokens + block_tokens - 1) / block_tokens; };
      TableId& table = live[i % kLive];
      if (table >= 0) pool.release(table);
      table = pool.open(identities[i]);
      const std::int32_t hit = pool.cached_prefix(identities[i], (prompt - 1) / block_tokens);
      std::int32_t computed = std::min(hit * block_tokens + kChunkTokens, prompt);
      bool fits = pool.allocate(table, hit, blocks_for(computed) - hit);
      pool.publish(table, fits ? computed / block_tokens : 0);
      while (fits && computed < prompt) {
        computed = std::min(computed + kChunkTokens, prompt);
        fits = pool.extend(table, blocks_for(computed) - pool.size(table));
        if (fits) pool.publish(table, computed / block_tokens);
      }
      for (std::int32_t end = blocks_for(prompt + prompts[i].output); fits && pool.size(table) < end;) {
        fits = pool.extend(table, 1);
      }
      blocks += pool.size(table);
      hits += fits ? hit : 0;
      segments += static_cast<std::int64_t>(identities[i].size()) + 1;
      benchmark::DoNotOptimize(fits);
    }
    benchmark::DoNotOptimize(pool.evicted_blocks());
  }
  const auto time_per = [](std::int64_t n) {
    return benchmark::Counter(static_cast<double>(n),
                              benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  };
  state.counters["per_block"] = time_per(blocks);
  state.counters["per_segment"] = time_per(segments);
  state.counters["hit"] = static_cast<double>(hits) / static_cast<double>(blocks);
  state.counters["blocks"] =
      benchmark::Counter(static_cast<double>(blocks), benchmark::Counter::kAvgIterations);
}
BENCHMARK(replay)->ArgName("block_tokens")->Arg(16)->Arg(512)->Unit(benchmark::kMillisecond);

/// A pool of an H200's size, out of order, as every worker of a fragmented run starts with.
void fragmentation(benchmark::State& state) {
  for ([[maybe_unused]] auto iteration : state) {
    BlockPool pool(kPoolTokens / 16, true);
    Random random(1, Purpose::fragmentation);
    pool.fragment(1, random);
    benchmark::DoNotOptimize(pool.free_blocks());
  }
}
BENCHMARK(fragmentation)->Unit(benchmark::kMillisecond);

/// The life of a table of 750 cached blocks that are let go 40 at a time, as a retention policy would.
void truncation(benchmark::State& state) {
  constexpr std::int32_t kBlocks = 750, kStep = 40;
  std::vector<HashRun> runs;
  for (std::uint64_t h = 0; h * 32 < kBlocks; ++h) runs.push_back({h, 32});
  BlockPool pool(50'000, true);
  for ([[maybe_unused]] auto iteration : state) {
    const TableId table = pool.open(runs);
    const std::int32_t hit = pool.cached_prefix(runs, kBlocks);
    pool.allocate(table, hit, kBlocks - hit);
    pool.publish(table, kBlocks);
    for (std::int32_t keep = kBlocks - kStep; keep > 0; keep -= kStep) pool.truncate(table, keep);
    pool.release(table);
  }
}
BENCHMARK(truncation)->Unit(benchmark::kMicrosecond);

/// One block more for one of many decoding requests, from a pool whose free blocks are all cached:
/// every one of them is an eviction. Releases and refills are not timed.
void decode_growth(benchmark::State& state) {
  constexpr std::int32_t kBlocks = 50'000, kRun = 32, kTables = 64;
  std::vector<HashRun> runs;
  for (std::uint64_t h = 0; h * kRun < kBlocks; ++h) runs.push_back({h, kRun});
  while (state.KeepRunningBatch(kBlocks)) {
    state.PauseTiming();
    BlockPool pool(kBlocks, true);
    const TableId all = pool.open(runs);
    pool.allocate(all, 0, kBlocks);
    pool.publish(all, kBlocks);
    pool.release(all);
    std::vector<TableId> tables;
    for (int i = 0; i < kTables; ++i) tables.push_back(pool.open({}));
    state.ResumeTiming();
    for (std::size_t i = 0; i < kBlocks; ++i) pool.extend(tables[i % kTables], 1);
    benchmark::DoNotOptimize(pool.evicted_blocks());
  }
}
BENCHMARK(decode_growth);

}  // namespace
}  // namespace pdsim

BENCHMARK_MAIN();
