// Means with their uncertainty, and percentiles.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace pdsim {

/// A mean over replications and its 95 % confidence interval.
struct Interval {
  double mean = 0, low = 0, high = 0;
  int n = 0;
};

/// How replications were made, which decides what their spread says.
enum class Replicated : std::uint8_t {
  seeds,    ///< each is a world of its own: their mean is known the better, the more of them there are
  sessions  ///< each is drawn from one trace: their spread is the uncertainty, however many there are
};
inline constexpr std::array<std::string_view, 2> kReplicatedNames = {"seeds", "sessions drawn anew"};

/// Around the mean, with s the standard deviation of the values and Student's t:
///   seeds      -+ t(0.975, n - 1) s / sqrt(n), the interval of a mean;
///   sessions   -+ t(0.975, n - 1) s: s is the bootstrap's standard error of the figure (Efron, Annals of
///              Statistics 7, 1979) and only a longer trace makes it smaller.
/// Nothing for fewer than two values. Requires finite ones. O(n).
std::optional<Interval> interval_of(std::span<const double> values, Replicated how);

/// numpy's linear percentile, p in [0, 100]. Requires values. O(n log n).
double percentile_of(std::vector<double> values, double p);

}  // namespace pdsim
