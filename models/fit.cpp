#include "models/fit.hpp"

#include <fmt/format.h>
#include <zlib.h>

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "models/model.hpp"
#include "models/step_model.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

// Tables -----------------------------------------------------------------------------------------------

/// A CSV file in memory. Fields are views of `text`; quoting does not occur in these tables.
class Table {
 public:
  explicit Table(const std::filesystem::path& file) : file_(file.string()) {
    const gzFile in = gzopen(file_.c_str(), "rb");  // reads plain files as they are
    if (in == nullptr) throw InputError(file_, "cannot be opened");
    std::array<char, 1 << 16> buffer;
    int got = 0;
    while ((got = gzread(in, buffer.data(), buffer.size())) > 0) {
      text_.append(buffer.data(), static_cast<std::size_t>(got));
    }
    if (gzclose(in) != Z_OK || got < 0) throw InputError(file_, "is not a whole gzip file");
    std::string_view rest = text_;
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      std::string_view line = rest.substr(0, end);
      rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
      if (line.ends_with('\r')) line.remove_suffix(1);
      std::vector<std::string_view> fields;
      for (std::size_t comma = 0; comma != std::string_view::npos;) {
        comma = line.find(',');
        fields.push_back(line.substr(0, comma));
        line.remove_prefix(comma == std::string_view::npos ? line.size() : comma + 1);
      }
      rows_.push_back(std::move(fields));
    }
    if (rows_.size() < 2) throw InputError(file_, "has no rows: expected a header line and measurements");
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  std::size_t rows() const { return rows_.size() - 1; }

  bool has(std::string_view name) const {
    const auto& header = rows_.front();
    return std::find(header.begin(), header.end(), name) != header.end();
  }
  std::size_t column(std::string_view name) const {
    const auto& header = rows_.front();
    const auto found = std::find(header.begin(), header.end(), name);
    if (found != header.end()) return static_cast<std::size_t>(found - header.begin());
    throw InputError(fmt::format("{}:1", file_),
                     fmt::format("has no column '{}'{}", name, did_you_mean(name, header)));
  }
  std::string_view text(std::size_t row, std::size_t column) const {
    const auto& fields = rows_[row + 1];
    if (fields.size() == rows_.front().size()) return fields[column];
    throw InputError(place(row),
                     fmt::format("has {} fields: expected {}", fields.size(), rows_.front().size()));
  }
  double number(std::size_t row, std::size_t column) const {
    const std::string_view field = text(row, column);
    double value = 0;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error == std::errc() && end == field.data() + field.size() && std::isfinite(value)) return value;
    throw InputError(place(row), fmt::format("{} is '{}': expected a number", rows_.front()[column], field));
  }
  double positive(std::size_t row, std::size_t column) const {
    const double value = number(row, column);
    if (value > 0) return value;
    throw InputError(place(row), fmt::format("{} is {}: expected more than 0", rows_.front()[column], value));
  }

 private:
  std::string place(std::size_t row) const { return fmt::format("{}:{}", file_, row + 2); }

  std::string file_, text_;
  std::vector<std::vector<std::string_view>> rows_;
};

/// Reads named columns of one table, row by row.
class Columns {
 public:
  Columns(const Table& table, std::initializer_list<std::string_view> names) : table_(table) {
    for (const std::string_view name : names) columns_.push_back(table.column(name));
  }
  double number(std::size_t row, std::size_t i) const { return table_.number(row, columns_[i]); }
  std::string_view text(std::size_t row, std::size_t i) const { return table_.text(row, columns_[i]); }
  /// A latency in ms, in ns.
  double ns(std::size_t row, std::size_t i) const { return table_.positive(row, columns_[i]) * 1e6; }

 private:
  const Table& table_;
  std::vector<std::size_t> columns_;
};

std::optional<Dtype> table_dtype(std::string_view text) {
  if (text == "int4_wo") return Dtype::int4;
  if (text == "w4a16_mxfp4") return Dtype::mxfp4;
  return parse_dtype(text);
}

/// FNV-1a of a group's numbers: the same on every machine.
std::uint64_t hash_of(std::initializer_list<double> group) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const double value : group) {
    auto bits = static_cast<std::uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) hash = (hash ^ (bits & 255)) * 0x100000001b3u;
  }
  return hash;
}

