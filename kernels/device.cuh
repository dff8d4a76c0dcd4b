// The only place where the GPU and the CPU differ: what kernels are written in. Under nvcc each primitive is
// one PTX instruction; under g++ and clang it is the emulator's (emulator.hpp), so that kernel source is the
// same to the letter. PTX ISA 9.0 defines the instructions and the layouts of their fragments.
//
// A program has the kernels of one side: units that include this header are all compiled by nvcc, or none is.
//
// Fragments. Element (row, column) of
//   A, 16 x 16 bf16: register column / 8 * 2 + row / 8, of lane row % 8 * 4 + column % 8 / 2, half column % 2
//   B, 16 x 8 bf16:  register row / 8, of lane column * 4 + row % 8 / 2, half row % 2
//   C, D, 16 x 8 f32: register row / 8 * 2 + column % 2, of lane row % 8 * 4 + column / 2
// so what a lane holds of D it may pack, pair by pair, and hand on as A.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/launch.hpp"
#include "kernels/numbers.cuh"
#include "kernels/qualifiers.cuh"

#ifdef __CUDACC__
#include "kernels/cuda_check.hpp"
#else
#include "kernels/emulator.hpp"
#endif

namespace pdsim::kernels {

#ifdef __CUDACC__

/// Starts kernel(args...). Throws what cuda_check.hpp says.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), const Launch& launch, std::type_identity_t<Parameters>... args) {
  constexpr std::size_t kUsualShared = std::size_t{48} << 10;  // more must be asked for
  if (launch.shared_bytes > kUsualShared) {
    PDSIM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(launch.shared_bytes)));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.grid.x, launch.grid.y, launch.grid.z);
  config.blockDim = dim3(launch.block.x, launch.block.y, launch.block.z);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  PDSIM_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

/// The block's dynamic shared memory, 1024-byte aligned.
template <class T>
PDSIM_DEVICE T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char pdsim_shared[];
  return reinterpret_cast<T*>(pdsim_shared);
}

/// A place in shared memory as a number, as ldmatrix takes it.
using SharedAddress = std::uint32_t;
PDSIM_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

/// Plain access of 1 to 16 bytes; the emulator counts its bank conflicts and checks its bounds.
template <class T>
PDSIM_DEVICE T load_shared(const T* p) {
  return *p;
}
template <class T>
PDSIM_DEVICE void store_shared(T* p, T value) {
  *p = value;
}

/// `count` strides of `stride_bytes` from p: one multiply-add of 32 x 32 + 64 bits, where nvcc would multiply
/// numbers that it has widened.
template <class T>
PDSIM_DEVICE const T* stride_on(const T* p, std::int32_t count, std::int32_t stride_bytes) {
  const T* to;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(count), "r"(stride_bytes), "l"(p));
  return to;
}

PDSIM_DEVICE void barrier() {
  __syncthreads();
}
PDSIM_DEVICE void warp_barrier() {
  __syncwarp();
}

/// The value of lane `lane ^ mask`, of lane `lane`. All 32 lanes take part.
template <class T>
PDSIM_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
PDSIM_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

