// Whose measurements a run's step times rest on, where its profile is a calibration: what summary.json and
// `describe` say of it. Empty for every other profile.
#pragma once

#include <map>
#include <set>
#include <string>

namespace pdsim {

struct Curve;
struct Profile;

/// Curves that a run uses, by name ("gemm bf16", "attention-decode fp8 head_dim 128").
struct CostSources {
  std::set<std::string> devices;                    ///< "NVIDIA H100 80GB HBM3, 1980 MHz, 700 W, 2026-11-30"
  std::set<std::string> engines;                    ///< profiles that efficiencies compare with
  std::map<std::string, double> engine_efficiency;  ///< measured here; the factor taken beside it
  std::set<std::string> own_kernel;                 ///< measured here, and no engine's time to compare with
  std::set<std::string> taken;                      ///< not measured here, but in the engine's profile

  bool empty() const { return devices.empty(); }
  /// Counts the profile in. Nothing where it is no calibration.
  void add(const Profile& profile);
  /// Counts a curve of such a profile in.
  void add(const Curve& curve);
  void add(const CostSources& other);

  /// "calibrated here: DEVICE; engine efficiency gemm bf16 0.98, ...; own kernels: ...; from h100, not
  /// measured here: ...", the last counted where they are many.
  std::string text() const;
};

/// "attention-decode fp8 head_dim 128".
std::string describe_curve(const Curve& curve);

}  // namespace pdsim
