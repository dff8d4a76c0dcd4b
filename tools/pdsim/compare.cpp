// pdsim compare: the same requests on several deployments, side by side.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/compare.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/matrix.hpp"
#include "tools/study/progress.hpp"

namespace pdsim {

namespace {

struct Options : ReplayOptions {
  std::vector<std::string> scenarios, modes;
  CompareOptions compare;
  std::string matrix, out;
  std::vector<std::string> fail_on;
  bool json = false;
};

bool fails_on(const Options& options, std::string_view what) {
  return std::ranges::find(options.fail_on, what) != options.fail_on.end();
}

std::vector<Subject> subjects_of(const Options& options) {
  const auto readers = std::ranges::count(options.scenarios, "-") + (options.matrix == "-" ? 1 : 0) +
                       (options.trace == "-" ? 1 : 0) + (options.prices == "-" ? 1 : 0);
  if (readers > 1 || (options.prices == "-" && options.scenarios.size() > 1)) {
    throw InputError(
        "-", "stands for stdin more than once; expected one of the scenarios, trace and prices at most");
  }
  if (!options.modes.empty() && options.matrix.empty()) {
    throw InputError("--modes", "says which variants --matrix makes; expected --matrix SCENARIO too");
  }
  std::vector<Subject> subjects;
  if (!options.matrix.empty()) {
    std::vector<std::string_view> kinds(options.modes.begin(), options.modes.end());
    if (kinds.empty()) kinds.assign(std::begin(kMatrixKinds), std::end(kMatrixKinds));
    for (Variant& v : matrix_of(read_run(options.matrix, options), kinds)) {
      subjects.push_back({v.kind, std::move(v.spec), std::move(v.note), std::move(v.cannot)});
    }
  }
  for (const std::string& path : options.scenarios) {
    Subject subject;
    subject.spec = read_run(path, options);
    subject.name = load_run(subject.spec).scenario.name;
    subjects.push_back(std::move(subject));
  }
  if (subjects.size() < 2) {
    throw InputError("compare",
                     fmt::format("has {} to compare, expected two scenarios or more, or --matrix SCENARIO",
                                 subjects.empty() ? "nothing" : "one run"));
  }
  return subjects;
}

// Files are complete or not there; the comparison itself comes last.
std::vector<std::string> write_all(const std::string& out, const Comparison& c, const std::string& document) {
  std::vector<std::string> written;
  for (const auto& [folder, files] : run_folders(c)) {
    if (!files.empty())
      std::ranges::move(write_files(out + "/" + folder, files), std::back_inserter(written));
  }
  std::ranges::move(
      write_files(out, {{"comparison.json", document}, {"differences.csv", differences_csv(c)}}),
      std::back_inserter(written));
  return written;
}

// Each reason is said; the status is that of the first.
int status_of(const Options& options, const Comparison& c) {
  if (c.interrupted) {
    fmt::print(stderr, "pdsim: interrupted; what was done is shown, and marked\n");
    return kInterrupted;
  }
  int status = kDone;
  for (const Compared& run : c.runs) {
    for (std::size_t r = 0; r < run.stalls.size(); ++r) {
      const bool stalled = !run.stalls[r].empty();
      if (!stalled && run.figures[0][r] != 0) continue;  // requests completed
      const std::string which = c.replications > 1 ? fmt::format("replication {} of ", r + 1) : "";
      fmt::print(stderr, "pdsim: {}'{}' {}\n", which, run.subject.name,
                 stalled ? "stalled" : "completed no request");
      status = kUnfinished;
    }
  }
  if (status != kDone) return status;
  if (fails_on(options, "slo")) {
    for (const Compared& run : c.runs) {
      if (!run.outcome.summary) continue;
      const std::vector<std::string> missed = missed_slo(*run.outcome.summary);
      if (missed.empty()) continue;
      fmt::print(stderr, "pdsim: --fail-on slo: '{}' misses its SLO: {}\n", run.subject.name,
                 fmt::join(missed, "; "));
      status = kFailedOn;
    }
  }
  if (fails_on(options, "regression")) {
    for (const std::string& text : regressions(c)) {
      fmt::print(stderr, "pdsim: --fail-on regression: {}\n", text);
      status = kFailedOn;
    }
  }
  return status;
}

int run_compare(const Options& options) {
  catch_interrupts();
  std::vector<Subject> subjects = subjects_of(options);
  if (!options.out.empty()) {
    constexpr std::string_view kFiles[] = {"comparison.json", "differences.csv"};
    check_folder(options.out, kFiles);
  }
  CompareOptions how = options.compare;
  how.quiet = options.quiet;
  how.needs_slo = fails_on(options, "slo");
  how.interrupted = interrupted;
  Progress progress("comparing", "requests", options.quiet);
  how.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const Comparison c = compare(std::move(subjects), how);
  progress.finish();

  const std::string document =
      comparison_json(c).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  std::vector<std::string> written;
  if (!options.out.empty()) written = write_all(options.out, c, document);
  if (options.json) {
    fmt::print("{}", document);
  } else {
    fmt::print("{}", comparison_table(c));
    if (!written.empty())
      fmt::print("wrote       {} and {} more files\n", written.back(), written.size() - 1);
  }
  return status_of(options, c);
}

}  // namespace

void add_compare(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("compare", "Replay the same requests on several deployments, side by side");
  sub->add_option("SCENARIO", options->scenarios, "Scenario files (JSON with comments); - is stdin");
  sub->add_option("--matrix", options->matrix,
                  "Make the runs from one scenario: colocated, pull, push and bidirectional on the same GPUs")
      ->type_name("SCENARIO");
  sub->add_option("--modes", options->modes,
                  "Which of them: colocated, pull, push, push_layerwise, push_progressive, bidirectional")
      ->delimiter(',')
      ->allow_extra_args(false);
  add_replay_options(*sub, *options);
  sub->add_option(
         "--replications", options->compare.replications,
         "Runs of each, the first on the requests as they are, the others on sessions drawn anew or by "
         "other seeds: gives intervals, which more replications by seeds narrow, and a longer trace "
         "otherwise")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  std::vector<std::string> names;
  for (const NamedObjective& objective : kObjectives) names.emplace_back(objective.name);
  sub->add_option(
      "--objective", options->compare.objective,
      fmt::format("What decides: {}; or min:PATH or max:PATH into the summary (default: dollars per "
                  "request within the SLO, or goodput without prices)",
                  fmt::join(names, ", ")));
  sub->add_option(
      "--baseline", options->compare.baseline,
      "Name of the run that the others are compared with, request by request (default: the first)");
  sub->add_option("--allow", options->compare.allow,
                  "Compare in spite of different workload, model (its formats too), profiles, prices or slo "
                  "(repeatable)")
      ->type_name("WHAT")
      ->delimiter(',')
      ->allow_extra_args(false);
  sub->add_option(
         "--fail-on", options->fail_on,
         "Exit status 4: slo, when a run misses its SLO; regression, when a run is worse than the first that "
         "could be run by the objective, beyond error and chance (repeatable)")
      ->check(CLI::IsMember({"slo", "regression"}))
      ->delimiter(',')
      ->allow_extra_args(false);
  sub->add_option("--jobs", options->compare.jobs, "Threads; 0 is one a core")->capture_default_str();
  sub->add_option(
      "--out", options->out,
      "Folder for comparison.json, differences.csv (a row a request) and a folder a run with what "
      "replay --out writes (made if missing)");
  sub->add_flag("--json", options->json, "The comparison as JSON on stdout");
  sub->footer(
      "Examples:\n"
      "  pdsim compare scenarios/p5en-colocated-qwen3-32b.json scenarios/p5en-1p1d-qwen3-32b.json\n"
      "  pdsim compare --matrix scenarios/p5en-1p1d-qwen3-32b.json --replications 5");
  sub->callback([options, &run] { run = [options] { return run_compare(*options); }; });
}

}  // namespace pdsim
