#include "sim/cluster/cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "sim/cluster/identity.hpp"
#include "sim/cluster/simulation.hpp"
#include "sim/scenario/releases.hpp"

namespace pdsim {

Simulation::Simulation(const Deployment& deployment, const Scenario& scenario, const Trace& trace,
                       const RunHooks& hooks)
    : d_(deployment),
      s_(scenario),
      trace_(trace),
      chains_(trace),
      hooks_(hooks),
      push_(scenario.transfer.mode != TransferMode::pull),
      queue_(scenario.permute_ties),
      network_(deployment.topology),
      policy_(routing_policy(scenario.router.policy)),
      cache_view_(static_cast<std::uint32_t>(deployment.workers.size())),
      routing_random_(scenario.seed, Purpose::routing),
      reroute_random_(scenario.seed, Purpose::rerouting),
      fault_random_(scenario.seed, Purpose::faults) {
  const std::size_t n = d_.workers.size();
  transfer_of_.assign(d_.pools.size() * d_.pools.size(), &s_.transfer);
  for (const TransferPair& pair : s_.transfer_pairs) {
    const auto index = [&](const std::string& name) {
      return static_cast<std::size_t>(std::ranges::find(d_.pools, name, &PoolPlan::name) - d_.pools.begin());
    };
    transfer_of_[index(pair.from) * d_.pools.size() + index(pair.to)] = &pair.transfer;
  }
  engines_.reserve(n);
  workers_.resize(n);
  load_.resize(n);
  hit_tokens_.resize(n);
  down_.resize(n);
  front_end_free_.resize(n);
  pinned_byte_s_.resize(n);
  avoided_gpu_s_.resize(n);
  for (std::uint32_t w = 0; w < n; ++w) {
    const PoolPlan& pool = pool_of(w);
    engines_.push_back(new_engine(w));
    if (d_.disaggregated) {
      workers_[w].contacts.resize(n);
      if (s_.transfer.warm_start) {
        for (Contact& contact : workers_[w].contacts) contact.state = Contact::made;
      }
    }
    if (pool.role != Role::decode) prefill_workers_.push_back(w);
    if (pool.role != Role::prefill) decode_workers_.push_back(w);
  }
  concurrency_ = s_.workload.synthetic ? s_.workload.synthetic->concurrency : s_.workload.concurrency;
  max_concurrency_ = s_.workload.max_concurrency;
  closed_sessions_ = s_.workload.sessions == Sessions::closed;
  foresees_ = s_.transfer.bidirectional && s_.transfer.retention.policy == Retention::belady;
  if (closed_sessions_) {
    think_ = closed_think_times(trace_, reference_service(s_.workload)).pause;
    for (const Nanos think : think_) longest_think_ = std::max(longest_think_, think);
  }
  if (closed_sessions_ || foresees_) {
    next_turn_.assign(trace_.requests.size(), kNone);
    const std::vector<std::int32_t> previous = previous_turns(trace_);
    for (std::size_t r = 0; r < previous.size(); ++r) {
      if (previous[r] >= 0) next_turn_[static_cast<std::size_t>(previous[r])] = static_cast<std::uint32_t>(r);
    }
  }
  const std::size_t requests = trace_.requests.size();
  result_.requests.resize(requests);
  result_.hypothetical = is_hypothetical(s_);
  prefill_leg_.assign(requests, kNoSeq);
  decode_leg_.assign(requests, kNoSeq);
  movement_of_.assign(requests, kNone);
  decode_drives_.assign(requests, 0);
  routed_.resize(requests);
  stored_.resize(trace_.sessions.size());
  last_prefill_.assign(trace_.sessions.size(), kNoWorker);
}

Engine Simulation::new_engine(std::uint32_t w) {
  const PoolPlan& pool = pool_of(w);
  EngineLimits limits;
  limits.block_size = pool.engine.block_size;
  limits.max_num_seqs = pool.engine.max_num_seqs;
  limits.max_num_batched_tokens = pool.engine.max_num_batched_tokens;
  limits.chunked_prefill = pool.engine.enable_chunked_prefill;
  limits.async = pool.engine.async_scheduling;
  limits.step_by_step = pool.engine.step_by_step;
  limits.max_model_len = pool.engine.max_model_len;
  if (const auto& c = pool.engine.speculative) {
    Speculation& speculation = limits.speculation;
    speculation.tokens = c->num_speculative_tokens;
    speculation.lookahead = pool.drafter ? c->num_speculative_tokens : 0;
    speculation.drops_last_hit = pool.drafter && c->method != SpeculativeMethod::draft_model;
    speculation.accepted = c->accepted;
    speculation.seed = s_.seed;
  }
  EngineHooks hooks;
  hooks.owner = this;
  hooks.engine = w;
  hooks.load = [](void* owner, SeqId id, std::int32_t have) {
    return static_cast<Simulation*>(owner)->want_load(id, have);
  };
  if (s_.transfer.bidirectional && gives_way(s_.transfer.retention.policy)) {
    hooks.reclaim = [](void* owner, std::uint32_t engine, std::int32_t blocks) {
      return static_cast<Simulation*>(owner)->reclaim(engine, blocks);
    };
  }
  Engine engine(limits, clock_of(*pool.step_model, d_.model.window), pool.blocks,
                pool.engine.enable_prefix_caching, policy_.uses_cache, hooks);
  if (s_.transfer.initial_fragmentation > 0) {
    Random random(s_.seed, Purpose::fragmentation, w);
    engine.pool().fragment(s_.transfer.initial_fragmentation, random);
  }
  return engine;
}

// --------------------------------------------------------------------------------------- main loop

RunResult Simulation::run() {
  if (concurrency_ > 0) {
    const auto first = std::min(trace_.requests.size(), static_cast<std::size_t>(concurrency_));
    for (; next_arrival_ < first; ++next_arrival_) {
      queue_.push(0, Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_), 0, 0);
    }
  } else {
    push_arrivals();
  }
  for (std::uint32_t f = 0; f < s_.faults.size(); ++f) arm_fault(f);
  // Longer than anything that could still free or bring something.
  const TransferConfig& t = s_.transfer;
  stall_after_ = std::max({kStallAfter, 2 * t.kv_lease_duration, 2 * t.handshake, 2 * s_.router.hop,
                           2 * t.notification, 2 * t.decoder_kv_blocks_ttl, 2 * t.handshake_timeout,
                           2 * s_.workload.client_timeout, 2 * longest_think_});
  const std::uint64_t total = trace_.requests.size();
  while (done_ < total) {
    if (queue_.empty() || (in_flight_ > 0 && now() > last_progress_ + stall_after_)) {
      result_.stall = who_waits();
      return report(RunStatus::stalled);
    }
    const Event event = queue_.pop();
    const std::uint32_t entity = queue_.entity(event);
    const auto arg = static_cast<std::uint32_t>(event.arg);
    switch (event.kind()) {
      case kNetwork:
        if (event.arg == network_.epoch()) on_network();
        break;
      case kFlowStart:
        on_flow_start(entity, static_cast<std::int32_t>(arg));
        break;
      case kLanded:
        on_landed(entity);
        break;
      case kContact:
        on_contact(entity, arg, (event.arg >> 32) != 0);
        break;
      case kFault:
        on_fault(entity);
        break;
      case kArrival:
        on_arrival(entity, event.arg != 0);
        break;
      case kDeliver:
        on_deliver(entity, arg, (event.arg & kSecondLeg) != 0);
        break;
      case kHeartbeat:
        ++messages_;
        workers_[entity].heartbeats.push_back({arg, now() - transfer_of(entity, arg).notification});
        news(entity, false);
        break;
      case kReadDone:
        ++messages_;
        if (legs_[arg].generation == event.arg >> 32) {  // else its lease ran out on the way
          workers_[entity].read_done.push_back({arg, legs_[arg].generation});
          news(entity, false);
        }
        break;
      case kRegistration:
      case kWriterPoll:
      case kWatchdog:
      case kPushFailed:
        if (movements_[entity].generation == event.arg) on_message(event.kind(), entity);
        break;
      case kTimeout:
        if (!ended(entity)) give_up(entity, RequestStatus::cancelled, Reason::client_timeout);
        break;
      case kRestart:
        down_[entity] = 0;
        break;
      case kBoundary:
        if (event.arg == workers_[entity].epoch) on_boundary(entity);
        break;
    }
    if (network_dirty_ && queue_.next_time() > now()) {
      network_dirty_ = false;
      const Nanos next = network_.next_completion(now());
      if (next != kNever) queue_.push(next, Phase::completion, kNetwork, 0, 0, network_.epoch());
    }
    if ((queue_.pops() & 0x1ff) == 0) {
      if (hooks_.progress) hooks_.progress(done_, total);
      if (hooks_.interrupted && hooks_.interrupted()) return report(RunStatus::interrupted);
      if (hooks_.hopeless && hooks_.hopeless(now(), result_.requests)) return report(RunStatus::abandoned);
    }
  }
  return report(RunStatus::finished);
}

