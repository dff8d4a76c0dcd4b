// What an LLM is made of, as far as serving it costs: shapes, parameters, the operators that a step
// runs on one GPU, and what the model holds in that GPU's memory.
//
// A ModelSpec is read from a Hugging Face config.json. The rule of the reader: what it does not
// understand is an error that names the field, never a guess. A layer list makes every architecture
// one case: dense, mixture of experts, sliding-window, linear-attention, latent (MLA) and sparse (DSA)
// layers may follow one another in any order.
//
// Invariants: every size is positive or means "the model has none of it" (0); layers is not empty.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "models/dtype.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

/// How a layer looks back. mla: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); dsa: MLA
/// over the top-k tokens that an indexer selects (DeepSeek-V3.2); linear: gated delta rule with a
/// convolution (arXiv 2412.06464), a state instead of tokens; none: the layer has no attention at all.
enum class LayerAttention : std::uint8_t { none, full, sliding, linear, mla, dsa };

struct Layer {
  LayerAttention attention = LayerAttention::full;
  bool indexer = false;           ///< dsa: selects its own tokens; false = reuses an earlier layer's choice
  bool moe = false;               ///< its feed-forward part is a mixture of experts
  std::int64_t intermediate = 0;  ///< width of the dense feed-forward part; 0 = it has none
  std::int32_t joins = 0;         ///< a drafter's: vectors of hidden size that a projection makes one of

  bool operator==(const Layer&) const = default;
};

struct ModelSpec {
  std::string name;          ///< the shipped name, or the file's
  std::string architecture;  ///< "Qwen3ForCausalLM"
  std::string model_type;    ///< "qwen3"

  std::vector<Layer> layers;
  std::int64_t hidden = 0;
  std::int64_t vocab = 0;
  std::int32_t max_position = 0;
  bool tie_embeddings = false;

  // Attention with per-head keys and values (full, sliding).
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0;
  std::int32_t window = 0;     ///< tokens that a sliding layer sees
  bool qk_norm = false;        ///< RMS norms on queries and keys, per head
  bool qk_norm_whole = false;  ///< ... over all heads together, whose sum of squares ranks must share
  bool output_gate = false;    ///< q_proj also makes a gate as wide as the queries (Qwen3-Next)

  // Latent attention (mla, dsa). One token's KV is latent + rope wide, whatever the heads.
  std::int32_t q_lora = 0;  ///< rank of the query down-projection; 0 = queries come straight from hidden
  std::int32_t latent = 0, rope = 0, nope = 0, v_head_dim = 0;
  std::int32_t index_heads = 0, index_head_dim = 0, index_topk = 0;

  // Linear attention.
  std::int32_t linear_key_heads = 0, linear_value_heads = 0;
  std::int32_t linear_key_dim = 0, linear_value_dim = 0;  ///< of one head
  std::int32_t linear_conv = 0;                           ///< kernel length
  Dtype linear_state_dtype = Dtype::bf16;

  // Mixture of experts.
  std::int32_t experts = 0, topk = 0;
  bool fp32_router = false;              ///< its weights and product are in 32 bits
  std::int64_t moe_intermediate = 0;     ///< width of one routed expert
  std::int64_t shared_intermediate = 0;  ///< width of all shared experts together
  bool shared_gate = false;              ///< a sigmoid gate on the shared expert (Qwen)

  std::int32_t mtp_layers = 0;  ///< extra multi-token-prediction layers: not in `layers`, not loaded

  Dtype dtype = Dtype::bf16;          ///< of activations and of what is never quantised: bf16 or fp16
  Dtype weights_dtype = Dtype::bf16;  ///< as published
  std::int32_t int4_group = kInt4Group;
  bool quantized_attention = true;  ///< false: the published quantisation leaves these in `dtype`
  bool quantized_mlp = true;
  bool quantized_shared = true;
};

/// Reads a config.json. `place` is its file name. Unknown architectures, missing fields and values that
/// make no sense are InputErrors at "place: /pointer".
ModelSpec parse_model(const nlohmann::json& config, std::string_view place);

/// A name in models/shapes ("qwen3-32b"), the path of a config.json (or of its folder), or a Hugging
/// Face id that a shipped description lists ("Qwen/Qwen3-32B", case-insensitive). Nothing is
/// downloaded. `place` is where the name was given.
ModelSpec load_model(std::string_view name_or_path_or_hf_id, std::string_view place = "model");

/// The shipped names, sorted.
std::vector<std::string> model_names();

/// Degrees of parallelism of one replica. Attention and dense layers are cut `tensor` ways and
/// replicated `data` times; experts spread over tensor x data GPUs, `expert` of it by whole experts and
/// the rest by cutting each (vLLM knows expert = 1 and expert = tensor x data). Pipeline stages cut the
/// layers. GPUs of a replica: tensor x pipeline x data.
struct Parallelism {
  std::int32_t tensor = 1, pipeline = 1, data = 1, expert = 1;

  std::int32_t gpus() const { return tensor * pipeline * data; }
  std::int32_t moe_tensor() const { return tensor * data / expert; }
};

