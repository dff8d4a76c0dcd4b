pdsim_test(tools LIBRARIES nlohmann_json::nlohmann_json)
target_compile_definitions(test_tools PRIVATE PDSIM_BINARY="$<TARGET_FILE:pdsim>")
add_dependencies(test_tools pdsim)
