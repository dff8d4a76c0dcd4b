// `pdsim validate evidence`: by how much simulated figures miss measured ones, grade by grade. It makes
// models/evidence.json.
//
// It runs what `validate serving` and `validate published` run and sorts the errors by what a run rests on
// (tools/study/evidence.hpp). Beside medians and percentiles there are these rules:
//   - published figures count when a run that hands KV over stands behind them and they are a whole latency
//     or throughput, or a ratio of such: the parts of a hand-over are where the simulator's constants are
//     from;
//   - extrapolated: rows with more than kExtrapolatedAbove of such steps, when there are kEnough and they are
//     of kEnoughModels; else the p90 of the stronger grade stands in for the median;
//   - data-sheet GPUs: no less than what scaling costs between measured GPUs (the profile's stated_error,
//     weighted by its rows), nor than the errors of the GPU that they are scaled from.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "models/data.hpp"
#include "models/hardware.hpp"
#include "models/json.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/pdsim/published.hpp"
#include "tools/pdsim/serving.hpp"
#include "tools/study/evidence.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/statistics.hpp"

namespace pdsim {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kSchema = "pdsim.evidence/1";
/// Chosen: a twentieth of the steps moves a mean by less than the errors that measured runs have anyway.
constexpr double kExtrapolatedAbove = 0.05;
constexpr std::size_t kEnough = 20;       // rows, chosen: a p90 then has two rows above it
constexpr std::size_t kEnoughModels = 3;  // chosen: one model's stand-ins say little of another's

struct Options {
  std::string table, published, out;
  ServingOptions serving;
  bool quiet = false;
};

/// Signed relative errors.
struct Errors {
  std::vector<double> ttft, tpot, throughput;
  std::vector<double> outside;  ///< share of each run's steps outside what was measured
  std::set<std::string> models;
};

void add(Errors& errors, const ServingPoint& p, const std::string& model) {
  const auto put = [](std::vector<double>& into, double simulated, double measured) {
    if (measured > 0) into.push_back(simulated / measured - 1);
  };
  put(errors.ttft, p.simulated->ttft_ms, p.measured.ttft_ms);
  put(errors.tpot, p.simulated->tpot_ms, p.measured.tpot_ms);
  put(errors.throughput, p.simulated->throughput, p.measured.throughput);
  errors.outside.push_back(p.extrapolated);
  errors.models.insert(model);
}

GradeError error_of(const std::vector<double>& errors) {
  GradeError e;
  e.n = static_cast<int>(errors.size());
  if (errors.empty()) return e;
  std::vector<double> absolute(errors.size());
  std::ranges::transform(errors, absolute.begin(), [](double x) { return std::abs(x); });
  e.median = percentile_of(absolute, 50);
  e.p90 = percentile_of(absolute, 90);
  e.bias = percentile_of(errors, 50);
  return e;
}

/// TTFT, TPOT, throughput.
struct Triple {
  GradeError ttft, tpot, throughput;
};
constexpr GradeError Triple::*kFigures[] = {&Triple::ttft, &Triple::tpot, &Triple::throughput};
constexpr const char* kFigureNames[] = {"ttft", "tpot", "throughput"};

Triple triple_of(const Errors& errors) {
  return {error_of(errors.ttft), error_of(errors.tpot), error_of(errors.throughput)};
}

/// No less than `least`, figure by figure; of the same rows still.
Triple at_least(Triple errors, const Triple& least) {
  for (const auto figure : kFigures) {
    GradeError& e = errors.*figure;
    const GradeError& l = least.*figure;
    if (!l.known()) continue;
    if (!e.known()) e = l;
    if (l.median > e.median) e.bias = l.bias;
    e.median = std::max(e.median, l.median);
    e.p90 = std::max(e.p90, l.p90);
  }
  return errors;
}

double rounded(double x) {
  constexpr double kDigits = 1e4;
  return std::round(x * kDigits) / kDigits;
}

ordered_json json_of(const GradeError& e) {
  ordered_json json = {{"n", e.n}};
  if (!e.known()) return json;
  if (e.n == 0) json["rows"] = e.rows;
  json["median"] = rounded(e.median);
  json["p90"] = rounded(e.p90);
  json["bias"] = rounded(e.bias);
  return json;
}

void put(ordered_json& into, const Triple& errors) {
  for (std::size_t f = 0; f < std::size(kFigures); ++f) into[kFigureNames[f]] = json_of(errors.*kFigures[f]);
}

// ---------------------------------------------------------------------------------------- the rows

struct Group {
  std::string engine, gpu, model, weights, mode;
  bool datasheet = false;
  auto operator<=>(const Group&) const = default;
};

std::string engine_of(const ServingPoint& p) {
  return p.engine == "trt" ? "trtllm" : p.engine;  // one engine under two names
}

struct Rows {
  std::map<Group, Errors> groups;
  std::map<std::pair<std::string, std::string>, Errors> measured;   ///< by engine, GPU
  std::map<std::pair<std::string, std::string>, Errors> datasheet;  ///< ... where kernels were not measured
  std::map<std::string, Errors> all_measured, all_datasheet, extrapolated;  ///< by engine
};

Rows sort_rows(const std::vector<ServingPoint>& points) {
  Rows rows;
  for (const ServingPoint& p : points) {
    if (!p.simulated) continue;
    const json scenario = json::parse(p.scenario);
    Group group;
    group.engine = engine_of(p);
    group.gpu = find_gpu(p.gpu, "gpu").name;
    group.model = load_model(scenario["model"].get<std::string>()).name;
    group.weights = name(dtype_of(scenario["weights_dtype"].get<std::string>(), "weights_dtype"));
    group.mode = p.mode;
    group.datasheet = p.datasheet;
    const std::pair key{group.engine, group.gpu};
    add(rows.groups[group], p, group.model);
    add((p.datasheet ? rows.datasheet : rows.measured)[key], p, group.model);
    add((p.datasheet ? rows.all_datasheet : rows.all_measured)[group.engine], p, group.model);
    if (!p.datasheet && p.extrapolated > kExtrapolatedAbove) {
      add(rows.extrapolated[group.engine], p, group.model);
    }
  }
  return rows;
}

/// "ttft", "tpot" or "throughput"; empty: none of them, or no relative error that says anything.
std::string_view figure_of(const PublishedRow& row) {
  if (!row.error || !row.hands_over || row.paths.empty()) return "";
  if (row.unit != "ms" && row.unit != "tok/s" && row.unit != "x") return "";  // "%": of a difference
  constexpr std::string_view kOf[][2] = {{"latency_ms.ttft", "ttft"},
                                         {"latency_ms.tpot", "tpot"},
                                         {"latency_ms.itl", "tpot"},
                                         {"throughput.", "throughput"}};
  for (const auto& of : kOf) {
    if (std::ranges::all_of(row.paths, [&](const std::string& path) { return path.starts_with(of[0]); })) {
      return of[1];
    }
  }
  return "";
}

void add(Errors& errors, const PublishedRow& row) {
  const std::string_view figure = figure_of(row);
  if (figure.empty()) return;
  (figure == "ttft" ? errors.ttft : figure == "tpot" ? errors.tpot : errors.throughput).push_back(*row.error);
}

int size_of(const Errors& errors) {
  return static_cast<int>(std::max({errors.ttft.size(), errors.tpot.size(), errors.throughput.size()}));
}

// -------------------------------------------------------------------------------------- the grades

/// What scaling a profile costs, weighted by rows, for each figure alike; not known where it does not say.
struct Scaling {
  std::string gpu, from;
  Triple cost;
};

std::vector<Scaling> scalings() {
  std::vector<Scaling> all;
  for (const std::string& name : profile_names()) {
    const std::string file = (data_dir() / "models" / "profiles" / (name + ".json")).string();
    const json document = read_json(file);
    const JsonObject root(document, file);
    if (!root.has("scaled_from")) continue;
    Scaling& s = all.emplace_back();
    s.gpu = root.text("gpu");
    s.from = load_profile(root.text("scaled_from")).gpu;
    if (!root.has("stated_error")) continue;
    const JsonObject stated = root.object("stated_error");
    double rows = 0;
    GradeError mean;
    for (const auto& [key, value] : stated.value().items()) {
      if (!value.is_object()) continue;
      const JsonObject one = stated.object(key);
      const double weight = one.number("rows", 0);
      rows += weight;
      mean.median += weight * one.number("median_ape", 0);
      mean.p90 += weight * one.number("p90_ape", 0);
    }
    if (rows == 0) continue;
    mean.median /= rows;
    mean.p90 /= rows;
    mean.rows = static_cast<int>(rows);
    s.cost = {mean, mean, mean};
  }
  return all;
}

class Grades {
 public:
  void add(Grade grade, std::string_view engine, std::string_view gpu, std::string_view model,
           std::string_view weights, const Errors& rows, const Triple& errors, std::string_view rule) {
    ordered_json entry = {{"grade", kGradeNames[static_cast<std::size_t>(grade)]}};
    const std::pair<const char*, std::string_view> keys[] = {
        {"engine", engine}, {"gpu", gpu}, {"model", model}, {"weights", weights}};
    for (const auto& [key, value] : keys) {
      if (!value.empty()) entry[key] = value;
    }
    entry["runs"] = size_of(rows);
    entry["models"] = rows.models.size();
    if (!rows.outside.empty()) entry["extrapolated"] = rounded(percentile_of(rows.outside, 50));
    if (!rule.empty()) entry["rule"] = rule;
    put(entry, errors);
    entries.push_back(std::move(entry));
  }
  ordered_json entries = ordered_json::array();
};

const Errors& rows_of(const std::map<std::pair<std::string, std::string>, Errors>& by,
                      const std::string& engine, const std::string& gpu) {
  static const Errors none;
  const auto found = by.find({engine, gpu});
  return found == by.end() ? none : found->second;
}

void add_extrapolated(Grades& out, const std::string& engine, const std::string& gpu, const Errors& beyond,
                      const Errors& stronger) {
  Triple errors = triple_of(stronger);
  std::string rule = "such rows; at least the errors of the stronger grade";
  if (beyond.outside.size() >= kEnough && beyond.models.size() >= kEnoughModels) {
    errors = at_least(triple_of(beyond), errors);
  } else {
    for (const auto figure : kFigures) (errors.*figure).median = (errors.*figure).p90;
    rule = fmt::format(
        "fewer than {} such rows, or of fewer than {} models: the p90 of the stronger grade stands in for "
        "the "
        "median",
        kEnough, kEnoughModels);
  }
  out.add(Grade::extrapolated, engine, gpu, "", "", beyond, errors, rule);
}

ordered_json grades_of(const Rows& rows, const Errors& published) {
  Grades out;
  for (const auto& [group, errors] : rows.groups) {
    if (group.datasheet || group.mode != "agg") continue;
    out.add(Grade::measured_here, group.engine, group.gpu, group.model, group.weights, errors,
            triple_of(errors), "");
  }
  for (const auto& [key, errors] : rows.measured) {
    out.add(Grade::same_gpu, key.first, key.second, "", "", errors, triple_of(errors), "");
  }
  for (const auto& [engine, errors] : rows.all_measured) {
    out.add(Grade::same_gpu, engine, "", "", "", errors, triple_of(errors),
            "all GPUs whose kernels were measured");
  }
  if (size_of(published) > 0) {
    Errors counted = published;
    counted.ttft.insert(counted.ttft.end(), published.tpot.begin(), published.tpot.end());
    counted.ttft.insert(counted.ttft.end(), published.throughput.begin(), published.throughput.end());
    out.add(Grade::published, "", "", "", "", counted, triple_of(published),
            "whole latencies and throughputs of runs that hand KV over, and ratios of them");
  }
  for (const auto& [engine, all] : rows.all_measured) {
    const auto found = rows.extrapolated.find(engine);
    const Errors beyond = found == rows.extrapolated.end() ? Errors{} : found->second;
    for (const auto& [key, errors] : rows.measured) {
      if (key.first == engine) add_extrapolated(out, engine, key.second, beyond, errors);
    }
    add_extrapolated(out, engine, "", beyond, all);
  }
  const std::vector<Scaling> scaled = scalings();
  for (const auto& [engine, all] : rows.all_measured) {
    Triple worst;
    Errors any;
    if (const auto found = rows.all_datasheet.find(engine); found != rows.all_datasheet.end()) {
      any = found->second;
    }
    for (const Scaling& s : scaled) {
      const Errors& own = rows_of(rows.datasheet, engine, s.gpu);
      const Errors& base = rows_of(rows.measured, engine, s.from);
      const Errors& used = size_of(own) > 0 ? own : any;
      Triple errors = at_least(triple_of(used), s.cost);
      errors = at_least(errors, triple_of(size_of(base) > 0 ? base : all));
      worst = at_least(worst, errors);
      out.add(Grade::datasheet, engine, s.gpu, "", "", used, errors,
              fmt::format("{}; at least what scaling costs and the errors of {}",
                          size_of(own) > 0 ? "its own rows" : "rows of other data-sheet GPUs",
                          size_of(base) > 0 ? s.from : "all measured GPUs"));
    }
    out.add(Grade::datasheet, engine, "", "", "", any, worst, "the worst of all data-sheet GPUs");
  }
  return std::move(out.entries);
}

// ---------------------------------------------------------------------------------------- the file

std::string digest_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  return sha256_hex(bytes);
}

