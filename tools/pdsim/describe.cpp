// pdsim describe: what follows from a scenario before the first request arrives.
//
// One JSON document is computed, with the deployment and the functions that a replay uses: the step model,
// the arithmetic of a pull, a network with nothing else on it. The text for people is that document laid
// out; neither knows a figure that the other does not.
//
// Invariants: "scenario" in the document is a valid input, and gives the same document but for "origins".
// Text lines have at most 100 columns, unless a name or path of the user's own is longer.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "sim/cluster/pull_plan.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/workload.hpp"

// A JSON value as it reads: a string without its quotes.
template <>
struct fmt::formatter<nlohmann::ordered_json> : fmt::formatter<std::string> {
  auto format(const nlohmann::ordered_json& value, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(value.is_string() ? value.get<std::string>() : value.dump(),
                                               context);
  }
};

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

// The prompt, and the context, that examples are computed for; shorter where a pool cannot take it.
constexpr std::int32_t kTypicalTokens = 8192;
constexpr std::int32_t kDecodeBatches[] = {1, 8, 64};
// Sizes of wire operations at which a link's efficiency is shown.
constexpr Bytes kOperationSizes[] = {8 << 10, 64 << 10, 256 << 10, 1 << 20};

std::size_t index(std::int32_t i) {
  return static_cast<std::size_t>(i);
}

double us(Nanos ns) {
  return static_cast<double>(ns) / 1e3;
}

// ------------------------------------------------------------------------------------------ the document

// Since which vLLM release the behaviour that a scenario asks for exists.
struct Feature {
  std::string_view name, since, source;
  bool (*used)(const Scenario&, const Deployment&);
};

template <TransferMode mode>
bool hands_over(const Scenario& s, const Deployment& d) {
  return d.disaggregated && s.transfer.mode == mode;
}

template <auto test>
bool any_engine(const Scenario&, const Deployment& d) {
  return std::ranges::any_of(d.pools, [](const PoolPlan& pool) { return test(pool.engine); });
}

constexpr Feature kFeatures[] = {
    {"transfer.mode pull (NixlConnector)", "0.9", "docs.vllm.ai/en/v0.9.0", hands_over<TransferMode::pull>},
    {"transfer.mode push (NixlPushConnector)", "0.27.1 or before", "vllm#53095 runs it",
     hands_over<TransferMode::push>},
    {"transfer.mode push_layerwise", "unreleased", "vllm#56874", hands_over<TransferMode::push_layerwise>},
    {"transfer.mode push_progressive", "unreleased", "vllm#55589",
     hands_over<TransferMode::push_progressive>},
    {"transfer.bidirectional", "0.21", "vllm#32553, llm-d#1307",
     [](const Scenario& s, const Deployment& d) { return d.disaggregated && s.transfer.bidirectional; }},
    {"transfer.kv_lease_duration_s with heartbeats", "0.22", "vllm#41383, llm-d#1543",
     [](const Scenario&, const Deployment& d) { return d.disaggregated; }},
    {"transfer.pd_recompute_threshold", "unreleased", "vllm#55801",
     [](const Scenario& s, const Deployment& d) {
       return d.disaggregated && s.transfer.pd_recompute_threshold > 0;
     }},
    {"transfer.background_receiver", "unreleased", "vllm#57987",
     [](const Scenario& s, const Deployment& d) {
       return d.disaggregated && s.transfer.background_receiver;
     }},
    {"transfer.seed_first_token, fast_kv_*", "unreleased", "vllm#50913, vllm#51919",
     [](const Scenario& s, const Deployment& d) {
       const TransferConfig& t = s.transfer;
       return d.disaggregated && (t.seed_first_token || t.fast_kv_dispatch || t.fast_kv_notify);
     }},
    {"engine.async_scheduling as the default", "0.14", "vllm#27614, vllm#31998",
     any_engine<[](const EngineConfig& e) { return e.async_scheduling; }>},
    {"engine.gpu_memory_utilization 0.92 as the default", "0.21", "vllm#38284",
     any_engine<[](const EngineConfig& e) {
       return e.gpu_memory_utilization == EngineConfig{}.gpu_memory_utilization;
     }>},
};

constexpr std::string_view kAttentionNames[] = {"none", "full", "sliding", "linear", "mla", "dsa"};
constexpr std::string_view kTransportNames[] = {"none", "local", "fabric"};

