#include "models/overheads.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "models/data.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr std::string_view kSchema = "pdsim.overheads/1";

Overheads read(const JsonObject& json) {
  std::vector<std::string_view> known = {"schema", "name", "source", "date"};
  for (const OverheadField& field : kOverheadFields) known.push_back(field.key);
  for (const auto& item : json.value().items()) {
    if (std::ranges::find(known, item.key()) != known.end()) continue;
    throw InputError(json.at(item.key()),
                     fmt::format("is not known here{}", did_you_mean(item.key(), known)));
  }
  Overheads o;
  o.name = json.text("name");
  o.source = json.text_or("source", "");
  o.date = json.text_or("date", "");
  constexpr double kMostUs = 1e6;
  for (const OverheadField& field : kOverheadFields) {
    const double us = json.number(field.key, 0);
    if (us > kMostUs) json.reject(field.key, "at most a second");
    field.of(o) = 1e3 * us;
  }
  return o;
}

std::filesystem::path presets_file() {
  return data_dir() / "models" / "overheads.json";
}

std::vector<Overheads> presets() {
  const std::string file = presets_file().string();
  const nlohmann::json document = read_json(file);
  const JsonObject root(document, file);
  if (root.text("schema") != kSchema) root.reject("schema", fmt::format("'{}'", kSchema));
  std::vector<Overheads> all;
  for (std::size_t i = 0; i < root.array("presets").size(); ++i)
    all.push_back(read(root.element("presets", i)));
  return all;
}

}  // namespace

std::vector<std::string> overhead_names() {
  std::vector<std::string> names;
  for (const Overheads& each : presets()) names.push_back(each.name);
  return names;
}

Overheads load_overheads(std::string_view name_or_path, std::string_view place) {
  const auto one = [](const nlohmann::json& document, std::string_view where) {
    const JsonObject json(document, std::string(where));
    if (json.text("schema") != kSchema) json.reject("schema", fmt::format("'{}'", kSchema));
    return read(json);
  };
  if (name_or_path.starts_with('{')) {
    const nlohmann::json document = nlohmann::json::parse(name_or_path, nullptr, false);
    if (!document.is_object()) throw InputError(place, "is not JSON, expected an object of overheads");
    return one(document, place);
  }
  if (std::filesystem::path(name_or_path).extension() == ".json" || name_or_path == "-") {
    return one(read_json(std::filesystem::path(name_or_path)), name_or_path);
  }
  std::vector<std::string_view> names;
  const std::vector<Overheads> all = presets();
  for (const Overheads& each : all) {
    if (each.name == name_or_path) return each;
    names.push_back(each.name);
  }
  throw InputError(place,
                   fmt::format("no overheads '{}'{}: there are {}, or the path of a file that 'pdsim fit "
                               "--from-bench' wrote",
                               name_or_path, did_you_mean(name_or_path, names), fmt::join(names, ", ")));
}

std::string to_json(const Overheads& overheads) {
  nlohmann::ordered_json json = {{"schema", kSchema}, {"name", overheads.name}};
  Overheads o = overheads;
  for (const OverheadField& field : kOverheadFields) json[std::string(field.key)] = field.of(o) / 1e3;
  json["source"] = o.source;
  if (!o.date.empty()) json["date"] = o.date;
  return json.dump(2) + "\n";
}

}  // namespace pdsim
