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

namespace CLI {
class App;
}

namespace pdsim {

struct ReplayOptions {
  std::string trace, format, prices;
  std::vector<std::string> sets;
  std::optional<std::uint64_t> seed;
  bool quiet = false;
};

/// Declares --trace, --format, --set, --seed, --prices and --quiet. `options` must outlive `app`.
void add_replay_options(CLI::App& app, ReplayOptions& options);

/// The scenario with overrides and prices applied, and refused if this version does not simulate it.
LoadedScenario load_scenario_for(const std::string& path, const ReplayOptions& options);

/// The trace that the scenario names, or makes, at its time_scale. Prints what was read to stderr
/// unless quiet.
Trace load_trace_for(const LoadedScenario& loaded, bool quiet);

/// What a summary says beside the run itself.
RunContext context_of(const LoadedScenario& loaded, const Deployment& deployment,
                      const ReplayOptions& options);

}  // namespace pdsim