Json model_json(const Deployment& d) {
  const ModelSpec& m = d.model;
  Json attention = Json::object();
  std::int32_t moe_layers = 0;
  for (const Layer& layer : m.layers) {
    Json& kind = attention[std::string(kAttentionNames[static_cast<std::size_t>(layer.attention)])];
    kind["layers"] = kind.is_null() ? 1 : kind["layers"].get<int>() + 1;
    moe_layers += layer.moe ? 1 : 0;
  }
  for (const auto& [kind, a] : attention.items()) {
    if (kind == "none") continue;
    const bool linear = kind == "linear";
    a["heads"] = linear ? m.linear_value_heads : m.heads;
    if (kind == "full" || kind == "sliding") a.update({{"kv_heads", m.kv_heads}, {"head_dim", m.head_dim}});
    if (kind == "sliding") a["window"] = m.window;
    if (linear) a.update({{"key_dim", m.linear_key_dim}, {"value_dim", m.linear_value_dim}});
    if (kind == "mla" || kind == "dsa") a.update({{"latent", m.latent}, {"rope", m.rope}});
    if (kind == "dsa") a["index_topk"] = m.index_topk;
  }
  Json json{{"name", m.name},
            {"architecture", m.architecture},
            {"parameters", parameter_count(m)},
            {"active_parameters", active_parameter_count(m)},
            {"flops_per_token", flops_per_token(m)},
            {"max_position_embeddings", m.max_position},
            {"weights_dtype", name(d.weights)},
            {"kv_dtype", name(d.kv)},
            {"layers", m.layers.size()},
            {"attention", attention}};
  json["experts"] =
      moe_layers == 0 ? Json() : Json{{"layers", moe_layers}, {"routed", m.experts}, {"topk", m.topk}};
  return json;
}

/// The longest prompt and output together that a pool takes.
std::int64_t longest_request(const PoolPlan& pool) {
  return std::min<std::int64_t>(pool.engine.max_model_len, pool.kv_tokens());
}

StepShape decode_shape(std::int32_t requests, std::int64_t context, std::int32_t window) {
  StepShape shape;
  shape.decode_requests = shape.sampled_requests = requests;
  shape.decode_context = requests * context;
  shape.decode_window_context = requests * std::min<std::int64_t>(context, window);
  return shape;
}

StepShape prefill_shape(std::int32_t tokens, std::int32_t window) {
  const std::int64_t n = tokens;
  StepShape shape;
  shape.prefill_requests = shape.sampled_requests = 1;
  shape.prefill_tokens = tokens;
  shape.prefill_pairs = n * (n + 1) / 2;
  shape.prefill_context = n;
  if (window > 0) {
    shape.prefill_window_pairs = window_pairs(0, n, window);
    shape.prefill_window_context = window_context(0, n, window);
  }
  return shape;
}

Json step_json(const StepModel& model, const StepShape& shape, std::int64_t context) {
  const StepTime time = model.time(shape);
  std::array<double, 3> by_regime{};
  double sum = 0;
  Json operators = Json::array();
  for (const OpTime& op : model.breakdown(shape)) {
    by_regime[static_cast<std::size_t>(op.regime)] += op.us;
    sum += op.us;
    operators.push_back({{"name", op.name},
                         {"count", op.count},
                         {"us", op.us},
                         {"regime", name(op.regime)},
                         {"extrapolated", op.extrapolated}});
  }
  const auto most = std::ranges::max_element(by_regime);
  return {{"requests", shape.decode_requests + shape.prefill_requests},
          {"tokens", shape.tokens()},
          {"context", context},  // of each request
          {"us", us(time.ns)},
          {"regime", name(static_cast<Regime>(most - by_regime.begin()))},
          {"regime_share", sum > 0 ? *most / sum : 0.0},
          {"extrapolated", time.extrapolated},
          {"operators", operators}};
}

// Decode steps at kDecodeBatches and one prefill step, of what this pool can hold.
Json steps_json(const PoolPlan& pool, const ModelSpec& model) {
  const std::int64_t most = std::min<std::int64_t>(kTypicalTokens, longest_request(pool));
  Json steps = Json::object();
  for (const std::int32_t requests : kDecodeBatches) {
    const std::int64_t context = std::min(most, pool.kv_tokens() / requests);
    if (requests > pool.engine.max_num_seqs || context == 0) continue;
    steps[fmt::format("decode_{}", requests)] =
        step_json(*pool.step_model, decode_shape(requests, context, model.window), context);
  }
  const std::int64_t tokens = std::min<std::int64_t>(most, pool.engine.max_num_batched_tokens);
  steps["prefill"] =
      step_json(*pool.step_model, prefill_shape(static_cast<std::int32_t>(tokens), model.window), tokens);
  return steps;
}