// All arrivals of the next instant at once, so that ties between them are the queue's to order. Time zero is
// the first arrival, whatever epoch a trace counts from. Later turns of closed sessions arrive otherwise.
void Simulation::push_arrivals() {
  const std::size_t n = trace_.requests.size();
  const auto follows = [&](std::size_t i) { return closed_sessions_ && think_[i] >= 0; };
  while (next_arrival_ < n && follows(next_arrival_)) ++next_arrival_;
  if (next_arrival_ == n) return;
  const Nanos time = trace_.requests[next_arrival_].arrival;
  while (next_arrival_ < n && (follows(next_arrival_) || trace_.requests[next_arrival_].arrival == time)) {
    if (!follows(next_arrival_)) {
      last_pushed_ = static_cast<std::uint32_t>(next_arrival_);
      queue_.push(time - trace_.requests.front().arrival, Phase::arrival, kArrival, last_pushed_, 0, 0);
    }
    ++next_arrival_;
  }
}

void Simulation::push_boundary(std::uint32_t worker, Nanos time) {
  WorkerState& state = workers_[worker];
  state.next_boundary = time;
  ++state.epoch;
  queue_.push(time, Phase::decision, kBoundary, worker, static_cast<std::uint32_t>(state.epoch), state.epoch);
}

// Something has happened that `worker` will see at its next boundary. A sleeping engine wakes for a
// request only: nothing else reaches its input queue.
void Simulation::news(std::uint32_t worker, bool wakes) {
  if (worker == at_boundary_) return;
  WorkerState& state = workers_[worker];
  switch (state.mode) {
    case WorkerMode::asleep:
      if (wakes) {
        state.mode = WorkerMode::idle;
        state.idle_since = now();
        push_boundary(worker, now());
      }
      break;
    case WorkerMode::idle: {
      const Nanos step = pool_of(worker).engine.idle_step;
      const Nanos steps = std::max<Nanos>(1, (now() - state.idle_since + step - 1) / step);
      const Nanos time = state.idle_since + steps * step;
      if (time < state.next_boundary) push_boundary(worker, time);
      break;
    }
    case WorkerMode::stepping: {
      const Nanos time = engines_[worker].cut_run(now());
      if (time != kNever) push_boundary(worker, time);
      break;
    }
  }
}

