#include "tools/study/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "models/model.hpp"
#include "sim/cluster/cluster.hpp"
#include "sim/cluster/deployment.hpp"
#include "sim/core/error.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

constexpr std::string_view kPoolNames[] = {"prefill", "decode", "worker"};

std::size_t role_of(const WorkerLayout& layout, std::size_t group) {
  return layout.disaggregated() ? group : 2;
}

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

// Nodes of a rent: the offer that each is of.
std::vector<int> nodes_of(const Rent& rent) {
  std::vector<int> nodes;
  for (std::size_t o = 0; o < rent.counts.size(); ++o)
    nodes.insert(nodes.end(), at(rent.counts[o]), static_cast<int>(o));
  return nodes;
}

// Places a group's replicas, each on the first node of its offer that has room, until there are `most`.
int place_group(WorkerLayout& layout, int group, int most, const std::vector<int>& nodes, const Menu& menu,
                std::vector<int>& used) {
  const Group& g = layout.groups[at(group)];
  int placed = 0;
  for (std::size_t node = 0; node < nodes.size() && placed < most; ++node) {
    if (nodes[node] != g.offer) continue;
    const int gpus = menu.offers[at(g.offer)].instance->gpus;
    while (placed < most && used[node] + g.tensor_parallel <= gpus) {
      WorkerLayout::Place place{group, placed, static_cast<int>(node), {}};
      for (int i = 0; i < g.tensor_parallel; ++i) place.gpus.push_back(used[node]++);
      layout.places.push_back(std::move(place));
      ++placed;
    }
  }
  return placed;
}

// The split with the most decode workers, up to decode.replicas, beside the prefill ones, and where all of
// them are. Nothing when not one fits. The wider pool is placed first.
std::optional<WorkerLayout> place_split(const Rent& rent, std::size_t number, const Menu& menu, Group prefill,
                                        Group decode) {
  const std::vector<int> nodes = nodes_of(rent);
  const int first = decode.tensor_parallel > prefill.tensor_parallel ? 1 : 0;
  for (; decode.replicas > 0; --decode.replicas) {
    WorkerLayout layout;
    layout.rent = number;
    layout.groups = {prefill, decode};
    std::vector<int> used(nodes.size(), 0);
    bool fits = true;
    for (const int group : {first, 1 - first}) {
      const int replicas = layout.groups[at(group)].replicas;
      fits = fits && place_group(layout, group, replicas, nodes, menu, used) == replicas;
    }
    if (fits) return layout;
  }
  return std::nullopt;
}

int gpus_of(const Rent& rent, const Menu& menu, int offer) {
  return rent.counts[at(offer)] * menu.offers[at(offer)].instance->gpus;
}

void finish(WorkerLayout& layout, const Rent& rent, const Menu& menu) {
  layout.gpus = 0;
  for (std::size_t o = 0; o < rent.counts.size(); ++o)
    layout.gpus += gpus_of(rent, menu, static_cast<int>(o));
  layout.idle = layout.gpus;
  for (const Group& g : layout.groups) layout.idle -= g.tensor_parallel * g.replicas;
  std::ranges::sort(layout.places, {},
                    [](const WorkerLayout::Place& p) { return std::pair(p.group, p.replica); });
}

// Every split of a rent for one pair of degrees, from the fewest prefill workers; what another with as many
// decode workers and more prefill ones beats is left out.
std::vector<WorkerLayout> splits(const Rent& rent, std::size_t number, const Menu& menu, Group prefill,
                                 Group decode) {
  std::vector<WorkerLayout> list;
  const bool shared = prefill.offer == decode.offer;
  for (int x = 1; x * prefill.tensor_parallel <= gpus_of(rent, menu, prefill.offer); ++x) {
    prefill.replicas = x;
    decode.replicas = (gpus_of(rent, menu, decode.offer) - (shared ? x * prefill.tensor_parallel : 0)) /
                      decode.tensor_parallel;
    std::optional<WorkerLayout> layout = place_split(rent, number, menu, prefill, decode);
    if (!layout) continue;
    finish(*layout, rent, menu);
    if (!list.empty() && list.back().groups[1] == layout->groups[1]) list.pop_back();
    list.push_back(std::move(*layout));
  }
  return list;
}

