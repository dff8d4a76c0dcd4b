// From what operators measured (network_measurements.hpp) to a network profile.
//
// An iteration of nixlbench that posts n operations of s bytes takes, as a transfer does in a simulation,
//
//   t = fixed + max(n x per_descriptor, n s / rate(s)) + round trip
//
// so rate(s) follows where the second term is the larger: fixed from the posting times, the round trip from
// iterations of one operation. Rows that posting or the round trip bound say only that the link is no slower;
// they are set aside and counted. Of the rest, at each size, the rows with the most in flight make a point,
// and the points become the nearest curve that does not fall (least squares).
#pragma once

#include <functional>
#include <string>

#include "models/network_measurements.hpp"
#include "models/network_profile.hpp"

namespace pdsim {

struct NetworkFitOptions {
  double line = 0;  ///< bytes/ns of one GPU's cards; required where a link was measured
  std::function<Bytes(Bytes)> wire_bytes;  ///< the size on the wire of an operation posted with so many bytes
  Nanos shipped_latency = 0;               ///< one way: taken off where no file tells a round trip
  PostingCost shipped_posting;             ///< its backend is the one fitted
};

/// Fills the profile's curves, operations, latency and posting, with evidence or the reason of absence for
/// each of kNetworkQuantities, and adds to `measurements.set_aside`. Name, fabric and files are the caller's.
/// InputError when nothing is told. Deterministic. O(rows log rows).
NetworkProfile fit_network(NetworkMeasurements& measurements, const NetworkFitOptions& options);

}  // namespace pdsim
