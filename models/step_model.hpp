// What one engine step costs: the only face of the cost models that the simulator sees.
//
// A step runs one batch through one model replica (a tensor-parallel group). Its time depends on the
// batch only through the sums below, so a step is O(1) to describe however many requests are in it.
#pragma once

#include <cstdint>

#include "sim/core/time.hpp"

namespace pdsim {

/// The work of one step. Decode rows compute one token each; prefill rows compute a chunk of a prompt
/// (n new tokens after p that are already in the KV cache).
struct StepShape {
  std::int32_t decode_requests = 0;
  std::int32_t prefill_requests = 0;
  std::int32_t prefill_tokens = 0;          ///< sum of n
  std::int32_t sampled_requests = 0;        ///< rows that go through the LM head
  std::int64_t decode_context = 0;          ///< KV tokens that decode rows read, their own included
  std::int64_t decode_window_context = 0;   ///< the same, each row cut to the sliding window
  std::int64_t prefill_pairs = 0;           ///< visible (query, key) pairs: sum of n p + n (n+1) / 2
  std::int64_t prefill_context = 0;         ///< KV tokens that prefill rows read: sum of p + n
  std::int64_t prefill_window_pairs = 0;    ///< pairs inside the sliding window
  std::int64_t prefill_window_context = 0;  ///< KV tokens read inside the sliding window

  std::int32_t tokens() const { return decode_requests + prefill_tokens; }
};

struct StepTime {
  Nanos ns = 0;
  bool extrapolated = false;  ///< some operator's shape lay outside what its curve was fitted on
};

/// Sums of StepShape over many steps, for utilisation at the end of a run.
struct StepTotals {
  std::int64_t steps = 0;
  std::int64_t decode_requests = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t sampled_requests = 0;
  std::int64_t decode_context = 0;
  std::int64_t decode_window_context = 0;
  std::int64_t prefill_pairs = 0;
  std::int64_t prefill_context = 0;
  std::int64_t prefill_window_pairs = 0;
  std::int64_t prefill_window_context = 0;
};

}  // namespace pdsim
