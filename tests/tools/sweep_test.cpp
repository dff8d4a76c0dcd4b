// Theory: a sweep's results depend on its file alone: not on threads, shards, kills or interruptions; what
// cannot be is one line that says what to do, and a point that cannot be is a row.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "models/overheads.hpp"
#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

// A scheduler's variables, if this test runs under one, are not the commands'.
const char* const kNoScheduler =
    "env -u SLURM_ARRAY_TASK_ID -u AWS_BATCH_JOB_ARRAY_INDEX -u JOB_COMPLETION_INDEX ";

Ran run_apart(const Folder& folder, const std::string& arguments, const std::string& environment = "") {
  return run(folder, arguments, kNoScheduler + environment);
}

// Two small workers; `requests` of each point, so that a test chooses how long one takes.
std::string sweep_file(int requests, const std::string& parameters) {
  return R"({"schema": "pdsim.sweep/1", "name": "tiny", "objectives": ["ttft_p95", "usd_per_request_in_slo"],
    "scenario": {"name": "tiny", "model": "llama-3.1-8b",
      "pools": [{"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge"},
                {"name": "decode", "role": "decode", "instance": "p5en.48xlarge"}],
      "slo": {"ttft_ms": 2000, "tpot_ms": 50},
      "workload": {"synthetic": {"requests": )" +
         std::to_string(requests) + R"(, "rate": 20, "isl": 300, "osl": 20}}},
    "parameters": {)" +
         parameters + "}}";
}

const std::string kTwelve =
    R"("transfer.mode": ["pull", "push"], "pools.decode.engine.max_num_seqs": [64, 128],
                               "seed": [1, 2, 3])";

std::string csv_of(const Folder& folder, const std::string& options) {
  const Ran ran = run_apart(folder, "sweep s.json --quiet --csv - " + options);
  EXPECT_EQ(ran.status, 0) << ran.err;
  return ran.out;
}

TEST(Sweep, ThreadsAndShardsChangeNothing) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, R"("transfer.mode": ["pull", "push"], "seed": [1, 2, 3, 4])"));
  const std::string whole = csv_of(folder, "--db a.db --jobs 1");
  EXPECT_EQ(std::ranges::count(whole, '\n'), 9);
  EXPECT_EQ(whole, csv_of(folder, "--db b.db --jobs 4"));
  for (const char* shard : {"0/3", "1/3", "2/3"}) {
    const std::string i(shard, 1);
    EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db s" + i + " --shard " + shard).status, 0);
  }
  const Ran merged = run_apart(folder, "merge s2 s0 s1 --db m.db --csv m.csv");
  EXPECT_EQ(merged.status, 0) << merged.err;
  EXPECT_NE(merged.out.find("8 points: 8 finished"), std::string::npos) << merged.out;
  EXPECT_EQ(bytes_of(folder / "m.csv"), whole);
  EXPECT_EQ(folder.files(), 8u);  // nothing beside what was asked for
  // A scheduler says which shard, and which it was is said.
  const Ran slurm = run_apart(folder, "sweep s.json --db slurm.db",
                              "SLURM_ARRAY_TASK_ID=5 SLURM_ARRAY_TASK_MIN=3 SLURM_ARRAY_TASK_COUNT=3");
  EXPECT_EQ(slurm.status, 0) << slurm.err;
  EXPECT_NE(slurm.err.find("shard 2/3 (from SLURM_ARRAY_TASK_ID"), std::string::npos) << slurm.err;
  EXPECT_EQ(run_apart(folder, "merge s0 s1 slurm.db --db m2.db --csv m2.csv").status, 0);
  EXPECT_EQ(bytes_of(folder / "m2.csv"), whole);
}

