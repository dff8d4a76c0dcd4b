// Theory: the emulator is a GPU's block that keeps its rules more strictly than a GPU must. Each rule is
// broken here once, and is noticed by name; each is kept once, and nothing happens. Bank conflicts are those
// that arithmetic on 32 banks of 4 bytes gives.
#include "kernels/emulator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.cuh"
#include "tests/kernels/orders.hpp"

namespace pdsim::kernels {
namespace {

using emulator::Failure;
using emulator::Order;

constexpr unsigned kWarps = 4, kThreads = kWarps * 32;

unsigned thread() {
  return threadIdx.x;
}

// What a kernel of one block of four warps fails with; "" where it does not.
std::string failure(const std::function<void()>& kernel, std::size_t shared_bytes = 1024) {
  try {
    emulator::run({{1}, {kThreads}, shared_bytes}, kernel);
  } catch (const Failure& e) {
    return e.what();
  }
  return "";
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  return (text.find(part) != text.npos ? testing::AssertionSuccess() : testing::AssertionFailure())
         << "'" << text << "'";
}

TEST(Emulator, RunsEveryThreadOfEveryBlockOnce) {
  const Dim grid{3, 2, 2}, block{8, 4, 2};
  in_every_order([&] {
    std::vector<int> runs(3 * 2 * 2 * 64);
    emulator::run({grid, block}, [&] {
      EXPECT_EQ(gridDim.y, 2u);
      EXPECT_EQ(blockDim.x, 8u);
      const unsigned t = threadIdx.x + 8 * (threadIdx.y + 4 * threadIdx.z);
      const unsigned b = blockIdx.x + 3 * (blockIdx.y + 2 * blockIdx.z);
      barrier();
      ++runs[b * 64 + t];
    });
    EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](int n) { return n == 1; }));
  });
}

TEST(Emulator, SharedMemoryBeginsUnwrittenInEveryBlock) {
  int seen = 0;
  emulator::run({{3}, {32}, 64}, [&] {
    auto* shared = shared_memory<unsigned char>();
    seen += shared[threadIdx.x] == 0xCD;
    barrier();
    shared[threadIdx.x] = 0;
  });
  EXPECT_EQ(seen, 3 * 32);
}

TEST(Emulator, AMissingBarrierIsSeenInSomeOrder) {
  const auto neighbours = [](bool with_barrier) {
    bool right = true;
    in_every_order([&] {
      emulator::run({{1}, {kThreads}, kThreads * 4}, [&] {
        auto* shared = shared_memory<unsigned>();
        shared[thread()] = thread();
        if (with_barrier) barrier();
        const unsigned other = (thread() + 32) % kThreads;
        right = right && shared[other] == other;
      });
    });
    return right;
  };
  EXPECT_TRUE(neighbours(true));
  EXPECT_FALSE(neighbours(false));
}

// Between two barriers one warp may write what another has yet to read.
TEST(Emulator, OneWarpMayBeAWholeBarrierAhead) {
  bool right = true;
  in_every_order([&] {
    emulator::run({{1}, {kThreads}, 64}, [&] {
      auto* round = shared_memory<int>();
      for (int i = 0; i < 3; ++i) {
        if (thread() == 0) *round = i;
        barrier();  // and none after the reading
        right = right && *round == i;
      }
    });
  });
  EXPECT_FALSE(right);
}

TEST(Emulator, BarriersAreReachedByAll) {
  EXPECT_EQ(failure([] { barrier(); }), "");
  EXPECT_TRUE(contains(failure([] {
                         if (thread() != 5) barrier();
                       }),
                       "barrier"));
  EXPECT_TRUE(contains(failure([] {
                         if (thread() < 32) barrier();
                       }),
                       "barrier"));
  // Lanes of one warp at different places: nobody can go on, and it says who waits where.
  const std::string stuck = failure([] {
    if (thread() == 7) warp_barrier();
    barrier();
  });
  EXPECT_TRUE(contains(stuck, "no thread can go on"));
  EXPECT_TRUE(contains(stuck, "thread 7 warp_barrier"));
}

