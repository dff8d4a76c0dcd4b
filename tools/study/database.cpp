#include "tools/study/database.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <strings.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "models/csv.hpp"
#include "models/data.hpp"
#include "sim/core/error.hpp"
#include "tools/study/figures.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"

namespace pdsim {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kApplicationId = 0x70647377;  // "pdsw" (chosen)
constexpr int kBusyMs = 10'000;             // chosen: a reader of a result or two is gone by then

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// ------------------------------------------------------------------------------------ one process a file

// FILE.lock, locked for as long as this object, or its process, lives. It says who has it.
class FileLock {
 public:
  FileLock() = default;
  ~FileLock() { release(); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // reading: where no lock can be made (a read-only folder), nobody can be writing either.
  void take(const std::string& file, bool reading) {
    path_ = file + ".lock";
    for (;;) {
      fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      if (fd_ < 0) {
        if (reading) return;
        throw InputError(file, fmt::format("cannot be locked: {}: {}", path_, std::strerror(errno)));
      }
      if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
        const int error = errno;
        std::array<char, 300> holder{};
        const ssize_t size = pread(fd_, holder.data(), holder.size() - 1, 0);
        close(std::exchange(fd_, -1));
        if (error != EWOULDBLOCK) {
          throw InputError(file, fmt::format("cannot be locked: {}: {}; expected a folder on a local disk, "
                                             "whose file system locks",
                                             path_, std::strerror(error)));
        }
        throw InputError(file,
                         fmt::format("is in use by {}; expected to be the only one: wait until that has "
                                     "ended, or name another file (each shard has its own)",
                                     size > 0 ? holder.data() : "another process"));
      }
      struct stat held {
      }, named{};
      if (fstat(fd_, &held) == 0 && stat(path_.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
          held.st_dev == named.st_dev) {
        break;
      }
      close(std::exchange(fd_, -1));  // its last holder has removed it since
    }
    const std::string who = fmt::format("process {} on {}", getpid(), host_name());
    if (ftruncate(fd_, 0) == 0) static_cast<void>(!pwrite(fd_, who.data(), who.size(), 0));
  }

  void release() {
    if (fd_ < 0) return;
    unlink(path_.c_str());  // while it is held, so that nobody else's is removed
    close(std::exchange(fd_, -1));
  }

 private:
  std::string path_;
  int fd_ = -1;
};

// ------------------------------------------------------------------------------------------------ SQLite

class Connection {
 public:
  Connection() = default;
  ~Connection() { sqlite3_close_v2(db_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void open(const std::string& path, int flags) {
    path_ = path;
    const int code = sqlite3_open_v2(path.c_str(), &db_, flags | SQLITE_OPEN_NOMUTEX, nullptr);
    if (code != SQLITE_OK) fail(code);
    sqlite3_extended_result_codes(db_, 1);
    sqlite3_busy_timeout(db_, kBusyMs);
  }

  // From here on what goes wrong is no longer the input's fault.
  void opened() { opened_ = true; }

  void run(const std::string& sql) {
    const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
    if (code != SQLITE_OK) fail(code);
  }

  // Closes at once; false where statements are left.
  void close() {
    const int code = sqlite3_close(db_);
    if (code != SQLITE_OK) fail(code);
    db_ = nullptr;
  }

  [[noreturn]] void fail(int code) const {
    const int kind = code & 0xff;
    std::string why = db_ != nullptr ? sqlite3_errmsg(db_) : sqlite3_errstr(code);
    const int error = db_ != nullptr ? sqlite3_system_errno(db_) : 0;
    const bool system = kind == SQLITE_CANTOPEN || kind == SQLITE_IOERR || kind == SQLITE_FULL;
    if (system && error != 0) why += fmt::format(" ({})", std::strerror(error));
    if (kind == SQLITE_NOTADB) {
      throw InputError(path_,
                       "is no SQLite database; expected a file that pdsim sweep or merge wrote, or a "
                       "free name");
    }
    // Before a file is known to have our tables, one that is missing is the file's fault and no bug.
    if (kind == SQLITE_CORRUPT || (kind == SQLITE_ERROR && !opened_)) damaged(why);
    if (kind == SQLITE_ERROR || kind == SQLITE_MISUSE || kind == SQLITE_RANGE || kind == SQLITE_CONSTRAINT ||
        kind == SQLITE_MISMATCH) {
      throw InternalError(fmt::format("{}: SQLite: {}", path_, why));
    }
    if (opened_) {
      throw DatabaseFailed(path_, fmt::format("{}; expected a disk with room and a file that nobody else "
                                              "changes",
                                              why));
    }
    if (kind == SQLITE_BUSY || kind == SQLITE_LOCKED) {
      throw InputError(path_, "is locked by another program (an open sqlite3 or notebook); close it first");
    }
    throw InputError(path_,
                     fmt::format("cannot be used: {}; expected a file, and a folder, to write to", why));
  }

  [[noreturn]] void damaged(std::string why) const {
    std::ranges::replace(why, '\n', ' ');
    throw InputError(path_,
                     fmt::format("is damaged: {}; sweep again into another file (`sqlite3 FILE .recover` "
                                 "may save rows)",
                                 why));
  }

  sqlite3* get() const { return db_; }
  const std::string& path() const { return path_; }

 private:
  sqlite3* db_ = nullptr;
  std::string path_;
  bool opened_ = false;
};

class Statement {
 public:
  Statement(const Connection& connection, const std::string& sql) : connection_(connection) {
    const int code =
        sqlite3_prepare_v2(connection.get(), sql.data(), static_cast<int>(sql.size()), &statement_, nullptr);
    if (code != SQLITE_OK) connection.fail(code);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  // Parameters are bound in order.
  Statement& operator<<(std::int64_t value) { return check(sqlite3_bind_int64(statement_, ++bound_, value)); }
  Statement& operator<<(std::uint64_t value) { return *this << static_cast<std::int64_t>(value); }
  Statement& operator<<(double value) { return check(sqlite3_bind_double(statement_, ++bound_, value)); }
  Statement& operator<<(std::string_view text) {
    return check(sqlite3_bind_text(statement_, ++bound_, text.data(), static_cast<int>(text.size()),
                                   SQLITE_TRANSIENT));
  }
  Statement& operator<<(std::nullptr_t) { return check(sqlite3_bind_null(statement_, ++bound_)); }
  Statement& operator<<(sqlite3_value* value) {
    return check(sqlite3_bind_value(statement_, ++bound_, value));
  }

  // Whether there is a row. After the last one it can be bound and run again.
  bool step() {
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    sqlite3_reset(statement_);
    bound_ = 0;
    if (code != SQLITE_DONE) connection_.fail(code);
    return false;
  }
  void run() {
    while (step()) {
    }
  }
  void reset() {
    sqlite3_reset(statement_);
    bound_ = 0;
  }

  int columns() const { return sqlite3_column_count(statement_); }
  std::string name(int column) const { return sqlite3_column_name(statement_, column); }
  int type(int column) const { return sqlite3_column_type(statement_, column); }
  std::int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }
  std::string_view text(int column) const {
    const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
    return text == nullptr
               ? std::string_view()
               : std::string_view(text, static_cast<std::size_t>(sqlite3_column_bytes(statement_, column)));
  }
  sqlite3_value* value(int column) const { return sqlite3_column_value(statement_, column); }

 private:
  const Connection& connection_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;

  Statement& check(int code) {
    if (code != SQLITE_OK) connection_.fail(code);
    return *this;
  }
};

std::int64_t number_of(const Connection& connection, const std::string& sql) {
  Statement statement(connection, sql);
  return statement.step() ? statement.integer(0) : 0;
}

// ----------------------------------------------------------------------------------------------- columns

struct Column {
  std::string name;
  ColumnType type = ColumnType::text;
};

std::string in_quotes(std::string_view name) {
  std::string out = "\"";
  for (const char c : name) out.append(c == '"' ? 2 : 1, c);
  return out + '"';
}

std::string declared(const Column& column) {
  constexpr std::string_view kTypes[] = {"REAL", "INTEGER", "TEXT"};
  return fmt::format("{} {}", in_quotes(column.name), kTypes[static_cast<std::size_t>(column.type)]);
}

template <typename Number>
std::optional<Number> parsed(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

ColumnType type_of(const Parameter& parameter) {
  const auto all = [&](auto is) { return parameter.numeric && std::ranges::all_of(parameter.labels, is); };
  if (all([](const std::string& label) { return parsed<std::int64_t>(label).has_value(); })) {
    return ColumnType::integer;
  }
  if (all([](const std::string& label) { return parsed<double>(label).has_value(); }))
    return ColumnType::real;
  return ColumnType::text;
}

// Names as SQLite sees them: the case of ASCII letters does not count.
struct SameName {
  bool operator()(const std::string& a, const std::string& b) const {
    return strcasecmp(a.c_str(), b.c_str()) < 0;
  }
};
using Names = std::set<std::string, SameName>;

// `name`, or the first variation of it that is not taken. Control characters cannot be in SQL text.
std::string free_name(std::string name, const std::string& prefix, Names& taken) {
  for (char& c : name) {
    if (static_cast<unsigned char>(c) < 0x20) c = '_';
  }
  if (name.empty() || taken.contains(name)) name = prefix + name;
  while (!taken.insert(name).second) name += '_';
  return name;
}

constexpr std::string_view kEvidence = "evidence";
constexpr std::string_view kErrors[] = {"error_ttft", "error_tpot", "error_throughput"};
constexpr GradeError Evidence::*kErrorMembers[] = {&Evidence::ttft, &Evidence::tpot, &Evidence::throughput};

// What a sweep's tables have as columns.
struct Columns {
  struct Extra {
    std::string name, path;
  };
  std::vector<Column> parameters;
  std::vector<Extra> extra;             ///< of objectives that are no figure
  std::vector<std::string> objectives;  ///< by objective, the column it is in

  explicit Columns(const Space& space) {
    Names taken = {"point", "status", "error"};
    for (const Figure& figure : figures()) taken.insert(figure.column);
    taken.emplace(kEvidence);
    for (const std::string_view error : kErrors) taken.emplace(error);
    for (const Parameter& parameter : space.parameters) {
      parameters.push_back({free_name(parameter.name, "parameter_", taken), type_of(parameter)});
    }
    for (const Objective& objective : space.objectives) {
      if (column_of(objective).empty()) {
        extra.push_back({free_name(column_name(objective.path), "objective_", taken), objective.path});
      }
      objectives.push_back(column_of(objective));
    }
  }

  // Empty where no column has it.
  std::string column_of(const Objective& objective) const {
    for (const Figure& figure : figures()) {
      const bool number = figure.type != ColumnType::text && figure.from == Figure::From::path;
      if (number && figure.path == objective.path) return figure.column;
    }
    const auto found = std::ranges::find(extra, objective.path, &Extra::path);
    return found == extra.end() ? "" : found->name;
  }
};

void bind_value(Statement& statement, const ordered_json& value, ColumnType type) {
  if (value.is_string()) {
    statement << std::string_view(value.get_ref<const std::string&>());
  } else if (value.is_boolean()) {
    statement << std::int64_t{value.get<bool>() ? 1 : 0};
  } else if (!value.is_number()) {
    statement << nullptr;
  } else if (type == ColumnType::integer && value.is_number_integer()) {
    statement << value.get<std::int64_t>();
  } else {
    statement << value.get<double>();
  }
}

void bind_label(Statement& statement, const std::string& label, ColumnType type) {
  switch (type) {
    case ColumnType::integer:
      statement << *parsed<std::int64_t>(label);
      break;
    case ColumnType::real:
      statement << *parsed<double>(label);
      break;
    case ColumnType::text:
      statement << std::string_view(label);
  }
}

// A stored value, to be compared with labels bound by bind_label().
std::string key_of(const Statement& statement, int column) {
  switch (statement.type(column)) {
    case SQLITE_INTEGER:
      return fmt::format("{}", statement.integer(column));
    case SQLITE_FLOAT:
      return fmt::format("{}", statement.real(column));
    default:
      return std::string(statement.text(column));
  }
}
std::string key_of(const std::string& label, ColumnType type) {
  switch (type) {
    case ColumnType::integer:
      return fmt::format("{}", *parsed<std::int64_t>(label));
    case ColumnType::real:
      return fmt::format("{}", *parsed<double>(label));
    default:
      return label;
  }
}

// -------------------------------------------------------------------------------------- a space as meta

json json_of(const Objective& objective) {
  return {{"name", objective.name}, {"path", objective.path}, {"less_is_better", objective.less_is_better}};
}

Objective objective_from(const json& in) {
  return {in.at("name"), in.at("path"), in.at("less_is_better")};
}

std::string text_of(const json& document) {  // names may be no UTF-8
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::vector<std::pair<std::string, std::string>> meta_of(const Space& space, std::uint64_t points,
                                                         const std::string& shard,
                                                         const std::string& version) {
  const Columns columns(space);
  json parameters = json::array(), objectives = json::array(), contrasts = json::array();
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const Parameter& parameter = space.parameters[p];
    parameters.push_back({{"name", parameter.name},
                          {"column", columns.parameters[p].name},
                          {"numeric", parameter.numeric},
                          {"labels", parameter.labels}});
  }
  for (std::size_t o = 0; o < space.objectives.size(); ++o) {
    json objective = json_of(space.objectives[o]);
    objective["column"] = columns.objectives[o];
    objectives.push_back(std::move(objective));
  }
  for (const Contrast& contrast : space.contrasts) {
    contrasts.push_back({{"parameter", contrast.parameter}, {"objective", json_of(contrast.objective)}});
  }
  return {{"pdsim_version", version},
          {"sweep", space.name},
          {"sweep_sha256", space.sha256},
          {"points", std::to_string(points)},
          {"title", space.title},
          {"excluded", std::to_string(space.excluded)},
          {"repeated", std::to_string(space.repeated)},
          {"sampled", space.sampled ? "1" : "0"},
          {"shard", shard},
          {"parameters", text_of(parameters)},
          {"objectives", text_of(objectives)},
          {"contrasts", text_of(contrasts)}};
}

// How a file is named in results: what pdsim ships, and the rest of its tree (`shipped`, normal), alike
// wherever that is.
std::string name_of(const std::string& path, const fs::path& shipped) {
  if (path == "-") return path;
  const fs::path file = fs::absolute(path).lexically_normal();
  const fs::path beneath = file.lexically_relative(shipped);
  return (beneath.empty() || *beneath.begin() == ".." ? file : beneath).string();
}

// Of a name that name_of() has given.
bool is_shipped(const std::string& name) {
  return name != "-" && fs::path(name).is_relative();
}

void check_same_sweep(const std::string& path, const Space& there, const Space& here) {
  if (there.sha256 == here.sha256) return;
  throw InputError(
      path, there.name == here.name
                ? fmt::format("has results of another state of the sweep {} (sha256 {:.12} there, "
                              "{:.12} now: its file, scenario or options have changed); expected "
                              "another file, or the sweep as it was",
                              here.name, there.sha256, here.sha256)
                : fmt::format("has results of the sweep {}, not of {}; expected another file", there.name,
                              here.name));
}

}  // namespace

// ------------------------------------------------------------------------------------------- the object

struct SweepDatabase::Impl {
  FileLock lock;  // outlives the connection
  Connection db;
  std::string path;
  Space space;
  std::unique_ptr<Columns> columns;
  Shard shard;
  std::string version;
  std::uint64_t points = 0;
  bool made_here = false;
  bool mixed = false;  ///< with points of other versions of pdsim, which ship other files
  std::map<std::string, std::string> files;  ///< that points rest on: name_of() -> digest
  mutable std::mutex mutex;                  ///< of the connection
  std::unique_ptr<Statement> put_point, put_metrics, drop_metrics, put_timing, put_meta;

  // Whether the file is there and has results; an empty one, and what a process that died while making it
  // has left, has none.
  bool holds_results() const {
    const std::int64_t id = number_of(db, "PRAGMA application_id");
    const std::int64_t version_there = number_of(db, "PRAGMA user_version");
    if (id == 0 && version_there == 0 && number_of(db, "SELECT count(*) FROM sqlite_master") == 0)
      return false;
    if (id != kApplicationId) {
      throw InputError(path,
                       "is a SQLite database of another application; expected one that pdsim sweep or "
                       "merge wrote, or a free name");
    }
    if (version_there != kSchemaVersion) {
      throw InputError(
          path, fmt::format("has results in version {} of the schema, and this pdsim reads and writes "
                            "version {}; use the pdsim that wrote it ({}), or sweep again into another "
                            "file",
                            version_there, kSchemaVersion, meta("pdsim_version")));
    }
    Statement check(db, "PRAGMA quick_check(1)");
    if (!check.step() || check.text(0) != "ok") db.damaged(std::string(check.text(0)));
    return true;
  }

  std::string meta(std::string_view key) const {
    Statement statement(db, "SELECT value FROM meta WHERE key = ?");
    statement << key;
    return statement.step() ? std::string(statement.text(0)) : "";
  }

  void put(std::string_view key, std::string_view value) {
    if (!put_meta) put_meta = std::make_unique<Statement>(db, insert_into("meta", {"key", "value"}));
    (*put_meta << key << value).run();
  }

  void read_meta() {
    try {
      space.name = meta("sweep");
      space.sha256 = meta("sweep_sha256");
      space.file = path;
      version = meta("pdsim_version");
      shard = parse_shard(meta("shard"), path);
      points = parsed<std::uint64_t>(meta("points")).value();
      space.title = meta("title");
      space.excluded = parsed<std::uint64_t>(meta("excluded")).value();
      space.repeated = parsed<std::uint64_t>(meta("repeated")).value();
      space.sampled = meta("sampled") == "1";
      for (const json& parameter : json::parse(meta("parameters"))) {
        space.parameters.push_back(
            {parameter.at("name"), parameter.at("labels"), parameter.at("numeric").get<bool>(), {}});
      }
      for (const json& objective : json::parse(meta("objectives"))) {
        space.objectives.push_back(objective_from(objective));
      }
      for (const json& contrast : json::parse(meta("contrasts"))) {
        space.contrasts.push_back(
            {contrast.at("parameter").get<std::uint32_t>(), objective_from(contrast.at("objective"))});
        if (space.contrasts.back().parameter >= space.parameters.size()) {
          db.damaged("its table meta has a contrast of no parameter");
        }
      }
    } catch (const json::exception& error) {
      db.damaged(fmt::format("its table meta: {}", error.what()));
    } catch (const std::bad_optional_access&) {
      db.damaged("its table meta lacks a number");
    }
    columns = std::make_unique<Columns>(space);
    check_columns("points", names_of_points());
    check_columns("metrics", names_of_metrics());
    check_columns("results", names_of_results());
    check_columns("timing", names_of_timing());
    Statement statement(db, "SELECT substr(key, 6), value FROM meta WHERE key LIKE 'file %'");
    while (statement.step()) files.emplace(statement.text(0), statement.text(1));
  }

  // InputError where one of them is there and is not what it was. One that is not there any more is missed
  // by the first point that needs it.
  void check_files() const {
    for (const auto& [name, then] : files) {
      if (name == "-" || (mixed && is_shipped(name))) continue;
      const std::string now = digest_of((data_dir() / name).string());
      if (!now.empty() && now != then) refuse_changed(name, then, now);
    }
  }

  [[noreturn]] void refuse_changed(const std::string& name, const std::string& then,
                                   const std::string& now) const {
    throw InputError(name == "-" ? "stdin" : (data_dir() / name).string(),
                     fmt::format("is not what it was when points in {} were simulated (sha256 {:.12} then, "
                                 "{:.12} now); expected it as it was, or another --db, to begin anew",
                                 path, then, now));
  }

  std::vector<Column> metric_columns() const {
    std::vector<Column> all;
    for (const Figure& figure : figures()) all.push_back({figure.column, figure.type});
    all.push_back({std::string(kEvidence), ColumnType::text});
    for (const std::string_view error : kErrors) all.push_back({std::string(error), ColumnType::real});
    for (const Columns::Extra& extra : columns->extra) all.push_back({extra.name, ColumnType::real});
    return all;
  }
  std::vector<std::string> names_of_points() const {
    std::vector<std::string> all = {"point", "status", "error"};
    for (const Column& column : columns->parameters) all.push_back(column.name);
    return all;
  }
  std::vector<std::string> names_of_metrics() const {
    std::vector<std::string> all = {"point"};
    for (const Column& column : metric_columns()) all.push_back(column.name);
    return all;
  }

  std::vector<std::string> names_of_results() const {
    std::vector<std::string> all = names_of_points();
    for (const Column& column : metric_columns()) all.push_back(column.name);
    return all;
  }
  static std::vector<std::string> names_of_timing() {
    return {"point", "wall_s", "host", "version", "ended"};
  }

  // InputError where a table has other columns than this pdsim writes.
  void check_columns(const char* table, const std::vector<std::string>& expected) {
    Statement statement(db, fmt::format("SELECT name FROM pragma_table_info('{}')", table));
    std::vector<std::string> there;
    while (statement.step()) there.emplace_back(statement.text(0));
    if (there == expected) return;
    std::string first = "their order";
    for (const std::string& name : expected) {
      if (std::ranges::find(there, name) == there.end()) {
        first = fmt::format("no {}", name);
        break;
      }
    }
    for (const std::string& name : there) {
      if (std::ranges::find(expected, name) == expected.end()) {
        first = name;
        break;
      }
    }
    throw InputError(path,
                     fmt::format("has other columns than this pdsim writes to {} ({}): it is of another "
                                 "version ({}); use the pdsim that wrote it, or sweep again into another "
                                 "file",
                                 table, first, version));
  }

  void create(const std::vector<std::pair<std::string, std::string>>& about) {
    std::string points_sql = "point INTEGER PRIMARY KEY, status TEXT NOT NULL, error TEXT";
    std::string metrics_sql = "point INTEGER PRIMARY KEY", view = "points.point, points.status, points.error";
    for (const Column& column : columns->parameters) {
      points_sql += ", " + declared(column);
      view += ", points." + in_quotes(column.name);
    }
    for (const Column& column : metric_columns()) {
      metrics_sql += ", " + declared(column);
      view += ", metrics." + in_quotes(column.name);
    }
    db.run("BEGIN IMMEDIATE");
    db.run(fmt::format("PRAGMA application_id = {}", kApplicationId));
    db.run(fmt::format("PRAGMA user_version = {}", kSchemaVersion));
    db.run("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID");
    db.run(fmt::format("CREATE TABLE points ({})", points_sql));
    db.run(fmt::format("CREATE TABLE metrics ({})", metrics_sql));
    db.run(
        "CREATE TABLE timing (point INTEGER PRIMARY KEY, wall_s REAL, host TEXT, version TEXT, ended TEXT)");
    db.run(
        fmt::format("CREATE VIEW results AS SELECT {} FROM points LEFT JOIN metrics ON metrics.point = "
                    "points.point",
                    view));
    for (const auto& [key, value] : about) put(key, value);
    db.run("COMMIT");
  }

  static std::string insert_into(const char* table, const std::vector<std::string>& columns) {
    std::string names, values;
    for (const std::string& column : columns) {
      names += (names.empty() ? "" : ", ") + in_quotes(column);
      values += values.empty() ? "?" : ", ?";
    }
    return fmt::format("INSERT OR REPLACE INTO {} ({}) VALUES ({})", table, names, values);
  }

  void prepare_writing() {
    put_point = std::make_unique<Statement>(db, insert_into("points", names_of_points()));
    put_metrics = std::make_unique<Statement>(db, insert_into("metrics", names_of_metrics()));
    put_timing = std::make_unique<Statement>(db, insert_into("timing", names_of_timing()));
    drop_metrics = std::make_unique<Statement>(db, "DELETE FROM metrics WHERE point = ?");
  }

  void begin_writing(std::uint32_t most_pages) {
    {
      Statement mode(db, "PRAGMA journal_mode = WAL");
      const std::string got = mode.step() ? std::string(mode.text(0)) : "none";
      if (got != "wal") {
        throw InputError(path,
                         fmt::format("cannot be kept with a write-ahead log here (its journal is '{}'); "
                                     "expected a file on a local disk",
                                     got));
      }
    }
    db.run("PRAGMA synchronous = NORMAL");  // in this mode a transaction survives the process at once
    if (most_pages > 0) db.run(fmt::format("PRAGMA max_page_count = {}", most_pages));
  }

  [[noreturn]] void unknown_label(std::uint64_t point, std::size_t parameter) const {
    db.damaged(fmt::format("point {} has a value of {} that the sweep has not", point,
                           space.parameters[parameter].name));
  }

  void fill_points() {  // those that are there, with their levels
    std::vector<std::map<std::string, std::uint32_t>> levels;
    std::string sql = "SELECT point";
    for (std::size_t p = 0; p < space.parameters.size(); ++p) {
      std::map<std::string, std::uint32_t>& level = levels.emplace_back();
      const std::vector<std::string>& labels = space.parameters[p].labels;
      for (std::uint32_t l = 0; l < labels.size(); ++l) {
        level.emplace(key_of(labels[l], columns->parameters[p].type), l);
      }
      sql += ", " + in_quotes(columns->parameters[p].name);
    }
    Statement statement(db, sql + " FROM points ORDER BY point");
    while (statement.step()) {
      SweepPoint point{static_cast<std::uint64_t>(statement.integer(0)), {}};
      for (std::size_t p = 0; p < levels.size(); ++p) {
        const auto found = levels[p].find(key_of(statement, static_cast<int>(p) + 1));
        if (found == levels[p].end()) unknown_label(point.number, p);
        point.levels.push_back(found->second);
      }
      space.points.push_back(std::move(point));
    }
  }
};

SweepDatabase::SweepDatabase(const std::string& path, const Space& space, Shard shard, const Open& open)
    : impl_(std::make_unique<Impl>()) {
  Impl& i = *impl_;
  i.path = path;
  std::error_code error;
  if (fs::is_directory(path, error)) throw InputError(path, "is a folder; expected the name of a file");
  if (fs::exists(path, error) && !open.resume) {
    throw InputError(path, "is there already; --resume goes on with it, or name another file");
  }
  check_folder(folder_of(path));
  fs::create_directories(folder_of(path), error);
  i.lock.take(path, false);
  const bool there = fs::exists(path, error);
  if (there && !open.resume) {
    throw InputError(path, "is there already; --resume goes on with it, or name another file");
  }
  if (there && access(path.c_str(), W_OK) != 0) {
    throw InputError(path, fmt::format("cannot be written: {}", std::strerror(errno)));
  }
  i.db.open(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE);
  if (i.holds_results()) {
    i.read_meta();
    if (i.space.name != space.name) check_same_sweep(path, i.space, space);
    if (i.version != PDSIM_VERSION && !open.allow_mixed_versions) {
      throw InputError(path, fmt::format("has results of pdsim {}, and this is {}; expected the same, or "
                                         "--allow-mixed-versions",
                                         i.version, PDSIM_VERSION));
    }
    i.mixed = i.version != PDSIM_VERSION;
    i.check_files();  // says more than that something has changed
    check_same_sweep(path, i.space, space);
    if (!(i.shard == shard)) {
      throw InputError(path,
                       fmt::format("has shard {}, and this is {}; expected --shard {}, or a file for each "
                                   "shard",
                                   i.shard.text(), shard.text(), i.shard.text()));
    }
    i.columns->objectives.clear();
    for (const Objective& objective : space.objectives) {
      i.columns->objectives.push_back(i.columns->column_of(objective));
      if (i.columns->objectives.back().empty()) {
        throw InputError(path,
                         fmt::format("was begun without the objective {}, and has no column for it; expected "
                                     "the objectives it was begun with, or another file",
                                     objective.name));
      }
    }
    i.begin_writing(open.most_pages);
    if (i.version.find(PDSIM_VERSION) == std::string::npos) {
      i.version += ", " PDSIM_VERSION;
      i.put("pdsim_version", i.version);
    }
    i.space = space;
  } else {
    i.space = space;
    i.columns = std::make_unique<Columns>(space);
    i.shard = shard;
    i.version = PDSIM_VERSION;
    i.points = space.points.size();
    i.begin_writing(open.most_pages);
    i.made_here = true;
    i.create(meta_of(space, i.points, shard.text(), i.version));
  }
  i.prepare_writing();
  i.db.opened();
}

SweepDatabase::SweepDatabase(const std::string& path) : impl_(std::make_unique<Impl>()) {
  Impl& i = *impl_;
  i.path = path;
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    throw InputError(path, "is no file; expected results that pdsim sweep or merge wrote");
  }
  i.lock.take(path, true);
  i.db.open(path, access(path.c_str(), W_OK) == 0 ? SQLITE_OPEN_READWRITE : SQLITE_OPEN_READONLY);
  if (!i.holds_results()) {
    throw InputError(path, "is empty; expected results that pdsim sweep or merge wrote");
  }
  i.read_meta();
  i.fill_points();
}

SweepDatabase::~SweepDatabase() = default;

const std::string& SweepDatabase::path() const {
  return impl_->path;
}
const Space& SweepDatabase::space() const {
  return impl_->space;
}
Shard SweepDatabase::shard() const {
  return impl_->shard;
}
std::string SweepDatabase::version() const {
  return impl_->version;
}
std::uint64_t SweepDatabase::points() const {
  return impl_->points;
}

std::vector<std::pair<std::uint64_t, PointStatus>> SweepDatabase::statuses() const {
  const std::lock_guard lock(impl_->mutex);
  Statement statement(impl_->db, "SELECT point, status FROM points ORDER BY point");
  std::vector<std::pair<std::uint64_t, PointStatus>> all;
  while (statement.step()) {
    const auto* name = std::ranges::find(kPointStatusNames, statement.text(1));
    if (name == std::end(kPointStatusNames)) {
      impl_->db.damaged(fmt::format("point {} has the status '{}'", statement.integer(0), statement.text(1)));
    }
    all.emplace_back(statement.integer(0), static_cast<PointStatus>(name - std::begin(kPointStatusNames)));
  }
  return all;
}

std::vector<std::pair<std::uint64_t, std::string>> SweepDatabase::first_errors(std::size_t most) const {
  const std::lock_guard lock(impl_->mutex);
  Statement statement(
      impl_->db, "SELECT min(point), error FROM points WHERE error IS NOT NULL GROUP BY error ORDER BY 1");
  std::vector<std::pair<std::uint64_t, std::string>> errors;
  while (errors.size() < most && statement.step()) {
    errors.emplace_back(statement.integer(0), statement.text(1));
  }
  return errors;
}

void SweepDatabase::record(const PointResult& result) {
  Impl& i = *impl_;
  const fs::path shipped = fs::absolute(data_dir()).lexically_normal();
  std::vector<std::pair<std::string, std::string>> named;
  for (const auto& [file, digest] : result.files) named.emplace_back(name_of(file, shipped), digest);

  const std::lock_guard lock(i.mutex);
  std::map<std::string, std::string> fresh;
  for (const auto& [name, digest] : named) {
    const auto there = i.files.find(name);
    const std::string& then =
        there != i.files.end() ? there->second : fresh.emplace(name, digest).first->second;
    if (then != digest && !(i.mixed && is_shipped(name))) i.refuse_changed(name, then, digest);
  }
  i.db.run("BEGIN IMMEDIATE");
  try {
    Statement& point = *i.put_point;
    point << result.point.number << kPointStatusNames[static_cast<std::size_t>(result.status)];
    if (result.error.empty()) {
      point << nullptr;
    } else {
      point << std::string_view(result.error);
    }
    for (std::size_t p = 0; p < i.columns->parameters.size(); ++p) {
      bind_label(point, i.space.parameters[p].labels[result.point.levels[p]], i.columns->parameters[p].type);
    }
    point.run();
    if (result.summary) {
      Statement& metrics = *i.put_metrics;
      metrics << result.point.number;
      for (const Figure& figure : figures())
        bind_value(metrics, value_of(figure, *result.summary), figure.type);
      const auto number = [&](std::optional<double> value) {
        value ? metrics << *value : metrics << nullptr;
      };
      if (result.evidence) {
        metrics << kGradeNames[static_cast<std::size_t>(result.evidence->grade)];
      } else {
        metrics << nullptr;
      }
      for (const auto member : kErrorMembers) {
        const GradeError error = result.evidence ? (*result.evidence).*member : GradeError{};
        number(error.known() ? std::optional(error.median) : std::nullopt);
      }
      for (const Columns::Extra& extra : i.columns->extra) {
        std::optional<double> value;
        try {
          value = number_at(*result.summary, extra.path, extra.path);
        } catch (const InputError&) {  // other points may have it: a worker, a link
        }
        number(value);
      }
      metrics.run();
    } else {
      (*i.drop_metrics << result.point.number).run();
    }
    static const std::string host = host_name();
    const std::string ended = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
    (*i.put_timing << result.point.number << result.wall_s << std::string_view(host)
                   << std::string_view(PDSIM_VERSION) << std::string_view(ended))
        .run();
    for (const auto& [name, digest] : fresh) i.put("file " + name, digest);
    i.db.run("COMMIT");
    i.files.merge(fresh);
  } catch (...) {
    for (Statement* statement : {i.put_point.get(), i.put_metrics.get(), i.put_timing.get()})
      statement->reset();
    sqlite3_exec(i.db.get(), "ROLLBACK", nullptr, nullptr, nullptr);  // SQLite may have done so already
    throw;
  }
}

std::vector<ResultRow> SweepDatabase::rows() const {
  Impl& i = *impl_;
  const std::lock_guard lock(i.mutex);
  std::string sql = "SELECT point, status";
  std::vector<std::map<std::string, std::string>> labels;  // by stored value
  for (std::size_t p = 0; p < i.space.parameters.size(); ++p) {
    std::map<std::string, std::string>& by_value = labels.emplace_back();
    for (const std::string& label : i.space.parameters[p].labels) {
      by_value.emplace(key_of(label, i.columns->parameters[p].type), label);
    }
    sql += ", " + in_quotes(i.columns->parameters[p].name);
  }
  for (const std::string& column : i.columns->objectives) sql += ", " + in_quotes(column);
  sql += ", requests_injected, requests_completed, evidence";
  for (const std::string_view error : kErrors) sql += fmt::format(", {}", error);
  Statement statement(i.db, sql + " FROM results ORDER BY point");
  std::vector<ResultRow> rows;
  while (statement.step()) {
    ResultRow& row = rows.emplace_back();
    row.point = static_cast<std::uint64_t>(statement.integer(0));
    row.finished = statement.text(1) == kPointStatusNames[static_cast<std::size_t>(PointStatus::finished)];
    int column = 2;
    for (std::size_t p = 0; p < labels.size(); ++p) {
      const auto found = labels[p].find(key_of(statement, column++));
      if (found == labels[p].end()) i.unknown_label(row.point, p);
      row.labels.push_back(found->second);
    }
    for (std::size_t o = 0; o < i.columns->objectives.size(); ++o, ++column) {
      row.objectives.push_back(statement.type(column) == SQLITE_NULL || !row.finished
                                   ? std::nullopt
                                   : std::optional(statement.real(column)));
    }
    const double injected = statement.real(column++), completed = statement.real(column++);
    if (injected > 0) row.completed = completed / injected;
    if (statement.type(column++) == SQLITE_NULL) continue;
    Evidence evidence;
    for (const auto member : kErrorMembers) {
      const bool none = statement.type(column) == SQLITE_NULL;
      (evidence.*member).median = none ? std::numeric_limits<double>::quiet_NaN() : statement.real(column);
      ++column;
    }
    for (const Objective& objective : i.space.objectives) {
      row.errors.push_back(error_for(evidence, objective.path).median);
    }
  }
  return rows;
}

void SweepDatabase::write_csv(std::FILE* file) const {
  const std::lock_guard lock(impl_->mutex);
  Statement statement(impl_->db, "SELECT * FROM results ORDER BY point");
  std::string line;
  for (int c = 0; c < statement.columns(); ++c)
    line += fmt::format("{}{}", c > 0 ? "," : "", csv_text(statement.name(c)));
  while (statement.step()) {
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), file);
    line.clear();
    for (int c = 0; c < statement.columns(); ++c) {
      if (c > 0) line += ',';
      switch (statement.type(c)) {
        case SQLITE_INTEGER:
          fmt::format_to(std::back_inserter(line), "{}", statement.integer(c));
          break;
        case SQLITE_FLOAT:
          fmt::format_to(std::back_inserter(line), "{}", statement.real(c));
          break;
        case SQLITE_NULL:
          break;
        default:
          line += csv_text(statement.text(c));
      }
    }
  }
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), file);
}

