// Bidirectional transfer (kv-transfer facts 1.3): what decode keeps of a turn, what the router remembers of
// it, what the next turn's prefill reads back, and who frees the blocks when.
//
// Answers are shorter than a block in most tests, so that the prompts' blocks are all that matters.
#include <gtest/gtest.h>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

const Sets kWarm = {"transfer.warm_start=true"};
// Prefill forgets prompts at once (as with --no-enable-prefix-caching): all reuse is by reading back.
const Sets kReads = with(with(kOneEach, kWarm),
                         {"transfer.bidirectional=true", "pools.prefill.engine.enable_prefix_caching=false"});

std::int64_t held_ns(const Outcomes& o, std::size_t worker, std::string_view cause) {
  const auto series = std::ranges::find(kBlockCauses, cause) - kBlockCauses.begin();
  return static_cast<std::int64_t>(o.run.workers[worker].blocks.total(static_cast<std::size_t>(series)));
}

// A turn of 1024 tokens and 8 of answer, and the next, 1600 tokens, ten seconds later. Of the first, decode
// holds the KV of 1031 tokens (the last token's was never computed) in 65 blocks.
Trace two_turns(Nanos gap = 10 * kSecond) {
  return conversation({request_at(0, 1024, 8), request_at(gap, 1600, 8)});
}

Trace add(Trace trace, Request r, std::uint64_t content) {
  r.hash_begin = trace.hash_ids.size();
  r.hash_count = (r.prompt_tokens + 511) / 512;
  for (std::int32_t i = 0; i < r.hash_count; ++i) {
    trace.hash_ids.push_back(content * 1'000'000 + static_cast<std::uint64_t>(i));
  }
  const auto after = std::ranges::upper_bound(trace.requests, r.arrival, {}, &Request::arrival);
  trace.requests.insert(after, r);
  ++trace.report.rows_read;
  ++trace.report.rows_used;
  return trace;
}

// ------------------------------------------------------------------------------------ a turn, in time

struct Case {
  const char* model;
  int prefill_tp, decode_tp;
  bool warm;
  const char* async;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model;
}

class ReadBack : public testing::TestWithParam<Case> {};

// The second turn alone:
//   arrival --hop--> prefill, asleep, allocates what it will read and posts in that step, on its forward
//   thread (its own first contact comes before: decode has made its own already, for the first turn's pull)
//   a READ, and empty steps until it is seen: reuse_transfer. The step that starts there computes the rest
//   the notification to decode, asleep, is seen when the prompt comes there: until then the blocks are pinned
//   decode finds the first turn's whole blocks in its own cache and pulls the others
TEST_P(ReadBack, TheSecondTurnToTheNanosecond) {
  const Case& c = GetParam();
  const Trace trace = two_turns();
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kReads, {std::string("model=") + c.model,
                             "pools.prefill.tensor_parallel=" + std::to_string(c.prefill_tp),
                             "pools.decode.tensor_parallel=" + std::to_string(c.decode_tp),
                             std::string("pools.prefill.engine.async_scheduling=") + c.async,
                             std::string("pools.decode.engine.async_scheduling=") + c.async,
                             std::string("transfer.warm_start=") + (c.warm ? "true" : "false")}));
  expect_conserved(o, trace);
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const RequestRecord &first = o.run.requests[0], &r = o.run.requests[1];
  const Nanos hop = o.loaded.scenario.router.hop;
  EXPECT_EQ(first.reuse, Reuse::never_seen);

  const Nanos scheduled = r.arrival + hop;
  const Layout back = layout_of(o, 1, 0);
  Nanos posts = scheduled;
  const Nanos idle = prefill.engine.idle_step;
  if (!c.warm) {
    const Nanos contact = foretell_contact(o, back.sources, back.regions, 1, false);
    posts = on_grid(scheduled + idle, idle, scheduled + contact);
  }
  Foretold read;
  read.op = Op::read;
  read.from = 1;
  read.to = 0;
  read.blocks = 65;
  read.begin = posts;
  read = foretell(o, read);
  const Nanos landed = foretell_landing(o, {read});
  const Nanos first_end = read.post_end() + idle;
  const Nanos seen = landed <= first_end ? first_end : on_grid(first_end, idle, landed);
  EXPECT_EQ(stage(r, Stage::prefill_queue), 0);
  EXPECT_EQ(stage(r, Stage::reuse_transfer), seen - scheduled);
  EXPECT_EQ(r.read_back_bytes, read.bytes());
  EXPECT_EQ(o.run.transfers.read_back_descriptors, read.all_descriptors());
  EXPECT_EQ(r.remote_hit_tokens, 1031);
  EXPECT_EQ(r.local_hit_tokens, 0);
  const Nanos prefilled = seen + prefill_time(prefill, 1600, 1031);
  EXPECT_EQ(stage(r, Stage::prefill), prefilled - seen);

  // What it was decided on: the same flows (without the contact, which later reads use as well) and half an
  // empty step until they are seen; and the prompt's first 1031 tokens computed.
  EXPECT_TRUE(r.read_chosen);
  EXPECT_EQ(r.predicted_compute, prefill.step_model->time(prefill_shape(0, 1031, false)).ns);
  if (back.sources == 1) {
    EXPECT_NEAR(static_cast<double>(r.predicted_read), static_cast<double>(landed - posts + idle / 2), 2);
  }
  EXPECT_EQ(r.reuse, seen - scheduled > r.predicted_compute ? Reuse::hit_slower_than_recompute : Reuse::hit);

  // Decode: the pin goes at the boundary at which the prompt comes, with the notification long there.
  const Nanos handed = prefilled + hop;
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), hop);
  EXPECT_EQ(held_ns(o, 1, "pinned"), 65 * (handed - first.end));
  EXPECT_EQ(r.decode_hit_tokens, 1024);
  EXPECT_EQ(r.transferred_tokens, 576);
  Foretold pull;
  pull.op = Op::read;
  pull.blocks = 36;
  pull.begin = handed;
  pull = foretell(o, pull);
  EXPECT_EQ(r.transfer_bytes, pull.bytes());
  EXPECT_EQ(stage(r, Stage::transfer_post), pull.posting);
  EXPECT_EQ(stage(r, Stage::transfer_wire), foretell_landing(o, {pull}) - pull.post_end());
  EXPECT_EQ(stage(r, Stage::first_token), decode_time(decode, 1600, 1, 1));

  const RetentionTotals& kept = o.run.retention;
  EXPECT_EQ(kept.pins, 2);
  EXPECT_EQ(kept.read, 1);
  EXPECT_EQ(kept.outstanding, 1);
  EXPECT_DOUBLE_EQ(kept.byte_seconds,
                   65 * decode.kv_bytes_per_block * c.decode_tp * to_seconds(handed - first.end));
  EXPECT_DOUBLE_EQ(kept.prefill_gpu_s_avoided, to_seconds(r.predicted_compute) * c.prefill_tp);
}

