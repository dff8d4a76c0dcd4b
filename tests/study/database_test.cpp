// Theory: what was recorded is there, whatever becomes of the process or the disk; a file is never mixed
// with what does not belong to it; shards joined are the sweep.
#include "tools/study/database.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"
#include "tests/traces/files.hpp"
#include "tools/study/files.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

// 3 x 2 x 2 points. Names that SQL, or this schema, has other uses for.
Space space_of(const std::string& name = "tiny") {
  Space space;
  space.name = name;
  space.sha256 = "0123456789abcdef" + name;
  space.parameters = {{"load", {"0.5", "1", "1e5"}, true, {{}, {}, {}}},
                      {"Status", {"pull", "it's \"quoted\", so"}, false, {{}, {}}},
                      {"a\"); DROP TABLE points; --", {"1", "-2"}, true, {{}, {}}}};
  space.objectives = {find_objective("ttft_p95", "test"), find_objective("max:workers.decode-0.mfu", "test")};
  for (std::uint32_t p = 0; p < 12; ++p) space.points.push_back({p, {p / 4, p / 2 % 2, p % 2}});
  return space;
}

PointResult result_of(const Space& space, std::uint64_t number) {
  PointResult result;
  result.point = space.points[number];
  result.wall_s = 0.1;
  if (number == 7) {
    result.status = PointStatus::failed;
    result.error = "a, \"b\" and c";
    return result;
  }
  const double value = std::sqrt(static_cast<double>(number) + 2);
  result.summary = std::make_shared<ordered_json>(
      ordered_json{{"latency_ms", {{"ttft", {{"p95", value}, {"n", number}}}}},
                   {"workers", {{{"name", "decode-0"}, {"role", "decode"}, {"mfu", value / 10}}}},
                   {"cost", {{"billed_usd", nullptr}}},
                   {"bound_by", {{"code", "prefill_queue"}}}});
  result.files = {{"/nowhere/trace.jsonl", "abc"}};
  return result;
}

void record(SweepDatabase& database, std::uint64_t from, std::uint64_t to) {
  for (std::uint64_t p = from; p < to; ++p) {
    if (database.shard().has(p)) database.record(result_of(database.space(), p));
  }
}

std::string made(const Folder& folder, const std::string& name, Shard shard = {}, std::uint64_t to = 12) {
  SweepDatabase database(folder / name, space_of(), shard, {});
  record(database, 0, to);
  database.close();
  return folder / name;
}

std::string csv_of(const std::string& path) {
  const Folder folder;
  std::FILE* file = std::fopen((folder / "csv").c_str(), "wb");
  SweepDatabase(path).write_csv(file);
  std::fclose(file);
  return bytes_of(folder / "csv");
}

// Rows of a query as the command sqlite3 prints them.
std::string sqlite(const std::string& path, const std::string& sql) {
  sqlite3* db = nullptr;
  EXPECT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  std::string out;
  char* error = nullptr;
  const auto row = [](void* to, int columns, char** values, char**) {
    for (int c = 0; c < columns; ++c) {
      if (c > 0) *static_cast<std::string*>(to) += '|';
      if (values[c] != nullptr) *static_cast<std::string*>(to) += values[c];
    }
    *static_cast<std::string*>(to) += '\n';
    return 0;
  };
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), row, &out, &error), SQLITE_OK) << error;
  sqlite3_free(error);
  sqlite3_close(db);
  return out;
}

// Overwrites a number in the file's header: user_version at 60, application_id at 68.
void patch(const std::string& path, long offset, const std::string& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  std::fseek(file, offset, SEEK_SET);
  std::fwrite(bytes.data(), 1, bytes.size(), file);
  std::fclose(file);
}

