// Making traces: conversations that look like Mooncake's, and the plain synthetic workloads of benchmarks.
//
// Both are functions of their configuration and seed alone: the same bytes on any machine. Every
// conversation (or request) draws from streams of its own, so asking for more of them does not change
// the lengths of the first ones.
#pragma once

#include <cstdint>

#include "traces/trace.hpp"

namespace pdsim {

/// Token counts exp(N(mu, sigma^2)) with the given mean (mu = ln mean - sigma^2 / 2), rounded, then cut to
/// [min, max]; cutting moves the mean.
struct Lengths {
  double mean = 1;
  double sigma = 0;  ///< of the logarithm; 0 = always the mean
  std::int32_t min = 1;
  std::int32_t max = 10'000'000;
};

/// A cluster's users. A conversation opens with one of the shared system prompts and a message; each later
/// turn's prompt is the earlier prompt, the answer to it and a new message.
struct GenerateConfig {
  std::int32_t requests = 1000;

  double rate = 3.4;      ///< requests per second once as many conversations end as begin
  double burstiness = 1;  ///< shape of the Gamma gaps between conversations: 1 = Poisson, less = bursts
  Nanos stamp_grid = kMillisecond;  ///< arrivals are floored to multiples of it (Mooncake's: 3 s)

  std::int32_t system_prompts = 16;  ///< how many are shared; 0 = none
  double zipf = 1;                   ///< the k-th most popular is chosen with weight k^-zipf
  Lengths system_prompt{1500, 0.8, 1, 32768};

  Lengths first_message{4500, 1.1, 1, 120000};
  Lengths message{400, 1.0, 1, 16384};  ///< what each later turn adds
  Lengths output{340, 1.1, 1, 2000};
  std::int32_t max_prompt_tokens = 126000;  ///< a conversation ends before the turn that would pass it

  double multi_turn_share = 0.5;  ///< of conversations, those of two turns or more
  double turns = 4;               ///< mean number of turns of those: 2 plus a geometric number
  double think_time_s = 20;       ///< mean of a lognormal pause between an answer's end and the next turn
  double think_time_sigma = 0.8;
  double first_token_ms = 500;  ///< with the next: how long answers take in the recorded arrivals
  double output_token_ms = 20;

  std::uint64_t seed = 1;
};

/// The first `requests` arrivals, with ids of 512 tokens numbered by first appearance, equal exactly where
/// prefixes are equal; a prompt's last, partial block has an id of its own. A shorter trace is a prefix
/// of a longer one. The first conversation begins at 0, so the rate rises until as many end as begin;
/// conversations are cut where the trace ends. O(ids + n log n); memory is the trace's and twice its
/// requests. InputError("generate: KNOB") for values out of range.
Trace generate_trace(const GenerateConfig& config);

/// What CONTRACT's workload.synthetic asks for.
struct SyntheticWorkload {
  std::int32_t requests = 0;
  double rate = 0;      ///< requests per second; 0 = all at time zero (a closed loop paces them itself)
  bool poisson = true;  ///< exponential gaps; false = equal ones
  std::int32_t isl = 0, osl = 0;      ///< tokens
  double range_ratio = 1;             ///< lengths uniform over the integers in [ratio x, x]
  std::int32_t shared_prefix = 0;     ///< leading tokens that all prompts have in common, part of isl
  std::int32_t distinct_prompts = 0;  ///< prompts repeat in turn after so many; 0 = never
  bool numpy = false;  ///< lengths as `vllm bench serve --seed 0` draws them: numpy's generator
};

/// Independent requests with a common prefix. A hash id covers the largest block_size 2^k <= 512 tokens (at
/// least one block) that divides the full blocks of the shared prefix: for this block size sharing is
/// exact to the block, with the fewest ids. All other ids are unique. The first request arrives at 0. O(ids).
/// InputError("synthetic: KNOB") for values out of range.
Trace synthetic_trace(const SyntheticWorkload& workload, std::int32_t block_size, std::uint64_t seed);

}  // namespace pdsim
