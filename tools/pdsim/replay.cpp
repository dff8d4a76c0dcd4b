// pdsim replay: one simulation.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/files.hpp"
#include "tools/pdsim/interrupt.hpp"
#include "tools/pdsim/progress.hpp"
#include "tools/pdsim/workload.hpp"

namespace pdsim {

namespace {

struct Options : ReplayOptions {
  std::string scenario, out;
  bool json = false;
};

struct Usage {
  double wall_s = 0, user_s = 0, peak_mib = 0;
};

Usage usage_since(std::chrono::steady_clock::time_point start) {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
          static_cast<double>(u.ru_utime.tv_sec) + static_cast<double>(u.ru_utime.tv_usec) / 1e6,
          static_cast<double>(u.ru_maxrss) / 1024};
}

int replay(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const LoadedScenario loaded = load_scenario_for(options.scenario, options);
  const Deployment deployment = plan_deployment(loaded);
  if (!options.out.empty()) check_folder(options.out);
  const Trace trace = load_trace_for(loaded, options.quiet);

  catch_interrupts();
  RunHooks hooks;
  Progress progress("replaying", "requests", options.quiet);
  hooks.interrupted = interrupted;
  hooks.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const auto simulation_start = std::chrono::steady_clock::now();
  const RunResult run = simulate(deployment, loaded, trace, hooks);
  const double simulation_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - simulation_start).count();
  progress.finish();

  const nlohmann::ordered_json summary = summarize(run, context_of(loaded, deployment), trace);
  const auto completed = summary["requests"]["completed"].get<std::uint64_t>();
  std::vector<std::string> written;
  if (!options.out.empty()) {
    std::vector<std::string> names;
    for (const WorkerPlan& worker : deployment.workers) names.push_back(worker.name);
    written = write_files(options.out, {{"summary.json", summary.dump(2) + "\n"},
                                        {"requests.csv", requests_csv(run, trace, names)},
                                        {"scenario.json", loaded.in_force}});
  }
  const Usage usage = usage_since(start);
  const nlohmann::ordered_json& counts = summary["requests"];
  const auto requests = counts["injected"].get<double>() - counts["in_flight"].get<double>();
  if (!options.out.empty()) {
    const nlohmann::ordered_json about = {
        {"schema", "pdsim.run/1"},
        {"version", PDSIM_VERSION},
        {"wall_s", usage.wall_s},
        {"user_s", usage.user_s},
        {"simulation_wall_s", simulation_s},
        {"requests_per_wall_s", simulation_s > 0 ? requests / simulation_s : 0.0},
        {"queue_pops", run.queue_pops},
        {"ns_per_pop", run.queue_pops > 0 ? simulation_s * 1e9 / static_cast<double>(run.queue_pops) : 0.0},
        {"events", run.events},
        {"peak_mib", usage.peak_mib}};
    for (std::string& path : write_files(options.out, {{"run.json", about.dump(2) + "\n"}})) {
      written.push_back(std::move(path));
    }
  }
  if (options.json) {
    fmt::print("{}\n", summary.dump(2));
  } else {
    fmt::print("{}", summary_table(summary));
    fmt::print(
        "simulated           {:.1f} s in {:.2f} s ({:.0f} requests/s, {:.1f} M events, {:.1f} M queue pops, "
        "{:.0f} MiB)\n",
        to_seconds(run.end), usage.wall_s, simulation_s > 0 ? requests / simulation_s : 0.0,
        static_cast<double>(run.events) / 1e6, static_cast<double>(run.queue_pops) / 1e6, usage.peak_mib);
    for (const std::string& path : written) fmt::print("wrote               {}\n", path);
  }
  if (run.status == RunStatus::interrupted) {
    fmt::print(stderr, "pdsim: interrupted after {} of {} requests; the results say so\n", completed,
               run.requests.size());
    return kInterrupted;
  }
  if (run.status == RunStatus::stalled) {
    fmt::print(stderr, "pdsim: stalled: {}\n", run.stall);
    return kUnfinished;
  }
  if (completed == 0) {
    std::string why;
    for (const auto& [reason, n] : summary["requests"]["by_reason"].items()) {
      why += fmt::format("{}{} {}", why.empty() ? "" : ", ", n.get<std::uint64_t>(), reason);
    }
    fmt::print(stderr, "pdsim: no request completed: {}\n", why);
    return kUnfinished;
  }
  return kDone;
}

}  // namespace

void add_replay(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("replay", "Replay a trace on a scenario: one simulation");
  sub->add_option("SCENARIO", options->scenario, "Scenario file (JSON with comments); - is stdin")
      ->required();
  add_replay_options(*sub, *options);
  sub->add_option(
      "--out", options->out,
      "Folder for summary.json, requests.csv, run.json and the scenario in force (made if missing)");
  sub->add_flag("--json", options->json, "The summary as JSON on stdout");
  sub->footer(
      "Example: pdsim replay scenarios/quickstart.json --set pools.decode.engine.max_num_seqs=64 --out out");
  sub->callback([options, &run] { run = [options] { return replay(*options); }; });
}

}  // namespace pdsim
