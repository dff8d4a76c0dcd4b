// KV caches of many requests in pages, as vLLM lays them out: a pool of pages for K and one for V, each
// [page][token][KV head][element], and a table of pages per request. A page holds a power of two of tokens.
//
// A request's pages follow no order. What a page holds beyond the request's length is never read, so that it
// may be anything. Offsets are 64 bits: a pool is larger than 2^31 elements on any GPU of today.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/numbers.cuh"
#include "kernels/qualifiers.cuh"

namespace pdsim::kernels {

/// Element: bf16 or fp8. All pointers are of the memory that the kernel runs on; pools 16-byte aligned.
template <class Element>
struct PagedKv {
  const Element* k = nullptr;
  const Element* v = nullptr;
  const std::int32_t* pages = nullptr;    ///< [request][max_pages]: index into the pools
  const std::int32_t* lengths = nullptr;  ///< [request]: tokens, the new ones included
  std::int32_t max_pages = 0;
  std::int32_t page_shift = 4;  ///< a page holds 1 << page_shift tokens
  std::int32_t kv_heads = 1;
  std::int32_t head_dim = 128;
  float k_scale = 1, v_scale = 1;  ///< what fp8 elements are multiplied by

  /// Where token `position` of a request lies: page * tokens of a page + place in it. Requires that
  /// 0 <= position < lengths[request]. One read of the page table.
  PDSIM_HOST_DEVICE std::int32_t slot(std::int32_t request, std::int32_t position) const {
    const std::int32_t page =
        pages[static_cast<std::int64_t>(request) * max_pages + (position >> page_shift)];
    return (page << page_shift) | (position & ((1 << page_shift) - 1));
  }
  /// Of the first element of a head's row in either pool.
  PDSIM_HOST_DEVICE std::int64_t row(std::int32_t slot, std::int32_t kv_head) const {
    return (static_cast<std::int64_t>(slot) * kv_heads + kv_head) * head_dim;
  }
};

}  // namespace pdsim::kernels
