// Matrix products: what they ask of the GPU and the time that takes.
#pragma once

#include <cstdint>

#include "models/curve.hpp"
#include "models/dtype.hpp"

namespace pdsim {

struct Curve;

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

/// The same by a fitted curve: the regime of m, and the curve's correction on the axes m, n, k. Below the
/// host's floor the table does not show the kernel: there it takes no longer than with any more rows that the
/// grid has.
KernelTime gemm_time(const Curve& curve, std::int32_t sms, const GemmShape& shape);
/// What the launching host takes at least, in tables that were measured launch by launch.
double gemm_floor(const Coefficients& fit, double m);

}  // namespace pdsim