// Least squares ----------------------------------------------------------------------------------------

/// A coefficient to fit within [low, high]: in its logarithm, or as it is when low is 0.
struct Free {
  double Coefficients::*member;
  double low, high;
};

struct Sample {
  double ns = 0;
  std::uint64_t group = 0;  ///< rows of one group are fitted or held out together
  double size = 0;          ///< which regime it belongs to
  bool held = false;
};

constexpr std::size_t kFewRows = 50;  ///< below this none is spared: the error is in-sample

/// Holds out one group in five, by hash; where the groups are few, by the first hash that holds out
/// between a tenth and a third of the rows.
void hold_out(std::vector<Sample>& samples) {
  if (samples.size() < kFewRows) return;
  std::size_t held = 0;
  for (std::uint64_t salt = 0; salt < 100 && (held * 10 < samples.size() || held * 3 > samples.size());
       ++salt) {
    held = 0;
    for (Sample& sample : samples) {
      sample.held = ((sample.group + salt) * 0x9e3779b97f4a7c15u >> 32) % 5 == 0;
      held += sample.held ? 1 : 0;
    }
  }
}

constexpr double kSoft = 0.1;   ///< log errors beyond this weigh as their absolute value, not their square
constexpr double kPull = 1e-5;  ///< squared, a row: toward the start; settles what the rows say nothing about

/// Minimises the sum of soft-L1 of log(model / measured) over `rows` by Levenberg-Marquardt on
/// reweighted squares, derivatives by differences. model(coefficients, row) is in ns.
/// Returns the cost per row.
template <class Model>
double minimise(Coefficients& fit, const std::vector<Free>& free, const std::vector<std::size_t>& rows,
                const std::vector<Sample>& samples, const Model& model) {
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

/// Four significant digits: what a profile holds, and therefore what its errors are measured with.
double rounded(double value) {
  return std::isfinite(value) ? std::stod(fmt::format("{:.4g}", value)) : value;
}

void round_all(Coefficients& c) {
  for (double* value : {&c.upto, &c.launch_ns, &c.flops_per_ns, &c.bytes_per_ns, &c.overlap, &c.element_ns,
                        &c.host_ns, &c.ragged, &c.wave_ns, &c.walk_ns, &c.walk_waves, &c.split_ns}) {
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

template <class Model>
Accuracy accuracy(const Curve& curve, const std::vector<Sample>& samples, const Model& model) {
  std::vector<double> error, absolute;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].held == curve.in_sample) continue;
    error.push_back(model(curve.at(samples[i].size), i) / samples[i].ns - 1);
    absolute.push_back(std::abs(error.back()));
  }
  return {static_cast<std::int64_t>(error.size()), rounded(percentile(absolute, 0.5)),
          rounded(percentile(absolute, 0.9)), rounded(percentile(error, 0.5))};
}

struct Tile {
  std::int32_t m, n, cluster;
};

constexpr std::size_t kTrialRows = 2000;  ///< enough to tell tile shapes apart

