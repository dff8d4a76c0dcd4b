// One request alone on an idle cluster: everything that happens to it can be written down, from the step
// model, the network's efficiency and the scenario's constants, to the nanosecond.
#include <gtest/gtest.h>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

TEST(Timeline, OneRequestColocated) {
  for (const char* async : {"true", "false"}) {
    const Trace trace = made_trace({request_at(5 * kMillisecond, 20'000, 7)});
    const Outcomes o =
        run_text(kColocated, trace, {std::string("pools.worker.engine.async_scheduling=") + async});
    const PoolPlan& pool = o.deployment.pools[0];
    const RequestRecord& r = o.run.requests[0];
    ASSERT_GT(20'000, 2 * pool.engine.max_num_batched_tokens);  // three chunks
    const Nanos prefill = prefill_time(pool, 20'000);
    const Nanos hop = o.loaded.scenario.router.hop;
    EXPECT_EQ(stage(r, Stage::router), hop);
    EXPECT_EQ(stage(r, Stage::prefill_queue), 0);
    EXPECT_EQ(stage(r, Stage::prefill), prefill);
    EXPECT_EQ(r.first_token, r.arrival + hop + prefill);
    EXPECT_EQ(stage(r, Stage::decode), decode_time(pool, 20'000, 2, 7));
    EXPECT_EQ(r.e2e(), hop + prefill + decode_time(pool, 20'000, 2, 7));
    EXPECT_EQ(o.run.workers[0].busy, prefill + decode_time(pool, 20'000, 2, 7));
    EXPECT_EQ(o.run.workers[0].steps, 3 + 6);
    EXPECT_EQ(o.summary["events"], 2 + 9);  // it arrives, it is delivered, and steps
    expect_conserved(o, trace);
  }
}

// The engine's front end: what it takes for a request of n prompt tokens.
Nanos front_end(const PoolPlan& pool, std::int32_t n) {
  const Overheads& o = pool.step_model->overheads();
  return ceil_ns(o.front_end + o.front_end_token * n);
}

// One process: of requests that come together each waits for those before it, and one that comes later for
// itself alone. All of that is the router's stage.
TEST(FrontEnd, TakesRequestsInTurn) {
  const std::vector<std::int32_t> prompts = {1000, 4000, 500};
  std::vector<Request> requests;
  for (const std::int32_t prompt : prompts) requests.push_back(request_at(kMillisecond, prompt, 3));
  requests.push_back(request_at(10 * kSecond, 700, 3));
  const Trace trace = made_trace(requests);
  const Outcomes o = run_shipped(kColocated, trace, {"pools.worker.replicas=1"});
  const PoolPlan& pool = o.deployment.pools[0];
  const Nanos hop = o.loaded.scenario.router.hop;
  ASSERT_GT(front_end(pool, 1000), kMillisecond);
  ASSERT_GT(front_end(pool, 4000), front_end(pool, 1000));
  Nanos taken = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    taken += front_end(pool, prompts[i]);
    EXPECT_EQ(stage(o.run.requests[i], Stage::router), hop + taken) << i;
  }
  const RequestRecord& last = o.run.requests[3];
  EXPECT_EQ(stage(last, Stage::router), hop + front_end(pool, 700));
  EXPECT_EQ(last.first_token, last.arrival + hop + front_end(pool, 700) + prefill_time(pool, 700));
  expect_conserved(o, trace);

  // Each engine has its own: three workers take three requests at once.
  const Outcomes apart = run_shipped(kColocated, trace, {"router.policy=round_robin"});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(stage(apart.run.requests[i], Stage::router), hop + front_end(pool, prompts[i])) << i;
  }
}

// Handed over by pull, a request goes through decode's front end too.
TEST(FrontEnd, IsPassedAgainAtDecode) {
  const Trace trace = made_trace({request_at(0, 3000, 5)});
  const Outcomes o = run_shipped(kDisaggregated, trace, kOneEach);
  const RequestRecord& r = o.run.requests[0];
  const Nanos through = o.loaded.scenario.router.hop + front_end(o.deployment.pools[0], 3000);
  EXPECT_EQ(stage(r, Stage::router), through);
  EXPECT_EQ(stage(r, Stage::prefill), prefill_time(o.deployment.pools[0], 3000));
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), through);
  expect_conserved(o, trace);
}

// The next request's chunk after a cached prefix costs a chunk after a prefix, not a whole prompt.
TEST(Timeline, APrefixHitIsNotComputed) {
  Trace trace = made_trace({request_at(0, 1024, 3), request_at(10 * kSecond, 1200, 3)}, 512, {1, 2, 1, 2, 3});
  trace.requests[0].hash_count = 2;
  trace.requests[1].hash_begin = 2;
  trace.requests[1].hash_count = 3;
  const Outcomes o = run_text(kColocated, trace, {"pools.worker.replicas=1"});
  const RequestRecord& r = o.run.requests[1];
  EXPECT_EQ(r.local_hit_tokens, 1024);
  EXPECT_EQ(stage(r, Stage::prefill),
            o.deployment.pools[0].step_model->time(prefill_shape(1024, 176, true)).ns);
  expect_conserved(o, trace);
}

struct Case {
  const char* model;
  int prefill_tp, decode_tp;
  bool second_contact;  ///< the handshake is done already
  const char* async;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model;
}

Outcomes run_case(const Case& c, const Trace& trace, const Sets& more) {
  const std::string async = c.async;
  return run_text(kDisaggregated, trace,
                  with(with(kOneEach, {std::string("model=") + c.model,
                                       "pools.prefill.tensor_parallel=" + std::to_string(c.prefill_tp),
                                       "pools.decode.tensor_parallel=" + std::to_string(c.decode_tp),
                                       "pools.prefill.engine.async_scheduling=" + async,
                                       "pools.decode.engine.async_scheduling=" + async}),
                       more));
}

// kv-transfer facts 1.1, in time:
//   arrival --hop--> prefill's steps --hop--> decode engine, asleep: its step starts at once
//   that step only posts; with no contact yet one comes first: for each source rank a handshake, and
//   0.225 us for each region and block of its pool
//   empty steps of idle_step until something is seen; posting is on the forward thread
//   the wire runs from the first descriptor on, its latency is a round trip (a READ is asked for)
//   the first boundary after the last byte has landed sees it; the step that starts there recomputes the
//   last prompt token and yields token 1; then one step a token.
// With background_receiver the posting is a thread's: it begins at once (or when contact is made), takes
// thread_contention times as long, and no step waits for it.
class Handover : public testing::TestWithParam<std::tuple<Case, bool>> {};

TEST_P(Handover, OneRequestAloneToTheNanosecond) {
  const auto& [c, background] = GetParam();
  const std::int32_t prompt = 1000, output = 6;
  std::vector<Request> requests = {request_at(0, prompt, output)};
  if (c.second_contact) requests.push_back(request_at(60 * kSecond, prompt, output));
  const Trace trace = made_trace(requests);
  const Outcomes o =
      run_case(c, trace, {std::string("transfer.background_receiver=") + (background ? "true" : "false")});
  expect_conserved(o, trace);
  const Scenario& s = o.loaded.scenario;
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const RequestRecord& r = o.run.requests.back();
  const Layout layout = layout_of(o, 0, 1);
  const Nanos hop = s.router.hop, idle = decode.engine.idle_step;

  // Up to the decode scheduler.
  const Nanos prefilled = r.arrival + hop + prefill_time(prefill, prompt);
  const Nanos scheduled = prefilled + hop;
  EXPECT_EQ(stage(r, Stage::router), hop);
  EXPECT_EQ(stage(r, Stage::prefill_queue), 0);
  EXPECT_EQ(stage(r, Stage::prefill), prefilled - r.arrival - hop);
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), hop);
  EXPECT_EQ(stage(r, Stage::decode_admission), 0);

  // Contact and posting.
  Nanos posts = scheduled;
  if (!c.second_contact) {
    posts += foretell_contact(o, layout.sources, layout.regions, 0, false);
    if (!background) posts = on_grid(scheduled + idle, idle, posts);
  }
  Foretold read;
  read.op = Op::read;
  read.blocks = (prompt + 15) / 16;
  read.begin = posts;
  if (background) {
    EXPECT_EQ(s.transfer.thread_contention, 1.8);
    read.contention = 1.8;
  }
  read = foretell(o, read);
  EXPECT_EQ(r.descriptors, read.all_descriptors());
  EXPECT_EQ(r.transfer_bytes, read.bytes());
  EXPECT_EQ(stage(r, Stage::transfer_post), read.post_end() - scheduled);
  const Nanos landed = foretell_landing(o, {read});
  EXPECT_EQ(stage(r, Stage::transfer_wire), landed - read.post_end());

  // Seen at the first boundary from then on: the posting step ends after an empty forward, others follow.
  const Nanos first_end = background ? scheduled + idle : read.post_end() + idle;
  const Nanos seen = landed <= first_end ? first_end : on_grid(first_end, idle, landed);
  EXPECT_EQ(stage(r, Stage::transfer_poll), seen - landed);
  EXPECT_EQ(stage(r, Stage::first_token), decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(r.first_token, seen + decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(stage(r, Stage::decode), decode_time(decode, prompt, 2, output));
  EXPECT_EQ(r.end, r.first_token + decode_time(decode, prompt, 2, output));
  EXPECT_EQ(o.run.workers[1].posting > 0, !background);

  // Memory: decode holds the whole prompt's blocks from scheduling on; prefill until its engine, asleep
  // since, would see the notification: here to the end of the run, and reported as such.
  if (c.second_contact) return;
  const auto held = [&](const PoolPlan& pool, int tp, Nanos from_when, Nanos until) {
    return read.blocks * pool.kv_bytes_per_block * tp * to_seconds(until - from_when);
  };
  const TransferTotals& t = o.run.transfers;
  EXPECT_DOUBLE_EQ(t.decode_byte_seconds, held(decode, c.decode_tp, scheduled, seen));
  EXPECT_DOUBLE_EQ(t.prefill_byte_seconds, held(prefill, c.prefill_tp, prefilled, r.end));
  EXPECT_EQ(t.leases_outstanding, 1);
  EXPECT_EQ(t.handshakes, 1);
}

// By hand, where heads are the same on both sides and nothing is in the way: 63 blocks of 16 tokens of
// Llama-3.1-8B (32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes a token) are one run, so 64
// descriptors, and 71 us + 64 x 2.43 us of posting. A descriptor is 2,064,384 bytes, half of it on each of a
// GPU's two rails: at 1,032,192 bytes a READ of p5en runs at just below 303.78 of 400 GB/s, 1/8 of it a GPU.
TEST(Timeline, OnePullByHand) {
  const Trace trace = made_trace({request_at(0, 1000, 2)});
  const Outcomes o = run_text(kDisaggregated, trace, with(kOneEach, {"transfer.warm_start=true"}));
  const RequestRecord& r = o.run.requests[0];
  EXPECT_EQ(r.transfer_bytes, 63 * 16 * 131'072);
  EXPECT_EQ(r.descriptors, 64);
  EXPECT_EQ(stage(r, Stage::transfer_post), 71'000 + 64 * 2'430);
  const double wire = 63 * 16 * 131'072 / (303.78 / 8) + 71'000 + 2 * 17'300 - (71'000 + 64 * 2'430);
  EXPECT_NEAR(static_cast<double>(stage(r, Stage::transfer_wire)), wire, 0.001 * wire);
}

const Case kPulls[] = {
    {"llama-3.1-8b", 1, 1, false, "true"}, {"llama-3.1-8b", 1, 1, false, "false"},
    {"llama-3.1-8b", 1, 1, true, "true"},  {"qwen3-32b", 4, 4, false, "true"},
    {"qwen3-32b", 4, 4, true, "false"},    {"qwen3-32b", 8, 4, true, "true"},
    {"qwen3-32b", 2, 8, true, "true"},     {"qwen3-32b", 8, 2, false, "true"},
    {"glm-5-fp8", 8, 8, true, "true"},
};

std::string case_name(const testing::TestParamInfo<std::tuple<Case, bool>>& info) {
  const auto& [c, background] = info.param;
  std::string name = c.model;
  for (char& ch : name) ch = ch == '-' || ch == '.' ? '_' : ch;
  return name + "_tp" + std::to_string(c.prefill_tp) + "_to_tp" + std::to_string(c.decode_tp) +
         (c.second_contact ? "_again" : "_first") + (c.async[0] == 't' ? "_async" : "_sync") +
         (background ? "_thread" : "");
}

INSTANTIATE_TEST_SUITE_P(Pull, Handover, testing::Combine(testing::ValuesIn(kPulls), testing::Bool()),
                         case_name);

}  // namespace
}  // namespace pdsim
