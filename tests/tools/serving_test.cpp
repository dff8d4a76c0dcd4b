// Theory: every row of a table is in the report, simulated or with the reason why not; an error is
// simulated / measured - 1 and the figures over rows are medians and percentiles of those; rows that differ
// in nothing but what was measured are one simulation. Whatever is wrong with the input is one line and
// status 2, and nothing has been written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

Ran run_serving(const Folder& folder, const std::string& arguments) {
  return run(folder, "validate serving " + arguments);
}

struct Row {
  std::string id, engine = "vllm", gpu = "h200_sxm", precision = "bf16", mode = "agg", suspect{};
  int isl = 256, osl = 32;
  std::string concurrency = "2", rate{};
  double ttft = 20, tpot = 5, e2e = 0;
};

std::string table(const std::vector<Row>& rows) {
  std::ostringstream out;
  out << "dataset,id,model,gpu,engine,precision,mode,tp,n_gpus,isl,osl,concurrency,rate_rps,ttft_ms,tpot_ms,"
         "mean_e2el_ms,output_tput_per_gpu,suspect\n";
  for (const Row& row : rows) {
    out << "test," << row.id << ",llama-3.1-8b," << row.gpu << ',' << row.engine << ',' << row.precision
        << ',' << row.mode << ",1.0,1.0," << row.isl << ',' << row.osl << ',' << row.concurrency << ','
        << row.rate << ',' << row.ttft << ',' << row.tpot << ',';
    if (row.e2e > 0) out << row.e2e;
    out << ",100," << row.suspect << '\n';
  }
  return out.str();
}

// Rules of the tests' own: those that ship may change with what is learnt of the tables.
constexpr const char* kRules = R"({
  "schema": "pdsim.serving-rules/1",
  "rules": [
    {"set": {"weights_dtype": "bf16", "client.requests_per_concurrency": 5, "client.duration_s": 2}, "source": "all"},
    {"if": {"mode": ["disagg"]}, "refuse": "disaggregated", "source": "mode"},
    {"if": {"engine": ["slow"]}, "set": {"engine.max_num_seqs": 1}, "source": "one seat"}
  ]
})";

json report_of(const Folder& folder, const std::vector<Row>& rows, const std::string& options = "") {
  folder.file("points.csv", table(rows));
  folder.file("rules.json", kRules);
  const Ran ran = run_serving(folder, "points.csv --rules rules.json --json --quiet " + options);
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  return ran.status == 0 ? json::parse(ran.out) : json();
}

double percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  const double at = p * static_cast<double>(values.size() - 1), low = std::floor(at);
  const auto i = static_cast<std::size_t>(low);
  return values[i] + (at - low) * (values[std::min(i + 1, values.size() - 1)] - values[i]);
}

TEST(ValidateServing, ItsFiguresAreThoseOfItsRows) {
  const Folder folder;
  const json report = report_of(folder, {{.id = "closed"},
                                         {.id = "more", .concurrency = "8"},
                                         {.id = "open", .concurrency = "", .rate = "10"}});
  EXPECT_EQ(report["schema"], "pdsim.validate-serving/1");
  EXPECT_EQ(report["status"], "finished");
  EXPECT_EQ(report["overall"]["n"], 3);
  EXPECT_EQ(report["overall"]["not_simulated"], 0);
  EXPECT_EQ(report["not_simulated"].size(), 0u);
  ASSERT_EQ(report["rows"].size(), 3u);
  const std::vector<std::pair<std::string, std::string>> metrics = {
      {"ttft", "ttft_ms"}, {"tpot", "tpot_ms"}, {"throughput", "output_tokens_per_s_per_gpu"}};
  for (const auto& [metric, key] : metrics) {
    std::vector<double> signed_errors, errors;
    for (const json& row : report["rows"]) {
      const double simulated = row["simulated"][key], measured = row["measured"][key];
      EXPECT_GT(simulated, 0) << key;
      EXPECT_NEAR(row["error"][metric].get<double>(), simulated / measured - 1, 1e-12);
      signed_errors.push_back(simulated / measured - 1);
      errors.push_back(std::abs(signed_errors.back()));
    }
    const json& overall = report["overall"][metric];
    EXPECT_EQ(overall["n"], 3);
    EXPECT_NEAR(overall["median_ape"].get<double>(), percentile(errors, 0.5), 1e-12);
    EXPECT_NEAR(overall["p90_ape"].get<double>(), percentile(errors, 0.9), 1e-12);
    EXPECT_NEAR(overall["bias"].get<double>(), percentile(signed_errors, 0.5), 1e-12);
    EXPECT_EQ(report["groups"][0][metric], overall);  // the only group
  }
  ASSERT_EQ(report["groups"].size(), 1u);
  EXPECT_EQ(report["groups"][0]["name"], "vllm h200 llama-3.1-8b bf16");
  EXPECT_EQ(report["groups"][0]["n"], 3);
  EXPECT_EQ(report["rows"][0]["measured"]["ttft_ms"], 20);
  EXPECT_EQ(report["rows"][0]["line"], 2);
  EXPECT_EQ(report["rows"][2]["id"], "open");
  EXPECT_EQ(report["rows"][2]["rate"], 10);
  EXPECT_EQ(report["rows"][2]["concurrency"], 0);
  // Eight in flight wait for each other's tokens, and each GPU makes more of them.
  const auto simulated = [&](std::size_t row, const char* key) {
    return report["rows"][row]["simulated"][key].get<double>();
  };
  EXPECT_GT(simulated(1, "tpot_ms"), simulated(0, "tpot_ms"));
  EXPECT_GT(simulated(1, "output_tokens_per_s_per_gpu"), 2 * simulated(0, "output_tokens_per_s_per_gpu"));
  // The worst come first, each by the larger of its two latency errors.
  ASSERT_EQ(report["worst"].size(), 3u);
  double before = HUGE_VAL;
  for (const json& worst : report["worst"]) {
    const json& error = report["rows"][worst["line"].get<std::size_t>() - 2]["error"];
    EXPECT_NEAR(worst["error"].get<double>(),
                std::max(std::abs(error["ttft"].get<double>()), std::abs(error["tpot"].get<double>())),
                1e-12);
    EXPECT_LE(worst["error"].get<double>(), before);
    EXPECT_FALSE(worst["cause"].get<std::string>().empty());
    before = worst["error"];
  }
}

