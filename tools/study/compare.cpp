#include "tools/study/compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "sim/core/error.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/statistics.hpp"
#include "tools/study/text.hpp"
#include "traces/resample.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// ------------------------------------------------------------------------------------------ refusals

struct Planned {
  LoadedScenario loaded;
  Deployment deployment;
};

bool allowed(const CompareOptions& options, std::string_view what) {
  return std::ranges::find(options.allow, what) != options.allow.end();
}

[[noreturn]] void refuse(const Compared& first, const Compared& other, std::string_view allow,
                         const std::string& what) {
  throw InputError(other.subject.spec.file, fmt::format("{}; '{}' and '{}' are compared only with --allow {}",
                                                        what, first.subject.name, other.subject.name, allow));
}

// The first leaf in which two documents differ, "pointer is A, but B in the other"; empty = none.
std::string first_difference(const ordered_json& a, const ordered_json& b, const std::string& pointer) {
  if (a.is_object() && b.is_object()) {
    for (const auto& [key, value] : a.items()) {
      const std::string at = pointer + "/" + key;
      if (at == "/workload/trace") continue;  // a path; its bytes are compared
      if (!b.contains(key)) return fmt::format("{} is not there, but {}", at, value.dump());
      if (std::string text = first_difference(value, b[key], at); !text.empty()) return text;
    }
    for (const auto& [key, value] : b.items()) {
      if (!a.contains(key)) return fmt::format("{}/{} is {}, but not there", pointer, key, value.dump());
    }
    return "";
  }
  return a == b ? "" : fmt::format("{} is {}, but {}", pointer, b.dump(), a.dump());
}

