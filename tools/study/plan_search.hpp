// Which layout of each rent carries the most, and how much.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tools/study/plan.hpp"

namespace pdsim {

/// Candidates at loads: every load test of a plan goes through here.
/// `input` and `options` outlive it.
class LoadTests {
 public:
  LoadTests(const PlanInput& input, const PlanOptions& options, std::function<void(std::uint64_t)> ran);

  /// Whether a candidate keeps up at a step of the grid around the rate asked for. Throws Interrupted.
  bool keeps_up(const WorkerLayout& layout, std::size_t kind, int step, const WhatIf& what_if = {});
  /// The same run to its end, with its summary. Throws Interrupted.
  RunOutcome whole(const WorkerLayout& layout, std::size_t kind, int step, const WhatIf& what_if = {});
  Reached judged(const RunOutcome& outcome) const { return judge_run(input_.bounds, outcome.result); }
  /// The scenario of a candidate at a step.
  std::string scenario(const WorkerLayout& layout, std::size_t kind, int step,
                       const WhatIf& what_if = {}) const;

  std::uint64_t runs() const { return runs_; }
  std::uint64_t abandoned() const { return abandoned_; }
  /// Of all requests of all runs, the share that was not simulated because runs were given up.
  double spared() const;

 private:
  std::shared_ptr<const Trace> trace_for(const LoadedScenario& loaded, const WhatIf& what_if) const;
  void count(const RunResult& result);

  const PlanInput& input_;
  const PlanOptions& options_;
  const std::function<void(std::uint64_t)> ran_;
  HopelessIf rule_;
  std::uint64_t number_;  ///< of this object among all
  std::mutex mutex_;      // of what follows
  std::uint64_t runs_ = 0, abandoned_ = 0, requests_ = 0, ended_ = 0;
};

/// The best of a rent, in one of the two classes.
struct Best {
  std::optional<int> step;  ///< its capacity; nothing: none at all
  std::size_t layout = 0, kind = 0;
};
struct Unit {
  std::size_t rent = 0;
  bool disaggregated = false;
  std::vector<std::size_t> layouts;
  Best best;                  ///< of all kinds
  std::vector<Best> by_kind;  ///< of each kind that carries more than all simpler ones, in their order
  bool settled = false;       ///< nothing is left to be tried
};

/// One for each rent and class that has layouts, from the cheapest.
std::vector<Unit> units_of(const Candidates& candidates);

/// Finds the best of every unit, kinds from the simplest. A kind or layout takes over only when it carries a
/// step more: of equals the simpler, or the more promising, stays. Every layout is tested beyond the best so
/// far.
void search(std::vector<Unit>& units, const PlanInput& input, const Candidates& candidates,
            const std::vector<std::size_t>& kinds, LoadTests& tests, unsigned jobs);

}  // namespace pdsim
