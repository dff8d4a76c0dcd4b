// The state of a run and the events that change it. Private to this folder: cluster.hpp is its face.
//
// All state is arrays indexed by small ids: requests in order of arrival, workers, sequences (a request's
// legs), hand-overs and batches of flows (all three recycled, with a generation). An event names what it is
// about by such an id; one switch in run() dispatches it. The parts are in five files: cluster.cpp (the
// loop, requests, boundaries), handoff.cpp (KV on its way: what transfer/handoff.hpp asks for), reuse.cpp
// (retained turns and the router's memory of them), faults.cpp (what breaks, who gives up), report.cpp
// (what is left behind, and the checks).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/cluster/identity.hpp"
#include "sim/cluster/transfer_plan.hpp"
#include "sim/core/event_queue.hpp"
#include "sim/network/network.hpp"
#include "sim/routing/cache_view.hpp"
#include "sim/routing/policies.hpp"
#include "sim/serving/engine.hpp"
#include "sim/transfer/handoff.hpp"
#include "sim/transfer/retention.hpp"

namespace pdsim {

// In the order in which kinds of one phase go at one instant.
enum Kind : std::uint32_t {
  kNetwork,       // completion: flows end; arg = the network's epoch
  kFlowStart,     // completion: a batch's turn has its first descriptor posted; arg = turn
  kLanded,        // completion: a batch's last byte is in the destination's memory
  kContact,       // completion: a handshake is done; entity = who began it, arg = with whom
  kFault,         // arrival: something breaks; entity = which of the scenario's faults
  kArrival,       // arrival: a request reaches the router
  kDeliver,       // arrival: a request reaches an engine; arg = worker, with kSecondLeg for decode's leg
  kHeartbeat,     // arrival: entity = prefill worker, arg = decode worker
  kReadDone,      // arrival: a notification reaches who holds blocks; arg = sequence
  kRegistration,  // arrival: push: decode's blocks reach prefill; entity = hand-over
  kWriterPoll,    // arrival: push: prefill's writer looks for a registration; entity = hand-over
  kWatchdog,      // arrival: push: decode gives a registration up; entity = hand-over
  kPushFailed,    // arrival: push: prefill says that it could not write; entity = hand-over
  kTimeout,       // arrival: a client has waited enough; entity = request
  kRestart,       // arrival: a worker is back, empty
  kBoundary,      // decision: entity = worker, arg = epoch
};

constexpr std::uint64_t kSecondLeg = std::uint64_t{1} << 32;

// Nothing but timers for this long is a stall, unless a lease or a delay is longer.
constexpr Nanos kStallAfter = 3600 * kSecond;

using HandoffId = std::uint32_t;
inline constexpr std::uint32_t kNone = UINT32_MAX;

// Names a sequence or a hand-over that may have gone when it is looked at.
struct Ref {
  std::uint32_t id;
  std::uint32_t generation;
};

struct Leg {  // beside Sequence: what the cluster needs to know of one
  std::uint32_t worker = kNoWorker;
  std::uint32_t generation = 0;  // grows when the sequence gives up its blocks for good
  HandoffId incoming = kNone;    // its KV comes by this one
  HandoffId outgoing = kNone;    // its blocks go by this one
  bool live = false;             // its slot is in use
  bool handed_over = false;      // a decode leg
  bool zombie = false;           // its request has ended; its blocks wait for a transfer
  Nanos tracked_since = -1;      // decode leg: heartbeats cover it from then on
  Nanos held_since = -1;         // finished, blocks leased or pinned
  Hold hold = Hold::leased;
  Nanos expiry = kNever;              // of that; of a pin, of its last range
  std::vector<RetainedRange> ranges;  // of a pin
};

// One request's KV from one worker to another. transfer/handoff.hpp decides, this is what it is about.
struct Movement {
  Handoff state;
  std::uint32_t generation = 0;
  std::uint32_t request = 0;
  SeqId source = kNoSeq, destination = kNoSeq;  // kNoSeq: not there yet, or gone
  std::uint32_t from = kNoWorker, to = kNoWorker;
  bool read_back = false;     // from decode to prefill
  bool awaited = false;       // the decode leg has yet to reach its engine
  bool registered = false;    // push: the registration lies at prefill
  bool watched = false;       // push: decode's watchdog is set
  bool streaming = false;     // push: sent piece by piece, before prefill's end
  bool last_pending = false;  // of that: the last layer of the last piece goes when the step ends
  bool last_posted = false;   // nothing more will be posted
  bool failed = false;        // a part failed
  bool severed = false;       // a worker at one end has crashed: nothing arrives any more
  bool stale_counted = false;
  bool closed = false;                           // how it ended has been counted
  Reason failure = Reason::none;                 // what a failed load says
  std::int32_t first_block = 0, last_block = 0;  // what the destination lacks, in its table, once allocated
  std::int32_t next_block = 0;                   // of it, to be posted next
  std::int32_t batches = 0;                      // in flight
  Nanos expiry = kNever;                         // read back: decode's deadline, as the router was told
  Nanos clock_error = 0;                         // and by how much prefill takes it for later
  Nanos shipped = -1;                            // push: when prefill's writer got the blocks
  Nanos matched = 0;                             // when the poster knew both sides
  Nanos posted = -1;                             // when the first batch's posting began
  Nanos post_end = 0;                            // of the last batch
  Nanos posting = 0;                             // of all batches
};

// What is posted at once: flows between ranks.
struct Batch {
  HandoffId handoff = kNone;
  std::int32_t parts_left = 0;
  TransferPlan plan;
  Nanos post_end = 0;
  std::vector<FlowId> flows;  // on the wire now
};

// Of a batch that is posted in two: all of its `layers` but the last, as they end in the course of `lasts`;
// then the last, which is all that the first left.
struct Share {
  enum Part : std::uint8_t { whole, but_last, last } part = whole;
  std::int32_t layers = 1;
  Nanos lasts = 0;
};

enum class WorkerMode : std::uint8_t { asleep, idle, stepping };

struct Contact {
  enum State : std::uint8_t { none, under_way, made } state = none;
  bool notifications_only = false;
  Nanos last = 0;  // when it was last used; under way: when the handshake ends
};

struct WorkerState {
  WorkerMode mode = WorkerMode::asleep;
  Nanos idle_since = 0;                 // origin of its empty steps
  Nanos next_boundary = kNever;         // of the boundary event in force
  std::uint64_t epoch = 0;              // of that event
  std::vector<HandoffId> ready;         // READs that the next step posts
  std::vector<HandoffId> shaking;       // wait for a handshake that this worker has begun
  std::vector<Ref> ended;               // loads whose end, good or bad, its next poll sees
  std::vector<HandoffId> written;       // its own writes that are done, not yet polled
  std::vector<HandoffId> to_ship;       // push: finished prompts that the step after next takes to the writer
  std::vector<HandoffId> shipping;      // push: and the next
  std::vector<HandoffId> unregistered;  // push: with the writer, which lacks the registration
  std::vector<SeqId> tracked;           // loads that heartbeats cover
  std::vector<SeqId> held;              // finished sequences whose blocks are leased or pinned, oldest first
  std::vector<Ref> read_done;           // of them, those whose notification has come
  std::vector<Ref> aborts;              // sequences whose requests have ended, for the next boundary
  std::vector<SeqId> thrown_away;       // aborted, but steps still compute them
  struct Layer {
    HandoffId handoff;
    std::uint32_t generation;
    std::int32_t blocks;
    bool last;
  };
  std::vector<Layer> last_layers;  // layer by layer: what is posted when the step in flight ends
  struct Beat {
    std::uint32_t from;
    Nanos sent;
  };
  std::vector<Beat> heartbeats;  // received, not yet seen
  Nanos least_expiry = kNever;
  Nanos last_heartbeat = INT64_MIN / 2;
  Nanos thread_until = 0;         // its posting thread, where it has one, is busy until then
  Nanos handshakes_until = 0;     // its one handshake thread is busy until then
  std::vector<Contact> contacts;  // by worker
  std::size_t cache_log_read = 0;
  Nanos step_began = 0;  // of the step in flight, after what held it up
  struct {
    Nanos since = -1;
    std::int32_t tokens = 0, before = 0;  // of the step from then on, and of the one before
  } computes;  // for data-parallel peers, who must see the same whoever is visited first at one instant
  double pinned_bytes = 0;  // of all its GPUs
};

// Where the router believes a session's KV to be.
struct StoredTurn {
  SeqId seq = kNoSeq;
  std::uint32_t generation = 0;
  std::uint32_t worker = kNoWorker;
  std::int32_t tokens = 0;
  Nanos stored = 0;
  Nanos expiry = 0;   // decode's deadline
  bool ever = false;  // a turn of this session has ended
};

struct Routed {  // what the router charged to workers for a request, until it takes it back
  std::int32_t prefill_tokens = 0;
  bool prefill = false, decode = false;
};

class Simulation {
 public:
  Simulation(const Deployment& deployment, const Scenario& scenario, const Trace& trace,
             const RunHooks& hooks);
  RunResult run();

