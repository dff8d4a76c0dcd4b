// Prefill attention as its callers see it: plain C++ around the kernel of prefill.cuh.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/launch.hpp"
#include "kernels/paged_kv.cuh"

namespace pdsim::kernels {

/// One block's queries of one head: rows `first_row` and on of a request's new tokens, as many as the tiling
/// has.
struct PrefillTile {
  std::int32_t request, first_row;
};

/// Causal attention of the new tokens of a ragged batch, as reference.hpp defines it. Their own keys and
/// values are in the cache already. q and out are [new token of all requests][head][head_dim], 16-byte
/// aligned.
struct PrefillArgs {
  const bf16* q = nullptr;
  bf16* out = nullptr;
  PagedKv<bf16> kv;
  const std::int32_t* q_start = nullptr;  ///< [request + 1]: the first new token of each
  const PrefillTile* tiles = nullptr;     ///< of prefill_tiles(), in the memory of the kernel
  std::int32_t tile_count = 0;
  std::int32_t heads = 1;
  float scale = 1;  ///< of q k
};

/// Query rows of a warp. A warp fetches each fragment of K and V once for all of its rows, so that 32 ask
/// nearly half of shared memory for each FLOP, which with 16 is what binds (README.md has the count).
enum class PrefillTiling : std::uint8_t { rows16 = 16, rows32 = 32 };

/// Rows of a tile: four warps.
constexpr std::int32_t tile_rows(PrefillTiling tiling) {
  return 4 * static_cast<std::int32_t>(tiling);
}

/// 32 rows, where their tiles still give each multiprocessor the two blocks that it holds at once; else 16,
/// whose tiles are twice as many.
PrefillTiling choose_tiling(std::span<const std::int32_t> q_start, std::int32_t heads,
                            std::int32_t multiprocessors);

/// The tiles of a batch, those with the most keys first, so that none begins late and ends last. Host memory.
/// O(tiles log tiles).
std::vector<PrefillTile> prefill_tiles(std::span<const std::int32_t> q_start,
                                       std::span<const std::int32_t> lengths, PrefillTiling tiling);

/// Pairs of a new token and a token that it sees, of one head: the causal work that was asked for.
std::int64_t visible_pairs(std::span<const std::int32_t> q_start, std::span<const std::int32_t> lengths);

/// 4 head_dim heads visible pairs: a multiply-add each for q k and p v. What is computed beyond the diagonal
/// does not count.
double prefill_flops(std::int64_t visible_pairs, std::int32_t heads, std::int32_t head_dim);

/// Starts the kernel on the GPU; in builds with CUDA only. Throws InputError for a shape that it is not made
/// for (head_dim other than 64 and 128, heads no multiple of KV heads), CudaError. Without tiles nothing is
/// done.
void launch_prefill(const PrefillArgs& args, PrefillTiling tiling, Stream stream);

}  // namespace pdsim::kernels