template <typename Work>
void expect_refused(Work work, const std::string& expected) {
  try {
    work();
    ADD_FAILURE() << "nothing was refused: " << expected;
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(expected), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

TEST(Database, WhatIsRecordedIsReadBack) {
  const Folder folder;
  const std::string path = made(folder, "new/made/here.db");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "new/made"), {}),
            1);  // one file remains
  const SweepDatabase read(path);
  EXPECT_EQ(read.space().name, "tiny");
  EXPECT_EQ(read.points(), 12u);
  EXPECT_EQ(read.version(), PDSIM_VERSION);
  const Space space = space_of();
  ASSERT_EQ(read.space().points.size(), 12u);
  for (std::size_t p = 0; p < 12; ++p) EXPECT_EQ(read.space().points[p].levels, space.points[p].levels);
  const std::vector<ResultRow> rows = read.rows();
  ASSERT_EQ(rows.size(), 12u);
  EXPECT_EQ(rows[11].labels, (std::vector<std::string>{"1e5", "it's \"quoted\", so", "-2"}));
  EXPECT_EQ(rows[3].objectives[0], std::sqrt(5.0));
  EXPECT_EQ(rows[3].objectives[1], std::sqrt(5.0) / 10);
  EXPECT_FALSE(rows[7].finished);
  EXPECT_EQ(rows[7].objectives[0], std::nullopt);
  EXPECT_EQ(read.statuses()[7].second, PointStatus::failed);
  const auto errors = read.first_errors();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].first, 7u);
}

TEST(Database, TheSchemaIsAsDocumented) {
  const Folder folder;
  const std::string path = made(folder, "a.db");
  EXPECT_EQ(sqlite(path,
                   "select count(*) from points; select count(*) from metrics; select count(*) from results;"
                   "select count(*) from timing; pragma user_version"),
            "12\n11\n12\n12\n3\n");
  EXPECT_EQ(sqlite(path,
                   "select point, status, load, parameter_Status, latency_ms_ttft_p95 is not null, "
                   "cost_billed_usd is null, typeof(load), typeof(latency_ms_ttft_n), bound_by_code from "
                   "results where point = 2"),
            "2|finished|0.5|it's \"quoted\", so|1|1|real|integer|prefill_queue\n");
  EXPECT_EQ(
      sqlite(path,
             "select value from meta where key in ('sweep', 'shard', 'points', 'file /nowhere/trace.jsonl') "
             "order by key"),
      "abc\n12\n0/1\ntiny\n");
}

TEST(Database, CsvReadsBackAsItIs) {
  const Folder folder;
  std::istringstream lines(csv_of(made(folder, "a.db")));
  std::string header, row;
  std::getline(lines, header);
  EXPECT_TRUE(header.starts_with(
      "point,status,error,load,parameter_Status,\"a\"\"); DROP TABLE points; --\",requests_injected"))
      << header.substr(0, 100);
  EXPECT_TRUE(
      header.ends_with(",events,evidence,error_ttft,error_tpot,error_throughput,workers_decode-0_mfu"))
      << header.substr(header.size() - 60);
  for (int p = 0; p < 8; ++p) std::getline(lines, row);
  EXPECT_TRUE(row.starts_with("7,failed,\"a, \"\"b\"\" and c\",1,\"it's \"\"quoted\"\", so\",-2,,,")) << row;
  std::getline(lines, row);
  EXPECT_NE(row.find(",3.1622776601683795,"), std::string::npos);  // sqrt(10) to the last bit
}

TEST(Database, OrderAndThreadsLeaveNoTrace) {
  const Folder folder;
  const std::string ascending = csv_of(made(folder, "a.db"));
  SweepDatabase database(folder / "b.db", space_of(), {}, {});
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&database, t] {
        for (std::uint64_t p = 12; p-- > 0;) {
          if (p % 4 == t) database.record(result_of(database.space(), p));
        }
      });
    }
  }
  database.record(result_of(database.space(), 5));  // again: in the place of the first
  database.close();
  EXPECT_EQ(csv_of(folder / "b.db"), ascending);
  for (const char* table : {"points", "metrics"}) {
    EXPECT_EQ(sqlite(folder / "b.db", std::string("select * from ") + table),
              sqlite(folder / "a.db", std::string("select * from ") + table));
  }
}

