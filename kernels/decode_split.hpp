// Into how many chunks decode attention cuts each request's keys.
//
// One query token a request leaves few thread blocks: requests x KV heads. Where they do not fill the GPU,
// the keys of a request are cut into chunks that run as blocks of their own, and a second kernel combines
// them (combine.cuh). Every request is cut at the same chunk size, so a long request becomes many blocks
// and a short one stays whole; a batch in which no request exceeds one chunk needs no combining.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/qualifiers.cuh"

namespace pdsim::kernels {

/// No chunk is shorter: at 128 keys (head_dim 128, bf16) what 8 heads write and read again as parts is an
/// eighth of the keys and values themselves.
inline constexpr std::int32_t kLeastChunk = 128;

/// The share of the GPU's block slots that must be busy with keys; the least split that reaches it is taken.
inline constexpr double kEnoughWaveEfficiency = 0.85;

/// The batch as the choice of a split sees it.
struct SplitProblem {
  std::span<const std::int32_t> lengths;  ///< keys of each request, >= 0
  std::int32_t blocks_per_chunk;          ///< KV heads, or tiles of heads where all share one latent; >= 1
  std::int32_t page_tokens;               ///< >= 1
  std::int32_t slots;                     ///< thread blocks that the GPU runs at once; >= 1
  std::int32_t least_chunk = kLeastChunk;
};

struct DecodeSplit {
  std::int32_t chunk_tokens;  ///< a multiple of the page
  std::int32_t splits;        ///< chunks of the longest request; >= 1
  double efficiency;          ///< see wave_efficiency(); 1 for a batch without keys

  bool operator==(const DecodeSplit&) const = default;
};

/// Chunks of a request of `length` keys; a request without keys has one, which writes its zeros.
PDSIM_HOST_DEVICE std::int32_t chunks_of(std::int32_t length, std::int32_t chunk_tokens) {
  return length <= chunk_tokens ? 1 : (length + chunk_tokens - 1) / chunk_tokens;
}

/// Keys read over keys that could have been read while the batch runs, when blocks run in waves of `slots`
/// and every wave lasts as long as its longest chunk: sum of keys x blocks / (waves x slots x longest).
/// O(requests).
inline double wave_efficiency(const SplitProblem& problem, std::int32_t chunk_tokens) {
  std::int64_t keys = 0, chunks = 0;
  std::int32_t longest = 0;
  for (const std::int32_t length : problem.lengths) {
    if (length == 0) continue;
    keys += length;
    chunks += chunks_of(length, chunk_tokens);
    longest = std::max(longest, std::min(length, chunk_tokens));
  }
  if (keys == 0) return 1;
  const std::int64_t blocks = chunks * problem.blocks_per_chunk;
  const std::int64_t waves = (blocks + problem.slots - 1) / problem.slots;
  return static_cast<double>(keys * problem.blocks_per_chunk) /
         (static_cast<double>(waves) * problem.slots * longest);
}

/// The longest request in at most `splits` >= 1 chunks of whole pages and at least least_chunk.
inline DecodeSplit split_into(const SplitProblem& problem, std::int32_t splits) {
  const std::int32_t longest =
      problem.lengths.empty() ? 0 : *std::max_element(problem.lengths.begin(), problem.lengths.end());
  const std::int32_t least = std::max((longest - 1) / splits + 1, problem.least_chunk);
  const std::int32_t chunk = (least + problem.page_tokens - 1) / problem.page_tokens * problem.page_tokens;
  return {chunk, chunks_of(longest, chunk), wave_efficiency(problem, chunk)};
}

/// The least split with kEnoughWaveEfficiency, or where none has it the most efficient one (the least of
/// equals). After flash-attention's num_splits_heuristic, with chunk sizes in place of counts so that ragged
/// batches balance. O(requests x splits tried), at most longest / least_chunk.
inline DecodeSplit choose_split(const SplitProblem& problem) {
  DecodeSplit best = split_into(problem, 1);
  const std::int32_t most = split_into(problem, INT32_MAX).splits;
  for (std::int32_t splits = 2; splits <= most && best.efficiency < kEnoughWaveEfficiency; ++splits) {
    const DecodeSplit next = split_into(problem, splits);
    if (next.efficiency > best.efficiency) best = next;
  }
  return best;
}

}  // namespace pdsim::kernels
