// Another trace that the same users might have sent: sessions drawn anew.
#pragma once

#include <cstdint>

#include "traces/trace.hpp"

namespace pdsim {

/// Draws as many sessions as there are, with replacement: the i-th session of the result begins when the i-th
/// one of `trace` does and has the turns, the lengths and the gaps of one drawn at random. A request without
/// a session is one of its own. Hash ids that several sessions share stay; those of one session alone are
/// renamed in each copy, so that a session drawn twice is two users and not a cache hit. A trace with hash
/// ids but no sessions is resampled by inferred ones (sessions.hpp), which the result's report says, and its
/// requests still belong to no session. The same (trace, seed) gives the same bytes. O(ids + n log n).
Trace resample_sessions(const Trace& trace, std::uint64_t seed);

}  // namespace pdsim
