#include "sim/metrics/summary.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "models/csv.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

Json to_json(const Distribution& d) {
  return {{"mean", d.mean}, {"p50", d.p50}, {"p90", d.p90}, {"p95", d.p95},
          {"p99", d.p99},   {"max", d.max}, {"n", d.n}};
}

template <typename Value>
Distribution over(const std::vector<const RequestRecord*>& records, Value value) {
  std::vector<double> values;
  values.reserve(records.size());
  for (const RequestRecord* r : records) values.push_back(value(*r));
  return distribution_of(std::move(values));
}

std::size_t index(Stage stage) {
  return static_cast<std::size_t>(stage);
}

// The value of a metric that one request has; negative when it has none.
double own_metric(const RequestRecord& r, const std::string& metric) {
  if (metric == "ttft_ms") return r.first_token < 0 ? -1 : to_ms(r.first_token - r.arrival);
  if (metric == "tpot_ms") return r.has_tpot() ? to_ms(r.tpot()) : -1;
  return -1;
}

// A request is held to the bound of the highest percentile of each metric: of "p50: 200, p99: 1000" no
// single request can be asked for more than 1000.
bool in_slo(const RequestRecord& r, const Slo& slo) {
  for (const auto& [metric, bounds] : slo) {
    double bound = 0, highest = -1;
    for (const auto& [percentile, value] : bounds) {
      const double p = std::stod(percentile.substr(1));
      if (p > highest) highest = p, bound = value;
    }
    if (own_metric(r, metric) > bound) return false;
  }
  return true;
}

Json slo_report(const std::vector<const RequestRecord*>& completed, const Slo& slo) {
  Json report = Json::object();
  for (const auto& [metric, bounds] : slo) {
    std::vector<double> values;
    for (const RequestRecord* r : completed) {
      const double value = own_metric(*r, metric);
      if (value >= 0) values.push_back(value);
    }
    std::sort(values.begin(), values.end());
    for (const auto& [percentile, bound] : bounds) {
      const double q = std::stod(percentile.substr(1)) / 100;
      const Json reached = values.empty() ? Json(nullptr) : Json(quantile_sorted(values, q));
      report[metric][percentile] = {
          {"bound", bound}, {"value", reached}, {"met", !values.empty() && reached.get<double>() <= bound}};
    }
  }
  return report;
}

// What a request's time goes to, coarsely enough to act on.
struct Cause {
  std::string_view code, text;
  std::vector<Stage> stages;
};
const std::vector<Cause>& causes() {
  static const std::vector<Cause> all = {
      {"prefill_queue",
       "waiting for other prompts to be computed: more or faster workers, or more prefix hits",
       {Stage::prefill_queue}},
      {"prefill_compute",
       "computing prompts: faster or more GPUs a replica, or more prefix hits",
       {Stage::prefill}},
      {"decode_admission", "waiting to be admitted to decode", {Stage::decode_admission}},
      {"transfer_post",
       "posting descriptors, one after the other on the thread that posts: larger blocks or less "
       "fragmentation",
       {Stage::transfer_post}},
      {"transfer_wire", "bytes on the wire: network bandwidth binds", {Stage::transfer_wire}},
      {"reuse_transfer",
       "reading back what decode retained: a higher kv_recompute_threshold computes more of it instead",
       {Stage::reuse_transfer}},
      {"step_alignment",
       "waiting for step boundaries around the hand-over: dispatch, poll and first token",
       {Stage::handoff_dispatch, Stage::transfer_poll, Stage::first_token}},
      {"decode_compute", "generating tokens: the decode steps themselves", {Stage::decode}},
      {"router", "proxy and tokenisation", {Stage::router}},
      {"failures", "attempts that were given up", {Stage::failed_attempts}},
  };
  return all;
}

