#include "tools/study/thresholds.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "sim/core/error.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/statistics.hpp"
#include "tools/study/text.hpp"
#include "traces/reader.hpp"
#include "traces/reshape.hpp"
#include "traces/sessions.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

// vLLM's own.
const std::int32_t kVllmThreshold = TransferConfig{}.kv_recompute_threshold;
const double kVllmTtl = to_seconds(TransferConfig{}.decoder_kv_blocks_ttl);
const double kVllmRouterShare =
    to_seconds(TransferConfig{}.decoder_kv_blocks_ttl - RouterConfig{}.session_kv_ttl) / kVllmTtl;

// What is tried unless it is given. Chosen: thresholds four times as large each, which is as coarse as a
// plateau of hundreds of tokens allows; the TTLs that just hold the KV of these shares of the turns that go
// on.
constexpr std::int32_t kThresholdStep = 4;
constexpr double kShares[] = {25, 50, 75, 90, 100};
constexpr double kBriefest = 1;  // s: nothing is read, little is held
constexpr int kRounds = 2;       // of closing in on the plateau's ends, each halves the gap, by its logarithm
constexpr int kMostRounds = 8;   // of following the best pair when a closer look has moved it

double ttl_for(double gap_s, double margin_s) {
  return std::max(gap_s + 2 * margin_s, gap_s / (1 - kVllmRouterShare));
}

// Up to two digits, at least a whole second.
double rounded_up(double seconds) {
  double unit = 1;
  while (seconds / unit > 99) unit *= 10;
  return std::ceil(seconds / unit) * unit;
}

// ------------------------------------------------------------------------------------------------ runs

constexpr std::int32_t kByCost = -1;  // an oracle's threshold: none, it reads where that is predicted to pay

struct Scale {
  double time_scale = 1, margin_s = 5, registration_s = 480;
  bool pushes = false;
};

std::vector<std::string> sets_of(const Scale& scale, double load, const Setting& s) {
  std::vector<std::string> sets = {fmt::format("workload.time_scale={}", scale.time_scale * load)};
  if (s.kind == Setting::Kind::without) {
    sets.emplace_back("transfer.bidirectional=false");
    return sets;
  }
  const bool foresees = s.kind == Setting::Kind::oracle;
  sets.emplace_back("transfer.bidirectional=true");
  sets.push_back(fmt::format("transfer.retention.policy={}", foresees ? "belady" : "ttl"));
  if (s.kind == Setting::Kind::fixed || (foresees && s.threshold != kByCost)) {
    sets.emplace_back("transfer.reuse_policy=threshold");
    sets.push_back(fmt::format("transfer.kv_recompute_threshold={}", s.threshold));
  } else {
    sets.emplace_back("transfer.reuse_policy=cost");
  }
  if (!foresees) {
    sets.push_back(fmt::format("transfer.decoder_kv_blocks_ttl_s={}", s.ttl_s));
    const double nothing = 1e-9;  // a nanosecond, the least there is
    sets.push_back(
        fmt::format("router.session_kv_ttl_s={}", std::max(nothing, router_ttl(s.ttl_s, scale.margin_s))));
    // Its default follows the TTL, which is not meant here.
    if (scale.pushes) {
      sets.push_back(fmt::format("transfer.push_registration_timeout_s={}", scale.registration_s));
    }
  }
  return sets;
}

struct Ran {
  Tried tried;
  double requests_per_s = 0;
  std::vector<double> gaps_s;  // from a turn's end until the next one reaches prefill
  Evidence evidence;
};

// By position in the trace: what decode would have to keep KV for.
std::vector<double> gaps_of(const RunOutcome& outcome) {
  std::vector<double> gaps;
  const std::vector<std::int32_t> previous = previous_turns(*outcome.trace);
  for (std::size_t i = 0; i < previous.size(); ++i) {
    if (previous[i] < 0) continue;
    const RequestRecord& before = outcome.result.requests[static_cast<std::size_t>(previous[i])];
    const RequestRecord& next = outcome.result.requests[i];
    const Nanos asked = next.arrival + next.stages[static_cast<std::size_t>(Stage::router)];
    if (before.status != RequestStatus::completed || asked <= before.end) continue;
    gaps.push_back(to_seconds(asked - before.end));
  }
  return gaps;
}

class Runs {
 public:
  Runs(const ThresholdsConfig& config, const Scale& scale, std::string p95_path, TraceStore& traces,
       const std::function<void(std::uint64_t, std::uint64_t)>& progress)
      : config_(config),
        scale_(scale),
        p95_path_(std::move(p95_path)),
        traces_(traces),
        progress_(progress) {}

