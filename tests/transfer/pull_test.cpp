// Who reads what from whom in a pull, against heads counted one by one; and what posting costs, against
// the two published points that its constants were drawn through.
#include "sim/transfer/pull.hpp"

#include <gtest/gtest.h>

#include <set>

#include "sim/scenario/names.hpp"
#include "sim/serving/block_pool.hpp"

namespace pdsim {
namespace {

/// KV heads of one rank: an equal share, or one head that neighbouring ranks hold as well.
std::set<std::int32_t> heads_of(std::int32_t rank, std::int32_t tp, std::int32_t kv_heads) {
  std::set<std::int32_t> heads;
  if (tp >= kv_heads) {
    heads.insert(rank * kv_heads / tp);
  } else {
    for (std::int32_t h = rank * kv_heads / tp; h < (rank + 1) * kv_heads / tp; ++h) heads.insert(h);
  }
  return heads;
}

// Each decode rank must get each of its heads exactly once. It reads from a prefill rank what both hold.
// So over its sources the intersections are disjoint, their union is its heads, and each is the same share
// 1 / sources of them, which is what makes parts of equal bytes right.
TEST(PullLayout, EveryHeadIsReadExactlyOnce) {
  for (const std::int32_t kv_heads : {1, 2, 4, 8, 16}) {
    for (const std::int32_t prefill_tp : {1, 2, 4, 8, 16}) {
      for (const std::int32_t decode_tp : {1, 2, 4, 8, 16}) {
        SCOPED_TRACE(testing::Message()
                     << kv_heads << " heads, prefill TP " << prefill_tp << ", decode TP " << decode_tp);
        const PullLayout layout = pull_layout(kv_heads, prefill_tp, decode_tp, 64, 128.0);
        ASSERT_EQ(layout.ranks, decode_tp);
        ASSERT_GE(layout.sources, 1);
        for (std::int32_t rank = 0; rank < decode_tp; ++rank) {
          const std::set<std::int32_t> wanted = heads_of(rank, decode_tp, kv_heads);
          std::set<std::int32_t> got;
          for (std::int32_t source = 0; source < layout.sources; ++source) {
            const std::int32_t from = source_rank(layout, prefill_tp, rank, source);
            ASSERT_GE(from, 0);
            ASSERT_LT(from, prefill_tp);
            std::size_t shared = 0;
            for (const std::int32_t head : heads_of(from, prefill_tp, kv_heads)) {
              if (!wanted.contains(head)) continue;
              ++shared;
              EXPECT_TRUE(got.insert(head).second) << "head " << head << " twice";
            }
            EXPECT_EQ(shared * static_cast<std::size_t>(layout.sources), wanted.size());
          }
          EXPECT_EQ(got, wanted);
        }
        // Slices of a block are the whole block on both sides only where both hold the same heads.
        EXPECT_EQ(layout.mergeable,
                  heads_of(0, prefill_tp, kv_heads).size() == heads_of(0, decode_tp, kv_heads).size());
      }
    }
  }
}

// Bytes: the decode side's own KV, over all of its ranks; replicated heads are read by each of their ranks.
TEST(PullLayout, BytesAreThoseOfTheDecodeSide) {
  constexpr std::int32_t kHeads = 8;
  constexpr double kHeadBytes = 2 * 80 * 128 * 2;  // K and V, 80 layers, head_dim 128, bf16
  for (const std::int32_t prefill_tp : {1, 2, 4, 8, 16}) {
    for (const std::int32_t decode_tp : {1, 2, 4, 8, 16}) {
      const double per_rank = static_cast<double>(std::max(1, kHeads / decode_tp)) * kHeadBytes;
      const PullLayout layout = pull_layout(kHeads, prefill_tp, decode_tp, 160, per_rank);
      EXPECT_EQ(layout.bytes_per_token * layout.ranks, std::max(kHeads, decode_tp) * kHeadBytes);
    }
  }
}

// MLA: the latent is on every rank, so no head count matters: one source each, whole blocks, and decode
// ranks spread over the prefill ranks.
TEST(PullLayout, LatentIsReadWholeFromOneRank) {
  for (const std::int32_t prefill_tp : {1, 4, 8}) {
    for (const std::int32_t decode_tp : {1, 4, 8}) {
      const PullLayout layout = pull_layout(0, prefill_tp, decode_tp, 61, 1152);
      EXPECT_EQ(layout.sources, 1);
      EXPECT_TRUE(layout.mergeable);
      EXPECT_EQ(layout.bytes_per_token, 1152);
      std::set<std::int32_t> from;
      for (std::int32_t rank = 0; rank < decode_tp; ++rank) {
        from.insert(source_rank(layout, prefill_tp, rank, 0));
      }
      EXPECT_EQ(from.size(), static_cast<std::size_t>(std::min(prefill_tp, decode_tp)));
      EXPECT_LT(*from.rbegin(), prefill_tp);
    }
  }
}

// regions x runs (facts: llama-70b, 80 layers of K and V, 118 blocks: 160 whole, 18,880 in pieces), and
// regions x blocks for each source where heads are cut differently.
TEST(Descriptors, RegionsTimesRuns) {
  const PullLayout same = pull_layout(8, 8, 8, 160, 512);
  EXPECT_EQ(descriptors(same, 1, 118), 160);
  EXPECT_EQ(descriptors(same, 118, 118), 18'880);
  EXPECT_EQ(descriptors(same, 7, 118), 160 * 7);
  EXPECT_EQ(descriptors(pull_layout(8, 8, 4, 160, 1024), 1, 118), 160 * 2 * 118);
  EXPECT_EQ(descriptors(pull_layout(8, 4, 8, 160, 512), 1, 118), 160 * 118);
  EXPECT_EQ(descriptors(pull_layout(8, 16, 8, 160, 512), 1, 118), 160);
  EXPECT_EQ(descriptors(pull_layout(0, 8, 4, 61, 1152), 1, 118), 61);  // MLA: GLM's 101 regions were 101
}

// A run needs both sides: blocks in a row on one and every second on the other are all runs of one.
TEST(Descriptors, ARunIsConsecutiveOnBothSides) {
  BlockPool prefill(32, false), decode(32, false);
  const TableId p = prefill.open({});
  ASSERT_TRUE(prefill.allocate(p, 0, 8));
  std::vector<TableId> others, mine;
  std::vector<BlockId> scratch;
  const TableId whole = decode.open({});
  ASSERT_TRUE(decode.allocate(whole, 0, 8));
  EXPECT_EQ(common_runs(prefill, p, 0, decode, whole, 0, 8, scratch), 1);
  const TableId d = decode.open({}), between = decode.open({});
  ASSERT_TRUE(decode.allocate(d, 0, 1) && decode.allocate(between, 0, 1));
  for (int i = 1; i < 8; ++i) ASSERT_TRUE(decode.extend(d, 1) && decode.extend(between, 1));
  EXPECT_EQ(common_runs(prefill, p, 0, decode, d, 0, 8, scratch), 8);
  EXPECT_EQ(common_runs(prefill, p, 5, decode, d, 5, 1, scratch), 1);
}

// NIXL over libfabric on P5en: 460 us for 160 descriptors, 46 ms for 18,880 (vllm#35264, NIXL#1514). UCX:
// 6.7 ms for 1,785 (vllm#50913).
TEST(Posting, PassesThroughThePublishedPoints) {
  const PullLayout layout = pull_layout(8, 8, 8, 160, 512);
  const TransferBackend& libfabric = kTransferBackends[0];
  ASSERT_EQ(libfabric.name, "libfabric");
  const auto ms = [&](const TransferBackend& b, std::int64_t n) {
    return to_ms(posting_time(layout, b.post_fixed, b.post_per_descriptor, n));
  };
  EXPECT_NEAR(ms(libfabric, 160), 0.46, 0.0046);
  EXPECT_NEAR(ms(libfabric, 18'880), 46, 0.46);
  ASSERT_EQ(kTransferBackends[1].name, "ucx");
  EXPECT_NEAR(ms(kTransferBackends[1], 1'785), 6.7, 0.067);
}

// Each source is a transfer of its own: its fixed part is paid for each.
TEST(Posting, FixedPartForEachSource) {
  EXPECT_EQ(posting_time(pull_layout(8, 8, 8, 160, 512), 1000, 10, 160), 1000 + 1600);
  EXPECT_EQ(posting_time(pull_layout(8, 8, 2, 160, 512), 1000, 10, 640), 4 * 1000 + 6400);
}

// vLLM: a lease of 30 s is renewed by heartbeats every 5 s, each to at least 20 s from when it is seen.
TEST(Lease, FractionsOfItsDuration) {
  EXPECT_EQ(heartbeat_interval(30 * kSecond), 5 * kSecond);
  EXPECT_EQ(heartbeat_extension(30 * kSecond), 20 * kSecond);
}

}  // namespace
}  // namespace pdsim
