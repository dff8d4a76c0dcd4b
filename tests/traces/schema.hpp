// Whether a document is what its JSON Schema says.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim {

/// What a document breaks, an entry a place: as much of JSON Schema as pdsim's own schemas use, and any other
/// keyword breaks it too; and, where `closed`, no key that the schema leaves out.
inline std::vector<std::string> breaches_of(const nlohmann::ordered_json& value,
                                            const nlohmann::ordered_json& schema,
                                            const nlohmann::ordered_json& root, bool closed,
                                            const std::string& at = "") {
  using nlohmann::ordered_json;
  std::vector<std::string> breaches;
  const auto expect = [&](bool is_so, const std::string& otherwise) {
    if (!is_so) breaches.push_back(at + ": " + otherwise);
  };
  const auto descend = [&](const ordered_json& part, const ordered_json& by, const std::string& below) {
    for (std::string& breach : breaches_of(part, by, root, closed, at + below)) {
      breaches.push_back(std::move(breach));
    }
  };
  const auto conforming = [&](const ordered_json& alternatives) {
    return std::count_if(alternatives.begin(), alternatives.end(), [&](const ordered_json& alternative) {
      return breaches_of(value, alternative, root, closed).empty();
    });
  };
  constexpr std::string_view kAnnotations[] = {"$id",         "$schema", "title",
                                               "description", "default", "definitions"};
  const ordered_json properties = schema.value("properties", ordered_json::object());
  const ordered_json others = schema.value("additionalProperties", ordered_json());
  for (const auto& [keyword, asked] : schema.items()) {
    const std::string broken = value.dump() + " breaks " + keyword + " " + asked.dump();
    if (keyword == "$ref") {
      descend(value, root[ordered_json::json_pointer(asked.get<std::string>().substr(1))], "");
    } else if (keyword == "const") {
      expect(value == asked, broken);
    } else if (keyword == "enum") {
      expect(std::count(asked.begin(), asked.end(), value) > 0, broken);
    } else if (keyword == "minimum") {
      expect(!value.is_number() || value >= asked, broken);
    } else if (keyword == "exclusiveMinimum") {
      expect(!value.is_number() || value > asked, broken);
    } else if (keyword == "maximum") {
      expect(!value.is_number() || value <= asked, broken);
    } else if (keyword == "minLength") {
      expect(!value.is_string() || value.get<std::string>().size() >= asked, broken);
    } else if (keyword == "pattern") {
      expect(!value.is_string() ||
                 std::regex_search(value.get<std::string>(), std::regex(asked.get<std::string>())),
             broken);
    } else if (keyword == "minItems") {
      expect(!value.is_array() || value.size() >= asked, broken);
    } else if (keyword == "uniqueItems") {
      for (std::size_t i = 0; asked == true && value.is_array() && i < value.size(); ++i) {
        expect(std::count(value.begin(), value.end(), value[i]) == 1, broken);
      }
    } else if (keyword == "minProperties") {
      expect(!value.is_object() || value.size() >= asked, broken);
    } else if (keyword == "anyOf") {
      expect(conforming(asked) > 0, broken);
    } else if (keyword == "oneOf") {
      expect(conforming(asked) == 1, broken);
    } else if (keyword == "type") {
      const std::string type = value.is_number_integer() ? "integer" : value.type_name();
      const auto is = [&](const ordered_json& name) {
        return name == type || (name == "number" && type == "integer");
      };
      expect(asked.is_array() ? std::any_of(asked.begin(), asked.end(), is) : is(asked), broken);
    } else if (keyword == "required") {
      for (const ordered_json& key : asked) {
        expect(!value.is_object() || value.contains(key.get<std::string>()), "lacks " + key.dump());
      }
    } else if (keyword == "propertyNames") {
      for (const auto& [key, member] : value.items()) {
        if (value.is_object()) descend(key, asked, "/" + key);
      }
    } else if (keyword == "items") {
      for (std::size_t i = 0; value.is_array() && i < value.size(); ++i) {
        descend(value[i], asked, "/" + std::to_string(i));
      }
    } else if (keyword != "properties" && keyword != "additionalProperties") {
      expect(std::ranges::count(kAnnotations, keyword) > 0,
             "the schema's keyword " + keyword + " is not checked");
    }
  }
  if (!value.is_object()) return breaches;
  for (const auto& [key, member] : value.items()) {
    if (properties.contains(key)) {
      descend(member, properties[key], "/" + key);
    } else if (others.is_object()) {
      descend(member, others, "/" + key);
    } else {
      expect(others != false && (!closed || properties.empty()), "has " + key);
    }
  }
  return breaches;
}

/// Fails the test for each breach.
inline void conform(const nlohmann::ordered_json& value, const nlohmann::ordered_json& schema, bool closed) {
  for (const std::string& breach : breaches_of(value, schema, schema, closed)) ADD_FAILURE() << breach;
}

}  // namespace pdsim
