// A GPU's fitted kernel curves: models/profiles/NAME.json as structs, and which curve an operator takes.
//
// Invariants: a curve's regimes ascend in `upto` and the last is unbounded; rates and launch terms are
// not negative; every range has least <= most. Errors are on shapes that the fit never saw.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/curve.hpp"
#include "models/dtype.hpp"
#include "models/moe.hpp"

namespace pdsim {

/// Relative error |t / measured - 1| over some rows; bias is the median of its signed form.
struct Accuracy {
  std::int64_t rows = 0;
  double median_ape = 0, p90_ape = 0, bias = 0;
};

struct Range {
  double least = 0, most = 0;
  bool holds(double x) const { return least <= x && x <= most; }
};

enum class CurveOp : std::uint8_t {
  gemm,
  attention_prefill,
  attention_decode,
  mla_prefill,
  mla_decode,
  dsa_prefill,
  dsa_decode,
  moe,
  allreduce,
  allgather,
  reducescatter,
  alltoall
};
std::string_view name(CurveOp op);
std::vector<CurveOp> curve_ops();

struct Curve {
  CurveOp op = CurveOp::gemm;
  Dtype dtype = Dtype::bf16;           ///< of weights (gemm, moe), KV cache (attention), message (allreduce)
  std::int32_t head_dim = 0;           ///< attention; 0 otherwise
  std::int32_t window = 0;             ///< attention inside a sliding window of so many keys; 0: full
  std::int32_t gpus = 0;               ///< allreduce; 0 otherwise
  std::string kernel;                  ///< as the tables name it
  std::int64_t rows = 0;               ///< measurements, held-out ones included
  std::map<std::string, Range> range;  ///< what was measured, by axis: "m", "n", "context", ...
  Accuracy error;                      ///< on held-out rows
  bool in_sample = false;              ///< ... or, where there were too few to spare any, on the fitted ones
  std::vector<Coefficients> regimes;
  std::vector<MoeFamily>
      families;          ///< moe: the layers that were measured, in the order of the correction's axis
  bool special = false;  ///< a kernel that only checkpoints run which ask for it: never a simulation's choice
  Correction correction;  ///< on top of the regimes; empty where it does not pay

  /// The regime of this size: rows of a gemm, rows per expert of a moe, bytes of a message.
  const Coefficients& at(double size) const {
    std::size_t i = 0;
    while (size > regimes[i].upto) ++i;
    return regimes[i];
  }
  /// Whether a value lies in the measured range of an axis; an axis without a range holds all.
  bool holds(const std::string& axis, double value) const {
    const auto found = range.find(axis);
    return found == range.end() || found->second.holds(value);
  }
};

struct Profile {
  std::string name;
  std::string gpu;       ///< a Gpu's name
  std::string device;    ///< as the driver called it
  std::string software;  ///< whose kernels, which version
  std::string date, source, license;
  std::string sha256;  ///< of the file
  std::int32_t sms = 0;
  std::vector<Curve> curves;
  bool datasheet = false;   ///< not measured: another GPU's curves, scaled (models/datasheet.hpp)
  std::string scaled_from;  ///< ... that of this profile
  std::string stated_on;    ///< pairs of measured GPUs between which such scaling has the curves' `error`

  /// The name, and " (datasheet)" where nothing was measured.
  std::string label() const { return datasheet ? name + " (datasheet)" : name; }
};

/// A curve and how far the operator is from what it was fitted on.
struct CurveChoice {
  const Curve* curve = nullptr;
  bool stand_in = false;  ///< another format, head size, number of GPUs or device than asked for
};

/// The curve of this operator; where it was not measured, the nearest that was: a format with the same
/// tensor-core path (kStandIn in profile.cpp), then the nearest head size,
/// window or number of GPUs. No curve
/// at all is an InputError at `place`.
CurveChoice find_curve(const Profile& profile, CurveOp op, Dtype dtype, std::string_view place,
                       std::int32_t head_dim = 0, std::int32_t window = 0, std::int32_t gpus = 0);

/// The curve of routed experts: as find_curve, of several kernels the one that was measured on this layer,
/// or on as many expert-parallel ranks, or else the first; never a special one.
CurveChoice find_moe_curve(const Profile& profile, const MoeShape& shape, std::string_view place);

/// A name in models/profiles ("h200") or the path of a JSON file: curves, or a data-sheet profile, which
/// names the measured one that it scales. InputError: no such profile (lists those there are), a field that
/// is missing, unknown or out of range, or a data-sheet profile scaled from another one.
Profile load_profile(std::string_view name_or_path, std::string_view place = "profile");
std::vector<std::string> profile_names();

/// The JSON text of a measured profile, as load_profile reads it: four significant digits.
std::string to_json(const Profile& profile);

}  // namespace pdsim
