// The format of the Azure LLM inference traces (Azure/AzurePublicDataset, 2023 and 2024): CSV with a
// stamp, prompt tokens and generated tokens. Stamps have up to nine digits of fraction (2023: seven) and
// perhaps an offset from UTC. Time counts from the earliest row. There is no prefix identity.
#include <fmt/format.h>

#include <charconv>
#include <chrono>

#include "sim/core/error.hpp"
#include "traces/formats.hpp"

namespace pdsim {

namespace {

constexpr std::string_view kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Takes `digits` decimal digits and, unless it is NUL, the character after them. False when they are not
// there.
bool take(std::string_view& text, std::size_t digits, char then, int& value) {
  if (text.size() < digits) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value);
  if (error != std::errc() || end != text.data() + digits || value < 0) return false;
  text.remove_prefix(digits);
  if (then == '\0') return true;
  if (!text.starts_with(then)) return false;
  text.remove_prefix(1);
  return true;
}

// "YYYY-MM-DD HH:MM:SS[.f{1,9}][Z|+HH:MM|-HH:MM]" as nanoseconds of Unix time; false when it is not.
bool parse_stamp(std::string_view text, Nanos& time) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0;
  if (!take(text, 4, '-', year) || !take(text, 2, '-', month) || !take(text, 2, '\0', day)) return false;
  if (!text.starts_with(' ') && !text.starts_with('T')) return false;
  text.remove_prefix(1);
  if (!take(text, 2, ':', hour) || !take(text, 2, ':', minute) || !take(text, 2, '\0', second)) return false;
  const std::chrono::year_month_day date{std::chrono::year(year),
                                         std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  if (!date.ok() || year < 1970 || year > 2200 || hour > 23 || minute > 59 || second > 60) return false;
  const Nanos days = std::chrono::sys_days(date).time_since_epoch().count();
  Nanos seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
  Nanos fraction = 0;
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    Nanos unit = kSecond;
    for (; !text.empty() && text[0] >= '0' && text[0] <= '9'; text.remove_prefix(1)) {
      unit /= 10;
      if (unit == 0) return false;
      fraction += unit * (text[0] - '0');
    }
    if (unit == kSecond) return false;
  }
  if (text == "Z") text = {};
  if (!text.empty()) {
    const bool east = text[0] == '+';
    if (!east && text[0] != '-') return false;
    text.remove_prefix(1);
    if (!take(text, 2, ':', hour) || !take(text, 2, '\0', minute) || !text.empty()) return false;
    seconds += (east ? -60 : 60) * (std::int64_t{60} * hour + minute);
  }
  time = seconds * kSecond + fraction;
  return true;
}

std::int32_t tokens_of(const LineReader& lines, std::string_view column, std::string_view text,
                       std::int32_t least) {
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    throw InputError(lines.place(), fmt::format("{} is '{}', expected an integer from {} to {}", column,
                                                text.substr(0, 40), least, INT32_MAX));
  }
  return value;
}

}  // namespace

void read_azure(LineReader& lines, Trace& trace, const ReadOptions& /*options*/) {
  std::string_view line;
  if (!lines.next(line)) return;
  if (trimmed(line) != kHeader) {
    throw InputError(lines.place(),
                     fmt::format("the header is '{}', expected '{}'", line.substr(0, 60), kHeader));
  }
  Nanos earliest = kNever;
  while (lines.next(line)) {
    if (std::count(line.begin(), line.end(), ',') != 2) {
      throw InputError(lines.place(), fmt::format("the row is '{}', expected three columns: {}",
                                                  line.substr(0, 60), kHeader));
    }
    const std::size_t first = line.find(','), second = line.find(',', first + 1);
    const std::string_view stamp = trimmed(line.substr(0, first));
    Request request;
    if (!parse_stamp(stamp, request.arrival)) {
      throw InputError(lines.place(),
                       fmt::format("TIMESTAMP is '{}', expected YYYY-MM-DD HH:MM:SS with up to nine digits "
                                   "of fraction, in 1970 to 2200",
                                   stamp.substr(0, 40)));
    }
    request.prompt_tokens =
        tokens_of(lines, "ContextTokens", trimmed(line.substr(first + 1, second - first - 1)), 1);
    request.output_tokens = tokens_of(lines, "GeneratedTokens", trimmed(line.substr(second + 1)), 0);
    earliest = std::min(earliest, request.arrival);
    append(trace.requests, request, lines);
  }
  for (Request& request : trace.requests) request.arrival -= earliest;
}

// The format wants a date: the trace's zero becomes 2000-01-01 00:00:00.
void write_azure(const Trace& trace, std::ptrdiff_t index, std::string& text) {
  if (index < 0) {
    text += kHeader;
    text += '\n';
    return;
  }
  using namespace std::chrono;
  const Request& request = trace.requests[static_cast<std::size_t>(index)];
  const Nanos ticks = (request.arrival + 50) / 100;  // of 100 ns, rounded to the nearest
  const Nanos second = ticks / 10'000'000;
  const sys_days day = sys_days(year(2000) / January / 1) + days(second / 86400);
  const year_month_day date(day);
  fmt::format_to(std::back_inserter(text), "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:07},{},{}\n",
                 static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
                 static_cast<unsigned>(date.day()), second / 3600 % 24, second / 60 % 60, second % 60,
                 ticks % 10'000'000, request.prompt_tokens, request.output_tokens);
}

std::vector<std::string> azure_losses(const Trace& trace) {
  std::vector<std::string> lost;
  if (trace.hash_block_tokens != 0) lost.emplace_back("prefix identity (hash ids)");
  if (!trace.sessions.empty()) lost.emplace_back("sessions and think times");
  if (!trace.requests.empty() && trace.requests.front().arrival != 0) {
    lost.emplace_back("the time before the first arrival (the format's time counts from its first row)");
  }
  const bool fine = std::any_of(trace.requests.begin(), trace.requests.end(),
                                [](const Request& request) { return request.arrival % 100 != 0; });
  if (fine) lost.emplace_back("fractions of 100 ns in the stamps");
  return lost;
}

}  // namespace pdsim
