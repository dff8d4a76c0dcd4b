#include "tools/study/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "models/data.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "sim/scenario/releases.hpp"
#include "tools/study/evidence.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/plan_search.hpp"
#include "tools/study/text.hpp"
#include "tools/study/verdict.hpp"
#include "traces/reshape.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kSwing = 0.2;        // of what might flip the answer: chosen, as far as quotes are often off
constexpr int kBeyond = 5;            // steps beyond a capacity at which monotonicity is looked at
constexpr std::size_t kFigures = 6;   // options whose figures at the rate are given
constexpr double kShortSeconds = 60;  // chosen: a minute of traffic; queues of less have hardly grown
constexpr int kWithinReach = -36;  // steps, a half: what a fifth of bandwidth or prompts may yet make up for
constexpr std::string_view kClass[] = {"colocated", "disaggregated"};
constexpr std::size_t kSides[] = {0, 1};  // of kClass
constexpr std::string_view kDecisions[] = {"decided", "tie", "undecided", "nobody"};

using Prices = std::vector<double>;  // by offer

// One way to do the job.
struct Chosen {
  std::size_t unit = 0;
  Best best;
  double usd_per_hour = 0;
};

// What a run at the rate asked for says of one.
struct Figures {
  bool kept_up = false;
  Reached reached;
  std::shared_ptr<const Json> summary;
  Evidence evidence;
  double drain_s = 0;
};

// All the state of one plan.
class Planner {
 public:
  Planner(const PlanInput& input, const PlanOptions& options, const std::function<void(std::uint64_t)>& ran)
      : in_(input), options_(options), tests_(input, options, ran) {
    for (const Offer& offer : in_.menu.offers) prices_.push_back(offer.usd_per_hour.value_or(0));
    double output = 0;
    for (const Request& r : in_.trace->requests) output += r.output_tokens;
    output_tokens_ = output / static_cast<double>(in_.trace->requests.size());
  }

  Json plan();

 private:
  struct Needs {
    std::size_t kind = 0;
    std::vector<Release> features;
    bool never = false;  // no engine has it
  };

  void sort_kinds();
  void answer();
  std::string name(const Chosen& c) const;
  double price_of(std::size_t unit, const Prices& prices) const;
  double usd_per_million(double usd_per_hour) const {
    return output_tokens_ > 0 ? usd_per_hour / 3600 / in_.rate / output_tokens_ * 1e6 : 0;
  }
  const Figures& figures(const Chosen& c);
  std::optional<Chosen> sufficient(std::size_t unit, const Prices& prices) const;
  std::optional<Chosen> cheapest(bool disaggregated, const Prices& prices) const;
  std::optional<Chosen> cheapest_if(bool disaggregated, const WhatIf& what_if);
  using Pair = std::array<std::optional<Chosen>, 2>;
  Verdict decide(const Pair& pair);
  std::optional<Chosen> winner(const Pair& pair);
  bool tried(bool disaggregated) const;
  bool differs(const std::optional<Chosen>& a, const std::optional<Chosen>& b) const;

  Json question() const;
  Json option(const Chosen& c, bool with_figures);
  Json all_options();
  Json curve() const;
  Json capacity_of(const Chosen& c);
  Json limit_of(const Chosen& c);
  Json margin_of(const Chosen& c, const Json& at_capacity);
  Json flips(const Pair& base);
  Json price_flips(const Pair& base);
  Json run_flips(const Pair& base);
  Json undeployable(const std::optional<Chosen>& recommended);
  Json nearest_miss();
  Json notes(const Pair& base);

  const PlanInput& in_;
  const PlanOptions& options_;
  LoadTests tests_;
  Prices prices_;
  double output_tokens_ = 0;  // of a request, mean
  Candidates candidates_;
  std::vector<std::size_t> kinds_;  // those recommended from
  std::vector<Needs> excluded_kinds_;
  std::vector<Unit> units_;
  std::vector<char> failed_;  // units that did not keep up at the rate although they do beyond it
  std::map<std::size_t, Figures> figures_;
  std::vector<std::string> not_monotone_;
  Verdict verdict_;
  Pair base_;
};

const WorkerLayout& layout_of(const Candidates& candidates, const Best& best) {
  return candidates.layouts[best.layout];
}

// What each kind needs: those that no release has are not recommended.
void Planner::sort_kinds() {
  for (const std::size_t kind : in_.kinds) {
    const auto layout =
        std::ranges::find(candidates_.layouts, kKinds[kind].disaggregated, &WorkerLayout::disaggregated);
    if (layout == candidates_.layouts.end()) continue;
    Needs needs{kind, {}, false};
    try {
      const LoadedScenario loaded = parse_scenario(tests_.scenario(*layout, kind, 0), in_.scenario.file);
      check_simulated(loaded);
      needs.never = is_hypothetical(loaded.scenario);
      for (const Release& release : releases_of(loaded.scenario)) {
        // pdsim's guard against reading what has changed hands does nothing while nothing goes wrong.
        if (release.feature == "transfer.stale_guard") continue;
        if (release.since == kNoEngine) needs.never = true;
        if (release.since == kUnreleased || release.since == kNoEngine) needs.features.push_back(release);
      }
    } catch (const InputError& error) {
      const auto count =
          std::ranges::count(candidates_.layouts, kKinds[kind].disaggregated, &WorkerLayout::disaggregated);
      candidates_.excluded.push_back({error.what(), count, std::string(kKinds[kind].name)});
      continue;
    }
    if (needs.never || (!needs.features.empty() && !options_.allow_unreleased)) {
      excluded_kinds_.push_back(std::move(needs));
    } else {
      kinds_.push_back(kind);
    }
  }
}