/// Fits each regime (given as starting points) to the samples of its sizes, trying every tile shape on
/// some of the rows first; then rounds and measures. Regimes without a sample are dropped.
template <class Model>
void fit_regimes(Curve& curve, const std::vector<Coefficients>& starts, const std::vector<Free>& free,
                 const std::vector<Tile>& tiles, std::vector<Sample>& samples, const Model& model) {
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

void widen(Curve& curve, const std::string& axis, double value) {
  const auto [found, fresh] = curve.range.try_emplace(axis, Range{value, value});
  if (fresh) return;
  found->second.least = std::min(found->second.least, value);
  found->second.most = std::max(found->second.most, value);
}

// Curves -----------------------------------------------------------------------------------------------

/// Starting points: what the data sheet promises, less a quarter.
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

const Free kLaunch{&Coefficients::launch_ns, 500, 1e6};
const Free kFlops{&Coefficients::flops_per_ns, 1e4, 2e7};
const Free kBytes{&Coefficients::bytes_per_ns, 10, 1e5};
const Free kOverlap{&Coefficients::overlap, 0, 1};
const Free kElement{&Coefficients::element_ns, 1e-6, 1};
const Free kWave{&Coefficients::wave_ns, 10, 1e5};
const Free kWalk{&Coefficients::walk_ns, 0.01, 200};

void fit_gemm(Profile& profile, const Table& table, const Gpu& gpu) {
  const Columns in(table, {"gemm_dtype", "m", "n", "k", "latency", "kernel_source"});
  struct Group {
    std::vector<GemmShape> shapes;
    std::vector<Sample> samples;
    std::set<std::string> kernels;
  };
  std::map<Dtype, Group> groups;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    const std::optional<Dtype> dtype = table_dtype(in.text(row, 0));
    if (!dtype) continue;
    Group& group = groups[*dtype];
    const GemmShape shape{in.number(row, 1), in.number(row, 2), in.number(row, 3), *dtype};
    // vLLM cuts block-scaled weights at whole blocks only; other shapes went to a slow fallback kernel.
    if (*dtype == Dtype::fp8_block && (std::fmod(shape.n, 128) != 0 || std::fmod(shape.k, 128) != 0))
      continue;
    group.shapes.push_back(shape);
    group.samples.push_back({in.ns(row, 4), hash_of({shape.n, shape.k}), shape.m});
    group.kernels.emplace(in.text(row, 5));
  }
  const std::vector<Tile> tiles = {{16, 64, 1},   {16, 128, 1},  {64, 64, 1},   {64, 128, 1},
                                   {64, 256, 1},  {128, 64, 1},  {128, 128, 1}, {128, 128, 2},
                                   {128, 256, 1}, {128, 256, 2}, {256, 128, 1}};
  for (auto& entry : groups) {
    const Dtype dtype = entry.first;
    Group& group = entry.second;
    Curve curve;
    curve.op = CurveOp::gemm;
    curve.dtype = dtype;
    curve.kernel = fmt::format("{}", fmt::join(group.kernels, ", "));
    for (const GemmShape& shape : group.shapes) {
      widen(curve, "m", shape.m);
      widen(curve, "n", shape.n);
      widen(curve, "k", shape.k);
    }
    Coefficients start = start_of(gpu, dtype, 5000);
    std::vector<Free> free = {kFlops, kBytes, kOverlap};
    if (peak_ops_per_ns(gpu, dtype) > peak_ops_per_ns(gpu, Dtype::bf16)) {  // activations are quantised first
      start.element_ns = 1e-3;
      // The bound keeps rows of 2^i + 1, the only ragged ones measured, from standing in for tile shapes.
      free.insert(free.end(), {kElement, {&Coefficients::ragged, 1, 1.3}});
    }
    std::vector<Coefficients> starts = split_at(start, {16, 64, 128, 256, 1024, 4096});
    // The block-scaled kernels were launched one by one: up to thousands of rows every shape takes the
    // host's 55 to 90 us. The attention modules of the same tables, replayed as graphs, take as long
    // with them as with bf16. So the floor is the host's, fitted apart, and what a launch on the GPU
    // takes is that of the per-tensor fp8 kernels, which also quantise first.
    const Curve* fp8 = dtype == Dtype::fp8_block && groups.contains(Dtype::fp8)
                           ? find_curve(profile, CurveOp::gemm, Dtype::fp8, "gemm").curve
                           : nullptr;
    if (fp8 != nullptr) {
      for (Coefficients& regime : starts) {
        regime.launch_ns = fp8->at(std::min(regime.upto, 1e5)).launch_ns;
        regime.host_ns = 6e4;
      }
      free.push_back({&Coefficients::host_ns, 1e3, 2e5});
    } else {
      free.push_back(kLaunch);
    }
    fit_regimes(curve, starts, free, tiles, group.samples, [&](const Coefficients& c, std::size_t i) {
      return std::max(c.host_ns, gemm_time(c, gpu.sm_count, group.shapes[i]).ns);
    });
    profile.curves.push_back(std::move(curve));
  }
}

/// Rows of one attention curve: the operator, the sums and the projections' time in each.
struct AttentionRows {
  std::vector<AttentionForm> forms;
  std::vector<AttentionShape> shapes;
  std::vector<double> projections;  ///< ns
  std::vector<Sample> samples;
  std::set<std::string> kernels;
  Curve curve;
};

