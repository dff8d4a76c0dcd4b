// Memory of the GPU, and pinned memory of the host, that is given back when its owner goes. For .cu files.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda_check.hpp"

namespace pdsim::kernels {

/// The GPU has less memory free than asked for. Nothing is broken by it.
class GpuMemoryShort : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// `size` elements of the current GPU, 256-byte aligned, without a first value. Throws GpuMemoryShort,
/// CudaError.
template <class T>
class GpuArray {
 public:
  GpuArray() = default;
  explicit GpuArray(std::size_t size) : size_(size) {
    void* p = nullptr;
    const cudaError_t status = size == 0 ? cudaSuccess : cudaMalloc(&p, size * sizeof(T));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // or the next launch reports it
      throw GpuMemoryShort(std::to_string(size * sizeof(T) >> 20) + " MiB are not free on the GPU");
    }
    PDSIM_CUDA(status);
    data_.reset(static_cast<T*>(p));
  }
  explicit GpuArray(std::span<const T> host) : GpuArray(host.size()) {
    if (size_ > 0) PDSIM_CUDA(cudaMemcpy(data(), host.data(), host.size_bytes(), cudaMemcpyHostToDevice));
  }
  explicit GpuArray(const std::vector<T>& host) : GpuArray(std::span<const T>(host)) {}

  T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  /// Waits for the copy alone: what kernels on other streams still write is not in it.
  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    if (size_ > 0) PDSIM_CUDA(cudaMemcpy(host.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  struct Free {
    void operator()(T* p) const { cudaFree(p); }  // in a destructor: what fails here fails again elsewhere
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

/// Page-locked host memory that the GPU can reach.
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(std::size_t size) : size_(size) {
    void* p = nullptr;
    PDSIM_CUDA(cudaHostAlloc(&p, size * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped));
    data_.reset(static_cast<T*>(p));
  }
  T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* p) const { cudaFreeHost(p); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

/// A stream beside the legacy one, and never waiting for it.
class GpuStream {
 public:
  GpuStream() {
    cudaStream_t stream = nullptr;
    PDSIM_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream);
  }
  cudaStream_t get() const { return stream_.get(); }
  void wait() const { PDSIM_CUDA(cudaStreamSynchronize(get())); }

 private:
  struct Destroy {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  std::unique_ptr<CUstream_st, Destroy> stream_;
};

class GpuEvent {
 public:
  GpuEvent() {
    cudaEvent_t event = nullptr;
    PDSIM_CUDA(cudaEventCreate(&event));
    event_.reset(event);
  }
  void record(cudaStream_t stream) const { PDSIM_CUDA(cudaEventRecord(event_.get(), stream)); }
  /// What comes next on the stream waits for what the event stands behind.
  void hold(cudaStream_t stream) const { PDSIM_CUDA(cudaStreamWaitEvent(stream, event_.get(), 0)); }
  /// Microseconds from `earlier` to this; both have happened.
  double since_us(const GpuEvent& earlier) const {
    float ms = 0;
    PDSIM_CUDA(cudaEventElapsedTime(&ms, earlier.event_.get(), event_.get()));
    return double{ms} * 1e3;
  }

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

}  // namespace pdsim::kernels
