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
#include "sim/core/timeline.hpp"

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
enum class Reason : std::uint8_t {
  none,
  exceeds_max_model_len,
  exceeds_kv_cache,
  kv_lease_expired,
  kv_transfer_failed,
  kv_retention_expired,
  handshake_failed,
  decode_rejected,
  client_timeout,
  client_cancelled,
  session_failed,
  worker_lost,
};
inline constexpr std::array<std::string_view, 12> kReasonNames = {"",
                                                                  "exceeds_max_model_len",
                                                                  "exceeds_kv_cache",
                                                                  "kv_lease_expired",
                                                                  "kv_transfer_failed",
                                                                  "kv_retention_expired",
                                                                  "handshake_failed",
                                                                  "decode_rejected",
                                                                  "client_timeout",
                                                                  "client_cancelled",
                                                                  "session_failed",
                                                                  "worker_lost"};

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
  local_hit,          ///< prefill had it all in its own cache
  recompute_cheaper,  ///< reuse_policy cost
  prompt_changed,     ///< the prompt does not go on where the retained turn ended
};
inline constexpr std::array<std::string_view, 14> kReuseNames = {"",
                                                                 "hit",
                                                                 "hit_slower_than_recompute",
                                                                 "never_seen",
                                                                 "evicted",
                                                                 "ttl_expired",
                                                                 "router_unaware",
                                                                 "no_session",
                                                                 "below_threshold",
                                                                 "guard_declined",
                                                                 "load_failed",
                                                                 "local_hit",
                                                                 "recompute_cheaper",
                                                                 "prompt_changed"};

inline constexpr std::uint32_t kNoWorker = UINT32_MAX;

struct RequestRecord {
  Nanos arrival = 0;
  Nanos mark = 0;          ///< up to here its time is charged to stages
  Nanos first_token = -1;  ///< -1 = none
  Nanos end = -1;          ///< -1 = still in flight
  Nanos longest_gap = 0;   ///< between two of its tokens
  std::array<Nanos, kStageNames.size()> stages{};
  Bytes transfer_bytes = 0;  ///< from prefill to decode
  std::int64_t descriptors = 0;
  Bytes read_back_bytes = 0;  ///< from decode to prefill, before it
  Nanos predicted_read = -1;  ///< of retained KV, when that was decided on; -1 = nothing to decide
  Nanos predicted_compute = -1;
  Nanos read_took = -1;  ///< from its admission until the read was seen; -1 = none
  std::int32_t prompt_tokens = 0, output_tokens = 0;
  std::int32_t local_hit_tokens = 0;   ///< in the prefix cache of the worker that prefilled
  std::int32_t remote_hit_tokens = 0;  ///< read back before prefill
  std::int32_t decode_hit_tokens = 0;  ///< in the prefix cache of the decode worker
  std::int32_t transferred_tokens = 0;
  std::int32_t recomputed_tokens = 0;  ///< after preemptions, and prompt tails that decode computed again
  std::int32_t preemptions = 0, retries = 0;
  std::int32_t concurrency = 0;  ///< requests in flight when it arrived, itself not counted
  std::uint32_t prefill_worker = kNoWorker, decode_worker = kNoWorker;
  std::uint32_t reuse_worker = kNoWorker;  ///< decode worker whose retained KV prefill was told of
  RequestStatus status = RequestStatus::in_flight;
  Reason reason = Reason::none;
  Reuse reuse = Reuse::none;
  bool counted = false;      ///< inside the measuring window
  bool read_chosen = false;  ///< of the two predicted

