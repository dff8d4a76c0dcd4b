#include "tools/pdsim/published.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "models/json.hpp"
#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/objective.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/runs.hpp"
#include "tools/study/text.hpp"
#include "tools/study/workload.hpp"

namespace pdsim {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kSchema = "pdsim.published/1";
constexpr std::string_view kReportSchema = "pdsim.published-report/1";
constexpr double kTolerance = 0.1;  // of what a source specifies, unless the figure says otherwise

// ------------------------------------------------------------------------------------------ reading

/// A run before it has run. Runs of one file are independent of each other.
struct Run {
  std::string scenario;           ///< JSON
  std::vector<std::string> sets;  ///< as --set takes them
  json generate;                  ///< a trace's knobs; null = the scenario's own workload
  std::vector<std::string> vary_paths;
  std::vector<json> vary_values;
};

struct File {
  std::string path;
  json document;
  PublishedResult result;
  std::map<std::string, Run> runs;  ///< expanded: "pull", "pull@512"
  std::map<std::string, ordered_json> summaries;
  std::set<std::string> needed;  ///< runs that a figure refers to
};

std::string label_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// A dotted path into the scenario, or into the trace's knobs ("generate.first_message.mean").
void set_value(Run& run, const std::string& path, const json& value) {
  constexpr std::string_view kGenerate = "generate.";
  if (!path.starts_with(kGenerate)) {
    run.sets.push_back(path + "=" + value.dump());
    return;
  }
  std::string pointer = "/" + path.substr(kGenerate.size());
  std::ranges::replace(pointer, '.', '/');
  run.generate[json::json_pointer(pointer)] = value;
}

// `chain`: the runs that led here by "base".
Run read_run(const JsonObject& runs, const std::string& name, std::vector<std::string>& chain) {
  if (std::ranges::find(chain, name) != chain.end()) {
    throw InputError(runs.at(name), fmt::format("is based on itself: {}", fmt::join(chain, " on ")));
  }
  chain.push_back(name);
  const JsonObject in = runs.object(name);
  in.refuse_unknown({"scenario", "base", "set", "generate", "vary", "note"});
  if (in.has("scenario") == in.has("base")) {
    throw InputError(runs.at(name), "expected either a scenario or the run that it is based on");
  }
  Run run;
  if (in.has("base")) {
    const std::string base = in.text("base");
    if (!runs.has(base)) {
      std::vector<std::string_view> known;
      for (const auto& [other, value] : runs.value().items()) known.push_back(other);
      throw InputError(in.at("base"), fmt::format("there is no run '{}'{}, expected one of {}", base,
                                                  did_you_mean(base, known), fmt::join(known, ", ")));
    }
    run = read_run(runs, base, chain);
  } else {
    run.scenario = in.object("scenario").value().dump();
  }
  if (in.has("generate")) run.generate = in.object("generate").value();
  if (in.has("set")) {
    for (const auto& [path, value] : in.object("set").value().items()) set_value(run, path, value);
  }
  if (in.has("vary")) {
    const JsonObject vary = in.object("vary");
    vary.refuse_unknown({"paths", "values"});
    run.vary_paths.clear();
    for (const json& path : vary.array("paths")) run.vary_paths.push_back(label_of(path));
    run.vary_values = vary.array("values").get<std::vector<json>>();
    if (run.vary_paths.empty()) vary.reject("paths", "at least one dotted path into the scenario");
    if (run.vary_values.empty()) vary.reject("values", "at least one value");
  }
  return run;
}

void read_runs(File& file, const JsonObject& root) {
  const JsonObject runs = root.object("runs");
  for (const auto& [name, value] : runs.value().items()) {
    if (name.find_first_of("@:*") != std::string::npos) {
      throw InputError(runs.at(name), "has '@', ':' or '*' in its name, expected none of them");
    }
    std::vector<std::string> chain;
    const Run run = read_run(runs, name, chain);
    if (run.vary_values.empty()) {
      file.runs[name] = run;
      continue;
    }
    for (const json& at : run.vary_values) {
      Run one = run;
      for (const std::string& path : run.vary_paths) set_value(one, path, at);
      file.runs[name + "@" + label_of(at)] = std::move(one);
    }
  }
}

// -------------------------------------------------------------------------------------- expressions

/// Evaluates expressions; while there are no summaries yet, checks them and collects the runs they need.
class Expressions {
 public:
  Expressions(File& file, bool checking) : file_(file), checking_(checking) {}

