// `pdsim validate serving`: measured serving points (a benchmark table) beside simulated ones.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/pdsim/serving.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"

namespace pdsim {

namespace {

struct Options {
  std::string table, csv;
  ServingOptions serving;
  bool json = false, quiet = false;
};

int serving(const Options& options) {
  if (options.json && options.csv == "-") {
    throw InputError("--csv -", "with --json both would go to stdout: expected a file, or one of the two");
  }
  catch_interrupts();
  if (!options.csv.empty() && options.csv != "-") check_folder(folder_of(options.csv));
  Progress progress("simulating", "runs", options.quiet);
  ServingOptions serving = options.serving;
  serving.interrupted = interrupted;
  serving.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const std::vector<ServingPoint> points = serve_points(options.table, serving);
  progress.finish();
  const bool cut = interrupted();
  if (options.csv == "-") {
    fmt::print("{}", serving_csv(points));
  } else {
    fmt::print("{}", options.json ? serving_json(points, cut).dump(2) + "\n" : serving_table(points));
    if (!options.csv.empty()) {
      write_files(folder_of(options.csv),
                  {{std::filesystem::path(options.csv).filename().string(), serving_csv(points)}});
    }
  }
  if (cut) fmt::print(stderr, "pdsim: interrupted; the rows that had not run are listed as such\n");
  return cut ? kInterrupted : kDone;
}

}  // namespace

void add_validate_serving(CLI::App& validate, Command& run) {
  CLI::App* sub = validate.add_subcommand(
      "serving", "Simulate each row of a table of serving benchmarks and print the errors");
  auto options = std::make_shared<Options>();
  sub->add_option("POINTS", options->table,
                  "CSV, plain or gzip: model, gpu, engine, precision, tp, isl, osl, "
                  "concurrency or rate_rps, ttft_ms, tpot_ms, ... ")
      ->required();
  add_serving_options(*sub, options->serving);
  add_repeatable(*sub, "--set", options->serving.sets, "PATH=VALUE in every row's scenario, after the rules");
  sub->add_option("--csv", options->csv,
                  "Also one CSV row a point, into this file; - = stdout, instead of the table");
  sub->add_flag("--json", options->json, "One JSON document (schema pdsim.validate-serving/1)");
  sub->add_flag("--quiet", options->quiet, "No progress on stderr");
  sub->footer(
      "A row becomes a closed loop at its concurrency, or an open one at its rate; what it does not state "
      "(server\n"
      "flags, how lengths are drawn) comes from the rules, each with its source. Errors are simulated over "
      "measured\n"
      "less 1, of mean TTFT, mean TPOT and output tokens per second of a GPU. GPUs whose kernels were not "
      "measured\n"
      "are reported apart and are not in the total. Rows that are not simulated are counted by reason.\n\n"
      "Example:\n  pdsim validate serving points.csv --only engine=vllm --only gpu=h200_sxm --csv rows.csv");
  sub->callback([options, &run] { run = [options] { return serving(*options); }; });
}

}  // namespace pdsim
