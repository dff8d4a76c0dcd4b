pdsim_test(routing LIBRARIES pdsim_routing pdsim_serving)
