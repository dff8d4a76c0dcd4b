#include "sim/serving/block_pool.hpp"

#include <algorithm>
#include <climits>

#include "sim/core/random.hpp"

namespace pdsim {

BlockPool::BlockPool(std::int32_t blocks, bool prefix_caching)
    : index_(16), index_shift_(64 - 4), total_(blocks), free_(blocks), prefix_caching_(prefix_caching) {
  PDSIM_CHECK(blocks >= 0, "a block pool of negative size");
  segments_.reserve(static_cast<std::size_t>(blocks / kSlot) * 5 / 4 + 64);
  for (BlockId id = 0; id < blocks;) {
    const std::int32_t s = new_segment(0, 0, 0);
    Segment& fresh = segment(s);
    fresh.count = std::min(kSlot, blocks - id);
    for (std::int32_t i = fresh.count; i > 0;) fresh.ids[static_cast<std::size_t>(--i)] = id++;
    enqueue(s, kNone);
  }
}

void BlockPool::fragment(double share, Random& random) {
  PDSIM_CHECK(tables_.empty(), "fragment() on a pool that was used");
  PDSIM_CHECK(share >= 0 && share <= 1, "a share that is not in [0, 1]");
  std::vector<BlockId*> displaced;
  for (std::int32_t s = head_; s != kNone; s = segment(s).next) {
    Segment& free = segment(s);
    for (std::int32_t i = free.count; i-- > 0;) {
      if (random.uniform() < share) displaced.push_back(&free.ids[static_cast<std::size_t>(i)]);
    }
  }
  for (std::size_t n = displaced.size(); n > 1; --n) {  // Fisher-Yates
    std::swap(*displaced[n - 1], *displaced[random.below(n)]);
  }
}

// ---- segments and the queue of the free ones ----------------------------------------------------

/// An empty segment. References to other segments do not survive it.
std::int32_t BlockPool::new_segment(std::uint64_t hash, std::int32_t first, std::int32_t owners) {
  std::int32_t s = spare_;
  if (s == kNone) {
    s = static_cast<std::int32_t>(segments_.size());
    segments_.emplace_back();
  } else {
    spare_ = segment(s).next;
  }
  Segment& fresh = segment(s);
  fresh.hash = hash;
  fresh.first = first;
  fresh.count = fresh.cached = 0;
  fresh.owners = owners;
  return s;
}

/// Cuts s after `count` of its blocks, 0 < count < all of them. Returns the segment of the others:
/// s's equal in every respect, before it in the queue (tails go first), next to it among the copies,
/// and s's rest for the owners of both.
std::int32_t BlockPool::split(std::int32_t s, std::int32_t count) {
  const std::int32_t r = new_segment(segment(s).hash, segment(s).first + count, segment(s).owners);
  Segment& kept = segment(s);
  Segment& rest = segment(r);
  rest.count = kept.count - count;
  std::copy_n(kept.ids.begin() + count, rest.count, rest.ids.begin());
  rest.rest = kept.rest;
  kept.rest = r;
  kept.count = count;
  if (kept.owners == 0) enqueue(r, s);
  if (kept.cached > count) {
    rest.cached = kept.cached - count;
    kept.cached = count;
    insert_copy(index_[slot_of(kept.hash)], r, s);
  }
  return r;
}

/// Puts s into the queue before `position`; kNone is the end.
void BlockPool::enqueue(std::int32_t s, std::int32_t position) {
  std::int32_t& before = position == kNone ? tail_ : segment(position).prev;
  segment(s).prev = before;
  segment(s).next = position;
  (before == kNone ? head_ : segment(before).next) = s;
  before = s;
}

void BlockPool::dequeue(std::int32_t s) {
  const Segment& gone = segment(s);
  (gone.prev == kNone ? head_ : segment(gone.prev).next) = gone.next;
  (gone.next == kNone ? tail_ : segment(gone.next).prev) = gone.prev;
}

/// The first `blocks` ids of the queue, which evicts those that are cached.
void BlockPool::hand_out(std::int32_t blocks, BlockId* out) {
  free_ -= blocks;
  while (blocks > 0) {
    const std::int32_t s = head_;
    Segment& victim = segment(s);
    const std::int32_t kept = std::max(victim.count - blocks, 0);
    out = std::reverse_copy(victim.ids.begin() + kept, victim.ids.begin() + victim.count, out);
    blocks -= victim.count - kept;
    victim.count = kept;
    if (victim.cached > kept) evict_beyond(s, kept);
    if (kept == 0) {
      dequeue(s);
      victim.next = spare_;
      spare_ = s;
    }
  }
}

// ---- tables -------------------------------------------------------------------------------------

TableId BlockPool::open(std::span<const HashRun> identity) {
  if (closed_tables_.empty()) {
    closed_tables_.push_back(static_cast<TableId>(tables_.size()));
    tables_.emplace_back();
  }
  const TableId id = closed_tables_.back();
  closed_tables_.pop_back();
  Table& table = tables_[static_cast<std::size_t>(id)];
  std::vector<Piece> pieces = std::move(table.pieces);  // its capacity is worth keeping
  pieces.clear();
  table = Table{};
  table.pieces = std::move(pieces);
  table.open = true;
  if (prefix_caching_) table.identity = identity;
  for (const HashRun& run : table.identity) table.identified += run.blocks;
  advance(table, 0);
  return id;
}

/// Moves the place where the next block goes.
void BlockPool::advance(Table& table, std::int32_t blocks) {
  table.size += blocks;
  table.index += blocks;
  for (; table.run < std::ssize(table.identity); ++table.run) {
    const std::int32_t length = table.identity[static_cast<std::size_t>(table.run)].blocks;
    if (table.index < length) return;
    table.index -= length;
  }
}

/// visit(segment) for those of the piece, in order.
template <class Visit>
void BlockPool::for_each_segment(const Piece& piece, Visit visit) const {
  std::int32_t s = piece.segment;
  for (std::int32_t blocks = piece.blocks; blocks > 0; s = segment(s).rest) {
    blocks -= segment(s).count;
    visit(s);
  }
}

/// visit(segment, from, to) for the cached copies that hold the first `blocks` of the identity, in
/// order; from and to are indices in the run. `visit` may split what it is given.
template <class Visit>
void BlockPool::for_each_hit(std::span<const HashRun> identity, std::int32_t blocks, Visit visit) const {
  for (std::size_t r = 0; blocks > 0; ++r) {
    PDSIM_CHECK(r < identity.size(), "more hit blocks than the identity has");
    const std::int32_t end = std::min(identity[r].blocks, blocks);
    const std::int32_t oldest = index_[slot_of(identity[r].hash)].oldest;
    for (std::int32_t i = 0; i < end;) {
      std::int32_t to = end;  // an older copy that does not hold i may hold what comes after it
      std::int32_t s = oldest;
      for (; s != kNone; s = segment(s).newer) {
        const Segment& copy = segment(s);
        if (copy.first > i) {
          to = std::min(to, copy.first);
        } else if (copy.first + copy.cached > i) {
          to = std::min(to, copy.first + copy.cached);
          break;
        }
      }
      PDSIM_CHECK(s != kNone, "a hit block is not cached");
      visit(s, i, to);
      i = to;
    }
    blocks -= end;
  }
}

bool BlockPool::allocate(TableId id, std::int32_t hit_blocks, std::int32_t new_blocks,
                         std::int32_t spare_blocks) {
  Table& table = tables_[at(id)];
  PDSIM_CHECK(table.size == 0, "allocate() on a table that has blocks");
  PDSIM_CHECK(hit_blocks >= 0 && new_blocks >= 0 && spare_blocks >= 0, "a negative number of blocks");
  if (new_blocks + spare_blocks > free_ - hit_blocks) {  // otherwise there is room even if every hit is free
    std::int32_t needed = new_blocks + spare_blocks;
    for_each_hit(table.identity, hit_blocks, [&](std::int32_t s, std::int32_t from, std::int32_t to) {
      if (segment(s).owners == 0) needed += to - from;
    });
    if (needed > free_) return false;
  }
  for_each_hit(table.identity, hit_blocks, [&](std::int32_t s, std::int32_t from, std::int32_t to) {
    if (from > segment(s).first) s = split(s, from - segment(s).first);
    if (to - from < segment(s).count) split(s, to - from);
    if (segment(s).owners++ == 0) {
      dequeue(s);
      free_ -= to - from;
    }
    table.pieces.push_back({s, to - from});
  });
  advance(table, hit_blocks);
  table.published = hit_blocks;
  append(table, new_blocks);
  return true;
}

std::int32_t BlockPool::hits_in_use(std::span<const HashRun> identity, std::int32_t hit_blocks) const {
  std::int32_t used = 0;
  for_each_hit(identity, hit_blocks, [&](std::int32_t s, std::int32_t from, std::int32_t to) {
    if (segment(s).owners > 0) used += to - from;
  });
  return used;
}

bool BlockPool::extend(TableId id, std::int32_t new_blocks) {
  Table& table = tables_[at(id)];
  PDSIM_CHECK(new_blocks >= 0, "a negative number of blocks");
  if (new_blocks > free_) return false;
  append(table, new_blocks);
  return true;
}

/// Hands `blocks` blocks of the queue to the table. They fill its last segment, as far as that is its
/// alone and of the same run, then new ones; beyond the identity any segment will do.
void BlockPool::append(Table& table, std::int32_t blocks) {
  while (blocks > 0) {
    const bool identified = table.run < std::ssize(table.identity);
    const HashRun run =
        identified ? table.identity[static_cast<std::size_t>(table.run)] : HashRun{0, INT_MAX};
    std::int32_t s = kNone;
    if (!table.pieces.empty() && (table.index > 0 || !identified)) {
      for_each_segment(table.pieces.back(), [&](std::int32_t last) { s = last; });
      if (segment(s).owners > 1 || segment(s).count == kSlot) s = kNone;
    }
    if (s == kNone) {
      s = new_segment(run.hash, table.index, 1);
      table.pieces.push_back({s, 0});
    }
    Segment& last = segment(s);
    const std::int32_t taken = std::min({blocks, run.blocks - table.index, kSlot - last.count});
    hand_out(taken, last.ids.data() + last.count);
    last.count += taken;
    table.pieces.back().blocks += taken;
    advance(table, taken);
    blocks -= taken;
  }
}

void BlockPool::publish(TableId id, std::int32_t full_blocks) {
  Table& table = tables_[at(id)];
  PDSIM_CHECK(full_blocks <= table.size, "more full blocks than the table has");
  full_blocks = std::min(full_blocks, table.identified);
  while (table.published < full_blocks) {
    const Piece piece = table.pieces[static_cast<std::size_t>(table.cursor)];
    if (table.cursor_begin + piece.blocks <= table.published) {
      table.cursor_begin += piece.blocks;
      ++table.cursor;
      continue;
    }
    std::int32_t s = piece.segment;
    std::int32_t begin = table.cursor_begin;
    for (; begin + segment(s).count <= table.published; s = segment(s).rest) begin += segment(s).count;
    PDSIM_CHECK(segment(s).cached == table.published - begin, "a block was cached out of turn");
    table.published = std::min(begin + segment(s).count, full_blocks);
    cache(s, table.published - begin);
  }
}

/// Every block of the table's pieces beyond the first `keep` has one owner less, the last first.
void BlockPool::give_up(const Table& table, std::size_t keep) {
  for (std::size_t p = table.pieces.size(); p-- > keep;) {
    scratch_.clear();
    for_each_segment(table.pieces[p], [&](std::int32_t s) { scratch_.push_back(s); });
    for (std::size_t i = scratch_.size(); i-- > 0;) {
      Segment& given_up = segment(scratch_[i]);
      if (--given_up.owners > 0) continue;
      free_ += given_up.count;
      enqueue(scratch_[i], kNone);
    }
  }
}

void BlockPool::truncate(TableId id, std::int32_t keep_blocks) {
  Table& table = tables_[at(id)];
  PDSIM_CHECK(keep_blocks >= 0 && keep_blocks <= table.size, "truncate() to more blocks than the table has");
  std::size_t keep = table.pieces.size();
  std::int32_t begin = table.size;
  while (begin > keep_blocks) begin -= table.pieces[--keep].blocks;
  if (begin < keep_blocks) {  // the cut goes through a piece: make it two
    Piece& cut = table.pieces[keep];
    const std::int32_t end = begin + cut.blocks;
    cut.blocks = keep_blocks - begin;
    std::int32_t s = cut.segment;
    for (; begin + segment(s).count <= keep_blocks; s = segment(s).rest) begin += segment(s).count;
    if (begin < keep_blocks) s = split(s, keep_blocks - begin);
    ++keep;
    table.pieces.insert(table.pieces.begin() + static_cast<std::ptrdiff_t>(keep), {s, end - keep_blocks});
  }
  give_up(table, keep);
  table.pieces.resize(keep);

  table.index -= table.size - keep_blocks;
  while (table.index < 0) table.index += table.identity[static_cast<std::size_t>(--table.run)].blocks;
  table.size = keep_blocks;
  table.published = std::min(table.published, keep_blocks);
  if (keep == 0) {
    table.cursor = table.cursor_begin = 0;
  } else if (table.cursor >= std::ssize(table.pieces)) {
    table.cursor = static_cast<std::int32_t>(keep) - 1;
    table.cursor_begin = keep_blocks - table.pieces.back().blocks;
  }
}

void BlockPool::release(TableId id) {
  Table& table = tables_[at(id)];
  give_up(table, 0);
  table.open = false;
  closed_tables_.push_back(id);
}

BlockId BlockPool::id(TableId table, std::int32_t index) const {
  BlockId id = 0;
  ids(table, index, 1, &id);
  return id;
}

void BlockPool::ids(TableId id, std::int32_t first, std::int32_t count, BlockId* out) const {
  const Table& table = tables_[at(id)];
  PDSIM_CHECK(first >= 0 && count >= 0 && first + count <= table.size, "no such blocks in the table");
  std::int32_t begin = 0;
  for (auto piece = table.pieces.begin(); count > 0; begin += piece->blocks, ++piece) {
    if (begin + piece->blocks <= first) continue;
    std::int32_t next = begin;
    for_each_segment(*piece, [&](std::int32_t s) {
      const std::int32_t from = first - next;
      next += segment(s).count;
      const std::int32_t taken = std::min(segment(s).count - from, count);
      if (taken <= 0) return;
      out = std::copy_n(segment(s).ids.begin() + from, taken, out);
      first += taken;
      count -= taken;
    });
  }
}

// ---- the index of what is cached ----------------------------------------------------------------

/// Where the hash is, or the empty slot where it would go.
std::size_t BlockPool::slot_of(std::uint64_t hash) const {
  std::size_t slot = home(hash);
  while (index_[slot].oldest != kNone && index_[slot].hash != hash) slot = (slot + 1) & (index_.size() - 1);
  return slot;
}

void BlockPool::grow_index() {
  std::vector<Run> old(index_.size() * 2);
  old.swap(index_);
  --index_shift_;
  for (const Run& run : old) {
    if (run.oldest != kNone) index_[slot_of(run.hash)] = run;
  }
}

/// Empties the slot and moves back those of the following runs that it kept from their home.
void BlockPool::erase(std::size_t slot) {
  const std::size_t mask = index_.size() - 1;
  --runs_;
  for (std::size_t next = (slot + 1) & mask; index_[next].oldest != kNone; next = (next + 1) & mask) {
    if (((next - home(index_[next].hash)) & mask) < ((next - slot) & mask)) continue;
    index_[slot] = index_[next];
    slot = next;
  }
  index_[slot] = Run{};
}

/// The first index at or after `from` that no copy holds.
std::int32_t BlockPool::covered(const Run& run, std::int32_t from) const {
  for (std::int32_t s = run.oldest; s != kNone;) {
    const Segment& copy = segment(s);
    const bool holds = copy.first <= from && from < copy.first + copy.cached;
    if (holds) from = copy.first + copy.cached;
    s = holds ? run.oldest : copy.newer;
  }
  return from;
}

void BlockPool::set_leading(Run& run, std::int32_t leading) {
  if (leading == run.leading) return;
  const CacheEvent event{run.hash, leading, leading > run.leading};
  run.leading = leading;
  if (!events_on_) return;
  if (!events_.empty() && events_.back().hash == event.hash && events_.back().stored == event.stored) {
    events_.back() = event;  // block by block evictions of one run are one event until they are read
  } else {
    events_.push_back(event);
  }
}

/// Lists s among the run's copies after `older`; kNone: as the newest.
void BlockPool::insert_copy(Run& run, std::int32_t s, std::int32_t older) {
  if (older == kNone && run.oldest != kNone) older = segment(run.oldest).older;
  Segment& copy = segment(s);
  copy.older = older == kNone ? s : older;
  copy.newer = older == kNone ? kNone : segment(older).newer;
  (older == kNone ? run.oldest : segment(older).newer) = s;
  segment(copy.newer == kNone ? run.oldest : copy.newer).older = s;
}

/// The first `count` blocks of s, more than before, have their identity in the index from now on. An
/// older copy of what s gains must stay before it: s is split unless it is the newest copy already.
void BlockPool::cache(std::int32_t s, std::int32_t count) {
  if (std::ptrdiff_t{2} * runs_ >= std::ssize(index_)) grow_index();
  Run& run = index_[slot_of(segment(s).hash)];
  cached_ += count - segment(s).cached;
  if (segment(s).cached > 0 && segment(run.oldest).older != s) {
    count -= segment(s).cached;
    s = split(s, segment(s).cached);
  }
  if (run.oldest == kNone) {
    run = {segment(s).hash, kNone, 0};
    ++runs_;
  }
  if (segment(s).cached == 0) insert_copy(run, s, kNone);
  segment(s).cached = count;
  if (segment(s).first <= run.leading) set_leading(run, covered(run, run.leading));
}

/// The blocks of s beyond the first `count` lose their identity.
void BlockPool::evict_beyond(std::int32_t s, std::int32_t count) {
  Segment& victim = segment(s);
  const std::size_t slot = slot_of(victim.hash);
  Run& run = index_[slot];
  cached_ -= victim.cached - count;
  evicted_ += static_cast<std::uint64_t>(victim.cached - count);
  victim.cached = count;
  if (count == 0) {
    (s == run.oldest ? run.oldest : segment(victim.older).newer) = victim.newer;
    if (victim.newer != kNone) {
      segment(victim.newer).older = victim.older;
    } else if (run.oldest != kNone) {
      segment(run.oldest).older = victim.older;
    }
  }
  if (run.leading > victim.first + count) set_leading(run, covered(run, victim.first + count));
  if (run.oldest == kNone) erase(slot);
}

std::int32_t BlockPool::cached_prefix(std::span<const HashRun> identity, std::int32_t max_blocks) const {
  std::int32_t blocks = 0;
  for (const HashRun& run : identity) {
    const Run& cached = index_[slot_of(run.hash)];
    const std::int32_t leading = std::min(cached.leading, run.blocks);
    blocks += leading;
    if (leading < run.blocks || blocks >= max_blocks) break;
  }
  return std::min(blocks, max_blocks);
}

bool BlockPool::reset_cache() {
  if (free_ != total_) return false;
  for (std::int32_t s = head_; s != kNone; s = segment(s).next) {
    if (segment(s).cached == 0) continue;
    set_leading(index_[slot_of(segment(s).hash)], 0);
    segment(s).cached = 0;
  }
  index_.assign(index_.size(), Run{});
  runs_ = cached_ = 0;
  return true;
}

// ---- for tests ----------------------------------------------------------------------------------

std::vector<BlockId> BlockPool::free_queue() const {
  std::vector<BlockId> queue;
  for (std::int32_t s = head_; s != kNone; s = segment(s).next) {
    for (std::int32_t i = segment(s).count; i > 0;)
      queue.push_back(segment(s).ids[static_cast<std::size_t>(--i)]);
  }
  return queue;
}

void BlockPool::check() const {
  std::vector<std::int32_t> owners(segments_.size(), 0);
  std::vector<bool> live(segments_.size(), false), seen(static_cast<std::size_t>(total_), false);
  std::int32_t blocks = 0, free = 0, cached = 0, copies = 0, runs = 0;
  const auto meet = [&](std::int32_t s) {
    if (live[static_cast<std::size_t>(s)]) return;
    live[static_cast<std::size_t>(s)] = true;
    const Segment& met = segment(s);
    PDSIM_CHECK(0 < met.count && met.count <= kSlot, "a segment in use has no blocks, or too many");
    PDSIM_CHECK(0 <= met.cached && met.cached <= met.count, "a segment caches more blocks than it has");
    PDSIM_CHECK(met.owners < 2 || met.cached == met.count, "a shared segment is not all cached");
    for (std::size_t i = 0; i < static_cast<std::size_t>(met.count); ++i) {
      const auto id = static_cast<std::size_t>(met.ids[i]);
      PDSIM_CHECK(id < seen.size() && !seen[id], "a block is in two places");
      seen[id] = true;
    }
    blocks += met.count;
    cached += met.cached;
    copies += met.cached > 0;
  };

  std::int32_t previous = kNone;
  for (std::int32_t s = head_; s != kNone; previous = s, s = segment(s).next) {
    PDSIM_CHECK(segment(s).owners == 0, "an owned segment is in the free queue");
    PDSIM_CHECK(segment(s).prev == previous, "the free queue's links disagree");
    PDSIM_CHECK(!live[static_cast<std::size_t>(s)], "the free queue has a loop");
    meet(s);
    free += segment(s).count;
  }
  PDSIM_CHECK(previous == tail_ && free == free_, "the free queue's end or number of blocks is wrong");

  for (const Table& table : tables_) {
    if (!table.open) continue;
    std::int32_t size = 0, cursor_begin = 0;
    for (const Piece& piece : table.pieces) {
      if (&piece - table.pieces.data() == table.cursor) cursor_begin = size;
      std::int32_t in_piece = 0;
      for_each_segment(piece, [&](std::int32_t s) {
        PDSIM_CHECK(segment(s).owners > 0, "a table holds a free segment");
        ++owners[static_cast<std::size_t>(s)];
        meet(s);
        in_piece += segment(s).count;
      });
      PDSIM_CHECK(in_piece == piece.blocks, "a table holds part of a segment");
      size += in_piece;
    }
    PDSIM_CHECK(size == table.size && table.published <= size, "a table's size is wrong");
    PDSIM_CHECK(table.cursor_begin == cursor_begin && cursor_begin <= table.published,
                "a table publishes from a wrong place");
  }
  for (std::size_t s = 0; s < owners.size(); ++s) {
    PDSIM_CHECK(!live[s] || owners[s] == segments_[s].owners, "a segment's owners are miscounted");
  }
  PDSIM_CHECK(blocks == total_, "a block is neither free nor owned");

  for (std::size_t slot = 0; slot < index_.size(); ++slot) {
    const Run& run = index_[slot];
    if (run.oldest == kNone) continue;
    ++runs;
    PDSIM_CHECK(slot_of(run.hash) == slot, "a run cannot be found in the index");
    PDSIM_CHECK(run.leading == covered(run, 0), "a run's leading blocks are miscounted");
    previous = segment(run.oldest).older;
    for (std::int32_t s = run.oldest; s != kNone; previous = s, s = segment(s).newer, --copies) {
      PDSIM_CHECK(live[static_cast<std::size_t>(s)] && segment(s).cached > 0, "a copy is not cached");
      PDSIM_CHECK(segment(s).hash == run.hash, "a copy of another run");
      PDSIM_CHECK(segment(s).older == previous, "the links of copies disagree");
    }
    PDSIM_CHECK(previous == segment(run.oldest).older, "the newest copy is not the last");
  }
  PDSIM_CHECK(copies == 0 && cached == cached_ && runs == runs_, "the index misses a cached segment");
}

std::int32_t common_runs(const BlockPool& a, TableId table_a, std::int32_t first_a, const BlockPool& b,
                         TableId table_b, std::int32_t first_b, std::int32_t count,
                         std::vector<BlockId>& scratch) {
  if (count <= 0) return 0;
  const auto n = static_cast<std::size_t>(count);
  scratch.resize(2 * n);
  const BlockId* ids_a = scratch.data();
  const BlockId* ids_b = scratch.data() + n;
  a.ids(table_a, first_a, count, scratch.data());
  b.ids(table_b, first_b, count, scratch.data() + n);
  std::int32_t runs = 1;
  for (std::size_t i = 1; i < n; ++i) {
    runs += (ids_a[i] - ids_a[i - 1] != 1) | (ids_b[i] - ids_b[i - 1] != 1);
  }
  return runs;
}

}  // namespace pdsim
