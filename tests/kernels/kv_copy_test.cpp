// Theory of the KV copy. A cache of P pages of T tokens, H heads, B bytes a vector, regions r, holds the
// vector (r, page, token in page, head) at byte
//   NHD  (((r P + page) T + token) H + head) B
//   HND  (((r P + page) H + head) T + token) B
// After a copy of n tokens through two page tables, the vector of every region, token and head that both
// ranks hold is the same in both caches, and no other byte of the target has changed. That is the whole
// contract, for every pair of layouts, page sizes and ranks; the reference below is those two formulas and
// four loops.
//
// Runs are as long as both layouts allow: bytes of a run is, for whole caches of equal pages,
//   NHD to NHD  T H B      HND to HND  T B      between them  B      and between ranks of h and H heads, NHD:
//   h B
#include "kernels/kv_copy.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

enum class Kind { nhd, hnd };
using Order = emulator::Order;

/// A rank's cache and its page table.
struct Cache {
  Kind kind = Kind::nhd;
  int page_tokens = 4, first_head = 0, heads = 4;
  std::vector<std::int32_t> pages;  ///< empty: in order
  int pages_held = 0;
};

struct Case {
  Cache from, to;
  int tokens = 0, regions = 2;
  std::size_t head_bytes = 32;
};

std::size_t size_of(const Cache& c, const Case& test) {
  return static_cast<std::size_t>(test.regions * c.pages_held * c.page_tokens * c.heads) * test.head_bytes;
}

std::size_t offset_of(const Cache& c, const Case& test, int region, int token, int head) {
  const int in_order = token / c.page_tokens, slot = token % c.page_tokens, local = head - c.first_head;
  const int page =
      region * c.pages_held + (c.pages.empty() ? in_order : c.pages[static_cast<std::size_t>(in_order)]);
  const int vector = c.kind == Kind::nhd ? (page * c.page_tokens + slot) * c.heads + local
                                         : (page * c.heads + local) * c.page_tokens + slot;
  return static_cast<std::size_t>(vector) * test.head_bytes;
}

/// Bytes that begin at a multiple of 16, as GPU allocations do.
struct Memory {
  std::vector<Vec16> storage;
  explicit Memory(std::size_t bytes) : storage(bytes / 16) {}
  std::uint8_t* data() { return reinterpret_cast<std::uint8_t*>(storage.data()); }
};

KvLayout layout_of(const Cache& c, const Case& test, Memory& memory) {
  const auto make = c.kind == Kind::nhd ? nhd : hnd;
  return make(memory.data(), c.pages.empty() ? nullptr : c.pages.data(), c.pages_held, c.page_tokens,
              c.first_head, c.heads, static_cast<std::int64_t>(test.head_bytes));
}

/// Whole pages in a shuffled, gapped order, as a block pool hands them out.
std::vector<std::int32_t> scattered(int pages, int held, std::uint32_t seed) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(held));
  for (int i = 0; i < held; ++i) all[static_cast<std::size_t>(i)] = i;
  for (std::size_t i = all.size(); i > 1; --i) {
    seed = seed * 1664525u + 1013904223u;
    std::swap(all[i - 1], all[seed % i]);
  }
  all.resize(static_cast<std::size_t>(pages));
  return all;
}

Cache paged(Kind kind, int page_tokens, int tokens, std::uint32_t seed, int first_head = 0, int heads = 4) {
  const int pages = (tokens + page_tokens - 1) / page_tokens, held = pages + 3;
  return {kind, page_tokens, first_head, heads, scattered(pages, held, seed), held};
}

Cache staging(int page_tokens, int tokens, int heads = 4) {
  return {Kind::nhd, page_tokens, 0, heads, {}, (tokens + page_tokens - 1) / page_tokens};
}