  /// Runs what has not been, at every load; whether there was anything. After Ctrl-C nothing more.
  bool add(const std::vector<Setting>& settings) {
    if (interrupted_) return false;
    std::vector<std::pair<std::size_t, Setting>> todo;
    for (std::size_t l = 0; l < config_.loads.size(); ++l) {
      for (const Setting& s : settings) {
        const auto key = std::pair(l, s);
        if (!done_.contains(key) && std::ranges::find(todo, key) == todo.end()) todo.push_back(key);
      }
    }
    std::vector<std::optional<Ran>> ran(todo.size());
    try {
      parallel_for(
          todo.size(), config_.jobs, [&](std::size_t i) { ran[i] = one(todo[i].first, todo[i].second); },
          progress_);
    } catch (const Interrupted&) {
      interrupted_ = true;
    }
    for (std::size_t i = 0; i < todo.size(); ++i) {
      if (ran[i]) done_.emplace(todo[i], std::move(*ran[i]));
    }
    return !todo.empty() && !interrupted_;
  }

  bool interrupted() const { return interrupted_; }

  const Ran* find(std::size_t load, const Setting& s) const {
    const auto found = done_.find({load, s});
    return found == done_.end() ? nullptr : &found->second;
  }
  Tried tried(std::size_t load, const Setting& s) const {
    if (const Ran* ran = find(load, s)) return ran->tried;
    Tried none;
    none.setting = s;
    none.why = "interrupted";
    return none;
  }

  std::vector<Tried> pairs(std::size_t load) const {
    std::vector<Tried> all;
    for (const auto& [key, ran] : done_) {
      if (key.first == load && key.second.kind == Setting::Kind::fixed) all.push_back(ran.tried);
    }
    return all;
  }

  /// A pair that loses requests (failed, rejected, cancelled) which another setting does not is no choice.
  void judge_failures() {
    std::map<std::size_t, std::uint64_t> least;
    for (const auto& [key, ran] : done_) {
      if (!ran.tried.value) continue;
      least[key.first] =
          std::min(least.try_emplace(key.first, ran.tried.failed).first->second, ran.tried.failed);
    }
    for (auto& [key, ran] : done_) {
      if (!ran.tried.value || !ran.tried.why.empty() || ran.tried.failed == least[key.first]) continue;
      ran.tried.why = fmt::format("{} requests more do not complete", ran.tried.failed - least[key.first]);
    }
  }

 private:
  Ran one(std::size_t load, const Setting& setting) {
    Ran ran;
    ran.tried.setting = setting;
    RunSpec spec = config_.base;
    for (std::string& set : sets_of(scale_, config_.loads[load], setting)) {
      spec.options.sets.push_back(std::move(set));
    }
    RunHooks hooks;
    hooks.interrupted = pdsim::interrupted;
    try {
      const RunOutcome outcome = run(spec, traces_, hooks);
      if (outcome.result.status == RunStatus::interrupted) throw Interrupted{};
      const ordered_json& summary = *outcome.summary;
      const auto& requests = summary["requests"];
      ran.tried.hit_tokens = outcome.result.retention.hit_tokens;
      ran.tried.failed =
          requests["injected"].get<std::uint64_t>() - requests["completed"].get<std::uint64_t>();
      if (outcome.result.status == RunStatus::stalled) {
        ran.tried.why = fmt::format("stalls: {}", outcome.result.stall);
      } else if (requests["completed"].get<std::uint64_t>() == 0) {
        ran.tried.why = "no request completes";
      } else {
        ran.tried.value = number_at(summary, config_.objective.path, "--objective");
        ran.tried.p95 = number_at(summary, p95_path_, "--objective");
        if (!ran.tried.value) ran.tried.why = config_.objective.name + " has no value";
      }
      if (setting.kind == Setting::Kind::without) {
        ran.requests_per_s = rate_of(*outcome.trace);
        ran.gaps_s = gaps_of(outcome);
        ran.evidence = evidence_of(outcome.deployment, summary);
      }
    } catch (const InputError& error) {
      // What cannot work at all has been refused before: this is of one setting.
      if (setting.kind == Setting::Kind::without) throw;
      ran.tried.why = error.what();
    }
    return ran;
  }

  const ThresholdsConfig& config_;
  const Scale& scale_;
  const std::string p95_path_;
  TraceStore& traces_;
  const std::function<void(std::uint64_t, std::uint64_t)>& progress_;
  std::map<std::pair<std::size_t, Setting>, Ran> done_;
  bool interrupted_ = false;
};

// ---------------------------------------------------------------------------------------------- judging

Setting pair_of(std::int32_t threshold, double ttl) {
  return {Setting::Kind::fixed, threshold, ttl};
}
Setting defaults() {
  return pair_of(kVllmThreshold, kVllmTtl);
}
Setting cost_at(const Setting& pair) {
  return {Setting::Kind::cost, 0, pair.ttl_s};
}
constexpr Setting kWithout{Setting::Kind::without, 0, 0}, kOracle{Setting::Kind::oracle, kByCost, 0};

// Of equal ones vLLM's own, then the one that holds memory least long, then the one that reads most.
auto preference(double loss, const Setting& s) {
  return std::tuple(loss, s != defaults(), s.ttl_s, s.threshold);
}

// A pair's loss, if it may be chosen; whether it was tried.
struct Loss {
  bool tried = false;
  std::optional<double> loss;
};