// Starts a sweep in the background and does something to it once a few points have been committed.
pid_t start(const Folder& folder, const std::string& db) {
  const pid_t child = fork();
  if (child == 0) {
    if (chdir((folder / "").c_str()) != 0) _exit(1);
    const int null = open("/dev/null", O_RDWR);
    for (const int fd : {0, 1, 2}) dup2(null, fd);
    if (db == "i.db") dup2(open((folder / "err").c_str(), O_WRONLY | O_CREAT, 0666), 2);
    for (const char* name : {"SLURM_ARRAY_TASK_ID", "AWS_BATCH_JOB_ARRAY_INDEX", "JOB_COMPLETION_INDEX"}) {
      unsetenv(name);
    }
    execl(PDSIM_BINARY, "pdsim", "sweep", "s.json", "--quiet", "--jobs", "1", "--db", db.c_str(), nullptr);
    _exit(127);
  }
  for (int i = 0; i < 3000; ++i) {  // the log grows by a few pages a point
    std::error_code error;
    const auto size = std::filesystem::file_size(folder / (db + "-wal"), error);
    if (!error && size > 200'000) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return child;
}

TEST(Sweep, KilledOrInterruptedItGoesOnWhereItWas) {
  const Folder folder;
  folder.file("s.json", sweep_file(200, R"("transfer.mode": ["pull", "push"],
                                           "seed": {"from": 1, "to": 12, "steps": 12, "integer": true})"));
  const std::string whole = csv_of(folder, "--db whole.db");
  int status = 0;
  const pid_t killed = start(folder, "k.db");
  // The same file, while it is in use.
  const Ran second = run_apart(folder, "sweep s.json --db k.db --resume");
  kill(killed, SIGKILL);
  waitpid(killed, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the sweep was over before it could be killed";
  EXPECT_EQ(second.status, 2);
  EXPECT_NE(second.err.find("k.db: is in use by process " + std::to_string(killed)), std::string::npos)
      << second.err;

  EXPECT_EQ(run_apart(folder, "sweep s.json --db k.db").status, 2);  // not without being told to
  const Ran partly = run_apart(folder, "merge k.db --db none.db");
  EXPECT_EQ(partly.status, 2);
  EXPECT_NE(partly.err.find("of 24 points "), std::string::npos) << partly.err;
  const Ran resumed = run_apart(folder, "sweep s.json --db k.db --resume --csv k.csv");
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.err.find(" of 24 points are there already"), std::string::npos) << resumed.err;
  EXPECT_EQ(bytes_of(folder / "k.csv"), whole);

  const pid_t interrupted = start(folder, "i.db");
  kill(interrupted, SIGINT);
  waitpid(interrupted, &status, 0);
  EXPECT_EQ(status_of(status), 130);
  const std::string err = bytes_of(folder / "err");
  EXPECT_NE(err.find("of 24 points, which are in i.db: the same command with --resume goes on"),
            std::string::npos)
      << err;
  EXPECT_EQ(csv_of(folder, "--db i.db --resume"), whole);
}

TEST(Sweep, APointThatFailsIsARow) {
  const Folder folder;
  folder.file("s.json",
              sweep_file(20, R"("pools.decode.engine.gpu_memory_utilization": [0.9, 0.05], "seed": [1, 2])"));
  const Ran ran = run_apart(folder, "sweep s.json --db a.db --csv a.csv");
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find("4 points: 2 finished, 2 failed"), std::string::npos) << ran.out;
  std::istringstream rows(bytes_of(folder / "a.csv"));
  std::string header, row;
  std::getline(rows, header);
  int failed = 0;
  while (std::getline(rows, row)) failed += row.find(",failed,") != std::string::npos ? 1 : 0;
  EXPECT_EQ(failed, 2);
  EXPECT_NE(ran.err.find("point 2: "), std::string::npos) << ran.err;  // and its error is said
  // None finished: nothing completes where no prompt fits.
  folder.file("s.json", sweep_file(20, R"("pools.prefill.engine.max_model_len": [100, 200])"));
  const Ran none = run_apart(folder, "sweep s.json --db none.db");
  EXPECT_EQ(none.status, 3) << none.err;
  EXPECT_NE(none.err.find("no point finished"), std::string::npos) << none.err;
}

TEST(Sweep, DryRunWritesNothing) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, kTwelve));
  const Ran ran = run_apart(folder, "sweep s.json --dry-run --db no.db --shard 1/2");
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* expected : {"tiny: 12 points\n", "shard 1/2: 6 of them\n", "point 1:  transfer.mode=pull",
                               "... and 1 more\n", "time: about ", "disk: about ", "3 run whole"}) {
    EXPECT_NE(ran.out.find(expected), std::string::npos) << expected << " in " << ran.out;
  }
  EXPECT_EQ(folder.files(), 1u);
  // More threads than cores are no faster.
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const Ran many = run_apart(folder, "sweep s.json --dry-run --jobs 12");
  const std::string of_cores = cores < 12 ? " (" + std::to_string(cores) + " core" : ",";
  EXPECT_NE(many.out.find(" on 12 threads" + of_cores), std::string::npos) << many.out;
}

