// Attention over per-head, latent (MLA) and sparsely selected (DSA) KV: work as a form linear in sums over
// the rows, and the time of one kernel.
//
//   t = factor(requests, length) (launch + M(M(compute, tail), memory))
//
// Thread blocks take a tile of a request's queries and walk along its keys. Arithmetic is done on whole
// tiles: a request shorter than a tile pays for all of it, and every tile for some keys that a mask hides.
// All blocks together make `compute`; the longest one alone makes `tail`, which no wave of others hides
// when a batch has fewer blocks than the GPU has multiprocessors. No table has prompts behind a cached
// prefix: its keys are taken to be split among idle multiprocessors as those of decode rows are. A decode row
// is one block a KV head, whose walk is cut among idle multiprocessors and put together by a second kernel
// (split-KV). Tables replay one kernel, so what fits the L2 cache is read from there.
//
// `factor` is the curve's correction for one worker's heads, compiled to a grid of octaves.
#pragma once

#include <cstdint>
#include <vector>

#include "models/curve.hpp"
#include "models/dtype.hpp"

namespace pdsim {

struct Curve;
struct Gpu;
struct Operator;

/// Sums over the rows of one attention kernel. In a decode batch pairs equal context.
struct AttentionShape {
  double tokens = 0;    ///< queries
  double pairs = 0;     ///< visible (query, key) pairs
  double context = 0;   ///< KV tokens read
  double requests = 1;  ///< rows
  double held = 0;      ///< KV tokens of the rows, those that a window cuts off included; 0: context
};

/// The sums of `requests` equal rows: n new tokens after p that are in the cache, seen through a window
/// (0: none) of the last keys, each query's own included. Requires n >= 1.
AttentionShape attention_rows(double requests, double n, double p, double window);

/// Work of an attention operator: linear in the sums of AttentionShape and in the pairs that a sparse
/// indexer leaves, min(pairs, topk tokens).
struct AttentionForm {
  double flops_token = 0, flops_pair = 0, flops_context = 0, flops_selected = 0;
  double bytes_step = 0, bytes_token = 0, bytes_context = 0, bytes_selected = 0;
  double blocks = 0;   ///< KV heads: one thread block each for a decode row
  double group = 1;    ///< query heads of one
  double topk = 0;     ///< 0: no indexer
  bool fills = false;  ///< the kernel spends time on all topk places of a query, empty ones too

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

/// A correction on two axes as a grid with a node an octave: bilinear in octaves, constant beyond its ends.
class OctaveGrid {
 public:
  OctaveGrid() = default;
  /// A correction whose other axes are fixed already: its first axis runs down, its second across. Exact
  /// where its nodes are powers of two. An empty one is 1 everywhere.
  explicit OctaveGrid(const Correction& correction);

  /// Below this power of two across, the value at it.
  void level_below(std::size_t octave) {
    for (std::size_t i = 0; i < rows_ && octave < columns_; ++i) {
      for (std::size_t j = 0; j < octave; ++j) factor_[i * columns_ + j] = factor_[i * columns_ + octave];
    }
  }

  /// Requires x, y > 0. Some 5 ns.
  double at(double x, double y) const {
    if (factor_.empty()) return 1;
    const Place down = place(x, rows_), across = place(y, columns_);
    const float* low = &factor_[down.node * columns_ + across.node];
    const float* high = low + (rows_ > 1 ? columns_ : 0);
    const std::size_t next = columns_ > 1 ? 1 : 0;
    const double first = low[0] + across.share * (low[next] - low[0]);
    const double second = high[0] + across.share * (high[next] - high[0]);
    return first + down.share * (second - first);
  }

