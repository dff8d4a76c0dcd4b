// What an operator's own measurements say of the network between nodes: a file that `pdsim calibrate network`
// writes and that a scenario's network.profile reads.
//
// It holds what was told and nothing else: a quantity that no measurement told is absent, with the reason,
// and a simulation keeps what pdsim ships for the fabric. Rates are those of the network cards measured,
// `line` being their line rate, so that both are shares of a line and hold for a whole machine of the same
// cards. Invariants: curves ascend in size and do not fall; no rate is above the line; the latency is above
// 0.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

/// One point of a curve: the rate at which wire operations of this size move.
struct RatePoint {
  Bytes bytes = 0;
  double rate = 0;  ///< bytes/ns
};

/// Time of the CPU to post a transfer: fixed + per_descriptor x descriptors.
struct PostingCost {
  std::string backend;  ///< whose, as transfer.backend names it
  Nanos fixed = 0, per_descriptor = 0;
};

/// A file that was read.
struct MeasuredFile {
  std::string name, sha256;
  std::string contents;  ///< "nixlbench: 24 rows"
};

struct NetworkProfile {
  std::string name, date, source;      ///< the last two may be empty
  std::string fabric;                  ///< "efa-v3": what is measured, and what pdsim ships for the rest
  double line = 0;                     ///< bytes/ns, one way, of the cards measured; 0 = no link was
  std::vector<RatePoint> write, read;  ///< empty = not told
  double operations = 0;               ///< per ns and line, below the smallest size; 0 = not told
  Nanos latency = 0;                   ///< one way, of a small message; 0 = not told
  std::optional<PostingCost> posting;
  std::map<std::string, std::string> evidence;  ///< by the document's key: what tells it, and how well
  std::map<std::string, std::string> not_told;  ///< by the same keys: why it is absent
  std::vector<MeasuredFile> files;
  std::string sha256;  ///< of the profile's own bytes, where it was loaded
};

/// The keys of evidence and not_told, in the document's order.
inline constexpr std::string_view kNetworkQuantities[] = {"write", "read", "operations_per_s", "latency_us",
                                                          "posting"};

/// Reads a profile. InputError at `place` when there is no such file, at the file's line or pointer when it
/// is not one or a figure in it cannot be. O(size).
NetworkProfile load_network_profile(const std::string& path, std::string_view place);

/// As the file holds it (schema pdsim.network-profile/1), a line end after it. Deterministic.
std::string to_json(const NetworkProfile& profile);

/// What the profile says of the network: all of the document but its schema and its files.
nlohmann::ordered_json network_figures(const NetworkProfile& profile);

}  // namespace pdsim