  // Of the summaries, what value() has looked up since they were cleared.
  std::vector<std::string> paths;
  bool hands_over = false;

  /// `at` takes the place of "*" in "run@*:path". Nothing where the value does not exist.
  std::optional<double> value(const json& expression, const std::string& place, const std::string& at) {
    if (expression.is_number()) return expression.get<double>();
    if (expression.is_string()) return reference(expression.get<std::string>(), place, at);
    if (!expression.is_object()) {
      throw InputError(
          place, fmt::format("is {}, expected a number, \"run:path\" or {{\"op\": ...}}", expression.dump()));
    }
    const JsonObject in(expression, file_.path, place.substr(file_.path.size() + 2));
    const std::string op = in.text("op");
    if (op == "crosses") return crossing(in, place);
    constexpr std::string_view kOps[] = {"+", "-", "*", "/", "min", "max", "crosses"};
    if (std::ranges::find(kOps, op) == std::end(kOps)) {
      in.reject("op", fmt::format("one of {}", fmt::join(kOps, ", ")));
    }
    in.refuse_unknown({"op", "args"});
    const json& args = in.array("args");
    if (args.size() < 2) in.reject("args", "two expressions at least");
    std::optional<double> result;
    for (std::size_t i = 0; i < args.size(); ++i) {
      const std::optional<double> x = value(args[i], fmt::format("{}/args/{}", place, i), at);
      if (i == 0) {
        result = x;
      } else if (!x || !result) {
        result = std::nullopt;
      } else {
        result = apply(op, *result, *x);
      }
    }
    return result;
  }

 private:
  static std::optional<double> apply(const std::string& op, double a, double b) {
    if (op == "+") return a + b;
    if (op == "-") return a - b;
    if (op == "*") return a * b;
    if (op == "min") return std::min(a, b);
    if (op == "max") return std::max(a, b);
    if (b == 0) return std::nullopt;
    return a / b;
  }

  // Where "of", a function of the values "over", first crosses "level" ("way": up, down), linear between
  // them.
  std::optional<double> crossing(const JsonObject& in, const std::string& place) {
    in.refuse_unknown({"op", "level", "over", "of", "way"});
    const double level = in.number("level", -HUGE_VAL);
    const std::string way = in.text_or("way", "either");
    if (way != "up" && way != "down" && way != "either") in.reject("way", "up, down or either");
    if (!in.has("of")) in.reject("of", "an expression with \"run@*:path\" in it");
    std::optional<double> last_x, last_y, found;
    for (const json& at : in.array("over")) {
      if (!at.is_number()) in.reject("over", "numbers that a run varies over");
      const auto x = at.get<double>();
      const std::optional<double> y = value(in.value()["of"], place + "/of", at.dump());
      if (!found && y && last_y) {
        const bool up = *last_y<level&& * y >= level, down = *last_y> level && *y <= level;
        if ((up && way != "down") || (down && way != "up")) {
          found = *last_x + (level - *last_y) / (*y - *last_y) * (x - *last_x);
        }
      }
      last_x = x;
      last_y = y;
    }
    return found;
  }

  std::optional<double> reference(const std::string& text, const std::string& place, const std::string& at) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos) {
      throw InputError(place, fmt::format("is '{}', expected \"run:path.into.its.summary\"", text));
    }
    std::string name = text.substr(0, colon);
    if (name.ends_with("@*")) name = name.substr(0, name.size() - 1) + at;
    if (!file_.runs.contains(name)) {
      std::vector<std::string_view> known;
      for (const auto& [run, ignored] : file_.runs) known.push_back(run);
      throw InputError(place, fmt::format("there is no run '{}'{}, expected one of {}", name,
                                          did_you_mean(name, known), fmt::join(known, ", ")));
    }
    if (checking_) {
      file_.needed.insert(name);
      return std::nullopt;
    }
    const ordered_json& summary = file_.summaries.at(name);
    paths.push_back(text.substr(colon + 1));
    hands_over = hands_over || summary.at("transfers").at("count") > 0;
    return number_at(summary, paths.back(), place, name + ":");
  }

  File& file_;
  bool checking_;
};

