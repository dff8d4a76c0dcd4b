// A CSV table in memory: a header line that names the columns, then rows; plain or gzip. Quoting does not
// occur in the tables that pdsim reads. Every mistake is an InputError at "file:line".
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim {

/// A field of a table that pdsim writes (RFC 4180): what holds a comma, a quote or a line end is quoted.
std::string csv_text(std::string_view text);

class Csv {
 public:
  /// "-" is stdin. InputError when it cannot be read or has no row under its header. Blank lines are skipped.
  explicit Csv(const std::filesystem::path& file);
  Csv(const Csv&) = delete;  // fields are views of text_
  Csv& operator=(const Csv&) = delete;

  static constexpr std::size_t kAbsent = static_cast<std::size_t>(-1);

  std::size_t rows() const { return rows_.size() - 1; }
  std::uint32_t line(std::size_t row) const { return lines_[row + 1]; }
  const std::vector<std::string_view>& header() const { return rows_.front(); }
  const std::string& file() const { return file_; }
  /// "file:line" of a row.
  std::string place(std::size_t row) const;

  /// The column of this name; kAbsent, or an InputError that names the nearest, when there is none.
  std::size_t find(std::string_view name) const;
  std::size_t column(std::string_view name) const;

  /// A field; "" of an absent column. InputError when the row has not as many fields as the header.
  std::string_view text(std::size_t row, std::size_t column) const;
  /// A finite number; at least `least` (where that is 0, an absent column and a blank field are 0); above 0.
  double number(std::size_t row, std::size_t column) const;
  double number(std::size_t row, std::size_t column, double least) const;
  double positive(std::size_t row, std::size_t column) const;

 private:
  std::string file_, text_;
  std::vector<std::vector<std::string_view>> rows_;
  std::vector<std::uint32_t> lines_;
};

}  // namespace pdsim
