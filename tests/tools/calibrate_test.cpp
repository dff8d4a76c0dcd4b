// pdsim calibrate as a user without a GPU meets it: one line that says what to do, status 2, nothing written;
// a list of what would be measured that needs none. And what it writes where there is one: tables that
// models/ reads row for row.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/nvml.hpp"
#include "kernels/shapes.hpp"
#include "kernels/tables.hpp"
#include "models/kernel_table.hpp"
#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

bool gpu_here() {
  return std::filesystem::exists("/dev/nvidiactl");
}

TEST(Calibrate, WithoutAGpuOneLineAndStatus2AndNothingWritten) {
  if (gpu_here()) GTEST_SKIP() << "a GPU is here: tools/gpu-check tests the rest";
  const Folder folder;
  for (const char* arguments : {"calibrate --quick --out tables", "calibrate --out tables --gpu h200"}) {
    const Ran ran = run(folder, arguments);
    EXPECT_EQ(ran.status, 2) << ran.err;
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find("--dry-run"), std::string::npos) << ran.err;
#ifdef PDSIM_CUDA_BUILD
    EXPECT_NE(ran.err.find("no GPU to measure"), std::string::npos) << ran.err;
#else
    EXPECT_NE(ran.err.find("built without CUDA"), std::string::npos) << ran.err;
#endif
    EXPECT_EQ(folder.files(), 0u);
  }
}

TEST(Calibrate, WhatIsAskedWrongIsRefusedFirst) {
  const Folder folder;
  for (const auto& [arguments, expected] : std::vector<std::pair<std::string, std::string>>{
           {"calibrate", "--out is missing"},
           {"calibrate --dry-run --model qwen", "qwen3-32b"},
           {"calibrate --dry-run --model qwen3-32b --tp 3", "--tp 3"},
           {"calibrate --dry-run --quick --tp 2", "--quick"},
           {"calibrate --dry-run --quick --model qwen3-32b", "--quick"},
           {"calibrate --dry-run --tp 0", "--tp"}}) {
    const Ran ran = run(folder, arguments);
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_EQ(ran.out, "");
    EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
  }
  EXPECT_EQ(folder.files(), 0u);
}

TEST(Calibrate, ADryRunListsThePointsAndTheirTime) {
  const Folder folder;
  const Ran quick = run(folder, "calibrate --quick --dry-run");
  ASSERT_EQ(quick.status, 0) << quick.err;
  EXPECT_EQ(quick.err, "");
  for (const kernels::Op op : kernels::kOps)
    EXPECT_NE(quick.out.find("s  " + std::string(name(op)) + " "), std::string::npos) << name(op);
  const Ran full = run(folder, "calibrate --dry-run --out ignored");
  EXPECT_GT(full.out.size(), 4 * quick.out.size());
  EXPECT_EQ(folder.files(), 0u);

  // Qwen3-32B cut four ways: 64 heads of 128 and 8 KV heads, hidden 5120, intermediate 25600.
  const Ran one = run(folder, "calibrate --dry-run --model qwen3-32b --tp 4");
  ASSERT_EQ(one.status, 0) << one.err;
  EXPECT_NE(one.out.find("gemm bf16 m=1 n=12800 k=5120"), std::string::npos);
  EXPECT_NE(one.out.find("attention-decode fp8 batch=128 context=2048 heads=16 kv_heads=2 head_dim=128"),
            std::string::npos);
  EXPECT_EQ(one.out.find("mla"), std::string::npos);
}

TEST(Calibrate, AQuickListThatNoKernelCanRunIsRefusedAtItsLine) {
  const Folder folder;
  std::filesystem::create_directories(folder / "data/models");
  std::ofstream(folder / "data/models/gpus.json") << "{}";
  const std::string header =
      "op,dtype,m,n,k,tokens,prefix,requests,batch,context,heads,kv_heads,head_dim,hidden,intermediate,"
      "experts,topk,tp,ep\n";
  for (const auto& [row, expected] : std::vector<std::pair<std::string, std::string>>{
           {"gem,bf16,1,1024,1024,,,,,,,,,,,,,,", "op is 'gem' (did you mean 'gemm'?)"},
           {"kv-copy,bf16,1,1024,1024,,,,,,,,,,,,,,", "op is 'kv-copy'"},
           {"gemm,int8,1,1024,1024,,,,,,,,,,,,,,", "dtype is 'int8'"},
           {"gemm,bf16,1,1024,,,,,,,,,,,,,,,", "k"},
           {"gemm,bf16,1.5,1024,1024,,,,,,,,,,,,,,", "m is 1.5: expected a whole number"},
           {"gemm,bf16,1,1000,1024,,,,,,,,,,,,,,", "multiples of 16"},
           {"attention-decode,bf16,,,,,,,1,64,8,0,128,,,,,,", "kv_heads"},
           {"attention-decode,bf16,,,,,,,1,64,8,3,128,,,,,,", "at most 16 a KV head"},
           {"attention-prefill,bf16,,,,16,0,1,,,8,2,96,,,,,,", "heads of 64 or 128"}}) {
    std::ofstream(folder / "data/models/quick-shapes.csv") << header << row << '\n';
    const Ran ran = run(folder, "calibrate --quick --dry-run", "PDSIM_DATA=data");
    EXPECT_EQ(ran.status, 2) << row;
    EXPECT_EQ(ran.out, "");
    EXPECT_NE(ran.err.find("quick-shapes.csv:2"), std::string::npos) << ran.err;
    EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
  }
  std::filesystem::remove(folder / "data/models/quick-shapes.csv");
  EXPECT_EQ(run(folder, "calibrate --quick --dry-run", "PDSIM_DATA=data").status, 2);
}

