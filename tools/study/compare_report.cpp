// What people and scripts read of a comparison: the table, the document, the rows per request.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "models/csv.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/study/compare.hpp"
#include "tools/study/statistics.hpp"
#include "tools/study/text.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;

constexpr std::size_t kColumns = 110, kLabel = 24;

// A figure's values by replication; none of a run that was not run.
std::span<const double> values_of(const Compared& run, std::size_t f) {
  return run.figures.empty() ? std::span<const double>() : std::span<const double>(run.figures[f]);
}

// ---------------------------------------------------------------------------------------------- text

std::string signed_number(double value) {
  const std::string text = grouped(value, std::abs(value) < 99.95 ? 1 : 0);
  return value > 0 && text.find_first_not_of("0.,") != std::string::npos ? "+" + text : text;
}

// Characters, of UTF-8.
// `lead`, and text beside it from column `indent` on.
void wrap(std::string& out, std::string_view lead, std::string_view text, std::size_t indent) {
  fmt::format_to(std::back_inserter(out), "{:<{}}", lead, indent);
  ::pdsim::wrap(out, indent, text, kColumns);
}

// A line of a table; without cells, the title of those that follow.
struct Line {
  std::string label;
  std::vector<std::string> cells;  // by column
};

// As many columns side by side as there is room for, then the others below.
void put_table(std::string& out, const std::vector<std::string>& names, const std::vector<Line>& lines) {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < names.size(); ++c) {
    std::size_t width = columns_of(names[c]);
    for (const Line& line : lines) {
      if (!line.cells.empty()) width = std::max(width, columns_of(line.cells[c]));
    }
    widths.push_back(width + 2);
  }
  std::size_t label = kLabel;
  for (const Line& line : lines) label = std::max(label, line.label.size() + (line.cells.empty() ? 0 : 2));
  for (std::size_t begin = 0; begin < names.size();) {
    std::size_t end = begin, width = label;
    while (end < names.size() && (end == begin || width + widths[end] <= kColumns)) width += widths[end++];
    if (begin > 0) out += '\n';
    out += std::string(label, ' ');
    for (std::size_t c = begin; c < end; ++c) out += fmt::format("{:>{}}", names[c] + " ", widths[c]);
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
    for (const Line& line : lines) {
      out += fmt::format("{:<{}}", line.label, label);
      for (std::size_t c = begin; c < end && !line.cells.empty(); ++c) {
        const bool marked = line.cells[c].ends_with('*');
        out += fmt::format("{:>{}}", line.cells[c] + (marked ? "" : " "), widths[c]);
      }
      out.erase(out.find_last_not_of(' ') + 1);
      out += '\n';
    }
    begin = end;
  }
}

// Rows of which one is better than another, and where errors say by how much that must be.
bool has_a_best(const ComparedFigure& figure) {
  return figure.section != "requests" && figure.section != "KV cache" && figure.section != "cost model";
}

std::optional<std::size_t> best_of_row(const Comparison& c, std::size_t f) {
  const ComparedFigure& figure = compared_figures()[f];
  if (!has_a_best(figure) || c.interrupted) return {};
  std::vector<Contender> contenders;
  std::size_t having = 0;
  for (const Compared& run : c.runs) {
    contenders.push_back(contender_of(c, run, values_of(run, f)));
    having += contenders.back().value ? 1 : 0;
  }
  if (having < 2) return {};
  const Objective objective{std::string(figure.path), std::string(figure.path), figure.less_is_better};
  const Verdict verdict = judge(objective, contenders);
  return verdict.decision == Decision::decided && verdict.second ? verdict.winner : std::nullopt;
}

// Four significant digits or so of the smallest in the row, the same for all of it.
int decimals_of(const std::vector<std::optional<double>>& values, bool count) {
  double least = -1;
  bool whole = true;
  for (const auto& v : values) {
    if (!v || *v == 0) continue;
    least = least < 0 ? std::abs(*v) : std::min(least, std::abs(*v));
    whole = whole && *v == std::floor(*v);
  }
  if (count && whole) return 0;
  return least < 0 ? 0 : least >= 999.5 ? 0 : least >= 9.995 ? 1 : least >= 0.9995 ? 2 : 3;
}

