// Reading traces: any format by its name, any size, never guessing.
//
// What every format has in common is here: compression, digest, order of arrival, what is refused. A
// format is one row of kTraceFormats: a function that turns lines into requests and one that writes
// them back. The unit of time comes from the format.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/lines.hpp"
#include "traces/trace.hpp"

namespace pdsim {

struct ReadOptions {
  ByteProgress progress;
  std::uint64_t seed = 1;  ///< of arrivals that the client drew and the file does not have
};

struct TraceFormat {
  std::string_view name;
  /// Appends the rows to trace.requests, hash_ids and sessions, in the order of the file.
  void (*read)(LineReader&, Trace&, const ReadOptions&);
  /// One row, its line ending included, appended to `text`; index == -1 is the header, if there is one.
  /// InputError where the format is not written.
  void (*write)(const Trace&, std::ptrdiff_t index, std::string& text);
  /// What the format cannot hold of this trace, for the user to read.
  std::vector<std::string> (*losses)(const Trace&);
  std::string_view sentence;
};

std::span<const TraceFormat> trace_formats();

/// InputError(place) that lists the known names.
const TraceFormat& find_trace_format(std::string_view name, std::string_view place);

/// Reads the trace at `path` ("-" is stdin; .gz and .zst as they are, whatever the name). Requests come by
/// (arrival, row); those of a session have turns 0, 1, ... in that order. O(bytes), plus a stable sort
/// when rows are out of order; memory is that of the Trace plus one chunk.
/// InputError "file:line": what is not as the format says, a Git LFS pointer, an empty trace.
Trace read_trace(const std::string& path, std::string_view format, const ReadOptions& options = {});

/// One line: requests, span, rate, tokens, and the rows read, used, set aside and sorted.
std::string load_summary(const Trace& trace);

}  // namespace pdsim
