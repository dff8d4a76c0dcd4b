// What `pdsim calibrate` measures: a list of points, each a shape of one operation and the seconds it may
// take, as plain data. Known before any GPU is touched, so that the list can be shown and its time added up
// without one.
//
// The shapes of linear layers, heads and experts are those of real models, cut as tensor parallelism cuts
// them; the caller brings them, because kernels/ knows no models. The sizes that vary while serving (rows,
// tokens, contexts, runs) are the grids in shapes.cpp.
//
// A quick list has, in place of the models' layers, the fewest shapes that tell a curve. The caller brings
// those too (models/quick-shapes.csv; models/README.md says how they were found).
//
// Invariants: no point twice; axes have the names and the order of pdsim's own tables
// (models/kernel_table.hpp; a test compares).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim::kernels {

enum class Op : std::uint8_t {
  gemm,
  attention_prefill,
  attention_decode,
  mla_decode,
  moe,
  kv_copy,
  interference
};
inline constexpr Op kOps[] = {Op::gemm, Op::attention_prefill, Op::attention_decode, Op::mla_decode,
                              Op::moe,  Op::kv_copy,           Op::interference};

/// Those on a model's layers, whose shapes a caller brings.
inline constexpr Op kLayerOps[] = {Op::gemm, Op::attention_prefill, Op::attention_decode, Op::mla_decode,
                                   Op::moe};

/// As tables spell it: "attention-prefill".
std::string_view name(Op op);
/// The numbers of a point's shape, in the order of Point::shape.
std::span<const std::string_view> axes(Op op);
inline constexpr std::size_t kMostAxes = 8;

/// Of weights (gemm, moe) or KV cache (attention, copies).
enum class Format : std::uint8_t { bf16, fp8 };
inline constexpr Format kFormats[] = {Format::bf16, Format::fp8};
std::string_view name(Format format);

/// The ways to copy. The first five are one kernel that runs on `sms` multiprocessors, and their runs follow
/// from the layouts; of the others a run is a descriptor, handed to the copy engines.
enum class Copy : std::uint8_t {
  gather,      ///< pages to contiguous staging
  scatter,     ///< and back
  layout,      ///< NHD to HND: a run is one head of one token
  reshard,     ///< a rank of eight heads to one of two: a run is two heads of one token
  block,       ///< pages to other pages
  batch_d2d,   ///< cudaMemcpyBatchAsync on the device,
  batch_h2d,   ///< from pinned host memory,
  batch_d2h,   ///< and to it
  memcpy_h2d,  ///< a cudaMemcpyAsync a run
  memcpy_d2h,
  memcpy_both,  ///< both directions at once; bytes are those of one
  peer          ///< to a second GPU, where there is one
};
inline constexpr Copy kCopies[] = {Copy::gather,     Copy::scatter,    Copy::layout,      Copy::reshard,
                                   Copy::block,      Copy::batch_d2d,  Copy::batch_h2d,   Copy::batch_d2h,
                                   Copy::memcpy_h2d, Copy::memcpy_d2h, Copy::memcpy_both, Copy::peer};
/// "pdsim-gather", "batch-h2d": the `kernel` of tables.
std::string_view name(Copy copy);
/// Whether multiprocessors do the work, and not a copy engine.
constexpr bool on_multiprocessors(Copy copy) {
  return copy <= Copy::block;
}

/// One shape to measure.
struct Point {
  Op op = Op::gemm;
  Format format = Format::bf16;
  Copy copy = Copy::gather;  ///< kv-copy and interference
  std::array<std::int64_t, kMostAxes> shape{};
  double budget_s = 0;  ///< after so many seconds of sampling it ends as it is

  /// One axis by its name. Requires that axes(op) holds it.
  std::int64_t at(std::string_view axis) const;
  bool operator==(const Point&) const = default;
};

/// Whether a kernel here can: rows of linear layers in multiples of 16, heads of 64 or 128 and at most 16 of
/// them a KV head, latent heads in multiples of 16. Requires axes above 0 (a prefix may be).
bool can_run(const Point& point);

/// "gemm bf16 m=1 n=1024 k=1024", for people.
std::string describe(const Point& point);

/// Shapes that models have, each of one tensor-parallel rank. Repeats do no harm.
struct LinearLayer {
  std::int64_t n = 0, k = 0;  ///< [m, k] x [k, n]
};
struct Heads {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
};
struct Experts {
  std::int64_t hidden = 0, intermediate = 0, experts = 0, topk = 0, tp = 1, ep = 1;  ///< intermediate uncut
};
struct ModelShapes {
  std::vector<LinearLayer> linear;
  std::vector<Heads> attention;
  std::vector<std::int64_t> latent_heads;  ///< of MLA, whose latent no rank cuts
  std::vector<Experts> experts;
};

/// The points of a full list, of the models' shapes those that can_run, with caches of at most 8 GiB.
std::vector<Point> full_plan(const ModelShapes& models);

/// Those of a quick list: `shapes`, which have no budgets yet, and a few copies, with a budget of at most
/// kQuickSeconds in all. Requires that all of them can_run.
std::vector<Point> quick_plan(std::span<const Point> shapes);

/// Rows that each expert of a rank has under balanced routing, those without left out: tokens x topk / ep,
/// rounded up, dealt out one by one.
std::vector<std::int64_t> balanced_rows(std::int64_t tokens, const Experts& experts);

/// One small case of each instance of pdsim's own kernels, and of each way to copy: for a check without
/// timing, under a sanitizer that makes all slow.
std::vector<Point> check_points();

/// Sum of the points' budgets: the longest that sampling can take.
double budget_seconds(std::span<const Point> points);

/// The share of its budget that point `next` may use so that the list ends `limit_s` after its begin:
/// `elapsed_s` have passed, of which the points before were granted `granted_s` for sampling; what set-up and
/// checks took beyond that they will go on to take, in proportion to budgets. At most 1, and at least a
/// tenth, however late it is.
double share_of_budget(std::span<const Point> points, std::size_t next, double elapsed_s, double granted_s,
                       double limit_s);

/// Of three minutes. What is left between the two is for set-up and checks; where it is too little, points
/// are given less (share_of_budget). Before come the peaks, some seconds, and afterwards the fit.
inline constexpr double kQuickSeconds = 100, kQuickLimitSeconds = 155;

}  // namespace pdsim::kernels
