// The simulation itself: owns all state as arrays, pops events, one switch.
//
// What happens between a request's arrival and its last token is written in transfer/README.md (the
// hand-off), serving/engine.hpp (a worker's boundaries) and here (who hears what when). Every message
// between two entities takes at least a nanosecond, so two workers whose steps end at the same instant
// cannot see each other's news in either order.
//
// Checked in every run: requests are conserved, stages sum to the end-to-end time, tokens computed are
// those of prompts, answers and recomputation, blocks return to their pools, bytes sent are bytes
// received. A broken one throws InternalError.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "sim/cluster/deployment.hpp"
#include "sim/metrics/record.hpp"
#include "sim/scenario/load.hpp"
#include "traces/sessions.hpp"
#include "traces/trace.hpp"

namespace pdsim {

struct RunHooks {
  std::function<bool()> interrupted;  ///< polled every few hundred events
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
  /// Polled every few hundred events: whether to give the run up. `requests` are those of the trace, by
  /// arrival; what has not ended has end -1, what has not answered first_token -1.
  std::function<bool(Nanos now, std::span<const RequestRecord> requests)> hopeless;
  bool check_pools = false;  ///< tests: the pools' full invariants at the end, O(blocks)
};

/// InputError where the scenario asks for what this version does not simulate. simulate() calls it.
void check_simulated(const LoadedScenario& loaded);

/// What the workload says of the service that its trace was recorded on; nothing when it says less than both.
std::optional<ReferenceService> reference_service(const WorkloadConfig& workload);

/// Replays `trace` on `deployment`, which was planned from `loaded`. InputError when scenario and trace
/// do not fit together (block size and hash blocks), before anything has run. Cost: about 2 us a
/// request and 0.1 us an engine step.
RunResult simulate(const Deployment& deployment, const LoadedScenario& loaded, const Trace& trace,
                   const RunHooks& hooks = {});

}  // namespace pdsim
