// The fit is Gauss-Newton on log errors of TTFT and TPOT, whose derivatives are differences between whole
// simulations (each deterministic). A simulation is no smooth function: batches form otherwise when a step
// takes a nanosecond more. So a parameter is fitted only where its effect is larger than that noise, which
// is measured, and than what the parameters already chosen cannot imitate.
// Invariants
//  1. Only numbers of kOverheadFields change between simulations of a load.
//  2. Each load is simulated with the current overheads before they become current: what is reported and
//     written has been run, also when an interrupt ends the fit.
#include "tools/pdsim/fit_bench.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include "models/model.hpp"
#include "models/overheads.hpp"
#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/core/histogram.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/pdsim/serving.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/workload.hpp"
#include "traces/bench.hpp"
#include "traces/lines.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;
using Eigen::MatrixXd;
using Eigen::VectorXd;

constexpr std::size_t kParameters = std::size(kOverheadFields);

/// A plausible change of each parameter, in us: the step of the differences, and what the weak pull to the
/// start and the algebra measure it in. step and gpu alike: where only their sum counts, so do differences.
constexpr double kUnits[] = {1000, 1, 100, 10, 100, 2, 5, 20, 60};
static_assert(std::size(kUnits) == kParameters);

/// What is compared of a load; 0 = not measured.
struct Figure {
  std::string_view name;
  double weight;  ///< in the fit: means of TTFT err about twice as far as those of TPOT (queueing)
  bool tpot, median;
};
constexpr Figure kFigures[] = {{"mean_ttft_ms", 0.5, false, false},
                               {"p50_ttft_ms", 0.5, false, true},
                               {"mean_tpot_ms", 1, true, false},
                               {"p50_tpot_ms", 1, true, true}};
constexpr std::size_t kFigureCount = std::size(kFigures);
using Values = std::array<double, kFigureCount>;

constexpr int kIterations = 8;
constexpr double kShortest = 0.25;                   ///< of a unit: differences halve from 1 to here
constexpr double kTrials[] = {1, 0.5, 0.25, 0.125};  ///< of the step that the linear problem proposes
constexpr unsigned kProbes[] = {0, 1, 2,
                                4};   ///< parameters whose index shares an odd number of bits move down
constexpr double kProbeLength = 0.5;  ///< ... and the others up, all at once, in steps of the differences
constexpr double kTrusted = 0.01;  ///< log error of the linear model from where on a figure counts for less
constexpr double kMemory =
    0.7;  ///< of that error's square in the last iteration, whose differences were longer
constexpr double kNoiseFactor = 3;    ///< a change of a figure below this many times that error is none
constexpr double kSeen = 1e-3;        ///< root mean square of log errors that a unit must move at least
constexpr double kApart = 0.1;        ///< share of its effect that other parameters must not imitate
constexpr double kPull = 2e-3;        ///< log error that a unit away from the start counts as
constexpr double kLeastScale = 0.05;  ///< log error from where on residuals count linearly, at least
constexpr double kEnough = 0.01;      ///< the fit ends when the cost falls by less than this share of it
constexpr double kExact = 5e-4;       ///< ... or the root mean square of log errors is below this
constexpr std::size_t kHeldOutEvery = 5;

// --------------------------------------------------------------------------------------------- loads

/// What is simulated; loads of the same configuration share one.
struct Setup {
  LoadedScenario loaded;
  Trace trace;
};

struct Load {
  std::string name;
  std::size_t setup = 0;
  std::size_t requests = 0;  ///< measured ones, of a benchmark; 0 = a row of means
  Values measured{}, before{}, after{};
  bool held_out = false;
};

struct Loads {
  std::vector<Setup> setups;
  std::vector<Load> loads;
  std::string start;  ///< overheads that the scenarios name
  std::string date;
  bool tables = false;
  std::map<std::string, std::size_t> set_aside;  ///< reason -> loads
  std::vector<std::string> notes;
};

/// All pools of all loads start from the same.
void agree_on_start(Loads& all, const LoadedScenario& loaded, const std::string& load, bool given) {
  if (given) return;
  for (std::size_t i = 0; i < loaded.scenario.pools.size(); ++i) {
    const std::string& named = loaded.scenario.pools[i].engine.overheads;
    if (all.start.empty()) all.start = named;
    if (named == all.start) continue;
    throw InputError(load,
                     fmt::format("its overheads are '{}', others' '{}': one fit has one start; expected "
                                 "--overheads, or a choice of loads (--only engine=...)",
                                 named, all.start));
  }
}

Values figures_of(const std::vector<double>& ttft, const std::vector<double>& tpot) {
  const Distribution a = distribution_of(ttft), b = distribution_of(tpot);
  return {a.n > 0 ? a.mean : 0, a.n > 0 ? a.p50 : 0, b.n > 0 ? b.mean : 0, b.n > 0 ? b.p50 : 0};
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return text;
}

