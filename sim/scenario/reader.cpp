#include "sim/scenario/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

constexpr Nanos kLongest = 1'000'000'000 * kSecond;  // 31 years: sums of durations stay in range
constexpr std::size_t kShown = 60;                   // of a wrong value, in an error

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  return text;
}

bool filled(const Json& value) {
  return value.is_string() && !value.get_ref<const std::string&>().empty();
}

std::vector<std::string_view> names_of(std::span<const Named> names) {
  std::vector<std::string_view> out;
  for (const Named& named : names) out.push_back(named.name);
  return out;
}

std::string_view unit_name(Nanos unit) {
  return unit == kSecond ? "seconds" : unit == kMillisecond ? "milliseconds" : "microseconds";
}

// A duration as a JSON number in its unit: an integer where it is one.
Json in_unit(Nanos value, Nanos unit) {
  if (value % unit == 0) return value / unit;
  return static_cast<double>(value) / static_cast<double>(unit);
}

// vLLM's extra config as people write it: ["LIBFABRIC"] for libfabric, "True" for true.
Json in_our_spelling(const Json& value) {
  if (value.is_array() && value.size() == 1) return in_our_spelling(value[0]);
  if (!value.is_string()) return value;
  std::string text = value.get<std::string>();
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  if (text == "true" || text == "false") return text == "true";
  return text;
}

// An integral JSON number; 1e6 and 16.0 count.
std::optional<std::int64_t> integral(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto n = value.get<std::uint64_t>();
    return n <= INT64_MAX ? std::optional(static_cast<std::int64_t>(n)) : std::nullopt;
  }
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double real = value.get<double>();
  if (std::abs(real) > 0x1p53 || real != std::floor(real)) return std::nullopt;
  return static_cast<std::int64_t>(real);
}

std::string expectation(const Limits& limits) {
  if (std::isinf(limits.max)) {
    return fmt::format("a number {} {}", limits.above ? "above" : "of at least", limits.min);
  }
  if (limits.above) return fmt::format("a number above {} and at most {}", limits.min, limits.max);
  return fmt::format("a number from {} to {}", limits.min, limits.max);
}

bool within(const Limits& limits, double value) {
  return std::isfinite(value) && value <= limits.max &&
         (limits.above ? value > limits.min : value >= limits.min);
}

}  // namespace

std::string join_pointer(std::string_view pointer, std::string_view key) {
  std::string out(pointer);
  out += '/';
  for (const char c : key) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
  return out;
}

std::string_view Document::option(std::string_view pointer) const {
  for (std::string_view at = pointer; !at.empty(); at = at.substr(0, at.rfind('/'))) {
    if (const auto found = set.find(std::string(at)); found != set.end()) return found->second;
  }
  return {};
}

std::string Document::place(std::string_view pointer) const {
  const std::string_view from = option(pointer);
  const std::string_view where = from.empty() ? std::string_view(file) : from;
  return pointer.empty() ? std::string(where) : fmt::format("{}: {}", where, pointer);
}

void Document::fail(std::string_view pointer, std::string_view problem) const {
  throw InputError(place(pointer), problem);
}

struct Reader::Found {
  bool given = false;
  Json value;
  std::string pointer;
};

Reader::Reader(Document& document, const Json* in, std::string pointer, Json& in_force)
    : document_(&document), in_(in), pointer_(std::move(pointer)), out_(&in_force) {
  in_force = Json::object();
}

Reader::Reader(Document& document, Json& schema, Json& scratch)
    : document_(&document), in_(nullptr), out_(&scratch), schema_(&schema) {
  scratch = Json::object();
  schema["type"] = "object";
  schema["properties"] = Json::object();
}

