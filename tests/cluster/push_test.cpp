// The pushes (kv-transfer facts 1.2), to the nanosecond where one request is alone: who waits for which
// boundary, what is on the wire when, who holds which memory.
#include <gtest/gtest.h>

#include "sim/core/error.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

const Sets kPush = with(kOneEach, {"transfer.mode=push"});
const Sets kWarm = {"transfer.warm_start=true"};

std::int64_t held_ns(const Outcomes& o, std::size_t worker, std::string_view cause) {
  const auto series = std::ranges::find(kBlockCauses, cause) - kBlockCauses.begin();
  return static_cast<std::int64_t>(o.run.workers[worker].blocks.total(static_cast<std::size_t>(series)));
}

// ------------------------------------------------------------------------------- one request, terminal push

struct Case {
  const char* model;
  int prefill_tp, decode_tp;
  bool warm;  ///< every contact is made already
  const char* async;
  const char* instance = "p5en.48xlarge";
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model;
}

class Push : public testing::TestWithParam<Case> {};

// In time, for one request alone:
//   arrival --hop--> both engines, asleep: both take their first steps at once
//   decode   allocates the whole prompt in that step, an empty one, and registers: by a notification, after a
//            handshake with each prefill rank that it will get KV from (for notifications only). Then empty
//            steps until something is seen. Its blocks wait all through prefill
//   prefill  computes; at its end nothing else runs, so the end's own boundary ships the blocks to the
//            writer, which has the registration: it posts at once, after a full first contact with each
//            decode rank that it writes to
//   the wire runs from the first descriptor on; a WRITE's latency is one way
//   decode   sees it at its first boundary after the last byte has landed, and recomputes the last token
TEST_P(Push, OneRequestAloneToTheNanosecond) {
  const Case& c = GetParam();
  const std::int32_t prompt = 1000, output = 6;
  const Trace trace = made_trace({request_at(3 * kMillisecond, prompt, output)});
  Sets sets = with(kPush, {std::string("model=") + c.model,
                           "pools.prefill.tensor_parallel=" + std::to_string(c.prefill_tp),
                           "pools.decode.tensor_parallel=" + std::to_string(c.decode_tp),
                           std::string("pools.prefill.instance=") + c.instance,
                           std::string("pools.decode.instance=") + c.instance,
                           std::string("pools.prefill.engine.async_scheduling=") + c.async,
                           std::string("pools.decode.engine.async_scheduling=") + c.async,
                           std::string("transfer.warm_start=") + (c.warm ? "true" : "false")});
  if (std::string_view(c.instance) != "p5en.48xlarge") {
    sets = with(sets, {"network.fabric=roce", "gpu_profile=h200"});
  }
  const Outcomes o = run_text(kDisaggregated, trace, sets);
  expect_conserved(o, trace);
  const Scenario& s = o.loaded.scenario;
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const RequestRecord& r = o.run.requests[0];
  const Layout layout = layout_of(o, 0, 1);
  const Nanos idle = decode.engine.idle_step;

  const Nanos dispatched = r.arrival + s.router.hop;
  const Nanos prefilled = dispatched + prefill_time(prefill, prompt);
  const Nanos registered =
      dispatched + s.transfer.notification + (c.warm ? 0 : foretell_contact(o, layout.sources, 0, 0, true));
  ASSERT_LT(registered, prefilled);
  EXPECT_EQ(stage(r, Stage::router), s.router.hop);
  EXPECT_EQ(stage(r, Stage::prefill_queue), 0);
  EXPECT_EQ(stage(r, Stage::prefill), prefilled - dispatched);
  EXPECT_EQ(stage(r, Stage::decode_admission), 0);
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), 0);

  Foretold write;
  write.op = Op::write;
  write.blocks = (prompt + 15) / 16;
  write.begin = prefilled + (c.warm ? 0 : foretell_contact(o, layout.targets, layout.regions, 1, false));
  write = foretell(o, write);
  EXPECT_EQ(r.descriptors, write.all_descriptors());
  EXPECT_EQ(r.transfer_bytes, write.bytes());
  EXPECT_EQ(stage(r, Stage::transfer_post), write.post_end() - prefilled);
  const Nanos landed = foretell_landing(o, {write});
  EXPECT_EQ(stage(r, Stage::transfer_wire), landed - write.post_end());
  const Nanos seen = on_grid(dispatched + idle, idle, landed);
  EXPECT_EQ(stage(r, Stage::transfer_poll), seen - landed);
  EXPECT_EQ(stage(r, Stage::first_token), decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(r.first_token, seen + decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(r.end, r.first_token + decode_time(decode, prompt, 2, output));

  // Nobody's forward thread posts anything.
  EXPECT_EQ(o.run.workers[0].posting + o.run.workers[1].posting, 0);
  // Memory: decode's blocks wait from dispatch on; prefill, asleep, has not seen that its writes are done.
  EXPECT_EQ(held_ns(o, 1, "in_transfer"), write.blocks * (seen - dispatched));
  EXPECT_EQ(held_ns(o, 0, "leased"), write.blocks * (r.end - prefilled));
  const TransferTotals& t = o.run.transfers;
  EXPECT_DOUBLE_EQ(t.decode_byte_seconds,
                   write.blocks * decode.kv_bytes_per_block * c.decode_tp * to_seconds(seen - dispatched));
  EXPECT_DOUBLE_EQ(t.prefill_byte_seconds,
                   write.blocks * prefill.kv_bytes_per_block * c.prefill_tp * to_seconds(r.end - prefilled));
  EXPECT_EQ(t.leases_outstanding, 1);
  EXPECT_EQ(t.handshakes, c.warm ? 0 : 2);
  EXPECT_EQ(t.batches, 1);
}

const Case kCases[] = {
    {"llama-3.1-8b", 1, 1, true, "true"},
    {"llama-3.1-8b", 1, 1, true, "false"},
    {"llama-3.1-8b", 1, 1, false, "true"},
    {"qwen3-32b", 4, 4, true, "true"},
    {"qwen3-32b", 4, 4, false, "false"},
    {"qwen3-32b", 8, 4, true, "true"},  // a decode rank's heads lie on two prefill ranks
    {"qwen3-32b", 8, 2, false, "true"},
    {"qwen3-32b", 2, 8, true, "true"},  // a prefill rank writes to four decode ranks, one after the other
    {"qwen3-32b", 2, 4, false, "false"},
    {"glm-5-fp8", 8, 8, true, "true"},  // MLA: rank to rank
    {"glm-5-fp8", 8, 8, false, "true"},
    {"glm-5-fp8", 4, 8, true, "true", "p6-b300.48xlarge"},  // and every decode rank is written
    {"glm-5-fp8", 4, 8, false, "true", "p6-b300.48xlarge"},
    {"glm-5-fp8", 8, 4, true, "true", "p6-b300.48xlarge"},  // half of prefill's ranks have nothing to do
};

INSTANTIATE_TEST_SUITE_P(Terminal, Push, testing::ValuesIn(kCases), [](const auto& info) {
  const Case& c = info.param;
  std::string name = c.model;
  for (char& ch : name) ch = ch == '-' || ch == '.' ? '_' : ch;
  return name + "_tp" + std::to_string(c.prefill_tp) + "_to_tp" + std::to_string(c.decode_tp) +
         (c.warm ? "_again" : "_first") + (c.async[0] == 't' ? "_async" : "_sync");
});

// What a WRITE and a READ of the same bytes cost differs by three things: the curve (365.66 against 303.78 of
// 400 GB/s at 1 MiB operations on p5en), one latency instead of two, and who posts.
TEST(PushWire, AWriteIsNoRead) {
  const Trace trace = made_trace({request_at(0, 1000, 2)});
  const Outcomes push = run_text(kDisaggregated, trace, with(kPush, kWarm));
  const Outcomes pull = run_text(kDisaggregated, trace, with(kOneEach, kWarm));
  const double bytes = 63 * 16 * 131'072, posting = 71'000 + 64 * 2'430, fixed = 71'000, latency = 17'300;
  const auto wire = [&](const Outcomes& o) {
    return static_cast<double>(stage(o.run.requests[0], Stage::transfer_wire));
  };
  EXPECT_NEAR(wire(push), fixed + bytes / (365.66 / 8) + latency - posting, 3000);
  EXPECT_NEAR(wire(pull), fixed + bytes / (303.78 / 8) + 2 * latency - posting, 3000);
  EXPECT_EQ(push.run.requests[0].transfer_bytes, pull.run.requests[0].transfer_bytes);
  EXPECT_EQ(push.run.requests[0].descriptors, pull.run.requests[0].descriptors);
}

// A registration that comes after prefill's end waits for the writer's own poll, every push_poll from when it
// got the blocks: nothing else wakes it while prefill sleeps. Here the handshake before the registration (one
// prefill rank) takes longer than prefill.
TEST(PushRegistration, TheWriterLooksAtItsOwnPace) {
  for (const char* poll : {"1", "3.7"}) {
    const Trace trace = made_trace({request_at(0, 500, 2)});
    const Outcomes o = run_text(kDisaggregated, trace,
                                with(kPush, {"transfer.handshake_ms=400", "transfer.prep_us_per_descriptor=0",
                                             std::string("transfer.push_poll_ms=") + poll}));
    expect_conserved(o, trace);
    const Scenario& s = o.loaded.scenario;
    const RequestRecord& r = o.run.requests[0];
    const Nanos dispatched = s.router.hop;
    const Nanos prefilled = dispatched + prefill_time(o.deployment.pools[0], 500);
    const Nanos registered = dispatched + s.transfer.handshake + s.transfer.notification;
    ASSERT_GT(registered, prefilled);
    const Nanos every = s.transfer.push_poll;
    const Nanos matched = prefilled + (registered - prefilled + every - 1) / every * every;
    EXPECT_EQ(stage(r, Stage::handoff_dispatch), matched - prefilled);
    EXPECT_EQ(stage(r, Stage::transfer_post), s.transfer.handshake + 71'000 + 64 * 2'430);
  }
}

// The writer is prefill-1's: what wakes prefill-0's does not concern it. Before, prefill-0 has had prompts
// that decode needed nothing of (full hits), whose leases ran out, so that nothing is left of those
// hand-overs.
TEST(PushRegistration, AnotherPrefillsWriterIsNotWoken) {
  const Nanos s = kSecond;
  std::vector<Request> requests;
  for (const Nanos at : {0 * s, 5 * s, 10 * s, 20 * s, 30 * s, 40 * s, 40 * s + 500 * kMillisecond}) {
    requests.push_back(request_at(at, 1536, 2));
  }
  Trace trace = made_trace(requests, 512, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (std::size_t i = 0; i < requests.size(); ++i) {
    trace.requests[i].hash_count = 3;
    trace.requests[i].hash_begin = i < 5 ? 0 : i == 5 ? 3 : 6;
  }
  const Outcomes o =
      run_text(kDisaggregated, trace,
               {"pools.decode.replicas=1", "router.policy=round_robin", "transfer.mode=push",
                "transfer.handshake_ms=400", "transfer.prep_us_per_descriptor=0", "transfer.push_poll_ms=300",
                "transfer.kv_lease_duration_s=1", "pools.prefill.engine.enable_prefix_caching=false"});
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[5];
  ASSERT_EQ(r.prefill_worker, 1u);
  // Registered 400 ms after its dispatch, some 370 ms after prefill's end: the second look. prefill-0 takes a
  // step in between, for the last request.
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), 600 * kMillisecond);
}

