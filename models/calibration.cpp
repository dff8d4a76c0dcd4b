#include "models/calibration.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "models/attention_row.hpp"
#include "models/fit/fits.hpp"
#include "models/gemm.hpp"
#include "models/moe.hpp"
#include "sim/core/error.hpp"
#include "sim/core/math.hpp"

namespace pdsim {
namespace {

/// A shape's time as a step would run it.
struct Served {
  const Curve* curve = nullptr;
  KernelTime time;
  bool within = false;  ///< every axis in the curve's measured range
};

/// Nothing where the profile has no curve of the row's own format, or none that is no stand-in.
std::optional<Served> serve(const Profile& profile, const Gpu& gpu, const KernelTable& rows,
                            const KernelRow& row) {
  const bool has = std::any_of(profile.curves.begin(), profile.curves.end(), [&](const Curve& curve) {
    return curve.op == row.op && curve.dtype == row.dtype && !curve.special;
  });
  if (!has) return std::nullopt;
  const std::string place = rows.place(row);
  Served served;
  const auto holds = [&](const char* axis, double value) {
    served.within = served.within && served.curve->holds(axis, value);
  };
  if (row.op == CurveOp::gemm) {
    const GemmShape shape = gemm_shape(row);
    const CurveChoice choice = find_curve(profile, row.op, row.dtype, place);
    served = {choice.curve, gemm_time(*choice.curve, gpu.sm_count, shape) * choice.curve->efficiency.factor,
              !choice.stand_in};
    holds("m", shape.m);
    holds("n", shape.n);
    holds("k", shape.k);
    return served;
  }
  if (row.op == CurveOp::moe) {
    MoeShape shape = moe_shape(row);
    shape.warm = false;  // in a model other layers' weights evict these
    const CurveChoice choice = find_moe_curve(profile, shape, place);
    served = {choice.curve, moe_time(*choice.curve, shape) * choice.curve->efficiency.factor,
              !choice.stand_in};
    holds("tokens", shape.tokens);
    holds("hidden", shape.hidden);
    holds("intermediate", shape.intermediate);
    holds("experts", shape.experts);
    holds("topk", shape.topk);
    holds("expert_parallel", shape.expert_parallel);
    return served;
  }
  const std::optional<AttentionRow> attention = attention_row(rows, row);
  if (!attention || attention->op != row.op) return std::nullopt;
  const Operator& op = attention->operation;
  const CurveChoice choice = find_curve(profile, row.op, row.dtype, place,
                                        op.kind == OpKind::attention ? op.head_dim : 0, op.window);
  served = {choice.curve, serving_kernel(*choice.curve, gpu, op, row.dtype).time(attention->shape),
            !choice.stand_in};
  holds("requests", attention->shape.requests);
  holds("context", attention->context);
  holds("heads", op.heads);
  if (op.kind == OpKind::attention) holds("kv_heads", op.kv_heads);
  return served;
}

bool is_collective(CurveOp op) {
  return op >= CurveOp::allreduce;
}

struct Anchor {
  const Curve* here = nullptr;
  double log_ratio = 0;  ///< of the engine's time over the local curve's
  KernelTime engine;
  const KernelRow* row = nullptr;
};

std::vector<Anchor> anchors_of(const Profile& here, const Profile& engine, const KernelTable& rows,
                               const Gpu& gpu) {
  std::vector<Anchor> anchors;
  for (const KernelRow& row : rows.rows) {
    if (is_collective(row.op)) continue;
    if (row.op == CurveOp::attention_prefill && row.at("prefix") > 0) continue;
    const std::optional<Served> mine = serve(here, gpu, rows, row), its = serve(engine, gpu, rows, row);
    if (!mine || !its || !mine->within || !its->within) continue;
    anchors.push_back({mine->curve, math::log(its->time.ns / mine->time.ns), its->time, &row});
  }
  return anchors;
}

/// A GEMM that shows what the GPU can do: little of it is launch, and its operands are not in the L2 cache.
bool shows_speed(const Anchor& anchor, double l2_bytes) {
  constexpr double kLaunchShare = 0.05, kBeyondCache = 2;
  if (anchor.row->op != CurveOp::gemm || anchor.row->dtype != Dtype::bf16) return false;
  if (anchor.engine.launch > kLaunchShare * anchor.engine.ns) return false;
  return anchor.engine.regime() == Regime::compute ||
         gemm_work(gemm_shape(*anchor.row)).bytes > kBeyondCache * l2_bytes;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

DeviceSpeed speed_of(const std::vector<Anchor>& anchors, double l2_bytes) {
  std::vector<double> compute, memory;
  for (const Anchor& anchor : anchors) {
    if (!shows_speed(anchor, l2_bytes)) continue;
    (anchor.engine.regime() == Regime::compute ? compute : memory).push_back(anchor.log_ratio);
  }
  return {rounded(math::exp(mean(compute))), rounded(math::exp(mean(memory))),
          static_cast<std::int64_t>(compute.size()), static_cast<std::int64_t>(memory.size())};
}

/// Geometric mean and deviation of engine / here / speed.
Efficiency efficiency_of(const std::vector<const Anchor*>& anchors, const DeviceSpeed& speed) {
  std::vector<double> logs, squares;
  for (const Anchor* anchor : anchors) {
    // Launches go with the clock, as arithmetic does.
    const bool memory = anchor->engine.regime() == Regime::bandwidth;
    logs.push_back(anchor->log_ratio - math::log(memory ? speed.memory : speed.compute));
  }
  const double centre = mean(logs);
  for (const double x : logs) squares.push_back((x - centre) * (x - centre));
  return {rounded(math::exp(centre)), rounded(math::exp(std::sqrt(mean(squares))) - 1),
          static_cast<std::int64_t>(anchors.size())};
}

/// Whether a local curve stands in the place of this one of the engine's.
bool replaces(const Curve& here, const Curve& engine) {
  return here.op == engine.op && here.dtype == engine.dtype && here.head_dim == engine.head_dim &&
         here.window == engine.window && here.gpus == engine.gpus;
}

}  // namespace

std::optional<Profile> shipped_engine(const Gpu& gpu) {
  const std::vector<std::string> names = profile_names();
  if (std::find(names.begin(), names.end(), gpu.name) == names.end()) return std::nullopt;
  Profile profile = load_profile(gpu.name);
  if (profile.datasheet) return std::nullopt;
  return profile;
}

Profile calibrate_against(Profile here, const KernelTable& rows, const Gpu& gpu, const Device& device,
                          const std::optional<Profile>& engine) {
  Calibration calibration;
  calibration.device = device;
  for (Curve& curve : here.curves) curve.origin = Origin::own_kernel;
  if (engine) {
    calibration.engine = engine->name;
    calibration.engine_sha256 = engine->sha256;
    const std::vector<Anchor> anchors = anchors_of(here, *engine, rows, gpu);
    calibration.speed = speed_of(anchors, static_cast<double>(device.l2_bytes));
    for (Curve& curve : here.curves) {
      std::vector<const Anchor*> own;
      for (const Anchor& anchor : anchors) {
        if (anchor.here == &curve) own.push_back(&anchor);
      }
      if (own.empty()) continue;
      curve.origin = Origin::here;
      curve.efficiency = efficiency_of(own, calibration.speed);
    }
    const std::size_t measured = here.curves.size();
    for (const Curve& curve : engine->curves) {
      const auto* end = here.curves.data() + measured;
      if (std::any_of(std::as_const(here.curves).data(), end,
                      [&](const Curve& own) { return replaces(own, curve); })) {
        continue;
      }
      here.curves.push_back(curve);
      here.curves.back().origin = Origin::taken;
    }
  }
  here.calibration = std::move(calibration);
  return here;
}

Profile calibrated_profile(KernelTable tables, const Gpu& gpu, const Device& device,
                           const std::optional<Profile>& engine, Provenance provenance) {
  if (engine && engine->gpu != gpu.name) {
    throw InputError("engine profile", fmt::format("'{}' is of {}, expected one of {}, which was measured",
                                                   engine->name, engine->gpu, gpu.name));
  }
  if (provenance.name.empty()) provenance.name = fmt::format("{}-calibrated", gpu.name);
  if (provenance.date.empty()) provenance.date = device.date;
  if (provenance.source.empty()) provenance.source = "pdsim calibrate";
  merge_repeats(tables);
  return calibrate_against(fit_profile(tables, gpu, provenance), tables, gpu, device, engine);
}

Profile calibrated_profile(const std::filesystem::path& folder, const Gpu* gpu, Provenance provenance) {
  const std::filesystem::path tables[] = {folder};
  KernelTable table = read_kernel_tables(tables);
  const Gpu& of = gpu != nullptr ? *gpu : measured_gpu(table);
  return calibrated_profile(std::move(table), of, load_device(folder / "device.json"), shipped_engine(of),
                            std::move(provenance));
}

}  // namespace pdsim