// ------------------------------------------------------------------------------------------ figures

Judgement judged(const PublishedRow& row, bool relation) {
  if (!row.simulated) return relation || row.tolerance ? Judgement::off : Judgement::none;
  const double x = *row.simulated;
  if (relation) {
    const bool holds = (!row.above || x > *row.above) && (!row.below || x < *row.below);
    return holds ? Judgement::within : Judgement::off;
  }
  if (!row.tolerance) return Judgement::none;
  if (row.error) return std::abs(*row.error) <= *row.tolerance ? Judgement::within : Judgement::off;
  const bool inside = (!row.published_min || x >= *row.published_min * (1 - *row.tolerance)) &&
                      (!row.published_max || x <= *row.published_max * (1 + *row.tolerance));
  return inside ? Judgement::within : Judgement::off;
}

void read_published(const json& value, const JsonObject& in, PublishedRow& row) {
  if (value.is_null()) return;
  if (value.is_number()) {
    row.published = value.get<double>();
    return;
  }
  if (!value.is_object())
    in.reject("published", "a number, {\"min\", \"max\"}, or null where the source is silent");
  const JsonObject range(value, in.at("published"));
  range.refuse_unknown({"min", "max"});
  if (range.has("min")) row.published_min = range.number("min", -HUGE_VAL);
  if (range.has("max")) row.published_max = range.number("max", -HUGE_VAL);
  if (!row.published_min && !row.published_max) in.reject("published", "\"min\", \"max\" or both");
}

// One figure, or one for each value of its "for"; checking leaves `simulated` empty.
void read_figure(File& file, const JsonObject& in, Expressions& expressions,
                 std::vector<PublishedRow>& rows) {
  in.refuse_unknown({"metric", "unit", "published", "simulated", "tolerance", "expect", "for", "labels",
                     "note", "source", "specified"});
  if (!in.value().contains("simulated")) in.reject("simulated", "an expression over the runs, or null");
  if (!in.value().contains("published")) in.reject("published", "a number, {\"min\", \"max\"}, or null");
  const json all = json::array({nullptr});
  const json& values = in.has("for") ? in.array("for") : all;
  const json& published = in.value()["published"];
  if (in.has("for") && published.is_array() && published.size() != values.size()) {
    in.reject("published", fmt::format("one for each of the {} values of \"for\"", values.size()));
  }
  if (in.has("labels") && (!in.has("for") || in.array("labels").size() != values.size())) {
    in.reject("labels", "one for each value of \"for\"");
  }
  const json& simulated = in.value()["simulated"];
  for (std::size_t i = 0; i < values.size(); ++i) {
    PublishedRow row;
    row.name = file.result.name;
    row.metric = in.text("metric");
    row.unit = in.text_or("unit", "");
    row.source = in.text_or("source", file.result.source);
    row.note = in.text_or("note", "");
    row.specified = in.flag_or("specified", file.result.specified);
    row.silent = simulated.is_null();
    const std::string at = in.has("for") ? label_of(values[i]) : "";
    if (const std::size_t hole = row.metric.find("{}"); hole != std::string::npos && in.has("for")) {
      row.metric.replace(hole, 2, in.has("labels") ? label_of(in.array("labels")[i]) : at);
    }
    read_published(in.has("for") && published.is_array() ? published[i] : published, in, row);
    const bool relation = in.has("expect");
    if (relation) {
      const JsonObject expect = in.object("expect");
      expect.refuse_unknown({"above", "below"});
      if (expect.has("above")) row.above = expect.number("above", -HUGE_VAL);
      if (expect.has("below")) row.below = expect.number("below", -HUGE_VAL);
      if (!row.above && !row.below) in.reject("expect", "\"above\", \"below\" or both");
      if (in.has("tolerance")) in.reject("tolerance", "none beside \"expect\"");
    } else if (in.has("tolerance")) {
      row.tolerance = in.number("tolerance", 0);
    } else if (row.specified && !published.is_null() && !row.silent) {
      row.tolerance = kTolerance;
    }
    expressions.paths.clear();
    expressions.hands_over = false;
    if (!row.silent) row.simulated = expressions.value(simulated, in.at("simulated"), at);
    row.paths = expressions.paths;
    row.hands_over = expressions.hands_over;
    if (row.simulated && row.published && *row.published != 0) {
      row.error = (*row.simulated - *row.published) / std::abs(*row.published);
    }
    row.judgement = judged(row, relation);
    rows.push_back(std::move(row));
  }
}

