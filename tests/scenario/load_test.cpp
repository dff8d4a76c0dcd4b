// Theory: a scenario means the same however it is spelt; what is not given has a default that says where
// it comes from; and what is in force is itself a scenario that loads to the same.
#include "sim/scenario/load.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "models/dtype.hpp"
#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

constexpr const char* kPair = R"(
// A pair of pools.
{
  "model": "m",   /* any */
  "pools": [
    {"name": "p", "role": "prefill", "instance": "p5en.48xlarge"},
    {"name": "d", "role": "decode", "instance": "p5.48xlarge", "replicas": 2}
  ],
  "workload": {"trace": "t.jsonl", "format": "mooncake"}
})";

LoadedScenario load(const std::vector<std::string>& sets = {}, const Overrides& overrides = {}) {
  return parse_scenario(kPair, "dir/pair.jsonc", "dir", sets, overrides);
}

LoadedScenario with_transfer(const std::string& transfer) {
  return load({"transfer=" + transfer});
}

std::string origin(const LoadedScenario& loaded, std::string_view pointer) {
  for (const auto& [at, from] : loaded.origins) {
    if (at == pointer) return from;
  }
  return "nowhere";
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> shipped() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(PDSIM_SOURCE_DIR "/scenarios")) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".json") && !name.ends_with("schema.json")) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST(Sha256, KnownAnswers) {  // FIPS 180-4's examples
  EXPECT_EQ(sha256_hex(std::string_view("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 pieces;
  pieces.update(std::string_view("a"));
  pieces.update(std::string_view("bc"));
  EXPECT_EQ(pieces.hex(), sha256_hex(std::string_view("abc")));
  EXPECT_EQ(pieces.hex(), sha256_hex({}));  // starts afresh
}

TEST(Scenario, ReadsCommentsAndNamesItselfAfterItsFile) {
  const LoadedScenario loaded = load();
  EXPECT_EQ(loaded.scenario.name, "pair");
  EXPECT_EQ(loaded.sha256, sha256_hex(std::string_view(kPair)));
  ASSERT_EQ(loaded.scenario.pools.size(), 2u);
  EXPECT_EQ(loaded.scenario.pools[0].role, Role::prefill);
  EXPECT_EQ(loaded.scenario.pools[1].replicas, 2);
  EXPECT_EQ(parse_scenario("\xEF\xBB\xBF" + std::string(kPair), "pair.json").scenario.name, "pair");
}

TEST(Scenario, DefaultsAreThoseWrittenDown) {
  const Scenario s = load().scenario;
  const EngineConfig& e = s.pools[0].engine;
  EXPECT_EQ(e.block_size, 16);
  EXPECT_EQ(e.gpu_memory_utilization, 0.92);
  EXPECT_TRUE(e.enable_prefix_caching && e.enable_chunked_prefill && e.async_scheduling && !e.step_by_step);
  EXPECT_EQ(e.idle_step, 500 * kMicrosecond);
  EXPECT_EQ(s.router.hop, kMillisecond);
  EXPECT_EQ(s.router.cache_event_delay, kMillisecond);
  EXPECT_EQ(s.transfer.mode, TransferMode::pull);
  EXPECT_EQ(s.transfer.kv_lease_duration, 30 * kSecond);
  EXPECT_EQ(s.transfer.decoder_kv_blocks_ttl, 480 * kSecond);
  EXPECT_EQ(s.transfer.push_registration_timeout, 480 * kSecond);
  EXPECT_EQ(s.transfer.engine_ttl, 3600 * kSecond);
  EXPECT_EQ(s.transfer.post_fixed, 71'000);
  EXPECT_EQ(s.transfer.post_per_descriptor, 2'430);
  EXPECT_EQ(s.transfer.notification, 17'300);
  EXPECT_EQ(s.transfer.handshake, kMillisecond);
  EXPECT_EQ(s.transfer.prep_per_descriptor, 225);
  EXPECT_EQ(s.transfer.handshake_timeout, 5 * kSecond);
  EXPECT_EQ(s.transfer.heartbeat_interval, 5 * kSecond);
  EXPECT_EQ(s.transfer.heartbeat_extension, 20 * kSecond);
  EXPECT_EQ(s.transfer.expiry_margin, 5 * kSecond);
  EXPECT_EQ(s.transfer.push_poll, kMillisecond);
  EXPECT_EQ(s.transfer.slow_submit, 200 * kMillisecond);
  EXPECT_EQ(s.transfer.thread_contention, 1.0);
  EXPECT_EQ(s.transfer.kv_recompute_threshold, 64);
  EXPECT_EQ(s.transfer.pd_recompute_threshold, 0);
  EXPECT_EQ(s.transfer.lease_reaper, LeaseReaper::in_order);
  EXPECT_EQ(s.transfer.reuse_policy, ReusePolicy::threshold);
  EXPECT_EQ(s.transfer.retention.policy, Retention::ttl);
  EXPECT_TRUE(s.transfer.stale_guard && s.transfer.wait_for_siblings);
  EXPECT_FALSE(s.transfer.bidirectional || s.transfer.hypothetical || s.transfer.warm_start ||
               s.transfer.push_fail || s.transfer.background_receiver);
  EXPECT_EQ(s.router.session_kv_ttl, 450 * kSecond);
  EXPECT_FALSE(s.router.sequential_dispatch || s.workload.infer_sessions);
  EXPECT_EQ(s.transfer.full_hit_tokens, 16);
  EXPECT_EQ(s.transfer.kv_load_failure_policy, "fail");
  EXPECT_EQ(s.weights_dtype, "");
  EXPECT_EQ(s.placement, PlacementPolicy::spread);
  EXPECT_TRUE(s.slo.empty() && s.faults.empty() && s.transfer_pairs.empty());
  EXPECT_EQ(s.seed, 1u);
}

// 460 us at 160 descriptors and 46 ms at 18,880, as published: the line's two points.
TEST(Scenario, PostingCostsReproduceTheirSource) {
  const TransferBackend& libfabric = kTransferBackends[0];
  EXPECT_NEAR(static_cast<double>(libfabric.post_fixed + 160 * libfabric.post_per_descriptor), 460e3, 1e3);
  EXPECT_NEAR(static_cast<double>(libfabric.post_fixed + 18'880 * libfabric.post_per_descriptor), 46e6,
              0.1e6);
}

TEST(Scenario, DerivedDefaultsFollowWhatTheyDependOn) {
  const Scenario blocks = load({"pools.p.engine.block_size=64", "pools.d.engine.block_size=64"}).scenario;
  EXPECT_EQ(blocks.transfer.full_hit_tokens, 64);
  const Scenario ttl = with_transfer(R"({"decoder_kv_blocks_ttl_s": 60})").scenario;
  EXPECT_EQ(ttl.transfer.push_registration_timeout, 60 * kSecond);
  const Scenario ucx = with_transfer(R"({"backend": "ucx", "post_fixed_us": 5})").scenario;
  EXPECT_EQ(ucx.transfer.post_fixed, 5'000);
  EXPECT_EQ(ucx.transfer.post_per_descriptor, 3'750);
  // vLLM: a heartbeat every sixth of the lease, each good for two thirds of it.
  const TransferConfig lease = with_transfer(R"({"kv_lease_duration": 12})").scenario.transfer;
  EXPECT_EQ(lease.heartbeat_interval, 2 * kSecond);
  EXPECT_EQ(lease.heartbeat_extension, 8 * kSecond);
  const TransferConfig own =
      with_transfer(R"({"kv_lease_duration_s": 12, "heartbeat_interval_s": 3})").scenario.transfer;
  EXPECT_EQ(own.heartbeat_interval, 3 * kSecond);
  EXPECT_EQ(own.heartbeat_extension, 8 * kSecond);
  // 11.9 for 6.7 ms.
  const TransferConfig reader = with_transfer(R"({"background_receiver": true})").scenario.transfer;
  EXPECT_NEAR(reader.thread_contention, 11.9 / 6.7, 0.03);
  EXPECT_EQ(with_transfer(R"({"background_receiver": true, "thread_contention": 1.2})")
                .scenario.transfer.thread_contention,
            1.2);
}

TEST(Scenario, Retention) {
  const RetentionConfig r = with_transfer(R"({"bidirectional": true, "retention": {"policy": "priority",
      "budget_gib": 1.5, "ranges": [{"to_token": 512, "priority": 90}, {"from_token": 512, "duration_s": 60}]}})")
                                .scenario.transfer.retention;
  EXPECT_EQ(r.policy, Retention::priority);
  EXPECT_EQ(r.budget_gib, 1.5);
  ASSERT_EQ(r.ranges.size(), 2u);
  EXPECT_EQ(r.ranges[0].from_token, 0);
  EXPECT_EQ(r.ranges[0].to_token, 512);
  EXPECT_EQ(r.ranges[0].priority, 90);
  EXPECT_EQ(r.ranges[0].duration, 0);
  EXPECT_EQ(r.ranges[1].priority, 35);  // TensorRT-LLM's default
  EXPECT_EQ(r.ranges[1].duration, 60 * kSecond);
}

TEST(Scenario, DurationsAreTheNearestNanosecond) {
  EXPECT_EQ(load({"router.hop_ms=0.07"}).scenario.router.hop, 70'000);
  EXPECT_EQ(load({"router.hop_ms=1.1"}).scenario.router.hop, 1'100'000);
  EXPECT_EQ(load({"transfer.notification_us=0.001"}).scenario.transfer.notification, 1);
  EXPECT_EQ(load({"workload.warmup_s=1e6"}).scenario.workload.warmup, 1'000'000 * kSecond);
}

TEST(Scenario, TakesVllmsOwnSpelling) {
  const std::string keys =
      R"("kv_lease_duration": 12, "decoder_kv_blocks_ttl": 100, "bidirectional_kv_xfer": true,
      "kv_recompute_threshold": 7, "push_registration_timeout": 90, "engine_ttl": 50, "num_threads": 2,
      "backends": ["UCX"], "enforce_handshake_compat": false, "enable_cross_layers_blocks": "True")";
  for (const std::string& transfer : {"{" + keys + "}", R"({"kv_connector_extra_config": {)" + keys + "}}"}) {
    const LoadedScenario loaded = with_transfer(transfer);
    const TransferConfig& t = loaded.scenario.transfer;
    EXPECT_EQ(t.kv_lease_duration, 12 * kSecond);
    EXPECT_EQ(t.decoder_kv_blocks_ttl, 100 * kSecond);
    EXPECT_TRUE(t.bidirectional);
    EXPECT_EQ(t.kv_recompute_threshold, 7);
    EXPECT_EQ(t.push_registration_timeout, 90 * kSecond);
    EXPECT_EQ(t.engine_ttl, 50 * kSecond);
    EXPECT_EQ(t.num_threads, 2);
    EXPECT_EQ(t.backend, "ucx");
    EXPECT_FALSE(t.enforce_handshake_compat);
    EXPECT_TRUE(t.enable_cross_layers_blocks);
    // In force in our spelling, once.
    const auto in_force = ordered_json::parse(loaded.in_force)["transfer"];
    EXPECT_EQ(in_force["kv_lease_duration_s"], 12);
    EXPECT_FALSE(in_force.contains("kv_lease_duration") || in_force.contains("kv_connector_extra_config"));
  }
  // Both spellings of one value agree; an option wins over the file.
  EXPECT_NO_THROW(
      with_transfer(R"({"backend": "ucx", "backends": ["UCX"], "engine_ttl": 9, "engine_ttl_s": 9.0})"));
  const LoadedScenario won = load({R"(transfer={"mode": "push", "kv_lease_duration": 12})"});
  EXPECT_EQ(won.scenario.transfer.kv_lease_duration, 12 * kSecond);
  const std::string file = R"({"model": "m", "pools": [{"role": "colocated", "gpu": "h200"}],
      "transfer": {"kv_connector_extra_config": {"kv_lease_duration": 20}},
      "workload": {"trace": "t", "format": "azure"}})";
  const std::vector<std::string> sets{"transfer.kv_lease_duration_s=60"};
  EXPECT_EQ(parse_scenario(file, "f", "", sets).scenario.transfer.kv_lease_duration, 60 * kSecond);
  EXPECT_TRUE(with_transfer(
                  R"({"mode": "push_progressive", "kv_connector_extra_config": {"progressive_push": true}})")
                  .scenario.transfer.mode == TransferMode::push_progressive);
}

TEST(Scenario, APairInheritsWhatItDoesNotSay) {
  const LoadedScenario loaded =
      with_transfer(R"({"kv_lease_duration_s": 12, "post_fixed_us": 9, "heartbeat_interval_s": 3,
      "background_receiver": true, "thread_contention": 1.5, "pairs": [
      {"from": "p", "to": "d", "kv_recompute_threshold": 128}]})");
  ASSERT_EQ(loaded.scenario.transfer_pairs.size(), 1u);
  const TransferPair& pair = loaded.scenario.transfer_pairs[0];
  EXPECT_EQ(loaded.scenario.transfer.kv_recompute_threshold, 64);
  EXPECT_EQ(pair.transfer.kv_recompute_threshold, 128);
  EXPECT_EQ(pair.transfer.kv_lease_duration, 12 * kSecond);
  EXPECT_EQ(pair.transfer.post_fixed, 9'000);
  EXPECT_EQ(origin(loaded, "/transfer/pairs/0/kv_lease_duration_s"), "as /transfer");
  EXPECT_EQ(pair.transfer.heartbeat_interval, 3 * kSecond);
  EXPECT_EQ(pair.transfer.thread_contention, 1.5);
  EXPECT_EQ(origin(loaded, "/transfer/pairs/0/kv_recompute_threshold"), "--set");
  const TransferPair ucx =
      with_transfer(R"({"post_fixed_us": 9, "pairs": [{"from": "p", "to": "d", "backend": "ucx"}]})")
          .scenario.transfer_pairs[0];
  EXPECT_EQ(ucx.transfer.post_fixed, 0);
  // What depends on a value that the pair does say follows that.
  const TransferConfig lease =
      with_transfer(
          R"({"heartbeat_interval_s": 3, "pairs": [{"from": "p", "to": "d", "kv_lease_duration": 60}]})")
          .scenario.transfer_pairs[0]
          .transfer;
  EXPECT_EQ(lease.heartbeat_interval, 10 * kSecond);
  EXPECT_EQ(lease.heartbeat_extension, 40 * kSecond);
}

TEST(Scenario, SetTakesPoolsByNameAndIndex) {
  const Scenario s = load({"pools.d.engine.max_num_seqs=64", "pools.0.tensor_parallel=4",
                           "transfer.mode=push", "seed=7", "seed=8", "slo.ttft_ms=500", "name=other"})
                         .scenario;
  EXPECT_EQ(s.pools[1].engine.max_num_seqs, 64);
  EXPECT_EQ(s.pools[0].tensor_parallel, 4);
  EXPECT_EQ(s.transfer.mode, TransferMode::push);
  EXPECT_EQ(s.seed, 8u);
  EXPECT_EQ(s.slo.at("ttft_ms").at("p95"), 500.0);
  EXPECT_EQ(s.name, "other");
  // A pool without a name goes by its role.
  const std::vector<std::string> sets{"pools.colocated.replicas=3"};
  EXPECT_EQ(parse_scenario(R"({"model": "m", "pools": [{"role": "colocated", "gpu": "h200"}],
                               "workload": {"trace": "t", "format": "azure"}})",
                           "f", "", sets)
                .scenario.pools[0]
                .replicas,
            3);
}

TEST(Scenario, PathsAreRelativeToTheFileOrTheCurrentFolder) {
  EXPECT_EQ(load().scenario.workload.trace, "dir/t.jsonl");
  EXPECT_EQ(load({"workload.trace=t.jsonl"}).scenario.workload.trace, "t.jsonl");
  EXPECT_EQ(load({"workload.trace=-"}).scenario.workload.trace, "-");
  EXPECT_EQ(load({}, {.trace = "x/../u.csv", .format = "azure", .seed = 5}).scenario.workload.trace, "u.csv");
  const auto in_force = ordered_json::parse(load().in_force);
  EXPECT_EQ(in_force["workload"]["trace"], (std::filesystem::current_path() / "dir/t.jsonl").string());
  // Only a model that ends in .json is a path.
  EXPECT_EQ(load().scenario.model, "m");
  EXPECT_EQ(parse_scenario(R"({"model": "../config.json", "pools": [{"role": "colocated", "gpu": "h200"}],
                               "workload": {"trace": "/t", "format": "azure"}})",
                           "a/b/f.json", "a/b")
                .scenario.model,
            "a/config.json");
}

TEST(Scenario, ATraceFromTheCommandLineReplacesASyntheticWorkload) {
  const std::string text = R"({"model": "m", "pools": [{"role": "colocated", "gpu": "h200"}],
      "workload": {"synthetic": {"requests": 10, "rate": 2.5, "isl": 100, "osl": 20}}})";
  const LoadedScenario made = parse_scenario(text, "f");
  ASSERT_TRUE(made.scenario.workload.synthetic);
  EXPECT_EQ(made.scenario.workload.synthetic->rate, 2.5);
  const LoadedScenario replayed =
      parse_scenario(text, "f", "", {}, {.trace = "t", .format = "azure", .seed = {}});
  EXPECT_FALSE(replayed.scenario.workload.synthetic);
  EXPECT_EQ(replayed.scenario.workload.trace, "t");
  EXPECT_EQ(origin(replayed, "/workload/trace"), "--trace");
}

