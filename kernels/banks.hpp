// What shared memory's banks cost: 32 banks of 4 bytes, one word each a cycle. The lanes of a warp are served
// together as far as 128 bytes go (all 32 for words, 8 at a time for 16 bytes); a phase takes as many cycles
// as the busiest bank has different words, and every cycle beyond the first is counted here. [CUDA C++
// Programming Guide, shared memory; ldmatrix fetches the 8 rows of one 8x8 matrix in a phase.]
//
// A lone lane cannot know what its neighbours access at that time, so accesses of lanes are matched by rank
// between two operations that the whole warp takes part in. Lanes that took different ways do not match: such
// accesses are counted apart and not judged.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace pdsim::kernels {

struct BankCounter {
  std::int64_t phases = 0;
  std::int64_t extra_cycles = 0;  ///< lost to conflicts; 0 is what a swizzle is for
};

/// What a shared memory access of one lane is for.
enum class Access : std::uint8_t { load, store, copy_async };

struct BankCounters {
  BankCounter load_matrix, load, store, copy_async;
  std::int64_t unmatched = 0;
};

/// One phase of at most 32 accesses at byte offsets into shared memory, of `bytes` each.
void count_phase(BankCounter& counter, const std::uint32_t* offsets, int lanes, int bytes);

/// The accesses of a warp's lanes since it last came together.
class WarpAccesses {
 public:
  void add(int lane, Access access, std::uint32_t offset, int bytes) {
    lanes_[static_cast<std::size_t>(lane)].push_back({offset, static_cast<std::uint8_t>(bytes), access});
  }
  /// Counts and forgets them.
  void settle(BankCounters& counters);

 private:
  struct One {
    std::uint32_t offset;
    std::uint8_t bytes;
    Access access;
  };
  std::array<std::vector<One>, 32> lanes_;
};

}  // namespace pdsim::kernels
