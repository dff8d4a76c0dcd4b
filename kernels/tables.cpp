#include "kernels/tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "kernels/work.hpp"

namespace pdsim::kernels {
namespace {

/// The operations that share a file. interference.csv has a form of its own.
struct Family {
  std::string_view file;
  std::vector<Op> ops;
};

const Family kFamilies[] = {{"gemm.csv", {Op::gemm}},
                            {"attention.csv", {Op::attention_prefill, Op::attention_decode}},
                            {"mla.csv", {Op::mla_decode}},
                            {"moe.csv", {Op::moe}},
                            {"kv_copy.csv", {Op::kv_copy}}};

std::string without_commas(std::string_view text) {
  std::string plain(text);
  std::replace(plain.begin(), plain.end(), ',', ' ');
  return plain;
}

std::vector<std::string_view> columns(const Family& family) {
  std::vector<std::string_view> all;
  for (const Op op : family.ops) {
    for (const std::string_view axis : axes(op)) {
      if (std::find(all.begin(), all.end(), axis) == all.end()) all.push_back(axis);
    }
  }
  return all;
}

std::string table(const Family& family, const Measurements& measured, std::string_view software) {
  const auto axis_columns = columns(family);
  const bool routed = family.ops.front() == Op::moe;
  std::string text = fmt::format(
      "op,dtype,kernel,latency_us,device,software,{}{},samples,spread,clock_mhz,throttled,"
      "stop,choice\n",
      fmt::join(axis_columns, ","), routed ? ",routing" : "");
  const std::size_t header = text.size();
  for (const Row& row : measured.rows) {
    const Point& p = row.point;
    if (std::find(family.ops.begin(), family.ops.end(), p.op) == family.ops.end()) continue;
    const Measured& m = row.measured;
    text += fmt::format("{},{},{},{:.6g},{},{}", name(p.op), name(p.format), row.kernel, m.median_us,
                        without_commas(measured.gpu.device), without_commas(software));
    const auto own = axes(p.op);
    for (const std::string_view axis : axis_columns) {
      text += ',';
      if (std::find(own.begin(), own.end(), axis) != own.end()) text += fmt::format("{}", p.at(axis));
    }
    if (routed) text += ",balanced";
    text += fmt::format(",{},{:.3g},{:.0f},{},{},{}\n", m.samples, m.spread, m.clock_mhz, m.throttled,
                        name(m.stop), without_commas(row.choice));
  }
  return text.size() == header ? "" : text;
}

std::string interference_table(const Measurements& measured, std::string_view software) {
  if (measured.interference.empty()) return "";
  std::string text = fmt::format(
      "copy,{},copy_alone_us,copy_beside_us,copy_slowed,gemm_alone_us,gemm_beside_us,gemm_slowed,device,"
      "software\n",
      fmt::join(axes(Op::interference), ","));
  for (const Interference& i : measured.interference) {
    text += name(i.point.copy);
    for (const std::string_view axis : axes(Op::interference)) text += fmt::format(",{}", i.point.at(axis));
    for (const auto& [alone, beside] :
         {std::pair(&i.copy_alone, &i.copy_beside), std::pair(&i.gemm_alone, &i.gemm_beside)})
      text += fmt::format(",{:.6g},{:.6g},{:.4g}", alone->median_us, beside->median_us,
                          beside->median_us / alone->median_us);
    text += fmt::format(",{},{}\n", without_commas(measured.gpu.device), without_commas(software));
  }
  return text;
}

/// "412 TFLOP/s, 63 %".
std::string of_peak(double rate, double peak, const char* unit) {
  if (rate == 0) return "";
  return peak > 0 ? fmt::format("{:.4g} {}, {:.0f} %", rate, unit, 100 * rate / peak)
                  : fmt::format("{:.4g} {}", rate, unit);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> tables(const Measurements& measured,
                                                        std::string_view software) {
  std::vector<std::pair<std::string, std::string>> all;
  const auto add = [&](std::string_view file, std::string text) {
    if (!text.empty()) all.emplace_back(file, std::move(text));
  };
  for (const Family& family : kFamilies) add(family.file, table(family, measured, software));
  add("interference.csv", interference_table(measured, software));
  return all;
}

std::string achieved(const Measurements& measured) {
  struct Best {
    int rows = 0;
    double tflops = 0, memory_gb_per_s = 0, link_gb_per_s = 0;
  };
  std::map<std::tuple<Op, std::string, Format>, Best> all;
  for (const Row& row : measured.rows) {
    Best& best = all[{row.point.op, row.kernel, row.point.format}];
    const Work w = work(row.point);
    const double us = row.measured.median_us;
    ++best.rows;
    best.tflops = std::max(best.tflops, w.flops / us / 1e6);
    best.memory_gb_per_s = std::max(best.memory_gb_per_s, w.memory_bytes / us / 1e3);
    best.link_gb_per_s = std::max(best.link_gb_per_s, w.link_bytes / us / 1e3);
  }
  if (all.empty()) return "";
  const Peaks& peaks = measured.peaks;
  std::string text =
      fmt::format("{:<22} {:<17} {:<5} {:>5}  {:<22} {:<22} {:<14}\n", "best of", "kernel", "dtype", "rows",
                  "of measured GEMM peak", "of measured copy peak", "over a link");
  for (const auto& [key, best] : all) {
    const auto& [op, kernel, format] = key;
    // Attention multiplies in bf16 whatever its cache holds.
    const bool fp8 = format == Format::fp8 && (op == Op::gemm || op == Op::moe);
    text += fmt::format(
        "{:<22} {:<17} {:<5} {:>5}  {:<22} {:<22} {:<14}\n", name(op), kernel, name(format), best.rows,
        of_peak(best.tflops, fp8 ? peaks.gemm_fp8_tflops : peaks.gemm_bf16_tflops, "TFLOP/s"),
        of_peak(best.memory_gb_per_s, peaks.copy_gb_per_s, "GB/s"), of_peak(best.link_gb_per_s, 0, "GB/s"));
  }
  return text;
}

}  // namespace pdsim::kernels
