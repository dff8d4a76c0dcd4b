#include "models/gemm.hpp"

#include <cmath>

#include "models/profile.hpp"

namespace pdsim {
namespace {

// Bytes of an activation that meets weights of this format in a tensor core.
double operand_bytes(Dtype weights) {
  const bool narrow = weights == Dtype::fp8 || weights == Dtype::fp8_block || weights == Dtype::int8;
  return narrow ? 1 : kActivationBytes;
}

}  // namespace

KernelWork gemm_work(const GemmShape& s) {
  return {2 * s.m * s.n * s.k, bytes_per_element(s.dtype) * s.n * s.k + operand_bytes(s.dtype) * s.m * s.k +
                                   kActivationBytes * s.m * s.n};
}

KernelTime gemm_time(const Coefficients& fit, std::int32_t sms, const GemmShape& s) {
  const KernelWork work = gemm_work(s);
  double flops = work.flops;
  if (fit.tile_m > 0) {
    const double tile_m = fit.tile_m, tile_n = fit.tile_n, cluster = fit.cluster;
    const double clusters = std::ceil(s.m / (tile_m * cluster)) * std::ceil(s.n / tile_n);
    const double waves = std::ceil(clusters / std::floor(sms / cluster));
    flops = waves * sms * tile_m * tile_n * 2 * s.k;
  }
  if (std::fmod(s.m, 16) != 0) flops *= fit.ragged;
  return together(fit, fit.launch_ns + fit.element_ns * s.m * s.k, flops, work.bytes, work.flops);
}

double gemm_floor(const Coefficients& fit, double m) {
  return fit.host_ns + (std::fmod(m, 4) != 0 ? fit.ragged_host_ns : 0);
}

KernelTime gemm_time(const Curve& curve, std::int32_t sms, const GemmShape& s) {
  const auto time = [&](double m) {
    const double at[] = {m, s.n, s.k};
    return gemm_time(curve.at(m), sms, {m, s.n, s.k, s.dtype}) * curve.correction.factor(at);
  };
  KernelTime least = time(s.m);
  if (curve.correction.empty() || least.ns >= gemm_floor(curve.at(s.m), s.m)) return least;
  for (const double m : curve.correction.axes.front().nodes) {
    if (m <= s.m) continue;
    const KernelTime more = time(m);
    if (more.ns < least.ns) least = more;
  }
  return least;
}

}  // namespace pdsim