Reader::Found Reader::find(std::string_view key, const Row& row, std::string_view expected) {
  keys_.push_back(key);
  if (!row.alias.empty()) known_aliases_.push_back(row.alias);
  Found found;
  const auto take = [&](const Json* object, std::string_view name, const std::string& pointer, bool alias) {
    if (object == nullptr || !object->contains(std::string(name))) return;
    const Json value = alias ? in_our_spelling((*object)[std::string(name)]) : (*object)[std::string(name)];
    if (found.given && found.value != value) {
      // The command line wins over the file; two spellings in one place must agree.
      const bool first = !document_->option(found.pointer).empty();
      const bool second = !document_->option(pointer).empty();
      if (first == second) {
        document_->fail(pointer, fmt::format("is {}, but {} is {}: give one of them", shown(value),
                                             found.pointer, shown(found.value)));
      }
      if (first) return;
    }
    found = {true, value, pointer};
  };
  take(in_, key, join_pointer(pointer_, key), row.alias == key);
  if (!row.alias.empty()) {
    if (row.alias != key) take(in_, row.alias, join_pointer(pointer_, row.alias), true);
    take(alias_object_, row.alias, join_pointer(join_pointer(pointer_, alias_key_), row.alias), true);
  }
  if (!found.given) {
    found.pointer = join_pointer(pointer_, key);
    if (row.source == kRequired && missing_.empty()) {
      missing_ = fmt::format("'{}' is missing, expected {}", key, expected);
    }
  }
  return found;
}

void Reader::put(std::string_view key, const Found& found, const Row& row, const Json& value) {
  if (!found.given && (row.source == kAbsent || row.source == kRequired)) return;
  if (key.starts_with('$')) return;  // an editor's, not the scenario's
  (*out_)[std::string(key)] = value;
  std::string from = "scenario";
  if (!found.given) {
    from = inherited_.empty() ? fmt::format("default: {}", row.source) : fmt::format("as {}", inherited_);
  } else if (const std::string_view option = document_->option(found.pointer); !option.empty()) {
    from = option;
  }
  document_->origins.emplace_back(join_pointer(pointer_, key), std::move(from));
}

// Rows inside have noted their own origins; an empty object or list has one itself.
void Reader::put_inner(std::string_view key, const Found& found, const Row& row, const Json& value) {
  if (value.empty()) return put(key, found, row, value);
  (*out_)[std::string(key)] = value;
}

void Reader::property(std::string_view key, const Row& row, const Json& type, const Json& value) {
  if (!describes()) return;
  const bool has_default = row.source != kAbsent && row.source != kRequired;
  Json& properties = (*schema_)["properties"];
  Json& at = properties[std::string(key)];
  if (at.is_null()) {
    at["description"] = has_default && row.source != kOwn
                            ? fmt::format("{} Default: {}.", row.sentence, row.source)
                            : std::string(row.sentence);
    at.update(type);
  } else if (at.contains("anyOf")) {
    at["anyOf"].push_back(type);
  } else {  // a second type that the key takes
    Json first = at, both = Json::object();
    for (const char* shared : {"description", "default"}) {
      if (!first.contains(shared)) continue;
      both[shared] = first[shared];
      first.erase(shared);
    }
    both["anyOf"] = Json::array({first, type});
    at = both;
  }
  if (has_default && !row.derived && !value.is_null() && !at.contains("default")) at["default"] = value;
  if (row.source == kRequired) (*schema_)["required"].push_back(key);
  if (!row.alias.empty()) {
    Json alias;
    alias["description"] = fmt::format("vLLM's spelling of {}.", key);
    // Of names and flags vLLM also takes ["UCX"] and "True".
    if (!type.contains("enum") && type["type"] != "boolean") alias.update(type);
    if (row.alias != key) properties[std::string(row.alias)] = alias;
    properties[std::string(alias_key_)]["properties"][std::string(row.alias)] = alias;
  }
}

void Reader::wrong(const Found& found, std::string_view expected) const {
  document_->fail(found.pointer, fmt::format("is {}, expected {}", shown(found.value), expected));
}

void Reader::fail(std::string_view key, std::string_view problem) const {
  document_->fail(key.empty() ? pointer_ : join_pointer(pointer_, key), problem);
}

