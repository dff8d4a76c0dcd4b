#include "tools/study/shard.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

constexpr std::uint64_t kMostShards = 1'000'000;  // chosen: as many as the most points of a sweep

// One scheduler: what says which task this is, and of how many.
struct Scheduler {
  const char* name;
  const char* index;
  const char* count;
  const char* first;  // index of the first task, where it need not be 0
  const char* step;
  const char* last;  // index of the last task
};
constexpr Scheduler kSchedulers[] = {
    {"a Slurm array", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN",
     "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_MAX"},
    {"an AWS Batch array", "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE", nullptr, nullptr,
     nullptr},
    {"a Kubernetes indexed job", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", nullptr, nullptr, nullptr},
};

std::optional<std::uint64_t> whole_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> read(const Environment& environment, const char* name, std::uint64_t least) {
  if (name == nullptr) return std::nullopt;
  const std::optional<std::string> text = environment(name);
  if (!text || text->empty()) return std::nullopt;
  const std::optional<std::uint64_t> value = whole_number(*text);
  if (!value || *value < least) {
    throw InputError(name, fmt::format("is '{}', expected a whole number, {} or more; --shard I/N overrides "
                                       "the environment",
                                       *text, least));
  }
  return value;
}

std::uint64_t count_of(std::string_view text, const std::string& whole, const std::string& place) {
  const std::optional<std::uint64_t> count = whole_number(text);
  if (!count || *count < 1 || *count > kMostShards) {
    throw InputError(place,
                     fmt::format("is '{}', expected I/N or /N, N shards from 1 to {}", whole, kMostShards));
  }
  return *count;
}

}  // namespace

std::string Shard::text() const {
  return fmt::format("{}/{}", index, count);
}

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);  // read before any thread is started
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Shard parse_shard(const std::string& text, const std::string& place) {
  const std::size_t slash = text.find('/');
  const std::optional<std::uint64_t> index = whole_number(std::string_view(text).substr(0, slash));
  if (slash == std::string::npos || !index) {
    throw InputError(place, fmt::format("is '{}', expected I/N: shard I, from 0, of N", text));
  }
  const std::uint64_t count = count_of(std::string_view(text).substr(slash + 1), text, place);
  if (*index >= count) {
    throw InputError(place, fmt::format("is '{}', expected I/N with I from 0 to {}", text, count - 1));
  }
  return {*index, count};
}

ChosenShard choose_shard(const std::string& option, const Environment& environment) {
  if (!option.empty() && option.front() != '/') return {parse_shard(option, "--shard"), "--shard"};
  std::optional<std::uint64_t> given;
  if (!option.empty()) given = count_of(std::string_view(option).substr(1), option, "--shard");

  for (const Scheduler& scheduler : kSchedulers) {
    const std::optional<std::uint64_t> id = read(environment, scheduler.index, 0);
    if (!id) continue;
    if (given) {
      if (*id >= *given) {
        throw InputError(scheduler.index, fmt::format("is {}, expected 0 to {} for --shard {}: number the "
                                                      "tasks from 0",
                                                      *id, *given - 1, option));
      }
      return {{*id, *given}, fmt::format("{} and --shard {}", scheduler.index, option)};
    }
    const std::optional<std::uint64_t> count = read(environment, scheduler.count, 1);
    if (!count) {
      throw InputError(
          scheduler.count,
          fmt::format("is not set, though {} is {}: this looks like {}, and of how many tasks is "
                      "not known; expected --shard /N, which takes the index from the "
                      "environment, or --shard 0/1 for the whole sweep",
                      scheduler.index, *id, scheduler.name));
    }
    const std::uint64_t first = read(environment, scheduler.first, 0).value_or(0);
    const std::uint64_t step = read(environment, scheduler.step, 1).value_or(1);
    const std::uint64_t index = *id < first ? *count : (*id - first) / step;
    if (index >= *count || (*id - first) % step != 0 || *count > kMostShards) {
      throw InputError(
          scheduler.index,
          fmt::format("is {}, which is none of {} evenly numbered tasks from {}; expected an array "
                      "such as 0-{}, or --shard I/N",
                      *id, *count, first, *count - 1));
    }
    const std::optional<std::uint64_t> last = read(environment, scheduler.last, 0);
    const bool part = last && (*last < first || (*last - first) / step + 1 != *count);
    if (part || (*count == 1 && first > 0)) {  // some tasks of a larger array, submitted again
      throw InputError(scheduler.count,
                       fmt::format("is {}, though {} is {}: this looks like a part of an array, and of how "
                                   "many tasks is not known; expected --shard /N with N of the whole array",
                                   *count, scheduler.index, *id));
    }
    return {{index, *count}, fmt::format("{} of {}", scheduler.index, scheduler.name)};
  }
  if (given) {
    throw InputError("--shard",
                     fmt::format("is '{}', and none of SLURM_ARRAY_TASK_ID, "
                                 "AWS_BATCH_JOB_ARRAY_INDEX and JOB_COMPLETION_INDEX is set; expected "
                                 "I/N, or a job array",
                                 option));
  }
  return {};
}

}  // namespace pdsim
