#include "sim/metrics/summary.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

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
      {"transfer_post", "posting descriptors: larger blocks or less fragmentation", {Stage::transfer_post}},
      {"transfer_wire",
       "bytes on the wire: network bandwidth binds",
       {Stage::transfer_wire, Stage::reuse_transfer}},
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
Cause refined(const Cause& cause, const std::vector<WorkerReport>& workers) {
  const bool decode = cause.code == "decode_admission";
  if (!decode && cause.code != "prefill_queue") return cause;
  std::array<double, 4> waits{};
  for (const WorkerReport& w : workers) {
    if ((w.role == "decode") != decode) continue;
    for (std::size_t i = 0; i < waits.size(); ++i) waits[i] += static_cast<double>(w.waits[i]);
  }
  const double slot = waits[1], blocks = waits[2], behind = waits[3];
  if (slot >= blocks && slot > behind) {
    return {decode ? "decode_slots" : "prefill_slots",
            decode ? "waiting for one of max_num_seqs places in decode"
                   : "waiting for one of max_num_seqs places",
            {}};
  }
  if (blocks > behind) {
    return {decode ? "decode_kv_blocks" : "prefill_kv_blocks",
            decode ? "waiting for KV blocks in decode: its memory binds"
                   : "waiting for KV blocks, held by other requests or for decode to read: memory binds",
            {}};
  }
  return cause;
}

Json bound_by(const std::vector<const RequestRecord*>& completed, const std::vector<WorkerReport>& workers) {
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
  const Cause cause = refined(*most, workers);
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

}  // namespace

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
    if (r.reuse != Reuse::none) ++reuse[std::string(kReuseNames[static_cast<std::size_t>(r.reuse)])];
    first_arrival = std::min(first_arrival, r.arrival);
    if (r.status == RequestStatus::completed) {
      last_end = std::max(last_end, r.end);
      all_met += in_slo(r, context.slo) ? 1 : 0;
    }
    if (!r.counted) continue;
    ++counted;
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
  s["trace"] = {{"name", trace.name},
                {"format", trace.format},
                {"rows_read", trace.report.rows_read},
                {"rows_used", trace.report.rows_used},
                {"rows_out_of_order", trace.report.rows_out_of_order},
                {"set_aside", trace.report.set_aside}};
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
  const TransferTotals& t = run.transfers;
  s["transfers"] = {
      {"count", transfers},
      {"failed", t.failed},
      {"retried", t.retried},
      {"bytes", transfer_bytes},
      {"descriptors", descriptors},
      {"post_ms", to_json(distribution_of(t.post_ms))},
      {"wire_ms", to_json(distribution_of(t.wire_ms))},
      {"kv_byte_seconds_held", {{"prefill", t.prefill_byte_seconds}, {"decode", t.decode_byte_seconds}}},
      {"leases_expired", t.leases_expired},
      {"leases_outstanding", t.leases_outstanding}};
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
  s["bound_by"] = bound_by(completed, run.workers);
  s["inputs"] = {{"scenario", context.scenario_sha256},
                 {"set", sets},
                 {"trace", trace.sha256},
                 {"profile", context.profile_sha256},
                 {"prices", s["cost"]["prices_as_of"]}};
  s["cost_model"] = {
      {"profile", context.profile},
      {"extrapolated_step_fraction",
       steps > 0 ? static_cast<double>(run.extrapolated_steps) / static_cast<double>(steps) : 0.0}};
  s["simulated_s"] = to_seconds(run.end);
  s["events"] = run.events;
  return s;
}

namespace {

// RFC 4180: what holds a comma, a quote or a line end is quoted. Only session ids come from outside.
std::string csv_text(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + '"';
}

}  // namespace

std::string requests_csv(const RunResult& run, const Trace& trace, const std::vector<std::string>& workers) {
  std::string out =
      "request_id,session_id,turn,status,reason,arrival_ns,prompt_tokens,output_tokens,prefill_worker,decode_"
      "worker,"
      "local_hit_tokens,remote_hit_tokens,decode_hit_tokens,transferred_tokens,transfer_bytes,descriptors,"
      "preemptions,"
      "retries,reuse_outcome,prefill_changed,decode_changed,concurrency_at_arrival,ttft_ns,tpot_ns,itl_max_"
      "ns,e2e_ns";
  for (const std::string_view stage : kStageNames) fmt::format_to(std::back_inserter(out), ",{}_ns", stage);
  out += '\n';
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
    out += '\n';
  }
  return out;
}

namespace {

void row(std::string& out, std::string_view label, const Json& d) {
  if (d["n"] == 0) {
    fmt::format_to(std::back_inserter(out), "  {:<18}{:>10}\n", label, "none");
    return;
  }
  fmt::format_to(std::back_inserter(out), "  {:<18}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>11.1f}\n",
                 label, d["mean"].get<double>(), d["p50"].get<double>(), d["p90"].get<double>(),
                 d["p95"].get<double>(), d["p99"].get<double>(), d["max"].get<double>());
}

}  // namespace

