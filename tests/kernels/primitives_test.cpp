// Theory: what PTX ISA 9.0 says of each instruction, above all where the elements of a fragment lie: a kernel
// that has them wrong is wrong on a GPU and, because the emulator keeps the same layouts, here.
//
// Numbers: bf16 is the upper half of a float; e4m3 is (-1)^s 2^(e - 7) (1 + m / 8), 2^-6 m / 8 for e = 0;
// both round to nearest, ties to even.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/device.cuh"
#include "kernels/emulator.hpp"
#include "kernels/online_softmax.cuh"
#include "kernels/shared_tile.cuh"
#include "tests/kernels/orders.hpp"

namespace pdsim::kernels {
namespace {

unsigned lane() {
  return threadIdx.x % 32;
}

// A warp on its own.
template <class Body>
void on_a_warp(std::size_t shared_bytes, Body body) {
  in_every_order([&] { emulator::run({{1}, {32}, shared_bytes}, body); });
}

std::uint32_t pair(double low, double high) {
  return pack_bf16(static_cast<float>(low), static_cast<float>(high));
}

// Small integers without pattern, exact in bf16 and in any sum here.
double element(unsigned row, unsigned column) {
  return static_cast<double>((row * 37 + column * 11) % 23) - 11;
}

// --- warp-wide operations ---

// "mma.m16n8k16": groupID = lane >> 2, threadID_in_group = lane % 4.
//   A  row = groupID for i < 2 or 4 <= i < 6, else groupID + 8;  column = 2 threadID + (i & 1), + 8 for i >=
//   4 B  row = 2 threadID + (i & 1), + 8 for i >= 2;               column = groupID C  row = groupID for i <
//   2, else groupID + 8;                column = 2 threadID + (i & 1)
TEST(Primitives, MmaMultipliesItsFragments) {
  on_a_warp(0, [] {
    const unsigned group = lane() >> 2, in_group = lane() % 4;
    const auto a = [&](unsigned i) {
      const unsigned row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
      return element(row, 2 * in_group + (i & 1) + (i >= 4 ? 8 : 0));
    };
    const auto b = [&](unsigned i) {
      return element(100 + 2 * in_group + (i & 1) + (i >= 2 ? 8 : 0), group);
    };
    const std::uint32_t left[4] = {pair(a(0), a(1)), pair(a(2), a(3)), pair(a(4), a(5)), pair(a(6), a(7))};
    float d[4];
    for (unsigned i = 0; i < 4; ++i) d[i] = static_cast<float>(1000 * i);
    mma(d, left, pair(b(0), b(1)), pair(b(2), b(3)));
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = i < 2 ? group : group + 8, column = 2 * in_group + (i & 1);
      double sum = 1000 * i;
      for (unsigned k = 0; k < 16; ++k) sum += element(row, k) * element(100 + k, column);
      EXPECT_EQ(d[i], sum) << "lane " << lane() << ", element " << i;
    }
  });
}

// "ldmatrix .x4": threads 0-7, 8-15, 16-23, 24-31 give the rows of matrices 0 to 3; of each matrix lane l
// receives elements 2 (l % 4), + 1 of row l / 4; with .trans of the transpose.
TEST(Primitives, LoadMatrixSpreadsRowsOverLanes) {
  on_a_warp(32 * 16, [] {
    auto* rows = shared_memory<std::uint16_t>();
    const auto value = [](unsigned matrix, unsigned row, unsigned column) {
      return static_cast<std::uint16_t>(matrix * 100 + row * 8 + column);
    };
    for (unsigned column = 0; column < 8; ++column) {
      rows[lane() * 8 + column] = value(lane() / 8, lane() % 8, column);
    }
    barrier();
    std::uint32_t plain[4], transposed[4];
    load_matrix(plain, rows + lane() * 8);
    load_matrix_transposed(transposed, rows + lane() * 8);
    for (unsigned m = 0; m < 4; ++m) {
      const unsigned i = lane() / 4, j = 2 * (lane() % 4);
      EXPECT_EQ(plain[m], value(m, i, j) | unsigned{value(m, i, j + 1)} << 16);
      EXPECT_EQ(transposed[m], value(m, j, i) | unsigned{value(m, j + 1, i)} << 16);
    }
  });
}

TEST(Primitives, ShufflesReadOtherLanes) {
  on_a_warp(0, [] {
    const auto mine = static_cast<float>(lane()) + 0.5f;
    EXPECT_EQ(shuffle_xor(mine, 5), static_cast<float>(lane() ^ 5u) + 0.5f);
    EXPECT_EQ(shuffle(mine, 3), 3.5f);
    EXPECT_EQ(shuffle(lane(), static_cast<int>(31 - lane())), 31 - lane());
    EXPECT_EQ(shuffle(lane(), 32 + 4), 4u);  // modulo 32, as __shfl_sync
  });
}

TEST(Primitives, StreamingMoves16Bytes) {
  const Vec16 from{{1, 2, 3, 4}};
  Vec16 to{};
  emulator::run({{1}, {32}}, [&] {
    if (lane() == 0) store_streaming(&to, load_streaming(&from));
  });
  EXPECT_EQ(to.x[0], 1u);
  EXPECT_EQ(to.x[3], 4u);
}

TEST(Primitives, ExponentialAndLogarithmAreBinary) {
  EXPECT_EQ(exp2_approx(-3), 0.125f);
  EXPECT_EQ(exp2_approx(-std::numeric_limits<float>::infinity()), 0);
  EXPECT_EQ(log2_approx(8), 3);
}

// --- numbers ---

TEST(Numbers, Bf16IsTheUpperHalfOfAFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    const float value = to_float(x);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(value))));
      continue;
    }
    ASSERT_EQ(to_bf16(value).bits, bits);
  }
}

