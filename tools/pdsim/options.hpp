// The options that replay, and every command that replays, takes.
#pragma once

#include "tools/study/workload.hpp"

namespace CLI {
class App;
}

namespace pdsim {

struct ServingOptions;

/// Declares --trace, --format, --set, --seed, --prices, --infer-sessions and --quiet. `options` must outlive
/// `app`.
void add_replay_options(CLI::App& app, ReplayOptions& options);

/// Declares --only, --rules and --jobs, of what simulates the rows of a table of serving benchmarks.
void add_serving_options(CLI::App& app, ServingOptions& options);

}  // namespace pdsim
