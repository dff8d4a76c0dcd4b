// Theory: a row is listed when, and only when, the scenario uses what it names. Each is switched on alone and
// looked for; without hand-overs there is nothing of transfers; what an open pull request has is unreleased.
#include "sim/scenario/releases.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "sim/scenario/load.hpp"

namespace pdsim {
namespace {

Scenario with(const std::vector<std::string>& sets, bool colocated = false) {
  const char* pair =
      R"({"model": "m", "pools": [{"role": "prefill", "gpu": "h200"}, {"role": "decode", "gpu": "h200"}],
      "workload": {"trace": "t", "format": "mooncake"}})";
  const char* one = R"({"model": "m", "pools": [{"role": "colocated", "gpu": "h200"}],
      "workload": {"trace": "t", "format": "mooncake"}})";
  return parse_scenario(colocated ? one : pair, "s.json", "", sets).scenario;
}

/// "" where the scenario does not use it.
std::string since(const Scenario& s, std::string_view feature) {
  std::string found;
  for (const Release& r : releases_of(s)) {
    if (r.feature == feature) found = r.since;
  }
  return found;
}

struct Case {
  const char* feature;
  const char* since;
  std::vector<std::string> on;
  std::vector<std::string> off{};  ///< where the defaults already use it
};

const Case kCases[] = {
    {"transfer.mode pull", "0.9", {}, {"transfer.mode=push"}},
    {"transfer.mode push", "0.24", {"transfer.mode=push"}},
    {"transfer.mode push_layerwise", "unreleased", {"transfer.mode=push_layerwise"}},
    {"transfer.mode push_progressive", "unreleased", {"transfer.mode=push_progressive"}},
    {"push with decode's prefix caching",
     "0.28",
     {"transfer.mode=push"},
     {"transfer.mode=push", "pools.decode.engine.enable_prefix_caching=false"}},
    {"push from pipeline-parallel prefill",
     "0.26",
     {"transfer.mode=push", "pools.prefill.pipeline_parallel=2"},
     {"transfer.mode=push", "pools.decode.pipeline_parallel=2"}},
    {"transfer.push_registration_timeout_s", "0.24", {"transfer.mode=push"}},
    {"transfer.push_fail",
     "unreleased",
     {"transfer.mode=push", "transfer.push_fail=true"},
     {"transfer.push_fail=true"}},
    {"transfer.background_receiver", "unreleased", {"transfer.background_receiver=true"}},
    {"transfer.bidirectional", "0.21", {"transfer.bidirectional=true"}},
    {"transfer.bidirectional with push",
     "no engine",
     {"transfer.bidirectional=true", "transfer.mode=push", "transfer.hypothetical=true"},
     {"transfer.mode=push", "transfer.hypothetical=true"}},
    {"transfer.kv_recompute_threshold",
     "0.21",
     {"transfer.bidirectional=true"},
     {"transfer.bidirectional=true", "transfer.reuse_policy=cost"}},
    {"transfer.reuse_policy cost",
     "no engine",
     {"transfer.bidirectional=true", "transfer.reuse_policy=cost"},
     {"transfer.reuse_policy=cost"}},
    {"transfer.decoder_kv_blocks_ttl_s", "0.22", {"transfer.bidirectional=true"}},
    {"transfer.retention.policy lru",
     "unreleased",
     {"transfer.bidirectional=true", "transfer.retention.policy=lru", "transfer.retention.budget_gib=1"},
     {"transfer.bidirectional=true"}},
    {"transfer.retention.policy priority",
     "unreleased",
     {"transfer.bidirectional=true", "transfer.retention.policy=priority"},
     {"transfer.bidirectional=true"}},
    {"transfer.retention.policy belady",
     "no engine",
     {"transfer.bidirectional=true", "transfer.retention.policy=belady"},
     {"transfer.bidirectional=true"}},
    {"transfer.expiry_margin_s",
     "0.26",
     {"transfer.bidirectional=true"},
     {"transfer.bidirectional=true", "transfer.expiry_margin_s=0"}},
    {"transfer.pd_recompute_threshold", "unreleased", {"transfer.pd_recompute_threshold=128"}},
    {"transfer.kv_lease_duration_s, heartbeats", "0.22", {}, {"transfer.mode=push"}},
    {"transfer.kv_lease_duration_s, not renewed", "0.24", {"transfer.mode=push"}},
    {"transfer.lease_reaper all", "unreleased", {"transfer.lease_reaper=all"}},
    {"transfer.enforce_handshake_compat", "0.13", {}, {"transfer.enforce_handshake_compat=false"}},
    {"transfer.kv_load_failure_policy fail, as default",
     "0.17",
     {},
     {"transfer.kv_load_failure_policy=recompute"}},
    {"transfer.kv_load_failure_policy recompute",
     "0.11.1 or 0.12",
     {"transfer.kv_load_failure_policy=recompute"}},
    {"transfer.wait_for_siblings",
     "0.30 or later",
     {"pools.decode.tensor_parallel=2"},
     {"pools.decode.tensor_parallel=2", "transfer.wait_for_siblings=false"}},
    {"transfer.stale_guard", "no engine", {}, {"transfer.stale_guard=false"}},
    {"decode split wider than prefill",
     "0.9.2",
     {"pools.decode.tensor_parallel=2"},
     {"pools.prefill.tensor_parallel=2"}},
    {"prefill split wider than decode",
     "0.12 or 0.13",
     {"pools.prefill.tensor_parallel=2"},
     {"pools.decode.tensor_parallel=2"}},
    {"transfer.enable_cross_layers_blocks", "0.16", {"transfer.enable_cross_layers_blocks=true"}},
    {"transfer.backend libfabric", "0.11", {}, {"transfer.backend=ucx"}},
    {"transfer.backend mooncake", "0.12 or before", {"transfer.backend=mooncake"}},
    {"transfer.num_threads", "0.11.1", {"transfer.backend=ucx"}},
    {"transfer.prep_us_per_descriptor below 0.04",
     "0.26",
     {"transfer.prep_us_per_descriptor=0.032"},
     {"transfer.prep_us_per_descriptor=0.032", "transfer.warm_start=true"}},
    {"transfer.prep_us_per_descriptor 0", "unreleased", {"transfer.prep_us_per_descriptor=0"}},
    {"transfer.seed_first_token", "unreleased", {"transfer.seed_first_token=true"}},
    {"transfer.fast_kv_dispatch", "unreleased", {"transfer.fast_kv_dispatch=true"}},
    {"transfer.fast_kv_notify", "unreleased", {"transfer.fast_kv_notify=true"}},
    {"router.local_prefill_threshold", "the router", {"router.local_prefill_threshold=64"}},
    {"router.sequential_dispatch with push",
     "the router",
     {"router.sequential_dispatch=true", "transfer.mode=push"},
     {"router.sequential_dispatch=true"}},
    {"router.session_kv_ttl_s", "the router", {"transfer.bidirectional=true"}},
    {"engine.async_scheduling, as default",
     "0.14",
     {},
     {"pools.0.engine.async_scheduling=false", "pools.1.engine.async_scheduling=false"}},
    {"engine.gpu_memory_utilization 0.92, as default",
     "0.21",
     {},
     {"pools.0.engine.gpu_memory_utilization=0.9", "pools.1.engine.gpu_memory_utilization=0.9"}},
    {"transfer.engine_ttl_s",
     "0.23 or 0.24",
     {},
     {"pools.0.role=colocated", "pools.1.role=colocated", "pools.0.name=a", "pools.1.name=b"}},
};

