#include "models/csv.hpp"

#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "sim/core/error.hpp"

namespace pdsim {

std::string csv_text(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + '"';
}

Csv::Csv(const std::filesystem::path& file) : file_(file == "-" ? "<stdin>" : file.string()) {
  const gzFile in = file == "-"                           ? gzdopen(dup(STDIN_FILENO), "rb")
                    : std::filesystem::is_directory(file) ? nullptr
                                                          : gzopen(file_.c_str(), "rb");
  if (in == nullptr) throw InputError(file_, "cannot be opened");
  std::array<char, 1 << 16> buffer;
  int got = 0;
  while ((got = gzread(in, buffer.data(), buffer.size())) > 0) {  // reads plain files as they are
    text_.append(buffer.data(), static_cast<std::size_t>(got));
  }
  if (gzclose(in) != Z_OK || got < 0) throw InputError(file_, "is not a whole gzip file");
  std::string_view rest = text_;
  std::uint32_t number = 0;
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    std::vector<std::string_view> fields;
    for (std::size_t comma = 0; comma != std::string_view::npos;) {
      comma = line.find(',');
      fields.push_back(line.substr(0, comma));
      line.remove_prefix(comma == std::string_view::npos ? line.size() : comma + 1);
    }
    rows_.push_back(std::move(fields));
    lines_.push_back(number);
  }
  if (rows_.size() < 2) throw InputError(file_, "has no rows: expected a header line and measurements");
}

std::string Csv::place(std::size_t row) const {
  return fmt::format("{}:{}", file_, line(row));
}

std::size_t Csv::find(std::string_view name) const {
  const auto found = std::find(header().begin(), header().end(), name);
  return found == header().end() ? kAbsent : static_cast<std::size_t>(found - header().begin());
}

std::size_t Csv::column(std::string_view name) const {
  const std::size_t found = find(name);
  if (found != kAbsent) return found;
  throw InputError(fmt::format("{}:1", file_),
                   fmt::format("has no column '{}'{}", name, did_you_mean(name, header())));
}

std::string_view Csv::text(std::size_t row, std::size_t column) const {
  const auto& fields = rows_[row + 1];
  if (fields.size() != header().size()) {
    throw InputError(place(row), fmt::format("has {} fields: expected {}", fields.size(), header().size()));
  }
  return column == kAbsent ? std::string_view() : fields[column];
}

double Csv::number(std::size_t row, std::size_t column) const {
  const std::string_view field = text(row, column);
  double value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error == std::errc() && end == field.data() + field.size() && std::isfinite(value)) return value;
  throw InputError(place(row), fmt::format("{} is '{}': expected a number", header()[column], field));
}

double Csv::number(std::size_t row, std::size_t column, double least) const {
  if (least == 0 && text(row, column).empty()) return 0;
  const double value = number(row, column);
  if (value >= least) return value;
  throw InputError(place(row), fmt::format("{} is {}: expected {} or more", header()[column], value, least));
}

double Csv::positive(std::size_t row, std::size_t column) const {
  const double value = number(row, column);
  if (value > 0) return value;
  throw InputError(place(row), fmt::format("{} is {}: expected more than 0", header()[column], value));
}

}  // namespace pdsim
