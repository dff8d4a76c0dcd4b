#include "models/collective.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/math.hpp"

namespace pdsim {

namespace {

/// A mode's name and a part of its kernels' names in the tables.
struct Mode {
  CollectiveMode mode;
  std::string_view name, kernel;
};
constexpr Mode kModes[] = {{CollectiveMode::graph, "graph", "graph"},
                           {CollectiveMode::eager, "eager", "eager"},
                           {CollectiveMode::nccl, "nccl", "NCCL"}};

// NCCL's all-to-all over EFA moves 79, 54, 50, 44 and 41 GB/s a GPU ("bus bandwidth") on 2, 4, 8, 16 and
// 32 p5 nodes (facts/cost-models.md, section 3). Of n GPUs' n - 1 peers, n - 8 are on other nodes, which
// leaves 42, 42, 44, 42 and 40 GB/s on a GPU's own cards, of 50 by the data sheet: one rate for all sizes.
constexpr double kEfaRate = 42;
// As large a part of ConnectX-7's 400 Gbit/s a GPU as EFA reaches of as many.
constexpr double kInfinibandRate = 42;
// NVLink's data-sheet rates, each direction: 450 GB/s on Hopper, 900 on Blackwell.
constexpr double kNvlink4 = 450, kNvlink5 = 900;
// Dispatch and combine take 457 us (pplx, H100 and EFA), 366 (pplx, B200 and EFA) and 313 (DeepEP,
// ConnectX-7) on 16 ranks of two nodes in decode (the same section), whose usual shape is 128 tokens a rank
// of 7168, 8 experts, out in fp8 and back in bf16: 22.0 MB, half of it to the other node, 7/16 over NVLink.
// What the rates do not explain is the latency of two phases.
constexpr double kEfaH100Ns = 86'000, kEfaB200Ns = 46'000, kInfinibandNs = 15'000;

constexpr ExpertFabric kFabrics[] = {
    {"efa-h100", kEfaH100Ns, kEfaRate, kNvlink4},
    {"efa-b200", kEfaB200Ns, kEfaRate, kNvlink5},
    {"infiniband", kInfinibandNs, kInfinibandRate, kNvlink4},
};

}  // namespace

std::string_view name(CollectiveMode mode) {
  return kModes[static_cast<std::size_t>(mode)].name;
}

CollectiveMode collective_mode_of(std::string_view text, std::string_view place) {
  std::vector<std::string_view> names;
  for (const Mode& each : kModes) {
    if (each.name == text) return each.mode;
    names.push_back(each.name);
  }
  throw InputError(place, fmt::format("'{}'{}: expected one of {}", text, did_you_mean(text, names),
                                      fmt::join(names, ", ")));
}

CurveChoice find_collective(const Profile& profile, CurveOp op, Dtype dtype, std::int32_t gpus,
                            CollectiveMode mode, std::string_view place) {
  if (op != CurveOp::allreduce) mode = CollectiveMode::nccl;
  const std::string_view kernel = kModes[static_cast<std::size_t>(mode)].kernel;
  const auto named = [&](std::string_view name) {
    const auto same = [](char x, char y) { return std::tolower(x) == std::tolower(y); };
    return std::search(name.begin(), name.end(), kernel.begin(), kernel.end(), same) != name.end();
  };
  constexpr double kOtherWidth = 100;    // beyond any ratio of GPU counts
  constexpr double kOtherKernel = 1000;  // a user's table may name its kernels otherwise
  const Curve* nearest = nullptr;
  double least = 0;
  for (const Curve& curve : profile.curves) {
    if (curve.op != op) continue;
    const double ratio = static_cast<double>(std::max(curve.gpus, 1)) / std::max(gpus, 1);
    const double distance = std::abs(math::log(ratio)) +
                            (bytes_per_element(curve.dtype) == bytes_per_element(dtype) ? 0 : kOtherWidth) +
                            (named(curve.kernel) ? 0 : kOtherKernel);
    if (nearest != nullptr && distance >= least) continue;
    nearest = &curve;
    least = distance;
  }
  if (nearest != nullptr) return {nearest, profile.datasheet || least != 0};
  throw InputError(place,
                   fmt::format("profile '{}' has no {} curve for {}", profile.name, name(mode), name(op)));
}

KernelTime collective_time(const Curve& curve, double bytes) {
  const KernelTime t = stream_time(curve.at(bytes), bytes);
  return curve.correction.empty() ? t : t * curve.correction.factor(std::array{bytes});
}

std::span<const ExpertFabric> expert_fabrics() {
  return kFabrics;
}

const ExpertFabric& find_expert_fabric(std::string_view name, std::string_view place) {
  std::vector<std::string_view> names;
  for (const ExpertFabric& each : kFabrics) {
    if (each.name == name) return each;
    names.push_back(each.name);
  }
  throw InputError(place, fmt::format("'{}'{}: expected one of {}", name, did_you_mean(name, names),
                                      fmt::join(names, ", ")));
}

KernelTime dispatch_combine_time(double tokens, double hidden, double topk, Dtype dtype, double ranks,
                                 double nodes, const ExpertFabric& fabric) {
  const double bytes = tokens * topk * hidden * (bytes_per_element(dtype) + kActivationBytes);
  KernelTime t;
  t.launch = 2 * fabric.latency_ns;
  t.memory = bytes * (nodes - 1) / nodes / fabric.bytes_per_ns +
             bytes * (ranks / nodes - 1) / ranks / fabric.local_bytes_per_ns;
  t.ns = t.launch + t.memory;
  return t;
}

}  // namespace pdsim
