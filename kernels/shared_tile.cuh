// Rows of 16-byte chunks in shared memory, permuted so that ldmatrix meets no bank conflict: it fetches one
// chunk of 8 successive rows at once, and here these lie in 8 different columns of the 128 bytes that the
// banks span.
#pragma once

#include "kernels/device.cuh"

namespace pdsim::kernels {

template <int Chunks>
struct SharedTile {
  static_assert(Chunks % 8 == 0 || Chunks == 4, "rows of 64 bytes or of multiples of 128");
  Vec16* rows;

  PDSIM_DEVICE Vec16* chunk(int row, int chunk) const {
    // Unsigned, so that the compiler sees that 16 rows on nothing but a constant changes.
    const auto r = static_cast<unsigned>(row), turn = Chunks == 4 ? r / 2 % 4 : r % 8;
    return rows + (r * Chunks + (static_cast<unsigned>(chunk) ^ turn));
  }
  /// Two chunks of 16 rows from `row`: registers in the order (8 rows, chunk) = 00, 01, 10, 11. What the
  /// right operand of query x key wants: the rows are keys.
  PDSIM_DEVICE void load(std::uint32_t (&r)[4], int row, int chunk_pair) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrix(r, chunk(row + lane % 8 + lane / 16 * 8, 2 * chunk_pair + lane / 8 % 2));
  }
  /// The same, each 8 x 8 matrix transposed: registers in the order (chunk, 8 rows) = 00, 01, 10, 11. What
  /// probability x value wants.
  PDSIM_DEVICE void load_transposed(std::uint32_t (&r)[4], int row, int chunk_pair) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrix_transposed(r, chunk(row + lane % 16, 2 * chunk_pair + lane / 16));
  }

  // The same addresses in two steps, for loops over a whole tile: what depends on the lane is found once, and
  // a step within the tile is an exclusive or and a sum with constants, so that no address needs a register.
  // The permutation allows it: it changes three bits of the chunk's number by bits of the row that a step of
  // 16 rows leaves alone. Requires `rows` aligned to the bytes of a row.

  /// This lane's row of the first 16 x 16 from `row`, as the left operand (of a product, load_matrix;
  /// transposed, the right operand of probability x value).
  PDSIM_DEVICE SharedAddress first_left(int row) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return shared_address(chunk(row + lane % 16, lane / 16));
  }
  /// The same as the right operand of query x key.
  PDSIM_DEVICE SharedAddress first_right(int row) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return shared_address(chunk(row + lane % 8 + lane / 16 * 8, lane / 8 % 2));
  }
  /// `down` rows, a multiple of 16, and `right` pairs of chunks from there.
  PDSIM_DEVICE static SharedAddress step(SharedAddress first, int down, int right) {
    static_assert((Chunks & (Chunks - 1)) == 0);
    return (first ^ static_cast<SharedAddress>(right * 32)) + static_cast<SharedAddress>(down * Chunks * 16);
  }
};

}  // namespace pdsim::kernels
