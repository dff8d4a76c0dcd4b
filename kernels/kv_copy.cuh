// Copies KV between two caches: gather, scatter, layout change, tensor-parallel reshard and block copy are
// this one kernel with other layouts (kernels/kv_layout.cuh).
//
// A warp takes a run, or as many short ones as it has lanes for, 16 bytes a lane; each lane has four loads
// under way before its first store, of a long run or of four short ones, because a copy is as fast as what is
// in flight (Little's law).
// Loads and stores pass by L1: nothing is read twice. The grid strides over the runs, so the number of blocks
// bounds how many multiprocessors the copy takes from whoever else is running.
#pragma once

#include "kernels/device.cuh"
#include "kernels/kv_layout.cuh"

namespace pdsim::kernels {

/// Threads of a block on the GPU: with one block a multiprocessor enough loads in flight. Any multiple of 32
/// is right.
inline constexpr unsigned kKvCopyThreads = 1024;

/// Lanes that share a run: all 32, or for runs below 512 bytes the power of two that holds one.
PDSIM_HOST_DEVICE std::uint32_t kv_copy_lanes(std::int64_t run_bytes) {
  std::uint32_t lanes = 1;
  while (lanes < 32 && lanes * 16 < run_bytes) lanes *= 2;
  return lanes;
}

/// Loads that a lane has under way before its first store.
inline constexpr std::uint32_t kInFlight = 4;

/// Copies what this lane has of one run.
PDSIM_DEVICE void copy_run(const KvRun& run, std::uint32_t lane, std::uint32_t lanes) {
  const auto* from = reinterpret_cast<const Vec16*>(run.from);
  auto* to = reinterpret_cast<Vec16*>(run.to);
  const auto end = static_cast<std::uint32_t>(run.bytes / 16);
  for (std::uint32_t i = lane; i < end; i += kInFlight * lanes) {
    Vec16 held[kInFlight];
    PDSIM_UNROLL
    for (std::uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * lanes < end) held[j] = load_streaming(from + i + j * lanes);
    }
    PDSIM_UNROLL
    for (std::uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * lanes < end) store_streaming(to + i + j * lanes, held[j]);
    }
  }
}

/// Copies what this lane has of kInFlight runs, `number` and each `apart` further, of no more than one load a
/// lane.
PDSIM_DEVICE void copy_short_runs(const KvCopy& copy, std::uint32_t number, std::uint32_t apart,
                                  std::uint32_t lane) {
  Vec16 held[kInFlight];
  Vec16* to[kInFlight] = {};
  PDSIM_UNROLL
  for (std::uint32_t j = 0; j < kInFlight; ++j) {
    if (number + j * apart >= copy.runs()) continue;
    const KvRun run = copy.run(number + j * apart);
    if (lane * 16 >= run.bytes) continue;
    held[j] = load_streaming(reinterpret_cast<const Vec16*>(run.from) + lane);
    to[j] = reinterpret_cast<Vec16*>(run.to) + lane;
  }
  PDSIM_UNROLL
  for (std::uint32_t j = 0; j < kInFlight; ++j) {
    if (to[j] != nullptr) store_streaming(to[j], held[j]);
  }
}

/// Any grid and block of one dimension. Requires a copy from make_copy.
PDSIM_KERNEL void PDSIM_LAUNCH_BOUNDS(kKvCopyThreads, 1) kv_copy(KvCopy copy) {
  const std::uint32_t lanes = kv_copy_lanes(copy.run_bytes());
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t lane = thread % lanes, first = thread / lanes;
  const std::uint32_t takers = gridDim.x * blockDim.x / lanes, runs = copy.runs();
  if (copy.run_bytes() <= std::int64_t{lanes} * 16) {
    for (std::uint32_t i = first; i < runs; i += kInFlight * takers) copy_short_runs(copy, i, takers, lane);
  } else {
    for (std::uint32_t i = first; i < runs; i += takers) copy_run(copy.run(i), lane, lanes);
  }
}

}  // namespace pdsim::kernels
