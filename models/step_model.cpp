#include "models/step_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

namespace {

// Elementwise kernels were not measured one by one. A launch inside a graph takes about 2 us: the 8 us a
// layer of "other operators" that the composed model assumed before it was held against served ones, over
// the four such kernels of a dense layer. They reach four fifths of the memory bandwidth (aiconfigurator's
// empirical scaling, in its system descriptions).
constexpr double kElementwiseLaunchNs = 2'000;
constexpr double kElementwiseBandwidth = 0.8;

// A send between pipeline stages (aiconfigurator's p2p latency).
constexpr double kStageSendNs = 10'000;

// Scheduling, input preparation and output processing of one step on the host. Composed of measured
// kernels, Llama-3.1-70B's decode steps at TP 8 come out 0.64 ms short of served ones (vLLM of October
// 2025, which waited for the host). Asynchronous scheduling hides it behind the GPU's step.
constexpr double kHostNs = 640'000;

constexpr std::int32_t kLargestGraph = 512;

constexpr double kOutsideShare = 0.1;  // of a step's time, beyond which it counts as extrapolated

/// Gated delta rule (arXiv 2412.06464): per head a state of key x value entries that each token decays,
/// corrects and reads, 6 flops an entry. A decode row reads and writes its state; prefill keeps it on
/// chip and streams queries, keys, values and outputs.
AttentionForm linear_attention_form(const Operator& op, bool decode) {
  const double keys = op.head_dim, values = op.v_head_dim;
  const double state = op.heads * keys * values, element = bytes_per_element(op.dtype);
  AttentionForm form;
  form.flops_token = 6 * state;
  form.bytes_token = element * (decode ? 2 * state : 2 * op.kv_heads * keys + 2 * op.heads * values);
  return form;
}

double most(const Curve& curve, const std::string& axis) {
  const auto found = curve.range.find(axis);
  return found == curve.range.end() ? HUGE_VAL : found->second.most;
}

}  // namespace

Coefficients elementwise_fit(const Gpu& gpu) {
  Coefficients c;
  c.launch_ns = kElementwiseLaunchNs;
  c.bytes_per_ns = kElementwiseBandwidth * gpu.hbm_bytes_per_ns;
  return c;
}

std::int32_t graph_size(std::int32_t tokens) {
  if (tokens <= 2 || tokens > kLargestGraph) return tokens;
  if (tokens <= 4) return 4;
  const std::int32_t step = tokens <= 256 ? 8 : 16;
  return (tokens + step - 1) / step * step;
}

/// One operator and the curve that times it.
struct StepModel::Part {
  Operator op;
  Curve curve;           ///< of what goes by rows; of an attention's prefill
  double launches = 1;   ///< in a step: the operator's count, scaled to the slowest pipeline stage
  bool outside = false;  ///< its fixed sizes were never measured
  std::int32_t sms = 0;
  std::int32_t attention = -1;  ///< index in attention_; -1: goes by rows
  AttentionForm prefill_work, decode_work;

  GemmShape gemm(double rows) const {
    return {rows, static_cast<double>(op.n), static_cast<double>(op.k), op.dtype};
  }
  MoeShape moe(double tokens) const {
    MoeShape shape;
    shape.tokens = tokens * op.moe_data;
    shape.hidden = static_cast<double>(op.hidden);
    shape.intermediate = static_cast<double>(op.intermediate) / op.moe_tensor;
    shape.experts = op.experts;
    shape.topk = op.topk;
    shape.expert_parallel = op.moe_expert;
    shape.dtype = op.dtype;
    return shape;
  }
  double bytes(double rows) const { return rows * static_cast<double>(op.bytes_per_token); }

  /// One launch on so many rows: tokens, or sampled requests.
  KernelTime time(double rows) const {
    if (op.kind == OpKind::gemm) return gemm_time(curve.at(rows), sms, gemm(rows));
    if (op.kind == OpKind::moe) return moe_time(curve.at(rows * op.moe_data), moe(rows));
    return stream_time(curve.at(bytes(rows)), bytes(rows));
  }
  bool outside_at(double rows) const {
    if (outside) return true;
    if (op.kind == OpKind::gemm) return !curve.holds("m", rows);
    if (op.kind == OpKind::moe) return !curve.holds("tokens", rows * op.moe_data);
    return !curve.holds("bytes", bytes(rows));
  }
};

