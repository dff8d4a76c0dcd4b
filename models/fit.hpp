// From measured kernel tables to a profile: least squares in the logarithm of time.
//
// Tables are CSV files, gzipped or not, in the columns of ai-dynamo/aiconfigurator's silicon data (one
// row a shape, `latency` in ms): gemm, context_attention, generation_attention, moe, custom_allreduce,
// {mla,dsa}_{context,generation}_module. The modules are whole attention layers, projections included:
// the time of what a step lists beside the attention operator (projections by the gemm curves fitted
// before, two elementwise kernels) is taken off, and what is left is that operator. message_size of the
// all-reduce counts elements, not bytes.
//
// A fifth of the (n, k), (heads, KV heads) or expert groups, chosen by a hash of the group, is never
// fitted: the errors in the profile are on those.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "models/hardware.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// Where the tables come from, copied into the profile.
struct Provenance {
  std::string name, date, source, license;
};

/// Fits every curve that the tables allow, on the GPU whose multiprocessors and name `gpu` gives.
/// `tables` are files or folders of them; unknown file names in a folder are passed over. InputError: a
/// table that cannot be read, lacks a column or holds no number where one must be (with its line).
/// Deterministic. Some seconds for a full set of tables.
Profile fit_profile(std::span<const std::filesystem::path> tables, const Gpu& gpu,
                    const Provenance& provenance);

}  // namespace pdsim
