// From measured kernel tables (kernel_table.hpp) to a profile: least squares in the logarithm of time, each
// family of operations in models/fit/.
//
// A fifth of the (n, k), (heads, KV heads) or expert groups, chosen by a hash of the group, is spared: the
// errors in the profile are those of a fit without them, on them. What the profile holds in the end is
// fitted to all rows. Attention modules are whole layers: what a step lists beside the attention operator
// is taken off by the gemm curves fitted before.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// Where the tables come from, copied into the profile.
struct Provenance {
  std::string name, date, source, license;
};

/// The GPU that the tables were measured on, by their device column. InputError, naming --gpu, where they
/// have none or it is not known.
const Gpu& measured_gpu(const KernelTable& table);

/// Fits every curve that the rows allow, on the GPU whose multiprocessors and name `gpu` gives. InputError:
/// rows that imply more than the GPU can do (see refuse_impossible), or too few for any curve.
/// Deterministic. Up to a minute for a full set of tables.
Profile fit_profile(KernelTable table, const Gpu& gpu, const Provenance& provenance);

/// The same from files and folders (see read_kernel_tables).
Profile fit_profile(std::span<const std::filesystem::path> tables, const Gpu& gpu,
                    const Provenance& provenance);

}  // namespace pdsim