const Case kCases[] = {
    {"llama-3.1-8b", 1, 1, true, "true"},  {"llama-3.1-8b", 1, 1, true, "false"},
    {"llama-3.1-8b", 1, 1, false, "true"}, {"qwen3-32b", 4, 4, true, "true"},
    {"qwen3-32b", 8, 4, true, "true"},     {"qwen3-32b", 2, 8, false, "true"},
    {"glm-5-fp8", 8, 8, true, "true"},
};

INSTANTIATE_TEST_SUITE_P(All, ReadBack, testing::ValuesIn(kCases), [](const auto& info) {
  const Case& c = info.param;
  std::string name = c.model;
  for (char& ch : name) ch = ch == '-' || ch == '.' ? '_' : ch;
  return name + "_tp" + std::to_string(c.prefill_tp) + "_tp" + std::to_string(c.decode_tp) +
         (c.warm ? "_warm" : "_cold") + (c.async[0] == 't' ? "_async" : "_sync");
});

// --------------------------------------------------------------------- what prefill does with an address

// Below the threshold it is computed, and decode is told: the same notification, without a read.
TEST(Reuse, BelowTheThresholdItIsComputedAndDecodeTold) {
  const Trace trace = two_turns();
  for (const auto& [threshold, read] : {std::pair{"1031", true}, {"1032", false}}) {
    const Outcomes o = run_text(kDisaggregated, trace,
                                with(kReads, {std::string("transfer.kv_recompute_threshold=") + threshold}));
    expect_conserved(o, trace);
    const RequestRecord& r = o.run.requests[1];
    EXPECT_EQ(r.remote_hit_tokens, read ? 1031 : 0);
    EXPECT_EQ(o.run.retention.read, read ? 1 : 0);
    EXPECT_EQ(o.run.retention.notified, read ? 0 : 1);
    EXPECT_GE(r.predicted_read, 0);
    EXPECT_GE(r.predicted_compute, 0);
    EXPECT_EQ(r.read_chosen, read);
    if (read) continue;
    EXPECT_EQ(r.reuse, Reuse::below_threshold);
    EXPECT_EQ(o.run.transfers.read_backs, 0);
    EXPECT_EQ(stage(r, Stage::reuse_transfer), 0);
    EXPECT_EQ(stage(r, Stage::prefill), prefill_time(o.deployment.pools[0], 1600));
    EXPECT_EQ(outcome(o.run, TransferOutcome::skipped), 1);
  }
}

// Counted from what prefill has itself: of 1031 tokens it lacks 7.
TEST(Reuse, OnlyWhatPrefillLacksCounts) {
  const Trace trace = two_turns();
  const Sets caches = with(kReads, {"pools.prefill.engine.enable_prefix_caching=true"});
  const Outcomes o = run_text(kDisaggregated, trace, caches);
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].reuse, Reuse::below_threshold);
  EXPECT_EQ(o.run.requests[1].local_hit_tokens, 1024);
  EXPECT_EQ(o.run.retention.notified, 1);
  const Outcomes eager = run_text(kDisaggregated, trace, with(caches, {"transfer.kv_recompute_threshold=7"}));
  expect_conserved(eager, trace);
  EXPECT_EQ(eager.run.requests[1].local_hit_tokens, 1024);
  EXPECT_EQ(eager.run.requests[1].remote_hit_tokens, 7);
  Foretold read;
  read.op = Op::read;
  read.from = 1;
  read.to = 0;
  read.blocks = 1;
  EXPECT_EQ(eager.run.requests[1].read_back_bytes, foretell(eager, read).bytes());
}

// Prefill has all of it (an answer of one token leaves no KV of its own): nothing is read, decode is told.
TEST(Reuse, AFullLocalHitIsToldToo) {
  const Trace trace = conversation({request_at(0, 1024, 1), request_at(10 * kSecond, 1600, 8)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kReads, {"pools.prefill.engine.enable_prefix_caching=true"}));
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].local_hit_tokens, 1024);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 0);
  EXPECT_EQ(o.run.requests[1].reuse, Reuse::local_hit);
  EXPECT_EQ(o.run.retention.notified, 1);
  EXPECT_EQ(o.run.retention.outstanding, 1);
}

