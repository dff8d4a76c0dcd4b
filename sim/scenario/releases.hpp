// Since which vLLM release the knobs, and combinations of knobs, that a scenario uses exist.
//
// One table in releases.cpp: what is asked for, since when, where that is known from, and when a scenario
// asks for it. A new knob is a row there and a test.
#pragma once

#include <string_view>
#include <vector>

#include "sim/scenario/scenario.hpp"

namespace pdsim {

// What Release::since says beside a release's number.
inline constexpr std::string_view kUnreleased = "unreleased";  ///< in an open pull request
inline constexpr std::string_view kNoEngine = "no engine";     ///< pdsim's own, to ask what it would do
inline constexpr std::string_view kTheRouter = "the router";   ///< no engine's business

struct Release {
  std::string_view feature;  ///< keys as --set takes them
  std::string_view since;    ///< "0.24", "0.23 or 0.24" where it is inferred from a date, or one of the above
  std::string_view source;
};

/// What `scenario` uses, in the table's order; nothing of transfers where nothing is handed over.
/// O(table x (pools + pairs)).
std::vector<Release> releases_of(const Scenario& scenario);

/// Whether it combines what no engine does together: with transfer.hypothetical only.
bool is_hypothetical(const Scenario& scenario);

}  // namespace pdsim
