// Decode attention: one new token of each request against its paged KV cache, split over the keys.
//
// A block has one request, one KV head and one chunk of the keys (decode_split.hpp). The queries that share
// the KV head are the rows of one 16-row mma tile, for groups of 1 to 16 alike, though a group of 1 uses a
// sixteenth of it: there is no second body for small groups, because the tensor cores idle anyhow. On an H200
// a multiprocessor gets 8 KiB of keys and values in 0.23 us (4.8 TB/s / 132), and the 32 mma that they ask
// for, of 2048 multiply-adds each, are 32 cycles of 2048.
//
// Each warp walks tiles of 16 keys of its own, every fourth, through a ring of its own in shared memory: no
// barrier of the block until the end, where the four warps' results are joined. At any time kStages - 1 tiles
// of each warp are on their way; kStages is the least that makes this 48 KiB for a block alone on its
// multiprocessor, 1.7 times the 29 KB that 4.8 TB/s x 0.8 us / 132 need by Little's law. A page is a multiple
// of 16 tokens, so a tile lies in one page and costs one look-up.
#pragma once

#include "kernels/combine.cuh"
#include "kernels/decode.hpp"
#include "kernels/device.cuh"
#include "kernels/online_softmax.cuh"
#include "kernels/paged_kv.cuh"
#include "kernels/shared_tile.cuh"

namespace pdsim::kernels {

inline constexpr int kDecodeWarps = 4;
inline constexpr int kTileKeys = 16;  ///< the depth of an mma
static_assert(kTileKeys <= kLeastPage);

/// How 16 bytes of a cache row become operands of an mma in bf16. fp8 is read by the same ldmatrix as bf16,
/// which moves it in pairs: a lane so holds 4 neighbouring columns where bf16 has 2, and has the even ones
/// and the odd ones as pairs (fp8x4_to_bf16). In query x key the order of columns is free as long as both
/// agree; of values this makes accumulators of even and of odd columns, which the writing of the result
/// knows.
template <class T>
struct Operands;

template <>
struct Operands<bf16> {
  static constexpr int kColumns = 8;  ///< of a chunk of 16 bytes
  static constexpr float kOne = 1;    ///< what 1 in the cache becomes in a product with 1

  /// Of 16 query columns the two that meet what lane % 4 has of a key in its first or second register.
  PDSIM_DEVICE static uint32_t query_pair(const bf16* q, int quad_lane, int half) {
    return load_pair(q + 2 * quad_lane + 8 * half);
  }
  /// Writes what two accumulators have of one row (elements i, i + 1) to its 16 columns.
  PDSIM_DEVICE static void store_columns(float* columns, const float (&first)[4], const float (&second)[4],
                                         int i, int quad_lane) {
    auto* pairs = reinterpret_cast<Pack<float, 2>*>(columns);
    store_shared(pairs + quad_lane, Pack<float, 2>{first[i], first[i + 1]});
    store_shared(pairs + 4 + quad_lane, Pack<float, 2>{second[i], second[i + 1]});
  }

  /// Adds query x key over two chunks: registers by (8 keys, chunk).
  template <int Steps>
  PDSIM_DEVICE static void add_scores(float (&s)[2][4], const uint32_t (&q)[Steps][4], int chunk_pair,
                                      const uint32_t (&k)[4]) {
    mma(s[0], q[chunk_pair], k[0], k[1]);
    mma(s[1], q[chunk_pair], k[2], k[3]);
  }
  PDSIM_DEVICE static uint32_t raised(uint32_t pair) { return pair; }
  /// Adds p x value over two chunks of columns: registers by (chunk, 8 keys), transposed.
  template <int Columns>
  PDSIM_DEVICE static void add_values(float (&o)[Columns][4], const uint32_t (&p)[4], int chunk_pair,
                                      const uint32_t (&v)[4]) {
    mma(o[2 * chunk_pair], p, v[0], v[1]);
    mma(o[2 * chunk_pair + 1], p, v[2], v[3]);
  }
};

template <>
struct Operands<fp8> {
  static constexpr int kColumns = 16;
  /// Queries and probabilities are 2^60 times as large, so that products and sums are normal numbers.
  static constexpr int kRaised = 60;
  static constexpr float kOne = kFp8One * static_cast<float>(int64_t{1} << kRaised);