// A queue is as long as what it waits for is scarce: slots, blocks, or the steps of those before it. The
// engines say which held up the head of their queues, and for how long.
// Where most of prefill's blocks in use are prompts that decode has yet to fetch, what decode waits for
// holds prefill up as well.
Cause refined(const Cause& cause, const RunResult& run) {
  const bool decode = cause.code == "decode_admission";
  if (!decode && cause.code != "prefill_queue") return cause;
  std::array<double, 5> waits{};
  __int128 running = 0, leased = 0;
  for (const WorkerReport& w : run.workers) {
    if ((w.role == "decode") != decode) continue;
    running += w.blocks.total(0);
    leased += w.blocks.total(2);
    for (std::size_t i = 0; i < waits.size(); ++i) waits[i] += static_cast<double>(w.waits[i]);
  }
  const double slot = waits[1], behind = waits[3], pins = waits[4], blocks = waits[2] + pins;
  if (slot >= blocks && slot > behind) {
    return {decode ? "decode_slots" : "prefill_slots",
            decode ? "waiting for one of max_num_seqs places in decode"
                   : "waiting for one of max_num_seqs places",
            {}};
  }
  if (blocks > behind) {
    if (!decode && leased > running) {
      Cause through = refined({"decode_admission", {}, {}}, run);
      if (through.code == "decode_pinned_blocks") return through;
    }
    if (decode && pins > blocks / 2) {
      return {"decode_pinned_blocks",
              "waiting, in the end, for KV blocks in decode that retained turns hold: a shorter time or a "
              "budget for "
              "them",
              {}};
    }
    return {decode ? "decode_kv_blocks" : "prefill_kv_blocks",
            decode ? "waiting for KV blocks in decode: its memory binds"
                   : "waiting for KV blocks, held by other requests or until decode has them: memory binds",
            {}};
  }
  return cause;
}

Json bound_by(const std::vector<const RequestRecord*>& completed, const RunResult& run) {
  double total = 0;
  for (const RequestRecord* r : completed) total += static_cast<double>(r->e2e());
  if (total <= 0) return {{"code", "none"}, {"share", 0}, {"text", "no completed request took any time"}};
  const Cause* most = nullptr;
  double most_time = -1;
  for (const Cause& cause : causes()) {
    double time = 0;
    for (const RequestRecord* r : completed) {
      for (const Stage stage : cause.stages) time += static_cast<double>(r->stages[index(stage)]);
    }
    if (time > most_time) most = &cause, most_time = time;
  }
  const Cause cause = refined(*most, run);
  return {{"code", cause.code},
          {"share", most_time / total},
          {"text", fmt::format("{:.0f} % of the requests' time is {}", 100 * most_time / total, cause.text)}};
}

Json cost(const RunContext& context, double hours, std::uint64_t completed, std::uint64_t met,
          double output_tokens) {
  double billed = 0, used = 0, gpus = 0;
  bool known = !context.nodes.empty();
  std::set<std::string> as_of;
  for (const RunContext::Node& node : context.nodes) {
    gpus += node.gpus_held;
    if (!node.usd_per_hour) {
      known = false;
      continue;
    }
    billed += *node.usd_per_hour * hours;
    used += *node.usd_per_hour * hours * node.gpus_held / node.gpus;
    as_of.insert(node.price_as_of);
  }
  const auto per = [&](double count) { return known && count > 0 ? Json(billed / count) : Json(nullptr); };
  return {{"billed_usd", known ? Json(billed) : Json(nullptr)},
          {"used_usd", known ? Json(used) : Json(nullptr)},
          {"usd_per_completed_request", per(static_cast<double>(completed))},
          {"usd_per_request_in_slo", per(static_cast<double>(met))},
          {"usd_per_million_output_tokens", per(output_tokens / 1e6)},
          {"gpu_hours", gpus * hours},
          {"prices_as_of",
           known && !as_of.empty() ? Json(fmt::format("{}", fmt::join(as_of, ", "))) : Json(nullptr)}};
}