kernels::Measurements measurements() {
  using kernels::Copy, kernels::Format, kernels::Op;
  kernels::Measurements m;
  m.gpu.device = "NVIDIA H200, of a test";
  m.peaks = {4000, 700, 1300};
  const auto add = [&](kernels::Point point, const char* kernel, double us) {
    m.rows.push_back({point, kernel, "algo 1, tile 2", {us, 0.004, 1700, 20, 1, kernels::Stop::noise}});
  };
  add({Op::gemm, Format::fp8, Copy::gather, {64, 1024, 5120}, 0}, "cublasLt", 12.345678);
  add({Op::attention_prefill, Format::bf16, Copy::gather, {128, 4096, 2, 16, 2, 128}, 0}, "pdsim-prefill",
      90);
  add({Op::attention_decode, Format::fp8, Copy::gather, {16, 2048, 16, 2, 128}, 0}, "pdsim-decode", 20);
  add({Op::moe, Format::bf16, Copy::gather, {8, 4096, 1536, 128, 8, 4, 1}, 0}, "cublas-grouped", 70);
  add({Op::mla_decode, Format::bf16, Copy::gather, {16, 2048, 16}, 0}, "pdsim-mla-decode", 50);
  add({Op::kv_copy, Format::bf16, Copy::batch_h2d, {65536, 16, 0}, 0}, "batch-h2d", 30);
  m.interference.push_back(
      {{Op::interference, Format::bf16, Copy::gather, {32768, 2048, 16, 4096, 8192, 8192}, 0},
       {.median_us = 100},
       {.median_us = 150},
       {.median_us = 800},
       {.median_us = 880}});
  return m;
}

// Theory: reading the tables back gives each measured point once, with its shape and its time.
TEST(Calibrate, TablesAreThoseThatFitReads) {
  const Folder folder;
  std::vector<std::filesystem::path> paths;
  for (const auto& [name, text] : tables(measurements(), "pdsim 0, CUDA 13")) {
    EXPECT_NE(std::find(std::begin(kernels::kTableNames), std::end(kernels::kTableNames), name),
              std::end(kernels::kTableNames));
    std::ofstream(folder / name) << text;
    paths.emplace_back(folder / name);
  }
  EXPECT_EQ(paths.size(), 6u);
  paths.pop_back();  // interference: not a table of times
  const KernelTable table = read_kernel_tables(paths);
  EXPECT_EQ(table.device, "NVIDIA H200  of a test");
  EXPECT_EQ(table.software, "pdsim 0  CUDA 13");
  EXPECT_TRUE(table.set_aside.empty());
  ASSERT_EQ(table.rows.size(), 5u);
  EXPECT_EQ(table.rows[0].op, CurveOp::gemm);
  EXPECT_EQ(table.rows[0].dtype, Dtype::fp8);
  EXPECT_NEAR(table.rows[0].ns, 12345.678, 0.1);
  EXPECT_EQ(table.kernels[table.rows[0].kernel], "cublasLt");
  for (const KernelRow& row : table.rows) {
    for (const kernels::Row& point : measurements().rows) {
      if (name(row.op) != name(point.point.op)) continue;
      for (const std::string_view axis : axes(point.point.op))
        EXPECT_EQ(row.at(axis), static_cast<double>(point.point.at(axis))) << axis;
    }
  }
  ASSERT_EQ(table.copies.size(), 1u);
  EXPECT_EQ(table.kernels[table.copies[0].kind], "batch-h2d");
  EXPECT_EQ(table.copies[0].shape.bytes(), 65536 * 16);
  EXPECT_EQ(table.copies[0].ns, 30000);
}

TEST(Calibrate, InterferenceSaysHowMuchEachIsSlowed) {
  const auto files = tables(measurements(), "");
  EXPECT_EQ(files.back().first, "interference.csv");
  EXPECT_NE(files.back().second.find("\npdsim-gather,32768,2048,16,4096,8192,8192,100,150,1.5,800,880,1.1,"),
            std::string::npos)
      << files.back().second;
}

// 2 x 64 x 1024 x 5120 / 12.345678 us = 54.4 TFLOP/s, 4.2 % of the fp8 peak measured.
TEST(Calibrate, AchievedIsHeldAgainstTheMeasuredPeaks) {
  const std::string text = achieved(measurements());
  EXPECT_NE(text.find("54.36 TFLOP/s, 4 %"), std::string::npos) << text;
  // 2 x 16 x 2048 x 2 x 128 bytes of fp8 in 20 us.
  EXPECT_NE(text.find("838.9 GB/s, 21 %"), std::string::npos) << text;
  EXPECT_NE(text.find("34.95 GB/s"), std::string::npos) << text;  // over PCIe: held against nothing
  EXPECT_EQ(achieved(kernels::Measurements{}), "");
}

TEST(Calibrate, ADriverThatIsNotThereLeavesBlanks) {
  if (gpu_here()) GTEST_SKIP();
  const kernels::DriverFacts facts = kernels::driver_facts("0000:00:00.0");
  EXPECT_EQ(facts.driver, "");
  EXPECT_FALSE(facts.power_limit_w.has_value());
}

}  // namespace
}  // namespace pdsim
