// Runs kernel source on a CPU: each thread of a block is a fiber, blocks follow one another, all on one CPU
// thread and in one fixed course. It shows wrong results, races across barriers, copies not waited for and
// bank conflicts. It cannot show speed, races within a warp that no primitive orders, or faults of the GPU
// compiler.
//
// It is stricter than a GPU, so that a kernel that is right by luck fails here:
//   copies    an asynchronous copy spoils its target (0xFF, a NaN) when issued and lands at the wait that
//   covers
//             it, no sooner;
//   order     a warp runs until it must wait, and which goes on then is adversarial: the first, the last or a
//             random one, so one warp may be a whole barrier ahead of the others;
//   memory    shared memory begins as 0xCD in every block;
//   barriers  every thread of the block reaches each one, every lane of a warp the same warp-wide operation.
//
// What breaks a rule is a Failure with the block and thread. Nothing here may be used from two CPU threads.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/banks.hpp"
#include "kernels/launch.hpp"

namespace pdsim::kernels {

// As CUDA has them, for the thread that runs. NOLINTBEGIN(readability-identifier-naming)
extern Dim threadIdx, blockIdx, blockDim, gridDim;
// NOLINTEND(readability-identifier-naming)

namespace emulator {

/// A kernel broke a rule of the machine. what(): "block (x, y, z), thread n: what is wrong".
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Which of those that can run goes on: of the warps, of a warp's lanes, and of the blocks.
enum class Order : std::uint8_t { ascending, descending, random };

struct Settings {
  Order order = Order::ascending;
  std::uint64_t seed = 1;  ///< of Order::random
};

/// For the next launches.
extern Settings settings;
/// Of all launches since it was last reset.
extern BankCounters banks;

/// What the GPU's wall clock and the cycle counters of its multiprocessors show to the kernel that runs.
struct Time {
  std::uint64_t ns = 1, cycles = 1;
  std::uint64_t looks = 0;  ///< at the wall clock, each of which takes a microsecond
  std::uint64_t polls = 0;  ///< of words that the host may change
  std::uint64_t look() { return ns + 1000 * looks++; }
};
extern Time time;

/// Where launches go, if not to run() at once: a test that stands for the CUDA runtime takes them here.
extern void (*take_launch)(const void* kernel, const Launch& launch, std::function<void()> thread);

/// What launch() of device.cuh calls.
void launch(const void* kernel, const Launch& launch, std::function<void()> thread);

/// Runs `thread` as each thread of the grid. Throws Failure, also for a launch that a GPU would refuse: a
/// block of no whole warps or more than 1024 threads, more shared memory than 227 KiB.
void run(const Launch& launch, const std::function<void()>& thread);

// What follows is for device.cuh: calls of the thread that runs.

[[noreturn]] void fail(const std::string& what);
unsigned lane();
void* shared_memory();
/// Fails unless `bytes` at p, aligned to as many, lie in shared memory. Returns the offset of p in it.
std::uint32_t check_shared(const char* operation, const void* p, std::size_t bytes);
void note_access(Access access, const void* p, std::size_t bytes);
void barrier();
void copy_async(void* shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

/// The two halves of a warp-wide operation: leaves a lane's operands, and is true for the lane that came
/// last, which then computes for all; released lanes find their results.
bool arrive(const char* operation, const void* operands, std::size_t bytes);
void release();
void wait_for_release();
inline constexpr std::size_t kOperandBytes = 32;
struct WarpBuffer {
  alignas(16) std::array<unsigned char, 32 * kOperandBytes> operands, results;
};
WarpBuffer& warp_buffer();

/// An operation of the whole warp: compute(operands of the 32 lanes, results for the 32 lanes), at once.
template <class Result, class Operands, class Compute>
Result together(const char* operation, const Operands& mine, Compute compute) {
  static_assert(sizeof(Operands) <= kOperandBytes && sizeof(Result) <= kOperandBytes);
  static_assert(std::is_trivially_copyable_v<Operands> && std::is_trivially_copyable_v<Result>);
  WarpBuffer& buffer = warp_buffer();
  if (arrive(operation, &mine, sizeof mine)) {
    std::array<Operands, 32> operands;
    std::array<Result, 32> results;
    std::memcpy(operands.data(), buffer.operands.data(), sizeof operands);
    compute(operands, results);
    std::memcpy(buffer.results.data(), results.data(), sizeof results);
    release();
  } else {
    wait_for_release();
  }
  Result result;
  std::memcpy(&result, buffer.results.data() + lane() * sizeof result, sizeof result);
  return result;
}

}  // namespace emulator
}  // namespace pdsim::kernels
