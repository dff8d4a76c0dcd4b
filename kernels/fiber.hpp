// A thread of a GPU as a stack of its own on one CPU thread: it runs until it gives way to another by name,
// so every run of a kernel takes the same course.
//
// No exception may leave a fiber: its entry ends by giving way, never by returning. A fiber is entered
// through ucontext; later switches are _setjmp and _longjmp, which spare the two system calls of swapcontext
// (20 ns against 350, and an emulated mma is 32 switches). AddressSanitizer is told of each switch.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <memory>

namespace pdsim::kernels {

class Fiber {
 public:
  /// The stack that runs already: what the others return to in the end.
  Fiber() = default;
  /// A new stack. Its pages cost nothing before they are used. What is put on it beyond its size goes, for 64
  /// KiB, where it harms nothing, and shows in overflowed().
  explicit Fiber(std::size_t stack_bytes);

  /// The next switch to it calls `entry` on an empty stack; what was on it is forgotten, not unwound.
  /// Requires a stack, as overflowed() does.
  void prepare(void (*entry)());
  /// Goes on with `to` from where it last gave way. Requires that `from` is the one that runs.
  static void give_way(Fiber& from, Fiber& to);
  /// Whether more was put on the stack than it holds.
  bool overflowed() const;

 private:
  static void begin();
  void arrived();

  std::unique_ptr<unsigned char[]> stack_;
  void (*entry_)() = nullptr;  // set until it is called
  ucontext_t context_{};
  jmp_buf resume_{};
  void* fake_stack_ = nullptr;    // AddressSanitizer's
  const void* bottom_ = nullptr;  // of the stack, as AddressSanitizer and ucontext know it
  std::size_t bytes_ = 0;
};

}  // namespace pdsim::kernels