void fit_attention(Profile& profile, AttentionRows& rows, const Gpu& gpu, std::vector<Free> free,
                   const Coefficients& start) {
  rows.curve.kernel = fmt::format("{}", fmt::join(rows.kernels, ", "));
  fit_regimes(rows.curve, {start}, free, {{0, 0, 1}}, rows.samples,
              [&](const Coefficients& c, std::size_t i) {
                const AttentionKernel kernel(rows.forms[i], c, gpu.sm_count);
                return std::max(c.host_ns, rows.projections[i] + kernel.time(rows.shapes[i]).ns);
              });
  if (!rows.curve.regimes.empty()) profile.curves.push_back(std::move(rows.curve));
}

void fit_head_attention(Profile& profile, const Table& table, const Gpu& gpu, bool decode) {
  const Columns in(table, {"batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim",
                           "kv_cache_dtype", "step", "latency", "kernel_source"});
  const bool windows = table.has("window_size");  // vLLM's tables before 0.18 have none
  const std::size_t window_column = windows ? table.column("window_size") : 0;
  struct Key {
    std::int32_t head_dim;
    Dtype kv;
    bool window;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, AttentionRows> groups;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    const double batch = in.number(row, 0), length = in.number(row, 1), step = in.number(row, 6);
    const double window = windows ? table.number(row, window_column) : 0;
    const std::optional<Dtype> kv = table_dtype(in.text(row, 5));
    if (!kv) continue;
    Operator op;
    op.kind = OpKind::attention;
    op.heads = static_cast<std::int32_t>(in.number(row, 2));
    op.kv_heads = static_cast<std::int32_t>(in.number(row, 3));
    op.head_dim = op.v_head_dim = static_cast<std::int32_t>(in.number(row, 4));
    AttentionRows& group = groups[{op.head_dim, *kv, window > 0}];
    // A decode row has step + 1 keys and one query; a prefill row `length` of each after `step` keys.
    const double keys = decode ? step + 1 : step + length;
    const double seen = window > 0 ? std::min(keys, window) : keys;
    const double pairs = decode       ? seen
                         : window > 0 ? seen * length - std::max(0.0, seen * (seen - 1) / 2)
                                      : length * step + length * (length + 1) / 2;
    group.forms.push_back(attention_form(op, *kv, decode));
    group.shapes.push_back({decode ? batch : batch * length, batch * pairs, batch * (decode ? seen : keys)});
    group.projections.push_back(0);
    group.samples.push_back({in.ns(row, 7), hash_of({in.number(row, 2), in.number(row, 3)}), 1});
    group.kernels.emplace(in.text(row, 8));
    Curve& curve = group.curve;
    curve.op = decode ? CurveOp::attention_decode : CurveOp::attention_prefill;
    curve.dtype = *kv;
    curve.head_dim = op.head_dim;
    curve.windowed = window > 0;
    widen(curve, "requests", batch);
    widen(curve, "context", keys);
    widen(curve, "heads", op.heads);
    widen(curve, "kv_heads", op.kv_heads);
  }
  for (auto& [key, group] : groups) {
    Coefficients start = start_of(gpu, Dtype::bf16, 10'000);
    std::vector<Free> free = {kLaunch, kFlops, kBytes, kOverlap};
    if (decode) {
      start.flops_per_ns = 0;  // one query a key: the walk below stands for arithmetic
      start.wave_ns = 3000;
      start.walk_ns = 5;
      start.walk_waves = key.window ? 0.01 : 15;  // what a window leaves is too short to split
      start.split_ns = 2000;
      free = {kLaunch,
              kBytes,
              kOverlap,
              kWave,
              kWalk,
              {&Coefficients::walk_waves, 0.01, 200},
              {&Coefficients::split_ns, 10, 2e4}};
    }
    fit_attention(profile, group, gpu, free, start);
  }
}

/// The models whose latent-attention modules were measured: the fields of their published config.json.
struct LatentModel {
  std::string_view name;
  std::int64_t hidden, q_lora;
  std::int32_t latent, rope, nope, value, index_heads, index_head_dim, index_topk;
};
constexpr LatentModel kLatentModels[] = {
    {"deepseek-ai/DeepSeek-V3", 7168, 1536, 512, 64, 128, 128, 0, 0, 0},
    {"deepseek-ai/DeepSeek-V3.2", 7168, 1536, 512, 64, 128, 128, 64, 128, 2048},
    {"zai-org/GLM-5", 6144, 2048, 512, 64, 192, 256, 32, 128, 2048},
};

void fit_latent_attention(Profile& profile, const Table& table, const Gpu& gpu, bool sparse, bool decode) {
  const Columns in(table, {"model", "num_heads", "batch_size", "isl", "step", "kv_cache_dtype", "gemm_type",
                           "latency", "kernel_source"});
  const CurveChoice gemm = find_curve(profile, CurveOp::gemm, Dtype::bf16, "gemm");
  std::map<Dtype, AttentionRows> groups;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    const std::string_view name = in.text(row, 0);
    const auto* model = std::find_if(std::begin(kLatentModels), std::end(kLatentModels),
                                     [&](const LatentModel& each) { return each.name == name; });
    const std::optional<Dtype> kv = table_dtype(in.text(row, 5));
    // Projections in bf16 only: their curve is the most exact.
    if (model == std::end(kLatentModels) || !kv || table_dtype(in.text(row, 6)) != Dtype::bf16) continue;
    const double heads = in.number(row, 1), batch = in.number(row, 2), length = in.number(row, 3);
    const double step = in.number(row, 4);
    Operator op;
    op.kind = sparse ? OpKind::dsa_attention : OpKind::mla_attention;
    op.heads = static_cast<std::int32_t>(heads);
    op.head_dim = model->nope;
    op.v_head_dim = model->value;
    op.latent = model->latent;
    op.rope = model->rope;
    op.index_heads = model->index_heads;
    op.index_head_dim = model->index_head_dim;
    op.index_topk = model->index_topk;
    AttentionRows& group = groups[*kv];
    const double tokens = batch * length;
    double projections = 0;
    const auto project = [&](double n, double k) {
      const GemmShape shape{tokens, n, k, Dtype::bf16};
      projections += gemm_time(gemm.curve->at(tokens), gpu.sm_count, shape).ns;
    };
    const auto hidden = static_cast<double>(model->hidden), q_lora = static_cast<double>(model->q_lora);
    project(q_lora + model->latent + model->rope, hidden);
    project(heads * (model->nope + model->rope), q_lora);
    if (sparse) {
      project(model->index_heads * model->index_head_dim, q_lora);
      project(model->index_head_dim, hidden);
      project(model->index_heads, hidden);
    }
    project(hidden, heads * model->value);
    // The norm of the down-projections and the rotation that a step lists beside the attention.
    projections += 2 * stream_time(elementwise_fit(gpu), 0).ns;
    group.projections.push_back(projections);
    group.forms.push_back(attention_form(op, *kv, decode));
    const double keys = step + length;
    group.shapes.push_back({tokens, batch * (length * step + length * (length + 1) / 2), batch * keys});
    group.samples.push_back({in.ns(row, 7), hash_of({heads, batch, static_cast<double>(model->hidden)}), 1});
    group.kernels.emplace(in.text(row, 8));
    Curve& curve = group.curve;
    curve.op = sparse ? (decode ? CurveOp::dsa_decode : CurveOp::dsa_prefill)
                      : (decode ? CurveOp::mla_decode : CurveOp::mla_prefill);
    curve.dtype = *kv;
    widen(curve, "requests", batch);
    widen(curve, "context", keys);
    widen(curve, "heads", heads);
  }
  for (auto& [kv, group] : groups) {
    Coefficients start = start_of(gpu, Dtype::bf16, 40'000);
    std::vector<Free> free = {kLaunch, kFlops, kBytes, kOverlap};
    if (decode) {
      start.wave_ns = 20'000;
      start.walk_ns = 1;
      free.insert(free.end(), {kWave, kWalk});
    } else if (sparse) {
      // Launched one by one: below a thousand tokens every shape takes the host's millisecond. What the
      // launches take on the GPU is the decode module's, which was replayed as a graph.
      start.launch_ns =
          find_curve(profile, CurveOp::dsa_decode, kv, "dsa_generation_module").curve->regimes[0].launch_ns;
      start.host_ns = 1.5e6;
      free = {kFlops, kBytes, kOverlap, {&Coefficients::host_ns, 1e4, 1e7}};
    }
    fit_attention(profile, group, gpu, free, start);
  }
}

void fit_moe(Profile& profile, const Table& table, const Gpu& gpu) {
  const Columns in(table, {"moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
                           "moe_tp_size", "moe_ep_size", "distribution", "latency", "kernel_source"});
  struct Group {
    std::vector<MoeShape> shapes;
    std::vector<Sample> samples;
    std::set<std::string> kernels;
    Curve curve;
  };
  std::map<Dtype, Group> groups;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    const std::optional<Dtype> dtype = table_dtype(in.text(row, 0));
    // One of the three measured routings: between perfect balance and the heavier skew.
    if (!dtype || in.text(row, 8) != "power_law_1.01") continue;
    // ModelOpt's per-tensor fp8 path ran 2 to 4 times slower than bf16 on the same shapes: it is not what
    // vLLM runs for the checkpoints that pdsim knows. Those take the block-scaled curve (kStandIn).
    // mxfp4 is gpt-oss's own path, not a compressed-tensors checkpoint's with another activation.
    const std::string_view kernel = in.text(row, 10);
    if (kernel.find("modeloptfp8moe") != kernel.npos || kernel.find("w4a4mxfp4moe") != kernel.npos) continue;
    const double tensor = in.number(row, 6), expert = in.number(row, 7);
    if (tensor > 16 || expert > 32) continue;            // slivers that no sensible deployment cuts
    if (*dtype == Dtype::mxfp4 && expert > 1) continue;  // another path, whose floor is 67 us against 37
    Group& group = groups[*dtype];
    MoeShape shape;
    shape.tokens = in.number(row, 1);
    shape.hidden = in.number(row, 2);
    shape.intermediate = in.number(row, 3) / tensor;
    shape.topk = in.number(row, 4);
    shape.experts = in.number(row, 5);
    shape.expert_parallel = expert;
    shape.dtype = *dtype;
    group.shapes.push_back(shape);
    group.samples.push_back(
        {in.ns(row, 9), hash_of({shape.hidden, shape.intermediate, shape.experts, expert}), shape.tokens});
    group.kernels.emplace(in.text(row, 10));
    group.curve.op = CurveOp::moe;
    group.curve.dtype = *dtype;
    widen(group.curve, "tokens", shape.tokens);
    widen(group.curve, "hidden", shape.hidden);
    widen(group.curve, "intermediate", shape.intermediate);
    widen(group.curve, "experts", shape.experts);
    widen(group.curve, "topk", shape.topk);
    widen(group.curve, "expert_parallel", expert);
  }
  for (auto& entry : groups) {
    const Dtype dtype = entry.first;
    Group& group = entry.second;
    group.curve.kernel = fmt::format("{}", fmt::join(group.kernels, ", "));
    Coefficients start = start_of(gpu, dtype, 30'000);
    start.flops_per_ns /= 2;
    start.element_ns = 1e-3;
    fit_regimes(group.curve, split_at(start, {16, 128, 1024}), {kLaunch, kFlops, kBytes, kOverlap, kElement},
                {{0, 0, 1}, {16, 0, 1}, {32, 0, 1}, {64, 0, 1}, {128, 0, 1}}, group.samples,
                [&](const Coefficients& c, std::size_t i) { return moe_time(c, group.shapes[i]).ns; });
    if (!group.curve.regimes.empty()) profile.curves.push_back(std::move(group.curve));
  }
}

/// vLLM's custom all-reduce, replayed as a graph. Its two algorithms and its limit are in
/// csrc/custom_all_reduce.cuh: one shot up to 512 KiB (4 GPUs) or 256 KiB (8), two shots above, NCCL
/// from 8 MiB on; two GPUs always take one shot. NCCL itself changes its algorithm near 100 MB.
void fit_allreduce(Profile& profile, const Table& table, const Gpu& gpu) {
  const Columns in(table,
                   {"num_gpus", "message_size", "latency", "kernel_source", "backend", "allreduce_dtype"});
  struct Group {
    std::vector<double> bytes;
    std::vector<Sample> samples;
    Curve curve;
  };
  std::map<std::int32_t, Group> groups;
  for (std::size_t row = 0; row < table.rows(); ++row) {
    if (in.text(row, 4) != "vllm_graph" || table_dtype(in.text(row, 5)) != Dtype::bf16) continue;
    const auto gpus = static_cast<std::int32_t>(in.number(row, 0));
    const double bytes = in.number(row, 1) * bytes_per_element(Dtype::bf16);
    Group& group = groups[gpus];
    group.bytes.push_back(bytes);
    group.samples.push_back({in.ns(row, 2), hash_of({bytes}), bytes});
    group.curve.op = CurveOp::allreduce;
    group.curve.gpus = gpus;
    group.curve.kernel = in.text(row, 3);
    widen(group.curve, "bytes", bytes);
  }
  constexpr double kKiB = 1024, kMiB = 1024 * kKiB;
  for (auto& entry : groups) {
    const std::int32_t gpus = entry.first;
    Group& group = entry.second;
    Coefficients start = start_of(gpu, Dtype::bf16, 5000);
    start.flops_per_ns = 0;
    start.bytes_per_ns = 200;
    const double one_shot = (gpus <= 2 ? 8 * kKiB : gpus <= 4 ? 512 : 256) * kKiB;
    std::vector<Coefficients> starts = split_at(start, {one_shot - 1, 8 * kMiB - 1, 96 * kMiB});
    if (gpus <= 2) starts.erase(starts.begin());
    fit_regimes(group.curve, starts, {kLaunch, kBytes}, {{0, 0, 1}}, group.samples,
                [&](const Coefficients& c, std::size_t i) { return stream_time(c, group.bytes[i]).ns; });
    if (!group.curve.regimes.empty()) profile.curves.push_back(std::move(group.curve));
  }
}

constexpr std::string_view kTables[] = {"gemm",
                                        "context_attention",
                                        "generation_attention",
                                        "mla_context_module",
                                        "mla_generation_module",
                                        "dsa_generation_module",
                                        "dsa_context_module",
                                        "moe",
                                        "custom_allreduce"};

std::string table_name(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  return name.substr(0, name.find('.'));
}

}  // namespace

