#include "tools/study/space.hpp"

#include <fmt/format.h>
#include <muParser.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/core/math.hpp"
#include "sim/core/random.hpp"
#include "sim/core/sha256.hpp"
#include "tools/study/files.hpp"

namespace pdsim {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kSchema = "pdsim.sweep/1";
constexpr std::string_view kGenerate = "generate.";
constexpr std::size_t kChecked = 100;  // levels of a parameter that are read before any runs, evenly spread
constexpr double kTried = 16;          // combinations tried under constraints, in points allowed

// ---------------------------------------------------------------------------------- reading the file

// Calls `visit` on what names a file in a value of a scenario's `key`.
void for_files(json& value, std::string_view key, const std::function<void(json&)>& visit) {
  if (value.is_object()) {
    for (auto& [inner, item] : value.items()) for_files(item, inner, visit);
  } else if (value.is_array()) {
    for (json& item : value) for_files(item, "", visit);
  } else if (value.is_string()) {
    const auto text = value.get<std::string>();
    const bool may_be = key == "model" || key == "gpu_profile" || key == "overheads";
    const bool always = key == "profile" || key == "trace";
    if (text != "-" && (always || (may_be && text.ends_with(".json")))) visit(value);
  }
}

std::string last_step(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// Files that the sweep names are relative to it; --set, which the values go through, would look for them in
// the current folder.
std::string set_of(const std::string& path, json value, const std::string& folder) {
  for_files(value, last_step(path), [&](json& file) {
    file = (std::filesystem::path(folder) / file.get<std::string>()).lexically_normal().string();
  });
  return path + "=" + value.dump();
}

std::string path_of(const std::string& set) {
  return set.substr(0, set.find('='));
}

bool inside(std::string_view path, std::string_view outer) {
  return path.starts_with(outer) && (path.size() == outer.size() || path[outer.size()] == '.');
}

// ----------------------------------------------------------------------------------------- parameters

/// From one number to another; without levels of its own until a sample gives it some.
struct Range {
  double from = 0, to = 0;
  bool log = false, integer = false;

  double at(double share) const {
    if (share <= 0) return from;
    if (share >= 1) return to;
    if (!log) return from + (to - from) * share;
    return math::exp(math::log(from) + (math::log(to) - math::log(from)) * share);
  }
};

struct Axis {
  Parameter parameter;
  std::vector<std::string> paths;  ///< none for options, whose levels name them
  std::optional<Range> range;      ///< sampled
};

// A number as it is written with so many significant digits, without needless ones.
std::string number_text(double value, int digits) {
  const std::string rounded = fmt::format("{:.{}g}", value, digits);
  return fmt::format("{}", std::strtod(rounded.c_str(), nullptr));
}

std::string label_of(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_number_float() ? fmt::format("{}", value.get<double>()) : value.dump();
}

void check_path(const std::string& path, const std::string& place) {
  const bool whole = !path.empty() && path.front() != '.' && path.back() != '.' &&
                     path.find("..") == std::string::npos && path.find('=') == std::string::npos;
  if (!whole) {
    throw InputError(place, fmt::format("'{}' is no path, expected one such as transfer.mode, or {}rate",
                                        path, kGenerate));
  }
}

void add_level(Axis& axis, const std::string& label, const json& value, const std::string& folder) {
  axis.parameter.labels.push_back(label);
  std::vector<std::string>& sets = axis.parameter.sets.emplace_back();
  for (const std::string& path : axis.paths) sets.push_back(set_of(path, value, folder));
}

void read_values(const json& values, Axis& axis, const std::string& place, const std::string& folder) {
  if (values.empty()) throw InputError(place, "has no level, expected at least one value");
  axis.parameter.numeric = true;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const json& value = values[i];
    if (!value.is_number() && !value.is_string() && !value.is_boolean()) {
      throw InputError(fmt::format("{}/{}", place, i),
                       fmt::format("is {}, expected a number, a word, true or false; \"options\" set more "
                                   "than that",
                                   value.dump()));
    }
    const std::string label = label_of(value);
    if (label.empty()) throw InputError(fmt::format("{}/{}", place, i), "is empty, expected a word");
    if (!seen.insert(label).second) {
      throw InputError(fmt::format("{}/{}", place, i),
                       fmt::format("{} is given twice, expected once", label));
    }
    axis.parameter.numeric = axis.parameter.numeric && value.is_number();
    add_level(axis, label, value, folder);
  }
}

void read_options(const JsonObject& in, const ordered_json& ordered, Axis& axis, const std::string& folder) {
  const JsonObject options = in.object("options");
  if (options.value().empty()) in.reject("options", "at least one name and what it sets");
  for (const auto& [name, sets] : ordered["options"].items()) {
    if (name.empty()) throw InputError(options.at(name), "has no name, expected one");
    const JsonObject option = options.object(name);
    axis.parameter.labels.push_back(name);
    std::vector<std::string>& level = axis.parameter.sets.emplace_back();
    for (const auto& [path, value] : sets.items()) {
      check_path(path, options.at(name));
      level.push_back(set_of(path, json(value), folder));
    }
  }
}

// Levels at even distances, on a logarithmic scale where asked; what rounding makes equal is one level.
void read_steps(Axis& axis, std::int64_t steps, const std::string& folder) {
  const Range& range = *axis.range;
  for (std::int64_t i = 0; i < steps; ++i) {
    const double value = range.at(static_cast<double>(i) / static_cast<double>(steps - 1));
    const std::string label =
        range.integer ? fmt::format("{:.0f}", std::round(value)) : number_text(value, 6);
    if (!axis.parameter.labels.empty() && axis.parameter.labels.back() == label) continue;
    add_level(axis, label, json::parse(label), folder);
  }
  axis.range.reset();
}

void read_range(const JsonObject& in, Axis& axis, bool sampled, std::uint64_t most,
                const std::string& folder) {
  Range range;
  range.from = in.number("from", -HUGE_VAL);
  range.to = in.number("to", -HUGE_VAL);
  range.integer = in.flag_or("integer", false);
  const std::string scale = in.text_or("scale", "linear");
  if (scale != "linear" && scale != "log") in.reject("scale", "linear or log");
  range.log = scale == "log";
  for (const char* end : {"from", "to"}) {
    const double value = in.number(end, -HUGE_VAL);
    if (range.log && value <= 0) in.reject(end, "a number above 0: the scale is logarithmic");
    if (range.integer && (std::abs(value) > 0x1p53 || value != std::round(value))) {
      in.reject(end, "an integer, as \"integer\" says");
    }
  }
  if (range.from == range.to) in.reject("to", "another number than \"from\"");
  axis.range = range;
  axis.parameter.numeric = true;
  if (in.has("steps")) {
    read_steps(axis, in.integer("steps", 2, static_cast<std::int64_t>(most)), folder);
  } else if (!sampled) {
    in.reject("steps", "how many levels, 2 or more; only a Latin hypercube does without");
  }
}

void check_name(const std::string& name, const JsonObject& parameters) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  const bool good = !name.empty() && letter(name.front()) && std::ranges::all_of(name, [&](char c) {
    return letter(c) || (c >= '0' && c <= '9') || c == '.' || c == '-';
  });
  if (!good) {
    throw InputError(parameters.at(name),
                     "expected a name of letters, digits, '_', '.' and '-', a letter first");
  }
}

