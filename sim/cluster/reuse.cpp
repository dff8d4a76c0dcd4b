// Bidirectional transfer: turns that decode retains, where the router believes them to be, and what
// prefill decides to read back.
#include <algorithm>
#include <cmath>

#include "sim/cluster/simulation.hpp"

namespace pdsim {

// ------------------------------------------------------------------------------------------- decode

// A turn has ended on decode: all its blocks stay, and the router learns where, with the last chunk. Who
// knows that no turn will ask for them keeps none.
void Simulation::pin(SeqId id) {
  Leg& leg = legs_[id];
  const Sequence& s = sequences_[id];
  if (foresees_ && next_reader(s.request) == kNone) {
    engines_[leg.worker].release(id, sequences_);
    free_sequence(id);
    return;
  }
  const std::uint32_t worker = leg.worker;
  const TransferConfig& t = transfer_of(result_.requests[s.request].prefill_worker, worker);
  const std::int32_t tokens = s.known - 1;  // the last token's KV was never computed
  leg.ranges = retained_ranges(t.retention, t.decoder_kv_blocks_ttl, tokens, now());
  leg.expiry = leg.ranges.back().expiry;
  ++result_.retention.pins;
  hold(id, Hold::pinned);
  WorkerState& state = workers_[worker];
  state.pinned_bytes += engines_[worker].pool().size(s.table) * block_bytes(worker);

  const std::int32_t session = trace_.requests[s.request].session;
  if (session >= 0) {
    StoredTurn& stored = stored_[static_cast<std::size_t>(session)];
    stored.ever = true;
    if (!lost(Message::router_update)) {
      stored = {id, leg.generation, worker, tokens, now(), leg.ranges.back().expiry, true};
    }
  }
  keep_budget(worker);
  result_.retention.peak_bytes = std::max(result_.retention.peak_bytes, state.pinned_bytes);
}

// The last range of a pinned sequence goes, and with the first of them all of it.
void Simulation::cut_pin(SeqId id, bool by_time) {
  Leg& leg = legs_[id];
  leg.ranges.pop_back();
  const Engine& engine = engines_[leg.worker];
  const std::int32_t size = engine.pool().size(sequences_[id].table);
  shorten_pin(id,
              leg.ranges.empty() ? 0 : std::min(size, leg.ranges.back().until / engine.limits().block_size),
              by_time);
}

// A pinned sequence keeps its first `keep` blocks. What is being read stays until it has been.
void Simulation::shorten_pin(SeqId id, std::int32_t keep, bool by_time) {
  Leg& leg = legs_[id];
  Engine& engine = engines_[leg.worker];
  const std::int32_t block = engine.limits().block_size;
  const std::int32_t size = engine.pool().size(sequences_[id].table);
  if (keep == 0) {
    ++(by_time ? result_.retention.expired : result_.retention.let_go);
    if (foresees_ && leg.outgoing != kNone) turn_away(leg.outgoing);
    free_held(id);
    return;
  }
  WorkerState& state = workers_[leg.worker];
  leg.expiry = leg.ranges.back().expiry;
  state.least_expiry = std::min(state.least_expiry, leg.expiry);
  if (leg.outgoing != kNone) {
    if (being_read(leg)) return;
    std::int32_t& remote = sequences_[movements_[leg.outgoing].destination].remote_tokens;
    remote = std::min(remote, keep * block);  // its reader waits still
  }
  const double bytes = (size - keep) * block_bytes(leg.worker);
  pinned_byte_s_[leg.worker] += bytes * to_seconds(now() - leg.held_since);
  state.pinned_bytes -= bytes;
  engine.hold(Hold::pinned, keep - size);
  engine.truncate(id, keep, sequences_);
}

// The reader of a pin waits still, and will find nothing: it knows, and computes.
void Simulation::turn_away(HandoffId id) {
  Movement& m = movements_[id];
  sequences_[m.destination].remote_tokens = 0;
  RequestRecord& record = result_.requests[m.request];
  record.reuse = Reuse::evicted;
  record.predicted_read = record.predicted_compute = -1;
  record.read_chosen = false;
  advance(m.state, HandoffEvent::declined);
  over(id, TransferOutcome::skipped);
  detach_destination(id);
}

// The turn after `request` that has yet to reach prefill, and with it the router's memory; kNone = none.
std::uint32_t Simulation::next_reader(std::uint32_t request) const {
  std::uint32_t next = next_turn_[request];
  while (next != kNone &&
         (ended(next) || prefill_leg_[next] != kNoSeq || result_.requests[next].reuse != Reuse::none)) {
    next = next_turn_[next];
  }
  return next;
}

// When a pin will be asked for: a turn that follows its predecessor after its pause, others as recorded (in
// a closed loop: in that order). Behind all of these is what nobody can ask for any more, because a later
// turn has taken its place or the one that had its address has gone; before them what a turn waits for.
Nanos Simulation::next_use(SeqId id) const {
  if (legs_[id].outgoing != kNone) return -1;
  const std::uint32_t request = sequences_[id].request;
  const StoredTurn& stored = stored_[static_cast<std::size_t>(trace_.requests[request].session)];
  if (stored.seq != id || stored.generation != legs_[id].generation) return kNever;
  const std::uint32_t next = next_reader(request);
  if (next == kNone) return kNever;
  if (closed_sessions_) return legs_[id].held_since + think_[next];
  if (concurrency_ > 0) return next;
  return trace_.requests[next].arrival - trace_.requests.front().arrival;
}

// Whether a reader has been admitted for a pin: it counts on every token of it.
bool Simulation::being_read(const Leg& leg) const {
  if (leg.outgoing == kNone) return false;
  const Movement& m = movements_[leg.outgoing];
  return m.destination == kNoSeq || m.state.wire != Handoff::Wire::idle ||
         sequences_[m.destination].status != SeqStatus::waiting;
}

// Offers the tails of what a worker retains, but of what is being read, to its retention policy, until
// no more blocks are `lacking`. Returns whether that came to be. Who foresees gives block by block, so that
// pieces of one size are what Belady's rule chooses from.
template <typename Lacking>
bool Simulation::let_go(std::uint32_t worker, Lacking lacking) {
  for (std::int32_t blocks = lacking(); blocks > 0; blocks = lacking()) {
    tails_.clear();
    for (const SeqId id : workers_[worker].held) {
      const Leg& leg = legs_[id];
      if (leg.hold != Hold::pinned) continue;
      if (being_read(leg)) continue;
      tails_.push_back({id, leg.ranges.back().priority, leg.held_since, foresees_ ? next_use(id) : kNever});
    }
    if (tails_.empty()) return false;
    const SeqId first = tails_[first_to_go(s_.transfer.retention.policy, tails_)].id;
    if (foresees_) {
      shorten_pin(first, std::max(0, engines_[worker].pool().size(sequences_[first].table) - blocks), false);
    } else {
      cut_pin(first, false);
    }
  }
  return true;
}

void Simulation::keep_budget(std::uint32_t worker) {
  const RetentionConfig& retention = s_.transfer.retention;
  if (retention.policy == Retention::ttl || retention.budget_gib <= 0) return;
  const double budget = retention.budget_gib * 0x1p30 * static_cast<double>(d_.workers[worker].gpus.size());
  let_go(worker, [&] {
    const double over = workers_[worker].pinned_bytes - budget;
    return over > 0 ? static_cast<std::int32_t>(std::ceil(over / block_bytes(worker))) : 0;
  });
}

bool Simulation::reclaim(std::uint32_t worker, std::int32_t blocks) {
  return let_go(worker, [&] { return blocks - engines_[worker].pool().free_blocks(); });
}

// ------------------------------------------------------------------------------------------ prefill

// The router has put the stored address of the session's last turn, if there is one, on prefill's leg.
void Simulation::attach_stored_turn(std::uint32_t request, SeqId leg) {
  if (!s_.transfer.bidirectional) return;
  RequestRecord& record = result_.requests[request];
  const std::int32_t session = trace_.requests[request].session;
  if (session < 0) {
    record.reuse = Reuse::no_session;
    return;
  }
  StoredTurn& entry = stored_[static_cast<std::size_t>(session)];
  const StoredTurn stored = entry;
  entry.seq = kNoSeq;  // single use
  if (stored.seq == kNoSeq) {
    record.reuse =
        stored.ever || trace_.requests[request].turn > 0 ? Reuse::router_unaware : Reuse::never_seen;
    return;
  }
  if (!foresees_ && now() - stored.stored >= s_.router.session_kv_ttl) {
    record.reuse = Reuse::ttl_expired;
    return;
  }
  const bool there = legs_[stored.seq].generation == stored.generation;
  std::int32_t tokens = stored.tokens;
  Nanos expiry = stored.expiry;
  if (there) {
    const Engine& decode = engines_[stored.worker];
    const std::vector<RetainedRange>& ranges = legs_[stored.seq].ranges;
    std::size_t kept = ranges.size();  // what has run out, or nearly, does not spoil what has not
    while (kept > 1 && ranges[kept - 1].expiry < now() + s_.transfer.expiry_margin) --kept;
    tokens = std::min({tokens, ranges[kept - 1].until,
                       decode.pool().size(sequences_[stored.seq].table) * decode.limits().block_size});
    expiry = ranges[kept - 1].expiry;
  } else if (s_.transfer.retention.policy != Retention::ttl && now() < stored.expiry) {
    record.reuse = Reuse::evicted;  // no engine has these policies: ours tell the router
    return;
  }
  // The last token is computed whatever is here.
  tokens = std::min({tokens, record.prompt_tokens - 1, there ? extended_tokens(leg, stored.seq) : tokens});
  record.reuse_worker = stored.worker;
  Sequence& s = sequences_[leg];
  const HandoffId id = new_movement(request, stored.worker, legs_[leg].worker, false);
  Movement& m = movements_[id];
  m.read_back = true;
  m.expiry = expiry;
  m.clock_error = static_cast<Nanos>(s_.transfer.clock_error_s * 1e9);
  m.destination = leg;
  legs_[leg].incoming = id;
  if (there) {
    m.source = stored.seq;
    legs_[stored.seq].outgoing = id;
  } else {
    m.state.source_owns = false;
  }
  s.remote_tokens = tokens;
  record.reuse = Reuse::local_hit;  // unless the scheduler finds that there is something to decide
  if (tokens > 0) return;
  record.reuse = Reuse::prompt_changed;
  happen(id, HandoffEvent::declined);
  over(id, TransferOutcome::skipped);
  detach_destination(id);
}

// Tokens of the prompt of `leg` that `retained` holds: its blocks have the prompt's identity as far as it
// goes on where that turn ended. (vLLM takes the client's word for it.)
std::int32_t Simulation::extended_tokens(SeqId leg, SeqId retained) const {
  const auto &a = sequences_[leg].identity, &b = sequences_[retained].identity;
  std::int32_t blocks = 0;
  for (std::size_t i = 0; i < a.size() && i < b.size() && a[i].hash == b[i].hash; ++i) {
    blocks += std::min(a[i].blocks, b[i].blocks);
    if (a[i].blocks != b[i].blocks) break;
  }
  const std::int32_t block = engines_[legs_[leg].worker].limits().block_size;
  const std::int32_t held = sequences_[retained].known;
  // All its full blocks: then the tail of less than a block is the same as well.
  return blocks >= held / block ? held : blocks * block;
}

// Whether what lies elsewhere is loaded. Called inside schedules: the answer that admits the sequence counts.
bool Simulation::want_load(SeqId id, std::int32_t have) {
  const Sequence& s = sequences_[id];
  if (legs_[id].handed_over) {
    const TransferConfig& t = transfer_of(result_.requests[s.request].prefill_worker, legs_[id].worker);
    const std::int32_t lacking = s.prompt - have;
    return lacking > t.full_hit_tokens && lacking >= t.pd_recompute_threshold;
  }
  const HandoffId handoff = legs_[id].incoming;
  Movement& m = movements_[handoff];
  const TransferConfig& t = transfer_of(m);
  RequestRecord& record = result_.requests[s.request];
  const std::int32_t count = s.remote_tokens - have;
  const std::int32_t block = engines_[m.to].limits().block_size;
  record.predicted_read = predicted_read(handoff, have / block, (s.remote_tokens + block - 1) / block);
  record.predicted_compute = predicted_compute(m.to, have, count);
  if (t.reuse_policy == ReusePolicy::cost) {
    record.read_chosen = record.predicted_read <= record.predicted_compute;
    record.reuse = Reuse::recompute_cheaper;
  } else {
    record.read_chosen = count >= t.kv_recompute_threshold;
    record.reuse = Reuse::below_threshold;
  }
  return record.read_chosen;
}

// Reading blocks [first, last) back now: what the wire gives beside the flows that are there, or the
// posting, whichever is longer, the latency, and the steps around it. A first contact that is still to be
// made serves all later reads and is left out, or none would ever be made.
Nanos Simulation::predicted_read(HandoffId id, std::int32_t first, std::int32_t last) {
  const Movement& m = movements_[id];
  const TransferConfig& t = transfer_of(m);
  const std::int32_t blocks = std::max(1, last - first);
  std::int32_t runs = blocks;
  if (m.source != kNoSeq) {
    const BlockPool& pool = engines_[m.from].pool();
    const TableId table = sequences_[m.source].table;
    runs = common_runs(pool, table, first, pool, table, first, std::min(blocks, pool.size(table) - first),
                       scratch_);
  }
  const TransferPlan plan = plan_transfer(d_, t, Op::read, m.from, m.to, blocks, std::max(1, runs));
  const Route path = ::pdsim::route(d_.topology, d_.workers[m.from].gpus[0], d_.workers[m.to].gpus[0]);
  std::int32_t flows = 0;
  for (std::int32_t i = 0; i < path.links; ++i) {
    flows = std::max(flows, network_.flows(path.link[static_cast<std::size_t>(i)]));
  }
  const double rate = unloaded_rate(d_, plan, m.from, m.to) / (1 + flows);
  const Nanos wire = ceil_ns(static_cast<double>(plan.bytes()) / rate);
  // Until the step that posts begins, and from the landing to the poll: what is left of the step in flight,
  // or half of an empty one.
  const Engine& engine = engines_[m.to];
  const Nanos step = engine.stepping() ? std::max<Nanos>(0, engine.step_end() - now()) : 0;
  const Nanos before = pool_of(m.to).engine.async_scheduling ? step : 0;
  const Nanos poll = std::max(step, pool_of(m.to).engine.idle_step) / 2;
  const Nanos thread =
      t.background_receiver ? std::max<Nanos>(0, workers_[m.to].thread_until - now() - before) : 0;
  return before + thread + std::max(plan.posting, plan.fixed + wire) + plan.latency + poll;
}

// Computing `tokens` more after `have`, in steps that have room beside what runs now: what they add to them.
Nanos Simulation::predicted_compute(std::uint32_t worker, std::int32_t have, std::int32_t tokens) {
  const PoolPlan& pool = pool_of(worker);
  Engine& engine = engines_[worker];
  StepShape base = engine.stepping() ? engine.current().shape : StepShape{};
  const std::int32_t budget = pool.engine.max_num_batched_tokens;
  if (base.tokens() >= budget) base = {};
  const Nanos alone = base.tokens() > 0 ? pool.step_model->time(base).ns : 0;
  const std::int64_t window = d_.model.window;
  Nanos total = 0;
  for (std::int64_t p = have; tokens > 0;) {
    const std::int64_t n = std::min(tokens, budget - base.tokens());
    StepShape shape = base;
    ++shape.prefill_requests;
    shape.prefill_tokens += static_cast<std::int32_t>(n);
    shape.prefill_pairs += n * p + n * (n + 1) / 2;
    shape.prefill_context += p + n;
    if (window > 0) {
      shape.prefill_window_pairs += window_pairs(p, n, window);
      shape.prefill_window_context += window_context(p, n, window);
    }
    total += pool.step_model->time(shape).ns - alone;
    p += n;
    tokens -= static_cast<std::int32_t>(n);
  }
  return std::max<Nanos>(0, total);
}

}  // namespace pdsim