TEST(Sweep, ReportsAsJson) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, kTwelve));
  const Ran ran =
      run_apart(folder, "sweep s.json --db a.db --json --objective tpot_p95 --objective min:events");
  EXPECT_EQ(ran.status, 0) << ran.err;
  const json report = json::parse(ran.out);
  EXPECT_EQ(report["schema"], "pdsim.sweep-report/1");
  EXPECT_EQ(report["points"]["finished"], 12);
  EXPECT_EQ(report["points"]["missing"], 0);
  ASSERT_EQ(report["objectives"].size(), 2u);
  EXPECT_EQ(report["objectives"][1]["name"], "events");
  const double best = report["objectives"][0]["best"]["value"];
  EXPECT_FALSE(report["pareto"].empty());
  EXPECT_TRUE(std::ranges::any_of(report["pareto"],
                                  [&](const json& row) { return row["objectives"]["tpot_p95"] == best; }));
  const Ran merged = run_apart(folder, "merge a.db --db b.db --json");
  json same = json::parse(merged.out);
  same["db"] = "a.db";
  EXPECT_EQ(same, report);
}

// A CSV that cannot be written costs nothing but itself, and figures of workers are by point.
TEST(Sweep, AFailedCsvLeavesTheResults) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, R"("seed": [1, 2])"));
  const Ran ran =
      run_apart(folder, "sweep s.json --quiet --db a.db --objective max:workers.decode-9.mfu --csv " +
                            std::string(300, 'c'));
  EXPECT_EQ(ran.status, 2);
  EXPECT_NE(ran.err.find("the results are in a.db"), std::string::npos) << ran.err;
  EXPECT_EQ(folder.files(), 2u);  // closed: no log beside it
}

TEST(Sweep, ExamplesNameFilesThatAreThere) {
  const Folder folder;
  std::istringstream words(run_apart(folder, "sweep --help").out);
  int seen = 0;
  for (std::string word; words >> word;) {
    if (!word.starts_with("scenarios/")) continue;
    ++seen;
    EXPECT_TRUE(std::filesystem::exists(PDSIM_SOURCE_DIR "/" + word)) << word;
  }
  EXPECT_GE(seen, 3);
}

struct Refused {
  const char* arguments;
  const char* expected;
};

