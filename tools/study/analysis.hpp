// What a sweep's results say: which points are worth having, what mattered, and where each side of a
// contrast wins.
//
// Pure functions on columns of results. Nothing here runs or reads anything, and rows may come in any
// order: all that is returned depends on the rows' points only. A value that a row lacks (its run failed,
// or the summary had null there, or no finite number) is never taken for a number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/study/space.hpp"

namespace pdsim {

/// A point's row of the results.
struct ResultRow {
  std::uint64_t point = 0;                        ///< its number in the space
  std::vector<std::string> labels;                ///< by parameter, as Parameter::labels has them
  bool finished = false;                          ///< false = it failed, and no value counts
  std::vector<std::optional<double>> objectives;  ///< by Space::objectives
  double completed = 1;                           ///< share of the requests that arrived, from 0 to 1
  std::vector<double> errors;  ///< median relative error by objective; NaN = none measured, empty = unknown
};

/// Latencies are those of completed requests alone: a setting that fails the slow ones looks fast. A row is
/// compared by latency only when it completed at most this share less than the row that completed most.
/// Chosen: one request in a thousand, which moves no percentile below the 99th by much.
inline constexpr double kAsComplete = 0.001;

/// Whether an objective is a latency, by its path: under latency_ms or stages_ms.
bool is_latency(const Objective& objective);

/// The objectives' values, row by row, as far as rows may be compared by them: none of rows that failed, and
/// no latency of rows that completed fewer requests than others. O(rows x objectives).
std::vector<std::vector<std::optional<double>>> comparable(const Space& space,
                                                           std::span<const ResultRow> rows);

/// Indices, ascending, of the rows that no other row beats: none is at least as good in every column and
/// better in one. Rows that lack a value are out; of rows equal in all columns, all are in. O(n log n) for
/// one and two columns, O(n x front) for more.
std::vector<std::size_t> pareto_front(std::span<const std::vector<std::optional<double>>> rows,
                                      std::span<const bool> less_is_better);

/// Index of the best value; of equal ones the first. Nothing when all are missing. O(n).
std::optional<std::size_t> best_of(std::span<const std::optional<double>> values, bool less_is_better);

/// Share of the variance of `values` that knowing `groups` (one for each value) explains: the sum of
/// squares between group means over the total (eta squared). Missing values are out. Nothing when fewer
/// than two values are left or none differs. O(n).
std::optional<double> explained(std::span<const std::optional<double>> values,
                                std::span<const std::uint32_t> groups);

/// The group of each level that explained() takes for a parameter: the level itself, or for more than
/// kMostGroups numeric levels, kMostGroups groups of as even sizes as can be along the axis.
inline constexpr std::uint32_t kMostGroups = 8;
std::vector<std::uint32_t> groups_of(const Parameter& parameter);

/// What each parameter alone explains of an objective.
struct Shares {
  bool logarithm = false;                     ///< of the values' logarithms, since they are far apart
  std::vector<std::optional<double>> shares;  ///< by parameter; nothing when there is nothing to explain
};

/// explained() of the rows' values by each parameter, of their logarithms where the largest is more than ten
/// times the smallest and all are positive. `objective` is a column of the rows. O(rows x parameters).
Shares explained_shares(const Space& space, std::size_t objective, std::span<const ResultRow> rows);

/// One cell of a contrast: a combination of the other parameters' levels.
struct ContrastCell {
  std::vector<std::uint32_t> levels;  ///< by parameter; the contrasted one's is 0 and means nothing
  std::optional<std::uint32_t> best;  ///< its level; nothing when none has a value, or some have not run
  std::optional<double> margin;       ///< over the second best, relative to the second's value; >= 0;
                                      ///< nothing over a second of 0
  bool undecided = false;             ///< no tie (kTie), and the best is ahead of another by less than the
                                      ///< larger error of the two's evidence, or it is unmeasured
  bool unmeasured = false;            ///< nothing measured says by how much one of the levels is off
  std::uint32_t present = 0;          ///< levels with a value that is compared
  std::uint32_t missing = 0;          ///< levels that failed, or ran and have no value
  std::uint32_t incomplete = 0;       ///< by latency: levels that completed fewer requests than another here
  std::uint32_t open = 0;             ///< levels that have not run
};

/// The cells of a contrast, in the order of their first points; what constraints ruled out is in none.
/// `objective` is a column of the rows. O(points log points).
std::vector<ContrastCell> contrast_cells(const Space& space, std::uint32_t parameter, std::size_t objective,
                                         std::span<const ResultRow> rows);

/// For people, within 100 columns: the Pareto front, per objective the best point and what mattered, and
/// a map for each contrast. Rows may be fewer than the points (an interrupted sweep); that is said.
std::string sweep_report(const Space& space, const std::vector<ResultRow>& rows);

}  // namespace pdsim
