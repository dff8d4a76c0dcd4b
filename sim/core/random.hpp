// Counter-based random streams (Philox4x32-10; Salmon, Moraes, Dror, Shaw, SC'11).
//
// A stream is named by (seed, purpose, entity) and has no other state than how many draws were
// taken, so a new policy that draws from its own purpose never shifts the arrivals, and request
// 1,000,000 can be drawn without drawing the others. Distributions are our own: those of the
// standard library differ from one library to the next.
#pragma once

#include <array>
#include <cstdint>

#include "sim/core/math.hpp"

namespace pdsim {

/// What a stream is for. Append only: a number is part of every published result.
enum class Purpose : std::uint32_t {
  arrivals = 1,
  lengths = 2,
  prefixes = 3,
  conversations = 4,
  routing = 5,
  fragmentation = 6,
  think_time = 7,
  rerouting = 8,
  faults = 9,
  speculation = 10,
  resampling = 11,
  sampling = 12,
  kernel_inputs = 13,
};

class Random {
 public:
  Random(std::uint64_t seed, Purpose purpose, std::uint64_t entity = 0)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        counter_{0, static_cast<std::uint32_t>(purpose), static_cast<std::uint32_t>(entity),
                 static_cast<std::uint32_t>(entity >> 32)} {}

  std::uint64_t bits() {
    if (used_ == 4) used_ = 0;
    if (used_ == 0) block_ = philox(counter_, key_), ++counter_[0];
    const std::uint64_t value = std::uint64_t(block_[used_]) << 32 | block_[used_ + 1];
    used_ += 2;
    return value;
  }

  /// Uniform in [0, 1), 53 bits.
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  /// Uniform integer in [0, n). Requires n > 0. Lemire's multiply-shift; bias below n / 2^64.
  std::uint64_t below(std::uint64_t n) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits()) * n) >> 64);
  }

  /// Exponential with the given mean, by inversion.
  double exponential(double mean) { return -mean * math::log(1.0 - uniform()); }

  /// Standard normal (Marsaglia's polar method; the second value of a pair is not kept, so that
  /// a draw depends on nothing but the counter).
  double normal() {
    for (;;) {
      const double x = 2.0 * uniform() - 1.0;
      const double y = 2.0 * uniform() - 1.0;
      const double square = x * x + y * y;
      if (square > 0.0 && square < 1.0) return x * math::sqrt(-2.0 * math::log(square) / square);
    }
  }

  static std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t(0xD2511F53u) * c[0];
      const std::uint64_t b = std::uint64_t(0xCD9E8D57u) * c[2];
      c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(b),
           static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(a)};
      k[0] += 0x9E3779B9u;
      k[1] += 0xBB67AE85u;
    }
    return c;
  }

 private:
  std::array<std::uint32_t, 2> key_;
  std::array<std::uint32_t, 4> counter_;
  std::array<std::uint32_t, 4> block_{};
  std::uint32_t used_ = 0;
};

}  // namespace pdsim
