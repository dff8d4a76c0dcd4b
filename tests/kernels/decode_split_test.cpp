// Theory: the keys of all requests, read by blocks in waves of equal chunks, keep a share
//   E = sum of keys x blocks per chunk / (waves x slots x longest chunk)
// of the GPU busy. The least split with E >= 0.85 is taken, chunks are whole pages and at least 128 keys.
#include "kernels/decode_split.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace pdsim::kernels {
namespace {

using Lengths = std::vector<std::int32_t>;

TEST(DecodeSplit, AFullWaveIsNotSplit) {
  const Lengths lengths(33, 4096);  // 33 x 8 heads = 264 slots
  EXPECT_EQ(choose_split({lengths, 8, 16, 264}), (DecodeSplit{4096, 1, 1.0}));
}

// 8 heads on 108 slots. At 11 chunks of 752 keys 8 x 8192 / (108 x 752) = 0.807, at 12 of 688 it is 0.882.
TEST(DecodeSplit, OneRequestIsCutUntilTheGpuIsBusy) {
  const Lengths lengths{8192};
  const DecodeSplit split = choose_split({lengths, 8, 16, 108});
  EXPECT_EQ(split.chunk_tokens, 688);
  EXPECT_EQ(split.splits, 12);
  EXPECT_NEAR(split.efficiency, 65536.0 / (108 * 688), 1e-12);
}

// 1.125 waves take the time of 2: 0.5625. Two chunks make 2.25 waves (0.75), three 3.375 (0.84), four 4.5
// (0.9).
TEST(DecodeSplit, AStragglingWaveIsSplitAway) {
  const Lengths lengths(9, 4800);
  EXPECT_DOUBLE_EQ(wave_efficiency({lengths, 8, 16, 64}, 4800), 0.5625);
  EXPECT_EQ(choose_split({lengths, 8, 16, 64}).splits, 4);
}

// 32 slots; the long request alone is 1024 of 1024 + 31 x 128 keys. Whole, it lasts eight times as long as
// the others: E = 4992 / (32 x 1024) = 0.15. In chunks of 128 all 39 blocks are equal, in two waves: 0.61.
TEST(DecodeSplit, RaggedBatchesAreCutByTheLongest) {
  Lengths lengths(32, 128);
  lengths[7] = 1024;
  EXPECT_NEAR(wave_efficiency({lengths, 1, 16, 32}, 1024), 4992.0 / (32 * 1024), 1e-12);
  const DecodeSplit split = choose_split({lengths, 1, 16, 32});
  EXPECT_EQ(split.chunk_tokens, 128);
  EXPECT_NEAR(split.efficiency, 4992.0 / (2 * 32 * 128), 1e-12);
}

TEST(DecodeSplit, ShortRequestsStayWholeHoweverIdleTheGpu) {
  const Lengths lengths{128, 17, 0};
  EXPECT_EQ(choose_split({lengths, 1, 16, 264}).splits, 1);
  EXPECT_EQ(choose_split({lengths, 1, 16, 264}).chunk_tokens, kLeastChunk);
}

TEST(DecodeSplit, NoChunkIsShorterThanToldTo) {
  const Lengths lengths{4096};
  EXPECT_EQ(choose_split({lengths, 1, 16, 264}).splits, 32);
  EXPECT_EQ(choose_split({lengths, 1, 16, 264, 512}).splits, 8);
}

TEST(DecodeSplit, NoKeysAreOneEmptyChunk) {
  EXPECT_EQ(choose_split({Lengths{}, 8, 16, 264}), (DecodeSplit{128, 1, 1.0}));
  EXPECT_EQ(choose_split({Lengths{0, 0}, 8, 16, 264}), (DecodeSplit{128, 1, 1.0}));
  EXPECT_EQ(chunks_of(0, 128), 1);
}

TEST(DecodeSplit, IsTheLeastThatSufficesElseTheBest) {
  std::mt19937 random(3);
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  int sufficed = 0;
  for (int trial = 0; trial < 300; ++trial) {
    Lengths lengths(static_cast<std::size_t>(draw(1, 40)));
    for (std::int32_t& length : lengths) length = draw(0, 1 << draw(0, 14));
    const SplitProblem problem{lengths, draw(1, 8), 16 << draw(0, 4), draw(1, 300), kLeastChunk};
    const DecodeSplit chosen = choose_split(problem);
    EXPECT_EQ(chosen.chunk_tokens % problem.page_tokens, 0);
    EXPECT_GE(chosen.chunk_tokens, kLeastChunk);
    EXPECT_LE(chosen.efficiency, 1.0);
    const bool suffices = chosen.efficiency >= kEnoughWaveEfficiency;
    sufficed += suffices;
    const std::int32_t longest = *std::max_element(lengths.begin(), lengths.end());
    for (std::int32_t splits = 1; splits <= longest / kLeastChunk + 1; ++splits) {
      const DecodeSplit other = split_into(problem, splits);
      EXPECT_LE(other.splits, splits);
      if (other.splits < chosen.splits) {
        EXPECT_LT(other.efficiency, suffices ? kEnoughWaveEfficiency : chosen.efficiency);
      } else if (!suffices) {
        EXPECT_LE(other.efficiency, chosen.efficiency);
      }
    }
  }
  EXPECT_GT(sufficed, 50);
  EXPECT_LT(sufficed, 250);
}

}  // namespace
}  // namespace pdsim::kernels
