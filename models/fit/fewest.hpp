// The fewest shapes that tell a curve: from full tables of several GPUs, a list that a quick calibration may
// measure instead.
//
// A list is good when the curve fitted to it alone predicts all rows of each table nearly as well as the
// curve fitted to all of them does. It starts with shapes far apart (in octaves) and grows one at a time: of
// a few candidates, half of them among the worst predicted, the one that helps most, until the median error
// of every table is within the given margin of the full fit's, or the list is as long as is allowed.
// Deterministic.
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

struct FewestOptions {
  double within = 0.02;                               ///< of the full fit's median error, absolute
  std::size_t most = 64;                              ///< shapes
  std::size_t candidates = 2;                         ///< tried for each
  std::vector<std::array<double, kShapeAxes>> start;  ///< a list to lengthen; empty: shapes far apart
};

/// Whether calibrations measure such shapes: what models have at their tensor-parallel degrees, and serving
/// asks for. Linear layers of 1024 rows and columns or more, to 8192 tokens; heads of 64 or 128, at most 8 KV
/// heads of 4, 8 or 16 queries each, no window; contexts from 16 on, at most 8 prompts or 256 decode rows.
bool serving_shape(const KernelRow& row);

/// Tables of one operation, format, head size and kernel each, on different GPUs; shapes that not all of them
/// hold are no candidates. Requires rows in each. Seconds for each shape and table.
Fewest fewest_shapes(std::span<const KernelTable> tables, const FewestOptions& options = {});

/// The same error for a list that is given.
FewestLoss fewest_loss(const KernelTable& table, std::span<const std::array<double, kShapeAxes>> shapes);

}  // namespace pdsim
