// Theory: prefill is o = softmax(scale q k, over what is visible) v (reference.hpp, float64), whatever the
// lengths, pages, grouping and order of warps. The kernel rounds p and o to bf16, each by at most 2^-9 of
// itself, so that o errs by less than 2^-8 of the values it is made of; 2^-7 of |o| + its typical size leaves
// room for sums in fp32. Reading shared memory costs no bank conflict: that is what the swizzle is for.
#include "kernels/prefill.cuh"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/ragged_batch.hpp"
#include "kernels/reference.hpp"
#include "tests/kernels/orders.hpp"

namespace pdsim::kernels {
namespace {

constexpr double kTolerance = 0x1p-7;
constexpr bf16 kUnwritten{0x7fff};

template <int HeadDim, int RowsPerWarp>
std::vector<bf16> prefilled(const RaggedBatch<bf16>& batch, const PagedKv<bf16>& kv) {
  const std::vector<PrefillTile> tiles =
      prefill_tiles(batch.q_start, batch.lengths, PrefillTiling{RowsPerWarp});
  // Behind the last row lies what no row of the last tile may write.
  const std::size_t beyond = 128 * static_cast<std::size_t>(batch.shape.heads) * HeadDim;
  std::vector<bf16> out(batch.q.size() + beyond, kUnwritten);
  PrefillArgs args;
  args.q = batch.q.data();
  args.out = out.data();
  args.kv = kv;
  args.q_start = batch.q_start.data();
  args.tiles = tiles.data();
  args.tile_count = static_cast<std::int32_t>(tiles.size());
  args.heads = batch.shape.heads;
  args.scale = static_cast<float>(batch.scale);
  run_prefill<HeadDim, RowsPerWarp>(args, nullptr);
  const auto end = out.begin() + static_cast<std::ptrdiff_t>(batch.q.size());
  EXPECT_TRUE(std::all_of(end, out.end(), [](bf16 x) { return x.bits == kUnwritten.bits; }));
  out.erase(end, out.end());
  return out;
}

template <int HeadDim, int RowsPerWarp>
void agrees(RaggedShape shape) {
  shape.head_dim = HeadDim;
  const RaggedBatch<bf16> batch = random_batch<bf16>(shape, 7);
  const PagedKv<bf16> kv = batch.kv();
  const std::vector<double> expected =
      reference_attention(kv, batch.q, batch.q_start, shape.heads, batch.scale);
  in_every_order([&] {
    EXPECT_LT(largest_error(prefilled<HeadDim, RowsPerWarp>(batch, kv), expected), kTolerance);
    const BankCounters& banks = emulator::banks;
    EXPECT_EQ(banks.load_matrix.extra_cycles + banks.copy_async.extra_cycles, 0);
    EXPECT_EQ(banks.load.extra_cycles + banks.store.extra_cycles + banks.unmatched, 0);
  });
}

void agrees_in_every_instance(const RaggedShape& shape) {
  agrees<64, 16>(shape);
  agrees<64, 32>(shape);
  agrees<128, 16>(shape);
  agrees<128, 32>(shape);
}

// New tokens behind many, few and no cached ones; more than one tile; a request of nothing, one without new
// tokens.
TEST(Prefill, RaggedBatches) {
  agrees_in_every_instance({{{70, 133}, {0, 0}, {1, 1}, {5, 198}, {0, 40}, {131, 131}}, 1, 1, 0, 16});
}

TEST(Prefill, OnePageWholeAndPartial) {
  agrees_in_every_instance({{{1, 1}, {16, 16}, {7, 7}, {3, 16}}, 1, 1, 0, 16});
}

TEST(Prefill, LengthsAboutTheEdgesOfBlocksAndTiles) {
  agrees<64, 16>({{{64, 64}, {65, 65}, {63, 127}, {1, 128}, {1, 129}}, 1, 1, 0, 16});
  agrees<64, 32>({{{128, 128}, {129, 129}, {32, 160}}, 1, 1, 0, 16});
  agrees<128, 32>({{{32, 32}, {33, 64}, {31, 65}}, 1, 1, 0, 16});
}

TEST(Prefill, QueryHeadsShareKvHeads) {
  agrees<64, 16>({{{20, 90}}, 8, 1, 0, 16});
  agrees<64, 32>({{{20, 90}}, 8, 2, 0, 16});
  agrees<128, 16>({{{20, 50}}, 6, 2, 0, 16});
}

TEST(Prefill, PagesOfAnySize) {
  for (const int page_tokens : {1, 8, 32, 256}) agrees<64, 16>({{{10, 140}, {40, 40}}, 2, 2, 0, page_tokens});
}

TEST(Prefill, WithoutNewTokensNothingIsDone) {
  const auto batch = random_batch<bf16>({{{0, 20}, {0, 0}}, 2, 1, 64, 16}, 1);
  EXPECT_TRUE((prefilled<64, 16>(batch, batch.kv()).empty()));
}

// A pool of 2^33 elements of which only the pages in use exist; they lie beyond the reach of 32 bits.
TEST(Prefill, OffsetsAre64Bits) {
  constexpr std::int64_t kElements = std::int64_t{1} << 33;
  const auto batch = random_batch<bf16>({{{4, 40}}, 2, 2, 64, 16}, 3);
  void* memory = mmap(nullptr, kElements * sizeof(bf16), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 16 GiB of addresses here";
  auto* pool = static_cast<bf16*>(memory);

  PagedKv<bf16> kv = batch.kv();
  const std::int64_t page_elements = 16 * kv.row(1, 0);
  std::vector<std::int32_t> pages(static_cast<std::size_t>(kv.max_pages));
  for (std::int32_t i = 0; i < 3; ++i) {
    const auto at = static_cast<std::size_t>(i);
    pages[at] = static_cast<std::int32_t>(kElements / page_elements) - 1 - i;
    std::memcpy(pool + pages[at] * page_elements, batch.k.data() + batch.pages[at] * page_elements,
                static_cast<std::size_t>(page_elements) * sizeof(bf16));
  }
  kv.k = kv.v = pool;
  kv.pages = pages.data();
  const auto expected = reference_attention(kv, batch.q, batch.q_start, 2, batch.scale);
  EXPECT_LT(largest_error(prefilled<64, 16>(batch, kv), expected), kTolerance);
  EXPECT_GT(std::count_if(expected.begin(), expected.end(), [](double x) { return x != 0; }), 0);
  munmap(memory, kElements * sizeof(bf16));
}

// 108 multiprocessors hold 216 tiles of 128 rows: of 27 x 8, but not of 26 x 8, nor of a row too few.
TEST(PrefillTiles, AreWideWhereThereAreEnough) {
  const auto choice = [](std::int32_t first, std::int32_t second) {
    return choose_tiling(std::vector<std::int32_t>{0, first, first + second}, 8, 108);
  };
  EXPECT_EQ(choice(26 * 128, 1), PrefillTiling::rows32);
  EXPECT_EQ(choice(0, 26 * 128 + 1), PrefillTiling::rows32);
  EXPECT_EQ(choice(20 * 128, 6 * 128), PrefillTiling::rows16);
}

// Every row of every request once, those that see most first.
TEST(PrefillTiles, CoverTheBatchLongestFirst) {
  const std::vector<std::int32_t> lengths = {300, 0, 64, 1000, 50}, fresh = {130, 0, 64, 1, 0};
  std::vector<std::int32_t> q_start = {0};
  for (const std::int32_t n : fresh) q_start.push_back(q_start.back() + n);

  for (const PrefillTiling tiling : {PrefillTiling::rows16, PrefillTiling::rows32}) {
    const std::int32_t rows = tile_rows(tiling);
    EXPECT_EQ(rows, tiling == PrefillTiling::rows16 ? 64 : 128);
    std::vector<std::vector<int>> covered(5);
    for (std::size_t r = 0; r < 5; ++r) covered[r].resize(static_cast<std::size_t>(fresh[r]));
    std::int32_t before = 1 << 30;
    for (const PrefillTile& tile : prefill_tiles(q_start, lengths, tiling)) {
      const auto r = static_cast<std::size_t>(tile.request);
      const std::int32_t end = std::min(fresh[r], tile.first_row + rows);
      ASSERT_LT(tile.first_row, end);
      for (std::int32_t row = tile.first_row; row < end; ++row) ++covered[r][static_cast<std::size_t>(row)];
      const std::int32_t keys = lengths[r] - fresh[r] + end;
      EXPECT_LE(keys, before);
      before = keys;
    }
    for (const auto& request : covered) {
      EXPECT_TRUE(std::all_of(request.begin(), request.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST(PrefillWork, CountsVisiblePairs) {
  const std::vector<std::int32_t> lengths = {7, 0, 5, 9}, q_start = {0, 3, 3, 8, 8};
  std::int64_t pairs = 0;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    const std::int32_t fresh = q_start[r + 1] - q_start[r];
    for (std::int32_t query = 0; query < fresh; ++query) {
      for (std::int32_t key = 0; key < lengths[r]; ++key) pairs += key <= lengths[r] - fresh + query;
    }
  }
  EXPECT_EQ(visible_pairs(q_start, lengths), pairs);
  EXPECT_EQ(pairs, 5 + 6 + 7 + 15);
  EXPECT_EQ(prefill_flops(pairs, 8, 128), 4.0 * 128 * 8 * 33);

  // 8 requests of 128k: beyond 32 bits.
  const std::vector<std::int32_t> long_lengths(8, 131072);
  std::vector<std::int32_t> long_starts(9);
  for (std::size_t i = 0; i < 9; ++i) long_starts[i] = static_cast<std::int32_t>(i) * 131072;
  EXPECT_EQ(visible_pairs(long_starts, long_lengths), std::int64_t{8} * 131072 * 131073 / 2);
}

}  // namespace
}  // namespace pdsim::kernels
