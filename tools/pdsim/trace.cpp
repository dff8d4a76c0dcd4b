// pdsim trace: looks at, converts, makes and reshapes traces.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "traces/generate.hpp"
#include "traces/reader.hpp"
#include "traces/reshape.hpp"
#include "traces/stats.hpp"
#include "traces/writer.hpp"

namespace pdsim {

namespace {

// What the subcommands have in common; each uses its part.
struct Options {
  std::string in, out, format = "mooncake", to;
  bool json = false, quiet = false;
  std::optional<double> rate, time_scale;
  GenerateConfig generate;
  double stamp_grid_ms = to_ms(GenerateConfig{}.stamp_grid);
};

std::string formats_help() {
  std::string text = "Formats:\n";
  for (const TraceFormat& format : trace_formats())
    text += fmt::format("  {:<12}{}\n", format.name, format.sentence);
  return text;
}

Trace load(const Options& options) {
  catch_interrupts();
  Progress bar("reading", "bytes", options.quiet);
  ReadOptions read;
  read.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (interrupted()) throw Interrupted{};
    bar.update(done, total);
  };
  Trace trace = read_trace(options.in, options.format, read);
  bar.finish();
  if (!options.quiet) fmt::print(stderr, "{}\n", load_summary(trace));
  return trace;
}

void save(const Trace& trace, const Options& options, const std::string& format) {
  for (const std::string& lost : find_trace_format(format, options.out).losses(trace)) {
    fmt::print(stderr, "{}: not in the {} format: {}\n", options.out, format, lost);
  }
  catch_interrupts();
  Progress bar("writing", "requests", options.quiet);
  WriteOptions write;
  write.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (interrupted()) throw Interrupted{};
    bar.update(done, total);
  };
  write_trace(trace, options.out, format, write);
}

int stats(const Options& options) {
  Options quietly = options;
  quietly.quiet = true;  // the table says what the load summary would
  const TraceStats result = trace_stats(load(options.json ? options : quietly));
  const std::string text = options.json ? stats_json(result) : stats_table(result);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return kDone;
}

int convert(const Options& options) {
  find_trace_format(options.to, "--to");
  save(load(options), options, options.to);
  return kDone;
}

int generate(const Options& options) {
  GenerateConfig config = options.generate;
  config.stamp_grid = static_cast<Nanos>(options.stamp_grid_ms * 1e6 + 0.5);
  find_trace_format(options.format, "--format");
  save(generate_trace(config), options, options.format);
  return kDone;
}

int scale(const Options& options) {
  const double asked = options.rate ? *options.rate : *options.time_scale;
  if (!(asked > 0 && asked <= 1e9)) {
    throw InputError(options.rate ? "--rate" : "--time-scale",
                     fmt::format("is {}, expected above 0, at most 1e9", asked));
  }
  Trace trace = load(options);
  if (options.rate && rate_of(trace) == 0) {
    throw InputError(options.in, "all requests arrive at once: no time scale gives a rate");
  }
  scale_time(trace, options.rate ? asked / rate_of(trace) : asked);
  save(trace, options, options.format);
  return kDone;
}

// "mean=4500,sigma=1.1,max=120000" over what is there already.
void parse_lengths(const std::string& option, const std::string& text, Lengths& lengths) {
  const auto refuse = [&](std::string_view part) {
    throw InputError(option,
                     fmt::format("'{}' is not understood, expected KEY=NUMBER,... with the keys mean, sigma, "
                                 "min, max (as in mean=4500,sigma=1.1)",
                                 part));
  };
  for (const std::string& part : CLI::detail::split(text, ',')) {
    const std::size_t equals = part.find('=');
    if (equals == std::string::npos) refuse(part);
    const std::string key = part.substr(0, equals), digits = part.substr(equals + 1);
    double number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) refuse(part);
    const bool whole = number >= 1 && number <= INT32_MAX &&
                       number == static_cast<double>(static_cast<std::int64_t>(number));
    if (key == "mean") {
      lengths.mean = number;
    } else if (key == "sigma") {
      lengths.sigma = number;
    } else if (key == "min" && whole) {
      lengths.min = static_cast<std::int32_t>(number);
    } else if (key == "max" && whole) {
      lengths.max = static_cast<std::int32_t>(number);
    } else {
      refuse(part);
    }
  }
}

void add_lengths(CLI::App* app, const std::string& option, Lengths& lengths, const std::string& what) {
  app->add_option_function<std::string>(
         option, [option, &lengths](const std::string& text) { parse_lengths(option, text, lengths); }, what)
      ->type_name("LENGTHS")
      ->default_str(fmt::format("mean={},sigma={},min={},max={}", lengths.mean, lengths.sigma, lengths.min,
                                lengths.max));
}

void add_input(CLI::App* app, Options& options) {
  app->add_option("FILE", options.in, "The trace; '-' is stdin; gzip and zstd are read as they are")
      ->required();
  app->add_option("--format", options.format, "What it is written in (listed below)")->required();
}

