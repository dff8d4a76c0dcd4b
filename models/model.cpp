// Reading a Hugging Face config.json into a ModelSpec.
//
// Sizes are taken from the keys that the architecture's own configuration class reads, under every name
// they go by; defaults are those of that class. Anything else is refused by its pointer.
#include "models/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <optional>

#include "models/data.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// What an architecture implies that its config does not say.
struct Architecture {
  std::string_view name, model_type;
  bool qk_norm = false;        ///< unless use_qk_norm says otherwise
  bool slides = false;         ///< sliding_window is in force unless use_sliding_window is false
  std::int32_t interval = 0;   ///< without layer_types: one layer in so many is a full one, the last
  bool fp32_router = false;    ///< vLLM keeps its router's weights in 32 bits
  bool whole_qk_norm = false;  ///< norms queries and keys over all heads together
};

constexpr std::array kArchitectures = {
    Architecture{"LlamaForCausalLM", "llama"},
    Architecture{"MistralForCausalLM", "mistral", false, true},
    Architecture{"MixtralForCausalLM", "mixtral", false, true},
    Architecture{"Qwen2ForCausalLM", "qwen2"},
    Architecture{"Qwen2MoeForCausalLM", "qwen2_moe"},
    Architecture{"Qwen3ForCausalLM", "qwen3", true},
    Architecture{"Qwen3MoeForCausalLM", "qwen3_moe", true},
    Architecture{"Qwen3NextForCausalLM", "qwen3_next", true, false, 4},
    Architecture{"Qwen3_5ForConditionalGeneration", "qwen3_5", true, false, 4},
    Architecture{"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", true, false, 4},
    Architecture{"DeepseekV2ForCausalLM", "deepseek_v2"},
    Architecture{"DeepseekV3ForCausalLM", "deepseek_v3"},
    Architecture{"DeepseekV32ForCausalLM", "deepseek_v32"},
    Architecture{"KimiK25ForConditionalGeneration", "kimi_k25"},
    Architecture{"Glm4ForCausalLM", "glm4"},
    Architecture{"Glm4MoeForCausalLM", "glm4_moe", false, false, 0, true},
    Architecture{"Glm4MoeLiteForCausalLM", "glm4_moe_lite"},
    Architecture{"GlmMoeDsaForCausalLM", "glm_moe_dsa"},
    Architecture{"GptOssForCausalLM", "gpt_oss", false, true, 2},
    Architecture{"MiniMaxM2ForCausalLM", "minimax_m2", true, false, 0, true, true},
    Architecture{"DeciLMForCausalLM", "nemotron-nas"},
};

/// The config's language part (text_config where there is one) over its root.
struct Config {
  JsonObject root, text;

  /// The object that has the key; the language part when none has.
  const JsonObject& with(std::string_view key) const { return !text.has(key) && root.has(key) ? root : text; }
  bool has(std::string_view key) const { return with(key).has(key); }
  /// The first of a quantity's names that is there, or the first of all.
  std::string_view spelling(std::initializer_list<std::string_view> names) const {
    for (const std::string_view name : names) {
      if (has(name)) return name;
    }
    return *names.begin();
  }
  std::int32_t size(std::string_view key) const {
    return static_cast<std::int32_t>(with(key).integer(key, 1));
  }
  std::int32_t size_or(std::string_view key, std::int64_t absent, std::int64_t least = 1) const {
    return static_cast<std::int32_t>(with(key).integer_or(key, absent, least));
  }
};

/// An array with one word a layer, as indices into the words it may have.
std::vector<std::size_t> per_layer(const Config& config, std::string_view key, std::size_t layers,
                                   std::initializer_list<std::string_view> words) {
  const JsonObject& object = config.with(key);
  const json& list = object.array(key);
  if (list.size() != layers) {
    throw InputError(object.at(key), fmt::format("has {} entries: expected one for each of the {} layers",
                                                 list.size(), layers));
  }
  std::vector<std::size_t> indices;
  for (const json& entry : list) {
    const std::string text = entry.is_string() ? entry.get<std::string>() : "";
    const auto word = std::find(words.begin(), words.end(), text);
    if (word == words.end()) {
      throw InputError(fmt::format("{}/{}", object.at(key), indices.size()),
                       fmt::format("is {}: expected {}", entry.dump(), fmt::join(words, " or ")));
    }
    indices.push_back(static_cast<std::size_t>(word - words.begin()));
  }
  return indices;
}

