// Which blocks are the same: the identity of prompts and of what is generated after them.
//
// A trace names a prompt's content by ids of hash blocks (512 tokens in Mooncake's). An engine block of
// a few tokens is known by the hash block it lies in and its index there; hashes are chained, so equal
// hashes mean equal prompts up to that point. Only full blocks have an identity. What a request generates
// is its own: it can hit it again after a preemption, and nobody else can.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/serving/block_pool.hpp"
#include "traces/trace.hpp"

namespace pdsim {

/// Runs of a prompt's full blocks, into `out`; none when the trace has no prefix identity.
/// Requires that `block` divides the trace's hash block. O(hash blocks of the prompt).
void prompt_identity(const Trace& trace, std::uint32_t request, std::int32_t block,
                     std::vector<HashRun>& out);

/// The same and, for full blocks among `tokens` in all that hold anything else, runs that are this
/// request's own. O(tokens / 512).
void sequence_identity(const Trace& trace, std::uint32_t request, std::int32_t block, std::int32_t tokens,
                       std::vector<HashRun>& out);

}  // namespace pdsim
