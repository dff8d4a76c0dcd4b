#include "traces/bench.hpp"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "sim/core/error.hpp"
#include "sim/core/math.hpp"
#include "traces/formats.hpp"

namespace pdsim {

namespace {

using simdjson::dom::array;
using simdjson::dom::element;

constexpr double kMaxSeconds = 4.0e9;  // 126 years, as in the Mooncake format

std::string shown(element value) {
  std::string text = simdjson::minify(value);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

/// A value and where it stands ("file: /ttfts/3", "file:7: /metrics/request_latency").
struct Value {
  element json;
  std::string place;

  [[noreturn]] void refuse(std::string_view expected) const {
    throw InputError(place, fmt::format("is {}, expected {}", shown(json), expected));
  }
  bool null() const { return json.is_null(); }
  double number(double least, double most, std::string_view what) const {
    double value = 0;
    if (json.is_bool() || json.get(value) != simdjson::SUCCESS || !(value >= least && value <= most)) {
      refuse(fmt::format("{} from {} to {:g}", what, least, most));
    }
    return value;
  }
  std::int32_t tokens(std::int32_t least) const {
    double value = 0;  // AIPerf writes means of integers as such
    if (json.is_bool() || json.get(value) != simdjson::SUCCESS || value != std::floor(value) ||
        !(value >= least && value <= INT32_MAX)) {
      refuse(fmt::format("an integer from {} to {}", least, INT32_MAX));
    }
    return static_cast<std::int32_t>(value);
  }
};

// "file" has pointers ("file: /ttfts"), and so has "file:7".
std::string join(const std::string& place, std::string_view key) {
  return fmt::format("{}{}{}", place, place.find(": /") == std::string::npos ? ": /" : "/", key);
}

std::optional<Value> find(const Value& object, std::string_view key) {
  element found;
  if (object.json[key].get(found) != simdjson::SUCCESS) return std::nullopt;
  return Value{found, join(object.place, key)};
}

Value need(const Value& object, std::string_view key, std::string_view why) {
  std::optional<Value> found = find(object, key);
  if (!found) throw InputError(object.place, fmt::format("'{}' is missing: {}", key, why));
  return *found;
}

array list(const Value& value, std::string_view of) {
  array values;
  if (value.json.get(values) != simdjson::SUCCESS) value.refuse(fmt::format("an array of {}", of));
  return values;
}

Nanos seconds_to_ns(double seconds) {
  return static_cast<Nanos>(std::floor(seconds * 1e9 + 0.5));
}

// Python writes NaN and Infinity, which JSON has not: outside strings they become null and "inf".
std::string without_python_numbers(std::string_view text) {
  std::string out;
  out.reserve(text.size() + simdjson::SIMDJSON_PADDING);
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (!quoted && text.substr(i).starts_with("NaN")) {
      out += "null";
      i += 2;
    } else if (!quoted && text.substr(i).starts_with("Infinity")) {
      out += "\"inf\"";
      i += 7;
    } else {
      const bool escape = quoted && text[i] == '\\';
      if (text[i] == '"') quoted = !quoted;
      out += text[i];
      if (escape && i + 1 < text.size()) out += text[++i];
    }
  }
  return out;
}

/// A request and what was measured of it, before they are sorted.
struct Row {
  Request request;
  Measured measured;
};

void finish(std::vector<Row>& rows, std::uint64_t failed, std::uint64_t warmup, const LineReader& lines,
            Bench& bench) {
  if (rows.empty()) {
    throw InputError(lines.name(),
                     fmt::format("no request was answered ({} failed), expected one at least", failed));
  }
  LoadReport& report = bench.trace.report;
  report.rows_read = failed + warmup;
  const auto set_aside = [&](std::uint64_t n, std::string_view why) {
    if (n > 0) report.set_aside.push_back(fmt::format("{} row{}: {}", n, n == 1 ? "" : "s", why));
  };
  set_aside(failed, "failed in the benchmark");
  set_aside(warmup, "not of the profiling phase");
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.request.arrival < b.request.arrival; });
  bench.trace.requests.reserve(rows.size());
  bench.measured.reserve(rows.size());
  for (const Row& row : rows) {
    bench.trace.requests.push_back(row.request);
    bench.measured.push_back(row.measured);
  }
  finish_trace(bench.trace);
}

// The gaps between an answer's chunks, added to the bench's; their sum in ms.
double read_gaps(const Value& value, double to_ms, std::int32_t output, Bench& bench) {
  double sum = 0;
  std::size_t i = 0;
  for (const element gap : list(value, "times")) {
    const Value at{gap, join(value.place, std::to_string(i++))};
    const double ms = at.number(0, kMaxSeconds * 1e3 / to_ms, "a time") * to_ms;
    bench.gaps_ms.push_back(ms);
    sum += ms;
  }
  if (i > 0) bench.gap_tokens += output - 1;
  return sum;
}

