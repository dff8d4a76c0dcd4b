#include "kernels/gemm.hpp"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "kernels/fill.cuh"
#include "kernels/gpu_memory.hpp"
#include "kernels/reference.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw GpuMemoryShort("cuBLAS found too little memory free");
  throw CudaError(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                  cublasGetStatusString(status));
}
#define PDSIM_CUBLAS(...) check_cublas((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

/// Owns a handle that cuBLAS makes and destroys by functions of its own.
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
struct Destroy {
  void operator()(std::remove_pointer_t<Handle>* handle) const { kDestroy(handle); }
};
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<Handle, kDestroy>>;

constexpr std::size_t kWorkspace = std::size_t{64} << 20;
constexpr int kProposed = 8;
constexpr std::int64_t kFp8Rows = 16;
constexpr std::size_t kMostWeightCopies = 256;

std::int64_t l2_bytes() {
  int device = 0, bytes = 0;
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
  return bytes;
}

/// Copies of `bytes` bytes of weights, so that going round among them L2 has forgotten each when it is due
/// again.
std::size_t copies_beyond_l2(std::int64_t bytes) {
  return std::clamp<std::size_t>(static_cast<std::size_t>(2 * l2_bytes() / bytes) + 1, 2, kMostWeightCopies);
}

/// An element of y and what it should be.
struct Probe {
  std::int64_t row, column;
  double expected;
};

/// x [m, k], equal copies of w [w_rows, k], y [m, n], and what is known of them without looking.
struct Matrices {
  std::int64_t m, n, k, w_rows;
  Format format;
  std::uint64_t seed;
  std::size_t copies;
  GpuArray<unsigned char> x, w;
  GpuArray<bf16> y;

  std::size_t element() const { return format == Format::bf16 ? 2 : 1; }
  std::size_t weight_bytes() const { return static_cast<std::size_t>(w_rows * k) * element(); }
  const unsigned char* weights(std::size_t copy) const { return w.data() + copy % copies * weight_bytes(); }

  Matrices(std::int64_t x_rows, std::int64_t columns, std::int64_t depth, std::int64_t weight_rows, Format of,
           std::uint64_t with_seed, std::size_t copies_of_w)
      : m(x_rows),
        n(columns),
        k(depth),
        w_rows(weight_rows),
        format(of),
        seed(with_seed),
        copies(copies_of_w),
        x(static_cast<std::size_t>(m * k) * element()),
        w(copies * weight_bytes()),
        y(static_cast<std::size_t>(m * n)) {
    fill_any(x.data(), m * k, seed);
    for (std::size_t copy = 0; copy < copies; ++copy)
      fill_any(w.data() + copy * weight_bytes(), w_rows * k, ~seed);
    spoil();
  }

  /// NaN everywhere: what is not computed shows. Blocks.
  void spoil() const {
    PDSIM_CUDA(cudaMemset(y.data(), 0xff, y.size() * sizeof(bf16)));
    PDSIM_CUDA(cudaDeviceSynchronize());
  }

  void fill_any(unsigned char* to, std::int64_t elements, std::uint64_t with_seed) const {
    const auto size = static_cast<std::uint64_t>(elements);
    if (format == Format::bf16) {
      fill(reinterpret_cast<bf16*>(to), size, with_seed, 1.f, nullptr);
    } else {
      fill(reinterpret_cast<fp8*>(to), size, with_seed, 1.f, nullptr);
    }
  }

  double value(std::uint64_t with_seed, std::int64_t i) const {
    const auto index = static_cast<std::uint64_t>(i);
    return format == Format::bf16 ? double{to_float(noise_as<bf16>(with_seed, index, 1.f))}
                                  : double{to_float(noise_as<fp8>(with_seed, index, 1.f))};
  }