std::string Planner::name(const Chosen& c) const {
  const WorkerLayout& layout = layout_of(candidates_, c.best);
  return fmt::format("{}: {}, {}", name_of(candidates_.rents[layout.rent], in_.menu.offers),
                     workers_of(layout), kKinds[c.best.kind].name);
}

double Planner::price_of(std::size_t unit, const Prices& prices) const {
  const Rent& rent = candidates_.rents[units_[unit].rent];
  double usd = 0;
  for (std::size_t o = 0; o < prices.size(); ++o) usd += rent.counts[o] * prices[o];
  return usd;
}

// The simplest kind that keeps up at the rate asked for, with its best layout.
std::optional<Chosen> Planner::sufficient(std::size_t unit, const Prices& prices) const {
  if (failed_[unit]) return std::nullopt;
  for (const Best& best : units_[unit].by_kind) {
    if (best.step && *best.step >= 0) return Chosen{unit, best, price_of(unit, prices)};
  }
  return std::nullopt;
}

std::optional<Chosen> Planner::cheapest(bool disaggregated, const Prices& prices) const {
  std::optional<Chosen> found;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].disaggregated != disaggregated) continue;
    const std::optional<Chosen> c = sufficient(u, prices);
    if (c && (!found || c->usd_per_hour < found->usd_per_hour)) found = c;
  }
  return found;
}

const Figures& Planner::figures(const Chosen& c) {
  const auto known = figures_.find(c.unit);
  if (known != figures_.end()) return known->second;
  Figures f;  // kept when it is whole: the run may be interrupted
  const RunOutcome out = tests_.whole(layout_of(candidates_, c.best), c.best.kind, 0);
  f.reached = tests_.judged(out);
  f.kept_up = f.reached.kept_up();
  f.summary = out.summary;
  f.evidence = evidence_of(out.deployment, *out.summary);
  Nanos last = 0, end = 0;
  for (const RequestRecord& r : out.result.requests) {
    last = std::max(last, r.arrival);
    end = std::max(end, r.end);
  }
  f.drain_s = to_seconds(end - last);
  return figures_.emplace(c.unit, std::move(f)).first->second;
}

Verdict Planner::decide(const Pair& pair) {
  std::vector<Contender> contenders;
  for (std::size_t i = 0; i < pair.size(); ++i) {
    if (!pair[i]) continue;
    Contender contender;
    contender.name = std::string(kClass[i]);
    contender.value = usd_per_million(pair[i]->usd_per_hour);
    contender.evidence = figures(*pair[i]).evidence;
    contender.complexity = static_cast<int>(pair[i]->best.kind);
    contenders.push_back(std::move(contender));
  }
  Verdict verdict = judge(find_objective("usd_per_million_output_tokens", ""), contenders);
  if (contenders.size() == 1) {
    const std::size_t other = pair[0] ? 1 : 0;
    verdict.text = tried(other == 1) ? fmt::format("No {} deployment on the menu carries {:.4g} requests/s.",
                                                   kClass[other], in_.rate)
                                     : fmt::format("Only {} deployments could be tried.", kClass[1 - other]);
  }
  return verdict;
}

// Whether the search had anything of this class.
bool Planner::tried(bool disaggregated) const {
  const bool any = std::ranges::any_of(
      kinds_, [&](std::size_t kind) { return kKinds[kind].disaggregated == disaggregated; });
  return any && std::ranges::any_of(units_, [&](const Unit& u) { return u.disaggregated == disaggregated; });
}

std::optional<Chosen> Planner::winner(const Pair& pair) {
  if (!pair[0] || !pair[1]) return pair[0] ? pair[0] : pair[1];
  const Verdict verdict = decide(pair);
  return verdict.recommended ? pair[*verdict.recommended] : std::nullopt;
}

// Another class, or other instances.
bool Planner::differs(const std::optional<Chosen>& a, const std::optional<Chosen>& b) const {
  if (!a || !b) return a.has_value() != b.has_value();
  const Unit &x = units_[a->unit], &y = units_[b->unit];
  if (x.disaggregated != y.disaggregated) return true;
  const auto &p = candidates_.rents[x.rent].counts, &q = candidates_.rents[y.rent].counts;
  for (std::size_t o = 0; o < p.size(); ++o) {
    if ((p[o] > 0) != (q[o] > 0)) return true;
  }
  return false;
}

// The cheapest of each class that is seen to keep up at the rate itself.
void Planner::answer() {
  for (const bool disaggregated : {false, true}) {
    while (true) {
      const std::optional<Chosen> c = cheapest(disaggregated, prices_);
      if (c && !figures(*c).kept_up) {
        failed_[c->unit] = 1;
        not_monotone_.push_back(
            fmt::format("{} keeps up at {:.3g} requests/s, but not at {:.3g}: it is passed over", name(*c),
                        rate_at(in_.rate, *c->best.step), in_.rate));
        continue;
      }
      base_[disaggregated ? 1 : 0] = c;
      break;
    }
  }
  verdict_ = decide(base_);
}

// ------------------------------------------------------------------------------------------ documents

// As model hubs and vllm serve know it.
std::string model_id(const std::string& name) {
  const auto file = data_dir() / "models" / "shapes" / (name + ".json");
  std::error_code error;
  if (name.find('/') != std::string::npos || !std::filesystem::is_regular_file(file, error)) return name;
  const nlohmann::json shape = read_json(file);
  const auto ids = shape.find("hf_id");
  return ids != shape.end() && ids->is_array() && !ids->empty() ? ids->front().get<std::string>() : name;
}

// "TTFT".
std::string name_of_metric(std::string_view metric) {
  return metric == "ttft_ms" ? "TTFT" : "TPOT";
}

Json slo_json(const std::vector<Bound>& bounds) {
  Json slo = Json::object();
  for (const Bound& bound : bounds) slo[bound.metric][bound.percentile] = bound.ms;
  return slo;
}

