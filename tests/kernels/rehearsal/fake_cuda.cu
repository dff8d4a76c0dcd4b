#include "tests/kernels/rehearsal/fake_cuda.hpp"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/emulator.hpp"
#include "kernels/numbers.cuh"

/// Work of a stream: given when it may begin, does it and returns when it has ended.
using Work = std::function<std::uint64_t(std::uint64_t)>;

struct CUstream_st {
  struct Posted {
    std::uint64_t at;
    Work work;
  };
  std::deque<Posted> queue;
  std::uint64_t free_at = 0;
};

struct CUevent_st {
  CUstream_st* stream = nullptr;
  int pending = 0;
  bool happened = false;
  std::uint64_t at = 0;
};

struct cublasContext {
  cudaStream_t stream = nullptr;
};
struct cublasLtContext {};

namespace pdsim::kernels::fake {

Gpu gpu;

namespace {

enum class Memory : std::uint8_t { none, device, pinned };
constexpr std::align_val_t kAlignment{256};

struct Allocation {
  std::size_t bytes;
  Memory memory;
};

struct State {
  std::map<const char*, Allocation> memory;
  std::size_t device_bytes = 0;
  std::uint64_t host_ns = 0;
  CUstream_st null;
  std::set<CUstream_st*> streams{&null};
  cudaError_t last = cudaSuccess;
  bool broken = false;
  int device = 0;
  std::map<std::string, int> calls;
  std::set<std::uintptr_t> loaded;  // kernels by address, algorithms by number
  bool loaded_late = false;
};
State state;

cudaError_t fail(cudaError_t error) {
  return state.last = error;
}

/// Counts a call. An error where it is to fail.
cudaError_t refuse(const char* call) {
  ++state.calls[call];
  if (state.broken) return state.last;
  if (gpu.failing != call) return cudaSuccess;
  gpu.failing.clear();
  state.broken = gpu.for_good;
  return fail(gpu.for_good ? cudaErrorIllegalAddress : cudaErrorNotSupported);
}

CUstream_st& stream_of(cudaStream_t stream) {
  return stream == nullptr ? state.null : *stream;
}

void post(cudaStream_t stream, Work work) {
  state.host_ns += kPostNs;
  stream_of(stream).queue.push_back({state.host_ns, std::move(work)});
}

void step(CUstream_st& stream) {
  const CUstream_st::Posted next = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.free_at = next.work(std::max(stream.free_at, next.at));
}

void finish(CUstream_st& stream) {
  while (!stream.queue.empty()) step(stream);
  state.host_ns = std::max(state.host_ns, stream.free_at);
}

/// The memory that `bytes` from p on lie in, wholly.
Memory memory_of(const void* p, std::size_t bytes) {
  const auto* at = static_cast<const char*>(p);
  auto next = state.memory.upper_bound(at);
  if (next == state.memory.begin()) return Memory::none;
  const auto& [begin, allocation] = *--next;
  const auto offset = static_cast<std::size_t>(at - begin);
  return offset <= allocation.bytes && bytes <= allocation.bytes - offset ? allocation.memory : Memory::none;
}

cudaError_t allocate(void** p, std::size_t bytes, Memory memory) {
  if (memory == Memory::device) {
    if (bytes > gpu.memory - state.device_bytes) return fail(cudaErrorMemoryAllocation);
    state.device_bytes += bytes;
  }
  *p = ::operator new(bytes, kAlignment);
  state.memory[static_cast<const char*>(*p)] = {bytes, memory};
  return cudaSuccess;
}

cudaError_t release(void* p, Memory memory) {
  if (p == nullptr) return cudaSuccess;
  for (CUstream_st* stream : state.streams) finish(*stream);  // freeing waits for the GPU
  const auto at = state.memory.find(static_cast<const char*>(p));
  if (at == state.memory.end() || at->second.memory != memory) return fail(cudaErrorInvalidValue);
  if (memory == Memory::device) state.device_bytes -= at->second.bytes;
  state.memory.erase(at);
  ::operator delete(p, kAlignment);
  return cudaSuccess;
}

bool may_copy(const void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = memory_of(to, bytes) == Memory::device,
             from_device = memory_of(from, bytes) == Memory::device;
  return kind == cudaMemcpyDefault ||
         (to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
          from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice));
}

cudaError_t copy_later(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (memory_of(to, bytes) == Memory::none || memory_of(from, bytes) == Memory::none)
    return fail(cudaErrorInvalidValue);
  const bool lost = gpu.lose_to_host && memory_of(to, bytes) == Memory::pinned;
  post(stream, [=](std::uint64_t start) {
    if (!lost) std::memcpy(to, from, bytes);
    return start + kCopyNs + bytes;
  });
  return cudaSuccess;
}

/// Cycles of a multiprocessor until a time.
std::uint64_t cycles_until(std::uint64_t ns) {
  double full_ns = static_cast<double>(ns);
  if (gpu.low_every_ns > 0) {
    const std::uint64_t low_from = gpu.low_every_ns / 5 * 4, at = ns % gpu.low_every_ns;
    const std::uint64_t low_ns =
        ns / gpu.low_every_ns * (gpu.low_every_ns - low_from) + (at > low_from ? at - low_from : 0);
    full_ns -= 0.6 * static_cast<double>(low_ns);
  }
  return static_cast<std::uint64_t>(full_ns * gpu.mhz / 1000);
}

void launch_later(const void* kernel, const Launch& launch, std::function<void()> thread) {
  state.loaded.insert(reinterpret_cast<std::uintptr_t>(kernel));
  post(launch.stream,
       [launch, thread = std::move(thread), loaded = state.loaded.size()](std::uint64_t start) {
         emulator::time = {start, cycles_until(start), 0, 0};
         if (!gpu.idle || !gpu.idle(launch)) emulator::run(launch, thread);
         const std::uint64_t end = start + std::max(kKernelNs, 1000 * emulator::time.looks);
         if (emulator::time.polls == 0) return end;
         if (state.loaded.size() > loaded) state.loaded_late = true;
         return std::max(end, state.host_ns);
       });
}

// What opaque descriptors point to.
struct LtLayout {
  cudaDataType type;
  std::int64_t rows, columns, stride;  // column-major
};
struct LtOperation {
  cublasOperation_t transa = CUBLAS_OP_N;
  std::int8_t fast = 0;
};
struct LtPreference {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
};
template <class T, class Opaque>
T& held(Opaque* opaque) {
  return *reinterpret_cast<T*>(opaque);
}

/// y [m, n] = x [m, k] w [n, k]^T, row-major, as it is seen from here.
struct Product {
  std::int64_t m, n, k;
  cudaDataType type;
  const void *x, *w;
  bf16* y;

