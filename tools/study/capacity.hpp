// How much load a deployment carries: the highest rate, on a grid, at which it meets its objective.
//
// A trace is replayed faster or slower until the deployment no longer keeps up. It keeps up when every
// request is served, each percentile of the SLO is met over the requests counted, and requests end about as
// fast as they come (a run that ends before its queue hurts proves nothing). A run that can no longer keep
// up, whatever becomes of the rest of it, is given up at once: hopeless() is exact, so that giving up never
// changes an answer.
//
// Rates are steps of a geometric grid around the rate asked for, so that capacities are integers and do not
// depend on the order in which they were looked for. Keeping up is nearly monotone in load: what fails at a
// step may keep up at the next, so that as many steps in a row have to fail as kInARow.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/metrics/record.hpp"
#include "sim/scenario/scenario.hpp"
#include "traces/trace.hpp"

namespace pdsim {

/// One percentile of an objective.
struct Bound {
  std::string metric;      ///< "ttft_ms" or "tpot_ms"
  std::string percentile;  ///< "p95"
  double q = 0;            ///< 0.95
  double ms = 0;
};

/// In the order of the SLO's own names.
std::vector<Bound> bounds_of(const Slo& slo);

/// What may be concluded from a run that still goes on.
struct HopelessIf {
  std::vector<Bound> bounds;
  bool first_tokens_stand = true;  ///< nothing is served a second time: no retries
  bool slo = true;                 ///< false: only what was not served counts
};

/// Whether a run can no longer keep up: a request was not served, or of the n that will be counted at most,
/// more than n - 1 - floor(q (n - 1)) are above a bound for certain. Of a request that waits for its first
/// token or still generates, the time so far is the least that it will have taken. O(requests x bounds).
bool hopeless(const HopelessIf& rule, Nanos now, std::span<const RequestRecord> requests);

/// Why a run did not keep up.
enum class LoadVerdict : std::uint8_t { kept_up, unserved, slo, saturated, abandoned, stalled, interrupted };

struct Reached {
  LoadVerdict verdict = LoadVerdict::kept_up;
  std::vector<double> ms;  ///< of each bound, -1 = no value: it does not apply; empty: did not finish
  double ended = 0;        ///< of those that came in the second half, the share that ended meanwhile
  bool kept_up() const { return verdict == LoadVerdict::kept_up; }
};

/// What `run` says of the deployment. A run is saturated when in the second half of the arrivals fewer
/// requests ended than came, by more than a tenth of them and more than two standard deviations of a Poisson
/// count. O(requests log requests).
Reached judge_run(std::span<const Bound> bounds, const RunResult& run);

// ------------------------------------------------------------------------------------------- the grid

inline constexpr double kGridStep = 1.02;  ///< chosen: a capacity to 2 %, finer than any of its errors
inline constexpr int kLowestStep = -210;   ///< chosen: a 64th of the rate asked for; less is none
inline constexpr int kHighestStep = 210;   ///< 64 times it; more is not looked for

inline constexpr int kInARow = 3;  ///< chosen: a single run that is unlucky is no limit

/// anchor x 1.02^step.
double rate_at(double anchor, int step);

/// The highest step at which `keeps_up`, beginning at `start`, before kInARow that do not; nothing when it
/// does not at kLowestStep. `floor`: a step at which it is known to. About 8 calls from a start within a
/// quarter of the answer.
std::optional<int> highest_step(const std::function<bool(int)>& keeps_up, int start,
                                std::optional<int> floor = std::nullopt);

/// The trace at `factor` times its pace.
Trace at_pace(const Trace& trace, double factor);

}  // namespace pdsim
