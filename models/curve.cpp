#include "models/curve.hpp"

#include <algorithm>
#include <utility>

#include "sim/core/math.hpp"

namespace pdsim {

std::string_view name(Regime regime) {
  return regime == Regime::compute ? "compute" : regime == Regime::bandwidth ? "bandwidth" : "launch";
}

Correction::Axis::Axis(std::string axis, std::vector<double> at)
    : name(std::move(axis)), nodes(std::move(at)) {
  for (const double node : nodes) octave.push_back(pdsim::octave(node));
}

std::size_t Correction::size() const {
  std::size_t product = 1;
  for (const Axis& axis : axes) product *= axis.nodes.size();
  return product;
}

Correction::Cell Correction::cell(std::span<const double> at) const {
  Cell cell;
  cell.count = 1;
  cell.index[0] = 0;
  cell.weight[0] = 1;
  for (std::size_t a = 0; a < axes.size(); ++a) {
    const std::vector<double>& nodes = axes[a].octave;
    const double x = pdsim::octave(std::max(at[a], 1.0));
    const auto above =
        static_cast<std::size_t>(std::lower_bound(nodes.begin(), nodes.end(), x) - nodes.begin());
    std::size_t low = above > 0 ? above - 1 : 0;
    double share = 0;
    if (above == nodes.size()) {
      low = above - 1;
    } else if (above > 0) {
      share = (x - nodes[low]) / (nodes[above] - nodes[low]);
    }
    const std::size_t step = low + 1 < nodes.size() ? 1 : 0;
    for (std::size_t i = cell.count; i-- > 0;) {  // in place: each corner becomes two
      const std::size_t base = cell.index[i] * nodes.size() + low;
      const double weight = cell.weight[i];
      cell.index[2 * i + 1] = base + step;
      cell.weight[2 * i + 1] = weight * share;
      cell.index[2 * i] = base;
      cell.weight[2 * i] = weight * (1 - share);
    }
    cell.count *= 2;
  }
  return cell;
}

double Correction::factor(std::span<const double> at) const {
  if (empty()) return 1;
  const Cell corners = cell(at);
  double sum = 0;
  for (std::size_t i = 0; i < corners.count; ++i) sum += corners.weight[i] * permille[corners.index[i]];
  return math::exp(sum / 1000);
}

Correction Correction::fix(std::size_t axis, double value) const {
  Correction slice;
  if (empty()) return slice;
  Correction line;  // this axis alone: which nodes, with which weights
  line.axes = {axes[axis]};
  const Cell between = line.cell({&value, 1});
  std::size_t inner = 1;
  for (std::size_t a = axis + 1; a < axes.size(); ++a) inner *= axes[a].nodes.size();
  for (std::size_t a = 0; a < axes.size(); ++a) {
    if (a != axis) slice.axes.push_back(axes[a]);
  }
  const std::size_t nodes = axes[axis].nodes.size();
  for (std::size_t i = 0; i < slice.size(); ++i) {
    const std::size_t first = i / inner * nodes * inner + i % inner;
    double sum = 0;
    for (std::size_t c = 0; c < between.count; ++c) {
      sum += between.weight[c] * permille[first + between.index[c] * inner];
    }
    slice.permille.push_back(static_cast<std::int16_t>(std::lround(sum)));
  }
  return slice;
}

namespace {

double over(double work, double rate) {
  return rate > 0 ? work / rate : 0;
}

}  // namespace

KernelTime together(const Coefficients& fit, double launch, double flops, double bytes, double useful) {
  KernelTime t{launch, over(flops, fit.flops_per_ns), over(bytes, fit.bytes_per_ns), 0, over(useful, flops)};
  t.ns = t.launch + overlapped(t.compute, t.memory, fit.overlap);
  return t;
}

KernelTime stream_time(const Coefficients& fit, double bytes) {
  return together(fit, fit.launch_ns, 0, bytes, 0);
}

}  // namespace pdsim