// Within a session what was generated is the next prompt's as well: 1024 + 512 tokens and an answer that
// decode holds but for its last token. Prefill reads it all (or, with a cache of its own prompts, what
// follows them), decode finds it in its own cache to the block. Without a session only the prompt itself is
// known again.
TEST(Reuse, WhatWasGeneratedIsReadToo) {
  const Trace trace = conversation({request_at(0, 1024, 512), request_at(30 * kSecond, 2100, 8)});
  for (const bool caches : {false, true}) {
    const Outcomes o = run_text(kDisaggregated, trace,
                                with(kReads, {std::string("pools.prefill.engine.enable_prefix_caching=") +
                                              (caches ? "true" : "false")}));
    expect_conserved(o, trace);
    const RequestRecord& r = o.run.requests[1];
    EXPECT_EQ(r.reuse, Reuse::hit);
    EXPECT_EQ(r.local_hit_tokens, caches ? 1024 : 0);
    EXPECT_EQ(r.remote_hit_tokens, caches ? 511 : 1535);
    EXPECT_EQ(r.decode_hit_tokens, 1520);
    EXPECT_EQ(r.transferred_tokens, 580);
  }
  Trace alone = trace;
  for (Request& r : alone.requests) r.session = -1;
  const Outcomes o = run_text(kDisaggregated, alone, kReads);
  expect_conserved(o, alone);
  EXPECT_EQ(o.run.requests[1].decode_hit_tokens, 1024);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 0);
}

// Round robin over two decode workers: the second turn is decoded by the other one, which has nothing of it.
// Prefill still reads from the first.
TEST(Reuse, TheNextTurnOnAnotherDecodeWorker) {
  const Trace trace = two_turns();
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kReads, {"pools.decode.replicas=2", "router.policy=round_robin"}));
  expect_conserved(o, trace);
  const RequestRecord &first = o.run.requests[0], &r = o.run.requests[1];
  EXPECT_NE(first.decode_worker, r.decode_worker);
  EXPECT_EQ(r.remote_hit_tokens, 1031);
  EXPECT_EQ(r.decode_hit_tokens, 0);
  EXPECT_EQ(r.transferred_tokens, 1600);
  // The notification reached a worker that sleeps on: the pin outlives the run.
  EXPECT_EQ(o.run.retention.read, 0);
  EXPECT_EQ(o.run.retention.outstanding, 2);
}

// Turns that are moved to another prefill worker read what that one never computed; those that stay have it.
TEST(Reuse, TheNextTurnOnAnotherPrefillWorker) {
  std::vector<Request> turns;
  for (int i = 0; i < 8; ++i) turns.push_back(request_at(i * 10 * kSecond, 1024 + 600 * i, 8));
  const Trace trace = conversation(turns);
  const Sets three = with(kReads, {"pools.prefill.replicas=3", "router.policy=session_affinity",
                                   "pools.prefill.engine.enable_prefix_caching=true"});
  const Outcomes stays = run_text(kDisaggregated, trace, three);
  const Outcomes moved = run_text(kDisaggregated, trace, with(three, {"router.reroute_fraction=1"}));
  expect_conserved(stays, trace);
  expect_conserved(moved, trace);
  EXPECT_EQ(stays.run.transfers.read_backs, 0) << "prefill lacks 8 tokens of a turn that it computed";
  for (std::size_t i = 1; i < turns.size(); ++i) {
    const RequestRecord &a = stays.run.requests[i], &b = moved.run.requests[i];
    EXPECT_EQ(a.prefill_worker, stays.run.requests[i - 1].prefill_worker);
    EXPECT_GE(a.local_hit_tokens, turns[i - 1].prompt_tokens / 512 * 512);
    EXPECT_NE(b.prefill_worker, moved.run.requests[i - 1].prefill_worker);
    EXPECT_EQ(b.local_hit_tokens + b.remote_hit_tokens, turns[i - 1].prompt_tokens + 7);
    EXPECT_GT(b.remote_hit_tokens, 0);
  }
}

// ------------------------------------------------------------------------------- what the router knows

TEST(Reuse, WithoutASessionNothingIsReused) {
  Trace trace = two_turns();
  for (Request& r : trace.requests) r.session = -1;
  trace.sessions.clear();
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  expect_conserved(o, trace);
  for (const RequestRecord& r : o.run.requests) EXPECT_EQ(r.reuse, Reuse::no_session);
  EXPECT_EQ(o.run.retention.pins, 2) << "decode pins all the same; only time frees it";
  EXPECT_EQ(o.run.retention.outstanding, 2);
}

// The router's entry lives from the turn's end until the next turn reaches prefill.
TEST(Reuse, TheRoutersMemoryRunsOut) {
  const Trace trace = two_turns();
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  const Nanos age = o.run.requests[1].arrival + o.loaded.scenario.router.hop - o.run.requests[0].end;
  const auto ttl = [&](Nanos ns) {
    return run_text(kDisaggregated, trace,
                    with(kReads, {"router.session_kv_ttl_s=" + std::to_string(to_seconds(ns))}));
  };
  const Outcomes out = ttl(age - kMillisecond), in = ttl(age + kMillisecond);
  expect_conserved(out, trace);
  EXPECT_EQ(out.run.requests[1].reuse, Reuse::ttl_expired);
  EXPECT_EQ(out.run.retention.outstanding, 2) << "nobody tells decode";
  EXPECT_EQ(in.run.requests[1].remote_hit_tokens, 1031);
}

// An update that is lost, and a second request before the first turn has ended: the router knows nothing.
TEST(Reuse, TheRouterDoesNotKnow) {
  const Trace trace = two_turns();
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kReads, {R"(faults=[{"kind":"message_lost","target":"router_update","at_s":0}])"}));
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].reuse, Reuse::router_unaware);
  EXPECT_EQ(o.run.transfers.messages_lost, 1);

  const Outcomes early = run_text(kDisaggregated, two_turns(10 * kMillisecond), kReads);
  EXPECT_EQ(early.run.requests[1].reuse, Reuse::router_unaware);
}

