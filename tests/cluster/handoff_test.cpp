// What the hand-off promises when things are tight, short, late or split: one situation a test.
#include <gtest/gtest.h>

#include "sim/core/error.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

Nanos total(const RunResult& run, Stage s) {
  Nanos sum = 0;
  for (const RequestRecord& r : run.requests) sum += stage(r, s);
  return sum;
}

/// `n` requests, `gap` apart.
Trace stream(int n, Nanos gap, std::int32_t prompt, std::int32_t output) {
  std::vector<Request> requests;
  for (int i = 0; i < n; ++i) requests.push_back(request_at(i * gap, prompt, output));
  return made_trace(std::move(requests));
}

Sets step_by_step(const std::string& scenario) {
  if (scenario == kColocated) return {"pools.worker.engine.step_by_step=true"};
  return {"pools.prefill.engine.step_by_step=true", "pools.decode.engine.step_by_step=true"};
}

// Decode holds two prompts at a time: requests wait for its blocks (decode_admission), prefill's blocks
// stay leased meanwhile and run out too, so that prefill itself waits. Nothing is lost and nothing expires:
// heartbeats renew the leases of those who wait.
TEST(BackPressure, AFullDecodeSideSlowsPrefillAndLosesNothing) {
  const Trace trace = stream(60, 20 * kMillisecond, 1500, 200);
  const Sets warm = with(kOneEach, {"transfer.warm_start=true"});
  const Sets tight = with(warm, {"pools.decode.engine.num_gpu_blocks_override=240",
                                 "pools.prefill.engine.num_gpu_blocks_override=400"});
  const Outcomes o = run_text(kDisaggregated, trace, tight);
  expect_conserved(o, trace);
  EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_GT(total(o.run, Stage::decode_admission), 30 * kSecond);
  EXPECT_GT(total(o.run, Stage::prefill_queue), 30 * kSecond);
  EXPECT_GT(o.run.workers[0].kv_usage_max, 0.9);
  EXPECT_EQ(o.summary["bound_by"]["code"].get<std::string>().empty(), false);

  const Outcomes roomy = run_text(kDisaggregated, trace, warm);
  EXPECT_EQ(total(roomy.run, Stage::decode_admission), 0);
  EXPECT_LT(roomy.run.end, o.run.end);
  EXPECT_LT(roomy.run.transfers.prefill_byte_seconds, o.run.transfers.prefill_byte_seconds / 5);
}

// The same where the slots are few: max_num_seqs of decode.
TEST(BackPressure, FewDecodeSlots) {
  const Trace trace = stream(30, 20 * kMillisecond, 1500, 100);
  const Outcomes o = run_text(kDisaggregated, trace, with(kOneEach, {"pools.decode.engine.max_num_seqs=2"}));
  expect_conserved(o, trace);
  EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
  EXPECT_GT(total(o.run, Stage::decode_admission), kSecond);
}

// output_length 0: done when the prompt is computed, on the prefill side alone; no token, no token latency.
TEST(Lengths, NoOutputEndsAfterPrefill) {
  for (const std::string& scenario : {kDisaggregated, kColocated}) {
    const Trace trace = made_trace({request_at(0, 500, 0), request_at(kSecond, 500, 3)});
    const Outcomes o = run_text(scenario, trace);
    expect_conserved(o, trace);
    const RequestRecord& r = o.run.requests[0];
    EXPECT_EQ(r.status, RequestStatus::completed);
    EXPECT_EQ(r.first_token, -1);
    EXPECT_EQ(r.transfer_bytes, 0);
    EXPECT_EQ(r.e2e(), stage(r, Stage::router) + stage(r, Stage::prefill));
    EXPECT_EQ(o.summary["latency_ms"]["ttft"]["n"], 1);
    EXPECT_EQ(o.summary["latency_ms"]["e2e"]["n"], 2);
  }
}

