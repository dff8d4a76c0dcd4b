#include "tools/study/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace pdsim {

std::string grouped(double value, int decimals) {
  const std::string digits = fmt::format("{:.{}f}", std::abs(value), decimals);
  const std::size_t whole = std::min(digits.find('.'), digits.size());
  std::string text;
  if (value < 0 && digits.find_first_not_of("0.") != std::string::npos) text.push_back('-');
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && i < whole && (whole - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string percent(double share) {
  const double hundredths = std::abs(100 * share);
  return fmt::format("{:.{}f} %", 100 * share, hundredths >= 0.05 && hundredths < 9.95 ? 1 : 0);
}

std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::size_t column_of(std::string_view out) {
  return columns_of(out.substr(out.rfind('\n') + 1));
}

void wrap(std::string& out, std::size_t indent, std::string_view text, std::size_t width) {
  std::size_t column = column_of(out);
  for (bool first = true; !text.empty(); first = false) {
    std::size_t length = std::min(text.find(' '), text.size());
    while (text.substr(length).starts_with(" %")) length = std::min(text.find(' ', length + 1), text.size());
    const std::string_view word = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    if (!first && column + 1 + columns_of(word) > width) {
      out.push_back('\n');
      out.append(indent, ' ');
      column = indent;
    } else if (!first) {
      out.push_back(' ');
      ++column;
    }
    for (const char c : word) out.push_back(c == kJoined ? ' ' : c);
    column += columns_of(word);
  }
  out.push_back('\n');
}

std::string wrapped(std::string_view text, std::size_t indent) {
  std::string out;
  if (text.empty()) return out;
  out.append(indent, ' ');
  wrap(out, indent, text, 110);
  return out;
}

}  // namespace pdsim
