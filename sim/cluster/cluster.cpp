#include "sim/cluster/cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "sim/cluster/identity.hpp"
#include "sim/cluster/simulation.hpp"

namespace pdsim {

Simulation::Simulation(const Deployment& deployment, const Scenario& scenario, const Trace& trace,
                       const RunHooks& hooks)
    : d_(deployment),
      s_(scenario),
      trace_(trace),
      hooks_(hooks),
      queue_(scenario.permute_ties),
      network_(deployment.topology),
      policy_(routing_policy(scenario.router.policy)),
      cache_view_(static_cast<std::uint32_t>(deployment.workers.size())),
      routing_random_(scenario.seed, Purpose::routing) {
  const std::size_t n = d_.workers.size();
  engines_.reserve(n);
  workers_.resize(n);
  load_.resize(n);
  hit_tokens_.resize(n);
  for (std::uint32_t w = 0; w < n; ++w) {
    const PoolPlan& pool = pool_of(w);
    EngineLimits limits;
    limits.block_size = pool.engine.block_size;
    limits.max_num_seqs = pool.engine.max_num_seqs;
    limits.max_num_batched_tokens = pool.engine.max_num_batched_tokens;
    limits.full_hit_tokens =
        s_.transfer.full_hit_tokens < 0 ? pool.engine.block_size : s_.transfer.full_hit_tokens;
    limits.pd_recompute_threshold = s_.transfer.pd_recompute_threshold;
    limits.chunked_prefill = pool.engine.enable_chunked_prefill;
    limits.async = pool.engine.async_scheduling;
    limits.step_by_step = pool.engine.step_by_step;
    engines_.emplace_back(limits, clock_of(*pool.step_model, d_.model.window), pool.blocks,
                          pool.engine.enable_prefix_caching, policy_.uses_cache);
    if (pool.role == Role::decode) workers_[w].contacts.resize(n);
    if (pool.role != Role::decode) prefill_workers_.push_back(w);
    if (pool.role != Role::prefill) decode_workers_.push_back(w);
  }
  closed_ = s_.workload.synthetic && s_.workload.synthetic->concurrency > 0;
  result_.requests.resize(trace_.requests.size());
  prefill_leg_.assign(trace_.requests.size(), kNoSeq);
  routed_prefill_tokens_.assign(trace_.requests.size(), 0);
}

// --------------------------------------------------------------------------------------- main loop

RunResult Simulation::run() {
  if (closed_) {
    const auto first = std::min<std::size_t>(trace_.requests.size(),
                                             static_cast<std::size_t>(s_.workload.synthetic->concurrency));
    for (; next_arrival_ < first; ++next_arrival_) {
      queue_.push(0, Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_), 0, 0);
    }
  } else {
    push_arrivals();
  }
  // Longer than anything that could still free or bring something.
  stall_after_ = std::max({kStallAfter, 2 * s_.transfer.kv_lease_duration, 2 * s_.transfer.handshake,
                           2 * s_.router.hop, 2 * s_.transfer.notification});
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
        on_contact(entity, arg);
        break;
      case kArrival:
        on_arrival(entity);
        break;
      case kDeliver:
        on_deliver(entity, arg, (event.arg & kSecondLeg) != 0);
        break;
      case kHeartbeat:
        ++messages_;
        workers_[entity].heartbeats.push_back({arg, now() - s_.transfer.notification});
        news(entity, false);
        break;
      case kReadDone:
        ++messages_;
        if (legs_[arg].generation == event.arg >> 32) {  // else its lease ran out on the way
          workers_[entity].read_done.push_back(arg);
          news(entity, false);
        }
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
    }
  }
  return report(RunStatus::finished);
}

