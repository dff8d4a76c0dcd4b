// Max-min fair rates: the mathematics of sharing, without clusters, time or units.
//
// Given links l of capacity C_l >= 0 and flows f, where f takes w_fl > 0 of link l per unit of its rate and
// may have a bound b_f, the rates x_f are *feasible* when
//
//     sum over f on l of w_fl x_f <= C_l   for every l,       0 <= x_f <= b_f   for every f,
//
// and *max-min fair* when none can grow except by shrinking one that is no greater. There is exactly one
// such x. Each of its flows holds a certificate, and feasible rates whose flows all hold one are it:
//
//     x_f = b_f,   or some link l of f is full and no flow on l is faster than f.
//
// Progressive filling finds it: raise all rates together; where a link fills or a bound is reached, those
// flows stop. A link l whose moving flows weigh W_l and whose stopped flows take S_l fills at the level
// (C_l - S_l) / W_l, and a flow stopping below that level only raises it: a heap of levels, re-keyed when
// popped, is enough. (Bertsekas and Gallager, Data Networks, 6.5.2; weights count in the links only: they
// are what a unit of rate costs there, not a priority.)
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace pdsim {

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// Flows and the links that they cross, as flat arrays: elements [first[f], first[f + 1]) are flow f's.
/// Requires first.size() = flows + 1; a flow crosses a link at most once; it has an element or a bound.
struct FairShareProblem {
  std::span<const double> capacity;      ///< by link
  std::span<const double> bound;         ///< by flow, kUnbounded for none
  std::span<const std::uint32_t> first;  ///< by flow, and one past the last
  std::span<const std::uint32_t> link;   ///< by element
  std::span<const double> weight;        ///< by element
};

/// The solver and its workspace, kept between calls so that a steady state allocates nothing.
class FairShare {
 public:
  /// Writes the max-min rates to rate[f] and what they take of each link to used[l]. Deterministic in the
  /// order given; permuting flows may change last bits. Flows that share no link, directly or through
  /// others, do not: solving them apart gives the same bits. O(E + L log L) for E elements when few flows
  /// are stopped by their bounds, a log factor on those.
  void solve(const FairShareProblem& problem, std::span<double> rate, std::span<double> used);

 private:
  struct Level {
    double value;
    std::uint32_t what;  ///< a link, or links + flow for a bound
  };
  std::vector<Level> heap_;
  std::vector<double> moving_weight_;                  ///< by link: W_l
  std::vector<std::uint32_t> moving_flows_;            ///< by link
  std::vector<std::uint32_t> link_first_, link_flow_;  ///< link -> flows
};

/// Whether `rate` is the max-min solution to a relative `tolerance`, by the certificate above: a proof that
/// does not depend on how it was found. `why` says what fails first. O(E): for tests.
bool certificate(const FairShareProblem& problem, std::span<const double> rate, double tolerance = 1e-9,
                 std::string* why = nullptr);

}  // namespace pdsim