  double flops() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
  std::size_t operand_bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * (type == CUDA_R_16BF ? 2 : 1);
  }
  bool in_device_memory() const {
    return memory_of(x, operand_bytes(m * k)) == Memory::device &&
           memory_of(w, operand_bytes(n * k)) == Memory::device &&
           memory_of(y, static_cast<std::size_t>(m * n) * sizeof(bf16)) == Memory::device;
  }
  float element(const void* of, std::int64_t i) const {
    return type == CUDA_R_16BF ? to_float(static_cast<const bf16*>(of)[i])
                               : to_float(static_cast<const fp8*>(of)[i]);
  }
  void compute() const {
    std::vector<float> right(static_cast<std::size_t>(n * k)), row(static_cast<std::size_t>(n));
    for (std::int64_t j = 0; j < n; ++j) {
      for (std::int64_t i = 0; i < k; ++i) right[static_cast<std::size_t>(i * n + j)] = element(w, j * k + i);
    }
    for (std::int64_t i = 0; i < m; ++i) {
      std::fill(row.begin(), row.end(), 0.f);
      for (std::int64_t l = 0; l < k; ++l) {
        const float left = element(x, i * k + l);
        const float* from = &right[static_cast<std::size_t>(l * n)];
        for (std::size_t j = 0; j < row.size(); ++j) row[j] += left * from[j];
      }
      for (std::size_t j = 0; j < row.size(); ++j)
        y[i * n + static_cast<std::int64_t>(j)] = to_bf16(row[j] * static_cast<float>(gpu.gemm_factor));
    }
  }
};

