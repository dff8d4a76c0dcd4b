// A progress bar on stderr, for people: nothing is shown when stderr is no terminal or under --quiet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace pdsim {

/// Done and total, rate and time left, redrawn at most ten times a second, erased at the end.
class Progress {
 public:
  /// `unit` is what is counted ("requests"); it and `what` ("replaying") are shown.
  Progress(std::string_view what, std::string_view unit, bool quiet);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Cheap enough for a loop of many thousand steps a second: it mostly reads the clock. `total` 0 means
  /// that nobody knows.
  void update(std::uint64_t done, std::uint64_t total) {
    if (shown_) draw(done, total);
  }

  /// Erases the bar, so that other text can be printed. Later updates draw it again.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(std::uint64_t done, std::uint64_t total);

  std::string what_, unit_;
  bool shown_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_ + std::chrono::milliseconds(200);  ///< short work shows no bar at all
};

/// "1.2 k", "34.5 M": a count of at most four digits with its SI prefix.
std::string short_count(double value);
/// "48 s", "3 min 20 s", "2 h 05 min".
std::string short_duration(double seconds);

}  // namespace pdsim
