#include "tools/study/plan_search.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "sim/core/error.hpp"
#include "sim/core/math.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/parallel.hpp"
#include "traces/reshape.hpp"
#include "traces/stats.hpp"

namespace pdsim {

// ------------------------------------------------------------------------------------------ load tests

LoadTests::LoadTests(const PlanInput& input, const PlanOptions& options,
                     std::function<void(std::uint64_t)> ran)
    : input_(input), options_(options), ran_(std::move(ran)) {
  static std::atomic<std::uint64_t> made{0};
  number_ = ++made;
  rule_.bounds = input.bounds;
  rule_.first_tokens_stand = input.scenario.scenario.router.max_retries == 0;
}

std::string LoadTests::scenario(const WorkerLayout& layout, std::size_t kind, int step,
                                const WhatIf& what_if) const {
  return scenario_text(input_.base, input_.menu, layout, kKinds[kind],
                       rate_at(input_.rate, step) / input_.recorded_rate, what_if);
}

std::shared_ptr<const Trace> LoadTests::trace_for(const LoadedScenario& loaded, const WhatIf& what_if) const {
  auto trace = std::make_shared<Trace>(at_pace(*input_.trace, loaded.scenario.workload.time_scale));
  scale_prompts(*trace, what_if.prompts);
  return trace;
}

void LoadTests::count(const RunResult& result) {
  if (result.status == RunStatus::interrupted) throw Interrupted{};
  const std::lock_guard lock(mutex_);
  ++runs_;
  abandoned_ += result.status == RunStatus::abandoned ? 1 : 0;
  requests_ += result.requests.size();
  for (const RequestRecord& r : result.requests) ended_ += r.end >= 0 ? 1 : 0;
  if (ran_) ran_(runs_);
}

bool LoadTests::keeps_up(const WorkerLayout& layout, std::size_t kind, int step, const WhatIf& what_if) {
  if (interrupted()) throw Interrupted{};
  const LoadedScenario loaded = parse_scenario(scenario(layout, kind, step, what_if), input_.scenario.file);
  // A thread tests one layout at load after load: it is planned once. Neither pace nor kind is part of that.
  struct Last {
    std::uint64_t tests = 0;
    const WorkerLayout* layout = nullptr;
    WhatIf what_if;
    std::unique_ptr<Deployment> deployment;
  };
  thread_local Last last;
  if (!last.deployment || last.tests != number_ || last.layout != &layout ||
      last.what_if.bandwidth != what_if.bandwidth || last.what_if.prompts != what_if.prompts) {
    last = {number_, &layout, what_if, std::make_unique<Deployment>(plan_deployment(loaded))};
  }
  RunHooks hooks;
  hooks.interrupted = interrupted;
  if (options_.abandon) {
    hooks.hopeless = [this](Nanos now, std::span<const RequestRecord> requests) {
      return hopeless(rule_, now, requests);
    };
  }
  const RunResult result = simulate(*last.deployment, loaded, *trace_for(loaded, what_if), hooks);
  count(result);
  return judge_run(input_.bounds, result).kept_up();
}

RunOutcome LoadTests::whole(const WorkerLayout& layout, std::size_t kind, int step, const WhatIf& what_if) {
  if (interrupted()) throw Interrupted{};
  LoadedScenario loaded = parse_scenario(scenario(layout, kind, step, what_if), input_.scenario.file);
  std::shared_ptr<const Trace> trace = trace_for(loaded, what_if);
  RunHooks hooks;
  hooks.interrupted = interrupted;
  ReplayOptions replay;
  replay.quiet = true;
  RunOutcome outcome = run_on(std::move(loaded), replay, std::move(trace), hooks);
  count(outcome.result);
  return outcome;
}

double LoadTests::spared() const {
  return requests_ > 0 ? 1 - static_cast<double>(ended_) / static_cast<double>(requests_) : 0;
}

// ------------------------------------------------------------------------------------------- promises

namespace {

// What one worker would do if it did nothing else, per second. Only the order in which candidates are tried,
// and where searches begin, depend on it.
struct Promise {
  double prompt_tokens = 0, output_tokens = 0;
};

struct Lengths {
  double prompt = 0, computed = 0, output = 0;  // means
};

Lengths lengths_of(const Trace& trace) {
  const TraceStats stats = trace_stats(trace);
  const auto n = static_cast<double>(std::max<std::uint64_t>(stats.requests, 1));
  Lengths lengths;
  lengths.prompt = static_cast<double>(stats.prompt_tokens_total) / n;
  lengths.computed = std::max(1.0, lengths.prompt * (1 - stats.ideal_hit_share));
  lengths.output = std::max(1.0, static_cast<double>(stats.output_tokens_total) / n);
  return lengths;
}

Promise promise_of(const PoolPlan& pool, const Lengths& lengths, double tpot_ms) {
  Promise promise;
  StepShape prefill;
  const std::int64_t n = pool.engine.max_num_batched_tokens;
  prefill.prefill_requests = prefill.sampled_requests = 1;
  prefill.prefill_tokens = static_cast<std::int32_t>(n);
  prefill.prefill_pairs = n * (n + 1) / 2;
  prefill.prefill_context = n;
  promise.prompt_tokens =
      static_cast<double>(n) / static_cast<double>(pool.step_model->time(prefill).ns) * 1e9;
  const double context = lengths.prompt + lengths.output / 2;
  for (std::int32_t batch = 1; batch <= pool.engine.max_num_seqs; batch *= 2) {
    StepShape decode;
    decode.decode_requests = decode.sampled_requests = batch;
    decode.decode_context = static_cast<std::int64_t>(batch * context);
    const Nanos step = pool.step_model->time(decode).ns;
    if (batch > 1 && (to_ms(step) > tpot_ms || batch * context > static_cast<double>(pool.kv_tokens())))
      break;
    promise.output_tokens = batch / static_cast<double>(step) * 1e9;
  }
  return promise;
}

// Requests per second that a layout may carry, by which layouts are ordered.
std::vector<double> promises(const PlanInput& input, const Candidates& candidates, const LoadTests& tests) {
  const Lengths lengths = lengths_of(*input.trace);
  double tpot_ms = HUGE_VAL;
  for (const Bound& bound : input.bounds) {
    if (bound.metric == "tpot_ms") tpot_ms = std::min(tpot_ms, bound.ms);
  }
  std::map<std::tuple<std::size_t, int, int>, Promise> known;  // role, offer, degree
  std::vector<double> all;
  for (const WorkerLayout& layout : candidates.layouts) {
    const auto key = [&](std::size_t g) {
      return std::tuple(layout.disaggregated() ? g : 2, layout.groups[g].offer,
                        layout.groups[g].tensor_parallel);
    };
    bool missing = false;
    for (std::size_t g = 0; g < layout.groups.size(); ++g) missing = missing || !known.contains(key(g));
    if (missing) {
      const LoadedScenario loaded =
          parse_scenario(tests.scenario(layout, layout.disaggregated() ? 1 : 0, 0), input.scenario.file);
      const Deployment deployment = plan_deployment(loaded);
      for (std::size_t g = 0; g < layout.groups.size(); ++g) {
        known[key(g)] = promise_of(deployment.pools[g], lengths, tpot_ms);
      }
    }
    const auto requests = [&](std::size_t g, bool prompts) {
      const Promise& p = known.at(key(g));
      return prompts ? p.prompt_tokens / lengths.computed : p.output_tokens / lengths.output;
    };
    if (layout.disaggregated()) {
      all.push_back(std::min(layout.groups[0].replicas * requests(0, true),
                             layout.groups[1].replicas * requests(1, false)));
    } else {
      all.push_back(layout.groups[0].replicas / (1 / requests(0, true) + 1 / requests(0, false)));
    }
  }
  return all;
}

}  // namespace

// --------------------------------------------------------------------------------------------- search

std::vector<Unit> units_of(const Candidates& candidates) {
  std::vector<Unit> units;
  for (std::size_t rent = 0; rent < candidates.rents.size(); ++rent) {
    for (const bool disaggregated : {false, true}) {
      Unit unit;
      unit.rent = rent;
      unit.disaggregated = disaggregated;
      for (std::size_t l = 0; l < candidates.layouts.size(); ++l) {
        const WorkerLayout& layout = candidates.layouts[l];
        if (layout.rent == rent && layout.disaggregated() == disaggregated) unit.layouts.push_back(l);
      }
      if (!unit.layouts.empty()) units.push_back(std::move(unit));
    }
  }
  return units;
}

void search(std::vector<Unit>& units, const PlanInput& input, const Candidates& candidates,
            const std::vector<std::size_t>& kinds, LoadTests& tests, unsigned jobs) {
  const std::vector<double> promise = promises(input, candidates, tests);
  const auto start_of = [&](std::size_t layout) {
    const double steps = math::log(promise[layout] / input.rate) / math::log(kGridStep);
    return std::clamp(static_cast<int>(steps), kLowestStep, kHighestStep);
  };
  for (Unit& unit : units) {
    std::ranges::stable_sort(unit.layouts, std::greater{}, [&](std::size_t l) { return promise[l]; });
  }
  for (const std::size_t kind : kinds) {
    std::vector<std::size_t> active;  // units
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (units[u].disaggregated == kKinds[kind].disaggregated) active.push_back(u);
    }
    // The most promising first, as far as it goes, where nothing is known yet; then all others against it.
    std::vector<std::vector<std::size_t>> left(units.size());
    const auto improve = [&](Unit& unit, std::size_t layout, int start, std::optional<int> floor) {
      const auto step = highest_step(
          [&](int s) { return tests.keeps_up(candidates.layouts[layout], kind, s); }, start, floor);
      if (!step || (unit.best.step && *step <= *unit.best.step)) return;
      unit.best = {step, layout, kind};
    };
    for (const std::size_t u : active) left[u] = units[u].layouts;
    parallel_for(active.size(), jobs, [&](std::size_t i) {
      Unit& unit = units[active[i]];
      if (unit.best.step) return;
      improve(unit, left[active[i]].front(), start_of(left[active[i]].front()), {});
      left[active[i]].erase(left[active[i]].begin());
    });
    while (true) {
      std::vector<std::pair<std::size_t, std::size_t>> pairs;  // unit, position in left
      for (const std::size_t u : active) {
        if (units[u].best.step && *units[u].best.step >= kHighestStep) left[u].clear();
        for (std::size_t i = 0; i < left[u].size(); ++i) pairs.emplace_back(u, i);
      }
      if (pairs.empty()) break;
      std::vector<char> passes(pairs.size());
      parallel_for(pairs.size(), jobs, [&](std::size_t p) {
        const auto [u, i] = pairs[p];
        const int beyond = units[u].best.step ? *units[u].best.step + 1 : kLowestStep;
        passes[p] = tests.keeps_up(candidates.layouts[left[u][i]], kind, beyond) ? 1 : 0;
      });
      std::vector<std::vector<std::size_t>> kept(units.size());
      for (std::size_t p = 0; p < pairs.size(); ++p) {
        if (passes[p]) kept[pairs[p].first].push_back(left[pairs[p].first][pairs[p].second]);
      }
      left = std::move(kept);
      parallel_for(active.size(), jobs, [&](std::size_t i) {
        Unit& unit = units[active[i]];
        std::vector<std::size_t>& layouts = left[active[i]];
        if (layouts.empty()) return;
        const int floor = unit.best.step ? *unit.best.step + 1 : kLowestStep;
        improve(unit, layouts.front(), floor, floor);
        layouts.erase(layouts.begin());
      });
    }
    for (const std::size_t u : active) {
      if (units[u].best.step && units[u].best.kind == kind) units[u].by_kind.push_back(units[u].best);
    }
  }
  for (Unit& unit : units) unit.settled = true;
}

}  // namespace pdsim