Axis read_axis(const JsonObject& parameters, const std::string& name, const ordered_json& ordered,
               bool sampled, std::uint64_t most, const std::string& folder) {
  check_name(name, parameters);
  Axis axis;
  axis.parameter.name = name;
  const json* list = parameters.find(name);
  if (list != nullptr && list->is_array()) {
    axis.paths = {name};
    check_path(name, parameters.at(name));
    read_values(*list, axis, parameters.at(name), folder);
    return axis;
  }
  if (list == nullptr || !list->is_object()) {
    parameters.reject(name,
                      "a list of values, or an object with \"values\", \"from\" and \"to\", or \"options\"");
  }
  const JsonObject in = parameters.object(name);
  if (in.has("options")) {
    in.refuse_unknown({"options", "note"});
    read_options(in, ordered, axis, folder);
    return axis;
  }
  in.refuse_unknown(
      {"path", "paths", "values", "from", "to", "steps", "scale", "integer", "options", "note"});
  if (in.has("path") && in.has("paths")) in.reject("path", "either \"path\" or \"paths\"");
  if (in.has("paths")) {
    for (const json& path : in.array("paths")) {
      if (!path.is_string()) in.reject("paths", "dotted paths into the scenario");
      axis.paths.push_back(path.get<std::string>());
    }
    if (axis.paths.empty()) in.reject("paths", "at least one dotted path into the scenario");
  } else {
    axis.paths = {in.text_or("path", name)};
  }
  for (const std::string& path : axis.paths) {
    const std::string place = in.has("paths")  ? in.at("paths")
                              : in.has("path") ? in.at("path")
                                               : parameters.at(name);
    check_path(path, place);
    if (std::ranges::count(axis.paths, path) > 1) {
      throw InputError(place, fmt::format("'{}' is given twice, expected once", path));
    }
  }
  if (!in.has("values")) {
    if (!in.has("from") && !in.has("to")) {
      throw InputError(parameters.at(name),
                       "has no levels, expected \"values\", \"from\" and \"to\", or \"options\"");
    }
    read_range(in, axis, sampled, most, folder);
    return axis;
  }
  for (const char* other : {"from", "to", "steps", "scale", "integer"}) {
    if (in.has(other)) in.reject(other, "none beside \"values\"");
  }
  read_values(in.array("values"), axis, in.at("values"), folder);
  return axis;
}

std::set<std::string> paths_of(const Parameter& parameter) {
  std::set<std::string> paths;
  for (const std::vector<std::string>& level : parameter.sets) {
    for (const std::string& set : level) paths.insert(path_of(set));
  }
  return paths;
}

// A later parameter would undo what an earlier one has set.
void check_overlaps(const std::vector<Parameter>& parameters, const std::string& file) {
  std::vector<std::set<std::string>> paths;
  for (const Parameter& parameter : parameters) {
    const std::string place = fmt::format("{}: /parameters/{}", file, parameter.name);
    paths.push_back(paths_of(parameter));
    for (std::size_t other = 0; other + 1 < paths.size(); ++other) {
      for (const std::string& path : paths.back()) {
        for (const std::string& earlier : paths[other]) {
          if (!inside(earlier, path)) continue;
          const std::string& by = parameters[other].name;
          throw InputError(place,
                           path == earlier
                               ? fmt::format("sets {}, as '{}' does, expected different paths", path, by)
                               : fmt::format("sets {}, and with it {} of '{}' before it: expected '{}' "
                                             "first",
                                             path, earlier, by, parameter.name));
        }
      }
    }
  }
}

