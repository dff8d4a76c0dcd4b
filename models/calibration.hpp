// A profile of this very GPU: what `pdsim calibrate` measured with pdsim's own kernels, joined to what is
// known of an engine's kernels on GPUs of the same model.
//
// pdsim's kernels are not the engine's. The profile keeps their measured times and, for each curve,
//
//   engine_efficiency = geometric mean over the anchors of (engine / here) / speed
//
// `engine` being the time that the engine's profile gives an anchor, `here` the time that the local curve
// gives it, both as a step would run it, and `speed` the engine's GPU's time of equal work over this GPU's.
// A step takes measured time x engine_efficiency. Without `speed` that product would be the engine's table
// again, whatever was measured here: a power limit would cancel. So the speed is told by work that both sides
// do with the vendor's own library, GEMMs large enough that arithmetic or memory alone decide; a GPU that
// takes 10 % longer for those is 10 % slower for the engine too. Where no GEMM tells, the GPU counts as the
// tables'.
//
// Anchors are the shapes measured here that lie inside the ranges measured for the engine, in the same
// format, and not behind a prefix, which no engine's table has. A curve without one is an `own_kernel`: its
// measured time stands. Curves that the engine's profile has and that were not measured here (collectives on
// one GPU, formats and windows without a kernel of ours) are taken over, and marked.
#pragma once

#include <filesystem>
#include <optional>
#include <span>

#include "models/fit.hpp"
#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// The shipped profile of this GPU model, if its kernels were measured: data sheets tell no efficiency.
std::optional<Profile> shipped_engine(const Gpu& gpu);

/// `here` as fitted from local tables (Origin::tables throughout), the rows it was fitted to, and the
/// engine's profile, if any. Pure; O(rows).
Profile calibrate_against(Profile here, const KernelTable& rows, const Gpu& gpu, const Device& device,
                          const std::optional<Profile>& engine);

/// The local tables fitted (fit_profile, fit_copies) and calibrated against `engine`. An empty
/// provenance.name is "GPU-calibrated", an empty date the device's. InputError as of fit_profile, or when
/// `engine` is of another GPU model. Some seconds.
Profile calibrated_profile(KernelTable tables, const Gpu& gpu, const Device& device,
                           const std::optional<Profile>& engine, Provenance provenance);

/// The same from what `pdsim calibrate` leaves in `folder`: its tables and device.json; the GPU by the
/// device's name unless `gpu` is given, the engine's profile the shipped one.
Profile calibrated_profile(const std::filesystem::path& folder, const Gpu* gpu = nullptr,
                           Provenance provenance = {});

}  // namespace pdsim