// ------------------------------------------------------------------------------------ router, requests

// From the proxy's decision until the engine has the request: the proxy's hop, then the engine's front end,
// one process that takes requests in turn.
Nanos Simulation::to_engine(std::uint32_t worker, const Request& request) {
  const Overheads& o = pool_of(worker).step_model->overheads();
  Nanos& free = front_end_free_[worker];
  free = std::max(free, now() + s_.router.hop) +
         ceil_ns(o.front_end + o.front_end_token * request.prompt_tokens);
  return free - now();
}

// Why a pool cannot take its part of a request: prefill holds the prompt and one token, others all of it.
Reason Simulation::too_long(const PoolPlan& pool, const Request& request) const {
  const std::int64_t tokens =
      std::int64_t{request.prompt_tokens} +
      (pool.role == Role::prefill ? std::min(1, request.output_tokens) : request.output_tokens);
  if (tokens > pool.engine.max_model_len) return Reason::exceeds_max_model_len;
  // Alone, a request must always fit: its last step may be scheduled for drafts of the one in flight that
  // will not be accepted, and has drafts of its own and the drafter's slots after them.
  std::int64_t slots = tokens;
  if (const auto& c = pool.engine.speculative) {
    const std::int64_t ahead = std::int64_t{c->num_speculative_tokens} *
                               (1 + (pool.engine.async_scheduling ? 1 : 0) + (pool.drafter ? 1 : 0));
    slots = std::max(tokens, std::min<std::int64_t>(tokens - 1 + ahead, pool.engine.max_model_len));
  }
  if (slots > pool.kv_tokens()) return Reason::exceeds_kv_cache;
  return Reason::none;
}

// Those of `workers` whose pool can take the request; all of them, mostly. When none can, why.
Reason Simulation::candidates(const Request& request, const std::vector<std::uint32_t>& workers,
                              std::vector<std::uint32_t>& out) const {
  out.clear();
  Reason reason = Reason::none;
  for (const std::uint32_t w : workers) {
    const Reason own = down_[w] != 0 ? Reason::worker_lost : too_long(pool_of(w), request);
    if (own == Reason::none) {
      out.push_back(w);
    } else {
      reason = own;
    }
  }
  return out.empty() ? reason : Reason::none;
}

