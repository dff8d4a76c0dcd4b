// The cheapest deployment for a job: a trace at a rate, an SLO, a menu of instances and their prices.
//
// Everything that the menu allows is a candidate (candidates.hpp); of every rent the layout that carries the
// most is found by load tests (capacity.hpp). From those capacities the rest is arithmetic: what is cheapest
// at the rate asked for, from which rate on disaggregation is cheaper, how prices would change it. Of what
// changes the runs themselves (bandwidth, prompts) those that could take over are run again.
//
// A plan is one JSON document (pdsim.plan-report/1); the table and the memo are that document laid out. It
// depends on its inputs alone: not on threads, nor on time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/study/candidates.hpp"
#include "tools/study/capacity.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {

struct PlanOptions {
  ReplayOptions replay;
  std::optional<double> rate;     ///< --rate
  bool allow_unreleased = false;  ///< recommends what no release has yet
  unsigned jobs = 0;              ///< 0 = one a core
  bool abandon = true;            ///< tests: false = every run to its end
};

/// A plan file with everything looked up.
struct PlanInput {
  std::string file, name, sha256;
  std::string scenario_file, scenario_sha256;
  LoadedScenario scenario;  ///< the template, with all that is set
  Menu menu;
  Template base;
  std::vector<std::size_t> kinds;      ///< asked for, from the simplest: of kKinds
  std::shared_ptr<const Trace> trace;  ///< at time_scale 1
  double recorded_rate = 0;            ///< of it
  double rate = 0;                     ///< to be served
  std::string rate_from;               ///< "--rate", "the plan" or "the trace"
  std::vector<Bound> bounds;
  std::vector<std::string> assumptions;  ///< that neither file states
};

/// Reads a plan file ("-" = stdin) and what it names. InputError for whatever is wrong in it: no SLO, no
/// menu, an unknown instance, a rate of 0, no price at all, a trace that cannot be paced.
PlanInput read_plan(const std::string& path, const PlanOptions& options);

inline constexpr double kHoursAMonth = 730;  ///< 8760 / 12, as AWS bills

/// How a plan's report says that it ended.
inline constexpr std::string_view kPlanStatus[] = {"finished", "nothing_feasible", "interrupted"};

/// The plan. `ran`, if any, is called after each simulation with how many there were, one call at a time.
/// Ends early, with what is known, on interrupted(). Cost: one run of the trace for each candidate, mostly
/// abandoned early, and some ten for each rent.
nlohmann::ordered_json make_plan(const PlanInput& input, const PlanOptions& options,
                                 const std::function<void(std::uint64_t)>& ran = {});

/// The report for a terminal: lines of at most 110 columns, but for names of the user's own.
std::string plan_table(const nlohmann::ordered_json& report);

/// The report as one page of Markdown. `command` reproduces it.
std::string plan_memo(const nlohmann::ordered_json& report, const std::string& command);

}  // namespace pdsim
