#include "kernels/calibrate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "kernels/gemm.hpp"
#include "kernels/gpu_module.hpp"
#include "kernels/measure.hpp"
#include "kernels/nvml.hpp"
#include "kernels/problem.hpp"
#include "kernels/work.hpp"
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

/// What peaks are measured on is at most a 64th of a GPU's memory: here x, y and two copies of the weights,
/// below each of the arrays that are copied.
std::int64_t peak_side(std::int64_t memory_bytes) {
  std::int64_t side = 8192;
  while (side > 16 && 8 * side * side > memory_bytes / 64) side /= 2;
  return side;
}
std::size_t copied_bytes(std::int64_t memory_bytes) {
  return std::min(CopyMemory::kMostBytes, static_cast<std::size_t>(memory_bytes / 64 / 256 * 256));
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
  Bench(Measurements& into, Mode mode)
      : out_(into), mode_(mode), copies_(copied_bytes(into.gpu.memory_bytes)) {}

  /// The peaks as points, which peak() takes.
  std::vector<Point> peaks() const {
    const std::int64_t side = peak_side(out_.gpu.memory_bytes),
                       bytes = static_cast<std::int64_t>(copies_.from.size());
    std::vector<Point> all = {{Op::gemm, Format::bf16, Copy::gather, {side, side, side}, kPeakSeconds},
                              {Op::kv_copy, Format::bf16, Copy::batch_d2d, {bytes, 1, 0}, kPeakSeconds}};
    if (out_.gpu.compute_capability >= kFp8Capability)
      all.push_back({Op::gemm, Format::fp8, Copy::gather, {side, side, side}, kPeakSeconds});
    return all;
  }

  void peak(const Point& point) {
    if (point.op == Op::kv_copy) return copy_peak();
    LinearProblem problem(point.at("m"), point.at("n"), point.at("k"), point.format, ++seed_);
    const Measured measured = best(problem, point.format, point.budget_s).first;
    require_samples(measured);
    (point.format == Format::bf16 ? out_.peaks.gemm_bf16_tflops : out_.peaks.gemm_fp8_tflops) =
        work(point).flops / measured.median_us / 1e6;
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

  void copy_peak() {
    const auto run = [this](Stream stream) {
      PDSIM_CUDA(cudaMemcpyAsync(copies_.to.data(), copies_.from.data(), copies_.to.size(),
                                 cudaMemcpyDeviceToDevice, stream));
    };
    const Measured measured = harness_.time(run, rule_of(kPeakSeconds));
    require_samples(measured);
    out_.peaks.copy_gb_per_s = 2 * static_cast<double>(copies_.to.size()) / measured.median_us / 1e3;
  }

  /// Of all its algorithms.
  static void require_right_gemm(LinearProblem& problem, Format format) {
    const double tolerance = format == Format::fp8 ? kFp8GemmTolerance : kGemmTolerance;
    for (int i = 0; i < problem.algorithms(); ++i) require_right(problem.error(i), tolerance);
  }

  /// The fastest of the algorithms, which must all be right: all are tried in half of the budget, and the
  /// fastest is timed in the other.
  std::pair<Measured, int> best(LinearProblem& problem, Format format, double budget_s) {
    int chosen = -1;
    double least_us = 0;
    require_right_gemm(problem, format);
    const StopRule trial{.least_seconds = 0,
                         .timeout_seconds = budget_s / 2 / problem.algorithms(),
                         .noise = 1,
                         .least_samples = 3};
    for (int i = 0; i < problem.algorithms(); ++i) {
      const Measured tried = time(problem, i, trial);
      if (tried.samples > 0 && (chosen < 0 || tried.median_us < least_us)) {
        chosen = i;
        least_us = tried.median_us;
      }
    }
    if (chosen < 0) return {Measured{.stop = Stop::throttled}, 0};
    return {time(problem, chosen, rule_of(budget_s / 2)), chosen};
  }

  /// Weights come from memory because the problem goes round among copies of them; activations may be in L2.
  Measured time(LinearProblem& problem, int algorithm, const StopRule& rule) {
    return harness_.time([&](Stream stream) { problem.run(algorithm, stream); }, rule, Harness::Cache::as_is);
  }

  void linear(const Point& point) {
    if (point.format == Format::fp8 && compute_capability() < kFp8Capability)
      throw InputError("fp8", "no tensor cores for it; expected sm_89 or newer");
    LinearProblem problem(point.at("m"), point.at("n"), point.at("k"), point.format, seed_);
    if (mode_ == Mode::check) return require_right_gemm(problem, point.format);
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
    time_and_keep(
        {point, "cublas-grouped", "", {}}, [&](Stream stream) { problem.run(stream); }, Harness::Cache::cold,
        Harness::Posting::hidden);
  }

  Problem copy_of(const Point& point) {
    return copy_problem(point.copy, point.at("run_bytes"), point.at("runs"), point.at("sms"), copies_, seed_);
  }

  void ready(const Point& point, const Problem& problem) {
    require_right(problem.error(), problem.tolerance);
    if (mode_ == Mode::check) return;
    time_and_keep({point, problem.kernel, problem.choice, {}}, problem.run, problem.cache, problem.posting);
  }

  void interference(const Point& point) {
    const Problem copy = copy_of(point);
    require_right(copy.error(), copy.tolerance);
    LinearProblem gemm(point.at("m"), point.at("n"), point.at("k"), point.format, seed_);
    if (mode_ == Mode::check) return require_right_gemm(gemm, point.format);
    const auto [gemm_alone, algorithm] = best(gemm, point.format, point.budget_s / 4);
    const StopRule rule = rule_of(point.budget_s / 4);
    const auto multiply = [&, chosen = algorithm](Stream stream) { gemm.run(chosen, stream); };
    // Posted as beside the other, where the stream is held: or the two times of a copy would differ by that.
    Interference found{point, harness_.time(copy.run, rule, Harness::Cache::as_is), {}, gemm_alone, {}};
    require_samples(found.copy_alone);
    require_samples(gemm_alone);
    const double copy_us = found.copy_alone.median_us, gemm_us = gemm_alone.median_us;
    found.copy_beside = harness_.time_beside(copy.run, copy_us, multiply, gemm_us, rule);
    found.gemm_beside = harness_.time_beside(multiply, gemm_us, copy.run, copy_us, rule);
    require_samples(found.copy_beside);
    require_samples(found.gemm_beside);
    out_.interference.push_back(found);
  }

  /// Where an operation's posting waits for the stream, as that of a library may, posting is counted and the
  /// row says so.
  void time_and_keep(Row row, const Operation& run, Harness::Cache cache, Harness::Posting posting) {
    const StopRule rule = rule_of(row.point.budget_s);
    try {
      row.measured = harness_.time(run, rule, cache, posting);
    } catch (const NotApart&) {
      row.measured = harness_.time(run, rule, cache, Harness::Posting::counted);
      row.choice += row.choice.empty() ? "posting counted" : " posting counted";
    }
    keep(std::move(row));
  }

  void keep(Row row) {
    require_samples(row.measured);
    out_.rows.push_back(std::move(row));
  }

  static void require_samples(const Measured& measured) {
    if (measured.samples == 0) throw InputError("clock", "throttled throughout");
  }

  Measurements& out_;
  Mode mode_;
  Harness harness_;
  CopyMemory copies_;
  std::uint64_t seed_ = 0;
};

/// Whether CUDA works on after a call failed: the error of a kernel stays with the context for good.
bool alive() {
  cudaGetLastError();
  return cudaDeviceSynchronize() == cudaSuccess;
}

/// Does what a point asks for and books what that throws. False where CUDA itself is broken.
bool attempt(Measurements& into, const Point& point, const std::function<void(const Point&)>& measure) {
  try {
    measure(point);
  } catch (const GpuMemoryShort& error) {
    into.skipped.push_back({point, error.what()});
  } catch (const InputError& error) {
    into.skipped.push_back({point, error.what()});
  } catch (const NotApart& error) {
    into.skipped.push_back({point, error.what()});
  } catch (const WrongResult& error) {
    into.wrong.push_back({point, error.why});
  } catch (const CudaError& error) {
    if (alive())
      into.wrong.push_back({point, error.what()});
    else
      into.broken = describe(point) + ": " + error.what();
  }
  return into.broken.empty();
}

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
  if (mode == Mode::measure) {
    for (const Point& point : bench.peaks()) {
      if (!attempt(result, point, [&](const Point& peak) { bench.peak(peak); })) return result;
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  double granted_s = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (watch.stop && watch.stop()) {
      result.interrupted = true;
      break;
    }
    if (watch.progress) watch.progress(i, points.size());
    Point point = points[i];
    if (watch.limit_s > 0) {
      const double elapsed_s =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      point.budget_s *= share_of_budget(points, i, elapsed_s, granted_s, watch.limit_s);
    }
    granted_s += point.budget_s;
    if (!attempt(result, point, [&](const Point& each) { bench.measure(each); })) break;
  }
  return result;
}

extern "C" {
/// What gpu_module() looks for.
extern const GpuModule pdsim_gpu_module;
const GpuModule pdsim_gpu_module = {find_gpu, device_name, calibrate};
}

}  // namespace pdsim::kernels
