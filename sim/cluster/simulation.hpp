// The state of a run and the events that change it. Private to this folder: cluster.hpp is its face.
//
// All state is arrays indexed by small ids: requests in order of arrival, workers, sequences (a request's
// legs, recycled), transfers (recycled). An event names what it is about by such an id; one switch in
// run() dispatches it. The parts are in three files: cluster.cpp (the loop, requests, boundaries),
// handoff.cpp (a pull from lease to notification), report.cpp (what is left behind, and the checks).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/cluster/cluster.hpp"
#include "sim/cluster/pull_plan.hpp"
#include "sim/core/event_queue.hpp"
#include "sim/network/network.hpp"
#include "sim/routing/cache_view.hpp"
#include "sim/routing/policies.hpp"
#include "sim/serving/engine.hpp"

namespace pdsim {

// In the order in which kinds of one phase go at one instant.
enum Kind : std::uint32_t {
  kNetwork,    // completion: flows end; arg = the network's epoch
  kFlowStart,  // completion: a transfer's part has its first descriptor posted; arg = part
  kLanded,     // completion: a transfer's last byte is in decode's memory
  kContact,    // completion: a handshake is done; entity = decode worker, arg = prefill worker
  kArrival,    // arrival: a request reaches the router
  kDeliver,    // arrival: a request reaches an engine; arg = worker, with kSecondLeg after prefill
  kHeartbeat,  // arrival: entity = prefill worker, arg = decode worker
  kReadDone,   // arrival: a notification reaches a prefill worker; arg = sequence
  kBoundary,   // decision: entity = worker, arg = epoch
};

constexpr std::uint64_t kSecondLeg = std::uint64_t{1} << 32;

// Nothing but timers for this long is a stall, unless a lease or a delay is longer.
constexpr Nanos kStallAfter = 3600 * kSecond;

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
  PullPlan plan;
  Nanos post_end = 0;
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
  void settle_held(SeqId decode_leg);
  void shake_hands(std::uint32_t worker, std::uint32_t peer);
  void load_failed(SeqId id, Stage stage);

  // requests
  SeqId new_sequence(std::uint32_t request, std::uint32_t worker, std::int32_t final);
  void free_sequence(SeqId id);
  void finish(std::uint32_t request, RequestStatus status, Reason reason);
  Reason too_long(const PoolPlan& pool, const Request& request) const;
  Reason candidates(const Request& request, const std::vector<std::uint32_t>& workers,
                    std::vector<std::uint32_t>& out) const;
  void route(std::uint32_t request, std::uint32_t& prefill, std::uint32_t& decode);
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
  Nanos stall_after_ = 0;
  bool closed_ = false;  // arrivals follow completions
};

}  // namespace pdsim
