// Several deployments on the same requests, side by side: figures, verdict, and the difference per request.
//
// Every run of a comparison replays the same trace, and in a replication the same resampled one, so that
// runs are paired request by request. What would make figures incomparable (other requests, other models,
// other kernels' timings, other prices, other objectives) is refused before the first run, unless it is
// allowed by name. The result depends on the scenarios alone, not on the number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/study/runs.hpp"
#include "tools/study/verdict.hpp"

namespace pdsim {

/// One of the deployments to be compared.
struct Subject {
  std::string name;  ///< unique; compare() gives equal ones a number
  RunSpec spec;
  std::string note;    ///< what it is, one clause; may be empty
  std::string cannot;  ///< why it is not run; empty = it is
};

/// What may differ when it is allowed.
inline constexpr std::string_view kAllowed[] = {"workload", "model", "profiles", "prices", "slo"};

struct CompareOptions {
  std::string objective;  ///< as find_objective() takes it; empty = dollars, or goodput without prices
  std::string baseline;   ///< a subject's name; empty = the first
  int replications = 1;   ///< the first is the trace itself
  unsigned jobs = 0;      ///< threads; 0 = one a core
  std::vector<std::string> allow;
  bool needs_slo = false;  ///< InputError without one
  bool quiet = false;
  std::function<void(std::uint64_t requests, std::uint64_t total)> progress;  ///< one call at a time
  std::function<bool()> interrupted;
};

/// One run of a comparison.
struct Compared {
  Subject subject;
  std::string kind;  ///< deployment_kind()
  int complexity = 0;
  std::map<std::string, int> gpus;  ///< held, by kind of GPU
  int gpus_rented = 0;
  std::optional<double> usd_per_hour;
  RunOutcome outcome;                        ///< on the trace itself; no summary = not run
  std::vector<std::vector<double>> figures;  ///< by row of the table, by replication; not finite = none
  std::vector<double> objective;             ///< by replication
  std::vector<std::string> stalls;           ///< by replication: who waits for what; empty = it did not stall
  Replicated replicated = Replicated::seeds;
  Evidence evidence;

  int gpus_held() const;
  /// Of all replications' requests, those that completed; 1 where nothing was run.
  double completed() const;
};

/// Requests of two runs that both completed, in one latency.
struct Shift {
  std::size_t faster = 0, slower = 0, same = 0;  ///< same: by less than kSameShare of the baseline's
  double mean_ms = 0;                            ///< run less baseline
  std::array<double, 7> quantiles_ms{};          ///< at kShiftQuantiles
  double faster_ms = 0, slower_ms = 0;           ///< mean difference among them
  std::array<double, kStageNames.size()> faster_stages_ms{}, slower_stages_ms{};  ///< sum to those
  double faster_prompt = 0, slower_prompt = 0;  ///< median prompt tokens of them
};
inline constexpr double kSameShare = 0.01;  // chosen: nobody notices it
inline constexpr std::array<double, 7> kShiftQuantiles = {1, 5, 25, 50, 75, 95, 99};

/// A part of the requests, and what became of them.
struct ShiftGroup {
  std::string by, name;                              ///< "prompt tokens", "900 to 1,800"
  std::size_t requests = 0, faster = 0, slower = 0;  ///< by TTFT
  double ttft_ms = 0, e2e_ms = 0;                    ///< mean differences
};

/// One run against the baseline, request by request.
struct RunDifference {
  std::size_t run = 0;
  std::string unpaired;  ///< why there is nothing else; empty = there is
  std::size_t both = 0;  ///< completed in both
  std::size_t only_baseline = 0, only_run = 0, neither = 0;
  Shift ttft, e2e;
  std::array<double, kStageNames.size()> stages_ms{};  ///< mean change; sums to that of e2e
  std::vector<ShiftGroup> groups;
  std::vector<std::string> text;  ///< a sentence for TTFT, one for e2e
};

struct Equality {
  bool gpus = false;
  std::optional<bool> usd_per_hour;  ///< nothing: a price is not known
  std::string text;
};

struct Comparison {
  Objective objective;
  int replications = 1;
  std::string replicated_by;  ///< "seeds", "sessions drawn anew"; empty = not replicated
  bool interrupted = false;
  std::size_t baseline = 0;
  std::vector<Compared> runs;
  Equality equal;
  Verdict verdict;  ///< over runs, by their index; of an interrupted comparison: nobody
  std::vector<RunDifference> differences;
  std::vector<std::string> notes;  ///< what a reader should know, a sentence each
};

/// What is said of a figure's values by replication: the mean over all of them, and nothing where one has
/// none. Of an interrupted comparison, the mean over those that were done.
std::optional<double> mean_of(const Comparison& comparison, std::span<const double> values);

/// Likewise its interval.
std::optional<Interval> interval_of(const Comparison& comparison, const Compared& run,
                                    std::span<const double> values);

/// The run by that figure, for judge(); `values` by replication, empty = it has none.
Contender contender_of(const Comparison& comparison, const Compared& run, std::span<const double> values);

/// Runs the subjects. Everything is checked before the first run: InputError names what differs and is not
/// allowed, and whatever replay would refuse. Cost: subjects x replications replays, on `jobs` threads.
Comparison compare(std::vector<Subject> subjects, const CompareOptions& options);

/// The objectives that a run misses: "ttft_ms p95 is 3,211, above 2,000"; empty = none. Requires a summary.
std::vector<std::string> missed_slo(const nlohmann::ordered_json& summary);

/// Runs after the first one that could be run that are worse by the objective, beyond error and chance: a
/// sentence for each, which names what it is compared with when that is not the first of all.
std::vector<std::string> regressions(const Comparison& comparison);

/// pdsim.comparison/1.
nlohmann::ordered_json comparison_json(const Comparison& comparison);

/// For a terminal, at most 110 columns but for names.
std::string comparison_table(const Comparison& comparison);

/// A row a request: both latencies of every run, what they differ by from the baseline's, and the stage that
/// changed most.
std::string differences_csv(const Comparison& comparison);

/// (folder, its files) of each run as replay --out writes them, but for run.json.
std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> run_folders(
    const Comparison& comparison);

/// The rows of the table that are figures: what compare() keeps of each replication.
struct ComparedFigure {
  std::string_view section, label, path;  ///< path into the summary, or the figure's own name
  bool less_is_better;
  double scale;                                              ///< from the summary's unit to the row's
  double (*derived)(const nlohmann::ordered_json& summary);  ///< nullptr = the number at path
};
std::span<const ComparedFigure> compared_figures();

}  // namespace pdsim
