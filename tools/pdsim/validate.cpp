// `pdsim validate`: what pdsim predicts beside what others have measured. Each kind is a file of its own.
#include <CLI/CLI.hpp>

#include "tools/pdsim/commands.hpp"

namespace pdsim {

void add_validate(CLI::App& app, Command& run) {
  CLI::App* validate = app.add_subcommand("validate", "Predicted against measured, row by row");
  validate->require_subcommand(1);
  validate->footer(
      "Examples:\n"
      "  pdsim validate run scenarios/p5en-colocated-qwen3-32b.json --bench result.json\n"
      "  pdsim validate published scenarios/published");
  add_validate_kernels(*validate, run);
  add_validate_run(*validate, run);
  add_validate_published(*validate, run);
  add_validate_serving(*validate, run);
  add_validate_evidence(*validate, run);
}

}  // namespace pdsim
