// From a scenario's JSON to validated structs, and what is in force once defaults are filled in.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/core/time.hpp"
#include "sim/scenario/scenario.hpp"

namespace pdsim {

/// What options of their own set; each is as a --set of the same path, and errors name the option.
struct Overrides {
  std::string trace;   ///< --trace: replaces a synthetic workload too
  std::string format;  ///< --format
  std::optional<std::uint64_t> seed;
  bool infer_sessions = false;  ///< --infer-sessions
};

struct LoadedScenario {
  Scenario scenario;
  std::string file;    ///< as errors name it: the path, or "<stdin>"
  std::string sha256;  ///< of the file's bytes

  /// Every value, defaults filled in, as JSON: itself a valid input from any folder.
  std::string in_force;
  /// Pointer -> "scenario", "--set", "default: vLLM 0.24", "as /transfer"; in the order of in_force.
  std::vector<std::pair<std::string, std::string>> origins;

  /// How an error about the value at `pointer` names its place: "file: /pools/0/gpu", or "--set: ...".
  std::string place(std::string_view pointer) const;
};

/// Reads `path` ("-" = stdin), applies `sets` ("pools.decode.engine.max_num_seqs=64": pools by name or
/// index, a value that is no JSON is a string; later ones win) and `overrides`, and checks everything
/// that needs no look-up. Paths in the file are relative to it, paths in options to the current folder.
/// Throws InputError: an unreadable file, broken JSON (file:line:column), a key given twice, an unknown
/// key, a value of the wrong type, range or name (file: /pointer), or fields that contradict each other.
LoadedScenario load_scenario(const std::string& path, std::span<const std::string> sets = {},
                             const Overrides& overrides = {});

/// The same from text that is already here; `file` names it in errors, paths are relative to `folder`.
LoadedScenario parse_scenario(std::string_view text, const std::string& file, const std::string& folder = "",
                              std::span<const std::string> sets = {}, const Overrides& overrides = {});

/// Refuses what parse_scenario() would whatever the other values are: a path that leads nowhere, an unknown
/// key, a value of the wrong type, range or name. Not fields that contradict each other.
void check_values(std::string_view text, const std::string& file, const std::string& folder,
                  std::span<const std::string> sets, const Overrides& overrides = {});

/// Puts what a look-up has resolved into in_force: the value at `pointer` becomes `value`, and where it
/// was a default, it is now one from `from` ("vLLM 0.24 on h200"). Requires that the pointer is there.
void put_resolved(LoadedScenario& loaded, std::string_view pointer, std::int64_t value,
                  std::string_view from);

/// The JSON Schema (draft-07) of a scenario, as scenarios/schema.json holds it.
std::string scenario_schema();

/// An engine's knobs with vLLM's defaults in place of 0 (vLLM 0.24, EngineArgs.get_batch_defaults for
/// the API server): max_num_batched_tokens 8192 and max_num_seqs 1024 on GPUs of at least 70 GiB that
/// are not A100, else 2048 and 256; without chunked prefill a step takes at least one longest prompt;
/// max_model_len as the model's. Throws InputError at `place` + "/max_model_len" and the like where
/// vLLM would not start: a max_model_len beyond the model's, fewer tokens than sequences in a step, or
/// without chunked prefill a step that the longest prompt does not fit into.
EngineConfig resolve_engine(EngineConfig engine, std::string_view gpu, Bytes gpu_memory,
                            std::int32_t max_position, std::string_view place);

}  // namespace pdsim