// Too long for the model, or for a whole pool: rejected at once with the reason, and all else goes on. The
// longest that fits is served.
TEST(Lengths, TooLongIsRejectedAndCounted) {
  for (const std::string& scenario : {kDisaggregated, kColocated}) {
    const bool colocated = scenario == kColocated;
    const Trace trace =
        made_trace({request_at(0, 32'700, 68), request_at(0, 32'700, 69), request_at(0, 40'000, 1),
                    request_at(0, 100, 10), request_at(0, 9000, 10)});
    const Outcomes o = run_text(scenario, trace);
    expect_conserved(o, trace);
    EXPECT_EQ(o.run.requests[0].status, RequestStatus::completed);
    EXPECT_EQ(o.run.requests[1].reason, Reason::exceeds_max_model_len);
    EXPECT_EQ(o.run.requests[2].reason, Reason::exceeds_max_model_len);
    EXPECT_EQ(o.run.requests[2].e2e(), 0);
    EXPECT_EQ(o.summary["requests"]["by_reason"], (nlohmann::ordered_json{{"exceeds_max_model_len", 2}}));
    EXPECT_EQ(o.run.requests[3].concurrency, 1) << "those rejected at once are not in flight";

    // 500 blocks and vLLM's null block: 8000 tokens.
    const std::string pool = colocated ? "pools.worker" : "pools.decode";
    const Outcomes small = run_text(scenario, trace, {pool + ".engine.num_gpu_blocks_override=501"});
    expect_conserved(small, trace);
    EXPECT_EQ(small.run.requests[4].reason, Reason::exceeds_kv_cache);
    EXPECT_EQ(count(small.run, RequestStatus::completed), 1u);
    const Trace brim = made_trace({request_at(0, 7990, 10), request_at(0, 7990, 11)});
    const Outcomes full = run_text(scenario, brim, {pool + ".engine.num_gpu_blocks_override=501"});
    EXPECT_EQ(full.run.requests[0].status, RequestStatus::completed);
    EXPECT_EQ(full.run.requests[1].reason, Reason::exceeds_kv_cache);
  }
}

// Prefill holds a prompt and one token, whatever is generated after it.
TEST(Lengths, PrefillNeedsNoRoomForTheOutput) {
  const Trace trace = made_trace({request_at(0, 7999, 100), request_at(0, 8000, 100)});
  const Outcomes o = run_text(kDisaggregated, trace, {"pools.prefill.engine.num_gpu_blocks_override=501"});
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[0].status, RequestStatus::completed);
  EXPECT_EQ(o.run.requests[1].reason, Reason::exceeds_kv_cache);
}

// A run in which nothing completes ends, and says why: the command line's exit 3.
TEST(Lengths, NothingCompletes) {
  const Trace trace = made_trace({request_at(0, 40'000, 1), request_at(kSecond, 50'000, 1)});
  const Outcomes o = run_text(kDisaggregated, trace);
  expect_conserved(o, trace);
  EXPECT_EQ(count(o.run, RequestStatus::rejected), 2u);
  EXPECT_EQ(o.summary["requests"]["completed"], 0);
  EXPECT_EQ(o.summary["requests"]["by_reason"], (nlohmann::ordered_json{{"exceeds_max_model_len", 2}}));
}

// Prompts that lack fewer tokens than the threshold are computed where they are decoded: no hand-over.
TEST(LocalPrefill, ShortPromptsStayOnDecode) {
  const Trace trace = made_trace({request_at(0, 299, 3), request_at(kSecond, 300, 3)});
  const Outcomes o = run_text(kDisaggregated, trace, {"router.local_prefill_threshold=300"});
  expect_conserved(o, trace);
  const RequestRecord &local = o.run.requests[0], &handed = o.run.requests[1];
  EXPECT_EQ(local.prefill_worker, local.decode_worker);
  EXPECT_EQ(o.deployment.workers[local.decode_worker].pool, 1);
  EXPECT_EQ(local.transfer_bytes, 0);
  EXPECT_GT(stage(local, Stage::prefill), 0);
  EXPECT_EQ(stage(local, Stage::handoff_dispatch) + stage(local, Stage::first_token), 0);
  EXPECT_EQ(o.deployment.workers[handed.prefill_worker].pool, 0);
  EXPECT_GT(handed.transfer_bytes, 0);
}

