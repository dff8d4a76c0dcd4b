// Reading JSON so that every mistake is reported where it stands: "file: /pointer: value, expectation".
// Included by .cpp files only: nlohmann/json.hpp is heavy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace pdsim {

/// Parses a file, or stdin for "-"; comments are allowed. InputError at "file" when it cannot be read, at
/// "file:line" when it is no JSON. Stdin is read once, and is the same to all that ask for it here.
nlohmann::json read_json(const std::filesystem::path& file);

/// All of a file, or of stdin for "-", as read_json(). InputError at `path`: "cannot be read; expected
/// WHAT".
std::string read_text(const std::string& path, std::string_view what);

/// Absolute path, or "-", and SHA-256 of the bytes. A file that has changed between two readings is there
/// twice.
using FilesRead = std::set<std::pair<std::string, std::string>>;

/// While it lives, collects what read_json() and read_text() read on its thread, and what Remembered values
/// that are used there were read from. One inside another adds to both.
class ReadingLog {
 public:
  ReadingLog();
  ~ReadingLog();
  ReadingLog(const ReadingLog&) = delete;
  ReadingLog& operator=(const ReadingLog&) = delete;

  const FilesRead& files() const { return files_; }
  void add(const FilesRead& files);  ///< also to those around it

 private:
  FilesRead files_;
  ReadingLog* outer_;
};

/// As if they were read here. O(files).
void note_files(const FilesRead& files);

/// What a cache keeps of files: whoever uses it rests on them as if they had read them.
template <typename T>
class Remembered {
 public:
  template <typename Read>
  explicit Remembered(const Read& read) {
    const ReadingLog log;
    value_ = read();
    files_ = log.files();
  }
  const T& value() const {
    note_files(files_);
    return value_;
  }

 private:
  T value_;
  FilesRead files_;
};

/// Parses `text`, what `file` in messages holds; comments are allowed, keys keep their order. InputError at
/// "file:line" when it is no JSON, at "file" for a key that an object has twice: a parser would keep the last
/// without a word.
nlohmann::ordered_json parse_json(const std::string& text, const std::string& file);

/// A JSON object and where it stands. A key whose value is null counts as absent, as in HF configs.
class JsonObject {
 public:
  /// InputError unless `value` is an object. Keeps a reference to it.
  JsonObject(const nlohmann::json& value, std::string place, std::string pointer = "");

  const nlohmann::json& value() const { return value_; }
  /// The key's value, or nullptr.
  const nlohmann::json* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }

  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most = INT32_MAX) const;
  double number(std::string_view key, double least) const;
  std::string text(std::string_view key) const;
  bool flag(std::string_view key) const;
  JsonObject object(std::string_view key) const;
  /// The object at an index of an array. Requires index < its size.
  JsonObject element(std::string_view key, std::size_t index) const;
  const nlohmann::json& array(std::string_view key) const;

  std::int64_t integer_or(std::string_view key, std::int64_t absent, std::int64_t least) const {
    return has(key) ? integer(key, least) : absent;
  }
  double number_or(std::string_view key, double absent, double least) const {
    return has(key) ? number(key, least) : absent;
  }
  std::string text_or(std::string_view key, std::string_view absent) const {
    return has(key) ? text(key) : std::string(absent);
  }
  bool flag_or(std::string_view key, bool absent) const { return has(key) ? flag(key) : absent; }

  /// InputError, with the nearest of them, for a key that is none of `known`.
  void refuse_unknown(std::initializer_list<std::string_view> known) const;

  /// "file: /pointer/key", for messages of one's own.
  std::string at(std::string_view key) const;
  /// InputError at the key: the value it has, and what was expected.
  [[noreturn]] void reject(std::string_view key, std::string_view expectation) const;

 private:
  const nlohmann::json& required(std::string_view key, std::string_view what) const;

  const nlohmann::json& value_;
  std::string place_, pointer_;
};

}  // namespace pdsim
