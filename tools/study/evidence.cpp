#include "tools/study/evidence.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "models/data.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "pdsim.evidence/1";
constexpr GradeError Evidence::*kFigures[] = {&Evidence::ttft, &Evidence::tpot, &Evidence::throughput};
constexpr std::string_view kFigureNames[] = {"ttft", "tpot", "throughput"};

/// A row of the table: the errors of one grade, and for what. Empty = any.
struct Entry {
  Grade grade = Grade::datasheet;
  std::string engine, gpu, model, weights;
  int runs = 0;             ///< compared with measured ones
  int models = 0;           ///< that they are of
  double extrapolated = 0;  ///< share of the median one's steps outside what was measured
  Evidence errors;
};

struct Table {
  std::string command;
  double extrapolated_above = 0;  ///< share of steps
  std::vector<Entry> entries;
};

GradeError read_error(const JsonObject& in) {
  GradeError error;
  error.n = static_cast<int>(in.integer("n", 0));
  if (in.has("rows")) error.rows = static_cast<int>(in.integer("rows", 0));
  if (!error.known()) return error;
  error.median = in.number("median", 0);
  error.p90 = in.number("p90", 0);
  error.bias = in.number("bias", -1);
  return error;
}

std::string table_file() {
  return (data_dir() / "models" / "evidence.json").string();
}

Table read_table() {
  const std::string file = table_file();
  const json document = read_json(file);
  const JsonObject root(document, file);
  if (root.text("schema") != kSchema) root.reject("schema", fmt::format("'{}'", kSchema));
  Table table;
  table.command = root.text("command");
  table.extrapolated_above = root.number("extrapolated_above", 0);
  for (std::size_t i = 0; i < root.array("grades").size(); ++i) {
    const JsonObject in = root.element("grades", i);
    const std::string name = in.text("grade");
    const auto* const grade = std::ranges::find(kGradeNames, name);
    if (grade == kGradeNames.end()) {
      in.reject("grade", fmt::format("one of {}", fmt::join(kGradeNames, "; ")));
    }
    Entry& entry = table.entries.emplace_back();
    entry.grade = static_cast<Grade>(grade - kGradeNames.begin());
    entry.engine = in.text_or("engine", "");
    entry.gpu = in.text_or("gpu", "");
    entry.model = in.text_or("model", "");
    entry.weights = in.text_or("weights", "");
    entry.runs = static_cast<int>(in.integer("runs", 0));
    entry.models = static_cast<int>(in.integer("models", 0));
    entry.extrapolated = in.number_or("extrapolated", 0, 0);
    for (std::size_t f = 0; f < std::size(kFigures); ++f) {
      entry.errors.*kFigures[f] = read_error(in.object(kFigureNames[f]));
    }
  }
  return table;
}

const Table& table() {
  static const Remembered<Table> shipped(read_table);
  return shipped.value();
}

/// What an engine's overheads stand for: the benchmarks of that engine.
std::string_view engine_of(const PoolPlan& pool) {
  if (pool.engine.overheads == "sglang" || pool.engine.overheads == "trtllm") return pool.engine.overheads;
  return "vllm";
}

/// The entry of this grade with these keys; nullptr when there is none.
const Entry* find(Grade grade, std::string_view engine, std::string_view gpu = "",
                  std::string_view model = "", std::string_view weights = "") {
  for (const Entry& e : table().entries) {
    if (e.grade == grade && e.engine == engine && e.gpu == gpu && e.model == model && e.weights == weights) {
      return &e;
    }
  }
  return nullptr;
}

/// That of this GPU, else that of all. InputError when the table has neither.
const Entry& of_gpu_or_any(Grade grade, std::string_view engine, std::string_view gpu) {
  const Entry* entry = find(grade, engine, gpu);
  if (entry == nullptr) entry = find(grade, engine);
  if (entry != nullptr) return *entry;
  throw InputError(
      table_file() + ": /grades",
      fmt::format("has no '{}' of {} for all GPUs; expected what 'pdsim validate evidence' writes "
                  "of a table with rows of that engine",
                  kGradeNames[static_cast<std::size_t>(grade)], engine));
}

