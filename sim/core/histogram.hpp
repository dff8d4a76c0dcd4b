// Distributions: exact ones for per-request figures, a bounded-error one for per-token gaps.
//
// A run has one TTFT per request but one gap per token, millions of them, so gaps go into buckets:
// 512 linear ones for each power of two. A reported value is its bucket's middle, so it errs by at
// most 1/1024 < 0.1 %. Count, mean and maximum are exact.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

/// What a distribution is reported as. All zero when n is 0.
struct Distribution {
  double mean = 0, p50 = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
  std::uint64_t n = 0;
};

/// The q-quantile of sorted values as numpy's default ("linear") computes it: position q (n-1),
/// interpolated. Requires values sorted, not empty, 0 <= q <= 1.
double quantile_sorted(std::span<const double> values, double q);

/// Exact distribution of values. O(n log n); takes the vector to sort it.
Distribution distribution_of(std::vector<double> values);

/// Histogram of non-negative durations.
class Histogram {
 public:
  /// O(1). Requires value >= 0.
  void add(Nanos value, std::uint64_t times = 1) {
    const std::size_t bucket = bucket_of(static_cast<std::uint64_t>(value));
    if (bucket >= counts_.size()) grow(bucket);
    counts_[bucket] += times;
    n_ += times;
    sum_ += static_cast<__int128>(value) * static_cast<__int128>(times);
    if (value > max_) max_ = value;
  }

  std::uint64_t n() const { return n_; }
  /// numpy's linear quantile, within 0.1 %. Requires n > 0.
  double quantile(double q) const;
  /// Distribution in units of `unit` nanoseconds.
  Distribution distribution(double unit) const;

 private:
  static constexpr int kSubBits = 9;

  // Values below 2^10 have buckets of width one; above, 2^9 buckets for each power of two.
  static std::size_t bucket_of(std::uint64_t value) {
    if (value < (2u << kSubBits)) return value;
    const int shift = 63 - __builtin_clzll(value) - kSubBits;
    return (static_cast<std::size_t>(shift) << kSubBits) + (value >> shift);
  }
  static double middle_of(std::size_t bucket);
  double at_rank(std::uint64_t rank) const;
  void grow(std::size_t bucket);

  std::vector<std::uint64_t> counts_;
  std::uint64_t n_ = 0;
  __int128 sum_ = 0;
  Nanos max_ = 0;
};

}  // namespace pdsim
