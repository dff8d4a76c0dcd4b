// What a point asks of the GPU, whatever time that takes: achieved rates are this over the measured time.
#pragma once

#include "kernels/shapes.hpp"

namespace pdsim::kernels {

struct Work {
  double flops = 0;         ///< multiply-adds count twice; of causal attention the visible pairs alone
  double memory_bytes = 0;  ///< of GPU memory: each operand once, and of a copy within it both ends
  double link_bytes = 0;    ///< over PCIe or NVLink, one direction
};

/// O(1). Interference: of the copy.
Work work(const Point& point);

}  // namespace pdsim::kernels
