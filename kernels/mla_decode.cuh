// Absorbed MLA decode: one new token of each request, 16 heads a block, against one latent row a token.
//
// 16 x 512 sums are too many for a warp (256 registers a lane), so the four warps share a tile of 32 tokens
// by columns: each holds 144 of the query's 576 and computes that part of the scores, and sums up 128 of the
// output's 512. The parts of the scores meet in shared memory, where every warp adds all four in the same
// order: all have the same softmax, to the bit, without exchanging its state.
//
// Two barriers a tile hold it together:
//   the first   this tile has landed for all, and all are done with the one before: its place is free;
//   the second  the scores' parts are there. They are read before the next first barrier, after which they
//   are
//               written again.
//
// A tile is 36 KiB and the next is on its way while one is worked on. Two blocks fit in a multiprocessor of
// sm_90 and sm_100: 72 KiB on their way, where Little's law asks for 29 KB (decode.cuh); one fits in sm_80's,
// where it asks for 15 (2.0 TB/s x 0.8 us / 108). With many heads arithmetic binds, fed by shared memory: a
// tile and its 1.1 MFLOP move 144 KiB (36 in, 36 of keys, 40 of scores' parts, 32 of values), 1152 cycles of
// 128 bytes. So this shape cannot exceed 970 FLOP a cycle of an A100's 2048 or an H100's 4096.
#pragma once

#include "kernels/combine.cuh"
#include "kernels/device.cuh"
#include "kernels/mla_decode.hpp"
#include "kernels/online_softmax.cuh"
#include "kernels/paged_kv.cuh"
#include "kernels/shared_tile.cuh"

namespace pdsim::kernels {

struct MlaShape {
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kKeys = 32;             ///< of a tile
  static constexpr int kChunks = kMlaRow / 8;  ///< of 16 bytes, of a row
  static constexpr int kStages = 2;
  static constexpr int kQueryPairs = kChunks / 2 / kWarps;      ///< pairs of a row's chunks that a warp has
  static constexpr int kValuePairs = kMlaLatent / 16 / kWarps;  ///< and of a value's
  static constexpr int kScoreStride = kKeys + 8;                ///< padded against bank conflicts
  static constexpr int kTileChunks = kKeys * kChunks;
  static constexpr int kScoresOfWarp = kMlaHeads * kScoreStride;
  static constexpr int kSharedBytes = kStages * kTileChunks * 16 + kWarps * kScoresOfWarp * 4;
};

/// Begins to copy the tile whose first key is `token`; what is beyond `end` becomes zeros. All threads copy
/// 16 rows at once, which lie in one page, 128 bytes of each.
PDSIM_DEVICE void fetch_latents(const SharedTile<MlaShape::kChunks>& to, const PagedKv<bf16>& latent,
                                int request, int token, int end) {
  constexpr int kLanes = MlaShape::kThreads / kLeastPage;  // that share a row
  const int thread = static_cast<int>(threadIdx.x % MlaShape::kThreads);
  const int row = thread / kLanes, chunk = thread % kLanes;
  PDSIM_UNROLL
  for (int first = 0; first < MlaShape::kKeys; first += kLeastPage) {
    const int slot = token + first < end ? latent.slot(request, token + first) : 0;
    const bf16* from = stride_on(latent.k, slot + row, kMlaRow * static_cast<int>(sizeof(bf16))) + chunk * 8;
    PDSIM_UNROLL
    for (int i = 0; i < MlaShape::kChunks; i += kLanes)
      copy_async(to.chunk(first + row, i + chunk), from + i * 8, token + first + row < end);
  }
}

/// Grid: tiles of heads x splits x requests; blocks of kThreads with kSharedBytes. Requires what
/// check_mla_decode() does.
PDSIM_KERNEL void PDSIM_LAUNCH_BOUNDS(MlaShape::kThreads, 2) mla_decode(MlaDecodeArgs args) {
  using Shape = MlaShape;
  constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;

  const int first_head = static_cast<int>(blockIdx.x) * kMlaHeads, split = static_cast<int>(blockIdx.y),
            request = static_cast<int>(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int row = lane / 4, quad_lane = lane % 4;  // of this lane in mma fragments; it has row + 8 too
  const int length = args.latent.lengths[request], chunks = chunks_of(length, args.to.chunk_tokens);
  if (split >= chunks) return;

  const int begin = split * args.to.chunk_tokens;
  const int end = length < begin + args.to.chunk_tokens ? length : begin + args.to.chunk_tokens;
  const int tiles = (end - begin + kKeys - 1) / kKeys;
  const auto tile_of = [](int stage) {
    return SharedTile<Shape::kChunks>{shared_memory<Vec16>() + stage * Shape::kTileChunks};
  };
  const auto scores_of = [&](int of_warp, int head, int key) {
    return reinterpret_cast<Pack<float, 2>*>(reinterpret_cast<float*>(tile_of(kStages).rows) +
                                             of_warp * Shape::kScoresOfWarp + head * Shape::kScoreStride +
                                             key);
  };
  PDSIM_UNROLL
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < tiles) fetch_latents(tile_of(tile), args.latent, request, begin + tile * kKeys, end);
    copy_async_commit();
  }

