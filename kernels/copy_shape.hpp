// The caches between which a copy kernel is measured: for a way to copy and a length of run, two layouts
// between which exactly such runs are contiguous. So `run_bytes` and `runs` of a table are those of a real
// copy of KV.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kv_layout.cuh"
#include "kernels/shapes.hpp"

namespace pdsim::kernels {

/// One region in a pool of twice the pages, handed out in no order, or in as many pages as staging needs, in
/// order.
struct CopyShape {
  std::int64_t head_bytes = 0;
  std::int32_t page_tokens = 1, heads = 1, to_first_head = 0, to_heads = 1;
  std::int32_t tokens = 0, pages = 0;  ///< copied; the last page is full
  bool from_in_order = false, to_in_order = false, to_hnd = false;

  std::int64_t from_bytes() const;
  std::int64_t to_bytes() const;
  /// Page tables (see page_table) must be readable where the copy runs; the one of a side in order is not
  /// used.
  KvCopy copy(std::uint8_t* from, const std::int32_t* from_pages, std::uint8_t* to,
              const std::int32_t* to_pages) const;
};

/// The shape for copies on multiprocessors. Runs: gather, scatter and block: a page of up to eight heads of
/// 256 bytes; layout: a head; reshard: two heads of eight. InputError: a run that is no power of two times
/// 16, or runs that fill no whole pages.
CopyShape copy_shape(Copy copy, std::int64_t run_bytes, std::int64_t runs);

/// `pages` different numbers below `held`, in an order by the seed. Requires pages <= held.
std::vector<std::int32_t> page_table(std::int32_t pages, std::int32_t held, std::uint64_t seed);

}  // namespace pdsim::kernels
