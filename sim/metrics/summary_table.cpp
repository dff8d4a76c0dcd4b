// The summary as a table for a terminal: lines of at most 110 columns, but for names of the user's own.
#include <fmt/format.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/metrics/summary.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kColumns = 110, kLabel = 20;

void row(std::string& out, std::string_view label, const Json& d) {
  if (d["n"] == 0) {
    fmt::format_to(std::back_inserter(out), "  {:<18}{:>10}\n", label, "none");
    return;
  }
  fmt::format_to(std::back_inserter(out), "  {:<18}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>11.1f}\n",
                 label, d["mean"].get<double>(), d["p50"].get<double>(), d["p90"].get<double>(),
                 d["p95"].get<double>(), d["p99"].get<double>(), d["max"].get<double>());
}

// A label and clauses with "; " between them. A new line begins where one would grow too long: with a clause,
// or after a comma of one that no line can hold.
void line(std::string& out, std::string_view label, const std::vector<std::string>& clauses) {
  fmt::format_to(std::back_inserter(out), "{:<{}}", label, kLabel);
  std::size_t column = kLabel;
  const auto add = [&](std::string_view piece) {
    const bool first = column == kLabel, fits = first || column + 1 + piece.size() <= kColumns;
    if (!fits) out += '\n' + std::string(kLabel, ' ');
    if (fits && !first) out += ' ';
    out += piece;
    column = (fits ? column + !first : kLabel) + piece.size();
  };
  for (std::size_t i = 0; i < clauses.size(); ++i) {
    const std::string text = clauses[i] + (i + 1 < clauses.size() ? ";" : "");
    std::string_view rest = text;
    for (std::size_t comma; rest.size() > kColumns - kLabel && (comma = rest.find(", ")) != rest.npos;) {
      add(rest.substr(0, comma + 1));
      rest.remove_prefix(comma + 2);
    }
    add(rest);
  }
  out += '\n';
}

std::int64_t integer(const Json& value) {
  return value.get<std::int64_t>();
}
double number(const Json& value) {
  return value.get<double>();
}

// {"a": 1, "b": 2} as "1 a, 2 b".
std::string counts(const Json& object) {
  std::string text;
  for (const auto& [name, n] : object.items()) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", integer(n), name);
  }
  return text;
}

void put_transfers(std::string& out, const Json& t) {
  const Json& outcomes = t["by_outcome"];
  if (t["count"] != 0) {
    line(out, "transfers",
         {fmt::format("{} by {}, {:.1f} GB, {:.0f} descriptors each", integer(t["count"]),
                      t["mode"].is_null() ? "-" : t["mode"].get<std::string>(), number(t["bytes"]) / 1e9,
                      number(t["descriptors"]) / number(t["count"])),
          fmt::format("means: post {:.2f} ms, then wire {:.2f} ms", number(t["post_ms"]["mean"]),
                      number(t["wire_ms"]["mean"]))});
  }
  std::vector<std::string> trouble;
  if (outcomes.size() > (outcomes.contains("completed") ? 1u : 0u)) trouble.push_back(counts(outcomes));
  if (t["handshakes"]["count"] != 0) {
    trouble.push_back(fmt::format("{} handshakes of {:.2f} s in all, counted as posting",
                                  integer(t["handshakes"]["count"]), number(t["handshakes"]["seconds"])));
  }
  for (const auto& [key, one, more] : {std::tuple("leases_expired", "lease expired", "leases expired"),
                                       {"slow_posts", "slow post", "slow posts"},
                                       {"watchdogs", "registration timed out", "registrations timed out"},
                                       {"messages_lost", "message lost", "messages lost"}}) {
    if (t[key] != 0) trouble.push_back(fmt::format("{} {}", integer(t[key]), t[key] == 1 ? one : more));
  }
  if (!trouble.empty()) line(out, "  outcomes", trouble);
  std::string stale;
  for (const auto& [key, text] : {std::pair("stale_reads", "READS OF BLOCKS THAT HAD CHANGED HANDS"),
                                  {"stale_writes", "WRITES TO BLOCKS THAT HAD CHANGED HANDS"},
                                  {"stale_reads_prevented", "stale reads prevented"},
                                  {"stale_writes_prevented", "stale writes prevented"}}) {
    if (t[key] != 0) stale += fmt::format("{}{} {}", stale.empty() ? "" : ", ", integer(t[key]), text);
  }
  if (!stale.empty()) line(out, "  stale", {stale});
}

