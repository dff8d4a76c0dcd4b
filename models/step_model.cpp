#include "models/step_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/collective.hpp"
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

// Queries of one KV head that a thread block of decode attention takes at once (FlashAttention-3's and
// FlashMLA's kBlockM).
constexpr double kTileQueries = 64;

// vLLM runs shared experts on a stream of their own up to so many tokens
// (VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD).
constexpr std::int32_t kSharedStreamTokens = 256;

/// The largest message, in bytes, of which flashinfer's all-reduce takes the norm along in vLLM
/// (PassConfig.flashinfer_max_size, fi_allreduce_fusion_max_size_mb by capability and ranks).
double fused_allreduce_bytes(const Gpu& gpu, std::int32_t ranks) {
  constexpr double kMiB = 1024 * 1024;
  if (gpu.compute_capability < 90) return 0;
  if (ranks <= 2) return 64 * kMiB;
  if (ranks <= 4) return (gpu.compute_capability < 100 ? 2 : 32) * kMiB;
  return ranks <= 8 ? kMiB : 0;
}

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

/// Whether `name` ("moe", "attention") names the operator or its two halves ("attention-prefill").
bool names(std::string_view name, CurveOp op) {
  const std::string_view full = pdsim::name(op);
  return full == name || (full.starts_with(name) && full.substr(name.size()).starts_with('-'));
}

/// The profile with only the asked-for kernels, where it has one for a format, and those as first choice.
Profile with_kernels(const Profile& profile, const std::map<std::string, std::string>& kernels,
                     std::string_view place) {
  Profile chosen = profile;
  for (const auto& item : kernels) {
    const std::string &op = item.first, &part = item.second;
    const auto asked = [&](const Curve& curve) { return curve.kernel.find(part) != std::string::npos; };
    std::vector<std::pair<CurveOp, Dtype>> found;
    std::vector<std::string> known;
    for (Curve& curve : chosen.curves) {
      if (!names(op, curve.op)) continue;
      if (std::find(known.begin(), known.end(), curve.kernel) == known.end()) known.push_back(curve.kernel);
      if (!asked(curve)) continue;
      curve.special = false;
      found.emplace_back(curve.op, curve.dtype);
    }
    if (found.empty()) {
      throw InputError(place, fmt::format("profile '{}' has no {} kernel with '{}' in its name: there are {}",
                                          profile.name, op, part, fmt::join(known, ", ")));
    }
    // Experts have one format, for which the kernel asked for stands in; others may have several.
    std::erase_if(chosen.curves, [&](const Curve& curve) {
      return names(op, curve.op) && !asked(curve) &&
             (curve.op == CurveOp::moe ||
              std::find(found.begin(), found.end(), std::pair(curve.op, curve.dtype)) != found.end());
    });
  }
  return chosen;
}

/// Of a mixture's exchange, what dispatch and combine over nodes take the place of.
bool within_a_node(const Operator& op) {
  return op.name == "moe_gather" || op.name == "moe_scatter";
}

double most(const Curve& curve, const std::string& axis) {
  const auto found = curve.range.find(axis);
  return found == curve.range.end() ? HUGE_VAL : found->second.most;
}

/// The format in which tokens meet experts: what the tensor cores multiply, 16 bits beside weights alone
/// in 4.
Dtype activation_dtype(Dtype weights) {
  const bool narrow = weights == Dtype::fp8 || weights == Dtype::fp8_block || weights == Dtype::int8 ||
                      weights == Dtype::nvfp4;
  return narrow ? weights : Dtype::bf16;
}

/// Products in 32 bits without tensor cores, which no table holds: data-sheet rates at what is reached in
/// bf16 (three quarters of arithmetic, four fifths of memory) and that kernel's launch, 3 us; assumed.
Coefficients fp32_fit(const Gpu& gpu) {
  Coefficients c;
  c.launch_ns = 3'000;
  c.flops_per_ns = 0.75 * gpu.fp32_tflops * 1e3;
  c.bytes_per_ns = kElementwiseBandwidth * gpu.hbm_bytes_per_ns;
  c.overlap = 0.8;
  return c;
}

}  // namespace

Coefficients elementwise_fit(const Gpu& gpu) {
  Coefficients c;
  c.launch_ns = kElementwiseLaunchNs;
  c.bytes_per_ns = kElementwiseBandwidth * gpu.hbm_bytes_per_ns;
  return c;
}