// What is set for all points and then by every level of a parameter has no effect.
void check_useless(const std::vector<Parameter>& parameters, std::string_view path,
                   const std::string& place) {
  for (const Parameter& parameter : parameters) {
    const bool always = std::ranges::all_of(parameter.sets, [&](const std::vector<std::string>& level) {
      return std::ranges::any_of(level, [&](const std::string& set) { return inside(path, path_of(set)); });
    });
    if (always && !parameter.sets.empty()) {
      throw InputError(place, fmt::format("sets {}, which the parameter '{}' varies, expected one of the two",
                                          path, parameter.name));
    }
  }
}

// ---------------------------------------------------------------------------------------- constraints

/// Conditions between parameters, as text over their names.
class Constraints {
 public:
  Constraints(const JsonObject& root, const std::vector<Parameter>& parameters);

  bool empty() const { return parsers_.empty(); }
  /// Whether all hold at these levels. InputError for one that has no truth there.
  bool admit(const std::vector<std::uint32_t>& levels);

 private:
  static constexpr std::string_view kFunctions[] = {"min", "max",  "abs",   "sqrt", "exp",
                                                    "ln",  "log2", "log10", "rint", "sign"};
  static double negation(double x) { return x == 0 ? 1 : 0; }

  double word(const std::string& text);
  std::string translated(const std::string& text, const std::string& place);
  std::string variable(std::size_t parameter) const;
  [[noreturn]] void not_understood(std::size_t constraint, std::string reason) const;

  const std::vector<Parameter>& parameters_;
  std::vector<std::string> words_;
  std::vector<std::vector<double>> numbers_;  ///< by parameter and level
  std::vector<double> values_;                ///< by parameter, at the levels in question
  std::vector<std::string> texts_, places_;
  std::vector<std::unique_ptr<mu::Parser>> parsers_;
};

// What a level is worth in a constraint: a number itself, true and false 1 and 0, a word a number of its own.
double Constraints::word(const std::string& text) {
  if (text == "true" || text == "false") return text == "true" ? 1 : 0;
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0' && std::isfinite(number)) return number;
  const auto found = std::ranges::find(words_, text);
  const auto index = found - words_.begin();
  if (found == words_.end()) words_.push_back(text);
  return -0x1p52 - static_cast<double>(index);  // below all that a scenario holds
}

std::string Constraints::variable(std::size_t parameter) const {
  std::string name = parameters_[parameter].name;
  std::ranges::replace(name, '-', '_');
  for (std::size_t other = 0; other < parameter; ++other) {
    if (variable(other) == name) name += "_";
  }
  return std::ranges::find(kFunctions, name) == std::end(kFunctions) ? name : name + "_";
}

void Constraints::not_understood(std::size_t constraint, std::string reason) const {
  for (const std::string_view tail : {" found at position", " at position"}) {
    reason = reason.substr(0, reason.find(tail));  // of the translated text
  }
  throw InputError(places_[constraint],
                   fmt::format("'{}' is not understood: {}; expected a condition such as \"a + b == 16\" or "
                               "\"mode == 'push' || threshold < 512\"",
                               texts_[constraint], reason));
}

// Names become muParser's variables and words in quotes numbers.
std::string Constraints::translated(const std::string& text, const std::string& place) {
  const auto in_name = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
  };
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '\'' || c == '"') {
      const std::size_t end = text.find(c, i + 1);
      if (end == std::string::npos) {
        throw InputError(place, fmt::format("'{}' has a quote that does not end, expected {}", text, c));
      }
      const std::string quoted = text.substr(i + 1, end - i - 1);
      std::vector<std::string_view> labels;
      for (const Parameter& parameter : parameters_) {
        labels.insert(labels.end(), parameter.labels.begin(), parameter.labels.end());
      }
      if (std::ranges::find(labels, quoted) == labels.end()) {
        throw InputError(place, fmt::format("no parameter has the level '{}'{}, expected one that does",
                                            quoted, did_you_mean(quoted, labels)));
      }
      out += fmt::format("({:.0f})", word(quoted));
      i = end + 1;
      continue;
    }
    if (std::string_view("=!<>").find(c) != std::string_view::npos) {
      const bool with_equals = i + 1 < text.size() && text[i + 1] == '=';
      if (c == '=' && !with_equals) {
        throw InputError(place, fmt::format("'{}' has a single '=', expected '=='", text));
      }
      out += text.substr(i, with_equals ? 2 : 1);
      i += with_equals ? 2 : 1;
      continue;
    }
    if ((c >= '0' && c <= '9') || c == '.') {
      char* end = nullptr;
      std::strtod(text.c_str() + i, &end);
      const std::size_t length = std::max<std::size_t>(1, static_cast<std::size_t>(end - (text.c_str() + i)));
      out += text.substr(i, length);
      i += length;
      continue;
    }
    if (!in_name(c)) {
      out += c;
      ++i;
      continue;
    }
    std::optional<std::size_t> parameter;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const std::string& name = parameters_[p].name;
      const std::size_t end = i + name.size();
      if (text.compare(i, name.size(), name) == 0 && (end == text.size() || !in_name(text[end])) &&
          (!parameter || name.size() > parameters_[*parameter].name.size())) {
        parameter = p;
      }
    }
    std::size_t end = i;
    while (end < text.size() && in_name(text[end])) ++end;
    const std::string name = text.substr(i, end - i);
    const std::size_t next = text.find_first_not_of(' ', end);
    const bool called = next != std::string::npos && text[next] == '(';
    if (parameter) {
      out += variable(*parameter);
      i += parameters_[*parameter].name.size();
      continue;
    }
    if (name == "true" || name == "false") {
      out += name == "true" ? "1" : "0";
    } else if (called && std::ranges::find(kFunctions, name) != std::end(kFunctions)) {
      out += name;
    } else {
      std::vector<std::string_view> names, labels;
      for (const Parameter& known : parameters_) {
        names.push_back(known.name);
        labels.insert(labels.end(), known.labels.begin(), known.labels.end());
      }
      const bool label = std::ranges::find(labels, name) != labels.end();
      throw InputError(place, fmt::format("there is no parameter '{}'{}, expected one of {}", name,
                                          label ? fmt::format(" (a level is written '{}' in quotes)", name)
                                                : did_you_mean(name, names),
                                          fmt::join(names, ", ")));
    }
    i = end;
  }
  return out;
}

