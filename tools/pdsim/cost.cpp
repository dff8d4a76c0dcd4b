// pdsim cost: what the cost model says of one operation.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "models/attention.hpp"
#include "models/collective.hpp"
#include "models/copy.hpp"
#include "models/gemm.hpp"
#include "models/hardware.hpp"
#include "models/model.hpp"
#include "models/moe.hpp"
#include "models/profile.hpp"
#include "models/step_model.hpp"
#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"

namespace pdsim {
namespace {

struct CostOptions {
  std::string op, gpu, profile;
  std::vector<std::string> arguments;
  bool json = false;
};

/// key=value words of one operation, against the keys that it has.
class Arguments {
 public:
  Arguments(std::string_view op, const std::vector<std::string>& words,
            const std::vector<std::string_view>& known)
      : place_(fmt::format("cost {}", op)) {
    for (const std::string& word : words) {
      const std::size_t equals = word.find('=');
      const std::string key = word.substr(0, equals);
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        throw InputError(place_, fmt::format("'{}' is not known here{}: expected {}=...", key,
                                             did_you_mean(key, known), fmt::join(known, "=..., ")));
      }
      if (equals == std::string::npos)
        throw InputError(place_, fmt::format("'{}' has no value: expected {}=...", word, word));
      if (!values_.emplace(key, word.substr(equals + 1)).second) {
        throw InputError(place_, fmt::format("'{}' is given twice", key));
      }
    }
  }

  const std::string& place() const { return place_; }
  std::string at(std::string_view key) const { return fmt::format("{}: {}", place_, key); }
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }

  std::string text(std::string_view key) const {
    const auto found = values_.find(key);
    if (found == values_.end())
      throw InputError(place_, fmt::format("'{}' is missing: expected {}=...", key, key));
    return found->second;
  }
  std::string text(std::string_view key, std::string_view absent) const {
    const auto found = values_.find(key);
    return found == values_.end() ? std::string(absent) : found->second;
  }
  std::int64_t integer(std::string_view key, std::int64_t least) const {
    const std::string value = text(key);
    std::size_t used = 0;
    std::int64_t number = least - 1;
    try {
      number = std::stoll(value, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != value.size() || used == 0 || number < least || number > kMost) {
      throw InputError(at(key), fmt::format("'{}': expected an integer from {} to {}", value, least, kMost));
    }
    return number;
  }
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t absent) const {
    return values_.contains(key) ? integer(key, least) : absent;
  }
  std::int32_t small(std::string_view key, std::int64_t least, std::int64_t absent = -1) const {
    const std::int64_t value = absent < 0 ? integer(key, least) : integer(key, least, absent);
    if (value > INT32_MAX)
      throw InputError(at(key), fmt::format("'{}': expected at most {}", value, INT32_MAX));
    return static_cast<std::int32_t>(value);
  }
  Dtype dtype(std::string_view key, std::string_view absent) const {
    return dtype_of(text(key, absent), at(key));
  }

 private:
  static constexpr std::int64_t kMost = std::int64_t{1} << 50;
  std::string place_;
  std::map<std::string, std::string, std::less<>> values_;
};

struct Answer {
  double us = 0;
  Regime regime = Regime::launch;
  bool extrapolated = false;
  const Curve* curve = nullptr;   ///< none: a rule of thumb, a copy, or a whole step
  std::vector<OpTime> operators;  ///< of a step
  const CopyCurve* copy = nullptr;
};

struct Context {
  const Gpu& gpu;
  const Profile& profile;
};

/// Of a calibrated profile what the engine's kernel takes.
Answer answer(const KernelTime& time, const CurveChoice& choice, bool outside) {
  return {time.ns / 1e3 * choice.curve->efficiency.factor,
          time.regime(),
          choice.stand_in || outside,
          choice.curve,
          {}};
}

double number(std::int64_t value) {
  return static_cast<double>(value);
}

Answer gemm(const Arguments& in, const Context& on) {
  const GemmShape shape{number(in.integer("m", 1)), number(in.integer("n", 1)), number(in.integer("k", 1)),
                        in.dtype("dtype", "bf16")};
  const CurveChoice choice = find_curve(on.profile, CurveOp::gemm, shape.dtype, in.at("dtype"));
  const Curve& curve = *choice.curve;
  return answer(gemm_time(curve, on.gpu.sm_count, shape), choice,
                !curve.holds("m", shape.m) || !curve.holds("n", shape.n) || !curve.holds("k", shape.k));
}

