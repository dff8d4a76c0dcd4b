#include "traces/reshape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "sim/core/error.hpp"

namespace pdsim {

Nanos span_of(const Trace& trace) {
  return trace.requests.empty() ? 0 : trace.requests.back().arrival - trace.requests.front().arrival;
}

double rate_of(const Trace& trace) {
  const Nanos span = span_of(trace);
  return span == 0 ? 0.0 : static_cast<double>(trace.requests.size() - 1) / to_seconds(span);
}

void scale_time(Trace& trace, double factor) {
  if (factor == 1.0) return;
  const auto scaled = [&](Nanos time) {
    const double ns = std::floor(static_cast<double>(time) / factor + 0.5);
    if (!(ns < 0x1p62)) {
      throw InputError(trace.name, fmt::format("time scale {}: {} ns would pass 2^62 ns", factor, time));
    }
    return static_cast<Nanos>(ns);
  };
  for (Request& request : trace.requests) {
    request.arrival = scaled(request.arrival);
    if (request.think_time >= 0) request.think_time = scaled(request.think_time);
  }
}

namespace {

// The least number of old blocks, `most` at most, that hold the first `blocks` new ones.
std::int32_t holding(std::int32_t blocks, double factor, std::int32_t most) {
  if (most * factor < blocks) return most;
  auto old = static_cast<std::int32_t>(std::ceil(blocks / factor));
  while (old > 1 && (old - 1) * factor >= blocks) --old;  // what the division has rounded
  while (old * factor < blocks) ++old;
  return old;
}

}  // namespace

void scale_prompts(Trace& trace, double factor) {
  if (factor == 1.0) return;
  // The new id of copy c of an id: numbered by first appearance, so that equal is equal and no two collide.
  std::map<std::pair<std::uint64_t, std::int32_t>, std::uint64_t> renamed;
  std::vector<std::uint64_t> ids;
  for (Request& request : trace.requests) {
    const double tokens = std::floor(request.prompt_tokens * factor + 0.5);
    if (!(tokens <= INT32_MAX)) {
      throw InputError(trace.name, fmt::format("prompt scale {}: a prompt of {} tokens would pass 2^31 - 1",
                                               factor, request.prompt_tokens));
    }
    const std::int32_t old_blocks =
        trace.hash_block_tokens == 0 ? 0 : (request.prompt_tokens - 1) / trace.hash_block_tokens + 1;
    request.prompt_tokens = std::max(1, static_cast<std::int32_t>(tokens));
    if (request.hash_count == 0) continue;
    const std::span<const std::uint64_t> old = trace.ids_of(request);
    const bool to_the_end = old.size() == static_cast<std::size_t>(old_blocks);
    const std::int32_t blocks =
        to_the_end ? (request.prompt_tokens - 1) / trace.hash_block_tokens + 1
                   : static_cast<std::int32_t>(std::floor(static_cast<double>(old.size()) * factor));
    request.hash_begin = ids.size();
    request.hash_count = blocks;
    std::int32_t last = -1, copy = 0;
    for (std::int32_t b = 0; b < blocks; ++b) {
      // What decides whether this block is the same: the last of those that it is made of.
      const std::int32_t from = holding(b + 1, factor, static_cast<std::int32_t>(old.size())) - 1;
      copy = from == last ? copy + 1 : 0;
      last = from;
      ids.push_back(
          renamed.try_emplace({old[static_cast<std::size_t>(from)], copy}, renamed.size()).first->second);
    }
  }
  trace.hash_ids = std::move(ids);
}

}  // namespace pdsim
