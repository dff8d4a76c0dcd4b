#include "kernels/nvml.hpp"

#include <dlfcn.h>

#include <memory>

namespace pdsim::kernels {
namespace {

// As nvml.h of CUDA 13 declares them; every status but 0 is an error.
using Device = void*;
using Init = int (*)();
using DriverVersion = int (*)(char*, unsigned);
using DeviceByAddress = int (*)(const char*, Device*);
using PowerLimit = int (*)(Device, unsigned*);  // milliwatts

struct Close {
  void operator()(void* library) const { dlclose(library); }
};

template <class Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

DriverFacts driver_facts(const std::string& pci_address) {
  DriverFacts facts;
  const std::unique_ptr<void, Close> library(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL));
  if (!library) return facts;
  const auto init = find<Init>(library.get(), "nvmlInit_v2");
  const auto shutdown = find<Init>(library.get(), "nvmlShutdown");
  const auto version = find<DriverVersion>(library.get(), "nvmlSystemGetDriverVersion");
  const auto device_at = find<DeviceByAddress>(library.get(), "nvmlDeviceGetHandleByPciBusId_v2");
  const auto limit = find<PowerLimit>(library.get(), "nvmlDeviceGetEnforcedPowerLimit");
  if (init == nullptr || shutdown == nullptr || init() != 0) return facts;
  char text[96] = "";
  if (version != nullptr && version(text, sizeof text) == 0) facts.driver = text;
  Device device = nullptr;
  unsigned milliwatts = 0;
  if (device_at != nullptr && limit != nullptr && device_at(pci_address.c_str(), &device) == 0 &&
      limit(device, &milliwatts) == 0)
    facts.power_limit_w = milliwatts / 1e3;
  shutdown();
  return facts;
}

}  // namespace pdsim::kernels