// Timings of kernels and of what serving takes beside them.
std::set<std::string> timings(const Deployment& d) {
  std::set<std::string> all;
  for (std::size_t begin = 0; begin <= d.profile_sha256.size();) {
    const std::size_t end = std::min(d.profile_sha256.find_first_of(", ", begin), d.profile_sha256.size());
    if (end > begin) all.insert(d.profile_sha256.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const PoolPlan& pool : d.pools) {
    all.insert("overheads " + pool.engine.overheads);
    for (const auto& [op, kernel] : pool.engine.kernels) all.insert(op + " by " + kernel);
  }
  return all;
}

std::string overheads_of(const Deployment& d) {
  std::set<std::string> names;
  for (const PoolPlan& pool : d.pools) names.insert(pool.engine.overheads);
  return fmt::format("{}", fmt::join(names, ", "));
}

// What answers: "llama-3.1-8b in bf16 with KV in bf16".
std::string model_of(const Deployment& d) {
  return fmt::format("{} in {} with KV in {}", d.model.name, name(d.weights), name(d.kv));
}

void check_comparable(const Compared& a, const Planned& first, const Compared& b, const Planned& other,
                      const CompareOptions& options) {
  const Scenario &s = first.loaded.scenario, &t = other.loaded.scenario;
  if (!allowed(options, "workload")) {
    const auto workload = [](const Planned& p) { return ordered_json::parse(p.loaded.in_force)["workload"]; };
    const std::string what = first_difference(workload(first), workload(other), "/workload");
    if (!what.empty()) refuse(a, b, "workload", what);
    if (s.workload.synthetic && s.seed != t.seed) {
      refuse(a, b, "workload",
             fmt::format("/seed, of the synthetic requests, is {}, but {}", t.seed, s.seed));
    }
  }
  const std::string model = model_of(first.deployment), others = model_of(other.deployment);
  if (!allowed(options, "model") && model != others) {
    refuse(a, b, "model", fmt::format("serves {}, but {}", others, model));
  }
  if (!allowed(options, "slo") && s.slo != t.slo) {
    const auto slo = [](const Planned& p) { return ordered_json::parse(p.loaded.in_force)["slo"]; };
    const std::string what = first_difference(slo(first), slo(other), "/slo");
    refuse(a, b, "slo", what.empty() ? "the SLOs differ" : what);
  }
  if (!allowed(options, "profiles") && timings(first.deployment) != timings(other.deployment)) {
    refuse(a, b, "profiles",
           fmt::format("its steps are timed by profile {} and overheads {}, but by {} and {}",
                       other.deployment.profile, overheads_of(other.deployment), first.deployment.profile,
                       overheads_of(first.deployment)));
  }
  if (allowed(options, "prices")) return;
  if (s.pricing.plan != t.pricing.plan) {
    refuse(a, b, "prices",
           fmt::format("/pricing/plan is \"{}\", but \"{}\"", t.pricing.plan, s.pricing.plan));
  }
  const auto usd = [](const NodePlan& node) {
    return node.usd_per_hour ? fmt::format("{} USD", *node.usd_per_hour) : std::string("not known");
  };
  for (const NodePlan& x : first.deployment.nodes) {
    for (const NodePlan& y : other.deployment.nodes) {
      if (x.instance == nullptr || x.instance != y.instance || x.usd_per_hour == y.usd_per_hour) continue;
      refuse(a, b, "prices", fmt::format("an hour of {} is {}, but {}", x.instance->name, usd(y), usd(x)));
    }
  }
}

// ------------------------------------------------------------------------------------------- figures

double share_of_prompts(const ordered_json& summary, const char* key) {
  const ordered_json& cache = summary["cache"];
  const auto prompts = cache["prompt_tokens"].get<double>();
  return prompts > 0 ? cache[key].get<double>() / prompts : kNone;
}

constexpr ComparedFigure kFigures[] = {
    {"requests", "completed", "requests.completed", false, 1, nullptr},
    {"requests", "not completed", "requests.not_completed", true, 1,
     [](const ordered_json& s) {
       return s["requests"]["injected"].get<double>() - s["requests"]["completed"].get<double>();
     }},
    {"TTFT, ms", "mean", "latency_ms.ttft.mean", true, 1, nullptr},
    {"TTFT, ms", "p50", "latency_ms.ttft.p50", true, 1, nullptr},
    {"TTFT, ms", "p95", "latency_ms.ttft.p95", true, 1, nullptr},
    {"TTFT, ms", "p99", "latency_ms.ttft.p99", true, 1, nullptr},
    {"TPOT, ms", "mean", "latency_ms.tpot.mean", true, 1, nullptr},
    {"TPOT, ms", "p50", "latency_ms.tpot.p50", true, 1, nullptr},
    {"TPOT, ms", "p95", "latency_ms.tpot.p95", true, 1, nullptr},
    {"TPOT, ms", "p99", "latency_ms.tpot.p99", true, 1, nullptr},
    {"ITL, ms", "mean", "latency_ms.itl.mean", true, 1, nullptr},
    {"ITL, ms", "p50", "latency_ms.itl.p50", true, 1, nullptr},
    {"ITL, ms", "p95", "latency_ms.itl.p95", true, 1, nullptr},
    {"ITL, ms", "p99", "latency_ms.itl.p99", true, 1, nullptr},
    {"end to end, ms", "mean", "latency_ms.e2e.mean", true, 1, nullptr},
    {"end to end, ms", "p50", "latency_ms.e2e.p50", true, 1, nullptr},
    {"end to end, ms", "p95", "latency_ms.e2e.p95", true, 1, nullptr},
    {"end to end, ms", "p99", "latency_ms.e2e.p99", true, 1, nullptr},
    {"goodput and cost", "within the SLO, %", "goodput.fraction", false, 100, nullptr},
    {"goodput and cost", "requests in SLO /s", "goodput.requests_per_s", false, 1, nullptr},
    {"goodput and cost", "output tokens/s/GPU", "throughput.output_tokens_per_s_per_gpu", false, 1, nullptr},
    {"goodput and cost", "USD / 1,000 in SLO", "cost.usd_per_request_in_slo", true, 1000, nullptr},
    {"goodput and cost", "USD / M output tokens", "cost.usd_per_million_output_tokens", true, 1, nullptr},
    {"KV cache", "handed over, GB", "transfers.bytes", true, 1e-9, nullptr},
    {"KV cache", "read back, GB", "transfers.read_back.bytes", true, 1e-9, nullptr},
    {"KV cache", "local hits, %", "cache.local_hit_fraction", false, 100,
     [](const ordered_json& s) { return share_of_prompts(s, "local_hit_tokens"); }},
    {"KV cache", "read-back hits, %", "cache.remote_hit_fraction", false, 100,
     [](const ordered_json& s) { return share_of_prompts(s, "remote_hit_tokens"); }},
    {"cost model", "extrapolated steps, %", "cost_model.extrapolated_step_fraction", true, 100, nullptr},
};

// A figure of a summary, not finite where it has none: no run of it completed, or its distribution is empty.
double figure_of(const ordered_json& summary, std::string_view path, std::string_view place) {
  const std::optional<double> value = number_at(summary, path, place);
  const std::size_t dot = path.rfind('.');
  if (!value || summary["requests"]["completed"] == 0) return kNone;
  if (dot != std::string_view::npos) {
    const std::string parent = fmt::format("/{}", path.substr(0, dot));
    std::string pointer = parent;
    std::ranges::replace(pointer, '.', '/');
    const ordered_json::json_pointer at(pointer);
    if (summary.contains(at) && summary[at].is_object() && summary[at].value("n", ordered_json(1)) == 0) {
      return kNone;
    }
  }
  return *value;
}

// The values that a mean is over; none when one of them is missing.
std::vector<double> counted(const Comparison& c, std::span<const double> values) {
  std::vector<double> finite;
  for (const double v : values) {
    if (std::isfinite(v)) finite.push_back(v);
  }
  if (!c.interrupted && finite.size() < values.size()) finite.clear();
  return finite;
}

// -------------------------------------------------------------------------------------- per request

struct Pair {
  const RequestRecord* before = nullptr;
  const RequestRecord* after = nullptr;
  const Request* request = nullptr;

  double stage_ms(std::size_t i) const { return to_ms(after->stages[i] - before->stages[i]); }
};

double ttft_of(const RequestRecord& r) {
  return to_ms(r.first_token - r.arrival);
}
double e2e_of(const RequestRecord& r) {
  return to_ms(r.e2e());
}

enum class Way : std::uint8_t { faster, same, slower };

Way way_of(double before, double after) {
  if (std::abs(after - before) < kSameShare * before || after == before) return Way::same;
  return after < before ? Way::faster : Way::slower;
}

constexpr std::size_t kDecode = static_cast<std::size_t>(Stage::decode);

Shift shift_of(const std::vector<Pair>& pairs, double (*latency)(const RequestRecord&), bool with_decode) {
  Shift s;
  std::vector<double> all, faster_prompts, slower_prompts;
  double sum = 0;
  for (const Pair& p : pairs) {
    const double before = latency(*p.before), change = latency(*p.after) - before;
    all.push_back(change);
    sum += change;
    const Way way = way_of(before, before + change);
    if (way == Way::same) {
      ++s.same;
      continue;
    }
    const bool faster = way == Way::faster;
    ++(faster ? s.faster : s.slower);
    (faster ? s.faster_ms : s.slower_ms) += change;
    (faster ? faster_prompts : slower_prompts).push_back(p.before->prompt_tokens);
    for (std::size_t i = 0; i < kStageNames.size(); ++i) {
      if (i != kDecode || with_decode) (faster ? s.faster_stages_ms : s.slower_stages_ms)[i] += p.stage_ms(i);
    }
  }
  if (all.empty()) return s;
  const auto divide = [](double& total, std::size_t n) {
    total = n > 0 ? total / static_cast<double>(n) : 0;
  };
  for (double& ms : s.faster_stages_ms) divide(ms, s.faster);
  for (double& ms : s.slower_stages_ms) divide(ms, s.slower);
  divide(s.faster_ms, s.faster);
  divide(s.slower_ms, s.slower);
  s.mean_ms = sum / static_cast<double>(all.size());
  std::sort(all.begin(), all.end());
  for (std::size_t q = 0; q < kShiftQuantiles.size(); ++q) {
    s.quantiles_ms[q] = percentile_of(all, kShiftQuantiles[q]);
  }
  if (s.faster > 0) s.faster_prompt = percentile_of(faster_prompts, 50);
  if (s.slower > 0) s.slower_prompt = percentile_of(slower_prompts, 50);
  return s;
}

void add_group(std::vector<ShiftGroup>& groups, std::string_view by, std::string name,
               const std::vector<Pair>& pairs, const std::function<bool(const Pair&)>& in) {
  ShiftGroup group{std::string(by), std::move(name)};
  for (const Pair& p : pairs) {
    if (!in(p)) continue;
    ++group.requests;
    const double before = ttft_of(*p.before), after = ttft_of(*p.after);
    const Way way = way_of(before, after);
    if (way == Way::faster) ++group.faster;
    if (way == Way::slower) ++group.slower;
    group.ttft_ms += after - before;
    group.e2e_ms += e2e_of(*p.after) - e2e_of(*p.before);
  }
  if (group.requests == 0) return;
  group.ttft_ms /= static_cast<double>(group.requests);
  group.e2e_ms /= static_cast<double>(group.requests);
  groups.push_back(std::move(group));
}

std::vector<ShiftGroup> groups_of(const std::vector<Pair>& pairs) {
  std::vector<ShiftGroup> groups;
  std::vector<double> prompts;
  for (const Pair& p : pairs) prompts.push_back(p.before->prompt_tokens);
  std::int32_t below = -1;
  for (const double quarter : {25.0, 50.0, 75.0, 100.0}) {  // equal lengths stay together
    const auto upto = static_cast<std::int32_t>(percentile_of(prompts, quarter));
    if (upto <= below) continue;
    add_group(groups, "prompt tokens",
              below < 0 ? fmt::format("up to {}", grouped(upto))
                        : fmt::format("{} to {}", grouped(below + 1), grouped(upto)),
              pairs, [below, upto](const Pair& p) {
                return p.before->prompt_tokens > below && p.before->prompt_tokens <= upto;
              });
    below = upto;
  }
  const auto in_session = [](const Pair& p) { return p.request->session >= 0; };
  if (std::ranges::any_of(pairs, in_session)) {
    add_group(groups, "turn", "first of its session", pairs,
              [&](const Pair& p) { return in_session(p) && p.request->turn == 0; });
    add_group(groups, "turn", "later", pairs,
              [&](const Pair& p) { return in_session(p) && p.request->turn > 0; });
    add_group(groups, "turn", "of no session", pairs, [&](const Pair& p) { return !in_session(p); });
  }
  for (std::size_t i = 1; i < kReuseNames.size(); ++i) {
    add_group(groups, "reuse", std::string(kReuseNames[i]), pairs,
              [i](const Pair& p) { return static_cast<std::size_t>(p.after->reuse) == i; });
  }
  return groups;
}

std::string percent(std::size_t part, std::size_t all) {
  return fmt::format("{:.0f} %", 100.0 * static_cast<double>(part) / static_cast<double>(all));
}

std::string signed_ms(double ms) {
  return fmt::format("{:+.{}f} ms", ms, std::abs(ms) < 9.95 ? 1 : 0);
}

// The one or two stages that did most of it.
std::string blamed(const std::array<double, kStageNames.size()>& stages, double total) {
  std::vector<std::size_t> order(stages.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const double sign = total < 0 ? -1 : 1;
  std::ranges::stable_sort(order, std::greater{}, [&](std::size_t i) { return sign * stages[i]; });
  std::string text = fmt::format("{} {}", kStageNames[order[0]], signed_ms(stages[order[0]]));
  constexpr double kWorthNaming = 0.2;  // chosen: of the whole difference
  if (sign * stages[order[1]] > kWorthNaming * sign * total) {
    text += fmt::format(", {} {}", kStageNames[order[1]], signed_ms(stages[order[1]]));
  }
  return text;
}

std::string sentence_of(const Shift& s, std::string_view latency, std::size_t all) {
  if (s.faster + s.slower == 0) {
    return fmt::format("{}: all {} requests are the same to within {:.0f} %.", latency,
                       grouped(static_cast<double>(all)), kSameShare * 100);
  }
  std::vector<std::string> parts;
  const auto part = [&](std::size_t n, std::string_view way, double ms, const auto& stages) {
    if (n == 0) return;
    parts.push_back(fmt::format("{} {} {}, by {} in the mean, of which {}", percent(n, all),
                                parts.empty() ? "of requests are" : "are", way,
                                signed_ms(std::abs(ms)).substr(1), blamed(stages, ms)));
  };
  part(s.faster, "faster", s.faster_ms, s.faster_stages_ms);
  part(s.slower, "slower", s.slower_ms, s.slower_stages_ms);
  std::string text = fmt::format("{}: {}", latency, fmt::join(parts, "; "));
  // Said where it tells the two apart: a factor, and enough of each.
  constexpr double kApart = 1.5, kEnough = 0.02;  // chosen
  const double least = kEnough * static_cast<double>(all);
  const auto [shorter, longer] = std::minmax(s.faster_prompt, s.slower_prompt);
  if (static_cast<double>(s.faster) >= least && static_cast<double>(s.slower) >= least &&
      longer >= kApart * shorter) {
    text += fmt::format("; the slower have the {} prompts (median {} tokens against {})",
                        s.slower_prompt < s.faster_prompt ? "shorter" : "longer", grouped(s.slower_prompt),
                        grouped(s.faster_prompt));
  }
  return text + ".";
}

bool same_requests(const Trace& a, const Trace& b) {
  return &a == &b || std::ranges::equal(a.requests, b.requests, [](const Request& x, const Request& y) {
    return x.arrival == y.arrival && x.prompt_tokens == y.prompt_tokens && x.output_tokens == y.output_tokens;
  });
}

RunDifference difference_of(const Compared& baseline, const Compared& run, std::size_t index) {
  RunDifference d;
  d.run = index;
  if (!baseline.outcome.summary || !run.outcome.summary) {
    d.unpaired = fmt::format("'{}' was not run", (run.outcome.summary ? baseline : run).subject.name);
    return d;
  }
  if (!same_requests(*baseline.outcome.trace, *run.outcome.trace)) {
    d.unpaired = "the workloads differ, so requests have no counterparts";
    return d;
  }
  std::vector<Pair> pairs;
  const auto &before = baseline.outcome.result.requests, &after = run.outcome.result.requests;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!before[i].counted && !after[i].counted) continue;
    const bool one = before[i].status == RequestStatus::completed,
               two = after[i].status == RequestStatus::completed;
    if (one && two) {
      ++d.both;
      if (before[i].first_token >= 0 && after[i].first_token >= 0) {
        pairs.push_back({&before[i], &after[i], &baseline.outcome.trace->requests[i]});
      }
    } else {
      ++(one ? d.only_baseline : two ? d.only_run : d.neither);
    }
  }
  if (pairs.empty()) {
    d.unpaired = "no request completed in both";
    return d;
  }
  d.ttft = shift_of(pairs, ttft_of, false);
  d.e2e = shift_of(pairs, e2e_of, true);
  for (std::size_t i = 0; i < kStageNames.size(); ++i) {
    for (const Pair& p : pairs) d.stages_ms[i] += p.stage_ms(i);
    d.stages_ms[i] /= static_cast<double>(pairs.size());
  }
  d.groups = groups_of(pairs);
  d.text = {sentence_of(d.ttft, "TTFT", pairs.size()), sentence_of(d.e2e, "End to end", pairs.size())};
  return d;
}

