// Who reads what from whom, and who writes it, against heads counted one by one; and what posting costs,
// against the published points that its constants were drawn through.
#include "sim/transfer/layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

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

template <class F>
void for_each_pair(F f) {
  for (const std::int32_t kv_heads : {1, 2, 4, 8, 16}) {
    for (const std::int32_t prefill_tp : {1, 2, 4, 8, 16}) {
      for (const std::int32_t decode_tp : {1, 2, 4, 8, 16}) {
        SCOPED_TRACE(testing::Message()
                     << kv_heads << " heads, prefill TP " << prefill_tp << ", decode TP " << decode_tp);
        f(kv_heads, prefill_tp, decode_tp);
      }
    }
  }
}

struct Part {
  std::int32_t rank, source;
};

/// What each source rank writes.
std::vector<std::vector<Part>> writes(const Layout& layout, std::int32_t source_tp) {
  std::vector<std::vector<Part>> out(static_cast<std::size_t>(source_tp));
  for (std::int32_t rank = 0; rank < layout.ranks; ++rank) {
    for (std::int32_t source = 0; source < layout.sources; ++source) {
      out.at(static_cast<std::size_t>(source_rank(layout, source_tp, rank, source)))
          .push_back({rank, source});
    }
  }
  return out;
}

/// 0, 1, ..., n - 1.
std::vector<std::int32_t> counted(std::int32_t n) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// Each decode rank must get each of its heads exactly once. It reads from a prefill rank what both hold.
// So over its sources the intersections are disjoint, their union is its heads, and each is the same share
// 1 / sources of them, which is what makes parts of equal bytes right.
TEST(KvLayout, EveryHeadIsReadExactlyOnce) {
  for_each_pair([](std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp) {
    const Layout layout = kv_layout(kv_heads, prefill_tp, decode_tp, 64, 128.0);
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
  });
}

// Bytes: the decode side's own KV, over all of its ranks; replicated heads are read by each of their ranks.
TEST(KvLayout, BytesAreThoseOfTheDecodeSide) {
  constexpr std::int32_t kHeads = 8;
  constexpr double kHeadBytes = 2 * 80 * 128 * 2;  // K and V, 80 layers, head_dim 128, bf16
  for (const std::int32_t prefill_tp : {1, 2, 4, 8, 16}) {
    for (const std::int32_t decode_tp : {1, 2, 4, 8, 16}) {
      const double per_rank = static_cast<double>(std::max(1, kHeads / decode_tp)) * kHeadBytes;
      const Layout layout = kv_layout(kHeads, prefill_tp, decode_tp, 160, per_rank);
      EXPECT_EQ(layout.bytes_per_token * layout.ranks, std::max(kHeads, decode_tp) * kHeadBytes);
    }
  }
}

