// What the router of a running cluster knows, and when; and that its choices hold.
#include <gtest/gtest.h>

#include <map>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

/// The same prompt of two hash blocks at each of these times.
Trace same_prompt(const std::vector<Nanos>& times) {
  std::vector<Request> requests;
  for (const Nanos time : times) {
    Request r = request_at(time, 1100, 4);
    r.hash_count = 2;
    requests.push_back(r);
  }
  return made_trace(std::move(requests), 512, {1, 2});
}

// A prompt's blocks are cached in the step that computes them; the router knows when the step has ended and
// the event has travelled. Until then the second worker looks as good as the first, and ties take turns.
TEST(PrefixAware, SeesACacheWhenItsEventHasCome) {
  const Sets two = {"pools.worker.replicas=2", "router.policy=prefix_aware"};
  const auto workers = [&](const char* delay_us) {
    Sets sets = two;
    sets.push_back(std::string("router.cache_event_delay_us=") + delay_us);
    const Trace trace = same_prompt({0, 5 * kSecond, 6 * kSecond, 20 * kSecond});
    const Outcomes o = run_text(kColocated, trace, sets);
    expect_conserved(o, trace);
    std::vector<std::uint32_t> chosen;
    for (const RequestRecord& r : o.run.requests) chosen.push_back(r.prefill_worker);
    return chosen;
  };
  EXPECT_EQ(workers("1000"), (std::vector<std::uint32_t>{0, 0, 0, 0}));
  EXPECT_EQ(workers("5500000")[1], 1u);  // not known at 5 s
  EXPECT_EQ(workers("5500000")[2], 0u);  // known at 6 s
}

// To the nanosecond: the first request's prefill ends at `known`; one that arrives before known + delay does
// not see it, one that arrives then does.
TEST(PrefixAware, TheEventIsPublishedAtTheEndOfItsStep) {
  const Sets two = {"pools.worker.replicas=2", "router.policy=prefix_aware",
                    "router.cache_event_delay_us=2000"};
  const Outcomes first = run_text(kColocated, same_prompt({0}), two);
  const Nanos published = first.run.requests[0].first_token;  // one chunk: it ends with the first token
  // At equal cost the turn decides, so give the second request a reason to leave worker 0 but for the hit:
  // it is still busy. 1024 of 1100 tokens hit outweigh a load of 1100 only if the weight is less than 1.
  Sets sets = two;
  sets.push_back("router.load_weight=0.5");
  for (const Nanos late : {Nanos{-1}, Nanos{0}}) {
    Trace trace = same_prompt({0, published + 2 * kMillisecond + late});
    trace.requests[0].output_tokens = 500;
    const Outcomes o = run_text(kColocated, trace, sets);
    EXPECT_EQ(o.run.requests[1].prefill_worker, late < 0 ? 1u : 0u) << late;
  }
}

// Evictions are events too, also those of decode steps that are simulated as a run. Worker 0 holds a prompt
// of 512 tokens that nobody uses and a decode that grows into it, a block every 16 steps, so the hit that it
// offers shrinks; at some point the other worker, which is less loaded, becomes the better choice. A probe at
// any time must find the same worker step by step.
TEST(PrefixAware, SeesEvictionsWithinARun) {
  const Sets sets = {"pools.worker.replicas=2", "router.policy=prefix_aware",
                     "pools.worker.engine.num_gpu_blocks_override=70"};
  Sets slow = sets;
  slow.push_back("pools.worker.engine.step_by_step=true");
  const auto world = [](Nanos probe) {
    std::vector<Request> requests = {request_at(0, 512, 2), request_at(1900 * kMillisecond, 256, 840),
                                     request_at(2 * kSecond, 512, 550), request_at(probe, 540, 2)};
    for (std::size_t i = 0; i < 4; ++i) {
      requests[i].hash_begin = i;
      requests[i].hash_count = i == 3 ? 2 : 1;
    }
    return made_trace(requests, 512, {1, 2, 3, 1, 4});
  };
  const RequestRecord decode = run_text(kColocated, world(1000 * kSecond), sets).run.requests[2];
  int choices[2] = {};
  for (int percent = 20; percent < 98; ++percent) {
    const Trace trace = world(decode.first_token + (decode.end - decode.first_token) * percent / 100);
    const Outcomes fast = run_text(kColocated, trace, sets);
    EXPECT_EQ(fast.run.requests[0].prefill_worker, 0u);
    EXPECT_EQ(fast.run.requests[1].prefill_worker, 1u);
    EXPECT_EQ(fast.run.requests[2].prefill_worker, 0u);
    EXPECT_EQ(first_difference(fast.csv, run_text(kColocated, trace, slow).csv), "") << percent;
    ++choices[fast.run.requests[3].prefill_worker];
  }
  EXPECT_GT(choices[0], 10);
  EXPECT_GT(choices[1], 10);
}

// Every turn of a session goes where its first went, on both sides.
TEST(SessionAffinity, HoldsThroughARun) {
  const Trace trace = small_trace(80, 10, kMillisecond);
  const Outcomes o = run_text(kDisaggregated, trace, {"router.policy=session_affinity"});
  expect_conserved(o, trace);
  std::map<std::int32_t, std::pair<std::uint32_t, std::uint32_t>> home;
  std::size_t later_turns = 0;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const RequestRecord& r = o.run.requests[i];
    const auto [at, fresh] =
        home.emplace(trace.requests[i].session, std::pair(r.prefill_worker, r.decode_worker));
    EXPECT_EQ(at->second, std::pair(r.prefill_worker, r.decode_worker));
    later_turns += fresh ? 0 : 1;
  }
  EXPECT_GT(later_turns, 20u);
}

// What the router counts as sent comes back to zero: after a long pause every worker looks idle again, so
// that least_loaded starts in turn, whatever went before (completions, rejections, failures).
TEST(LeastLoaded, LoadReturnsToZero) {
  for (const std::string& scenario : {kColocated, kDisaggregated}) {
    Trace trace = small_trace(60, 30, kMillisecond);
    trace.requests[7].output_tokens = 0;
    trace.requests[9].prompt_tokens = 40'000;
    trace.requests[9].hash_count = 0;
    const Nanos last = trace.requests.back().arrival + 1000 * kSecond;
    for (int i = 0; i < 6; ++i) trace.requests.push_back(request_at(last + i * 100 * kSecond, 100, 2));
    Sets sets = {"router.policy=least_loaded"};
    if (scenario == kDisaggregated) sets.push_back("transfer.kv_lease_duration_s=0.01");
    const Outcomes o = run_text(scenario, trace, sets);
    expect_conserved(o, trace);
    const std::size_t n = trace.requests.size();
    const std::size_t workers = scenario == kColocated ? 3 : 2;
    for (std::size_t i = n - 6; i + workers < n; ++i) {  // turns repeat with the number of workers
      EXPECT_EQ(o.run.requests[i].prefill_worker, o.run.requests[i + workers].prefill_worker) << scenario;
      EXPECT_NE(o.run.requests[i].prefill_worker, o.run.requests[i + 1].prefill_worker) << scenario;
      EXPECT_NE(o.run.requests[i].decode_worker, o.run.requests[i + 1].decode_worker) << scenario;
    }
  }
}

}  // namespace
}  // namespace pdsim
