pdsim_test(kernels LIBRARIES pdsim_kernels)

find_program(bash bash REQUIRED)
if(PDSIM_CUDA_BUILD)
  add_test(NAME kernels.budgets
           COMMAND ${bash} ${PROJECT_SOURCE_DIR}/kernels/check_budgets $<TARGET_FILE_DIR:pdsim_kernels_gpu>)
endif()
