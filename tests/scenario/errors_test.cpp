// Theory: whatever is wrong with a scenario is one line that names the file or option, the JSON pointer,
// the value, what was expected and, where one is near, the name that was meant.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/scenario/load.hpp"

namespace pdsim {
namespace {

constexpr const char* kPair = R"({
  "model": "m",
  "pools": [{"role": "prefill", "instance": "p5en.48xlarge"}, {"role": "decode", "instance": "p5en.48xlarge"}],
  "workload": {"trace": "t.jsonl", "format": "mooncake"}
})";

std::string error_of(std::string_view text, const std::vector<std::string>& sets = {},
                     const Overrides& overrides = {}) {
  try {
    parse_scenario(text, "s.json", "", sets, overrides);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

// The valid pair of pools, with an RFC 7396 merge patch.
std::string patched(std::string_view patch) {
  auto json = nlohmann::ordered_json::parse(kPair);
  json.merge_patch(nlohmann::ordered_json::parse(patch));
  return json.dump();
}

struct Case {
  const char* patch;
  const char* error;
};

void expect_errors(const std::vector<Case>& cases) {
  for (const Case& c : cases)
    EXPECT_EQ(error_of(patched(c.patch)), std::string("s.json: ") + c.error) << c.patch;
}

TEST(ScenarioErrors, TheBaseOfTheseTestsIsValid) {
  EXPECT_EQ(error_of(kPair), "no error");
}

TEST(ScenarioErrors, BrokenJsonIsPlacedByLineAndColumn) {
  EXPECT_EQ(
      error_of("{\n  \"model\": \"m\"\n  \"pools\": []\n}"),
      "s.json:3:9: is no JSON: syntax error while parsing object - unexpected string literal; expected '}'");
  EXPECT_EQ(error_of("{\"seed\": NaN}").substr(0, 24), "s.json:1:10: is no JSON:");
  EXPECT_EQ(error_of("{\"seed\": -inf}").substr(0, 16), "s.json:1:11: is ");
  EXPECT_EQ(error_of("{\"seed\": 1e999}").substr(0, 14), "s.json:1:14: i");
  EXPECT_EQ(error_of("{\"model\": \"m\"").substr(0, 12), "s.json:1:14:");
  EXPECT_EQ(error_of(" \n"), "s.json: is empty, expected a scenario (JSON)");
  EXPECT_EQ(error_of("[1]"), "s.json: is a JSON array, expected an object");
}

TEST(ScenarioErrors, AKeyGivenTwice) {
  EXPECT_EQ(error_of(R"({"pools": [{}, {"engine": {"block_size": 16, "block_size": 32}}]})"),
            "s.json: /pools/1/engine/block_size: is given twice, expected once");
}

TEST(ScenarioErrors, UnknownKeysSuggestTheNearest) {
  expect_errors({
      {R"({"modle": "x"})", "/modle: unknown key (did you mean 'model'?)"},
      {R"({"transfer": {"kv_lease_duration_ms": 3}})",
       "/transfer/kv_lease_duration_ms: unknown key (did you mean 'kv_lease_duration_s'?)"},
      {R"({"transfer": {"kv_connector_extra_config": {"kv_lease": 3}}})",
       "/transfer/kv_connector_extra_config/kv_lease: unknown key, expected one of bidirectional_kv_xfer, "
       "kv_recompute_threshold, kv_lease_duration, decoder_kv_blocks_ttl, push_registration_timeout, "
       "engine_ttl, "
       "backends, num_threads, enforce_handshake_compat, enable_cross_layers_blocks, background_receiver, "
       "seed_first_token, fast_kv_dispatch, fast_kv_notify, progressive_push"},
      {R"({"slo": {"ttft": 3}})", "/slo/ttft: unknown key, expected one of ttft_ms, tpot_ms"},
      {R"({"slo": {"ttft_ms": {"p96": 3}}})", "/slo/ttft_ms/p96: unknown key (did you mean 'p90'?)"},
      {R"({"network": {"zzzzzzzzzzzz": 1}})",
       "/network/zzzzzzzzzzzz: unknown key, expected one of fabric, nodes_per_leaf, oversubscription, "
       "bandwidth_scale, profile, failed_rails"},
      {R"({"workload": {"a/b~c": 1}})",
       "/workload/a~1b~0c: unknown key, expected one of trace, format, synthetic, concurrency, "
       "max_concurrency, time_scale, prompt_scale, sessions, "
       "warmup_s, "
       "measure_s, client_timeout_s, infer_sessions, reference_ttft_ms, reference_tpot_ms"},
  });
}

TEST(ScenarioErrors, AMisspeltRequiredKeyIsReportedAsUnknownNotAsMissing) {
  EXPECT_EQ(error_of(R"({"model": "m", "pools": [{"rolle": "colocated", "gpu": "h200"}],
                         "workload": {"trace": "t", "format": "azure"}})"),
            "s.json: /pools/0/rolle: unknown key (did you mean 'role'?)");
}

TEST(ScenarioErrors, MissingKeys) {
  EXPECT_EQ(error_of("{}"), "s.json: 'model' is missing, expected a name, or the path of a .json file");
  EXPECT_EQ(error_of(R"({"model": "m", "workload": {"trace": "t", "format": "azure"}})"),
            "s.json: 'pools' is missing, expected a list of objects");
  EXPECT_EQ(error_of(R"({"model": "m", "pools": [{"gpu": "h200"}]})"),
            "s.json: /pools/0: 'role' is missing, expected one of prefill, decode, colocated");
  EXPECT_EQ(error_of(R"({"model": "m", "pools": [{"role": "colocated", "gpu": "h200"}]})"),
            "s.json: 'workload' is missing, expected an object");
  expect_errors({
      {R"({"workload": {"format": null}})",
       "/workload: 'format' is missing, expected one of mooncake, azure, vllm-bench, aiperf"},
      {R"({"workload": {"trace": null, "synthetic": {"isl": 8, "osl": 8, "rate": 1}}})",
       "/workload/synthetic: 'requests' is missing, expected an integer from 1 to 100000000"},
      {R"({"faults": [{"at_s": 1}]})",
       "/faults/0: 'kind' is missing, expected one of worker_crash, worker_restart, link_down, "
       "link_degraded, "
       "message_lost, transfer_failed, client_cancel, decode_rejection, backend_tcp, router_restart, "
       "spot_reclaim"},
  });
}

TEST(ScenarioErrors, WrongTypes) {
  expect_errors({
      {R"({"model": 3})", "/model: is 3, expected a name, or the path of a .json file"},
      {R"({"name": ""})", "/name: is \"\", expected a string that is not empty"},
      {R"({"pools": {}})", "/pools: is {}, expected a list of objects"},
      {R"({"pools": [3]})", "/pools/0: is 3, expected an object"},
      {R"({"router": []})", "/router: is [], expected an object"},
      {R"({"transfer": {"bidirectional": 1}})", "/transfer/bidirectional: is 1, expected true or false"},
      {R"({"transfer": {"mode": true}})",
       "/transfer/mode: is true, expected one of pull, push, push_layerwise, push_progressive"},
      {R"({"seed": 1.5})", "/seed: is 1.5, expected an integer of at least 0"},
      {R"({"seed": "1"})", "/seed: is \"1\", expected an integer of at least 0"},
      {R"({"placement": 3})", "/placement: is 3, expected one of pack, spread"},
      {R"({"slo": {"ttft_ms": "fast"}})", "/slo/ttft_ms: is \"fast\", expected an object"},
      {R"({"network": {"oversubscription": "4:1"}})",
       "/network/oversubscription: is \"4:1\", expected a number of at least 1"},
  });
}

TEST(ScenarioErrors, WrongUnitsAndSigns) {
  expect_errors({
      {R"({"transfer": {"kv_lease_duration_s": "30s"}})",
       "/transfer/kv_lease_duration_s: is \"30s\", expected a number of seconds, at least 1e-09"},
      {R"({"workload": {"warmup_s": -1}})",
       "/workload/warmup_s: is -1, expected a number of seconds, at least 0"},
      {R"({"workload": {"warmup_s": -1e-12}})",
       "/workload/warmup_s: is -1e-12, expected a number of seconds, at least 0"},
      {R"({"workload": {"measure_s": 1e300}})",
       "/workload/measure_s: is 1e+300, expected a number of seconds, at least 0, and at most 31 years"},
      {R"({"transfer": {"post_us_per_descriptor": -2.43}})",
       "/transfer/post_us_per_descriptor: is -2.43, expected a number of microseconds, at least 0"},
  });
}

TEST(ScenarioErrors, WhatCrossesBetweenWorkersTakesTime) {
  expect_errors({
      {R"({"router": {"hop_ms": 0}})",
       "/router/hop_ms: is 0, expected a number of milliseconds, at least 1e-06: nothing reaches another "
       "worker at "
       "the instant it happens"},
      {R"({"router": {"cache_event_delay_us": 0.0001}})",
       "/router/cache_event_delay_us: is 0.0001, expected a number of microseconds, at least 0.001: nothing "
       "reaches "
       "another worker at the instant it happens"},
      {R"({"transfer": {"notification_us": 0}})",
       "/transfer/notification_us: is 0, expected a number of microseconds, at least 0.001: nothing reaches "
       "another "
       "worker at the instant it happens"},
  });
}

TEST(ScenarioErrors, WrongRanges) {
  expect_errors({
      {R"({"workload": {"time_scale": 0}})", "/workload/time_scale: is 0, expected a number above 0"},
      {R"({"router": {"max_retries": 1001}})",
       "/router/max_retries: is 1001, expected an integer from 0 to 1000"},
      {R"({"router": {"local_prefill_threshold": 1e10}})",
       "/router/local_prefill_threshold: is 10000000000.0, expected an integer from 0 to 2147483647"},
      {R"({"seed": 18446744073709551615})",
       "/seed: is 18446744073709551615, expected an integer of at least 0"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "engine": {"block_size": 24}}]})",
       "/pools/0/engine/block_size: is 24, expected a power of two"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "engine": {"block_size": 0}}]})",
       "/pools/0/engine/block_size: is 0, expected an integer from 1 to 1024"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "engine": {"gpu_memory_utilization": 90}}]})",
       "/pools/0/engine/gpu_memory_utilization: is 90, expected a number above 0 and at most 1"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "tensor_parallel": 0}]})",
       "/pools/0/tensor_parallel: is 0, expected an integer from 1 to 1024"},
      {R"({"network": {"failed_rails": [{"node": 0, "gpu": -1, "rail": 0}]}})",
       "/network/failed_rails/0/gpu: is -1, expected an integer from 0 to 1023"},
  });
}

