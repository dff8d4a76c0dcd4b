// pdsim fit: kernel curves from measured tables, or overheads from a serving benchmark (fit_bench.hpp).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/fit.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/fit_bench.hpp"

namespace pdsim {
namespace {

struct FitOptions {
  std::vector<std::string> tables;
  std::string gpu, out;
  Provenance provenance;
  BenchFitOptions bench;
};

std::string describe(const Curve& curve) {
  std::string text = fmt::format("{} {}", name(curve.op), name(curve.dtype));
  if (curve.head_dim > 0) text += fmt::format(" head_dim {}", curve.head_dim);
  if (curve.window > 0) text += fmt::format(" window {}", curve.window);
  if (curve.gpus > 0) text = fmt::format("{} {} GPUs", name(curve.op), curve.gpus);
  return text;
}

int fit(const FitOptions& options) {
  const BenchFitOptions& asked = options.bench;
  if (options.tables.empty() == asked.files.empty()) {
    throw InputError("fit", "expected tables of kernel times, or --from-bench and a serving benchmark");
  }
  if (!asked.files.empty()) {
    const Provenance& p = options.provenance;
    if (!options.gpu.empty() || !p.date.empty() || !p.source.empty() || !p.license.empty()) {
      throw InputError("fit", "--gpu, --date, --source and --license are of kernels, not of --from-bench");
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
  const std::vector<std::filesystem::path> paths(options.tables.begin(), options.tables.end());
  KernelTable table = read_kernel_tables(paths);
  const Gpu& gpu = options.gpu.empty() ? measured_gpu(table) : find_gpu(options.gpu, "--gpu");
  Provenance provenance = options.provenance;
  if (provenance.name.empty()) provenance.name = gpu.name;
  std::string report;
  for (const auto& [reason, rows] : table.set_aside)
    report += fmt::format("set aside {} rows: {}\n", rows, reason);
  const Profile profile = fit_profile(std::move(table), gpu, provenance);
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
    const Accuracy& e = curve.error;
    report += fmt::format("{:<46} {:>7} {:>9} {:>9.1f} {:>9.1f} {:>+9.1f}  {}\n", describe(curve), curve.rows,
                          curve.in_sample ? "none" : fmt::format("{}", e.rows), 100 * e.median_ape,
                          100 * e.p90_ape, 100 * e.bias, curve.kernel);
  }
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
    "  optional: device (as the driver calls the GPU), software.\n"
    "A row that implies more than the GPU can do (MFU above 1) is refused with its line. Errors are of a "
    "fit\n"
    "without one group of shapes in five, on those; the profile itself is fitted to all.\n\n"
    "Example:\n"
    "  pdsim fit measured/ --out my-h200.json\n"
    "  pdsim replay scenario.json --set gpu_profile=my-h200.json";

}  // namespace

void add_fit(CLI::App& app, Command& run) {
  const auto options = std::make_shared<FitOptions>();
  CLI::App* command = app.add_subcommand(
      "fit", "Fit a kernel profile from measured tables, or overheads from a serving benchmark");
  command->add_option("tables", options->tables, "CSV files, or folders of them");
  command->add_option(
      "--gpu", options->gpu,
      "The GPU that was measured, a name in models/gpus.json (default: by the tables' device)");
  command->add_option("--out", options->out, "The profile, or overheads, to write; - is stdout")->required();
  command->add_option("--name", options->provenance.name,
                      "Its name (default: the GPU's, or that of the file written)");
  command->add_option("--date", options->provenance.date, "When the tables were measured or fetched");
  command->add_option("--source", options->provenance.source, "Who measured them, which revision");
  command->add_option("--license", options->provenance.license, "The tables' licence");
  add_bench_fit_options(*command, options->bench);
  command->footer(std::string(kFooter) + "\n\n" + kBenchFitHelp);
  command->callback([options, &run] { run = [options] { return fit(*options); }; });
}

}  // namespace pdsim
