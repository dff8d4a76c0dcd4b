#include "kernels/gpu_module.hpp"

#include <dlfcn.h>

#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

const GpuModule& load() {
  void* library = dlopen("libpdsim_kernels_gpu.so", RTLD_NOW | RTLD_LOCAL);
  const void* module = library == nullptr ? nullptr : dlsym(library, "pdsim_gpu_module");
  if (module == nullptr) {
    throw InputError("calibrate", std::string("the GPU part of pdsim cannot be loaded (").append(dlerror()) +
                                      "); expected CUDA's libraries where pdsim was built");
  }
  return *static_cast<const GpuModule*>(module);
}

}  // namespace

const GpuModule& gpu_module() {
  static const GpuModule& module = load();
  return module;
}

}  // namespace pdsim::kernels
