// Theory: a benchmark's file becomes the requests that its client sent and the figures that it measured, each
// by the definition of the tool; what it lacks is said, and what is wrong with it names the file and field.
#include "traces/bench.hpp"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

// Three prompts; the second was refused by the server.
json vllm() {
  return {{"date", "20260101-000000"},
          {"backend", "vllm"},
          {"request_rate", "inf"},
          {"burstiness", 1.0},
          {"max_concurrency", nullptr},
          {"duration", 2.5},
          {"completed", 2},
          {"input_lens", {100, 50, 200}},
          {"output_lens", {3, 0, 1}},
          {"ttfts", {0.5, 0.0, 0.25}},
          {"itls", {{0.010, 0.030}, json::array(), json::array()}},
          {"generated_texts", {"a NaN \"Infinity\" b", "", "c"}},
          {"errors", {"", "Service Unavailable", ""}}};
}

json record(std::int64_t start, double ttft, double latency, int input, int output) {
  return {{"metadata",
           {{"request_start_ns", start},
            {"benchmark_phase", "profiling"},
            {"was_cancelled", false},
            {"x_correlation_id", "c" + std::to_string(start)},
            {"turn_index", 0}}},
          {"metrics",
           {{"input_sequence_length", {{"value", input}, {"unit", "tokens"}}},
            {"output_sequence_length", {{"value", output}, {"unit", "tokens"}}},
            {"time_to_first_token", {{"value", ttft}, {"unit", "ms"}}},
            {"request_latency", {{"value", latency}, {"unit", "ms"}}}}},
          {"error", nullptr}};
}

// TTFT as it stands, e2e = TTFT + gaps, TPOT = (e2e - TTFT) / (output - 1); a failed request is set aside.
TEST(Bench, ReadsWhatVllmMeasured) {
  const Folder folder;
  const Bench bench = read_bench(folder.file("r.json", vllm().dump()));
  EXPECT_EQ(bench.format, BenchFormat::vllm_bench);
  EXPECT_EQ(bench.sending, Sending::at_once);
  ASSERT_EQ(bench.trace.requests.size(), 2u);
  EXPECT_EQ(bench.trace.requests[0].prompt_tokens, 100);
  EXPECT_EQ(bench.trace.requests[0].output_tokens, 3);
  EXPECT_EQ(bench.trace.requests[1].prompt_tokens, 200);
  EXPECT_EQ(bench.trace.report.rows_read, 3u);
  EXPECT_EQ(bench.trace.report.rows_used, 2u);
  EXPECT_EQ(bench.trace.report.set_aside, std::vector<std::string>{"1 row: failed in the benchmark"});
  ASSERT_EQ(bench.measured.size(), 2u);
  EXPECT_NEAR(bench.measured[0].ttft, 500, 1e-9);
  EXPECT_NEAR(bench.measured[0].e2e, 540, 1e-9);
  EXPECT_NEAR(bench.measured[0].tpot, 20, 1e-9);
  EXPECT_NEAR(bench.measured[1].e2e, 250, 1e-9);
  EXPECT_TRUE(std::isnan(bench.measured[1].tpot)) << "one token has no TPOT";
  EXPECT_EQ(bench.gaps_ms, (std::vector<double>{10, 30}));
  EXPECT_EQ(bench.gap_tokens, 2);
  EXPECT_EQ(bench.duration_s, 2.5);
  EXPECT_FALSE(bench.chat);
}

// Newer files have starts, on a clock of the client's own, and latencies. Requests come by start.
TEST(Bench, RecordedStartsAreTheArrivals) {
  json document = vllm();
  document["start_times"] = {353400.75, 353399.0, 353400.5};
  document["latencies"] = {0.6, 0.0, 0.25};
  document["endpoint_type"] = "openai-chat";
  const Folder folder;
  const Bench bench = read_bench(folder.file("r.json", document.dump(2)));  // over several lines
  EXPECT_EQ(bench.sending, Sending::recorded);
  ASSERT_EQ(bench.trace.requests.size(), 2u);
  EXPECT_EQ(bench.trace.requests[0].prompt_tokens, 200);
  EXPECT_EQ(bench.trace.requests[0].arrival, 0);
  EXPECT_EQ(bench.trace.requests[1].arrival, 250 * kMillisecond);
  EXPECT_NEAR(bench.measured[1].e2e, 600, 1e-9);
  EXPECT_NEAR(bench.measured[1].tpot, 50, 1e-9);
  EXPECT_TRUE(bench.chat);
  EXPECT_EQ(bench.trace.report.arrivals, "");
}