Answer attention(const Arguments& in, const Context& on, bool decode) {
  Operator op;
  op.kind = OpKind::attention;
  op.heads = in.small("heads", 1);
  op.kv_heads = in.small("kv_heads", 1);
  op.head_dim = op.v_head_dim = in.small("head_dim", 1, 128);
  op.window = in.small("window", 0, 0);
  const Dtype kv = in.dtype("kv_dtype", "bf16");
  if (op.heads % op.kv_heads != 0)
    throw InputError(in.at("kv_heads"),
                     fmt::format("{}: expected a divisor of heads={}", op.kv_heads, op.heads));
  const double requests = number(decode ? in.integer("batch", 1) : in.integer("requests", 1, 1));
  const double tokens = decode ? 1 : number(in.integer("tokens", 1));
  const double prefix = number(decode ? in.integer("context", 1) - 1 : in.integer("prefix", 0, 0));
  const CurveChoice choice =
      find_curve(on.profile, decode ? CurveOp::attention_decode : CurveOp::attention_prefill, kv,
                 in.at("kv_dtype"), op.head_dim, op.window);
  const Curve& curve = *choice.curve;
  const AttentionKernel kernel = attention_kernel(curve, on.gpu.sm_count, op, kv);
  AttentionShape rows = attention_rows(requests, tokens, prefix, op.window);
  if (decode) rows.context = rows.pairs;
  rows.held = requests * (prefix + tokens);
  return answer(kernel.time(rows), choice,
                !curve.holds("heads", op.heads) || !curve.holds("kv_heads", op.kv_heads) ||
                    !curve.holds("requests", requests) || !curve.holds("context", prefix + tokens));
}

Answer attention_prefill(const Arguments& in, const Context& on) {
  return attention(in, on, false);
}

Answer attention_decode(const Arguments& in, const Context& on) {
  return attention(in, on, true);
}

/// Latent attention on one rank, without the layer's projections: DeepSeek's sizes where none are given.
Answer latent(const Arguments& in, const Context& on, CurveOp curve_op) {
  const bool decode = curve_op == CurveOp::mla_decode || curve_op == CurveOp::dsa_decode;
  Operator op;
  op.kind = curve_op == CurveOp::mla_prefill || curve_op == CurveOp::mla_decode ? OpKind::mla_attention
                                                                                : OpKind::dsa_attention;
  op.heads = in.small("heads", 1);
  op.kv_heads = 1;
  op.head_dim = in.small("head_dim", 1, 128);
  op.v_head_dim = in.small("v_head_dim", 1, 128);
  op.latent = 512;
  op.rope = 64;
  if (op.kind == OpKind::dsa_attention) {
    op.index_topk = in.small("topk", 1, 2048);
    op.index_heads = in.small("index_heads", 1, 64);
    op.index_head_dim = 128;
  }
  const Dtype kv = in.dtype("kv_dtype", "bf16");
  const double requests = number(decode ? in.integer("batch", 1) : in.integer("requests", 1, 1));
  const double tokens = decode ? 1 : number(in.integer("tokens", 1));
  const double prefix = number(decode ? in.integer("context", 1) - 1 : in.integer("prefix", 0, 0));
  const CurveChoice choice = find_curve(on.profile, curve_op, kv, in.at("kv_dtype"));
  const Curve& curve = *choice.curve;
  return answer(
      attention_kernel(curve, on.gpu.sm_count, op, kv).time(attention_rows(requests, tokens, prefix, 0)),
      choice,
      !curve.holds("heads", op.heads) || !curve.holds("requests", requests) ||
          !curve.holds("context", prefix + tokens));
}

Answer mla_prefill(const Arguments& in, const Context& on) {
  return latent(in, on, CurveOp::mla_prefill);
}

Answer mla_decode(const Arguments& in, const Context& on) {
  return latent(in, on, CurveOp::mla_decode);
}

Answer dsa_prefill(const Arguments& in, const Context& on) {
  return latent(in, on, CurveOp::dsa_prefill);
}

Answer dsa_decode(const Arguments& in, const Context& on) {
  return latent(in, on, CurveOp::dsa_decode);
}

