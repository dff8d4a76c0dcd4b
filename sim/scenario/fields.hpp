// The scenario's table of fields, and what must hold between them.
#pragma once

#include "sim/scenario/reader.hpp"
#include "sim/scenario/scenario.hpp"

namespace pdsim {

/// Visits every field of a scenario: parses it, or describes it when the reader has a schema.
void read_scenario(Reader& r, Scenario& scenario);

/// What no single field can know: pools that no request could use, a workload without requests, ...
/// Throws InputError at the field at fault. Looks nothing up.
void check_scenario(const Document& document, const Scenario& scenario);

}  // namespace pdsim
