// One subcommand, one file: each of these adds its subcommand to the command line.
//
// `add_x` declares options and, in the subcommand's callback, leaves in `run` what is to be done. main
// calls `run` after parsing, so that every error of the work itself goes through one place:
//   InputError   exit status 2, one line on stderr; throw it before anything is written
//   Interrupted  exit status 130 (see interrupt.hpp)
//   else         a bug, exit status 1
// What `run` returns is the exit status (kDone and its kind below). Results go to stdout (std::fwrite
// or fmt::print: main notices failed writes at the end), progress to stderr (see progress.hpp).
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace pdsim {

using Command = std::function<int()>;

/// Exit statuses, as the contract fixes them.
inline constexpr int kDone = 0, kBug = 1, kBadInput = 2, kUnfinished = 3, kFailedOn = 4, kInterrupted = 130;

void add_replay(CLI::App& app, Command& run);
void add_compare(CLI::App& app, Command& run);
void add_describe(CLI::App& app, Command& run);
void add_cost(CLI::App& app, Command& run);
void add_fit(CLI::App& app, Command& run);
void add_calibrate(CLI::App& app, Command& run);
void add_trace(CLI::App& app, Command& run);
void add_validate(CLI::App& app, Command& run);
void add_validate_kernels(CLI::App& validate, Command& run);
void add_validate_run(CLI::App& validate, Command& run);
void add_validate_published(CLI::App& validate, Command& run);
void add_validate_serving(CLI::App& validate, Command& run);
void add_validate_evidence(CLI::App& validate, Command& run);
void add_sweep(CLI::App& app, Command& run);
void add_thresholds(CLI::App& app, Command& run);
void add_merge(CLI::App& app, Command& run);
void add_plan(CLI::App& app, Command& run);
void add_schema(CLI::App& app, Command& run);

}  // namespace pdsim
