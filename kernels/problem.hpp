// A point of the list made ready on the GPU: what to time, how, and what it is checked by before.
#pragma once

#include <functional>
#include <string>

#include "kernels/gpu_memory.hpp"
#include "kernels/measure.hpp"
#include "kernels/shapes.hpp"

namespace pdsim::kernels {

struct Problem {
  Operation run;  ///< owns what it works on
  std::function<double()>
      error;  ///< runs it once and compares with the reference; above `tolerance` it is wrong
  double tolerance = 0;
  std::string kernel;  ///< its name in tables
  std::string choice;  ///< the variant that was taken, where there are several
  Harness::Cache cache = Harness::Cache::cold;
  Harness::Posting posting = Harness::Posting::hidden;
};

/// Memory that all copies of a calibration share: pinned memory takes long to get.
struct CopyMemory {
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;  ///< that a point asks for
  PinnedArray<unsigned char> host_in, host_out;
  GpuArray<unsigned char> from, to;
  GpuStream beside;  ///< of the other direction

  explicit CopyMemory(std::size_t bytes);
};

/// Points of op kv-copy, and the copy of an interference point. `memory` outlives the problem. Throws
/// GpuMemoryShort, CudaError, InputError for a copy that this machine cannot make (peer without a second
/// GPU).
Problem copy_problem(Copy copy, std::int64_t run_bytes, std::int64_t runs, std::int64_t sms,
                     CopyMemory& memory, std::uint64_t seed);

/// Points of the three attention operations. Their caches are noise in shuffled pages of 16 tokens. Throws
/// GpuMemoryShort, CudaError, InputError for what the kernels are not made for.
Problem attention_problem(const Point& point, std::uint64_t seed);

}  // namespace pdsim::kernels