/// InputError when the benchmark is of another model than the scenario; a note when that cannot be known.
void check_model(const Bench& bench, const std::string& file, const LoadedScenario& loaded, Loads& all) {
  if (bench.model.empty()) return;
  const std::string& ours = loaded.scenario.model;
  if (lower(bench.model) == lower(ours)) return;
  const std::string model = load_model(ours, loaded.place("/model")).name;
  std::string theirs;
  try {
    theirs = load_model(bench.model).name;
  } catch (const InputError&) {  // no model that pdsim knows: its name says nothing
  }
  const std::vector<std::string> shipped = model_names();
  if (theirs == model) return;
  if (theirs.empty() || std::ranges::find(shipped, model) == shipped.end()) {
    all.notes.push_back(fmt::format("{}: whether its model '{}' is the scenario's '{}' is not known here",
                                    file, bench.model, ours));
    return;
  }
  throw InputError(file + ": /model_id", fmt::format("is '{}', which is {}: expected {}, as {} says",
                                                     bench.model, theirs, model, loaded.place("/model")));
}

/// "20260401-120000" -> "2026-04-01"; "" for anything else.
std::string day_of(std::string_view date) {
  if (date.size() < 8 || date.substr(0, 8).find_first_not_of("0123456789") != std::string_view::npos)
    return "";
  return fmt::format("{}-{}-{}", date.substr(0, 4), date.substr(4, 2), date.substr(6, 2));
}

void read_bench_load(const std::string& file, const BenchFitOptions& options, Loads& all) {
  Progress reading("reading", "bytes", options.quiet);
  Bench bench = read_bench(file, "", [&](std::uint64_t done, std::uint64_t total) {
    if (interrupted()) throw Interrupted{};
    reading.update(done, total);
  });
  reading.finish();
  // The benchmark takes the place of the scenario's whole workload. A client that only waits for answers is a
  // closed loop, whose recorded starts would be those of the measured system, not of the simulated one.
  ReplayOptions replay;
  replay.trace = file;
  replay.format = bench.trace.format;
  replay.seed = options.seed;
  replay.sets = {R"(workload={"trace": "-", "format": "vllm-bench"})"};
  const bool paced = bench.request_rate > 0 || bench.ramp_end > 0;
  if (bench.max_concurrency > 0 && !paced) {
    replay.sets.push_back(fmt::format("workload.concurrency={}", bench.max_concurrency));
  } else if (bench.max_concurrency > 0 && bench.sending == Sending::drawn) {
    replay.sets.push_back(fmt::format("workload.max_concurrency={}", bench.max_concurrency));
  }
  replay.sets.insert(replay.sets.end(), options.sets.begin(), options.sets.end());
  Setup setup{load_scenario_for(options.scenario, replay), {}};
  check_model(bench, bench.trace.name, setup.loaded, all);
  agree_on_start(all, setup.loaded, bench.trace.name, !options.overheads.empty());
  plan_deployment(setup.loaded);  // what cannot work is an error of the scenario, not of a load
  draw_arrivals(bench, setup.loaded.scenario.seed);

  Load load;
  load.name = std::filesystem::path(bench.trace.name).filename().string();
  load.setup = all.setups.size();
  std::vector<double> ttft, tpot;
  for (const Measured& row : bench.measured) {
    if (!std::isnan(row.ttft)) ttft.push_back(row.ttft);
    if (!std::isnan(row.tpot)) tpot.push_back(row.tpot);
  }
  if (ttft.empty() && tpot.empty()) {
    throw InputError(bench.trace.name,
                     "has neither TTFT nor TPOT of any request, expected a streaming benchmark");
  }
  load.requests = std::max(ttft.size(), tpot.size());
  load.measured = figures_of(ttft, tpot);
  for (const std::string& reason : bench.trace.report.set_aside) {
    all.notes.push_back(fmt::format("{}: set aside {}", load.name, reason));
  }
  if (bench.chat) {
    all.notes.push_back(
        fmt::format("{}: chat endpoint, whose first chunk may come before the first token: TTFT "
                    "may be too short, TPOT too long",
                    load.name));
  }
  all.date = std::max(all.date, day_of(bench.date));
  setup.trace = std::move(bench.trace);
  pace_trace(setup.trace, setup.loaded, true);
  all.setups.push_back(std::move(setup));
  all.loads.push_back(std::move(load));
}

void read_table_loads(const std::string& file, const BenchFitOptions& options, Loads& all) {
  ServingOptions serving;
  serving.rules = options.rules;
  serving.only = options.only;
  std::map<std::string, std::size_t> known;  // scenario without its name -> setup
  for (const ServingPoint& p : read_serving_points(file, serving)) {
    if (interrupted()) throw Interrupted{};
    if (p.scenario.empty()) {
      ++all.set_aside[p.refusal];
      continue;
    }
    nlohmann::json scenario = nlohmann::json::parse(p.scenario);
    scenario.erase("name");
    const auto [found, fresh] = known.try_emplace(scenario.dump(), all.setups.size());
    Load load;
    load.name =
        fmt::format("{}:{} {} {} {} tp {} {}/{} {} {}", std::filesystem::path(file).filename().string(),
                    p.line, p.gpu, p.model, p.precision, p.tensor, p.isl, p.osl,
                    p.concurrency > 0 ? "concurrency" : "rate", p.concurrency > 0 ? p.concurrency : p.rate);
    load.setup = found->second;
    load.measured = {p.measured.ttft_ms, 0, p.measured.tpot_ms, 0};
    if (fresh) {
      try {
        Overrides overrides;
        overrides.seed = options.seed;
        Setup setup{parse_scenario(p.scenario, load.name, "", options.sets, overrides), {}};
        check_simulated(setup.loaded);
        plan_deployment(setup.loaded);
        setup.trace = load_trace_for(setup.loaded, true);
        all.setups.push_back(std::move(setup));
      } catch (const InputError& error) {
        if (!options.sets.empty() && all.setups.empty()) throw;  // most likely --set itself
        known.erase(found);
        ++all.set_aside[error.what()];
        continue;
      }
    }
    agree_on_start(all, all.setups[load.setup].loaded, load.name, !options.overheads.empty());
    all.date = std::max(all.date, p.measured_on.substr(0, 10));
    all.loads.push_back(std::move(load));
  }
}

