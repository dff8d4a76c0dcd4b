// One engine: vLLM V1's scheduler and its step pipeline over one worker's block pool.
//
// The engine knows batches, blocks and tokens. It knows no network, no router and no event queue: the
// cluster tells it when a boundary is reached and asks what comes next.
//
// Protocol at a boundary (time `now`, when the step in flight ends or the engine wakes)
//   close_run     the boundaries of a run that led here
//   finish_step   the outputs of the step that ended: first tokens, finished sequences
//   enqueue / loaded / release ...   what the cluster has heard since the last boundary
//   begin         picks the step that starts now: scheduled before, or now
//   launch        starts it, and schedules the next
// With async_scheduling the step after the one that starts now is scheduled as well, so news heard at
// this boundary is first acted on in the step after that. Without it, in the step that starts now.
//
// Invariants
//  1. Running sequences are scheduled first, in order of admission; waiting ones first come first
//     served, behind those that wait for a remote load. A preempted sequence waits at the front.
//  2. sequence.computed counts tokens whose KV is written once the scheduled steps have run; the block
//     table covers them. known + pending never exceeds final.
//  3. A *run* is a row of boundaries at which nothing changes but context lengths. Its end times are
//     computed ahead by the same step clock; boundaries strictly before the first news are applied by
//     settle(), those from there on are reached through full boundaries. Both give the same state.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "models/step_model.hpp"
#include "sim/core/histogram.hpp"
#include "sim/core/time.hpp"
#include "sim/serving/block_pool.hpp"

namespace pdsim {

using SeqId = std::uint32_t;
inline constexpr SeqId kNoSeq = UINT32_MAX;
inline constexpr TableId kNoTable = -1;

/// How long a step takes: a cost model, or a test's stand-in.
struct StepClock {
  const void* model = nullptr;
  StepTime (*time)(const void* model, const StepShape& shape) = nullptr;
  std::int32_t window = 0;  ///< the model's sliding window in tokens; 0 = none

  StepTime operator()(const StepShape& shape) const { return time(model, shape); }
};
StepClock clock_of(const StepModel& model, std::int32_t window);

enum class SeqStatus : std::uint8_t {
  waiting,  ///< in the waiting queue, no blocks
  loading,  ///< blocks allocated, waits for KV from another worker (WAITING_FOR_REMOTE_KVS)
  loaded,   ///< that KV is here; scheduled next time there is room
  running,
  finished,  ///< no longer scheduled; its table may still be held for another worker
};

/// One leg of a request on one engine. A handed-over request has two, one after the other.
struct Sequence {
  std::uint32_t request = 0;
  TableId table = kNoTable;
  std::int32_t prompt = 0;       ///< tokens in the prompt
  std::int32_t final = 0;        ///< tokens when this leg is done: the prompt and what it generates here
  std::int32_t known = 0;        ///< tokens whose value is known: the prompt and those emitted
  std::int32_t pending = 0;      ///< tokens being sampled by steps in flight
  std::int32_t computed = 0;     ///< see invariant 2
  std::int32_t hit_tokens = 0;   ///< found in this engine's prefix cache at first admission
  std::int32_t load_tokens = 0;  ///< to be read from the other worker; 0 once decided not to
  std::int32_t preemptions = 0;
  std::int32_t recomputed = 0;  ///< tokens computed again after preemptions
  std::int32_t lost = 0;        ///< tokens that the last preemption threw away
  SeqStatus status = SeqStatus::waiting;
  bool remote = false;    ///< its prompt's KV lies on another worker until loaded (or found here)
  bool silent = false;    ///< its token is not the client's: a prefill leg
  bool counted = false;   ///< its token gaps are in the statistics
  bool started = false;   ///< some step has computed it
  Nanos considered = -1;  ///< when the scheduler first had it in its queue
  Nanos admitted = -1;    ///< when its blocks were allocated
  Nanos last_token = -1;  ///< when its latest token left, -1 before the first
  Nanos longest_gap = 0;
  std::vector<HashRun> identity;
};

using Sequences = std::vector<Sequence>;

struct EngineLimits {
  std::int32_t block_size = 16;
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  std::int32_t full_hit_tokens = 16;        ///< a remote sequence that lacks no more is not loaded
  std::int32_t pd_recompute_threshold = 0;  ///< nor one that lacks fewer than this
  bool chunked_prefill = true;
  bool async = true;
  bool step_by_step = false;  ///< no runs: every boundary is a full one
};

/// One scheduled step.
struct Step {
  struct Item {
    SeqId seq;
    std::int32_t tokens;
    bool sampled;  ///< yields a token
    bool operator==(const Item&) const = default;
  };
  std::vector<Item> items;
  StepShape shape;
  std::vector<SeqId> loads;     ///< remote sequences admitted: their transfers start with this step
  std::vector<SeqId> declined;  ///< remote sequences that will compute the rest themselves
  std::uint32_t number = 0;     ///< in order of scheduling
  Nanos scheduled = 0;