TEST(Emulator, WarpsAgreeOnTheirOperation) {
  EXPECT_TRUE(contains(failure([] {
                         if (thread() == 3) {
                           shuffle(1.0f, 0);
                         } else {
                           shuffle_xor(1.0f, 1);
                         }
                       }),
                       "shuffle while another lane of its warp is in shuffle_xor"));
  emulator::settings.order = Order::ascending;
  EXPECT_TRUE(contains(failure([] {
                         if (thread() % 32 != 0) shuffle(1, 0);
                       }),
                       "after a lane of its warp has ended"));
}

TEST(Emulator, AFailureNamesItsPlaceAndLeavesNothingBehind) {
  emulator::settings.order = Order::ascending;
  const auto run = [] {
    emulator::run({{2, 3}, {64}}, [] {
      barrier();
      if (blockIdx.x == 1 && blockIdx.y == 2 && threadIdx.x == 40) emulator::fail("as told");
      barrier();
    });
  };
  for (int again = 0; again < 2; ++again) {
    try {
      run();
      ADD_FAILURE() << "no failure";
    } catch (const Failure& e) {
      EXPECT_STREQ(e.what(), "block (1, 2, 0), thread 40: as told");
    }
    EXPECT_EQ(failure([] { barrier(); }), "");
  }
}

TEST(Emulator, NoticesAStackThatIsTooSmall) {
  EXPECT_TRUE(contains(failure([] {
                         volatile char large[280 << 10];
                         for (volatile char& c : large) c = 1;
                         barrier();
                       }),
                       "bytes of stack"));
}

TEST(Emulator, RefusesWhatAGpuWouldRefuse) {
  const auto refused = [](const Launch& launch) {
    try {
      emulator::run(launch, [] {});
    } catch (const Failure& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused({{1}, {1024}, 227 << 10}), "");
  EXPECT_TRUE(contains(refused({{1}, {48}}), "48 threads"));
  EXPECT_TRUE(contains(refused({{1}, {0}}), "0 threads"));
  EXPECT_TRUE(contains(refused({{1}, {2048}}), "2048 threads"));
  EXPECT_TRUE(contains(refused({{1}, {32}, (227 << 10) + 1}), "shared memory"));
  EXPECT_TRUE(contains(refused({{0}, {32}}), "grid"));
  EXPECT_TRUE(contains(refused({{1, 65536}, {32}}), "grid"));
  EXPECT_TRUE(contains(failure([] { emulator::run({{1}, {32}}, [] {}); }), "from within a kernel"));
}

// --- asynchronous copies ---

struct Sources {
  alignas(16) std::uint32_t words[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}};
};

TEST(Emulator, CopiesLandAtTheWaitThatCoversThem) {
  const Sources from;
  emulator::run({{1}, {32}, 32 * 48}, [&] {
    auto* to = shared_memory<std::uint32_t>() + thread() * 12;
    std::fill_n(to, 12, 0u);
    for (int i = 0; i < 3; ++i) {
      copy_async(to + 4 * i, from.words[i], true);
      copy_async_commit();
    }
    const auto landed = [&](int i) { return std::memcmp(to + 4 * i, from.words[i], 16) == 0; };
    const auto spoilt = [&](int i) { return to[4 * i] == 0xffffffffu && to[4 * i + 3] == 0xffffffffu; };
    EXPECT_TRUE(spoilt(0) && spoilt(1) && spoilt(2));
    copy_async_wait<2>();
    EXPECT_TRUE(landed(0) && spoilt(1) && spoilt(2));
    copy_async_wait<0>();
    EXPECT_TRUE(landed(1) && landed(2));
  });
}

TEST(Emulator, AnInvalidCopyIsZerosAndReadsNothing) {
  emulator::run({{1}, {32}, 512}, [] {
    auto* to = shared_memory<std::uint32_t>() + thread() * 4;
    copy_async(to, nullptr, false);
    copy_async_commit();
    copy_async_wait<0>();
    EXPECT_TRUE(std::all_of(to, to + 4, [](std::uint32_t x) { return x == 0; }));
  });
}

