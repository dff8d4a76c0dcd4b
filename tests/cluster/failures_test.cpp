// What breaks, and what the real system then does: a test for each failure semantic of the hand-over, with
// the number that kv-transfer facts give it (section 4). Where a block stays held, by whom and until when is
// read from the workers' timelines: block-nanoseconds are exact, so "63 blocks from here to there and nothing
// else" is an equation. Prefill and decode sleep while they have no request and then see nothing, as vLLM's
// engines do; small requests keep them awake: ticks.
#include <gtest/gtest.h>

#include <utility>

#include "sim/core/random.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

enum Cause : std::size_t { kRunning, kInTransfer, kLeased, kPinned };  // as kBlockCauses
constexpr std::size_t kP = 0, kD = 1;                                  // workers of kOneEach
constexpr std::int32_t kPrompt = 1000, kBlocks = 63;                   // of 16 tokens

/// One prefill and one decode worker that have met. Prompts of fewer than 100 tokens are decode's own.
const Sets kPair = with(kOneEach, {"transfer.warm_start=true", "router.local_prefill_threshold=100"});

FaultConfig fault_at(Nanos at, const std::string& kind, const std::string& target = "", Nanos duration = 0) {
  FaultConfig fault;
  fault.kind =
      static_cast<FaultKind>(std::ranges::find(kFaultKinds, kind, &Named::name) - std::begin(kFaultKinds));
  fault.target = target;
  fault.at = at;
  fault.duration = duration;
  return fault;
}

Outcomes run_with(const Trace& trace, const Sets& sets, const std::vector<FaultConfig>& faults = {}) {
  LoadedScenario loaded = parse_scenario(kDisaggregated, "test.json", "", with(kPair, sets));
  loaded.scenario.faults = faults;
  Outcomes o = run_loaded(hop_alone(std::move(loaded)), trace);
  const bool cut_off = std::ranges::any_of(o.run.requests, [](const RequestRecord& r) {
    return r.status != RequestStatus::completed && r.first_token >= 0;  // its tokens are in run.gaps
  });
  if (!cut_off) expect_conserved(o, trace);
  // Byte-seconds are the timelines' blocks, in bytes: what is outstanding counts until the run's end.
  double leased = 0, pinned = 0;
  for (std::size_t w = 0; w < o.run.workers.size(); ++w) {
    const WorkerPlan& plan = o.deployment.workers[w];
    const double bytes = o.deployment.pools[static_cast<std::size_t>(plan.pool)].kv_bytes_per_block *
                         static_cast<double>(plan.gpus.size()) / 1e9;
    leased += bytes * static_cast<double>(o.run.workers[w].blocks.total(kLeased));
    pinned += bytes * static_cast<double>(o.run.workers[w].blocks.total(kPinned));
  }
  EXPECT_NEAR(o.run.transfers.prefill_byte_seconds, leased, 1e-9 * leased);
  EXPECT_NEAR(o.run.retention.byte_seconds, pinned, 1e-9 * pinned);
  return o;
}

/// `requests`, and between them prompts that ask for nothing and wake prefill: at 0, so that this is when
/// the trace begins, and every `every` from `from` to `until`.
Trace with_ticks(std::vector<Request> requests, Nanos from, Nanos until, Nanos every) {
  requests.push_back(request_at(0, 16, 0));
  for (Nanos t = from; t <= until; t += every) requests.push_back(request_at(t, 16, 0));
  std::ranges::stable_sort(requests, {}, &Request::arrival);
  return made_trace(std::move(requests));
}

/// The record of the request that arrived at `arrival`.
const RequestRecord& at(const Outcomes& o, Nanos arrival) {
  const auto found = std::ranges::find(o.run.requests, arrival, &RequestRecord::arrival);
  EXPECT_NE(found, o.run.requests.end());
  return *found;
}

std::int64_t block_ns(const Outcomes& o, std::size_t worker, Cause cause) {
  return static_cast<std::int64_t>(o.run.workers[worker].blocks.total(cause));
}

/// When prefill gave its answer: all earlier stages are prefill's and the router's.
Nanos prefilled(const RequestRecord& r) {
  return r.arrival + stage(r, Stage::router) + stage(r, Stage::prefill_queue) +
         stage(r, Stage::reuse_transfer) + stage(r, Stage::prefill);
}

/// When the first tick at or after `time` is delivered: the next boundary of a sleeping prefill worker.
Nanos next_tick(const Outcomes& o, Nanos time) {
  for (const RequestRecord& r : o.run.requests) {
    const Nanos seen = r.arrival + o.loaded.scenario.router.hop;
    if (r.output_tokens == 0 && seen >= time) return seen;
  }
  ADD_FAILURE() << "no tick after " << time;
  return 0;
}

/// Block-nanoseconds that a push keeps in transfer, from decode's first boundary after the delivery of its
/// leg (at once, or, where parked blocks of others keep it awake, an empty step after `awake`) until its
/// first step on them.
std::int64_t own_transfer(const Outcomes& o, const RequestRecord& r, Nanos awake = -1) {
  const Nanos from = r.arrival + o.loaded.scenario.router.hop;
  const Nanos idle = o.deployment.pools[1].engine.idle_step;
  return (r.prompt_tokens + 15) / 16 *
         (r.first_token - stage(r, Stage::first_token) - (awake < 0 ? from : on_grid(awake, idle, from)));
}

/// Everybody but those who arrived at the times given has completed.
void expect_others_complete(const Outcomes& o, const std::vector<Nanos>& failed) {
  for (const RequestRecord& r : o.run.requests) {
    const bool meant = std::ranges::find(failed, r.arrival) != failed.end();
    EXPECT_EQ(r.status == RequestStatus::completed, !meant) << "arrived at " << r.arrival;
  }
}

// ------------------------------------------------------------------------- leases that run out (4, 5, 8)

// Decode serves one request at a time: what arrives while it answers a short prompt at length waits for a
// slot, and prefill's blocks wait with it.
const Sets kOneSlot = {"pools.decode.engine.max_num_seqs=1"};
// Before vllm#41383 nobody renewed a lease.
const Sets kNoHeartbeats = {"transfer.heartbeat_interval_s=100000", "transfer.heartbeat_extension_s=0.001"};
constexpr Nanos kArrival = 100 * kMillisecond + 7;

Trace behind_another(std::int32_t answer, Nanos ticks_until) {
  return with_ticks({request_at(0, 64, answer), request_at(kArrival, kPrompt, 20)}, kSecond / 2, ticks_until,
                    50 * kMillisecond);
}

// 8 (aws-do-eks#84, vllm#52234): the queue outlasts the lease, prefill frees, and decode reads what is
// another's by now. pdsim's guard tells; decode's poll after the step that should have posted sees a failed
// load, and policy fail ends the request there.
TEST(Lease, RunsOutBeforeTheReadAndTheRequestFails) {
  const Trace trace = behind_another(500, 2 * kSecond);
  const Outcomes o = run_with(trace, with(with(kOneSlot, kNoHeartbeats), {"transfer.kv_lease_duration_s=1"}));
  const RequestRecord &before = o.run.requests[0], &r = at(o, kArrival);
  EXPECT_EQ(r.status, RequestStatus::failed);
  EXPECT_EQ(r.reason, Reason::kv_lease_expired);
  EXPECT_GT(before.end, prefilled(r) + kSecond);
  // It gets the slot when the other ends; an empty step later the failure is known.
  const Nanos idle = o.deployment.pools[1].engine.idle_step;
  EXPECT_EQ(r.end, before.end + idle);
  EXPECT_EQ(block_ns(o, kD, kInTransfer), kBlocks * idle);
  EXPECT_EQ(block_ns(o, kP, kLeased), kBlocks * (next_tick(o, prefilled(r) + kSecond) - prefilled(r)));
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(o.run.transfers.leases_outstanding, 0);
  EXPECT_EQ(o.run.transfers.stale_reads_prevented, 1);
  EXPECT_EQ(o.run.transfers.stale_reads, 0);
  EXPECT_EQ(o.run.transfers.bytes, 0);
  EXPECT_EQ(outcome(o.run, TransferOutcome::source_lost), 1);
  expect_others_complete(o, {kArrival});
}

// Policy recompute: decode computes the prompt itself, in the blocks that it has.
TEST(Lease, RunsOutAndDecodeRecomputes) {
  const Trace trace = behind_another(500, 2 * kSecond);
  const Outcomes o =
      run_with(trace, with(with(kOneSlot, kNoHeartbeats),
                           {"transfer.kv_lease_duration_s=1", "transfer.kv_load_failure_policy=recompute"}));
  const RequestRecord &before = o.run.requests[0], &r = at(o, kArrival);
  const PoolPlan& decode = o.deployment.pools[1];
  EXPECT_EQ(r.status, RequestStatus::completed);
  EXPECT_EQ(r.recomputed_tokens, kPrompt);
  EXPECT_EQ(r.transferred_tokens, 0);
  EXPECT_EQ(r.first_token, before.end + decode.engine.idle_step + prefill_time(decode, kPrompt));
  EXPECT_EQ(stage(r, Stage::first_token), 0);
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(o.run.transfers.stale_reads_prevented, 1);
  EXPECT_EQ(o.run.transfers.failed, 1);
  expect_others_complete(o, {});
}

// The engines have no such guard: HTTP 200, and the answer to somebody else's prompt.
TEST(Lease, WithoutTheGuardTheReadIsStaleAndNobodyNotices) {
  const Trace trace = behind_another(500, 2 * kSecond);
  const Outcomes o = run_with(trace, with(with(kOneSlot, kNoHeartbeats),
                                          {"transfer.kv_lease_duration_s=1", "transfer.stale_guard=false"}));
  EXPECT_EQ(at(o, kArrival).transferred_tokens, kPrompt);
  EXPECT_EQ(o.run.transfers.stale_reads, 1);
  EXPECT_EQ(o.run.transfers.stale_reads_prevented, 0);
  EXPECT_EQ(o.run.transfers.failed, 0);
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  expect_others_complete(o, {});
}

