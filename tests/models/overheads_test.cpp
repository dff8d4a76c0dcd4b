// Overheads: what is written reads back the same, every figure from its own key; what is wrong is an error
// that says where.
#include "models/overheads.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

// Each figure is another one, a power of two of microseconds, so that none can stand in for its neighbour.
Overheads unlike() {
  Overheads o;
  o.name = "mine";
  o.source = "a \"bench\" of mine";
  o.front_end = 1e3;
  o.front_end_token = 0.5e3;
  o.step = 4e3;
  o.request = 8e3;
  o.gpu = 16e3;
  o.rank = 32e3;
  o.launch[0] = 64e3;
  o.launch[1] = 128e3;
  o.launch[2] = 256e3;
  return o;
}

std::string error_of(const std::string& name_or_path) {
  try {
    load_overheads(name_or_path, "engine.overheads");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Overheads, WhatIsWrittenReadsBack) {
  const Folder folder;
  const Overheads o = unlike();
  const std::string text = to_json(o);
  const json document = json::parse(text);
  EXPECT_EQ(document["schema"], "pdsim.overheads/1");
  const std::vector<std::pair<const char*, double>> keys = {{"front_end_us", 1},
                                                            {"front_end_us_per_token", 0.5},
                                                            {"step_us", 4},
                                                            {"step_us_per_request", 8},
                                                            {"gpu_us", 16},
                                                            {"rank_us", 32},
                                                            {"full_graph_us_per_layer", 64},
                                                            {"piecewise_us_per_layer", 128},
                                                            {"eager_us_per_layer", 256}};
  for (const auto& [key, us] : keys) EXPECT_EQ(document[key], us) << key;

  const Overheads read = load_overheads(folder.file("mine.json", text));
  EXPECT_EQ(to_json(read), text);
  EXPECT_EQ(read.name, "mine");
  EXPECT_EQ(read.source, o.source);
  for (double Overheads::*member : {&Overheads::front_end, &Overheads::front_end_token, &Overheads::step,
                                    &Overheads::request, &Overheads::gpu, &Overheads::rank}) {
    EXPECT_EQ(read.*member, o.*member);
  }
  EXPECT_TRUE(std::equal(std::begin(read.launch), std::end(read.launch), std::begin(o.launch)));
}

TEST(Overheads, ShippedPresetsAreWhole) {
  const std::vector<std::string> names = overhead_names();
  EXPECT_NE(std::find(names.begin(), names.end(), "vllm"), names.end());
  for (const std::string& name : names) {
    const Overheads o = load_overheads(name);
    EXPECT_EQ(o.name, name);
    EXPECT_FALSE(o.source.empty()) << name;
    EXPECT_EQ(o.step > 0, name != "none") << name;
    // A graph saves launches: whole ones most.
    EXPECT_LE(o.launch[0], o.launch[1]) << name;
    EXPECT_LE(o.launch[1], o.launch[2]) << name;
  }
}

TEST(Overheads, AnUnknownPresetListsThem) {
  const std::string text = error_of("vlm");
  EXPECT_EQ(text.rfind("engine.overheads: ", 0), 0u) << text;
  EXPECT_NE(text.find("no overheads 'vlm' (did you mean 'vllm'?)"), std::string::npos) << text;
  for (const std::string& name : overhead_names()) EXPECT_NE(text.find(name), std::string::npos) << text;
}

TEST(Overheads, ErrorsSayWhere) {
  const Folder folder;
  const auto changed = [&](const char* key, const json& value) {
    json document = json::parse(to_json(unlike()));
    if (value.is_null()) {
      document.erase(key);
    } else {
      document[key] = value;
    }
    return error_of(folder.file("o.json", document.dump()));
  };
  const std::string file = folder / "o.json";
  EXPECT_EQ(changed("step_us", 5), "no error");
  EXPECT_EQ(changed("stepp_us", 5), file + ": /stepp_us: is not known here (did you mean 'step_us'?)");
  for (const char* key : {"step_us", "rank_us", "eager_us_per_layer"}) {
    EXPECT_NE(changed(key, -1).find(file + ": /" + key), std::string::npos) << changed(key, -1);
    EXPECT_NE(changed(key, "fast").find(file + ": /" + key), std::string::npos) << changed(key, "fast");
    EXPECT_NE(changed(key, nullptr).find(key), std::string::npos) << changed(key, nullptr);
  }
  EXPECT_NE(changed("schema", "pdsim.overheads/9").find("expected 'pdsim.overheads/1'"), std::string::npos);
  EXPECT_NE(error_of(folder / "none.json").find("none.json"), std::string::npos);
}

}  // namespace
}  // namespace pdsim
