// The block pool as its semantics read, one block at a time: a list, a map, reference counts. Slow and
// obviously right; what BlockPool does by segments must be equal to this, id by id.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "sim/serving/block_pool.hpp"

namespace pdsim {

class ReferencePool {
 public:
  using Identity = std::pair<std::uint64_t, std::int32_t>;  ///< (hash, index within the run)

  /// `queue`: the ids 0, 1, 2, ... in the order in which they are to be handed out.
  explicit ReferencePool(const std::vector<BlockId>& queue)
      : blocks_(queue.size()), queue_(queue.begin(), queue.end()) {}

  TableId open(std::span<const HashRun> identity) {
    Table table;
    for (const HashRun& run : identity) {
      for (std::int32_t i = 0; i < run.blocks; ++i) table.identity.emplace_back(run.hash, i);
    }
    const TableId id = next_table_++;
    tables_[id] = table;
    return id;
  }

  std::int32_t cached_prefix(std::span<const HashRun> identity, std::int32_t max_blocks) const {
    std::int32_t blocks = 0;
    for (const HashRun& run : identity) {
      for (std::int32_t i = 0; i < run.blocks; ++i, ++blocks) {
        if (blocks == max_blocks || !index_.contains({run.hash, i})) return blocks;
      }
    }
    return blocks;
  }

  bool allocate(TableId id, std::int32_t hit_blocks, std::int32_t new_blocks) {
    Table& table = tables_.at(id);
    std::vector<BlockId> hits;
    for (std::int32_t i = 0; i < hit_blocks; ++i) {
      hits.push_back(index_.at(table.identity[static_cast<std::size_t>(i)]).front());
    }
    const auto is_free = [this](BlockId b) { return block(b).owners == 0; };
    if (new_blocks + std::ranges::count_if(hits, is_free) > free_blocks()) return false;
    for (BlockId b : hits) {
      if (block(b).owners++ == 0) queue_.remove(b);
      table.blocks.push_back(b);
    }
    table.published = hit_blocks;
    append(table, new_blocks);
    return true;
  }

  bool extend(TableId id, std::int32_t new_blocks) {
    if (new_blocks > free_blocks()) return false;
    append(tables_.at(id), new_blocks);
    return true;
  }

  void publish(TableId id, std::int32_t full_blocks) {
    Table& table = tables_.at(id);
    for (; table.published < full_blocks && table.published < std::ssize(table.identity); ++table.published) {
      const auto i = static_cast<std::size_t>(table.published);
      block(table.blocks[i]).identity = table.identity[i];
      index_[table.identity[i]].push_back(table.blocks[i]);
    }
  }

  void truncate(TableId id, std::int32_t keep_blocks) {
    Table& table = tables_.at(id);
    for (; std::ssize(table.blocks) > keep_blocks; table.blocks.pop_back()) {
      const BlockId b = table.blocks.back();
      if (--block(b).owners == 0) queue_.push_back(b);
    }
    table.published = std::min(table.published, keep_blocks);
  }

  void release(TableId id) {
    truncate(id, 0);
    tables_.erase(id);
  }

  bool reset_cache() {
    if (free_blocks() != std::ssize(blocks_)) return false;
    index_.clear();
    for (Block& b : blocks_) b.identity.reset();
    return true;
  }

  std::int32_t free_blocks() const { return static_cast<std::int32_t>(queue_.size()); }
  std::int32_t cached_blocks() const {
    return static_cast<std::int32_t>(
        std::ranges::count_if(blocks_, [](const Block& b) { return b.identity.has_value(); }));
  }
  std::uint64_t evicted_blocks() const { return evicted_; }
  std::vector<BlockId> free_queue() const { return {queue_.begin(), queue_.end()}; }
  const std::vector<BlockId>& ids(TableId id) const { return tables_.at(id).blocks; }

 private:
  struct Block {
    std::int32_t owners = 0;
    std::optional<Identity> identity;  ///< while cached
  };
  struct Table {
    std::vector<Identity> identity;
    std::vector<BlockId> blocks;
    std::int32_t published = 0;
  };

  Block& block(BlockId id) { return blocks_[static_cast<std::size_t>(id)]; }

  void append(Table& table, std::int32_t blocks) {
    for (; blocks > 0; --blocks) {
      const BlockId id = queue_.front();
      queue_.pop_front();
      if (const auto identity = std::exchange(block(id).identity, std::nullopt)) {
        std::vector<BlockId>& copies = index_.at(*identity);
        std::erase(copies, id);
        if (copies.empty()) index_.erase(*identity);
        ++evicted_;
      }
      block(id).owners = 1;
      table.blocks.push_back(id);
    }
  }

  std::vector<Block> blocks_;
  std::list<BlockId> queue_;
  std::map<Identity, std::vector<BlockId>> index_;  ///< copies in the order in which they were cached
  std::map<TableId, Table> tables_;
  TableId next_table_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace pdsim
