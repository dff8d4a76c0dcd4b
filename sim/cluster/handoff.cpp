// KV on its way: what transfer/handoff.hpp asks for, done with queues, threads, messages and flows.
#include <algorithm>

#include "sim/cluster/simulation.hpp"

namespace pdsim {

// --------------------------------------------------------------------------------------- hand-overs

HandoffId Simulation::new_movement(std::uint32_t request, std::uint32_t from, std::uint32_t to, bool push) {
  HandoffId id;
  if (free_movements_.empty()) {
    id = static_cast<HandoffId>(movements_.size());
    movements_.emplace_back();
  } else {
    id = free_movements_.back();
    free_movements_.pop_back();
  }
  Movement& m = movements_[id];
  const std::uint32_t generation = m.generation;
  m = Movement{};
  m.generation = generation;
  m.request = request;
  m.from = from;
  m.to = to;
  m.state.push = push;
  m.state.source_known = !push;  // in the answer that the destination's request carries
  return id;
}

// Counts how it ended, once. Its slot is free when neither side nor a flow needs it.
void Simulation::over(HandoffId id, TransferOutcome outcome) {
  Movement& m = movements_[id];
  if (!m.closed) {
    m.closed = true;
    ++result_.transfers.outcomes[static_cast<std::size_t>(outcome)];
    if (m.read_back) ++result_.transfers.read_back_outcomes[static_cast<std::size_t>(outcome)];
  }
  maybe_free(id);
}

void Simulation::maybe_free(HandoffId id) {
  Movement& m = movements_[id];
  if (!m.closed || m.awaited || m.source != kNoSeq || m.destination != kNoSeq || m.batches > 0) return;
  ++m.generation;
  m.closed = false;
  if (movement_of_[m.request] == id) movement_of_[m.request] = kNone;
  free_movements_.push_back(id);
}

// The source's blocks are somebody else's from now on.
void Simulation::detach_source(HandoffId id) {
  if (id == kNone) return;
  Movement& m = movements_[id];
  legs_[m.source].outgoing = kNone;
  m.source = kNoSeq;
  if (m.state.push) {
    for (std::vector<HandoffId>* list : {&workers_[m.from].to_ship, &workers_[m.from].shipping,
                                         &workers_[m.from].unregistered, &workers_[m.from].shaking}) {
      std::erase(*list, id);
    }
  }
  if (m.state.push && m.state.wire != Handoff::Wire::landed && m.state.wire != Handoff::Wire::over) {
    advance(m.state, HandoffEvent::source_lost);
    if (!m.closed && m.batches == 0) over(id, TransferOutcome::dropped);  // decode waits for its watchdog
    return;
  }
  advance(m.state, HandoffEvent::source_lost);
  maybe_free(id);
}

void Simulation::detach_destination(HandoffId id) {
  if (id == kNone) return;
  Movement& m = movements_[id];
  legs_[m.destination].incoming = kNone;
  std::erase(workers_[m.to].tracked, m.destination);
  m.destination = kNoSeq;
  // What is still in flight would land in blocks that have become another's.
  if (m.state.wire != Handoff::Wire::over || m.batches > 0) advance(m.state, HandoffEvent::destination_lost);
  maybe_free(id);
}

void Simulation::happen(HandoffId id, HandoffEvent event) {
  Movement& m = movements_[id];
  const std::uint32_t actions = advance(m.state, event);
  if (actions & kRegister) send_registration(id);
  if (actions & kConnect) connect(id);
  if (actions & kPost) post(id);
  if (actions & kTellSource) {
    workers_[m.from].written.push_back(id);
    news(m.from, false);
  }
  if (actions & kTellDestination && !(m.state.push && lost(Message::completion))) {
    workers_[m.to].ended.push_back({id, m.generation});
    news(m.to, false);
  }
  if (actions & kNotifySource) notify_source(id);
  if (actions & kLoad) load(id);
  if (actions & kFailLoad) load_failed(id);
}

// A transfer would touch blocks that have changed hands: counted, and with the guard not done.
bool Simulation::stale(HandoffId id) {
  Movement& m = movements_[id];
  if (!m.state.stale()) return false;
  const bool guard = transfer_of(m).stale_guard;
  if (!m.stale_counted) {
    m.stale_counted = true;
    TransferTotals& t = result_.transfers;
    if (!m.state.source_owns) ++(guard ? t.stale_reads_prevented : t.stale_reads);
    if (!m.state.destination_owns) ++(guard ? t.stale_writes_prevented : t.stale_writes);
  }
  return guard;
}

// ---------------------------------------------------------------------------------------- contacts

bool Simulation::in_contact(std::uint32_t worker, std::uint32_t peer, const TransferConfig& t,
                            bool notifications_only) {
  Contact& contact = workers_[worker].contacts[peer];
  if (contact.state == Contact::made && now() - contact.last > t.engine_ttl) contact.state = Contact::none;
  return contact.state == Contact::made && (notifications_only || !contact.notifications_only);
}

// First contact: one query after the other to the remote ranks, by one background thread.
void Simulation::begin_contact(std::uint32_t worker, std::uint32_t peer, const TransferConfig& t, Op op,
                               bool notifications_only) {
  WorkerState& state = workers_[worker];
  Contact& contact = state.contacts[peer];
  if (contact.state == Contact::under_way) return;
  contact.state = Contact::under_way;
  contact.notifications_only = notifications_only;
  const bool no_answer = lost(Message::handshake) || down_[peer] != 0;
  const Nanos takes =
      no_answer ? t.handshake_timeout : first_contact_time(d_, t, op, worker, peer, notifications_only);
  const Nanos begin = std::max(now(), state.handshakes_until);
  state.handshakes_until = begin + takes;
  contact.last = state.handshakes_until;
  ++result_.transfers.handshakes;
  result_.transfers.handshake_time += takes;
  queue_.push(state.handshakes_until, Phase::completion, kContact, worker, peer,
              std::uint64_t{no_answer} << 32 | peer);
}

void Simulation::on_contact(std::uint32_t worker, std::uint32_t peer, bool failed) {
  ++messages_;
  last_progress_ = now();
  WorkerState& state = workers_[worker];
  Contact& contact = state.contacts[peer];
  if (contact.state != Contact::under_way || contact.last != now()) return;  // one that a crash has ended
  contact.state = failed ? Contact::none : Contact::made;
  std::vector<HandoffId> waiting;
  std::erase_if(state.shaking, [&](HandoffId id) {
    const Movement& m = movements_[id];
    if ((m.from == worker ? m.to : m.from) != peer) return false;
    waiting.push_back(id);
    return true;
  });
  for (const HandoffId id : waiting) {
    Movement& m = movements_[id];
    if (m.state.push && m.to == worker) {  // a registration; when it cannot be sent, nobody hears of it
      if (!failed) send_registration(id);
    } else if (!failed) {
      happen(id, HandoffEvent::connected);
    } else {
      m.failure = Reason::handshake_failed;
      happen(id, HandoffEvent::failed);
      if (m.state.push) over(id, TransferOutcome::dropped);
    }
  }
}

// The poster knows both sides: it posts as soon as it is in contact.
void Simulation::connect(HandoffId id) {
  Movement& m = movements_[id];
  m.matched = now();
  const std::uint32_t poster = m.state.push ? m.from : m.to;
  const std::uint32_t peer = m.state.push ? m.to : m.from;
  const TransferConfig& t = transfer_of(m);
  if (in_contact(poster, peer, t, false)) {
    happen(id, HandoffEvent::connected);
    return;
  }
  workers_[poster].shaking.push_back(id);
  begin_contact(poster, peer, t, m.state.push ? Op::write : Op::read, false);
}

// ----------------------------------------------------------------------------------------- posting

// READs go with the next step, on its forward thread, unless the worker has a thread for them.
void Simulation::post(HandoffId id) {
  Movement& m = movements_[id];
  const TransferConfig& t = transfer_of(m);
  if (!m.state.push && !t.background_receiver) {
    workers_[m.to].ready.push_back(id);
    news(m.to, false);
    return;
  }
  if (m.streaming && m.shipped < 0) return;  // chunk by chunk: send_chunks()
  post_rest(id, t.thread_contention);
}

// Posts all that has not been posted, beside the forward thread.
void Simulation::post_rest(HandoffId id, double contention) {
  Movement& m = movements_[id];
  WorkerState& state = workers_[m.state.push ? m.from : m.to];
  if (!may_post(id)) return;
  const Nanos begin = std::max(now(), state.thread_until);
  state.thread_until = begin + post_batch(id, begin, m.last_block - m.next_block, true, contention);
}

// The last check before a first post. A transfer that fails here is seen by the next poll.
bool Simulation::may_post(HandoffId id) {
  Movement& m = movements_[id];
  const TransferConfig& t = transfer_of(m);
  const Nanos left = m.expiry == kNever ? kNever : m.expiry - now() + m.clock_error;
  if (m.read_back && t.expiry_margin > 0 && left < t.expiry_margin) {
    m.failure = Reason::kv_retention_expired;
    result_.requests[m.request].reuse = Reuse::guard_declined;
  } else if (stale(id)) {
    m.failure = m.read_back ? Reason::kv_retention_expired : Reason::kv_lease_expired;
  } else {
    return true;
  }
  happen(id, HandoffEvent::failed);
  if (m.state.push) over(id, TransferOutcome::dropped);
  return false;
}

// Posts the next `blocks` of a hand-over from `begin` on, or a share of them. Returns how long the posting
// takes.
Nanos Simulation::post_batch(HandoffId id, Nanos begin, std::int32_t blocks, bool last, double contention,
                             Share share) {
  Movement& m = movements_[id];
  const TransferConfig& t = transfer_of(m);
  const std::int32_t first = m.next_block;
  // A side that has gone is read or written by the ids that the poster remembers: those of the other side
  // stand for them.
  const bool source = m.source != kNoSeq && sequences_[m.source].table != kNoTable;
  const bool destination = m.destination != kNoSeq && sequences_[m.destination].table != kNoTable;
  PDSIM_CHECK(source || destination, "a transfer between nobody and nobody");
  const std::uint32_t a = source ? m.from : m.to, b = destination ? m.to : m.from;
  const TableId table_a = sequences_[source ? m.source : m.destination].table;
  const TableId table_b = sequences_[destination ? m.destination : m.source].table;
  const std::int32_t runs =
      common_runs(engines_[a].pool(), table_a, first, engines_[b].pool(), table_b, first, blocks, scratch_);
  TransferPlan plan =
      plan_transfer(d_, t, m.state.push ? Op::write : Op::read, m.from, m.to, blocks, runs, contention);
  if (share.part != Share::whole) {
    const bool rest = share.part == Share::last;
    const std::int32_t layers = share.layers, parts = rest ? 1 : layers - 1;
    const auto share_of = [&](std::int64_t all) {
      const std::int64_t but_last = all * (layers - 1) / layers;
      return rest ? all - but_last : but_last;
    };
    plan.part_bytes = share_of(plan.part_bytes);
    plan.descriptors = std::max<std::int64_t>(1, share_of(plan.descriptors));
    // One post for each region, as its layer ends.
    const Nanos each = plan.layout.remotes(plan.op) * plan.fixed;
    const std::int32_t regions = std::max(1, plan.layout.regions * parts / layers);
    plan.posting = each * regions + ceil_ns(static_cast<double>(plan.posting - each) * parts / layers);
    if (!rest) {
      plan.rate_cap =
          std::min(plan.rate_cap, static_cast<double>(plan.part_bytes) / static_cast<double>(share.lasts));
    }
  }

  std::uint32_t index;
  if (free_batches_.empty()) {
    index = static_cast<std::uint32_t>(batches_.size());
    batches_.emplace_back();
  } else {
    index = free_batches_.back();
    free_batches_.pop_back();
  }
  Batch& batch = batches_[index];
  batch.handoff = id;
  batch.parts_left = plan.parts();
  batch.plan = plan;
  batch.post_end = begin + plan.posting;
  batch.flows.clear();
  ++m.batches;
  m.last_posted = m.last_posted || last;
  if (m.posted < 0) m.posted = begin;
  m.post_end = begin + plan.posting;
  m.posting += plan.posting;
  if (share.part != Share::but_last) m.next_block += blocks;
  for (std::int32_t turn = 0; turn < plan.layout.remotes(plan.op); ++turn) {
    ++starting_flows_;
    queue_.push(begin + plan.flow_start(turn), Phase::completion, kFlowStart, index,
                static_cast<std::uint32_t>(turn), static_cast<std::uint64_t>(turn));
  }
  const std::uint32_t poster = m.state.push ? m.from : m.to;
  workers_[poster].contacts[m.state.push ? m.to : m.from].last = now();

  TransferTotals& totals = result_.transfers;
  RequestRecord& record = result_.requests[m.request];
  ++totals.batches;
  if (plan.posting > t.slow_submit) ++totals.slow_posts;
  if (m.read_back) {
    totals.read_back_bytes += plan.bytes();
    totals.read_back_descriptors += plan.all_descriptors();
    record.read_back_bytes += plan.bytes();
    if (last) ++totals.read_backs;
    return plan.posting;
  }
  totals.bytes += plan.bytes();
  totals.descriptors += plan.all_descriptors();
  record.transfer_bytes += plan.bytes();
  record.descriptors += plan.all_descriptors();
  if (!last) return plan.posting;
  ++totals.count;
  if (destination) {
    const Sequence& d = sequences_[m.destination];
    record.transferred_tokens = d.prompt - d.hit_tokens;
    if (m.state.push && !ended(m.request)) {
      record.reach(Stage::handoff_dispatch, std::min(d.considered, now()));
      record.reach(Stage::decode_admission, std::min(d.admitted, now()));
      record.reach(Stage::handoff_dispatch, std::max(m.matched, record.mark));
    }
  }
  if (!ended(m.request)) record.reach(Stage::transfer_post, m.post_end);
  if (record.counted) totals.post_ms.push_back(to_ms(m.posting));
  return plan.posting;
}

// One after the other on the forward thread (each rank on its own, all alike). Returns how long it took.
Nanos Simulation::post_ready(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  Nanos delay = 0;
  for (const HandoffId id : state.ready) {
    const Movement& m = movements_[id];
    if (may_post(id)) delay += post_batch(id, now() + delay, m.last_block - m.next_block, true, 1);
  }
  state.ready.clear();
  return delay;
}

// ------------------------------------------------------------------------------------------- flows

void Simulation::on_flow_start(std::uint32_t index, std::int32_t turn) {
  ++messages_;
  --starting_flows_;
  Batch& batch = batches_[index];
  Movement& m = movements_[batch.handoff];
  const TransferPlan& plan = batch.plan;
  const std::vector<GpuId>& from = d_.workers[m.from].gpus;
  const std::vector<GpuId>& to = d_.workers[m.to].gpus;
  const bool broken = m.severed || down_[m.from] != 0 || down_[m.to] != 0 || stale(batch.handoff);
  for (std::int32_t rank = 0; rank < plan.layout.ranks; ++rank) {
    for (std::int32_t source = 0; source < plan.layout.sources; ++source) {
      if (turn_of(plan.layout, plan.op, rank, source) != turn) continue;
      if (broken || parts_to_fail_ > 0) {
        if (!broken) --parts_to_fail_;
        m.failed = true;
        --batch.parts_left;
        bytes_not_sent_ += plan.part_bytes;
        continue;
      }
      const std::int32_t remote =
          source_rank(plan.layout, static_cast<std::int32_t>(from.size()), rank, source);
      FlowRequest flow;
      flow.source = from[static_cast<std::size_t>(remote)];
      flow.destination = to[static_cast<std::size_t>(rank)];
      flow.bytes = plan.part_bytes;
      flow.op = plan.op;
      flow.operation_bytes = plan.operation_bytes;
      flow.rate_cap = plan.rate_cap;
      flow.tag = std::uint64_t{index} << 32 | static_cast<std::uint64_t>(rank * plan.layout.sources + source);
      batch.flows.push_back(network_.start(now(), flow));
      network_dirty_ = true;
    }
  }
  if (m.failed) part_failed(index);
}

// A part of a batch will never arrive. The failure is seen when the other parts have stopped, or at once.
void Simulation::part_failed(std::uint32_t index) {
  Batch& batch = batches_[index];
  const HandoffId id = batch.handoff;
  if (!transfer_of(movements_[id]).wait_for_siblings) fail(id);
  if (batch.parts_left == 0) queue_.push(now(), Phase::completion, kLanded, index, 0, 0);
}

void Simulation::fail(HandoffId id) {
  Movement& m = movements_[id];
  if (m.failure == Reason::none) {
    m.failure = m.stale_counted ? (m.read_back ? Reason::kv_retention_expired : Reason::kv_lease_expired)
                                : Reason::kv_transfer_failed;
  }
  const bool known = m.state.wire == Handoff::Wire::failed;
  happen(id, HandoffEvent::failed);
  if (!m.state.push || known) return;
  // The source logs it and drops the request; its blocks stay until the lease runs out, which may be now.
  if (m.source != kNoSeq && legs_[m.source].held_since >= 0) {
    workers_[m.from].least_expiry = std::min(workers_[m.from].least_expiry, legs_[m.source].expiry);
    if (workers_[m.from].mode != WorkerMode::asleep) news(m.from, false);
  }
  if (transfer_of(m).push_fail && m.destination != kNoSeq) {
    queue_.push(now() + transfer_of(m).notification, Phase::arrival, kPushFailed, id,
                m.generation & 0xffffffu, m.generation);
  }
  over(id, TransferOutcome::part_failed);
}

void Simulation::on_network() {
  network_.complete(now(), completions_);
  network_dirty_ = true;
  for (const Completion& completion : completions_) {
    ++messages_;
    const auto index = static_cast<std::uint32_t>(completion.tag >> 32);
    Batch& batch = batches_[index];
    std::erase(batch.flows, completion.flow);
    if (--batch.parts_left == 0) {
      queue_.push(std::max(now() + batch.plan.latency, batch.post_end), Phase::completion, kLanded, index, 0,
                  0);
    }
  }
}

void Simulation::on_landed(std::uint32_t index) {
  ++messages_;
  last_progress_ = now();
  const HandoffId id = batches_[index].handoff;
  free_batches_.push_back(index);
  Movement& m = movements_[id];
  --m.batches;
  if (!m.severed && stale(id)) m.failed = true;
  if (m.batches == 0 && m.failed) {
    fail(id);
  } else if (m.batches == 0 && m.last_posted) {
    RequestRecord& record = result_.requests[m.request];
    if (!m.read_back) {
      if (!ended(m.request)) record.reach(Stage::transfer_wire, now());
      if (record.counted) result_.transfers.wire_ms.push_back(to_ms(now() - m.post_end));
    }
    happen(id, HandoffEvent::landed);
  } else if (m.batches == 0 && m.source == kNoSeq) {
    over(id, TransferOutcome::dropped);  // nobody will post the rest
    return;
  }
  maybe_free(id);
}

// ---------------------------------------------------------------------------------- what a poll sees

void Simulation::poll(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  std::vector<Ref> ended;
  ended.swap(state.ended);
  for (const Ref& e : ended) {
    if (movements_[e.id].generation == e.generation) happen(e.id, HandoffEvent::seen);
  }
  for (const HandoffId id : state.written) {
    const SeqId source = movements_[id].source;
    if (source != kNoSeq) free_held(source);
  }
  state.written.clear();
  // What the writer thread finds when the step's end wakes it.
  std::vector<HandoffId> registered;
  for (const HandoffId id : state.unregistered) {
    if (movements_[id].registered) registered.push_back(id);
  }
  for (const HandoffId id : registered) match(id);
}

void Simulation::load(HandoffId id) {
  Movement& m = movements_[id];
  const SeqId seq = m.destination;
  if (seq == kNoSeq) {
    over(id, TransferOutcome::abandoned);
    return;
  }
  Engine& engine = engines_[m.to];
  if (legs_[seq].zombie || given_up(m.request)) {
    drop_zombie(seq);
    return;
  }
  Sequence& s = sequences_[seq];
  RequestRecord& record = result_.requests[m.request];
  if (m.read_back) {
    if (prefill_drives(m.request)) record.reach(Stage::reuse_transfer, now());
    record.remote_hit_tokens = s.load_tokens;
    record.read_took = now() - s.admitted;
    record.reuse =
        now() - s.admitted > record.predicted_compute ? Reuse::hit_slower_than_recompute : Reuse::hit;
    result_.retention.hit_tokens += s.load_tokens;
    avoided_gpu_s_[m.to] +=
        to_seconds(record.predicted_compute) * static_cast<double>(d_.workers[m.to].gpus.size());
  } else {
    record.reach(Stage::transfer_poll, now());
    record.recomputed_tokens += 1;  // the last prompt token, for token 1
  }
  engine.loaded(seq, s.remote_tokens, sequences_);
  over(id, TransferOutcome::completed);
  detach_destination(id);
}

// The request of a load has ended meanwhile: its blocks are free now.
void Simulation::drop_zombie(SeqId seq) {
  if (legs_[seq].handed_over) settle_held(seq);
  engines_[legs_[seq].worker].abandon(seq, sequences_);
  if (legs_[seq].incoming != kNone) over(legs_[seq].incoming, TransferOutcome::abandoned);
  free_sequence(seq);
}

void Simulation::load_failed(HandoffId id) {
  Movement& m = movements_[id];
  const SeqId seq = m.destination;
  const TransferOutcome outcome = m.failure == Reason::kv_transfer_failed ? TransferOutcome::part_failed
                                  : result_.requests[m.request].reuse == Reuse::guard_declined && m.read_back
                                      ? TransferOutcome::guard_declined
                                      : TransferOutcome::source_lost;
  ++result_.transfers.failed;
  if (seq == kNoSeq) {
    over(id, outcome);
    return;
  }
  if (legs_[seq].zombie || given_up(m.request)) {
    drop_zombie(seq);
    return;
  }
  Sequence& s = sequences_[seq];
  const std::uint32_t request = m.request;
  const Reason reason = m.failure;
  RequestRecord& record = result_.requests[request];
  const bool decode = !m.read_back, drives = decode || prefill_drives(request);
  if (drives) {
    record.reach(m.read_back    ? Stage::reuse_transfer
                 : m.posted < 0 ? Stage::transfer_post
                                : Stage::transfer_poll,
                 now());
    record.stop_posting(now());
  }
  if (m.read_back && record.reuse != Reuse::guard_declined) record.reuse = Reuse::load_failed;
  const bool recompute = transfer_of(m).kv_load_failure_policy == "recompute";
  over(id, outcome);
  detach_destination(id);
  if (decode) settle_held(seq);
  if (recompute) {
    if (decode) record.recomputed_tokens += s.prompt - s.hit_tokens;
    s.load_tokens = 0;
    engines_[legs_[seq].worker].loaded(seq, s.hit_tokens, sequences_);
    return;
  }
  engines_[legs_[seq].worker].abandon(seq, sequences_);
  free_sequence(seq);
  if (drives) {
    give_up(request, RequestStatus::failed, reason);
  } else {
    record.recomputed_tokens -= record.prompt_tokens;  // decode went ahead, and was the first to compute them
  }
}

// Tells the source that its blocks are needed no longer, if it still has them.
void Simulation::notify_source(HandoffId id) {
  const Movement& m = movements_[id];
  if (m.source == kNoSeq || lost(Message::read_done)) return;
  queue_.push(now() + transfer_of(m).notification, Phase::arrival, kReadDone, m.from, m.source,
              std::uint64_t{legs_[m.source].generation} << 32 | m.source);
}

// Counts what a decode leg has held until now, the blocks of its whole prompt: until it runs, or fails.
void Simulation::settle_held(SeqId id) {
  const Sequence& s = sequences_[id];
  const std::uint32_t worker = legs_[id].worker;
  const std::int32_t block = pool_of(worker).engine.block_size;
  const std::int32_t blocks = (s.prompt + block - 1) / block;
  result_.transfers.decode_byte_seconds += blocks * block_bytes(worker) * to_seconds(now() - s.admitted);
}

// ----------------------------------------------------------------------- prefill's end, leases, pins

// A prefill leg is done: hand over, or, when no output was asked for, end.
void Simulation::prefill_finished(SeqId id) {
  const std::uint32_t request = sequences_[id].request;
  const std::uint32_t worker = legs_[id].worker;
  RequestRecord& record = result_.requests[request];
  record.local_hit_tokens = sequences_[id].hit_tokens;
  drop_prefill_load(request);
  last_progress_ = now();
  const bool drives = prefill_drives(request);
  if (drives) record.reach(Stage::prefill, now());
  if (record.output_tokens == 0) {
    finish(request, RequestStatus::completed, Reason::none);
    engines_[worker].release(id, sequences_);
    free_sequence(id);
    return;
  }
  Leg& leg = legs_[id];
  const TransferConfig& t = transfer_of(worker, record.decode_worker);
  leg.expiry = now() + t.kv_lease_duration;
  hold(id, Hold::leased);
  if (push_) {
    if (leg.outgoing != kNone) workers_[worker].to_ship.push_back(leg.outgoing);
  } else {
    const HandoffId m = new_movement(request, worker, record.decode_worker, false);
    movement_of_[request] = leg.outgoing = m;
    movements_[m].source = id;
    movements_[m].awaited = true;
  }
  if (drives && window_cancels_ > 0) {
    --window_cancels_;
    give_up(request, RequestStatus::cancelled, Reason::client_cancelled);
    return;
  }
  if (!push_ || (s_.router.sequential_dispatch && drives)) {
    queue_.push(now() + to_engine(record.decode_worker, trace_.requests[request]), Phase::arrival, kDeliver,
                request, 1, kSecondLeg | record.decode_worker);
  }
}

void Simulation::hold(SeqId id, Hold cause) {
  Leg& leg = legs_[id];
  WorkerState& state = workers_[leg.worker];
  leg.held_since = now();
  leg.hold = cause;
  engines_[leg.worker].hold(cause, engines_[leg.worker].pool().size(sequences_[id].table));
  state.held.push_back(id);
  state.least_expiry = std::min(state.least_expiry, leg.expiry);
}

// The blocks that a finished sequence held are free now.
void Simulation::free_held(SeqId id) {
  Leg& leg = legs_[id];
  WorkerState& state = workers_[leg.worker];
  Engine& engine = engines_[leg.worker];
  const std::int32_t blocks = engine.pool().size(sequences_[id].table);
  const double held = blocks * block_bytes(leg.worker) * to_seconds(now() - leg.held_since);
  if (leg.hold == Hold::pinned) {
    pinned_byte_s_[leg.worker] += held;
    state.pinned_bytes -= blocks * block_bytes(leg.worker);
  } else {
    result_.transfers.prefill_byte_seconds += held;
  }
  engine.hold(leg.hold, -blocks);
  engine.release(id, sequences_);
  std::erase(state.held, id);
  if (!state.held.empty()) {  // who was stranded behind it comes next
    state.least_expiry = std::min(state.least_expiry, legs_[state.held.front()].expiry);
  }
  free_sequence(id);
}

void Simulation::take_notifications(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  for (const WorkerState::Beat& beat : state.heartbeats) {
    for (const SeqId id : state.held) {
      const HandoffId m = legs_[id].outgoing;
      const SeqId peer = m == kNone ? kNoSeq : movements_[m].destination;
      if (peer == kNoSeq || movements_[m].read_back || legs_[peer].worker != beat.from ||
          legs_[peer].tracked_since < 0 || legs_[peer].tracked_since > beat.sent) {
        continue;
      }
      legs_[id].expiry =
          std::max(legs_[id].expiry, now() + transfer_of(worker, beat.from).heartbeat_extension);
    }
  }
  state.heartbeats.clear();
  for (const Ref& done : state.read_done) {
    if (legs_[done.id].generation != done.generation) continue;  // let go of meanwhile
    if (legs_[done.id].hold == Hold::pinned) {
      const HandoffId m = legs_[done.id].outgoing;
      ++(m != kNone && movements_[m].posted >= 0 ? result_.retention.read : result_.retention.notified);
    }
    free_held(done.id);
  }
  state.read_done.clear();
}

// Whether time frees these blocks: not while they are being written from.
bool Simulation::expires(const Leg& leg) const {
  if (leg.outgoing == kNone) return true;
  const Handoff& h = movements_[leg.outgoing].state;
  return !h.push || (h.wire != Handoff::Wire::posted && h.wire != Handoff::Wire::landed);
}

void Simulation::expire(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  if (now() < state.least_expiry) return;
  const bool in_order = s_.transfer.lease_reaper == LeaseReaper::in_order;
  std::vector<SeqId> expired;
  state.least_expiry = kNever;
  for (const SeqId id : state.held) {
    const Leg& leg = legs_[id];
    if (!expires(leg)) continue;
    if (leg.expiry <= now()) {
      expired.push_back(id);
      continue;
    }
    state.least_expiry = std::min(state.least_expiry, leg.expiry);
    if (in_order) break;
  }
  for (const SeqId id : expired) {
    if (legs_[id].hold == Hold::pinned) {
      cut_pin(id, true);  // the ranges before it, when their turn comes
      continue;
    }
    ++result_.transfers.leases_expired;
    free_held(id);
  }
}

// ------------------------------------------------------------------------------------- loads, pushes

// The loads and refusals of the step that starts now.
void Simulation::start_loads(std::uint32_t worker) {
  Step& step = engines_[worker].current();
  for (const SeqId id : step.declined) {  // the rest is computed here; the source may free its blocks
    const HandoffId m = legs_[id].incoming;
    if (m == kNone) continue;
    const Sequence& s = sequences_[id];
    RequestRecord& record = result_.requests[s.request];
    const bool read_back = movements_[m].read_back;
    if (!read_back) {
      if (!ended(s.request)) {
        if (push_) decode_drives_[s.request] = 1;
        if (!push_) record.reach(Stage::handoff_dispatch, s.considered);
        record.reach(Stage::decode_admission, s.admitted);
      }
      record.recomputed_tokens += s.prompt - s.hit_tokens;
    }
    happen(m, HandoffEvent::declined);
    over(m, read_back ? TransferOutcome::skipped : TransferOutcome::computed_by_decode);
    detach_destination(m);
  }
  for (const SeqId id : step.loads) {
    const Sequence& s = sequences_[id];
    const HandoffId m = legs_[id].incoming;
    PDSIM_CHECK(m != kNone, "a load from nowhere");
    RequestRecord& record = result_.requests[s.request];
    if (ended(s.request)) {
      // Its blocks are parked all the same, until the transfer that nobody called off is over.
    } else if (movements_[m].read_back) {
      if (prefill_drives(s.request)) record.reach(Stage::prefill_queue, s.admitted);
    } else if (!push_) {
      record.charge(Stage::handoff_dispatch, s.considered);
      record.charge(Stage::decode_admission, s.admitted);
      record.charge(Stage::handoff_dispatch, now());  // behind the step that was in flight
    }
    Movement& movement = movements_[m];
    const Engine& engine = engines_[worker];
    movement.first_block = movement.next_block = s.hit_tokens / engine.limits().block_size;
    movement.last_block = engine.pool().size(s.table);
    happen(m, HandoffEvent::destination_allocated);
  }
}

Nanos Simulation::next_heartbeat(std::uint32_t worker) const {
  Nanos every = kNever;
  for (const std::uint32_t p : prefill_workers_) {
    every = std::min(every, transfer_of(p, worker).heartbeat_interval);
    if (s_.transfer_pairs.empty()) break;
  }
  return workers_[worker].last_heartbeat + every;
}

void Simulation::send_heartbeats(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  if (state.tracked.empty() || now() < next_heartbeat(worker)) return;
  state.last_heartbeat = now();
  std::vector<std::uint32_t> peers;
  for (const SeqId id : state.tracked) {
    const std::uint32_t peer = result_.requests[sequences_[id].request].prefill_worker;
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
  }
  for (const std::uint32_t peer : peers) {
    const TransferConfig& t = transfer_of(peer, worker);
    if (in_contact(worker, peer, t, true)) {
      if (!lost(Message::heartbeat)) {
        queue_.push(now() + t.notification, Phase::arrival, kHeartbeat, peer, worker, worker);
      }
    } else {
      begin_contact(worker, peer, t, Op::read, false);
    }
  }
}

// Push: decode's blocks go to prefill by a notification of its writer thread.
void Simulation::send_registration(HandoffId id) {
  Movement& m = movements_[id];
  const TransferConfig& t = transfer_of(m);
  if (!m.watched) {
    m.watched = true;
    queue_.push(now() + t.push_registration_timeout, Phase::arrival, kWatchdog, id, m.generation & 0xffffffu,
                m.generation);
  }
  if (!in_contact(m.to, m.from, t, true)) {
    workers_[m.to].shaking.push_back(id);
    begin_contact(m.to, m.from, t, Op::read, true);
    return;
  }
  if (lost(Message::registration)) return;
  queue_.push(now() + t.notification, Phase::arrival, kRegistration, id, m.generation & 0xffffffu,
              m.generation);
}

void Simulation::on_message(std::uint32_t kind, HandoffId id) {
  ++messages_;
  Movement& m = movements_[id];
  switch (kind) {
    case kRegistration: {
      if (m.source == kNoSeq && m.shipped >= 0) return;  // prefill has nothing left of it
      m.registered = true;
      if (s_.transfer.mode == TransferMode::push_layerwise && m.source != kNoSeq &&
          engines_[m.from].stepping()) {
        for (const Step::Item& item : engines_[m.from].current().items) {
          if (item.seq != m.source) continue;
          send_chunk(m.from, item);
          break;
        }
      }
      if (m.shipped < 0 || m.state.destination_known) return;
      // The writer holds the blocks and looks for this at its own pace.
      const Nanos poll = transfer_of(m).push_poll;
      const Nanos looks = (now() - m.shipped + poll - 1) / poll;
      queue_.push(m.shipped + looks * poll, Phase::arrival, kWriterPoll, id, m.generation & 0xffffffu,
                  m.generation);
      return;
    }
    case kWriterPoll:
      if (m.source != kNoSeq && !m.state.destination_known) match(id);
      return;
    case kWatchdog:
      if (m.destination == kNoSeq) return;
      ++result_.transfers
            .watchdogs;  // that is all: the request waits on, and a write that comes still counts
      return;
    case kPushFailed:
      if (m.destination == kNoSeq) return;
      workers_[m.to].ended.push_back({id, m.generation});
      news(m.to, false);
      return;
    default:
      PDSIM_CHECK(false, "no such message");
  }
}

// Prefill's writer has both the blocks and where they go.
void Simulation::match(HandoffId id) {
  std::erase(workers_[movements_[id].from].unregistered, id);
  happen(id, HandoffEvent::registered);
}

// Finished prompts reach the writer with the metadata of the next step that is scheduled: the one that
// starts now, or, when that was scheduled before, the one after it.
void Simulation::ship(std::uint32_t worker, bool scheduled_now) {
  WorkerState& state = workers_[worker];
  std::vector<HandoffId> go = std::move(state.shipping);
  state.shipping.clear();
  if (scheduled_now) {
    go.insert(go.end(), state.to_ship.begin(), state.to_ship.end());
  } else {
    state.shipping = state.to_ship;
  }
  state.to_ship.clear();
  for (const HandoffId id : go) {
    Movement& m = movements_[id];
    m.shipped = now();
    if (m.streaming && (m.last_posted || m.last_pending)) continue;
    if (m.streaming && m.source != kNoSeq && sequences_[m.source].preemptions > 0) {
      m.next_block = m.first_block;
    }
    if (m.streaming && m.state.wire == Handoff::Wire::posted) {
      post_rest(id, transfer_of(m).thread_contention);
      continue;
    }
    happen(id, HandoffEvent::source_known);
    if (movements_[id].registered) {
      match(id);
    } else {
      state.unregistered.push_back(id);
    }
  }
}

// Layer by layer: the last layer of the step that has just ended.
void Simulation::post_last_layers(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  for (const WorkerState::Layer& layer : state.last_layers) {
    Movement& m = movements_[layer.handoff];
    if (m.generation != layer.generation || m.source == kNoSeq || m.state.wire != Handoff::Wire::posted)
      continue;
    const Nanos begin = std::max(now(), state.thread_until);
    state.thread_until = begin + post_batch(layer.handoff, begin, layer.blocks, layer.last,
                                            transfer_of(m).thread_contention, {Share::last, layers(), 0});
  }
  state.last_layers.clear();
}

// Layer by layer, chunk by chunk: what the step that starts now, or those before it, bring of prompts whose
// decode side has registered.
void Simulation::send_chunks(std::uint32_t worker) {
  const TransferMode mode = s_.transfer.mode;
  if (mode == TransferMode::push || pool_of(worker).role != Role::prefill || !engines_[worker].stepping())
    return;
  for (const Step::Item& item : engines_[worker].current().items) send_chunk(worker, item);
}

// The same for one prompt of the step in flight: also when its registration comes while the step runs.
void Simulation::send_chunk(std::uint32_t worker, const Step::Item& item) {
  const TransferMode mode = s_.transfer.mode;
  WorkerState& state = workers_[worker];
  const Engine& engine = engines_[worker];
  const std::int32_t block = engine.limits().block_size;
  const HandoffId id = legs_[item.seq].outgoing;
  const Sequence& s = sequences_[item.seq];
  if (id == kNone || s.aborted || s.preemptions > 0) return;
  Movement& m = movements_[id];
  if (m.closed || !m.registered || m.destination == kNoSeq || m.last_pending) return;
  if (!m.streaming) {
    m.streaming = true;
    happen(id, HandoffEvent::source_known);
    happen(id, HandoffEvent::registered);
  }
  if (m.state.wire != Handoff::Wire::posted) return;
  const std::int32_t after = engine.computed_after_current(item.seq, sequences_);
  const std::int32_t before = after - item.tokens;
  const double contention = transfer_of(m).thread_contention;
  if (const std::int32_t old = before / block - m.next_block;
      old > 0 && (mode == TransferMode::push_layerwise || m.batches == 0)) {
    const Nanos begin = std::max(now(), state.thread_until);
    state.thread_until = begin + post_batch(id, begin, old, false, contention);
  }
  if (mode != TransferMode::push_layerwise) return;
  const bool last = after >= s.prompt;
  const std::int32_t fresh = (last ? m.last_block : std::min(after / block, m.last_block)) - m.next_block;
  if (fresh <= 0) return;
  // All layers but the last go out while the step runs, each when it ends (those that have ended, at once);
  // the last when the step does.
  const Nanos each = (engine.step_end() - state.step_began) / layers();
  const Nanos first = std::max(now(), state.step_began + each);
  const Nanos lasts = engine.step_end() - each - first;
  if (layers() < 2 || lasts <= 0) return;  // too late: what is left goes when the prompt has ended
  const Nanos begin = std::max(first, state.thread_until);
  state.thread_until =
      begin + post_batch(id, begin, fresh, false, contention, {Share::but_last, layers(), lasts});
  m.last_pending = last;
  state.last_layers.push_back({id, m.generation, fresh, last});
}

}  // namespace pdsim
