#include "models/data.hpp"

#include <cstdlib>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

namespace fs = std::filesystem;

bool holds_data(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / "models" / "gpus.json", ignored);
}

}  // namespace

fs::path data_dir() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in pdsim calls setenv
  if (const char* given = std::getenv("PDSIM_DATA"); given != nullptr && *given != '\0') {
    if (holds_data(given)) return given;
    throw InputError("PDSIM_DATA", std::string("is '") + given + "', which holds no models/gpus.json");
  }
  std::error_code failed;
  const fs::path executable = fs::read_symlink("/proc/self/exe", failed);
  if (!failed) {
    const fs::path installed = executable.parent_path().parent_path() / "share" / "pdsim";
    if (holds_data(installed)) return installed;
  }
  if (holds_data(PDSIM_SOURCE_DATA_DIR)) return PDSIM_SOURCE_DATA_DIR;
  throw InputError("PDSIM_DATA",
                   "is not set, and pdsim's own models/ is neither beside the executable nor in "
                   "the source tree: give the folder that holds models/");
}

}  // namespace pdsim
