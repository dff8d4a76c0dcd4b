#include "models/profile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "models/data.hpp"
#include "models/datasheet.hpp"
#include "models/hardware.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/core/math.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {
namespace {

constexpr std::string_view kSchema = "pdsim.profile/1";
// What a reader of the file should know of its errors.
constexpr std::string_view kErrors =
    "held_out: of a fit without these groups of shapes; regimes and corrections are fitted to all rows";

constexpr std::pair<CurveOp, std::string_view> kOps[] = {
    {CurveOp::gemm, "gemm"},
    {CurveOp::attention_prefill, "attention-prefill"},
    {CurveOp::attention_decode, "attention-decode"},
    {CurveOp::mla_prefill, "mla-prefill"},
    {CurveOp::mla_decode, "mla-decode"},
    {CurveOp::dsa_prefill, "dsa-prefill"},
    {CurveOp::dsa_decode, "dsa-decode"},
    {CurveOp::moe, "moe"},
    {CurveOp::allreduce, "allreduce"},
    {CurveOp::allgather, "allgather"},
    {CurveOp::reducescatter, "reducescatter"},
    {CurveOp::alltoall, "alltoall"},
};

/// A coefficient's key in JSON, what to multiply it by on reading, and the value that is left out.
struct Field {
  std::string_view key;
  double Coefficients::*member;
  double scale;
};
constexpr Field kFields[] = {
    {"launch_us", &Coefficients::launch_ns, 1e3},
    {"tflops", &Coefficients::flops_per_ns, 1e3},
    {"gb_per_s", &Coefficients::bytes_per_ns, 1},
    {"overlap", &Coefficients::overlap, 1},
    {"element_ps", &Coefficients::element_ns, 1e-3},
    {"inner_ps", &Coefficients::inner_ns, 1e-3},
    {"expert_ns", &Coefficients::expert_ns, 1},
    {"parallel_us", &Coefficients::parallel_ns, 1e3},
    {"host_us", &Coefficients::host_ns, 1e3},
    {"ragged", &Coefficients::ragged, 1},
    {"ragged_host_us", &Coefficients::ragged_host_ns, 1e3},
    {"hidden_keys", &Coefficients::hidden_keys, 1},
    {"spread", &Coefficients::spread, 1},
    {"tail", &Coefficients::tail, 1},
    {"tail_overlap", &Coefficients::tail_overlap, 1},
    {"cache_mb", &Coefficients::cache_bytes, 1e6},
    {"cache_gb_per_s", &Coefficients::cache_bytes_per_ns, 1},
    {"wave_us", &Coefficients::wave_ns, 1e3},
    {"walk_ns", &Coefficients::walk_ns, 1},
    {"walk_waves", &Coefficients::walk_waves, 1},
    {"split_us", &Coefficients::split_ns, 1e3},
};

/// Formats whose kernels may stand in for one that was not measured, best first: the same width in the
/// tensor cores before a wider one.
std::span<const Dtype> stand_ins(Dtype dtype) {
  using enum Dtype;
  static constexpr Dtype kBf16[] = {bf16}, kFp8[] = {fp8, fp8_block, bf16}, kBlock[] = {fp8_block, fp8, bf16},
                         kNvfp4[] = {nvfp4, mxfp4, int4, bf16}, kMxfp4[] = {mxfp4, int4, bf16},
                         kInt4[] = {int4, mxfp4, bf16}, kInt8[] = {int8, fp8, bf16};
  switch (dtype) {
    case fp8:
      return kFp8;
    case fp8_block:
      return kBlock;
    case nvfp4:
      return kNvfp4;
    case mxfp4:
      return kMxfp4;
    case int4:
      return kInt4;
    case int8:
      return kInt8;
    case bf16:
    case fp16:
    case fp32:
      break;
  }
  return kBf16;
}

double log_distance(double a, double b) {
  return std::abs(math::log(std::max(a, 1.0) / std::max(b, 1.0)));
}

}  // namespace

std::string_view name(CurveOp op) {
  for (const auto& [each, text] : kOps) {
    if (each == op) return text;
  }
  return "?";
}

std::vector<CurveOp> curve_ops() {
  std::vector<CurveOp> ops;
  for (const auto& each : kOps) ops.push_back(each.first);
  return ops;
}

