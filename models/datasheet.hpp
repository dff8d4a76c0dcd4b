// Curves of a GPU whose kernels nobody has measured: those of the nearest measured GPU, each term scaled by
// the ratio of the data-sheet figure that limits it.
//
//   arithmetic rates                    by the dense peak of the curve's format
//   byte rates of HBM                   by HBM bandwidth
//   byte rates of L2, time an element   by the number of multiprocessors
//   time of one attention block: its    kept: it runs on one multiprocessor
//   wave, walk and split
//   byte rates of collectives           by NVLink, or by PCIe where a GPU has none
//   launches, overlaps, tiles, regimes  kept
//   and corrections
//
// Scaling the walk and the elements by HBM bandwidth as well is worse: median 6 and not 4 % of H100's curves
// as H200's (2026-11).
//
// What that is worth was measured between GPUs that both have tables: models/README.md.
#pragma once

#include "models/hardware.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// `base`, measured on `from`, as `to` might run it: marked as data-sheet grade, with to's name, product and
/// multiprocessors, and no measured rows or errors. O(size of the profile).
Profile scale_profile(Profile base, const Gpu& from, const Gpu& to);

}  // namespace pdsim
