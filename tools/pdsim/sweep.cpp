// pdsim sweep: every point of a parameter space, each a simulation, into one SQLite file.
#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/pdsim/sweep_output.hpp"
#include "tools/study/analysis.hpp"
#include "tools/study/database.hpp"
#include "tools/study/evidence.hpp"
#include "tools/study/figures.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/runs.hpp"
#include "tools/study/shard.hpp"
#include "tools/study/space.hpp"
#include "traces/reader.hpp"

namespace pdsim {

namespace {

using Clock = std::chrono::steady_clock;

struct Options : ReplayOptions {
  std::string sweep, db, csv, shard;
  std::vector<std::string> objectives;
  unsigned jobs = 0;
  bool resume = false, allow_mixed_versions = false, dry_run = false, json = false;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Why a run that ended has nothing to show: {"exceeds_kv_cache": 20} -> "20 exceeds_kv_cache".
std::string reasons_of(const nlohmann::ordered_json& summary) {
  std::string why;
  for (const auto& [reason, n] : summary["requests"]["by_reason"].items()) {
    why += fmt::format("{}{} {}", why.empty() ? "" : ", ", n.get<std::uint64_t>(), reason);
  }
  return "no request completed" + (why.empty() ? "" : ": " + why);
}

PointResult run_point(const Space& space, const SweepPoint& point, TraceStore& traces,
                      const RunHooks& hooks) {
  PointResult result;
  result.point = point;
  const auto start = Clock::now();
  try {
    const ReadingLog log;
    const RunSpec spec = space.spec_of(point);
    const RunOutcome outcome = run(spec, traces, hooks);
    if (outcome.result.status == RunStatus::interrupted) throw Interrupted{};
    result.summary = outcome.summary;
    result.evidence = evidence_of(outcome.deployment, *outcome.summary);
    if (outcome.result.status == RunStatus::stalled) {
      result.status = PointStatus::stalled;
      result.error = outcome.result.stall;
    } else if ((*outcome.summary)["requests"]["completed"].get<std::uint64_t>() == 0) {
      result.status = PointStatus::nothing_completed;
      result.error = reasons_of(*outcome.summary);
    }
    const WorkloadConfig& workload = outcome.loaded.scenario.workload;
    result.files = log.files();
    if (spec.generate.empty() && !workload.synthetic) {
      result.files.emplace(workload.trace, outcome.trace->sha256);
    }
  } catch (const InputError& error) {
    result.status = PointStatus::failed;
    result.error = error.what();
  } catch (const std::bad_alloc&) {
    result.status = PointStatus::failed;
    result.error = "out of memory";
  } catch (const std::exception& error) {
    result.status = PointStatus::bug;
    result.error = error.what();
  }
  std::ranges::replace_if(
      result.error, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  result.wall_s = seconds_since(start);
  return result;
}

// Reads the trace that the first point replays, so that its time is nobody's; null when it cannot. What is
// wrong with it whatever the parameters are is wrong with the whole sweep.
std::shared_ptr<const Trace> read_first_trace(const Space& space, const SweepPoint& point,
                                              TraceStore& traces) {
  try {
    const RunSpec spec = space.spec_of(point);
    return traces.get(load_run(spec), spec.generate);
  } catch (const InputError& error) {
    try {
      traces.get(load_run(space.base), space.base.generate);
    } catch (const InputError& without) {
      if (std::string_view(error.what()) == without.what()) throw;
    }
  }
  return nullptr;
}

// -------------------------------------------------------------------------------------------- dry run

constexpr double kDryRunSeconds = 5;  // chosen: long enough for a few points of most sweeps
constexpr std::size_t kDryRunPoints = 3;

struct Estimate {
  double point_s = 0;  ///< one point on one thread
  std::size_t whole = 0, cut = 0, failed = 0;
};

// Runs a few points spread over the sweep, each for its part of the time at most.
Estimate try_points(const Space& space, const std::vector<const SweepPoint*>& points, TraceStore& traces,
                    bool quiet) {
  Estimate estimate;
  const std::size_t tries = std::min(points.size(), kDryRunPoints);
  double sum = 0;
  Progress progress("trying", "points", quiet);
  for (std::size_t t = 0; t < tries; ++t) {
    const SweepPoint& point = *points[tries == 1 ? 0 : t * (points.size() - 1) / (tries - 1)];
    std::uint64_t done = 0, total = 0;
    const auto start = Clock::now();
    RunHooks hooks;
    hooks.interrupted = [&] {
      return interrupted() || seconds_since(start) > kDryRunSeconds / static_cast<double>(tries);
    };
    hooks.progress = [&](std::uint64_t d, std::uint64_t n) { done = d, total = n; };
    try {
      const PointResult result = run_point(space, point, traces, hooks);
      if (result.status == PointStatus::failed || result.status == PointStatus::bug) {
        ++estimate.failed;
        progress.finish();
        fmt::print(stderr, "point {} {}: {}\n", point.number, "would fail", result.error);
      } else {
        ++estimate.whole;
      }
      sum += result.wall_s;
    } catch (const Interrupted&) {
      if (interrupted()) throw;
      ++estimate.cut;
      sum += seconds_since(start) * static_cast<double>(std::max<std::uint64_t>(total, 1)) /
             static_cast<double>(std::max<std::uint64_t>(done, 1));
    }
    progress.update(t + 1, tries);
  }
  estimate.point_s = tries > 0 ? sum / static_cast<double>(tries) : 0;
  return estimate;
}

std::string point_text(const Space& space, const SweepPoint& point) {
  std::string text;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const Parameter& parameter = space.parameters[p];
    text += fmt::format("  {}={}", parameter.name, parameter.labels[point.levels[p]]);
  }
  return text;
}

// Of the file, by point: measured on files of a few hundred points and more.
double bytes_per_point(const Space& space) {
  constexpr double kOfFigure = 6.2, kOfParameter = 9, kFixed = 180;
  return kFixed + kOfFigure * static_cast<double>(figures().size() + space.objectives.size()) +
         kOfParameter * static_cast<double>(space.parameters.size());
}

std::string bytes_text(double bytes) {
  return bytes < 1e5 ? fmt::format("{:.0f} kB", bytes / 1e3) : fmt::format("{:.1f} MB", bytes / 1e6);
}

int dry_run(const Options& options, const Space& space, const ChosenShard& shard,
            const std::vector<const SweepPoint*>& points) {
  constexpr std::size_t kShown = 5;
  std::string out =
      fmt::format("{}: {} point{}", space.name, space.points.size(), space.points.size() == 1 ? "" : "s");
  if (space.excluded > 0) out += fmt::format(", {} combinations excluded by constraints", space.excluded);
  out += "\n";
  if (!shard.shard.whole()) {
    out += fmt::format("shard {}: {} of them\n", shard.shard.text(), points.size());
  }
  for (const Parameter& parameter : space.parameters) {
    std::vector<std::string> shown = parameter.labels;
    constexpr std::size_t kLevels = 8;
    if (shown.size() > kLevels) {
      shown.erase(shown.begin() + kLevels - 2, shown.end() - 1);
      shown.insert(shown.end() - 1, "...");
    }
    out += fmt::format("  {:<32} {:>4} levels: {}\n", parameter.name, parameter.labels.size(),
                       fmt::join(shown, ", "));
  }
  out += fmt::format("objectives: {}\n", [&] {
    std::string names;
    for (const Objective& objective : space.objectives) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", objective.name);
    }
    return names.empty() ? std::string("none") : names;
  }());
  for (std::size_t i = 0; i < std::min(points.size(), kShown); ++i) {
    out += fmt::format("point {}:{}\n", points[i]->number, point_text(space, *points[i]));
  }
  if (points.size() > kShown) out += fmt::format("... and {} more\n", points.size() - kShown);
  if (!points.empty()) {
    TraceStore traces;
    const auto start = Clock::now();
    read_first_trace(space, *points.front(), traces);
    const double reading = seconds_since(start);
    const Estimate e = try_points(space, points, traces, options.quiet);
    const auto threads = std::min<std::size_t>(threads_for(options.jobs), points.size());
    const auto cores = std::min<std::size_t>(threads_for(0), threads);  // more threads are no faster
    const double n = static_cast<double>(points.size()), t = static_cast<double>(cores);
    std::string basis;
    if (e.whole > 0) basis += fmt::format("{} run whole", e.whole);
    if (e.cut > 0) basis += fmt::format("{}{} begun", basis.empty() ? "" : ", ", e.cut);
    if (e.failed > 0) basis += fmt::format("{}{} failed", basis.empty() ? "" : ", ", e.failed);
    out +=
        fmt::format("time: about {} on {} thread{}{}, {:.2g} s a point (it rests on {} point{}: {})\n",
                    short_duration(reading + e.point_s * n / t), threads, threads == 1 ? "" : "s",
                    cores < threads ? fmt::format(" ({} core{})", cores, cores == 1 ? "" : "s") : "",
                    e.point_s, e.whole + e.cut + e.failed, e.whole + e.cut + e.failed == 1 ? "" : "s", basis);
    out += fmt::format("disk: about {}\n", bytes_text(bytes_per_point(space) * n + 60e3));
  }
  out += "nothing was written\n";
  fmt::print("{}", out);
  return kDone;
}

// ----------------------------------------------------------------------------------------------- sweep

void check_options(const Options& options) {
  if (options.dry_run) return;
  if (options.db.empty()) {
    throw InputError("--db", "is missing; expected a file for the results, or --dry-run");
  }
  if (options.db == "-")
    throw InputError("--db", "is -, expected a file: a database cannot go through a pipe");
  if (options.json && options.csv == "-") {
    throw InputError("--csv", "is -, and so is --json's place; expected one of them on stdout");
  }
  check_csv(options.csv);
}

// The files that the sweep reads: its own, its scenario, and the traces of the base and of each level of a
// parameter, as far as those can be loaded.
std::vector<std::string> inputs_of(const Options& options, const Space& space) {
  std::vector<std::string> inputs = {options.sweep, space.base.file, options.trace, options.prices};
  const auto add_trace = [&](const RunSpec& spec) {
    try {
      inputs.push_back(load_run(spec).scenario.workload.trace);
    } catch (const InputError&) {  // the point will say so
    }
  };
  add_trace(space.base);
  if (space.points.empty()) return inputs;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const Parameter& parameter = space.parameters[p];
    SweepPoint point = space.points.front();
    for (std::uint32_t l = 0; l < parameter.sets.size(); ++l) {
      if (std::ranges::none_of(parameter.sets[l],
                               [](const std::string& set) { return set.starts_with("workload"); })) {
        continue;
      }
      if (parameter.numeric) continue;
      point.levels[p] = l;
      add_trace(space.spec_of(point));
    }
  }
  return inputs;
}

// InputError where an objective's path leads to no number in a point's summary. Figures may be left out of a
// summary, and workers and links may have other names at other points.
void check_objectives(const Options& options, const Space& space, const nlohmann::ordered_json& summary) {
  for (const Objective& objective : space.objectives) {
    const bool varies = objective.path.starts_with("workers.") || objective.path.starts_with("links.");
    const bool figure = std::ranges::any_of(figures(), [&](const Figure& f) {
      return f.from == Figure::From::path && f.type != ColumnType::text && f.path == objective.path;
    });
    if (varies || figure) continue;
    number_at(summary, objective.path,
              options.objectives.empty() ? fmt::format("{}: /objectives", options.sweep) : "--objective");
  }
}

// Says what the results are, writes the CSV and closes. `expected`: points of this shard. DatabaseFailed.
int report(const Options& options, const Space& space, const Shard& shard, SweepDatabase& database,
           std::uint64_t expected, bool stopped) {
  const SweepCounts counts = count_points(database, expected);
  const std::vector<ResultRow> rows = database.rows();
  if (options.json) {
    fmt::print("{}", report_json(database, counts, stopped));
  } else {
    std::FILE* to = options.csv == "-" ? stderr : stdout;
    fmt::print(to, "{}{}: {}\n\n{}\nresults             {}\n", space.name,
               shard.whole() ? "" : fmt::format(", shard {}", shard.text()), counts_text(counts),
               sweep_report(space, rows), options.db);
    if (!options.csv.empty() && options.csv != "-" && !stopped) {
      fmt::print(to, "                    {}\n", options.csv);
    }
  }
  std::optional<std::string> no_csv;
  if (!options.csv.empty() && !stopped) {
    try {
      write_csv(database, options.csv);
    } catch (const DatabaseFailed&) {
      throw;
    } catch (const InputError& error) {
      no_csv = error.what();
    }
  }
  const std::vector<std::pair<std::uint64_t, std::string>> errors = database.first_errors();
  database.close();
  if (no_csv) {
    throw InputError("--csv", fmt::format("{}; the results are in {}: the same command with --resume and "
                                          "another --csv writes them",
                                          *no_csv, options.db));
  }

  if (stopped) {
    fmt::print(
        stderr,
        "pdsim: interrupted after {} of {} points, which are in {}: the same command with --resume goes on\n",
        counts.recorded, counts.expected, options.db);
    return kInterrupted;
  }
  for (const auto& [point, error] : errors) fmt::print(stderr, "point {}: {}\n", point, error);
  if (counts.of(PointStatus::bug) > 0) {
    fmt::print(stderr,
               "pdsim: a bug in pdsim at {} of {} points, whose rows have the status bug and its text\n",
               counts.of(PointStatus::bug), counts.expected);
    return kBug;
  }
  if (counts.of(PointStatus::finished) == 0 && counts.expected > 0) {
    fmt::print(stderr, "pdsim: no point finished\n");
    return kUnfinished;
  }
  return kDone;
}

int sweep(const Options& options) {
  catch_interrupts();
  signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is a failed write, and said to be one
  check_options(options);
  const ChosenShard shard = choose_shard(options.shard);
  Space space = read_space(options.sweep, options);
  if (!options.objectives.empty()) {
    std::vector<Objective> objectives;
    for (const std::string& name : options.objectives)
      objectives.push_back(find_objective(name, "--objective"));
    judge_by(space, std::move(objectives));
  }
  std::vector<const SweepPoint*> mine;
  for (const SweepPoint& point : space.points) {
    if (shard.shard.has(point.number)) mine.push_back(&point);
  }
  if (options.dry_run) return dry_run(options, space, shard, mine);

  check_places({{"--db", options.db}, {"--csv", options.csv}}, inputs_of(options, space));

  TraceStore traces;
  std::shared_ptr<const Trace> first;
  if (!mine.empty()) first = read_first_trace(space, *mine.front(), traces);
  SweepDatabase database(options.db, space, shard.shard,
                         {.resume = options.resume, .allow_mixed_versions = options.allow_mixed_versions});
  if (!shard.from.empty() && !options.quiet) {
    fmt::print(stderr, "shard {} (from {})\n", shard.shard.text(), shard.from);
  }
  if (first && !options.quiet) fmt::print(stderr, "{}\n", load_summary(*first));
  bool stopped = false, counted = false;
  std::atomic<std::uint64_t> kept{0};
  try {
    std::vector<const SweepPoint*> todo = mine;
    std::vector<std::uint64_t> there, done;  // when this run begins
    for (const auto& [point, status] : database.statuses()) {
      there.push_back(point);  // what failed is tried again: its cause may be gone
      if (status != PointStatus::failed && status != PointStatus::bug) done.push_back(point);
    }
    kept = there.size();
    counted = true;
    std::erase_if(todo, [&](const SweepPoint* point) {
      return std::binary_search(done.begin(), done.end(), point->number);
    });
    if (!done.empty() && !options.quiet) {
      fmt::print(stderr, "{} of {} points are there already\n", done.size(), mine.size());
    }
    try {
      std::once_flag objectives_checked;
      Progress progress("sweeping", "points", options.quiet);
      RunHooks hooks;
      hooks.interrupted = interrupted;
      parallel_for(
          todo.size(), options.jobs,
          [&](std::size_t i) {
            if (interrupted()) throw Interrupted{};
            const PointResult result = run_point(space, *todo[i], traces, hooks);
            if (result.summary) {
              std::call_once(objectives_checked, [&] { check_objectives(options, space, *result.summary); });
            }
            database.record(result);
            if (!std::ranges::binary_search(there, todo[i]->number)) ++kept;
          },
          [&](std::uint64_t ended, std::uint64_t total) { progress.update(ended, total); });
    } catch (const Interrupted&) {
      stopped = true;
    } catch (const DatabaseFailed&) {
      throw;
    } catch (const InputError&) {
      try {
        database.discard();
      } catch (const InputError&) {  // what went wrong first is what is said
      }
      throw;
    }
    return report(options, space, shard.shard, database, mine.size(), stopped);
  } catch (const DatabaseFailed& error) {
    fmt::print(stderr,
               "pdsim: {}; {}results are kept: once that is put right, the same command with --resume goes "
               "on\n",
               error.what(), counted ? fmt::format("{} of {} ", kept.load(), mine.size()) : "");
    return kUnfinished;
  }
}

}  // namespace

