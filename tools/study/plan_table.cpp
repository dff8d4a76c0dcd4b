// The plan's report laid out for a terminal.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tools/study/plan.hpp"
#include "tools/study/text.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kColumns = 110, kLabel = 14, kName = 62;
constexpr std::size_t kMostRows = 12;

// A label, and text folded at words beside it.
void paragraph(std::string& out, std::string_view label, std::string_view text) {
  fmt::format_to(std::back_inserter(out), "{:<{}}", label, kLabel);
  wrap(out, kLabel, text, kColumns);
}

std::string number(const Json& value, const char* format, std::string_view absent = "-") {
  return value.is_null() ? std::string(absent) : fmt::format(fmt::runtime(format), value.get<double>());
}

std::string bound_text(const Json& bound) {
  return fmt::format("{} {} {:.4g} of {:.4g} ms", bound["metric"].get<std::string>().substr(0, 4),
                     bound["percentile"].get<std::string>(), bound["value"].get<double>(),
                     bound["bound"].get<double>());
}

// What a deployment costs, carries and is bound by.
void put_deployment(std::string& out, std::string_view label, const Json& o) {
  paragraph(out, label, o["name"].get<std::string>());
  const Json& at = o["at_rate"];
  const auto idle = o["idle_gpus"].get<int>();
  paragraph(out, "",
            fmt::format(
                "{:.2f} USD/h, {} USD a month of {:g} h{}; {} USD per million output tokens, {} per request "
                "within the SLO",
                o["usd_per_hour"].get<double>(), grouped(o["usd_per_month"].get<double>()), kHoursAMonth,
                idle > 0 ? fmt::format(", {} of {} GPUs idle", idle, o["gpus"].get<int>()) : "",
                number(at["usd_per_million_output_tokens"], "{:.2f}"),
                number(at["usd_per_request_in_slo"], "{:.5f}")));
  std::string met;
  for (const Json& bound : at["slo"]) met += (met.empty() ? "" : ", ") + bound_text(bound);
  paragraph(out, "", fmt::format("{}; {}", met, at["bound_by"]["text"].get<std::string>()));
  std::string carries = fmt::format("carries {}{:.3g} requests/s, {:.2f} times what is asked",
                                    o["capacity_is_more"].get<bool>() ? "more than " : "",
                                    o["capacity"].get<double>(), o["headroom"].get<double>());
  if (const Json& capacity = o["at_capacity"]; !capacity.is_null()) {
    if (capacity.contains("nearest")) {
      carries += fmt::format("; there, where {}", bound_text(capacity["nearest"]));
    } else {
      carries += "; there";
    }
    carries += fmt::format(", {}", capacity["bound_by"]["text"].get<std::string>());
    if (const Json& limit = capacity["limit"]; !limit.is_null()) {
      carries +=
          fmt::format("; at {:.3g}/s {}", limit["rate"].get<double>(), limit["text"].get<std::string>());
    }
  }
  paragraph(out, "", carries);
  if (o.contains("margin") && !o["margin"].is_null() && !o["margin"]["decided"].get<bool>()) {
    paragraph(out, "", o["margin"]["text"].get<std::string>());
  }
  if (!o["most"].is_null() && o["most"]["name"] != o["name"]) {
    const std::string name = o["most"]["name"].get<std::string>();
    paragraph(out, "",
              fmt::format("{:.3g} requests/s as {}", o["most"]["capacity"].get<double>(),
                          name.substr(name.find(": ") + 2)));
  }
}

void put_options(std::string& out, const Json& options) {
  fmt::format_to(std::back_inserter(out), "\n{:<{}}{:>8}{:>10}{:>9}{:>11}{:>9}\n", "options, by price", kName,
                 "USD/h", "USD/month", "USD/Mtok", "carries/s", "times");
  std::size_t rows = 0, left = 0;
  for (const Json& o : options) {
    if (rows == kMostRows) {
      ++left;
      continue;
    }
    ++rows;
    const Json* at = o.contains("at_rate") ? &o["at_rate"] : nullptr;
    std::string name = o["name"].get<std::string>();
    if (o["capacity"].is_null()) name = o["rented"].get<std::string>() + ", " + o["class"].get<std::string>();
    fmt::format_to(std::back_inserter(out), "{} {:<{}}{:>8.2f}{:>10}{:>9}{:>11}{:>9}\n",
                   o["suffices"].get<bool>() ? '*' : ' ', name, kName - 2, o["usd_per_hour"].get<double>(),
                   grouped(o["usd_per_month"].get<double>()),
                   at ? number((*at)["usd_per_million_output_tokens"], "{:.2f}") : "-",
                   number(o["capacity"], "{:.3g}", "nothing"), number(o["headroom"], "{:.2f}"));
  }
  if (left > 0) fmt::format_to(std::back_inserter(out), "  and {} dearer ones (--json lists them)\n", left);
  out += "  * suffices at the rate asked for\n";
}

