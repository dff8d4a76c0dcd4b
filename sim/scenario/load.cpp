#include "sim/scenario/load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"
#include "sim/scenario/fields.hpp"
#include "sim/scenario/reader.hpp"

namespace pdsim {

namespace {

// Walks the text once for what the parser would let through or not place: a key given twice, and where
// a syntax error stands.
class SyntaxCheck : public nlohmann::json_sax<Json> {
 public:
  SyntaxCheck(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return start(false); }
  bool start_array(std::size_t) override { return start(true); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(string_t& key) override {
    Level& level = levels_.back();
    level.at = key;
    if (level.keys.insert(key).second) return true;
    std::string pointer;
    for (const Level& l : levels_) pointer = join_pointer(pointer, l.array ? std::to_string(l.index) : l.at);
    throw InputError(fmt::format("{}: {}", file_, pointer), "is given twice, expected once");
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) override {
    const std::string_view before = text_.substr(0, position == 0 ? 0 : position - 1);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t column = before.size() - (before.rfind('\n') + 1) + 1;
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ..."
    std::string_view reason = error.what();
    for (const std::string_view lead : {"] ", "column ", ": "}) {
      if (const auto at = reason.find(lead); at != std::string_view::npos) {
        reason.remove_prefix(at + lead.size());
      }
    }
    throw InputError(fmt::format("{}:{}:{}", file_, line, column), fmt::format("is no JSON: {}", reason));
  }

 private:
  struct Level {
    bool array;
    std::size_t index = 0;
    std::string at{};
    std::set<std::string> keys{};
  };

  bool value() {
    if (!levels_.empty()) ++levels_.back().index;
    return true;
  }
  bool start(bool array) {
    levels_.push_back({array});
    return true;
  }
  bool end() {
    levels_.pop_back();
    return value();
  }

  std::string_view text_;
  const std::string& file_;
  std::vector<Level> levels_;
};

Json parse(std::string_view text, const std::string& file) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    throw InputError(file, "is empty, expected a scenario (JSON)");
  }
  SyntaxCheck check(text, file);
  Json::sax_parse(text, &check, Json::input_format_t::json, true, true);
  Json json = Json::parse(text, nullptr, true, true);
  if (!json.is_object()) {
    throw InputError(file, fmt::format("is a JSON {}, expected an object", json.type_name()));
  }
  return json;
}

std::string label_of(const Json& item) {
  for (const char* key : {"name", "role"}) {
    if (item.is_object() && item.contains(key) && item[key].is_string()) return item[key].get<std::string>();
  }
  return {};
}

// The item of a list that a step of a dotted path means: an index, or the item's name.
std::size_t item_of(const Json& list, const std::string& step, const std::string& option,
                    std::string_view so_far) {
  std::vector<std::string> labels;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (step == std::to_string(i)) return i;
    labels.push_back(label_of(list[i]));
  }
  const auto found = std::find(labels.begin(), labels.end(), step);
  if (found != labels.end()) return static_cast<std::size_t>(found - labels.begin());
  const std::vector<std::string_view> known(labels.begin(), labels.end());
  throw InputError(option, fmt::format("{} has no '{}', expected {}{}", so_far, step,
                                       list.empty() ? "nothing: it is empty"
                                                    : fmt::format("one of {} or an index below {}",
                                                                  fmt::join(labels, ", "), list.size()),
                                       did_you_mean(step, known)));
}

// Sets the value at a dotted path, making objects on the way; notes in `document` who did.
void set_path(Json& json, std::string_view path, Json value, const std::string& option, Document& document) {
  Json* at = &json;
  std::string pointer, so_far;
  while (true) {
    const std::size_t dot = path.find('.');
    std::string step(path.substr(0, dot));
    if (step.empty()) {
      throw InputError(option, fmt::format("an empty step after '{}', expected a key", so_far));
    }
    if (at->is_null()) *at = Json::object();
    if (at->is_array()) {
      step = std::to_string(item_of(*at, step, option, so_far));
      at = &(*at)[std::stoul(step)];
    } else if (at->is_object()) {
      at = &(*at)[step];
    } else {
      throw InputError(option, fmt::format("{} is {}, which has no '{}'", so_far, at->dump(), step));
    }
    pointer = join_pointer(pointer, step);
    so_far += (so_far.empty() ? "" : ".") + step;
    if (dot == std::string_view::npos) break;
    path.remove_prefix(dot + 1);
  }
  *at = std::move(value);
  document.set[pointer] = option;
}

void apply(Json& json, std::span<const std::string> sets, const Overrides& overrides, Document& document) {
  for (const std::string& set : sets) {
    const std::size_t equals = set.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw InputError("--set", fmt::format("'{}' has no value, expected PATH=VALUE", set));
    }
    const std::string text = set.substr(equals + 1);
    Json value = Json::parse(text, nullptr, false);
    if (value.is_discarded()) value = text;
    set_path(json, set.substr(0, equals), std::move(value), "--set", document);
  }
  if (!overrides.trace.empty()) {
    set_path(json, "workload.trace", overrides.trace, "--trace", document);
    json["workload"].erase("synthetic");
  }
  if (!overrides.format.empty()) set_path(json, "workload.format", overrides.format, "--format", document);
  if (overrides.infer_sessions) {
    set_path(json, "workload.infer_sessions", true, "--infer-sessions", document);
  }
  if (overrides.seed) set_path(json, "seed", *overrides.seed, "--seed", document);
}

}  // namespace

