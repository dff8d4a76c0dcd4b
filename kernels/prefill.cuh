// Prefill attention in the shape of FlashAttention-2 (Dao 2023): causal, grouped queries, paged KV, bf16 in
// and out, fp32 sums.
//
// A block has one head's tile of queries and walks the keys that these see, 64 at a time, from the last back
// to the first. K and V have one place each in shared memory: V of a block of keys is on its way while its
// scores are computed, K of the next while its values are added. Scores and probabilities never leave the
// registers. Only blocks on the diagonal are masked; keys beyond the request's end lie beyond the diagonal
// too.
//
// Two barriers a block of keys hold it together:
//   the first   K and the slots of this block are there, and all have done with V of the one before;
//   the second  V and the slots of the next are there, and all have done with K.
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
  static constexpr int kKeys = 64;             ///< of a block
  static constexpr int kChunks = HeadDim / 8;  ///< of 16 bytes, of a row
  static constexpr int kRowFragments = RowsPerWarp / 16;
  static constexpr int kRowsAtOnce = kThreads / kChunks;     ///< that all threads together copy
  static constexpr int kRowsOfThread = kKeys / kRowsAtOnce;  ///< of K or V: every kRowsAtOnce-th
  static constexpr int kSharedBytes = (kRows + 2 * kKeys) * kChunks * 16 + 2 * kKeys * 4;
  /// A multiprocessor's blocks that registers should leave room for.
  static constexpr int kBlocks = RowsPerWarp == 32 ? 2 : 3;
};

/// A score that does not count. Finite, so that a row of which a block holds no visible key needs no case of
/// its own: what such a row sums up meanwhile is multiplied by 2^(this - a true score) = 0 at its first
/// visible key, and it has one: block 0 is walked last. A power of two, so that its product with the scale is
/// exact: masked scores less their maximum are 0, where a rounded one would leave 2^(a huge error).
inline constexpr float kMasked = -0x1p100f;

/// What stands for the slot (PagedKv::slot) of a key beyond the request's end, of which nothing is read.
inline constexpr std::int32_t kNoSlot = -1;

/// Slots that a thread reads at once. A block's slots lie in the order in which its threads want them: those
/// of the first thread's rows, then the next one's.
using Slots = Pack<std::int32_t, 4>;

/// Which row of a block has the slot number `at`.
template <class Shape>
PDSIM_DEVICE int row_of_slot(int at) {
  return at % Shape::kRowsOfThread * Shape::kRowsAtOnce + at / Shape::kRowsOfThread;
}

/// Begins to copy one block's rows of K or V. `from` is this thread's chunk of the row in slot 0.
template <class Shape>
PDSIM_DEVICE void fetch_rows(const SharedTile<Shape::kChunks>& to, const bf16* from, int slot_bytes,
                             const std::int32_t* slots) {
  const int thread = static_cast<int>(threadIdx.x % Shape::kThreads), chunk = thread % Shape::kChunks;
  PDSIM_UNROLL
  for (int i = 0; i < Shape::kRowsOfThread; i += 4) {
    const int at = thread / Shape::kChunks * Shape::kRowsOfThread + i;
    const Slots four = load_shared(reinterpret_cast<const Slots*>(slots) + at / 4);
    PDSIM_UNROLL
    for (int j = 0; j < 4; ++j) {
      copy_async(to.chunk((i + j) * Shape::kRowsAtOnce + thread / Shape::kChunks, chunk),
                 stride_on(from, four.x[j], slot_bytes), four.x[j] != kNoSlot);
    }
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

  const int slot_bytes = args.kv.kv_heads * HeadDim * static_cast<int>(sizeof(bf16));
  const std::int64_t first_chunk = args.kv.row(0, kv_head) + thread % Shape::kChunks * 8;
  const bf16 *k_rows = args.kv.k + first_chunk, *v_rows = args.kv.v + first_chunk;

  const SharedTile<Shape::kChunks> queries{shared_memory<Vec16>()};
  const SharedTile<Shape::kChunks> keys{queries.rows + Shape::kRows * Shape::kChunks};
  const SharedTile<Shape::kChunks> values{keys.rows + kKeys * Shape::kChunks};
  const auto slots = [&](int block) {
    return reinterpret_cast<std::int32_t*>(values.rows + kKeys * Shape::kChunks) + (block & 1) * kKeys;
  };
  const auto look_up = [&](int block) {  // a key a thread
    const int position = block * kKeys + row_of_slot<Shape>(thread);
    const bool exists = thread < kKeys && 0 <= position && position < length;
    return exists ? args.kv.slot(tile.request, position) : kNoSlot;
  };
  const auto keep = [&](int block, std::int32_t slot) {
    if (thread < kKeys) store_shared(slots(block) + thread, slot);
  };

  PDSIM_UNROLL
  for (int first = 0; first < Shape::kRows; first += Shape::kRowsAtOnce) {
    const int row = first + thread / Shape::kChunks, chunk = thread % Shape::kChunks;
    const std::int64_t query = first_query + static_cast<std::int64_t>(row < rows ? row : 0) * args.heads;
    copy_async(queries.chunk(row, chunk), args.q + query * HeadDim + chunk * 8, row < rows);
  }
  const int last_block = (first_position + rows - 1) / kKeys;
  keep(last_block, look_up(last_block));
  barrier();
  fetch_rows<Shape>(keys, k_rows, slot_bytes, slots(last_block));
  copy_async_commit();

  const SharedAddress first_query_fragment = queries.first_left(warp * RowsPerWarp);
  const SharedAddress first_key_fragment = keys.first_right(0), first_value_fragment = values.first_left(0);
  OnlineSoftmax softmax[kRowFragments];
  float out[kRowFragments][HeadDim / 8][4] = {};
  for (int block = last_block; block >= 0; --block) {
    copy_async_wait<0>();
    barrier();
    fetch_rows<Shape>(values, v_rows, slot_bytes, slots(block));
    copy_async_commit();
    const std::int32_t next_slot = look_up(block - 1);  // here, so that the scores hide how long it takes

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

    keep(block - 1, next_slot);
    copy_async_wait<0>();
    barrier();
    fetch_rows<Shape>(keys, k_rows, slot_bytes, slots(block - 1));
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