// ------------------------------------------------------------------------------------------ equality

Equality equality_of(const std::vector<Compared>& runs) {
  Equality e;
  std::vector<const Compared*> able;
  for (const Compared& run : runs) {
    if (run.subject.cannot.empty()) able.push_back(&run);
  }
  if (able.empty()) return {false, {}, "nothing can be run"};
  const Compared& first = *able.front();
  e.gpus = std::ranges::all_of(able, [&](const Compared* r) { return r->gpus == first.gpus; });
  if (std::ranges::all_of(able, [](const Compared* r) { return r->usd_per_hour.has_value(); })) {
    constexpr double kRounding = 1e-9;
    e.usd_per_hour = std::ranges::all_of(able, [&](const Compared* r) {
      return std::abs(*r->usd_per_hour - *first.usd_per_hour) <= kRounding * *first.usd_per_hour;
    });
  }
  const auto gpus = [](const Compared& r) {
    std::vector<std::string> kinds;
    for (const auto& [gpu, n] : r.gpus) kinds.push_back(fmt::format("{} {}", n, gpu));
    return fmt::format("{}", fmt::join(kinds, " + "));
  };
  const auto usd = [](const Compared& r) {
    return r.usd_per_hour ? fmt::format("{:.2f} USD/h", *r.usd_per_hour) : std::string("no price");
  };
  const auto each = [&](const auto& text) {
    std::vector<std::string> all;
    for (const Compared* r : able) all.push_back(fmt::format("{} {}", r->subject.name, text(*r)));
    return fmt::format("{}", fmt::join(all, ", "));
  };
  e.text = e.gpus ? fmt::format("equal GPUs: {} held by each", gpus(first))
                  : fmt::format("NOT equal GPUs: {}", each(gpus));
  e.text += !e.usd_per_hour   ? "; whether the spend is equal is not known, for want of a price"
            : *e.usd_per_hour ? fmt::format("; equal spend: {} each", usd(first))
                              : fmt::format("; NOT equal spend: {}", each(usd));
  return e;
}

