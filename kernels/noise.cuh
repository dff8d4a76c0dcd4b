// Random input by index: element i of a tensor is a function of (seed, i) alone, the same on the GPU and on
// the host. So a tensor of any size is filled where it lies, and a reference recomputes just the elements it
// needs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/numbers.cuh"
#include "kernels/qualifiers.cuh"

namespace pdsim::kernels {

/// Uniform in [-1, 1), a multiple of 2^-23: the finaliser of splitmix64 (Steele, Lea, Flood 2014).
PDSIM_HOST_DEVICE float noise(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<float>(static_cast<std::int32_t>(z >> 40) - (1 << 23)) * 0x1p-23f;
}

/// The element that fill() writes.
template <class T>
PDSIM_HOST_DEVICE T noise_as(std::uint64_t seed, std::uint64_t i, float scale) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(scale * noise(seed, i));
  } else {
    return to_fp8(scale * noise(seed, i));
  }
}

}  // namespace pdsim::kernels
