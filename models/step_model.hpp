// What one engine step costs: the only face of the cost models that the simulator sees.
//
// A step runs one batch through one model replica (a tensor-parallel group). Its time depends on the
// batch only through the sums below, so a step is O(1) to describe however many requests are in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/curve.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

struct Gpu;
struct ModelSpec;
struct Parallelism;
struct Profile;

/// The work of one step. Decode rows compute one token each; prefill rows compute a chunk of a prompt
/// (n new tokens after p that are already in the KV cache).
struct StepShape {
  std::int32_t decode_requests = 0;
  std::int32_t prefill_requests = 0;
  std::int32_t prefill_tokens = 0;          ///< sum of n
  std::int32_t sampled_requests = 0;        ///< rows that go through the LM head
  std::int64_t decode_context = 0;          ///< KV tokens that decode rows read, their own included
  std::int64_t decode_window_context = 0;   ///< the same, each row cut to the sliding window
  std::int64_t prefill_pairs = 0;           ///< visible (query, key) pairs: sum of n p + n (n+1) / 2
  std::int64_t prefill_context = 0;         ///< KV tokens that prefill rows read: sum of p + n
  std::int64_t prefill_window_pairs = 0;    ///< pairs inside the sliding window
  std::int64_t prefill_window_context = 0;  ///< KV tokens read inside the sliding window

  std::int32_t tokens() const { return decode_requests + prefill_tokens; }
};

/// Pairs (query, key) inside a sliding window: n queries after p tokens, query i sees min(p + i, window)
/// keys, itself included. Requires window >= 1.
inline std::int64_t window_pairs(std::int64_t p, std::int64_t n, std::int64_t window) {
  const std::int64_t growing = window <= p      ? 0
                               : window - p < n ? window - p
                                                : n;  // these see all before them
  return growing * p + growing * (growing + 1) / 2 + (n - growing) * window;
}

/// Keys that those n queries read together: the last window - 1 of the p before them, and their own.
inline std::int64_t window_context(std::int64_t p, std::int64_t n, std::int64_t window) {
  return (p < window - 1 ? p : window - 1) + n;
}

struct StepTime {
  Nanos ns = 0;
  bool extrapolated = false;  ///< operators outside what their curves were fitted on take over a tenth of it
};

/// Sums of StepShape over many steps, for utilisation at the end of a run.
struct StepTotals {
  std::int64_t steps = 0;
  std::int64_t sampling_steps = 0;            ///< those that sampled anything
  std::vector<std::int64_t> steps_of_tokens;  ///< how many steps had this many tokens
  std::int64_t decode_requests = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t sampled_requests = 0;
  std::int64_t decode_context = 0;
  std::int64_t decode_window_context = 0;
  std::int64_t prefill_pairs = 0;
  std::int64_t prefill_context = 0;
  std::int64_t prefill_window_pairs = 0;
  std::int64_t prefill_window_context = 0;
};

/// What steps ask of one GPU's arithmetic units and memory.
struct Work {
  double flops = 0;      ///< multiply-adds count twice
  double hbm_bytes = 0;  ///< weights once a step, KV read and written, activations
};

/// One operator's part of a step, all layers that run it together.
struct OpTime {
  std::string name;
  std::int32_t count = 1;  ///< launches in the step
  double us = 0;           ///< all of them
  Regime regime = Regime::launch;
  bool extrapolated = false;  ///< its shape lies outside what its curve was fitted on
};

/// A model on the GPUs of one replica, compiled to tables.
///
/// A step is the sum of its operators: those that see every token alike (projections, experts,
/// all-reduces, norms) depend on the number of tokens only and are one table; so is the LM head by
/// sampled rows; attention is a closed form of the sums in StepShape, prefill and decode rows apiece.
/// Batches of up to 512 tokens are padded to the size of a captured CUDA graph, as vLLM does.
/// Pipeline stages run one after another: a step takes the slowest stage's time times the stages, and
/// the sends between them.
class StepModel {
 public:
  /// `model`, `parallelism` and `weights` as in operators(); `kv` is the KV cache's format, `profile`
  /// that of `gpu`, `max_num_batched_tokens` the most tokens of a step. A step takes at least the host's
  /// work on it; without `async_scheduling` that comes on top. InputError when the profile has no curve
  /// that could stand in for one that the model needs. Cost: the operators once for each number of
  /// tokens, some milliseconds; meant to be shared by the replicas of a pool.
  StepModel(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv, const Gpu& gpu,
            const Profile& profile, std::int32_t max_num_batched_tokens, bool async_scheduling = true);

  /// How long a step of this shape takes, rounded up to whole ns; 0 for an empty one. Requires tokens()
  /// and sampled_requests to be at most max_num_batched_tokens. O(1), no allocation: 20 to 35 ns.
  StepTime time(const StepShape& shape) const;

  /// The work of many steps on one GPU (the mean one of a pipeline). Exact: experts, of which a step reads
  /// those that its tokens meet, are summed over the steps of each size. O(operators x sizes).
  Work work(const StepTotals& totals) const;

  /// The terms that time() adds up, in the order of a layer. For people: allocates.
  std::vector<OpTime> breakdown(const StepShape& shape) const;

 private:
  struct Cost {
    double ns = 0;
    double outside = 0;  ///< the part of ns that operators outside their curves' ranges have
  };
  struct Attention {
    AttentionKernel prefill, decode;
    double launches = 1;
    bool window = false;
    bool outside = false;                              ///< heads or head size were never measured
    double prefill_requests = 0, prefill_context = 0;  ///< the most measured; context of one request
    double decode_requests = 0, decode_context = 0;

    KernelTime decode_time(const StepShape& shape, bool& beyond) const;
    KernelTime prefill_time(const StepShape& shape, bool& beyond) const;
  };
  struct Part;

  std::vector<Cost> by_tokens_, by_sampled_;
  std::vector<Attention> attention_;
  std::shared_ptr<const std::vector<Part>> parts_;  ///< the operators and their curves
  bool async_scheduling_ = true;
  std::int32_t stages_ = 1;
};

/// What pdsim takes for kernels that only move data and were not measured (norms, activations, copies):
/// a launch, and four fifths of the GPU's memory bandwidth.
Coefficients elementwise_fit(const Gpu& gpu);

/// The batch size that vLLM's captured graphs pad `tokens` to: 1, 2, 4, then steps of 8 up to 256 and of
/// 16 up to 512 (vllm/config, cudagraph_capture_sizes); larger batches run as they are.
std::int32_t graph_size(std::int32_t tokens);

}  // namespace pdsim