// `released`: the client has held it back until now.
void Simulation::on_arrival(std::uint32_t request, bool released) {
  if (released) {
    --released_;
  } else if (max_concurrency_ > 0 && in_flight_ + released_ >= max_concurrency_) {
    held_.push_back(request);
    if (concurrency_ == 0 && request == last_pushed_) push_arrivals();
    return;
  }
  ++messages_;
  last_progress_ = now();
  const Request& r = trace_.requests[request];
  RequestRecord& record = result_.requests[request];
  record.arrival = record.mark = now();
  record.prompt_tokens = r.prompt_tokens;
  record.output_tokens = r.output_tokens;
  record.concurrency = in_flight_++;
  const Nanos since = now() - s_.workload.warmup;
  record.counted = since >= 0 && (s_.workload.measure == 0 || since < s_.workload.measure);
  if (concurrency_ == 0 && request == last_pushed_) push_arrivals();

  Reason reason = candidates(r, prefill_workers_, prefill_candidates_);
  if (reason == Reason::none) reason = candidates(r, decode_workers_, decode_candidates_);
  if (reason != Reason::none) {
    finish(request, reason == Reason::worker_lost ? RequestStatus::failed : RequestStatus::rejected, reason);
    return;
  }
  std::uint32_t prefill = kNoWorker, decode = kNoWorker;
  route(request, prefill, decode);
  record.prefill_worker = prefill;
  record.decode_worker = d_.disaggregated && r.output_tokens == 0 ? kNoWorker : decode;
  if (s_.workload.client_timeout > 0) {
    queue_.push(now() + s_.workload.client_timeout, Phase::arrival, kTimeout, request, 0, 0);
  }
  queue_.push(now() + to_engine(prefill, r), Phase::arrival, kDeliver, request, 0, prefill);
  if (push_ && prefill != decode) {
    movement_of_[request] = new_movement(request, prefill, decode, true);
    movements_[movement_of_[request]].awaited = true;
    if (!s_.router.sequential_dispatch) {
      queue_.push(now() + to_engine(decode, r), Phase::arrival, kDeliver, request, 1, kSecondLeg | decode);
    }
  }
}

void Simulation::read_cache_events() {
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    engines_[w].settle(now(), sequences_, result_.gaps);
    const auto& log = engines_[w].cache_log();
    std::size_t& read = workers_[w].cache_log_read;
    while (read < log.size() && log[read].published != kNever &&
           log[read].published + s_.router.cache_event_delay <= now()) {
      cache_view_.apply(w, log[read++].event);
    }
    if (read > 4096 && read * 2 > log.size()) {
      engines_[w].forget_log(read);
      read = 0;
    }
  }
}

// Decode is chosen first, then whether and where to prefill.
void Simulation::route(std::uint32_t request, std::uint32_t& prefill, std::uint32_t& decode) {
  const Request& r = trace_.requests[request];
  RouterView view;
  view.load = load_;
  view.hit_tokens = hit_tokens_;
  view.prompt_tokens = r.prompt_tokens;
  view.session = r.session < 0 ? 0 : static_cast<std::uint64_t>(r.session) + 1;
  view.load_weight = s_.router.load_weight;
  const std::int32_t block = d_.pools[0].engine.block_size;
  if (policy_.uses_cache) {
    read_cache_events();
    prompt_identity(trace_, chains_, request, block, identity_);
    cache_view_.match(identity_, (r.prompt_tokens - 1) / block, hit_tokens_);
    for (std::int32_t& blocks : hit_tokens_) blocks *= block;
  }
  decode = policy_.choose(view, decode_candidates_, decode_turns_, routing_random_);
  prefill = decode;
  if (d_.disaggregated && r.output_tokens > 0) {
    const std::int32_t lacking = r.prompt_tokens - (policy_.uses_cache ? hit_tokens_[decode] : 0);
    if (lacking >= s_.router.local_prefill_threshold) {
      prefill = policy_.choose(view, prefill_candidates_, prefill_turns_, routing_random_);
    }
  } else if (d_.disaggregated) {
    prefill = policy_.choose(view, prefill_candidates_, prefill_turns_,
                             routing_random_);  // nothing to decode: it ends there
    decode = prefill;
  }
  if (r.session >= 0 && d_.disaggregated && (prefill != decode || r.output_tokens == 0)) {
    reroute(r, prefill);
    if (r.output_tokens == 0) decode = prefill;
  }
  const std::int32_t to_compute = r.prompt_tokens - (policy_.uses_cache ? hit_tokens_[prefill] : 0);
  routed_[request] = {to_compute, true, decode != prefill};
  load_[prefill].prefill_tokens += to_compute;
  ++load_[prefill].requests;
  if (decode != prefill) {
    ++load_[decode].requests;
    load_[decode].context_tokens += r.prompt_tokens;
  }
}

// By chance a later turn goes to another prefill worker than its session's last.
void Simulation::reroute(const Request& r, std::uint32_t& prefill) {
  std::uint32_t& last = last_prefill_[static_cast<std::size_t>(r.session)];
  if (last != kNoWorker && s_.router.reroute_fraction > 0 &&
      reroute_random_.uniform() < s_.router.reroute_fraction) {
    std::vector<std::uint32_t> others = prefill_candidates_;
    std::erase(others, last);
    if (!others.empty()) prefill = others[reroute_random_.below(others.size())];
  }
  last = prefill;
}

