// What could be rented for a job: every deployment that a menu of instances allows, as scenarios to be run.
//
// A candidate is a rent (so many instances of each kind), a layout of workers on them, and a way to hand KV
// over. All GPUs of what is rented are used as far as the degrees of tensor parallelism allow; those left
// over are idle and billed. Prefill and decode workers share nodes where the split has it so: placement is
// explicit, replicas of the wider pool first, each on the first node with room, so that no worker spans two.
// What cannot work is not a candidate, but is counted by the reason.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/hardware.hpp"
#include "sim/scenario/load.hpp"
#include "sim/scenario/scenario.hpp"

namespace pdsim {

/// One line of the menu.
struct Offer {
  const Instance* instance = nullptr;
  std::optional<double> usd_per_hour;  ///< absent: nobody has published it
  std::string as_of, source;           ///< of the price
};

/// How KV gets from prefill to decode, from the simplest.
struct DeploymentKind {
  std::string_view name;
  bool disaggregated;
  std::string_view mode;  ///< transfer.mode
  bool bidirectional;
};
inline constexpr DeploymentKind kKinds[] = {
    {"colocated", false, "pull", false},
    {"pull", true, "pull", false},
    {"push", true, "push", false},
    {"push_layerwise", true, "push_layerwise", false},
    {"push_progressive", true, "push_progressive", false},
    {"bidirectional", true, "pull", true},
};
inline constexpr std::size_t kKindCount = std::size(kKinds);

/// So many instances of each offer.
struct Rent {
  std::vector<int> counts;  ///< by offer
  double usd_per_hour = 0;

  int instances() const;
};

/// The workers of one pool.
struct Group {
  int offer = 0, tensor_parallel = 1, replicas = 0;
  bool operator==(const Group&) const = default;
};

/// What runs where on a rent: one group of colocated workers, or prefill and decode.
struct WorkerLayout {
  std::size_t rent = 0;
  std::vector<Group> groups;
  int gpus = 0, idle = 0;  ///< rented, and of them without a worker
  struct Place {
    int group = 0, replica = 0, node = 0;
    std::vector<int> gpus;
  };
  std::vector<Place> places;

  bool disaggregated() const { return groups.size() > 1; }
};

/// "8 workers TP1", "5 prefill TP1 + 3 decode TP1".
std::string workers_of(const WorkerLayout& layout);

/// "2 x p5en.48xlarge", "1 x p5en.48xlarge + 1 x p5.48xlarge".
std::string name_of(const Rent& rent, const std::vector<Offer>& offers);

/// Candidates that cannot work, and why.
struct Excluded {
  std::string reason;
  std::int64_t candidates = 0;
  std::string example;
};

struct Menu {
  std::vector<Offer> offers;
  std::vector<int> tensor_parallel;
  int max_instances = 1;
  bool mixed = false;  ///< prefill and decode on instances of different kinds
};

struct Candidates {
  std::vector<Rent> rents;            ///< from the cheapest; of equal prices fewer instances first
  std::vector<WorkerLayout> layouts;  ///< by rent, colocated ones first
  std::vector<Excluded> excluded;
};

/// The scenario that candidates are made from: its document in force, and engine knobs by role.
struct Template {
  std::string file;                    ///< as errors name it
  std::string document;                ///< JSON: the scenario in force
  std::array<std::string, 3> engines;  ///< JSON, by Role
  std::int32_t max_position = 0;       ///< of the model
  std::string substituted;  ///< whose knobs stand in for which role that the scenario has not; empty = none
};

/// InputError for what a plan cannot vary: faults, transfer pairs, other parallelism than tensor, no open
/// loop.
Template template_of(const LoadedScenario& loaded);

/// What if the network, or prompts, were so many times what they are. An engine's max_model_len grows with
/// prompts, as far as the model goes.
struct WhatIf {
  double bandwidth = 1, prompts = 1;
};

/// The scenario of a layout as JSON text, itself a valid input.
std::string scenario_text(const Template& base, const Menu& menu, const WorkerLayout& layout,
                          const DeploymentKind& kind, double time_scale, const WhatIf& what_if = {});

/// Every layout of every rent. A degree of parallelism that the model refuses, weights that do not fit,
/// instances without a price or that cannot reach each other are excluded. Cost: a deployment is planned for
/// each kind of worker and pair of them.
Candidates candidates_of(const Template& base, const Menu& menu, bool colocated, bool disaggregated);

}  // namespace pdsim