// -------------------------------------------------------------------------------------- vllm bench serve

// vllm/benchmarks/serve.py. In all versions that have --save-detailed: duration, input_lens, output_lens,
// ttfts, itls, errors; request_rate (a number or "inf"), burstiness, max_concurrency. Since vllm#32667
// (January 2026): start_times, on the client's monotonic clock; later: latencies. All times are seconds, all
// lists by prompt. A request that failed has an error, or 0 output tokens.
constexpr std::string_view kDetailed = "expected a result saved with --save-result --save-detailed";

/// A list of the document with one entry a prompt.
struct Column {
  std::vector<element> values;
  std::string place;

  Value at(std::size_t i) const { return {values[i], join(place, std::to_string(i))}; }
  explicit operator bool() const { return !values.empty(); }
};

Column column(const Value& document, std::string_view key, std::size_t size, bool required) {
  const std::optional<Value> found = find(document, key);
  Column out;
  if (!found || found->null()) {
    if (required) need(document, key, kDetailed);
    if (found && required) found->refuse("an array");
    return out;
  }
  out.place = found->place;
  for (const element value : list(*found, "one entry a prompt")) out.values.push_back(value);
  if (out.values.size() != size) {
    throw InputError(out.place,
                     fmt::format("has {} entries, expected {}, as /input_lens has", out.values.size(), size));
  }
  return out;
}

double rate_of(const Value& document, std::string_view key) {
  const std::optional<Value> found = find(document, key);
  if (!found || found->null()) return 0;
  std::string_view text;
  if (found->json.get(text) == simdjson::SUCCESS) {
    if (text != "inf") found->refuse("requests per second, or \"inf\"");
    return 0;
  }
  const double rate = found->number(0, 1e9, "requests per second");
  if (rate == 0) found->refuse("requests per second above 0, or \"inf\"");
  return rate;
}

void read_client(const Value& document, Bench& bench) {
  bench.request_rate = rate_of(document, "request_rate");
  if (const auto found = find(document, "burstiness"); found && !found->null()) {
    std::string_view text;
    bench.burstiness = found->json.get(text) == simdjson::SUCCESS && text == "inf"
                           ? HUGE_VAL
                           : found->number(1e-6, HUGE_VAL, "a shape");
  }
  if (const auto found = find(document, "max_concurrency"); found && !found->null()) {
    bench.max_concurrency = found->tokens(1);
  }
  if (const auto found = find(document, "ramp_up_strategy"); found && !found->null()) {
    std::string_view text;
    if (found->json.get(text) != simdjson::SUCCESS || (text != "linear" && text != "exponential")) {
      found->refuse("linear or exponential");
    }
    bench.exponential_ramp = text == "exponential";
    const std::string_view why = "expected it beside ramp_up_strategy";
    bench.ramp_start = need(document, "ramp_up_start_rps", why).number(1e-9, 1e9, "requests per second");
    bench.ramp_end = need(document, "ramp_up_end_rps", why).number(1e-9, 1e9, "requests per second");
  }
  for (const auto& [key, text] : {std::pair("model_id", &bench.model), std::pair("date", &bench.date)}) {
    std::string_view value;
    const auto found = find(document, key);
    if (found && found->json.get(value) == simdjson::SUCCESS) *text = value;
  }
  for (const std::string_view key : {"backend", "endpoint_type"}) {
    std::string_view text;
    const auto found = find(document, key);
    if (found && found->json.get(text) == simdjson::SUCCESS && text.find("chat") != std::string_view::npos) {
      bench.chat = true;
    }
  }
}

