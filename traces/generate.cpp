#include "traces/generate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "sim/core/error.hpp"
#include "sim/core/math.hpp"
#include "sim/core/random.hpp"
#include "traces/formats.hpp"

namespace pdsim {

namespace {

constexpr std::int32_t kHashBlockTokens = 512;
constexpr std::int32_t kMaxTokens = 10'000'000;
constexpr double kMaxSpan = 1e9;  // s; with these bounds no knob makes a time overflow

// Knobs are checked as the condition that must hold (NaN holds none).
void require(bool holds, std::string_view knob, double value, std::string_view expected) {
  if (!holds) throw InputError(knob, fmt::format("is {}, expected {}", value, expected));
}

void check(std::string_view knob, const Lengths& lengths) {
  require(lengths.mean >= 1 && lengths.mean <= 1e9, fmt::format("{}: mean", knob), lengths.mean,
          "1 to 1e9 tokens");
  require(lengths.sigma >= 0 && lengths.sigma <= 5, fmt::format("{}: sigma", knob), lengths.sigma, "0 to 5");
  require(lengths.min >= 1, fmt::format("{}: min", knob), lengths.min, "at least 1 token");
  require(lengths.max >= lengths.min && lengths.max <= kMaxTokens, fmt::format("{}: max", knob), lengths.max,
          "min to 1e7 tokens");
}

void check(const GenerateConfig& c) {
  require(c.requests >= 1, "generate: requests", c.requests, "at least 1");
  require(c.rate > 0 && c.rate <= 1e6, "generate: rate", c.rate, "above 0, at most 1e6 requests per second");
  require(c.requests / c.rate <= kMaxSpan, "generate: rate", c.rate, "requests / rate of at most 1e9 s");
  require(c.burstiness >= 0.01 && c.burstiness <= 1e4, "generate: burstiness", c.burstiness, "0.01 to 1e4");
  require(c.stamp_grid >= 1 && c.stamp_grid <= 3600 * kSecond, "generate: stamp_grid_ms", to_ms(c.stamp_grid),
          "1e-6 to 3.6e6 ms");
  require(c.system_prompts >= 0 && c.system_prompts <= 1'000'000, "generate: system_prompts",
          c.system_prompts, "0 to 1e6");
  require(c.zipf >= 0 && c.zipf <= 10, "generate: zipf", c.zipf, "0 to 10");
  check("generate: system_prompt", c.system_prompt);
  check("generate: first_message", c.first_message);
  check("generate: message", c.message);
  check("generate: output", c.output);
  require(c.max_prompt_tokens >= 1, "generate: max_prompt_tokens", c.max_prompt_tokens, "at least 1 token");
  require(c.multi_turn_share >= 0 && c.multi_turn_share <= 1, "generate: multi_turn_share",
          c.multi_turn_share, "0 to 1");
  require(c.turns >= 2 && c.turns <= 1e4, "generate: turns", c.turns, "2 to 1e4");
  require(c.think_time_s >= 0 && c.think_time_s <= 1e6, "generate: think_time_s", c.think_time_s,
          "0 to 1e6 s");
  require(c.think_time_sigma >= 0 && c.think_time_sigma <= 5, "generate: think_time_sigma",
          c.think_time_sigma, "0 to 5");
  require(c.first_token_ms >= 0 && c.first_token_ms <= 1e7, "generate: first_token_ms", c.first_token_ms,
          "0 to 1e7 ms");
  require(c.output_token_ms >= 0 && c.output_token_ms <= 1000, "generate: output_token_ms", c.output_token_ms,
          "0 to 1000 ms");
}

double lognormal(Random& random, double mean, double sigma) {
  if (sigma == 0 || mean == 0) return mean;
  return mean * math::exp(sigma * random.normal() - 0.5 * sigma * sigma);
}

std::int32_t draw(Random& random, const Lengths& lengths) {
  const double tokens = std::floor(lognormal(random, lengths.mean, lengths.sigma) + 0.5);
  return static_cast<std::int32_t>(
      std::clamp(tokens, static_cast<double>(lengths.min), static_cast<double>(lengths.max)));
}

std::int32_t draw_turns(Random& random, const GenerateConfig& config) {
  if (random.uniform() >= config.multi_turn_share) return 1;
  const double beyond = config.turns - 2;  // geometric on 0, 1, ... with this mean
  if (beyond <= 0) return 2;
  const double k = math::log(1.0 - random.uniform()) / math::log(beyond / (beyond + 1));
  return 2 + static_cast<std::int32_t>(std::min(k, 1e6));
}

std::int32_t blocks_of(std::int32_t tokens, std::int32_t block_tokens) {
  return (tokens - 1) / block_tokens + 1;
}

// The shared system prompts: how long each is, which a conversation takes.
struct SystemPrompts {
  std::vector<std::int32_t> tokens;
  std::vector<double> cumulative;  ///< of k^-zipf

