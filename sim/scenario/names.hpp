// The words that a scenario may use: one table a kind, each name with one sentence.
//
// Parsing, schema.json, error messages and --help all read these tables. A kind with an enum lists its
// names in the enum's order. Where the simulator keeps a table of functions for a kind (routing
// policies, fabrics), that table has one row for each name here, and a test says so. Trace formats are
// named by their readers' own table.
#pragma once

#include <cstdint>
#include <string_view>

#include "sim/core/time.hpp"

namespace pdsim {

struct Named {
  std::string_view name;
  std::string_view sentence;
};

enum class Role : std::uint8_t { prefill, decode, colocated };
inline constexpr Named kRoles[] = {
    {"prefill", "computes prompts and hands their KV over"},
    {"decode", "receives KV and generates"},
    {"colocated", "does both on the same GPUs"},
};

enum class PlacementPolicy : std::uint8_t { pack, spread, list };
inline constexpr Named kPlacements[] = {
    {"pack", "fills a node before it takes the next; pools share no node"},
    {"spread", "one replica after the other over the nodes of its pool; pools share no node"},
};

inline constexpr Named kRouterPolicies[] = {
    {"round_robin", "each worker in turn"},
    {"random", "any worker, evenly"},
    {"least_loaded", "the worker with the fewest tokens in flight"},
    {"power_of_two", "the less loaded of two random workers"},
    {"prefix_aware", "weighs the tokens still to compute against the load"},
    {"session_affinity", "a session stays on the worker of its first turn"},
};

enum class TransferMode : std::uint8_t { pull, push, push_layerwise, push_progressive };
inline constexpr Named kTransferModes[] = {
    {"pull", "decode reads the prompt's KV when prefill has ended (vLLM NixlConnector)"},
    {"push", "prefill writes it into blocks that decode registered before (vLLM NixlPushConnector)"},
    {"push_layerwise", "as push, each layer as it ends (unreleased: vllm#56874)"},
    {"push_progressive", "as push, full blocks after each chunk (unreleased: vllm#55589)"},
};

inline constexpr Named kLoadFailurePolicies[] = {
    {"fail", "a request whose KV does not arrive fails"},
    {"recompute", "decode computes the prompt itself"},
};

/// What posting costs the CPU of the worker that reads, between nodes.
struct TransferBackend {
  std::string_view name;
  std::string_view sentence;
  Nanos post_fixed;
  Nanos post_per_descriptor;
  std::string_view source;
};
inline constexpr TransferBackend kTransferBackends[] = {
    {"libfabric", "NIXL over EFA, serial posting", 71 * kMicrosecond, 2'430,
     "a line through 460 us at 160 descriptors and 46 ms at 18,880 (vllm#35264, NIXL#1514)"},
    {"ucx", "NIXL over UCX, on InfiniBand or RoCE", 0, 3'750, "6.7 ms for 1,785 descriptors (vllm#50913)"},
};

inline constexpr Named kFabrics[] = {
    {"efa", "AWS Elastic Fabric Adapter, the generation that the instance has"},
    {"roce", "RoCE NICs, 200 GB/s a node"},
    {"tcp", "what is left when RDMA is not found: 0.3 GB/s"},
};

enum class Sessions : std::uint8_t { open, closed };
inline constexpr Named kSessions[] = {
    {"open", "arrivals as recorded"},
    {"closed", "a turn follows its predecessor's end plus think time"},
};

inline constexpr Named kPricingPlans[] = {
    {"on_demand", "the list price"},
    {"capacity_block", "reserved GPU capacity for a number of days"},
    {"spot", "what is left over, and may be taken back"},
};

inline constexpr Named kFaultKinds[] = {
    {"worker_crash", "a worker dies with all it holds"},
    {"worker_restart", "a worker leaves and comes back empty"},
    {"link_down", "a link carries nothing"},
    {"link_degraded", "a link carries a part of its rate"},
    {"message_lost", "one message does not arrive"},
    {"backend_tcp", "transfers silently fall back to TCP"},
    {"router_restart", "the router forgets what it knew"},
    {"spot_reclaim", "a node is taken back after its notice"},
};

/// Element types; "auto" is what the model's own config says.
inline constexpr Named kWeightsDtypes[] = {
    {"auto", "as published"},
    {"bf16", "bfloat16"},
    {"fp16", "IEEE half"},
    {"fp32", "IEEE single"},
    {"fp8", "8-bit float, one scale a tensor"},
    {"fp8_block", "8-bit float, a scale for each 128 x 128 block"},
    {"nvfp4", "4-bit float in NVIDIA's format"},
    {"mxfp4", "4-bit float, a scale for each 32"},
    {"int8", "8-bit integer"},
    {"int4", "4-bit integer (AWQ, GPTQ)"},
};
inline constexpr Named kKvDtypes[] = {
    {"auto", "as the model computes"},
    {"bf16", "bfloat16"},
    {"fp16", "IEEE half"},
    {"fp8", "8-bit float"},
};

}  // namespace pdsim
