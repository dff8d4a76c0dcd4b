// Reading a plan file.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>
#include <string_view>
#include <vector>

#include "models/json.hpp"
#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"
#include "tools/study/plan.hpp"
#include "traces/reshape.hpp"

namespace pdsim {

namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "pdsim.plan/1";
constexpr int kMostInstances = 32;  // chosen: 256 GPUs, some ten thousand splits
constexpr int kMostTensorParallel = 64;
constexpr std::int32_t kTensorParallel[] = {1, 2, 4, 8};  // what divides an instance of eight GPUs

void read_menu(const JsonObject& in, Menu& menu) {
  if (in.array("menu").empty()) in.reject("menu", "at least one instance to rent");
  for (std::size_t i = 0; i < in.array("menu").size(); ++i) {
    const JsonObject item = in.element("menu", i);
    item.refuse_unknown({"instance", "usd_per_hour"});
    Offer offer;
    offer.instance = &find_instance(item.text("instance"), item.at("instance"));
    for (const Offer& other : menu.offers) {
      if (other.instance == offer.instance) item.reject("instance", "each instance once");
    }
    if (item.has("usd_per_hour")) {
      offer.usd_per_hour = item.number("usd_per_hour", 0);
      if (!(*offer.usd_per_hour > 0))
        item.reject("usd_per_hour", "USD per hour of the whole instance, above 0");
      offer.as_of = "as the plan says";
      offer.source = item.at("usd_per_hour");
    }
    menu.offers.push_back(std::move(offer));
  }
  menu.max_instances = static_cast<int>(in.integer("max_instances", 1, kMostInstances));
  menu.mixed = in.flag_or("mixed", false);
  if (!in.has("tensor_parallel")) {
    menu.tensor_parallel.assign(std::begin(kTensorParallel), std::end(kTensorParallel));
    return;
  }
  for (const json& degree : in.array("tensor_parallel")) {
    const bool fits = degree.is_number_integer() && degree.get<std::int64_t>() >= 1 &&
                      degree.get<std::int64_t>() <= kMostTensorParallel;
    if (!fits || std::ranges::count(menu.tensor_parallel, degree.get<int>()) > 0) {
      in.reject("tensor_parallel", fmt::format("different degrees from 1 to {}", kMostTensorParallel));
    }
    menu.tensor_parallel.push_back(degree.get<int>());
  }
  if (menu.tensor_parallel.empty()) in.reject("tensor_parallel", "at least one degree");
  std::ranges::sort(menu.tensor_parallel);
}

std::vector<std::size_t> read_kinds(const JsonObject& in) {
  std::vector<std::string_view> names;
  for (const DeploymentKind& kind : kKinds) names.push_back(kind.name);
  std::set<std::size_t> kinds;
  for (const json& name : in.array("deployments")) {
    const auto found = std::ranges::find(names, name.is_string() ? name.get<std::string>() : "");
    if (found == names.end()) {
      throw InputError(in.at("deployments"),
                       fmt::format("{} is no deployment{}, expected some of {}", name.dump(),
                                   did_you_mean(name.is_string() ? name.get<std::string>() : "", names),
                                   fmt::join(names, ", ")));
    }
    kinds.insert(static_cast<std::size_t>(found - names.begin()));
  }
  if (kinds.empty()) in.reject("deployments", fmt::format("some of {}", fmt::join(names, ", ")));
  return {kinds.begin(), kinds.end()};
}

// What --prices says, and nothing else.
std::map<std::string, double> prices_of(const PlanOptions& options, const LoadedScenario& loaded) {
  if (options.replay.prices.empty()) return {};
  LoadedScenario alone = loaded;
  alone.scenario.pricing.usd_per_hour.clear();
  finish_loading(alone, options.replay);
  return alone.scenario.pricing.usd_per_hour;
}

void price_menu(PlanInput& input, const PlanOptions& options, const LoadedScenario& loaded) {
  const std::map<std::string, double> own = prices_of(options, loaded);
  const PricingConfig& pricing = loaded.scenario.pricing;
  std::vector<std::string> unpriced;
  for (Offer& offer : input.menu.offers) {
    const Instance& instance = *offer.instance;
    if (const auto found = own.find(instance.name); found != own.end()) {
      offer.usd_per_hour = found->second;
      offer.as_of = "as --prices says";
      offer.source = options.replay.prices;
    } else if (const auto said = pricing.usd_per_hour.find(instance.name);
               !offer.usd_per_hour && said != pricing.usd_per_hour.end()) {
      offer.usd_per_hour = said->second;
      offer.as_of = "as the scenario says";
      offer.source = loaded.file;
    } else if (const auto listed = instance.prices.find(pricing.plan);
               !offer.usd_per_hour && listed != instance.prices.end()) {
      offer.usd_per_hour = listed->second.usd_per_hour;
      offer.as_of = listed->second.as_of;
      offer.source = listed->second.source;
    }
    if (!offer.usd_per_hour) unpriced.push_back(instance.name);
  }
  if (unpriced.size() == input.menu.offers.size()) {
    throw InputError(
        input.file + ": /menu",
        fmt::format("no source gives a price of {} under '{}'; expected \"usd_per_hour\" beside an "
                    "instance, another pricing.plan, or --prices FILE",
                    fmt::join(unpriced, ", "), pricing.plan));
  }
}

}  // namespace

