#include "tools/study/objective.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

// Items of a list by index or by their own name.
const ordered_json& step_into(const ordered_json& node, const std::string& step, std::string_view place,
                              std::string_view so_far) {
  std::vector<std::string> known;
  if (node.is_object()) {
    if (const auto found = node.find(step); found != node.end()) return *found;
    for (const auto& [key, value] : node.items()) known.push_back(key);
  } else if (node.is_array()) {
    for (std::size_t i = 0; i < node.size(); ++i) {
      const std::string name = node[i].is_object() ? node[i].value("name", "") : "";
      if (step == std::to_string(i) || step == name) return node[i];
      known.push_back(name.empty() ? std::to_string(i) : name);
    }
  }
  const std::vector<std::string_view> words(known.begin(), known.end());
  throw InputError(
      place, fmt::format("{} has no '{}'{}, expected one of {}", so_far.empty() ? "the summary" : so_far,
                         step, did_you_mean(step, words), fmt::join(known, ", ")));
}

}  // namespace

Objective find_objective(std::string_view text, std::string_view place) {
  const auto* named = std::ranges::find(kObjectives, text, &NamedObjective::name);
  if (named != std::end(kObjectives)) {
    return {std::string(named->name), std::string(named->path), named->less_is_better};
  }
  for (const bool less : {true, false}) {
    const std::string_view way = less ? "min:" : "max:";
    if (text.starts_with(way) && text.size() > way.size()) {
      return {std::string(text.substr(way.size())), std::string(text.substr(way.size())), less};
    }
  }
  std::vector<std::string_view> names;
  for (const NamedObjective& objective : kObjectives) names.push_back(objective.name);
  throw InputError(place, fmt::format("'{}' is no objective{}, expected one of {}; or min:PATH or max:PATH "
                                      "into the summary",
                                      text, did_you_mean(text, names), fmt::join(names, ", ")));
}

std::optional<double> number_at(const ordered_json& summary, std::string_view path, std::string_view place,
                                std::string_view of) {
  const ordered_json* node = &summary;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    node = &step_into(*node, std::string(path.substr(begin, end - begin)), place,
                      fmt::format("{}{}", of, path.substr(0, begin > 0 ? begin - 1 : 0)));
    begin = end + 1;
  }
  if (node->is_null()) return std::nullopt;
  if (!node->is_number()) {
    throw InputError(place, fmt::format("{}{} is {}, expected a number", of, path, node->type_name()));
  }
  return node->get<double>();
}

int complexity(const Scenario& scenario) {
  const bool disaggregated = std::ranges::none_of(
      scenario.pools, [](const PoolConfig& pool) { return pool.role == Role::colocated; });
  if (!disaggregated) return 0;
  constexpr int kModes = static_cast<int>(std::size(kTransferModes));
  return 1 + static_cast<int>(scenario.transfer.mode) + (scenario.transfer.bidirectional ? kModes : 0);
}

std::string deployment_kind(const Scenario& scenario) {
  if (complexity(scenario) == 0) return "colocated";
  const TransferConfig& t = scenario.transfer;
  return fmt::format("{}{}", kTransferModes[static_cast<std::size_t>(t.mode)].name,
                     t.bidirectional ? ", bidirectional" : "");
}

}  // namespace pdsim
