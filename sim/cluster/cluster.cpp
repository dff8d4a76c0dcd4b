#include "sim/cluster/cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "sim/cluster/identity.hpp"
#include "sim/core/event_queue.hpp"
#include "sim/network/network.hpp"
#include "sim/routing/cache_view.hpp"
#include "sim/routing/policies.hpp"
#include "sim/serving/engine.hpp"
#include "sim/transfer/pull.hpp"

namespace pdsim {

namespace {

// In the order in which kinds of one phase go at one instant.
enum Kind : std::uint32_t {
  kNetwork,    // completion: flows end; arg = the network's epoch
  kFlowStart,  // completion: a transfer's part has its first descriptor posted; arg = part
  kLanded,     // completion: a transfer's last byte is in decode's memory
  kContact,    // completion: a handshake is done; entity = decode worker, arg = prefill worker
  kArrival,    // arrival: a request reaches the router
  kDeliver,    // arrival: a request reaches an engine; arg = worker
  kHeartbeat,  // arrival: entity = prefill worker, arg = decode worker
  kReadDone,   // arrival: a notification reaches a prefill worker; arg = sequence
  kBoundary,   // decision: entity = worker, arg = epoch
};

constexpr std::uint64_t kSecondLeg = std::uint64_t{1} << 32;

// Nothing but heartbeats for this long is a stall: longer than any lease or TTL that could free something.
constexpr Nanos kStallAfter = 3600 * kSecond;

// Between GPUs of one node NIXL copies through UCX, whatever carries bytes between nodes.
constexpr const TransferBackend& kWithinNode = kTransferBackends[1];
static_assert(kWithinNode.name == "ucx");

struct Leg {  // beside Sequence: what the cluster needs to know of one
  std::uint32_t worker = kNoWorker;
  bool handed_over = false;      // a decode leg
  std::uint32_t generation = 0;  // grows when the sequence is freed
  SeqId peer = kNoSeq;           // the other leg, until decode has what it needs from prefill
  Nanos tracked_since = -1;      // decode leg: heartbeats cover it from then on
  Nanos held_since = -1;         // prefill leg: finished, blocks leased
  Nanos expiry = kNever;         // of that lease
  std::uint32_t transfer = UINT32_MAX;
};

struct Transfer {
  SeqId seq = kNoSeq;  // the decode leg
  std::int32_t parts_left = 0;
  PullLayout layout;
  Bytes part_bytes = 0;  // of one flow: one rank from one source
  Bytes operation_bytes = 0;
  double rate_cap = 0;
  Nanos latency = 0;
  Nanos post_begin = 0, post_end = 0;
};

enum class Mode : std::uint8_t { asleep, idle, stepping };

struct Contact {
  enum State : std::uint8_t { none, under_way, made } state = none;
  Nanos last = 0;
};

struct WorkerState {
  Mode mode = Mode::asleep;
  Nanos idle_since = 0;          // origin of its empty steps
  Nanos next_boundary = kNever;  // of the boundary event in force
  std::uint64_t epoch = 0;       // of that event
  std::vector<SeqId> ready;      // loads whose descriptors the next step posts
  std::vector<SeqId> shaking;    // loads that wait for a handshake
  std::vector<SeqId> landed;     // loads whose last byte has arrived, not yet polled
  std::vector<SeqId> tracked;    // loads that heartbeats cover
  std::vector<SeqId> leased;     // finished prefill legs whose blocks wait to be read
  std::vector<SeqId> read_done;  // of them, those whose notification has come
  struct Beat {
    std::uint32_t from;
    Nanos sent;
  };
  std::vector<Beat> heartbeats;  // received, not yet seen
  Nanos least_expiry = kNever;
  Nanos last_heartbeat = INT64_MIN / 2;
  Nanos handshakes_until = 0;     // its one background thread is busy until then
  std::vector<Contact> contacts;  // by prefill worker
  std::size_t cache_log_read = 0;
};

class Simulation {
 public:
  Simulation(const Deployment& deployment, const Scenario& scenario, const Trace& trace,
             const RunHooks& hooks);
  RunResult run();

