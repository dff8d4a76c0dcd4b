#include "traces/writer.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "sim/core/error.hpp"
#include "traces/reader.hpp"

namespace pdsim {

namespace {

constexpr std::size_t kChunk = 256 << 10;

// Bytes to a file that appears when commit() is called; without it nothing is left behind.
class Sink {
 public:
  explicit Sink(const std::string& path) : path_(path) {
    if (path == "-") {
      path_ = "stdout";
      fd_ = STDOUT_FILENO;
      return;
    }
    // A name that is no regular file (a pipe, /dev/null) is written to, never replaced. What a symbolic
    // link points at is replaced, not the link.
    struct stat status = {};
    const bool exists = stat(path.c_str(), &status) == 0;
    if (exists && S_ISREG(status.st_mode)) path_ = std::filesystem::canonical(path).string();
    const bool direct = exists && !S_ISREG(status.st_mode);
    if (!direct) temporary_ = fmt::format("{}.part-{}", path_, getpid());
    fd_ = direct ? open(path.c_str(), O_WRONLY | O_CLOEXEC)
                 : open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) {
      const int error = errno;
      temporary_.clear();
      refuse(error);
    }
  }
  ~Sink() {
    if (fd_ > STDOUT_FILENO) close(fd_);
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;

  void write(const char* bytes, std::size_t n) {
    if (fd_ == STDOUT_FILENO) {  // through stdio, like all results
      if (std::fwrite(bytes, 1, n, stdout) < n)
        throw std::system_error(errno, std::generic_category(), path_);
      return;
    }
    while (n > 0) {
      const ssize_t written = ::write(fd_, bytes, n);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse(errno);
      bytes += written;
      n -= static_cast<std::size_t>(written);
    }
  }

  void commit() {
    if (temporary_.empty()) return;
    const int fd = fd_;
    fd_ = -1;
    if (close(fd) != 0 || rename(temporary_.c_str(), path_.c_str()) != 0) refuse(errno);
    temporary_.clear();
  }

 private:
  [[noreturn]] void refuse(int error) const {
    throw InputError(path_, fmt::format("cannot be written: {}", std::strerror(error)));
  }

  std::string path_, temporary_;
  int fd_ = -1;
};

// Text through the compressor that the name asks for, and on to the sink.
class Compressor {
 public:
  Compressor(Sink& sink, const std::string& path) : sink_(sink), out_(kChunk) {
    if (path.ends_with(".gz")) {
      // 16: a gzip header, with no time in it, so that equal traces are equal files.
      PDSIM_CHECK(deflateInit2(&gzip_, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK,
                  "zlib does not start");
      kind_ = gzip;
    } else if (path.ends_with(".zst")) {
      zstd_ = ZSTD_createCStream();
      PDSIM_CHECK(zstd_ != nullptr, "zstd does not start");
      kind_ = zstd;
    }
  }
  ~Compressor() {
    if (kind_ == gzip) deflateEnd(&gzip_);
    ZSTD_freeCStream(zstd_);
  }
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  void write(std::string& text, bool last) {
    if (kind_ == plain) {
      sink_.write(text.data(), text.size());
    } else if (kind_ == gzip) {
      gzip_.next_in = reinterpret_cast<Bytef*>(text.data());
      gzip_.avail_in = static_cast<uInt>(text.size());
      int status = Z_OK;
      do {
        gzip_.next_out = reinterpret_cast<Bytef*>(out_.data());
        gzip_.avail_out = static_cast<uInt>(out_.size());
        status = deflate(&gzip_, last ? Z_FINISH : Z_NO_FLUSH);
        sink_.write(out_.data(), out_.size() - gzip_.avail_out);
      } while (last ? status != Z_STREAM_END : gzip_.avail_out == 0);
    } else {
      ZSTD_inBuffer in{text.data(), text.size(), 0};
      std::size_t left = 0;
      do {
        ZSTD_outBuffer out{out_.data(), out_.size(), 0};
        left = ZSTD_compressStream2(zstd_, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
        PDSIM_CHECK(ZSTD_isError(left) == 0, "zstd does not compress");
        sink_.write(out_.data(), out.pos);
      } while (last ? left != 0 : in.pos < in.size);
    }
    text.clear();
  }

 private:
  Sink& sink_;
  std::vector<char> out_;
  enum { plain, gzip, zstd } kind_ = plain;
  z_stream gzip_ = {};
  ZSTD_CStream* zstd_ = nullptr;
};

}  // namespace

void write_trace(const Trace& trace, const std::string& path, std::string_view format_name,
                 const WriteOptions& options) {
  const TraceFormat& format = find_trace_format(format_name, path == "-" ? "stdout" : path);
  std::string text;
  format.write(trace, -1, text);  // refuses before anything is created
  Sink sink(path);
  Compressor compressor(sink, path);
  const auto total = static_cast<std::ptrdiff_t>(trace.requests.size());
  for (std::ptrdiff_t i = 0; i < total; ++i) {
    format.write(trace, i, text);
    if (text.size() >= kChunk) {
      compressor.write(text, false);
      if (options.progress)
        options.progress(static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(total));
    }
  }
  compressor.write(text, true);
  sink.commit();
}

}  // namespace pdsim