// Percentiles that few requests decide: "p99 of TTFT (5 of 500)".
constexpr double kFewBeyond = 10;  // chosen: a Poisson count of 10 is known to a third

std::optional<std::string> few_beyond(const std::vector<Compared>& runs) {
  std::vector<std::string> few;
  double least = -1;
  for (const char* percentile : {"p95", "p99"}) {
    const double share = percentile == std::string_view("p95") ? 0.05 : 0.01;
    for (const Compared& run : runs) {
      if (!run.outcome.summary) continue;
      const auto n = (*run.outcome.summary)["latency_ms"]["ttft"]["n"].get<double>();
      if (n <= 0 || n * share >= kFewBeyond) continue;
      if (few.empty() || few.back() != percentile) few.emplace_back(percentile);
      least = least < 0 ? n : std::min(least, n);
    }
  }
  if (few.empty()) return {};
  return fmt::format("Of {} requests fewer than 10 lie beyond {}: chance weighs heavily on {}.",
                     grouped(least), fmt::join(few, " and "), few.size() == 1 ? "it" : "them");
}

// Replications that leave a run without means: which, and why.
void note_missing(Comparison& c, const Compared& run) {
  for (std::size_t r = 0; r < run.stalls.size(); ++r) {
    if (!run.stalls[r].empty()) {
      c.notes.push_back(
          fmt::format("Replication {} of '{}' stalled and has no figures, so neither have its means and "
                      "intervals: {}",
                      r + 1, run.subject.name, run.stalls[r]));
      continue;
    }
    std::vector<std::string_view> missing;
    const auto check = [&](std::string_view path, const std::vector<double>& values) {
      const bool some = std::ranges::any_of(values, [](double v) { return std::isfinite(v); });
      if (some && !std::isfinite(values[r]) && std::ranges::find(missing, path) == missing.end()) {
        missing.push_back(path);
      }
    };
    for (std::size_t f = 0; f < std::size(kFigures); ++f) check(kFigures[f].path, run.figures[f]);
    check(c.objective.path, run.objective);
    if (missing.empty()) continue;
    c.notes.push_back(fmt::format("Replication {} of '{}' has no {}: without a mean and an interval.", r + 1,
                                  run.subject.name, fmt::join(missing, ", ")));
  }
}

