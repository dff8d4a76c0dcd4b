// Theory: the shards of a sweep are a partition of its points, whoever says which shard this is; and a
// scheduler that says something that cannot be is refused by the name of its variable.
#include "tools/study/shard.hpp"

#include <gtest/gtest.h>

#include <map>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

TEST(Shard, ShardsAreAPartition) {
  for (std::uint64_t count = 1; count <= 7; ++count) {
    for (std::uint64_t point = 0; point < 50; ++point) {
      int owners = 0;
      for (std::uint64_t index = 0; index < count; ++index) owners += Shard{index, count}.has(point) ? 1 : 0;
      EXPECT_EQ(owners, 1);
    }
  }
  EXPECT_TRUE((Shard{2, 3}.has(5)));
  EXPECT_EQ((Shard{2, 3}.text()), "2/3");
}

struct Said {
  const char* option;
  Variables variables;
  Shard shard;
  const char* from;  ///< begins with
};

TEST(Shard, OptionThenSlurmThenBatchThenKubernetes) {
  const Variables slurm = {{"SLURM_ARRAY_TASK_ID", "7"},
                           {"SLURM_ARRAY_TASK_COUNT", "5"},
                           {"SLURM_ARRAY_TASK_MIN", "1"},
                           {"SLURM_ARRAY_TASK_MAX", "9"},
                           {"SLURM_ARRAY_TASK_STEP", "2"}};
  Variables all = slurm;
  all.insert({{"AWS_BATCH_JOB_ARRAY_INDEX", "1"}, {"AWS_BATCH_JOB_ARRAY_SIZE", "2"}});
  const Variables batch = {{"AWS_BATCH_JOB_ARRAY_INDEX", "1"}, {"AWS_BATCH_JOB_ARRAY_SIZE", "2"}};
  const Variables kubernetes = {{"JOB_COMPLETION_INDEX", "0"}, {"JOB_COMPLETIONS", "4"}};
  const Said cases[] = {
      {"", {}, {0, 1}, ""},
      {"", {{"SLURM_ARRAY_TASK_ID", ""}}, {0, 1}, ""},
      {"", slurm, {3, 5}, "SLURM_ARRAY_TASK_ID"},
      {"", all, {3, 5}, "SLURM_ARRAY_TASK_ID"},
      {"", {{"SLURM_ARRAY_TASK_ID", "4"}, {"SLURM_ARRAY_TASK_COUNT", "5"}}, {4, 5}, "SLURM"},
      {"", batch, {1, 2}, "AWS_BATCH_JOB_ARRAY_INDEX"},
      {"", kubernetes, {0, 4}, "JOB_COMPLETION_INDEX"},
      {"0/1", all, {0, 1}, "--shard"},
      {"2/3", {}, {2, 3}, "--shard"},
      {"/9", slurm, {7, 9}, "SLURM_ARRAY_TASK_ID and --shard /9"},
      {"/3", {{"JOB_COMPLETION_INDEX", "2"}}, {2, 3}, "JOB_COMPLETION_INDEX"},
  };
  for (const Said& said : cases) {
    const ChosenShard chosen = choose_shard(said.option, environment_of(said.variables));
    EXPECT_EQ(chosen.shard.text(), said.shard.text()) << said.option << " " << chosen.from;
    EXPECT_TRUE(chosen.from.starts_with(said.from)) << chosen.from;
    EXPECT_EQ(chosen.from.empty(), *said.from == '\0');
  }
}

struct Refused {
  const char* option;
  Variables variables;
  const char* expected;
};

TEST(Shard, WhatCannotBeIsRefusedByName) {
  const Variables task4 = {{"SLURM_ARRAY_TASK_ID", "4"}};
  const auto with = [](Variables some, const Variables& more) {
    some.insert(more.begin(), more.end());
    return some;
  };
  const Refused cases[] = {
      {"3/3", {}, "--shard: is '3/3', expected I/N with I from 0 to 2"},
      {"x", {}, "--shard: is 'x', expected I/N"},
      {"1", {}, "--shard: is '1', expected I/N"},
      {"1/", {}, "--shard: is '1/', expected"},
      {"-1/3", {}, "--shard: is '-1/3', expected"},
      {"1/0", {}, "--shard: is '1/0', expected"},
      {"1/3/4", {}, "--shard: is '1/3/4', expected"},
      {"/0", {}, "--shard: is '/0', expected"},
      {"/3", {}, "none of SLURM_ARRAY_TASK_ID"},
      {"/3", task4, "SLURM_ARRAY_TASK_ID: is 4, expected 0 to 2"},
      {"", task4, "SLURM_ARRAY_TASK_COUNT: is not set"},
      {"", {{"SLURM_ARRAY_TASK_ID", "four"}}, "SLURM_ARRAY_TASK_ID: is 'four', expected a whole number"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "0"}}), "SLURM_ARRAY_TASK_COUNT: is '0', expected"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "4"}}), "SLURM_ARRAY_TASK_ID: is 4, which is none of 4"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "9"}, {"SLURM_ARRAY_TASK_MIN", "5"}}),
       "SLURM_ARRAY_TASK_ID: is 4, which is none of"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "9"}, {"SLURM_ARRAY_TASK_STEP", "3"}}),
       "SLURM_ARRAY_TASK_ID: is 4, which is none of"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "9"}, {"SLURM_ARRAY_TASK_STEP", "0"}}),
       "SLURM_ARRAY_TASK_STEP: is '0'"},
      {"", with(task4, {{"SLURM_ARRAY_TASK_COUNT", "1"}, {"SLURM_ARRAY_TASK_MIN", "4"}}),
       "SLURM_ARRAY_TASK_COUNT: is 1, though SLURM_ARRAY_TASK_ID is 4: this looks like a part of an array"},
      {"",
       with(task4,
            {{"SLURM_ARRAY_TASK_COUNT", "2"}, {"SLURM_ARRAY_TASK_MIN", "4"}, {"SLURM_ARRAY_TASK_MAX", "6"}}),
       "SLURM_ARRAY_TASK_COUNT: is 2, though SLURM_ARRAY_TASK_ID is 4: this looks like a part of an array"},
      {"", {{"AWS_BATCH_JOB_ARRAY_INDEX", "1"}}, "AWS_BATCH_JOB_ARRAY_SIZE: is not set"},
      {"", {{"JOB_COMPLETION_INDEX", "1"}}, "JOB_COMPLETIONS: is not set, though JOB_COMPLETION_INDEX is 1"},
      {"",
       {{"JOB_COMPLETION_INDEX", "4"}, {"JOB_COMPLETIONS", "4"}},
       "JOB_COMPLETION_INDEX: is 4, which is none of"},
  };
  for (const Refused& refused : cases) {
    try {
      choose_shard(refused.option, environment_of(refused.variables));
      ADD_FAILURE() << refused.expected;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(refused.expected), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace pdsim