template <typename T, typename LossOf>
Plateau<T> plateau_of(const std::vector<T>& axis, T at, const LossOf& loss_of, double most) {
  std::vector<T> tried;
  for (const T value : axis) {
    if (loss_of(value).tried) tried.push_back(value);
  }
  const auto good = [&](T value) {
    const Loss l = loss_of(value);
    return l.loss && *l.loss <= most;
  };
  auto low = std::ranges::find(tried, at), high = low;
  while (low != tried.begin() && good(*std::prev(low))) --low;
  while (std::next(high) != tried.end() && good(*std::next(high))) ++high;
  return {*low, *high, *low == axis.front(), *high == axis.back()};
}

struct Judge {
  const Objective& objective;
  const Runs& runs;
  std::size_t loads;

  std::optional<Tried> best(std::size_t load) const {
    std::optional<Tried> best;
    for (const Tried& t : runs.pairs(load)) {
      if (!t.usable()) continue;
      if (!best || preference(signed_value(t), t.setting) < preference(signed_value(*best), best->setting)) {
        best = t;
      }
    }
    return best;
  }
  double signed_value(const Tried& t) const { return objective.less_is_better ? *t.value : -*t.value; }

  // Against the load's best pair.
  Loss loss(std::size_t load, const Setting& s, const Tried& best) const {
    const Ran* ran = runs.find(load, s);
    if (ran == nullptr) return {};
    if (!ran->tried.usable()) return {true, std::nullopt};
    return {true, regret(objective, ran->tried.value, best.value)};
  }

  // The largest over all loads at which something works.
  Loss worst(const Setting& s, const std::vector<std::optional<Tried>>& bests) const {
    Loss worst;
    for (std::size_t l = 0; l < loads; ++l) {
      if (!bests[l]) continue;
      const Loss here = loss(l, s, *bests[l]);
      if (!here.tried) return {};
      if (!here.loss) return {true, std::nullopt};
      worst = {true, worst.loss ? std::max(*worst.loss, *here.loss) : *here.loss};
    }
    return worst;
  }
};

struct Chosen {
  Setting setting;
  double worst = 0, least = 0;  // its loss, and the least of all pairs
  Plateau<std::int32_t> thresholds;
  Plateau<double> ttls;
};

std::optional<Chosen> choose(const Judge& judge, const std::vector<std::int32_t>& thresholds,
                             const std::vector<double>& ttls) {
  std::vector<std::optional<Tried>> bests;
  for (std::size_t l = 0; l < judge.loads; ++l) bests.push_back(judge.best(l));
  std::optional<Chosen> chosen;
  for (const Tried& t : judge.runs.pairs(0)) {
    const Loss loss = judge.worst(t.setting, bests);
    if (!loss.loss) continue;
    if (!chosen || preference(*loss.loss, t.setting) < preference(chosen->worst, chosen->setting)) {
      chosen = Chosen{t.setting, *loss.loss, *loss.loss, {}, {}};
    }
  }
  if (!chosen) return {};
  const double most = chosen->least + kPlateau;
  if (const Loss own = judge.worst(defaults(), bests); own.loss && *own.loss <= most) {
    chosen->setting = defaults();
    chosen->worst = *own.loss;
  }
  const Setting& s = chosen->setting;
  chosen->thresholds = plateau_of(
      thresholds, s.threshold, [&](std::int32_t t) { return judge.worst(pair_of(t, s.ttl_s), bests); }, most);
  chosen->ttls = plateau_of(
      ttls, s.ttl_s, [&](double t) { return judge.worst(pair_of(s.threshold, t), bests); }, most);
  return chosen;
}

template <typename T>
void insert(std::vector<T>& axis, T value) {
  const auto at = std::ranges::lower_bound(axis, value);
  if (at == axis.end() || *at != value) axis.insert(at, value);
}

// ------------------------------------------------------------------------------------------------ words

std::string tokens_text(std::int32_t threshold) {
  return threshold == kNeverRead ? "never" : fmt::format("{}", threshold);
}

template <typename T, typename Text>
std::string range_text(std::string_view what, const Plateau<T>& p, const Text& text) {
  if (p.to_the_least && p.to_the_most) return fmt::format("any {}", what);
  if (p.low == p.high) return fmt::format("only {} {}", what, text(p.low));
  if (p.to_the_most) return fmt::format("{}s from {} up", what, text(p.low));
  return fmt::format("{}s {} to {}", what, text(p.low), text(p.high));
}

std::string axes_text(const Plateau<std::int32_t>& thresholds, const Plateau<double>& ttls) {
  return fmt::format("As good within {:.0f} %: {}, {}.", 100 * kPlateau,
                     range_text("threshold", thresholds, tokens_text),
                     range_text("TTL", ttls, [](double t) { return fmt::format("{:g} s", t); }));
}

constexpr double kNothing = 0.0005;  // what would be printed as 0.0 %