std::uint64_t ns_of(double flops) {
  return static_cast<std::uint64_t>(flops / kFlopsPerNs);
}

}  // namespace

void reset() {
  if (!state.memory.empty() || state.streams.size() != 1) throw std::logic_error("the old GPU is in use");
  gpu = {};
  state = {};
  state.streams = {&state.null};
  emulator::take_launch = launch_later;
}

int calls(const std::string& name) {
  return state.calls[name];
}

bool loaded_late() {
  return state.loaded_late;
}

}  // namespace pdsim::kernels::fake

using namespace pdsim::kernels::fake;  // NOLINT(google-build-using-namespace): CUDA's names are global
namespace kernels = pdsim::kernels;

// The runtime.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu.count;
  return refuse(__func__);
}
cudaError_t cudaGetDevice(int* device) {
  *device = state.device;
  return refuse(__func__);
}
cudaError_t cudaSetDevice(int device) {
  state.device = device;
  return refuse(__func__);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "NVIDIA H200, rehearsed");
  properties->multiProcessorCount = gpu.multiprocessors;
  properties->totalGlobalMem = gpu.memory;
  properties->l2CacheSize = gpu.l2_bytes;
  properties->memoryBusWidth = 6144;
  return refuse(__func__);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.multiprocessors;
      break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
      *value = gpu.mhz * 1000;
      break;
    case cudaDevAttrL2CacheSize:
      *value = gpu.l2_bytes;
      break;
    default:
      return fail(cudaErrorInvalidValue);
  }
  return refuse(__func__);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return refuse(__func__);
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return refuse(__func__);
}
cudaError_t cudaDeviceGetPCIBusId(char* address, int length, int) {
  std::strncpy(address, "ffff:ff:00.0", static_cast<std::size_t>(length));
  return refuse(__func__);
}
cudaError_t cudaDeviceCanAccessPeer(int* able, int, int) {
  *able = 1;
  return refuse(__func__);
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return refuse(__func__);
}
cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = refuse(__func__)) return error;
  for (CUstream_st* stream : state.streams) finish(*stream);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return state.broken ? state.last : std::exchange(state.last, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                          : "an error of the fake GPU's";
}

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  if (const cudaError_t error = refuse(__func__)) return error;
  return allocate(p, bytes, Memory::device);
}
cudaError_t cudaFree(void* p) {
  ++state.calls[__func__];
  return release(p, Memory::device);
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
  if (const cudaError_t error = refuse(__func__)) return error;
  return allocate(p, bytes, Memory::pinned);
}
cudaError_t cudaFreeHost(void* p) {
  ++state.calls[__func__];
  return release(p, Memory::pinned);
}