/// Whether the text can be a benchmark's: an object, or objects a line.
bool looks_like_bench(const std::string& file) {
  LineReader lines(file);
  const std::string_view head = lines.head(256);
  const std::size_t first = head.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && head[first] == '{';
}

Loads read_loads(const BenchFitOptions& options) {
  Loads all;
  all.tables = options.scenario.empty();
  for (const std::string& file : options.files) {
    if (file == "-" && options.files.size() > 1) throw InputError("-", "stdin can only be the one benchmark");
    if (file != "-") {
      const bool bench = looks_like_bench(file);
      if (bench && all.tables) {
        throw InputError(file,
                         "is a benchmark's own file, expected --scenario beside it: model, GPUs and flags "
                         "of what it measured");
      }
      if (!bench && !all.tables) {
        throw InputError(file,
                         "is no JSON, expected a benchmark's file; of a table, rows become scenarios by "
                         "rules, without --scenario");
      }
    }
    if (all.tables) {
      read_table_loads(file, options, all);
    } else {
      read_bench_load(file, options, all);
    }
  }
  if (all.loads.empty()) {
    std::string why;
    for (const auto& [reason, rows] : all.set_aside) why += fmt::format("; {} rows: {}", rows, reason);
    throw InputError(options.files.front(), "no load that can be simulated" + why);
  }
  return all;
}

// --------------------------------------------------------------------------------------- simulations

/// The overheads, their figures in units.
Overheads overheads_at(const VectorXd& x, const Overheads& base) {
  Overheads o = base;
  for (std::size_t i = 0; i < kParameters; ++i) {
    kOverheadFields[i].of(o) = 1e3 * kUnits[i] * x[static_cast<Eigen::Index>(i)];
  }
  return o;
}

/// What one simulation says: figures, or why there are none.
struct Outcome {
  std::optional<Values> values;
  std::string refusal;
};

Outcome simulate_with(const Setup& setup, const std::string& overheads) {
  LoadedScenario loaded = setup.loaded;
  for (PoolConfig& pool : loaded.scenario.pools) pool.engine.overheads = overheads;
  const Deployment deployment = plan_deployment(loaded);
  RunHooks hooks;
  hooks.interrupted = interrupted;
  const RunResult run = simulate(deployment, loaded, setup.trace, hooks);
  if (run.status == RunStatus::interrupted) throw Interrupted{};
  if (run.status == RunStatus::stalled) return {std::nullopt, "stalled: " + run.stall};
  std::vector<double> ttft, tpot;
  std::size_t missing = 0;
  for (const RequestRecord& r : run.requests) {
    if (r.status != RequestStatus::completed) {
      ++missing;
    } else if (r.counted) {
      if (r.first_token >= 0) ttft.push_back(static_cast<double>(r.first_token - r.arrival) / 1e6);
      if (r.has_tpot()) tpot.push_back(static_cast<double>(r.tpot()) / 1e6);
    }
  }
  const bool patient = loaded.scenario.workload.client_timeout == 0;
  if (ttft.empty() || (patient && missing > 0)) {
    return {std::nullopt,
            fmt::format("{} of {} requests do not complete in the simulation", missing, run.requests.size())};
  }
  return {figures_of(ttft, tpot), ""};
}

/// Runs setups with overheads, on all cores, and counts.
class Runner {
 public:
  Runner(const Loads& all, const Overheads& base, unsigned jobs, std::uint64_t planned, bool quiet)
      : all_(all), base_(base), planned_(planned), progress_("fitting", "simulations", quiet) {
    jobs_ = jobs;
  }

  /// outcomes[variant][setup], of those setups only that are asked for. Throws Interrupted.
  std::vector<std::vector<Outcome>> run(const std::vector<VectorXd>& variants,
                                        const std::vector<std::size_t>& setups) {
    std::vector<std::vector<Outcome>> outcomes(variants.size(), std::vector<Outcome>(all_.setups.size()));
    std::vector<std::string> texts;
    for (const VectorXd& x : variants) texts.push_back(to_json(overheads_at(x, base_)));
    const std::size_t work = variants.size() * setups.size();
    const auto one = [&](std::size_t i) {
      const std::size_t variant = i / setups.size(), setup = setups[i % setups.size()];
      if (interrupted()) throw Interrupted{};
      outcomes[variant][setup] = simulate_with(all_.setups[setup], texts[variant]);
    };
    parallel_for(work, jobs_, one,
                 [&](std::uint64_t, std::uint64_t) { progress_.update(++done_, planned_); });
    return outcomes;
  }

  void finish() { progress_.finish(); }
  std::uint64_t done() const { return done_; }

 private:
  const Loads& all_;
  const Overheads& base_;
  std::uint64_t planned_, done_ = 0;
  unsigned jobs_ = 1;
  Progress progress_;
};

