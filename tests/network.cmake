pdsim_test(network LIBRARIES pdsim_network)