bool Reader::has(std::string_view key) const {
  return in_ != nullptr && in_->contains(std::string(key));
}

bool Reader::is(std::string_view key, std::string_view type) const {
  return has(key) && type == in_->find(std::string(key))->type_name();
}

bool Reader::text(std::string_view key, std::string& value, const Row& row) {
  constexpr std::string_view kExpected = "a string that is not empty";
  const Found found = find(key, row, kExpected);
  property(key, row, {{"type", "string"}, {"minLength", 1}}, value.empty() ? Json() : Json(value));
  if (found.given) {
    if (!filled(found.value)) wrong(found, kExpected);
    value = found.value.get<std::string>();
  }
  put(key, found, row, value);
  return found.given;
}

bool Reader::flag(std::string_view key, bool& value, const Row& row) {
  const Found found = find(key, row, "true or false");
  property(key, row, {{"type", "boolean"}}, value);
  if (found.given) {
    if (!found.value.is_boolean()) wrong(found, "true or false");
    value = found.value.get<bool>();
  }
  put(key, found, row, value);
  return found.given;
}

bool Reader::number(std::string_view key, double& value, Limits limits, const Row& row) {
  const std::string expected = expectation(limits);
  const Found found = find(key, row, expected);
  if (describes()) {
    Json type{{"type", "number"}, {limits.above ? "exclusiveMinimum" : "minimum", limits.min}};
    if (!std::isinf(limits.max)) type["maximum"] = limits.max;
    property(key, row, type, value);
  }
  if (found.given) {
    if (!found.value.is_number() || !within(limits, found.value.get<double>())) wrong(found, expected);
    value = found.value.get<double>();
  }
  put(key, found, row, value);
  return found.given;
}

bool Reader::duration(std::string_view key, Nanos& value, Nanos unit, Nanos min, const Row& row,
                      std::string_view why) {
  const std::string expected =
      fmt::format("a number of {}, at least {}{}", unit_name(unit), in_unit(min, unit).dump(), why);
  const Found found = find(key, row, expected);
  property(key, row, {{"type", "number"}, {"minimum", in_unit(min, unit)}}, in_unit(value, unit));
  if (found.given) {
    const double given = found.value.is_number() ? found.value.get<double>() : -1.0;
    if (!found.value.is_number() || !(given >= 0.0)) wrong(found, expected);
    const double ns = given * static_cast<double>(unit);
    if (ns > static_cast<double>(kLongest)) wrong(found, fmt::format("{}, and at most 31 years", expected));
    value = static_cast<Nanos>(std::floor(ns + 0.5));
    if (value < min) wrong(found, expected);
  }
  put(key, found, row, in_unit(value, unit));
  return found.given;
}

bool Reader::integer_row(std::string_view key, std::int64_t& value, std::int64_t min, std::int64_t max,
                         const Row& row) {
  const bool bounded = max < INT32_MAX;  // by more than the type
  const std::string expected = bounded ? fmt::format("an integer from {} to {}", min, max)
                                       : fmt::format("an integer of at least {}", min);
  const Found found = find(key, row, expected);
  if (describes()) {
    Json type{{"type", "integer"}, {"minimum", min}};
    if (bounded) type["maximum"] = max;
    property(key, row, type, value);
  }
  if (found.given) {
    const std::optional<std::int64_t> given = integral(found.value);
    if (given && *given > max) wrong(found, fmt::format("an integer from {} to {}", min, max));
    if (!given || *given < min) wrong(found, expected);
    value = *given;
  }
  put(key, found, row, value);
  return found.given;
}