TEST(ScenarioErrors, UnknownNamesListTheKnownAndSuggest) {
  expect_errors({
      {R"({"router": {"policy": "roundrobin"}})",
       "/router/policy: is \"roundrobin\", expected one of round_robin, random, least_loaded, power_of_two, "
       "prefix_aware, session_affinity (did you mean 'round_robin'?)"},
      {R"({"transfer": {"backend": "nccl"}})",
       "/transfer/backend: is \"nccl\", expected one of libfabric, ucx, mooncake"},
      {R"({"transfer": {"mode": "push_layer_wise"}})",
       "/transfer/mode: is \"push_layer_wise\", expected one of pull, push, push_layerwise, push_progressive "
       "(did you mean 'push_layerwise'?)"},
      {R"({"transfer": {"reuse_policy": "costs"}})",
       "/transfer/reuse_policy: is \"costs\", expected one of threshold, cost (did you mean 'cost'?)"},
      {R"({"transfer": {"retention": {"policy": "fifo"}}})",
       "/transfer/retention/policy: is \"fifo\", expected one of ttl, lru, priority, belady"},
      {R"({"transfer": {"lease_reaper": "order"}})",
       "/transfer/lease_reaper: is \"order\", expected one of in_order, all"},
      {R"({"transfer": {"kv_load_failure_policy": "retry"}})",
       "/transfer/kv_load_failure_policy: is \"retry\", expected one of fail, recompute"},
      {R"({"network": {"fabric": "infiniband"}})",
       "/network/fabric: is \"infiniband\", expected one of efa, roce, tcp"},
      {R"({"workload": {"format": "mooncakes"}})",
       "/workload/format: is \"mooncakes\", expected one of mooncake, azure, vllm-bench, aiperf (did you "
       "mean 'mooncake'?)"},
      {R"({"workload": {"sessions": "close"}})",
       "/workload/sessions: is \"close\", expected one of open, closed (did you mean 'closed'?)"},
      {R"({"placement": "packed"})",
       "/placement: is \"packed\", expected one of pack, spread (did you mean 'pack'?)"},
      {R"({"pricing": {"plan": "ondemand"}})",
       "/pricing/plan: is \"ondemand\", expected one of on_demand, capacity_block, spot (did you mean "
       "'on_demand'?)"},
      {R"({"kv_dtype": "fp4"})",
       "/kv_dtype: is \"fp4\", expected one of auto, bf16, fp16, fp8 (did you mean 'fp8'?)"},
      {R"({"faults": [{"kind": "crash", "at_s": 1}]})",
       "/faults/0/kind: is \"crash\", expected one of worker_crash, worker_restart, link_down, "
       "link_degraded, "
       "message_lost, transfer_failed, client_cancel, decode_rejection, backend_tcp, router_restart, "
       "spot_reclaim"},
  });
}

