#include "models/moe.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "models/profile.hpp"
#include "sim/core/math.hpp"

namespace pdsim {

// Routing ----------------------------------------------------------------------------------------------

namespace {

/// SplitMix64's output function: bits of a counter.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void add_rank(ExpertLoad& sum, const double* rows, std::size_t experts) {
  for (std::size_t e = 0; e < experts; ++e) {
    sum.rows += rows[e];
    sum.active += rows[e] > 0 ? 1 : 0;
    for (std::size_t i = 0; i < sum.padded.size(); ++i) {
      const double tile = ExpertLoad::kTiles[i];
      sum.padded[i] += std::ceil(rows[e] / tile) * tile;
    }
  }
}

void scale(ExpertLoad& load, double factor) {
  load.rows *= factor;
  load.active *= factor;
  for (double& padded : load.padded) padded *= factor;
}

/// a + (b - a) share.
ExpertLoad between(const ExpertLoad& a, const ExpertLoad& b, double share) {
  ExpertLoad load = a;
  load.rows += (b.rows - a.rows) * share;
  load.active += (b.active - a.active) * share;
  for (std::size_t i = 0; i < load.padded.size(); ++i) load.padded[i] += (b.padded[i] - a.padded[i]) * share;
  return load;
}

ExpertLoad balanced_load(std::size_t tokens, std::size_t experts, std::size_t topk, std::size_t local) {
  const std::size_t stride = (experts + topk - 1) / topk;
  std::vector<double> rows(experts, 0);
  const std::size_t whole = tokens / experts;  // so many times round all experts
  const std::size_t rest = tokens < stride ? tokens : tokens % experts;
  for (std::size_t t = 0; t < rest; ++t) {
    const std::size_t first = tokens < stride ? t * stride / tokens : t;
    for (std::size_t i = 0; i < topk; ++i) rows[(first + i * stride) % experts] += 1;
  }
  if (tokens >= stride) {
    for (double& r : rows) r += static_cast<double>(whole * topk);
  }
  ExpertLoad load;
  add_rank(load, rows.data(), local);
  return load;
}

/// Raises the least of `rows` by one until `units` are spent; takes them from the greatest when negative.
void level(double* rows, std::size_t count, std::int64_t units, std::vector<std::size_t>& order) {
  if (units == 0) return;
  order.resize(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  const bool raise = units > 0;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return raise ? rows[a] < rows[b] : rows[a] > rows[b];
  });
  const auto left = static_cast<double>(raise ? units : -units);
  double sum = 0;  // of the first n, as distance from the outermost
  for (std::size_t n = 1; n <= count; ++n) {
    sum += rows[order[n - 1]];
    const double nx = static_cast<double>(n);
    // The water line if it meets the first n only.
    const double line = (sum + (raise ? left : -left)) / nx;
    const bool last = n == count || (raise ? line <= rows[order[n]] : line >= rows[order[n]]);
    if (!last) continue;
    const double flat = raise ? std::floor(line) : std::ceil(line);
    double odd = std::abs(std::round((line - flat) * nx));
    for (std::size_t i = 0; i < n; ++i) {
      const double step = odd > 0 ? (raise ? 1 : -1) : 0;
      odd -= 1;
      rows[order[i]] = std::max(0.0, flat + step);
    }
    return;
  }
}

ExpertLoad skewed_load(std::size_t tokens, std::size_t experts, std::size_t topk, std::size_t ranks,
                       double exponent) {
  constexpr std::size_t kDraws = 4096;  // of experts; at least kLeast layers' worth of them
  constexpr std::size_t kLeast = 8;
  const std::size_t layers = std::max(kLeast, kDraws / experts), local = experts / ranks;
  const auto t = static_cast<double>(tokens), pairs = static_cast<double>(tokens * topk);
  const bool few = tokens * topk <= experts;
  const double low = few ? 0.01 : 1, high = few ? 2 : std::max(1.0, 0.8 * t);
  constexpr double kNear = 1e-6;  // of 1, where the density of x is 1 / x and the power below none
  const double power = std::abs(1 - exponent) < kNear ? -kNear : 1 - exponent;
  const double a = math::pow(low, power), b = math::pow(high, power);
  std::vector<double> rows(experts);
  std::vector<std::size_t> order;
  ExpertLoad sum;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    double drawn = 0;
    for (std::size_t e = 0; e < experts; ++e) {
      const std::uint64_t counter = (layer * experts + e + 1) * 0x9e3779b97f4a7c15u;
      const double u = static_cast<double>(mixed(counter) >> 11) * 0x1p-53;
      rows[e] = math::pow(a + (b - a) * u, 1 / power);
      drawn += rows[e];
    }
    double left = pairs;
    for (double& r : rows) {
      r = std::min(std::nearbyint(r / drawn * pairs), t);
      left -= r;
    }
    const auto total = static_cast<std::int64_t>(left), count = static_cast<std::int64_t>(ranks);
    std::size_t hottest = 0;
    double most = -1;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto r = static_cast<std::int64_t>(rank);
      const std::int64_t sign = total < 0 ? -1 : 1;
      const std::int64_t share = total / count + (r < sign * (total % count) ? sign : 0);
      level(&rows[rank * local], local, share, order);
      double held = 0;
      for (std::size_t e = rank * local; e < (rank + 1) * local; ++e) held += rows[e];
      if (held <= most) continue;
      most = held;
      hottest = rank;
    }
    add_rank(sum, &rows[hottest * local], local);
  }
  scale(sum, 1 / static_cast<double>(layers));
  return sum;
}