std::optional<WorkerLayout> colocated(const Rent& rent, std::size_t number, const Menu& menu, int offer,
                                      int degree) {
  WorkerLayout layout;
  layout.rent = number;
  layout.groups = {{offer, degree, 0}};
  const std::vector<int> nodes = nodes_of(rent);
  std::vector<int> used(nodes.size(), 0);
  layout.groups[0].replicas = place_group(layout, 0, INT32_MAX, nodes, menu, used);
  if (layout.groups[0].replicas == 0) return std::nullopt;
  finish(layout, rent, menu);
  return layout;
}

// Without its place in a file that nobody has written.
std::string bare_problem(const InputError& error, const std::string& file) {
  std::string text = problem_of(error, file);
  if (text.starts_with("/")) text.erase(0, std::min(text.find(": "), text.size() - 2) + 2);
  return text;
}

// Combinations of `count` instances of one offer, or of two different ones.
std::vector<Rent> rents_of(const Menu& menu) {
  std::vector<Rent> rents;
  const std::size_t n = menu.offers.size();
  const auto add = [&](std::vector<int> counts) {
    Rent rent{std::move(counts), 0};
    for (std::size_t o = 0; o < n; ++o) {
      if (rent.counts[o] == 0) continue;
      if (!menu.offers[o].usd_per_hour) return;
      rent.usd_per_hour += rent.counts[o] * *menu.offers[o].usd_per_hour;
    }
    rents.push_back(std::move(rent));
  };
  for (int total = 1; total <= menu.max_instances; ++total) {
    for (std::size_t a = 0; a < n; ++a) {
      std::vector<int> counts(n, 0);
      counts[a] = total;
      add(counts);
      for (std::size_t b = a + 1; menu.mixed && b < n; ++b) {
        for (int others = 1; others < total; ++others) {
          counts[a] = total - others;
          counts[b] = others;
          add(counts);
          counts[b] = 0;
        }
      }
    }
  }
  std::ranges::stable_sort(rents, {}, [](const Rent& r) { return r.usd_per_hour; });
  return rents;
}

}  // namespace

int Rent::instances() const {
  int n = 0;
  for (const int count : counts) n += count;
  return n;
}

std::string workers_of(const WorkerLayout& layout) {
  const auto group = [](const Group& g, std::string_view name) {
    return fmt::format("{} {} TP{}", g.replicas, name, g.tensor_parallel);
  };
  if (!layout.disaggregated())
    return group(layout.groups[0], layout.groups[0].replicas == 1 ? "worker" : "workers");
  return fmt::format("{} + {}", group(layout.groups[0], "prefill"), group(layout.groups[1], "decode"));
}

std::string name_of(const Rent& rent, const std::vector<Offer>& offers) {
  std::string text;
  for (std::size_t o = 0; o < offers.size(); ++o) {
    if (rent.counts[o] == 0) continue;
    text += fmt::format("{}{} x {}", text.empty() ? "" : " + ", rent.counts[o], offers[o].instance->name);
  }
  return text;
}

