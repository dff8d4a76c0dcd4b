// pdsim describe: what follows from a scenario before the first request arrives.
//
// One JSON document is computed, with the deployment and the functions that a replay uses: the step model,
// the plan of a transfer, a network with nothing else on it. The text for people is that document laid
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

#include "sim/cluster/transfer_plan.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "sim/scenario/releases.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/text.hpp"
#include "tools/study/workload.hpp"

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

// `context` is what each has with this step's tokens: its own and its drafts.
StepShape decode_shape(std::int32_t requests, std::int64_t context, std::int32_t window,
                       std::int32_t drafts) {
  const std::int64_t n = 1 + drafts, p = std::max<std::int64_t>(0, context - n);
  StepShape shape;
  shape.decode_requests = requests;
  shape.draft_tokens = requests * drafts;
  shape.sampled_requests = requests * (1 + drafts);
  shape.decode_context = requests * (p + n);
  shape.draft_pairs = requests * (n * p + n * (n + 1) / 2 - (p + n));
  if (window > 0) {
    shape.decode_window_context = requests * window_context(p, n, window);
    shape.draft_window_pairs = requests * (window_pairs(p, n, window) - window_context(p, n, window));
  }
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
    const std::int32_t drafts = pool.engine.speculative ? pool.engine.speculative->num_speculative_tokens : 0;
    const std::int64_t tokens = std::int64_t{requests} * (1 + drafts);
    if (requests > pool.engine.max_num_seqs || context <= drafts ||
        tokens > pool.engine.max_num_batched_tokens) {
      continue;
    }
    steps[fmt::format("decode_{}", requests)] =
        step_json(*pool.step_model, decode_shape(requests, context, model.window, drafts), context);
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
  Json json = {
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
  if (const auto& c = pool.engine.speculative) {
    double tokens = 1;
    for (const double accepted : c->accepted) tokens += accepted;
    json["speculation"] = {{"method", kSpeculativeMethods[static_cast<std::size_t>(c->method)].name},
                           {"drafts", c->num_speculative_tokens},
                           {"accepted", c->accepted},
                           {"tokens_per_step", tokens},
                           {"drafter", pool.drafter ? Json(pool.drafter->model.name) : Json()}};
  }
  return json;
}

std::uint32_t first_worker(const Deployment& d, std::size_t pool) {
  const auto found = std::ranges::find(d.workers, static_cast<std::int32_t>(pool), &WorkerPlan::pool);
  return static_cast<std::uint32_t>(found - d.workers.begin());
}

// One hand-over as planned, over links that nothing else uses, as the cluster runs it.
Json transfer_json(const Deployment& d, const TransferPlan& plan, std::uint32_t source,
                   std::uint32_t destination, std::int32_t runs) {
  const WorkerPlan &from = d.workers[source], &to = d.workers[destination];
  const Layout& layout = plan.layout;
  FlowRequest flow;
  flow.bytes = plan.part_bytes;
  flow.op = plan.op;
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
  for (std::int32_t turn = 0; turn < layout.remotes(plan.op); ++turn) {
    const Nanos start = plan.flow_start(turn);
    run_until(start);
    now = start;
    for (std::int32_t part = 0; part < plan.parts(); ++part) {
      const std::int32_t rank = part / layout.sources, sub = part % layout.sources;
      if (turn_of(layout, plan.op, rank, sub) != turn) continue;
      const auto remote = source_rank(layout, static_cast<std::int32_t>(from.gpus.size()), rank, sub);
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
          {plan.op == Op::read ? "read_efficiency" : "write_efficiency",
           efficiency(*fabric, plan.op, flow.operation_bytes)},
          {"post_us", us(plan.posting)},
          {"wire_us", us(landed - plan.posting)},  // what lasts beyond posting
          {"total_us", us(landed)}};
}

const TransferConfig& transfer_between(const Scenario& s, const PoolPlan& prefill, const PoolPlan& decode) {
  for (const TransferPair& pair : s.transfer_pairs) {
    if (pair.from == prefill.name && pair.to == decode.name) return pair.transfer;
  }
  return s.transfer;
}

// A prompt from one pool to another: with its blocks in one run, and with no two of them neighbours.
Json hand_over_json(const Deployment& d, const TransferConfig& t, Op op, std::size_t p, std::size_t q) {
  const PoolPlan &from = d.pools[p], &to = d.pools[q];
  const bool reads = op == Op::read;
  const bool own_thread = !reads || t.background_receiver;
  const double contention = own_thread ? t.thread_contention : 1;
  const std::uint32_t source = first_worker(d, p), destination = first_worker(d, q);
  const Layout layout = layout_between(d, t, p, q);
  const auto tokens = static_cast<std::int32_t>(
      std::min<std::int64_t>({kTypicalTokens, longest_request(from), longest_request(to)}));
  const std::int32_t blocks = (tokens + to.engine.block_size - 1) / to.engine.block_size;
  const auto plan = [&](std::int32_t runs) {
    return plan_transfer(d, t, op, source, destination, blocks, runs, contention);
  };
  const Nanos contact =
      first_contact_time(d, t, op, reads ? destination : source, reads ? source : destination, false);
  return {
      {"from", from.name},
      {"to", to.name},
      {"operation", reads ? "read" : "write"},
      {"posted_by", reads ? to.name : from.name},
      {"posted_on", own_thread ? "its own thread" : "the forward thread"},
      {"contention", contention},
      {"posting_gpus", plan(1).posters},
      {"remotes_per_gpu", layout.remotes(op)},
      {"prompt_tokens", tokens},
      {"blocks", blocks},
      {"bytes", static_cast<Bytes>(blocks * to.engine.block_size * layout.bytes_per_token) * layout.ranks},
      {"gpus", layout.ranks},
      {"sources_per_gpu", layout.sources},
      {"regions_per_gpu", layout.regions},
      {"blocks_merge", layout.mergeable},
      {"first_contact_ms", t.warm_start ? 0.0 : to_ms(contact)},
      {"one_run", transfer_json(d, plan(1), source, destination, 1)},
      {"no_two_together", transfer_json(d, plan(blocks), source, destination, blocks)}};
}

// From each prefill to each decode pool, or what prefill reads back from decode.
Json hand_overs_json(const Scenario& s, const Deployment& d, bool back) {
  Json list = Json::array();
  for (std::size_t p = 0; p < d.pools.size(); ++p) {
    for (std::size_t q = 0; q < d.pools.size(); ++q) {
      if (d.pools[p].role != Role::prefill || d.pools[q].role != Role::decode) continue;
      const TransferConfig& t = transfer_between(s, d.pools[p], d.pools[q]);
      if (back && t.bidirectional) list.push_back(hand_over_json(d, t, Op::read, q, p));
      if (back) continue;
      list.push_back(hand_over_json(d, t, t.mode == TransferMode::pull ? Op::read : Op::write, p, q));
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

Json document(const ReplayOptions& options, const std::string& path) {
  LoadedScenario loaded = load_scenario_for(path, options);
  const Deployment d = plan_deployment(loaded);
  put_defaults_by_gpu(loaded, d);
  const Scenario& s = loaded.scenario;

  Json scenario = Json::parse(loaded.in_force), origins = Json::object();
  for (const auto& [pointer, from] : loaded.origins) origins[pointer] = from;

  Json pools = Json::array();
  for (const PoolPlan& pool : d.pools) pools.push_back(pool_json(pool, d.model));
  Json cost_model{{"profile", d.profile}};
  if (d.datasheet) cost_model["datasheet"] = true;
  cost_model.update(cost_sources_json(d.sources));
  Json doc{{"schema", "pdsim.describe/1"}};
  if (is_hypothetical(s)) doc["hypothetical"] = true;
  doc.update({{"scenario", scenario},
              {"origins", origins},
              {"model", model_json(d)},
              {"pools", pools},
              {"cost_model", std::move(cost_model)},
              {"hand_overs", hand_overs_json(s, d, false)},
              {"read_backs", hand_overs_json(s, d, true)},
              {"placement", placement_json(d)},
              {"links", links_json(d.topology)}});
  if (d.network) {
    doc["network_profile"] = network_figures(*d.network);
    doc["network_profile"]["sha256"] = d.network->sha256;
  }
  doc.update({{"routes", routes_json(d)},
              {"prices", prices_json(d, s.pricing)},
              {"releases", releases_json(releases_of(s))}});
  return doc;
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

void wrap(std::string& out, std::size_t indent, std::string_view words) {
  ::pdsim::wrap(out, indent, words, kColumns);
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

// Of a profile that was measured on a GPU here: whose time each operator has.
void print_calibration(std::string& out, const Json& cost_model) {
  const auto listed = [&](const char* key) {
    std::string names;
    for (const Json& name : cost_model[key]) {
      names.append(names.empty() ? "" : ", ").append(name.get<std::string>());
    }
    return names;
  };
  std::string text = fmt::format("Calibrated here: {}.", listed("calibrated"));
  const char* before = " Engine efficiency ";
  for (const auto& [curve, factor] : cost_model["engine_efficiency"].items()) {
    text += fmt::format("{}{} {:.2f}", before, curve, factor.get<double>());
    before = ", ";
  }
  if (!cost_model["engine_efficiency"].empty()) text += '.';
  if (!cost_model["own_kernel"].empty()) text += fmt::format(" Own kernels: {}.", listed("own_kernel"));
  if (!cost_model["taken"].empty()) {
    text += fmt::format(" From {}, not measured here: {}.", listed("engine"), listed("taken"));
  }
  wrap(out += "  ", 2, text);
}

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
  for (const Json& pool : doc["pools"]) {
    if (!pool.contains("speculation")) continue;
    const Json& s = pool["speculation"];
    wrap(
        out += "  ", 2,
        fmt::format("{} verifies {} drafts of {} in a decode step, of which a sequence gets {:.2f} tokens on "
                    "average; the decode steps above have them.",
                    pool["name"], s["drafts"], s["drafter"].is_null() ? s["method"] : s["drafter"],
                    s["tokens_per_step"].get<double>()));
  }
  wrap(
      out += "  ", 2,
      fmt::format("Requests have {} tokens of context, or what fits. Kernel curves: {}.{}",
                  grouped(kTypicalTokens), doc["cost_model"]["profile"],
                  extrapolated
                      ? " * = over a tenth of it lies outside what was measured; --json says which operators."
                      : ""));
  if (doc["cost_model"].contains("calibrated")) print_calibration(out, doc["cost_model"]);
}

struct TransferRow {
  std::string_view label, key;
  std::string (*text)(const Json&);
};

constexpr TransferRow kTransferRows[] = {
    {"  descriptors of a GPU", "descriptors_per_gpu", grouped},
    {"  a descriptor", "descriptor_bytes", bytes},
    {"  an operation on the wire", "wire_operation_bytes", bytes},
    {"  of line rate", "read_efficiency", percent},
    {"  of line rate", "write_efficiency", percent},
    {"  posting", "post_us", ms},
    {"  wire beyond posting", "wire_us", ms},
    {"  in all", "total_us", ms},
};

void print_hand_over(std::string& out, std::string_view what, const Json& h) {
  const bool reads = h["operation"] == "read";
  out += fmt::format("\n{} of {} tokens, {} to {}, on idle links\n", what, grouped(h["prompt_tokens"]),
                     h["from"], h["to"]);
  entry(out, "bytes", fmt::format("{} in {} blocks", bytes(h["bytes"]), h["blocks"]));
  entry(out, reads ? "read by" : "written by",
        fmt::format("{}, each {} regions {} {}",
                    plural(h["posting_gpus"], fmt::format("{} rank", h["posted_by"])), h["regions_per_gpu"],
                    reads ? "of" : "to",
                    plural(h["remotes_per_gpu"], fmt::format("{} rank", reads ? h["from"] : h["to"]))));
  entry(out, "posted on",
        fmt::format("{}{}", h["posted_on"],
                    h["contention"] == 1.0 ? "" : fmt::format(", in {} times the time", h["contention"])));
  entry(out, "first contact",
        h["first_contact_ms"] == 0.0
            ? "costs nothing"
            : fmt::format("{}, once between two workers", ms(h["first_contact_ms"].get<double>() * 1e3)));
  // Where blocks do not merge, how they lie makes no difference.
  std::vector<std::string> layouts{"one_run"}, headings{"each block on its own: heads are split differently"};
  if (h["blocks_merge"] == true) {
    layouts = {"one_run", "no_two_together"};
    headings = {"blocks in one run", "no two together"};
  }
  cells(out, "", headings);
  for (const TransferRow& row : kTransferRows) {
    if (!h["one_run"].contains(row.key)) continue;
    std::vector<std::string> values;
    for (const std::string& layout : layouts) values.push_back(row.text(h[layout][row.key]));
    cells(out, row.label, values);
  }
}

void print_hand_overs(std::string& out, const Json& doc) {
  for (const Json& hand_over : doc["hand_overs"]) print_hand_over(out, "Hand-over", hand_over);
  const auto mode = doc["scenario"]["transfer"]["mode"].get<std::string>();
  if (!doc["hand_overs"].empty() && mode.starts_with("push_"))
    wrap(out += "  ", 2,
         fmt::format("With {} most of it goes earlier, piece by piece, while prefill computes.", mode));
  for (const Json& read_back : doc["read_backs"]) print_hand_over(out, "Read back", read_back);
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
  constexpr std::size_t kOperation = 7;
  out += fmt::format("\n{:<{}}{:>8}{:>10}    of it, by size of operation\n{:>{}}", "Links, each direction",
                     kLabel, "number", "GB/s", "", kLabel + 18 + kOperation);
  for (const Bytes size : kOperationSizes) out += fmt::format("{:>11}", bytes(size));
  std::vector<std::string> sources;
  for (const Json& link : links) {
    out += fmt::format("\n  {:<{}}{:>8}{:>10}", link["fabric"].is_null() ? link["class"] : link["fabric"],
                       kLabel - 2, link["number"], significant(link["gb_per_s"].get<double>()));
    if (link["fabric"].is_null()) continue;
    for (const auto& [key, operation] :
         {std::pair("read_efficiency", "  READ"), {"write_efficiency", "  WRITE"}}) {
      if (column_of(out) > kLabel + 18) out += fmt::format("\n{:>{}}", "", kLabel + 18);
      out += fmt::format("{:<{}}", operation, kOperation);
      for (const Json& point : link[key]) out += fmt::format("{:>11}", percent(point["share"]));
    }
    const auto source = link["source"].get<std::string>();
    if (std::ranges::find(sources, source) == sources.end()) sources.push_back(source);
  }
  out += '\n';
  for (const std::string& source : sources) wrap(out += "  ", 4, source);
}

// What an operator measured, and what pdsim's own figures stand in for.
void print_network_profile(std::string& out, const Json& p) {
  out += fmt::format("\nNetwork profile {}\n", p["name"]);
  entry(out, "of",
        fmt::format("{}{}{}", p["fabric"], p.contains("date") ? fmt::format(", {}", p["date"]) : "",
                    p.contains("source") ? fmt::format(", {}", p["source"]) : ""));
  for (const char* key : {"write", "read"}) {
    if (!p.contains(key)) continue;
    std::string points;
    for (const Json& point : p[key]) {
      points += fmt::format("{}{} {:.4g}", points.empty() ? "" : ", ", bytes(point["bytes"]),
                            point["gb_per_s"].get<double>());
    }
    entry(out, fmt::format("{}, of {} GB/s", key, significant(p["line_gb_per_s"].get<double>())), points);
  }
  if (p.contains("operations_per_s"))
    entry(out, "operations a second", significant(p["operations_per_s"].get<double>()));
  if (p.contains("latency_us")) entry(out, "one way", fmt::format("{} us", p["latency_us"]));
  if (p.contains("posting")) {
    const Json& posting = p["posting"];
    entry(out, "posting",
          fmt::format("{}: {} us + {} us a descriptor", posting["backend"], posting["fixed_us"],
                      posting["us_per_descriptor"]));
  }
  for (const auto& [key, text] : p["evidence"].items()) entry(out, fmt::format("{} by", key), plain(text));
  for (const auto& [key, text] : p["not_told"].items())
    entry(out, fmt::format("{}: pdsim's", key), plain(text));
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

void print_releases(std::string& out, const Json& features) {
  constexpr std::size_t kSince = 52, kSource = 68;
  out += "\nIn vLLM since\n";
  bool words = false;
  for (const Json& f : features) {
    words |= f["since"] == kUnreleased || f["since"] == kNoEngine || f["since"] == kTheRouter;
    out += fmt::format("  {:<{}}{:<{}}", f["feature"], kSince - 2, f["since"], kSource - kSince);
    wrap(out, kSource, f["source"].get<std::string>());
  }
  if (words)
    wrap(out += "  ", 2,
         fmt::format("{} = in an open pull request; {} = pdsim's own; {} = no engine's business.",
                     kUnreleased, kNoEngine, kTheRouter));
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
    if (column_of(out) >= kOrigin) out += '\n';
    out.append(kOrigin - column_of(out), ' ');
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
  if (doc.contains("hypothetical"))
    wrap(out += "  ", 2, "Hypothetical: no engine does what this scenario combines; see the releases below.");
  print_model(out, doc["model"]);
  print_pools(out, doc);
  print_hand_overs(out, doc);
  print_placement(out, doc["placement"]);
  print_links(out, doc["links"]);
  if (doc.contains("network_profile")) print_network_profile(out, doc["network_profile"]);
  print_routes(out, doc["routes"]);
  print_prices(out, doc["prices"]);
  print_releases(out, doc["releases"]["features"]);
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