  explicit SystemPrompts(const GenerateConfig& config) {
    double sum = 0;
    for (std::int32_t k = 0; k < config.system_prompts; ++k) {
      Random random(config.seed, Purpose::prefixes, static_cast<std::uint64_t>(k));
      tokens.push_back(std::min(draw(random, config.system_prompt), config.max_prompt_tokens - 1));
      cumulative.push_back(sum += math::pow(k + 1.0, -config.zipf));
    }
  }
  std::int32_t choose(Random& random) const {
    if (tokens.empty()) return -1;
    const double point = random.uniform() * cumulative.back();
    const auto at = std::upper_bound(cumulative.begin(), cumulative.end() - 1, point);
    return static_cast<std::int32_t>(at - cumulative.begin());
  }
};

// The first config.requests arrivals, in order, and the system prompt of each conversation. Conversations
// begin one after another, each with all its turns, until no later one can hold one of these arrivals.
std::vector<Request> make_requests(const GenerateConfig& config, const SystemPrompts& prompts,
                                   std::vector<std::int32_t>& system_of) {
  const auto wanted = static_cast<std::ptrdiff_t>(config.requests);
  const double mean_gap = (1 + config.multi_turn_share * (config.turns - 1)) / config.rate;
  const auto earlier = [](const Request& a, const Request& b) { return a.arrival < b.arrival; };
  std::vector<Request> requests;
  Random gaps(config.seed, Purpose::arrivals);
  double start = 0;    // s
  Nanos end = kNever;  // an upper bound of the last arrival wanted, once there are enough requests
  while (ceil_ns(start * 1e9) / config.stamp_grid * config.stamp_grid <= end) {
    const auto conversation = static_cast<std::int32_t>(system_of.size());
    const auto entity = static_cast<std::uint64_t>(conversation);
    Random shape(config.seed, Purpose::conversations, entity);
    Random lengths(config.seed, Purpose::lengths, entity);
    Random pauses(config.seed, Purpose::think_time, entity);
    const std::int32_t prompt = prompts.choose(shape);
    const std::int32_t turns = draw_turns(shape, config);
    system_of.push_back(prompt);
    std::int64_t context =
        prompt < 0 ? 0 : prompts.tokens[static_cast<std::size_t>(prompt)];  // the next begins so
    Nanos clock = ceil_ns(start * 1e9);
    for (std::int32_t turn = 0; turn < turns && to_seconds(clock) < 2 * kMaxSpan; ++turn) {
      Request request;
      context += draw(lengths, turn == 0 ? config.first_message : config.message);
      if (context > config.max_prompt_tokens) {
        if (turn > 0) break;
        context = config.max_prompt_tokens;
      }
      request.prompt_tokens = static_cast<std::int32_t>(context);
      request.output_tokens = draw(lengths, config.output);
      request.session = conversation;
      request.turn = turn;
      if (turn > 0) {
        const double pause = std::min(lognormal(pauses, config.think_time_s, config.think_time_sigma), 1e7);
        request.think_time = static_cast<Nanos>(pause * 1e3 + 0.5) * kMillisecond;
        clock += request.think_time;
      }
      request.arrival = clock / config.stamp_grid * config.stamp_grid;
      clock += ceil_ns((config.first_token_ms + config.output_token_ms * request.output_tokens) * 1e6);
      context += request.output_tokens;
      requests.push_back(request);
    }
    if (end == kNever && static_cast<std::ptrdiff_t>(requests.size()) >= wanted) {
      std::vector<Request> sorted = requests;
      std::nth_element(sorted.begin(), sorted.begin() + (wanted - 1), sorted.end(), earlier);
      end = sorted[static_cast<std::size_t>(wanted - 1)].arrival;
    }
    start += mean_gap * unit_gamma(gaps, config.burstiness);
  }
  std::stable_sort(requests.begin(), requests.end(), earlier);
  requests.resize(static_cast<std::size_t>(wanted));
  return requests;
}

// Requests in order of arrival get their ids: those of the turn before or of the system prompt as far as
// full blocks reach, new ones from there.
void number_blocks(const SystemPrompts& prompts, const std::vector<std::int32_t>& system_of, Trace& trace) {
  std::uint64_t ids = 0;
  for (const Request& request : trace.requests) {
    ids += static_cast<std::uint64_t>(blocks_of(request.prompt_tokens, kHashBlockTokens));
  }
  trace.hash_ids.reserve(ids);
  std::uint64_t next_id = 0;
  std::vector<std::uint64_t> first_block(prompts.tokens.size(),
                                         UINT64_MAX);      // of each system prompt seen so far
  std::vector<std::int64_t> before(system_of.size(), -1);  // the conversation's last request
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    Request& request = trace.requests[i];
    const auto conversation = static_cast<std::size_t>(request.session);
    request.hash_begin = trace.hash_ids.size();
    request.hash_count = blocks_of(request.prompt_tokens, kHashBlockTokens);
    std::uint64_t shared = 0, from = 0;
    if (before[conversation] >= 0) {
      const Request& last = trace.requests[static_cast<std::size_t>(before[conversation])];
      shared = static_cast<std::uint64_t>(last.prompt_tokens / kHashBlockTokens);
      from = last.hash_begin;
    } else if (system_of[conversation] >= 0) {
      const auto prompt = static_cast<std::size_t>(system_of[conversation]);
      if (first_block[prompt] == UINT64_MAX) {
        first_block[prompt] = request.hash_begin;
      } else {
        shared = static_cast<std::uint64_t>(prompts.tokens[prompt] / kHashBlockTokens);
        from = first_block[prompt];
      }
    }
    for (std::uint64_t block = 0; block < static_cast<std::uint64_t>(request.hash_count); ++block) {
      trace.hash_ids.push_back(block < shared ? trace.hash_ids[from + block] : next_id++);
    }
    before[conversation] = static_cast<std::int64_t>(i);
  }
}

}  // namespace

