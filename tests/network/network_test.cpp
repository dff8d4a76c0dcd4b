// Theory: between changes a flow moves at its max-min rate, so ends follow in closed form; a long random run
// agrees with an integrator that recomputes everything at every change; bytes are conserved to the byte; and
// neither the order of starting, nor flows elsewhere, nor how much is re-solved changes a bit.
#include "sim/network/network.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"
#include "tests/network/nodes.hpp"

namespace pdsim {
namespace {

using testing::lossless;
using testing::nodes;
using testing::p5en;

constexpr Bytes kMiB = 1024 * 1024;
constexpr Bytes kGB = 1'000'000'000;

/// A request between GPUs with a tag; operations of 1 MiB.
FlowRequest flow(GpuId source, GpuId destination, Bytes bytes, std::uint64_t tag = 0, Op op = Op::write) {
  return {.source = source,
          .destination = destination,
          .bytes = bytes,
          .op = op,
          .operation_bytes = kMiB,
          .tag = tag};
}

/// Runs until no flow ends any more. tag -> end.
std::map<std::uint64_t, Nanos> finish(Network& network, Nanos now) {
  std::map<std::uint64_t, Nanos> ends;
  std::vector<Completion> done;
  while ((now = network.next_completion(now)) != kNever) {
    network.complete(now, done);
    EXPECT_FALSE(done.empty());
    for (const Completion& completion : done) ends[completion.tag] = now;
  }
  return ends;
}

// 1 GB at 50 bytes/ns: 20 ms.
TEST(Network, OneFlow) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  network.start(7, flow(0, 8, kGB));
  EXPECT_EQ(network.next_completion(7), 7 + 20'000'000);
  std::vector<Completion> done;
  network.complete(20'000'007, done);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].bytes, kGB);
  EXPECT_EQ(done[0].start, 7);
  EXPECT_EQ(network.next_completion(20'000'007), kNever);
  EXPECT_EQ(network.in_flight(), 0u);
}

// 8 GPUs into one: 50 / 8 each, all end together.
TEST(Network, NIntoOne) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  for (GpuId g = 0; g < 8; ++g) network.start(0, flow(g, 8, kGB, static_cast<std::uint64_t>(g)));
  for (const auto& [tag, end] : finish(network, 0)) EXPECT_EQ(end, 160'000'000) << tag;
}

// 4:1: 32 GPUs under one leaf send to 32 under another over 4 x 400 / 4 = 400: 12.5 each, a quarter of 50.
TEST(Network, FourToOneOversubscription) {
  const Topology t =
      build_topology(nodes(8, lossless()), {.nodes_per_leaf = 4, .oversubscription = 4}, "test");
  Network network(t);
  for (GpuId g = 0; g < 32; ++g) network.start(0, flow(g, 32 + g, kGB, static_cast<std::uint64_t>(g)));
  network.start(0,
                flow(32, 40, kGB, 99));  // under its own leaf: the 37.5 that the flow from 8 leaves of rx 40
  EXPECT_EQ(network.next_completion(0), 26'666'667);
  const auto ends = finish(network, 0);
  EXPECT_EQ(ends.at(0), 80'000'000);
  EXPECT_EQ(ends.at(31), 80'000'000);
}

// Joining halves, leaving doubles. A: 300 B alone at 50 until B joins at 2 (200 left), 25 each; B's 100 end
// at 6 (A 100 left); A ends at 6 + 100 / 50 = 8.
TEST(Network, IsRetimedWhenFlowsJoinAndLeave) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  network.start(0, flow(0, 8, 300, 1));
  EXPECT_EQ(network.next_completion(0), 6);
  network.start(2, flow(0, 9, 100, 2));
  EXPECT_EQ(network.next_completion(2), 6);
  const auto ends = finish(network, 2);
  EXPECT_EQ(ends.at(2), 6);
  EXPECT_EQ(ends.at(1), 8);
}