/// 16 bytes, both ends aligned, past L1; zeros, and nothing read, where not valid (aligned even then).
PDSIM_DEVICE void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// Closes a group of this thread's copies.
PDSIM_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until no more than the last N groups of this thread are on their way. Others see the rest after a barrier.
template <int N>
PDSIM_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Four 8 x 8 matrices of 16 bits: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes; register
/// m receives row l / 4, columns l % 4 * 2 and + 1 of matrix m; transposed: of its transpose.
PDSIM_DEVICE void load_matrix(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
PDSIM_DEVICE void load_matrix_transposed(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

PDSIM_DEVICE void load_matrix(std::uint32_t (&r)[4], const void* row) {
  load_matrix(r, shared_address(row));
}
PDSIM_DEVICE void load_matrix_transposed(std::uint32_t (&r)[4], const void* row) {
  load_matrix_transposed(r, shared_address(row));
}

/// D = A B + D.
PDSIM_DEVICE void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 2^x and log2(x), 2 units in the last place; 2^-inf is 0.
PDSIM_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PDSIM_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two floats rounded to nearest even, `low` in the lower half.
PDSIM_DEVICE std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// The two halves to neighbouring elements, aligned to 4 bytes.
PDSIM_DEVICE void store_bf16x2(bf16* to, std::uint32_t pair) {
  *reinterpret_cast<std::uint32_t*>(to) = pair;
}

/// The GPU's wall clock, ns; the cycles of the multiprocessor that this runs on, and which one that is.
PDSIM_DEVICE std::uint64_t wall_clock_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
PDSIM_DEVICE std::uint64_t clock_cycles() {
  std::uint64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
  return cycles;
}
/// A word that the host may change while the kernel runs.
PDSIM_DEVICE int poll(const volatile int* word) {
  return *word;
}
PDSIM_DEVICE std::uint32_t multiprocessor() {
  std::uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

/// 16 bytes that will not be wanted again: they take no room in L1.
PDSIM_DEVICE Vec16 load_streaming(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "l"(p));
  return v;
}
PDSIM_DEVICE void store_streaming(Vec16* p, const Vec16& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]),
               "r"(v.x[2]), "r"(v.x[3])
               : "memory");
}

#else

template <class... Parameters>
void launch(void (*kernel)(Parameters...), const Launch& launch, std::type_identity_t<Parameters>... args) {
  emulator::launch(reinterpret_cast<const void*>(kernel), launch, [=] { kernel(args...); });
}

template <class T>
T* shared_memory() {
  return static_cast<T*>(emulator::shared_memory());
}

template <class T>
T load_shared(const T* p) {
  emulator::note_access(Access::load, p, sizeof(T));
  return *p;
}
template <class T>
void store_shared(T* p, T value) {
  emulator::note_access(Access::store, p, sizeof(T));
  *p = value;
}

using SharedAddress = std::uint32_t;
inline SharedAddress shared_address(const void* p) {
  return emulator::check_shared("shared_address", p, 1);
}

template <class T>
const T* stride_on(const T* p, std::int32_t count, std::int32_t stride_bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const unsigned char*>(p) +
                                    std::int64_t{count} * stride_bytes);
}

inline void barrier() {
  emulator::barrier();
}
inline void warp_barrier() {
  emulator::together<int>("warp_barrier", 0, [](const auto&, auto&) {});
}

template <class T>
T shuffle_xor(T value, int mask) {
  return emulator::together<T>("shuffle_xor", value, [mask](const auto& values, auto& results) {
    for (unsigned lane = 0; lane < 32; ++lane) results[lane] = values[lane ^ static_cast<unsigned>(mask)];
  });
}
template <class T>
T shuffle(T value, int lane) {
  struct Operands {
    T value;
    int lane;
  };
  return emulator::together<T>("shuffle", Operands{value, lane}, [](const auto& all, auto& results) {
    for (std::size_t i = 0; i < 32; ++i) results[i] = all[static_cast<unsigned>(all[i].lane) % 32].value;
  });
}

inline void copy_async(void* shared, const void* global, bool valid) {
  emulator::copy_async(shared, global, valid);
}
inline void copy_async_commit() {
  emulator::copy_async_commit();
}
template <int N>
void copy_async_wait() {
  emulator::copy_async_wait(N);
}

namespace emulated {

struct Registers {
  std::uint32_t r[4];
};

template <bool kTransposed>
void load_matrix(std::uint32_t (&r)[4], SharedAddress row) {
  emulator::check_shared("load_matrix", shared_memory<unsigned char>() + row, 16);
  const auto loaded = emulator::together<Registers>("load_matrix", row, [](const auto& rows, auto& results) {
    const auto* shared = static_cast<const unsigned char*>(emulator::shared_memory());
    for (std::size_t m = 0; m < 4; ++m) {
      count_phase(emulator::banks.load_matrix, &rows[m * 8], 8, 16);
      for (std::size_t lane = 0; lane < 32; ++lane) {
        std::uint16_t pair[2];
        for (std::size_t half = 0; half < 2; ++half) {
          const std::size_t line = lane / 4, column = lane % 4 * 2 + half;
          const std::size_t i = kTransposed ? column : line, j = kTransposed ? line : column;
          std::memcpy(&pair[half], shared + rows[m * 8 + i] + j * 2, 2);
        }
        std::memcpy(&results[lane].r[m], pair, 4);
      }
    }
  });
  std::memcpy(r, loaded.r, sizeof r);
}

}  // namespace emulated