// An entry is used once: the third turn gets what the second left.
TEST(Reuse, AnAddressIsUsedOnce) {
  const Trace trace = conversation(
      {request_at(0, 1024, 8), request_at(10 * kSecond, 1600, 8), request_at(20 * kSecond, 2200, 8)});
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 1031);
  EXPECT_EQ(o.run.requests[2].remote_hit_tokens, 1607);
  EXPECT_EQ(o.run.retention.pins, 3);
  EXPECT_EQ(o.run.retention.read, 2);
  EXPECT_EQ(o.run.retention.hit_tokens, 1031 + 1607);
}

// And while the second is being answered, there is none for a third.
TEST(Reuse, AnAddressIsGoneOnceItIsTaken) {
  const Trace trace = conversation({request_at(0, 1024, 8), request_at(10 * kSecond, 1600, 8),
                                    request_at(10 * kSecond + 20 * kMillisecond, 2200, 8)});
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 1031);
  EXPECT_EQ(o.run.requests[2].reuse, Reuse::router_unaware);
}

// ------------------------------------------------------------------------------------ deadlines, guards

// Decode keeps a turn for 6 s; another request wakes it at 8 s, and the blocks go. The next turn comes at 10
// s with an address that the router believes in.
struct Late {
  Trace trace = add(two_turns(), request_at(8 * kSecond, 300, 2), 7);
  Outcomes o;
  const RequestRecord& r;
  explicit Late(const Sets& more)
      : o(run_text(kDisaggregated, trace, with(with(kReads, {"transfer.decoder_kv_blocks_ttl_s=6"}), more))),
        r(o.run.requests[2]) {
    expect_conserved(o, trace);
    EXPECT_EQ(o.run.retention.expired, 1);
  }
};

TEST(ReuseDeadline, TheGuardDeclines) {
  const Late fails({});
  EXPECT_EQ(fails.r.reuse, Reuse::guard_declined);
  EXPECT_EQ(fails.r.status, RequestStatus::failed);
  EXPECT_EQ(fails.r.reason, Reason::kv_retention_expired);
  const Late computes({"transfer.kv_load_failure_policy=recompute"});
  EXPECT_EQ(computes.r.reuse, Reuse::guard_declined);
  EXPECT_EQ(computes.r.status, RequestStatus::completed);
  EXPECT_EQ(computes.r.remote_hit_tokens, 0);
  EXPECT_EQ(computes.o.run.transfers.stale_reads + computes.o.run.transfers.stale_reads_prevented, 0);
}

// The guard works on what is left: with 5 s to go it still reads, with less it declines.
TEST(ReuseDeadline, TheMarginIsFiveSeconds) {
  const Trace trace = two_turns();
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  const Nanos age = o.run.requests[1].arrival + o.loaded.scenario.router.hop - o.run.requests[0].end;
  for (const Nanos more : {kMillisecond, -kMillisecond}) {
    const Outcomes at = run_text(kDisaggregated, trace,
                                 with(kReads, {"transfer.kv_load_failure_policy=recompute",
                                               "transfer.decoder_kv_blocks_ttl_s=" +
                                                   std::to_string(to_seconds(age + 5 * kSecond + more))}));
    expect_conserved(at, trace);
    EXPECT_EQ(at.run.requests[1].reuse == Reuse::guard_declined, more < 0);
    EXPECT_EQ(at.run.requests[1].remote_hit_tokens, more < 0 ? 0 : 1031);
    // The same deadline, 3 s off by a clock that is wrong.
    const Outcomes wrong = run_text(
        kDisaggregated, trace,
        with(kReads,
             {"transfer.kv_load_failure_policy=recompute", "transfer.clock_error_s=3",
              "transfer.decoder_kv_blocks_ttl_s=" + std::to_string(to_seconds(age + 2 * kSecond + more))}));
    EXPECT_EQ(wrong.run.requests[1].reuse == Reuse::guard_declined, more < 0);
  }
}

// Without the deadline in the router's entry, or with a clock that is wrong by more than the margin, nothing
// declines. Then blocks that have changed hands would be read: prevented and counted, or, as in vLLM, read.
TEST(ReuseDeadline, WithoutTheGuardReadsAreStale) {
  for (const char* blind : {"transfer.expiry_margin_s=0", "transfer.clock_error_s=100"}) {
    SCOPED_TRACE(blind);
    const Late prevented({blind, "transfer.kv_load_failure_policy=recompute"});
    EXPECT_EQ(prevented.o.run.transfers.stale_reads_prevented, 1);
    EXPECT_EQ(prevented.o.run.transfers.stale_reads, 0);
    EXPECT_EQ(prevented.r.reuse, Reuse::load_failed);
    EXPECT_EQ(prevented.r.status, RequestStatus::completed);
    const Late stale({blind, "transfer.stale_guard=false"});
    EXPECT_EQ(stale.o.run.transfers.stale_reads, 1);
    EXPECT_EQ(stale.r.status, RequestStatus::completed) << "and nobody notices";
    EXPECT_EQ(stale.r.remote_hit_tokens, 1031);
  }
}

// ---------------------------------------------------------------------------------- policies by cost

