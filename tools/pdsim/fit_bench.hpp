// `pdsim fit --from-bench`: host and scheduling overheads from a user's own serving benchmark.
//
// Each load that was measured (a benchmark's file, a row of a table) is simulated as often as the fit asks,
// with other overheads each time; kernels stay as the GPU's profile has them. What is fitted is what
// models/overheads.hpp lists, as far as the loads tell it apart; the rest stays where it started.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace pdsim {

struct BenchFitOptions {
  std::vector<std::string> files;  ///< benchmarks, or tables when there is no scenario
  std::string scenario;            ///< what was measured
  std::string overheads;           ///< start: preset or path; empty = the scenario's
  std::string out, name;
  std::string rules;              ///< tables: what rows do not state; empty = the shipped ones
  std::vector<std::string> only;  ///< tables: column=value
  std::vector<std::string> sets;
  std::optional<std::uint64_t> seed;
  unsigned jobs = 0;  ///< simulations at a time; 0 = one for each core
  bool json = false, quiet = false;
};

/// Declares --from-bench, --scenario, --overheads, --rules, --only, --set, --seed, --jobs, --json and
/// --quiet. `options` must outlive `app`.
void add_bench_fit_options(CLI::App& app, BenchFitOptions& options);

/// Fits, writes options.out ("-" = stdout, the report then to stderr) and prints errors before and after.
/// Returns the exit status. Throws InputError: files that cannot be read, a benchmark of another model, loads
/// that start from different overheads, fewer measurements than parameters they move; Interrupted before
/// there is anything to write. Nothing is written then. Cost: the simulations, whose number it says first.
int fit_bench(const BenchFitOptions& options);

/// What --help says of it.
extern const char* const kBenchFitHelp;

}  // namespace pdsim