 private:
  struct Place {
    std::size_t node;
    double share;
  };
  static Place place(double x, std::size_t nodes) {
    const double last = static_cast<double>(nodes) - 1;
    double at = octave(x);
    at = at < 0 ? 0 : at > last ? last : at;
    std::size_t node = static_cast<std::size_t>(at);
    if (node + 1 >= nodes) node = nodes > 1 ? nodes - 2 : 0;
    return {node, at - static_cast<double>(node)};
  }
  std::size_t rows_ = 0, columns_ = 0;
  std::vector<float> factor_;
};

/// A form and its coefficients, divided out once: nanoseconds per unit. time() costs two square roots and
/// requires tokens and requests > 0.
struct AttentionKernel {
  AttentionForm form;  ///< of nanoseconds: flops / F in place of flops, bytes / B in place of bytes
  double launch = 0, overlap = 1;
  // Queries in tiles.
  double tile = 0;          ///< queries of one request; 0: arithmetic is not done in tiles
  double hidden = 0;        ///< keys a query that are computed (decode: read) and not visible
  double spread = 0;        ///< ... and as many for each query of its tile
  double block = 0;         ///< ns of a query's share of its blocks, beside arithmetic
  double tail = 0;          ///< ns of the longest block beside its visible keys
  double tail_key = 0;      ///< ... and of each of them
  double tail_overlap = 1;  ///< of all blocks and the longest
  double window = 0;        ///< keys that a query sees at most; 0: all
  double wave_share = 0;    ///< waves of blocks that a query makes
  // A row of queries at once, its keys split.
  double wave = 0;         ///< ns of one request's blocks
  double walk = 0;         ///< ns per key of the mean context
  double walk_share = 0;   ///< ... times min(1, this x requests)
  double split = 0;        ///< ns of putting split walks together
  double cache = 0;        ///< ns of the memory term that the L2 cache holds
  double cache_gain = 0;   ///< share of them that it saves
  bool by_context = true;  ///< the grid's second axis: mean context held, or mean tokens
  double scale = 1;        ///< the grid's first axis: this x requests
  OctaveGrid factor;
  double efficiency = 1;  ///< of the engine's kernel against the one that was measured (Efficiency)

  AttentionKernel() = default;
  AttentionKernel(const AttentionForm& work, const Coefficients& fit, std::int32_t sms,
                  std::int32_t sliding_window = 0);

  KernelTime time(const AttentionShape& s) const {
    const double context = s.context / s.requests, length = s.tokens / s.requests;
    const double second = !by_context ? length : s.held > 0 ? s.held / s.requests : context;
    return formula(s, context, length) * (efficiency * factor.at(scale * s.requests, second));
  }

  /// The time without its factor, for the mean request's context and tokens.
  KernelTime formula(const AttentionShape& s, double context, double length) const {
    const KernelWork ns = form.work(s);
    KernelTime t{launch, ns.flops, ns.bytes, 0, 1};
    if (tile > 0) {
      const double spanned = tile < length ? tile : length;
      const double queries = s.tokens > tile * s.requests ? s.tokens : tile * s.requests;
      const double keys = s.pairs / s.tokens + hidden + spread * spanned;
      t.compute += queries * (form.flops_pair * keys + block) - form.flops_pair * s.pairs;
      t.useful = ns.flops / t.compute;
      double seen = window > 0 && window + spanned < context ? window + spanned : context;
      const double waves = wave_share * queries;  // idle multiprocessors take parts of a prefix
      if (seen > length && waves < 1.0) seen = length + (seen - length) * waves;
      t.compute = overlapped(t.compute, tail + tail_key * seen, tail_overlap);
    } else {
      if (window > 0 && s.held > 0) {  // a window that begins inside a block of keys reads all of it
        const double held = s.held / s.requests, read = held < window + hidden ? held : window + hidden;
        t.memory += form.bytes_context * s.requests * (read - context);
        context = read;
      }
      const double share = walk_share * s.requests;
      t.compute += wave * s.requests + walk * context * (share < 1.0 ? share : 1.0);
      const double ramp = context * (1.0 / kSplitContext) - 1;
      t.launch += split * (ramp < 0 ? 0 : ramp > 1 ? 1 : ramp);
    }
    // All of it from the cache up to its size, none from one and a half times that.
    double cached = 3 * cache - 2 * t.memory;
    cached = cached > t.memory ? t.memory : cached > 0 ? cached : 0;
    t.memory -= cache_gain * cached;
    t.ns = t.launch + overlapped(t.compute, t.memory, overlap);
    return t;
  }

  /// A decode row's keys are split from about here on: the tables step by a launch between this context
  /// and twice that.
  static constexpr double kSplitContext = 256;
};

/// The kernel of an operator on one worker by a fitted curve: its last regime, and its correction at the
/// operator's heads.
AttentionKernel attention_kernel(const Curve& curve, std::int32_t sms, const Operator& op, Dtype kv);

/// The same as a step runs it: of a decode row nothing is found in the L2 cache, since the weights read in
/// between have evicted it; what a Hopper MLA module's measurement launches around its kernels is off; and
/// the curve's efficiency is on.
AttentionKernel serving_kernel(const Curve& curve, const Gpu& gpu, const Operator& op, Dtype kv);

}  // namespace pdsim
