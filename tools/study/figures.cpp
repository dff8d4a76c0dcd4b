#include "tools/study/figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>

#include "sim/metrics/record.hpp"
#include "sim/scenario/names.hpp"

namespace pdsim {

namespace {

using nlohmann::ordered_json;
using From = Figure::From;

// The node at a path of keys; null where there is none.
const ordered_json* node_at(const ordered_json& summary, std::string_view path) {
  const ordered_json* node = &summary;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    if (!node->is_object()) return nullptr;
    const auto found = node->find(std::string(path.substr(begin, end - begin)));
    if (found == node->end()) return nullptr;
    node = &*found;
    begin = end + 1;
  }
  return node;
}

constexpr std::string_view kOfDistribution[] = {"mean", "p50", "p90", "p95", "p99", "max"};  // and n

constexpr std::string_view kCounts[] = {
    "requests.injected", "requests.completed", "requests.rejected",
    "requests.failed",   "requests.cancelled", "requests.in_flight",
};

// What follows the latencies and stages: plain numbers, one column each.
struct Plain {
  std::string_view path;
  ColumnType type = ColumnType::real;
};
constexpr ColumnType kInteger = ColumnType::integer, kText = ColumnType::text;
constexpr Plain kRates[] = {
    {"throughput.requests_per_s"},
    {"throughput.prompt_tokens_per_s"},
    {"throughput.output_tokens_per_s"},
    {"throughput.output_tokens_per_s_per_gpu"},
    {"goodput.fraction"},
    {"goodput.requests_per_s"},
    {"cost.billed_usd"},
    {"cost.used_usd"},
    {"cost.usd_per_completed_request"},
    {"cost.usd_per_request_in_slo"},
    {"cost.usd_per_million_output_tokens"},
    {"cost.gpu_hours"},
    {"cost.prices_as_of", kText},
    {"bound_by.code", kText},
    {"bound_by.share"},
    {"cache.prompt_tokens", kInteger},
    {"cache.local_hit_tokens", kInteger},
    {"cache.remote_hit_tokens", kInteger},
    {"cache.computed_tokens", kInteger},
    {"cache.recomputed_tokens", kInteger},
    {"cache.evicted_blocks", kInteger},
    {"cache.preemptions", kInteger},
};
constexpr Plain kTransfers[] = {
    {"transfers.mode", kText},
    {"transfers.count", kInteger},
    {"transfers.failed", kInteger},
    {"transfers.retried", kInteger},
    {"transfers.bytes", kInteger},
    {"transfers.descriptors", kInteger},
    {"transfers.batches", kInteger},
    {"transfers.slow_posts", kInteger},
    {"transfers.read_back.count", kInteger},
    {"transfers.read_back.bytes", kInteger},
    {"transfers.read_back.descriptors", kInteger},
    {"transfers.kv_byte_seconds_held.prefill"},
    {"transfers.kv_byte_seconds_held.decode"},
    {"transfers.leases_expired", kInteger},
    {"transfers.leases_outstanding", kInteger},
    {"transfers.stale_reads", kInteger},
    {"transfers.stale_reads_prevented", kInteger},
    {"transfers.stale_writes", kInteger},
    {"transfers.stale_writes_prevented", kInteger},
    {"transfers.watchdogs", kInteger},
    {"transfers.messages_lost", kInteger},
    {"transfers.handshakes.count", kInteger},
    {"transfers.handshakes.seconds"},
};
constexpr Plain kReuse[] = {
    {"reuse_decisions.n", kInteger},
    {"reuse_decisions.read", kInteger},
    {"reuse_decisions.share_lost"},
};
constexpr Plain kRetention[] = {
    {"retention.policy", kText},
    {"retention.pins", kInteger},
    {"retention.read", kInteger},
    {"retention.notified", kInteger},
    {"retention.expired", kInteger},
    {"retention.let_go", kInteger},
    {"retention.lost_with_worker", kInteger},
    {"retention.outstanding", kInteger},
    {"retention.hit_tokens", kInteger},
    {"retention.byte_seconds"},
    {"retention.peak_bytes"},
    {"retention.admissions_delayed", kInteger},
    {"retention.admission_delay_ms"},
    {"retention.queue_wait_s"},
    {"retention.prefill_gpu_s_avoided"},
    {"retention.usd_avoided"},
    {"retention.usd_held"},
    {"speculation.steps", kInteger},
    {"speculation.drafted", kInteger},
    {"speculation.accepted", kInteger},
    {"speculation.acceptance"},
    {"speculation.tokens_per_step"},
    {"speculation.computed_in_vain", kInteger},
};
constexpr Plain kAbout[] = {
    {"inputs.trace", kText},
    {"inputs.profile", kText},
    {"cost_model.profile", kText},
    {"cost_model.extrapolated_step_fraction"},
    {"releases.unreleased", kInteger},
    {"simulated_s"},
    {"events", kInteger},
};

class Table {
 public:
  std::vector<Figure> figures;

