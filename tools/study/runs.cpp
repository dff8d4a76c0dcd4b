#include "tools/study/runs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"

namespace pdsim {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kKept = 8;  // traces; neighbours in a study use the same few

// Those that may lack arrivals, which ReadOptions::seed then draws. No other trace depends on a seed.
constexpr std::string_view kDrawingFormats[] = {"vllm-bench", "aiperf"};

void read_lengths(const JsonObject& in, std::string_view key, Lengths& lengths) {
  if (!in.has(key)) return;
  const JsonObject object = in.object(key);
  object.refuse_unknown({"mean", "sigma", "min", "max"});
  lengths.mean = object.number_or("mean", lengths.mean, 0);
  lengths.sigma = object.number_or("sigma", lengths.sigma, 0);
  lengths.min = static_cast<std::int32_t>(object.integer_or("min", lengths.min, 1));
  lengths.max = static_cast<std::int32_t>(object.integer_or("max", lengths.max, 1));
}

}  // namespace

GenerateConfig read_generate(const JsonObject& in) {
  in.refuse_unknown({"requests", "rate", "burstiness", "stamp_grid_ms", "system_prompts", "zipf",
                     "system_prompt", "first_message", "message", "output", "max_prompt_tokens",
                     "multi_turn_share", "turns", "think_time_s", "think_time_sigma", "first_token_ms",
                     "output_token_ms", "seed"});
  GenerateConfig c;
  c.requests = static_cast<std::int32_t>(in.integer_or("requests", c.requests, 1));
  c.rate = in.number_or("rate", c.rate, 0);
  c.burstiness = in.number_or("burstiness", c.burstiness, 0);
  c.stamp_grid = ceil_ns(in.number_or("stamp_grid_ms", to_ms(c.stamp_grid), 0) * 1e6);
  c.system_prompts = static_cast<std::int32_t>(in.integer_or("system_prompts", c.system_prompts, 0));
  c.zipf = in.number_or("zipf", c.zipf, 0);
  read_lengths(in, "system_prompt", c.system_prompt);
  read_lengths(in, "first_message", c.first_message);
  read_lengths(in, "message", c.message);
  read_lengths(in, "output", c.output);
  c.max_prompt_tokens = static_cast<std::int32_t>(in.integer_or("max_prompt_tokens", c.max_prompt_tokens, 1));
  c.multi_turn_share = in.number_or("multi_turn_share", c.multi_turn_share, 0);
  c.turns = in.number_or("turns", c.turns, 0);
  c.think_time_s = in.number_or("think_time_s", c.think_time_s, 0);
  c.think_time_sigma = in.number_or("think_time_sigma", c.think_time_sigma, 0);
  c.first_token_ms = in.number_or("first_token_ms", c.first_token_ms, 0);
  c.output_token_ms = in.number_or("output_token_ms", c.output_token_ms, 0);
  c.seed = static_cast<std::uint64_t>(in.integer_or("seed", static_cast<std::int64_t>(c.seed), 0));
  return c;
}

RunSpec read_run(const std::string& path, const ReplayOptions& options) {
  RunSpec spec;
  spec.file = path == "-" ? "<stdin>" : path;
  spec.options = options;
  spec.text = read_text(path, "a scenario file");
  if (path != "-") spec.folder = std::filesystem::path(path).parent_path().string();
  return spec;
}

std::string problem_of(const std::exception& error, const std::string& file) {
  std::string text = error.what();
  if (text.starts_with(file + ": ")) text.erase(0, file.size() + 2);
  return text;
}

LoadedScenario load_run(const RunSpec& spec) {
  Overrides overrides = overrides_of(spec.options);
  if (!spec.generate.empty()) {
    overrides.trace = "generated";
    overrides.format = "mooncake";
  }
  LoadedScenario loaded = parse_scenario(spec.text, spec.file, spec.folder, spec.options.sets, overrides);
  finish_loading(loaded, spec.options);
  return loaded;
}