// A row's simulation is the replay of its scenario: 5 requests a seat, as the rules say.
TEST(ValidateServing, ARowIsTheReplayOfItsScenario) {
  const Folder folder;
  const json report = report_of(folder, {{.id = "a", .isl = 300, .osl = 40, .concurrency = "3"}});
  folder.file("scenario.json",
              R"({"model": "llama-3.1-8b", "weights_dtype": "bf16", "router": {"hop_ms": 0.001},
    "pools": [{"role": "colocated", "gpu": "h200"}],
    "workload": {"synthetic": {"isl": 300, "osl": 40, "concurrency": 3, "requests": 15}}})");
  const Folder apart;
  const std::string command = "'" PDSIM_BINARY "' replay '" + (folder / "scenario.json") +
                              "' --json --quiet >'" + (apart / "out") + "'";
  ASSERT_EQ(std::system(command.c_str()), 0);
  const json summary = json::parse(bytes_of(apart / "out"));
  const json& row = report["rows"][0]["simulated"];
  EXPECT_EQ(row["ttft_ms"], summary["latency_ms"]["ttft"]["mean"]);
  EXPECT_EQ(row["tpot_ms"], summary["latency_ms"]["tpot"]["mean"]);
  EXPECT_EQ(row["output_tokens_per_s_per_gpu"], summary["throughput"]["output_tokens_per_s"]);
}