Json transfers_json(const TransferTotals& t, const RunContext& context, std::int64_t count, Bytes bytes,
                    std::int64_t descriptors) {
  Json outcomes = Json::object(), back_outcomes = Json::object();
  for (std::size_t i = 0; i < t.outcomes.size(); ++i) {
    const std::int64_t back = t.read_back_outcomes[i];
    if (t.outcomes[i] > back) outcomes[std::string(kTransferOutcomeNames[i])] = t.outcomes[i] - back;
    if (back > 0) back_outcomes[std::string(kTransferOutcomeNames[i])] = back;
  }
  return {{"mode", context.mode.empty() ? Json(nullptr) : Json(context.mode)},
          {"count", count},
          {"failed", t.failed},
          {"retried", t.retried},
          {"bytes", bytes},
          {"descriptors", descriptors},
          {"by_outcome", outcomes},
          {"post_ms", to_json(distribution_of(t.post_ms))},
          {"wire_ms", to_json(distribution_of(t.wire_ms))},
          {"batches", t.batches},
          {"slow_posts", t.slow_posts},
          {"read_back",
           {{"count", t.read_backs},
            {"bytes", t.read_back_bytes},
            {"descriptors", t.read_back_descriptors},
            {"by_outcome", back_outcomes}}},
          {"kv_byte_seconds_held", {{"prefill", t.prefill_byte_seconds}, {"decode", t.decode_byte_seconds}}},
          {"leases_expired", t.leases_expired},
          {"leases_outstanding", t.leases_outstanding},
          {"stale_reads", t.stale_reads},
          {"stale_reads_prevented", t.stale_reads_prevented},
          {"stale_writes", t.stale_writes},
          {"stale_writes_prevented", t.stale_writes_prevented},
          {"watchdogs", t.watchdogs},
          {"messages_lost", t.messages_lost},
          {"handshakes", {{"count", t.handshakes}, {"seconds", to_seconds(t.handshake_time)}}}};
}

Json retention_json(const RetentionTotals& r, const std::string& policy) {
  const auto usd = [](double amount) { return amount < 0 ? Json(nullptr) : Json(amount); };
  return {{"policy", policy},
          {"pins", r.pins},
          {"read", r.read},
          {"notified", r.notified},
          {"expired", r.expired},
          {"let_go", r.let_go},
          {"lost_with_worker", r.lost},
          {"outstanding", r.outstanding},
          {"hit_tokens", r.hit_tokens},
          {"byte_seconds", r.byte_seconds},
          {"peak_bytes", r.peak_bytes},
          {"admissions_delayed", r.admissions_delayed},
          {"admission_delay_ms", to_ms(r.admission_delay)},
          {"queue_wait_s", to_seconds(r.queue_wait)},
          {"prefill_gpu_s_avoided", r.prefill_gpu_s_avoided},
          {"usd_avoided", usd(r.usd_avoided)},
          {"usd_held", usd(r.usd_held)}};
}

Json speculation_json(const Speculated& s) {
  const auto share = [](std::int64_t part, std::int64_t all) {
    return all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0.0;
  };
  Json by_position = Json::array();
  for (std::size_t i = 0; i < s.by_position.size(); ++i) {
    by_position.push_back(share(s.by_position[i], s.drafted_at[i]));
  }
  return {{"steps", s.rows},
          {"drafted", s.drafted},
          {"accepted", s.accepted},
          {"acceptance", share(s.accepted, s.drafted)},
          {"acceptance_by_position", by_position},
          {"tokens_per_step", share(s.yielded, s.rows)},
          {"computed_in_vain", s.rejected_tokens}};
}

// A choice lost when the other one's predicted cost was less than its own: what the read took, or what was
// predicted of the computing. Its regret is by how much.
Json reuse_decisions(const std::vector<RequestRecord>& requests) {
  std::int64_t decided = 0, read = 0;
  std::vector<double> regrets;
  for (const RequestRecord& r : requests) {
    if (!r.counted || r.predicted_read < 0 || r.predicted_compute < 0) continue;
    ++decided;
    read += r.read_chosen ? 1 : 0;
    const Nanos read_cost = r.read_took >= 0 ? r.read_took : r.predicted_read;
    const Nanos excess =
        r.read_chosen ? read_cost - r.predicted_compute : r.predicted_compute - r.predicted_read;
    if (excess > 0) regrets.push_back(to_ms(excess));
  }
  const double lost = decided > 0 ? static_cast<double>(regrets.size()) / static_cast<double>(decided) : 0.0;
  return {{"n", decided},
          {"read", read},
          {"share_lost", lost},
          {"regret_ms", to_json(distribution_of(std::move(regrets)))}};
}

