#include "models/fit/least_squares.hpp"

#include <fmt/format.h>

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "models/fit/fits.hpp"

namespace pdsim {

std::uint64_t hash_of(std::initializer_list<double> group) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const double value : group) {
    auto bits = static_cast<std::uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) hash = (hash ^ (bits & 255)) * 0x100000001b3u;
  }
  return hash;
}

namespace {
constexpr std::size_t kFewRows = 50;  ///< below this none is spared: the error is in-sample
}

void hold_out(std::vector<Sample>& samples) {
  if (samples.size() < kFewRows) return;
  std::size_t held = 0;
  for (std::uint64_t salt = 0; salt < 100 && (held * 10 < samples.size() || held * 3 > samples.size());
       ++salt) {
    std::map<std::uint64_t, std::size_t> rank;  // of the groups, shuffled by the hash
    const auto shuffled = [&](const Sample& s) { return (s.group + salt) * 0x9e3779b97f4a7c15u; };
    for (const Sample& sample : samples) rank[shuffled(sample)] = 0;
    std::size_t next = 0;
    for (auto& entry : rank) entry.second = next++;
    held = 0;
    for (Sample& sample : samples) {
      const std::size_t fold = rank[shuffled(sample)] % 5;
      sample.held = fold == 0;
      sample.trial = fold == 1;
      held += sample.held ? 1 : 0;
    }
  }
}

namespace {
constexpr double kSoft = 0.1;   ///< log errors beyond this weigh as their absolute value, not their square
constexpr double kPull = 1e-5;  ///< squared, a row: toward the start; settles what the rows say nothing about

}  // namespace