const Architecture& architecture_of(const Config& config) {
  std::vector<std::string_view> known;
  for (const Architecture& each : kArchitectures) known.push_back(each.name);
  if (config.root.has("architectures")) {
    const json& list = config.root.array("architectures");
    if (list.empty() || !list[0].is_string()) config.root.reject("architectures", "a list of one name");
    const auto text = list[0].get<std::string>();
    for (const Architecture& each : kArchitectures) {
      if (each.name == text) return each;
    }
    throw InputError(config.root.at("architectures"),
                     fmt::format("'{}' is not an architecture that pdsim knows{}; known: {}", text,
                                 did_you_mean(text, known), fmt::join(known, ", ")));
  }
  if (!config.has("model_type")) {
    throw InputError(config.root.at("architectures"),
                     fmt::format("neither it nor model_type is there; known: {}", fmt::join(known, ", ")));
  }
  const std::string type = config.with("model_type").text("model_type");
  for (const Architecture& each : kArchitectures) {
    if (each.model_type == type) return each;
  }
  std::vector<std::string_view> types;
  for (const Architecture& each : kArchitectures) types.push_back(each.model_type);
  throw InputError(config.with("model_type").at("model_type"),
                   fmt::format("'{}' is not a model type that pdsim knows{}; known: {}", type,
                               did_you_mean(type, types), fmt::join(types, ", ")));
}

// Attention ------------------------------------------------------------------------------------------

void read_latent_attention(const Config& config, ModelSpec& model) {
  model.latent = config.size("kv_lora_rank");
  model.rope = config.size("qk_rope_head_dim");
  model.nope = config.size("qk_nope_head_dim");
  model.v_head_dim = config.size("v_head_dim");
  model.q_lora = config.size_or("q_lora_rank", 0);
  if (!config.has("index_topk")) {
    for (Layer& layer : model.layers) layer.attention = LayerAttention::mla;
    return;
  }
  model.index_topk = config.size("index_topk");
  model.index_heads = config.size("index_n_heads");
  model.index_head_dim = config.size("index_head_dim");
  for (Layer& layer : model.layers) layer.attention = LayerAttention::dsa, layer.indexer = true;
  if (config.has("indexer_types")) {
    const auto shared = per_layer(config, "indexer_types", model.layers.size(), {"full", "shared"});
    for (std::size_t i = 0; i < shared.size(); ++i) model.layers[i].indexer = shared[i] == 0;
  } else if (config.size_or("index_topk_freq", 1) != 1) {
    config.with("index_topk_freq")
        .reject("index_topk_freq", "indexer_types beside it, which names the layers");
  }
}

void read_linear_attention(const Config& config, ModelSpec& model) {
  model.linear_key_heads = config.size("linear_num_key_heads");
  model.linear_value_heads = config.size("linear_num_value_heads");
  model.linear_key_dim = config.size("linear_key_head_dim");
  model.linear_value_dim = config.size("linear_value_head_dim");
  model.linear_conv = config.size("linear_conv_kernel_dim");
  model.linear_state_dtype = model.dtype;
  if (config.has("mamba_ssm_dtype")) {
    const JsonObject& object = config.with("mamba_ssm_dtype");
    model.linear_state_dtype = dtype_of(object.text("mamba_ssm_dtype"), object.at("mamba_ssm_dtype"));
  }
}

/// Which layers are full, sliding or linear: layer_types says it outright; without it, what the
/// architecture does.
void read_layer_types(const Config& config, const Architecture& architecture, ModelSpec& model) {
  const auto layers = model.layers.size();
  const bool linear = config.has("linear_num_value_heads");
  const JsonObject& use = config.with("use_sliding_window");
  const bool slides = config.has("sliding_window") && use.flag_or("use_sliding_window", architecture.slides);
  if (config.has("layer_types")) {
    constexpr LayerAttention kKinds[] = {LayerAttention::full, LayerAttention::sliding,
                                         LayerAttention::linear};
    const auto kinds =
        per_layer(config, "layer_types", layers, {"full_attention", "sliding_attention", "linear_attention"});
    for (std::size_t i = 0; i < layers; ++i) model.layers[i].attention = kKinds[kinds[i]];
  } else if (linear || (slides && architecture.interval != 0)) {
    const auto interval = static_cast<std::size_t>(
        config.size_or("full_attention_interval", std::max(architecture.interval, 1)));
    for (std::size_t i = 0; i < layers; ++i) {
      if ((i + 1) % interval != 0) {
        model.layers[i].attention = linear ? LayerAttention::linear : LayerAttention::sliding;
      }
    }
  } else if (slides) {
    // Qwen slides from layer max_window_layers on; Mistral, which lacks the key, from the first.
    for (auto i = static_cast<std::size_t>(config.size_or("max_window_layers", 0, 0)); i < layers; ++i) {
      model.layers[i].attention = LayerAttention::sliding;
    }
  }
  for (const Layer& layer : model.layers) {
    if (layer.attention == LayerAttention::sliding) model.window = config.size("sliding_window");
    if (layer.attention == LayerAttention::linear) read_linear_attention(config, model);
  }
}

