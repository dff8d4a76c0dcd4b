// The ways to serve on the same GPUs: one scenario as colocated workers, and as prefill and decode workers
// that hand KV over by pull, by push, and by pull with reading back.
//
// Every variant holds exactly the GPUs of the scenario it is made from, on the same nodes, so that all of
// them cost the same an hour; it is a whole scenario of its own, which replays alone as it does here. One
// that cannot be made or cannot work says why.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/study/runs.hpp"

namespace pdsim {

struct Variant {
  std::string kind;    ///< "colocated", "pull", "push", "push_layerwise", "push_progressive", "bidirectional"
  RunSpec spec;        ///< of no use where it cannot work
  std::string note;    ///< what was done to the scenario, one clause
  std::string cannot;  ///< why it cannot work; empty = it can
};

/// What matrix_of() makes unless told.
inline constexpr std::string_view kMatrixKinds[] = {"colocated", "pull", "push", "bidirectional"};

/// The variants of `base`, in the order of `kinds`. Prefill and decode become colocated workers of decode's
/// parallelism and engine, or of prefill's parallelism where decode's does not divide the GPUs; of n
/// colocated workers the first n / 2, rounded down, become prefill workers and the others decode workers.
/// InputError for a base that cannot work, and at "--modes" for a kind that there is not.
std::vector<Variant> matrix_of(const RunSpec& base, std::span<const std::string_view> kinds);

}  // namespace pdsim
