// `pdsim validate run`: a user's own benchmark beside the simulation of it.
//
// The benchmark's requests are replayed, with its arrivals where the file has them and else as its client
// sent them, and both sides are summarised alike: exact percentiles (numpy's linear ones) over the requests
// that completed, and throughput from the first send to the last answer. Nothing is fitted or corrected:
// where two tools mean different things by one name, the table of definitions says so.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/core/error.hpp"
#include "sim/metrics/summary.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/workload.hpp"
#include "traces/bench.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

// ---------------------------------------------------------------------------------------- definitions

/// Whose figure is which. Of the rows, a report shows the measuring tool's and pdsim's.
struct Definition {
  std::string_view name, ttft, tpot, itl, e2e, source;
};

constexpr Definition kDefinitions[] = {
    {"vllm-bench",
     "from the client's send, after its wait for --max-concurrency, to the first chunk with a choice (its "
     "text "
     "may be empty)",
     "(e2e - ttft) / (output tokens - 1), a request of two tokens or more a value",
     "gaps between chunks, all requests' together; a chunk holds several tokens under speculative decoding "
     "or "
     "--stream-interval",
     "from the send to the last chunk with a choice",
     "vllm/benchmarks/serve.py (calculate_metrics) and lib/endpoint_request_func.py, 2026"},
    {"aiperf",
     "time_to_first_token: from the request's start to the first chunk with content, reasoning included "
     "(time_to_first_output_token leaves that out)",
     "inter_token_latency: (request_latency - ttft) / (output_sequence_length - 1), a request a value",
     "inter_chunk_latency: gaps between chunks with content, all requests' together",
     "request_latency: from the request's start to the last chunk with content",
     "ai-dynamo/aiperf, docs/metrics-reference.md"},
    {"genai-perf", "from the request's start to the first response that is not empty",
     "inter token latency: (e2e - ttft) / (output tokens - 1), a request a value", "not reported",
     "from the request's start to the last response", "docs.nvidia.com/nim/benchmarking/llm, Metrics"},
    {"vllm server",
     "vllm:time_to_first_token_seconds: from arrival in the API server's front end until that handles the "
     "first token; without the client and HTTP, which add 8 to 12 ms (vllm#54628)",
     "vllm:request_time_per_output_token_seconds: (last token - first) / (tokens - 1), by the engine's clock",
     "vllm:inter_token_latency_seconds: between outputs of the engine",
     "vllm:e2e_request_latency_seconds: from arrival in the front end until that handles the last token",
     "vllm/v1/metrics/stats.py"},
    {"vllm response",
     "metrics.time_to_first_token_ms: from when the request is scheduled; its queue is apart",
     "1 / metrics.tokens_per_second", "metrics.mean_itl_ms: a request's mean", "not reported",
     "vLLM docs, features/per_request_metrics.md"},
    {"dynamo",
     "dynamo_frontend_time_to_first_token_seconds: in the HTTP front end, its router and workers "
     "included, the client's network not",
     "not reported", "dynamo_frontend_inter_token_latency_seconds: between outputs that reach the front end",
     "dynamo_frontend_request_duration_seconds: in the front end", "ai-dynamo/dynamo, docs: Metrics"},
    {"pdsim",
     "from arrival at the router (its hop, queues, prefill, hand-over and what engine.overheads says "
     "included) "
     "to the first token's leaving the engine; no client, no network between them",
     "(last token - first) / (output tokens - 1), a request of two tokens or more a value",
     "gaps between tokens, all requests' together, within 0.1 %",
     "from arrival at the router to the last token", "sim/metrics/record.hpp"},
};

const Definition& definition(std::string_view name) {
  for (const Definition& d : kDefinitions) {
    if (d.name == name) return d;
  }
  PDSIM_CHECK(false, "a benchmark's format has no definitions");
}

constexpr std::pair<std::string_view, std::string_view Definition::*> kMetrics[] = {
    {"ttft", &Definition::ttft},
    {"tpot", &Definition::tpot},
    {"itl", &Definition::itl},
    {"e2e", &Definition::e2e}};

