// Matrix products: a curve for each format and kernel.
#include "models/gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/fit/fits.hpp"

namespace pdsim {
namespace {

struct Group {
  std::vector<GemmShape> shapes;
  std::vector<Sample> samples;
  std::vector<std::string> kernels;
  double least_m = 0, most_m = 0;
  std::vector<double> switches;  ///< the last m of each kernel but the one with the most rows

  void absorb(Group&& other) {
    switches.push_back(other.most_m < least_m ? least_m - 1 : most_m);
    shapes.insert(shapes.end(), other.shapes.begin(), other.shapes.end());
    samples.insert(samples.end(), other.samples.begin(), other.samples.end());
    kernels.insert(kernels.end(), other.kernels.begin(), other.kernels.end());
    least_m = std::min(least_m, other.least_m);
    most_m = std::max(most_m, other.most_m);
  }
};

/// One group a format and kernel, those with the most rows first; kernels that a library picks by m alone
/// (their ranges of m do not meet) are one group.
std::map<Dtype, std::vector<Group>> groups_of(const KernelTable& table) {
  std::map<std::pair<Dtype, std::uint16_t>, Group> by_kernel;
  for (const KernelRow& row : table.rows) {
    if (row.op != CurveOp::gemm) continue;
    Group& group = by_kernel[{row.dtype, row.kernel}];
    const GemmShape shape = gemm_shape(row);
    if (group.shapes.empty()) {
      group.kernels = {table.kernels[row.kernel]};
      group.least_m = group.most_m = shape.m;
    }
    group.least_m = std::min(group.least_m, shape.m);
    group.most_m = std::max(group.most_m, shape.m);
    group.shapes.push_back(shape);
    group.samples.push_back({row.ns, hash_of({shape.n, shape.k}), shape.m});
  }
  std::map<Dtype, std::vector<Group>> groups;
  for (auto& [key, group] : by_kernel) groups[key.first].push_back(std::move(group));
  for (auto& [dtype, list] : groups) {
    std::stable_sort(list.begin(), list.end(),
                     [](const Group& a, const Group& b) { return a.shapes.size() > b.shapes.size(); });
    std::vector<Group> joined;
    for (Group& group : list) {
      const auto apart = [&](const Group& g) { return g.most_m < group.least_m || group.most_m < g.least_m; };
      const auto found = std::find_if(joined.begin(), joined.end(), apart);
      if (found == joined.end()) {
        joined.push_back(std::move(group));
      } else {
        found->absorb(std::move(group));
      }
    }
    list = std::move(joined);
  }
  return groups;
}

/// The values of an axis, those nearer than a fifth of an octave to the one before left out.
std::vector<double> nodes_of(const std::vector<GemmShape>& shapes, double GemmShape::*axis) {
  constexpr double kApart = 0.2;
  std::set<double> values;
  for (const GemmShape& shape : shapes) values.insert(shape.*axis);
  std::vector<double> nodes;
  for (const double value : values) {
    if (nodes.empty() || octave(value) >= octave(nodes.back()) + kApart) nodes.push_back(value);
  }
  return nodes;
}

/// Of the sizes at which libraries are seen to pick another kernel, and the octaves between, those that
/// were measured. Where they are few, the measured ones half an octave apart.
std::vector<double> nodes_of_m(const std::vector<GemmShape>& shapes, std::initializer_list<double> wanted) {
  std::set<double> measured;
  for (const GemmShape& shape : shapes) measured.insert(shape.m);
  std::vector<double> nodes;
  for (const double m : wanted) {
    if (measured.contains(m)) nodes.push_back(m);
  }
  if (2 * nodes.size() >= wanted.size() || nodes.size() >= measured.size()) return nodes;
  nodes.clear();
  for (const double m : measured) {
    if (nodes.empty() || octave(m) >= octave(nodes.back()) + 0.5) nodes.push_back(m);
  }
  return nodes;
}

std::vector<Grid> grids_of(const std::vector<GemmShape>& shapes) {
  const std::vector<double> n = nodes_of(shapes, &GemmShape::n), k = nodes_of(shapes, &GemmShape::k);
  const std::vector<double> m =
      nodes_of_m(shapes, {1,   2,   16,  17,  32,   33,   64,   65,   128,  129,  192,
                          256, 257, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 32768});
  std::vector<Grid> grids;
  for (const double stiff : {0.0001, 0.0005, 0.002}) {
    for (const double interaction : {0.03, 0.1, 0.3}) {
      grids.push_back({{{"m", m}, {"n", n}, {"k", k}}, {0, stiff, stiff}, interaction});
    }
  }
  return grids;
}

/// For few rows: whole octaves apart, at most as far as was measured, drawn to a sum of functions of m, n
/// and k.
std::vector<Grid> coarse_grids_of(const Curve& curve) {
  const auto nodes = [&](const char* axis, std::initializer_list<double> wanted) {
    const Range range = curve.range.at(axis);
    std::vector<double> kept;
    for (const double node : wanted) {
      if (range.least <= node && node <= range.most) kept.push_back(node);
    }
    if (kept.empty()) kept = {range.least};
    return kept;
  };
  std::vector<Grid> grids;
  for (const double stiff : {0.03, 0.3, 3.0}) {
    for (const double interaction : {0.3, 3.0}) {
      grids.push_back({{{"m", nodes("m", {1, 16, 64, 128, 256, 512, 1024, 2048, 8192, 32768})},
                        {"n", nodes("n", {64, 512, 1024, 2048, 4096, 8192, 16384, 65536})},
                        {"k", nodes("k", {64, 512, 1024, 2048, 4096, 8192, 16384, 65536})}},
                       {stiff, stiff, stiff},
                       interaction});
    }
  }
  return grids;
}

}  // namespace

void fit_gemm(Profile& profile, const KernelTable& table, const Gpu& gpu) {
  std::map<Dtype, std::vector<Group>> groups = groups_of(table);
  const double bf16_peak = peak_ops_per_ns(gpu, Dtype::bf16);
  for (auto& entry : groups) {
    const Dtype dtype = entry.first;
    for (Group& group : entry.second) {
      Curve curve;
      curve.op = CurveOp::gemm;
      curve.dtype = dtype;
      curve.kernel = fmt::format("{}", fmt::join(group.kernels, ", "));
      for (const GemmShape& shape : group.shapes) {
        widen(curve, "m", shape.m);
        widen(curve, "n", shape.n);
        widen(curve, "k", shape.k);
      }
      Coefficients start = start_of(gpu, dtype, 5000);
      // The bound keeps rows of 2^i + 1, the only ragged ones measured, from standing in for other effects.
      std::vector<Free> free = {kFlops, kBytes, kOverlap, {&Coefficients::ragged, 1, 1.3}};
      if (peak_ops_per_ns(gpu, dtype) > bf16_peak) {  // activations are quantised first
        start.element_ns = 1e-3;
        free.push_back(kElement);
      }
      std::set<double> bounds(group.switches.begin(), group.switches.end());
      // The block-scaled kernels were launched one by one: up to thousands of rows every shape takes the
      // host's 60 to 330 us, and one launch more where m is no multiple of 4. The attention modules of the
      // same tables, replayed as graphs, take as long with them as with bf16. So the floor is the host's,
      // fitted apart, and what a launch on the GPU takes is that of the per-tensor fp8 kernels, which also
      // quantise first.
      const Curve* fp8 = nullptr;
      for (const Curve& each : profile.curves) {
        if (each.op == CurveOp::gemm && each.dtype == Dtype::fp8 && fp8 == nullptr) fp8 = &each;
      }
      const bool floored = fp8 != nullptr && dtype == Dtype::fp8_block;
      if (floored) bounds.insert(1);
      std::vector<Coefficients> starts;
      for (const double bound : bounds) {
        starts.push_back(start);
        starts.back().upto = bound;
      }
      starts.push_back(start);
      if (floored) {
        for (Coefficients& regime : starts) {
          regime.launch_ns = fp8->at(std::min(regime.upto, 1e5)).launch_ns;
          regime.host_ns = 6e4;
          regime.ragged_host_ns = 1e3;
        }
        free.push_back({&Coefficients::host_ns, 1e3, 1e6});
        free.push_back({&Coefficients::ragged_host_ns, 1, 1e6});
      } else {
        free.push_back(kLaunch);
      }
      CurvePlan plan;
      plan.starts = std::move(starts);
      plan.free = std::move(free);
      plan.kernel = [&](const Coefficients& c, std::size_t i) {
        return gemm_time(c, gpu.sm_count, group.shapes[i]).ns;
      };
      plan.floor = [&](const Coefficients& c, std::size_t i) { return gemm_floor(c, group.shapes[i].m); };
      plan.grids = grids_of(group.shapes);
      plan.coarse = coarse_grids_of(curve);
      plan.point = [&](std::size_t i, double* at) {
        at[0] = group.shapes[i].m;
        at[1] = group.shapes[i].n;
        at[2] = group.shapes[i].k;
      };
      fit_curve(curve, plan, group.samples);
      if (!curve.regimes.empty()) profile.curves.push_back(std::move(curve));
    }
  }
}

}  // namespace pdsim
