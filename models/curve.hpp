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

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim {

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
  double element_ns = 0;   ///< gemm: per input element (quantisation); moe: per routed token and hidden unit
  double inner_ns = 0;     ///< moe: per routed token and column of the intermediate
  double expert_ns = 0;    ///< moe: per expert that has rows
  double parallel_ns = 0;  ///< moe: more launch where experts are spread over ranks
  double host_ns = 0;      ///< floor of tables that were measured launch by launch; graphs hide it: not in t
  double ragged = 1;       ///< gemm: factor on arithmetic when m is no multiple of 16; moe: on all
                           ///< work when the intermediate is none
  double ragged_host_ns =
      0;  ///< gemm: added to host_ns when m is no multiple of 4: a launch that pads scales
  std::int32_t tile_m = 0, tile_n = 0, cluster = 1;

  // Attention (models/attention.hpp). tile_m: rows of a tile, the queries of one head or, with tile_n 0, of
  // all heads that share a KV head. M's compute side also holds what thread blocks cost.
  double hidden_keys = 0;   ///< computed for each query and not visible to it
  double spread = 0;        ///< ... and as many for each query of its tile
  double tail = 0;          ///< slowness of the longest block against its share of the full rate
  double tail_overlap = 1;  ///< of the longest block and the rest
  double cache_bytes = 0, cache_bytes_per_ns = 0;  ///< what is read from L2, and how fast
  double wave_ns = 0;                              ///< one thread block on each multiprocessor
  double walk_ns = 0;                              ///< one block's walk along its keys, per key
  double walk_waves = 0;  ///< with fewer waves than this a walk is split among idle multiprocessors
  double split_ns = 0;    ///< the kernel that combines split walks
};

/// The logarithm to base 2 by parts: exponent + mantissa - 1, exact at powers of two and linear between.
/// No library function, the same on every machine. Requires a normal x > 0.
inline double octave(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto mantissa = std::bit_cast<double>((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  return static_cast<double>(bits >> 52) - 1024 + mantissa;
}

/// What the formula leaves over: log(measured / formula) at the nodes of a grid over the operation's own
/// shape, multilinear in the octave of each coordinate, constant beyond the grid's ends, so that a curve
/// continues physically there.
struct Correction {
  struct Axis {
    std::string name;            ///< as in shape_axes()
    std::vector<double> nodes;   ///< ascending, above 0
    std::vector<double> octave;  ///< of each node
    Axis() = default;
    Axis(std::string name, std::vector<double> nodes);
  };
  std::vector<Axis> axes;
  std::vector<std::int16_t> permille;  ///< of the natural logarithm; the last axis runs fastest

  bool empty() const { return permille.empty(); }
  std::size_t size() const;  ///< nodes of the whole grid
  /// exp of the log-ratio at a point, one coordinate an axis; 1 when empty. Coordinates below 1 count as
  /// 1. O(2^axes), some tens of ns.
  double factor(std::span<const double> at) const;
  /// The grid over the other axes at one value of this.
  Correction fix(std::size_t axis, double value) const;

  static constexpr std::size_t kMostAxes = 4;
  /// The corners of the cell that holds a point: 2^axes indices and weights that sum to 1.
  struct Cell {
    std::size_t count = 0;
    std::size_t index[std::size_t{1} << kMostAxes];
    double weight[std::size_t{1} << kMostAxes];
  };
  Cell cell(std::span<const double> at) const;
};

/// Relative error |t / measured - 1| over some rows; bias is the median of its signed form.
struct Accuracy {
  std::int64_t rows = 0;
  double median_ape = 0, p90_ape = 0, bias = 0;
};

struct Range {
  double least = 0, most = 0;
  bool holds(double x) const { return least <= x && x <= most; }
};

enum class Regime : std::uint8_t { compute, bandwidth, launch };
std::string_view name(Regime regime);

struct KernelTime {
  double launch = 0, compute = 0, memory = 0;  ///< the terms, ns
  double ns = 0;                               ///< what they make together
  double useful = 1;                           ///< share of compute that is not padding of tiles and waves

  /// All terms times a factor.
  KernelTime operator*(double factor) const {
    return {launch * factor, compute * factor, memory * factor, ns * factor, useful};
  }

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

/// t of the head of this file for a launch term, flops as computed (padding included, `useful` of them
/// asked for) and bytes.
KernelTime together(const Coefficients& fit, double launch, double flops, double bytes, double useful);

/// Elements of activations and results: bf16 or fp16.
inline constexpr double kActivationBytes = 2;

/// What only moves `bytes`: an all-reduce (bytes of one GPU's message), an elementwise kernel, a copy.
KernelTime stream_time(const Coefficients& fit, double bytes);

}  // namespace pdsim