Line figure_line(const Comparison& c, std::size_t f) {
  const ComparedFigure& figure = compared_figures()[f];
  Line line{"  " + std::string(figure.label), {}};
  std::vector<std::optional<double>> values;
  for (const Compared& run : c.runs) {
    std::optional<double> value = mean_of(c, values_of(run, f));
    if (value) *value *= figure.scale;
    values.push_back(value);
  }
  const int decimals = decimals_of(values, figure.section == "requests");
  const auto best = best_of_row(c, f);
  for (std::size_t i = 0; i < c.runs.size(); ++i) {
    std::string cell = values[i] ? grouped(*values[i], decimals) : "-";
    if (values[i] && c.replications > 1) {
      const auto interval = interval_of(c, c.runs[i], values_of(c.runs[i], f));
      if (interval && interval->high > interval->low) {
        cell += " ± " + grouped((interval->high - interval->low) / 2 * figure.scale, decimals);
      }
    }
    if (best == i) cell += '*';
    line.cells.push_back(std::move(cell));
  }
  return line;
}

template <typename Text>
Line line_of(const Comparison& c, std::string label, Text text) {
  Line line{std::move(label), {}};
  for (const Compared& run : c.runs) line.cells.push_back(text(run));
  return line;
}

std::string status_of(const Compared& run) {
  if (!run.subject.cannot.empty()) return "cannot work";
  if (!run.outcome.summary) return "not run";
  return std::string(kRunStatusNames[static_cast<std::size_t>(run.outcome.result.status)]);
}

std::string_view grade_of(const Evidence& evidence) {
  return kGradeNames[static_cast<std::size_t>(evidence.grade)];
}

void put_figures(std::string& out, const Comparison& c, const std::vector<std::string>& names) {
  std::vector<Line> lines;
  lines.push_back(line_of(c, "deployment", [](const Compared& r) { return r.kind.empty() ? "-" : r.kind; }));
  if (std::ranges::any_of(c.runs, [](const Compared& r) { return status_of(r) != "finished"; })) {
    lines.push_back(line_of(c, "status", status_of));
  }
  lines.push_back(line_of(c, "GPUs held of rented", [](const Compared& r) {
    return r.gpus_rented == 0 ? std::string("-") : fmt::format("{} of {}", r.gpus_held(), r.gpus_rented);
  }));
  lines.push_back(line_of(c, "USD/h", [](const Compared& r) {
    return r.usd_per_hour ? grouped(*r.usd_per_hour, 2) : std::string("-");
  }));
  std::string_view section;
  for (std::size_t f = 0; f < compared_figures().size(); ++f) {
    if (compared_figures()[f].section != section) {
      section = compared_figures()[f].section;
      lines.push_back({std::string(section), {}});
    }
    lines.push_back(figure_line(c, f));
  }
  put_table(out, names, lines);
  out += fmt::format("\n* the best of its row, beyond what such figures miss{}\n",
                     c.replications > 1 ? " and what chance explains" : "");
}

void put_texts(std::string& out, const Comparison& c) {
  // The same text of several runs is said once.
  const auto put = [&](std::string_view title, const auto& text) {
    std::vector<std::pair<std::string, std::vector<std::string>>> said;
    for (const Compared& run : c.runs) {
      if (!run.outcome.summary) continue;
      const std::string of = text(run);
      if (of.empty()) continue;
      auto found = std::ranges::find(said, of, &std::pair<std::string, std::vector<std::string>>::first);
      if (found == said.end()) found = said.insert(said.end(), {of, {}});
      found->second.push_back(run.subject.name);
    }
    if (said.empty()) return;
    out += fmt::format("\n{}\n", title);
    for (const auto& [of, names] : said) {
      wrap(out, "", fmt::format("{}: {}", fmt::join(names, ", "), of), 2);
    }
  };
  put("what each run is", [](const Compared& run) { return run.subject.note; });
  put("what bounds each",
      [](const Compared& run) { return (*run.outcome.summary)["bound_by"]["text"].get<std::string>(); });
  put("evidence", [](const Compared& run) {
    const Evidence& e = run.evidence;
    const std::string grade(grade_of(e));
    std::string text = e.text.starts_with(grade) ? e.text : grade + (e.text.empty() ? "" : ": " + e.text);
    if (!e.source.empty()) text += fmt::format(" ({})", e.source);
    return text;
  });
}

