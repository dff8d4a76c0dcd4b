#include "models/network_measurements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

/// A timer and a printed digit may make a rate that much more than it is.
constexpr double kRounding = 1.01;

// nixlbench's columns (src/utils/utils.cpp of ai-dynamo/nixl, all releases). Avg Post is postXferReq() of the
// whole batch, Avg Tx the wait for its end after that, Avg Lat. the sum over the batch.
constexpr std::string_view kBenchColumns[] = {
    "Block Size (B)",         "Batch Size",       "B/W (MiB/Sec)", "B/W (GiB/Sec)", "B/W (GB/Sec)",
    "Aggregate B/W (GB/Sec)", "Network Util (%)", "Avg Lat. (us)", "Avg Prep (us)", "P99 Prep (us)",
    "Avg Post (us)",          "P99 Post (us)",    "Avg Tx (us)",   "P99 Tx (us)"};
constexpr std::string_view kStorage[] = {"gds", "gds_mt",     "posix", "hf3fs",
                                         "obj", "azure_blob", "gusli", "infinia"};

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return out;
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (text = trimmed(text); !text.empty(); text = trimmed(text)) {
    words.push_back(text.substr(0, text.find_first_of(" \t")));
    text.remove_prefix(words.back().size());
  }
  return words;
}

std::optional<double> number_in(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;  // "inf" and "nan" too: whoever needs a finite one refuses them
}

bool whole(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// libfabric's sizes: "64", "4k", "1.5m", in units of 1,024.
std::optional<Bytes> size_in(std::string_view text) {
  double unit = 1;
  for (const auto& [letter, factor] :
       {std::pair('k', 1024.0), {'m', 1024.0 * 1024}, {'g', 1024.0 * 1024 * 1024}}) {
    if (!text.ends_with(letter)) continue;
    text.remove_suffix(1);
    unit = factor;
    break;
  }
  const std::optional<double> value = number_in(text);
  if (!value || !(*value > 0) || *value * unit > 0x1p50) return std::nullopt;
  return static_cast<Bytes>(std::llround(*value * unit));
}

double above_zero(std::string_view text, std::string_view column, const std::string& place) {
  const std::optional<double> value = number_in(text);
  if (value && std::isfinite(*value) && *value > 0) return *value;
  throw InputError(place, fmt::format("{} is {}, expected a number above 0", column, text));
}

double not_negative(std::string_view text, std::string_view column, const std::string& place) {
  const std::optional<double> value = number_in(text);
  if (value && std::isfinite(*value) && *value >= 0) return *value;
  throw InputError(place, fmt::format("{} is {}, expected a number of at least 0", column, text));
}

/// The last `n` words: what stands before them a launcher or a log has put there.
std::vector<std::string_view> last(const std::vector<std::string_view>& words, std::size_t n) {
  return {words.end() - static_cast<std::ptrdiff_t>(n), words.end()};
}

}  // namespace

void MeasurementReader::begin() {
  rows_.clear();
  table_ = Table::none;
  bench_ = {};
  nccl_test_.clear();
  nccl_hosts_.clear();
  series_.clear();
}

void MeasurementReader::line(std::string_view text, const std::string& place) {
  if (!unfinished_.empty()) {
    const std::string whole_line = unfinished_ + " " + std::string(trimmed(text));
    unfinished_.clear();
    return log_line(whole_line, unfinished_place_);
  }
  constexpr std::string_view kLog = "KV Transfer metrics: ";
  if (const std::size_t at = text.find(kLog); at != std::string_view::npos) {
    return log_line(text.substr(at + kLog.size()), place);
  }
  if (prometheus(text, place) || bench_setting(text, place) || table_head(text, place)) return;
  const std::vector<std::string_view> words = words_of(text);
  if (nccl_note(text, words)) return;
  if (table_ == Table::bench) bench_row(words, place);
  if (table_ == Table::ping) ping_row(words, place);
  if (table_ == Table::nccl) nccl_row(words, place);
}

