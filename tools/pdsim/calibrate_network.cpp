#include "tools/pdsim/calibrate_network.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "models/fit_network.hpp"
#include "models/hardware.hpp"
#include "sim/core/error.hpp"
#include "sim/network/efficiency.hpp"
#include "sim/scenario/names.hpp"
#include "traces/lines.hpp"

namespace pdsim {
namespace {

struct NetworkOptions {
  std::vector<std::string> files;
  std::string instance, fabric, backend, operation, out;
  std::string name, date, source;
  double line = 0;
  std::int32_t rails = 0;
};

/// What was measured: the fabric, and the network cards of one GPU.
struct Measured {
  const Fabric* fabric = nullptr;
  double line = 0;  ///< bytes/ns, one way; 0 = unknown
  std::int32_t rails = 1;
};

Measured measured(const NetworkOptions& o) {
  const Instance* instance = o.instance.empty() ? nullptr : &find_instance(o.instance, "--instance");
  if (instance == nullptr && o.fabric.empty()) {
    throw InputError("calibrate network",
                     "neither --instance nor --fabric is given, expected one of them: it "
                     "says what was measured");
  }
  Measured m;
  m.fabric =
      &find_fabric(o.fabric.empty() ? "efa" : o.fabric, instance != nullptr ? instance->efa_version : 0,
                   o.fabric.empty() ? "--instance" : "--fabric");
  if (std::isfinite(m.fabric->gpu_limit)) {
    throw InputError("--fabric",
                     fmt::format("is {}, which pdsim limits by process and not by its line, expected "
                                 "another",
                                 m.fabric->name));
  }
  if (instance != nullptr) {
    m.rails = std::max(1, instance->nics / instance->gpus);
    m.line = m.rails * instance->nic_bytes_per_ns();
  }
  if (o.line > 0) m.line = o.line;
  if (o.rails > 0) m.rails = o.rails;
  return m;
}

/// Whose posting it is: as asked, as nixlbench says, or as the fabric's shipped scenarios have it.
const TransferBackend& backend_of(const NetworkOptions& o, const NetworkMeasurements& measurements,
                                  const Measured& what) {
  std::string name = o.backend, place = "--backend";
  const BenchRow* first = nullptr;
  for (const BenchRow& row : measurements.bench) {
    if (row.backend.empty()) continue;
    if (first == nullptr) first = &row;
    if (row.backend == first->backend) continue;
    throw InputError(row.place, fmt::format("is of backend {}, but {} is of {}: expected measurements of one",
                                            row.backend, first->place, first->backend));
  }
  if (name.empty() && first != nullptr) std::tie(name, place) = std::pair(first->backend, first->place);
  if (name.empty()) name = what.fabric->label == "efa" ? "libfabric" : "ucx";
  std::vector<std::string_view> known;
  for (const TransferBackend& backend : kTransferBackends) {
    if (backend.name == name) return backend;
    known.push_back(backend.name);
  }
  throw InputError(place,
                   fmt::format("backend is '{}', expected one of {}, or --backend to say which of them "
                               "it stands for{}",
                               name, fmt::join(known, ", "), did_you_mean(name, known)));
}

/// The first row whose meaning needs the line rate; empty when none does.
std::string place_of_rate(const NetworkMeasurements& m) {
  for (const BenchRow& row : m.bench) {
    if (row.link) return row.place;
  }
  return m.sends.empty() ? "" : m.sends.front().place;
}

std::string report(const NetworkProfile& profile, const NetworkMeasurements& m) {
  std::string text;
  for (const MeasuredFile& file : profile.files) text += fmt::format("{}: {}\n", file.name, file.contents);
  for (const auto& [reason, rows] : m.set_aside) {
    text += fmt::format("set aside {} row{}: {}\n", rows, rows == 1 ? "" : "s", reason);
  }
  text += fmt::format("{} of {}\n", profile.name, profile.fabric);
  const auto values = [&](std::string_view key) {
    std::string out;
    if (key == "write" || key == "read") {
      for (const RatePoint& point : key == "write" ? profile.write : profile.read) {
        const double kib = static_cast<double>(point.bytes) / 1024;
        out += fmt::format("{}{:.4g} KiB {:.4g}", out.empty() ? "" : ", ", kib, point.rate);
      }
      out += fmt::format(" (GB/s of {:.4g})", profile.line);
    } else if (key == "operations_per_s") {
      out = fmt::format("{:.4g}", profile.operations * 1e9);
    } else if (key == "latency_us") {
      out = fmt::format("{:.4g}", static_cast<double>(profile.latency) / 1e3);
    } else {
      out = fmt::format("{}: {:.4g} us + {:.4g} us a descriptor", profile.posting->backend,
                        static_cast<double>(profile.posting->fixed) / 1e3,
                        static_cast<double>(profile.posting->per_descriptor) / 1e3);
    }
    return out;
  };
  for (const std::string_view key : kNetworkQuantities) {
    const auto absent = profile.not_told.find(std::string(key));
    if (absent != profile.not_told.end()) {
      text += fmt::format("  {:<17} not told, pdsim's stays: {}\n", key, absent->second);
    } else {
      text += fmt::format("  {:<17} {}\n  {:<17} {}\n", key, values(key), "",
                          profile.evidence.at(std::string(key)));
    }
  }
  return text;
}

int calibrate_network(const NetworkOptions& o) {
  const Measured what = measured(o);
  MeasurementReader reader({what.line, o.operation});
  std::vector<MeasuredFile> files;
  for (const std::string& path : o.files) {
    LineReader lines(path);
    reader.begin();
    for (std::string_view text; lines.next(text);) reader.line(text, lines.place());
    std::string contents = reader.end(lines.name());
    files.push_back({lines.name(), lines.sha256(), std::move(contents)});
  }
  NetworkMeasurements measurements = reader.measurements();
  if (const std::string place = place_of_rate(measurements); what.line == 0 && !place.empty()) {
    throw InputError(place, "is a rate, but of which line is not said, expected --instance or --line");
  }
  const TransferBackend& backend = backend_of(o, measurements, what);
  NetworkFitOptions options;
  options.line = what.line;
  options.wire_bytes = [&](Bytes bytes) { return wire_operation_bytes(bytes, what.rails); };
  options.shipped_latency = what.fabric->latency;
  options.shipped_posting = {std::string(backend.name), backend.post_fixed, backend.post_per_descriptor};
  NetworkProfile profile = fit_network(measurements, options);
  profile.name = o.name;
  if (profile.name.empty()) {
    profile.name =
        o.out == "-" ? std::string(what.fabric->name) : std::filesystem::path(o.out).stem().string();
  }
  profile.date = o.date;
  profile.source = o.source;
  profile.fabric = what.fabric->name;
  profile.files = std::move(files);
  const std::string text = to_json(profile);
  const bool to_stdout = o.out == "-";
  if (!to_stdout) {
    std::ofstream out(o.out, std::ios::binary);
    out << text;
    if (!out.flush()) throw InputError(o.out, "cannot be written");
  }
  fmt::print(to_stdout ? stderr : stdout, "{}", report(profile, measurements));
  if (to_stdout) fmt::print("{}", text);
  return kDone;
}

constexpr std::string_view kFooter =
    "Files are told by what is in them; gzip and zstd as they are, - is stdin:\n"
    "  nixlbench       its whole output: B/W, Avg Post and Avg Tx by block and batch size, READ and WRITE "
    "apart.\n"
    "                  Batches from 1 to hundreds, blocks from 4 KiB to 4 MiB tell most\n"
    "  fi_pingpong     usec/xfer: the latency, one way\n"
    "  sendrecv_perf   of nccl-tests, between two nodes: the plateau of WRITE, where nixlbench tells none\n"
    "  vLLM's log      lines 'KV Transfer metrics: ...': posting time against descriptors\n"
    "  vLLM's metrics  a scrape of /metrics with vllm:nixl_* histograms; of two of one engine, in order, "
    "the\n"
    "                  second tells of the time between\n"
    "The profile holds what they tell. What they do not stays pdsim's own, and both are said, with the error "
    "of\n"
    "each fit on its rows. vLLM's transfer times are not taken for the link's: they end when an engine step "
    "has\n"
    "seen it. A figure that cannot be (above the line rate, a time of 0) is refused with its line.\n\n"
    "Example:\n"
    "  pdsim calibrate network nixlbench-*.txt pingpong.txt decode-0.log --instance p5en.48xlarge --out "
    "mine.json\n"
    "  pdsim replay scenario.json --set network.profile=mine.json";

}  // namespace

void add_calibrate_network(CLI::App& calibrate, Command& run) {
  const auto options = std::make_shared<NetworkOptions>();
  CLI::App* command = calibrate.add_subcommand(
      "network", "Fit a network profile from nixlbench, fi_pingpong, nccl-tests or vLLM's transfer metrics");
  command->add_option("files", options->files, "What was measured; - is stdin")->required();
  command->add_option("--out", options->out, "The profile to write; - is stdout")->required();
  command->add_option("--instance", options->instance,
                      "The EC2 instance measured: gives the fabric, and the network cards of a GPU");
  command->add_option(
      "--fabric", options->fabric,
      "What was measured, as pdsim ships it: efa-v3, roce, ... (default: the instance's EFA)");
  command
      ->add_option("--line", options->line,
                   "Line rate of one GPU's network cards, GB/s one way (default: the instance's)")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--rails", options->rails,
                   "Those cards, over which large operations are striped (default: the instance's, or 1)")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--op", options->operation,
                   "Of nixlbench tables without their configuration: read or write")
      ->check(CLI::IsMember({"read", "write"}));
  command->add_option(
      "--backend", options->backend,
      "Whose posting cost it is: libfabric, ucx or mooncake (default: as nixlbench says, else "
      "libfabric on EFA and ucx elsewhere)");
  command->add_option("--name", options->name, "The profile's name (default: the file's)");
  command->add_option("--date", options->date, "When it was measured");
  command->add_option("--source", options->source, "Who measured it, where");
  command->footer(std::string(kFooter));
  command->callback([options, &run] { run = [options] { return calibrate_network(*options); }; });
}

}  // namespace pdsim
