#include "sim/serving/engine.hpp"

#include <algorithm>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"

namespace pdsim {

namespace {

// Boundaries planned ahead at once. A cut throws away half a chunk of step times on average; a chunk's
// end costs one event. Both are small against the steps themselves at this size.
constexpr std::int32_t kRunChunk = 32;

bool pure_decode(const Step& step, std::size_t batch) {
  return step.shape.prefill_requests == 0 && step.items.size() == batch && step.loads.empty() &&
         step.declined.empty();
}

// A decode row of n queries after p tokens, added to a step's shape (sign 1) or taken from it (-1).
void add_row(StepShape& shape, std::int64_t p, std::int64_t n, std::int64_t window, std::int64_t sign) {
  shape.decode_context += sign * (p + n);
  if (window > 0) shape.decode_window_context += sign * window_context(p, n, window);
  if (n == 1) return;
  shape.draft_pairs += sign * ((n - 1) * p + n * (n - 1) / 2);  // n p + n (n + 1) / 2 in all
  if (window > 0) {
    shape.draft_window_pairs += sign * (window_pairs(p, n, window) - window_context(p, n, window));
  }
}

}  // namespace

StepClock clock_of(const StepModel& model, std::int32_t window) {
  return {&model,
          [](const void* m, const StepShape& shape) { return static_cast<const StepModel*>(m)->time(shape); },
          window};
}

void Step::clear() {
  items.clear();
  shape = {};
  loads.clear();
  declined.clear();
  at_least = 0;
}

Engine::Engine(const EngineLimits& limits, StepClock clock, std::int32_t blocks, bool prefix_caching,
               bool log_cache, const EngineHooks& hooks)
    : limits_(limits), clock_(clock), pool_(blocks, prefix_caching), hooks_(hooks), log_cache_(log_cache) {
  pool_.enable_events(log_cache);
  statistics_.drafting.by_position.resize(limits.speculation.accepted.size());
  statistics_.drafting.drafted_at.resize(limits.speculation.accepted.size());
  PDSIM_CHECK(std::ssize(limits.speculation.accepted) == limits.speculation.tokens,
              "an acceptance for each draft of a step");
}

// ---------------------------------------------------------------------------------------- sequences

void Engine::loaded(SeqId id, std::int32_t tokens, Sequences& sequences) {
  Sequence& s = sequences[id];
  PDSIM_CHECK(s.status == SeqStatus::loading, "a load ended for a sequence that was not loading");
  s.status = SeqStatus::loaded;
  s.remote_tokens = 0;
  s.computed = std::min(tokens, s.known - 1);  // the last token is always computed here
  stuck_ = false;
}

void Engine::release(SeqId id, Sequences& sequences) {
  Sequence& s = sequences[id];
  if (s.table == kNoTable) return;
  pool_.release(s.table);
  s.table = kNoTable;
  stuck_ = false;
}

void Engine::abandon(SeqId id, Sequences& sequences) {
  std::erase(parked_, id);
  hold(Hold::loading, -pool_.size(sequences[id].table));
  sequences[id].status = SeqStatus::finished;
  release(id, sequences);
}

void Engine::abort(SeqId id, Sequences& sequences) {
  Sequence& s = sequences[id];
  s.aborted = true;
  switch (s.status) {
    case SeqStatus::waiting:
      std::erase(waiting_, id);
      std::erase(fresh_, id);
      break;
    case SeqStatus::loaded:
      std::erase(parked_, id);
      hold(Hold::loading, -pool_.size(s.table));
      break;
    case SeqStatus::running:
      std::erase(running_, id);
      break;
    case SeqStatus::loading:
    case SeqStatus::finished:
      PDSIM_CHECK(false, "a sequence was aborted that loads or has ended");
  }
  s.status = SeqStatus::finished;
  release(id, sequences);
  stuck_ = false;
}

bool Engine::references(SeqId id) const {
  const auto in = [&](const Step& step) {
    return std::any_of(step.items.begin(), step.items.end(),
                       [&](const auto& item) { return item.seq == id; });
  };
  return (in_flight_ && in(steps_[current_])) || (has_next_ && in(steps_[1 - current_]));
}

std::int32_t Engine::computed_after_current(SeqId id, const Sequences& sequences) const {
  std::int32_t computed = sequences[id].computed;
  if (has_next_) {
    for (const Step::Item& item : steps_[1 - current_].items) {
      if (item.seq == id) computed -= item.tokens;
    }
  }
  return computed;
}

void Engine::restart(Nanos now) {
  statistics_.busy -= busy_after(now);
  running_.clear();
  parked_.clear();
  waiting_.clear();
  fresh_.clear();
  for (Step& step : steps_) step.clear();
  in_flight_ = has_next_ = stuck_ = false;
  account_waits(now);
  run_.planned = run_.applied = 0;
  held_ = {};
  wait_ = Wait::none;
  wait_length_ = 0;
  PDSIM_CHECK(pool_.reset_cache(), "an engine restarted with blocks in use");
  if (log_cache_) {
    log_events(++step_number_);
    publish_events(step_number_, now);
  }
}

void Engine::truncate(SeqId id, std::int32_t blocks, Sequences& sequences) {
  pool_.truncate(sequences[id].table, blocks);
  stuck_ = false;
}

// --------------------------------------------------------------------------------------- scheduling

bool Engine::grow(Sequence& s, std::int32_t tokens, bool& grew) {
  const std::int32_t slots = s.computed + tokens + limits_.speculation.lookahead;
  const std::int32_t more = blocks_for(std::min(slots, limits_.max_model_len)) - pool_.size(s.table);
  grew = more > 0;
  if (!grew || pool_.extend(s.table, more)) return true;
  return held(Hold::pinned) > 0 && hooks_.reclaim != nullptr &&
         hooks_.reclaim(hooks_.owner, hooks_.engine, more) && pool_.extend(s.table, more);
}

// The last `drafts` of the tokens are drafted ones.
void Engine::add_item(Step& step, SeqId id, std::int32_t tokens, bool grew, Sequence& s,
                      std::int32_t drafts) {
  const std::int32_t before = s.computed;
  s.computed += tokens;
  const bool sampled = s.computed - drafts == s.known + s.pending;
  const bool decode = tokens - drafts == 1 && sampled;
  if (!decode || grew || s.computed <= s.prompt || speculates()) {
    pool_.publish(s.table, std::min(s.computed, s.known) / limits_.block_size);
  }
  if (sampled) s.pending += 1 + drafts;
  step.items.push_back({id, tokens, sampled, drafts > 0});
  if (speculates()) {
    s.drafts = sampled ? limits_.speculation.tokens : 0;
    s.latest_tokens = tokens;
    s.latest_step = step.number;
  }

  StepShape& shape = step.shape;
  const std::int64_t p = before, n = tokens, window = clock_.window;
  shape.sampled_requests += sampled ? 1 + drafts : 0;
  if (decode) {
    ++shape.decode_requests;
    shape.draft_tokens += drafts;
    add_row(shape, p, n, window, 1);
  } else {
    ++shape.prefill_requests;
    shape.prefill_tokens += tokens;
    shape.prefill_pairs += n * p + n * (n + 1) / 2;
    shape.prefill_context += p + n;
    if (window > 0) {
      shape.prefill_window_pairs += window_pairs(p, n, window);
      shape.prefill_window_context += window_context(p, n, window);
    }
  }
}

void Engine::preempt_last(Sequences& sequences) {
  const SeqId id = running_.back();
  running_.pop_back();
  Sequence& s = sequences[id];
  pool_.publish(s.table, (s.computed - s.pending) / limits_.block_size);  // less what is being sampled
  release(id, sequences);
  s.status = SeqStatus::waiting;
  s.lost = s.computed;
  s.computed = 0;
  ++s.preemptions;
  ++statistics_.preemptions;
  waiting_.push_front(id);
}

// Returns whether anything was preempted: then nothing else may be admitted in this step.
bool Engine::schedule_running(Step& step, std::int32_t& budget, Sequences& sequences) {
  bool preempted = false;
  std::size_t i = 0;
  for (; i < running_.size() && budget > 0; ++i) {
    const SeqId id = running_[i];
    Sequence& s = sequences[id];
    if (s.pending > 0 && s.known + 1 >= s.final) continue;  // its last token is already being sampled
    std::int32_t tokens = s.known + s.pending - s.computed, drafts = 0;
    if (speculates() && (s.pending > 0 || s.drafts > 0)) {
      drafts = std::min(s.drafts, limits_.max_model_len - 2 - s.computed);
      if (drafts < 0) {  // in flight, they may fill the context
        s.drafts = 0;
        continue;
      }
      drafts = std::min(drafts, budget - 1);
    }
    tokens = std::min(tokens + drafts, budget);
    bool grew = false;
    while (!grow(s, tokens, grew)) {
      preempt_last(sequences);
      preempted = true;
      if (i >= running_.size()) return true;  // it was the last one itself
    }
    add_item(step, id, tokens, grew, s, drafts);
    budget -= tokens;
  }
  // vLLM's asynchronous scheduler reserves drafts for the next step only.
  if (speculates() && limits_.async) {
    for (; i < running_.size(); ++i) sequences[running_[i]].drafts = 0;
  }
  return preempted;
}

// Notes why nothing more is admitted. Always false.
bool Engine::held_up(Wait why) {
  wait_ = why;
  return false;
}

// Returns whether the waiting queue may be looked at as well.
bool Engine::schedule_parked(Step& step, std::int32_t& budget, Sequences& sequences) {
  for (std::size_t i = 0; i < parked_.size();) {
    const SeqId id = parked_[i];
    Sequence& s = sequences[id];
    if (s.status == SeqStatus::loading) {
      ++i;
      continue;
    }
    if (budget == 0) return stuck_ = false;
    if (running_.size() >= static_cast<std::size_t>(limits_.max_num_seqs)) return held_up(Wait::slot);
    const std::int32_t tokens = std::min(s.known - s.computed, budget);
    if (!limits_.chunked_prefill && tokens < s.known - s.computed) return stuck_ = false;
    bool grew = false;
    const std::int32_t loaded = pool_.size(s.table);
    if (!grow(s, tokens, grew)) return held_up(Wait::blocks);
    hold(Hold::loading, -loaded);
    parked_.erase(parked_.begin() + static_cast<std::ptrdiff_t>(i));
    s.status = SeqStatus::running;
    running_.push_back(id);
    add_item(step, id, tokens, grew, s);
    budget -= tokens;
  }
  return true;
}

// The blocks of all that is known must fit, not only those of the first chunk (vLLM's
// scheduler_reserve_full_isl). When they do not, whoever holds finished sequences may let go of some.
bool Engine::allocate(Nanos now, Sequence& s, std::int32_t hits, std::int32_t covered) {
  const std::int32_t spare = blocks_for(s.known) - covered;
  const auto tried = [&] { return pool_.allocate(s.table, hits, covered - hits, spare); };
  bool done = tried();
  if (!done && held(Hold::pinned) > 0) {
    // Hits whose pin is let go of are no longer in use.
    const auto needed = [&] { return covered + spare - pool_.hits_in_use(s.identity, hits); };
    const bool pins = pool_.free_blocks() + held(Hold::pinned) >= needed();  // without them there were room
    while (!done && pins && hooks_.reclaim != nullptr &&
           hooks_.reclaim(hooks_.owner, hooks_.engine, needed())) {
      done = tried();
    }
    if (!done && pins && s.delayed_since < 0) s.delayed_since = now;
  }
  if (done && s.delayed_since >= 0) {
    ++statistics_.pin_delays;
    statistics_.pin_delay += now - s.delayed_since;
    s.delayed_since = -1;
  }
  return done;
}

void Engine::schedule_waiting(Nanos now, Step& step, std::int32_t& budget, Sequences& sequences) {
  const std::int32_t block = limits_.block_size;
  while (!waiting_.empty()) {
    if (running_.size() >= static_cast<std::size_t>(limits_.max_num_seqs)) {
      held_up(Wait::slot);
      return;
    }
    const SeqId id = waiting_.front();
    Sequence& s = sequences[id];
    if (budget == 0 || s.pending > 0) {
      stuck_ = false;
      return;
    }
    if (s.table == kNoTable) s.table = pool_.open(s.identity);
    std::int32_t hits = pool_.cached_prefix(s.identity, (s.known - 1) / block);
    if (limits_.speculation.drops_last_hit && hits > 0) --hits;
    const std::int32_t have = hits * block;
    const bool load = s.remote_tokens > have && hooks_.load(hooks_.owner, id, have);

    std::int32_t tokens = 0;
    if (!load) {
      tokens = s.known - have;
      if (tokens > budget) {
        if (!limits_.chunked_prefill) {
          stuck_ = false;
          return;
        }
        tokens = budget;
      }
    }
    const std::int32_t covered = blocks_for(load ? s.remote_tokens : have + tokens);
    if (!allocate(now, s, hits, covered)) {
      held_up(s.delayed_since >= 0 ? Wait::pins : Wait::blocks);
      return;
    }

    waiting_.pop_front();
    s.computed = have;
    if (s.admitted < 0) {
      s.admitted = now;
      s.hit_tokens = have;
    }
    if (s.lost > 0) {
      s.recomputed += std::max(0, s.lost - have);
      statistics_.found_later += std::max(0, have - s.lost);
    }
    s.lost = 0;
    if (load) {
      s.status = SeqStatus::loading;
      s.load_tokens = s.remote_tokens - have;
      hold(Hold::loading, covered);
      parked_.push_back(id);
      step.loads.push_back(id);
      continue;
    }
    if (s.remote_tokens > 0) {
      s.remote_tokens = 0;
      step.declined.push_back(id);
    }
    s.status = SeqStatus::running;
    running_.push_back(id);
    add_item(step, id, tokens, true, s);
    budget -= tokens;
  }
}

bool Engine::schedule(Nanos now, Step& step, Sequences& sequences) {
  step.clear();
  step.number = ++step_number_;
  step.scheduled = now;
  account_waits(now);
  wait_ = Wait::budget;
  for (const SeqId id : fresh_) sequences[id].considered = now;
  fresh_.clear();
  stuck_ = true;
  std::int32_t budget = limits_.max_num_batched_tokens;
  if (schedule_running(step, budget, sequences)) {
    stuck_ = false;
    wait_ = Wait::blocks;
  } else if (schedule_parked(step, budget, sequences)) {
    schedule_waiting(now, step, budget, sequences);
  }
  wait_length_ = waiting_.size() + static_cast<std::size_t>(std::ranges::count_if(parked_, [&](SeqId id) {
                   return sequences[id].status == SeqStatus::loaded;
                 }));
  statistics_.max_used_blocks =
      std::max(statistics_.max_used_blocks, pool_.total_blocks() - pool_.free_blocks());
  if (log_cache_) log_events(step.number);
  return step.has_work();
}

// --------------------------------------------------------------------------------------- boundaries

// The outcome of a sequence's part of the step that ended: the tokens that it yields, none when the
// sequence had ended with the step before. One draw a step, of the tokens known before it: whatever else
// happens, a request's drafts meet the same fate.
std::int32_t Engine::verify(const Step::Item& item, Sequence& s) {
  if (s.status == SeqStatus::finished) return 0;
  if (!item.drafted) return 1;
  const Speculation& speculation = limits_.speculation;
  Drafting& drafting = statistics_.drafting;
  const std::int32_t drafts = item.tokens - 1;
  const double draw = Random(speculation.seed, Purpose::speculation,
                             std::uint64_t{s.request} << 32 | static_cast<std::uint32_t>(s.known))
                          .uniform();
  std::int32_t accepted = 0;
  while (accepted < drafts && draw < speculation.accepted[static_cast<std::size_t>(accepted)]) {
    ++drafting.by_position[static_cast<std::size_t>(accepted++)];
  }
  const std::int32_t rejected = drafts - accepted, yielded = std::min(1 + accepted, s.final - s.known);
  ++drafting.rows;
  drafting.drafted += drafts;
  for (std::int32_t i = 0; i < drafts; ++i) ++drafting.drafted_at[static_cast<std::size_t>(i)];
  drafting.accepted += accepted;
  drafting.yielded += yielded;
  statistics_.rejected_tokens += item.tokens - yielded;
  s.pending -= drafts;
  if (s.status == SeqStatus::waiting) {  // preempted meanwhile
    s.lost -= rejected;
    return yielded;
  }
  Step& next = steps_[1 - current_];
  if (rejected > 0 && has_next_ && s.latest_step == next.number) {
    const std::int32_t before = s.computed - s.latest_tokens;
    add_row(next.shape, before, s.latest_tokens, clock_.window, -1);
    add_row(next.shape, before - rejected, s.latest_tokens, clock_.window, 1);
  }
  s.computed -= rejected;
  return yielded;
}

void Engine::finish_step(Nanos now, Sequences& sequences, Outcome& outcome, Histogram& gaps) {
  PDSIM_CHECK(in_flight_ && now == step_end_, "a step ended at another time than planned");
  in_flight_ = false;
  bool any_finished = false;
  for (const Step::Item& item : current().items) {
    Sequence& s = sequences[item.seq];
    if (!item.sampled || s.aborted) continue;
    std::int32_t tokens = 1;
    if (speculates()) {
      tokens = verify(item, s);
      if (tokens == 0) continue;
    }
    --s.pending;
    // Preempted while its only token was being sampled: without its blocks that token is worth nothing.
    if (s.silent && s.table == kNoTable) continue;
    s.known += tokens;
    if (!s.silent) {
      if (s.last_token < 0) {
        outcome.first_tokens.push_back(item.seq);
      } else {
        const Nanos gap = now - s.last_token;
        s.longest_gap = std::max(s.longest_gap, gap);
        if (s.counted) gaps.add(gap);
        if (s.counted && tokens > 1)
          gaps.add(0, static_cast<std::uint64_t>(tokens - 1));  // they leave together
      }
    }
    s.last_token = now;
    if (s.known < s.final) continue;
    if (s.status == SeqStatus::waiting) std::erase(waiting_, item.seq);  // preempted meanwhile
    if (s.table != kNoTable) {
      pool_.publish(s.table, std::min(s.computed, s.known - 1) / limits_.block_size);
    }
    s.status = SeqStatus::finished;
    outcome.finished.push_back(item.seq);
    any_finished = true;
  }
  if (any_finished) {
    std::erase_if(running_, [&](SeqId id) { return sequences[id].status == SeqStatus::finished; });
  }
  if (log_cache_) publish_events(current().number, now);
}

bool Engine::begin(Nanos now, Sequences& sequences) {
  if (has_next_) {
    current_ = 1 - current_;
    has_next_ = false;
    return true;
  }
  // A step that preempts admits nobody. If that leaves it empty, vLLM's loop comes round again at once.
  return schedule(now, current(), sequences) || (!stuck_ && schedule(now, current(), sequences));
}

void Engine::count_step(const StepShape& shape, const StepTime& time) {
  StepTotals& t = statistics_.totals;
  ++t.steps;
  t.decode_requests += shape.decode_requests;
  t.prefill_requests += shape.prefill_requests;
  t.draft_tokens += shape.draft_tokens;
  t.prefill_tokens += shape.prefill_tokens;
  t.sampled_requests += shape.sampled_requests;
  t.sampling_steps += shape.sampled_requests > 0 ? 1 : 0;
  const auto tokens = static_cast<std::size_t>(shape.tokens());
  if (tokens >= t.steps_of_tokens.size()) t.steps_of_tokens.resize(tokens + 1, 0);
  ++t.steps_of_tokens[tokens];
  t.decode_context += shape.decode_context;
  t.decode_window_context += shape.decode_window_context;
  t.draft_pairs += shape.draft_pairs;
  t.draft_window_pairs += shape.draft_window_pairs;
  t.prefill_pairs += shape.prefill_pairs;
  t.prefill_context += shape.prefill_context;
  t.prefill_window_pairs += shape.prefill_window_pairs;
  t.prefill_window_context += shape.prefill_window_context;
  statistics_.extrapolated_steps += time.extrapolated ? 1 : 0;
  statistics_.busy += time.ns;
}

void Engine::launch(Nanos now, Nanos delay, Nanos idle_step, Sequences& sequences, Outcome& outcome) {
  Step& step = current();
  for (const Step::Item& item : step.items) {
    Sequence& s = sequences[item.seq];
    if (s.status == SeqStatus::finished) statistics_.rejected_tokens += item.tokens;
    if (s.started || s.aborted) continue;
    s.started = true;
    outcome.started.push_back(item.seq);
  }
  StepTime time{idle_step, false};
  if (!step.items.empty()) {
    time = clock_(step.shape);
    time.ns = std::max(time.ns, step.at_least);
    count_step(step.shape, time);
  }
  statistics_.busy += delay;
  statistics_.posting += delay;
  step_end_ = now + delay + time.ns;
  work_end_ = step.items.empty() ? now + delay : step_end_;
  in_flight_ = true;
  if (limits_.async) has_next_ = schedule(now, steps_[1 - current_], sequences);
}

// ---------------------------------------------------------------------------------------------- runs

// Whether the steps in the pipeline are pure decodes of exactly the running sequences, each of which
// emitted a token just now.
bool Engine::steady(Nanos now, const Sequences& sequences) const {
  const std::size_t batch = running_.size();
  const Step& a = steps_[current_];
  const Step& b = steps_[limits_.async ? 1 - current_ : current_];
  if (batch == 0 || !stuck_ || !in_flight_ || (limits_.async && !has_next_)) return false;
  if (!pure_decode(a, batch) || !pure_decode(b, batch)) return false;
  for (std::size_t i = 0; i < batch; ++i) {
    const SeqId id = running_[i];
    if (a.items[i].seq != id || b.items[i].seq != id || sequences[id].last_token != now) return false;
  }
  return true;
}

Nanos Engine::plan_run(Nanos now, Nanos deadline, Sequences& sequences) {
  Run& run = run_;
  run.planned = run.applied = 0;
  if (limits_.step_by_step || speculates() || !steady(now, sequences)) return step_end_;

  // Boundary i (1, 2, ...) ends with known + i tokens and schedules the step `depth` later.
  const std::int32_t depth = limits_.async ? 2 : 1;
  const std::int32_t block = limits_.block_size;
  const auto buckets = static_cast<std::size_t>(block);
  std::int32_t limit = kRunChunk;
  run.start = now;
  run.longest_gap = 0;
  run.batch = static_cast<std::int32_t>(running_.size());
  run.counted = run.below_window = 0;
  run.bucket.assign(buckets + 1, 0);
  for (const SeqId id : running_) {
    const Sequence& s = sequences[id];
    limit = std::min(limit, s.final - s.known - depth);
    run.counted += s.counted && !s.silent ? 1 : 0;
    const std::int32_t context = s.computed - (depth - 1);  // in the step that runs now
    if (context < clock_.window) {
      ++run.below_window;
      limit = std::min(limit, clock_.window - s.computed);  // the step scheduled last grows by one as well
    }
    const std::int32_t room = pool_.size(s.table) * block - s.computed;  // boundaries before a new block
    limit = room < block ? limit : 0;
    ++run.bucket[static_cast<std::size_t>(room % block) + 1];
  }
  std::int32_t free = pool_.free_blocks();
  for (std::int32_t i = 0; i < limit; ++i) {
    free -= run.bucket[static_cast<std::size_t>(i % block) + 1];
    if (free < 0) limit = i;
  }
  if (limit <= 0) return step_end_;

  run.ends.resize(static_cast<std::size_t>(limit) + 1);
  run.extrapolated.resize(static_cast<std::size_t>(limit) + 1);
  run.ends[0] = step_end_;
  StepShape shape = current().shape;
  std::size_t i = 0;
  while (static_cast<std::int32_t>(i) < limit && run.ends[i] < deadline) {
    shape.decode_context += run.batch;
    shape.decode_window_context += run.below_window;
    const StepTime time = clock_(shape);
    run.extrapolated[i] = time.extrapolated;
    run.ends[i + 1] = run.ends[i] + time.ns;
    ++i;
  }
  run.planned = static_cast<std::int32_t>(i);

  for (std::size_t b = 0; b < buckets; ++b) run.bucket[b + 1] += run.bucket[b];
  run.crossing.resize(running_.size());
  for (std::size_t j = running_.size(); j-- > 0;) {  // backwards, so that each bucket keeps the order
    const Sequence& s = sequences[running_[j]];
    const std::int32_t room = pool_.size(s.table) * block - s.computed;
    run.crossing[static_cast<std::size_t>(--run.bucket[static_cast<std::size_t>(room) + 1])] =
        static_cast<std::int32_t>(j);
  }
  return run.ends[i];
}

Nanos Engine::cut_run(Nanos now) {
  Run& run = run_;
  const auto first = run.ends.begin();
  const auto next = std::lower_bound(first + run.applied, first + run.planned, now);
  if (next == first + run.planned) return kNever;
  run.planned = static_cast<std::int32_t>(next - first);
  return *next;
}

Nanos Engine::stretch(Nanos now, Nanos end) {
  Run& run = run_;
  cut_run(now);
  const bool planned = run.planned > 0;
  Nanos& ends = planned ? run.ends[static_cast<std::size_t>(run.planned)] : step_end_;
  if (ends <= now || ends >= end) return ends;
  if (!planned || run.applied == run.planned) statistics_.busy += end - ends;  // its step has been counted
  ends = end;
  if (!planned) work_end_ = end;
  return end;
}

void Engine::apply_boundary(std::int32_t index, Sequences& sequences, Histogram& gaps) {
  Run& run = run_;
  const auto i = static_cast<std::size_t>(index);
  const Nanos now = run.ends[i - 1];
  const Nanos gap = now - (i == 1 ? run.start : run.ends[i - 2]);
  run.longest_gap = std::max(run.longest_gap, gap);
  if (run.counted > 0) gaps.add(gap, static_cast<std::uint64_t>(run.counted));

  StepShape shape = current().shape;
  shape.decode_context += std::int64_t{index} * run.batch;
  shape.decode_window_context += std::int64_t{index} * run.below_window;
  count_step(shape, {run.ends[i] - now, run.extrapolated[i - 1] != 0});

  ++step_number_;
  const std::size_t bucket = (i - 1) % static_cast<std::size_t>(limits_.block_size);
  const auto begin = static_cast<std::size_t>(run.bucket[bucket + 1]);
  const auto end =
      bucket + 2 < run.bucket.size() ? static_cast<std::size_t>(run.bucket[bucket + 2]) : run.crossing.size();
  if (begin < end) {
    account_blocks(now);
    for (std::size_t j = begin; j < end; ++j) {
      Sequence& s = sequences[running_[static_cast<std::size_t>(run.crossing[j])]];
      PDSIM_CHECK(pool_.extend(s.table, 1), "a planned run ran out of blocks");
      pool_.publish(s.table, (s.known + index) / limits_.block_size);
    }
    statistics_.max_used_blocks =
        std::max(statistics_.max_used_blocks, pool_.total_blocks() - pool_.free_blocks());
  }
  if (log_cache_) {
    publish_events(current().number + static_cast<std::uint32_t>(index) - 1, now);
    log_events(step_number_);
  }
}

void Engine::settle(Nanos now, Sequences& sequences, Histogram& gaps) {
  Run& run = run_;
  while (run.applied < run.planned && run.ends[static_cast<std::size_t>(run.applied)] < now) {
    apply_boundary(++run.applied, sequences, gaps);
  }
}

void Engine::close_run(Sequences& sequences, Histogram& gaps) {
  Run& run = run_;
  if (run.planned == 0) return;
  while (run.applied < run.planned) apply_boundary(++run.applied, sequences, gaps);
  const std::int32_t n = run.planned;
  const Nanos last = run.ends[static_cast<std::size_t>(n) - 1];
  for (const SeqId id : running_) {
    Sequence& s = sequences[id];
    s.known += n;
    s.computed += n;
    s.last_token = last;
    s.longest_gap = std::max(s.longest_gap, run.longest_gap);
  }
  for (Step& step : steps_) {
    step.shape.decode_context += std::int64_t{n} * run.batch;
    step.shape.decode_window_context += std::int64_t{n} * run.below_window;
    step.number += static_cast<std::uint32_t>(n);
  }
  step_end_ = run.ends[static_cast<std::size_t>(n)];
  run.planned = run.applied = 0;
}

// --------------------------------------------------------------------------------------- accounting

Nanos Engine::busy_after(Nanos now) const {
  if (!in_flight_) return 0;
  const Nanos end = run_.planned > 0 ? run_.ends[static_cast<std::size_t>(run_.applied)] : work_end_;
  return std::max<Nanos>(0, end - now);
}

void Engine::account_waits(Nanos now) {
  statistics_.waits[static_cast<std::size_t>(wait_)] +=
      (now - wait_since_) * static_cast<Nanos>(wait_length_);
  wait_since_ = now;
}

void Engine::account_blocks(Nanos now) {
  account_waits(now);
  Statistics& st = statistics_;
  used_block_ns_ += static_cast<__int128>(pool_.total_blocks() - pool_.free_blocks()) * (now - st.since);
  st.used_block_ns = static_cast<double>(used_block_ns_);
  std::int32_t rest = pool_.total_blocks() - pool_.free_blocks();
  for (std::size_t i = 0; i < kHolds; ++i) {
    timeline_.add(1 + i, st.since, now, held_[i]);
    rest -= held_[i];
  }
  timeline_.add(0, st.since, now, std::max(0, rest));  // shared blocks count for each that holds them
  st.since = now;
}

void Engine::log_events(std::uint32_t step) {
  for (const CacheEvent& event : pool_.events()) log_.push_back({event, step, kNever});
  pool_.events().clear();
}

void Engine::forget_log(std::size_t n) {
  log_.erase(log_.begin(), log_.begin() + static_cast<std::ptrdiff_t>(n));
  published_ -= n;
}

void Engine::publish_events(std::uint32_t step, Nanos now) {
  while (published_ < log_.size() && log_[published_].step <= step) log_[published_++].published = now;
}

}  // namespace pdsim
