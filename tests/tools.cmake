pdsim_test(tools LIBRARIES pdsim_models nlohmann_json::nlohmann_json)
target_compile_definitions(test_tools PRIVATE PDSIM_BINARY="$<TARGET_FILE:pdsim>")
add_dependencies(test_tools pdsim)