TEST(Scenario, OriginsSayWhereEachValueCameFrom) {
  const LoadedScenario loaded = load({"router.policy=random"}, {.trace = "", .format = "", .seed = 3});
  EXPECT_EQ(origin(loaded, "/model"), "scenario");
  EXPECT_EQ(origin(loaded, "/router/policy"), "--set");
  EXPECT_EQ(origin(loaded, "/seed"), "--seed");
  EXPECT_EQ(origin(loaded, "/pools/0/engine/block_size"), "default: vLLM 0.24");
  EXPECT_EQ(origin(loaded, "/name"), "default: the file's name");
  EXPECT_EQ(loaded.place("/router/policy"), "--set: /router/policy");
  EXPECT_EQ(loaded.place("/model"), "dir/pair.jsonc: /model");
  // Every leaf in force has one origin.
  std::vector<std::string> leaves;
  const auto flat = ordered_json::parse(loaded.in_force).flatten();
  for (const auto& [pointer, value] : flat.items()) leaves.push_back(pointer);
  std::vector<std::string> origins;
  for (const auto& [pointer, from] : loaded.origins) origins.push_back(pointer);
  EXPECT_EQ(origins, leaves);
}

TEST(Scenario, PricesSlosPlacementAndFaults) {
  const Scenario s =
      load({R"(pricing={"plan": {"usd_per_hour": {"p5en.48xlarge": 40, "p5.48xlarge": 30}}})",
            R"(slo={"ttft_ms": {"p50": 200, "p99": 900}, "tpot_ms": 50})",
            R"(placement=[{"pool": "p", "replica": 0, "node": 0, "gpus": [3]},
                                         {"pool": "d", "replica": 0, "node": 1, "gpus": [0], "nics": [2, 3]},
                                         {"pool": "d", "replica": 1, "node": 0, "gpus": [4]}])",
            R"(faults=[{"kind": "worker_crash", "target": "p-0", "at_s": 2.5, "duration_s": 60},
                                      {"kind": "message_lost", "target": "heartbeat", "rate_per_hour": 4}])",
            R"(network.failed_rails=[{"node": 1, "gpu": 2, "rail": 1}])"})
          .scenario;
  EXPECT_EQ(s.pricing.plan, "usd_per_hour");
  EXPECT_EQ(s.pricing.usd_per_hour.at("p5.48xlarge"), 30.0);
  EXPECT_EQ(s.slo.at("ttft_ms"), (std::map<std::string, double>{{"p50", 200.0}, {"p99", 900.0}}));
  EXPECT_EQ(s.slo.at("tpot_ms"), (std::map<std::string, double>{{"p95", 50.0}}));
  EXPECT_EQ(s.placement, PlacementPolicy::list);
  EXPECT_EQ(s.placement_list[1].nics, (std::vector<std::int32_t>{2, 3}));
  ASSERT_EQ(s.faults.size(), 2u);
  EXPECT_EQ(s.faults[0].at, 2'500 * kMillisecond);
  EXPECT_EQ(s.faults[0].duration, 60 * kSecond);
  EXPECT_EQ(s.faults[1].at, -1);
  EXPECT_EQ(s.faults[1].rate_per_hour, 4.0);
  EXPECT_EQ(s.faults[1].target, kMessages[static_cast<std::size_t>(Message::heartbeat)].name);
  EXPECT_EQ(s.network.failed_rails[0].rail, 1);
  // One price for all, over a plan.
  const Scenario all = load({"pricing.usd_per_hour=12"}).scenario;
  EXPECT_EQ(all.pricing.plan, "on_demand");
  EXPECT_EQ(all.pricing.usd_per_hour.size(), 2u);
  EXPECT_EQ(all.pricing.usd_per_hour.at("p5en.48xlarge"), 12.0);
}