void parse_vllm_bench(LineReader& lines, Bench& bench) {
  static_assert(kLinePadding >= simdjson::SIMDJSON_PADDING);
  simdjson::dom::parser parser;
  std::string_view text = lines.rest();
  std::string repaired;
  Value document{{}, lines.name()};
  auto error = parser.parse(text.data(), text.size(), false).get(document.json);
  if (error != simdjson::SUCCESS && error != simdjson::EMPTY) {
    repaired = without_python_numbers(text);
    error = parser.parse(repaired).get(document.json);
  }
  if (error == simdjson::EMPTY) {
    throw InputError(lines.name(), fmt::format("is empty, {}", kDetailed));
  }
  if (error != simdjson::SUCCESS) {
    throw InputError(lines.name(), fmt::format("is not one complete JSON document ({}), {}",
                                               simdjson::error_message(error), kDetailed));
  }
  if (!document.json.is_object()) document.refuse("an object");
  read_client(document, bench);
  const std::size_t n = list(need(document, "input_lens", kDetailed), "tokens").size();
  const Column input = column(document, "input_lens", n, true),
               output = column(document, "output_lens", n, true), ttfts = column(document, "ttfts", n, true),
               itls = column(document, "itls", n, true), errors = column(document, "errors", n, false),
               starts = column(document, "start_times", n, false),
               latencies = column(document, "latencies", n, false);
  if (const auto found = find(document, "duration"); found && !found->null()) {
    bench.duration_s = found->number(0, kMaxSeconds, "seconds");
  }
  const bool recorded = static_cast<bool>(starts);
  double first = HUGE_VAL;
  std::vector<Row> rows;
  std::uint64_t failed = 0;
  std::vector<double> sent;
  for (std::size_t i = 0; i < n; ++i) {
    std::string_view message;
    const bool has_error = errors && errors.at(i).json.get(message) == simdjson::SUCCESS && !message.empty();
    const std::int32_t tokens = output.at(i).tokens(0);
    if (has_error || tokens == 0) {
      ++failed;
      continue;
    }
    Row row;
    row.request.prompt_tokens = input.at(i).tokens(1);
    row.request.output_tokens = tokens;
    const double ttft = ttfts.at(i).number(0, kMaxSeconds, "seconds") * 1e3;
    const double gaps = read_gaps(itls.at(i), 1e3, tokens, bench);
    const bool streamed = ttft > 0;
    if (latencies) {
      row.measured.e2e = latencies.at(i).number(0, kMaxSeconds, "seconds") * 1e3;
    } else if (streamed) {
      row.measured.e2e = ttft + gaps;
    }
    if (streamed) row.measured.ttft = ttft;
    if (streamed && tokens > 1) row.measured.tpot = (row.measured.e2e - ttft) / (tokens - 1);
    if (recorded) {
      sent.push_back(starts.at(i).number(-kMaxSeconds, kMaxSeconds, "seconds"));
      first = std::min(first, sent.back());
    }
    rows.push_back(row);
  }
  for (std::size_t i = 0; i < sent.size(); ++i) rows[i].request.arrival = seconds_to_ns(sent[i] - first);
  const bool paced = bench.request_rate > 0 || bench.ramp_end > 0;
  bench.sending = recorded                    ? Sending::recorded
                  : paced                     ? Sending::drawn
                  : bench.max_concurrency > 0 ? Sending::closed_loop
                                              : Sending::at_once;
  std::string& how = bench.trace.report.arrivals;
  const auto limit = [&](std::string_view key) {
    return fmt::format("the client kept at most {} in flight (workload.{}={})", bench.max_concurrency, key,
                       bench.max_concurrency);
  };
  if (bench.sending == Sending::at_once) {
    how = "no start times: all at 0, as a client with rate inf and no limit sends them";
  } else if (bench.sending == Sending::closed_loop) {
    how = "no start times: " + limit("concurrency") + ", in the order of the file";
  } else if (bench.sending == Sending::drawn) {
    const std::string rate = bench.ramp_end > 0
                                 ? fmt::format("{} ramp from {:g} to {:g}/s",
                                               bench.exponential_ramp ? "an exponential" : "a linear",
                                               bench.ramp_start, bench.ramp_end)
                                 : fmt::format("rate {:g}/s", bench.request_rate);
    how = fmt::format(
        "no start times: drawn anew as the client draws them ({}, burstiness {:g}), "
        "with pdsim's seed",
        rate, bench.burstiness);
    if (bench.max_concurrency > 0) how += "; " + limit("max_concurrency");
  }
  finish(rows, failed, 0, lines, bench);
}

// ---------------------------------------------------------------------------------------------- AIPerf

// ai-dynamo/aiperf, src/aiperf/common/metric_records_wire.py and
// docs/tutorials/working-with-profile-exports.md: an object a line with metadata (request_start_ns, an epoch;
// benchmark_phase; was_cancelled; x_correlation_id and turn_index of a conversation), metrics by tag, each
// {value, unit}, and error. docs/metrics-reference.md defines the tags. Older exports call
// time_to_first_token ttft.
std::optional<Value> metric(const Value& metrics, std::string_view tag, double& to_ms) {
  const std::optional<Value> found = find(metrics, tag);
  if (!found || found->null()) return std::nullopt;
  if (!found->json.is_object()) found->refuse("an object with value and unit");
  const std::string_view why = "expected a value and a unit";
  const Value unit = need(*found, "unit", why);
  std::string_view text;
  constexpr std::pair<std::string_view, double> kUnits[] = {{"ms", 1.0},  {"ns", 1e-6}, {"us", 1e-3},
                                                            {"sec", 1e3}, {"s", 1e3},   {"tokens", 1.0}};
  if (unit.json.get(text) != simdjson::SUCCESS) unit.refuse("a unit");
  to_ms = 0;
  for (const auto& [name, factor] : kUnits) {
    if (text == name) to_ms = factor;
  }
  if (to_ms == 0) unit.refuse("ms, ns, us, sec or tokens");
  return need(*found, "value", why);
}