/// The digests of a folder's published files, by name, or of one file's.
ordered_json published_digests(const std::string& path) {
  std::vector<fs::path> files;
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    files.emplace_back(path);
  } else {
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension().string().starts_with(".json")) {
        files.push_back(entry.path());
      }
    }
    std::ranges::sort(files);
  }
  ordered_json digests = ordered_json::object();
  for (const fs::path& file : files) digests[file.filename().string()] = digest_of(file.string());
  return digests;
}

/// A file that comes with pdsim by its path there; any other by what it is, since its digest says which.
std::string named(const std::string& path, std::string_view otherwise) {
  std::error_code error;
  const fs::path file = fs::weakly_canonical(path, error);
  const fs::path root = fs::weakly_canonical(data_dir(), error);
  std::string inside = error ? "" : file.lexically_relative(root).generic_string();
  while (inside.ends_with('/')) inside.pop_back();
  return inside.empty() || inside == "." || inside.starts_with("..") ? std::string(otherwise) : inside;
}

ordered_json evidence_json(const Options& options, const std::vector<ServingPoint>& points,
                           const std::vector<PublishedResult>& results) {
  const Rows rows = sort_rows(points);
  const std::string rules = options.serving.rules.empty()
                                ? (data_dir() / "scenarios" / "serving" / "rules.json").string()
                                : options.serving.rules;
  std::string command =
      fmt::format("pdsim validate evidence --serving {} --published {}", named(options.table, "POINTS.csv"),
                  named(options.published, "PUBLISHED"));
  if (!options.serving.rules.empty()) {
    command += fmt::format(" --rules {}", named(options.serving.rules, "RULES.json"));
  }
  for (const std::string& only : options.serving.only) command += fmt::format(" --only '{}'", only);
  ordered_json document = {{"schema", kSchema}, {"pdsim", PDSIM_VERSION}, {"command", command}};
  document["inputs"] = {{"serving", digest_of(options.table)},
                        {"rules", digest_of(rules)},
                        {"published", published_digests(options.published)}};
  document["extrapolated_above"] = kExtrapolatedAbove;
  Errors published;
  ordered_json by_result = ordered_json::array();
  for (const PublishedResult& result : results) {
    Errors own;
    for (const PublishedRow& row : result.rows) {
      add(own, row);
      add(published, row);
    }
    if (size_of(own) == 0) continue;
    ordered_json one = {{"name", result.name}};
    put(one, triple_of(own));
    by_result.push_back(std::move(one));
  }
  document["grades"] = grades_of(rows, published);
  document["groups"] = ordered_json::array();
  for (const auto& [group, errors] : rows.groups) {
    ordered_json one = {{"engine", group.engine},   {"gpu", group.gpu},   {"model", group.model},
                        {"weights", group.weights}, {"mode", group.mode}, {"datasheet", group.datasheet},
                        {"runs", size_of(errors)}};
    put(one, triple_of(errors));
    document["groups"].push_back(std::move(one));
  }
  document["published"] = std::move(by_result);
  return document;
}

