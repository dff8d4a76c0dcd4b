// Copies of KV: a curve for each kind, by the formula of models/copy.hpp. Lengths of runs are held out in
// turn, a fifth at a time; the curve is then fitted to all.
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "models/copy.hpp"
#include "models/fit/fits.hpp"

namespace pdsim {
namespace {

// The least squares know Coefficients: launch_ns, bytes_per_ns and overlap are the copy's own; a run is
// counted where attention counts a key, a multiprocessor's rate where it counts the cache's.
CopyCurve curve_of(const Coefficients& c) {
  CopyCurve curve;
  curve.launch_ns = rounded(c.launch_ns);
  curve.run_ns = rounded(c.walk_ns);
  curve.bytes_per_ns = rounded(c.bytes_per_ns);
  curve.sm_bytes_per_ns = rounded(c.cache_bytes_per_ns);
  curve.overlap = rounded(c.overlap);
  return curve;
}

void widen(std::map<std::string, Range>& range, const char* axis, double value) {
  const auto [found, fresh] = range.try_emplace(axis, Range{value, value});
  if (fresh) return;
  found->second.least = std::min(found->second.least, value);
  found->second.most = std::max(found->second.most, value);
}

/// Least squares from two starts: costs of a run and of its bytes one after the other, or side by side.
Coefficients fit(const std::vector<CopyShape>& shapes, const std::vector<Sample>& samples,
                 const std::vector<std::size_t>& rows) {
  bool multiprocessors = false;
  double fastest = 0;
  for (const std::size_t i : rows) {
    multiprocessors = multiprocessors || shapes[i].sms > 0;
    fastest = std::max(fastest, shapes[i].bytes() / samples[i].ns);
  }
  std::vector<Free> free = {{&Coefficients::launch_ns, 100, 1e6},
                            {&Coefficients::walk_ns, 1e-2, 1e6},
                            {&Coefficients::bytes_per_ns, 0.1, 1e5},
                            kOverlap};
  if (multiprocessors) free.push_back({&Coefficients::cache_bytes_per_ns, 0.1, 1e4});
  Coefficients best;
  double least = HUGE_VAL;
  for (const double overlap : {0.1, 0.9}) {
    Coefficients c;
    c.launch_ns = 5000;
    c.walk_ns = 100;
    c.bytes_per_ns = fastest;
    c.cache_bytes_per_ns = multiprocessors ? 30 : 0;
    c.overlap = overlap;
    const double cost = minimise(c, free, rows, samples, [&](const Coefficients& at, std::size_t i) {
      CopyCurve trial;
      trial.launch_ns = at.launch_ns;
      trial.run_ns = at.walk_ns;
      trial.bytes_per_ns = at.bytes_per_ns;
      trial.sm_bytes_per_ns = at.cache_bytes_per_ns;
      trial.overlap = at.overlap;
      return copy_time(trial, shapes[i]).ns;
    });
    if (cost >= least) continue;
    least = cost;
    best = c;
  }
  return best;
}

}  // namespace

void fit_copies(Profile& profile, const KernelTable& table) {
  struct Group {
    std::vector<CopyShape> shapes;
    std::vector<Sample> samples;
    std::map<std::string, Range> range;
  };
  std::map<std::string, Group> groups;
  for (const CopyRow& row : table.copies) {
    Group& group = groups[table.kernels[row.kind]];
    group.shapes.push_back(row.shape);
    group.samples.push_back({row.ns, hash_of({row.shape.run_bytes}), 0});
    widen(group.range, "run_bytes", row.shape.run_bytes);
    widen(group.range, "runs", row.shape.runs);
    widen(group.range, "sms", row.shape.sms);
  }
  constexpr std::size_t kLeast = 5, kFolds = 5;  // as many rows as coefficients
  for (const auto& [kind, group] : groups) {
    if (group.shapes.size() < kLeast) continue;
    std::map<std::uint64_t, std::size_t> fold;
    for (const Sample& sample : group.samples) fold[sample.group] = 0;
    std::size_t next = 0;
    for (auto& entry : fold) entry.second = next++ % kFolds;
    std::vector<std::size_t> all;
    std::vector<double> errors;
    for (std::size_t f = 0; f < std::min(kFolds, fold.size()); ++f) {
      std::vector<std::size_t> rest, held;
      for (std::size_t i = 0; i < group.samples.size(); ++i) {
        (fold[group.samples[i].group] == f ? held : rest).push_back(i);
      }
      all.insert(all.end(), held.begin(), held.end());
      if (rest.size() < kLeast) continue;
      const CopyCurve curve = curve_of(fit(group.shapes, group.samples, rest));
      for (const std::size_t i : held) {
        errors.push_back(copy_time(curve, group.shapes[i]).ns / group.samples[i].ns - 1);
      }
    }
    std::sort(all.begin(), all.end());
    CopyCurve curve = curve_of(fit(group.shapes, group.samples, all));
    curve.kind = kind;
    curve.rows = static_cast<std::int64_t>(group.samples.size());
    curve.range = group.range;
    curve.error = accuracy_of(std::move(errors));
    profile.copies.push_back(std::move(curve));
  }
}

}  // namespace pdsim