TEST(Sweep, WhatIsWrongIsOneLineAndNothingIsWritten) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, kTwelve));
  folder.file("zero.json", sweep_file(20, R"("seed": [])"));
  folder.file("many.json", sweep_file(20, R"("seed": {"from": 1, "to": 5000, "steps": 5000, "integer": true},
    "workload.time_scale": {"from": 1, "to": 9, "steps": 5000})"));
  folder.file("path.json", sweep_file(20, R"("transfer.moed": ["pull"])"));
  folder.file("text", "not a database, but long enough to look like one to a reader of its first page");
  const std::size_t files = folder.files();
  const Refused cases[] = {
      {"sweep s.json", "--db: is missing"},
      {"sweep s.json --db -", "--db: is -"},
      {"sweep none.json --db a.db", "none.json: cannot be read"},
      {"sweep zero.json --db a.db", "expected at least one value"},
      {"sweep many.json --db a.db", "25"},
      {"sweep path.json --db a.db", "(did you mean 'mode'?)"},
      {"sweep s.json --db text --resume", "text: is no SQLite database"},
      {"sweep s.json --db text", "text: is there already"},
      {"sweep s.json --db text/a.db", "is not a folder"},
      {"sweep s.json --db a.db --shard 3/3", "--shard: is '3/3'"},
      {"sweep s.json --db a.db --shard /3", "none of SLURM_ARRAY_TASK_ID"},
      {"sweep s.json --db a.db --objective ttft_p59", "(did you mean 'ttft_p9"},
      {"sweep s.json --db a.db --set transfer.mdoe=push", "(did you mean 'mode'?)"},
      {"sweep s.json --db a.db --csv text/a.csv", "is not a folder"},
      {"sweep s.json --db a.db --csv - --json", "--csv: is -"},
      {"sweep s.json --db a.db --trace none.jsonl --format mooncake", "none.jsonl"},
      {"sweep s.json --db a.db --csv a.db", "--csv: is a.db, which is a file of --db a.db too"},
      {"sweep s.json --db a.db --csv ./new/../a.db", "too; expected another file"},
      {"sweep s.json --db a.db --csv a.db-wal", "--csv: is a.db-wal, which is a file of --db a.db too"},
      {"sweep s.json --db a.db --csv ./s.json", "--csv: is ./s.json, which is an input (s.json)"},
      {"sweep s.json --db a.db --csv text --trace text --format mooncake",
       "--csv: is text, which is an input"},
      {"merge text --db a.db --csv text", "--csv: is text, which is an input (text)"},
      {"merge text --db a.db --csv a.db", "--csv: is a.db, which is a file of --db a.db too"},
      {"sweep s.json --quiet --db a.db --objective min:latency_ms.tfft.p95",
       "--objective: latency_ms has no 'tfft'"},
      {"sweep s.json --quiet --db a.db --objective min:latency_ms.ttft", "is object, expected a number"},
      {"merge none.db --db a.db", "none.db: is no file"},
      {"merge text --db a.db", "text: is no SQLite database"},
      {"merge text --db text", "--db: is text, which is an input (text)"},
  };
  for (const auto& [arguments, expected] : cases) {
    SCOPED_TRACE(arguments);
    const Ran ran = run_apart(folder, arguments);
    EXPECT_EQ(ran.status, 2) << ran.out;
    EXPECT_EQ(ran.out, "");
    EXPECT_TRUE(ran.err.starts_with("pdsim: ")) << ran.err;
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), files);
  }
  const Ran kubernetes = run_apart(folder, "sweep s.json --db a.db", "JOB_COMPLETION_INDEX=2");
  EXPECT_EQ(kubernetes.status, 2);
  EXPECT_NE(kubernetes.err.find("expected --shard /N"), std::string::npos) << kubernetes.err;
}