void put_differences(std::string& out, const Comparison& c) {
  std::vector<const RunDifference*> paired;
  std::vector<std::string> names;
  for (const RunDifference& d : c.differences) {
    if (d.unpaired.empty()) {
      paired.push_back(&d);
      names.push_back(c.runs[d.run].subject.name);
    } else {
      wrap(
          out, "",
          fmt::format("'{}' is not compared request by request: {}.", c.runs[d.run].subject.name, d.unpaired),
          0);
    }
  }
  if (paired.empty()) return;
  out += fmt::format("\nper request, against '{}'{}\n\n", c.runs[c.baseline].subject.name,
                     c.replications > 1 ? ", on the requests as recorded" : "");
  std::vector<Line> lines;
  const auto add = [&](std::string label, const auto& cell) {
    Line line{std::move(label), {}};
    for (const RunDifference* d : paired) line.cells.push_back(cell(*d));
    lines.push_back(std::move(line));
  };
  const auto count = [](std::size_t n) { return grouped(static_cast<double>(n), 0); };
  add("completed in both", [&](const RunDifference& d) { return count(d.both); });
  if (std::ranges::any_of(paired,
                          [](const RunDifference* d) { return d->only_run + d->only_baseline > 0; })) {
    add("  only in this one", [&](const RunDifference& d) { return count(d.only_run); });
    add("  only in the other", [&](const RunDifference& d) { return count(d.only_baseline); });
  }
  for (const auto& [title, shift] :
       {std::pair("TTFT", &RunDifference::ttft), {"end to end", &RunDifference::e2e}}) {
    lines.push_back({title, {}});
    const auto of = shift;
    const auto share = [of](const RunDifference& d, std::size_t n) {
      return fmt::format("{:.1f}", 100.0 * static_cast<double>(n) /
                                       static_cast<double>((d.*of).faster + (d.*of).same + (d.*of).slower));
    };
    add("  faster, %", [&](const RunDifference& d) { return share(d, (d.*of).faster); });
    add("  same, %", [&](const RunDifference& d) { return share(d, (d.*of).same); });
    add("  slower, %", [&](const RunDifference& d) { return share(d, (d.*of).slower); });
    add("  mean change, ms", [&](const RunDifference& d) { return signed_number((d.*of).mean_ms); });
    for (std::size_t q = 1; q + 1 < kShiftQuantiles.size(); ++q) {
      add(fmt::format("    p{:g}", kShiftQuantiles[q]),
          [&](const RunDifference& d) { return signed_number((d.*of).quantiles_ms[q]); });
    }
  }
  lines.push_back({"mean change by stage, ms", {}});
  for (std::size_t i = 0; i < kStageNames.size(); ++i) {
    constexpr double kShown = 0.05;
    if (std::ranges::all_of(paired,
                            [&](const RunDifference* d) { return std::abs(d->stages_ms[i]) < kShown; })) {
      continue;
    }
    add(fmt::format("  {}", kStageNames[i]),
        [&](const RunDifference& d) { return signed_number(d.stages_ms[i]); });
  }
  add("  sum", [&](const RunDifference& d) { return signed_number(d.e2e.mean_ms); });
  lines.push_back({"mean change of TTFT, ms (faster)", {}});
  std::vector<std::pair<std::string, std::string>> groups;
  for (const RunDifference* d : paired) {
    for (const ShiftGroup& g : d->groups) {
      if (std::ranges::find(groups, std::pair(g.by, g.name)) == groups.end())
        groups.emplace_back(g.by, g.name);
    }
  }
  for (const auto& key : groups) {
    add(fmt::format("  {} {}", key.first, key.second), [&](const RunDifference& d) {
      const auto g = std::ranges::find_if(d.groups, [&](const ShiftGroup& group) {
        return group.by == key.first && group.name == key.second;
      });
      if (g == d.groups.end()) return std::string("-");
      return fmt::format("{} ({:.0f} %)", signed_number(g->ttft_ms),
                         100.0 * static_cast<double>(g->faster) / static_cast<double>(g->requests));
    });
  }
  put_table(out, names, lines);
  out += '\n';
  for (const RunDifference* d : paired) {
    for (const std::string& text : d->text) {
      wrap(out, "", fmt::format("{}: {}", c.runs[d->run].subject.name, text), 2);
    }
  }
}

