#include "tools/study/matrix.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "sim/cluster/deployment.hpp"
#include "sim/core/error.hpp"
#include "tools/study/candidates.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

using Place = std::pair<std::int32_t, std::int32_t>;  // node, GPU within it

struct Base {
  const LoadedScenario& loaded;
  const Deployment& deployment;
  ordered_json document;
};

Place place_of(const Deployment& d, GpuId gpu) {
  const std::int32_t node = d.topology.node_of[static_cast<std::size_t>(gpu)];
  return {node, gpu - d.topology.gpu(node, 0)};
}

void put_place(ordered_json& placement, std::string_view pool, std::size_t replica,
               std::span<const Place> places) {
  for (std::size_t i = 0; i < places.size();) {
    const std::int32_t node = places[i].first;
    std::vector<std::int32_t> gpus;
    for (; i < places.size() && places[i].first == node; ++i) gpus.push_back(places[i].second);
    placement.push_back({{"pool", pool}, {"replica", replica}, {"node", node}, {"gpus", gpus}});
  }
}

// The held GPUs in groups of one replica each, none across nodes unless it takes more than a node's.
// Nothing when some would be left over.
std::optional<std::vector<std::vector<Place>>> grouped(const std::map<std::int32_t, std::set<Place>>& held,
                                                       const Parallelism& parallelism) {
  const auto need = static_cast<std::size_t>(parallelism.gpus());
  const auto unit =
      static_cast<std::size_t>(parallelism.tensor) * static_cast<std::size_t>(parallelism.pipeline);
  std::size_t widest = 0;
  for (const auto& [node, gpus] : held) widest = std::max(widest, gpus.size());
  std::vector<std::vector<Place>> groups(1);
  for (const auto& [node, gpus] : held) {
    if (gpus.size() % (need > widest ? unit : need) != 0) return {};
    for (const Place& place : gpus) {
      if (groups.back().size() == need) groups.emplace_back();
      groups.back().push_back(place);
    }
  }
  if (groups.back().size() != need) return {};
  return groups;
}

// Both return why it cannot be done; empty = done.
std::string make_colocated(const Base& base, ordered_json& doc, std::string& note) {
  const Deployment& d = base.deployment;
  for (const PoolPlan& pool : d.pools) {
    if (pool.instance != d.pools.front().instance || pool.gpu != d.pools.front().gpu) {
      return fmt::format(
          "the pools are on different machines ({} and {}), and one colocated pool is on one kind",
          d.pools.front().gpu->name, pool.gpu->name);
    }
  }
  std::map<std::int32_t, std::set<Place>> held;  // by node
  std::size_t gpus = 0;
  for (const WorkerPlan& worker : d.workers) {
    for (const GpuId gpu : worker.gpus) {
      const Place place = place_of(d, gpu);
      held[place.first].insert(place);
      ++gpus;
    }
  }
  const auto pool_of = [&](Role role) {
    return static_cast<std::size_t>(std::ranges::find(d.pools, role, &PoolPlan::role) - d.pools.begin());
  };
  const std::size_t prefill = pool_of(Role::prefill), decode = pool_of(Role::decode);
  std::size_t shape = decode;
  auto groups = grouped(held, d.pools[decode].parallelism);
  if (!groups) {
    shape = prefill;
    groups = grouped(held, d.pools[prefill].parallelism);
  }
  const Parallelism &of_decode = d.pools[decode].parallelism, &of_prefill = d.pools[prefill].parallelism;
  if (!groups) {
    return fmt::format(
        "the {} GPUs cannot be shared out among workers of {} GPUs each, as decode's, nor of {}, as "
        "prefill's, without one left over or one across nodes",
        gpus, of_decode.gpus(), of_prefill.gpus());
  }
  ordered_json pool = doc["pools"][decode];
  pool["name"] = "worker";
  pool["role"] = "colocated";
  pool["replicas"] = groups->size();
  for (const char* key : {"tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"}) {
    pool[key] = doc["pools"][shape][key];
  }
  ordered_json placement = ordered_json::array();
  for (std::size_t r = 0; r < groups->size(); ++r) put_place(placement, "worker", r, (*groups)[r]);
  doc["pools"] = ordered_json::array({pool});
  doc["placement"] = placement;
  doc["transfer"].erase("pairs");
  const auto tensor = [&](std::size_t p) { return d.pools[p].parallelism.tensor; };
  note = fmt::format("{} workers of TP{} on the same {} GPUs, with the engine of pool '{}'", groups->size(),
                     tensor(shape), gpus, d.pools[decode].name);
  if (shape != decode)
    note += fmt::format("; decode's TP{} does not divide the GPUs of each node", tensor(decode));
  if (shape == decode && tensor(prefill) != tensor(decode)) {
    note += fmt::format("; prefill had TP{}", tensor(prefill));
  }
  if (d.pools.size() > 2) note += fmt::format("; all {} pools became one", d.pools.size());
  return "";
}