Json pool_json(const PoolPlan& pool, const ModelSpec& model) {
  const Footprint& f = pool.footprint;
  const Parallelism& p = pool.parallelism;
  const std::int32_t worker_gpus = p.tensor * p.pipeline;
  const std::int32_t longest_blocks =
      (pool.engine.max_model_len + pool.engine.block_size - 1) / pool.engine.block_size;
  return {
      {"name", pool.name},
      {"role", kRoles[static_cast<std::size_t>(pool.role)].name},
      {"replicas", pool.replicas},
      {"workers", pool.replicas * p.data},
      {"gpus_per_worker", worker_gpus},
      {"instance", pool.instance != nullptr ? Json(pool.instance->name) : Json()},
      {"gpu", pool.gpu->name},
      {"gpu_memory_bytes",
       {{"total", pool.gpu->memory_bytes},
        {"usable", pool.usable_bytes},
        {"weights", f.weight_bytes},
        {"activations", f.activation_bytes},
        {"per_sequence_state", pool.reserved_bytes},
        {"kv_cache", static_cast<Bytes>(pool.kv_bytes_per_block * (pool.blocks + 1.0))}}},
      {"kv",
       {{"bytes_per_token_per_gpu", f.kv_bytes_per_token},
        {"bytes_per_token_per_worker", f.kv_bytes_per_token * worker_gpus},
        {"bytes_per_block_per_gpu", pool.kv_bytes_per_block},
        {"state_bytes_per_sequence", f.state_bytes_per_sequence},
        {"window_bytes_per_sequence", f.window_bytes_per_sequence},
        {"blocks", pool.blocks},
        {"tokens", pool.kv_tokens()},
        {"longest_request", longest_request(pool)},
        {"max_concurrency", static_cast<double>(pool.blocks) / longest_blocks},
        {"regions_per_gpu", f.kv_regions}}},
      {"steps", steps_json(pool, model)},
  };
}

std::uint32_t first_worker(const Deployment& d, std::size_t pool) {
  const auto found = std::ranges::find(d.workers, static_cast<std::int32_t>(pool), &WorkerPlan::pool);
  return static_cast<std::uint32_t>(found - d.workers.begin());
}

// One pull of `blocks` blocks in `runs` runs over links that nothing else uses, as the cluster runs it.
Json pull_json(const Deployment& d, const PullPlan& plan, std::uint32_t reads_from, std::uint32_t reads_to,
               std::int32_t runs) {
  const WorkerPlan &from = d.workers[reads_from], &to = d.workers[reads_to];
  const PullLayout& layout = plan.layout;
  FlowRequest flow;
  flow.bytes = plan.part_bytes;
  flow.operation_bytes = plan.operation_bytes;
  flow.rate_cap = plan.rate_cap;
  Network network(d.topology);
  std::vector<Completion> done;
  Nanos now = 0;
  const auto run_until = [&](Nanos end) {
    for (Nanos next; network.in_flight() > 0 && (next = network.next_completion(now)) <= end; now = next) {
      network.complete(next, done);
    }
  };
  for (std::int32_t source = 0; source < layout.sources; ++source) {
    const Nanos start = plan.flow_start(source);
    run_until(start);
    now = start;
    for (std::int32_t rank = 0; rank < layout.ranks; ++rank) {
      const auto remote = source_rank(layout, static_cast<std::int32_t>(from.gpus.size()), rank, source);
      flow.source = from.gpus[index(remote)];
      flow.destination = to.gpus[index(rank)];
      ++flow.tag;
      network.start(now, flow);
    }
  }
  run_until(kNever - 1);
  const Nanos landed = std::max(now + plan.latency, plan.posting);

  const Route path = route(d.topology, from.gpus[0], to.gpus[0]);
  const Fabric* fabric = d.topology.links[index(path.link[0])].fabric;
  return {{"runs", runs},
          {"descriptors_per_gpu", plan.descriptors},
          {"descriptor_bytes", plan.descriptor_bytes},
          {"wire_operation_bytes", flow.operation_bytes},
          {"read_efficiency", efficiency(*fabric, Op::read, flow.operation_bytes)},
          {"post_us", us(plan.posting)},
          {"wire_us", us(landed - plan.posting)},  // what lasts beyond posting
          {"total_us", us(landed)}};
}

// From each prefill to each decode pool: a prompt whose blocks lie in one run, and one none of whose
// blocks are neighbours.
Json hand_overs_json(const Deployment& d, const TransferConfig& t) {
  Json list = Json::array();
  if (!d.disaggregated) return list;
  for (std::size_t p = 0; p < d.pools.size(); ++p) {
    for (std::size_t q = 0; q < d.pools.size(); ++q) {
      const PoolPlan &from = d.pools[p], &to = d.pools[q];
      if (from.role != Role::prefill || to.role != Role::decode) continue;
      const PullLayout layout = layout_between(d, p, q);
      const auto tokens = static_cast<std::int32_t>(
          std::min<std::int64_t>({kTypicalTokens, longest_request(from), longest_request(to)}));
      const std::int32_t blocks = (tokens + to.engine.block_size - 1) / to.engine.block_size;
      const auto pull = [&](std::int32_t runs) {
        const std::uint32_t reads_from = first_worker(d, p), reads_to = first_worker(d, q);
        return pull_json(d, plan_pull(d, t, reads_from, reads_to, blocks, runs), reads_from, reads_to, runs);
      };
      list.push_back({{"from", from.name},
                      {"to", to.name},
                      {"prompt_tokens", tokens},
                      {"blocks", blocks},
                      {"bytes", static_cast<Bytes>(blocks * to.engine.block_size * layout.bytes_per_token) *
                                    layout.ranks},
                      {"gpus", layout.ranks},
                      {"sources_per_gpu", layout.sources},
                      {"regions_per_gpu", layout.regions},
                      {"blocks_merge", layout.mergeable},
                      {"one_run", pull(1)},
                      {"no_two_together", pull(blocks)}});
    }
  }
  return list;
}