Json Planner::question() const {
  const Scenario& s = in_.scenario.scenario;
  double prompt = 0;
  for (const Request& r : in_.trace->requests) prompt += r.prompt_tokens;
  const auto n = static_cast<double>(in_.trace->requests.size());
  Json menu = Json::array();
  for (const Offer& offer : in_.menu.offers) {
    menu.push_back({{"instance", offer.instance->name},
                    {"gpu", offer.instance->gpu},
                    {"gpus", offer.instance->gpus},
                    {"usd_per_hour", offer.usd_per_hour ? Json(*offer.usd_per_hour) : Json()},
                    {"as_of", offer.as_of},
                    {"source", offer.source}});
  }
  Json kinds = Json::array();
  for (const std::size_t kind : in_.kinds) kinds.push_back(kKinds[kind].name);
  return {{"rate", in_.rate},
          {"rate_from", in_.rate_from},
          {"model", s.model},
          {"model_id", model_id(s.model)},
          {"weights_dtype", s.weights_dtype.empty() ? "auto" : s.weights_dtype},
          {"kv_dtype", s.kv_dtype.empty() ? "auto" : s.kv_dtype},
          {"slo", slo_json(in_.bounds)},
          {"trace",
           {{"name", in_.trace->name},
            {"requests", in_.trace->requests.size()},
            {"recorded_rate", in_.recorded_rate},
            {"span_s", to_seconds(span_of(*in_.trace)) * in_.recorded_rate / in_.rate},
            {"prompt_tokens", prompt / n},
            {"output_tokens", output_tokens_}}},
          {"menu", menu},
          {"tensor_parallel", in_.menu.tensor_parallel},
          {"max_instances", in_.menu.max_instances},
          {"mixed", in_.menu.mixed},
          {"deployments", kinds}};
}

Json reached_json(const Bound& bound, double ms) {
  return {{"metric", bound.metric}, {"percentile", bound.percentile}, {"bound", bound.ms}, {"value", ms}};
}

// What a deployment is, costs and carries; with figures, how it does at the rate.
Json Planner::option(const Chosen& c, bool with_figures) {
  const WorkerLayout& layout = layout_of(candidates_, c.best);
  const Rent& rent = candidates_.rents[layout.rent];
  Json instances = Json::object(), pools = Json::array();
  for (std::size_t o = 0; o < rent.counts.size(); ++o) {
    if (rent.counts[o] > 0) instances[in_.menu.offers[o].instance->name] = rent.counts[o];
  }
  for (std::size_t g = 0; g < layout.groups.size(); ++g) {
    const Group& group = layout.groups[g];
    pools.push_back({{"role", kRoles[layout.disaggregated() ? g : 2].name},
                     {"replicas", group.replicas},
                     {"tensor_parallel", group.tensor_parallel},
                     {"instance", in_.menu.offers[static_cast<std::size_t>(group.offer)].instance->name}});
  }
  Json json{{"name", name(c)},
            {"class", kClass[layout.disaggregated() ? 1 : 0]},
            {"kind", kKinds[c.best.kind].name},
            {"rented", name_of(rent, in_.menu.offers)},
            {"workers", workers_of(layout)},
            {"instances", instances},
            {"pools", pools},
            {"gpus", layout.gpus},
            {"idle_gpus", layout.idle},
            {"usd_per_hour", rent.usd_per_hour},
            {"usd_per_month", rent.usd_per_hour * kHoursAMonth}};
  const double capacity = c.best.step ? rate_at(in_.rate, *c.best.step) : 0;
  json["capacity"] = c.best.step ? Json(capacity) : Json();
  json["capacity_is_more"] = c.best.step && *c.best.step == kHighestStep;
  json["headroom"] = c.best.step ? Json(capacity / in_.rate) : Json();
  json["suffices"] = c.best.step && *c.best.step >= 0 && !failed_[c.unit];
  const Best& most = units_[c.unit].best;  // perhaps of a less simple kind
  json["most"] = most.step
                     ? Json{{"name", name({c.unit, most, 0})}, {"capacity", rate_at(in_.rate, *most.step)}}
                     : Json();
  if (!with_figures) return json;
  const Figures& f = figures(c);
  const Json& s = *f.summary;
  Json slo = Json::array();
  for (std::size_t b = 0; b < in_.bounds.size() && b < f.reached.ms.size(); ++b) {
    if (f.reached.ms[b] < 0) continue;  // does not apply
    slo.push_back(reached_json(in_.bounds[b], f.reached.ms[b]));
  }
  json["at_rate"] = {{"slo", slo},
                     {"in_slo", s["goodput"]["fraction"]},
                     {"usd_per_million_output_tokens", s["cost"]["usd_per_million_output_tokens"]},
                     {"usd_per_request_in_slo", s["cost"]["usd_per_request_in_slo"]},
                     {"billed_s", s["cost"]["billed_usd"].get<double>() / rent.usd_per_hour * 3600},
                     {"drain_s", f.drain_s},
                     {"bound_by", s["bound_by"]}};
  return json;
}

// The best of every rent in both classes, from the cheapest.
Json Planner::all_options() {
  std::vector<std::size_t> order(units_.size());
  for (std::size_t u = 0; u < order.size(); ++u) order[u] = u;
  std::ranges::stable_sort(order, {}, [&](std::size_t u) { return price_of(u, prices_); });
  Json list = Json::array();
  std::size_t given = 0;
  for (const std::size_t u : order) {
    const std::optional<Chosen> c = sufficient(u, prices_);
    const bool with_figures = c && (given < kFigures || figures_.contains(u));
    given += with_figures ? 1 : 0;
    const Chosen shown = c ? *c : Chosen{u, units_[u].best, price_of(u, prices_)};
    if (!shown.best.step) {  // the simplest kind stands for all that carry nothing
      Chosen none = shown;
      none.best.layout = units_[u].layouts.front();
      none.best.kind = units_[u].disaggregated ? 1 : 0;
      list.push_back(option(none, false));
    } else {
      list.push_back(option(shown, with_figures));
    }
  }
  return list;
}