Template template_of(const LoadedScenario& loaded) {
  const Scenario& s = loaded.scenario;
  if (!s.faults.empty()) {
    throw InputError(loaded.place("/faults"),
                     "is not empty; a plan is for machines that work, expected none");
  }
  if (!s.transfer_pairs.empty()) {
    throw InputError(loaded.place("/transfer/pairs"),
                     "names pools of its own, which a plan replaces; expected none");
  }
  const WorkloadConfig& w = s.workload;
  // What waits for the deployment has the rate that the deployment makes of it, and keeps up with anything.
  if (w.synthetic && w.synthetic->concurrency > 0) {
    throw InputError(
        loaded.place("/workload/synthetic/concurrency"),
        fmt::format("is {}, which is a closed loop: its rate is what the deployment makes of it; expected a "
                    "\"rate\" instead",
                    w.synthetic->concurrency));
  }
  for (const auto& [key, limit] :
       {std::pair("concurrency", w.concurrency), std::pair("max_concurrency", w.max_concurrency)}) {
    if (limit > 0) {
      throw InputError(
          loaded.place(fmt::format("/workload/{}", key)),
          fmt::format("is {}, which is a closed loop: its rate is what the deployment makes of it; expected "
                      "0 (--set workload.{}=0)",
                      limit, key));
    }
  }
  if (w.sessions == Sessions::closed) {
    throw InputError(loaded.place("/workload/sessions"),
                     "is \"closed\": turns wait for the deployment, so that there is no rate to be carried; "
                     "expected \"open\" (--set workload.sessions=open)");
  }
  for (const auto& [key, time] : {std::pair("warmup_s", w.warmup), std::pair("measure_s", w.measure)}) {
    if (time > 0) {
      throw InputError(loaded.place(fmt::format("/workload/{}", key)),
                       fmt::format("is {:g}: a window of fixed length holds other requests at each load; "
                                   "expected 0, every request (--set workload.{}=0)",
                                   to_seconds(time), key));
    }
  }
  Template base;
  base.file = loaded.file;
  base.document = loaded.in_force;
  base.max_position = load_model(s.model, loaded.place("/model")).max_position;
  const ordered_json document = ordered_json::parse(loaded.in_force);
  for (std::size_t i = 0; i < s.pools.size(); ++i) {
    const PoolConfig& pool = s.pools[i];
    for (const auto& [key, degree] : {std::pair("pipeline_parallel", pool.pipeline_parallel),
                                      std::pair("data_parallel", pool.data_parallel),
                                      std::pair("expert_parallel", pool.expert_parallel)}) {
      if (degree > 1) {
        throw InputError(loaded.place(fmt::format("/pools/{}/{}", i, key)),
                         fmt::format("is {}; a plan varies tensor_parallel alone, expected 1", degree));
      }
    }
    std::string& engine = base.engines[static_cast<std::size_t>(pool.role)];
    if (engine.empty()) engine = document["pools"][i]["engine"].dump();
  }
  auto& [prefill, decode, colocated] = base.engines;
  if (colocated.empty()) {
    colocated = prefill;
    if (prefill != decode) base.substituted = "colocated workers have the engine knobs of the prefill pool";
  } else if (prefill.empty()) {
    prefill = decode = colocated;
  }
  return base;
}

std::string scenario_text(const Template& base, const Menu& menu, const WorkerLayout& layout,
                          const DeploymentKind& kind, double time_scale, const WhatIf& what_if) {
  ordered_json doc = ordered_json::parse(base.document);
  ordered_json pools = ordered_json::array(), places = ordered_json::array(), prices = ordered_json::object();
  for (std::size_t g = 0; g < layout.groups.size(); ++g) {
    const Group& group = layout.groups[g];
    const Offer& offer = menu.offers[at(group.offer)];
    const std::size_t role = role_of(layout, g);
    pools.push_back({{"name", kPoolNames[role]},
                     {"role", kRoles[role].name},
                     {"replicas", group.replicas},
                     {"instance", offer.instance->name},
                     {"tensor_parallel", group.tensor_parallel},
                     {"engine", ordered_json::parse(base.engines[role])}});
    ordered_json& longest = pools.back()["engine"]["max_model_len"];
    if (what_if.prompts > 1 && longest.get<double>() > 0) {
      longest =
          std::min<std::int64_t>(std::llround(longest.get<double>() * what_if.prompts), base.max_position);
    }
    if (offer.usd_per_hour) prices[offer.instance->name] = *offer.usd_per_hour;
  }
  for (const WorkerLayout::Place& place : layout.places) {
    places.push_back({{"pool", pools[at(place.group)]["name"]},
                      {"replica", place.replica},
                      {"node", place.node},
                      {"gpus", place.gpus}});
  }
  doc["pools"] = std::move(pools);
  doc["placement"] = std::move(places);
  doc["pricing"] = {{"plan", kPricingPlans[0].name}, {"usd_per_hour", std::move(prices)}};
  doc["transfer"]["mode"] = kind.mode;
  doc["transfer"]["bidirectional"] = kind.bidirectional;
  doc["workload"]["time_scale"] = time_scale;
  if (what_if.prompts != 1) {
    doc["workload"]["prompt_scale"] = doc["workload"]["prompt_scale"].get<double>() * what_if.prompts;
  }
  if (what_if.bandwidth != 1) {
    doc["network"]["bandwidth_scale"] = doc["network"]["bandwidth_scale"].get<double>() * what_if.bandwidth;
  }
  return doc.dump(2);
}

