#include "sim/routing/policies.hpp"

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

using Candidates = std::span<const std::uint32_t>;

// Tokens that stand before a new request (prompts to compute) or beside it (context in memory).
double tokens_in_flight(const RouterView& view, std::uint32_t worker) {
  const WorkerLoad& load = view.load[worker];
  return static_cast<double>(load.prefill_tokens + load.context_tokens);
}

// The least `cost`; among equals the one with fewest requests, then the next in turn.
template <typename Cost>
std::uint32_t least(const RouterView& view, Candidates candidates, RouterState& state, Cost cost) {
  const std::size_t n = candidates.size();
  const std::size_t first = state.turn++ % n;
  std::uint32_t best = candidates[first];
  double best_cost = cost(best);
  for (std::size_t i = 1; i < n; ++i) {
    const std::uint32_t worker = candidates[(first + i) % n];
    const double c = cost(worker);
    if (c < best_cost || (c == best_cost && view.load[worker].requests < view.load[best].requests)) {
      best = worker;
      best_cost = c;
    }
  }
  return best;
}

std::uint32_t round_robin(const RouterView&, Candidates candidates, RouterState& state, Random&) {
  return candidates[state.turn++ % candidates.size()];
}

std::uint32_t random(const RouterView&, Candidates candidates, RouterState&, Random& random) {
  return candidates[random.below(candidates.size())];
}

std::uint32_t least_loaded(const RouterView& view, Candidates candidates, RouterState& state, Random&) {
  return least(view, candidates, state, [&](std::uint32_t w) { return tokens_in_flight(view, w); });
}

// Mitzenmacher's two choices: the second among the others, so that they differ.
std::uint32_t power_of_two(const RouterView& view, Candidates candidates, RouterState&, Random& random) {
  const std::uint64_t n = candidates.size();
  const std::uint64_t a = random.below(n);
  if (n == 1) return candidates[0];
  const std::uint64_t b = (a + 1 + random.below(n - 1)) % n;
  const double load_a = tokens_in_flight(view, candidates[a]);
  const double load_b = tokens_in_flight(view, candidates[b]);
  return candidates[load_b < load_a ? b : a];
}

// Tokens to compute (or, for decode, to move) plus the weighted tokens already in flight there.
std::uint32_t prefix_aware(const RouterView& view, Candidates candidates, RouterState& state, Random&) {
  return least(view, candidates, state, [&](std::uint32_t w) {
    return static_cast<double>(view.prompt_tokens - view.hit_tokens[w]) +
           view.load_weight * tokens_in_flight(view, w);
  });
}

// Rendezvous hashing: the same worker for a session as long as the candidates are the same, and only
// 1/n of the sessions move when one of n leaves. Requests of no session go to the least loaded.
std::uint32_t session_affinity(const RouterView& view, Candidates candidates, RouterState& state,
                               Random& random) {
  if (view.session == 0) return least_loaded(view, candidates, state, random);
  std::uint32_t best = candidates[0];
  std::uint64_t best_score = 0;
  for (const std::uint32_t worker : candidates) {
    const std::uint64_t score = Random(view.session, Purpose::routing, worker).bits();
    if (score >= best_score) {
      best_score = score;
      best = worker;
    }
  }
  return best;
}

constexpr RoutingPolicy kRoutingPolicies[] = {
    {"round_robin", round_robin, false},   {"random", random, false},
    {"least_loaded", least_loaded, false}, {"power_of_two", power_of_two, false},
    {"prefix_aware", prefix_aware, true},  {"session_affinity", session_affinity, false},
};

}  // namespace

std::span<const RoutingPolicy> routing_policies() {
  return kRoutingPolicies;
}

const RoutingPolicy& routing_policy(std::string_view name) {
  for (const RoutingPolicy& policy : kRoutingPolicies) {
    if (policy.name == name) return policy;
  }
  broken(__FILE__, __LINE__, "a routing policy passed validation but is not in the table");
}

}  // namespace pdsim
