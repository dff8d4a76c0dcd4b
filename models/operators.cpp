// A model cut over GPUs: the operators of one rank, and from the same list its weights, so that time
// and memory cannot disagree. The cuts are vLLM's (model_executor/models): heads and feed-forward widths
// by tensor parallelism, vocabulary of embeddings and LM head likewise, everything else replicated.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/model.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr std::int64_t kVocabPadding = 64;  // vLLM's DEFAULT_VOCAB_PADDING_SIZE
constexpr std::int64_t kScaleBlock = 128;   // side of an fp8_block scale
constexpr std::int64_t kIndexerScale = 4;   // bytes: one fp32 scale a token beside an indexer's fp8 key

bool is_16_or_32_bit(Dtype dtype) {
  return dtype == Dtype::bf16 || dtype == Dtype::fp16 || dtype == Dtype::fp32;
}

std::int64_t padded_vocab(const ModelSpec& model) {
  return (model.vocab + kVocabPadding - 1) / kVocabPadding * kVocabPadding;
}

/// KV heads of one rank: never fewer than one, so that more ranks than heads hold copies.
std::int32_t kv_heads_per_rank(const ModelSpec& model, std::int32_t tensor) {
  return std::max(model.kv_heads / tensor, 1);
}

/// Collects operators; equal ones become one with a count.
class Rank {
 public:
  Rank(const ModelSpec& model, const Parallelism& parallelism, Dtype weights)
      : model_(model),
        parallelism_(parallelism),
        tensor_(parallelism.tensor),
        weights_(weights),
        base_(is_16_or_32_bit(weights) ? weights : model.dtype) {}

  void embedding() {
    Operator& op = elementwise("embedding", 2 * model_.hidden);
    op.weights = padded_vocab(model_) / tensor_ * model_.hidden;
    done();
    allreduce("embedding_allreduce", tensor_, 1);
  }

  void layer(const Layer& layer) {
    if (layer.joins > 0) {  // each normed, then projected together
      for (std::int32_t i = 0; i < layer.joins; ++i) norm();
      add_gemm("join_proj", model_.hidden, layer.joins * model_.hidden, quantized(model_.quantized_mlp));
    }
    if (layer.attention != LayerAttention::none) {
      norm();
      switch (layer.attention) {
        case LayerAttention::mla:
        case LayerAttention::dsa:
          latent_attention(layer);
          break;
        case LayerAttention::linear:
          linear_attention();
          break;
        default:
          head_attention(layer.attention == LayerAttention::sliding);
      }
      allreduce("attention_allreduce", tensor_, 1);
    }
    if (layer.moe) {
      norm();
      mixture();
    } else if (layer.intermediate != 0) {
      norm();
      feed_forward("", layer.intermediate, quantized(model_.quantized_mlp));
      allreduce("mlp_allreduce", tensor_, 1);
    }
  }

  void head() {
    norm();
    Operator& op = gemm("lm_head", padded_vocab(model_) / tensor_, model_.hidden, base_);
    op.sampled_rows = true;
    done();
    if (tensor_ > 1) {
      // Gathering S bytes in all moves what an all-reduce of S / 2 does.
      Operator& gather = start(OpKind::allreduce, "logits_gather", base_);
      gather.sampled_rows = true;
      gather.gpus = tensor_;
      gather.bytes_per_token = padded_vocab(model_) * bytes() / 2;
      done();
    }
  }

  std::vector<Operator> take() { return std::move(operators_); }