// A sweep of leases over one queue: exactly those whose wait is longer read freed blocks, so the count falls
// with the lease and is zero beyond the longest wait. Heartbeats make it zero at any lease.
const Sets kOnePrompt = {"pools.decode.engine.num_gpu_blocks_override=80",
                         "pools.decode.engine.max_model_len=1200"};

TEST(Lease, StaleReadsFallAsLeasesGrow) {
  std::vector<Request> requests = {request_at(0, 64, 500)};
  for (int i = 0; i < 8; ++i) requests.push_back(request_at(kArrival + i, kPrompt, 100));
  const Trace trace = with_ticks(requests, kSecond / 2, 6 * kSecond, 10 * kMillisecond);
  std::int64_t last = 9;
  for (const Nanos lease : {kSecond, 3 * kSecond, 4 * kSecond, 30 * kSecond}) {
    const std::string s = std::to_string(lease / kSecond);
    const Outcomes o =
        run_with(trace, with(with(kOnePrompt, kNoHeartbeats),
                             {"transfer.kv_lease_duration_s=" + s, "transfer.stale_guard=false"}));
    std::int64_t late = 0;
    for (const RequestRecord& r : o.run.requests) {
      const Nanos waits = stage(r, Stage::handoff_dispatch) + stage(r, Stage::decode_admission);
      EXPECT_TRUE(waits < lease || waits > lease + 20 * kMillisecond) << "too close to call";
      late += waits > lease ? 1 : 0;
    }
    EXPECT_EQ(o.run.transfers.stale_reads, late) << s;
    EXPECT_LT(late, last) << s;
    last = late;
    const Outcomes renewed = run_with(
        trace, with(kOnePrompt, {"transfer.kv_lease_duration_s=" + s, "transfer.stale_guard=false"}));
    EXPECT_EQ(renewed.run.transfers.stale_reads + renewed.run.transfers.leases_expired, 0) << s;
  }
  EXPECT_EQ(last, 0);
}

// Each renewal lost counts as such; with the one that mattered gone the lease runs out under the queue.
TEST(Lease, LostHeartbeatsLetItRunOut) {
  const Trace trace = behind_another(500, 3 * kSecond);
  const std::vector<FaultConfig> lose(40, fault_at(0, "message_lost", "heartbeat"));
  const Sets sets = with(kOneSlot, {"transfer.kv_lease_duration_s=1"});
  const Outcomes kept = run_with(trace, sets), lost = run_with(trace, sets, lose);
  EXPECT_EQ(kept.run.transfers.leases_expired, 0);
  EXPECT_EQ(at(kept, kArrival).status, RequestStatus::completed);
  EXPECT_EQ(lost.run.transfers.leases_expired, 1);
  EXPECT_EQ(at(lost, kArrival).reason, Reason::kv_lease_expired);
  // One a sixth of a second while the request is in decode's scheduler, and the first at once.
  const RequestRecord& r = at(lost, kArrival);
  const Nanos tracked = r.end - prefilled(r), interval = kSecond / 6;
  EXPECT_NEAR(static_cast<double>(lost.run.transfers.messages_lost),
              static_cast<double>(tracked) / static_cast<double>(interval), 1.5);
}

// A notification that decode has read is lost: prefill keeps the blocks for the whole lease, and frees them.
TEST(Lease, HoldsWhatALostNotificationWouldHaveFreed) {
  const Trace trace =
      with_ticks({request_at(kArrival, kPrompt, 20)}, kSecond, 4 * kSecond, 50 * kMillisecond);
  const Sets sets = {"transfer.kv_lease_duration_s=2"};
  const Outcomes lost = run_with(trace, sets, {fault_at(0, "message_lost", "read_done")});
  const RequestRecord& r = at(lost, kArrival);
  EXPECT_EQ(r.status, RequestStatus::completed);
  // Its heartbeats end when it is loaded, and only they could have made it longer.
  EXPECT_EQ(block_ns(lost, kP, kLeased),
            kBlocks * (next_tick(lost, prefilled(r) + 2 * kSecond) - prefilled(r)));
  EXPECT_EQ(lost.run.transfers.leases_expired, 1);
  EXPECT_EQ(lost.run.transfers.messages_lost, 1);
  EXPECT_EQ(run_with(trace, sets).run.transfers.leases_expired, 0);
}

// 4 (vllm#53095): push has no heartbeats that renew. Decode's queue outlasts 30 s, prefill's blocks are
// gone, "retrieved by 0", and what decode then registers is never written: it waits in its blocks until the
// client gives up, and they stay parked after that. Pull's lease is renewed meanwhile.
TEST(Lease, PushIsNotRenewedInDecodesQueue) {
  const Trace trace = with_ticks(
      {request_at(0, 64, 8000), request_at(kArrival, kPrompt, 20), request_at(100 * kSecond, kPrompt, 20)},
      25 * kSecond, 35 * kSecond, 100 * kMillisecond);
  const Sets sets =
      with(kOneSlot, {"workload.client_timeout_s=60", "transfer.push_registration_timeout_s=5"});
  const Outcomes push = run_with(trace, with(sets, {"transfer.mode=push"}));
  const RequestRecord &before = push.run.requests[0], &r = at(push, kArrival);
  EXPECT_EQ(r.reason, Reason::client_timeout);
  EXPECT_EQ(r.e2e(), 60 * kSecond);
  EXPECT_GT(before.end, 31 * kSecond);
  EXPECT_EQ(push.run.transfers.leases_expired, 1);
  EXPECT_EQ(push.run.transfers.watchdogs, 1);
  EXPECT_EQ(outcome(push.run, TransferOutcome::dropped), 1);
  EXPECT_EQ(block_ns(push, kP, kLeased) - block_ns(push, kP, kLeased) % kBlocks, block_ns(push, kP, kLeased));
  // Parked from the slot on, to the end of the run; the last request has its own besides.
  const RequestRecord& last = at(push, 100 * kSecond);
  EXPECT_EQ(last.status, RequestStatus::completed);
  EXPECT_EQ(block_ns(push, kD, kInTransfer),
            kBlocks * (push.run.end - before.end) + own_transfer(push, last, before.end));
  expect_others_complete(push, {kArrival});

  const Outcomes pull = run_with(trace, sets);
  EXPECT_EQ(pull.run.transfers.leases_expired, 0);
  expect_others_complete(pull, {});
}

