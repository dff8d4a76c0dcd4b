#include "tools/study/workload.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "models/hardware.hpp"
#include "models/json.hpp"
#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "traces/generate.hpp"
#include "traces/reader.hpp"
#include "traces/reshape.hpp"
#include "traces/sessions.hpp"

namespace pdsim {

namespace {

// A file of one's own prices: {"p5en.48xlarge": 41.5, ...}, USD per hour of a whole instance. Those of the
// scenario's instances join the scenario in force.
void apply_prices(const std::string& path, LoadedScenario& loaded) {
  const std::string text = read_text(path, "a JSON object of instance: USD per hour");
  nlohmann::json prices;
  try {
    prices = nlohmann::json::parse(text, nullptr, true, true);
  } catch (const nlohmann::json::exception& error) {
    throw InputError(path, fmt::format("is not JSON: {}", error.what()));
  }
  if (!prices.is_object()) throw InputError(path, "expected a JSON object of instance: USD per hour");
  for (const auto& [instance, usd] : prices.items()) {
    const std::string at = path + ": /" + instance;
    find_instance(instance, at);
    if (!usd.is_number() || !(usd.get<double>() > 0)) {
      throw InputError(at, fmt::format("is {}, expected USD per hour, above 0", usd.dump()));
    }
    loaded.scenario.pricing.usd_per_hour[instance] = usd.get<double>();
  }

  auto in_force = nlohmann::ordered_json::parse(loaded.in_force);
  const bool inside = in_force["pricing"]["plan"].is_object();
  const std::string pointer = inside ? "/pricing/plan/usd_per_hour" : "/pricing/usd_per_hour";
  nlohmann::ordered_json own = nlohmann::ordered_json::object();
  for (const PoolConfig& pool : loaded.scenario.pools) {
    const auto found = loaded.scenario.pricing.usd_per_hour.find(pool.instance);
    if (found != loaded.scenario.pricing.usd_per_hour.end()) own[found->first] = found->second;
  }
  if (own.empty()) return;
  in_force[nlohmann::ordered_json::json_pointer(pointer)] = own;
  loaded.in_force = in_force.dump(2);
  std::erase_if(loaded.origins, [&](const auto& origin) { return origin.first.starts_with(pointer); });
  loaded.origins.emplace_back(pointer, "--prices");
}

}  // namespace

Overrides overrides_of(const ReplayOptions& options) {
  Overrides overrides;
  overrides.trace = options.trace;
  overrides.format = options.format;
  overrides.seed = options.seed;
  overrides.infer_sessions = options.infer_sessions;
  return overrides;
}

void finish_loading(LoadedScenario& loaded, const ReplayOptions& options) {
  if (!options.prices.empty()) apply_prices(options.prices, loaded);
  check_simulated(loaded);
}

LoadedScenario load_scenario_for(const std::string& path, const ReplayOptions& options) {
  if ((path == "-") + (options.trace == "-") + (options.prices == "-") > 1) {
    throw InputError("-",
                     "stands for stdin more than once; expected one of scenario, trace and prices at most");
  }
  LoadedScenario loaded = load_scenario(path, options.sets, overrides_of(options));
  finish_loading(loaded, options);
  return loaded;
}

Trace read_trace_for(const LoadedScenario& loaded, bool quiet) {
  const WorkloadConfig& workload = loaded.scenario.workload;
  if (workload.synthetic) {
    const SyntheticConfig& c = *workload.synthetic;
    const SyntheticWorkload w{c.requests,
                              c.rate,
                              c.poisson,
                              c.isl,
                              c.osl,
                              c.range_ratio,
                              c.shared_prefix,
                              c.distinct_prompts,
                              c.draw == LengthDraw::numpy};
    return synthetic_trace(w, loaded.scenario.pools.front().engine.block_size, loaded.scenario.seed);
  }
  Progress progress("reading", "bytes", quiet);
  ReadOptions options;
  options.seed = loaded.scenario.seed;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (interrupted()) throw Interrupted{};
    progress.update(done, total);
  };
  return read_trace(workload.trace, workload.format, options);
}

Trace load_trace_for(const LoadedScenario& loaded, bool quiet) {
  Trace trace = read_trace_for(loaded, quiet);
  pace_trace(trace, loaded, quiet);
  return trace;
}

void pace_trace(Trace& trace, const LoadedScenario& loaded, bool quiet) {
  const WorkloadConfig& workload = loaded.scenario.workload;
  std::string& sessions = trace.report.sessions;
  if (workload.infer_sessions) sessions = infer_sessions(trace).text;
  if (workload.sessions == Sessions::closed && !trace.sessions.empty()) {  // on the trace's own clock
    const ClosedThinkTimes pauses = closed_think_times(trace, reference_service(workload));
    for (std::size_t r = 0; r < trace.requests.size(); ++r) trace.requests[r].think_time = pauses.pause[r];
    sessions += fmt::format(
        "{}{} pauses between turns: {} recorded, {} from gaps less the reference service{}",
        sessions.empty() ? "" : "; ", pauses.recorded + pauses.derived, pauses.recorded, pauses.derived,
        pauses.floored > 0 ? fmt::format(", {} of them shorter than it and taken as 0", pauses.floored) : "");
  }
  scale_time(trace, workload.time_scale);
  scale_prompts(trace, workload.prompt_scale);
  if (!quiet) fmt::print(stderr, "{}\n", load_summary(trace));
  if (!quiet && !sessions.empty()) fmt::print(stderr, "{}\n", sessions);
}

RunContext context_of(const LoadedScenario& loaded, const Deployment& deployment,
                      const ReplayOptions& options) {
  RunContext context;
  context.scenario = loaded.scenario.name;
  context.scenario_sha256 = loaded.sha256;
  context.profile = deployment.profile;
  context.profile_sha256 = deployment.profile_sha256;
  context.datasheet = deployment.datasheet;
  context.sources = deployment.sources;
  if (deployment.network) context.network_profile_sha256 = deployment.network->sha256;
  context.sets = options.sets;
  context.seed = loaded.scenario.seed;
  context.slo = loaded.scenario.slo;
  const TransferConfig& transfer = loaded.scenario.transfer;
  if (deployment.disaggregated) {
    context.mode = kTransferModes[static_cast<std::size_t>(transfer.mode)].name;
    if (transfer.bidirectional)
      context.retention = kRetentions[static_cast<std::size_t>(transfer.retention.policy)].name;
  }
  context.releases = releases_of(loaded.scenario);
  for (std::size_t n = 0; n < deployment.nodes.size(); ++n) {
    const NodePlan& node = deployment.nodes[n];
    context.nodes.push_back(
        {node.usd_per_hour, node.price_as_of, deployment.topology.nodes[n].gpus, node.gpus_held});
  }
  return context;
}

}  // namespace pdsim
