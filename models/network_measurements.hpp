// Reads what operators have: the output of nixlbench, fi_pingpong and nccl-tests' sendrecv_perf, and vLLM's
// own metrics of its KV transfers, from its log ("KV Transfer metrics: ...") or from Prometheus
// (vllm:nixl_*).
//
// A format is told by its lines, whatever the file is called; logs around them, and prefixes that a launcher
// puts before each line, are passed over. A row of a table that cannot be read, or that cannot be true
// (faster than the line, a time of 0), is an InputError at its line. What is true but no use is set aside and
// counted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

/// One row of nixlbench: iterations that post `batch` operations and then wait for them.
struct BenchRow {
  std::string place, backend;  ///< "libfabric"; backend empty where the file has no configuration
  bool read = false;
  Bytes bytes = 0;           ///< of an operation, as posted
  std::int64_t batch = 0;    ///< operations of an iteration
  std::int64_t threads = 1;  ///< that do so at once
  double rate = 0;           ///< bytes/ns of one GPU's cards, all threads
  double iteration_us = 0;   ///< posting and waiting
  double post_us = -1;       ///< of it, posting the batch; -1 = not printed (before July 2025)
  bool link = false;         ///< between the memories of two GPUs, one to one: tells of the link
  double wait_us() const { return iteration_us - post_us; }
};

/// One message size of fi_pingpong: half a round trip.
struct PingRow {
  std::string place;
  Bytes bytes = 0;
  double us = 0;
};

/// One message size of sendrecv_perf: every GPU sends and receives it.
struct SendRow {
  std::string place;
  Bytes bytes = 0;
  double us = 0;
};

/// Transfers of vLLM's NIXL connector, averaged over a while.
struct TransferRow {
  std::string place;
  double transfers = 0, descriptors = 0;  ///< how many; of one on average
  double post_us = 0;                     ///< of one
  double xfer_us = 0;                     ///< from its post until the engine has seen its end
  double bytes = 0;
};

struct NetworkMeasurements {
  std::vector<BenchRow> bench;
  std::vector<PingRow> pings;
  std::vector<SendRow> sends;
  std::vector<TransferRow> transfers;
  std::map<std::string, std::int64_t> set_aside;  ///< reason -> rows
};

/// What the files do not say.
struct MeasurementContext {
  double line = 0;        ///< bytes/ns, one way, of one GPU's network cards; 0 = unknown
  std::string operation;  ///< "read" or "write": nixlbench tables without their configuration
};

class MeasurementReader {
 public:
  explicit MeasurementReader(MeasurementContext context) : context_(std::move(context)) {}

  /// A new file begins: configurations of the one before do not hold in it.
  void begin();
  /// The next line; `place` is "file:line".
  void line(std::string_view text, const std::string& place);
  /// What the file held: "nixlbench: 24 rows, fi_pingpong: 4 rows". InputError at `file` when that is
  /// nothing.
  std::string end(const std::string& file);

  const NetworkMeasurements& measurements() const { return all_; }

 private:
  enum class Table : std::uint8_t { none, bench, ping, nccl };
  struct Bench {  ///< nixlbench's configuration
    std::string operation, backend, scheme = "pairwise";
    bool host = false;  ///< one of the two memories is the host's
    std::int64_t threads = 1, devices = 1;
  };
  struct Series {  ///< sums and counts of the histograms with one set of labels
    std::string place;
    double transfers = 0, post_s = 0, described = 0, descriptors = 0, xfer_s = 0, bytes = 0;
  };

  bool bench_setting(std::string_view text, const std::string& place);
  bool table_head(std::string_view text, const std::string& place);
  bool bench_row(const std::vector<std::string_view>& words, const std::string& place);
  bool ping_row(const std::vector<std::string_view>& words, const std::string& place);
  bool nccl_row(const std::vector<std::string_view>& words, const std::string& place);
  bool nccl_note(std::string_view text, const std::vector<std::string_view>& words);
  void log_line(std::string_view fields, const std::string& place);
  bool prometheus(std::string_view text, const std::string& place);
  void take(TransferRow row, std::string_view format);
  void end_series();
  void refuse_rate(double rate, std::string_view column, const std::string& place) const;

  MeasurementContext context_;
  NetworkMeasurements all_;
  std::map<std::string, std::int64_t> rows_;  ///< of the file: format -> rows, those set aside too
  Table table_ = Table::none;
  std::vector<std::string_view> columns_;  ///< of the table, literals
  std::size_t first_time_ = 0;             ///< nccl-tests: the column of the out-of-place time
  Bench bench_;
  std::string nccl_test_;
  std::vector<std::string> nccl_hosts_;
  std::string unfinished_, unfinished_place_;      ///< a log line that a terminal has wrapped
  std::map<std::string, Series> series_, before_;  ///< by labels: of this file, and of those before it
};

}  // namespace pdsim