SeqId Simulation::new_sequence(std::uint32_t request, std::uint32_t worker, std::int32_t final) {
  SeqId id;
  if (free_sequences_.empty()) {
    id = static_cast<SeqId>(sequences_.size());
    sequences_.emplace_back();
    legs_.emplace_back();
  } else {
    id = free_sequences_.back();
    free_sequences_.pop_back();
  }
  const Request& r = trace_.requests[request];
  Sequence& s = sequences_[id];
  std::vector<HashRun> identity = std::move(s.identity);
  s = Sequence{};
  s.request = request;
  s.prompt = s.known = r.prompt_tokens;
  s.final = final;
  s.counted = result_.requests[request].counted;
  sequence_identity(trace_, chains_, request, engines_[worker].limits().block_size, final, identity);
  s.identity = std::move(identity);
  const std::uint32_t generation = legs_[id].generation;
  legs_[id] = Leg{};
  legs_[id].generation = generation;
  legs_[id].worker = worker;
  legs_[id].live = true;
  return id;
}

// Its blocks are somebody else's from now on.
void Simulation::free_sequence(SeqId id) {
  ++legs_[id].generation;
  legs_[id].live = false;
  const std::uint32_t request = sequences_[id].request;
  if (prefill_leg_[request] == id) prefill_leg_[request] = kNoSeq;
  if (decode_leg_[request] == id) decode_leg_[request] = kNoSeq;
  detach_source(legs_[id].outgoing);
  detach_destination(legs_[id].incoming);
  WorkerState& state = workers_[legs_[id].worker];
  const Engine& engine = engines_[legs_[id].worker];
  if ((sequences_[id].aborted || engine.speculates()) && engine.references(id)) {
    state.thrown_away.push_back(id);
  } else {
    free_sequences_.push_back(id);
  }
}

void Simulation::drop_whole_load(std::uint32_t request) {
  Routed& routed = routed_[request];
  if (!routed.prefill) return;
  routed.prefill = false;
  const RequestRecord& record = result_.requests[request];
  WorkerLoad& load = load_[record.prefill_worker];
  load.prefill_tokens -= routed.prefill_tokens;
  if (record.first_token >= 0) load.context_tokens -= record.prompt_tokens;
  --load.requests;
}

void Simulation::drop_prefill_load(std::uint32_t request) {
  Routed& routed = routed_[request];
  if (!routed.prefill) return;
  routed.prefill = false;
  WorkerLoad& load = load_[result_.requests[request].prefill_worker];
  load.prefill_tokens -= routed.prefill_tokens;
  --load.requests;
}

void Simulation::drop_decode_load(std::uint32_t request) {
  Routed& routed = routed_[request];
  if (!routed.decode) return;
  routed.decode = false;
  WorkerLoad& load = load_[result_.requests[request].decode_worker];
  load.context_tokens -= trace_.requests[request].prompt_tokens;
  --load.requests;
}

void Simulation::finish(std::uint32_t request, RequestStatus status, Reason reason) {
  RequestRecord& record = result_.requests[request];
  PDSIM_CHECK(!ended(request), "a request ended twice");
  record.status = status;
  record.reason = reason;
  record.end = now();
  PDSIM_CHECK(record.mark == record.end, "a request ended with time that no stage was charged");
  --in_flight_;
  ++done_;
  last_progress_ = result_.end = now();
  // A nanosecond later at least: nobody may hear of this while others decide at this instant.
  if (concurrency_ > 0 && next_arrival_ < trace_.requests.size()) {
    queue_.push(now() + 1, Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_++), 0, 0);
  }
  if (!held_.empty()) {
    ++released_;
    queue_.push(now() + 1, Phase::arrival, kArrival, held_.front(), 0, 1);
    held_.pop_front();
  }
  if (!closed_sessions_ || next_turn_[request] == kNone) return;
  if (status == RequestStatus::completed) {
    const std::uint32_t next = next_turn_[request];
    queue_.push(now() + std::max<Nanos>(1, think_[next]), Phase::arrival, kArrival, next, 0, 0);
  } else {
    cancel_later_turns(request);
  }
}

