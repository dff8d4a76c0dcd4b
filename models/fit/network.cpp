// The fit of fit_network.hpp: posting by two-parameter least squares, latency by the least, curves by
// pooling.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

#include "models/fit_network.hpp"
#include "sim/core/error.hpp"

namespace pdsim {

namespace {

constexpr double kNoWait = 1.25;     ///< round trips: who waits no longer had posted last what arrived last
constexpr double kLeastWire = 0.25;  ///< of an iteration: where less is the link's, noise would decide
constexpr double kRising = 0.75;     ///< of the last rate: a first rate below it is bound by operations
constexpr int kTurns = 4;  ///< of curve and round trip; the second already changes nothing that is printed
constexpr double kSpread = 2;                 ///< descriptor counts that far apart tell a slope
constexpr Bytes kSmall = 4096;                ///< a message whose bytes take no time beside its latency
constexpr Bytes kStreaming = Bytes{1} << 20;  ///< a message that NCCL cuts into many operations

/// Six significant digits: a shorter file, the same on every machine.
double rounded(double value) {
  return std::strtod(fmt::format("{:.6g}", value).c_str(), nullptr);
}

std::string percent(double share) {
  return fmt::format("{:.1f} %", 100 * share);
}

/// "median 0.3 %, worst 1.2 %" of |errors|.
std::string errors_text(std::vector<double> errors) {
  for (double& e : errors) e = std::abs(e);
  std::ranges::sort(errors);
  const std::size_t n = errors.size();
  return fmt::format("median {}, worst {}", percent((errors[(n - 1) / 2] + errors[n / 2]) / 2),
                     percent(errors.back()));
}

// ------------------------------------------------------------------------------------------------- posting

struct PostPoint {
  double descriptors, us, weight;
};

struct PostFit {
  double fixed_us = 0, each_us = 0;
  bool sloped = false;  ///< counts of descriptors lay far enough apart to tell both
  std::string text;
};

/// Least squares of (fixed + each x descriptors) / us - 1, neither below 0. None where times do not grow with
/// descriptors. With counts that are all alike the fixed part is `assumed_us`, and none where that leaves
/// nothing.
std::optional<PostFit> fit_posting(const std::vector<PostPoint>& points, double assumed_us,
                                   std::string_view what) {
  if (points.empty()) return std::nullopt;
  const auto [least, most] = std::ranges::minmax(points, {}, &PostPoint::descriptors);
  PostFit fit;
  fit.sloped = most.descriptors >= kSpread * least.descriptors;
  double a11 = 0, a12 = 0, a22 = 0, b1 = 0, b2 = 0;
  for (const auto& [descriptors, us, weight] : points) {
    const double x1 = 1 / us, x2 = descriptors / us;
    a11 += weight * x1 * x1;
    a12 += weight * x1 * x2;
    a22 += weight * x2 * x2;
    b1 += weight * x1;
    b2 += weight * x2;
  }
  if (fit.sloped) {
    const double determinant = a11 * a22 - a12 * a12;
    fit.fixed_us = (b1 * a22 - b2 * a12) / determinant;
    if (fit.fixed_us < 0) fit.fixed_us = 0;
  } else {
    fit.fixed_us = assumed_us;
  }
  fit.each_us = (b2 - fit.fixed_us * a12) / a22;
  if (!(fit.each_us > 0)) return std::nullopt;
  std::vector<double> errors;
  for (const PostPoint& p : points) {
    errors.push_back((fit.fixed_us + fit.each_us * p.descriptors) / p.us - 1);
  }
  fit.text = fmt::format("{}: {} points, {:.4g} to {:.4g} descriptors; error {}", what, points.size(),
                         least.descriptors, most.descriptors, errors_text(std::move(errors)));
  if (!fit.sloped) {
    fit.text +=
        fmt::format("; counts too alike to tell the fixed part, which is pdsim's {:.4g} us", assumed_us);
  }
  return fit;
}

struct Posting {
  std::optional<PostFit> best, bench;
};

Posting fit_postings(const NetworkMeasurements& m, const NetworkFitOptions& options) {
  std::vector<PostPoint> engine, bench;
  for (const TransferRow& r : m.transfers) engine.push_back({r.descriptors, r.post_us, r.transfers});
  for (const BenchRow& r : m.bench) {
    if (r.post_us > 0 && r.threads == 1) bench.push_back({static_cast<double>(r.batch), r.post_us, 1});
  }
  const double assumed = static_cast<double>(options.shipped_posting.fixed) / 1e3;
  const std::optional<PostFit> of_engine = fit_posting(engine, assumed, "vLLM");
  Posting out;
  out.bench = fit_posting(bench, assumed, "nixlbench");
  out.best = of_engine;
  if (!of_engine || (!of_engine->sloped && out.bench && out.bench->sloped)) {
    out.best = out.bench;
  } else if (out.bench && out.bench->sloped) {
    out.best->text += fmt::format("; nixlbench says {:.4g} us + {:.4g} us a descriptor", out.bench->fixed_us,
                                  out.bench->each_us);
  }
  return out;
}

// ---------------------------------------------------------------------------------------------------- link

/// The row that waits least for a single small operation, to the operation's end and back; null when none
/// tells.
const BenchRow* single_operation(const NetworkMeasurements& m, bool read) {
  const BenchRow* shortest = nullptr;
  for (const BenchRow& r : m.bench) {
    const bool tells = r.link && r.read == read && r.batch == 1 && r.bytes <= kSmall && r.post_us >= 0;
    if (!tells || !(r.wait_us() > 0)) continue;
    if (shortest == nullptr || r.wait_us() < shortest->wait_us()) shortest = &r;
  }
  return shortest;
}

/// A row that the link bound: what rate it shows.
struct Sample {
  Bytes bytes;      ///< on the wire
  Bytes in_flight;  ///< posted at once
  double rate;
};

struct Samples {
  std::vector<Sample> rows;               ///< by size, the most in flight first
  std::int64_t posting = 0, latency = 0;  ///< rows that something else bound
};

Samples link_bound(const NetworkMeasurements& m, const NetworkFitOptions& options, const PostFit& posting,
                   bool read, double trip_us) {
  Samples out;
  for (const BenchRow& r : m.bench) {
    if (!r.link || r.read != read) continue;
    const bool posts = r.post_us >= 0;
    const double wire_us = r.iteration_us - trip_us - (posts ? posting.fixed_us : 0);
    if (posts && r.wait_us() <= kNoWait * trip_us) {
      ++out.posting;
    } else if (wire_us < kLeastWire * r.iteration_us) {
      ++out.latency;
    } else {
      out.rows.push_back({options.wire_bytes(r.bytes), r.bytes * r.batch * r.threads,
                          std::min(options.line, r.rate * r.iteration_us / wire_us)});
    }
  }
  std::ranges::stable_sort(out.rows, [](const Sample& a, const Sample& b) {
    return std::pair(a.bytes, -a.in_flight) < std::pair(b.bytes, -b.in_flight);
  });
  return out;
}

/// The nearest sequence that does not fall, in least squares: neighbours that fall are pooled at their mean.
std::vector<RatePoint> not_falling(const std::vector<RatePoint>& points) {
  struct Pool {
    double sum;
    std::size_t count;
    double mean() const { return sum / static_cast<double>(count); }
  };
  std::vector<Pool> pools;
  for (const RatePoint& point : points) {
    pools.push_back({point.rate, 1});
    while (pools.size() > 1 && pools[pools.size() - 2].mean() > pools.back().mean()) {
      const Pool last = pools.back();
      pools.pop_back();
      pools.back() = {pools.back().sum + last.sum, pools.back().count + last.count};
    }
  }
  std::vector<RatePoint> curve;
  for (const Pool& pool : pools) {
    for (std::size_t i = 0; i < pool.count; ++i)
      curve.push_back({points[curve.size()].bytes, rounded(pool.mean())});
  }
  return curve;
}

std::vector<RatePoint> curve_through(const std::vector<Sample>& samples) {
  std::vector<RatePoint> points;
  for (std::size_t i = 0; i < samples.size();) {
    const Sample& first = samples[i];
    double sum = 0;
    std::size_t fullest = 0;
    for (; i < samples.size() && samples[i].bytes == first.bytes; ++i) {
      if (samples[i].in_flight != first.in_flight) continue;
      sum += samples[i].rate;
      ++fullest;
    }
    points.push_back({first.bytes, sum / static_cast<double>(fullest)});
  }
  return not_falling(points);
}

/// Fits the curve of one operation. Returns the round trip that its rows tell, in us; 0 = none. What is
/// waited for a single operation is the round trip and what its bytes take longer than its posting: the curve
/// decides that, and the round trip the curve, so they are found in turn, which settles at once.
double fit_bench_curve(NetworkMeasurements& m, const NetworkFitOptions& options, const PostFit& posting,
                       bool read, NetworkProfile& profile) {
  const std::string key = read ? "read" : "write";
  const BenchRow* single = single_operation(m, read);
  const Nanos one_way = profile.latency > 0 ? profile.latency : options.shipped_latency;
  double trip_us = single != nullptr ? single->wait_us() : 2 * static_cast<double>(one_way) / 1e3;
  Samples samples;
  std::vector<RatePoint>& curve = read ? profile.read : profile.write;
  for (int i = 0; i < kTurns; ++i) {
    samples = link_bound(m, options, posting, read, trip_us);
    curve = curve_through(samples.rows);
    if (single == nullptr || curve.empty()) break;
    const Bytes size = options.wire_bytes(single->bytes);
    if (curve.front().bytes > size) break;  // posting takes longer there
    const auto at = std::ranges::find(curve, size, &RatePoint::bytes);
    if (at == curve.end()) break;
    const double beyond_us = static_cast<double>(size) / (at->rate * 1e3) - posting.each_us;
    trip_us = single->wait_us() - std::clamp(beyond_us, 0.0, single->wait_us() / 2);
  }
  if (samples.posting > 0) {
    m.set_aside["nixlbench: bound by posting or by the round trip, the link is no slower"] += samples.posting;
  }
  if (samples.latency > 0) m.set_aside["nixlbench: too little in flight, mostly latency"] += samples.latency;
  const auto mine = [&](const BenchRow& r) { return r.link && r.read == read; };
  const auto rows = std::ranges::count_if(m.bench, mine);
  const auto blind =
      std::ranges::count_if(m.bench, [&](const BenchRow& r) { return mine(r) && r.post_us < 0; });
  if (curve.empty()) {
    profile.not_told[key] = rows == 0
                                ? fmt::format("no {} between GPUs was measured", read ? "READ" : "WRITE")
                                : fmt::format("none of {} rows is bound by the link", rows);
    return single != nullptr ? trip_us : 0;
  }
  std::vector<double> errors;
  for (const Sample& s : samples.rows) {
    const auto at = std::ranges::find(curve, s.bytes, &RatePoint::bytes);
    errors.push_back(at->rate / s.rate - 1);
  }
  profile.evidence[key] = fmt::format(
      "nixlbench: {} of {} rows, {} sizes on the wire; error {}; {:.4g} us of round trip{} taken off",
      samples.rows.size(), rows, curve.size(), errors_text(std::move(errors)), trip_us,
      single != nullptr ? "" : " (no row of a single operation tells it)");
  if (blind > 0) {
    profile.evidence[key] += fmt::format("; {} rows print no Avg Post: posting may have bound them", blind);
  }
  return single != nullptr ? trip_us : 0;
}

// ------------------------------------------------------------------------------------------------- latency

void fit_pings(const NetworkMeasurements& m, NetworkProfile& profile) {
  const PingRow* best = nullptr;
  int small = 0;
  for (const PingRow& r : m.pings) {
    if (r.bytes > kSmall) continue;
    ++small;
    if (best == nullptr || r.us < best->us) best = &r;
  }
  if (best == nullptr) return;
  profile.latency = std::llround(best->us * 1e3);
  profile.evidence["latency_us"] = fmt::format(
      "fi_pingpong: {:.4g} us at {} B, the least of {} rows up to 4 KiB", best->us, best->bytes, small);
}

/// Where fi_pingpong tells none: half of the shorter round trip that nixlbench saw.
void fit_round_trips(const std::vector<double>& trips_us, NetworkProfile& profile) {
  double trip_us = 0;
  for (const double us : trips_us) {
    if (us > 0 && (trip_us == 0 || us < trip_us)) trip_us = us;
  }
  if (profile.latency > 0) {
    if (trip_us > 0)
      profile.evidence["latency_us"] += fmt::format("; nixlbench's round trip is {:.4g} us", trip_us);
  } else if (trip_us > 0) {
    profile.latency = std::llround(trip_us * 1e3 / 2);
    profile.evidence["latency_us"] =
        fmt::format("nixlbench: half of the {:.4g} us that a single operation is waited for", trip_us);
  } else {
    profile.not_told["latency_us"] =
        "no fi_pingpong row up to 4 KiB, and no nixlbench row of one such operation with its Avg Tx";
  }
}

/// sendrecv_perf: t = latency of NCCL + size / rate, over messages large enough to stream.
void fit_sends(const NetworkMeasurements& m, const NetworkFitOptions& options, NetworkProfile& profile) {
  double a11 = 0, a12 = 0, a22 = 0, b1 = 0, b2 = 0;
  std::vector<const SendRow*> rows;
  Bytes least = std::numeric_limits<Bytes>::max(), most = 0;
  for (const SendRow& r : m.sends) {
    if (r.bytes < kStreaming) continue;
    rows.push_back(&r);
    least = std::min(least, r.bytes);
    most = std::max(most, r.bytes);
    const double x1 = 1 / r.us, x2 = static_cast<double>(r.bytes) / r.us;
    a11 += x1 * x1;
    a12 += x1 * x2;
    a22 += x2 * x2;
    b1 += x1;
    b2 += x2;
  }
  if (rows.empty()) return;
  double fixed_us = most > least ? std::max(0.0, (b1 * a22 - b2 * a12) / (a11 * a22 - a12 * a12)) : 0;
  double us_per_byte = (b2 - fixed_us * a12) / a22;
  if (!(us_per_byte > 0)) return;
  const double rate = std::min(options.line, 1 / (us_per_byte * 1e3));
  if (!profile.write.empty()) {
    profile.evidence["write"] += fmt::format("; NCCL streams {:.4g} GB/s", rate);
    return;
  }
  std::vector<double> errors;
  for (const SendRow* r : rows)
    errors.push_back((fixed_us + us_per_byte * static_cast<double>(r->bytes)) / r->us - 1);
  // NCCL cuts messages by itself: what it reaches is a plateau, whose place 1 MiB is as for pdsim's own
  // curves.
  profile.write = {{kStreaming, rounded(rate)}};
  profile.not_told.erase("write");
  profile.evidence["write"] = fmt::format("sendrecv_perf: the plateau alone, of {} sizes from {} B; error {}",
                                          rows.size(), least, errors_text(std::move(errors)));
}

void fit_operations(NetworkProfile& profile) {
  for (const std::vector<RatePoint>* curve : {&profile.write, &profile.read}) {
    if (curve->empty() || curve->front().rate >= kRising * curve->back().rate) continue;
    const double here = curve->front().rate / static_cast<double>(curve->front().bytes);
    if (here <= profile.operations) continue;
    profile.operations = rounded(here * 1e9) / 1e9;
    profile.evidence["operations_per_s"] =
        fmt::format("{}: {:.4g} GB/s at {} B, the smallest size that the link bound",
                    curve == &profile.write ? "WRITE" : "READ", curve->front().rate, curve->front().bytes);
  }
  if (profile.operations == 0) {
    profile.not_told["operations_per_s"] = "no curve reaches down to sizes where operations bind";
  }
}

}  // namespace

NetworkProfile fit_network(NetworkMeasurements& m, const NetworkFitOptions& options) {
  NetworkProfile profile;
  profile.line = options.line;
  fit_pings(m, profile);
  const Posting posting = fit_postings(m, options);
  if (posting.best) {
    profile.posting = {options.shipped_posting.backend, std::llround(posting.best->fixed_us * 1e3),
                       std::llround(posting.best->each_us * 1e3)};
    profile.evidence["posting"] = posting.best->text;
  } else {
    const bool any = !m.transfers.empty() || std::ranges::any_of(m.bench, [](const BenchRow& r) {
      return r.post_us > 0 && r.threads == 1;
    });
    profile.not_told["posting"] = any ? "post times do not grow with descriptors"
                                      : "no post time of vLLM or of nixlbench with one thread";
  }
  const PostFit bench_posting = posting.bench.value_or(PostFit{});
  std::vector<double> trips_us;
  for (const bool read : {false, true}) {
    trips_us.push_back(fit_bench_curve(m, options, bench_posting, read, profile));
  }
  fit_round_trips(trips_us, profile);
  fit_sends(m, options, profile);
  if (!profile.write.empty() || !profile.read.empty()) {
    fit_operations(profile);
  } else {
    profile.line = 0;
    profile.not_told["operations_per_s"] = "no curve";
  }
  if (profile.evidence.empty()) {
    throw InputError(
        "the files",
        fmt::format("tell nothing of the network ({}; {}; {}), expected rows that do",
                    profile.not_told["write"], profile.not_told["latency_us"], profile.not_told["posting"]));
  }
  return profile;
}

}  // namespace pdsim