// Both a process that is killed between points and one in the middle of recording.
TEST(Database, KilledProcessesLoseNothing) {
  const Folder folder;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const std::string path = folder / ("k" + std::to_string(attempt));
    int done[2];
    ASSERT_EQ(pipe(done), 0);
    const pid_t child = fork();
    if (child == 0) {
      SweepDatabase database(path, space_of(), {}, {});
      for (std::uint64_t p = 0;; p = (p + 1) % 12) {
        database.record(result_of(database.space(), p));
        const char c = 'x';
        if (write(done[1], &c, 1) != 1) _exit(1);
        if (attempt == 0 && p == 4) raise(SIGKILL);
      }
    }
    close(done[1]);
    int reported = 0;
    char c = 0;
    while (reported < 5 + attempt && read(done[0], &c, 1) == 1) ++reported;
    if (attempt > 0) kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    close(done[0]);
    ASSERT_TRUE(WIFSIGNALED(status));
    SweepDatabase again(path, space_of(), {}, {.resume = true});
    const auto there = again.statuses();
    EXPECT_GE(there.size(), static_cast<std::size_t>(reported));
    if (attempt == 0) {
      EXPECT_EQ(there.size(), 5u);
    }
    record(again, there.size(), 12);
    again.close();
    EXPECT_EQ(csv_of(path), csv_of(made(folder, "whole" + std::to_string(attempt))));
  }
}

TEST(Database, AFullDiskKeepsWhatIsThere) {
  const Folder folder;
  const std::string path = folder / "full.db";
  std::uint64_t kept = 0;
  {
    SweepDatabase database(path, space_of(), {}, {.most_pages = 24});
    try {
      for (;; ++kept) {
        PointResult result = result_of(database.space(), kept % 12);
        result.status = PointStatus::stalled;
        result.error = std::string(4000, 'e');
        database.record(result);
        if (kept == 100) FAIL() << "never full";
      }
    } catch (const DatabaseFailed& error) {
      EXPECT_NE(std::string(error.what()).find("full"), std::string::npos) << error.what();
    }
    EXPECT_EQ(database.statuses().size(), kept);
    EXPECT_GT(kept, 0u);
    EXPECT_LT(kept, 12u);
  }
  SweepDatabase again(path, space_of(), {}, {.resume = true});
  EXPECT_EQ(again.statuses().size(), kept);
  record(again, 0, 12);
  again.close();
  EXPECT_EQ(csv_of(path), csv_of(made(folder, "whole")));
}

TEST(Database, OneProcessAtATime) {
  const Folder folder;
  const std::string path = folder / "a.db";
  const auto first = std::make_unique<SweepDatabase>(path, space_of(), Shard{}, SweepDatabase::Open{});
  const std::string who = "is in use by process " + std::to_string(getpid()) + " on ";
  expect_refused([&] { SweepDatabase(path, space_of(), {}, {.resume = true}); }, who);
  expect_refused([&] { SweepDatabase{path}; }, who);
  const std::string inputs[] = {path};
  expect_refused([&] { merge_databases(inputs, folder / "m.db", {}); }, who);
  first->close();
  SweepDatabase(path, space_of(), {}, {.resume = true}).close();
  EXPECT_EQ(folder.files(), 1u);
}

// Of many that start at once on one name, one gets it.
TEST(Database, OfManyAtOnceOneStarts) {
  const Folder folder;
  int go[2];
  ASSERT_EQ(pipe(go), 0);
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i) {
    children.push_back(fork());
    if (children.back() == 0) {
      close(go[1]);
      char c = 0;
      static_cast<void>(!read(go[0], &c, 1));
      try {
        const SweepDatabase database(folder / "a.db", space_of(), {}, {});
        usleep(300'000);
        _exit(0);
      } catch (const InputError&) {
        _exit(2);
      }
    }
  }
  close(go[0]);
  close(go[1]);
  int got = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    got += WEXITSTATUS(status) == 0 ? 1 : 0;
  }
  EXPECT_EQ(got, 1);
}

