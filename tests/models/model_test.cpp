// Model shapes against published figures, and memory against sums done by hand.
#include "models/model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "models/json.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path kShared = fs::path(PDSIM_SOURCE_DIR) / ".." / "shared" / "models";

/// The message of the InputError that `act` throws; "" when it throws none.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

const Operator& find_operator(const std::vector<Operator>& list, std::string_view name) {
  for (const Operator& op : list) {
    if (op.name == name) return op;
  }
  throw std::out_of_range("no operator " + std::string(name));
}

std::int64_t count(const ModelSpec& model, LayerAttention attention) {
  return std::count_if(model.layers.begin(), model.layers.end(),
                       [&](const Layer& layer) { return layer.attention == attention; });
}

/// A small dense model: 2 layers, hidden 64, 8 heads of 8 with 4 KV heads, feed-forward 96, vocabulary 128.
json tiny() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"num_hidden_layers", 2},
          {"hidden_size", 64},
          {"num_attention_heads", 8},
          {"num_key_value_heads", 4},
          {"intermediate_size", 96},
          {"vocab_size", 128},
          {"max_position_embeddings", 1024}};
}

ModelSpec parse(const json& config) {
  return parse_model(config, "tiny.json");
}

json with(json config, const json& changes) {
  config.merge_patch(changes);
  return config;
}

// Parameters -----------------------------------------------------------------------------------------

