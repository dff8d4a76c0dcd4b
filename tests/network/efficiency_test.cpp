// Theory: the curves give back the measured points (shared/facts/kv-transfer-points.csv; between GPUs of a
// node the times of openucx/ucx#3740), are continuous and monotone, and below the first point the operations
// per second bind: rate = operations x size.
#include "sim/network/efficiency.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr Bytes kKiB = 1024;

double node_rate(const char* fabric, Op op, Bytes size) {
  const Fabric& f = find_fabric(fabric, 0, "test");
  return efficiency(f, op, size) * f.line;
}

TEST(Efficiency, GivesBackTheMeasuredPoints) {
  const auto write = [](Bytes kib) { return node_rate("efa-v3", Op::write, kib * kKiB); };
  const auto read = [](Bytes kib) { return node_rate("efa-v3", Op::read, kib * kKiB); };
  EXPECT_DOUBLE_EQ(write(64), 97.11);
  EXPECT_DOUBLE_EQ(write(128), 190.82);
  EXPECT_DOUBLE_EQ(write(256), 324.90);
  EXPECT_DOUBLE_EQ(write(512), 357.62);
  EXPECT_DOUBLE_EQ(write(1024), 365.66);
  EXPECT_DOUBLE_EQ(write(2048), 366.87);
  EXPECT_DOUBLE_EQ(read(64), 96.87);
  EXPECT_DOUBLE_EQ(read(128), 203.88);
  EXPECT_DOUBLE_EQ(read(256), 296.19);
  EXPECT_DOUBLE_EQ(read(1024), 303.78);
  EXPECT_DOUBLE_EQ(node_rate("efa-v2", Op::write, 1024 * kKiB), 388.90);
  EXPECT_DOUBLE_EQ(node_rate("efa-v2", Op::read, 1024 * kKiB), 381.64);
  EXPECT_DOUBLE_EQ(node_rate("efa-v4", Op::write, 1024 * kKiB), 302);
  EXPECT_DOUBLE_EQ(node_rate("efa-v4", Op::read, 1024 * kKiB), 313);
}

// One operation after the other: its time is size over rate. Below 8 KiB it is that of 8 KiB, and no link of
// this kind costs it less than posting it costs the thread (2.31 us, cluster/transfer_plan.cpp).
TEST(Efficiency, PeersOnPcieTakeTheTimesOfCudaIpc) {
  const auto us = [](Bytes size) {
    return static_cast<double>(size) / (efficiency(kPcie, Op::read, size) * kPcie.line) / 1000;
  };
  EXPECT_NEAR(us(4 * kKiB), 2.314, 1e-9);
  EXPECT_NEAR(us(8 * kKiB), 2.314, 1e-9);
  EXPECT_NEAR(us(16 * kKiB), 2.422, 1e-9);
  EXPECT_NEAR(us(32 * kKiB), 2.994, 1e-9);
  EXPECT_NEAR(us(64 * kKiB), 4.341, 1e-9);
  EXPECT_NEAR(us(1024 * kKiB), 44.813, 1e-9);
  EXPECT_NEAR(us(2048 * kKiB), 2 * 44.813, 1e-9);  // 88.04 there
}

// 146.5 GB/s of a machine's 200: Mooncake's 4.50 GiB in 31.65 ms less 0.37, within 6 %.
TEST(Efficiency, RoceMovesTrueBytes) {
  const double rate = node_rate("roce", Op::read, 1024 * kKiB);
  EXPECT_DOUBLE_EQ(rate, 146.5);
  EXPECT_NEAR(4.5 * 1024 * 1024 * kKiB / rate / 1e6 + 0.37, 31.65, 0.06 * 31.65);
}

