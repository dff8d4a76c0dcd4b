// Which part of a sweep is this process's: its shard, from the command line or from the scheduler that
// started it.
//
// Point p belongs to shard p mod N. That needs no coordinator: every process that reads the same sweep file
// knows its own points, and what `pdsim merge` should find where.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace pdsim {

struct Shard {
  std::uint64_t index = 0, count = 1;
  bool operator==(const Shard&) const = default;

  bool has(std::uint64_t point) const { return point % count == index; }
  bool whole() const { return count == 1; }
  std::string text() const;  ///< "2/8"
};

/// A shard and who said so, for the user to see.
struct ChosenShard {
  Shard shard;
  std::string from;  ///< "--shard", "SLURM_ARRAY_TASK_ID"; empty = nobody, the whole sweep
};

/// Value of an environment variable; nothing when it is not set. An empty one counts as not set.
using Environment = std::function<std::optional<std::string>(const char* name)>;

/// The process's own.
std::optional<std::string> process_environment(const char* name);

/// "I/N", I from 0. InputError at `place`.
Shard parse_shard(const std::string& text, const std::string& place);

/// `option` is --shard as given: "I/N", "/N" (the index comes from the environment), or empty. Then the
/// environment says both, in this order:
///   Slurm       (SLURM_ARRAY_TASK_ID - _MIN) / _STEP of SLURM_ARRAY_TASK_COUNT
///   AWS Batch   AWS_BATCH_JOB_ARRAY_INDEX of AWS_BATCH_JOB_ARRAY_SIZE
///   Kubernetes  JOB_COMPLETION_INDEX of JOB_COMPLETIONS, which the job has to set itself
/// With "/N" an index is taken as it is, SLURM_ARRAY_TASK_ID too, so that tasks submitted again alone
/// (--array=3) keep their points; without it such a part of an array is refused. InputError names the
/// variable that cannot be.
ChosenShard choose_shard(const std::string& option, const Environment& environment = process_environment);

}  // namespace pdsim
