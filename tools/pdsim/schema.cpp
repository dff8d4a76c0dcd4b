// `pdsim schema NAME`: the JSON Schema of a document that pdsim reads or writes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/data.hpp"
#include "sim/core/error.hpp"
#include "sim/scenario/load.hpp"
#include "tools/pdsim/commands.hpp"
#include "traces/stats.hpp"

namespace pdsim {
namespace {

std::string shipped(const char* file) {
  const std::string path = (data_dir() / "scenarios" / file).string();
  std::ifstream in(path, std::ios::binary);
  if (!in) throw InputError(path, "cannot be read, expected a schema that pdsim ships");
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Schema {
  std::string_view name;
  std::string_view id;
  std::string_view sentence;
  std::string (*text)();
};

constexpr Schema kSchemas[] = {
    {"scenario", "pdsim.scenario/1", "a cluster and its requests: what replay and describe read",
     scenario_schema},
    {"summary", "pdsim.summary/1", "what a replay found: summary.json, replay --json",
     [] { return shipped("summary.schema.json"); }},
    {"comparison", "pdsim.comparison/1", "several deployments side by side: compare --json",
     [] { return shipped("comparison.schema.json"); }},
    {"run", "pdsim.run/1", "what a replay took: run.json", [] { return shipped("run.schema.json"); }},
    {"describe", "pdsim.describe/1", "what follows from a scenario: describe --json",
     [] { return shipped("describe.schema.json"); }},
    {"cost", "pdsim.cost/1", "what one operation costs: cost --json",
     [] { return shipped("cost.schema.json"); }},
    {"kernel-report", "pdsim.kernel-report/1", "measured kernels beside a profile: validate kernels --json",
     [] { return shipped("kernel-report.schema.json"); }},
    {"published", "pdsim.published/1", "a published result and its replay: what validate published reads",
     [] { return shipped("published.schema.json"); }},
    {"published-report", "pdsim.published-report/1", "published beside simulated: validate published --json",
     [] { return shipped("published-report.schema.json"); }},
    {"validate-run", "pdsim.validate-run/1",
     "a benchmark of one's own beside its simulation: validate run --json",
     [] { return shipped("validate-run.schema.json"); }},
    {"validate-serving", "pdsim.validate-serving/1",
     "measured serving points beside simulated ones: validate serving --json",
     [] { return shipped("validate-serving.schema.json"); }},
    {"evidence", "pdsim.evidence/1", "errors by what a run rests on: models/evidence.json, validate evidence",
     [] { return shipped("evidence.schema.json"); }},
    {"overheads", "pdsim.overheads/1",
     "what serving takes beside kernels: engine.overheads, fit --from-bench",
     [] { return shipped("overheads.schema.json"); }},
    {"profile", "pdsim.profile/1", "what kernels take on a GPU: gpu_profile, fit, calibrate",
     [] { return shipped("profile.schema.json"); }},
    {"device", "pdsim.device/1", "which GPU tables were measured on: calibrate, fit --device",
     [] { return shipped("device.schema.json"); }},
    {"serving-rules", "pdsim.serving-rules/1", "what rows of serving benchmarks do not state: --rules",
     [] { return shipped("serving-rules.schema.json"); }},
    {"network-profile", "pdsim.network-profile/1",
     "what was measured of a network: network.profile, calibrate network",
     [] { return shipped("network-profile.schema.json"); }},
    {"fit-bench", "pdsim.fit-bench/1", "overheads fitted to a benchmark: fit --from-bench --json",
     [] { return shipped("fit-bench.schema.json"); }},
    {"sweep-report", "pdsim.sweep-report/1", "what a sweep found: sweep --json, merge --json",
     [] { return shipped("sweep-report.schema.json"); }},
    {"sweep", "pdsim.sweep/1", "a parameter space over a scenario: what sweep reads",
     [] { return shipped("sweep.schema.json"); }},
    {"thresholds", "pdsim.thresholds/1", "when to read KV back and how long to keep it: thresholds --json",
     [] { return shipped("thresholds.schema.json"); }},
    {"plan", "pdsim.plan/1", "a trace, an objective and a menu of instances: what plan reads",
     [] { return shipped("plan.schema.json"); }},
    {"plan-report", "pdsim.plan-report/1", "the cheapest deployment for a plan: plan --json",
     [] { return shipped("plan-report.schema.json"); }},
    {"trace-stats", "pdsim.trace-stats/1", "what is in a trace: trace stats --json", stats_schema},
};

std::string list_of_schemas() {
  std::string list;
  for (const Schema& schema : kSchemas) {
    list += fmt::format("  {:<17} {:<25} {}\n", schema.name, schema.id, schema.sentence);
  }
  return list;
}

std::string schema_of(const std::string& name) {
  std::vector<std::string_view> names;
  for (const Schema& schema : kSchemas) {
    if (name == schema.name || name == schema.id) return schema.text();
    names.push_back(schema.name);
  }
  throw InputError("schema", fmt::format("there is no '{}', expected one of {}{}", name,
                                         fmt::join(names, ", "), did_you_mean(name, names)));
}

}  // namespace

void add_schema(CLI::App& app, Command& run) {
  CLI::App* schema = app.add_subcommand("schema", "Print the JSON Schema of a document, or the list of them");
  schema->footer("Schemas:\n" + list_of_schemas() +
                 "\nExample:\n  pdsim schema scenario > scenario.schema.json");
  auto name = std::make_shared<std::string>();
  schema->add_option("NAME", *name, "A schema's name, or the id that documents carry; none lists them");
  schema->callback([name, &run] {
    run = [name] {
      const std::string text = name->empty() ? list_of_schemas() : schema_of(*name);
      std::fwrite(text.data(), 1, text.size(), stdout);
      return kDone;
    };
  });
}

}  // namespace pdsim