  PDSIM_DEVICE static uint32_t query_pair(const bf16* q, int quad_lane, int half) {
    return raised(pack_bf16(to_float(q[4 * quad_lane + half]), to_float(q[4 * quad_lane + 2 + half])));
  }
  /// A pair times 2^kRaised, by an addition to both exponents. 0 becomes 2^(kRaised - 127), as good as none
  /// beside numbers so raised. Requires them below 2^(127 - kRaised).
  PDSIM_DEVICE static uint32_t raised(uint32_t pair) { return pair + kRaised * 0x00800080u; }
  PDSIM_DEVICE static void store_columns(float* columns, const float (&even)[4], const float (&odd)[4], int i,
                                         int quad_lane) {
    store_shared(reinterpret_cast<Pack<float, 4>*>(columns) + quad_lane,
                 Pack<float, 4>{even[i], odd[i], even[i + 1], odd[i + 1]});
  }

  template <int Steps>
  PDSIM_DEVICE static void add_scores(float (&s)[2][4], const uint32_t (&q)[Steps][4], int chunk_pair,
                                      const uint32_t (&k)[4]) {
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t even, odd;
      fp8x4_to_bf16(k[i], even, odd);
      mma(s[i / 2], q[2 * chunk_pair + i % 2], even, odd);
    }
  }
  template <int Columns>
  PDSIM_DEVICE static void add_values(float (&o)[Columns][4], const uint32_t (&p)[4], int chunk_pair,
                                      const uint32_t (&v)[4]) {
    PDSIM_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint32_t even[2], odd[2];  // columns, of the first and the last 8 keys
      PDSIM_UNROLL
      for (int keys = 0; keys < 2; ++keys) fp8x4_to_bf16(v[2 * chunk + keys], even[keys], odd[keys]);
      const int j = 4 * chunk_pair + 2 * chunk;
      mma(o[j], p, even[0], even[1]);
      mma(o[j + 1], p, odd[0], odd[1]);
    }
  }
};

/// The shapes that follow from element type and head size.
template <class T, int D>
struct DecodeShape {
  static constexpr int kChunks = D * static_cast<int>(sizeof(T)) / 16;  ///< of a row of keys or values
  static constexpr int kTileBytes = 2 * kTileKeys * kChunks * 16;       ///< keys and values
  static constexpr int kInFlight = (48 << 10) / kDecodeWarps;           ///< bytes of one warp, at least
  static constexpr int kStages = 1 + (kInFlight + kTileBytes - 1) / kTileBytes;
  static constexpr int kRingBytes = kStages * kTileBytes;  ///< of one warp
  static constexpr int kSharedBytes = kDecodeWarps * kRingBytes;
  /// A multiprocessor's blocks that registers should leave room for: those that fit in 228 KiB (sm_90,
  /// sm_100; each takes 1 KiB more than it asks for).
  static constexpr int kBlocks = (228 << 10) / (kSharedBytes + 1024);

  // At the end a warp's ring holds its result: 16 rows of D floats, padded against bank conflicts, and their
  // states.
  static constexpr int kResultStride = D + Operands<T>::kColumns;
  static constexpr int kStatesAt = kMaxGroup * kResultStride;
  static_assert(kRingBytes >= kStatesAt * 4 + kMaxGroup * static_cast<int>(sizeof(PartState)));
};

/// One warp's walk along a request's keys: where they come from and the ring that they are copied to.
template <class T, int D>
struct DecodeWalk {
  using Shape = DecodeShape<T, D>;
  const PagedKv<T>& kv;
  int request, kv_head;
  int end;  ///< of the chunk
  unsigned char* ring;