double minimise(Coefficients& fit, const std::vector<Free>& free, const std::vector<std::size_t>& rows,
                const std::vector<Sample>& samples, const RowTime& model) {
  const auto count = static_cast<Eigen::Index>(free.size());
  const auto get = [&](Eigen::Index i) {
    const Free& f = free[static_cast<std::size_t>(i)];
    return f.low == 0 ? fit.*f.member : std::log(fit.*f.member);
  };
  const auto set = [&](Eigen::Index i, double x) {
    const Free& f = free[static_cast<std::size_t>(i)];
    fit.*f.member = std::clamp(f.low == 0 ? x : std::exp(x), f.low, f.high);
  };
  const auto residuals = [&] {
    Eigen::VectorXd r(static_cast<Eigen::Index>(rows.size()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      r[static_cast<Eigen::Index>(i)] = std::log(std::max(model(fit, rows[i]), 1.0) / samples[rows[i]].ns);
    }
    return r;
  };
  const double pull = kPull * static_cast<double>(rows.size());
  Eigen::VectorXd start(count), x(count);
  for (Eigen::Index i = 0; i < count; ++i) start[i] = x[i] = get(i);
  const auto cost_of = [&](const Eigen::VectorXd& r, const Eigen::VectorXd& at) {
    return ((1 + (r / kSoft).array().square()).sqrt() - 1).sum() * 2 * kSoft * kSoft +
           pull * (at - start).squaredNorm();
  };
  Eigen::VectorXd r = residuals();
  double cost = cost_of(r, x), damping = 1e-3;
  for (int iteration = 0; iteration < 80; ++iteration) {
    Eigen::MatrixXd jacobian(r.size(), count);
    for (Eigen::Index i = 0; i < count; ++i) {
      constexpr double kStep = 1e-4;
      set(i, x[i] + kStep);
      double step = get(i) - x[i];
      if (step == 0) {  // at the upper bound
        set(i, x[i] - kStep);
        step = get(i) - x[i];
      }
      jacobian.col(i) = (residuals() - r) / step;
      set(i, x[i]);
    }
    const Eigen::VectorXd weights = (1 + (r / kSoft).array().square()).rsqrt();
    Eigen::MatrixXd normal = jacobian.transpose() * weights.asDiagonal() * jacobian;
    normal.diagonal().array() += pull;
    const Eigen::VectorXd gradient = jacobian.transpose() * weights.cwiseProduct(r) + pull * (x - start);
    bool better = false;
    double gain = 0;
    for (int attempt = 0; attempt < 12 && !better; ++attempt) {
      Eigen::MatrixXd damped = normal;
      damped.diagonal() *= 1 + damping;
      const Eigen::VectorXd step = damped.ldlt().solve(gradient);
      Eigen::VectorXd next(count);
      for (Eigen::Index i = 0; i < count; ++i) {
        set(i, x[i] - step[i]);
        next[i] = get(i);
      }
      const Eigen::VectorXd trial = residuals();
      const double trial_cost = cost_of(trial, next);
      better = trial_cost < cost;
      if (better) {
        gain = (cost - trial_cost) / cost;
        x = next;
        r = trial;
        cost = trial_cost;
        damping = std::max(damping / 4, 1e-9);
      } else {
        damping *= 5;
      }
    }
    for (Eigen::Index i = 0; i < count; ++i) set(i, x[i]);
    if (!better || gain < 1e-6) break;
  }
  return cost / static_cast<double>(std::max<std::size_t>(rows.size(), 1));
}

double rounded(double value) {
  return std::isfinite(value) ? std::stod(fmt::format("{:.4g}", value)) : value;
}

namespace {

void round_all(Coefficients& c) {
  for (double* value :
       {&c.upto,       &c.launch_ns,    &c.flops_per_ns,       &c.bytes_per_ns, &c.overlap,
        &c.element_ns, &c.inner_ns,     &c.expert_ns,          &c.parallel_ns,  &c.cache_bytes,
        &c.host_ns,    &c.ragged,       &c.ragged_host_ns,     &c.hidden_keys,  &c.spread,
        &c.tail,       &c.tail_overlap, &c.cache_bytes_per_ns, &c.wave_ns,      &c.walk_ns,
        &c.walk_waves, &c.split_ns}) {
    *value = rounded(*value);
  }
}

double percentile(std::vector<double>& values, double p) {
  if (values.empty()) return 0;
  const double at = p * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  std::sort(values.begin(), values.end());
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

}  // namespace

Accuracy accuracy_of(std::vector<double> error) {
  std::vector<double> absolute;
  absolute.reserve(error.size());
  for (const double e : error) absolute.push_back(std::abs(e));
  return {static_cast<std::int64_t>(error.size()), rounded(percentile(absolute, 0.5)),
          rounded(percentile(absolute, 0.9)), rounded(percentile(error, 0.5))};
}

Accuracy accuracy(const Curve& curve, const std::vector<Sample>& samples, const RowTime& model) {
  std::vector<double> error;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].held == curve.in_sample) continue;
    error.push_back(model(curve.at(samples[i].size), i) / samples[i].ns - 1);
  }
  return accuracy_of(std::move(error));
}

namespace {

constexpr std::size_t kTrialRows = 2000;  ///< enough to tell tile shapes apart

}  // namespace

void fit_regimes(Curve& curve, const std::vector<Coefficients>& starts, const std::vector<Free>& free,
                 const std::vector<Tile>& tiles, std::vector<Sample>& samples, const RowTime& model) {
  hold_out(samples);
  curve.in_sample = samples.size() < kFewRows;
  curve.rows = static_cast<std::int64_t>(samples.size());
  double above = 0;
  for (Coefficients start : starts) {
    std::vector<std::size_t> rows, some;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      if (samples[i].held || samples[i].size <= above || samples[i].size > start.upto) continue;
      rows.push_back(i);
    }
    if (rows.size() < free.size()) continue;
    for (std::size_t i = 0; i < rows.size(); i += rows.size() / kTrialRows + 1) some.push_back(rows[i]);
    above = start.upto;
    Coefficients best = start;
    double least = std::numeric_limits<double>::infinity();
    for (const Tile& tile : tiles) {
      Coefficients trial = start;
      std::tie(trial.tile_m, trial.tile_n, trial.cluster) = std::tuple(tile.m, tile.n, tile.cluster);
      const double cost = minimise(trial, free, some, samples, model);
      if (cost < least) {
        least = cost;
        best = trial;
      }
    }
    minimise(best, free, rows, samples, model);
    round_all(best);
    curve.regimes.push_back(best);
  }
  if (curve.regimes.empty()) return;
  curve.regimes.back().upto = std::numeric_limits<double>::infinity();
  curve.error = accuracy(curve, samples, model);
}