Constraints::Constraints(const JsonObject& root, const std::vector<Parameter>& parameters)
    : parameters_(parameters), values_(parameters.size()) {
  if (!root.has("constraints")) return;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    std::vector<double>& numbers = numbers_.emplace_back();
    for (const std::string& label : parameters[p].labels) numbers.push_back(word(label));
    values_[p] = numbers.empty() ? 0 : numbers[0];
  }
  for (const json& text : root.array("constraints")) {
    const std::size_t i = texts_.size();
    places_.push_back(fmt::format("{}/{}", root.at("constraints"), i));
    if (!text.is_string()) {
      throw InputError(places_[i], fmt::format("is {}, expected a condition in quotes", text.dump()));
    }
    texts_.push_back(text.get<std::string>());
    auto parser = std::make_unique<mu::Parser>();
    try {
      parser->DefineNameChars("0123456789_.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
      parser->DefineInfixOprt("!", negation);
      for (std::size_t p = 0; p < parameters.size(); ++p) parser->DefineVar(variable(p), &values_[p]);
      parser->SetExpr(translated(texts_[i], places_[i]));
      parser->Eval();
      if (parser->GetNumResults() != 1) not_understood(i, "it is several expressions, joined by commas");
    } catch (const mu::Parser::exception_type& error) {
      not_understood(i, error.GetMsg());
    }
    parsers_.push_back(std::move(parser));
  }
}

bool Constraints::admit(const std::vector<std::uint32_t>& levels) {
  if (empty()) return true;
  for (std::size_t p = 0; p < levels.size(); ++p) values_[p] = numbers_[p][levels[p]];
  for (std::size_t i = 0; i < parsers_.size(); ++i) {
    const double result = parsers_[i]->Eval();
    if (result == 1) continue;
    if (result == 0) return false;
    std::vector<std::string> at;
    for (std::size_t p = 0; p < levels.size(); ++p) {
      at.push_back(fmt::format("{} {}", parameters_[p].name, parameters_[p].labels[levels[p]]));
    }
    throw InputError(places_[i], fmt::format("'{}' is {} at {}, expected a condition, which is true or false",
                                             texts_[i], number_text(result, 6), fmt::join(at, ", ")));
  }
  return true;
}

// --------------------------------------------------------------------------------------------- points

std::string how_many(double n) {
  return n < 1e15 ? fmt::format("{:.0f}", n) : fmt::format("{:.1e}", n);
}

void make_grid(Space& space, Constraints& constraints, std::uint64_t most, const std::string& place) {
  double combinations = 1;
  std::vector<std::string> factors;
  for (const Parameter& parameter : space.parameters) {
    combinations *= static_cast<double>(parameter.labels.size());
    factors.push_back(std::to_string(parameter.labels.size()));
  }
  const double allowed = static_cast<double>(most) * (constraints.empty() ? 1 : kTried);
  if (combinations > allowed) {
    throw InputError(place,
                     fmt::format("make a grid of {} = {} combinations, expected at most {}: fewer steps, or "
                                 "\"sample\": {{\"method\": \"latin_hypercube\", \"points\": N}}",
                                 fmt::join(factors, " x "), how_many(combinations), how_many(allowed)));
  }
  std::vector<std::uint32_t> levels(space.parameters.size(), 0);
  for (bool more = true; more;) {
    if (!constraints.admit(levels)) {
      ++space.excluded;
    } else if (space.points.size() == most) {
      throw InputError(place, fmt::format("make more than {} points, expected at most that: fewer steps, or "
                                          "\"sample\": {{\"method\": \"latin_hypercube\", \"points\": N}}",
                                          most));
    } else {
      space.points.push_back({space.points.size(), levels});
    }
    more = false;
    for (std::size_t p = levels.size(); p-- > 0 && !more;) {  // the last parameter varies fastest
      more = ++levels[p] < space.parameters[p].labels.size();
      if (!more) levels[p] = 0;
    }
  }
}

// One value in each of `n` equal parts of the range, with as few digits as keep it there.
std::vector<std::string> stratified(const Range& range, std::uint64_t n, Random& random) {
  std::vector<std::string> labels;
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto share = [&](double within) {
      return (static_cast<double>(i) + within) / static_cast<double>(n);
    };
    const double value = range.at(share(random.uniform()));
    if (range.integer) {
      labels.push_back(fmt::format("{:.0f}", std::round(value)));
      continue;
    }
    const auto [low, high] = std::minmax({range.at(share(0)), range.at(share(1))});
    std::string label;
    for (int digits = 6; digits <= 17; ++digits) {
      label = number_text(value, digits);
      const double rounded = std::strtod(label.c_str(), nullptr);
      if (rounded > low && rounded < high) break;
    }
    labels.push_back(label);
  }
  return labels;
}