TEST(Database, WhatIsNotItsOwnIsRefused) {
  const Folder folder;
  const Space space = space_of();
  const auto open = [&](const std::string& path, bool resume, Shard shard = {}) {
    return [=] { SweepDatabase(path, space, shard, {.resume = resume}); };
  };
  const std::string good = made(folder, "good.db");
  const std::string bytes = bytes_of(good);
  expect_refused(open(good, false), "is there already; --resume goes on with it");
  expect_refused(open(folder / "", true), "is a folder");
  expect_refused(open(good + "/x.db", false), "is not a folder");
  expect_refused(
      open(folder.file("text", "not a database, but long enough to look like one to a reader"), true),
      "is no SQLite database");
  sqlite(folder / "other.db", "create table t (a)");
  expect_refused(open(folder / "other.db", true), "of another application");
  expect_refused([&] { SweepDatabase(folder / "none.db"); }, "is no file");
  expect_refused([&] { SweepDatabase(folder.file("empty.db", "")); }, "is empty");
  expect_refused([&] { SweepDatabase(good, space_of("other"), {}, {.resume = true}); },
                 "has results of the sweep tiny, not of other");
  Space changed = space;
  changed.sha256 = "fedcba9876543210";
  expect_refused(
      [&] { SweepDatabase(good, changed, {}, {.resume = true}); },
      "has results of another state of the sweep tiny (sha256 0123456789ab there, fedcba987654 now");
  expect_refused(open(good, true, {1, 3}), "has shard 0/1, and this is 1/3");
  Space more = space;
  more.objectives.push_back(find_objective("min:links.0.utilization.mean", "test"));
  expect_refused([&] { SweepDatabase(good, more, {}, {.resume = true}); },
                 "was begun without the objective links.0.utilization.mean");
  EXPECT_EQ(bytes_of(good), bytes);  // nothing of this has changed it

  folder.file("v4.db", bytes);
  patch(folder / "v4.db", 60, std::string("\0\0\0\4", 4));
  expect_refused(open(folder / "v4.db", true),
                 "has results in version 4 of the schema, and this pdsim reads");
  folder.file("old.db", bytes);
  sqlite(folder / "old.db", "update meta set value = '0.0.9' where key = 'pdsim_version'");
  expect_refused(open(folder / "old.db", true), "has results of pdsim 0.0.9, and this is " PDSIM_VERSION);
  SweepDatabase mixed(folder / "old.db", space, {}, {.resume = true, .allow_mixed_versions = true});
  EXPECT_EQ(mixed.version(), "0.0.9, " PDSIM_VERSION);
  folder.file("cut.db", bytes.substr(0, bytes.size() / 2));
  expect_refused(open(folder / "cut.db", true), "is damaged");
  folder.file("holes.db", bytes);
  for (long at = 4096 * 2; at < static_cast<long>(bytes.size()); at += 4096) {
    patch(folder / "holes.db", at, std::string(64, '\xff'));
  }
  expect_refused(open(folder / "holes.db", true), "is damaged");
}

TEST(Database, OtherColumnsAreAnotherVersion) {
  const Folder folder;
  const std::string renamed = made(folder, "a.db"), added = made(folder, "b.db");
  sqlite(renamed, "drop view results; alter table metrics rename column events to occurrences");
  expect_refused([&] { SweepDatabase{renamed}; },
                 "has other columns than this pdsim writes to metrics (occurrences)");
  sqlite(added, "alter table points add column more");
  expect_refused([&] { SweepDatabase(added, space_of(), {}, {.resume = true}); },
                 "has other columns than this pdsim writes to points (more)");
}

