// A parameter space: which scenarios a sweep runs.
//
// A sweep file (schema pdsim.sweep/1, described by scenarios/sweep.schema.json) has a scenario, parameters
// that each set one or several of its values, constraints between them and objectives. Its points are
// numbered from 0 in an order that depends on the file alone, so that any machine can run any part of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/study/objective.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {

/// One axis. Its i-th level sets every one of its paths, or for options, what the option lists.
struct Parameter {
  std::string name;                 ///< its column
  std::vector<std::string> labels;  ///< by level: a number, a word, or an option's name
  bool numeric = false;             ///< its levels are numbers; options are names whatever they look like
  std::vector<std::vector<std::string>>
      sets;  ///< by level: as --set takes them; "generate.x=..." for a trace's knobs
};

/// One point: a level of each parameter.
struct SweepPoint {
  std::uint64_t number = 0;
  std::vector<std::uint32_t> levels;  ///< by parameter
};

/// What a contrast compares: the levels of one parameter, all others being equal.
struct Contrast {
  std::uint32_t parameter = 0;
  Objective objective;
};

struct Space {
  std::string name;
  std::string title;   ///< one sentence; may be empty
  std::string file;    ///< as errors name it
  std::string sha256;  ///< of what decides the results: the sweep, the scenario in force, overrides
  RunSpec base;        ///< the scenario, with what all points set
  std::vector<Parameter> parameters;
  std::vector<SweepPoint> points;
  std::vector<Objective>
      objectives;  ///< those of contrasts too, after the others where they are not among them
  std::vector<Contrast> contrasts;  ///< each objective is one of `objectives`
  std::uint64_t excluded = 0;       ///< combinations that a constraint ruled out
  std::uint64_t repeated = 0;       ///< of a sample's, those that were there already and are left out
  bool sampled = false;             ///< a Latin hypercube, not a grid

  /// What is to be run at a point. O(parameters).
  RunSpec spec_of(const SweepPoint& point) const;
};

/// Reads a sweep file ("-" = stdin). `options` come after what the file sets, and before its parameters.
/// Paths and values are checked as `--set` would, one level at a time: a level that no company of other
/// levels makes readable is an error, a combination that cannot work is none here. Of a parameter with more
/// than a hundred levels a hundred are looked at, evenly spread. A Latin hypercube has a sample's points,
/// and contrasted parameters are crossed with it: each of its points at each of their levels. InputError for
/// what is wrong in the file, for no point at all, and for more than `most` points. O(points x parameters).
Space read_space(const std::string& path, const ReplayOptions& options, std::uint64_t most = 1'000'000);

/// Puts other objectives in the place of the file's; those of contrasts stay, after them.
void judge_by(Space& space, std::vector<Objective> objectives);

}  // namespace pdsim