StepModel::StepModel(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv,
                     const Gpu& gpu, const Profile& profile, std::int32_t max_num_batched_tokens,
                     bool async_scheduling)
    : async_scheduling_(async_scheduling), stages_(parallelism.pipeline) {
  const std::string place = fmt::format("model '{}' on {}", model.name, gpu.name);
  const auto layers = static_cast<double>(model.layers.size());
  const double slowest = std::ceil(layers / parallelism.pipeline) * parallelism.pipeline / layers;
  std::vector<Part> parts;
  for (const Operator& op : operators(model, parallelism, weights)) {
    Part part;
    part.op = op;
    part.launches = op.count * (op.sampled_rows ? 1 : slowest);
    part.sms = gpu.sm_count;
    part.outside = profile.gpu != gpu.name;
    const auto choose = [&](CurveOp curve_op, Dtype dtype) -> const Curve& {
      const CurveChoice choice =
          find_curve(profile, curve_op, dtype, place, op.kind == OpKind::attention ? op.head_dim : 0,
                     op.window > 0, op.kind == OpKind::allreduce ? op.gpus : 0);
      part.outside = part.outside || choice.stand_in;
      return *choice.curve;
    };
    const auto within = [&](const Curve& curve, const std::string& axis, double value) {
      part.outside = part.outside || !curve.holds(axis, value);
    };
    const auto attend = [&](const Curve& prefill, const Curve& decode) {
      part.curve = prefill;
      part.attention = static_cast<std::int32_t>(attention_.size());
      for (const Curve* curve : {&prefill, &decode}) {
        within(*curve, "heads", op.heads);
        within(*curve, "kv_heads", op.kv_heads);
      }
      Attention attention;
      attention.prefill = {part.prefill_work, prefill.regimes[0], gpu.sm_count};
      attention.decode = {part.decode_work, decode.regimes[0], gpu.sm_count};
      attention.launches = part.launches;
      attention.window = op.window > 0;
      attention.outside = part.outside;
      attention.prefill_requests = most(prefill, "requests");
      attention.prefill_context = most(prefill, "context");
      attention.decode_requests = most(decode, "requests");
      attention.decode_context = most(decode, "context");
      attention_.push_back(attention);
    };
    switch (op.kind) {
      case OpKind::gemm:
        part.curve = choose(CurveOp::gemm, op.dtype);
        within(part.curve, "n", static_cast<double>(op.n));
        within(part.curve, "k", static_cast<double>(op.k));
        break;
      case OpKind::moe: {
        part.curve = choose(CurveOp::moe, op.dtype);
        const MoeShape shape = part.moe(1);
        within(part.curve, "hidden", shape.hidden);
        within(part.curve, "intermediate", shape.intermediate);
        within(part.curve, "experts", shape.experts);
        within(part.curve, "topk", shape.topk);
        within(part.curve, "expert_parallel", shape.expert_parallel);
        break;
      }
      case OpKind::allreduce:
        part.curve = choose(CurveOp::allreduce, Dtype::bf16);
        break;
      case OpKind::elementwise:
        part.curve.regimes = {elementwise_fit(gpu)};
        break;
      case OpKind::linear_attention: {
        // No table: arithmetic at prefill attention's rate, memory as elementwise kernels.
        Curve curve = choose(CurveOp::attention_prefill, Dtype::bf16);
        curve.regimes[0].bytes_per_ns = kElementwiseBandwidth * gpu.hbm_bytes_per_ns;
        curve.range.clear();
        part.outside = true;
        part.prefill_work = linear_attention_form(op, false);
        part.decode_work = linear_attention_form(op, true);
        attend(curve, curve);
        break;
      }
      case OpKind::attention:
      case OpKind::mla_attention:
      case OpKind::dsa_attention: {
        const bool heads = op.kind == OpKind::attention, sparse = op.kind == OpKind::dsa_attention;
        part.prefill_work = attention_form(op, kv, false);
        part.decode_work = attention_form(op, kv, true);
        attend(choose(heads    ? CurveOp::attention_prefill
                      : sparse ? CurveOp::dsa_prefill
                               : CurveOp::mla_prefill,
                      kv),
               choose(heads    ? CurveOp::attention_decode
                      : sparse ? CurveOp::dsa_decode
                               : CurveOp::mla_decode,
                      kv));
        break;
      }
    }
    parts.push_back(std::move(part));
  }
  if (parallelism.pipeline > 1) {
    Part send;
    send.op.kind = OpKind::allreduce;
    send.op.name = "stage_send";
    send.op.bytes_per_token = model.hidden * static_cast<std::int64_t>(bytes_per_element(model.dtype));
    send.launches = parallelism.pipeline - 1;
    Coefficients link;
    link.launch_ns = kStageSendNs;
    link.bytes_per_ns = gpu.nvlink_bytes_per_ns > 0 ? gpu.nvlink_bytes_per_ns : gpu.pcie_bytes_per_ns;
    send.curve.regimes = {link};
    parts.push_back(std::move(send));
  }

  const auto size = static_cast<std::size_t>(max_num_batched_tokens) + 1;
  by_tokens_.resize(size);
  by_sampled_.resize(size);
  for (std::int32_t rows = 1; rows <= max_num_batched_tokens; ++rows) {
    const auto i = static_cast<std::size_t>(rows);
    for (const Part& part : parts) {
      if (part.attention >= 0) continue;
      Cost& cost = (part.op.sampled_rows ? by_sampled_ : by_tokens_)[i];
      const double run = part.op.sampled_rows ? rows : graph_size(rows);
      const double ns = part.launches * part.time(run).ns;
      cost.ns += ns;
      if (part.outside_at(run)) cost.outside += ns;
    }
  }
  parts_ = std::make_shared<const std::vector<Part>>(std::move(parts));
}