 private:
  Dtype quantized(bool part) const { return part ? weights_ : base_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_per_element(base_)); }

  Operator& start(OpKind kind, std::string_view name, Dtype dtype) {
    current_ = Operator{};
    current_.kind = kind;
    current_.name = name;
    current_.dtype = dtype;
    return current_;
  }

  void done() {
    for (Operator& each : operators_) {
      current_.count = each.count;
      if (each == current_) {
        ++each.count;
        return;
      }
    }
    current_.count = 1;
    operators_.push_back(current_);
  }

  Operator& gemm(std::string_view name, std::int64_t n, std::int64_t k, Dtype dtype) {
    Operator& op = start(OpKind::gemm, name, dtype);
    op.n = n;
    op.k = k;
    op.weights = n * k;
    return op;
  }

  /// Reads and writes so many elements a token.
  Operator& elementwise(std::string_view name, std::int64_t elements) {
    Operator& op = start(OpKind::elementwise, name, base_);
    op.bytes_per_token = elements * bytes();
    return op;
  }

  void add_gemm(std::string_view name, std::int64_t n, std::int64_t k, Dtype dtype) {
    gemm(name, n, k, dtype);
    done();
  }

  void add_elementwise(std::string_view name, std::int64_t elements) {
    elementwise(name, elements);
    done();
  }

  /// RMS norm with the residual added: both are read, both are written.
  void norm() {
    elementwise("norm", 4 * model_.hidden).weights = model_.hidden;
    done();
  }

  void allreduce(std::string_view name, std::int32_t gpus, std::int64_t ranks) {
    if (gpus == 1) return;
    Operator& op = start(OpKind::allreduce, name, base_);
    op.gpus = gpus;
    op.bytes_per_token = ranks * model_.hidden * bytes();
    done();
  }

  void head_attention(bool sliding) {
    const Dtype dtype = quantized(model_.quantized_attention);
    const std::int32_t heads = model_.heads / tensor_;
    const std::int32_t kv_heads = kv_heads_per_rank(model_, tensor_);
    const std::int64_t q = std::int64_t{heads} * model_.head_dim;
    const std::int64_t kv = std::int64_t{kv_heads} * model_.head_dim;
    add_gemm("qkv_proj", (model_.output_gate ? 2 * q : q) + 2 * kv, model_.hidden, dtype);
    if (model_.qk_norm) {
      elementwise("qk_norm", 2 * (q + kv)).weights =
          model_.qk_norm_whole ? q + kv : std::int64_t{2} * model_.head_dim;
      done();
      if (model_.qk_norm_whole && tensor_ > 1) {
        // Two sums of squares in 32 bits, before the norm can be applied by another kernel.
        Operator& squares = start(OpKind::allreduce, "qk_norm_allreduce", base_);
        squares.gpus = tensor_;
        squares.bytes_per_token = 8;
        done();
        add_elementwise("qk_squares", q + kv);
      }
    }
    add_elementwise("rope", 2 * (q + kv));
    add_elementwise("cache_write", 2 * kv);
    Operator& op = start(OpKind::attention, sliding ? "window_attention" : "attention", base_);
    op.heads = heads;
    op.kv_heads = kv_heads;
    op.head_dim = op.v_head_dim = model_.head_dim;
    op.window = sliding ? model_.window : 0;
    done();
    if (model_.output_gate) add_elementwise("output_gate", 3 * q);
    add_gemm("o_proj", model_.hidden, q, dtype);
  }

  void latent_attention(const Layer& layer) {
    const Dtype dtype = quantized(model_.quantized_attention);
    const std::int64_t heads = model_.heads / tensor_;
    const std::int64_t q = heads * (model_.nope + model_.rope);
    const std::int64_t kv = model_.latent + model_.rope;
    if (model_.q_lora != 0) {
      add_gemm("qkv_a_proj", model_.q_lora + kv, model_.hidden, dtype);
      elementwise("qkv_a_norm", std::int64_t{2} * (model_.q_lora + model_.latent)).weights =
          model_.q_lora + model_.latent;
      done();
      add_gemm("q_b_proj", q, model_.q_lora, dtype);
    } else {
      add_gemm("q_proj", q, model_.hidden, dtype);
      add_gemm("kv_a_proj", kv, model_.hidden, dtype);
      elementwise("kv_a_norm", std::int64_t{2} * model_.latent).weights = model_.latent;
      done();
    }
    add_elementwise("rope_and_cache", 2 * (heads + 1) * model_.rope + 2 * kv);
    const bool sparse = layer.attention == LayerAttention::dsa;
    if (layer.indexer) {  // replicated: every rank selects the same tokens
      const std::int64_t index_q = std::int64_t{model_.index_heads} * model_.index_head_dim;
      add_gemm("indexer_q_proj", index_q, model_.q_lora != 0 ? model_.q_lora : model_.hidden, dtype);
      add_gemm("indexer_k_proj", model_.index_head_dim, model_.hidden, dtype);
      add_gemm("indexer_weights_proj", model_.index_heads, model_.hidden, base_);
    }
    Operator& op = start(sparse ? OpKind::dsa_attention : OpKind::mla_attention,
                         sparse ? "dsa_attention" : "mla_attention", dtype);
    op.weights = heads * model_.latent * (model_.nope + model_.v_head_dim);
    op.heads = static_cast<std::int32_t>(heads);
    op.kv_heads = 1;
    op.head_dim = model_.nope;
    op.v_head_dim = model_.v_head_dim;
    op.latent = model_.latent;
    op.rope = model_.rope;
    op.index_topk = model_.index_topk;
    op.index_heads = layer.indexer ? model_.index_heads : 0;
    op.index_head_dim = model_.index_head_dim;
    done();
    add_gemm("o_proj", model_.hidden, heads * model_.v_head_dim, dtype);
  }

  void linear_attention() {
    const Dtype dtype = quantized(model_.quantized_attention);
    const std::int64_t keys = std::int64_t{model_.linear_key_heads} / tensor_ * model_.linear_key_dim;
    const std::int64_t heads = model_.linear_value_heads / tensor_;
    const std::int64_t values = heads * model_.linear_value_dim;
    add_gemm("linear_qkvz_proj", 2 * keys + 2 * values, model_.hidden, dtype);
    add_gemm("linear_ba_proj", 2 * heads, model_.hidden, base_);
    Operator& op = start(OpKind::linear_attention, "linear_attention", base_);
    op.weights = (2 * keys + values) * model_.linear_conv + 2 * heads;  // convolution, decay and step bias
    op.heads = static_cast<std::int32_t>(heads);
    op.kv_heads = model_.linear_key_heads / tensor_;
    op.head_dim = model_.linear_key_dim;
    op.v_head_dim = model_.linear_value_dim;
    done();
    elementwise("linear_norm", 3 * values).weights = model_.linear_value_dim;
    done();
    add_gemm("linear_out_proj", model_.hidden, values, dtype);
  }

  void feed_forward(std::string_view prefix, std::int64_t width, Dtype dtype) {
    const std::int64_t cut = width / tensor_;
    add_gemm(fmt::format("{}gate_up_proj", prefix), 2 * cut, model_.hidden, dtype);
    add_elementwise(fmt::format("{}activation", prefix), 3 * cut);
    add_gemm(fmt::format("{}down_proj", prefix), model_.hidden, cut, dtype);
  }

  void mixture() {
    if (model_.fp32_router) add_elementwise("router_input", 3 * model_.hidden);  // 16 bits in, 32 out
    add_gemm("router", model_.experts, model_.hidden, model_.fp32_router ? Dtype::fp32 : base_);
    add_elementwise("topk", model_.experts + 2 * std::int64_t{model_.topk});
    if (model_.shared_intermediate != 0) {
      feed_forward("shared_", model_.shared_intermediate, quantized(model_.quantized_shared));
      if (model_.shared_gate) add_gemm("shared_gate", 1, model_.hidden, base_);
      add_elementwise("shared_add", 3 * model_.hidden);
    }
    Operator& op = start(OpKind::moe, "experts", quantized(true));
    op.hidden = model_.hidden;
    op.intermediate = model_.moe_intermediate;
    op.experts = model_.experts;
    op.topk = model_.topk;
    op.moe_tensor = parallelism_.moe_tensor();
    op.moe_expert = parallelism_.expert;
    op.moe_data = parallelism_.data;
    op.weights = op.experts / op.moe_expert * (3 * op.hidden * (op.intermediate / op.moe_tensor));
    done();
    exchange();
  }

  /// How tokens meet experts beyond their rank's (vLLM's default, allgather_reducescatter). Tensor-parallel
  /// ranks have the same tokens and reduce. Data-parallel ranks gather all tokens and what the router says
  /// of them, and scatter the sums; with experts spread over tensor-parallel ranks as well, each of these
  /// brings its share of the tokens (use_sequence_parallel_moe) and they gather the results.
  void exchange() {
    const std::int32_t data = parallelism_.data;
    if (data == 1) return allreduce("moe_allreduce", tensor_, 1);
    const bool spread = parallelism_.expert > 1;
    const std::int32_t ranks = spread ? tensor_ * data : data;
    const std::int64_t router = model_.experts * (model_.fp32_router ? 4 : bytes());
    const auto collective = [&](OpKind kind, std::string_view name, std::int32_t gpus, std::int64_t row) {
      Operator& op = start(kind, name, base_);
      op.gpus = gpus;
      op.bytes_per_token = row;
      done();
    };
    // Both in one launch (AgRsAll2AllManager groups them).
    collective(OpKind::allgather, "moe_gather", ranks, data * (model_.hidden * bytes() + router));
    collective(OpKind::reducescatter, "moe_scatter", ranks, data * model_.hidden * bytes());
    if (tensor_ == 1) return;
    if (spread) {
      collective(OpKind::allgather, "moe_result_gather", tensor_, model_.hidden * bytes());
    } else {
      allreduce("moe_allreduce", tensor_, 1);
    }
  }

  const ModelSpec& model_;
  Parallelism parallelism_;
  std::int32_t tensor_;
  Dtype weights_;  // of what is quantised
  Dtype base_;     // of what never is, and of activations
  Operator current_;
  std::vector<Operator> operators_;
};