// MLA: the latent is on every rank, so no head count matters: one source each, whole blocks, and decode
// ranks spread over the prefill ranks.
TEST(KvLayout, LatentIsReadWholeFromOneRank) {
  for (const std::int32_t prefill_tp : {1, 4, 8}) {
    for (const std::int32_t decode_tp : {1, 4, 8}) {
      const Layout layout = kv_layout(0, prefill_tp, decode_tp, 61, 1152);
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
  const Layout same = kv_layout(8, 8, 8, 160, 512);
  EXPECT_EQ(descriptors(same, Op::read, 1, 118), 160);
  EXPECT_EQ(descriptors(same, Op::read, 118, 118), 18'880);
  EXPECT_EQ(descriptors(same, Op::read, 7, 118), 160 * 7);
  EXPECT_EQ(descriptors(kv_layout(8, 8, 4, 160, 1024), Op::read, 1, 118), 160 * 2 * 118);
  EXPECT_EQ(descriptors(kv_layout(8, 4, 8, 160, 512), Op::read, 1, 118), 160 * 118);
  EXPECT_EQ(descriptors(kv_layout(8, 16, 8, 160, 512), Op::read, 1, 118), 160);
  EXPECT_EQ(descriptors(kv_layout(0, 8, 4, 61, 1152), Op::read, 1, 118),
            61);  // MLA: GLM's 101 regions were 101
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
  const Layout layout = kv_layout(8, 8, 8, 160, 512);
  const TransferBackend& libfabric = kTransferBackends[0];
  ASSERT_EQ(libfabric.name, "libfabric");
  const auto ms = [&](const TransferBackend& b, std::int64_t n) {
    return to_ms(posting_time(layout, Op::read, b.post_fixed, b.post_per_descriptor, n));
  };
  EXPECT_NEAR(ms(libfabric, 160), 0.46, 0.0046);
  EXPECT_NEAR(ms(libfabric, 18'880), 46, 0.46);
  ASSERT_EQ(kTransferBackends[1].name, "ucx");
  EXPECT_NEAR(ms(kTransferBackends[1], 1'785), 6.7, 0.067);
}

// Each source is a transfer of its own: its fixed part is paid for each.
TEST(Posting, FixedPartForEachSource) {
  EXPECT_EQ(posting_time(kv_layout(8, 8, 8, 160, 512), Op::read, 1000, 10, 160), 1000 + 1600);
  EXPECT_EQ(posting_time(kv_layout(8, 8, 2, 160, 512), Op::read, 1000, 10, 640), 4 * 1000 + 6400);
}

// Seen from the other side, nothing differs but who posts. Over all its targets a source rank writes each
// head that it and a destination rank are to share, once for each destination rank that holds it; a source
// rank whose heads others write as well may have nothing to do.
TEST(KvLayout, EveryHeadIsWrittenExactlyOnce) {
  for_each_pair([](std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp) {
    const Layout layout = kv_layout(kv_heads, prefill_tp, decode_tp, 64, 128.0);
    const auto written = writes(layout, prefill_tp);
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> times;  // (destination rank, head)
    for (std::int32_t from = 0; from < prefill_tp; ++from) {
      for (const Part& part : written[static_cast<std::size_t>(from)]) {
        const std::set<std::int32_t> wanted = heads_of(part.rank, decode_tp, kv_heads);
        for (const std::int32_t head : heads_of(from, prefill_tp, kv_heads)) {
          if (wanted.contains(head)) ++times[{part.rank, head}];
        }
      }
    }
    std::size_t all = 0;
    for (std::int32_t rank = 0; rank < decode_tp; ++rank) all += heads_of(rank, decode_tp, kv_heads).size();
    EXPECT_EQ(times.size(), all);
    for (const auto& [what, n] : times) EXPECT_EQ(n, 1) << "rank " << what.first << " head " << what.second;
  });
}

// A rank posts to one remote rank after the other. So the turns of a rank that posts anything are 0 to
// remotes - 1, each once: a source rank's writes, a destination rank's reads.
TEST(KvLayout, APostingRankTakesEachTurnOnce) {
  for_each_pair([](std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp) {
    for (const std::int32_t heads : {kv_heads, 0}) {
      const Layout layout = kv_layout(heads, prefill_tp, decode_tp, 64, 128.0);
      std::int32_t posters = 0;
      for (const std::vector<Part>& parts : writes(layout, prefill_tp)) {
        if (parts.empty()) continue;
        ++posters;
        std::vector<std::int32_t> turns;
        std::set<std::int32_t> ranks;
        for (const Part& part : parts) {
          turns.push_back(turn_of(layout, Op::write, part.rank, part.source));
          ranks.insert(part.rank);
        }
        std::sort(turns.begin(), turns.end());
        EXPECT_EQ(turns, counted(layout.remotes(Op::write)));
        EXPECT_EQ(ranks.size(), parts.size()) << "a rank twice";
      }
      EXPECT_EQ(posters * layout.remotes(Op::write), layout.ranks * layout.sources);
      for (std::int32_t rank = 0; rank < decode_tp; ++rank) {
        std::vector<std::int32_t> turns;
        std::set<std::int32_t> from;
        for (std::int32_t source = 0; source < layout.sources; ++source) {
          turns.push_back(turn_of(layout, Op::read, rank, source));
          from.insert(source_rank(layout, prefill_tp, rank, source));
        }
        EXPECT_EQ(turns, counted(layout.remotes(Op::read)));
        EXPECT_EQ(from.size(), static_cast<std::size_t>(layout.sources)) << "a rank twice";
      }
    }
  });
}

// MLA: every decode rank gets the latent, whoever posts. With fewer prefill ranks each writes to as many
// decode ranks as it takes; with more, some write nothing.
TEST(KvLayout, LatentIsWrittenToEveryRank) {
  for (const std::int32_t prefill_tp : {1, 2, 4, 8}) {
    for (const std::int32_t decode_tp : {1, 2, 4, 8}) {
      const Layout layout = kv_layout(0, prefill_tp, decode_tp, 61, 1152);
      EXPECT_EQ(layout.targets, std::max(1, decode_tp / prefill_tp));
      std::set<std::int32_t> reached;
      std::int32_t posters = 0;
      for (const std::vector<Part>& parts : writes(layout, prefill_tp)) {
        posters += parts.empty() ? 0 : 1;
        for (const Part& part : parts) EXPECT_TRUE(reached.insert(part.rank).second);
      }
      EXPECT_EQ(reached.size(), static_cast<std::size_t>(decode_tp));
      EXPECT_EQ(posters, std::min(prefill_tp, decode_tp));
    }
  }
}

// The parts are the same whoever posts them, so all descriptors together are: what one rank posts, times the
// ranks that do. With the same TP on both sides each rank posts to one, either way.
TEST(Descriptors, AsManyWrittenAsRead) {
  for_each_pair([](std::int32_t kv_heads, std::int32_t prefill_tp, std::int32_t decode_tp) {
    for (const std::int32_t heads : {kv_heads, 0}) {
      const Layout layout = kv_layout(heads, prefill_tp, decode_tp, 160, 512);
      std::int64_t writers = 0;
      for (const std::vector<Part>& parts : writes(layout, prefill_tp)) writers += parts.empty() ? 0 : 1;
      for (const std::int32_t runs : {1, 7, 118}) {
        const std::int64_t read = descriptors(layout, Op::read, runs, 118) * decode_tp;
        EXPECT_EQ(descriptors(layout, Op::write, runs, 118) * writers, read);
        EXPECT_EQ(read, std::int64_t{160} * layout.ranks * layout.sources * (layout.mergeable ? runs : 118));
      }
      if (prefill_tp == decode_tp) {
        EXPECT_EQ(layout.remotes(Op::read), 1);
        EXPECT_EQ(layout.remotes(Op::write), 1);
        EXPECT_EQ(descriptors(layout, Op::write, 7, 118), descriptors(layout, Op::read, 7, 118));
      }
    }
  });
}

// Each target is a transfer of its own, as each source is. 8 heads from 2 ranks to 8: four targets, whose
// slices of a block are not whole blocks: 160 regions x 4 x 5 blocks.
TEST(Posting, FixedPartForEachTarget) {
  const Layout layout = kv_layout(8, 2, 8, 160, 512);
  EXPECT_EQ(layout.targets, 4);
  EXPECT_EQ(descriptors(layout, Op::write, 1, 5), 3200);
  EXPECT_EQ(descriptors(layout, Op::read, 1, 5), 800);
  EXPECT_EQ(posting_time(layout, Op::write, 1000, 10, 3200), 4 * 1000 + 32'000);
  EXPECT_EQ(posting_time(layout, Op::read, 1000, 10, 800), 1000 + 8000);
  EXPECT_EQ(posting_time(kv_layout(8, 8, 8, 160, 512), Op::write, 1000, 10, 160), 1000 + 1600);
  EXPECT_EQ(posting_time(kv_layout(8, 8, 2, 160, 512), Op::write, 1000, 10, 160), 1000 + 1600);
  EXPECT_EQ(posting_time(kv_layout(0, 2, 8, 61, 1152), Op::write, 1000, 10, 244), 4 * 1000 + 2440);
}

}  // namespace
}  // namespace pdsim
