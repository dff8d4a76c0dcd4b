// From a run's records to what people and scripts read: summary.json, requests.csv, blocks.csv, the printed
// table.
//
// Everything here is a pure function of the run and its inputs: no wall clock, no order of a hash map,
// so the same run gives the same bytes. Percentiles are numpy's linear ones over completed requests
// inside the measuring window; gaps between tokens come from a histogram within 0.1 %.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/cost_sources.hpp"
#include "sim/metrics/record.hpp"
#include "sim/scenario/releases.hpp"
#include "sim/scenario/scenario.hpp"
#include "traces/trace.hpp"

namespace pdsim {

/// What the summary needs to know beside the run itself.
struct RunContext {
  std::string scenario, scenario_sha256;
  std::string profile, profile_sha256;  ///< names and digests of the kernel profiles
  bool datasheet = false;               ///< one of them was never measured, but scaled
  CostSources sources;                  ///< of those that were measured on a GPU here
  std::string network_profile_sha256;   ///< empty = none in use
  std::vector<std::string> sets;        ///< --set and other overrides of the scenario, as given
  std::uint64_t seed = 1;
  Slo slo;
  std::string mode;               ///< how KV is handed over; empty = nothing is
  std::string retention;          ///< the policy of what decode retains; empty = not bidirectional
  std::vector<Release> releases;  ///< of what the scenario uses
  struct Node {
    std::optional<double> usd_per_hour;  ///< of the whole node; absent = nobody has published it
    std::string price_as_of;
    std::int32_t gpus = 0, gpus_held = 0;
  };
  std::vector<Node> nodes;
};

/// CONTRACT's summary.json; waited_for names workers as the run does. O(requests log requests).
nlohmann::ordered_json summarize(const RunResult& run, const RunContext& context, const Trace& trace);

/// CONTRACT's requests.csv, header included, and after its columns what reading back was predicted to cost
/// and moved; a last column says so where the run is hypothetical, here and in blocks.csv. O(requests).
std::string requests_csv(const RunResult& run, const Trace& trace, const std::vector<std::string>& workers);

/// KV blocks held over time: a row for each bucket of time and side (prefill, decode or colocated workers
/// together), with the mean over the bucket by cause. Buckets are alike for all sides and cover the run; the
/// last may be cut short. O(buckets x workers), at most 256 buckets.
std::string blocks_csv(const RunResult& run);

/// What cost_model holds beside the profile's name where it is a calibration; {} otherwise: "calibrated" (the
/// devices), "engine" (the profiles compared with), "engine_efficiency", "own_kernel" and "taken".
nlohmann::ordered_json cost_sources_json(const CostSources& sources);

/// {"unreleased": whether any of them is, "features": [{"feature", "since", "source"}]}.
nlohmann::ordered_json releases_json(const std::vector<Release>& releases);

/// The summary as a table for a terminal.
std::string summary_table(const nlohmann::ordered_json& summary);

}  // namespace pdsim
