// The figures of a summary that a table of results has, one column each: which they are does not depend on
// the run, so that tables of different sweeps have the same columns.
//
// A column is named by one rule: the path into summary.json with its dots as underscores
// (latency_ms.ttft.p95 is latency_ms_ttft_p95). Lists have no columns of their own but what the workers of
// a role, and the links, have in common: workers_decode_busy_fraction_mean, links_utilization_mean_max.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim {

/// As SQLite declares it.
enum class ColumnType : std::uint8_t { real, integer, text };

/// The name of the column for a path: dots become underscores.
std::string column_name(std::string_view path);

struct Figure {
  /// How it comes from the summary. workers_mean and workers_max: over the workers of `role`, nothing without
  /// one; links_max: over the links.
  enum class From : std::uint8_t { path, workers_mean, workers_max, links_max };

  std::string column;
  std::string path;  ///< into the summary, or into a worker or a link
  ColumnType type = ColumnType::real;
  From from = From::path;
  std::string role;     ///< of the workers
  bool sparse = false;  ///< a count that the summary leaves out where it is 0
};

/// All of them, in the order of the columns.
const std::vector<Figure>& figures();

/// The figure's value: a number, true or false, a string, or null where the run has none. O(path, workers).
nlohmann::ordered_json value_of(const Figure& figure, const nlohmann::ordered_json& summary);

}  // namespace pdsim
