// A hand-over by pull, from the lease on prefill's blocks to the notification that frees them: steps 2
// to 8 of sim/transfer/pull.hpp.
#include <algorithm>

#include "sim/cluster/simulation.hpp"

namespace pdsim {

// A prefill leg is done: hand over, or, when no output was asked for, end.
void Simulation::prefill_finished(SeqId id) {
  const std::uint32_t request = sequences_[id].request;
  const std::uint32_t worker = legs_[id].worker;
  RequestRecord& record = result_.requests[request];
  record.charge(Stage::prefill, now());
  record.local_hit_tokens = sequences_[id].hit_tokens;
  load_[worker].prefill_tokens -= routed_prefill_tokens_[request];
  --load_[worker].requests;
  last_progress_ = now();
  if (record.output_tokens == 0) {
    engines_[worker].release(id, sequences_);
    finish(request, RequestStatus::completed, Reason::none);
    free_sequence(id);
    return;
  }
  WorkerState& state = workers_[worker];
  Leg& leg = legs_[id];
  leg.held_since = now();
  leg.expiry = now() + s_.transfer.kv_lease_duration;
  state.leased.push_back(id);
  state.least_expiry = std::min(state.least_expiry, leg.expiry);
  prefill_leg_[request] = id;
  queue_.push(now() + s_.router.hop, Phase::arrival, kDeliver, request, 1, kSecondLeg | record.decode_worker);
}

// Frees a prefill leg's blocks: decode has read them, or the lease has run out.
void Simulation::free_leased(SeqId id) {
  Leg& leg = legs_[id];
  WorkerState& state = workers_[leg.worker];
  const PoolPlan& pool = pool_of(leg.worker);
  Engine& engine = engines_[leg.worker];
  result_.transfers.prefill_byte_seconds +=
      engine.pool().size(sequences_[id].table) * pool.kv_bytes_per_block *
      static_cast<double>(d_.workers[leg.worker].gpus.size()) * to_seconds(now() - leg.held_since);
  engine.release(id, sequences_);
  std::erase(state.leased, id);
  if (prefill_leg_[sequences_[id].request] == id) prefill_leg_[sequences_[id].request] = kNoSeq;
  if (leg.peer != kNoSeq) legs_[leg.peer].peer = kNoSeq;
  free_sequence(id);
}

void Simulation::take_notifications(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  for (const WorkerState::Beat& beat : state.heartbeats) {
    for (const SeqId id : state.leased) {
      const SeqId peer = legs_[id].peer;
      if (peer == kNoSeq || legs_[peer].worker != beat.from || legs_[peer].tracked_since > beat.sent)
        continue;
      legs_[id].expiry =
          std::max(legs_[id].expiry, now() + heartbeat_extension(s_.transfer.kv_lease_duration));
    }
  }
  state.heartbeats.clear();
  for (const SeqId id : state.read_done) free_leased(id);
  state.read_done.clear();
}

void Simulation::expire_leases(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  if (now() < state.least_expiry) return;
  std::vector<SeqId> expired;
  state.least_expiry = kNever;
  for (const SeqId id : state.leased) {
    if (legs_[id].expiry <= now()) {
      expired.push_back(id);
    } else {
      state.least_expiry = std::min(state.least_expiry, legs_[id].expiry);
    }
  }
  for (const SeqId id : expired) {
    ++result_.transfers.leases_expired;
    free_leased(id);
  }
}

// The loads and refusals of the step that starts now.
void Simulation::start_loads(std::uint32_t worker) {
  Step& step = engines_[worker].current();
  WorkerState& state = workers_[worker];
  for (const SeqId id : step.declined) {  // the rest is computed here; prefill may free its blocks
    const Sequence& s = sequences_[id];
    RequestRecord& record = result_.requests[s.request];
    record.charge(Stage::handoff_dispatch, s.considered);
    record.charge(Stage::decode_admission, s.admitted);
    record.recomputed_tokens += s.prompt - s.hit_tokens;
    std::erase(state.tracked, id);
    notify_read_done(id);
  }
  for (const SeqId id : step.loads) {
    const Sequence& s = sequences_[id];
    RequestRecord& record = result_.requests[s.request];
    record.charge(Stage::handoff_dispatch, s.considered);
    record.charge(Stage::decode_admission, s.admitted);
    record.charge(Stage::handoff_dispatch, now());  // behind the step that was in flight
    const std::uint32_t peer = record.prefill_worker;
    Contact& contact = state.contacts[peer];
    if (contact.state == Contact::made && now() - contact.last > s_.transfer.engine_ttl) {
      contact.state = Contact::none;
    }
    if (contact.state == Contact::made) {
      state.ready.push_back(id);
    } else {
      state.shaking.push_back(id);
      shake_hands(worker, peer);
    }
  }
}

// First contact: one query for each remote rank that a rank must read from, one background thread.
void Simulation::shake_hands(std::uint32_t worker, std::uint32_t peer) {
  WorkerState& state = workers_[worker];
  Contact& contact = state.contacts[peer];
  if (contact.state != Contact::none) return;
  contact.state = Contact::under_way;
  const std::int32_t sources = layout_between(d_, static_cast<std::size_t>(d_.workers[peer].pool),
                                              static_cast<std::size_t>(d_.workers[worker].pool))
                                   .sources;
  const Nanos begin = std::max(now(), state.handshakes_until);
  state.handshakes_until = begin + sources * s_.transfer.handshake;
  queue_.push(state.handshakes_until, Phase::completion, kContact, worker, peer, peer);
}

void Simulation::on_contact(std::uint32_t worker, std::uint32_t peer) {
  ++messages_;
  last_progress_ = now();
  WorkerState& state = workers_[worker];
  state.contacts[peer] = {Contact::made, now()};
  std::erase_if(state.shaking, [&](SeqId id) {
    if (result_.requests[sequences_[id].request].prefill_worker != peer) return false;
    state.ready.push_back(id);
    return true;
  });
  if (!state.ready.empty()) news(worker, false);
}

void Simulation::send_heartbeats(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  if (state.tracked.empty() ||
      now() < state.last_heartbeat + heartbeat_interval(s_.transfer.kv_lease_duration)) {
    return;
  }
  state.last_heartbeat = now();
  std::vector<std::uint32_t> peers;
  for (const SeqId id : state.tracked) {
    const std::uint32_t peer = result_.requests[sequences_[id].request].prefill_worker;
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
  }
  for (const std::uint32_t peer : peers) {
    if (state.contacts[peer].state == Contact::made) {
      queue_.push(now() + s_.transfer.notification, Phase::arrival, kHeartbeat, peer, worker, worker);
    } else {
      shake_hands(worker, peer);
    }
  }
}

// Posts the READs of every load that is ready, one after the other on the forward thread (each rank on
// its own, all alike). Returns how long that took.
Nanos Simulation::post_ready(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  Engine& engine = engines_[worker];
  Nanos delay = 0;
  for (const SeqId id : state.ready) {
    Leg& leg = legs_[id];
    const Sequence& s = sequences_[id];
    if (leg.peer == kNoSeq) {
      load_failed(id, Stage::transfer_post);
      continue;
    }
    RequestRecord& record = result_.requests[s.request];
    const std::uint32_t source = record.prefill_worker;
    const std::int32_t first = s.hit_tokens / engine.limits().block_size;
    const std::int32_t count = engine.pool().size(s.table) - first;
    const std::int32_t runs = common_runs(engines_[source].pool(), sequences_[leg.peer].table, first,
                                          engine.pool(), s.table, first, count, scratch_);
    std::uint32_t t;
    if (free_transfers_.empty()) {
      t = static_cast<std::uint32_t>(transfers_.size());
      transfers_.emplace_back();
    } else {
      t = free_transfers_.back();
      free_transfers_.pop_back();
    }
    Transfer& transfer = transfers_[t];
    const PullPlan plan = plan_pull(d_, s_.transfer, source, worker, count, runs);
    const Nanos begin = now() + delay;
    transfer = {id, plan.parts(), plan, begin + plan.posting};
    leg.transfer = t;
    for (std::int32_t j = 0; j < plan.layout.sources; ++j) {
      queue_.push(begin + plan.flow_start(j), Phase::completion, kFlowStart, t, static_cast<std::uint32_t>(j),
                  static_cast<std::uint64_t>(j));
    }
    delay += plan.posting;
    record.charge(Stage::transfer_post, transfer.post_end);
    record.transferred_tokens = s.prompt - s.hit_tokens;
    record.transfer_bytes = plan.part_bytes * plan.parts();
    record.descriptors = plan.descriptors * plan.layout.ranks;
    ++result_.transfers.count;
    result_.transfers.bytes += record.transfer_bytes;
    result_.transfers.descriptors += record.descriptors;
    if (record.counted) result_.transfers.post_ms.push_back(to_ms(plan.posting));
    state.contacts[source].last = now();
  }
  state.ready.clear();
  return delay;
}

void Simulation::on_flow_start(std::uint32_t t, std::int32_t source) {
  ++messages_;
  const Transfer& transfer = transfers_[t];
  const Leg& leg = legs_[transfer.seq];
  const RequestRecord& record = result_.requests[sequences_[transfer.seq].request];
  const std::vector<GpuId>& from = d_.workers[record.prefill_worker].gpus;
  const std::vector<GpuId>& to = d_.workers[leg.worker].gpus;
  const PullPlan& plan = transfer.plan;
  for (std::int32_t rank = 0; rank < plan.layout.ranks; ++rank) {
    const std::int32_t remote =
        source_rank(plan.layout, static_cast<std::int32_t>(from.size()), rank, source);
    FlowRequest flow;
    flow.source = from[static_cast<std::size_t>(remote)];
    flow.destination = to[static_cast<std::size_t>(rank)];
    flow.bytes = plan.part_bytes;
    flow.op = Op::read;
    flow.operation_bytes = plan.operation_bytes;
    flow.rate_cap = plan.rate_cap;
    flow.tag = std::uint64_t{t} << 32 | static_cast<std::uint64_t>(rank * plan.layout.sources + source);
    network_.start(now(), flow);
  }
  network_dirty_ = true;
}

void Simulation::on_network() {
  network_.complete(now(), completions_);
  network_dirty_ = true;
  for (const Completion& completion : completions_) {
    ++messages_;
    const auto t = static_cast<std::uint32_t>(completion.tag >> 32);
    Transfer& transfer = transfers_[t];
    if (--transfer.parts_left == 0) {
      queue_.push(std::max(now() + transfer.plan.latency, transfer.post_end), Phase::completion, kLanded, t,
                  0, 0);
    }
  }
}

void Simulation::on_landed(std::uint32_t t) {
  ++messages_;
  last_progress_ = now();
  const SeqId id = transfers_[t].seq;
  RequestRecord& record = result_.requests[sequences_[id].request];
  record.charge(Stage::transfer_wire, now());
  if (record.counted) result_.transfers.wire_ms.push_back(to_ms(now() - transfers_[t].post_end));
  workers_[legs_[id].worker].landed.push_back(id);
  news(legs_[id].worker, false);
}

void Simulation::poll_landed(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  for (const SeqId id : state.landed) {
    free_transfers_.push_back(legs_[id].transfer);
    if (legs_[id].peer == kNoSeq) {
      load_failed(id, Stage::transfer_poll);
      continue;
    }
    Sequence& s = sequences_[id];
    RequestRecord& record = result_.requests[s.request];
    record.charge(Stage::transfer_poll, now());
    record.recomputed_tokens += 1;  // the last prompt token, for token 1
    engines_[worker].loaded(id, s.prompt, sequences_);
    std::erase(state.tracked, id);
    notify_read_done(id);
  }
  state.landed.clear();
}

// Tells prefill that decode needs its blocks no longer, if it still has them.
void Simulation::notify_read_done(SeqId id) {
  const SeqId peer = legs_[id].peer;
  if (peer == kNoSeq) return;
  legs_[id].peer = legs_[peer].peer = kNoSeq;
  queue_.push(now() + s_.transfer.notification, Phase::arrival, kReadDone, legs_[peer].worker, peer,
              std::uint64_t{legs_[peer].generation} << 32 | peer);
}

// Counts what a decode leg has held until now, the blocks of its whole prompt: until it runs, or fails.
void Simulation::settle_held(SeqId id) {
  const Sequence& s = sequences_[id];
  const std::uint32_t worker = legs_[id].worker;
  const PoolPlan& pool = pool_of(worker);
  const std::int32_t blocks = (s.prompt + pool.engine.block_size - 1) / pool.engine.block_size;
  result_.transfers.decode_byte_seconds += blocks * pool.kv_bytes_per_block *
                                           static_cast<double>(d_.workers[worker].gpus.size()) *
                                           to_seconds(now() - s.admitted);
}

// The lease ran out before the KV was read: what decode would have is somebody else's.
void Simulation::load_failed(SeqId id, Stage stage) {
  const std::uint32_t worker = legs_[id].worker;
  Sequence& s = sequences_[id];
  RequestRecord& record = result_.requests[s.request];
  record.charge(stage, now());
  ++result_.transfers.failed;
  std::erase(workers_[worker].tracked, id);
  if (s_.transfer.kv_load_failure_policy == "recompute") {
    record.recomputed_tokens += s.prompt - s.hit_tokens;
    s.load_tokens = 0;
    engines_[worker].loaded(id, s.hit_tokens, sequences_);
    return;
  }
  settle_held(id);
  engines_[worker].abandon(id, sequences_);
  --load_[worker].requests;
  load_[worker].context_tokens -= s.prompt;
  finish(s.request, RequestStatus::failed, Reason::kv_lease_expired);
  free_sequence(id);
}

}  // namespace pdsim