TEST(ScenarioErrors, PoolsThatCannotWork) {
  expect_errors({
      {R"({"pools": []})", "/pools: is empty, expected at least one pool"},
      {R"({"pools": [{"role": "prefill", "gpu": "h200"}]})",
       "/pools: there is no decode pool: no request could use pool 'prefill', expected one with role decode"},
      {R"({"pools": [{"role": "decode", "gpu": "h200"}]})",
       "/pools: there is no prefill pool: no request could use pool 'decode', expected one with role "
       "prefill"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200"}, {"role": "decode", "name": "d", "gpu": "h200"}]})",
       "/pools/1: there is no prefill pool: no request could use pool 'd', expected one with role prefill"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200"}, {"role": "colocated", "gpu": "h200"}]})",
       "/pools/1/name: \"colocated\" is the name of an earlier pool, expected another"},
      {R"({"pools": [{"role": "colocated", "name": "a.b", "gpu": "h200"}]})",
       "/pools/0/name: is \"a.b\", expected letters, digits, - and _, and no digit first"},
      {R"({"pools": [{"role": "colocated"}]})",
       "/pools/0: has neither instance nor gpu, expected one of them"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "instance": "p5en.48xlarge"}]})",
       "/pools/0: has both instance and gpu, expected one of them"},
      {R"({"pools": [{"role": "colocated", "gpu": "h200", "tensor_parallel": 2, "data_parallel": 2,
                      "expert_parallel": 3}]})",
       "/pools/0/expert_parallel: is 3, expected a divisor of tensor_parallel x data_parallel = 4"},
      {R"({"pools": [{"role": "prefill", "gpu": "h200", "engine": {"block_size": 64}},
                     {"role": "decode", "gpu": "h200"}]})",
       "/pools/1/engine/block_size: is 16, expected 64 as pool 'prefill' has (vLLM's NIXL connector pairs "
       "equal "
       "blocks only)"},
  });
}

