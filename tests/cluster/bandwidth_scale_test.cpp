// Theory: network.bandwidth_scale times the line rate of every network card. What one transfer that nothing
// but the wire holds up takes is a constant (the first descriptor's posting, the latencies) and bytes / rate,
// so t(1) - t(2) = W / 2 and t(2) - t(4) = W / 4. What stays inside a node does not know of it.
#include <gtest/gtest.h>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

// 16,000 tokens of Llama-3.1-8B: 2 GiB in as many descriptors as there are regions.
Nanos moving(const Sets& sets) {
  const Trace trace = made_trace({request_at(0, 16'000, 4)});
  const Outcomes o =
      run_text(kDisaggregated, trace, with(with(kOneEach, {"transfer.warm_start=true"}), sets));
  expect_conserved(o, trace);
  const RequestRecord& r = o.run.requests[0];
  EXPECT_EQ(r.transferred_tokens, 16'000);
  return stage(r, Stage::transfer_post) + stage(r, Stage::transfer_wire);
}

Nanos scaled(const char* factor, const Sets& sets = {}) {
  return moving(with(sets, {std::string("network.bandwidth_scale=") + factor}));
}

TEST(BandwidthScale, TwiceTheRateIsHalfTheTimeOnTheWire) {
  const Nanos half = scaled("0.5"), one = scaled("1"), two = scaled("2"), four = scaled("4");
  EXPECT_EQ(one, moving({}));
  EXPECT_NEAR(static_cast<double>(half - one), 2 * static_cast<double>(one - two), 8);
  EXPECT_NEAR(static_cast<double>(one - two), 2 * static_cast<double>(two - four), 8);
  const double wire = 2 * static_cast<double>(one - two);
  EXPECT_GT(wire, 0.95 * static_cast<double>(one)) << "almost all of it";
  // 2.1 GB at no more than the two 200 Gb/s cards of a GPU give.
  EXPECT_GT(wire, 16'000 * 131'072.0 / 50);
}

TEST(BandwidthScale, InsideANodeNothingChanges) {
  const Sets together = {R"(placement=[{"pool": "prefill", "replica": 0, "node": 0, "gpus": [0]}, )"
                         R"({"pool": "decode", "replica": 0, "node": 0, "gpus": [1]}])"};
  EXPECT_EQ(scaled("1", together), scaled("8", together));
  EXPECT_LT(scaled("1", together), scaled("1"));
}

}  // namespace
}  // namespace pdsim