/// "balanced" or "power_law_A", as tables write it.
double routing_of(const std::string& text, const std::string& place) {
  if (text == "balanced") return 0;
  constexpr std::string_view kPower = "power_law_";
  double exponent = 0;
  if (text.starts_with(kPower)) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kPower.size(), end, exponent);
    if (error != std::errc() || stop != end) exponent = 0;
  }
  if (exponent > 0 && exponent <= 10) return exponent;
  throw InputError(place, fmt::format("'{}': expected balanced or power_law_A, A above 0, as 1.2", text));
}

Answer moe(const Arguments& in, const Context& on) {
  MoeShape shape;
  shape.tokens = number(in.integer("tokens", 1));
  shape.hidden = number(in.integer("hidden", 1));
  shape.experts = number(in.integer("experts", 1));
  constexpr double kMostExperts = 4096;
  if (shape.experts > kMostExperts) {
    throw InputError(in.at("experts"), fmt::format("{}: expected at most {}", shape.experts, kMostExperts));
  }
  shape.topk = number(in.integer("topk", 1));
  shape.expert_parallel = number(in.integer("ep", 1, 1));
  if (std::fmod(shape.experts, shape.expert_parallel) != 0) {
    throw InputError(in.at("ep"), fmt::format("{}: expected a divisor of experts={}", shape.expert_parallel,
                                              shape.experts));
  }
  shape.intermediate = number(in.integer("intermediate", 1)) / number(in.integer("tp", 1, 1));
  shape.dtype = in.dtype("dtype", "bf16");
  shape.routing = routing_of(in.text("routing", fmt::format("power_law_{}", kRouting)), in.at("routing"));
  shape.gated = gated_experts(shape.hidden, number(in.integer("intermediate", 1)), shape.experts, shape.topk);
  if (shape.topk > shape.experts)
    throw InputError(in.at("topk"),
                     fmt::format("{}: expected at most experts={}", shape.topk, shape.experts));
  const CurveChoice choice = find_moe_curve(on.profile, shape, in.at("dtype"));
  const Curve& curve = *choice.curve;
  return answer(moe_time(curve, shape), choice,
                !curve.holds("tokens", shape.tokens) || !curve.holds("hidden", shape.hidden) ||
                    !curve.holds("intermediate", shape.intermediate) ||
                    !curve.holds("experts", shape.experts) || !curve.holds("topk", shape.topk) ||
                    !curve.holds("expert_parallel", shape.expert_parallel));
}

Answer collective(const Arguments& in, const Context& on, CurveOp op, CollectiveMode mode) {
  const double bytes = number(in.integer("bytes", 1));
  const CurveChoice choice =
      find_collective(on.profile, op, in.dtype("dtype", "bf16"), in.small("gpus", 2), mode, in.place());
  return answer(collective_time(*choice.curve, bytes), choice, !choice.curve->holds("bytes", bytes));
}

Answer allreduce(const Arguments& in, const Context& on) {
  return collective(in, on, CurveOp::allreduce, collective_mode_of(in.text("mode", "graph"), in.at("mode")));
}

Answer allgather(const Arguments& in, const Context& on) {
  return collective(in, on, CurveOp::allgather, CollectiveMode::nccl);
}

Answer reducescatter(const Arguments& in, const Context& on) {
  return collective(in, on, CurveOp::reducescatter, CollectiveMode::nccl);
}

Answer alltoall(const Arguments& in, const Context& on) {
  return collective(in, on, CurveOp::alltoall, CollectiveMode::nccl);
}

/// Data-sheet grade throughout: extrapolated.
Answer dispatch_combine(const Arguments& in, const Context&) {
  const double ranks = number(in.integer("ranks", 2)), nodes = number(in.integer("nodes", 1));
  if (nodes > ranks)
    throw InputError(in.at("nodes"), fmt::format("{}: expected at most ranks={}", nodes, ranks));
  const KernelTime time =
      dispatch_combine_time(number(in.integer("tokens", 1)), number(in.integer("hidden", 1)),
                            number(in.integer("topk", 1)), in.dtype("dtype", "fp8"), ranks, nodes,
                            find_expert_fabric(in.text("fabric", "efa-h100"), in.at("fabric")));
  return {time.ns / 1e3, time.regime(), true, nullptr, {}};
}

