// Which of several deployments is better, and whether that is known.
//
// A margin counts when it exceeds both what the simulator is known to be off by (evidence.hpp) and what
// replications leave open. Where the runs rest on the same measured kernels part of that error is common to
// them and cancels; how much is not known, so none of it is taken to. A difference too small to matter to
// anyone is a tie, and ties go to what is simpler to operate. Latencies are those of completed requests, so
// who completes fewer than another cannot win by them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/study/evidence.hpp"
#include "tools/study/objective.hpp"
#include "tools/study/statistics.hpp"

namespace pdsim {

/// One of the deployments compared.
struct Contender {
  std::string name;
  std::optional<double> value;       ///< of the objective; nothing = it cannot do the job
  std::vector<double> replications;  ///< the objective's values, paired by position with the others'; may be
                                     ///< empty; one that is not finite = it has no figure
  Evidence evidence;
  int complexity = 0;
  Replicated replicated = Replicated::seeds;  ///< how `replications` were made
  double completed = 1;                       ///< share of the requests
};

enum class Decision : std::uint8_t { decided, tie, undecided, nobody };

struct Verdict {
  Decision decision = Decision::nobody;
  std::optional<std::size_t> winner;       ///< decided, or the simplest of a tie when there is one
  std::optional<std::size_t> recommended;  ///< the winner; undecided: the simplest of those that may be best
  std::optional<std::size_t> second;       ///< whom the margin is against
  double margin = 0;                       ///< relative to the second's value, >= 0
  double error = 0;                        ///< relative, of the weaker evidence of the two
  std::optional<Interval> difference;      ///< relative, best against second, where replicated
  Grade evidence = Grade::datasheet;       ///< the weaker of the two
  std::string text;                        ///< one or two sentences; begins with UNDECIDED where it is
  std::string to_decide;                   ///< what measurement would decide it; empty when decided
};

inline constexpr double kTie = 0.005;  ///< relative; smaller margins are ties
inline constexpr double kCompletedFewer =
    0.001;  ///< chosen: shares of requests that differ by less are alike

/// The verdict on `contenders` by `objective`. O(contenders x replications).
Verdict judge(const Objective& objective, std::span<const Contender> contenders);

}  // namespace pdsim