  /// Row x_row of x times row w_row of w, in float64.
  double product(std::int64_t x_row, std::int64_t w_row) const {
    double sum = 0;
    for (std::int64_t i = 0; i < k; ++i) sum += value(seed, x_row * k + i) * value(~seed, w_row * k + i);
    return sum;
  }

  /// `count` elements of the first `rows` rows of y, its corners and others by the seed; w_row(row, column)
  /// is the row of w that makes an element.
  template <class WRow>
  std::vector<Probe> probes(std::int64_t rows, int count, WRow w_row) const {
    std::vector<Probe> all;
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<std::uint64_t>(i);
      const bool corner = i < 4;
      const std::int64_t row = corner ? (i & 1) * (rows - 1) : place(2 * at, rows);
      const std::int64_t column = corner ? (i >> 1) * (n - 1) : place(2 * at + 1, n);
      all.push_back({row, column, product(row, w_row(row, column))});
    }
    return all;
  }

  /// A number below `end`, by the seed.
  std::int64_t place(std::uint64_t i, std::int64_t end) const {
    const double share = 0.5 + 0.5 * double{noise(seed ^ 0x706c616365u, i)};
    return std::min(end - 1, static_cast<std::int64_t>(share * static_cast<double>(end)));
  }

  /// y as it lies on the GPU against the probes.
  double error(const std::vector<Probe>& all) const {
    std::vector<bf16> got(all.size());
    std::vector<double> expected;
    for (std::size_t i = 0; i < all.size(); ++i) {
      PDSIM_CUDA(cudaMemcpy(&got[i], y.data() + all[i].row * n + all[i].column, sizeof(bf16),
                            cudaMemcpyDeviceToHost));
      expected.push_back(all[i].expected);
    }
    return largest_error(got, expected);
  }
};

}  // namespace

struct LinearProblem::State {
  Owned<cublasLtHandle_t, cublasLtDestroy> handle;
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
  Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> w, x, y;
  Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
  Matrices matrices;
  std::vector<Probe> probes;
  GpuArray<unsigned char> workspace{kWorkspace};
  std::array<cublasLtMatmulHeuristicResult_t, kProposed> proposed{};
  int count = 0;
  std::size_t next_copy = 0;

  static std::int64_t padded(std::int64_t m, Format format) {
    return format == Format::fp8 ? (m + kFp8Rows - 1) / kFp8Rows * kFp8Rows : m;
  }

  State(std::int64_t m, std::int64_t n, std::int64_t k, Format format, std::uint64_t seed)
      : matrices(padded(m, format), n, k, n, format, seed,
                 copies_beyond_l2(n * k * (format == Format::bf16 ? 2 : 1))),
        probes(matrices.probes(m, 64, [](std::int64_t, std::int64_t column) { return column; })) {
    const cudaDataType_t type = format == Format::bf16 ? CUDA_R_16BF : CUDA_R_8F_E4M3;
    cublasLtHandle_t made_handle = nullptr;
    PDSIM_CUBLAS(cublasLtCreate(&made_handle));
    handle.reset(made_handle);
    cublasLtMatmulDesc_t made_operation = nullptr;
    PDSIM_CUBLAS(cublasLtMatmulDescCreate(&made_operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    operation.reset(made_operation);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    PDSIM_CUBLAS(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                sizeof transposed));
    if (format == Format::fp8) {
      const std::int8_t fast = 1;  // as engines ask: sums stay in the tensor core's own registers
      PDSIM_CUBLAS(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast,
                                                  sizeof fast));
    }
    const auto layout = [](auto& to, cudaDataType_t of, std::int64_t height, std::int64_t width) {
      cublasLtMatrixLayout_t made = nullptr;
      PDSIM_CUBLAS(cublasLtMatrixLayoutCreate(&made, of, static_cast<std::uint64_t>(height),
                                              static_cast<std::uint64_t>(width), height));
      to.reset(made);
    };
    layout(w, type, k, n);
    layout(x, type, k, matrices.m);
    layout(y, CUDA_R_16BF, n, matrices.m);
    cublasLtMatmulPreference_t made_preference = nullptr;
    PDSIM_CUBLAS(cublasLtMatmulPreferenceCreate(&made_preference));
    preference.reset(made_preference);
    PDSIM_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace, sizeof kWorkspace));
    const std::uint32_t in_fp32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // where the depth is split
    PDSIM_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
        preference.get(), CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_fp32, sizeof in_fp32));
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle.get(), operation.get(), w.get(), x.get(), y.get(), y.get(),
                                       preference.get(), kProposed, proposed.data(), &count);
    const auto unusable = [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; };
    count = static_cast<int>(std::remove_if(proposed.begin(), proposed.begin() + count, unusable) -
                             proposed.begin());
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) {
      throw InputError("cublasLt", "no algorithm for [" + std::to_string(m) + ", " + std::to_string(k) +
                                       "] x [" + std::to_string(k) + ", " + std::to_string(n) + "] " +
                                       std::string(name(format)));
    }
    PDSIM_CUBLAS(status);
  }
};

