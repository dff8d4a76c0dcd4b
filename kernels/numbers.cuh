// bf16 and fp8 (e4m3) as plain data with one meaning on both sides. CUDA's own types are not used: they come
// with headers that a machine without CUDA lacks.
//
// bf16  the upper half of a float.
// fp8   sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity; 0x7f and 0xff are NaN; the largest is
// 448
//       (Micikevicius and others, "FP8 formats for deep learning", 2022, what PTX calls e4m3).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/qualifiers.cuh"

namespace pdsim::kernels {

struct bf16 {  // NOLINT(readability-identifier-naming)
  std::uint16_t bits;
};

struct fp8 {  // NOLINT(readability-identifier-naming)
  std::uint8_t bits;
};

inline constexpr float kLargestFp8 = 448;

/// 16 aligned bytes: what one thread moves at once.
struct alignas(16) Vec16 {
  std::uint32_t x[4];
};

/// Neighbours that are moved at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

PDSIM_HOST_DEVICE std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

PDSIM_HOST_DEVICE float float_of_bits(std::uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/// Exact.
PDSIM_HOST_DEVICE float to_float(bf16 x) {
  return float_of_bits(std::uint32_t{x.bits} << 16);
}

/// The nearest, ties to even; NaN stays NaN.
PDSIM_HOST_DEVICE bf16 to_bf16(float x) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

/// Exact: placed in the fields of a float, whose exponent is then 120 too small.
PDSIM_HOST_DEVICE float to_float(fp8 x) {
  const std::uint32_t sign = (x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000u);
  return float_of_bits(sign | magnitude << 20) * 0x1p120f;
}

/// The nearest, ties to even; what is beyond 448 becomes 448; NaN stays NaN. For hosts: slow on a GPU.
PDSIM_HOST_DEVICE fp8 to_fp8(float x) {
  const std::uint32_t sign = float_bits(x) >> 24 & 0x80u;
  const float magnitude = std::fabs(x);
  if (!(magnitude <= kLargestFp8)) return {static_cast<std::uint8_t>(sign | (x == x ? 0x7eu : 0x7fu))};
  // Units in the last place: 2^(exponent - 3), 2^-9 below the smallest normal number.
  const int exponent = magnitude < 0x1p-6f ? -6 : static_cast<int>(float_bits(magnitude) >> 23) - 127;
  const auto units = static_cast<std::uint32_t>(std::rint(std::ldexp(magnitude, 3 - exponent)));
  // A carry out of the mantissa moves into the exponent by itself.
  return {static_cast<std::uint8_t>(sign | (static_cast<std::uint32_t>(exponent + 6) * 8 + units))};
}

/// The two halves of a register, the element of the lower address in the lower half.
PDSIM_HOST_DEVICE void unpack_bf16(std::uint32_t pair, float& low, float& high) {
  low = float_of_bits(pair << 16);
  high = float_of_bits(pair & 0xffff0000u);
}

}  // namespace pdsim::kernels