/// The larger errors of the two, figure by figure: what rests on both misses by no less than either.
void widen(Evidence& evidence, const Evidence& other) {
  for (const auto figure : kFigures) {
    GradeError& mine = evidence.*figure;
    const GradeError& its = other.*figure;
    if (!its.known()) continue;
    const double p90 = std::max(mine.p90, its.p90);
    if (!mine.known() || its.median > mine.median) mine = its;
    mine.p90 = p90;
  }
}

std::string percent(const GradeError& error) {
  return error.known() ? fmt::format("{:.1f} %", 100 * error.median) : "an unknown amount";
}

/// The errors in force, which only all parts of a run together decide.
std::string missed(const Evidence& errors) {
  return fmt::format("taken to miss TTFT by {} in the median, TPOT by {} and throughput by {}",
                     percent(errors.ttft), percent(errors.tpot), percent(errors.throughput));
}

constexpr std::string_view kEngineNames[][2] = {
    {"vllm", "vLLM"}, {"sglang", "SGLang"}, {"trtllm", "TensorRT-LLM"}};

std::string_view engine_name(std::string_view engine) {
  for (const auto& [key, name] : kEngineNames) {
    if (key == engine) return name;
  }
  return engine;
}

constexpr std::string_view kBenchmark =
    "run `vllm bench serve ... --save-result --save-detailed` on this deployment, then `pdsim validate run "
    "SCENARIO --bench FILE`: its errors are this deployment's own";

std::string measure_kernels(std::string_view gpu, std::string_view what) {
  return fmt::format(
      "measure {} on {} with aiconfigurator's collector, run `pdsim fit TABLES --out PROFILE.json`, and give "
      "the scenario \"gpu_profile\": \"PROFILE.json\"",
      what, gpu);
}

/// The entry of runs like those of this pool; nullptr when none was compared.
const Entry* compared_with(const Deployment& deployment, const PoolPlan& pool) {
  return find(Grade::measured_here, engine_of(pool), pool.gpu->name, deployment.model.name,
              name(deployment.weights));
}

/// A pool whose GPU's kernels were not measured.
Evidence scaled(const PoolPlan& pool) {
  const std::string& gpu = pool.gpu->name;
  const Entry& entry = of_gpu_or_any(Grade::datasheet, engine_of(pool), gpu);
  Evidence out = entry.errors;
  out.grade = Grade::datasheet;
  const std::string runs = entry.runs > 0 ? fmt::format("{} serving runs on such GPUs and ", entry.runs) : "";
  out.text = fmt::format(
      "no kernel of {} was measured: its curves are another GPU's, scaled by data sheets; errors are from "
      "{}what scaling costs between measured GPUs",
      gpu, runs);
  out.to_do = measure_kernels(gpu, "the kernels");
  return out;
}

/// What the steps of one pool rest on, as long as they are like those that were measured.
Evidence computed(const Deployment& deployment, const PoolPlan& pool) {
  if (deployment.datasheet) return scaled(pool);
  const std::string_view engine = engine_of(pool);
  const std::string& gpu = pool.gpu->name;
  const std::string what =
      fmt::format("{} in {} on {}", deployment.model.name, name(deployment.weights), gpu);
  const Entry& all = of_gpu_or_any(Grade::same_gpu, engine, gpu);
  const bool compared = !all.gpu.empty();
  Evidence out = all.errors;
  out.to_do = kBenchmark;
  if (const Entry* own = compared_with(deployment, pool)) {
    for (const auto figure : kFigures) {  // what those runs do not state stays that of all
      if ((own->errors.*figure).known()) out.*figure = own->errors.*figure;
    }
    out.grade = Grade::measured_here;
    out.text = fmt::format("{} {} runs of {} were compared", own->runs, engine_name(engine), what);
    return out;
  }
  out.grade = Grade::same_gpu;
  if (compared) {
    out.text = fmt::format("no {} run of {} was compared; {} runs of {} {} there were", engine_name(engine),
                           what, all.runs, all.models, all.models == 1 ? "model" : "models");
  } else {
    out.text = fmt::format(
        "no {} run on {} was compared, whose kernels were measured; {} runs of {} models on other measured "
        "GPUs were",
        engine_name(engine), gpu, all.runs, all.models);
  }
  return out;
}

