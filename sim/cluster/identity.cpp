#include "sim/cluster/identity.hpp"

#include <algorithm>

namespace pdsim {

namespace {

constexpr std::int32_t kOwnRun = 32;  // blocks to a run without hash ids

// A bijection on 64 bits whose output bits all depend on all input bits (the finalizer of SplitMix64).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::int64_t length(const Request& r) {
  return std::int64_t{r.prompt_tokens} + r.output_tokens;
}

bool extends(const Trace& trace, const Request& before, const Request& next) {
  if (next.prompt_tokens < length(before)) return false;
  if (trace.hash_block_tokens == 0) return true;
  const auto full = static_cast<std::size_t>(before.prompt_tokens / trace.hash_block_tokens);
  const auto a = trace.ids_of(before), b = trace.ids_of(next);
  return full <= a.size() && full <= b.size() && std::ranges::equal(a.first(full), b.first(full));
}

// Blocks [first, last) in runs named by `request` and where they begin.
void append_own(std::uint32_t request, std::int32_t first, std::int32_t last, std::vector<HashRun>& out) {
  const std::uint64_t own = mix(~std::uint64_t{request});
  for (; first < last; first += kOwnRun) {
    out.push_back({mix(own ^ mix(static_cast<std::uint64_t>(first))), std::min(kOwnRun, last - first)});
  }
}

// The first `blocks` blocks of the request's prompt, by the trace's ids. How many it names.
std::int32_t append_named(const Trace& trace, const Request& r, std::int32_t block, std::int32_t blocks,
                          std::vector<HashRun>& out) {
  std::uint64_t chain = 0;
  std::int32_t left = r.prompt_tokens, named = 0;
  for (const std::uint64_t id : trace.ids_of(r)) {
    chain = mix(chain ^ mix(id));
    const std::int32_t full = std::min(std::min(left, trace.hash_block_tokens) / block, blocks - named);
    if (full == 0) break;
    out.push_back({chain, full});
    named += full;
    left -= trace.hash_block_tokens;
  }
  return named;
}

// Full blocks among the first `tokens` that the prompt of the chain's last turn names. How many.
std::int32_t append_shared(const Trace& trace, const SessionChains& chains, std::uint32_t request,
                           std::int32_t block, std::int32_t tokens, std::vector<HashRun>& out) {
  const std::uint32_t last = chains.last(request);
  const Request& r = trace.requests[request];
  const std::int64_t known = last == request ? r.prompt_tokens : length(r);
  const auto blocks = static_cast<std::int32_t>(std::min<std::int64_t>(tokens, known) / block);
  if (trace.hash_block_tokens > 0) return append_named(trace, trace.requests[last], block, blocks, out);
  if (!chains.chained(request)) return 0;
  append_own(last, 0, blocks, out);
  return blocks;
}

}  // namespace

SessionChains::SessionChains(const Trace& trace) {
  if (trace.sessions.empty()) return;
  constexpr std::uint32_t kNone = UINT32_MAX;
  const auto n = static_cast<std::uint32_t>(trace.requests.size());
  last_.resize(n);
  several_.assign(n, false);
  std::vector<std::uint32_t> later(trace.sessions.size(), kNone);  // the turn after, seen from the end
  for (std::uint32_t r = n; r-- > 0;) {
    last_[r] = r;
    const Request& request = trace.requests[r];
    if (request.session < 0) continue;
    std::uint32_t& next = later[static_cast<std::size_t>(request.session)];
    if (next != kNone && extends(trace, request, trace.requests[next])) {
      last_[r] = last_[next];
      several_[r] = several_[next] = true;
      ++extensions_;
    }
    next = r;
  }
}

void prompt_identity(const Trace& trace, const SessionChains& chains, std::uint32_t request,
                     std::int32_t block, std::vector<HashRun>& out) {
  out.clear();
  append_shared(trace, chains, request, block, trace.requests[request].prompt_tokens, out);
}

void sequence_identity(const Trace& trace, const SessionChains& chains, std::uint32_t request,
                       std::int32_t block, std::int32_t tokens, std::vector<HashRun>& out) {
  out.clear();
  append_own(request, append_shared(trace, chains, request, block, tokens, out), tokens / block, out);
}

}  // namespace pdsim