LoadedScenario load_scenario(const std::string& path, std::span<const std::string> sets,
                             const Overrides& overrides) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
    return parse_scenario(text, "<stdin>", "", sets, overrides);
  }
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw InputError(path, "is a folder, expected a scenario (JSON)");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(path, fmt::format("cannot be read: {}", std::strerror(errno)));
  text.assign(std::istreambuf_iterator<char>(file), {});
  return parse_scenario(text, path, std::filesystem::path(path).parent_path().string(), sets, overrides);
}

LoadedScenario parse_scenario(std::string_view text, const std::string& file, const std::string& folder,
                              std::span<const std::string> sets, const Overrides& overrides) {
  Json json = parse(text, file);
  Document document{.file = file, .folder = folder, .set = {}, .origins = {}};
  apply(json, sets, overrides, document);

  LoadedScenario loaded;
  loaded.scenario.name = file == "<stdin>" ? "stdin" : std::filesystem::path(file).stem().string();
  Json in_force;
  Reader reader(document, &json, "", in_force);
  read_scenario(reader, loaded.scenario);
  reader.finish();
  check_scenario(document, loaded.scenario);

  loaded.file = file;
  loaded.sha256 = sha256_hex(text);
  Json identified = {{"$schema", "pdsim.scenario/1"}};  // as every document says what it is
  identified.update(in_force);
  loaded.in_force = identified.dump(2);
  loaded.origins = std::move(document.origins);
  loaded.origins.emplace(loaded.origins.begin(), "/$schema", "scenario");
  return loaded;
}

void check_values(std::string_view text, const std::string& file, const std::string& folder,
                  std::span<const std::string> sets, const Overrides& overrides) {
  Json json = parse(text, file);
  Document document{.file = file, .folder = folder, .set = {}, .origins = {}};
  apply(json, sets, overrides, document);
  Scenario scenario;
  Json in_force;
  Reader reader(document, &json, "", in_force);
  read_scenario(reader, scenario);
  reader.finish();
}

std::string LoadedScenario::place(std::string_view pointer) const {
  for (const auto& [at, from] : origins) {
    if (at == pointer && from.starts_with("--")) return fmt::format("{}: {}", from, pointer);
  }
  return fmt::format("{}: {}", file, pointer);
}

void put_resolved(LoadedScenario& loaded, std::string_view pointer, std::int64_t value,
                  std::string_view from) {
  const auto origin = std::find_if(loaded.origins.begin(), loaded.origins.end(),
                                   [&](const auto& entry) { return entry.first == pointer; });
  PDSIM_CHECK(origin != loaded.origins.end(), "a resolved value has no place in the scenario");
  if (origin->second.starts_with("default: ")) origin->second = fmt::format("default: {}", from);
  Json in_force = Json::parse(loaded.in_force);
  in_force[Json::json_pointer(std::string(pointer))] = value;
  loaded.in_force = in_force.dump(2);
}

std::string scenario_schema() {
  Json schema, scratch;
  schema["$schema"] = "http://json-schema.org/draft-07/schema#";
  schema["$id"] = "pdsim.scenario/1";
  schema["title"] = "pdsim scenario";
  schema["description"] = "A cluster that serves one model, and the requests that it gets.";
  Document document;
  Reader reader(document, schema, scratch);
  Scenario scenario;
  read_scenario(reader, scenario);
  reader.finish();
  return schema.dump(2) + "\n";
}

EngineConfig resolve_engine(EngineConfig engine, std::string_view gpu, Bytes gpu_memory,
                            std::int32_t max_position, std::string_view place) {
  const auto fail = [&](std::string_view key, const std::string& problem) {
    throw InputError(fmt::format("{}/{}", place, key), problem);
  };
  constexpr Bytes kLarge = Bytes{70} << 30;
  const bool large = gpu_memory >= kLarge && gpu.find("a100") == std::string_view::npos;

  if (engine.max_model_len == 0) engine.max_model_len = max_position;
  if (engine.max_model_len > max_position) {
    fail("max_model_len", fmt::format("is {}, expected at most the model's max_position_embeddings = {}",
                                      engine.max_model_len, max_position));
  }
  const bool tokens_default = engine.max_num_batched_tokens == 0;
  const bool seqs_default = engine.max_num_seqs == 0;
  if (seqs_default) engine.max_num_seqs = large ? 1024 : 256;
  if (tokens_default) {
    engine.max_num_batched_tokens = large ? 8192 : 2048;
    if (!engine.enable_chunked_prefill) {
      engine.max_num_batched_tokens = std::max(engine.max_num_batched_tokens, engine.max_model_len);
    }
    const std::int64_t useful = std::int64_t{engine.max_num_seqs} * engine.max_model_len;
    if (useful < engine.max_num_batched_tokens) {
      engine.max_num_batched_tokens = static_cast<std::int32_t>(useful);
    }
  }
  if (seqs_default) engine.max_num_seqs = std::min(engine.max_num_seqs, engine.max_num_batched_tokens);

  if (engine.max_cudagraph_capture_size == 0) {
    const std::int32_t row = 1 + (engine.speculative ? engine.speculative->num_speculative_tokens : 0);
    engine.max_cudagraph_capture_size =
        static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{2} * row * engine.max_num_seqs, 512));
  }

  if (engine.max_num_batched_tokens < engine.max_num_seqs) {
    fail("max_num_batched_tokens", fmt::format("is {}, expected at least max_num_seqs = {} (vLLM)",
                                               engine.max_num_batched_tokens, engine.max_num_seqs));
  }
  if (!engine.enable_chunked_prefill && engine.max_num_batched_tokens < engine.max_model_len) {
    fail("max_num_batched_tokens",
         fmt::format("is {} without chunked prefill, expected at least max_model_len = {}",
                     engine.max_num_batched_tokens, engine.max_model_len));
  }
  return engine;
}

}  // namespace pdsim