// 5 (vllm#58222): the reaper stops at the first lease that has not run out. A head that heartbeats renew
// strands those behind it, refused by decode and long expired, until it is read itself; a reaper that looks
// at all of them frees them at 30 s.
TEST(Lease, AHeartbeatedHeadStrandsThoseBehindIt) {
  const Nanos refused = 2 * kSecond;
  const Trace trace = with_ticks({request_at(0, 64, 12'000), request_at(kArrival, kPrompt, 20),
                                  request_at(refused, kPrompt, 20), request_at(refused + 1, kPrompt, 20)},
                                 5 * kSecond, 70 * kSecond, 100 * kMillisecond);
  const std::vector<FaultConfig> refuse(2, fault_at(refused, "decode_rejection"));
  for (const bool in_order : {true, false}) {
    const Outcomes o = run_with(
        trace, with(kOneSlot, {std::string("transfer.lease_reaper=") + (in_order ? "in_order" : "all")}),
        refuse);
    const RequestRecord &before = o.run.requests[0], &head = at(o, kArrival);
    EXPECT_EQ(head.status, RequestStatus::completed);
    EXPECT_EQ(o.run.transfers.leases_expired, 2);
    EXPECT_GT(before.end, 45 * kSecond);
    // Head: until decode has read it; prefill sees that at its next tick.
    const Nanos read = next_tick(o, head.first_token);
    std::int64_t held = read - prefilled(head);
    for (const Nanos arrival : {refused, refused + 1}) {
      const Nanos since = prefilled(at(o, arrival)), expired = next_tick(o, since + 30 * kSecond);
      EXPECT_LT(expired, read);
      held += (in_order ? read : expired) - since;
    }
    EXPECT_EQ(block_ns(o, kP, kLeased), kBlocks * held);
    expect_others_complete(o, {refused, refused + 1});
  }
}

// 7 (vllm#41383, #38027): decode dies. Nobody tells prefill: with the single timeout of 480 s of old its
// blocks are lost for minutes, with leases of 30 s until 20 s after the last heartbeat.
TEST(Lease, DecodeDiesAndPrefillKeepsTheBlocks) {
  const Nanos crash = 40 * kSecond;
  const Trace trace = with_ticks({request_at(1, 64, 20'000), request_at(kArrival, kPrompt, 20)}, kSecond / 4,
                                 490 * kSecond, kSecond / 2);
  for (const bool old : {true, false}) {
    const Sets sets = old ? with(kNoHeartbeats, {"transfer.kv_lease_duration_s=480"}) : Sets{};
    const Outcomes o =
        run_with(trace, with(kOneSlot, sets), {fault_at(crash, "worker_crash", "decode-0", kSecond / 10)});
    const RequestRecord& r = at(o, kArrival);
    for (const RequestRecord* lost : {&at(o, 1), &r}) {
      EXPECT_EQ(lost->reason, Reason::worker_lost);
      EXPECT_EQ(lost->end, crash);
    }
    EXPECT_GT(stage(r, Stage::decode_admission), 39 * kSecond);
    EXPECT_EQ(stage(at(o, 1), Stage::decode) + at(o, 1).first_token, crash);
    const Nanos freed = prefilled(r) + block_ns(o, kP, kLeased) / kBlocks;
    if (old) {
      EXPECT_EQ(freed, next_tick(o, prefilled(r) + 480 * kSecond));
    } else {
      EXPECT_GE(freed, crash + 15 * kSecond);
      EXPECT_LE(freed, crash + 21 * kSecond);
    }
    EXPECT_EQ(o.run.transfers.leases_expired, 1);
    EXPECT_EQ(o.run.crashes, 1);
    expect_others_complete(o, {1, kArrival});
  }
}

// ------------------------------------------------------------------------ push: nobody tells decode (1-3)

const Sets kPush = {"transfer.mode=push"};
const Sets kPushPatience =
    with(kPush, {"workload.client_timeout_s=5", "transfer.push_registration_timeout_s=1",
                 "transfer.kv_lease_duration_s=2"});

/// The request at kArrival, ticks, and another like it that shows that things go on.
Trace and_another(std::int32_t prompt, Nanos then) {
  return with_ticks({request_at(kArrival, prompt, 20), request_at(then, kPrompt, 20)}, kSecond,
                    then - kSecond, 50 * kMillisecond);
}

// 2 (vllm#48633 C1): the client goes before decode has blocks: it queues. There is nothing to park; prefill,
// done already, is not told and keeps its blocks for the lease.
TEST(Push, AbortBeforeRegistration) {
  const Trace trace = with_ticks(
      {request_at(0, 64, 500), request_at(kArrival, kPrompt, 20), request_at(10 * kSecond, kPrompt, 20)},
      kSecond, 4 * kSecond, 50 * kMillisecond);
  const Outcomes o = run_with(trace, with(with(kPushPatience, kOneSlot), {"workload.client_timeout_s=0"}),
                              {fault_at(kSecond, "client_cancel", "2")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.status, RequestStatus::cancelled);
  EXPECT_EQ(r.reason, Reason::client_cancelled);
  EXPECT_EQ(r.end, kSecond);
  EXPECT_GT(stage(r, Stage::decode_admission), 800 * kMillisecond);
  EXPECT_EQ(block_ns(o, kD, kInTransfer), own_transfer(o, next));
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(o.run.transfers.watchdogs, 0);
  EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), 1);
  expect_others_complete(o, {kArrival});
}

// 2: after registration, while prefill computes. The client's connection ends both legs; prefill has nothing
// to write any more, and decode's blocks wait for a write that never comes.
TEST(Push, AbortAfterRegistrationParksBlocksForEver) {
  const Trace trace = and_another(20'000, 10 * kSecond);
  const Nanos cancel = kArrival + 300 * kMillisecond;
  const Outcomes o = run_with(trace, kPush, {fault_at(cancel, "client_cancel", "1")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.end, cancel);
  EXPECT_EQ(stage(r, Stage::prefill), cancel - kArrival - o.loaded.scenario.router.hop);
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  EXPECT_EQ(block_ns(o, kD, kInTransfer),
            1250 * (o.run.end - registered) + own_transfer(o, next, registered));
  EXPECT_EQ(o.run.transfers.bytes, next.transfer_bytes);
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_EQ(outcome(o.run, TransferOutcome::completed), 1);
  expect_others_complete(o, {kArrival});
}

// 2: while the write is under way (vllm#32255): parked until it has landed and decode's poll has seen it.
TEST(Push, AbortDuringTheWriteParksBlocksUntilItLands) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Sets slow = with(kPush, {"transfer.post_us_per_descriptor=10000"});  // 64 descriptors: 640 ms
  const Outcomes whole = run_with(trace, slow);
  const RequestRecord& like = at(whole, kArrival);
  const Nanos landed = like.first_token - stage(like, Stage::first_token) - stage(like, Stage::transfer_poll);
  const Nanos seen = like.first_token - stage(like, Stage::first_token);
  const Nanos cancel = landed - 200 * kMillisecond;
  ASSERT_GT(cancel, prefilled(like) + 100 * kMillisecond);
  const Outcomes o = run_with(trace, slow, {fault_at(cancel, "client_cancel", "1")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.end, cancel);
  EXPECT_EQ(r.status, RequestStatus::cancelled);
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  const Nanos idle = o.deployment.pools[1].engine.idle_step;
  const Nanos held = (block_ns(o, kD, kInTransfer) - own_transfer(o, next)) / kBlocks;
  EXPECT_GE(registered + held, landed);
  EXPECT_LE(registered + held, std::max(seen, landed + idle));
  EXPECT_EQ(o.run.transfers.leases_expired, 0);  // prefill's poll has seen its own write
  EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), 1);
  expect_others_complete(o, {kArrival});
}

// 1 (vllm#46283): prefill dies after decode has registered, again and again. Each time decode's blocks are
// parked for good: a leak that only grows, until nothing is admitted any more. Pull leaks nothing: decode
// has allocated nothing by then.
TEST(Push, PrefillDiesAfterRegistrationAndDecodeLeaks) {
  std::vector<Request> requests;
  std::vector<FaultConfig> faults;
  std::vector<Nanos> lost;
  for (int i = 0; i < 5; ++i) {
    requests.push_back(request_at(i * kSecond, kPrompt, 20));
    faults.push_back(
        fault_at(i * kSecond + 5 * kMillisecond, "worker_crash", "prefill-0", 100 * kMillisecond));
    lost.push_back(i * kSecond);
  }
  requests.push_back(request_at(10 * kSecond, kPrompt, 20));
  const Trace trace = made_trace(requests);
  // Room for five prompts of 63 blocks and a sixth's first 15; one block is vLLM's null block.
  const Sets sets = {"pools.decode.engine.num_gpu_blocks_override=331", "workload.client_timeout_s=20",
                     "pools.decode.engine.max_model_len=4096"};
  const Outcomes push = run_with(trace, with(kPush, sets), faults);
  const Nanos hop = push.loaded.scenario.router.hop;
  std::int64_t leaked = 0;
  for (const Nanos arrival : lost) {
    const RequestRecord& r = at(push, arrival);
    EXPECT_EQ(r.reason, Reason::worker_lost);
    EXPECT_EQ(r.end, arrival + 5 * kMillisecond);
    EXPECT_EQ(stage(r, Stage::prefill), 5 * kMillisecond - hop);
    leaked += kBlocks * (push.run.end - arrival - hop);
  }
  EXPECT_EQ(block_ns(push, kD, kInTransfer), leaked);
  EXPECT_EQ(push.run.crashes, 5);
  const RequestRecord& starved = at(push, 10 * kSecond);
  EXPECT_EQ(starved.reason, Reason::client_timeout);
  EXPECT_EQ(starved.e2e(), 20 * kSecond);
  EXPECT_GT(stage(starved, Stage::decode_admission), 19 * kSecond);

  const Outcomes pull = run_with(trace, sets, faults);
  EXPECT_EQ(at(pull, 10 * kSecond).status, RequestStatus::completed);
  EXPECT_LT(block_ns(pull, kD, kInTransfer), kBlocks * kSecond);  // the new contact takes most of it
  expect_others_complete(pull, lost);
}

// Behind a sequential router prefill dies while its answer is on its way: decode allocates, cannot reach it,
// and waits for its client as before.
TEST(Push, PrefillDiesBeforeDecodeHearsOfIt) {
  const Trace trace = with_ticks({request_at(kArrival, kPrompt, 20), request_at(10 * kSecond, kPrompt, 20)},
                                 2 * kSecond, 9 * kSecond, 50 * kMillisecond);
  const Sets sets = with(kPushPatience, {"router.sequential_dispatch=true"});
  const Nanos crash = prefilled(at(run_with(trace, sets), kArrival)) + 100 * kMicrosecond;
  const Outcomes o = run_with(trace, sets, {fault_at(crash, "worker_crash", "prefill-0", kSecond / 2)});
  const RequestRecord& r = at(o, kArrival);
  EXPECT_EQ(r.reason, Reason::client_timeout);
  EXPECT_EQ(r.e2e(), 5 * kSecond);
  EXPECT_EQ(o.run.transfers.watchdogs, 1);
  EXPECT_EQ(outcome(o.run, TransferOutcome::dropped), 1);
  expect_others_complete(o, {kArrival});
}

// A registration that is lost: prefill has blocks and no address until its lease runs out, decode an address
// and no blocks. The watchdog drops the registration and no more: the request ends with its client's
// patience.
TEST(Push, LostRegistrationHangsUntilTheClientGivesUp) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Outcomes o = run_with(trace, kPushPatience, {fault_at(0, "message_lost", "registration")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.reason, Reason::client_timeout);
  EXPECT_EQ(r.e2e(), 5 * kSecond);
  EXPECT_EQ(o.run.transfers.messages_lost, 1);
  EXPECT_EQ(o.run.transfers.watchdogs, 1);
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(outcome(o.run, TransferOutcome::dropped), 1);
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  EXPECT_EQ(block_ns(o, kD, kInTransfer),
            kBlocks * (o.run.end - registered) + own_transfer(o, next, registered));
  EXPECT_GE(block_ns(o, kP, kLeased), kBlocks * (next_tick(o, prefilled(r) + 2 * kSecond) - prefilled(r)));
  expect_others_complete(o, {kArrival});
}

// The notification that all has been written is lost: the KV is there and decode does not know. Prefill has
// polled its own handles and is free of it.
TEST(Push, LostCompletionHangsUntilTheClientGivesUp) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Outcomes o = run_with(trace, kPushPatience, {fault_at(0, "message_lost", "completion")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.reason, Reason::client_timeout);
  EXPECT_EQ(r.e2e(), 5 * kSecond);
  EXPECT_GT(stage(r, Stage::transfer_poll), 4 * kSecond);
  EXPECT_EQ(o.run.transfers.messages_lost, 1);
  EXPECT_EQ(o.run.transfers.watchdogs, 1);
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), 1);
  EXPECT_EQ(r.transfer_bytes, next.transfer_bytes);
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  EXPECT_EQ(block_ns(o, kD, kInTransfer),
            kBlocks * (o.run.end - registered) + own_transfer(o, next, registered));
  expect_others_complete(o, {kArrival});
}

