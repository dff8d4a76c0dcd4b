#include "traces/lines.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {

namespace {
constexpr std::size_t kChunk = 256 << 10;
constexpr std::size_t kMaxLine = 64 << 20;
}  // namespace

// Stored bytes in, text out. What the compression is, the first bytes say (RFC 1952, RFC 8878).
struct LineReader::Source {
  std::string name;
  ByteProgress progress;
  int fd = -1;
  std::uint64_t read = 0, total = 0;
  Sha256 digest;

  std::vector<char> raw = std::vector<char>(kChunk);
  std::size_t raw_begin = 0, raw_end = 0;
  bool ended = false;  ///< no stored byte is left to read
  enum { unknown, plain, gzip, zstd } kind = unknown;
  bool inside = false;  ///< within a gzip member or a zstd frame
  z_stream inflater = {};
  ZSTD_DStream* decompressor = nullptr;

  Source(const std::string& path, ByteProgress report)
      : name(path == "-" ? "stdin" : path), progress(std::move(report)) {
    fd = path == "-" ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw InputError(name, fmt::format("cannot be opened: {}", std::strerror(errno)));
    struct stat status = {};
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode))
      total = static_cast<std::uint64_t>(status.st_size);
    if (S_ISDIR(status.st_mode)) {
      close(fd);
      throw InputError(name, "is a directory, expected a file");
    }
  }
  ~Source() {
    if (kind == gzip) inflateEnd(&inflater);
    ZSTD_freeDStream(decompressor);
    if (fd != STDIN_FILENO) close(fd);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // Up to `room` stored bytes to `to`, digested. 0 at the end of the file.
  std::size_t read_some(char* to, std::size_t room) {
    for (;;) {
      if (progress) progress(read, total);
      const ssize_t n = ::read(fd, to, room);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw InputError(name, fmt::format("cannot be read: {}", std::strerror(errno)));
      digest.update({to, static_cast<std::size_t>(n)});
      read += static_cast<std::uint64_t>(n);
      return static_cast<std::size_t>(n);
    }
  }

  void refill() {
    raw_begin = 0;
    raw_end = read_some(raw.data(), raw.size());
    ended = raw_end == 0;
  }

  void recognise() {
    while (raw_end < 4 && !ended) {  // a pipe may give less at a time
      const std::size_t n = read_some(raw.data() + raw_end, raw.size() - raw_end);
      raw_end += n;
      ended = n == 0;
    }
    const std::string_view head(raw.data(), raw_end);
    if (head.starts_with("\x1f\x8b")) {
      kind = gzip;
      PDSIM_CHECK(inflateInit2(&inflater, 16 + MAX_WBITS) == Z_OK, "zlib does not start");
    } else if (head.starts_with("\x28\xb5\x2f\xfd")) {
      kind = zstd;
      decompressor = ZSTD_createDStream();
      PDSIM_CHECK(decompressor != nullptr, "zstd does not start");
    } else {
      kind = plain;
    }
  }

  // At least one byte of text into `to`, or 0 at the end.
  std::size_t text(char* to, std::size_t room, const std::string& place) {
    if (kind == unknown) recognise();
    for (;;) {
      if (kind == plain && raw_begin == raw_end) return ended ? 0 : read_some(to, room);
      if (raw_begin == raw_end && !ended) refill();
      if (raw_begin == raw_end) {
        if (inside) throw InputError(place, "the compressed data ends too early: the file is truncated");
        return 0;
      }
      std::size_t made = 0;
      if (kind == plain) {
        made = std::min(room, raw_end - raw_begin);
        std::memcpy(to, raw.data() + raw_begin, made);
        raw_begin += made;
      } else if (kind == gzip) {
        made = inflate_some(to, room, place);
      } else {
        made = decompress_some(to, room, place);
      }
      if (made > 0) return made;
    }
  }

  std::size_t inflate_some(char* to, std::size_t room, const std::string& place) {
    inflater.next_in = reinterpret_cast<Bytef*>(raw.data() + raw_begin);
    inflater.avail_in = static_cast<uInt>(raw_end - raw_begin);
    inflater.next_out = reinterpret_cast<Bytef*>(to);
    inflater.avail_out = static_cast<uInt>(room);
    inside = true;
    const int status = inflate(&inflater, Z_NO_FLUSH);
    raw_begin = raw_end - inflater.avail_in;
    if (status == Z_STREAM_END) {  // a .gz may have several members
      inflateReset(&inflater);
      inside = false;
    } else if (status != Z_OK && status != Z_BUF_ERROR) {
      throw InputError(place, fmt::format("the gzip data is corrupt: {}",
                                          inflater.msg != nullptr ? inflater.msg : zError(status)));
    }
    return room - inflater.avail_out;
  }

  std::size_t decompress_some(char* to, std::size_t room, const std::string& place) {
    ZSTD_inBuffer in{raw.data(), raw_end, raw_begin};
    ZSTD_outBuffer out{to, room, 0};
    const std::size_t status = ZSTD_decompressStream(decompressor, &out, &in);
    if (ZSTD_isError(status) != 0) {
      throw InputError(place, fmt::format("the zstd data is corrupt: {}", ZSTD_getErrorName(status)));
    }
    raw_begin = in.pos;
    inside = status != 0;
    return out.pos;
  }
};