// ------------------------------------------------------------------------------------------ comparing

constexpr std::pair<std::string_view, double Distribution::*> kFigures[] = {{"mean", &Distribution::mean},
                                                                            {"p50", &Distribution::p50},
                                                                            {"p90", &Distribution::p90},
                                                                            {"p95", &Distribution::p95},
                                                                            {"p99", &Distribution::p99}};

struct Rates {
  double requests = 0, output_tokens = 0, total_tokens = 0;  ///< per second; 0 = unknown
};
constexpr std::pair<std::string_view, double Rates::*> kRates[] = {
    {"requests_per_s", &Rates::requests},
    {"output_tokens_per_s", &Rates::output_tokens},
    {"total_tokens_per_s", &Rates::total_tokens}};

/// One side, measured or simulated.
struct Side {
  std::array<Distribution, 4> metrics{};  ///< as kMetrics, ms
  Rates rates;
};

Distribution finite(const std::vector<Measured>& rows, double Measured::*of) {
  std::vector<double> values;
  for (const Measured& row : rows) {
    if (!std::isnan(row.*of)) values.push_back(row.*of);
  }
  return distribution_of(std::move(values));
}

Rates rates_of(std::uint64_t requests, std::int64_t prompt, std::int64_t output, double seconds) {
  if (!(seconds > 0)) return {};
  return {static_cast<double>(requests) / seconds, static_cast<double>(output) / seconds,
          static_cast<double>(prompt + output) / seconds};
}

// From the first send to the last answer where the file says when those were, else the client's own duration.
Side measured_side(const Bench& bench) {
  Side side;
  side.metrics = {finite(bench.measured, &Measured::ttft), finite(bench.measured, &Measured::tpot),
                  distribution_of(bench.gaps_ms), finite(bench.measured, &Measured::e2e)};
  double last_ms = 0;
  std::int64_t prompt = 0, output = 0;
  for (std::size_t i = 0; i < bench.measured.size(); ++i) {
    const Request& r = bench.trace.requests[i];
    prompt += r.prompt_tokens;
    output += r.output_tokens;
    if (!std::isnan(bench.measured[i].e2e)) {
      last_ms = std::max(last_ms, to_ms(r.arrival) + bench.measured[i].e2e);
    }
  }
  const double seconds = bench.sending == Sending::recorded && last_ms > 0 ? last_ms / 1e3 : bench.duration_s;
  side.rates = rates_of(bench.measured.size(), prompt, output, seconds);
  return side;
}

/// NaN where the request did not complete.
std::vector<Measured> simulated_rows(const RunResult& run) {
  std::vector<Measured> rows;
  rows.reserve(run.requests.size());
  for (const RequestRecord& r : run.requests) {
    Measured row;
    if (r.status == RequestStatus::completed && r.counted) {
      row.e2e = to_ms(r.e2e());
      if (r.first_token >= 0) row.ttft = to_ms(r.first_token - r.arrival);
      if (r.has_tpot()) row.tpot = static_cast<double>(r.end - r.first_token) / (r.output_tokens - 1) / 1e6;
    }
    rows.push_back(row);
  }
  return rows;
}

Side simulated_side(const RunResult& run, const std::vector<Measured>& rows) {
  Side side;
  side.metrics = {finite(rows, &Measured::ttft), finite(rows, &Measured::tpot), run.gaps.distribution(1e6),
                  finite(rows, &Measured::e2e)};
  Nanos first = INT64_MAX, last = 0;
  std::uint64_t completed = 0;
  std::int64_t prompt = 0, output = 0;
  for (const RequestRecord& r : run.requests) {
    if (r.status != RequestStatus::completed) continue;
    ++completed;
    prompt += r.prompt_tokens;
    output += r.output_tokens;
    first = std::min(first, r.arrival);
    last = std::max(last, r.end);
  }
  if (completed > 0) side.rates = rates_of(completed, prompt, output, to_seconds(last - first));
  return side;
}