std::string summary_table(const Json& s) {
  std::string out;
  auto put = std::back_inserter(out);
  const Json& q = s["requests"];
  fmt::format_to(put, "{} on {}: {}\n", s["trace"]["name"].get<std::string>(),
                 s["scenario"].get<std::string>(), s["status"].get<std::string>());
  fmt::format_to(put,
                 "requests            {} injected = {} completed + {} rejected + {} failed + {} cancelled + "
                 "{} in flight\n",
                 q["injected"].get<std::uint64_t>(), q["completed"].get<std::uint64_t>(),
                 q["rejected"].get<std::uint64_t>(), q["failed"].get<std::uint64_t>(),
                 q["cancelled"].get<std::uint64_t>(), q["in_flight"].get<std::uint64_t>());
  for (const auto& [reason, n] : q["by_reason"].items()) {
    fmt::format_to(put, "                    {}: {}\n", reason, n.get<std::uint64_t>());
  }
  fmt::format_to(put, "\n{:<20}{:>10}{:>10}{:>10}{:>10}{:>10}{:>11}\n", "latency, ms", "mean", "p50", "p90",
                 "p95", "p99", "max");
  row(out, "TTFT", s["latency_ms"]["ttft"]);
  row(out, "TPOT", s["latency_ms"]["tpot"]);
  row(out, "ITL", s["latency_ms"]["itl"]);
  row(out, "end to end", s["latency_ms"]["e2e"]);
  fmt::format_to(put, "\n{:<20}the means sum to the mean end to end\n", "stages, ms");
  for (const auto& [stage, d] : s["stages_ms"].items()) {
    if (d["n"] != 0 && d["max"].get<double>() > 0) row(out, stage, d);
  }
  const Json& tp = s["throughput"];
  fmt::format_to(put,
                 "\nthroughput          {:.2f} requests/s, {:.0f} prompt and {:.0f} output tokens/s, {:.1f} "
                 "output tokens/s/GPU\n",
                 tp["requests_per_s"].get<double>(), tp["prompt_tokens_per_s"].get<double>(),
                 tp["output_tokens_per_s"].get<double>(), tp["output_tokens_per_s_per_gpu"].get<double>());
  if (!s["goodput"]["slo"].empty()) {
    fmt::format_to(put, "goodput             {:.1f} % of requests within",
                   100 * s["goodput"]["fraction"].get<double>());
    const char* sep = " ";
    for (const auto& [metric, bounds] : s["goodput"]["slo"].items()) {
      for (const auto& [p, b] : bounds.items()) {
        const Json& is = b["value"];
        fmt::format_to(put, "{}{} {} {:g} (is {})", sep, metric, p, b["bound"].get<double>(),
                       is.is_null() ? "none" : fmt::format("{:.1f}", is.get<double>()));
        sep = ", ";
      }
    }
    fmt::format_to(put, "\n");
  }
  const Json& c = s["cache"];
  const double prompt = std::max(1.0, c["prompt_tokens"].get<double>());
  fmt::format_to(put,
                 "prefix cache        {:.1f} % of {} prompt tokens hit; {} computed, {} computed again; {} "
                 "preemptions\n",
                 100 * (c["local_hit_tokens"].get<double>() + c["remote_hit_tokens"].get<double>()) / prompt,
                 c["prompt_tokens"].get<std::int64_t>(), c["computed_tokens"].get<std::int64_t>(),
                 c["recomputed_tokens"].get<std::int64_t>(), c["preemptions"].get<std::int64_t>());
  const Json& t = s["transfers"];
  if (t["count"] != 0) {
    fmt::format_to(put,
                   "transfers           {} of {:.1f} GB in all, {:.0f} descriptors each; post {:.2f} ms, "
                   "wire beyond it {:.2f} "
                   "ms (means)\n",
                   t["count"].get<std::int64_t>(), t["bytes"].get<double>() / 1e9,
                   t["descriptors"].get<double>() / t["count"].get<double>(),
                   t["post_ms"]["mean"].get<double>(), t["wire_ms"]["mean"].get<double>());
  }
  fmt::format_to(put, "\n{:<20}{:>8}{:>8}{:>8}{:>11}{:>9}{:>9}\n", "workers", "busy", "MFU", "HBM", "steps",
                 "KV mean", "KV max");
  for (const Json& w : s["workers"]) {
    fmt::format_to(put, "  {:<18}{:>7.1f}%{:>7.1f}%{:>7.1f}%{:>11}{:>8.1f}%{:>8.1f}%\n",
                   w["name"].get<std::string>(), 100 * w["busy_fraction"].get<double>(),
                   100 * w["mfu"].get<double>(), 100 * w["hbm_fraction"].get<double>(),
                   w["steps"].get<std::int64_t>(), 100 * w["kv_usage"]["mean"].get<double>(),
                   100 * w["kv_usage"]["max"].get<double>());
  }
  const Json& m = s["cost"];
  if (m["billed_usd"].is_null()) {
    fmt::format_to(put, "\ncost                unknown: no price of an instance in use; {:.2f} GPU hours\n",
                   m["gpu_hours"].get<double>());
  } else {
    fmt::format_to(put, "\ncost                {:.2f} USD billed ({:.2f} for the GPUs held), prices of {}",
                   m["billed_usd"].get<double>(), m["used_usd"].get<double>(),
                   m["prices_as_of"].get<std::string>());
    if (!m["usd_per_completed_request"].is_null()) {
      fmt::format_to(put, "; {:.5f} USD a request", m["usd_per_completed_request"].get<double>());
    }
    if (!m["usd_per_million_output_tokens"].is_null()) {
      fmt::format_to(put, ", {:.2f} USD a million output tokens",
                     m["usd_per_million_output_tokens"].get<double>());
    }
    fmt::format_to(put, "\n");
  }
  fmt::format_to(put, "bound by            {}\n", s["bound_by"]["text"].get<std::string>());
  const double extrapolated = s["cost_model"]["extrapolated_step_fraction"].get<double>();
  fmt::format_to(put, "cost model          {}; {:.1f} % of steps lie outside what was measured\n",
                 s["cost_model"]["profile"].get<std::string>(), 100 * extrapolated);
  return out;
}

}  // namespace pdsim
