#include "traces/stats.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "sim/core/math.hpp"
#include "traces/reshape.hpp"

namespace pdsim {

namespace {

void describe_arrivals(const Trace& trace, TraceStats& stats) {
  std::vector<double> per_stamp;
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const Nanos gap = i == 0 ? 1 : trace.requests[i].arrival - trace.requests[i - 1].arrival;
    if (gap > 0) per_stamp.push_back(0);
    per_stamp.back() += 1;
    if (i == 0) continue;
    sum += to_seconds(gap);
    squares += to_seconds(gap) * to_seconds(gap);
  }
  const auto n = static_cast<double>(trace.requests.size() - 1);
  if (sum > 0) stats.gap_cv = math::sqrt(std::max(0.0, squares / n - sum / n * (sum / n))) / (sum / n);
  stats.stamps = per_stamp.size();
  stats.requests_per_stamp = distribution_of(std::move(per_stamp));
}

// Hash ids as 0, 1, ...: themselves where they are small, as in the published traces, else their rank.
std::vector<std::uint32_t> dense_ids(const std::vector<std::uint64_t>& ids, std::size_t& count) {
  std::vector<std::uint32_t> dense(ids.size());
  count = ids.empty() ? 0
                      : 1 + static_cast<std::size_t>(std::min<std::uint64_t>(
                                *std::max_element(ids.begin(), ids.end()), UINT64_MAX - 1));
  if (count <= 2 * ids.size()) {
    std::transform(ids.begin(), ids.end(), dense.begin(),
                   [](std::uint64_t id) { return static_cast<std::uint32_t>(id); });
    return dense;
  }
  std::vector<std::uint64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  count = sorted.size();
  std::transform(ids.begin(), ids.end(), dense.begin(), [&](std::uint64_t id) {
    return static_cast<std::uint32_t>(std::lower_bound(sorted.begin(), sorted.end(), id) - sorted.begin());
  });
  return dense;
}

// Counts of marks on a line, by prefix (Fenwick's tree).
class Marks {
 public:
  explicit Marks(std::size_t n) : tree_(n + 1, 0) {}
  void add(std::size_t at, std::int32_t change) {
    for (std::size_t i = at + 1; i < tree_.size(); i += i & (~i + 1)) tree_[i] += change;
  }
  std::int64_t up_to(std::size_t at) const {
    std::int64_t sum = 0;
    for (std::size_t i = at + 1; i > 0; i &= i - 1) sum += tree_[i];
    return sum;
  }

 private:
  std::vector<std::int32_t> tree_;
};

// Every use of a block is a mark on a line of uses, in order, and only a block's last use keeps its mark: the
// marks after it count the distinct blocks used since, which is its depth in an LRU stack.
void describe_reuse(const Trace& trace, TraceStats& stats) {
  constexpr std::uint32_t kNone = UINT32_MAX;
  std::size_t distinct = 0;
  const std::vector<std::uint32_t> ids = dense_ids(trace.hash_ids, distinct);
  std::vector<std::uint32_t> last_use(distinct, kNone), last_request(distinct, kNone),
      parent(distinct, kNone);
  std::vector<bool> unchained(distinct, false);
  Marks marks(ids.size());
  std::int64_t marked = 0;
  std::size_t uses = 0;
  std::uint64_t seen = 0, ideal_blocks = 0;
  std::vector<std::uint64_t> hits_by_depth(
      65, 0);  // [k]: blocks that a cache of 2^k blocks, but none of 2^(k-1), hits
  std::vector<double> gaps;

  for (std::size_t r = 0; r < trace.requests.size(); ++r) {
    const Request& request = trace.requests[r];
    const std::uint32_t* block = ids.data() + request.hash_begin;
    const auto count = static_cast<std::size_t>(request.hash_count);
    const auto usable = static_cast<std::size_t>((request.prompt_tokens - 1) / trace.hash_block_tokens);
    std::int64_t depth = 0;  // of the deepest so far: a block is a hit only when all before it are
    bool leading = true;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t id = block[i];
      const std::uint32_t before = i == 0 ? kNone - 1 : block[i - 1];
      if (parent[id] == kNone) parent[id] = before;
      if (parent[id] != before) unchained[id] = true;
      if (last_use[id] == kNone) {
        leading = false;
        continue;
      }
      ++seen;
      gaps.push_back(to_seconds(request.arrival - trace.requests[last_request[id]].arrival));
      if (!leading || i >= usable) continue;
      depth = std::max(depth, marked - marks.up_to(last_use[id]));
      ++hits_by_depth[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(depth)))];
      ++ideal_blocks;
    }
    for (std::size_t i = count; i-- > 0;) {
      const std::uint32_t id = block[i];
      if (last_use[id] != kNone) {
        marks.add(last_use[id], -1);
        --marked;
      }
      marks.add(uses, +1);
      ++marked;
      last_use[id] = static_cast<std::uint32_t>(uses++);
      last_request[id] = static_cast<std::uint32_t>(r);
    }
  }

  const double block_share =
      static_cast<double>(trace.hash_block_tokens) / static_cast<double>(stats.prompt_tokens_total);
  stats.hash_block_tokens = trace.hash_block_tokens;
  stats.blocks = ids.size();
  stats.distinct_blocks = static_cast<std::uint64_t>(marked);
  stats.seen_before_share = static_cast<double>(seen) / static_cast<double>(ids.size());
  stats.ideal_hit_share = block_share * static_cast<double>(ideal_blocks);
  stats.reuse_gap_s = distribution_of(std::move(gaps));
  stats.unchained_ids = static_cast<std::uint64_t>(std::count(unchained.begin(), unchained.end(), true));
  std::uint64_t hits = 0;
  for (std::size_t k = 0; hits < ideal_blocks; ++k) {
    hits += hits_by_depth[k];
    stats.lru.push_back(
        {(std::int64_t{1} << k) * trace.hash_block_tokens, block_share * static_cast<double>(hits)});
  }
}

