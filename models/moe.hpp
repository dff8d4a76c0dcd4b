// Routed experts: which of them a step's tokens meet, what that asks of the GPU and the time it takes.
//
//   t = launch + element T k hidden + inner T k intermediate + expert A + M(flops / F, bytes / B)
//
// T tokens, k experts each, A of the experts here met at least once; F counts each expert's rows in whole
// tiles. Routing decides A and the rows: the collector of aiconfigurator's tables draws each expert's load
// from a power law and measures the most loaded rank; expert_load() is the mean of such draws.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "models/curve.hpp"
#include "models/dtype.hpp"

namespace pdsim {

struct Curve;

/// The exponent of the routing that a simulation assumes: of the three measured ones the middle, between
/// perfect balance (0) and the heavier skew (1.2).
inline constexpr double kRouting = 1.01;

/// Routed experts on one GPU: `tokens` enter, each picks `topk` of `experts`, 1 / expert_parallel of which
/// live here, each cut to `intermediate` columns (three matrices hidden x intermediate, two where not
/// gated).
struct MoeShape {
  double tokens = 0, hidden = 0, intermediate = 0;
  double experts = 0, topk = 0, expert_parallel = 1;
  Dtype dtype = Dtype::bf16;
  double routing = kRouting;  ///< exponent of the power law by which experts are chosen; 0: balanced
  bool gated = true;
  bool warm = false;  ///< weights may still lie in L2 from the call before: a benchmark's loop. In a model
                      ///< the other layers' weights have evicted them.
};

/// What routing sends to the most loaded of the expert-parallel ranks.
struct ExpertLoad {
  static constexpr std::array<std::int32_t, 5> kTiles = {8, 16, 32, 64, 128};
  double rows = 0;                                ///< (token, expert) pairs
  double active = 0;                              ///< experts that have any
  std::array<double, kTiles.size()> padded = {};  ///< rows, each expert's in whole tiles of kTiles[i]

  /// Rows in tiles of so many; as they are for any that is not in kTiles.
  double in_tiles(std::int32_t tile) const;
};

/// Balanced: token t takes experts t + i ceil(E / k) modulo E, i < k; fewer than ceil(E / k) tokens are
/// spread evenly over the stride. Power law: loads are independent draws of density x^-a on [1, 0.8 T]
/// ([0.01, 2] where T k <= E), scaled to T k rows, rounded, at most T each; what is left over goes to each
/// rank's least loaded experts, what is too much is taken from its most loaded. The mean of fixed draws,
/// taken at two sizes an octave and linear in T between. Deterministic. Some ms the first time that
/// (experts, topk, expert_parallel, routing) are seen, 0.1 us from then on. Thread-safe.
ExpertLoad expert_load(const MoeShape& shape);

/// Work of the most loaded rank.
KernelWork moe_work(const MoeShape& shape);

/// By one set of coefficients, whose tile_m pads each expert's rows; columns are padded to 64. An
/// intermediate that is no multiple of 16 slows all work by `ragged`. `load` is expert_load(shape).
KernelTime moe_time(const Coefficients& fit, const MoeShape& shape, const ExpertLoad& load);

/// Rows of an expert here, if routing were even: what libraries pick tiles by, and the size that a curve's
/// regimes go by.
double rows_per_expert(const MoeShape& shape);

/// By the regime of the shape's rows per expert, and the curve's correction: a measured layer's own, or for
/// any other the mean of those measured, weighed by how like they are (exp(-d^2 / 2), d in octaves of hidden,
/// topk, columns and experts here) against the formula's own weight. Some us for a layer not measured.
KernelTime moe_time(const Curve& curve, const MoeShape& shape);

/// A measured family of shapes: a layer as published, uncut.
struct MoeFamily {
  double hidden = 0, intermediate = 0, experts = 0, topk = 0;
  bool operator==(const MoeFamily&) const = default;
};

/// DeepSeek-V3's router takes 4 of 8 groups of experts first (n_group, topk_group in its config.json):
/// what was measured is not the routing that was asked for. No other layer learns from it.
inline constexpr MoeFamily kGroupLimited{7168, 2048, 256, 8};

/// Where a correction's grid holds this shape: its axes are family (1 for the first), cut
/// (kUncut x tensor / expert parallel), tokens and routing (kBalanced + exponent). False when no family
/// is this layer's, or it is cut both ways.
bool moe_point(const std::vector<MoeFamily>& families, const MoeShape& shape, std::array<double, 4>& at);
inline constexpr double kUncut = 1024, kBalanced = 1;

/// Whether a published layer of this shape has gated experts: all that pdsim knows but Nemotron-H's, whose
/// squared ReLU needs no gate (mlp_hidden_act "relu2" in their config.json).
bool gated_experts(double hidden, double intermediate, double experts, double topk);

}  // namespace pdsim