// Reading 130 MiB back takes a few milliseconds over EFA and nearly half a second over TCP; computing 1031
// tokens takes some tens. The cost policy takes what is cheaper, the threshold reads whatever it costs.
TEST(ReuseCost, TakesTheSmallerPrediction) {
  const Trace trace = two_turns();
  const auto run = [&](const char* policy, const char* fabric) {
    return run_text(kDisaggregated, trace,
                    with(kReads, {std::string("transfer.reuse_policy=") + policy,
                                  std::string("network.fabric=") + fabric}));
  };
  for (const char* fabric : {"efa", "tcp"}) {
    const bool slow = fabric[0] == 't';
    const Outcomes cost = run("cost", fabric), threshold = run("threshold", fabric);
    expect_conserved(cost, trace);
    expect_conserved(threshold, trace);
    const RequestRecord &a = cost.run.requests[1], &b = threshold.run.requests[1];
    EXPECT_EQ(a.predicted_read, b.predicted_read);
    EXPECT_EQ(a.predicted_compute, b.predicted_compute);
    EXPECT_EQ(a.predicted_read > a.predicted_compute, slow);
    EXPECT_EQ(a.read_chosen, !slow);
    EXPECT_EQ(a.reuse, slow ? Reuse::recompute_cheaper : Reuse::hit);
    EXPECT_EQ(cost.run.retention.notified, slow ? 1 : 0);
    EXPECT_TRUE(b.read_chosen);
    EXPECT_EQ(b.reuse, slow ? Reuse::hit_slower_than_recompute : Reuse::hit);
    EXPECT_EQ(b.first_token > a.first_token, slow);
    // The summary: the threshold lost once over TCP, by what the read took beyond the computation.
    const auto& lost = threshold.summary["reuse_decisions"];
    EXPECT_EQ(lost["n"], 1);
    EXPECT_EQ(lost["share_lost"], slow ? 1.0 : 0.0);
    if (slow) {
      EXPECT_DOUBLE_EQ(lost["regret_ms"]["mean"],
                       to_ms(stage(b, Stage::reuse_transfer) - b.predicted_compute));
    }
    EXPECT_EQ(cost.summary["reuse_decisions"]["share_lost"], 0.0);
  }
}

// --------------------------------------------------------------------------------------- retention

// Four conversations, a second apart, then their second turns in the same order.
Trace four_conversations() {
  Trace trace = made_trace({}, 512);
  for (std::int32_t turn = 0; turn < 2; ++turn) {
    for (std::int32_t s = 0; s < 4; ++s) {
      Request r = request_at(turn * 20 * kSecond + s * kSecond, turn == 0 ? 1024 : 1536, 8);
      r.session = s;
      r.turn = turn;
      r.hash_begin = trace.hash_ids.size();
      r.hash_count = r.prompt_tokens / 512;
      for (std::int32_t i = 0; i < r.hash_count; ++i) {
        trace.hash_ids.push_back(static_cast<std::uint64_t>(s * 10 + i));
      }
      trace.requests.push_back(r);
    }
  }
  trace.sessions = {"a", "b", "c", "d"};
  trace.report.rows_read = trace.report.rows_used = trace.requests.size();
  return trace;
}

// A turn's 65 blocks are 130 MiB: two fit in 0.3 GiB. The third turn's end lets the first's go, the fourth's
// the second's; the last two are read. Their second turns' pins (97 blocks, 194 MiB) leave room for one more.
TEST(Retention, LruKeepsTheBudget) {
  const Trace trace = four_conversations();
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kReads, {"transfer.retention.policy=lru", "transfer.retention.budget_gib=0.3"}));
  expect_conserved(o, trace);
  const auto& q = o.run.requests;
  EXPECT_EQ(q[4].reuse, Reuse::evicted);
  EXPECT_EQ(q[5].reuse, Reuse::evicted);
  EXPECT_GE(o.run.retention.let_go, 2);
  const double block = 2.0 * 1024 * 1024;
  EXPECT_LE(o.run.retention.peak_bytes, 0.3 * 0x1p30);
  EXPECT_GE(o.run.retention.peak_bytes, 2 * 65 * block);
  // With a large one all four are read.
  const Outcomes all =
      run_text(kDisaggregated, trace,
               with(kReads, {"transfer.retention.policy=lru", "transfer.retention.budget_gib=10"}));
  expect_conserved(all, trace);
  for (int i = 4; i < 8; ++i)
    EXPECT_EQ(all.run.requests[static_cast<std::size_t>(i)].remote_hit_tokens, 1031);
  EXPECT_EQ(all.run.retention.let_go, 0);
}

// Two ranges: the first 512 tokens for 300 s, the rest for 5 s. A request that wakes decode at 8 s finds the
// tail's time over: whole blocks beyond 512 go, and the next turn reads 512 tokens.
TEST(Retention, PriorityRangesCutTheTail) {
  const Trace trace = add(two_turns(), request_at(8 * kSecond, 300, 2), 7);
  const std::string ranges =
      R"(transfer.retention.ranges=[{"from_token":0,"to_token":512,"priority":80,"duration_s":300},)"
      R"({"from_token":512,"priority":10,"duration_s":5}])";
  const Sets priority = with(kReads, {"transfer.retention.policy=priority", ranges});
  const Outcomes o = run_text(kDisaggregated, trace, priority);
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[2];
  EXPECT_EQ(r.reuse, Reuse::hit);
  EXPECT_EQ(r.remote_hit_tokens, 512);
  EXPECT_EQ(o.run.retention.expired, 0) << "a tail is not a pin";
  const Nanos hop = o.loaded.scenario.router.hop;
  const Nanos woken = o.run.requests[1].arrival + hop + stage(o.run.requests[1], Stage::prefill) + hop;
  const Nanos freed = r.arrival + hop + stage(r, Stage::reuse_transfer) + stage(r, Stage::prefill) + hop;
  // 65 blocks until then, 32 from then on; two pins of the others, of which one woke decode.
  const Nanos end = o.run.requests[0].end;
  const std::int64_t other = 19 * (o.run.end - o.run.requests[1].end);
  EXPECT_EQ(held_ns(o, 1, "pinned"), 65 * (woken - end) + 32 * (freed - woken) + other);
}

