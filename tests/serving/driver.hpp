// Drives one Engine through its boundaries as the cluster does, with no network and no router: what the
// engine hears (arrivals, loads that land, finished prompts that were read, clients that go away, a crash,
// mere timers) comes from a script, so that two engines can be given exactly the same world.
//
// Order within an instant, as in the cluster: what is heard at t is heard before a boundary at t.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <string>
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
                per_pair * (s.prefill_pairs + s.draft_pairs) +
                per_window_pair * (s.prefill_window_pairs + s.draft_window_pairs) +
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
    Nanos hold = 0;  ///< a silent sequence's blocks are leased this long after its end
    Nanos pin = -1;  ///< another's stay pinned this long after its end; -1 = not at all
    Nanos first = -1, finish = -1;
    bool dead = false;                 ///< aborted, or lost in a crash
    std::vector<Nanos> tokens;         ///< every token seen at a full boundary
    std::vector<std::int32_t> yields;  ///< when it speculates: tokens by step
  };

  Driver(const EngineLimits& limits, const LinearClock& step, std::int32_t blocks, bool prefix_caching = true,
         bool log_cache = false)
      : clock(step),
        engine(limits, clock.clock(), blocks, prefix_caching, log_cache, hooks()),
        full_hit_tokens(limits.block_size) {}
  Driver(const Driver&) = delete;  // the engine keeps a pointer to `clock`, and one to this
  Driver& operator=(const Driver&) = delete;

  const LinearClock clock;
  Engine engine;
  Sequences sequences;
  std::vector<Fate> fates;  ///< by sequence
  Histogram gaps;
  std::vector<Started> steps;  ///< kept when keep_steps
  bool keep_steps = true;
  // The rule by which what lies elsewhere is loaded: vLLM's, as the cluster has it.
  std::int32_t full_hit_tokens;          ///< lacking no more than this is computed here
  std::int32_t recompute_threshold = 0;  ///< and so is lacking fewer than this
  bool reclaims = false;                 ///< pinned blocks are let go of, the oldest first, when asked for
  std::vector<std::int32_t> asked;       ///< each time that they were, for how many free blocks
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

  /// The KV of all its prompt, or of its first `tokens`, is on another worker, `wire` away.
  void lies_elsewhere(SeqId seq, Nanos wire, std::int32_t tokens = -1) {
    sequences[seq].remote_tokens = tokens < 0 ? sequences[seq].prompt : tokens;
    fates[seq].wire = wire;
  }
  /// The client of `seq` goes away: heard at `time`, acted on at the next boundary. A sequence that loads
  /// then goes when its load has ended.
  void abort_at(Nanos time, SeqId seq) { heard_.push({time, kAbort, seq}); }
  /// The engine loses all it has, and goes on empty.
  void crash_at(Nanos time) { heard_.push({time, kCrash, 0}); }

  /// Something is heard at `time` that changes nothing, or `settle` looks at the engine then.
  void nudge(Nanos time) { heard_.push({time, kNudge, 0}); }
  void settle_at(Nanos time) { heard_.push({time, kSettle, 0}); }

  /// Called after every boundary's launch, and after every settle.
  void (*at_boundary)(Driver&, Nanos now) = nullptr;
  void (*at_settle)(Driver&, Nanos now) = nullptr;
  void (*at_crash)(Driver&, Nanos now) = nullptr;  ///< called just before it
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
    engine.account_blocks(last_);
    take_read();  // a sleeping engine has not seen them
  }

  Nanos now() const { return last_; }
  /// Whose blocks are kept after their end, oldest first.
  const std::vector<SeqId>& kept() const { return kept_; }
  Hold kept_as(SeqId id) const { return sequences[id].silent ? Hold::leased : Hold::pinned; }

 private:
  enum Kind : std::uint8_t { kLanded, kFailed, kRead, kAbort, kCrash, kNudge, kSettle };
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

  EngineHooks hooks() {
    EngineHooks h;
    h.owner = this;
    h.load = [](void* self, SeqId id, std::int32_t have) {
      const Driver& d = *static_cast<Driver*>(self);
      const std::int32_t lacking = d.sequences[id].remote_tokens - have;
      return lacking > d.full_hit_tokens && lacking >= d.recompute_threshold;
    };
    h.reclaim = [](void* self, std::uint32_t, std::int32_t blocks) {
      return static_cast<Driver*>(self)->reclaim(blocks);
    };
    return h;
  }

  bool reclaim(std::int32_t blocks) {
    asked.push_back(blocks);
    if (!reclaims) return false;
    for (std::size_t i = 0; i < kept_.size() && engine.pool().free_blocks() < blocks;) {
      if (kept_as(kept_[i]) == Hold::pinned) {
        let_go(kept_[i]);
      } else {
        ++i;
      }
    }
    return engine.pool().free_blocks() >= blocks;
  }

  void keep(SeqId id) {
    engine.hold(kept_as(id), engine.pool().size(sequences[id].table));
    kept_.push_back(id);
  }
  void let_go(SeqId id) {
    engine.hold(kept_as(id), -engine.pool().size(sequences[id].table));
    engine.release(id, sequences);
    std::erase(kept_, id);
  }
  void take_read() {
    for (const SeqId id : read_) {
      if (std::find(kept_.begin(), kept_.end(), id) != kept_.end()) let_go(id);
    }
    read_.clear();
  }
  void abandon(SeqId id, Nanos now) {
    engine.abandon(id, sequences);
    fates[id].finish = now;
  }

  void abort(SeqId id) {
    const SeqStatus status = sequences[id].status;
    if (id >= next_arrival_ || fates[id].dead || status == SeqStatus::finished) return;
    fates[id].dead = true;
    if (status != SeqStatus::loading) engine.abort(id, sequences);
  }

  void crash(Nanos now) {
    engine.settle(now, sequences, gaps);
    engine.account_blocks(now);
    if (at_crash != nullptr) at_crash(*this, now);
    for (SeqId id = 0; id < next_arrival_; ++id) {
      Sequence& s = sequences[id];
      if (s.status == SeqStatus::finished && s.table == kNoTable) continue;
      engine.release(id, sequences);
      if (s.status == SeqStatus::finished) continue;  // its blocks were kept
      fates[id].dead = true;
      Sequence gone;  // of the one that died only this is left, whatever had been settled of it
      gone.request = s.request;
      gone.status = SeqStatus::finished;
      gone.load_tokens = s.load_tokens;
      s = std::move(gone);
    }
    engine.restart(now);
    kept_.clear();
    for (auto* heard : {&landed_, &failed_, &read_, &aborts_}) heard->clear();
    mode_ = Mode::asleep;
    boundary_ = kNever;
  }

  void hear(const Heard& what) {
    const bool gone = sequences[what.seq].status == SeqStatus::finished;
    switch (what.kind) {
      case kLanded:
        if (gone) break;  // in a crash
        landed_.push_back(what.seq);
        news(what.time, false);
        break;
      case kFailed:
        if (gone) break;
        failed_.push_back(what.seq);
        news(what.time, false);
        break;
      case kRead:
        read_.push_back(what.seq);
        news(what.time, false);
        break;
      case kAbort:
        aborts_.push_back(what.seq);
        news(what.time, false);
        break;
      case kCrash:
        crash(what.time);
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
    for (const SeqId id : landed_) {
      if (fates[id].dead) {
        abandon(id, now);
      } else {
        engine.loaded(id, sequences[id].remote_tokens, sequences);
      }
    }
    landed_.clear();
    take_read();
    for (const SeqId id : aborts_) abort(id);
    aborts_.clear();
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
    std::vector<std::int32_t> known;
    for (const Step::Item& item : items) known.push_back(sequences[item.seq].known);
    engine.finish_step(now, sequences, outcome_, gaps);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Step::Item& item = items[i];
      if (!item.sampled || fates[item.seq].dead) continue;
      const std::int32_t tokens = engine.speculates() ? sequences[item.seq].known - known[i] : 1;
      fates[item.seq].tokens.insert(fates[item.seq].tokens.end(), static_cast<std::size_t>(tokens), now);
      if (engine.speculates()) fates[item.seq].yields.push_back(tokens);
    }
    for (const SeqId id : outcome_.first_tokens) fates[id].first = now;
    for (const SeqId id : outcome_.finished) {
      fates[id].finish = now;
      const Nanos kept = sequences[id].silent ? fates[id].hold : fates[id].pin;
      if (kept >= 0 && sequences[id].table != kNoTable) {  // none: preempted while its last token was sampled
        keep(id);
        heard_.push({now + kept, kRead, id});
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
      if (fates[id].post == Fate::Post::recompute && !fates[id].dead) {
        engine.loaded(id, sequences[id].hit_tokens, sequences);
      } else {
        abandon(id, now);
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
  std::vector<SeqId> landed_, failed_, read_, aborts_, kept_;
  std::size_t next_arrival_ = 0, next_timer_ = 0;
  Mode mode_ = Mode::asleep;
  Nanos idle_since_ = 0, boundary_ = kNever, last_ = 0;
};

/// Every boundary a full one.
inline EngineLimits limits_of(std::int32_t block, std::int32_t seqs, std::int32_t tokens, bool async) {
  EngineLimits limits;
  limits.block_size = block;
  limits.max_num_seqs = seqs;
  limits.max_num_batched_tokens = tokens;
  limits.async = async;
  limits.step_by_step = true;
  return limits;
}

/// Full blocks of a prompt under one name, then of what follows under the sequence's own.
inline std::vector<HashRun> identity_of(std::uint64_t prompt_name, std::int32_t prompt_blocks,
                                        std::uint64_t own, std::int32_t own_blocks) {
  std::vector<HashRun> identity;
  if (prompt_blocks > 0) identity.push_back({prompt_name, prompt_blocks});
  if (own_blocks > 0) identity.push_back({own, own_blocks});
  return identity;
}

/// "A4 B4*" for four tokens of sequence 0 and four of sequence 1, the latter sampled.
inline std::string text(const Driver::Started& step) {
  std::string out;
  for (const Step::Item& item : step.items) {
    out += std::string(out.empty() ? "" : " ") + static_cast<char>('A' + item.seq) +
           std::to_string(item.tokens) + (item.sampled ? "*" : "");
  }
  return out;
}

inline std::vector<std::string> texts(const Driver& driver) {
  std::vector<std::string> out;
  for (const Driver::Started& step : driver.steps) out.push_back(text(step));
  return out;
}

using Texts = std::vector<std::string>;

}  // namespace pdsim