// 3 (vllm#50754): one of n writes cannot be posted. Prefill logs it and drops the request; decode counts to
// n - 1 and waits. Prefill's blocks stay for the lease.
TEST(Push, OneOfTwoPartsFailsAndDecodeWaits) {
  // 640 ms of posting, longer than the lease, which can end when the writing has.
  const Sets two = {"pools.prefill.tensor_parallel=2", "pools.decode.tensor_parallel=2",
                    "transfer.post_us_per_descriptor=10000", "transfer.kv_lease_duration_s=0.4"};
  const Trace trace = with_ticks({request_at(kArrival, kPrompt, 20), request_at(10 * kSecond, kPrompt, 20)},
                                 kSecond / 4, 9 * kSecond, 50 * kMillisecond);
  const RequestRecord like = at(run_with(trace, with(kPushPatience, two)), kArrival);
  const Nanos landed = like.first_token - stage(like, Stage::first_token) - stage(like, Stage::transfer_poll);
  const Outcomes o = run_with(trace, with(kPushPatience, two), {fault_at(0, "transfer_failed")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.reason, Reason::client_timeout);
  EXPECT_EQ(r.e2e(), 5 * kSecond);
  EXPECT_EQ(o.run.transfers.watchdogs, 1);
  EXPECT_EQ(outcome(o.run, TransferOutcome::part_failed), 1);
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(block_ns(o, kP, kLeased) - kBlocks * (o.run.end - prefilled(next)),
            kBlocks * (next_tick(o, landed) - prefilled(r)));
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  EXPECT_EQ(block_ns(o, kD, kInTransfer),
            kBlocks * (o.run.end - registered) + own_transfer(o, next, registered));
  expect_others_complete(o, {kArrival});
}

// With PUSH_FAIL decode knows one notification later: when the other part has stopped, as vllm#56104 has it.
TEST(Push, OneOfTwoPartsFailsAndPushFailTellsDecode) {
  const Sets two = {"pools.prefill.tensor_parallel=2", "pools.decode.tensor_parallel=2",
                    "transfer.push_fail=true"};
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Outcomes whole = run_with(trace, with(kPushPatience, two));
  const RequestRecord& like = at(whole, kArrival);
  const Nanos landed = like.first_token - stage(like, Stage::first_token) - stage(like, Stage::transfer_poll);
  for (const bool recompute : {false, true}) {
    const Outcomes o =
        run_with(trace,
                 with(with(kPushPatience, two),
                      {std::string("transfer.kv_load_failure_policy=") + (recompute ? "recompute" : "fail")}),
                 {fault_at(0, "transfer_failed")});
    const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
    const Nanos registered = kArrival + o.loaded.scenario.router.hop;
    // Decode takes empty steps since the one in which it registered.
    const Nanos idle = o.deployment.pools[1].engine.idle_step;
    const Nanos known = on_grid(registered, idle, landed + o.loaded.scenario.transfer.notification);
    EXPECT_EQ(o.run.transfers.failed, 1);
    EXPECT_EQ(o.run.transfers.watchdogs, 0);
    EXPECT_EQ(o.run.transfers.leases_expired, 1);
    EXPECT_EQ(outcome(o.run, TransferOutcome::part_failed), 1);
    EXPECT_EQ(block_ns(o, kD, kInTransfer), kBlocks * (known - registered) + own_transfer(o, next));
    if (recompute) {
      EXPECT_EQ(r.first_token, known + prefill_time(o.deployment.pools[1], kPrompt));
      EXPECT_EQ(r.recomputed_tokens, kPrompt);
    } else {
      EXPECT_EQ(r.reason, Reason::kv_transfer_failed);
      EXPECT_EQ(r.end, known);
    }
    expect_others_complete(o, recompute ? std::vector<Nanos>{} : std::vector<Nanos>{kArrival});
  }
}

// What cannot be posted fails with its first descriptor, long before the rest would have been: no time is
// charged for posting that did not happen.
TEST(Push, PushFailComesBeforeThePostingWouldHaveEnded) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Outcomes o =
      run_with(trace,
               with(kPushPatience, {"transfer.push_fail=true", "transfer.post_us_per_descriptor=10000",
                                    "transfer.kv_load_failure_policy=recompute"}),
               {fault_at(0, "transfer_failed")});
  const RequestRecord& r = at(o, kArrival);
  const TransferConfig& t = o.loaded.scenario.transfer;
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const Nanos registered = kArrival + o.loaded.scenario.router.hop;
  const Nanos shipped = registered + prefill_time(prefill, kPrompt);
  const Nanos known = on_grid(registered, decode.engine.idle_step, shipped + t.post_fixed + t.notification);
  EXPECT_EQ(r.first_token, known + prefill_time(decode, kPrompt));
  EXPECT_EQ(stage(r, Stage::transfer_post), known - shipped);
  EXPECT_EQ(o.run.transfers.failed, 1);
  expect_others_complete(o, {});
}

// ------------------------------------------------------------------------------- pull (6, 10, 11, 16)

// 11 (vllm#56104): prefill has two ranks, decode one, which reads half of its heads from each. One handle
// errs at once. Reported when the other has stopped: nothing lands where it should not. Reported at once:
// decode gives the blocks to others while the sibling still writes into them.
TEST(Pull, OneOfTwoHandlesFailsEarly) {
  const std::int32_t prompt = 20'000, blocks = 1250;
  const Trace trace = and_another(prompt, 10 * kSecond);
  const Sets sets = {"pools.prefill.tensor_parallel=2", "transfer.post_us_per_descriptor=0",
                     "transfer.background_receiver=true", "transfer.kv_lease_duration_s=2"};
  const Outcomes whole = run_with(trace, sets);
  const RequestRecord& like = at(whole, kArrival);
  const Nanos landed = like.first_token - stage(like, Stage::first_token) - stage(like, Stage::transfer_poll);
  ASSERT_GT(stage(like, Stage::transfer_wire), 20 * kMillisecond);
  for (const bool wait : {true, false}) {
    for (const bool guard : {true, false}) {
      const Outcomes o =
          run_with(trace,
                   with(sets, {std::string("transfer.wait_for_siblings=") + (wait ? "true" : "false"),
                               std::string("transfer.stale_guard=") + (guard ? "true" : "false")}),
                   {fault_at(0, "transfer_failed")});
      const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
      EXPECT_EQ(r.reason, Reason::kv_transfer_failed);
      EXPECT_EQ(o.run.transfers.failed, 1);
      EXPECT_EQ(outcome(o.run, TransferOutcome::part_failed), 1);
      EXPECT_EQ(o.run.transfers.leases_expired, 1);  // prefill hears nothing of a failed read
      const Nanos allocated = prefilled(r) + o.loaded.scenario.router.hop;
      const Nanos idle = o.deployment.pools[1].engine.idle_step;
      const Nanos posted = allocated + 71 * kMicrosecond;  // the first part fails when it is posted
      const Nanos known = on_grid(allocated, idle, wait ? r.end : posted);
      EXPECT_EQ(r.end, known);
      if (wait) {
        EXPECT_GE(r.end, allocated + (landed - allocated) / 2);  // the wire to itself is faster
        EXPECT_LE(r.end, landed + idle);
      }
      const Nanos own =
          next.first_token - stage(next, Stage::first_token) - prefilled(next) - o.loaded.scenario.router.hop;
      EXPECT_EQ(block_ns(o, kD, kInTransfer), blocks * (known - allocated) + kBlocks * own);
      EXPECT_EQ(o.run.transfers.stale_writes, wait || guard ? 0 : 1);
      EXPECT_EQ(o.run.transfers.stale_writes_prevented, wait || !guard ? 0 : 1);
      expect_others_complete(o, {kArrival});
    }
  }
}

// 6 (vllm#41269): decode refuses requests as they arrive. Prefill has computed them and holds each for its
// lease: capacity lost in proportion to the refusals.
TEST(Pull, RefusedByDecodePrefillHoldsTheLease) {
  for (const int refusals : {1, 4}) {
    std::vector<Request> requests;
    std::vector<Nanos> refused;
    for (int i = 0; i < refusals; ++i) refused.push_back(kArrival + i * 100 * kMillisecond);
    for (const Nanos t : refused) requests.push_back(request_at(t, kPrompt, 20));
    requests.push_back(request_at(10 * kSecond, kPrompt, 20));
    const Trace trace = with_ticks(requests, kSecond, 9 * kSecond, 50 * kMillisecond);
    const std::vector<FaultConfig> faults(static_cast<std::size_t>(refusals),
                                          fault_at(0, "decode_rejection"));
    const Outcomes o = run_with(trace, {"transfer.kv_lease_duration_s=2"}, faults);
    std::int64_t held = 0;
    for (const Nanos t : refused) {
      const RequestRecord& r = at(o, t);
      EXPECT_EQ(r.status, RequestStatus::rejected);
      EXPECT_EQ(r.reason, Reason::decode_rejected);
      EXPECT_EQ(r.end, prefilled(r) + o.loaded.scenario.router.hop);
      held += kBlocks * (next_tick(o, prefilled(r) + 2 * kSecond) - prefilled(r));
    }
    // The last request's lease is outstanding at the end: prefill sleeps.
    EXPECT_EQ(block_ns(o, kP, kLeased) - kBlocks * (o.run.end - prefilled(at(o, 10 * kSecond))), held);
    EXPECT_EQ(o.run.transfers.leases_expired, refusals);
    EXPECT_EQ(o.run.transfers.leases_outstanding, 1);
    EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), refusals);
    expect_others_complete(o, refused);
  }
}

