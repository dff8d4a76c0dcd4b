// Theory: a table of results has every figure of a summary, and none that a summary has not.
#include "tools/study/figures.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tools/study/runs.hpp"

namespace pdsim {
namespace {

using nlohmann::ordered_json;

ordered_json summary_of(std::vector<std::string> sets) {
  ReplayOptions options;
  options.quiet = true;
  options.trace = PDSIM_SOURCE_DIR "/traces/samples/multi_turn.jsonl";
  options.format = "mooncake";
  options.sets = std::move(sets);
  TraceStore traces;
  return *run(read_run(PDSIM_SOURCE_DIR "/scenarios/quickstart.json", options), traces).summary;
}

// Between them, all that a summary can have.
const std::vector<ordered_json>& summaries() {
  static const std::vector<ordered_json> all = {
      summary_of({"transfer.bidirectional=true"}),
      summary_of({R"(pools=[{"name": "both", "role": "colocated", "gpu": "h200", "engine": {"speculative":
                  {"method": "ngram", "num_speculative_tokens": 4, "mean_accepted": 1.5}}}])"}),
      summary_of({"transfer.mode=push", "transfer.bidirectional=true", "transfer.hypothetical=true"}),
  };
  return all;
}

void leaves(const ordered_json& node, const std::string& path, std::set<std::string>& out) {
  if (!node.is_object()) {
    if (!node.is_array()) out.insert(path);
    return;
  }
  for (const auto& [key, value] : node.items()) leaves(value, path.empty() ? key : path + "." + key, out);
}

TEST(Figures, EachIsInASummaryUnlessItIsSparse) {
  std::set<std::string> there;
  for (const ordered_json& summary : summaries()) leaves(summary, "", there);
  for (const Figure& figure : figures()) {
    if (figure.from != Figure::From::path || figure.sparse) continue;
    EXPECT_TRUE(there.contains(figure.path)) << figure.path;
  }
}

TEST(Figures, AllOfASummaryIsAmongThem) {
  // What is text about the run, has keys of the run's own, or is what a parameter is often called.
  const std::vector<std::string> others = {
      "schema",        "scenario",        "status",        "trace.",      "goodput.slo.",
      "bound_by.text", "inputs.scenario", "inputs.prices", "waited_for.", "seed"};
  std::set<std::string> figures_there;
  for (const Figure& figure : figures()) figures_there.insert(figure.path);
  for (const ordered_json& summary : summaries()) {
    std::set<std::string> there;
    leaves(summary, "", there);
    for (const std::string& path : there) {
      const bool other =
          std::ranges::any_of(others, [&](const std::string& start) { return path.starts_with(start); });
      EXPECT_TRUE(other || figures_there.contains(path)) << path;
    }
  }
}

TEST(Figures, ValuesAreTheSummarysAndOfTheDeclaredType) {
  for (const ordered_json& summary : summaries()) {
    for (const Figure& figure : figures()) {
      const ordered_json value = value_of(figure, summary);
      if (value.is_null()) continue;
      EXPECT_EQ(value.is_string(), figure.type == ColumnType::text) << figure.path;
      if (figure.type == ColumnType::integer) {
        EXPECT_TRUE(value.is_number_integer() || value.is_boolean()) << figure.path << value;
      }
    }
  }
}

TEST(Figures, WorkersAreJoinedByRole) {
  const ordered_json summary = ordered_json::parse(R"({"workers": [
    {"role": "decode", "busy_fraction": 0.25, "kv_usage": {"mean": 0.1, "max": 0.5}},
    {"role": "decode", "busy_fraction": 0.75, "kv_usage": {"mean": 0.3, "max": 0.4}},
    {"role": "prefill", "busy_fraction": 1, "kv_usage": {"mean": 1, "max": 1}}],
    "links": [{"utilization": {"mean": 0.2, "max": 1}}, {"utilization": {"mean": 0.6, "max": 0.9}}],
    "latency_ms": {"ttft": {"p95": 12.5}}})");
  std::map<std::string, ordered_json> values;
  for (const Figure& figure : figures()) values[figure.column] = value_of(figure, summary);
  EXPECT_EQ(values["workers_decode_busy_fraction_mean"], 0.5);
  EXPECT_EQ(values["workers_decode_busy_fraction_max"], 0.75);
  EXPECT_EQ(values["workers_decode_kv_usage_mean_mean"], 0.2);
  EXPECT_EQ(values["workers_decode_kv_usage_max_max"], 0.5);
  EXPECT_EQ(values["workers_prefill_busy_fraction_max"], 1.0);
  EXPECT_TRUE(values["workers_colocated_busy_fraction_mean"].is_null());
  EXPECT_EQ(values["links_utilization_mean_max"], 0.6);
  EXPECT_EQ(values["links_utilization_max_max"], 1.0);
  EXPECT_EQ(values["latency_ms_ttft_p95"], 12.5);
  EXPECT_EQ(values["requests_by_reason_client_timeout"], 0);  // sparse: left out where it is 0
  EXPECT_TRUE(values["latency_ms_ttft_p50"].is_null());
}

TEST(Figures, ColumnsAreDistinct) {
  std::set<std::string> seen;
  for (const Figure& figure : figures()) {
    EXPECT_TRUE(seen.insert(figure.column).second) << figure.column;
    EXPECT_EQ(figure.column.find('.'), std::string::npos);
  }
  EXPECT_GT(seen.size(), 200u);
}

}  // namespace
}  // namespace pdsim
