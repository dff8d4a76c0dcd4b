// What breaks and who gives up: lost messages, failed parts, clients that go away, workers that vanish.
#include <fmt/format.h>

#include <algorithm>

#include "sim/cluster/simulation.hpp"

namespace pdsim {

// Whether this message is one that a fault has taken.
bool Simulation::lost(Message message) {
  std::int32_t& left = to_lose_[static_cast<std::size_t>(message)];
  if (left == 0) return false;
  --left;
  ++result_.transfers.messages_lost;
  return true;
}

// The next time that a fault strikes: once, or again and again with exponential gaps.
void Simulation::arm_fault(std::uint32_t index) {
  const FaultConfig& fault = s_.faults[index];
  Nanos at = fault.at;
  if (at < 0)
    at = std::max<Nanos>(0, now()) + ceil_ns(fault_random_.exponential(3.6e12 / fault.rate_per_hour));
  queue_.push(at, Phase::arrival, kFault, index, 0, 0);
}

void Simulation::on_fault(std::uint32_t index) {
  ++messages_;
  const FaultConfig& fault = s_.faults[index];
  switch (fault.kind) {
    case FaultKind::message_lost: {
      const auto message = std::ranges::find(kMessages, fault.target, &Named::name) - std::begin(kMessages);
      ++to_lose_[static_cast<std::size_t>(message)];
      break;
    }
    case FaultKind::transfer_failed:
      ++parts_to_fail_;
      break;
    case FaultKind::decode_rejection:
      ++rejections_;
      break;
    case FaultKind::client_cancel:
      cancel_some(fault.target);
      break;
    case FaultKind::worker_crash:
      crash_some(fault);
      break;
    default:
      PDSIM_CHECK(false, "a fault that check_simulated() refuses");
  }
  if (fault.at < 0) arm_fault(index);
}

void Simulation::cancel_some(const std::string& target) {
  if (target == "proxy_window") {
    ++window_cancels_;
    return;
  }
  std::vector<std::uint32_t> open;
  for (std::uint32_t r = 0; r < result_.requests.size(); ++r) {
    const RequestRecord& record = result_.requests[r];
    if (record.prompt_tokens > 0 && record.status == RequestStatus::in_flight &&
        (target.empty() || target == std::to_string(r))) {
      open.push_back(r);
    }
  }
  if (open.empty()) return;
  give_up(open[fault_random_.below(open.size())], RequestStatus::cancelled, Reason::client_cancelled);
}

// A worker, or any of a pool's that is up, vanishes with all it holds, and comes back empty or not at all.
void Simulation::crash_some(const FaultConfig& fault) {
  std::vector<std::uint32_t> up;
  for (std::uint32_t w = 0; w < workers_.size(); ++w) {
    const bool meant =
        fault.target.empty() || fault.target == d_.workers[w].name || fault.target == pool_of(w).name;
    if (meant && down_[w] == 0) up.push_back(w);
  }
  if (up.empty()) return;
  crash(up[fault_random_.below(up.size())], fault.duration);
}

// Requests that it serves fail, with their connections. Its peers hear nothing: flows from and to it break,
// its leases elsewhere run out, blocks registered with it wait.
void Simulation::crash(std::uint32_t worker, Nanos duration) {
  WorkerState& state = workers_[worker];
  Engine& engine = engines_[worker];
  engine.settle(now(), sequences_, result_.gaps);
  engine.account_blocks(now());
  down_[worker] = 1;
  ++result_.crashes;
  std::vector<SeqId> mine;
  for (SeqId id = 0; id < sequences_.size(); ++id) {
    if (legs_[id].worker == worker && legs_[id].live) mine.push_back(id);
  }
  for (std::uint32_t b = 0; b < batches_.size(); ++b) {
    Batch& batch = batches_[b];
    if (batch.parts_left <= 0) continue;
    Movement& m = movements_[batch.handoff];
    if (m.from != worker && m.to != worker) continue;
    m.failed = m.severed = true;  // its peer's NIC reports it at once
    batch.parts_left -= static_cast<std::int32_t>(batch.flows.size());
    for (const FlowId flow : batch.flows) network_.cancel(now(), flow);
    network_dirty_ = network_dirty_ || !batch.flows.empty();
    const bool over = !batch.flows.empty() && batch.parts_left == 0;
    batch.flows.clear();
    if (over) queue_.push(now(), Phase::completion, kLanded, b, 0, 0);
  }
  std::vector<std::uint32_t> served;
  for (const SeqId id : mine) {
    Sequence& s = sequences_[id];
    if (legs_[id].held_since >= 0) {
      if (legs_[id].hold == Hold::pinned) ++result_.retention.lost;
      free_held(id);
      continue;
    }
    if (!ended(s.request) && (legs_[id].handed_over || prefill_drives(s.request))) {
      charge_to_now(s.request);
      served.push_back(s.request);
    }
    if (legs_[id].handed_over && s.load_tokens > 0 && !s.started) settle_held(id);
    engine.release(id, sequences_);
    s.status = SeqStatus::finished;
    s.aborted = false;  // no step of the engine that takes its place knows it
    free_sequence(id);
  }
  for (const SeqId id : state.thrown_away) free_sequences_.push_back(id);
  engine.restart(now());
  const std::uint64_t epoch = state.epoch + 1;
  const std::size_t peers = state.contacts.size(), read = state.cache_log_read;
  state = WorkerState{};
  state.epoch = epoch;
  state.cache_log_read = read;
  state.contacts.resize(peers);
  front_end_free_[worker] = 0;
  for (std::uint32_t w = 0; w < workers_.size(); ++w) {
    if (worker >= workers_[w].contacts.size()) continue;
    Contact& contact = workers_[w].contacts[worker];
    if (contact.state == Contact::under_way) {  // its query will not be answered
      contact.last = now() + s_.transfer.handshake_timeout;
      workers_[w].handshakes_until = std::max(workers_[w].handshakes_until, contact.last);
      queue_.push(contact.last, Phase::completion, kContact, w, worker, std::uint64_t{1} << 32 | worker);
    } else {
      contact.state = Contact::none;
    }
  }
  for (const std::uint32_t request : served) {
    if (!ended(request)) give_up(request, RequestStatus::failed, Reason::worker_lost);
  }
  if (duration > 0) queue_.push(now() + duration, Phase::arrival, kRestart, worker, 0, 0);
}

// Charges a request's time until now, when it ends early, to the stages that it has been in.
void Simulation::charge_to_now(std::uint32_t request) {
  RequestRecord& record = result_.requests[request];
  record.stop_posting(now());
  const auto until_now = [&](Stage stage) { record.reach(stage, now()); };
  if (record.first_token >= 0) return until_now(Stage::decode);
  const SeqId decode = decode_leg_[request], prefill = prefill_leg_[request];
  const bool prefilled = prefill == kNoSeq || legs_[prefill].held_since >= 0;
  if (decode != kNoSeq && (!push_ || decode_drives_[request] != 0 || prefilled)) {
    const Sequence& s = sequences_[decode];
    if (s.started) return until_now(s.load_tokens > 0 ? Stage::first_token : Stage::prefill);
    if (s.considered < 0) return until_now(Stage::handoff_dispatch);
    if (!push_) record.reach(Stage::handoff_dispatch, s.considered);
    record.reach(Stage::decode_admission, s.admitted < 0 ? now() : s.admitted);
    if (s.status == SeqStatus::loaded) return until_now(Stage::decode_admission);
    const HandoffId id = legs_[decode].incoming;
    if (id == kNone) return until_now(Stage::handoff_dispatch);
    const Movement& m = movements_[id];
    const bool over = m.state.wire == Handoff::Wire::landed || m.state.wire == Handoff::Wire::failed;
    return until_now(over                                        ? Stage::transfer_poll
                     : m.posted >= 0                             ? Stage::transfer_wire
                     : m.state.wire == Handoff::Wire::connecting ? Stage::transfer_post
                                                                 : Stage::handoff_dispatch);
  }
  if (prefill == kNoSeq)
    return until_now(record.mark > record.arrival ? Stage::handoff_dispatch : Stage::router);
  const Sequence& s = sequences_[prefill];
  until_now(legs_[prefill].held_since >= 0   ? Stage::handoff_dispatch
            : s.status == SeqStatus::loading ? Stage::reuse_transfer
            : s.started                      ? Stage::prefill
                                             : Stage::prefill_queue);
}

// A request ends before its last token. Its legs hear of it at their engines' next boundaries.
void Simulation::give_up(std::uint32_t request, RequestStatus status, Reason reason) {
  RequestRecord& record = result_.requests[request];
  charge_to_now(request);
  const bool whole = !d_.disaggregated || record.prefill_worker == record.decode_worker;
  if (whole) {
    drop_whole_load(request);
  } else {
    drop_prefill_load(request);
    drop_decode_load(request);
  }
  finish(request, status, reason);
  const SeqId prefill = prefill_leg_[request], decode = decode_leg_[request];
  if (prefill != kNoSeq && legs_[prefill].held_since < 0) abort_leg(prefill);
  if (decode != kNoSeq && legs_[decode].held_since < 0) abort_leg(decode);
  const HandoffId m = movement_of_[request];
  if (m == kNone || !movements_[m].awaited) return;
  movements_[m].awaited = false;
  over(m, TransferOutcome::abandoned);
}

void Simulation::abort_leg(SeqId id) {
  const std::uint32_t worker = legs_[id].worker;
  workers_[worker].aborts.push_back({id, legs_[id].generation});
  news(worker, false);
}

void Simulation::take_aborts(std::uint32_t worker) {
  WorkerState& state = workers_[worker];
  Engine& engine = engines_[worker];
  std::vector<Ref> aborts;
  aborts.swap(state.aborts);
  for (const Ref& ref : aborts) {
    if (legs_[ref.id].generation != ref.generation) continue;
    const SeqId id = ref.id;
    Sequence& s = sequences_[id];
    if (s.status == SeqStatus::finished) continue;
    if (s.status == SeqStatus::loading) {  // its blocks wait for the transfer (vllm#32255)
      legs_[id].zombie = true;
      if (legs_[id].incoming != kNone) over(legs_[id].incoming, TransferOutcome::abandoned);
      continue;
    }
    const HandoffId m = legs_[id].incoming;
    if (m != kNone) {
      happen(m, HandoffEvent::declined);  // pull: an empty receive, whose only effect is the notification
      over(m, TransferOutcome::abandoned);
      detach_destination(m);
    }
    if (legs_[id].handed_over && s.status == SeqStatus::loaded && s.load_tokens > 0) settle_held(id);
    engine.abort(id, sequences_);
    free_sequence(id);
  }
  std::erase_if(state.thrown_away, [&](SeqId id) {
    if (engine.references(id)) return false;
    free_sequences_.push_back(id);
    return true;
  });
}

// Closed sessions: nobody asks the next question after an answer that never came.
void Simulation::cancel_later_turns(std::uint32_t request) {
  for (std::uint32_t next = next_turn_[request]; next != kNone; next = next_turn_[next]) {
    RequestRecord& record = result_.requests[next];
    record.arrival = record.mark = record.end = now();
    record.prompt_tokens = trace_.requests[next].prompt_tokens;
    record.output_tokens = trace_.requests[next].output_tokens;
    record.concurrency = in_flight_;
    record.status = RequestStatus::cancelled;
    record.reason = Reason::session_failed;
    ++done_;
  }
}

}  // namespace pdsim
