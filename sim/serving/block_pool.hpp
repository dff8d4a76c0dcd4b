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
//  - Initially the queue holds ids 0, 1, 2, ... in order, or as fragment() leaves them. (vLLM's own
//    block 0 is a placeholder that no request gets: whoever sizes the pool leaves it out.)
//
// For speed everything works on segments: consecutive indices of one run in one state, up to kSlot
// real ids moved in bulk. A 12,000-token prompt at 16 tokens a block is 24 hash operations, not 750.
// A segment is one node of the free queue, one copy in the index, one piece of a table; it is split
// where a hit, an eviction or a publication takes part of it. Invariants (check() tests them all):
//  1. A segment's ids are in order of index. Its first `cached` blocks have their identity in the
//     index; the others have none, or not yet.
//  2. Every owner of a segment owns all of it, and a segment of two owners or more is all cached.
//  3. The queue's segments are those of no owner. Each is consumed from its last block to its first.
//  4. The copies of a hash are listed in the order in which they were cached: block i of the run is
//     found in the first of them that holds i.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/core/error.hpp"

namespace pdsim {

class Random;

using BlockId = std::int32_t;
using TableId = std::int32_t;  ///< handle of one request's block table; recycled when it is released

/// Identity of consecutive full blocks: block i of the run is (hash, i). `hash` is chained: it stands
/// for everything before the run as well. Any length works; 32 blocks (512 tokens of 16) fill a segment.
struct HashRun {
  std::uint64_t hash;
  std::int32_t blocks;
};

/// The leading blocks of a run that are cached became `blocks` (more when `stored`, else fewer).
/// Replaying the events in order gives min(blocks, run's own) leading cached blocks for every run.
struct CacheEvent {
  std::uint64_t hash;
  std::int32_t blocks;
  bool stored;
};

class BlockPool {
 public:
  /// `blocks` >= 0 free blocks. Without prefix caching no block ever has an identity.
  BlockPool(std::int32_t blocks, bool prefix_caching);

  /// Leaves the queue as a long-running server has it, out of order: each id is displaced with
  /// probability `share` in [0, 1], and the displaced ones trade places at random. 0 changes nothing, 1 is
  /// a random permutation. Two neighbours stay such when neither is displaced, so of n ids about
  /// n (1 - (1 - share)^2) runs of consecutive ones remain; new neighbours by chance are 2 - share on
  /// average, whatever n. Requires that no table was ever opened. O(blocks).
  void fragment(double share, Random& random);

  /// An empty table whose block b has the identity of the run that covers it, runs in order; blocks
  /// beyond them are never cached. The span must outlive the table. O(runs).
  TableId open(std::span<const HashRun> identity);

  /// Leading blocks of `identity` that are cached, at most `max_blocks`. Changes nothing. O(runs).
  std::int32_t cached_prefix(std::span<const HashRun> identity, std::int32_t max_blocks) const;

  /// Of the first `hit_blocks` cached blocks, those that somebody owns now. Requires hit_blocks <=
  /// cached_prefix(). O(segments).
  std::int32_t hits_in_use(std::span<const HashRun> identity, std::int32_t hit_blocks) const;

  /// Gives an empty table its first blocks: `hit_blocks` cached ones (no more than cached_prefix()
  /// says now), then `new_blocks` from the queue. The hits leave the queue before the new ones are
  /// taken. False when the free blocks do not suffice for both and `spare_blocks` more, which are not
  /// taken; nothing has changed then. O(segments).
  bool allocate(TableId table, std::int32_t hit_blocks, std::int32_t new_blocks,
                std::int32_t spare_blocks = 0);

  /// Appends `new_blocks` from the queue. False when fewer are free; nothing has changed then.
  /// O(segments); O(1) for one block.
  bool extend(TableId table, std::int32_t new_blocks);

  /// Blocks [0, full_blocks) are computed and full: those that have an identity become cached.
  /// Idempotent, and a smaller number than before does nothing. Requires full_blocks <= size().
  /// O(segments not published before).
  void publish(TableId table, std::int32_t full_blocks);

  /// Gives up the table's blocks beyond the first `keep_blocks`, the last first, exactly as release()
  /// would, and leaves it open: it may be extended and published again (or allocated, when nothing was
  /// kept), as if it had never had more. Requires 0 <= keep_blocks <= size(). O(segments given up).
  void truncate(TableId table, std::int32_t keep_blocks);

  /// Gives up the table's blocks, the last first, and closes the handle. Blocks that nobody else owns
  /// join the queue's end and stay cached. O(segments).
  void release(TableId table);

  std::int32_t size(TableId table) const { return tables_[at(table)].size; }
  /// Id of block `index` of the table. O(segments before it).
  BlockId id(TableId table, std::int32_t index) const;
  /// Writes the ids of blocks [first, first + count) to `out`. O(segments before + count).
  void ids(TableId table, std::int32_t first, std::int32_t count, BlockId* out) const;

  std::int32_t total_blocks() const { return total_; }
  std::int32_t free_blocks() const { return free_; }      ///< owned by nobody, cached or not
  std::int32_t cached_blocks() const { return cached_; }  ///< with an identity, free or owned
  std::uint64_t evicted_blocks() const { return evicted_; }
  std::size_t open_tables() const { return tables_.size() - closed_tables_.size(); }

  /// Events are kept from now on (or no longer), until the caller clears events(). What happens to one
  /// run in a row, in one direction, is one event.
  void enable_events(bool on) { events_on_ = on; }
  std::vector<CacheEvent>& events() { return events_; }