// ---------------------------------------------------------------------------------------------- JSON

ordered_json or_null(std::optional<double> value) {
  return value && std::isfinite(*value) ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json or_null(const std::string& text) {
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

ordered_json interval_json(const Interval& i) {
  return {{"mean", i.mean}, {"low", i.low}, {"high", i.high}, {"n", i.n}};
}

ordered_json evidence_json(const Evidence& e) {
  const auto error = [](const GradeError& g) {
    return ordered_json{{"median", g.median}, {"p90", g.p90}, {"bias", g.bias}, {"n", g.n}, {"rows", g.rows}};
  };
  return {
      {"grade", grade_of(e)},
      {"text", e.text},
      {"source", e.source},
      {"to_do", e.to_do},
      {"errors", {{"ttft", error(e.ttft)}, {"tpot", error(e.tpot)}, {"throughput", error(e.throughput)}}}};
}

ordered_json stages_json(const std::array<double, kStageNames.size()>& stages) {
  ordered_json json = ordered_json::object();
  for (std::size_t i = 0; i < stages.size(); ++i) json[std::string(kStageNames[i])] = stages[i];
  return json;
}

ordered_json shift_json(const Shift& s) {
  ordered_json quantiles = ordered_json::object();
  for (std::size_t q = 0; q < kShiftQuantiles.size(); ++q) {
    quantiles[fmt::format("p{:g}", kShiftQuantiles[q])] = s.quantiles_ms[q];
  }
  const auto side = [](std::size_t n, double ms, const auto& stages, double prompt) {
    return ordered_json{{"requests", n},
                        {"mean_ms", ms},
                        {"stages_ms", stages_json(stages)},
                        {"median_prompt_tokens", n > 0 ? ordered_json(prompt) : ordered_json(nullptr)}};
  };
  return {{"mean_ms", s.mean_ms},
          {"quantiles_ms", quantiles},
          {"same", s.same},
          {"faster", side(s.faster, s.faster_ms, s.faster_stages_ms, s.faster_prompt)},
          {"slower", side(s.slower, s.slower_ms, s.slower_stages_ms, s.slower_prompt)}};
}

ordered_json difference_json(const Comparison& c, const RunDifference& d) {
  ordered_json json = {{"run", c.runs[d.run].subject.name},
                       {"baseline", c.runs[c.baseline].subject.name},
                       {"unpaired", or_null(d.unpaired)},
                       {"both", d.both},
                       {"only_baseline", d.only_baseline},
                       {"only_run", d.only_run},
                       {"neither", d.neither}};
  if (!d.unpaired.empty()) return json;
  json["ttft"] = shift_json(d.ttft);
  json["e2e"] = shift_json(d.e2e);
  json["stages_ms"] = stages_json(d.stages_ms);
  json["groups"] = ordered_json::array();
  for (const ShiftGroup& g : d.groups) {
    json["groups"].push_back({{"by", g.by},
                              {"name", g.name},
                              {"requests", g.requests},
                              {"faster", g.faster},
                              {"slower", g.slower},
                              {"ttft_ms", g.ttft_ms},
                              {"e2e_ms", g.e2e_ms}});
  }
  json["text"] = d.text;
  return json;
}

ordered_json run_json(const Comparison& c, const Compared& run) {
  ordered_json intervals = ordered_json::object();
  const auto put = [&](std::string_view path, std::span<const double> values) {
    if (const auto interval = interval_of(c, run, values))
      intervals[std::string(path)] = interval_json(*interval);
  };
  for (std::size_t f = 0; f < run.figures.size(); ++f) put(compared_figures()[f].path, run.figures[f]);
  put(c.objective.path, run.objective);
  return {{"scenario", run.subject.name},
          {"file", run.subject.spec.file},
          {"deployment", or_null(run.kind)},
          {"note", or_null(run.subject.note)},
          {"cannot", or_null(run.subject.cannot)},
          {"status", status_of(run)},
          {"gpus", run.gpus},
          {"gpus_rented", run.gpus_rented},
          {"usd_per_hour", or_null(run.usd_per_hour)},
          {"objective", or_null(mean_of(c, run.objective))},
          {"intervals", intervals},
          {"evidence", run.outcome.summary ? evidence_json(run.evidence) : ordered_json(nullptr)},
          {"summary", run.outcome.summary ? *run.outcome.summary : ordered_json(nullptr)}};
}

constexpr std::string_view kDecisionNames[] = {"decided", "tie", "undecided", "nobody"};

// ----------------------------------------------------------------------------------------------- CSV

std::string folder_name(const std::string& name) {
  std::string folder;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-' || c == '+';
    folder += plain ? c : '-';
  }
  return folder.find_first_not_of('.') == std::string::npos ? "run" + folder : folder;
}

}  // namespace

