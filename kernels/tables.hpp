// A calibration as CSV tables, in the form that `pdsim fit` reads (models/kernel_table.hpp): one file a
// family of operations, one line a point, with how each time was come to in further columns.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/calibrate.hpp"

namespace pdsim::kernels {

/// (file name, content): gemm.csv, attention.csv, mla.csv, moe.csv, kv_copy.csv and interference.csv, those
/// of them that have a row. `software` and the device stand in every line; both are stripped of commas. Times
/// are in microseconds, four significant digits at least.
std::vector<std::pair<std::string, std::string>> tables(const Measurements& measured,
                                                        std::string_view software);

/// The names that tables() may give.
inline constexpr std::string_view kTableNames[] = {"gemm.csv", "attention.csv", "mla.csv",
                                                   "moe.csv",  "kv_copy.csv",   "interference.csv"};

/// The best that each kernel did, against the measured peaks, as lines for people; "" without rows.
std::string achieved(const Measurements& measured);

}  // namespace pdsim::kernels