// --------------------------------------------------------------------------------------------- fitting

struct Fit {
  VectorXd start, x;                                  ///< in units
  std::array<std::string, kParameters> undetermined;  ///< why; empty = determined
  int iterations = 0;
  bool interrupted = false;
};

/// sum of 2 s^2 (sqrt(1 + (r / s)^2) - 1), the soft L1 norm, and the pull to the start.
double cost_of(const VectorXd& r, double scale, const VectorXd& from_start) {
  const double robust = 2 * scale * scale * ((1 + (r.array() / scale).square()).sqrt() - 1).sum();
  return robust + (kPull * from_start).squaredNorm();
}

double median_size(const VectorXd& r) {
  std::vector<double> sizes(r.size() > 0 ? r.data() : nullptr, r.data() + r.size());
  for (double& size : sizes) size = std::abs(size);
  return distribution_of(std::move(sizes)).p50;
}

/// Log errors of the fitted loads by weight; +infinity where a load has no figures any more.
VectorXd residuals(const Loads& all, const std::vector<Outcome>& outcomes) {
  std::vector<double> r;
  for (const Load& load : all.loads) {
    if (load.held_out) continue;
    const std::optional<Values>& simulated = outcomes[load.setup].values;
    for (std::size_t f = 0; f < kFigureCount; ++f) {
      if (!(load.measured[f] > 0)) continue;
      const std::size_t other = f ^ 1;  // mean and median of one metric are neighbours
      const double share = load.measured[other] > 0 ? std::sqrt(0.5) : 1.0;
      const double error = simulated && (*simulated)[f] > 0 ? std::log((*simulated)[f] / load.measured[f])
                                                            : std::numeric_limits<double>::infinity();
      r.push_back(kFigures[f].weight * share * error);
    }
  }
  return Eigen::Map<VectorXd>(r.data(), static_cast<Eigen::Index>(r.size()));
}

/// Which columns of `jacobian` (a unit's effect) the rows tell apart: one by one that with the largest part
/// that those before cannot imitate, as long as this part, where it is above `noise` (of each row), is above
/// `least` and above kApart of the column. At most `most`. Says why of the others.
std::vector<Eigen::Index> determined(const MatrixXd& jacobian, const VectorXd& noise, double least,
                                     std::size_t most, const std::vector<Eigen::Index>& earlier,
                                     std::array<std::string, kParameters>& why) {
  const auto seen = [&](const VectorXd& column) {
    return VectorXd((column.array().abs() > noise.array()).select(column, 0.0));
  };
  std::vector<Eigen::Index> chosen;
  for (bool known = true;
       chosen.size() < most;) {  // first those that were determined before: no changing sides
    Eigen::Index next = -1;
    double largest = least;
    const MatrixXd before = jacobian(Eigen::all, chosen);
    for (Eigen::Index i = 0; i < jacobian.cols(); ++i) {
      if (std::ranges::find(chosen, i) != chosen.end()) continue;
      if (known && std::ranges::find(earlier, i) == earlier.end()) continue;
      VectorXd own = jacobian.col(i);
      if (!chosen.empty()) own -= before * before.householderQr().solve(own);
      const double size = seen(own).norm();
      if (size <= largest || size <= kApart * jacobian.col(i).norm()) continue;
      largest = size;
      next = i;
    }
    if (next < 0 && !std::exchange(known, false)) break;
    if (next >= 0) chosen.push_back(next);
  }
  std::ranges::sort(chosen);
  for (Eigen::Index i = 0; i < jacobian.cols(); ++i) {
    std::string& text = why[static_cast<std::size_t>(i)];
    text.clear();
    if (std::ranges::binary_search(chosen, i)) continue;
    const double size = seen(jacobian.col(i)).norm();
    text = "moves nothing here by more than noise";
    if (size <= least) continue;
    double closest = 0;
    for (const Eigen::Index j : chosen) {
      const double cosine =
          std::abs(jacobian.col(i).dot(jacobian.col(j))) / (jacobian.col(i).norm() * jacobian.col(j).norm());
      if (cosine <= closest) continue;
      closest = cosine;
      text = fmt::format("not told apart, most like {}", kOverheadFields[static_cast<std::size_t>(j)].key);
    }
  }
  return chosen;
}

/// The step of the linearised, weighted problem over `free` that keeps x at or above 0: parameters that would
/// go below end there, and the others are solved for again.
VectorXd proposed_step(const MatrixXd& jacobian, const VectorXd& r, double scale, const VectorXd& x,
                       const VectorXd& start, std::vector<Eigen::Index> free) {
  const VectorXd weight = (1 + (r.array() / scale).square()).rsqrt();
  VectorXd step = VectorXd::Zero(x.size());
  while (!free.empty()) {
    const auto n = static_cast<Eigen::Index>(free.size());
    const MatrixXd j = jacobian(Eigen::all, free);
    const MatrixXd a = j.transpose() * weight.asDiagonal() * j + kPull * kPull * MatrixXd::Identity(n, n);
    const VectorXd target = r + jacobian * step;  // with those that ended at 0
    const VectorXd pull = kPull * kPull * (x - start)(free);
    const VectorXd solved = a.ldlt().solve(-(j.transpose() * weight.asDiagonal() * target) - pull);
    std::vector<Eigen::Index> rest;
    for (Eigen::Index k = 0; k < n; ++k) {
      const Eigen::Index i = free[static_cast<std::size_t>(k)];
      if (x[i] + solved[k] < 0) {
        step[i] = -x[i];
      } else {
        rest.push_back(i);
      }
    }
    if (rest.size() == free.size()) {
      for (Eigen::Index k = 0; k < n; ++k) step[free[static_cast<std::size_t>(k)]] = solved[k];
      break;
    }
    free = std::move(rest);
  }
  return step;
}

