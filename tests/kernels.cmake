pdsim_test(kernels LIBRARIES pdsim_kernels)

find_program(bash bash REQUIRED)
if(PDSIM_CUDA_BUILD)
  add_test(NAME kernels.budgets
           COMMAND ${bash} ${PROJECT_SOURCE_DIR}/kernels/check_budgets $<TARGET_FILE_DIR:pdsim_kernels_gpu>)
endif()

# Prefill without a barrier, a wait, the mask, the rescaling, the group or the swizzle: its tests must notice. CI
# tries the other kernels' too. A mutated kernel is linked with the libraries as they are, so not with sanitizers'.
if(NOT PDSIM_SANITIZE)
  add_test(NAME kernels.mutations
           COMMAND ${bash} ${CMAKE_CURRENT_SOURCE_DIR}/kernels/mutations --build ${PROJECT_BINARY_DIR}
                   "^prefill (no barrier|one group|mask one|sums|wrong KV|no swizzle)")
  set_tests_properties(kernels.mutations PROPERTIES ENVIRONMENT "CXX=${CMAKE_CXX_COMPILER}" TIMEOUT 600)
endif()
