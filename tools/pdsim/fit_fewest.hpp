// pdsim fit --fewest: the shortest list of shapes that tells the curves of full tables.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "models/fit/fewest.hpp"

namespace pdsim {

struct FewestFitOptions {
  std::string shapes;                            ///< the CSV to write; - is stdout; empty: not asked for
  std::string start;                             ///< one to begin with; empty: random shapes
  double within = 100 * FewestOptions{}.within;  ///< percentage points
  std::size_t tries = FewestOptions{}.tries;     ///< see there
  std::vector<std::string> only;                 ///< "gemm bf16": curves to look at; empty: all
};

/// `tables`: one file or folder for each GPU. InputError: none, or no shapes in common.
int fit_fewest(const std::vector<std::string>& tables, const FewestFitOptions& options);

}  // namespace pdsim
