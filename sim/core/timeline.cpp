#include "sim/core/timeline.hpp"

#include <algorithm>

namespace pdsim {

void Timeline::spread(std::size_t series, Nanos from, Nanos until, std::int64_t value) {
  PDSIM_CHECK(series < series_, "no such series in the timeline");
  PDSIM_CHECK(0 <= from && from <= until && until <= Nanos{1} << 62, "an interval that runs backwards");
  if (from == until || value == 0) return;
  while (bucket_of(until - 1) >= max_buckets_) fold();
  const std::size_t last = bucket_of(until - 1);
  grow(last + 1);
  for (std::size_t bucket = bucket_of(from); bucket <= last; ++bucket) {
    const Nanos begin = static_cast<Nanos>(bucket) << shift_;
    const Nanos within = std::min(until, begin + width()) - std::max(from, begin);
    cells_[bucket * series_ + series] += static_cast<__int128>(value) * within;
  }
}

/// Buckets of twice the width: each gets two of the old ones.
void Timeline::fold() {
  for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
    const std::size_t bucket = cell / series_, into = bucket / 2 * series_ + cell % series_;
    cells_[into] = bucket % 2 == 0 ? cells_[cell] : cells_[into] + cells_[cell];
  }
  buckets_ = (buckets_ + 1) / 2;
  cells_.resize(buckets_ * series_);
  ++shift_;
}

/// At least so many buckets.
void Timeline::grow(std::size_t buckets) {
  buckets_ = std::max(buckets_, buckets);
  cells_.resize(buckets_ * series_);
}

void Timeline::merge(const Timeline& other) {
  PDSIM_CHECK(series_ == other.series_ && max_buckets_ == other.max_buckets_, "timelines of unlike shape");
  while (shift_ < other.shift_) fold();
  const int apart = shift_ - other.shift_;
  if (other.buckets_ > 0) grow(((other.buckets_ - 1) >> apart) + 1);
  for (std::size_t cell = 0; cell < other.cells_.size(); ++cell) {
    cells_[(cell / series_ >> apart) * series_ + cell % series_] += other.cells_[cell];
  }
}

__int128 Timeline::total(std::size_t series) const {
  __int128 sum = 0;
  for (std::size_t bucket = 0; bucket < buckets_; ++bucket) sum += integral(series, bucket);
  return sum;
}

}  // namespace pdsim