// 10 (llm-d#1138): the client goes between prefill's answer and decode's scheduler. Nobody tells prefill.
TEST(Pull, CancelledInTheProxyWindow) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Outcomes o =
      run_with(trace, {"transfer.kv_lease_duration_s=2"}, {fault_at(0, "client_cancel", "proxy_window")});
  const RequestRecord& r = at(o, kArrival);
  EXPECT_EQ(r.reason, Reason::client_cancelled);
  EXPECT_EQ(r.end, prefilled(r));
  EXPECT_EQ(o.run.workers[kD].steps, 20);  // of the other request
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  EXPECT_EQ(block_ns(o, kP, kLeased) - kBlocks * (o.run.end - prefilled(at(o, 10 * kSecond))),
            kBlocks * (next_tick(o, prefilled(r) + 2 * kSecond) - prefilled(r)));
  EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), 1);
  expect_others_complete(o, {kArrival});
}

// Facts 1.1: a request that is aborted in decode's queue is not stranded: decode sends the notification that
// it would have sent after a read.
TEST(Pull, CancelledInDecodesQueueFreesPrefill) {
  const Trace trace = behind_another(500, 4 * kSecond);
  const Outcomes o = run_with(trace, kOneSlot, {fault_at(kSecond, "client_cancel", "2")});
  const RequestRecord& r = at(o, kArrival);
  EXPECT_EQ(r.end, kSecond);
  EXPECT_EQ(stage(r, Stage::handoff_dispatch) + stage(r, Stage::decode_admission), kSecond - prefilled(r));
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  const Nanos freed = prefilled(r) + block_ns(o, kP, kLeased) / kBlocks;
  EXPECT_GT(freed, kSecond);
  EXPECT_LE(freed, kSecond + 60 * kMillisecond);
  EXPECT_EQ(block_ns(o, kD, kInTransfer), 0);
  expect_others_complete(o, {kArrival});
}

// vllm#32255: aborted while it reads: decode's blocks are parked until the read is over, then both sides are
// free.
TEST(Pull, CancelledDuringTheRead) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Sets slow = {"transfer.post_us_per_descriptor=10000", "transfer.background_receiver=true",
                     "transfer.thread_contention=1"};
  const Outcomes whole = run_with(trace, slow);
  const RequestRecord& like = at(whole, kArrival);
  const Nanos seen = like.first_token - stage(like, Stage::first_token);
  const Nanos cancel = seen - 300 * kMillisecond;
  const Outcomes o = run_with(trace, slow, {fault_at(cancel, "client_cancel", "1")});
  const RequestRecord &r = at(o, kArrival), &next = at(o, 10 * kSecond);
  EXPECT_EQ(r.end, cancel);
  EXPECT_EQ(stage(r, Stage::transfer_post), cancel - prefilled(r) - o.loaded.scenario.router.hop);
  const Nanos hop = o.loaded.scenario.router.hop;
  const Nanos own = next.first_token - stage(next, Stage::first_token) - prefilled(next) - hop;
  EXPECT_EQ(block_ns(o, kD, kInTransfer), kBlocks * (seen - prefilled(like) - hop) + kBlocks * own);
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_EQ(outcome(o.run, TransferOutcome::abandoned), 1);
  expect_others_complete(o, {kArrival});
}

// 16 (TensorRT-LLM#12542): a block that is being written from or into is nobody else's. Leases of 50 ms and
// writes of twice that, in pools where two prompts fit and their answers do not: every write is whole.
TEST(Pinned, UntilWritten) {
  // Layer by layer there is a post for each of 64 regions.
  const std::pair<std::string, std::string> modes[] = {
      {"push", "100000"}, {"push_layerwise", "1600"}, {"push_progressive", "100000"}};
  for (const auto& [mode, fixed_us] : modes) {
    std::vector<Request> requests;
    for (int i = 0; i < 20; ++i) requests.push_back(request_at(i / 2 * 3 * kSecond, kPrompt, 150));
    const Trace trace = with_ticks(requests, 50 * kMillisecond, 28 * kSecond, 10 * kMillisecond);
    const Outcomes o = run_with(
        trace, {"transfer.mode=" + mode, "transfer.kv_lease_duration_s=0.05",
                "transfer.post_fixed_us=" + fixed_us, "pools.prefill.engine.num_gpu_blocks_override=140",
                "pools.decode.engine.num_gpu_blocks_override=140", "pools.prefill.engine.max_model_len=2000",
                "pools.decode.engine.max_model_len=2000"});
    EXPECT_EQ(o.run.transfers.stale_reads + o.run.transfers.stale_reads_prevented, 0) << mode;
    EXPECT_EQ(o.run.transfers.stale_writes + o.run.transfers.stale_writes_prevented, 0) << mode;
    EXPECT_EQ(outcome(o.run, TransferOutcome::completed), 20) << mode;
    EXPECT_EQ(o.run.transfers.leases_expired, 0) << mode;
    EXPECT_GT(block_ns(o, kP, kLeased), 20 * kBlocks * 50 * kMillisecond) << mode;
    EXPECT_GT(o.run.workers[kD].preemptions, 0) << mode;
    expect_others_complete(o, {});
  }
}

// A READ is not prefill's to wait for: what runs out during it is another's when the bytes arrive, which is
// seen too late to prevent more than its use.
TEST(Pinned, NotWhileItIsRead) {
  for (const bool guard : {true, false}) {
    const Trace trace =
        with_ticks({request_at(kArrival, kPrompt, 20)}, kSecond / 4, 2 * kSecond, 20 * kMillisecond);
    const Outcomes o = run_with(
        trace,
        with(kNoHeartbeats, {"transfer.kv_lease_duration_s=0.3", "transfer.post_us_per_descriptor=10000",
                             std::string("transfer.stale_guard=") + (guard ? "true" : "false")}));
    EXPECT_EQ(o.run.transfers.leases_expired, 1);
    EXPECT_EQ(o.run.transfers.stale_reads, guard ? 0 : 1);
    EXPECT_EQ(o.run.transfers.stale_reads_prevented, guard ? 1 : 0);
    EXPECT_EQ(at(o, kArrival).reason, guard ? Reason::kv_lease_expired : Reason::none);
  }
}

// --------------------------------------------------------------------------------- bidirectional (9)

// Turn 2 of a conversation arrives when decode will keep turn 1 for `left` more, as seen where prefill posts
// its read: at the boundary at which the sleeping engine takes the request. Decode is kept awake.
struct TurnTwo {
  Outcomes o;
  Trace trace;
  const RequestRecord& record() const { return o.run.requests.back(); }
};

TurnTwo turn_two(Nanos left, const Sets& more, const std::vector<FaultConfig>& faults = {}) {
  const Sets sets = with({"transfer.bidirectional=true", "transfer.decoder_kv_blocks_ttl_s=20",
                          "pools.prefill.engine.enable_prefix_caching=false", "router.session_kv_ttl_s=1000"},
                         more);
  const auto turns = [&](Nanos second) {
    Trace trace = conversation({request_at(kArrival, kPrompt, 40), request_at(second, 1600, 40)});
    trace.requests.insert(trace.requests.begin(), request_at(0, 16, 0));
    for (Nanos t = kSecond; t < second - kSecond; t += kSecond) {
      trace.requests.insert(trace.requests.end() - 1, request_at(t, 16, 1));
    }
    trace.report.rows_read = trace.report.rows_used = trace.requests.size();
    return trace;
  };
  // Turn 1 takes the same time whatever follows.
  const Outcomes first = run_with(turns(5 * kSecond), sets);
  const Nanos ttl = first.loaded.scenario.transfer.decoder_kv_blocks_ttl;
  const Nanos end = at(first, kArrival).end;
  TurnTwo t;
  t.trace = turns(end + ttl - left - first.loaded.scenario.router.hop);
  t.o = run_with(t.trace, sets, faults);
  EXPECT_EQ(at(t.o, kArrival).end, end);
  return t;
}

// vllm#47021: nothing is read that decode keeps for less than 5 s, by decode's clock as prefill knows it.
TEST(TurnTwo, TheGuardDeclinesWhatIsKeptForLessThanItsMargin) {
  const std::string fail = "transfer.kv_load_failure_policy=fail",
                    recompute = "transfer.kv_load_failure_policy=recompute";
  for (const double error_s : {0.0, 1.0, -1.0}) {
    const Sets clock = {"transfer.clock_error_s=" + std::to_string(error_s)};
    const auto error = static_cast<Nanos>(error_s * 1e9);
    const TurnTwo in_time = turn_two(5 * kSecond - error, with(clock, {fail}));
    EXPECT_EQ(in_time.record().reuse, Reuse::hit) << error_s;
    EXPECT_EQ(in_time.record().remote_hit_tokens, kPrompt + 39) << error_s;
    EXPECT_EQ(in_time.o.run.retention.read + in_time.o.run.retention.outstanding, 2) << error_s;

    // Treated as a failed load: known at the poll after the empty step that should have posted.
    const TurnTwo late = turn_two(5 * kSecond - error - 1, with(clock, {fail}));
    EXPECT_EQ(late.record().reuse, Reuse::guard_declined) << error_s;
    EXPECT_EQ(late.record().reason, Reason::kv_retention_expired) << error_s;
    EXPECT_EQ(late.record().e2e(),
              late.o.loaded.scenario.router.hop + late.o.deployment.pools[0].engine.idle_step)
        << error_s;
    EXPECT_EQ(late.o.run.transfers.read_back_bytes, 0) << error_s;

    const TurnTwo again = turn_two(5 * kSecond - error - 1, with(clock, {recompute}));
    EXPECT_EQ(again.record().reuse, Reuse::guard_declined) << error_s;
    EXPECT_EQ(again.record().status, RequestStatus::completed) << error_s;
    EXPECT_EQ(again.record().remote_hit_tokens, 0) << error_s;
    EXPECT_EQ(stage(again.record(), Stage::prefill), prefill_time(again.o.deployment.pools[0], 1600));
    EXPECT_EQ(again.o.run.transfers.stale_reads + again.o.run.transfers.stale_reads_prevented, 0);
  }
}

