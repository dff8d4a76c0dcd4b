#include "traces/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "sim/core/error.hpp"
#include "traces/formats.hpp"
#include "traces/reshape.hpp"

namespace pdsim {

namespace {

// What only the system that was measured can write.
void refuse_writing(const Trace& trace, std::ptrdiff_t /*index*/, std::string& /*text*/) {
  throw InputError(trace.name, "a benchmark's format is read, not written; expected mooncake or azure");
}
std::vector<std::string> no_losses(const Trace& /*trace*/) {
  return {};
}

constexpr TraceFormat kTraceFormats[] = {
    {"mooncake", read_mooncake, write_mooncake, mooncake_losses,
     "JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens; optional session_id, delay "
     "(ms)"},
    {"azure", read_azure, write_azure, azure_losses,
     "CSV: TIMESTAMP,ContextTokens,GeneratedTokens; no prefix identity; time counts from the first row"},
    {"vllm-bench", read_vllm_bench, refuse_writing, no_losses,
     "JSON of vllm bench serve --save-result --save-detailed: lengths, and start times where it has them"},
    {"aiperf", read_aiperf, refuse_writing, no_losses,
     "JSONL of AIPerf (profile_export.jsonl): start times, lengths, conversations"},
};

// Stable, and a count of rows that came before their time.
void sort_by_arrival(Trace& trace) {
  auto& requests = trace.requests;
  Nanos latest = INT64_MIN;
  for (const Request& request : requests) {
    if (request.arrival < latest) ++trace.report.rows_out_of_order;
    latest = std::max(latest, request.arrival);
  }
  if (trace.report.rows_out_of_order == 0) return;
  std::stable_sort(requests.begin(), requests.end(),
                   [](const Request& a, const Request& b) { return a.arrival < b.arrival; });
}

void number_turns(Trace& trace) {
  std::vector<std::int32_t> turns(trace.sessions.size(), 0);
  for (Request& request : trace.requests) {
    if (request.session >= 0) request.turn = turns[static_cast<std::size_t>(request.session)]++;
  }
}

}  // namespace

void finish_trace(Trace& trace) {
  trace.report.rows_used = trace.requests.size();
  trace.report.rows_read += trace.requests.size();
  sort_by_arrival(trace);
  number_turns(trace);
}

std::span<const TraceFormat> trace_formats() {
  return kTraceFormats;
}

const TraceFormat& find_trace_format(std::string_view name, std::string_view place) {
  std::vector<std::string_view> names;
  for (const TraceFormat& format : kTraceFormats) {
    if (format.name == name) return format;
    names.push_back(format.name);
  }
  throw InputError(place, fmt::format("trace format '{}' is not known{}; known are: {}", name,
                                      did_you_mean(name, names), fmt::join(names, ", ")));
}

Trace read_trace(const std::string& path, std::string_view format_name, const ReadOptions& options) {
  const TraceFormat& format = find_trace_format(format_name, path == "-" ? "stdin" : path);
  Trace trace;
  trace.name = path;
  trace.format = format.name;
  LineReader lines(path, options.progress);
  format.read(lines, trace, options);
  if (trace.requests.empty())
    throw InputError(lines.name(), "the trace is empty, expected at least one request");
  trace.sha256 = lines.sha256();
  finish_trace(trace);
  return trace;
}

std::string load_summary(const Trace& trace) {
  std::int64_t prompt = 0, output = 0;
  for (const Request& request : trace.requests) {
    prompt += request.prompt_tokens;
    output += request.output_tokens;
  }
  const LoadReport& report = trace.report;
  std::string text = fmt::format(
      "{}: {} requests in {:.1f} s, {:.3g} a second, {} prompt and {} output tokens; "
      "rows: {} read, {} used, {} set aside",
      trace.name, trace.requests.size(), to_seconds(span_of(trace)), rate_of(trace), prompt, output,
      report.rows_read, report.rows_used, report.rows_read - report.rows_used);
  if (report.rows_out_of_order > 0)
    text += fmt::format(", {} out of order and sorted", report.rows_out_of_order);
  for (const std::string& reason : report.set_aside) text += "; " + reason;
  if (!report.arrivals.empty()) text += "; " + report.arrivals;
  return text;
}

}  // namespace pdsim