 private:
  // events
  void on_arrival(std::uint32_t request, bool released);
  void on_deliver(std::uint32_t request, std::uint32_t worker, bool second_leg);
  void on_boundary(std::uint32_t worker);
  void on_contact(std::uint32_t worker, std::uint32_t peer, bool failed);
  void on_flow_start(std::uint32_t batch, std::int32_t turn);
  void on_network();
  void on_landed(std::uint32_t batch);
  void on_message(std::uint32_t kind, HandoffId id);
  void on_fault(std::uint32_t fault);
  void push_arrivals();
  void push_boundary(std::uint32_t worker, Nanos time);
  void news(std::uint32_t worker, bool wakes);

  // parts of a boundary
  void take_outputs(std::uint32_t worker);
  void post_last_layers(std::uint32_t worker);
  void poll(std::uint32_t worker);
  void take_notifications(std::uint32_t worker);
  void expire(std::uint32_t worker);
  void take_aborts(std::uint32_t worker);
  void start_step(std::uint32_t worker);
  void meet_peers(std::uint32_t worker);
  void hold_peers(std::uint32_t worker);
  void note_tokens(std::uint32_t worker, std::int32_t tokens);
  void ship(std::uint32_t worker, bool scheduled_now);
  void start_loads(std::uint32_t worker);
  void send_heartbeats(std::uint32_t worker);
  Nanos post_ready(std::uint32_t worker);
  void send_chunks(std::uint32_t worker);
  void send_chunk(std::uint32_t worker, const Step::Item& item);
  Nanos deadline(std::uint32_t worker) const;
  Nanos next_heartbeat(std::uint32_t worker) const;

