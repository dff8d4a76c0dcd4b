// The words that nvcc needs and a C++ compiler does not know. Under g++ and clang kernels are plain
// functions, inline, since they stand in headers.
#pragma once

#ifdef __CUDACC__
#define PDSIM_KERNEL __global__
#define PDSIM_DEVICE __device__ __forceinline__
#define PDSIM_HOST_DEVICE __host__ __device__ __forceinline__
#define PDSIM_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define PDSIM_UNROLL _Pragma("unroll")
#else
#define PDSIM_KERNEL inline
#define PDSIM_DEVICE inline
#define PDSIM_HOST_DEVICE inline
#define PDSIM_LAUNCH_BOUNDS(threads, blocks)
#define PDSIM_UNROLL
#endif
