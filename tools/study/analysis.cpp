#include "tools/study/analysis.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "sim/core/math.hpp"
#include "tools/study/text.hpp"
#include "tools/study/verdict.hpp"

namespace pdsim {

namespace {

using Values = std::vector<std::optional<double>>;

constexpr std::size_t kWidth = 100;      // of a line
constexpr std::size_t kShownFront = 12;  // rows of a Pareto front
constexpr double kSkewed = 10;           // largest over smallest value from which shares are of the logarithm
constexpr double kWorthSaying = 0.05;    // what chance alone explains, from which it is said

// Less is better in all columns.
std::vector<std::vector<double>> oriented(std::span<const Values> rows, std::span<const bool> less_is_better,
                                          std::vector<std::size_t>& whole) {
  std::vector<std::vector<double>> out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!std::ranges::all_of(rows[i], [](const auto& v) { return v.has_value(); })) continue;
    whole.push_back(i);
    std::vector<double>& row = out.emplace_back();
    for (std::size_t c = 0; c < rows[i].size(); ++c)
      row.push_back(less_is_better[c] ? *rows[i][c] : -*rows[i][c]);
  }
  return out;
}

// Of the evidence; 0 where nothing is known of it, so that nothing is held against a margin.
double error_of(const ResultRow& row, std::size_t objective) {
  if (objective >= row.errors.size() || !std::isfinite(row.errors[objective])) return 0;
  return row.errors[objective];
}

bool none_measured(const ResultRow& row, std::size_t objective) {
  return objective < row.errors.size() && std::isnan(row.errors[objective]);
}

// Nothing where the row has failed or has no finite number.
std::optional<double> value_of(const ResultRow& row, std::size_t objective) {
  const std::optional<double>& value = row.objectives[objective];
  return row.finished && value && std::isfinite(*value) ? value : std::nullopt;
}

bool as_complete(const ResultRow& row, double most) {
  return row.completed >= most - kAsComplete;
}

bool beats(const std::vector<double>& a, const std::vector<double>& b) {
  bool better = false;
  for (std::size_t c = 0; c < a.size(); ++c) {
    if (a[c] > b[c]) return false;
    better = better || a[c] < b[c];
  }
  return better;
}

}  // namespace

bool is_latency(const Objective& objective) {
  return objective.path.starts_with("latency_ms.") || objective.path.starts_with("stages_ms.");
}

std::vector<Values> comparable(const Space& space, std::span<const ResultRow> rows) {
  double most = 0;
  for (const ResultRow& row : rows) {
    if (row.finished) most = std::max(most, row.completed);
  }
  std::vector<Values> out;
  for (const ResultRow& row : rows) {
    Values& values = out.emplace_back(space.objectives.size());
    for (std::size_t o = 0; o < values.size(); ++o) {
      if (!is_latency(space.objectives[o]) || as_complete(row, most)) values[o] = value_of(row, o);
    }
  }
  return out;
}

std::vector<std::size_t> pareto_front(std::span<const Values> rows, std::span<const bool> less_is_better) {
  std::vector<std::size_t> whole;
  const std::vector<std::vector<double>> values = oriented(rows, less_is_better, whole);
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // What beats a row stands before it, so that only the front so far needs to be looked at.
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<std::size_t> front;
  double least = std::numeric_limits<double>::infinity();  // two columns: of the second, so far
  for (const std::size_t i : order) {
    const bool two = less_is_better.size() == 2;
    const bool out =
        two ? values[i][1] >= least && !(!front.empty() && values[front.back()] == values[i])
            : std::ranges::any_of(front, [&](std::size_t f) { return beats(values[f], values[i]); });
    if (out) continue;
    if (two) least = values[i][1];
    front.push_back(i);
  }
  for (std::size_t& i : front) i = whole[i];
  std::ranges::sort(front);
  return front;
}

std::optional<std::size_t> best_of(std::span<const std::optional<double>> values, bool less_is_better) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i]) continue;
    if (!best || (less_is_better ? *values[i] < *values[*best] : *values[i] > *values[*best])) best = i;
  }
  return best;
}

std::optional<double> explained(std::span<const std::optional<double>> values,
                                std::span<const std::uint32_t> groups) {
  double sum = 0;
  std::size_t n = 0;
  for (const auto& v : values) {
    if (v) sum += *v, ++n;
  }
  if (n < 2) return std::nullopt;
  const double mean = sum / static_cast<double>(n);
  struct Group {
    double sum = 0;
    double n = 0;
  };
  std::map<std::uint32_t, Group> by_group;
  double total = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i]) continue;
    const double away = *values[i] - mean;
    total += away * away;
    Group& group = by_group[groups[i]];
    group.sum += away;
    group.n += 1;
  }
  if (total <= 0) return std::nullopt;
  double between = 0;
  for (const auto& [id, group] : by_group) between += group.sum * group.sum / group.n;
  return std::min(1.0, between / total);
}

