// Step functions of time, kept as exact integrals over buckets: how many blocks were held, by cause,
// over a run whose length nobody knows before it ends.
//
// At most `max_buckets` buckets of one width from time 0 on. The width is a power of two nanoseconds: it
// starts at about 1 ms and doubles, neighbours merging, whenever time passes the last bucket. Invariants:
//  1. The width is the least such that the latest time given lies within max_buckets buckets.
//  2. A bucket's integral is the exact sum of value x (time within it) of all that was added. So nothing
//     depends on the order of additions, nor on how an interval was cut into several: who settles late
//     (a run of steps at once) and who settles early (step by step) leave the same bytes.
//  3. Nothing overflows while the values that hold at one instant sum to less than 2^63 in magnitude:
//     times are at most 2^62, so an integral stays below 2^125, and it is kept in 128 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

class Timeline {
 public:
  /// `series` functions, all zero. Requires max_buckets > 0. Memory: 16 bytes x series x buckets in use.
  explicit Timeline(std::size_t series, std::size_t max_buckets = 256)
      : series_(series), max_buckets_(max_buckets) {
    PDSIM_CHECK(max_buckets > 0, "a timeline without buckets");
  }

  /// Adds `value` to the function `series` over [from, until). Zero, and an empty interval, leave
  /// everything as it is. Requires 0 <= from <= until <= 2^62. O(1) within one bucket, else O(buckets).
  void add(std::size_t series, Nanos from, Nanos until, std::int64_t value) {
    const std::size_t bucket = bucket_of(from);
    if (from < until && bucket == bucket_of(until - 1) && bucket < buckets_ && series < series_) [[likely]] {
      cells_[bucket * series_ + series] += static_cast<__int128>(value) * (until - from);
    } else {
      spread(series, from, until, value);
    }
  }

  /// Adds another timeline's functions to these, series by series. Requires as many series and buckets at
  /// most. The same as if all that was added there had been added here. O(buckets).
  void merge(const Timeline& other);

  Nanos width() const { return Nanos{1} << shift_; }  ///< of a bucket; bucket i begins at i * width()
  std::size_t buckets() const { return buckets_; }    ///< up to the last that anything was added to
  std::size_t series() const { return series_; }
  /// Value x nanoseconds within the bucket. Requires bucket < buckets().
  __int128 integral(std::size_t series, std::size_t bucket) const {
    PDSIM_CHECK(series < series_ && bucket < buckets_, "no such bucket in the timeline");
    return cells_[bucket * series_ + series];
  }
  /// The function's mean over the bucket. Requires bucket < buckets().
  double mean(std::size_t series, std::size_t bucket) const {
    return static_cast<double>(integral(series, bucket)) / static_cast<double>(width());
  }
  /// Value x nanoseconds of the whole run. O(buckets).
  __int128 total(std::size_t series) const;

 private:
  /// Of a negative time: beyond every bucket.
  std::size_t bucket_of(Nanos time) const { return static_cast<std::size_t>(time >> shift_); }
  void spread(std::size_t series, Nanos from, Nanos until, std::int64_t value);
  void fold();
  void grow(std::size_t buckets);

  std::vector<__int128> cells_;  ///< [bucket][series]
  std::size_t series_;
  std::size_t max_buckets_;
  std::size_t buckets_ = 0;
  int shift_ = 20;  ///< log2 of the width
};

}  // namespace pdsim