Profile fit_profile(std::span<const std::filesystem::path> tables, const Gpu& gpu,
                    const Provenance& provenance) {
  std::map<std::string, std::filesystem::path> found;
  for (const std::filesystem::path& path : tables) {
    if (std::filesystem::is_directory(path)) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        found.emplace(table_name(entry.path()), entry.path());
      }
      continue;
    }
    const std::string name = table_name(path);
    if (std::find(std::begin(kTables), std::end(kTables), name) == std::end(kTables)) {
      throw InputError(path.string(),
                       fmt::format("'{}' is no table that can be fitted{}: expected one of {}", name,
                                   did_you_mean(name, kTables), fmt::join(kTables, ", ")));
    }
    found.emplace(name, path);
  }
  Profile profile;
  profile.name = provenance.name;
  profile.gpu = gpu.name;
  profile.date = provenance.date;
  profile.source = provenance.source;
  profile.license = provenance.license;
  profile.sms = gpu.sm_count;
  // In this order: attention modules need the gemm curves, sparse prefill needs sparse decode.
  for (const std::string_view name : kTables) {
    const auto file = found.find(std::string(name));
    if (file == found.end()) continue;
    const Table table(file->second);
    if (profile.device.empty()) {
      const Columns in(table, {"device", "framework", "version"});
      profile.device = in.text(0, 0);
      profile.software = fmt::format("{} {}", in.text(0, 1), in.text(0, 2));
    }
    if (name == "gemm") fit_gemm(profile, table, gpu);
    if (name == "context_attention") fit_head_attention(profile, table, gpu, false);
    if (name == "generation_attention") fit_head_attention(profile, table, gpu, true);
    if (name == "mla_context_module") fit_latent_attention(profile, table, gpu, false, false);
    if (name == "mla_generation_module") fit_latent_attention(profile, table, gpu, false, true);
    if (name == "dsa_context_module") fit_latent_attention(profile, table, gpu, true, false);
    if (name == "dsa_generation_module") fit_latent_attention(profile, table, gpu, true, true);
    if (name == "moe") fit_moe(profile, table, gpu);
    if (name == "custom_allreduce") fit_allreduce(profile, table, gpu);
  }
  if (profile.curves.empty()) {
    throw InputError(tables.empty() ? "tables" : tables.front().string(),
                     fmt::format("no table to fit: expected {} (.csv or .csv.gz)", fmt::join(kTables, ", ")));
  }
  return profile;
}

}  // namespace pdsim