// ------------------------------------------------------------------------------------------- traces

struct TraceStore::Entry {
  std::mutex making;
  std::shared_ptr<const Trace> trace;
  bool keep = false;  ///< could not be made again
};

std::shared_ptr<const Trace> TraceStore::made(const std::string& key, bool keep,
                                              const std::function<Trace()>& make) {
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(entries_, key, [](const auto& e) { return e.first; });
    if (found != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, found);
    } else {
      entries_.emplace_front(key, std::make_shared<Entry>());
      entries_.front().second->keep = keep;
      for (auto it = entries_.end(); entries_.size() > kKept && it != entries_.begin();) {
        --it;
        if (!it->second->keep) it = entries_.erase(it);
      }
    }
    entry = entries_.front().second;
  }
  const std::lock_guard lock(entry->making);
  if (!entry->trace) entry->trace = std::make_shared<const Trace>(make());
  return entry->trace;
}

std::shared_ptr<const Trace> TraceStore::get(const LoadedScenario& loaded, const std::string& generate) {
  const WorkloadConfig& workload = loaded.scenario.workload;
  json source = json::object();
  if (!generate.empty()) {
    source["generate"] = json::parse(generate);
    if (!source["generate"].contains("seed")) source["generate"]["seed"] = loaded.scenario.seed;
  } else if (workload.synthetic) {
    source["seed"] = loaded.scenario.seed;
    source["synthetic"] = json::parse(loaded.in_force)["workload"]["synthetic"];
    source["block_size"] = loaded.scenario.pools.front().engine.block_size;
  } else {
    source["trace"] = workload.trace;
    if (workload.trace != "-") source["format"] = workload.format;
    if (workload.trace != "-" && std::ranges::count(kDrawingFormats, workload.format) > 0) {
      source["seed"] = loaded.scenario.seed;
    }
  }
  const json paced = {{"source", source},
                      {"time_scale", workload.time_scale},
                      {"prompt_scale", workload.prompt_scale},
                      {"closed", workload.sessions == Sessions::closed},
                      {"infer", workload.infer_sessions},
                      {"ttft", workload.reference_ttft_ms},
                      {"tpot", workload.reference_tpot_ms}};
  return made(paced.dump(), false, [&] {
    Trace trace = *made(source.dump(), workload.trace == "-", [&] {
      if (generate.empty()) return read_trace_for(loaded, quiet_);
      return generate_trace(read_generate(JsonObject(source["generate"], "generate")));
    });
    pace_trace(trace, loaded, quiet_);
    return trace;
  });
}

// --------------------------------------------------------------------------------------------- runs

std::vector<std::string> RunOutcome::worker_names() const {
  std::vector<std::string> names;
  for (const WorkerPlan& worker : deployment.workers) names.push_back(worker.name);
  return names;
}

RunOutcome run_on(LoadedScenario loaded, const ReplayOptions& options, std::shared_ptr<const Trace> trace,
                  const RunHooks& hooks) {
  RunOutcome out;
  out.loaded = std::move(loaded);
  out.deployment = plan_deployment(out.loaded);
  put_defaults_by_gpu(out.loaded, out.deployment);
  out.trace = std::move(trace);
  out.result = simulate(out.deployment, out.loaded, *out.trace, hooks);
  if (out.result.status != RunStatus::abandoned) {
    out.summary = std::make_shared<const ordered_json>(
        summarize(out.result, context_of(out.loaded, out.deployment, options), *out.trace));
  }
  return out;
}

RunOutcome run(const RunSpec& spec, TraceStore& traces, const RunHooks& hooks) {
  LoadedScenario loaded = load_run(spec);
  std::shared_ptr<const Trace> trace = traces.get(loaded, spec.generate);
  return run_on(std::move(loaded), spec.options, std::move(trace), hooks);
}

}  // namespace pdsim
