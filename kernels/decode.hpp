// Decode attention as its callers see it: plain C++ around the kernels of decode.cuh and combine.cuh.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/decode_split.hpp"
#include "kernels/launch.hpp"
#include "kernels/paged_kv.cuh"

namespace pdsim::kernels {

/// What a chunk of keys knows of its scores for one query: the greatest, in log2 units, and the sum of
/// 2^(score - max).
struct PartState {
  float max, sum;
};

/// Where decode kernels write. A request of one chunk goes to `out` at once; the chunks of the others are
/// parts that combine() joins. All 16-byte aligned; parts may be null where splits is 1, and need no first
/// value.
struct DecodeOutput {
  bf16* out = nullptr;              ///< [request][head][width]
  float* part_out = nullptr;        ///< [request][head][splits][width]: not yet divided by the sum
  PartState* part_state = nullptr;  ///< [request][head][splits]
  std::int32_t requests = 0;        ///< at most 65,535
  std::int32_t heads = 1;
  std::int32_t splits = 1, chunk_tokens = 0;  ///< of choose_split()
};

/// Attention of one new token of each request over all tokens of its cache, its own included, as
/// reference.hpp defines it. A request without tokens gets zeros.
template <class Element>
struct DecodeArgs {
  const bf16* q = nullptr;  ///< [request][head][head_dim], 4-byte aligned
  PagedKv<Element> kv;
  DecodeOutput to;
  float scale = 1;  ///< of q k, usually 1 / sqrt(head_dim); above 0
};

/// Query heads of one KV head: no more than an mma has rows.
inline constexpr std::int32_t kMaxGroup = 16;
/// A kernel's tiles of keys lie in one page each. vLLM's FlashAttention backends ask the same of a page.
inline constexpr std::int32_t kLeastPage = 16;

/// The key and value bytes that the batch must read, each once: 2 x tokens x KV heads x head_dim x element.
double decode_bytes(std::span<const std::int32_t> lengths, std::int32_t kv_heads, std::int32_t head_dim,
                    std::int32_t element_bytes);

/// 4 x tokens x heads x head_dim: a multiply-add each for q k and p v. Rows of an mma tile that no head uses
/// do not count.
double decode_flops(std::span<const std::int32_t> lengths, std::int32_t heads, std::int32_t head_dim);

/// Throws InputError("decode") for what no kernel is made for: head_dim other than 64 and 128, heads no
/// multiple of KV heads or more than kMaxGroup of each, pages below kLeastPage, chunks that cut a page, a
/// grid too large.
void check_decode(const DecodeOutput& to, std::int32_t kv_heads, std::int32_t head_dim,
                  std::int32_t page_shift);

/// What of that any decode kernel asks of the split and its output.
void check_output(const DecodeOutput& to, std::int32_t page_shift);

/// Starts the kernels on the GPU; in builds with CUDA only. Throws what check_decode() does, and CudaError.
void launch_decode(const DecodeArgs<bf16>& args, Stream stream);
void launch_decode(const DecodeArgs<fp8>& args, Stream stream);

/// Blocks of the kernel that the current GPU runs at once: SplitProblem::slots. In builds with CUDA only.
/// Requires head_dim 64 or 128, element_bytes 1 or 2. Throws CudaError.
std::int32_t decode_slots(std::int32_t head_dim, std::int32_t element_bytes);

}  // namespace pdsim::kernels
