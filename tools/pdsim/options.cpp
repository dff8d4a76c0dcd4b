#include "tools/pdsim/options.hpp"

#include <CLI/CLI.hpp>

#include "tools/pdsim/serving.hpp"

namespace pdsim {

CLI::Option* add_repeatable(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                            const std::string& text) {
  return app.add_option(name, values, text + " (repeatable)")
      ->take_all()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void add_set_option(CLI::App& app, std::vector<std::string>& sets) {
  add_repeatable(app, "--set", sets,
                 "Override a value: PATH=VALUE, a dotted path into the scenario, pools by name or index")
      ->type_name("PATH=VALUE");
}

void add_replay_options(CLI::App& app, ReplayOptions& options) {
  app.add_option("--trace", options.trace, "Trace to replay instead of the scenario's; - is stdin");
  app.add_option("--format", options.format, "Its format: mooncake, azure, vllm-bench, aiperf");
  add_set_option(app, options.sets);
  app.add_option("--seed", options.seed, "Seed of all random streams, instead of the scenario's");
  app.add_option("--prices", options.prices, "JSON file of your prices: {\"INSTANCE\": USD per hour, ...}");
  app.add_flag("--infer-sessions", options.infer_sessions,
               "Find the sessions of a trace that has none: prompts that extend earlier ones");
  app.add_flag("--quiet", options.quiet, "No progress and no notes on stderr");
}

void add_serving_options(CLI::App& app, ServingOptions& options) {
  add_repeatable(app, "--only", options.only, "Only rows of the table with this field, column=value");
  app.add_option("--rules", options.rules,
                 "What rows do not state, as JSON (default: scenarios/serving/rules.json)");
  app.add_option("--jobs", options.jobs, "Runs at a time; 0 = one for each core")->capture_default_str();
}

}  // namespace pdsim
