pdsim_test(models LIBRARIES pdsim_models)