/// Layers [first, last) of each pipeline stage: vLLM's get_pp_indices. What is left over goes to the
/// stages before the last, one each, from the back: the last one has the LM head.
std::vector<std::pair<std::size_t, std::size_t>> pipeline_stages(std::size_t layers, std::int32_t pipeline) {
  const auto stages = static_cast<std::size_t>(pipeline);
  std::vector<std::size_t> sizes(stages, layers / stages);
  for (std::size_t i = 0; i < layers % stages; ++i) ++sizes[stages - 2 - i];
  std::vector<std::pair<std::size_t, std::size_t>> result;
  std::size_t first = 0;
  for (const std::size_t size : sizes) {
    result.emplace_back(first, first + size);
    first += size;
  }
  return result;
}

double weight_bytes(const std::vector<Operator>& operators, std::int32_t int4_group) {
  double sum = 0;
  for (const Operator& op : operators) {
    sum += static_cast<double>(op.count * op.weights) * bytes_per_element(op.dtype, int4_group);
    // vLLM multiplies by the latent's up-projection in 16 bits and keeps such a copy of a quantised one.
    const bool latent = op.kind == OpKind::mla_attention || op.kind == OpKind::dsa_attention;
    if (latent && !is_16_or_32_bit(op.dtype)) sum += static_cast<double>(op.count * op.weights) * 2;
  }
  return sum;
}