namespace {
constexpr double kUnlike = 1e-6;  // settles ties
}

CurveChoice find_curve(const Profile& profile, CurveOp op, Dtype dtype, std::string_view place,
                       std::int32_t head_dim, std::int32_t window, std::int32_t gpus) {
  for (const Dtype candidate : stand_ins(dtype)) {
    const Curve* nearest = nullptr;
    double least = 0;
    for (const Curve& curve : profile.curves) {
      if (curve.op != op || curve.dtype != candidate || curve.special) continue;
      // A full-attention curve also serves inside a window, as one of a large window: its sums are cut to
      // the window already. The reverse does not hold.
      constexpr double kFull = 131'072;
      const double distance =
          log_distance(curve.head_dim, head_dim) + log_distance(curve.gpus, gpus) +
          (curve.window == window ? 0
           : window > 0           ? 1e-3 * (1 + log_distance(curve.window > 0 ? curve.window : kFull, window))
                                  : 1e6);
      if (nearest != nullptr && distance >= least) continue;
      nearest = &curve;
      least = distance;
    }
    if (nearest == nullptr) continue;
    const bool same_path = candidate == dtype || dtype == Dtype::fp16;
    return {nearest, profile.datasheet || !same_path || least != 0};
  }
  throw InputError(place, fmt::format("profile '{}' has no {} curve for {} or a format that could stand in",
                                      profile.name, name(op), name(dtype)));
}

CurveChoice find_moe_curve(const Profile& profile, const MoeShape& shape, std::string_view place) {
  for (const Dtype candidate : stand_ins(shape.dtype)) {
    const Curve* nearest = nullptr;
    double least = 0;
    for (const Curve& curve : profile.curves) {
      if (curve.op != CurveOp::moe || curve.dtype != candidate || curve.special) continue;
      // A library may have one kernel for experts here and another for experts spread over ranks, and one
      // for a layer's way of routing: where this very layer was measured, its kernel is known.
      const auto range = curve.range.find("expert_parallel");
      const double ranks = shape.expert_parallel;
      double distance = 0;
      if (range != curve.range.end()) {
        distance = log_distance(std::clamp(ranks, range->second.least, range->second.most), ranks);
      }
      std::array<double, 4> at;
      if (!moe_point(curve.families, shape, at)) distance += kUnlike;
      if (nearest != nullptr && distance >= least) continue;
      nearest = &curve;
      least = distance;
    }
    if (nearest == nullptr) continue;
    const bool same_path = candidate == shape.dtype || shape.dtype == Dtype::fp16;
    return {nearest, profile.datasheet || !same_path || least > kUnlike};
  }
  throw InputError(place, fmt::format("profile '{}' has no {} curve for {} or a format that could stand in",
                                      profile.name, name(CurveOp::moe), name(shape.dtype)));
}

// Reading ----------------------------------------------------------------------------------------------

