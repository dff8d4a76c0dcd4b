// pdsim replay: one simulation.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/compare.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/workload.hpp"

namespace pdsim {

namespace {

struct Options : ReplayOptions {
  std::string scenario, out, fail_on;
  bool json = false;
};

constexpr std::array<std::string_view, 5> kResultFiles = {"summary.json", "requests.csv", "blocks.csv",
                                                          "scenario.json", "run.json"};

// Names from outside (a path, a session) may not be UTF-8; JSON is.
std::string text_of(const nlohmann::ordered_json& document) {
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

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
  catch_interrupts();
  const auto start = std::chrono::steady_clock::now();
  LoadedScenario loaded = load_scenario_for(options.scenario, options);
  const Deployment deployment = plan_deployment(loaded);
  put_defaults_by_gpu(loaded, deployment);
  if (!options.fail_on.empty() && loaded.scenario.slo.empty()) {
    throw InputError("--fail-on", "is slo, but the scenario has none; expected slo.ttft_ms or slo.tpot_ms");
  }
  if (!options.out.empty()) check_folder(options.out, kResultFiles);
  const Trace trace = load_trace_for(loaded, options.quiet);

  RunHooks hooks;
  Progress progress("replaying", "requests", options.quiet);
  hooks.interrupted = interrupted;
  hooks.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const auto simulation_start = std::chrono::steady_clock::now();
  const RunResult run = simulate(deployment, loaded, trace, hooks);
  const double simulation_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - simulation_start).count();
  progress.finish();

  const nlohmann::ordered_json summary = summarize(run, context_of(loaded, deployment, options), trace);
  const auto completed = summary["requests"]["completed"].get<std::uint64_t>();
  const nlohmann::ordered_json& counts = summary["requests"];
  const auto requests = counts["injected"].get<double>() - counts["in_flight"].get<double>();
  const double requests_per_s = simulation_s > 0 ? requests / simulation_s : 0;
  std::vector<std::string> written;
  Usage usage;
  if (!options.out.empty()) {
    std::vector<std::string> names;
    for (const WorkerPlan& worker : deployment.workers) names.push_back(worker.name);
    std::string rows = requests_csv(run, trace, names);
    usage = usage_since(start);
    nlohmann::ordered_json about = {
        {"schema", "pdsim.run/1"},
        {"version", PDSIM_VERSION},
        {"wall_s", usage.wall_s},
        {"user_s", usage.user_s},
        {"simulation_wall_s", simulation_s},
        {"requests_per_wall_s", requests_per_s},
        {"queue_pops", run.queue_pops},
        {"ns_per_pop", run.queue_pops > 0 ? simulation_s * 1e9 / static_cast<double>(run.queue_pops) : 0.0},
        {"events", run.events},
        {"peak_mib", usage.peak_mib}};
    if (run.hypothetical) about["hypothetical"] = true;
    written = write_files(options.out, {{std::string(kResultFiles[0]), text_of(summary) + "\n"},
                                        {std::string(kResultFiles[1]), std::move(rows)},
                                        {std::string(kResultFiles[2]), blocks_csv(run)},
                                        {std::string(kResultFiles[3]), loaded.in_force + "\n"},
                                        {std::string(kResultFiles[4]), text_of(about) + "\n"}});
  } else {
    usage = usage_since(start);
  }
  if (options.json) {
    fmt::print("{}\n", text_of(summary));
  } else {
    fmt::print("{}", summary_table(summary));
    fmt::print(
        "simulated           {:.1f} s in {:.2f} s ({} requests/s, {} events, {} queue pops, {:.0f} MiB)\n",
        to_seconds(run.end), usage.wall_s, short_count(requests_per_s),
        short_count(static_cast<double>(run.events)), short_count(static_cast<double>(run.queue_pops)),
        usage.peak_mib);
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
  if (const std::vector<std::string> missed = missed_slo(summary);
      !options.fail_on.empty() && !missed.empty()) {
    fmt::print(stderr, "pdsim: --fail-on slo: {}\n", fmt::join(missed, "; "));
    return kFailedOn;
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
  sub->add_option("--out", options->out,
                  "Folder for summary.json, requests.csv (a row a request), blocks.csv (KV blocks held over "
                  "time, by side and cause), run.json and the scenario in force (made if missing)");
  sub->add_flag("--json", options->json, "The summary as JSON on stdout");
  sub->add_option("--fail-on", options->fail_on, "Exit status 4: slo, when the run misses its SLO")
      ->check(CLI::IsMember({"slo"}));
  std::string names;
  for (const auto& [key, table] : {std::pair("router.policy", std::span<const Named>(kRouterPolicies)),
                                   {"transfer.mode", std::span<const Named>(kTransferModes)}}) {
    names += fmt::format("{} is one of\n", key);
    for (const Named& row : table) names += fmt::format("  {:<18}{}\n", row.name, row.sentence);
    names += '\n';
  }
  sub->footer(names +
              "Examples:\n"
              "  pdsim replay scenarios/quickstart.json --set router.policy=least_loaded --out out\n"
              "  pdsim replay scenarios/quickstart.json --set transfer.mode=push");
  sub->callback([options, &run] { run = [options] { return replay(*options); }; });
}

}  // namespace pdsim
