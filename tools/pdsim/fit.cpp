// pdsim fit: kernel curves from measured tables, or overheads from a serving benchmark (fit_bench.hpp).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/calibration.hpp"
#include "models/cost_sources.hpp"
#include "models/fit.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/fit_bench.hpp"
#include "tools/pdsim/fit_fewest.hpp"

namespace pdsim {
namespace {

struct FitOptions {
  std::vector<std::string> tables;
  std::string gpu, out, device, engine;
  Provenance provenance;
  BenchFitOptions bench;
  FewestFitOptions fewest;
};

/// The engine's kernels by --engine: a profile by name or path, a table or a folder of them; by default the
/// shipped profile of the GPU.
std::optional<Profile> engine_of(const std::string& engine, const Gpu& gpu) {
  if (engine.empty()) return shipped_engine(gpu);
  if (engine.ends_with(".csv") || engine.ends_with(".csv.gz") || std::filesystem::is_directory(engine)) {
    const std::filesystem::path tables[] = {engine};
    return fit_profile(tables, gpu, {std::filesystem::path(engine).filename().string(), "", "", ""});
  }
  return load_profile(engine, "--engine");
}

Profile profile_of(const FitOptions& options, KernelTable table, const Gpu& gpu) {
  Provenance provenance = options.provenance;
  if (!options.device.empty()) {
    return calibrated_profile(std::move(table), gpu, load_device(options.device),
                              engine_of(options.engine, gpu), provenance);
  }
  if (provenance.name.empty()) provenance.name = gpu.name;
  return fit_profile(std::move(table), gpu, provenance);
}

std::string line_of(std::string_view what, std::int64_t rows, const Accuracy& e, bool in_sample,
                    std::string_view kernel) {
  return fmt::format("{:<46} {:>7} {:>9} {:>9.1f} {:>9.1f} {:>+9.1f}  {}\n", what, rows,
                     in_sample ? "none" : fmt::format("{}", e.rows), 100 * e.median_ape, 100 * e.p90_ape,
                     100 * e.bias, kernel);
}

int fit(const FitOptions& options) {
  if (!options.fewest.shapes.empty()) {
    if (!options.out.empty()) throw InputError("--fewest", "writes a list of shapes; expected no --out");
    return fit_fewest(options.tables, options.fewest);
  }
  if (options.out.empty()) throw InputError("fit", "expected --out FILE, the profile or overheads to write");
  const BenchFitOptions& asked = options.bench;
  if (options.tables.empty() == asked.files.empty()) {
    throw InputError("fit", "expected tables of kernel times, or --from-bench and a serving benchmark");
  }
  if (!asked.files.empty()) {
    const Provenance& p = options.provenance;
    if (!options.gpu.empty() || !p.date.empty() || !p.source.empty() || !p.license.empty() ||
        !options.device.empty() || !options.engine.empty()) {
      throw InputError(
          "fit",
          "--gpu, --date, --source, --license, --device and --engine are of kernels, not of --from-bench");
    }
    BenchFitOptions bench = asked;
    bench.out = options.out;
    bench.name = p.name;
    return fit_bench(bench);
  }
  if (!asked.scenario.empty() || !asked.overheads.empty() || !asked.rules.empty() || !asked.only.empty() ||
      !asked.sets.empty() || asked.seed || asked.jobs > 0 || asked.json || asked.quiet) {
    throw InputError("fit",
                     "--scenario, --overheads, --rules, --only, --set, --seed, --jobs, --json and --quiet "
                     "are of --from-bench, not of tables");
  }
  if (!options.engine.empty() && options.device.empty()) {
    throw InputError("--engine", "is of a calibration: expected --device device.json beside it");
  }
  const std::vector<std::filesystem::path> paths(options.tables.begin(), options.tables.end());
  KernelTable table = read_kernel_tables(paths);
  const Gpu& gpu = options.gpu.empty() ? measured_gpu(table) : find_gpu(options.gpu, "--gpu");
  std::string report;
  for (const auto& [reason, rows] : table.set_aside)
    report += fmt::format("set aside {} rows: {}\n", rows, reason);
  if (!table.not_read.empty()) report += fmt::format("not read: {}\n", fmt::join(table.not_read, ", "));
  const Profile profile = profile_of(options, std::move(table), gpu);
  const std::string text = to_json(profile);
  const bool to_stdout = options.out == "-";
  if (!to_stdout) {
    std::ofstream out(options.out, std::ios::binary);
    out << text;
    if (!out.flush()) throw InputError(options.out, "cannot be written");
  }
  report += fmt::format("{} ({}), {}\n{:<46} {:>7} {:>9} {:>9} {:>9} {:>9}  kernel\n", gpu.name,
                        profile.device, profile.software, "error on held-out shapes", "rows", "held out",
                        "median %", "p90 %", "bias %");
  for (const Curve& curve : profile.curves) {
    if (curve.origin == Origin::taken) continue;
    report += line_of(describe_curve(curve), curve.rows, curve.error, curve.in_sample, curve.kernel);
  }
  for (const CopyCurve& copy : profile.copies) {
    report += line_of("kv-copy", copy.rows, copy.error, copy.error.rows == 0, copy.kind);
  }
  CostSources sources;
  sources.add(profile);
  for (const Curve& curve : profile.curves) sources.add(curve);
  if (!sources.empty()) report += sources.text() + "\n";
  fmt::print(to_stdout ? stderr : stdout, "{}", report);
  if (to_stdout) fmt::print("{}", text);
  return kDone;
}

constexpr std::string_view kFooter =
    "Tables are CSV, plain or gzip, told by their columns: those of ai-dynamo/aiconfigurator's silicon data\n"
    "(latency in ms, message_size in elements), or pdsim's own, a line a measurement:\n"
    "  op,dtype,kernel,latency_us   the operation, its number format, the kernel's name, microseconds\n"
    "  and its shape, in columns that other operations leave blank:\n"
    "  gemm                  m n k                           dtype: of the weights\n"
    "  attention-prefill     tokens prefix requests heads kv_heads head_dim window    dtype: of the KV "
    "cache\n"
    "  attention-decode      batch context heads kv_heads head_dim window\n"
    "  moe                   tokens hidden intermediate experts topk tp ep routing    routing: balanced or\n"
    "                        power_law_A; intermediate is one expert's before tp cuts it\n"
    "  allreduce, allgather, reducescatter, alltoall    bytes gpus      bytes: one GPU's message\n"
    "  mla-attention-decode  batch context heads             the attention alone (DeepSeek-V3's sizes)\n"
    "  kv-copy               run_bytes runs sms              kernel: the kind; sms 0: a copy engine\n"
    "  optional: device (as the driver calls the GPU), software; samples, spread, clock_mhz, throttled, "
    "stop\n"
    "  and the like say how a time was measured and are not read.\n"
    "A row that implies more than the GPU can do (MFU above 1) is refused with its line. Errors are of a "
    "fit\n"
    "without one group of shapes in five, on those; the profile itself is fitted to all.\n\n"
    "Example:\n"
    "  pdsim fit measured/ --out my-h200.json\n"
    "  pdsim replay scenario.json --set gpu_profile=my-h200.json\n"
    "  pdsim fit calibrated/ --device calibrated/device.json --out calibrated/profile.json";

}  // namespace

void add_fit(CLI::App& app, Command& run) {
  const auto options = std::make_shared<FitOptions>();
  CLI::App* command = app.add_subcommand(
      "fit", "Fit a kernel profile from measured tables, or overheads from a serving benchmark");
  command->add_option("tables", options->tables, "CSV files, or folders of them");
  command->add_option(
      "--gpu", options->gpu,
      "The GPU that was measured, a name in models/gpus.json (default: by the tables' device)");
  command->add_option("--device", options->device,
                      "device.json beside tables of pdsim calibrate: the profile becomes a calibration of "
                      "that GPU, with the engine's efficiency over pdsim's own kernels");
  command->add_option("--engine", options->engine,
                      "With --device: whose kernels efficiencies compare with, a profile (name or file), a "
                      "table or a folder of them (default: the profile shipped for the GPU)");
  command->add_option("--out", options->out, "The profile, or overheads, to write; - is stdout");
  command->add_option("--name", options->provenance.name,
                      "Its name (default: the GPU's, or that of the file written)");
  command->add_option("--date", options->provenance.date, "When the tables were measured or fetched");
  command->add_option("--source", options->provenance.source, "Who measured them, which revision");
  command->add_option("--license", options->provenance.license, "The tables' licence");
  command->add_option("--fewest", options->fewest.shapes,
                      "Instead: write the shortest list of shapes whose fit predicts these tables (one file "
                      "or folder a GPU) as well as theirs does, and print what it loses");
  command
      ->add_option("--within", options->fewest.within,
                   "With --fewest: percentage points of median error that may be lost")
      ->capture_default_str();
  command->add_option("--start", options->fewest.start,
                      "With --fewest: a list to begin with, and to make better");
  command
      ->add_option("--tries", options->fewest.tries,
                   "With --fewest: changes tried before the list grows by an eighth")
      ->capture_default_str();
  command->add_option("--curve", options->fewest.only,
                      "With --fewest: these curves only, as \"attention-decode bf16 head_dim 128\"");
  add_bench_fit_options(*command, options->bench);
  command->footer(std::string(kFooter) + "\n\n" + kBenchFitHelp);
  command->callback([options, &run] { run = [options] { return fit(*options); }; });
}

}  // namespace pdsim