int evidence(const Options& options) {
  catch_interrupts();
  const bool to_stdout = options.out.empty() || options.out == "-";
  if (!to_stdout) {
    const std::string name = fs::path(options.out).filename().string();
    check_folder(folder_of(options.out), std::vector<std::string_view>{name});
  }
  std::vector<PublishedResult> results;
  {
    Progress progress("replaying", "runs", options.quiet);
    PublishedHooks hooks;
    hooks.interrupted = interrupted;
    hooks.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
    try {
      results = replay_published(options.published, {}, options.serving.jobs, hooks);
    } catch (const Unfinished& unfinished) {
      progress.finish();
      fmt::print(stderr, "pdsim: {}\n", unfinished.what);
      return kUnfinished;
    }
    progress.finish();
  }
  if (interrupted()) throw Interrupted{};
  Progress progress("simulating", "runs", options.quiet);
  ServingOptions serving = options.serving;
  serving.interrupted = interrupted;
  serving.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const std::vector<ServingPoint> points = serve_points(options.table, serving);
  progress.finish();
  if (interrupted()) throw Interrupted{};
  const std::string text = evidence_json(options, points, results).dump(1) + "\n";
  if (to_stdout) {
    std::fwrite(text.data(), 1, text.size(), stdout);
  } else {
    write_files(folder_of(options.out), {{fs::path(options.out).filename().string(), text}});
  }
  return kDone;
}

}  // namespace

