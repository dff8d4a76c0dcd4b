// A GPU's fitted kernel curves: models/profiles/NAME.json as structs, and which curve an operator takes.
//
// Invariants: a curve's regimes ascend in `upto` and the last is unbounded; rates and launch terms are
// not negative; every range has least <= most. Errors are on shapes that the fit never saw.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/copy.hpp"
#include "models/curve.hpp"
#include "models/dtype.hpp"
#include "models/moe.hpp"

namespace pdsim {

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

/// Where a curve's measurements are from.
enum class Origin : std::uint8_t {
  tables,      ///< a profile's own tables
  here,        ///< pdsim's kernel on this GPU, with anchors: see Efficiency
  own_kernel,  ///< pdsim's kernel on this GPU, of which no table says what the engine's takes
  taken        ///< the profile of the same GPU model that a calibration rests on: it was not measured here
};

/// The engine's time over that of pdsim's own kernel on the same shape and an equally fast GPU: geometric
/// mean over the anchors, and the geometric standard deviation less 1.
struct Efficiency {
  double factor = 1, spread = 0;
  std::int64_t anchors = 0;
};

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
  bool bare = false;     ///< latent attention measured as its kernel alone, not as a module of a layer
  Correction correction;  ///< on top of the regimes; empty where it does not pay
  Origin origin = Origin::tables;
  Efficiency efficiency;  ///< of Origin::here; a simulation takes factor x the measured time

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

/// The machine that `pdsim calibrate` ran on, as it wrote it to device.json. 0 or "" where it did not say.
struct Device {
  std::string name, driver, runtime, cublas, date;
  std::string status;  ///< "finished", or "interrupted": the tables lack what was not reached
  std::int32_t compute_capability = 0, sms = 0;
  std::int64_t memory_bytes = 0, l2_bytes = 0;
  double clock_mhz = 0, memory_clock_mhz = 0, power_limit_w = 0;
  double copy_gb_per_s = 0, bf16_tflops = 0, fp8_tflops = 0;  ///< peaks, measured
};

/// Time of equal work on the GPU of the engine's tables over its time here, as the vendor's library tells it
/// where arithmetic or memory alone decide; 1 where nothing told.
struct DeviceSpeed {
  double compute = 1, memory = 1;
  std::int64_t compute_anchors = 0, memory_anchors = 0;
};

/// What makes a profile a calibration (models/calibration.hpp).
struct Calibration {
  Device device;
  std::string engine;         ///< the profile that efficiencies compare with; "": there was none
  std::string engine_sha256;  ///< ... its bytes
  DeviceSpeed speed;
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
  std::vector<CopyCurve> copies;           ///< of a calibration
  std::optional<Calibration> calibration;  ///< of curves measured by pdsim's own kernels
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

/// What a calibration wrote of its machine. InputError: not a file, or no such document.
Device load_device(const std::filesystem::path& file);

/// The JSON text of a measured profile, as load_profile reads it: four significant digits.
std::string to_json(const Profile& profile);

}  // namespace pdsim