std::vector<std::uint32_t> groups_of(const Parameter& parameter) {
  const std::size_t n = parameter.labels.size();
  std::vector<std::uint32_t> groups(n);
  std::iota(groups.begin(), groups.end(), 0u);
  if (!parameter.numeric || n <= kMostGroups) return groups;
  std::vector<std::uint32_t> order = groups;
  std::vector<double> numbers;
  for (const std::string& label : parameter.labels) numbers.push_back(std::strtod(label.c_str(), nullptr));
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return numbers[a] < numbers[b]; });
  for (std::size_t rank = 0; rank < n; ++rank) {
    groups[order[rank]] = static_cast<std::uint32_t>(rank * kMostGroups / n);
  }
  return groups;
}

Shares explained_shares(const Space& space, std::size_t objective, std::span<const ResultRow> rows) {
  std::map<std::uint64_t, const ResultRow*> by_point;
  for (const ResultRow& row : rows) by_point[row.point] = &row;
  Values values;
  std::vector<const SweepPoint*> points;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const SweepPoint& point : space.points) {
    const auto found = by_point.find(point.number);
    if (found == by_point.end()) continue;
    const std::optional<double> value = value_of(*found->second, objective);
    if (!value) continue;
    values.push_back(value);
    points.push_back(&point);
    least = std::min(least, *value);
    most = std::max(most, *value);
  }
  Shares out;
  out.logarithm = least > 0 && most > kSkewed * least;
  if (out.logarithm) {
    for (auto& v : values) v = math::log(*v);
  }
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const std::vector<std::uint32_t> by_level = groups_of(space.parameters[p]);
    std::vector<std::uint32_t> groups;
    for (const SweepPoint* point : points) groups.push_back(by_level[point->levels[p]]);
    out.shares.push_back(explained(values, groups));
  }
  return out;
}

std::vector<ContrastCell> contrast_cells(const Space& space, std::uint32_t parameter, std::size_t objective,
                                         std::span<const ResultRow> rows) {
  std::map<std::uint64_t, const ResultRow*> by_point;
  for (const ResultRow& row : rows) by_point[row.point] = &row;
  const bool less = space.objectives[objective].less_is_better;
  std::map<std::vector<std::uint32_t>, std::size_t> at;
  std::vector<ContrastCell> cells;
  struct Entry {
    double value;  // the least is the best
    std::uint32_t level;
    const ResultRow* row;
  };
  std::vector<std::vector<Entry>> values;  // by cell
  for (const SweepPoint& point : space.points) {
    std::vector<std::uint32_t> levels = point.levels;
    levels[parameter] = 0;
    const auto [found, fresh] = at.try_emplace(levels, cells.size());
    if (fresh) {
      cells.push_back({.levels = levels, .best = {}, .margin = {}});
      values.emplace_back();
    }
    ContrastCell& cell = cells[found->second];
    const auto row = by_point.find(point.number);
    if (row == by_point.end()) {
      ++cell.open;
    } else if (const auto value = value_of(*row->second, objective)) {
      values[found->second].push_back({less ? *value : -*value, point.levels[parameter], row->second});
    } else {
      ++cell.missing;
    }
  }
  for (std::size_t c = 0; c < cells.size(); ++c) {
    ContrastCell& cell = cells[c];
    std::vector<Entry>& entries = values[c];
    if (is_latency(space.objectives[objective])) {
      double most = 0;
      for (const Entry& entry : entries) most = std::max(most, entry.row->completed);
      cell.incomplete = static_cast<std::uint32_t>(
          std::erase_if(entries, [&](const Entry& entry) { return !as_complete(*entry.row, most); }));
    }
    cell.present = static_cast<std::uint32_t>(entries.size());
    if (cell.open > 0 || entries.empty()) continue;
    std::ranges::sort(entries, {}, [](const Entry& e) { return std::pair(e.value, e.level); });
    const Entry& best = entries[0];
    cell.best = best.level;
    if (entries.size() < 2) continue;
    const auto margin_over = [&](const Entry& other) {  // of equal ones 0, of zeros too
      return other.value > best.value ? (other.value - best.value) / std::abs(other.value) : 0;
    };
    const double margin = margin_over(entries[1]);
    if (std::isfinite(margin)) cell.margin = margin;
    if (margin < kTie) continue;
    cell.unmeasured =
        std::ranges::any_of(entries, [&](const Entry& e) { return none_measured(*e.row, objective); });
    cell.undecided =
        cell.unmeasured || std::any_of(entries.begin() + 1, entries.end(), [&](const Entry& other) {
          const double error = std::max(error_of(*best.row, objective), error_of(*other.row, objective));
          return margin_over(other) <= error;
        });
  }
  return cells;
}