Json compared(double measured, double simulated) {
  Json out = {{"measured", measured}, {"simulated", simulated}, {"error", nullptr}};
  if (measured != 0) out["error"] = simulated / measured - 1;
  return out;
}

// ---------------------------------------------------------------------------------------------- report

struct Options : ReplayOptions {
  std::string scenario, bench, bench_format, csv, out;
  bool json = false;
};

// Where the two sides do not mean the same, or a figure says less than it seems to.
std::vector<std::string> notes_of(const Bench& bench, const Scenario& scenario, const RunResult& run) {
  const WorkloadConfig& workload = scenario.workload;
  std::vector<std::string> notes;
  const bool disaggregated =
      std::ranges::any_of(scenario.pools, [](const PoolConfig& p) { return p.role == Role::decode; });
  if (disaggregated && !scenario.transfer.warm_start) {
    notes.emplace_back(
        "the simulated workers meet for the first time, which the measured ones may have done before: --set "
        "transfer.warm_start=true");
  }
  if (bench.sending == Sending::recorded && bench.max_concurrency > 0 && workload.concurrency == 0) {
    notes.push_back(fmt::format(
        "the client waited for answers (max_concurrency {}), so the recorded starts are the measured "
        "system's "
        "own: throughput follows them; --set workload.concurrency={} lets the simulated client wait instead",
        bench.max_concurrency, bench.max_concurrency));
  }
  const auto gaps = static_cast<double>(bench.gaps_ms.size());
  if (gaps > 0) {
    const double tokens = static_cast<double>(bench.gap_tokens) / gaps;
    if (tokens > 1.02) {
      notes.push_back(
          fmt::format("a chunk holds {:.2f} tokens in the mean: measured ITL is between chunks, "
                      "simulated ITL between tokens; TPOT is of tokens on both sides",
                      tokens));
    } else if (bench.gap_tokens < static_cast<std::int64_t>(bench.gaps_ms.size())) {
      notes.push_back(fmt::format(
          "{} more chunks than tokens{}", bench.gaps_ms.size() - static_cast<std::size_t>(bench.gap_tokens),
          bench.chat ? ": the chat endpoint opens with a chunk of its own, so gaps near 0 "
                       "are among the measured ITL"
                     : ": gaps near 0 may be among the measured ITL"));
    }
  }
  if (bench.chat) {
    notes.emplace_back(
        "chat endpoint: its first chunk carries the role, and with chunked prefill may come before the first "
        "token (vllm#15106): measured TTFT may be too short by the rest of the prefill, and TPOT too long");
  }
  std::uint64_t missing = 0;
  for (const RequestRecord& r : run.requests) missing += r.status != RequestStatus::completed;
  if (missing > 0) {
    notes.push_back(
        fmt::format("{} of {} requests did not complete in the simulation, but were answered: the "
                    "two sides are not of the same requests",
                    missing, run.requests.size()));
  }
  return notes;
}

std::string arrivals_text(const Bench& bench, const WorkloadConfig& workload) {
  const bool closed_by_file =
      bench.sending == Sending::closed_loop && workload.concurrency == bench.max_concurrency;
  if (workload.concurrency > 0 && !closed_by_file) {
    return fmt::format("workload.concurrency={}: starts are ignored, a closed loop in their order",
                       workload.concurrency);
  }
  return bench.trace.report.arrivals.empty() ? "as recorded" : bench.trace.report.arrivals;
}