void add_validate_evidence(CLI::App& validate, Command& run) {
  CLI::App* sub = validate.add_subcommand(
      "evidence", "Sort the errors of serving points and published results by what a run rests on");
  auto options = std::make_shared<Options>();
  sub->add_option("--serving", options->table, "Table of serving benchmarks, as 'validate serving' reads it")
      ->required();
  sub->add_option("--published", options->published,
                  "Folder of published results, or one file, as 'validate published' reads it")
      ->required();
  add_serving_options(*sub, options->serving);
  sub->add_option("--out", options->out, "File for the document (schema pdsim.evidence/1); default: stdout");
  sub->add_flag("--quiet", options->quiet, "No progress on stderr");
  sub->footer(
      "models/evidence.json is this command's output: the errors that go with each grade of evidence in the\n"
      "verdicts of compare, thresholds and plan. A weaker grade's errors are never below those of the\n"
      "stronger one that it builds on. Its \"command\" calls inputs that do not come with pdsim POINTS.csv,\n"
      "PUBLISHED and RULES.json; \"inputs\" has their SHA-256.\n\n"
      "Example:\n  pdsim validate evidence --serving points.csv --published scenarios/published --out "
      "models/evidence.json");
  sub->callback([options, &run] { run = [options] { return evidence(*options); }; });
}

}  // namespace pdsim