/// What steps outside of what was measured leave of that; `outside` is their share.
Evidence beyond_measured(const PoolPlan& pool, double outside) {
  const Entry& entry = of_gpu_or_any(Grade::extrapolated, engine_of(pool), pool.gpu->name);
  Evidence out = entry.errors;
  out.grade = Grade::extrapolated;
  out.text = fmt::format("{:.0f} % of the steps lie outside what was measured", 100 * outside);
  out.to_do = measure_kernels(pool.gpu->name, "the kernels at the shapes of this run");
  return out;
}

Evidence handed_over() {
  Evidence out;
  out.grade = Grade::published;
  out.to_do = kBenchmark;
  const Entry* entry = find(Grade::published, "");
  if (entry == nullptr) {
    out.text = "handing KV over has been compared with nothing";
    return out;
  }
  out.ttft = entry->errors.ttft;
  out.tpot = entry->errors.tpot;
  out.throughput = entry->errors.throughput;
  out.text = fmt::format(
      "handing KV over has been compared with published figures alone: {} latencies and throughputs of "
      "set-ups that are not wholly known",
      entry->runs);
  return out;
}

/// Takes over the weaker of the two grades, with its text; errors are the larger ones.
void weaken(Evidence& evidence, const Evidence& other) {
  if (other.grade > evidence.grade) {
    evidence.grade = other.grade;
    evidence.text = other.text;
    evidence.to_do = other.to_do;
  }
  widen(evidence, other);
}

}  // namespace

Evidence evidence_of(const Deployment& deployment, const nlohmann::ordered_json& summary) {
  PDSIM_CHECK(!deployment.pools.empty(), "a deployment without pools");
  const double outside = summary.at("cost_model").at("extrapolated_step_fraction").get<double>();
  Evidence out = computed(deployment, deployment.pools.front());
  for (const PoolPlan& pool : deployment.pools) {
    weaken(out, computed(deployment, pool));
    const Entry* own = compared_with(deployment, pool);
    const double known = own == nullptr ? 0 : own->extrapolated;  // those runs went as far outside
    const bool beyond = outside - known > table().extrapolated_above;
    if (beyond && !deployment.datasheet) weaken(out, beyond_measured(pool, outside));
  }
  if (deployment.disaggregated) weaken(out, handed_over());
  out.text =
      fmt::format("{}: {}; {}", kGradeNames[static_cast<std::size_t>(out.grade)], out.text, missed(out));
  out.source = table().command;
  return out;
}

const GradeError& error_for(const Evidence& evidence, std::string_view path) {
  constexpr std::string_view kUntilFirst[] = {
      "latency_ms.ttft",     "goodput.slo.ttft",          "transfers.",
      "stages_ms.router",    "stages_ms.failed_attempts", "stages_ms.prefill",
      "stages_ms.reuse",     "stages_ms.handoff",         "stages_ms.decode_admission",
      "stages_ms.transfer_", "stages_ms.first_token"};
  constexpr std::string_view kPerToken[] = {"latency_ms.tpot", "latency_ms.itl", "goodput.slo.tpot",
                                            "goodput.slo.itl", "stages_ms.decode"};
  const auto leads = [&](std::string_view prefix) { return path.starts_with(prefix); };
  if (std::ranges::any_of(kUntilFirst, leads)) return evidence.ttft;
  if (std::ranges::any_of(kPerToken, leads)) return evidence.tpot;
  if (leads("latency_ms.e2e") || leads("goodput.slo.e2e")) {  // the sum of both
    return evidence.ttft.median > evidence.tpot.median ? evidence.ttft : evidence.tpot;
  }
  return evidence.throughput;
}

}  // namespace pdsim
