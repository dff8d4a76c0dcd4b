#include "sim/cluster/identity.hpp"

#include <algorithm>

namespace pdsim {

namespace {

constexpr std::int32_t kOwnRun = 32;  // blocks to a run of a request's own

// A bijection on 64 bits whose output bits all depend on all input bits (the finalizer of SplitMix64).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void prompt_identity(const Trace& trace, std::uint32_t request, std::int32_t block,
                     std::vector<HashRun>& out) {
  out.clear();
  const Request& r = trace.requests[request];
  std::uint64_t chain = 0;
  std::int32_t left = r.prompt_tokens;
  for (const std::uint64_t id : trace.ids_of(r)) {
    chain = mix(chain ^ mix(id));
    const std::int32_t full = std::min(left, trace.hash_block_tokens) / block;
    if (full == 0) break;
    out.push_back({chain, full});
    left -= trace.hash_block_tokens;
  }
}

void sequence_identity(const Trace& trace, std::uint32_t request, std::int32_t block, std::int32_t tokens,
                       std::vector<HashRun>& out) {
  prompt_identity(trace, request, block, out);
  std::int32_t named = 0;
  for (const HashRun& run : out) named += run.blocks;
  const std::uint64_t own = mix(~std::uint64_t{request});
  for (std::int32_t first = named; first < tokens / block; first += kOwnRun) {
    out.push_back(
        {mix(own ^ mix(static_cast<std::uint64_t>(first))), std::min(kOwnRun, tokens / block - first)});
  }
}

}  // namespace pdsim