// Without starts, how the client paced itself decides, and the file's report says so.
TEST(Bench, WithoutStartsTheClientsOwnPaceHolds) {
  const Folder folder;
  json document = vllm();
  document["max_concurrency"] = 8;
  const Bench closed = read_bench(folder.file("a", document.dump()));
  EXPECT_EQ(closed.sending, Sending::closed_loop);
  EXPECT_EQ(closed.max_concurrency, 8);
  EXPECT_NE(closed.trace.report.arrivals.find("workload.concurrency=8"), std::string::npos);

  document["request_rate"] = 2.0;
  const Bench drawn = read_bench(folder.file("b", document.dump()));
  EXPECT_EQ(drawn.sending, Sending::drawn);
  EXPECT_NE(drawn.trace.report.arrivals.find("workload.max_concurrency=8"), std::string::npos);
  EXPECT_NE(drawn.trace.report.arrivals.find("rate 2/s"), std::string::npos);
}

json many(int n) {
  json document = vllm();
  for (const char* list : {"input_lens", "output_lens", "ttfts", "itls", "errors"}) {
    document[list] = json::array();
  }
  for (int i = 0; i < n; ++i) {
    document["input_lens"].push_back(10 + i);
    document["output_lens"].push_back(1);
    document["ttfts"].push_back(0.1);
    document["itls"].push_back(json::array());
    document["errors"].push_back("");
  }
  return document;
}

// vLLM's client scales its draws so that n requests take n / rate; gaps of a Gamma of shape b have a
// coefficient of variation of 1 / sqrt(b), and burstiness inf is even. The order is the file's, the draw the
// seed's.
TEST(Bench, DrawsArrivalsAsTheClientDoes) {
  constexpr int kRequests = 20000;
  const Folder folder;
  for (const double burstiness : {0.25, 1.0, 4.0, HUGE_VAL}) {
    SCOPED_TRACE(burstiness);
    json document = many(kRequests);
    document["request_rate"] = 50.0;
    std::string text = document.dump();
    const std::string one = "\"burstiness\":1.0";
    ASSERT_NE(text.find(one), std::string::npos);
    text.replace(text.find(one), one.size(),
                 "\"burstiness\":" + (std::isinf(burstiness) ? "Infinity" : std::to_string(burstiness)));
    const std::string path = folder.file("r", text);
    Bench bench = read_bench(path);
    draw_arrivals(bench, 7);
    const std::vector<Request>& r = bench.trace.requests;
    EXPECT_EQ(r.back().arrival, kRequests / 50 * kSecond);
    double sum = 0, squares = 0;
    for (std::size_t i = 1; i < r.size(); ++i) {
      EXPECT_EQ(r[i].prompt_tokens, 10 + static_cast<int>(i));
      const double gap = to_seconds(r[i].arrival - r[i - 1].arrival);
      sum += gap;
      squares += gap * gap;
    }
    const double n = kRequests - 1, mean = sum / n;
    const double cv = std::sqrt(std::max(0.0, squares / n - mean * mean)) / mean;
    const double expected = 1 / std::sqrt(burstiness);
    EXPECT_NEAR(cv, expected, 0.05 * expected + 1e-4);  // 5 % is five standard errors at shape 0.25
    Bench again = read_bench(path), other = read_bench(path);
    draw_arrivals(again, 7);
    draw_arrivals(other, 8);
    EXPECT_EQ(again.trace.requests[5].arrival, r[5].arrival);
    if (!std::isinf(burstiness)) {
      EXPECT_NE(other.trace.requests[5].arrival, r[5].arrival);
    }
    // As a trace, by its name, with a seed: the same.
    ReadOptions options;
    options.seed = 7;
    const Trace trace = read_trace(path, "vllm-bench", options);
    ASSERT_EQ(trace.requests.size(), r.size());
    EXPECT_EQ(trace.requests[99].arrival, r[99].arrival);
    EXPECT_NE(load_summary(trace).find("no start times"), std::string::npos);
  }
}