void SweepDatabase::close() {
  Impl& i = *impl_;
  const std::lock_guard lock(i.mutex);
  for (auto* statement : {&i.put_point, &i.put_metrics, &i.drop_metrics, &i.put_timing, &i.put_meta}) {
    statement->reset();
  }
  i.db.run("BEGIN IMMEDIATE");  // after a quick_check without one SQLite refuses the next line
  i.db.run("COMMIT");
  i.db.run("PRAGMA wal_checkpoint(TRUNCATE)");
  sqlite3_busy_timeout(i.db.get(), 0);  // with a reader there the file stays in its mode, which reads as well
  sqlite3_exec(i.db.get(), "PRAGMA journal_mode = DELETE", nullptr, nullptr, nullptr);
  i.db.close();
  i.lock.release();
}

void SweepDatabase::discard() {
  Impl& i = *impl_;
  {
    const std::lock_guard lock(i.mutex);
    if (!i.made_here || number_of(i.db, "SELECT count(*) FROM points") > 0) return;
  }
  close();
  std::error_code ignored;
  fs::remove(i.path, ignored);
}

// --------------------------------------------------------------------------------------------- merging

namespace {

// The folders that are missing for a file: those that are made meanwhile and are empty at the end are
// removed.
class MadeFolders {
 public:
  explicit MadeFolders(const std::string& folder) {
    std::error_code error;
    for (fs::path at = fs::absolute(folder).lexically_normal();
         !fs::exists(at, error) && at.has_relative_path(); at = at.parent_path()) {
      missing_.push_back(at);
    }
  }
  ~MadeFolders() {
    std::error_code ignored;
    for (const fs::path& folder : missing_) fs::remove(folder, ignored);  // what is not empty stays
  }
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;

