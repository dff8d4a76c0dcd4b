// What follows from a scenario before it runs, and what is refused: one line that names the field.
#include "sim/cluster/deployment.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "sim/core/error.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

Deployment plan(const std::string& scenario, const Sets& sets = {}) {
  return plan_deployment(parse_scenario(scenario, "test.json", "", sets));
}

/// Each must be refused with one line that has all these words in it.
void expect_refused(const std::string& scenario, const Sets& sets, const std::vector<std::string>& words) {
  try {
    const LoadedScenario loaded = parse_scenario(scenario, "test.json", "", sets);
    check_simulated(loaded);
    plan_deployment(loaded);
    ADD_FAILURE() << "accepted; expected a refusal about " << words.front();
  } catch (const InputError& e) {
    const std::string what = e.what();
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    for (const std::string& word : words) EXPECT_NE(what.find(word), std::string::npos) << what;
  }
}

// KV blocks = (memory x utilisation - weights - activations - per-sequence state) / bytes of a block, less
// vLLM's null block.
TEST(Deployment, BlocksAreWhatMemoryLeaves) {
  for (const char* model : {"llama-3.1-8b", "qwen3-32b", "glm-5-fp8", "gpt-oss-120b"}) {
    const Deployment d = plan(kColocated, {std::string("model=") + model, "pools.worker.tensor_parallel=8",
                                           "pools.worker.replicas=1"});
    const PoolPlan& pool = d.pools[0];
    const Footprint& f = pool.footprint;
    const double left = std::floor(static_cast<double>(pool.gpu->memory_bytes) * 0.92) -
                        static_cast<double>(f.weight_bytes) - static_cast<double>(f.activation_bytes) -
                        static_cast<double>(pool.engine.max_num_seqs) *
                            static_cast<double>(f.state_bytes_per_sequence + f.window_bytes_per_sequence);
    EXPECT_EQ(pool.blocks, static_cast<std::int32_t>(std::floor(left / (f.kv_bytes_per_token * 16))) - 1)
        << model;
    EXPECT_EQ(pool.kv_tokens(), std::int64_t{pool.blocks} * 16) << model;
  }
  const Deployment d = plan(kColocated, {"pools.worker.engine.num_gpu_blocks_override=100"});
  EXPECT_EQ(d.pools[0].blocks, 99);
  // Llama-3.1-8B on an H200: 32 layers x 2 x 8 heads x 128 x 2 bytes a token.
  EXPECT_EQ(d.pools[0].footprint.kv_bytes_per_token, 131072);
  EXPECT_EQ(d.pools[0].footprint.kv_regions, 64);
}

TEST(Deployment, WorkersAndTheirGpus) {
  const Deployment d =
      plan(kDisaggregated, {"pools.prefill.replicas=3", "pools.prefill.tensor_parallel=4", "placement=pack"});
  ASSERT_EQ(d.workers.size(), 5u);
  EXPECT_EQ(d.workers[0].name, "prefill-0");
  EXPECT_EQ(d.workers[4].name, "decode-1");
  EXPECT_EQ(d.workers[1].gpus, (std::vector<GpuId>{4, 5, 6, 7}));
  EXPECT_EQ(d.workers[2].gpus, (std::vector<GpuId>{8, 9, 10, 11}));  // the second node is prefill's alone
  EXPECT_EQ(d.workers[3].gpus, std::vector<GpuId>{16});
  EXPECT_EQ(d.nodes.size(), 3u);
  EXPECT_EQ(d.nodes[0].gpus_held, 8);
  EXPECT_EQ(d.nodes[1].gpus_held, 4);
  EXPECT_EQ(d.nodes[2].gpus_held, 2);
  EXPECT_TRUE(d.disaggregated);

  // spread: over as few nodes as pack, one after the other.
  const Deployment spread =
      plan(kDisaggregated, {"pools.prefill.replicas=3", "pools.prefill.tensor_parallel=4"});
  EXPECT_EQ(spread.nodes.size(), 3u);
  EXPECT_EQ(spread.workers[1].gpus, (std::vector<GpuId>{8, 9, 10, 11}));
  EXPECT_EQ(spread.workers[2].gpus, (std::vector<GpuId>{4, 5, 6, 7}));
}