  PDSIM_DEVICE SharedTile<Shape::kChunks> key_tile(int stage) const {
    return {reinterpret_cast<Vec16*>(ring + stage * Shape::kTileBytes)};
  }
  PDSIM_DEVICE SharedTile<Shape::kChunks> value_tile(int stage) const {
    return {key_tile(stage).rows + kTileKeys * Shape::kChunks};
  }
  /// Begins to copy the tile whose first key is `token` < end; what is beyond `end` becomes zeros.
  PDSIM_DEVICE void fetch(int stage, int token) const {
    constexpr int kRowsAtOnce = 32 / Shape::kChunks;
    const int lane = static_cast<int>(threadIdx.x % 32), chunk = lane % Shape::kChunks;
    const int stride = kv.kv_heads * D * static_cast<int>(sizeof(T));  // bytes of a slot
    const int64_t column = kv.row(0, kv_head) + chunk * Operands<T>::kColumns;
    const int32_t slot = kv.slot(request, token) + lane / Shape::kChunks;
    const T *keys = stride_on(kv.k + column, slot, stride), *values = stride_on(kv.v + column, slot, stride);
    PDSIM_UNROLL
    for (int i = 0; i < kTileKeys; i += kRowsAtOnce) {
      const int row = i + lane / Shape::kChunks;
      copy_async(key_tile(stage).chunk(row, chunk), stride_on(keys, i, stride), token + row < end);
      copy_async(value_tile(stage).chunk(row, chunk), stride_on(values, i, stride), token + row < end);
    }
  }
};

