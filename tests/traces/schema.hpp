// Whether a document is what its JSON Schema says.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace pdsim {

/// As much of JSON Schema as pdsim's own schemas use; and, where `closed`, no key that the schema leaves out.
inline void conform(const nlohmann::ordered_json& value, nlohmann::ordered_json schema,
                    const nlohmann::ordered_json& root, bool closed, const std::string& at = "") {
  using nlohmann::ordered_json;
  if (schema.contains("$ref")) {
    schema = root[ordered_json::json_pointer(schema["$ref"].get<std::string>().substr(1))];
  }
  if (schema.contains("const")) {
    EXPECT_EQ(value, schema["const"]) << at;
  }
  if (schema.contains("enum")) {
    EXPECT_NE(std::count(schema["enum"].begin(), schema["enum"].end(), value), 0) << at << value;
  }
  if (schema.contains("minimum") && value.is_number()) {
    EXPECT_GE(value, schema["minimum"]) << at;
  }
  if (schema.contains("maximum") && value.is_number()) {
    EXPECT_LE(value, schema["maximum"]) << at;
  }
  if (schema.contains("type")) {
    const std::string type = value.is_number_integer() ? "integer" : value.type_name();
    const std::string types = schema["type"].dump();
    EXPECT_TRUE(types.find(type) != std::string::npos ||
                (type == "integer" && types.find("number") != std::string::npos))
        << at << ": " << type << " is not " << types;
  }
  if (value.is_object()) {
    for (const ordered_json& key : schema.value("required", ordered_json::array())) {
      EXPECT_TRUE(value.contains(key.get<std::string>())) << at << " lacks " << key;
    }
    const ordered_json properties = schema.value("properties", ordered_json::object());
    const ordered_json others = schema.value("additionalProperties", ordered_json());
    for (const auto& [key, member] : value.items()) {
      if (properties.contains(key) || others.is_object()) {
        conform(member, properties.value(key, others), root, closed, at + "/" + key);
      } else if (!properties.empty()) {
        EXPECT_FALSE(closed) << at << " has " << key;
      }
    }
  }
  if (value.is_array() && schema.contains("items")) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      conform(value[i], schema["items"], root, closed, at + "/" + std::to_string(i));
    }
  }
}

}  // namespace pdsim
