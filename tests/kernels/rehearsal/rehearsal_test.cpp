// Theory: what calibrates a GPU is a program like any other. On a machine of which every time is known
// (fake_cuda.hpp) each row's median is the time of the work that its point asks for, however that was posted;
// what is wrong, too large, broken, slow or interrupted ends where calibrate.hpp says and harms no other
// point; and the fit reads the tables that come of it. So the first GPU that the harness meets can be wrong
// about a kernel, but not about the harness. The code under test is that of the GPU, compiled as C++.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/calibrate.hpp"
#include "kernels/tables.hpp"
#include "models/kernel_table.hpp"
#include "tests/kernels/rehearsal/fake_cuda.hpp"
#include "tests/traces/files.hpp"

namespace pdsim::kernels {
namespace {

using fake::gpu;
using fake::kCopyNs;
using fake::kFlopsPerNs;
using fake::kKernelNs;
using fake::kPostNs;

// Seconds of the host's clock, which are not reached: half a second of the GPU's is enough, and ten samples.
constexpr double kBudget = 60;

const Point kGemm{Op::gemm, Format::bf16, Copy::gather, {5, 64, 48}, kBudget};
const Point kFp8Gemm{Op::gemm, Format::fp8, Copy::gather, {5, 64, 48}, kBudget};
const Point kPrefill{Op::attention_prefill, Format::bf16, Copy::gather, {20, 12, 1, 2, 1, 64}, kBudget};
const Point kDecode{Op::attention_decode, Format::bf16, Copy::gather, {1, 40, 4, 2, 64}, kBudget};
const Point kSplitDecode{Op::attention_decode, Format::fp8, Copy::gather, {1, 700, 4, 2, 64}, kBudget};
const Point kMla{Op::mla_decode, Format::bf16, Copy::gather, {1, 40, 16}, kBudget};
const Point kMoe{Op::moe, Format::bf16, Copy::gather, {6, 64, 32, 8, 2, 1, 1}, kBudget};
Point copy_point(Copy copy) {
  const bool kernel = on_multiprocessors(copy);
  return {Op::kv_copy, Format::bf16, copy, {256, kernel ? 128 : 2, kernel ? 2 : 0}, kBudget};
}
Point beside(Copy copy) {
  return {
      Op::interference, Format::bf16, copy, {256, 32, on_multiprocessors(copy) ? 2 : 0, 16, 64, 64}, kBudget};
}

double gemm_ns(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m * n * k) / kFlopsPerNs;
}

/// What the fake GPU takes for what a row's point asks for.
double ns_of(const Row& row) {
  const Point& p = row.point;
  constexpr auto kKernel = static_cast<double>(kKernelNs);
  switch (p.op) {
    case Op::gemm:  // fp8: of rows up to a multiple of 16
      return gemm_ns(p.format == Format::fp8 ? (p.at("m") + 15) / 16 * 16 : p.at("m"), p.at("n"), p.at("k"));
    case Op::attention_prefill:
      return kKernel;
    case Op::attention_decode:
    case Op::mla_decode:  // and the kernel that joins the parts
      return row.choice == "splits 1" ? kKernel : 2 * kKernel;
    case Op::moe:  // up and gate, down
      return gemm_ns(p.at("tokens") * p.at("topk"), 3 * p.at("intermediate"), p.at("hidden"));
    default: {
      if (on_multiprocessors(p.copy)) return kKernel;
      // From the first call's start: that call; where both directions run, an event and a wait before it and
      // the first copy of the other, which ends last.
      const double posting = p.copy == Copy::memcpy_both ? 4 * kPostNs : kPostNs;
      return posting +
             static_cast<double>(p.at("runs") * (static_cast<std::int64_t>(kCopyNs) + p.at("run_bytes")));
    }
  }
}

class Rehearsal : public testing::Test {
 protected:
  Rehearsal() { fake::reset(); }
  /// Whatever the case: all that was allocated and created has been given back, and nothing new was launched
  /// while the stream was held.
  ~Rehearsal() override {
    EXPECT_FALSE(fake::loaded_late());
    EXPECT_NO_THROW(fake::reset());
  }