Answer kv_copy(const Arguments& in, const Context& on) {
  const auto& values = in.values();
  if (!values.contains("kind")) {
    for (const char* key : {"run_bytes", "runs", "sms"}) {
      if (values.contains(key))
        throw InputError(in.at(key), "is of a measured copy: expected kind=... beside it");
    }
  } else {
    if (values.contains("bytes"))
      throw InputError(in.at("bytes"), "follow from run_bytes x runs where kind is given");
    const CopyCurve& curve = find_copy(on.profile, in.text("kind"), in.at("kind"));
    const auto sms = curve.range.find("sms");
    const bool engine = sms == curve.range.end() || sms->second.most == 0;
    const CopyShape shape{number(in.integer("run_bytes", 1)), number(in.integer("runs", 1)),
                          engine ? number(in.integer("sms", 0, 0)) : number(in.integer("sms", 1))};
    const KernelTime time = copy_time(curve, shape);
    Answer result{time.ns / 1e3, time.regime(), !curve.holds(shape), nullptr, {}};
    result.copy = &curve;
    return result;
  }
  const KernelTime time = stream_time(elementwise_fit(on.gpu), 2 * number(in.integer("bytes", 1)));
  return {time.ns / 1e3, time.regime(), true, nullptr, {}};
}

Answer step(const Arguments& in, const Context& on) {
  const ModelSpec model = load_model(in.text("model"), in.at("model"));
  Parallelism parallelism;
  parallelism.tensor = in.small("tp", 1, 1);
  parallelism.pipeline = in.small("pp", 1, 1);
  parallelism.expert = in.small("ep", 1, 1);
  const Dtype weights = in.dtype("weights_dtype", name(model.weights_dtype));
  check_parallelism(model, parallelism, in.place(), weights);
  const std::int32_t batch = in.small("batch", 0, 0), prefill = in.small("prefill", 0, 0);
  if (batch + prefill == 0)
    throw InputError(in.place(), "the step is empty: expected batch=... or prefill=...");
  StepShape shape;
  shape.decode_requests = batch;
  shape.sampled_requests = batch + (prefill > 0 ? 1 : 0);
  if (batch > 0) {
    const double context = number(in.integer("context", 1));
    shape.decode_context = std::llround(batch * context);
    shape.decode_window_context = std::llround(attention_rows(batch, 1, context - 1, model.window).pairs);
  }
  if (prefill > 0) {
    const double prefix = number(in.integer("prefix", 0, 0));
    const AttentionShape full = attention_rows(1, prefill, prefix, 0),
                         window = attention_rows(1, prefill, prefix, model.window);
    shape.prefill_requests = 1;
    shape.prefill_tokens = prefill;
    shape.prefill_pairs = std::llround(full.pairs);
    shape.prefill_context = std::llround(full.context);
    shape.prefill_window_pairs = std::llround(window.pairs);
    shape.prefill_window_context = std::llround(window.context);
  }
  StepOptions options;
  options.max_num_batched_tokens = batch + prefill;
  options.overheads = load_overheads("vllm");
  const StepModel costs(model, parallelism, weights, in.dtype("kv_dtype", "bf16"), on.gpu, on.profile,
                        options);
  const StepTime time = costs.time(shape);
  Answer result{static_cast<double>(time.ns) / 1e3, Regime::launch, time.extrapolated, nullptr,
                costs.breakdown(shape)};
  // The step's regime: the one that most of its time is in.
  double sums[3] = {};
  for (const OpTime& op : result.operators) sums[static_cast<std::size_t>(op.regime)] += op.us;
  result.regime = static_cast<Regime>(std::max_element(std::begin(sums), std::end(sums)) - std::begin(sums));
  return result;
}

