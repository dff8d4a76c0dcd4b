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
//     table covers them. known + pending never exceeds final, but by drafts.
//  3. A *run* is a row of boundaries at which nothing changes but context lengths. Its end times are
//     computed ahead by the same step clock; boundaries strictly before the first news are applied by
//     settle(), those from there on are reached through full boundaries. Both give the same state.
//  4. Speculative decoding (vLLM V1's scheduler): a decode step of a sequence computes its token and k
//     drafts, in full whatever is left of its output. While a step is in flight all its drafts count as
//     accepted: the step after it is scheduled, and gets blocks, for the longest outcome. What is rejected
//     is taken back, of computed and of the shape of that step, when the outcome is known; a sequence that
//     it ends stays in that step, whose tokens of it are thrown away. known counts tokens that the client
//     has: KV of a rejected draft is never published. No step leaves all sequences alike, so there are no
//     runs.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "models/step_model.hpp"
#include "sim/core/histogram.hpp"
#include "sim/core/time.hpp"
#include "sim/core/timeline.hpp"
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
  std::int32_t prompt = 0;      ///< tokens in the prompt
  std::int32_t final = 0;       ///< tokens when this leg is done: the prompt and what it generates here
  std::int32_t known = 0;       ///< tokens whose value is known: the prompt and those emitted
  std::int32_t pending = 0;     ///< tokens being sampled by steps in flight
  std::int32_t computed = 0;    ///< see invariant 2
  std::int32_t drafts = 0;      ///< tokens that its next decode step would verify
  std::int32_t hit_tokens = 0;  ///< found in this engine's prefix cache at first admission
  std::int32_t remote_tokens =
      0;                         ///< leading tokens whose KV lies on another worker, until loaded or declined
  std::int32_t load_tokens = 0;  ///< of them, those that came or are to come from there
  std::int32_t preemptions = 0;
  std::int32_t recomputed = 0;     ///< tokens computed again after preemptions
  std::int32_t lost = 0;           ///< tokens that the last preemption threw away
  std::int32_t latest_tokens = 0;  ///< of its latest item
  std::uint32_t latest_step = 0;   ///< number of the step that has it
  SeqStatus status = SeqStatus::waiting;
  bool silent = false;       ///< its token is not the client's: a prefill leg
  bool counted = false;      ///< its token gaps are in the statistics
  bool started = false;      ///< some step has computed it
  bool aborted = false;      ///< its request has ended before it
  Nanos considered = -1;     ///< when the scheduler first had it in its queue
  Nanos admitted = -1;       ///< when its blocks were allocated
  Nanos last_token = -1;     ///< when its latest token left, -1 before the first
  Nanos delayed_since = -1;  ///< pinned blocks alone keep it from being admitted, since then
  Nanos longest_gap = 0;
  std::vector<HashRun> identity;
};

using Sequences = std::vector<Sequence>;

/// What the engine asks whoever owns it, inside a schedule.
struct EngineHooks {
  void* owner = nullptr;
  /// Whether the head of the queue, of whose remote tokens `have` are here, shall be loaded. Called again
  /// whenever it is looked at; the last answer counts.
  bool (*load)(void* owner, SeqId seq, std::int32_t have) = nullptr;
  /// Lets go of blocks that finished sequences hold, so that at least `blocks` are free. False: it cannot.
  bool (*reclaim)(void* owner, std::uint32_t engine, std::int32_t blocks) = nullptr;
  std::uint32_t engine = 0;  ///< what this one is called there
};

/// Who keeps blocks from the free queue, beside what runs.
enum class Hold : std::uint8_t { loading, leased, pinned };
inline constexpr std::size_t kHolds = 3;

/// Speculative decoding, as the scheduler sees it.
struct Speculation {
  std::int32_t tokens = 0;     ///< drafted for each decode step (num_speculative_tokens); 0 = none
  std::int32_t lookahead = 0;  ///< slots allocated beyond a step's own, for the drafter's KV
  bool drops_last_hit =
      false;  ///< the last block found in the cache is computed again, for its hidden states
  std::vector<double> accepted;  ///< [i]: probability that the first i + 1 drafts are accepted; falling
  std::uint64_t seed = 0;
};