// A conversation's next turn finds most of its prompt on the decode worker: only the rest is moved. What
// lacks no more than full_hit_tokens is not moved at all, and prefill is told.
TEST(DecodeHits, OnlyTheRestIsMoved) {
  Trace trace = made_trace(
      {request_at(0, 1024, 2), request_at(10 * kSecond, 1536, 2), request_at(20 * kSecond, 1536, 2)}, 512,
      {1, 2, 1, 2, 3, 1, 2, 3});
  trace.requests[0].hash_count = 2;
  trace.requests[1].hash_begin = 2;
  trace.requests[1].hash_count = 3;
  trace.requests[2].hash_begin = 5;
  trace.requests[2].hash_count = 3;
  const Outcomes o = run_text(kDisaggregated, trace, kOneEach);
  expect_conserved(o, trace);
  const auto& r = o.run.requests;
  EXPECT_EQ(r[0].transferred_tokens, 1024);
  EXPECT_EQ(r[1].decode_hit_tokens, 1024);
  EXPECT_EQ(r[1].transferred_tokens, 512);
  EXPECT_EQ(r[1].transfer_bytes * 2, r[0].transfer_bytes);
  EXPECT_EQ(r[2].decode_hit_tokens, 1520);  // never all: the last token is computed
  EXPECT_EQ(r[2].transferred_tokens, 0);
  EXPECT_EQ(r[2].recomputed_tokens, 16);
  EXPECT_EQ(stage(r[2], Stage::transfer_post) + stage(r[2], Stage::transfer_wire), 0);
  // Its prefill leg was wasted, and freed: by the notification, or when the run ended before it was seen.
  EXPECT_EQ(o.run.transfers.leases_expired, 0);

  const Outcomes strict = run_text(kDisaggregated, trace, with(kOneEach, {"transfer.full_hit_tokens=0"}));
  expect_conserved(strict, trace);
  EXPECT_EQ(strict.run.requests[2].transferred_tokens, 16);
}

// A lease that runs out before decode has read: fail or recompute, as the policy says. First contact, 50 ms
// here, is longer than the lease of 20; with heartbeats it would be renewed, but the first one to an unknown
// engine is that contact. Prefill notices at the next request's steps.
TEST(Lease, ExpiresByPolicy) {
  std::vector<Request> requests;
  for (int i = 0; i < 20; ++i) requests.push_back(request_at(i * 15 * kMillisecond, 1000, 4));
  const Trace trace = made_trace(requests);
  const Sets lease = with(kOneEach, {"transfer.kv_lease_duration_s=0.02", "transfer.handshake_ms=50",
                                     "transfer.prep_us_per_descriptor=0"});
  const Outcomes fail = run_text(kDisaggregated, trace, lease);
  expect_conserved(fail, trace);
  const RequestRecord& r = fail.run.requests[0];
  EXPECT_EQ(r.status, RequestStatus::failed);
  EXPECT_EQ(r.reason, Reason::kv_lease_expired);
  EXPECT_GT(fail.run.transfers.leases_expired, 0);
  EXPECT_EQ(fail.summary["transfers"]["failed"].get<std::size_t>(), count(fail.run, RequestStatus::failed));
  EXPECT_GT(count(fail.run, RequestStatus::completed), 0u) << "after the handshake leases are renewed";

  const Outcomes again =
      run_text(kDisaggregated, trace, with(lease, {"transfer.kv_load_failure_policy=recompute"}));
  expect_conserved(again, trace);
  EXPECT_EQ(count(again.run, RequestStatus::completed), trace.requests.size());
  EXPECT_GE(again.run.requests[0].recomputed_tokens, 1000);
  EXPECT_GT(again.run.transfers.failed, 0);
}