TEST(Emulator, CopiesKeepTheirRules) {
  const Sources from;
  const auto copy = [&](std::size_t to, std::size_t offset, bool commit, bool wait) {
    return failure([&, to, offset, commit, wait] {
      if (thread() != 0) return;
      copy_async(shared_memory<char>() + to, reinterpret_cast<const char*>(&from) + offset, true);
      if (commit) copy_async_commit();
      if (wait) copy_async_wait<0>();
    });
  };
  EXPECT_EQ(copy(1008, 0, true, true), "");
  EXPECT_TRUE(contains(copy(0, 0, true, false), "not waited for"));
  EXPECT_TRUE(contains(copy(0, 0, false, true), "not waited for"));
  EXPECT_TRUE(
      contains(copy(1016, 0, true, true), "copy_async at byte 1016 of shared memory, which has 1024"));
  EXPECT_TRUE(contains(copy(8, 0, true, true), "copy_async at byte 8"));
  EXPECT_TRUE(contains(copy(0, 4, true, true), "no multiple of 16"));
  EXPECT_TRUE(
      contains(failure([&] { copy_async(const_cast<Sources*>(&from), &from, true); }), "of shared memory"));
}

TEST(Emulator, MatrixRowsLieInSharedMemory) {
  const auto load = [](std::size_t at) {
    return failure([at] {
      std::uint32_t r[4];
      load_matrix(r, shared_memory<char>() + (thread() % 32 == 9 ? at : 0));
    });
  };
  EXPECT_EQ(load(1008), "");
  EXPECT_TRUE(contains(load(1012), "load_matrix at byte 1012"));
  EXPECT_TRUE(contains(load(1024), "at byte 1024 of shared memory"));
}

// --- bank conflicts ---

BankCounter stored(std::function<std::size_t(unsigned)> word_of) {
  emulator::banks = {};
  emulator::run({{1}, {32}, 32 << 10}, [&] {
    store_shared(shared_memory<std::uint32_t>() + word_of(thread()), thread());
    barrier();
  });
  EXPECT_EQ(emulator::banks.unmatched, 0);
  return emulator::banks.store;
}

TEST(Banks, AStrideOfWordsSharesBanksByItsFactorOfTwo) {
  for (const int stride : {1, 2, 4, 8, 16, 32, 3, 33, 12}) {
    const BankCounter counter = stored([&](unsigned lane) { return lane * static_cast<unsigned>(stride); });
    EXPECT_EQ(counter.phases, 1);
    EXPECT_EQ(counter.extra_cycles, std::min(32, stride & -stride) - 1) << stride;
  }
}

TEST(Banks, OneWordForAllIsNoConflict) {
  EXPECT_EQ(stored([](unsigned) { return std::size_t{77}; }).extra_cycles, 0);
}

TEST(Banks, EightLanesAtATimeMove16Bytes) {
  const auto counted = [](unsigned stride) {
    emulator::banks = {};
    emulator::run({{1}, {32}, 32 << 10}, [stride] {
      load_shared(shared_memory<Vec16>() + thread() * stride);
      barrier();
    });
    return emulator::banks.load;
  };
  EXPECT_EQ(counted(1).phases, 4);
  EXPECT_EQ(counted(1).extra_cycles, 0);
  EXPECT_EQ(counted(2).extra_cycles, 4);      // each bank twice in each phase
  EXPECT_EQ(counted(8).extra_cycles, 4 * 7);  // rows of 128 bytes: all in the same banks
}

TEST(Banks, RowsOf128BytesConflictInEveryMatrix) {
  const auto counted = [](bool turned) {
    emulator::banks = {};
    emulator::run({{1}, {32}, 32 * 128}, [turned] {
      std::uint32_t r[4];
      const unsigned row = thread();
      load_matrix(r, shared_memory<Vec16>() + row * 8 + (turned ? row % 8 : 0));
    });
    return emulator::banks.load_matrix;
  };
  EXPECT_EQ(counted(false).phases, 4);
  EXPECT_EQ(counted(false).extra_cycles, 4 * 7);
  EXPECT_EQ(counted(true).extra_cycles, 0);
}

TEST(Banks, LanesThatPartAreNotJudged) {
  emulator::banks = {};
  emulator::run({{1}, {32}, 1024}, [] {
    if (thread() < 10) store_shared(shared_memory<int>() + thread(), 1);
    barrier();
  });
  EXPECT_EQ(emulator::banks.unmatched, 10);
  EXPECT_EQ(emulator::banks.store.phases, 0);
}

}  // namespace
}  // namespace pdsim::kernels