// ------------------------------------------------------------------------------------------ blocks held

// All workers of one role.
struct Side {
  std::string_view role;
  std::int64_t capacity = 0;
  Timeline blocks{kBlockCauses.size()};
};

std::vector<Side> sides_of(const RunResult& run) {
  std::vector<Side> sides;
  for (const Named& role : kRoles) {
    Side side{role.name};
    for (const WorkerReport& w : run.workers) {
      if (w.role != role.name) continue;
      side.capacity += w.kv_blocks;
      side.blocks.merge(w.blocks);
    }
    if (side.capacity == 0) continue;
    side.blocks.add(0, 0, run.end, 1);  // adds nothing, but all sides now have the buckets of the whole run
    side.blocks.add(0, 0, run.end, -1);
    sides.push_back(std::move(side));
  }
  return sides;
}

// The mean over what the run has of a bucket.
double mean_in(const Timeline& blocks, std::size_t cause, std::size_t bucket, Nanos end) {
  const Nanos begin = static_cast<Nanos>(bucket) * blocks.width();
  const Nanos length = begin < end ? std::min(blocks.width(), end - begin) : blocks.width();
  return static_cast<double>(blocks.integral(cause, bucket)) / static_cast<double>(length);
}

Json blocks_held(const RunResult& run) {
  Json json = Json::object();
  for (const Side& side : sides_of(run)) {
    Json held = {{"capacity", side.capacity}};
    for (std::size_t cause = 0; cause < kBlockCauses.size(); ++cause) {
      double most = 0;
      for (std::size_t bucket = 0; bucket < side.blocks.buckets(); ++bucket) {
        most = std::max(most, mean_in(side.blocks, cause, bucket, run.end));
      }
      const double mean =
          run.end > 0 ? static_cast<double>(side.blocks.total(cause)) / static_cast<double>(run.end) : 0.0;
      held[std::string(kBlockCauses[cause])] = {{"mean", mean}, {"max", most}};
    }
    json[std::string(side.role)] = std::move(held);
  }
  return json;
}

// ------------------------------------------------------------------------------------- who waited for whom

// Which worker, or pair of workers, a request waits for in a stage before its first token.
using Waited = std::tuple<Stage, std::uint32_t, std::uint32_t>;

constexpr std::array kWaits = {Stage::prefill_queue,    Stage::reuse_transfer,   Stage::prefill,
                               Stage::handoff_dispatch, Stage::decode_admission, Stage::transfer_post,
                               Stage::transfer_wire,    Stage::transfer_poll,    Stage::first_token};

Waited waited(const RequestRecord& r, Stage stage, bool push) {
  const std::uint32_t prefill = r.prefill_worker, decode = r.decode_worker;
  switch (stage) {
    case Stage::prefill_queue:
    case Stage::prefill:
      return {stage, prefill, kNoWorker};
    case Stage::reuse_transfer:
      return {stage, r.reuse_worker, prefill};
    case Stage::transfer_wire:
      return {stage, prefill, decode};
    case Stage::handoff_dispatch:  // pull: decode's step in flight; push: prefill's next one, and its writer
    case Stage::transfer_post:
      return {stage, push ? prefill : decode, kNoWorker};
    default:
      return {stage, decode, kNoWorker};
  }
}

