// Fresh random attention input for the tests and for the check before every timing: requests of different
// lengths, their pages shuffled over a pool that is larger than they need, and whatever no request owns
// filled with NaN, so that a kernel that reads one element too many says so.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/paged_kv.cuh"

namespace pdsim::kernels {

struct RaggedShape {
  struct Request {
    std::int32_t fresh;   ///< new tokens, the last of the request; 1 in decode; may be 0
    std::int32_t length;  ///< tokens in its KV cache, the new ones included
  };
  std::vector<Request> requests;
  std::int32_t heads = 1, kv_heads = 1, head_dim = 128;
  std::int32_t page_tokens = 16;  ///< a power of two
};

template <class Element>
struct RaggedBatch {
  RaggedShape shape;
  std::vector<bf16> q;                ///< [new token of all requests][head][element]
  std::vector<std::int32_t> q_start;  ///< [request + 1]
  std::vector<Element> k, v;          ///< the pools
  std::vector<std::int32_t> pages, lengths;
  std::int32_t max_pages = 0;
  float k_scale = 1, v_scale = 1;  ///< not 1 for fp8
  double scale = 1;                ///< of q k, 1 / sqrt(head_dim)

  /// A view of the vectors; a GPU's has the same shape and other pointers.
  PagedKv<Element> kv() const;
};

/// Values are normal, q with a deviation of 2, so that some keys matter much more than others. The same for
/// the same shape and seed. Throws InputError where heads are no multiple of KV heads, a page is no power of
/// two or a request has more new tokens than tokens.
template <class Element>
RaggedBatch<Element> random_batch(const RaggedShape& shape, std::uint64_t seed);

extern template struct RaggedBatch<bf16>;
extern template struct RaggedBatch<fp8>;
extern template RaggedBatch<bf16> random_batch(const RaggedShape&, std::uint64_t);
extern template RaggedBatch<fp8> random_batch(const RaggedShape&, std::uint64_t);

}  // namespace pdsim::kernels