/// Bytes of one token's latent in one layer. Sparse layers with an 8-bit cache have vLLM's fp8_ds_mla
/// layout: fp8 latent, an fp32 scale every 128 elements, the positional part in 16 bits.
double latent_bytes(const ModelSpec& model, Dtype kv, bool sparse) {
  const double element = bytes_per_element(kv);
  const std::int32_t scale_bytes = model.latent / 128 * 4;
  if (sparse && element < 2) return model.latent + scale_bytes + model.rope * 2;
  return (model.latent + model.rope) * element;
}

/// Peak memory of a step beside weights and KV, as vLLM's profile run sees it: the larger of
///   the forward pass: for each of max_num_batched_tokens, the residual, the layer's input and the widest
///     set of tensors alive at once (feed-forward: gate, up and their product; experts: topk rows of the
///     same, their workspace reused for the output; attention: queries, keys, values and output);
///   the sampler: kSamplerBytes for each logit of max_num_seqs rows, beside the last hidden states.
double activation_bytes(const ModelSpec& model, const Parallelism& parallelism, std::int32_t tokens,
                        std::int32_t sequences) {
  // Logits in 16 and 32 bits, the sort for top-k and top-p with indices and double buffers, probabilities,
  // cumulative sums. From vLLM#10511: 1.26 GiB for 256 sequences of Llama-3-8B, the same at TP 1 and 2,
  // where the forward pass takes less; consistent with Qwen3-235B at 1024 sequences in vLLM#21348.
  constexpr double kSamplerBytes = 40;
  const double element = bytes_per_element(model.dtype);
  const double tensor = parallelism.tensor;
  double widest = 0;
  for (const Layer& layer : model.layers) {
    switch (layer.attention) {
      case LayerAttention::none:
        break;
      case LayerAttention::mla:
      case LayerAttention::dsa:
        widest = std::max(widest, model.heads / tensor * 2 * (model.nope + model.rope + model.v_head_dim));
        break;
      case LayerAttention::linear:
        widest = std::max(widest, (2.0 * model.linear_key_heads * model.linear_key_dim +
                                   3.0 * model.linear_value_heads * model.linear_value_dim) /
                                      tensor);
        break;
      default:
        widest = std::max(widest,
                          (2.0 * model.heads / tensor + 2.0 * kv_heads_per_rank(model, parallelism.tensor)) *
                              model.head_dim);
    }
    if (layer.moe) {
      const double width = static_cast<double>(model.moe_intermediate) / parallelism.moe_tensor();
      const auto hidden = static_cast<double>(model.hidden);
      widest = std::max(widest, parallelism.data * model.topk * (std::max(2 * width, hidden) + width) +
                                    (model.shared_intermediate != 0 ? hidden : 0));
    }
    widest = std::max(widest, 3.0 * static_cast<double>(layer.intermediate) / tensor);
  }
  const double hidden_states = static_cast<double>(model.hidden) * element * tokens;
  const double rows = std::min(tokens, sequences);
  return std::max(2 * hidden_states + widest * element * tokens,
                  hidden_states + rows * static_cast<double>(model.vocab) * kSamplerBytes);
}

}  // namespace