void describe_sessions(const Trace& trace, TraceStats& stats) {
  std::vector<double> turns(trace.sessions.size(), 0), gaps, pauses;
  std::vector<Nanos> last(trace.sessions.size(), -1);
  for (const Request& request : trace.requests) {
    if (request.session < 0) continue;
    const auto session = static_cast<std::size_t>(request.session);
    turns[session] += 1;
    if (last[session] >= 0) gaps.push_back(to_seconds(request.arrival - last[session]));
    if (request.think_time >= 0) pauses.push_back(to_seconds(request.think_time));
    last[session] = request.arrival;
  }
  stats.sessions = turns.size();
  stats.multi_turn_sessions =
      static_cast<std::uint64_t>(std::count_if(turns.begin(), turns.end(), [](double n) { return n > 1; }));
  stats.turns = distribution_of(std::move(turns));
  stats.turn_gap_s = distribution_of(std::move(gaps));
  stats.think_time_s = distribution_of(std::move(pauses));
}

}  // namespace

TraceStats trace_stats(const Trace& trace) {
  TraceStats stats;
  stats.name = trace.name;
  stats.format = trace.format;
  stats.sha256 = trace.sha256;
  stats.report = trace.report;
  stats.requests = trace.requests.size();
  if (trace.requests.empty()) return stats;
  stats.span_s = to_seconds(span_of(trace));
  stats.rate = rate_of(trace);
  std::vector<double> prompt, output;
  for (const Request& request : trace.requests) {
    stats.prompt_tokens_total += request.prompt_tokens;
    stats.output_tokens_total += request.output_tokens;
    prompt.push_back(request.prompt_tokens);
    output.push_back(request.output_tokens);
  }
  stats.prompt_tokens = distribution_of(std::move(prompt));
  stats.output_tokens = distribution_of(std::move(output));
  describe_arrivals(trace, stats);
  if (trace.hash_block_tokens > 0) describe_reuse(trace, stats);
  if (!trace.sessions.empty()) describe_sessions(trace, stats);
  return stats;
}

namespace {

nlohmann::ordered_json json_of(const Distribution& d) {
  return {{"mean", d.mean}, {"p50", d.p50}, {"p90", d.p90}, {"p95", d.p95},
          {"p99", d.p99},   {"max", d.max}, {"n", d.n}};
}

std::string row_of(std::string_view name, const Distribution& d, int decimals) {
  return fmt::format("  {:<22}{:>12.{}f}{:>12.{}f}{:>12.{}f}{:>12.{}f}{:>12.{}f}\n", name, d.mean, decimals,
                     d.p50, decimals, d.p90, decimals, d.p99, decimals, d.max, decimals);
}

}  // namespace

