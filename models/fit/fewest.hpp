// The fewest shapes that tell a curve: from full tables of several GPUs, a list that a quick calibration may
// measure instead.
//
// A list is good when the curve fitted to it alone predicts all rows of each table nearly as well as the
// curve fitted to all of them does. Shapes that are predicted worst are often those that no curve tells, so
// none is chosen for itself: a list of random shapes is changed in one to three places at a time, at random,
// and a change that lowers the loss over all tables is kept, until the median error of every table is within
// the given margin of the full fit's, and the 90th percentile within kFewestTail times that. When that has
// been tried often enough the list grows by an eighth. Deterministic.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "models/kernel_table.hpp"

namespace pdsim {

/// How a list does on one table.
struct FewestLoss {
  std::string gpu;
  std::size_t rows = 0, shapes = 0;  ///< of the table; of the list, in the table
  Accuracy full, quick;              ///< over all rows, of the curve fitted to all and to the list
};

struct Fewest {
  KernelRow like;  ///< operation and format
  std::vector<std::array<double, kShapeAxes>> shapes;
  std::vector<FewestLoss> losses;  ///< one a table
};

/// So many points may the 90th percentile lose for each of the median: it is three to four times as large.
inline constexpr double kFewestTail = 2.5;

struct FewestOptions {
  double within = 0.02;                               ///< of the full fit's median error, absolute
  std::size_t first = 16, most = 160;                 ///< shapes
  std::size_t tries = 500;                            ///< changes at each length
  std::vector<std::array<double, kShapeAxes>> start;  ///< shapes to begin with
};

/// Whether calibrations measure such shapes: what models have at their tensor-parallel degrees, and serving
/// asks for. Linear layers of 1024 rows and columns or more and at most 2^29 weights, to 8192 tokens and 2^42
/// operations; heads of 64 or 128, at most 8 KV heads of 4, 8 or 16 queries each, no window; contexts from 16
/// on, at most 8 prompts or 256 decode rows;
/// experts under balanced routing, to 8192 tokens.
bool serving_shape(const KernelRow& row);

/// Tables of one operation, format, head size and kernel each, on different GPUs; shapes that not all of them
/// hold are no candidates, also of options.start. InputError where none is left. Requires rows in each. A
/// tenth of a second for each try and table.
Fewest fewest_shapes(std::span<const KernelTable> tables, const FewestOptions& options = {});

/// The same error for a list that is given.
FewestLoss fewest_loss(const KernelTable& table, std::span<const std::array<double, kShapeAxes>> shapes);

}  // namespace pdsim