TEST(Database, AMissingTableIsDamage) {
  const Folder folder;
  for (const auto& [drop, expected] :
       {std::pair("table meta", "is damaged: no such table: meta"),
        std::pair("table timing", "timing (no point)"), std::pair("view results", "results (no point)"),
        std::pair("table points", "points (no point)")}) {
    SCOPED_TRACE(drop);
    const std::string path = made(folder, std::string(drop) + ".db");
    sqlite(path, std::string("drop ") + drop);
    expect_refused([&] { SweepDatabase{path}; }, expected);
    expect_refused([&] { SweepDatabase(path, space_of(), {}, {.resume = true}); }, expected);
  }
}

// From the `failing.at`-th on, every call of SQLite's to the system of one kind fails with `failing.error`.
struct Failing {
  long at = -1, seen = 0;
  int error = 0;
  bool now() {
    if (at < 0 || seen++ < at) return false;
    errno = error;
    return true;
  }
} failing;

ssize_t failing_pread(int fd, void* to, size_t n, off64_t at) {
  return failing.now() ? -1 : pread64(fd, to, n, at);
}
ssize_t failing_pwrite(int fd, const void* from, size_t n, off64_t at) {
  return failing.now() ? -1 : pwrite64(fd, from, n, at);
}
int failing_open(const char* path, int flags, int mode) {
  return failing.now() ? -1 : open(path, flags, mode);
}
int failing_truncate(int fd, off_t size) {
  return failing.now() ? -1 : ftruncate(fd, size);
}

struct SystemCall {
  const char* name;
  sqlite3_syscall_ptr replacement;
  int error;
};

// Everything that is done with results, with files closed by their destructors where it breaks off.
void use_all(const Folder& folder) {
  {
    SweepDatabase database(folder / "s0", space_of(), {0, 2}, {});
    record(database, 0, 12);
    database.close();
  }
  SweepDatabase database(folder / "s1", space_of(), {1, 2}, {});
  record(database, 0, 6);
  EXPECT_EQ(database.statuses().size(), 3u);
  EXPECT_EQ(database.rows().size(), 3u);
  EXPECT_EQ(database.first_errors().size(), 0u);
  database.close();
  SweepDatabase again(folder / "s1", space_of(), {1, 2}, {.resume = true});
  record(again, 6, 12);
  again.close();
  const std::string shards[] = {folder / "s0", folder / "s1"};
  merge_databases(shards, folder / "all", {});
  std::FILE* file = std::fopen((folder / "csv").c_str(), "wb");
  SweepDatabase(folder / "all").write_csv(file);
  std::fclose(file);
  SweepDatabase made_only(folder / "none", space_of(), {}, {});
  made_only.discard();
}

// Wherever the disk fails, what comes out is an InputError (DatabaseFailed is one), whose message is one
// line and names a file; never another exception, and never silence: the work is done or it is refused.
TEST(Database, WhateverSystemCallFailsIsAnInputError) {
  sqlite3_vfs* vfs = sqlite3_vfs_find(nullptr);
  const SystemCall calls[] = {{"pread64", reinterpret_cast<sqlite3_syscall_ptr>(failing_pread), EIO},
                              {"pwrite64", reinterpret_cast<sqlite3_syscall_ptr>(failing_pwrite), ENOSPC},
                              {"open", reinterpret_cast<sqlite3_syscall_ptr>(failing_open), EACCES},
                              {"ftruncate", reinterpret_cast<sqlite3_syscall_ptr>(failing_truncate), EIO}};
  for (const SystemCall& call : calls) {
    ASSERT_EQ(vfs->xSetSystemCall(vfs, call.name, call.replacement), SQLITE_OK) << call.name;
    int refused = 0;
    bool done = false;
    for (long at = 0; !done; at += 1 + at / 8) {
      SCOPED_TRACE(fmt::format("{} number {}", call.name, at));
      const Folder folder;
      failing = {.at = at, .seen = 0, .error = call.error};
      try {
        use_all(folder);
        done = failing.seen <= at;
      } catch (const InputError& error) {
        ++refused;
        const std::string text = error.what();
        EXPECT_NE(text.find(folder / ""), std::string::npos) << text;
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "not the input's fault: " << error.what();
      }
      failing = {};
    }
    EXPECT_GT(refused, 3) << call.name;
    vfs->xSetSystemCall(vfs, call.name, nullptr);
  }
}

