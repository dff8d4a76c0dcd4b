// `pdsim calibrate --out DIR`: measures this machine's GPU and fits a profile to it.
#pragma once

#include <string>
#include <vector>

#include "tools/pdsim/commands.hpp"

namespace pdsim {

struct CalibrateOptions {
  bool quick = false, dry_run = false, check = false, quiet = false;
  std::string out, gpu, name;
  std::vector<std::string> models;
  std::vector<int> tensor;
};

/// Adds its options to `calibrate`, which may have subcommands.
void add_calibrate_gpu_options(CLI::App& calibrate, CalibrateOptions& options);

/// Measures and fits; or only checks the kernels; or prints what it would measure. Writes the tables,
/// device.json and profile.json into `out`. Exit status: 1 where a kernel's result was wrong or CUDA failed,
/// 130 after Ctrl-C. InputError, and nothing written: no GPU, a build without CUDA, a GPU that
/// models/gpus.json does not know, a model that cannot be cut.
int calibrate_gpu(const CalibrateOptions& options);

}  // namespace pdsim