// Cheapest USD per hour by rate, for both classes: constant up to each capacity.
Json Planner::curve() const {
  std::vector<double> ends;
  const auto cost = [&](bool disaggregated, double rate) -> std::optional<std::size_t> {
    std::optional<std::size_t> found;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const Unit& unit = units_[u];
      if (unit.disaggregated != disaggregated || !unit.best.step || rate_at(in_.rate, *unit.best.step) < rate)
        continue;
      if (!found || price_of(u, prices_) < price_of(*found, prices_)) found = u;
    }
    return found;
  };
  for (const Unit& unit : units_) {
    if (unit.best.step) ends.push_back(rate_at(in_.rate, *unit.best.step));
  }
  std::ranges::sort(ends);
  Json rows = Json::array(), cheaper = Json::array();
  double from = 0, most_colocated = 0, most = 0;
  for (const double end : ends) {
    if (end <= from) continue;
    Json row{{"from", from}, {"to", end}};
    std::array<std::optional<double>, 2> usd;
    for (const bool disaggregated : {false, true}) {
      const std::size_t i = disaggregated ? 1 : 0;
      const std::optional<std::size_t> u = cost(disaggregated, end);
      if (u) usd[i] = price_of(*u, prices_);
      const Best* best = u ? &units_[*u].best : nullptr;
      row[std::string(kClass[i])] =
          u ? Json{{"usd_per_hour", *usd[i]},
                   {"usd_per_million_output_tokens", *usd[i] / 3600 / end / output_tokens_ * 1e6},
                   {"name", name({*u, *best, 0})}}
            : Json();
      if (u && i == 0) most_colocated = end;
      if (u) most = end;
    }
    const bool wins = usd[1] && (!usd[0] || *usd[1] < *usd[0] * (1 - kTie));
    row["cheaper"] = wins ? kClass[1] : kClass[0];
    // A row that says nothing new continues the one before.
    const auto same = [&](const Json& before, std::size_t i) {
      const Json& side = before[std::string(kClass[i])];
      return side.is_null() ? !usd[i] : usd[i] && side["usd_per_hour"] == *usd[i];
    };
    if (!rows.empty() && same(rows.back(), 0) && same(rows.back(), 1)) {
      row["from"] = rows.back()["from"];
      rows.back() = row;
    } else {
      rows.push_back(row);
    }
    if (wins) {
      if (!cheaper.empty() && cheaper.back()["to"] == from) {
        cheaper.back()["to"] = end;
      } else {
        cheaper.push_back({{"from", from}, {"to", end}});
      }
    }
    from = end;
  }
  const double span = to_seconds(span_of(*in_.trace)) * in_.recorded_rate;  // x rate: of a request a second
  const double longest = span / kShortSeconds;  // the rate up to which the trace lasts long enough
  const auto flattered = static_cast<std::size_t>(
      std::ranges::count_if(rows, [&](const Json& row) { return row["to"].get<double>() > longest; }));
  std::string text;
  const std::string within = fmt::format("with at most {} instance{}", in_.menu.max_instances,
                                         in_.menu.max_instances == 1 ? "" : "s");
  const auto any = [&](bool disaggregated) {
    return std::ranges::any_of(
        units_, [&](const Unit& u) { return u.disaggregated == disaggregated && u.best.step; });
  };
  if (!tried(true) || !tried(false)) {
    text = fmt::format("Only {} deployments could be tried.", kClass[tried(true) ? 1 : 0]);
  } else if (!any(true)) {
    text = fmt::format("No disaggregated deployment meets the SLO {}.", within);
  } else if (!any(false)) {
    text = fmt::format("Only disaggregated deployments meet the SLO {}.", within);
  } else if (cheaper.empty()) {
    text = fmt::format("Disaggregation is never cheaper, up to {:.3g} requests/s {}.", most, within);
  } else {
    for (const Json& span : cheaper) {
      const double begin = span["from"].get<double>(), stop = span["to"].get<double>();
      text += text.empty() ? "Disaggregation is cheaper " : ", and ";
      if (stop >= most) {
        text += fmt::format("from {:.3g} requests/s on", begin);
      } else {
        text += fmt::format("between {:.3g} and {:.3g}", begin, stop);
      }
    }
    text += fmt::format(", as far as {:.3g} {}.", most, within);
    if (most > most_colocated) {
      text += fmt::format(" Beyond {:.3g} no colocated deployment meets the SLO.", most_colocated);
    }
  }
  Json json{{"rows", rows}, {"disaggregation_cheaper", cheaper}, {"text", text}};
  // Of the options on it those count that were run at the rate: the weakest evidence is the curve's.
  const Evidence* weakest = nullptr;
  for (const auto& [unit, f] : figures_) {
    if (units_[unit].best.step && (!weakest || f.evidence.grade > weakest->grade)) weakest = &f.evidence;
  }
  json["evidence"] = nullptr;
  std::string basis;
  if (weakest) {
    const std::string_view grade = kGradeNames[static_cast<std::size_t>(weakest->grade)];
    const auto median = [](const GradeError& e) { return e.known() ? Json(e.median) : Json(); };
    const Json errors{{"ttft", median(weakest->ttft)},
                      {"tpot", median(weakest->tpot)},
                      {"throughput", median(weakest->throughput)}};
    json["evidence"] = {{"grade", grade}, {"errors", errors}};
    std::string off;
    for (const auto& [key, what] :
         {std::pair("ttft", "TTFT"), std::pair("tpot", "TPOT"), std::pair("throughput", "throughput")}) {
      if (errors[key].is_null()) continue;
      off += fmt::format("{}{} by {:.0f} %", off.empty() ? "" : ", ", what, 100 * errors[key].get<double>());
    }
    basis = fmt::format(
        "Evidence: {}; {}.", grade,
        off.empty() ? "by how much its rates are off has not been measured"
                    : fmt::format("such runs are off in the median, {}, and its rates may be as far", off));
  }
  if (flattered > 0) {
    basis += fmt::format(
        "{}Above {:.3g} requests/s the trace lasts less than {:.0f} s: {} of the {} ranges end there, and "
        "what is "
        "carried is flattered.",
        basis.empty() ? "" : " ", longest, kShortSeconds, flattered, rows.size());
  }
  basis +=
      fmt::format("{}Capacities are searched in steps of {:.0f} %, and end before {} in a row that fail.",
                  basis.empty() ? "" : " ", 100 * (kGridStep - 1), kInARow);
  json["basis"] = basis;
  return json;
}