void add_notes(Comparison& c, bool slo, bool goodput_for_want) {
  if (!slo) c.notes.emplace_back("No SLO is set: every completed request counts as within it.");
  if (goodput_for_want) {
    c.notes.emplace_back(
        "Not every instance has a known price, so the objective is goodput and not dollars.");
  }
  if (auto few = few_beyond(c.runs)) {
    if (c.replications > 1) *few += " The intervals say how much.";
    if (c.replications == 1) *few += " --replications shows how much.";
    c.notes.push_back(*few);
  }
  for (const Compared& run : c.runs) {
    if (!run.subject.cannot.empty()) {
      c.notes.push_back(fmt::format("'{}' is not run: {}.", run.subject.name, run.subject.cannot));
      continue;
    }
    if (c.replications > 1 && !c.interrupted) note_missing(c, run);
    if (!run.outcome.summary) continue;
    const ordered_json& requests = (*run.outcome.summary)["requests"];
    if (run.outcome.result.status == RunStatus::stalled) {
      if (c.replications == 1) {
        c.notes.push_back(fmt::format("'{}' stalled: {}", run.subject.name, run.outcome.result.stall));
      }
    } else if (requests["completed"] == 0) {
      c.notes.push_back(fmt::format("'{}' completed no request.", run.subject.name));
    } else if (run.outcome.result.status == RunStatus::finished &&
               requests["completed"] != requests["injected"]) {
      std::vector<std::string> reasons;
      for (const auto& [reason, n] : requests["by_reason"].items()) {
        reasons.push_back(fmt::format("{} {}", n.get<std::uint64_t>(), reason));
      }
      c.notes.push_back(
          fmt::format("'{}' completed {} of {} requests ({}); its latencies are of those that it completed.",
                      run.subject.name, grouped(requests["completed"].get<double>()),
                      grouped(requests["injected"].get<double>()), fmt::join(reasons, ", ")));
    }
    if (run.outcome.loaded.scenario.transfer.bidirectional && run.outcome.trace->sessions.empty()) {
      c.notes.push_back(
          fmt::format("The trace has no sessions, so reading back changes nothing in '{}'; "
                      "--infer-sessions finds them by their prompts.",
                      run.subject.name));
    }
    if (run.outcome.result.hypothetical) {
      c.notes.push_back(
          fmt::format("'{}' combines what no engine does: it is hypothetical.", run.subject.name));
    }
  }
}