// Synchronous calls wait for the null stream and for no other: those of the harness do not block on it.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = refuse(__func__)) return error;
  if (!may_copy(to, from, bytes, kind)) return fail(cudaErrorInvalidValue);
  finish(state.null);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = refuse(__func__)) return error;
  if (memory_of(to, bytes) == Memory::none) return fail(cudaErrorInvalidValue);
  post(stream, [=](std::uint64_t start) {
    std::memset(to, value, bytes);
    return start + kCopyNs + bytes;
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (const cudaError_t error = refuse(__func__)) return error;
  if (!may_copy(to, from, bytes, kind)) return fail(cudaErrorInvalidValue);
  return copy_later(to, from, bytes, stream);
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes* attributes, std::size_t* firsts,
                                 std::size_t kinds, cudaStream_t stream) {
  if (const cudaError_t error = refuse(__func__)) return error;
  if (stream == nullptr || count == 0 || kinds != 1 || firsts[0] != 0 ||
      attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream)
    return fail(cudaErrorInvalidValue);
  const std::uint64_t before = state.host_ns;
  for (std::size_t i = 0; i + (gpu.lose_last_copy ? 1 : 0) < count; ++i) {
    if (const cudaError_t error = copy_later(to[i], from[i], bytes[i], stream)) return error;
  }
  state.host_ns = before + kPostNs;  // all were one call
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) return fail(cudaErrorInvalidValue);
  state.streams.insert(*stream = new CUstream_st);
  return refuse(__func__);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  finish(*stream);
  state.streams.erase(stream);
  delete stream;
  return refuse(__func__);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = refuse(__func__)) return error;
  finish(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t error = refuse(__func__)) return error;
  post(stream, [event](std::uint64_t start) {
    while (event->pending > 0) step(*event->stream);
    return std::max(start, event->at);
  });
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return refuse(__func__);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  while (event->pending > 0) step(*event->stream);
  delete event;
  return refuse(__func__);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = refuse(__func__)) return error;
  event->stream = &stream_of(stream);
  ++event->pending;
  post(stream, [event](std::uint64_t start) {
    --event->pending;
    event->happened = true;
    return event->at = start;
  });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  if (const cudaError_t error = refuse(__func__)) return error;
  if (!from->happened || !to->happened || from->pending > 0 || to->pending > 0)
    return fail(cudaErrorNotReady);
  *ms = static_cast<float>((static_cast<double>(to->at) - static_cast<double>(from->at)) * 1e-6);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return refuse(__func__);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 2;
  return refuse(__func__);
}

// cuBLAS.

