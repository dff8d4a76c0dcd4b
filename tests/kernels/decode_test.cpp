// Theory: decode is o = softmax(scale q k) v over all tokens of a request (reference.hpp, float64), whatever
// the lengths, pages, grouping and split; zeros where there are no tokens. Probabilities and output are
// rounded to bf16, 8 bits of mantissa, at most 2^-9 of each term: |o - reference| stays within 2^-7 of
// |reference| + its typical size. fp8 elements are exact in bf16. The bits depend on the split and on nothing
// else, and no tile costs a bank conflict.
#include "kernels/decode.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ragged_batch.hpp"
#include "kernels/reference.hpp"
#include "sim/core/error.hpp"
#include "tests/kernels/orders.hpp"

namespace pdsim::kernels {
namespace {

constexpr double kTolerance = 0x1p-7;
constexpr bf16 kUntouched{0x7fff};
constexpr std::int32_t kWhole = 1 << 20;  // a chunk that holds any request here

/// One new token each; lengths of 0 are set afterwards, so that there is a query.
template <class T>
RaggedBatch<T> decode_batch(const std::vector<std::int32_t>& lengths, std::int32_t heads,
                            std::int32_t kv_heads, std::int32_t head_dim, std::int32_t page_tokens) {
  RaggedShape shape{{}, heads, kv_heads, head_dim, page_tokens};
  for (const std::int32_t length : lengths) shape.requests.push_back({1, std::max(1, length)});
  RaggedBatch<T> batch = random_batch<T>(shape, 11);
  batch.lengths = lengths;
  return batch;
}

template <class T, int D>
std::vector<bf16> decoded(const RaggedBatch<T>& batch, std::int32_t chunk_tokens) {
  const std::int32_t longest = *std::max_element(batch.lengths.begin(), batch.lengths.end());
  const std::int32_t splits = chunks_of(longest, chunk_tokens);
  std::vector<bf16> out(batch.q.size(), kUntouched);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> part_out(batch.q.size() * static_cast<std::size_t>(splits) + 4, nan);
  std::vector<PartState> part_state(part_out.size() / D, {nan, nan});
  DecodeArgs<T> args;
  args.q = batch.q.data();
  args.kv = batch.kv();
  args.to = {
      out.data(),        part_out.data(), part_state.data(), static_cast<std::int32_t>(batch.lengths.size()),
      batch.shape.heads, splits,          chunk_tokens};
  args.scale = static_cast<float>(batch.scale);
  check_decode(args.to, args.kv.kv_heads, args.kv.head_dim, args.kv.page_shift);
  run_decode<T, D>(args, nullptr);
  return out;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](bf16 x, bf16 y) { return x.bits == y.bits; });
}

std::vector<double> doubles(const std::vector<bf16>& from) {
  std::vector<double> to;
  for (const bf16 x : from) to.push_back(double{to_float(x)});
  return to;
}

/// Under every order and each chunk size: the reference, one result, no conflicts; nearly the same of all
/// splits.
template <class T, int D>
void agrees(const std::vector<std::int32_t>& lengths, std::int32_t heads, std::int32_t kv_heads,
            std::int32_t page_tokens, const std::vector<std::int32_t>& chunks) {
  const RaggedBatch<T> batch = decode_batch<T>(lengths, heads, kv_heads, D, page_tokens);
  const std::vector<double> expected =
      reference_attention(batch.kv(), batch.q, batch.q_start, heads, batch.scale);
  std::vector<bf16> other_split;
  for (const std::int32_t chunk : chunks) {
    SCOPED_TRACE("chunks of " + std::to_string(chunk));
    std::vector<bf16> first;
    in_every_order([&] {
      const std::vector<bf16> out = decoded<T, D>(batch, chunk);
      EXPECT_LT(largest_error(out, expected), kTolerance);
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bits(out, first));
      EXPECT_EQ(emulator::banks.load_matrix.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.copy_async.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.store.extra_cycles, 0);
      EXPECT_EQ(emulator::banks.load.extra_cycles, 0);
    });
    if (!other_split.empty()) {
      EXPECT_LT(largest_error(first, doubles(other_split)), kTolerance);
    }
    other_split = first;
  }
}

// A page each; a key of a fifth tile of 16, which is a second of the first warp's; more tiles than the ring
// of 3, 4 or 7 stages holds (4 warps x 16 keys x 7 = 448).
TEST(Decode, Bf16OfHeads128) {
  agrees<bf16, 128>({1, 16, 65, 333}, 4, 2, 16, {kWhole, 64});
}
TEST(Decode, Bf16OfHeads64) {
  agrees<bf16, 64>({15, 17, 301}, 6, 2, 16, {kWhole, 80});
}
TEST(Decode, Fp8OfHeads128) {
  agrees<fp8, 128>({1, 16, 65, 333}, 4, 2, 16, {kWhole, 64});
}
TEST(Decode, Fp8OfHeads64) {
  agrees<fp8, 64>({33, 530}, 6, 2, 16, {kWhole, 176});
}

