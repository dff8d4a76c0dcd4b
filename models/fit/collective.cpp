// Collectives: a curve for each operation, width of elements, number of GPUs and kernel.
#include "models/collective.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/fit/fits.hpp"

namespace pdsim {
namespace {

struct Group {
  std::vector<double> bytes;
  std::vector<Sample> samples;
  Curve curve;
};

/// The sizes up to which an algorithm runs.
///
/// vLLM's custom all-reduce (csrc/custom_all_reduce.cuh): one shot below 512 KiB (4 GPUs) or 256 KiB (8),
/// two shots from there, NCCL from 8 MiB on; two GPUs always take one shot. NCCL changes its algorithm near
/// 100 MB. NCCL's own collectives turn from its low-latency protocols to the simple one between.
std::vector<Coefficients> starts_of(const Coefficients& start, std::int32_t gpus, bool custom) {
  constexpr double kKiB = 1024, kMiB = 1024 * kKiB;
  if (!custom) return split_at(start, {256 * kKiB, 8 * kMiB, 96 * kMiB});
  if (gpus <= 2) return split_at(start, {8 * kMiB - 1, 96 * kMiB});
  return split_at(start, {(gpus <= 4 ? 512 : 256) * kKiB - 1, 8 * kMiB - 1, 96 * kMiB});
}

/// The correction whose nodes are the rows `picked`, each exact.
Correction through(const Curve& curve, const Group& group, const std::vector<std::size_t>& picked) {
  Correction correction;
  std::vector<double> nodes;
  for (const std::size_t i : picked) {
    const double bytes = group.bytes[i];
    const double ratio = group.samples[i].ns / stream_time(curve.at(bytes), bytes).ns;
    nodes.push_back(bytes);
    correction.permille.push_back(static_cast<std::int16_t>(std::lround(1000 * std::log(ratio))));
  }
  correction.axes = {{"bytes", nodes}};
  return correction;
}

}  // namespace

void fit_collectives(Profile& profile, const KernelTable& table, const Gpu& gpu) {
  using Key = std::tuple<CurveOp, bool, std::uint16_t, Dtype, std::int32_t>;
  std::map<Key, Group> groups;
  for (const KernelRow& row : table.rows) {
    if (row.op < CurveOp::allreduce) continue;
    const auto gpus = static_cast<std::int32_t>(row.at("gpus"));
    const double bytes = row.at("bytes");
    const std::string& kernel = table.kernels[row.kernel];
    // An engine that replays graphs takes the custom kernels' curve; all others only who asks for them.
    const bool special =
        row.op == CurveOp::allreduce && (kernel == "NCCL" || kernel.find("eager") != kernel.npos);
    Group& group = groups[{row.op, special, row.kernel, row.dtype, gpus}];
    group.bytes.push_back(bytes);
    group.samples.push_back({row.ns, hash_of({bytes}), bytes});
    group.curve.op = row.op;
    group.curve.dtype = row.dtype;
    group.curve.gpus = gpus;
    group.curve.kernel = kernel;
    group.curve.special = special;
    widen(group.curve, "bytes", bytes);
  }
  for (auto& entry : groups) {
    const std::int32_t gpus = std::get<std::int32_t>(entry.first);
    Group& group = entry.second;
    Coefficients start = start_of(gpu, Dtype::bf16, 5000);
    start.flops_per_ns = 0;
    start.bytes_per_ns = 200;
    const bool custom = group.curve.kernel.find("custom") != std::string::npos;
    fit_regimes(group.curve, starts_of(start, gpus, custom), {kLaunch, kBytes}, {{0, 0, 1}}, group.samples,
                [&](const Coefficients& c, std::size_t i) { return stream_time(c, group.bytes[i]).ns; });
    Curve& curve = group.curve;
    if (curve.regimes.empty()) continue;
    // Sizes are an octave apart. What the curve errs between them is seen on every other one, by a
    // correction through the rest.
    std::vector<std::size_t> all(group.bytes.size()), even;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    std::sort(all.begin(), all.end(), [&](auto a, auto b) { return group.bytes[a] < group.bytes[b]; });
    for (std::size_t i = 0; i < all.size(); ++i) {
      group.samples[all[i]].held = i % 2 == 1;
      if (i % 2 == 0) even.push_back(all[i]);
    }
    if (even.size() > 2 && even.size() < all.size()) {
      curve.correction = through(curve, group, even);
      curve.in_sample = false;
      curve.error = accuracy(curve, group.samples, [&](const Coefficients&, std::size_t i) {
        return collective_time(curve, group.bytes[i]).ns;
      });
    }
    curve.correction = through(curve, group, all);
    profile.curves.push_back(std::move(curve));
  }
}

}  // namespace pdsim