/// Loads of one layer and routing at two sizes an octave, and on both sides of T k = E where the law
/// changes.
struct LoadTable {
  std::vector<double> tokens;
  std::vector<ExpertLoad> loads;

  LoadTable(std::size_t experts, std::size_t topk, std::size_t ranks, double exponent) {
    constexpr std::size_t kMost = 65'536;
    std::vector<std::size_t> sizes = {experts / topk, experts / topk + 1};
    for (std::size_t t = 1; t <= kMost; t *= 2) {
      sizes.push_back(t);
      sizes.push_back(t + t / 2);
    }
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    for (const std::size_t t : sizes) {
      if (t == 0) continue;
      tokens.push_back(static_cast<double>(t));
      loads.push_back(skewed_load(t, experts, topk, ranks, exponent));
    }
  }
  ExpertLoad at(double t) const {
    const auto above = std::upper_bound(tokens.begin(), tokens.end(), t);
    const auto i =
        std::clamp<std::ptrdiff_t>(above - tokens.begin(), 1, static_cast<std::ptrdiff_t>(tokens.size()) - 1);
    const auto high = static_cast<std::size_t>(i);
    const double share = (t - tokens[high - 1]) / (tokens[high] - tokens[high - 1]);
    return between(loads[high - 1], loads[high], std::max(share, 0.0));
  }
};

}  // namespace

double ExpertLoad::in_tiles(std::int32_t tile) const {
  const auto* found = std::find(kTiles.begin(), kTiles.end(), tile);
  return found == kTiles.end() ? rows : padded[static_cast<std::size_t>(found - kTiles.begin())];
}

ExpertLoad expert_load(const MoeShape& s) {
  if (s.tokens < 1) return {};
  const auto experts = static_cast<std::size_t>(s.experts), topk = static_cast<std::size_t>(s.topk);
  const std::size_t ranks = std::min(static_cast<std::size_t>(s.expert_parallel), experts);
  if (s.routing == 0) {
    return balanced_load(static_cast<std::size_t>(s.tokens), experts, topk, (experts + ranks - 1) / ranks);
  }
  using Key = std::tuple<std::size_t, std::size_t, std::size_t, double>;
  static std::mutex mutex;
  static std::map<Key, LoadTable> tables;  // of a pure function: a memo, not state
  const std::lock_guard lock(mutex);
  const Key key{experts, topk, ranks, s.routing};
  auto found = tables.find(key);
  if (found == tables.end()) found = tables.try_emplace(key, experts, topk, ranks, s.routing).first;
  return found->second.at(s.tokens);
}

// Time -------------------------------------------------------------------------------------------------

namespace {

double matrices(const MoeShape& s) {
  return s.gated ? 3 : 2;
}

double moe_bytes(const MoeShape& s, const ExpertLoad& load) {
  return load.active * matrices(s) * s.hidden * s.intermediate * bytes_per_element(s.dtype) +
         load.rows * (2 * s.hidden + matrices(s) * s.intermediate) * kActivationBytes;
}

/// Multiples of 64: what the narrowest tiles compute in columns.
double padded(double columns) {
  return std::ceil(columns / 64) * 64;
}

/// The share of `bytes`, read over and over, that a cache of `size` still holds: 1 below, 0 above, steep as
/// least-recently-used is on a cyclic walk.
double cached_share(double bytes, double size) {
  if (size <= 0) return 0;
  double ratio = bytes / size;
  for (int square = 0; square < 3; ++square) ratio *= ratio;  // to the power of 8
  return 1 / (1 + ratio);
}

}  // namespace

double rows_per_expert(const MoeShape& s) {
  return s.tokens * s.topk / s.experts;
}

KernelWork moe_work(const MoeShape& s) {
  const ExpertLoad load = expert_load(s);
  return {2 * matrices(s) * s.hidden * s.intermediate * load.rows, moe_bytes(s, load)};
}

