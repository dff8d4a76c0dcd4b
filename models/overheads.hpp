// What serving takes beside its kernels: the host's work on a step, launches, ranks that wait for each
// other, the front end. models/overheads.json has one preset an engine; `pdsim fit --from-bench` writes
// others from a user's own benchmark. Every figure there names its source.
//
// A step of the worker process, whose GPU takes g:
//   host   = step + request x rows + layers x launch   (launch: by how the step's kernels are launched)
//   asynchronous   max(g + gpu, host)          the host prepares step n + 1 while the GPU runs n
//   synchronous    max(g, layers x launch) + gpu + step + request x rows
// and g itself has `rank` on each collective between its GPUs, which wait for the slowest of them: all but
// those that take a norm along (flashinfer's have no barrier) and exchanges between nodes.
//
// The front end is one process of each engine, data-parallel ones too (vLLM: api_server_count follows
// data_parallel_size): requests go through it in turn.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pdsim {

/// How a step's kernels reach the GPU. full: one CUDA graph; piecewise: a graph between attentions, which
/// are launched one by one; none: every kernel is.
enum class Launch : std::uint8_t { full, piecewise, none };

/// All in ns.
struct Overheads {
  std::string name;
  double front_end =
      0;  ///< a request, before the engine has it: HTTP, parsing, output set-up; one process, in turn
  double front_end_token = 0;  ///< ... for each prompt token: tokenisation
  double step = 0;             ///< host, each step: scheduling, input preparation, output processing
  double request = 0;          ///< ... and each sequence in it
  double gpu = 0;         ///< GPU, each step, outside the model: sampling, copies of inputs and of tokens
  double rank = 0;        ///< GPU, each collective
  double launch[3] = {};  ///< host, each layer, by Launch
  std::string source;
  std::string date;  ///< of the measurements; empty = not stated
};

/// Every figure, and its name in a file, where it is in microseconds.
struct OverheadField {
  std::string_view key;
  double& (*of)(Overheads&);
};
inline constexpr OverheadField kOverheadFields[] = {
    {"front_end_us", [](Overheads& o) -> double& { return o.front_end; }},
    {"front_end_us_per_token", [](Overheads& o) -> double& { return o.front_end_token; }},
    {"step_us", [](Overheads& o) -> double& { return o.step; }},
    {"step_us_per_request", [](Overheads& o) -> double& { return o.request; }},
    {"gpu_us", [](Overheads& o) -> double& { return o.gpu; }},
    {"rank_us", [](Overheads& o) -> double& { return o.rank; }},
    {"full_graph_us_per_layer", [](Overheads& o) -> double& { return o.launch[0]; }},
    {"piecewise_us_per_layer", [](Overheads& o) -> double& { return o.launch[1]; }},
    {"eager_us_per_layer", [](Overheads& o) -> double& { return o.launch[2]; }},
};

/// A name in models/overheads.json, the path of a file with one such object, or that object's text itself
/// (which opens with a brace). InputError at `place` when there is none, or a field is missing, unknown or
/// negative.
Overheads load_overheads(std::string_view name_or_path, std::string_view place = "overheads");
std::vector<std::string> overhead_names();

/// The JSON text of one preset, as load_overheads reads it.
std::string to_json(const Overheads& overheads);

}  // namespace pdsim