struct Sample {
  bool latin = false;
  std::uint64_t points = 0, seed = 1;
};

Sample read_sample(const JsonObject& root, std::uint64_t most) {
  Sample sample;
  if (!root.has("sample")) return sample;
  const JsonObject in = root.object("sample");
  const std::string method = in.text_or("method", "grid");
  if (method == "grid") {
    in.refuse_unknown({"method"});
    return sample;
  }
  if (method != "latin_hypercube") in.reject("method", "grid or latin_hypercube");
  in.refuse_unknown({"method", "points", "seed"});
  sample.latin = true;
  sample.points = static_cast<std::uint64_t>(in.integer("points", 1, static_cast<std::int64_t>(most)));
  sample.seed = static_cast<std::uint64_t>(in.integer_or("seed", 1, 0));
  return sample;
}

// McKay, Beckman and Conover (1979): each axis in as many equal parts as there are points, one point in
// each, the parts of different axes joined at random. Contrasted parameters are crossed with the sample:
// their levels are to be compared with all else equal.
void make_latin(Space& space, Constraints& constraints, const Sample& sample,
                const std::vector<std::vector<std::uint32_t>>& chosen, std::uint64_t most,
                const std::string& place) {
  std::vector<std::size_t> crossed;
  double points = static_cast<double>(sample.points);
  for (std::size_t p = 0; p < chosen.size(); ++p) {
    if (!chosen[p].empty()) continue;
    crossed.push_back(p);
    points *= static_cast<double>(space.parameters[p].labels.size());
  }
  if (points > static_cast<double>(most)) {
    throw InputError(place,
                     fmt::format("is {}, with the contrasted parameters' levels {} points, expected at "
                                 "most {}",
                                 sample.points, how_many(points), most));
  }
  std::set<std::vector<std::uint32_t>> seen;
  for (std::uint64_t i = 0; i < sample.points; ++i) {
    std::vector<std::uint32_t> levels(chosen.size(), 0);
    for (std::size_t p = 0; p < chosen.size(); ++p) {
      if (!chosen[p].empty()) levels[p] = chosen[p][i];
    }
    for (bool more = true; more;) {
      if (!constraints.admit(levels)) {
        ++space.excluded;
      } else if (!seen.insert(levels).second) {
        ++space.repeated;
      } else {
        space.points.push_back({space.points.size(), levels});
      }
      more = false;
      for (std::size_t k = crossed.size(); k-- > 0 && !more;) {
        const std::size_t p = crossed[k];
        more = ++levels[p] < space.parameters[p].labels.size();
        if (!more) levels[p] = 0;
      }
    }
  }
}

// By axis, the level of each point of the sample; none for a contrasted parameter. Gives ranges their levels.
std::vector<std::vector<std::uint32_t>> choose_latin(std::vector<Axis>& axes, const Sample& sample,
                                                     const std::vector<Contrast>& contrasts,
                                                     const std::string& folder) {
  std::vector<std::vector<std::uint32_t>> chosen(axes.size());
  for (std::size_t p = 0; p < axes.size(); ++p) {
    Axis& axis = axes[p];
    Random random(sample.seed, Purpose::sampling, p);
    if (std::ranges::any_of(contrasts, [&](const Contrast& c) { return c.parameter == p; })) continue;
    std::vector<std::uint32_t> level_of(sample.points);  // by part
    if (axis.range) {
      for (std::uint64_t i = 0; const std::string& label : stratified(*axis.range, sample.points, random)) {
        std::vector<std::string>& labels = axis.parameter.labels;
        if (labels.empty() || labels.back() != label) add_level(axis, label, json::parse(label), folder);
        level_of[i++] = static_cast<std::uint32_t>(labels.size() - 1);
      }
      axis.range.reset();
    } else {
      const std::uint64_t levels = axis.parameter.labels.size();
      for (std::uint64_t i = 0; i < sample.points; ++i) {
        level_of[i] = static_cast<std::uint32_t>(i * levels / sample.points);
      }
    }
    for (std::uint64_t i = sample.points; i-- > 1;) std::swap(level_of[i], level_of[random.below(i + 1)]);
    chosen[p] = std::move(level_of);
  }
  return chosen;
}

// --------------------------------------------------------------------------------------------- checks

// A trace's knobs with "generate.x=..." applied. InputError at `place` for what cannot be.
std::string generate_with(const std::string& generate, const std::vector<std::string>& sets,
                          const std::string& place) {
  json knobs = json::parse(generate);
  for (const std::string& set : sets) {
    const std::string path = path_of(set);
    std::string pointer = fmt::format("/{}", path.substr(kGenerate.size()));
    std::ranges::replace(pointer, '.', '/');
    try {
      knobs[json::json_pointer(pointer)] = json::parse(set.substr(path.size() + 1));
    } catch (const json::exception&) {
      throw InputError(place, fmt::format("there is no {}, expected a knob of `pdsim trace generate`", path));
    }
  }
  return knobs.dump();
}

bool generates(const std::string& set) {
  return set.starts_with(kGenerate);
}

// The base with more set, as a point has it. InputError for a knob that there is not.
RunSpec with_sets(const RunSpec& base, const std::vector<std::string>& sets, const std::string& place) {
  RunSpec spec = base;
  std::vector<std::string> knobs;
  for (const std::string& set : sets) (generates(set) ? knobs : spec.options.sets).push_back(set);
  if (!knobs.empty()) spec.generate = generate_with(spec.generate, knobs, place);
  return spec;
}

