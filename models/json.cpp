#include "models/json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

template <typename Json>
Json parsed(const std::string& text, const std::string& file,
            const typename Json::parser_callback_t& look = nullptr) {
  try {
    return Json::parse(text, look, true, true);
  } catch (const typename Json::parse_error& error) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, text.size()));
    const std::string_view what = error.what();
    throw InputError(fmt::format("{}:{}", file, 1 + std::count(text.begin(), end, '\n')),
                     fmt::format("is not valid JSON: {}", what.substr(what.find(": ") + 2)));
  } catch (const typename Json::exception& error) {  // a number that no double holds
    throw InputError(file, fmt::format("is not usable JSON: {}", error.what()));
  }
}

// The innermost of this thread; null = nobody asks.
ReadingLog*& reading_log() {
  thread_local ReadingLog* log = nullptr;
  return log;
}

void note(const std::string& name, const std::string& text) {
  if (reading_log() != nullptr) note_files({{name, sha256_hex(text)}});
}

// The rest of a stream on a file.
std::string read_and_note(std::istream& stream, const std::filesystem::path& file) {
  std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  note(std::filesystem::absolute(file).lexically_normal().string(), text);
  return text;
}

// Read by whoever asks first.
const std::string& stdin_text() {
  static const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  return text;
}

}  // namespace

ReadingLog::ReadingLog() : outer_(std::exchange(reading_log(), this)) {}

ReadingLog::~ReadingLog() {
  reading_log() = outer_;
}

void ReadingLog::add(const FilesRead& files) {
  for (ReadingLog* log = this; log != nullptr; log = log->outer_) {
    log->files_.insert(files.begin(), files.end());
  }
}

void note_files(const FilesRead& files) {
  if (reading_log() != nullptr) reading_log()->add(files);
}

json read_json(const std::filesystem::path& file) {
  if (file == "-") {
    note("-", stdin_text());
    return parsed<json>(stdin_text(), "<stdin>");
  }
  std::ifstream stream(file, std::ios::binary);
  if (!stream || std::filesystem::is_directory(file)) {
    throw InputError(file.string(), "cannot be opened for reading; expected a JSON file");
  }
  const std::string text = read_and_note(stream, file);
  if (text.starts_with("version https://git-lfs")) {
    throw InputError(file.string(), "is a Git LFS pointer, not the file itself (run `git lfs pull`)");
  }
  return parsed<json>(text, file.string());
}

std::string read_text(const std::string& path, std::string_view what) {
  if (path == "-") {
    note("-", stdin_text());
    return stdin_text();
  }
  std::error_code error;
  std::ifstream stream(path, std::ios::binary);
  if (!stream || std::filesystem::is_directory(path, error)) {
    throw InputError(path, fmt::format("cannot be read; expected {}", what));
  }
  return read_and_note(stream, path);
}

ordered_json parse_json(const std::string& text, const std::string& file) {
  std::vector<std::set<std::string>> keys;
  const auto look = [&](int, ordered_json::parse_event_t event, ordered_json& value) {
    if (event == ordered_json::parse_event_t::object_start) keys.emplace_back();
    if (event == ordered_json::parse_event_t::object_end) keys.pop_back();
    if (event != ordered_json::parse_event_t::key) return true;
    const auto key = value.get<std::string>();
    if (keys.back().insert(key).second) return true;
    throw InputError(file, fmt::format("'{}' is given twice in one object, expected once", key));
  };
  return parsed<ordered_json>(text, file, look);
}

void JsonObject::refuse_unknown(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : value_.items()) {
    if (std::ranges::find(known, key) != known.end()) continue;
    throw InputError(at(key), fmt::format("is no key here{}, expected one of {}",
                                          did_you_mean(key, std::span(known.begin(), known.size())),
                                          fmt::join(known, ", ")));
  }
}

JsonObject::JsonObject(const json& value, std::string place, std::string pointer)
    : value_(value), place_(std::move(place)), pointer_(std::move(pointer)) {
  if (value_.is_object()) return;
  throw InputError(pointer_.empty() ? place_ : fmt::format("{}: {}", place_, pointer_),
                   fmt::format("expected an object, not {}", value_.type_name()));
}

const json* JsonObject::find(std::string_view key) const {
  const auto found = value_.find(key);
  return found == value_.end() || found->is_null() ? nullptr : &*found;
}

std::string JsonObject::at(std::string_view key) const {
  return fmt::format("{}: {}/{}", place_, pointer_, key);
}

void JsonObject::reject(std::string_view key, std::string_view expectation) const {
  const json* value = find(key);
  std::string shown = value == nullptr ? "absent" : value->dump();
  if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
  throw InputError(at(key), fmt::format("is {}: expected {}", shown, expectation));
}

const json& JsonObject::required(std::string_view key, std::string_view what) const {
  const json* value = find(key);
  if (value == nullptr) reject(key, what);
  return *value;
}

std::int64_t JsonObject::integer(std::string_view key, std::int64_t least, std::int64_t most) const {
  const std::string what = least == 0   ? "an integer, 0 or more"
                           : least == 1 ? "a positive integer"
                                        : fmt::format("an integer of at least {}", least);
  const json& value = required(key, what);
  // Some configs write whole numbers as 50000.0.
  const bool whole = value.is_number_integer() ||
                     (value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>());
  if (!whole || value.get<double>() < static_cast<double>(least)) reject(key, what);
  if (value.get<double>() > static_cast<double>(most)) reject(key, fmt::format("at most {}", most));
  return value.get<std::int64_t>();
}

double JsonObject::number(std::string_view key, double least) const {
  const std::string what = fmt::format("a number of at least {}", least);
  const json& value = required(key, what);
  if (!value.is_number() || value.get<double>() < least) reject(key, what);
  return value.get<double>();
}

std::string JsonObject::text(std::string_view key) const {
  const json& value = required(key, "a string");
  if (!value.is_string()) reject(key, "a string");
  return value.get<std::string>();
}

bool JsonObject::flag(std::string_view key) const {
  const json& value = required(key, "true or false");
  if (!value.is_boolean()) reject(key, "true or false");
  return value.get<bool>();
}

JsonObject JsonObject::object(std::string_view key) const {
  const json& value = required(key, "an object");
  if (!value.is_object()) reject(key, "an object");
  return JsonObject(value, place_, fmt::format("{}/{}", pointer_, key));
}

JsonObject JsonObject::element(std::string_view key, std::size_t index) const {
  return JsonObject(array(key)[index], place_, fmt::format("{}/{}/{}", pointer_, key, index));
}

const json& JsonObject::array(std::string_view key) const {
  const json& value = required(key, "an array");
  if (!value.is_array()) reject(key, "an array");
  return value;
}

}  // namespace pdsim
