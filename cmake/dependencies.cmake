# Every library that pdsim uses, with the reason. All of them are Debian and Ubuntu packages;
# tools/packages lists their names.
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)      # scenarios, model configs and results are JSON
find_package(CLI11 REQUIRED)              # the command line
find_package(Eigen3 REQUIRED NO_MODULE)   # least squares in the kernel fits
find_package(Boost REQUIRED)              # Boost.Graph: topology and its routes, at load only
find_package(fmt REQUIRED)                # text: messages, tables, CSV
find_package(simdjson REQUIRED)           # JSONL traces of any size
find_package(ZLIB REQUIRED)               # traces and tables that come as .gz
find_package(OpenSSL REQUIRED COMPONENTS Crypto)  # SHA-256 of every input
find_package(SQLite3 REQUIRED)            # results of sweeps, safe at every moment
find_package(PkgConfig REQUIRED)
pkg_check_modules(muparser REQUIRED IMPORTED_TARGET muparser)  # constraints between parameters of a sweep
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)  # traces that come as .zst

# Header-only givens are system headers: their warnings are not ours.
foreach(target nlohmann_json::nlohmann_json CLI11::CLI11 Eigen3::Eigen fmt::fmt)
  get_target_property(dirs ${target} INTERFACE_INCLUDE_DIRECTORIES)
  if(dirs)
    set_target_properties(${target} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${dirs}")
  endif()
endforeach()