// So short that it runs out while the answer is on its way to decode: nobody was told of it.
TEST(Lease, ExpiresBeforeDecodeHasHeardOfIt) {
  std::vector<Request> requests;
  for (int i = 0; i < 30; ++i) requests.push_back(request_at(i * 3 * kMillisecond, 200, 2));
  const Trace trace = made_trace(requests);
  const Sets lease = with(kOneEach, {"transfer.kv_lease_duration_s=0.001", "router.hop_ms=40"});
  const Outcomes fail = run_text(kDisaggregated, trace, lease);
  expect_conserved(fail, trace);
  EXPECT_GT(count(fail.run, RequestStatus::failed), 0u);
  const Outcomes again =
      run_text(kDisaggregated, trace, with(lease, {"transfer.kv_load_failure_policy=recompute"}));
  expect_conserved(again, trace);
  EXPECT_EQ(count(again.run, RequestStatus::completed), trace.requests.size());
}

// Prefill has nothing to run: its blocks are all leased, and a request waits for them. It takes empty steps,
// and in the first one after the lease has run out it frees them, though nobody told it anything.
TEST(Lease, ABlockedPrefillFreesWhatHasExpired) {
  const Trace trace = made_trace({request_at(0, 1500, 4), request_at(100 * kMillisecond, 1500, 4)});
  const Outcomes o = run_text(
      kDisaggregated, trace,
      with(kOneEach, {"pools.prefill.engine.num_gpu_blocks_override=121", "transfer.kv_lease_duration_s=1",
                      "transfer.handshake_ms=9000", "transfer.kv_load_failure_policy=recompute"}));
  expect_conserved(o, trace);
  const RequestRecord &first = o.run.requests[0], &second = o.run.requests[1];
  // Both prompts take as long; the first is computed on decode once more, which counts as prefill too.
  const Nanos expiry = stage(first, Stage::router) + stage(second, Stage::prefill) + kSecond;
  const Nanos idle_since = second.arrival + stage(second, Stage::router);
  const Nanos idle = o.deployment.pools[0].engine.idle_step;
  EXPECT_EQ(stage(second, Stage::prefill_queue), (expiry - idle_since + idle - 1) / idle * idle);
  // The second's own lease runs out as well, but then prefill sleeps, and nobody frees its blocks.
  EXPECT_EQ(o.run.transfers.failed, 1);
  EXPECT_EQ(second.recomputed_tokens, 1);
}

// A thread posts to four prefill ranks, one after the other, for some 200 ms (blocks of one token). The lease
// runs out meanwhile, so that the later parts have nothing to read: the load has failed when the last of them
// should start, before the thread would have been done. Decode computes the prompt long before that.
TEST(Lease, RunsOutWhileAThreadStillPosts) {
  std::vector<Request> requests = {request_at(0, 200, 4)};
  for (int i = 1; i < 30; ++i) requests.push_back(request_at(i * 10 * kMillisecond, 100, 0));
  const Trace trace = made_trace(requests);
  const Outcomes o = run_text(
      kDisaggregated, trace,
      with(kOneEach, {"pools.prefill.tensor_parallel=4", "pools.prefill.engine.block_size=1",
                      "pools.decode.engine.block_size=1", "transfer.warm_start=true",
                      "transfer.background_receiver=true", "transfer.heartbeat_interval_s=1000",
                      "transfer.kv_lease_duration_s=0.03", "transfer.kv_load_failure_policy=recompute"}));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[0];
  EXPECT_EQ(r.status, RequestStatus::completed);
  EXPECT_EQ(o.run.transfers.failed, 1);
  EXPECT_EQ(r.recomputed_tokens, 200);
  EXPECT_LT(r.first_token, 224 * kMillisecond);
}

// A queue at decode much longer than the lease: heartbeats (every sixth of it, each worth two thirds of it
// from when it is seen) keep the blocks of whoever waits. Prompts without output keep prefill awake, which
// would reap what has expired.
TEST(Lease, HeartbeatsRenewItForThoseWhoWait) {
  std::vector<Request> requests;
  for (int i = 0; i < 100; ++i) {
    requests.push_back(request_at(i * 200 * kMillisecond, 100, 0));
    if (i < 40) requests.push_back(request_at(i * 200 * kMillisecond + 1, 1500, 300));
  }
  const Trace trace = made_trace(requests);
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kOneEach, {"pools.decode.engine.max_num_seqs=2", "transfer.kv_lease_duration_s=2"}));
  expect_conserved(o, trace);
  EXPECT_GT(total(o.run, Stage::decode_admission), 100 * kSecond);
  EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
}

