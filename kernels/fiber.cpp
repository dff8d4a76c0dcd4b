// The checked longjmp of glibc takes a jump to another stack for a fault.
#undef _FORTIFY_SOURCE
#include "kernels/fiber.hpp"

#include <algorithm>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define PDSIM_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PDSIM_ADDRESS_SANITIZER
#endif
#endif
#ifdef PDSIM_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace pdsim::kernels {
namespace {

// From the bottom: room to overflow into, a mark, the stack itself.
constexpr std::size_t kOverflowBytes = std::size_t{64} << 10;
constexpr std::size_t kMarkBytes = 256;
constexpr unsigned char kMark = 0xA5;

// ucontext passes no pointer, and AddressSanitizer wants to hear on the new stack which one was left.
Fiber* leaving = nullptr;
Fiber* entered = nullptr;

}  // namespace

Fiber::Fiber(std::size_t stack_bytes)
    : stack_(new unsigned char[kOverflowBytes + kMarkBytes + stack_bytes]),
      bottom_(stack_.get()),
      bytes_(kOverflowBytes + kMarkBytes + stack_bytes) {}

void Fiber::prepare(void (*entry)()) {
  entry_ = entry;
  fake_stack_ = nullptr;
#ifdef PDSIM_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(stack_.get(), bytes_);  // frames that were left without their epilogues
#endif
  std::fill_n(stack_.get() + kOverflowBytes, kMarkBytes, kMark);
}

bool Fiber::overflowed() const {
  const unsigned char* mark = stack_.get() + kOverflowBytes;
  return std::any_of(mark, mark + kMarkBytes, [](unsigned char byte) { return byte != kMark; });
}

// On the stack of *this, first thing after a switch to it.
void Fiber::arrived() {
#ifdef PDSIM_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(fake_stack_, &leaving->bottom_, &leaving->bytes_);
#endif
  fake_stack_ = nullptr;
}

void Fiber::begin() {
  entered->arrived();
  void (*const entry)() = entered->entry_;
  entered->entry_ = nullptr;
  entry();
  std::abort();
}

void Fiber::give_way(Fiber& from, Fiber& to) {
  leaving = &from;
#ifdef PDSIM_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.bytes_);
#endif
  if (_setjmp(from.resume_) != 0) {
    from.arrived();
    return;
  }
  if (to.entry_ == nullptr) _longjmp(to.resume_, 1);
  getcontext(&to.context_);
  to.context_.uc_stack = {to.stack_.get(), 0, to.bytes_};
  to.context_.uc_link = nullptr;
  entered = &to;
  makecontext(&to.context_, &Fiber::begin, 0);
  setcontext(&to.context_);
}

}  // namespace pdsim::kernels
