// Collectives against what their formulas promise.
//
//   A fit goes through every measured size: between them, t = a + b bytes comes back to a part of a percent.
//   A mode finds its own kernels; a simulation finds the graph's; other widths and GPU counts stand in.
//   Dispatch and combine: the three published times at their shape; bytes split into what stays on the
//   node and what leaves it; linear in tokens.
#include "models/collective.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "models/fit/fits.hpp"
#include "models/kernel_time.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

KernelTable made() {
  KernelTable table;
  table.kernels = {"NCCL", "vLLM_custom_graph", "vLLM_custom_eager"};
  table.files = {"made.csv"};
  const auto add = [&](CurveOp op, std::uint16_t kernel, Dtype dtype, double gpus, double launch) {
    for (double bytes = 256; bytes < 1e9; bytes *= 2) {
      KernelRow row;
      row.op = op;
      row.kernel = kernel;
      row.dtype = dtype;
      row.shape = {bytes, gpus};
      row.ns = launch + bytes / 200;
      table.rows.push_back(row);
    }
  };
  for (const double gpus : {2.0, 4.0, 8.0}) {
    add(CurveOp::allreduce, 0, Dtype::fp16, gpus, 15'000 + gpus);
    add(CurveOp::allreduce, 0, Dtype::int8, gpus, 17'000 + gpus);
    add(CurveOp::allreduce, 1, Dtype::bf16, gpus, 5000 + gpus);
    add(CurveOp::allreduce, 2, Dtype::bf16, gpus, 20'000 + gpus);
    add(CurveOp::alltoall, 0, Dtype::fp16, gpus, 10'000 + gpus);
  }
  return table;
}

class Collectives : public testing::Test {
 protected:
  Collectives() {
    profile_.name = profile_.gpu = "h200";
    fit_collectives(profile_, table_, gpu_);
  }
  double us(CurveOp op, Dtype dtype, std::int32_t gpus, CollectiveMode mode, double bytes) const {
    return collective_time(*find_collective(profile_, op, dtype, gpus, mode, "").curve, bytes).ns / 1e3;
  }
  KernelTable table_ = made();
  const Gpu& gpu_ = find_gpu("h200", "");
  Profile profile_;
};

TEST_F(Collectives, FitsGoThroughEveryRow) {
  EXPECT_EQ(profile_.curves.size(), 15u);
  for (const KernelRow& row : table_.rows) {
    EXPECT_NEAR(predict(profile_, gpu_, table_, row).time.ns, row.ns, 2e-3 * row.ns);
  }
  for (const Curve& curve : profile_.curves) {
    EXPECT_LT(curve.error.p90_ape, 0.01) << curve.kernel;
    EXPECT_FALSE(curve.in_sample);
  }
}

TEST_F(Collectives, BetweenSizesAndBeyondThem) {
  for (const double bytes : {1.5e3, 3e5, 1e6, 5e7, 4e9}) {
    EXPECT_NEAR(us(CurveOp::allreduce, Dtype::bf16, 8, CollectiveMode::graph, bytes), 5.008 + bytes / 2e5,
                0.02 * (5 + bytes / 2e5));
  }
}

TEST_F(Collectives, ModesAndStandIns) {
  EXPECT_NEAR(us(CurveOp::allreduce, Dtype::bf16, 8, CollectiveMode::eager, 256), 20, 0.1);
  EXPECT_NEAR(us(CurveOp::allreduce, Dtype::bf16, 8, CollectiveMode::nccl, 256), 15, 0.1);
  EXPECT_NEAR(us(CurveOp::allreduce, Dtype::int8, 8, CollectiveMode::nccl, 256), 17, 0.1);
  // Only NCCL has an all-to-all, whatever the mode.
  EXPECT_NEAR(us(CurveOp::alltoall, Dtype::bf16, 8, CollectiveMode::graph, 256), 10, 0.1);
  const auto choice = [&](Dtype dtype, std::int32_t gpus, CollectiveMode mode) {
    return find_collective(profile_, CurveOp::allreduce, dtype, gpus, mode, "");
  };
  EXPECT_FALSE(choice(Dtype::bf16, 8, CollectiveMode::nccl).stand_in);  // 16 bits are 16 bits
  EXPECT_TRUE(choice(Dtype::bf16, 6, CollectiveMode::nccl).stand_in);
  EXPECT_EQ(choice(Dtype::bf16, 6, CollectiveMode::nccl).curve->gpus, 8);
  EXPECT_TRUE(choice(Dtype::int8, 8, CollectiveMode::graph).stand_in);
  EXPECT_EQ(find_curve(profile_, CurveOp::allreduce, Dtype::bf16, "", 0, 0, 4).curve->kernel,
            "vLLM_custom_graph");
  EXPECT_THROW(find_collective(profile_, CurveOp::allgather, Dtype::bf16, 8, CollectiveMode::nccl, ""),
               InputError);
  EXPECT_THROW(collective_mode_of("grph", "mode"), InputError);
  EXPECT_EQ(collective_mode_of("eager", "mode"), CollectiveMode::eager);
}

TEST(DispatchCombine, PublishedTimes) {
  const auto us = [](std::string_view fabric) {
    return dispatch_combine_time(128, 7168, 8, Dtype::fp8, 16, 2, find_expert_fabric(fabric, "")).ns / 1e3;
  };
  EXPECT_NEAR(us("efa-h100"), 457, 5);
  EXPECT_NEAR(us("efa-b200"), 366, 5);
  EXPECT_NEAR(us("infiniband"), 313, 5);
  EXPECT_THROW(find_expert_fabric("efa", "fabric"), InputError);
}

TEST(DispatchCombine, BytesStayOrLeave) {
  const ExpertFabric fabric{"f", 10'000, 50, 400};
  const auto time = [&](double tokens, double ranks, double nodes) {
    return dispatch_combine_time(tokens, 1000, 4, Dtype::bf16, ranks, nodes, fabric);
  };
  // 10 tokens: 10 x 4 x 1000 x (2 + 2) bytes. One node: 7/8 over NVLink. Two of four: half and a quarter.
  EXPECT_DOUBLE_EQ(time(10, 8, 1).ns, 20'000 + 160'000 * 7.0 / 8 / 400);
  EXPECT_DOUBLE_EQ(time(10, 4, 2).ns, 20'000 + 160'000 * (0.5 / 50 + 0.25 / 400));
  EXPECT_DOUBLE_EQ(time(20, 4, 2).memory, 2 * time(10, 4, 2).memory);
  EXPECT_GT(time(10, 32, 4).ns, time(10, 16, 2).ns);
}

}  // namespace
}  // namespace pdsim
