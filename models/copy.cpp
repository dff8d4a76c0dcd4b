#include "models/copy.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "models/profile.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

bool CopyCurve::holds(const CopyShape& shape) const {
  const auto within = [&](const char* axis, double value) {
    const auto found = range.find(axis);
    return found == range.end() || found->second.holds(value);
  };
  return within("run_bytes", shape.run_bytes) && within("runs", shape.runs) && within("sms", shape.sms);
}

KernelTime copy_time(const CopyCurve& curve, const CopyShape& shape) {
  const double lanes = std::max(shape.sms, 1.0);
  const double lane =
      curve.run_ns * shape.runs + (curve.sm_bytes_per_ns > 0 ? shape.bytes() / curve.sm_bytes_per_ns : 0);
  KernelTime t;
  t.launch = curve.launch_ns;
  t.compute = lane / lanes;
  t.memory = shape.bytes() / curve.bytes_per_ns;
  t.ns = t.launch + overlapped(t.compute, t.memory, curve.overlap);
  return t;
}

const CopyCurve& find_copy(const Profile& profile, std::string_view kind, std::string_view place) {
  std::vector<std::string_view> kinds;
  for (const CopyCurve& curve : profile.copies) {
    if (curve.kind == kind) return curve;
    kinds.push_back(curve.kind);
  }
  if (kinds.empty()) {
    throw InputError(place, fmt::format("'{}': profile '{}' has no copies; expected one that 'pdsim "
                                        "calibrate' wrote on such a machine (--profile FILE)",
                                        kind, profile.name));
  }
  throw InputError(place, fmt::format("'{}'{}: profile '{}' has {}", kind, did_you_mean(kind, kinds),
                                      profile.name, fmt::join(kinds, ", ")));
}

}  // namespace pdsim