// A request reaches an engine: prefill (or the only one) first, decode with the second leg.
void Simulation::on_deliver(std::uint32_t request, std::uint32_t worker, bool second_leg) {
  ++messages_;
  // A prefill that decode did not wait for, and has outrun, computes all the same: nobody calls it off.
  const bool outrun = ended(request);
  if (given_up(request) || (outrun && second_leg)) return;
  last_progress_ = now();
  RequestRecord& record = result_.requests[request];
  const Request& r = trace_.requests[request];
  if (down_[worker] != 0) {
    if (outrun) {
      record.recomputed_tokens -= record.prompt_tokens;  // decode's was then the first and only computation
      return;
    }
    give_up(request, RequestStatus::failed, Reason::worker_lost);
    return;
  }
  if (second_leg && rejections_ > 0) {
    --rejections_;
    give_up(request, RequestStatus::rejected, Reason::decode_rejected);
    return;
  }
  const bool prefill_only = !second_leg && record.prefill_worker != record.decode_worker;
  const bool silent = prefill_only || r.output_tokens == 0;
  const SeqId id = new_sequence(request, worker, r.prompt_tokens + (silent ? 1 : r.output_tokens));
  Sequence& s = sequences_[id];
  s.silent = silent;
  if (second_leg) {
    decode_leg_[request] = id;
    Leg& leg = legs_[id];
    leg.handed_over = true;
    leg.incoming = movement_of_[request];
    PDSIM_CHECK(leg.incoming != kNone, "a decode leg without a hand-over");
    movements_[leg.incoming].destination = id;
    movements_[leg.incoming].awaited = false;
    s.remote_tokens = s.prompt;
    if (!push_) {
      leg.tracked_since = now();
      workers_[worker].tracked.push_back(id);
    }
  } else {
    prefill_leg_[request] = id;
    if (!outrun) record.charge(Stage::router, now());
    if (movement_of_[request] != kNone) {  // push
      movements_[movement_of_[request]].source = id;
      legs_[id].outgoing = movement_of_[request];
    }
    if (prefill_only) attach_stored_turn(request, id);
  }
  engines_[worker].enqueue(id);
  news(worker, true);
}

// ---------------------------------------------------------------------------------------- boundaries

Nanos Simulation::deadline(std::uint32_t worker) const {
  const WorkerState& state = workers_[worker];
  Nanos least = std::min(state.least_expiry, state.tracked.empty() ? kNever : next_heartbeat(worker));
  const bool pending = !state.ended.empty() || !state.to_ship.empty() || !state.shipping.empty() ||
                       !state.last_layers.empty() || !state.thrown_away.empty();
  if (pending) least = now();
  return least;
}

void Simulation::on_boundary(std::uint32_t worker) {
  Engine& engine = engines_[worker];
  WorkerState& state = workers_[worker];
  state.next_boundary = kNever;
  engine.close_run(sequences_, result_.gaps);
  engine.account_blocks(now());
  at_boundary_ = worker;
  if (engine.stepping()) take_outputs(worker);
  post_last_layers(worker);
  poll(worker);
  take_notifications(worker);
  expire(worker);
  take_aborts(worker);
  start_step(worker);
  at_boundary_ = kNoWorker;
}

void Simulation::take_outputs(std::uint32_t worker) {
  outcome_.first_tokens.clear();
  outcome_.finished.clear();
  engines_[worker].finish_step(now(), sequences_, outcome_, result_.gaps);
  for (const SeqId id : outcome_.first_tokens) {
    const std::uint32_t request = sequences_[id].request;
    if (ended(request)) continue;  // its abort is on the way
    RequestRecord& record = result_.requests[request];
    // A decode worker that computes more than a prompt's tail itself (it lost or never got the KV) prefills.
    const Sequence& s = sequences_[id];
    const bool tail = s.load_tokens > 0 || s.prompt - s.hit_tokens <= engines_[worker].limits().block_size;
    const bool loaded = legs_[id].handed_over && s.preemptions == 0 && tail;
    record.charge(loaded ? Stage::first_token : Stage::prefill, now());
    record.first_token = now();
    last_progress_ = now();
    if (!legs_[id].handed_over) {
      load_[worker].prefill_tokens -= routed_[request].prefill_tokens;
      load_[worker].context_tokens += s.prompt;
      routed_[request].prefill_tokens = 0;
    }
  }
  for (const SeqId id : outcome_.finished) {
    const Sequence& s = sequences_[id];
    const std::uint32_t request = s.request;
    RequestRecord& record = result_.requests[request];
    if (given_up(request) || (ended(request) && !s.silent)) {  // its abort comes too late
      engines_[worker].release(id, sequences_);
      free_sequence(id);
      continue;
    }
    record.preemptions += s.preemptions;
    record.recomputed_tokens += s.recomputed;
    if (s.silent) {
      prefill_finished(id);
      continue;
    }
    record.charge(Stage::decode, now());
    record.longest_gap = s.longest_gap;
    if (legs_[id].handed_over) {
      record.decode_hit_tokens = s.hit_tokens;
      drop_decode_load(request);
    } else {
      record.local_hit_tokens = s.hit_tokens;
      drop_whole_load(request);
    }
    finish(request, RequestStatus::completed, Reason::none);
    if (s_.transfer.bidirectional && legs_[id].handed_over && s.table != kNoTable) {
      pin(id);
    } else {
      engines_[worker].release(id, sequences_);
      free_sequence(id);
    }
  }
}