Verdict judged(const Comparison& c, std::span<const std::size_t> which) {
  std::vector<Contender> contenders;
  for (const std::size_t i : which) {
    contenders.push_back(contender_of(c, c.runs[i], c.runs[i].objective));
  }
  Verdict verdict = judge(c.objective, contenders);
  for (auto* index : {&verdict.winner, &verdict.recommended, &verdict.second}) {
    if (*index) *index = which[**index];
  }
  return verdict;
}

// Equal names get a number: "a", "a (2)".
void make_unique(std::vector<Subject>& subjects) {
  std::set<std::string> taken;
  for (Subject& subject : subjects) {
    const std::string name = subject.name;
    for (int n = 2; !taken.insert(subject.name).second; ++n) subject.name = fmt::format("{} ({})", name, n);
  }
}

std::size_t baseline_of(const std::vector<Subject>& subjects, const std::string& name) {
  if (name.empty()) return 0;
  std::vector<std::string_view> names;
  for (const Subject& subject : subjects) names.push_back(subject.name);
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    throw InputError("--baseline", fmt::format("'{}' is none of the runs{}, expected one of {}", name,
                                               did_you_mean(name, names), fmt::join(names, ", ")));
  }
  return static_cast<std::size_t>(found - names.begin());
}

void describe(Compared& run, const Planned& planned) {
  const Scenario& s = planned.loaded.scenario;
  run.kind = deployment_kind(s);
  run.complexity = complexity(s);
  double usd = 0;
  bool known = !planned.deployment.nodes.empty();
  for (std::size_t n = 0; n < planned.deployment.nodes.size(); ++n) {
    const NodePlan& node = planned.deployment.nodes[n];
    run.gpus[node.gpu->name] += node.gpus_held;
    run.gpus_rented += planned.deployment.topology.nodes[n].gpus;
    known = known && node.usd_per_hour.has_value();
    usd += node.usd_per_hour.value_or(0);
  }
  if (known) run.usd_per_hour = usd;
}

}  // namespace

std::span<const ComparedFigure> compared_figures() {
  return kFigures;
}

int Compared::gpus_held() const {
  int held = 0;
  for (const auto& [gpu, n] : gpus) held += n;
  return held;
}

