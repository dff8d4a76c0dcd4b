#include "traces/reshape.hpp"

#include <fmt/format.h>

#include <cmath>

#include "sim/core/error.hpp"

namespace pdsim {

Nanos span_of(const Trace& trace) {
  return trace.requests.empty() ? 0 : trace.requests.back().arrival - trace.requests.front().arrival;
}

double rate_of(const Trace& trace) {
  const Nanos span = span_of(trace);
  return span == 0 ? 0.0 : static_cast<double>(trace.requests.size() - 1) / to_seconds(span);
}

void scale_time(Trace& trace, double factor) {
  if (factor == 1.0) return;
  const auto scaled = [&](Nanos time) {
    const double ns = std::floor(static_cast<double>(time) / factor + 0.5);
    if (!(ns < 0x1p62)) {
      throw InputError(trace.name, fmt::format("time scale {}: {} ns would pass 2^62 ns", factor, time));
    }
    return static_cast<Nanos>(ns);
  };
  for (Request& request : trace.requests) {
    request.arrival = scaled(request.arrival);
    if (request.think_time >= 0) request.think_time = scaled(request.think_time);
  }
}

}  // namespace pdsim
