// Theory: network.profile puts measured figures in the place of pdsim's own. One that states pdsim's figures
// changes no byte of a run; twice the rates of all sizes halve a transfer's time on the wire (see
// bandwidth_scale_test.cpp); posting and latency become defaults of transfer, which a scenario may override;
// it holds for the fabric it is of.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "models/network_profile.hpp"
#include "sim/core/error.hpp"
#include "sim/network/efficiency.hpp"
#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

/// A profile in a file, for as long as it lives.
class File {
 public:
  explicit File(const std::string& text)
      : path_((std::filesystem::temp_directory_path() /
               fmt::format("pdsim-profile-{}-{}.json", getpid(), ++made_))
                  .string()) {
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }
  std::string set() const { return "network.profile=" + path_; }

 private:
  static inline int made_ = 0;
  std::string path_;
};

/// The double whose thousand-millionth part is `per_ns`: what a file must say for it to come back.
double per_second(double per_ns) {
  double value = per_ns * 1e9;
  for (const double end : {0.0, HUGE_VAL}) {
    if (value / 1e9 != per_ns) value = std::nextafter(per_ns * 1e9, end);
  }
  EXPECT_EQ(value / 1e9, per_ns);
  return value;
}

NetworkProfile shipped() {
  const Fabric& fabric = find_fabric("efa-v3", 0, "test");
  NetworkProfile p;
  p.name = "as-shipped";
  p.fabric = fabric.name;
  p.line = fabric.line;
  for (const CurvePoint& point : fabric.write) p.write.push_back({point.bytes, point.rate});
  for (const CurvePoint& point : fabric.read) p.read.push_back({point.bytes, point.rate});
  p.operations = per_second(fabric.operations) / 1e9;
  p.latency = fabric.latency;
  p.posting = {"libfabric", 71 * kMicrosecond, 2'430};
  return p;
}

TEST(NetworkProfileRun, ShippedFiguresAreShippedBytes) {
  const File profile(to_json(shipped()));
  const Trace trace = small_trace(150, 6, kMillisecond);
  for (const char* mode : {"pull", "push"}) {
    const Sets sets = {fmt::format("transfer.mode={}", mode), "transfer.initial_fragmentation=0.5"};
    const Outcomes without = run_text(kDisaggregated, trace, sets);
    const Outcomes with_it = run_text(kDisaggregated, trace, with(sets, {profile.set()}));
    EXPECT_EQ(with_it.text(), without.text()) << mode;
    EXPECT_TRUE(with_it.deployment.measured_fabric != nullptr);
    EXPECT_GT(without.summary["transfers"]["descriptors"].get<std::int64_t>(), 10'000);
  }
}

Nanos moving(const Sets& sets) {
  const Trace trace = made_trace({request_at(0, 16'000, 4)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(with(kOneEach, {"transfer.warm_start=true"}), sets));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[0];
  return stage(r, Stage::transfer_post) + stage(r, Stage::transfer_wire);
}

TEST(NetworkProfileRun, HalfTheRatesTakeTwiceAsLongOnTheWire) {
  NetworkProfile half = shipped(), quarter = shipped();
  for (auto* p : {&half, &quarter}) {
    for (RatePoint& point : p->read) point.rate /= p == &half ? 2 : 4;
  }
  const File at_half(to_json(half)), at_quarter(to_json(quarter));
  const Nanos one = moving({}), two = moving({at_half.set()}), four = moving({at_quarter.set()});
  EXPECT_NEAR(static_cast<double>(four - two), 2 * static_cast<double>(two - one), 8);
  EXPECT_GT(two - one, one * 9 / 10);  // almost all of it is wire
}

TEST(NetworkProfileRun, PostingAndLatencyAreDefaultsOfTransfer) {
  NetworkProfile p = shipped();
  p.posting = {"libfabric", 5'000, 9'000};
  p.latency = 30'000;
  p.evidence["posting"] = "a test";
  const File file(to_json(p));
  const auto loaded = [&](const Sets& sets) {
    return parse_scenario(kDisaggregated, "test.json", "", with({file.set()}, sets));
  };
  const LoadedScenario plain = loaded({});
  const TransferConfig& t = plain.scenario.transfer;
  EXPECT_EQ(t.post_fixed, 5'000);
  EXPECT_EQ(t.post_per_descriptor, 9'000);
  EXPECT_EQ(t.notification, 30'000);
  EXPECT_NE(std::ranges::find(plain.origins,
                              std::pair<std::string, std::string>(
                                  "/transfer/post_fixed_us", "default: network profile as-shipped (a test)")),
            plain.origins.end());
  EXPECT_EQ(loaded({"transfer.post_us_per_descriptor=1"}).scenario.transfer.post_per_descriptor, 1'000);
  EXPECT_EQ(loaded({"transfer.notification_us=20"}).scenario.transfer.notification, 20'000);
  EXPECT_EQ(loaded({"transfer.backend=ucx"}).scenario.transfer.post_per_descriptor, 3'750)
      << "not its posting";
  // A pair has what its parent has, also where that overrides the profile; of its own backend, the profile's.
  const auto pair = [&](const char* backend, const Sets& sets) {
    const std::string pairs =
        fmt::format(R"(transfer.pairs=[{{"from": "prefill", "to": "decode", "backend": "{}"}}])", backend);
    return loaded(with(sets, {pairs})).scenario.transfer_pairs[0].transfer;
  };
  EXPECT_EQ(pair("libfabric", {"transfer.post_fixed_us=3"}).post_fixed, 3'000);
  EXPECT_EQ(pair("libfabric", {"transfer.backend=ucx"}).post_fixed, 5'000);
  EXPECT_EQ(pair("ucx", {}).post_per_descriptor, 3'750);
  // What is in force is itself a valid scenario.
  EXPECT_EQ(parse_scenario(plain.in_force, "again.json").scenario.transfer.post_fixed, 5'000);
}

std::string error_of(const Sets& sets) {
  try {
    plan_deployment(parse_scenario(kDisaggregated, "test.json", "", sets));
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(NetworkProfileRun, IsOfItsFabricOnly) {
  const File file(to_json(shipped()));
  EXPECT_EQ(error_of({file.set()}), "");
  EXPECT_EQ(error_of({file.set(), "network.fabric=roce"}),
            "--set: /network/profile: is of fabric efa-v3, expected one of the nodes' own: roce");
  // Of two generations, the one that was measured has it.
  const LoadedScenario mixed =
      parse_scenario(kDisaggregated, "test.json", "", Sets{file.set(), "pools.decode.instance=p5.48xlarge"});
  const Deployment d = plan_deployment(mixed);
  EXPECT_NE(d.topology.nodes[0].fabric, &find_fabric("efa-v3", 0, ""));
  EXPECT_EQ(d.topology.nodes.back().fabric, &find_fabric("efa-v2", 0, ""));

  EXPECT_EQ(error_of({"network.profile=nowhere.json"}),
            "--set: /network/profile: is 'nowhere.json', expected a network profile (pdsim calibrate network "
            "writes one)");
  NetworkProfile odd = shipped();
  odd.posting->backend = "ucs";
  const File misnamed(to_json(odd));
  EXPECT_EQ(error_of({misnamed.set()}), misnamed.path() +
                                            ": /posting/backend: is \"ucs\", expected one of libfabric, ucx, "
                                            "mooncake (did you mean 'ucx'?)");
}

}  // namespace
}  // namespace pdsim