  bool has_work() const { return !items.empty() || !loads.empty() || !declined.empty(); }
  void clear();
};

/// What a boundary brought; the cluster reads and clears it.
struct Outcome {
  std::vector<SeqId> first_tokens;  ///< non-silent sequences that emitted their first token
  std::vector<SeqId> finished;      ///< sequences that reached their final token
  std::vector<SeqId> started;       ///< sequences computed for the first time by the step that starts now
};

/// A cache event and when it is published: at the end of the step that made it.
struct LoggedCacheEvent {
  CacheEvent event;
  std::uint32_t step;
  Nanos published;  ///< kNever until that step has ended
};

class Engine {
 public:
  Engine(const EngineLimits& limits, StepClock clock, std::int32_t blocks, bool prefix_caching,
         bool log_cache);

  // ---- sequences
  /// A request has reached this engine. Its identity must not change while it lives.
  void enqueue(SeqId seq) {
    waiting_.push_back(seq);
    fresh_.push_back(seq);
  }
  /// A loading sequence's KV is here: `tokens` of its prompt. Its blocks become cached when it is scheduled.
  void loaded(SeqId seq, std::int32_t tokens, Sequences& sequences);
  /// Gives back the blocks of a finished (or abandoned) sequence.
  void release(SeqId seq, Sequences& sequences);
  /// Removes a loading sequence that failed; its blocks are given back.
  void abandon(SeqId seq, Sequences& sequences);

  // ---- boundaries
  bool stepping() const { return in_flight_; }
  /// Ends the step in flight. Requires stepping() and now == step_end().
  void finish_step(Nanos now, Sequences& sequences, Outcome& outcome, Histogram& gaps);
  /// Picks the step that starts now (scheduled before, or now). False when there is none.
  bool begin(Nanos now, Sequences& sequences);
  /// The step picked by begin(); its `loads` and `declined` are the cluster's to act on.
  Step& current() { return steps_[current_]; }
  /// Lets it run: `delay` is what held up the forward pass (posting descriptors). Then schedules the
  /// one after it when asynchronous. `idle_step` is how long a step without tokens takes.
  void launch(Nanos now, Nanos delay, Nanos idle_step, Sequences& sequences, Outcome& outcome);
  Nanos step_end() const { return step_end_; }

  // ---- runs
  /// Plans a run from the boundary just handled, when nothing but context lengths will change for a
  /// while. Boundaries at or after `deadline` are not planned. Returns the time of the next full one.
  Nanos plan_run(Nanos now, Nanos deadline, Sequences& sequences);
  /// News at `now`: the first boundary at or after it must be a full one. Returns its time, or kNever
  /// when the next full boundary stays where it is.
  Nanos cut_run(Nanos now);
  /// Applies the run's boundaries before `now`.
  void settle(Nanos now, Sequences& sequences, Histogram& gaps);
  /// Applies all that is left of the run. Called at the full boundary that ends it.
  void close_run(Sequences& sequences, Histogram& gaps);

  // ---- to look at
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }
  const EngineLimits& limits() const { return limits_; }
  bool has_requests() const { return !waiting_.empty() || !parked_.empty() || !running_.empty(); }
  std::size_t waiting() const { return waiting_.size(); }
  std::size_t parked() const { return parked_.size(); }
  std::size_t running() const { return running_.size(); }
  /// Cache events in order; kept only when asked for. Whoever has read the first n may drop them.
  const std::vector<LoggedCacheEvent>& cache_log() const { return log_; }
  void forget_log(std::size_t n);

