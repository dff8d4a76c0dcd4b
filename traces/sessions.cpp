#include "traces/sessions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;
constexpr std::size_t kFoundPerChance = 100;  // turns found for each that is expected to be chance

// A full block after all that stands before it. Only looked up, never walked.
struct Edge {
  std::uint32_t parent;
  std::uint64_t id;
  bool operator==(const Edge&) const = default;
};
struct EdgeHash {
  std::size_t operator()(const Edge& edge) const {
    std::uint64_t x = (edge.id ^ std::uint64_t{edge.parent} << 32) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32 ^ edge.parent) * 0xd6e8feb86659fd93u;
    return static_cast<std::size_t>(x ^ x >> 32);
  }
};

struct Block {
  std::uint32_t last = kNone;  // of the requests that came through, other than by way of a deeper end
  bool end = false;            // some prompt's last full block
  bool grows = true;           // each of them continues the one before
  bool shrinks = true;         // each is continued by the one before: the same with time reversed
};

// The blocks of a trace as a tree, and what the requests do in it.
struct Chains {
  std::vector<std::uint32_t> end_of;    // block in which a request's full blocks end
  std::vector<std::uint32_t> next;      // the request that continues it, where its end_of grows
  std::vector<std::uint32_t> mirrored;  // the same with time reversed, where its end_of shrinks
  std::vector<Block> blocks;
  std::uint64_t candidates = 0;  // requests that begin with all full blocks of an earlier one
};

bool same_prompt(const Trace& trace, const Request& a, const Request& b) {
  return a.prompt_tokens == b.prompt_tokens && std::ranges::equal(trace.ids_of(a), trace.ids_of(b));
}

// Whether `longer` has room for all of `shorter`, its answer and a message.
bool fits(const Request& shorter, const Request& longer) {
  return std::int64_t{longer.prompt_tokens} > std::int64_t{shorter.prompt_tokens} + shorter.output_tokens;
}

Chains find_chains(const Trace& trace) {
  const std::size_t n = trace.requests.size();
  Chains c{std::vector(n, kNone), std::vector(n, kNone), std::vector(n, kNone), {}, 0};
  std::unordered_map<Edge, std::uint32_t, EdgeHash> tree;
  tree.reserve(trace.hash_ids.size());
  std::vector<std::uint32_t> path;
  for (std::uint32_t z = 0; z < n; ++z) {
    const Request& request = trace.requests[z];
    const auto ids = trace.ids_of(request);
    const auto full =
        std::min(ids.size(), static_cast<std::size_t>(request.prompt_tokens / trace.hash_block_tokens));
    if (full == 0) continue;
    path.clear();
    std::size_t deepest_end = 0;  // the block to begin with: above it all is judged there
    bool candidate = false;
    for (std::size_t i = 0; i < full; ++i) {
      const Edge edge{path.empty() ? kNone : path.back(), ids[i]};
      const auto [entry, is_new] = tree.try_emplace(edge, static_cast<std::uint32_t>(c.blocks.size()));
      if (is_new) c.blocks.emplace_back();
      path.push_back(entry->second);
      if (!c.blocks[path.back()].end) continue;
      deepest_end = i;
      candidate = true;
    }
    c.candidates += candidate ? 1 : 0;
    c.end_of[z] = path.back();
    for (std::size_t i = deepest_end; i < full; ++i) {
      Block& block = c.blocks[path[i]];
      const std::uint32_t a = block.last;
      block.last = z;
      if (a == kNone || same_prompt(trace, trace.requests[a], request)) continue;
      const Request& before = trace.requests[a];
      const bool later = before.arrival < request.arrival;
      if (later && c.end_of[a] == path[i] && fits(before, request)) {
        c.next[a] = z;
      } else {
        block.grows = false;
      }
      if (later && c.end_of[z] == path[i] && fits(request, before)) {
        c.mirrored[z] = a;
      } else {
        block.shrinks = false;
      }
    }
    c.blocks[path.back()].end = true;
  }
  for (std::size_t r = 0; r < n; ++r) {
    if (c.end_of[r] == kNone) continue;
    if (!c.blocks[c.end_of[r]].grows) c.next[r] = kNone;
    if (!c.blocks[c.end_of[r]].shrinks) c.mirrored[r] = kNone;
  }
  return c;
}

std::vector<std::int32_t> answers_of(const Trace& trace, const std::vector<std::uint32_t>& links) {
  std::vector<std::int32_t> answers;
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r] != kNone) answers.push_back(trace.requests[r].output_tokens);
  }
  std::ranges::sort(answers);
  return answers;
}

}  // namespace

