#include "sim/network/network.hpp"

#include <algorithm>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

/// When `remaining` bytes end at `rate` from `now` on.
Nanos end_of(Nanos now, double remaining, double rate) {
  if (remaining <= 0) return now;
  const double duration = remaining / rate;
  return duration < 0x1p62 ? now + ceil_ns(duration) : kNever;
}

double utilisation(double used, double capacity) {
  return capacity > 0 ? std::min(used / capacity, 1.0) : 0.0;
}

}  // namespace

Network::Network(const Topology& topology, Resolve resolve)
    : topology_(topology), resolve_(resolve), links_(topology.links.size()) {
  for (std::size_t l = 0; l < links_.size(); ++l) links_[l].capacity = topology.links[l].capacity;
}

void Network::touch(Nanos now) {
  PDSIM_CHECK(changed_at_ == kNever || changed_at_ == now, "a change to the network was never solved");
  PDSIM_CHECK(now <= next_, "a flow ended and was not completed");
  changed_at_ = now;
}

void Network::touch_link(Nanos now, LinkId link) {
  touch(now);
  LinkState& state = links_[static_cast<std::size_t>(link)];
  if (!state.dirty) dirty_links_.push_back(link);
  state.dirty = true;
}

void Network::touch_links(Nanos now, FlowId id) {
  touch(now);
  const Flow& flow = this->flow(id);
  for (const Element& e : std::span(flow.element).first(flow.elements)) touch_link(now, e.link);
}

FlowId Network::start(Nanos now, const FlowRequest& request) {
  PDSIM_CHECK(request.bytes >= 0 && request.rate_cap > 0, "a flow of negative bytes or without any rate");
  touch(now);
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<FlowId>(flows_.size()));
    flows_.emplace_back();
    finish_.push_back(kNever);
  }
  const FlowId id = free_slots_.back();
  free_slots_.pop_back();
  const auto slot = static_cast<std::size_t>(id);
  Flow& flow = flows_[slot];
  flow = Flow{};
  flow.remaining = static_cast<double>(request.bytes);
  flow.rate_cap = request.rate_cap;
  flow.settled = flow.start = now;
  flow.bytes = request.bytes;
  flow.tag = request.tag;
  flow.in_flight = true;
  ++in_flight_;
  ++totals_.started;
  totals_.requested += request.bytes;
  if (request.bytes == 0) {
    finish_[slot] = now;
    return id;
  }
  const Route path = route(topology_, request.source, request.destination);
  PDSIM_CHECK(path.transport != Transport::none, "a flow between GPUs without a route");
  for (const LinkId link : std::span(path.link).first(static_cast<std::size_t>(path.links))) {
    const Fabric* fabric = topology_.links[static_cast<std::size_t>(link)].fabric;
    const double weight = fabric ? 1.0 / efficiency(*fabric, request.op, request.operation_bytes) : 1.0;
    LinkState& state = links_[static_cast<std::size_t>(link)];
    const auto e = static_cast<std::uint32_t>(slot * kMaxRouteLinks + flow.elements);
    if (state.head != kNil) element(state.head).previous = e;
    flow.element[flow.elements++] = {link, state.head, kNil, weight};
    state.head = e;
    touch_link(now, link);
  }
  return id;
}

// Takes the flow off its links, credits them with what it delivered, and frees its slot.
void Network::remove(FlowId id, Bytes delivered) {
  Flow& flow = this->flow(id);
  for (const Element& e : std::span(flow.element).first(flow.elements)) {
    LinkState& state = links_[static_cast<std::size_t>(e.link)];
    if (e.next != kNil) element(e.next).previous = e.previous;
    (e.previous != kNil ? element(e.previous).next : state.head) = e.next;
    state.bytes += delivered;
  }
  totals_.delivered += delivered;
  totals_.abandoned += flow.bytes - delivered;
  finish_[static_cast<std::size_t>(id)] = kNever;
  flow.in_flight = false;
  free_slots_.push_back(id);
  --in_flight_;
}