namespace {

void require_known(const JsonObject& object, std::initializer_list<std::string_view> known) {
  for (const auto& item : object.value().items()) {
    if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
    throw InputError(
        object.at(item.key()),
        fmt::format("is not known here{}", did_you_mean(item.key(), std::span(known.begin(), known.size()))));
  }
}

Coefficients read_regime(const JsonObject& json) {
  require_known(json,
                {"upto",    "tile",       "cluster",      "launch_us", "tflops",         "gb_per_s",
                 "overlap", "element_ps", "host_us",      "ragged",    "ragged_host_us", "hidden_keys",
                 "spread",  "tail",       "tail_overlap", "cache_mb",  "cache_gb_per_s", "wave_us",
                 "walk_ns", "walk_waves", "split_us",     "inner_ps",  "expert_ns",      "parallel_us"});
  Coefficients c;
  if (json.has("upto")) c.upto = json.number("upto", 0);
  for (const Field& field : kFields) {
    c.*field.member = json.number_or(field.key, c.*field.member / field.scale, 0) * field.scale;
  }
  if (c.overlap > 1) json.reject("overlap", "a number from 0 to 1");
  if (c.flops_per_ns <= 0 && c.bytes_per_ns <= 0) json.reject("gb_per_s", "a rate above 0");
  if (json.has("tile")) {
    const nlohmann::json& tile = json.array("tile");
    const auto positive = [](const nlohmann::json& v) {
      return v.is_number_integer() && v.get<std::int64_t>() >= 0;
    };
    if (tile.size() != 2 || !positive(tile[0]) || !positive(tile[1])) {
      json.reject("tile", "[rows, columns]");
    }
    c.tile_m = tile[0].get<std::int32_t>();
    c.tile_n = tile[1].get<std::int32_t>();
  }
  c.cluster = static_cast<std::int32_t>(json.integer_or("cluster", 1, 1));
  return c;
}

std::vector<double> read_nodes(const JsonObject& axis) {
  std::vector<double> nodes;
  for (const nlohmann::json& node : axis.array("at")) {
    if (!node.is_number() || node < 1 || (!nodes.empty() && node <= nodes.back())) {
      axis.reject("at", "ascending numbers from 1");
    }
    nodes.push_back(node.get<double>());
  }
  if (nodes.empty()) axis.reject("at", "at least one node");
  return nodes;
}

Correction read_correction(const JsonObject& json) {
  require_known(json, {"axes", "permille"});
  Correction correction;
  const nlohmann::json& axes = json.array("axes");
  if (axes.empty() || axes.size() > Correction::kMostAxes) {
    json.reject("axes", fmt::format("1 to {} axes", Correction::kMostAxes));
  }
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const JsonObject axis = json.element("axes", i);
    require_known(axis, {"name", "at"});
    correction.axes.emplace_back(axis.text("name"), read_nodes(axis));
  }
  const std::size_t columns = correction.axes.back().nodes.size(), rows = correction.size() / columns;
  const auto bad = [&] {
    json.reject("permille", fmt::format("{} rows of {} integers from -32768 to 32767", rows, columns));
  };
  const nlohmann::json& lines = json.array("permille");
  if (lines.size() != rows) bad();
  for (const nlohmann::json& line : lines) {
    if (!line.is_array() || line.size() != columns) bad();
    for (const nlohmann::json& value : line) {
      if (!value.is_number_integer() || value < INT16_MIN || value > INT16_MAX) bad();
      correction.permille.push_back(value.get<std::int16_t>());
    }
  }
  return correction;
}

std::map<std::string, Range> read_ranges(const JsonObject& json) {
  std::map<std::string, Range> ranges;
  if (!json.has("range")) return ranges;
  const JsonObject range = json.object("range");
  for (const auto& item : range.value().items()) {
    const nlohmann::json& pair = range.array(item.key());
    if (pair.size() != 2 || !pair[0].is_number() || !pair[1].is_number() || pair[0] > pair[1]) {
      range.reject(item.key(), "[least, most]");
    }
    ranges[item.key()] = {pair[0].get<double>(), pair[1].get<double>()};
  }
  return ranges;
}

Accuracy read_accuracy(const JsonObject& json) {
  require_known(json, {"rows", "median_ape", "p90_ape", "bias"});
  return {json.integer("rows", 0), json.number("median_ape", 0), json.number("p90_ape", 0),
          json.number("bias", -1)};
}

/// Whose kernel a curve of a calibration is of: one of engine_efficiency, own_kernel and taken_from, or none
/// in a profile of tables.
void read_origin(const JsonObject& json, Curve& curve) {
  const std::string_view said[] = {"engine_efficiency", "own_kernel", "taken_from"};
  const auto has = [&](std::string_view key) { return json.has(key); };
  if (std::count_if(std::begin(said), std::end(said), has) > 1) {
    json.reject(*std::find_if(std::begin(said), std::end(said), has),
                "one of engine_efficiency, own_kernel and taken_from");
  }
  if (json.has("taken_from")) {
    static_cast<void>(json.text("taken_from"));
    curve.origin = Origin::taken;
  }
  if (json.has("own_kernel")) {
    if (!json.flag("own_kernel")) json.reject("own_kernel", "true, or no such key");
    curve.origin = Origin::own_kernel;
  }
  if (json.has("engine_efficiency")) {
    const JsonObject of = json.object("engine_efficiency");
    require_known(of, {"factor", "spread", "anchors"});
    curve.origin = Origin::here;
    curve.efficiency = {of.number("factor", 0), of.number("spread", 0), of.integer("anchors", 1)};
    if (curve.efficiency.factor <= 0) of.reject("factor", "a number above 0");
  }
}

