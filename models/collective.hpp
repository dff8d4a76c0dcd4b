// Collectives: time by message size, of all-reduces inside a node (vLLM's custom kernels, replayed as a
// graph or launched one by one) and of NCCL's; and the dispatch and combine of experts that are spread
// over nodes, which nobody has published as a table.
//
//   t = launch + bytes / rate, by regimes of the message where an algorithm is known to end, times a
//   correction on the message's size.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "models/curve.hpp"
#include "models/dtype.hpp"
#include "models/profile.hpp"

namespace pdsim {

/// Whose kernel runs a collective. Only all-reduces have others than NCCL's.
enum class CollectiveMode : std::uint8_t { graph, eager, nccl };
std::string_view name(CollectiveMode mode);
/// InputError at `place` that lists the modes.
CollectiveMode collective_mode_of(std::string_view text, std::string_view place);

/// The curve of allreduce, allgather, reducescatter or alltoall: of the mode's kernels that move elements
/// as wide (8 or 16 bits), the one for the nearest number of GPUs. A stand-in where the number or the width
/// is another. InputError at `place` when the profile has none of the mode.
CurveChoice find_collective(const Profile& profile, CurveOp op, Dtype dtype, std::int32_t gpus,
                            CollectiveMode mode, std::string_view place);

/// `bytes` of one GPU's message, as NCCL's tests count: of the whole result for an all-gather, of the whole
/// input otherwise. Also the time of an elementwise kernel by its curve.
KernelTime collective_time(const Curve& curve, double bytes);

/// What carries tokens between nodes.
struct ExpertFabric {
  std::string_view name;
  double latency_ns = 0;          ///< of one dispatch or one combine, empty
  double bytes_per_ns = 0;        ///< one GPU's share of its node's cards, reached by an all-to-all
  double local_bytes_per_ns = 0;  ///< NVLink, one GPU, each direction
};
/// EFA of H100 (p5) and B200 (p6-b200) instances, and ConnectX-7 InfiniBand.
std::span<const ExpertFabric> expert_fabrics();
/// InputError at `place` that lists the names.
const ExpertFabric& find_expert_fabric(std::string_view name, std::string_view place);

/// Dispatch and combine of one layer's routed experts over `ranks` GPUs on `nodes` nodes, one after the
/// other, by low-latency kernels that send a token once for each of its experts:
///
///   t = 2 latency + c (nodes - 1) / nodes / rate + c (ranks / nodes - 1) / ranks / local
///   c = tokens topk hidden (bytes of `dtype` out + 2 back)
///
/// `tokens` are those of one rank. Data-sheet grade: latencies from one published shape a fabric (below),
/// everything else scaled by bytes; callers flag it as extrapolated. Requires ranks >= nodes >= 1.
KernelTime dispatch_combine_time(double tokens, double hidden, double topk, Dtype dtype, double ranks,
                                 double nodes, const ExpertFabric& fabric);

}  // namespace pdsim