// Remote state that was idle for longer than engine_ttl is forgotten: the handshake is repeated.
TEST(Handshake, IsRepeatedAfterTheEngineTtl) {
  const Trace trace =
      made_trace({request_at(0, 500, 2), request_at(10 * kSecond, 500, 2), request_at(40 * kSecond, 500, 2)});
  const Outcomes o = run_text(kDisaggregated, trace, with(kOneEach, {"transfer.engine_ttl_s=20"}));
  expect_conserved(o, trace);
  const Nanos handshake = o.loaded.scenario.transfer.handshake;
  EXPECT_GE(stage(o.run.requests[0], Stage::transfer_post), handshake);
  EXPECT_LT(stage(o.run.requests[1], Stage::transfer_post), handshake);
  EXPECT_GE(stage(o.run.requests[2], Stage::transfer_post), handshake);
}

// Heads cut differently on both sides: the bytes are decode's own, descriptors are smaller and more.
TEST(TensorParallel, HeterogeneousDegrees) {
  const Trace trace = stream(10, 100 * kMillisecond, 1000, 10);
  const auto run = [&](int prefill, int decode) {
    return run_text(kDisaggregated, trace,
                    with(kOneEach, {"pools.prefill.tensor_parallel=" + std::to_string(prefill),
                                    "pools.decode.tensor_parallel=" + std::to_string(decode)}));
  };
  const Outcomes same = run(2, 2), gathers = run(4, 2), splits = run(2, 4);
  for (const Outcomes* o : {&same, &gathers, &splits}) {
    expect_conserved(*o, trace);
    EXPECT_EQ(count(o->run, RequestStatus::completed), trace.requests.size());
    EXPECT_EQ(o->run.transfers.bytes, same.run.transfers.bytes);
  }
  const std::int64_t blocks = 63;  // of 1000 tokens
  EXPECT_EQ(same.run.requests[0].descriptors, 2 * 64);
  EXPECT_EQ(gathers.run.requests[0].descriptors, 2 * 64 * 2 * blocks);
  EXPECT_EQ(splits.run.requests[0].descriptors, 4 * 64 * blocks);
  // Eight prefill GPUs' tx in use, or one of each pair, but never a byte twice: checked by conservation.
}

// Pools on one node, by list: peers use NVLink, which is faster than their network cards.
TEST(Placement, PeersOnOneNodeUseNvlink) {
  const Trace trace = stream(10, 200 * kMillisecond, 4000, 10);
  const std::string together =
      R"(placement=[{"pool":"prefill","replica":0,"node":0,"gpus":[0]},{"pool":"decode","replica":0,"node":0,"gpus":[1]}])";
  const Outcomes near = run_text(kDisaggregated, trace, with(kOneEach, {together}));
  const Outcomes far = run_text(kDisaggregated, trace, kOneEach);
  expect_conserved(near, trace);
  expect_conserved(far, trace);
  EXPECT_EQ(near.deployment.nodes.size(), 1u);
  EXPECT_EQ(far.deployment.nodes.size(), 2u);
  ASSERT_EQ(near.run.links.size(), 2u);
  for (const LinkReport& link : near.run.links) EXPECT_NE(link.name.find("nvlink"), std::string::npos);
  for (const LinkReport& link : far.run.links) EXPECT_NE(link.name.find("efa"), std::string::npos);
  EXPECT_LT(near.summary["transfers"]["wire_ms"]["mean"].get<double>(),
            far.summary["transfers"]["wire_ms"]["mean"].get<double>());
  // One node instead of two, half the bill.
  EXPECT_NEAR(near.summary["cost"]["billed_usd"].get<double>() * 2,
              far.summary["cost"]["billed_usd"].get<double>(),
              0.01 * far.summary["cost"]["billed_usd"].get<double>());
}

