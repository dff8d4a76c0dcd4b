// What runs are judged by: figures of their summaries, by name or by path.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/scenario/scenario.hpp"

namespace pdsim {

/// A figure of the summary and which way it is better.
struct Objective {
  std::string name;  ///< of kObjectives, or the path itself
  std::string path;  ///< "latency_ms.ttft.p95", dotted into the summary; items of lists by name or index
  bool less_is_better = true;
};

/// The named ones: {name, path, whether less is better, one sentence}.
struct NamedObjective {
  std::string_view name, path;
  bool less_is_better;
  std::string_view sentence;
};
inline constexpr NamedObjective kObjectives[] = {
    {"usd_per_request_in_slo", "cost.usd_per_request_in_slo", true,
     "dollars billed per request within the SLO"},
    {"usd_per_million_output_tokens", "cost.usd_per_million_output_tokens", true,
     "dollars billed per million output tokens"},
    {"goodput", "goodput.requests_per_s", false, "requests per second within the SLO"},
    {"slo_fraction", "goodput.fraction", false, "share of requests within the SLO"},
    {"output_tokens_per_s_per_gpu", "throughput.output_tokens_per_s_per_gpu", false, "throughput per GPU"},
    {"ttft_mean", "latency_ms.ttft.mean", true, "mean time to first token, ms"},
    {"ttft_p95", "latency_ms.ttft.p95", true, "time to first token, ms, 95th percentile"},
    {"ttft_p99", "latency_ms.ttft.p99", true, "time to first token, ms, 99th percentile"},
    {"tpot_mean", "latency_ms.tpot.mean", true, "mean time per output token, ms"},
    {"tpot_p95", "latency_ms.tpot.p95", true, "time per output token, ms, 95th percentile"},
    {"tpot_p99", "latency_ms.tpot.p99", true, "time per output token, ms, 99th percentile"},
    {"e2e_mean", "latency_ms.e2e.mean", true, "mean time from arrival to last token, ms"},
    {"e2e_p95", "latency_ms.e2e.p95", true, "time from arrival to last token, ms, 95th percentile"},
};

/// By name; or a path with its direction before it: "min:stages_ms.prefill.p99",
/// "max:cache.local_hit_tokens". InputError at `place` lists the names, with the nearest.
Objective find_objective(std::string_view text, std::string_view place);

/// The number at `path`; nothing where it is null. InputError at `place`, listing what there is, when the
/// path leads nowhere or to something else; `of`, if any, stands before paths in it ("pull:").
std::optional<double> number_at(const nlohmann::ordered_json& summary, std::string_view path,
                                std::string_view place, std::string_view of = "");

/// How much there is to operate, for ties: 0 colocated, then pull, push, push_layerwise, push_progressive;
/// bidirectional transfer above all of them without.
int complexity(const Scenario& scenario);

/// "colocated", "pull", "push", ..., "pull, bidirectional".
std::string deployment_kind(const Scenario& scenario);

}  // namespace pdsim
