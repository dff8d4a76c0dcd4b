#include "kernels/emulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "kernels/fiber.hpp"

namespace pdsim::kernels {

Dim threadIdx, blockIdx, blockDim, gridDim;  // NOLINT(readability-identifier-naming)

namespace emulator {

Settings settings;
BankCounters banks;
Time time;
void (*take_launch)(const void*, const Launch&, std::function<void()>) = nullptr;

namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kMostShared = std::size_t{227} << 10;  // of a block on sm_90 and sm_100
constexpr unsigned kMostThreads = 1024;
constexpr unsigned char kUnwritten = 0xCD, kInFlight = 0xFF;
constexpr std::uint32_t kAllLanes = 0xffffffffu;

struct Copy {
  void* shared;
  const void* global;
  bool valid;
};

struct Thread {
  Fiber fiber{kStackBytes};
  const char* waits_at = nullptr;
  std::vector<Copy> open;                    // copies of no group yet
  std::vector<std::vector<Copy>> in_flight;  // groups, oldest first
};

struct Warp {
  std::uint32_t ready = 0, exited = 0;  // a bit a lane
  unsigned arrived = 0;
  const char* operation = nullptr;  // that the arrived lanes are in
  WarpBuffer buffer;
  WarpAccesses accesses;
};

constexpr std::align_val_t kSharedAlignment{1024};
struct AlignedDelete {
  void operator()(unsigned char* p) const { ::operator delete[](p, kSharedAlignment); }
};

// The block that runs. Threads are kept from launch to launch for their stacks.
struct Block {
  Fiber host;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[], AlignedDelete> shared;
  std::size_t shared_bytes = 0;
  unsigned size = 0, current = 0, at_barrier = 0, exited = 0;
  const std::function<void()>* body = nullptr;
  std::exception_ptr failure;
  std::uint64_t random = 0;
  bool running = false;
};
Block block;

// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
unsigned draw(unsigned below) {
  std::uint64_t z = block.random += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<unsigned>((z ^ (z >> 31)) % below);
}

Dim unravel(unsigned index, Dim extent) {
  return {index % extent.x, index / extent.x % extent.y, index / extent.x / extent.y};
}

Thread& current_thread() {
  return *block.threads[block.current];
}
Warp& current_warp() {
  return block.warps[block.current / 32];
}

std::string place(unsigned thread) {
  return fmt::format("block ({}, {}, {}), thread {}: ", blockIdx.x, blockIdx.y, blockIdx.z, thread);
}

// The lane of a ready mask that goes on. Requires one.
unsigned pick_lane(std::uint32_t ready) {
  switch (settings.order) {
    case Order::ascending:
      return static_cast<unsigned>(std::countr_zero(ready));
    case Order::descending:
      return 31u - static_cast<unsigned>(std::countl_zero(ready));
    case Order::random:
      break;
  }
  for (unsigned skip = draw(static_cast<unsigned>(std::popcount(ready))); skip > 0; --skip)
    ready &= ready - 1;
  return static_cast<unsigned>(std::countr_zero(ready));
}

// The thread that goes on, of the same warp as long as that can, or none.
constexpr unsigned kNone = ~0u;
unsigned pick_thread() {
  const auto warps = static_cast<unsigned>(block.warps.size());
  unsigned warp = block.current / 32;
  if (block.warps[warp].ready == 0) {
    const unsigned shift = settings.order == Order::random ? draw(warps) : 0;
    const auto candidate = [&](unsigned i) {
      return settings.order == Order::descending ? warps - 1 - i : (i + shift) % warps;
    };
    unsigned i = 0;
    while (i < warps && block.warps[candidate(i)].ready == 0) ++i;
    if (i == warps) return kNone;
    warp = candidate(i);
  }
  return warp * 32 + pick_lane(block.warps[warp].ready);
}

// Leaves the block, which nothing will return to.
[[noreturn]] void leave() {
  Fiber::give_way(current_thread().fiber, block.host);
  std::terminate();
}

std::string who_waits() {
  std::string text = "no thread can go on:";
  for (unsigned first = 0; first < block.size;) {
    const auto at = [](unsigned i) {
      const bool gone = (block.warps[i / 32].exited >> (i % 32) & 1u) != 0;
      return std::string(gone ? "ended" : block.threads[i]->waits_at);
    };
    unsigned last = first;
    while (last + 1 < block.size && at(last + 1) == at(first)) ++last;
    text += first == last ? fmt::format(" thread {} {};", first, at(first))
                          : fmt::format(" threads {} to {} {};", first, last, at(first));
    first = last + 1;
  }
  text.pop_back();
  return text;
}

// Lets another thread run. Returns when this one may go on.
void give_way() {
  Thread& thread = current_thread();
  if (thread.fiber.overflowed()) fail(fmt::format("more than {} bytes of stack", kStackBytes));
  const unsigned next = pick_thread();
  if (next == kNone) fail(who_waits());
  if (next == block.current) return;
  const Dim index = threadIdx;
  const unsigned self = block.current;
  block.current = next;
  threadIdx = unravel(next, blockDim);
  Fiber::give_way(thread.fiber, block.threads[next]->fiber);
  block.current = self;
  threadIdx = index;
}

void wait(const char* at) {
  Thread& thread = current_thread();
  const std::uint32_t bit = 1u << lane();
  Warp& warp = current_warp();
  thread.waits_at = at;
  warp.ready &= ~bit;
  while ((warp.ready & bit) == 0) give_way();
}

void end_thread() {
  const Thread& thread = current_thread();
  if (!thread.open.empty() || std::any_of(thread.in_flight.begin(), thread.in_flight.end(),
                                          [](const auto& g) { return !g.empty(); })) {
    fail("ends with asynchronous copies not waited for");
  }
  Warp& warp = current_warp();
  warp.exited |= 1u << lane();
  warp.ready &= ~(1u << lane());
  ++block.exited;
  if (warp.exited == kAllLanes) warp.accesses.settle(banks);
  if (block.exited < block.size) give_way();
}

void thread_entry() {
  try {
    (*block.body)();
    end_thread();
  } catch (...) {
    block.failure = std::current_exception();
  }
  leave();
}

void run_block(Dim index) {
  blockIdx = index;
  std::fill_n(block.shared.get(), block.shared_bytes, kUnwritten);
  block.warps.assign(block.size / 32, Warp{});
  for (Warp& warp : block.warps) warp.ready = kAllLanes;
  block.at_barrier = block.exited = 0;
  block.failure = nullptr;
  for (unsigned i = 0; i < block.size; ++i) {
    Thread& thread = *block.threads[i];
    thread.open.clear();
    thread.in_flight.clear();
    thread.fiber.prepare(thread_entry);
  }
  block.current = 0;
  block.current = pick_thread();
  threadIdx = unravel(block.current, blockDim);
  Fiber::give_way(block.host, block.threads[block.current]->fiber);
  if (block.failure) std::rethrow_exception(block.failure);
}

void check(const Launch& launch) {
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  if (threads == 0 || threads % 32 != 0 || threads > kMostThreads) {
    throw Failure(fmt::format("launch: {} threads a block; expected whole warps of 32, at most {}", threads,
                              kMostThreads));
  }
  if (launch.shared_bytes > kMostShared) {
    throw Failure(fmt::format("launch: {} bytes of shared memory; a block has at most {}",
                              launch.shared_bytes, kMostShared));
  }
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0 || launch.grid.y > 65535 ||
      launch.grid.z > 65535) {
    throw Failure(
        fmt::format("launch: a grid of {} x {} x {} blocks; expected 1 or more, at most 65535 of y and z",
                    launch.grid.x, launch.grid.y, launch.grid.z));
  }
  if (block.running) throw Failure("launch: from within a kernel");
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& thread) {
  check(launch);
  block.size = launch.block.x * launch.block.y * launch.block.z;
  block.body = &thread;
  block.shared_bytes = launch.shared_bytes;
  // Exactly as much as was asked for, so that AddressSanitizer sees plain accesses beyond it.
  block.shared.reset(static_cast<unsigned char*>(::operator new[](launch.shared_bytes, kSharedAlignment)));
  block.random = settings.seed;
  while (block.threads.size() < block.size) block.threads.push_back(std::make_unique<Thread>());
  gridDim = launch.grid;
  blockDim = launch.block;

  const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  if (settings.order == Order::descending) std::reverse(order.begin(), order.end());
  if (settings.order == Order::random) {
    for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  }
  struct Running {
    Running() { block.running = true; }
    ~Running() { block.running = false; }
  } running;
  for (const unsigned i : order) run_block(unravel(i, launch.grid));
}

void launch(const void* kernel, const Launch& launch, std::function<void()> thread) {
  if (take_launch != nullptr) return take_launch(kernel, launch, std::move(thread));
  run(launch, thread);
}

void fail(const std::string& what) {
  throw Failure(place(block.current) + what);
}

unsigned lane() {
  return block.current % 32;
}

void* shared_memory() {
  return block.shared.get();
}

std::uint32_t check_shared(const char* operation, const void* p, std::size_t bytes) {
  const auto offset =
      reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(block.shared.get());
  if (offset >= block.shared_bytes || block.shared_bytes - offset < bytes) {
    fail(fmt::format("{} at byte {} of shared memory, which has {}", operation,
                     static_cast<std::intptr_t>(offset), block.shared_bytes));
  }
  if (offset % bytes != 0)
    fail(fmt::format("{} at byte {} of shared memory; expected a multiple of {}", operation, offset, bytes));
  return static_cast<std::uint32_t>(offset);
}

void note_access(Access access, const void* p, std::size_t bytes) {
  constexpr const char* kNames[] = {"load_shared", "store_shared", "copy_async"};
  const std::uint32_t offset = check_shared(kNames[static_cast<int>(access)], p, bytes);
  current_warp().accesses.add(static_cast<int>(lane()), access, offset, static_cast<int>(bytes));
}

void barrier() {
  if (block.exited > 0) fail("reaches a barrier that another thread has ended without");
  if (++block.at_barrier < block.size) return wait("waits at a barrier");
  block.at_barrier = 0;
  for (Warp& warp : block.warps) {
    warp.ready = kAllLanes;
    warp.accesses.settle(banks);
  }
}

void copy_async(void* shared, const void* global, bool valid) {
  note_access(Access::copy_async, shared, 16);
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
    fail("copy_async from an address that is no multiple of 16");
  std::memset(shared, kInFlight, 16);
  current_thread().open.push_back({shared, global, valid});
}

void copy_async_commit() {
  Thread& thread = current_thread();
  thread.in_flight.push_back(std::move(thread.open));
  thread.open.clear();
}

void copy_async_wait(int pending) {
  auto& groups = current_thread().in_flight;
  while (groups.size() > static_cast<std::size_t>(pending)) {
    for (const Copy& copy : groups.front()) {
      if (copy.valid) {
        std::memcpy(copy.shared, copy.global, 16);
      } else {
        std::memset(copy.shared, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}

WarpBuffer& warp_buffer() {
  return current_warp().buffer;
}

bool arrive(const char* operation, const void* operands, std::size_t bytes) {
  Warp& warp = current_warp();
  if (warp.exited != 0) fail(fmt::format("{} after a lane of its warp has ended", operation));
  if (warp.arrived == 0) warp.operation = operation;
  if (std::string_view(warp.operation) != operation) {
    fail(fmt::format("{} while another lane of its warp is in {}", operation, warp.operation));
  }
  std::memcpy(warp.buffer.operands.data() + lane() * bytes, operands, bytes);
  return ++warp.arrived == 32;
}

void release() {
  Warp& warp = current_warp();
  warp.arrived = 0;
  warp.ready = kAllLanes;
  warp.accesses.settle(banks);
}

void wait_for_release() {
  wait(current_warp().operation);
}

}  // namespace emulator
}  // namespace pdsim::kernels
