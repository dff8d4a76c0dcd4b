// Theory. An iteration of nixlbench takes t = a + max(b n, n s / R(s)) + T: posting n operations of s bytes
// in a + b n, moving them at R(s), and a round trip T. Text written from chosen a, b, R and T must be fitted
// back to them, with each quantity from the rows that tell it; rows that posting or T bound must not bend R.
// A line through averages of vLLM's transfers is that through the transfers, post time being linear in
// descriptors. What no row tells is absent, with a reason. What cannot be is an error at its line.
#include "models/network_profile.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "models/fit_network.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr double kLine = 50;  // GB/s: two cards of 200 Gb/s

NetworkMeasurements read(const std::vector<std::string>& files, double line = kLine, const char* op = "") {
  MeasurementReader reader({line, op});
  for (const std::string& file : files) {
    reader.begin();
    std::size_t number = 0, at = 0;
    while (at < file.size()) {
      const std::size_t end = std::min(file.find('\n', at), file.size());
      reader.line(std::string_view(file).substr(at, end - at), fmt::format("file:{}", ++number));
      at = end + 1;
    }
    reader.end("file");
  }
  return reader.measurements();
}

NetworkProfile fit(NetworkMeasurements m, double line = kLine) {
  NetworkFitOptions options;
  options.line = line;
  options.wire_bytes = [](Bytes bytes) { return bytes < 128 * 1024 ? bytes : bytes / 2; };
  options.shipped_latency = 17'300;
  options.shipped_posting = {"libfabric", 71'000, 2'430};
  return fit_network(m, options);
}

/// What an InputError says; "" where there is none.
std::string error_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

std::string configuration(std::string_view op, int threads = 1, std::string_view memory = "VRAM",
                          std::string_view backend = "LIBFABRIC") {
  return fmt::format(
      "NIXLBench Configuration\n"
      "Backend (--backend=[UCX,LIBFABRIC])                         : {}\n"
      "Initiator seg type (--initiator_seg_type=[DRAM,VRAM])       : {}\n"
      "Target seg type (--target_seg_type=[DRAM,VRAM])             : VRAM\n"
      "Scheme (--scheme=[pairwise,manytoone,onetomany,tp])         : pairwise\n"
      "Op type (--op_type=[READ,WRITE])                            : {}\n"
      "Num initiator dev (--num_initiator_dev=N)                   : 1\n"
      "Num threads (--num_threads=N)                               : {}\n\n",
      backend, memory, op, threads);
}

constexpr std::string_view kHead =
    "Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  Avg Post "
    "(us)  "
    "P99 Post (us)  Avg Tx (us)    P99 Tx (us)\n"
    "----------------------------------------------------------------------------------------------------\n";

/// The network that a synthetic table comes from. GB/s is 1e3 bytes/us.
struct Truth {
  double fixed_us = 20, each_us = 1.5, trip_us = 34;
  double plateau = 44, operations_per_us = 0.25;  // of one GPU's cards
  double rate(double wire_bytes) const { return std::min(plateau, operations_per_us * wire_bytes / 1e3); }
  double wire(double bytes) const { return bytes < 128 * 1024 ? bytes : bytes / 2; }
};

std::string bench_row(const Truth& t, double bytes, double batch) {
  const double post = t.fixed_us + t.each_us * batch;
  const double iteration =
      t.fixed_us + std::max(t.each_us * batch, bytes * batch / (t.rate(t.wire(bytes)) * 1e3)) + t.trip_us;
  return fmt::format(
      "{:<20.0f}{:<15.0f}{:<15.9f}{:<15.6f}{:<15.1f}{:<15.1f}{:<15.6f}{:<15.1f}{:<15.6f}{:<15.1f}\n", bytes,
      batch, bytes * batch / (iteration * 1e3), iteration / batch, 40.0, 40.0, post, post, iteration - post,
      iteration);
}

std::string bench(const Truth& t, std::string_view op, int threads = 1) {
  std::string text = configuration(op, threads);
  text += kHead;
  for (double bytes = 4096; bytes <= 4 << 20; bytes *= 2) {
    for (const double batch : {1.0, 16.0, 64.0, 256.0}) text += bench_row(t, bytes, batch);
  }
  return text;
}