KernelTime moe_time(const Coefficients& fit, const MoeShape& s, const ExpertLoad& load) {
  const double pairs = s.tokens * s.topk;
  const double launch = fit.launch_ns + (s.expert_parallel > 1 ? fit.parallel_ns : 0) +
                        fit.element_ns * pairs * s.hidden + fit.inner_ns * pairs * s.intermediate +
                        fit.expert_ns * load.active;
  const double columns = (matrices(s) - 1) * s.intermediate;
  const double flops = 2 * s.hidden * load.in_tiles(fit.tile_m) * (padded(columns) + padded(s.intermediate));
  const double bytes = moe_bytes(s, load);
  KernelTime t = together(fit, launch, flops, bytes, 2 * s.hidden * load.rows * (columns + s.intermediate));
  if (s.warm && fit.cache_bytes_per_ns > 0) {
    const double share = cached_share(bytes, fit.cache_bytes);
    t.memory = (1 - share) * t.memory + share * bytes / fit.cache_bytes_per_ns;
  }
  if (std::fmod(s.intermediate, 16) != 0) {  // rows that no wide load may start at
    t.compute *= fit.ragged;
    t.memory *= fit.ragged;
  }
  t.ns = t.launch + overlapped(t.compute, t.memory, fit.overlap);
  return t;
}

bool moe_point(const std::vector<MoeFamily>& families, const MoeShape& s, std::array<double, 4>& at) {
  for (std::size_t i = 0; i < families.size(); ++i) {
    const MoeFamily& f = families[i];
    if (f.hidden != s.hidden || f.experts != s.experts || f.topk != s.topk) continue;
    const double tensor = f.intermediate / s.intermediate;
    if (tensor < 1 || tensor != std::floor(tensor) || (tensor > 1 && s.expert_parallel > 1)) continue;
    at = {static_cast<double>(i + 1), kUncut * tensor / s.expert_parallel, s.tokens, kBalanced + s.routing};
    return true;
  }
  return false;
}

namespace {

/// The correction's logarithm for a layer that was not measured.
double borrowed(const Curve& curve, const MoeShape& s) {
  constexpr double kFormula = 0.5;              // the formula's weight; an equal layer's is 1
  constexpr double kWide = 0.7, kWideTopk = 1;  // octaves
  const double here = s.experts / s.expert_parallel;
  double sum = 0, weights = kFormula;
  for (std::size_t i = 0; i < curve.families.size(); ++i) {
    const MoeFamily& f = curve.families[i];
    if (f == kGroupLimited) continue;
    // Cut as much as makes its columns, or its experts here, those of the shape.
    const bool spread = s.expert_parallel > 1;
    const double tensor = spread ? 1 : std::max(1.0, f.intermediate / s.intermediate);
    const double ranks = spread ? std::max(1.0, f.experts / here) : 1;
    const auto apart = [](double a, double b, double wide) { return (octave(a) - octave(b)) / wide; };
    const double d[] = {apart(f.hidden, s.hidden, kWide), apart(f.topk, s.topk, kWideTopk),
                        apart(f.intermediate / tensor, s.intermediate, kWide),
                        apart(f.experts / ranks, here, kWide)};
    const double weight = math::exp(-0.5 * (d[0] * d[0] + d[1] * d[1] + d[2] * d[2] + d[3] * d[3]));
    const std::array<double, 4> at = {static_cast<double>(i + 1), kUncut * tensor / ranks, s.tokens,
                                      kBalanced + s.routing};
    sum += weight * math::log(curve.correction.factor(at));
    weights += weight;
  }
  return sum / weights;
}

}  // namespace

KernelTime moe_time(const Curve& curve, const MoeShape& s) {
  if (s.tokens < 1) return {};
  const KernelTime t = moe_time(curve.at(rows_per_expert(s)), s, expert_load(s));
  if (curve.correction.empty()) return t;
  std::array<double, 4> at;
  if (moe_point(curve.families, s, at)) return t * curve.correction.factor(at);
  return t * math::exp(borrowed(curve, s));
}

bool gated_experts(double hidden, double intermediate, double experts, double topk) {
  constexpr MoeFamily kUngated[] = {
      {2048, 5120, 512, 22},  // Nemotron 3 Ultra: experts on the latent
      {1024, 2688, 512, 22},  // Nemotron 3 Super: experts on the latent
      {2688, 1856, 128, 6},   // Nemotron 3 Nano
  };
  const MoeFamily family{hidden, intermediate, experts, topk};
  return std::find(std::begin(kUngated), std::end(kUngated), family) == std::end(kUngated);
}

}  // namespace pdsim