double Network::remaining_at(std::size_t slot, Nanos now) const {
  if (finish_[slot] <= now) return 0;
  const Flow& flow = flows_[slot];
  return std::max(0.0, flow.remaining - flow.rate * static_cast<double>(now - flow.settled));
}

Bytes Network::cancel(Nanos now, FlowId id) {
  touch_links(now, id);
  const Bytes bytes = delivered(static_cast<std::size_t>(id), now);
  remove(id, bytes);
  ++totals_.cancelled;
  return bytes;
}

void Network::set_capacity(Nanos now, LinkId link, double factor) {
  PDSIM_CHECK(factor >= 0, "a link of negative capacity");
  touch_link(now, link);
  LinkState& state = links_[static_cast<std::size_t>(link)];
  settle(state, now);
  state.capacity = topology_.links[static_cast<std::size_t>(link)].capacity * factor;
}

void Network::settle(LinkState& state, Nanos now) {
  if (now == state.settled) return;
  const double share = utilisation(state.used, state.capacity);
  state.integral += share * static_cast<double>(now - state.settled);
  state.max = std::max(state.max, share);
  state.settled = now;
}

// Collects the links and flows that the dirty links reach, directly or through others.
void Network::gather() {
  ++solves_;
  gathered_links_.clear();
  members_.clear();
  const auto reach = [&](LinkId link) {
    LinkState& state = links_[static_cast<std::size_t>(link)];
    if (state.gathered == solves_) return;
    state.gathered = solves_;
    gathered_links_.push_back(link);
  };
  for (const LinkId link : dirty_links_) {
    links_[static_cast<std::size_t>(link)].dirty = false;
    reach(link);
  }
  dirty_links_.clear();
  if (resolve_ == Resolve::everything) {
    for (std::size_t l = 0; l < links_.size(); ++l) reach(static_cast<LinkId>(l));
  }
  for (std::size_t i = 0; i < gathered_links_.size(); ++i) {
    const LinkState& state = links_[static_cast<std::size_t>(gathered_links_[i])];
    for (std::uint32_t e = state.head; e != kNil; e = element(e).next) {
      const std::uint32_t slot = e / kMaxRouteLinks;
      Flow& flow = flows_[slot];
      if (flow.gathered == solves_) continue;
      flow.gathered = solves_;
      members_.push_back({flow.tag, slot});
      for (const Element& other : std::span(flow.element).first(flow.elements)) reach(other.link);
    }
  }
  // By tag: neither the order in which flows started nor the slots they got may reach a rate.
  std::ranges::sort(members_, [](const Member& a, const Member& b) {
    return a.tag != b.tag ? a.tag < b.tag : a.slot < b.slot;
  });
}

void Network::solve(Nanos now) {
  gather();

  // The problem, its links numbered as the flows in order first cross them.
  constexpr std::uint32_t kUnnumbered = UINT32_MAX;
  for (const LinkId link : gathered_links_) links_[static_cast<std::size_t>(link)].local = kUnnumbered;
  capacity_.clear();
  bound_.clear();
  first_.assign(1, 0);
  link_.clear();
  weight_.clear();
  for (const Member& member : members_) {
    const Flow& flow = flows_[member.slot];
    for (const Element& e : std::span(flow.element).first(flow.elements)) {
      LinkState& state = links_[static_cast<std::size_t>(e.link)];
      if (state.local == kUnnumbered) {
        state.local = static_cast<std::uint32_t>(capacity_.size());
        capacity_.push_back(state.capacity);
      }
      link_.push_back(state.local);
      weight_.push_back(e.weight);
    }
    bound_.push_back(flow.rate_cap);
    first_.push_back(static_cast<std::uint32_t>(link_.size()));
  }
  rate_.resize(bound_.size());
  used_.resize(capacity_.size());
  fair_share_.solve({capacity_, bound_, first_, link_, weight_}, rate_, used_);

  // Only what changes is settled, so that an untouched flow keeps the end it was given, to the bit.
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const std::size_t slot = members_[i].slot;
    Flow& flow = flows_[slot];
    if (rate_[i] == flow.rate) continue;
    flow.remaining = remaining_at(slot, now);
    flow.settled = now;
    flow.rate = rate_[i];
    finish_[slot] = end_of(now, flow.remaining, flow.rate);
  }
  for (const LinkId link : gathered_links_) {
    LinkState& state = links_[static_cast<std::size_t>(link)];
    const double used = state.local == kUnnumbered ? 0.0 : used_[state.local];
    PDSIM_CHECK(used <= state.capacity * (1 + 1e-9), "a link carries more than its capacity");
    if (used == state.used) continue;
    settle(state, now);
    state.used = used;
  }
}