// Where the published checkpoint states the exact number of weights and has no biases, ours is the same.
TEST(Parameters, EqualThePublishedCheckpointsExactly) {
  EXPECT_EQ(parameter_count(load_model("llama-3.1-8b")), 8'030'261'248);
  EXPECT_EQ(parameter_count(load_model("qwen3-32b")), 32'762'123'264);
  EXPECT_EQ(parameter_count(load_model("mixtral-8x7b")), 46'702'792'704);
}

struct Published {
  const char* model;
  double total, active;  // billions
  const char* source;
};

// "Active" is published with or without embeddings, biases and the like: 3 % covers the conventions.
TEST(Parameters, LieNearThePublishedTotals) {
  const Published published[] = {
      {"llama-3.1-8b", 8.03, 0, "Llama 3 herd, arXiv 2407.21783"},
      {"llama-3.1-70b", 70.6, 0, "Llama 3 herd, arXiv 2407.21783"},
      {"mistral-7b", 7.25, 0, "model card"},
      {"qwen3-8b", 8.19, 0, "Qwen3 report, arXiv 2505.09388"},
      {"qwen3-32b", 32.8, 0, "Qwen3 report, arXiv 2505.09388"},
      {"qwen3-235b-a22b", 235, 22, "Qwen3 report, arXiv 2505.09388"},
      {"mixtral-8x7b", 46.7, 12.9, "Mixtral of Experts, arXiv 2401.04088"},
      {"gpt-oss-120b", 116.8, 5.13, "gpt-oss model card, arXiv 2508.10925"},
      {"gpt-oss-20b", 20.9, 3.61, "gpt-oss model card, arXiv 2508.10925"},
      {"deepseek-v3", 671, 37, "DeepSeek-V3 report, arXiv 2412.19437"},
      {"kimi-k2", 1030, 32, "Kimi K2 report, arXiv 2507.20534"},
      {"glm-5", 744, 40, "GLM-5 model card"},
      {"minimax-m2", 230, 10, "MiniMax-M2 model card"},
      {"qwen3.5-397b-a17b", 397, 17, "Qwen3.5 model card"},
  };
  for (const Published& row : published) {
    const ModelSpec model = load_model(row.model);
    EXPECT_NEAR(static_cast<double>(parameter_count(model)) / 1e9, row.total, 0.01 * row.total) << row.model;
    if (row.active == 0) continue;
    EXPECT_NEAR(static_cast<double>(active_parameter_count(model)) / 1e9, row.active, 0.045 * row.active)
        << row.model;
  }
}

// A dense model multiplies every weight but the embedding and its norms once a token.
TEST(Parameters, FlopsAreTwicePerMultipliedWeight) {
  const ModelSpec model = load_model("llama-3.1-8b");
  const std::int64_t norms = (2 * 32 + 1) * 4096, embedding = 128256 * 4096;
  EXPECT_EQ(flops_per_token(model), 2.0 * static_cast<double>(parameter_count(model) - embedding - norms));
}

// KV cache ---------------------------------------------------------------------------------------------

double kv_bytes(std::string_view name, std::int32_t tensor, Dtype kv = Dtype::bf16) {
  const ModelSpec model = load_model(name);
  return footprint(model, {.tensor = tensor}, Dtype::bf16, kv, 8192, 256).kv_bytes_per_token;
}

// Heads: 2 (K and V) x layers x KV heads x head_dim x bytes, cut by TP down to one head a rank.
TEST(KvCache, OfHeadsIsCutByTensorParallelism) {
  EXPECT_EQ(kv_bytes("llama-3.1-8b", 1), 131'072);
  EXPECT_EQ(kv_bytes("llama-3.1-70b", 1), 327'680);
  EXPECT_EQ(kv_bytes("llama-3.1-70b", 8), 327'680 / 8);
  EXPECT_EQ(kv_bytes("llama-3.1-70b", 16), 327'680 / 8);  // 8 KV heads: two ranks hold each
  EXPECT_EQ(kv_bytes("qwen3-32b", 1), 262'144);           // head_dim 128 is given; hidden / heads would be 80
  EXPECT_EQ(kv_bytes("qwen3-32b", 4, Dtype::fp8), 262'144 / 8);
}

// MLA: (latent 512 + rope 64) x layers x bytes on every rank.
TEST(KvCache, OfLatentAttentionIsOnEveryRank) {
  EXPECT_EQ(kv_bytes("deepseek-v3", 1), 70'272);
  EXPECT_EQ(kv_bytes("deepseek-v3", 8), 70'272);
  EXPECT_EQ(kv_bytes("deepseek-v3", 8, Dtype::fp8), 70'272 / 2);
}

// DSA adds the indexer's key, 128 in fp8 and a 4-byte scale. An 8-bit cache of its latent is vLLM's
// fp8_ds_mla: 512 + 4 x 4 + 64 x 2 = 656 bytes.
TEST(KvCache, OfSparseAttentionHoldsTheIndexerToo) {
  EXPECT_EQ(kv_bytes("glm-5", 8), 78 * (2 * 576 + 132));
  EXPECT_EQ(kv_bytes("glm-5", 8, Dtype::fp8), 78 * (656 + 132));
}

// Sliding layers hold 128 tokens a sequence whatever its length: of gpt-oss's 36 layers, every other one.
TEST(KvCache, OfSlidingLayersIsAFixedSumPerSequence) {
  const ModelSpec model = load_model("gpt-oss-120b");
  const Footprint f = footprint(model, {}, Dtype::mxfp4, Dtype::bf16, 8192, 256);
  const std::int64_t layer_token = 2 * 8 * 64 * 2;
  EXPECT_EQ(f.kv_bytes_per_token, 18 * layer_token);
  EXPECT_EQ(f.window_bytes_per_sequence, 18 * layer_token * 128);
  EXPECT_EQ(f.kv_regions, 36);
  EXPECT_EQ(f.window_regions, 36);
}

// Gated delta rule: a key_dim x value_dim matrix a value head in fp32, and the last kernel - 1 inputs of
// the convolution over queries, keys and values in 16 bits. 45 of Qwen3.5's 60 layers; TP 8 cuts it in 8.
TEST(KvCache, OfLinearAttentionIsAState) {
  const ModelSpec model = load_model("qwen3.5-397b-a17b");
  EXPECT_EQ(count(model, LayerAttention::linear), 45);
  const std::int64_t recurrent = 64 * 128 * 128 * 4, convolution = (2 * 16 * 128 + 64 * 128) * 3 * 2;
  const Footprint one = footprint(model, {}, Dtype::bf16, Dtype::bf16, 8192, 256);
  EXPECT_EQ(one.state_bytes_per_sequence, 45 * (recurrent + convolution));
  EXPECT_EQ(one.kv_bytes_per_token, 15 * 2 * 2 * 256 * 2);
  const Footprint eight = footprint(model, {.tensor = 8}, Dtype::bf16, Dtype::bf16, 8192, 256);
  EXPECT_EQ(eight.state_bytes_per_sequence * 8, one.state_bytes_per_sequence);
}

// NIXL registers K and V of each layer apart, an MLA latent once, an indexer's keys once (NIXL#1514: 160
// regions of Llama-70B; vllm#55434: 101 of a GLM with 78 layers, of which 21 have an indexer of their
// own: 78 + 21, and 2 of the multi-token-prediction layer, which we do not load).
TEST(KvCache, RegionsAreWhatATransferNames) {
  const Footprint llama =
      footprint(load_model("llama-3.3-70b"), {.tensor = 8}, Dtype::bf16, Dtype::bf16, 8192, 256);
  EXPECT_EQ(llama.kv_regions, 160);
  EXPECT_EQ(llama.region_bytes_per_token * 16, 4096);  // a 16-token block's descriptor at TP 8

  json glm = read_json(fs::path(PDSIM_SOURCE_DIR) / "models" / "shapes" / "glm-5.json");
  for (int i = 0; i < 78; ++i) glm["indexer_types"].push_back(i < 3 || i % 4 == 2 ? "full" : "shared");
  const ModelSpec model = parse(glm);
  EXPECT_EQ(footprint(model, {.tensor = 8}, Dtype::bf16, Dtype::bf16, 8192, 256).kv_regions, 78 + 21);
  EXPECT_EQ(model.mtp_layers, 1);
}

// Weights ----------------------------------------------------------------------------------------------

// By hand, one rank of TP 2 of the tiny model, elements a layer: QKV (32 + 2 x 16) x 64, O 64 x 32,
// gate and up 2 x 48 x 64, down 64 x 48, norms 2 x 64; at the ends 2 x (128 / 2) x 64 and a norm.
TEST(Weights, OfATinyModelByHand) {
  const ModelSpec model = parse(tiny());
  const std::int64_t layer = 64 * 64 + 64 * 32 + 96 * 64 + 64 * 48 + 2 * 64;
  const std::int64_t ends = 2 * 64 * 64 + 64;
  const Footprint two = footprint(model, {.tensor = 2}, Dtype::bf16, Dtype::bf16, 64, 4);
  EXPECT_EQ(two.weight_bytes, 2 * (2 * layer + ends));
  EXPECT_EQ(two.kv_bytes_per_token, 2 * 2 * 2 * 8 * 2);  // layers, K and V, heads a rank, head_dim, bytes

  // TP 8: 4 KV heads on 8 ranks, one each: QKV (8 + 2 x 8) x 64.
  const std::int64_t eighth = 24 * 64 + 64 * 8 + 24 * 64 + 64 * 12 + 2 * 64;
  const Footprint eight = footprint(model, {.tensor = 8}, Dtype::bf16, Dtype::bf16, 64, 4);
  EXPECT_EQ(eight.weight_bytes, 2 * (2 * eighth + 2 * 16 * 64 + 64));

  // A pipeline of two: the last stage has the head and the last norm, and so most.
  const Footprint last = footprint(model, {.tensor = 2, .pipeline = 2}, Dtype::bf16, Dtype::bf16, 64, 4);
  EXPECT_EQ(last.weight_bytes, 2 * (layer + 64 * 64 + 64));
  EXPECT_EQ(last.kv_bytes_per_token * 2, two.kv_bytes_per_token);
  EXPECT_EQ(last.kv_regions * 2, two.kv_regions);

  // fp8: the matrices of the layers take a byte, the ends and the norms stay in 16 bits.
  const Footprint fp8 = footprint(model, {.tensor = 2}, Dtype::fp8, Dtype::bf16, 64, 4);
  EXPECT_EQ(fp8.weight_bytes, 2 * (layer - 2 * 64) + 2 * (2 * 2 * 64 + ends));

  // Tied embeddings are one matrix, except where a pipeline has them on two stages.
  const ModelSpec tied = parse(with(tiny(), {{"tie_word_embeddings", true}}));
  EXPECT_EQ(footprint(tied, {.tensor = 2}, Dtype::bf16, Dtype::bf16, 64, 4).weight_bytes,
            two.weight_bytes - 2 * 64 * 64);
  EXPECT_EQ(footprint(tied, {.tensor = 2, .pipeline = 2}, Dtype::bf16, Dtype::bf16, 64, 4).weight_bytes,
            last.weight_bytes);
  EXPECT_EQ(parameter_count(tied), parameter_count(model) - 128 * 64);
  const ModelSpec three = parse(with(tiny(), {{"tie_word_embeddings", true}, {"num_hidden_layers", 3}}));
  EXPECT_EQ(footprint(three, {.tensor = 2, .pipeline = 2}, Dtype::bf16, Dtype::bf16, 64, 4).weight_bytes,
            2 * (2 * layer + 64 * 64));  // the first stage: two layers and its copy
}

// Ranks together hold the model once, and what is replicated once more for each further rank.
TEST(Weights, OfAllRanksAreTheModelPlusReplicas) {
  const ModelSpec model = load_model("llama-3.1-70b");
  const Footprint one = footprint(model, {}, Dtype::bf16, Dtype::bf16, 8192, 256);
  const Footprint eight = footprint(model, {.tensor = 8}, Dtype::bf16, Dtype::bf16, 8192, 256);
  const std::int64_t norms = (2 * 80 + 1) * 8192 * 2;
  EXPECT_EQ(one.weight_bytes, 2 * parameter_count(model));
  EXPECT_EQ(8 * eight.weight_bytes, one.weight_bytes + 7 * norms);
}

// Four stages of 10 layers: vLLM gives 2, 3, 3, 2; the widest middle stages have neither end.
TEST(Weights, PipelineRemaindersGoToTheStagesBeforeTheLast) {
  const ModelSpec model = parse(with(tiny(), {{"num_hidden_layers", 10}, {"vocab_size", 64}}));
  const std::int64_t layer = 128 * 64 + 64 * 64 + 3 * 96 * 64 + 2 * 64;
  const Footprint f = footprint(model, {.pipeline = 4}, Dtype::bf16, Dtype::bf16, 64, 4);
  EXPECT_EQ(f.weight_bytes, 2 * 3 * layer);
  EXPECT_EQ(f.kv_regions, 6);
}

// gpt-oss-120b's checkpoint is 60.8 GiB (arXiv 2508.10925, table 1): experts in MXFP4, the rest in bf16.
TEST(Weights, KeepInSixteenBitsWhatTheCheckpointDoes) {
  const ModelSpec model = load_model("gpt-oss-120b");
  EXPECT_EQ(model.weights_dtype, Dtype::mxfp4);
  const Footprint f = footprint(model, {}, model.weights_dtype, Dtype::bf16, 8192, 256);
  EXPECT_NEAR(static_cast<double>(f.weight_bytes) / (1 << 30), 60.8, 0.01 * 60.8);
  const auto list = operators(model, {}, model.weights_dtype);
  EXPECT_EQ(find_operator(list, "qkv_proj").dtype, Dtype::bf16);
  EXPECT_EQ(find_operator(list, "router").dtype, Dtype::bf16);
  EXPECT_EQ(find_operator(list, "experts").dtype, Dtype::mxfp4);
}

// Experts over tensor x data GPUs: whole ones with expert parallelism, slices without; an equal share
// either way. Data-parallel ranks hold attention in full and bring their tokens to the experts.
TEST(Weights, ExpertsSpreadOverDataParallelRanks) {
  const ModelSpec model = load_model("qwen3-235b-a22b");
  const auto sliced = operators(model, {.tensor = 8}, Dtype::bf16);
  const auto whole = operators(model, {.tensor = 2, .data = 4, .expert = 8}, Dtype::bf16);
  const Operator& a = find_operator(sliced, "experts");
  const Operator& b = find_operator(whole, "experts");
  EXPECT_EQ(a.weights, b.weights);
  EXPECT_EQ(a.weights, 128 / 8 * 3 * 4096 * 1536);
  EXPECT_EQ(a.moe_tensor, 8);
  EXPECT_EQ(b.moe_tensor, 1);
  EXPECT_EQ(b.moe_expert, 8);
  EXPECT_EQ(b.moe_data, 4);
  EXPECT_EQ(find_operator(whole, "qkv_proj").n, (64 / 2 + 2 * 4 / 2) * 128);
  EXPECT_EQ(find_operator(whole, "moe_gather").bytes_per_token, 4 * (4096 + 128) * 2);
  EXPECT_EQ(find_operator(whole, "moe_gather").gpus, 8);
}

// vllm#10511: a profile run of Llama-3-8B with 256 sequences takes 1.26 GiB at TP 1 and at TP 2.
TEST(Weights, ActivationsAreNearAPublishedProfileRun) {
  const ModelSpec model = load_model("llama-3.1-8b");
  const auto gib = [&](std::int32_t tensor, std::int32_t sequences) {
    const Footprint f = footprint(model, {.tensor = tensor}, Dtype::bf16, Dtype::bf16, 8192, sequences);
    return static_cast<double>(f.activation_bytes) / (1 << 30);
  };
  EXPECT_NEAR(gib(1, 256), 1.26, 0.05 * 1.26);
  EXPECT_EQ(gib(2, 256), gib(1, 256));
  // With one sequence the forward pass is the peak: per token 2 x 4096 + 3 x 14336 numbers of 2 bytes.
  EXPECT_EQ(gib(1, 1) * (1 << 30), 8192.0 * 2 * (2 * 4096 + 3 * 14336));
}

// Operators --------------------------------------------------------------------------------------------

TEST(Operators, OfOneRankOfADenseModel) {
  const auto list = operators(load_model("llama-3.1-70b"), {.tensor = 4}, Dtype::fp8);
  const Operator& qkv = find_operator(list, "qkv_proj");
  EXPECT_EQ(qkv.count, 80);
  EXPECT_EQ(qkv.n, (64 + 2 * 8) / 4 * 128);
  EXPECT_EQ(qkv.k, 8192);
  EXPECT_EQ(qkv.dtype, Dtype::fp8);
  const Operator& attention = find_operator(list, "attention");
  EXPECT_EQ(attention.heads, 16);
  EXPECT_EQ(attention.kv_heads, 2);
  EXPECT_EQ(attention.head_dim, 128);
  EXPECT_EQ(attention.window, 0);
  EXPECT_EQ(find_operator(list, "gate_up_proj").n, 2 * 28672 / 4);
  EXPECT_EQ(find_operator(list, "down_proj").k, 28672 / 4);
  EXPECT_EQ(find_operator(list, "norm").count, 2 * 80 + 1);
  // One message of hidden x 2 bytes a token after attention, after the feed-forward part, and one for the
  // vocabulary-parallel embedding.
  for (const char* name : {"attention_allreduce", "mlp_allreduce"}) {
    EXPECT_EQ(find_operator(list, name).count, 80);
    EXPECT_EQ(find_operator(list, name).bytes_per_token, 8192 * 2);
    EXPECT_EQ(find_operator(list, name).gpus, 4);
  }
  EXPECT_EQ(find_operator(list, "embedding_allreduce").count, 1);
  const Operator& head = find_operator(list, "lm_head");
  EXPECT_TRUE(head.sampled_rows);
  EXPECT_EQ(head.dtype, Dtype::bf16);
  EXPECT_EQ(head.n, 128256 / 4);
}

TEST(Operators, OfOneGpuHaveNoCollectives) {
  for (const std::string& name : model_names()) {
    for (const Operator& op : operators(load_model(name), {}, Dtype::bf16)) {
      EXPECT_NE(op.kind, OpKind::allreduce) << name << " " << op.name;
    }
  }
}

// The cuts of one matrix over all ranks make the matrix: what TP does not cut is replicated as it is.
TEST(Operators, CutsAddUpForEveryShippedModel) {
  for (const std::string& name : model_names()) {
    const ModelSpec model = load_model(name);
    const auto whole = operators(model, {}, Dtype::bf16);
    for (const std::int32_t tensor : {2, 4, 8}) {
      if (model.kv_heads != 0 && model.kv_heads % tensor != 0) continue;  // KV heads are replicated
      check_parallelism(model, {.tensor = tensor}, "test");
      const auto cut = operators(model, {.tensor = tensor}, Dtype::bf16);
      for (const Operator& op : whole) {
        const Operator& part = find_operator(cut, op.name);
        EXPECT_EQ(part.count, op.count) << name << " " << op.name;
        EXPECT_TRUE(part.weights * tensor == op.weights || part.weights == op.weights)
            << name << " " << op.name << " at TP " << tensor;
      }
    }
  }
}

// DeepSeek-V3: down-projections whole on every rank, up-projections by heads (arXiv 2405.04434, section 2.1).
TEST(Operators, OfLatentAttention) {
  const auto list = operators(load_model("deepseek-v3"), {.tensor = 8}, Dtype::fp8_block);
  EXPECT_EQ(find_operator(list, "qkv_a_proj").n, 1536 + 512 + 64);
  EXPECT_EQ(find_operator(list, "q_b_proj").n, 16 * (128 + 64));
  EXPECT_EQ(find_operator(list, "o_proj").k, 16 * 128);
  const Operator& mla = find_operator(list, "mla_attention");
  EXPECT_EQ(mla.count, 61);
  EXPECT_EQ(mla.heads, 16);
  EXPECT_EQ(mla.latent, 512);
  EXPECT_EQ(mla.rope, 64);
  EXPECT_EQ(mla.weights, 16 * 512 * (128 + 128));
  EXPECT_EQ(find_operator(list, "experts").count, 58);  // the first 3 layers are dense
  EXPECT_EQ(find_operator(list, "gate_up_proj").count, 3);
}

TEST(Operators, OfSparseAttentionIndexOnlyWhereTheLayerDoes) {
  const auto list = operators(load_model("glm-5-fp8"), {.tensor = 8}, Dtype::fp8_block);
  const Operator& dsa = find_operator(list, "dsa_attention");
  EXPECT_EQ(dsa.index_topk, 2048);
  EXPECT_EQ(dsa.index_heads, 32);
  EXPECT_EQ(find_operator(list, "indexer_q_proj").n, 32 * 128);  // not cut: ranks select the same tokens
  EXPECT_EQ(find_operator(list, "indexer_weights_proj").dtype, Dtype::bf16);
}

// Parallelism ------------------------------------------------------------------------------------------

TEST(Parallel, ThatCannotWorkIsRefusedWithWhatCould) {
  const auto why = [](std::string_view name, const Parallelism& p, Dtype weights = Dtype::bf16) {
    return error_of([&] { check_parallelism(load_model(name), p, "s.json: /pools/0", weights); });
  };
  EXPECT_EQ(
      why("qwen3-32b", {.tensor = 3}),
      "s.json: /pools/0: tensor_parallel is 3: qwen3-32b has 64 attention heads, which only 1, 2, 4, 8, 16, "
      "32, 64 divide");
  EXPECT_NE(why("qwen3-32b", {.tensor = 0}).find("tensor_parallel is 0: expected a positive integer"),
            std::string::npos);
  EXPECT_NE(why("qwen3-32b", {.pipeline = 65}).find("has only 64 layers"), std::string::npos);
  EXPECT_NE(why("qwen3-32b", {.tensor = 2, .expert = 2}).find("has no experts"), std::string::npos);
  EXPECT_NE(why("mixtral-8x7b", {.tensor = 2, .expert = 4}).find("expected a divisor"), std::string::npos);
  EXPECT_NE(why("mixtral-8x7b", {.tensor = 16, .expert = 16}).find("8 experts"), std::string::npos);
  // minimax-m2: 48 heads take 3 ranks and 8 KV heads do not.
  EXPECT_NE(why("minimax-m2", {.tensor = 3}).find("8 KV heads: expected a divisor or a multiple"),
            std::string::npos);
  // vLLM refuses Qwen3-235B FP8 at TP 8: 1536 / 8 = 192 columns are no whole 128-blocks. Expert parallelism
  // is the way out.
  EXPECT_NE(why("qwen3-235b-a22b", {.tensor = 8}, Dtype::fp8_block).find("192 a rank"), std::string::npos);
  EXPECT_EQ(why("qwen3-235b-a22b", {.tensor = 8, .expert = 8}, Dtype::fp8_block), "");
  EXPECT_EQ(why("qwen3-235b-a22b", {.tensor = 8}, Dtype::bf16), "");
  EXPECT_EQ(why("llama-3.1-70b", {.tensor = 16}), "");  // KV heads replicated
}

// Reading ----------------------------------------------------------------------------------------------

TEST(Reading, HeadDimIsTheGivenOneElseHiddenOverHeads) {
  EXPECT_EQ(parse(tiny()).head_dim, 8);
  EXPECT_EQ(parse(with(tiny(), {{"head_dim", 32}})).head_dim, 32);
  EXPECT_EQ(parse(with(tiny(), {{"num_key_value_heads", nullptr}})).kv_heads, 8);
}

TEST(Reading, ExpertsGoByManyNames) {
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    const ModelSpec model = parse(with(tiny(), {{key, 8}, {"num_experts_per_tok", 2}}));
    EXPECT_EQ(model.experts, 8) << key;
    EXPECT_EQ(model.topk, 2) << key;
    EXPECT_EQ(model.moe_intermediate, 96) << key;  // of intermediate_size when it has no key of its own
    EXPECT_TRUE(model.layers[0].moe) << key;
  }
}

std::string moe_layers(const json& changes) {
  json config = with(tiny(), {{"num_hidden_layers", 6}, {"num_experts", 8}, {"num_experts_per_tok", 2}});
  std::string result;
  for (const Layer& layer : parse(with(config, changes)).layers) result += layer.moe ? 'M' : 'd';
  return result;
}

TEST(Reading, DenseLayersAmongMixtures) {
  EXPECT_EQ(moe_layers(json::object()), "MMMMMM");
  EXPECT_EQ(moe_layers({{"first_k_dense_replace", 2}}), "ddMMMM");
  EXPECT_EQ(moe_layers({{"moe_layer_freq", 3}}), "MddMdd");
  EXPECT_EQ(moe_layers({{"decoder_sparse_step", 2}}), "dMdMdM");
  EXPECT_EQ(moe_layers({{"mlp_only_layers", {1, 5}}}), "MdMMMd");
  EXPECT_EQ(moe_layers({{"mlp_layer_types", {"dense", "sparse", "sparse", "dense", "sparse", "sparse"}}}),
            "dMMdMM");
}

std::string attention_layers(const json& changes) {
  std::string result;
  for (const Layer& layer : parse(with(with(tiny(), {{"num_hidden_layers", 6}}), changes)).layers) {
    result += layer.attention == LayerAttention::full      ? 'F'
              : layer.attention == LayerAttention::sliding ? 's'
                                                           : '?';
  }
  return result;
}

TEST(Reading, SlidingLayers) {
  const json mistral = {"MistralForCausalLM"}, qwen = {"Qwen2ForCausalLM"}, oss = {"GptOssForCausalLM"};
  EXPECT_EQ(attention_layers({{"architectures", mistral}, {"sliding_window", 4096}}), "ssssss");
  EXPECT_EQ(attention_layers({{"architectures", mistral}, {"sliding_window", nullptr}}), "FFFFFF");
  // Qwen names a window and does not use it, unless it says so, and then in the layers from a given one.
  EXPECT_EQ(attention_layers({{"architectures", qwen}, {"sliding_window", 4096}, {"max_window_layers", 4}}),
            "FFFFFF");
  EXPECT_EQ(attention_layers({{"architectures", qwen},
                              {"sliding_window", 4096},
                              {"max_window_layers", 4},
                              {"use_sliding_window", true}}),
            "FFFFss");
  EXPECT_EQ(attention_layers({{"architectures", oss}, {"sliding_window", 128}}), "sFsFsF");
  EXPECT_EQ(attention_layers({{"sliding_window", 128},
                              {"layer_types",
                               {"full_attention", "sliding_attention", "full_attention", "full_attention",
                                "sliding_attention", "full_attention"}}}),
            "FsFFsF");
}

// A model of nothing but sliding layers has no other tokens to count: they count as a token each.
TEST(Reading, OnlySlidingLayersCountByTheToken) {
  const ModelSpec model =
      parse(with(tiny(), {{"architectures", {"MistralForCausalLM"}}, {"sliding_window", 32}}));
  const Footprint f = footprint(model, {}, Dtype::bf16, Dtype::bf16, 64, 4);
  EXPECT_EQ(f.kv_bytes_per_token, 2 * 2 * 4 * 8 * 2);
  EXPECT_EQ(f.window_bytes_per_sequence, 0);
  EXPECT_EQ(f.kv_regions, 4);
}

TEST(Reading, TheLanguagePartOfAMultimodalModel) {
  json text = tiny();
  text.erase("architectures");
  const ModelSpec model = parse({{"architectures", {"KimiK25ForConditionalGeneration"}},
                                 {"tie_word_embeddings", true},
                                 {"text_config", text}});
  EXPECT_EQ(model.hidden, 64);
  EXPECT_TRUE(model.tie_embeddings);  // from the root, which the language part lacks
}

TEST(Reading, QuantisationAndWhatItLeaves) {
  const auto read = [](const json& quantization) {
    return parse(with(tiny(), {{"quantization_config", quantization}}));
  };
  EXPECT_EQ(read({{"quant_method", "fp8"}}).weights_dtype, Dtype::fp8);
  EXPECT_EQ(read({{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}).weights_dtype,
            Dtype::fp8_block);
  EXPECT_EQ(read({{"quant_method", "mxfp4"}}).weights_dtype, Dtype::mxfp4);
  EXPECT_EQ(read({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}).weights_dtype, Dtype::nvfp4);
  EXPECT_EQ(read({{"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}}).int4_group, 64);
  EXPECT_EQ(read({{"quant_method", "gptq"}, {"bits", 8}}).weights_dtype, Dtype::int8);
  const ModelSpec kimi = read(
      {{"quant_method", "compressed-tensors"},
       {"config_groups",
        {{"group_0",
          {{"weights", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}}}}}}},
       {"ignore",
        {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
         "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"}}});
  EXPECT_EQ(kimi.weights_dtype, Dtype::int4);
  EXPECT_EQ(kimi.int4_group, 32);
  EXPECT_FALSE(kimi.quantized_attention);
  EXPECT_FALSE(kimi.quantized_mlp);
  EXPECT_FALSE(kimi.quantized_shared);
  // Norms and gates in the list say nothing of the part that they belong to.
  const ModelSpec glm = read(
      {{"quant_method", "fp8"},
       {"modules_to_not_convert", {"model.layers.0.self_attn.kv_a_layernorm", "model.layers.3.mlp.gate"}}});
  EXPECT_TRUE(glm.quantized_attention);
  EXPECT_TRUE(glm.quantized_mlp);
}

// Nemotron: layers without attention, feed-forward widths by multiples, rounded up to 256.
TEST(Reading, SearchedLayers) {
  const json attention = {{"n_heads_in_group", 4}}, none = {{"no_op", true}};
  const auto block = [](const json& a, const json& ffn) { return json{{"attention", a}, {"ffn", ffn}}; };
  json config = with(tiny(), {{"architectures", {"DeciLMForCausalLM"}}, {"hidden_size", 8192}});
  config.erase("intermediate_size");
  config["num_attention_heads"] = 64;
  config["block_configs"] = {block(attention, {{"ffn_mult", 5.25}}), block(none, {{"ffn_mult", 0.5}})};
  const ModelSpec model = parse(config);
  EXPECT_EQ(model.kv_heads, 16);
  EXPECT_EQ(model.layers[0].intermediate, 28672);
  EXPECT_EQ(model.layers[1].attention, LayerAttention::none);
  EXPECT_EQ(model.layers[1].intermediate, 2816);  // 2730 rounded up
  const auto list = operators(model, {}, Dtype::bf16);
  EXPECT_EQ(find_operator(list, "attention").count, 1);
  EXPECT_EQ(find_operator(list, "norm").count, 4);

  config["block_configs"][1]["attention"]["replace_with_linear"] = true;
  EXPECT_NE(error_of([&] { parse(config); }).find("/block_configs/1/attention/replace_with_linear"),
            std::string::npos);
}

// Each mistake is reported where it stands, with what was expected.
TEST(Reading, WhatIsNotUnderstoodNamesItsField) {
  struct Case {
    json changes;
    const char* expected;
  };
  const Case cases[] = {
      {{{"architectures", {"Qwen3ForCausaLM"}}},
       "tiny.json: /architectures: 'Qwen3ForCausaLM' is not an "
       "architecture that pdsim knows (did you mean 'Qwen3ForCausalLM'?)"},
      {{{"architectures", nullptr}, {"model_type", "lama"}}, "/model_type: 'lama' is not a model type"},
      {{{"architectures", nullptr}, {"model_type", nullptr}}, "/architectures: neither it nor model_type"},
      {{{"hidden_size", nullptr}}, "/hidden_size: is absent: expected a positive integer"},
      {{{"hidden_size", "64"}}, "/hidden_size: is \"64\": expected a positive integer"},
      {{{"hidden_size", 0}}, "/hidden_size: is 0: expected a positive integer"},
      {{{"hidden_size", 64.5}}, "/hidden_size: is 64.5: expected a positive integer"},
      {{{"vocab_size", 1e12}}, "/vocab_size: is 1000000000000.0: expected at most 2147483647"},
      {{{"num_attention_heads", 7}, {"num_key_value_heads", 7}},
       "/head_dim: is absent: expected one, since 7"},
      {{{"num_key_value_heads", 3}},
       "/num_key_value_heads: is 3: expected a divisor of the 8 attention heads"},
      {{{"intermediate_size", nullptr}}, "/intermediate_size: is absent"},
      {{{"num_experts", 8}}, "/num_experts_per_tok: is absent"},
      {{{"num_experts", 8}, {"num_experts_per_tok", 9}},
       "/num_experts_per_tok: is 9: expected at most the 8"},
      {{{"num_experts", 8}, {"num_experts_per_tok", 2}, {"mlp_only_layers", {7}}},
       "/mlp_only_layers: is [7]"},
      {{{"layer_types", {"full_attention"}}}, "/layer_types: has 1 entries: expected one for each of the 2"},
      {{{"layer_types", {"full_attention", "chunked_attention"}}},
       "/layer_types/1: is \"chunked_attention\": expected full"},
      {{{"layer_types", {"full_attention", "sliding_attention"}}}, "/sliding_window: is absent"},
      {{{"layer_types", {"full_attention", "linear_attention"}}}, "/linear_num_key_heads: is absent"},
      {{{"kv_lora_rank", 512}}, "/qk_rope_head_dim: is absent"},
      {{{"torch_dtype", "bf17"}}, "/torch_dtype: 'bf17' is no number format"},
      {{{"tie_word_embeddings", 1}}, "/tie_word_embeddings: is 1: expected true or false"},
      {{{"quantization_config", {{"quant_method", "hqq"}}}}, "/quantization_config/quant_method: is \"hqq\""},
      {{{"quantization_config", {{"quant_algo", "W4A8_AWQ"}}}}, "/quantization_config/quant_algo: is"},
      {{{"quantization_config", {{"quant_method", "awq"}, {"bits", 3}}}}, "/quantization_config/bits: is 3"},
      {{{"text_config", {{"hidden_size", -1}}}}, "/text_config/hidden_size: is -1"},
  };
  for (const Case& each : cases) {
    const std::string message = error_of([&] { parse(with(tiny(), each.changes)); });
    EXPECT_NE(message.find(each.expected), std::string::npos)
        << "got: " << message << "\nwant: " << each.expected;
  }
  EXPECT_NE(error_of([] { parse(json::array()); }).find("tiny.json: expected an object, not array"),
            std::string::npos);
}

TEST(Loading, ByNameByHuggingFaceIdAndByPath) {
  EXPECT_EQ(load_model("qwen3-32b").name, "qwen3-32b");
  EXPECT_EQ(load_model("qwen/QWEN3-32b").name, "qwen3-32b");
  EXPECT_EQ(load_model("meta-llama/Meta-Llama-3.1-8B").name, "llama-3.1-8b");
  const fs::path shapes = fs::path(PDSIM_SOURCE_DIR) / "models" / "shapes";
  EXPECT_EQ(load_model((shapes / "glm-5.json").string()).name, "glm-5");
  EXPECT_NE(error_of([] {
              load_model("qwen3-23b", "s.json: /model");
            }).find("s.json: /model: 'qwen3-23b' is neither a shipped model (did you mean 'qwen3-32b'?)"),
            std::string::npos);
}

// The shipped descriptions and the configs published with the models make the same model.
TEST(Loading, ShippedDescriptionsMatchThePublishedConfigs) {
  if (!fs::exists(kShared)) GTEST_SKIP() << "no " << kShared;
  const std::pair<const char*, const char*> pairs[] = {{"llama-3.1-8b", "Meta-Llama-3.1-8B"},
                                                       {"llama-3.1-70b", "Meta-Llama-3.1-70B"},
                                                       {"qwen3-8b", "Qwen3-8B"},
                                                       {"qwen3-32b", "Qwen3-32B"},
                                                       {"mixtral-8x7b", "Mixtral-8x7B-v0.1"},
                                                       {"qwen3-235b-a22b", "Qwen3-235B-A22B"},
                                                       {"gpt-oss-120b", "gpt-oss-120b"},
                                                       {"gpt-oss-20b", "gpt-oss-20b"},
                                                       {"deepseek-v3", "DeepSeek-V3"},
                                                       {"kimi-k2", "Kimi-K2-Instruct"},
                                                       {"glm-5", "GLM-5"},
                                                       {"glm-5-fp8", "GLM-5-FP8"},
                                                       {"llama-3.3-70b", "Llama-3.3-70B-Instruct"}};
  for (const auto& [shipped, published] : pairs) {
    const ModelSpec a = load_model(shipped);
    const ModelSpec b = load_model((kShared / (std::string(published) + ".json")).string());
    EXPECT_EQ(a.layers, b.layers) << shipped;
    EXPECT_EQ(parameter_count(a), parameter_count(b)) << shipped;
    EXPECT_EQ(a.weights_dtype, b.weights_dtype) << shipped;
    EXPECT_EQ(a.max_position, b.max_position) << shipped;
    EXPECT_EQ(a.mtp_layers, b.mtp_layers) << shipped;
    EXPECT_EQ(operators(a, {.tensor = 4}, a.weights_dtype), operators(b, {.tensor = 4}, b.weights_dtype))
        << shipped;
  }
}

// Billions of parameters by the names of the files, 2 % for names that round (GLM: model cards).
TEST(Loading, EveryPublishedConfigImportsNearItsName) {
  if (!fs::exists(kShared)) GTEST_SKIP() << "no " << kShared;
  const std::pair<const char*, double> billions[] = {
      {"DeepSeek", 671}, {"GLM-4.7", 355}, {"GLM-5", 744},       {"Kimi", 1030},      {"405B", 405},
      {"70b", 70},       {"70B", 70},      {"7b", 6.74},         {"3.1-8B", 8.03},    {"Super-49B", 49.9},
      {"MiniMax", 230},  {"8x7B", 46.7},   {"235B", 235},        {"Qwen3-32B", 32.8}, {"Qwen3-8B", 8.2},
      {"397B", 397},     {"120b", 117},    {"gpt-oss-20b", 20.9}};
  int configs = 0;
  for (const auto& entry : fs::directory_iterator(kShared)) {
    if (entry.path().extension() != ".json") continue;
    ++configs;
    const ModelSpec model = load_model(entry.path().string());
    const auto row = std::find_if(std::begin(billions), std::end(billions), [&](const auto& each) {
      return model.name.find(each.first) != std::string::npos;
    });
    ASSERT_NE(row, std::end(billions)) << model.name;
    EXPECT_NEAR(static_cast<double>(parameter_count(model)) / 1e9, row->second, 0.02 * row->second)
        << model.name;
    EXPECT_GT(footprint(model, {.tensor = 2}, model.weights_dtype, Dtype::bf16, 8192, 256).weight_bytes, 0);
  }
  EXPECT_GE(configs, 31);
}

}  // namespace
}  // namespace pdsim