void add_sweep(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand(
      "sweep", "Run every point of a parameter space, into a SQLite file that is whole at every moment");
  sub->add_option("SWEEP", options->sweep, "Sweep file (JSON with comments): see pdsim schema sweep")
      ->required();
  sub->add_option("--db", options->db, "File for the results (made, its folder too, if missing)");
  sub->add_flag("--resume", options->resume,
                "Go on with the file if it is there: runs what is missing, and again what failed");
  sub->add_option("--jobs", options->jobs, "Threads; 0 = one a core")->capture_default_str();
  sub->add_option(
      "--shard", options->shard,
      "I/N: only the points p with p mod N = I, I from 0. /N takes I from the environment. Default: "
      "both from SLURM_ARRAY_TASK_ID and _COUNT, AWS_BATCH_JOB_ARRAY_INDEX and _SIZE, or "
      "JOB_COMPLETION_INDEX and JOB_COMPLETIONS where they are set; 0/1 runs all anyway");
  add_repeatable(*sub, "--objective", options->objectives,
                 "Judge by this instead of the file's objectives: a name such as ttft_p95, or min:PATH or "
                 "max:PATH into the summary");
  sub->add_option(
      "--csv", options->csv,
      "At the end, the view results as CSV, in order of point; - is stdout, and the report then goes "
      "to stderr. The bytes do not depend on --jobs, shards or interruptions");
  sub->add_flag("--json", options->json, "The report as JSON on stdout");
  sub->add_flag("--dry-run", options->dry_run,
                "Print points, parameters, and time and disk that the sweep will take, from a few seconds of "
                "trying; write nothing");
  sub->add_flag(
      "--allow-mixed-versions", options->allow_mixed_versions,
      "Go on with a file of another version of pdsim, whose results, and the data that it ships, may "
      "differ");
  add_replay_options(*sub, *options);
  sub->footer(
      "A point that fails is a row with its error; exit status 3 when none finished. Ctrl-C, kill -9 and a "
      "full "
      "disk lose no finished point.\n\n"
      "The file has\n"
      "  points   point, status (finished, stalled, nothing_completed, failed, bug), error, one column a "
      "parameter\n"
      "  metrics  point, one column a figure of summary.json: its path with _ for dots, as "
      "latency_ms_ttft_p95; evidence, and the median relative errors that go with it\n"
      "  results  a view: points with their metrics; what to read\n"
      "  meta     the sweep, its sha256, version, shard, parameters, objectives, sha256 of the files used\n"
      "  timing   wall seconds, host, version and time of each point: all that differs from run to run\n"
      "and is read by\n"
      "  sqlite3 -header -csv sweep.db 'select * from results'\n"
      "  pandas  pd.read_sql('select * from results', sqlite3.connect('sweep.db'))\n"
      "  DuckDB  attach 'sweep.db' (type sqlite); select * from sweep.results;\n\n"
      "Examples:\n"
      "  pdsim sweep scenarios/sweeps/push-pull-block-fragmentation.json --dry-run\n"
      "  pdsim sweep scenarios/sweeps/push-pull-block-fragmentation.json --db sweep.db --resume\n"
      "  pdsim sweep scenarios/sweeps/push-pull-block-fragmentation.json --db shard-3.db --shard 3/16");
  sub->callback([options, &run] { run = [options] { return sweep(*options); }; });
}

}  // namespace pdsim