// Prefill goes on with another prompt. Synchronous: the boundary at which A ends ships its blocks with the
// step that starts there. Asynchronous: that step was scheduled before A's end was known, so A's blocks go
// with the one after it, a whole step of B's later.
TEST(PushShipping, ABusyAsynchronousPrefillShipsAStepLater) {
  for (const bool async : {true, false}) {
    const Trace trace = made_trace({request_at(0, 1000, 2), request_at(0, 20'000, 2)});
    const Outcomes o =
        run_text(kDisaggregated, trace,
                 with(with(kPush, kWarm),
                      {std::string("pools.prefill.engine.async_scheduling=") + (async ? "true" : "false")}));
    expect_conserved(o, trace);
    const PoolPlan& prefill = o.deployment.pools[0];
    const std::int32_t budget = prefill.engine.max_num_batched_tokens;
    const RequestRecord &a = o.run.requests[0], &b = o.run.requests[1];
    const auto time = [&](const StepShape& shape) { return prefill.step_model->time(shape).ns; };
    const std::int32_t first = budget - 1000;  // of B's tokens, in A's step
    const Nanos one = time(both(prefill_shape(0, 1000, true), prefill_shape(0, first, false)));
    const Nanos two = time(prefill_shape(first, budget, false));
    const Nanos three = time(prefill_shape(first + budget, 20'000 - first - budget, true));
    EXPECT_EQ(stage(a, Stage::prefill), one);
    EXPECT_EQ(stage(a, Stage::handoff_dispatch), async ? two : 0);
    EXPECT_EQ(stage(b, Stage::prefill), one + two + three);
    EXPECT_EQ(stage(b, Stage::handoff_dispatch), 0) << "nothing runs behind B";
    // A's writes are seen to be done at the end of a step: its blocks are prefill's until then.
    const Nanos hop = o.loaded.scenario.router.hop;
    const Nanos freed = hop + one + two + (async ? three : 0);
    EXPECT_EQ(held_ns(o, 0, "leased"),
              63 * (freed - hop - one) + 1250 * (o.run.end - (hop + one + two + three)));
  }
}

// ------------------------------------------------------------------------------------ who waits for whom

// One leg after the other, push loses to pull. Decode has the prompt a hop after prefill's end in both. Pull
// posts in that very step. Push must first tell prefill: a notification, and then what is left until the
// writer looks again, which polls every millisecond since prefill's end. With a hop of 1 ms and a
// notification of 17.3 us that is the second look: 1 ms later than pull. What a WRITE saves on the wire is
// less.
TEST(PushSequential, LosesToPull) {
  const Trace trace = made_trace({request_at(0, 1000, 6)});
  const Outcomes pull = run_text(kDisaggregated, trace, with(kOneEach, kWarm));
  const Outcomes push =
      run_text(kDisaggregated, trace, with(with(kPush, kWarm), {"router.sequential_dispatch=true"}));
  expect_conserved(push, trace);
  const Scenario& s = push.loaded.scenario;
  const RequestRecord &a = pull.run.requests[0], &b = push.run.requests[0];
  const Nanos prefilled = s.router.hop + prefill_time(push.deployment.pools[0], 1000);
  const Nanos scheduled = prefilled + s.router.hop;
  const Nanos told = scheduled + s.transfer.notification;
  const Nanos matched = prefilled + (told - prefilled + kMillisecond - 1) / kMillisecond * kMillisecond;
  ASSERT_EQ(s.router.hop, kMillisecond);
  EXPECT_EQ(matched, scheduled + kMillisecond);

  EXPECT_EQ(stage(a, Stage::handoff_dispatch), s.router.hop);
  EXPECT_EQ(stage(b, Stage::handoff_dispatch), s.router.hop + kMillisecond);
  EXPECT_EQ(stage(a, Stage::transfer_post), stage(b, Stage::transfer_post));
  Foretold wire;
  wire.blocks = 63;
  wire.op = Op::read;
  wire.begin = scheduled;
  const Foretold read = foretell(pull, wire);
  wire.op = Op::write;
  wire.begin = matched;
  const Foretold write = foretell(push, wire);
  const Nanos idle = push.deployment.pools[1].engine.idle_step;
  const Nanos pulled = on_grid(read.post_end() + idle, idle, foretell_landing(pull, {read}));
  const Nanos pushed = on_grid(scheduled + idle, idle, foretell_landing(push, {write}));
  EXPECT_EQ(b.first_token - a.first_token, pushed - pulled);
  EXPECT_GT(pushed, pulled);
  // Both legs at once, the same push wins: no hop and no look of the writer's between prefill and the wire.
  const Outcomes concurrent = run_text(kDisaggregated, trace, with(kPush, kWarm));
  EXPECT_LE(concurrent.run.requests[0].first_token, a.first_token - s.router.hop);
  // What it costs is decode's memory: held through prefill, and sequentially only from its end on.
  EXPECT_EQ(held_ns(push, 1, "in_transfer"), 63 * (pushed - scheduled));
  EXPECT_GT(held_ns(concurrent, 1, "in_transfer"), 63 * (prefilled - s.router.hop));
}

// Decode has all but the last block of the prompt: it starts at once, and computes that. Prefill's leg is
// wasted, nobody is told, and its blocks wait out the lease: prefill sees that when a later prompt wakes it.
TEST(PushFullHit, DecodeStartsAtOnceAndPrefillIsWasted) {
  Trace trace = made_trace(
      {request_at(0, 1536, 2), request_at(10 * kSecond, 1536, 2), request_at(60 * kSecond, 200, 2)}, 512,
      {1, 2, 3, 1, 2, 3, 4});
  trace.requests[0].hash_count = trace.requests[1].hash_count = 3;
  trace.requests[1].hash_begin = 3;
  trace.requests[2].hash_begin = 6;
  trace.requests[2].hash_count = 1;
  const Outcomes o =
      run_text(kDisaggregated, trace, with(kPush, {"pools.prefill.engine.enable_prefix_caching=false"}));
  expect_conserved(o, trace);
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const RequestRecord& r = o.run.requests[1];
  const Nanos hop = o.loaded.scenario.router.hop;
  EXPECT_EQ(r.decode_hit_tokens, 1520);
  EXPECT_EQ(r.transfer_bytes, 0);
  EXPECT_EQ(r.recomputed_tokens, 16);
  const Nanos tail = decode.step_model->time(prefill_shape(1520, 16, true)).ns;
  EXPECT_EQ(r.first_token, r.arrival + hop + tail);
  EXPECT_EQ(stage(r, Stage::first_token), tail);
  EXPECT_EQ(stage(r, Stage::prefill), 0);
  ASSERT_LT(r.end, r.arrival + hop + prefill_time(prefill, 1536)) << "it ends before prefill's wasted leg";
  EXPECT_EQ(outcome(o.run, TransferOutcome::computed_by_decode), 1);
  EXPECT_EQ(o.run.workers[0].steps, 3);
  // The lease of 30 s ran out at 40 s; seen when the third prompt arrives. The first's writes were done, and
  // seen when the second arrived.
  EXPECT_EQ(o.run.transfers.leases_expired, 1);
  const Nanos wasted = r.arrival + hop + prefill_time(prefill, 1536);
  const RequestRecord &first = o.run.requests[0], &third = o.run.requests[2];
  const Nanos third_prefilled = third.arrival + hop + prefill_time(prefill, 200);
  EXPECT_EQ(held_ns(o, 0, "leased"), 96 * (r.arrival + hop - (hop + stage(first, Stage::prefill))) +
                                         96 * (third.arrival + hop - wasted) +
                                         13 * (o.run.end - third_prefilled));
}

// A lease of 0.2 s, and a write of 0.44: prefill, awake all the time, does not free what is being written.
TEST(PushLease, DoesNotFreeWhatIsBeingWritten) {
  std::vector<Request> requests = {request_at(0, 1000, 2)};
  for (int i = 1; i < 60; ++i) requests.push_back(request_at(i * 10 * kMillisecond, 100, 0));
  const Trace trace = made_trace(requests);
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(with(kPush, kWarm), {"network.fabric=tcp", "transfer.kv_lease_duration_s=0.2"}));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[0];
  EXPECT_GT(stage(r, Stage::transfer_wire), 400 * kMillisecond);
  EXPECT_EQ(r.status, RequestStatus::completed);
  EXPECT_EQ(o.run.transfers.leases_expired, 0);
  EXPECT_EQ(o.run.transfers.leases_outstanding, 0) << "seen to be done at the end of a step";
  // While it waits for decode to register it does: decode's handshake takes a second. Then prefill has
  // nothing to write, and decode waits until its client goes.
  const Outcomes late = run_text(kDisaggregated, trace,
                                 with(kPush, {"transfer.kv_lease_duration_s=0.2",
                                              "transfer.handshake_ms=1000", "workload.client_timeout_s=5"}));
  expect_conserved(late, trace);
  EXPECT_EQ(late.run.transfers.leases_expired, 1);
  EXPECT_EQ(outcome(late.run, TransferOutcome::dropped), 1);
  EXPECT_EQ(late.run.requests[0].reason, Reason::client_timeout);
  EXPECT_EQ(late.run.requests[0].e2e(), 5 * kSecond);
}

// ------------------------------------------------------------------------------------------ layer by layer

// The two batches of a prompt's step from `begins` to `ends`: all layers but the last go while it runs, from
// when the first has ended and decode has registered until the last but one has, not faster than they come;
// the last goes when the step does. Each region is a post of its own.
std::vector<Foretold> layer_by_layer(const Outcomes& o, std::uint32_t from, std::int32_t blocks, Nanos begins,
                                     Nanos ends, Nanos registered, Nanos thread_until = 0) {
  const auto layers = static_cast<std::int32_t>(o.deployment.model.layers.size());
  const Nanos each = (ends - begins) / layers;
  const Nanos first = std::max(begins + each, registered);
  Foretold most;
  most.from = from;
  most.to = static_cast<std::uint32_t>(o.deployment.workers.size() - 1);
  most.blocks = blocks;
  most.parts = layers - 1;
  most.of = layers;
  most.begin = std::max(first, thread_until);
  most.lasts = ends - each - first;
  most = foretell(o, most);
  Foretold last = most;
  last.parts = 1;
  last.lasts = 0;
  last.begin = std::max(ends, most.post_end());
  return {most, foretell(o, last)};
}

// One prompt of one step, alone.
struct Layerwise {
  Trace trace = made_trace({request_at(0, 8000, 2)});
  Outcomes o;
  const RequestRecord& r;
  Nanos begins = 0, ends = 0;
  std::vector<Foretold> batches;

  explicit Layerwise(const Sets& more)
      : o(run_text(kDisaggregated, trace,
                   with(with(with(kPush, kWarm), {"transfer.mode=push_layerwise"}), more))),
        r(o.run.requests[0]) {
    expect_conserved(o, trace);
    begins = o.loaded.scenario.router.hop;
    ends = begins + prefill_time(o.deployment.pools[0], 8000);
    batches = layer_by_layer(o, 0, 500, begins, ends, begins + o.loaded.scenario.transfer.notification);
    EXPECT_EQ(stage(r, Stage::prefill), ends - begins);
    EXPECT_EQ(stage(r, Stage::handoff_dispatch), 0);
  }
  Nanos after_prefill() const { return stage(r, Stage::transfer_post) + stage(r, Stage::transfer_wire); }
};

TEST(PushLayerwise, WithMuchComputeItEndsOneLayersWriteAfterPrefill) {
  const Layerwise run({});
  const Foretold& last = run.batches[1];
  EXPECT_EQ(last.begin, run.ends);
  EXPECT_EQ(last.posting, 2 * 71'000 + 2 * 2'430) << "K and V";
  EXPECT_EQ(stage(run.r, Stage::transfer_post), last.posting);
  EXPECT_EQ(run.after_prefill(), foretell_landing(run.o, run.batches) - run.ends);
  // One layer's bytes, at a WRITE's rate: 8000 x 4096 bytes at about 45 GB/s, 0.72 ms of the 23 of them all.
  const double bytes = 8000.0 * 131'072 / 32;
  EXPECT_NEAR(static_cast<double>(run.after_prefill()), 71'000 + bytes / (365.66 / 8) + 17'300, 10'000);

  // The same prompt pushed at its end. Nothing more or less is moved: shares are rounded down, and the last
  // layer's batch has what is left over.
  const Outcomes push = run_text(kDisaggregated, run.trace, with(kPush, kWarm));
  const RequestRecord& whole = push.run.requests[0];
  EXPECT_NEAR(static_cast<double>(stage(whole, Stage::transfer_post) + stage(whole, Stage::transfer_wire)),
              static_cast<double>(run.after_prefill()) + 31 * bytes / (365.66 / 8), 100'000);
  EXPECT_LT(run.r.first_token, whole.first_token - 20 * kMillisecond);
  EXPECT_EQ(run.r.transfer_bytes, whole.transfer_bytes);
  EXPECT_EQ(run.r.descriptors, whole.descriptors);
  EXPECT_EQ(run.o.run.transfers.count, 1);
  EXPECT_EQ(run.o.run.transfers.batches, 2);
}

TEST(PushLayerwise, WithAMuchSlowerWireItEndsWhenTheBytesHaveGone) {
  const Layerwise run({"network.fabric=tcp"});  // 0.3 GB/s a GPU
  EXPECT_EQ(run.after_prefill(), foretell_landing(run.o, run.batches) - run.ends);
  EXPECT_GE(run.ends + run.after_prefill(),
            run.batches[0].begin + static_cast<Nanos>(8000.0 * 131'072 / 0.3));
}

// A registration that comes while the step runs: layers that have ended go at once, the others as they end.
// One that comes when no more than the last layer is left changes nothing any more: all goes at the end, as
// push.
TEST(PushLayerwise, ARegistrationMayComeDuringTheStep) {
  const Layerwise run({"transfer.notification_us=100000"});
  EXPECT_EQ(run.batches[0].begin, run.begins + 100 * kMillisecond);
  ASSERT_GT(run.batches[0].lasts, 0);
  EXPECT_EQ(run.o.run.transfers.batches, 2);
  EXPECT_EQ(run.after_prefill(), foretell_landing(run.o, run.batches) - run.ends);

  const Nanos late = run.ends - run.begins - (run.ends - run.begins) / 40;
  const std::string notification = "transfer.notification_us=" + std::to_string(late / 1000);
  const Outcomes layerwise = run_text(
      kDisaggregated, run.trace, with(with(kPush, kWarm), {"transfer.mode=push_layerwise", notification}));
  const Outcomes push = run_text(kDisaggregated, run.trace, with(with(kPush, kWarm), {notification}));
  EXPECT_EQ(first_difference(layerwise.csv, push.csv), "");
  EXPECT_EQ(layerwise.run.transfers.batches, 1);
}

// Layers come at the pace of the computation and leave the wire to others: of two prefill workers that write
// to one decode worker, the one with the short prompt ends while the other's layers are on their way.
TEST(PushLayerwise, LayersTakeNoMoreOfTheWireThanTheyComeAt) {
  const Trace trace = made_trace({request_at(0, 8000, 2), request_at(0, 500, 2)});
  const Outcomes o = run_text(kDisaggregated, trace,
                              {"pools.decode.replicas=1", "router.policy=round_robin",
                               "transfer.mode=push_layerwise", "transfer.warm_start=true"});
  expect_conserved(o, trace);
  const PoolPlan& prefill = o.deployment.pools[0];
  const Nanos begins = o.loaded.scenario.router.hop,
              registered = begins + o.loaded.scenario.transfer.notification;
  const Nanos ends = begins + prefill_time(prefill, 500);
  const RequestRecord& r = o.run.requests[1];
  ASSERT_NE(r.prefill_worker, o.run.requests[0].prefill_worker);
  std::vector<Foretold> all = layer_by_layer(o, r.prefill_worker, 32, begins, ends, registered);
  const std::vector<Foretold> others = layer_by_layer(o, o.run.requests[0].prefill_worker, 500, begins,
                                                      begins + prefill_time(prefill, 8000), registered);
  EXPECT_LT(others[0].begin, ends);
  all.insert(all.end(), others.begin(), others.end());
  EXPECT_EQ(stage(r, Stage::transfer_post) + stage(r, Stage::transfer_wire),
            foretell_landing(o, all, 2) - ends);
}

// Two chunks, each layer by layer. Bytes are those of push; descriptors are those of each piece, which are
// runs of its own: 64 regions once for each chunk.
TEST(PushLayerwise, EachChunkGoesAsItsLayersEnd) {
  const Trace trace = made_trace({request_at(0, 12'000, 2)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(with(kPush, kWarm), {"transfer.mode=push_layerwise"}));
  expect_conserved(o, trace);
  const PoolPlan& prefill = o.deployment.pools[0];
  ASSERT_EQ(prefill.engine.max_num_batched_tokens, 8192);
  const Nanos begins = o.loaded.scenario.router.hop;
  const Nanos second = begins + prefill.step_model->time(prefill_shape(0, 8192, false)).ns;
  const Nanos ends = second + prefill.step_model->time(prefill_shape(8192, 12'000 - 8192, true)).ns;
  std::vector<Foretold> all =
      layer_by_layer(o, 0, 512, begins, second, begins + o.loaded.scenario.transfer.notification);
  const std::vector<Foretold> rest = layer_by_layer(o, 0, 750 - 512, second, ends, 0, all.back().post_end());
  all.insert(all.end(), rest.begin(), rest.end());
  const RequestRecord& r = o.run.requests[0];
  EXPECT_EQ(stage(r, Stage::prefill), ends - begins);
  EXPECT_EQ(stage(r, Stage::transfer_post) + stage(r, Stage::transfer_wire), foretell_landing(o, all) - ends);
  const Outcomes push = run_text(kDisaggregated, trace, with(kPush, kWarm));
  EXPECT_EQ(r.transfer_bytes, push.run.requests[0].transfer_bytes);
  EXPECT_EQ(push.run.requests[0].descriptors, 64);
  EXPECT_EQ(r.descriptors, 2 * 64);
  EXPECT_EQ(o.run.transfers.batches, 4);
  EXPECT_EQ(o.run.transfers.count, 1);
}

// ---------------------------------------------------------------------------------------- chunk by chunk

// Four chunks of 8192, 8192, 8192 and 5424 tokens: each chunk's full blocks go when the next one starts, one
// batch at a time (each is through long before the next chunk's end), the last ones when prefill has ended.
TEST(PushProgressive, AllButTheLastChunkGoesDuringPrefill) {
  const std::int32_t prompt = 30'000, chunk = 8192;
  const Trace trace = made_trace({request_at(0, prompt, 2)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(with(kPush, kWarm), {"transfer.mode=push_progressive"}));
  expect_conserved(o, trace);
  const PoolPlan& prefill = o.deployment.pools[0];
  std::vector<Foretold> batches;
  Nanos now = o.loaded.scenario.router.hop;
  for (std::int32_t p = 0; p < prompt; p += chunk) {
    const std::int32_t n = std::min(chunk, prompt - p);
    now += prefill.step_model->time(prefill_shape(p, n, p + n == prompt)).ns;
    Foretold batch;
    batch.blocks = (n + 15) / 16;
    batch.begin = now;
    batches.push_back(foretell(o, batch));
  }
  ASSERT_EQ(batches.size(), 4u);
  for (std::size_t i = 0; i + 1 < batches.size(); ++i) {
    ASSERT_LT(foretell_landing(o, {batches[i]}), batches[i + 1].begin);
  }
  const RequestRecord& r = o.run.requests[0];
  const Nanos prefilled = now;
  EXPECT_EQ(stage(r, Stage::prefill), prefilled - o.loaded.scenario.router.hop);
  EXPECT_EQ(stage(r, Stage::transfer_post), batches.back().posting);
  EXPECT_EQ(stage(r, Stage::transfer_wire),
            foretell_landing(o, {batches.back()}) - batches.back().post_end());
  EXPECT_EQ(o.run.transfers.batches, 4);
  EXPECT_EQ(o.run.transfers.count, 1);
  Bytes before = 0, all = 0;
  for (const Foretold& batch : batches) {
    all += batch.bytes();
    if (batch.begin < prefilled) before += batch.bytes();
  }
  EXPECT_EQ(before, Bytes{3} * 8192 * 131'072);
  EXPECT_EQ(r.transfer_bytes, all);
  EXPECT_EQ(r.descriptors, 4 * 64);
}

// On a wire so slow that one batch lasts longer than the steps, the next one takes all that has come to be
// meanwhile.
TEST(PushProgressive, OneBatchIsInFlightAtATime) {
  const Trace trace = made_trace({request_at(0, 30'000, 2)});
  const Outcomes o =
      run_text(kDisaggregated, trace,
               with(with(kPush, kWarm), {"transfer.mode=push_progressive", "network.fabric=tcp",
                                         "pools.prefill.engine.max_num_batched_tokens=1024"}));
  expect_conserved(o, trace);
  const Outcomes push = run_text(
      kDisaggregated, trace,
      with(with(kPush, kWarm), {"network.fabric=tcp", "pools.prefill.engine.max_num_batched_tokens=1024"}));
  const RequestRecord &r = o.run.requests[0], &whole = push.run.requests[0];
  EXPECT_EQ(r.transfer_bytes, whole.transfer_bytes);
  EXPECT_GE(o.run.transfers.batches, 3);
  EXPECT_LT(o.run.transfers.batches, 30);
  EXPECT_EQ(r.descriptors, o.run.transfers.batches * 64);
  EXPECT_LT(r.first_token, whole.first_token);
  // The wire is never faster than 0.3 GB/s from the first batch on.
  const Nanos first =
      o.loaded.scenario.router.hop + o.deployment.pools[0].step_model->time(prefill_shape(0, 1024, false)).ns;
  EXPECT_GT(r.first_token, first + static_cast<Nanos>(30'000.0 * 131'072 / 0.3));
}

// A prompt that is preempted between its chunks is computed again, and nothing is sent until its end, when
// all of it is: also what had been sent before. (vLLM admits a prompt only when all its blocks are free, so
// that it takes a load from elsewhere to make prefill preempt one: the blocks of the part that is still to be
// computed are not kept for it meanwhile. Hence bidirectional, which no engine has with push.)
TEST(PushProgressive, APreemptedPromptIsSentAtItsEnd) {
  Trace trace = conversation({request_at(0, 1024, 8), request_at(10 * kSecond, 4096, 4)});
  Request other = request_at(10 * kSecond + 1, 2000, 4);  // comes while the turn is being read, over TCP
  other.hash_begin = trace.hash_ids.size();
  other.hash_count = 4;
  for (std::uint64_t i = 0; i < 4; ++i) trace.hash_ids.push_back(90'000 + i);
  trace.requests.push_back(other);
  ++trace.report.rows_used;
  // 300 blocks of prefill: 256 of the turn, of which 65 are read; 125 of the other.
  const Outcomes o = run_text(
      kDisaggregated, trace,
      with(with(kPush, kWarm),
           {"transfer.mode=push_progressive", "transfer.bidirectional=true", "transfer.hypothetical=true",
            "network.fabric=tcp", "pools.prefill.engine.enable_prefix_caching=false",
            "pools.prefill.engine.num_gpu_blocks_override=301",
            "pools.prefill.engine.max_num_batched_tokens=512", "transfer.kv_lease_duration_s=300"}));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[1];
  EXPECT_EQ(count(o.run, RequestStatus::completed), 3u);
  EXPECT_EQ(r.remote_hit_tokens, 1031);
  EXPECT_EQ(r.preemptions, 1);
  EXPECT_GT(r.recomputed_tokens, 2000);
  const Bytes block = 16 * 131'072;
  const Bytes whole = (256 - 64) * block;  // decode has 64 blocks of the first turn
  EXPECT_EQ(r.transferred_tokens, 4096 - 1024);
  EXPECT_GT(r.transfer_bytes, whole);
  EXPECT_LT(r.transfer_bytes, 2 * whole);
  EXPECT_EQ(r.transfer_bytes % block, 0);
  EXPECT_EQ(o.run.transfers.count, 3);
}

// A prompt of one chunk has nothing to send early: this is push.
TEST(PushProgressive, APromptOfOneChunkIsPushedAtItsEnd) {
  const Trace trace = made_trace({request_at(0, 1000, 3), request_at(kSecond, 5000, 3)});
  const Outcomes push = run_text(kDisaggregated, trace, with(kPush, kWarm));
  const Outcomes o =
      run_text(kDisaggregated, trace, with(with(kPush, kWarm), {"transfer.mode=push_progressive"}));
  EXPECT_EQ(first_difference(o.csv, push.csv), "");
}

// Every push moves a prompt's bytes once, whatever the order; nobody computes or transfers anything twice.
TEST(PushModes, MoveTheSameBytes) {
  const Trace trace = small_trace(80, 12, kMillisecond, 5);
  std::vector<Bytes> bytes;
  for (const char* mode : {"pull", "push", "push_layerwise", "push_progressive"}) {
    SCOPED_TRACE(mode);
    // No prefix cache: what decode has already depends on when.
    const Outcomes o = run_text(kDisaggregated, trace,
                                {std::string("transfer.mode=") + mode, "router.policy=round_robin",
                                 "pools.prefill.engine.enable_prefix_caching=false",
                                 "pools.decode.engine.enable_prefix_caching=false",
                                 "pools.prefill.engine.max_num_batched_tokens=1024"});
    expect_conserved(o, trace);
    EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
    bytes.push_back(o.run.transfers.bytes);
    EXPECT_EQ(o.run.transfers.leases_expired, 0);
  }
  for (const Bytes b : bytes) EXPECT_EQ(b, bytes[0]);
}

// ---------------------------------------------------------------------------------- a thread for posting

// Pull posts on decode's forward thread: the step that posts is that much longer, and with it every gap of
// the requests that decode. A thread of its own (background_receiver) leaves the steps alone and takes 1.8
// times as long to post, for the interpreter's lock.
TEST(Posting, AThreadOfItsOwnLengthensNoStep) {
  const Trace trace = made_trace({request_at(0, 500, 400), request_at(kSecond, 4000, 20)});
  const Sets sets = with(with(kOneEach, kWarm), {"transfer.initial_fragmentation=1"});
  const Outcomes forward = run_text(kDisaggregated, trace, sets);
  const Outcomes thread = run_text(kDisaggregated, trace, with(sets, {"transfer.background_receiver=true"}));
  expect_conserved(forward, trace);
  expect_conserved(thread, trace);
  const RequestRecord& handed = forward.run.requests[1];
  ASSERT_GT(handed.descriptors, 200 * 64);
  const auto posting = [](const RequestRecord& r, double contention) {
    return ceil_ns(71'000 * contention) + r.descriptors * ceil_ns(2'430 * contention);
  };
  EXPECT_EQ(forward.run.workers[1].posting,
            posting(forward.run.requests[0], 1) + posting(forward.run.requests[1], 1));
  EXPECT_EQ(thread.run.workers[1].posting, 0);
  EXPECT_DOUBLE_EQ(forward.run.transfers.post_ms[1], to_ms(posting(handed, 1)));
  EXPECT_DOUBLE_EQ(thread.run.transfers.post_ms[1], to_ms(posting(thread.run.requests[1], 1.8)));
  // The one that decodes meanwhile: its longest gap is the posting step, or none stands out.
  const Nanos posted = posting(handed, 1);
  EXPECT_GT(forward.run.requests[0].longest_gap, posted);
  EXPECT_LT(forward.run.requests[0].longest_gap, posted + 12 * kMillisecond);
  EXPECT_LT(thread.run.requests[0].longest_gap, 12 * kMillisecond);
  EXPECT_LT(thread.summary["latency_ms"]["itl"]["max"].get<double>(),
            forward.summary["latency_ms"]["itl"]["max"].get<double>() - 0.9 * to_ms(posted));
  EXPECT_NEAR(to_ms(forward.run.requests[0].end - thread.run.requests[0].end), to_ms(posted), 0.5);
}

// ------------------------------------------------------------------------------------------ what is refused

TEST(PushBidirectional, IsRefusedUnlessHypothetical) {
  const Trace trace = made_trace({request_at(0, 500, 2)});
  const Sets sets = with(kPush, {"transfer.bidirectional=true"});
  EXPECT_THROW(run_text(kDisaggregated, trace, sets), InputError);
  const Outcomes o = run_text(kDisaggregated, trace, with(sets, {"transfer.hypothetical=true"}));
  expect_conserved(o, trace);
  EXPECT_TRUE(o.run.hypothetical);
  EXPECT_EQ(o.summary["hypothetical"], true);
}

}  // namespace
}  // namespace pdsim
