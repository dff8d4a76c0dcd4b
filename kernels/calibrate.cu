#include "kernels/calibrate.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/gemm.hpp"
#include "kernels/gpu_module.hpp"
#include "kernels/measure.hpp"
#include "kernels/nvml.hpp"
#include "kernels/problem.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

constexpr int kLeastCapability = 80, kFp8Capability = 89;

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

std::int32_t compute_capability() {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
}

std::string cuda_version(int version) {  // 1000 major + 10 minor
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

GpuFacts facts() {
  GpuFacts facts;
  int device = 0, version = 0;
  cudaDeviceProp properties{};
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaGetDeviceProperties(&properties, device));
  facts.device = properties.name;
  facts.compute_capability = compute_capability();
  facts.multiprocessors = properties.multiProcessorCount;
  facts.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  facts.l2_bytes = properties.l2CacheSize;
  facts.memory_bus_bits = properties.memoryBusWidth;
  facts.clock_mhz = attribute(cudaDevAttrClockRate) / 1e3;
  facts.memory_clock_mhz = attribute(cudaDevAttrMemoryClockRate) / 1e3;
  PDSIM_CUDA(cudaRuntimeGetVersion(&version));
  facts.runtime = cuda_version(version);
  facts.cublas = cublas_version();
  char address[32] = "";
  PDSIM_CUDA(cudaDeviceGetPCIBusId(address, sizeof address, device));
  const DriverFacts driver = driver_facts(address);
  facts.driver = driver.driver;
  facts.power_limit_w = driver.power_limit_w;
  if (facts.driver.empty()) {  // then at least the CUDA that it is for
    PDSIM_CUDA(cudaDriverGetVersion(&version));
    facts.driver = "for CUDA " + cuda_version(version);
  }
  return facts;
}

/// The rule for a point: half of its budget as measured time is enough, all of it is the end.
StopRule rule_of(double budget_s) {
  return {.least_seconds = std::min(0.5, budget_s / 2), .timeout_seconds = budget_s};
}

/// Thrown where a result is not the reference's.
struct WrongResult {
  std::string why;
};

void require_right(double error, double tolerance) {
  if (error <= tolerance) return;  // and not where it is NaN
  throw WrongResult{"is off by " + std::to_string(error) + "; expected at most " + std::to_string(tolerance)};
}

class Bench {
 public:
  Bench(Measurements& into, Mode mode) : out_(into), mode_(mode) {}

  void peaks() {
    out_.peaks.gemm_bf16_tflops = gemm_tflops(Format::bf16);
    if (compute_capability() >= kFp8Capability) out_.peaks.gemm_fp8_tflops = gemm_tflops(Format::fp8);
    const auto run = [this](Stream stream) {
      PDSIM_CUDA(cudaMemcpyAsync(copies_.to.data(), copies_.from.data(), CopyMemory::kBytes,
                                 cudaMemcpyDeviceToDevice, stream));
    };
    const Measured measured = harness_.time(run, rule_of(kPeakSeconds));
    if (measured.samples > 0)
      out_.peaks.copy_gb_per_s = 2 * static_cast<double>(CopyMemory::kBytes) / measured.median_us / 1e3;
  }

  void measure(const Point& point) {
    ++seed_;
    switch (point.op) {
      case Op::gemm:
        return linear(point);
      case Op::moe:
        return experts(point);
      case Op::kv_copy:
        return ready(point, copy_of(point));
      case Op::interference:
        return interference(point);
      default:
        return ready(point, attention_problem(point, seed_));
    }
  }

 private:
  static constexpr double kPeakSeconds = 1;

  double gemm_tflops(Format format) {
    constexpr std::int64_t kSide = 8192;
    LinearProblem problem(kSide, kSide, kSide, format, ++seed_);
    const auto [measured, algorithm] = best(problem, format, kPeakSeconds);
    return measured.samples > 0 ? 2.0 * kSide * kSide * kSide / measured.median_us / 1e6 : 0;
  }

  /// The fastest of the algorithms that are right, tried shortly and then timed as the budget allows.
  std::pair<Measured, int> best(LinearProblem& problem, Format format, double budget_s) {
    const double tolerance = format == Format::fp8 ? kFp8GemmTolerance : kGemmTolerance;
    const StopRule trial{.least_seconds = 0, .timeout_seconds = budget_s / 8, .noise = 1, .least_samples = 3};
    int chosen = -1;
    double least_us = 0;
    for (int i = 0; i < problem.algorithms(); ++i) {
      require_right(problem.error(i), tolerance);
      const Measured tried = time(problem, i, trial);
      if (tried.samples > 0 && (chosen < 0 || tried.median_us < least_us)) {
        chosen = i;
        least_us = tried.median_us;
      }
    }
    if (chosen < 0) return {Measured{.stop = Stop::throttled}, 0};
    return {time(problem, chosen, rule_of(budget_s)), chosen};
  }

