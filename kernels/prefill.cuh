// Prefill attention in the shape of FlashAttention-2 (Dao 2023): causal, grouped queries, paged KV, bf16 in
// and out, fp32 sums.
//
// A block has one head's tile of queries and walks the keys that these see, 64 or 32 at a time, from the last
// back to the first. K and V have one place each in shared memory: V of a block of keys is on its way while
// its scores are computed, K of the next while its values are added. Scores and probabilities never leave the
// registers. Only blocks on the diagonal are masked; keys beyond the request's end lie beyond the diagonal
// too.
//
// Two barriers a block of keys hold it together:
//   the first   K and the offsets of this block are there, and all have done with V of the one before;
//   the second  V and the offsets of the next are there, and all have done with K.
#pragma once

#include "kernels/device.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/paged_kv.cuh"
#include "kernels/prefill.hpp"
#include "kernels/shared_tile.cuh"

namespace pdsim::kernels {

/// What follows from head size and tiling.
template <int HeadDim, int RowsPerWarp>
struct PrefillShape {
  static constexpr int kThreads = 128;
  static constexpr int kRows = kThreads / 32 * RowsPerWarp;
  /// Of a block. With 64 the sums and scores of 32 rows and 128 columns leave too few registers for the rest.
  static constexpr int kKeys = HeadDim == 128 && RowsPerWarp == 32 ? 32 : 64;
  static constexpr int kChunks = HeadDim / 8;  ///< of 16 bytes, of a row
  static constexpr int kRowFragments = RowsPerWarp / 16;
  static constexpr int kSharedBytes = (kRows + 2 * kKeys) * kChunks * 16 + 2 * kKeys * 8;
  /// A multiprocessor's blocks that registers should leave room for.
  static constexpr int kBlocks = RowsPerWarp == 32 ? 2 : HeadDim == 64 ? 4 : 3;
};

/// A score that does not count. Finite, so that a row of which a block holds no visible key needs no case of
/// its own: what such a row sums up meanwhile is multiplied by 2^(this - a true score) = 0 at its first
/// visible key, and it has one: block 0 is walked last. A power of two, so that its product with the scale is
/// exact: masked scores less their maximum are 0, where a rounded one would leave 2^(a huge error).
inline constexpr float kMasked = -0x1p100f;

/// Where the rows of a block of keys begin in a pool, in elements; kNoRow beyond the request's end. That is
/// no row's beginning, and yet in the pool and aligned, as the address of a copy should be that reads
/// nothing.
using RowOffset = std::int64_t;
inline constexpr RowOffset kNoRow = 8;

/// Begins to copy one block's rows of K or V. `from` is this thread's chunk of a row at offset 0.
template <class Shape>
PDSIM_DEVICE void fetch_rows(const SharedTile<Shape::kChunks>& to, const bf16* from,
                             const RowOffset* offsets) {
  constexpr int kRowsAtOnce = Shape::kThreads / Shape::kChunks;
  const int thread = static_cast<int>(threadIdx.x % Shape::kThreads), chunk = thread % Shape::kChunks;
  PDSIM_UNROLL
  for (int first = 0; first < Shape::kKeys; first += kRowsAtOnce) {
    const int row = first + thread / Shape::kChunks;
    const RowOffset offset = load_shared(offsets + row);
    copy_async(to.chunk(row, chunk), from + offset, offset != kNoRow);
  }
}

/// Grid: tiles x heads, the heads of a tile side by side, because those of one group read the same keys;
/// blocks of kThreads with kSharedBytes. Requires HeadDim = kv.head_dim.
template <int HeadDim, int RowsPerWarp>
PDSIM_KERNEL void PDSIM_LAUNCH_BOUNDS((PrefillShape<HeadDim, RowsPerWarp>::kThreads),
                                      (PrefillShape<HeadDim, RowsPerWarp>::kBlocks))
    prefill(PrefillArgs args) {
  using Shape = PrefillShape<HeadDim, RowsPerWarp>;
  constexpr int kKeys = Shape::kKeys, kRowFragments = Shape::kRowFragments;

  const PrefillTile tile = args.tiles[blockIdx.x / static_cast<unsigned>(args.heads)];
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(args.heads));
  const int kv_head = head / (args.heads / args.kv.kv_heads);
  const int thread = static_cast<int>(threadIdx.x % Shape::kThreads), warp = thread / 32, lane = thread % 32;

  const int first_token = args.q_start[tile.request], fresh = args.q_start[tile.request + 1] - first_token;
  const int length = args.kv.lengths[tile.request];
  const int rows = fresh - tile.first_row < Shape::kRows ? fresh - tile.first_row : Shape::kRows;
  const int first_position = length - fresh + tile.first_row;  // in its request, of the tile's first query
  const std::int64_t first_query =
      static_cast<std::int64_t>(first_token + tile.first_row) * args.heads + head;

  const bf16* k_rows = args.kv.k + thread % Shape::kChunks * 8;
  const bf16* v_rows = args.kv.v + thread % Shape::kChunks * 8;