Curve read_curve(const JsonObject& json, std::string_view place, const std::string& pointer) {
  require_known(json, {"op", "dtype", "head_dim", "window", "gpus", "kernel", "rows", "range", "held_out",
                       "in_sample", "regimes", "correction", "families", "special", "bare",
                       "engine_efficiency", "own_kernel", "taken_from"});
  Curve curve;
  const std::string op = json.text("op");
  const auto* known =
      std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& each) { return each.second == op; });
  if (known == std::end(kOps)) {
    std::vector<std::string_view> names;
    for (const auto& each : kOps) names.push_back(each.second);
    json.reject("op", fmt::format("one of {}{}", fmt::join(names, ", "), did_you_mean(op, names)));
  }
  curve.op = known->first;
  curve.dtype = dtype_of(json.text("dtype"), json.at("dtype"));
  curve.head_dim = static_cast<std::int32_t>(json.integer_or("head_dim", 0, 1));
  curve.window = static_cast<std::int32_t>(json.integer_or("window", 0, 1));
  curve.gpus = static_cast<std::int32_t>(json.integer_or("gpus", 0, 2));
  curve.kernel = json.text_or("kernel", "");
  curve.rows = json.integer_or("rows", 0, 0);
  curve.range = read_ranges(json);
  curve.in_sample = json.has("in_sample");
  const std::string_view error_key = curve.in_sample ? "in_sample" : "held_out";
  if (json.has(error_key)) curve.error = read_accuracy(json.object(error_key));
  const nlohmann::json& regimes = json.array("regimes");
  if (regimes.empty()) json.reject("regimes", "at least one");
  for (std::size_t i = 0; i < regimes.size(); ++i) {
    const JsonObject regime(regimes[i], std::string(place), fmt::format("{}/regimes/{}", pointer, i));
    curve.regimes.push_back(read_regime(regime));
    const bool last = i + 1 == regimes.size();
    if (last == regime.has("upto") || (i > 0 && curve.regimes[i].upto <= curve.regimes[i - 1].upto)) {
      regime.reject("upto", "ascending bounds, and none on the last regime");
    }
  }
  curve.special = json.flag_or("special", false);
  curve.bare = json.flag_or("bare", false);
  read_origin(json, curve);
  if (json.has("families")) {
    for (const nlohmann::json& family : json.array("families")) {
      const bool numbers = family.is_array() && family.size() == 4 &&
                           std::all_of(family.begin(), family.end(),
                                       [](const nlohmann::json& v) { return v.is_number() && v > 0; });
      if (!numbers) json.reject("families", "[hidden, intermediate, experts, topk] of each");
      curve.families.push_back({family[0], family[1], family[2], family[3]});
    }
  }
  if (json.has("correction")) curve.correction = read_correction(json.object("correction"));
  return curve;
}

Device read_device(const JsonObject& json) {
  require_known(
      json, {"schema", "device", "driver", "runtime", "cublas", "compute_capability", "sms", "memory_bytes",
             "l2_bytes", "clock_mhz", "memory_clock_mhz", "power_limit_w", "date", "peaks", "status"});
  Device device;
  device.name = json.text("device");
  // Some write versions as numbers, some as text.
  const auto version = [&](std::string_view key) {
    const nlohmann::json* value = json.find(key);
    if (value == nullptr) return std::string();
    return value->is_string() ? value->get<std::string>() : value->dump();
  };
  device.driver = version("driver");
  device.runtime = version("runtime");
  device.cublas = version("cublas");
  device.date = json.text_or("date", "");
  device.status = json.text_or("status", "");
  const nlohmann::json* capability = json.find("compute_capability");
  if (capability != nullptr && capability->is_string()) {  // "9.0"
    for (const char c : capability->get<std::string>()) {
      if (c >= '0' && c <= '9') device.compute_capability = 10 * device.compute_capability + (c - '0');
    }
  } else {
    device.compute_capability = static_cast<std::int32_t>(json.integer_or("compute_capability", 0, 10));
  }
  device.sms = static_cast<std::int32_t>(json.integer_or("sms", 0, 1));
  device.memory_bytes = json.has("memory_bytes") ? json.integer("memory_bytes", 1, INT64_MAX) : 0;
  device.l2_bytes = json.has("l2_bytes") ? json.integer("l2_bytes", 0, INT64_MAX) : 0;
  device.clock_mhz = json.number_or("clock_mhz", 0, 0);
  device.memory_clock_mhz = json.number_or("memory_clock_mhz", 0, 0);
  device.power_limit_w = json.number_or("power_limit_w", 0, 0);
  if (json.has("peaks")) {
    const JsonObject peaks = json.object("peaks");
    require_known(peaks, {"copy_gb_s", "gemm_bf16_tflops", "gemm_fp8_tflops"});
    device.copy_gb_per_s = peaks.number_or("copy_gb_s", 0, 0);
    device.bf16_tflops = peaks.number_or("gemm_bf16_tflops", 0, 0);
    device.fp8_tflops = peaks.number_or("gemm_fp8_tflops", 0, 0);
  }
  return device;
}

