#include "tools/pdsim/sweep_output.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "sim/core/error.hpp"
#include "tools/study/analysis.hpp"
#include "tools/study/files.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

ordered_json parameters_json(const Space& space, const ResultRow& row) {
  ordered_json out = ordered_json::object();
  for (std::size_t p = 0; p < space.parameters.size(); ++p) out[space.parameters[p].name] = row.labels[p];
  return out;
}

ordered_json number_or_null(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

}  // namespace

SweepCounts count_points(const SweepDatabase& database, std::uint64_t expected) {
  SweepCounts counts;
  counts.expected = expected;
  for (const auto& [point, status] : database.statuses()) {
    ++counts.by_status[static_cast<std::size_t>(status)];
    ++counts.recorded;
  }
  return counts;
}

std::string counts_text(const SweepCounts& counts) {
  std::string text = fmt::format("{} point{}:", counts.expected, counts.expected == 1 ? "" : "s");
  const char* separator = " ";
  for (std::size_t s = 0; s < std::size(kPointStatusNames); ++s) {
    if (counts.by_status[s] == 0) continue;
    text += fmt::format("{}{} {}", separator, counts.by_status[s], kPointStatusNames[s]);
    separator = ", ";
  }
  if (counts.recorded < counts.expected) {
    text += fmt::format("{}{} missing", separator, counts.expected - counts.recorded);
  }
  return text;
}

std::string report_json(const SweepDatabase& database, const SweepCounts& counts, bool interrupted) {
  const Space& space = database.space();
  const std::vector<ResultRow> rows = database.rows();
  ordered_json out = {{"schema", "pdsim.sweep-report/1"},
                      {"sweep", space.name},
                      {"sweep_sha256", space.sha256},
                      {"version", database.version()},
                      {"db", database.path()},
                      {"shard", database.shard().text()},
                      {"status", interrupted ? "interrupted" : "finished"}};
  out["points"] = {{"sweep", database.points()}, {"expected", counts.expected}};
  for (std::size_t s = 0; s < std::size(kPointStatusNames); ++s) {
    out["points"][std::string(kPointStatusNames[s])] = counts.by_status[s];
  }
  out["points"]["missing"] = counts.expected - counts.recorded;

  out["parameters"] = ordered_json::array();
  for (const Parameter& parameter : space.parameters)
    out["parameters"].push_back({{"name", parameter.name}, {"levels", parameter.labels.size()}});

  out["objectives"] = ordered_json::array();
  const std::vector<std::vector<std::optional<double>>> compared = comparable(space, rows);
  for (std::size_t o = 0; o < space.objectives.size(); ++o) {
    const Objective& objective = space.objectives[o];
    std::vector<std::optional<double>> values;
    std::size_t left_out = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      values.push_back(compared[r][o]);
      left_out += rows[r].finished && rows[r].objectives[o] && !values.back();
    }
    ordered_json best = nullptr;
    if (const auto at = best_of(values, objective.less_is_better)) {
      best = {{"point", rows[*at].point},
              {"value", *values[*at]},
              {"parameters", parameters_json(space, rows[*at])}};
    }
    const Shares explained = explained_shares(space, o, rows);
    ordered_json shares = ordered_json::object();
    for (std::size_t p = 0; p < space.parameters.size(); ++p) {
      shares[space.parameters[p].name] = number_or_null(explained.shares[p]);
    }
    out["objectives"].push_back({{"name", objective.name},
                                 {"path", objective.path},
                                 {"less_is_better", objective.less_is_better},
                                 {"best", best},
                                 {"left_out", left_out},
                                 {"logarithm", explained.logarithm},
                                 {"explained", shares}});
  }

  out["pareto"] = ordered_json::array();
  const auto less = std::make_unique<bool[]>(space.objectives.size());  // vector<bool> is no span of bool
  for (std::size_t o = 0; o < space.objectives.size(); ++o) less[o] = space.objectives[o].less_is_better;
  for (const std::size_t at : pareto_front(compared, {less.get(), space.objectives.size()})) {
    ordered_json objectives = ordered_json::object();
    for (std::size_t o = 0; o < space.objectives.size(); ++o) {
      objectives[space.objectives[o].name] = number_or_null(rows[at].objectives[o]);
    }
    out["pareto"].push_back({{"point", rows[at].point},
                             {"parameters", parameters_json(space, rows[at])},
                             {"objectives", objectives}});
  }
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

namespace {

// The same file, or what would be the same once it is made.
bool same_place(const std::string& a, const std::string& b) {
  std::error_code error, error_a, error_b;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path at = fs::weakly_canonical(fs::absolute(a), error_a);
  return at == fs::weakly_canonical(fs::absolute(b), error_b) && !error_a && !error_b;
}

}  // namespace

void check_places(const std::vector<std::pair<std::string, std::string>>& outputs,
                  const std::vector<std::string>& inputs) {
  const auto none = [](const std::string& path) { return path.empty() || path == "-"; };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [option, path] = outputs[i];
    if (none(path)) continue;
    for (const std::string& input : inputs) {
      if (none(input) || !same_place(path, input)) continue;
      throw InputError(option,
                       fmt::format("is {}, which is an input ({}); expected another file", path, input));
    }
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (o == i || none(outputs[o].second)) continue;
      for (const char* end : {"", "-wal", "-shm", "-journal", ".lock"}) {
        const bool beside = *end != '\0';
        if (beside ? outputs[o].first != "--db" : o > i) continue;
        if (!same_place(path, outputs[o].second + end)) continue;
        throw InputError(option, fmt::format("is {}, which is a file of {} {} too; expected another file",
                                             path, outputs[o].first, outputs[o].second));
      }
    }
  }
}

void check_csv(const std::string& path) {
  if (path.empty() || path == "-") return;
  const std::string name = fs::path(path).filename().string();
  const std::string_view names[] = {name};
  check_folder(folder_of(path), names);
}

void write_csv(const SweepDatabase& database, const std::string& path) {
  if (path == "-") {
    database.write_csv(stdout);
    return;
  }
  const fs::path beside =
      fs::path(folder_of(path)) / fmt::format(".{}.{}", fs::path(path).filename().string(), getpid());
  std::error_code error;
  fs::create_directories(folder_of(path), error);
  const auto give_up = [&](int why) {
    fs::remove(beside, error);
    throw InputError(path, fmt::format("cannot be written: {}", std::strerror(why)));
  };
  std::FILE* file = std::fopen(beside.c_str(), "wb");
  if (file == nullptr) give_up(errno);
  try {
    database.write_csv(file);
  } catch (...) {
    std::fclose(file);
    fs::remove(beside, error);
    throw;
  }
  const bool whole = std::ferror(file) == 0;
  const int why = errno;
  if (std::fclose(file) != 0 || !whole) give_up(whole ? errno : why);
  fs::rename(beside, path, error);
  if (error) give_up(error.value());
}

}  // namespace pdsim
