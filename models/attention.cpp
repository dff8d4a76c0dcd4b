#include "models/attention.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"

namespace pdsim {
namespace {

// FlashMLA's sparse kernels compute this many query heads at a time, however few a rank has: measured
// prefill time hardly depends on them.
constexpr double kSparseHeads = 64;

double over(double work, double rate) {
  return rate > 0 ? work / rate : 0;
}

}  // namespace

AttentionForm attention_form(const Operator& op, Dtype kv, bool decode) {
  const double kv_bytes = bytes_per_element(kv);
  const double heads = op.heads, kv_heads = op.kv_heads, key = op.head_dim;
  const double value = op.v_head_dim > 0 ? op.v_head_dim : op.head_dim;
  AttentionForm form;
  if (op.kind == OpKind::attention) {
    form.flops_pair = 2 * heads * (key + value);
    form.bytes_token = heads * (key + value) * kActivationBytes;
    form.bytes_context = kv_heads * (key + value) * kv_bytes;
    form.blocks = kv_heads;
    form.group = heads / kv_heads;
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
    form.blocks = heads;
    return form;
  }
  form.blocks = 1;
  form.flops_token = 2 * up;
  form.bytes_token = heads * (2 * latent + rope) * kActivationBytes;
  const double flops_head = 2 * (2 * latent + rope);
  if (!sparse) {
    form.flops_pair = heads * flops_head;
    form.bytes_context = row_bytes;
    return form;
  }
  form.topk = op.index_topk;
  form.fills = !decode;  // measured: a prompt's time goes by its tokens, however few keys they see
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

AttentionShape attention_rows(double requests, double n, double p, double window) {
  const double keys = p + n;
  if (window <= 0 || keys <= window)
    return {requests * n, requests * (n * p + n * (n + 1) / 2), requests * keys, requests};
  // Query i of n sees min(p + i, window) keys; together they read the last window - 1 cached ones.
  const double growing = std::max(0.0, std::min(n, window - p));
  const double pairs = growing * p + growing * (growing + 1) / 2 + (n - growing) * window;
  return {requests * n, requests * pairs, requests * (n + std::min(p, window - 1)), requests};
}

OctaveGrid::OctaveGrid(const Correction& correction) {
  if (correction.empty()) return;
  const auto octaves = [&](std::size_t axis) {
    return axis < correction.axes.size()
               ? static_cast<std::size_t>(std::ceil(correction.axes[axis].octave.back())) + 1
               : 1;
  };
  rows_ = octaves(0);
  columns_ = octaves(1);
  for (std::size_t i = 0; i < rows_; ++i) {
    for (std::size_t j = 0; j < columns_; ++j) {
      const double at[] = {std::ldexp(1.0, static_cast<int>(i)), std::ldexp(1.0, static_cast<int>(j))};
      factor_.push_back(static_cast<float>(correction.factor({at, correction.axes.size()})));
    }
  }
}

AttentionKernel::AttentionKernel(const AttentionForm& work, const Coefficients& fit, std::int32_t sms,
                                 std::int32_t sliding_window)
    : form(work),
      launch(fit.launch_ns),
      overlap(fit.overlap),
      window(sliding_window),
      walk(fit.walk_ns),
      split(fit.split_ns) {
  for (double* flops : {&form.flops_token, &form.flops_pair, &form.flops_context, &form.flops_selected}) {
    *flops = over(*flops, fit.flops_per_ns);
  }
  if (form.fills) {
    form.flops_token += form.topk * form.flops_selected;
    form.flops_selected = 0;
  }
  // A tile ends between two queries, never among the heads of one: other groups leave rows of it empty.
  if (fit.tile_m > 0 && std::fmod(fit.tile_m, work.group) != 0) form.flops_pair *= fit.ragged;
  for (double* bytes : {&form.bytes_step, &form.bytes_token, &form.bytes_context, &form.bytes_selected}) {
    *bytes = over(*bytes, fit.bytes_per_ns);
  }
  if (fit.cache_bytes > 0) {
    cache = over(fit.cache_bytes, fit.bytes_per_ns);
    cache_gain = std::max(0.0, 1 - fit.bytes_per_ns / fit.cache_bytes_per_ns);
  }
  // A block takes the queries of all heads that share a KV head (tile_n 0), or of one head.
  const double blocks = fit.tile_n == 0 ? work.blocks : work.blocks * work.group;
  hidden = fit.hidden_keys;
  if (fit.tile_m == 0) {
    wave = fit.wave_ns * blocks / sms;
    walk_share = fit.walk_waves > 0 ? blocks / (fit.walk_waves * sms) : 1;
    return;
  }
  tile = fit.tile_n == 0 ? fit.tile_m / work.group : fit.tile_m;
  spread = fit.spread;
  wave_share = blocks / (tile * sms);
  block = fit.wave_ns * wave_share;
  tail_key = fit.tail * form.flops_pair / blocks * tile * sms;
  tail = fit.tail * fit.wave_ns + tail_key * hidden;
  tail_overlap = fit.tail_overlap;
}

AttentionKernel attention_kernel(const Curve& curve, std::int32_t sms, const Operator& op, Dtype kv) {
  const bool decode = curve.op == CurveOp::attention_decode || curve.op == CurveOp::mla_decode ||
                      curve.op == CurveOp::dsa_decode;
  AttentionKernel kernel(attention_form(op, kv, decode), curve.regimes.back(), sms, op.window);
  kernel.by_context = decode;
  Correction correction = curve.correction;
  while (correction.axes.size() > 2) {  // requests and length come last
    const std::string& name = correction.axes[0].name;
    correction = correction.fix(0, name == "heads"      ? op.heads
                                   : name == "kv_heads" ? op.kv_heads
                                                        : static_cast<double>(op.heads) / op.kv_heads);
  }
  if (!correction.empty() && correction.axes[0].name == "head_rows") kernel.scale = op.heads;
  if (!correction.empty() && correction.axes[0].name == "kv_rows") kernel.scale = op.kv_heads;
  kernel.factor = OctaveGrid(correction);
  return kernel;
}

namespace {

// MLA decode modules take 68 us at least in the Hopper tables, 38 us in those of B200. Served steps do not
// show it: DeepSeek-R1 on SGLang and Kimi-K2.5 on vLLM (H200, TP 8) take 35 to 45 us a layer less than the
// sum of the tables, whatever the batch. What a module's measurement launches around its kernels is taken
// off.
constexpr double kHopperMlaModuleNs = 40'000;

// Corrections of decode attention below 2^4 keys, where a kernel is its launch, are noise of the tables.
constexpr std::size_t kFewestKeys = 4;

}  // namespace

AttentionKernel serving_kernel(const Curve& curve, const Gpu& gpu, const Operator& op, Dtype kv) {
  AttentionKernel kernel = attention_kernel(curve, gpu.sm_count, op, kv);
  kernel.efficiency = curve.efficiency.factor;
  if (!kernel.by_context) return kernel;  // prefill
  kernel.cache = 0;
  kernel.factor.level_below(kFewestKeys);
  if (curve.op == CurveOp::mla_decode && !curve.bare && gpu.compute_capability == 90) {
    kernel.launch = std::max(0.0, kernel.launch - kHopperMlaModuleNs);
  }
  return kernel;
}

}  // namespace pdsim