/// Grid: KV heads x splits x requests; blocks of kDecodeWarps x 32 threads with DecodeShape::kSharedBytes.
/// Requires what check_decode() does and D = kv.head_dim.
template <class T, int D>
PDSIM_KERNEL void PDSIM_LAUNCH_BOUNDS(kDecodeWarps * 32, (DecodeShape<T, D>::kBlocks))
    decode(DecodeArgs<T> args) {
  using Shape = DecodeShape<T, D>;
  using Operand = Operands<T>;
  constexpr int kStages = Shape::kStages;

  const int kv_head = static_cast<int>(blockIdx.x), split = static_cast<int>(blockIdx.y),
            request = static_cast<int>(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int row = lane / 4, quad_lane = lane % 4;  // of this lane in mma fragments; it has row + 8 too
  const int length = args.kv.lengths[request], chunks = chunks_of(length, args.to.chunk_tokens);
  if (split >= chunks) return;

  const int begin = split * args.to.chunk_tokens;
  const int end = length < begin + args.to.chunk_tokens ? length : begin + args.to.chunk_tokens;
  const int tiles = ((end - begin + kTileKeys - 1) / kTileKeys + kDecodeWarps - 1 - warp) / kDecodeWarps;
  const auto token_of = [&](int tile) { return begin + (tile * kDecodeWarps + warp) * kTileKeys; };
  const DecodeWalk<T, D> walk{args.kv, request, kv_head, end,
                              shared_memory<unsigned char>() + warp * Shape::kRingBytes};
  PDSIM_UNROLL
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < tiles) walk.fetch(tile, token_of(tile));
    copy_async_commit();
  }

  const int group = args.to.heads / args.kv.kv_heads;
  const int64_t first_row = static_cast<int64_t>(request) * args.to.heads + kv_head * group;
  uint32_t query[D / 16][4];
  PDSIM_UNROLL
  for (int step = 0; step < D / 16; ++step) {
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int head = row + i % 2 * 8;
      const bf16* columns = args.q + (first_row + head) * D + 16 * step;
      query[step][i] = head < group ? Operand::query_pair(columns, quad_lane, i / 2) : 0;
    }
  }

  const float scale = args.scale * args.kv.k_scale * (kLog2E / Operand::kOne);
  OnlineSoftmax softmax;
  float out[D / 8][4] = {};
  for (int tile = 0, stage = 0; tile < tiles; ++tile, stage = stage + 1 < kStages ? stage + 1 : 0) {
    copy_async_wait<kStages - 2>();
    warp_barrier();  // the tile has landed for all lanes, and all are done with the one before
    if (const int ahead = tile + kStages - 1; ahead < tiles)
      walk.fetch(stage == 0 ? kStages - 1 : stage - 1, token_of(ahead));
    copy_async_commit();

    const auto key_tile = walk.key_tile(stage), value_tile = walk.value_tile(stage);
    const SharedAddress first_key_fragment = key_tile.first_right(0);
    const SharedAddress first_value_fragment = value_tile.first_left(0);
    float scores[2][4] = {};
    PDSIM_UNROLL
    for (int pair = 0; pair < Shape::kChunks / 2; ++pair) {
      uint32_t keys[4];
      load_matrix(keys, key_tile.step(first_key_fragment, 0, pair));
      Operand::add_scores(scores, query, pair, keys);
    }
    mask_keys(scores, end - token_of(tile));
    float rescale[2];
    softmax.absorb(scores, scale, rescale);
    scale_rows(out, rescale);
    uint32_t probabilities[4];
    as_operand(probabilities, scores[0], scores[1]);
    for (uint32_t& pair : probabilities) pair = Operand::raised(pair);
    PDSIM_UNROLL
    for (int pair = 0; pair < Shape::kChunks / 2; ++pair) {
      uint32_t values[4];
      load_matrix_transposed(values, value_tile.step(first_value_fragment, 0, pair));
      Operand::add_values(out, probabilities, pair, values);
    }
  }
  warp_barrier();

  // Each warp leaves what it has in its own ring; then all threads join the four.
  const auto result_of = [](int of_warp) {
    return reinterpret_cast<float*>(shared_memory<unsigned char>() + of_warp * Shape::kRingBytes);
  };
  const auto states_of = [&](int of_warp) {
    return reinterpret_cast<PartState*>(result_of(of_warp) + Shape::kStatesAt);
  };
  PDSIM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]);
    PDSIM_UNROLL
    for (int j = 0; j < D / 8; j += 2) {
      float* columns = result_of(warp) + (row + 8 * half) * Shape::kResultStride + 8 * j;
      Operand::store_columns(columns, out[j], out[j + 1], 2 * half, quad_lane);
    }
    if (quad_lane == 0) store_shared(states_of(warp) + row + 8 * half, PartState{softmax.max[half], sum});
  }
  barrier();
  for (int i = static_cast<int>(threadIdx.x); i < group * (D / 4); i += kDecodeWarps * 32) {
    const int head = i / (D / 4), column = i % (D / 4) * 4;
    Joined joined = join(
        kDecodeWarps, [&](int part) { return load_shared(states_of(part) + head); },
        [&](int part) {
          const float* columns = result_of(part) + head * Shape::kResultStride + column;
          return load_shared(reinterpret_cast<const Pack<float, 4>*>(columns));
        });
    for (float& x : joined.out.x) x *= args.kv.v_scale * (1 / Operand::kOne);
    store_chunk<D>(args.to, first_row + head, split, chunks, column, joined.state, joined.out);
  }
}

/// Starts it, and what joins its parts: on the GPU under nvcc, on the emulator elsewhere.
template <class T, int D>
void run_decode(const DecodeArgs<T>& args, Stream stream) {
  const DecodeOutput& to = args.to;
  if (to.requests == 0) return;
  const Dim grid{static_cast<unsigned>(args.kv.kv_heads), static_cast<unsigned>(to.splits),
                 static_cast<unsigned>(to.requests)};
  launch(decode<T, D>, Launch{grid, {kDecodeWarps * 32}, DecodeShape<T, D>::kSharedBytes, stream}, args);
  run_combine<D>(to, args.kv.lengths, stream);
}

}  // namespace pdsim::kernels
