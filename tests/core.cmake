pdsim_test(core LIBRARIES pdsim_core)