  const SharedTile<Shape::kChunks> queries{shared_memory<Vec16>()};
  const SharedTile<Shape::kChunks> keys{queries.rows + Shape::kRows * Shape::kChunks};
  const SharedTile<Shape::kChunks> values{keys.rows + kKeys * Shape::kChunks};
  const auto offsets = [&](int block) {
    return reinterpret_cast<RowOffset*>(values.rows + kKeys * Shape::kChunks) + (block & 1) * kKeys;
  };
  const auto look_up = [&](int block) {  // a key a thread
    const int position = block * kKeys + thread;
    if (thread >= kKeys) return;
    const bool exists = 0 <= position && position < length;
    store_shared(offsets(block) + thread,
                 exists ? args.kv.row(args.kv.slot(tile.request, position), kv_head) : kNoRow);
  };

  PDSIM_UNROLL
  for (int first = 0; first < Shape::kRows; first += Shape::kThreads / Shape::kChunks) {
    const int row = first + thread / Shape::kChunks, chunk = thread % Shape::kChunks;
    const std::int64_t query = first_query + static_cast<std::int64_t>(row < rows ? row : 0) * args.heads;
    copy_async(queries.chunk(row, chunk), args.q + query * HeadDim + chunk * 8, row < rows);
  }
  const int last_block = (first_position + rows - 1) / kKeys;
  look_up(last_block);
  barrier();
  fetch_rows<Shape>(keys, k_rows, offsets(last_block));
  copy_async_commit();

  const SharedAddress first_query_fragment = queries.first_left(warp * RowsPerWarp);
  const SharedAddress first_key_fragment = keys.first_right(0), first_value_fragment = values.first_left(0);
  OnlineSoftmax softmax[kRowFragments];
  float out[kRowFragments][HeadDim / 8][4] = {};
  for (int block = last_block; block >= 0; --block) {
    copy_async_wait<0>();
    barrier();
    fetch_rows<Shape>(values, v_rows, offsets(block));
    copy_async_commit();

    float scores[kRowFragments][kKeys / 8][4] = {};
    PDSIM_UNROLL
    for (int pair = 0; pair < HeadDim / 16; ++pair) {
      std::uint32_t q[kRowFragments][4];
      PDSIM_UNROLL
      for (int f = 0; f < kRowFragments; ++f)
        load_matrix(q[f], queries.step(first_query_fragment, f * 16, pair));
      PDSIM_UNROLL
      for (int j = 0; j < kKeys / 16; ++j) {
        std::uint32_t k[4];
        load_matrix(k, keys.step(first_key_fragment, j * 16, pair));
        PDSIM_UNROLL
        for (int f = 0; f < kRowFragments; ++f) {
          mma(scores[f][2 * j], q[f], k[0], k[1]);
          mma(scores[f][2 * j + 1], q[f], k[2], k[3]);
        }
      }
    }
    if ((block + 1) * kKeys - 1 > first_position) {
      const int last_visible = first_position + warp * RowsPerWarp + lane / 4 - block * kKeys;
      PDSIM_UNROLL
      for (int f = 0; f < kRowFragments; ++f) {
        PDSIM_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) {
          PDSIM_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int key = j * 8 + lane % 4 * 2 + i % 2;
            if (key > last_visible + f * 16 + i / 2 * 8) scores[f][j][i] = kMasked;
          }
        }
      }
    }

    look_up(block - 1);
    copy_async_wait<0>();
    barrier();
    fetch_rows<Shape>(keys, k_rows, offsets(block - 1));
    copy_async_commit();

    PDSIM_UNROLL
    for (int f = 0; f < kRowFragments; ++f) {
      float rescale[2];
      softmax[f].absorb(scores[f], args.scale * kLog2E, rescale);
      scale_rows(out[f], rescale);
    }
    PDSIM_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      std::uint32_t p[kRowFragments][4];
      PDSIM_UNROLL
      for (int f = 0; f < kRowFragments; ++f) as_operand(p[f], scores[f][2 * i], scores[f][2 * i + 1]);
      PDSIM_UNROLL
      for (int pair = 0; pair < HeadDim / 16; ++pair) {
        std::uint32_t v[4];
        load_matrix_transposed(v, values.step(first_value_fragment, i * 16, pair));
        PDSIM_UNROLL
        for (int f = 0; f < kRowFragments; ++f) {
          mma(out[f][2 * pair], p[f], v[0], v[1]);
          mma(out[f][2 * pair + 1], p[f], v[2], v[3]);
        }
      }
    }
  }
  copy_async_wait<0>();

  PDSIM_UNROLL
  for (int f = 0; f < kRowFragments; ++f) {
    PDSIM_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1 / row_sum(softmax[f].sum[half]);
      const int row = warp * RowsPerWarp + f * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      const std::int64_t query = first_query + static_cast<std::int64_t>(row) * args.heads;
      bf16* to = args.out + query * HeadDim + lane % 4 * 2;
      PDSIM_UNROLL
      for (int j = 0; j < HeadDim / 8; ++j) {
        store_bf16x2(to + j * 8, pack_bf16(out[f][j][2 * half] * inverse, out[f][j][2 * half + 1] * inverse));
      }
    }
  }
}

/// Starts it: on the GPU under nvcc, on the emulator elsewhere.
template <int HeadDim, int RowsPerWarp>
void run_prefill(const PrefillArgs& args, Stream stream) {
  using Shape = PrefillShape<HeadDim, RowsPerWarp>;
  const auto blocks = static_cast<unsigned>(args.tile_count) * static_cast<unsigned>(args.heads);
  if (blocks == 0) return;
  launch(prefill<HeadDim, RowsPerWarp>, Launch{{blocks}, {Shape::kThreads}, Shape::kSharedBytes, stream},
         args);
}

}  // namespace pdsim::kernels