void read_head_attention(const Config& config, const Architecture& architecture, ModelSpec& model) {
  model.kv_heads = config.size_or("num_key_value_heads", model.heads);
  if (model.heads % model.kv_heads != 0) {
    config.with("num_key_value_heads")
        .reject("num_key_value_heads", fmt::format("a divisor of the {} attention heads", model.heads));
  }
  if (config.has("head_dim")) {
    model.head_dim = config.size("head_dim");
  } else if (model.hidden % model.heads == 0) {
    model.head_dim = static_cast<std::int32_t>(model.hidden / model.heads);
  } else {
    config.text.reject("head_dim", fmt::format("one, since {} heads do not divide hidden_size {}",
                                               model.heads, model.hidden));
  }
  model.qk_norm = config.with("use_qk_norm").flag_or("use_qk_norm", architecture.qk_norm);
  model.qk_norm_whole = model.qk_norm && architecture.whole_qk_norm;
  model.fp32_router = architecture.fp32_router;
  model.output_gate =
      config.with("attn_output_gate").flag_or("attn_output_gate", config.has("linear_num_value_heads"));
  read_layer_types(config, architecture, model);
}

// Feed-forward parts ---------------------------------------------------------------------------------

void read_experts(const Config& config, ModelSpec& model) {
  const auto key = config.spelling({"num_experts", "num_local_experts", "n_routed_experts"});
  model.experts = config.size_or(key, 0, 0);
  if (model.experts == 0) return;
  const auto topk = config.spelling({"num_experts_per_tok", "experts_per_token", "num_experts_per_token"});
  model.topk = config.size(topk);
  if (model.topk > model.experts) {
    config.with(topk).reject(topk, fmt::format("at most the {} experts", model.experts));
  }
  model.moe_intermediate = config.size(config.spelling({"moe_intermediate_size", "intermediate_size"}));
  model.shared_gate = config.has("shared_expert_intermediate_size");
  const auto shared = config.spelling({"shared_expert_intermediate_size", "shared_intermediate_size"});
  model.shared_intermediate = config.has(shared)
                                  ? config.size_or(shared, 0, 0)
                                  : config.size_or("n_shared_experts", 0, 0) * model.moe_intermediate;
}

/// Which layers are mixtures: mlp_layer_types says it; else Qwen's and DeepSeek's rules, whose keys
/// default to "every layer".
void read_feed_forward(const Config& config, ModelSpec& model) {
  read_experts(config, model);
  const std::size_t layers = model.layers.size();
  if (model.experts != 0 && config.has("mlp_layer_types")) {
    const auto sparse = per_layer(config, "mlp_layer_types", layers, {"dense", "sparse"});
    for (std::size_t i = 0; i < layers; ++i) model.layers[i].moe = sparse[i] == 1;
  } else if (model.experts != 0) {
    const std::int32_t dense_first = config.size_or("first_k_dense_replace", 0, 0);
    const std::int32_t every = config.size_or("moe_layer_freq", 1);
    const std::int32_t step = config.size_or("decoder_sparse_step", 1);
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(layers); ++i) {
      model.layers[static_cast<std::size_t>(i)].moe =
          i >= dense_first && i % every == 0 && (i + 1) % step == 0;
    }
    if (config.has("mlp_only_layers")) {
      const JsonObject& object = config.with("mlp_only_layers");
      for (const json& index : object.array("mlp_only_layers")) {
        if (!index.is_number_integer() || index < 0 || index >= layers) {
          object.reject("mlp_only_layers", fmt::format("indices below {}", layers));
        }
        model.layers[index.get<std::size_t>()].moe = false;
      }
    }
  }
  for (Layer& layer : model.layers) {
    if (!layer.moe) layer.intermediate = config.size("intermediate_size");
  }
}