  void plain(std::string_view path, ColumnType type = ColumnType::real, bool sparse = false) {
    figures.push_back({column_name(path), std::string(path), type, From::path, {}, sparse});
  }
  template <std::size_t N>
  void plain(const Plain (&rows)[N]) {
    for (const Plain& row : rows) plain(row.path, row.type);
  }
  void distribution(const std::string& path) {
    for (const std::string_view of : kOfDistribution) plain(fmt::format("{}.{}", path, of));
    plain(path + ".n", ColumnType::integer);
  }
  // Counts by name, which a summary lists where they are not 0. An empty name stands for no reason.
  template <typename Names>
  void counts(std::string_view path, const Names& names) {
    for (const std::string_view name : names) {
      if (!name.empty()) plain(fmt::format("{}.{}", path, name), ColumnType::integer, true);
    }
  }
};

std::vector<Figure> make_figures() {
  Table table;
  for (const std::string_view path : kCounts) table.plain(path, ColumnType::integer);
  table.counts("requests.by_reason", kReasonNames);
  for (const char* latency : {"ttft", "tpot", "itl", "e2e"}) {
    table.distribution(fmt::format("latency_ms.{}", latency));
  }
  for (const std::string_view stage : kStageNames) table.distribution(fmt::format("stages_ms.{}", stage));
  table.plain(kRates);
  table.plain(kTransfers);
  table.distribution("transfers.post_ms");
  table.distribution("transfers.wire_ms");
  table.counts("transfers.by_outcome", kTransferOutcomeNames);
  table.counts("transfers.read_back.by_outcome", kTransferOutcomeNames);
  table.counts("reuse", kReuseNames);
  table.plain(kReuse);
  table.distribution("reuse_decisions.regret_ms");
  table.plain(kRetention);
  for (const Named& role : kRoles) {
    for (const char* path : {"busy_fraction", "mfu", "hbm_fraction", "posting_fraction", "kv_usage.mean"}) {
      for (const auto& [name, from] : {std::pair("mean", From::workers_mean), {"max", From::workers_max}}) {
        table.figures.push_back({column_name(fmt::format("workers.{}.{}.{}", role.name, path, name)), path,
                                 ColumnType::real, from, std::string(role.name), false});
      }
    }
    table.figures.push_back({column_name(fmt::format("workers.{}.kv_usage.max.max", role.name)),
                             "kv_usage.max", ColumnType::real, From::workers_max, std::string(role.name),
                             false});
  }
  for (const Named& role : kRoles) {
    const std::string held = fmt::format("blocks_held.{}", role.name);
    table.plain(held + ".capacity", ColumnType::integer);
    for (const std::string_view cause : kBlockCauses) {
      table.plain(fmt::format("{}.{}.mean", held, cause));
      table.plain(fmt::format("{}.{}.max", held, cause));
    }
  }
  for (const char* path : {"utilization.mean", "utilization.max"}) {
    table.figures.push_back(
        {column_name(fmt::format("links.{}.max", path)), path, ColumnType::real, From::links_max, {}, false});
  }
  for (const char* path : {"worker_crashes", "hypothetical", "cost_model.datasheet"}) {
    table.plain(path, ColumnType::integer, true);
  }
  table.plain(kAbout);
  return std::move(table.figures);
}

ordered_json over(const Figure& figure, const ordered_json& list) {
  double sum = 0, most = 0;
  std::size_t n = 0;
  for (const ordered_json& item : list) {
    if (figure.from != From::links_max && item.value("role", "") != figure.role) continue;
    const ordered_json* node = node_at(item, figure.path);
    if (node == nullptr || !node->is_number()) continue;
    const auto value = node->get<double>();
    most = n == 0 ? value : std::max(most, value);
    sum += value;
    ++n;
  }
  if (n == 0) return nullptr;
  return figure.from == From::workers_mean ? sum / static_cast<double>(n) : most;
}

}  // namespace

std::string column_name(std::string_view path) {
  std::string name(path);
  std::ranges::replace(name, '.', '_');
  return name;
}

const std::vector<Figure>& figures() {
  static const std::vector<Figure> all = make_figures();
  return all;
}

ordered_json value_of(const Figure& figure, const ordered_json& summary) {
  if (figure.from != From::path) {
    const ordered_json* list = node_at(summary, figure.from == From::links_max ? "links" : "workers");
    return list == nullptr ? ordered_json(nullptr) : over(figure, *list);
  }
  const ordered_json* node = node_at(summary, figure.path);
  if (node != nullptr) return *node;
  return figure.sparse ? ordered_json(0) : ordered_json(nullptr);
}

}  // namespace pdsim