Json placement_json(const Deployment& d) {
  Json list = Json::array();
  for (const WorkerPlan& worker : d.workers) {
    Json nodes = Json::array();
    for (const GpuId gpu : worker.gpus) {
      const std::int32_t node = d.topology.node_of[index(gpu)];
      const std::string& name = d.topology.nodes[index(node)].name;
      if (nodes.empty() || nodes.back()["node"] != name)
        nodes.push_back({{"node", name}, {"gpus", Json::array()}});
      nodes.back()["gpus"].push_back(gpu - d.topology.first_gpu[index(node)]);
    }
    list.push_back({{"worker", worker.name}, {"pool", d.pools[index(worker.pool)].name}, {"nodes", nodes}});
  }
  return list;
}

// Adds an entry that stands for one thing, or counts it with one that has the same `keys`.
void tally(Json& list, Json entry, std::initializer_list<const char*> keys) {
  for (Json& other : list) {
    if (!std::ranges::all_of(keys, [&](const char* key) { return other[key] == entry[key]; })) continue;
    other["number"] = other["number"].get<int>() + 1;
    return;
  }
  list.push_back(std::move(entry));
}

// "node0/gpu3/efa-tx" is one of the links "efa", "leaf0/up" one of "leaf".
std::string link_class(std::string_view name) {
  if (name.ends_with("/up")) return "leaf";
  return std::string(name.substr(name.rfind('/') + 1, name.rfind("-tx") - (name.rfind('/') + 1)));
}

Json links_json(const Topology& topology) {
  Json list = Json::array();
  for (std::size_t l = 0; l < topology.links.size(); l += 2) {  // a pair: both directions are alike
    const Link& link = topology.links[l];
    Json entry{{"class", link_class(topology.link_names[l])},
               {"number", 1},
               {"gb_per_s", link.capacity},
               {"fabric", nullptr}};
    if (link.fabric != nullptr) {
      entry["fabric"] = link.fabric->name;
      for (const auto& [key, op] :
           {std::pair("read_efficiency", Op::read), {"write_efficiency", Op::write}}) {
        for (const Bytes size : kOperationSizes)
          entry[key].push_back({{"bytes", size}, {"share", efficiency(*link.fabric, op, size)}});
      }
      entry["source"] = link.fabric->sentence;
    }
    tally(list, std::move(entry), {"class", "gb_per_s", "fabric"});
  }
  return list;
}

// Between the first GPUs of each prefill and each decode worker, as transfers are timed.
Json routes_json(const Deployment& d) {
  Json list = Json::array();
  for (const WorkerPlan& from : d.workers) {
    for (const WorkerPlan& to : d.workers) {
      const PoolPlan &source = d.pools[index(from.pool)], &destination = d.pools[index(to.pool)];
      if (source.role != Role::prefill || destination.role != Role::decode) continue;
      const Route path = route(d.topology, from.gpus[0], to.gpus[0]);
      Json links = Json::array();
      for (std::int32_t i = 0; i < path.links; ++i)
        links.push_back(d.topology.link_names[index(path.link[index(i)])]);
      tally(list,
            {{"from", source.name},
             {"to", destination.name},
             {"number", 1},
             {"transport", kTransportNames[static_cast<std::size_t>(path.transport)]},
             {"fabric", d.topology.links[index(path.link[0])].fabric->name},
             {"latency_us", us(path.latency)},
             {"hops", path.links},
             {"links", links}},
            {"from", "to", "fabric", "latency_us", "hops"});
    }
  }
  return list;
}

Json prices_json(const Deployment& d, const PricingConfig& pricing) {
  Json nodes = Json::array();
  double all = 0, of_held = 0;
  std::int32_t gpus = 0, held = 0;
  bool known = true;
  for (std::size_t n = 0; n < d.nodes.size(); ++n) {
    const NodePlan& node = d.nodes[n];
    const std::int32_t node_gpus = d.topology.nodes[n].gpus;
    gpus += node_gpus;
    held += node.gpus_held;
    Json entry{{"name", node.instance != nullptr ? node.instance->name : node.gpu->name},
               {"number", 1},
               {"usd_per_hour", nullptr},
               {"as_of", nullptr},
               {"source", nullptr}};
    if (node.usd_per_hour) {
      all += *node.usd_per_hour;
      of_held += *node.usd_per_hour * node.gpus_held / node_gpus;
      const bool own = pricing.usd_per_hour.contains(node.instance->name);
      entry["usd_per_hour"] = *node.usd_per_hour;
      entry["as_of"] = node.price_as_of;
      entry["source"] = own ? "scenario" : node.instance->prices.at(pricing.plan).source;
    } else {
      known = false;
    }
    tally(nodes, std::move(entry), {"name"});
  }
  return {{"plan", pricing.plan},
          {"nodes", nodes},
          {"gpus", gpus},
          {"gpus_held", held},
          {"usd_per_hour", known ? Json(all) : Json()},
          {"usd_per_hour_held", known ? Json(of_held) : Json()}};
}