// All arrivals of the next instant at once, so that ties between them are the queue's to order. Time zero is
// the first arrival, whatever epoch a trace counts from.
void Simulation::push_arrivals() {
  const std::size_t n = trace_.requests.size();
  if (next_arrival_ == n) return;
  const Nanos time = trace_.requests[next_arrival_].arrival;
  while (next_arrival_ < n && trace_.requests[next_arrival_].arrival == time) {
    queue_.push(time - trace_.requests.front().arrival, Phase::arrival, kArrival,
                static_cast<std::uint32_t>(next_arrival_), 0, 0);
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
  WorkerState& state = workers_[worker];
  switch (state.mode) {
    case Mode::asleep:
      if (wakes) {
        state.mode = Mode::idle;
        state.idle_since = now();
        push_boundary(worker, now());
      }
      break;
    case Mode::idle: {
      const Nanos step = pool_of(worker).engine.idle_step;
      const Nanos steps = std::max<Nanos>(1, (now() - state.idle_since + step - 1) / step);
      const Nanos time = state.idle_since + steps * step;
      if (time < state.next_boundary) push_boundary(worker, time);
      break;
    }
    case Mode::stepping: {
      const Nanos time = engines_[worker].cut_run(now());
      if (time != kNever) push_boundary(worker, time);
      break;
    }
  }
}

// ------------------------------------------------------------------------------------ router, requests

// Why a pool cannot take its part of a request: prefill holds the prompt and one token, others all of it.
Reason Simulation::too_long(const PoolPlan& pool, const Request& request) const {
  const std::int64_t tokens =
      std::int64_t{request.prompt_tokens} +
      (pool.role == Role::prefill ? std::min(1, request.output_tokens) : request.output_tokens);
  if (tokens > pool.engine.max_model_len) return Reason::exceeds_max_model_len;
  if (tokens > pool.kv_tokens()) return Reason::exceeds_kv_cache;
  return Reason::none;
}

// Those of `workers` whose pool can take the request; all of them, mostly. When none can, why.
Reason Simulation::candidates(const Request& request, const std::vector<std::uint32_t>& workers,
                              std::vector<std::uint32_t>& out) const {
  out.clear();
  Reason reason = Reason::none;
  for (const std::uint32_t w : workers) {
    const Reason own = too_long(pool_of(w), request);
    if (own == Reason::none) {
      out.push_back(w);
    } else {
      reason = own;
    }
  }
  return out.empty() ? reason : Reason::none;
}

void Simulation::on_arrival(std::uint32_t request) {
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
  if (!closed_ && static_cast<std::size_t>(request) + 1 == next_arrival_) push_arrivals();

  Reason reason = candidates(r, prefill_workers_, prefill_candidates_);
  if (reason == Reason::none) reason = candidates(r, decode_workers_, decode_candidates_);
  if (reason != Reason::none) {
    finish(request, RequestStatus::rejected, reason);
    return;
  }
  std::uint32_t prefill = kNoWorker, decode = kNoWorker;
  route(request, prefill, decode);
  record.prefill_worker = prefill;
  record.decode_worker = d_.disaggregated && r.output_tokens == 0 ? kNoWorker : decode;
  queue_.push(now() + s_.router.hop, Phase::arrival, kDeliver, request, 0, prefill);
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
    prompt_identity(trace_, request, block, identity_);
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
  const std::int32_t to_compute = r.prompt_tokens - (policy_.uses_cache ? hit_tokens_[prefill] : 0);
  routed_prefill_tokens_[request] = to_compute;
  load_[prefill].prefill_tokens += to_compute;
  ++load_[prefill].requests;
  if (decode != prefill) {
    ++load_[decode].requests;
    load_[decode].context_tokens += r.prompt_tokens;
  }
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
  sequence_identity(trace_, request, engines_[worker].limits().block_size, final, identity);
  s.identity = std::move(identity);
  const std::uint32_t generation = legs_[id].generation;
  legs_[id] = Leg{};
  legs_[id].generation = generation;
  legs_[id].worker = worker;
  return id;
}

void Simulation::free_sequence(SeqId id) {
  ++legs_[id].generation;
  free_sequences_.push_back(id);
}

void Simulation::finish(std::uint32_t request, RequestStatus status, Reason reason) {
  RequestRecord& record = result_.requests[request];
  record.status = status;
  record.reason = reason;
  record.end = now();
  PDSIM_CHECK(record.mark == record.end, "a request ended with time that no stage was charged");
  --in_flight_;
  ++done_;
  last_progress_ = result_.end = now();
  if (closed_ && next_arrival_ < trace_.requests.size()) {
    // A nanosecond later: nobody may hear of this while others decide at this instant.
    queue_.push(now() + 1, Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_++), 0, 0);
  }
}

// A request reaches an engine: prefill (or the only one) first, decode with the second delivery.
void Simulation::on_deliver(std::uint32_t request, std::uint32_t worker, bool handed_over) {
  ++messages_;
  last_progress_ = now();
  RequestRecord& record = result_.requests[request];
  const Request& r = trace_.requests[request];
  const bool prefill_only = !handed_over && record.prefill_worker != record.decode_worker;
  const bool silent = prefill_only || r.output_tokens == 0;
  const SeqId id = new_sequence(request, worker, r.prompt_tokens + (silent ? 1 : r.output_tokens));
  Sequence& s = sequences_[id];
  s.silent = silent;
  if (handed_over) {
    Leg& leg = legs_[id];
    leg.handed_over = s.remote = true;
    leg.tracked_since = now();
    leg.peer = std::exchange(prefill_leg_[request], kNoSeq);  // none: its lease has run out already
    if (leg.peer != kNoSeq) legs_[leg.peer].peer = id;
    workers_[worker].tracked.push_back(id);
  } else {
    record.charge(Stage::router, now());
  }
  engines_[worker].enqueue(id);
  news(worker, true);
}

// ---------------------------------------------------------------------------------------- boundaries

Nanos Simulation::deadline(const WorkerState& state) const {
  const Nanos beat = state.tracked.empty()
                         ? kNever
                         : state.last_heartbeat + heartbeat_interval(s_.transfer.kv_lease_duration);
  return std::min(state.least_expiry, beat);
}