void keep(Loads& all, const std::vector<Outcome>& outcomes, Values Load::*into) {
  for (Load& load : all.loads) {
    const std::optional<Values>& values = outcomes[load.setup].values;
    load.*into = values ? *values : Values{};
  }
}

std::uint64_t planned_simulations(std::size_t all, std::size_t fitted) {
  return all * (2 + std::size(kTrials) * kIterations) +
         fitted * (kParameters + std::size(kProbes)) * kIterations;
}

/// Requires the loads' `before` (at x = start) in `now`. Fills `after`.
void fit(Loads& all, Runner& runner, std::vector<Outcome> now, Fit& fit) {
  std::vector<std::size_t> every(all.setups.size()), fitted;
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = i;
  std::size_t loads = 0, evidence = 0;
  for (const Load& load : all.loads) {
    if (load.held_out) continue;
    fitted.push_back(load.setup);
    ++loads;
    evidence += all.tables ? 1 : load.requests;
  }
  std::ranges::sort(fitted);
  fitted.erase(std::unique(fitted.begin(), fitted.end()), fitted.end());
  keep(all, now, &Load::before);
  keep(all, now, &Load::after);
  VectorXd r = residuals(all, now);
  const auto rows = static_cast<double>(r.size());
  const auto n = static_cast<Eigen::Index>(kParameters);
  VectorXd trust = VectorXd::Ones(r.size());  // in each residual, by how wrong the linear model is there
  std::vector<Eigen::Index> earlier;          // what the last iteration fitted
  bool failed = false;                        // the last iteration found nothing better
  VectorXd doubt = VectorXd::Zero(r.size());  // the square of that error
  try {
    for (double length = 1; fit.iterations < kIterations; length = std::max(length / 2, kShortest)) {
      std::vector<VectorXd> variants;
      for (Eigen::Index i = 0; i < n; ++i) {
        variants.push_back(fit.x);
        variants.back()[i] += length;
      }
      for (const unsigned probe : kProbes) {
        VectorXd x = fit.x;
        for (Eigen::Index i = 0; i < n; ++i) {
          const bool down = std::popcount(static_cast<unsigned>(i) & probe) % 2 != 0;
          x[i] = std::max(0.0, x[i] + (down ? -1 : 1) * kProbeLength * length);
        }
        variants.push_back(std::move(x));
      }
      const auto outcomes = runner.run(variants, fitted);
      const auto difference = [&](std::size_t variant) {
        const VectorXd d = residuals(all, outcomes[variant]) - r;
        return VectorXd(d.array().isFinite().select(d, 0.0));
      };
      MatrixXd jacobian(r.size(), n);
      for (std::size_t i = 0; i < kParameters; ++i) {
        jacobian.col(static_cast<Eigen::Index>(i)) = difference(i) / length;
      }
      VectorXd squares = VectorXd::Zero(r.size());
      for (std::size_t v = kParameters; v < variants.size(); ++v) {
        squares += (difference(v) - jacobian * (variants[v] - fit.x)).cwiseAbs2();
      }
      squares /= static_cast<double>(std::size(kProbes));
      squares = squares.cwiseMax(kMemory * doubt);
      doubt = squares;
      trust = (1 + squares.array() / (kTrusted * kTrusted)).rsqrt();
      const MatrixXd slopes = jacobian;
      const VectorXd noise =
          kNoiseFactor / std::max(length, kProbeLength) * squares.array().sqrt() * trust.array();
      jacobian = trust.asDiagonal() * jacobian;
      const std::vector<Eigen::Index> free =
          determined(jacobian, noise, kSeen * std::sqrt(rows), 2 * loads, earlier, fit.undetermined);
      earlier = free;
      if (free.size() > evidence) {
        std::string names;
        for (const Eigen::Index i : free) {
          names += fmt::format("{}{}", names.empty() ? "" : ", ",
                               kOverheadFields[static_cast<std::size_t>(i)].key);
        }
        throw InputError(
            "--from-bench",
            fmt::format(
                "{} {} cannot determine {} parameters ({}): expected {} or more, at loads that differ",
                evidence,
                all.tables ? (evidence == 1 ? "row" : "rows") : (evidence == 1 ? "request" : "requests"),
                free.size(), names, free.size()));
      }
      ++fit.iterations;
      if (free.empty()) break;

      const VectorXd weighted = r.cwiseProduct(trust);
      const double scale = std::max(kLeastScale, 2 * median_size(weighted));
      const VectorXd step = proposed_step(jacobian, weighted, scale, fit.x, fit.start, free);
      std::vector<VectorXd> trials;
      for (const double share : kTrials) trials.emplace_back((fit.x + share * step).cwiseMax(0.0));
      const auto tried = runner.run(trials, every);
      const double cost = cost_of(weighted, scale, fit.x - fit.start);
      double best = cost;
      std::size_t chosen = trials.size();
      for (std::size_t t = 0; t < trials.size(); ++t) {
        const double reached =
            cost_of(residuals(all, tried[t]).cwiseProduct(trust), scale, trials[t] - fit.start);
        if (reached < best) {  // infinity and NaN are not
          best = reached;
          chosen = t;
        }
      }
      if (chosen == trials.size()) {
        // Figures that went elsewhere than the linear model said are doubted; shorter differences may also
        // see a kink that these stepped over.
        if (std::exchange(failed, true) && length <= kShortest) break;
        for (std::size_t t = 0; t < trials.size(); ++t) {
          const VectorXd off = residuals(all, tried[t]) - r - slopes * (trials[t] - fit.x);
          doubt = doubt.cwiseMax(VectorXd(off.array().isFinite().select(off.array().square(), 0.0)));
        }
        continue;
      }
      failed = false;
      fit.x = trials[chosen];
      r = residuals(all, tried[chosen]);
      keep(all, tried[chosen], &Load::after);
      const bool little = best > (1 - kEnough) * cost && length <= kShortest;
      if (little || r.cwiseProduct(trust).norm() < kExact * std::sqrt(rows)) break;
    }
    // What moved and turned out not to be determined goes back, where that costs nothing.
    VectorXd back = fit.x;
    for (Eigen::Index i = 0; i < n; ++i) {
      if (!fit.undetermined[static_cast<std::size_t>(i)].empty()) back[i] = fit.start[i];
    }
    if (back != fit.x) {
      const auto tried = runner.run({back}, every);
      const VectorXd weighted = r.cwiseProduct(trust);
      const double scale = std::max(kLeastScale, 2 * median_size(weighted));
      const double now_cost = cost_of(weighted, scale, fit.x - fit.start);
      const double back_cost = cost_of(residuals(all, tried[0]).cwiseProduct(trust), scale, back - fit.start);
      if (back_cost <= (1 + kEnough) * now_cost + rows * kExact * kExact) {
        fit.x = back;
        keep(all, tried[0], &Load::after);
      }
    }
  } catch (const Interrupted&) {
    if (fit.x == fit.start) throw;
    fit.interrupted = true;
  }
  for (std::size_t i = 0; i < kParameters; ++i) {
    const auto at = static_cast<Eigen::Index>(i);
    if (fit.x[at] != fit.start[at]) fit.undetermined[i].clear();
  }
}