// Whether the gain of bidirectional transfer is more than such figures miss measured ones by.
std::string gain_text(const LoadAnswer& load, const ThresholdsAnswer& a) {
  if (!load.gain) return "Without bidirectional transfer there is nothing to compare with.";
  if (std::abs(*load.gain) < kNothing) {
    return "Bidirectional transfer does not pay: at its best it is as good as none.";
  }
  if (*load.gain <= 0) {
    return fmt::format("Bidirectional transfer does not pay: at its best it is {} worse than none.",
                       percent(0 - *load.gain));
  }
  std::string text = fmt::format("Bidirectional transfer at its best gains {}", percent(*load.gain));
  if (*load.gain <= kPlateau) return text + ": it does not pay.";
  if (!a.measured) return text + "; no measured run says by how much such figures are off.";
  text += *load.gain <= a.error ? ", within the " : "; such figures miss measured ones by ";
  text += percent(a.error);
  text += *load.gain <= a.error
              ? " that such figures miss measured ones by in the median: it does not pay within "
                "what is known."
              : " in the median.";
  return text;
}

void put_text(LoadAnswer& load, const ThresholdsAnswer& a) {
  if (!load.best.value) {
    load.text = fmt::format("No pair of settings works at this load: {}.", load.defaults.why);
    return;
  }
  load.text = load.spread <= kPlateau
                  ? fmt::format("Neither setting matters at this load: all pairs are within {:.0f} %.",
                                100 * kPlateau)
                  : axes_text(load.thresholds, load.ttls);
  load.text += ' ';
  load.text += gain_text(load, a);
}

void put_recommendation(ThresholdsAnswer& a, const Chosen& chosen) {
  const Setting& s = chosen.setting;
  if (a.pays == Pays::no) {
    a.text = "Leave bidirectional_kv_xfer off: it gains nothing that matters at these loads.";
    a.config = R"({"bidirectional_kv_xfer": false})";
    return;
  }
  const double whole = std::ceil(s.ttl_s);
  a.config = fmt::format(
      R"({{"bidirectional_kv_xfer": true, "kv_recompute_threshold": {}, "decoder_kv_blocks_ttl": {:.0f}}})",
      s.threshold, whole);
  const std::string_view verb = s == defaults() ? "keep vLLM's" : "set";
  if (a.pays == Pays::undecided) {
    a.text = fmt::format(
        "UNDECIDED whether bidirectional transfer pays: {}. Without it there is less to operate. "
        "With it, {}",
        a.measured ? fmt::format("at none of these loads does it gain more than the {} that such "
                                 "figures miss measured ones by",
                                 percent(a.error))
                   : "no measured run says by how much such figures are off",
        verb);
  } else {
    a.text = s == defaults() ? "Keep vLLM's" : "Set";
  }
  a.text += fmt::format(
      " kv_recompute_threshold {} and decoder_kv_blocks_ttl {:.0f} s, and let the router keep addresses for "
      "{:g} s: "
      "at the load where that loses most it is {} from the best pair. {}",
      s.threshold, whole, a.router_ttl_s, percent(chosen.worst), axes_text(chosen.thresholds, chosen.ttls));
}

// Latencies have a 95th percentile of their own; beside others stands TTFT's.
std::string p95_beside(const std::string& path) {
  const std::size_t dot = path.rfind('.');
  const bool distribution = path.starts_with("latency_ms.") || path.starts_with("stages_ms.");
  return distribution && dot != std::string::npos ? path.substr(0, dot) + ".p95" : "latency_ms.ttft.p95";
}

}  // namespace

// ---------------------------------------------------------------------------------------------- the study

double router_ttl(double ttl_s, double margin_s) {
  return ttl_s - std::max(ttl_s * kVllmRouterShare, 2 * margin_s);
}

std::optional<double> regret(const Objective& objective, const std::optional<double>& value,
                             const std::optional<double>& reference) {
  if (!value || !reference || *reference == 0) return {};
  const double more = (*value - *reference) / std::abs(*reference);
  return objective.less_is_better ? more : 0 - more;
}