// Parking lot in a fabric: 0 -> 8, 0 -> 9, 1 -> 9 share tx 0 and rx 9 in a chain: 25 each.
TEST(Network, BothEndsConstrain) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  const FlowId a = network.start(0, flow(0, 8, kGB)), b = network.start(0, flow(0, 9, kGB)),
               c = network.start(0, flow(1, 9, kGB)), d = network.start(0, flow(1, 10, kGB));
  network.next_completion(0);
  for (const FlowId id : {a, b, c, d}) EXPECT_EQ(network.rate(id), 25.0);
  network.cancel(0, a);
  network.next_completion(0);
  EXPECT_EQ(network.rate(b), 25.0);
}

TEST(Network, AFailedRailHalves) {
  const Topology t = build_topology(nodes(2, lossless()), {.failed_rails = {{1, 0, 1}}}, "test");
  Network network(t);
  network.start(0, flow(0, 8, kGB, 1));
  network.start(0, flow(1, 9, kGB, 2));
  const auto ends = finish(network, 0);
  EXPECT_EQ(ends.at(1), 40'000'000);
  EXPECT_EQ(ends.at(2), 20'000'000);
}

TEST(Network, PeersOnOneNodeGetNvlinkAndLeaveTheRailsAlone) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  const FlowId local = network.start(0, flow(0, 1, kGB)), remote = network.start(0, flow(0, 9, kGB));
  network.next_completion(0);
  EXPECT_DOUBLE_EQ(network.rate(local), 337.0);  // 450 x NCCL's share of it
  EXPECT_EQ(network.rate(remote), 50.0);
}

// A GPU's eighth of the machine's measured rate, by operation and size; 8 GPUs make the machine's.
TEST(Network, ReadAndWriteRunAtTheirMeasuredRates) {
  const Topology t = build_topology(nodes(2, p5en()), {}, "test");
  const auto rate = [&](Op op, Bytes operation) {
    Network network(t);
    FlowRequest request = flow(0, 8, kGB, 0, op);
    request.operation_bytes = operation;
    const FlowId id = network.start(0, request);
    network.next_completion(0);
    return network.rate(id) * 8;
  };
  EXPECT_DOUBLE_EQ(rate(Op::write, kMiB), 365.66);
  EXPECT_DOUBLE_EQ(rate(Op::read, kMiB), 303.78);
  EXPECT_DOUBLE_EQ(rate(Op::write, 65'536), 97.11);
  EXPECT_DOUBLE_EQ(rate(Op::write, 32'768), 97.11 / 2);
}

// Equal rates, unequal cost: x (1 / e_read + 1 / e_write) = 50.
TEST(Network, InefficientFlowsTakeMoreOfTheLine) {
  const Topology t = build_topology(nodes(2, p5en()), {}, "test");
  Network network(t);
  const FlowId read = network.start(0, flow(0, 8, kGB, 1, Op::read)),
               write = network.start(0, flow(0, 9, kGB, 2, Op::write));
  network.next_completion(0);
  const double expected = 50 / (400 / 303.78 + 400 / 365.66);
  EXPECT_DOUBLE_EQ(network.rate(read), expected);
  EXPECT_DOUBLE_EQ(network.rate(write), expected);
}

// Posting at 4 KiB in 2.43 us feeds 1.69 bytes/ns; the rest is the other's.
TEST(Network, APostingCapLeavesTheRestToOthers) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  FlowRequest slow = flow(0, 8, kGB, 1);
  slow.rate_cap = 4096 / 2430.0;
  const FlowId capped = network.start(0, slow), free = network.start(0, flow(0, 9, kGB, 2));
  network.next_completion(0);
  EXPECT_EQ(network.rate(capped), 4096 / 2430.0);
  EXPECT_EQ(network.rate(free), 50 - 4096 / 2430.0);
}

// 100 bytes at 50 / 3 take 6 ns exactly; 101 take 6.06, announced and ended at 7.
TEST(Network, EndsAreRoundedUpOnce) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  for (GpuId g = 0; g < 3; ++g) network.start(0, flow(0, 8 + g, 100, static_cast<std::uint64_t>(g)));
  EXPECT_EQ(network.next_completion(0), 6);
  Network other(t);
  for (GpuId g = 0; g < 3; ++g) other.start(0, flow(0, 8 + g, 101, static_cast<std::uint64_t>(g)));
  for (const auto& [tag, end] : finish(other, 0)) EXPECT_EQ(end, 7) << tag;
}

// Whatever the last bits of rate x time say, what was announced for an instant is over at that instant.
TEST(Network, AChangeAtAnAnnouncedEndDoesNotPostponeIt) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  std::vector<Completion> done;
  for (std::uint64_t n = 3; n < 60; ++n) {
    for (Bytes bytes = 50; bytes < 2000; bytes += 50) {
      Network network(t);
      for (std::uint64_t i = 0; i < n; ++i)
        network.start(0, flow(0, 8 + static_cast<GpuId>(i % 8), bytes, i));
      const Nanos end = network.next_completion(0);
      network.start(end, flow(0, 8, kGB, n));
      ASSERT_EQ(network.next_completion(end), end) << n << " flows of " << bytes;
      EXPECT_EQ(network.cancel(end, 0), bytes);
      network.next_completion(end);
      network.complete(end, done);
      ASSERT_EQ(done.size(), n - 1) << n << " flows of " << bytes;
    }
  }
}

TEST(Network, NoBytesEndAtOnce) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  network.start(5, {.source = 0, .destination = 8, .tag = 3});
  const std::uint64_t before = network.epoch();
  EXPECT_EQ(network.next_completion(5), 5);
  EXPECT_GT(network.epoch(), before);
  EXPECT_EQ(finish(network, 5).at(3), 5);
}

