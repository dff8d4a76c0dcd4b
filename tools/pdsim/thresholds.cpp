// `pdsim thresholds`: what kv_recompute_threshold and decoder_kv_blocks_ttl a trace asks for.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/pdsim/options.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"
#include "tools/study/thresholds.hpp"

namespace pdsim {

namespace {

constexpr std::string_view kNever = "never";
constexpr std::size_t kMostValues = 100;  // of an axis: 10,000 pairs a load are nobody's wish

struct Options : ReplayOptions {
  std::string scenario, loads = "0.5,1,2", objective = "ttft_mean", thresholds, ttls, csv;
  unsigned jobs = 0;
  bool json = false;
};

// "0.5,1,2": ascending, each once.
template <typename T, typename Parse>
std::vector<T> read_list(const std::string& text, std::string_view option, const Parse& parse) {
  std::vector<T> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    values.push_back(parse(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  if (values.size() > kMostValues) {
    throw InputError(option, fmt::format("has {} values, expected at most {}", values.size(), kMostValues));
  }
  return values;
}

std::vector<double> read_numbers(const std::string& text, std::string_view option, std::string_view what) {
  return read_list<double>(text, option, [&](const std::string& word) {
    double value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{} || end != word.data() + word.size() || !std::isfinite(value) || !(value > 0)) {
      throw InputError(option,
                       fmt::format("has '{}', expected {} above 0, with commas between them", word, what));
    }
    return value;
  });
}

std::vector<std::int32_t> read_tokens(const std::string& text, std::string_view option) {
  return read_list<std::int32_t>(text, option, [&](const std::string& word) {
    if (word == kNever) return kNeverRead;
    std::int32_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{} || end != word.data() + word.size() || value < 0) {
      throw InputError(option,
                       fmt::format("has '{}', expected numbers of tokens, or never, with commas between "
                                   "them",
                                   word));
    }
    return value;
  });
}

int thresholds(const Options& options) {
  catch_interrupts();
  ThresholdsConfig config;
  config.loads = read_numbers(options.loads, "--loads", "factors");
  config.objective = find_objective(options.objective, "--objective");
  if (!options.thresholds.empty()) config.thresholds = read_tokens(options.thresholds, "--thresholds");
  if (!options.ttls.empty()) config.ttls = read_numbers(options.ttls, "--ttls", "seconds");
  config.jobs = options.jobs;
  if (options.json && options.csv == "-") {
    throw InputError("--csv", "is -, and so is --json's place; expected one of them on stdout");
  }
  if (options.prices == "-" || (options.scenario == "-" && options.trace == "-")) {
    throw InputError("-",
                     "stands for what is read more than once; expected one of scenario and trace at most");
  }
  const bool to_file = !options.csv.empty() && options.csv != "-";
  const std::size_t slash = options.csv.rfind('/');
  const std::string name = options.csv.substr(slash == std::string::npos ? 0 : slash + 1);
  if (to_file) check_folder(folder_of(options.csv), std::vector<std::string_view>{name});
  config.base = read_run(options.scenario, options);

  Progress progress("trying", "runs", options.quiet);
  const ThresholdsAnswer answer =
      find_thresholds(config, [&](std::uint64_t done, std::uint64_t total) { progress.update(done, total); });
  progress.finish();
  if (to_file) write_files(folder_of(options.csv), {{name, thresholds_csv(answer)}});
  if (options.csv == "-") {
    fmt::print("{}", thresholds_csv(answer));
  } else if (options.json) {
    fmt::print("{}\n",
               thresholds_json(answer).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    fmt::print("{}", thresholds_table(answer));
  }
  if (answer.interrupted) {
    fmt::print(stderr, "pdsim: interrupted: not all that was to be tried was; the answer is of what was\n");
    return kInterrupted;
  }
  if (!answer.recommended) {
    fmt::print(stderr, "pdsim: {}\n", answer.text);
    return kUnfinished;
  }
  return kDone;
}

}  // namespace

void add_thresholds(CLI::App& app, Command& run) {
  auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand(
      "thresholds", "Recommend kv_recompute_threshold and decoder_kv_blocks_ttl for a trace, by trying them");
  sub->add_option(
         "SCENARIO", options->scenario,
         "Scenario file (JSON with comments) with prefill and decode pools; - is stdin. Bidirectional "
         "transfer is turned on if it is not")
      ->required();
  sub->add_option("--loads", options->loads,
                  "Loads to try: factors on workload.time_scale, which times pauses between turns as well")
      ->capture_default_str();
  std::string names = "Objectives\n";
  for (const NamedObjective& o : kObjectives) names += fmt::format("  {:<30}{}\n", o.name, o.sentence);
  sub->add_option(
         "--objective", options->objective,
         "What is best: a name from the list below, or min:PATH or max:PATH into the summary. A read "
         "that is saved or made shows in the TTFT of later turns, and so does the wait of all turns for "
         "memory that decode holds; e2e_mean adds preemption, usd_per_request_in_slo what it costs")
      ->capture_default_str();
  sub->add_option(
      "--thresholds", options->thresholds,
      "Thresholds to try, tokens: 0,64,512,never (vLLM's 64 always is); default: 0, 64 and four times "
      "as much each up to the longest prompt, never, and closer where the plateau ends");
  sub->add_option(
      "--ttls", options->ttls,
      "TTLs to try, seconds: 10,60,480 (vLLM's 480 always is); default: what just holds 25, 50, 75, 90 "
      "and 100 % of the turns that go on, 1 s, and closer where the plateau ends");
  sub->add_option("--jobs", options->jobs, "Threads; 0 = one a core")->capture_default_str();
  sub->add_flag("--json", options->json, "The answer as JSON on stdout");
  sub->add_option("--csv", options->csv,
                  "A row for each run into this file; - is stdout, instead of the table");
  add_replay_options(*sub, *options);
  sub->footer(
      names +
      "\nEvery pair is tried at every load. As good is what is within 1 %. \"vs cost\" is what a pair loses "
      "against reuse_policy cost at its TTL, which chooses for each turn by prediction; \"vs oracle\", "
      "against an oracle: retention belady, which knows the turns to come and lets go first of what is "
      "needed last, with the cost policy or the best pair's threshold, whichever is better. It bounds "
      "what can be kept; latency follows from choices that it does not make, so a pair can be a little "
      "ahead of it. \"hits\" are tokens read back as a share of the oracle's.\n"
      "The router keeps an address for 15/16 of the TTL, as vLLM has it, and for 10 s less at least: what "
      "is read too late fails.\n\n"
      "Example:\n"
      "  pdsim thresholds scenarios/thresholds.json --loads 1,2,4");
  sub->callback([options, &run] { run = [options] { return thresholds(*options); }; });
}

}  // namespace pdsim
