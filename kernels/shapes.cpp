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

constexpr std::int64_t kPrefillTokens[] = {16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr std::int64_t kPrefixes[] = {0, 4096, 32768, 131072};
constexpr std::int64_t kRequests[] = {1, 4};

constexpr std::int64_t kBatches[] = {1, 4, 16, 64, 128, 256};
constexpr std::int64_t kContexts[] = {128, 256, 1024, 2048, 4096, 16384, 65536, 131072};

constexpr std::int64_t kMoeTokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

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

/// What a list has that is not the models'.
struct Grid {
  Sizes runs, descriptors, sms, page_runs, head_runs;         ///< of copies
  double gemm_s, attention_s, moe_s, copy_s, interference_s;  ///< for each point
};

/// About an hour for the models that are measured by default.
constexpr Grid kFull = {kRuns, kDescriptorBytes, kMultiprocessors, kPageRuns, kHeadRuns, 0.3, 0.5, 2.0, 0.5,
                        5.0};
constexpr Grid kQuick = {kQuickRuns,
                         kQuickDescriptorBytes,
                         kQuickMultiprocessors,
                         kQuickPageRuns,
                         kQuickHeadRuns,
                         0.1,
                         0.2,
                         0.5,
                         0.15,
                         1.0};

constexpr std::int64_t kMostCache = 8 * kGiB;               // bytes of KV
constexpr std::int64_t kMostPairs = std::int64_t{1} << 37;  // query-key pairs of all heads

class List {
 public:
  explicit List(const Grid& grid) : grid_(grid) {}

  std::vector<Point> of(const ModelShapes& models) {
    gemm(models.linear);
    prefill(models.attention);
    decode(models.attention);
    latent_decode(models.latent_heads);
    moe(models.experts);
    copies();
    interference();
    return std::move(points_);
  }

  std::vector<Point> of(std::span<const Point> shapes) {
    for (const Point& shape : shapes) add(shape.op, shape.format, shape.shape, seconds_of(shape.op));
    copies();
    interference();
    squeeze();
    return std::move(points_);
  }

 private:
  void add(Op op, Format format, std::array<std::int64_t, kMostAxes> shape, double budget_s,
           Copy copy = Copy::gather) {
    const Point point{op, format, copy, shape, budget_s};
    if (!can_run(point)) return;
    if (std::find(points_.begin(), points_.end(), point) == points_.end()) points_.push_back(point);
  }

  double seconds_of(Op op) const {
    return op == Op::gemm ? grid_.gemm_s : op == Op::moe ? grid_.moe_s : grid_.attention_s;
  }

  /// Many shapes: then each has less time.
  void squeeze() {
    const double share = kQuickSeconds / budget_seconds(points_);
    if (share >= 1) return;
    for (Point& point : points_) point.budget_s *= share;
  }

  void gemm(std::span<const LinearLayer> layers) {
    for (const Format format : kFormats) {
      for (const LinearLayer& layer : layers) {
        for (const std::int64_t m : kRows) add(Op::gemm, format, {m, layer.n, layer.k}, grid_.gemm_s);
      }
    }
  }

  void prefill(std::span<const Heads> heads) {
    for (const Heads& h : heads) {
      for (const std::int64_t tokens : kPrefillTokens) {
        for (const std::int64_t prefix : kPrefixes) {
          for (const std::int64_t requests : kRequests) {
            const std::int64_t keys = requests * (tokens + prefix);
            if (4 * keys * h.kv_heads * h.head_dim > kMostCache) continue;
            if (tokens * keys * h.heads > kMostPairs) continue;
            add(Op::attention_prefill, Format::bf16,
                {tokens, prefix, requests, h.heads, h.kv_heads, h.head_dim}, grid_.attention_s);
          }
        }
      }
    }
  }

  void decode(std::span<const Heads> heads) {
    for (const Format format : kFormats) {
      const std::int64_t pair_bytes = format == Format::bf16 ? 4 : 2;  // an element of K and one of V
      for (const Heads& h : heads) {
        for (const std::int64_t batch : kBatches) {
          for (const std::int64_t context : kContexts) {
            if (pair_bytes * batch * context * h.kv_heads * h.head_dim > kMostCache) continue;
            add(Op::attention_decode, format, {batch, context, h.heads, h.kv_heads, h.head_dim},
                grid_.attention_s);
          }
        }
      }
    }
  }

  void latent_decode(std::span<const std::int64_t> latent_heads) {
    for (const std::int64_t heads : latent_heads) {
      for (const std::int64_t batch : kBatches) {
        for (const std::int64_t context : kContexts) {
          if (batch * context * kLatentRow > kMostCache) continue;
          add(Op::mla_decode, Format::bf16, {batch, context, heads}, grid_.attention_s);
        }
      }
    }
  }

  void moe(std::span<const Experts> experts) {
    for (const Experts& e : experts) {
      for (const std::int64_t tokens : kMoeTokens) {
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

bool can_run(const Point& point) {
  switch (point.op) {
    case Op::gemm:
      return point.at("n") % kAligned == 0 && point.at("k") % kAligned == 0;
    case Op::attention_prefill:
    case Op::attention_decode: {
      const std::int64_t heads = point.at("heads"), kv_heads = point.at("kv_heads"),
                         head_dim = point.at("head_dim");
      return (head_dim == 64 || head_dim == 128) && heads % kv_heads == 0 && heads / kv_heads <= 16;
    }
    case Op::mla_decode:
      return point.at("heads") % kLatentHeads == 0;
    default:
      return true;
  }
}

std::string describe(const Point& point) {
  const bool copies = point.op == Op::kv_copy || point.op == Op::interference;
  std::string text = fmt::format("{} {}", name(point.op), copies ? name(point.copy) : name(point.format));
  const auto all = axes(point.op);
  for (std::size_t i = 0; i < all.size(); ++i) text += fmt::format(" {}={}", all[i], point.shape[i]);
  return text;
}

std::vector<Point> full_plan(const ModelShapes& models) {
  return List(kFull).of(models);
}

std::vector<Point> quick_plan(std::span<const Point> shapes) {
  return List(kQuick).of(shapes);
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

double share_of_budget(std::span<const Point> points, std::size_t next, double elapsed_s, double granted_s,
                       double limit_s) {
  constexpr double kLeast = 0.1;
  const double before = budget_seconds(points.first(next)), due = budget_seconds(points.subspan(next));
  const double beside = before > 0 ? std::max(0.0, elapsed_s - granted_s) / before : 0;
  return std::clamp((limit_s - elapsed_s - beside * due) / due, kLeast, 1.0);
}

}  // namespace pdsim::kernels