void parse_aiperf(LineReader& lines, Bench& bench) {
  simdjson::dom::parser parser;
  std::string_view line;
  std::vector<Row> rows;
  std::vector<std::int64_t> starts;
  std::uint64_t failed = 0, warmup = 0;
  std::int64_t first = INT64_MAX;
  std::unordered_map<std::string, std::int32_t> sessions;
  std::vector<std::string> names;
  bool turns = false;
  double last_end = 0;  // ms after `origin`
  std::int64_t origin = 0;
  bool any = false;
  while (lines.next(line)) {
    any = true;
    Value record{{}, lines.place()};
    if (const auto error = parser.parse(line.data(), line.size(), false).get(record.json)) {
      throw InputError(lines.place(), fmt::format("not JSON ({}), expected one record a line: {}",
                                                  simdjson::error_message(error), line.substr(0, 40)));
    }
    if (!record.json.is_object()) record.refuse("an object");
    const Value metadata = need(record, "metadata", "expected a record of profile_export.jsonl");
    if (!metadata.json.is_object()) metadata.refuse("an object");
    std::string_view text;
    const auto phase = find(metadata, "benchmark_phase");
    if (phase && phase->json.get(text) == simdjson::SUCCESS && text != "profiling") {
      ++warmup;
      continue;
    }
    bool cancelled = false;
    const auto was = find(metadata, "was_cancelled");
    if (was && !was->null() && was->json.get(cancelled) != simdjson::SUCCESS) was->refuse("true or false");
    const auto problem = find(record, "error");
    if (cancelled || (problem && !problem->null())) {
      ++failed;
      continue;
    }
    const Value start = need(metadata, "request_start_ns", "expected the time of the request");
    std::int64_t ns = 0;
    if (start.json.get(ns) != simdjson::SUCCESS || ns < 0) start.refuse("nanoseconds since an epoch");
    const Value metrics = need(record, "metrics", "expected the figures of the request");
    if (!metrics.json.is_object()) metrics.refuse("an object");
    double unit = 1;
    const auto wanted = [&](std::string_view tag) {
      const auto found = metric(metrics, tag, unit);
      if (!found)
        throw InputError(metrics.place, fmt::format("'{}' is missing, expected it of every request", tag));
      return *found;
    };
    Row row;
    row.request.prompt_tokens = wanted("input_sequence_length").tokens(1);
    row.request.output_tokens = wanted("output_sequence_length").tokens(0);
    const auto ms_of = [&](const Value& value) {
      return value.number(0, kMaxSeconds * 1e3 / unit, "a time") * unit;
    };
    row.measured.e2e = ms_of(wanted("request_latency"));
    for (const std::string_view tag : {"time_to_first_token", "ttft"}) {
      if (const auto found = metric(metrics, tag, unit)) row.measured.ttft = ms_of(*found);
    }
    const std::int32_t tokens = row.request.output_tokens;
    if (tokens > 1) row.measured.tpot = (row.measured.e2e - row.measured.ttft) / (tokens - 1);
    if (const auto found = metric(metrics, "inter_chunk_latency", unit))
      read_gaps(*found, unit, tokens, bench);

    const auto session = find(metadata, "x_correlation_id");
    if (session && session->json.get(text) == simdjson::SUCCESS) {
      const auto [at, fresh] =
          sessions.try_emplace(std::string(text), static_cast<std::int32_t>(names.size()));
      if (fresh) names.emplace_back(text);
      turns = turns || !fresh;
      row.request.session = at->second;
    }
    if (starts.empty()) origin = ns;
    starts.push_back(ns);
    first = std::min(first, ns);
    last_end = std::max(last_end, static_cast<double>(ns - origin) / 1e6 + row.measured.e2e);
    rows.push_back(row);
  }
  if (!any) throw InputError(lines.name(), "is empty, expected AIPerf's profile_export.jsonl");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].request.arrival = starts[i] - first;
    if (!turns) rows[i].request.session = -1;
  }
  if (turns) bench.trace.sessions = std::move(names);
  if (!rows.empty()) bench.duration_s = (last_end + static_cast<double>(origin - first) / 1e6) / 1e3;
  finish(rows, failed, warmup, lines, bench);
}

