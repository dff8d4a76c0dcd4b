// Flows over time: who moves how fast, and when each is done.
//
// Flows share links max-min fairly. Rates change only when a flow starts, ends or is cancelled or a
// capacity changes; between changes nothing is computed. Changes of one instant are solved together, and
// only the flows that share links with them, directly or through others, are looked at.
//
// How to drive it: make the changes of an instant; after its last event ask next_completion(), and if epoch()
// has moved push one event at that time with the epoch as its argument; when an event pops whose epoch is
// still in force, call complete(). (Asking more than once in an instant is allowed and costs a solve each.)
//
// Invariants
//  1. A flow that is announced to end at t ends at t, with exactly its bytes, unless a change re-times it:
//     remaining bytes at rate r end after remaining / r, rounded up to the nanosecond once.
//  2. No link carries more than its capacity; rate x weight summed is checked after every solve.
//  3. A flow's rate and end depend on the flows that it shares links with, through their routes, sizes and
//     tags, not on the order in which they were started, nor by a bit on any other flow.
//  4. Bytes are integers: those of a link are the sum of what its flows delivered.
// Latency is the caller's (Route::latency): a flow ends when its last byte leaves the wire model. Good for
// transfers much longer than a round trip on a managed fabric; not for incast bursts or congestion control.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/network/fair_share.hpp"
#include "sim/network/topology.hpp"

namespace pdsim {

/// Names a flow from start() until it is completed or cancelled; then another may get it.
using FlowId = std::int32_t;

/// Data moves from `source` to `destination` whoever posts: a READ's source is the remote side.
struct FlowRequest {
  GpuId source = 0;
  GpuId destination = 0;
  Bytes bytes = 0;
  Op op = Op::read;
  Bytes operation_bytes = 0;  ///< of one wire operation, see wire_operation_bytes(); >= 1 unless bytes is 0
  double rate_cap = kUnbounded;  ///< bytes/ns; descriptor bytes over the time to post one
  std::uint64_t tag = 0;         ///< the caller's name for it, unique among flows in flight
};

struct Completion {
  FlowId flow;
  std::uint64_t tag;
  Nanos start;
  Bytes bytes;
};

/// Which flows a change re-solves: those it can reach, or (a test mode, same bits) all of them.
enum class Resolve : std::uint8_t { component, everything };

struct LinkUse {
  Bytes bytes = 0;
  double mean = 0, max = 0;  ///< share of the capacity taken, inefficiency included: at 1 nothing more fits
};

struct FlowTotals {
  std::uint64_t started = 0, completed = 0, cancelled = 0;
  Bytes requested = 0;  ///< of all flows started
  Bytes delivered = 0;  ///< by completed flows and, in part, by cancelled ones
  Bytes abandoned = 0;  ///< what cancelled flows did not deliver
};

class Network {
 public:
  /// Keeps a reference to `topology`.
  explicit Network(const Topology& topology, Resolve resolve = Resolve::component);

  /// Starts a flow at `now`. Requires that the two GPUs have a route. O(links of the route).
  FlowId start(Nanos now, const FlowRequest& request);
  /// Ends a flow without completing it; returns the whole bytes that it delivered. O(links of the route).
  Bytes cancel(Nanos now, FlowId flow);
  /// Sets a link's capacity to `factor` >= 0 times its nominal one; flows over a link at 0 stand still.
  void set_capacity(Nanos now, LinkId link, double factor);

  /// The earliest end of a flow under the rates from `now` on; kNever when none will end. Solves if anything
  /// changed at `now`. O(component) then, O(flows in flight) for the minimum, O(1) if nothing changed.
  Nanos next_completion(Nanos now);
  /// Removes the flows that end at `now` and writes them to `out`, by tag. `out` is cleared first.
  void complete(Nanos now, std::vector<Completion>& out);

  /// Grows whenever what next_completion() returns may need a new event: an event that carries an older
  /// epoch is stale.
  std::uint64_t epoch() const { return epoch_; }

  std::size_t in_flight() const { return in_flight_; }
  std::int32_t flows(LinkId link) const;  ///< that cross it now. O(them)
  double rate(FlowId flow) const { return flows_[static_cast<std::size_t>(flow)].rate; }  ///< bytes/ns
  const FlowTotals& totals() const { return totals_; }
  /// Bytes and utilisation of a link over [0, end]. Requires that all changes are solved and end is not
  /// before them. O(flows on the link).
  LinkUse link_use(LinkId link, Nanos end) const;
  /// Bytes that flows in flight have delivered by `now`. O(flows in flight).
  Bytes delivered_in_flight(Nanos now) const;

 private:
  static constexpr std::uint32_t kNil = UINT32_MAX;

  /// One crossing of a link by a flow, on that link's list. Named by slot * kMaxRouteLinks + position.
  struct Element {
    LinkId link;
    std::uint32_t next, previous;
    double weight;  ///< link capacity taken per unit of rate
  };
  struct Flow {
    std::array<Element, kMaxRouteLinks> element;
    std::uint32_t elements = 0;
    std::uint64_t gathered = 0;  ///< the solve that last looked at it
    double remaining = 0;        ///< bytes at `settled`
    double rate = 0;             ///< since `settled`
    double rate_cap = kUnbounded;
    Nanos settled = 0;
    Nanos start = 0;
    Bytes bytes = 0;
    std::uint64_t tag = 0;
    bool in_flight = false;
  };
  struct LinkState {
    double capacity = 0;
    double used = 0;      ///< since `settled`, of the capacity
    double integral = 0;  ///< utilisation x ns until `settled`
    double max = 0;       ///< utilisation until `settled`
    Nanos settled = 0;
    Bytes bytes = 0;  ///< of flows that have left
    std::uint32_t head = kNil;
    std::uint64_t gathered = 0;
    std::uint32_t local = 0;  ///< its index in the problem being solved
    bool dirty = false;
  };
  struct Member {
    std::uint64_t tag;
    std::uint32_t slot;
  };

  Flow& flow(FlowId id) { return flows_[static_cast<std::size_t>(id)]; }
  Element& element(std::uint32_t e) { return flows_[e / kMaxRouteLinks].element[e % kMaxRouteLinks]; }
  const Element& element(std::uint32_t e) const {
    return flows_[e / kMaxRouteLinks].element[e % kMaxRouteLinks];
  }
  void touch(Nanos now);
  void touch_link(Nanos now, LinkId link);
  void touch_links(Nanos now, FlowId id);
  void remove(FlowId id, Bytes delivered);
  double remaining_at(std::size_t slot, Nanos now) const;
  Bytes delivered(std::size_t slot, Nanos now) const;
  static void settle(LinkState& state, Nanos now);
  void gather();
  void solve(Nanos now);

  const Topology& topology_;
  Resolve resolve_;
  std::vector<LinkState> links_;
  std::vector<Flow> flows_;    ///< by slot; a FlowId is a slot
  std::vector<Nanos> finish_;  ///< by slot; kNever when standing still or free
  std::vector<FlowId> free_slots_;
  std::size_t in_flight_ = 0;
  FlowTotals totals_;

  std::vector<LinkId> dirty_links_;
  Nanos changed_at_ = kNever;  ///< the instant whose changes are not solved yet; kNever = none
  Nanos next_ = kNever;
  std::uint64_t epoch_ = 0;

  // Workspace of solve().
  FairShare fair_share_;
  std::uint64_t solves_ = 0;
  std::vector<LinkId> gathered_links_;
  std::vector<Member> members_;
  std::vector<double> capacity_, bound_, weight_, rate_, used_;
  std::vector<std::uint32_t> first_, link_;
};

}  // namespace pdsim