// A ramp is not scaled: with even gaps the i-th is 1 / rate(i), rates evenly spaced between the ends.
TEST(Bench, ARampIsDrawnRequestByRequest) {
  json document = many(3);
  document["ramp_up_strategy"] = "linear";
  document["ramp_up_start_rps"] = 1;
  document["ramp_up_end_rps"] = 4;
  document["burstiness"] = "inf";
  const Folder folder;
  Bench bench = read_bench(folder.file("r", document.dump()));
  ASSERT_EQ(bench.sending, Sending::drawn);
  draw_arrivals(bench, 1);
  EXPECT_EQ(bench.trace.requests[0].arrival, kSecond);
  EXPECT_EQ(bench.trace.requests[1].arrival, 1'400 * kMillisecond);
  EXPECT_EQ(bench.trace.requests[2].arrival, 1'650 * kMillisecond);
}

// Starts are an epoch in ns; the first is time 0. ITL of AIPerf is pdsim's TPOT, its ICL pdsim's gaps.
// Warm-up, cancelled and failed requests are set aside; so is whatever came late in the file put in order.
TEST(Bench, ReadsWhatAiperfMeasured) {
  constexpr std::int64_t kEpoch = 1759813207532900363;
  json late = record(kEpoch + 2'000'000'000, 30, 90, 20, 4);
  late["metrics"]["inter_chunk_latency"] = {{"value", {40.0, 20.0}}, {"unit", "ms"}};
  json first = record(kEpoch, 100000, 200, 10, 1);
  first["metrics"]["time_to_first_token"] = {{"value", 100e6}, {"unit", "ns"}};
  json cancelled = record(kEpoch + 5, 1, 2, 3, 4);
  cancelled["metadata"]["was_cancelled"] = true;
  cancelled["metrics"] = {{"error_isl", {{"value", 3}, {"unit", "tokens"}}}};
  json failed = record(kEpoch + 6, 1, 2, 3, 4);
  failed["error"] = {{"code", 503}, {"message", "no"}};
  json warmup = record(kEpoch - 9, 1, 2, 3, 4);
  warmup["metadata"]["benchmark_phase"] = "warmup";
  const Folder folder;
  std::string text;
  for (const json& each : {warmup, late, first, cancelled, failed}) text += each.dump() + "\n";
  const Bench bench = read_bench(folder.file("profile_export.jsonl", text));
  EXPECT_EQ(bench.format, BenchFormat::aiperf);
  EXPECT_EQ(bench.sending, Sending::recorded);
  ASSERT_EQ(bench.trace.requests.size(), 2u);
  EXPECT_EQ(bench.trace.requests[0].prompt_tokens, 10);
  EXPECT_EQ(bench.trace.requests[0].arrival, 0);
  EXPECT_EQ(bench.trace.requests[1].arrival, 2 * kSecond);
  EXPECT_EQ(bench.trace.requests[1].session, -1) << "conversations of one turn";
  EXPECT_NEAR(bench.measured[0].ttft, 100, 1e-9);
  EXPECT_NEAR(bench.measured[1].tpot, 20, 1e-9);
  EXPECT_EQ(bench.gaps_ms, (std::vector<double>{40, 20}));
  EXPECT_EQ(bench.gap_tokens, 3);
  EXPECT_NEAR(bench.duration_s, 2.09, 1e-9);
  EXPECT_EQ(bench.trace.report.rows_read, 5u);
  EXPECT_EQ(bench.trace.report.set_aside, (std::vector<std::string>{"2 rows: failed in the benchmark",
                                                                    "1 row: not of the profiling phase"}));
}

TEST(Bench, ConversationsOfAiperfAreSessions) {
  json a = record(10, 1, 2, 100, 10), b = record(40, 1, 2, 150, 10), other = record(20, 1, 2, 30, 3);
  b["metadata"]["x_correlation_id"] = a["metadata"]["x_correlation_id"];
  const Folder folder;
  const std::string path = folder.file("p", a.dump() + "\n" + other.dump() + "\n" + b.dump() + "\n");
  const Trace trace = read_trace(path, "aiperf");
  ASSERT_EQ(trace.sessions.size(), 2u);
  EXPECT_EQ(trace.requests[2].session, trace.requests[0].session);
  EXPECT_EQ(trace.requests[2].turn, 1);
  EXPECT_EQ(trace.requests[1].turn, 0);
  EXPECT_EQ(trace.report.rows_read, 3u);
}

std::string gzip(const std::string& text) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 31, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

// Python's numbers that JSON lacks stand outside strings only; a byte order mark, gzip, and texts longer than
// any line of a trace may be are read.
TEST(Bench, HowItIsStoredDoesNotShow) {
  const Folder folder;
  std::string text = vllm().dump();
  const std::string rate = "\"request_rate\":\"inf\"";
  text.replace(text.find(rate), rate.size(), rate + ",\"mean_x\":NaN,\"y\":-Infinity");
  text.replace(text.find("-Infinity"), 9, "Infinity");
  json large = vllm();
  large["generated_texts"][0] = std::string(65 << 20, 'x');
  for (const std::string& bytes : {text, "\xef\xbb\xbf" + text, gzip(text), large.dump()}) {
    const Bench bench = read_bench(folder.file("r", bytes));
    ASSERT_EQ(bench.measured.size(), 2u);
    EXPECT_NEAR(bench.measured[0].e2e, 540, 1e-9);
  }
}

TEST(Bench, WhatIsWrongNamesFileAndField) {
  const auto with = [](const char* key, const json& value) {
    json document = vllm();
    document[key] = value;
    return document.dump();
  };
  const auto without = [](const char* key) {
    json document = vllm();
    document.erase(key);
    return document.dump();
  };
  const std::string good = record(5, 1, 2, 3, 4).dump() + "\n";
  const auto metrics_without = [](const char* key) {
    json r = record(5, 1, 2, 3, 4);
    r["metrics"].erase(key);
    return r.dump() + "\n";
  };
  json epoch = record(5, 1, 2, 3, 4), unit = epoch;
  epoch["metadata"].erase("request_start_ns");
  epoch["metadata"]["about"] = "\"request_start_ns\"";
  unit["metrics"]["request_latency"]["unit"] = "hours";
  const struct {
    std::string bytes, expected;
  } cases[] = {
      {"", ": is empty, expected a benchmark's result"},
      {" \n\n", ": is empty"},
      {"isl,osl,ttft_ms\n1,2,3\n", "pdsim validate serving"},
      {"hello\n", ": is no benchmark's result that pdsim knows ('hello')"},
      {"[1, 2]", ": is no benchmark's result"},
      {vllm().dump().substr(0, 300), ": is not one complete JSON document"},
      {vllm().dump() + "\n" + vllm().dump(), ": is not one complete JSON document"},
      {"{}", ": 'input_lens' is missing: expected a result saved with --save-result --save-detailed"},
      {without("itls"), ": 'itls' is missing: expected a result saved with"},
      {without("output_lens"), ": 'output_lens' is missing"},
      {with("ttfts", {0.5, 0.1}), ": /ttfts: has 2 entries, expected 3, as /input_lens has"},
      {with("errors", {""}), ": /errors: has 1 entries, expected 3"},
      {with("start_times", {1.0, 2.0}), ": /start_times: has 2 entries, expected 3"},
      {with("ttfts", 3), ": /ttfts: is 3, expected an array"},
      {with("ttfts", {0.5, 0.0, "x"}), ": /ttfts/2: is \"x\", expected seconds from 0"},
      {with("ttfts", {-1, 0.0, 0.1}), ": /ttfts/0: is -1, expected seconds from 0"},
      {with("itls", {{0.01, true}, json::array(), json::array()}), ": /itls/0/1: is true, expected a time"},
      {with("input_lens", {100, 50, 0}), ": /input_lens/2: is 0, expected an integer from 1"},
      {with("output_lens", {3, 0, 1.5}), ": /output_lens/2: is 1.5, expected an integer from 0"},
      {with("request_rate", "fast"), ": /request_rate: is \"fast\", expected requests per second"},
      {with("max_concurrency", 0), ": /max_concurrency: is 0, expected an integer from 1"},
      {with("output_lens", {0, 0, 0}), ": no request was answered (3 failed)"},
      {good + good.substr(0, 40) + "\n", ":2: not JSON"},
      {metrics_without("request_latency"), ":1: /metrics: 'request_latency' is missing"},
      {metrics_without("input_sequence_length"), ":1: /metrics: 'input_sequence_length' is missing"},
      {good + epoch.dump(), ":2: /metadata: 'request_start_ns' is missing"},
      {unit.dump(), ":1: /metrics/request_latency/unit: is \"hours\", expected ms"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.bytes.substr(0, 80));
    const Folder folder;
    const std::string path = folder.file("bench", c.bytes);
    try {
      read_bench(path);
      ADD_FAILURE() << "was read";
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with(path)) << message;
      EXPECT_NE(message.find(c.expected), std::string::npos) << message;
    }
  }
  try {
    read_bench("nosuch", "aiprf");
    ADD_FAILURE() << "was read";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("nosuch"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace pdsim
