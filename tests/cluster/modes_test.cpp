// What may not depend on how a run is made: a repeat, step by step or not, the order of ties; and what is
// conserved in every one of them, on shipped scenarios and on random ones.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "sim/core/random.hpp"
#include "tests/cluster/run.hpp"
#include "traces/reader.hpp"

namespace pdsim {
namespace {

// Three traces: conversations on a coarse grid, so that most arrivals are tied; a dense one that small pools
// cannot hold; a sparse one with long outputs, where runs are long.
Trace tied() {
  return small_trace(150, 20, 3 * kSecond, 2);
}
Trace dense() {
  return small_trace(120, 120, kMillisecond, 3);
}
Trace sparse() {
  Trace trace = small_trace(60, 3, kMillisecond, 4);
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    trace.requests[i].output_tokens = static_cast<std::int32_t>(i % 9 * 90);
  }
  return trace;
}

/// Blocks for about three of the prompts at a time: preemptions on colocated and decode workers.
const Sets kSmallDisaggregated = {"pools.prefill.engine.num_gpu_blocks_override=700",
                                  "pools.decode.engine.num_gpu_blocks_override=450",
                                  "pools.decode.engine.max_num_seqs=24"};
const Sets kSmallColocated = {"pools.worker.engine.num_gpu_blocks_override=450",
                              "pools.worker.engine.max_num_batched_tokens=2048"};

Sets engine(const std::string& scenario, const std::string& knob, const std::string& value) {
  if (scenario == kColocated) return {"pools.worker.engine." + knob + "=" + value};
  return {"pools.prefill.engine." + knob + "=" + value, "pools.decode.engine." + knob + "=" + value};
}

TEST(Modes, RepeatsAreByteIdentical) {
  for (const std::string& scenario : {kDisaggregated, kColocated}) {
    const Trace trace = tied();
    const Outcomes first = run_text(scenario, trace), second = run_text(scenario, trace);
    EXPECT_EQ(first_difference(first.text(), second.text()), "");
    expect_conserved(first, trace);
  }
}

// Another seed moves what is random (the policy's draws) and nothing of the arrivals.
TEST(Modes, SeedMovesOnlyWhatIsRandom) {
  const Trace trace = tied();
  const Sets policy = {"router.policy=power_of_two"};
  const Outcomes one = run_text(kDisaggregated, trace, policy);
  const Outcomes two = run_text(kDisaggregated, trace, with(policy, {"seed=2"}));
  EXPECT_NE(one.csv, two.csv);
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    EXPECT_EQ(one.run.requests[i].arrival, two.run.requests[i].arrival);
  }
  const Sets none = {"router.policy=round_robin"};
  EXPECT_EQ(run_text(kDisaggregated, trace, none).csv,
            run_text(kDisaggregated, trace, with(none, {"seed=2"})).csv);
}

struct Mode {
  std::string policy;
  bool colocated;
  std::string async;
};

void PrintTo(const Mode& mode, std::ostream* out) {
  *out << mode.policy;
}

class StepByStep : public testing::TestWithParam<Mode> {};

