// What share of its line rate a link gives to operations of a given size.
//
// A NIC does not move 64 KiB operations at line rate: below some hundred KiB a machine's operations per
// second bind, above it a plateau does, and READ and WRITE differ. Both are measured per fabric and kept
// in one table. A flow of rate r then takes r / efficiency of its NICs' line rate (DESIGN rule 11).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

/// No such limit.
inline constexpr double kUnlimited = std::numeric_limits<double>::infinity();

enum class Op : std::uint8_t { read, write };

/// One measured point: the rate of a whole machine, all NICs busy, at this operation size.
struct CurvePoint {
  Bytes bytes;
  double rate;  ///< bytes/ns
};

/// A way to move bytes between two GPUs, as measured on one kind of machine.
struct Fabric {
  std::string_view name;
  std::string_view label;  ///< what link names say: "efa"
  double line;             ///< line rate of the machine measured, bytes/ns
  double operations;       ///< operations/ns of that machine below the first point; infinite = no limit
  std::span<const CurvePoint> write;  ///< by size, at least one point
  std::span<const CurvePoint> read;
  Nanos latency;     ///< one way, of a small operation
  double gpu_limit;  ///< bytes/ns that one GPU's process reaches whatever the line; infinite = no limit
  std::string_view sentence;  ///< where it applies and where the figures come from
};

/// The fabrics between nodes that a scenario may name; "efa" alone is resolved by generation.
std::span<const Fabric> fabrics();

/// Peers on one node: NVLink, or PCIe where a node has no NVLink.
extern const Fabric kNvlink;
extern const Fabric kPcie;

/// The fabric called `name`; "efa" means "efa-v<generation>", the generation being the instance's.
/// Throws InputError(place) naming what is known when there is none. The result lives for ever.
const Fabric& find_fabric(std::string_view name, int efa_generation, std::string_view place);

/// What an operator measured of a fabric; a member that is empty or 0 was not told.
struct FabricMeasurement {
  double line = 0;  ///< bytes/ns of the cards measured; required beside a curve or operations
  std::vector<CurvePoint> write, read;
  double operations = 0;  ///< per ns, of those cards
  Nanos latency = 0;
  std::string sentence;  ///< whose measurement
};

/// A fabric of an operator's own; `fabric` views what stands beside it.
struct MeasuredFabric {
  FabricMeasurement measured;
  Fabric fabric{};
};

/// `shipped` with what was measured in its place; its own curves and operations are kept as shares of the
/// line where they were not. Operations are never fewer than a measured point shows. With shipped's own
/// figures the result is shipped's to the bit.
std::shared_ptr<const MeasuredFabric> measured_fabric(const Fabric& shipped, FabricMeasurement measured);

/// Share of the line rate, in (0, 1], at which `op` in wire operations of `bytes` runs: linear in
/// log2(size) between measured points, flat above the last; below the first, the lesser of the first
/// point and operations x size. Continuous and monotone wherever the points are. Requires bytes >= 1.
double efficiency(const Fabric& fabric, Op op, Bytes bytes);

/// Descriptors of this size and more are split evenly over the rails of their GPU; smaller ones go whole
/// to one rail, in turn (NIXL libfabric's striping threshold).
inline constexpr Bytes kStripingThreshold = Bytes{128} * 1024;

/// The size of the wire operations that a descriptor becomes. Requires descriptor >= 1, rails >= 1.
inline Bytes wire_operation_bytes(Bytes descriptor, std::int32_t rails) {
  return descriptor < kStripingThreshold ? descriptor : (descriptor + rails - 1) / rails;
}

}  // namespace pdsim