struct Operation {
  std::string_view name;
  std::vector<std::string_view> keys;
  Answer (*cost)(const Arguments&, const Context&);
  std::string_view example;
};

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      {"gemm", {"m", "n", "k", "dtype"}, gemm, "m=64 n=8192 k=8192 dtype=fp8"},
      {"attention-prefill",
       {"tokens", "prefix", "requests", "heads", "kv_heads", "head_dim", "kv_dtype", "window"},
       attention_prefill,
       "tokens=2048 prefix=6144 heads=16 kv_heads=2"},
      {"attention-decode",
       {"batch", "context", "heads", "kv_heads", "head_dim", "kv_dtype", "window"},
       attention_decode,
       "batch=64 context=4096 heads=16 kv_heads=2"},
      {"mla-prefill",
       {"tokens", "prefix", "requests", "heads", "head_dim", "v_head_dim", "kv_dtype"},
       mla_prefill,
       "tokens=2048 prefix=6144 heads=16"},
      {"mla-decode",
       {"batch", "context", "heads", "head_dim", "v_head_dim", "kv_dtype"},
       mla_decode,
       "batch=64 context=4096 heads=16"},
      {"dsa-prefill",
       {"tokens", "prefix", "requests", "heads", "head_dim", "v_head_dim", "kv_dtype", "topk", "index_heads"},
       dsa_prefill,
       "tokens=2048 prefix=6144 heads=16"},
      {"dsa-decode",
       {"batch", "context", "heads", "head_dim", "v_head_dim", "kv_dtype", "topk", "index_heads"},
       dsa_decode,
       "batch=64 context=4096 heads=16"},
      {"moe",
       {"tokens", "hidden", "intermediate", "experts", "topk", "tp", "ep", "dtype", "routing"},
       moe,
       "tokens=64 hidden=4096 intermediate=1536 experts=128 topk=8 tp=4 dtype=fp8_block"},
      {"allreduce", {"bytes", "gpus", "mode", "dtype"}, allreduce, "bytes=1048576 gpus=8 mode=graph"},
      {"all-gather", {"bytes", "gpus", "dtype"}, allgather, "bytes=1048576 gpus=8"},
      {"reduce-scatter", {"bytes", "gpus", "dtype"}, reducescatter, "bytes=1048576 gpus=8"},
      {"all-to-all", {"bytes", "gpus", "dtype"}, alltoall, "bytes=1048576 gpus=8"},
      {"dispatch-combine",
       {"tokens", "hidden", "topk", "dtype", "ranks", "nodes", "fabric"},
       dispatch_combine,
       "tokens=128 hidden=7168 topk=8 ranks=16 nodes=2 fabric=efa-h100"},
      {"kv-copy", {"bytes", "kind", "run_bytes", "runs", "sms"}, kv_copy, "bytes=134217728"},
      {"step",
       {"model", "tp", "pp", "ep", "batch", "context", "prefill", "prefix", "weights_dtype", "kv_dtype"},
       step,
       "model=qwen3-32b tp=4 batch=64 context=4096 prefill=512"},
  };
  return all;
}

std::string as_json(const CostOptions& options, const Arguments& in, const Context& on,
                    const Answer& result) {
  nlohmann::ordered_json json;
  json["schema"] = "pdsim.cost/1";
  json["op"] = options.op;
  json["gpu"] = on.gpu.name;
  json["profile"] = on.profile.name;
  if (on.profile.datasheet) json["datasheet"] = true;
  json["arguments"] = in.values();
  json["us"] = result.us;
  json["regime"] = name(result.regime);
  json["extrapolated"] = result.extrapolated;
  if (result.curve != nullptr) {
    json["curve"] = {{"kernel", result.curve->kernel},
                     {"dtype", name(result.curve->dtype)},
                     {"median_ape", result.curve->error.median_ape},
                     {"p90_ape", result.curve->error.p90_ape}};
    const Curve& curve = *result.curve;
    if (curve.origin == Origin::here) json["curve"]["engine_efficiency"] = curve.efficiency.factor;
    if (curve.origin == Origin::own_kernel) json["curve"]["own_kernel"] = true;
    if (curve.origin == Origin::taken) json["curve"]["taken_from"] = on.profile.calibration->engine;
  }
  if (result.copy != nullptr) {
    json["copy"] = {{"kind", result.copy->kind},
                    {"median_ape", result.copy->error.median_ape},
                    {"p90_ape", result.copy->error.p90_ape}};
  }
  if (!result.operators.empty()) json["operators"] = nlohmann::ordered_json::array();
  for (const OpTime& op : result.operators) {
    json["operators"].push_back({{"name", op.name},
                                 {"count", op.count},
                                 {"us", op.us},
                                 {"regime", name(op.regime)},
                                 {"extrapolated", op.extrapolated}});
  }
  return json.dump(2) + "\n";
}

