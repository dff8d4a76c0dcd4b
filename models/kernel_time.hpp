// What a profile says of a measured row: the face of the kernel curves that `pdsim validate kernels` checks.
#pragma once

#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/profile.hpp"

namespace pdsim {

struct Prediction {
  KernelTime time;  ///< of the whole row: the host's floor and what stands beside the kernel are in `launch`
  CurveChoice choice;
  bool within = true;  ///< every axis of the shape in the curve's measured range
};

/// Predicts by the curve of the row's own kernel where the profile has it, otherwise by the curve that a
/// simulation would take, as a stand-in. InputError at the row's place when there is none.
Prediction predict(const Profile& profile, const Gpu& gpu, const KernelTable& table, const KernelRow& row);

/// Whether a curve was fitted to this kernel; its name lists those it was fitted to, with commas.
bool has_kernel(const Curve& curve, std::string_view kernel);

}  // namespace pdsim