// Every GPU belongs to one worker at most.
TEST(Deployment, NoGpuIsGivenTwice) {
  for (const char* placement : {"pack", "spread"}) {
    for (const int tp : {1, 2, 8}) {
      const Deployment d = plan(
          kDisaggregated, {std::string("placement=") + placement, "pools.prefill.replicas=5",
                           "pools.decode.replicas=4", "pools.prefill.tensor_parallel=" + std::to_string(tp)});
      std::set<GpuId> gpus;
      std::size_t held = 0;
      for (const WorkerPlan& worker : d.workers) {
        for (const GpuId gpu : worker.gpus) {
          EXPECT_TRUE(gpus.insert(gpu).second);
          EXPECT_LT(gpu, d.topology.gpus());
        }
      }
      for (const NodePlan& node : d.nodes) held += static_cast<std::size_t>(node.gpus_held);
      EXPECT_EQ(held, gpus.size());
    }
  }
}

TEST(Deployment, Prices) {
  EXPECT_DOUBLE_EQ(*plan(kColocated).nodes[0].usd_per_hour, 63.296);
  EXPECT_EQ(plan(kColocated).nodes[0].price_as_of, "2026-08");
  const Deployment own = plan(kColocated, {R"(pricing={"plan":{"usd_per_hour":{"p5en.48xlarge":10}}})"});
  EXPECT_DOUBLE_EQ(*own.nodes[0].usd_per_hour, 10);
}

TEST(Deployment, WhatCannotWorkIsRefused) {
  const std::string d = kDisaggregated, c = kColocated;
  expect_refused(c, {"model=qwen3-235b-a22b"}, {"/pools/0", "do not fit", "GiB", "worker"});
  expect_refused(c, {"pools.worker.tensor_parallel=3"}, {"/pools/0", "tensor"});
  expect_refused(c, {"pools.worker.tensor_parallel=16"}, {"/pools/0", "16"});
  expect_refused(c, {"pools.worker.instance=p5en.24xlarge"}, {"/pools/0/instance", "p5en.48xlarge"});
  expect_refused(c, {"model=llama-3.1-9b"}, {"/model", "llama-3.1-8b"});
  expect_refused(c, {"pools.worker.engine.gpu_memory_utilization=0.12"},
                 {"/pools/0", "no request could use"});
  expect_refused(c, {"pools.worker.engine.num_gpu_blocks_override=1"}, {"/pools/0"});
  expect_refused(c, {"pools.worker.engine.max_model_len=200000"}, {"max_model_len", "131072"});
  expect_refused(c, {"pools.worker.role=decode"}, {"/pools", "prefill"});
  expect_refused(c, {"pools.worker.role=prefill"}, {"/pools", "decode"});
  expect_refused(d, {"pools.decode.role=colocated"}, {"/pools", "decode"});
  expect_refused(d, {"pools.decode.pipeline_parallel=2"}, {"/pools/1/pipeline_parallel"});
  expect_refused(d, {R"(placement=[{"pool":"prefill","replica":0,"node":0,"gpus":[9]}])"}, {"/placement"});
  expect_refused(d, {"pools.decode.engine.block_size=32"}, {"/pools/1/engine/block_size", "32", "16"});
  expect_refused(
      d,
      {"pools.decode.replicas=1", "pools.prefill.replicas=1",
       R"(placement=[{"pool":"prefill","replica":0,"node":0,"gpus":[0]},{"pool":"decode","replica":0,"node":2,"gpus":[0]}])"},
      {"/placement", "node 1"});
}

// What this version does not simulate is refused, never ignored.
TEST(Deployment, WhatIsNotSimulatedIsRefused) {
  const std::string d = kDisaggregated;
  expect_refused(d, {"router.max_retries=1"}, {"/router/max_retries"});
  expect_refused(d, {"transfer.num_threads=8"}, {"/transfer/num_threads"});
  expect_refused(d, {"transfer.seed_first_token=true"}, {"/transfer"});
  expect_refused(d, {R"(transfer={"pairs":[{"from":"prefill","to":"decode","fast_kv_notify":true}]})"},
                 {"/transfer/pairs/0"});
  expect_refused(d, {R"(faults=[{"at_s":1,"kind":"link_down"}])"}, {"/faults/0/kind"});
}

// One region of all layers is one piece of memory only where both sides cut their heads alike.
TEST(Deployment, CrossLayerBlocksNeedEqualTensorParallelism) {
  const Sets unequal = {"transfer.enable_cross_layers_blocks=true", "model=qwen3-32b",
                        "pools.prefill.tensor_parallel=2", "pools.decode.tensor_parallel=4"};
  expect_refused(kDisaggregated, unequal, {"/transfer/enable_cross_layers_blocks"});
}

}  // namespace
}  // namespace pdsim
