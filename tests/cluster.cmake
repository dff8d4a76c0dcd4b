pdsim_test(cluster LIBRARIES pdsim_cluster nlohmann_json::nlohmann_json)