// SQLite takes this name for a database in memory, whose results nobody would see again.
TEST(Database, WithoutAWriteAheadLogIsRefused) {
  expect_refused([&] { SweepDatabase(":memory:", space_of(), {}, {}); },
                 "cannot be kept with a write-ahead log here (its journal is 'memory')");
}

TEST(Database, SharesAndErrorsGoWithTheRows) {
  const Folder folder;
  SweepDatabase database(folder / "a.db", space_of(), {}, {});
  PointResult result = result_of(database.space(), 1);
  auto summary = std::make_shared<ordered_json>(*result.summary);
  (*summary)["requests"] = {{"injected", 8}, {"completed", 6}};
  result.summary = summary;
  result.evidence.emplace();
  result.evidence->grade = Grade::published;
  result.evidence->ttft = {.median = 0.25, .p90 = 0.5, .bias = 0, .n = 3};
  database.record(result);
  database.record(result_of(database.space(), 2));
  const std::vector<ResultRow> rows = database.rows();
  EXPECT_EQ(rows[0].completed, 0.75);
  ASSERT_EQ(rows[0].errors.size(), 2u);
  EXPECT_EQ(rows[0].errors[0], 0.25);
  EXPECT_TRUE(std::isnan(rows[0].errors[1]));  // throughput's, of which none was measured
  EXPECT_EQ(rows[1].completed, 1);
  EXPECT_TRUE(rows[1].errors.empty());
  database.close();
  EXPECT_EQ(sqlite(folder / "a.db", "select evidence, error_ttft, error_tpot from results where point = 1"),
            "published claim|0.25|\n");
}

TEST(Database, OnlyWhatItMadeAndNobodyFilledIsDiscarded) {
  const Folder folder;
  SweepDatabase(folder / "none.db", space_of(), {}, {}).discard();
  EXPECT_EQ(folder.files(), 0u);
  SweepDatabase filled(folder / "a.db", space_of(), {}, {});
  record(filled, 0, 1);
  filled.discard();
  filled.close();
  SweepDatabase(folder / "a.db", space_of(), {}, {.resume = true}).discard();
  EXPECT_EQ(SweepDatabase(folder / "a.db").statuses().size(), 1u);
}

// While points are recorded, and when the results are gone on with; what is not there any more is no matter.
TEST(Database, AnotherFileIsNoticed) {
  const Folder folder;
  SweepDatabase database(folder / "a.db", space_of(), {}, {});
  record(database, 0, 2);
  PointResult other = result_of(database.space(), 2);
  other.files = {{"/nowhere/trace.jsonl", "abd"}};
  expect_refused([&] { database.record(other); }, "/nowhere/trace.jsonl: is not what it was when points in ");
  EXPECT_EQ(database.statuses().size(), 2u);
  PointResult more = result_of(database.space(), 2);
  more.files.emplace(folder.file("profile.json", "{}"), sha256_hex(std::string("{}")));
  more.files.emplace(PDSIM_SOURCE_DIR "/models/gpus.json", digest_of(PDSIM_SOURCE_DIR "/models/gpus.json"));
  database.record(more);
  database.close();
  const auto resume = [&] { SweepDatabase(folder / "a.db", space_of(), {}, {.resume = true}).close(); };
  resume();
  folder.file("profile.json", "{ }");
  expect_refused(resume, folder / "profile.json: is not what it was when points in " + (folder / "a.db"));
  std::filesystem::remove(folder / "profile.json");
  resume();
  // What pdsim ships is named alike wherever it lies.
  EXPECT_EQ(sqlite(folder / "a.db", "select key from meta where key like '%gpus%'"),
            "file models/gpus.json\n");
  sqlite(folder / "a.db", "update meta set value = 'abc' where key like '%gpus%'");
  expect_refused(resume, "models/gpus.json: is not what it was");
  Space changed = space_of();
  changed.sha256 = "fedcba9876543210";  // the file is said first: it is why
  expect_refused([&] { SweepDatabase(folder / "a.db", changed, {}, {.resume = true}); },
                 "models/gpus.json: is not what it was");
}

