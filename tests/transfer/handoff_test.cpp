// The state machine against its table, row by row; then against its invariants, in every order of events of
// any length.
//
// Every order: what advance() does depends on the Handoff alone, and what the invariants speak of is a few
// facts about the past (what has happened, how often what was asked for, up to two). There are finitely many
// pairs of both, so all that can be reached, by whatever order of events, is found by a search.
#include "sim/transfer/handoff.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace pdsim {
namespace {

using Wire = Handoff::Wire;
using enum HandoffEvent;

constexpr HandoffEvent kAll[] = {
    source_known, destination_allocated, registered,      connected, landed, failed, seen,
    declined,     source_lost,           destination_lost};
constexpr const char* kNames[] = {
    "source_known", "destination_allocated", "registered",      "connected", "landed", "failed", "seen",
    "declined",     "source_lost",           "destination_lost"};

/// As the cluster begins one: a pull's destination has the source's blocks from the answer it came with.
Handoff fresh(bool push) {
  Handoff h;
  h.push = push;
  h.source_known = !push;
  return h;
}

std::vector<std::uint32_t> advance_all(Handoff& h, const std::vector<HandoffEvent>& events) {
  std::vector<std::uint32_t> actions;
  for (const HandoffEvent event : events) actions.push_back(advance(h, event));
  return actions;
}

using Actions = std::vector<std::uint32_t>;

// ---------------------------------------------------------------------------------- row by row

TEST(Handoff, Pull) {
  Handoff h = fresh(false);
  EXPECT_EQ(advance_all(h, {destination_allocated, connected, landed, seen}),
            (Actions{kConnect, kPost, kTellDestination, kLoad | kNotifySource}));
  EXPECT_EQ(h.wire, Wire::over);
  EXPECT_FALSE(h.stale());
}

// In push either end may be known first; whichever is second brings the contact about.
TEST(Handoff, PushEitherEndFirst) {
  Handoff h = fresh(true);
  EXPECT_EQ(advance_all(h, {destination_allocated, registered, source_known, connected, landed, seen}),
            (Actions{kRegister, kNothing, kConnect, kPost, kTellDestination | kTellSource, kLoad}));
  Handoff g = fresh(true);
  EXPECT_EQ(advance_all(g, {source_known, destination_allocated, registered, connected, landed, seen}),
            (Actions{kNothing, kRegister, kConnect, kPost, kTellDestination | kTellSource, kLoad}));
  EXPECT_EQ(h.wire, Wire::over);
  EXPECT_EQ(g.wire, Wire::over);
}

// A failure, in the contact or on the wire: the reader sees it and is not served; a writer keeps it to
// itself, unless it says so (push_fail: then it is seen).
TEST(Handoff, Failed) {
  for (const bool posted : {false, true}) {
    Handoff pull = fresh(false);
    advance(pull, destination_allocated);
    if (posted) advance(pull, connected);
    EXPECT_EQ(advance_all(pull, {failed, seen}), (Actions{kTellDestination, kFailLoad}));

    Handoff push = fresh(true);
    advance_all(push, {source_known, destination_allocated, registered});
    if (posted) advance(push, connected);
    EXPECT_EQ(advance_all(push, {failed, connected, landed}), (Actions{kNothing, kNothing, kNothing}));
    EXPECT_EQ(push.wire, Wire::failed);
    EXPECT_EQ(advance(push, seen), kFailLoad);
  }
}

// Declined before anything was begun: a pull's source is told that it may free its blocks, a push's is not.
// Later it is too late.
TEST(Handoff, Declined) {
  Handoff pull = fresh(false), push = fresh(true);
  EXPECT_EQ(advance(pull, declined), kNotifySource);
  EXPECT_EQ(advance(push, declined), kNothing);
  EXPECT_EQ(advance_all(push, {source_known, registered, connected}),
            (Actions{kNothing, kNothing, kNothing}));
  Handoff late = fresh(false);
  EXPECT_EQ(advance_all(late, {destination_allocated, declined, connected}),
            (Actions{kConnect, kNothing, kPost}));
}

// A writer that has lost its blocks posts nothing; what it posted before goes on, from another's blocks.
TEST(Handoff, SourceLost) {
  const std::vector<HandoffEvent> before[] = {{},
                                              {source_known},
                                              {destination_allocated, registered},
                                              {source_known, destination_allocated, registered}};
  for (const std::vector<HandoffEvent>& events : before) {
    Handoff push = fresh(true);
    advance_all(push, events);
    EXPECT_EQ(advance(push, source_lost), kNothing);
    EXPECT_EQ(push.wire, Wire::over);
    for (const std::uint32_t actions : advance_all(push, {source_known, registered, connected, seen})) {
      EXPECT_EQ(actions, kNothing);
    }
  }
  Handoff posted = fresh(true);
  advance_all(posted, {source_known, destination_allocated, registered, connected, source_lost});
  EXPECT_TRUE(posted.stale());
  EXPECT_EQ(advance(posted, landed), kTellDestination | kTellSource);
  // A reader does not know: it posts, and what it reads is another's.
  Handoff pull = fresh(false);
  EXPECT_EQ(advance_all(pull, {source_lost, destination_allocated, connected}),
            (Actions{kNothing, kConnect, kPost}));
  EXPECT_TRUE(pull.stale());
}

// A writer does not know that its destination has gone: it posts, into another's blocks.
TEST(Handoff, DestinationLost) {
  Handoff push = fresh(true);
  advance_all(push, {destination_allocated, registered});
  EXPECT_FALSE(push.stale());
  EXPECT_EQ(advance_all(push, {destination_lost, source_known, connected}),
            (Actions{kNothing, kConnect, kPost}));
  EXPECT_TRUE(push.stale());
}

// Blocks that have changed hands are stale on either side; a destination has none before it allocates.
TEST(Handoff, StaleUnlessBothOwnTheirBlocks) {
  for (const bool push : {false, true}) {
    Handoff h = fresh(push);
    EXPECT_TRUE(h.stale());
    advance(h, destination_allocated);
    EXPECT_FALSE(h.stale());
    Handoff s = h, d = h;
    advance(s, source_lost);
    advance(d, destination_lost);
    EXPECT_TRUE(s.stale());
    EXPECT_TRUE(d.stale());
  }
}

// ------------------------------------------------------------------------------------ every order

/// What has happened and what was asked for, as the events and actions say.
struct Past {
  bool source_known = false, destination_known = false;  // to the poster
  bool landed = false, failed = false, source_lost = false;
  std::int32_t connects = 0, posts = 0, loads = 0, failed_loads = 0, notified = 0, told_destination = 0,
               told_source = 0;

