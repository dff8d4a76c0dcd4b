// KV copies as their callers see them: plain C++ around the kernel of kv_copy.cuh, and the copy engines.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/kv_layout.cuh"
#include "kernels/launch.hpp"

namespace pdsim::kernels {

/// Starts the kernel on the GPU with at most `blocks` blocks of 1024 threads, each of which takes a
/// multiprocessor while there are free ones: the copy's share of the GPU. Requires a copy from make_copy
/// whose memory the GPU reaches, and blocks > 0. Throws CudaError.
void launch_kv_copy(const KvCopy& copy, unsigned blocks, Stream stream);

/// A list of copies for the copy engines.
struct Descriptors {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
};

/// Posts all in one call of cudaMemcpyBatchAsync, unordered among themselves; sources are read in the order
/// of the stream, so that what kernels before have written is what is copied. Not for the legacy null stream,
/// which the call does not take. Throws CudaError.
void batch_copy(const Descriptors& copies, Stream stream);

}  // namespace pdsim::kernels