  // hand-overs
  HandoffId new_movement(std::uint32_t request, std::uint32_t from, std::uint32_t to, bool push);
  void happen(HandoffId id, HandoffEvent event);
  void over(HandoffId id, TransferOutcome outcome);
  void maybe_free(HandoffId id);
  void detach_source(HandoffId id);
  void detach_destination(HandoffId id);
  bool stale(HandoffId id);
  void connect(HandoffId id);
  bool in_contact(std::uint32_t worker, std::uint32_t peer, const TransferConfig& t, bool notifications_only);
  void begin_contact(std::uint32_t worker, std::uint32_t peer, const TransferConfig& t, Op op,
                     bool notifications_only);
  void post(HandoffId id);
  void post_rest(HandoffId id, double contention);
  bool may_post(HandoffId id);
  Nanos post_batch(HandoffId id, Nanos begin, std::int32_t blocks, bool last, double contention,
                   Share share = {});
  void part_failed(std::uint32_t batch);
  void fail(HandoffId id);
  void send_registration(HandoffId id);
  void match(HandoffId id);
  void load(HandoffId id);
  void load_failed(HandoffId id);
  void drop_zombie(SeqId seq);
  void notify_source(HandoffId id);
  void settle_held(SeqId destination);
  void prefill_finished(SeqId id);
  void hold(SeqId id, Hold cause);
  void free_held(SeqId id);
  bool expires(const Leg& leg) const;

