#include "models/fit.hpp"

#include <fmt/format.h>

#include <utility>

#include "models/fit/fits.hpp"
#include "models/kernel_table.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

const Gpu& measured_gpu(const KernelTable& table) {
  if (const Gpu* gpu = find_device(table.device); gpu != nullptr) return *gpu;
  throw InputError(
      table.files.front(),
      fmt::format("{}: expected --gpu with one of {}",
                  table.device.empty() ? "does not say which GPU was measured"
                                       : fmt::format("device '{}' is none that pdsim knows", table.device),
                  fmt::join(gpu_names(), ", ")));
}

Profile fit_profile(std::span<const std::filesystem::path> tables, const Gpu& gpu,
                    const Provenance& provenance) {
  return fit_profile(read_kernel_tables(tables), gpu, provenance);
}

Profile fit_profile(KernelTable table, const Gpu& gpu, const Provenance& provenance) {
  refuse_impossible(table, gpu);
  merge_repeats(table);
  Profile profile;
  profile.name = provenance.name;
  profile.gpu = gpu.name;
  profile.device = table.device;
  profile.software = table.software;
  profile.date = provenance.date;
  profile.source = provenance.source;
  profile.license = provenance.license;
  profile.sms = gpu.sm_count;
  fit_gemm(profile, table, gpu);
  fit_attention(profile, table, gpu);
  fit_moe(profile, table, gpu);
  fit_collectives(profile, table, gpu);
  fit_copies(profile, table);
  if (profile.curves.empty() && profile.copies.empty()) {
    throw InputError(table.files.front(), "no table to fit: too few rows for any curve");
  }
  return profile;
}

}  // namespace pdsim
