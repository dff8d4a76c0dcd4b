// Routed experts: a curve for each format and kernel. Layers of a fifth of the families (hidden,
// intermediate, experts, topk) are held out whole, and so are their cuts; a curve of few families holds out
// cuts instead. What is left over the formula for the families that were measured is the correction: a
// layer that pdsim knows has its own, others borrow from those most like them.
#include "models/moe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/fit/fits.hpp"

namespace pdsim {
namespace {

struct Group {
  std::string kernel;
  std::vector<MoeShape> shapes;
  std::vector<MoeFamily> families;  ///< of each row
  std::vector<ExpertLoad> loads;
  std::vector<Sample> samples;
};

/// Kernels that a checkpoint runs only when it asks for them, by a part of their name.
///   modeloptfp8moe_flashinfer_cutlass  ModelOpt's static per-tensor fp8: 2 to 4 times slower than bf16 on
///                                      the same shapes. Checkpoints that pdsim knows take block scales.
///   w4a4mxfp4moe                       Kimi K3's compressed-tensors experts with an activation of their own
constexpr std::string_view kSpecial[] = {"modeloptfp8moe_flashinfer_cutlass", "w4a4mxfp4moe"};
/// gpt-oss's own path is what an mxfp4 checkpoint runs, however many rows another has.
constexpr std::string_view kFirst = "gptossmxfp4moe";

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

bool before(const Group& a, const Group& b) {
  if (holds(a.kernel, kFirst) != holds(b.kernel, kFirst)) return holds(a.kernel, kFirst);
  return a.samples.size() > b.samples.size();
}

/// Fits the correction to the rows that are not `held`, of the families that the curve names.
void correct(Curve& curve, const Group& group, bool all) {
  std::set<double> cuts, routings;
  CorrectionRows rows;
  for (std::size_t i = 0; i < group.shapes.size(); ++i) {
    const MoeShape& shape = group.shapes[i];
    std::array<double, 4> at;
    if ((!all && group.samples[i].held) || !moe_point(curve.families, shape, at)) continue;
    cuts.insert(at[1]);
    routings.insert(at[3]);
    rows.at.insert(rows.at.end(), at.begin(), at.end());
    rows.log_ratio.push_back(
        std::log(group.samples[i].ns / moe_time(curve.at(group.samples[i].size), shape, group.loads[i]).ns));
    rows.weight.push_back(1);
  }
  // The skewed routings differ in their loads; what the formula leaves over is the same, and the mean of
  // them less noisy. The grid is constant beyond its ends.
  const auto skewed = routings.upper_bound(kBalanced);
  if (skewed != routings.end()) routings.erase(std::next(skewed), routings.end());
  std::vector<double> family, tokens;
  for (std::size_t i = 0; i < curve.families.size(); ++i) family.push_back(static_cast<double>(i + 1));
  for (double t = 1; t <= curve.range["tokens"].most; t *= 2) tokens.push_back(t);
  curve.correction.axes = {{"family", family},
                           {"cut", {cuts.begin(), cuts.end()}},
                           {"tokens", tokens},
                           {"routing", {routings.begin(), routings.end()}}};
  constexpr double kStiff = 1e-3;  // fills what was not measured; next to nothing elsewhere
  fit_correction(curve.correction, {0, kStiff, kStiff, 0}, 0, rows);
}

bool seen(const Group& group, const MoeFamily& family) {
  for (std::size_t i = 0; i < group.samples.size(); ++i) {
    if (!group.samples[i].held && group.families[i] == family) return true;
  }
  return false;
}

/// The regimes on all rows, from where they are.
void refit(Curve& curve, const std::vector<Free>& free, const Group& group, const RowTime& formula) {
  double above = 0;
  for (Coefficients& regime : curve.regimes) {
    std::vector<std::size_t> rows;
    for (std::size_t i = 0; i < group.samples.size(); ++i) {
      if (group.samples[i].size > above && group.samples[i].size <= regime.upto) rows.push_back(i);
    }
    above = regime.upto;
    minimise(regime, free, rows, group.samples, formula);
  }
}

}  // namespace

void fit_moe(Profile& profile, const KernelTable& table, const Gpu& gpu) {
  std::map<std::pair<Dtype, std::uint16_t>, Group> groups;
  for (const KernelRow& row : table.rows) {
    if (row.op != CurveOp::moe) continue;
    Group& group = groups[{row.dtype, row.kernel}];
    group.kernel = table.kernels[row.kernel];
    group.shapes.push_back(moe_shape(row));
    group.families.push_back({row.at("hidden"), row.at("intermediate"), row.at("experts"), row.at("topk")});
    group.loads.push_back(expert_load(group.shapes.back()));
    group.samples.push_back({row.ns, 0, rows_per_expert(group.shapes.back())});
  }
  std::map<Dtype, std::vector<Group>> by_dtype;
  for (auto& [key, group] : groups) by_dtype[key.first].push_back(std::move(group));
  for (auto& [format, list] : by_dtype) {
    const Dtype dtype = format;
    std::stable_sort(list.begin(), list.end(), before);
    for (Group& group : list) {
      Curve curve;
      curve.op = CurveOp::moe;
      curve.dtype = dtype;
      curve.kernel = group.kernel;
      curve.special = std::any_of(std::begin(kSpecial), std::end(kSpecial),
                                  [&](std::string_view part) { return holds(group.kernel, part); });
      for (std::size_t i = 0; i < group.shapes.size(); ++i) {
        const MoeShape& shape = group.shapes[i];
        const MoeFamily& family = group.families[i];
        if (std::find(curve.families.begin(), curve.families.end(), family) == curve.families.end()) {
          curve.families.push_back(family);
        }
        widen(curve, "tokens", shape.tokens);
        widen(curve, "hidden", shape.hidden);
        widen(curve, "intermediate", shape.intermediate);
        widen(curve, "experts", shape.experts);
        widen(curve, "topk", shape.topk);
        widen(curve, "expert_parallel", shape.expert_parallel);
        widen(curve, "routing", shape.routing);
      }
      constexpr std::size_t kFewFamilies = 4;
      for (std::size_t i = 0; i < group.shapes.size(); ++i) {
        const MoeFamily& f = group.families[i];
        const bool few = curve.families.size() < kFewFamilies;
        const double tensor = few ? f.intermediate / group.shapes[i].intermediate : 0,
                     ranks = few ? group.shapes[i].expert_parallel : 0;
        group.samples[i].group = hash_of({f.hidden, f.intermediate, f.experts, f.topk, tensor, ranks});
      }
      Coefficients start = start_of(gpu, dtype, 20'000);
      start.flops_per_ns /= 2;
      start.element_ns = start.inner_ns = 1e-3;
      start.expert_ns = 50;
      start.parallel_ns = 1000;
      start.cache_bytes = 5e7;
      start.cache_bytes_per_ns = 3 * start.bytes_per_ns;
      // Where each expert has less than a tile of rows, padded flops and weights grow alike: the data sheet
      // tells them apart.
      const double peak = peak_ops_per_ns(gpu, dtype), memory = gpu.hbm_bytes_per_ns;
      const std::vector<Free> free = {kLaunch,
                                      {&Coefficients::flops_per_ns, 0.1 * peak, peak},
                                      {&Coefficients::bytes_per_ns, 0.1 * memory, memory},
                                      kOverlap,
                                      kElement,
                                      {&Coefficients::inner_ns, 1e-6, 1},
                                      {&Coefficients::expert_ns, 0.1, 1e4},
                                      {&Coefficients::parallel_ns, 1, 1e5},
                                      {&Coefficients::ragged, 1, 100},
                                      {&Coefficients::cache_bytes, 1e6, 2e8},
                                      {&Coefficients::cache_bytes_per_ns, memory, 10 * memory}};
      const RowTime formula = [&](const Coefficients& c, std::size_t i) {
        return moe_time(c, group.shapes[i], group.loads[i]).ns;
      };
      fit_regimes(curve, split_at(start, {0.3, 1, 3, 8, 24, 64, 256}), free,
                  {{0, 0, 1}, {16, 0, 1}, {32, 0, 1}, {64, 0, 1}, {128, 0, 1}}, group.samples, formula);
      if (curve.regimes.empty()) continue;
      if (!curve.in_sample) {
        const std::vector<MoeFamily> families = curve.families;
        std::erase_if(curve.families, [&](const MoeFamily& f) { return !seen(group, f); });
        correct(curve, group, false);
        curve.error = accuracy(curve, group.samples, [&](const Coefficients&, std::size_t i) {
          return moe_time(curve, group.shapes[i]).ns;
        });
        curve.families = families;
        refit(curve, free, group, formula);
        correct(curve, group, true);
      }
      profile.curves.push_back(std::move(curve));
    }
  }
}

}  // namespace pdsim