Json features_json(const Scenario& s, const Deployment& d) {
  Json list = Json::array();
  for (const Feature& feature : kFeatures) {
    if (feature.used(s, d))
      list.push_back({{"feature", feature.name}, {"since", feature.since}, {"source", feature.source}});
  }
  return list;
}

Json document(const ReplayOptions& options, const std::string& path) {
  LoadedScenario loaded = load_scenario_for(path, options);
  const Deployment d = plan_deployment(loaded);
  put_defaults_by_gpu(loaded, d);
  const Scenario& s = loaded.scenario;

  Json scenario = Json::parse(loaded.in_force), origins = Json::object();
  for (const auto& [pointer, from] : loaded.origins) origins[pointer] = from;

  Json pools = Json::array();
  for (const PoolPlan& pool : d.pools) pools.push_back(pool_json(pool, d.model));
  return {{"schema", "pdsim.describe/1"},
          {"scenario", scenario},
          {"origins", origins},
          {"model", model_json(d)},
          {"pools", pools},
          {"cost_model", {{"profile", d.profile}}},
          {"hand_overs", hand_overs_json(d, s.transfer)},
          {"placement", placement_json(d)},
          {"links", links_json(d.topology)},
          {"routes", routes_json(d)},
          {"prices", prices_json(d, s.pricing)},
          {"features", features_json(s, d)}};
}

// ---------------------------------------------------------------------------------------------- the text

constexpr std::size_t kColumns = 100;
constexpr std::size_t kLabel = 28, kCell = 24;  // of a table with a column a pool
constexpr std::size_t kPoolsAcross = (kColumns - kLabel) / kCell;

// How one value is shown.

std::string plain(const Json& value) {
  return value.is_null() ? "-" : fmt::format("{}", value);
}

/// "12,345".
std::string grouped(const Json& value) {
  std::string digits = std::to_string(value.get<std::int64_t>());
  for (std::size_t left = digits.size(); left > 3; left -= 3) digits.insert(left - 3, 1, ',');
  return digits;
}

/// Four significant digits, but all of those before the point.
std::string significant(double value) {
  return value >= 1000 ? grouped(std::llround(value)) : fmt::format("{:.4g}", value);
}

std::string bytes(const Json& value) {
  constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto size = value.get<double>();
  std::size_t unit = 0;
  for (; size >= 1024 && unit + 1 < std::size(kUnits); ++unit) size /= 1024;
  return fmt::format("{} {}", significant(size), kUnits[unit]);
}

std::string gib(const Json& value) {
  return fmt::format("{:6.2f} GiB", value.get<double>() / (1 << 30));
}

std::string ms(const Json& microseconds) {
  return significant(microseconds.get<double>() / 1e3) + " ms";
}

std::string percent(const Json& share) {
  return fmt::format("{:.1f} %", 100 * share.get<double>());
}

std::string tokens(const Json& count) {
  return grouped(count) + " tokens";
}

std::string sequences(const Json& count) {
  return fmt::format("{:.2f} sequences", count.get<double>());
}

std::string step(const Json& step) {
  return step.is_null() ? "-"
                        : fmt::format("{}, {}{}", ms(step["us"]), step["regime"],
                                      step["extrapolated"] == true ? " *" : "");
}

std::string plural(const Json& n, std::string_view thing) {
  return fmt::format("{} {}{}", n, thing, n == 1 ? "" : "s");
}

std::string workers(const Json& pool) {
  return fmt::format("{} x {}", pool["workers"], plural(pool["gpus_per_worker"], "GPU"));
}

std::string usd(const Json& amount) {
  return amount.is_null() ? "unknown" : fmt::format("{:.2f} USD an hour", amount.get<double>());
}

/// [0, 1, 2, 3, 6] as "0-3,6".
std::string ranges(const Json& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1].get<int>() == numbers[last].get<int>() + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[i]);
    if (last > i) text += fmt::format("-{}", numbers[last]);
    i = last + 1;
  }
  return text;
}

// How lines are laid out.

std::size_t column(const std::string& out) {
  return out.size() - (out.rfind('\n') + 1);
}

/// Adds `words` to the last line of `out` and ends it, going on at column `indent` of new ones.
void wrap(std::string& out, std::size_t indent, std::string_view words) {
  for (bool first = true; !words.empty(); first = false) {
    const std::size_t length = std::min(words.find(' '), words.size());
    if (!first) out += column(out) + 1 + length > kColumns ? "\n" + std::string(indent, ' ') : " ";
    out += words.substr(0, length);
    words.remove_prefix(std::min(length + 1, words.size()));
  }
  out += '\n';
}

