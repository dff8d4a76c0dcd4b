// Linear layers as an engine runs them: cuBLASLt's best of the algorithms that its heuristic proposes, with
// weights that lie in no cache, because a model has more of them than L2 holds.
//
// Row-major y = x w^T, x [m, k], w [n, k], y [m, n] in bf16, sums in fp32; x and w both bf16 or both fp8 e4m3
// with scale 1. Column-major cuBLAS sees w, transposed, times x: the one arrangement that its fp8 kernels
// know.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/launch.hpp"
#include "kernels/measure.hpp"
#include "kernels/shapes.hpp"

namespace pdsim::kernels {

/// The problem with its matrices on the GPU, and the algorithms for it.
class LinearProblem {
 public:
  /// `m` rows; fp8 is given more rows up to a multiple of 16, which its kernels ask for. Fresh random
  /// matrices by `seed`. Throws GpuMemoryShort, CudaError; InputError where cuBLASLt knows no algorithm.
  LinearProblem(std::int64_t m, std::int64_t n, std::int64_t k, Format format, std::uint64_t seed);
  ~LinearProblem();
  LinearProblem(const LinearProblem&) = delete;
  LinearProblem& operator=(const LinearProblem&) = delete;

  int algorithms() const;
  /// Posts one multiplication by the algorithm, each time with the next copy of the weights.
  void run(int algorithm, Stream stream);
  /// Runs the algorithm and holds 64 elements of y, its corners among them, against float64: the largest
  /// error as reference.hpp defines it. Blocks.
  double error(int algorithm);
  /// "algo 66 tile 20 stages 36 splitk 1": cuBLASLt's own numbers.
  std::string describe(int algorithm) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What a result may be off: an element is rounded to bf16 (2^-9) after sums in fp32; fp8 kernels of sm_90
/// keep some 14 bits of a sum, which at a depth of 4096 was seen to be off by up to 2 % (DeepSeek-V3's
/// report, 3.3.2).
inline constexpr double kGemmTolerance = 0x1p-6, kFp8GemmTolerance = 0x1p-4;

/// The experts of one rank: two grouped multiplications, [rows, hidden] to gate and up, [rows, intermediate]
/// to hidden, over the experts that have rows, which are as many each as can be. bf16.
class ExpertsProblem {
 public:
  /// Throws GpuMemoryShort, CudaError.
  ExpertsProblem(std::int64_t tokens, const Experts& experts, std::uint64_t seed);
  ~ExpertsProblem();
  ExpertsProblem(const ExpertsProblem&) = delete;
  ExpertsProblem& operator=(const ExpertsProblem&) = delete;

  void run(Stream stream);
  /// As LinearProblem's, of 32 elements of each of the two results.
  double error();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The version of the cuBLASLt that is loaded: "13.0.0".
std::string cublas_version();

}  // namespace pdsim::kernels
