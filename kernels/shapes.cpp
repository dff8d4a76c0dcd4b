// The grids, and the list that they and the models' shapes make.
#include "kernels/shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace pdsim::kernels {
namespace {

using Sizes = std::span<const std::int64_t>;
constexpr std::int64_t kAligned = 16;      // elements that fp8 kernels ask a row to be a multiple of
constexpr std::int64_t kLatentHeads = 16;  // that the kernel takes together
constexpr std::int64_t kLatentRow = 1152;  // bytes of a token: 512 latent and 64 with position, bf16
constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

constexpr std::string_view kGemmAxes[] = {"m", "n", "k"};
constexpr std::string_view kPrefillAxes[] = {"tokens", "prefix", "requests", "heads", "kv_heads", "head_dim"};
constexpr std::string_view kDecodeAxes[] = {"batch", "context", "heads", "kv_heads", "head_dim"};
constexpr std::string_view kLatentAxes[] = {"batch", "context", "heads"};
constexpr std::string_view kMoeAxes[] = {"tokens", "hidden", "intermediate", "experts", "topk", "tp", "ep"};
constexpr std::string_view kCopyAxes[] = {"run_bytes", "runs", "sms"};
constexpr std::string_view kInterferenceAxes[] = {"run_bytes", "runs", "sms", "m", "n", "k"};

constexpr std::string_view kCopyNames[] = {"pdsim-gather", "pdsim-scatter", "pdsim-layout", "pdsim-reshard",
                                           "pdsim-block",  "batch-d2d",     "batch-h2d",    "batch-d2h",
                                           "memcpy-h2d",   "memcpy-d2h",    "memcpy-both",  "peer"};

// Rows of a linear layer: powers of two, and sizes just off them or between, where a tile or a wave more is
// due.
constexpr std::int64_t kRows[] = {1,   2,    3,    4,    6,    8,    12,   16,   24,  32,  48,
                                  64,  96,   128,  129,  160,  192,  256,  257,  384, 512, 640,
                                  768, 1024, 1536, 2048, 2049, 3072, 4096, 6144, 8192};
constexpr std::int64_t kQuickRows[] = {1, 8, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192};

constexpr std::int64_t kPrefillTokens[] = {16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr std::int64_t kPrefixes[] = {0, 4096, 32768, 131072};
constexpr std::int64_t kRequests[] = {1, 4};
constexpr std::int64_t kQuickPrefillTokens[] = {128, 1024, 4096};
constexpr std::int64_t kQuickPrefixes[] = {0, 4096, 32768};
constexpr std::int64_t kQuickRequests[] = {1, 4};

constexpr std::int64_t kBatches[] = {1, 4, 16, 64, 128, 256};
constexpr std::int64_t kContexts[] = {128, 256, 1024, 2048, 4096, 16384, 65536, 131072};
constexpr std::int64_t kQuickBatches[] = {1, 16, 128};
constexpr std::int64_t kQuickContexts[] = {256, 2048, 16384, 65536};

constexpr std::int64_t kMoeTokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
constexpr std::int64_t kQuickMoeTokens[] = {1, 8, 64, 512, 4096};

constexpr std::int64_t kRuns[] = {1, 4, 16, 64, 256, 1024, 4096};
constexpr std::int64_t kQuickRuns[] = {1, 16, 256};
constexpr std::int64_t kDescriptorBytes[] = {4 * kKiB,   16 * kKiB, 32 * kKiB, 64 * kKiB, 128 * kKiB,
                                             256 * kKiB, kMiB,      2 * kMiB,  16 * kMiB, 64 * kMiB};
constexpr std::int64_t kQuickDescriptorBytes[] = {4 * kKiB, 64 * kKiB, 2 * kMiB};
constexpr std::int64_t kMultiprocessors[] = {1, 2, 4, 8, 16, 32, 64, 128};
constexpr std::int64_t kQuickMultiprocessors[] = {4, 16, 64};
constexpr std::int64_t kPageRuns[] = {256,      512,       kKiB,      2 * kKiB,  4 * kKiB,
                                      8 * kKiB, 32 * kKiB, 64 * kKiB, 256 * kKiB};
constexpr std::int64_t kQuickPageRuns[] = {256, 2 * kKiB, 32 * kKiB, 256 * kKiB};
constexpr std::int64_t kHeadRuns[] = {128, 256,
                                      512};  // one head of a token: 128 numbers of fp8, of bf16; 256 of bf16
constexpr std::int64_t kQuickHeadRuns[] = {256};
constexpr std::int64_t kCopiedBytes =
    64 * kMiB;  // by a copy kernel: beyond every L2 but B200's, 20 us at 8 TB/s
constexpr std::int64_t kMostCopied = 256 * kMiB;  // by descriptors

// [rows, n, k] of the multiplication beside a copy: bound by arithmetic, and by memory.
constexpr std::int64_t kBeside[][3] = {{4096, 8192, 8192}, {64, 8192, 8192}};

/// The grids of a list, and the seconds for each of its points. The full one is about an hour for the models
/// that are measured by default.
struct Grid {
  Sizes rows, tokens, prefixes, requests, batches, contexts, moe_tokens, runs, descriptors, sms, page_runs,
      head_runs;
  std::int64_t most_cache = 0, most_pairs = 0;  ///< bytes of KV; query-key pairs of all heads
  double gemm_s = 0, attention_s = 0, moe_s = 0, copy_s = 0, interference_s = 0;
};

const Grid kFull = {kRows,
                    kPrefillTokens,
                    kPrefixes,
                    kRequests,
                    kBatches,
                    kContexts,
                    kMoeTokens,
                    kRuns,
                    kDescriptorBytes,
                    kMultiprocessors,
                    kPageRuns,
                    kHeadRuns,
                    8 * kGiB,
                    std::int64_t{1} << 37,
                    0.3,
                    0.5,
                    2.0,
                    0.5,
                    5.0};
const Grid kQuick = {kQuickRows,
                     kQuickPrefillTokens,
                     kQuickPrefixes,
                     kQuickRequests,
                     kQuickBatches,
                     kQuickContexts,
                     kQuickMoeTokens,
                     kQuickRuns,
                     kQuickDescriptorBytes,
                     kQuickMultiprocessors,
                     kQuickPageRuns,
                     kQuickHeadRuns,
                     2 * kGiB,
                     std::int64_t{1} << 34,
                     0.15,
                     0.25,
                     0.5,
                     0.2,
                     1.0};

class List {
 public:
  List(const ModelShapes& models, bool quick)
      : models_(models), quick_(quick), grid_(quick ? kQuick : kFull) {}

  std::vector<Point> points() {
    gemm();
    prefill();
    decode();
    latent_decode();
    moe();
    copies();
    interference();
    if (quick_) squeeze();
    return std::move(points_);
  }

 private:
  void add(Op op, Format format, std::array<std::int64_t, kMostAxes> shape, double budget_s,
           Copy copy = Copy::gather) {
    const Point point{op, format, copy, shape, budget_s};
    if (std::find(points_.begin(), points_.end(), point) == points_.end()) points_.push_back(point);
  }

  /// Many models make many points: then each has less time.
  void squeeze() {
    const double share = kQuickSeconds / budget_seconds(points_);
    if (share >= 1) return;
    for (Point& point : points_) point.budget_s *= share;
  }

  void gemm() {
    for (const Format format : {Format::bf16, Format::fp8}) {
      for (const LinearLayer& layer : layers()) {
        for (const std::int64_t m : grid_.rows) add(Op::gemm, format, {m, layer.n, layer.k}, grid_.gemm_s);
      }
    }
  }

  /// All, or of those in order of size kQuickLayers at equal distances, the first and the last among them.
  std::vector<LinearLayer> layers() const {
    std::vector<LinearLayer> all;
    for (const LinearLayer& layer : models_.linear) {
      if (layer.n % kAligned == 0 && layer.k % kAligned == 0) all.push_back(layer);
    }
    const auto before = [](const LinearLayer& a, const LinearLayer& b) {
      return a.n * a.k != b.n * b.k ? a.n * a.k < b.n * b.k : a.n < b.n;
    };
    std::sort(all.begin(), all.end(), before);
    const auto same = [](const LinearLayer& a, const LinearLayer& b) { return a.n == b.n && a.k == b.k; };
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
    if (!quick_ || all.size() <= kQuickLayers) return all;
    std::vector<LinearLayer> some;
    for (std::size_t i = 0; i < kQuickLayers; ++i)
      some.push_back(all[i * (all.size() - 1) / (kQuickLayers - 1)]);
    return some;
  }

  std::vector<Heads> heads() const {
    std::vector<Heads> able;
    for (const Heads& h : models_.attention) {
      if ((h.head_dim == 64 || h.head_dim == 128) && h.heads % h.kv_heads == 0 && h.heads / h.kv_heads <= 16)
        able.push_back(h);
    }
    return able;
  }

  void prefill() {
    for (const Heads& h : heads()) {
      for (const std::int64_t tokens : grid_.tokens) {
        for (const std::int64_t prefix : grid_.prefixes) {
          for (const std::int64_t requests : grid_.requests) {
            const std::int64_t keys = requests * (tokens + prefix);
            if (4 * keys * h.kv_heads * h.head_dim > grid_.most_cache) continue;
            if (tokens * keys * h.heads > grid_.most_pairs) continue;
            add(Op::attention_prefill, Format::bf16,
                {tokens, prefix, requests, h.heads, h.kv_heads, h.head_dim}, grid_.attention_s);
          }
        }
      }
    }
  }

  void decode() {
    for (const Format format : {Format::bf16, Format::fp8}) {
      const std::int64_t pair_bytes = format == Format::bf16 ? 4 : 2;  // an element of K and one of V
      for (const Heads& h : heads()) {
        for (const std::int64_t batch : grid_.batches) {
          for (const std::int64_t context : grid_.contexts) {
            if (pair_bytes * batch * context * h.kv_heads * h.head_dim > grid_.most_cache) continue;
            add(Op::attention_decode, format, {batch, context, h.heads, h.kv_heads, h.head_dim},
                grid_.attention_s);
          }
        }
      }
    }
  }

  void latent_decode() {
    for (const std::int64_t heads : models_.latent_heads) {
      if (heads % kLatentHeads != 0) continue;
      for (const std::int64_t batch : grid_.batches) {
        for (const std::int64_t context : grid_.contexts) {
          if (batch * context * kLatentRow > grid_.most_cache) continue;
          add(Op::mla_decode, Format::bf16, {batch, context, heads}, grid_.attention_s);
        }
      }
    }
  }

  void moe() {
    for (const Experts& e : models_.experts) {
      for (const std::int64_t tokens : grid_.moe_tokens) {
        add(Op::moe, Format::bf16, {tokens, e.hidden, e.intermediate, e.experts, e.topk, e.tp, e.ep},
            grid_.moe_s);
      }
    }
  }

  void copies() {
    const auto kernel = [&](Copy copy, Sizes runs) {
      for (const std::int64_t run : runs) {
        for (const std::int64_t sms : grid_.sms)
          add(Op::kv_copy, Format::bf16, {run, kCopiedBytes / run, sms}, grid_.copy_s, copy);
      }
    };
    for (const Copy copy : {Copy::gather, Copy::scatter, Copy::block}) kernel(copy, grid_.page_runs);
    for (const Copy copy : {Copy::layout, Copy::reshard}) kernel(copy, grid_.head_runs);
    for (const Copy copy : kCopies) {
      if (on_multiprocessors(copy)) continue;
      for (const std::int64_t bytes : grid_.descriptors) {
        for (const std::int64_t runs : grid_.runs) {
          if (bytes * runs <= kMostCopied)
            add(Op::kv_copy, Format::bf16, {bytes, runs, 0}, grid_.copy_s, copy);
        }
      }
    }
  }

  void interference() {
    for (const auto& [m, n, k] : kBeside) {
      for (const std::int64_t sms : grid_.sms) {
        add(Op::interference, Format::bf16, {32 * kKiB, kCopiedBytes / (32 * kKiB), sms, m, n, k},
            grid_.interference_s, Copy::gather);
      }
      for (const Copy copy : {Copy::batch_d2d, Copy::batch_h2d, Copy::batch_d2h}) {
        add(Op::interference, Format::bf16, {256 * kKiB, 256, 0, m, n, k}, grid_.interference_s, copy);
      }
    }
  }

  const ModelShapes& models_;
  bool quick_;
  const Grid& grid_;
  std::vector<Point> points_;
};

}  // namespace

std::string_view name(Op op) {
  constexpr std::string_view kNames[] = {
      "gemm", "attention-prefill", "attention-decode", "mla-attention-decode",
      "moe",  "kv-copy",           "interference"};
  return kNames[static_cast<std::size_t>(op)];
}

std::string_view name(Format format) {
  return format == Format::bf16 ? "bf16" : "fp8";
}
std::string_view name(Copy copy) {
  return kCopyNames[static_cast<std::size_t>(copy)];
}

std::span<const std::string_view> axes(Op op) {
  constexpr std::span<const std::string_view> kAxes[] = {
      kGemmAxes, kPrefillAxes, kDecodeAxes, kLatentAxes, kMoeAxes, kCopyAxes, kInterferenceAxes};
  return kAxes[static_cast<std::size_t>(op)];
}

std::int64_t Point::at(std::string_view axis) const {
  const auto all = axes(op);
  const auto found = std::find(all.begin(), all.end(), axis);
  if (found == all.end()) throw std::logic_error(fmt::format("{} has no axis {}", name(op), axis));
  return shape[static_cast<std::size_t>(found - all.begin())];
}

std::string describe(const Point& point) {
  const bool copies = point.op == Op::kv_copy || point.op == Op::interference;
  std::string text = fmt::format("{} {}", name(point.op), copies ? name(point.copy) : name(point.format));
  const auto all = axes(point.op);
  for (std::size_t i = 0; i < all.size(); ++i) text += fmt::format(" {}={}", all[i], point.shape[i]);
  return text;
}

std::vector<Point> plan(const ModelShapes& models, bool quick) {
  return List(models, quick).points();
}

std::vector<std::int64_t> balanced_rows(std::int64_t tokens, const Experts& experts) {
  const std::int64_t routed = (tokens * experts.topk + experts.ep - 1) / experts.ep;
  const std::int64_t held = std::max<std::int64_t>(1, experts.experts / experts.ep),
                     active = std::min(held, routed);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(active), routed / active);
  for (std::int64_t i = 0; i < routed % active; ++i) ++rows[static_cast<std::size_t>(i)];
  return rows;
}

std::vector<Point> check_points() {
  std::vector<Point> points;
  for (const std::int64_t head_dim : {64, 128}) {
    points.push_back({Op::attention_prefill, Format::bf16, Copy::gather, {40, 30, 2, 8, 2, head_dim}, 0});
    for (const Format format : {Format::bf16, Format::fp8})
      points.push_back({Op::attention_decode, format, Copy::gather, {2, 1500, 8, 2, head_dim}, 0});
  }
  points.push_back({Op::mla_decode, Format::bf16, Copy::gather, {2, 1500, kLatentHeads}, 0});
  for (const Copy copy : kCopies) {
    const std::int64_t sms = on_multiprocessors(copy) ? 4 : 0;
    points.push_back({Op::kv_copy, Format::bf16, copy, {256, 256, sms}, 0});
    points.push_back({Op::kv_copy, Format::bf16, copy, {4096, 128, sms}, 0});
  }
  return points;
}

double budget_seconds(std::span<const Point> points) {
  double seconds = 0;
  for (const Point& point : points) seconds += point.budget_s;
  return seconds;
}

}  // namespace pdsim::kernels