namespace {

AttentionShape decode_rows(const StepShape& s, bool window) {
  const auto context = static_cast<double>(window ? s.decode_window_context : s.decode_context);
  return {static_cast<double>(s.decode_requests), context, context};
}

AttentionShape prefill_rows(const StepShape& s, bool window) {
  return {static_cast<double>(s.prefill_tokens),
          static_cast<double>(window ? s.prefill_window_pairs : s.prefill_pairs),
          static_cast<double>(window ? s.prefill_window_context : s.prefill_context)};
}

}  // namespace

// The kernel's time, and whether its requests, or the context of the mean one, exceed what was measured.
inline KernelTime StepModel::Attention::decode_time(const StepShape& s, bool& beyond) const {
  const AttentionShape rows = decode_rows(s, window);
  beyond = outside || rows.tokens > decode_requests || rows.context > decode_context * rows.tokens;
  return decode.time(rows);
}

inline KernelTime StepModel::Attention::prefill_time(const StepShape& s, bool& beyond) const {
  const AttentionShape rows = prefill_rows(s, window);
  const auto requests = static_cast<double>(s.prefill_requests);
  beyond = outside || requests > prefill_requests || rows.context > prefill_context * requests;
  return prefill.time(rows);
}

StepTime StepModel::time(const StepShape& shape) const {
  const std::int32_t tokens = shape.tokens();
  if (tokens == 0) return {};
  const Cost& every = by_tokens_[static_cast<std::size_t>(tokens)];
  const Cost& sampled = by_sampled_[static_cast<std::size_t>(shape.sampled_requests)];
  double ns = every.ns + sampled.ns, outside = every.outside + sampled.outside;
  const auto add = [&](double part, bool beyond) {
    ns += part;
    if (beyond) outside += part;
  };
  for (const Attention& attention : attention_) {
    bool beyond = false;
    if (shape.decode_requests > 0) {
      const double part = attention.launches * attention.decode_time(shape, beyond).ns;
      add(part, beyond);
    }
    if (shape.prefill_tokens > 0) {
      const double part = attention.launches * attention.prefill_time(shape, beyond).ns;
      add(part, beyond);
    }
  }
  const bool extrapolated = outside > kOutsideShare * ns;
  return {ceil_ns(async_scheduling_ ? std::max(ns, kHostNs) : ns + kHostNs), extrapolated};
}

