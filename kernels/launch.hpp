// How many threads a kernel is given: plain data, so that what starts a kernel needs no CUDA header.
#pragma once

#include <cstddef>

struct CUstream_st;  // CUDA's own name for what cudaStream_t points to

namespace pdsim::kernels {

/// A cudaStream_t; the emulator takes no notice of it.
using Stream = ::CUstream_st*;

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

/// A grid of blocks; `block` threads each, a multiple of 32 in all; dynamic shared memory of a block.
struct Launch {
  Dim grid, block;
  std::size_t shared_bytes = 0;
  Stream stream = nullptr;
};

}  // namespace pdsim::kernels