TEST(Numbers, Bf16RoundsToNearestEven) {
  const auto rounded = [](std::uint32_t bits) { return to_bf16(float_of_bits(bits)).bits; };
  EXPECT_EQ(rounded(0x3f808000), 0x3f80);  // a tie, down to even
  EXPECT_EQ(rounded(0x3f808001), 0x3f81);
  EXPECT_EQ(rounded(0x3f818000), 0x3f82);  // a tie, up to even
  EXPECT_EQ(rounded(0x3f817fff), 0x3f81);
  EXPECT_EQ(rounded(0x7f7fffff), 0x7f80);  // beyond the largest: infinity
  EXPECT_EQ(rounded(0xff800000), 0xff80);
}

TEST(Numbers, PackingPutsTheFirstLow) {
  EXPECT_EQ(pack_bf16(1, -2), 0xc0003f80u);
  float low, high;
  unpack_bf16(0xc0003f80u, low, high);
  EXPECT_EQ(low, 1);
  EXPECT_EQ(high, -2);
}

double value_of_fp8(unsigned bits) {
  const double sign = bits & 0x80 ? -1 : 1;
  const auto exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  return sign *
         (exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7));
}

TEST(Numbers, Fp8IsE4m3) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const fp8 x{static_cast<std::uint8_t>(bits)};
    const double value = value_of_fp8(bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(x)));
      EXPECT_EQ(to_fp8(to_float(x)).bits & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(to_float(x), value) << bits;
    EXPECT_EQ(to_fp8(to_float(x)).bits, bits);
  }
}

TEST(Numbers, Fp8RoundsToNearestEvenAndSaturates) {
  for (unsigned bits = 0; bits < 0x7e; ++bits) {
    const double low = value_of_fp8(bits), high = value_of_fp8(bits + 1), middle = (low + high) / 2;
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(to_fp8(static_cast<float>(middle)).bits, even) << middle;
    EXPECT_EQ(to_fp8(std::nextafter(static_cast<float>(middle), 0.0f)).bits, bits);
    EXPECT_EQ(to_fp8(std::nextafter(static_cast<float>(-middle), -1000.0f)).bits, (bits + 1) | 0x80);
  }
  EXPECT_EQ(to_fp8(449).bits, 0x7e);
  EXPECT_EQ(to_fp8(-std::numeric_limits<float>::infinity()).bits, 0xfe);
}

