// The lines of a text file, whatever stored it: plain, gzip or zstd, on disk or on stdin.
//
// Traces can be larger than memory, so bytes go through in chunks: read, digested as they are stored,
// decompressed, cut into lines. Invariants
//  1. At most one chunk and the line in hand are in memory.
//  2. A line comes without its ending (LF or CRLF), never blank, and is followed by kLinePadding bytes
//     that may be read (simdjson reads past the end).
//  3. The digest covers every stored byte once next() has returned false.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace pdsim {

inline constexpr std::size_t kLinePadding = 64;

/// Called now and then with stored bytes read so far and in all (0 when unknown). It may throw to stop.
using ByteProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

class LineReader {
 public:
  /// Opens `path` ("-" is stdin). InputError when that cannot be.
  explicit LineReader(const std::string& path, ByteProgress progress = {});
  ~LineReader();

  /// The next line that is not blank; false at the end. It holds until the next call. A byte order mark
  /// at the start is skipped. InputError: read error, corrupt or truncated
  /// compression, a line above 64 MiB, a Git LFS pointer in place of the data.
  bool next(std::string_view& line);

  /// The text from here on, up to `most` bytes of it, without taking it.
  std::string_view head(std::size_t most);
  /// All text from here on, whatever its lines: it must fit in memory. It holds until the next call, padded
  /// as a line is. InputError as next().
  std::string_view rest();

  /// The file as messages name it: its path, or "stdin".
  const std::string& name() const;
  /// "file:line" of the line in hand.
  std::string place() const;
  /// Share of the stored bytes read so far, 0 when unknown.
  double share() const;
  std::string sha256();

 private:
  struct Source;
  bool fill(std::size_t most);
  void refuse_pointer(std::string_view text) const;

  std::unique_ptr<Source> source_;
  std::string text_;  ///< decompressed bytes; [begin_, end_) are not yet cut
  std::size_t begin_ = 0, end_ = 0;
  std::uint64_t line_ = 0;  ///< number of the line in hand, from 1
};

}  // namespace pdsim