// ---------------------------------------------------------------------------------------- the report

namespace {

std::string number_text(double value) {
  const double size = std::abs(value);
  if (size >= 1e6) return fmt::format("{:.4g}", value);
  return size >= 1000 ? fmt::format("{:.0f}", value) : fmt::format("{:.4g}", value);
}

std::string plural(std::size_t n, std::string_view word) {
  return fmt::format("{} {}{}", n, word, n == 1 ? "" : "s");
}

// In lines of at most kWidth columns, those after the first indented by `indent`.
std::string folded(std::string_view text, std::size_t indent) {
  std::string out;
  wrap(out, indent, text, kWidth);
  return out;
}

std::string cut(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : text.substr(0, width - 2) + "..";
}

// The last steps of a dotted name that no other parameter ends in.
std::vector<std::string> short_names(const std::vector<Parameter>& parameters) {
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters) {
    const std::string& name = parameter.name;
    std::size_t dot = name.rfind('.');
    const auto ambiguous = [&] {
      return std::ranges::count_if(parameters, [&](const Parameter& other) {
               return other.name == name.substr(dot + 1) || other.name.ends_with(name.substr(dot));
             }) > 1;
    };
    while (dot != std::string::npos && dot > 0 && ambiguous()) dot = name.rfind('.', dot - 1);
    names.push_back(dot == std::string::npos ? name : name.substr(dot + 1));
  }
  return names;
}

// Columns two blanks apart, the last `numbers` of them to the right.
std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t indent,
                  bool right_but_first) {
  std::vector<std::size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line(indent, ' ');
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c > 0) line += "  ";
      line += right_but_first && c > 0 ? fmt::format("{:>{}}", row[c], widths[c])
                                       : fmt::format("{:<{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::size_t widest(const std::string& text) {
  std::size_t width = 0, from = 0;
  while (from < text.size()) {
    const std::size_t end = std::min(text.find('\n', from), text.size());
    width = std::max(width, end - from);
    from = end + 1;
  }
  return width;
}

/// The rows that belong to a point, in the order of the points, as columns.
struct Columns {
  std::vector<const ResultRow*> rows;
  std::vector<const SweepPoint*> points;
  std::vector<Values> objectives;     ///< by objective; of rows that may be compared by it
  std::vector<std::size_t> left_out;  ///< by objective: rows with a value that may not
  double least = 1, most = 0;         ///< of the shares of requests that rows completed
};

Columns columns_of(const Space& space, const std::vector<ResultRow>& rows) {
  std::map<std::uint64_t, const ResultRow*> by_point;
  for (const ResultRow& row : rows) by_point[row.point] = &row;
  const std::vector<Values> values = comparable(space, rows);
  Columns columns;
  columns.objectives.resize(space.objectives.size());
  columns.left_out.resize(space.objectives.size());
  for (const SweepPoint& point : space.points) {
    const auto found = by_point.find(point.number);
    if (found == by_point.end()) continue;
    columns.rows.push_back(found->second);
    columns.points.push_back(&point);
    const ResultRow& row = *found->second;
    if (row.finished) {
      columns.least = std::min(columns.least, row.completed);
      columns.most = std::max(columns.most, row.completed);
    }
    for (std::size_t o = 0; o < space.objectives.size(); ++o) {
      const std::optional<double>& value = values[static_cast<std::size_t>(&row - rows.data())][o];
      columns.objectives[o].push_back(value);
      columns.left_out[o] += value_of(row, o) && !value;
    }
  }
  return columns;
}