std::filesystem::path profile_dir() {
  return data_dir() / "models" / "profiles";
}

}  // namespace

std::vector<std::string> profile_names() {
  std::vector<std::string> names;
  if (!std::filesystem::is_directory(profile_dir())) return names;
  for (const auto& entry : std::filesystem::directory_iterator(profile_dir())) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

std::filesystem::path profile_file(std::string_view name_or_path, std::string_view place) {
  std::filesystem::path file(name_or_path);
  if (file.extension() == ".json" || file == "-") return file;
  const std::vector<std::string> names = profile_names();
  std::string name(name_or_path);
  // As find_gpu: of several sizes of a GPU the bare name is the last, which is the largest.
  for (const std::string& each : names) {
    if (std::find(names.begin(), names.end(), name_or_path) != names.end()) break;
    if (each.starts_with(fmt::format("{}-", name_or_path))) name = each;
  }
  file = profile_dir() / fmt::format("{}.json", name);
  if (std::filesystem::exists(file)) return file;
  const std::vector<std::string_view> views(names.begin(), names.end());
  throw InputError(place,
                   fmt::format("no kernel profile '{}'{}: there are {}; a scenario's gpu_profile names "
                               "one, 'pdsim fit' makes one from tables",
                               name_or_path, did_you_mean(name_or_path, views), fmt::join(names, ", ")));
}

CopyCurve read_copy(const JsonObject& json) {
  require_known(json, {"kind", "rows", "range", "held_out", "launch_us", "run_ns", "gb_per_s", "sm_gb_per_s",
                       "overlap"});
  CopyCurve copy;
  copy.kind = json.text("kind");
  copy.rows = json.integer_or("rows", 0, 0);
  copy.range = read_ranges(json);
  if (json.has("held_out")) copy.error = read_accuracy(json.object("held_out"));
  copy.launch_ns = json.number_or("launch_us", 0, 0) * 1e3;
  copy.run_ns = json.number_or("run_ns", 0, 0);
  copy.bytes_per_ns = json.number("gb_per_s", 0);
  if (copy.bytes_per_ns <= 0) json.reject("gb_per_s", "a rate above 0");
  copy.sm_bytes_per_ns = json.number_or("sm_gb_per_s", 0, 0);
  copy.overlap = json.number_or("overlap", 0, 0);
  if (copy.overlap > 1) json.reject("overlap", "a number from 0 to 1");
  return copy;
}

Calibration read_calibration(const JsonObject& json) {
  require_known(json, {"device", "engine", "engine_sha256", "speed"});
  Calibration calibration;
  calibration.device = read_device(json.object("device"));
  calibration.engine = json.text_or("engine", "");
  calibration.engine_sha256 = json.text_or("engine_sha256", "");
  const JsonObject speed = json.object("speed");
  require_known(speed, {"compute", "memory", "compute_anchors", "memory_anchors"});
  calibration.speed = {speed.number("compute", 0), speed.number("memory", 0),
                       speed.integer("compute_anchors", 0), speed.integer("memory_anchors", 0)};
  for (const char* key : {"compute", "memory"}) {
    if (speed.number(key, 0) <= 0) speed.reject(key, "a number above 0");
  }
  return calibration;
}

void require_schema(const JsonObject& json) {
  if (json.text("schema") != kSchema) json.reject("schema", fmt::format("'{}'", kSchema));
}

Profile read_measured(const nlohmann::json& document, const std::string& where) {
  const JsonObject json(document, where);
  require_known(json, {"schema", "name", "gpu", "device", "software", "date", "source", "license", "errors",
                       "sms", "curves", "calibration", "copies"});
  require_schema(json);
  Profile profile;
  profile.sha256 = sha256_hex(document.dump());
  profile.name = json.text("name");
  profile.gpu = json.text("gpu");
  profile.device = json.text_or("device", "");
  profile.software = json.text_or("software", "");
  profile.date = json.text_or("date", "");
  profile.source = json.text_or("source", "");
  profile.license = json.text_or("license", "");
  profile.sms = static_cast<std::int32_t>(json.integer("sms", 1));
  const nlohmann::json& curves = json.array("curves");
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const std::string pointer = fmt::format("/curves/{}", i);
    profile.curves.push_back(read_curve(JsonObject(curves[i], where, pointer), where, pointer));
    const Curve& curve = profile.curves.back();
    if (curve.origin != Origin::tables && !json.has("calibration")) {
      throw InputError(where + ": " + pointer,
                       "is a calibration's curve; expected the profile to have a "
                       "'calibration' that says of which device");
    }
  }
  if (json.has("calibration")) profile.calibration = read_calibration(json.object("calibration"));
  if (json.has("copies")) {
    for (std::size_t i = 0; i < json.array("copies").size(); ++i) {
      profile.copies.push_back(read_copy(json.element("copies", i)));
    }
  }
  return profile;
}

