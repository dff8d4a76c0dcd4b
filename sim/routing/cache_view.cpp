#include "sim/routing/cache_view.hpp"

#include <algorithm>

namespace pdsim {

void CacheView::apply(std::uint32_t worker, const CacheEvent& event) {
  auto found = row_of_.find(event.hash);
  if (found == row_of_.end()) {
    if (event.blocks == 0) return;
    std::uint32_t row;
    if (free_rows_.empty()) {
      row = static_cast<std::uint32_t>(holders_.size());
      holders_.push_back(0);
      blocks_.resize(blocks_.size() + workers_, 0);
    } else {
      row = free_rows_.back();
      free_rows_.pop_back();
    }
    found = row_of_.emplace(event.hash, row).first;
  }
  const std::uint32_t row = found->second;
  std::int32_t& held = blocks_[std::size_t{row} * workers_ + worker];
  holders_[row] += (event.blocks > 0 ? 1u : 0u) - (held > 0 ? 1u : 0u);
  held = event.blocks;
  if (holders_[row] == 0) {
    row_of_.erase(found);
    free_rows_.push_back(row);
  }
}

void CacheView::match(std::span<const HashRun> identity, std::int32_t max_blocks,
                      std::vector<std::int32_t>& blocks) const {
  blocks.assign(workers_, 0);
  std::int32_t before = 0;  // blocks of the runs that some worker still matches in full
  for (const HashRun& run : identity) {
    if (before >= max_blocks) break;
    const auto found = row_of_.find(run.hash);
    if (found == row_of_.end()) break;
    const std::int32_t* held = &blocks_[std::size_t{found->second} * workers_];
    bool goes_on = false;
    for (std::uint32_t w = 0; w < workers_; ++w) {
      if (blocks[w] < before) continue;
      blocks[w] = std::min(before + std::min(held[w], run.blocks), max_blocks);
      goes_on |= held[w] >= run.blocks;
    }
    if (!goes_on) break;
    before += run.blocks;
  }
}

}  // namespace pdsim