/// A label and what it stands for, wrapped.
void entry(std::string& out, std::string_view label, std::string_view words) {
  out += fmt::format("  {:<{}} ", label, kLabel - 3);
  wrap(out, kLabel, words);
}

void cells(std::string& out, std::string_view label, const std::vector<std::string>& values) {
  out += fmt::format("{:<{}} ", label, kLabel - 1);
  for (const std::string& value : values) out += fmt::format("{:<{}} ", value, kCell - 1);
  out.erase(out.find_last_not_of(' ') + 1);
  out += '\n';
}

std::string attention(const std::string& kind, const Json& a) {
  if (kind == "none") return "no attention";
  if (kind == "linear")
    return fmt::format("linear attention: {} heads, a state of {} x {} each", a["heads"], a["key_dim"],
                       a["value_dim"]);
  if (kind == "mla")
    return fmt::format("latent attention (MLA): {} heads over {} + {}", a["heads"], a["latent"], a["rope"]);
  if (kind == "dsa")
    return fmt::format("sparse latent attention (DSA): {} heads over {} + {} of {} tokens", a["heads"],
                       a["latent"], a["rope"], a["index_topk"]);
  return fmt::format(
      "{}: {} heads of {}, {} for keys and values",
      kind == "full" ? "full attention" : fmt::format("attention within {} tokens", a["window"]), a["heads"],
      a["head_dim"], a["kv_heads"]);
}

void print_model(std::string& out, const Json& m) {
  const auto billions = [](const Json& n) { return significant(n.get<double>() / 1e9) + " B"; };
  out += "\nModel\n";
  entry(out, "name", fmt::format("{} ({})", m["name"], m["architecture"]));
  entry(out, "parameters",
        fmt::format("{}, of which a token meets {}", billions(m["parameters"]),
                    billions(m["active_parameters"])));
  for (const auto& [kind, a] : m["attention"].items())
    entry(out, "layers", fmt::format("{} of {}", a["layers"], attention(kind, a)));
  if (const Json& e = m["experts"]; !e.is_null())
    entry(out, "experts",
          fmt::format("{} of {} for a token, in {} layers", e["topk"], e["routed"], e["layers"]));
  entry(out, "element types", fmt::format("weights {}, KV cache {}", m["weights_dtype"], m["kv_dtype"]));
  entry(out, "max_position_embeddings", grouped(m["max_position_embeddings"]));
}

// A row of the table of pools: where in the document its value is, {} being the pool's index.
struct PoolRow {
  std::string_view label, pointer;
  std::string (*text)(const Json&);  ///< null: a heading
};

constexpr PoolRow kPoolRows[] = {
    {"Pools", "/pools/{}/name", plain},
    {"  role", "/pools/{}/role", plain},
    {"  workers", "/pools/{}", workers},
    {"  instance", "/pools/{}/instance", plain},
    {"  GPU", "/pools/{}/gpu", plain},
    {"  tensor_parallel", "/scenario/pools/{}/tensor_parallel", plain},
    {"  pipeline_parallel", "/scenario/pools/{}/pipeline_parallel", plain},
    {"  data_parallel", "/scenario/pools/{}/data_parallel", plain},
    {"  expert_parallel", "/scenario/pools/{}/expert_parallel", plain},
    {"  block_size", "/scenario/pools/{}/engine/block_size", plain},
    {"  max_num_seqs", "/scenario/pools/{}/engine/max_num_seqs", plain},
    {"  max_num_batched_tokens", "/scenario/pools/{}/engine/max_num_batched_tokens", plain},
    {"  max_model_len", "/scenario/pools/{}/engine/max_model_len", plain},
    {"  gpu_memory_utilization", "/scenario/pools/{}/engine/gpu_memory_utilization", plain},
    {"Memory of a GPU", "", nullptr},
    {"  in all", "/pools/{}/gpu_memory_bytes/total", gib},
    {"  that the engine may use", "/pools/{}/gpu_memory_bytes/usable", gib},
    {"  - weights", "/pools/{}/gpu_memory_bytes/weights", gib},
    {"  - activations", "/pools/{}/gpu_memory_bytes/activations", gib},
    {"  - state of sequences", "/pools/{}/gpu_memory_bytes/per_sequence_state", gib},
    {"  = KV cache", "/pools/{}/gpu_memory_bytes/kv_cache", gib},
    {"KV cache of a worker", "", nullptr},
    {"  a token, on one GPU", "/pools/{}/kv/bytes_per_token_per_gpu", bytes},
    {"  a token, on all its GPUs", "/pools/{}/kv/bytes_per_token_per_worker", bytes},
    {"  blocks", "/pools/{}/kv/blocks", grouped},
    {"  room for", "/pools/{}/kv/tokens", tokens},
    {"  of max_model_len", "/pools/{}/kv/max_concurrency", sequences},
    {"  longest request", "/pools/{}/kv/longest_request", tokens},
    {"Time of a step, and what bounds it", "", nullptr},
    {"  decode, 1 request", "/pools/{}/steps/decode_1", step},
    {"  decode, 8 requests", "/pools/{}/steps/decode_8", step},
    {"  decode, 64 requests", "/pools/{}/steps/decode_64", step},
    {"  prefill, 1 request", "/pools/{}/steps/prefill", step},
};

