// What a run leaves behind: worker and link reports, totals, and the conservation checks.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "sim/cluster/simulation.hpp"

namespace pdsim {

std::string Simulation::who_waits() const {
  std::string text;
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    const Engine& e = engines_[w];
    if (!e.has_requests() && workers_[w].held.empty()) continue;
    text += fmt::format(
        "{}{}: {} running, {} waiting for blocks or a slot, {} waiting for KV, {} finished ones held for "
        "another worker, {} of {} blocks free",
        text.empty() ? "" : "; ", d_.workers[w].name, e.running(), e.waiting(), e.parked(),
        workers_[w].held.size(), e.pool().free_blocks(), e.pool().total_blocks());
  }
  // Push: nobody tells decode that prefill will not write.
  std::int64_t orphans = 0;
  for (const Movement& m : movements_) {
    orphans += m.closed && m.destination != kNoSeq && m.state.wire != Handoff::Wire::over ? 1 : 0;
  }
  if (orphans > 0) {
    text += fmt::format(
        "; {} of those that wait for KV were given up by prefill (leases that ran out, failed writes), which "
        "push "
        "does not tell decode: only clients end them (workload.client_timeout_s)",
        orphans);
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
  const RetentionTotals& r = result.retention;
  PDSIM_CHECK(r.pins == r.read + r.notified + r.expired + r.let_go + r.lost + r.outstanding,
              "pins were lost or freed twice");
  const FlowTotals& flows = network_.totals();
  PDSIM_CHECK(network_.in_flight() > 0 || flows.requested == flows.delivered + flows.abandoned,
              "bytes sent are not bytes received");
  // What was posted went to the network, but what failed at once.
  const TransferTotals& t = result.transfers;
  PDSIM_CHECK(starting_flows_ > 0 || t.bytes + t.read_back_bytes == flows.requested + bytes_not_sent_,
              "bytes that requests count are not those that the network was given");
  // Every token that an engine computed is a prompt's, an answer's, or one computed again.
  bool alone =
      result.status == RunStatus::finished;  // nobody computes for a request that has gone another way
  for (const Engine& engine : engines_) alone = alone && !engine.has_requests();
  for (const RequestRecord& r : result.requests) alone = alone && r.reason != Reason::decode_rejected;
  if (alone && by_status[static_cast<std::size_t>(RequestStatus::failed)] == 0 &&
      by_status[static_cast<std::size_t>(RequestStatus::cancelled)] == 0) {
    std::int64_t computed = 0, accounted = 0;
    for (const Engine& engine : engines_) {
      const Engine::Statistics& st = engine.statistics();
      computed += st.totals.prefill_tokens + st.totals.decode_requests + st.totals.draft_tokens;
      computed += st.found_later;
      if (engine.speculates()) computed -= st.rejected_tokens;
    }
    for (const RequestRecord& r : result.requests) {
      if (r.status != RequestStatus::completed) continue;
      accounted += r.prompt_tokens - r.local_hit_tokens - r.remote_hit_tokens + r.recomputed_tokens +
                   std::max(0, r.output_tokens - 1);
    }
    PDSIM_CHECK(computed == accounted, "tokens computed are not those of prompts, answers and recomputation");
  }
  for (std::uint32_t w = 0; w < engines_.size(); ++w) {
    const Engine& engine = engines_[w];
    if (!engine.has_requests() && workers_[w].held.empty()) {
      PDSIM_CHECK(engine.pool().free_blocks() == engine.pool().total_blocks(), "blocks were not given back");
    }
    if (!hooks_.check_pools) continue;
    engine.pool().check();
    std::size_t tables = 0;
    for (SeqId id = 0; id < sequences_.size(); ++id) {
      const bool here = legs_[id].live && legs_[id].worker == w;
      tables += here && sequences_[id].table != kNoTable ? 1 : 0;
    }
    PDSIM_CHECK(engine.pool().open_tables() == tables, "somebody who has gone holds blocks");
  }
}

// Dollars of retention, each worker at its own price: prefill's predicted GPU time that was not spent, and
// decode's GPUs by the share of their KV memory, and the time, that pins took.
void Simulation::price_retention(RunResult& result) const {
  RetentionTotals& r = result.retention;
  r.usd_avoided = r.usd_held = 0;
  bool priced = true;
  for (std::uint32_t w = 0; w < workers_.size(); ++w) {
    r.byte_seconds += pinned_byte_s_[w];
    r.prefill_gpu_s_avoided += avoided_gpu_s_[w];
    if (pinned_byte_s_[w] == 0 && avoided_gpu_s_[w] == 0) continue;
    const auto node =
        static_cast<std::size_t>(d_.topology.node_of[static_cast<std::size_t>(d_.workers[w].gpus[0])]);
    if (!d_.nodes[node].usd_per_hour) {
      priced = false;
      continue;
    }
    const double usd = *d_.nodes[node].usd_per_hour / 3600 / d_.topology.nodes[node].gpus;  // of a GPU second
    r.usd_avoided += avoided_gpu_s_[w] * usd;
    r.usd_held += pinned_byte_s_[w] / (pool_of(w).blocks * pool_of(w).kv_bytes_per_block) * usd;
  }
  if (!priced) r.usd_avoided = r.usd_held = -1;
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
    report.busy = st.busy - engine.busy_after(result.end);
    report.posting = st.posting;
    report.work = pool.step_model->work(st.totals);
    report.peak_flops_per_ns = peak_ops_per_ns(*pool.gpu, d_.weights);
    report.peak_bytes_per_ns = pool.gpu->hbm_bytes_per_ns;
    report.waits = st.waits;
    report.preemptions = st.preemptions;
    report.evicted_blocks = engine.pool().evicted_blocks();
    report.kv_blocks = pool.blocks;
    const double block_ns = static_cast<double>(pool.blocks) * static_cast<double>(result.end);
    report.kv_usage_mean = block_ns > 0 ? st.used_block_ns / block_ns : 0;
    report.kv_usage_max = static_cast<double>(st.max_used_blocks) / pool.blocks;
    result.events += static_cast<std::uint64_t>(st.totals.steps);
    result.extrapolated_steps += st.extrapolated_steps;
    report.blocks = engine.timeline();
    const Engine::Drafting& drafting = st.drafting;
    Speculated& speculated = result.speculated;
    speculated.on = speculated.on || engine.speculates();
    speculated.rows += drafting.rows;
    speculated.drafted += drafting.drafted;
    speculated.accepted += drafting.accepted;
    speculated.yielded += drafting.yielded;
    speculated.rejected_tokens += engine.speculates() ? st.rejected_tokens : 0;
    const std::size_t positions = std::max(speculated.by_position.size(), drafting.by_position.size());
    speculated.by_position.resize(positions);
    speculated.drafted_at.resize(positions);
    for (std::size_t i = 0; i < drafting.by_position.size(); ++i) {
      speculated.by_position[i] += drafting.by_position[i];
      speculated.drafted_at[i] += drafting.drafted_at[i];
    }
    result.retention.admissions_delayed += st.pin_delays;
    result.retention.admission_delay += st.pin_delay;
    result.retention.queue_wait += st.waits[static_cast<std::size_t>(Engine::Wait::pins)];
    result.workers.push_back(std::move(report));
    for (const SeqId id : workers_[w].held) {
      const double held = engine.pool().size(sequences_[id].table) * block_bytes(w) *
                          to_seconds(result.end - legs_[id].held_since);
      if (legs_[id].hold == Hold::pinned) {
        ++result.retention.outstanding;
        pinned_byte_s_[w] += held;
      } else {
        ++result.transfers.leases_outstanding;
        result.transfers.prefill_byte_seconds += held;
      }
    }
  }
  price_retention(result);
  for (SeqId id = 0; id < sequences_.size(); ++id) {  // interrupted while loading
    const Sequence& s = sequences_[id];
    const bool waits = s.status == SeqStatus::loading || s.status == SeqStatus::loaded;
    if (waits && legs_[id].handed_over && s.load_tokens > 0 && s.table != kNoTable) settle_held(id);
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

}  // namespace pdsim