// Another version ships other files: it is the version that is refused, and once it is allowed they are no
// matter, while a file of the user's still is.
TEST(Database, AnotherVersionHasFilesOfItsOwn) {
  const Folder folder;
  const std::string path = folder / "a.db", gpus = PDSIM_SOURCE_DIR "/models/gpus.json";
  SweepDatabase database(path, space_of(), {}, {});
  PointResult result = result_of(database.space(), 0);
  result.files = {
      {gpus, "abc"}, {folder.file("profile.json", "{}"), sha256_hex(std::string("{}"))}, {"-", "abc"}};
  database.record(result);
  database.close();
  sqlite(path, "update meta set value = '0.0.9' where key = 'pdsim_version'");
  expect_refused([&] { SweepDatabase(path, space_of(), {}, {.resume = true}); },
                 path + ": has results of pdsim 0.0.9, and this is ");
  const SweepDatabase::Open mixed = {.resume = true, .allow_mixed_versions = true};
  {
    SweepDatabase again(path, space_of(), {}, mixed);
    result.point = again.space().points[1];
    result.files.erase({gpus, "abc"});
    result.files.emplace(gpus, digest_of(gpus));
    again.record(result);
    PointResult other = result_of(again.space(), 2);
    other.files = {{"-", "abd"}};
    expect_refused([&] { again.record(other); }, "stdin: is not what it was when points in ");
    other.files = {{folder / "profile.json", "abd"}};
    expect_refused([&] { again.record(other); }, folder / "profile.json: is not what it was when points in ");
    again.close();
  }
  folder.file("profile.json", "{ }");
  expect_refused([&] { SweepDatabase(path, space_of(), {}, mixed); },
                 folder / "profile.json: is not what it was when points in ");
}

// What a process leaves that died while it was making the file is no obstacle.
TEST(Database, AFileWithoutResultsIsBegunAnew) {
  const Folder folder;
  folder.file("a.db", "");
  folder.file("a.db.lock", "process 1 on nowhere");
  SweepDatabase database(folder / "a.db", space_of(), {}, {.resume = true});
  record(database, 0, 12);
  database.close();
  EXPECT_EQ(folder.files(), 1u);
  EXPECT_EQ(csv_of(folder / "a.db"), csv_of(made(folder, "b.db")));
}

struct Shards {
  Folder folder;
  std::vector<std::string> paths;
  Shards() {
    for (std::uint64_t i = 0; i < 3; ++i) paths.push_back(made(folder, fmt::format("s{}", i), {i, 3}));
  }
};

TEST(Merge, ShardsAreTheSweep) {
  const Shards s;
  const std::string whole = made(s.folder, "whole.db"), joined = s.folder / "joined.db";
  const std::string backwards[] = {s.paths[2], s.paths[0], s.paths[1]};
  merge_databases(backwards, joined, {});
  EXPECT_EQ(csv_of(joined), csv_of(whole));
  for (const char* table : {"points", "metrics"}) {
    EXPECT_EQ(sqlite(joined, std::string("select * from ") + table),
              sqlite(whole, std::string("select * from ") + table));
  }
  EXPECT_EQ(sqlite(joined, "select value from meta order by key"),
            sqlite(whole, "select value from meta order by key"));
  EXPECT_EQ(s.folder.files(), 5u);
  expect_refused([&] { merge_databases(s.paths, joined, {}); }, "is there already");
  SweepDatabase(joined, space_of(), {}, {.resume = true}).close();  // and can be gone on with as such
}