// ------------------------------------------------------------------------------------------- reporting

/// Signed relative errors of a metric's means over loads: median and p90 of their sizes, and their median.
Json errors_of(const Loads& all, bool held_out, std::size_t figure, Values Load::*simulated) {
  std::vector<double> sizes, errors;
  for (const Load& load : all.loads) {
    if (load.held_out != held_out || !(load.measured[figure] > 0) || !((load.*simulated)[figure] > 0))
      continue;
    errors.push_back((load.*simulated)[figure] / load.measured[figure] - 1);
    sizes.push_back(std::abs(errors.back()));
  }
  if (errors.empty()) return {{"n", 0}, {"median_ape", nullptr}, {"p90_ape", nullptr}, {"bias", nullptr}};
  const Distribution size = distribution_of(sizes);
  return {{"n", sizes.size()},
          {"median_ape", size.p50},
          {"p90_ape", size.p90},
          {"bias", distribution_of(errors).p50}};
}

Json report_of(const Loads& all, const Fit& fit, const BenchFitOptions& options, const Overheads& start,
               const std::string& start_name, std::uint64_t simulations) {
  Json parameters = Json::array();
  const Overheads end = overheads_at(fit.x, start);
  for (std::size_t i = 0; i < kParameters; ++i) {
    Overheads a = start, b = end;
    parameters.push_back(
        {{"name", kOverheadFields[i].key},
         {"start", kOverheadFields[i].of(a) / 1e3},
         {"end", kOverheadFields[i].of(b) / 1e3},
         {"determined", fit.undetermined[i].empty()},
         {"why_not", fit.undetermined[i].empty() ? Json(nullptr) : Json(fit.undetermined[i])}});
  }
  Json loads = Json::array();
  bool held_out = false;
  for (const Load& load : all.loads) {
    held_out |= load.held_out;
    Json figures = Json::object();
    for (std::size_t f = 0; f < kFigureCount; ++f) {
      if (!(load.measured[f] > 0)) continue;
      figures[std::string(kFigures[f].name)] = {{"measured", load.measured[f]},
                                                {"before", load.before[f]},
                                                {"after", load.after[f]},
                                                {"error_before", load.before[f] / load.measured[f] - 1},
                                                {"error_after", load.after[f] / load.measured[f] - 1}};
    }
    loads.push_back({{"name", load.name},
                     {"requests", load.requests > 0 ? Json(load.requests) : Json(nullptr)},
                     {"held_out", load.held_out},
                     {"figures", figures}});
  }
  Json errors = Json::object();
  for (const bool out : {false, true}) {
    if (out && !held_out) continue;
    Json& group = errors[out ? "held_out" : "fitted"];
    for (const std::size_t f : {std::size_t{0}, std::size_t{2}}) {
      group[kFigures[f].tpot ? "mean_tpot" : "mean_ttft"] = {
          {"before", errors_of(all, out, f, &Load::before)}, {"after", errors_of(all, out, f, &Load::after)}};
    }
  }
  Json aside = Json::array();
  for (const auto& [reason, rows] : all.set_aside) aside.push_back({{"reason", reason}, {"loads", rows}});
  return {{"schema", "pdsim.fit-bench/1"},
          {"status", fit.interrupted ? "interrupted" : "finished"},
          {"start", start_name},
          {"out", options.out},
          {"iterations", fit.iterations},
          {"simulations", simulations},
          {"errors", errors},
          {"parameters", parameters},
          {"loads", loads},
          {"set_aside", aside},
          {"notes", all.notes}};
}

