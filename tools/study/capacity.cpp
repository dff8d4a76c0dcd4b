#include "tools/study/capacity.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "sim/core/histogram.hpp"
#include "sim/core/math.hpp"
#include "traces/reshape.hpp"

namespace pdsim {

namespace {

constexpr double kLag = 0.1;       // chosen: an overload of a tenth, which no SLO may hide
constexpr double kDeviations = 2;  // of a Poisson count, for short traces

bool is_ttft(const Bound& bound) {
  return bound.metric == "ttft_ms";
}

// Positive for certain: what the request has, or at least has to expect, if it is served. Negative: nothing.
double least(const RequestRecord& r, const Bound& bound, Nanos now, bool first_tokens_stand) {
  if (is_ttft(bound)) {
    if (r.first_token >= 0) return to_ms(r.first_token - r.arrival);
    return r.end < 0 && r.output_tokens > 0 ? to_ms(now - r.arrival) : -1;
  }
  if (!r.has_tpot()) return -1;
  if (r.end >= 0) return to_ms(r.tpot());
  return first_tokens_stand ? to_ms((now - r.first_token) / (r.output_tokens - 1)) : -1;
}

bool came(const RequestRecord& r) {
  return r.prompt_tokens > 0;
}

}  // namespace

std::vector<Bound> bounds_of(const Slo& slo) {
  std::vector<Bound> bounds;
  for (const auto& [metric, percentiles] : slo) {
    for (const auto& [percentile, ms] : percentiles) {
      bounds.push_back({metric, percentile, std::stod(percentile.substr(1)) / 100, ms});
    }
  }
  return bounds;
}

bool hopeless(const HopelessIf& rule, Nanos now, std::span<const RequestRecord> requests) {
  for (const RequestRecord& r : requests) {
    if (came(r) && r.end >= 0 && r.status != RequestStatus::completed) return true;
  }
  if (!rule.slo || requests.empty()) return false;
  // numpy's percentile lies at position q (n - 1) of the sorted values: when that many or fewer are within
  // the bound, it is above. The more values there are in the end, the more must be above: n is the most.
  const auto n = requests.size();
  for (const Bound& bound : rule.bounds) {
    const auto position = static_cast<std::size_t>(bound.q * static_cast<double>(n - 1));
    std::size_t above = 0;
    for (const RequestRecord& r : requests) {
      if (r.counted && least(r, bound, now, rule.first_tokens_stand) > bound.ms) ++above;
    }
    if (above >= n - position) return true;
  }
  return false;
}

Reached judge_run(std::span<const Bound> bounds, const RunResult& run) {
  Reached reached;
  const auto fail = [&](LoadVerdict outcome) {
    if (reached.kept_up()) reached.verdict = outcome;
  };
  if (run.status == RunStatus::interrupted) fail(LoadVerdict::interrupted);
  if (run.status == RunStatus::abandoned) fail(LoadVerdict::abandoned);
  if (run.status == RunStatus::stalled) fail(LoadVerdict::stalled);
  if (!reached.kept_up()) return reached;

  Nanos last = 0;
  for (const RequestRecord& r : run.requests) {
    if (r.status != RequestStatus::completed) fail(LoadVerdict::unserved);
    last = std::max(last, r.arrival);
  }
  for (const Bound& bound : bounds) {
    std::vector<double> values;
    for (const RequestRecord& r : run.requests) {
      if (!r.counted || r.status != RequestStatus::completed) continue;
      const double value = least(r, bound, r.end, true);
      if (value >= 0) values.push_back(value);
    }
    std::ranges::sort(values);
    reached.ms.push_back(values.empty() ? -1 : quantile_sorted(values, bound.q));
    if (reached.ms.back() > bound.ms) fail(LoadVerdict::slo);
  }
  double arrived = 0, ended = 0;
  for (const RequestRecord& r : run.requests) {
    arrived += 2 * r.arrival > last ? 1 : 0;
    ended += 2 * r.end > last && r.end <= last ? 1 : 0;
  }
  reached.ended = arrived > 0 ? ended / arrived : 1;
  if (arrived - ended > std::max(kLag * arrived, kDeviations * math::sqrt(arrived)))
    fail(LoadVerdict::saturated);
  return reached;
}

double rate_at(double anchor, int step) {
  return anchor * math::pow(kGridStep, step);
}

std::optional<int> highest_step(const std::function<bool(int)>& keeps_up, int start,
                                std::optional<int> floor) {
  constexpr int kFirst = 4;  // chosen: a start is within a tenth often enough
  int low = 0, high = 0;
  if (floor || keeps_up(start)) {
    low = floor.value_or(start);
    for (int stride = kFirst;; stride *= 2) {
      high = std::min(low + stride, kHighestStep + 1);
      if (high > kHighestStep || !keeps_up(high)) break;
      low = high;
    }
  } else {
    high = start;
    for (int stride = kFirst;; stride *= 2) {
      if (high == kLowestStep) return std::nullopt;
      low = std::max(high - stride, kLowestStep);
      if (keeps_up(low)) break;
      high = low;
    }
  }
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (keeps_up(middle) ? low : high) = middle;
  }
  // low + 1 does not keep up, or is beyond the grid.
  for (int step = low + 2; step <= std::min(low + kInARow, kHighestStep); ++step) {
    if (keeps_up(step)) low = step;
  }
  return low;
}

Trace at_pace(const Trace& trace, double factor) {
  Trace paced = trace;
  scale_time(paced, factor);
  return paced;
}

}  // namespace pdsim
