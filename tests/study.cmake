pdsim_test(study LIBRARIES pdsim_study nlohmann_json::nlohmann_json)