// Data-parallel ranks meet in every layer with experts, which compute all ranks' tokens: prompts meet what
// the others compute, and no rank's step ends before that of one that computes prompts. Ranks that all decode
// are taken to have like batches and do not wait.
//
// Before the step that starts now: what it meets, and until when others keep it.
void Simulation::meet_peers(std::uint32_t worker) {
  const std::int32_t ranks = pool_of(worker).parallelism.data;
  if (ranks == 1 || d_.model.experts == 0) return;
  Step& step = engines_[worker].current();
  const std::uint32_t first = d_.workers[worker].first_peer;
  std::int32_t others = 0;
  for (std::uint32_t peer = first; peer < first + static_cast<std::uint32_t>(ranks); ++peer) {
    if (peer == worker) continue;
    const WorkerState& state = workers_[peer];
    const std::int32_t tokens = state.computes.since == now() ? state.computes.before : state.computes.tokens;
    const bool starts = tokens == 0 && engines_[peer].has_requests();  // now or soon: with as many
    others += starts ? step.shape.tokens() : tokens;
    if (state.mode == WorkerMode::stepping && engines_[peer].current().shape.prefill_tokens > 0) {
      step.at_least = std::max(step.at_least, engines_[peer].step_end() - workers_[worker].step_began);
    }
  }
  // With CUDA graphs vLLM pads every rank to the largest (coordinate_batch_across_dp; up to 0.19 also where
  // no graph is replayed): experts meet as many tokens of each.
  const bool padded = pool_of(worker).engine.cudagraph_mode != CudagraphMode::none;
  if (step.shape.prefill_tokens > 0 && !padded) step.shape.other_tokens = others;
}

// After it has started, with prompts: nobody's step in flight ends before it.
void Simulation::hold_peers(std::uint32_t worker) {
  const std::int32_t ranks = pool_of(worker).parallelism.data;
  if (ranks == 1 || d_.model.experts == 0 || engines_[worker].current().shape.prefill_tokens == 0) return;
  const std::uint32_t first = d_.workers[worker].first_peer;
  for (std::uint32_t peer = first; peer < first + static_cast<std::uint32_t>(ranks); ++peer) {
    if (peer == worker || workers_[peer].mode != WorkerMode::stepping) continue;
    if (engines_[peer].current().items.empty()) continue;
    const Nanos time = engines_[peer].stretch(now(), engines_[worker].step_end());
    if (time != workers_[peer].next_boundary) push_boundary(peer, time);
  }
}

void Simulation::note_tokens(std::uint32_t worker, std::int32_t tokens) {
  auto& c = workers_[worker].computes;
  c = {now(), tokens, c.since == now() ? c.before : c.tokens};
}

void Simulation::start_step(std::uint32_t worker) {
  Engine& engine = engines_[worker];
  WorkerState& state = workers_[worker];
  const bool scheduled_before = engine.has_next();
  const bool work = engine.begin(now(), sequences_);
  ship(worker, !scheduled_before);
  if (work) start_loads(worker);
  send_heartbeats(worker);
  const bool posts = !state.ready.empty();
  const Nanos delay = post_ready(worker);
  if (work || posts) {
    outcome_.started.clear();
    state.step_began = now() + delay;
    meet_peers(worker);
    note_tokens(worker, engine.current().shape.tokens());
    engine.launch(now(), delay, pool_of(worker).engine.idle_step, sequences_, outcome_);
    for (const SeqId id : outcome_.started) {
      const std::uint32_t request = sequences_[id].request;
      RequestRecord& record = result_.requests[request];
      if (!legs_[id].handed_over) {
        if (prefill_drives(request)) record.reach(Stage::prefill_queue, now());
        continue;
      }
      if (ended(request)) continue;
      record.reach(Stage::decode_admission, engine.current().scheduled);  // a slot, once its KV was here
      if (sequences_[id].load_tokens > 0) settle_held(id);
    }
    if (push_) send_chunks(worker);
    state.mode = WorkerMode::stepping;
    last_progress_ = now();
    push_boundary(worker, engine.plan_run(now(), deadline(worker), sequences_));
    hold_peers(worker);
    return;
  }
  note_tokens(worker, 0);
  if (!engine.has_requests()) {
    state.mode = WorkerMode::asleep;
    return;
  }
  // Empty steps until there is news; of timers the nearest is known now.
  state.mode = WorkerMode::idle;
  state.idle_since = now();
  const Nanos timer = deadline(worker);
  if (timer != kNever) {
    const Nanos step = pool_of(worker).engine.idle_step;
    const Nanos steps = std::max<Nanos>(1, (timer - now() + step - 1) / step);
    push_boundary(worker, now() + steps * step);
  }
}