std::string table_of(const Json& report) {
  constexpr std::size_t kShown = 24;  // loads; all are in --json
  std::string out = fmt::format("{} simulations, {} iterations from {}{}\n\n", report["simulations"].dump(),
                                report["iterations"].dump(), report["start"].get<std::string>(),
                                report["status"] == "interrupted" ? "; interrupted: as far as it came" : "");
  std::size_t width = 20;
  const Json& loads = report["loads"];
  const std::size_t shown = std::min(kShown, loads.size());
  for (std::size_t i = 0; i < shown; ++i) {
    width = std::max(width, loads[i]["name"].get_ref<const std::string&>().size() + 11);
  }
  const auto percent = [](const Json& value) {
    return value.is_number() ? fmt::format("{:+.1f}", 100 * value.get<double>()) : std::string("-");
  };
  out += fmt::format("{:<{}} {:>26} {:>26}\n{:<{}}", "error, %", width, "TTFT: mean, p50", "TPOT: mean, p50",
                     "", width);
  for (int i = 0; i < 2; ++i) out += fmt::format(" {:>13}{:>13}", "before", "after");
  out += '\n';
  for (std::size_t i = 0; i < shown; ++i) {
    const Json& load = loads[i];
    out += fmt::format(
        "{:<{}}", load["name"].get<std::string>() + (load["held_out"] == true ? " (held out)" : ""), width);
    for (const char* metric : {"ttft_ms", "tpot_ms"}) {
      out += ' ';
      for (const char* when : {"error_before", "error_after"}) {
        std::string pair;
        for (const char* which : {"mean_", "p50_"}) {
          const std::string key = std::string(which) + metric;
          pair +=
              fmt::format("{:>6}", load["figures"].contains(key) ? percent(load["figures"][key][when]) : "-");
        }
        out += fmt::format("{:>13}", pair);
      }
    }
    out += '\n';
  }
  if (shown < loads.size()) out += fmt::format("... and {} more (--json has all)\n", loads.size() - shown);

  out += fmt::format("\n{:<20} {:>5} {:>26} {:>26}\n", "error, %: median, p90, bias", "loads", "before",
                     "after");
  for (const auto& [group, metrics] : report["errors"].items()) {
    for (const auto& [metric, both] : metrics.items()) {
      out += fmt::format("{:<27} {:>5}",
                         (group == "fitted" ? "" : "held out, ") +
                             std::string(metric == "mean_ttft" ? "mean TTFT" : "mean TPOT"),
                         both["after"]["n"].dump());
      for (const char* when : {"before", "after"}) {
        const Json& e = both[when];
        out += e["n"] == 0 ? fmt::format(" {:>26}", "-")
                           : fmt::format("   {:>8.1f}{:>8.1f}{:>+8.1f}", 100 * e["median_ape"].get<double>(),
                                         100 * e["p90_ape"].get<double>(), 100 * e["bias"].get<double>());
      }
      out += '\n';
    }
  }
  out += fmt::format("\n{:<26} {:>10} {:>10}\n", "parameter", "start", "end");
  for (const Json& p : report["parameters"]) {
    out += fmt::format("{:<26} {:>10.4g} {:>10.4g}{}\n", p["name"].get<std::string>(),
                       p["start"].get<double>(), p["end"].get<double>(),
                       p["determined"] == false ? "  not determined: " + p["why_not"].get<std::string>()
                       : p["end"] == 0          ? "  at its bound"
                                                : "");
  }
  if (!report["set_aside"].empty()) out += '\n';
  for (const Json& aside : report["set_aside"]) {
    out += fmt::format("set aside {} loads: {}\n", aside["loads"].dump(), aside["reason"].get<std::string>());
  }
  if (!report["notes"].empty()) out += '\n';
  for (const Json& note : report["notes"]) out += fmt::format("note: {}\n", note.get<std::string>());
  return out;
}

}  // namespace