  /// Weights come from memory because the problem goes round among copies of them; activations may be in L2.
  Measured time(LinearProblem& problem, int algorithm, const StopRule& rule) {
    return harness_.time([&](Stream stream) { problem.run(algorithm, stream); }, rule, Harness::Cache::as_is);
  }

  void linear(const Point& point) {
    if (point.format == Format::fp8 && compute_capability() < kFp8Capability)
      throw InputError("fp8", "no tensor cores for it; expected sm_89 or newer");
    LinearProblem problem(point.at("m"), point.at("n"), point.at("k"), point.format, seed_);
    const auto [measured, algorithm] = best(problem, point.format, point.budget_s);
    keep({point, "cublasLt", problem.describe(algorithm) + " of " + std::to_string(problem.algorithms()),
          measured});
  }

  void experts(const Point& point) {
    ExpertsProblem problem(point.at("tokens"),
                           {point.at("hidden"), point.at("intermediate"), point.at("experts"),
                            point.at("topk"), point.at("tp"), point.at("ep")},
                           seed_);
    require_right(problem.error(), kGemmTolerance);
    if (mode_ == Mode::check) return;
    keep({point, "cublas-grouped", "",
          harness_.time([&](Stream stream) { problem.run(stream); }, rule_of(point.budget_s))});
  }

  Problem copy_of(const Point& point) {
    return copy_problem(point.copy, point.at("run_bytes"), point.at("runs"), point.at("sms"), copies_, seed_);
  }

  void ready(const Point& point, const Problem& problem) {
    require_right(problem.error(), problem.tolerance);
    if (mode_ == Mode::check) return;
    keep({point, problem.kernel, problem.choice,
          harness_.time(problem.run, rule_of(point.budget_s), problem.cache, problem.posting)});
  }

  void interference(const Point& point) {
    const Problem copy = copy_of(point);
    require_right(copy.error(), copy.tolerance);
    LinearProblem gemm(point.at("m"), point.at("n"), point.at("k"), point.format, seed_);
    const auto [gemm_alone, algorithm] = best(gemm, point.format, point.budget_s / 4);
    const StopRule rule = rule_of(point.budget_s / 4);
    const auto multiply = [&, chosen = algorithm](Stream stream) { gemm.run(chosen, stream); };
    Interference found{
        point, harness_.time(copy.run, rule, Harness::Cache::as_is, copy.posting), {}, gemm_alone, {}};
    if (found.copy_alone.samples == 0 || gemm_alone.samples == 0)
      throw InputError("clock", "throttled throughout");
    const double copy_us = found.copy_alone.median_us, gemm_us = gemm_alone.median_us;
    found.copy_beside = harness_.time_beside(copy.run, copy_us, multiply, gemm_us, rule);
    found.gemm_beside = harness_.time_beside(multiply, gemm_us, copy.run, copy_us, rule);
    if (found.copy_beside.samples == 0 || found.gemm_beside.samples == 0)
      throw InputError("clock", "throttled throughout");
    out_.interference.push_back(found);
  }

  void keep(Row row) {
    if (row.measured.samples == 0) throw InputError("clock", "throttled throughout");
    out_.rows.push_back(std::move(row));
  }

  Measurements& out_;
  Mode mode_;
  Harness harness_;
  CopyMemory copies_;
  std::uint64_t seed_ = 0;
};

}  // namespace

bool find_gpu(std::string& why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    why = status == cudaSuccess ? "CUDA finds none" : cudaGetErrorString(status);
    return false;
  }
  const std::int32_t capability = compute_capability();
  if (capability >= kLeastCapability) return true;
  why = "its compute capability is " + std::to_string(capability / 10) + "." +
        std::to_string(capability % 10) + "; expected 8.0 or newer";
  return false;
}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties{};
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

Measurements calibrate(std::span<const Point> points, const Watch& watch, Mode mode) {
  Measurements result;
  result.gpu = facts();
  Bench bench(result, mode);
  const Point* at = nullptr;
  try {
    if (mode == Mode::measure) bench.peaks();
    for (std::size_t i = 0; i < points.size(); ++i) {
      if (watch.stop && watch.stop()) {
        result.interrupted = true;
        break;
      }
      if (watch.progress) watch.progress(i, points.size());
      at = &points[i];
      try {
        bench.measure(points[i]);
      } catch (const GpuMemoryShort& error) {
        result.skipped.push_back({points[i], error.what()});
      } catch (const InputError& error) {
        result.skipped.push_back({points[i], error.what()});
      } catch (const WrongResult& error) {
        result.wrong.push_back({points[i], error.why});
      }
    }
  } catch (const WrongResult& error) {  // of a peak: cuBLAS itself
    result.broken = "the peak's result " + error.why;
  } catch (const CudaError& error) {  // sticky: the context is gone
    result.broken = (at == nullptr ? std::string("the peaks") : describe(*at)) + ": " + error.what();
  }
  return result;
}

extern "C" {
/// What gpu_module() looks for.
extern const GpuModule pdsim_gpu_module;
const GpuModule pdsim_gpu_module = {find_gpu, device_name, calibrate};
}

}  // namespace pdsim::kernels
