// Theory: absorbed MLA decode is o = softmax(scale q . row) row[:512] over all tokens of a request
// (mla_reference.hpp, float64); the heads are independent, whatever the lengths, pages and split; zeros where
// there are no tokens. Rounded as in decode_test.cpp, so within 2^-7. The bits depend on the split and on
// nothing else.
#include "kernels/mla_decode.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels/mla_reference.hpp"
#include "kernels/ragged_batch.hpp"
#include "kernels/reference.hpp"
#include "sim/core/error.hpp"
#include "tests/kernels/orders.hpp"

namespace pdsim::kernels {
namespace {

constexpr double kTolerance = 0x1p-7;
constexpr bf16 kUntouched{0x7fff};
constexpr std::int32_t kWhole = 1 << 20;  // a chunk that holds any request here

RaggedBatch<bf16> mla_batch(const std::vector<std::int32_t>& lengths, std::int32_t heads,
                            std::int32_t page_tokens) {
  RaggedShape shape{{}, heads, 1, kMlaRow, page_tokens};
  for (const std::int32_t length : lengths) shape.requests.push_back({1, std::max(1, length)});
  RaggedBatch<bf16> batch = random_batch<bf16>(shape, 13);
  batch.lengths = lengths;
  return batch;
}

std::vector<bf16> decoded(const RaggedBatch<bf16>& batch, std::int32_t chunk_tokens) {
  const std::int32_t splits =
      chunks_of(*std::max_element(batch.lengths.begin(), batch.lengths.end()), chunk_tokens);
  const std::size_t rows = batch.lengths.size() * static_cast<std::size_t>(batch.shape.heads);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<bf16> out(rows * kMlaLatent, kUntouched);
  std::vector<PartState> part_state(rows * static_cast<std::size_t>(splits), {nan, nan});
  std::vector<float> part_out(part_state.size() * kMlaLatent, nan);
  MlaDecodeArgs args;
  args.q = batch.q.data();
  args.latent = batch.kv();
  args.latent.v = nullptr;
  args.to = {
      out.data(),        part_out.data(), part_state.data(), static_cast<std::int32_t>(batch.lengths.size()),
      batch.shape.heads, splits,          chunk_tokens};
  args.scale = static_cast<float>(batch.scale);
  check_mla_decode(args);
  run_mla_decode(args, nullptr);
  return out;
}

/// Under every order and each chunk size: the reference, one result, no conflicts.
void agrees(const std::vector<std::int32_t>& lengths, std::int32_t heads, std::int32_t page_tokens,
            const std::vector<std::int32_t>& chunks) {
  const RaggedBatch<bf16> batch = mla_batch(lengths, heads, page_tokens);
  const std::vector<double> expected = reference_mla(batch.kv(), batch.q, heads, batch.scale);
  for (const std::int32_t chunk : chunks) {
    SCOPED_TRACE("chunks of " + std::to_string(chunk));
    std::vector<bf16> first;
    in_every_order([&] {
      const std::vector<bf16> out = decoded(batch, chunk);
      EXPECT_LT(largest_error(out, expected), kTolerance);
      if (first.empty()) first = out;
      EXPECT_TRUE(std::equal(out.begin(), out.end(), first.begin(), first.end(),
                             [](bf16 x, bf16 y) { return x.bits == y.bits; }));
      EXPECT_EQ(emulator::banks.load_matrix.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.copy_async.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.store.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.load.extra_cycles, 0);
    });
  }
}

// One token; a tile whose second half has one token, or none; several tiles; whole and in chunks.
TEST(MlaDecode, RaggedLengthsWholeAndSplit) {
  agrees({1, 17, 16, 131, 0}, 16, 16, {kWhole, 48});
}

TEST(MlaDecode, TwoBlocksOfHeadsAndPagesOf64) {
  agrees({70}, 32, 64, {64});
}

TEST(MlaDecode, ARequestWithoutTokensGetsZeros) {
  const auto batch = mla_batch({0, 40}, 16, 16);
  for (const std::int32_t chunk : {kWhole, 32}) {
    const std::vector<bf16> out = decoded(batch, chunk);
    for (std::size_t i = 0; i < 16 * kMlaLatent; ++i) ASSERT_EQ(out[i].bits, 0) << i;
  }
}

// The rotary columns count for the score alone: with q nonzero only there, the last token's, all weight is on
// the token whose rotary columns agree.
TEST(MlaDecode, RotaryColumnsAreOfTheKeyOnly) {
  auto batch = mla_batch({40}, 16, 16);
  for (std::size_t i = 0; i < batch.q.size(); ++i)
    batch.q[i] = to_bf16(i % kMlaRow < kMlaLatent ? 0.0f : 50.0f);
  const auto row = [&](std::int32_t token) {
    return static_cast<std::size_t>(batch.kv().row(batch.kv().slot(0, token), 0));
  };
  for (std::int32_t token = 0; token < 40; ++token) {
    for (std::size_t d = kMlaLatent; d < kMlaRow; ++d)
      batch.k[row(token) + d] = to_bf16(token == 37 ? 1.0f : -1.0f);
  }
  const std::vector<bf16> out = decoded(batch, kWhole);
  for (std::size_t i = 0; i < out.size(); ++i)
    ASSERT_EQ(out[i].bits, batch.k[row(37) + i % kMlaLatent].bits) << i;
}

// 300 tokens x 576 x 2 bytes; 128 heads x 2 (576 + 512).
TEST(MlaDecode, CountsWhatIsAskedFor) {
  const std::vector<std::int32_t> lengths{100, 0, 200};
  EXPECT_EQ(mla_decode_bytes(lengths), 345'600);
  EXPECT_EQ(mla_decode_flops(lengths, 128), 83'558'400);
}

TEST(MlaDecode, RefusesWhatTheKernelIsNotMadeFor) {
  MlaDecodeArgs args;
  args.latent.head_dim = kMlaRow;
  args.to = {nullptr, nullptr, nullptr, 1, 16, 1, 512};
  EXPECT_NO_THROW(check_mla_decode(args));
  const auto message = [&](auto change) {
    MlaDecodeArgs changed = args;
    change(changed);
    try {
      check_mla_decode(changed);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](MlaDecodeArgs& a) { a.to.heads = 8; }),
            "MLA decode: 8 heads; expected a multiple of 16");
  EXPECT_EQ(message([](MlaDecodeArgs& a) { a.latent.head_dim = 512; }),
            "MLA decode: 1 rows of 512 a token; expected one of 576");
  EXPECT_EQ(message([](MlaDecodeArgs& a) { a.latent.page_shift = 3; }),
            "decode: pages of 8 tokens; expected at least 16");
}

}  // namespace
}  // namespace pdsim::kernels
