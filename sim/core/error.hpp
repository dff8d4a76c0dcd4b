// How pdsim says that something is wrong. Two kinds, never mixed:
//
// InputError   what the user gave is at fault: exit status 2, one line, nothing written.
// broken()     an invariant of pdsim's own does not hold: a bug, exit status 1. A run stops there,
//              because a number computed past a broken invariant is a plausible wrong one.
//
// An expected outcome (no room in the pool, no route) is a return value, never one of these.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pdsim {

/// Bad input: where it stands, what is there, what was expected, what might have been meant.
class InputError : public std::runtime_error {
 public:
  /// `place` is "file", "file:line" or "file: /json/pointer"; `problem` names the value and the
  /// expectation. The message is "place: problem".
  InputError(std::string_view place, std::string_view problem);
};

/// A broken invariant of the simulator itself.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Stops with the reason, the file and the line of the check.
[[noreturn]] void broken(const char* file, int line, std::string_view reason);

/// The candidate closest to `word` in edit distance, for "did you mean": empty when none is within
/// a third of its length. O(candidates x length^2).
std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates);

/// " (did you mean 'x'?)", or "" when nothing is near.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> candidates);

}  // namespace pdsim

/// Checks an invariant in every build: use where the check is O(1).
#define PDSIM_CHECK(condition, reason)             \
  do {                                             \
    if (!(condition)) [[unlikely]]                 \
      ::pdsim::broken(__FILE__, __LINE__, reason); \
  } while (false)
