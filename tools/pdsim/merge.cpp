// pdsim merge: one file of results out of those of shards.
#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/sweep_output.hpp"
#include "tools/study/analysis.hpp"
#include "tools/study/database.hpp"
#include "tools/study/interrupt.hpp"

namespace pdsim {

namespace {

struct Options : MergeOptions {
  std::vector<std::string> inputs;
  std::string db, csv;
  bool json = false;
};

int merge(const Options& options) {
  catch_interrupts();
  signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is a failed write, and said to be one
  if (options.json && options.csv == "-") {
    throw InputError("--csv", "is -, and so is --json's place; expected one of them on stdout");
  }
  check_csv(options.csv);
  check_places({{"--db", options.db}, {"--csv", options.csv}}, options.inputs);
  merge_databases(options.inputs, options.db, options);
  const SweepDatabase merged(options.db);
  if (!options.csv.empty()) {
    try {
      write_csv(merged, options.csv);
    } catch (const DatabaseFailed&) {
      throw;
    } catch (const InputError& error) {
      throw InputError("--csv", fmt::format("{}; the results are in {}", error.what(), options.db));
    }
  }
  const SweepCounts counts = count_points(merged, merged.points());
  if (options.json) {
    fmt::print("{}", report_json(merged, counts, false));
  } else {
    std::FILE* to = options.csv == "-" ? stderr : stdout;
    fmt::print(to, "{}: {}, from {} file{}\n\n{}\nresults             {}\n", merged.space().name,
               counts_text(counts), options.inputs.size(), options.inputs.size() == 1 ? "" : "s",
               sweep_report(merged.space(), merged.rows()), options.db);
    if (!options.csv.empty() && options.csv != "-") fmt::print(to, "                    {}\n", options.csv);
  }
  return counts.of(PointStatus::finished) > 0 ? kDone : kUnfinished;
}

}  // namespace

void add_merge(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("merge", "Join the results of a sweep's shards into one file");
  sub->add_option("DB", options->inputs, "Files that pdsim sweep --shard wrote")->required();
  sub->add_option("--db", options->db, "File for the results; must not be there yet")->required();
  sub->add_option(
      "--csv", options->csv,
      "File for the view results as CSV, in order of point; - is stdout. The bytes are those of a "
      "sweep that was never cut into shards");
  sub->add_flag("--json", options->json, "The report as JSON on stdout");
  sub->add_flag("--allow-gaps", options->allow_gaps, "Join even if points of the sweep are missing");
  sub->add_flag("--allow-duplicates", options->allow_duplicates,
                "Join even if points are in several files; their results must be equal all the same");
  sub->add_flag("--allow-mixed-versions", options->allow_mixed_versions,
                "Join results of several versions of pdsim, which may not be comparable: the data that they "
                "ship may differ");
  sub->footer("Example:\n  pdsim merge shard-*.db --db sweep.db --csv sweep.csv");
  sub->callback([options, &run] { run = [options] { return merge(*options); }; });
}

}  // namespace pdsim