// Corrections ------------------------------------------------------------------------------------------

namespace {

// Draws a node to 0, the formula alone: next to nothing where rows or neighbours say otherwise.
constexpr double kRidge = 1e-4;
// Nodes closer than this in octaves count as this far apart: a kernel that switches from 16 rows to 17
// may step there.
constexpr double kClose = 0.25;

/// A penalty: the same small stencil at many places of the grid, there with weights of its own.
/// y += S' S x for the stencils' matrix S, and S' S's diagonal.
class Penalty {
 public:
  /// Second differences along one axis.
  static Penalty bending(const Correction& grid, std::size_t axis, double stiffness) {
    Penalty p;
    const std::vector<double>& at = grid.axes[axis].octave;
    const std::size_t stride = stride_of(grid, axis);
    p.offset_ = {0, stride, 2 * stride};
    for (std::size_t first = 0; first < grid.size(); ++first) {
      const std::size_t i = first / stride % at.size();
      if (i + 2 >= at.size()) continue;
      const double before = gap(at, i), after = gap(at, i + 1);
      const double scale = std::sqrt(stiffness * (before + after) / 2);
      const double low = 2 / (before * (before + after)), high = 2 / (after * (before + after));
      p.add(first, {scale * low, -scale * (low + high), scale * high, 0});
    }
    return p;
  }
  /// First differences along two axes.
  static Penalty twisting(const Correction& grid, std::size_t a, std::size_t b, double stiffness) {
    Penalty p;
    const std::vector<double>&at = grid.axes[a].octave, &bt = grid.axes[b].octave;
    const std::size_t stride_a = stride_of(grid, a), stride_b = stride_of(grid, b);
    p.offset_ = {0, stride_a, stride_b, stride_a + stride_b};
    for (std::size_t first = 0; first < grid.size(); ++first) {
      const std::size_t i = first / stride_a % at.size(), j = first / stride_b % bt.size();
      if (i + 1 >= at.size() || j + 1 >= bt.size()) continue;
      const double weight = std::sqrt(stiffness / (gap(at, i) * gap(bt, j)));
      p.add(first, {weight, -weight, -weight, weight});
    }
    return p;
  }
  void apply(const Eigen::VectorXd& x, Eigen::VectorXd& y) const {
    for (std::size_t s = 0; s < first_.size(); ++s) {
      double value = 0;
      for (std::size_t c = 0; c < offset_.size(); ++c) value += weight_[s][c] * x[node(s, c)];
      for (std::size_t c = 0; c < offset_.size(); ++c) y[node(s, c)] += weight_[s][c] * value;
    }
  }
  void add_diagonal(Eigen::VectorXd& d) const {
    for (std::size_t s = 0; s < first_.size(); ++s) {
      for (std::size_t c = 0; c < offset_.size(); ++c) d[node(s, c)] += weight_[s][c] * weight_[s][c];
    }
  }

 private:
  using Weights = std::array<double, 4>;
  static double gap(const std::vector<double>& at, std::size_t i) {
    return std::max(at[i + 1] - at[i], kClose);
  }
  static std::size_t stride_of(const Correction& grid, std::size_t axis) {
    std::size_t stride = 1;
    for (std::size_t a = axis + 1; a < grid.axes.size(); ++a) stride *= grid.axes[a].nodes.size();
    return stride;
  }
  void add(std::size_t first, const Weights& weights) {
    first_.push_back(first);
    weight_.push_back(weights);
  }
  Eigen::Index node(std::size_t s, std::size_t c) const {
    return static_cast<Eigen::Index>(first_[s] + offset_[c]);
  }
  std::vector<std::size_t> offset_, first_;
  std::vector<Weights> weight_;
};

}  // namespace

