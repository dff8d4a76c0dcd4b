// One request's KV on its way from one worker to another: a state machine without time, queues or bytes.
//
// Whoever posts (the destination's READ, the source's WRITE) does so once, when it knows both whose
// blocks it reads and where they go. That is all that tells the protocols apart (README.md has each as a
// numbered sequence, with who holds which memory when):
//
//                  the poster is   it learns the source's blocks    it learns the destination's blocks
//   pull           destination     in prefill's answer              when its scheduler allocates them
//   read back      destination     in the router's stored answer    the same
//   push           source          a step after prefill's end       from the registration
//
//   happens                 | pull, read back: then           | push: then
//   ------------------------+---------------------------------+--------------------------------------
//   declined                | notify the source               | nothing: the source's lease runs out
//   or else:                |                                 |
//   destination_allocated   | connect                         | register
//   registered              |                                 | connect, if the source's are known
//   source_known            | (from the start)                | connect, if the destination's are known
//   connected               | post                            | post
//   landed                  | tell the destination            | tell both
//   failed                  | tell the destination            | nothing: the source logs and drops it
//   seen                    | load, notify the source         | load
//   source_lost             | what is read then is another's  | nothing is posted any more
//   destination_lost        |                                 | what is written then is another's
//
// Invariants: at most one post; at most one load; the source is notified at most once; a push whose source
// is gone posts nothing. A reader does not know that its source is gone, nor a writer its destination:
// stale() says so, and what is done about it is the cluster's.
#pragma once

#include <cstdint>

namespace pdsim {

enum class HandoffEvent : std::uint8_t {
  source_known,
  destination_allocated,
  registered,
  connected,
  landed,
  failed,
  seen,
  declined,
  source_lost,
  destination_lost,
};

/// What an event asks of the cluster; several may be set.
enum HandoffAction : std::uint32_t {
  kNothing = 0,
  kRegister = 1,         ///< the destination sends its blocks to the source
  kConnect = 2,          ///< the poster sees to its contact with the other side; then `connected`
  kPost = 4,             ///< the poster posts
  kTellDestination = 8,  ///< its next poll sees the end, good or bad
  kTellSource = 16,      ///< its next poll sees that its own writes are done
  kLoad = 32,            ///< the destination's sequence has its KV
  kFailLoad = 64,        ///< it never will
  kNotifySource = 128,   ///< the destination needs the source's blocks no longer
};

struct Handoff {
  enum class Wire : std::uint8_t { idle, connecting, posted, landed, failed, over };

  bool push = false;                                     ///< the source posts
  bool source_known = false, destination_known = false;  ///< to the poster
  bool source_owns = true;                               ///< the source's blocks are still its own
  bool destination_owns = false;  ///< the destination's are allocated and still its own
  Wire wire = Wire::idle;

  /// A transfer posted or in flight would touch blocks that have changed hands.
  bool stale() const { return !source_owns || !destination_owns; }
};

/// Changes `handoff` and returns HandoffActions. An event that no longer applies changes nothing. O(1).
std::uint32_t advance(Handoff& handoff, HandoffEvent event);

}  // namespace pdsim