namespace {

// A fault that names what is not there would never strike, and nobody would know.
void check_target(const LoadedScenario& loaded, const Deployment& d, std::size_t requests,
                  std::size_t index) {
  const FaultConfig& fault = loaded.scenario.faults[index];
  const std::string place = loaded.place(fmt::format("/faults/{}/target", index));
  if (fault.target.empty()) return;
  if (fault.kind == FaultKind::client_cancel && fault.target != "proxy_window") {
    const bool number =
        fault.target.size() < 10 && fault.target.find_first_not_of("0123456789") == std::string::npos;
    if (number && std::stoul(fault.target) < requests) return;
    throw InputError(place,
                     fmt::format("is \"{}\", expected a request's number below {}, proxy_window, or none for "
                                 "any",
                                 fault.target, requests));
  }
  if (fault.kind != FaultKind::worker_crash) return;
  std::vector<std::string_view> known;
  for (const PoolPlan& pool : d.pools) known.push_back(pool.name);
  for (const WorkerPlan& worker : d.workers) known.push_back(worker.name);
  if (std::ranges::find(known, fault.target) != known.end()) return;
  throw InputError(place, fmt::format("is \"{}\", expected a pool or one of its workers, as {}{}",
                                      fault.target, known.back(), did_you_mean(fault.target, known)));
}

}  // namespace

void check_simulated(const LoadedScenario& loaded) {
  const Scenario& s = loaded.scenario;
  const auto refuse = [&](std::string_view pointer, std::string_view what) {
    throw InputError(loaded.place(pointer), fmt::format("{} is not simulated yet", what));
  };
  const auto check_transfer = [&](const TransferConfig& t, const std::string& at) {
    if (t.num_threads != TransferConfig{}.num_threads)
      refuse(at + "/num_threads", "posting by several threads");
    if (t.seed_first_token || t.fast_kv_dispatch || t.fast_kv_notify) {
      refuse(at, "seed_first_token, fast_kv_dispatch or fast_kv_notify");
    }
  };
  check_transfer(s.transfer, "/transfer");
  for (std::size_t i = 0; i < s.transfer_pairs.size(); ++i) {
    check_transfer(s.transfer_pairs[i].transfer, fmt::format("/transfer/pairs/{}", i));
  }
  for (std::size_t i = 0; i < s.faults.size(); ++i) {
    switch (s.faults[i].kind) {
      case FaultKind::message_lost:
      case FaultKind::transfer_failed:
      case FaultKind::client_cancel:
      case FaultKind::decode_rejection:
      case FaultKind::worker_crash:
        break;
      default:
        refuse(
            fmt::format("/faults/{}/kind", i),
            fmt::format("a fault of kind {}", kFaultKinds[static_cast<std::size_t>(s.faults[i].kind)].name));
    }
  }
  if (routing_policy(s.router.policy).uses_cache) {
    for (std::size_t p = 1; p < s.pools.size(); ++p) {
      if (s.pools[p].engine.block_size != s.pools[0].engine.block_size) {
        refuse(fmt::format("/pools/{}/engine/block_size", p),
               "a router that looks at caches of two block sizes");
      }
    }
  }
  if (s.router.max_retries > 0) refuse("/router/max_retries", "a retry");
}

std::optional<ReferenceService> reference_service(const WorkloadConfig& workload) {
  if (workload.reference_ttft_ms < 0 || workload.reference_tpot_ms < 0) return std::nullopt;
  return ReferenceService{ceil_ns(workload.reference_ttft_ms * 1e6),
                          ceil_ns(workload.reference_tpot_ms * 1e6)};
}

RunResult simulate(const Deployment& deployment, const LoadedScenario& loaded, const Trace& trace,
                   const RunHooks& hooks) {
  check_simulated(loaded);
  for (std::size_t i = 0; i < deployment.pools.size(); ++i) {
    const std::int32_t block = deployment.pools[i].engine.block_size;
    if (trace.hash_block_tokens > 0 && trace.hash_block_tokens % block != 0) {
      throw InputError(loaded.place(fmt::format("/pools/{}/engine/block_size", i)),
                       fmt::format("is {}, expected a divisor of the {} tokens that one hash id of {} covers",
                                   block, trace.hash_block_tokens, trace.name));
    }
  }
  for (std::size_t i = 0; i < loaded.scenario.faults.size(); ++i) {
    check_target(loaded, deployment, trace.requests.size(), i);
  }
  if (loaded.scenario.workload.sessions == Sessions::closed) {
    if (trace.sessions.empty()) {
      throw InputError(loaded.place("/workload/sessions"),
                       fmt::format("is closed, but {} has no sessions; expected a trace with session_id, or "
                                   "workload.infer_sessions",
                                   trace.name));
    }
    closed_think_times(trace, reference_service(loaded.scenario.workload));  // refuses what cannot be paced
  }
  return Simulation(deployment, loaded.scenario, trace, hooks).run();
}

}  // namespace pdsim