constexpr void (*kParsers[])(LineReader&, Bench&) = {parse_vllm_bench, parse_aiperf};

Bench parse(LineReader& lines, BenchFormat format) {
  Bench bench;
  bench.format = format;
  kParsers[static_cast<std::size_t>(format)](lines, bench);
  return bench;
}

// A benchmark as a trace alone. finish_trace() follows: what was counted here is counted there.
void read_as_trace(LineReader& lines, BenchFormat format, Trace& trace, const ReadOptions& options) {
  Bench bench = parse(lines, format);
  draw_arrivals(bench, options.seed);
  trace.requests = std::move(bench.trace.requests);
  trace.sessions = std::move(bench.trace.sessions);
  trace.report = std::move(bench.trace.report);
  trace.report.rows_read -= trace.requests.size();
}

}  // namespace

void read_vllm_bench(LineReader& lines, Trace& trace, const ReadOptions& options) {
  read_as_trace(lines, BenchFormat::vllm_bench, trace, options);
}

void read_aiperf(LineReader& lines, Trace& trace, const ReadOptions& options) {
  read_as_trace(lines, BenchFormat::aiperf, trace, options);
}

BenchFormat recognise_bench(LineReader& lines) {
  std::string_view head = lines.head(64 << 10);
  const std::size_t first = head.find_first_not_of("\xef\xbb\xbf \t\r\n");
  head.remove_prefix(std::min(first, head.size()));
  if (head.empty()) throw InputError(lines.name(), "is empty, expected a benchmark's result");
  if (head.front() == '{') {
    return head.find("\"request_start_ns\"") != std::string_view::npos ? BenchFormat::aiperf
                                                                       : BenchFormat::vllm_bench;
  }
  const std::string_view header = head.substr(0, head.find('\n'));
  if (header.find("isl,osl") != std::string_view::npos) {
    throw InputError(lines.name(),
                     "is a table of means, a row a run, expected one run request by request; "
                     "'pdsim validate serving' reads such tables");
  }
  throw InputError(
      lines.name(),
      fmt::format("is no benchmark's result that pdsim knows ('{}'), expected JSON of vllm bench "
                  "serve --save-detailed, or AIPerf's profile_export.jsonl",
                  header.substr(0, 40)));
}

Bench read_bench(const std::string& path, std::string_view format, const ByteProgress& progress) {
  LineReader lines(path, progress);
  BenchFormat known = BenchFormat::vllm_bench;
  if (format.empty()) {
    known = recognise_bench(lines);
  } else {
    const auto* const at = std::ranges::find(kBenchFormats, format);
    if (at == std::end(kBenchFormats)) {
      throw InputError("--bench-format",
                       fmt::format("'{}' is not known{}; known are: {}", format,
                                   did_you_mean(format, kBenchFormats), fmt::join(kBenchFormats, ", ")));
    }
    known = static_cast<BenchFormat>(at - std::begin(kBenchFormats));
  }
  Bench bench = parse(lines, known);
  bench.trace.name = path;
  bench.trace.format = kBenchFormats[static_cast<std::size_t>(known)];
  bench.trace.sha256 = lines.sha256();
  return bench;
}

void draw_arrivals(Bench& bench, std::uint64_t seed) {
  if (bench.sending != Sending::drawn) return;
  std::vector<Request>& requests = bench.trace.requests;
  const std::size_t n = requests.size();
  std::vector<double> sent(n);
  Random random(seed, Purpose::arrivals);
  double time = 0;
  for (std::size_t i = 0; i < n; ++i) {
    double rate = bench.request_rate;
    if (bench.ramp_end > 0) {
      const double share = static_cast<double>(i) / static_cast<double>(std::max<std::size_t>(n - 1, 1));
      rate = bench.exponential_ramp ? bench.ramp_start * math::pow(bench.ramp_end / bench.ramp_start, share)
                                    : bench.ramp_start + (bench.ramp_end - bench.ramp_start) * share;
    }
    time += (std::isinf(bench.burstiness) ? 1.0 : unit_gamma(random, bench.burstiness)) / rate;
    sent[i] = time;
  }
  const double scale = bench.ramp_end > 0 ? 1.0 : static_cast<double>(n) / bench.request_rate / time;
  for (std::size_t i = 0; i < n; ++i) requests[i].arrival = seconds_to_ns(sent[i] * scale);
}

}  // namespace pdsim