// What ends a capacity: the outcome of a run a step beyond it.
Json Planner::limit_of(const Chosen& c) {
  const int step = *c.best.step + 1;
  const RunOutcome out = tests_.whole(layout_of(candidates_, c.best), c.best.kind, step);
  const Reached reached = tests_.judged(out);
  Json missed = Json::array();
  std::string text, by;
  double worst = 1;
  for (std::size_t b = 0; b < in_.bounds.size() && b < reached.ms.size(); ++b) {
    const Bound& bound = in_.bounds[b];
    if (reached.ms[b] <= bound.ms) continue;
    missed.push_back(reached_json(bound, reached.ms[b]));
    text += fmt::format("{}{} {} is {:.4g} of {:.4g} ms", text.empty() ? "" : ", ",
                        name_of_metric(bound.metric), bound.percentile, reached.ms[b], bound.ms);
    if (reached.ms[b] / bound.ms <= worst) continue;
    worst = reached.ms[b] / bound.ms;
    by = bound.metric;
  }
  switch (reached.verdict) {
    case LoadVerdict::unserved: {
      const auto lost = std::ranges::count_if(
          out.result.requests, [](const RequestRecord& r) { return r.status != RequestStatus::completed; });
      by = "unserved";
      text = fmt::format("{} of {} requests are not served", lost, out.result.requests.size());
      break;
    }
    case LoadVerdict::saturated:
      by = "saturated";
      text =
          fmt::format("in its second half only {:.0f} % as many requests end as come", 100 * reached.ended);
      break;
    case LoadVerdict::slo:
      break;
    default:
      by = "stalled";
      text = "requests are left that nothing serves";
  }
  return {{"rate", rate_at(in_.rate, step)}, {"by", by}, {"missed", missed}, {"text", text}};
}

// Whether the capacity exceeds the rate by more than the simulator is known to be off by. How far a load is
// off is taken to be how far the figure is off that limits it.
Json Planner::margin_of(const Chosen& c, const Json& at_capacity) {
  const Json& limit = at_capacity["limit"];
  std::string by = limit.is_null() ? "" : limit["by"].get<std::string>();
  if (by.empty()) by = "throughput";  // beyond the grid
  const Evidence& evidence = figures(c).evidence;
  const bool first = by == "ttft_ms", each = by == "tpot_ms";
  const GradeError& error = first ? evidence.ttft : each ? evidence.tpot : evidence.throughput;
  const std::string figure = first || each ? name_of_metric(by) : "throughput";
  const double headroom = rate_at(1, *c.best.step);
  const bool known = error.known(), decided = known && headroom - 1 >= error.median;
  Json json{{"decided", decided}, {"margin", headroom - 1}, {"error", known ? Json(error.median) : Json()},
            {"figure", figure},   {"next", nullptr},        {"text", ""}};
  if (decided) return json;
  if (!known) {
    json["text"] = fmt::format(
        "UNDECIDED whether it suffices: it carries {:.0f} % more than is asked, and no measurement says how "
        "far "
        "off {}, which limits it, may be.",
        100 * (headroom - 1), figure);
    return json;
  }
  std::optional<Chosen> next;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (const Best& best : units_[u].by_kind) {
      const double usd = price_of(u, prices_);
      if (!best.step || rate_at(1, *best.step) - 1 < error.median || failed_[u]) continue;
      if (!next || usd < next->usd_per_hour) next = Chosen{u, best, usd};
    }
  }
  std::string text = fmt::format(
      "UNDECIDED whether it suffices: it carries {:.0f} % more than is asked, and {}, which limits it, is "
      "off by "
      "{:.0f} % in the median.",
      100 * (headroom - 1), figure, 100 * error.median);
  if (next) {
    const double more = rate_at(1, *next->best.step);
    json["next"] = {{"name", name(*next)},
                    {"usd_per_hour", next->usd_per_hour},
                    {"usd_per_month", next->usd_per_hour * kHoursAMonth},
                    {"headroom", more}};
    text += fmt::format(" With that much to spare: {}, {} USD a month, {:.2f} times what is asked.",
                        name(*next), grouped(next->usd_per_hour * kHoursAMonth), more);
  } else {
    text += " Nothing on the menu has that much to spare.";
  }
  json["text"] = text;
  return json;
}