TEST(ScenarioErrors, PlacementListsEveryGpuOfEveryReplicaOnce) {
  expect_errors({
      {R"({"placement": [{"pool": "prefil", "replica": 0, "node": 0, "gpus": [0]}]})",
       "/placement/0/pool: \"prefil\" is no pool, expected one of prefill, decode (did you mean 'prefill'?)"},
      {R"({"placement": [{"pool": "prefill", "replica": 1, "node": 0, "gpus": [0]}]})",
       "/placement/0/replica: is 1, expected less than the 1 of pool 'prefill'"},
      {R"({"placement": [{"pool": "prefill", "replica": 0, "node": 0, "gpus": [0]},
                         {"pool": "decode", "replica": 0, "node": 0, "gpus": [0]}]})",
       "/placement/1/gpus: GPU 0 of node 0 is taken by an earlier entry"},
      {R"({"placement": [{"pool": "prefill", "replica": 0, "node": 0, "gpus": [0]}]})",
       "/placement: gives replica 0 of pool 'decode' 0 GPUs, expected 1 (tensor x pipeline x data parallel)"},
      {R"({"placement": [{"pool": "prefill", "replica": 0, "node": 0, "gpus": [1, 1]}]})",
       "/placement/0/gpus: is [1,1], expected a list of different integers from 0 to 1023"},
  });
}