TEST(Network, CancelReturnsWhatWasDelivered) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  const FlowId a = network.start(0, flow(0, 8, 1000, 1));
  network.start(0, flow(0, 9, 1000, 2));
  network.next_completion(0);
  EXPECT_EQ(network.cancel(10, a), 250);
  EXPECT_EQ(finish(network, 10).at(2), 10 + 15);  // 750 left at 50
  EXPECT_EQ(network.totals().delivered, 1250);
  EXPECT_EQ(network.totals().abandoned, 750);
  EXPECT_EQ(network.totals().cancelled, 1u);
}

TEST(Network, ADeadLinkHoldsItsFlowsUntilItIsBack) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  network.start(0, flow(0, 8, 1000, 1));
  network.next_completion(0);
  const LinkId rx = route(t, 0, 8).link[1];
  network.set_capacity(10, rx, 0);
  EXPECT_EQ(network.next_completion(10), kNever);
  network.set_capacity(100, rx, 0.5);
  EXPECT_EQ(network.next_completion(100), 100 + 20);  // 500 left at 25
  EXPECT_EQ(finish(network, 100).at(1), 120);
}

TEST(Network, EpochGrowsWithEveryEventThatIsNeeded) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  std::uint64_t last = network.epoch();
  const auto moved = [&] { return std::exchange(last, network.epoch()) != network.epoch(); };
  EXPECT_EQ(network.next_completion(0), kNever);
  EXPECT_FALSE(moved());
  network.start(0, flow(0, 8, 1000, 1));
  EXPECT_EQ(network.next_completion(0), 20);
  EXPECT_TRUE(moved());
  network.start(10, flow(1, 9, 1000, 2));  // elsewhere: the next end stays
  EXPECT_EQ(network.next_completion(10), 20);
  EXPECT_FALSE(moved());
  std::vector<Completion> done;
  network.complete(20, done);
  EXPECT_EQ(network.next_completion(20), 30);
  EXPECT_TRUE(moved());
  network.complete(30, done);
  network.start(30, {.source = 0, .destination = 8});  // ends at the instant of an event just popped
  EXPECT_EQ(network.next_completion(30), 30);
  EXPECT_TRUE(moved());
}

// tx 0: 50 for 20 ns and 25 for 10 ns of 100.
TEST(Network, LinksReportBytesAndUtilisation) {
  const Topology t = build_topology(nodes(2, lossless()), {.failed_rails = {{1, 1, 0}}}, "test");
  Network network(t);
  network.start(0, flow(0, 8, 1000, 1));
  network.next_completion(0);
  std::vector<Completion> done;
  network.complete(20, done);
  network.start(20, flow(0, 9, 1000, 2));
  network.next_completion(20);
  const LinkUse use = network.link_use(t.fabric_tx[0], 30);
  EXPECT_EQ(use.bytes, 1250);
  EXPECT_DOUBLE_EQ(use.mean, (20 * 1.0 + 10 * 0.5) / 30);
  EXPECT_EQ(use.max, 1.0);
  EXPECT_EQ(network.link_use(t.fabric_tx[9] + 1, 30).max, 1.0) << "the failed rail's pool is full";
  EXPECT_EQ(network.link_use(t.fabric_tx[5], 30).bytes, 0);
  EXPECT_EQ(network.delivered_in_flight(30), 250);
}