TEST(Merge, GapsAreRefusedByShard) {
  const Shards s;
  const std::string out = s.folder / "out.db";
  const std::string two[] = {s.paths[0], s.paths[2]};
  expect_refused([&] { merge_databases(two, out, {}); },
                 "of 12 points 4 are missing: 1, 4, 7, 10; shard 1/3 is in no file given");
  const std::string cut = made(s.folder, "cut", {1, 3}, 6);
  const std::string three[] = {s.paths[0], cut, s.paths[2]};
  expect_refused([&] { merge_databases(three, out, {}); },
                 "of 12 points 2 are missing: 7, 10; shard 1/3 is not complete in " + cut);
  expect_refused([&] { merge_databases(two, s.folder / "new/made/out.db", {}); }, "are missing");
  EXPECT_FALSE(std::filesystem::exists(s.folder / "new"));
  EXPECT_EQ(s.folder.files(), 4u);
  merge_databases(three, out, {.allow_gaps = true});
  EXPECT_EQ(SweepDatabase(out).statuses().size(), 10u);
  EXPECT_EQ(SweepDatabase(out).points(), 12u);
}

TEST(Merge, DuplicatesAreRefusedUnlessEqual) {
  const Shards s;
  const std::string out = s.folder / "out.db";
  const std::string again = made(s.folder, "again", {1, 3});
  std::vector<std::string> four = s.paths;
  four.push_back(again);
  expect_refused([&] { merge_databases(four, out, {}); }, again + ": has point 1, and so has " + s.paths[1]);
  merge_databases(four, out, {.allow_duplicates = true});
  EXPECT_EQ(csv_of(out), csv_of(made(s.folder, "whole.db")));
  sqlite(again, "update metrics set latency_ms_ttft_p95 = latency_ms_ttft_p95 * (1 + 1e-15) where point = 4");
  expect_refused([&] { merge_databases(four, s.folder / "o2", {.allow_duplicates = true}); },
                 again + ": has point 4 with other results than " + s.paths[1]);
  const std::string twice[] = {
      s.paths[0],
      s.folder / "../" + std::filesystem::path(s.folder / "").parent_path().filename().string() + "/s0"};
  expect_refused([&] { merge_databases(twice, s.folder / "o2", {}); }, "is given twice");
}

TEST(Merge, MixturesAreRefused) {
  const Shards s;
  const std::string out = s.folder / "out.db";
  sqlite(s.paths[1], "update meta set value = '0.0.9' where key = 'pdsim_version'");
  expect_refused([&] { merge_databases(s.paths, out, {}); },
                 s.paths[1] + ": has results of pdsim 0.0.9, and");
  merge_databases(s.paths, out, {.allow_mixed_versions = true});
  EXPECT_EQ(SweepDatabase(out).version(), "0.0.9, " PDSIM_VERSION);
  for (const std::size_t i : {0u, 1u}) {  // what ships with each
    sqlite(s.paths[i], fmt::format("insert into meta values ('file models/gpus.json', '{}')", i));
  }
  merge_databases(s.paths, s.folder / "o1", {.allow_mixed_versions = true});
  EXPECT_EQ(sqlite(s.folder / "o1", "select value from meta where key = 'file models/gpus.json'"), "0\n");
  sqlite(s.paths[2], "update meta set value = '0000' where key = 'sweep_sha256'");
  expect_refused([&] { merge_databases(s.paths, s.folder / "o2", {.allow_mixed_versions = true}); },
                 s.paths[2] + ": has results of another state of the sweep");
  sqlite(s.paths[0], "update meta set value = 'zzz' where key like 'file %'");
  expect_refused([&] { merge_databases(s.paths, s.folder / "o2", {.allow_mixed_versions = true}); },
                 "rests on another /nowhere/trace.jsonl than the files before it");
  EXPECT_EQ(s.folder.files(), 5u);
}

}  // namespace
}  // namespace pdsim
