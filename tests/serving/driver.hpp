// Drives one Engine through its boundaries as the cluster does, with no network and no router: what the
// engine hears (arrivals, loads that land, finished prompts that were read, mere timers) comes from a
// script, so that two engines can be given exactly the same world.
//
// Order within an instant, as in the cluster: what is heard at t is heard before a boundary at t.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "sim/core/histogram.hpp"
#include "sim/core/time.hpp"
#include "sim/serving/engine.hpp"

namespace pdsim {

/// A step that takes `base`, `per_token` for each token and so on: every sum of a shape can be made to
/// matter, so that a wrong sum gives a wrong time.
struct LinearClock {
  Nanos base = 100;
  Nanos per_token = 0, per_request = 0, per_context = 0, per_window_context = 0, per_pair = 0,
        per_window_pair = 0;
  Nanos wobble = 0;  ///< up to twice this more, by context: a longer context is not always a longer step
  std::int32_t window = 0;

  StepTime time(const StepShape& s) const {
    return {base + per_token * s.tokens() + per_request * (s.decode_requests + s.prefill_requests) +
                per_context * (s.decode_context + s.prefill_context) +
                per_window_context * (s.decode_window_context + s.prefill_window_context) +
                per_pair * s.prefill_pairs + per_window_pair * s.prefill_window_pairs +
                wobble * (s.decode_context % 3),
            s.decode_context % 3 == 1};
  }
  StepClock clock() const {
    return {
        this,
        [](const void* self, const StepShape& s) { return static_cast<const LinearClock*>(self)->time(s); },
        window};
  }
};

class Driver {
 public:
  /// A step, as it started.
  struct Started {
    Nanos time = 0;
    std::vector<Step::Item> items;
    std::vector<SeqId> loads, declined;
    StepShape shape;
  };
  /// What one sequence brings with it and what becomes of it.
  struct Fate {
    Nanos arrival = 0;
    Nanos wire = 0;  ///< a load takes this long once posted
    enum class Post : std::uint8_t { works, recompute, abandon } post = Post::works;  ///< what becomes of it
    Nanos hold = 0;  ///< a silent sequence's blocks are held this long after its end
    Nanos first = -1, finish = -1;
    std::vector<Nanos> tokens;  ///< every token seen at a full boundary
  };

  Driver(const EngineLimits& limits, const LinearClock& step, std::int32_t blocks, bool prefix_caching = true,
         bool log_cache = false)
      : clock(step), engine(limits, clock.clock(), blocks, prefix_caching, log_cache) {}
  Driver(const Driver&) = delete;  // the engine keeps a pointer to `clock`
  Driver& operator=(const Driver&) = delete;

  const LinearClock clock;
  Engine engine;
  Sequences sequences;
  std::vector<Fate> fates;  ///< by sequence
  Histogram gaps;
  std::vector<Started> steps;  ///< kept when keep_steps
  bool keep_steps = true;
  Nanos idle_step = 50;
  Nanos posting = 0;             ///< of one load, on the forward thread
  std::vector<Nanos> timers;     ///< ascending; a boundary at or after each is a full one
  std::vector<Nanos> timers_at;  ///< and this is when it came
  double in_system_ns = 0;       ///< integral over time of what the engine says is in it

  /// A prompt of `prompt` tokens arrives at `time` (no earlier than the one before) and is to grow to
  /// `prompt + output` tokens. Blocks of the prompt have the identity `hashes` says; the rest are its own.
  SeqId arrive(Nanos time, std::int32_t prompt, std::int32_t output, std::vector<HashRun> identity = {}) {
    Sequence s;
    s.request = static_cast<std::uint32_t>(sequences.size());
    s.prompt = s.known = prompt;
    s.final = prompt + output;
    s.counted = true;
    s.identity = std::move(identity);
    sequences.push_back(std::move(s));
    fates.push_back({});
    fates.back().arrival = time;
    return static_cast<SeqId>(sequences.size() - 1);
  }

  /// Something is heard at `time` that changes nothing, or `settle` looks at the engine then.
  void nudge(Nanos time) { heard_.push({time, kNudge, 0}); }
  void settle_at(Nanos time) { heard_.push({time, kSettle, 0}); }

  /// Called after every boundary's launch, and after every settle.
  void (*at_boundary)(Driver&, Nanos now) = nullptr;
  void (*at_settle)(Driver&, Nanos now) = nullptr;
  void* context = nullptr;

  /// Until nothing is left to happen.
  void run() {
    for (;;) {
      const Nanos arrival = next_arrival_ < fates.size() ? fates[next_arrival_].arrival : kNever;
      const Nanos heard = heard_.empty() ? kNever : heard_.top().time;
      const Nanos now = std::min({arrival, heard, boundary_});
      if (now == kNever) break;
      in_system_ns += static_cast<double>(engine.waiting() + engine.parked() + engine.running()) *
                      static_cast<double>(now - last_);
      last_ = now;
      if (arrival == now) {
        engine.enqueue(static_cast<SeqId>(next_arrival_++));
        news(now, true);
      } else if (heard == now) {
        const Heard what = heard_.top();
        heard_.pop();
        hear(what);
      } else {
        boundary(now);
      }
    }
    for (const SeqId id : read_) engine.release(id, sequences);  // a sleeping engine has not seen them
    read_.clear();
  }

