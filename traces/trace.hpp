// The one request type that every reader produces and every consumer takes.
//
// A trace is two flat arrays: the requests, in order of arrival, and the hash ids of all their
// prompts back to back. Nothing is inferred here: a field that the format lacks has its "absent" value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sim/core/time.hpp"

namespace pdsim {

struct Request {
  Nanos arrival = 0;               ///< since the trace's own zero, >= 0
  Nanos think_time = -1;           ///< pause before this turn, after its predecessor's end; -1 = not recorded
  std::uint64_t hash_begin = 0;    ///< first of its ids in Trace::hash_ids
  std::int32_t hash_count = 0;     ///< 0 when the format carries no prefix identity
  std::int32_t prompt_tokens = 0;  ///< >= 1
  std::int32_t output_tokens = 0;  ///< >= 0; 0 means that nothing is generated after the prefill
  std::int32_t session = -1;       ///< index into Trace::sessions; -1 = belongs to none
  std::int32_t turn = 0;           ///< position within its session, from 0
};

/// What loading did, for the user to see: rows are never dropped in silence.
struct LoadReport {
  std::uint64_t rows_read = 0;
  std::uint64_t rows_used = 0;
  std::uint64_t rows_out_of_order = 0;  ///< rows earlier than one before them; they are sorted stably
  std::vector<std::string> set_aside;   ///< "N rows: reason", for rows that are not used
  std::string arrivals;                 ///< how they were made, where the file has none; empty = it has
  std::string sessions;                 ///< what was inferred or derived of its sessions; empty = nothing
};

struct Trace {
  std::string name;                    ///< as the user gave it
  std::string format;                  ///< "mooncake", "azure", "synthetic", ...
  std::string sha256;                  ///< of the bytes as stored (compressed ones when compressed)
  std::int32_t hash_block_tokens = 0;  ///< tokens that one hash id covers; 0 = no prefix identity
  std::vector<Request> requests;       ///< by (arrival, row)
  std::vector<std::uint64_t> hash_ids;
  std::vector<std::string> sessions;
  LoadReport report;

  std::span<const std::uint64_t> ids_of(const Request& request) const {
    return {hash_ids.data() + request.hash_begin, static_cast<std::size_t>(request.hash_count)};
  }
};

}  // namespace pdsim
