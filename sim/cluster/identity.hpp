// Which blocks are the same: the identity of prompts and of what is generated after them.
//
// A trace names a prompt's content by ids of hash blocks (512 tokens in Mooncake's). An engine block of
// a few tokens is known by the hash block it lies in and its index there; hashes are chained, so equal
// hashes mean equal prompts up to that point. Only full blocks have an identity.
//
// Within a session a turn extends the one before when its prompt has room for that one's prompt and answer
// and begins with its full hash ids. Then the earlier prompt, its answer included, IS the beginning of the
// later one, and so on along the chain: every turn's sequence is a beginning of the last turn's. So a turn
// takes its names from the last turn of its chain, known or not when it runs: what it generates gets the
// names under which the next turns ask for it, block by block, below the hash block's granularity. What
// the last turn of a chain generates is its own: it can hit it again after a preemption, and nobody else
// can. A request of no session is a chain of one. Without hash ids a chain of several turns has names of
// its own and shares nothing with others.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/serving/block_pool.hpp"
#include "traces/trace.hpp"

namespace pdsim {

/// Which turns extend which. Empty (no session extends anything) until built for a trace.
class SessionChains {
 public:
  SessionChains() = default;
  /// The next turn of a session is its next request in the trace. A prompt that does not extend the one
  /// before (cut, edited, or shorter than prompt and answer) begins a new chain. O(requests + ids); 4 bytes a
  /// request where there are sessions.
  explicit SessionChains(const Trace& trace);

  /// The last turn of the request's chain; itself when none extends it.
  std::uint32_t last(std::uint32_t request) const { return last_.empty() ? request : last_[request]; }
  /// Whether the request is one of several turns in a chain.
  bool chained(std::uint32_t request) const { return !several_.empty() && several_[request]; }
  /// Requests that extend the turn before them.
  std::uint64_t extensions() const { return extensions_; }

 private:
  std::vector<std::uint32_t> last_;
  std::vector<bool> several_;
  std::uint64_t extensions_ = 0;
};

/// Runs of a prompt's full blocks, into `out`; none when the trace has no prefix identity and nothing
/// extends it or is extended by it.
/// Requires that `block` divides the trace's hash block. O(hash blocks of the prompt).
void prompt_identity(const Trace& trace, const SessionChains& chains, std::uint32_t request,
                     std::int32_t block, std::vector<HashRun>& out);

/// The same for full blocks among `tokens` in all, prompt and answer: where no later turn names them, runs
/// that are this request's own. A longer sequence's blocks begin with a shorter one's. O(tokens / 512).
void sequence_identity(const Trace& trace, const SessionChains& chains, std::uint32_t request,
                       std::int32_t block, std::int32_t tokens, std::vector<HashRun>& out);

}  // namespace pdsim
