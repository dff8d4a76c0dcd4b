#include "kernels/measure.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels/device.cuh"
#include "kernels/gpu_memory.hpp"

namespace pdsim::kernels {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

/// The wall clock of the GPU in ns and the cycles of one of its multiprocessors, taken together.
struct Timestamp {
  std::uint64_t ns, cycles;
};

/// Written by the block, of many, that runs on multiprocessor 0: cycles are each multiprocessor's own.
PDSIM_KERNEL void take_timestamp(volatile Timestamp* to) {
  if (multiprocessor() != 0) return;
  const std::uint64_t ns = wall_clock_ns(), cycles = clock_cycles();
  to->ns = ns;
  to->cycles = cycles;
}

/// Host and GPU: 0 hold, 1 go, 2 gave up.
enum : int { kHold, kGo, kGaveUp };
constexpr std::uint64_t kPatienceNs = 1'000'000'000;

/// Spins until the host says go. Never for ever: what the host posts may need the queue that this blocks.
PDSIM_KERNEL void hold(volatile int* flag) {
  const std::uint64_t start = wall_clock_ns();
  while (poll(flag) == kHold) {
    if (wall_clock_ns() - start > kPatienceNs) *flag = kGaveUp;
  }
}

struct Harness::State {
  GpuStream main, other;
  GpuEvent begin, end, other_ended;
  PinnedArray<Timestamp> stamps{2};
  PinnedArray<int> flag{1};
  GpuArray<unsigned char> flush;
  double nominal_mhz = 0;
  unsigned multiprocessors = 1;

  State() {
    int device = 0, khz = 0, l2_bytes = 0, count = 0;
    PDSIM_CUDA(cudaGetDevice(&device));
    PDSIM_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device));
    PDSIM_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
    PDSIM_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    multiprocessors = static_cast<unsigned>(count);
    nominal_mhz = khz / 1e3;
    const double free_running = clock_when_light();
    if (free_running > 0)
      nominal_mhz = std::min(nominal_mhz, free_running);  // someone may have locked it lower
    flush =
        GpuArray<unsigned char>(2 * static_cast<std::size_t>(l2_bytes));  // twice: no replacement is perfect
  }

  /// The clock that the GPU takes for work that asks for no power. Half a second, most of it to get there.
  double clock_when_light() {
    for (const int milliseconds : {300, 200}) {
      stamp(0);
      block();
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      go();
      stamp(1);
      main.wait();
    }
    return clock_mhz();
  }

  void stamp(std::size_t i) {
    stamps.data()[i] = {};
    launch(take_timestamp, Launch{.grid = {multiprocessors}, .block = {32}, .stream = main.get()},
           stamps.data() + i);
  }

  /// Mean clock between the two timestamps; 0 where multiprocessor 0 took none.
  double clock_mhz() const {
    const Timestamp from = stamps.data()[0], to = stamps.data()[1];
    if (from.ns == 0 || to.ns <= from.ns) return 0;
    return static_cast<double>(to.cycles - from.cycles) / static_cast<double>(to.ns - from.ns) * 1e3;
  }

  /// One sample, microseconds; negative where the host was held up and it must not be used.
  double sample(const Operation& operation, Cache cache, Posting posting) {
    stamp(0);
    if (cache == Cache::cold) PDSIM_CUDA(cudaMemsetAsync(flush.data(), 0, flush.size(), main.get()));
    if (posting == Posting::hidden) {
      block();
    } else {
      main.wait();
    }
    post(operation);
    const bool in_time = posting == Posting::counted || go();
    stamp(1);
    main.wait();
    return in_time ? end.since_us(begin) : -1;
  }

  void post(const Operation& operation) {
    begin.record(main.get());
    operation(main.get());
    end.record(main.get());
  }

  /// Holds the stream until go().
  void block() {
    *static_cast<volatile int*>(flag.data()) = kHold;
    launch(hold, Launch{.grid = {1}, .block = {32}, .stream = main.get()}, flag.data());
  }

  /// False where hold() had given up before.
  bool go() {
    const bool in_time = *static_cast<volatile int*>(flag.data()) == kHold;
    *static_cast<volatile int*>(flag.data()) = kGo;
    return in_time;
  }

  /// One sample while the background runs `times` times; negative where it ended first.
  double sample_beside(const Operation& operation, const Operation& background, int times) {
    constexpr int kAhead = 2;  // posted before the operation goes: one that runs and one that follows
    stamp(0);
    block();
    post(operation);
    for (int i = 0; i < kAhead; ++i) background(other.get());
    const bool in_time = go();
    for (int i = 0; i < times; ++i) background(other.get());
    other_ended.record(other.get());
    stamp(1);
    main.wait();
    other.wait();
    const double us = end.since_us(begin);
    return in_time && other_ended.since_us(begin) > us ? us : -1;
  }

  /// Samples until the rule stops; `next` gives one, negative where it failed: NotApart after `most_failed`
  /// in a row.
  template <class Next>
  Measured series(const StopRule& rule, int most_failed, Next next) {
    Series series(rule, nominal_mhz);
    const Clock::time_point start = Clock::now();
    int failed_in_a_row = 0;
    while (series.stop() == Stop::none) {
      const double us = next();
      if (us < 0) {
        if (++failed_in_a_row == most_failed)
          throw NotApart("the operation could not be kept apart from its posting, or beside another");
        continue;
      }
      failed_in_a_row = 0;
      series.add(us, clock_mhz(), seconds_since(start));
      const double pause = series.stop() == Stop::none ? series.pause_seconds() : 0;
      if (pause > 0) std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    }
    return series.result();
  }
};

Harness::Harness() : state_(std::make_unique<State>()) {}
Harness::~Harness() = default;

Stream Harness::stream() const {
  return state_->main.get();
}

Measured Harness::time(const Operation& operation, const StopRule& rule, Cache cache, Posting posting) {
  for (int i = 0; i < 2; ++i) operation(stream());
  state_->main.wait();
  constexpr int kMostFailed = 3;  // each has held the host up for kPatienceNs
  return state_->series(rule, kMostFailed, [&] { return state_->sample(operation, cache, posting); });
}

Measured Harness::time_beside(const Operation& operation, double operation_us, const Operation& background,
                              double background_us, const StopRule& rule) {
  // Each may be slowed to a half by the other.
  int times = 1 + static_cast<int>(std::min(1000.0, 4 * operation_us / background_us));
  constexpr int kMostFailed = 12;  // each with twice the background of the one before
  return state_->series(rule, kMostFailed, [&] {
    const double us = state_->sample_beside(operation, background, times);
    if (us < 0) times = std::min(2 * times, 4000);
    return us;
  });
}

}  // namespace pdsim::kernels