Nanos Network::next_completion(Nanos now) {
  if (changed_at_ == kNever) return next_;
  PDSIM_CHECK(changed_at_ == now, "a change to the network was not solved at its own instant");
  changed_at_ = kNever;
  if (!dirty_links_.empty()) solve(now);
  const Nanos next = finish_.empty() ? kNever : *std::ranges::min_element(finish_);
  if (next != next_) ++epoch_;
  return next_ = next;
}

void Network::complete(Nanos now, std::vector<Completion>& out) {
  out.clear();
  for (std::size_t slot = 0; slot < finish_.size(); ++slot) {
    PDSIM_CHECK(finish_[slot] >= now, "a flow ended and was not completed");
    if (finish_[slot] != now) continue;
    const Flow& flow = flows_[slot];
    // What rounding the end up adds is less than a nanosecond's worth; anything else is lost bytes.
    const double excess = flow.rate * static_cast<double>(now - flow.settled) - flow.remaining;
    const double noise = 1e-12 * static_cast<double>(flow.bytes) + 1e-6;
    PDSIM_CHECK(excess >= -noise && excess <= flow.rate + noise, "a flow ends without its bytes");
    out.push_back({static_cast<FlowId>(slot), flow.tag, flow.start, flow.bytes});
  }
  if (out.empty()) return;
  std::ranges::sort(out, [](const Completion& a, const Completion& b) {
    return a.tag != b.tag ? a.tag < b.tag : a.flow < b.flow;
  });
  for (const Completion& done : out) {
    touch_links(now, done.flow);
    remove(done.flow, done.bytes);
  }
  totals_.completed += out.size();
  ++epoch_;
}

Bytes Network::delivered(std::size_t slot, Nanos now) const {
  const auto bytes = static_cast<double>(flows_[slot].bytes);
  return static_cast<Bytes>(bytes - remaining_at(slot, now));
}

std::int32_t Network::flows(LinkId link) const {
  std::int32_t n = 0;
  for (std::uint32_t e = links_[static_cast<std::size_t>(link)].head; e != kNil; e = element(e).next) ++n;
  return n;
}

LinkUse Network::link_use(LinkId link, Nanos end) const {
  PDSIM_CHECK(changed_at_ == kNever || changed_at_ == end, "a change to the network was never solved");
  LinkState state = links_[static_cast<std::size_t>(link)];
  settle(state, end);
  LinkUse use{state.bytes, end > 0 ? state.integral / static_cast<double>(end) : 0.0, state.max};
  for (std::uint32_t e = state.head; e != kNil; e = element(e).next)
    use.bytes += delivered(e / kMaxRouteLinks, end);
  return use;
}

Bytes Network::delivered_in_flight(Nanos now) const {
  Bytes sum = 0;
  for (std::size_t slot = 0; slot < flows_.size(); ++slot) {
    if (flows_[slot].in_flight) sum += delivered(slot, now);
  }
  return sum;
}

}  // namespace pdsim
