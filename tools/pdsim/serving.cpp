#include "tools/pdsim/serving.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <utility>

#include "models/csv.hpp"
#include "models/data.hpp"
#include "models/hardware.hpp"
#include "models/json.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/study/parallel.hpp"
#include "tools/study/workload.hpp"

namespace pdsim {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kRulesSchema = "pdsim.serving-rules/1";
constexpr std::string_view kReportSchema = "pdsim.validate-serving/1";

// ------------------------------------------------------------------------------------------ reading

std::string_view without(std::string_view text, std::string_view suffix) {
  if (text.ends_with(suffix)) text.remove_suffix(suffix.size());
  return text;
}

/// A GPU's name as tables spell it ("h200_sxm", "b200-trt") to pdsim's.
std::string gpu_of(std::string_view text) {
  return std::string(without(without(text, "_sxm"), "-trt"));
}

std::vector<ServingPoint> read_points(const Csv& csv) {
  const auto column = [&](std::string_view name) { return csv.column(name); };
  const std::size_t dataset = csv.find("dataset"), id = csv.find("id"), model = column("model"),
                    gpu = column("gpu"), engine = column("engine"), version = csv.find("engine_version"),
                    precision = column("precision"), mode = csv.find("mode"), tensor = column("tp"),
                    pipeline = csv.find("pp"), data = csv.find("dp"), expert = csv.find("ep"),
                    layout = csv.find("disagg_layout"), measured = csv.find("measured"),
                    gpus = csv.find("n_gpus"), isl = column("isl"), osl = column("osl"),
                    concurrency = csv.find("concurrency"), rate = csv.find("rate_rps"),
                    ttft = column("ttft_ms"), tpot = column("tpot_ms"), e2e = csv.find("mean_e2el_ms"),
                    throughput = csv.find("output_tput_per_gpu"),
                    littles = csv.find("output_tput_per_gpu_littles_law"), suspect = csv.find("suspect");
  constexpr double kMost = 1e6;
  const auto whole = [&](std::size_t row, std::size_t at, std::int32_t absent) {
    const double value = csv.number(row, at, 0);
    if (value == 0) return absent;
    if (value == std::floor(value) && value < kMost) return static_cast<std::int32_t>(value);
    throw InputError(csv.place(row), fmt::format("{} is {}: expected a whole number below {:.0f}",
                                                 csv.header()[at], value, kMost));
  };
  const auto length = [&](std::size_t row, std::size_t at) {
    const double value = csv.positive(row, at);
    if (value >= 1 && value < 1e7) return value;
    throw InputError(csv.place(row),
                     fmt::format("{} is {}: expected 1 to 10 million tokens", csv.header()[at], value));
  };
  std::vector<ServingPoint> points(csv.rows());
  const auto read = [&](std::size_t row, ServingPoint& p) {
    const auto text = [&](std::size_t at) { return std::string(csv.text(row, at)); };
    p.dataset = text(dataset);
    p.id = text(id);
    p.model = text(model);
    p.gpu = gpu_of(csv.text(row, gpu));
    p.engine = text(engine);
    p.version = text(version);
    p.precision = text(precision);
    p.mode = mode == Csv::kAbsent ? "agg" : text(mode);
    p.layout = text(layout);
    p.suspect = text(suspect);
    p.measured_on = text(measured);
    p.tensor = whole(row, tensor, 0);
    p.pipeline = whole(row, pipeline, 1);
    p.data = whole(row, data, 1);
    p.expert = whole(row, expert, 1);
    p.gpus = whole(row, gpus, 0);
    p.isl = length(row, isl);
    p.osl = length(row, osl);
    p.concurrency = csv.number(row, concurrency, 0);
    p.rate = csv.number(row, rate, 0);
    p.e2e_ms = csv.number(row, e2e, 0);
    p.measured = {csv.positive(row, ttft), csv.positive(row, tpot), csv.number(row, throughput, 0)};
    if (p.measured.throughput == 0) {
      p.measured.throughput = csv.number(row, littles, 0);
      p.littles_law = true;
    }
  };
  for (std::size_t row = 0; row < csv.rows(); ++row) {
    points[row].line = csv.line(row);
    try {
      read(row, points[row]);
    } catch (const InputError& error) {  // such a row is in the report too
      points[row].refusal = error.what();
    }
  }
  return points;
}

/// --only column=value: keeps the rows whose field in the table has that text.
void keep_only(const Csv& csv, const std::vector<std::string>& only, std::vector<ServingPoint>& points) {
  std::vector<char> kept(points.size(), 1);
  for (const std::string& condition : only) {
    const std::size_t equals = condition.find('=');
    if (equals == std::string::npos) {
      throw InputError("--only", fmt::format("'{}' is no condition: expected column=value", condition));
    }
    const std::string_view name = std::string_view(condition).substr(0, equals);
    const std::size_t column = csv.find(name);
    if (column == Csv::kAbsent) {
      throw InputError("--only",
                       fmt::format("the table has no column '{}'{}", name, did_you_mean(name, csv.header())));
    }
    for (std::size_t row = 0; row < kept.size(); ++row) {
      if (csv.text(row, column) != std::string_view(condition).substr(equals + 1)) kept[row] = 0;
    }
  }
  std::vector<ServingPoint> rest;
  for (std::size_t row = 0; row < kept.size(); ++row) {
    if (kept[row] != 0) rest.push_back(std::move(points[row]));
  }
  if (rest.empty()) throw InputError("--only", fmt::format("no row of {} has it", csv.file()));
  points = std::move(rest);
}

// -------------------------------------------------------------------------------------------- rules

struct Rule {
  std::map<std::string, std::vector<std::string>> when;  ///< column -> one of these
  std::string version_from, version_below;
  std::string measured_from, measured_below;  ///< dates, compared as text
  json set;                                   ///< dotted path into the scenario -> value
  std::string refuse;                         ///< rows that it holds for are not simulated, with this reason
  std::string source;
  std::string place;  ///< "file: /rules/3"
};

constexpr std::string_view kClientKeys[] = {"requests_per_concurrency", "duration_s",
                                            "expert_parallel",          "lines_counted_twice",
                                            "degrees_multiplied",       "no_attention_dp"};
constexpr std::string_view kConditions[] = {"dataset", "model",     "gpu", "engine",
                                            "version", "precision", "mode"};

const std::string& field(const ServingPoint& p, std::string_view name) {
  if (name == "dataset") return p.dataset;
  if (name == "model") return p.model;
  if (name == "gpu") return p.gpu;
  if (name == "engine") return p.engine;
  if (name == "version") return p.version;
  if (name == "precision") return p.precision;
  return p.mode;
}

/// "v0.13.0", "0.17.0" -> {0, 13, 0}; empty when it is no version ("nightly-...").
std::vector<int> version_of(std::string_view text) {
  if (text.starts_with('v')) text.remove_prefix(1);
  std::vector<int> parts;
  int number = -1;
  for (const char c : text) {
    if (c >= '0' && c <= '9') {
      number = std::max(number, 0) * 10 + (c - '0');
    } else if (c == '.' && number >= 0) {
      parts.push_back(number);
      number = -1;
    } else {
      break;
    }
  }
  if (number >= 0) parts.push_back(number);
  return parts;
}

std::vector<Rule> read_rules(const std::string& path) {
  const json document = read_json(path);
  const JsonObject root(document, path);
  if (root.text("schema") != kRulesSchema) root.reject("schema", fmt::format("'{}'", kRulesSchema));
  std::vector<Rule> rules;
  for (std::size_t i = 0; i < root.array("rules").size(); ++i) {
    const JsonObject in = root.element("rules", i);
    for (const auto& item : in.value().items()) {
      constexpr std::string_view kKnown[] = {"if", "set", "refuse", "source"};
      if (std::ranges::find(kKnown, item.key()) == std::end(kKnown)) {
        in.reject(item.key(), fmt::format("is no key of a rule{}", did_you_mean(item.key(), kKnown)));
      }
    }
    Rule rule;
    if (in.has("if")) {
      const JsonObject when = in.object("if");
      for (const auto& item : when.value().items()) {
        if (item.key() == "version_from") {
          rule.version_from = when.text("version_from");
        } else if (item.key() == "version_below") {
          rule.version_below = when.text("version_below");
        } else if (item.key() == "measured_from") {
          rule.measured_from = when.text("measured_from");
        } else if (item.key() == "measured_below") {
          rule.measured_below = when.text("measured_below");
        } else if (std::ranges::find(kConditions, item.key()) == std::end(kConditions)) {
          when.reject(item.key(),
                      fmt::format("one of {}, version_from, version_below, measured_from or "
                                  "measured_below{}",
                                  fmt::join(kConditions, ", "), did_you_mean(item.key(), kConditions)));
        } else {
          for (const json& value : when.array(item.key())) {
            if (!value.is_string()) when.reject(item.key(), "an array of strings");
            rule.when[item.key()].push_back(value.get<std::string>());
          }
        }
      }
    }
    for (const std::string* version : {&rule.version_from, &rule.version_below}) {
      if (!version->empty() && version_of(*version).empty()) {
        in.reject("if", fmt::format("a version in numbers instead of '{}'", *version));
      }
    }
    if (in.has("set")) {
      const JsonObject set = in.object("set");
      rule.set = set.value();
      for (const auto& item : rule.set.items()) {
        const std::string_view key = item.key();
        if (!key.starts_with("client.")) continue;
        const std::string_view name = key.substr(7);
        if (std::ranges::find(kClientKeys, name) == std::end(kClientKeys)) {
          set.reject(key, fmt::format("one of client.{}{}", fmt::join(kClientKeys, ", client."),
                                      did_you_mean(name, kClientKeys)));
        }
        const bool number = name == "requests_per_concurrency" || name == "duration_s";
        const bool fits = number ? item.value().is_number() && item.value() > 0 : item.value().is_boolean();
        if (!fits) set.reject(key, number ? "a number above 0" : "true or false");
      }
    }
    rule.refuse = in.text_or("refuse", "");
    rule.source = in.text("source");
    rule.place = fmt::format("{}: /rules/{}", path, i);
    rules.push_back(std::move(rule));
  }
  return rules;
}

/// A row without a version is taken as older than any; one that is no number ("nightly-...") as neither older
/// nor newer: it keeps the defaults.
bool holds(const Rule& rule, const ServingPoint& p) {
  for (const auto& [column, values] : rule.when) {
    if (std::ranges::find(values, field(p, column)) == values.end()) return false;
  }
  if (!rule.measured_from.empty() && p.measured_on < rule.measured_from) return false;
  if (!rule.measured_below.empty() && p.measured_on >= rule.measured_below) return false;
  const std::vector<int> version = version_of(p.version);
  if (version.empty() && !p.version.empty()) return rule.version_from.empty() && rule.version_below.empty();
  if (!rule.version_from.empty() && version < version_of(rule.version_from)) return false;
  return rule.version_below.empty() || version < version_of(rule.version_below);
}

// ---------------------------------------------------------------------------------------- scenarios

/// Tables of InferenceMAX runs multiply the degrees that one group of GPUs has: "tp 64, ep 8, 64 GPUs" is
/// TP 8 x EP 8 on 8 GPUs; the same runs stand there as "tp 8, ep 8, 8 GPUs" with the same latencies. With
/// "dp" above 1 the attention is data-parallel on the GPUs of tp: each has whole heads.
void settle_layout(ServingPoint& p, bool attention_dp) {
  const std::int32_t labelled = p.gpus;
  if (p.data == 1 && p.expert > 1 && p.gpus == p.tensor && p.tensor > 8 && p.tensor % p.expert == 0) {
    p.notes.push_back(fmt::format("tp {} with ep {} read as tp {} with ep {}", p.tensor, p.expert,
                                  p.tensor / p.expert, p.expert));
    p.tensor /= p.expert;
    p.gpus = p.tensor;
  } else if (p.data > 1 && p.tensor == p.data && p.expert == p.tensor * p.data && !attention_dp) {
    p.notes.push_back(
        fmt::format("tp {}, dp {}, ep {} read as tp {} with ep {}: the script has no "
                    "data-parallel attention",
                    p.tensor, p.data, p.expert, p.tensor, p.tensor));
    p.expert = p.gpus = p.tensor;
    p.data = 1;
  } else if (p.data > 1 && p.tensor == p.data && p.expert == p.tensor * p.data) {
    p.notes.push_back(fmt::format("tp {}, dp {}, ep {} read as attention on each of {} GPUs apart, ep {}",
                                  p.tensor, p.data, p.expert, p.data, p.data));
    p.expert = p.data;
    p.gpus = p.data;
    p.tensor = 1;
  } else if (p.data > 1 && p.tensor == 1 && p.gpus == p.data && p.data > 8 && p.data == p.expert * p.expert) {
    p.notes.push_back(fmt::format("dp {} with ep {} read as {} GPUs", p.data, p.expert, p.expert));
    p.data = p.expert;
    p.gpus = p.data;
  } else if (p.data > 1 && p.tensor == p.data) {
    p.notes.push_back(
        fmt::format("tp {}, dp {} read as attention on each of {} GPUs apart", p.tensor, p.data, p.data));
    p.gpus = p.data;
    p.tensor = 1;
  }
  if (p.littles_law && p.gpus > 0 && p.gpus != labelled) {
    p.measured.throughput *= static_cast<double>(labelled) / p.gpus;
  }
}

/// Weights cannot be read faster than memory gives them: a step reads at least those that every token
/// meets. A TPOT below that floor is not one; where the row has the end-to-end time it is derived from it.
void check_physics(ServingPoint& p, const ModelSpec& model, const json& scenario, const Gpu& gpu) {
  const Dtype weights = dtype_of(scenario["weights_dtype"].get<std::string>(), "weights_dtype");
  double routed = 0;  // of the experts that one token meets, which tensor and data ranks share
  for (const Layer& layer : model.layers) {
    if (layer.moe) routed += 3.0 * static_cast<double>(model.hidden * model.moe_intermediate) * model.topk;
  }
  const double dense = static_cast<double>(active_parameter_count(model)) - routed;
  const double elements = dense / p.tensor + routed / (p.tensor * p.data);
  const double floor_ms = elements * bytes_per_element(weights) / p.pipeline / gpu.hbm_bytes_per_ns / 1e6;
  if (p.measured.tpot_ms >= floor_ms) return;
  const double derived = p.e2e_ms > 0 && p.osl > 1 ? (p.e2e_ms - p.measured.ttft_ms) / (p.osl - 1) : 0;
  if (derived < floor_ms) {
    p.refusal = fmt::format("TPOT of {:.2f} ms is below the {:.2f} ms that reading the weights takes",
                            p.measured.tpot_ms, floor_ms);
    p.scenario.clear();
    return;
  }
  p.notes.push_back(
      fmt::format("TPOT of {:.2f} ms is below the {:.2f} ms that reading the weights takes; "
                  "{:.2f} ms follows from the end-to-end time",
                  p.measured.tpot_ms, floor_ms, derived));
  p.measured.tpot_ms = derived;
  p.e2e_tpot = true;
}

/// Sets what a dotted path of a rule names. InputError at the rule when the path leads through what is no
/// object.
void put(json& scenario, const Rule& rule, const std::string& path, const json& value) {
  std::string pointer = "/" + path;
  std::ranges::replace(pointer, '.', '/');
  try {
    scenario[json::json_pointer(pointer)] = value;
  } catch (const json::exception& error) {
    throw InputError(rule.place + "/set",
                     fmt::format("'{}' is no path into a scenario: {}", path, error.what()));
  }
}

/// The row's scenario; with `requests_per_concurrency` and `duration_s`, which only rules know.
void make_scenario(ServingPoint& p, const std::vector<Rule>& rules) {
  const auto refuse = [&](std::string why) { p.refusal = std::move(why); };
  if (!p.suspect.empty()) return refuse("the table calls it suspect: " + p.suspect);
  json scenario = {{"name", fmt::format("line {}", p.line)},
                   {"model", p.model},
                   {"router", {{"hop_ms", 0.001}}},
                   {"workload", {{"synthetic", json::object()}}}};
  json client = json::object();
  scenario["pools"] =
      json::array({{{"role", "colocated"}, {"replicas", 1}, {"gpu", p.gpu}, {"engine", json::object()}}});
  std::string refused;
  for (const Rule& rule : rules) {
    if (!holds(rule, p)) continue;
    if (std::ranges::find(p.sources, rule.source) == p.sources.end()) p.sources.push_back(rule.source);
    if (!rule.refuse.empty()) refused = rule.refuse;
    if (rule.set.is_null()) continue;
    for (const auto& [path, value] : rule.set.items()) {
      if (path.starts_with("client.")) {
        client[path.substr(7)] = value;
      } else if (path.starts_with("engine.")) {
        // A flag that follows the load: max_num_seqs = concurrency, max_num_batched_tokens = 2 x isl.
        if (value == "concurrency" && p.concurrency < 1) {
          return refuse(fmt::format("{} follows the concurrency, which the row does not state", path));
        }
        put(scenario["pools"][0], rule, path,
            value == "concurrency" ? json(std::llround(p.concurrency))
            : value == "2 x isl"   ? json(std::llround(2 * p.isl))
                                   : value);
      } else {
        put(scenario, rule, path, value);
      }
    }
  }
  if (!refused.empty()) return refuse(refused);
  if (p.tensor == 0) return refuse("it does not state its parallelism");
  if (client.value("degrees_multiplied", false)) settle_layout(p, !client.value("no_attention_dp", false));
  if (client.value("expert_parallel", false) && p.expert == 1 && p.tensor > 1) {
    p.notes.push_back(
        fmt::format("ep 1 read as ep {}: the script always turns expert parallelism on", p.tensor));
    p.expert = p.tensor;
  }
  scenario["pools"][0]["tensor_parallel"] = p.tensor;
  scenario["pools"][0]["pipeline_parallel"] = p.pipeline;
  scenario["pools"][0]["data_parallel"] = p.data;
  scenario["pools"][0]["expert_parallel"] = p.expert;
  if (client.value("lines_counted_twice", false)) {
    p.measured.tpot_ms *= 2;
    if (p.e2e_ms > 0) p.osl = 1 + std::round((p.e2e_ms - p.measured.ttft_ms) / p.measured.tpot_ms);
    p.notes.push_back(
        fmt::format("its client counted every token twice: TPOT taken as {:.2f} ms, {:.0f} output "
                    "tokens from the end-to-end time",
                    p.measured.tpot_ms, p.osl));
    p.measured.throughput = 0;
  }
  if (!scenario["workload"].is_object() || !scenario["workload"]["synthetic"].is_object() ||
      !scenario["model"].is_string() || !scenario.value("weights_dtype", json("")).is_string()) {
    throw InputError("rules",
                     "expected workload.synthetic to stay an object, model and weights_dtype strings");
  }
  json& synthetic = scenario["workload"]["synthetic"];
  synthetic["isl"] = std::llround(p.isl);
  synthetic["osl"] = std::llround(p.osl);
  if (p.concurrency > 0) {
    const auto in_flight = std::llround(p.concurrency);
    synthetic["concurrency"] = in_flight;
    synthetic["requests"] = std::llround(p.concurrency * client.value("requests_per_concurrency", 10.0));
  } else if (p.rate > 0) {
    synthetic["rate"] = p.rate;
    synthetic["requests"] = std::max(1LL, std::llround(p.rate * client.value("duration_s", 600.0)));
  } else {
    return refuse("it states neither concurrency nor rate");
  }
  if (!scenario.contains("weights_dtype")) {
    return refuse(fmt::format("no rule says what weights '{}' are", p.precision));
  }
  p.scenario = scenario.dump();
}

struct Outcome {
  std::optional<ServingMeans> means;
  double extrapolated = 0, waiting = 0;
  std::int64_t preemptions = 0;
  bool datasheet = false;
  std::string refusal;
  std::exception_ptr failure;
};

Outcome run(const std::string& text, const std::vector<std::string>& sets,
            const std::function<bool()>& interrupted) {
  Outcome out;
  LoadedScenario loaded;
  try {
    loaded = parse_scenario(text, "scenario", "", sets);
    check_simulated(loaded);
    const Deployment deployment = plan_deployment(loaded);
    const Trace trace = load_trace_for(loaded, true);
    RunHooks hooks;
    hooks.interrupted = interrupted;
    const RunResult result = simulate(deployment, loaded, trace, hooks);
    if (result.status == RunStatus::interrupted) {
      out.refusal = "interrupted";
      return out;
    }
    if (result.status == RunStatus::stalled) {
      out.refusal = "stalled: " + result.stall;
      return out;
    }
    const json s = json::parse(summarize(result, context_of(loaded, deployment, {}), trace).dump());
    const bool patient =
        loaded.scenario.workload.client_timeout == 0;  // else only those that are served count
    if (patient ? s["requests"]["completed"] != s["requests"]["injected"] : s["requests"]["completed"] == 0) {
      out.refusal = fmt::format("{} of {} requests complete: {}", s["requests"]["completed"].dump(),
                                s["requests"]["injected"].dump(), s["requests"]["by_reason"].dump());
      return out;
    }
    const double ttft = s["latency_ms"]["ttft"]["mean"];
    out.means = {ttft, s["latency_ms"]["tpot"]["mean"].get<double>(),
                 s["throughput"]["output_tokens_per_s"].get<double>()};
    out.extrapolated = s["cost_model"]["extrapolated_step_fraction"];
    out.waiting = ttft > 0 ? s["stages_ms"]["prefill_queue"]["mean"].get<double>() / ttft : 0;
    out.preemptions = s["cache"]["preemptions"];
    out.datasheet = s["cost_model"].value("datasheet", false);
  } catch (const InputError& error) {
    if (std::string_view(error.what()).starts_with("--set")) throw;  // no row's fault
    out.refusal = error.what();
  }
  return out;
}

// --------------------------------------------------------------------------------------- statistics

struct Errors {
  std::vector<double> ttft, tpot, throughput;
};

double percentile(std::vector<double> values, double p) {  // numpy's linear one
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const double at = p * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

ordered_json error_json(const std::vector<double>& errors) {
  std::vector<double> absolute(errors.size());
  std::ranges::transform(errors, absolute.begin(), [](double e) { return std::abs(e); });
  if (errors.empty()) return {{"n", 0}, {"median_ape", nullptr}, {"p90_ape", nullptr}, {"bias", nullptr}};
  return {{"n", errors.size()},
          {"median_ape", percentile(absolute, 0.5)},
          {"p90_ape", percentile(absolute, 0.9)},
          {"bias", percentile(errors, 0.5)}};
}

double error_of(double simulated, double measured) {
  return measured > 0 ? simulated / measured - 1 : 0;
}

void add(Errors& errors, const ServingPoint& p) {
  errors.ttft.push_back(error_of(p.simulated->ttft_ms, p.measured.ttft_ms));
  errors.tpot.push_back(error_of(p.simulated->tpot_ms, p.measured.tpot_ms));
  if (p.measured.throughput > 0) {
    errors.throughput.push_back(error_of(p.simulated->throughput, p.measured.throughput));
  }
}

std::string group_of(const ServingPoint& p) {
  return fmt::format("{} {} {} {}{}", p.engine, p.gpu, p.model, p.precision,
                     p.mode == "agg" ? "" : " " + p.mode);
}

double worst_error(const ServingPoint& p) {
  return std::max(std::abs(error_of(p.simulated->ttft_ms, p.measured.ttft_ms)),
                  std::abs(error_of(p.simulated->tpot_ms, p.measured.tpot_ms)));
}

/// What the error of each row is likely due to, the most telling first. `spread` is the largest relative
/// difference among measurements of the same configuration.
std::string likely_cause(const ServingPoint& p, double spread) {
  const double ttft = std::abs(error_of(p.simulated->ttft_ms, p.measured.ttft_ms));
  const double tpot = std::abs(error_of(p.simulated->tpot_ms, p.measured.tpot_ms));
  if (spread > 0.5 * std::max(ttft, tpot) && spread > 0.05) {
    return fmt::format("measurements of this configuration differ by {:.0f} % themselves", 100 * spread);
  }
  if (p.waiting > 0.5 && ttft > tpot) {
    return fmt::format(
        "saturated: {:.0f} % of the simulated TTFT is waiting for KV blocks or a batch slot, "
        "which grows with any error in capacity or step time",
        100 * p.waiting);
  }
  if (p.datasheet) return "the GPU's kernels were not measured: data-sheet figures stand in";
  if (p.extrapolated > 0.5) {
    return fmt::format("{:.0f} % of the steps lie outside what was measured", 100 * p.extrapolated);
  }
  if (p.preemptions > 0) return "preemptions: the KV pool is at its edge";
  if (ttft > 2 * tpot) return "prefill kernels, or what the front end and the first step add to TTFT";
  return tpot > ttft ? "decode kernels or per-step overhead" : "prefill and decode alike: the kernels";
}

}  // namespace

std::vector<ServingPoint> read_serving_points(const std::string& table, const ServingOptions& options) {
  const Csv csv(table);
  std::vector<ServingPoint> points = read_points(csv);
  keep_only(csv, options.only, points);
  const std::vector<Rule> rules = read_rules(
      options.rules.empty() ? (data_dir() / "scenarios" / "serving" / "rules.json").string() : options.rules);
  for (ServingPoint& p : points) {
    if (!p.refusal.empty()) continue;
    make_scenario(p, rules);
    if (p.scenario.empty()) continue;
    try {
      const json scenario = json::parse(p.scenario);
      check_physics(p, load_model(scenario["model"].get<std::string>()), scenario, find_gpu(p.gpu, "gpu"));
    } catch (const InputError& error) {
      p.refusal = error.what();
      p.scenario.clear();
    }
  }
  return points;
}

std::vector<ServingPoint> serve_points(const std::string& table, const ServingOptions& options) {
  std::vector<ServingPoint> points = read_serving_points(table, options);
  // Rows that differ in nothing but what was measured share one run.
  const auto key_of = [](const ServingPoint& p) {
    json scenario = json::parse(p.scenario);
    scenario.erase("name");
    return scenario.dump();
  };
  std::map<std::string, Outcome> outcomes;
  for (const ServingPoint& p : points) {
    if (!p.scenario.empty()) outcomes[key_of(p)];
  }
  std::vector<std::pair<const std::string, Outcome>*> work;
  for (auto& item : outcomes) work.push_back(&item);
  const auto one = [&](std::size_t i) {
    Outcome& out = work[i]->second;
    if (options.interrupted && options.interrupted()) {
      out.refusal = "interrupted";
      return;
    }
    try {
      out = run(work[i]->first, options.sets, options.interrupted);
    } catch (...) {
      out.failure = std::current_exception();
    }
  };
  parallel_for(work.size(), options.jobs, one, options.progress);
  std::map<std::string, std::array<double, 4>> spread;  // by run: least and most TTFT, least and most TPOT
  for (ServingPoint& p : points) {
    if (p.scenario.empty()) continue;
    const std::string key = key_of(p);
    const Outcome& out = outcomes.at(key);
    if (out.failure) std::rethrow_exception(out.failure);
    p.refusal = out.refusal;
    if (!out.means) continue;
    ServingMeans means = *out.means;
    // Per GPU as the table counts them; by Little's law where the table's figure is.
    const double gpus = p.gpus > 0 ? p.gpus : 1;
    if (p.littles_law && p.concurrency > 0) {  // which the table applies to the nominal length
      means.throughput = p.concurrency * p.osl / (means.ttft_ms + means.tpot_ms * (p.osl - 1)) * 1e3;
    }
    means.throughput /= gpus;
    p.simulated = means;
    p.extrapolated = out.extrapolated;
    p.waiting = out.waiting;
    p.preemptions = out.preemptions;
    p.datasheet = out.datasheet;
    const auto [found, fresh] = spread.try_emplace(
        key, std::array{p.measured.ttft_ms, p.measured.ttft_ms, p.measured.tpot_ms, p.measured.tpot_ms});
    if (fresh) continue;
    auto& [ttft_least, ttft_most, tpot_least, tpot_most] = found->second;
    ttft_least = std::min(ttft_least, p.measured.ttft_ms);
    ttft_most = std::max(ttft_most, p.measured.ttft_ms);
    tpot_least = std::min(tpot_least, p.measured.tpot_ms);
    tpot_most = std::max(tpot_most, p.measured.tpot_ms);
  }
  for (ServingPoint& p : points) {
    if (!p.simulated) continue;
    const auto& [ttft_least, ttft_most, tpot_least, tpot_most] = spread.at(key_of(p));
    p.cause = likely_cause(p, std::max(ttft_most / ttft_least, tpot_most / tpot_least) - 1);
  }
  return points;
}

// ----------------------------------------------------------------------------------------- printing

namespace {

struct Groups {
  Errors overall;
  std::vector<std::pair<std::string, Errors>> groups;  ///< in the table's order
  std::map<std::string, std::int64_t> refused;         ///< reason -> rows
  std::int64_t not_simulated = 0;
};

Groups group(const std::vector<ServingPoint>& points) {
  Groups g;
  for (const ServingPoint& p : points) {
    if (!p.simulated) {
      ++g.not_simulated;
      ++g.refused[p.refusal];
      continue;
    }
    if (!p.datasheet) add(g.overall, p);
    const std::string name = group_of(p) + (p.datasheet ? " (datasheet)" : "");
    auto found = std::ranges::find(g.groups, name, &std::pair<std::string, Errors>::first);
    if (found == g.groups.end()) found = g.groups.insert(found, {name, {}});
    add(found->second, p);
  }
  return g;
}

std::vector<const ServingPoint*> worst(const std::vector<ServingPoint>& points, std::size_t most) {
  std::vector<const ServingPoint*> rows;
  for (const ServingPoint& p : points) {
    if (p.simulated) rows.push_back(&p);
  }
  std::ranges::stable_sort(rows,
                           [](const auto* a, const auto* b) { return worst_error(*a) > worst_error(*b); });
  rows.resize(std::min(rows.size(), most));
  return rows;
}

ordered_json errors_json(const Errors& e) {
  return {
      {"ttft", error_json(e.ttft)}, {"tpot", error_json(e.tpot)}, {"throughput", error_json(e.throughput)}};
}

constexpr std::size_t kWorstRows = 12;

}  // namespace

ordered_json serving_json(const std::vector<ServingPoint>& points, bool interrupted) {
  const Groups g = group(points);
  ordered_json report = {{"schema", kReportSchema}, {"status", interrupted ? "interrupted" : "finished"}};
  report["overall"] = {{"n", g.overall.ttft.size()}, {"not_simulated", g.not_simulated}};
  report["overall"].update(errors_json(g.overall));
  report["groups"] = ordered_json::array();
  for (const auto& [name, errors] : g.groups) {
    ordered_json one = {{"name", name}, {"n", errors.ttft.size()}};
    one.update(errors_json(errors));
    report["groups"].push_back(std::move(one));
  }
  report["not_simulated"] = ordered_json::array();
  for (const auto& [reason, rows] : g.refused) {
    report["not_simulated"].push_back({{"reason", reason}, {"rows", rows}});
  }
  report["worst"] = ordered_json::array();
  for (const ServingPoint* p : worst(points, kWorstRows)) {
    report["worst"].push_back(
        {{"line", p->line}, {"id", p->id}, {"error", worst_error(*p)}, {"cause", p->cause}});
  }
  report["rows"] = ordered_json::array();
  for (const ServingPoint& p : points) {
    ordered_json row = {{"line", p.line},
                        {"id", p.id},
                        {"dataset", p.dataset},
                        {"group", group_of(p)},
                        {"isl", p.isl},
                        {"osl", p.osl},
                        {"tp", p.tensor},
                        {"dp", p.data},
                        {"ep", p.expert},
                        {"gpus", p.gpus},
                        {"concurrency", p.concurrency},
                        {"rate", p.rate}};
    const auto means = [](const ServingMeans& m) {
      return ordered_json{
          {"ttft_ms", m.ttft_ms}, {"tpot_ms", m.tpot_ms}, {"output_tokens_per_s_per_gpu", m.throughput}};
    };
    row["measured"] = means(p.measured);
    row["simulated"] = p.simulated ? means(*p.simulated) : ordered_json(nullptr);
    if (p.simulated) {
      row["error"] = {
          {"ttft", error_of(p.simulated->ttft_ms, p.measured.ttft_ms)},
          {"tpot", error_of(p.simulated->tpot_ms, p.measured.tpot_ms)},
          {"throughput", p.measured.throughput > 0
                             ? ordered_json(error_of(p.simulated->throughput, p.measured.throughput))
                             : ordered_json(nullptr)}};
      row["extrapolated_step_fraction"] = p.extrapolated;
      row["datasheet"] = p.datasheet;
      row["cause"] = p.cause;
    } else {
      row["not_simulated"] = p.refusal;
    }
    row["notes"] = p.notes;
    row["sources"] = p.sources;
    report["rows"].push_back(std::move(row));
  }
  return report;
}

std::string serving_table(const std::vector<ServingPoint>& points) {
  const Groups g = group(points);
  std::size_t width = 20;
  for (const auto& [name, errors] : g.groups) width = std::max(width, name.size());
  std::string out = fmt::format("{:<{}} {:>5} {:>23} {:>23} {:>23}\n", "error, %: median, p90, bias", width,
                                "rows", "mean TTFT", "mean TPOT", "output tokens/s/GPU");
  const auto line = [&](const std::string& name, const Errors& e) {
    out += fmt::format("{:<{}} {:>5}", name, width, e.ttft.size());
    for (const auto* errors : {&e.ttft, &e.tpot, &e.throughput}) {
      const ordered_json s = error_json(*errors);
      if (errors->empty()) {
        out += fmt::format(" {:>23}", "-");
      } else {
        out += fmt::format(" {:>7.1f} {:>7.1f} {:>+7.1f}", 100 * s["median_ape"].get<double>(),
                           100 * s["p90_ape"].get<double>(), 100 * s["bias"].get<double>());
      }
    }
    out += "\n";
  };
  for (const auto& [name, errors] : g.groups) line(name, errors);
  line("all measured GPUs", g.overall);
  out += fmt::format("\nworst rows\n");
  for (const ServingPoint* p : worst(points, kWorstRows)) {
    out += fmt::format(
        "  line {}: {}, {}/{}, tp {}{}, {} {}: TTFT {:.0f} for {:.0f} ms, TPOT {:.2f} for {:.2f} ms\n    "
        "{}\n",
        p->line, group_of(*p), p->isl, p->osl, p->tensor,
        p->expert > 1 ? fmt::format(" ep {}", p->expert) : "", p->concurrency > 0 ? "concurrency" : "rate",
        p->concurrency > 0 ? p->concurrency : p->rate, p->simulated->ttft_ms, p->measured.ttft_ms,
        p->simulated->tpot_ms, p->measured.tpot_ms, p->cause);
  }
  if (!g.refused.empty()) out += fmt::format("\nnot simulated: {} rows\n", g.not_simulated);
  for (const auto& [reason, rows] : g.refused) out += fmt::format("  {:>5}  {}\n", rows, reason);
  return out;
}

std::string serving_csv(const std::vector<ServingPoint>& points) {
  std::string out =
      "line,id,group,isl,osl,tp,dp,ep,gpus,concurrency,rate,ttft_ms,simulated_ttft_ms,ttft_error,tpot_ms,"
      "simulated_tpot_ms,tpot_error,output_tput_per_gpu,simulated_output_tput_per_gpu,throughput_error,"
      "extrapolated,datasheet,not_simulated,cause,notes\n";
  const auto plain = [](std::string text) {  // CSV without quoting
    std::ranges::replace(text, ',', ';');
    std::ranges::replace(text, '\n', ' ');
    return text;
  };
  for (const ServingPoint& p : points) {
    out += fmt::format("{},{},{},{},{},{},{},{},{},{},{}", p.line, plain(p.id), plain(group_of(p)), p.isl,
                       p.osl, p.tensor, p.data, p.expert, p.gpus, p.concurrency, p.rate);
    const auto pair = [&](double measured, double simulated) {
      out += fmt::format(",{:.6g}", measured);
      out += p.simulated ? fmt::format(",{:.6g},{:.4f}", simulated, error_of(simulated, measured)) : ",,";
    };
    const ServingMeans none, &s = p.simulated ? *p.simulated : none;
    pair(p.measured.ttft_ms, s.ttft_ms);
    pair(p.measured.tpot_ms, s.tpot_ms);
    pair(p.measured.throughput, s.throughput);
    out += fmt::format(",{:.4f},{},{},{},{}\n", p.extrapolated, p.datasheet ? 1 : 0, plain(p.refusal),
                       plain(p.cause), plain(fmt::format("{}", fmt::join(p.notes, " | "))));
  }
  return out;
}

}  // namespace pdsim