  /// Calls `before` when the points begin, the peaks being done.
  static Measurements measured(const std::vector<Point>& points, const std::function<void()>& before = {}) {
    const Watch watch{{}, [&](std::size_t done, std::size_t) {
                        if (done == 0 && before) before();
                      }};
    return calibrate(points, watch);
  }
};

TEST_F(Rehearsal, EachCheckPasses) {
  std::string why;
  EXPECT_TRUE(find_gpu(why)) << why;
  const Measurements m = calibrate(check_points(), {}, Mode::check);
  EXPECT_EQ(m.broken, "");
  for (const NotMeasured& wrong : m.wrong) ADD_FAILURE() << describe(wrong.point) << ": " << wrong.why;
  for (const NotMeasured& skipped : m.skipped) EXPECT_EQ(skipped.point.copy, Copy::peer) << skipped.why;
  EXPECT_EQ(m.skipped.size(), 2u);
  EXPECT_EQ(fake::calls("cudaEventElapsedTime"), 0);
}

TEST_F(Rehearsal, ASecondGpuIsCopiedTo) {
  gpu.count = 2;
  const Measurements m = measured({copy_point(Copy::peer)});
  ASSERT_EQ(m.rows.size(), 1u);
  EXPECT_NEAR(m.rows[0].measured.median_us * 1e3, ns_of(m.rows[0]), 1e-7 * ns_of(m.rows[0]));
}

TEST_F(Rehearsal, AMedianIsTheTimeOfTheWorkAndTheFitReadsIt) {
  std::vector<Point> points{kGemm, kFp8Gemm, kPrefill, kDecode, kSplitDecode, kMla, kMoe};
  for (const Copy copy : kCopies) {
    if (copy != Copy::peer) points.push_back(copy_point(copy));
  }
  const std::size_t rows = points.size();
  points.push_back(beside(Copy::gather));
  points.push_back(beside(Copy::batch_h2d));
  const Measurements m = measured(points);
  EXPECT_EQ(m.broken, "");
  EXPECT_TRUE(m.skipped.empty() && m.wrong.empty() && !m.interrupted);

  ASSERT_EQ(m.rows.size(), rows);
  for (std::size_t i = 0; i < rows; ++i) {
    const Row& row = m.rows[i];
    const std::string which = describe(row.point) + " " + row.choice;
    EXPECT_EQ(row.point, points[i]);
    EXPECT_NEAR(row.measured.median_us * 1e3, ns_of(row), 1e-7 * ns_of(row)) << which;
    EXPECT_NEAR(row.measured.clock_mhz, 1000, 1) << which;
    EXPECT_LT(row.measured.spread, 1e-7) << which;
    EXPECT_EQ(row.measured.throttled, 0) << which;
    EXPECT_EQ(row.measured.stop, Stop::noise) << which;
    EXPECT_GE(row.measured.samples, 10) << which;
  }
  // Of the two algorithms that can be used the faster.
  EXPECT_EQ(m.rows[0].choice, "algo 2 of 2");
  EXPECT_NE(m.rows[4].choice, "splits 1");

  // A GPU with room for both: neither slows the other.
  ASSERT_EQ(m.interference.size(), 2u);
  for (const Interference& both : m.interference) {
    EXPECT_NEAR(both.copy_beside.median_us, both.copy_alone.median_us, 1e-7 * both.copy_alone.median_us);
    EXPECT_NEAR(both.gemm_beside.median_us, both.gemm_alone.median_us, 1e-7 * both.gemm_alone.median_us);
    EXPECT_NEAR(both.gemm_alone.median_us * 1e3, gemm_ns(16, 64, 64), 1e-7 * gemm_ns(16, 64, 64));
  }

  // TFLOP/s are flops a ns by 1000; a copy's bytes count twice.
  EXPECT_NEAR(m.peaks.gemm_bf16_tflops, kFlopsPerNs / 1e3, 1e-6 * kFlopsPerNs);
  EXPECT_NEAR(m.peaks.gemm_fp8_tflops, kFlopsPerNs / 1e3, 1e-6 * kFlopsPerNs);
  const double copied = static_cast<double>(gpu.memory / 64 / 256 * 256);
  EXPECT_NEAR(m.peaks.copy_gb_per_s, 2 * copied / (static_cast<double>(kCopyNs) + copied), 1e-6);
  EXPECT_EQ(m.gpu.compute_capability, 90);
  EXPECT_EQ(m.gpu.runtime, "13.0");
  EXPECT_EQ(m.gpu.cublas, "13.0.0");

  const Folder folder;
  std::vector<std::filesystem::path> paths;
  for (const auto& [name, text] : tables(m, "pdsim of a test")) {
    if (name != "interference.csv") paths.emplace_back(folder.file(name, text));
  }
  const KernelTable table = read_kernel_tables(paths);
  EXPECT_EQ(table.device, "NVIDIA H200  rehearsed");
  EXPECT_TRUE(table.set_aside.empty());
  ASSERT_EQ(table.rows.size() + table.copies.size(), rows);
  for (std::size_t i = 0; i < rows; ++i) {  // tables keep the order of rows, copies are last
    const bool copy = i >= table.rows.size();
    const double ns = copy ? table.copies[i - table.rows.size()].ns : table.rows[i].ns;
    EXPECT_NEAR(ns, ns_of(m.rows[i]), 1e-5 * ns) << describe(points[i]);
    if (copy) continue;
    for (const std::string_view axis : axes(points[i].op)) {
      EXPECT_EQ(table.rows[i].at(axis), static_cast<double>(points[i].at(axis))) << axis;
    }
  }
}

TEST_F(Rehearsal, WhatIsWrongIsSaidAndNotTimed) {
  const std::vector<Point> points{kPrefill,
                                  kDecode,
                                  kMla,
                                  kGemm,
                                  kMoe,
                                  copy_point(Copy::batch_d2d),
                                  copy_point(Copy::batch_d2h),
                                  copy_point(Copy::memcpy_both)};
  int events = 0;
  const Measurements m = measured(points, [&] {
    gpu.idle = [](const Launch& launch) { return launch.shared_bytes > 0; };  // attention
    gpu.gemm_factor = 1.1;
    gpu.lose_last_copy = gpu.lose_to_host = true;
    events = fake::calls("cudaEventElapsedTime");
  });
  ASSERT_EQ(m.wrong.size(), points.size());
  for (std::size_t i = 0; i < points.size(); ++i) EXPECT_EQ(m.wrong[i].point, points[i]);
  EXPECT_NE(m.wrong[0].why.find("is off by inf"), std::string::npos) << m.wrong[0].why;  // NaN: not written
  EXPECT_NE(m.wrong[3].why.find("is off by 0.0"), std::string::npos)
      << m.wrong[3].why;  // 0.1 |y| / (|y| + rms)
  EXPECT_TRUE(m.rows.empty());
  EXPECT_EQ(fake::calls("cudaEventElapsedTime"), events);
}

TEST_F(Rehearsal, APointTooLargeIsSkipped) {
  Point gemm = kGemm, decode = kDecode, copy = copy_point(Copy::memcpy_h2d);
  gemm.shape = {16, 16384, 16384};
  decode.shape = {64, 4096, 8, 8, 128};
  copy.shape = {2 << 20, 2, 0};
  const Measurements m = measured({gemm, decode, copy, kGemm});
  ASSERT_EQ(m.skipped.size(), 3u);
  EXPECT_EQ(m.skipped[0].why, "1024 MiB are not free on the GPU");
  EXPECT_EQ(m.skipped[1].why, "512 MiB are not free on the GPU");
  EXPECT_TRUE(m.wrong.empty());
  EXPECT_EQ(m.rows.size(), 1u);
}

// A call that fails costs its point; one that leaves CUDA broken costs all that follow, and what was measured
// is kept.
TEST_F(Rehearsal, ACallThatFailsEndsItsPointAndABrokenGpuEndsAll) {
  const Point batch = copy_point(Copy::batch_h2d);
  const Measurements one = measured({batch, kGemm}, [] { gpu.failing = "cudaMemcpyBatchAsync"; });
  ASSERT_EQ(one.wrong.size(), 1u);
  EXPECT_NE(one.wrong[0].why.find("cudaMemcpyBatchAsync"), std::string::npos) << one.wrong[0].why;
  EXPECT_EQ(one.rows.size(), 1u);
  EXPECT_EQ(one.broken, "");

  std::size_t at = 0;
  const Watch watch{{}, [&](std::size_t done, std::size_t) {
                      at = done;
                      if (done == 0) return;
                      gpu.failing = "cudaDeviceSynchronize";
                      gpu.for_good = true;
                    }};
  const Measurements all = calibrate(std::vector{kGemm, kDecode, kGemm}, watch);
  EXPECT_EQ(at, 1u);
  EXPECT_EQ(all.rows.size(), 1u);
  EXPECT_TRUE(all.wrong.empty());
  EXPECT_TRUE(all.broken.starts_with(describe(kDecode) + ": ")) << all.broken;
  EXPECT_TRUE(all.broken.ends_with("an illegal memory access was encountered")) << all.broken;
}

// However little time there is, each point has a tenth of its budget, and the ten samples that fit in it.
TEST_F(Rehearsal, ALateListHasLessForEachPoint) {
  const std::vector<Point> points(5, kGemm);
  const Measurements m = calibrate(points, {{}, {}, 1e-3});
  EXPECT_EQ(m.rows.size(), points.size());
  for (const Row& row : m.rows) {
    EXPECT_DOUBLE_EQ(row.point.budget_s, kBudget / 10);
    EXPECT_GE(row.measured.samples, 10);
  }
}

TEST_F(Rehearsal, AnInterruptEndsItBetweenPoints) {
  int asked = 0;
  const Measurements m = calibrate(std::vector{kGemm, kGemm, kGemm}, {[&] { return ++asked == 2; }, {}});
  EXPECT_TRUE(m.interrupted);
  EXPECT_EQ(m.rows.size(), 1u);
}

// The clock falls to 40 % now and then: samples of that time do not count, and the others say what they would
// have said. Where it is always down, there is no row.
TEST_F(Rehearsal, SamplesBelowFullClockAreThrownAway) {
  const Measurements m = measured({kPrefill}, [] { gpu.low_every_ns = 2'000'000'000; });
  ASSERT_EQ(m.rows.size(), 1u);
  const Measured& row = m.rows[0].measured;
  EXPECT_GT(row.throttled, 0);
  EXPECT_GE(row.samples, 10);
  EXPECT_NEAR(row.median_us * 1e3, static_cast<double>(kKernelNs), 10);
  EXPECT_NE(tables(m, "")[0].second.find(fmt::format(",{},noise,", row.throttled)), std::string::npos);
}

TEST_F(Rehearsal, AClockThatIsAlwaysDownGivesNoRow) {
  Point point = kPrefill;
  point.budget_s = 0.1;
  const Measurements m = measured({point}, [] { gpu.mhz = 500; });
  ASSERT_EQ(m.skipped.size(), 1u);
  EXPECT_NE(m.skipped[0].why.find("throttled throughout"), std::string::npos) << m.skipped[0].why;
}

// A library whose call waits for its stream cannot be posted behind a kernel that holds it: that gives up,
// and posting is counted. Two calls of a microsecond more, and the first event's.
TEST_F(Rehearsal, APostingThatWaitsForTheStreamIsCounted) {
  gpu.grouped_waits = true;
  const Measurements m = measured({kMoe});
  ASSERT_EQ(m.rows.size(), 1u);
  EXPECT_EQ(m.rows[0].choice, "posting counted");
  EXPECT_NEAR(m.rows[0].measured.median_us * 1e3, ns_of(m.rows[0]) + 2 * kPostNs, 10);
}

}  // namespace
}  // namespace pdsim::kernels
