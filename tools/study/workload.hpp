// What replay, and every command that replays, takes from its command line: scenario, trace, overrides.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sim/cluster/deployment.hpp"
#include "sim/metrics/summary.hpp"
#include "sim/scenario/load.hpp"
#include "traces/trace.hpp"

namespace pdsim {

struct ReplayOptions {
  std::string trace, format, prices;
  std::vector<std::string> sets;
  std::optional<std::uint64_t> seed;
  bool infer_sessions = false;
  bool quiet = false;
};

/// The scenario with overrides and prices applied, and refused if this version does not simulate it.
LoadedScenario load_scenario_for(const std::string& path, const ReplayOptions& options);

/// What parse_scenario() takes of `options`.
Overrides overrides_of(const ReplayOptions& options);

/// Applies the rest of `options`, their prices, and refuses what this version does not simulate.
void finish_loading(LoadedScenario& loaded, const ReplayOptions& options);

/// The trace as the file has it, or as it is made.
Trace read_trace_for(const LoadedScenario& loaded, bool quiet);

/// The trace that the scenario names, or makes, at its time_scale. Prints what was read to stderr
/// unless quiet.
Trace load_trace_for(const LoadedScenario& loaded, bool quiet);

/// What load_trace_for() does once the trace is there: sessions, their pauses, the scales of time and
/// prompts, what is printed.
void pace_trace(Trace& trace, const LoadedScenario& loaded, bool quiet);

/// What a summary says beside the run itself.
RunContext context_of(const LoadedScenario& loaded, const Deployment& deployment,
                      const ReplayOptions& options);

}  // namespace pdsim