void read_figures(File& file, bool checking) {
  Expressions expressions(file, checking);
  const JsonObject root(file.document, file.path);
  const json& figures = root.array("figures");
  file.result.rows.clear();
  for (std::size_t i = 0; i < figures.size(); ++i) {
    const JsonObject figure(figures[i], file.path, fmt::format("/figures/{}", i));
    read_figure(file, figure, expressions, file.result.rows);
  }
}

File read_file(const std::string& path) {
  File file;
  file.path = path;
  file.document = parse_json(read_text(path, "a file of published results"), path);
  const JsonObject root(file.document, path);
  if (root.text("schema") != kSchema) root.reject("schema", fmt::format("'{}'", kSchema));
  root.refuse_unknown(
      {"$schema", "schema", "name", "title", "source", "specified", "note", "runs", "figures"});
  file.result.name = root.text("name");
  file.result.title = root.text("title");
  file.result.source = root.text("source");
  file.result.specified = root.flag("specified");
  file.result.note = root.text_or("note", "");
  read_runs(file, root);
  read_figures(file, true);
  return file;
}

std::vector<std::string> files_in(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    if (path == "-" || std::filesystem::exists(path, error)) return {path};
    throw InputError(path, "does not exist, expected a folder of published results, or one such file");
  }
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const std::string extension = entry.path().extension().string();
    if (entry.is_regular_file() && (extension == ".json" || extension == ".jsonc")) {
      files.push_back(entry.path().string());
    }
  }
  std::ranges::sort(files);
  if (files.empty()) throw InputError(path, "holds no published results, expected *.json");
  return files;
}

// ---------------------------------------------------------------------------------------- replaying

std::string place_of(const File& file, const std::string& name) {
  return fmt::format("{}: /runs/{}", file.path, name);
}

// Errors of a run's own say which run it is.
template <typename Work>
auto inside(const File& file, const std::string& name, Work work) {
  try {
    return work();
  } catch (const InputError& error) {
    throw InputError(place_of(file, name), error.what());
  }
}

LoadedScenario load(const File& file, const std::string& name, const Run& run) {
  return inside(file, name, [&] {
    Overrides overrides;
    if (!run.generate.is_null()) {
      read_generate(JsonObject(run.generate, "generate"));
      overrides.trace = "generated";
      overrides.format = "mooncake";
    }
    const std::string folder = std::filesystem::path(file.path).parent_path().string();
    LoadedScenario loaded = parse_scenario(run.scenario, "scenario", folder, run.sets, overrides);
    check_simulated(loaded);
    return loaded;
  });
}

Trace trace_of(const LoadedScenario& loaded, const Run& run) {
  if (run.generate.is_null()) return load_trace_for(loaded, true);
  Trace trace = generate_trace(read_generate(JsonObject(run.generate, "generate")));
  pace_trace(trace, loaded, true);
  return trace;
}

ordered_json replay(const File& file, const std::string& name, const Run& run, const PublishedHooks& hooks) {
  return inside(file, name, [&] {
    const LoadedScenario loaded = load(file, name, run);
    const Deployment deployment = plan_deployment(loaded);
    const Trace trace = trace_of(loaded, run);
    RunHooks run_hooks;
    run_hooks.interrupted = hooks.interrupted;
    const RunResult result = simulate(deployment, loaded, trace, run_hooks);
    if (result.status == RunStatus::interrupted) throw Interrupted{};
    if (result.status == RunStatus::stalled) {
      throw Unfinished{fmt::format("{}: stalled: {}", place_of(file, name), result.stall)};
    }
    ReplayOptions options;
    options.sets = run.sets;
    ordered_json summary = summarize(result, context_of(loaded, deployment, options), trace);
    if (summary["requests"]["completed"] == 0) {
      throw Unfinished{fmt::format("{}: no request completed", place_of(file, name))};
    }
    return summary;
  });
}

}  // namespace