// Posting is on the forward thread: with fragmented pools every descriptor delays the decodes of the step.
TEST(Posting, DelaysTheDecodesOfItsStep) {
  const Trace trace = stream(20, 50 * kMillisecond, 4000, 60);
  const Outcomes slow =
      run_text(kDisaggregated, trace, with(kOneEach, {"transfer.post_us_per_descriptor=300"}));
  const Outcomes fast =
      run_text(kDisaggregated, trace, with(kOneEach, {"transfer.post_us_per_descriptor=0.1"}));
  expect_conserved(slow, trace);
  EXPECT_GT(slow.run.workers[1].posting, 20 * 64 * 300 * kMicrosecond);
  EXPECT_GT(slow.summary["latency_ms"]["itl"]["max"].get<double>(),
            fast.summary["latency_ms"]["itl"]["max"].get<double>() + 15);
}

// A closed loop keeps `concurrency` requests in flight: one arrives when one ends.
TEST(ClosedLoop, KeepsItsConcurrency) {
  std::vector<Request> requests;
  for (int i = 0; i < 40; ++i) requests.push_back(request_at(0, 300 + 20 * (i % 7), 10 + i % 11));
  const Trace trace = made_trace(requests);
  std::string text = kColocated;
  const std::string workload = R"({"trace": "made by the test", "format": "mooncake"})";
  text.replace(text.find(workload), workload.size(),
               R"({"synthetic": {"requests": 40, "concurrency": 4, "isl": 300, "osl": 10}})");
  const Outcomes o = run_shipped(text, trace);
  expect_conserved(o, trace);
  for (std::size_t i = 0; i < 40; ++i) {
    // In flight, or about to be sent at the same instant: where two requests end at once, two follow at once.
    const auto together = [&](const RequestRecord& r) {
      return r.arrival == o.run.requests[i].arrival && &r > &o.run.requests[i];
    };
    EXPECT_EQ(o.run.requests[i].concurrency + std::ranges::count_if(o.run.requests, together), 3) << i;
    if (i >= 4) {
      EXPECT_TRUE(std::ranges::any_of(o.run.requests, [&](const RequestRecord& r) {
        return r.end + 1 == o.run.requests[i].arrival;
      })) << i;
    }
  }
}

// The same over a trace: its arrivals do not matter, its order does, and what a synthetic workload of these
// requests would do is what happens. Little's law over the whole run, to the nanosecond: N in flight from the
// first arrival until nothing is left to send, and a nanosecond between an end and the next arrival.
TEST(ClosedLoop, ReplaysATraceInItsOrder) {
  constexpr std::int64_t kInFlight = 6;
  std::vector<Request> requests, at_zero;
  for (int i = 0; i < 300; ++i) {
    requests.push_back(request_at(i * 7 * kSecond, 300 + 20 * (i % 7), 10 + i % 11));
    at_zero.push_back(request_at(0, requests.back().prompt_tokens, requests.back().output_tokens));
  }
  const Trace trace = made_trace(requests);
  for (const std::string& scenario : {kColocated, kDisaggregated}) {
    const Outcomes o = run_text(scenario, trace, {"workload.concurrency=6"});
    expect_conserved(o, trace);
    std::int64_t in_flight_time = 0;
    Nanos last_sent = 0;
    for (const RequestRecord& r : o.run.requests) last_sent = std::max(last_sent, r.arrival);
    for (std::size_t i = 0; i < o.run.requests.size(); ++i) {
      const RequestRecord& r = o.run.requests[i];
      EXPECT_LT(r.concurrency, kInFlight);
      if (i > 0) {
        EXPECT_GE(r.arrival, o.run.requests[i - 1].arrival) << i;
      }
      in_flight_time += std::min(r.end, last_sent) - std::min(r.arrival, last_sent);
    }
    const std::int64_t gaps = 300 - kInFlight;  // a slot is empty for 1 ns after each end that brings one
    EXPECT_EQ(in_flight_time, kInFlight * last_sent - gaps);

    std::string text = scenario;
    const std::string workload = R"({"trace": "made by the test", "format": "mooncake"})";
    text.replace(text.find(workload), workload.size(),
                 R"({"synthetic": {"requests": 300, "concurrency": 6, "isl": 300, "osl": 10}})");
    EXPECT_EQ(run_text(text, made_trace(at_zero)).csv, o.csv);
    EXPECT_EQ(
        first_difference(
            run_text(scenario, trace, with({"workload.concurrency=6"}, step_by_step(scenario))).csv, o.csv),
        "");
  }
}

