// Least squares in the logarithm of time, for the fits of models/fit/.
//
// Held-out samples are never fitted: what accuracy() says of them is what a profile claims.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "models/curve.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// FNV-1a of a group's numbers: the same on every machine.
std::uint64_t hash_of(std::initializer_list<double> group);

/// A coefficient to fit within [low, high]: in its logarithm, or as it is when low is 0.
struct Free {
  double Coefficients::*member;
  double low, high;
};

struct Sample {
  double ns = 0;
  std::uint64_t group = 0;  ///< rows of one group are fitted or held out together
  double size = 0;          ///< which regime it belongs to
  bool held = false;
  bool trial = false;  ///< spared while grids are compared; fitted afterwards
};

/// Time of row i in ns.
using RowTime = std::function<double(const Coefficients&, std::size_t)>;

/// Holds out every fifth group in the order of their hashes, by the first hash that holds out between a
/// tenth and a third of the rows; none of fewer than 50 rows. Another fifth is marked for trial.
void hold_out(std::vector<Sample>& samples);

/// Points of a correction and what it should be there.
struct CorrectionRows {
  std::vector<double> at;  ///< one coordinate an axis, row after row
  std::vector<double> log_ratio, weight;
};

/// Fills the grid of `correction` (its axes are given) by penalised least squares:
///
///   sum_i w_i rho(interpolation(x_i) - r_i) + sum_axes stiffness (second differences per octave^2)^2
///     + interaction sum_pairs (first differences along both, per octave^2)^2
///
/// over the axes and pairs of axes whose stiffness is above 0, with rho soft-L1. A sum of functions of one
/// axis each has no interaction: what a kernel does at one n it then does, with little cost, at every k.
/// Solved by conjugate gradients on reweighted squares. Nodes that no row meets are filled from
/// their neighbours along stiff axes, and are drawn to 0, the formula alone, where none has any.
/// Deterministic; some tenths of a second for 30,000 rows.
void fit_correction(Correction& correction, const std::vector<double>& stiffness, double interaction,
                    const CorrectionRows& rows);

/// A grid to try, and how stiff it is along each axis (0: nodes are free of each other).
struct Grid {
  std::vector<Correction::Axis> axes;
  std::vector<double> stiffness;
  double interaction = 0;  ///< see fit_correction
};

struct Tile {
  std::int32_t m, n, cluster;
};

/// All that the fit of one curve needs beside the samples.
struct CurvePlan {
  std::vector<Coefficients> starts;  ///< one a regime, ascending in upto
  std::vector<Free> free;
  std::vector<Tile> tiles;     ///< shapes to try; empty: none
  RowTime kernel;              ///< the formula, ns
  RowTime floor;               ///< the host's, ns: a row takes no less; empty: c.host_ns
  std::vector<double> beside;  ///< ns of what a row's time holds beside the kernel; empty: nothing
  std::vector<Grid> grids;     ///< tried one by one; the best on the trial groups is kept, or none
  std::vector<Grid> coarse;    ///< the same for a table of few rows, by cross-validation
  std::function<void(std::size_t row, double* at)> point;  ///< a row's coordinates on the grids
};

/// A table of fewer rows than this was measured shape by shape, each chosen: too few to spare a fifth.
inline constexpr std::size_t kManyRows = 300;

/// Fits regimes and the best grid. The curve's error is of a fit without the held-out groups; what it
/// holds in the end is fitted to all rows, from there. With coarse grids and below kManyRows each fifth of
/// the groups is held out in its turn: the error is that of five fits, each on the groups that it had not
/// seen, by the coarse grid that does best on them, or none. Without coarse grids a curve of few rows (see
/// hold_out) has no correction and in-sample errors. `curve.regimes` stays empty where a fit is not possible.
void fit_curve(Curve& curve, const CurvePlan& plan, std::vector<Sample>& samples);

/// Minimises the sum of soft-L1 of log(model / measured) over `rows` by Levenberg-Marquardt on
/// reweighted squares, derivatives by differences. Returns the cost per row.
double minimise(Coefficients& fit, const std::vector<Free>& free, const std::vector<std::size_t>& rows,
                const std::vector<Sample>& samples, const RowTime& model);

/// Four significant digits: what a profile holds, and therefore what its errors are measured with.
double rounded(double value);

/// Of signed relative errors; all 0 without any.
Accuracy accuracy_of(std::vector<double> errors);

/// Of the held-out samples, or of all where the curve is in-sample.
Accuracy accuracy(const Curve& curve, const std::vector<Sample>& samples, const RowTime& model);

/// Fits each regime (given as starting points) to the samples of its sizes, trying every tile shape on
/// some of the rows first; then rounds and measures. Regimes without a sample are dropped.
void fit_regimes(Curve& curve, const std::vector<Coefficients>& starts, const std::vector<Free>& free,
                 const std::vector<Tile>& tiles, std::vector<Sample>& samples, const RowTime& model);

/// Copies of `start` up to each size, and one beyond.
std::vector<Coefficients> split_at(const Coefficients& start, std::initializer_list<double> sizes);

/// Stretches the curve's measured range of an axis to hold `value`.
void widen(Curve& curve, const std::string& axis, double value);

}  // namespace pdsim