LinearProblem::LinearProblem(std::int64_t m, std::int64_t n, std::int64_t k, Format format,
                             std::uint64_t seed)
    : state_(std::make_unique<State>(m, n, k, format, seed)) {}
LinearProblem::~LinearProblem() = default;

int LinearProblem::algorithms() const {
  return state_->count;
}

void LinearProblem::run(int algorithm, Stream stream) {
  State& s = *state_;
  const float one = 1, zero = 0;
  const auto& choice = s.proposed[static_cast<std::size_t>(algorithm)];
  PDSIM_CUBLAS(cublasLtMatmul(s.handle.get(), s.operation.get(), &one, s.matrices.weights(s.next_copy++),
                              s.w.get(), s.matrices.x.data(), s.x.get(), &zero, s.matrices.y.data(),
                              s.y.get(), s.matrices.y.data(), s.y.get(), &choice.algo, s.workspace.data(),
                              choice.workspaceSize, stream));
}

double LinearProblem::error(int algorithm) {
  State& s = *state_;
  s.matrices.spoil();
  run(algorithm, nullptr);
  PDSIM_CUDA(cudaDeviceSynchronize());
  return s.matrices.error(s.probes);
}

std::string LinearProblem::describe(int algorithm) const {
  const auto* algo = &state_->proposed[static_cast<std::size_t>(algorithm)].algo;
  std::string text;
  const auto add = [&](const char* what, cublasLtMatmulAlgoConfigAttributes_t attribute) {
    std::int32_t value = 0;
    std::size_t written = 0;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, attribute, &value, sizeof value, &written) !=
        CUBLAS_STATUS_SUCCESS)
      return;
    if (!text.empty()) text += ' ';
    text += what;
    text += ' ';
    text += std::to_string(value);
  };
  add("algo", CUBLASLT_ALGO_CONFIG_ID);
  add("tile", CUBLASLT_ALGO_CONFIG_TILE_ID);
  add("stages", CUBLASLT_ALGO_CONFIG_STAGES_ID);
  add("splitk", CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return text;
}

namespace {

/// One grouped multiplication: expert e's rows of x times its weights. Experts with as many rows are one
/// group.
struct Grouped {
  Matrices all;  ///< w: the experts' weights one below the other; all rows of x and y likewise
  std::vector<std::int64_t> rows;
  std::vector<Probe> probes;
  std::vector<int> m_, n_, k_, size_;
  std::vector<cublasOperation_t> transposed_, plain_;
  std::vector<float> one_, zero_;
  GpuArray<const void*> w_at, x_at;
  GpuArray<void*> y_at;