bool Reader::integers(std::string_view key, std::vector<std::int32_t>& values, std::int32_t max,
                      const Row& row) {
  const std::string expected = fmt::format("a list of different integers from 0 to {}", max);
  const Found found = find(key, row, expected);
  property(key, row,
           {{"type", "array"},
            {"items", {{"type", "integer"}, {"minimum", 0}, {"maximum", max}}},
            {"uniqueItems", true}},
           values);
  if (found.given) {
    if (!found.value.is_array()) wrong(found, expected);
    values.clear();
    for (const Json& item : found.value) {
      const std::optional<std::int64_t> given = integral(item);
      if (!given || *given < 0 || *given > max) wrong(found, expected);
      const auto index = static_cast<std::int32_t>(*given);
      if (std::find(values.begin(), values.end(), index) != values.end()) wrong(found, expected);
      values.push_back(index);
    }
  }
  put(key, found, row, values);
  return found.given;
}

bool Reader::numbers(std::string_view key, std::vector<double>& values, Limits each, const Row& row) {
  const std::string expected = fmt::format("a list, each {}", expectation(each));
  const Found found = find(key, row, expected);
  if (describes()) {
    Json item{{"type", "number"}, {each.above ? "exclusiveMinimum" : "minimum", each.min}};
    if (!std::isinf(each.max)) item["maximum"] = each.max;
    property(key, row, {{"type", "array"}, {"items", item}}, Json());
  }
  if (found.given) {
    if (!found.value.is_array()) wrong(found, expected);
    values.clear();
    for (const Json& item : found.value) {
      if (!item.is_number() || !within(each, item.get<double>())) wrong(found, expected);
      values.push_back(item.get<double>());
    }
  }
  put(key, found, row, values);
  return found.given;
}

bool Reader::choice(std::string_view key, std::string& value, std::span<const Named> names, const Row& row) {
  const std::vector<std::string_view> known = names_of(names);
  const std::string expected = fmt::format("one of {}", fmt::join(known, ", "));
  const Found found = find(key, row, expected);
  if (describes()) {
    std::string meanings(row.sentence);
    for (const Named& named : names) meanings += fmt::format(" {}: {}.", named.name, named.sentence);
    Row described = row;
    described.sentence = meanings;
    property(key, described, {{"enum", known}}, value.empty() ? Json() : Json(value));
  }
  if (found.given) {
    if (!found.value.is_string()) wrong(found, expected);
    value = found.value.get<std::string>();
    if (std::find(known.begin(), known.end(), value) == known.end()) {
      wrong(found, expected + did_you_mean(value, known));
    }
  }
  put(key, found, row, value);
  return found.given;
}

bool Reader::path(std::string_view key, std::string& value, const Row& row, std::string_view suffix) {
  const std::string expected =
      suffix.empty() ? "the path of a file" : fmt::format("a name, or the path of a {} file", suffix);
  const Found found = find(key, row, expected);
  property(key, row, {{"type", "string"}, {"minLength", 1}}, Json());
  Json in_force = value;
  if (found.given) {
    if (!filled(found.value)) wrong(found, expected);
    value = found.value.get<std::string>();
    in_force = value;
    if (value != "-" && value.ends_with(suffix)) {
      std::filesystem::path file(value);
      if (document_->option(found.pointer).empty()) file = document_->folder / file;
      value = file.lexically_normal().string();
      in_force = std::filesystem::absolute(file).lexically_normal().string();
    }
  }
  put(key, found, row, in_force);
  return found.given;
}

bool Reader::prices(std::string_view key, std::map<std::string, double>& values,
                    const std::vector<std::string>& names, const Row& row) {
  constexpr std::string_view kExpected =
      "USD per hour above 0, one for all instances or an object by instance";
  const Found found = find(key, row, kExpected);
  const Json price{{"type", "number"}, {"exclusiveMinimum", 0}};
  property(key, row, price, Json());
  property(key, row, {{"type", "object"}, {"additionalProperties", price}}, Json());
  if (!found.given) return false;
  const auto usd = [&](const Json& value, const std::string& pointer) {
    if (!value.is_number() || !within({.above = true}, value.get<double>())) {
      wrong({true, value, pointer}, kExpected);
    }
    return value.get<double>();
  };
  if (names.empty()) wrong(found, "no price, since no pool names an instance");
  if (found.value.is_object()) {
    const std::vector<std::string_view> known(names.begin(), names.end());
    for (const auto& [name, value] : found.value.items()) {
      const std::string pointer = join_pointer(found.pointer, name);
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        document_->fail(pointer, fmt::format("no pool has this instance, expected {}{}",
                                             fmt::join(names, ", "), did_you_mean(name, known)));
      }
      values[name] = usd(value, pointer);
    }
  } else {
    for (const std::string& name : names) values[name] = usd(found.value, found.pointer);
  }
  put(key, found, row, values);
  return true;
}

