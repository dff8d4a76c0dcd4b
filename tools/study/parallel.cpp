#include "tools/study/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace pdsim {

unsigned threads_for(unsigned jobs) {
  return jobs > 0 ? jobs : std::max(1u, std::thread::hardware_concurrency());
}

void parallel_for(std::size_t count, unsigned jobs, const std::function<void(std::size_t)>& work,
                  const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // of what follows, and of progress
  std::uint64_t done = 0;
  std::exception_ptr failure;
  std::size_t failed = count;
  const auto worker = [&] {
    for (std::size_t i = next++; i < count && !stop; i = next++) {
      try {
        work(i);
      } catch (...) {
        stop = true;
        const std::lock_guard lock(mutex);
        if (i < failed) {
          failed = i;
          failure = std::current_exception();
        }
        return;
      }
      const std::lock_guard lock(mutex);
      ++done;
      if (progress) progress(done, count);
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < std::min<std::size_t>(threads_for(jobs), count); ++i)
      others.emplace_back(worker);
    worker();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace pdsim