const char* cublasGetStatusString(cublasStatus_t) {
  return "a status of the fake cuBLAS";
}
cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t transa[],
                                          const cublasOperation_t transb[], const int m[], const int n[],
                                          const int k[], const void* alpha, const void* const a[],
                                          cudaDataType_t a_type, const int lda[], const void* const b[],
                                          cudaDataType_t b_type, const int ldb[], const void* beta,
                                          void* const c[], cudaDataType_t c_type, const int ldc[], int groups,
                                          const int size[], cublasComputeType_t compute) {
  ++state.calls[__func__];
  if (a_type != CUDA_R_16BF || b_type != CUDA_R_16BF || c_type != CUDA_R_16BF ||
      compute != CUBLAS_COMPUTE_32F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  std::size_t problems = 0;
  for (int group = 0; group < groups; ++group) {
    const bool plain =
        static_cast<const float*>(alpha)[group] == 1 && static_cast<const float*>(beta)[group] == 0;
    if (!plain || transa[group] != CUBLAS_OP_T || transb[group] != CUBLAS_OP_N || lda[group] != k[group] ||
        ldb[group] != k[group] || ldc[group] != m[group])
      return CUBLAS_STATUS_INVALID_VALUE;
    problems += static_cast<std::size_t>(size[group]);
  }
  // The lists of addresses are read by the GPU.
  for (const void* list :
       {static_cast<const void*>(a), static_cast<const void*>(b), static_cast<const void*>(c)}) {
    if (memory_of(list, problems * sizeof(void*)) != Memory::device) return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (gpu.grouped_waits) finish(stream_of(handle->stream));
  std::vector<Product> products;
  for (int group = 0; group < groups; ++group) {
    for (int i = 0; i < size[group]; ++i) {
      const std::size_t at = products.size();
      products.push_back(
          {n[group], m[group], k[group], CUDA_R_16BF, b[at], a[at], static_cast<kernels::bf16*>(c[at])});
      if (!products.back().in_device_memory()) return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  state.loaded.insert(0);
  post(handle->stream, [products](std::uint64_t start) {
    double flops = 0;
    for (const Product& product : products) {
      product.compute();
      flops += product.flops();
    }
    return start + ns_of(flops);
  });
  return CUBLAS_STATUS_SUCCESS;
}

// cuBLASLt: of three algorithms that it proposes the first is of no use and the third the fastest.

std::size_t cublasLtGetVersion() {
  return 130000;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new LtOperation);
  return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS
                                                              : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  delete &held<LtOperation>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t made,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              std::size_t bytes) {
  auto& operation = held<LtOperation>(made);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA && bytes == sizeof operation.transa) {
    std::memcpy(&operation.transa, value, bytes);
  } else if (attribute == CUBLASLT_MATMUL_DESC_FAST_ACCUM && bytes == sizeof operation.fast) {
    std::memcpy(&operation.fast, value, bytes);
  } else {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t stride) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(
      new LtLayout{type, static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns), stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  delete &held<LtLayout>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new LtPreference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  delete &held<LtPreference>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t made,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  auto& preference = held<LtPreference>(made);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && bytes == sizeof preference.workspace) {
    std::memcpy(&preference.workspace, value, bytes);
  } else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK &&
             bytes == sizeof preference.reductions) {
    std::memcpy(&preference.reductions, value, bytes);
  } else {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}

namespace {

/// Whether the layouts are those of y = x w^T, all row-major and dense, in types that there are kernels for.
bool supported(const LtOperation& operation, const LtLayout& w, const LtLayout& x, const LtLayout& y) {
  const bool fp8 = w.type == CUDA_R_8F_E4M3;
  return operation.transa == CUBLAS_OP_T && w.type == x.type && (fp8 || w.type == CUDA_R_16BF) &&
         y.type == CUDA_R_16BF && w.rows == x.rows && y.rows == w.columns && y.columns == x.columns &&
         w.stride == w.rows && x.stride == x.rows && y.stride == y.rows &&
         (!fp8 || (w.rows % 16 == 0 && w.columns % 16 == 0 && x.columns % 16 == 0));
}

}  // namespace

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t w, cublasLtMatrixLayout_t x,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t y,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int* given) {
  constexpr int kProposed = 3;
  *given = 0;
  if (asked < kProposed) return CUBLAS_STATUS_INVALID_VALUE;
  if (!supported(held<LtOperation>(operation), held<LtLayout>(w), held<LtLayout>(x), held<LtLayout>(y)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  for (int i = 0; i < kProposed; ++i) {
    results[i] = {};
    results[i].algo.data[0] = static_cast<std::uint64_t>(i);
    results[i].workspaceSize = held<LtPreference>(preference).workspace;
    results[i].state = i == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
  }
  *given = kProposed;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, std::size_t bytes, std::size_t* written) {
  if (attribute != CUBLASLT_ALGO_CONFIG_ID || bytes != sizeof(std::int32_t))
    return CUBLAS_STATUS_INVALID_VALUE;
  const auto id = static_cast<std::int32_t>(algorithm->data[0]);
  std::memcpy(value, &id, *written = bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* w, cublasLtMatrixLayout_t w_layout, const void* x,
                              cublasLtMatrixLayout_t x_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t, void* y, cublasLtMatrixLayout_t y_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  ++state.calls[__func__];
  const auto &left = held<LtLayout>(w_layout), &right = held<LtLayout>(x_layout);
  const Product product{
      right.columns, left.columns, left.rows, left.type, x, w, static_cast<kernels::bf16*>(y)};
  if (!supported(held<LtOperation>(operation), left, right, held<LtLayout>(y_layout)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 || c != y ||
      algorithm->data[0] == 0 || !product.in_device_memory() ||
      memory_of(workspace, workspace_bytes) != Memory::device)
    return CUBLAS_STATUS_INVALID_VALUE;
  state.loaded.insert(algorithm->data[0]);
  const double slower = algorithm->data[0] == 1 ? 1.5 : 1;
  post(stream, [product, slower](std::uint64_t start) {
    product.compute();
    return start + ns_of(product.flops() * slower);
  });
  return CUBLAS_STATUS_SUCCESS;
}