// A disk that fills up, of any size: the sweep is done, or it is refused (2), or broken off with its results
// kept (3) and gone on with; never a crash, and one message. A damaged file is the input's fault.
TEST(Sweep, ADatabaseThatFailsIsOneMessage) {
  const Folder folder;
  folder.file("s.json", sweep_file(5, kTwelve));
  const std::string whole = csv_of(folder, "--db whole.db");
  std::set<int> statuses;
  for (const int blocks : {8, 24, 32, 40, 48, 64, 80, 96, 128, 160, 1000}) {  // of 512 or 1024 bytes
    SCOPED_TRACE(blocks);
    const std::string db = fmt::format("d{}", blocks);
    const Ran ran = run(folder, fmt::format("sweep s.json --quiet --jobs 1 --db {0} --csv {0}.csv", db),
                        fmt::format("ulimit -f {}; {}", blocks, kNoScheduler));
    statuses.insert(ran.status);
    if (ran.status == 0) continue;
    EXPECT_TRUE(ran.status == 2 || ran.status == 3) << ran.status << ran.err;
    EXPECT_TRUE(ran.err.starts_with("pdsim: ")) << ran.err;
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_EQ(ran.err.find("bug"), std::string::npos) << ran.err;
    if (ran.status == 3) {
      EXPECT_NE(
          ran.err.find(" of 12 results are kept: once that is put right, the same command with --resume"),
          std::string::npos)
          << ran.err;
    }
    EXPECT_EQ(csv_of(folder, "--resume --db " + db), whole);
  }
  EXPECT_TRUE(statuses.contains(3));
  EXPECT_TRUE(statuses.contains(0));

  // Merging says the same of what it makes, once.
  for (const int blocks : {48, 64, 80, 96}) {
    const Ran ran =
        run(folder, "merge whole.db --db full.db", fmt::format("ulimit -f {}; {}", blocks, kNoScheduler));
    EXPECT_EQ(ran.status, 2) << ran.err;
    EXPECT_NE(ran.err.find(".full.db."), std::string::npos) << ran.err;
    EXPECT_EQ(ran.err.find("cannot be written: "), std::string::npos) << ran.err;
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(folder / "full.db"));
  }

  const std::string bytes = bytes_of(folder / "whole.db");
  folder.file("cut.db", bytes.substr(0, bytes.size() / 2));
  for (const char* arguments :
       {"sweep s.json --quiet --db cut.db --resume --csv r.csv", "merge cut.db --db m.db --csv m.csv"}) {
    const Ran ran = run_apart(folder, arguments);
    EXPECT_EQ(ran.status, 2) << ran.err;
    EXPECT_TRUE(ran.err.starts_with("pdsim: cut.db: is damaged: ")) << ran.err;
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
  }
}

