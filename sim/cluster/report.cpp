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
  // Every token that an engine computed is a prompt's, an answer's, or one computed again.
  if (result.status == RunStatus::finished &&
      by_status[static_cast<std::size_t>(RequestStatus::failed)] == 0) {
    std::int64_t computed = 0, accounted = 0;
    for (const Engine& engine : engines_) {
      computed += engine.statistics().totals.prefill_tokens + engine.statistics().totals.decode_requests;
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
    report.waits = st.waits;
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
  for (SeqId id = 0; id < sequences_.size(); ++id) {  // interrupted while loading
    const Sequence& s = sequences_[id];
    const bool waits = s.status == SeqStatus::loading || s.status == SeqStatus::loaded;
    if (waits && s.table != kNoTable) settle_held(id);
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