ordered_json comparison_json(const Comparison& c) {
  const auto name = [&](std::optional<std::size_t> i) {
    return i ? ordered_json(c.runs[*i].subject.name) : ordered_json(nullptr);
  };
  ordered_json json = {{"schema", "pdsim.comparison/1"},
                       {"status", c.interrupted ? "interrupted" : "finished"},
                       {"objective",
                        {{"name", c.objective.name},
                         {"path", c.objective.path},
                         {"less_is_better", c.objective.less_is_better}}},
                       {"replications", c.replications},
                       {"replicated_by", or_null(c.replicated_by)},
                       {"baseline", c.runs[c.baseline].subject.name},
                       {"runs", ordered_json::array()}};
  for (const Compared& run : c.runs) json["runs"].push_back(run_json(c, run));
  const Verdict& v = c.verdict;
  json["verdict"] = {{"decision", kDecisionNames[static_cast<std::size_t>(v.decision)]},
                     {"winner", name(v.winner)},
                     {"recommended", name(v.recommended)},
                     {"second", name(v.second)},
                     {"margin", v.margin},
                     {"error", v.error},
                     {"difference", v.difference ? interval_json(*v.difference) : ordered_json(nullptr)},
                     {"evidence", kGradeNames[static_cast<std::size_t>(v.evidence)]},
                     {"text", v.text},
                     {"to_decide", or_null(v.to_decide)}};
  json["equal"] = {
      {"gpus", c.equal.gpus},
      {"usd_per_hour", c.equal.usd_per_hour ? ordered_json(*c.equal.usd_per_hour) : ordered_json(nullptr)},
      {"text", c.equal.text}};
  json["differences"] = ordered_json::array();
  for (const RunDifference& d : c.differences) json["differences"].push_back(difference_json(c, d));
  json["notes"] = c.notes;
  return json;
}

std::string comparison_table(const Comparison& c) {
  std::string out;
  std::vector<std::string> names;
  for (const Compared& run : c.runs) names.push_back(run.subject.name);
  for (const Compared& run : c.runs) {
    if (!run.outcome.trace) continue;
    std::string what = fmt::format("{} runs on {}, {} requests{}", c.runs.size(), run.outcome.trace->name,
                                   grouped(static_cast<double>(run.outcome.trace->requests.size()), 0),
                                   c.interrupted ? "; INTERRUPTED, what follows is what was done" : "");
    if (c.replications > 1) {
      what += fmt::format("; {} replications by {}: means, ± half of the 95 % interval", c.replications,
                          c.replicated_by);
      what += run.replicated == Replicated::seeds
                  ? " of the mean, by Student's t"
                  : " by the bootstrap, which a longer trace narrows and more replications do not";
    }
    wrap(out, "", what, 0);
    break;
  }
  wrap(out, "", c.equal.text, 0);
  out += '\n';
  put_figures(out, c, names);
  put_texts(out, c);
  put_differences(out, c);
  if (!c.notes.empty()) out += "\nnotes\n";
  for (const std::string& note : c.notes) wrap(out, "", note, 2);
  out += '\n';
  wrap(out, "verdict", c.verdict.text, 12);
  const auto* named =
      std::ranges::find(kObjectives, std::string_view(c.objective.name), &NamedObjective::name);
  wrap(out, "by",
       named == std::end(kObjectives)
           ? fmt::format("{}, {} is better", c.objective.name, c.objective.less_is_better ? "less" : "more")
           : fmt::format("{}: {}", c.objective.name, named->sentence),
       12);
  if (!c.verdict.to_decide.empty()) wrap(out, "to decide", c.verdict.to_decide, 12);
  return out;
}