void put_reuse(std::string& out, const Json& s) {
  const Json &t = s["transfers"]["read_back"], &d = s["reuse_decisions"], &r = s["retention"];
  std::vector<std::string> reuse{fmt::format("{} read back ({:.1f} GB, {} tokens)", integer(t["count"]),
                                             number(t["bytes"]) / 1e9,
                                             integer(s["cache"]["remote_hit_tokens"]))};
  if (!s["reuse"].empty()) reuse.push_back(counts(s["reuse"]));
  if (d["n"] != 0) {
    reuse.push_back(fmt::format(
        "{} of {} choices lost{}", integer(d["regret_ms"]["n"]), integer(d["n"]),
        d["regret_ms"]["n"] == 0 ? "" : fmt::format(", by {:.1f} ms each", number(d["regret_ms"]["mean"]))));
  }
  line(out, "reuse", reuse);
  std::vector<std::string> retention{
      fmt::format("{}: {} pinned, of them {} read, {} released, {} expired, {} let go, {} left",
                  r["policy"].get<std::string>(), integer(r["pins"]), integer(r["read"]),
                  integer(r["notified"]), integer(r["expired"]), integer(r["let_go"]),
                  integer(r["outstanding"])),
      fmt::format("{:.1f} GB s held, at most {:.1f} GB on a worker", number(r["byte_seconds"]) / 1e9,
                  number(r["peak_bytes"]) / 1e9)};
  if (r["admissions_delayed"] != 0) {
    retention.push_back(fmt::format("{} decode admissions delayed, their queues waited {:.1f} s in all",
                                    integer(r["admissions_delayed"]), number(r["queue_wait_s"])));
  }
  const auto usd = [](const Json& amount) {
    return amount.is_null() ? std::string() : fmt::format(" ({:.4f} USD)", number(amount));
  };
  retention.push_back(fmt::format("{:.1f} prefill GPU s avoided, as predicted{}",
                                  number(r["prefill_gpu_s_avoided"]), usd(r["usd_avoided"])));
  if (!r["usd_held"].is_null()) {
    retention.push_back(fmt::format("decode memory held for {:.4f} USD", number(r["usd_held"])));
  }
  line(out, "retention", retention);
}

}  // namespace

namespace {

// A run on a profile that was measured on a GPU here.
void calibrated(std::string& out, const Json& cost_model) {
  const auto listed = [&](const char* key) {
    std::vector<std::string> names;
    for (const Json& name : cost_model[key]) names.push_back(name.get<std::string>());
    return fmt::format("{}", fmt::join(names, ", "));
  };
  std::vector<std::string> cells = {listed("calibrated")};
  std::vector<std::string> factors;
  for (const auto& [curve, factor] : cost_model["engine_efficiency"].items()) {
    factors.push_back(fmt::format("{} {:.2f}", curve, number(factor)));
  }
  if (!factors.empty()) cells.push_back(fmt::format("engine efficiency {}", fmt::join(factors, ", ")));
  if (!cost_model["own_kernel"].empty()) cells.push_back("own kernels: " + listed("own_kernel"));
  if (!cost_model["taken"].empty()) {
    cells.push_back(fmt::format("from {}, not measured here: {}", listed("engine"), listed("taken")));
  }
  line(out, "calibrated here", cells);
}

}  // namespace