/// What the scaling is worth, of each operation: the error of its curves.
void read_stated_error(const JsonObject& json, Profile& profile) {
  profile.stated_on = json.text("measured_between");
  for (const auto& item : json.value().items()) {
    if (item.key() == "measured_between") continue;
    std::vector<std::string_view> names;
    for (const auto& each : kOps) names.push_back(each.second);
    if (std::find(names.begin(), names.end(), item.key()) == names.end()) {
      throw InputError(json.at(item.key()),
                       fmt::format("is no operation{}: expected {}", did_you_mean(item.key(), names),
                                   fmt::join(names, ", ")));
    }
    const JsonObject error = json.object(item.key());
    require_known(error, {"rows", "median_ape", "p90_ape"});
    const Accuracy stated{error.integer("rows", 0), error.number("median_ape", 0), error.number("p90_ape", 0),
                          0};
    for (Curve& curve : profile.curves) {
      if (name(curve.op) == item.key()) curve.error = stated;
    }
  }
}

Profile read_datasheet(const nlohmann::json& document, const std::string& where) {
  const JsonObject json(document, where);
  require_known(json, {"schema", "name", "gpu", "scaled_from", "date", "source", "stated_error"});
  require_schema(json);
  const std::string from = json.text("scaled_from");
  const std::filesystem::path file = profile_file(from, json.at("scaled_from"));
  const nlohmann::json measured = read_json(file);
  if (measured.is_object() && measured.contains("scaled_from")) {
    json.reject("scaled_from", "a measured profile; this is a data-sheet one itself");
  }
  Profile base = read_measured(measured, file.string());
  const Gpu& base_gpu = find_gpu(base.gpu, file.string() + ": /gpu");
  const Gpu& gpu = find_gpu(json.text("gpu"), json.at("gpu"));
  const std::string digest = base.sha256;
  Profile profile = scale_profile(std::move(base), base_gpu, gpu);
  profile.scaled_from = from;
  profile.sha256 = sha256_hex(document.dump() + digest);
  profile.name = json.text("name");
  profile.date = json.text_or("date", "");
  profile.source = json.text_or("source", "");
  if (json.has("stated_error")) read_stated_error(json.object("stated_error"), profile);
  return profile;
}

}  // namespace

Device load_device(const std::filesystem::path& file) {
  const nlohmann::json document = read_json(file);
  return read_device(JsonObject(document, file.string()));
}

Profile load_profile(std::string_view name_or_path, std::string_view place) {
  const std::filesystem::path file = profile_file(name_or_path, place);
  // A study plans thousands of deployments on a few profiles of half a megabyte: what has been read stands as
  // long as the file has the same bytes.
  struct Known {
    std::string bytes;
    Remembered<Profile> profile;
  };
  static std::mutex mutex;
  static std::map<std::string, Known> known;
  std::ifstream stream(file, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find(file.string());
    if (found != known.end() && found->second.bytes == bytes) return found->second.profile.value();
  }
  const Remembered<Profile> profile([&] {
    const nlohmann::json document = read_json(file);
    const bool datasheet = document.is_object() && document.contains("scaled_from");
    return datasheet ? read_datasheet(document, file.string()) : read_measured(document, file.string());
  });
  if (profile.value().datasheet) return profile.value();  // its base may change by itself
  const std::lock_guard lock(mutex);
  known.insert_or_assign(file.string(), Known{std::move(bytes), profile});
  return profile.value();
}