 private:
  std::vector<fs::path> missing_;  // the innermost first
};

// A file that is being made beside its place: removed unless it has got there.
class Temporary {
 public:
  explicit Temporary(const std::string& target)
      : path_((fs::path(folder_of(target)) /
               fmt::format(".{}.{}", fs::path(target).filename().string(), getpid()))
                  .string()) {}
  ~Temporary() {
    std::error_code ignored;
    for (const char* end : {"", "-wal", "-shm", "-journal", ".lock"}) fs::remove(path_ + end, ignored);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<std::string> names_of(const Statement& statement) {
  std::vector<std::string> names;
  for (int c = 0; c < statement.columns(); ++c) names.push_back(statement.name(c));
  return names;
}

// The same value of the same type: what CSV would show alike and SQL would not take for different.
bool equal(const Statement& a, const Statement& b) {
  for (int c = 0; c < a.columns(); ++c) {
    if (a.type(c) != b.type(c)) return false;
    if (a.type(c) == SQLITE_FLOAT ? a.real(c) != b.real(c) : a.text(c) != b.text(c)) return false;
  }
  return true;
}

// "3, 7, 11 and 12 more"
std::string some_of(const std::vector<std::uint64_t>& numbers) {
  constexpr std::size_t kShown = 5;
  const auto shown = std::min(numbers.size(), kShown);
  std::string text = fmt::format(
      "{}", fmt::join(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(shown), ", "));
  if (numbers.size() > shown) text += fmt::format(" and {} more", numbers.size() - shown);
  return text;
}

struct Input {
  std::string path;
  Shard shard;
};

[[noreturn]] void refuse_gaps(const std::vector<std::uint64_t>& missing, std::uint64_t points,
                              std::span<const Input> inputs) {
  const std::uint64_t count = inputs.front().shard.count;
  std::string where;
  if (count > 1 && std::ranges::all_of(inputs, [&](const Input& in) { return in.shard.count == count; })) {
    std::set<std::uint64_t> shards;
    for (const std::uint64_t point : missing) shards.insert(point % count);
    int named = 0;
    for (const std::uint64_t index : shards) {
      if (++named > 3) {
        where += fmt::format("; and {} more shards", shards.size() - 3);
        break;
      }
      const auto found =
          std::ranges::find_if(inputs, [&](const Input& in) { return in.shard.index == index; });
      where +=
          fmt::format("; shard {}/{} {}", index, count,
                      found == inputs.end() ? "is in no file given" : "is not complete in " + found->path);
    }
  } else if (inputs.size() == 1) {
    where = fmt::format("; {} is not complete", inputs.front().path);
  }
  throw InputError("merge",
                   fmt::format("of {} points {} are missing: {}{}; pdsim sweep --resume goes on with a "
                               "shard, --allow-gaps leaves them out",
                               points, missing.size(), some_of(missing), where));
}

}  // namespace

void merge_databases(std::span<const std::string> inputs, const std::string& output,
                     const MergeOptions& options) {
  std::error_code error;
  if (fs::exists(output, error)) {
    throw InputError(output, "is there already; expected a free name for what is merged");
  }
  check_folder(folder_of(output));
  std::set<std::string> given;
  for (const std::string& path : inputs) {
    if (!given.insert(fs::weakly_canonical(path, error).string()).second) {
      throw InputError(path, "is given twice; expected each file once");
    }
  }

  const MadeFolders folders(folder_of(output));
  const Temporary temporary(output);
  std::unique_ptr<SweepDatabase> merged;
  constexpr std::uint32_t kNobody = UINT32_MAX;
  std::vector<std::uint32_t> owner;  // by point, the first input that has it
  std::vector<Input> seen;
  std::set<std::string> versions;
  for (const std::string& path : inputs) {
    const SweepDatabase from(path);
    SweepDatabase::Impl& in = *from.impl_;
    if (!merged) {
      merged = std::make_unique<SweepDatabase>(temporary.path(), in.space, Shard{}, SweepDatabase::Open{});
      owner.assign(in.points, kNobody);
      merged->impl_->points = in.points;
      merged->impl_->db.run("BEGIN IMMEDIATE");
      merged->impl_->put("points", std::to_string(in.points));
    }
    SweepDatabase::Impl& out = *merged->impl_;
    if (in.space.name != out.space.name) check_same_sweep(path, in.space, out.space);
    for (std::size_t at = 0; at < in.version.size(); at = in.version.find_first_not_of(", ", at)) {
      const std::size_t end = std::min(in.version.find(", ", at), in.version.size());
      versions.insert(in.version.substr(at, end - at));
      at = end;
    }
    if (versions.size() > 1 && !options.allow_mixed_versions) {
      throw InputError(
          path,
          fmt::format("has results of pdsim {}{}; expected one version, or "
                      "--allow-mixed-versions",
                      in.version,
                      seen.empty() ? "" : fmt::format(", and {} of {}", seen.front().path, out.version)));
    }
    if (seen.empty()) out.version = in.version;
    for (const auto& [name, digest] : in.files) {
      const auto [there, is_new] = out.files.emplace(name, digest);
      if (is_new) out.put("file " + name, digest);
      if (there->second != digest && !(versions.size() > 1 && is_shipped(name))) {
        throw InputError(path,
                         fmt::format("rests on another {} than the files before it (sha256 {:.12} and "
                                     "{:.12}); expected shards of one sweep on the same files: sweep one of "
                                     "them again, into another --db",
                                     name == "-" ? "stdin" : name, digest, there->second));
      }
    }
    check_same_sweep(path, in.space, out.space);

    Statement points(in.db, "SELECT * FROM points ORDER BY point");
    Statement metrics(in.db, "SELECT * FROM metrics WHERE point = ?");
    Statement timing(in.db, "SELECT * FROM timing WHERE point = ?");
    Statement points_there(out.db, "SELECT * FROM points WHERE point = ?");
    Statement metrics_there(out.db, "SELECT * FROM metrics WHERE point = ?");
    if (names_of(points) != names_of(points_there) || names_of(metrics) != names_of(metrics_there)) {
      throw InputError(path,
                       fmt::format("has other columns than {}; expected the same objectives for all shards",
                                   seen.front().path));
    }
    const auto copy = [](const Statement& row, Statement& into) {
      for (int c = 0; c < row.columns(); ++c) into << row.value(c);
      into.run();
    };
    seen.push_back({path, in.shard});
    while (points.step()) {
      if (interrupted()) throw Interrupted{};
      const auto point = static_cast<std::uint64_t>(points.integer(0));
      if (point >= owner.size()) in.db.damaged(fmt::format("it has a point {} of {}", point, owner.size()));
      metrics << point;
      const bool measured = metrics.step();
      if (owner[point] != kNobody) {
        const std::string& other = seen[owner[point]].path;
        if (!options.allow_duplicates) {
          throw InputError(path,
                           fmt::format("has point {}, and so has {}; expected each point in one file, or "
                                       "--allow-duplicates where they are equal",
                                       point, other));
        }
        points_there << point;
        metrics_there << point;
        points_there.step();
        const bool measured_there = metrics_there.step();
        if (!equal(points, points_there) || measured != measured_there ||
            (measured && !equal(metrics, metrics_there))) {
          throw InputError(path,
                           fmt::format("has point {} with other results than {}; one of them is not of this "
                                       "sweep as it is now: leave one out, and find out why",
                                       point, other));
        }
        points_there.reset();
        metrics_there.reset();
        metrics.reset();
        continue;
      }
      owner[point] = static_cast<std::uint32_t>(seen.size() - 1);
      copy(points, *out.put_point);
      if (measured) copy(metrics, *out.put_metrics);
      metrics.reset();
      timing << point;
      if (timing.step()) copy(timing, *out.put_timing);
      timing.reset();
    }
  }

  std::vector<std::uint64_t> missing;
  for (std::uint64_t point = 0; point < owner.size(); ++point) {
    if (owner[point] == kNobody) missing.push_back(point);
  }
  if (!missing.empty() && !options.allow_gaps) refuse_gaps(missing, owner.size(), seen);

  SweepDatabase::Impl& out = *merged->impl_;
  out.put("pdsim_version", fmt::format("{}", fmt::join(versions, ", ")));
  out.db.run("COMMIT");
  out.db.run("VACUUM");  // pages in order of point, as if one process had written them
  merged->close();
  if (link(temporary.path().c_str(), output.c_str()) == 0) return;  // does not replace what came meanwhile
  if (errno == EEXIST) throw InputError(output, "is there already; expected a free name for what is merged");
  fs::rename(temporary.path(), output, error);  // a file system without links
  if (error) throw InputError(output, fmt::format("cannot be written: {}", error.message()));
}

}  // namespace pdsim
