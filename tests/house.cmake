pdsim_test(house LIBRARIES)
