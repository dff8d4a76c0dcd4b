// pdsim plan: the cheapest deployment for a trace, an SLO and a menu of instances.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/plan.hpp"
#include "tools/study/progress.hpp"

namespace pdsim {

namespace {

struct Options : PlanOptions {
  std::string plan, memo;
  bool json = false;
};

// A word as a shell takes it.
std::string quoted(const std::string& word) {
  if (!word.empty() && word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                              "-_./=:,+") == std::string::npos) {
    return word;
  }
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string command_of(const Options& o) {
  std::string text = "pdsim plan " + quoted(o.plan);
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) text += fmt::format(" {} {}", option, quoted(value));
  };
  if (o.rate) add("--rate", fmt::format("{}", *o.rate));
  if (o.allow_unreleased) text += " --allow-unreleased";
  add("--trace", o.replay.trace);
  add("--format", o.replay.format);
  for (const std::string& set : o.replay.sets) add("--set", set);
  if (o.replay.seed) add("--seed", fmt::format("{}", *o.replay.seed));
  add("--prices", o.replay.prices);
  if (o.replay.infer_sessions) text += " --infer-sessions";
  return text;
}

// A page in the place of what it was made from would be the end of that.
void keep_inputs(const Options& options, const PlanInput& input) {
  const Scenario& scenario = input.scenario.scenario;
  for (const std::string& file : {options.plan, input.scenario_file, scenario.workload.trace, scenario.model,
                                  scenario.gpu_profile, options.replay.trace, options.replay.prices}) {
    std::error_code error;
    if (!file.empty() && std::filesystem::equivalent(options.memo, file, error)) {
      throw InputError("--memo",
                       fmt::format("{} is what the plan is made from; expected another file", options.memo));
    }
  }
}

int plan(const Options& options) {
  catch_interrupts();
  const std::string memo_name = std::filesystem::path(options.memo).filename().string();
  if (!options.memo.empty() && options.memo != "-") {
    if (memo_name.empty() || std::filesystem::is_directory(options.memo)) {
      throw InputError("--memo", fmt::format("{} is a folder; expected a file", options.memo));
    }
    const std::string_view names[] = {memo_name};
    check_folder(folder_of(options.memo), names);
  }
  const PlanInput input = read_plan(options.plan, options);
  if (options.memo != "-") keep_inputs(options, input);
  Progress progress("planning", "runs", options.replay.quiet);
  const nlohmann::ordered_json report =
      make_plan(input, options, [&](std::uint64_t runs) { progress.update(runs, 0); });
  progress.finish();
  const bool stopped = report["status"] == kPlanStatus[2];
  const bool page = !options.memo.empty() && !stopped;
  if (options.json) {
    fmt::print("{}\n", report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else if (options.memo != "-" || stopped) {
    fmt::print("{}", plan_table(report));
  }
  if (page && options.memo == "-") fmt::print("{}", plan_memo(report, command_of(options)));
  if (page && options.memo != "-") {  // last: what was computed is shown even if this fails
    std::fflush(stdout);
    const std::vector<std::string> written =
        write_files(folder_of(options.memo), {{memo_name, plan_memo(report, command_of(options))}});
    for (const std::string& path : written) {
      if (!options.json) fmt::print("wrote         {}\n", path);
    }
  }
  if (stopped) {
    fmt::print(stderr, "pdsim: interrupted after {} runs; the results say so\n",
               report["search"]["runs"].get<std::uint64_t>());
    return kInterrupted;
  }
  if (report["recommendation"].is_null()) {
    const nlohmann::ordered_json& miss = report["nearest_miss"];
    fmt::print(stderr, "pdsim: nothing on the menu meets the SLO at {:.4g} requests/s{}\n", input.rate,
               miss.is_null() ? "" : "; nearest: " + miss["name"].get<std::string>());
    return kUnfinished;
  }
  return kDone;
}

}  // namespace

void add_plan(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("plan", "Find the cheapest deployment for a trace, an SLO and a menu of instances");
  sub->add_option("PLAN", options->plan, "Plan file (JSON with comments, `pdsim schema plan`); - is stdin")
      ->required();
  sub->add_option("--rate", options->rate, "Requests per second to be served, instead of the plan's");
  sub->add_option(
      "--memo", options->memo,
      "Also a page of Markdown into this file: recommendation, costs, evidence, what flips it; - is stdout");
  sub->add_flag("--json", options->json, "The report as JSON on stdout (schema pdsim.plan-report/1)");
  sub->add_option("--jobs", options->jobs, "Simulations at a time; 0 = one a core");
  sub->add_flag("--allow-unreleased", options->allow_unreleased,
                "Also recommend what is in no vLLM release yet, only in open pull requests");
  add_replay_options(*sub, options->replay);
  sub->footer(
      "A deployment keeps up at a rate when all requests are served, every percentile of the SLO is met, and "
      "requests\n"
      "end about as fast as they come. Capacities are found to 2 %, the trace played faster or slower.\n"
      "--set acts on the plan's scenario. Whole instances are billed, idle GPUs and the time to drain "
      "included.\n"
      "Exit status 3: nothing on the menu suffices; the nearest miss is shown.\n\n"
      "Example:\n  pdsim plan scenarios/plans/example.json --rate 3.4 --memo memo.md");
  sub->callback([options, &run] { run = [options] { return plan(*options); }; });
}

}  // namespace pdsim