  const int64_t first_row = int64_t{request} * args.to.heads + first_head;
  uint32_t query[Shape::kQueryPairs][4];
  PDSIM_UNROLL
  for (int pair = 0; pair < Shape::kQueryPairs; ++pair) {
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int column = 16 * (warp * Shape::kQueryPairs + pair) + 8 * (i / 2) + 2 * quad_lane;
      query[pair][i] = load_pair(args.q + (first_row + row + i % 2 * 8) * kMlaRow + column);
    }
  }

  OnlineSoftmax softmax;
  float out[2 * Shape::kValuePairs][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const SharedTile<Shape::kChunks> latents = tile_of(tile % kStages);
    copy_async_wait<kStages - 2>();
    barrier();
    if (const int ahead = tile + kStages - 1; ahead < tiles)
      fetch_latents(tile_of(ahead % kStages), args.latent, request, begin + ahead * kKeys, end);
    copy_async_commit();

    float scores[kKeys / 8][4] = {};
    PDSIM_UNROLL
    for (int pair = 0; pair < Shape::kQueryPairs; ++pair) {
      PDSIM_UNROLL
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t keys[4];
        latents.load(keys, 16 * j, warp * Shape::kQueryPairs + pair);
        mma(scores[2 * j], query[pair], keys[0], keys[1]);
        mma(scores[2 * j + 1], query[pair], keys[2], keys[3]);
      }
    }
    PDSIM_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      PDSIM_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Pack<float, 2> part{scores[j][2 * half], scores[j][2 * half + 1]};
        store_shared(scores_of(warp, row + 8 * half, 8 * j + 2 * quad_lane), part);
        scores[j][2 * half] = scores[j][2 * half + 1] = 0;
      }
    }
    barrier();
    PDSIM_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      PDSIM_UNROLL
      for (int half = 0; half < 2; ++half) {
        PDSIM_UNROLL
        for (int of_warp = 0; of_warp < Shape::kWarps; ++of_warp) {
          const auto part = load_shared(scores_of(of_warp, row + 8 * half, 8 * j + 2 * quad_lane));
          scores[j][2 * half] += part.x[0];
          scores[j][2 * half + 1] += part.x[1];
        }
      }
    }

    mask_keys(scores, end - begin - tile * kKeys);
    float rescale[2];
    softmax.absorb(scores, args.scale * kLog2E, rescale);
    scale_rows(out, rescale);
    PDSIM_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      uint32_t probabilities[4];
      as_operand(probabilities, scores[2 * i], scores[2 * i + 1]);
      PDSIM_UNROLL
      for (int pair = 0; pair < Shape::kValuePairs; ++pair) {
        uint32_t values[4];
        latents.load_transposed(values, 16 * i, warp * Shape::kValuePairs + pair);
        mma(out[2 * pair], probabilities, values[0], values[1]);
        mma(out[2 * pair + 1], probabilities, values[2], values[3]);
      }
    }
  }

  PDSIM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const PartState state{softmax.max[half], row_sum(softmax.sum[half])};
    PDSIM_UNROLL
    for (int j = 0; j < 2 * Shape::kValuePairs; ++j) {
      store_chunk<kMlaLatent>(args.to, first_row + row + 8 * half, split, chunks,
                              16 * warp * Shape::kValuePairs + 8 * j + 2 * quad_lane, state,
                              Pack<float, 2>{out[j][2 * half], out[j][2 * half + 1]});
    }
  }
}

/// Starts it, and what joins its parts: on the GPU under nvcc, on the emulator elsewhere.
inline void run_mla_decode(const MlaDecodeArgs& args, Stream stream) {
  const DecodeOutput& to = args.to;
  if (to.requests == 0) return;
  const Dim grid{static_cast<unsigned>(to.heads / kMlaHeads), static_cast<unsigned>(to.splits),
                 static_cast<unsigned>(to.requests)};
  launch(mla_decode, Launch{grid, {MlaShape::kThreads}, MlaShape::kSharedBytes, stream}, args);
  run_combine<kMlaLatent>(to, args.latent.lengths, stream);
}

}  // namespace pdsim::kernels