std::string MeasurementReader::end(const std::string& file) {
  if (!unfinished_.empty()) {
    const std::string fields = std::exchange(unfinished_, {});
    log_line(fields.substr(0, fields.size() - 1), unfinished_place_);
  }
  end_series();
  if (rows_.empty()) {
    throw InputError(file,
                     "holds no measurement that is known, expected output of nixlbench, fi_pingpong or "
                     "nccl-tests' sendrecv_perf, or vLLM's log or metrics of KV transfers");
  }
  std::string text;
  for (const auto& [format, n] : rows_) {
    text += fmt::format("{}{}: {} row{}", text.empty() ? "" : ", ", format, n, n == 1 ? "" : "s");
  }
  return text;
}

void MeasurementReader::refuse_rate(double rate, std::string_view column, const std::string& place) const {
  if (context_.line == 0 || rate <= context_.line * kRounding) return;
  throw InputError(place,
                   fmt::format("{} makes {:.4g} GB/s of one GPU's network cards, expected at most their "
                               "line rate of {:.4g}",
                               column, rate, context_.line));
}

// ----------------------------------------------------------------------------------------------- nixlbench

// "Op type (--op_type=[READ,WRITE])      : READ"
bool MeasurementReader::bench_setting(std::string_view text, const std::string& place) {
  if (text.find("NIXLBench Configuration") != std::string_view::npos) {
    bench_ = {};
    table_ = Table::none;
    return true;
  }
  const std::size_t option = text.find("(--");
  const std::size_t colon = text.rfind(": ");
  if (option == std::string_view::npos || colon == std::string_view::npos || colon < option) return false;
  std::string_view key = text.substr(option + 3);
  key = key.substr(0, key.find_first_of("=)"));
  const std::string value = lower(trimmed(text.substr(colon + 2)));
  const auto count = [&] {
    if (!whole(value) || number_in(value) < 1) {
      throw InputError(place, fmt::format("{} is '{}', expected a number of at least 1", key, value));
    }
    return static_cast<std::int64_t>(*number_in(value));
  };
  if (key == "op_type") {
    if (value != "read" && value != "write") {
      throw InputError(place, fmt::format("op_type is '{}', expected READ or WRITE", value));
    }
    bench_.operation = value;
  } else if (key == "backend") {
    bench_.backend = value;
  } else if (key == "scheme") {
    bench_.scheme = value;
  } else if (key == "initiator_seg_type" || key == "target_seg_type") {
    bench_.host |= value != "vram";
  } else if (key == "num_threads") {
    bench_.threads = count();
  } else if (key == "num_initiator_dev") {
    bench_.devices = count();
  }
  return true;
}

bool MeasurementReader::table_head(std::string_view text, const std::string& place) {
  if (const std::size_t at = text.find("Block Size (B)"); at != std::string_view::npos) {
    columns_.clear();
    for (std::string_view rest = trimmed(text.substr(at)); !rest.empty(); rest = trimmed(rest)) {
      const auto* known = std::ranges::find_if(
          kBenchColumns, [&](std::string_view column) { return rest.starts_with(column); });
      if (known == std::end(kBenchColumns)) {
        throw InputError(place, fmt::format("has a column '{}', expected those of nixlbench: {}", rest,
                                            fmt::join(kBenchColumns, ", ")));
      }
      columns_.push_back(*known);
      rest.remove_prefix(known->size());
    }
    for (const std::string_view needed : {"Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)"}) {
      if (std::ranges::find(columns_, needed) != columns_.end()) continue;
      throw InputError(place, fmt::format("has no column '{}', expected one beside Block Size (B)", needed));
    }
    table_ = Table::bench;
    return true;
  }
  if (text.find("#sent") != std::string_view::npos && text.find("usec/xfer") != std::string_view::npos) {
    table_ = Table::ping;
    return true;
  }
  if (text.find("algbw") != std::string_view::npos && text.find("busbw") != std::string_view::npos) {
    const std::vector<std::string_view> words =
        words_of(text.substr(std::min(text.find('#') + 1, text.size())));
    columns_.assign(words.size(), {});
    first_time_ = static_cast<std::size_t>(std::ranges::find(words, "time") - words.begin());
    if (first_time_ + 2 >= words.size()) return false;
    if (nccl_test_.empty()) {
      throw InputError(
          place,
          "does not say which of nccl-tests printed it, expected its command line or '# Collective "
          "test starting: sendrecv_perf' above the table");
    }
    if (nccl_hosts_.size() > 1 && std::set(nccl_hosts_.begin(), nccl_hosts_.end()).size() == 1) {
      throw InputError(place, fmt::format("all {} ranks are on {}, expected ranks on two nodes: the network "
                                          "between nodes is fitted",
                                          nccl_hosts_.size(), nccl_hosts_[0]));
    }
    table_ = Table::nccl;
    return true;
  }
  return false;
}

