// Writing traces, in one piece or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "traces/trace.hpp"

namespace pdsim {

struct WriteOptions {
  /// Called now and then with requests written so far and in all. It may throw to stop.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

/// Writes the trace in a format of reader.hpp, gzip or zstd when `path` ends in .gz or .zst; "-" is stdout.
/// A file appears under its name when it is complete (written beside it, then renamed), and not at
/// all when anything fails. What was read from mooncake and unchanged is written back byte for byte, if
/// its spacing was that of Python's json.dumps. InputError: an unknown format, a trace that the
/// format cannot express, a path that cannot be written. Memory: 1 MiB.
void write_trace(const Trace& trace, const std::string& path, std::string_view format,
                 const WriteOptions& options = {});

}  // namespace pdsim