// Rows 8 to 15 of the mma tile are used from 9 heads on; one head leaves 15 rows empty.
TEST(Decode, GroupsOf1To16) {
  for (const std::int32_t group : {1, 2, 5, 8, 9, 16}) {
    SCOPED_TRACE(group);
    agrees<bf16, 64>({40}, 2 * group, 2, 16, {16});
    agrees<fp8, 64>({40}, group, 1, 16, {kWhole});
  }
}

TEST(Decode, PagesOf64AndARequestWithoutTokens) {
  const std::vector<std::int32_t> lengths{0, 130, 0, 64};
  agrees<bf16, 64>(lengths, 4, 4, 64, {kWhole, 64});
  const auto batch = decode_batch<bf16>(lengths, 4, 4, 64, 64);
  for (const std::int32_t chunk : {kWhole, 64}) {
    const std::vector<bf16> out = decoded<bf16, 64>(batch, chunk);
    for (std::size_t i = 0; i < 4 * 64; ++i) EXPECT_EQ(out[i].bits, 0) << i;
  }
}

// One key whose score towers over the others stands in the last chunk, then in the first: what was summed
// before or after it vanishes.
TEST(Decode, ChunksOfVeryDifferentScores) {
  for (const std::int32_t towering : {0, 95}) {
    auto batch = decode_batch<bf16>({96}, 1, 1, 64, 16);
    const auto at = static_cast<std::size_t>(batch.kv().row(batch.kv().slot(0, towering), 0));
    for (std::size_t d = 0; d < 64; ++d) batch.k[at + d] = to_bf16(16 * to_float(batch.q[d]));
    const auto expected = reference_attention(batch.kv(), batch.q, batch.q_start, 1, batch.scale);
    for (const std::int32_t chunk : {kWhole, 32})
      EXPECT_LT(largest_error(decoded<bf16, 64>(batch, chunk), expected), kTolerance);
  }
}

TEST(Decode, TakesTheChosenSplit) {
  const auto batch = decode_batch<bf16>({700, 20}, 2, 1, 64, 16);
  const DecodeSplit split = choose_split({batch.lengths, 1, 16, 4});
  EXPECT_GT(split.splits, 1);
  const auto expected = reference_attention(batch.kv(), batch.q, batch.q_start, 2, batch.scale);
  EXPECT_LT(largest_error(decoded<bf16, 64>(batch, split.chunk_tokens), expected), kTolerance);
}

// 300 tokens x 8 KV heads x 128 x (K, V) x 2 bytes; 32 heads x 4 FLOP each.
TEST(Decode, CountsWhatIsAskedFor) {
  const std::vector<std::int32_t> lengths{100, 0, 200};
  EXPECT_EQ(decode_bytes(lengths, 8, 128, 2), 1'228'800);
  EXPECT_EQ(decode_flops(lengths, 32, 128), 4'915'200);
}

TEST(Decode, RefusesWhatNoKernelIsMadeFor) {
  const DecodeOutput good{nullptr, nullptr, nullptr, 1, 8, 1, 128};
  EXPECT_NO_THROW(check_decode(good, 1, 128, 4));
  const auto message = [&](auto change, std::int32_t kv_heads, std::int32_t head_dim,
                           std::int32_t page_shift) {
    DecodeOutput to = good;
    change(to);
    try {
      check_decode(to, kv_heads, head_dim, page_shift);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto nothing = [](DecodeOutput&) {};
  EXPECT_EQ(message(nothing, 1, 96, 4), "decode: head_dim 96; expected 64 or 128");
  EXPECT_EQ(message(nothing, 3, 128, 4), "decode: 8 heads with 3 KV heads; expected 1 to 16 times as many");
  EXPECT_EQ(message([](DecodeOutput& to) { to.heads = 17; }, 1, 128, 4),
            "decode: 17 heads with 1 KV heads; expected 1 to 16 times as many");
  EXPECT_EQ(message(nothing, 1, 128, 3), "decode: pages of 8 tokens; expected at least 16");
  EXPECT_EQ(message(nothing, 1, 128, 8), "decode: chunks of 128 tokens; expected whole pages of 256");
  EXPECT_EQ(message([](DecodeOutput& to) { to.chunk_tokens = 24; }, 1, 128, 4),
            "decode: chunks of 24 tokens; expected whole pages of 16");
  EXPECT_EQ(message([](DecodeOutput& to) { to.requests = 65536; }, 1, 128, 4),
            "decode: 65536 requests in 1 splits; expected at most 65535 of each");
  EXPECT_EQ(message([](DecodeOutput& to) { to.splits = 2; }, 1, 128, 4),
            "decode: 2 splits without room for parts");
}

}  // namespace
}  // namespace pdsim::kernels
