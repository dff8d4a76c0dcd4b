// pdsim calibrate network as a user meets it: files of four tools, whatever they are called, become one
// profile; a scenario takes it, describe says where each figure came from, a replay's summary names it; what
// was not told is said; and what is no measurement is one line on stderr, status 2, and no file. What the fit
// computes: tests/models/network_profile_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "sim/core/sha256.hpp"
#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using Json = nlohmann::json;

void write(const Folder& folder, const std::string& name, const std::string& text) {
  std::ofstream(folder / name, std::ios::binary) << text;
}

// Of cards that move 44 GB/s at any size, posted at 10 us + 1 us an operation, 30 us there and back.
std::string bench(const char* op) {
  std::ostringstream text;
  text << "NIXLBench Configuration\nBackend (--backend=[UCX,LIBFABRIC])  : LIBFABRIC\n"
       << "Initiator seg type (--initiator_seg_type=[DRAM,VRAM]) : VRAM\n"
       << "Target seg type (--target_seg_type=[DRAM,VRAM]) : VRAM\nOp type (--op_type=[READ,WRITE]) : " << op
       << "\nNum threads (--num_threads=N) : 1\n\n"
       << "Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  "
          "Avg Post (us)  P99 Post (us)  Avg Tx (us)    P99 Tx (us)\n";
  text.precision(9);
  for (double bytes = 4096; bytes <= 1 << 20; bytes *= 2) {
    for (const double batch : {1.0, 32.0, 128.0}) {
      const double post = 10 + batch, time = 10 + std::max(batch, bytes * batch / 44e3) + 30;
      text << bytes << ' ' << batch << ' ' << bytes * batch / time / 1e3 << ' ' << time / batch << " 9 9 "
           << post << " 9 " << time - post << " 9\n";
    }
  }
  return text.str();
}

constexpr const char* kPings =
    "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
    "64      10      =10      1.2k        0.00s      1.77      36.16       0.03\n"
    "256     10      =10      5k          0.00s     14.80      16.00       0.06\n";

constexpr const char* kLog =
    "INFO KV Transfer metrics: Num successful transfers=4, Avg xfer time (ms)=20.5, P90 xfer time (ms)=30.1, "
    "Avg post "
    "time (ms)=0.25, P90 post time (ms)=0.3, Avg MB per transfer=40.0, Throughput (MB/s)=1951.2, Avg number "
    "of "
    "descriptors=100.0\n"
    "INFO KV Transfer metrics: Num successful transfers=4, Avg xfer time (ms)=20.5, P90 xfer time (ms)=30.1, "
    "Avg post "
    "time (ms)=2.05, P90 post time (ms)=2.1, Avg MB per transfer=40.0, Throughput (MB/s)=1951.2, Avg number "
    "of "
    "descriptors=1000.0\n";

constexpr const char* kScenario = R"({
  "name": "mine", "model": "llama-3.1-8b",
  "pools": [{"role": "prefill", "instance": "p5en.48xlarge"}, {"role": "decode", "instance": "p5en.48xlarge"}],
  "network": {"profile": "mine.json"},
  "workload": {"synthetic": {"requests": 6, "rate": 2, "isl": 3000, "osl": 5}}
})";