void check_parallelism(const ModelSpec& model, const Parallelism& parallelism, std::string_view place,
                       Dtype weights) {
  const auto fail = [&](std::string_view key, std::int32_t value, std::string_view expectation) {
    throw InputError(place, fmt::format("{} is {}: {} {}", key, value, model.name, expectation));
  };
  const auto require_divides = [&](std::string_view key, std::int32_t parts, std::int64_t whole,
                                   std::string_view what) {
    if (whole % parts == 0) return;
    std::vector<std::int64_t> divisors;
    for (std::int64_t i = 1; i <= std::min<std::int64_t>(whole, 64); ++i) {
      if (whole % i == 0) divisors.push_back(i);
    }
    fail(key, parts, fmt::format("has {} {}, which only {} divide", whole, what, fmt::join(divisors, ", ")));
  };
  for (const auto& [key, value] :
       {std::pair{"tensor_parallel", parallelism.tensor},
        std::pair{"pipeline_parallel", parallelism.pipeline}, std::pair{"data_parallel", parallelism.data},
        std::pair{"expert_parallel", parallelism.expert}}) {
    if (value < 1) throw InputError(place, fmt::format("{} is {}: expected a positive integer", key, value));
  }
  const std::int32_t tensor = parallelism.tensor;
  require_divides("tensor_parallel", tensor, model.heads, "attention heads");
  if (model.kv_heads != 0 && model.kv_heads % tensor != 0 && tensor % model.kv_heads != 0) {
    fail("tensor_parallel", tensor,
         fmt::format("has {} KV heads: expected a divisor or a multiple of that", model.kv_heads));
  }
  if (model.linear_value_heads != 0) {
    require_divides("tensor_parallel", tensor, model.linear_key_heads, "linear-attention key heads");
    require_divides("tensor_parallel", tensor, model.linear_value_heads, "linear-attention value heads");
  }
  require_divides("tensor_parallel", tensor, padded_vocab(model), "rows of padded vocabulary");
  const auto layers = static_cast<std::int32_t>(model.layers.size());
  if (parallelism.pipeline > layers) {
    fail("pipeline_parallel", parallelism.pipeline, fmt::format("has only {} layers", layers));
  }
  if (parallelism.expert > 1 && model.experts == 0) {
    fail("expert_parallel", parallelism.expert, "has no experts: expected 1");
  }
  if (tensor * parallelism.data % parallelism.expert != 0) {
    fail("expert_parallel", parallelism.expert,
         fmt::format("runs on tensor_parallel x data_parallel = {} GPUs a stage: expected a divisor of that",
                     tensor * parallelism.data));
  }
  // vLLM refuses to cut a scale block: each rank's width must hold whole ones.
  const std::int64_t unit = weights == Dtype::fp8_block ? kScaleBlock : 1;
  const auto require_width = [&](std::string_view key, std::int32_t parts, std::int64_t width,
                                 std::string_view what) {
    require_divides(key, parts, width, what);
    if (parts > 1 && width / parts % unit != 0) {
      fail(key, parts,
           fmt::format("has {} {}, {} a rank: expected whole blocks of {} (fp8_block weights)", width, what,
                       width / parts, unit));
    }
  };
  for (const Layer& layer : model.layers) {
    if (layer.intermediate != 0) {
      require_width("tensor_parallel", tensor, layer.intermediate, "feed-forward columns");
    }
    if (!layer.moe) continue;
    require_divides("expert_parallel", parallelism.expert, model.experts, "experts");
    const std::string key = parallelism.data * parallelism.expert == 1
                                ? "tensor_parallel"
                                : "tensor_parallel x data_parallel / expert_parallel";
    require_width(key, parallelism.moe_tensor(), model.moe_intermediate, "columns an expert");
    if (model.shared_intermediate != 0) {
      require_width("tensor_parallel", tensor, model.shared_intermediate, "shared-expert columns");
    }
  }
}