  /// As charge(), where an overlapping stage may have come further already.
  void reach(Stage stage, Nanos until) {
    if (until > mark) charge(stage, until);
  }
  void charge(Stage stage, Nanos until) {
    PDSIM_CHECK(until >= mark, "a stage of a request would end before it began");
    stages[static_cast<std::size_t>(stage)] += until - mark;
    mark = until;
  }
  /// A posting was charged to its end; the request goes another way before that.
  void stop_posting(Nanos now) {
    if (mark <= now) return;
    stages[static_cast<std::size_t>(Stage::transfer_post)] -= mark - now;
    mark = now;
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
  /// Request-time in its queue: none, for a slot, for blocks, behind others, for blocks that only pins hold.
  std::array<Nanos, 5> waits{};
  std::int64_t preemptions = 0;
  std::uint64_t evicted_blocks = 0;
  double kv_usage_mean = 0, kv_usage_max = 0;
  std::int32_t kv_blocks = 0;
  Timeline blocks{4};  ///< over time: running, in transfer (parked for a load), leased, pinned
};
inline constexpr std::array<std::string_view, 4> kBlockCauses = {"running", "in_transfer", "leased",
                                                                 "pinned"};

struct LinkReport {
  std::string name;
  Bytes bytes = 0;
  double mean = 0, max = 0;  ///< utilisation of its line rate
};

/// How a hand-over ended, either way.
enum class TransferOutcome : std::uint8_t {
  completed,
  computed_by_decode,  ///< a full hit, or below pd_recompute_threshold
  source_lost,         ///< its lease or pin ran out, or it was let go of, before it had been read
  part_failed,
  dropped,         ///< push: prefill could not post, or has nothing left to post
  abandoned,       ///< the request ended before
  skipped,         ///< retained KV that was not read back
  guard_declined,  ///< retained KV that decode keeps for less than expiry_margin_s
};
inline constexpr std::array<std::string_view, 8> kTransferOutcomeNames = {
    "completed", "computed_by_decode", "source_lost", "part_failed",
    "dropped",   "abandoned",          "skipped",     "guard_declined"};

struct TransferTotals {
  std::int64_t count = 0, failed = 0, retried = 0;
  Bytes bytes = 0;
  std::int64_t descriptors = 0;
  std::int64_t read_backs = 0;  ///< decode to prefill: not in the three above
  Bytes read_back_bytes = 0;
  std::int64_t read_back_descriptors = 0;
  std::array<std::int64_t, kTransferOutcomeNames.size()> outcomes{};  ///< both ways
  std::array<std::int64_t, kTransferOutcomeNames.size()>
      read_back_outcomes{};  ///< of them, decode to prefill
  std::int64_t batches = 0;  ///< posts: a layer-wise or progressive push has several
  std::int64_t slow_posts = 0;
  std::int64_t stale_reads = 0, stale_reads_prevented = 0;
  std::int64_t stale_writes = 0, stale_writes_prevented = 0;
  std::int64_t watchdogs = 0;  ///< times that decode waited push_registration_timeout_s in vain
  std::int64_t messages_lost = 0;
  std::int64_t handshakes = 0;
  Nanos handshake_time = 0;
  std::vector<double> post_ms, wire_ms;
  double prefill_byte_seconds = 0;  ///< finished prompts' KV held for decode
  double decode_byte_seconds = 0;   ///< blocks allocated and waiting for their KV
  std::int64_t leases_expired = 0;
  std::int64_t leases_outstanding = 0;  ///< held when the last request ended
};

/// What bidirectional transfer kept on decode, and what came of it.
struct RetentionTotals {
  std::int64_t pins = 0;
  std::int64_t read = 0;         ///< freed because prefill has read them
  std::int64_t notified = 0;     ///< freed because prefill will not
  std::int64_t expired = 0;      ///< freed by time
  std::int64_t let_go = 0;       ///< freed, or cut to nothing, by the policy
  std::int64_t lost = 0;         ///< with their worker
  std::int64_t outstanding = 0;  ///< at the end of the run
  std::int64_t hit_tokens = 0;
  double byte_seconds = 0;
  double peak_bytes = 0;  ///< of one worker, all its GPUs
  std::int64_t admissions_delayed = 0;
  Nanos admission_delay = 0;         ///< of those, at the head of the queue
  Nanos queue_wait = 0;              ///< request-time of all the queue meanwhile
  double prefill_gpu_s_avoided = 0;  ///< predicted, of what was read instead
  double usd_avoided = -1;           ///< of those GPU seconds; -1 = no price
  double usd_held = -1;              ///< decode's GPUs, by the share of KV memory and time that pins took
};

/// What speculative decoding came to, all workers together.
struct Speculated {
  bool on = false;            ///< some pool speculates
  std::int64_t rows = 0;      ///< decode steps of sequences that verified drafts
  std::int64_t drafted = 0;   ///< drafts verified in them
  std::int64_t accepted = 0;  ///< of them
  std::int64_t yielded = 0;   ///< tokens that the sequences got
  std::int64_t rejected_tokens =
      0;  ///< computed in vain: rejected, beyond an end, of a sequence that had ended
  std::vector<std::int64_t> by_position;  ///< accepted, by position in a step
  std::vector<std::int64_t> drafted_at;   ///< and drafted
};

enum class RunStatus : std::uint8_t { finished, interrupted, stalled, abandoned };
inline constexpr std::array<std::string_view, 4> kRunStatusNames = {"finished", "interrupted", "stalled",
                                                                    "abandoned"};

/// Everything that a run measured, before it is summarised.
struct RunResult {
  RunStatus status = RunStatus::finished;
  std::string stall;                    ///< who waits for what, when stalled
  std::vector<RequestRecord> requests;  ///< by arrival
  Histogram gaps;                       ///< between tokens of counted requests
  std::vector<WorkerReport> workers;
  std::vector<LinkReport> links;
  TransferTotals transfers;
  RetentionTotals retention;
  Speculated speculated;
  bool hypothetical = false;  ///< a combination that no engine has
  std::int64_t crashes = 0;   ///< of workers
  std::int64_t extrapolated_steps = 0;
  Nanos end = 0;             ///< the last terminal request
  std::uint64_t events = 0;  ///< logical ones: the same with and without runs
  std::uint64_t queue_pops = 0;
};

}  // namespace pdsim
