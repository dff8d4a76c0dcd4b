// pdsim fit and validate kernels as a user meets them: a CSV of one's own becomes a profile without naming
// the GPU, the profile predicts the table that it was made from, and a table that cannot be true or is no
// table is one line on stderr, status 2, and no file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

/// t = 4 us + flops / 700 TFLOP/s + bytes / 4 TB/s: no overlap at all.
std::string table() {
  std::ostringstream text;
  text.precision(12);
  text << "op,dtype,kernel,latency_us,device,software,m,n,k\n";
  for (double m = 1; m <= 8192; m *= 2) {
    for (double n = 512; n <= 16384; n *= 2) {
      for (double k = 512; k <= 16384; k *= 2) {
        const double us = 4 + 2 * m * n * k / 7e8 + 2 * (n * k + m * k + m * n) / 4e6;
        text << "gemm,bf16,mine," << us << ",NVIDIA H200,vLLM 1.0," << m << ',' << n << ',' << k << '\n';
      }
    }
  }
  return text.str();
}

void write(const Folder& folder, const std::string& name, const std::string& text) {
  std::ofstream(folder / name) << text;
}

TEST(Fit, AProfileFromOnesOwnCsvWithoutNamingTheGpu) {
  const Folder folder;
  write(folder, "mine.csv", table());
  const Ran fit = run(folder, "fit mine.csv --out mine.json");
  ASSERT_EQ(fit.status, 0) << fit.err;
  EXPECT_EQ(fit.err, "");
  EXPECT_NE(fit.out.find("h200 (NVIDIA H200), vLLM 1.0"), std::string::npos) << fit.out;
  const auto profile = nlohmann::json::parse(bytes_of(folder / "mine.json"));
  EXPECT_EQ(profile["gpu"], "h200");
  EXPECT_EQ(profile["schema"], "pdsim.profile/1");
  EXPECT_LT(profile["curves"][0]["held_out"]["median_ape"], 0.01);
  // Again: the same bytes, to stdout too, where the report goes to stderr.
  const Ran again = run(folder, "fit mine.csv --out -");
  EXPECT_EQ(again.out, bytes_of(folder / "mine.json"));
  EXPECT_NE(again.err.find("held-out"), std::string::npos);

  const Ran text = run(folder, "validate kernels mine.csv --gpu h200 --profile mine.json --csv rows.csv");
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_NE(text.out.find("worst rows"), std::string::npos);
  const std::string rows = bytes_of(folder / "rows.csv");
  EXPECT_EQ(std::count(rows.begin(), rows.end(), '\n'), 14 * 6 * 6 + 1);
  const Ran json = run(folder, "validate kernels mine.csv --gpu h200 --profile mine.json --json");
  ASSERT_EQ(json.status, 0) << json.err;
  const auto report = nlohmann::json::parse(json.out);
  EXPECT_EQ(report["schema"], "pdsim.kernel-report/1");
  EXPECT_EQ(report["overall"]["n"], 14 * 6 * 6);
  EXPECT_LT(report["overall"]["median_ape"], 0.01);
  EXPECT_LT(report["overall"]["p90_ape"], 0.03);
  EXPECT_EQ(report["groups"][0]["op"], "gemm");
  EXPECT_EQ(report["worst"].size(), 20u);
  EXPECT_EQ(report["worst"][0]["place"].get<std::string>().substr(0, 9), "mine.csv:");
  EXPECT_TRUE(report["set_aside"].empty());
}

TEST(Fit, ValidateReportsTheErrorThatIsThere) {
  const Folder folder;
  write(folder, "mine.csv", table());
  write(folder, "slow.csv", table() + "moe,bf16,x,1,NVIDIA H200,vLLM 1.0,1,1,1\n");
  ASSERT_EQ(run(folder, "fit mine.csv --out mine.json").status, 0);
  const Ran bad = run(folder, "validate kernels slow.csv --gpu h200 --profile mine.json --json");
  EXPECT_EQ(bad.status, 2);  // the last line has no shape of a moe
  EXPECT_NE(bad.err.find("slow.csv:1: has no column 'tokens'"), std::string::npos) << bad.err;
  write(folder, "slow.csv",
        "op,dtype,kernel,latency_us,m,n,k,bytes,gpus\ngemm,bf16,mine,440,4096,4096,4096,,\n"
        "allreduce,bf16,x,5,,,,4096,8\nallreduce,bf16,x,5,,,,8192,8\n");
  const Ran ran = run(folder, "validate kernels slow.csv --gpu h200 --profile mine.json --json");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const auto report = nlohmann::json::parse(ran.out);
  // 4 + 2 4096^3 / 7e8 + 6 4096^2 / 4e6 us.
  const double us = 4 + 2 * std::pow(4096, 3) / 7e8 + 6 * 4096.0 * 4096 / 4e6;
  EXPECT_EQ(report["overall"]["n"], 1);
  EXPECT_NEAR(report["overall"]["bias"].get<double>(), us / 440 - 1, 0.03);
  EXPECT_NEAR(report["worst"][0]["predicted_us"].get<double>(), us, 0.03 * us);
  // What the profile has no curve for is counted, with its reason.
  ASSERT_EQ(report["set_aside"].size(), 1u);
  EXPECT_EQ(report["set_aside"][0]["rows"], 2);
  EXPECT_NE(report["set_aside"][0]["reason"].get<std::string>().find("allreduce"), std::string::npos);
}

TEST(Fit, WhatCannotWorkIsOneLineAndStatus2) {
  const Folder folder;
  const std::string header = "op,dtype,kernel,latency_us,m,n,k";
  // 2 x 8192^3 flops in 100 us are 11 PFLOP/s.
  write(folder, "impossible.csv", table() + "gemm,bf16,mine,100,NVIDIA H200,vLLM 1.0,8192,8192,8192\n");
  write(folder, "unknown.csv", header + ",device\ngemm,bf16,mine,100,1,1,1,NVIDIA H300\n");
  write(folder, "nameless.csv", header + "\ngemm,bf16,mine,100,1,1,1\n");
  write(folder, "column.csv", header + ",contxt\ngemm,bf16,mine,100,1,1,1,1\n");
  write(folder, "other.csv", "a,b\n1,2\n");
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"impossible.csv", "1 of 505 rows imply more arithmetic than a NVIDIA H200"},
      {"impossible.csv", "impossible.csv:506: gemm bf16 m=8192 n=8192 k=8192 in 100 us, MFU 11.12"},
      {"unknown.csv", "device 'NVIDIA H300' is none that pdsim knows: expected --gpu"},
      {"nameless.csv", "does not say which GPU was measured: expected --gpu"},
      {"column.csv", "column.csv:1: has a column 'contxt' that is not known here (did you mean 'context'?)"},
      {"other.csv", "other.csv: is no table of kernel times"},
      {"nosuch.csv", "nosuch.csv: cannot be opened"},
      {"nameless.csv --gpu h300", "--gpu"},
      {"nameless.csv --gpu h200", "too few rows for any curve"},
  };
  for (const auto& c : cases) {
    const Ran ran = run(folder, "fit " + c.arguments + " --out out.json");
    EXPECT_EQ(ran.status, 2) << c.arguments;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << c.arguments << '\n' << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_EQ(ran.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder / "out.json")) << c.arguments;
  }
  const Ran none = run(folder, "validate kernels nosuch.csv --gpu h200 --csv rows.csv");
  EXPECT_EQ(none.status, 2);
  EXPECT_FALSE(std::filesystem::exists(folder / "rows.csv"));
}

}  // namespace
}  // namespace pdsim