TEST(Scenario, WhatIsInForceLoadsToTheSame) {
  std::vector<LoadedScenario> all;
  for (const std::string& path : shipped()) all.push_back(load_scenario(path));
  all.push_back(
      load({R"(transfer={"mode": "push", "backends": ["UCX"], "hypothetical": true, "bidirectional": true,
              "heartbeat_interval_s": 3, "retention": {"policy": "priority", "ranges": [{"priority": 7}]},
              "pairs": [{"from": "p", "to": "d", "kv_lease_duration": 60}]})",
            R"(pricing={"plan": {"usd_per_hour": 40}})", R"(slo={"ttft_ms": {"p50": 200}, "tpot_ms": 50})",
            R"(faults=[{"kind": "spot_reclaim", "rate_per_hour": 0.1}])",
            R"(workload={"synthetic": {"requests": 10, "concurrency": 4, "isl": 100, "osl": 20}})"}));
  for (const LoadedScenario& once : all) {
    // From another folder, without help from the first file.
    const LoadedScenario twice = parse_scenario(once.in_force, "elsewhere/x.json", "elsewhere");
    EXPECT_EQ(twice.in_force, once.in_force) << once.file;
    for (const auto& [pointer, from] : twice.origins)
      EXPECT_EQ(from, "scenario") << pointer;  // nothing is left out
  }
}