double unit_gamma(Random& random, double shape) {
  if (shape == 1) return random.exponential(1.0);
  const double boosted = shape < 1 ? shape + 1 : shape;
  const double d = boosted - 1.0 / 3.0, c = 1.0 / math::sqrt(9.0 * d);
  double v = 0;
  for (;;) {
    const double x = random.normal();
    v = 1.0 + c * x;
    if (v <= 0) continue;
    v = v * v * v;
    if (math::log(1.0 - random.uniform()) < 0.5 * x * x + d * (1.0 - v + math::log(v))) break;
  }
  const double power = shape < 1 ? math::pow(1.0 - random.uniform(), 1.0 / shape) : 1.0;
  return d * v * power / shape;
}

Trace generate_trace(const GenerateConfig& config) {
  check(config);
  Trace trace;
  trace.name = "generated";
  trace.format = "mooncake";
  trace.hash_block_tokens = kHashBlockTokens;
  const SystemPrompts prompts(config);
  std::vector<std::int32_t> system_of;
  trace.requests = make_requests(config, prompts, system_of);
  number_blocks(prompts, system_of, trace);

  std::int32_t sessions = 0;
  for (Request& request : trace.requests) {
    sessions = std::max(sessions, request.session + 1);
    if (config.multi_turn_share == 0) request.session = -1;
  }
  if (config.multi_turn_share > 0) {
    for (std::int32_t i = 0; i < sessions; ++i) trace.sessions.push_back(fmt::format("c{}", i));
  }
  trace.report.rows_read = trace.report.rows_used = trace.requests.size();
  return trace;
}

namespace {

/// The least of lengths drawn from [ratio x most, most]: numpy's callers truncate, pdsim stays inside. 0 only
/// for most = 0.
std::int32_t shortest(const SyntheticWorkload& w, std::int32_t most) {
  const double low = w.range_ratio * most;
  return w.numpy ? std::max(static_cast<std::int32_t>(low), std::min(most, 1))
                 : static_cast<std::int32_t>(std::ceil(low));
}

/// numpy.random.seed(0), then randint(low, most + 1) n times for the prompts and again for the outputs, with
/// low = int(ratio x most): a 32-bit Mersenne Twister, whose values are masked to the range's bits and
/// drawn again while they exceed it (numpy's legacy generator).
std::vector<std::int32_t> numpy_lengths(const SyntheticWorkload& w) {
  std::mt19937 generator(0);
  std::vector<std::int32_t> lengths;
  for (const std::int32_t most : {w.isl, w.osl}) {
    const std::int32_t low = shortest(w, most);
    const auto range = static_cast<std::uint32_t>(most - low);
    std::uint32_t mask = range;
    for (const int shift : {1, 2, 4, 8, 16}) mask |= mask >> shift;
    for (std::int32_t i = 0; i < w.requests; ++i) {
      std::uint32_t value = range;
      if (range > 0) {
        do value = static_cast<std::uint32_t>(generator()) & mask;
        while (value > range);
      }
      lengths.push_back(low + static_cast<std::int32_t>(value));
    }
  }
  return lengths;
}

}  // namespace