TEST(ValidateServing, RowsThatAreNotSimulatedAreCountedByReason) {
  const Folder folder;
  const std::vector<Row> rows = {{.id = "good"},
                                 {.id = "split", .mode = "disagg"},
                                 {.id = "odd", .suspect = "clock"},
                                 {.id = "split too", .mode = "disagg"},
                                 {.id = "no load", .concurrency = ""},
                                 {.id = "no gpu", .gpu = "h2000"},
                                 {.id = "no number", .concurrency = "two"}};
  const json report = report_of(folder, rows);
  EXPECT_EQ(report["overall"]["n"], 1);
  EXPECT_EQ(report["overall"]["not_simulated"], 6);
  const auto count = [&](const std::string& reason) {
    for (const json& each : report["not_simulated"]) {
      if (each["reason"].get<std::string>().find(reason) != std::string::npos) return each["rows"].get<int>();
    }
    return 0;
  };
  EXPECT_EQ(count("disaggregated"), 2);
  EXPECT_EQ(count("the table calls it suspect: clock"), 1);
  EXPECT_EQ(count("it states neither concurrency nor rate"), 1);
  EXPECT_EQ(count("h2000"), 1);
  EXPECT_EQ(count("points.csv:8: concurrency is 'two': expected a number"), 1);
  ASSERT_EQ(report["rows"].size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& row = report["rows"][i];
    EXPECT_EQ(row["id"], rows[i].id);
    EXPECT_EQ(row["simulated"].is_null(), i > 0) << row["id"];
    EXPECT_EQ(row.contains("not_simulated"), i > 0) << row["id"];
  }
  // People see the same reasons, and the CSV has them in a column.
  const Ran text = run_serving(folder, "points.csv --rules rules.json --quiet");
  EXPECT_NE(text.out.find("not simulated: 6 rows"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("    2  disaggregated"), std::string::npos) << text.out;
}

// What a rule sets, and what --set sets after it, is in the row's scenario.
TEST(ValidateServing, RulesAndSetsMakeTheScenario) {
  const Folder folder;
  const std::vector<Row> rows = {{.id = "a", .concurrency = "4"},
                                 {.id = "b", .engine = "slow", .concurrency = "4"}};
  const json report = report_of(folder, rows);
  const auto ttft = [](const json& of, std::size_t row) {
    return of["rows"][row]["simulated"]["ttft_ms"].get<double>();
  };
  EXPECT_GT(ttft(report, 1), 3 * ttft(report, 0));  // one seat: three of four wait for others' whole answers
  const json set = report_of(folder, rows, "--set pools.0.engine.max_num_seqs=1");
  EXPECT_EQ(ttft(set, 0), ttft(report, 1));
  EXPECT_EQ(ttft(set, 1), ttft(report, 1));
  const json only = report_of(folder, rows, "--only engine=slow --only mode=agg");
  ASSERT_EQ(only["rows"].size(), 1u);
  EXPECT_EQ(only["rows"][0], report["rows"][1]);
}

// Two measurements of one configuration: one simulation, which cannot agree with both.
TEST(ValidateServing, RowsOfOneConfigurationAreOneRun) {
  const Folder folder;
  const json report =
      report_of(folder, {{.id = "a", .ttft = 20}, {.id = "b", .ttft = 60}, {.id = "c", .osl = 33}});
  EXPECT_EQ(report["rows"][0]["simulated"], report["rows"][1]["simulated"]);
  EXPECT_NE(report["rows"][0]["simulated"], report["rows"][2]["simulated"]);
  const auto cause = [&](std::size_t row) { return report["rows"][row]["cause"].get<std::string>(); };
  for (const std::size_t row : {std::size_t{0}, std::size_t{1}}) {
    EXPECT_EQ(cause(row), "measurements of this configuration differ by 200 % themselves");
  }
  EXPECT_EQ(cause(2).find("differ"), std::string::npos) << cause(2);
  // On any number of threads.
  EXPECT_EQ(report_of(folder, {{.id = "a", .ttft = 20}, {.id = "b", .ttft = 60}, {.id = "c", .osl = 33}},
                      "--jobs 1"),
            report);
}

// 7.5 G weights of 2 bytes are read in 3.1 ms at 4.8 TB/s: no step is faster. A row that says so is refused,
// or its TPOT follows from the end-to-end time where the table has that.
TEST(ValidateServing, NoTokenIsFasterThanItsWeightsAreRead) {
  const Folder folder;
  const json report =
      report_of(folder, {{.id = "impossible", .tpot = 3.0},
                         {.id = "derived", .ttft = 20, .tpot = 3.0, .e2e = 20 + 31 * 6.0},
                         {.id = "derived is impossible too", .ttft = 20, .tpot = 3.0, .e2e = 100},
                         {.id = "possible", .tpot = 3.2}});
  const json& rows = report["rows"];
  for (const std::size_t row : {std::size_t{0}, std::size_t{2}}) {
    EXPECT_TRUE(rows[row]["simulated"].is_null());
    EXPECT_EQ(rows[row]["not_simulated"],
              "TPOT of 3.00 ms is below the 3.13 ms that reading the weights takes");
  }
  EXPECT_NEAR(rows[1]["measured"]["tpot_ms"].get<double>(), 6, 1e-9);
  ASSERT_EQ(rows[1]["notes"].size(), 1u);
  EXPECT_NE(rows[1]["notes"][0].get<std::string>().find("6.00 ms follows from the end-to-end time"),
            std::string::npos);
  EXPECT_EQ(rows[3]["measured"]["tpot_ms"], 3.2);
  EXPECT_EQ(rows[3]["notes"].size(), 0u);
}

TEST(ValidateServing, TheCsvHasALineForEachRow) {
  const Folder folder;
  const std::vector<Row> rows = {{.id = "a"}, {.id = "b", .mode = "disagg"}};
  const json report = report_of(folder, rows, "--csv rows.csv");
  const std::string text = bytes_of(folder / "rows.csv");
  std::istringstream lines(text);
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> body;
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> fields;
    std::istringstream cells(line + ",");
    for (std::string cell; std::getline(cells, cell, ',');) fields.push_back(cell);
    if (header.empty()) {
      header = fields;
    } else {
      body.push_back(fields);
    }
  }
  ASSERT_EQ(body.size(), 2u);
  const auto field = [&](std::size_t row, const char* name) {
    EXPECT_EQ(body[row].size(), header.size());
    return body[row]
               [static_cast<std::size_t>(std::find(header.begin(), header.end(), name) - header.begin())];
  };
  EXPECT_EQ(field(0, "id"), "a");
  EXPECT_EQ(field(0, "ttft_ms"), "20");
  EXPECT_NEAR(std::stod(field(0, "simulated_tpot_ms")),
              report["rows"][0]["simulated"]["tpot_ms"].get<double>(), 1e-4);
  EXPECT_NEAR(std::stod(field(0, "tpot_error")), report["rows"][0]["error"]["tpot"].get<double>(), 1e-4);
  EXPECT_EQ(field(0, "not_simulated"), "");
  EXPECT_EQ(field(1, "simulated_ttft_ms"), "");
  EXPECT_EQ(field(1, "not_simulated"), "disaggregated");
  EXPECT_EQ(run_serving(folder, "points.csv --rules rules.json --quiet --csv -").out, text);
}