// A router that drops the expiry takes that guard away. Then what ran out is read: a stale read, or, where
// pdsim's own guard looks at the blocks, one prevented.
TEST(TurnTwo, WithoutTheExpiryWhatRanOutIsReadStale) {
  const Nanos gone = -2 * kSecond;
  const TurnTwo stale = turn_two(gone, {"transfer.expiry_margin_s=0", "transfer.stale_guard=false"});
  EXPECT_EQ(stale.o.run.transfers.stale_reads, 1);
  EXPECT_EQ(stale.record().status, RequestStatus::completed);
  EXPECT_EQ(stale.record().remote_hit_tokens, kPrompt + 39);
  EXPECT_EQ(stale.o.run.retention.expired, 1);

  const TurnTwo guarded = turn_two(gone, {"transfer.expiry_margin_s=0"});
  EXPECT_EQ(guarded.o.run.transfers.stale_reads, 0);
  EXPECT_EQ(guarded.o.run.transfers.stale_reads_prevented, 1);
  EXPECT_EQ(guarded.record().reuse, Reuse::load_failed);
  EXPECT_EQ(guarded.record().reason, Reason::kv_retention_expired);

  // With time left there is nothing wrong with it, margin or not.
  const TurnTwo fine = turn_two(kSecond, {"transfer.expiry_margin_s=0"});
  EXPECT_EQ(fine.record().reuse, Reuse::hit);
}

// The defaults, 480 s on decode, 450 s in the router, 5 s margin: a think time below 450 s is served, one
// beyond it never gets as far as the guard. A router that remembers longer meets the guard from 475 s on.
TEST(TurnTwo, ThinkTimesAroundTheTtls) {
  struct {
    std::int64_t left_s;
    const char* router_ttl;
    Reuse expected;
  } cases[] = {{40, "450", Reuse::hit},
               {29, "450", Reuse::ttl_expired},
               {29, "1000", Reuse::hit},
               {4, "1000", Reuse::guard_declined},
               {-10, "1000", Reuse::guard_declined}};
  for (const auto& c : cases) {
    const TurnTwo t = turn_two(c.left_s * kSecond, {"transfer.decoder_kv_blocks_ttl_s=480",
                                                    std::string("router.session_kv_ttl_s=") + c.router_ttl,
                                                    "transfer.kv_load_failure_policy=recompute"});
    EXPECT_EQ(t.record().reuse, c.expected) << c.left_s << " s left, router " << c.router_ttl;
    EXPECT_EQ(t.record().status, RequestStatus::completed);
    EXPECT_EQ(t.o.run.transfers.stale_reads_prevented, 0);
    // What nobody has read is pinned for all of its time.
    const std::int64_t blocks = (kPrompt + 39 + 15) / 16;
    EXPECT_GE(block_ns(t.o, kD, kPinned), blocks * std::min(480 - c.left_s, std::int64_t{480}) * kSecond);
  }
}

// The router never hears where turn 1 is: turn 2 is computed whole, and decode keeps the blocks for nothing.
TEST(TurnTwo, ALostUpdateLeavesTheRouterUnaware) {
  const TurnTwo t = turn_two(-2 * kSecond, {}, {fault_at(0, "message_lost", "router_update")});
  EXPECT_EQ(t.record().reuse, Reuse::router_unaware);
  EXPECT_EQ(t.record().remote_hit_tokens, 0);
  EXPECT_EQ(t.record().status, RequestStatus::completed);
  EXPECT_EQ(t.o.run.transfers.messages_lost, 1);
  EXPECT_EQ(t.o.run.retention.expired, 1);
  EXPECT_EQ(t.o.run.retention.read, 0);
}

// ------------------------------------------------------------------------ descriptors, order of legs (17,
// 18)

// 17 (vllm#55434, nixl#1514): one descriptor a region on fresh pools, one a region and block on pools out of
// order, and in between more with every block out of place. Posting goes with them.
TEST(Fragmentation, DescriptorsFromRegionsToRegionsTimesBlocks) {
  std::int64_t last = 0;
  Nanos posting = 0;
  for (const std::string share : {"0", "0.1", "0.5", "1"}) {
    const Trace trace = made_trace({request_at(0, kPrompt, 5)});
    const Outcomes o = run_with(trace, {"transfer.initial_fragmentation=" + share});
    const std::int64_t regions = o.deployment.pools[1].footprint.kv_regions;
    const RequestRecord& r = o.run.requests[0];
    EXPECT_GT(r.descriptors, last);
    EXPECT_GT(stage(r, Stage::transfer_post), posting);
    EXPECT_EQ(r.descriptors % regions, 0);
    last = r.descriptors;
    posting = stage(r, Stage::transfer_post);
    if (share == "0") {
      EXPECT_EQ(last, regions);
    } else if (share == "1") {
      EXPECT_EQ(last, regions * kBlocks);
    }
  }
}

// 18 (vllm-project/router#187, dynamo#13327): push behind a router that waits for prefill's answer registers
// only then, which costs a notification and step boundaries more than pull's read; with both legs at once it
// costs less.
TEST(Sequential, PushIsSlowerThanPull) {
  const Trace trace = made_trace({request_at(0, kPrompt, 5)});
  // Equal wire: what is compared is the protocol.
  const auto ttft = [&](const Sets& sets) {
    const Outcomes o = run_with(trace, sets);
    return o.run.requests[0].first_token;
  };
  const Nanos pull = ttft({}), push = ttft(kPush);
  const Nanos sequential = ttft(with(kPush, {"router.sequential_dispatch=true"}));
  EXPECT_LT(push, pull);
  EXPECT_LT(pull, sequential);
}

// --------------------------------------------------------------------------------------- handshakes

// Pull: the answer to the first contact is lost. The receive times out after 5 s, the load fails; prefill's
// blocks wait for the lease. The next request tries again.
TEST(Handshake, LostPullFailsAfterItsTimeout) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Sets cold = {"transfer.warm_start=false", "transfer.kv_lease_duration_s=6"};
  for (const bool recompute : {false, true}) {
    const Outcomes o = run_with(
        trace,
        with(cold, {std::string("transfer.kv_load_failure_policy=") + (recompute ? "recompute" : "fail")}),
        {fault_at(0, "message_lost", "handshake")});
    const RequestRecord& r = at(o, kArrival);
    const Nanos asked =
        kArrival + 2 * o.loaded.scenario.router.hop + prefill_time(o.deployment.pools[0], kPrompt);
    const Nanos idle = o.deployment.pools[1].engine.idle_step;
    const Nanos known = on_grid(asked, idle, asked + 5 * kSecond);
    EXPECT_EQ(o.run.transfers.handshakes, 2);
    EXPECT_EQ(o.run.transfers.failed, 1);
    EXPECT_EQ(stage(r, Stage::transfer_post), known - asked);
    if (recompute) {
      EXPECT_EQ(r.first_token, known + prefill_time(o.deployment.pools[1], kPrompt));
    } else {
      EXPECT_EQ(r.reason, Reason::handshake_failed);
      EXPECT_EQ(r.end, known);
    }
    expect_others_complete(o, recompute ? std::vector<Nanos>{} : std::vector<Nanos>{kArrival});
  }
}

// Push, prefill's side: it cannot write, logs and drops; decode waits for its client. Push, decode's side: it
// cannot register, and nobody hears of that either.
TEST(Handshake, LostPushIsDroppedAndDecodeWaits) {
  const Trace trace = and_another(kPrompt, 20 * kSecond);
  const Sets cold = with(kPushPatience, {"transfer.warm_start=false", "transfer.kv_lease_duration_s=7",
                                         "workload.client_timeout_s=9"});
  for (const bool prefills : {false, true}) {
    // Decode's own comes first, as soon as it has blocks; prefill's when it knows where to write.
    const Nanos when = prefills ? kArrival + 5 * kMillisecond : 0;
    const Outcomes o = run_with(trace, cold, {fault_at(when, "message_lost", "handshake")});
    const RequestRecord &r = at(o, kArrival), &next = at(o, 20 * kSecond);
    EXPECT_EQ(r.reason, Reason::client_timeout);
    EXPECT_EQ(r.e2e(), 9 * kSecond);
    EXPECT_EQ(r.transfer_bytes, 0);
    EXPECT_EQ(o.run.transfers.handshakes, 3);
    EXPECT_EQ(o.run.transfers.messages_lost, 1);
    EXPECT_EQ(o.run.transfers.watchdogs, 1);
    EXPECT_EQ(o.run.transfers.leases_expired, 1);
    EXPECT_EQ(outcome(o.run, TransferOutcome::dropped), 1);
    const Nanos registered = kArrival + o.loaded.scenario.router.hop;
    EXPECT_EQ(block_ns(o, kD, kInTransfer),
              kBlocks * (o.run.end - registered) + own_transfer(o, next, registered));
    expect_others_complete(o, {kArrival});
  }
}