bool MeasurementReader::bench_row(const std::vector<std::string_view>& words, const std::string& place) {
  const auto numbers =
      std::ranges::count_if(words, [](std::string_view w) { return number_in(w).has_value(); });
  if (words.size() < columns_.size()) {  // a line of a log, or a row that was cut off
    if (numbers < 3 || static_cast<std::size_t>(numbers) != words.size()) return false;
    throw InputError(place, fmt::format("has {} fields, expected {}: {}", words.size(), columns_.size(),
                                        fmt::join(columns_, ", ")));
  }
  const std::vector<std::string_view> row = last(words, columns_.size());
  if (!whole(row[0]) || !whole(row[1])) return false;
  const auto field = [&](std::string_view column) {
    const auto at = std::ranges::find(columns_, column);
    return at == columns_.end() ? std::string_view() : row[static_cast<std::size_t>(at - columns_.begin())];
  };
  ++rows_["nixlbench"];
  BenchRow r;
  r.place = place;
  r.backend = bench_.backend;
  const std::string& operation = bench_.operation.empty() ? context_.operation : bench_.operation;
  if (operation.empty()) {
    throw InputError(
        place,
        "no configuration above the table says whether it is of READ or WRITE, expected the whole "
        "output or --op");
  }
  r.read = operation == "read";
  r.bytes = static_cast<Bytes>(above_zero(row[0], "Block Size (B)", place));
  r.batch = static_cast<std::int64_t>(above_zero(row[1], "Batch Size", place));
  r.threads = bench_.threads;
  r.rate = above_zero(field("B/W (GB/Sec)"), "B/W (GB/Sec)", place) / static_cast<double>(bench_.devices);
  const double each = above_zero(field("Avg Lat. (us)"), "Avg Lat. (us)", place);
  r.iteration_us = each * static_cast<double>(r.batch * r.threads * bench_.devices);
  if (!field("Avg Post (us)").empty() && !field("Avg Tx (us)").empty()) {
    r.post_us = not_negative(field("Avg Post (us)"), "Avg Post (us)", place);
    const double wait = not_negative(field("Avg Tx (us)"), "Avg Tx (us)", place);
    if (!(r.post_us + wait > 0)) {
      throw InputError(place, "Avg Post (us) and Avg Tx (us) are 0, expected a time above 0");
    }
    r.iteration_us = r.post_us + wait;
  }
  if (std::ranges::find(kStorage, bench_.backend) != std::end(kStorage)) {
    ++all_.set_aside[fmt::format("nixlbench: backend {} is storage", bench_.backend)];
    return true;
  }
  if (!bench_.host) refuse_rate(r.rate, "B/W (GB/Sec)", place);
  r.link = !bench_.host && bench_.scheme == "pairwise";
  if (bench_.host) ++all_.set_aside["nixlbench: of host memory, posting only"];
  if (!bench_.host && !r.link) ++all_.set_aside["nixlbench: scheme other than pairwise, posting only"];
  all_.bench.push_back(std::move(r));
  return true;
}

// --------------------------------------------------------------------------------------------- fi_pingpong

// "4k      10      =10      80k         0.00s    215.58      19.00       0.05"
bool MeasurementReader::ping_row(const std::vector<std::string_view>& words, const std::string& place) {
  if (words.size() < 8) {
    if (words.size() < 5 || !size_in(words[0]) || !words[4].ends_with('s') || !whole(words[1])) return false;
    throw InputError(place, fmt::format("has {} fields, expected 8 as fi_pingpong prints", words.size()));
  }
  const std::vector<std::string_view> row = last(words, 8);
  if (!size_in(row[0]) || !row[4].ends_with('s') || !number_in(row[4].substr(0, row[4].size() - 1)))
    return false;
  ++rows_["fi_pingpong"];
  if (!row[2].starts_with('=')) {
    throw InputError(place, fmt::format("#ack is {} of {} sent, expected all", row[2], row[1]));
  }
  PingRow r{place, *size_in(row[0]), above_zero(row[6], "usec/xfer", place)};
  refuse_rate(above_zero(row[5], "MB/sec", place) / 1e3, "MB/sec", place);
  refuse_rate(static_cast<double>(r.bytes) / (r.us * 1e3), "usec/xfer", place);
  all_.pings.push_back(std::move(r));
  return true;
}