/// Nemotron's searched layers: each has or lacks attention, and has a feed-forward width of its own.
void read_block_configs(const Config& config, ModelSpec& model) {
  const JsonObject& object = config.with("block_configs");
  const json& blocks = object.array("block_configs");
  if (blocks.size() != model.layers.size()) {
    throw InputError(object.at("block_configs"),
                     fmt::format("has {} entries: expected one for each of the {} layers", blocks.size(),
                                 model.layers.size()));
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Layer& layer = model.layers[i];
    const JsonObject block = object.element("block_configs", i);
    const JsonObject attention = block.object("attention"), ffn = block.object("ffn");
    for (const JsonObject* part : {&attention, &ffn}) {
      if (part->flag_or("replace_with_linear", false)) {
        part->reject("replace_with_linear", "false: pdsim has no such layer");
      }
    }
    for (const char* key : {"window_length", "num_sink_tokens", "sparsify"}) {
      if (attention.has(key)) attention.reject(key, "null: pdsim has no such layer");
    }
    if (attention.flag_or("no_op", false)) {
      layer.attention = LayerAttention::none;
    } else {
      const auto group = static_cast<std::int32_t>(attention.integer("n_heads_in_group", 1));
      if (model.heads % group != 0 || (model.kv_heads != 0 && model.heads / group != model.kv_heads)) {
        attention.reject("n_heads_in_group", "a divisor of the heads, the same in every layer");
      }
      model.kv_heads = model.heads / group;
    }
    if (!ffn.flag_or("no_op", false)) {
      // DeciLM's rule: two thirds of the multiple, rounded down, then up to a multiple of 256.
      const auto width =
          static_cast<std::int64_t>(2 * ffn.number("ffn_mult", 0) * static_cast<double>(model.hidden) / 3);
      layer.intermediate = (width + 255) / 256 * 256;
    }
  }
  if (model.kv_heads == 0) object.reject("block_configs", "at least one layer with attention");
  model.head_dim = static_cast<std::int32_t>(model.hidden / model.heads);
}

// Number formats -------------------------------------------------------------------------------------

Dtype read_activation_dtype(const Config& config) {
  const auto key = config.spelling({"torch_dtype", "dtype"});
  if (!config.has(key)) return Dtype::bf16;
  const JsonObject& object = config.with(key);
  const Dtype dtype = dtype_of(object.text(key), object.at(key));
  // vLLM serves float32 checkpoints in 16 bits.
  return dtype == Dtype::fp16 ? Dtype::fp16 : Dtype::bf16;
}

/// compressed-tensors and ModelOpt: the first group's weights say the format.
Dtype read_config_group(const JsonObject& groups, ModelSpec& model) {
  if (groups.value().empty()) throw InputError(groups.at(""), "expected at least one group");
  const JsonObject weights = groups.object(groups.value().begin().key()).object("weights");
  const std::int64_t bits = weights.integer("num_bits", 1);
  const std::string type = weights.text_or("type", "int");
  const std::string strategy = weights.text_or("strategy", "");
  if (type == "float" && bits == 8) return strategy == "block" ? Dtype::fp8_block : Dtype::fp8;
  if (type == "float" && bits == 4) return Dtype::nvfp4;
  if (type == "int" && bits == 8) return Dtype::int8;
  if (type == "int" && bits == 4) {
    const auto group = weights.integer_or("group_size", kInt4Group, -1);
    if (group > 0) model.int4_group = static_cast<std::int32_t>(group);
    return Dtype::int4;
  }
  weights.reject("num_bits", "8 or 4, of type float or int");
}

Dtype read_weights_dtype(const JsonObject& quantization, ModelSpec& model) {
  const std::string method = quantization.text_or("quant_method", "");
  if (quantization.has("quant_algo")) {  // ModelOpt
    const std::string algo = quantization.text("quant_algo");
    if (algo == "FP8") return Dtype::fp8;
    if (algo == "FP8_PB_WO") return Dtype::fp8_block;
    if (algo == "NVFP4") return Dtype::nvfp4;
    quantization.reject("quant_algo", "FP8, FP8_PB_WO or NVFP4");
  }
  if (quantization.has("config_groups")) {
    return read_config_group(quantization.object("config_groups"), model);
  }
  if (method == "fp8" || method == "fbgemm_fp8") {
    return quantization.has("weight_block_size") ? Dtype::fp8_block : Dtype::fp8;
  }
  if (method == "mxfp4") return Dtype::mxfp4;
  if (method == "awq" || method == "gptq") {
    const std::int64_t bits = quantization.integer(quantization.has("w_bit") ? "w_bit" : "bits", 1);
    const auto group = quantization.has("q_group_size") ? "q_group_size" : "group_size";
    if (const auto size = quantization.integer_or(group, kInt4Group, -1); size > 0) {
      model.int4_group = static_cast<std::int32_t>(size);
    }
    if (bits == 4) return Dtype::int4;
    if (bits == 8) return Dtype::int8;
    quantization.reject("bits", "4 or 8");
  }
  quantization.reject("quant_method", "fp8, compressed-tensors, modelopt, mxfp4, awq or gptq");
}

