// Where a request goes: policies as functions over what a router can know.
//
// A router knows what it has sent and what has come back, and (prefix_aware) the cache events that
// workers publish at the end of a step, a delay later. That a request has ended it hears at once, on the
// stream that it relays. It does not see queues or KV usage as they are now: no real one does.
//
// A new policy is one function, one row in kRoutingPolicies (and its name in scenario/names.hpp), one
// test.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "sim/core/random.hpp"

namespace pdsim {

/// What the router has sent to a worker and not yet seen come back.
struct WorkerLoad {
  std::int32_t requests = 0;
  std::int64_t prefill_tokens = 0;  ///< prompt tokens still to be computed there, as far as it knows
  std::int64_t context_tokens = 0;  ///< tokens that those requests hold in KV once computed
};

/// Read-only; spans are by worker.
struct RouterView {
  std::span<const WorkerLoad> load;
  std::span<const std::int32_t> hit_tokens;  ///< of this prompt; valid for policies with uses_cache
  std::int32_t prompt_tokens = 0;
  std::uint64_t session = 0;  ///< 0 = none
  double load_weight = 1;
};

/// Choices made so far, for policies that take turns.
struct RouterState {
  std::uint64_t turn = 0;
};

/// Returns one of `candidates` (worker ids, ascending, not empty). O(candidates).
using ChooseWorker = std::uint32_t (*)(const RouterView&, std::span<const std::uint32_t> candidates,
                                       RouterState&, Random&);

struct RoutingPolicy {
  std::string_view name;
  ChooseWorker choose;
  bool uses_cache;
};

std::span<const RoutingPolicy> routing_policies();
/// Requires a name that is in the table.
const RoutingPolicy& routing_policy(std::string_view name);

}  // namespace pdsim