std::string differences_csv(const Comparison& c) {
  std::string out = "request_id";
  const Compared& base = c.runs[c.baseline];
  std::vector<const Compared*> runs;
  for (const Compared& run : c.runs) {
    if (run.outcome.summary) runs.push_back(&run);
  }
  std::vector<const Compared*> paired;
  for (const RunDifference& d : c.differences) {
    if (d.unpaired.empty()) paired.push_back(&c.runs[d.run]);
  }
  std::size_t rows = 0;
  for (const Compared* run : runs) {
    rows = std::max(rows, run->outcome.result.requests.size());
    const bool other = std::ranges::find(paired, run) != paired.end();
    for (const char* column : {"ttft_ns", "e2e_ns", "ttft_change_ns", "e2e_change_ns", "largest_stage",
                               "largest_stage_change_ns"}) {
      if (!other && std::string_view(column).find("ange") != std::string_view::npos) continue;
      if (!other && std::string_view(column) == "largest_stage") continue;
      out += ',' + csv_text(fmt::format("{}:{}", run->subject.name, column));
    }
  }
  out += '\n';
  for (std::size_t i = 0; i < rows; ++i) {
    out += fmt::format("{}", i);
    for (const Compared* run : runs) {
      const auto& requests = run->outcome.result.requests;
      const bool there = i < requests.size();
      const bool done = there && requests[i].status == RequestStatus::completed;
      const auto ttft = [&](const RequestRecord& r) { return r.first_token - r.arrival; };
      const bool token = done && requests[i].first_token >= 0;
      out += token ? fmt::format(",{}", ttft(requests[i])) : ",";
      out += done ? fmt::format(",{}", requests[i].e2e()) : ",";
      if (std::ranges::find(paired, run) == paired.end()) continue;
      const RequestRecord& before = base.outcome.result.requests[i];
      if (!done || before.status != RequestStatus::completed) {
        out += ",,,,";
        continue;
      }
      std::size_t largest = 0;
      const auto change = [&](std::size_t s) { return requests[i].stages[s] - before.stages[s]; };
      for (std::size_t s = 1; s < kStageNames.size(); ++s) {
        if (std::abs(change(s)) > std::abs(change(largest))) largest = s;
      }
      out += token && before.first_token >= 0 ? fmt::format(",{}", ttft(requests[i]) - ttft(before)) : ",";
      out += fmt::format(",{}", requests[i].e2e() - before.e2e());
      out += change(largest) == 0 ? ",," : fmt::format(",{},{}", kStageNames[largest], change(largest));
    }
    out += '\n';
  }
  return out;
}

std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> run_folders(
    const Comparison& c) {
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> folders;
  std::set<std::string> taken;
  for (const Compared& run : c.runs) {
    std::string folder = folder_name(run.subject.name);
    for (int n = 2; !taken.insert(folder).second; ++n) {
      folder = fmt::format("{}-{}", folder_name(run.subject.name), n);
    }
    std::vector<std::pair<std::string, std::string>> files;
    if (run.outcome.summary) {
      const RunOutcome& o = run.outcome;
      files = {
          {"summary.json", o.summary->dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n"},
          {"requests.csv", requests_csv(o.result, *o.trace, o.worker_names())},
          {"blocks.csv", blocks_csv(o.result)},
          {"scenario.json", o.loaded.in_force + "\n"}};
    }
    folders.emplace_back(std::move(folder), std::move(files));
  }
  return folders;
}

}  // namespace pdsim
