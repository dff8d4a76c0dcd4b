// Numbers and sentences as people read them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pdsim {

/// "12,345.68": rounded to `decimals`, whole digits in threes; no sign before a zero.
std::string grouped(double value, int decimals = 0);

/// "4.2 %", "42 %": one decimal below ten, unless that would say 0.0.
std::string percent(double share);

/// Columns of a terminal that `text` takes: its code points.
std::size_t columns_of(std::string_view text);

/// Of the last line of `out`.
std::size_t column_of(std::string_view out);

inline constexpr char kJoined = '\x1f';  ///< a blank at which wrap() ends no line

/// Adds the words of `text` to the last line of `out` and ends it; where that would pass `width` columns,
/// goes on at column `indent` of a new line. "12 %" stays together.
void wrap(std::string& out, std::size_t indent, std::string_view text, std::size_t width);

/// `text` in lines of at most 110 columns, each after `indent` blanks and ended. Empty for none.
std::string wrapped(std::string_view text, std::size_t indent = 0);

}  // namespace pdsim