// Writing ----------------------------------------------------------------------------------------------

namespace {

/// Four significant digits, as the shortest text that reads back the same.
double rounded(double value) {
  return std::strtod(fmt::format("{:.4g}", value).c_str(), nullptr);
}

nlohmann::ordered_json regime_json(const Coefficients& c) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (std::isfinite(c.upto)) json["upto"] = c.upto;
  if (c.tile_m > 0 || c.tile_n > 0) json["tile"] = {c.tile_m, c.tile_n};
  if (c.cluster > 1) json["cluster"] = c.cluster;
  const Coefficients absent;
  for (const Field& field : kFields) {
    const double value = rounded(c.*field.member / field.scale);
    if (value != rounded(absent.*field.member / field.scale)) json[std::string(field.key)] = value;
  }
  return json;
}

nlohmann::ordered_json accuracy_json(const Accuracy& error) {
  nlohmann::ordered_json json;
  json["rows"] = error.rows;
  json["median_ape"] = rounded(error.median_ape);
  json["p90_ape"] = rounded(error.p90_ape);
  json["bias"] = rounded(error.bias);
  return json;
}

nlohmann::ordered_json range_json(const std::map<std::string, Range>& ranges) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [axis, bounds] : ranges) json[axis] = {bounds.least, bounds.most};
  return json;
}

nlohmann::ordered_json device_json(const Device& device) {
  nlohmann::ordered_json json, peaks;
  json["device"] = device.name;
  const auto text = [&](const char* key, const std::string& value) {
    if (!value.empty()) json[key] = value;
  };
  const auto number = [](nlohmann::ordered_json& in, const char* key, auto value) {
    if (value != 0) in[key] = value;
  };
  text("driver", device.driver);
  text("runtime", device.runtime);
  text("cublas", device.cublas);
  number(json, "compute_capability", device.compute_capability);
  number(json, "sms", device.sms);
  number(json, "memory_bytes", device.memory_bytes);
  number(json, "l2_bytes", device.l2_bytes);
  number(json, "clock_mhz", device.clock_mhz);
  number(json, "memory_clock_mhz", device.memory_clock_mhz);
  number(json, "power_limit_w", device.power_limit_w);
  text("date", device.date);
  number(peaks, "copy_gb_s", device.copy_gb_per_s);
  number(peaks, "gemm_bf16_tflops", device.bf16_tflops);
  number(peaks, "gemm_fp8_tflops", device.fp8_tflops);
  if (!peaks.is_null()) json["peaks"] = peaks;
  text("status", device.status);
  return json;
}

nlohmann::ordered_json calibration_json(const Calibration& calibration) {
  nlohmann::ordered_json json;
  json["device"] = device_json(calibration.device);
  if (!calibration.engine.empty()) json["engine"] = calibration.engine;
  if (!calibration.engine_sha256.empty()) json["engine_sha256"] = calibration.engine_sha256;
  const DeviceSpeed& speed = calibration.speed;
  json["speed"] = {{"compute", rounded(speed.compute)},
                   {"memory", rounded(speed.memory)},
                   {"compute_anchors", speed.compute_anchors},
                   {"memory_anchors", speed.memory_anchors}};
  return json;
}

nlohmann::ordered_json copy_json(const CopyCurve& copy) {
  nlohmann::ordered_json json;
  json["kind"] = copy.kind;
  json["rows"] = copy.rows;
  json["range"] = range_json(copy.range);
  json["held_out"] = accuracy_json(copy.error);
  json["launch_us"] = rounded(copy.launch_ns / 1e3);
  json["run_ns"] = rounded(copy.run_ns);
  json["gb_per_s"] = rounded(copy.bytes_per_ns);
  if (copy.sm_bytes_per_ns > 0) json["sm_gb_per_s"] = rounded(copy.sm_bytes_per_ns);
  json["overlap"] = rounded(copy.overlap);
  return json;
}