struct EngineLimits {
  std::int32_t block_size = 16;
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  bool chunked_prefill = true;
  bool async = true;
  bool step_by_step = false;               ///< no runs: every boundary is a full one
  std::int32_t max_model_len = INT32_MAX;  ///< where drafts and their slots end
  Speculation speculation;
};

/// One scheduled step.
struct Step {
  struct Item {
    SeqId seq;
    std::int32_t tokens;
    bool sampled;          ///< yields a token
    bool drafted = false;  ///< all its tokens but one are drafts: yields one to all of them
    bool operator==(const Item&) const = default;
  };
  std::vector<Item> items;
  StepShape shape;
  std::vector<SeqId> loads;     ///< remote sequences admitted: their transfers start with this step
  std::vector<SeqId> declined;  ///< remote sequences that will compute the rest themselves
  Nanos at_least = 0;        ///< what it takes whatever its own work: data-parallel ranks wait for each other
  std::uint32_t number = 0;  ///< in order of scheduling
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
         bool log_cache, const EngineHooks& hooks = {});

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
  /// Removes a sequence that waits, runs or has been loaded; its blocks are given back, and what steps
  /// already scheduled compute of it is thrown away. Its slot may be used again when !references().
  void abort(SeqId seq, Sequences& sequences);
  /// Whether a step in flight or scheduled computes it. O(batch).
  bool references(SeqId seq) const;
  /// Tokens of a sequence in the current step that are computed when that step has run.
  std::int32_t computed_after_current(SeqId seq, const Sequences& sequences) const;
  /// The process is gone and another takes its place, empty: no steps, no queues, no cache. Requires that
  /// every table has been released.
  void restart(Nanos now);
  /// Blocks of finished sequences that are kept for somebody else, more or fewer from now on.
  void hold(Hold cause, std::int32_t blocks) { held_[static_cast<std::size_t>(cause)] += blocks; }
  std::int32_t held(Hold cause) const { return held_[static_cast<std::size_t>(cause)]; }
  /// Gives back the blocks of a held sequence beyond the first `blocks`.
  void truncate(SeqId seq, std::int32_t blocks, Sequences& sequences);

  // ---- boundaries
  bool stepping() const { return in_flight_; }
  /// Whether begin() will start a step that was scheduled a boundary ago.
  bool has_next() const { return has_next_; }
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
  /// The step in flight ends at `end` at the earliest, and a run with it. Returns the time of the next full
  /// boundary: `now` when one is due, and the step after it is the caller's to see to.
  Nanos stretch(Nanos now, Nanos end);
  /// Applies the run's boundaries before `now`.
  void settle(Nanos now, Sequences& sequences, Histogram& gaps);
  /// Applies all that is left of the run. Called at the full boundary that ends it.
  void close_run(Sequences& sequences, Histogram& gaps);

  // ---- to look at
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }
  const EngineLimits& limits() const { return limits_; }
  bool speculates() const { return limits_.speculation.tokens > 0; }
  bool has_requests() const { return !waiting_.empty() || !parked_.empty() || !running_.empty(); }
  std::size_t waiting() const { return waiting_.size(); }
  std::size_t parked() const { return parked_.size(); }
  std::size_t running() const { return running_.size(); }
  /// Cache events in order; kept only when asked for. Whoever has read the first n may drop them.
  const std::vector<LoggedCacheEvent>& cache_log() const { return log_; }
  void forget_log(std::size_t n);

  /// Why the first in the queue was not admitted.
  enum class Wait : std::uint8_t { none, slot, blocks, budget, pins };
  static constexpr std::size_t kWaits = 5;

  /// Of decode steps that verified drafts, by sequence.
  struct Drafting {
    std::int64_t rows = 0;                  ///< such steps
    std::int64_t drafted = 0;               ///< tokens verified in them
    std::int64_t accepted = 0;              ///< of them
    std::int64_t yielded = 0;               ///< tokens that the sequences got, their own ones included
    std::vector<std::int64_t> by_position;  ///< accepted, by position among the drafts
    std::vector<std::int64_t> drafted_at;   ///< drafted, likewise
  };

  struct Statistics {
    StepTotals totals;
    Drafting drafting;
    std::int64_t rejected_tokens = 0;  ///< computed, but no sequence has them: rejected, or beyond its end
    std::int64_t extrapolated_steps = 0;
    Nanos busy = 0;     ///< time in steps that compute tokens, and posting
    Nanos posting = 0;  ///< of it, time that the forward thread spent posting
    std::array<Nanos, kWaits>
        waits{};  ///< by Wait: request-time in the queue; pins = blocks that only pins hold
    std::int64_t preemptions = 0;
    std::int64_t found_later =
        0;  ///< tokens in the cache, beyond what they had computed, when preempted ones came back
    double used_block_ns = 0;     ///< integral of blocks in use over time
    std::int64_t pin_delays = 0;  ///< admissions that only pinned blocks held up
    Nanos pin_delay = 0;          ///< for how long, all together
    std::int32_t max_used_blocks = 0;
    Nanos since = 0;  ///< integral is up to here
  };
  const Statistics& statistics() const { return statistics_; }
  /// Blocks over time: those in use beside the others, and by Hold. Exact once account_blocks(end) was
  /// called.
  const Timeline& timeline() const { return timeline_; }
  /// Of `busy`, what lies after `now`: the rest of the step in flight, its posting included. Requires
  /// settle(now).
  Nanos busy_after(Nanos now) const;
  /// Brings the integrals of blocks in use, and of waits, up to `now`: before any change of hold().
  void account_blocks(Nanos now);

 private:
  bool schedule(Nanos now, Step& step, Sequences& sequences);
  bool schedule_running(Step& step, std::int32_t& budget, Sequences& sequences);
  bool held_up(Wait why);
  bool schedule_parked(Step& step, std::int32_t& budget, Sequences& sequences);
  void schedule_waiting(Nanos now, Step& step, std::int32_t& budget, Sequences& sequences);
  bool grow(Sequence& sequence, std::int32_t tokens, bool& grew);
  void add_item(Step& step, SeqId id, std::int32_t tokens, bool grew, Sequence& sequence,
                std::int32_t drafts = 0);
  std::int32_t verify(const Step::Item& item, Sequence& sequence);
  bool steady(Nanos now, const Sequences& sequences) const;
  void preempt_last(Sequences& sequences);
  void count_step(const StepShape& shape, const StepTime& time);
  void account_waits(Nanos now);
  void apply_boundary(std::int32_t index, Sequences& sequences, Histogram& gaps);
  void log_events(std::uint32_t step);
  void publish_events(std::uint32_t step, Nanos now);
  std::int32_t blocks_for(std::int32_t tokens) const {
    return (tokens + limits_.block_size - 1) / limits_.block_size;
  }

  bool allocate(Nanos now, Sequence& s, std::int32_t hits, std::int32_t covered);

  EngineLimits limits_;
  StepClock clock_;
  BlockPool pool_;
  EngineHooks hooks_;
  std::array<std::int32_t, kHolds> held_{};  ///< blocks, counted once for each that holds them

  std::vector<SeqId> running_;
  std::vector<SeqId> parked_;  ///< loading or loaded, in order of admission (vLLM: skipped_waiting)
  std::deque<SeqId> waiting_;
  std::vector<SeqId> fresh_;  ///< enqueued since the last schedule

  Step steps_[2];
  int current_ = 0;
  bool in_flight_ = false;
  bool has_next_ = false;  ///< steps_[1 - current_] is scheduled
  Nanos step_end_ = 0;
  Nanos work_end_ = 0;  ///< of the step in flight: an empty one works as long as it posts

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
  Wait wait_ = Wait::none;       ///< of the queue since the last schedule
  std::size_t wait_length_ = 0;  ///< the waiting, and those whose KV is here
  Nanos wait_since_ = 0;
  bool stuck_ = false;  ///< whatever waits cannot be scheduled until something is freed or heard
  bool log_cache_;
  Statistics statistics_;
  Timeline timeline_{1 + kHolds};
  __int128 used_block_ns_ = 0;  ///< exact, so that it does not depend on how often it was brought up to date
};

}  // namespace pdsim
