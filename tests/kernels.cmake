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

# The harness's own code on a CUDA of the test's: the .cu files as C++, where CUDA 13's headers are, nvcc or not.
find_path(cuda_headers cublasLt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include NO_CACHE)
set(cuda_version "")
if(cuda_headers)
  file(STRINGS ${cuda_headers}/cuda_runtime_api.h cuda_version REGEX "define CUDART_VERSION +1[3-9]")
endif()
if(cuda_version)
  file(GLOB host_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*.cu
       ${CMAKE_CURRENT_SOURCE_DIR}/kernels/rehearsal/*.cu)
  set_source_files_properties(${host_sources} PROPERTIES LANGUAGE CXX)
  add_executable(test_kernels_rehearsal kernels/rehearsal/rehearsal_test.cpp ${host_sources})
  target_include_directories(test_kernels_rehearsal SYSTEM PRIVATE ${cuda_headers})
  target_link_libraries(test_kernels_rehearsal PRIVATE pdsim_kernels pdsim_models GTest::gtest_main)
  gtest_discover_tests(test_kernels_rehearsal TEST_PREFIX kernels. PROPERTIES TIMEOUT 600)
endif()