std::string as_text(const Context& on, const Answer& result) {
  std::string out;
  for (const OpTime& op : result.operators) {
    out += fmt::format("{:<28} x{:<4} {:>12.1f} us  {:<9}{}\n", op.name, op.count, op.us, name(op.regime),
                       op.extrapolated ? "  extrapolated" : "");
  }
  const std::string_view range = result.extrapolated ? "extrapolated" : "within the measured range";
  out += fmt::format("{:.1f} us, {}-bound, {}\n", result.us, name(result.regime), range);
  if (result.curve == nullptr && on.profile.datasheet) {
    out += fmt::format("curves: scaled from {}, data-sheet grade\n", on.profile.scaled_from);
  }
  if (result.curve != nullptr) {
    const Accuracy& e = result.curve->error;
    const std::string rows = on.profile.datasheet
                                 ? fmt::format("scaled from {}, data-sheet grade", on.profile.scaled_from)
                                 : fmt::format("{} rows", result.curve->rows);
    const std::string error =
        e.rows == 0 ? "error not stated"
                    : fmt::format("median error {:.1f} %, p90 {:.1f} %", 100 * e.median_ape, 100 * e.p90_ape);
    out += fmt::format("curve: {} ({}), {}\n", result.curve->kernel, rows, error);
    const Curve& curve = *result.curve;
    if (curve.origin == Origin::here) {
      out += fmt::format("measured here {:.1f} us x engine efficiency {:.3f} ({} anchors, spread {:.0f} %)\n",
                         result.us / curve.efficiency.factor, curve.efficiency.factor,
                         curve.efficiency.anchors, 100 * curve.efficiency.spread);
    }
    if (curve.origin == Origin::own_kernel) {
      out += "own kernel, measured here: no engine's time of it is known\n";
    }
    if (curve.origin == Origin::taken) {
      out += fmt::format("from {}: not measured here\n", on.profile.calibration->engine);
    }
  }
  if (result.copy != nullptr) {
    const CopyCurve& copy = *result.copy;
    out += fmt::format("copy: {} ({} rows), median error {:.1f} %, p90 {:.1f} %\n", copy.kind, copy.rows,
                       100 * copy.error.median_ape, 100 * copy.error.p90_ape);
  }
  return out;
}

int cost(const CostOptions& options) {
  std::vector<std::string_view> names;
  for (const Operation& each : operations()) names.push_back(each.name);
  const auto found = std::find(names.begin(), names.end(), options.op);
  if (found == names.end()) {
    throw InputError("cost", fmt::format("no operation '{}'{}: expected one of {}", options.op,
                                         did_you_mean(options.op, names), fmt::join(names, ", ")));
  }
  const Operation& operation = operations()[static_cast<std::size_t>(found - names.begin())];
  const Arguments in(operation.name, options.arguments, operation.keys);
  const Gpu& gpu = find_gpu(options.gpu, "--gpu");
  const Profile profile = load_profile(options.profile.empty() ? options.gpu : options.profile,
                                       options.profile.empty() ? "--gpu" : "--profile");
  const Context on{gpu, profile};
  const Answer result = operation.cost(in, on);
  fmt::print("{}", options.json ? as_json(options, in, on, result) : as_text(on, result));
  return kDone;
}

}  // namespace

void add_cost(CLI::App& app, Command& run) {
  const auto options = std::make_shared<CostOptions>();
  CLI::App* command =
      app.add_subcommand("cost", "What the cost model says of one operation, in microseconds");
  std::string footer = "Examples:";
  for (const Operation& each : operations()) {
    footer += fmt::format("\n  pdsim cost {} --gpu h200 {}", each.name, each.example);
  }
  command->footer(footer);
  command
      ->add_option("op", options->op,
                   "gemm, attention-prefill, attention-decode, mla-prefill, mla-decode, dsa-prefill, "
                   "dsa-decode, moe, allreduce, all-gather, reduce-scatter, "
                   "all-to-all, dispatch-combine, kv-copy or step")
      ->required();
  command->add_option("arguments", options->arguments, "key=value ...");
  command->add_option("--gpu", options->gpu, "A name in models/gpus.json")->required();
  command->add_option("--profile", options->profile,
                      "Kernel profile: a name or a JSON file (default: the GPU's)");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->callback([options, &run] { run = [options] { return cost(*options); }; });
}

}  // namespace pdsim
