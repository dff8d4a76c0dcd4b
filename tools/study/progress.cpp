#include "tools/study/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace pdsim {

std::string short_count(double value) {
  const char* prefixes[] = {"", " k", " M", " G", " T"};
  int prefix = 0;
  while (value >= 999.5 && prefix < 4) value /= 1000, ++prefix;
  const int decimals = prefix == 0 || value >= 99.95 ? 0 : 1;
  return fmt::format("{:.{}f}{}", value, decimals, prefixes[prefix]);
}

std::string short_duration(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
}

Progress::Progress(std::string_view what, std::string_view unit, bool quiet)
    : what_(what), unit_(unit), shown_(!quiet && isatty(STDERR_FILENO) != 0) {}

void Progress::draw(std::uint64_t done, std::uint64_t total) {
  const auto now = Clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = static_cast<double>(done) / seconds;
  std::string line = fmt::format("{} ", what_);
  if (total > 0) {
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    constexpr int kWidth = 24;
    const int filled = static_cast<int>(share * kWidth);
    line += fmt::format("[{:#<{}}{:<{}}] {:3.0f} % ", "", filled, "", kWidth - filled, 100.0 * share);
    line += fmt::format("{} of {}", short_count(static_cast<double>(done)),
                        short_count(static_cast<double>(total)));
  } else {
    line += short_count(static_cast<double>(done));
  }
  line += fmt::format(" {}, {}/s", unit_, short_count(rate));
  if (total > done && rate > 0)
    line += fmt::format(", {} left", short_duration(static_cast<double>(total - done) / rate));
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::finish() {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace pdsim
