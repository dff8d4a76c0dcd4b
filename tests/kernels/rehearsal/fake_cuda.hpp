// A CUDA runtime and a cuBLAS on the CPU, with a clock of their own: the harness's host code runs on it as it
// would on a GPU, and every time that it measures is known beforehand. Kernels run on the emulator. Of both
// libraries there is what the harness calls and no more.
//
// Time. Posting anything costs the host kPostNs. On the GPU a kernel takes kKernelNs, a copy of b bytes
// kCopyNs + b, a multiplication flops / kFlopsPerNs, each from when its stream is free. A kernel that polls
// the host ends when the host waits for it, for that is when the host has done what it is polled for.
//
// Order. Work runs when the host waits for its stream and no sooner: memory read without waiting is stale.
//
// Strictness. What is copied and multiplied lies within an allocation of the right kind, what is copied later
// in the GPU's memory or pinned; a batch is not for the null stream; fp8 is "TN" and by 16; no event is
// compared before it has happened. Whatever breaks a rule gets an error as CUDA or cuBLAS would give it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/launch.hpp"

namespace pdsim::kernels::fake {

inline constexpr std::uint64_t kPostNs = 1000, kKernelNs = 60'000'000, kCopyNs = 50'000'000;
inline constexpr double kFlopsPerNs = 0.002;

/// The GPU, and what is to go wrong on it.
struct Gpu {
  int count = 1;  ///< all alike
  int multiprocessors = 4, mhz = 1000, l2_bytes = 64 << 10;
  std::size_t memory = std::size_t{80} << 20;
  std::uint64_t low_every_ns = 0;  ///< in the last fifth of each such time the clock is at 40 %; 0: never

  std::function<bool(const Launch&)> idle;  ///< launches that do nothing
  double gemm_factor = 1;                   ///< that results are too large by
  bool lose_last_copy = false;              ///< of a batch
  bool lose_to_host = false;                ///< asynchronous copies to the host
  bool grouped_waits = false;               ///< the grouped multiplication waits for its stream

  std::string failing;    ///< the call that fails next, as one that is not supported
  bool for_good = false;  ///< or by an illegal address, after which all calls fail
};

/// The one that calls go to.
extern Gpu gpu;

/// A new GPU, idle, at time 0. Requires that no memory, stream or event of the old one is left.
void reset();

/// How often a function of CUDA's was called since.
int calls(const std::string& name);

/// Whether a kernel or an algorithm was launched for the first time while a kernel that polls the host was on
/// the GPU. CUDA loads what is new, and may have to wait for all that runs to do so: for ever, perhaps.
bool loaded_late();

}  // namespace pdsim::kernels::fake