  Nanos now() const { return last_; }

 private:
  enum Kind : std::uint8_t { kLanded, kFailed, kRead, kNudge, kSettle };
  struct Heard {
    Nanos time;
    Kind kind;
    SeqId seq;
    bool operator<(const Heard& b) const {  // for a queue whose top is the earliest
      if (time != b.time) return time > b.time;
      return kind != b.kind ? kind > b.kind : seq > b.seq;
    }
  };
  enum class Mode : std::uint8_t { asleep, idle, stepping };

  void hear(const Heard& what) {
    switch (what.kind) {
      case kLanded:
        landed_.push_back(what.seq);
        news(what.time, false);
        break;
      case kFailed:
        failed_.push_back(what.seq);
        news(what.time, false);
        break;
      case kRead:
        read_.push_back(what.seq);
        news(what.time, false);
        break;
      case kNudge:
        news(what.time, false);
        break;
      case kSettle:
        engine.settle(what.time, sequences, gaps);
        if (at_settle != nullptr) at_settle(*this, what.time);
        break;
    }
  }

  void news(Nanos now, bool wakes) {
    if (mode_ == Mode::stepping) {
      const Nanos time = engine.cut_run(now);
      if (time != kNever) boundary_ = time;
    } else if (mode_ == Mode::idle) {
      const Nanos steps = std::max<Nanos>(1, (now - idle_since_ + idle_step - 1) / idle_step);
      boundary_ = std::min(boundary_, idle_since_ + steps * idle_step);
    } else if (wakes) {
      mode_ = Mode::idle;
      idle_since_ = boundary_ = now;
    }
  }

  void boundary(Nanos now) {
    boundary_ = kNever;
    engine.close_run(sequences, gaps);
    engine.account_blocks(now);
    if (engine.stepping()) outputs(now);
    for (const SeqId id : landed_) engine.loaded(id, sequences[id].prompt, sequences);
    for (const SeqId id : read_) engine.release(id, sequences);
    landed_.clear();
    read_.clear();
    while (next_timer_ < timers.size() && timers[next_timer_] <= now) {
      timers_at.push_back(now);
      ++next_timer_;
    }
    start(now);
    if (at_boundary != nullptr) at_boundary(*this, now);
  }

  void outputs(Nanos now) {
    outcome_ = {};
    const std::vector<Step::Item> items = engine.current().items;
    engine.finish_step(now, sequences, outcome_, gaps);
    for (const Step::Item& item : items) {
      if (item.sampled) fates[item.seq].tokens.push_back(now);
    }
    for (const SeqId id : outcome_.first_tokens) fates[id].first = now;
    for (const SeqId id : outcome_.finished) {
      fates[id].finish = now;
      if (sequences[id].silent) {
        heard_.push({now + fates[id].hold, kRead, id});
      } else {
        engine.release(id, sequences);
      }
    }
  }

  void start(Nanos now) {
    if (!engine.begin(now, sequences) && failed_.empty()) {
      mode_ = engine.has_requests() ? Mode::idle : Mode::asleep;
      idle_since_ = now;
      return;
    }
    Step& step = engine.current();
    Nanos delay = 0;
    for (const SeqId id : step.loads) {
      const bool works = fates[id].post == Fate::Post::works;
      if (works) delay += posting;
      heard_.push({now + delay + fates[id].wire, works ? kLanded : kFailed, id});
    }
    for (const SeqId id : failed_) {  // found when it would have been posted, with this step
      if (fates[id].post == Fate::Post::recompute) {
        engine.loaded(id, sequences[id].hit_tokens, sequences);
      } else {
        engine.abandon(id, sequences);
        fates[id].finish = now;
      }
    }
    failed_.clear();
    if (keep_steps) steps.push_back({now, step.items, step.loads, step.declined, step.shape});
    engine.launch(now, delay, idle_step, sequences, outcome_);
    mode_ = Mode::stepping;
    const Nanos deadline = next_timer_ < timers.size() ? timers[next_timer_] : kNever;
    boundary_ = engine.plan_run(now, deadline, sequences);
  }

  Outcome outcome_;
  std::priority_queue<Heard> heard_;
  std::vector<SeqId> landed_, failed_, read_;
  std::size_t next_arrival_ = 0, next_timer_ = 0;
  Mode mode_ = Mode::asleep;
  Nanos idle_since_ = 0, boundary_ = kNever, last_ = 0;
};

}  // namespace pdsim