// Whatever a point's simulation has read is the sweep's: one that changes under its name is refused when the
// sweep is gone on with, and when shards are joined, by name and with what to do; put back, it is no matter.
// Files that parameters name lie relative to the sweep, wherever it is run from.
TEST(Sweep, AFileThatChangesUnderItsNameIsRefused) {
  const Folder folder;
  const auto copy = [&](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(PDSIM_SOURCE_DIR "/" + from, folder / to);
  };
  copy("models/shapes/llama-3.1-8b.json", "config.json");
  copy("models/profiles/h200.json", "gpu.json");
  copy("traces/samples/short.jsonl", "trace.jsonl");
  folder.file("overheads.json", to_json(load_overheads("vllm")));
  folder.file("pings",
              "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
              "64      10      =10      1.2k        0.00s      1.77      36.16       0.03\n");
  ASSERT_EQ(run(folder, "calibrate network pings --instance p5en.48xlarge --out net.json").status, 0);
  const std::string pools = R"("pools": [
    {"name": "prefill", "role": "prefill", "instance": "p5en.48xlarge", "engine": {"overheads": "overheads.json"}},
    {"name": "decode", "role": "decode", "instance": "p5en.48xlarge", "engine": {"overheads": "overheads.json"}}])";
  folder.file("s.json",
              R"({"schema": "pdsim.sweep/1", "name": "fixed", "objectives": ["ttft_p95"], "scenario":
    {"model": "config.json", "gpu_profile": "gpu.json", "network": {"profile": "net.json"}, )" +
                  pools + R"(, "workload": {"trace": "trace.jsonl", "format": "mooncake"}},
    "parameters": {"seed": [1, 2]}})");
  // The same files as levels of parameters, without which the scenario is none.
  folder.file("p.json", R"({"schema": "pdsim.sweep/1", "name": "levels", "objectives": ["ttft_p95"],
    "scenario": {"model": "none", )" +
                            pools + R"(, "workload": {"format": "mooncake"}}, "parameters": {
    "seed": [1, 2], "model": ["config.json"], "gpu_profile": ["gpu.json"], "network.profile": ["net.json"],
    "workload.trace": ["trace.jsonl"]}})");
  const Folder elsewhere;
  for (const std::string sweep : {"s.json", "p.json"}) {
    const std::string all = sweep + ".db", shards[] = {sweep + ".0", sweep + ".1"};
    const auto command = [&](const std::string& db, const std::string& more) {
      return run(elsewhere, fmt::format("sweep '{}' --quiet --db '{}' {}", folder / sweep, folder / db, more),
                 kNoScheduler);
    };
    const Ran first = command(all, "");
    ASSERT_EQ(first.status, 0) << first.err;
    ASSERT_EQ(command(shards[0], "--shard 0/2").status, 0);
    for (const std::string file : {"config.json", "gpu.json", "trace.jsonl", "overheads.json", "net.json"}) {
      SCOPED_TRACE(sweep + " " + file);
      const std::string was = bytes_of(folder / file);
      folder.file(file, was + "\n");
      const Ran resumed = command(all, "--resume");
      EXPECT_EQ(resumed.status, 2) << resumed.err;
      EXPECT_NE(resumed.err.find(file + ": is not what it was when points in "), std::string::npos)
          << resumed.err;
      EXPECT_NE(resumed.err.find("expected it as it was, or another --db"), std::string::npos) << resumed.err;
      const Ran other = command(shards[1], "--shard 1/2");
      ASSERT_EQ(other.status, 0) << other.err;
      const Ran merged =
          run(folder, fmt::format("merge {} {} --db merged", shards[0], shards[1]), kNoScheduler);
      EXPECT_EQ(merged.status, 2) << merged.err;
      EXPECT_NE(merged.err.find(shards[1] + ": rests on another "), std::string::npos) << merged.err;
      EXPECT_NE(merged.err.find(file), std::string::npos) << merged.err;
      std::filesystem::remove(folder / shards[1]);
      folder.file(file, was);
    }
    const Ran as_before = command(all, "--resume");
    EXPECT_EQ(as_before.status, 0) << as_before.err;
  }

  // What pdsim ships is no exception.
  std::filesystem::create_directory(folder / "data");
  std::filesystem::copy(PDSIM_SOURCE_DIR "/models", folder / "data/models",
                        std::filesystem::copy_options::recursive);
  folder.file("shipped.json", sweep_file(20, R"("seed": [1, 2])"));
  const std::string data = "PDSIM_DATA=data ";
  ASSERT_EQ(run_apart(folder, "sweep shipped.json --quiet --db d.db", data).status, 0);
  EXPECT_EQ(run_apart(folder, "sweep shipped.json --quiet --db d.db --resume", data).status, 0);
  const std::string shape = "data/models/shapes/llama-3.1-8b.json";
  folder.file(shape, bytes_of(folder / shape) + "\n");
  const Ran changed = run_apart(folder, "sweep shipped.json --quiet --db d.db --resume", data);
  EXPECT_EQ(changed.status, 2) << changed.err;
  EXPECT_NE(changed.err.find(shape + ": is not what it was"), std::string::npos) << changed.err;
}