// 10 of 50 for 10 ns, then 10 of 25.
TEST(Network, UtilisationIsOfTheCapacityInForce) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  FlowRequest request = flow(0, 8, 1000);
  request.rate_cap = 10;
  network.start(0, request);
  network.next_completion(0);
  network.set_capacity(10, t.fabric_tx[0], 0.5);
  network.next_completion(10);
  EXPECT_DOUBLE_EQ(network.link_use(t.fabric_tx[0], 20).mean, (0.2 + 0.4) / 2);
}

// An instant's states that last no time leave no trace in the report.
TEST(Network, AStateThatLastsNoTimeIsNotSeen) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  const FlowId a = network.start(10, flow(0, 8, 1000, 1));
  network.next_completion(10);
  EXPECT_EQ(network.cancel(10, a), 0);
  network.next_completion(10);
  EXPECT_EQ(network.link_use(t.fabric_tx[0], 20).max, 0.0);
}

/// A random plan of changes: what happens when, in a cluster with everything in it.
struct Change {
  Nanos at;
  enum { start, cancel, capacity } kind;
  FlowRequest request;   // start
  std::uint64_t victim;  // cancel: a tag
  LinkId link;           // capacity
  double factor;
};

Topology mixed_cluster() {
  auto specs = nodes(4, p5en());
  specs[3].nics = 4;
  return build_topology(
      specs, {.nodes_per_leaf = 2, .oversubscription = 4, .failed_rails = {{0, 2, 1}, {1, 5, 0}}}, "test");
}

