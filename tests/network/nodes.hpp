// Nodes for the tests: a p5en.48xlarge as it is, and one whose fabric loses nothing, for closed forms.
#pragma once

#include <string>
#include <vector>

#include "sim/network/topology.hpp"

namespace pdsim::testing {

/// 8 GPUs, NVLink 450 bytes/ns, 16 NICs of 25 bytes/ns: 50 a GPU.
inline std::vector<NodeSpec> nodes(std::int32_t count, const Fabric& fabric) {
  std::vector<NodeSpec> specs;
  for (std::int32_t n = 0; n < count; ++n) {
    specs.push_back({.name = "node" + std::to_string(n),
                     .gpus = 8,
                     .nvlink_rate = 450,
                     .pcie_rate = 64,
                     .nics = 16,
                     .nic_rate = 25,
                     .fabric = &fabric});
  }
  return specs;
}

inline const Fabric& p5en() {
  return find_fabric("efa", 3, "test");
}

inline const Fabric& lossless() {
  static constexpr CurvePoint kLine[] = {{1, 400}};
  static constexpr Fabric kFabric{"lossless", "ideal", 400, kUnlimited, kLine, kLine, 0, kUnlimited, ""};
  return kFabric;
}

}  // namespace pdsim::testing
