// What a router believes each worker's prefix cache holds, from the events that workers publish.
//
// An entry (run, worker) says how many leading blocks of that run the worker has cached. The view lags
// behind the truth by the step that made the change and the delay of the event; a hit that it predicts
// may be gone by the time the request arrives.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sim/serving/block_pool.hpp"

namespace pdsim {

class CacheView {
 public:
  explicit CacheView(std::uint32_t workers) : workers_(workers) {}

  /// Applies one event of one worker. O(1).
  void apply(std::uint32_t worker, const CacheEvent& event);

  /// Leading blocks of `identity` that each worker seems to hold, at most `max_blocks`, into `blocks`
  /// (by worker). O(runs of the longest match x workers).
  void match(std::span<const HashRun> identity, std::int32_t max_blocks,
             std::vector<std::int32_t>& blocks) const;

 private:
  std::uint32_t workers_;
  // Looked up by key only, never iterated: its order reaches no result.
  std::unordered_map<std::uint64_t, std::uint32_t> row_of_;
  std::vector<std::uint32_t> free_rows_;
  std::vector<std::int32_t> blocks_;    ///< row x workers
  std::vector<std::uint32_t> holders_;  ///< by row: workers with any
};

}  // namespace pdsim