std::string make_disaggregated(const Base& base, ordered_json& doc, std::string& note) {
  const Deployment& d = base.deployment;
  if (d.pools.size() != 1) {
    return fmt::format("it has {} colocated pools; which of them is to prefill is not said", d.pools.size());
  }
  const std::int32_t replicas = d.pools.front().replicas;
  if (replicas < 2) return "its one worker cannot be split into a prefill and a decode worker";
  const std::int32_t prefill = replicas / 2;
  ordered_json placement = ordered_json::array();
  std::int32_t replica = -1;
  for (std::size_t w = 0; w < d.workers.size();) {
    const std::uint32_t first = d.workers[w].first_peer;
    std::vector<Place> places;
    for (; w < d.workers.size() && d.workers[w].first_peer == first; ++w) {
      for (const GpuId gpu : d.workers[w].gpus) places.push_back(place_of(d, gpu));
    }
    ++replica;
    const bool first_half = replica < prefill;
    put_place(placement, first_half ? "prefill" : "decode",
              static_cast<std::size_t>(first_half ? replica : replica - prefill), places);
  }
  ordered_json pools = ordered_json::array();
  for (const auto& [name, n] : {std::pair("prefill", prefill), std::pair("decode", replicas - prefill)}) {
    ordered_json pool = doc["pools"][0];
    pool["name"] = pool["role"] = name;
    pool["replicas"] = n;
    pools.push_back(pool);
  }
  doc["pools"] = pools;
  doc["placement"] = placement;
  // Its default is a block of the decode pool, of which there was none.
  const auto origin = std::ranges::find(base.loaded.origins, "/transfer/full_hit_tokens",
                                        &std::pair<std::string, std::string>::first);
  if (origin == base.loaded.origins.end() || origin->second.starts_with("default")) {
    doc["transfer"].erase("full_hit_tokens");
  }
  note = fmt::format("{} of the {} workers prefill, {} decode, on the same GPUs", prefill, replicas,
                     replicas - prefill);
  return "";
}

}  // namespace

std::vector<Variant> matrix_of(const RunSpec& base, std::span<const std::string_view> kinds) {
  std::vector<std::string_view> known;
  for (const DeploymentKind& kind : kKinds) known.push_back(kind.name);
  for (const std::string_view kind : kinds) {
    if (std::ranges::find(known, kind) != known.end()) continue;
    throw InputError("--modes", fmt::format("'{}' is no way to serve{}, expected some of {}", kind,
                                            did_you_mean(kind, known), fmt::join(known, ", ")));
  }
  const LoadedScenario loaded = load_run(base);
  const Deployment deployment = plan_deployment(loaded);
  const Base from{loaded, deployment, ordered_json::parse(loaded.in_force)};

  std::vector<Variant> variants;
  for (const std::string_view name : kinds) {
    const DeploymentKind& kind = *std::ranges::find(kKinds, name, &DeploymentKind::name);
    Variant variant;
    variant.kind = name;
    ordered_json doc = from.document;
    std::string note;
    if (kind.disaggregated != deployment.disaggregated) {
      variant.cannot =
          kind.disaggregated ? make_disaggregated(from, doc, note) : make_colocated(from, doc, note);
    }
    doc["name"] = fmt::format("{}-{}", loaded.scenario.name, name);
    doc["transfer"]["mode"] = kind.mode;
    doc["transfer"]["bidirectional"] = kind.bidirectional;
    if (doc["transfer"].contains("pairs")) {
      for (ordered_json& pair : doc["transfer"]["pairs"]) {
        pair["mode"] = kind.mode;
        pair["bidirectional"] = kind.bidirectional;
      }
    }
    variant.note = !note.empty() ? note : "the workers of the scenario";
    variant.spec.text = doc.dump(2);
    variant.spec.file = fmt::format("{} as {}", base.file, name);
    variant.spec.options.quiet = base.options.quiet;
    if (variant.cannot.empty()) {
      try {
        plan_deployment(load_run(variant.spec));
      } catch (const InputError& error) {
        variant.cannot = problem_of(error, variant.spec.file);
      }
    }
    variants.push_back(std::move(variant));
  }
  return variants;
}

}  // namespace pdsim