TEST(NetworkFit, GivesBackTheNetworkThatNixlbenchSaw) {
  const Truth write, read_truth{.fixed_us = 20, .each_us = 1.5, .trip_us = 36, .plateau = 38};
  const NetworkProfile p = fit(read({bench(write, "WRITE"), bench(read_truth, "READ")}));
  ASSERT_TRUE(p.posting.has_value());
  EXPECT_EQ(p.posting->fixed, 20'000);
  EXPECT_EQ(p.posting->per_descriptor, 1'500);
  EXPECT_EQ(p.posting->backend, "libfabric");
  for (const auto& [truth, curve] : {std::pair(write, p.write), {read_truth, p.read}}) {
    ASSERT_GE(curve.size(), 4U);
    for (const RatePoint& point : curve) {
      EXPECT_NEAR(point.rate / truth.rate(static_cast<double>(point.bytes)), 1, 1e-4) << point.bytes;
    }
  }
  // 64 KiB is the first size whose operations take longer (65536 B at 0.25 a us: 4 us) than their posting.
  EXPECT_LE(p.write.front().bytes, 64 * 1024);
  EXPECT_NEAR(p.operations * 1e3, 0.25, 1e-4);
  EXPECT_EQ(p.latency, 17'000);  // half of the shorter round trip
  EXPECT_TRUE(p.not_told.empty());
  for (const std::string_view key : kNetworkQuantities) {
    EXPECT_FALSE(p.evidence.at(std::string(key)).empty()) << key;
  }
}

// Operations of 16 KiB would go at 50 GB/s, their posting is what takes time: no word about the link.
TEST(NetworkFit, RowsThatPostingBoundsTellNothingOfTheLink) {
  const Truth truth{.fixed_us = 20, .each_us = 4, .plateau = 44, .operations_per_us = 5};
  NetworkMeasurements m = read({bench(truth, "WRITE")});
  const NetworkProfile p = fit(m);
  EXPECT_EQ(p.write.front().bytes, 128 * 1024);  // 256 KiB as posted: 5.96 us each, in two operations
  for (const RatePoint& point : p.write) EXPECT_NEAR(point.rate, 44, 0.01);
  EXPECT_EQ(p.operations, 0);  // a plateau from the first point on: none binds
  EXPECT_EQ(p.not_told.count("operations_per_s"), 1U);
  EXPECT_EQ(p.not_told.count("read"), 1U);
}

TEST(NetworkFit, AtASizeTheRowWithTheMostInFlightCountsAndCurvesDoNotFall) {
  const auto row = [](int bytes, int batch, double rate) {  // no posting, a round trip of 10 us
    const double iteration = 10 + bytes * batch / (rate * 1e3);
    return fmt::format("{} {} {} {} 1 1 0.5 0.5 {} 1\n", bytes, batch, bytes * batch / (iteration * 1e3),
                       iteration / batch, iteration - 0.5);
  };
  std::string text = configuration("WRITE") + std::string(kHead);
  text += row(4096, 1, 49) + row(32768, 64, 10) + row(32768, 256, 20);
  text += row(65536, 256, 40) + row(262144, 64, 30) + row(1048576, 64, 45);
  const NetworkProfile p = fit(read({text}));
  ASSERT_EQ(p.write.size(), 4U);
  EXPECT_NEAR(p.write[0].rate, 20, 0.1);
  EXPECT_NEAR(p.write[1].rate, 35, 0.1);  // 40 and then 30: the mean of both
  EXPECT_EQ(p.write[2].rate, p.write[1].rate);
  EXPECT_NEAR(p.write[3].rate, 45, 0.1);
  EXPECT_NE(p.evidence.at("write").find("worst 100."), std::string::npos)  // 20 for the row that says 10
      << p.evidence.at("write");
}

std::string log_line(double transfers, double fixed_us, double each_us, double descriptors) {
  const double post_ms = (fixed_us + each_us * descriptors) / 1e3;
  return fmt::format(
      "(EngineCore pid=71) INFO 11-30 10:00:00 [metrics.py:107] KV Transfer metrics: Num successful "
      "transfers={}, "
      "Avg xfer time (ms)={:.6f}, P90 xfer time (ms)={:.6f}, Avg post time (ms)={:.6f}, P90 post time "
      "(ms)={:.6f}, "
      "Avg MB per transfer=60.0, Throughput (MB/s)=1000.0, Avg number of descriptors={:.1f}, Num failed "
      "transfers=0\n",
      transfers, post_ms + 20, post_ms + 40, post_ms, post_ms, descriptors);
}

TEST(NetworkFit, PostingIsALineThroughTheEnginesIntervals) {
  std::string text = "INFO 11-30 [loggers.py] Engine 000: Avg prompt throughput: 1.0 tokens/s\n";
  for (const double descriptors : {160.0, 2'000.0, 9'000.0, 18'880.0})
    text += log_line(7, 71, 2.43, descriptors);
  text +=
      "INFO KV Transfer metrics: Num successful transfers=0, Avg xfer time (ms)=0, Avg post time (ms)=0\n";
  NetworkMeasurements m = read({text});
  EXPECT_EQ(m.set_aside.at("vLLM log: an interval without a transfer"), 1);
  const NetworkProfile p = fit(m);
  EXPECT_EQ(p.posting->fixed, 71'000);
  EXPECT_EQ(p.posting->per_descriptor, 2'430);
  // Its transfer times do not become the link's.
  EXPECT_TRUE(p.write.empty() && p.read.empty());
  EXPECT_EQ(p.line, 0);
}

TEST(NetworkFit, CountsThatAreAlikeLeaveTheFixedPartPdsims) {
  const NetworkProfile p = fit(read({log_line(5, 71, 3, 1'000) + log_line(5, 71, 3, 1'100)}));
  EXPECT_EQ(p.posting->fixed, 71'000);
  EXPECT_EQ(p.posting->per_descriptor, 3'000);
  EXPECT_NE(p.evidence.at("posting").find("pdsim's 71 us"), std::string::npos);
}

TEST(NetworkFit, TheEnginesPostingGoesBeforeTheBenchmarks) {
  const NetworkProfile p =
      fit(read({bench(Truth{}, "WRITE"), log_line(1, 50, 2, 100) + log_line(1, 50, 2, 10'000)}));
  EXPECT_EQ(p.posting->fixed, 50'000);
  EXPECT_EQ(p.posting->per_descriptor, 2'000);
  EXPECT_NE(p.evidence.at("posting").find("nixlbench says 20 us + 1.5 us"), std::string::npos);
}

std::string scrape(double transfers, double post_s, double descriptors, const char* engine = "0") {
  return fmt::format(
      "# HELP vllm:nixl_post_time_seconds Histogram of transfer post time.\n"
      "# TYPE vllm:nixl_post_time_seconds histogram\n"
      "vllm:nixl_post_time_seconds_bucket{{engine=\"{0}\",le=\"0.001\",model_name=\"m x\"}} 0.0\n"
      "vllm:nixl_post_time_seconds_count{{engine=\"{0}\",model_name=\"m x\"}} {1}\n"
      "vllm:nixl_post_time_seconds_sum{{engine=\"{0}\",model_name=\"m x\"}} {2}\n"
      "vllm:nixl_num_descriptors_count{{engine=\"{0}\",model_name=\"m x\"}} {1}\n"
      "vllm:nixl_num_descriptors_sum{{engine=\"{0}\",model_name=\"m x\"}} {3}\n"
      "vllm:nixl_xfer_time_seconds_sum{{engine=\"{0}\",model_name=\"m x\"}} {4}\n"
      "vllm:nixl_bytes_transferred_sum{{engine=\"{0}\",model_name=\"m x\"}} {5}\n"
      "vllm:num_requests_running{{engine=\"{0}\"}} 3\n",
      engine, transfers, post_s, descriptors, 2 * post_s, 1e6 * transfers);
}

// 10 transfers of 100 descriptors, then 30 of 1,000: the second scrape has both.
TEST(NetworkFit, OfTwoScrapesTheSecondTellsOfTheTimeBetween) {
  const double first = 10 * (50 + 2 * 100) / 1e6, second = 30 * (50 + 2 * 1000) / 1e6;
  NetworkMeasurements m = read({scrape(10, first, 1'000), scrape(40, first + second, 31'000)});
  ASSERT_EQ(m.transfers.size(), 2U);
  EXPECT_DOUBLE_EQ(m.transfers[0].descriptors, 100);
  EXPECT_DOUBLE_EQ(m.transfers[1].descriptors, 1'000);
  EXPECT_EQ(m.transfers[1].transfers, 30);
  const NetworkProfile p = fit(m);
  EXPECT_EQ(p.posting->fixed, 50'000);
  EXPECT_EQ(p.posting->per_descriptor, 2'000);
  // Another engine is another series; a smaller count is one that has started anew.
  EXPECT_EQ(read({scrape(10, first, 1'000), scrape(10, first, 1'000, "1")}).transfers.size(), 2U);
  EXPECT_EQ(read({scrape(10, first, 1'000), scrape(4, first, 1'000)}).transfers[1].transfers, 4);
  EXPECT_EQ(read({scrape(10, first, 1'000), scrape(10, first, 1'000)})
                .set_aside.at("vLLM metrics: no transfer, or none since the scrape before"),
            1);
}

constexpr std::string_view kPings =
    "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n"
    "64      10      =10      1.2k        0.00s      1.77      36.16       0.03\n"
    "256     10      =10      5k          0.00s     14.80      17.30       0.06\n"
    "4k      10      =10      80k         0.00s    215.58      19.00       0.05\n"
    "1m      10      =10      20m         0.00s  10485.76     100.00       0.01\n";

TEST(NetworkFit, TheLatencyIsTheShortestSmallMessage) {
  const NetworkProfile p = fit(read({std::string(kPings)}));
  EXPECT_EQ(p.latency, 17'300);
  EXPECT_NE(p.evidence.at("latency_us").find("17.3 us at 256 B, the least of 3 rows"), std::string::npos);
  EXPECT_TRUE(p.write.empty());  // one message in flight says nothing of a rate
  // Before what nixlbench waits.
  EXPECT_EQ(fit(read({bench(Truth{}, "WRITE"), std::string(kPings)})).latency, 17'300);
}

std::string sends(double fixed_us, double rate, std::string_view test = "sendrecv_perf",
                  std::string_view other = "node-b") {
  std::string text = fmt::format(
      "[1,0]<stdout>:# Collective test starting: {}\n"
      "[1,0]<stdout>:#  Rank  0 Group  0 Pid    101 on     node-a device  0 [0x53] NVIDIA H200\n"
      "[1,0]<stdout>:#  Rank  1 Group  0 Pid    102 on     {} device  0 [0x53] NVIDIA H200\n"
      "[1,0]<stdout>:#       size         count      type   redop    root     time   algbw   busbw #wrong    "
      " time   "
      "algbw   busbw #wrong\n"
      "[1,0]<stdout>:#        (B)    (elements)                               (us)  (GB/s)  (GB/s)           "
      " (us)  "
      "(GB/s)  (GB/s)\n",
      test, other);
  for (double size = 8; size <= 1 << 30; size *= 8) {
    const double us = (size < 1 << 20 ? 4 : 1) * fixed_us + size / (rate * 1e3);  // small ones go another way
    text +=
        fmt::format("[1,0]<stdout>: {:.0f} {:.0f} float sum -1 {:.9f} {:.2f} {:.2f} 0 {:.2f} 1.0 1.0 N/A\n",
                    size, size / 4, us, size / us / 1e3, size / us / 1e3, us);
  }
  return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 12.3\n";
}

TEST(NetworkFit, NcclTellsThePlateauOfWriteWhereNothingElseDoes) {
  const NetworkProfile alone = fit(read({sends(30, 41)}));
  ASSERT_EQ(alone.write.size(), 1U);
  EXPECT_EQ(alone.write[0].bytes, 1 << 20);
  EXPECT_NEAR(alone.write[0].rate, 41, 1e-3);
  EXPECT_EQ(alone.latency, 0);  // NCCL's own start is no latency of the link
  const NetworkProfile both = fit(read({sends(30, 41), bench(Truth{}, "WRITE")}));
  EXPECT_NEAR(both.write.back().rate, 44, 0.01);
  EXPECT_NE(both.evidence.at("write").find("NCCL streams 41 GB/s"), std::string::npos);
}

// ------------------------------------------------------------------------------------------------- reading

// Hand-written; the columns of more than two workers, and of releases before July 2025.
TEST(NetworkMeasurements, NixlbenchTablesOfEveryRelease) {
  const std::string wide =
      configuration("READ") +
      "Block Size (B)      Batch Size     B/W (GB/Sec)   Aggregate B/W (GB/Sec)   Network Util (%)"
      "    Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  Avg Post (us)  P99 Post (us)  Avg Tx (us)"
      "    P99 Tx (us)\n"
      "65536 16 30.5 122.0 61.0 2.3 9.0 9.0 12.0 13.0 23.2 30.0\n";
  NetworkMeasurements m = read({wide});
  ASSERT_EQ(m.bench.size(), 1U);
  EXPECT_TRUE(m.bench[0].read);
  EXPECT_EQ(m.bench[0].rate, 30.5);
  EXPECT_DOUBLE_EQ(m.bench[0].iteration_us, 35.2);  // 12.0 + 23.2: less rounded than 16 x 2.3
  EXPECT_EQ(m.bench[0].backend, "libfabric");
  const std::string old =
      "running ...\nBlock Size (B)      Batch Size     Avg Lat. (us)  B/W (MiB/Sec)  B/W (GiB/Sec)  B/W "
      "(GB/Sec)\n"
      "-----------------------------------------------------------------\n"
      "1048576             64             26             38462.3        37.5608        40.3298\n";
  m = read({old}, kLine, "write");
  ASSERT_EQ(m.bench.size(), 1U);
  EXPECT_DOUBLE_EQ(m.bench[0].iteration_us, 26 * 64);
  EXPECT_EQ(m.bench[0].post_us, -1);
  EXPECT_EQ(m.bench[0].rate, 40.3298);
  EXPECT_NE(error_of([&] { read({old}); }).find("file:4: no configuration above the table"),
            std::string::npos);
  EXPECT_NE(fit(m).evidence.at("write").find("1 rows print no Avg Post"), std::string::npos);
}

TEST(NetworkMeasurements, LogsAroundTablesAreNoRows) {
  const std::string text =
      "[2026-11-30T10:00:00Z] " + configuration("WRITE") + "[10:00:01] " + std::string(kHead) +
      "[10:00:02] 16384 4 4.5 3.6 62.0 62.0 7.3 8.0 7.1 11.0\n+ for op_type in READ WRITE\n"
      "Num iter (--num_iter=N)   : 1008\n";
  EXPECT_EQ(read({text}).bench.size(), 1U);
}

TEST(NetworkMeasurements, WhatIsTrueButOfNoUseIsSetAside) {
  const std::string row = "65536 16 30.5 2.2 9.0 9.0 12.0 13.0 23.2 30.0\n";
  NetworkMeasurements m = read({configuration("WRITE", 1, "DRAM") + std::string(kHead) + row});
  EXPECT_FALSE(m.bench.at(0).link);  // its posting counts
  EXPECT_EQ(m.set_aside.at("nixlbench: of host memory, posting only"), 1);
  m = read({configuration("WRITE", 1, "VRAM", "POSIX") + std::string(kHead) + row});
  EXPECT_TRUE(m.bench.empty());
  EXPECT_EQ(m.set_aside.at("nixlbench: backend posix is storage"), 1);
  m = read({sends(30, 41, "all_reduce_perf")});
  EXPECT_TRUE(m.sends.empty());
  EXPECT_EQ(m.set_aside.size(), 1U);
  // Nothing is left: nothing is told.
  EXPECT_NE(error_of([&] { fit(m); }).find("tell nothing of the network"), std::string::npos);
}

TEST(NetworkMeasurements, WhatCannotBeIsRefusedAtItsLine) {
  const auto bench_error = [](std::string_view row) {
    return error_of([&] { read({configuration("WRITE") + std::string(kHead) + std::string(row) + "\n"}); });
  };
  const auto expect = [](const std::string& error, std::string_view what) {
    EXPECT_NE(error.find(what), std::string::npos) << error;
  };
  expect(bench_error("65536 16 50.6 2.2 9.0 9.0 12.0 13.0 23.2 30.0"),
         "file:12: B/W (GB/Sec) makes 50.6 GB/s");
  EXPECT_EQ(bench_error("65536 16 50.4 2.2 9.0 9.0 12.0 13.0 23.2 30.0"), "") << "within a timer's rounding";
  expect(bench_error("65536 16 0.0 2.2 9.0 9.0 12.0 13.0 23.2 30.0"), "file:12: B/W (GB/Sec) is 0.0");
  expect(bench_error("65536 16 30.5 -2.2 9.0 9.0 12.0 13.0 23.2 30.0"), "Avg Lat. (us) is -2.2");
  expect(bench_error("65536 16 30.5 0 9.0 9.0 12.0 13.0 23.2 30.0"), "Avg Lat. (us) is 0, expected");
  expect(bench_error("65536 16 nan 2.2 9.0 9.0 12.0 13.0 23.2 30.0"), "B/W (GB/Sec) is nan");
  expect(bench_error("65536 16 30.5 2.2 9.0 9.0 -12.0 13.0 23.2 30.0"), "Avg Post (us) is -12.0");
  expect(bench_error("65536 16 30.5 2.2 9.0 9.0"), "file:12: has 6 fields, expected 10");
  expect(error_of([] { read({configuration("APPEND")}); }), "file:6: op_type is 'append'");

  const auto ping_error = [](std::string_view row) {
    return error_of([&] { read({std::string(kPings) + std::string(row) + "\n"}); });
  };
  expect(ping_error("256 10 =10 5k 0.00s 14.80 0.00 0.06"), "file:6: usec/xfer is 0.00");
  expect(ping_error("1m 10 =10 20m 0.00s 10485.76 10.00 0.01"), "file:6: usec/xfer makes 104.9 GB/s");
  expect(ping_error("256 10 =9 5k 0.00s 14.80 17.3"), "file:6: has 7 fields");
  expect(ping_error("256 10 9 5k 0.00s 14.80 17.3 0.06"), "file:6: #ack is 9 of 10 sent");

  expect(error_of([] { read({sends(30, 60)}); }), "file:13: algbw makes");
  expect(error_of([] { read({sends(30, 41, "sendrecv_perf", "node-a")}); }),
         "file:4: all 2 ranks are on node-a");
  std::string nameless = sends(30, 41);
  nameless.erase(0, nameless.find('\n') + 1);
  expect(error_of([&] { read({nameless}); }), "file:3: does not say which of nccl-tests printed it");

  const auto log_error = [](const std::string& from, const std::string& to) {
    std::string text = log_line(4, 71, 2.43, 160);
    text.replace(text.find(from), from.size(), to);
    return error_of([&] { read({text}); });
  };
  expect(log_error("descriptors=160.0", "descriptors=0.0"), "file:1: Avg number of descriptors is 0.0");
  expect(log_error("post time (ms)=0.459800", "post time (ms)=-1"), "Avg post time (ms) is -1");
  expect(log_error("per transfer=60.0", "per transfer=60000.0"), "file:1: vLLM log: bytes over time makes");
  expect(error_of([] {
           read({scrape(10, 0.1, 1'000) +
                 "vllm:nixl_num_descriptors_count{engine=\"0\",model_name=\"m x\"} 9\n"});
         }),
         "10 transfers have a post time and 9 a number of descriptors");
  expect(error_of([] { read({"once upon a time\n"}); }), "file: holds no measurement that is known");
}

TEST(NetworkMeasurements, FiPingpongCountsInUnitsOf1024) {
  const NetworkMeasurements m = read({std::string(kPings)});
  ASSERT_EQ(m.pings.size(), 4U);
  EXPECT_EQ(m.pings[2].bytes, 4096);
  EXPECT_EQ(m.pings[3].bytes, 1 << 20);
  EXPECT_EQ(m.pings[2].us, 19);
}

// Threads that post at once delay each other: no cost of a thread that posts alone, as an engine's does.
TEST(NetworkMeasurements, PostingIsOfOneThread) {
  NetworkMeasurements m = read({bench(Truth{}, "WRITE", 4)});
  EXPECT_EQ(m.bench.at(0).threads, 4);
  EXPECT_FALSE(fit(m).posting.has_value());
}

// A terminal wraps vLLM's line, its documentation too.
TEST(NetworkMeasurements, ALogLineOverTwoLinesIsOne) {
  const NetworkMeasurements m =
      read({"KV Transfer metrics: Num successful transfers=4, Avg xfer time (ms)=1.381,\n"
            "P90 xfer time (ms)=2.601, Avg post time (ms)=0.672, P90 post time (ms)=0.801,\n"
            "Avg MB per transfer=2.25, Throughput (MB/s)=1629.549, Avg number of descriptors=72.0\n"});
  ASSERT_EQ(m.transfers.size(), 1U);
  EXPECT_DOUBLE_EQ(m.transfers[0].post_us, 672);
  EXPECT_DOUBLE_EQ(m.transfers[0].bytes, 2.25 * 1024 * 1024);
  EXPECT_EQ(m.transfers[0].descriptors, 72);
}

// ------------------------------------------------------------------------------------------------- the file

class ProfileFile : public testing::Test {
 protected:
  std::string path_ =
      (std::filesystem::temp_directory_path() /
       fmt::format("pdsim-network-{}.json", testing::UnitTest::GetInstance()->random_seed() + getpid()))
          .string();
  ~ProfileFile() override { std::filesystem::remove(path_); }
  NetworkProfile load(const std::string& text) {
    std::ofstream(path_) << text;
    return load_network_profile(path_, "place");
  }
  std::string refusal(const std::string& from, const std::string& to) {
    NetworkProfile p = fit(read({bench(Truth{}, "WRITE")}));
    p.name = "mine";
    p.fabric = "efa-v3";
    std::string text = to_json(p);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << text;
    text.replace(at, from.size(), to);
    const std::string error = error_of([&] { load(text); });
    return error.starts_with(path_) ? error.substr(path_.size()) : error;
  }
};

TEST_F(ProfileFile, HoldsWhatWasFitted) {
  NetworkProfile p = fit(read({bench(Truth{}, "WRITE"), std::string(kPings)}));
  p.name = "mine";
  p.fabric = "efa-v3";
  p.date = "2026-11-30";
  p.source = "a test";
  p.files = {{"a.txt", "00", "nixlbench: 44 rows"}};
  const NetworkProfile back = load(to_json(p));
  EXPECT_EQ(to_json(back), to_json(p));
  EXPECT_EQ(back.sha256.size(), 64U);
  EXPECT_EQ(back.latency, p.latency);
  EXPECT_EQ(back.posting->per_descriptor, p.posting->per_descriptor);
  EXPECT_EQ(back.write.size(), p.write.size());
}

TEST_F(ProfileFile, RefusesWhatCannotBe) {
  EXPECT_NE(refusal("\"gb_per_s\": 44", "\"gb_per_s\": 1").find("no lower than at the size before"),
            std::string::npos);
  EXPECT_EQ(refusal("\"pdsim.network-profile/1\"", "\"pdsim.profile/1\"").find(": /schema"), 0U);
  EXPECT_NE(refusal("\"line_gb_per_s\": 50", "\"line_gb_per_s\": 40").find("/gb_per_s"), std::string::npos);
  EXPECT_NE(refusal("\"latency_us\": 17", "\"latency_us\": 0").find("/latency_us"), std::string::npos);
  EXPECT_NE(refusal("\"latency_us\": 17", "\"latency_u\": 17").find("did you mean 'latency_us'"),
            std::string::npos);
  EXPECT_NE(refusal("\"fixed_us\": 20", "\"fixed_us\": -1").find("/posting/fixed_us"), std::string::npos);
  EXPECT_NE(refusal("\"bytes\": 65536", "\"bytes\": 6553600").find("sizes that ascend"), std::string::npos);
  EXPECT_EQ(
      error_of([] { load_network_profile("nowhere.json", "s.json: /network/profile"); }),
      "s.json: /network/profile: is 'nowhere.json', expected a network profile (pdsim calibrate network "
      "writes one)");
}

}  // namespace
}  // namespace pdsim