std::vector<Change> random_plan(const Topology& t, int changes, std::uint64_t seed, bool faults) {
  Random random(seed, Purpose::arrivals);
  std::vector<Change> plan;
  Nanos now = 0;
  for (int i = 0; i < changes; ++i) {
    if (random.below(3) != 0) now += static_cast<Nanos>(random.exponential(150'000));  // else a tie
    Change change{.at = now, .kind = Change::start, .request = {}, .victim = 0, .link = 0, .factor = 1};
    const std::uint64_t what = random.below(20);
    if (what == 0 && i > 10) {
      change.kind = Change::cancel;
      change.victim = static_cast<std::uint64_t>(i) - 1 - random.below(10);
    } else if (what == 1 && faults) {
      change.kind = Change::capacity;
      change.link = static_cast<LinkId>(random.below(t.links.size()));
      change.factor = static_cast<double>(1 + random.below(4)) / 4;
    }
    FlowRequest& r = change.request;
    r.source = static_cast<GpuId>(random.below(static_cast<std::uint64_t>(t.gpus())));
    do {
      r.destination = static_cast<GpuId>(random.below(static_cast<std::uint64_t>(t.gpus())));
    } while (r.destination == r.source);
    r.bytes = static_cast<Bytes>(random.exponential(8e6));
    r.op = random.below(2) == 0 ? Op::read : Op::write;
    r.operation_bytes = Bytes{1} << (12 + random.below(10));
    if (random.below(2) == 0) r.rate_cap = static_cast<double>(r.operation_bytes) / 2430;
    r.tag = static_cast<std::uint64_t>(i);
    plan.push_back(change);
  }
  return plan;
}

struct Outcome {
  std::map<std::uint64_t, Nanos> ends;
  std::map<std::uint64_t, Bytes> cancelled;
  std::vector<LinkUse> links;
  FlowTotals totals;
  Nanos end = 0;
};

/// Drives a network as the cluster does: completions of an instant, then its changes, then one solve.
Outcome drive(const Topology& t, const std::vector<Change>& plan, Resolve resolve) {
  Network network(t, resolve);
  Outcome out;
  std::map<std::uint64_t, FlowId> ids;
  std::vector<Completion> done;
  Nanos now = 0;
  for (std::size_t i = 0; i < plan.size() || network.in_flight() > 0;) {
    const Nanos completion = network.next_completion(now);
    now = std::min(completion, i < plan.size() ? plan[i].at : kNever);
    if (completion == now) {
      network.complete(now, done);
      for (const Completion& c : done) out.ends[c.tag] = now, ids.erase(c.tag);
    }
    for (; i < plan.size() && plan[i].at == now; ++i) {
      const Change& change = plan[i];
      if (change.kind == Change::start) {
        ids[change.request.tag] = network.start(now, change.request);
      } else if (change.kind == Change::capacity) {
        network.set_capacity(now, change.link, change.factor);
      } else if (const auto it = ids.find(change.victim); it != ids.end()) {
        out.cancelled[change.victim] = network.cancel(now, it->second);
        ids.erase(it);
      }
    }
  }
  out.end = now;
  out.totals = network.totals();
  for (std::size_t l = 0; l < t.links.size(); ++l) {
    out.links.push_back(network.link_use(static_cast<LinkId>(l), now));
  }
  return out;
}

/// The same, the plain way: at every change all remaining bytes are brought up to date in long double and
/// all rates are found by raising them together, link by link.
std::map<std::uint64_t, Nanos> integrate(const Topology& t, const std::vector<Change>& plan) {
  struct Moving {
    const FlowRequest* request;
    Route path;
    long double remaining, rate;
  };
  std::map<std::uint64_t, Moving> moving;
  std::map<std::uint64_t, Nanos> ends;
  std::vector<long double> capacity;
  for (const Link& link : t.links) capacity.push_back(link.capacity);
  const auto crossings = [&](const Moving& m, auto&& visit) {
    for (std::int32_t i = 0; i < m.path.links; ++i) {
      const auto l = static_cast<std::size_t>(m.path.link[static_cast<std::size_t>(i)]);
      const Fabric* f = t.links[l].fabric;
      visit(l, f ? 1.0L / efficiency(*f, m.request->op, m.request->operation_bytes) : 1.0L);
    }
  };
  Nanos now = 0;
  for (std::size_t i = 0; i < plan.size() || !moving.empty();) {
    for (auto& [tag, m] : moving) m.rate = -1;
    for (std::size_t left = moving.size(); left > 0;) {
      std::vector<long double> room = capacity, weight(capacity.size(), 0);
      for (const auto& entry : moving) {
        const long double rate = entry.second.rate;
        crossings(entry.second, [&](std::size_t l, long double w) {
          (rate >= 0 ? room : weight)[l] += rate >= 0 ? -w * rate : w;
        });
      }
      long double level = INFINITY;
      for (std::size_t l = 0; l < room.size(); ++l) {
        if (weight[l] > 0) level = std::min(level, room[l] / weight[l]);
      }
      for (auto& [tag, m] : moving) {
        if (m.rate < 0) level = std::min<long double>(level, m.request->rate_cap);
      }
      for (auto& [tag, m] : moving) {
        if (m.rate >= 0) continue;
        bool stop = m.request->rate_cap <= level * (1 + 1e-15L);
        crossings(m, [&](std::size_t l, long double) {
          stop = stop || (weight[l] > 0 && room[l] / weight[l] <= level * (1 + 1e-15L));
        });
        if (stop) m.rate = level, --left;
      }
    }
    const auto end_of = [&](const Moving& m) {
      return now + static_cast<Nanos>(std::ceil(std::max(0.0L, m.remaining / m.rate - 1e-9L)));
    };
    Nanos next = i < plan.size() ? plan[i].at : kNever;
    for (const auto& [tag, m] : moving) next = std::min(next, end_of(m));
    for (auto it = moving.begin(); it != moving.end();) {
      auto& [tag, m] = *it;
      const bool ends_here = end_of(m) == next;
      if (ends_here) ends[tag] = next;
      m.remaining -= m.rate * static_cast<long double>(next - now);
      it = ends_here ? moving.erase(it) : std::next(it);
    }
    now = next;
    for (; i < plan.size() && plan[i].at == now; ++i) {
      const Change& c = plan[i];
      if (c.kind == Change::cancel) moving.erase(c.victim);
      if (c.kind == Change::capacity) {
        capacity[static_cast<std::size_t>(c.link)] =
            t.links[static_cast<std::size_t>(c.link)].capacity * c.factor;
      }
      if (c.kind != Change::start) continue;
      moving[c.request.tag] = {&c.request, route(t, c.request.source, c.request.destination),
                               static_cast<long double>(c.request.bytes), 0};
    }
  }
  return ends;
}

TEST(Network, ALongRandomRunAgreesWithAPlainIntegrator) {
  const Topology t = mixed_cluster();
  const auto plan = random_plan(t, 2000, 11, true);
  const Outcome run = drive(t, plan, Resolve::component);
  const auto plain = integrate(t, plan);
  EXPECT_GT(run.cancelled.size(), 20u);
  EXPECT_GT(run.ends.size(), 1500u);
  for (const auto& [tag, end] : plain) {
    if (run.cancelled.contains(tag)) continue;
    ASSERT_TRUE(run.ends.contains(tag)) << tag;
    ASSERT_NEAR(static_cast<double>(run.ends.at(tag)), static_cast<double>(end), 2) << tag;
  }
}

TEST(Network, BytesAreConserved) {
  const Topology t = mixed_cluster();
  const auto plan = random_plan(t, 2000, 12, true);
  const Outcome run = drive(t, plan, Resolve::component);
  EXPECT_EQ(run.totals.started, run.totals.completed + run.totals.cancelled);
  EXPECT_EQ(run.totals.requested, run.totals.delivered + run.totals.abandoned);
  Bytes delivered = 0, sent = 0, received = 0;
  for (const Change& change : plan) {
    if (change.kind != Change::start) continue;
    const auto cut = run.cancelled.find(change.request.tag);
    delivered += cut == run.cancelled.end() ? change.request.bytes : cut->second;
  }
  for (std::size_t l = 0; l < t.links.size(); ++l) {
    if (t.links[l].fabric == nullptr) continue;  // the core carries what the NICs do, again
    (l % 2 == 0 ? sent : received) += run.links[l].bytes;
    EXPECT_GE(run.links[l].max, run.links[l].mean);
    EXPECT_LE(run.links[l].max, 1.0);
  }
  EXPECT_EQ(run.totals.delivered, delivered);
  EXPECT_EQ(sent, delivered);
  EXPECT_EQ(received, delivered);
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.ends, b.ends);
  EXPECT_EQ(a.cancelled, b.cancelled);
  for (std::size_t l = 0; l < a.links.size(); ++l) {
    EXPECT_EQ(a.links[l].bytes, b.links[l].bytes) << l;
    EXPECT_EQ(a.links[l].mean, b.links[l].mean) << l;
    EXPECT_EQ(a.links[l].max, b.links[l].max) << l;
  }
}

TEST(Network, SolvingOnlyWhatAChangeReachesGivesTheSameBits) {
  const Topology t = mixed_cluster();
  const auto plan = random_plan(t, 2000, 13, true);
  expect_same_bits(drive(t, plan, Resolve::component), drive(t, plan, Resolve::everything));
}

// 2^16 changes elsewhere, each of which re-solves everything: the flow is not settled, hence not rounded,
// once.
TEST(Network, WhatKeepsItsRateIsNotTouched) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t, Resolve::everything);
  for (GpuId g = 0; g < 3; ++g) network.start(0, flow(0, 8 + g, kGB, static_cast<std::uint64_t>(g)));
  const Nanos end = network.next_completion(0);
  EXPECT_EQ(end, 60'000'000);
  for (Nanos now = 1; now <= 1 << 16; ++now) {
    network.set_capacity(now, t.fabric_tx[5], now % 2 == 0 ? 1.0 : 0.5);
    ASSERT_EQ(network.next_completion(now), end);
  }
}