  // reuse
  void pin(SeqId id);
  void cut_pin(SeqId id, bool by_time);
  void shorten_pin(SeqId id, std::int32_t keep, bool by_time);
  void turn_away(HandoffId id);
  std::uint32_t next_reader(std::uint32_t request) const;
  Nanos next_use(SeqId id) const;
  bool being_read(const Leg& leg) const;
  template <typename Lacking>
  bool let_go(std::uint32_t worker, Lacking lacking);
  void keep_budget(std::uint32_t worker);
  bool reclaim(std::uint32_t worker, std::int32_t blocks);
  void attach_stored_turn(std::uint32_t request, SeqId leg);
  std::int32_t extended_tokens(SeqId leg, SeqId retained) const;
  bool want_load(SeqId id, std::int32_t have);
  Nanos predicted_read(HandoffId id, std::int32_t first, std::int32_t last);
  Nanos predicted_compute(std::uint32_t worker, std::int32_t have, std::int32_t tokens);

  // faults
  bool lost(Message message);
  void arm_fault(std::uint32_t fault);
  void cancel_some(const std::string& target);
  void crash_some(const FaultConfig& fault);
  void crash(std::uint32_t worker, Nanos duration);
  void charge_to_now(std::uint32_t request);
  void give_up(std::uint32_t request, RequestStatus status, Reason reason);
  void abort_leg(SeqId id);
  void cancel_later_turns(std::uint32_t request);

  // requests
  Engine new_engine(std::uint32_t worker);
  SeqId new_sequence(std::uint32_t request, std::uint32_t worker, std::int32_t final);
  void free_sequence(SeqId id);
  void finish(std::uint32_t request, RequestStatus status, Reason reason);
  void drop_whole_load(std::uint32_t request);
  void drop_prefill_load(std::uint32_t request);
  void drop_decode_load(std::uint32_t request);
  Nanos to_engine(std::uint32_t worker, const Request& request);
  Reason too_long(const PoolPlan& pool, const Request& request) const;
  Reason candidates(const Request& request, const std::vector<std::uint32_t>& workers,
                    std::vector<std::uint32_t>& out) const;
  void route(std::uint32_t request, std::uint32_t& prefill, std::uint32_t& decode);
  void reroute(const Request& request, std::uint32_t& prefill);
  void read_cache_events();

  const PoolPlan& pool_of(std::uint32_t worker) const {
    return d_.pools[static_cast<std::size_t>(d_.workers[worker].pool)];
  }
  double block_bytes(std::uint32_t worker) const {  // of all its GPUs
    return pool_of(worker).kv_bytes_per_block * static_cast<double>(d_.workers[worker].gpus.size());
  }
  /// The transfer settings between a prefill and a decode worker, whichever way.
  const TransferConfig& transfer_of(std::uint32_t prefill, std::uint32_t decode) const {
    return *transfer_of_[static_cast<std::size_t>(d_.workers[prefill].pool) * d_.pools.size() +
                         static_cast<std::size_t>(d_.workers[decode].pool)];
  }
  const TransferConfig& transfer_of(const Movement& m) const {
    return m.read_back ? transfer_of(m.to, m.from) : transfer_of(m.from, m.to);
  }
  bool ended(std::uint32_t request) const {
    return result_.requests[request].status != RequestStatus::in_flight;
  }
  bool given_up(std::uint32_t request) const {
    return ended(request) && result_.requests[request].status != RequestStatus::completed;
  }
  /// Whether what prefill does is on the request's own path: decode may have gone ahead without it.
  bool prefill_drives(std::uint32_t request) const { return !ended(request) && !decode_drives_[request]; }
  Nanos now() const { return queue_.now(); }
  std::int32_t layers() const { return static_cast<std::int32_t>(d_.model.layers.size()); }
  std::string who_waits() const;
  void check_conservation(RunResult& result);
  void price_retention(RunResult& result) const;
  RunResult report(RunStatus status);