TEST(ScenarioErrors, TransferSettingsThatContradict) {
  expect_errors({
      {R"({"transfer": {"mode": "push", "bidirectional": true}})",
       "/transfer/bidirectional: is true with mode push, expected mode pull (vLLM refuses the rest: "
       "vllm#46473), or hypothetical true to see what it would do"},
      {R"({"transfer": {"kv_lease_duration_s": 30, "kv_connector_extra_config": {"kv_lease_duration": 60}}})",
       "/transfer/kv_connector_extra_config/kv_lease_duration: is 60, but /transfer/kv_lease_duration_s is "
       "30: give "
       "one of them"},
      {R"({"transfer": {"bidirectional": true, "bidirectional_kv_xfer": false}})",
       "/transfer/bidirectional_kv_xfer: is false, but /transfer/bidirectional is true: give one of them"},
      {R"({"transfer": {"kv_connector_extra_config": {"progressive_push": true}}})",
       "/transfer/progressive_push: is true, but mode is pull: only push_progressive has it"},
      {R"({"transfer": {"kv_connector_extra_config": {"backends": ["UCX", "GDS"]}}})",
       "/transfer/kv_connector_extra_config/backends: is [\"UCX\",\"GDS\"], expected one of libfabric, ucx, "
       "mooncake"},
      {R"({"transfer": {"pairs": [{"from": "decode", "to": "prefill"}]}})",
       "/transfer/pairs/0/from: \"decode\" is no prefill pool, expected one of prefill"},
      {R"({"transfer": {"pairs": [{"from": "prefill", "to": "decode", "mod": "push"}]}})",
       "/transfer/pairs/0/mod: unknown key (did you mean 'mode'?)"},
      {R"({"transfer": {"pairs": [{"from": "prefill", "to": "decode"}, {"from": "prefill", "to": "decode"}]}})",
       "/transfer/pairs/1: an earlier entry has the same pools"},
  });
}

TEST(ScenarioErrors, APairKnowsTheFutureIfAllDo) {
  expect_errors({
      {R"({"transfer": {"bidirectional": true,
          "pairs": [{"from": "prefill", "to": "decode", "retention": {"policy": "belady"}}]}})",
       "/transfer/pairs/0/retention/policy: is belady, expected ttl as /transfer has: who knows the future "
       "knows "
       "it for all pools"},
      {R"({"transfer": {"bidirectional": true, "retention": {"policy": "belady"},
          "pairs": [{"from": "prefill", "to": "decode", "retention": {"policy": "ttl"}}]}})",
       "/transfer/pairs/0/retention/policy: is ttl, expected belady as /transfer has: who knows the future "
       "knows "
       "it for all pools"},
  });
}

// Connectors of unlike modes refuse each other at the handshake.
TEST(ScenarioErrors, APairCannotHaveAModeOfItsOwn) {
  const std::string error =
      "/transfer/pairs/0: has another mode or another bidirectional than /transfer, expected the same "
      "(vllm#50620: unlike connectors refuse each other)";
  expect_errors({
      {R"({"transfer": {"pairs": [{"from": "prefill", "to": "decode", "mode": "push"}]}})", error.c_str()},
      {R"({"transfer": {"pairs": [{"from": "prefill", "to": "decode", "bidirectional": true}]}})",
       error.c_str()},
      {R"({"transfer": {"mode": "push", "pairs": [{"from": "prefill", "to": "decode",
           "bidirectional": true}]}})",
       "/transfer/pairs/0/bidirectional: is true with mode push, expected mode pull (vLLM refuses the rest: "
       "vllm#46473), or hypothetical true to see what it would do"},
  });
}

// What no engine does is simulated when it is asked for by name.
TEST(ScenarioErrors, HypotheticalAllowsWhatNoEngineCombines) {
  for (const char* mode : {"push", "push_layerwise", "push_progressive"}) {
    const std::string transfer = std::string(R"({"transfer": {"bidirectional": true, "mode": ")") + mode;
    EXPECT_NE(error_of(patched(transfer + "\"}}")), "no error") << mode;
    EXPECT_EQ(error_of(patched(transfer + R"(", "hypothetical": true}})")), "no error") << mode;
  }
}

TEST(ScenarioErrors, TransferRanges) {
  expect_errors({
      {R"({"transfer": {"thread_contention": 0.9}})",
       "/transfer/thread_contention: is 0.9, expected a number of at least 1"},
      {R"({"transfer": {"initial_fragmentation": 1.1}})",
       "/transfer/initial_fragmentation: is 1.1, expected a number from 0 to 1"},
      {R"({"transfer": {"clock_error_s": 3601}})",
       "/transfer/clock_error_s: is 3601, expected a number from -3600 to 3600"},
      {R"({"transfer": {"retention": {"ranges": [{"priority": 101}]}}})",
       "/transfer/retention/ranges/0/priority: is 101, expected an integer from 0 to 100"},
      {R"({"transfer": {"retention": {"ranges": [{"form_token": 1}]}}})",
       "/transfer/retention/ranges/0/form_token: unknown key (did you mean 'from_token'?)"},
      {R"({"transfer": {"heartbeat_interval_s": 0}})",
       "/transfer/heartbeat_interval_s: is 0, expected a number of seconds, at least 1e-09"},
      {R"({"router": {"reroute_fraction": -0.1}})",
       "/router/reroute_fraction: is -0.1, expected a number from 0 to 1"},
  });
}