void fit_correction(Correction& correction, const std::vector<double>& stiffness, double interaction,
                    const CorrectionRows& rows) {
  const std::size_t axes = correction.axes.size(), count = rows.log_ratio.size();
  const std::size_t corners = std::size_t{1} << axes;
  std::vector<std::uint32_t> index(count * corners);
  std::vector<double> share(count * corners);
  for (std::size_t i = 0; i < count; ++i) {
    const Correction::Cell cell = correction.cell({&rows.at[i * axes], axes});
    for (std::size_t c = 0; c < corners; ++c) {
      index[i * corners + c] = static_cast<std::uint32_t>(cell.index[c]);
      share[i * corners + c] = cell.weight[c];
    }
  }
  std::vector<Penalty> penalties;
  for (std::size_t a = 0; a < axes; ++a) {
    if (stiffness[a] <= 0) continue;
    penalties.push_back(Penalty::bending(correction, a, stiffness[a]));
    for (std::size_t b = 0; b < a; ++b) {
      if (stiffness[b] > 0 && interaction > 0) {
        penalties.push_back(Penalty::twisting(correction, b, a, interaction));
      }
    }
  }
  const auto size = static_cast<Eigen::Index>(correction.size());
  Eigen::VectorXd x = Eigen::VectorXd::Zero(size);
  std::vector<double> weight = rows.weight;
  const auto value = [&](const Eigen::VectorXd& v, std::size_t i) {
    double sum = 0;
    for (std::size_t c = i * corners; c < (i + 1) * corners; ++c) sum += share[c] * v[index[c]];
    return sum;
  };
  const auto apply = [&](const Eigen::VectorXd& v) {
    Eigen::VectorXd y = kRidge * v;
    for (std::size_t i = 0; i < count; ++i) {
      const double pull = weight[i] * value(v, i);
      for (std::size_t c = i * corners; c < (i + 1) * corners; ++c) y[index[c]] += share[c] * pull;
    }
    for (const Penalty& penalty : penalties) penalty.apply(v, y);
    return y;
  };
  constexpr int kReweighted = 3, kIterations = 300;
  constexpr double kTolerance = 1e-4;
  for (int round = 0; round < kReweighted; ++round) {
    Eigen::VectorXd right = Eigen::VectorXd::Zero(size), diagonal = Eigen::VectorXd::Constant(size, kRidge);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t c = i * corners; c < (i + 1) * corners; ++c) {
        right[index[c]] += share[c] * weight[i] * rows.log_ratio[i];
        diagonal[index[c]] += share[c] * share[c] * weight[i];
      }
    }
    for (const Penalty& penalty : penalties) penalty.add_diagonal(diagonal);
    Eigen::VectorXd residual = right - apply(x);
    Eigen::VectorXd scaled = residual.cwiseQuotient(diagonal), direction = scaled;
    double power = residual.dot(scaled);
    const double enough = kTolerance * kTolerance * right.dot(right.cwiseQuotient(diagonal));
    for (int i = 0; i < kIterations && power > enough; ++i) {
      const Eigen::VectorXd image = apply(direction);
      const double step = power / direction.dot(image);
      x += step * direction;
      residual -= step * image;
      scaled = residual.cwiseQuotient(diagonal);
      const double next = residual.dot(scaled);
      direction = scaled + next / power * direction;
      power = next;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const double error = (value(x, i) - rows.log_ratio[i]) / kSoft;
      weight[i] = rows.weight[i] / std::sqrt(1 + error * error);
    }
  }
  correction.permille.resize(static_cast<std::size_t>(size));
  constexpr double kMost = 3000;  // a factor of 20
  for (Eigen::Index i = 0; i < size; ++i) {
    correction.permille[static_cast<std::size_t>(i)] =
        static_cast<std::int16_t>(std::lround(std::clamp(1000 * x[i], -kMost, kMost)));
  }
}

// Curves -----------------------------------------------------------------------------------------------

