// Noise (noise.cuh) written where it is wanted: into the memory of the GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device.cuh"
#include "kernels/noise.cuh"

namespace pdsim::kernels {

template <class T>
PDSIM_KERNEL void fill_kernel(T* to, std::uint64_t size, std::uint64_t seed, float scale) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step)
    to[i] = noise_as<T>(seed, i, scale);
}

/// Fills with noise of [-scale, scale).
template <class T>
void fill(T* to, std::uint64_t size, std::uint64_t seed, float scale, Stream stream) {
  if (size == 0) return;
  constexpr std::uint64_t kThreads = 256, kEach = 16, kMostBlocks = 4096;
  const std::uint64_t blocks = std::min(kMostBlocks, (size + kThreads * kEach - 1) / (kThreads * kEach));
  launch(fill_kernel<T>,
         Launch{.grid = {static_cast<unsigned>(blocks)}, .block = {kThreads}, .stream = stream}, to, size,
         seed, scale);
}

}  // namespace pdsim::kernels
