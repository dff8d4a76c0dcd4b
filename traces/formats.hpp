// What the formats implement and share. Not for users of traces: include reader.hpp or writer.hpp.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "sim/core/random.hpp"
#include "traces/lines.hpp"
#include "traces/reader.hpp"
#include "traces/trace.hpp"

namespace pdsim {

void read_mooncake(LineReader& lines, Trace& trace, const ReadOptions& options);
void write_mooncake(const Trace& trace, std::ptrdiff_t index, std::string& text);
std::vector<std::string> mooncake_losses(const Trace& trace);

void read_azure(LineReader& lines, Trace& trace, const ReadOptions& options);
void write_azure(const Trace& trace, std::ptrdiff_t index, std::string& text);
std::vector<std::string> azure_losses(const Trace& trace);

void read_vllm_bench(LineReader& lines, Trace& trace, const ReadOptions& options);
void read_aiperf(LineReader& lines, Trace& trace, const ReadOptions& options);

/// What all formats have in common once their rows are read: stable order by arrival, turns, counts. Rows
/// that the format has set aside are counted in rows_read already.
void finish_trace(Trace& trace);

/// Gamma of this shape with mean 1 (Marsaglia and Tsang, ACM TOMS 26, 2000; below shape 1 by the power of a
/// uniform).
double unit_gamma(Random& random, double shape);

/// push_back that grows to what the file will need, judged by the share read so far, so that the arrays
/// end near their size instead of near twice it.
template <typename T>
void append(std::vector<T>& array, T value, const LineReader& lines) {
  if (array.size() == array.capacity()) {
    const auto size = static_cast<double>(array.size());
    const double growth = lines.share() > 0.01 ? std::max(1.02 / lines.share(), 1.02) : 2.0;
    array.reserve(1024 + static_cast<std::size_t>(growth * size));
  }
  array.push_back(value);
}

}  // namespace pdsim
