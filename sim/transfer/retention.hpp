// What decode keeps of finished turns, and what it lets go of first.
//
// A retained sequence is useful as far as it is kept without a gap from its first token, so it is only
// ever cut from its end. Its cuts are ranges in order; a range lives no longer, and counts for no more,
// than those before it. A new policy is a row in kRetentions, a case here and a test.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/scenario/scenario.hpp"

namespace pdsim {

/// The tokens [.., until) of a retained sequence, from the end of the range before.
struct RetainedRange {
  std::int32_t until = 0;
  std::int32_t priority = 0;
  Nanos expiry = 0;
};

/// The ranges of a sequence of `tokens` that ends at `now`: one of `ttl` for ttl and lru, one without an end
/// for belady. For priority the configured ranges that cover a token first; priority and expiry never grow
/// along the sequence. Neighbours that are alike are one. O(configured ranges squared).
std::vector<RetainedRange> retained_ranges(const RetentionConfig& config, Nanos ttl, std::int32_t tokens,
                                           Nanos now);

/// Whether requests that lack blocks get those of retained sequences, as far as none is being read.
constexpr bool gives_way(Retention policy) {
  return policy == Retention::priority || policy == Retention::belady;
}

/// What one retained sequence offers to be let go of: its last range.
struct RetainedTail {
  std::uint32_t id = 0;
  std::int32_t priority = 0;
  Nanos since = 0;          ///< when its turn ended
  Nanos next_use = kNever;  ///< belady: when it will be asked for; kNever = not any more
};

/// Index of the tail to go first: the oldest (lru), the oldest of the least priority, or the one that is
/// asked for last (belady). Requires a policy other than ttl and !tails.empty(). O(tails).
///
/// Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5, 1966):
/// with pieces of one size, each wanted once more at a known time or never, what goes is what is wanted
/// last, the newest piece itself included; no other choice serves more of them.
std::size_t first_to_go(Retention policy, std::span<const RetainedTail> tails);

}  // namespace pdsim