Trace synthetic_trace(const SyntheticWorkload& w, std::int32_t block_size, std::uint64_t seed) {
  require(w.requests >= 1, "synthetic: requests", w.requests, "at least 1");
  require(w.rate >= 0 && w.rate <= 1e6, "synthetic: rate", w.rate,
          "above 0, at most 1e6 requests per second");
  require(w.rate == 0 || w.requests / w.rate <= kMaxSpan, "synthetic: rate", w.rate,
          "requests / rate of at most 1e9 s");
  require(w.isl >= 1, "synthetic: isl", w.isl, "at least 1 token");
  require(w.osl >= 0, "synthetic: osl", w.osl, "at least 0 tokens");
  require(w.range_ratio > 0 && w.range_ratio <= 1, "synthetic: range_ratio", w.range_ratio,
          "above 0, at most 1");
  require(w.shared_prefix >= 0 && (w.shared_prefix == 0 || w.shared_prefix < shortest(w, w.isl)),
          "synthetic: shared_prefix", w.shared_prefix,
          fmt::format("below the shortest prompt ({} tokens)", shortest(w, w.isl)));
  require(w.distinct_prompts >= 0, "synthetic: distinct_prompts", w.distinct_prompts, "at least 0");
  require(block_size >= 1, "synthetic: block_size", block_size, "at least 1 token");

  const std::int32_t shared_blocks = w.shared_prefix / block_size;
  std::int32_t blocks_per_id = 1;
  while (2 * blocks_per_id * block_size <= kHashBlockTokens && shared_blocks % (2 * blocks_per_id) == 0) {
    blocks_per_id *= 2;
  }
  Trace trace;
  trace.name = trace.format = "synthetic";
  trace.hash_block_tokens = blocks_per_id * block_size;
  const auto shared_ids = static_cast<std::uint64_t>(shared_blocks / blocks_per_id);

  trace.requests.reserve(static_cast<std::size_t>(w.requests));
  Random gaps(seed, Purpose::arrivals);
  double arrival = 0;  // s
  std::uint64_t next_id = shared_ids;
  const std::vector<std::int32_t> drawn = w.numpy ? numpy_lengths(w) : std::vector<std::int32_t>();
  for (std::int32_t i = 0; i < w.requests; ++i) {
    Random lengths(seed, Purpose::lengths, static_cast<std::uint64_t>(i));
    const auto uniform = [&](std::int32_t most) {
      const std::int32_t low = shortest(w, most);
      return low + static_cast<std::int32_t>(lengths.below(static_cast<std::uint64_t>(most - low) + 1));
    };
    Request request;
    if (w.rate > 0 && i > 0) arrival = w.poisson ? arrival + gaps.exponential(1.0 / w.rate) : i / w.rate;
    request.arrival = ceil_ns(arrival * 1e9);
    request.prompt_tokens = w.numpy ? drawn[static_cast<std::size_t>(i)] : uniform(w.isl);
    request.output_tokens = w.numpy ? drawn[static_cast<std::size_t>(w.requests + i)] : uniform(w.osl);
    if (w.distinct_prompts > 0 && i >= w.distinct_prompts) {
      const Request& same = trace.requests[static_cast<std::size_t>(i - w.distinct_prompts)];
      request.prompt_tokens = same.prompt_tokens;
      request.hash_begin = same.hash_begin;
      request.hash_count = same.hash_count;
      trace.requests.push_back(request);
      continue;
    }
    request.hash_begin = trace.hash_ids.size();
    request.hash_count = blocks_of(request.prompt_tokens, trace.hash_block_tokens);
    for (std::uint64_t block = 0; block < static_cast<std::uint64_t>(request.hash_count); ++block) {
      trace.hash_ids.push_back(block < shared_ids ? block : next_id++);
    }
    trace.requests.push_back(request);
  }
  trace.report.rows_read = trace.report.rows_used = trace.requests.size();
  return trace;
}

}  // namespace pdsim
