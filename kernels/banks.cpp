#include "kernels/banks.hpp"

#include <algorithm>

namespace pdsim::kernels {

void count_phase(BankCounter& counter, const std::uint32_t* offsets, int lanes, int bytes) {
  // Words by bank; a phase has at most 32 of them: 128 bytes.
  std::array<std::array<std::uint32_t, 32>, 32> words;
  std::array<std::uint8_t, 32> used{};
  std::uint8_t cycles = 1;
  for (int lane = 0; lane < lanes; ++lane) {
    for (std::uint32_t at = offsets[lane] / 4;
         at < (offsets[lane] + static_cast<std::uint32_t>(bytes) + 3) / 4; ++at) {
      auto& bank = words[at % 32];
      auto& count = used[at % 32];
      if (std::find(bank.begin(), bank.begin() + count, at) != bank.begin() + count) continue;
      bank[count++] = at;
      cycles = std::max(cycles, count);
    }
  }
  ++counter.phases;
  counter.extra_cycles += cycles - 1;
}

void WarpAccesses::settle(BankCounters& counters) {
  std::size_t ranks = 0;
  for (const auto& lane : lanes_) ranks = std::max(ranks, lane.size());
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const One* first = lanes_[0].size() > rank ? &lanes_[0][rank] : nullptr;
    const bool match =
        first != nullptr && std::all_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
          return lane.size() > rank && lane[rank].bytes == first->bytes && lane[rank].access == first->access;
        });
    if (!match) {
      for (const auto& lane : lanes_) counters.unmatched += lane.size() > rank;
      continue;
    }
    BankCounter& counter = first->access == Access::load    ? counters.load
                           : first->access == Access::store ? counters.store
                                                            : counters.copy_async;
    const int together = std::min(32, 128 / first->bytes);
    for (int begin = 0; begin < 32; begin += together) {
      std::array<std::uint32_t, 32> offsets;
      for (int lane = 0; lane < together; ++lane) {
        offsets[static_cast<std::size_t>(lane)] = lanes_[static_cast<std::size_t>(begin + lane)][rank].offset;
      }
      count_phase(counter, offsets.data(), together, first->bytes);
    }
  }
  for (auto& lane : lanes_) lane.clear();
}

}  // namespace pdsim::kernels