ThresholdsAnswer find_thresholds(const ThresholdsConfig& config,
                                 const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  ThresholdsAnswer a;
  RunSpec plain = config.base;
  plain.options.sets.emplace_back("transfer.bidirectional=false");
  const LoadedScenario loaded = load_run(plain);
  const Scenario& s = loaded.scenario;
  const std::string& file = config.base.file;
  if (complexity(s) == 0) {
    throw InputError(file + ": /pools",
                     "are colocated; expected prefill and decode pools: bidirectional "
                     "transfer is between them");
  }
  if (!s.transfer_pairs.empty()) {
    throw InputError(file + ": /transfer/pairs",
                     "has settings of its own for some pools; expected one "
                     "transfer for all, as one pair of values is looked for");
  }
  if (s.transfer.mode != TransferMode::pull && !s.transfer.hypothetical) {
    throw InputError(
        file + ": /transfer/mode",
        fmt::format("is {}, which cannot be bidirectional in vLLM (vllm#46473); expected pull, or "
                    "transfer.hypothetical true to see what it would do",
                    kTransferModes[static_cast<std::size_t>(s.transfer.mode)].name));
  }
  TraceStore traces;
  const std::shared_ptr<const Trace> trace = traces.get(loaded, config.base.generate);
  if (!config.base.options.quiet) {
    fmt::print(stderr, "{}\n", load_summary(*trace));
    if (!trace->report.sessions.empty()) fmt::print(stderr, "{}\n", trace->report.sessions);
  }
  for (const std::int32_t before : previous_turns(*trace)) a.later_turns += before >= 0 ? 1 : 0;
  if (a.later_turns == 0) {
    const bool infer = !trace->hash_ids.empty() && trace->sessions.empty();
    throw InputError(trace->name, fmt::format("has no session of two turns or more, and only those can read "
                                              "back what was kept; expected {}",
                                              infer ? "--infer-sessions to look for them in the prompts"
                                                    : "a trace of conversations"));
  }
  a.scenario = s.name;
  a.trace = trace->name;
  a.trace_sha256 = trace->sha256;
  a.requests = trace->requests.size();
  a.sessions = trace->sessions.size();
  a.objective = config.objective;
  a.p95_path = p95_beside(config.objective.path);
  const Scale scale{s.workload.time_scale, to_seconds(s.transfer.expiry_margin),
                    to_seconds(s.transfer.push_registration_timeout), s.transfer.mode != TransferMode::pull};

  // What there is without, how long users pause, and what could be hit at most.
  Runs runs(config, scale, a.p95_path, traces, progress);
  runs.add({kWithout, kOracle, defaults()});
  if (runs.interrupted()) throw Interrupted{};  // nothing to compare with
  std::vector<double> gaps;
  for (std::size_t l = 0; l < config.loads.size(); ++l) {
    const Ran& ran = *runs.find(l, kWithout);
    gaps.insert(gaps.end(), ran.gaps_s.begin(), ran.gaps_s.end());
    const GradeError &now = error_for(a.evidence, a.objective.path),
                     &here = error_for(ran.evidence, a.objective.path);
    if (l == 0 || std::tuple(!here.known(), here.median) > std::tuple(!now.known(), now.median)) {
      a.evidence = ran.evidence;
    }
  }
  const GradeError& error = error_for(a.evidence, a.objective.path);
  a.measured = error.known();
  a.error = error.median;

  a.thresholds = {kVllmThreshold};
  for (const std::int32_t t : config.thresholds) insert(a.thresholds, t);
  std::int32_t longest = 0;
  for (const Request& r : trace->requests) longest = std::max(longest, r.prompt_tokens);
  if (config.thresholds.empty()) {
    insert(a.thresholds, 0);
    insert(a.thresholds, kNeverRead);
    for (std::int64_t t = kVllmThreshold; t < longest; t *= kThresholdStep) {
      insert(a.thresholds, static_cast<std::int32_t>(t));
    }
  }
  a.ttls = {kVllmTtl};
  for (const double t : config.ttls) insert(a.ttls, t);
  if (config.ttls.empty()) {
    insert(a.ttls, kBriefest);
    for (const double share : kShares) {
      if (!gaps.empty()) insert(a.ttls, rounded_up(ttl_for(percentile_of(gaps, share), scale.margin_s)));
    }
  }
  const Judge judge{a.objective, runs, config.loads.size()};
  std::vector<Setting> grid;
  for (const std::int32_t threshold : a.thresholds) {
    for (const double ttl : a.ttls) grid.push_back(pair_of(threshold, ttl));
  }
  runs.add(grid);
  runs.judge_failures();

  // Closing in on the ends of the recommended pair's plateau, on each axis that was not given.
  std::optional<Chosen> chosen = choose(judge, a.thresholds, a.ttls);
  for (int round = 0; round < kRounds && chosen; ++round) {
    std::vector<Setting> more;
    const Setting at = chosen->setting;
    if (config.thresholds.empty()) {
      const auto between = [&](std::int32_t low, std::int32_t high) {
        const double from = std::max(low, 4), to = std::min(high, std::max(longest, low));
        const auto middle = static_cast<std::int32_t>(std::sqrt(from * to));
        if (middle > low && middle < high) more.push_back(pair_of(middle, at.ttl_s));
      };
      const auto low = std::ranges::find(a.thresholds, chosen->thresholds.low),
                 high = std::ranges::find(a.thresholds, chosen->thresholds.high);
      if (!chosen->thresholds.to_the_least) between(*std::prev(low), *low);
      if (!chosen->thresholds.to_the_most) between(*high, *std::next(high));
    }
    if (config.ttls.empty()) {
      const auto between = [&](double low, double high) {
        const double middle = std::floor(std::sqrt(low * high));
        if (middle > low && middle < high) more.push_back(pair_of(at.threshold, middle));
      };
      const auto low = std::ranges::find(a.ttls, chosen->ttls.low),
                 high = std::ranges::find(a.ttls, chosen->ttls.high);
      if (!chosen->ttls.to_the_least) between(*std::prev(low), *low);
      if (!chosen->ttls.to_the_most) between(*high, *std::next(high));
    }
    if (more.empty()) break;
    runs.add(more);
    runs.judge_failures();
    for (const Setting& setting : more) {
      insert(a.thresholds, setting.threshold);
      insert(a.ttls, setting.ttl_s);
    }
    chosen = choose(judge, a.thresholds, a.ttls);
  }

  // All that was tried on one axis, along the lines through the pairs that are reported.
  for (int round = 0; round < kMostRounds && chosen; ++round) {
    std::vector<Setting> lines;
    const auto through = [&](const Setting& at) {
      for (const std::int32_t threshold : a.thresholds) lines.push_back(pair_of(threshold, at.ttl_s));
      for (const double ttl : a.ttls) lines.push_back(pair_of(at.threshold, ttl));
    };
    through(chosen->setting);
    for (std::size_t l = 0; l < config.loads.size(); ++l) {
      if (const std::optional<Tried> best = judge.best(l)) through(best->setting);
    }
    if (!runs.add(lines)) break;
    runs.judge_failures();
    chosen = choose(judge, a.thresholds, a.ttls);
  }

  // The cost policy at the TTLs that are reported.
  std::vector<Setting> costs = {cost_at(defaults())};
  if (chosen) costs.push_back(cost_at(chosen->setting));
  for (std::size_t l = 0; l < config.loads.size(); ++l) {
    const std::optional<Tried> best = judge.best(l);
    if (!best) continue;
    costs.push_back(cost_at(best->setting));
    costs.push_back({Setting::Kind::oracle, best->setting.threshold, 0});
  }
  runs.add(costs);
  runs.judge_failures();

  for (std::size_t l = 0; l < config.loads.size(); ++l) {
    LoadAnswer& answer = a.loads.emplace_back();
    answer.load = config.loads[l];
    answer.requests_per_s = runs.find(l, kWithout)->requests_per_s;
    answer.pairs = runs.pairs(l);
    answer.without = runs.tried(l, kWithout);
    answer.oracle = runs.tried(l, kOracle);
    answer.defaults = runs.tried(l, defaults());
    answer.cost_at_defaults = runs.tried(l, cost_at(defaults()));
    if (chosen) {
      answer.recommended = runs.tried(l, chosen->setting);
      answer.cost_at_recommended = runs.tried(l, cost_at(chosen->setting));
    }
    const std::optional<Tried> best = judge.best(l);
    if (!best) continue;
    answer.best = *best;
    const Tried foreseen = runs.tried(l, {Setting::Kind::oracle, best->setting.threshold, 0});
    const auto better = regret(a.objective, answer.oracle.value, foreseen.value);
    if (foreseen.usable() && better && *better > 0) answer.oracle = foreseen;
    answer.cost_at_best = runs.tried(l, cost_at(best->setting));
    for (const Tried& t : answer.pairs) {
      if (t.usable())
        answer.spread = std::max(answer.spread, regret(a.objective, t.value, best->value).value_or(0));
    }
    const Setting& at = best->setting;
    answer.thresholds = plateau_of(
        a.thresholds, at.threshold,
        [&](std::int32_t t) { return judge.loss(l, pair_of(t, at.ttl_s), *best); }, kPlateau);
    answer.ttls = plateau_of(
        a.ttls, at.ttl_s, [&](double t) { return judge.loss(l, pair_of(at.threshold, t), *best); }, kPlateau);
    if (const auto loss = regret(a.objective, best->value, answer.without.value)) answer.gain = 0 - *loss;
    const double gain = answer.gain.value_or(0);
    if (gain > kPlateau)
      a.pays = std::max(a.pays, a.measured && gain > a.error ? Pays::yes : Pays::undecided);
  }
  a.interrupted = runs.interrupted();
  for (LoadAnswer& answer : a.loads) put_text(answer, a);
  if (!chosen) {
    a.text = "No pair of settings works at all of these loads.";
    return a;
  }
  a.recommended = chosen->setting;
  if (chosen->setting.threshold == kNeverRead) a.pays = Pays::no;
  a.router_ttl_s = std::max(0.0, router_ttl(chosen->setting.ttl_s, scale.margin_s));
  a.worst_regret = chosen->worst;
  a.threshold_plateau = chosen->thresholds;
  a.ttl_plateau = chosen->ttls;
  put_recommendation(a, *chosen);
  if (a.loads.size() > 1) {
    a.text += " A higher load also shortens the pauses between turns: its TTLs are those of hastier users.";
  }
  return a;
}