double Compared::completed() const {
  static_assert(kFigures[0].path == "requests.completed" && kFigures[1].path == "requests.not_completed");
  double done = 0, all = 0;
  for (std::size_t r = 0; !figures.empty() && r < figures[0].size(); ++r) {
    if (!std::isfinite(figures[0][r]) || !std::isfinite(figures[1][r])) continue;
    done += figures[0][r];
    all += figures[0][r] + figures[1][r];
  }
  return all > 0 ? done / all : 1;
}

std::optional<double> mean_of(const Comparison& c, std::span<const double> values) {
  const std::vector<double> all = counted(c, values);
  if (all.empty()) return {};
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

std::optional<Interval> interval_of(const Comparison& c, const Compared& run,
                                    std::span<const double> values) {
  return interval_of(counted(c, values), run.replicated);
}

Contender contender_of(const Comparison& c, const Compared& run, std::span<const double> values) {
  Contender contender;
  contender.name = run.subject.name;
  contender.value = mean_of(c, values);
  if (c.replications > 1) contender.replications.assign(values.begin(), values.end());
  contender.evidence = run.evidence;
  contender.complexity = run.complexity;
  contender.replicated = run.replicated;
  contender.completed = run.completed();
  return contender;
}

Comparison compare(std::vector<Subject> subjects, const CompareOptions& options) {
  for (const std::string& what : options.allow) {
    if (std::ranges::find(kAllowed, what) != std::end(kAllowed)) continue;
    throw InputError("--allow", fmt::format("'{}' is nothing that may differ{}, expected one of {}", what,
                                            did_you_mean(what, kAllowed), fmt::join(kAllowed, ", ")));
  }
  Comparison c;
  make_unique(subjects);
  c.baseline = baseline_of(subjects, options.baseline);
  c.replications = options.replications;

  // Everything that can be known before the first run.
  std::vector<Planned> planned(subjects.size());
  std::vector<std::size_t> able;
  for (std::size_t i = 0; i < subjects.size(); ++i) {
    Compared run;
    run.subject = std::move(subjects[i]);
    if (run.subject.cannot.empty()) {
      planned[i].loaded = load_run(run.subject.spec);
      planned[i].deployment = plan_deployment(planned[i].loaded);
      describe(run, planned[i]);
      able.push_back(i);
    }
    c.runs.push_back(std::move(run));
  }
  if (able.empty()) {
    throw InputError(c.runs.front().subject.spec.file,
                     fmt::format("nothing can be run: {}", c.runs.front().subject.cannot));
  }
  const std::size_t first = able.front();
  if (options.baseline.empty()) c.baseline = first;
  for (const std::size_t i : able) {
    check_comparable(c.runs[first], planned[first], c.runs[i], planned[i], options);
  }
  const bool slo =
      std::ranges::none_of(able, [&](std::size_t i) { return planned[i].loaded.scenario.slo.empty(); });
  if (!slo && options.needs_slo) {
    throw InputError("--fail-on",
                     "is slo, but a scenario has none; expected slo.ttft_ms or slo.tpot_ms, in the "
                     "scenario or by --set");
  }
  c.equal = equality_of(c.runs);
  const bool priced =
      std::ranges::all_of(able, [&](std::size_t i) { return c.runs[i].usd_per_hour.has_value(); });
  c.objective = find_objective(!options.objective.empty() ? options.objective
                               : priced                   ? "usd_per_request_in_slo"
                                                          : "goodput",
                               "--objective");

  TraceStore store(options.quiet);
  std::vector<std::shared_ptr<const Trace>> traces(c.runs.size());
  std::uint64_t requests = 0;
  for (const std::size_t i : able) {
    traces[i] = store.get(planned[i].loaded);
    requests += traces[i]->requests.size();
    const Trace &one = *traces[first], &other = *traces[i];
    if (!allowed(options, "workload") && (one.sha256 != other.sha256 || !same_requests(one, other))) {
      refuse(c.runs[first], c.runs[i], "workload",
             fmt::format("/workload/trace, {}, has other requests than {}", other.name, one.name));
    }
  }
  std::set<std::string_view> ways;
  for (const std::size_t i : able) {
    const bool synthetic = planned[i].loaded.scenario.workload.synthetic.has_value();
    c.runs[i].replicated = synthetic ? Replicated::seeds : Replicated::sessions;
    ways.insert(kReplicatedNames[static_cast<std::size_t>(c.runs[i].replicated)]);
  }
  if (c.replications > 1) c.replicated_by = fmt::format("{}", fmt::join(ways, " and "));

  const auto replications = static_cast<std::size_t>(c.replications);
  for (const std::size_t i : able) {
    c.runs[i].figures.assign(std::size(kFigures), std::vector<double>(replications, kNone));
    c.runs[i].objective.assign(replications, kNone);
    c.runs[i].stalls.assign(replications, "");
  }
  std::mutex mutex;
  std::uint64_t done = 0;
  bool interrupted = false;
  const auto work = [&](std::size_t index) {
    const std::size_t replication = index / able.size(), i = able[index % able.size()];
    Compared& run = c.runs[i];
    if (options.interrupted && options.interrupted()) {
      const std::lock_guard lock(mutex);
      interrupted = true;
      return;
    }
    RunSpec spec = run.subject.spec;
    if (replication > 0) spec.options.seed = planned[i].loaded.scenario.seed + replication;
    LoadedScenario loaded = load_run(spec);
    std::shared_ptr<const Trace> trace = traces[i];
    if (replication > 0 && loaded.scenario.workload.synthetic) {
      TraceStore own;
      trace = own.get(loaded);
    } else if (replication > 0) {
      trace = std::make_shared<const Trace>(resample_sessions(*trace, replication));
    }
    RunHooks hooks;
    hooks.interrupted = options.interrupted;
    std::uint64_t seen = 0;
    const auto count = [&](std::uint64_t now) {
      const std::lock_guard lock(mutex);
      done += now - seen;
      seen = now;
      if (options.progress) options.progress(done, requests * replications);
    };
    hooks.progress = [&](std::uint64_t now, std::uint64_t) { count(now); };
    RunOutcome outcome = run_on(std::move(loaded), spec.options, std::move(trace), hooks);
    count(traces[i]->requests.size());
    const ordered_json& summary = *outcome.summary;
    const bool finished = outcome.result.status == RunStatus::finished;
    const double value = figure_of(summary, c.objective.path, "--objective");
    const bool stalled = outcome.result.status == RunStatus::stalled;
    // Who interrupts sees what there is, marked as such; of a run that stalled only the counts mean anything.
    const bool shown = finished || (!stalled && replication == 0);
    for (std::size_t f = 0; f < std::size(kFigures); ++f) {
      const ComparedFigure& figure = kFigures[f];
      const bool counts = figure.section == "requests";
      if (!shown && !(stalled && counts)) continue;
      run.figures[f][replication] = figure.derived != nullptr ? figure.derived(summary)
                                    : counts                  ? *number_at(summary, figure.path, "compare")
                                                              : figure_of(summary, figure.path, "compare");
    }
    if (finished) run.objective[replication] = value;
    if (stalled) run.stalls[replication] = outcome.result.stall;
    if (outcome.result.status == RunStatus::interrupted) {
      const std::lock_guard lock(mutex);
      interrupted = true;
    }
    if (replication > 0) return;
    run.evidence = evidence_of(outcome.deployment, summary);
    run.outcome = std::move(outcome);
  };
  parallel_for(able.size() * replications, options.jobs, work);
  c.interrupted = interrupted;

  std::vector<std::size_t> all(c.runs.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  if (!c.interrupted) {
    c.verdict = judged(c, all);
  } else {
    c.verdict.text = "Interrupted: there is no verdict.";
  }
  if (c.runs[c.baseline].subject.cannot.empty()) {
    for (std::size_t i = 0; i < c.runs.size(); ++i) {
      if (i == c.baseline || !c.runs[i].subject.cannot.empty()) continue;
      c.differences.push_back(difference_of(c.runs[c.baseline], c.runs[i], i));
    }
  }
  add_notes(c, slo, options.objective.empty() && !priced);
  return c;
}

std::vector<std::string> missed_slo(const ordered_json& summary) {
  std::vector<std::string> missed;
  for (const auto& [metric, percentiles] : summary["goodput"]["slo"].items()) {
    for (const auto& [percentile, of] : percentiles.items()) {
      if (of["met"].get<bool>()) continue;
      missed.push_back(of["value"].is_null()
                           ? fmt::format("{} {} has no value, since no request completed", metric, percentile)
                           : fmt::format("{} {} is {:.5g}, above {:g}", metric, percentile,
                                         of["value"].get<double>(), of["bound"].get<double>()));
    }
  }
  return missed;
}

std::vector<std::string> regressions(const Comparison& c) {
  std::vector<std::string> worse;
  const auto was_run = [](const Compared& run) { return run.outcome.summary != nullptr; };
  const auto first = static_cast<std::size_t>(std::ranges::find_if(c.runs, was_run) - c.runs.begin());
  for (std::size_t i = first + 1; i < c.runs.size() && !c.interrupted; ++i) {
    if (!was_run(c.runs[i])) continue;
    const std::size_t both[] = {first, i};
    const Verdict verdict = judged(c, both);
    if (verdict.decision != Decision::decided || verdict.winner != first) continue;
    worse.push_back(first == 0 ? verdict.text
                               : fmt::format("against '{}', the first that could be run: {}",
                                             c.runs[first].subject.name, verdict.text));
  }
  return worse;
}

}  // namespace pdsim