// What a deployment does where it only just keeps up, and whether it keeps up beyond.
Json Planner::capacity_of(const Chosen& c) {
  const int step = *c.best.step;
  const WorkerLayout& layout = layout_of(candidates_, c.best);
  const RunOutcome out = tests_.whole(layout, c.best.kind, step);
  const Reached reached = tests_.judged(out);
  Json json{{"rate", rate_at(in_.rate, step)},
            {"span_s", to_seconds(span_of(*out.trace))},
            {"bound_by", (*out.summary)["bound_by"]}};
  double nearest = -1;
  for (std::size_t b = 0; b < in_.bounds.size() && b < reached.ms.size(); ++b) {
    const double share = reached.ms[b] / in_.bounds[b].ms;
    if (reached.ms[b] < 0 || share <= nearest) continue;
    nearest = share;
    json["nearest"] = reached_json(in_.bounds[b], reached.ms[b]);
  }
  json["limit"] = step < kHighestStep ? limit_of(c) : Json();
  for (int beyond = kInARow + 1; beyond <= kBeyond && step + beyond <= kHighestStep; ++beyond) {
    if (!tests_.keeps_up(layout, c.best.kind, step + beyond)) continue;
    not_monotone_.push_back(fmt::format("{} keeps up at {:.3g} requests/s although not at {:.3g}", name(c),
                                        rate_at(in_.rate, step + beyond), rate_at(in_.rate, step + 1)));
    break;
  }
  return json;
}

// ----------------------------------------------------------------------------------- what would flip it

Json percent_json(const std::optional<Chosen>& now, const std::optional<Chosen>& then) {
  if (!now || !then) return {};
  return 100 * (then->usd_per_hour / now->usd_per_hour - 1);
}

Json Planner::price_flips(const Pair& base) {
  Json list = Json::array();
  const std::optional<Chosen> now = winner(base);
  for (std::size_t o = 0; o < prices_.size(); ++o) {
    if (!in_.menu.offers[o].usd_per_hour) continue;
    const auto pair_at = [&](double factor) {
      Prices changed = prices_;
      changed[o] *= factor;
      return Pair{cheapest(false, changed), cheapest(true, changed)};
    };
    for (const double factor : {1 - kSwing, 1 + kSwing}) {
      const Pair pair = pair_at(factor);
      const std::optional<Chosen> then = winner(pair);
      const bool flips = differs(now, then);
      Json row{{"what", fmt::format("price of {}", in_.menu.offers[o].instance->name)},
               {"parameter", "price"},
               {"instance", in_.menu.offers[o].instance->name},
               {"factor", factor}};
      for (const std::size_t i : kSides) {
        row[std::string(kClass[i])] = {{"usd_per_hour_percent", percent_json(base[i], pair[i])},
                                       {"capacity_percent", 0.0}};
      }
      row["winner"] = then ? Json(name(*then)) : Json();
      row["flips"] = flips;
      row["at"] = nullptr;
      if (flips) {
        double same = 1, other = factor;
        for (int i = 0; i < 20; ++i) {
          const double middle = (same + other) / 2;
          (differs(now, winner(pair_at(middle))) ? other : same) = middle;
        }
        row["at"] = other;
      }
      list.push_back(std::move(row));
    }
  }
  return list;
}

// Of each rent that may do, its best layout.
std::optional<Chosen> Planner::cheapest_if(bool disaggregated, const WhatIf& what_if) {
  std::vector<Chosen> order;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    if (unit.disaggregated != disaggregated || !unit.best.step || *unit.best.step < kWithinReach) continue;
    order.push_back({u, unit.best, price_of(u, prices_)});
  }
  std::ranges::stable_sort(order, {}, &Chosen::usd_per_hour);
  for (const Chosen& c : order) {
    if (tests_.keeps_up(layout_of(candidates_, c.best), c.best.kind, 0, what_if)) return c;
  }
  return std::nullopt;
}

Json Planner::run_flips(const Pair& base) {
  struct Change {
    std::string_view what, parameter;
    WhatIf (*at)(double);
    bool network;
  };
  constexpr Change kChanges[] = {
      {"network bandwidth", "bandwidth",
       [](double f) {
         return WhatIf{f, 1};
       },
       true},
      {"prompt length", "prompts",
       [](double f) {
         return WhatIf{1, f};
       },
       false},
  };
  struct Task {
    const Change* change = nullptr;
    double factor = 1;
    std::size_t side = 0;
    std::optional<Chosen> then;
    std::optional<int> step;
  };
  std::vector<Task> tasks;
  for (const Change& change : kChanges) {
    for (const double factor : {1 - kSwing, 1 + kSwing}) {
      for (const std::size_t side : kSides) tasks.push_back({&change, factor, side, {}, {}});
    }
  }
  // Colocated workers hand nothing over: the network between nodes is none of theirs.
  const auto changes = [&](const Change& change, std::size_t side) { return !change.network || side == 1; };
  parallel_for(tasks.size(), options_.jobs, [&](std::size_t i) {
    Task& task = tasks[i];
    const WhatIf what_if = task.change->at(task.factor);
    const std::optional<Chosen>& now = base[task.side];
    if (!changes(*task.change, task.side)) {
      task.then = now;
      if (now) task.step = now->best.step;
      return;
    }
    task.then = cheapest_if(task.side == 1, what_if);
    if (!now) return;
    task.step = highest_step(
        [&](int step) {
          return tests_.keeps_up(layout_of(candidates_, now->best), now->best.kind, step, what_if);
        },
        *now->best.step);
  });
  const std::optional<Chosen> now = winner(base);
  Json list = Json::array();
  for (std::size_t i = 0; i < tasks.size(); i += 2) {
    const Task* side = &tasks[i];
    const Pair pair{side[0].then, side[1].then};
    const std::optional<Chosen> then = winner(pair);
    const bool flips = differs(now, then);
    Json row{{"what", side->change->what}, {"parameter", side->change->parameter}, {"factor", side->factor}};
    for (const std::size_t s : kSides) {
      const bool known = base[s] && side[s].step;
      row[std::string(kClass[s])] = {
          {"usd_per_hour_percent", percent_json(base[s], pair[s])},
          {"capacity_percent",
           known ? Json(100 * (rate_at(1, *side[s].step - *base[s]->best.step) - 1)) : Json()}};
    }
    row["winner"] = then ? Json(name(*then)) : Json();
    row["flips"] = flips;
    row["at"] = nullptr;
    if (flips) {
      double same = 1, other = side->factor;
      for (int round = 0; round < 4; ++round) {  // to 1 %
        const double middle = (same + other) / 2;
        Pair halfway;
        for (const std::size_t s : kSides) {
          halfway[s] = changes(*side->change, s) ? cheapest_if(s == 1, side->change->at(middle)) : base[s];
        }
        (differs(now, winner(halfway)) ? other : same) = middle;
      }
      row["at"] = other;
    }
    list.push_back(std::move(row));
  }
  return list;
}

