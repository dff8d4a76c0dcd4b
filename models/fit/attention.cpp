// Attention: a curve for each operation, KV format, head size, window and kernel.
#include "models/attention.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/attention_row.hpp"
#include "models/fit/fits.hpp"

namespace pdsim {
namespace {

const Free kWave{&Coefficients::wave_ns, 10, 1e5};
const Free kWalk{&Coefficients::walk_ns, 0.01, 200};
const Free kCache{&Coefficients::cache_bytes_per_ns, 100, 1e5};

/// Rows that one curve fits.
struct Group {
  std::vector<AttentionRow> rows;
  std::vector<AttentionForm> forms;
  std::vector<double> beside;
  std::vector<Dtype> weights;
  std::size_t heads = 0;  ///< different (heads, KV heads)
  std::vector<Sample> samples;
  Curve curve;
};

/// Head size, KV format, window, kernel.
using Key = std::tuple<std::int32_t, Dtype, std::int32_t, std::string>;

constexpr std::size_t kManyHeads = 5;

std::map<Key, Group> groups_of(const Profile& profile, const KernelTable& table, const Gpu& gpu, CurveOp op,
                               bool decode) {
  std::map<Key, Group> groups;
  for (const KernelRow& row : table.rows) {
    if (name(row.op).substr(0, 3) != name(op).substr(0, 3)) continue;  // attention-, mla-, dsa-
    const std::optional<AttentionRow> attention = attention_row(table, row);
    if (!attention || attention->op != op) continue;
    const Operator& of = attention->operation;
    const bool head = of.kind == OpKind::attention;
    Group& group = groups[{head ? of.head_dim : 0, row.dtype, of.window, table.kernels[row.kernel]}];
    group.rows.push_back(*attention);
    group.forms.push_back(attention_form(of, row.dtype, decode));
    group.beside.push_back(beside_attention(profile, gpu, row, *attention));
    group.weights.push_back(row.weights);
    group.samples.push_back({row.ns, 0, 1});
    Curve& curve = group.curve;
    curve.bare = row.bare;
    widen(curve, "requests", attention->shape.requests);
    widen(curve, "context", attention->context);
    widen(curve, "heads", of.heads);
    if (head) widen(curve, "kv_heads", of.kv_heads);
  }
  for (auto& [key, group] : groups) {
    // Rows are held out by heads; where few were measured, by heads and batch.
    std::set<std::uint64_t> heads;
    for (const bool few : {false, true}) {
      if (few && heads.size() >= kManyHeads) break;
      for (std::size_t i = 0; i < group.rows.size(); ++i) {
        const Operator& of = group.rows[i].operation;
        const auto q = static_cast<double>(of.heads), kv = static_cast<double>(of.kv_heads);
        group.samples[i].group = few ? hash_of({q, kv, group.rows[i].shape.requests}) : hash_of({q, kv});
        heads.insert(group.samples[i].group);
      }
      if (!few) group.heads = heads.size();
    }
    group.curve.op = op;
    std::tie(group.curve.head_dim, group.curve.dtype, group.curve.window, group.curve.kernel) = key;
  }
  return groups;
}

CurvePlan plan_of(const Group& group, const Gpu& gpu, bool decode) {
  CurvePlan plan;
  plan.tiles = {{0, 0, 1}};
  plan.kernel = [&group, &gpu](const Coefficients& c, std::size_t i) {
    const AttentionRow& row = group.rows[i];
    const AttentionKernel kernel(group.forms[i], c, gpu.sm_count, row.operation.window);
    return kernel.time(row.shape).ns;
  };
  plan.beside = group.beside;
  const bool head = group.curve.head_dim > 0;
  plan.point = [&group, decode, head](std::size_t i, double* at) {
    const AttentionRow& row = group.rows[i];
    if (head) {
      *at++ = row.operation.kv_heads;
      *at++ = static_cast<double>(row.operation.heads) / row.operation.kv_heads;
    } else {
      *at++ = row.operation.heads;
    }
    *at++ = row.shape.requests * (head ? decode ? row.operation.kv_heads : row.operation.heads : 1);
    *at = decode ? row.context : row.length;
  };
  return plan;
}

// Nodes are powers of two: the run-time grid holds one an octave.
const std::vector<double> kContexts = {2, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072};
const std::vector<double> kLengths = {16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
const std::vector<double> kRows = {1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048};
const std::vector<double> kPrompts = {1, 2, 4, 8, 16, 32, 64, 256};
const std::vector<double> kHeadRows = {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384};
const std::vector<double> kKvRows = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 16384};

constexpr double kStiff = 0.03;  // of a grid: the best of 0.01, 0.03, 0.1 and 0.3 on unseen heads of an H200

/// Grids over (KV heads, heads a KV head, KV heads or heads x requests, length), fine to coarse. Beyond the
/// heads that were measured a grid goes on as a line: where groups are few, it is drawn to a sum of functions
/// of one axis each, or has one node along heads.
std::vector<Grid> head_grids(bool decode, std::size_t groups, double window) {
  const std::vector<double> one = {1};
  const std::vector<double> kv = decode ? std::vector<double>{1, 2, 4, 8} : std::vector<double>{1, 4, 8, 64};
  std::vector<double> lengths = decode ? kContexts : kLengths;
  if (decode && window > 0) {  // which are alike from twice the window on
    std::erase_if(lengths, [&](double x) { return x > 2 * window && x < kContexts.back(); });
    if (window < kContexts[3]) lengths.insert(lengths.begin() + 1, {16, 32});
  }
  const auto grid = [&](const std::vector<double>& kv_heads, const std::vector<double>& ratio, double stiff,
                        double interaction) {
    return Grid{{{"kv_heads", kv_heads},
                 {"heads_per_kv_head", ratio},
                 {decode ? "kv_rows" : "head_rows", decode ? kKvRows : kHeadRows},
                 {decode ? "context" : "tokens", lengths}},
                {stiff, stiff, kStiff, kStiff},
                interaction};
  };
  constexpr std::size_t kMany = 16;
  if (groups < kMany) {
    return {grid({1, 8}, {1, 2, 8}, 0.3, 0.3), grid({1, 8}, {1, 8}, 0.3, 3), grid({1, 8}, one, 1, 1),
            grid(one, one, 1, 0)};
  }
  // Decode kernels that hold 16 queries of a KV head's group switch to another above.
  const std::vector<double> ratios =
      decode ? std::vector<double>{1, 2, 16, 24, 64} : std::vector<double>{1, 2, 8, 64};
  return {grid(kv, ratios, kStiff, 0), grid(kv, ratios, kStiff, kStiff)};
}

/// For few rows: nodes octaves apart, drawn to a sum of functions of one axis each.
std::vector<Grid> coarse_grids(const std::vector<Correction::Axis>& heads, const Correction::Axis& rows,
                               const Correction::Axis& lengths) {
  std::vector<Grid> grids;
  for (const double stiff : {0.03, 0.3, 3.0}) {
    for (const double interaction : {0.3, 3.0}) {
      Grid grid{heads, {}, interaction};
      grid.axes.push_back(rows);
      grid.axes.push_back(lengths);
      grid.stiffness.assign(grid.axes.size(), stiff);
      grids.push_back(std::move(grid));
    }
  }
  return grids;
}

std::vector<Grid> coarse_head_grids(bool decode) {
  const std::vector<double> one = {1};
  return coarse_grids({{"kv_heads", one}, {"heads_per_kv_head", {1, 4, 16}}},
                      {decode ? "kv_rows" : "head_rows", {1, 8, 32, 128, 512, 4096}},
                      decode ? Correction::Axis("context", {16, 128, 512, 2048, 8192, 32768, 131072})
                             : Correction::Axis("tokens", {16, 64, 256, 1024, 4096, 16384}));
}

std::vector<Grid> coarse_latent_grids(bool decode) {
  return coarse_grids({{"heads", std::vector<double>{16, 128}}}, {"requests", {1, 8, 32, 128}},
                      decode ? Correction::Axis("context", {128, 512, 2048, 8192, 32768, 131072})
                             : Correction::Axis("tokens", {64, 256, 1024, 4096, 16384}));
}

void add(Profile& profile, std::vector<Curve>& curves) {
  // The first of several kernels is the default: the one that was measured on the longest rows.
  std::stable_sort(curves.begin(), curves.end(), [](const Curve& a, const Curve& b) {
    const auto key = [](const Curve& c) {
      return std::tuple(c.head_dim, c.dtype, c.window, -c.range.at("context").most, -c.rows, c.kernel);
    };
    return key(a) < key(b);
  });
  for (Curve& curve : curves) profile.curves.push_back(std::move(curve));
}

/// Sizes of L2 caches: of an A10, V100, A100, H100, B200 half, L40S, B200.
constexpr double kCaches[] = {6e6, 24e6, 40e6, 50e6, 72e6, 96e6, 126e6};

/// Between what fp8 KV reaches and the data sheet's rate: without bounds, terms stand in for each other.
Free memory_rate(const Gpu& gpu) {
  return {&Coefficients::bytes_per_ns, 0.4 * gpu.hbm_bytes_per_ns, 1.2 * gpu.hbm_bytes_per_ns};
}

std::vector<Free> decode_free(const Gpu& gpu, bool window) {
  std::vector<Free> free = {kLaunch,
                            memory_rate(gpu),
                            kOverlap,
                            kWave,
                            kWalk,
                            kCache,
                            {&Coefficients::walk_waves, 0.01, 200},
                            {&Coefficients::split_ns, 10, 2e4}};
  if (window) free.push_back({&Coefficients::hidden_keys, 1, 512});
  return free;
}

/// Where the tables show reads to become slower: the size among kCaches that fits the most rows of decode
/// attention best. 0 without such rows.
double cache_of(const std::map<Key, Group>& groups, const Gpu& gpu, const Coefficients& start) {
  const Group* most = nullptr;
  for (const auto& [key, group] : groups) {
    if (std::get<2>(key) == 0 && (most == nullptr || group.rows.size() > most->rows.size())) most = &group;
  }
  double best = 0, least = 0;
  if (most == nullptr) return best;
  const CurvePlan plan = plan_of(*most, gpu, true);
  std::vector<std::size_t> some;
  constexpr std::size_t kSome = 1500;
  for (std::size_t i = 0; i < most->rows.size(); i += most->rows.size() / kSome + 1) some.push_back(i);
  for (const double bytes : kCaches) {
    Coefficients trial = start;
    trial.cache_bytes = bytes;
    const double cost = minimise(trial, decode_free(gpu, false), some, most->samples, plan.kernel);
    if (best != 0 && cost >= least) continue;
    least = cost;
    best = bytes;
  }
  return best;
}

void fit_heads(Profile& profile, const KernelTable& table, const Gpu& gpu) {
  double cache = 0;
  for (const bool decode : {true, false}) {
    std::map<Key, Group> groups = groups_of(
        profile, table, gpu, decode ? CurveOp::attention_decode : CurveOp::attention_prefill, decode);
    Coefficients start = start_of(gpu, Dtype::bf16, 10'000);
    start.wave_ns = 3000;
    start.cache_bytes_per_ns = 2 * gpu.hbm_bytes_per_ns;
    if (decode) {
      start.flops_per_ns = 0;  // one query a key: the walk below stands for arithmetic
      start.walk_ns = 5;
      start.walk_waves = 15;
      start.split_ns = 2000;
      cache = cache_of(groups, gpu, start);
    } else {
      start.hidden_keys = 64;
      start.spread = 0.5;
      start.tail = 1;
      start.tail_overlap = 0.9;
    }
    start.cache_bytes = cache;
    std::vector<Curve> curves;
    for (auto& [key, group] : groups) {
      CurvePlan plan = plan_of(group, gpu, decode);
      plan.starts = {start};
      plan.grids = head_grids(decode, group.heads, std::get<2>(key));
      plan.coarse = coarse_head_grids(decode);
      if (decode) {
        const bool window = std::get<2>(key) > 0;
        plan.free = decode_free(gpu, window);
        plan.tiles = {{0, 0, 1}, {0, 1, 1}};
        if (window) plan.starts[0].hidden_keys = 64;
      } else {
        plan.tiles = {{64, 0, 1}, {128, 0, 1}, {64, 1, 1}, {128, 1, 1}};
        plan.free = {kLaunch,
                     kFlops,
                     memory_rate(gpu),
                     kOverlap,
                     kWave,
                     {&Coefficients::hidden_keys, 1, 1024},
                     {&Coefficients::spread, 0, 1},
                     {&Coefficients::tail, 0.05, 20},
                     {&Coefficients::tail_overlap, 0, 1},
                     {&Coefficients::ragged, 1, 1.5}};
        if (cache > 0) plan.free.push_back(kCache);
      }
      fit_curve(group.curve, plan, group.samples);
      if (!group.curve.regimes.empty()) curves.push_back(std::move(group.curve));
    }
    add(profile, curves);
  }
}

void fit_latent(Profile& profile, const KernelTable& table, const Gpu& gpu, CurveOp op) {
  const bool sparse = op == CurveOp::dsa_prefill || op == CurveOp::dsa_decode;
  const bool decode = op == CurveOp::mla_decode || op == CurveOp::dsa_decode;
  std::map<Key, Group> groups = groups_of(profile, table, gpu, op, decode);
  std::vector<Curve> curves;
  for (auto& entry : groups) {
    Group& group = entry.second;
    CurvePlan plan = plan_of(group, gpu, decode);
    Coefficients start = start_of(gpu, Dtype::bf16, 40'000);
    plan.free = {kLaunch, kFlops, kBytes, kOverlap};
    if (decode) {
      start.wave_ns = 20'000;
      start.walk_ns = 1;
      plan.free.insert(plan.free.end(), {kWave, kWalk});
    } else if (sparse) {
      // Launched one by one: below a thousand tokens every shape takes the host's millisecond. What the
      // launches take on the GPU is the decode module's, which was replayed as a graph.
      for (const Curve& curve : profile.curves) {
        if (curve.op == CurveOp::dsa_decode && curve.dtype == group.curve.dtype)
          start.launch_ns = curve.regimes[0].launch_ns;
      }
      start.host_ns = 1.2e6;
      start.ragged_host_ns = 3e5;
      plan.free = {kFlops,
                   kBytes,
                   kOverlap,
                   {&Coefficients::host_ns, 1e4, 1e7},
                   {&Coefficients::ragged_host_ns, 1e3, 1e7}};
      plan.floor = [&group](const Coefficients& c, std::size_t i) {
        return module_floor(c, group.weights[i]);
      };
    }
    plan.starts = {start};
    std::vector<double> heads;  // constant beyond those measured
    for (double node = group.curve.range.at("heads").least; node <= group.curve.range.at("heads").most;
         node *= 2) {
      heads.push_back(node);
    }
    plan.grids = {{{{"heads", heads},
                    {"requests", decode ? kRows : kPrompts},
                    {decode ? "context" : "tokens", decode ? kContexts : kLengths}},
                   std::vector<double>(3, kStiff)}};
    plan.coarse = coarse_latent_grids(decode);
    fit_curve(group.curve, plan, group.samples);
    if (!group.curve.regimes.empty()) curves.push_back(std::move(group.curve));
  }
  add(profile, curves);
}

}  // namespace

void fit_attention(Profile& profile, const KernelTable& table, const Gpu& gpu) {
  fit_heads(profile, table, gpu);
  fit_latent(profile, table, gpu, CurveOp::mla_prefill);
  fit_latent(profile, table, gpu, CurveOp::mla_decode);
  fit_latent(profile, table, gpu, CurveOp::dsa_decode);  // prefill takes its launch term
  fit_latent(profile, table, gpu, CurveOp::dsa_prefill);
}

}  // namespace pdsim
