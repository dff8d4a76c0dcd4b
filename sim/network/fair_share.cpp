#include "sim/network/fair_share.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "sim/core/error.hpp"

namespace pdsim {

void FairShare::solve(const FairShareProblem& problem, std::span<double> rate, std::span<double> used) {
  const std::size_t links = problem.capacity.size();
  const std::size_t flows = problem.bound.size();

  // Transpose: link -> flows, in order of flow.
  link_first_.assign(links + 1, 0);
  link_flow_.resize(problem.link.size());
  moving_weight_.assign(links, 0.0);
  moving_flows_.assign(links, 0);
  for (const std::uint32_t l : problem.link) ++link_first_[l + 1];
  for (std::size_t l = 0; l < links; ++l) link_first_[l + 1] += link_first_[l];
  for (std::size_t f = 0; f < flows; ++f) {
    for (std::uint32_t e = problem.first[f]; e < problem.first[f + 1]; ++e) {
      const std::uint32_t l = problem.link[e];
      link_flow_[link_first_[l] + moving_flows_[l]++] = static_cast<std::uint32_t>(f);
      moving_weight_[l] += problem.weight[e];
    }
  }

  constexpr double kMoving = -1.0;
  std::ranges::fill(rate, kMoving);
  std::ranges::fill(used, 0.0);

  // A heap of the levels at which a link fills or a bound is reached, least first.
  const auto later = [](const Level& a, const Level& b) {
    return a.value != b.value ? a.value > b.value : a.what > b.what;
  };
  heap_.clear();
  for (std::size_t l = 0; l < links; ++l) {
    if (moving_flows_[l] > 0) {
      heap_.push_back({problem.capacity[l] / moving_weight_[l], static_cast<std::uint32_t>(l)});
    }
  }
  for (std::size_t f = 0; f < flows; ++f) {
    double alone = kUnbounded;  // its rate without others: a bound from there on never binds
    for (std::uint32_t e = problem.first[f]; e < problem.first[f + 1]; ++e) {
      alone = std::min(alone, problem.capacity[problem.link[e]] / problem.weight[e]);
    }
    if (problem.bound[f] < alone) {
      heap_.push_back({problem.bound[f], static_cast<std::uint32_t>(links + f)});
    }
  }
  std::ranges::make_heap(heap_, later);

  std::size_t moving = flows;
  double level = 0;  // never falls; a tie's last bit would otherwise let it
  const auto stop = [&](std::size_t f) {
    rate[f] = level;
    --moving;
    for (std::uint32_t e = problem.first[f]; e < problem.first[f + 1]; ++e) {
      const std::uint32_t l = problem.link[e];
      used[l] += problem.weight[e] * level;
      moving_weight_[l] -= problem.weight[e];
      --moving_flows_[l];
    }
  };
  while (moving > 0) {
    PDSIM_CHECK(!heap_.empty(), "a flow with neither a link nor a bound has no max-min rate");
    const Level next = heap_.front();
    std::ranges::pop_heap(heap_, later);
    heap_.pop_back();
    if (next.what >= links) {
      const std::size_t f = next.what - links;
      if (rate[f] != kMoving) continue;
      level = std::max(level, next.value);
      stop(f);
      continue;
    }
    const std::size_t l = next.what;
    if (moving_flows_[l] == 0) continue;
    const double fills = (problem.capacity[l] - used[l]) / moving_weight_[l];
    if (fills > next.value) {  // others on it stopped since: it fills later
      heap_.push_back({fills, next.what});
      std::ranges::push_heap(heap_, later);
      continue;
    }
    level = std::max(level, fills);
    for (std::uint32_t i = link_first_[l]; i < link_first_[l + 1]; ++i) {
      if (rate[link_flow_[i]] == kMoving) stop(link_flow_[i]);
    }
  }
}

bool certificate(const FairShareProblem& problem, std::span<const double> rate, double tolerance,
                 std::string* why) {
  const auto fails = [&](std::string reason) {
    if (why != nullptr) *why = std::move(reason);
    return false;
  };
  const std::size_t flows = problem.bound.size();
  std::vector<double> used(problem.capacity.size(), 0.0), fastest(problem.capacity.size(), 0.0);
  for (std::size_t f = 0; f < flows; ++f) {
    for (std::uint32_t e = problem.first[f]; e < problem.first[f + 1]; ++e) {
      const std::uint32_t l = problem.link[e];
      used[l] += problem.weight[e] * rate[f];
      fastest[l] = std::max(fastest[l], rate[f]);
    }
  }
  for (std::size_t l = 0; l < used.size(); ++l) {
    if (used[l] > problem.capacity[l] * (1 + tolerance)) {
      return fails(fmt::format("link {} carries {} of {}", l, used[l], problem.capacity[l]));
    }
  }
  for (std::size_t f = 0; f < flows; ++f) {
    if (!(rate[f] >= 0 && rate[f] <= problem.bound[f] * (1 + tolerance))) {
      return fails(fmt::format("flow {} has rate {}, bound {}", f, rate[f], problem.bound[f]));
    }
    bool held = rate[f] >= problem.bound[f] * (1 - tolerance);
    for (std::uint32_t e = problem.first[f]; e < problem.first[f + 1] && !held; ++e) {
      const std::uint32_t l = problem.link[e];
      held = used[l] >= problem.capacity[l] * (1 - tolerance) && rate[f] >= fastest[l] * (1 - tolerance);
    }
    if (!held) return fails(fmt::format("flow {} could be faster: nothing holds it back", f));
  }
  return true;
}

}  // namespace pdsim
