#include "kernels/kv_copy.hpp"

#include <algorithm>

#include "kernels/cuda_check.hpp"
#include "kernels/kv_copy.cuh"

namespace pdsim::kernels {

void launch_kv_copy(const KvCopy& copy, unsigned blocks, Stream stream) {
  const std::uint32_t runs = copy.runs();
  if (runs == 0) return;
  const std::uint32_t runs_a_block = kKvCopyThreads / kv_copy_lanes(copy.run_bytes());
  const unsigned useful = (runs + runs_a_block - 1) / runs_a_block;
  launch(kv_copy, Launch{.grid = {std::min(blocks, useful)}, .block = {kKvCopyThreads}, .stream = stream},
         copy);
}

void batch_copy(const Descriptors& copies, Stream stream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;  // of the copies that have these attributes: all
#if CUDART_VERSION >= 13000
  PDSIM_CUDA(cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.bytes.data(), copies.to.size(),
                                  &attributes, &first, 1, stream));
#else  // 12.8 says which copy failed, and reads through pointers to what is not const
  std::size_t failed = 0;
  PDSIM_CUDA(cudaMemcpyBatchAsync(const_cast<void**>(copies.to.data()),
                                  const_cast<void**>(copies.from.data()),
                                  const_cast<std::size_t*>(copies.bytes.data()), copies.to.size(),
                                  &attributes, &first, 1, &failed, stream));
#endif
}

}  // namespace pdsim::kernels