Json report_of(const Bench& bench, const LoadedScenario& loaded, const RunResult& run, const Json& summary,
               const Side& measured, const Side& simulated) {
  const LoadReport& load = bench.trace.report;
  Json client = Json::object();
  client["request_rate"] = bench.request_rate > 0 ? Json(bench.request_rate) : Json(nullptr);
  client["burstiness"] = std::isfinite(bench.burstiness) ? Json(bench.burstiness) : Json("inf");
  client["max_concurrency"] = bench.max_concurrency > 0 ? Json(bench.max_concurrency) : Json(nullptr);
  client["duration_s"] = bench.duration_s;
  const Definition& theirs = definition(bench.trace.format);
  const Definition& ours = definition("pdsim");
  Json definitions = Json::object();
  for (const auto& [name, member] : kMetrics) {
    definitions[name] = {{"measured", theirs.*member}, {"simulated", ours.*member}};
  }
  Json metrics = Json::object();
  for (std::size_t m = 0; m < std::size(kMetrics); ++m) {
    const Distribution &a = measured.metrics[m], &b = simulated.metrics[m];
    Json entry = {{"n_measured", a.n}, {"n_simulated", b.n}};
    if (a.n > 0 && b.n > 0) {
      for (const auto& [figure, member] : kFigures) entry[figure] = compared(a.*member, b.*member);
    }
    metrics[std::string(kMetrics[m].first) + "_ms"] = entry;
  }
  Json rates = Json::object();
  for (const auto& [name, member] : kRates) {
    if (measured.rates.*member > 0) rates[name] = compared(measured.rates.*member, simulated.rates.*member);
  }
  return {{"schema", "pdsim.validate-run/1"},
          {"scenario", loaded.scenario.name},
          {"status", kRunStatusNames[static_cast<std::size_t>(run.status)]},
          {"seed", loaded.scenario.seed},
          {"bench",
           {{"file", bench.trace.name},
            {"format", bench.trace.format},
            {"sha256", bench.trace.sha256},
            {"rows", load.rows_read},
            {"replayed", load.rows_used},
            {"set_aside", load.set_aside},
            {"client", client}}},
          {"arrivals",
           {{"how", kSendings[static_cast<std::size_t>(bench.sending)]},
            {"text", arrivals_text(bench, loaded.scenario.workload)},
            {"concurrency", loaded.scenario.workload.concurrency},
            {"max_concurrency", loaded.scenario.workload.max_concurrency}}},
          {"definitions", {{"tool", theirs.name}, {"source", theirs.source}, {"metrics", definitions}}},
          {"requests", summary["requests"]},
          {"metrics", metrics},
          {"throughput", rates},
          {"cost_model", summary["cost_model"]},
          {"notes", notes_of(bench, loaded.scenario, run)}};
}

std::string figure_text(double value) {
  return std::abs(value) >= 1000 ? fmt::format("{:.0f}", value) : fmt::format("{:.4g}", value);
}