// "rate 2, block_size 16, ...".
std::string levels_text(const Space& space, const SweepPoint& point) {
  std::vector<std::string> parts;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    const Parameter& parameter = space.parameters[p];
    parts.push_back(fmt::format("{}{}{}", parameter.name, kJoined, parameter.labels[point.levels[p]]));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

// Why rows with a value are not compared by it.
std::string left_out_text(const Columns& columns, std::size_t o) {
  const std::size_t n = columns.left_out[o];
  if (n == 0) return "";
  return folded(
      fmt::format("  {} left out: {} completed fewer requests (down to {}) than the best {}, "
                  "and a latency is of completed requests alone",
                  plural(n, "point"), n == 1 ? "it" : "they", percent(columns.least), percent(columns.most)),
      4);
}

std::string front_text(const Space& space, const Columns& columns) {
  std::vector<Values> rows(columns.rows.size());
  std::vector<std::string> names;
  const auto less = std::make_unique<bool[]>(space.objectives.size());
  for (std::size_t o = 0; o < space.objectives.size(); ++o) {
    names.push_back(space.objectives[o].name);
    less[o] = space.objectives[o].less_is_better;
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].push_back(columns.objectives[o][i]);
  }
  std::vector<std::size_t> front =
      pareto_front(rows, std::span<const bool>(less.get(), space.objectives.size()));
  std::string out = folded(fmt::format("Pareto front of {}: {} of {}", fmt::join(names, ", "), front.size(),
                                       plural(rows.size(), "point")),
                           2);
  const std::size_t latency =
      static_cast<std::size_t>(std::ranges::max_element(columns.left_out) - columns.left_out.begin());
  out += left_out_text(columns, latency);
  if (front.empty()) return out + "  no point has a value of each\n";
  const std::size_t whole = front.size();
  std::vector<std::size_t> different;  // the first of those that are equal in all
  for (const std::size_t i : front) {
    if (std::ranges::none_of(different, [&](std::size_t d) { return rows[d] == rows[i]; }))
      different.push_back(i);
  }
  front = std::move(different);
  std::ranges::stable_sort(front, [&](std::size_t a, std::size_t b) {
    return less[0] ? *rows[a][0] < *rows[b][0] : *rows[a][0] > *rows[b][0];
  });
  std::vector<std::size_t> shown;
  const std::size_t n = std::min(front.size(), kShownFront);
  for (std::size_t i = 0; i < n; ++i) shown.push_back(front[n == 1 ? 0 : i * (front.size() - 1) / (n - 1)]);

  const std::vector<std::string> shorts = short_names(space.parameters);
  std::vector<std::vector<std::string>> cells{{"point"}};
  for (std::size_t p = 0; p < shorts.size(); ++p) cells[0].push_back(shorts[p]);
  for (const std::string& name : names) cells[0].push_back(name);
  for (const std::size_t i : shown) {
    std::vector<std::string>& line = cells.emplace_back();
    line.push_back(std::to_string(columns.points[i]->number));
    for (std::size_t p = 0; p < shorts.size(); ++p) {
      line.push_back(space.parameters[p].labels[columns.points[i]->levels[p]]);
    }
    for (std::size_t o = 0; o < names.size(); ++o) line.push_back(number_text(*rows[i][o]));
  }
  const std::string wide = table(cells, 2, true);
  if (widest(wide) <= kWidth) {
    out += wide;
  } else {  // too many columns: the parameters stand under each point
    for (auto& line : cells)
      line.erase(line.begin() + 1, line.end() - static_cast<std::ptrdiff_t>(names.size()));
    const std::string narrow = table(cells, 2, true);
    std::size_t from = 0;
    for (std::size_t i = 0; i <= shown.size(); ++i) {
      const std::size_t end = narrow.find('\n', from) + 1;
      out += narrow.substr(from, end - from);
      from = end;
      if (i > 0) out += folded("         " + levels_text(space, *columns.points[shown[i - 1]]), 9);
    }
  }
  if (shown.size() < front.size()) {
    out += fmt::format("  and {} more between them\n", front.size() - shown.size());
  }
  if (front.size() < whole) {
    out += fmt::format("  and {} that equal one of these in all objectives\n", whole - front.size());
  }
  return out;
}

