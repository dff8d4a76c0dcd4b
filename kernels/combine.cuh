// Joins attention over parts of the keys, exactly: the same sums, in another order.
//
// A part is its state and out, the sum of 2^(score - max) x value, not yet divided by the state's sum. A part
// without keys is (-infinity, 0, anything).
// Parts are joined in ascending order, so a result depends on the split and on nothing else.
#pragma once

#include "kernels/decode.hpp"
#include "kernels/device.cuh"

namespace pdsim::kernels {

template <class T, int N>
PDSIM_DEVICE void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// Two neighbours as one register of an mma operand.
PDSIM_DEVICE uint32_t load_pair(const bf16* from) {
  const auto pair = *reinterpret_cast<const Pack<bf16, 2>*>(from);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

/// Some parts together, in four columns.
struct Joined {
  PartState state;
  Pack<float, 4> out;
};

/// state_of(part) is a PartState, out_of(part) that part's four columns.
template <class StateOf, class OutOf>
PDSIM_DEVICE Joined join(int parts, StateOf state_of, OutOf out_of) {
  Joined joined{{-INFINITY, 0}, {}};
  for (int part = 0; part < parts; ++part) joined.state.max = fmaxf(joined.state.max, state_of(part).max);
  for (int part = 0; part < parts; ++part) {
    const PartState state = state_of(part);
    if (state.sum == 0) continue;
    const float scale = exp2_approx(state.max - joined.state.max);
    const Pack<float, 4> out = out_of(part);
    joined.state.sum += state.sum * scale;
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) joined.out.x[i] += out.x[i] * scale;
  }
  return joined;
}

/// out / sum in bf16, zeros where there are no keys.
template <int N>
PDSIM_DEVICE void store_quotient(bf16* to, float sum, const Pack<float, N>& out) {
  const float inverse = sum > 0 ? 1 / sum : 0;
  uint32_t pairs[N / 2];
  PDSIM_UNROLL
  for (int i = 0; i < N / 2; ++i) pairs[i] = pack_bf16(out.x[2 * i] * inverse, out.x[2 * i + 1] * inverse);
  Pack<bf16, N> rounded;
  memcpy(&rounded, pairs, sizeof pairs);
  store_pack(to, rounded);
}

/// What chunk `split` of `chunks` has of a row (request x heads + head) from `column` on: into the output if
/// it is the only chunk, else as a part. The thread that has column 0 writes the state.
template <int Width, int N>
PDSIM_DEVICE void store_chunk(const DecodeOutput& to, int64_t row, int split, int chunks, int column,
                              PartState state, const Pack<float, N>& out) {
  if (chunks == 1) return store_quotient(to.out + row * Width + column, state.sum, out);
  const int64_t part = row * to.splits + split;
  store_pack(to.part_out + part * Width + column, out);
  if (column == 0) to.part_state[part] = state;
}

inline constexpr int kCombineThreads = 128;

/// Rows (a request's head each) of one block: a thread has four columns.
template <int Width>
constexpr int kCombineRows = kCombineThreads * 4 / Width;

/// Joins the chunks of each request that has more than one. Blocks of kCombineThreads have
/// kCombineRows<Width> of the requests x heads rows each.
template <int Width>
PDSIM_KERNEL void PDSIM_LAUNCH_BOUNDS(kCombineThreads, 1) combine(DecodeOutput to, const int32_t* lengths) {
  constexpr int kThreadsOfRow = Width / 4;
  const int row =
      static_cast<int>(blockIdx.x) * kCombineRows<Width> + static_cast<int>(threadIdx.x) / kThreadsOfRow;
  const int column = static_cast<int>(threadIdx.x) % kThreadsOfRow * 4;
  if (row >= to.requests * to.heads) return;
  const int parts = chunks_of(lengths[row / to.heads], to.chunk_tokens);
  if (parts == 1) return;
  const int64_t first = int64_t{row} * to.splits;
  const Joined joined = join(
      parts, [&](int part) { return to.part_state[first + part]; },
      [&](int part) {
        return *reinterpret_cast<const Pack<float, 4>*>(to.part_out + (first + part) * Width + column);
      });
  store_quotient(to.out + int64_t{row} * Width + column, joined.state.sum, joined.out);
}

/// Starts combine() where the batch has parts.
template <int Width>
void run_combine(const DecodeOutput& to, const std::int32_t* lengths, Stream stream) {
  if (to.splits == 1) return;
  constexpr auto kRows = static_cast<unsigned>(kCombineRows<Width>);
  const auto rows = static_cast<unsigned>(to.requests) * static_cast<unsigned>(to.heads);
  launch(combine<Width>, Launch{{(rows + kRows - 1) / kRows}, {kCombineThreads}, 0, stream}, to, lengths);
}

}  // namespace pdsim::kernels
