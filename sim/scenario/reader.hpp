// One row a field: key, type, range, unit, where the default comes from, one sentence. From the same
// rows come parsing, the document in force, provenance and the JSON schema.
//
// A Reader stands on one JSON object. fields.cpp visits a struct with it, a row a member:
//
//   r.duration("kv_lease_duration_s", t.kv_lease_duration, kSecond, 0, {"vLLM 0.24", "How long ..."});
//
// The member's value on entry is the default. Each row looks its key up; checks type and range, or
// throws an InputError with place and expectation; sets the member; writes the value in force and where
// it came from. Made with a schema, a Reader has no input: rows describe themselves instead, lists and
// optional objects are visited once.
//
// JSON types appear by pointer only, so that the library's header stays in reader.cpp and load.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/scenario/names.hpp"

namespace pdsim {

using Json = nlohmann::ordered_json;

/// Instead of a default's source: the key must be given.
inline constexpr std::string_view kRequired = "required";
/// Instead of a default's source: a key that is not given stays out of the document in force.
inline constexpr std::string_view kAbsent;

/// A default that nobody else's system or measurement stands behind.
inline constexpr std::string_view kOwn = "pdsim's own";

struct Row {
  std::string_view source;    ///< of the default: "vLLM 0.24", a paper, or kRequired or kAbsent
  std::string_view sentence;  ///< what it is, for schema and people
  std::string_view alias{};   ///< the key's spelling in vLLM's kv_connector_extra_config
  bool derived = false;       ///< the default depends on other keys: the schema states none
};

/// What numbers a row takes.
struct Limits {
  double min = 0.0;
  double max = std::numeric_limits<double>::infinity();
  bool above = false;  ///< min itself is out
};

/// What reading one document shares: its name, who set what, what came of it.
struct Document {
  std::string file;                        ///< as errors name it
  std::string folder;                      ///< paths in it are relative to this; "" = the current one
  std::map<std::string, std::string> set;  ///< pointer -> "--set", "--trace": not from the file
  std::vector<std::pair<std::string, std::string>> origins;  ///< pointer -> where the value came from

  /// The option that set this value or an object that contains it; "" = the file did.
  std::string_view option(std::string_view pointer) const;
  /// "file: /pointer", or "--set: /pointer".
  std::string place(std::string_view pointer) const;
  [[noreturn]] void fail(std::string_view pointer, std::string_view problem) const;
};

class Reader {
 public:
  /// On the object at `pointer`; null when it is absent and all defaults hold.
  Reader(Document& document, const Json* in, std::string pointer, Json& in_force);
  /// One that describes into `schema` instead of reading.
  Reader(Document& document, Json& schema, Json& scratch);

  bool describes() const { return schema_ != nullptr; }
  const std::string& pointer() const { return pointer_; }
  /// Defaults are not defaults here but what the object at `pointer` says.
  void inherit_from(std::string pointer) { inherited_ = std::move(pointer); }

  // Rows. Each returns whether the key was given.
  bool text(std::string_view key, std::string& value, const Row& row);
  bool flag(std::string_view key, bool& value, const Row& row);
  bool number(std::string_view key, double& value, Limits limits, const Row& row);
  /// A number in units of `unit`, rounded to the nearest nanosecond (0.07 ms is 70,000 ns although
  /// 0.07 x 10^6 is not), of at least `min` nanoseconds. `why` is added to what an error expects.
  bool duration(std::string_view key, Nanos& value, Nanos unit, Nanos min, const Row& row,
                std::string_view why = {});
  template <typename Int>
  bool integer(std::string_view key, Int& value, std::int64_t min, std::int64_t max, const Row& row) {
    auto wide = static_cast<std::int64_t>(value);
    const bool given = integer_row(key, wide, min, max, row);
    value = static_cast<Int>(wide);
    return given;
  }
  bool integers(std::string_view key, std::vector<std::int32_t>& values, std::int32_t max, const Row& row);
  /// A list of numbers, each in `each`.
  bool numbers(std::string_view key, std::vector<double>& values, Limits each, const Row& row);
  /// One of a table's names.
  bool choice(std::string_view key, std::string& value, std::span<const Named> names, const Row& row);
  template <typename Enum>
  requires std::is_enum_v<Enum>
  bool choice(std::string_view key, Enum& value, std::span<const Named> names, const Row& row) {
    std::string name(names[static_cast<std::size_t>(value)].name);
    const bool given = choice(key, name, names, row);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i].name == name) value = static_cast<Enum>(i);
    }
    return given;
  }
  /// A file. One that the document names is relative to the document, one from the command line to the
  /// current folder; in force it is absolute. With `suffix`, only what ends so is a path.
  bool path(std::string_view key, std::string& value, const Row& row, std::string_view suffix = {});
  /// One price for all `names`, or an object of prices by name.
  bool prices(std::string_view key, std::map<std::string, double>& values,
              const std::vector<std::string>& names, const Row& row);

  // Whether the key's value is of this JSON type ("object", "array", "number", "string").
  bool is(std::string_view key, std::string_view type) const;
  bool has(std::string_view key) const;

  // Objects and lists; `visit` reads the rows inside.
  void object(std::string_view key, const Row& row, const std::function<void(Reader&)>& visit);
  template <typename T>
  void list(std::string_view key, std::vector<T>& values, const Row& row,
            const std::function<void(Reader&, T&)>& visit, const T& initial = T{}) {
    values.clear();
    list_row(key, row, [&](Reader& item) {
      T value = initial;
      visit(item, value);
      if (!describes()) values.push_back(std::move(value));
    });
  }
  /// Visits the object at `key` before its turn, for rows whose defaults depend on it: leaves no trace but
  /// what `visit` takes, and refuses no unknown keys. Does nothing when there is no such object.
  void ahead(std::string_view key, const std::function<void(Reader&)>& visit) const;
  /// An object whose keys are the aliases of the rows to come.
  void aliases(std::string_view key, const Row& row);

  /// All rows are done: refuses keys that none of them knows, then the lack of required ones.
  void finish();
  [[noreturn]] void fail(std::string_view key, std::string_view problem) const;
  /// How errors at the key's value begin.
  std::string place(std::string_view key) const;

 private:
  struct Found;  ///< a key's value, where it stands

  Found find(std::string_view key, const Row& row, std::string_view expected);
  void put(std::string_view key, const Found& found, const Row& row, const Json& value);
  void put_inner(std::string_view key, const Found& found, const Row& row, const Json& value);
  void property(std::string_view key, const Row& row, const Json& type, const Json& value);
  [[noreturn]] void wrong(const Found& found, std::string_view expected) const;
  bool integer_row(std::string_view key, std::int64_t& value, std::int64_t min, std::int64_t max,
                   const Row& row);
  void list_row(std::string_view key, const Row& row, const std::function<void(Reader&)>& visit);

  Document* document_;
  const Json* in_;  ///< null = nothing given
  std::string pointer_;
  Json* out_;               ///< the object in force
  Json* schema_ = nullptr;  ///< null = reading
  std::string inherited_;
  std::vector<std::string_view> keys_, known_aliases_;  ///< that rows have asked for
  std::string_view alias_key_;                          ///< of the object of aliases
  const Json* alias_object_ = nullptr;
  std::string missing_;  ///< what the first absent required key would have been
};

/// "/a/b" + key, with "~" and "/" in it escaped as RFC 6901 says.
std::string join_pointer(std::string_view pointer, std::string_view key);

}  // namespace pdsim
