#include "models/curve.hpp"

#include <algorithm>

#include "models/model.hpp"
#include "sim/core/math.hpp"

namespace pdsim {

std::string_view name(Regime regime) {
  return regime == Regime::compute ? "compute" : regime == Regime::bandwidth ? "bandwidth" : "launch";
}

namespace {

constexpr double kActivationBytes = 2;  // bf16 or fp16
// FlashMLA's sparse kernels compute this many query heads at a time, however few a rank has: measured
// prefill time hardly depends on them.
constexpr double kSparseHeads = 64;

double over(double work, double rate) {
  return rate > 0 ? work / rate : 0;
}

// `flops` as computed, padding included; `useful` of them asked for.
KernelTime together(const Coefficients& fit, double launch, double flops, double bytes, double useful) {
  KernelTime t{launch, over(flops, fit.flops_per_ns), over(bytes, fit.bytes_per_ns), 0, over(useful, flops)};
  t.ns = t.launch + overlapped(t.compute, t.memory, fit.overlap);
  return t;
}

// Bytes of an activation that meets weights of this format in a tensor core.
double operand_bytes(Dtype weights) {
  const bool narrow = weights == Dtype::fp8 || weights == Dtype::fp8_block || weights == Dtype::int8;
  return narrow ? 1 : kActivationBytes;
}

}  // namespace

KernelWork gemm_work(const GemmShape& s) {
  return {2 * s.m * s.n * s.k, bytes_per_element(s.dtype) * s.n * s.k + operand_bytes(s.dtype) * s.m * s.k +
                                   kActivationBytes * s.m * s.n};
}

KernelTime gemm_time(const Coefficients& fit, std::int32_t sms, const GemmShape& s) {
  const KernelWork work = gemm_work(s);
  double flops = work.flops;
  if (fit.tile_m > 0) {
    const double tile_m = fit.tile_m, tile_n = fit.tile_n, cluster = fit.cluster;
    const double clusters = std::ceil(s.m / (tile_m * cluster)) * std::ceil(s.n / tile_n);
    const double waves = std::ceil(clusters / std::floor(sms / cluster));
    flops = waves * sms * tile_m * tile_n * 2 * s.k;
    if (std::fmod(s.m, 16) != 0) flops *= fit.ragged;
  }
  return together(fit, fit.launch_ns + fit.element_ns * s.m * s.k, flops, work.bytes, work.flops);
}

double active_experts(const MoeShape& s) {
  return s.experts * (1 - math::pow(1 - s.topk / s.experts, s.tokens)) / s.expert_parallel;
}

namespace {

double moe_bytes(const MoeShape& s, double active) {
  const double rows = s.tokens * s.topk / s.expert_parallel;
  return active * 3 * s.hidden * s.intermediate * bytes_per_element(s.dtype) +
         rows * (2 * s.hidden + 3 * s.intermediate) * kActivationBytes;
}

}  // namespace

KernelWork moe_work(const MoeShape& s) {
  const double rows = s.tokens * s.topk / s.expert_parallel;
  return {6 * s.hidden * s.intermediate * rows, moe_bytes(s, active_experts(s))};
}

KernelTime moe_time(const Coefficients& fit, const MoeShape& s) {
  if (s.tokens <= 0) return {};
  const double active = active_experts(s);
  const double rows = s.tokens * s.topk / s.expert_parallel;
  const double padded = fit.tile_m > 0 ? active * std::ceil(rows / (active * fit.tile_m)) * fit.tile_m : rows;
  const double flops_row = 6 * s.hidden * s.intermediate;
  return together(fit, fit.launch_ns + fit.element_ns * s.tokens * s.topk * s.hidden, flops_row * padded,
                  moe_bytes(s, active), flops_row * rows);
}

AttentionForm attention_form(const Operator& op, Dtype kv, bool decode) {
  const double kv_bytes = bytes_per_element(kv);
  const double heads = op.heads, kv_heads = op.kv_heads, key = op.head_dim;
  const double value = op.v_head_dim > 0 ? op.v_head_dim : op.head_dim;
  AttentionForm form;
  if (op.kind == OpKind::attention) {
    form.flops_pair = 2 * heads * (key + value);
    form.bytes_token = heads * (key + value) * kActivationBytes;
    form.bytes_context = kv_heads * (key + value) * kv_bytes;
    form.blocks_token = kv_heads;
    return form;
  }
  const double latent = op.latent, rope = op.rope;
  const double up = latent * heads * (key + value);  // weights of kv_b
  const bool sparse = op.kind == OpKind::dsa_attention;
  // One token's cache entry. Sparse layers lay out an 8-bit one as vLLM's fp8_ds_mla: the latent with an
  // fp32 scale every 128 elements, the positional part in 16 bits.
  const double row_bytes =
      sparse && kv_bytes < 2 ? latent + latent / 128 * 4 + rope * 2 : (latent + rope) * kv_bytes;
  form.bytes_step = up * kActivationBytes;
  if (!decode && !sparse) {
    form.flops_pair = 2 * heads * (key + rope + value);
    form.flops_context = 2 * up;
    form.bytes_token = heads * (key + rope + value) * kActivationBytes;
    form.bytes_context = row_bytes + 2 * heads * (key + rope + value) * kActivationBytes;
    return form;
  }
  form.blocks_token = decode ? 1 : 0;
  form.flops_token = 2 * up;
  form.bytes_token = heads * (2 * latent + rope) * kActivationBytes;
  const double flops_head = 2 * (2 * latent + rope);
  if (!sparse) {
    form.flops_pair = heads * flops_head;
    form.bytes_context = row_bytes;
    return form;
  }
  form.topk = op.index_topk;
  form.flops_selected = std::max(heads, kSparseHeads) * flops_head;
  // A prefill's queries share the rows that they select; a decode row reads its own.
  (decode ? form.bytes_selected : form.bytes_context) = row_bytes;
  if (op.index_heads > 0) {
    const double index_key = op.index_head_dim;
    form.flops_pair = 2 * op.index_heads * index_key;
    form.bytes_context += index_key + 4;  // an fp8 key and its fp32 scale
  }
  return form;
}

AttentionKernel::AttentionKernel(const AttentionForm& work, const Coefficients& fit, std::int32_t sms)
    : form(work),
      launch(fit.launch_ns),
      overlap(fit.overlap),
      split(fit.split_ns),
      walk(fit.walk_ns),
      walk_share(fit.walk_waves > 0 ? work.blocks_token / (fit.walk_waves * sms) : 1) {
  for (double* flops : {&form.flops_token, &form.flops_pair, &form.flops_context, &form.flops_selected}) {
    *flops = over(*flops, fit.flops_per_ns);
  }
  for (double* bytes : {&form.bytes_step, &form.bytes_token, &form.bytes_context, &form.bytes_selected}) {
    *bytes = over(*bytes, fit.bytes_per_ns);
  }
  form.flops_token += fit.wave_ns * work.blocks_token / sms;
}

KernelTime stream_time(const Coefficients& fit, double bytes) {
  return together(fit, fit.launch_ns, 0, bytes, 0);
}

}  // namespace pdsim
