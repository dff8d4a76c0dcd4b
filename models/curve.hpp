// The time of one kernel, as a few coefficients fitted to measurements make it.
//
//   t = launch + element * elements + M(flops / F, bytes / B)
//   M(a, b) = (a + b + sqrt((a + b)^2 - 4 overlap a b)) / 2
//
// M is the larger root of t^2 - (a + b) t + overlap a b = 0, the non-rectangular hyperbola: max(a, b) for
// overlap 1 (arithmetic hides memory), a + b for overlap 0 (one after the other). It fits the tables as
// well as a p-norm does and costs one square root, which IEEE 754 rounds exactly: the same bits on every
// machine. It is convex and homogeneous, hence M(x + y) <= M(x) + M(y): work cut in two parts never
// costs less than the whole.
//
// F counts whole tiles: a kernel that cuts its output into tiles and hands them to the multiprocessors
// in waves pays for the last tile and the last wave in full (see gemm_time). That, and one regime for
// each range of rows in which a library picks another kernel, is what small coefficients can know.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "models/dtype.hpp"

namespace pdsim {

struct Operator;

/// max(a, b) for overlap 1, a + b for overlap 0, smooth between. Requires a, b >= 0.
inline double overlapped(double a, double b, double overlap) {
  const double gap = a - b;  // (a + b)^2 - 4 overlap a b, as a sum of what cannot be negative
  return 0.5 * (a + b + std::sqrt(gap * gap + 4.0 * (1.0 - overlap) * a * b));
}

/// The coefficients of one kernel in one regime. What a kernel has none of is 0.
struct Coefficients {
  double upto = std::numeric_limits<double>::infinity();  ///< the regime's largest size
  double launch_ns = 0;                                   ///< of an empty problem
  double flops_per_ns = 0;  ///< reached on whole tiles (TFLOP/s x 1000); 0: never the limit
  double bytes_per_ns = 0;  ///< reached (GB/s)
  double overlap = 1;
  double element_ns = 0;  ///< gemm: per input element (quantisation); moe: per routed token and hidden unit
  double host_ns = 0;     ///< floor of tables that were measured launch by launch; graphs hide it: not in t
  double ragged = 1;      ///< gemm: factor on arithmetic when m is no multiple of 16
  std::int32_t tile_m = 0, tile_n = 0, cluster = 1;

  // Decode attention: M's compute side also holds what thread blocks cost.
  double wave_ns = 0;     ///< one thread block (a query's KV head) on each multiprocessor
  double walk_ns = 0;     ///< one block's walk along its keys, per key
  double walk_waves = 0;  ///< with fewer waves than this a walk is split among idle multiprocessors
  double split_ns = 0;    ///< the kernel that combines split walks
};

enum class Regime : std::uint8_t { compute, bandwidth, launch };
std::string_view name(Regime regime);

struct KernelTime {
  double launch = 0, compute = 0, memory = 0;  ///< the terms, ns
  double ns = 0;                               ///< what they make together
  double useful = 1;                           ///< share of compute that is not padding of tiles and waves