// ------------------------------------------------------------------------------------------------ reports

namespace {

constexpr std::string_view kPaysNames[] = {"no", "undecided", "yes"};
constexpr std::string_view kKindNames[] = {"without", "fixed", "cost", "oracle"};

std::string_view kind_name(const Setting& s) {
  return kKindNames[static_cast<std::size_t>(s.kind)];
}

std::string number(const std::optional<double>& value) {
  return value ? fmt::format("{:.4g}", *value) : "-";
}

std::string change(const std::optional<double>& value) {
  if (!value) return "-";
  return *value < 10 ? fmt::format("{:+.1f} %", 100 * *value) : fmt::format("{:.0f} times", 1 + *value);
}

// One line of a load's table. `cost`: the cost policy at the same TTL.
std::string line(const ThresholdsAnswer& a, const LoadAnswer& load, std::string_view name, const Tried& t,
                 const Tried* cost) {
  const Setting& s = t.setting;
  const bool fixed = s.kind == Setting::Kind::fixed;
  std::string share = "-";
  if (load.oracle.value && load.oracle.hit_tokens > 0 && t.value) {
    share = fmt::format(
        "{:.0f} %", 100.0 * static_cast<double>(t.hit_tokens) / static_cast<double>(load.oracle.hit_tokens));
  }
  std::string out = fmt::format(
      "  {:<34}{:>10}{:>9}{:>12}{:>12}{:>9}{:>12}{:>12}\n", name, fixed ? tokens_text(s.threshold) : "-",
      fixed || s.kind == Setting::Kind::cost ? fmt::format("{:g}", s.ttl_s) : "-", number(t.value),
      number(t.p95), share, cost != nullptr ? change(regret(a.objective, t.value, cost->value)) : "-",
      change(regret(a.objective, t.value, load.oracle.value)));
  if (!t.why.empty()) out += fmt::format("    {}\n", t.why);
  return out;
}

ordered_json threshold_json(std::int32_t threshold) {
  return threshold == kNeverRead ? ordered_json("never") : ordered_json(threshold);
}

ordered_json run_json(const Objective& objective, const LoadAnswer& load, const Tried& t, const Tried* cost) {
  const auto or_null = [](const std::optional<double>& v) { return v ? ordered_json(*v) : ordered_json(); };
  ordered_json out;
  out["kind"] = kind_name(t.setting);
  const bool fixed = t.setting.kind == Setting::Kind::fixed;
  out["kv_recompute_threshold"] = fixed ? threshold_json(t.setting.threshold) : ordered_json();
  out["decoder_kv_blocks_ttl_s"] =
      fixed || t.setting.kind == Setting::Kind::cost ? ordered_json(t.setting.ttl_s) : ordered_json();
  out["value"] = or_null(t.value);
  out["p95"] = or_null(t.p95);
  out["hit_tokens"] = t.hit_tokens;
  out["failed"] = t.failed;
  ordered_json regrets;
  regrets["best"] = or_null(regret(objective, t.value, load.best.value));
  regrets["cost"] = or_null(cost != nullptr ? regret(objective, t.value, cost->value) : std::nullopt);
  regrets["oracle"] = or_null(regret(objective, t.value, load.oracle.value));
  out["regret"] = regrets;
  if (!t.why.empty()) out["why"] = t.why;
  return out;
}

ordered_json plateau_json(const ordered_json& low, const ordered_json& high, bool to_the_least,
                          bool to_the_most) {
  return {{"low", low}, {"high", high}, {"to_the_least", to_the_least}, {"to_the_most", to_the_most}};
}

ordered_json plateaus_json(const Plateau<std::int32_t>& thresholds, const Plateau<double>& ttls) {
  return {
      {"kv_recompute_threshold", plateau_json(threshold_json(thresholds.low), threshold_json(thresholds.high),
                                              thresholds.to_the_least, thresholds.to_the_most)},
      {"decoder_kv_blocks_ttl_s", plateau_json(ttls.low, ttls.high, ttls.to_the_least, ttls.to_the_most)}};
}

}  // namespace