void print_pools(std::string& out, const Json& doc) {
  const std::size_t pools = doc["pools"].size();
  bool extrapolated = false;
  for (std::size_t first = 0; first < pools; first += kPoolsAcross) {
    for (const PoolRow& row : kPoolRows) {
      if (!row.label.starts_with(' ')) out += '\n';
      std::vector<std::string> values;
      for (std::size_t i = first; row.text != nullptr && i < std::min(pools, first + kPoolsAcross); ++i) {
        const Json::json_pointer at(fmt::format(fmt::runtime(row.pointer), i));
        values.push_back(row.text(doc.contains(at) ? doc[at] : Json()));
        extrapolated |= values.back().ends_with('*');
      }
      cells(out, row.label, values);
    }
  }
  wrap(
      out += "  ", 2,
      fmt::format("Requests have {} tokens of context, or what fits. Kernel curves: {}.{}",
                  grouped(kTypicalTokens), doc["cost_model"]["profile"],
                  extrapolated
                      ? " * = over a tenth of it lies outside what was measured; --json says which operators."
                      : ""));
}

struct PullRow {
  std::string_view label, key;
  std::string (*text)(const Json&);
};

constexpr PullRow kPullRows[] = {
    {"  descriptors of a GPU", "descriptors_per_gpu", grouped},
    {"  a descriptor", "descriptor_bytes", bytes},
    {"  an operation on the wire", "wire_operation_bytes", bytes},
    {"  of line rate", "read_efficiency", percent},
    {"  posting", "post_us", ms},
    {"  wire beyond posting", "wire_us", ms},
    {"  in all", "total_us", ms},
};

void print_hand_over(std::string& out, const Json& h) {
  out += fmt::format("\nHand-over of {} tokens, {} to {}, on idle links\n", grouped(h["prompt_tokens"]),
                     h["from"], h["to"]);
  entry(out, "bytes", fmt::format("{} in {} blocks", bytes(h["bytes"]), h["blocks"]));
  entry(out, "read by",
        fmt::format("{}, each {} regions of {}", plural(h["gpus"], "decode rank"), h["regions_per_gpu"],
                    plural(h["sources_per_gpu"], "prefill rank")));
  // Where blocks do not merge, how they lie makes no difference.
  std::vector<std::string> layouts{"one_run"}, headings{"each block on its own: heads are split differently"};
  if (h["blocks_merge"] == true) {
    layouts = {"one_run", "no_two_together"};
    headings = {"blocks in one run", "no two together"};
  }
  cells(out, "", headings);
  for (const PullRow& row : kPullRows) {
    std::vector<std::string> values;
    for (const std::string& layout : layouts) values.push_back(row.text(h[layout][row.key]));
    cells(out, row.label, values);
  }
}

void print_placement(std::string& out, const Json& placement) {
  std::vector<std::pair<std::string, std::string>> nodes;
  for (const Json& worker : placement) {
    for (const Json& part : worker["nodes"]) {
      const auto node = part["node"].get<std::string>();
      auto at = std::ranges::find(nodes, node, &std::pair<std::string, std::string>::first);
      if (at == nodes.end()) at = nodes.insert(nodes.end(), {node, ""});
      at->second +=
          fmt::format("{}{}[{}]", at->second.empty() ? "" : " ", worker["worker"], ranges(part["gpus"]));
    }
  }
  out += "\nPlacement: workers [GPUs]\n";
  for (const auto& [node, held] : nodes) entry(out, node, held);
}

void print_links(std::string& out, const Json& links) {
  out += fmt::format("\n{:<{}}{:>8}{:>10}    READ reaches, by size of operation\n{:>{}}",
                     "Links, each direction", kLabel, "number", "GB/s", "", kLabel + 18);
  for (const Bytes size : kOperationSizes) out += fmt::format("{:>11}", bytes(size));
  std::vector<std::string> sources;
  for (const Json& link : links) {
    out += fmt::format("\n  {:<{}}{:>8}{:>10}", link["fabric"].is_null() ? link["class"] : link["fabric"],
                       kLabel - 2, link["number"], significant(link["gb_per_s"].get<double>()));
    if (link["fabric"].is_null()) continue;
    for (const Json& point : link["read_efficiency"]) out += fmt::format("{:>11}", percent(point["share"]));
    const auto source = link["source"].get<std::string>();
    if (std::ranges::find(sources, source) == sources.end()) sources.push_back(source);
  }
  out += '\n';
  for (const std::string& source : sources) wrap(out += "  ", 4, source);
}

