#include "traces/resample.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"
#include "traces/sessions.hpp"

namespace pdsim {

namespace {

constexpr std::uint32_t kShared = UINT32_MAX;  // an id's owner, when several sessions have it
constexpr Nanos kLatest = Nanos{1} << 62;

/// The requests of each session in order of arrival, sessions in order of their first; one without a session
/// is one of its own.
std::vector<std::vector<std::uint32_t>> units_of(const Trace& trace) {
  constexpr std::uint32_t kNone = UINT32_MAX;
  std::vector<std::vector<std::uint32_t>> units;
  std::vector<std::uint32_t> unit_of(trace.sessions.size(), kNone);
  for (std::uint32_t r = 0; r < trace.requests.size(); ++r) {
    const std::int32_t session = trace.requests[r].session;
    if (session < 0) {
      units.push_back({r});
      continue;
    }
    std::uint32_t& unit = unit_of[static_cast<std::size_t>(session)];
    if (unit == kNone) {
      unit = static_cast<std::uint32_t>(units.size());
      units.emplace_back();
    }
    units[unit].push_back(r);
  }
  return units;
}

/// Which unit has an id, or kShared. Only looked up, never walked.
std::unordered_map<std::uint64_t, std::uint32_t> owners_of(
    const Trace& trace, const std::vector<std::vector<std::uint32_t>>& units) {
  std::unordered_map<std::uint64_t, std::uint32_t> owners;
  owners.reserve(trace.hash_ids.size());
  for (std::uint32_t unit = 0; unit < units.size(); ++unit) {
    for (const std::uint32_t r : units[unit]) {
      for (const std::uint64_t id : trace.ids_of(trace.requests[r])) {
        const auto [entry, is_new] = owners.try_emplace(id, unit);
        if (!is_new && entry->second != unit) entry->second = kShared;
      }
    }
  }
  return owners;
}

/// Ids that the trace does not have.
class FreshIds {
 public:
  explicit FreshIds(const std::unordered_map<std::uint64_t, std::uint32_t>& taken) : taken_(taken) {}
  std::uint64_t next() {
    while (taken_.contains(next_)) ++next_;
    return next_++;
  }

 private:
  const std::unordered_map<std::uint64_t, std::uint32_t>& taken_;
  std::uint64_t next_ = 0;
};

}  // namespace

Trace resample_sessions(const Trace& trace, std::uint64_t seed) {
  Trace inferred;  // the same with sessions, where they are not recorded
  const bool infer = trace.sessions.empty() && trace.hash_block_tokens > 0;
  std::string how;
  if (infer) {
    inferred = trace;
    how = infer_sessions(inferred).text + "; ";
  }
  const Trace& from = infer ? inferred : trace;
  const std::vector<std::vector<std::uint32_t>> units = units_of(from);
  const auto owners = owners_of(from, units);
  FreshIds fresh(owners);

  Trace result;
  result.name = trace.name;
  result.format = trace.format;
  result.sha256 = trace.sha256;
  result.hash_block_tokens = trace.hash_block_tokens;
  result.report = trace.report;
  result.requests.reserve(trace.requests.size());
  result.hash_ids.reserve(trace.hash_ids.size());
  Random random(seed, Purpose::resampling);
  std::vector<char> drawn(units.size(), 0);
  std::unordered_map<std::uint64_t, std::uint64_t> renamed;  // of one copy; only looked up
  for (const std::vector<std::uint32_t>& place : units) {
    const std::uint64_t choice = random.below(units.size());
    drawn[choice] = 1;
    const std::vector<std::uint32_t>& unit = units[choice];
    const Nanos begin = trace.requests[place.front()].arrival;
    const Nanos began = trace.requests[unit.front()].arrival;
    const bool in_session = trace.requests[unit.front()].session >= 0;
    renamed.clear();
    for (const std::uint32_t r : unit) {
      Request request = trace.requests[r];
      const Nanos since = request.arrival - began;
      if (since > kLatest - begin) {
        throw InputError(trace.name, "a resampled arrival would pass 2^62 ns");
      }
      request.arrival = begin + since;
      if (in_session) request.session = static_cast<std::int32_t>(result.sessions.size());
      request.hash_begin = result.hash_ids.size();
      for (const std::uint64_t id : trace.ids_of(trace.requests[r])) {
        if (owners.at(id) == kShared) {
          result.hash_ids.push_back(id);
          continue;
        }
        const auto [entry, is_new] = renamed.try_emplace(id, 0);
        if (is_new) entry->second = fresh.next();
        result.hash_ids.push_back(entry->second);
      }
      result.requests.push_back(request);
    }
    if (in_session) result.sessions.push_back(fmt::format("resampled-{}", result.sessions.size()));
  }
  std::ranges::stable_sort(result.requests, {}, &Request::arrival);
  if (!result.report.sessions.empty()) result.report.sessions += "; ";
  result.report.sessions += fmt::format(
      "{}{} sessions drawn with replacement from {} (seed {}), {} of them at least once; a request without a "
      "session is one of its own",
      how, units.size(), units.size(), seed, std::ranges::count(drawn, 1));
  return result;
}

}  // namespace pdsim