std::string thresholds_table(const ThresholdsAnswer& a) {
  std::string out = fmt::format("{} on {}: {} requests, {} of them later turns; by {}\n", a.scenario, a.trace,
                                a.requests, a.later_turns, a.objective.name);
  for (const LoadAnswer& load : a.loads) {
    out += fmt::format("\nload {:g} ({:.3g} requests/s)\n", load.load, load.requests_per_s);
    out += fmt::format("  {:<34}{:>10}{:>9}{:>12}{:>12}{:>9}{:>12}{:>12}\n", "", "threshold", "TTL, s",
                       a.objective.name.size() > 11 ? "value" : a.objective.name, "p95", "hits", "vs cost",
                       "vs oracle");
    out += line(a, load, "no bidirectional transfer", load.without, nullptr);
    out += line(a, load, "vLLM's defaults", load.defaults, &load.cost_at_defaults);
    if (load.best.value) out += line(a, load, "best of those tried", load.best, &load.cost_at_best);
    if (a.recommended) out += line(a, load, "recommended", load.recommended, &load.cost_at_recommended);
    if (a.recommended)
      out += line(a, load, "cost policy, recommended TTL", load.cost_at_recommended, nullptr);
    out += line(a, load, "oracle: knowing the future", load.oracle, nullptr);
    std::size_t unusable = 0;
    std::string example;
    for (const Tried& t : load.pairs) {
      if (t.usable()) continue;
      if (unusable++ == 0) {
        example = fmt::format("threshold {}, TTL {:g} s: {}", tokens_text(t.setting.threshold),
                              t.setting.ttl_s, t.why);
      }
    }
    if (unusable > 0) {
      out += fmt::format("  {} of {} pairs cannot be chosen: {}\n", unusable, load.pairs.size(), example);
    }
    out += wrapped(load.text, 2);
  }
  out += "\n" + wrapped(a.text);
  if (!a.config.empty()) out += fmt::format("kv_connector_extra_config: {}\n", a.config);
  if (!a.evidence.text.empty()) {
    out += wrapped("evidence: " + a.evidence.text);
  }
  return out;
}

