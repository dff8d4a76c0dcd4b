// How tokens meet experts on other ranks.
//
//   Data-parallel ranks, R GPUs, T tokens a rank of h numbers of 2 bytes: all-gather and reduce-scatter
//   messages of d T h 2 bytes (d ranks), the gathered with the router's logits, by NCCL's curves.
//   Experts on several nodes: dispatch_combine_time of models/collective.hpp and no gather or scatter,
//   extrapolated. Ranks of a stage lie on as many nodes as their GPUs do.
//   A step's experts meet its own tokens and those of the other ranks: with d ranks of T tokens each, the
//   time is that of a shape which says (d - 1) T.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "models/collective.hpp"
#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "models/step_model.hpp"

namespace pdsim {
namespace {

StepModel model_of(Parallelism parallelism, const StepOptions& options = {}) {
  return {load_model("qwen3-235b-a22b"), parallelism,          Dtype::bf16, Dtype::bf16,
          find_gpu("h200", ""),          load_profile("h200"), options};
}

StepShape decode(std::int32_t batch) {
  StepShape shape;
  shape.decode_requests = shape.sampled_requests = batch;
  shape.decode_context = std::int64_t{batch} * 1000;
  return shape;
}

const OpTime* find(const std::vector<OpTime>& ops, const std::string& name) {
  const auto found = std::find_if(ops.begin(), ops.end(), [&](const OpTime& op) { return op.name == name; });
  return found == ops.end() ? nullptr : &*found;
}

TEST(Exchange, GathersAndScattersByNcclsCurves) {
  const auto ops = model_of({.tensor = 1, .data = 8, .expert = 8}).breakdown(decode(64));
  const Profile profile = load_profile("h200");
  const auto us = [&](CurveOp op, double bytes) {
    const CurveChoice choice = find_collective(profile, op, Dtype::bf16, 8, CollectiveMode::nccl, "");
    return collective_time(*choice.curve, bytes).ns / 1e3;
  };
  constexpr int kLayers = 94;
  const double bytes = 8.0 * 64 * 4096 * 2, logits = 8.0 * 64 * 128 * 2;
  ASSERT_NE(find(ops, "moe_gather"), nullptr);
  EXPECT_NEAR(find(ops, "moe_gather")->us, kLayers * us(CurveOp::allgather, bytes + logits), 1e-6);
  EXPECT_NEAR(find(ops, "moe_scatter")->us, kLayers * us(CurveOp::reducescatter, bytes), 1e-6);
  EXPECT_EQ(find(ops, "moe_allreduce"), nullptr);
  // Tensor-parallel ranks have the same tokens and reduce.
  EXPECT_NE(find(model_of({.tensor = 8, .expert = 8}).breakdown(decode(64)), "moe_allreduce"), nullptr);
}

TEST(Exchange, OverNodesIsDispatchAndCombine) {
  StepOptions options;
  options.expert_fabric = "efa-h100";
  const Parallelism sixteen{.tensor = 1, .data = 16, .expert = 16};
  const StepModel model = model_of(sixteen, options);
  const auto ops = model.breakdown(decode(64));
  EXPECT_EQ(find(ops, "moe_gather"), nullptr);
  EXPECT_EQ(find(ops, "moe_scatter"), nullptr);
  const OpTime* exchange = find(ops, "dispatch_combine");
  ASSERT_NE(exchange, nullptr);
  EXPECT_TRUE(exchange->extrapolated);
  EXPECT_TRUE(model.time(decode(64)).extrapolated);
  const double once =
      dispatch_combine_time(64, 4096, 8, Dtype::bf16, 16, 2, find_expert_fabric("efa-h100", "")).ns;
  EXPECT_NEAR(exchange->us, 94 * once / 1e3, 1e-6);
  // Sixteen GPUs that NVLink joins are one node.
  options.gpus_per_node = 16;
  EXPECT_EQ(find(model_of(sixteen, options).breakdown(decode(64)), "dispatch_combine"), nullptr);
}

TEST(Exchange, NodesOfAStage) {
  EXPECT_EQ(expert_nodes({.tensor = 1, .data = 8, .expert = 8}, 8), 1);
  EXPECT_EQ(expert_nodes({.tensor = 1, .data = 9, .expert = 9}, 8), 2);
  EXPECT_EQ(expert_nodes({.tensor = 8, .data = 4, .expert = 32}, 8), 4);
  EXPECT_EQ(expert_nodes({.tensor = 8, .data = 1, .expert = 8}, 8), 1);
  // Each rank's two stages fill a node: the four GPUs of a stage on each of two nodes.
  EXPECT_EQ(expert_nodes({.tensor = 4, .pipeline = 2, .data = 2, .expert = 8}, 8), 2);
}

TEST(Exchange, ExpertsMeetTheTokensOfAllRanks) {
  const StepModel model = model_of({.tensor = 1, .data = 8, .expert = 8});
  StepShape alike = decode(64), alone = decode(64), crowd = decode(64);
  alike.other_tokens = 7 * 64;
  alone.other_tokens = 0;
  crowd.other_tokens = 7 * 512;
  EXPECT_EQ(model.time(alike).ns, model.time(decode(64)).ns);
  EXPECT_LT(model.time(alone).ns, model.time(alike).ns);
  EXPECT_GT(model.time(crowd).ns, model.time(alike).ns);
  // One rank has nobody to wait for.
  const StepModel single = model_of({.tensor = 8, .expert = 8});
  EXPECT_EQ(single.time(crowd).ns, single.time(decode(64)).ns);
  double sum = 0;
  for (const OpTime& op : model.breakdown(crowd)) sum += op.us;
  EXPECT_NEAR(sum, static_cast<double>(model.time(crowd).ns) / 1e3, 0.01);
}

}  // namespace
}  // namespace pdsim
