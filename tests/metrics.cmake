pdsim_test(metrics LIBRARIES pdsim_metrics nlohmann_json::nlohmann_json)
