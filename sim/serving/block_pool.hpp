// One worker's KV blocks: who owns which, which can be reused, which go next. vLLM V1's block pool.
//
// Semantics, block by block (tests hold this pool to a plain per-block reference):
//  - A block is free, or owned by one or more tables (a reference count). A free block may still be
//    *cached*: it keeps its identity until it is handed out again, which is its eviction.
//  - Free blocks form one queue. Blocks are handed out from its head. A table that is released returns
//    its blocks in reverse order (tail first) at the queue's end, so the beginning of a prompt
//    survives longest. A cached block that a new table hits while free leaves the queue.
//  - Identity: a full block is (hash of its run, index within the run). Several blocks may carry the
//    same identity (two requests that computed the same prefix at once); a hit takes the one that was
//    cached first among those still cached.
//  - Initially the queue holds ids 0, 1, 2, ... in order.
//
// For speed the index and the queue work on segments: consecutive indices of one run in one state, up
// to `kMaxRun` real ids moved in bulk. A 12,000-token prompt at 16 tokens a block is 24 hash
// operations, not 750.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pdsim {

using BlockId = std::int32_t;

/// Identity of up to kMaxRun consecutive full blocks: block i of the run is (hash, i). `hash` is
/// chained: it stands for everything before the run as well.
struct HashRun {
  std::uint64_t hash;
  std::int32_t blocks;
};

}  // namespace pdsim
