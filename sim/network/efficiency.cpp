#include "sim/network/efficiency.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/math.hpp"

namespace pdsim {
namespace {

constexpr Bytes kKiB = 1024;
constexpr Bytes kMiB = 1024 * kKiB;

// The operation rate of an EFA machine of eight GPUs: what p5en does at 64 KiB, 97.11 GB/s, which is 1.48 M
// operations a second over its 16 NICs. Nobody has published one for p5, which is given the same.
constexpr double kEfaOperations = 97.11 / 65536;
// p4d: the same for each of its 4 NICs.
constexpr double kEfaOperationsOf4Nics = kEfaOperations * 4 / 16;

// Mooncake Transfer Engine over libfabric, GPU to GPU, 16 threads (its efa_transport.md). READ at 512 KiB and
// 2 MiB, 289 and 302, is left out: within 4 % of this line, which is monotone.
constexpr CurvePoint kEfa3Write[] = {{64 * kKiB, 97.11},   {128 * kKiB, 190.82}, {256 * kKiB, 324.90},
                                     {512 * kKiB, 357.62}, {1 * kMiB, 365.66},   {2 * kMiB, 366.87}};
constexpr CurvePoint kEfa3Read[] = {
    {64 * kKiB, 96.87}, {128 * kKiB, 203.88}, {256 * kKiB, 296.19}, {1 * kMiB, 303.78}};
// The same source: p5 with 32 threads, p6-b200 (called a lower bound there; below 1 MiB READ and WRITE are
// not told apart, and 170 stands for 168 to 172).
constexpr CurvePoint kEfa2Write[] = {{1 * kMiB, 388.90}};
constexpr CurvePoint kEfa2Read[] = {{1 * kMiB, 381.64}};
constexpr CurvePoint kEfa4Write[] = {{64 * kKiB, 69.5}, {128 * kKiB, 170}, {1 * kMiB, 302}};
constexpr CurvePoint kEfa4Read[] = {{64 * kKiB, 69.5}, {128 * kKiB, 170}, {1 * kMiB, 313}};
// 97 of 100 Gb/s on one NIC of p5 (Libefaxx), taken for p4d's.
constexpr CurvePoint kEfa1[] = {{1 * kMiB, 48.5}};
// Mooncake's vLLM 1P1D table, 128 to 32,768 tokens of Qwen3-8B between two machines of 8 NICs: 0.37 ms +
// bytes / 146.5 GB/s, within 6 %. Its "MB" are MiB: 147,456 B a token make 18.0 of its "MB" at 128 tokens and
// 4.50 of its "GB" at 32,768. Read as decimal units the same times look like 137 GB/s.
constexpr CurvePoint kRoce[] = {{1 * kMiB, 146.5}};
constexpr CurvePoint kTcp[] = {{1 * kMiB, 400}};
// NCCL all_gather over 8 GPUs, 512 MiB: 337 and 335 of 450 GB/s on H200 and H100 (A100 and B200: 0.69).
constexpr CurvePoint kNvlinkCurve[] = {{1 * kMiB, 337}};
// UCX cuda_ipc, one operation after the other: bytes over microseconds each (openucx/ucx#3740, 1,000
// iterations). What an operation costs beside its bytes binds up to some 100 KiB; 23.4 GB/s at the top.
constexpr CurvePoint kPcieCurve[] = {{8 * kKiB, 8.192 / 2.314},      {16 * kKiB, 16.384 / 2.422},
                                     {32 * kKiB, 32.768 / 2.994},    {64 * kKiB, 65.536 / 4.341},
                                     {128 * kKiB, 131.072 / 7.032},  {256 * kKiB, 262.144 / 12.404},
                                     {512 * kKiB, 524.288 / 23.459}, {1 * kMiB, 1048.576 / 44.813}};
constexpr double kPcieOperations = 1 / 2314.0;

// fi_pingpong over EFA on H100, one way: 17.3 us at 256 B, 19.0 us at 4 KB.
constexpr Nanos kEfaLatency = 17'300;

constexpr Fabric kFabrics[] = {
    {"efa-v1", "efa", 50, kEfaOperationsOf4Nics, kEfa1, kEfa1, kEfaLatency, kUnlimited,
     "EFA of p4d: not measured; one p5 NIC's share of line, p5en's operations per NIC"},
    {"efa-v2", "efa", 400, kEfaOperations, kEfa2Write, kEfa2Read, kEfaLatency, kUnlimited,
     "EFA of p5 and p5e: 97 % WRITE and 95 % READ at 1 MiB, p5en's operation rate below"},
    {"efa-v3", "efa", 400, kEfaOperations, kEfa3Write, kEfa3Read, kEfaLatency, kUnlimited,
     "EFA of p5en: measured from 64 KiB to 2 MiB, 92 % WRITE and 76 % READ at the top"},
    {"efa-v4", "efa", 400, 69.5 / 65536, kEfa4Write, kEfa4Read, kEfaLatency, kUnlimited,
     "EFA of p6-b200: measured at 64 KiB, 128 KiB and 1 MiB, lower bounds"},
    {"roce", "roce", 200, kUnlimited, kRoce, kRoce, 2'000, kUnlimited,
     "RoCE: 146.5 of 200 GB/s, from transfers between H800 machines of 8 NICs (their 0.37 ms of set-up is "
     "not wire)"},
    {"tcp", "tcp", 400, kUnlimited, kTcp, kTcp, 50'000, 0.3,
     "TCP, to which UCX falls back on EFA: 0.3 GB/s for one GPU's process"},
};

}  // namespace

// Latencies: NCCL's smallest all_gather between two H200, 5.3 us; AIConfigurator's 10 us for peers on PCIe.
constinit const Fabric kNvlink{
    "nvlink",   "nvlink",     450,
    kUnlimited, kNvlinkCurve, kNvlinkCurve,
    5'300,      kUnlimited,   "NVLink through NVSwitch: 75 % of the data sheet's rate"};
constinit const Fabric kPcie{
    "pcie",          "pcie",     31.5,
    kPcieOperations, kPcieCurve, kPcieCurve,
    10'000,          kUnlimited, "PCIe between peers without NVLink: UCX cuda_ipc, on a Gen4 x16 link"};

std::span<const Fabric> fabrics() {
  return kFabrics;
}

const Fabric& find_fabric(std::string_view name, int efa_generation, std::string_view place) {
  const std::string wanted = name == "efa" ? fmt::format("efa-v{}", efa_generation) : std::string(name);
  std::vector<std::string_view> names{"efa"};
  std::string known = "efa";
  for (const Fabric& fabric : kFabrics) {
    if (fabric.name == wanted) return fabric;
    names.push_back(fabric.name);
    known.append(", ").append(fabric.name);
  }
  if (name == "efa") {
    throw InputError(
        place, "fabric 'efa' needs an instance with EFA; expected one, or a fabric of " + known.substr(5));
  }
  throw InputError(
      place, "unknown fabric '" + wanted + "'" + did_you_mean(wanted, names) + "; expected one of " + known);
}

std::shared_ptr<const MeasuredFabric> measured_fabric(const Fabric& shipped, FabricMeasurement measured) {
  const auto own = std::make_shared<MeasuredFabric>();
  FabricMeasurement& m = own->measured = std::move(measured);
  Fabric& f = own->fabric = shipped;
  f.sentence = m.sentence;
  if (m.latency > 0) f.latency = m.latency;
  if (m.line == 0) return own;
  const double scale = m.line / shipped.line;
  f.line = m.line;
  f.operations = m.operations > 0 ? m.operations : shipped.operations * scale;
  for (const auto& [own_curve, shipped_curve] :
       {std::pair(&m.write, shipped.write), {&m.read, shipped.read}}) {
    if (own_curve->empty()) {
      for (const CurvePoint& point : shipped_curve) own_curve->push_back({point.bytes, point.rate * scale});
    } else {
      f.operations =
          std::max(f.operations, own_curve->front().rate / static_cast<double>(own_curve->front().bytes));
    }
  }
  f.write = m.write;
  f.read = m.read;
  return own;
}

double efficiency(const Fabric& fabric, Op op, Bytes bytes) {
  const std::span<const CurvePoint> curve = op == Op::read ? fabric.read : fabric.write;
  const auto above = std::ranges::upper_bound(curve, bytes, {}, &CurvePoint::bytes);
  if (above == curve.begin()) {
    return std::min(curve.front().rate, fabric.operations * static_cast<double>(bytes)) / fabric.line;
  }
  const CurvePoint& low = above[-1];
  if (above == curve.end()) return low.rate / fabric.line;
  // Logarithms of ratios: exactly 0 at the point itself, so that the table's own values come back.
  const auto octaves = [&](Bytes size) {
    return math::log(static_cast<double>(size) / static_cast<double>(low.bytes));
  };
  return (low.rate + (above->rate - low.rate) * (octaves(bytes) / octaves(above->bytes))) / fabric.line;
}

}  // namespace pdsim
