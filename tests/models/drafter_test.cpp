// Drafters. Theory: a drafter is a model of one layer (or a model), so its weights and KV are those of that
// layer, counted by hand; a step takes the model's kernels on 1 + k queries a row, then k passes of the
// drafter's, the first over all tokens, the others over one a sequence.
#include "models/drafter.hpp"

#include <gtest/gtest.h>

#include <string>

#include "models/hardware.hpp"
#include "models/profile.hpp"
#include "models/step_model.hpp"

namespace pdsim {
namespace {

Footprint own_footprint(const Drafter& d) {
  return footprint(d.model, {}, d.weights, Dtype::bf16, 8192, 256, d.ends);
}

TEST(Drafter, EagleIsOneDenseLayerBehindAProjection) {
  const ModelSpec model = load_model("qwen3-32b");
  const Drafter d = eagle_drafter(model, 2);
  ASSERT_EQ(d.model.layers.size(), 1u);
  const double h = 5120, q = 64 * 128, kv = 8 * 128, ffn = 25600;
  const double weights = h * (q + 2 * kv) + q * h + 3 * h * ffn  // the layer
                         + 2 * h + 2 * 128                       // its norms
                         + 2 * h * h + 2 * h;                    // two vectors, normed and joined
  EXPECT_EQ(own_footprint(d).weight_bytes, static_cast<Bytes>(2 * weights));
  EXPECT_EQ(own_footprint(d).kv_bytes_per_token, 2 * kv * 2);
  EXPECT_EQ(own_footprint(d).kv_regions, 2);
}

// Where all layers are experts, it is as wide as what a token meets of them.
TEST(Drafter, EagleOfAMixtureIsDense) {
  const ModelSpec model = load_model("qwen3-235b-a22b");
  const Layer layer = eagle_drafter(model, 3).model.layers[0];
  EXPECT_FALSE(layer.moe);
  EXPECT_EQ(layer.intermediate, 8 * 1536);
  EXPECT_EQ(layer.joins, 3);
}

TEST(Drafter, MtpIsTheModelsLastLayerInItsOwnFormat) {
  const ModelSpec model = load_model("deepseek-v3");
  const Drafter d = mtp_drafter(model, Dtype::fp8_block);
  EXPECT_EQ(d.held, 1);
  EXPECT_EQ(d.weights, Dtype::fp8_block);
  Layer last = model.layers.back();
  last.joins = 2;
  EXPECT_EQ(d.model.layers, std::vector<Layer>{last});
  EXPECT_EQ(own_footprint(d).kv_bytes_per_token, 2 * (512 + 64));
}

TEST(Drafter, MemoryAdds) {
  const ModelSpec model = load_model("llama-3.1-8b");
  const Footprint target = footprint(model, {}, Dtype::bf16, Dtype::bf16, 8192, 256);
  const Footprint own = own_footprint(eagle_drafter(model, 2));
  const Footprint both = with_drafter(target, own, 3);
  EXPECT_EQ(both.weight_bytes, target.weight_bytes + 3 * own.weight_bytes);
  EXPECT_EQ(both.kv_bytes_per_token, target.kv_bytes_per_token * 35 / 32);
  EXPECT_EQ(both.kv_regions, 70);
  EXPECT_EQ(both.region_bytes_per_token, target.region_bytes_per_token);
  EXPECT_EQ(both.activation_bytes, target.activation_bytes);
}

StepShape rows(std::int32_t batch, std::int64_t context, std::int32_t drafts) {
  const std::int64_t n = 1 + drafts, p = context - n;
  StepShape shape;
  shape.decode_requests = batch;
  shape.draft_tokens = batch * drafts;
  shape.sampled_requests = batch * (1 + drafts);
  shape.decode_context = batch * context;
  shape.draft_pairs = batch * (n * p + n * (n + 1) / 2 - context);
  return shape;
}

TEST(Drafter, PassesFollowTheStep) {
  const ModelSpec model = load_model("llama-3.1-8b");
  const Gpu& gpu = find_gpu("h200", "");
  const Profile profile = load_profile("h200");
  const Drafter d = eagle_drafter(model, 2);
  const StepModel plain(model, {}, Dtype::bf16, Dtype::bf16, gpu, profile);
  const auto drafter =
      std::make_shared<const StepModel>(d.model, Parallelism{}, d.weights, Dtype::bf16, gpu, profile);
  for (const std::int32_t k : {1, 2, 5}) {
    StepModel both(model, {}, Dtype::bf16, Dtype::bf16, gpu, profile);
    both.draft_with(drafter, k);
    const StepShape shape = rows(16, 3000, k);
    StepShape first = shape;
    first.sampled_requests = 16;
    StepShape next = rows(16, 3000, 0);
    next.decode_context += 16 * k / 2;
    const auto ns = static_cast<double>(plain.time(shape).ns + drafter->time(first).ns +
                                        (k - 1) * drafter->time(next).ns);
    EXPECT_NEAR(static_cast<double>(both.time(shape).ns), ns, 2 + k);
    double us = 0;
    for (const OpTime& op : both.breakdown(shape)) us += op.us;
    EXPECT_NEAR(us * 1e3, ns, 2 + k);
  }
}

// Four queries of a row read its keys once: attention on 4 x 8 = 32 queries of a KV head still fits a thread
// block and takes as long; every other operator is that of four times the tokens.
TEST(Drafter, QueriesOfARowShareItsKeys) {
  const StepModel model(load_model("llama-3.1-8b"), {}, Dtype::bf16, Dtype::bf16, find_gpu("h200", ""),
                        load_profile("h200"));
  const auto attention = [&](const StepShape& shape) {
    double us = 0;
    for (const OpTime& op : model.breakdown(shape)) us += op.name.starts_with("attention (") ? op.us : 0;
    return us;
  };
  const auto others = [&](const StepShape& shape) {
    double us = 0;
    for (const OpTime& op : model.breakdown(shape)) {
      us += op.name.starts_with("attention (") || op.name == "host" ? 0 : op.us;
    }
    return us;
  };
  EXPECT_GT(attention(rows(32, 8000, 0)), 0);
  EXPECT_NEAR(attention(rows(32, 8000, 3)) / attention(rows(32, 8000, 0)), 1, 0.02);
  EXPECT_LT(attention(rows(32, 8000, 3)), 0.5 * attention(rows(128, 8000, 0)));
  EXPECT_DOUBLE_EQ(others(rows(32, 8000, 3)), others(rows(128, 8000, 0)));
  EXPECT_TRUE(model.time(rows(64, 30000, 3)).extrapolated);  // no table has such rows
}

// Work: a draft's query multiplies every weight, and reads neither weights nor keys again.
TEST(Drafter, WorkOfVerification) {
  const ModelSpec spec = load_model("llama-3.1-8b");
  const StepModel model(spec, {}, Dtype::bf16, Dtype::bf16, find_gpu("h200", ""), load_profile("h200"));
  const auto work = [&](std::int32_t drafts) {
    const StepShape shape = rows(8, 4000, drafts);
    StepTotals totals;
    totals.steps = totals.sampling_steps = 1;
    totals.steps_of_tokens.assign(static_cast<std::size_t>(shape.tokens()) + 1, 0);
    totals.steps_of_tokens.back() = 1;
    totals.decode_requests = shape.decode_requests;
    totals.draft_tokens = shape.draft_tokens;
    totals.sampled_requests = shape.sampled_requests;
    totals.decode_context = shape.decode_context;
    totals.draft_pairs = shape.draft_pairs;
    return model.work(totals);
  };
  const Work one = work(0), four = work(3);
  EXPECT_NEAR(four.flops / one.flops, 4, 0.01);
  EXPECT_NEAR(four.hbm_bytes / one.hbm_bytes, 1, 0.02);
}

}  // namespace
}  // namespace pdsim
