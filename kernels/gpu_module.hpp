// The GPU part of pdsim as a library that is loaded when it is wanted: cuBLAS alone would cost each start of
// pdsim a tenth of a second and 150 MiB, and the simulator must start where CUDA's libraries are gone.
#pragma once

#include "kernels/calibrate.hpp"

namespace pdsim::kernels {

/// The functions of calibrate.hpp, as the library has them.
struct GpuModule {
  bool (*find_gpu)(std::string& why);
  std::string (*device_name)();
  Measurements (*calibrate)(std::span<const Point> points, const Watch& watch, Mode mode);
};

/// Loads the library from where the build or the installation has put it (the program's RUNPATH), once, for
/// good. In builds with CUDA only. InputError with the loader's reason: a library of CUDA's is missing.
const GpuModule& gpu_module();

}  // namespace pdsim::kernels