std::vector<OpTime> StepModel::breakdown(const StepShape& shape) const {
  std::vector<OpTime> result;
  if (shape.tokens() == 0) return result;
  const auto add = [&](std::string name, double launches, const KernelTime& t, bool outside) {
    result.push_back({std::move(name), static_cast<std::int32_t>(std::lround(launches)),
                      launches * t.ns / 1e3, t.regime(), outside});
  };
  for (const Part& part : *parts_) {
    if (part.attention >= 0) {
      const Attention& attention = attention_[static_cast<std::size_t>(part.attention)];
      bool beyond = false;
      if (shape.decode_requests > 0) {
        const KernelTime t = attention.decode_time(shape, beyond);
        add(part.op.name + " (decode)", part.launches, t, beyond);
      }
      if (shape.prefill_tokens > 0) {
        const KernelTime t = attention.prefill_time(shape, beyond);
        add(part.op.name + " (prefill)", part.launches, t, beyond);
      }
      continue;
    }
    const double rows = part.op.sampled_rows ? shape.sampled_requests : graph_size(shape.tokens());
    if (rows > 0) add(part.op.name, part.launches, part.time(rows), part.outside_at(rows));
  }
  double host = kHostNs;
  if (async_scheduling_) {
    for (const OpTime& op : result) host -= op.us * 1e3;
  }
  if (host > 0) add("host", 1, {host, 0, 0, host, 1}, false);
  return result;
}

Work StepModel::work(const StepTotals& totals) const {
  Work sum;
  if (totals.steps == 0) return sum;
  const auto steps = static_cast<double>(totals.steps);
  const auto mean = [&](std::int64_t total) { return static_cast<double>(total) / steps; };
  const double decode = mean(totals.decode_requests), prefill = mean(totals.prefill_tokens);
  for (const Part& part : *parts_) {
    const auto add = [&](double launching_steps, const KernelWork& work) {  // of one launch in their mean
      sum.flops += part.op.count * launching_steps / stages_ * work.flops;
      sum.hbm_bytes += part.op.count * launching_steps / stages_ * work.bytes;
    };
    if (part.attention >= 0) {
      const bool window = part.op.window > 0;
      const double context = mean(window ? totals.decode_window_context : totals.decode_context);
      if (decode > 0) add(steps, part.decode_work.work({decode, context, context}));
      if (prefill > 0) {
        add(steps, part.prefill_work.work(
                       {prefill, mean(window ? totals.prefill_window_pairs : totals.prefill_pairs),
                        mean(window ? totals.prefill_window_context : totals.prefill_context)}));
      }
    } else if (part.op.kind == OpKind::gemm && part.op.sampled_rows) {
      const auto sampling = static_cast<double>(totals.sampling_steps);
      if (sampling > 0)
        add(sampling, gemm_work(part.gemm(static_cast<double>(totals.sampled_requests) / sampling)));
    } else if (part.op.kind == OpKind::gemm) {
      add(steps, gemm_work(part.gemm(decode + prefill)));
    } else if (part.op.kind == OpKind::moe) {
      for (std::size_t tokens = 1; tokens < totals.steps_of_tokens.size(); ++tokens) {
        const std::int64_t n = totals.steps_of_tokens[tokens];
        if (n > 0) add(static_cast<double>(n), moe_work(part.moe(static_cast<double>(tokens))));
      }
    } else if (part.op.kind == OpKind::elementwise) {
      add(steps, {0, part.bytes(part.op.sampled_rows ? mean(totals.sampled_requests) : decode + prefill)});
    }
  }
  return sum;
}

}  // namespace pdsim