TEST(Scenario, ResolvedValuesTakeTheirPlace) {
  LoadedScenario loaded = load({"pools.d.engine.max_num_seqs=64"});
  put_resolved(loaded, "/pools/0/engine/max_num_seqs", 1024, "vLLM 0.24 on h200");
  put_resolved(loaded, "/pools/1/engine/max_num_seqs", 64, "vLLM 0.24 on h100");
  const auto in_force = ordered_json::parse(loaded.in_force);
  EXPECT_EQ(in_force["pools"][0]["engine"]["max_num_seqs"], 1024);
  EXPECT_EQ(in_force["pools"][1]["engine"]["max_num_seqs"], 64);
  EXPECT_EQ(origin(loaded, "/pools/0/engine/max_num_seqs"), "default: vLLM 0.24 on h200");
  EXPECT_EQ(origin(loaded, "/pools/1/engine/max_num_seqs"), "--set");
}

// vLLM 0.24: the API server's defaults by the GPU's memory and name.
TEST(ResolveEngine, TakesVllmsDefaultsForTheGpu) {
  const auto resolved = [](const EngineConfig& e, std::string_view gpu, Bytes gib) {
    return resolve_engine(e, gpu, gib << 30, 131072, "x");
  };
  EngineConfig engine;
  EXPECT_EQ(resolved(engine, "h200", 140).max_num_seqs, 1024);
  EXPECT_EQ(resolved(engine, "h200", 140).max_num_batched_tokens, 8192);
  EXPECT_EQ(resolved(engine, "h200", 140).max_model_len, 131072);
  EXPECT_EQ(resolved(engine, "a100-80gb", 80).max_num_seqs, 256);
  EXPECT_EQ(resolved(engine, "l40s", 45).max_num_batched_tokens, 2048);
  EXPECT_EQ(resolved(engine, "x", 70).max_num_seqs, 1024);
  // One longest prompt fits into a step when it may not be cut.
  engine.enable_chunked_prefill = false;
  EXPECT_EQ(resolved(engine, "h200", 140).max_num_batched_tokens, 131072);
  // No more tokens than all sequences can have; no more sequences than tokens.
  engine = {};
  engine.max_num_seqs = 2;
  engine.max_model_len = 1000;
  EXPECT_EQ(resolved(engine, "h200", 140).max_num_batched_tokens, 2000);
  engine = {};
  engine.max_num_batched_tokens = 100;
  EXPECT_EQ(resolved(engine, "h200", 140).max_num_seqs, 100);
}

