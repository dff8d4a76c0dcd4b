// Measures a list of points on the local GPU: each made ready, checked against float64, and only then timed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/shapes.hpp"
#include "kernels/statistics.hpp"

namespace pdsim::kernels {

/// The GPU as its driver describes it; what is not known is 0, "" or absent.
struct GpuFacts {
  std::string device;                   ///< "NVIDIA H200"
  std::string driver;                   ///< "580.65.06"
  std::string runtime, cublas;          ///< "13.0"
  std::int32_t compute_capability = 0;  ///< 90 = 9.0
  std::int32_t multiprocessors = 0;
  std::int64_t memory_bytes = 0, l2_bytes = 0;
  double clock_mhz = 0, memory_clock_mhz = 0;  ///< nominal
  std::int32_t memory_bus_bits = 0;
  std::optional<double> power_limit_w;
};

/// The best that the GPU did at what it should do best: what achieved figures are held against.
struct Peaks {
  double copy_gb_per_s = 0;                          ///< device to device, bytes read and bytes written
  double gemm_bf16_tflops = 0, gemm_fp8_tflops = 0;  ///< square, 8192 where memory allows; 0: no figure
};

struct Row {
  Point point;
  std::string kernel, choice;
  Measured measured;
};

/// A copy and a multiplication, each alone and beside the other.
struct Interference {
  Point point;
  Measured copy_alone, copy_beside, gemm_alone, gemm_beside;
};

/// A point without a row, and why.
struct NotMeasured {
  Point point;
  std::string why;
};

struct Measurements {
  GpuFacts gpu;
  Peaks peaks;
  std::vector<Row> rows;
  std::vector<Interference> interference;
  std::vector<NotMeasured> skipped;  ///< this GPU cannot (too little memory, no such format, no second GPU),
                                     ///< its clock was down, or no sample stood apart from its posting
  std::vector<NotMeasured> wrong;    ///< the result was not the reference's, or a call of it failed: no row
  bool interrupted = false;
  std::string broken;  ///< CUDA itself failed, at which point and why; nothing after it could be measured
};

/// Asked and told between points.
struct Watch {
  std::function<bool()> stop;
  std::function<void(std::size_t done, std::size_t total)> progress;
  double limit_s = 0;  ///< after the peaks: where points would take longer they have less each; 0: none
};

/// Whether a GPU is here that the kernels run on: sm_80 or newer and a driver for it. `why`: why not, in a
/// line. In builds with CUDA only.
bool find_gpu(std::string& why);

/// As the driver calls it: "NVIDIA H200". As above.
std::string device_name();

enum class Mode : std::uint8_t {
  measure,  ///< the peaks, and then every point
  check     ///< compares each point with its reference and times none
};

/// Goes through the points in order; what goes wrong at one ends that one, unless CUDA itself is broken. In
/// builds with CUDA only; requires find_gpu. Throws CudaError, GpuMemoryShort where not even the harness can
/// be set up.
Measurements calibrate(std::span<const Point> points, const Watch& watch, Mode mode = Mode::measure);

}  // namespace pdsim::kernels