// A client's limit: as one server with that many places in front of the cluster, first come, first served. A
// request is sent when it arrives or, where all places are taken, a nanosecond after one of them is free, and
// its clocks start then. Without queueing at the client nothing changes.
TEST(ClosedLoop, ALimitHoldsBackWhatIsBeyondIt) {
  const Trace trace = stream(60, 20 * kMillisecond, 3000, 40);
  for (const std::string& scenario : {kColocated, kDisaggregated}) {
    const Outcomes free = run_text(scenario, trace);
    EXPECT_EQ(run_text(scenario, trace, {"workload.max_concurrency=60"}).csv, free.csv);
    const Outcomes o = run_text(scenario, trace, {"workload.max_concurrency=3"});
    expect_conserved(o, trace);
    std::size_t held = 0;
    for (std::size_t i = 0; i < o.run.requests.size(); ++i) {
      const RequestRecord& r = o.run.requests[i];
      const Nanos due = trace.requests[i].arrival - trace.requests[0].arrival;
      std::vector<Nanos> ends;  // of those sent before
      for (std::size_t k = 0; k < i; ++k) ends.push_back(o.run.requests[k].end);
      std::ranges::sort(ends, std::greater<>());
      const Nanos place = ends.size() < 3 ? 0 : ends[2] + 1;
      EXPECT_EQ(r.arrival, std::max(due, place)) << i;
      held += place > due;
    }
    EXPECT_GT(held, 10u);
    EXPECT_LT(held, 60u);
    EXPECT_EQ(run_text(scenario, trace, with({"workload.max_concurrency=3"}, step_by_step(scenario))).csv,
              o.csv);
  }
}

// Outside the window a request is simulated but not in the statistics.
TEST(Window, OnlyWhatArrivesInsideCounts) {
  const Trace trace = stream(10, kSecond, 500, 5);
  const Outcomes all = run_text(kDisaggregated, trace);
  const Outcomes some = run_text(kDisaggregated, trace, {"workload.warmup_s=2", "workload.measure_s=5"});
  EXPECT_EQ(some.summary["requests"]["completed"], 10);
  EXPECT_EQ(some.summary["latency_ms"]["ttft"]["n"], 5);  // 2 s to 6 s
  EXPECT_EQ(some.summary["latency_ms"]["itl"]["n"], 5 * 4);
  EXPECT_EQ(all.csv, some.csv);
}

// Hash blocks that an engine block does not divide: an error before anything has run, at its place.
TEST(Input, BlockSizeMustDivideTheHashBlock) {
  const Trace trace = made_trace({request_at(0, 100, 1)}, 48);
  try {
    run_text(kDisaggregated, trace,
             {"pools.prefill.engine.block_size=32", "pools.decode.engine.block_size=32"});
    FAIL() << "accepted";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("block_size"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("32"), std::string::npos) << e.what();
  }
}

// An interrupted run reports what is done so far and conserves it.
TEST(Interrupt, ReportsWhatIsDone) {
  const Trace trace = stream(400, 5 * kMillisecond, 800, 40);
  const LoadedScenario loaded = parse_scenario(kDisaggregated, "test.json");
  const Deployment deployment = plan_deployment(loaded);
  RunHooks hooks;
  hooks.check_pools = true;
  int polls = 0;
  hooks.interrupted = [&] { return ++polls > 1; };
  const RunResult run = simulate(deployment, loaded, trace, hooks);
  EXPECT_EQ(run.status, RunStatus::interrupted);
  EXPECT_GT(count(run, RequestStatus::in_flight), 0u);
  const auto summary = summarize(run, RunContext{}, trace);
  EXPECT_EQ(summary["status"], "interrupted");
  EXPECT_GT(summary["requests"]["in_flight"].get<int>(), 0);
  EXPECT_LT(summary["requests"]["injected"].get<int>(), 400);
}

}  // namespace
}  // namespace pdsim