std::vector<Operator> operators(const ModelSpec& model, const Parallelism& parallelism, Dtype weights) {
  Rank rank(model, parallelism, weights);
  rank.embedding();
  for (const Layer& layer : model.layers) rank.layer(layer);
  rank.head();
  return rank.take();
}

Footprint footprint(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv,
                    std::int32_t max_num_batched_tokens, std::int32_t max_num_seqs, bool ends) {
  const std::int32_t tensor = parallelism.tensor;
  const bool only_sliding = std::none_of(model.layers.begin(), model.layers.end(), [](const Layer& layer) {
    return layer.attention != LayerAttention::sliding && layer.attention != LayerAttention::none;
  });
  const double head_bytes = 2.0 * kv_heads_per_rank(model, tensor) * model.head_dim * bytes_per_element(kv);
  const std::int64_t linear_keys = std::int64_t{model.linear_key_heads} / tensor * model.linear_key_dim;
  const std::int64_t linear_heads = model.linear_value_heads / tensor;
  const double state_bytes =
      static_cast<double>(linear_heads * model.linear_key_dim * model.linear_value_dim) *
          bytes_per_element(model.linear_state_dtype) +
      static_cast<double>((2 * linear_keys + linear_heads * model.linear_value_dim) *
                          (model.linear_conv - 1)) *
          bytes_per_element(model.dtype);

  Footprint most;
  const auto stages = pipeline_stages(model.layers.size(), parallelism.pipeline);
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    Rank rank(model, parallelism, weights);
    double kv_bytes = 0, window_bytes = 0, state = 0;
    std::int32_t regions = 0, window_regions = 0;
    const bool first = ends && stage == 0, last = ends && stage + 1 == stages.size();
    // Tied embeddings are one matrix where one stage has both ends.
    if (first && !(last && model.tie_embeddings)) rank.embedding();
    for (std::size_t i = stages[stage].first; i < stages[stage].second; ++i) {
      const Layer& layer = model.layers[i];
      rank.layer(layer);
      switch (layer.attention) {
        case LayerAttention::none:
          break;
        case LayerAttention::linear:
          state += state_bytes;
          break;
        case LayerAttention::sliding:
          if (!only_sliding) {
            window_bytes += head_bytes * model.window;
            window_regions += 2;
            break;
          }
          [[fallthrough]];
        case LayerAttention::full:
          kv_bytes += head_bytes;
          regions += 2;
          break;
        case LayerAttention::mla:
        case LayerAttention::dsa:
          kv_bytes += latent_bytes(model, kv, layer.attention == LayerAttention::dsa);
          regions += 1;
          if (layer.indexer) {
            kv_bytes += model.index_head_dim + kIndexerScale;
            regions += 1;
          }
      }
    }
    if (last) rank.head();
    most.weight_bytes = std::max(most.weight_bytes,
                                 static_cast<Bytes>(std::ceil(weight_bytes(rank.take(), model.int4_group))));
    most.kv_bytes_per_token = std::max(most.kv_bytes_per_token, kv_bytes);
    most.window_bytes_per_sequence =
        std::max(most.window_bytes_per_sequence, static_cast<Bytes>(std::ceil(window_bytes)));
    most.state_bytes_per_sequence =
        std::max(most.state_bytes_per_sequence, static_cast<Bytes>(std::ceil(state)));
    most.kv_regions = std::max(most.kv_regions, regions);
    most.window_regions = std::max(most.window_regions, window_regions);
  }
  most.activation_bytes = static_cast<Bytes>(
      std::ceil(activation_bytes(model, parallelism, max_num_batched_tokens, max_num_seqs)));
  if (most.kv_regions != 0) most.region_bytes_per_token = most.kv_bytes_per_token / most.kv_regions;
  return most;
}