/// InputError at `place` unless the model can be cut so: tensor divides the heads (and divides, or is a
/// multiple of, the KV heads, which are then replicated) and the feed-forward width; the experts divide;
/// each pipeline stage has a layer; block-quantised widths stay whole 128-element blocks.
void check_parallelism(const ModelSpec& model, const Parallelism& parallelism, std::string_view place,
                       Dtype weights = Dtype::bf16);

enum class OpKind : std::uint8_t {
  gemm,
  attention,
  mla_attention,
  dsa_attention,
  linear_attention,
  moe,
  allreduce,
  allgather,
  reducescatter,
  elementwise
};

/// One operator of one tensor-parallel rank, as every step runs it.
struct Operator {
  OpKind kind = OpKind::gemm;
  std::string name;           ///< "qkv_proj"
  std::int32_t count = 1;     ///< how often a step runs it: mostly the layers that have it
  Dtype dtype = Dtype::bf16;  ///< of its weights; of its elements where it has none
  std::int64_t weights = 0;   ///< elements of weight that one run of it holds on this rank
  bool sampled_rows = false;  ///< gemm, collectives: a row a sampled request (LM head), not a token

  /// gemm: [m, k] x [k, n], quantisation of its input included.
  std::int64_t n = 0, k = 0;
  /// attention: per rank; window 0 = full. linear_attention: heads are value heads, kv_heads key heads.
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0, window = 0;
  /// mla, dsa: head_dim is the part without position, rope the part with. The products with the latent's
  /// up-projection kv_b ([latent] to [head_dim + v_head_dim] a head) belong to the operator; every
  /// other projection is a gemm of its own. index_heads 0: reuses an earlier layer's tokens.
  std::int32_t latent = 0, rope = 0, index_topk = 0, index_heads = 0, index_head_dim = 0;
  /// moe: `intermediate` is one expert's whole width, which moe_tensor cuts; moe_expert cuts the experts.
  /// It meets the tokens of moe_data ranks: the step's own times moe_data.
  std::int64_t hidden = 0, intermediate = 0;
  std::int32_t experts = 0, topk = 0, moe_tensor = 1, moe_expert = 1, moe_data = 1;
  /// allreduce, allgather, reducescatter: over `gpus`, bytes a row of the message, of what all have together
  /// where parts are gathered or scattered. elementwise: HBM bytes a token, read and written.
  std::int32_t gpus = 1;
  std::int64_t bytes_per_token = 0;

  bool operator==(const Operator&) const = default;
};

/// The operators of a whole forward pass on one tensor-parallel rank; equal ones are one entry with a
/// count. Pipeline stages are not cut: the sum is the time of one batch through all of them.
/// `weights` is the format of the quantisable matrices; what a checkpoint keeps in 16 bits stays so.
/// Requires check_parallelism.
std::vector<Operator> operators(const ModelSpec& model, const Parallelism& parallelism, Dtype weights);

/// Memory of one GPU of a replica: of the pipeline stage that needs most of each quantity.
struct Footprint {
  /// Embeddings and LM head cut by vocabulary (padded to 64); norms, routers, MLA down-projections and
  /// indexers on every rank. MLA's absorbed copies of kv_b in 16 bits where the weights are quantised.
  Bytes weight_bytes = 0;
  /// Full, MLA and DSA layers; 0 if a model had none of them. MLA's latent is on every rank; DSA layers
  /// with an indexer hold its keys too.
  double kv_bytes_per_token = 0;
  /// Sliding layers hold `window` tokens at most. In a model of nothing but sliding layers they count
  /// in kv_bytes_per_token instead.
  Bytes window_bytes_per_sequence = 0;
  Bytes state_bytes_per_sequence = 0;  ///< linear layers: recurrent and convolution state
  Bytes activation_bytes = 0;          ///< peak of a step: see activation_bytes() in operators.cpp
  /// Registered KV regions whose blocks a transfer names, on one rank: K and V of a layer, the latent of
  /// an MLA layer, the keys of an indexer. Sliding layers' are counted apart.
  std::int32_t kv_regions = 0;
  std::int32_t window_regions = 0;
  double region_bytes_per_token = 0;  ///< mean over kv_regions: kv_bytes_per_token / kv_regions
};

/// Layouts are vLLM's. `kv` is the cache's format (bf16, fp16 or fp8). Without `ends`, embeddings and LM head
/// are not the model's own. Requires check_parallelism. O(layers).
Footprint footprint(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv,
                    std::int32_t max_num_batched_tokens, std::int32_t max_num_seqs, bool ends = true);

/// All weights, norms included, biases and multi-token-prediction layers not.
std::int64_t parameter_count(const ModelSpec& model);
/// Those that one token meets: the chosen experts only, and not the embedding table (a lookup).
std::int64_t active_parameter_count(const ModelSpec& model);
/// 2 per weight of every matrix that one token multiplies: without attention to earlier tokens.
double flops_per_token(const ModelSpec& model);

}  // namespace pdsim