 private:
  // events
  void on_arrival(std::uint32_t request);
  void on_deliver(std::uint32_t request, std::uint32_t worker, bool handed_over);
  void on_boundary(std::uint32_t worker);
  void on_contact(std::uint32_t worker, std::uint32_t peer);
  void on_flow_start(std::uint32_t transfer, std::int32_t source);
  void on_network();
  void on_landed(std::uint32_t transfer);
  void push_arrivals();
  void push_boundary(std::uint32_t worker, Nanos time);
  void news(std::uint32_t worker, bool wakes);

  // parts of a boundary
  void take_outputs(std::uint32_t worker);
  void poll_landed(std::uint32_t worker);
  void take_notifications(std::uint32_t worker);
  void expire_leases(std::uint32_t worker);
  void start_step(std::uint32_t worker);
  void send_heartbeats(std::uint32_t worker);
  void start_loads(std::uint32_t worker);
  Nanos post_ready(std::uint32_t worker);
  Nanos deadline(const WorkerState& state) const;

  // hand-off
  void prefill_finished(SeqId id);
  void free_leased(SeqId id);
  void notify_read_done(SeqId decode_leg);
  void shake_hands(std::uint32_t worker, std::uint32_t peer);
  void load_failed(SeqId id, Stage stage);
  const PullLayout& layout_between(std::uint32_t prefill, std::uint32_t decode) const {
    return layouts_[static_cast<std::size_t>(d_.workers[prefill].pool) * d_.pools.size() +
                    static_cast<std::size_t>(d_.workers[decode].pool)];
  }

  // requests
  SeqId new_sequence(std::uint32_t request, std::uint32_t worker, std::int32_t final);
  void free_sequence(SeqId id);
  void finish(std::uint32_t request, RequestStatus status, Reason reason);
  Reason too_long(const PoolPlan& pool, const Request& request) const;
  Reason candidates(const Request& request, const std::vector<std::uint32_t>& workers,
                    std::vector<std::uint32_t>& out) const;
  void route(std::uint32_t request, std::uint32_t& prefill, std::uint32_t& decode);
  std::uint32_t choose(RouterView& view, const std::vector<std::uint32_t>& candidates, RouterState& state);
  void read_cache_events();

  const PoolPlan& pool_of(std::uint32_t worker) const {
    return d_.pools[static_cast<std::size_t>(d_.workers[worker].pool)];
  }
  Nanos now() const { return queue_.now(); }
  std::string who_waits() const;
  void check_conservation(RunResult& result);
  RunResult report(RunStatus status);

  const Deployment& d_;
  const Scenario& s_;
  const Trace& trace_;
  const RunHooks& hooks_;

  EventQueue queue_;
  Network network_;
  bool network_dirty_ = false;
  std::vector<Completion> completions_;

  std::vector<Engine> engines_;
  std::vector<WorkerState> workers_;
  std::vector<std::uint32_t> prefill_workers_, decode_workers_;
  std::vector<std::uint32_t> prefill_candidates_, decode_candidates_;  // for the request at hand
  std::vector<PullLayout> layouts_;                                    // by (prefill pool, decode pool)

  Sequences sequences_;
  std::vector<Leg> legs_;  // parallel to sequences_
  std::vector<SeqId> free_sequences_;
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> free_transfers_;
  std::vector<SeqId> prefill_leg_;  // by request, until decode has it
  std::vector<BlockId> scratch_;
  Outcome outcome_;

  const RoutingPolicy& policy_;
  RouterState prefill_turns_, decode_turns_;
  std::vector<WorkerLoad> load_;
  std::vector<std::int32_t> hit_tokens_;
  CacheView cache_view_;
  Random routing_random_;
  std::vector<HashRun> identity_;
  std::vector<std::int32_t> routed_prefill_tokens_;  // by request: what its worker's load was charged

