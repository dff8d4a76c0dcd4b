#include "models/cost_sources.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/profile.hpp"

namespace pdsim {

std::string describe_curve(const Curve& curve) {
  std::string text = fmt::format("{} {}", name(curve.op), name(curve.dtype));
  if (curve.head_dim > 0) text += fmt::format(" head_dim {}", curve.head_dim);
  if (curve.window > 0) text += fmt::format(" window {}", curve.window);
  if (curve.gpus > 0) text = fmt::format("{} {} GPUs", name(curve.op), curve.gpus);
  return text;
}

void CostSources::add(const Profile& profile) {
  if (!profile.calibration) return;
  const Device& device = profile.calibration->device;
  std::string text = device.name;
  if (device.clock_mhz > 0) text += fmt::format(", {:.0f} MHz", device.clock_mhz);
  if (device.power_limit_w > 0) text += fmt::format(", {:.0f} W", device.power_limit_w);
  if (!device.date.empty()) text += fmt::format(", {}", device.date);
  if (device.status == "interrupted") text += ", interrupted";
  devices.insert(std::move(text));
  if (!profile.calibration->engine.empty()) engines.insert(profile.calibration->engine);
}

void CostSources::add(const Curve& curve) {
  switch (curve.origin) {
    case Origin::tables:
      break;
    case Origin::here:
      engine_efficiency[describe_curve(curve)] = curve.efficiency.factor;
      break;
    case Origin::own_kernel:
      own_kernel.insert(describe_curve(curve));
      break;
    case Origin::taken:
      taken.insert(describe_curve(curve));
      break;
  }
}

void CostSources::add(const CostSources& other) {
  devices.insert(other.devices.begin(), other.devices.end());
  engines.insert(other.engines.begin(), other.engines.end());
  engine_efficiency.insert(other.engine_efficiency.begin(), other.engine_efficiency.end());
  own_kernel.insert(other.own_kernel.begin(), other.own_kernel.end());
  taken.insert(other.taken.begin(), other.taken.end());
}

std::string CostSources::text() const {
  if (empty()) return "";
  std::string out = fmt::format("calibrated here: {}", fmt::join(devices, "; "));
  const char* before = "; engine efficiency ";
  for (const auto& [curve, factor] : engine_efficiency) {
    out += fmt::format("{}{} {:.2f}", before, curve, factor);
    before = ", ";
  }
  if (!own_kernel.empty()) out += fmt::format("; own kernels: {}", fmt::join(own_kernel, ", "));
  if (!taken.empty()) {
    constexpr std::size_t kListed = 6;
    out += fmt::format("; from {}, not measured here: {}", fmt::join(engines, ", "),
                       taken.size() <= kListed ? fmt::format("{}", fmt::join(taken, ", "))
                                               : fmt::format("{} curves", taken.size()));
  }
  return out;
}

}  // namespace pdsim
