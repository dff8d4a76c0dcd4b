#include "models/fit/fewest.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "models/fit.hpp"
#include "models/fit/least_squares.hpp"
#include "models/kernel_time.hpp"
#include "sim/core/error.hpp"

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

/// A table and what its list is judged on.
struct Judged {
  const KernelTable* table;
  std::vector<KernelRow> rows;  ///< some of the table's, enough for a median
  Accuracy full;                ///< of the full fit
};

constexpr std::size_t kJudged = 3000;

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
      Judged judged{&table, {}, {}};
      for (std::size_t i = 0; i < table.rows.size(); ++i) {  // at random: tables have shapes in order
        if (mixed(i) % table.rows.size() < kJudged) judged.rows.push_back(table.rows[i]);
      }
      judged.full = accuracy_of(errors_of(fitted(table), table, judged.rows));
      judged_.push_back(std::move(judged));
    }
    candidates_.assign(common.begin(), common.end());
    if (candidates_.empty()) throw InputError("--fewest", "these tables share no shape; expected some");
  }

  std::vector<Shape> run() {
    const std::size_t most = std::min(options_.most, candidates_.size());
    std::set<Shape> list;
    for (const Shape& shape : options_.start) {
      if (std::binary_search(candidates_.begin(), candidates_.end(), shape)) list.insert(shape);
    }
    if (!options_.start.empty() && list.empty())
      throw InputError("--start", "none of its shapes is in all of these tables; expected some");
    if (list.empty()) lengthen(list, std::min(options_.first, most));
    Loss best = loss_of(list);
    while (true) {
      for (std::size_t i = 0; i < options_.tries && best.furthest > options_.within; ++i) {
        const std::set<Shape> changed = exchange(list);
        const Loss loss = loss_of(changed);
        if (loss.sum >= best.sum) continue;
        best = loss;
        list = changed;
      }
      if (best.furthest <= options_.within || list.size() >= most) break;
      lengthen(list, std::min(most, list.size() + list.size() / 8 + 1));
      best = loss_of(list);
    }
    return {list.begin(), list.end()};
  }

 private:
  struct Loss {
    double sum = 0;       ///< what is made smaller
    double furthest = 0;  ///< of the tables
  };

  /// Over the tables: what the list costs, the more so beyond the margin.
  Loss loss_of(const std::set<Shape>& list) const {
    constexpr double kBeyond = 5;
    Loss loss{0, -std::numeric_limits<double>::infinity()};
    for (const Judged& judged : judged_) {
      const Accuracy quick =
          accuracy_of(errors_of(fitted(only(*judged.table, list)), *judged.table, judged.rows));
      for (const double lost :
           {quick.median_ape - judged.full.median_ape, (quick.p90_ape - judged.full.p90_ape) / kFewestTail}) {
        loss.furthest = std::max(loss.furthest, lost);
        loss.sum += lost + kBeyond * std::max(0.0, lost - options_.within);
      }
    }
    return loss;
  }

  std::size_t below(std::size_t end) { return mixed(++draws_) % end; }

  void lengthen(std::set<Shape>& list, std::size_t size) {
    while (list.size() < size) list.insert(candidates_[below(candidates_.size())]);
  }

  std::set<Shape> exchange(std::set<Shape> list) {
    const std::size_t size = list.size();
    for (std::size_t i = below(std::min<std::size_t>(3, size)) + 1; i > 0; --i)
      list.erase(std::next(list.begin(), static_cast<std::ptrdiff_t>(below(list.size()))));
    lengthen(list, size);
    return list;
  }

  const FewestOptions options_;
  std::vector<Judged> judged_;
  std::vector<Shape> candidates_;
  std::uint64_t draws_ = 0;
};

}  // namespace

bool serving_shape(const KernelRow& row) {
  if (row.op == CurveOp::gemm) {
    const double m = row.at("m"), n = row.at("n"), k = row.at("k");
    return n >= 1024 && k >= 1024 && n * k <= 0x1p29 && m <= 8192 && m * n * k <= 0x1p41;
  }
  if (row.op == CurveOp::moe) return row.at("routing") == 0 && row.at("tokens") <= 8192;
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