// Totals -----------------------------------------------------------------------------------------------

namespace {

/// Weights of the layers, of experts only the share `active` of them.
double layer_weights(const ModelSpec& model, bool active, bool matrices_only) {
  Rank rank(model, Parallelism{}, model.dtype);
  for (const Layer& layer : model.layers) rank.layer(layer);
  double sum = 0;
  for (const Operator& op : rank.take()) {
    if (matrices_only && op.kind == OpKind::elementwise) continue;
    const double share = active && op.kind == OpKind::moe ? static_cast<double>(op.topk) / op.experts : 1;
    sum += static_cast<double>(op.count * op.weights) * share;
  }
  return sum;
}

}  // namespace

std::int64_t parameter_count(const ModelSpec& model) {
  const std::int64_t ends = model.vocab * model.hidden * (model.tie_embeddings ? 1 : 2);
  return std::llround(layer_weights(model, false, false)) + model.hidden + ends;
}

std::int64_t active_parameter_count(const ModelSpec& model) {
  return std::llround(layer_weights(model, true, false)) + model.hidden + model.vocab * model.hidden;
}

double flops_per_token(const ModelSpec& model) {
  return 2 * (layer_weights(model, true, true) + static_cast<double>(model.vocab * model.hidden));
}

}  // namespace pdsim
