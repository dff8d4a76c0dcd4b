#include "sim/scenario/releases.hpp"

#include <algorithm>

namespace pdsim {

namespace {

bool has(const Scenario& s, Role role) {
  return std::ranges::any_of(s.pools, [&](const PoolConfig& pool) { return pool.role == role; });
}

bool hands_over(const Scenario& s) {
  return has(s, Role::prefill) && has(s, Role::decode);
}

bool pushes(const TransferConfig& t) {
  return t.mode != TransferMode::pull;
}

bool retains(const TransferConfig& t) {
  return t.bidirectional;
}

/// Whether some prefill pool's tensor parallelism is below (-1) or above (1) that of some decode pool.
bool splits_differ(const Scenario& s, int sign) {
  for (const PoolConfig& p : s.pools) {
    for (const PoolConfig& d : s.pools) {
      if (p.role != Role::prefill || d.role != Role::decode) continue;
      if ((p.tensor_parallel - d.tensor_parallel) * sign > 0) return true;
    }
  }
  return false;
}

// Used when `transfer` holds for one of the transfer settings between pools, or `engine` for a pool's engine.
struct Row {
  Release release;
  bool (*transfer)(const TransferConfig&, const Scenario&);
  bool (*engine)(const EngineConfig&) = nullptr;
};

using T = const TransferConfig&;
using S = const Scenario&;

// Numbers of releases that vLLM's notes do not name are inferred from the day of the merge.
constexpr Row kRows[] = {
    {{"transfer.mode pull", "0.9", "docs.vllm.ai/en/v0.9.0: NixlConnector"},
     [](T t, S) { return t.mode == TransferMode::pull; }},
    {{"transfer.mode push", "0.24", "vllm#35264: NixlPushConnector"},
     [](T t, S) { return t.mode == TransferMode::push; }},
    {{"transfer.mode push_layerwise", kUnreleased, "vllm#56874"},
     [](T t, S) { return t.mode == TransferMode::push_layerwise; }},
    {{"transfer.mode push_progressive", kUnreleased, "vllm#55589, RFC vllm#53703"},
     [](T t, S) { return t.mode == TransferMode::push_progressive; }},
    {{"push with decode's prefix caching", "0.28",
      "vllm#48758 (release inferred): before, a partial hit was overwritten in silence"},
     [](T t, S s) {
       return pushes(t) && std::ranges::any_of(s.pools, [](const PoolConfig& pool) {
                return pool.role == Role::decode && pool.engine.enable_prefix_caching;
              });
     }},
    {{"push from pipeline-parallel prefill", "0.26", "vllm#45880"},
     [](T t, S s) {
       return pushes(t) && std::ranges::any_of(s.pools, [](const PoolConfig& pool) {
                return pool.role == Role::prefill && pool.pipeline_parallel > 1;
              });
     }},
    {{"transfer.push_registration_timeout_s", "0.24", "vllm#35264"}, [](T t, S) { return pushes(t); }},
    {{"transfer.push_fail", kUnreleased, "vllm#50754, vllm#55470"},
     [](T t, S) { return pushes(t) && t.push_fail; }},
    {{"transfer.background_receiver", kUnreleased, "vllm#57987, before it vllm#45211"},
     [](T t, S) { return !pushes(t) && t.background_receiver; }},

    {{"transfer.bidirectional", "0.21", "vllm#32553"}, [](T t, S) { return retains(t) && !pushes(t); }},
    {{"transfer.bidirectional with push", kNoEngine,
      "vllm#46473: refused since 0.25, and taken without a protocol for it by 0.24"},
     [](T t, S) { return retains(t) && pushes(t); }},
    {{"transfer.kv_recompute_threshold", "0.21", "vllm#32553"},
     [](T t, S) { return retains(t) && t.reuse_policy == ReusePolicy::threshold; }},
    {{"transfer.reuse_policy cost", kNoEngine, "llm-d-router#2443 asks for a threshold that knows the load"},
     [](T t, S) { return retains(t) && t.reuse_policy == ReusePolicy::cost; }},
    {{"transfer.decoder_kv_blocks_ttl_s", "0.22", "vllm#41383; before, one timeout of 480 s for everything"},
     [](T t, S) { return retains(t) && t.retention.policy == Retention::ttl; }},
    {{"transfer.retention.policy lru", kUnreleased,
      "vllm#38514, RFC vllm#37003: eviction other than by time"},
     [](T t, S) { return retains(t) && t.retention.policy == Retention::lru; }},
    {{"transfer.retention.policy priority", kUnreleased,
      "vllm#38514, RFC vllm#37003; TensorRT-LLM: KvCacheRetentionConfig"},
     [](T t, S) { return retains(t) && t.retention.policy == Retention::priority; }},
    {{"transfer.retention.policy belady", kNoEngine,
      "Belady 1966: it knows which turns are to come; a bound for the others"},
     [](T t, S) { return retains(t) && t.retention.policy == Retention::belady; }},
    {{"transfer.expiry_margin_s", "0.26", "vllm#47021"},
     [](T t, S) { return retains(t) && t.expiry_margin > 0; }},
    {{"transfer.pd_recompute_threshold", kUnreleased, "vllm#55801"},
     [](T t, S) { return t.pd_recompute_threshold > 0; }},

    {{"transfer.kv_lease_duration_s, heartbeats", "0.22", "vllm#41383, llm-d#1543"},
     [](T t, S) { return !pushes(t); }},
    {{"transfer.kv_lease_duration_s, not renewed", "0.24",
      "vllm#53095: with push, heartbeats name other ids"},
     [](T t, S) { return pushes(t); }},
    {{"transfer.lease_reaper all", kUnreleased, "vllm#50789; since 0.22 it is in_order: vllm#58222"},
     [](T t, S) { return t.lease_reaper == LeaseReaper::all; }},
    {{"transfer.engine_ttl_s", "0.23 or 0.24", "vllm#44424 (release inferred)"}, [](T, S) { return true; }},
    {{"transfer.enforce_handshake_compat", "0.13", "vllm#29503, dynamo#5351"},
     [](T t, S) { return t.enforce_handshake_compat; }},
    {{"transfer.kv_load_failure_policy fail, as default", "0.17", "vllm#34896"},
     [](T t, S) { return t.kv_load_failure_policy == "fail"; }},
    {{"transfer.kv_load_failure_policy recompute", "0.11.1 or 0.12", "vllm#26813 (release inferred)"},
     [](T t, S) { return t.kv_load_failure_policy == "recompute"; }},
    {{"transfer.wait_for_siblings", "0.30 or later",
      "vllm#56104 (release inferred); of what it broke in push, vllm#58188 is open"},
     [](T t, S s) { return t.wait_for_siblings && (splits_differ(s, -1) || splits_differ(s, 1)); }},
    {{"transfer.stale_guard", kNoEngine, "false is what engines do: vllm#52234, aws-do-eks#84"},
     [](T t, S) { return t.stale_guard; }},

    {{"decode split wider than prefill", "0.9.2", "vllm#18833 (release inferred)"},
     [](T, S s) { return splits_differ(s, -1); }},
    {{"prefill split wider than decode", "0.12 or 0.13", "vllm#27274 (release inferred)"},
     [](T, S s) { return splits_differ(s, 1); }},
    {{"transfer.enable_cross_layers_blocks", "0.16", "vllm#33339"},
     [](T t, S) { return t.enable_cross_layers_blocks; }},
    {{"transfer.backend libfabric", "0.11", "vllm#25121 (release inferred)"},
     [](T t, S) { return t.backend == "libfabric"; }},
    {{"transfer.backend mooncake", "0.12 or before", "Mooncake's 1P1D report runs it on 0.11.2.dev358"},
     [](T t, S) { return t.backend == "mooncake"; }},
    {{"transfer.num_threads", "0.11.1", "vllm#27196 (release inferred)"},
     [](T t, S) { return t.backend == "ucx"; }},
    {{"transfer.prep_us_per_descriptor below 0.04", "0.26", "vllm#48209; 0.225 before"},
     [](T t, S) { return !t.warm_start && t.prep_per_descriptor > 0 && t.prep_per_descriptor < 40; }},
    {{"transfer.prep_us_per_descriptor 0", kUnreleased, "vllm#55157, with NIXL 1.5.0 (nixl#1978)"},
     [](T t, S) { return !t.warm_start && t.prep_per_descriptor == 0; }},
    {{"transfer.seed_first_token", kUnreleased, "vllm#51919"}, [](T t, S) { return t.seed_first_token; }},
    {{"transfer.fast_kv_dispatch", kUnreleased, "vllm#51919"}, [](T t, S) { return t.fast_kv_dispatch; }},
    {{"transfer.fast_kv_notify", kUnreleased, "vllm#51919"}, [](T t, S) { return t.fast_kv_notify; }},

    {{"router.local_prefill_threshold", kTheRouter, "an engine prefills what comes without transfer params"},
     [](T, S s) { return s.router.local_prefill_threshold > 0; }},
    {{"router.sequential_dispatch with push", kTheRouter, "vllm-project/router#187, dynamo#13327"},
     [](T t, S s) { return pushes(t) && s.router.sequential_dispatch; }},
    {{"router.session_kv_ttl_s", kTheRouter, "vLLM's multi-turn proxy, vllm#32553"},
     [](T t, S) { return retains(t); }},

    {{"engine.async_scheduling, as default", "0.14", "vllm#27614, vllm#31998"},
     nullptr,
     [](const EngineConfig& e) { return e.async_scheduling; }},
    {{"engine.gpu_memory_utilization 0.92, as default", "0.21", "vllm#38284"},
     nullptr,
     [](const EngineConfig& e) { return e.gpu_memory_utilization == EngineConfig{}.gpu_memory_utilization; }},
};

bool used(const Row& row, const Scenario& s) {
  if (row.engine != nullptr) {
    return std::ranges::any_of(s.pools, [&](const PoolConfig& pool) { return row.engine(pool.engine); });
  }
  return hands_over(s) &&
         (row.transfer(s.transfer, s) || std::ranges::any_of(s.transfer_pairs, [&](const TransferPair& pair) {
            return row.transfer(pair.transfer, s);
          }));
}

}  // namespace

std::vector<Release> releases_of(const Scenario& scenario) {
  std::vector<Release> list;
  for (const Row& row : kRows) {
    if (used(row, scenario)) list.push_back(row.release);
  }
  return list;
}

bool is_hypothetical(const Scenario& s) {
  return hands_over(s) && retains(s.transfer) && pushes(s.transfer);  // pairs differ in neither
}

}  // namespace pdsim
