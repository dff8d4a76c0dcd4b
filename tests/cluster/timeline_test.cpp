// One request alone on an idle cluster: everything that happens to it can be written down, from the step
// model, the network's efficiency and the scenario's constants, to the nanosecond.
#include <gtest/gtest.h>

#include "sim/network/network.hpp"
#include "sim/transfer/pull.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

Nanos stage(const RequestRecord& r, Stage s) {
  return r.stages[static_cast<std::size_t>(s)];
}

StepShape prefill_shape(std::int64_t p, std::int64_t n, bool last) {
  StepShape s;
  s.prefill_requests = 1;
  s.prefill_tokens = static_cast<std::int32_t>(n);
  s.prefill_pairs = n * p + n * (n + 1) / 2;
  s.prefill_context = p + n;
  s.sampled_requests = last ? 1 : 0;
  return s;
}

StepShape decode_shape(std::int64_t context) {
  StepShape s;
  s.decode_requests = s.sampled_requests = 1;
  s.decode_context = context;
  return s;
}

Nanos prefill_time(const PoolPlan& pool, std::int32_t prompt) {
  Nanos sum = 0;
  for (std::int32_t p = 0; p < prompt; p += pool.engine.max_num_batched_tokens) {
    const std::int32_t n = std::min(prompt - p, pool.engine.max_num_batched_tokens);
    sum += pool.step_model->time(prefill_shape(p, n, p + n == prompt)).ns;
  }
  return sum;
}

/// Steps that yield tokens `first` to `last` (from 1): the t-th reads the prompt and the t - 1 before it.
Nanos decode_time(const PoolPlan& pool, std::int32_t prompt, std::int32_t first, std::int32_t last) {
  Nanos sum = 0;
  for (std::int32_t t = first; t <= last; ++t) {
    sum += pool.step_model->time(decode_shape(prompt + t - 1)).ns;
  }
  return sum;
}

/// The first multiple of `step` after `origin` that is not before `time`, one step on at least.
Nanos on_grid(Nanos origin, Nanos step, Nanos time) {
  return origin + std::max<Nanos>(1, (time - origin + step - 1) / step) * step;
}

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

class Handover : public testing::TestWithParam<Case> {};

