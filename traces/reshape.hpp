// The same requests at another pace.
#pragma once

#include "traces/trace.hpp"

namespace pdsim {

/// From the first arrival to the last.
Nanos span_of(const Trace& trace);

/// Mean arrivals per second: (n - 1) / span, the inverse of the mean gap. 0 when the span is 0.
double rate_of(const Trace& trace);

/// Makes everything happen `factor` times as fast: arrivals and think times are divided by it and rounded
/// to the nearest nanosecond (order is kept). Requires a finite factor > 0; InputError when a time
/// would pass 2^62 ns. O(n).
void scale_time(Trace& trace, double factor);

/// Makes prompts `factor` times as long, rounded, one token at least; answers stay. Hash ids follow: prompts
/// that had their first m blocks in common, whole in both, and no others, now have the first floor(m factor)
/// in common and no others; and equal prompts stay equal. Requires a
/// finite factor > 0; InputError when a prompt would pass 2^31 - 1 tokens. O(ids of the result).
void scale_prompts(Trace& trace, double factor);

}  // namespace pdsim