// The shipped rules are read, and apply to such a row: 10 requests a seat, numpy's draws, a source for each.
TEST(ValidateServing, TheShippedRulesHold) {
  const Folder folder;
  folder.file("points.csv", table({{.id = "a"}}));
  const Ran ran = run_serving(folder, "points.csv --json --quiet");
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(json::parse(ran.out)["overall"]["n"], 1);
}

TEST(ValidateServing, WhatIsWrongIsOneLineAndStatus2) {
  const Folder folder;
  folder.file("points.csv", table({{.id = "a"}}));
  folder.file("none.csv", table({}));
  folder.file("columns.csv", "model,gpu,engine,precision,tp,isl,osl,ttft,tpot_ms\n1,1,1,1,1,1,1,1,1\n");
  folder.file("rules.json", kRules);
  const auto rules = [&](const char* name, const std::string& rule) {
    folder.file(name, R"({"schema": "pdsim.serving-rules/1", "rules": [{"source": "s"}, )" + rule + "]}");
  };
  rules("key.json", R"({"sett": {}, "source": "s"})");
  rules("when.json", R"({"if": {"modell": ["a"]}, "source": "s"})");
  rules("list.json", R"({"if": {"model": "a"}, "source": "s"})");
  rules("text.json", R"({"if": {"model": [7]}, "source": "s"})");
  rules("source.json", R"({"set": {}})");
  folder.file("schema.json", R"({"schema": "pdsim.serving-rules/9", "rules": []})");
  folder.file("cut.json", "{\n  \"schema\": \n");
  const std::size_t files = folder.files();
  const struct {
    std::string arguments, expected;
  } cases[] = {
      {"", "POINTS"},
      {"nosuch.csv", "nosuch.csv: cannot be opened"},
      {"none.csv", "none.csv: has no rows"},
      {"columns.csv", "columns.csv:1: has no column 'ttft_ms'"},
      {"points.csv --only modle=a", "--only: the table has no column 'modle' (did you mean 'mode'?)"},
      {"points.csv --only mode", "--only: 'mode' is no condition: expected column=value"},
      {"points.csv --only mode=disagg", "--only: no row of points.csv has it"},
      {"points.csv --rules nosuch.json", "nosuch.json"},
      {"points.csv --rules cut.json", "cut.json:"},
      {"points.csv --rules schema.json", "schema.json: /schema"},
      {"points.csv --rules key.json", "key.json: /rules/1/sett"},
      {"points.csv --rules key.json", "did you mean 'set'?"},
      {"points.csv --rules when.json", "when.json: /rules/1/if/modell"},
      {"points.csv --rules when.json", "did you mean 'model'?"},
      {"points.csv --rules list.json", "list.json: /rules/1/if/model"},
      {"points.csv --rules text.json", "text.json: /rules/1/if/model"},
      {"points.csv --rules source.json", "source.json: /rules/1/source: is absent"},
      {"points.csv --set pools.0.engine.max_num_seq=3", "did you mean 'max_num_seqs'?"},
      {"points.csv --set nothing", "--set: 'nothing' has no value"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const Ran ran = run_serving(folder, c.arguments + " --quiet --csv rows.csv");
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_NE(ran.err.find(c.expected), std::string::npos) << ran.err;
    EXPECT_EQ(folder.files(), files);
  }
  EXPECT_EQ(run_serving(folder, "points.csv --quiet --csv points.csv/rows.csv").status, 2);
  // A row whose own scenario cannot be is no fault of the table.
  folder.file("precision.csv", table({{.id = "a"}, {.id = "b", .precision = "fp3"}}));
  const json report = json::parse(run_serving(folder, "precision.csv --quiet --json").out);
  EXPECT_EQ(report["overall"]["n"], 1);
  EXPECT_NE(report["rows"][1]["not_simulated"].get<std::string>().find("fp3"), std::string::npos);
}

}  // namespace
}  // namespace pdsim