void put_curve(std::string& out, const Json& curve) {
  fmt::format_to(std::back_inserter(out), "\n{:<16}{:>12}{:>12}   {:<14}\n", "up to, per s", "colocated",
                 "disaggreg.", "cheaper (USD/h)");
  for (const Json& row : curve["rows"]) {
    const auto usd = [&](const char* side) {
      return row[side].is_null() ? std::string("-") : number(row[side]["usd_per_hour"], "{:.2f}");
    };
    const std::string cheaper = row["cheaper"].get<std::string>();
    const Json& best = row[cheaper];
    fmt::format_to(std::back_inserter(out), "  {:<14.3g}{:>12}{:>12}   {}\n", row["to"].get<double>(),
                   usd("colocated"), usd("disaggregated"),
                   best.is_null() ? "" : best["name"].get<std::string>());
  }
  paragraph(out, "", curve["text"].get<std::string>());
  paragraph(out, "", curve["basis"].get<std::string>());
}

std::string change(const Json& side) {
  if (side["usd_per_hour_percent"].is_null()) return "-";
  const double usd = side["usd_per_hour_percent"].get<double>();
  return fmt::format("{:+.0f} %", usd == 0 ? 0.0 : usd);
}

std::string carried(const Json& side) {
  if (side["capacity_percent"].is_null()) return "-";
  const double percent = side["capacity_percent"].get<double>();
  return fmt::format("{:+.0f} %", percent == 0 ? 0.0 : percent);
}

void put_flips(std::string& out, const Json& flips) {
  if (flips.empty()) return;
  fmt::format_to(std::back_inserter(out), "\n{:<32}{:>11}{:>10}{:>13}{:>10}  {}\n", "if", "coloc. USD",
                 "carries", "disagg. USD", "carries", "then");
  for (const Json& row : flips) {
    std::string then = "the same";
    if (row["flips"].get<bool>()) {
      then = row["winner"].is_null() ? "nothing suffices" : row["winner"].get<std::string>();
      then = fmt::format("from {:+.0f} %: {}", 100 * (row["at"].get<double>() - 1), then);
    }
    const Json &colocated = row["colocated"], &disaggregated = row["disaggregated"];
    const std::string head = fmt::format(
        "  {:<29} {:>11}{:>10}{:>13}{:>10}",
        fmt::format("{:+.0f} % {}", 100 * (row["factor"].get<double>() - 1), row["what"].get<std::string>()),
        change(colocated), carried(colocated), change(disaggregated), carried(disaggregated));
    out += head;
    if (head.size() + 2 + then.size() > kColumns) {
      out += '\n';
      paragraph(out, "", then);
    } else {
      out += "  " + then + "\n";
    }
  }
}

}  // namespace

