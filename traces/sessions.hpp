// Sessions: which request is the next turn of which, found in a trace that does not say so, and how long
// a user pauses between an answer's end and the next turn.
//
// A prompt that begins with all full blocks of an earlier one, and has room for its answer and a message
// after them, looks like its next turn. So does any long prompt behind a short one that shares its system
// prompt or document. infer_sessions() therefore looks at everything that the trace sends through the
// earlier prompt's last full block, and takes only what cannot well be anything else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace pdsim {

struct InferredSessions {
  bool recorded = false;          ///< the trace has sessions of its own: nothing was inferred or changed
  std::uint64_t sessions = 0;     ///< of two turns or more
  std::uint64_t turns = 0;        ///< requests that continue an earlier one
  std::uint64_t ambiguous = 0;    ///< begin with all full blocks of an earlier prompt, yet are left alone
  std::uint64_t backwards = 0;    ///< what the rule finds with time reversed: about as many turns are chance
  std::int32_t least_answer = 0;  ///< tokens; requests with shorter answers are left alone for that reason
  std::string text;               ///< all that in one sentence, for the user
};

/// Gives the requests of a trace with hash ids, but no sessions, the sessions "inferred-0", "inferred-1",
/// ... in order of their first arrival, and their turns. Think times stay as they are, and a request that
/// neither continues another nor is continued stays in no session. Request z continues a when
///  1. a's full hash ids (one at least) lead z's ids, z arrived after a, and
///     prompt(z) > prompt(a) + output(a): a message has a token at least;
///  2. a's last full block belongs to one conversation: the requests that come through it (other than by
///     way of a deeper block where another prompt ended, which is judged there) are a row in which each
///     continues the one before by rule 1. A prompt asked again takes the place of the first;
///  3. no more than 1 in 100 turns are expected to be chance. Where requests only share a beginning, a
///     row that grows is as likely as one that shrinks, which no conversation does: the turns that rule 2
///     finds with time reversed count those that chance put among the found ones. If they are too many,
///     only turns after an answer of `least_answer` tokens or more are kept: the more tokens must fit, the
///     less likely they do by chance. (The way in which proteomics counts decoys: Elias and Gygi, Nature
///     Methods 4, 2007.)
/// Text between the full blocks' end and the prompt's end cannot be seen: rule 1 trusts the lengths.
/// InputError when the trace has no hash ids. O(ids + requests log requests) time, O(ids) memory.
InferredSessions infer_sessions(Trace& trace);

/// For each request the one before it in its session, -1 for first turns and without a session. O(requests).
std::vector<std::int32_t> previous_turns(const Trace& trace);

/// What one answer takes on a system that the trace's stamps were recorded on: the first token, then
/// one after the other.
struct ReferenceService {
  Nanos ttft = 0;
  Nanos per_token = 0;
};

/// Pauses between a turn's end and the next turn, for sessions that react to the simulated system.
struct ClosedThinkTimes {
  std::vector<Nanos> pause;    ///< before each request; -1 for first turns and without a session
  std::uint64_t recorded = 0;  ///< as the trace has them
  std::uint64_t derived = 0;   ///< start-to-start gap less the reference service of the turn before
  std::uint64_t floored = 0;   ///< of those, where the service is longer than the gap: 0
};

/// Never the bare gap, which would count the answer twice. On the trace's own clock: call it before
/// scale_time(). Requires reference times >= 0. InputError for the first pause that is neither recorded nor
/// derivable. O(requests).
ClosedThinkTimes closed_think_times(const Trace& trace, const std::optional<ReferenceService>& reference);

}  // namespace pdsim
