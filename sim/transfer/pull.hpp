// Hand-off by pull: what a decode worker reads from a prefill worker, and what posting it costs.
//
// The protocol (vLLM's NixlPullConnector), with who holds which memory:
//   1. The proxy sends the prompt to prefill with max_tokens=1 and waits for its whole answer.
//   2. Prefill computes. At the end its blocks stay allocated under a lease.        prefill holds
//   3. The proxy sends prompt and block ids to decode; decode starts heartbeats.
//   4. Decode's scheduler looks up its own prefix cache and allocates blocks for the whole prompt, or
//      waits for room. The request is parked.                                       both hold
//   5. With that step, before the forward pass and on its thread, each decode rank posts READs: one
//      descriptor per KV region and per run of blocks consecutive on both sides. Everyone in the step
//      waits for the posting.
//   6. Data moves while forward passes run. Each step's end polls.
//   7. Landed: the next schedule promotes the request; one step computes the last prompt token again
//      and yields token 1. A notification goes to prefill.                          decode holds
//   8. Prefill frees the blocks at the end of the step in which it sees the notification.
// The cluster runs these steps; this file holds their arithmetic. Facts: descriptors are
// regions x runs (NIXL merges a run only while both ids grow by one and the stride is dense, never
// across regions); a rank posts serially, its ranks side by side.
#pragma once

#include <cstdint>

#include "sim/core/time.hpp"

namespace pdsim {

/// One decode rank's reads of one request, the same for every rank.
struct PullLayout {
  std::int32_t ranks = 1;      ///< decode ranks, each posting its own
  std::int32_t sources = 1;    ///< prefill ranks that one decode rank reads from
  std::int32_t regions = 0;    ///< KV regions of one decode rank
  bool mergeable = true;       ///< consecutive blocks are one descriptor: both sides hold the same heads
  double bytes_per_token = 0;  ///< that one decode rank receives
};

/// `kv_heads` 0 means MLA: the latent is on every rank, so each decode rank reads all of it from one
/// prefill rank. Otherwise heads are split: a decode rank reads from as many prefill ranks as hold its
/// heads, and where the two sides hold different numbers of heads their slices of a block are not
/// contiguous, so every block is a descriptor of its own.
PullLayout pull_layout(std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp,
                       std::int32_t regions, double decode_bytes_per_token);

/// The prefill rank that decode rank `rank` reads its `source`-th part from.
std::int32_t source_rank(const PullLayout& layout, std::int32_t prefill_tp, std::int32_t rank,
                         std::int32_t source);

/// Descriptors that one rank posts for `blocks` blocks in `runs` runs consecutive on both sides.
std::int64_t descriptors(const PullLayout& layout, std::int32_t runs, std::int32_t blocks);

/// What the forward thread spends on posting them: `fixed` for each source, and each descriptor's own.
Nanos posting_time(const PullLayout& layout, Nanos fixed, Nanos per_descriptor, std::int64_t descriptors);

/// Lease and heartbeat constants that vLLM hard-codes as fractions of kv_lease_duration.
inline constexpr Nanos heartbeat_interval(Nanos lease) {
  return lease / 6;
}
inline constexpr Nanos heartbeat_extension(Nanos lease) {
  return lease * 2 / 3;
}

}  // namespace pdsim