// "-" is stdin wherever a file can be named, for every pool and every point that asks; another stdin is
// another file.
TEST(Sweep, StdinIsAFileLikeOthers) {
  const Folder folder;
  folder.file("overheads", to_json(load_overheads("vllm")));
  folder.file("gpu", bytes_of(PDSIM_SOURCE_DIR "/models/profiles/h200.json"));
  folder.file("pings",
              "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
              "64      10      =10      1.2k        0.00s      1.77      36.16       0.03\n");
  ASSERT_EQ(run(folder, "calibrate network pings --instance p5en.48xlarge --out net").status, 0);
  const std::pair<const char*, const char*> uses[] = {
      {"overheads", R"("pools.prefill.engine.overheads": ["-"], "pools.decode.engine.overheads": ["-"])"},
      {"gpu", R"("gpu_profile": ["-"])"},
      {"net", R"("network.profile": ["-"])"}};
  for (const auto& [file, parameters] : uses) {
    SCOPED_TRACE(file);
    folder.file("s.json", sweep_file(20, fmt::format(R"("seed": [1, 2], {})", parameters)));
    for (int shard = 0; shard < 2; ++shard) {
      const Ran ran =
          run_apart(folder, fmt::format("sweep s.json --quiet --db {0}{1} --shard {1}/2 <{0}", file, shard));
      ASSERT_EQ(ran.status, 0) << ran.err;
      folder.file(file, bytes_of(folder / file) + "\n");
    }
    const Ran merged = run_apart(folder, fmt::format("merge {0}0 {0}1 --db m", file));
    EXPECT_EQ(merged.status, 2);
    EXPECT_NE(merged.err.find("rests on another stdin than the files before it"), std::string::npos)
        << merged.err;
  }
}

// The files that results name are those of their points: not of others that the process has tried, which end
// before or after them as it happens.
TEST(Sweep, FilesAreThoseOfItsPoints) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, R"("seed": [1, 2, 3], "what": {"options": {
    "good": {"model": "llama-3.1-8b"},
    "bad": {"model": "qwen3-32b", "pools.decode.engine.overheads": "none.json"}}})"));
  for (const char* jobs : {"1", "4"}) {
    ASSERT_EQ(run_apart(folder, fmt::format("sweep s.json --quiet --jobs {0} --db {0}.db", jobs)).status, 0);
    const std::string bytes = bytes_of(folder / fmt::format("{}.db", jobs));
    static const std::regex name("file models/([a-z0-9./-]+?)[.]json");
    std::set<std::string> names;
    for (std::sregex_iterator at(bytes.begin(), bytes.end(), name); at != std::sregex_iterator(); ++at) {
      names.insert((*at)[1]);
    }
    EXPECT_EQ(names, (std::set<std::string>{"evidence", "gpus", "instances", "overheads", "profiles/h200",
                                            "shapes/llama-3.1-8b"}));
  }
}

TEST(Sweep, MergeRefusesGapsAndDuplicates) {
  const Folder folder;
  folder.file("s.json", sweep_file(20, kTwelve));
  EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db s0 --shard 0/2").status, 0);
  EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db s1 --shard 1/2").status, 0);
  EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db all").status, 0);
  const Ran gap = run_apart(folder, "merge s1 --db m");
  EXPECT_EQ(gap.status, 2);
  EXPECT_NE(
      gap.err.find("of 12 points 6 are missing: 0, 2, 4, 6, 8 and 1 more; shard 0/2 is in no file given"),
      std::string::npos)
      << gap.err;
  EXPECT_EQ(run_apart(folder, "merge s1 --db gap.db --allow-gaps").status, 0);
  const Ran twice = run_apart(folder, "merge s0 all s1 --db m");
  EXPECT_EQ(twice.status, 2);
  EXPECT_NE(twice.err.find("all: has point 0, and so has s0"), std::string::npos) << twice.err;
  EXPECT_EQ(run_apart(folder, "merge s0 all s1 --db m --allow-duplicates").status, 0);
  folder.file("s.json", sweep_file(21, kTwelve));
  EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db other --shard 1/2").status, 0);
  const Ran other = run_apart(folder, "merge s0 other --db n");
  EXPECT_EQ(other.status, 2);
  EXPECT_NE(other.err.find("other: has results of another state of the sweep tiny"), std::string::npos)
      << other.err;
  EXPECT_EQ(run_apart(folder, "sweep s.json --quiet --db all --resume").status, 2);
}

}  // namespace
}  // namespace pdsim
