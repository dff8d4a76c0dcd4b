#include "tools/study/interrupt.hpp"

#include <signal.h>

#include <atomic>
#include <initializer_list>

namespace pdsim {

namespace {
std::atomic<bool> stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "only lock-free atomics are safe in a signal handler");
}  // namespace

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { stop.store(true, std::memory_order_relaxed); };
  // SA_RESETHAND: the next one meets the default action. No SA_RESTART: a read that waits for stdin ends.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

bool interrupted() {
  return stop.load(std::memory_order_relaxed);
}

}  // namespace pdsim
