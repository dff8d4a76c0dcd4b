// What one engine step costs: the only face of the cost models that the simulator sees.
//
// A step runs one batch through one model replica (a tensor-parallel group). Its time depends on the
// batch only through the sums below, so a step is O(1) to describe however many requests are in it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/attention.hpp"
#include "models/cost_sources.hpp"
#include "models/gemm.hpp"
#include "models/moe.hpp"
#include "models/overheads.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

struct Gpu;
struct ModelSpec;
struct Parallelism;
struct Profile;

/// The work of one step. Decode rows compute one token each, or with speculative decoding one and the
/// drafts that it verifies (n queries after p tokens that are already in the KV cache); prefill rows compute
/// a chunk of a prompt (n new tokens after p).
struct StepShape {
  std::int32_t decode_requests = 0;
  std::int32_t prefill_requests = 0;
  std::int32_t prefill_tokens = 0;          ///< sum of n
  std::int32_t draft_tokens = 0;            ///< of decode rows: sum of n - 1
  std::int32_t sampled_requests = 0;        ///< queries that go through the LM head
  std::int32_t other_tokens = -1;           ///< of the other data-parallel ranks together; -1: each as many
  std::int64_t decode_context = 0;          ///< KV tokens that decode rows read, their own included
  std::int64_t decode_window_context = 0;   ///< the same, each row cut to the sliding window
  std::int64_t draft_pairs = 0;             ///< of decode rows: visible pairs beyond decode_context
  std::int64_t draft_window_pairs = 0;      ///< the same inside the sliding window
  std::int64_t prefill_pairs = 0;           ///< visible (query, key) pairs: sum of n p + n (n+1) / 2
  std::int64_t prefill_context = 0;         ///< KV tokens that prefill rows read: sum of p + n
  std::int64_t prefill_window_pairs = 0;    ///< pairs inside the sliding window
  std::int64_t prefill_window_context = 0;  ///< KV tokens read inside the sliding window

  std::int32_t tokens() const { return decode_requests + draft_tokens + prefill_tokens; }
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
  std::int64_t prefill_requests = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t draft_tokens = 0;
  std::int64_t sampled_requests = 0;
  std::int64_t decode_context = 0;
  std::int64_t decode_window_context = 0;
  std::int64_t draft_pairs = 0;
  std::int64_t draft_window_pairs = 0;
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

/// How an engine runs its steps.
struct StepOptions {
  std::int32_t max_num_batched_tokens = 8192;  ///< the most tokens of a step
  bool async_scheduling = true;
  Launch graphs = Launch::full;    ///< of steps within max_graph; only decode-only ones are full
  std::int32_t max_graph = 512;    ///< tokens of the largest captured CUDA graph
  Overheads overheads;             ///< beside the kernels
  bool fuse_allreduce_rms = true;  ///< an all-reduce and the norm after it are one kernel, up to a size
  bool tf32 = false;               ///< 32-bit products on tensor cores: VLLM_FLOAT32_MATMUL_PRECISION=high
  std::int32_t gpus_per_node = 8;  ///< that NVLink joins
  std::string expert_fabric =
      "infiniband";  ///< what carries tokens to experts on other nodes: of expert_fabrics()
  std::map<std::string, std::string>
      kernels;  ///< operator ("moe") -> a part of the kernel's name in the profile
};

/// A model on the GPUs of one replica, compiled to tables.
///
/// A step is the sum of its operators: those that see every token alike (projections, experts,
/// all-reduces, norms) depend on the number of tokens only and are one table; so is the LM head by
/// sampled rows; attention is a closed form of the sums in StepShape, prefill and decode rows apiece.
/// Steps within the largest captured CUDA graph are padded to the size of one, as vLLM does.
/// Experts spread over ranks on several nodes get their tokens by dispatch and combine over the nodes'
/// network (dispatch_combine_time), not by the collectives of one node; no table has it: extrapolated.
/// Of data-parallel ranks a step is one's own. Its experts meet the tokens of all, which each rank is taken
/// to have as many of as this one unless the shape says what the others have.
/// Pipeline stages run one after another: a step takes the slowest stage's time times the stages, and
/// the sends between them.
///
/// With speculative decoding a decode row has several queries. They share the row's keys and values, and a
/// thread block as far as it has room (64 queries of a KV head: FlashAttention-3's and FlashMLA's tile);
/// beyond that, and in sparse and linear layers always, they are as rows of their own. No table has such
/// rows: their attention counts as extrapolated. The drafter's passes follow the model's.
class StepModel {
 public:
  /// `model`, `parallelism` and `weights` as in operators(); `kv` is the KV cache's format, `profile`
  /// that of `gpu`. InputError when the profile has no curve that could stand in for one that the model
  /// needs, or none of a kernel that the options ask for. Cost: the operators once for each number of
  /// tokens, some milliseconds; meant to be shared by the replicas of a pool.
  StepModel(const ModelSpec& model, const Parallelism& parallelism, Dtype weights, Dtype kv, const Gpu& gpu,
            const Profile& profile, const StepOptions& options = {});