// A first contact with a worker that dies before it answers ends by its timeout, not never.
TEST(Handshake, WithAWorkerThatDiesFails) {
  const Trace trace = and_another(kPrompt, 20 * kSecond);
  const Sets cold = {"transfer.warm_start=false", "transfer.handshake_ms=200"};
  const Outcomes whole = run_with(trace, cold);
  const Nanos crash = prefilled(at(whole, kArrival)) + 100 * kMillisecond;
  const Outcomes o = run_with(trace, cold, {fault_at(crash, "worker_crash", "prefill-0", kSecond / 2)});
  const RequestRecord& r = at(o, kArrival);
  EXPECT_EQ(r.reason, Reason::handshake_failed);
  EXPECT_GE(r.end, crash + 5 * kSecond);
  EXPECT_LE(r.end, crash + 5 * kSecond + o.deployment.pools[1].engine.idle_step);
  expect_others_complete(o, {kArrival});
}

// ------------------------------------------------------------------------------------- clients, workers

// A client gives up in each stage in turn: that stage has the time until then, both legs end, and what they
// held is free again: nothing is leased, parked or running beside what the others have.
TEST(ClientTimeout, ChargesTheStageAndEndsBothLegs) {
  const Sets slow = {"transfer.post_us_per_descriptor=10000", "transfer.background_receiver=true",
                     "transfer.thread_contention=1"};  // 640 ms of posting
  const Nanos hop = kMillisecond, then = 40 * kSecond;
  struct {
    Stage stage;
    std::int32_t prompt, output;
    Nanos patience;
    bool blocked;  ///< decode's only slot is taken
    bool leased;   ///< prefill holds blocks after the client has gone
  } cases[] = {
      {Stage::router, kPrompt, 20, hop / 2, false, false},
      {Stage::prefill, 20'000, 20, 300 * kMillisecond, false, false},
      {Stage::handoff_dispatch, kPrompt, 20, 0, false, true},  // set below
      {Stage::decode_admission, kPrompt, 20, kSecond, true, false},
      {Stage::transfer_post, kPrompt, 20, 400 * kMillisecond, false, false},
      {Stage::decode, kPrompt, 2000, 2 * kSecond, false, false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(kStageNames[static_cast<std::size_t>(c.stage)]);
    std::vector<Request> requests;
    if (c.blocked) requests.push_back(request_at(0, 64, 1000));
    requests.push_back(request_at(kArrival, c.prompt, c.output));
    requests.push_back(request_at(then, kPrompt, 20));
    const Trace trace = with_ticks(requests, kSecond, then - kSecond, kSecond);
    const Sets sets = with(slow, c.blocked ? kOneSlot : Sets{});
    const Outcomes whole = run_with(trace, sets);
    const RequestRecord& like = at(whole, kArrival);
    const Nanos patience = c.patience > 0 ? c.patience : prefilled(like) - kArrival + hop / 2;
    ASSERT_LT(patience, like.e2e());
    const Outcomes o =
        run_with(trace, sets, {fault_at(kArrival + patience, "client_cancel", c.blocked ? "2" : "1")});
    const RequestRecord& r = at(o, kArrival);
    EXPECT_EQ(r.status, RequestStatus::cancelled);
    EXPECT_EQ(r.e2e(), patience);
    // Stages up to there as if nothing had happened; none after it.
    Nanos before = 0;
    for (std::size_t s = 0; s < kStageNames.size(); ++s) {
      if (s < static_cast<std::size_t>(c.stage)) {
        EXPECT_EQ(r.stages[s], like.stages[s]) << kStageNames[s];
        before += r.stages[s];
      } else if (s > static_cast<std::size_t>(c.stage)) {
        EXPECT_EQ(r.stages[s], 0) << kStageNames[s];
      }
    }
    EXPECT_EQ(stage(r, c.stage), patience - before);
    EXPECT_GT(stage(r, c.stage), 0);
    EXPECT_EQ(o.run.transfers.leases_expired, c.leased ? 1 : 0);
    EXPECT_EQ(o.run.transfers.leases_outstanding, 1);  // the last one's: prefill sleeps
    expect_others_complete(o, {kArrival});
  }
}

// The same by workload.client_timeout_s, of all requests; prefill's queue this time.
TEST(ClientTimeout, InPrefillsQueue) {
  const Trace trace = made_trace({request_at(0, 30'000, 20), request_at(kMillisecond, kPrompt, 20),
                                  request_at(10 * kSecond, kPrompt, 20)});
  for (const char* mode : {"pull", "push"}) {
    const Outcomes o = run_with(trace, {std::string("transfer.mode=") + mode, "workload.client_timeout_s=0.3",
                                        "pools.prefill.engine.max_num_seqs=1"});
    for (const Nanos arrival : {Nanos{0}, kMillisecond}) {
      EXPECT_EQ(at(o, arrival).reason, Reason::client_timeout);
      EXPECT_EQ(at(o, arrival).e2e(), 300 * kMillisecond);
    }
    EXPECT_EQ(stage(at(o, kMillisecond), Stage::prefill_queue),
              300 * kMillisecond - o.loaded.scenario.router.hop);
    EXPECT_EQ(at(o, 10 * kSecond).status, RequestStatus::completed);
    EXPECT_EQ(o.run.transfers.count, 1);
    EXPECT_EQ(o.run.transfers.leases_expired, 0);
  }
}

// Nobody asks the next question after an answer that never came: a failed turn cancels the later turns of
// its closed session at once, and of no other.
TEST(ClosedSessions, AFailedTurnCancelsTheLaterOnes) {
  std::vector<Request> turns = {request_at(0, kPrompt, 40), request_at(10 * kSecond, 1600, 40),
                                request_at(20 * kSecond, 2200, 40), request_at(30 * kSecond, 2800, 40)};
  for (Request& r : turns) r.think_time = 2 * kSecond;
  const Trace trace = conversation(turns);
  const Sets closed = {"workload.sessions=closed"};
  const Outcomes whole = run_with(trace, closed);
  expect_others_complete(whole, {});
  const Outcomes o = run_with(trace, closed, {fault_at(kSecond, "decode_rejection")});
  EXPECT_EQ(o.run.requests[0].status, RequestStatus::completed);
  EXPECT_EQ(o.run.requests[1].reason, Reason::decode_rejected);
  EXPECT_EQ(o.run.requests[1].arrival, o.run.requests[0].end + 2 * kSecond);
  for (const std::size_t later : {2u, 3u}) {
    EXPECT_EQ(o.run.requests[later].status, RequestStatus::cancelled);
    EXPECT_EQ(o.run.requests[later].reason, Reason::session_failed);
    EXPECT_EQ(o.run.requests[later].e2e(), 0);
    EXPECT_EQ(o.run.requests[later].arrival, o.run.requests[1].end);
  }
}

// A colocated worker dies and comes back: what it had is lost, all else is served, by it too.
TEST(Crash, ColocatedWorkerComesBackEmpty) {
  std::vector<Request> requests;
  for (int i = 0; i < 40; ++i) requests.push_back(request_at(i * 100 * kMillisecond, 500, 100));
  const Trace trace = made_trace(requests);
  const Nanos crash = kSecond + 1;
  LoadedScenario loaded = parse_scenario(kColocated, "test.json", "", Sets{"router.policy=round_robin"});
  loaded.scenario.faults = {fault_at(crash, "worker_crash", "worker-1", kSecond)};
  const Outcomes o = run_loaded(hop_alone(std::move(loaded)), trace);
  EXPECT_EQ(o.run.status, RunStatus::finished);
  EXPECT_EQ(o.run.crashes, 1);
  std::size_t lost = 0, after = 0;
  for (const RequestRecord& r : o.run.requests) {
    const bool sent = r.prefill_worker == 1 && r.arrival < crash;
    if (sent && r.end >= crash) {
      ++lost;
      EXPECT_EQ(r.reason, Reason::worker_lost);
      EXPECT_EQ(r.end, std::max(crash, r.arrival + o.loaded.scenario.router.hop));  // or on its way there
    } else {
      EXPECT_EQ(r.status, RequestStatus::completed) << r.arrival;
    }
    const bool meanwhile = r.arrival > crash && r.arrival < crash + kSecond;
    EXPECT_FALSE(meanwhile && r.prefill_worker == 1) << r.arrival;
    after += r.prefill_worker == 1 && r.arrival > crash + kSecond ? 1 : 0;
  }
  EXPECT_EQ(lost, 2u);
  EXPECT_GT(after, 5u);
}

// Decode dies while prefill's KV is on its way: the request is lost with it, the flows are no stale reads,
// and prefill's lease runs out.
TEST(Crash, DecodeDuringTheRead) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Sets slow = {"transfer.post_us_per_descriptor=10000", "transfer.kv_lease_duration_s=2"};
  for (const char* mode : {"pull", "push"}) {
    const Outcomes whole = run_with(trace, with(slow, {std::string("transfer.mode=") + mode}));
    const Nanos crash = prefilled(at(whole, kArrival)) + 300 * kMillisecond;
    const Outcomes o = run_with(trace, with(slow, {std::string("transfer.mode=") + mode}),
                                {fault_at(crash, "worker_crash", "decode-0", kSecond / 2)});
    const RequestRecord& r = at(o, kArrival);
    EXPECT_EQ(r.reason, Reason::worker_lost);
    EXPECT_EQ(r.end, crash);
    EXPECT_EQ(o.run.transfers.leases_expired, 1);
    const TransferTotals& t = o.run.transfers;
    EXPECT_EQ(t.stale_reads + t.stale_reads_prevented + t.stale_writes + t.stale_writes_prevented, 0) << mode;
    expect_others_complete(o, {kArrival});
  }
}

// Prefill dies while decode reads from it: a failed transfer, by kv_load_failure_policy.
TEST(Crash, PrefillDuringTheRead) {
  const Trace trace = and_another(kPrompt, 10 * kSecond);
  const Sets slow = {"transfer.post_us_per_descriptor=10000"};
  const Outcomes whole = run_with(trace, slow);
  const Nanos crash = prefilled(at(whole, kArrival)) + 300 * kMillisecond;
  for (const bool recompute : {false, true}) {
    const Outcomes o = run_with(
        trace,
        with(slow, {std::string("transfer.kv_load_failure_policy=") + (recompute ? "recompute" : "fail")}),
        {fault_at(crash, "worker_crash", "prefill-0", 500 * kMillisecond)});
    EXPECT_EQ(at(o, kArrival).reason, recompute ? Reason::none : Reason::kv_transfer_failed);
    EXPECT_EQ(o.run.transfers.stale_reads + o.run.transfers.stale_reads_prevented, 0);
    EXPECT_EQ(o.run.transfers.failed, 1);
    expect_others_complete(o, recompute ? std::vector<Nanos>{} : std::vector<Nanos>{kArrival});
  }
}

// ------------------------------------------------------------------------------------------- everything

struct Knob {
  const char* path;
  std::vector<const char*> values;
};

const std::vector<Knob> kKnobs = {
    {"transfer.mode", {"pull", "push", "push_layerwise", "push_progressive"}},
    {"transfer.bidirectional", {"true", "false"}},
    {"transfer.hypothetical", {"true"}},
    {"pools.prefill.replicas", {"1", "2", "3"}},
    {"pools.decode.replicas", {"1", "2", "3"}},
    {"pools.prefill.tensor_parallel", {"1", "1", "2"}},
    {"pools.decode.tensor_parallel", {"1", "1", "2"}},
    {"pools.prefill.engine.num_gpu_blocks_override", {"420", "500", "800"}},
    {"pools.decode.engine.num_gpu_blocks_override", {"420", "600", "1200"}},
    {"pools.prefill.engine.max_num_batched_tokens", {"1024", "8192"}},
    {"pools.decode.engine.max_num_batched_tokens", {"1024", "8192"}},
    {"pools.prefill.engine.max_num_seqs", {"4", "64"}},
    {"pools.decode.engine.max_num_seqs", {"4", "64"}},
    {"pools.prefill.engine.async_scheduling", {"true", "false"}},
    {"pools.decode.engine.async_scheduling", {"true", "false"}},
    {"pools.prefill.engine.enable_prefix_caching", {"true", "false"}},
    {"pools.decode.engine.enable_prefix_caching", {"true", "false"}},
    {"transfer.kv_lease_duration_s", {"0.4", "3", "30"}},
    {"transfer.decoder_kv_blocks_ttl_s", {"2", "15", "480"}},
    {"transfer.expiry_margin_s", {"0", "0.5", "5"}},
    {"transfer.clock_error_s", {"0", "0.7", "-0.7"}},
    {"transfer.push_registration_timeout_s", {"1", "480"}},
    {"transfer.kv_load_failure_policy", {"fail", "recompute"}},
    {"transfer.stale_guard", {"true", "true", "false"}},
    {"transfer.push_fail", {"true", "false"}},
    {"transfer.wait_for_siblings", {"true", "false"}},
    {"transfer.lease_reaper", {"in_order", "all"}},
    {"transfer.handshake_timeout_s", {"0.3", "5"}},
    {"transfer.engine_ttl_s", {"1", "3600"}},
    {"transfer.prep_us_per_descriptor", {"0", "1"}},
    {"transfer.warm_start", {"true", "false"}},
    {"transfer.initial_fragmentation", {"0", "0.7"}},
    {"transfer.background_receiver", {"true", "false"}},
    {"transfer.post_us_per_descriptor", {"2.43", "60"}},
    {"transfer.pd_recompute_threshold", {"0", "200"}},
    {"transfer.full_hit_tokens", {"0", "16"}},
    {"transfer.kv_recompute_threshold", {"0", "64"}},
    {"transfer.reuse_policy", {"threshold", "cost"}},
    {"router.policy", {"round_robin", "random", "least_loaded", "prefix_aware", "session_affinity"}},
    {"router.sequential_dispatch", {"true", "false"}},
    {"router.reroute_fraction", {"0", "0.5"}},
    {"router.local_prefill_threshold", {"0", "0", "200"}},
    {"router.session_kv_ttl_s", {"2", "450"}},
    {"workload.client_timeout_s", {"0", "0.2", "1.5", "10", "60"}},
    {"workload.sessions", {"open", "open", "closed"}},
};

/// All kinds of faults, most of them absent at any one time, each about once in two or three seconds.
std::vector<FaultConfig> some_faults(Random& random, bool disaggregated) {
  std::vector<FaultConfig> faults;
  const auto maybe = [&](const char* kind, const std::string& target, Nanos duration = 0) {
    const double per_second = 0.2 + 0.4 * random.uniform();
    if (random.uniform() < 0.5) return;
    faults.push_back(fault_at(-1, kind, target, duration));
    faults.back().rate_per_hour = per_second * 3600;
  };
  maybe("client_cancel", "");
  maybe("worker_crash", "", random.uniform() < 0.8 ? kSecond / 2 : 0);
  if (!disaggregated) return faults;
  for (const Named& message : kMessages) maybe("message_lost", std::string(message.name));
  maybe("transfer_failed", "");
  maybe("client_cancel", "proxy_window");
  maybe("decode_rejection", "");
  maybe("worker_crash", "prefill", kSecond / 2);
  maybe("worker_crash", "decode", kSecond / 2);
  return faults;
}

Outcomes tortured(std::uint64_t seed, const Sets& more) {
  Random random(seed, Purpose::faults, 1);
  const bool disaggregated = seed % 8 != 0;
  Sets sets = {"seed=" + std::to_string(seed)};
  bool pull = false, retains = false;
  for (const Knob& knob : kKnobs) {
    const std::string path = knob.path;
    const std::string set = path + "=" + knob.values[random.below(knob.values.size())];
    const bool common = path.starts_with("workload") || path == "router.policy";
    if (!disaggregated && !common) continue;
    pull = pull || set == "transfer.mode=pull";
    retains = retains || set == "transfer.bidirectional=true";
    if (path == "transfer.background_receiver" && !pull) continue;  // push has its writer's thread
    sets.push_back(set);
  }
  if (retains) {
    const std::vector<Sets> ways = {
        {"transfer.retention.policy=ttl"},
        {"transfer.retention.policy=lru", "transfer.retention.budget_gib=0.25"},
        {"transfer.retention.policy=priority"},
        {"transfer.retention.policy=priority", "transfer.retention.budget_gib=0.25"}};
    sets = with(sets, ways[random.below(ways.size())]);
  }
  if (!disaggregated) sets.push_back("pools.worker.engine.num_gpu_blocks_override=500");
  GenerateConfig users;
  users.requests = 20 + static_cast<std::int32_t>(random.below(40));
  Trace trace = small_trace(users.requests, 2 + 10 * random.uniform(), seed % 2 == 0 ? 1 : kSecond / 2, seed);
  for (Request& r : trace.requests) {
    if (random.uniform() < 0.05) r.output_tokens = static_cast<std::int32_t>(random.below(2));
  }
  for (std::string set : more) {
    if (!disaggregated && set.starts_with("pools.prefill")) continue;
    if (!disaggregated && set.starts_with("pools.decode")) set.replace(6, 6, "worker");
    sets.push_back(set);
  }
  LoadedScenario loaded =
      parse_scenario(disaggregated ? kDisaggregated : kColocated, "torture.json", "", sets);
  loaded.scenario.faults = some_faults(random, disaggregated);
  return run_loaded(std::move(loaded), trace);
}

// Everything at once, at random: no invariant breaks (a simulation checks its own: requests, stages, bytes,
// tokens, blocks), every request has an end, only push leaves clients without patience hanging, and the
// same seed gives the same bytes, step by step too. Ties in another order may move the figures and no more.
TEST(Torture, AllKindsOfFaultsInAllModes) {
  std::size_t ended[kStatusNames.size()] = {};
  std::size_t stalls = 0;
  for (std::uint64_t seed = 1; seed <= 240; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    try {
      const Outcomes o = tortured(seed, {});
      const Scenario& s = o.loaded.scenario;
      for (const RequestRecord& r : o.run.requests) ++ended[static_cast<std::size_t>(r.status)];
      if (o.run.status == RunStatus::stalled) {
        ++stalls;
        EXPECT_NE(s.transfer.mode, TransferMode::pull) << o.run.stall;
        EXPECT_EQ(s.workload.client_timeout, 0) << o.run.stall;
      } else {
        EXPECT_EQ(count(o.run, RequestStatus::in_flight), 0u);
      }
      EXPECT_EQ(first_difference(o.text(), tortured(seed, {}).text()), "");
      EXPECT_EQ(first_difference(o.text(), tortured(seed, {"pools.prefill.engine.step_by_step=true",
                                                           "pools.decode.engine.step_by_step=true"})
                                               .text()),
                "");
      tortured(seed, {"permute_ties=3"});
    } catch (const std::exception& broken) {
      ADD_FAILURE() << broken.what();
    }
  }
  for (const std::size_t n : ended) EXPECT_GT(n, 10u);  // in flight, too: of the runs that stalled
  EXPECT_LT(stalls, 30u);
}

}  // namespace
}  // namespace pdsim