Json waited_for(const std::vector<const RequestRecord*>& completed, const RunResult& run, bool push) {
  constexpr std::size_t kMostRows = 50;  // pairs of workers may be many
  struct Sum {
    Nanos time = 0;
    std::int64_t requests = 0;
  };
  std::map<Waited, Sum> sums;
  for (const RequestRecord* r : completed) {
    for (const Stage stage : kWaits) {
      if (r->stages[index(stage)] == 0) continue;
      Sum& sum = sums[waited(*r, stage, push)];
      sum.time += r->stages[index(stage)];
      ++sum.requests;
    }
  }
  std::vector<std::pair<Waited, Sum>> rows(sums.begin(), sums.end());
  std::ranges::stable_sort(rows, std::greater{}, [](const auto& row) { return row.second.time; });
  Json list = Json::array();
  Sum others;
  for (const auto& [who, sum] : rows) {
    if (list.size() == kMostRows) {
      others.time += sum.time;
      ++others.requests;
      continue;
    }
    const auto& [stage, first, second] = who;
    Json workers = Json::array();
    for (const std::uint32_t worker : {first, second}) {
      if (worker < run.workers.size()) workers.push_back(run.workers[worker].name);
    }
    list.push_back({{"stage", kStageNames[index(stage)]},
                    {"workers", workers},
                    {"ms", to_ms(sum.time)},
                    {"requests", sum.requests}});
  }
  return {{"rows", list}, {"others", {{"rows", others.requests}, {"ms", to_ms(others.time)}}}};
}

}  // namespace

Json releases_json(const std::vector<Release>& releases) {
  Json features = Json::array();
  bool unreleased = false;
  for (const Release& release : releases) {
    unreleased |= release.since == kUnreleased;
    features.push_back({{"feature", release.feature}, {"since", release.since}, {"source", release.source}});
  }
  return {{"unreleased", unreleased}, {"features", features}};
}

