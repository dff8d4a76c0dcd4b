#include "models/attention_row.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "models/gemm.hpp"
#include "models/step_model.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

/// The models whose latent-attention modules were measured: the fields of their published config.json.
struct LatentModel {
  std::string_view name;
  std::int64_t hidden, q_lora;
  std::int32_t latent, rope, nope, value, index_heads, index_head_dim, index_topk;
};
constexpr LatentModel kLatentModels[] = {
    {"deepseek-ai/DeepSeek-V3", 7168, 1536, 512, 64, 128, 128, 0, 0, 0},
    {"deepseek-ai/DeepSeek-V3.2", 7168, 1536, 512, 64, 128, 128, 64, 128, 2048},
    {"zai-org/GLM-5", 6144, 2048, 512, 64, 192, 256, 32, 128, 2048},
};

bool decodes(CurveOp op) {
  return op == CurveOp::attention_decode || op == CurveOp::mla_decode || op == CurveOp::dsa_decode;
}

}  // namespace

std::optional<AttentionRow> attention_row(const KernelTable& table, const KernelRow& row) {
  const bool head = row.op == CurveOp::attention_prefill || row.op == CurveOp::attention_decode;
  bool decode = decodes(row.op);
  AttentionRow result;
  result.op = row.op;
  Operator& op = result.operation;
  op.heads = static_cast<std::int32_t>(row.at("heads"));
  if (head) {
    op.kind = OpKind::attention;
    op.kv_heads = static_cast<std::int32_t>(row.at("kv_heads"));
    op.head_dim = op.v_head_dim = static_cast<std::int32_t>(row.at("head_dim"));
    op.window = static_cast<std::int32_t>(row.at("window"));
  } else {
    const std::string_view name = table.models[row.model];
    const auto* model = std::find_if(std::begin(kLatentModels), std::end(kLatentModels),
                                     [&](const LatentModel& each) { return each.name == name; });
    if (model == std::end(kLatentModels)) return {};
    const bool sparse = row.op == CurveOp::dsa_prefill || row.op == CurveOp::dsa_decode;
    op.kind = sparse ? OpKind::dsa_attention : OpKind::mla_attention;
    op.kv_heads = 1;
    op.head_dim = model->nope;
    op.v_head_dim = model->value;
    op.latent = model->latent;
    op.rope = model->rope;
    op.index_heads = model->index_heads;
    op.index_head_dim = model->index_head_dim;
    op.index_topk = model->index_topk;
    result.hidden = model->hidden;
    result.q_lora = model->q_lora;
  }
  const double requests = row.at(decode ? "batch" : "requests");
  result.length = decode ? 1 : row.at("tokens");
  result.context = decode ? row.at("context") : row.at("prefix") + result.length;
  if (!decode && result.context == 1 && row.op != CurveOp::dsa_prefill) {
    result.op = head ? CurveOp::attention_decode : CurveOp::mla_decode;
    decode = true;
  }
  result.shape = attention_rows(requests, result.length, result.context - result.length, op.window);
  if (decode) result.shape.context = result.shape.pairs;
  result.shape.held = requests * result.context;
  return result;
}

double beside_attention(const Profile& profile, const Gpu& gpu, const KernelRow& row,
                        const AttentionRow& attention) {
  const Operator& op = attention.operation;
  if (op.kind == OpKind::attention || row.bare) return 0;
  const double tokens = attention.shape.tokens;
  double ns = 0;
  const auto project = [&](std::int64_t n, std::int64_t k, Dtype dtype) {
    const GemmShape shape{tokens, static_cast<double>(n), static_cast<double>(k), dtype};
    ns += gemm_time(*find_curve(profile, CurveOp::gemm, dtype, "gemm").curve, gpu.sm_count, shape).ns;
  };
  const std::int64_t heads = op.heads;
  project(attention.q_lora + op.latent + op.rope, attention.hidden, row.weights);
  project(heads * (op.head_dim + op.rope), attention.q_lora, row.weights);
  if (op.index_heads > 0) {
    project(std::int64_t{op.index_heads} * op.index_head_dim, attention.q_lora, row.weights);
    project(op.index_head_dim, attention.hidden, Dtype::bf16);
    project(op.index_heads, attention.hidden, Dtype::bf16);
  }
  project(attention.hidden, heads * op.v_head_dim, row.weights);
  // The norm of the down-projections and the rotation that a step lists beside the attention.
  return ns + 2 * stream_time(elementwise_fit(gpu), 0).ns;
}

double module_floor(const Coefficients& fit, Dtype weights) {
  return fit.host_ns + (bytes_per_element(weights) < kActivationBytes ? fit.ragged_host_ns : 0);
}

CurveChoice attention_curve(const Profile& profile, const AttentionRow& attention, Dtype kv,
                            std::string_view kernel, std::string_view place) {
  const Operator& op = attention.operation;
  const std::int32_t head_dim = op.kind == OpKind::attention ? op.head_dim : 0;
  for (const Curve& curve : profile.curves) {
    if (curve.op == attention.op && curve.dtype == kv && curve.head_dim == head_dim &&
        curve.window == op.window && curve.kernel == kernel)
      return {&curve, profile.datasheet};
  }
  return find_curve(profile, attention.op, kv, place, head_dim, op.window);
}

AttentionPrediction predict_attention(const Profile& profile, const Gpu& gpu, const KernelTable& table,
                                      const KernelRow& row) {
  const std::optional<AttentionRow> attention = attention_row(table, row);
  if (!attention) {
    throw InputError(table.place(row), fmt::format("'{}' is no model that pdsim knows the projections of",
                                                   table.models[row.model]));
  }
  AttentionPrediction result;
  result.choice =
      attention_curve(profile, *attention, row.dtype, table.kernels[row.kernel], table.place(row));
  const Curve& curve = *result.choice.curve;
  result.time = attention_kernel(curve, gpu.sm_count, attention->operation, row.dtype).time(attention->shape);
  const double beside = beside_attention(profile, gpu, row, *attention);
  const double ns = std::max(module_floor(curve.regimes.back(), row.weights), result.time.ns + beside);
  result.time.launch += ns - result.time.ns;
  result.time.ns = ns;
  result.within = curve.holds("requests", attention->shape.requests) &&
                  curve.holds("context", attention->context) &&
                  curve.holds("heads", attention->operation.heads) &&
                  (attention->operation.kind != OpKind::attention ||
                   curve.holds("kv_heads", attention->operation.kv_heads));
  return result;
}

}  // namespace pdsim