std::string table_of(const Json& report) {
  std::string out;
  const auto put = [&](std::string_view label, std::string_view text) {
    out += fmt::format("{:<12}{}\n", label, text);
  };
  const Json& bench = report["bench"];
  std::string aside;
  for (const Json& reason : bench["set_aside"]) aside += "; set aside: " + reason.get<std::string>();
  put("bench",
      fmt::format("{} ({}): {} of {} requests replayed{}", bench["file"].get<std::string>(),
                  bench["format"].get<std::string>(), bench["replayed"].dump(), bench["rows"].dump(), aside));
  put("arrivals", report["arrivals"]["text"].get<std::string>());
  out += '\n';
  for (const auto& [metric, both] : report["definitions"]["metrics"].items()) {
    put(metric, fmt::format("{}: {}", report["definitions"]["tool"].get<std::string>(),
                            both["measured"].get<std::string>()));
    put("", fmt::format("pdsim: {}", both["simulated"].get<std::string>()));
  }
  out += fmt::format("\n{:<26}{:>12}{:>12}{:>10}\n", "", "measured", "simulated", "error");
  const auto row = [&](std::string_view label, const Json& entry) {
    const std::string error =
        entry["error"].is_null() ? "" : fmt::format("{:+.1f} %", 100 * entry["error"].get<double>());
    std::string line =
        fmt::format("{:<26}{:>12}{:>12}{:>10}", label, figure_text(entry["measured"].get<double>()),
                    figure_text(entry["simulated"].get<double>()), error);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  for (const auto& [metric, entry] : report["metrics"].items()) {
    if (!entry.contains("mean")) {
      out += fmt::format("{:<26}not measured\n", metric);
      continue;
    }
    for (const auto& [figure, member] : kFigures) {
      row(fmt::format("{:<18}{}", figure == "mean" ? metric : "", figure), entry[std::string(figure)]);
    }
  }
  for (const auto& [rate, entry] : report["throughput"].items()) row(rate, entry);
  if (!report["notes"].empty()) out += '\n';
  for (const Json& note : report["notes"]) put("note", note.get<std::string>());
  return out;
}

std::string csv_of(const Bench& bench, const RunResult& run, const std::vector<Measured>& simulated) {
  std::string out =
      "request,sent_ms,simulated_sent_ms,prompt_tokens,output_tokens,status,ttft_ms,simulated_ttft_ms,"
      "tpot_ms,simulated_tpot_ms,e2e_ms,simulated_e2e_ms\n";
  const auto put = [&](double value) {
    if (!std::isnan(value)) out += fmt::format("{:.6f}", value);
    out += ',';
  };
  for (std::size_t i = 0; i < simulated.size(); ++i) {
    const Request& r = bench.trace.requests[i];
    const RequestRecord& record = run.requests[i];
    const Measured &a = bench.measured[i], &b = simulated[i];
    out +=
        fmt::format("{},{:.6f},{:.6f},{},{},{},", i, to_ms(r.arrival), to_ms(record.arrival), r.prompt_tokens,
                    r.output_tokens, kStatusNames[static_cast<std::size_t>(record.status)]);
    for (const auto member : {&Measured::ttft, &Measured::tpot, &Measured::e2e}) {
      put(a.*member);
      put(b.*member);
    }
    out.back() = '\n';
  }
  return out;
}

// The benchmark takes the place of the scenario's whole workload: no warm-up, no other scale of time.
LoadedScenario load_with(const Bench& bench, const Options& options) {
  ReplayOptions replay = options;
  replay.trace = options.bench;
  replay.format = bench.trace.format;
  std::vector<std::string> sets = {R"(workload={"trace": "-", "format": "vllm-bench"})"};
  if (bench.max_concurrency > 0) {
    if (bench.sending == Sending::closed_loop) {
      sets.push_back(fmt::format("workload.concurrency={}", bench.max_concurrency));
    } else if (bench.sending == Sending::drawn) {
      sets.push_back(fmt::format("workload.max_concurrency={}", bench.max_concurrency));
    }
  }
  sets.insert(sets.end(), options.sets.begin(), options.sets.end());
  replay.sets = sets;
  return load_scenario_for(options.scenario, replay);
}

constexpr std::array<std::string_view, 4> kResultFiles = {"validate.json", "requests.csv", "summary.json",
                                                          "scenario.json"};

std::string text_of(const Json& document) {
  return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

int validate(const Options& options) {
  catch_interrupts();
  const std::filesystem::path csv(options.csv);
  const std::string csv_folder = csv.parent_path().empty() ? "." : csv.parent_path().string();
  if (!options.csv.empty() && options.csv != "-") {
    check_folder(csv_folder, std::array{std::string_view(options.csv).substr(options.csv.rfind('/') + 1)});
  }
  if (!options.out.empty()) check_folder(options.out, kResultFiles);

  Progress reading("reading", "bytes", options.quiet);
  Bench bench = read_bench(options.bench, options.bench_format, [&](std::uint64_t done, std::uint64_t total) {
    if (interrupted()) throw Interrupted{};
    reading.update(done, total);
  });
  reading.finish();
  LoadedScenario loaded = load_with(bench, options);
  const Deployment deployment = plan_deployment(loaded);
  put_defaults_by_gpu(loaded, deployment);
  draw_arrivals(bench, loaded.scenario.seed);
  const Side measured = measured_side(bench);
  Trace trace = bench.trace;
  pace_trace(trace, loaded, options.quiet);

  RunHooks hooks;
  Progress progress("replaying", "requests", options.quiet);
  hooks.interrupted = interrupted;
  hooks.progress = [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); };
  const RunResult run = simulate(deployment, loaded, trace, hooks);
  progress.finish();

  ReplayOptions used = options;
  const Json summary = summarize(run, context_of(loaded, deployment, used), trace);
  const std::vector<Measured> rows = simulated_rows(run);
  const Json report = report_of(bench, loaded, run, summary, measured, simulated_side(run, rows));
  const std::string table = csv_of(bench, run, rows);
  if (!options.out.empty()) {
    write_files(options.out, {{std::string(kResultFiles[0]), text_of(report) + "\n"},
                              {std::string(kResultFiles[1]), table},
                              {std::string(kResultFiles[2]), text_of(summary) + "\n"},
                              {std::string(kResultFiles[3]), loaded.in_force + "\n"}});
  }
  if (options.csv == "-") {
    fmt::print("{}", table);
  } else {
    if (!options.csv.empty()) write_files(csv_folder, {{csv.filename().string(), table}});
    fmt::print("{}", options.json ? text_of(report) + "\n" : table_of(report));
  }
  if (run.status == RunStatus::interrupted) {
    fmt::print(stderr, "pdsim: interrupted; the figures are of the requests done so far\n");
    return kInterrupted;
  }
  if (run.status == RunStatus::stalled) {
    fmt::print(stderr, "pdsim: stalled: {}\n", run.stall);
    return kUnfinished;
  }
  if (summary["requests"]["completed"] == 0) {
    fmt::print(stderr, "pdsim: no request completed: {}\n", summary["requests"]["by_reason"].dump());
    return kUnfinished;
  }
  return kDone;
}

std::string definitions_help() {
  std::string text = "Whose figure is which:\n";
  for (const Definition& d : kDefinitions) {
    text += fmt::format("  {}  [{}]\n", d.name, d.source);
    for (const auto& [name, member] : kMetrics) text += fmt::format("    {:<5} {}\n", name, d.*member);
  }
  return text;
}

}  // namespace