// ---------------------------------------------------------------------------------------------- nccl-tests

// "#  Rank  0 Group  0 Pid  15784 on  host-7 device  0 [0x1b] NVIDIA H200", and names of tests.
bool MeasurementReader::nccl_note(std::string_view text, const std::vector<std::string_view>& words) {
  if (const std::size_t at = text.find("_perf"); at != std::string_view::npos) {
    const std::size_t begin = text.find_last_of(" /\t'\"", at);
    nccl_test_ = text.substr(begin == std::string_view::npos ? 0 : begin + 1,
                             at + 5 - (begin == std::string_view::npos ? 0 : begin + 1));
    nccl_hosts_.clear();
    if (table_ == Table::nccl) table_ = Table::none;
    return true;
  }
  const auto rank = std::ranges::find(words, "Rank");
  const auto on = std::ranges::find(words, "on");
  if (rank == words.end() || rank + 1 == words.end() || on >= words.end() - 1 || on < rank) return false;
  if (std::ranges::find(words, "device") == words.end()) return false;
  if (rank[1] == "0") nccl_hosts_.clear();
  nccl_hosts_.emplace_back(on[1]);
  return true;
}

// "1048576  262144  float  sum  -1  105.9  9.90  9.90  0  105.7  9.92  9.92  N/A"
bool MeasurementReader::nccl_row(const std::vector<std::string_view>& words, const std::string& place) {
  const bool begins = words.size() > 3 && whole(words[0]) && whole(words[1]) && !number_in(words[2]);
  if (words.size() < columns_.size()) {
    if (!begins) return false;
    throw InputError(place, fmt::format("has {} fields, expected {} as the table's head has", words.size(),
                                        columns_.size()));
  }
  const std::vector<std::string_view> row = last(words, columns_.size());
  if (!whole(row[0]) || !whole(row[1]) || number_in(row[2])) return false;
  ++rows_["nccl-tests"];
  if (nccl_test_ != "sendrecv_perf") {
    ++all_.set_aside[fmt::format("nccl-tests: {} is no transfer from one GPU to one other (sendrecv_perf is)",
                                 nccl_test_)];
    return true;
  }
  SendRow r{place, static_cast<Bytes>(*number_in(row[0])), above_zero(row[first_time_], "time", place)};
  if (r.bytes == 0) return true;  // sizes below one element
  const std::size_t wrong = first_time_ + 3;
  if (wrong < row.size() && number_in(row[wrong]) > 0) {
    throw InputError(place, fmt::format("#wrong is {}, expected 0: data arrived damaged", row[wrong]));
  }
  refuse_rate(not_negative(row[first_time_ + 1], "algbw", place), "algbw", place);
  refuse_rate(static_cast<double>(r.bytes) / (r.us * 1e3), "time", place);
  all_.sends.push_back(std::move(r));
  return true;
}

// ---------------------------------------------------------------------------------------------------- vLLM

// "Num successful transfers=4, Avg xfer time (ms)=1.381, ...": units as reduce() of vLLM's NIXL stats has
// them; its MB are MiB.
void MeasurementReader::log_line(std::string_view fields, const std::string& place) {
  fields = trimmed(fields);
  if (fields.ends_with(',')) {
    unfinished_ = fields;
    unfinished_place_ = place;
    return;
  }
  std::map<std::string_view, std::string_view> values;
  for (std::string_view rest = fields; !rest.empty();) {
    const std::string_view field = rest.substr(0, rest.find(", "));
    rest.remove_prefix(std::min(field.size() + 2, rest.size()));
    const std::size_t equals = field.rfind('=');
    if (equals != std::string_view::npos)
      values[trimmed(field.substr(0, equals))] = trimmed(field.substr(equals + 1));
  }
  const auto value = [&](std::string_view key) {
    const auto found = values.find(key);
    return found == values.end() ? std::string_view() : found->second;
  };
  TransferRow r;
  r.place = place;
  r.transfers = not_negative(value("Num successful transfers"), "Num successful transfers", place);
  ++rows_["vLLM log"];
  if (r.transfers == 0) {
    ++all_.set_aside["vLLM log: an interval without a transfer"];
    return;
  }
  if (value("Avg post time (ms)").empty()) {
    ++all_.set_aside["vLLM log: no post time (not the NIXL connector, or before it told)"];
    return;
  }
  const auto read = [&](std::string_view key, double unit) {
    return above_zero(value(key), key, place) * unit;
  };
  r.xfer_us = read("Avg xfer time (ms)", 1e3);
  r.post_us = read("Avg post time (ms)", 1e3);
  r.bytes = read("Avg MB per transfer", 1024 * 1024);
  r.descriptors = read("Avg number of descriptors", 1);
  take(std::move(r), "vLLM log");
}

// vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 1.25
bool MeasurementReader::prometheus(std::string_view text, const std::string& place) {
  text = trimmed(text);
  constexpr std::string_view kPrefix = "vllm:nixl_";
  if (!text.starts_with(kPrefix)) return false;
  const std::size_t name_end = text.find_first_of("{ ");
  if (name_end == std::string_view::npos) return true;
  const std::string_view name = text.substr(kPrefix.size(), name_end - kPrefix.size());
  const std::size_t labels_end = text[name_end] == '{' ? text.rfind('}') : name_end;
  if (labels_end == std::string_view::npos) {
    throw InputError(place,
                     fmt::format("the labels of {} do not end, expected a '}}'", text.substr(0, name_end)));
  }
  struct Member {
    std::string_view name;
    double Series::*sum;
  };
  constexpr Member kMembers[] = {
      {"post_time_seconds_sum", &Series::post_s},    {"post_time_seconds_count", &Series::transfers},
      {"num_descriptors_sum", &Series::descriptors}, {"num_descriptors_count", &Series::described},
      {"xfer_time_seconds_sum", &Series::xfer_s},    {"bytes_transferred_sum", &Series::bytes}};
  for (const Member& member : kMembers) {
    if (name != member.name) continue;
    Series& series = series_[std::string(text.substr(name_end, labels_end + 1 - name_end))];
    if (series.place.empty()) series.place = place;
    const std::vector<std::string_view> words =
        words_of(text.substr(labels_end + (text[labels_end] == '}' ? 1 : 0)));
    series.*member.sum =
        not_negative(words.empty() ? std::string_view() : words[0], text.substr(0, name_end), place);
  }
  return true;
}

// Histograms count from the engine's start: of two scrapes in the order given, the later tells of the time
// between them; a smaller count is an engine that has started anew.
void MeasurementReader::end_series() {
  for (const auto& [labels, now] : series_) {
    if (now.transfers != now.described) {
      throw InputError(now.place, fmt::format("{} transfers have a post time and {} a number of descriptors, "
                                              "expected both of each (post_time_seconds and num_descriptors)",
                                              now.transfers, now.described));
    }
    Series& last = before_[labels];
    Series since = now;
    if (now.transfers >= last.transfers) {
      since.transfers -= last.transfers;
      since.post_s -= last.post_s;
      since.descriptors -= last.descriptors;
      since.xfer_s -= last.xfer_s;
      since.bytes -= last.bytes;
    }
    last = now;
    ++rows_["vLLM metrics"];
    if (since.transfers == 0) {
      ++all_.set_aside["vLLM metrics: no transfer, or none since the scrape before"];
      continue;
    }
    const double n = since.transfers;
    TransferRow row{now.place,      n, since.descriptors / n, since.post_s / n * 1e6, since.xfer_s / n * 1e6,
                    since.bytes / n};
    for (const double x : {row.descriptors, row.post_us}) {
      if (x > 0) continue;
      throw InputError(now.place,
                       "a histogram fell between two scrapes though its count did not, or is 0, "
                       "expected sums above 0");
    }
    take(std::move(row), "vLLM metrics");
  }
}

void MeasurementReader::take(TransferRow row, std::string_view format) {
  if (row.descriptors < 1) {
    throw InputError(
        row.place,
        fmt::format("a transfer of {:.3g} descriptors on average, expected at least 1", row.descriptors));
  }
  if (row.xfer_us > 0)
    refuse_rate(row.bytes / (row.xfer_us * 1e3), fmt::format("{}: bytes over time", format), row.place);
  all_.transfers.push_back(std::move(row));
}

}  // namespace pdsim