/// Copies on the emulator and holds the whole target against the reference. `untouched` what the target held.
void expect_copied(const Case& test, unsigned blocks, unsigned threads, const std::string& what) {
  Memory source(size_of(test.from, test)), target(size_of(test.to, test));
  for (std::size_t i = 0; i < size_of(test.from, test); ++i)
    source.data()[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
  std::vector<std::uint8_t> expected(size_of(test.to, test));
  for (std::size_t i = 0; i < expected.size(); ++i)
    expected[i] = target.data()[i] = static_cast<std::uint8_t>(i * 40503u >> 8);

  const int first = std::max(test.from.first_head, test.to.first_head);
  const int end = std::min(test.from.first_head + test.from.heads, test.to.first_head + test.to.heads);
  for (int region = 0; region < test.regions; ++region) {
    for (int token = 0; token < test.tokens; ++token) {
      for (int head = first; head < end; ++head) {
        std::copy_n(source.data() + offset_of(test.from, test, region, token, head), test.head_bytes,
                    expected.data() + offset_of(test.to, test, region, token, head));
      }
    }
  }
  const KvCopy copy = make_copy(layout_of(test.from, test, source), layout_of(test.to, test, target),
                                test.tokens, test.regions);
  launch(kv_copy, Launch{.grid = {blocks}, .block = {threads}}, copy);
  const auto differs = std::mismatch(expected.begin(), expected.end(), target.data());
  EXPECT_TRUE(differs.first == expected.end())
      << what << ": byte " << differs.first - expected.begin() << " of " << expected.size();
}

void expect_copied_always(const Case& test, const std::string& what) {
  for (const Order order : {Order::ascending, Order::descending, Order::random}) {
    emulator::settings = {order, 7};
    expect_copied(test, 2, 64, what);
  }
  emulator::settings = {};
  expect_copied(test, 1, 32, what + ", one warp");
  expect_copied(test, 5, 96, what + ", more threads than runs");
}

TEST(KvCopy, EveryPairOfLayoutsAndPageSizes) {
  for (const Kind from : {Kind::nhd, Kind::hnd}) {
    for (const Kind to : {Kind::nhd, Kind::hnd}) {
      for (const int from_page : {1, 4, 6}) {
        for (const int to_page : {1, 4, 8}) {
          for (const int tokens : {1, 4, 11, 24}) {
            expect_copied_always({paged(from, from_page, tokens, 1), paged(to, to_page, tokens, 2), tokens},
                                 std::to_string(int(from)) + std::to_string(int(to)) + " pages of " +
                                     std::to_string(from_page) + " and " + std::to_string(to_page) + ", " +
                                     std::to_string(tokens) + " tokens");
          }
        }
      }
    }
  }
}

TEST(KvCopy, GatherScatterAndBlockCopyOfALongRun) {
  // The last page is half full. A page of 8 x 4 vectors is 1, 7, 9 and 72 times what a warp moves at once, so
  // that four loads end short of a run, at its end and beyond it.
  constexpr int kTokens = 20, kPage = 8;
  for (const std::size_t head_bytes :
       {std::size_t{16}, std::size_t{112}, std::size_t{144}, std::size_t{1152}}) {
    const Cache cache = paged(Kind::nhd, kPage, kTokens, 3), other = paged(Kind::nhd, kPage, kTokens, 4);
    expect_copied_always({cache, staging(kPage, kTokens), kTokens, 3, head_bytes}, "gather");
    expect_copied_always({staging(kPage, kTokens), cache, kTokens, 3, head_bytes}, "scatter");
    expect_copied_always({cache, other, kTokens, 3, head_bytes}, "block copy");
  }
}

// Every rank of the source gives what it has to every rank of the target that shares a head with it: after
// all of those, each target rank holds all its heads.
void reshard(int heads, int from_ranks, int to_ranks, Kind from, Kind to) {
  const auto rank = [heads](int i, int ranks) {
    const int held = std::max(heads / ranks, 1);
    return std::pair(i * heads / ranks, held);  // more ranks than heads: neighbours hold copies
  };
  int copies = 0;
  for (int i = 0; i < from_ranks; ++i) {
    for (int j = 0; j < to_ranks; ++j) {
      const auto [from_first, from_heads] = rank(i, from_ranks);
      const auto [to_first, to_heads] = rank(j, to_ranks);
      if (from_first >= to_first + to_heads || to_first >= from_first + from_heads) continue;
      ++copies;
      expect_copied(
          {paged(from, 4, 10, 5, from_first, from_heads), paged(to, 4, 10, 6, to_first, to_heads), 10}, 2, 64,
          "rank " + std::to_string(i) + " to " + std::to_string(j));
    }
  }
  EXPECT_EQ(copies, std::max(from_ranks, to_ranks));
}

TEST(KvCopy, TensorParallelReshard) {
  for (const Kind from : {Kind::nhd, Kind::hnd}) {
    for (const Kind to : {Kind::nhd, Kind::hnd}) {
      reshard(8, 4, 2, from, to);
      reshard(8, 2, 8, from, to);
      reshard(4, 2, 8, from, to);  // four heads on eight ranks
      reshard(8, 1, 4, from, to);
    }
  }
}

TEST(KvCopy, NothingIsCopiedOfNoTokens) {
  expect_copied({paged(Kind::nhd, 4, 4, 1), paged(Kind::hnd, 4, 4, 2), 0}, 2, 64, "no tokens");
}

// What both caches of a case have in one piece.
std::int64_t run_bytes(const Case& test) {
  Memory none(16);
  return make_copy(layout_of(test.from, test, none), layout_of(test.to, test, none), test.tokens,
                   test.regions)
      .run_bytes();
}

TEST(KvCopy, RunsAreAsLongAsBothLayoutsAllow) {
  const auto between = [](Kind from, Kind to, int from_page, int to_page, int to_heads) {
    return run_bytes({paged(from, from_page, 32, 1), paged(to, to_page, 32, 2, 0, to_heads), 32});
  };
  EXPECT_EQ(between(Kind::nhd, Kind::nhd, 8, 8, 4), 8 * 4 * 32);
  EXPECT_EQ(between(Kind::hnd, Kind::hnd, 8, 8, 4), 8 * 32);
  EXPECT_EQ(between(Kind::nhd, Kind::hnd, 8, 8, 4), 32);
  EXPECT_EQ(between(Kind::nhd, Kind::nhd, 8, 8, 2), 2 * 32);
  EXPECT_EQ(between(Kind::hnd, Kind::hnd, 8, 8, 2), 8 * 32);
  EXPECT_EQ(between(Kind::nhd, Kind::nhd, 8, 12, 4), 4 * 4 * 32);  // the greatest common divisor of the pages
  // One head: the two layouts are the same.
  EXPECT_EQ(run_bytes({paged(Kind::nhd, 8, 32, 1, 2, 1), paged(Kind::hnd, 8, 32, 2, 2, 1), 32}), 8 * 32);
}

// n / d for every 31-bit n: wrong, if anywhere, next to a multiple of d, and most likely next to the last.
TEST(KvCopy, DividesByMultiplication) {
  constexpr std::uint32_t kMost = 0x7fffffff;
  for (const std::uint32_t d : {1u, 2u, 3u, 7u, 16u, 48u, 641u, 65537u, 0x40000000u, 0x40000001u, kMost}) {
    const Divisor divisor = static_cast<std::int32_t>(d);
    for (const std::uint32_t multiple : {0u, d, kMost / d / 2 * d, kMost / d * d}) {
      EXPECT_EQ(divisor.quotient(multiple), multiple / d) << multiple << " / " << d;
      EXPECT_EQ(divisor.quotient(std::max(multiple, 1u) - 1), (std::max(multiple, 1u) - 1) / d);
    }
    EXPECT_EQ(divisor.quotient(kMost), kMost / d) << d;
  }
}

TEST(KvCopy, ShortRunsShareAWarp) {
  EXPECT_EQ(kv_copy_lanes(16), 1u);
  EXPECT_EQ(kv_copy_lanes(48), 4u);
  EXPECT_EQ(kv_copy_lanes(256), 16u);
  EXPECT_EQ(kv_copy_lanes(272), 32u);
  EXPECT_EQ(kv_copy_lanes(1 << 20), 32u);
}

std::string refusal(const Case& test, std::size_t shift = 0) {
  Memory none(32);
  try {
    KvLayout from = layout_of(test.from, test, none), to = layout_of(test.to, test, none);
    to.base += shift;
    make_copy(from, to, test.tokens, test.regions);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(KvCopy, WhatCannotBeCopiedIsRefused) {
  const Cache all = paged(Kind::nhd, 4, 8, 1), low = paged(Kind::nhd, 4, 8, 1, 0, 2),
              high = paged(Kind::nhd, 4, 8, 1, 2, 2);
  EXPECT_EQ(refusal({all, all, 8}), "");
  EXPECT_NE(refusal({all, all, 8, 2, 24}).find("a vector is 24 bytes; expected a multiple of 16"),
            std::string::npos);
  EXPECT_NE(refusal({all, all, 8}, 8).find("expected a multiple of 16"), std::string::npos);
  EXPECT_NE(refusal({low, high, 8}).find("no head is in both ranks"), std::string::npos);
  EXPECT_NE(refusal({all, all, 1 << 28, 4}).find("31 bits"), std::string::npos);
  Memory none(16);
  EXPECT_THROW(
      make_copy(nhd(none.data(), nullptr, 1, 4, 0, 4, 32), nhd(none.data(), nullptr, 1, 4, 0, 4, 64), 4, 1),
      InputError);
}

}  // namespace
}  // namespace pdsim::kernels