Json Planner::flips(const Pair& base) {
  Json list = price_flips(base);
  for (Json& row : run_flips(base)) list.push_back(std::move(row));
  return list;
}

// ------------------------------------------------------------------------------------ what is left out

// Whether a kind that cannot be deployed today would be cheaper: known when it keeps up at the rate on a rent
// that costs less than what is recommended.
Json Planner::undeployable(const std::optional<Chosen>& recommended) {
  Json list = Json::array();
  for (const Needs& needs : excluded_kinds_) {
    Json features = Json::array();
    for (const Release& r : needs.features) {
      features.push_back({{"feature", r.feature}, {"since", r.since}, {"source", r.source}});
    }
    std::optional<Chosen> won;
    for (std::size_t u = 0; u < units_.size() && !won; ++u) {
      const Unit& unit = units_[u];
      if (unit.disaggregated != kKinds[needs.kind].disaggregated) continue;
      const double usd = price_of(u, prices_);
      if (recommended && usd >= recommended->usd_per_hour * (1 - kTie)) continue;
      std::vector<char> passes(unit.layouts.size());
      parallel_for(passes.size(), options_.jobs, [&](std::size_t l) {
        passes[l] = tests_.keeps_up(candidates_.layouts[unit.layouts[l]], needs.kind, 0) ? 1 : 0;
      });
      const auto first = std::ranges::find(passes, 1);
      if (first == passes.end()) continue;
      const auto l = static_cast<std::size_t>(first - passes.begin());
      won = Chosen{u, {0, unit.layouts[l], needs.kind}, usd};
    }
    list.push_back({{"kind", kKinds[needs.kind].name},
                    {"needs", features},
                    {"ever", !needs.never},
                    {"would_be_cheaper", won.has_value()},
                    {"name", won ? Json(name(*won)) : Json()},
                    {"usd_per_hour", won ? Json(won->usd_per_hour) : Json()}});
  }
  return list;
}

// Of all that do not suffice, the one that carries the most; of those that carry nothing, the first.
Json Planner::nearest_miss() {
  const Unit* most = nullptr;
  for (const Unit& unit : units_) {
    if (!tried(unit.disaggregated)) continue;
    if (!most || unit.best.step.value_or(kLowestStep - 1) > most->best.step.value_or(kLowestStep - 1))
      most = &unit;
  }
  if (most == nullptr) return {};
  Best best = most->best;
  if (!best.step) {
    best.layout = most->layouts.front();
    best.kind = *std::ranges::find(kinds_, most->disaggregated,
                                   [](std::size_t kind) { return kKinds[kind].disaggregated; });
  }
  const Chosen c{static_cast<std::size_t>(most - units_.data()), best, 0};
  const RunOutcome out = tests_.whole(layout_of(candidates_, best), best.kind, best.step ? 0 : kLowestStep);
  const Reached reached = tests_.judged(out);
  Json misses = Json::array();
  std::string by;
  for (std::size_t b = 0; b < in_.bounds.size() && b < reached.ms.size(); ++b) {
    const Bound& bound = in_.bounds[b];
    if (reached.ms[b] <= bound.ms) continue;
    misses.push_back({{"metric", bound.metric},
                      {"percentile", bound.percentile},
                      {"bound", bound.ms},
                      {"value", reached.ms[b]},
                      {"percent", 100 * (reached.ms[b] / bound.ms - 1)}});
    by += fmt::format("{}{} {} is {:.0f} ms, {:.0f} % above {:.0f}", by.empty() ? "" : ", ", bound.metric,
                      bound.percentile, reached.ms[b], 100 * (reached.ms[b] / bound.ms - 1), bound.ms);
  }
  if (by.empty()) {
    const Json& requests = (*out.summary)["requests"];
    const auto lost = requests["injected"].get<std::int64_t>() - requests["completed"].get<std::int64_t>();
    by = lost > 0 ? fmt::format("{} requests are not served", lost)
                  : fmt::format("in its second half only {:.0f} % as many requests end as come",
                                100 * reached.ended);
  }
  std::string help;
  if (best.step) {
    const double capacity = rate_at(in_.rate, *best.step);
    const auto needed =
        static_cast<int>(std::ceil(candidates_.rents[most->rent].instances() * in_.rate / capacity - 1e-9));
    help = fmt::format(
        "It carries {:.3g} requests/s. By that, about {} such instances would do: more max_instances; or a "
        "looser SLO.",
        capacity, needed);
  } else {
    help = fmt::format(
        "Even at {:.3g} requests/s, next to no load, it does not: a looser SLO, faster GPUs, or more tensor "
        "parallelism.",
        rate_at(in_.rate, kLowestStep));
  }
  Json json = option(c, false);
  json["rate"] = rate_at(in_.rate, best.step ? 0 : kLowestStep);
  json["misses"] = misses;
  json["text"] = fmt::format("At {:.3g} requests/s {}.", json["rate"].get<double>(), by);
  json["help"] = help;
  return json;
}

