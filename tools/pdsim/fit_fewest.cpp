#include "tools/pdsim/fit_fewest.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "models/csv.hpp"
#include "models/fit/fewest.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/study/files.hpp"

namespace pdsim {
namespace {

/// "attention-decode fp8 head_dim 128".
std::string curve_name(const KernelRow& row) {
  std::string text = fmt::format("{} {}", name(row.op), name(row.dtype));
  if (row.op != CurveOp::gemm && row.op != CurveOp::moe)
    text += fmt::format(" head_dim {}", row.at("head_dim"));
  return text;
}

using Shapes = std::vector<std::array<double, kShapeAxes>>;

/// The shapes of each curve in a list that was written before. Operations that no curve has are left out.
std::map<std::string, Shapes> read_list(const std::string& path) {
  std::map<std::string, Shapes> lists;
  if (path.empty()) return lists;
  const Csv in(path);
  const std::vector<CurveOp> ops = curve_ops();
  for (std::size_t i = 0; i < in.rows(); ++i) {
    const std::string_view text = in.text(i, in.column("op"));
    const auto op = std::find_if(ops.begin(), ops.end(), [&](CurveOp each) { return name(each) == text; });
    if (op == ops.end()) continue;
    KernelRow row;
    row.op = *op;
    row.dtype = dtype_of(in.text(i, in.column("dtype")), in.place(i));
    std::size_t axis = 0;
    for (const std::string_view column : shape_axes(row.op)) {
      const bool may_lack = column == "window" || column == "routing";  // none, balanced
      row.shape[axis++] = in.number(i, may_lack ? in.find(column) : in.column(column), 0);
    }
    lists[curve_name(row)].push_back(row.shape);
  }
  return lists;
}

/// Rows of serving shapes, one table a curve; of several kernels the one with the most rows.
std::map<std::string, KernelTable> by_curve(const std::string& path) {
  const std::filesystem::path paths[] = {path};
  KernelTable all = read_kernel_tables(paths);
  merge_repeats(all);
  std::map<std::string, std::map<std::uint16_t, std::size_t>> kernels;
  for (const KernelRow& row : all.rows) {
    if (serving_shape(row)) ++kernels[curve_name(row)][row.kernel];
  }
  std::map<std::string, KernelTable> tables;
  for (const auto& entry : kernels) {  // named, since clang 14 captures no structured binding
    const std::string& curve = entry.first;
    const auto& counts = entry.second;
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    KernelTable table = all;
    table.copies.clear();
    std::erase_if(table.rows, [&](const KernelRow& row) {
      return !serving_shape(row) || row.kernel != most->first || curve_name(row) != curve;
    });
    tables.emplace(curve, std::move(table));
  }
  return tables;
}

}  // namespace

int fit_fewest(const std::vector<std::string>& paths, const FewestFitOptions& options) {
  const bool to_stdout = options.shapes == "-";
  const std::string file_name = std::filesystem::path(options.shapes).filename().string();
  const std::string_view names[] = {file_name};
  if (!to_stdout) check_folder(folder_of(options.shapes), names);
  std::map<std::string, std::vector<KernelTable>> curves;
  for (const std::string& path : paths) {
    for (auto& [curve, table] : by_curve(path)) curves[curve].push_back(std::move(table));
  }
  if (curves.empty()) {
    throw InputError("--fewest", "no linear layers, attention or experts of serving shapes in these tables");
  }
  std::vector<std::string_view> known;
  for (const auto& entry : curves) known.emplace_back(entry.first);
  for (const std::string& curve : options.only) {
    if (curves.contains(curve)) continue;
    throw InputError("--curve", fmt::format("'{}' is not in these tables{}: expected one of {}", curve,
                                            did_you_mean(curve, known), fmt::join(known, ", ")));
  }
  std::erase_if(curves, [&](const auto& curve) {
    return !options.only.empty() &&
           std::find(options.only.begin(), options.only.end(), curve.first) == options.only.end();
  });
  std::set<std::string_view> axes;
  std::vector<std::string_view> columns;
  for (const auto& [curve, tables] : curves) {
    for (const std::string_view axis : shape_axes(tables.front().rows.front().op)) {
      if (axes.insert(axis).second) columns.push_back(axis);
    }
  }
  std::string csv = fmt::format("op,dtype,{}\n", fmt::join(columns, ","));
  const auto lists = read_list(options.start);
  std::FILE* const report = to_stdout ? stderr : stdout;
  fmt::print(report, "{:<36} {:<10} {:>6} {:>6} {:>12} {:>12}\n", "curve", "GPU", "rows", "shapes", "full, %",
             "these, %");
  for (const auto& [curve, tables] : curves) {
    FewestOptions search;
    search.within = options.within / 100;
    search.tries = options.tries;
    if (const auto list = lists.find(curve); list != lists.end()) search.start = list->second;
    if (search.start.empty() && !options.start.empty())
      throw InputError(options.start, fmt::format("has no shape of {}; expected some to begin with", curve));
    const Fewest found = fewest_shapes(tables, search);
    for (const FewestLoss& loss : found.losses) {
      fmt::print(report, "{:<36} {:<10} {:>6} {:>6} {:>5.1f} {:>6.1f} {:>5.1f} {:>6.1f}\n", curve, loss.gpu,
                 loss.rows, loss.shapes, 100 * loss.full.median_ape, 100 * loss.full.p90_ape,
                 100 * loss.quick.median_ape, 100 * loss.quick.p90_ape);
    }
    const auto own = shape_axes(found.like.op);
    for (const auto& shape : found.shapes) {
      csv += fmt::format("{},{}", name(found.like.op), name(found.like.dtype));
      for (const std::string_view axis : columns) {
        const auto at = std::find(own.begin(), own.end(), axis);
        csv += at == own.end() ? "," : fmt::format(",{}", shape[static_cast<std::size_t>(at - own.begin())]);
      }
      csv += '\n';
    }
  }
  if (to_stdout) {
    fmt::print("{}", csv);
  } else {
    write_files(folder_of(options.shapes), {{file_name, csv}});
  }
  return kDone;
}

}  // namespace pdsim
