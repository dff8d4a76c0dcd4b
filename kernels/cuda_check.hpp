// The one check that every call of the CUDA runtime goes through.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace pdsim::kernels {

/// A call of CUDA's failed. what(): "file:line: call: CUDA's description".
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  throw CudaError(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                  cudaGetErrorString(status));
}

}  // namespace pdsim::kernels

#define PDSIM_CUDA(...) ::pdsim::kernels::check_cuda((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