LineReader::LineReader(const std::string& path, ByteProgress progress)
    : source_(std::make_unique<Source>(path, std::move(progress))) {}
LineReader::~LineReader() = default;

const std::string& LineReader::name() const {
  return source_->name;
}
std::string LineReader::place() const {
  return fmt::format("{}:{}", source_->name, line_);
}
double LineReader::share() const {
  return source_->total == 0 ? 0.0 : static_cast<double>(source_->read) / static_cast<double>(source_->total);
}
std::string LineReader::sha256() {
  return source_->digest.hex();
}

// Moves what is not yet cut, at most `most` bytes, to the front and appends a chunk of text.
bool LineReader::fill(std::size_t most) {
  const std::size_t kept = end_ - begin_;
  if (kept > most) throw InputError(place(), "the line is longer than 64 MiB, expected one request a line");
  if (text_.size() < kept + kChunk + kLinePadding) text_.resize(2 * kept + kChunk + kLinePadding);
  std::memmove(text_.data(), text_.data() + begin_, kept);
  begin_ = 0;
  end_ = kept + source_->text(text_.data() + kept, text_.size() - kLinePadding - kept, place());
  return end_ > kept;
}

void LineReader::refuse_pointer(std::string_view text) const {
  if (text.starts_with("version https://git-lfs.github.com/spec/")) {
    throw InputError(place(), "this is a Git LFS pointer, not the data: 'git lfs pull' fetches it");
  }
}

std::string_view LineReader::head(std::size_t most) {
  while (end_ - begin_ < most && fill(SIZE_MAX)) {
  }
  return std::string_view(text_).substr(begin_, std::min(most, end_ - begin_));
}

std::string_view LineReader::rest() {
  while (fill(SIZE_MAX)) {
  }
  std::string_view text = std::string_view(text_).substr(begin_, end_ - begin_);
  if (line_ == 0) {
    if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
    refuse_pointer(text);
    line_ = 1;
  }
  begin_ = end_;
  return text;
}

bool LineReader::next(std::string_view& line) {
  for (;;) {
    ++line_;
    std::size_t searched = 0, length = 0;
    bool last = false;
    for (;;) {
      const char* from = text_.data() + begin_ + searched;
      const std::size_t left = end_ - begin_ - searched;
      const void* newline = left > 0 ? std::memchr(from, '\n', left) : nullptr;
      if (newline != nullptr) {
        length = static_cast<std::size_t>(static_cast<const char*>(newline) - text_.data()) - begin_;
        break;
      }
      searched = end_ - begin_;
      if (!fill(kMaxLine)) {
        length = end_ - begin_;
        last = true;
        break;
      }
    }
    if (last && length == 0) return false;
    line = std::string_view(text_).substr(begin_, length);
    begin_ += last ? length : length + 1;
    if (line_ == 1) {
      if (line.starts_with("\xef\xbb\xbf")) line.remove_prefix(3);
      refuse_pointer(line);
    }
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t\r\v\f") != std::string_view::npos) return true;
  }
}

}  // namespace pdsim
