// A user's own serving benchmark: what its client sent, when, and what it measured.
//
// Two formats become one struct: the JSON of `vllm bench serve --save-result --save-detailed` and AIPerf's
// profile_export.jsonl. Nothing is converted in meaning: a figure keeps the definition of the tool that
// measured it (the table of them is in tools/pdsim/validate_run.cpp), and what a file lacks is NaN.
// Invariants
//  1. trace and measured have the same length and order: by (start, row).
//  2. Every row of the file is in the trace or counted in trace.report.set_aside.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "traces/lines.hpp"
#include "traces/reader.hpp"
#include "traces/trace.hpp"

namespace pdsim {

enum class BenchFormat : std::uint8_t { vllm_bench, aiperf };
inline constexpr std::string_view kBenchFormats[] = {"vllm-bench", "aiperf"};

/// How the file says when requests were sent.
enum class Sending : std::uint8_t {
  recorded,     ///< each request's own start
  at_once,      ///< no starts: a rate of inf and no limit
  closed_loop,  ///< no starts: a rate of inf and a limit of max_concurrency
  drawn,        ///< no starts: a finite rate, whose gaps the client drew; draw_arrivals() draws them anew
};
inline constexpr std::string_view kSendings[] = {"recorded", "at_once", "closed_loop", "drawn"};

/// Of one request, in ms; NaN where it was not measured (no streaming, one token).
struct Measured {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  double ttft = kNone;
  double tpot = kNone;  ///< (e2e - ttft) / (output - 1)
  double e2e = kNone;
};

struct Bench {
  BenchFormat format = BenchFormat::vllm_bench;
  Trace trace;  ///< those that were answered; trace.report.arrivals says how arrivals were made, if they were
  std::vector<Measured> measured;
  std::vector<double> gaps_ms;  ///< between chunks of answers, of all requests
  std::int64_t gap_tokens = 0;  ///< tokens after the first of the answers that have gaps: one each, if a
                                ///< chunk is a token
  double duration_s = 0;  ///< as the client counts it: vLLM from before its first send, AIPerf from there
  Sending sending = Sending::recorded;
  double request_rate = 0;  ///< requests per second; 0 = inf, or the file does not say
  double burstiness = 1;    ///< shape of the Gamma gaps; infinity = even gaps
  /// Rates from `ramp_start` to `ramp_end` over the requests, when the latter is above 0.
  double ramp_start = 0, ramp_end = 0;
  bool exponential_ramp = false;
  std::int32_t max_concurrency = 0;  ///< the client's limit; 0 = none, or the file does not say
  bool chat = false;                 ///< vLLM: the chat endpoint, whose stream opens with a chunk of its own
  std::string model, date;           ///< vLLM: its model_id and date ("20260401-120000"); empty = not stated
};

/// The format that the text looks like. InputError that names them.
BenchFormat recognise_bench(LineReader& lines);

/// Reads `path` ("-" = stdin; gzip and zstd as they are), of the format named or, where that is empty, of
/// the one it looks like. InputError "file: /field" or "file:line": what is missing, of the wrong type or
/// length, not JSON, cut off; a file in which no request was answered. O(bytes); memory is the text's (vLLM)
/// or the figures' (AIPerf).
Bench read_bench(const std::string& path, std::string_view format = {}, const ByteProgress& progress = {});

/// Where `sending` is drawn: arrivals as vLLM's client draws them (vllm/benchmarks/serve.py, get_request):
/// Gamma gaps, scaled so that the last request is sent at requests / rate, unless the rate ramps up. The
/// draws are pdsim's: the client's seed is not in the file. O(n).
void draw_arrivals(Bench& bench, std::uint64_t seed);

}  // namespace pdsim
