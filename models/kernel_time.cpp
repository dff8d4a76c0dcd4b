#include "models/kernel_time.hpp"

#include <algorithm>
#include <string_view>

#include "models/attention_row.hpp"
#include "models/collective.hpp"
#include "models/gemm.hpp"
#include "models/moe.hpp"

namespace pdsim {
namespace {

/// The first curve of the row's operation, format and kernel that `fits`, or nullptr.
template <class Fits>
const Curve* own_curve(const Profile& profile, const KernelTable& table, const KernelRow& row,
                       const Fits& fits) {
  const auto found = std::find_if(profile.curves.begin(), profile.curves.end(), [&](const Curve& curve) {
    return curve.op == row.op && curve.dtype == row.dtype && has_kernel(curve, table.kernels[row.kernel]) &&
           fits(curve);
  });
  return found == profile.curves.end() ? nullptr : &*found;
}

bool within(const Curve& curve, const KernelRow& row) {
  const auto axes = shape_axes(row.op);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (!curve.holds(std::string(axes[i]), row.shape[i])) return false;
  }
  return true;
}

/// The row cannot take less than its host does.
KernelTime floored(KernelTime time, double floor) {
  const double ns = std::max(time.ns, floor);
  time.launch += ns - time.ns;
  time.ns = ns;
  return time;
}

Prediction predict_gemm(const Profile& profile, const Gpu& gpu, const KernelTable& table,
                        const KernelRow& row) {
  const Curve* own = own_curve(profile, table, row, [](const Curve&) { return true; });
  const CurveChoice choice = own != nullptr ? CurveChoice{own, profile.datasheet}
                                            : find_curve(profile, CurveOp::gemm, row.dtype, table.place(row));
  const Curve& curve = *choice.curve;
  const GemmShape shape = gemm_shape(row);
  return {floored(gemm_time(curve, gpu.sm_count, shape), gemm_floor(curve.at(shape.m), shape.m)), choice,
          within(curve, row)};
}

Prediction predict_moe(const Profile& profile, const Gpu&, const KernelTable& table, const KernelRow& row) {
  const MoeShape shape = moe_shape(row);
  const Curve* own = own_curve(profile, table, row, [](const Curve&) { return true; });
  const CurveChoice choice =
      own != nullptr ? CurveChoice{own, profile.datasheet} : find_moe_curve(profile, shape, table.place(row));
  const Curve& curve = *choice.curve;
  const bool within = curve.holds("tokens", shape.tokens) && curve.holds("hidden", shape.hidden) &&
                      curve.holds("intermediate", shape.intermediate) &&
                      curve.holds("experts", shape.experts) && curve.holds("topk", shape.topk) &&
                      curve.holds("expert_parallel", shape.expert_parallel);
  return {moe_time(curve, shape), choice, within};
}

Prediction predict_collective(const Profile& profile, const Gpu&, const KernelTable& table,
                              const KernelRow& row) {
  const auto gpus = static_cast<std::int32_t>(row.at("gpus"));
  const Curve* own = own_curve(profile, table, row, [&](const Curve& curve) { return curve.gpus == gpus; });
  const CurveChoice choice = own != nullptr ? CurveChoice{own, profile.datasheet}
                                            : find_collective(profile, row.op, row.dtype, gpus,
                                                              CollectiveMode::graph, table.place(row));
  return {collective_time(*choice.curve, row.at("bytes")), choice, within(*choice.curve, row)};
}

Prediction predict_attended(const Profile& profile, const Gpu& gpu, const KernelTable& table,
                            const KernelRow& row) {
  const AttentionPrediction prediction = predict_attention(profile, gpu, table, row);
  return {prediction.time, prediction.choice, prediction.within};
}

}  // namespace

bool has_kernel(const Curve& curve, std::string_view kernel) {
  constexpr std::string_view kBetween = ", ";
  std::string_view rest = curve.kernel;
  while (true) {
    const std::size_t end = rest.find(kBetween);
    if (rest.substr(0, end) == kernel) return true;
    if (end == rest.npos) return false;
    rest.remove_prefix(end + kBetween.size());
  }
}

Prediction predict(const Profile& profile, const Gpu& gpu, const KernelTable& table, const KernelRow& row) {
  switch (row.op) {
    case CurveOp::gemm:
      return predict_gemm(profile, gpu, table, row);
    case CurveOp::moe:
      return predict_moe(profile, gpu, table, row);
    case CurveOp::allreduce:
    case CurveOp::allgather:
    case CurveOp::reducescatter:
    case CurveOp::alltoall:
      return predict_collective(profile, gpu, table, row);
    case CurveOp::attention_prefill:
    case CurveOp::attention_decode:
    case CurveOp::mla_prefill:
    case CurveOp::mla_decode:
    case CurveOp::dsa_prefill:
    case CurveOp::dsa_decode:
      break;
  }
  return predict_attended(profile, gpu, table, row);
}

}  // namespace pdsim