namespace {

/// Which samples a fit sees.
enum class Seen : std::uint8_t { without_trial, without_held, all };

bool seen(const Sample& sample, Seen by) {
  return by == Seen::all || (!sample.held && (by == Seen::without_held || !sample.trial));
}

class CurveFit {
 public:
  CurveFit(Curve& curve, const CurvePlan& plan, const std::vector<Sample>& samples)
      : curve_(curve), plan_(plan), samples_(samples) {
    if (plan.grids.empty() && plan.coarse.empty()) return;
    const std::size_t axes = (plan.grids.empty() ? plan.coarse : plan.grids)[0].axes.size();
    at_.resize(samples.size() * axes);
    for (std::size_t i = 0; i < samples.size(); ++i) plan.point(i, &at_[i * axes]);
  }

  double beside(std::size_t i) const { return plan_.beside.empty() ? 0 : plan_.beside[i]; }
  double floor(const Coefficients& c, std::size_t i) const {
    return plan_.floor ? plan_.floor(c, i) : c.host_ns;
  }

  double time(std::size_t i) const {
    const Coefficients& c = curve_.at(samples_[i].size);
    const std::size_t axes = curve_.correction.axes.size();
    const double factor = curve_.correction.empty() ? 1 : curve_.correction.factor({&at_[i * axes], axes});
    return std::max(floor(c, i), beside(i) + factor * plan_.kernel(c, i));
  }

  void correct(const Grid& grid, Seen by) {
    const std::size_t axes = grid.axes.size();
    CorrectionRows rows;
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      if (!seen(samples_[i], by)) continue;
      const Coefficients& c = curve_.at(samples_[i].size);
      const double kernel = plan_.kernel(c, i), ns = samples_[i].ns;
      const double part = kernel / (kernel + beside(i));  // an error of the kernel is so much of the row's
      // A row that is all beside says nothing of the kernel; one at the host's floor only that the kernel is
      // no slower: a light pull to the formula, or below it, keeps the grid from running away there.
      constexpr double kFloor = 1.15, kLight = 0.1, kAllBeside = 0.05;
      const bool floored = ns < kFloor * floor(c, i), all_beside = ns <= beside(i) + kAllBeside * kernel;
      if (all_beside && !floored) continue;
      const double ratio = all_beside ? std::log(kAllBeside) : std::log((ns - beside(i)) / kernel);
      rows.at.insert(rows.at.end(), &at_[i * axes], &at_[i * axes] + axes);
      rows.log_ratio.push_back(floored ? std::min(ratio, 0.0) : ratio);
      rows.weight.push_back(part * part * (floored ? kLight : 1));
    }
    curve_.correction.axes = grid.axes;
    curve_.correction.permille.clear();
    fit_correction(curve_.correction, grid.stiffness, grid.interaction, rows);
  }

  template <class Wanted>
  Accuracy error(const Wanted& wanted) const {
    std::vector<double> error;
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      if (wanted(samples_[i])) error.push_back(time(i) / samples_[i].ns - 1);
    }
    return accuracy_of(std::move(error));
  }

 private:
  Curve& curve_;
  const CurvePlan& plan_;
  const std::vector<Sample>& samples_;
  std::vector<double> at_;
};

}  // namespace

namespace {

double score(const Accuracy& e) {
  return e.median_ape + 0.3 * e.p90_ape;  // as their targets do
}

/// Every regime on the rows that are not held out, from where it is.
void refit(Curve& curve, const CurvePlan& plan, const std::vector<Sample>& samples, const RowTime& row) {
  double above = 0;
  for (Coefficients& regime : curve.regimes) {
    std::vector<std::size_t> rows;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      if (!samples[i].held && samples[i].size > above && samples[i].size <= regime.upto) rows.push_back(i);
    }
    above = regime.upto;
    minimise(regime, plan.free, rows, samples, row);
    round_all(regime);
  }
}