void Reader::object(std::string_view key, const Row& row, const std::function<void(Reader&)>& visit) {
  const Found found = find(key, row, "an object");
  Json inner;
  if (describes()) {
    Json inner_schema;
    Reader reader(*document_, inner_schema, inner);
    visit(reader);
    reader.finish();
    property(key, row, inner_schema, Json());
    return;
  }
  if (found.given && !found.value.is_object()) wrong(found, "an object");
  if (!found.given && (row.source == kAbsent || row.source == kRequired)) return;
  Reader reader(*document_, found.given ? &found.value : nullptr, found.pointer, inner);
  visit(reader);
  reader.finish();
  put_inner(key, found, row, inner);
}

std::string Reader::place(std::string_view key) const {
  return document_->place(join_pointer(pointer_, key));
}

void Reader::ahead(std::string_view key, const std::function<void(Reader&)>& visit) const {
  if (in_ == nullptr || !is(key, "object")) return;
  Document unnoted = *document_;
  Json unused;
  Reader reader(unnoted, &(*in_)[std::string(key)], join_pointer(pointer_, key), unused);
  visit(reader);
}

void Reader::list_row(std::string_view key, const Row& row, const std::function<void(Reader&)>& visit) {
  const Found found = find(key, row, "a list of objects");
  if (describes()) {
    Json scratch, items;
    Reader reader(*document_, items, scratch);
    visit(reader);
    reader.finish();
    property(key, row, {{"type", "array"}, {"items", items}}, Json::array());
    return;
  }
  Json in_force = Json::array();
  if (found.given) {
    if (!found.value.is_array()) wrong(found, "a list of objects");
    for (std::size_t i = 0; i < found.value.size(); ++i) {
      const std::string pointer = join_pointer(found.pointer, std::to_string(i));
      if (!found.value[i].is_object()) wrong({true, found.value[i], pointer}, "an object");
      Json inner;
      Reader reader(*document_, &found.value[i], pointer, inner);
      visit(reader);
      reader.finish();
      in_force.push_back(inner);
    }
  }
  put_inner(key, found, row, in_force);
}

void Reader::aliases(std::string_view key, const Row& row) {
  const Found found = find(key, row, "an object");
  alias_key_ = key;
  property(key, row, {{"type", "object"}, {"additionalProperties", false}}, Json());
  if (!found.given) return;
  if (!found.value.is_object()) wrong(found, "an object");
  alias_object_ = &*in_->find(std::string(key));
}

void Reader::finish() {
  if (describes()) {
    (*schema_)["additionalProperties"] = false;
    return;
  }
  const auto refuse_unknown = [&](const Json* object, std::string_view pointer,
                                  const std::vector<std::string_view>& known) {
    if (object == nullptr) return;
    for (const auto& [key, value] : object->items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      std::string meant = did_you_mean(key, known);
      if (meant.empty()) meant = fmt::format(", expected one of {}", fmt::join(known, ", "));
      document_->fail(join_pointer(pointer, key), fmt::format("unknown key{}", meant));
    }
  };
  refuse_unknown(alias_object_, join_pointer(pointer_, alias_key_), known_aliases_);
  keys_.insert(keys_.end(), known_aliases_.begin(), known_aliases_.end());
  refuse_unknown(in_, pointer_, keys_);
  if (!missing_.empty()) document_->fail(pointer_, missing_);
}

}  // namespace pdsim
