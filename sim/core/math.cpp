#include "sim/core/math.hpp"

#include <bit>
#include <cstdint>
#include <limits>

namespace pdsim::math {

namespace {
// ln 2 in two parts: the high one has its low 21 bits clear, so multiples up to 2^11 are exact.
constexpr double kLn2High = 0x1.62e42fee00000p-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kInvLn2 = 0x1.71547652b82fep+0;
}  // namespace

// x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s), s = (m-1)/(m+1), |s| < 0.1716.
double log(double x) {
  auto bits = std::bit_cast<std::uint64_t>(x);
  int e = 0;
  if (bits < 0x0010000000000000u) {  // subnormal
    bits = std::bit_cast<std::uint64_t>(x * 0x1p54);
    e = -54;
  }
  e += static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (m > 0x1.6a09e667f3bcdp+0) {
    m *= 0.5;
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  const double series =
      z *
      (2.0 / 3 +
       z * (2.0 / 5 +
            z * (2.0 / 7 +
                 z * (2.0 / 9 +
                      z * (2.0 / 11 + z * (2.0 / 13 + z * (2.0 / 15 + z * (2.0 / 17 + z * (2.0 / 19)))))))));
  return e * kLn2High + (2.0 * s + (s * series + e * kLn2Low));
}

// x = k ln2 + r with |r| <= ln2/2; e^r by its Taylor series to r^13 (next term below 1e-17).
double exp(double x) {
  if (x > 709.0) return std::numeric_limits<double>::infinity();
  if (x < -700.0) return 0.0;
  const double scaled = x * kInvLn2;
  const auto k = static_cast<std::int64_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
  const double r = (x - static_cast<double>(k) * kLn2High) - static_cast<double>(k) * kLn2Low;
  const double taylor =
      1.0 +
      r * (1.0 + r * (1.0 / 2 +
                      r * (1.0 / 6 +
                           r * (1.0 / 24 +
                                r * (1.0 / 120 +
                                     r * (1.0 / 720 +
                                          r * (1.0 / 5040 +
                                               r * (1.0 / 40320 +
                                                    r * (1.0 / 362880 +
                                                         r * (1.0 / 3628800 +
                                                              r * (1.0 / 39916800 +
                                                                   r * (1.0 / 479001600 +
                                                                        r * (1.0 / 6227020800.0)))))))))))));
  return taylor * std::bit_cast<double>(static_cast<std::uint64_t>(k + 1023) << 52);
}

double pow(double x, double y) {
  if (x <= 0.0) return y == 0.0 ? 1.0 : 0.0;
  return exp(y * log(x));
}

double smooth_max(double a, double b, double p) {
  const double high = a > b ? a : b;
  const double low = a > b ? b : a;
  if (low <= 0.0) return high;
  // high (1 + (low/high)^p)^(1/p): the ratio is in (0, 1], so nothing overflows.
  return high * exp(log(1.0 + exp(p * log(low / high))) / p);
}

}  // namespace pdsim::math