TEST(Network, TheOrderOfStartingWithinAnInstantDoesNotMatter) {
  const Topology t = mixed_cluster();
  const auto plan = random_plan(t, 2000, 14, false);
  auto reversed = plan;
  std::ranges::stable_sort(reversed, [](const Change& a, const Change& b) {
    if (a.at != b.at) return a.at < b.at;
    return a.kind != b.kind ? a.kind < b.kind : a.request.tag > b.request.tag;
  });
  auto sorted = plan;
  std::ranges::stable_sort(
      sorted, [](const Change& a, const Change& b) { return a.at != b.at ? a.at < b.at : a.kind < b.kind; });
  expect_same_bits(drive(t, sorted, Resolve::component), drive(t, reversed, Resolve::component));
}

// Nodes 0 and 1 under one leaf, 2 and 3 under the other: a plan within each pair, alone and together.
TEST(Network, FlowsElsewhereDoNotMoveAnEndByABit) {
  const Topology t = build_topology(nodes(4, p5en()), {.nodes_per_leaf = 2}, "test");
  const auto within = [&](GpuId first, std::uint64_t seed) {
    auto plan = random_plan(t, 600, seed, false);
    for (Change& change : plan) {
      FlowRequest& r = change.request;
      r.source = first + r.source % 16;
      r.destination = first + r.destination % 16;
      if (r.source == r.destination) r.destination = first + (r.destination - first + 1) % 16;
      r.tag = 2 * r.tag + (first > 0 ? 1 : 0);
      change.victim = 2 * change.victim + (first > 0 ? 1 : 0);
    }
    return plan;
  };
  const auto a = within(0, 15), b = within(16, 16);
  auto both = a;
  both.insert(both.end(), b.begin(), b.end());
  std::ranges::stable_sort(both, {}, &Change::at);
  auto apart = drive(t, a, Resolve::component).ends;
  apart.merge(drive(t, b, Resolve::component).ends);
  EXPECT_EQ(drive(t, both, Resolve::component).ends, apart);
}