Json summarize(const RunResult& run, const RunContext& context, const Trace& trace) {
  std::array<std::uint64_t, kStatusNames.size()> by_status{};
  Json by_reason = Json::object();
  std::uint64_t injected = 0;
  std::vector<const RequestRecord*> completed;  // and counted
  std::uint64_t counted = 0, met = 0, all_met = 0;
  std::int64_t local_hits = 0, remote_hits = 0, prompts = 0, recomputed = 0, preemptions = 0;
  std::int64_t transfers = 0, descriptors = 0;
  Bytes transfer_bytes = 0;
  double output_tokens = 0;
  Nanos first_arrival = kNever, last_end = 0;
  std::map<std::string, std::uint64_t> reuse;
  for (const RequestRecord& r : run.requests) {
    if (r.end < 0 && r.status == RequestStatus::in_flight && r.prompt_tokens == 0) continue;  // never arrived
    ++injected;
    ++by_status[static_cast<std::size_t>(r.status)];
    if (r.reason != Reason::none) {
      const std::string name(kReasonNames[static_cast<std::size_t>(r.reason)]);
      by_reason[name] = by_reason.value(name, std::uint64_t{0}) + 1;
    }
    first_arrival = std::min(first_arrival, r.arrival);
    if (r.status == RequestStatus::completed) {
      last_end = std::max(last_end, r.end);
      all_met += in_slo(r, context.slo) ? 1 : 0;
    }
    if (!r.counted) continue;
    ++counted;
    if (r.reuse != Reuse::none) ++reuse[std::string(kReuseNames[static_cast<std::size_t>(r.reuse)])];
    if (r.status != RequestStatus::completed) continue;
    completed.push_back(&r);
    prompts += r.prompt_tokens;
    local_hits += r.local_hit_tokens;
    remote_hits += r.remote_hit_tokens;
    preemptions += r.preemptions;
    recomputed += r.recomputed_tokens;
    transfers += r.transferred_tokens > 0 ? 1 : 0;
    transfer_bytes += r.transfer_bytes;
    descriptors += r.descriptors;
    output_tokens += r.output_tokens;
    met += in_slo(r, context.slo) ? 1 : 0;
  }
  std::vector<const RequestRecord*> with_token, with_tpot;
  Nanos counted_first = kNever, counted_last = 0;
  for (const RequestRecord* r : completed) {
    if (r->first_token >= 0) with_token.push_back(r);
    if (r->has_tpot()) with_tpot.push_back(r);
    counted_first = std::min(counted_first, r->arrival);
    counted_last = std::max(counted_last, r->end);
  }
  const double span_s = completed.empty() ? 0 : to_seconds(counted_last - counted_first);
  const double hours = last_end > 0 ? to_seconds(last_end - first_arrival) / 3600 : 0;
  const auto per_s = [&](double count) { return span_s > 0 ? count / span_s : 0.0; };
  double gpus = 0;
  for (const RunContext::Node& node : context.nodes) gpus += node.gpus_held;

  // How a run is computed is no input: it changes no result.
  std::vector<std::string> sets = context.sets;
  std::erase_if(sets, [](const std::string& set) { return set.find(".step_by_step=") != std::string::npos; });

  Json s;
  s["schema"] = "pdsim.summary/1";
  s["scenario"] = context.scenario;
  if (run.hypothetical) s["hypothetical"] = true;
  if (run.crashes > 0) s["worker_crashes"] = run.crashes;
  s["trace"] = {{"name", trace.name},
                {"format", trace.format},
                {"rows_read", trace.report.rows_read},
                {"rows_used", trace.report.rows_used},
                {"rows_out_of_order", trace.report.rows_out_of_order},
                {"set_aside", trace.report.set_aside}};
  if (!trace.report.arrivals.empty()) s["trace"]["arrivals"] = trace.report.arrivals;
  if (!trace.report.sessions.empty()) s["trace"]["sessions"] = trace.report.sessions;
  s["seed"] = context.seed;
  s["status"] = kRunStatusNames[static_cast<std::size_t>(run.status)];
  s["requests"] = {{"injected", injected}};
  for (const std::size_t i : {1u, 2u, 3u, 4u, 0u}) s["requests"][std::string(kStatusNames[i])] = by_status[i];
  s["requests"]["by_reason"] = by_reason;
  s["latency_ms"] = {
      {"ttft", to_json(over(with_token, [](auto& r) { return to_ms(r.first_token - r.arrival); }))},
      {"tpot", to_json(over(with_tpot, [](auto& r) { return to_ms(r.tpot()); }))},
      {"itl", to_json(run.gaps.distribution(1e6))},
      {"e2e", to_json(over(completed, [](auto& r) { return to_ms(r.e2e()); }))}};
  for (std::size_t i = 0; i < kStageNames.size(); ++i) {
    s["stages_ms"][std::string(kStageNames[i])] =
        to_json(over(completed, [i](auto& r) { return to_ms(r.stages[i]); }));
  }
  s["throughput"] = {{"requests_per_s", per_s(static_cast<double>(completed.size()))},
                     {"prompt_tokens_per_s", per_s(static_cast<double>(prompts))},
                     {"output_tokens_per_s", per_s(output_tokens)},
                     {"output_tokens_per_s_per_gpu", gpus > 0 ? per_s(output_tokens) / gpus : 0.0}};
  s["goodput"] = {{"slo", slo_report(completed, context.slo)},
                  {"fraction", counted > 0 ? static_cast<double>(met) / static_cast<double>(counted) : 0.0},
                  {"requests_per_s", per_s(static_cast<double>(met))}};
  std::uint64_t evicted = 0;
  for (const WorkerReport& w : run.workers) evicted += w.evicted_blocks;
  s["cache"] = {{"prompt_tokens", prompts},         {"local_hit_tokens", local_hits},
                {"remote_hit_tokens", remote_hits}, {"computed_tokens", prompts - local_hits - remote_hits},
                {"recomputed_tokens", recomputed},  {"evicted_blocks", evicted},
                {"preemptions", preemptions}};
  if (run.speculated.on) s["speculation"] = speculation_json(run.speculated);
  s["transfers"] = transfers_json(run.transfers, context, transfers, transfer_bytes, descriptors);
  s["workers"] = Json::array();
  std::int64_t steps = 0;
  for (const WorkerReport& w : run.workers) {
    const auto busy = static_cast<double>(w.busy);
    const auto end = static_cast<double>(run.end);
    steps += w.steps;
    s["workers"].push_back({{"name", w.name},
                            {"role", w.role},
                            {"busy_fraction", end > 0 ? busy / end : 0.0},
                            {"mfu", busy > 0 ? w.work.flops / busy / w.peak_flops_per_ns : 0.0},
                            {"hbm_fraction", busy > 0 ? w.work.hbm_bytes / busy / w.peak_bytes_per_ns : 0.0},
                            {"steps", w.steps},
                            {"kv_usage", {{"mean", w.kv_usage_mean}, {"max", w.kv_usage_max}}},
                            {"kv_blocks", w.kv_blocks},
                            {"preemptions", w.preemptions},
                            {"evicted_blocks", w.evicted_blocks},
                            {"posting_fraction", end > 0 ? static_cast<double>(w.posting) / end : 0.0}});
  }
  s["blocks_held"] = blocks_held(run);
  s["links"] = Json::array();
  for (const LinkReport& link : run.links) {
    s["links"].push_back({{"name", link.name},
                          {"bytes", link.bytes},
                          {"utilization", {{"mean", link.mean}, {"max", link.max}}}});
  }
  double all_output = 0;
  for (const RequestRecord& r : run.requests)
    all_output += r.status == RequestStatus::completed ? r.output_tokens : 0;
  s["cost"] = cost(context, hours, by_status[1], all_met, all_output);
  s["reuse"] = Json::object();
  for (const auto& [name, n] : reuse) s["reuse"][name] = n;
  s["reuse_decisions"] = reuse_decisions(run.requests);
  if (!context.retention.empty()) s["retention"] = retention_json(run.retention, context.retention);
  s["waited_for"] = waited_for(completed, run, context.mode.starts_with("push"));
  s["bound_by"] = bound_by(completed, run);
  s["inputs"] = {{"scenario", context.scenario_sha256},
                 {"set", sets},
                 {"trace", trace.sha256},
                 {"profile", context.profile_sha256},
                 {"prices", s["cost"]["prices_as_of"]}};
  if (!context.network_profile_sha256.empty()) {
    s["inputs"]["network_profile"] = context.network_profile_sha256;
  }
  s["cost_model"] = {
      {"profile", context.profile},
      {"extrapolated_step_fraction",
       steps > 0 ? static_cast<double>(run.extrapolated_steps) / static_cast<double>(steps) : 0.0}};
  if (context.datasheet) s["cost_model"]["datasheet"] = true;
  s["cost_model"].update(cost_sources_json(context.sources));
  s["releases"] = releases_json(context.releases);
  s["simulated_s"] = to_seconds(run.end);
  s["events"] = run.events;
  return s;
}

