// Copies of KV blocks on one machine, as `pdsim calibrate` measures them: gather and scatter by
// multiprocessors, batches of descriptors by copy engines, pinned host memory, a second GPU.
//
//   t = launch + M((run * runs + bytes / per_sm) / lanes, bytes / rate)
//
// `runs` contiguous pieces of equal length make `bytes`. Each costs `run` of the lane that handles it: one of
// `sms` multiprocessors, or the one queue of a copy engine (sms 0), which has no `per_sm`. So short runs are
// slow: bytes / t rises with the length of a run as l / (l + run rate). M is the smooth maximum of
// models/curve.hpp; with overlap 0 it is the sum of both.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/curve.hpp"

namespace pdsim {

struct Profile;

struct CopyShape {
  double run_bytes = 0, runs = 0;
  double sms = 0;  ///< multiprocessors that copy; 0: a copy engine

  double bytes() const { return run_bytes * runs; }
};

/// One kind of copy.
struct CopyCurve {
  std::string kind;  ///< the table's `kernel`: "batch-h2d"
  double launch_ns = 0;
  double run_ns = 0;           ///< of one run
  double bytes_per_ns = 0;     ///< of the whole copy
  double sm_bytes_per_ns = 0;  ///< of one multiprocessor; 0: a copy engine, or never the limit
  double overlap = 0;
  std::int64_t rows = 0;
  std::map<std::string, Range> range;  ///< what was measured: "run_bytes", "runs", "sms"
  Accuracy error;                      ///< on lengths of runs that the fit had not seen

  bool holds(const CopyShape& shape) const;
};

/// Requires runs, run_bytes > 0, and sms > 0 where the curve was measured with multiprocessors.
KernelTime copy_time(const CopyCurve& curve, const CopyShape& shape);

/// Of this kind. InputError at `place`: the profile has no copies (it was not calibrated), or none of the
/// kind, with the nearest and all that it has.
const CopyCurve& find_copy(const Profile& profile, std::string_view kind, std::string_view place);

}  // namespace pdsim
