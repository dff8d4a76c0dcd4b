// Which kv_recompute_threshold and decoder_kv_blocks_ttl suit a trace: by trying them at several loads.
//
// Every pair that is tried is tried at every load, so that one pair can be judged at all of them. Beside the
// pairs stand: no bidirectional transfer at all; the cost policy, which chooses for each turn by prediction;
// and the same with a retention that knows the future (belady), the bound of what keeping KV can give.
// Results depend on the scenario, the trace and the values asked for, never on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/study/evidence.hpp"
#include "tools/study/objective.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {

/// Settings within this of the best, relative to it, are as good: differences that no one would act on.
/// Chosen, a few times below what TTFT varies by from one benchmark run to the next.
inline constexpr double kPlateau = 0.01;

struct ThresholdsConfig {
  RunSpec base;
  std::vector<double> loads;  ///< factors on workload.time_scale; ascending, no two alike
  Objective objective;
  std::vector<std::int32_t> thresholds;  ///< tokens, kNeverRead among them; empty = chosen by the trace
  std::vector<double> ttls;              ///< seconds; empty = chosen by the trace
  unsigned jobs = 0;
};

/// A threshold above every prompt: nothing is read.
inline constexpr std::int32_t kNeverRead = INT32_MAX;

/// One way to run the scenario at one load.
struct Setting {
  enum class Kind : std::uint8_t {
    without,  ///< no bidirectional transfer
    fixed,    ///< a threshold and a TTL
    cost,     ///< reuse_policy cost, and a TTL
    oracle,   ///< retention belady, and reuse_policy cost or the threshold of the best pair
  } kind = Kind::without;
  std::int32_t threshold = 0;
  double ttl_s = 0;
  auto operator<=>(const Setting&) const = default;
};

/// What came of it.
struct Tried {
  Setting setting;
  std::optional<double> value;  ///< of the objective; nothing: see `why`
  std::optional<double> p95;    ///< beside it
  std::int64_t hit_tokens = 0;  ///< that prefill read back
  std::uint64_t failed = 0;     ///< requests that failed: a read came too late
  std::string why;              ///< it has no value, or may not be chosen: it stalled, it loses requests, ...

  bool usable() const { return value.has_value() && why.empty(); }
};

/// Values of one setting beside the best one that are as good, the other held at its best: all that were
/// tried in [low, high] are.
template <typename T>
struct Plateau {
  T low{}, high{};
  bool to_the_least = false, to_the_most = false;  ///< ends where what was tried ends
};

struct LoadAnswer {
  double load = 1;
  double requests_per_s = 0;
  std::vector<Tried> pairs;  ///< by (threshold, TTL)
  Tried without, defaults, best, recommended, cost_at_best, cost_at_defaults, cost_at_recommended, oracle;
  Plateau<std::int32_t> thresholds;
  Plateau<double> ttls;
  double spread = 0;           ///< what the worst pair that may be chosen loses against the best
  std::optional<double> gain;  ///< of the best against no bidirectional transfer, relative to that
  std::string text;            ///< what follows, in a sentence or two
};

/// no: it gains no more than kPlateau. undecided: no more than such figures miss measured ones by, or nobody
/// has measured.
enum class Pays : std::uint8_t { no, undecided, yes };

struct ThresholdsAnswer {
  std::string scenario, trace, trace_sha256;
  std::uint64_t requests = 0, sessions = 0, later_turns = 0;
  Objective objective;
  std::string p95_path;
  std::vector<std::int32_t> thresholds;  ///< all that were tried
  std::vector<double> ttls;
  std::vector<LoadAnswer> loads;
  Evidence evidence;
  double error = 0;       ///< relative, of figures like the objective's; see `measured`
  bool measured = false;  ///< there are measured runs that say so

  bool interrupted = false;                 ///< not all that was to be tried was
  Pays pays = Pays::no;                     ///< bidirectional transfer, at some load
  std::optional<Setting> recommended;       ///< of all pairs the one that loses least at its worst load
  double router_ttl_s = 0;                  ///< and how long the router keeps addresses with it
  double worst_regret = 0;                  ///< that loss, relative to each load's best pair
  Plateau<std::int32_t> threshold_plateau;  ///< values that lose no more than kPlateau more
  Plateau<double> ttl_plateau;
  std::string text;    ///< the recommendation, in a few sentences
  std::string config;  ///< for vLLM's --kv-transfer-config
};

/// How long the router should keep an address when decode keeps the blocks for `ttl_s`: as much shorter as
/// vLLM has it (450 of 480 s), and by twice the margin below which a read is declined at least: once for the
/// margin, once for the queue before the read. 0 or less: no read can be in time.
double router_ttl(double ttl_s, double margin_s);

/// The loss of `value` against `reference`, relative to that; negative = it is better. Nothing without both.
std::optional<double> regret(const Objective& objective, const std::optional<double>& value,
                             const std::optional<double>& reference);

/// Runs all that is needed. Calls `progress` as parallel_for() does, batch by batch. InputError for a
/// scenario without prefill and decode, a mode that cannot be bidirectional, a trace without later turns.
/// Throws Interrupted when interrupted() says so.
ThresholdsAnswer find_thresholds(const ThresholdsConfig& config,
                                 const std::function<void(std::uint64_t, std::uint64_t)>& progress = {});

/// For people.
std::string thresholds_table(const ThresholdsAnswer& answer);
/// pdsim.thresholds/1.
nlohmann::ordered_json thresholds_json(const ThresholdsAnswer& answer);
/// A row for each run.
std::string thresholds_csv(const ThresholdsAnswer& answer);

}  // namespace pdsim