PlanInput read_plan(const std::string& path, const PlanOptions& options) {
  if ((path == "-") + (options.replay.trace == "-") + (options.replay.prices == "-") > 1) {
    throw InputError("-", "stands for stdin more than once; expected one of plan, trace and prices at most");
  }
  PlanInput input;
  input.file = path == "-" ? "<stdin>" : path;
  const std::string text = read_text(path, "a plan file");
  input.sha256 = sha256_hex(text);
  const json document = parse_json(text, input.file);
  const JsonObject in(document, input.file);
  in.refuse_unknown({"$schema", "schema", "name", "scenario", "slo", "rate", "menu", "tensor_parallel",
                     "max_instances", "mixed", "deployments", "set"});
  if (in.has("schema") && in.text("schema") != kSchema) in.reject("schema", fmt::format("\"{}\"", kSchema));
  input.name = in.text_or("name", std::filesystem::path(path == "-" ? "plan" : path).stem().string());
  read_menu(in, input.menu);
  if (in.has("deployments")) input.kinds = read_kinds(in);
  if (in.has("rate")) {
    input.rate = in.number("rate", 0);
    input.rate_from = "the plan";
    if (!(input.rate > 0)) in.reject("rate", "requests per second, above 0");
  }
  if (options.rate) {
    input.rate = *options.rate;
    input.rate_from = "--rate";
    if (!(input.rate > 0 && input.rate < 1e9)) {
      throw InputError("--rate", fmt::format("is {}, expected requests per second, above 0", input.rate));
    }
  }

  // The scenario: what the plan sets comes before what the command line sets.
  ReplayOptions replay = options.replay;
  const std::string folder = path == "-" ? "" : std::filesystem::path(path).parent_path().string();
  RunSpec spec;
  if (const json* given = in.find("scenario"); given != nullptr && given->is_object()) {
    spec.text = given->dump();
    spec.file = input.file + ": /scenario";
    spec.folder = folder;
  } else {
    const std::string file = in.text("scenario");
    spec = read_run((std::filesystem::path(folder) / file).string(), {});
  }
  std::vector<std::string> sets;
  if (in.has("slo")) sets.push_back("slo=" + in.value().at("slo").dump());
  if (in.has("set")) {
    const JsonObject set = in.object("set");
    for (const auto& [key, value] : set.value().items()) sets.push_back(key + "=" + value.dump());
  }
  spec.options.quiet = true;
  const auto load = [&](std::vector<std::string> all, bool overridden) {
    RunSpec own = spec;
    own.options.sets = std::move(all);
    if (overridden) {
      own.options.trace = replay.trace;
      own.options.format = replay.format;
      own.options.seed = replay.seed;
      own.options.infer_sessions = replay.infer_sessions;
      own.options.sets.insert(own.options.sets.end(), replay.sets.begin(), replay.sets.end());
    }
    return load_run(own);
  };
  LoadedScenario loaded;
  try {
    loaded = load(sets, false);
  } catch (const InputError& error) {  // what the plan sets is at fault, not an option
    constexpr std::string_view kOption = "--set: ";
    const std::string_view what = error.what();
    if (!what.starts_with(kOption)) throw;
    throw InputError(input.file, what.substr(kOption.size()));
  }
  const auto warm =
      std::ranges::find(loaded.origins, "/transfer/warm_start", &std::pair<std::string, std::string>::first);
  if (warm != loaded.origins.end() && warm->second != "scenario" && warm->second != "--set") {
    sets.insert(sets.begin(), "transfer.warm_start=true");
    input.assumptions.emplace_back(
        "Workers have met before the first request (transfer.warm_start): the trace stands for months.");
  }
  loaded = load(sets, true);
  if (loaded.scenario.slo.empty()) {
    throw InputError(input.file,
                     "has no slo, nor has its scenario; expected one, as {\"ttft_ms\": {\"p95\": 2000}, "
                     "\"tpot_ms\": {\"p95\": 50}}");
  }
  input.bounds = bounds_of(loaded.scenario.slo);
  input.base = template_of(loaded);
  if (!input.base.substituted.empty()) input.assumptions.push_back(input.base.substituted);
  price_menu(input, options, loaded);

  LoadedScenario recorded = loaded;
  recorded.scenario.workload.time_scale = 1;
  input.trace = TraceStore(replay.quiet).get(recorded);
  input.recorded_rate = rate_of(*input.trace);
  if (!(input.recorded_rate > 0)) {
    throw InputError(
        input.trace->name,
        fmt::format("has {} requests that come at one instant: no pace to make faster or slower; "
                    "expected a trace that lasts",
                    input.trace->requests.size()));
  }
  // Time per token is that between tokens: of single ones there is none.
  if (std::ranges::none_of(input.trace->requests, [](const Request& r) { return r.output_tokens > 1; })) {
    const auto erased = std::erase_if(input.bounds, [](const Bound& b) { return b.metric == "tpot_ms"; });
    if (erased > 0) {
      input.assumptions.emplace_back(
          "The SLO's tpot_ms does not apply: every answer of the trace has one token at most.");
    }
    if (input.bounds.empty()) {
      throw InputError(loaded.place("/slo"),
                       "has tpot_ms alone, which does not apply to answers of one token; expected ttft_ms");
    }
  }
  if (input.rate_from.empty()) {
    input.rate = input.recorded_rate * loaded.scenario.workload.time_scale;
    input.rate_from = "the trace";
  }
  if (input.kinds.empty()) {
    input.kinds = {0, 1, 2, 3, 4};
    const bool turns =
        std::ranges::any_of(input.trace->requests, [](const Request& r) { return r.turn > 0; });
    if (turns) input.kinds.push_back(5);
  }
  input.scenario_file = spec.file;
  input.scenario_sha256 = loaded.sha256;
  input.scenario = std::move(loaded);
  return input;
}

}  // namespace pdsim
