// One simulation as a piece of a larger study: what is run, the traces that runs share, what a run leaves.
//
// A run is what `pdsim replay` would do with the same scenario: same loading, same summary, same bytes.
// Traces are read, generated and paced once and shared by all runs, read-only.
#pragma once

#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/cluster/deployment.hpp"
#include "sim/metrics/record.hpp"
#include "sim/scenario/load.hpp"
#include "tools/study/workload.hpp"
#include "traces/generate.hpp"
#include "traces/trace.hpp"

namespace pdsim {

class JsonObject;

/// A scenario to be run, and all that is to be different from its text.
struct RunSpec {
  std::string text;       ///< the scenario
  std::string file;       ///< as errors name it
  std::string folder;     ///< paths in `text` are relative to it
  ReplayOptions options;  ///< as replay takes them; of `sets`, later ones win
  /// JSON, the knobs of a generated trace in the workload's place; empty = none. Without a "seed" of its own
  /// the trace has the scenario's, so that replications by seed are different workloads.
  std::string generate;
};

/// Reads the scenario file ("-" = stdin) whole. InputError when it cannot be read.
RunSpec read_run(const std::string& path, const ReplayOptions& options);

/// What an error says, less the name of `file` before it.
std::string problem_of(const std::exception& error, const std::string& file);

/// The spec's scenario, checked as replay would. InputError as load_scenario() and check_simulated().
LoadedScenario load_run(const RunSpec& spec);

/// The knobs of `pdsim trace generate` as JSON: {"requests", "rate", "output": {"mean", "sigma", ...}, ...}.
/// InputError for unknown ones and wrong types.
GenerateConfig read_generate(const JsonObject& in);

/// Traces by workload. Safe to call from several threads; each trace is made once while it is kept, and the
/// last few are.
class TraceStore {
 public:
  /// quiet: nothing is said of what was read; else a line for each trace, on stderr.
  explicit TraceStore(bool quiet = true) : quiet_(quiet) {}

  /// The trace that replay would replay; `generate` as in RunSpec. Stdin can be read once: what it gave the
  /// first time is its trace, whatever seed and format are asked for later.
  std::shared_ptr<const Trace> get(const LoadedScenario& loaded, const std::string& generate = "");

 private:
  struct Entry;
  std::shared_ptr<const Trace> made(const std::string& key, bool keep, const std::function<Trace()>& make);

  bool quiet_;
  std::mutex mutex_;
  std::list<std::pair<std::string, std::shared_ptr<Entry>>> entries_;  ///< last used first
};

/// What a run leaves behind.
struct RunOutcome {
  LoadedScenario loaded;
  Deployment deployment;
  std::shared_ptr<const Trace> trace;
  RunResult result;
  std::shared_ptr<const nlohmann::ordered_json> summary;  ///< null when the run was abandoned

  std::vector<std::string> worker_names() const;
};

/// Runs `spec`. InputError for what replay would refuse. A run that was interrupted, stalled or abandoned
/// says so in result.status.
RunOutcome run(const RunSpec& spec, TraceStore& traces, const RunHooks& hooks = {});

/// The same on a trace of the caller's, which has been paced already.
RunOutcome run_on(LoadedScenario loaded, const ReplayOptions& options, std::shared_ptr<const Trace> trace,
                  const RunHooks& hooks = {});

}  // namespace pdsim