std::string summary_table(const Json& s) {
  std::string out;
  auto put = std::back_inserter(out);
  const Json& q = s["requests"];
  fmt::format_to(put, "{} on {}: {}\n", s["trace"]["name"].get<std::string>(),
                 s["scenario"].get<std::string>(), s["status"].get<std::string>());
  if (s.contains("hypothetical")) {
    fmt::format_to(put, "hypothetical        no engine does what this scenario combines\n");
  }
  fmt::format_to(put,
                 "requests            {} injected = {} completed + {} rejected + {} failed + {} cancelled + "
                 "{} in flight\n",
                 q["injected"].get<std::uint64_t>(), q["completed"].get<std::uint64_t>(),
                 q["rejected"].get<std::uint64_t>(), q["failed"].get<std::uint64_t>(),
                 q["cancelled"].get<std::uint64_t>(), q["in_flight"].get<std::uint64_t>());
  for (const auto& [reason, n] : q["by_reason"].items()) {
    fmt::format_to(put, "                    {}: {}\n", reason, n.get<std::uint64_t>());
  }
  fmt::format_to(put, "\n{:<20}{:>10}{:>10}{:>10}{:>10}{:>10}{:>11}\n", "latency, ms", "mean", "p50", "p90",
                 "p95", "p99", "max");
  row(out, "TTFT", s["latency_ms"]["ttft"]);
  row(out, "TPOT", s["latency_ms"]["tpot"]);
  row(out, "ITL", s["latency_ms"]["itl"]);
  row(out, "end to end", s["latency_ms"]["e2e"]);
  fmt::format_to(put, "\n{:<20}the means sum to the mean end to end\n", "stages, ms");
  for (const auto& [stage, d] : s["stages_ms"].items()) {
    if (d["n"] != 0 && d["max"].get<double>() > 0) row(out, stage, d);
  }
  const Json& tp = s["throughput"];
  fmt::format_to(put,
                 "\nthroughput          {:.2f} requests/s, {:.0f} prompt and {:.0f} output tokens/s, {:.1f} "
                 "output tokens/s/GPU\n",
                 tp["requests_per_s"].get<double>(), tp["prompt_tokens_per_s"].get<double>(),
                 tp["output_tokens_per_s"].get<double>(), tp["output_tokens_per_s_per_gpu"].get<double>());
  if (!s["goodput"]["slo"].empty()) {
    fmt::format_to(put, "goodput             {:.1f} % of requests within",
                   100 * s["goodput"]["fraction"].get<double>());
    const char* sep = " ";
    for (const auto& [metric, bounds] : s["goodput"]["slo"].items()) {
      for (const auto& [p, b] : bounds.items()) {
        const Json& is = b["value"];
        fmt::format_to(put, "{}{} {} {:g} (is {})", sep, metric, p, b["bound"].get<double>(),
                       is.is_null() ? "none" : fmt::format("{:.1f}", is.get<double>()));
        sep = ", ";
      }
    }
    fmt::format_to(put, "\n");
  }
  const Json& c = s["cache"];
  const double prompt = std::max(1.0, c["prompt_tokens"].get<double>());
  fmt::format_to(put,
                 "prefix cache        {:.1f} % of {} prompt tokens hit; {} computed, {} computed again; {} "
                 "preemptions\n",
                 100 * (c["local_hit_tokens"].get<double>() + c["remote_hit_tokens"].get<double>()) / prompt,
                 c["prompt_tokens"].get<std::int64_t>(), c["computed_tokens"].get<std::int64_t>(),
                 c["recomputed_tokens"].get<std::int64_t>(), c["preemptions"].get<std::int64_t>());
  if (s.contains("speculation")) {
    const Json& d = s["speculation"];
    fmt::format_to(put,
                   "speculation         {} drafts, {:.1f} % accepted; {:.2f} tokens a step of a sequence\n",
                   integer(d["drafted"]), 100 * number(d["acceptance"]), number(d["tokens_per_step"]));
  }
  put_transfers(out, s["transfers"]);
  if (s.contains("retention")) put_reuse(out, s);
  fmt::format_to(put, "\n{:<20}{:>8}{:>8}{:>8}{:>11}{:>9}{:>9}\n", "workers", "busy", "MFU", "HBM", "steps",
                 "KV mean", "KV max");
  for (const Json& w : s["workers"]) {
    fmt::format_to(put, "  {:<18}{:>7.1f}%{:>7.1f}%{:>7.1f}%{:>11}{:>8.1f}%{:>8.1f}%\n",
                   w["name"].get<std::string>(), 100 * w["busy_fraction"].get<double>(),
                   100 * w["mfu"].get<double>(), 100 * w["hbm_fraction"].get<double>(),
                   w["steps"].get<std::int64_t>(), 100 * w["kv_usage"]["mean"].get<double>(),
                   100 * w["kv_usage"]["max"].get<double>());
  }
  const Json& m = s["cost"];
  out += '\n';
  if (m["billed_usd"].is_null()) {
    line(out, "cost",
         {fmt::format("unknown: no price of an instance in use; {:.2f} GPU hours", number(m["gpu_hours"]))});
  } else {
    std::vector<std::string> costs{fmt::format("{:.2f} USD billed ({:.2f} for the GPUs held), prices of {}",
                                               number(m["billed_usd"]), number(m["used_usd"]),
                                               m["prices_as_of"].get<std::string>())};
    std::string each;
    if (!m["usd_per_completed_request"].is_null()) {
      each = fmt::format("{:.5f} USD a request", number(m["usd_per_completed_request"]));
    }
    if (!m["usd_per_million_output_tokens"].is_null()) {
      each += fmt::format("{}{:.2f} USD a million output tokens", each.empty() ? "" : ", ",
                          number(m["usd_per_million_output_tokens"]));
    }
    if (!each.empty()) costs.push_back(each);
    line(out, "cost", costs);
  }
  fmt::format_to(put, "bound by            {}\n", s["bound_by"]["text"].get<std::string>());
  const double extrapolated = number(s["cost_model"]["extrapolated_step_fraction"]);
  fmt::format_to(put, "cost model          {}; {:.1f} % of steps lie outside what was measured\n",
                 s["cost_model"]["profile"].get<std::string>(), 100 * extrapolated);
  if (s["cost_model"].contains("calibrated")) calibrated(out, s["cost_model"]);
  if (s["releases"]["unreleased"] == true) {
    std::vector<std::string> features;
    for (const Json& f : s["releases"]["features"]) {
      if (f["since"] == kUnreleased) {
        features.push_back(
            fmt::format("{} ({})", f["feature"].get<std::string>(), f["source"].get<std::string>()));
      }
    }
    line(out, "unreleased", features);
  }
  return out;
}

}  // namespace pdsim