nlohmann::ordered_json curve_json(const Curve& curve, const std::string& engine) {
  nlohmann::ordered_json json;
  json["op"] = name(curve.op);
  json["dtype"] = name(curve.dtype);
  if (curve.head_dim > 0) json["head_dim"] = curve.head_dim;
  if (curve.window > 0) json["window"] = curve.window;
  if (curve.gpus > 0) json["gpus"] = curve.gpus;
  if (curve.special) json["special"] = true;
  if (curve.bare) json["bare"] = true;
  if (curve.origin == Origin::here) {
    json["engine_efficiency"] = {{"factor", rounded(curve.efficiency.factor)},
                                 {"spread", rounded(curve.efficiency.spread)},
                                 {"anchors", curve.efficiency.anchors}};
  }
  if (curve.origin == Origin::own_kernel) json["own_kernel"] = true;
  if (curve.origin == Origin::taken) json["taken_from"] = engine;
  return json;
}

/// The axes on a line each, then the grid, a row of its last axis a line.
std::string correction_text(const Correction& correction) {
  if (correction.empty()) return "";
  std::string text = ",\n   \"correction\": {\"axes\": [";
  for (std::size_t a = 0; a < correction.axes.size(); ++a) {
    nlohmann::ordered_json axis;
    axis["name"] = correction.axes[a].name;
    for (const double node : correction.axes[a].nodes) {
      if (node == std::floor(node)) {
        axis["at"].push_back(static_cast<std::int64_t>(node));
      } else {
        axis["at"].push_back(node);
      }
    }
    text += (a > 0 ? ",\n    " : "\n    ") + axis.dump();
  }
  text += "],\n    \"permille\": [";
  const std::size_t columns = correction.axes.back().nodes.size();
  for (std::size_t i = 0; i < correction.permille.size(); i += columns) {
    text += fmt::format("{}[{}]", i > 0 ? ",\n" : "\n",
                        fmt::join(std::span(correction.permille).subspan(i, columns), ","));
  }
  return text + "]}";
}

}  // namespace

std::string to_json(const Profile& profile) {
  using Json = nlohmann::ordered_json;
  std::string text = "{\n";
  const auto field = [&](std::string_view key, const Json& value) {
    text += fmt::format(" \"{}\": {},\n", key, value.dump());
  };
  field("schema", kSchema);
  field("name", profile.name);
  field("gpu", profile.gpu);
  field("device", profile.device);
  field("software", profile.software);
  field("date", profile.date);
  field("source", profile.source);
  field("license", profile.license);
  field("errors", kErrors);
  field("sms", profile.sms);
  if (profile.calibration) field("calibration", calibration_json(*profile.calibration));
  if (!profile.copies.empty()) {
    text += " \"copies\": [";
    const char* comma = "\n  ";
    for (const CopyCurve& copy : profile.copies) {
      text += comma + copy_json(copy).dump();
      comma = ",\n  ";
    }
    text += "],\n";
  }
  text += " \"curves\": [";
  const char* between = "\n";
  for (const Curve& curve : profile.curves) {
    std::string head = curve_json(curve, profile.calibration ? profile.calibration->engine : "").dump();
    head.pop_back();  // its closing brace
    text += fmt::format("{}  {},\n   \"kernel\": {}, \"rows\": {},\n   \"range\": {},\n", between, head,
                        Json(curve.kernel).dump(), curve.rows, range_json(curve.range).dump());
    text += fmt::format("   \"{}\": {},\n   \"regimes\": [", curve.in_sample ? "in_sample" : "held_out",
                        accuracy_json(curve.error).dump());
    const char* comma = "\n";
    for (const Coefficients& regime : curve.regimes) {
      text += fmt::format("{}    {}", comma, regime_json(regime).dump());
      comma = ",\n";
    }
    text += "]";
    if (!curve.families.empty()) {
      Json families = Json::array();
      for (const MoeFamily& f : curve.families) {
        families.push_back({f.hidden, f.intermediate, f.experts, f.topk});
      }
      text += fmt::format(",\n   \"families\": {}", families.dump());
    }
    text += correction_text(curve.correction);
    text += "}";
    between = ",\n";
  }
  return text + "\n ]\n}\n";
}

}  // namespace pdsim