inline void load_matrix(std::uint32_t (&r)[4], SharedAddress row) {
  emulated::load_matrix<false>(r, row);
}
inline void load_matrix_transposed(std::uint32_t (&r)[4], SharedAddress row) {
  emulated::load_matrix<true>(r, row);
}
inline void load_matrix(std::uint32_t (&r)[4], const void* row) {
  load_matrix(r, shared_address(row));
}
inline void load_matrix_transposed(std::uint32_t (&r)[4], const void* row) {
  load_matrix_transposed(r, shared_address(row));
}

inline void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  struct Operands {
    std::uint32_t a[4], b[2];
  };
  struct Sums {
    float d[4];
  };
  const Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto sums = emulator::together<Sums>("mma", mine, [](const auto& all, auto& results) {
    float left[16][16], right[16][8];
    for (std::size_t lane = 0; lane < 32; ++lane) {
      const std::size_t g = lane / 4, t = lane % 4;
      for (std::size_t i = 0; i < 4; ++i) {
        float* at = &left[g + i % 2 * 8][t * 2 + i / 2 * 8];
        unpack_bf16(all[lane].a[i], at[0], at[1]);
      }
      for (std::size_t i = 0; i < 2; ++i) {
        unpack_bf16(all[lane].b[i], right[t * 2 + i * 8][g], right[t * 2 + i * 8 + 1][g]);
      }
    }
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 4; ++i) {
        const std::size_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (std::size_t k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        results[lane].d[i] = sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) d[i] += sums.d[i];
}

inline float exp2_approx(float x) {
  return std::exp2(x);
}
inline float log2_approx(float x) {
  return std::log2(x);
}

inline std::uint32_t pack_bf16(float low, float high) {
  return to_bf16(low).bits | std::uint32_t{to_bf16(high).bits} << 16;
}

inline void store_bf16x2(bf16* to, std::uint32_t pair) {
  std::memcpy(to, &pair, sizeof pair);
}

inline std::uint64_t wall_clock_ns() {
  return emulator::time.look();
}
inline std::uint64_t clock_cycles() {
  return emulator::time.cycles;
}
inline int poll(const volatile int* word) {
  ++emulator::time.polls;
  return *word;
}
inline std::uint32_t multiprocessor() {
  return blockIdx.x;
}

inline Vec16 load_streaming(const Vec16* p) {
  return *p;
}
inline void store_streaming(Vec16* p, const Vec16& v) {
  *p = v;
}

#endif

/// What 1 in fp8 is after fp8x4_to_bf16.
inline constexpr float kFp8One = 0x1p-120f;

/// Four fp8 of a register, times kFp8One, as two pairs of bf16, exact: elements 0 and 2, elements 1 and 3.
/// The fields of fp8 fit those of bf16, whose exponent is then 120 too small (and a NaN is 480): who uses the
/// products undoes that in one multiplication of a sum. Only subnormals of fp8 are subnormals of bf16 too,
/// which tensor cores take (Fasi and others, "Numerical behavior of NVIDIA tensor cores", 2021).
PDSIM_DEVICE void fp8x4_to_bf16(std::uint32_t four, std::uint32_t& even_pair, std::uint32_t& odd_pair) {
  even_pair = (four << 8 & 0x80008000u) | (four << 4 & 0x07f007f0u);
  odd_pair = (four & 0x80008000u) | (four >> 4 & 0x07f007f0u);
}

}  // namespace pdsim::kernels
