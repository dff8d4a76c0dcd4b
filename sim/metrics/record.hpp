// What a run leaves behind: one record per request, and the totals that the summary is made from.
//
// Invariant: a request's stages sum to its end-to-end time to the nanosecond. It holds by construction:
// charge() gives a stage the time since the last charge and moves the mark.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/step_model.hpp"
#include "sim/core/error.hpp"
#include "sim/core/histogram.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

/// The stages of a request's own critical path, in their order in requests.csv.
enum class Stage : std::uint8_t {
  failed_attempts,
  router,
  prefill_queue,
  reuse_transfer,
  prefill,
  handoff_dispatch,
  decode_admission,
  transfer_post,
  transfer_wire,
  transfer_poll,
  first_token,
  decode,
};
inline constexpr std::array<std::string_view, 12> kStageNames = {
    "failed_attempts",  "router",        "prefill_queue", "reuse_transfer", "prefill",     "handoff_dispatch",
    "decode_admission", "transfer_post", "transfer_wire", "transfer_poll",  "first_token", "decode"};

enum class RequestStatus : std::uint8_t { in_flight, completed, rejected, failed, cancelled };
inline constexpr std::array<std::string_view, 5> kStatusNames = {"in_flight", "completed", "rejected",
                                                                 "failed", "cancelled"};

/// Why a request was rejected or failed.
enum class Reason : std::uint8_t { none, exceeds_max_model_len, exceeds_kv_cache, kv_lease_expired };
inline constexpr std::array<std::string_view, 4> kReasonNames = {"", "exceeds_max_model_len",
                                                                 "exceeds_kv_cache", "kv_lease_expired"};

/// What became of KV retained for a prompt on a decode worker; none without such retention.
enum class Reuse : std::uint8_t {
  none,
  hit,
  hit_slower_than_recompute,
  never_seen,
  evicted,
  ttl_expired,
  router_unaware,
  no_session,
  below_threshold,
  guard_declined,
  load_failed,
};
inline constexpr std::array<std::string_view, 11> kReuseNames = {"",
                                                                 "hit",
                                                                 "hit_slower_than_recompute",
                                                                 "never_seen",
                                                                 "evicted",
                                                                 "ttl_expired",
                                                                 "router_unaware",
                                                                 "no_session",
                                                                 "below_threshold",
                                                                 "guard_declined",
                                                                 "load_failed"};

inline constexpr std::uint32_t kNoWorker = UINT32_MAX;

struct RequestRecord {
  Nanos arrival = 0;
  Nanos mark = 0;          ///< up to here its time is charged to stages
  Nanos first_token = -1;  ///< -1 = none
  Nanos end = -1;          ///< -1 = still in flight
  Nanos longest_gap = 0;   ///< between two of its tokens
  std::array<Nanos, kStageNames.size()> stages{};
  Bytes transfer_bytes = 0;
  std::int64_t descriptors = 0;
  std::int32_t prompt_tokens = 0, output_tokens = 0;
  std::int32_t local_hit_tokens = 0;   ///< in the prefix cache of the worker that prefilled
  std::int32_t remote_hit_tokens = 0;  ///< read back before prefill
  std::int32_t decode_hit_tokens = 0;  ///< in the prefix cache of the decode worker
  std::int32_t transferred_tokens = 0;
  std::int32_t recomputed_tokens = 0;  ///< after preemptions, and prompt tails that decode computed again
  std::int32_t preemptions = 0, retries = 0;
  std::int32_t concurrency = 0;  ///< requests in flight when it arrived, itself not counted
  std::uint32_t prefill_worker = kNoWorker, decode_worker = kNoWorker;
  RequestStatus status = RequestStatus::in_flight;
  Reason reason = Reason::none;
  Reuse reuse = Reuse::none;
  bool counted = false;  ///< inside the measuring window

  void charge(Stage stage, Nanos until) {
    PDSIM_CHECK(until >= mark, "a stage of a request would end before it began");
    stages[static_cast<std::size_t>(stage)] += until - mark;
    mark = until;
  }
  Nanos e2e() const { return end - arrival; }
  bool has_tpot() const { return first_token >= 0 && output_tokens > 1; }
  /// (last token - first) / (output - 1), rounded to the nanosecond.
  Nanos tpot() const { return (end - first_token) / (output_tokens - 1); }
};

/// One worker over the whole run.
struct WorkerReport {
  std::string name;
  std::string role;
  std::int64_t steps = 0;
  Nanos busy = 0;
  Nanos posting = 0;
  Work work;                     ///< of one GPU
  double peak_flops_per_ns = 0;  ///< data sheet, of one GPU
  double peak_bytes_per_ns = 0;
  std::array<Nanos, 4> waits{};  ///< request-time in its queue: none, for a slot, for blocks, behind others
  std::int64_t preemptions = 0;
  std::uint64_t evicted_blocks = 0;
  double kv_usage_mean = 0, kv_usage_max = 0;
  std::int32_t kv_blocks = 0;
};

struct LinkReport {
  std::string name;
  Bytes bytes = 0;
  double mean = 0, max = 0;  ///< utilisation of its line rate
};

struct TransferTotals {
  std::int64_t count = 0, failed = 0, retried = 0;
  Bytes bytes = 0;
  std::int64_t descriptors = 0;
  std::vector<double> post_ms, wire_ms;
  double prefill_byte_seconds = 0;  ///< finished prompts' KV held for decode
  double decode_byte_seconds = 0;   ///< blocks allocated and waiting for their KV
  std::int64_t leases_expired = 0;
  std::int64_t leases_outstanding = 0;  ///< held when the last request ended
};

enum class RunStatus : std::uint8_t { finished, interrupted, stalled };
inline constexpr std::array<std::string_view, 3> kRunStatusNames = {"finished", "interrupted", "stalled"};

/// Everything that a run measured, before it is summarised.
struct RunResult {
  RunStatus status = RunStatus::finished;
  std::string stall;                    ///< who waits for what, when stalled
  std::vector<RequestRecord> requests;  ///< by arrival
  Histogram gaps;                       ///< between tokens of counted requests
  std::vector<WorkerReport> workers;
  std::vector<LinkReport> links;
  TransferTotals transfers;
  std::int64_t extrapolated_steps = 0;
  Nanos end = 0;             ///< the last terminal request
  std::uint64_t events = 0;  ///< logical ones: the same with and without runs
  std::uint64_t queue_pops = 0;
};

}  // namespace pdsim