TEST(ScenarioErrors, Workloads) {
  const char* synthetic = R"({"requests": 9, "isl": 8, "osl": 8, "rate": 1})";
  EXPECT_EQ(error_of(patched(std::string(R"({"workload": {"synthetic": )") + synthetic + "}}")),
            "s.json: /workload: has both trace and synthetic, expected one of them");
  expect_errors({
      {R"({"workload": {"trace": null}})",
       "/workload: has neither trace nor synthetic, expected one of them"},
      {R"({"workload": {"trace": null, "synthetic": {"requests": 9, "isl": 8, "osl": 8}}})",
       "/workload/synthetic: has neither rate nor concurrency, expected one of them above 0"},
      {R"({"workload": {"trace": null, "synthetic":
            {"requests": 9, "isl": 8, "osl": 8, "rate": 2, "concurrency": 2}}})",
       "/workload/synthetic: has both rate and concurrency, expected one of them above 0"},
      {R"({"workload": {"trace": null, "synthetic":
            {"requests": 9, "isl": 8, "osl": 8, "rate": 2, "shared_prefix": 9}}})",
       "/workload/synthetic/shared_prefix: is 9, expected at most isl = 8"},
      {R"({"workload": {"trace": null, "synthetic":
            {"requests": 9, "isl": 0, "osl": 8, "rate": 2}}})",
       "/workload/synthetic/isl: is 0, expected an integer of at least 1"},
      {R"({"workload": {"concurrency": -1}})",
       "/workload/concurrency: is -1, expected an integer of at least 0"},
      {R"({"workload": {"concurrency": 4, "sessions": "closed"}})",
       "/workload/concurrency: is 4 with sessions closed, expected one of the two closed loops"},
      {R"({"workload": {"concurrency": 4, "time_scale": 2}})",
       "/workload/concurrency: is 4 with a time_scale, expected 0: a closed loop ignores arrivals"},
      {R"({"workload": {"concurrency": 4, "max_concurrency": 4}})",
       "/workload/max_concurrency: is 4 beside concurrency, expected one of the two"},
      {R"({"workload": {"trace": null, "concurrency": 4, "synthetic":
            {"requests": 9, "isl": 8, "osl": 8, "rate": 2}}})",
       "/workload/concurrency: is 4 beside synthetic, expected it as synthetic.concurrency"},
      {R"({"workload": {"trace": null, "max_concurrency": 4, "synthetic":
            {"requests": 9, "isl": 8, "osl": 8, "concurrency": 2}}})",
       "/workload/max_concurrency: is 4 beside concurrency, expected one of the two"},
  });
}

TEST(ScenarioErrors, PricesAndFaults) {
  expect_errors({
      {R"({"pricing": {"usd_per_hour": {"p5en.48xlage": 41}}})",
       "/pricing/usd_per_hour/p5en.48xlage: no pool has this instance, expected p5en.48xlarge (did you mean "
       "'p5en.48xlarge'?)"},
      {R"({"pricing": {"usd_per_hour": -1}})",
       "/pricing/usd_per_hour: is -1, expected USD per hour above 0, one for all instances or an object by "
       "instance"},
      {R"({"pricing": {"plan": {"usd_per_hour": {}}}})",
       "/pricing/plan: has no price of p5en.48xlarge, expected usd_per_hour of each instance"},
      {R"({"faults": [{"kind": "link_down", "at_s": 1, "rate_per_hour": 2}]})",
       "/faults/0: has both at_s and rate_per_hour, expected one of them"},
      {R"({"faults": [{"kind": "link_down"}]})",
       "/faults/0: has neither at_s nor rate_per_hour, expected one of them"},
      {R"({"faults": [{"kind": "link_down", "at_s": -1}]})",
       "/faults/0/at_s: is -1, expected a number of seconds, at least 0"},
      {R"({"faults": [{"kind": "message_lost", "at_s": 1}]})",
       "/faults/0/target: is \"\", expected a message: registration, completion, read_done, heartbeat, "
       "handshake, router_update"},
      {R"({"faults": [{"kind": "message_lost", "target": "heart_beat", "at_s": 1}]})",
       "/faults/0/target: is \"heart_beat\", expected a message: registration, completion, read_done, "
       "heartbeat, handshake, router_update (did you mean 'heartbeat'?)"},
  });
}