std::vector<PublishedResult> replay_published(const std::string& path, const std::vector<std::string>& only,
                                              unsigned jobs, const PublishedHooks& hooks) {
  std::vector<File> files;
  std::vector<std::string> names;
  for (const std::string& each : files_in(path)) {
    files.push_back(read_file(each));
    const std::string& name = files.back().result.name;
    if (std::ranges::find(names, name) != names.end()) {
      throw InputError(each + ": /name", fmt::format("'{}' is another file's name too", name));
    }
    names.push_back(name);
    for (const std::string& run : files.back().needed) load(files.back(), run, files.back().runs.at(run));
  }
  for (const std::string& name : only) {
    if (std::ranges::find(names, name) != names.end()) continue;
    const std::vector<std::string_view> known(names.begin(), names.end());
    throw InputError("--only", fmt::format("there is no '{}'{}, expected one of {}", name,
                                           did_you_mean(name, known), fmt::join(names, ", ")));
  }
  if (!only.empty()) {
    std::erase_if(files, [&](const File& f) { return std::ranges::find(only, f.result.name) == only.end(); });
  }

  struct Job {
    File* file;
    std::string name;
    ordered_json summary;
  };
  std::vector<Job> work;
  for (File& file : files) {
    for (const std::string& name : file.needed) work.push_back({&file, name, {}});
  }
  const auto one = [&](std::size_t i) {
    try {
      work[i].summary = replay(*work[i].file, work[i].name, work[i].file->runs.at(work[i].name), hooks);
    } catch (const Interrupted&) {  // the files whose runs have all ended are shown
    }
  };
  parallel_for(work.size(), jobs, one, hooks.progress);
  for (Job& job : work) {
    if (!job.summary.is_null()) job.file->summaries[job.name] = std::move(job.summary);
  }
  std::erase_if(files, [](const File& f) { return f.summaries.size() < f.needed.size(); });

  std::vector<PublishedResult> results;
  for (File& file : files) {
    read_figures(file, false);
    results.push_back(std::move(file.result));
  }
  return results;
}

// ----------------------------------------------------------------------------------------- printing

