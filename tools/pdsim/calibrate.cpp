// pdsim calibrate: what pdsim's cost models rest on, measured on one's own machines.
#include <CLI/CLI.hpp>
#include <memory>

#include "tools/pdsim/calibrate_gpu.hpp"
#include "tools/pdsim/calibrate_network.hpp"
#include "tools/pdsim/commands.hpp"

namespace pdsim {

void add_calibrate(CLI::App& app, Command& run) {
  const auto options = std::make_shared<CalibrateOptions>();
  CLI::App* calibrate = app.add_subcommand(
      "calibrate",
      "Measure this machine's GPU and fit a profile to it; or fit a network profile to what tools print");
  calibrate->require_subcommand(0, 1);
  add_calibrate_gpu_options(*calibrate, *options);
  calibrate->footer(
      "Each kernel is compared with float64 before it is timed; one that is wrong is not timed, and the "
      "status is 1.\n"
      "The kernels are pdsim's own and cuBLAS's, not an engine's: the profile says so of each operation.\n\n"
      "Example:\n"
      "  pdsim calibrate --quick --out my-gpu\n"
      "  pdsim replay scenario.json --set gpu_profile=my-gpu/profile.json\n"
      "  pdsim calibrate network nixlbench.txt --instance p5en.48xlarge --out mine.json");
  add_calibrate_network(*calibrate, run);
  calibrate->callback([calibrate, options, &run] {  // after that of a subcommand
    if (calibrate->get_subcommands().empty()) run = [options] { return calibrate_gpu(*options); };
  });
}

}  // namespace pdsim