std::int32_t expert_nodes(const Parallelism& parallelism, std::int32_t gpus_per_node) {
  const std::int32_t group = parallelism.tensor * parallelism.pipeline;
  std::int32_t nodes = 0, last = -1;
  for (std::int32_t rank = 0; rank < parallelism.data; ++rank) {
    for (std::int32_t gpu = rank * group; gpu < rank * group + parallelism.tensor; ++gpu) {
      const std::int32_t node = gpu / gpus_per_node;
      nodes += node != last ? 1 : 0;
      last = node;
    }
  }
  return nodes;
}

std::int32_t graph_size(std::int32_t tokens, std::int32_t largest) {
  if (tokens <= 2 || tokens > largest) return tokens;
  if (tokens <= 4) return 4;
  const std::int32_t step = tokens <= 256 ? 8 : 16;
  return std::min((tokens + step - 1) / step * step, largest);
}

/// One operator and the curve that times it.
struct StepModel::Part {
  Operator op;
  Curve curve;           ///< of what goes by rows; of an attention's prefill
  double launches = 1;   ///< in a step: the operator's count, scaled to the slowest pipeline stage
  bool outside = false;  ///< its fixed sizes were never measured
  std::int32_t sms = 0;
  double rank = 0;                  ///< of a collective: waiting for the slowest rank
  double unsynchronised_bytes = 0;  ///< ... up to which ranks do not wait: flashinfer's has no barrier
  double fused_bytes = 0;           ///< of a norm: the largest all-reduce before it that takes it along
  std::int32_t attention = -1;      ///< index in attention_; -1: goes by rows
  AttentionForm prefill_work, decode_work;
  const ExpertFabric* fabric = nullptr;  ///< of a dispatch and combine: moe_expert ranks on `nodes`
  std::int32_t nodes = 1;
  bool met = false;  ///< by the tokens of all data-parallel ranks

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
    if (op.kind == OpKind::gemm) return gemm_time(curve, sms, gemm(rows)) * curve.efficiency.factor;
    if (op.kind == OpKind::moe) return moe_time(curve, moe(rows)) * curve.efficiency.factor;
    if (fabric != nullptr) {
      return dispatch_combine_time(rows / op.moe_tensor, static_cast<double>(op.hidden), op.topk,
                                   activation_dtype(op.dtype), op.gpus, nodes, *fabric);
    }
    KernelTime t = collective_time(curve, bytes(rows));
    if (bytes(rows) <= unsynchronised_bytes) return t;
    t.launch += rank;
    t.ns += rank;
    return t;
  }
  bool outside_at(double rows) const {
    if (outside) return true;
    if (op.kind == OpKind::gemm) return !curve.holds("m", rows);
    if (op.kind == OpKind::moe) return !curve.holds("tokens", rows * op.moe_data);
    return !curve.holds("bytes", bytes(rows));
  }
};

// Of a norm's launches, those that an all-reduce takes along: all but the first layer's first, while the
// message (a quarter of what the norm moves: it reads and writes 4 vectors a token) is small enough.
double StepModel::fused_norms(const Part& part, double rows) {
  return part.fused_bytes > 0 && part.bytes(rows) / 4 <= part.fused_bytes ? part.launches - 1 : 0;
}

// What running the shared experts on a stream of their own saves: all of their time but what they need of the
// memory that routed experts use too, and no more than those take.
double StepModel::shared_beside_routed(const std::vector<Part>& parts, std::int32_t tokens) {
  if (tokens > kSharedStreamTokens) return 0;
  double shared = 0, routed = 0;
  for (const Part& part : parts) {
    if (part.op.kind == OpKind::moe) routed += part.launches * part.time(tokens).ns;
    if (!part.op.name.starts_with("shared_") || part.op.kind != OpKind::gemm) continue;
    const KernelTime t = part.time(tokens);
    shared += part.launches * std::max(0.0, t.ns - t.memory);
  }
  return std::min(shared, routed);
}

