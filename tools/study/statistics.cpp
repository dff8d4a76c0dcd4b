#include "tools/study/statistics.hpp"

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <numeric>

#include "sim/core/error.hpp"

namespace pdsim {

std::optional<Interval> interval_of(std::span<const double> values, Replicated how) {
  const auto n = static_cast<double>(values.size());
  if (values.size() < 2) return std::nullopt;
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  const double t = boost::math::quantile(boost::math::students_t(n - 1), 0.975);
  const double deviation = std::sqrt(squares / (n - 1));
  const double half = t * (how == Replicated::seeds ? deviation / std::sqrt(n) : deviation);
  return Interval{mean, mean - half, mean + half, static_cast<int>(values.size())};
}

double percentile_of(std::vector<double> values, double p) {
  PDSIM_CHECK(!values.empty(), "a percentile of nothing");
  std::sort(values.begin(), values.end());
  const double at = p / 100 * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

}  // namespace pdsim