std::string plan_table(const Json& report) {
  std::string out;
  const Json& q = report["question"];
  std::string slo;
  for (const auto& [metric, bounds] : q["slo"].items()) {
    for (const auto& [percentile, ms] : bounds.items()) {
      slo += fmt::format("{}{} {} <= {:.4g}", slo.empty() ? "" : ", ", metric, percentile, ms.get<double>());
    }
  }
  const Json& trace = q["trace"];
  paragraph(out, "plan",
            fmt::format("{}: {} at {:.4g} requests/s (from {}), {}", report["name"].get<std::string>(),
                        q["model"].get<std::string>(), q["rate"].get<double>(),
                        q["rate_from"].get<std::string>(), slo));
  paragraph(out, "trace",
            fmt::format(
                "{}: {} requests, {:.0f} prompt and {:.0f} output tokens in the mean; at that rate {:.0f} s",
                trace["name"].get<std::string>(), trace["requests"].get<std::int64_t>(),
                trace["prompt_tokens"].get<double>(), trace["output_tokens"].get<double>(),
                trace["span_s"].get<double>()));
  std::string menu;
  for (const Json& offer : q["menu"]) {
    menu +=
        fmt::format("{}{} {} ({})", menu.empty() ? "" : ", ", offer["instance"].get<std::string>(),
                    number(offer["usd_per_hour"], "{:.2f}", "no price"),
                    offer["usd_per_hour"].is_null() ? "none published" : offer["as_of"].get<std::string>());
  }
  paragraph(out, "menu", fmt::format("{}; USD/h, at most {} of them", menu, q["max_instances"].get<int>()));
  out += '\n';
  if (report["status"] == kPlanStatus[2]) {
    paragraph(out, "INTERRUPTED",
              "some options have not been tried, or not to the end; nothing here is final");
  }
  const Json& recommended = report["recommendation"];
  if (!recommended.is_null()) {
    put_deployment(out, report["status"] == kPlanStatus[2] ? "best so far" : "recommended", recommended);
    for (const char* side : {"colocated", "disaggregated"}) {
      if (report.contains(side) && !report[side].is_null() && report[side]["name"] != recommended["name"]) {
        put_deployment(out, side == std::string_view("colocated") ? "colocated" : "disaggreg.", report[side]);
      }
    }
  } else if (report.contains("nearest_miss") && !report["nearest_miss"].is_null()) {
    const Json& miss = report["nearest_miss"];
    paragraph(out, "NOTHING", "on the menu meets the SLO at this rate.");
    paragraph(out, "nearest", miss["name"].get<std::string>());
    paragraph(out, "", miss["text"].get<std::string>());
    paragraph(out, "", miss["help"].get<std::string>());
  } else if (report["status"] == kPlanStatus[1]) {
    paragraph(out, "NOTHING", "that may be recommended can be run on this menu.");
  }
  if (report.contains("verdict")) paragraph(out, "verdict", report["verdict"]["text"].get<std::string>());
  if (report.contains("verdict") && !report["verdict"]["to_decide"].get<std::string>().empty()) {
    paragraph(out, "to decide", report["verdict"]["to_decide"].get<std::string>());
  }
  if (!report["evidence"].is_null())
    paragraph(out, "evidence", report["evidence"]["text"].get<std::string>());
  if (report.contains("options") && !report["options"].empty()) put_options(out, report["options"]);
  if (report.contains("curve") && !report["curve"]["rows"].empty()) put_curve(out, report["curve"]);
  if (report.contains("flips")) put_flips(out, report["flips"]);
  out += '\n';
  for (const Json& e : report["excluded"]) {
    paragraph(out, "cannot work",
              fmt::format("{} candidates ({}): {}", e["candidates"].get<std::int64_t>(),
                          e["example"].get<std::string>(), e["reason"].get<std::string>()));
  }
  if (report.contains("undeployable")) {
    for (const Json& u : report["undeployable"]) {
      std::string needs;
      for (const Json& f : u["needs"]) {
        needs += fmt::format("{}{} ({}: {})", needs.empty() ? "" : ", ", f["feature"].get<std::string>(),
                             f["since"].get<std::string>(), f["source"].get<std::string>());
      }
      paragraph(out, "not deployed",
                fmt::format("{} needs {}; {}", u["kind"].get<std::string>(), needs,
                            u["would_be_cheaper"].get<bool>()
                                ? fmt::format("it would be cheaper: {}, {:.2f} USD/h",
                                              u["name"].get<std::string>(), u["usd_per_hour"].get<double>())
                                : "it would not be cheaper"));
    }
  }
  for (const Json& note : report["notes"]) paragraph(out, "note", note.get<std::string>());
  const Json& search = report["search"];
  paragraph(
      out, "search",
      fmt::format("{} candidates, {} runs, {} of them given up early, which spared {:.0f} % of the requests",
                  search["candidates"].get<std::int64_t>(), search["runs"].get<std::int64_t>(),
                  search["abandoned"].get<std::int64_t>(), 100 * search["requests_spared"].get<double>()));
  return out;
}

}  // namespace pdsim