  Grouped(std::vector<std::int64_t> rows_of, std::int64_t n, std::int64_t depth, std::uint64_t seed)
      : all(sum(rows_of), n, depth, n * static_cast<std::int64_t>(rows_of.size()), Format::bf16, seed, 1),
        rows(std::move(rows_of)) {
    probes = all.probes(all.m, 32,
                        [&](std::int64_t row, std::int64_t column) { return expert_of(row) * n + column; });
    std::vector<const void*> w, x;
    std::vector<void*> y;
    std::int64_t row = 0;
    for (std::size_t e = 0; e < rows.size(); ++e) {
      w.push_back(reinterpret_cast<const bf16*>(all.w.data()) + static_cast<std::int64_t>(e) * n * depth);
      x.push_back(reinterpret_cast<const bf16*>(all.x.data()) + row * depth);
      y.push_back(all.y.data() + row * n);
      row += rows[e];
      if (e == 0 || rows[e] != rows[e - 1]) {
        m_.push_back(static_cast<int>(n));  // column-major: weights are the left matrix
        n_.push_back(static_cast<int>(rows[e]));
        k_.push_back(static_cast<int>(depth));
        size_.push_back(0);
      }
      ++size_.back();
    }
    transposed_.assign(m_.size(), CUBLAS_OP_T);
    plain_.assign(m_.size(), CUBLAS_OP_N);
    one_.assign(m_.size(), 1);
    zero_.assign(m_.size(), 0);
    w_at = GpuArray<const void*>(w);
    x_at = GpuArray<const void*>(x);
    y_at = GpuArray<void*>(y);
  }

  std::int64_t expert_of(std::int64_t row) const {
    std::int64_t expert = 0;
    for (std::int64_t end = rows[0]; row >= end; end += rows[static_cast<std::size_t>(expert)]) ++expert;
    return expert;
  }

  static std::int64_t sum(const std::vector<std::int64_t>& rows) {
    std::int64_t total = 0;
    for (const std::int64_t r : rows) total += r;
    return total;
  }

  void run(cublasHandle_t handle) const {
    PDSIM_CUBLAS(cublasGemmGroupedBatchedEx(
        handle, transposed_.data(), plain_.data(), m_.data(), n_.data(), k_.data(), one_.data(), w_at.data(),
        CUDA_R_16BF, k_.data(), x_at.data(), CUDA_R_16BF, k_.data(), zero_.data(), y_at.data(), CUDA_R_16BF,
        m_.data(), static_cast<int>(m_.size()), size_.data(), CUBLAS_COMPUTE_32F));
  }
};

}  // namespace

struct ExpertsProblem::State {
  Owned<cublasHandle_t, cublasDestroy> handle;
  Grouped gate_up, down;

  State(std::int64_t tokens, const Experts& e, std::uint64_t seed)
      : gate_up(balanced_rows(tokens, e), 2 * (e.intermediate / e.tp), e.hidden, seed),
        down(balanced_rows(tokens, e), e.hidden, e.intermediate / e.tp, seed ^ 0x646f776eu) {
    cublasHandle_t made = nullptr;
    PDSIM_CUBLAS(cublasCreate(&made));
    handle.reset(made);
  }
};

ExpertsProblem::ExpertsProblem(std::int64_t tokens, const Experts& experts, std::uint64_t seed)
    : state_(std::make_unique<State>(tokens, experts, seed)) {}
ExpertsProblem::~ExpertsProblem() = default;

void ExpertsProblem::run(Stream stream) {
  PDSIM_CUBLAS(cublasSetStream(state_->handle.get(), stream));
  state_->gate_up.run(state_->handle.get());
  state_->down.run(state_->handle.get());
}

double ExpertsProblem::error() {
  const Grouped &first = state_->gate_up, &second = state_->down;
  first.all.spoil();
  second.all.spoil();
  run(nullptr);
  PDSIM_CUDA(cudaDeviceSynchronize());
  return std::max(first.all.error(first.probes), second.all.error(second.probes));
}

std::string cublas_version() {
  const std::size_t version = cublasLtGetVersion();  // 10000 major + 100 minor + patch since 10.0
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace pdsim::kernels