TEST(ShippedScenarios, AreThoseOfTheContract) {
  const auto scenario = [](const std::string& name) {
    return load_scenario(PDSIM_SOURCE_DIR "/scenarios/" + name + ".json").scenario;
  };
  for (const char* name :
       {"quickstart", "mooncake-8x-colocated-h100", "mooncake-8p8d-h200", "p5en-1p1d-qwen3-32b",
        "p5en-colocated-qwen3-32b", "p5en-1p1d-glm-5-fp8", "p5en-colocated-glm-5-fp8"}) {
    EXPECT_EQ(scenario(name).name, name);
    EXPECT_TRUE(std::filesystem::exists(scenario(name).workload.trace)) << name;
  }
  const Scenario colocated = scenario("mooncake-8x-colocated-h100");
  ASSERT_EQ(colocated.pools.size(), 1u);
  EXPECT_EQ(colocated.pools[0].role, Role::colocated);
  EXPECT_EQ(colocated.pools[0].replicas, 8);
  EXPECT_EQ(colocated.pools[0].engine.block_size, 16);
  EXPECT_EQ(colocated.pools[0].engine.max_model_len, 131072);
  EXPECT_EQ(colocated.router.policy, "round_robin");
  const Scenario pair = scenario("mooncake-8p8d-h200");
  ASSERT_EQ(pair.pools.size(), 2u);
  for (const PoolConfig& pool : pair.pools) {
    EXPECT_EQ(pool.replicas, 8);
    EXPECT_EQ(pool.instance, "p5en.48xlarge");
    EXPECT_EQ(pool.engine.max_model_len, 131072);
  }
  // Equal GPUs on both sides of a comparison.
  for (const std::string model : {"qwen3-32b", "glm-5-fp8"}) {
    std::int32_t gpus[2] = {0, 0};
    for (const int side : {0, 1}) {
      const Scenario s = scenario((side == 0 ? "p5en-1p1d-" : "p5en-colocated-") + model);
      EXPECT_EQ(s.model, model);
      for (const PoolConfig& pool : s.pools) gpus[side] += pool.replicas * pool.tensor_parallel;
    }
    EXPECT_EQ(gpus[0], gpus[1]) << model;
  }
}

