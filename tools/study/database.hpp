// A sweep's results in one SQLite file that is whole at every moment.
//
// Each point is one transaction in write-ahead-log mode, so that a process that dies, even by kill -9, leaves
// every point that it reported done; at a clean end the log is folded in and one file is left. What is in
// points, metrics and results follows from the sweep alone: not from threads, shards, interruptions or time.
//
// The schema (application_id "pdsw", user_version kSchemaVersion):
//
//   meta     key, value        pdsim_version; sweep, title, sweep_sha256, shard "I/N"; points (of the whole
//                              sweep), excluded, repeated, sampled; parameters, objectives and contrasts as
//                              JSON; "file NAME", of each that points rest on: its SHA-256. A name is
//                              relative to what pdsim ships, absolute, or "-" for stdin. Of several
//                              versions what is shipped may differ: the first's is named
//   points   point             its number, from 0
//            status            finished | stalled | nothing_completed | failed | bug
//            error             why it is not finished, else null
//            one a parameter   its label; INTEGER or REAL where all its labels are such, else TEXT. A name
//                              that is taken gets "parameter_" before it.
//   metrics  point             only of points that have a summary
//            one a figure      a path of summary.json with dots as underscores (figures.hpp); null where the
//                              summary has null. Objectives that are no such figure follow by the same rule.
//            evidence          what the run rests on: a name of kGradeNames
//            error_ttft, error_tpot, error_throughput    median relative error of such figures against
//                              measured ones; null where none was measured
//   results                    view: points with their metrics, in that order of columns
//   timing   point, wall_s, host, version, ended    what differs from run to run
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/study/analysis.hpp"
#include "tools/study/evidence.hpp"
#include "tools/study/shard.hpp"
#include "tools/study/space.hpp"

namespace pdsim {

inline constexpr int kSchemaVersion = 3;

enum class PointStatus : std::uint8_t { finished, stalled, nothing_completed, failed, bug };
inline constexpr std::string_view kPointStatusNames[] = {"finished", "stalled", "nothing_completed", "failed",
                                                         "bug"};

/// What became of a point.
struct PointResult {
  SweepPoint point;
  PointStatus status = PointStatus::finished;
  std::string error;                                      ///< one line; empty = none
  std::shared_ptr<const nlohmann::ordered_json> summary;  ///< null = it has none
  std::set<std::pair<std::string, std::string>> files;    ///< what it rests on: path or "-", SHA-256
  std::optional<Evidence> evidence;                       ///< with a summary
  double wall_s = 0;
};

/// Results cannot be written or read any more (a full disk, a file taken away): what() says why. What was
/// recorded before is kept. Every member of SweepDatabase may give it once the file is open.
class DatabaseFailed : public InputError {
 public:
  using InputError::InputError;
};

class SweepDatabase {
 public:
  struct Open {
    bool resume = false;                ///< go on with a file that is there
    bool allow_mixed_versions = false;  ///< also one of another version of pdsim, and of what that ships
    std::uint32_t most_pages = 0;       ///< for tests of a full disk; 0 = as many as fit
  };

  /// Makes the file for the space's results, its folder if missing, or goes on with it; no other process can
  /// until this object is gone. InputError, and nothing changed, where it is there without `resume`, is no
  /// database or damaged, is another's, of another schema version, pdsim version, sweep or shard, in use by
  /// another process, in a place that cannot be written, or where a file that its points rest on has changed.
  SweepDatabase(const std::string& path, const Space& space, Shard shard, const Open& open);
  /// Opens results to be read. InputError as above.
  explicit SweepDatabase(const std::string& path);
  ~SweepDatabase();  ///< without close(): as if the process had died here
  SweepDatabase(const SweepDatabase&) = delete;
  SweepDatabase& operator=(const SweepDatabase&) = delete;

  const std::string& path() const;
  /// The sweep as far as results tell: parameters (without `sets`), objectives, contrasts, name, digest; and
  /// the points that are there. Opened for a space: O(1), that space. Else O(points), from the file.
  const Space& space() const;
  Shard shard() const;
  std::string version() const;   ///< of pdsim; several: "0.1.0, 0.2.0"
  std::uint64_t points() const;  ///< of the whole sweep

  /// Points with their status, by number. O(points).
  std::vector<std::pair<std::uint64_t, PointStatus>> statuses() const;

  /// Errors with the first point that has each, by point,
  /// `most` at most.
  std::vector<std::pair<std::uint64_t, std::string>> first_errors(std::size_t most = 3) const;

  /// Commits a point, in the place of what it was before. From any thread. InputError when a file is not
  /// what it was for earlier points; DatabaseFailed.
  void record(const PointResult& result);

  /// The rows as sweep_report() takes them, by point. O(points).
  std::vector<ResultRow> rows() const;

  /// The view `results`, by point, as CSV (RFC 4180) with a header: numbers read back as they are, null is
  /// empty. O(points).
  void write_csv(std::FILE* file) const;

  /// Folds the log in: one file is left. DatabaseFailed.
  void close();

  /// Takes the file away if this object made it and nothing has been recorded. No other member may be called
  /// afterwards.
  void discard();

 private:
  friend void merge_databases(std::span<const std::string>, const std::string&, const struct MergeOptions&);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct MergeOptions {
  bool allow_gaps = false, allow_duplicates = false, allow_mixed_versions = false;
};

/// Joins the results of shards into a new file, in order of point; the file appears when it is whole.
/// InputError, and no file, for: an output that is there, inputs of different sweeps, objectives, files that
/// they rest on or (unless allowed) versions of pdsim; a point that no input has, unless allowed; a point
/// that several have, unless allowed and equal in all of them; and what opening says. DatabaseFailed.
/// O(points).
void merge_databases(std::span<const std::string> inputs, const std::string& output,
                     const MergeOptions& options);

}  // namespace pdsim