// Decode sleeps, so that nothing has freed the tail: its time is over all the same. The head is as good as
// before, and what the guard declines is the tail.
TEST(Retention, ATailWhoseTimeIsOverDoesNotSpoilTheHead) {
  const std::string ranges =
      R"(transfer.retention.ranges=[{"from_token":0,"to_token":512,"priority":80,"duration_s":300},)"
      R"({"from_token":512,"priority":10,"duration_s":5}])";
  const Trace trace = two_turns();
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kReads, {"transfer.retention.policy=priority", ranges}));
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].reuse, Reuse::hit);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 512);
}

// The budget takes the least priority first: of two pins the tails go, the oldest first, then heads.
TEST(Retention, PriorityGivesTailsUpFirst) {
  const Trace trace = four_conversations();
  const std::string ranges = R"(transfer.retention.ranges=[{"from_token":0,"to_token":512,"priority":80}])";
  // Four heads of 32 blocks (64 MiB each) and one whole pin fit in 0.35 GiB, no more.
  const Outcomes o = run_text(
      kDisaggregated, trace,
      with(kReads, {"transfer.retention.policy=priority", "transfer.retention.budget_gib=0.35", ranges}));
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[4].remote_hit_tokens, 512);
  EXPECT_EQ(o.run.requests[5].remote_hit_tokens, 512);
  EXPECT_LE(o.run.retention.peak_bytes, 0.35 * 0x1p30);
}

// ------------------------------------------------------------------- retention that knows the future

const Sets kForesees = with(kReads, {"transfer.retention.policy=belady"});

// Of four turns that end in the order in which they will go on, 0.3 GiB (153 blocks) hold the first two and
// 23 blocks of the third's 65: what is asked for last goes, block by block. lru keeps the last two. The
// second turns, of which nothing more will be asked, are not kept for a moment.
TEST(RetentionBelady, KeepsWhatIsAskedForFirst) {
  const Trace trace = four_conversations();
  const Outcomes o = run_text(kDisaggregated, trace, with(kForesees, {"transfer.retention.budget_gib=0.3"}));
  expect_conserved(o, trace);
  const auto& q = o.run.requests;
  EXPECT_EQ(q[4].remote_hit_tokens, 1031);
  EXPECT_EQ(q[5].remote_hit_tokens, 1031);
  EXPECT_EQ(q[6].remote_hit_tokens, 23 * 16);
  EXPECT_EQ(q[7].remote_hit_tokens, 0);
  EXPECT_EQ(q[7].reuse, Reuse::evicted);
  EXPECT_EQ(o.run.retention.pins, 4);
  EXPECT_EQ(o.run.retention.read, 3);
  EXPECT_EQ(o.run.retention.let_go, 1);
  EXPECT_EQ(o.run.retention.outstanding, 0);
  EXPECT_LE(o.run.retention.peak_bytes, 0.3 * 0x1p30);
  const Outcomes lru =
      run_text(kDisaggregated, trace,
               with(kReads, {"transfer.retention.policy=lru", "transfer.retention.budget_gib=0.3"}));
  EXPECT_LT(lru.run.retention.hit_tokens, o.run.retention.hit_tokens);
}

// No time runs out in decode or in the router; and a turn that nobody goes on from takes nothing.
TEST(RetentionBelady, KeepsUntilAskedAndNothingElse) {
  const Trace late = two_turns(1000 * kSecond);
  const Sets brief = {"transfer.decoder_kv_blocks_ttl_s=1", "router.session_kv_ttl_s=1"};
  EXPECT_EQ(run_text(kDisaggregated, late, with(kReads, brief)).run.requests[1].remote_hit_tokens, 0);
  const Outcomes o = run_text(kDisaggregated, late, with(kForesees, brief));
  expect_conserved(o, late);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 1031);
  EXPECT_EQ(o.run.retention.pins, 1);
  const double block = 2.0 * 1024 * 1024;
  const double asked = to_seconds(o.run.requests[1].arrival - o.run.requests[0].end);
  EXPECT_NEAR(o.run.retention.byte_seconds, 65 * block * asked, 65 * block * 0.5);

  Trace alone = four_conversations();
  alone.requests.resize(4);
  alone.report.rows_read = alone.report.rows_used = 4;
  for (const bool sessions : {true, false}) {
    if (!sessions) alone = made_trace({request_at(0, 1024, 8), request_at(kSecond, 2000, 8)});
    const Outcomes none = run_text(kDisaggregated, alone, kForesees);
    expect_conserved(none, alone);
    EXPECT_EQ(none.run.retention.pins, 0);
    EXPECT_EQ(none.run.retention.byte_seconds, 0);
  }
}

// Closed sessions: who comes back first is who pauses least, whatever the trace had recorded.
TEST(RetentionBelady, ClosedSessionsComeBackAfterTheirPause) {
  Trace trace = four_conversations();
  const Nanos pauses[] = {40 * kSecond, 30 * kSecond, 20 * kSecond, 10 * kSecond};
  for (std::size_t i = 0; i < 4; ++i) trace.requests[4 + i].think_time = pauses[i];
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kForesees, {"transfer.retention.budget_gib=0.3", "workload.sessions=closed"}));
  expect_conserved(o, trace);
  const auto& q = o.run.requests;
  EXPECT_EQ(q[4].remote_hit_tokens, 0);
  EXPECT_EQ(q[5].remote_hit_tokens, 23 * 16);
  EXPECT_EQ(q[6].remote_hit_tokens, 1031);
  EXPECT_EQ(q[7].remote_hit_tokens, 1031);
}

