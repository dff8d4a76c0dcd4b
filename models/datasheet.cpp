#include "models/datasheet.hpp"

#include <utility>

namespace pdsim {
namespace {

bool is_collective(CurveOp op) {
  return op == CurveOp::allreduce || op == CurveOp::allgather || op == CurveOp::reducescatter ||
         op == CurveOp::alltoall;
}

double link_bytes_per_ns(const Gpu& gpu) {
  return gpu.nvlink_bytes_per_ns > 0 ? gpu.nvlink_bytes_per_ns : gpu.pcie_bytes_per_ns;
}

}  // namespace

Profile scale_profile(Profile base, const Gpu& from, const Gpu& to) {
  const double hbm = to.hbm_bytes_per_ns / from.hbm_bytes_per_ns;
  const double sms = static_cast<double>(to.sm_count) / from.sm_count;
  const double link = link_bytes_per_ns(to) / link_bytes_per_ns(from);
  for (Curve& curve : base.curves) {
    const double peak = peak_ops_per_ns(to, curve.dtype) / peak_ops_per_ns(from, curve.dtype);
    for (Coefficients& c : curve.regimes) {
      if (is_collective(curve.op)) {
        c.bytes_per_ns *= link;
        continue;
      }
      c.flops_per_ns *= peak;
      c.bytes_per_ns *= hbm;
      c.cache_bytes_per_ns *= sms;
      c.element_ns /= sms;
      c.inner_ns /= sms;
    }
    curve.rows = 0;
    curve.error = {};
    curve.in_sample = false;
  }
  base.gpu = base.name = to.name;
  base.device = to.product;
  base.sms = to.sm_count;
  base.datasheet = true;
  return base;
}

}  // namespace pdsim