std::string stats_table(const TraceStats& s) {
  std::string text = fmt::format("{} ({})\n", s.name, s.format);
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<22}{}\n", name, value);
  };
  line("rows",
       fmt::format("{} read, {} used, {} set aside, {} out of order", s.report.rows_read, s.report.rows_used,
                   s.report.rows_read - s.report.rows_used, s.report.rows_out_of_order));
  for (const std::string& reason : s.report.set_aside) line("  set aside", reason);
  line("requests", fmt::format("{} in {:.1f} s, {:.3f} per second", s.requests, s.span_s, s.rate));
  line("arrivals",
       fmt::format("{} distinct stamps, coefficient of variation of gaps {:.2f}", s.stamps, s.gap_cv));
  line("prompt tokens", fmt::format("{}", s.prompt_tokens_total));
  line("output tokens", fmt::format("{}", s.output_tokens_total));
  if (s.hash_block_tokens == 0) {
    line("prefix reuse", "unknown: the trace has no prefix identity");
  } else {
    line("hash ids", fmt::format("{} of {} tokens, {} distinct, {:.1f} % seen before", s.blocks,
                                 s.hash_block_tokens, s.distinct_blocks, 100 * s.seen_before_share));
    if (s.unchained_ids > 0)
      line("", fmt::format("{} ids follow different ids in different prompts: no prefix hashes",
                           s.unchained_ids));
    line("ideal prefix hits",
         fmt::format("{:.1f} % of prompt tokens, with a cache without limit", 100 * s.ideal_hit_share));
  }
  line("sessions", s.sessions == 0 ? "none recorded"
                                   : fmt::format("{}, {} of them with more than one turn", s.sessions,
                                                 s.multi_turn_sessions));

  text += fmt::format("\n  {:<22}{:>12}{:>12}{:>12}{:>12}{:>12}\n", "per request", "mean", "p50", "p90",
                      "p99", "max");
  text += row_of("prompt tokens", s.prompt_tokens, 0);
  text += row_of("output tokens", s.output_tokens, 0);
  text += row_of("requests per stamp", s.requests_per_stamp, 1);
  if (s.reuse_gap_s.n > 0) text += row_of("block reuse gap, s", s.reuse_gap_s, 1);
  if (s.turns.n > 0) text += row_of("turns per session", s.turns, 1);
  if (s.turn_gap_s.n > 0) text += row_of("between turns, s", s.turn_gap_s, 1);
  if (s.think_time_s.n > 0) text += row_of("think time, s", s.think_time_s, 1);

  if (!s.lru.empty()) {
    text += fmt::format("\n  {:<22}{:>12}\n", "LRU cache, tokens", "hit share");
    double shown = 0;
    for (const auto& [tokens, share] : s.lru) {
      if (share - shown < 0.0005) continue;  // a larger cache that changes no digit
      shown = share;
      text += fmt::format("  {:<22}{:>10.1f} %\n", tokens, 100 * share);
    }
  }
  return text;
}

std::string stats_json(const TraceStats& s) {
  using json = nlohmann::ordered_json;
  json lru = json::array();
  for (const auto& [tokens, share] : s.lru) lru.push_back({{"cache_tokens", tokens}, {"hit_share", share}});
  const json document = {
      {"schema", "pdsim.trace-stats/1"},
      {"trace",
       {{"name", s.name},
        {"format", s.format},
        {"sha256", s.sha256},
        {"rows_read", s.report.rows_read},
        {"rows_used", s.report.rows_used},
        {"rows_out_of_order", s.report.rows_out_of_order},
        {"set_aside", s.report.set_aside}}},
      {"requests", s.requests},
      {"span_s", s.span_s},
      {"requests_per_s", s.rate},
      {"prompt_tokens_total", s.prompt_tokens_total},
      {"output_tokens_total", s.output_tokens_total},
      {"prompt_tokens", json_of(s.prompt_tokens)},
      {"output_tokens", json_of(s.output_tokens)},
      {"arrivals",
       {{"gap_cv", s.gap_cv}, {"stamps", s.stamps}, {"requests_per_stamp", json_of(s.requests_per_stamp)}}},
      {"reuse",
       {{"hash_block_tokens", s.hash_block_tokens},
        {"blocks", s.blocks},
        {"distinct_blocks", s.distinct_blocks},
        {"seen_before_share", s.seen_before_share},
        {"ideal_hit_share", s.ideal_hit_share},
        {"gap_s", json_of(s.reuse_gap_s)},
        {"lru", lru},
        {"unchained_ids", s.unchained_ids}}},
      {"sessions",
       {{"count", s.sessions},
        {"multi_turn", s.multi_turn_sessions},
        {"turns", json_of(s.turns)},
        {"turn_gap_s", json_of(s.turn_gap_s)},
        {"think_time_s", json_of(s.think_time_s)}}}};
  return document.dump(2) + "\n";
}

