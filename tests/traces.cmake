pdsim_test(traces LIBRARIES pdsim_traces ZLIB::ZLIB PkgConfig::zstd nlohmann_json::nlohmann_json)