Json Planner::notes(const Pair& base) {
  Json list = Json::array();
  for (const std::string& assumption : in_.assumptions) list.push_back(assumption);
  list.push_back("Caches are empty when the trace begins. Nothing fails, and no machine is reclaimed.");
  const double span = to_seconds(span_of(*in_.trace)) * in_.recorded_rate;  // x rate: of a request a second
  if (span / in_.rate < kShortSeconds) {
    list.push_back(
        fmt::format("At {:.3g} requests/s the trace lasts {:.0f} s only: queues have little time to grow, so "
                    "that what is carried "
                    "is flattered. A longer trace says more.",
                    in_.rate, span / in_.rate));
  }
  for (const std::optional<Chosen>& c : base) {
    if (!c || span / rate_at(in_.rate, *c->best.step) >= kShortSeconds || span / in_.rate < kShortSeconds)
      continue;
    list.push_back(
        fmt::format("At its capacity of {:.3g} requests/s the trace lasts {:.0f} s only: that of {} is "
                    "flattered.",
                    rate_at(in_.rate, *c->best.step), span / rate_at(in_.rate, *c->best.step), name(*c)));
  }
  for (const std::string& text : not_monotone_) list.push_back("Not monotone in load: " + text + ".");
  return list;
}

// -------------------------------------------------------------------------------------------- the plan

Json Planner::plan() {
  Json report{{"schema", "pdsim.plan-report/1"}, {"name", in_.name}, {"status", kPlanStatus[0]}};
  bool colocated = false, disaggregated = false;
  for (const std::size_t kind : in_.kinds) (kKinds[kind].disaggregated ? disaggregated : colocated) = true;
  candidates_ = candidates_of(in_.base, in_.menu, colocated, disaggregated);
  sort_kinds();
  units_ = units_of(candidates_);
  failed_.assign(units_.size(), 0);
  report["question"] = question();
  report["recommendation"] = nullptr;
  std::optional<Chosen> recommended;
  try {
    search(units_, in_, candidates_, kinds_, tests_, options_.jobs);
    answer();
    recommended = winner(base_);
    if (recommended) {
      report["recommendation"] = option(*recommended, true);
      Json& best = report["recommendation"];
      best["at_capacity"] = best["margin"] = nullptr;  // until it is known
      best["at_capacity"] = capacity_of(*recommended);
      best["margin"] = margin_of(*recommended, best["at_capacity"]);
    }
    report["verdict"] = {{"text", verdict_.text},
                         {"decision", kDecisions[static_cast<std::size_t>(verdict_.decision)]},
                         {"margin", verdict_.margin},
                         {"error", verdict_.error},
                         {"evidence", kGradeNames[static_cast<std::size_t>(verdict_.evidence)]},
                         {"to_decide", verdict_.to_decide}};
    for (const std::size_t i : kSides) {
      Json& best = report[std::string(kClass[i])];
      if (!base_[i]) continue;
      best = option(*base_[i], true);
      best["at_capacity"] = nullptr;
      best["at_capacity"] = recommended && recommended->unit == base_[i]->unit
                                ? report["recommendation"]["at_capacity"]
                                : capacity_of(*base_[i]);
    }
    report["options"] = all_options();
    report["curve"] = curve();
    report["flips"] = recommended ? flips(base_) : Json::array();
    if (!recommended) report["nearest_miss"] = nearest_miss();
    report["undeployable"] = undeployable(recommended);
  } catch (const Interrupted&) {
    report["status"] = kPlanStatus[2];
    if (!report.contains("options")) {
      Json known = Json::array();
      for (std::size_t u = 0; u < units_.size(); ++u) {
        if (units_[u].best.step) known.push_back(option({u, units_[u].best, 0}, false));
      }
      report["options"] = std::move(known);
    }
  }
  if (report["status"] == kPlanStatus[0] && !recommended) report["status"] = kPlanStatus[1];
  report["excluded"] = Json::array();
  for (const Excluded& e : candidates_.excluded) {
    report["excluded"].push_back(
        {{"reason", e.reason}, {"candidates", e.candidates}, {"example", e.example}});
  }
  report["notes"] = notes(base_);
  std::int64_t count = 0;
  for (const Unit& unit : units_) {
    for (const std::size_t kind : kinds_) {
      if (kKinds[kind].disaggregated == unit.disaggregated) count += std::ssize(unit.layouts);
    }
  }
  report["search"] = {{"candidates", count},
                      {"runs", tests_.runs()},
                      {"abandoned", tests_.abandoned()},
                      {"requests_spared", tests_.spared()},
                      {"grid_step", kGridStep}};
  report["evidence"] = nullptr;
  report["scenario"] = nullptr;
  std::string profile;
  if (recommended) {
    const Figures& f = figures(*recommended);
    const auto error = [](const GradeError& e) {
      return Json{{"median", e.median}, {"p90", e.p90}, {"bias", e.bias}, {"n", e.n}, {"rows", e.rows}};
    };
    report["evidence"] = {{"grade", kGradeNames[static_cast<std::size_t>(f.evidence.grade)]},
                          {"text", f.evidence.text},
                          {"source", f.evidence.source},
                          {"to_do", f.evidence.to_do},
                          {"ttft", error(f.evidence.ttft)},
                          {"tpot", error(f.evidence.tpot)},
                          {"throughput", error(f.evidence.throughput)}};
    profile = (*f.summary)["inputs"]["profile"].get<std::string>();
    report["scenario"] =
        Json::parse(tests_.scenario(layout_of(candidates_, recommended->best), recommended->best.kind, 0));
  }
  report["inputs"] = {{"plan", in_.sha256},          {"scenario", in_.scenario_sha256},
                      {"trace", in_.trace->sha256},  {"profile", profile},
                      {"set", options_.replay.sets}, {"seed", in_.scenario.scenario.seed}};
  return report;
}

}  // namespace

Json make_plan(const PlanInput& input, const PlanOptions& options,
               const std::function<void(std::uint64_t)>& ran) {
  return Planner(input, options, ran).plan();
}

}  // namespace pdsim
