// `pdsim calibrate network`: a network profile from what operators have measured between their nodes.
#pragma once

#include "tools/pdsim/commands.hpp"

namespace pdsim {

/// Adds `network` to `calibrate`. What it runs reads every file, then writes the profile; InputError, and
/// nothing written, for a file that holds no known measurement, a row that cannot be, figures that need the
/// line rate where neither --instance nor --line gives one, or nothing told at all.
void add_calibrate_network(CLI::App& calibrate, Command& run);

}  // namespace pdsim
