// GPUs, EC2 instances and what an hour of them costs: models/gpus.json and models/instances.json as
// structs. Every figure there names its source; a figure nobody has published is absent, not guessed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/dtype.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

/// Data-sheet figures of one GPU: what the hardware could, not what kernels reach.
struct Gpu {
  std::string name;        ///< "h200"
  std::string product;     ///< "NVIDIA H200 SXM 141 GB"
  Bytes memory_bytes = 0;  ///< as the driver reports it
  double hbm_bytes_per_ns = 0;
  double fp32_tflops = 0;                                                 ///< without tensor cores
  double bf16_tflops = 0, fp8_tflops = 0, fp4_tflops = 0, int8_tops = 0;  ///< dense; 0 = not in hardware
  double nvlink_bytes_per_ns = 0;  ///< each direction, of a link of that kind; 0 = none
  double pcie_bytes_per_ns = 0;    ///< each direction
  std::int32_t nvlink_gpus = 8;    ///< that NVLink, or what does for it, joins
  std::int32_t sm_count = 0;
  std::int32_t compute_capability = 0;  ///< 90 = 9.0; 0 = not NVIDIA's
  std::string source;
};

struct Price {
  double usd_per_hour = 0;
  std::string as_of;  ///< "2026-11-09" or "2026-11"
  std::string source;
};

struct Instance {
  std::string name;  ///< "p5en.48xlarge"
  std::string gpu;   ///< a Gpu's name
  std::int32_t gpus = 0;
  std::int32_t nics = 0;                ///< EFA network cards
  double nic_gbit_per_s = 0;            ///< of one card, each direction
  std::int32_t efa_version = 0;         ///< 0 = not stated
  Bytes host_memory_bytes = 0;          ///< 0 = not stated
  std::map<std::string, Price> prices;  ///< plan ("on_demand") -> whole instance
  std::string source;

  /// Cards that serve one GPU; a half where two GPUs share one.
  double nics_per_gpu() const { return static_cast<double>(nics) / gpus; }
  double nic_bytes_per_ns() const { return nic_gbit_per_s / 8; }
};

/// Found by name; an InputError at `place` lists the known names and the nearest. Of a GPU with several
/// sizes of memory ("a100-40gb", "a100-80gb") the bare name is the largest.
const Gpu& find_gpu(std::string_view name, std::string_view place);
/// The GPU that a driver calls so ("NVIDIA A100-SXM4-80GB"): all words of its name are among the device's.
/// nullptr where none is, or the board is another one (PCIe, NVL).
const Gpu* find_device(std::string_view device);
const Instance& find_instance(std::string_view name, std::string_view place);

/// InputError at `place` when the plan is not one, or no source gives this instance's price under it.
const Price& find_price(const Instance& instance, std::string_view plan, std::string_view place);
/// The same, in USD per hour of the whole instance.
double price(const Instance& instance, std::string_view plan, std::string_view place);

/// Operations per ns of the tensor cores on operands of this format: weights in a format that the GPU
/// does not multiply are widened to the next one that it does.
double peak_ops_per_ns(const Gpu& gpu, Dtype dtype);

std::vector<std::string> gpu_names();
std::vector<std::string> instance_names();

}  // namespace pdsim