void print_routes(std::string& out, const Json& routes) {
  if (!routes.empty()) out += "\nRoutes, one way\n";
  for (const Json& r : routes) {
    entry(out, fmt::format("{} to {}", r["from"], r["to"]),
          fmt::format("{}, {} us, {}, as {}", r["fabric"], r["latency_us"],
                      plural(r["number"], "worker pair"), fmt::join(r["links"], " > ")));
  }
}

void print_prices(std::string& out, const Json& p) {
  out += fmt::format("\nPrices ({})\n", p["plan"]);
  for (const Json& node : p["nodes"]) {
    std::string price = usd(node["usd_per_hour"]);
    if (node["as_of"] == "scenario") {
      price += " each, as the scenario says";
    } else if (!node["as_of"].is_null()) {
      price += fmt::format(" each, as of {}: {}", node["as_of"], node["source"]);
    }
    entry(out, fmt::format("{} x {}", node["number"], node["name"]), price);
  }
  entry(out, "in all", fmt::format("{} for {} GPUs", usd(p["usd_per_hour"]), p["gpus"]));
  entry(out, "share of the pools",
        fmt::format("{} for {} GPUs", usd(p["usd_per_hour_held"]), p["gpus_held"]));
}

// The values under the path that --set takes for them.
void print_scenario(std::string& out, const Json& doc) {
  constexpr std::size_t kValue = 32, kOrigin = 54;
  out += fmt::format("\n{:<{}}{:<{}}{}\n", "Scenario in force", kValue, "value", kOrigin - kValue, "from");
  std::string heading;
  for (const auto& [pointer, origin] : doc["origins"].items()) {
    std::string path = pointer.substr(1);
    std::ranges::replace(path, '/', '.');
    if (path.starts_with("pools."))
      path.replace(6, path.find('.', 6) - 6,
                   plain(doc["scenario"]["pools"][std::stoul(path.substr(6))]["name"]));
    const std::size_t dot = path.rfind('.');
    const std::string above = dot == std::string::npos ? "" : path.substr(0, dot);
    if (above != heading && !above.empty()) out += fmt::format("  {}\n", above);
    heading = above;
    out += fmt::format("{:<{}}{}", fmt::format("{}{}", above.empty() ? "  " : "    ", path.substr(dot + 1)),
                       kValue, doc["scenario"][Json::json_pointer(pointer)]);
    if (column(out) >= kOrigin) out += '\n';
    out.append(kOrigin - column(out), ' ');
    auto from = std::string_view(origin.get_ref<const std::string&>());
    if (from.starts_with("default: ")) from.remove_prefix(9);
    wrap(out, kOrigin, from);
  }
}

std::string describe_text(const Json& doc) {
  std::string out, pools, nodes;
  for (const Json& pool : doc["pools"])
    pools += fmt::format("{}{} x {}", pools.empty() ? "" : " + ", pool["workers"], pool["name"]);
  for (const Json& node : doc["prices"]["nodes"])
    nodes += fmt::format("{}{} x {}", nodes.empty() ? "" : " + ", node["number"], node["name"]);
  wrap(out, 2,
       fmt::format("{}: {}, {}, on {} of {} GPUs of {}", doc["scenario"]["name"], doc["model"]["name"], pools,
                   doc["prices"]["gpus_held"], doc["prices"]["gpus"], nodes));
  print_model(out, doc["model"]);
  print_pools(out, doc);
  for (const Json& hand_over : doc["hand_overs"]) print_hand_over(out, hand_over);
  print_placement(out, doc["placement"]);
  print_links(out, doc["links"]);
  print_routes(out, doc["routes"]);
  print_prices(out, doc["prices"]);
  out += "\nIn vLLM since\n";
  for (const Json& f : doc["features"])
    out += fmt::format("  {:<{}}{:<16}{}\n", f["feature"], kLabel + 22, f["since"], f["source"]);
  print_scenario(out, doc);
  return out;
}

}  // namespace

void add_describe(CLI::App& app, Command& run) {
  struct Options : ReplayOptions {
    std::string scenario;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand(
      "describe", "What follows from a scenario before it runs: memory, KV, links, prices");
  sub->add_option("SCENARIO", options->scenario, "Scenario file (JSON with comments); - is stdin")
      ->required();
  add_replay_options(*sub, *options);
  sub->add_flag("--json", options->json, "One JSON document (schema pdsim.describe/1)");
  sub->footer(
      "Example:\n  pdsim describe scenarios/p5en-1p1d-qwen3-32b.json --set "
      "pools.decode.tensor_parallel=8");
  sub->callback([options, &run] {
    run = [options] {
      const Json doc = document(*options, options->scenario);
      const std::string text = options->json ? doc.dump(2) + "\n" : describe_text(doc);
      std::fwrite(text.data(), 1, text.size(), stdout);
      return kDone;
    };
  });
}

}  // namespace pdsim
