#include "sim/core/histogram.hpp"

#include <algorithm>

namespace pdsim {

double quantile_sorted(std::span<const double> values, double q) {
  const double position = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(position);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  const double fraction = position - static_cast<double>(low);
  return values[low] + (values[high] - values[low]) * fraction;
}

Distribution distribution_of(std::vector<double> values) {
  Distribution d;
  d.n = values.size();
  if (values.empty()) return d;
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const double value : values) sum += value;
  d.mean = sum / static_cast<double>(values.size());
  d.p50 = quantile_sorted(values, 0.50);
  d.p90 = quantile_sorted(values, 0.90);
  d.p95 = quantile_sorted(values, 0.95);
  d.p99 = quantile_sorted(values, 0.99);
  d.max = values.back();
  return d;
}

double Histogram::middle_of(std::size_t bucket) {
  if (bucket < (2u << kSubBits)) return static_cast<double>(bucket);
  const std::size_t shift = (bucket >> kSubBits) - 1;
  const std::uint64_t low = (bucket - (shift << kSubBits)) << shift;
  return static_cast<double>(low) + 0.5 * static_cast<double>((std::uint64_t{1} << shift) - 1);
}

void Histogram::grow(std::size_t bucket) {
  counts_.resize((bucket | ((std::size_t{1} << kSubBits) - 1)) + 1, 0);
}

double Histogram::quantile(double q) const {
  const double position = q * static_cast<double>(n_ - 1);
  const auto rank = static_cast<std::uint64_t>(position);
  const double low = at_rank(rank);
  if (rank + 1 >= n_) return low;
  return low + (at_rank(rank + 1) - low) * (position - static_cast<double>(rank));
}

double Histogram::at_rank(std::uint64_t rank) const {
  if (rank == n_ - 1) return static_cast<double>(max_);
  std::uint64_t seen = 0;
  for (std::size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    seen += counts_[bucket];
    if (seen > rank) return std::min(middle_of(bucket), static_cast<double>(max_));
  }
  return static_cast<double>(max_);
}

Distribution Histogram::distribution(double unit) const {
  Distribution d;
  d.n = n_;
  if (n_ == 0) return d;
  d.mean = static_cast<double>(sum_) / static_cast<double>(n_) / unit;
  d.p50 = quantile(0.50) / unit;
  d.p90 = quantile(0.90) / unit;
  d.p95 = quantile(0.95) / unit;
  d.p99 = quantile(0.99) / unit;
  d.max = static_cast<double>(max_) / unit;
  return d;
}

}  // namespace pdsim