// A request that lacks blocks gets them at once, from the end of what is kept and no more than it lacks.
TEST(RetentionBelady, GivesWayToAdmissions) {
  // 130 blocks: 65 are kept, the request needs 70.
  const Trace trace = add(two_turns(), request_at(2 * kSecond, 1100, 8), 7);
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kForesees, {"pools.decode.engine.num_gpu_blocks_override=131"}));
  expect_conserved(o, trace);
  EXPECT_EQ(stage(o.run.requests[1], Stage::decode_admission), 0);
  EXPECT_EQ(o.run.requests[2].remote_hit_tokens, 60 * 16);
  EXPECT_EQ(o.run.retention.let_go, 0);
}

// Prefill is busy, the next turn has come and waits for it; decode needs all its blocks meanwhile. The turn
// finds nothing, computes, and completes: no load fails of it.
TEST(RetentionBelady, AReaderThatWaitsIsTurnedAway) {
  Trace trace = two_turns(4 * kSecond);
  trace = add(trace, request_at(3985 * kMillisecond, 2065, 8), 7);  // 130 blocks, all there are
  for (std::uint64_t n = 0; n < 30; ++n) trace = add(trace, request_at(3990 * kMillisecond, 2000, 0), 8 + n);
  const Sets sets = with(kForesees, {"pools.decode.engine.num_gpu_blocks_override=131"});
  const Outcomes o = run_text(kDisaggregated, trace, sets);
  expect_conserved(o, trace);
  EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
  const RequestRecord& r = o.run.requests.back();
  ASSERT_EQ(r.prompt_tokens, 1600);
  EXPECT_EQ(r.reuse, Reuse::evicted);
  EXPECT_EQ(r.remote_hit_tokens, 0);
  EXPECT_FALSE(r.read_chosen);
  EXPECT_EQ(o.run.retention.let_go, 1);
  const Outcomes slow = run_text(
      kDisaggregated, trace,
      with(sets, {"pools.prefill.engine.step_by_step=true", "pools.decode.engine.step_by_step=true"}));
  EXPECT_EQ(first_difference(o.text(), slow.text()), "");
}

// Random conversations on one worker each, little load. Under the same budget no fewer tokens are read than
// with lru or by priority; without one, no fewer than with any TTL.
TEST(RetentionBelady, NoOtherPolicyReadsMore) {
  int more = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    GenerateConfig config;
    config.requests = 40;
    config.rate = 1;
    config.first_message = {1500, 0.8, 1, 6000};
    config.message = {300, 0.8, 1, 1000};
    config.output = {30, 0.9, 2, 100};
    config.system_prompts = 0;
    config.max_prompt_tokens = 9000;
    config.multi_turn_share = 0.8;
    config.think_time_s = 8;
    config.seed = seed;
    const Trace trace = generate_trace(config);
    const Sets low = {"transfer.kv_recompute_threshold=0",
                      "workload.sessions=" + std::string(seed % 2 == 0 ? "open" : "closed")};
    const auto hits = [&](const Sets& sets) {
      const Outcomes o = run_text(kDisaggregated, trace, with(with(kReads, low), sets));
      expect_conserved(o, trace);
      return o.run.retention.hit_tokens;
    };
    const std::string budget = std::string("transfer.retention.budget_gib=") + (seed % 3 == 0 ? "0.4" : "1");
    const std::int64_t belady = hits({"transfer.retention.policy=belady", budget});
    for (const char* other : {"lru", "priority"}) {
      const std::int64_t theirs = hits({std::string("transfer.retention.policy=") + other, budget});
      EXPECT_GE(belady, theirs) << other;
      more += belady > theirs ? 1 : 0;
    }
    const std::int64_t all = hits({"transfer.retention.policy=belady"});
    EXPECT_GE(all, belady);
    for (const char* ttl : {"4", "480"}) {
      EXPECT_GE(all, hits({std::string("transfer.decoder_kv_blocks_ttl_s=") + ttl})) << ttl;
    }
  }
  EXPECT_GT(more, 12);
}

// Decode has 130 blocks, 65 of them pinned for 20 s. A prompt that needs 70 waits for that time: its
// heartbeats keep prefill's lease, decode's empty steps look at the clock. That wait is the pins'.
TEST(Retention, PinsDelayDecodeAdmissions) {
  const Trace trace = add(conversation({request_at(0, 1024, 8)}), request_at(2 * kSecond, 1100, 8), 7);
  const Outcomes o = run_text(kDisaggregated, trace,
                              with(kReads, {"pools.decode.engine.num_gpu_blocks_override=131",
                                            "transfer.decoder_kv_blocks_ttl_s=20"}));
  expect_conserved(o, trace);
  const RequestRecord &first = o.run.requests[0], &r = o.run.requests[1];
  const Nanos hop = o.loaded.scenario.router.hop, idle = o.deployment.pools[1].engine.idle_step;
  const Nanos comes = r.arrival + hop + stage(r, Stage::prefill) + hop;
  const Nanos admitted = on_grid(comes, idle, first.end + 20 * kSecond);
  EXPECT_EQ(stage(r, Stage::decode_admission), admitted - comes);
  EXPECT_EQ(o.run.retention.admissions_delayed, 1);
  EXPECT_EQ(o.run.retention.admission_delay, admitted - comes);
  EXPECT_EQ(o.run.retention.expired, 1);
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_EQ(o.summary["bound_by"]["code"], "decode_pinned_blocks");
  // By priority, a request that lacks blocks gets them at once.
  const Outcomes gives =
      run_text(kDisaggregated, trace,
               with(kReads, {"pools.decode.engine.num_gpu_blocks_override=131",
                             "transfer.decoder_kv_blocks_ttl_s=20", "transfer.retention.policy=priority"}));
  expect_conserved(gives, trace);
  EXPECT_EQ(stage(gives.run.requests[1], Stage::decode_admission), 0);
  EXPECT_EQ(gives.run.retention.let_go, 1);
  EXPECT_EQ(gives.run.retention.admissions_delayed, 0);
}