  /// How long a step of this shape takes, rounded up to whole ns; 0 for an empty one. Requires tokens()
  /// and sampled_requests to be at most max_num_batched_tokens. O(1), no allocation: 20 to 35 ns.
  StepTime time(const StepShape& shape) const;

  /// Each step is followed by `drafts` passes of `drafter` (models/drafter.hpp): the first over all its
  /// tokens, the others over one token of each sequence. Its host work beside launches, and the verification
  /// itself, count as nothing. `drafter` is made with no overheads but `rank`.
  void draft_with(std::shared_ptr<const StepModel> drafter, std::int32_t drafts);

  const Overheads& overheads() const { return options_.overheads; }

  /// Of a calibrated profile: which curves its times use, and how (the drafter's included).
  const CostSources& sources() const { return sources_; }

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
    double queries = 0;    ///< of a decode row's query, that share a KV head; 0 = queries share nothing
    bool outside = false;  ///< heads or head size were never measured
    double prefill_requests = 0, prefill_context = 0;  ///< the most measured; context of one request
    double decode_requests = 0, decode_context = 0;

    KernelTime decode_time(const StepShape& shape, bool& beyond) const;
    KernelTime prefill_time(const StepShape& shape, bool& beyond) const;
  };
  struct Part;

  std::vector<Cost> by_tokens_, by_sampled_;
  std::vector<Cost> by_met_;  ///< experts and their exchange, by the mean rank's tokens; data-parallel only
  std::vector<Attention> attention_;
  std::shared_ptr<const std::vector<Part>> parts_;  ///< the operators and their curves
  StepOptions options_;
  CostSources sources_;
  double layers_ = 0;  ///< launched in a step
  std::int32_t stages_ = 1, data_ = 1;

  std::int32_t met_tokens(const StepShape& shape) const;

  std::shared_ptr<const StepModel> drafter_;  ///< null = nothing is drafted, or not by the GPU
  std::int32_t drafts_ = 0;

  Cost kernels(const StepShape& shape) const;
  Cost drafting(const StepShape& shape) const;
  static double fused_norms(const Part& part, double rows);
  static double shared_beside_routed(const std::vector<Part>& parts, std::int32_t tokens);
  double host_ns(const StepShape& shape) const;
  double launch_ns(const StepShape& shape) const;
};

/// What pdsim takes for kernels that only move data and were not measured (norms, activations, copies):
/// a launch, and four fifths of the GPU's memory bandwidth.
Coefficients elementwise_fit(const Gpu& gpu);

/// Nodes of `gpus_per_node` GPUs that the ranks of one pipeline stage lie on: data-parallel ranks follow one
/// another, each with the GPUs of its stages, stage by stage.
std::int32_t expert_nodes(const Parallelism& parallelism, std::int32_t gpus_per_node);

/// The batch size that vLLM's captured graphs pad `tokens` to: 1, 2, 4, then steps of 8 up to 256 and of
/// 16 up to `largest` (vllm/config, cudagraph_capture_sizes); larger batches run as they are.
std::int32_t graph_size(std::int32_t tokens, std::int32_t largest = 512);

}  // namespace pdsim