TEST(CalibrateNetwork, FilesOfEachToolBecomeAProfileThatAScenarioTakes) {
  const Folder folder;
  write(folder, "a", bench("WRITE"));
  write(folder, "b.csv", bench("READ"));
  write(folder, "c.txt", kPings);
  write(folder, "d.log", kLog);
  const Ran fit = run(folder,
                      "calibrate network a b.csv c.txt d.log --instance p5en.48xlarge --out mine.json "
                      "--date 2026-11-30 --source 'two nodes'");
  ASSERT_EQ(fit.status, 0) << fit.err;
  EXPECT_EQ(fit.err, "");
  EXPECT_NE(fit.out.find("a: nixlbench: 27 rows\n"), std::string::npos) << fit.out;
  EXPECT_NE(fit.out.find("d.log: vLLM log: 2 rows\n"), std::string::npos) << fit.out;
  EXPECT_NE(fit.out.find("operations_per_s  not told, pdsim's stays"), std::string::npos) << fit.out;
  EXPECT_NE(fit.out.find("set aside"), std::string::npos) << "single operations say nothing of the link";
  const std::string text = bytes_of(folder / "mine.json");
  const Json p = Json::parse(text);
  EXPECT_EQ(p["schema"], "pdsim.network-profile/1");
  EXPECT_EQ(p["name"], "mine");
  EXPECT_EQ(p["fabric"], "efa-v3");
  EXPECT_EQ(p["line_gb_per_s"], 50);
  EXPECT_EQ(p["latency_us"], 16);
  EXPECT_EQ(p["posting"], Json({{"backend", "libfabric"}, {"fixed_us", 50}, {"us_per_descriptor", 2}}));
  for (const char* op : {"write", "read"}) {
    for (const Json& point : p[op]) EXPECT_NEAR(point["gb_per_s"].get<double>(), 44, 1e-3);
  }
  EXPECT_EQ(p["files"][0]["sha256"], sha256_hex(bench("WRITE")));
  // Again: the same bytes, to stdout too, where the report goes to stderr.
  const std::string rest =
      " b.csv c.txt d.log --instance p5en.48xlarge --date 2026-11-30 --source 'two nodes' --out ";
  const Ran again = run(folder, "calibrate network a" + rest + "- --name mine");
  EXPECT_EQ(again.out, text);
  EXPECT_EQ(again.err, fit.out);
  // gzip and stdin are files as any.
  const std::string piped = "cd '" + (folder / "") +
                            "' && gzip -c a | '" PDSIM_BINARY "' calibrate network -" + rest +
                            "piped.json --name mine >/dev/null";
  ASSERT_EQ(std::system(piped.c_str()), 0);
  Json by_pipe = Json::parse(bytes_of(folder / "piped.json")), by_name = p;
  EXPECT_EQ(by_pipe["files"][0]["name"], "stdin");
  by_pipe.erase("files");
  by_name.erase("files");
  EXPECT_EQ(by_pipe, by_name);

  write(folder, "scenario.json", kScenario);
  const Json described = Json::parse(run(folder, "describe scenario.json --json").out);
  EXPECT_EQ(described["network_profile"]["sha256"], sha256_hex(text));
  EXPECT_EQ(described["network_profile"]["write"], p["write"]);
  EXPECT_NE(
      described["origins"]["/transfer/post_fixed_us"].get<std::string>().find("network profile mine (vLLM"),
      std::string::npos);
  EXPECT_EQ(described["scenario"]["transfer"]["post_us_per_descriptor"], 2);
  EXPECT_EQ(described["scenario"]["transfer"]["notification_us"], 16);
  EXPECT_NEAR(described["hand_overs"][0]["one_run"]["read_efficiency"].get<double>(), 0.88, 1e-4);
  const Ran shown = run(folder, "describe scenario.json");
  EXPECT_NE(shown.out.find("Network profile mine"), std::string::npos);
  EXPECT_NE(shown.out.find("operations_per_s: pdsim's"), std::string::npos) << shown.out;

  const Ran replay = run(folder, "replay scenario.json --json --quiet");
  ASSERT_EQ(replay.status, 0) << replay.err;
  EXPECT_EQ(Json::parse(replay.out)["inputs"]["network_profile"], sha256_hex(text));
  const Ran without = run(folder, "replay scenario.json --json --quiet --set network={}");
  EXPECT_FALSE(Json::parse(without.out)["inputs"].contains("network_profile"));
}

TEST(CalibrateNetwork, AlsoOfANetworkThatIsNoInstances) {
  const Folder folder;
  write(folder, "a", bench("WRITE"));
  const Ran fit = run(folder, "calibrate network a --fabric roce --line 48 --backend ucx --out -");
  ASSERT_EQ(fit.status, 0) << fit.err;
  const Json p = Json::parse(fit.out);
  EXPECT_EQ(p["fabric"], "roce");
  EXPECT_EQ(p["line_gb_per_s"], 48);
  EXPECT_EQ(p["posting"]["backend"], "ucx");
  EXPECT_TRUE(p["not_told"].contains("read"));
}

TEST(CalibrateNetwork, WhatIsNoMeasurementIsOneLineAndNoFile) {
  const Folder folder;
  write(folder, "a", bench("WRITE"));
  write(folder, "story", "once upon a time\n");
  write(folder, "empty", "");
  write(folder, "short", std::string(kPings) + "1k 10 =10\n");
  write(folder, "other",
        "Backend (--backend=[UCX]) : UCX\nOp type (--op_type=[READ,WRITE]) : READ\n" +
            bench("READ").substr(bench("READ").find("Block Size")));
  const struct {
    const char *arguments, *error;
  } kCases[] = {
      {"a --instance p5en.48xlarge", "--out is required"},
      {"--instance p5en.48xlarge --out x.json", "files is required"},
      {"a --out x.json", "neither --instance nor --fabric"},
      {"a --instance p5em.48xlarge --out x.json", "p5en.48xlarge"},
      {"a --fabric efa-v3 --out x.json", "a:9: is a rate, but of which line is not said"},
      {"a --fabric efa --out x.json", "--fabric: fabric 'efa' needs an instance"},
      {"a --fabric tcp --line 10 --out x.json", "--fabric: is tcp"},
      {"a --instance p5en.48xlarge --line 40 --out x.json",
       "GB/s of one GPU's network cards, expected at most"},
      {"a --instance p5en.48xlarge --backend ib --out x.json",
       "--backend: backend is 'ib', expected one of libfabric"},
      {"a other --instance p5en.48xlarge --out x.json",
       "other:4: is of backend ucx, but a:9 is of libfabric"},
      {"a story --instance p5en.48xlarge --out x.json", "story: holds no measurement that is known"},
      {"empty --instance p5en.48xlarge --out x.json", "empty: holds no measurement that is known"},
      {"nowhere --instance p5en.48xlarge --out x.json", "nowhere"},
      {"a --instance p5en.48xlarge --out nowhere/x.json", "nowhere/x.json: cannot be written"},
      {"a --instance p5en.48xlarge --op both --out x.json", "--op"},
  };
  for (const auto& c : kCases) {
    const Ran ran = run(folder, std::string("calibrate network ") + c.arguments);
    EXPECT_EQ(ran.status, 2) << c.arguments << ran.err;
    EXPECT_NE(ran.err.find(c.error), std::string::npos) << c.arguments << ": " << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_EQ(ran.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder / "x.json"));
  }
}

}  // namespace
}  // namespace pdsim