// kv-transfer facts 1.1, in time:
//   arrival --hop--> prefill's steps --hop--> decode engine, asleep: its step starts at once
//   that step only posts; with no contact yet a handshake of 50 ms for each source rank comes first
//   empty steps of idle_step until something is seen; posting is on the forward thread
//   the wire runs from the first descriptor on, its latency is a round trip (a READ is asked for)
//   the first boundary after the last byte has landed sees it; the step that starts there recomputes the
//   last prompt token and yields token 1; then one step a token.
TEST_P(Handover, OneRequestAloneToTheNanosecond) {
  const Case& c = GetParam();
  const std::int32_t prompt = 1000, output = 6;
  std::vector<Request> requests = {request_at(0, prompt, output)};
  if (c.second_contact) requests.push_back(request_at(60 * kSecond, prompt, output));
  const Trace trace = made_trace(requests);
  const std::string async = c.async;
  const Outcomes o = run_text(
      kDisaggregated, trace,
      {std::string("model=") + c.model, "pools.prefill.replicas=1", "pools.decode.replicas=1",
       "pools.prefill.tensor_parallel=" + std::to_string(c.prefill_tp),
       "pools.decode.tensor_parallel=" + std::to_string(c.decode_tp),
       "pools.prefill.engine.async_scheduling=" + async, "pools.decode.engine.async_scheduling=" + async});
  expect_conserved(o, trace);
  const Scenario& s = o.loaded.scenario;
  const PoolPlan &prefill = o.deployment.pools[0], &decode = o.deployment.pools[1];
  const RequestRecord& r = o.run.requests.back();
  const ModelSpec& model = o.deployment.model;
  const PullLayout layout = pull_layout(model.latent > 0 ? 0 : model.kv_heads, c.prefill_tp, c.decode_tp,
                                        decode.footprint.kv_regions, decode.footprint.kv_bytes_per_token);
  const Nanos hop = s.router.hop, idle = decode.engine.idle_step;

  // Up to the decode scheduler.
  const Nanos prefilled = r.arrival + hop + prefill_time(prefill, prompt);
  const Nanos scheduled = prefilled + hop;
  EXPECT_EQ(stage(r, Stage::router), hop);
  EXPECT_EQ(stage(r, Stage::prefill_queue), 0);
  EXPECT_EQ(stage(r, Stage::prefill), prefilled - r.arrival - hop);
  EXPECT_EQ(stage(r, Stage::handoff_dispatch), hop);
  EXPECT_EQ(stage(r, Stage::decode_admission), 0);

  // Handshake and posting. Fresh pools: whole prompts in one run of blocks.
  Nanos posts = scheduled;
  if (!c.second_contact) {
    posts = on_grid(scheduled + idle, idle, scheduled + layout.sources * s.transfer.handshake);
  }
  const std::int32_t blocks = (prompt + 15) / 16;
  const std::int64_t n = descriptors(layout, 1, blocks);
  const Nanos posting = posting_time(layout, s.transfer.post_fixed, s.transfer.post_per_descriptor, n);
  EXPECT_EQ(r.descriptors, n * c.decode_tp);
  EXPECT_EQ(stage(r, Stage::transfer_post), posts + posting - scheduled);

  // The wire: every rank's parts as flows of their own, on a network of their own.
  Network network(o.deployment.topology);
  const double rank_bytes = blocks * 16 * layout.bytes_per_token;
  const double descriptor_bytes = rank_bytes / static_cast<double>(n);
  const std::vector<GpuId>& from = o.deployment.workers[0].gpus;
  const std::vector<GpuId>& to = o.deployment.workers[1].gpus;
  std::vector<Completion> done;
  Nanos end = 0;
  std::uint64_t tag = 0;
  const auto drain_until = [&](Nanos until) {
    for (;;) {
      const Nanos next = network.next_completion(end);
      if (next > until) return;
      end = next;
      network.complete(next, done);
    }
  };
  for (std::int32_t source = 0; source < layout.sources; ++source) {
    const Nanos start = posts + source * (posting / layout.sources) + s.transfer.post_fixed;
    if (source > 0) drain_until(start);
    for (std::int32_t rank = 0; rank < layout.ranks; ++rank) {
      FlowRequest flow;
      flow.source = from[static_cast<std::size_t>(source_rank(layout, c.prefill_tp, rank, source))];
      flow.destination = to[static_cast<std::size_t>(rank)];
      flow.bytes = static_cast<Bytes>(rank_bytes / layout.sources);
      flow.op = Op::read;
      flow.operation_bytes =
          wire_operation_bytes(static_cast<Bytes>(descriptor_bytes),
                               o.deployment.topology.rails[static_cast<std::size_t>(flow.destination)]);
      flow.rate_cap = descriptor_bytes / static_cast<double>(s.transfer.post_per_descriptor);
      flow.tag = tag++;
      network.start(start, flow);
    }
    end = start;
  }
  drain_until(kNever - 1);
  const Nanos latency = 2 * route(o.deployment.topology, from[0], to[0]).latency;
  const Nanos landed = std::max(end + latency, posts + posting);
  EXPECT_EQ(stage(r, Stage::transfer_wire), landed - posts - posting);
  EXPECT_EQ(r.transfer_bytes,
            static_cast<Bytes>(rank_bytes / layout.sources) * layout.sources * layout.ranks);

  // Seen at the first boundary from then on: the posting step ends after an empty forward, others follow.
  const Nanos first_end = posts + posting + idle;
  const Nanos seen = landed <= first_end ? first_end : on_grid(first_end, idle, landed);
  EXPECT_EQ(stage(r, Stage::transfer_poll), seen - landed);
  EXPECT_EQ(stage(r, Stage::first_token), decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(r.first_token, seen + decode_time(decode, prompt, 1, 1));
  EXPECT_EQ(stage(r, Stage::decode), decode_time(decode, prompt, 2, output));
  EXPECT_EQ(r.end, r.first_token + decode_time(decode, prompt, 2, output));

  // Memory: decode holds the whole prompt's blocks from scheduling on; prefill until its engine, asleep
  // since, would see the notification: here to the end of the run, and reported as such.
  if (c.second_contact) return;
  const auto held = [&](const PoolPlan& pool, int tp, Nanos from_when, Nanos until) {
    return blocks * pool.kv_bytes_per_block * tp * to_seconds(until - from_when);
  };
  const TransferTotals& t = o.run.transfers;
  EXPECT_DOUBLE_EQ(t.decode_byte_seconds, held(decode, c.decode_tp, scheduled, seen));
  EXPECT_DOUBLE_EQ(t.prefill_byte_seconds, held(prefill, c.prefill_tp, prefilled, r.end));
  EXPECT_EQ(t.leases_outstanding, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Pull, Handover,
    testing::Values(Case{"llama-3.1-8b", 1, 1, false, "true"}, Case{"llama-3.1-8b", 1, 1, false, "false"},
                    Case{"llama-3.1-8b", 1, 1, true, "true"}, Case{"qwen3-32b", 4, 4, false, "true"},
                    Case{"qwen3-32b", 4, 4, true, "false"}, Case{"qwen3-32b", 8, 4, true, "true"},
                    Case{"qwen3-32b", 2, 8, true, "true"}, Case{"qwen3-32b", 8, 2, false, "true"},
                    Case{"glm-5-fp8", 8, 8, true, "true"}),
    [](const testing::TestParamInfo<Case>& info) {
      std::string name = info.param.model;
      for (char& ch : name) ch = ch == '-' || ch == '.' ? '_' : ch;
      return name + "_tp" + std::to_string(info.param.prefill_tp) + "_to_tp" +
             std::to_string(info.param.decode_tp) + (info.param.second_contact ? "_again" : "_first") +
             (info.param.async[0] == 't' ? "_async" : "_sync");
    });

}  // namespace
}  // namespace pdsim
