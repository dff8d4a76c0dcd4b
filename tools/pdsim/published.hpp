// Published results replayed: what a source measured beside what the simulator makes of the same set-up.
//
// A published file (schema pdsim.published/1, described by scenarios/published.schema.json) has runs and
// figures. A run is a scenario written into the file, or another run with some values set, or one for each
// of a list of values. A figure is an expression over the runs' summaries and what the source says of it.
// Nothing here is fitted: a run is what `pdsim replay` would do with that scenario.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace pdsim {

enum class Judgement : std::uint8_t {
  none,    ///< the source does not say, or not enough to hold the simulator to it
  within,  ///< the tolerance, or the relation that was expected
  off,
};

/// One figure of a source.
struct PublishedRow {
  std::string name;    ///< of the published result that it belongs to
  std::string metric;  ///< what was measured
  std::string unit, source, note;
  bool specified = false;  ///< the source gives the whole configuration
  bool silent = false;     ///< nothing simulated stands beside it: the source attributes it to nothing
  std::optional<double> published, published_min, published_max;
  std::optional<double> simulated;     ///< absent where an expression has no value ("never crosses")
  std::optional<double> error;         ///< simulated / published - 1
  std::optional<double> tolerance;     ///< of that, where it is judged by it
  std::optional<double> above, below;  ///< what simulated must be, where it is judged by that
  Judgement judgement = Judgement::none;
  std::vector<std::string> paths;  ///< into the summaries of the runs that `simulated` is made of
  bool hands_over = false;         ///< one of those runs hands KV over
};

struct PublishedResult {
  std::string name, title, source, note;
  bool specified = false;
  std::vector<PublishedRow> rows;
};

/// `hooks.progress` is called from several threads, one at a time.
struct PublishedHooks {
  std::function<bool()> interrupted;
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

/// A run that ended without results.
struct Unfinished {
  std::string what;
};

/// Replays the published files in `path`, a folder (its *.json and *.jsonc, by name) or one file; only
/// those called one of `only`, unless that is empty. `jobs` runs at once, 0 = one a core; the results do
/// not depend on it. Interrupted, it gives the files whose runs had all ended. InputError for a file, a
/// scenario or an expression that is at fault (all files are read before the first run); Unfinished when a
/// run stalls or completes nothing.
std::vector<PublishedResult> replay_published(const std::string& path, const std::vector<std::string>& only,
                                              unsigned jobs, const PublishedHooks& hooks);

/// CONTRACT's `validate published --json`; `interrupted` when results are missing because of that.
nlohmann::ordered_json published_json(const std::vector<PublishedResult>& results, bool interrupted = false);

/// The same for a terminal.
std::string published_table(const std::vector<PublishedResult>& results);

/// "27 of 30 figures are within tolerance; 14 of 14 signs and orders are the source's; 9 are shown ...".
std::string published_verdict(const std::vector<PublishedResult>& results);

/// Whether a judged figure is off.
bool any_off(const std::vector<PublishedResult>& results);

}  // namespace pdsim