void Simulation::on_boundary(std::uint32_t worker) {
  Engine& engine = engines_[worker];
  WorkerState& state = workers_[worker];
  state.next_boundary = kNever;
  engine.close_run(sequences_, result_.gaps);
  engine.account_blocks(now());
  if (engine.stepping()) take_outputs(worker);
  poll_landed(worker);
  take_notifications(worker);
  expire_leases(worker);
  start_step(worker);
}

void Simulation::take_outputs(std::uint32_t worker) {
  outcome_.first_tokens.clear();
  outcome_.finished.clear();
  engines_[worker].finish_step(now(), sequences_, outcome_, result_.gaps);
  for (const SeqId id : outcome_.first_tokens) {
    RequestRecord& record = result_.requests[sequences_[id].request];
    // A decode worker that computes more than a prompt's tail itself (it lost or never got the KV) prefills.
    const Sequence& s = sequences_[id];
    const bool tail = s.load_tokens > 0 || s.prompt - s.hit_tokens <= engines_[worker].limits().block_size;
    const bool loaded = legs_[id].handed_over && s.preemptions == 0 && tail;
    record.charge(loaded ? Stage::first_token : Stage::prefill, now());
    record.first_token = now();
    last_progress_ = now();
    if (!legs_[id].handed_over) {
      load_[worker].prefill_tokens -= routed_prefill_tokens_[sequences_[id].request];
      load_[worker].context_tokens += sequences_[id].prompt;
    }
  }
  for (const SeqId id : outcome_.finished) {
    const Sequence& s = sequences_[id];
    RequestRecord& record = result_.requests[s.request];
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
    } else {
      record.local_hit_tokens = s.hit_tokens;
    }
    --load_[worker].requests;
    load_[worker].context_tokens -= s.prompt;
    engines_[worker].release(id, sequences_);
    finish(s.request, RequestStatus::completed, Reason::none);
    free_sequence(id);
  }
}

void Simulation::start_step(std::uint32_t worker) {
  Engine& engine = engines_[worker];
  WorkerState& state = workers_[worker];
  const bool work = engine.begin(now(), sequences_);
  if (work) start_loads(worker);
  send_heartbeats(worker);
  const bool posts = !state.ready.empty();
  const Nanos delay = post_ready(worker);
  if (work || posts) {
    outcome_.started.clear();
    engine.launch(now(), delay, pool_of(worker).engine.idle_step, sequences_, outcome_);
    for (const SeqId id : outcome_.started) {
      RequestRecord& record = result_.requests[sequences_[id].request];
      if (!legs_[id].handed_over) {
        record.charge(Stage::prefill_queue, now());
        continue;
      }
      record.charge(Stage::decode_admission, engine.current().scheduled);  // a slot, once its KV was here
      if (sequences_[id].load_tokens > 0) settle_held(id);
    }
    state.mode = Mode::stepping;
    last_progress_ = now();
    push_boundary(worker, engine.plan_run(now(), deadline(state), sequences_));
    return;
  }
  if (!engine.has_requests()) {
    state.mode = Mode::asleep;
    return;
  }
  // Empty steps until there is news; of timers the nearest is known now.
  state.mode = Mode::idle;
  state.idle_since = now();
  const Nanos timer = deadline(state);
  if (timer != kNever) {
    const Nanos step = pool_of(worker).engine.idle_step;
    const Nanos steps = std::max<Nanos>(1, (timer - now() + step - 1) / step);
    push_boundary(worker, now() + steps * step);
  }
}

void check_simulated(const LoadedScenario& loaded) {
  const Scenario& s = loaded.scenario;
  const auto refuse = [&](std::string_view pointer, std::string_view what) {
    throw InputError(loaded.place(pointer),
                     fmt::format("{} is not simulated yet; this version knows pull between "
                                 "a prefill and a decode pool, and colocated pools",
                                 what));
  };
  const auto check_transfer = [&](const TransferConfig& t, const std::string& at) {
    if (t.mode != TransferMode::pull) refuse(at + "/mode", "a transfer mode other than pull");
    if (t.bidirectional) refuse(at + "/bidirectional", "bidirectional transfer");
    const TransferConfig defaults;
    if (t.num_threads != defaults.num_threads) refuse(at + "/num_threads", "posting by several threads");
    if (t.enforce_handshake_compat != defaults.enforce_handshake_compat) {
      refuse(at + "/enforce_handshake_compat", "a handshake between unlike workers");
    }
    if (t.background_receiver || t.seed_first_token || t.fast_kv_dispatch || t.fast_kv_notify ||
        t.enable_cross_layers_blocks) {
      refuse(at, "an option of the transfer that vLLM has not released, or another block layout,");
    }
  };
  check_transfer(s.transfer, "/transfer");
  if (!s.transfer_pairs.empty()) refuse("/transfer/pairs", "a transfer of its own for a pair of pools");
  if (!s.faults.empty()) refuse("/faults", "a fault");
  if (s.workload.client_timeout > 0) refuse("/workload/client_timeout_s", "a client that gives up");
  if (s.workload.sessions == Sessions::closed) refuse("/workload/sessions", "a closed session");
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
  return Simulation(deployment, loaded.scenario, trace, hooks).run();
}

}  // namespace pdsim