ordered_json thresholds_json(const ThresholdsAnswer& a) {
  ordered_json out;
  out["schema"] = "pdsim.thresholds/1";
  out["status"] = a.interrupted ? "interrupted" : "finished";
  out["scenario"] = a.scenario;
  out["trace"] = {{"name", a.trace},
                  {"sha256", a.trace_sha256},
                  {"requests", a.requests},
                  {"sessions", a.sessions},
                  {"later_turns", a.later_turns}};
  out["objective"] = {{"name", a.objective.name},
                      {"path", a.objective.path},
                      {"less_is_better", a.objective.less_is_better},
                      {"p95", a.p95_path}};
  out["tried"]["kv_recompute_threshold"] = ordered_json::array();
  for (const std::int32_t t : a.thresholds)
    out["tried"]["kv_recompute_threshold"].push_back(threshold_json(t));
  out["tried"]["decoder_kv_blocks_ttl_s"] = a.ttls;
  out["loads"] = ordered_json::array();
  for (const LoadAnswer& load : a.loads) {
    ordered_json l;
    l["load"] = load.load;
    l["requests_per_s"] = load.requests_per_s;
    const auto put = [&](const char* name, const Tried& t, const Tried* cost) {
      l[name] = run_json(a.objective, load, t, cost);
    };
    put("without", load.without, nullptr);
    put("defaults", load.defaults, &load.cost_at_defaults);
    l["best"] = nullptr;
    l["recommended"] = nullptr;
    l["cost"] = nullptr;
    if (load.best.value) put("best", load.best, &load.cost_at_best);
    if (a.recommended) put("recommended", load.recommended, &load.cost_at_recommended);
    if (a.recommended) put("cost", load.cost_at_recommended, nullptr);
    put("oracle", load.oracle, nullptr);
    l["plateau"] = load.best.value ? plateaus_json(load.thresholds, load.ttls) : ordered_json();
    l["spread"] = load.spread;
    l["gain"] = load.gain ? ordered_json(*load.gain) : ordered_json();
    l["text"] = load.text;
    l["pairs"] = ordered_json::array();
    for (const Tried& t : load.pairs) l["pairs"].push_back(run_json(a.objective, load, t, nullptr));
    out["loads"].push_back(std::move(l));
  }
  out["evidence"] = {{"grade", kGradeNames[static_cast<std::size_t>(a.evidence.grade)]},
                     {"text", a.evidence.text},
                     {"error", a.measured ? ordered_json(a.error) : ordered_json()}};
  ordered_json r;
  r["pays"] = kPaysNames[static_cast<std::size_t>(a.pays)];
  r["kv_recompute_threshold"] = a.recommended ? threshold_json(a.recommended->threshold) : ordered_json();
  r["decoder_kv_blocks_ttl_s"] = a.recommended ? ordered_json(a.recommended->ttl_s) : ordered_json();
  r["session_kv_ttl_s"] = a.recommended ? ordered_json(a.router_ttl_s) : ordered_json();
  r["worst_regret"] = a.recommended ? ordered_json(a.worst_regret) : ordered_json();
  r["plateau"] = a.recommended ? plateaus_json(a.threshold_plateau, a.ttl_plateau) : ordered_json();
  r["kv_connector_extra_config"] = a.config.empty() ? ordered_json() : ordered_json::parse(a.config);
  r["text"] = a.text;
  out["recommendation"] = std::move(r);
  return out;
}

std::string thresholds_csv(const ThresholdsAnswer& a) {
  std::string out =
      "load,kind,kv_recompute_threshold,decoder_kv_blocks_ttl_s,value,p95,hit_tokens,failed,why\n";
  for (const LoadAnswer& load : a.loads) {
    std::vector<Tried> rows = load.pairs;
    for (const Tried* t : {&load.without, &load.cost_at_defaults, &load.cost_at_best,
                           &load.cost_at_recommended, &load.oracle}) {
      const bool there = t->value || !t->why.empty();
      if (there && std::ranges::find(rows, t->setting, &Tried::setting) == rows.end()) rows.push_back(*t);
    }
    for (const Tried& t : rows) {
      const bool fixed = t.setting.kind == Setting::Kind::fixed;
      std::string why = t.why;
      std::ranges::replace(why, '"', '\'');
      fmt::format_to(
          std::back_inserter(out), "{:g},{},{},{},{},{},{},{},{}\n", load.load, kind_name(t.setting),
          fixed ? tokens_text(t.setting.threshold) : "",
          fixed || t.setting.kind == Setting::Kind::cost ? fmt::format("{:g}", t.setting.ttl_s) : "",
          t.value ? fmt::format("{}", *t.value) : "", t.p95 ? fmt::format("{}", *t.p95) : "", t.hit_tokens,
          t.failed, why.empty() ? why : fmt::format("\"{}\"", why));
    }
  }
  return out;
}

}  // namespace pdsim
