// Softmax over keys that arrive in tiles, for the 16 rows of an mma accumulator.
//
// After every tile, of the keys seen so far: `max` is the greatest score, `sum` the sum of 2^(score - max)
// and the caller's output the sum of 2^(score - max) x value; both are rescaled when a tile raises the
// maximum (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023). A thread holds two rows, lane / 4 and
// lane / 4 + 8, four lanes share a row.
#pragma once

#include "kernels/device.cuh"

namespace pdsim::kernels {

/// log2(e): scores times this make exp(score) = 2^score.
inline constexpr float kLog2E = 1.44269504f;

/// The greatest over the four lanes of a row.
PDSIM_DEVICE float row_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

/// The sum over the four lanes of a row.
PDSIM_DEVICE float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};  ///< in log2 units
  float sum[2] = {0, 0};                  ///< over this lane's keys only; row_sum() makes it the row's

  /// Turns a tile's raw scores into 2^(score x scale - max); what the caller has summed so far is to be
  /// multiplied by `rescale`, one factor a row. Requires a finite score in each row and scale > 0; a score of
  /// -infinity is a key that does not count.
  template <int Columns>
  PDSIM_DEVICE void absorb(float (&scores)[Columns][4], float scale, float (&rescale)[2]) {
    PDSIM_UNROLL
    for (int row = 0; row < 2; ++row) {
      float greatest = -INFINITY;
      PDSIM_UNROLL
      for (int j = 0; j < Columns; ++j)
        greatest = fmaxf(greatest, fmaxf(scores[j][2 * row], scores[j][2 * row + 1]));
      greatest = fmaxf(max[row], row_max(greatest) * scale);
      rescale[row] = exp2_approx(max[row] - greatest);
      max[row] = greatest;
      sum[row] *= rescale[row];
      PDSIM_UNROLL
      for (int j = 0; j < Columns; ++j) {
        PDSIM_UNROLL
        for (int i = 2 * row; i < 2 * row + 2; ++i) {
          scores[j][i] = exp2_approx(fmaf(scores[j][i], scale, -greatest));  // as nvcc contracts it
          sum[row] += scores[j][i];
        }
      }
    }
  }
};

/// Scores of columns from `keys` on become -infinity: there are no such keys.
template <int Columns>
PDSIM_DEVICE void mask_keys(float (&scores)[Columns][4], int keys) {
  if (keys >= 8 * Columns) return;
  const int first = static_cast<int>(threadIdx.x) % 4 * 2;
  PDSIM_UNROLL
  for (int j = 0; j < Columns; ++j) {
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (8 * j + first + i % 2 >= keys) scores[j][i] = -INFINITY;
    }
  }
}

/// A tile's probabilities of 16 keys (two accumulators of 8) as the left operand of an mma: the layouts
/// agree.
PDSIM_DEVICE void as_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack_bf16(low[0], low[1]);
  a[1] = pack_bf16(low[2], low[3]);
  a[2] = pack_bf16(high[0], high[1]);
  a[3] = pack_bf16(high[2], high[3]);
}

/// Multiplies rows lane / 4 and lane / 4 + 8 of an accumulator.
template <int Columns>
PDSIM_DEVICE void scale_rows(float (&o)[Columns][4], const float (&factor)[2]) {
  PDSIM_UNROLL
  for (int j = 0; j < Columns; ++j) {
    PDSIM_UNROLL
    for (int i = 0; i < 4; ++i) o[j][i] *= factor[i / 2];
  }
}

}  // namespace pdsim::kernels