Candidates candidates_of(const Template& base, const Menu& menu, bool want_colocated,
                         bool want_disaggregated) {
  Candidates all;
  all.rents = rents_of(menu);
  const auto exclude = [&](const std::string& reason, std::size_t candidates, const std::string& example) {
    const auto found = std::ranges::find(all.excluded, reason, &Excluded::reason);
    if (found != all.excluded.end()) {
      found->candidates += static_cast<std::int64_t>(candidates);
    } else if (candidates > 0) {
      all.excluded.push_back({reason, static_cast<std::int64_t>(candidates), example});
    }
  };
  // Whether workers of these kinds can work does not depend on how many there are.
  std::map<std::string, std::string> known;
  const auto problem = [&](const std::vector<Group>& groups,
                           const WorkerLayout& layout) -> const std::string& {
    std::string key;
    for (const Group& g : groups) key += fmt::format("{}/{} ", g.offer, g.tensor_parallel);
    const auto [entry, is_new] = known.try_emplace(key);
    if (is_new) {
      try {
        const LoadedScenario loaded = parse_scenario(
            scenario_text(base, menu, layout, kKinds[layout.disaggregated() ? 1 : 0], 1), base.file);
        check_simulated(loaded);
        plan_deployment(loaded);
      } catch (const InputError& error) {
        entry->second = bare_problem(error, base.file);
      }
    }
    return entry->second;
  };
  const auto example = [&](const WorkerLayout& layout) {
    return fmt::format("{} on {}", workers_of(layout), name_of(all.rents[layout.rent], menu.offers));
  };
  const auto add = [&](std::vector<WorkerLayout> layouts) {
    if (layouts.empty()) return;
    const std::string& why = problem(layouts.front().groups, layouts.front());
    if (!why.empty()) return exclude(why, layouts.size(), example(layouts.front()));
    std::ranges::move(layouts, std::back_inserter(all.layouts));
  };
  for (const Offer& offer : menu.offers) {
    if (!offer.usd_per_hour) {
      exclude("no price is published of this instance", at(menu.max_instances), offer.instance->name);
    }
  }
  for (std::size_t r = 0; r < all.rents.size(); ++r) {
    const Rent& rent = all.rents[r];
    std::vector<int> offers;
    for (std::size_t o = 0; o < rent.counts.size(); ++o) {
      if (rent.counts[o] > 0) offers.push_back(static_cast<int>(o));
    }
    const bool mixed = offers.size() > 1;
    for (const int degree : menu.tensor_parallel) {
      if (!want_colocated || mixed) break;
      if (auto layout = colocated(rent, r, menu, offers[0], degree)) {
        add({std::move(*layout)});
      } else {
        exclude("a worker takes more GPUs than an instance has", 1,
                fmt::format("TP{} on {}", degree, name_of(rent, menu.offers)));
      }
    }
    for (const int p : menu.tensor_parallel) {
      for (const int d : menu.tensor_parallel) {
        if (!want_disaggregated) break;
        const auto [less, more] = std::minmax(p, d);
        const int sides = mixed ? 2 : 1;
        for (int side = 0; side < sides; ++side) {
          const Group prefill{offers[at(side)], p, 1}, decode{offers[at(mixed ? 1 - side : 0)], d, 1};
          std::vector<WorkerLayout> layouts = splits(rent, r, menu, prefill, decode);
          if (more % less != 0) {
            exclude("of prefill's and decode's tensor parallelism neither divides the other", layouts.size(),
                    layouts.empty() ? "" : example(layouts.front()));
            continue;
          }
          add(std::move(layouts));
        }
      }
    }
  }
  return all;
}

}  // namespace pdsim