Json cost_sources_json(const CostSources& sources) {
  Json json = Json::object();
  if (sources.empty()) return json;
  json["calibrated"] = sources.devices;
  json["engine"] = sources.engines;
  json["engine_efficiency"] = Json::object();
  for (const auto& [curve, factor] : sources.engine_efficiency) json["engine_efficiency"][curve] = factor;
  json["own_kernel"] = sources.own_kernel;
  json["taken"] = sources.taken;
  return json;
}

std::string requests_csv(const RunResult& run, const Trace& trace, const std::vector<std::string>& workers) {
  std::string out =
      "request_id,session_id,turn,status,reason,arrival_ns,prompt_tokens,output_tokens,prefill_worker,decode_"
      "worker,"
      "local_hit_tokens,remote_hit_tokens,decode_hit_tokens,transferred_tokens,transfer_bytes,descriptors,"
      "preemptions,"
      "retries,reuse_outcome,prefill_changed,decode_changed,concurrency_at_arrival,ttft_ns,tpot_ns,itl_max_"
      "ns,e2e_ns";
  for (const std::string_view stage : kStageNames) fmt::format_to(std::back_inserter(out), ",{}_ns", stage);
  out += ",read_back_bytes,predicted_read_ns,predicted_compute_ns";
  out += run.hypothetical ? ",hypothetical\n" : "\n";
  out.reserve(out.size() + run.requests.size() * 240);
  struct Previous {
    std::uint32_t prefill = kNoWorker, decode = kNoWorker;
  };
  std::vector<Previous> previous(trace.sessions.size());
  const auto name = [&](std::uint32_t worker) {
    return worker == kNoWorker ? std::string_view() : workers[worker];
  };
  const auto put = [&](auto&& value, bool present = true) {
    if (present) fmt::format_to(std::back_inserter(out), ",{}", value);
    if (!present) out += ',';
  };
  for (std::size_t i = 0; i < run.requests.size(); ++i) {
    const RequestRecord& r = run.requests[i];
    if (r.prompt_tokens == 0) continue;  // interrupted before it arrived
    const Request& request = trace.requests[i];
    const bool in_session = request.session >= 0;
    bool prefill_changed = false, decode_changed = false;
    if (in_session && r.prefill_worker != kNoWorker) {
      Previous& before = previous[static_cast<std::size_t>(request.session)];
      prefill_changed = before.prefill != kNoWorker && before.prefill != r.prefill_worker;
      decode_changed =
          before.decode != kNoWorker && r.decode_worker != kNoWorker && before.decode != r.decode_worker;
      before.prefill = r.prefill_worker;
      if (r.decode_worker != kNoWorker) before.decode = r.decode_worker;
    }
    fmt::format_to(std::back_inserter(out), "{}", i);
    put(in_session ? csv_text(trace.sessions[static_cast<std::size_t>(request.session)]) : std::string());
    put(request.turn, in_session);
    put(kStatusNames[static_cast<std::size_t>(r.status)]);
    put(kReasonNames[static_cast<std::size_t>(r.reason)]);
    put(r.arrival);
    put(r.prompt_tokens);
    put(r.output_tokens);
    put(name(r.prefill_worker));
    put(name(r.decode_worker));
    put(r.local_hit_tokens);
    put(r.remote_hit_tokens);
    put(r.decode_hit_tokens);
    put(r.transferred_tokens);
    put(r.transfer_bytes);
    put(r.descriptors);
    put(r.preemptions);
    put(r.retries);
    put(kReuseNames[static_cast<std::size_t>(r.reuse)]);
    put(prefill_changed ? 1 : 0);
    put(decode_changed ? 1 : 0);
    put(r.concurrency);
    const bool done = r.status == RequestStatus::completed;
    put(r.first_token - r.arrival, r.first_token >= 0);
    put(done && r.has_tpot() ? r.tpot() : 0, done && r.has_tpot());
    put(r.longest_gap, done && r.has_tpot());
    put(r.e2e(), r.end >= 0);
    for (const Nanos stage : r.stages) put(stage);
    put(r.read_back_bytes);
    put(r.predicted_read, r.predicted_read >= 0);
    put(r.predicted_compute, r.predicted_compute >= 0);
    out += run.hypothetical ? ",1\n" : "\n";
  }
  return out;
}

std::string blocks_csv(const RunResult& run) {
  std::string out = "time_s,side";
  for (const std::string_view cause : kBlockCauses) fmt::format_to(std::back_inserter(out), ",{}", cause);
  out += run.hypothetical ? ",total,hypothetical\n" : ",total\n";
  const std::vector<Side> sides = sides_of(run);
  for (std::size_t bucket = 0; !sides.empty() && bucket < sides[0].blocks.buckets(); ++bucket) {
    for (const Side& side : sides) {
      const auto begin = static_cast<Nanos>(bucket) * side.blocks.width();
      fmt::format_to(std::back_inserter(out), "{:.9f},{}", to_seconds(begin), side.role);
      double total = 0;
      for (std::size_t cause = 0; cause < kBlockCauses.size(); ++cause) {
        const double mean = mean_in(side.blocks, cause, bucket, run.end);
        total += mean;
        fmt::format_to(std::back_inserter(out), ",{:.3f}", mean);
      }
      fmt::format_to(std::back_inserter(out), ",{:.3f}{}\n", total, run.hypothetical ? ",1" : "");
    }
  }
  return out;
}

}  // namespace pdsim
