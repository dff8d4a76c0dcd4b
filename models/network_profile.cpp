#include "models/network_profile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kSchema = "pdsim.network-profile/1";

double in_us(Nanos time) {
  return static_cast<double>(time) / 1e3;
}

Json curve_json(const std::vector<RatePoint>& curve) {
  Json list = Json::array();
  for (const RatePoint& point : curve) list.push_back({{"bytes", point.bytes}, {"gb_per_s", point.rate}});
  return list;
}

Json texts_json(const std::map<std::string, std::string>& texts) {
  Json json = Json::object();
  for (const std::string_view key : kNetworkQuantities) {
    if (const auto found = texts.find(std::string(key)); found != texts.end())
      json[found->first] = found->second;
  }
  return json;
}

/// Microseconds to the nearest nanosecond.
Nanos time_of(const JsonObject& object, std::string_view key, double least) {
  const double us = object.number(key, least);
  if (us > 1e9) object.reject(key, "a time below 1,000 s");
  return std::llround(us * 1e3);
}

std::vector<RatePoint> curve_of(const JsonObject& document, std::string_view key, double line) {
  std::vector<RatePoint> curve;
  if (!document.has(key)) return curve;
  if (line == 0) document.reject("line_gb_per_s", "the line rate of the cards that the rates are of");
  const std::size_t points = document.array(key).size();
  if (points == 0) document.reject(key, "at least one point, or no such key");
  for (std::size_t i = 0; i < points; ++i) {
    const JsonObject object = document.element(key, i);
    object.refuse_unknown({"bytes", "gb_per_s"});
    const RatePoint point{object.integer("bytes", 1, Bytes{1} << 50), object.number("gb_per_s", 0)};
    if (point.rate <= 0 || point.rate > line) {
      object.reject("gb_per_s", fmt::format("a rate above 0 and of at most line_gb_per_s = {}", line));
    }
    if (!curve.empty() && point.bytes <= curve.back().bytes) {
      object.reject("bytes", "sizes that ascend from point to point");
    }
    if (!curve.empty() && point.rate < curve.back().rate) {
      object.reject("gb_per_s", "a rate no lower than at the size before it");
    }
    curve.push_back(point);
  }
  return curve;
}

std::map<std::string, std::string> texts_of(const JsonObject& document, std::string_view key) {
  std::map<std::string, std::string> texts;
  if (!document.has(key)) return texts;
  const JsonObject object = document.object(key);
  for (const auto& [name, value] : object.value().items()) {
    if (std::ranges::find(kNetworkQuantities, name) == std::end(kNetworkQuantities)) {
      throw InputError(object.at(name), fmt::format("is no quantity{}, expected one of {}",
                                                    did_you_mean(name, kNetworkQuantities),
                                                    fmt::join(kNetworkQuantities, ", ")));
    }
    texts[name] = object.text(name);
  }
  return texts;
}

}  // namespace

NetworkProfile load_network_profile(const std::string& path, std::string_view place) {
  std::error_code error;
  if (path != "-" && !std::filesystem::is_regular_file(path, error)) {
    throw InputError(place, fmt::format("is '{}', expected a network profile (pdsim calibrate network writes "
                                        "one)",
                                        path));
  }
  const std::string text = read_text(path, "a network profile");
  const nlohmann::json json = parse_json(text, path);
  const JsonObject document(json, path);
  if (document.text("schema") != kSchema) document.reject("schema", fmt::format("\"{}\"", kSchema));
  document.refuse_unknown({"schema", "name", "date", "source", "fabric", "line_gb_per_s", "write", "read",
                           "operations_per_s", "latency_us", "posting", "evidence", "not_told", "files"});
  NetworkProfile profile;
  profile.sha256 = sha256_hex(text);
  profile.name = document.text("name");
  profile.date = document.text_or("date", "");
  profile.source = document.text_or("source", "");
  profile.fabric = document.text("fabric");
  const auto positive = [&](std::string_view key) {
    const double value = document.number_or(key, 0, 0);
    if (document.has(key) && value <= 0) document.reject(key, "a number above 0");
    return value;
  };
  profile.line = positive("line_gb_per_s");
  profile.write = curve_of(document, "write", profile.line);
  profile.read = curve_of(document, "read", profile.line);
  profile.operations = positive("operations_per_s") / 1e9;
  if (profile.operations > 0 && profile.line == 0) {
    document.reject("operations_per_s", "no such key without line_gb_per_s");
  }
  if (document.has("latency_us")) {
    profile.latency = time_of(document, "latency_us", 0);
    if (profile.latency <= 0) document.reject("latency_us", "a time of at least 0.001");
  }
  if (document.has("posting")) {
    const JsonObject posting = document.object("posting");
    posting.refuse_unknown({"backend", "fixed_us", "us_per_descriptor"});
    profile.posting = {posting.text("backend"), time_of(posting, "fixed_us", 0),
                       time_of(posting, "us_per_descriptor", 0)};
  }
  profile.evidence = texts_of(document, "evidence");
  profile.not_told = texts_of(document, "not_told");
  for (std::size_t i = 0; document.has("files") && i < document.array("files").size(); ++i) {
    const JsonObject file = document.element("files", i);
    file.refuse_unknown({"name", "sha256", "contents"});
    profile.files.push_back({file.text("name"), file.text("sha256"), file.text("contents")});
  }
  return profile;
}

Json network_figures(const NetworkProfile& profile) {
  Json json{{"name", profile.name}};
  if (!profile.date.empty()) json["date"] = profile.date;
  if (!profile.source.empty()) json["source"] = profile.source;
  json["fabric"] = profile.fabric;
  if (profile.line > 0) json["line_gb_per_s"] = profile.line;
  if (!profile.write.empty()) json["write"] = curve_json(profile.write);
  if (!profile.read.empty()) json["read"] = curve_json(profile.read);
  if (profile.operations > 0) json["operations_per_s"] = profile.operations * 1e9;
  if (profile.latency > 0) json["latency_us"] = in_us(profile.latency);
  if (profile.posting) {
    json["posting"] = {{"backend", profile.posting->backend},
                       {"fixed_us", in_us(profile.posting->fixed)},
                       {"us_per_descriptor", in_us(profile.posting->per_descriptor)}};
  }
  json["evidence"] = texts_json(profile.evidence);
  json["not_told"] = texts_json(profile.not_told);
  return json;
}

std::string to_json(const NetworkProfile& profile) {
  Json json{{"schema", kSchema}};
  json.update(network_figures(profile));
  json["files"] = Json::array();
  for (const MeasuredFile& file : profile.files) {
    json["files"].push_back({{"name", file.name}, {"sha256", file.sha256}, {"contents", file.contents}});
  }
  return json.dump(2) + "\n";
}

}  // namespace pdsim