  /// Which term is the largest, padding aside.
  Regime regime() const {
    const double work = compute * useful;
    if (launch >= work && launch >= memory) return Regime::launch;
    return work >= memory ? Regime::compute : Regime::bandwidth;
  }
};

/// What a kernel asks of the GPU, whatever time that takes.
struct KernelWork {
  double flops = 0;  ///< multiply-adds count twice
  double bytes = 0;  ///< each operand once
};

/// [m, k] x [k, n] with weights [k, n] in `dtype`: activations in the same format where the tensor cores
/// multiply it (fp8, int8), in 16 bits otherwise; the result in 16 bits.
struct GemmShape {
  double m = 0, n = 0, k = 0;
  Dtype dtype = Dtype::bf16;
};
KernelWork gemm_work(const GemmShape& shape);
/// Tiles of tile_m x tile_n, `cluster` of them together along m, in waves over `sms` multiprocessors:
/// ceil(ceil(m / (tile_m cluster)) ceil(n / tile_n) / (sms / cluster)) waves of sms tiles.
KernelTime gemm_time(const Coefficients& fit, std::int32_t sms, const GemmShape& shape);

/// Routed experts on one GPU: `tokens` enter, each picks `topk` of `experts`, 1 / expert_parallel of which
/// live here, each cut to `intermediate` columns (three matrices hidden x intermediate).
struct MoeShape {
  double tokens = 0, hidden = 0, intermediate = 0;
  double experts = 0, topk = 0, expert_parallel = 1;
  Dtype dtype = Dtype::bf16;
};
/// Experts met at least once by `tokens` that choose independently and evenly, of those here:
/// E (1 - (1 - k / E)^T) / expert_parallel.
double active_experts(const MoeShape& shape);
KernelWork moe_work(const MoeShape& shape);
/// Each active expert's rows are padded to tile_m.
KernelTime moe_time(const Coefficients& fit, const MoeShape& shape);

/// Sums over the rows of one attention kernel. In a decode batch pairs equal context.
struct AttentionShape {
  double tokens = 0;   ///< queries
  double pairs = 0;    ///< visible (query, key) pairs
  double context = 0;  ///< KV tokens read
};

/// Work of an attention operator: linear in the sums of AttentionShape and in the pairs that a sparse
/// indexer leaves, min(pairs, topk tokens).
struct AttentionForm {
  double flops_token = 0, flops_pair = 0, flops_context = 0, flops_selected = 0;
  double bytes_step = 0, bytes_token = 0, bytes_context = 0, bytes_selected = 0;
  double blocks_token = 0;  ///< thread blocks a query
  double topk = 0;          ///< 0: no indexer

  double selected(const AttentionShape& s) const {
    return topk * s.tokens < s.pairs ? topk * s.tokens : s.pairs;
  }
  KernelWork work(const AttentionShape& s) const {
    return {flops_token * s.tokens + flops_pair * s.pairs + flops_context * s.context +
                flops_selected * selected(s),
            bytes_step + bytes_token * s.tokens + bytes_context * s.context + bytes_selected * selected(s)};
  }
};

/// The form of an attention, mla_attention or dsa_attention operator. Decode MLA works on the latent
/// itself (absorbed projections), prefill on keys and values expanded from it; DSA always on the latent.
AttentionForm attention_form(const Operator& op, Dtype kv, bool decode);

/// A form and its coefficients, divided out once: nanoseconds per unit. time() costs a square root and
/// requires tokens > 0.
struct AttentionKernel {
  AttentionForm form;  ///< of nanoseconds: flops / F in place of flops, bytes / B in place of bytes
  double launch = 0, overlap = 1, split = 0;
  double walk = 0;        ///< ns per key of the mean context
  double walk_share = 0;  ///< ... times min(1, this x queries)

  AttentionKernel() = default;
  AttentionKernel(const AttentionForm& work, const Coefficients& fit, std::int32_t sms);

  KernelTime time(const AttentionShape& s) const {
    const KernelWork ns = form.work(s);
    KernelTime t{launch, ns.flops, ns.bytes, 0, 1};
    if (walk != 0) {
      const double context = s.context / s.tokens;
      const double share = walk_share * s.tokens;
      t.compute += walk * context * (share < 1.0 ? share : 1.0);
      if (context >= kSplitContext) t.launch += split;
    }
    t.ns = t.launch + overlapped(t.compute, t.memory, overlap);
    return t;
  }

  /// FlashAttention splits a decode row's keys from this context on: the tables step by a launch there.
  static constexpr double kSplitContext = 512;
};

/// What only moves `bytes`: an all-reduce (bytes of one GPU's message), an elementwise kernel, a copy.
KernelTime stream_time(const Coefficients& fit, double bytes);

}  // namespace pdsim