/// Levels that are set together: (parameter, level), by parameter.
using Company = std::vector<std::pair<std::size_t, std::size_t>>;

// Alone, and in the company in which a value may make sense: a level of one parameter, alone or with the
// first levels of all the rest.
std::vector<Company> companies(const std::vector<Parameter>& parameters) {
  std::vector<Company> out(1);
  Company first;
  for (std::size_t p = 0; p < parameters.size(); ++p) first.emplace_back(p, 0);
  out.push_back(first);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const std::size_t levels = std::min(parameters[p].labels.size(), kChecked);
    for (std::size_t level = 0; level < levels; ++level) {
      out.push_back({{p, level}});
      out.push_back(first);
      out.back()[p].second = level;
    }
  }
  return out;
}

/// Whether values can be read at all, in any company, before anything runs.
class ValueCheck {
 public:
  explicit ValueCheck(const std::vector<Parameter>& parameters)
      : parameters_(parameters), companies_(companies(parameters)) {}

  /// Why `base` cannot be read with this level (none: as it is), where there is no company in which it can:
  /// in that which served last.
  std::optional<InputError> refusal(const RunSpec& base, const Company& level = {}) {
    std::optional<InputError> first;
    for (std::size_t i = 0; i < companies_.size(); ++i) {
      const std::optional<InputError> refused = refusal_in(base, companies_[i], level);
      if (!refused) {
        std::swap(companies_[0], companies_[i]);
        return std::nullopt;
      }
      if (!first) first = refused;
    }
    return first;
  }

 private:
  std::optional<InputError> refusal_in(const RunSpec& base, Company company, const Company& level) const {
    for (const auto& own : level) {
      std::erase_if(company, [&](const auto& other) { return other.first == own.first; });
      company.push_back(own);
    }
    std::ranges::sort(company);
    std::vector<std::string> sets = base.options.sets;
    for (const auto& [parameter, at] : company) {
      for (const std::string& set : parameters_[parameter].sets[at]) {
        if (!generates(set)) sets.push_back(set);
      }
    }
    Overrides overrides = overrides_of(base.options);
    if (!base.generate.empty()) {
      overrides.trace = "generated";
      overrides.format = "mooncake";
    }
    try {
      check_values(base.text, base.file, base.folder, sets, overrides);
      return std::nullopt;
    } catch (const InputError& error) {
      return error;
    }
  }

  const std::vector<Parameter>& parameters_;
  std::vector<Company> companies_;
};

// The place says already where it was set.
std::string without_option(std::string text) {
  constexpr std::string_view kSet = "--set: ";
  return text.starts_with(kSet) ? text.substr(kSet.size()) : text;
}

// `of_file`: how many of the base's sets the sweep file has itself.
void check_base(const RunSpec& base, std::size_t of_file, ValueCheck& check, const std::string& set_place) {
  const std::optional<InputError> refused = check.refusal(base);
  if (!refused) return;
  RunSpec without = base;
  without.options.sets.resize(of_file);
  if (!check.refusal(without)) throw InputError(*refused);
  without.options.sets.clear();
  const std::optional<InputError> bare = check.refusal(without);
  if (bare) throw InputError(*bare);
  throw InputError(set_place, without_option(refused->what()));
}

void check_levels(const Space& space, ValueCheck& check) {
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const Parameter& parameter = space.parameters[p];
    const std::size_t levels = parameter.labels.size();
    const std::size_t looked_at = std::min(levels, kChecked);
    for (std::size_t i = 0; i < looked_at; ++i) {
      const std::size_t level = looked_at == 1 ? 0 : i * (levels - 1) / (looked_at - 1);
      const std::string place = fmt::format("{}: /parameters/{}", space.file, parameter.name);
      const auto refuse = [&](const std::string& text) {
        throw InputError(place, fmt::format("at {}: {}", parameter.labels[level], without_option(text)));
      };
      const std::vector<std::string>& sets = parameter.sets[level];
      if (std::ranges::any_of(sets, generates)) {
        const json knobs = json::parse(with_sets(space.base, sets, place).generate);
        try {
          read_generate(JsonObject(knobs, "generate"));
        } catch (const InputError& error) {
          refuse(error.what());
        }
      }
      if (std::ranges::all_of(sets, generates)) continue;
      if (const auto refused = check.refusal(space.base, {{p, level}})) refuse(refused->what());
    }
  }
}

// Options that come after everything else would undo what a parameter sets.
void check_trace_options(const Space& space, const ReplayOptions& options) {
  const bool generated = !space.base.generate.empty();
  if (generated && !(options.trace.empty() && options.format.empty())) {
    throw InputError(options.trace.empty() ? "--format" : "--trace",
                     "is given, but this sweep generates its traces; expected none");
  }
  for (const Parameter& parameter : space.parameters) {
    for (const std::string& path : paths_of(parameter)) {
      const bool requests =
          path == "workload" || inside(path, "workload.trace") || inside(path, "workload.synthetic");
      if (requests && generated) {
        throw InputError(
            fmt::format("{}: /parameters/{}", space.file, parameter.name),
            fmt::format("sets {}, expected nothing of it: this sweep generates its traces", path));
      }
      const auto option = (requests && !options.trace.empty())                            ? "--trace"
                          : (path == "workload.format" && !options.format.empty())        ? "--format"
                          : (path == "workload.infer_sessions" && options.infer_sessions) ? "--infer-sessions"
                                                                                          : nullptr;
      if (option == nullptr) continue;
      throw InputError(option, fmt::format("sets what the parameter '{}' varies, expected one of the two",
                                           parameter.name));
    }
  }
}