TEST_P(StepByStep, IsByteIdentical) {
  const Mode& mode = GetParam();
  const std::string& scenario = mode.colocated ? kColocated : kDisaggregated;
  std::int64_t preemptions = 0, transfers = 0;
  std::uint64_t fast_pops = 0, slow_pops = 0;
  for (const Trace& trace : {tied(), dense(), sparse()}) {
    Sets sets =
        with(mode.colocated ? kSmallColocated : kSmallDisaggregated, {"router.policy=" + mode.policy});
    sets = with(sets, engine(scenario, "async_scheduling", mode.async));
    const Outcomes fast = run_text(scenario, trace, sets);
    const Outcomes slow = run_text(scenario, trace, with(sets, engine(scenario, "step_by_step", "true")));
    ASSERT_EQ(first_difference(fast.text(), slow.text()), "");
    expect_conserved(fast, trace);
    preemptions += fast.summary["cache"]["preemptions"].get<std::int64_t>();
    transfers += fast.run.transfers.count;
    fast_pops += fast.run.queue_pops;
    slow_pops += slow.run.queue_pops;
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(transfers, mode.colocated ? -1 : 200);
  EXPECT_LT(fast_pops, slow_pops);
}

std::vector<Mode> all_modes() {
  std::vector<Mode> modes;
  for (const Named& policy : kRouterPolicies) {
    for (const bool colocated : {false, true}) {
      for (const char* async : {"true", "false"})
        modes.push_back({std::string(policy.name), colocated, async});
    }
  }
  return modes;
}

INSTANTIATE_TEST_SUITE_P(All, StepByStep, testing::ValuesIn(all_modes()), [](const auto& info) {
  return info.param.policy + (info.param.colocated ? "_colocated" : "_disaggregated") +
         (info.param.async == "true" ? "_async" : "_sync");
});

// ------------------------------------------------------------------------- every way to hand KV over

struct Way {
  std::string mode;
  std::string retention;  ///< empty = not bidirectional
  std::string async;

  Sets sets() const {
    // Pools of three prompts, times of seconds: leases and pins run out, requests wait for blocks. Clients
    // give up, as a push whose prefill has dropped it would wait for ever.
    Sets sets = {"transfer.mode=" + mode,
                 "workload.client_timeout_s=12",
                 "transfer.kv_load_failure_policy=recompute",
                 "transfer.kv_lease_duration_s=6",
                 "transfer.initial_fragmentation=0.3",
                 "transfer.prep_us_per_descriptor=0.2",
                 "pools.prefill.engine.max_num_batched_tokens=1024",
                 "pools.prefill.engine.async_scheduling=" + async,
                 "pools.decode.engine.async_scheduling=" + async};
    if (mode == "pull") sets.push_back("transfer.background_receiver=" + async);
    if (retention.empty()) return sets;
    sets = with(sets, {"transfer.bidirectional=true", "transfer.hypothetical=true",
                       "transfer.decoder_kv_blocks_ttl_s=4", "transfer.push_registration_timeout_s=480",
                       "transfer.expiry_margin_s=0.5", "router.session_kv_ttl_s=3.5",
                       "router.reroute_fraction=0.5", "transfer.retention.policy=" + retention,
                       "transfer.reuse_policy=" + std::string(async == "true" ? "threshold" : "cost")});
    if (retention != "ttl") sets.push_back("transfer.retention.budget_gib=0.5");
    if (retention == "priority") {
      sets.push_back(R"(transfer.retention.ranges=[{"to_token":512,"priority":80,"duration_s":10}])");
    }
    return sets;
  }
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << way.mode;
}

// Conversations that come back after a second or two, on pools that hold little.
Trace talkative(std::uint64_t seed, std::int32_t requests = 90, double rate = 12) {
  GenerateConfig config;
  config.requests = requests;
  config.rate = rate;
  config.stamp_grid = kMillisecond;
  config.system_prompts = 4;
  config.system_prompt = {600, 0.5, 1, 2000};
  config.first_message = {700, 0.8, 1, 3000};
  config.message = {200, 0.8, 1, 1000};
  config.output = {30, 0.9, 1, 200};
  config.max_prompt_tokens = 6000;
  config.multi_turn_share = 0.9;
  config.think_time_s = 1;
  config.first_token_ms = 200;
  config.output_token_ms = 10;
  config.seed = seed;
  return generate_trace(config);
}

class EveryWay : public testing::TestWithParam<Way> {};

TEST_P(EveryWay, IsTheSameStepByStepAndConserved) {
  const Way& way = GetParam();
  std::int64_t transfers = 0, read_backs = 0, batches = 0, pins = 0, delayed = 0;
  for (const std::uint64_t seed : {1U, 2U}) {
    const Trace trace = talkative(seed);
    for (const Sets& pools : {Sets{}, kSmallDisaggregated}) {
      const Sets sets = with(way.sets(), pools);
      const Outcomes fast = run_text(kDisaggregated, trace, sets);
      const Outcomes slow =
          run_text(kDisaggregated, trace, with(sets, engine(kDisaggregated, "step_by_step", "true")));
      ASSERT_EQ(first_difference(fast.text(), slow.text()), "");
      ASSERT_NO_FATAL_FAILURE(expect_conserved(fast, trace));
      transfers += fast.run.transfers.count;
      read_backs += fast.run.transfers.read_backs;
      batches += fast.run.transfers.batches;
      pins += fast.run.retention.pins;
      delayed += fast.run.retention.admissions_delayed;
      if (pools.empty() && way.retention.empty()) {
        EXPECT_EQ(count(fast.run, RequestStatus::completed), trace.requests.size());
      }
    }
  }
  EXPECT_GT(transfers, 150);
  EXPECT_EQ(read_backs > 10, !way.retention.empty()) << read_backs;
  EXPECT_EQ(pins > 150, !way.retention.empty()) << pins;
  if (way.retention == "ttl" || way.retention == "lru") {
    EXPECT_GT(delayed, 0);
  } else {
    EXPECT_LE(delayed, 2) << "by priority they give way: only those that are being read cannot";
  }
  const bool in_pieces = way.mode == "push_layerwise" || way.mode == "push_progressive";
  EXPECT_EQ(batches > transfers + read_backs, in_pieces) << batches;
}

std::vector<Way> all_ways() {
  std::vector<Way> ways;
  for (const Named& mode : kTransferModes) {
    for (const char* async : {"true", "false"}) {
      ways.push_back({std::string(mode.name), "", async});
      for (const Named& retention : kRetentions) {
        ways.push_back({std::string(mode.name), std::string(retention.name), async});
      }
    }
  }
  return ways;
}

INSTANTIATE_TEST_SUITE_P(All, EveryWay, testing::ValuesIn(all_ways()), [](const auto& info) {
  return info.param.mode + (info.param.retention.empty() ? "" : "_" + info.param.retention) +
         (info.param.async == "true" ? "_async" : "_sync");
});

// Permuted ties: other runs, nothing lost.
TEST(Modes, EveryWayKeepsItsInvariantsWithPermutedTies) {
  Trace trace = talkative(4);
  for (Request& r : trace.requests) r.arrival = r.arrival / kSecond * kSecond;
  std::set<std::string> outcomes;
  std::size_t runs = 0;
  for (const Way& way : all_ways()) {
    if (way.async == "false") continue;
    SCOPED_TRACE(way.mode + " " + way.retention);
    for (const char* permutation : {"0", "3", "99"}) {
      const Outcomes o = run_text(
          kDisaggregated, trace,
          with(way.sets(), {"router.policy=least_loaded", std::string("permute_ties=") + permutation}));
      expect_conserved(o, trace);
      if (way.retention.empty()) {
        EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
      }
      outcomes.insert(o.csv);
      ++runs;
    }
  }
  EXPECT_GT(outcomes.size(), runs * 2 / 3) << "the permutation did nothing";
}

// Ties are routine (all of three seconds arrive at once), and who goes first is chance. With entities
// permuted within (time, phase, kind) metrics may move; what completes and what is conserved may not.
TEST(Modes, PermutedTies) {
  for (const std::string& scenario : {kDisaggregated, kColocated}) {
    const Trace trace = tied();
    std::set<std::string> outcomes;
    for (const char* permutation : {"0", "1", "2", "77", "123456789"}) {
      SCOPED_TRACE(permutation);
      const Outcomes o =
          run_text(scenario, trace,
                   with(scenario == kColocated ? kSmallColocated : kSmallDisaggregated,
                        {"router.policy=least_loaded", std::string("permute_ties=") + permutation}));
      expect_conserved(o, trace);
      EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
      outcomes.insert(o.csv);
    }
    EXPECT_GT(outcomes.size(), 1u) << "the permutation did nothing";
  }
}

// Every scenario that is shipped, on a trace scaled down to seconds.
TEST(Modes, ConservationOnEveryShippedScenario) {
  int scenarios = 0;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(PDSIM_SOURCE_DIR "/scenarios")) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".json") && !name.ends_with("schema.json")) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& path : files) {
    SCOPED_TRACE(path.filename().string());
    GenerateConfig config;
    config.requests = 200;
    config.rate = 6;
    config.stamp_grid = 3 * kSecond;
    config.max_prompt_tokens = 30'000;
    config.first_message.max = 25'000;
    const Trace trace = generate_trace(config);
    const Outcomes o = run_loaded(load_scenario(path.string()), trace);
    expect_conserved(o, trace);
    EXPECT_EQ(count(o.run, RequestStatus::completed), trace.requests.size());
    ++scenarios;
  }
  EXPECT_GE(scenarios, 7);
}

