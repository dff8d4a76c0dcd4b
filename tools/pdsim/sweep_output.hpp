// What sweep and merge say about the results they leave.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tools/study/database.hpp"

namespace pdsim {

/// Points by status, and what came of it.
struct SweepCounts {
  std::array<std::uint64_t, std::size(kPointStatusNames)> by_status{};
  std::uint64_t recorded = 0, expected = 0;  ///< of the shard

  std::uint64_t of(PointStatus status) const { return by_status[static_cast<std::size_t>(status)]; }
};

/// Of the points there; `expected` is how many there should be. O(points).
SweepCounts count_points(const SweepDatabase& database, std::uint64_t expected);

/// "40 points: 38 finished, 2 failed".
std::string counts_text(const SweepCounts& counts);

/// schema pdsim.sweep-report/1.
std::string report_json(const SweepDatabase& database, const SweepCounts& counts, bool interrupted);

/// The view `results` as CSV to a file, which appears when it is whole, or to stdout ("-"). InputError when
/// it cannot be written.
void write_csv(const SweepDatabase& database, const std::string& path);

/// InputError, at the output's option, where an output is an input or another output, under whatever name. A
/// database's files beside it are its own too. Pairs of option and path; empty paths and "-" are none.
void check_places(const std::vector<std::pair<std::string, std::string>>& outputs,
                  const std::vector<std::string>& inputs);

/// InputError where write_csv() would fail for its path.
void check_csv(const std::string& path);

}  // namespace pdsim