// ------------------------------------------------------------------------------------------- identity

// What a path stands for: its bytes, wherever they lie.
std::string identity_of(const std::string& path) {
  const std::string digest = digest_of(path);
  return digest.empty() ? std::filesystem::path(path).filename().string() : "sha256:" + digest;
}

void identify_files(json& value) {
  if (value.is_structured()) {
    for (json& item : value) identify_files(item);
  } else if (value.is_string() && value.get<std::string>().starts_with('/')) {
    value = identity_of(value.get<std::string>());
  }
}

std::string identity_of(const Space& space, const ordered_json& root, const ReplayOptions& options) {
  json parts = {{"schema", kSchema}};
  parts["parameters"] = root["parameters"].dump();  // in their order
  for (const char* key : {"constraints", "sample", "set", "generate"}) {
    if (root.contains(key)) parts[key] = json(root[key]);
  }
  for (const Contrast& contrast : space.contrasts) {  // crossed with a sample
    if (space.sampled) parts["crossed"].push_back(contrast.parameter);
  }
  for (const Parameter& parameter : space.parameters) {
    for (const std::vector<std::string>& level : parameter.sets) {
      for (const std::string& set : level) {
        const std::string path = path_of(set), text = set.substr(path.size() + 1);
        if (std::string_view("\"[{").find(text.front()) == std::string_view::npos) continue;
        json value = json::parse(text);
        for_files(value, last_step(path),
                  [&](const json& file) { parts["files"].push_back(identity_of(file.get<std::string>())); });
      }
    }
  }
  parts["options"] = options.sets;
  if (options.seed) parts["seed"] = *options.seed;
  if (!options.prices.empty()) parts["prices"] = identity_of(options.prices);
  if (!options.trace.empty()) parts["trace"] = identity_of(options.trace);
  parts["format"] = options.format;
  parts["infer_sessions"] = options.infer_sessions;
  try {
    json in_force = json::parse(load_run(space.base).in_force);
    if (!space.base.generate.empty()) in_force["workload"].erase("trace");
    identify_files(in_force);
    parts["scenario"] = in_force;
  } catch (const InputError&) {  // it takes a parameter to be whole
    json scenario = json::parse(space.base.text, nullptr, true, true);
    for_files(scenario, "", [&](json& file) {
      file = identity_of((std::filesystem::path(space.base.folder) / file.get<std::string>()).string());
    });
    parts["scenario"] = scenario;
  }
  return sha256_hex(parts.dump());
}

std::vector<Contrast> read_contrasts(const JsonObject& root, const std::vector<Axis>& axes,
                                     const std::vector<Objective>& objectives) {
  std::vector<Contrast> contrasts;
  if (!root.has("contrasts")) return contrasts;
  for (std::size_t i = 0; i < root.array("contrasts").size(); ++i) {
    const JsonObject in = root.element("contrasts", i);
    in.refuse_unknown({"parameter", "objective"});
    const std::string name = in.text("parameter");
    const auto found = std::ranges::find(axes, name, [](const Axis& axis) { return axis.parameter.name; });
    if (found == axes.end()) {
      std::vector<std::string_view> names;
      for (const Axis& axis : axes) names.push_back(axis.parameter.name);
      throw InputError(in.at("parameter"),
                       fmt::format("there is no parameter '{}'{}, expected one of {}", name,
                                   did_you_mean(name, names), fmt::join(names, ", ")));
    }
    if (found->range) in.reject("parameter", "one that has levels: its range has no \"steps\"");
    if (found->parameter.labels.size() < 2) in.reject("parameter", "one with two levels at least");
    Contrast contrast;
    contrast.parameter = static_cast<std::uint32_t>(found - axes.begin());
    contrast.objective =
        in.has("objective") ? find_objective(in.text("objective"), in.at("objective")) : objectives.front();
    contrasts.push_back(contrast);
  }
  return contrasts;
}

std::vector<Objective> read_objectives(const JsonObject& root) {
  std::vector<Objective> objectives;
  if (!root.has("objectives")) {
    for (const char* name : {"usd_per_request_in_slo", "ttft_p95", "tpot_p95"}) {
      objectives.push_back(find_objective(name, root.at("objectives")));
    }
    return objectives;
  }
  for (const json& text : root.array("objectives")) {
    const std::string place = fmt::format("{}/{}", root.at("objectives"), objectives.size());
    if (!text.is_string()) {
      throw InputError(place, fmt::format("is {}, expected an objective's name in quotes", text.dump()));
    }
    const Objective objective = find_objective(text.get<std::string>(), place);
    if (std::ranges::find(objectives, objective.path, &Objective::path) != objectives.end()) {
      throw InputError(place, fmt::format("{} is given twice, expected once", objective.name));
    }
    objectives.push_back(objective);
  }
  if (objectives.empty()) root.reject("objectives", "at least one, or no such key");
  return objectives;
}

