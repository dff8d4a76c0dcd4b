#include "sim/serving/engine.hpp"

#include <algorithm>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

// Boundaries planned ahead at once. A cut throws away half a chunk of step times on average; a chunk's
// end costs one event. Both are small against the steps themselves at this size.
constexpr std::int32_t kRunChunk = 32;

bool pure_decode(const Step& step, std::size_t batch) {
  return step.shape.prefill_requests == 0 && step.items.size() == batch && step.loads.empty() &&
         step.declined.empty();
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
}

Engine::Engine(const EngineLimits& limits, StepClock clock, std::int32_t blocks, bool prefix_caching,
               bool log_cache)
    : limits_(limits), clock_(clock), pool_(blocks, prefix_caching), log_cache_(log_cache) {
  pool_.enable_events(log_cache);
}

// ---------------------------------------------------------------------------------------- sequences

void Engine::loaded(SeqId id, std::int32_t tokens, Sequences& sequences) {
  Sequence& s = sequences[id];
  PDSIM_CHECK(s.status == SeqStatus::loading, "a load ended for a sequence that was not loading");
  s.status = SeqStatus::loaded;
  s.remote = false;
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
  sequences[id].status = SeqStatus::finished;
  release(id, sequences);
}

// --------------------------------------------------------------------------------------- scheduling

bool Engine::grow(Sequence& s, std::int32_t tokens, bool& grew) {
  const std::int32_t more = blocks_for(s.computed + tokens) - pool_.size(s.table);
  grew = more > 0;
  return !grew || pool_.extend(s.table, more);
}

void Engine::add_item(Step& step, SeqId id, std::int32_t tokens, bool grew, Sequence& s) {
  const std::int32_t before = s.computed;
  s.computed += tokens;
  const bool sampled = s.computed == s.known + s.pending;
  const bool decode = tokens == 1 && sampled;
  if (!decode || grew || s.computed <= s.prompt) {
    pool_.publish(s.table, std::min(s.computed, s.known) / limits_.block_size);
  }
  if (sampled) ++s.pending;
  step.items.push_back({id, tokens, sampled});

  StepShape& shape = step.shape;
  const std::int64_t p = before, n = tokens, window = clock_.window;
  shape.sampled_requests += sampled ? 1 : 0;
  if (decode) {
    ++shape.decode_requests;
    shape.decode_context += p + 1;
    if (window > 0) shape.decode_window_context += std::min(p + 1, window);
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
  for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
    const SeqId id = running_[i];
    Sequence& s = sequences[id];
    if (s.known + s.pending >= s.final) continue;  // its last token is already being sampled
    const std::int32_t tokens = std::min(s.known + s.pending - s.computed, budget);
    bool grew = false;
    while (!grow(s, tokens, grew)) {
      preempt_last(sequences);
      preempted = true;
      if (i >= running_.size()) return true;  // it was the last one itself
    }
    add_item(step, id, tokens, grew, s);
    budget -= tokens;
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
    bool grew = false;
    if (!grow(s, tokens, grew)) return held_up(Wait::blocks);
    parked_.erase(parked_.begin() + static_cast<std::ptrdiff_t>(i));
    s.status = SeqStatus::running;
    running_.push_back(id);
    add_item(step, id, tokens, grew, s);
    budget -= tokens;
  }
  return true;
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
    const std::int32_t hits = pool_.cached_prefix(s.identity, (s.known - 1) / block);
    const std::int32_t have = hits * block;

    const std::int32_t lacking = s.prompt - have;
    const bool load =
        s.remote && lacking > limits_.full_hit_tokens && lacking >= limits_.pd_recompute_threshold;

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
    // All of what is known must fit, not only the first chunk (vLLM's scheduler_reserve_full_isl).
    const std::int32_t covered = blocks_for(load ? s.prompt : have + tokens);
    if (!pool_.allocate(s.table, hits, covered - hits, blocks_for(s.known) - covered)) {
      held_up(Wait::blocks);
      return;
    }

    waiting_.pop_front();
    s.computed = have;
    if (s.admitted < 0) {
      s.admitted = now;
      s.hit_tokens = have;
    }
    if (s.lost > 0) s.recomputed += std::max(0, s.lost - have);
    s.lost = 0;
    if (load) {
      s.status = SeqStatus::loading;
      s.load_tokens = lacking;
      parked_.push_back(id);
      step.loads.push_back(id);
      continue;
    }
    if (s.remote) {
      s.remote = false;
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
  statistics_.waits[static_cast<std::size_t>(wait_)] +=
      (now - wait_since_) * static_cast<Nanos>(wait_length_);
  wait_since_ = now;
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
  wait_length_ = waiting_.size();
  statistics_.max_used_blocks =
      std::max(statistics_.max_used_blocks, pool_.total_blocks() - pool_.free_blocks());
  if (log_cache_) log_events(step.number);
  return step.has_work();
}

// --------------------------------------------------------------------------------------- boundaries

void Engine::finish_step(Nanos now, Sequences& sequences, Outcome& outcome, Histogram& gaps) {
  PDSIM_CHECK(in_flight_ && now == step_end_, "a step ended at another time than planned");
  in_flight_ = false;
  bool any_finished = false;
  for (const Step::Item& item : current().items) {
    if (!item.sampled) continue;
    Sequence& s = sequences[item.seq];
    --s.pending;
    ++s.known;
    if (!s.silent) {
      if (s.last_token < 0) {
        outcome.first_tokens.push_back(item.seq);
      } else {
        const Nanos gap = now - s.last_token;
        s.longest_gap = std::max(s.longest_gap, gap);
        if (s.counted) gaps.add(gap);
      }
    }
    s.last_token = now;
    if (s.known < s.final) continue;
    if (s.status == SeqStatus::waiting) std::erase(waiting_, item.seq);  // preempted meanwhile
    if (s.table != kNoTable) {
      pool_.publish(s.table, std::min(s.computed, s.known) / limits_.block_size);
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
  t.prefill_tokens += shape.prefill_tokens;
  t.sampled_requests += shape.sampled_requests;
  t.sampling_steps += shape.sampled_requests > 0 ? 1 : 0;
  const auto tokens = static_cast<std::size_t>(shape.tokens());
  if (tokens >= t.steps_of_tokens.size()) t.steps_of_tokens.resize(tokens + 1, 0);
  ++t.steps_of_tokens[tokens];
  t.decode_context += shape.decode_context;
  t.decode_window_context += shape.decode_window_context;
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
    if (s.started) continue;
    s.started = true;
    outcome.started.push_back(item.seq);
  }
  StepTime time{idle_step, false};
  if (!step.items.empty()) {
    time = clock_(step.shape);
    count_step(step.shape, time);
  }
  statistics_.busy += delay;
  statistics_.posting += delay;
  step_end_ = now + delay + time.ns;
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
  if (limits_.step_by_step || !steady(now, sequences)) return step_end_;

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

void Engine::account_blocks(Nanos now) {
  Statistics& st = statistics_;
  used_block_ns_ += static_cast<__int128>(pool_.total_blocks() - pool_.free_blocks()) * (now - st.since);
  st.used_block_ns = static_cast<double>(used_block_ns_);
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
