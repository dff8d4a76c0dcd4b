// When a measurement has been repeated often enough, and what it comes to: pure arithmetic, so that it is
// tested without a GPU.
//
// A GPU under test is not alone with its kernel: clocks rise and fall with heat and power. A sample taken
// while the clock was low is thrown away and counted, and the caller lets the GPU rest before the next one,
// longer each time in a row. What is kept is summed up by its median; the spread beside it is the relative
// standard deviation. The rule is the one of NVIDIA's nvbench (its cold measurement), in our own words.
//
// Invariants: only samples at full clock count; a series ends for exactly one reason, which its result names.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

namespace pdsim::kernels {

/// When to stop. Enough is `least_seconds` of measured time and `least_samples`, and from then on a spread
/// below `noise`, or one that more samples do not improve; `timeout_seconds` of the caller's clock ends all.
struct StopRule {
  double least_seconds = 0.5;
  double timeout_seconds = 15;
  double noise = 0.005;
  int least_samples = 10;
  double throttled_below = 0.75;  ///< of the nominal clock; nvbench's threshold
};

enum class Stop : std::uint8_t {
  none,       ///< goes on
  noise,      ///< the spread is below the rule's
  steady,     ///< twice the samples did not make the spread smaller
  timeout,    ///< reported: the spread is what it is
  throttled,  ///< timeout, and no sample at full clock at all: there is no result
};

inline std::string_view name(Stop stop) {
  constexpr std::string_view kNames[] = {"none", "noise", "steady", "timeout", "throttled"};
  return kNames[static_cast<std::size_t>(stop)];
}

/// The middle value, or the mean of the two middle ones. Requires at least one. O(n log n).
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return 0.5 * (values[(values.size() - 1) / 2] + values[values.size() / 2]);
}

/// What a series came to.
struct Measured {
  double median_us = 0;
  double spread = 0;     ///< standard deviation of a sample over the mean
  double clock_mhz = 0;  ///< median over the samples kept; 0: not known
  int samples = 0;
  int throttled = 0;  ///< thrown away
  Stop stop = Stop::none;
};

class Series {
 public:
  /// `nominal_mhz`: what the clock should be; 0 where nobody knows, and then no sample is thrown away.
  Series(const StopRule& rule, double nominal_mhz) : rule_(rule), nominal_mhz_(nominal_mhz) {}

  /// One more sample: its time, the mean clock while it ran, and what the caller's clock says since the
  /// series began. Afterwards stop() says whether to go on, and pause_seconds() how long to rest before that.
  void add(double us, double clock_mhz, double elapsed_seconds) {
    if (clock_mhz > 0 && clock_mhz < rule_.throttled_below * nominal_mhz_) {
      ++throttled_;
      ++throttled_in_a_row_;
    } else {
      throttled_in_a_row_ = 0;
      keep(us, clock_mhz);
    }
    stop_ = decide(elapsed_seconds);
  }

  Stop stop() const { return stop_; }

  /// 50 ms after a throttled sample, doubled for each more in a row, two seconds at most; 0 after a good one.
  double pause_seconds() const {
    if (throttled_in_a_row_ == 0) return 0;
    return std::min(2.0, 0.05 * std::ldexp(1.0, std::min(throttled_in_a_row_ - 1, 10)));
  }

  Measured result() const {
    Measured measured;
    measured.samples = static_cast<int>(us_.size());
    measured.throttled = throttled_;
    measured.stop = stop_;
    if (us_.empty()) return measured;
    measured.median_us = median(us_);
    measured.clock_mhz = median(mhz_);
    measured.spread = spread();
    return measured;
  }

 private:
  /// Welford's running mean and sum of squared deviations: no cancellation however long the series.
  void keep(double us, double clock_mhz) {
    us_.push_back(us);
    mhz_.push_back(clock_mhz);
    const double from_old_mean = us - mean_;
    mean_ += from_old_mean / static_cast<double>(us_.size());
    squares_ += from_old_mean * (us - mean_);
    spreads_.push_back(spread());
  }

  double spread() const {
    return us_.size() < 2 ? 0 : std::sqrt(squares_ / static_cast<double>(us_.size() - 1)) / mean_;
  }

  Stop decide(double elapsed_seconds) const {
    const std::size_t n = us_.size();
    const double measured_seconds = mean_ * static_cast<double>(n) * 1e-6;
    if (n >= static_cast<std::size_t>(rule_.least_samples) && measured_seconds >= rule_.least_seconds) {
      if (spread() < rule_.noise) return Stop::noise;
      const std::size_t half = n / 2;
      if (half >= static_cast<std::size_t>(rule_.least_samples) && spread() >= spreads_[half - 1])
        return Stop::steady;
    }
    if (elapsed_seconds < rule_.timeout_seconds) return Stop::none;
    return n == 0 ? Stop::throttled : Stop::timeout;
  }

  StopRule rule_;
  double nominal_mhz_;
  std::vector<double> us_, mhz_, spreads_;  ///< of the samples kept; spreads_[i]: of the first i + 1
  double mean_ = 0, squares_ = 0;
  int throttled_ = 0, throttled_in_a_row_ = 0;
  Stop stop_ = Stop::none;
};

}  // namespace pdsim::kernels