  auto key() const {
    return std::tuple(source_known, destination_known, landed, failed, source_lost, connects, posts, loads,
                      failed_loads, notified, told_destination, told_source);
  }
};

auto key_of(const Handoff& h) {
  return std::tuple(h.push, h.source_known, h.destination_known, h.source_owns, h.destination_owns, h.wire);
}

struct State {
  Handoff handoff;
  Past past;
  std::string order;  // one that leads here

  auto key() const { return std::tuple(key_of(handoff), past.key()); }
};

/// One step; the invariants are checked on it.
State follow(const State& state, HandoffEvent event) {
  State next = state;
  next.order += std::string(next.order.empty() ? "" : ", ") + kNames[static_cast<std::size_t>(event)];
  SCOPED_TRACE((state.handoff.push ? "push: " : "pull: ") + next.order);
  const std::uint32_t actions = advance(next.handoff, event);
  const bool push = next.handoff.push;
  Past& p = next.past;

  p.source_known = p.source_known || !push || event == source_known;
  p.destination_known = p.destination_known || event == (push ? registered : destination_allocated);
  p.source_lost = p.source_lost || event == source_lost;
  if (actions & kConnect) {
    EXPECT_TRUE(p.source_known && p.destination_known);
    EXPECT_FALSE(push && p.source_lost);
    EXPECT_EQ(++p.connects, 1);
  }
  if (actions & kPost) {
    EXPECT_EQ(event, connected);
    EXPECT_EQ(p.connects, 1);
    EXPECT_TRUE(p.source_known && p.destination_known);
    EXPECT_FALSE(push && p.source_lost);
    EXPECT_EQ(++p.posts, 1);
  }
  p.failed = p.failed || (event == failed && p.connects == 1 && !p.landed);
  p.landed = p.landed || (event == landed && p.posts == 1 && !p.failed);
  if (actions & kTellSource) {
    EXPECT_TRUE(push && event == landed);
    EXPECT_EQ(p.posts, 1);
    EXPECT_EQ(++p.told_source, 1);
  }
  if (actions & kTellDestination) {
    EXPECT_TRUE(event == landed || (event == failed && !push));
    EXPECT_EQ(p.connects, 1);
    EXPECT_EQ(++p.told_destination, 1);
  }
  if (actions & kLoad) {
    EXPECT_EQ(event, seen);
    EXPECT_TRUE(p.landed);
    EXPECT_EQ(p.told_destination, 1);
    EXPECT_EQ(++p.loads, 1);
  }
  if (actions & kFailLoad) {
    EXPECT_EQ(event, seen);
    EXPECT_TRUE(p.failed);
    EXPECT_EQ(++p.failed_loads, 1);
  }
  EXPECT_LE(p.loads + p.failed_loads, 1);
  if (actions & kNotifySource) {
    EXPECT_FALSE(push);
    EXPECT_TRUE((actions & kLoad) != 0 || (event == declined && p.posts == 0));
    EXPECT_EQ(++p.notified, 1);
  }
  EXPECT_EQ((actions & kRegister) != 0, push && event == destination_allocated);
  EXPECT_EQ(actions & ~((kNotifySource << 1) - 1u), 0u);

  // The wire goes one way only, and what it is at says what has been asked for.
  EXPECT_GE(next.handoff.wire, state.handoff.wire);
  EXPECT_FALSE(state.handoff.wire == Wire::landed && next.handoff.wire == Wire::failed);
  EXPECT_EQ(next.handoff.wire == Wire::idle, p.connects == 0 && next.handoff.wire != Wire::over);
  if (next.handoff.wire == Wire::posted || next.handoff.wire == Wire::landed) {
    EXPECT_EQ(p.posts, 1);
  }
  // What is over stays so.
  if (state.handoff.wire == Wire::over) {
    EXPECT_EQ(next.handoff.wire, Wire::over);
    EXPECT_EQ(actions & ~std::uint32_t{kRegister}, 0u);
  }
  return next;
}

/// All states that can be reached, whatever the order of events.
std::map<decltype(State{}.key()), State> reachable(bool push) {
  std::map<decltype(State{}.key()), State> known;
  std::vector<State> frontier{{fresh(push), {}, {}}};
  frontier[0].past.source_known = !push;
  known.emplace(frontier[0].key(), frontier[0]);
  while (!frontier.empty()) {
    std::vector<State> further;
    for (const State& state : frontier) {
      for (const HandoffEvent event : kAll) {
        const State next = follow(state, event);
        if (testing::Test::HasFailure()) return known;
        if (known.emplace(next.key(), next).second) further.push_back(next);
      }
    }
    frontier = std::move(further);
  }
  return known;
}

TEST(HandoffInvariants, HoldInEveryOrderOfEvents) {
  for (const bool push : {false, true}) {
    const auto states = reachable(push);
    // The search went where it was meant to: every wire, every outcome.
    std::set<Wire> wires;
    bool loaded = false, failed_to = false, notified = false;
    for (const auto& [key, state] : states) {
      wires.insert(state.handoff.wire);
      loaded = loaded || state.past.loads == 1;
      failed_to = failed_to || state.past.failed_loads == 1;
      notified = notified || state.past.notified == 1;
    }
    EXPECT_EQ(wires.size(), 6u);
    EXPECT_TRUE(loaded);
    EXPECT_TRUE(failed_to);
    EXPECT_EQ(notified, !push);
    EXPECT_GT(states.size(), 30u);
  }
}

// An event that no longer applies changes nothing: once it is over, only who owns what is still noted, and
// a destination that allocates registers, as it cannot know.
TEST(HandoffInvariants, NothingComesOfWhatIsOver) {
  for (const bool push : {false, true}) {
    for (const auto& [key, state] : reachable(push)) {
      if (state.handoff.wire != Wire::over) continue;
      for (const HandoffEvent event : {connected, landed, failed, seen, declined}) {
        Handoff h = state.handoff;
        EXPECT_EQ(advance(h, event), kNothing);
        EXPECT_EQ(key_of(h), key_of(state.handoff));
      }
    }
  }
}

// Nothing is lost when nothing goes wrong: whatever interleaving of the source's news and the destination's
// is possible, all is asked for that a hand-over needs, once, and the KV is loaded.
TEST(HandoffInvariants, EveryPossibleOrderEndsInALoad) {
  for (const bool push : {false, true}) {
    std::vector<HandoffEvent> events{destination_allocated, connected, landed, seen};
    if (push) events.insert(events.end(), {registered, source_known});
    std::sort(events.begin(), events.end());
    std::size_t orders = 0;
    do {
      const auto at = [&](HandoffEvent e) { return std::find(events.begin(), events.end(), e); };
      const bool possible = at(connected) < at(landed) && at(landed) < at(seen) &&
                            at(destination_allocated) < at(connected) &&
                            (!push || (at(destination_allocated) < at(registered) &&
                                       at(registered) < at(connected) && at(source_known) < at(connected)));
      if (!possible) continue;
      ++orders;
      Handoff h = fresh(push);
      std::uint32_t all = 0, sum = 0;
      for (const std::uint32_t actions : advance_all(h, events)) {
        all |= actions;
        sum += actions;
      }
      const std::uint32_t want = kConnect | kPost | kTellDestination | kLoad |
                                 (push ? kRegister | kTellSource : std::uint32_t{kNotifySource});
      EXPECT_EQ(all, want);
      EXPECT_EQ(sum, want) << "something twice";
      EXPECT_EQ(h.wire, Wire::over);
    } while (std::next_permutation(events.begin(), events.end()));
    EXPECT_EQ(orders, push ? 3u : 1u);
  }
}

}  // namespace
}  // namespace pdsim