// Half an octave above 128 KiB is half way: (190.82 + 324.90) / 2 at 128 KiB x sqrt 2 = 185,364 B.
TEST(Efficiency, IsLinearInTheLogarithmBetweenPoints) {
  EXPECT_NEAR(node_rate("efa-v3", Op::write, 185'364), (190.82 + 324.90) / 2, 1e-3);
}

TEST(Efficiency, BelowTheFirstPointOperationsBind) {
  // 97.11 GB/s / 64 KiB = 1.4818 M operations a second.
  EXPECT_NEAR(node_rate("efa-v3", Op::write, 4 * kKiB), 1.4818e-3 * 4096, 1e-3);
  EXPECT_DOUBLE_EQ(node_rate("efa-v3", Op::read, 4 * kKiB), node_rate("efa-v3", Op::write, 4 * kKiB));
  EXPECT_DOUBLE_EQ(node_rate("efa-v3", Op::write, 8 * kKiB), 2 * node_rate("efa-v3", Op::write, 4 * kKiB));
}

TEST(Efficiency, IsContinuousMonotoneAndAtMostOne) {
  std::vector<Fabric> all(fabrics().begin(), fabrics().end());
  all.insert(all.end(), {kNvlink, kPcie});
  for (const Fabric& fabric : all) {
    for (const Op op : {Op::read, Op::write}) {
      double last = efficiency(fabric, op, 1);
      for (Bytes size = 1; size < 8 * 1024 * kKiB; size += size / 512 + 1) {
        const double now = efficiency(fabric, op, size);
        ASSERT_GE(now, last) << fabric.name << " " << size;
        ASSERT_LE(now, 1.0) << fabric.name << " " << size;
        ASSERT_LT(now - last, 0.01) << fabric.name << " jumps at " << size;
        last = now;
      }
      const Bytes knot = 64 * kKiB;
      EXPECT_NEAR(efficiency(fabric, op, knot - 1), efficiency(fabric, op, knot), 1e-4) << fabric.name;
    }
  }
}

TEST(Efficiency, StripesFrom128KiB) {
  EXPECT_EQ(wire_operation_bytes(128 * kKiB - 1, 2), 128 * kKiB - 1);
  EXPECT_EQ(wire_operation_bytes(128 * kKiB, 2), 64 * kKiB);
  EXPECT_EQ(wire_operation_bytes(128 * kKiB, 4), 32 * kKiB);
  EXPECT_EQ(wire_operation_bytes(128 * kKiB + 1, 2), 64 * kKiB + 1);
  EXPECT_EQ(wire_operation_bytes(1024 * kKiB, 1), 1024 * kKiB);
}

std::string error_of(auto&& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Efficiency, FindsFabricsByName) {
  EXPECT_EQ(find_fabric("efa", 3, "x").name, "efa-v3");
  EXPECT_EQ(find_fabric("tcp", 3, "x").name, "tcp");
  EXPECT_EQ(
      error_of([] { find_fabric("roca", 0, "a.json: /network/fabric"); }),
      "a.json: /network/fabric: unknown fabric 'roca' (did you mean 'roce'?); expected one of efa, efa-v1, "
      "efa-v2, efa-v3, efa-v4, roce, tcp");
  EXPECT_EQ(error_of([] { find_fabric("efa", 0, "a.json: /network/fabric"); }),
            "a.json: /network/fabric: fabric 'efa' needs an instance with EFA; expected one, or a fabric of "
            "efa-v1, efa-v2, efa-v3, efa-v4, roce, tcp");
}

// What a measurement leaves out is shipped's share of the line, whatever line was measured; with shipped's
// own figures nothing changes, not in the last bit.
TEST(Efficiency, AMeasuredFabricKeepsWhatWasNotMeasured) {
  const Fabric& shipped = find_fabric("efa-v3", 0, "test");
  const std::vector<CurvePoint> write(shipped.write.begin(), shipped.write.end());
  const std::vector<CurvePoint> read(shipped.read.begin(), shipped.read.end());
  const auto same =
      measured_fabric(shipped, {shipped.line, write, read, shipped.operations, shipped.latency, "x"});
  const auto none = measured_fabric(shipped, {});
  for (Bytes size = 512; size < 8 * 1024 * kKiB; size += 511) {
    for (const Op op : {Op::read, Op::write}) {
      ASSERT_EQ(efficiency(same->fabric, op, size), efficiency(shipped, op, size)) << size;
      ASSERT_EQ(efficiency(none->fabric, op, size), efficiency(shipped, op, size)) << size;
    }
  }
  EXPECT_EQ(none->fabric.latency, shipped.latency);

  // One GPU's cards, an eighth of the machine's line; only WRITE was measured.
  const auto part = measured_fabric(shipped, {50, {{32 * kKiB, 20}, {1024 * kKiB, 45}}, {}, 0, 9'000, "x"});
  const Fabric& f = part->fabric;
  EXPECT_DOUBLE_EQ(efficiency(f, Op::write, 1024 * kKiB), 45.0 / 50);
  EXPECT_DOUBLE_EQ(efficiency(f, Op::write, 32 * kKiB), 20.0 / 50);
  // 20 GB/s at 32 KiB are more operations than shipped's 97.11 of 400 at 64 KiB: they count, and the curve
  // goes on to the left of its first point without a step.
  EXPECT_DOUBLE_EQ(efficiency(f, Op::write, 16 * kKiB), 10.0 / 50);
  EXPECT_DOUBLE_EQ(efficiency(f, Op::read, 1024 * kKiB), 303.78 / 400);
  EXPECT_EQ(f.latency, 9'000);
  EXPECT_EQ(f.label, "efa");
  // A plateau alone: shipped's operations below it.
  const auto plateau = measured_fabric(shipped, {50, {{1024 * kKiB, 40}}, {}, 0, 0, "x"});
  EXPECT_DOUBLE_EQ(efficiency(plateau->fabric, Op::write, 32 * kKiB), 97.11 / 2 / 400);
  EXPECT_DOUBLE_EQ(efficiency(plateau->fabric, Op::write, 512 * kKiB), 40.0 / 50);
}

}  // namespace
}  // namespace pdsim