namespace {

struct Counts {
  int figures = 0, figures_within = 0, relations = 0, relations_hold = 0, unjudged = 0;
};

bool by_relation(const PublishedRow& row) {
  return row.above || row.below;
}

Counts counts_of(const std::vector<PublishedResult>& results) {
  Counts c;
  for (const PublishedResult& result : results) {
    for (const PublishedRow& row : result.rows) {
      const bool within = row.judgement == Judgement::within;
      if (row.judgement == Judgement::none) {
        ++c.unjudged;
      } else if (by_relation(row)) {
        ++c.relations;
        c.relations_hold += within;
      } else {
        ++c.figures;
        c.figures_within += within;
      }
    }
  }
  return c;
}

ordered_json or_null(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json published_of(const PublishedRow& row) {
  if (!row.published_min && !row.published_max) return or_null(row.published);
  ordered_json range = ordered_json::object();
  if (row.published_min) range["min"] = *row.published_min;
  if (row.published_max) range["max"] = *row.published_max;
  return range;
}

std::string short_number(double value) {
  return std::abs(value) >= 1000 ? fmt::format("{:.0f}", value) : fmt::format("{:.4g}", value);
}

std::string published_text(const PublishedRow& row) {
  if (row.published) return short_number(*row.published);
  if (row.published_min && row.published_max) {
    return fmt::format("{}..{}", short_number(*row.published_min), short_number(*row.published_max));
  }
  if (row.published_min) return "> " + short_number(*row.published_min);
  if (row.published_max) return "< " + short_number(*row.published_max);
  return "-";
}

std::string verdict_text(const PublishedRow& row) {
  if (row.judgement == Judgement::none) return row.silent ? "not attributed" : "not judged";
  const bool within = row.judgement == Judgement::within;
  if (!by_relation(row)) return within ? "ok" : "OFF";
  std::string wanted;
  if (row.above) wanted += fmt::format(" > {}", short_number(*row.above));
  if (row.below) wanted += fmt::format(" < {}", short_number(*row.below));
  return fmt::format("{}:{}", within ? "sign ok" : "SIGN WRONG", wanted);
}

}  // namespace

ordered_json published_json(const std::vector<PublishedResult>& results, bool interrupted) {
  constexpr const char* kJudgements[] = {"none", "within", "off"};
  ordered_json rows = ordered_json::array();
  for (const PublishedResult& result : results) {
    for (const PublishedRow& row : result.rows) {
      rows.push_back({{"name", row.name},
                      {"metric", row.metric},
                      {"unit", row.unit},
                      {"published", published_of(row)},
                      {"simulated", or_null(row.simulated)},
                      {"specified", row.specified},
                      {"source", row.source},
                      {"error", or_null(row.error)},
                      {"tolerance", or_null(row.tolerance)},
                      {"above", or_null(row.above)},
                      {"below", or_null(row.below)},
                      {"judgement", kJudgements[static_cast<std::size_t>(row.judgement)]},
                      {"note", row.note}});
    }
  }
  const Counts c = counts_of(results);
  return {{"schema", kReportSchema},
          {"status", interrupted ? "interrupted" : "finished"},
          {"rows", rows},
          {"verdict",
           {{"figures", c.figures},
            {"figures_within", c.figures_within},
            {"relations", c.relations},
            {"relations_hold", c.relations_hold},
            {"not_judged", c.unjudged},
            {"text", published_verdict(results)}}}};
}

std::string published_table(const std::vector<PublishedResult>& results) {
  std::string out;
  for (const PublishedResult& result : results) {
    std::size_t widest = 0;
    for (const PublishedRow& row : result.rows) widest = std::max(widest, row.metric.size());
    const auto line = [&](std::string_view metric, std::string_view published, std::string_view simulated,
                          std::string_view unit, std::string_view error, std::string_view verdict) {
      std::string text = fmt::format("  {:<{}} {:>9} {:>9} {:<6} {:>8}  {}", metric, widest, published,
                                     simulated, unit, error, verdict);
      text.erase(text.find_last_not_of(' ') + 1);
      out += text + "\n";
    };
    out += wrapped(fmt::format("{}: {}", result.name, result.title));
    out +=
        wrapped(fmt::format("{}; the source {}.", result.source,
                            result.specified ? "gives the configuration"
                                             : "does not give the whole configuration: sign and order only"),
                2);
    out += wrapped(result.note, 2);
    line("", "published", "simulated", "", "error", "");
    for (const PublishedRow& row : result.rows) {
      const std::string simulated = row.simulated ? short_number(*row.simulated) : row.silent ? "-" : "never";
      const std::string error = row.error ? fmt::format("{:+.1f} %", 100 * *row.error) : "";
      line(row.metric, published_text(row), simulated, row.unit, error, verdict_text(row));
      out += wrapped(row.note, 6);
    }
    out += "\n";
  }
  return out + published_verdict(results) + "\n";
}

std::string published_verdict(const std::vector<PublishedResult>& results) {
  const Counts c = counts_of(results);
  std::vector<std::string> parts;
  if (c.figures > 0)
    parts.push_back(fmt::format("{} of {} figures are within tolerance", c.figures_within, c.figures));
  if (c.relations > 0) {
    parts.push_back(fmt::format("{} of {} signs and orders are the source's", c.relations_hold, c.relations));
  }
  if (c.unjudged > 0) parts.push_back(fmt::format("{} are shown and not judged", c.unjudged));
  return fmt::format("{}", fmt::join(parts, "; "));
}

bool any_off(const std::vector<PublishedResult>& results) {
  const Counts c = counts_of(results);
  return c.figures_within < c.figures || c.relations_hold < c.relations;
}

}  // namespace pdsim