TEST(ScenarioErrors, OptionsAreBlamedForWhatTheySet) {
  const auto of = [](const char* set) { return error_of(kPair, {set}); };
  EXPECT_EQ(of("transfer.mod=push"), "--set: /transfer/mod: unknown key (did you mean 'mode'?)");
  EXPECT_EQ(of("transfer.mode=pul"),
            "--set: /transfer/mode: is \"pul\", expected one of pull, push, push_layerwise, push_progressive "
            "(did you "
            "mean 'pull'?)");
  EXPECT_EQ(of("pools.decode.engine.max_num_seqs=many"),
            "--set: /pools/1/engine/max_num_seqs: is \"many\", expected an integer of at least 0");
  EXPECT_EQ(of("pools.decod.replicas=2"),
            "--set: pools has no 'decod', expected one of prefill, decode or an index below 2 (did you mean "
            "'decode'?)");
  EXPECT_EQ(of("pools.2.replicas=2"),
            "--set: pools has no '2', expected one of prefill, decode or an index below 2");
  EXPECT_EQ(of("model.x=2"), "--set: model is \"m\", which has no 'x'");
  EXPECT_EQ(of("seed"), "--set: 'seed' has no value, expected PATH=VALUE");
  EXPECT_EQ(of("=3"), "--set: '=3' has no value, expected PATH=VALUE");
  EXPECT_EQ(of("router..policy=3"), "--set: an empty step after 'router', expected a key");
  EXPECT_EQ(of(R"(router={"hop_ms": "x"})").substr(0, 24), "--set: /router/hop_ms: i");
  EXPECT_EQ(error_of(kPair, {}, {.trace = "", .format = "azur", .seed = {}}),
            "--format: /workload/format: is \"azur\", expected one of mooncake, azure, vllm-bench, aiperf "
            "(did you mean 'azure'?)");
  // What the file says is still the file's fault.
  EXPECT_EQ(error_of(patched(R"({"router": {"max_retries": -1}})"), {"router.policy=random"}),
            "s.json: /router/max_retries: is -1, expected an integer from 0 to 1000");
}

TEST(ScenarioErrors, Files) {
  EXPECT_THROW(load_scenario("no/such/scenario.json"), InputError);
  try {
    load_scenario("no/such/scenario.json");
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "no/such/scenario.json: cannot be read: No such file or directory");
  }
  try {
    load_scenario(PDSIM_SOURCE_DIR "/scenarios");
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), PDSIM_SOURCE_DIR "/scenarios: is a folder, expected a scenario (JSON)");
  }
}

TEST(ResolveEngine, RefusesWhatVllmWouldNotStart) {
  const auto error = [](const EngineConfig& engine) -> std::string {
    try {
      resolve_engine(engine, "h200", Bytes{140} << 30, 40960, "s.json: /pools/0/engine");
    } catch (const InputError& e) {
      return e.what();
    }
    return "no error";
  };
  EngineConfig engine;
  engine.max_model_len = 131072;
  EXPECT_EQ(error(engine),
            "s.json: /pools/0/engine/max_model_len: is 131072, expected at most the model's "
            "max_position_embeddings = "
            "40960");
  engine = {};
  engine.max_num_batched_tokens = 512;
  engine.max_num_seqs = 1024;
  EXPECT_EQ(
      error(engine),
      "s.json: /pools/0/engine/max_num_batched_tokens: is 512, expected at least max_num_seqs = 1024 (vLLM)");
  engine = {};
  engine.max_num_batched_tokens = 8192;
  engine.enable_chunked_prefill = false;
  EXPECT_EQ(
      error(engine),
      "s.json: /pools/0/engine/max_num_batched_tokens: is 8192 without chunked prefill, expected at least "
      "max_model_len = 40960");
}

}  // namespace
}  // namespace pdsim