// The real conversation trace, where it is at hand: all 12,031 requests complete on both mooncake scenarios;
// its first two thousand are the same step by step.
TEST(Modes, TheConversationTrace) {
  const std::string path = PDSIM_SOURCE_DIR "/../shared/traces/conversation_trace.jsonl";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no " << path;
  const Trace trace = read_trace(path, "mooncake");
  ASSERT_EQ(trace.requests.size(), 12'031u);
  Trace head = trace;
  head.requests.resize(2000);
  for (const char* name : {"mooncake-8p8d-h200", "mooncake-8x-colocated-h100"}) {
    SCOPED_TRACE(name);
    const std::string file = std::string(PDSIM_SOURCE_DIR "/scenarios/") + name + ".json";
    const Outcomes o = run_loaded(load_scenario(file), trace);
    expect_conserved(o, trace);
    EXPECT_EQ(count(o.run, RequestStatus::completed), 12'031u);
    Sets slow;
    for (const PoolConfig& pool : o.loaded.scenario.pools) {
      slow.push_back("pools." + pool.name + ".engine.step_by_step=true");
    }
    EXPECT_EQ(first_difference(run_loaded(load_scenario(file), head).text(),
                               run_loaded(load_scenario(file, slow), head).text()),
              "");
  }
}

// In request 3597 decode holds all but the last token and answers one: it is done before the prompt, long to
// dispatch, reaches prefill, which nobody tells of it and which computes it all the same.
TEST(Modes, PrefillThatDecodeHasOutrunComputesAllTheSame) {
  const std::string path = PDSIM_SOURCE_DIR "/../shared/traces/conversation_trace.jsonl";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no " << path;
  Trace trace = read_trace(path, "mooncake");
  trace.requests.resize(4000);
  const std::string file = std::string(PDSIM_SOURCE_DIR "/scenarios/mooncake-8p8d-h200.json");
  for (const char* mode : {"push", "push_layerwise", "push_progressive"}) {
    SCOPED_TRACE(mode);
    const Sets sets = {std::string("transfer.mode=").append(mode)};
    const Outcomes o = run_loaded(load_scenario(file, sets), trace);
    expect_conserved(o, trace);
    EXPECT_EQ(count(o.run, RequestStatus::completed), 4000u);
  }
}

// Random clusters under pressure: pools of a few prompts, tiny batches, leases that run out, heads that are
// split, pools on one node. Whatever comes of the requests, everything is conserved, and runs are as step
// by step.
TEST(Modes, RandomClusters) {
  std::int64_t preemptions = 0, failed = 0, transfers = 0, expired = 0, full_hits = 0, cancelled = 0,
               hits = 0;
  std::int64_t stale = 0, let_go = 0, dropped = 0;
  for (std::uint64_t seed = 1; seed <= 250; ++seed) {
    Random r(seed, Purpose::fragmentation);
    const auto pick = [&](std::initializer_list<const char*> values) {
      return std::string(*(values.begin() + r.below(values.size())));
    };
    const bool colocated = r.below(4) == 0;
    const std::string& scenario = colocated ? kColocated : kDisaggregated;
    Sets sets = {"router.policy=" + pick({"round_robin", "random", "least_loaded", "power_of_two",
                                          "prefix_aware", "session_affinity"}),
                 "seed=" + std::to_string(seed), "permute_ties=" + pick({"0", "0", "5"}),
                 "router.hop_ms=" + pick({"0.001", "1", "5"}),
                 "router.local_prefill_threshold=" + pick({"0", "0", "200", "800"})};
    sets = with(sets, engine(scenario, "async_scheduling", pick({"true", "true", "false"})));
    const std::string block = pick({"1", "16", "16", "64", "128"});
    const int blocks = (3000 + static_cast<int>(r.below(9'000))) / std::stoi(block);
    sets = with(sets, engine(scenario, "block_size", block));
    sets = with(sets, engine(scenario, "num_gpu_blocks_override", std::to_string(blocks)));
    sets = with(sets, engine(scenario, "enable_prefix_caching", pick({"true", "true", "false"})));
    sets = with(sets, engine(scenario, "max_num_seqs", pick({"1", "2", "16", "256"})));
    sets = with(sets, engine(scenario, "max_num_batched_tokens", pick({"256", "1024", "8192"})));
    if (!colocated) {
      const std::string prefill_tp = pick({"1", "1", "2", "4"}), decode_tp = pick({"1", "1", "2", "4"});
      sets = with(
          sets,
          {"pools.prefill.tensor_parallel=" + prefill_tp, "pools.decode.tensor_parallel=" + decode_tp,
           "pools.prefill.replicas=" + pick({"1", "2"}), "pools.decode.replicas=" + pick({"1", "2", "3"}),
           "transfer.kv_lease_duration_s=" + pick({"30", "30", "0.2", "0.01", "0.0005"}),
           "transfer.kv_load_failure_policy=" + pick({"fail", "recompute"}),
           "transfer.pd_recompute_threshold=" + pick({"0", "0", "300"}),
           "transfer.full_hit_tokens=" + pick({"0", "16", "500"}),
           "transfer.handshake_ms=" + pick({"0.5", "50"}),
           "transfer.prep_us_per_descriptor=" + pick({"0", "0.225"}),
           "transfer.warm_start=" + pick({"true", "false"})});
      const std::string mode = pick({"pull", "pull", "push", "push_layerwise", "push_progressive"});
      sets =
          with(sets,
               {"transfer.mode=" + mode, "router.sequential_dispatch=" + pick({"false", "false", "true"}),
                "transfer.initial_fragmentation=" + pick({"0", "0.3", "1"}),
                "transfer.lease_reaper=" + pick({"in_order", "all"}),
                "transfer.stale_guard=" + pick({"true", "true", "false"}),
                "transfer.push_poll_ms=" + pick({"1", "0.1", "20"}),
                "network.fabric=" + pick({"efa", "efa", "tcp"}), "transfer.hypothetical=true",
                "transfer.kv_recompute_threshold=" + pick({"0", "64", "500"}),
                "transfer.reuse_policy=" + pick({"threshold", "cost"}),
                "transfer.decoder_kv_blocks_ttl_s=" + pick({"480", "3", "0.1"}),
                "transfer.expiry_margin_s=" + pick({"5", "0.05", "0"}),
                "transfer.clock_error_s=" + pick({"0", "0", "1"}),
                "router.reroute_fraction=" + pick({"0", "0.5", "1"}),
                "router.session_kv_ttl_s=" + pick({"450", "1"}),
                // A push that was dropped waits for its client.
                "workload.client_timeout_s=" + (mode == "pull" ? pick({"0", "0", "3"}) : pick({"20", "3"}))});
      if (mode == "pull") sets.push_back("transfer.background_receiver=" + pick({"false", "false", "true"}));
      if (r.below(2) == 0) {
        const std::string policy = pick({"ttl", "lru", "priority", "belady"});
        sets = with(sets, {"transfer.bidirectional=true", "transfer.retention.policy=" + policy});
        if (policy == "lru") sets.push_back("transfer.retention.budget_gib=" + pick({"0.05", "0.5"}));
        if (policy == "priority" || policy == "belady") {
          sets.push_back("transfer.retention.budget_gib=" + pick({"0", "0.05", "0.5"}));
        }
        if (policy == "priority") {
          sets.push_back(
              "transfer.retention.ranges=" +
              pick(
                  {"[]", R"([{"to_token":700,"priority":80,"duration_s":2}])",
                   R"([{"to_token":300,"priority":90},{"from_token":1000,"priority":1,"duration_s":0.05}])"}));
        }
      }
    }
    SCOPED_TRACE(
        "seed " + std::to_string(seed) + ": " +
        std::accumulate(sets.begin(), sets.end(), std::string(),
                        [](const std::string& a, const std::string& b) { return a + " --set " + b; }));
    Trace trace = r.below(2) == 0 ? small_trace(40, r.below(2) == 0 ? 60 : 8,
                                                r.below(2) == 0 ? kSecond : kMillisecond, seed)
                                  : talkative(seed, 60, 6);
    const std::int32_t longer = r.below(2) == 0 ? 1 : 6;
    for (Request& request : trace.requests) {
      request.output_tokens *= longer;
      if (r.below(20) == 0) request.output_tokens = static_cast<std::int32_t>(r.below(2));
    }
    const Outcomes fast = run_text(scenario, trace, sets);
    const Outcomes slow = run_text(scenario, trace, with(sets, engine(scenario, "step_by_step", "true")));
    ASSERT_EQ(first_difference(fast.csv, slow.csv), "");
    ASSERT_EQ(first_difference(fast.text(), slow.text()), "");
    ASSERT_NO_FATAL_FAILURE(expect_conserved(fast, trace));
    preemptions += fast.summary["cache"]["preemptions"].get<std::int64_t>();
    failed += static_cast<std::int64_t>(count(fast.run, RequestStatus::failed));
    transfers += fast.run.transfers.count;
    expired += fast.run.transfers.leases_expired;
    cancelled += static_cast<std::int64_t>(count(fast.run, RequestStatus::cancelled));
    hits += fast.run.transfers.read_backs;
    stale += fast.run.transfers.stale_reads + fast.run.transfers.stale_reads_prevented;
    let_go += fast.run.retention.let_go;
    dropped += outcome(fast.run, TransferOutcome::dropped);
    for (const RequestRecord& q : fast.run.requests) {
      full_hits += q.decode_hit_tokens > 0 && q.transfer_bytes == 0 && q.prefill_worker != q.decode_worker;
    }
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(failed, 40);
  EXPECT_GT(transfers, 4000);
  EXPECT_GT(expired, 800);
  EXPECT_GT(full_hits, 100);
  EXPECT_GT(cancelled, 100);
  EXPECT_GT(hits, 40);
  EXPECT_GT(stale, 20);
  EXPECT_GT(let_go, 100);
  EXPECT_GT(dropped, 100);
}

}  // namespace
}  // namespace pdsim
