// Simulated time and the one rounding rule.
//
// Time is int64 nanoseconds since the first arrival's epoch; rates and remaining bytes are double.
// A real-valued duration becomes a time exactly once, through ceil_ns, so that no two places round
// the same quantity differently. 2^63 ns is 292 years: sums of valid durations do not overflow.
#pragma once

#include <cstdint>

namespace pdsim {

using Nanos = std::int64_t;
using Bytes = std::int64_t;

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;
inline constexpr Nanos kNever = INT64_MAX;  ///< later than any event

/// Rounds a duration in nanoseconds up to whole nanoseconds. Requires 0 <= ns < 2^62.
inline Nanos ceil_ns(double ns) {
  const auto whole = static_cast<Nanos>(ns);
  return static_cast<double>(whole) < ns ? whole + 1 : whole;
}

inline double to_seconds(Nanos ns) {
  return static_cast<double>(ns) / 1e9;
}
inline double to_ms(Nanos ns) {
  return static_cast<double>(ns) / 1e6;
}

}  // namespace pdsim