// ---------------------------------------------------------------------------- with push: hypothetical

// Both legs at once: prefill reads the first turn back, as with pull, while decode holds its blocks for the
// rest; then it pushes that.
TEST(ReuseHypothetical, PushReadsBackFirst) {
  const Trace trace = two_turns();
  const Sets both_ways = with(kReads, {"transfer.mode=push", "transfer.hypothetical=true"});
  const Outcomes o = run_text(kDisaggregated, trace, both_ways);
  expect_conserved(o, trace);
  const PoolPlan& prefill = o.deployment.pools[0];
  const RequestRecord& r = o.run.requests[1];
  const Nanos dispatched = r.arrival + o.loaded.scenario.router.hop;
  Foretold read;
  read.op = Op::read;
  read.from = 1;
  read.to = 0;
  read.blocks = 65;
  read.begin = dispatched;
  read = foretell(o, read);
  const Nanos idle = prefill.engine.idle_step;
  const Nanos seen = on_grid(read.post_end() + idle, idle, foretell_landing(o, {read}));
  EXPECT_EQ(stage(r, Stage::reuse_transfer), seen - dispatched);
  EXPECT_EQ(stage(r, Stage::prefill), prefill_time(prefill, 1600, 1031));
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), 0);
  EXPECT_EQ(r.remote_hit_tokens, 1031);
  EXPECT_EQ(r.transferred_tokens, 576);
  EXPECT_EQ(o.run.retention.read, 1);
  EXPECT_TRUE(o.run.hypothetical);
}

// Decode has all but a block of the second prompt, and goes ahead: what prefill reads and computes meanwhile
// is on nobody's path.
TEST(ReuseHypothetical, AFullHitWaitsForNoReadBack) {
  const Trace trace = conversation({request_at(0, 1024, 8), request_at(10 * kSecond, 1040, 8)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kReads, {"transfer.mode=push", "transfer.hypothetical=true"}));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[1];
  EXPECT_EQ(r.decode_hit_tokens, 1024);
  EXPECT_EQ(stage(r, Stage::reuse_transfer), 0);
  EXPECT_EQ(stage(r, Stage::prefill_queue) + stage(r, Stage::prefill), 0);
  const Nanos tail = o.deployment.pools[1].step_model->time(prefill_shape(1024, 16, true)).ns;
  EXPECT_EQ(stage(r, Stage::first_token), tail);
  EXPECT_EQ(r.first_token, r.arrival + o.loaded.scenario.router.hop + tail);
}

// --------------------------------------------------------------------------------- odd turns

// The same prompt again, or a shorter one: at least the last token is computed.
TEST(ReuseEdge, AtLeastTheLastTokenIsComputed) {
  for (const std::int32_t prompt : {1024, 1025, 1031, 1032, 512}) {
    SCOPED_TRACE(prompt);
    const Trace trace = conversation({request_at(0, 1024, 8), request_at(10 * kSecond, prompt, 8)});
    const Outcomes o = run_text(kDisaggregated, trace, kReads);
    expect_conserved(o, trace);
    EXPECT_EQ(o.run.requests[1].status, RequestStatus::completed);
    EXPECT_LT(o.run.requests[1].remote_hit_tokens, prompt);
    EXPECT_GE(o.run.requests[1].remote_hit_tokens, prompt / 512 * 512 - 1);
  }
}

// A turn that does not begin as the one before: nothing of it is of use, and decode is told so.
TEST(ReuseEdge, AnEditedConversationReadsNothing) {
  Trace trace = two_turns();
  trace.hash_ids[trace.requests[1].hash_begin] = 99;
  const Outcomes o = run_text(kDisaggregated, trace, kReads);
  expect_conserved(o, trace);
  EXPECT_EQ(o.run.requests[1].remote_hit_tokens, 0);
  EXPECT_NE(o.run.requests[1].reuse, Reuse::none);
  EXPECT_EQ(o.run.retention.notified, 1) << "its pin is of no use to anybody";
}

// The tail of a pin goes while the turn that will read it waits in prefill's queue: it reads what is left.
TEST(ReuseEdge, APinIsCutWhileItsReaderWaits) {
  // Prefill is busy with 100,000 tokens from 3 s on; the turn comes at 4 s, the tail goes at 5 s, when decode
  // is woken by a prompt that prefill had computed before.
  Trace trace = two_turns(4 * kSecond);
  trace = add(trace, request_at(3900 * kMillisecond, 30'000, 2), 7);
  trace = add(trace, request_at(3950 * kMillisecond, 30'000, 2), 8);
  trace = add(trace, request_at(3900 * kMillisecond - 1, 30'000, 2), 9);
  const std::string ranges =
      R"(transfer.retention.ranges=[{"from_token":0,"to_token":512,"priority":80,"duration_s":300},)"
      R"({"from_token":512,"priority":10,"duration_s":4.5}])";
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(kReads, {"transfer.retention.policy=priority", ranges, "transfer.expiry_margin_s=0",
                             "transfer.kv_load_failure_policy=recompute"}));
  expect_conserved(o, trace);
  EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
}

}  // namespace
}  // namespace pdsim
