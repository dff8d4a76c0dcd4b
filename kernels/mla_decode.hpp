// Decode attention over the latent cache of multi-head latent attention (DeepSeek-V2, 2024), as its callers
// see it. The up-projections of keys and values are absorbed into query and output, so that every head
// attends to one row a token: its 512 latent and 64 rotary columns are the key, the latent ones the value as
// well.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/decode.hpp"

namespace pdsim::kernels {

inline constexpr std::int32_t kMlaLatent = 512;           ///< columns of a value, and of the output
inline constexpr std::int32_t kMlaRow = kMlaLatent + 64;  ///< columns of a key: bf16, 1152 bytes a token

/// Heads of a thread block: a rank's heads are a multiple.
inline constexpr std::int32_t kMlaHeads = 16;
/// SplitProblem::least_chunk: parts are as wide as the latent, an eighth of the bytes at 512 tokens and 16
/// heads.
inline constexpr std::int32_t kMlaLeastChunk = 512;

/// o = softmax(scale q . row) row[:512] over all tokens of each request; zeros where there are none.
struct MlaDecodeArgs {
  const bf16* q = nullptr;  ///< [request][head][kMlaRow], 4-byte aligned
  PagedKv<bf16> latent;     ///< k alone; kv_heads 1, head_dim kMlaRow
  DecodeOutput to;          ///< width kMlaLatent
  float scale = 1;          ///< of q . row; above 0
};

/// The bytes that the batch must read, each once: 1152 a token, however many heads.
double mla_decode_bytes(std::span<const std::int32_t> lengths);

/// 2 (576 + 512) a token and head.
double mla_decode_flops(std::span<const std::int32_t> lengths, std::int32_t heads);

/// Throws InputError("MLA decode") for what the kernel is not made for: heads no multiple of kMlaHeads, a
/// cache of other rows; and what check_output() does.
void check_mla_decode(const MlaDecodeArgs& args);

/// Starts the kernels on the GPU; in builds with CUDA only. Throws what check_mla_decode() does, and
/// CudaError.
void launch_mla_decode(const MlaDecodeArgs& args, Stream stream);

/// SplitProblem::slots of the current GPU, of blocks of kMlaHeads heads. In builds with CUDA only. Throws
/// CudaError.
std::int32_t mla_decode_slots();

}  // namespace pdsim::kernels