// What each parameter explains alone, largest first, and what is left.
std::string shares_text(const Space& space, const std::vector<ResultRow>& rows, std::size_t objective) {
  const Shares all = explained_shares(space, objective, rows);
  const auto n = static_cast<std::size_t>(std::ranges::count_if(
      rows, [&](const ResultRow& row) { return value_of(row, objective).has_value(); }));
  std::vector<std::pair<double, std::string>> shares;
  double left = 1, chance = 0;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    if (space.parameters[p].labels.size() < 2) continue;
    const std::optional<double> share = all.shares[p];
    if (!share) return "  nothing to explain: all values are equal\n";
    shares.emplace_back(*share, space.parameters[p].name);
    left -= *share;
    const std::vector<std::uint32_t> by_level = groups_of(space.parameters[p]);
    const auto used = static_cast<double>(1 + *std::ranges::max_element(by_level));
    chance = std::max(chance, n > 1 ? (used - 1) / (static_cast<double>(n) - 1) : 1.0);
  }
  std::ranges::stable_sort(shares, [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> parts;
  for (const auto& [share, name] : shares)
    parts.push_back(fmt::format("{}{}{}", name, kJoined, percent(share)));
  std::string text = fmt::format("  what mattered: {}; ", fmt::join(parts, ", "));
  constexpr double kRounding = 1e-9;  // shares of a whole grid sum to at most 1, but for that
  text += left >= -kRounding ? fmt::format("interactions{}{}", kJoined, percent(std::max(left, 0.0)))
                             : std::string("they overlap, since not all combinations are there");
  if (all.logarithm) text += " (shares of the logarithm's variance)";
  if (chance > kWorthSaying) {
    text += fmt::format("; with {}, chance alone explains up to {}", plural(n, "value"), percent(chance));
  }
  return folded(text, 4);
}

std::string_view sentence_of(const Objective& objective) {
  const auto* named = std::ranges::find(kObjectives, objective.path, &NamedObjective::path);
  if (named != std::end(kObjectives)) return named->sentence;
  return objective.less_is_better ? "less is better" : "more is better";
}

std::string objective_text(const Space& space, const Columns& columns, const std::vector<ResultRow>& rows,
                           std::size_t o) {
  const Objective& objective = space.objectives[o];
  const std::string head = fmt::format("{} ({})", objective.name, sentence_of(objective));
  const std::optional<std::size_t> best = best_of(columns.objectives[o], objective.less_is_better);
  if (!best) return folded(head + ": no point has a value", 2);
  const SweepPoint& point = *columns.points[*best];
  return folded(fmt::format("{}: best {} at point {}", head, number_text(*columns.objectives[o][*best]),
                            point.number),
                2) +
         folded("  " + levels_text(space, point), 4) + left_out_text(columns, o) +
         shares_text(space, rows, o);
}

// ---------------------------------------------------------------------------------------------- maps

/// What a cell says: a level won, or why none did.
enum : std::uint32_t {
  kUndecided = UINT32_MAX - 3,
  kEven = UINT32_MAX - 2,
  kNobody = UINT32_MAX - 1,
  kOpen = UINT32_MAX
};

std::uint32_t outcome_of(const ContrastCell& cell) {
  if (cell.open > 0) return kOpen;
  if (!cell.best) return kNobody;
  if (cell.margin && *cell.margin < kTie) return kEven;
  return cell.undecided ? std::uint32_t{kUndecided} : *cell.best;
}

// One letter for each level: its first that is still free; for numbers A, B, C, not to look like margins.
std::vector<char> letters_of(const Parameter& parameter) {
  std::vector<char> letters;
  const auto take = [&](char c) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    if (c < 'A' || c > 'Z' || std::ranges::find(letters, c) != letters.end()) return false;
    letters.push_back(c);
    return true;
  };
  for (const std::string& label : parameter.labels) {
    const bool number = parameter.numeric || (label[0] >= '0' && label[0] <= '9');
    if (!number && std::ranges::any_of(label, take)) continue;
    constexpr std::string_view kOthers = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    if (!std::ranges::any_of(kOthers, take)) letters.push_back('#');
  }
  return letters;
}

/// An axis of a map: a parameter's groups.
struct MapAxis {
  std::size_t parameter = 0;
  std::vector<std::uint32_t> group_of;  ///< by level
  std::vector<std::string> labels;      ///< by group
};

MapAxis axis_of(const Space& space, std::size_t p) {
  const Parameter& parameter = space.parameters[p];
  MapAxis axis{p, groups_of(parameter), {}};
  const std::size_t groups = 1 + *std::ranges::max_element(axis.group_of);
  for (std::size_t g = 0; g < groups; ++g) {
    std::vector<std::string> members;
    for (std::size_t level = 0; level < parameter.labels.size(); ++level) {
      if (axis.group_of[level] == g) members.push_back(parameter.labels[level]);
    }
    std::ranges::stable_sort(members, [&](const std::string& a, const std::string& b) {
      return parameter.numeric && std::strtod(a.c_str(), nullptr) < std::strtod(b.c_str(), nullptr);
    });
    axis.labels.push_back(members.size() == 1 ? members[0] : members.front() + ".." + members.back());
  }
  return axis;
}