StepModel::StepModel(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv,
                     const Gpu& gpu, const Profile& all, const StepOptions& options)
    : options_(options),
      layers_(static_cast<double>(model.layers.size())),
      stages_(parallelism.pipeline),
      data_(parallelism.data) {
  const std::string place = fmt::format("model '{}' on {}", model.name, gpu.name);
  const Profile profile = with_kernels(all, options.kernels, place);
  sources_.add(all);
  const auto layers = static_cast<double>(model.layers.size());
  const double slowest = std::ceil(layers / parallelism.pipeline) * parallelism.pipeline / layers;
  const std::int32_t nodes =
      parallelism.expert > 1 && data_ > 1 ? expert_nodes(parallelism, options.gpus_per_node) : 1;
  std::vector<Part> parts;
  for (const Operator& op : operators(model, parallelism, weights)) {
    if (nodes > 1 && within_a_node(op)) continue;
    Part part;
    part.op = op;
    part.launches = op.count * (op.sampled_rows ? 1 : slowest);
    part.sms = gpu.sm_count;
    part.met = data_ > 1 && (op.kind == OpKind::moe || within_a_node(op));
    if (options_.fuse_allreduce_rms && op.name == "norm" && parallelism.tensor > 1) {
      part.fused_bytes = fused_allreduce_bytes(gpu, parallelism.tensor);
    }
    part.outside = profile.datasheet || profile.gpu != gpu.name;
    const auto choose = [&](CurveOp curve_op, Dtype dtype) -> const Curve& {
      const CurveChoice choice =
          find_curve(profile, curve_op, dtype, place, op.kind == OpKind::attention ? op.head_dim : 0,
                     op.window, op.kind == OpKind::allreduce ? op.gpus : 0);
      part.outside = part.outside || choice.stand_in;
      sources_.add(*choice.curve);
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
      if (op.kind == OpKind::linear_attention) {
        attention.prefill = {part.prefill_work, prefill.regimes[0], gpu.sm_count};
        attention.decode = {part.decode_work, decode.regimes[0], gpu.sm_count};
      } else {
        attention.prefill = serving_kernel(prefill, gpu, op, kv);
        attention.decode = serving_kernel(decode, gpu, op, kv);
      }
      attention.launches = part.launches;
      attention.window = op.window > 0;
      attention.queries = op.kind == OpKind::attention || op.kind == OpKind::mla_attention
                              ? static_cast<double>(op.heads) / op.kv_heads
                              : 0;
      attention.outside = part.outside;
      attention.prefill_requests = most(prefill, "requests");
      attention.prefill_context = most(prefill, "context");
      attention.decode_requests = most(decode, "requests");
      attention.decode_context = most(decode, "context");
      attention_.push_back(attention);
    };
    switch (op.kind) {
      case OpKind::gemm:
        if (op.dtype == Dtype::fp32 && !options_.tf32) {
          part.curve.regimes = {fp32_fit(gpu)};
          break;
        }
        part.curve = choose(CurveOp::gemm, op.dtype);
        within(part.curve, "n", static_cast<double>(op.n));
        within(part.curve, "k", static_cast<double>(op.k));
        break;
      case OpKind::moe: {
        const MoeShape shape = part.moe(1);
        const CurveChoice choice = find_moe_curve(profile, shape, place);
        part.curve = *choice.curve;
        sources_.add(part.curve);
        part.outside = part.outside || choice.stand_in;
        within(part.curve, "hidden", shape.hidden);
        within(part.curve, "intermediate", shape.intermediate);
        within(part.curve, "experts", shape.experts);
        within(part.curve, "topk", shape.topk);
        within(part.curve, "expert_parallel", shape.expert_parallel);
        break;
      }
      case OpKind::allreduce:
        part.curve = choose(CurveOp::allreduce, Dtype::bf16);
        part.rank = options_.overheads.rank;
        part.unsynchronised_bytes = op.gpus == parallelism.tensor && options_.fuse_allreduce_rms
                                        ? fused_allreduce_bytes(gpu, op.gpus)
                                        : 0;
        break;
      case OpKind::allgather:
      case OpKind::reducescatter: {
        const CurveOp collective = op.kind == OpKind::allgather ? CurveOp::allgather : CurveOp::reducescatter;
        const CurveChoice choice =
            find_collective(profile, collective, Dtype::bf16, op.gpus, CollectiveMode::nccl, place);
        part.curve = *choice.curve;
        sources_.add(part.curve);
        part.outside = part.outside || choice.stand_in;
        part.rank = options_.overheads.rank;
        break;
      }
      case OpKind::elementwise:
        part.curve.regimes = {elementwise_fit(gpu)};
        break;
      case OpKind::linear_attention: {
        // No table: arithmetic at prefill attention's rate, memory as elementwise kernels.
        const Curve& attending = choose(CurveOp::attention_prefill, Dtype::bf16);
        const Coefficients& measured = attending.regimes[0];
        Coefficients fit;
        fit.launch_ns = measured.launch_ns * attending.efficiency.factor;
        fit.flops_per_ns = measured.flops_per_ns / attending.efficiency.factor;
        fit.bytes_per_ns = kElementwiseBandwidth * gpu.hbm_bytes_per_ns;
        fit.overlap = measured.overlap;
        Curve curve;
        curve.regimes = {fit};
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
    const bool quantized_query = op.kind == OpKind::attention && bytes_per_element(kv) < 2;
    parts.push_back(std::move(part));
    if (quantized_query) {  // fp8 keys are multiplied by fp8 queries, which another kernel makes
      Part quantize;
      quantize.op.kind = OpKind::elementwise;
      quantize.op.name = "query_quant";
      quantize.op.bytes_per_token = std::int64_t{3} * op.heads * op.head_dim;
      quantize.op.count = op.count;
      quantize.launches = op.count * slowest;
      quantize.curve.regimes = {elementwise_fit(gpu)};
      parts.push_back(std::move(quantize));
    }
    if (op.kind == OpKind::moe && nodes > 1) {
      Part exchange;
      exchange.op = op;
      exchange.op.kind = OpKind::allgather;
      exchange.op.name = "dispatch_combine";
      exchange.op.weights = 0;
      exchange.op.moe_tensor = parallelism.tensor;  // each of them brings its share of the tokens
      exchange.op.gpus = parallelism.tensor * parallelism.data;
      exchange.launches = op.count * slowest;
      exchange.outside = true;
      exchange.fabric = &find_expert_fabric(options.expert_fabric, place);
      exchange.nodes = nodes;
      parts.push_back(std::move(exchange));
    }
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

  const auto size = static_cast<std::size_t>(options_.max_num_batched_tokens) + 1;
  by_tokens_.resize(size);
  by_sampled_.resize(size);
  if (data_ > 1) by_met_.resize(size);
  for (std::int32_t rows = 1; rows <= options_.max_num_batched_tokens; ++rows) {
    const auto i = static_cast<std::size_t>(rows);
    for (const Part& part : parts) {
      if (part.attention >= 0) continue;
      Cost& cost = (part.op.sampled_rows ? by_sampled_ : part.met ? by_met_ : by_tokens_)[i];
      const double run = part.op.sampled_rows ? rows : graph_size(rows, options_.max_graph);
      const double ns = (part.launches - fused_norms(part, run)) * part.time(run).ns;
      cost.ns += ns;
      if (part.outside_at(run)) cost.outside += ns;
    }
    Cost& step = by_tokens_[i];
    const double beside = shared_beside_routed(parts, graph_size(rows, options_.max_graph));
    if (beside > 0) step.outside *= 1 - beside / step.ns;  // of what is left, the same share
    step.ns -= beside;
  }
  parts_ = std::make_shared<const std::vector<Part>>(std::move(parts));
}

namespace {

AttentionShape decode_rows(const StepShape& s, bool window) {
  const auto context = static_cast<double>(window ? s.decode_window_context : s.decode_context);
  const auto rows = static_cast<double>(s.decode_requests);
  return {rows, context, context, rows, static_cast<double>(s.decode_context)};
}

AttentionShape prefill_rows(const StepShape& s, bool window) {
  return {static_cast<double>(s.prefill_tokens),
          static_cast<double>(window ? s.prefill_window_pairs : s.prefill_pairs),
          static_cast<double>(window ? s.prefill_window_context : s.prefill_context),
          static_cast<double>(s.prefill_requests)};
}

}  // namespace

// The kernel's time, and whether its requests, or the context of the mean one, exceed what was measured.
inline KernelTime StepModel::Attention::decode_time(const StepShape& s, bool& beyond) const {
  AttentionShape rows = decode_rows(s, window);
  beyond = outside || rows.tokens > decode_requests || rows.context > decode_context * rows.tokens;
  if (s.draft_tokens > 0) {
    beyond = true;
    const double each = (rows.tokens + s.draft_tokens) / rows.tokens;  // queries of the mean row
    const double blocks =
        queries > 0 ? std::ceil(each * queries / kTileQueries) / std::ceil(queries / kTileQueries) : each;
    rows.pairs += static_cast<double>(window ? s.draft_window_pairs : s.draft_pairs);
    rows.tokens *= blocks;
    rows.context *= blocks;
    rows.requests *= blocks;
    rows.held *= blocks;
  }
  return decode.time(rows);
}

inline KernelTime StepModel::Attention::prefill_time(const StepShape& s, bool& beyond) const {
  const AttentionShape rows = prefill_rows(s, window);
  const auto requests = static_cast<double>(s.prefill_requests);
  beyond = outside || requests > prefill_requests || rows.context > prefill_context * requests;
  return prefill.time(rows);
}

// Of the mean data-parallel rank.
inline std::int32_t StepModel::met_tokens(const StepShape& shape) const {
  if (shape.other_tokens < 0) return shape.tokens();
  return std::min((shape.tokens() + shape.other_tokens + data_ - 1) / data_, options_.max_num_batched_tokens);
}

// What a step's kernels take on the GPU. Requires tokens. Inlined by order: time() is the simulator's hottest
// function, and a call costs it a third.
[[gnu::always_inline]] inline StepModel::Cost StepModel::kernels(const StepShape& shape) const {
  const std::int32_t tokens = shape.tokens();
  const Cost& every = by_tokens_[static_cast<std::size_t>(tokens)];
  const Cost& sampled = by_sampled_[static_cast<std::size_t>(shape.sampled_requests)];
  double ns = every.ns + sampled.ns, outside = every.outside + sampled.outside;
  if (data_ > 1) {
    const Cost& met = by_met_[static_cast<std::size_t>(met_tokens(shape))];
    ns += met.ns;
    outside += met.outside;
  }
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
  return {ns, outside};
}

namespace {

// The drafter's first pass: all that the model has just computed, and a draft for each sequence.
StepShape first_pass(const StepShape& shape) {
  StepShape pass = shape;
  pass.sampled_requests = shape.decode_requests + shape.prefill_requests;
  return pass;
}

// Its mean pass after that: one token of each sequence, which the drafts before it precede.
StepShape next_pass(const StepShape& shape, std::int32_t drafts) {
  StepShape pass;
  pass.decode_requests = pass.sampled_requests = shape.decode_requests + shape.prefill_requests;
  pass.decode_context =
      shape.decode_context + shape.prefill_context + std::int64_t{pass.decode_requests} * drafts / 2;
  pass.decode_window_context = shape.decode_window_context + shape.prefill_window_context;
  return pass;
}

}  // namespace

void StepModel::draft_with(std::shared_ptr<const StepModel> drafter, std::int32_t drafts) {
  layers_ += drafts * drafter->layers_;
  sources_.add(drafter->sources_);
  drafter_ = std::move(drafter);
  drafts_ = drafts;
}

// What drafting adds to a step.
[[gnu::noinline]] StepModel::Cost StepModel::drafting(const StepShape& shape) const {
  Cost sum;
  StepShape pass = first_pass(shape);
  for (std::int32_t left = drafts_, times = 1; left > 0; left -= times, times = left) {
    const Cost cost = drafter_->kernels(pass);
    sum.ns += times * cost.ns;
    sum.outside += times * cost.outside;
    pass = next_pass(shape, drafts_);
  }
  return sum;
}

StepTime StepModel::time(const StepShape& shape) const {
  if (shape.tokens() == 0) return {};
  auto [ns, outside] = kernels(shape);
  if (drafter_ != nullptr) {
    const Cost drafts = drafting(shape);
    ns += drafts.ns;
    outside += drafts.outside;
  }
  const bool extrapolated = outside > kOutsideShare * ns;
  const double host = host_ns(shape), launch = launch_ns(shape), gpu = options_.overheads.gpu;
  return {ceil_ns(options_.async_scheduling ? std::max(ns + gpu, host + launch)
                                            : std::max(ns, launch) + gpu + host),
          extrapolated};
}

// The host's work on a step, and its launches of the step's kernels.
double StepModel::host_ns(const StepShape& shape) const {
  return options_.overheads.step +
         options_.overheads.request * (shape.decode_requests + shape.prefill_requests);
}

double StepModel::launch_ns(const StepShape& shape) const {
  Launch how = options_.graphs;
  if (shape.tokens() > options_.max_graph) how = Launch::none;
  if (how == Launch::full && shape.prefill_tokens > 0) how = Launch::piecewise;
  return options_.overheads.launch[static_cast<std::size_t>(how)] * layers_;
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
    const double rows = part.op.sampled_rows
                            ? shape.sampled_requests
                            : graph_size(part.met ? met_tokens(shape) : shape.tokens(), options_.max_graph);
    if (rows > 0) {
      add(part.op.name, part.launches - fused_norms(part, rows), part.time(rows), part.outside_at(rows));
    }
  }
  if (drafter_ != nullptr) {
    const auto draft = [&](const StepShape& pass, std::int32_t times) {
      for (OpTime& op : drafter_->breakdown(pass)) {
        op.name = "draft " + op.name;
        op.count *= times;
        op.us *= times;
        result.push_back(std::move(op));
      }
    };
    draft(first_pass(shape), 1);
    if (drafts_ > 1) draft(next_pass(shape, drafts_), drafts_ - 1);
  }
  const double beside = shared_beside_routed(*parts_, graph_size(shape.tokens(), options_.max_graph));
  if (beside > 0) result.push_back({"shared beside routed", 1, -beside / 1e3, Regime::launch, false});
  // What the host adds beyond the GPU's time: all of it, or what is not hidden.
  double gpu = options_.overheads.gpu;
  if (gpu > 0) add("sampling", 1, {gpu, 0, 0, gpu, 1}, false);
  double busy = 0;
  for (const OpTime& op : result) busy += op.us * 1e3;
  const double host = static_cast<double>(time(shape).ns) - busy;
  if (host >= 1) add("host", 1, {host, 0, 0, host, 1}, false);
  return result;
}

Work StepModel::work(const StepTotals& totals) const {
  Work sum;
  if (totals.steps == 0) return sum;
  const auto steps = static_cast<double>(totals.steps);
  const auto mean = [&](std::int64_t total) { return static_cast<double>(total) / steps; };
  const double decode = mean(totals.decode_requests + totals.draft_tokens),
               prefill = mean(totals.prefill_tokens);
  for (const Part& part : *parts_) {
    const auto add = [&](double launching_steps, const KernelWork& work) {  // of one launch in their mean
      sum.flops += part.op.count * launching_steps / stages_ * work.flops;
      sum.hbm_bytes += part.op.count * launching_steps / stages_ * work.bytes;
    };
    if (part.attention >= 0) {
      const bool window = part.op.window > 0;
      const double context = mean(window ? totals.decode_window_context : totals.decode_context);
      const double drafted = mean(window ? totals.draft_window_pairs : totals.draft_pairs);
      if (decode > 0) add(steps, part.decode_work.work({decode, context + drafted, context}));
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
  if (drafter_ != nullptr) {
    const auto draft = [&](const StepTotals& passes, std::int32_t times) {
      const Work work = drafter_->work(passes);
      sum.flops += times * work.flops;
      sum.hbm_bytes += times * work.hbm_bytes;
    };
    StepTotals first = totals;
    first.sampled_requests = totals.decode_requests + totals.prefill_requests;
    first.sampling_steps = totals.steps;
    draft(first, 1);
    StepTotals next;  // as next_pass(); experts as if every step had the mean number of sequences
    next.steps = next.sampling_steps = totals.steps;
    next.decode_requests = next.sampled_requests = first.sampled_requests;
    next.decode_context =
        totals.decode_context + totals.prefill_context + first.sampled_requests * drafts_ / 2;
    next.decode_window_context = totals.decode_window_context + totals.prefill_window_context;
    next.steps_of_tokens.resize(static_cast<std::size_t>(std::llround(mean(first.sampled_requests))) + 1);
    next.steps_of_tokens.back() = totals.steps;
    if (drafts_ > 1) draft(next, drafts_ - 1);
  }
  return sum;
}

}  // namespace pdsim
