// Transcendental functions that give the same bits on every machine.
//
// libm's exp and log differ in the last place between C libraries; a simulation that uses them is
// not reproducible. These use only + - * / and the bits of a double. Relative error is below 1e-14
// over the stated ranges: far below any cost model's own error. sqrt is exact by IEEE 754.
#pragma once

#include <cmath>

namespace pdsim::math {

inline double sqrt(double x) {
  return std::sqrt(x);
}

/// Natural logarithm of a finite x > 0.
double log(double x);
/// e^x for |x| <= 700 (beyond it: 0 or infinity).
double exp(double x);
/// x^y for x >= 0. 0^0 is 1.
double pow(double x, double y);
/// The smooth maximum (a^p + b^p)^(1/p) of a, b >= 0, for p >= 1: max(a, b) as p grows.
double smooth_max(double a, double b, double p);

}  // namespace pdsim::math