void add_validate_run(CLI::App& validate_app, Command& run) {
  CLI::App* sub = validate_app.add_subcommand(
      "run",
      "Replay your own benchmark on a scenario and compare latencies and throughput with what it measured");
  auto options = std::make_shared<Options>();
  sub->add_option("SCENARIO", options->scenario, "The cluster that was measured, as a scenario; - is stdin")
      ->required();
  sub->add_option(
         "--bench", options->bench,
         "Result of vllm bench serve --save-result --save-detailed (JSON), or AIPerf's "
         "profile_export.jsonl; plain, gzip or zstd; - is stdin. It replaces the scenario's workload")
      ->required();
  sub->add_option("--bench-format", options->bench_format,
                  "vllm-bench or aiperf, instead of the format that the file looks like");
  add_set_option(*sub, options->sets);
  sub->add_option("--seed", options->seed, "Seed of all random streams, instead of the scenario's");
  sub->add_option("--csv", options->csv,
                  "Also a CSV row a request, both sides, into this file; - = stdout, instead of the table");
  sub->add_option(
      "--out", options->out,
      "Folder for validate.json, requests.csv (a row a request, both sides), summary.json and the "
      "scenario in force (made if missing)");
  sub->add_flag("--json", options->json, "One JSON document (schema pdsim.validate-run/1)");
  sub->add_flag("--quiet", options->quiet, "No progress and no notes on stderr");
  sub->footer(
      "Arrivals are the recorded starts. A file without them (vLLM before 2026) is replayed as its client "
      "sent:\n"
      "a closed loop at max_concurrency, all at once, or drawn anew at the request rate, which is said.\n"
      "--set workload.concurrency=N makes any of them a closed loop. Errors are simulated / measured - "
      "1.\n\n" +
      definitions_help() +
      "\nExample:\n  pdsim validate run scenarios/p5en-colocated-qwen3-32b.json --bench result.json --out "
      "out");
  sub->callback([options, &run] { run = [options] { return validate(*options); }; });
}

}  // namespace pdsim
