#include "sim/transfer/retention.hpp"

#include <algorithm>

namespace pdsim {

namespace {

constexpr std::int32_t kUsualPriority = 35;  // TensorRT-LLM's kDefaultRetentionPriority

}  // namespace

std::vector<RetainedRange> retained_ranges(const RetentionConfig& config, Nanos ttl, std::int32_t tokens,
                                           Nanos now) {
  if (config.policy == Retention::belady) return {{tokens, kUsualPriority, kNever}};
  if (config.policy != Retention::priority) return {{tokens, kUsualPriority, now + ttl}};
  std::vector<std::int32_t> cuts{tokens};
  for (const RetentionRange& range : config.ranges) {
    for (const std::int32_t cut : {range.from_token, range.to_token}) {
      if (cut > 0 && cut < tokens) cuts.push_back(cut);
    }
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<RetainedRange> out;
  std::int32_t from = 0;
  for (const std::int32_t until : cuts) {
    if (until == from) continue;
    RetainedRange kept{until, kUsualPriority, now + ttl};
    for (const RetentionRange& range : config.ranges) {
      if (from < range.from_token || (range.to_token > 0 && from >= range.to_token)) continue;
      kept.priority = range.priority;
      if (range.duration > 0) kept.expiry = now + range.duration;
      break;
    }
    if (!out.empty()) {
      kept.priority = std::min(kept.priority, out.back().priority);
      kept.expiry = std::min(kept.expiry, out.back().expiry);
      if (kept.priority == out.back().priority && kept.expiry == out.back().expiry) out.pop_back();
    }
    out.push_back(kept);
    from = until;
  }
  return out;
}

std::size_t first_to_go(Retention policy, std::span<const RetainedTail> tails) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < tails.size(); ++i) {
    const RetainedTail &a = tails[i], &b = tails[best];
    if (policy == Retention::priority && a.priority != b.priority) {
      if (a.priority < b.priority) best = i;
    } else if (policy == Retention::belady && a.next_use != b.next_use) {
      if (a.next_use > b.next_use) best = i;
    } else if (a.since != b.since ? a.since < b.since : a.id < b.id) {
      best = i;
    }
  }
  return best;
}

}  // namespace pdsim