/// Which parts the checkpoint leaves alone. Lists of modules are names, prefixes, globs or regular
/// expressions; an entry counts when it names the whole part ("model.layers.*.self_attn",
/// "re:.*shared_experts.*"), not one of its norms or gates, which are never quantised anyway.
void read_exceptions(const JsonObject& quantization, ModelSpec& model) {
  for (const char* key : {"modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"}) {
    if (!quantization.has(key)) continue;
    for (const json& entry : quantization.array(key)) {
      if (!entry.is_string()) quantization.reject(key, "a list of module names");
      std::string_view text = entry.get_ref<const std::string&>();
      while (!text.empty() && std::string_view("*.$").find(text.back()) != std::string_view::npos) {
        text.remove_suffix(1);
      }
      if (text.ends_with("self_attn")) model.quantized_attention = false;
      if (text.ends_with("shared_experts") || text.ends_with("shared_expert")) model.quantized_shared = false;
      if (text.starts_with("re:") && text.find("mlp") != text.npos && text.ends_with("_proj")) {
        model.quantized_mlp = false;
      }
    }
  }
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

ModelSpec parse_model(const json& document, std::string_view place) {
  const JsonObject root(document, std::string(place));
  const Config config{root, root.has("text_config") ? root.object("text_config") : root};
  const Architecture& architecture = architecture_of(config);

  ModelSpec model;
  const fs::path file(place);
  model.name = file.stem() == "config" ? file.parent_path().filename().string() : file.stem().string();
  model.architecture = architecture.name;
  model.model_type = config.with("model_type").text_or("model_type", architecture.model_type);
  model.layers.resize(static_cast<std::size_t>(config.size("num_hidden_layers")));
  model.hidden = config.size("hidden_size");
  model.vocab = config.size("vocab_size");
  model.max_position = config.size("max_position_embeddings");
  model.tie_embeddings = config.with("tie_word_embeddings").flag_or("tie_word_embeddings", false);
  model.heads = config.size("num_attention_heads");
  model.mtp_layers = config.size_or(
      config.spelling({"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"}), 0, 0);
  model.dtype = model.weights_dtype = read_activation_dtype(config);

  if (config.has("block_configs")) {
    read_block_configs(config, model);
  } else {
    if (config.has("kv_lora_rank")) {
      read_latent_attention(config, model);
    } else {
      read_head_attention(config, architecture, model);
    }
    read_feed_forward(config, model);
  }
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (!config.has(key)) continue;
    const JsonObject quantization = config.with(key).object(key);
    model.weights_dtype = read_weights_dtype(quantization, model);
    read_exceptions(quantization, model);
    break;
  }
  return model;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(data_dir() / "models" / "shapes")) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

ModelSpec load_model(std::string_view text, std::string_view place) {
  const fs::path shapes = data_dir() / "models" / "shapes";
  const std::vector<std::string> names = model_names();
  if (std::find(names.begin(), names.end(), text) != names.end()) {
    const fs::path file = shapes / fmt::format("{}.json", text);
    return parse_model(read_json(file), file.string());
  }
  fs::path file(text);
  std::error_code failed;
  if (fs::is_directory(file, failed)) file /= "config.json";
  if (fs::exists(file, failed)) return parse_model(read_json(file), file.string());

  const std::string wanted = lower(text);
  for (const std::string& name : names) {
    const fs::path shape = shapes / (name + ".json");
    const json document = read_json(shape);
    const JsonObject root(document, shape.string());
    for (const json& id : root.array("hf_id")) {
      if (id.is_string() && lower(id.get_ref<const std::string&>()) == wanted) {
        return parse_model(document, shape.string());
      }
    }
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw InputError(place,
                   fmt::format("'{}' is neither a shipped model{}, a Hugging Face id of one, nor the path "
                               "of a config.json; shipped: {}",
                               text, did_you_mean(wanted, known), fmt::join(known, ", ")));
}

}  // namespace pdsim