TEST(Releases, EachIsListedWhenItIsUsed) {
  for (const Case& c : kCases) {
    EXPECT_EQ(since(with(c.on), c.feature), c.since) << c.feature;
    EXPECT_EQ(since(with(c.off), c.feature), "") << c.feature;
  }
}

// Every row that any of these scenarios reaches has a case.
TEST(Releases, EveryRowHasACase) {
  std::set<std::string_view> cases, listed;
  for (const Case& c : kCases) {
    cases.insert(c.feature);
    for (const std::vector<std::string>& sets : {c.on, c.off}) {
      for (const Release& r : releases_of(with(sets))) listed.insert(r.feature);
    }
  }
  EXPECT_EQ(cases, listed);
}

TEST(Releases, EachNamesItsSourceAndNothingTwice) {
  for (const Case& c : kCases) {
    std::set<std::string_view> here;
    for (const Release& r : releases_of(with(c.on))) {
      EXPECT_FALSE(r.source.empty()) << r.feature;
      EXPECT_TRUE(here.insert(r.feature).second) << r.feature;
      const bool word = r.since == kUnreleased || r.since == kNoEngine || r.since == kTheRouter;
      EXPECT_TRUE(word || r.since.starts_with("0.")) << r.feature;
    }
  }
}

TEST(Releases, NothingOfTransfersWhereNothingIsHandedOver) {
  const Scenario s = with({"transfer.mode=push_layerwise", "router.local_prefill_threshold=64"}, true);
  for (const Release& r : releases_of(s)) EXPECT_TRUE(r.feature.starts_with("engine.")) << r.feature;
  EXPECT_EQ(releases_of(s).size(), 2u);
}

TEST(Releases, APairsOwnSettingsCount) {
  const Scenario s =
      with({R"(transfer.pairs=[{"from": "prefill", "to": "decode", "pd_recompute_threshold": 9}])"});
  EXPECT_EQ(s.transfer.pd_recompute_threshold, 0);
  EXPECT_EQ(since(s, "transfer.pd_recompute_threshold"), "unreleased");
}

TEST(Releases, HypotheticalIsTheCombinationNotTheKey) {
  EXPECT_FALSE(is_hypothetical(with({"transfer.hypothetical=true", "transfer.bidirectional=true"})));
  EXPECT_FALSE(is_hypothetical(with({"transfer.hypothetical=true", "transfer.mode=push"})));
  const std::vector<std::string> both{"transfer.hypothetical=true", "transfer.bidirectional=true",
                                      "transfer.mode=push"};
  EXPECT_TRUE(is_hypothetical(with(both)));
  EXPECT_FALSE(is_hypothetical(with(both, true)));
}

}  // namespace
}  // namespace pdsim
