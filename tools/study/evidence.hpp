// How far a simulated figure can be trusted: what it rests on, and by how much such figures have missed
// measured ones.
//
// The errors are not opinions: models/evidence.json holds, grade by grade, what `pdsim validate` found, and
// names the command. A run has the weakest grade that any part of it has.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "sim/cluster/deployment.hpp"

namespace pdsim {

/// From the strongest to the weakest.
enum class Grade : std::uint8_t { measured_here, same_gpu, published, extrapolated, datasheet };

/// Relative errors of simulated against measured: median and 90th percentile of |error|, signed median.
struct GradeError {
  double median = 0, p90 = 0, bias = 0;
  int n = 0;     ///< measured runs
  int rows = 0;  ///< rows of measured kernels behind a stated cost of scaling, where there are no runs

  bool known() const { return n > 0 || rows > 0; }  ///< else the errors say nothing
};

struct Evidence {
  Grade grade = Grade::datasheet;
  std::string text;    ///< "measured here: 102 serving runs of llama-3.1-70b on h200"
  std::string source;  ///< the command that gave the errors
  std::string to_do;   ///< what measurement would give a stronger grade
  GradeError ttft, tpot, throughput;
};

inline constexpr std::array<std::string_view, 5> kGradeNames = {
    "measured here", "same GPU, other model", "published claim", "extrapolated", "datasheet"};

/// What a run rests on. `summary` is its summary. O(table).
Evidence evidence_of(const Deployment& deployment, const nlohmann::ordered_json& summary);

/// The error that goes with a figure of the summary, by its path: TTFT's and stages' before the first token,
/// TPOT's and ITL's, throughput's for the rest (goodput, dollars).
const GradeError& error_for(const Evidence& evidence, std::string_view path);

}  // namespace pdsim
