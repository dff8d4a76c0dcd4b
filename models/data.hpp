// Where the files that pdsim ships lie: models/, scenarios/, traces/.
#pragma once

#include <filesystem>

namespace pdsim {

/// $PDSIM_DATA; else ../share/pdsim from the executable, as `cmake --install` lays it; else the source
/// tree that this binary was built from. An InputError when none holds models/.
std::filesystem::path data_dir();

}  // namespace pdsim
