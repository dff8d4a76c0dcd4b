// pdsim fit: kernel curves from measured tables.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "models/fit.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"

namespace pdsim {
namespace {

struct FitOptions {
  std::vector<std::string> tables;
  std::string gpu, out;
  Provenance provenance;
};

std::string describe(const Curve& curve) {
  std::string text = fmt::format("{} {}", name(curve.op), name(curve.dtype));
  if (curve.head_dim > 0) text += fmt::format(" head_dim {}", curve.head_dim);
  if (curve.windowed) text += " window";
  if (curve.gpus > 0) text = fmt::format("{} {} GPUs", name(curve.op), curve.gpus);
  return text;
}

int fit(const FitOptions& options) {
  Provenance provenance = options.provenance;
  if (provenance.name.empty()) provenance.name = options.gpu;
  const std::vector<std::filesystem::path> tables(options.tables.begin(), options.tables.end());
  const Profile profile = fit_profile(tables, find_gpu(options.gpu, "--gpu"), provenance);
  const std::string text = to_json(profile);
  const bool to_stdout = options.out == "-";
  if (!to_stdout) {
    std::ofstream out(options.out, std::ios::binary);
    out << text;
    if (!out.flush()) throw InputError(options.out, "cannot be written");
  }
  std::string report = fmt::format("{:<36} {:>7} {:>9} {:>9} {:>9} {:>9}\n", "error on held-out shapes",
                                   "rows", "held out", "median %", "p90 %", "bias %");
  for (const Curve& curve : profile.curves) {
    const Accuracy& e = curve.error;
    report += fmt::format("{:<36} {:>7} {:>9} {:>9.1f} {:>9.1f} {:>+9.1f}\n", describe(curve), curve.rows,
                          curve.in_sample ? "none" : fmt::format("{}", e.rows), 100 * e.median_ape,
                          100 * e.p90_ape, 100 * e.bias);
  }
  fmt::print(to_stdout ? stderr : stdout, "{}", report);
  if (to_stdout) fmt::print("{}", text);
  return kDone;
}

}  // namespace

void add_fit(CLI::App& app, Command& run) {
  const auto options = std::make_shared<FitOptions>();
  CLI::App* command = app.add_subcommand("fit", "Fit a kernel profile from measured tables");
  command->add_option("tables", options->tables, "Folders, or files named gemm.csv.gz, moe.csv, ...")
      ->required();
  command->add_option("--gpu", options->gpu, "The GPU that was measured, a name in models/gpus.json")
      ->required();
  command->add_option("--out", options->out, "The profile to write; - is stdout")->required();
  command->add_option("--name", options->provenance.name, "The profile's name (default: the GPU's)");
  command->add_option("--date", options->provenance.date, "When the tables were measured or fetched");
  command->add_option("--source", options->provenance.source, "Who measured them, which revision");
  command->add_option("--license", options->provenance.license, "The tables' licence");
  command->footer("Example: pdsim fit measured/ --gpu h200 --out h200.json");
  command->callback([options, &run] { run = [options] { return fit(*options); }; });
}

}  // namespace pdsim