  /// Why the first in the queue was not admitted.
  enum class Wait : std::uint8_t { none, slot, blocks, budget };

  struct Statistics {
    StepTotals totals;
    std::int64_t extrapolated_steps = 0;
    Nanos busy = 0;                ///< time in steps that compute tokens, and posting
    Nanos posting = 0;             ///< of it, time that the forward thread spent posting
    std::array<Nanos, 4> waits{};  ///< by Wait: request-time in the queue
    std::int64_t preemptions = 0;
    double used_block_ns = 0;  ///< integral of blocks in use over time
    std::int32_t max_used_blocks = 0;
    Nanos since = 0;  ///< integral is up to here
  };
  const Statistics& statistics() const { return statistics_; }
  /// Brings the integral of blocks in use up to `now`.
  void account_blocks(Nanos now);

 private:
  bool schedule(Nanos now, Step& step, Sequences& sequences);
  bool schedule_running(Step& step, std::int32_t& budget, Sequences& sequences);
  bool held_up(Wait why);
  bool schedule_parked(Step& step, std::int32_t& budget, Sequences& sequences);
  void schedule_waiting(Nanos now, Step& step, std::int32_t& budget, Sequences& sequences);
  bool grow(Sequence& sequence, std::int32_t tokens, bool& grew);
  void add_item(Step& step, SeqId id, std::int32_t tokens, bool grew, Sequence& sequence);
  bool steady(Nanos now, const Sequences& sequences) const;
  void preempt_last(Sequences& sequences);
  void count_step(const StepShape& shape, const StepTime& time);
  void apply_boundary(std::int32_t index, Sequences& sequences, Histogram& gaps);
  void log_events(std::uint32_t step);
  void publish_events(std::uint32_t step, Nanos now);
  std::int32_t blocks_for(std::int32_t tokens) const {
    return (tokens + limits_.block_size - 1) / limits_.block_size;
  }

  EngineLimits limits_;
  StepClock clock_;
  BlockPool pool_;

  std::vector<SeqId> running_;
  std::vector<SeqId> parked_;  ///< loading or loaded, in order of admission (vLLM: skipped_waiting)
  std::deque<SeqId> waiting_;
  std::vector<SeqId> fresh_;  ///< enqueued since the last schedule

  Step steps_[2];
  int current_ = 0;
  bool in_flight_ = false;
  bool has_next_ = false;  ///< steps_[1 - current_] is scheduled
  Nanos step_end_ = 0;

  // A run: plain boundaries 1..planned at ends[0..], then a full one at ends[planned].
  struct Run {
    std::int32_t planned = 0;
    std::int32_t applied = 0;
    std::int32_t batch = 0;
    std::int32_t counted = 0;       ///< sequences whose gaps are in the statistics
    std::int32_t below_window = 0;  ///< sequences whose context is still shorter than the window
    Nanos start = 0;
    Nanos longest_gap = 0;
    std::vector<Nanos> ends;
    std::vector<std::uint8_t> extrapolated;  ///< of the step that starts at that boundary
    std::vector<std::int32_t> bucket;        ///< block_size + 1 offsets into `crossing`
    std::vector<std::int32_t> crossing;      ///< running indices by the boundary at which they need a block
  };
  Run run_;

  std::vector<LoggedCacheEvent> log_;
  std::size_t published_ = 0;  ///< entries of log_ that have their time
  std::uint32_t step_number_ = 0;
  Wait wait_ = Wait::none;  ///< of the queue since the last schedule
  std::size_t wait_length_ = 0;
  Nanos wait_since_ = 0;
  bool stuck_ = false;  ///< whatever waits cannot be scheduled until something is freed or heard
  bool log_cache_;
  Statistics statistics_;
  __int128 used_block_ns_ = 0;  ///< exact, so that it does not depend on how often it was brought up to date
};

}  // namespace pdsim
