pdsim_test(serving LIBRARIES pdsim_serving)
