// `pdsim validate published`: published results replayed, their figures beside the simulated ones.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/pdsim/published.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"

namespace pdsim {

namespace {

struct Options {
  std::string folder, fail_on;
  std::vector<std::string> only;
  unsigned jobs = 0;
  bool json = false, quiet = false;
};

int published(const Options& options) {
  catch_interrupts();
  Progress progress("replaying", "runs", options.quiet);
  PublishedHooks hooks;
  hooks.interrupted = interrupted;
  hooks.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  std::vector<PublishedResult> results;
  try {
    results = replay_published(options.folder, options.only, options.jobs, hooks);
  } catch (const Unfinished& unfinished) {
    progress.finish();
    fmt::print(stderr, "pdsim: {}\n", unfinished.what);
    return kUnfinished;
  }
  progress.finish();
  const bool cut = interrupted();
  fmt::print("{}", options.json ? published_json(results, cut).dump(2) + "\n" : published_table(results));
  if (cut) {
    fmt::print(stderr, "pdsim: interrupted after {} published results; no others are shown\n",
               results.size());
    return kInterrupted;
  }
  return !options.fail_on.empty() && any_off(results) ? kFailedOn : kDone;
}

}  // namespace

void add_validate_published(CLI::App& validate, Command& run) {
  CLI::App* sub = validate.add_subcommand(
      "published", "Replay published results and print their figures beside the simulated ones");
  auto options = std::make_shared<Options>();
  sub->add_option("DIR", options->folder,
                  "Folder of published results (pdsim schema published), or one file; - is stdin")
      ->required();
  add_repeatable(*sub, "--only", options->only, "Only the result of this name");
  sub->add_option("--jobs", options->jobs, "Runs at a time; 0 = one for each core")->capture_default_str();
  sub->add_option("--fail-on", options->fail_on,
                  "regression: exit status 4 when a figure is off or a relation does not hold")
      ->check(CLI::IsMember({"regression"}));
  sub->add_flag("--json", options->json, "One JSON document (schema pdsim.published-report/1)");
  sub->add_flag("--quiet", options->quiet, "No progress on stderr");
  sub->footer(
      "What a source specifies is judged by its tolerance (10 % unless it says otherwise); where the source\n"
      "leaves the configuration open, by sign and order. The status is 0 whatever the verdict, unless\n"
      "--fail-on asks.\n\n"
      "Example:\n  pdsim validate published scenarios/published --only posting");
  sub->callback([options, &run] { run = [options] { return published(*options); }; });
}

}  // namespace pdsim
