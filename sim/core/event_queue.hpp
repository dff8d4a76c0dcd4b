// The event queue: 24-byte PODs in a 4-ary heap.
//
// Why a 4-ary heap: a serving cluster pends 10^3 to 10^5 events, where it beats binary heaps,
// balanced trees and heaps of pointers by 1.2x to 8x; one cache line holds the children compared.
// Nothing is ever removed from the middle: an event that no longer applies is recognised by its
// owner (an epoch in `arg`) and ignored when popped.
//
// Invariants
//  1. Pops come in the order (time, phase, kind, entity, per-entity counter). Never in an order of
//     insertion across entities, so results do not depend on who happened to be visited first.
//  2. Time never goes back: a push at a time before the last pop is a broken invariant.
//  3. A permuted queue (a test mode) visits entities of one (time, phase, kind) in another order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/time.hpp"

namespace pdsim {

/// Order within one instant: what completes, then what arrives, then who decides, then who looks.
enum class Phase : std::uint8_t { completion, arrival, decision, sample };

struct Event {
  Nanos time;
  std::uint64_t order;  ///< phase:2 | kind:6 | entity:32 | counter:24, most significant first
  std::uint64_t arg;    ///< the owner's: an epoch, a second id

  std::uint32_t kind() const { return static_cast<std::uint32_t>(order >> 56) & 0x3f; }
};
static_assert(sizeof(Event) == 24);

class EventQueue {
 public:
  /// `permutation` 0 keeps entities in order of id; any other value visits them in another fixed
  /// order (multiplication by an odd number is a bijection on 32 bits).
  explicit EventQueue(std::uint32_t permutation = 0) {
    if (permutation != 0) {
      multiplier_ = permutation * 2654435761u | 1u;
      for (int i = 0; i < 5; ++i) inverse_ *= 2u - multiplier_ * inverse_;  // Newton, mod 2^32
    }
  }

  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  std::uint64_t pops() const { return pops_; }
  Nanos now() const { return now_; }
  Nanos next_time() const { return heap_.empty() ? kNever : heap_.front().time; }
  void reserve(std::size_t events) { heap_.reserve(events); }

  std::uint32_t entity(const Event& event) const {
    return static_cast<std::uint32_t>(event.order >> 24) * inverse_;
  }

  /// O(log n). `counter` orders the events of one entity at one (time, phase, kind); only its low
  /// 24 bits count.
  void push(Nanos time, Phase phase, std::uint32_t kind, std::uint32_t entity, std::uint32_t counter,
            std::uint64_t arg) {
    PDSIM_CHECK(time >= now_, "an event was scheduled in the past");
    const std::uint64_t order = std::uint64_t(phase) << 62 | std::uint64_t(kind & 0x3fu) << 56 |
                                std::uint64_t(entity * multiplier_) << 24 | (counter & 0xffffffu);
    const Event event{time, order, arg};
    std::size_t hole = heap_.size();
    heap_.push_back(event);
    while (hole > 0) {
      const std::size_t parent = (hole - 1) / 4;
      if (!before(event, heap_[parent])) break;
      heap_[hole] = heap_[parent];
      hole = parent;
    }
    heap_[hole] = event;
  }

  /// Removes and returns the earliest event. Requires !empty(). O(log n).
  Event pop() {
    const Event top = heap_.front();
    const Event last = heap_.back();
    heap_.pop_back();
    const std::size_t n = heap_.size();
    if (n > 0) {
      std::size_t hole = 0;
      for (;;) {
        const std::size_t first = 4 * hole + 1;
        if (first >= n) break;
        std::size_t least = first;
        const std::size_t end = first + 4 < n ? first + 4 : n;
        for (std::size_t child = first + 1; child < end; ++child) {
          if (before(heap_[child], heap_[least])) least = child;
        }
        if (!before(heap_[least], last)) break;
        heap_[hole] = heap_[least];
        hole = least;
      }
      heap_[hole] = last;
    }
    now_ = top.time;
    ++pops_;
    return top;
  }

 private:
  static bool before(const Event& a, const Event& b) {
    return a.time != b.time ? a.time < b.time : a.order < b.order;
  }

  std::vector<Event> heap_;
  Nanos now_ = INT64_MIN;
  std::uint64_t pops_ = 0;
  std::uint32_t multiplier_ = 1;
  std::uint32_t inverse_ = 1;
};

}  // namespace pdsim