  RunResult result_;
  std::size_t next_arrival_ = 0;
  std::int32_t in_flight_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t messages_ = 0;  // logical events other than engine steps
  Nanos last_progress_ = 0;
  bool closed_ = false;  // arrivals follow completions
};

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
    workers_[w].contacts.resize(n);
    if (pool.role != Role::decode) prefill_workers_.push_back(w);
    if (pool.role != Role::prefill) decode_workers_.push_back(w);
  }
  const bool latent = d_.model.latent > 0;
  for (const PoolPlan& from : d_.pools) {
    for (const PoolPlan& to : d_.pools) {
      layouts_.push_back(pull_layout(latent ? 0 : d_.model.kv_heads, from.parallelism.tensor,
                                     to.parallelism.tensor, to.footprint.kv_regions,
                                     to.footprint.kv_bytes_per_token));
    }
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
  const std::uint64_t total = trace_.requests.size();
  while (done_ < total) {
    if (queue_.empty() || now() > last_progress_ + kStallAfter) {
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

// All arrivals of the next instant at once, so that ties between them are the queue's to order.
void Simulation::push_arrivals() {
  const std::size_t n = trace_.requests.size();
  if (next_arrival_ == n) return;
  const Nanos time = trace_.requests[next_arrival_].arrival;
  while (next_arrival_ < n && trace_.requests[next_arrival_].arrival == time) {
    queue_.push(time, Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_), 0, 0);
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
  record.decode_worker = decode;
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

std::uint32_t Simulation::choose(RouterView& view, const std::vector<std::uint32_t>& candidates,
                                 RouterState& state) {
  return policy_.choose(view, candidates, state, routing_random_);
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
  view.decode = d_.disaggregated;
  const std::int32_t block = d_.pools[0].engine.block_size;
  if (policy_.uses_cache) {
    read_cache_events();
    prompt_identity(trace_, request, block, identity_);
    cache_view_.match(identity_, (r.prompt_tokens - 1) / block, hit_tokens_);
    for (std::int32_t& blocks : hit_tokens_) blocks *= block;
  }
  decode = choose(view, decode_candidates_, decode_turns_);
  prefill = decode;
  if (d_.disaggregated && r.output_tokens > 0) {
    const std::int32_t lacking = r.prompt_tokens - (policy_.uses_cache ? hit_tokens_[decode] : 0);
    if (lacking >= s_.router.local_prefill_threshold) {
      view.decode = false;
      prefill = choose(view, prefill_candidates_, prefill_turns_);
    }
  } else if (d_.disaggregated) {
    view.decode = false;
    prefill = choose(view, prefill_candidates_, prefill_turns_);  // nothing to decode: it ends there
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
    queue_.push(now(), Phase::arrival, kArrival, static_cast<std::uint32_t>(next_arrival_++), 0, 0);
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
    // A preemption before the first token computes the prompt here: that is prefill.
    const bool loaded = legs_[id].handed_over && sequences_[id].preemptions == 0;
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
      if (!legs_[id].handed_over) {
        result_.requests[sequences_[id].request].charge(Stage::prefill_queue, now());
      }
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

// ------------------------------------------------------------------------------------------ hand-off

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
  const Nanos begin = std::max(now(), state.handshakes_until);
  state.handshakes_until = begin + layout_between(peer, worker).sources * s_.transfer.handshake;
  queue_.push(state.handshakes_until, Phase::completion, kContact, worker, peer, peer);
}

void Simulation::on_contact(std::uint32_t worker, std::uint32_t peer) {
  ++messages_;
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
    const PullLayout& layout = layout_between(source, worker);
    const std::int32_t block = engine.limits().block_size;
    const std::int32_t first = s.hit_tokens / block;
    const std::int32_t count = engine.pool().size(s.table) - first;
    const std::int32_t runs = common_runs(engines_[source].pool(), sequences_[leg.peer].table, first,
                                          engine.pool(), s.table, first, count, scratch_);
    const std::int64_t n = descriptors(layout, runs, count);

    const GpuId from = d_.workers[source].gpus[0], to = d_.workers[worker].gpus[0];
    const Route path = pdsim::route(d_.topology, from, to);
    const bool local = path.transport == Transport::local;
    const Nanos fixed = local ? kWithinNode.post_fixed : s_.transfer.post_fixed;
    const Nanos each = local ? kWithinNode.post_per_descriptor : s_.transfer.post_per_descriptor;
    const Nanos posting = posting_time(layout, fixed, each, n);

    std::uint32_t t;
    if (free_transfers_.empty()) {
      t = static_cast<std::uint32_t>(transfers_.size());
      transfers_.emplace_back();
    } else {
      t = free_transfers_.back();
      free_transfers_.pop_back();
    }
    Transfer& transfer = transfers_[t];
    transfer.seq = id;
    transfer.layout = layout;
    transfer.parts_left = layout.ranks * layout.sources;
    const double rank_bytes = count * block * layout.bytes_per_token;
    transfer.part_bytes = static_cast<Bytes>(rank_bytes / layout.sources);
    const double descriptor_bytes = rank_bytes / static_cast<double>(n);
    transfer.operation_bytes =
        wire_operation_bytes(std::max<Bytes>(1, static_cast<Bytes>(descriptor_bytes)),
                             local ? 1 : d_.topology.rails[static_cast<std::size_t>(to)]);
    transfer.rate_cap = each > 0 ? descriptor_bytes / static_cast<double>(each) : kUnbounded;
    transfer.latency = 2 * path.latency;  // a READ's request travels before its data
    transfer.post_begin = now() + delay;
    transfer.post_end = transfer.post_begin + posting;
    leg.transfer = t;
    for (std::int32_t j = 0; j < layout.sources; ++j) {
      const Nanos start = transfer.post_begin + j * (posting / layout.sources) + fixed;
      queue_.push(start, Phase::completion, kFlowStart, t, static_cast<std::uint32_t>(j),
                  static_cast<std::uint64_t>(j));
    }
    delay += posting;
    record.charge(Stage::transfer_post, transfer.post_end);
    record.transferred_tokens = s.prompt - s.hit_tokens;
    record.transfer_bytes = transfer.part_bytes * transfer.parts_left;
    record.descriptors = n * layout.ranks;
    ++result_.transfers.count;
    result_.transfers.bytes += record.transfer_bytes;
    result_.transfers.descriptors += record.descriptors;
    result_.transfers.post_ms.push_back(to_ms(posting));
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
  for (std::int32_t rank = 0; rank < transfer.layout.ranks; ++rank) {
    const std::int32_t remote =
        source_rank(transfer.layout, static_cast<std::int32_t>(from.size()), rank, source);
    FlowRequest flow;
    flow.source = from[static_cast<std::size_t>(remote)];
    flow.destination = to[static_cast<std::size_t>(rank)];
    flow.bytes = transfer.part_bytes;
    flow.op = Op::read;
    flow.operation_bytes = transfer.operation_bytes;
    flow.rate_cap = transfer.rate_cap;
    flow.tag = std::uint64_t{t} << 32 | static_cast<std::uint64_t>(rank * transfer.layout.sources + source);
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
      queue_.push(std::max(now() + transfer.latency, transfer.post_end), Phase::completion, kLanded, t, 0, 0);
    }
  }
}

void Simulation::on_landed(std::uint32_t t) {
  ++messages_;
  last_progress_ = now();
  const SeqId id = transfers_[t].seq;
  result_.requests[sequences_[id].request].charge(Stage::transfer_wire, now());
  result_.transfers.wire_ms.push_back(to_ms(now() - transfers_[t].post_end));
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
    result_.transfers.decode_byte_seconds +=
        engines_[worker].pool().size(s.table) * pool_of(worker).kv_bytes_per_block *
        static_cast<double>(d_.workers[worker].gpus.size()) * to_seconds(now() - s.admitted);
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
    engines_[worker].loaded(id, s.hit_tokens, sequences_);
    return;
  }
  engines_[worker].abandon(id, sequences_);
  --load_[worker].requests;
  load_[worker].context_tokens -= s.prompt;
  finish(s.request, RequestStatus::failed, Reason::kv_lease_expired);
  free_sequence(id);
}

// -------------------------------------------------------------------------------------------- report

std::string Simulation::who_waits() const {
  std::string text;
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    const Engine& e = engines_[w];
    if (!e.has_requests() && workers_[w].leased.empty()) continue;
    text += fmt::format(
        "{}{}: {} running, {} waiting for blocks or a slot, {} waiting for KV, {} prompts held "
        "for decode, {} of {} blocks free",
        text.empty() ? "" : "; ", d_.workers[w].name, e.running(), e.waiting(), e.parked(),
        workers_[w].leased.size(), e.pool().free_blocks(), e.pool().total_blocks());
  }
  return fmt::format("nothing can go on at {:.3f} s: {}", to_seconds(now()),
                     text.empty() ? "no worker has work" : text);
}

void Simulation::check_conservation(RunResult& result) {
  std::array<std::uint64_t, kStatusNames.size()> by_status{};
  for (const RequestRecord& r : result.requests) {
    ++by_status[static_cast<std::size_t>(r.status)];
    if (r.end < 0) continue;
    Nanos sum = 0;
    for (const Nanos stage : r.stages) sum += stage;
    PDSIM_CHECK(sum == r.e2e(), "stages do not sum to the end-to-end time");
    PDSIM_CHECK(r.local_hit_tokens >= 0 && r.local_hit_tokens + r.remote_hit_tokens < r.prompt_tokens,
                "more of a prompt was found than it has");
  }
  PDSIM_CHECK(done_ + by_status[0] == result.requests.size(), "requests were lost");
  const FlowTotals& flows = network_.totals();
  PDSIM_CHECK(network_.in_flight() > 0 || flows.requested == flows.delivered + flows.abandoned,
              "bytes sent are not bytes received");
  PDSIM_CHECK(result.status != RunStatus::finished || result.transfers.failed > 0 ||
                  result.transfers.bytes == flows.delivered,
              "bytes that requests count are not those that the network delivered");
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    const Engine& engine = engines_[w];
    if (!engine.has_requests() && workers_[w].leased.empty()) {
      PDSIM_CHECK(engine.pool().free_blocks() == engine.pool().total_blocks(), "blocks were not given back");
    }
    if (hooks_.check_pools) engine.pool().check();
  }
}

RunResult Simulation::report(RunStatus status) {
  RunResult& result = result_;
  result.status = status;
  if (status != RunStatus::finished) result.end = std::max(result.end, now());
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    Engine& engine = engines_[w];
    engine.settle(result.end, sequences_, result.gaps);
    engine.account_blocks(result.end);
    const Engine::Statistics& st = engine.statistics();
    const PoolPlan& pool = pool_of(w);
    WorkerReport report;
    report.name = d_.workers[w].name;
    report.role = kRoles[static_cast<std::size_t>(pool.role)].name;
    report.steps = st.totals.steps;
    report.busy = st.busy;
    report.posting = st.posting;
    report.work = pool.step_model->work(st.totals);
    report.peak_flops_per_ns = peak_ops_per_ns(*pool.gpu, d_.weights);
    report.peak_bytes_per_ns = pool.gpu->hbm_bytes_per_ns;
    report.preemptions = st.preemptions;
    report.evicted_blocks = engine.pool().evicted_blocks();
    report.kv_blocks = pool.blocks;
    const double block_ns = static_cast<double>(pool.blocks) * static_cast<double>(result.end);
    report.kv_usage_mean = block_ns > 0 ? st.used_block_ns / block_ns : 0;
    report.kv_usage_max = static_cast<double>(st.max_used_blocks) / pool.blocks;
    result.workers.push_back(report);
    result.events += static_cast<std::uint64_t>(st.totals.steps);
    result.extrapolated_steps += st.extrapolated_steps;
    for (const SeqId id : workers_[w].leased) {
      ++result.transfers.leases_outstanding;
      result.transfers.prefill_byte_seconds +=
          engine.pool().size(sequences_[id].table) * pool.kv_bytes_per_block *
          static_cast<double>(d_.workers[w].gpus.size()) * to_seconds(result.end - legs_[id].held_since);
    }
  }
  for (std::size_t link = 0; link < d_.topology.links.size(); ++link) {
    const LinkUse use = network_.link_use(static_cast<LinkId>(link), result.end);
    if (use.bytes > 0) result.links.push_back({d_.topology.link_names[link], use.bytes, use.mean, use.max});
  }
  result.events += messages_;
  result.queue_pops = queue_.pops();
  check_conservation(result);
  return std::move(result_);
}

}  // namespace

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