int fit_bench(const BenchFitOptions& options) {
  catch_interrupts();
  const std::filesystem::path out(options.out);
  const std::string folder = out.parent_path().empty() ? "." : out.parent_path().string();
  const bool to_stdout = options.out == "-";
  if (to_stdout && options.json)
    throw InputError("--out -", "cannot be with --json: both would be on stdout");
  if (!to_stdout) {
    if (out.extension() != ".json") {
      throw InputError(options.out, "expected a path that ends in .json, as engine.overheads does");
    }
    const std::string file = out.filename().string();
    check_folder(folder, std::array{std::string_view(file)});
  }

  Loads all = read_loads(options);
  const std::string start_name = options.overheads.empty() ? all.start : options.overheads;
  Overheads start = load_overheads(start_name, "--overheads");
  Fit result;
  result.start.resize(static_cast<Eigen::Index>(kParameters));
  for (std::size_t i = 0; i < kParameters; ++i) {
    result.start[static_cast<Eigen::Index>(i)] = kOverheadFields[i].of(start) / (1e3 * kUnits[i]);
  }
  result.x = result.start;

  const std::size_t most = all.setups.size();
  const std::uint64_t planned = planned_simulations(most, most);
  if (!options.quiet) {
    fmt::print(stderr, "{} load{}: at most {} simulations\n", all.loads.size(),
               all.loads.size() == 1 ? "" : "s", planned);
  }
  Runner runner(all, start, options.jobs, planned, options.quiet);
  std::vector<std::size_t> every(most);
  for (std::size_t i = 0; i < most; ++i) every[i] = i;
  std::vector<Outcome> before = std::move(runner.run({result.start}, every)[0]);
  std::erase_if(all.loads, [&](const Load& load) {
    const Outcome& outcome = before[load.setup];
    if (!outcome.values) ++all.set_aside[outcome.refusal];
    return !outcome.values;
  });
  if (all.loads.empty()) {
    throw InputError(options.files.front(),
                     fmt::format("no load completes in the simulation: {}", all.set_aside.begin()->first));
  }
  // By configuration, so that none is on both sides.
  for (Load& load : all.loads) {
    load.held_out = most >= kHeldOutEvery && load.setup % kHeldOutEvery == kHeldOutEvery - 1;
  }
  fit(all, runner, std::move(before), result);
  runner.finish();

  Overheads fitted = overheads_at(result.x, start);
  for (std::size_t i = 0; i < kParameters; ++i) {  // a tenth of a nanosecond: more is noise
    double& value = kOverheadFields[i].of(fitted);
    const auto at = static_cast<Eigen::Index>(i);
    value = result.x[at] == result.start[at] ? kOverheadFields[i].of(start) : std::round(10 * value) / 10;
  }
  std::string files;
  for (const std::string& file : options.files) {
    files += (files.empty() ? "" : ", ") +
             (file == "-" ? "stdin" : std::filesystem::path(file).filename().string());
  }
  fitted.name = !options.name.empty() ? options.name : to_stdout ? "mine" : out.stem().string();
  fitted.source = fmt::format("pdsim fit --from-bench {}, from {}{}", files,
                              std::filesystem::path(start_name).filename().string(),
                              result.interrupted ? "; interrupted before its end" : "");
  fitted.date = all.date;
  const std::string text = to_json(fitted);
  const Json report = report_of(all, result, options, start, start_name, runner.done());
  if (!to_stdout) write_files(folder, {{out.filename().string(), text}});
  fmt::print(
      to_stdout ? stderr : stdout, "{}",
      options.json ? report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : table_of(report));
  if (to_stdout) fmt::print("{}", text);
  if (result.interrupted)
    fmt::print(stderr, "pdsim: interrupted; the overheads are as far as the fit came\n");
  return result.interrupted ? kInterrupted : kDone;
}

const char* const kBenchFitHelp =
    "--from-bench adjusts what serving takes beside its kernels to your own benchmark: the front end, the "
    "host's\n"
    "work on a step, launches, waits of ranks (models/overheads.hpp). Kernels are never touched: they are "
    "the\n"
    "GPU profile's. Files are vLLM's --save-detailed JSON or AIPerf's profile_export.jsonl, each a load, "
    "with the\n"
    "--scenario that was measured; or a table as validate serving reads it, whose rows become scenarios by "
    "rules.\n"
    "Fitted are mean and median TTFT and TPOT; of a parameter that the loads do not tell apart it says so, "
    "and\n"
    "leaves it. With five loads or more every fifth is not fitted and its error is shown apart. What the "
    "client\n"
    "and its network add to TTFT is in front_end_us then. Loads from a few requests at a time to saturation, "
    "with\n"
    "short and long prompts, tell most.\n"
    "  pdsim fit --from-bench c1.json c16.json c64.json --scenario mine.json --out overheads.json\n"
    "  pdsim replay mine.json --set pools.0.engine.overheads=overheads.json\n";

void add_bench_fit_options(CLI::App& app, BenchFitOptions& options) {
  app.add_option("--from-bench", options.files,
                 "Fit overheads instead of kernels: results of your own serving benchmark");
  app.add_option("--scenario", options.scenario,
                 "With --from-bench: the cluster that was measured; - is stdin");
  app.add_option("--overheads", options.overheads,
                 "With --from-bench: where to start, a preset or a .json file (default: the scenario's)");
  app.add_option("--rules", options.rules,
                 "With a table: what rows do not state (default: scenarios/serving/rules.json)");
  add_repeatable(app, "--only", options.only, "With a table: only rows with this field, column=value");
  add_repeatable(app, "--set", options.sets,
                 "With --from-bench: override a value of the scenario, PATH=VALUE");
  app.add_option("--seed", options.seed, "With --from-bench: seed of all random streams");
  app.add_option("--jobs", options.jobs, "With --from-bench: simulations at a time; 0 = one for each core");
  app.add_flag("--json", options.json, "With --from-bench: one JSON document (schema pdsim.fit-bench/1)");
  app.add_flag("--quiet", options.quiet, "With --from-bench: no progress on stderr");
}

}  // namespace pdsim
