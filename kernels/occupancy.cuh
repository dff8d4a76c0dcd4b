// How many blocks of a kernel the current GPU runs at once. For .cu files.
#pragma once

#include "kernels/cuda_check.hpp"

namespace pdsim::kernels {

/// Multiprocessors x blocks that fit in one by registers, threads and shared memory; what a wave is. Throws
/// CudaError.
template <class Kernel>
std::int32_t slots_of(Kernel kernel, int threads, int shared_bytes) {
  int device = 0, multiprocessors = 0, blocks = 0;
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const auto* address = reinterpret_cast<const void*>(kernel);
  PDSIM_CUDA(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  PDSIM_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, address, threads,
                                                           static_cast<std::size_t>(shared_bytes)));
  return multiprocessors * blocks;
}

}  // namespace pdsim::kernels
