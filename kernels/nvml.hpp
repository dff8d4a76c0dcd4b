// What only the driver's management library knows of a GPU. It is loaded when asked, so that nothing needs it
// to build or to run: where it is not there, or will not say, a field is blank.
#pragma once

#include <optional>
#include <string>

namespace pdsim::kernels {

struct DriverFacts {
  std::string driver;                   ///< "580.65.06"; "" where not known
  std::optional<double> power_limit_w;  ///< enforced now
};

/// Of the GPU at a PCI address as CUDA writes it ("0000:3b:00.0"). Never fails.
DriverFacts driver_facts(const std::string& pci_address);

}  // namespace pdsim::kernels