void add_output(CLI::App* app, Options& options) {
  app->add_option("--out", options.out, "The file to write; '-' is stdout; .gz and .zst compress")
      ->required();
}

void add_generate(CLI::App* app, Options& options) {
  GenerateConfig& c = options.generate;
  add_output(app, options);
  app->add_option("--format", options.format, "What to write it in")->capture_default_str();
  app->add_option("--seed", c.seed, "The same seed and knobs give the same bytes")->capture_default_str();
  app->add_option("--requests", c.requests, "How many")->capture_default_str();
  app->add_option("--rate", c.rate, "Requests per second, in the steady state")->capture_default_str();
  app->add_option("--burstiness", c.burstiness,
                  "Shape of the gamma gaps between conversations: 1 Poisson, less = bursts")
      ->capture_default_str();
  app->add_option("--stamp-grid-ms", options.stamp_grid_ms,
                  "Arrivals lie on multiples of it (Mooncake's: 3000)")
      ->capture_default_str();
  app->add_option("--system-prompts", c.system_prompts, "How many system prompts conversations share")
      ->capture_default_str();
  app->add_option("--zipf", c.zipf, "The k-th of them is chosen with weight k^-ZIPF")->capture_default_str();
  add_lengths(app, "--system-prompt-tokens", c.system_prompt, "A shared system prompt");
  add_lengths(app, "--first-message-tokens", c.first_message, "What a conversation's first turn adds to it");
  add_lengths(app, "--message-tokens", c.message, "What each later turn adds to prompt and answer before it");
  add_lengths(app, "--output-tokens", c.output, "An answer");
  app->add_option("--max-prompt-tokens", c.max_prompt_tokens,
                  "A conversation ends before the turn that would pass it")
      ->capture_default_str();
  app->add_option("--multi-turn-share", c.multi_turn_share, "Share of conversations with two turns or more")
      ->capture_default_str();
  app->add_option("--turns", c.turns, "Mean number of turns of those (2 plus a geometric number)")
      ->capture_default_str();
  app->add_option("--think-time-s", c.think_time_s,
                  "Mean pause between an answer and the next turn (lognormal)")
      ->capture_default_str();
  app->add_option("--think-time-sigma", c.think_time_sigma, "Its sigma")->capture_default_str();
  app->add_option("--first-token-ms", c.first_token_ms,
                  "In the recorded arrivals an answer begins after this")
      ->capture_default_str();
  app->add_option("--output-token-ms", c.output_token_ms, "and goes on at this per token")
      ->capture_default_str();
}

}  // namespace

void add_trace(CLI::App& app, Command& run) {
  CLI::App* trace = app.add_subcommand("trace", "Look at, convert, make and reshape traces");
  trace->require_subcommand(1);
  trace->footer("Example:\n  pdsim trace stats traces/samples/conversation.jsonl --format mooncake");
  const auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* sentence, const std::string& footer,
                       int (*work)(const Options&)) {
    CLI::App* sub = trace->add_subcommand(name, sentence);
    sub->footer(footer);
    sub->add_flag("--quiet", options->quiet, "No progress, no load summary");
    sub->callback([&run, options, work] { run = [options, work] { return work(*options); }; });
    return sub;
  };

  CLI::App* sub =
      add("stats", "Load, lengths, bursts, prefix reuse and conversations of a trace",
          "Example:\n  pdsim trace stats traces/samples/conversation.jsonl --format mooncake\n\n" +
              formats_help(),
          stats);
  add_input(sub, *options);
  sub->add_flag("--json", options->json, "One JSON document (schema pdsim.trace-stats/1)");

  sub = add("convert", "Write a trace in another format, saying what that loses",
            "Example:\n  pdsim trace convert azure.csv --format azure --to mooncake --out azure.jsonl\n\n" +
                formats_help(),
            convert);
  add_input(sub, *options);
  sub->add_option("--to", options->to, "The format to write")->required();
  add_output(sub, *options);

  add_generate(
      add("generate", "Make a trace of conversations with shared system prompts, from a seed",
          "LENGTHS are KEY=NUMBER,... over the default: lognormal token counts with this mean, sigma "
          "of the logarithm, cut to [min, max].\n\n"
          "Example:\n  pdsim trace generate --requests 1000 --rate 4 --output-tokens "
          "mean=300,max=1000 --out a.jsonl",
          generate),
      *options);

  sub = add("scale", "Write a trace at another rate: all times, think times too, are divided by one factor",
            "Example:\n  pdsim trace scale a.jsonl --format mooncake --rate 8 --out a8.jsonl", scale);
  add_input(sub, *options);
  CLI::Option_group* pace = sub->add_option_group("pace", "One of");
  pace->add_option("--rate", options->rate, "Mean requests per second to reach");
  pace->add_option("--time-scale", options->time_scale, "How many times as fast");
  pace->require_option(1);
  add_output(sub, *options);
}

}  // namespace pdsim