// A flow is counted on each link of its route, and on no other, from its start until it ends or is cancelled:
// the recount below knows only routes. Standing still it is still there.
TEST(Network, FlowsOnALinkAreThoseWhoseRouteCrossesIt) {
  const Topology t = build_topology(nodes(4, lossless()), {.nodes_per_leaf = 2}, "test");
  Network network(t);
  Random random(17, Purpose::arrivals);
  std::map<FlowId, Route> moving;
  const auto recount = [&] {
    std::vector<std::int32_t> want(t.links.size(), 0);
    for (const auto& [id, path] : moving) {
      for (std::int32_t i = 0; i < path.links; ++i) {
        ++want[static_cast<std::size_t>(path.link[static_cast<std::size_t>(i)])];
      }
    }
    for (std::size_t l = 0; l < want.size(); ++l) {
      ASSERT_EQ(network.flows(static_cast<LinkId>(l)), want[l]) << t.link_names[l];
    }
  };
  std::int32_t most = 0;
  std::vector<Completion> done;
  for (Nanos now = 0; now < 400; ++now) {
    const auto source = static_cast<GpuId>(random.below(32));
    const auto destination = static_cast<GpuId>((source + 1 + static_cast<GpuId>(random.below(31))) % 32);
    const FlowId id =
        network.start(now, flow(source, destination, 200 + static_cast<Bytes>(random.below(3000)),
                                static_cast<std::uint64_t>(now)));
    moving[id] = route(t, source, destination);
    recount();
    if (random.below(4) == 0) {
      const auto victim = std::next(moving.begin(), static_cast<std::ptrdiff_t>(random.below(moving.size())));
      network.cancel(now, victim->first);
      moving.erase(victim);
      recount();
    }
    if (now == 200) network.set_capacity(now, t.leaf_up[0], 0);
    if (network.next_completion(now) == now) {
      network.complete(now, done);
      for (const Completion& completion : done) moving.erase(completion.flow);
      network.next_completion(now);
    }
    recount();
    most = std::max(most, network.flows(t.leaf_up[0]));
  }
  EXPECT_GT(most, 5);
}

TEST(Network, TimeThatMovesOnWithoutASolveIsABug) {
  const Topology t = build_topology(nodes(2, lossless()), {}, "test");
  Network network(t);
  network.start(0, flow(0, 8, 1000, 1));
  EXPECT_THROW(network.start(1, flow(0, 8, 1000, 2)), InternalError);
  Network late(t);
  late.start(0, flow(0, 8, 1000, 1));
  late.next_completion(0);
  EXPECT_THROW(late.start(21, flow(0, 8, 1000, 2)), InternalError) << "the end at 20 was missed";
}

}  // namespace
}  // namespace pdsim
