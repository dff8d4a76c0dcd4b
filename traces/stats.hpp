// What is in a trace that matters for serving it: load, lengths, bursts, prefix reuse, conversations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/core/histogram.hpp"
#include "traces/trace.hpp"

namespace pdsim {

struct TraceStats {
  std::string name, format, sha256;
  LoadReport report;
  std::uint64_t requests = 0;
  double span_s = 0;  ///< first arrival to last
  double rate = 0;    ///< requests per second

  std::int64_t prompt_tokens_total = 0, output_tokens_total = 0;
  Distribution prompt_tokens, output_tokens;

  double gap_cv = 0;         ///< standard deviation over mean of the gaps between arrivals: 1 for Poisson
  std::uint64_t stamps = 0;  ///< distinct times of arrival
  Distribution requests_per_stamp;

  std::int32_t hash_block_tokens = 0;  ///< 0 = no prefix identity; then all below stays 0
  std::uint64_t blocks = 0;            ///< hash ids in all prompts
  std::uint64_t distinct_blocks = 0;
  double seen_before_share = 0;  ///< of blocks, those that an earlier request had
  /// Of prompt tokens, those that a prefix cache without limit could hold: a request's leading full blocks
  /// that earlier ones had, never its last token.
  double ideal_hit_share = 0;
  Distribution reuse_gap_s;  ///< from the last use of a block to this one
  /// The same share for an LRU cache of so many tokens (Mattson's stack distances, IBM Systems J. 9, 1970). A
  /// request uses its blocks from last to first, as vLLM frees them, so beginnings stay longest.
  struct CacheShare {
    std::int64_t cache_tokens = 0;
    double hit_share = 0;
  };
  std::vector<CacheShare> lru;
  /// Ids that stand after different ids in different prompts: 0 in a sound trace, where an id is the hash
  /// of everything up to its end.
  std::uint64_t unchained_ids = 0;

  std::uint64_t sessions = 0, multi_turn_sessions = 0;
  Distribution turns;         ///< per session
  Distribution turn_gap_s;    ///< from a turn's arrival to the next one's
  Distribution think_time_s;  ///< where recorded
};

/// O(n log n + ids log ids); about 40 bytes a hash id while it runs.
TraceStats trace_stats(const Trace& trace);

/// For people, a line ending included.
std::string stats_table(const TraceStats& stats);
/// "pdsim.trace-stats/1", one document, a line ending included.
std::string stats_json(const TraceStats& stats);
/// The JSON Schema of that document.
std::string stats_schema();

}  // namespace pdsim
