// pdsim validate kernels: measured kernel times beside what a profile says of them, row by row.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/kernel_time.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/study/files.hpp"

namespace pdsim {
namespace {

using Json = nlohmann::ordered_json;

struct KernelOptions {
  std::vector<std::string> tables;
  std::string gpu, profile, csv;
  std::size_t worst = 20;
  bool json = false;
};

struct Checked {
  const KernelRow* row = nullptr;
  Prediction prediction;
  double error() const { return prediction.time.ns / row->ns - 1; }
};

struct Errors {
  std::vector<double> signed_errors;
  std::int64_t extrapolated = 0, stand_in = 0;

  void add(const Checked& row) {
    signed_errors.push_back(row.error());
    extrapolated += row.prediction.within ? 0 : 1;
    stand_in += row.prediction.choice.stand_in ? 1 : 0;
  }
};

/// numpy's linear percentile.
double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = p * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

Json summary(const Errors& errors) {
  std::vector<double> absolute;
  for (const double error : errors.signed_errors) absolute.push_back(std::abs(error));
  Json json;
  json["n"] = errors.signed_errors.size();
  json["median_ape"] = percentile(absolute, 0.5);
  json["p90_ape"] = percentile(absolute, 0.9);
  json["bias"] = percentile(errors.signed_errors, 0.5);
  json["extrapolated"] = errors.extrapolated;
  json["stand_in"] = errors.stand_in;
  return json;
}

/// What sets an operation's size: a library picks kernels by it.
std::string size_class(const KernelRow& row) {
  const auto band = [](std::string_view axis, double value, std::initializer_list<double> bounds) {
    double above = 0;
    for (const double bound : bounds) {
      if (value <= bound) return fmt::format("{} {}-{}", axis, above + 1, bound);
      above = bound;
    }
    return fmt::format("{} > {}", axis, above);
  };
  switch (row.op) {
    case CurveOp::gemm:
      return band("m", row.at("m"), {16, 256, 2048});
    case CurveOp::moe:
      return band("tokens", row.at("tokens"), {16, 256, 2048});
    case CurveOp::attention_prefill:
    case CurveOp::mla_prefill:
    case CurveOp::dsa_prefill:
      return band("tokens", row.at("tokens"), {128, 1024, 4096});
    case CurveOp::attention_decode:
    case CurveOp::mla_decode:
    case CurveOp::dsa_decode:
      return band("context", row.at("context"), {512, 4096, 32768});
    case CurveOp::allreduce:
    case CurveOp::allgather:
    case CurveOp::reducescatter:
    case CurveOp::alltoall:
      break;
  }
  return band("bytes", row.at("bytes"), {65536, 1048576, 67108864});
}

/// Operation, format, kernel, size class, what limits.
using Group = std::tuple<std::string, std::string, std::string, std::string, std::string>;

Group group_of(const KernelTable& table, const Checked& checked) {
  const KernelRow& row = *checked.row;
  return {std::string(name(row.op)), std::string(name(row.dtype)), table.kernels[row.kernel], size_class(row),
          std::string(name(checked.prediction.time.regime()))};
}

Json row_json(const KernelTable& table, const Checked& checked) {
  const KernelRow& row = *checked.row;
  Json json;
  json["place"] = table.place(row);
  json["op"] = name(row.op);
  json["dtype"] = name(row.dtype);
  json["kernel"] = table.kernels[row.kernel];
  const auto axes = shape_axes(row.op);
  for (std::size_t i = 0; i < axes.size(); ++i) json["shape"][std::string(axes[i])] = row.shape[i];
  json["measured_us"] = row.ns / 1e3;
  json["predicted_us"] = checked.prediction.time.ns / 1e3;
  json["error"] = checked.error();
  json["regime"] = name(checked.prediction.time.regime());
  json["extrapolated"] = !checked.prediction.within;
  json["stand_in"] = checked.prediction.choice.stand_in;
  return json;
}

std::string csv_text(const KernelTable& table, const std::vector<Checked>& rows) {
  std::string text =
      "place,op,dtype,kernel,shape,measured_us,predicted_us,error,regime,extrapolated,stand_in\n";
  for (const Checked& checked : rows) {
    const KernelRow& row = *checked.row;
    text +=
        fmt::format("{},{},{},{},{},{:.6g},{:.6g},{:.4f},{},{},{}\n", table.place(row), name(row.op),
                    name(row.dtype), table.kernels[row.kernel], describe_shape(row), row.ns / 1e3,
                    checked.prediction.time.ns / 1e3, checked.error(), name(checked.prediction.time.regime()),
                    checked.prediction.within ? 0 : 1, checked.prediction.choice.stand_in ? 1 : 0);
  }
  return text;
}

int validate_kernels(const KernelOptions& options) {
  const std::vector<std::filesystem::path> paths(options.tables.begin(), options.tables.end());
  const bool csv_to_stdout = options.csv == "-";
  if (csv_to_stdout && options.json) {
    throw InputError("--csv -", "with --json both would go to stdout: expected a file, or one of the two");
  }
  if (!options.csv.empty() && !csv_to_stdout) check_folder(folder_of(options.csv));
  const Gpu& gpu = find_gpu(options.gpu, "--gpu");
  const Profile profile = load_profile(options.profile.empty() ? gpu.name : options.profile,
                                       options.profile.empty() ? "--gpu" : "--profile");
  const KernelTable table = read_kernel_tables(paths);
  std::map<std::string, std::int64_t> set_aside = table.set_aside;
  std::vector<Checked> rows;
  Errors all;
  std::map<std::pair<std::string, std::string>, Errors> by_op;
  std::map<Group, Errors> groups;
  for (const KernelRow& row : table.rows) {
    Checked checked{&row, {}};
    try {
      checked.prediction = predict(profile, gpu, table, row);
    } catch (const InputError& error) {  // no curve: counted, its place left out so that like ones add up
      std::string reason = error.what();
      const std::string place = table.place(row) + ": ";
      if (reason.starts_with(place)) reason.erase(0, place.size());
      ++set_aside[reason];
      continue;
    }
    all.add(checked);
    by_op[{std::string(name(row.op)), std::string(name(row.dtype))}].add(checked);
    groups[group_of(table, checked)].add(checked);
    rows.push_back(checked);
  }
  std::vector<const Checked*> worst;
  for (const Checked& row : rows) worst.push_back(&row);
  const std::size_t shown = std::min(options.worst, worst.size());
  std::partial_sort(worst.begin(), worst.begin() + static_cast<std::ptrdiff_t>(shown), worst.end(),
                    [](const Checked* a, const Checked* b) {
                      // A factor two too slow is as wrong as one too fast.
                      const auto off = [](const Checked* c) {
                        return std::abs(std::log(c->prediction.time.ns / c->row->ns));
                      };
                      return off(a) > off(b);
                    });
  worst.resize(shown);
  if (!options.csv.empty()) {
    const std::string text = csv_text(table, rows);
    if (csv_to_stdout) {
      fmt::print("{}", text);
      return kDone;
    }
    write_files(folder_of(options.csv), {{std::filesystem::path(options.csv).filename().string(), text}});
  }
  constexpr std::string_view kNote =
      "A shipped profile is fitted to public tables: of rows that are in them this is the error in sample. "
      "Which rows those are a profile does not know; the error on shapes it had not seen is its held_out.";
  Json report;
  report["schema"] = "pdsim.kernel-report/1";
  report["gpu"] = gpu.name;
  report["profile"] = profile.name;
  if (profile.datasheet) report["datasheet"] = true;
  report["tables"] = {{"device", table.device}, {"software", table.software}};
  report["overall"] = summary(all);
  report["operations"] = Json::array();
  for (const auto& [key, errors] : by_op) {
    Json json = {{"op", key.first}, {"dtype", key.second}};
    json.update(summary(errors));
    report["operations"].push_back(std::move(json));
  }
  report["groups"] = Json::array();
  for (const auto& [key, errors] : groups) {
    const auto& [op, dtype, kernel, size, regime] = key;
    Json json = {{"op", op}, {"dtype", dtype}, {"kernel", kernel}, {"size", size}, {"regime", regime}};
    json.update(summary(errors));
    report["groups"].push_back(std::move(json));
  }
  report["worst"] = Json::array();
  for (const Checked* row : worst) report["worst"].push_back(row_json(table, *row));
  report["set_aside"] = Json::array();
  for (const auto& [reason, count] : set_aside) {
    report["set_aside"].push_back({{"rows", count}, {"reason", reason}});
  }
  report["note"] = kNote;
  if (options.json) {
    fmt::print("{}\n", report.dump(2));
    return kDone;
  }
  const auto figures = [](const Json& json) {
    return fmt::format("{:>8} {:>8.1f} {:>8.1f} {:>+8.1f}", json["n"].get<std::size_t>(),
                       100 * json["median_ape"].get<double>(), 100 * json["p90_ape"].get<double>(),
                       100 * json["bias"].get<double>());
  };
  std::string text = fmt::format("{} on {} ({})\n{:<72} {:>8} {:>8} {:>8} {:>8}\n", profile.label(),
                                 table.device, table.software, "", "rows", "median %", "p90 %", "bias %");
  for (const Json& json : report["groups"]) {
    text += fmt::format(
        "{:<72} {}\n",
        fmt::format("{} {} {} {} {}", json["op"].get<std::string>(), json["dtype"].get<std::string>(),
                    json["size"].get<std::string>(), json["regime"].get<std::string>(),
                    json["kernel"].get<std::string>().substr(0, 28)),
        figures(json));
  }
  text += "\n";
  for (const Json& json : report["operations"]) {
    text += fmt::format("{:<72} {}\n", json["op"].get<std::string>() + " " + json["dtype"].get<std::string>(),
                        figures(json));
  }
  text += fmt::format("{:<72} {}\n", "all", figures(report["overall"]));
  if (shown > 0) text += "\nworst rows\n";
  for (const Checked* row : worst) {
    text += fmt::format("{} {} {} {}: {:.1f} us, predicted {:.1f}, {}{}\n", table.place(*row->row),
                        name(row->row->op), name(row->row->dtype), describe_shape(*row->row),
                        row->row->ns / 1e3, row->prediction.time.ns / 1e3,
                        name(row->prediction.time.regime()), row->prediction.within ? "" : ", extrapolated");
  }
  for (const auto& [reason, count] : set_aside) text += fmt::format("set aside {} rows: {}\n", count, reason);
  fmt::print("{}{}\n", text, kNote);
  return kDone;
}

}  // namespace

void add_validate_kernels(CLI::App& validate, Command& run) {
  const auto options = std::make_shared<KernelOptions>();
  CLI::App* sub =
      validate.add_subcommand("kernels", "Measured kernel times beside what a profile says of them");
  sub->add_option("TABLES", options->tables, "CSV files as pdsim fit reads them, or folders of them")
      ->required();
  sub->add_option("--gpu", options->gpu, "A name in models/gpus.json")->required();
  sub->add_option("--profile", options->profile,
                  "Kernel profile: a name or a JSON file, - is stdin (default: the GPU's)");
  sub->add_option("--csv", options->csv,
                  "Write every row, measured and predicted, to this file; - = stdout, instead of the table");
  sub->add_option("--worst", options->worst, "How many of the worst rows to show")->capture_default_str();
  sub->add_flag("--json", options->json, "One JSON document on stdout (schema pdsim.kernel-report/1)");
  sub->footer(
      "Errors are |predicted / measured - 1|: median, 90th percentile, and bias, the median of the signed\n"
      "error; per operation, format, kernel, size and what limits.\n\n"
      "Example:\n  pdsim validate kernels --gpu h200 gemm.csv.gz --json");
  sub->callback([options, &run] { run = [options] { return validate_kernels(*options); }; });
}

}  // namespace pdsim