// The scenario as the file has it, and what is the same at all points.
RunSpec read_base(const JsonObject& root, const ordered_json& ordered, const std::string& folder,
                  const ReplayOptions& options, bool knobs_vary, std::size_t& of_file) {
  const json* scenario = root.find("scenario");
  RunSpec base;
  if (scenario != nullptr && scenario->is_string()) {
    base = read_run(
        (std::filesystem::path(folder) / scenario->get<std::string>()).lexically_normal().string(), {});
  } else if (scenario != nullptr && scenario->is_object()) {
    base.text = ordered["scenario"].dump();
    base.file = root.at("scenario");
    base.folder = folder;
  } else {
    root.reject("scenario", "the path of a scenario, relative to this file, or a scenario itself");
  }
  std::vector<std::string> sets, knobs;
  if (root.has("generate")) base.generate = root.object("generate").value().dump();
  if (root.has("set")) {
    const JsonObject in = root.object("set");
    for (const auto& [path, value] : ordered["set"].items()) {
      check_path(path, in.at(path));
      const std::string set = set_of(path, json(value), folder);
      (generates(set) ? knobs : sets).push_back(set);
    }
  }
  of_file = sets.size();
  for (const std::string& set : options.sets) {
    if (!generates(set)) {
      sets.push_back(set);
      continue;
    }
    const std::string path = path_of(set);
    const json value = json::parse(set.substr(std::min(set.size(), path.size() + 1)), nullptr, false);
    if (value.is_discarded())
      throw InputError("--set", fmt::format("'{}' has no number, expected PATH=NUMBER", set));
    knobs.push_back(set);
  }
  if (options.seed) sets.push_back(fmt::format("seed={}", *options.seed));
  if (base.generate.empty() && (!knobs.empty() || knobs_vary)) base.generate = "{}";
  if (!knobs.empty()) base.generate = generate_with(base.generate, knobs, root.at("set"));
  if (!base.generate.empty()) {
    const json all = json::parse(base.generate);
    read_generate(
        JsonObject(all, root.at("generate").substr(0, root.at("generate").rfind(':')), "/generate"));
  }
  base.options = options;
  base.options.seed.reset();
  base.options.sets = std::move(sets);
  base.options.quiet = true;
  return base;
}

}  // namespace

RunSpec Space::spec_of(const SweepPoint& point) const {
  std::vector<std::string> sets;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const std::vector<std::string>& level = parameters[p].sets[point.levels[p]];
    sets.insert(sets.end(), level.begin(), level.end());
  }
  return with_sets(base, sets, file);
}

Space read_space(const std::string& path, const ReplayOptions& options, std::uint64_t most) {
  Space space;
  space.file = path == "-" ? "<stdin>" : path;
  // In the order of the text, on which that of the points rests.
  const ordered_json ordered = parse_json(read_text(path, "a sweep file (JSON)"), space.file);
  const json document(ordered);
  const JsonObject root(document, space.file);
  if (root.text("schema") != kSchema) root.reject("schema", fmt::format("'{}'", kSchema));
  root.refuse_unknown({"$schema", "schema", "name", "title", "note", "scenario", "set", "generate",
                       "parameters", "sample", "constraints", "objectives", "contrasts"});
  if (options.prices == "-") throw InputError("--prices", "is '-', expected a file: every point reads it");
  const std::string stem = std::filesystem::path(path).stem().string();
  space.name = root.text_or("name", path == "-" ? "stdin" : stem);
  space.title = root.text_or("title", "");
  const std::string folder = path == "-" ? "" : std::filesystem::path(path).parent_path().string();

  const Sample sample = read_sample(root, most);
  space.sampled = sample.latin;
  space.objectives = read_objectives(root);
  const JsonObject parameters = root.object("parameters");
  if (parameters.value().empty()) root.reject("parameters", "at least one");
  std::vector<Axis> axes;
  for (const auto& [name, value] : ordered["parameters"].items()) {
    axes.push_back(read_axis(parameters, name, value, sample.latin, most, folder));
  }
  space.contrasts = read_contrasts(root, axes, space.objectives);
  std::vector<std::vector<std::uint32_t>> chosen;
  if (sample.latin) chosen = choose_latin(axes, sample, space.contrasts, folder);
  bool knobs_vary = false;
  for (Axis& axis : axes) {
    space.parameters.push_back(std::move(axis.parameter));
    for (const auto& level : space.parameters.back().sets) {
      knobs_vary = knobs_vary || std::ranges::any_of(level, generates);
    }
  }
  judge_by(space, std::move(space.objectives));

  std::size_t of_file = 0;
  space.base = read_base(root, ordered, folder, options, knobs_vary, of_file);
  check_overlaps(space.parameters, space.file);
  for (std::size_t i = 0; i < space.base.options.sets.size(); ++i) {
    const std::string set = path_of(space.base.options.sets[i]);
    check_useless(space.parameters, set,
                  i < of_file                     ? root.at("set")
                  : set == "seed" && options.seed ? "--seed"
                                                  : "--set");
  }
  check_trace_options(space, options);
  ValueCheck check(space.parameters);
  check_base(space.base, of_file, check, root.at("set"));
  check_levels(space, check);

  Constraints constraints(root, space.parameters);
  if (sample.latin) {
    make_latin(space, constraints, sample, chosen, most, root.object("sample").at("points"));
  } else {
    make_grid(space, constraints, most, root.at("parameters"));
  }
  if (space.points.empty()) {
    throw InputError(root.at("constraints"),
                     fmt::format("exclude all {} combinations, expected them to leave some", space.excluded));
  }
  space.sha256 = identity_of(space, ordered, options);
  return space;
}

void judge_by(Space& space, std::vector<Objective> objectives) {
  for (const Contrast& contrast : space.contrasts) {
    const std::string& path = contrast.objective.path;
    if (std::ranges::find(objectives, path, &Objective::path) == objectives.end()) {
      objectives.push_back(contrast.objective);
    }
  }
  space.objectives = std::move(objectives);
}

}  // namespace pdsim
