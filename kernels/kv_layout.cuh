// Where a KV cache keeps the vector of one head of one token of one region, and which bytes two caches both
// hold in one piece. A region is what an engine allocates a tensor for: K of a layer, V of a layer, an MLA
// latent.
//
//   NHD  [page][token in page][head][head_dim]    vLLM's default for FlashAttention
//   HND  [page][head][token in page][head_dim]    FlashInfer's, and that of a page cut by heads
//
// Gather, scatter, layout change, tensor-parallel reshard and block copy are one copy between two of these:
// staging is a cache whose pages stand in order, and a rank is a cache that holds some of the heads.
//
// Invariants of a KvCopy that make_copy has accepted: every address and every length is a multiple of 16
// bytes, no run leaves a page, and together the runs are every vector asked for once.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/qualifiers.cuh"

namespace pdsim::kernels {

/// What a whole copy is divided by, as a product with its reciprocal (Granlund and Montgomery 1994): a GPU
/// divides integers in some thirty instructions, and a short run asks for four divisions. Requires 1 <= by.
struct Divisor {
  std::uint32_t by, shift, reciprocal;

  constexpr Divisor(std::int32_t divisor)
      : by(static_cast<std::uint32_t>(divisor)),
        shift(31 + static_cast<std::uint32_t>(std::bit_width(by - 1))),
        reciprocal(static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + by - 1) / by)) {}
  /// Exact for n < 2^31: n reciprocal / 2^shift exceeds n / by by less than 1 / by.
  PDSIM_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * reciprocal >> shift);
  }
};

/// One rank's cache, as bytes and strides; nhd() and hnd() make the two that exist.
struct KvLayout {
  std::uint8_t* base = nullptr;
  const std::int32_t* pages = nullptr;  ///< of the tokens that are copied, in their order; null: 0, 1, 2, ...
  Divisor page_tokens = 1;
  std::int32_t first_head = 0, heads = 0;  ///< of the model's heads those that the rank holds
  std::int64_t head_bytes = 0;             ///< of one token's vector
  std::int64_t token_stride = 0, head_stride = 0, page_stride = 0, region_stride = 0;  ///< bytes

  /// The vector of a head (a number among the model's) of the token-th token that is copied. Nothing is
  /// checked.
  PDSIM_HOST_DEVICE std::uint8_t* at(std::uint32_t token, std::uint32_t region, std::int32_t head) const {
    const std::uint32_t in_order = page_tokens.quotient(token);
    const std::int64_t page = pages == nullptr ? static_cast<std::int32_t>(in_order) : pages[in_order];
    return base + region * region_stride + page * page_stride +
           (token - in_order * page_tokens.by) * token_stride + (head - first_head) * head_stride;
  }
};

/// A cache of `pages_held` pages a region, region after region from `base`.
KvLayout nhd(std::uint8_t* base, const std::int32_t* pages, std::int64_t pages_held, std::int32_t page_tokens,
             std::int32_t first_head, std::int32_t heads, std::int64_t head_bytes);
KvLayout hnd(std::uint8_t* base, const std::int32_t* pages, std::int64_t pages_held, std::int32_t page_tokens,
             std::int32_t first_head, std::int32_t heads, std::int64_t head_bytes);

/// Contiguous in both caches.
struct KvRun {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::int64_t bytes;
};

/// One copy, cut into runs of `run_tokens` tokens (a last one of fewer) by `run_heads` heads.
struct KvCopy {
  KvLayout from, to;
  std::int32_t tokens = 0, regions = 0;
  std::int32_t first_head = 0, heads = 0;  ///< those that both ranks hold
  std::int32_t run_tokens = 1, run_heads = 1;
  Divisor head_groups = 1, token_groups = 1;  ///< runs of a token, of a region's head

  PDSIM_HOST_DEVICE std::int64_t run_bytes() const { return from.head_bytes * run_heads * run_tokens; }

  PDSIM_HOST_DEVICE std::uint32_t runs() const {
    return static_cast<std::uint32_t>((tokens + run_tokens - 1) / run_tokens) *
           static_cast<std::uint32_t>(heads / run_heads) * static_cast<std::uint32_t>(regions);
  }

  /// Neighbours in memory are neighbours in number: heads run fastest, then tokens, then regions.
  PDSIM_HOST_DEVICE KvRun run(std::uint32_t number) const {
    const std::uint32_t rest = head_groups.quotient(number), region = token_groups.quotient(rest);
    const auto head = first_head + static_cast<std::int32_t>(number - rest * head_groups.by) * run_heads;
    const std::uint32_t token = (rest - region * token_groups.by) * static_cast<std::uint32_t>(run_tokens);
    const std::int32_t left = tokens - static_cast<std::int32_t>(token);
    return {from.at(token, region, head), to.at(token, region, head),
            from.head_bytes * run_heads * (left < run_tokens ? left : run_tokens)};
  }
};

/// The copy of `tokens` tokens of `regions` regions, of the heads that both ranks hold, in the longest runs
/// that are contiguous in both: heads of a token where both keep them side by side, then tokens of a page
/// where that is all that stands between one token and the next. Page tables need only be readable where
/// run() is called. InputError: ranks without a common head, vectors of different length, or a
/// vector, stride or base that is no multiple of 16 bytes.
KvCopy make_copy(const KvLayout& from, const KvLayout& to, std::int32_t tokens, std::int32_t regions);

}  // namespace pdsim::kernels