/// fit_curve for few rows: five folds of the groups.
void cross_validate(Curve& curve, const CurvePlan& plan, std::vector<Sample>& samples, const RowTime& row) {
  constexpr std::size_t kFolds = 5;
  std::map<std::uint64_t, std::size_t> rank;
  for (const Sample& sample : samples) rank[sample.group * 0x9e3779b97f4a7c15u] = 0;
  std::size_t next = 0;
  for (auto& entry : rank) entry.second = next++;
  const auto hold = [&](std::size_t fold) {
    for (Sample& sample : samples) {
      sample.held = rank[sample.group * 0x9e3779b97f4a7c15u] % kFolds == fold;
      sample.trial = false;
    }
  };
  hold(kFolds);  // none
  refit(curve, plan, samples, row);
  const std::vector<Coefficients> whole = curve.regimes;
  std::vector<std::vector<double>> errors(plan.coarse.size() + 1);  // the last without a grid
  CurveFit fit(curve, plan, samples);
  for (std::size_t fold = 0; fold < std::min(kFolds, rank.size()); ++fold) {
    hold(fold);
    curve.regimes = whole;
    refit(curve, plan, samples, row);
    for (std::size_t g = 0; g < errors.size(); ++g) {
      curve.correction = {};
      if (g < plan.coarse.size()) fit.correct(plan.coarse[g], Seen::without_held);
      for (std::size_t i = 0; i < samples.size(); ++i) {
        if (samples[i].held) errors[g].push_back(fit.time(i) / samples[i].ns - 1);
      }
    }
  }
  std::size_t best = errors.size() - 1;
  curve.error = accuracy_of(errors[best]);
  for (std::size_t g = 0; g + 1 < errors.size(); ++g) {
    const Accuracy error = accuracy_of(errors[g]);
    if (score(error) >= score(curve.error)) continue;
    curve.error = error;
    best = g;
  }
  hold(kFolds);
  curve.regimes = whole;
  curve.correction = {};
  curve.in_sample = false;
  if (best < plan.coarse.size()) fit.correct(plan.coarse[best], Seen::all);
}

}  // namespace

void fit_curve(Curve& curve, const CurvePlan& plan, std::vector<Sample>& samples) {
  const RowTime row = [&](const Coefficients& c, std::size_t i) {
    const double beside = plan.beside.empty() ? 0 : plan.beside[i];
    return std::max(plan.floor ? plan.floor(c, i) : c.host_ns, beside + plan.kernel(c, i));
  };
  const std::vector<Tile> whole = {{0, 0, 1}};
  fit_regimes(curve, plan.starts, plan.free, plan.tiles.empty() ? whole : plan.tiles, samples, row);
  if (curve.regimes.empty()) return;
  if (!plan.coarse.empty() && samples.size() < kManyRows) return cross_validate(curve, plan, samples, row);
  if (curve.in_sample) return;
  CurveFit fit(curve, plan, samples);
  const auto on_trial = [](const Sample& s) { return s.trial; };
  double least = score(fit.error(on_trial));
  const Grid* best = nullptr;
  for (const Grid& grid : plan.grids) {
    fit.correct(grid, Seen::without_trial);
    const double trial = score(fit.error(on_trial));
    if (trial >= least) continue;
    least = trial;
    best = &grid;
  }
  curve.correction = {};
  if (best != nullptr) fit.correct(*best, Seen::without_held);
  curve.error = fit.error([](const Sample& s) { return s.held; });
  for (Sample& sample : samples) sample.held = false;
  refit(curve, plan, samples, row);
  if (best != nullptr) fit.correct(*best, Seen::all);
}

void widen(Curve& curve, const std::string& axis, double value) {
  const auto [found, fresh] = curve.range.try_emplace(axis, Range{value, value});
  if (fresh) return;
  found->second.least = std::min(found->second.least, value);
  found->second.most = std::max(found->second.most, value);
}

Coefficients start_of(const Gpu& gpu, Dtype dtype, double launch_ns) {
  Coefficients c;
  c.launch_ns = launch_ns;
  c.flops_per_ns = 0.75 * peak_ops_per_ns(gpu, dtype);
  c.bytes_per_ns = 0.75 * gpu.hbm_bytes_per_ns;
  c.overlap = 0.8;
  return c;
}

std::vector<Coefficients> split_at(const Coefficients& start, std::initializer_list<double> sizes) {
  std::vector<Coefficients> regimes(sizes.size() + 1, start);
  std::size_t i = 0;
  for (const double size : sizes) regimes[i++].upto = size;
  return regimes;
}

}  // namespace pdsim