  const Deployment& d_;
  const Scenario& s_;
  const Trace& trace_;
  const SessionChains chains_;
  const RunHooks& hooks_;
  const bool push_;  // the mode is one of the pushes
  std::vector<const TransferConfig*> transfer_of_;

  EventQueue queue_;
  Network network_;
  bool network_dirty_ = false;
  std::vector<Completion> completions_;

  std::vector<Engine> engines_;
  std::vector<WorkerState> workers_;
  std::vector<std::uint32_t> prefill_workers_, decode_workers_;
  std::vector<std::uint32_t> prefill_candidates_, decode_candidates_;  // for the request at hand

  Sequences sequences_;
  std::vector<Leg> legs_;  // parallel to sequences_
  std::vector<SeqId> free_sequences_;
  std::vector<Movement> movements_;
  std::vector<HandoffId> free_movements_;
  std::vector<Batch> batches_;
  std::vector<std::uint32_t> free_batches_;
  std::vector<SeqId> prefill_leg_, decode_leg_;  // by request, while they have one
  std::vector<HandoffId> movement_of_;           // by request: from prefill to decode, until both have it
  std::vector<std::uint8_t> decode_drives_;      // by request
  std::vector<BlockId> scratch_;
  std::vector<RetainedTail> tails_;
  Outcome outcome_;

  const RoutingPolicy& policy_;
  RouterState prefill_turns_, decode_turns_;
  std::vector<WorkerLoad> load_;
  std::vector<std::int32_t> hit_tokens_;
  CacheView cache_view_;
  Random routing_random_, reroute_random_, fault_random_;
  std::vector<HashRun> identity_;
  std::vector<Routed> routed_;               // by request
  std::vector<StoredTurn> stored_;           // by session
  std::vector<std::uint32_t> last_prefill_;  // by session
  std::vector<std::uint32_t> next_turn_;     // by request, where they matter; kNone = the session's last
  std::vector<Nanos> think_;  // by request, closed sessions: pause before it; -1 = a session's first
  Nanos longest_think_ = 0;
  std::array<std::int32_t, std::size(kMessages)> to_lose_{};
  std::int32_t parts_to_fail_ = 0, window_cancels_ = 0, rejections_ = 0;
  std::vector<std::uint8_t> down_;     // by worker
  std::vector<Nanos> front_end_free_;  ///< by worker: when its front end can take the next request
  std::vector<double> pinned_byte_s_, avoided_gpu_s_;  // by worker

  RunResult result_;
  std::size_t next_arrival_ = 0;
  std::uint32_t last_pushed_ = 0;          // arrival
  std::uint32_t at_boundary_ = kNoWorker;  // whose boundary is being handled
  std::int32_t in_flight_ = 0;
  std::uint64_t done_ = 0;
  std::int64_t starting_flows_ = 0;  // posted, their first descriptors not yet on the wire
  Bytes bytes_not_sent_ = 0;         // posted, but failed at once
  std::uint64_t messages_ = 0;       // logical events other than engine steps
  Nanos last_progress_ = 0;
  Nanos stall_after_ = 0;
  std::int32_t concurrency_ = 0;      // > 0: arrivals follow completions
  std::int32_t max_concurrency_ = 0;  // > 0: the client holds back what is beyond it
  std::int32_t released_ = 0;         // sent by the client, not yet arrived
  std::deque<std::uint32_t> held_;    // by the client, in order of arrival
  bool closed_sessions_ = false;      // later turns follow their predecessors
  bool foresees_ = false;             // retention knows which turns are to come
};

}  // namespace pdsim