  /// Forgets every identity (vLLM's reset_prefix_cache). False, and nothing done, while any block is
  /// owned. Not counted as evictions; each run that had leading blocks gives an event. O(segments).
  bool reset_cache();

  /// Ids in the free queue, next to be handed out first. For tests. O(free blocks).
  std::vector<BlockId> free_queue() const;
  /// Throws InternalError unless every invariant holds. For tests. O(blocks).
  void check() const;

 private:
  static constexpr std::int32_t kSlot = 32;  ///< ids that a segment has room for
  static constexpr std::int32_t kNone = -1;  ///< no segment, no run

  struct Segment {
    std::uint64_t hash = 0;      ///< of the run that ids[0] belongs to
    std::int32_t first = 0;      ///< index of ids[0] in that run
    std::int32_t count = 0;      ///< blocks
    std::int32_t cached = 0;     ///< leading blocks that are in the index
    std::int32_t owners = 0;     ///< 0: in the free queue
    std::int32_t prev = kNone;   ///< in the free queue
    std::int32_t next = kNone;   ///< in the free queue, or among the spare segments
    std::int32_t older = kNone;  ///< copy cached before; of the oldest: the newest
    std::int32_t newer = kNone;  ///< copy cached after
    std::int32_t rest = kNone;   ///< last split off its end: follows it in the tables that owned both
    std::array<BlockId, kSlot> ids;
  };

  /// What is cached of one hash: its copies, and how many leading blocks some copy or other holds.
  struct Run {
    std::uint64_t hash = 0;
    std::int32_t oldest = kNone;  ///< kNone: an empty slot of the index
    std::int32_t leading = 0;
  };

  /// Consecutive blocks of a table: `segment` and, if that was split since, the rests that follow it.
  struct Piece {
    std::int32_t segment;
    std::int32_t blocks;
  };

  struct Table {
    std::span<const HashRun> identity;
    std::vector<Piece> pieces;
    std::int32_t identified = 0;  ///< blocks that `identity` covers
    std::int32_t size = 0;
    std::int32_t run = 0;    ///< of the next block to be appended; identity.size() beyond the last
    std::int32_t index = 0;  ///< of that block in its run
    std::int32_t published = 0;
    std::int32_t cursor = 0;        ///< the piece of block `published`, or one before it
    std::int32_t cursor_begin = 0;  ///< blocks before that piece
    bool open = false;
  };

  std::size_t at(TableId table) const {
    const auto t = static_cast<std::size_t>(table);
    PDSIM_CHECK(t < tables_.size() && tables_[t].open, "no such block table");
    return t;
  }
  Segment& segment(std::int32_t s) { return segments_[static_cast<std::size_t>(s)]; }
  const Segment& segment(std::int32_t s) const { return segments_[static_cast<std::size_t>(s)]; }

  // Segments, and the queue of the free ones.
  std::int32_t new_segment(std::uint64_t hash, std::int32_t first, std::int32_t owners);
  std::int32_t split(std::int32_t s, std::int32_t count);
  void enqueue(std::int32_t s, std::int32_t position);
  void dequeue(std::int32_t s);
  void hand_out(std::int32_t blocks, BlockId* out);

  // Tables.
  static void advance(Table& table, std::int32_t blocks);
  void append(Table& table, std::int32_t blocks);
  void give_up(const Table& table, std::size_t keep);
  template <class Visit>
  void for_each_segment(const Piece& piece, Visit visit) const;
  template <class Visit>
  void for_each_hit(std::span<const HashRun> identity, std::int32_t blocks, Visit visit) const;

  // The index: open addressing, linear probing, at most half full; an erased run leaves no tombstone.
  std::size_t home(std::uint64_t hash) const { return hash * 0x9E3779B97F4A7C15u >> index_shift_; }
  std::size_t slot_of(std::uint64_t hash) const;
  void grow_index();
  void erase(std::size_t slot);
  std::int32_t covered(const Run& run, std::int32_t from) const;
  void set_leading(Run& run, std::int32_t leading);
  void insert_copy(Run& run, std::int32_t s, std::int32_t older);
  void cache(std::int32_t s, std::int32_t count);
  void evict_beyond(std::int32_t s, std::int32_t count);

  std::vector<Segment> segments_;
  std::vector<Table> tables_;
  std::vector<TableId> closed_tables_;
  std::vector<Run> index_;
  int index_shift_;
  std::int32_t runs_ = 0;
  std::int32_t spare_ = kNone;  ///< first of the segments that hold nothing
  std::int32_t head_ = kNone;   ///< of the free queue: next to be handed out
  std::int32_t tail_ = kNone;
  std::int32_t total_;
  std::int32_t free_;
  std::int32_t cached_ = 0;
  std::uint64_t evicted_ = 0;
  bool prefix_caching_;
  bool events_on_ = false;
  std::vector<CacheEvent> events_;
  std::vector<std::int32_t> scratch_;
};

/// Maximal runs of [first, first + count) of two tables whose ids increase by one on both sides at
/// once: the descriptors of one region of a transfer (NIXL merges no more than that). O(count).
std::int32_t common_runs(const BlockPool& a, TableId table_a, std::int32_t first_a, const BlockPool& b,
                         TableId table_b, std::int32_t first_b, std::int32_t count,
                         std::vector<BlockId>& scratch);

}  // namespace pdsim
