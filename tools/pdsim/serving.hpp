// Measured serving points beside simulated ones: a row of a benchmark table becomes a scenario.
//
// A row states model, GPU, engine, precision, parallelism, lengths and the client's load; it does not
// state the server's flags or how the client draws lengths. Those come from the rules (a JSON file,
// scenarios/serving/rules.json unless another is given): every rule whose conditions hold sets values of
// the scenario, later ones over earlier ones, each with its source. Nothing else tells rows apart: there
// is no factor for a model or a row.
//
// Invariant: every row of the table is in the report, simulated or with the reason why not.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace pdsim {

/// Mean TTFT and TPOT in ms, output tokens per second of a GPU. 0 = not stated.
struct ServingMeans {
  double ttft_ms = 0, tpot_ms = 0, throughput = 0;
};

struct ServingPoint {
  std::size_t line = 0;  ///< in the table, from 1
  std::string dataset, id, model, gpu, engine, version, precision, mode, layout, suspect;
  std::string measured_on;  ///< "2026-04-03..."; empty = not stated
  std::int32_t tensor = 0, pipeline = 1, data = 1, expert = 1, gpus = 0;  ///< as the table says
  double isl = 0, osl = 0, concurrency = 0, rate = 0;
  double e2e_ms = 0;
  ServingMeans measured;
  bool littles_law = false;  ///< the throughput was derived from the latencies
  bool e2e_tpot = false;     ///< TPOT was derived from the end-to-end time: see check_physics in serving.cpp

  std::string scenario;              ///< JSON; empty = not simulated
  std::string refusal;               ///< why not
  std::vector<std::string> notes;    ///< how the row was read where it had to be interpreted
  std::vector<std::string> sources;  ///< of the rules that applied
  std::optional<ServingMeans> simulated;
  double extrapolated = 0;  ///< share of steps outside what was measured
  double waiting = 0;       ///< share of mean TTFT spent in the queue
  std::int64_t preemptions = 0;
  bool datasheet = false;  ///< the GPU's kernels were not measured
  std::string cause;       ///< what the row's error is likely due to
};

struct ServingOptions {
  std::string rules;              ///< a file; empty = the shipped one
  std::vector<std::string> only;  ///< "column=value"
  std::vector<std::string> sets;  ///< as --set, after the rules
  unsigned jobs = 0;              ///< runs at a time; 0 = one for each core
  std::function<bool()> interrupted;
  std::function<void(std::uint64_t, std::uint64_t)> progress;
};

/// Reads the table and makes each row's scenario, but runs none: of the options only `rules` and `only`
/// matter. InputError: a table or rules that cannot be read (with line or pointer), or an --only that names
/// no column.
std::vector<ServingPoint> read_serving_points(const std::string& table, const ServingOptions& options);

/// Does that and runs each different scenario once. After an interrupt the rows that have not run are refused
/// as "interrupted". Errors as above. Cost: mostly 10 to 500 ms a scenario.
std::vector<ServingPoint> serve_points(const std::string& table, const ServingOptions& options);

/// The report of `validate serving --json`, a table of it for people, and one CSV row a point.
nlohmann::ordered_json serving_json(const std::vector<ServingPoint>& points, bool interrupted);
std::string serving_table(const std::vector<ServingPoint>& points);
std::string serving_csv(const std::vector<ServingPoint>& points);

}  // namespace pdsim