TEST(Names, DtypesAreTheModels) {
  for (const auto& names : {std::span<const Named>(kWeightsDtypes), std::span<const Named>(kKvDtypes)}) {
    for (const Named& dtype : names.subspan(1)) EXPECT_TRUE(parse_dtype(dtype.name)) << dtype.name;
  }
}

TEST(Schema, TheFileIsWhatTheTableSays) {
  EXPECT_EQ(text_of(PDSIM_SOURCE_DIR "/scenarios/schema.json"), scenario_schema())
      << "write it anew: build/release/tools/pdsim schema scenario > scenarios/schema.json";
}

TEST(Schema, DescribesEveryKeyInForce) {
  const auto schema = ordered_json::parse(scenario_schema());
  EXPECT_EQ(schema["required"], (std::vector<std::string>{"model", "pools", "workload"}));
  EXPECT_EQ(schema["additionalProperties"], false);
  const auto in_force = ordered_json::parse(load().in_force);
  for (const auto& [key, value] : in_force.items()) {
    ASSERT_TRUE(schema["properties"].contains(key)) << key;
    const auto& property = schema["properties"][key];
    EXPECT_FALSE(property["description"].get<std::string>().empty()) << key;
    if (!value.is_object()) continue;
    for (const auto& [inner, unused] : value.items()) {
      EXPECT_TRUE(property["properties"].contains(inner)) << key << "/" << inner;
    }
  }
  const auto& transfer = schema["properties"]["transfer"]["properties"];
  EXPECT_EQ(transfer["kv_lease_duration_s"]["default"], 30);
  EXPECT_EQ(transfer["mode"]["enum"],
            (std::vector<std::string>{"pull", "push", "push_layerwise", "push_progressive"}));
  EXPECT_TRUE(transfer["kv_connector_extra_config"]["properties"].contains("kv_lease_duration"));
  EXPECT_FALSE(transfer["post_fixed_us"].contains("default"));  // it depends on the backend
}

}  // namespace
}  // namespace pdsim