std::string stats_schema() {
  return R"({
  "$schema": "http://json-schema.org/draft-07/schema#",
  "$id": "pdsim.trace-stats/1",
  "title": "What is in a trace: pdsim trace stats --json",
  "type": "object",
  "definitions": {
    "count": {"type": "integer", "minimum": 0},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "distribution": {
      "type": "object",
      "description": "Percentiles are numpy's linear ones; all 0 when n is 0",
      "properties": {
        "mean": {"type": "number"}, "p50": {"type": "number"}, "p90": {"type": "number"},
        "p95": {"type": "number"}, "p99": {"type": "number"}, "max": {"type": "number"},
        "n": {"$ref": "#/definitions/count"}
      },
      "required": ["mean", "p50", "p90", "p95", "p99", "max", "n"]
    }
  },
  "properties": {
    "schema": {"const": "pdsim.trace-stats/1"},
    "trace": {
      "type": "object",
      "properties": {
        "name": {"type": "string"}, "format": {"type": "string"},
        "sha256": {"type": "string", "description": "of the bytes as stored"},
        "rows_read": {"$ref": "#/definitions/count"}, "rows_used": {"$ref": "#/definitions/count"},
        "rows_out_of_order": {"$ref": "#/definitions/count"},
        "set_aside": {"type": "array", "items": {"type": "string"}}
      },
      "required": ["name", "format", "sha256", "rows_read", "rows_used", "rows_out_of_order", "set_aside"]
    },
    "requests": {"$ref": "#/definitions/count"},
    "span_s": {"type": "number", "description": "first arrival to last"},
    "requests_per_s": {"type": "number", "description": "(requests - 1) / span"},
    "prompt_tokens_total": {"$ref": "#/definitions/count"},
    "output_tokens_total": {"$ref": "#/definitions/count"},
    "prompt_tokens": {"$ref": "#/definitions/distribution"},
    "output_tokens": {"$ref": "#/definitions/distribution"},
    "arrivals": {
      "type": "object",
      "properties": {
        "gap_cv": {"type": "number", "description": "standard deviation over mean of the gaps; 1 for Poisson"},
        "stamps": {"$ref": "#/definitions/count"},
        "requests_per_stamp": {"$ref": "#/definitions/distribution"}
      },
      "required": ["gap_cv", "stamps", "requests_per_stamp"]
    },
    "reuse": {
      "type": "object",
      "description": "Prefix reuse; all 0 when hash_block_tokens is 0: the format has no prefix identity",
      "properties": {
        "hash_block_tokens": {"$ref": "#/definitions/count"},
        "blocks": {"$ref": "#/definitions/count"}, "distinct_blocks": {"$ref": "#/definitions/count"},
        "seen_before_share": {"$ref": "#/definitions/share"},
        "ideal_hit_share": {"$ref": "#/definitions/share",
          "description": "of prompt tokens, with a prefix cache without limit"},
        "gap_s": {"$ref": "#/definitions/distribution"},
        "lru": {
          "type": "array",
          "items": {
            "type": "object",
            "properties": {"cache_tokens": {"$ref": "#/definitions/count"},
                           "hit_share": {"$ref": "#/definitions/share"}},
            "required": ["cache_tokens", "hit_share"]
          }
        },
        "unchained_ids": {"$ref": "#/definitions/count"}
      },
      "required": ["hash_block_tokens", "blocks", "distinct_blocks", "seen_before_share", "ideal_hit_share",
                   "gap_s", "lru", "unchained_ids"]
    },
    "sessions": {
      "type": "object",
      "properties": {
        "count": {"$ref": "#/definitions/count"}, "multi_turn": {"$ref": "#/definitions/count"},
        "turns": {"$ref": "#/definitions/distribution"}, "turn_gap_s": {"$ref": "#/definitions/distribution"},
        "think_time_s": {"$ref": "#/definitions/distribution"}
      },
      "required": ["count", "multi_turn", "turns", "turn_gap_s", "think_time_s"]
    }
  },
  "required": ["schema", "trace", "requests", "span_s", "requests_per_s", "prompt_tokens_total",
               "output_tokens_total", "prompt_tokens", "output_tokens", "arrivals", "reuse", "sessions"]
}
)";
}

}  // namespace pdsim
