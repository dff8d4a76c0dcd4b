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

/// How prefill decides between reading back what decode retains and computing it again.
enum class ReusePolicy : std::uint8_t { threshold, cost };
inline constexpr Named kReusePolicies[] = {
    {"threshold", "at least kv_recompute_threshold tokens are read (vLLM)"},
    {"cost", "the cheaper by prediction: reading now, or computing at the present load"},
};

/// What decode lets go of when a finished turn's KV has been retained.
enum class Retention : std::uint8_t { ttl, lru, priority, belady };
inline constexpr Named kRetentions[] = {
    {"ttl", "pinned until read or decoder_kv_blocks_ttl has passed (vLLM)"},
    {"lru", "as ttl, and the oldest goes when a worker's retained KV exceeds the budget"},
    {"priority",
     "token ranges with a priority and a duration; the least go first, for the budget and for "
     "requests that lack blocks (TensorRT-LLM's KvCacheRetentionConfig, vLLM's proposals)"},
    {"belady",
     "the bound, as it knows the future: what a later turn will ask for is kept until it does; for the "
     "budget and for requests that lack blocks, what is asked for last goes first (Belady 1966; no "
     "engine's)"},
};

/// Operators whose kernel a scenario may choose: pools[].engine.kernels.
inline constexpr std::string_view kKernelOperators[] = {"gemm", "attention", "mla", "moe", "allreduce"};

enum class LengthDraw : std::uint8_t { pdsim, numpy };
inline constexpr Named kLengthDraws[] = {
    {"pdsim", "from the scenario's seed"},
    {"numpy", "as vllm bench serve --seed 0 draws them"},
};

inline constexpr Named kFloat32Precisions[] = {
    {"highest", "products in 32 bits without tensor cores"},
    {"high", "TF32 tensor cores"},
};

enum class CudagraphMode : std::uint8_t { full_and_piecewise, piecewise, none };
inline constexpr Named kCudagraphModes[] = {
    {"full_and_piecewise", "steps of decode alone are one graph, others a graph between attentions"},
    {"piecewise", "every step is launched in pieces between attentions (vLLM up to 0.10)"},
    {"none", "every kernel is launched by the host"},
};

enum class LeaseReaper : std::uint8_t { in_order, all };
inline constexpr Named kLeaseReapers[] = {
    {"in_order", "stops at the first lease, by age, that has not run out (vLLM: vllm#58222)"},
    {"all", "looks at every lease"},
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
    {"mooncake", "Mooncake Transfer Engine over RoCE", 370 * kMicrosecond, 690,
     "0.37 ms of set-up fitted to its vLLM 1P1D transfers; 5.2 against 2.1 ms for 4,563 against 70 "
     "descriptors"},
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

enum class FaultKind : std::uint8_t {
  worker_crash,
  worker_restart,
  link_down,
  link_degraded,
  message_lost,
  transfer_failed,
  client_cancel,
  decode_rejection,
  backend_tcp,
  router_restart,
  spot_reclaim,
};
inline constexpr Named kFaultKinds[] = {
    {"worker_crash", "a worker dies with all it holds"},
    {"worker_restart", "a worker leaves and comes back empty"},
    {"link_down", "a link carries nothing"},
    {"link_degraded", "a link carries a part of its rate"},
    {"message_lost",
     "one message does not arrive; target: registration, completion, read_done, heartbeat, "
     "handshake or router_update"},
    {"transfer_failed", "one part of a transfer fails when it is posted"},
    {"client_cancel", "a client goes away; target: a request's number, proxy_window, or any"},
    {"decode_rejection", "a decode worker refuses a request as it arrives"},
    {"backend_tcp", "transfers silently fall back to TCP"},
    {"router_restart", "the router forgets what it knew"},
    {"spot_reclaim", "a node is taken back after its notice"},
};

/// What a message_lost fault can take.
enum class Message : std::uint8_t {
  registration,
  completion,
  read_done,
  heartbeat,
  handshake,
  router_update
};
inline constexpr Named kMessages[] = {
    {"registration", "push: decode's blocks, to prefill"},
    {"completion", "push: prefill's writes have arrived, to decode"},
    {"read_done", "pull: decode has read, to prefill; bidirectional: the other way"},
    {"heartbeat", "decode's renewal of its leases"},
    {"handshake", "the answer to a first contact"},
    {"router_update", "bidirectional: where a finished turn's KV is, to the router"},
};

/// Who drafts tokens for speculative decoding, as vLLM's speculative_config names it.
enum class SpeculativeMethod : std::uint8_t { mtp, eagle, eagle3, ngram, draft_model };
inline constexpr Named kSpeculativeMethods[] = {
    {"mtp", "the model's own multi-token-prediction layer, once a draft"},
    {"eagle", "a dense layer on the model's last hidden state, once a draft"},
    {"eagle3", "the same on three hidden states"},
    {"ngram", "what followed the last tokens earlier in the text, found by the host"},
    {"draft_model", "another model, once a draft"},
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