TEST(Numbers, FourFp8BecomeBf16Exactly) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const std::uint32_t four =
        bits | ((bits + 1) & 255) << 8 | ((bits + 2) & 255) << 16 | ((bits + 3) & 255) << 24;
    std::uint32_t pairs[2];
    fp8x4_to_bf16(four, pairs[0], pairs[1]);
    float values[4];
    unpack_bf16(pairs[0], values[0], values[2]);
    unpack_bf16(pairs[1], values[1], values[3]);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned byte = (bits + i) & 255;
      const double expected = (byte & 127) == 127 ? (byte & 128 ? -480 : 480) : value_of_fp8(byte);
      EXPECT_EQ(values[i], expected * double{kFp8One}) << byte;
    }
  }
}

// --- what kernels build from them ---

// Q K^T of a tile of 16 queries and 16 keys, and P V, through swizzled shared memory: every way to address a
// tile gives the operand it says, without a bank conflict.
template <int Chunks>
void tiles_make_operands() {
  constexpr int kColumns = Chunks * 8;
  constexpr std::size_t kBytes = std::size_t{32} * Chunks * 16;
  on_a_warp(2 * kBytes, [] {
    const SharedTile<Chunks> left{shared_memory<Vec16>()}, right{shared_memory<Vec16>() + 32 * Chunks};
    const auto fill = [](const SharedTile<Chunks>& tile, unsigned salt) {
      for (int c = 0; c < Chunks; ++c) {
        Vec16 chunk;
        for (unsigned i = 0; i < 4; ++i) {
          const auto column = static_cast<unsigned>(c) * 8 + 2 * i;
          chunk.x[i] = pair(element(salt + lane(), column), element(salt + lane(), column + 1));
        }
        store_shared(tile.chunk(static_cast<int>(lane()), c), chunk);
      }
    };
    fill(left, 0);
    fill(right, 50);
    barrier();

    const auto first_left = left.first_left(0), first_right = right.first_right(0);
    float products[2][4] = {};  // of left rows 16 to 31 and right rows 16 to 31
    for (int p = 0; p < Chunks / 2; ++p) {
      std::uint32_t a[4], b[4], same[4];
      load_matrix(a, left.step(first_left, 16, p));
      load_matrix(b, right.step(first_right, 16, p));
      right.load(same, 16, p);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(b[i], same[i]);
      mma(products[0], a, b[0], b[1]);
      mma(products[1], a, b[2], b[3]);
    }
    for (unsigned n = 0; n < 2; ++n) {
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = 16 + lane() / 4 + i / 2 * 8, column = 16 + n * 8 + lane() % 4 * 2 + i % 2;
        double sum = 0;
        for (unsigned k = 0; k < kColumns; ++k) sum += element(row, k) * element(50 + column, k);
        EXPECT_EQ(products[n][i], sum);
      }
    }

    // The accumulators, as the left operand of another product, with the right rows as its 16 x 16 right
    // operand.
    for (float* x : {products[0], products[1]}) {
      for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(static_cast<int>(x[i]) % 8);
    }
    std::uint32_t p[4], v[4], same[4];
    as_operand(p, products[0], products[1]);
    load_matrix_transposed(v, right.step(right.first_left(0), 16, 1));
    right.load_transposed(same, 16, 1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(v[i], same[i]);
    float out[2][4] = {};
    mma(out[0], p, v[0], v[1]);
    mma(out[1], p, v[2], v[3]);
    for (unsigned n = 0; n < 2; ++n) {
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane() / 4 + i / 2 * 8, column = 16 + n * 8 + lane() % 4 * 2 + i % 2;
        double sum = 0;
        for (unsigned key = 0; key < 16; ++key) {
          double score = 0;
          for (unsigned k = 0; k < kColumns; ++k) score += element(16 + row, k) * element(66 + key, k);
          sum += static_cast<double>(static_cast<int>(score) % 8) * element(66 + key, column);
        }
        EXPECT_EQ(out[n][i], sum);
      }
    }
    EXPECT_EQ(emulator::banks.load_matrix.extra_cycles, 0);
    EXPECT_EQ(emulator::banks.store.extra_cycles, 0);
  });
}

TEST(SharedTile, OfHeads64MakesOperands) {
  tiles_make_operands<8>();
}
TEST(SharedTile, OfHeads128MakesOperands) {
  tiles_make_operands<16>();
}

}  // namespace
}  // namespace pdsim::kernels