InferredSessions infer_sessions(Trace& trace) {
  InferredSessions result;
  if (!trace.sessions.empty()) {
    result.recorded = true;
    result.text = fmt::format("{} sessions are recorded: none inferred", trace.sessions.size());
    return result;
  }
  if (trace.hash_block_tokens <= 0) {
    throw InputError(trace.name,
                     "has no hash ids, expected a trace with prefix identity to infer sessions from");
  }
  Chains chains = find_chains(trace);

  const std::vector<std::int32_t> found = answers_of(trace, chains.next);
  const std::vector<std::int32_t> chance = answers_of(trace, chains.mirrored);
  std::size_t skip = 0;  // of `chance`: the shortest answers
  const auto at_least = [&](std::int32_t tokens) {
    return static_cast<std::size_t>(found.end() - std::ranges::lower_bound(found, tokens));
  };
  while ((chance.size() - skip) * kFoundPerChance > at_least(result.least_answer)) {
    result.least_answer = chance[skip] + 1;
    while (skip < chance.size() && chance[skip] < result.least_answer) ++skip;
  }
  result.backwards = chance.size() - skip;

  std::vector<bool> continues(trace.requests.size(), false);
  for (std::size_t r = 0; r < chains.next.size(); ++r) {
    std::uint32_t& next = chains.next[r];
    if (next == kNone) continue;
    if (trace.requests[r].output_tokens < result.least_answer) {
      next = kNone;
    } else {
      continues[next] = true;
      ++result.turns;
    }
  }
  for (std::uint32_t r = 0; r < chains.next.size(); ++r) {
    if (continues[r] || chains.next[r] == kNone) continue;
    std::int32_t turn = 0;
    for (std::uint32_t at = r; at != kNone; at = chains.next[at]) {
      trace.requests[at].session = static_cast<std::int32_t>(result.sessions);
      trace.requests[at].turn = turn++;
    }
    trace.sessions.push_back(fmt::format("inferred-{}", result.sessions++));
  }
  result.ambiguous = chains.candidates - result.turns;

  result.text = fmt::format(
      "{} later turns found, in {} sessions inferred from hash ids; {} more requests begin like an earlier "
      "one and are left alone: others begin so too, or its answer does not fit; with time reversed, where "
      "no turn can be, {} would be found",
      result.turns, result.sessions, result.ambiguous, result.backwards);
  if (result.least_answer > 0) {
    result.text +=
        fmt::format("; only turns after answers of {} tokens or more: else over 1 in {} would be chance",
                    result.least_answer, kFoundPerChance);
  }
  return result;
}

std::vector<std::int32_t> previous_turns(const Trace& trace) {
  std::vector<std::int32_t> previous(trace.requests.size(), -1), last(trace.sessions.size(), -1);
  for (std::size_t r = 0; r < trace.requests.size(); ++r) {
    const std::int32_t session = trace.requests[r].session;
    if (session < 0) continue;
    std::int32_t& before = last[static_cast<std::size_t>(session)];
    previous[r] = before;
    before = static_cast<std::int32_t>(r);
  }
  return previous;
}

ClosedThinkTimes closed_think_times(const Trace& trace, const std::optional<ReferenceService>& reference) {
  PDSIM_CHECK(!reference || (reference->ttft >= 0 && reference->per_token >= 0), "a negative service time");
  ClosedThinkTimes result;
  const std::vector<std::int32_t> previous = previous_turns(trace);
  result.pause.assign(trace.requests.size(), -1);
  for (std::size_t r = 0; r < trace.requests.size(); ++r) {
    if (previous[r] < 0) continue;
    const Request& request = trace.requests[r];
    const Request& before = trace.requests[static_cast<std::size_t>(previous[r])];
    if (request.think_time >= 0) {
      result.pause[r] = request.think_time;
      ++result.recorded;
      continue;
    }
    if (!reference) {
      throw InputError(
          fmt::format("{}: request {}", trace.name, r),
          fmt::format("turn {} of session '{}' has no think time, expected `delay` in its row, or "
                      "workload.reference_ttft_ms and workload.reference_tpot_ms to derive it",
                      request.turn, trace.sessions[static_cast<std::size_t>(request.session)]));
    }
    // The product may pass int64: whether it would is asked first.
    const Nanos left = request.arrival - before.arrival - reference->ttft;
    const Nanos tokens = std::max(before.output_tokens - 1, 0);
    const bool enough = left >= 0 && (reference->per_token == 0 || tokens <= left / reference->per_token);
    result.pause[r] = enough ? left - tokens * reference->per_token : 0;
    ++result.derived;
    if (!enough) ++result.floored;
  }
  return result;
}

}  // namespace pdsim
