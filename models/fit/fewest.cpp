#include "models/fit/fewest.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>

#include "models/fit.hpp"
#include "models/fit/least_squares.hpp"
#include "models/kernel_time.hpp"

namespace pdsim {
namespace {

using Shape = std::array<double, kShapeAxes>;

KernelTable only(const KernelTable& table, const std::set<Shape>& shapes) {
  KernelTable some = table;
  std::erase_if(some.rows, [&](const KernelRow& row) { return !shapes.contains(row.shape); });
  return some;
}

Profile fitted(const KernelTable& table) {
  return fit_profile(table, measured_gpu(table), {"subset", "", "", ""});
}

std::vector<double> errors_of(const Profile& profile, const KernelTable& table,
                              std::span<const KernelRow> rows) {
  const Gpu& gpu = measured_gpu(table);
  std::vector<double> errors;
  errors.reserve(rows.size());
  for (const KernelRow& row : rows) {
    errors.push_back(predict(profile, gpu, table, row).time.ns / row.ns - 1);
  }
  return errors;
}

/// Deterministic and without order (Murmur3's finaliser).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
  return x ^ x >> 33;
}

/// Squared distance in octaves.
double apart(const Shape& a, const Shape& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double gap = octave(std::max(a[i], 1.0)) - octave(std::max(b[i], 1.0));
    sum += gap * gap;
  }
  return sum;
}

/// A table and what its list is judged on.
struct Judged {
  const KernelTable* table;
  std::vector<KernelRow> rows;  ///< some of the table's, enough for a median
  double full = 0;              ///< median error of the full fit

  /// What the list costs in median error; and a tenth of the 90th percentile besides, which the median does
  /// not see.
  double loss(const std::set<Shape>& shapes) const {
    const Accuracy quick = accuracy_of(errors_of(fitted(only(*table, shapes)), *table, rows));
    return quick.median_ape - full + 0.1 * quick.p90_ape;
  }
};

constexpr std::size_t kFirst = 16;  // as many as a curve has coefficients, and some to tell grids apart
constexpr std::size_t kJudged = 700;

class Search {
 public:
  Search(std::span<const KernelTable> tables, const FewestOptions& options) : options_(options) {
    std::set<Shape> common;
    for (const KernelTable& table : tables) {
      std::set<Shape> shapes;
      for (const KernelRow& row : table.rows) shapes.insert(row.shape);
      if (&table == &tables.front()) {
        common = std::move(shapes);
      } else {
        std::erase_if(common, [&](const Shape& shape) { return !shapes.contains(shape); });
      }
      Judged judged{&table, {}, 0};
      const std::size_t stride = table.rows.size() / kJudged + 1;
      for (std::size_t i = 0; i < table.rows.size(); i += stride) judged.rows.push_back(table.rows[i]);
      judged.full = accuracy_of(errors_of(fitted(table), table, judged.rows)).median_ape;
      judged_.push_back(std::move(judged));
    }
    candidates_.assign(common.begin(), common.end());
  }

  std::vector<Shape> run() {
    for (const Shape& shape : options_.start) {
      if (std::binary_search(candidates_.begin(), candidates_.end(), shape)) take(shape);
    }
    if (list_.empty()) spread();
    while (list_.size() < std::min(options_.most, candidates_.size()) && grow()) {
    }
    return list_;
  }

 private:
  void take(const Shape& shape) {
    list_.push_back(shape);
    set_.insert(shape);
  }

  /// Each as far from the others as can be.
  void spread() {
    if (candidates_.empty()) return;
    take(candidates_[mixed(1) % candidates_.size()]);
    std::vector<double> nearest(candidates_.size(), std::numeric_limits<double>::infinity());
    while (list_.size() < std::min({kFirst, options_.most, candidates_.size()})) {
      std::size_t furthest = 0;
      for (std::size_t i = 0; i < candidates_.size(); ++i) {
        nearest[i] = std::min(nearest[i], apart(candidates_[i], list_.back()));
        if (nearest[i] > nearest[furthest]) furthest = i;
      }
      take(candidates_[furthest]);
    }
  }

  /// Adds a shape; false when the list is good enough without one.
  bool grow() {
    std::vector<std::pair<double, Shape>> error;  // the worst predicted come last
    bool good = true;
    for (const Judged& judged : judged_) {
      const std::vector<double> errors =
          errors_of(fitted(only(*judged.table, set_)), *judged.table, judged.rows);
      for (std::size_t i = 0; i < errors.size(); ++i) {
        error.emplace_back(std::abs(std::log1p(std::max(errors[i], -0.99))), judged.rows[i].shape);
      }
      good = good && accuracy_of(errors).median_ape <= judged.full + options_.within;
    }
    if (good) return false;
    std::erase_if(error, [&](const auto& each) {
      return set_.contains(each.second) ||
             !std::binary_search(candidates_.begin(), candidates_.end(), each.second);
    });
    if (error.empty()) return false;  // all that is judged is in the list
    std::sort(error.begin(), error.end());
    double least = std::numeric_limits<double>::infinity();
    Shape best = error.back().second;
    for (std::size_t c = 0; c < options_.candidates; ++c) {
      const std::size_t half = error.size() / 2, from = c % 2 == 0 ? half : 0;
      const Shape& shape =
          error[from + mixed(++salt_) % std::max<std::size_t>(error.size() - half, 1)].second;
      std::set<Shape> trial = set_;
      trial.insert(shape);
      double sum = 0;
      for (const Judged& judged : judged_) sum += judged.loss(trial);
      if (sum >= least) continue;
      least = sum;
      best = shape;
    }
    take(best);
    return true;
  }

  const FewestOptions options_;
  std::vector<Judged> judged_;
  std::vector<Shape> candidates_, list_;
  std::set<Shape> set_;
  std::uint64_t salt_ = 0;
};

}  // namespace

bool serving_shape(const KernelRow& row) {
  if (row.op == CurveOp::gemm) return row.at("n") >= 1024 && row.at("k") >= 1024 && row.at("m") <= 8192;
  if (row.op != CurveOp::attention_prefill && row.op != CurveOp::attention_decode) return false;
  const double kv_heads = row.at("kv_heads"), group = row.at("heads") / kv_heads;
  if (kv_heads > 8 || (group != 4 && group != 8 && group != 16) || row.at("window") != 0) return false;
  if (row.at("head_dim") != 64 && row.at("head_dim") != 128) return false;
  if (row.op == CurveOp::attention_prefill) return row.at("tokens") >= 16 && row.at("requests") <= 8;
  return row.at("context") >= 16 && row.at("batch") <= 256;
}

FewestLoss fewest_loss(const KernelTable& table, std::span<const Shape> shapes) {
  const std::set<Shape> set(shapes.begin(), shapes.end());
  const KernelTable some = only(table, set);
  FewestLoss loss;
  loss.gpu = measured_gpu(table).name;
  loss.rows = table.rows.size();
  loss.shapes = some.rows.size();
  loss.full = accuracy_of(errors_of(fitted(table), table, table.rows));
  loss.quick = accuracy_of(errors_of(fitted(some), table, table.rows));
  return loss;
}

Fewest fewest_shapes(std::span<const KernelTable> tables, const FewestOptions& options) {
  Fewest result;
  result.like = tables.front().rows.front();
  result.shapes = Search(tables, options).run();
  for (const KernelTable& table : tables) result.losses.push_back(fewest_loss(table, result.shapes));
  return result;
}

}  // namespace pdsim
