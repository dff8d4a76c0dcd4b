// The options that replay, and every command that replays, takes.
#pragma once

#include <string>
#include <vector>

#include "tools/study/workload.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace pdsim {

struct ServingOptions;

/// Declares an option that may be given several times, each time with one value.
CLI::Option* add_repeatable(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                            const std::string& text);

/// Declares --set.
void add_set_option(CLI::App& app, std::vector<std::string>& sets);

/// Declares --trace, --format, --set, --seed, --prices, --infer-sessions and --quiet. `options` must outlive
/// `app`.
void add_replay_options(CLI::App& app, ReplayOptions& options);

/// Declares --only, --rules and --jobs, of what simulates the rows of a table of serving benchmarks.
void add_serving_options(CLI::App& app, ServingOptions& options);

}  // namespace pdsim