// How well a parameter alone tells who wins: Goodman and Kruskal's tau without its constants.
double tells(const std::vector<ContrastCell>& cells, const MapAxis& axis) {
  std::map<std::uint32_t, std::map<std::uint32_t, double>> counts;
  for (const ContrastCell& cell : cells)
    ++counts[axis.group_of[cell.levels[axis.parameter]]][outcome_of(cell)];
  double sum = 0;
  for (const auto& [group, outcomes] : counts) {
    double all = 0, squares = 0;
    for (const auto& [outcome, n] : outcomes) all += n, squares += n * n;
    sum += squares / all;
  }
  return sum;
}

char sign_of(std::uint32_t outcome, const std::vector<char>& letters) {
  switch (outcome) {
    case kUndecided:
      return '?';
    case kEven:
      return '=';
    case kNobody:
      return '-';
    case kOpen:
      return '*';
    default:
      return letters[outcome];
  }
}

// The best has no rival: none of the others has a value, or one that is compared.
bool alone(const ContrastCell& cell) {
  return cell.present == 1 && cell.missing + cell.incomplete > 0;
}

// "C 12", a margin; "?C 4", one that decides nothing; or where several cells are one, how many each wins: "C8
// =4".
std::string cell_text(const std::vector<const ContrastCell*>& cells, const std::vector<char>& letters,
                      bool counted) {
  if (cells.empty()) return ".";
  if (!counted) {
    const ContrastCell& cell = *cells[0];
    const std::uint32_t outcome = outcome_of(cell);
    std::string sign(1, sign_of(outcome, letters));
    if (outcome >= kEven) return sign;
    if (outcome == kUndecided) sign += letters[*cell.best];
    if (cell.margin) return fmt::format("{} {:.0f}", sign, 100 * *cell.margin);
    return alone(cell) ? sign + " !" : sign;
  }
  std::map<std::uint32_t, std::size_t> counts;
  for (const ContrastCell* cell : cells) ++counts[outcome_of(*cell)];
  std::vector<std::pair<std::uint32_t, std::size_t>> order(counts.begin(), counts.end());
  std::ranges::stable_sort(order, [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (const auto& [outcome, n] : order) {
    text += fmt::format("{}{}{}", text.empty() ? "" : " ", sign_of(outcome, letters), n);
  }
  return text;
}

std::string map_of(const std::vector<ContrastCell>& cells, const std::vector<std::string>& names,
                   const MapAxis* rows, const MapAxis& columns, const std::vector<char>& letters,
                   bool counted) {
  const std::size_t height = rows == nullptr ? 1 : rows->labels.size();
  std::vector<std::vector<std::vector<const ContrastCell*>>> grid(
      height, std::vector<std::vector<const ContrastCell*>>(columns.labels.size()));
  for (const ContrastCell& cell : cells) {
    const std::size_t r = rows == nullptr ? 0 : rows->group_of[cell.levels[rows->parameter]];
    grid[r][columns.group_of[cell.levels[columns.parameter]]].push_back(&cell);
  }
  std::vector<std::vector<std::string>> lines{
      {rows == nullptr ? names[columns.parameter] : names[rows->parameter]}};
  lines[0].insert(lines[0].end(), columns.labels.begin(), columns.labels.end());
  for (std::size_t r = 0; r < height; ++r) {
    std::vector<std::string>& line = lines.emplace_back();
    line.push_back(rows == nullptr ? "" : rows->labels[r]);
    for (const auto& at : grid[r]) line.push_back(cell_text(at, letters, counted));
  }
  std::string out = table(lines, 4, true);
  if (rows != nullptr) {
    const std::size_t first = 4 + std::max(lines[0][0].size(), [&] {
                                std::size_t width = 0;
                                for (const auto& label : rows->labels) width = std::max(width, label.size());
                                return width;
                              }());
    out = std::string(first + 2, ' ') + cut(names[columns.parameter], kWidth - first - 2) + "\n" + out;
  }
  return out;
}

// "colocated 12, push 3, even 1"
std::string counts_text(const Parameter& parameter, const std::map<std::uint32_t, std::size_t>& counts) {
  std::vector<std::string> parts;
  for (const auto& [outcome, n] : counts) {
    const std::string name = outcome == kOpen        ? "not run"
                             : outcome == kNobody    ? "no value"
                             : outcome == kEven      ? "tie"
                             : outcome == kUndecided ? "undecided"
                                                     : parameter.labels[outcome];
    parts.push_back(fmt::format("{} {}", name, n));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string verdict_text(const Parameter& parameter, const std::vector<ContrastCell>& cells) {
  struct Wins {
    std::size_t n = 0, alone = 0, measured = 0;
    double least = std::numeric_limits<double>::infinity(), most = 0;
  };
  std::vector<Wins> wins(parameter.labels.size());
  std::size_t undecided = 0, even = 0, nobody = 0, open = 0, incomplete = 0, unmeasured = 0;
  for (const ContrastCell& cell : cells) {
    const std::uint32_t outcome = outcome_of(cell);
    incomplete += cell.incomplete;
    if (outcome == kUndecided) ++(cell.unmeasured ? unmeasured : undecided);
    even += outcome == kEven;
    nobody += outcome == kNobody;
    open += outcome == kOpen;
    if (outcome >= kUndecided) continue;
    Wins& w = wins[outcome];
    ++w.n;
    w.alone += alone(cell);
    if (!cell.margin) continue;
    ++w.measured;
    w.least = std::min(w.least, *cell.margin);
    w.most = std::max(w.most, *cell.margin);
  }
  std::vector<std::size_t> order(wins.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return wins[a].n > wins[b].n; });
  std::vector<std::string> parts;
  if (wins[order[0]].n == 0)
    parts.push_back(fmt::format("none wins any of {}", plural(cells.size(), "cell")));
  for (const std::size_t level : order) {
    if (wins[order[0]].n == 0) break;
    const Wins& w = wins[level];
    std::string text =
        parts.empty()
            ? fmt::format("{} wins {} of {}", parameter.labels[level], w.n, plural(cells.size(), "cell"))
            : fmt::format("{} {}", parameter.labels[level], w.n == 0 ? "none" : std::to_string(w.n));
    if (w.measured > 0) {
      const std::string from = percent(w.least), to = percent(w.most);
      text += from == to ? ", by " + to : fmt::format(", by {} to {}", from.substr(0, from.find(' ')), to);
    }
    if (w.alone > 0) {
      text += fmt::format("{} as the only one that is compared",
                          w.alone == w.n ? "," : fmt::format(", in {}", w.alone));
    }
    parts.push_back(text);
  }
  if (even > 0) parts.push_back(fmt::format("{} a tie, within {:.1f} %", even, 100 * kTie));
  if (undecided > 0)
    parts.push_back(
        fmt::format("{} UNDECIDED, by less than such figures miss measured ones in the median", undecided));
  if (unmeasured > 0) {
    parts.push_back(fmt::format("{} UNDECIDED, since nothing measured says by how much such figures are off",
                                unmeasured));
  }
  if (nobody > 0) parts.push_back(fmt::format("{} where none has a value", nobody));
  if (open > 0) parts.push_back(fmt::format("{} not run to the end", open));
  if (incomplete > 0) {
    parts.push_back(fmt::format("{} not compared, since {} completed fewer requests than others in {} cell",
                                plural(incomplete, "point"), incomplete == 1 ? "it" : "they",
                                incomplete == 1 ? "its" : "their"));
  }
  return fmt::format("{}.", fmt::join(parts, "; "));
}

std::string contrast_text(const Space& space, const Contrast& contrast, const std::vector<ResultRow>& rows) {
  const Parameter& parameter = space.parameters[contrast.parameter];
  const auto objective = std::ranges::find(space.objectives, contrast.objective.path, &Objective::path);
  std::string out = folded(fmt::format("{} by {} ({}), all else equal", parameter.name,
                                       contrast.objective.name, sentence_of(contrast.objective)),
                           2);
  if (objective == space.objectives.end()) return out + "  not among the objectives of these results\n";
  const std::vector<ContrastCell> cells = contrast_cells(
      space, contrast.parameter, static_cast<std::size_t>(objective - space.objectives.begin()), rows);

  std::vector<MapAxis> others;
  for (std::size_t p = 0; p < space.parameters.size(); ++p) {
    if (p != contrast.parameter && space.parameters[p].labels.size() > 1) others.push_back(axis_of(space, p));
  }
  std::ranges::stable_sort(
      others, [&](const MapAxis& a, const MapAxis& b) { return tells(cells, a) > tells(cells, b); });
  if (others.empty()) return out + folded("  " + verdict_text(parameter, cells), 2);

  const std::vector<std::string> names = short_names(space.parameters);
  const std::vector<char> letters = letters_of(parameter);
  const bool binned = std::ranges::any_of(
      others, [&](const MapAxis& axis) { return axis.labels.size() < axis.group_of.size(); });
  const bool counted = others.size() > 2 || binned;
  const MapAxis* second = others.size() > 1 ? &others[1] : nullptr;
  // The longer axis downwards, unless that is too wide.
  std::string map;
  if (second == nullptr) {
    map = map_of(cells, names, nullptr, others[0], letters, counted);
    if (widest(map) > kWidth) map.clear();
  } else {
    const bool first_down = others[0].labels.size() >= second->labels.size();
    for (const bool down : {first_down, !first_down}) {
      map = down ? map_of(cells, names, &others[0], *second, letters, counted)
                 : map_of(cells, names, second, others[0], letters, counted);
      if (widest(map) <= kWidth) break;
      map.clear();
    }
  }
  out += map;
  std::vector<std::string> legend;
  for (std::size_t level = 0; level < letters.size(); ++level) {
    legend.push_back(fmt::format("{} {}", letters[level], parameter.labels[level]));
  }
  const auto any = [&](std::uint32_t outcome) {
    return std::ranges::any_of(cells, [&](const ContrastCell& cell) { return outcome_of(cell) == outcome; });
  };
  if (any(kEven)) legend.push_back(fmt::format("= a tie, within {:.1f} %", 100 * kTie));
  if (any(kUndecided)) {
    const bool unmeasured = std::ranges::any_of(cells, &ContrastCell::unmeasured);
    const bool measured = std::ranges::any_of(
        cells, [](const ContrastCell& cell) { return outcome_of(cell) == kUndecided && !cell.unmeasured; });
    legend.push_back(fmt::format("? UNDECIDED, {}{}{}{}", counted ? "" : "though ahead: ",
                                 measured ? "by less than such figures miss measured ones" : "",
                                 measured && unmeasured ? ", or " : "",
                                 unmeasured ? "nothing measured says by how much they are off" : ""));
  }
  if (any(kNobody)) legend.emplace_back("- no value");
  if (any(kOpen)) legend.emplace_back("* not run");
  std::string key = fmt::format("    {}", fmt::join(legend, ", "));
  if (counted) {
    key += "; how many cells each wins";
  } else {
    key += "; the number is the margin over the second best in %";
    const bool any_alone = std::ranges::any_of(
        cells, [](const ContrastCell& cell) { return cell.best && !cell.margin && alone(cell); });
    if (any_alone) key += ", ! = the only one that is compared";
  }
  if (!map.empty()) out += folded(key, 4);
  const std::size_t mapped = map.empty() ? 0 : std::min<std::size_t>(others.size(), 2);
  std::vector<std::vector<std::string>> list;
  for (std::size_t o = mapped; o < others.size(); ++o) {
    const MapAxis& axis = others[o];
    for (std::size_t g = 0; g < axis.labels.size(); ++g) {
      std::map<std::uint32_t, std::size_t> counts;
      for (const ContrastCell& cell : cells) {
        if (axis.group_of[cell.levels[axis.parameter]] == g) ++counts[outcome_of(cell)];
      }
      if (counts.empty()) continue;
      list.push_back({g == 0 ? cut(names[axis.parameter], 30) : "", cut(axis.labels[g], 30),
                      counts_text(parameter, counts)});
    }
  }
  if (!list.empty()) {
    for (auto& line : list) line[2] = cut(line[2], 60);
    out += table(list, 4, false);
  }
  return out + folded("  " + verdict_text(parameter, cells), 2);
}

}  // namespace

std::string sweep_report(const Space& space, const std::vector<ResultRow>& rows) {
  const Columns columns = columns_of(space, rows);
  const auto failed = static_cast<std::size_t>(
      std::ranges::count_if(columns.rows, [](const ResultRow* row) { return !row->finished; }));
  std::string out;
  if (columns.rows.size() < space.points.size()) {
    out += fmt::format("Of {} {} have run; what follows is of these.\n", plural(space.points.size(), "point"),
                       columns.rows.size());
  }
  if (failed > 0) {
    out += fmt::format("{} failed and {} no value.\n", plural(failed, "point"), failed == 1 ? "has" : "have");
  }
  if (!out.empty()) out += "\n";
  if (columns.rows.empty()) return out;
  if (space.objectives.size() > 1) out += front_text(space, columns) + "\n";
  for (std::size_t o = 0; o < space.objectives.size(); ++o)
    out += objective_text(space, columns, rows, o) + "\n";
  for (const Contrast& contrast : space.contrasts) out += contrast_text(space, contrast, rows) + "\n";
  out.pop_back();
  return out;
}

}  // namespace pdsim
