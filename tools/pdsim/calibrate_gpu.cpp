#include "tools/pdsim/calibrate_gpu.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/calibrate.hpp"
#include "kernels/gpu_module.hpp"
#include "kernels/shapes.hpp"
#include "kernels/tables.hpp"
#include "models/calibration.hpp"
#include "models/csv.hpp"
#include "models/data.hpp"
#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"
#include "sim/core/error.hpp"
#include "tools/study/files.hpp"
#include "tools/study/interrupt.hpp"
#include "tools/study/progress.hpp"

namespace pdsim {
namespace {

using kernels::Measurements;

// Their layers are what is measured unless --model says otherwise: heads of 128 and 64 in groups of 4, 8 and
// 16, experts, and a latent.
const std::vector<std::string> kModels = {"llama-3.1-8b", "qwen3-32b", "gpt-oss-20b", "qwen3-235b-a22b",
                                          "deepseek-v3"};
const std::vector<int> kTensor = {1, 2, 4, 8};

/// What one rank of each model computes, at each degree of tensor parallelism.
kernels::ModelShapes shapes_of(const std::vector<std::string>& models, const std::vector<int>& tensor) {
  kernels::ModelShapes shapes;
  for (const std::string& name : models) {
    const ModelSpec model = load_model(name, "--model");
    for (const int degree : tensor) {
      Parallelism cut;
      cut.tensor = degree;
      check_parallelism(model, cut, fmt::format("--model {} --tp {}", name, degree));
      for (const Operator& op : operators(model, cut, Dtype::bf16)) {
        switch (op.kind) {
          case OpKind::gemm:
            shapes.linear.push_back({op.n, op.k});
            break;
          case OpKind::attention:
            if (op.window == 0) shapes.attention.push_back({op.heads, op.kv_heads, op.head_dim});
            break;
          case OpKind::mla_attention:
            shapes.latent_heads.push_back(op.heads);
            break;
          case OpKind::moe:
            shapes.experts.push_back(
                {op.hidden, op.intermediate, op.experts, op.topk, op.moe_tensor, op.moe_expert});
            break;
          default:  // collectives, elementwise and what has no kernel here
            break;
        }
      }
    }
  }
  return shapes;
}

/// What a field names, of those that `all` are.
template <class T>
T named(const Csv& in, std::size_t row, std::string_view column, std::span<const T> all) {
  const std::string_view text = in.text(row, in.column(column));
  std::vector<std::string_view> names;
  for (const T each : all) names.push_back(kernels::name(each));
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    throw InputError(in.place(row), fmt::format("{} is '{}'{}: expected one of {}", column, text,
                                                did_you_mean(text, names), fmt::join(names, ", ")));
  }
  return all[static_cast<std::size_t>(found - names.begin())];
}

/// The shapes of models/quick-shapes.csv, each with the axes of its operation; the columns of others are
/// blank.
std::vector<kernels::Point> quick_shapes() {
  const Csv in(data_dir() / "models" / "quick-shapes.csv");
  constexpr double kMost = 0x1p31;
  std::vector<kernels::Point> shapes;
  for (std::size_t i = 0; i < in.rows(); ++i) {
    kernels::Point point;
    point.op = named<kernels::Op>(in, i, "op", kernels::kLayerOps);
    point.format = named<kernels::Format>(in, i, "dtype", kernels::kFormats);
    std::size_t axis = 0;
    for (const std::string_view name : kernels::axes(point.op)) {
      const std::size_t column = in.column(name);
      const double value = name == "prefix" ? in.number(i, column, 0) : in.positive(i, column);
      if (std::trunc(value) < value || value > kMost) {
        throw InputError(in.place(i),
                         fmt::format("{} is {}: expected a whole number", name, in.text(i, column)));
      }
      point.shape[axis++] = static_cast<std::int64_t>(value);
    }
    if (!kernels::can_run(point)) {
      throw InputError(in.place(i),
                       fmt::format("{}: no kernel here can run it; expected n and k in multiples of "
                                   "16, heads of 64 or 128 and at most 16 a KV head",
                                   kernels::describe(point)));
    }
    shapes.push_back(point);
  }
  return shapes;
}

int dry_run(const std::vector<kernels::Point>& points) {
  std::map<kernels::Op, std::pair<std::size_t, double>> families;
  for (const kernels::Point& point : points) {
    fmt::print("{:6.2f} s  {}\n", point.budget_s, describe(point));
    auto& [count, seconds] = families[point.op];
    ++count;
    seconds += point.budget_s;
  }
  fmt::print("\n{:<22} {:>7} {:>12}\n", "operation", "points", "at most");
  for (const auto& [op, family] : families)
    fmt::print("{:<22} {:>7} {:>12}\n", name(op), family.first, short_duration(family.second));
  fmt::print("{:<22} {:>7} {:>12}  and set-up, checks and the fit\n", "all", points.size(),
             short_duration(kernels::budget_seconds(points)));
  return kDone;
}

/// Throws InputError where nothing can be measured here.
void require_gpu() {
  std::string why;
#ifdef PDSIM_CUDA_BUILD
  if (kernels::gpu_module().find_gpu(why)) return;
  why = fmt::format("no GPU to measure ({})", why);
#else
  why =
      "this pdsim was built without CUDA; build it where nvcc and cuBLAS are (PDSIM_CUDA=ON says what is "
      "missing)";
#endif
  throw InputError("calibrate",
                   fmt::format("{}: expected an NVIDIA GPU of compute capability 8.0 or newer with its "
                               "driver; --dry-run lists what would be measured",
                               why));
}

/// What follows is never reached without CUDA: require_gpu stands before it.
std::string measured_device() {
#ifdef PDSIM_CUDA_BUILD
  return kernels::gpu_module().device_name();
#else
  return "";
#endif
}

Measurements measure([[maybe_unused]] const std::vector<kernels::Point>& points,
                     [[maybe_unused]] const kernels::Watch& watch, [[maybe_unused]] kernels::Mode mode) {
#ifdef PDSIM_CUDA_BUILD
  return kernels::gpu_module().calibrate(points, watch, mode);
#else
  return {};
#endif
}

/// The data sheet of the GPU that was measured.
const Gpu& gpu_of(const std::string& device, const std::string& given) {
  if (!given.empty()) return find_gpu(given, "--gpu");
  if (const Gpu* known = find_device(device)) return *known;
  throw InputError("--gpu",
                   fmt::format("is not given, and '{}' is no GPU that models/gpus.json knows: expected the "
                               "name of the nearest, of {}",
                               device, fmt::join(gpu_names(), ", ")));
}

nlohmann::ordered_json known_or_null(double value) {
  return value > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

/// As models/profile.hpp's load_device reads it.
std::string device_json(const Measurements& m, const std::string& date) {
  const nlohmann::ordered_json json = {{"schema", "pdsim.device/1"},
                                       {"status", m.interrupted      ? "interrupted"
                                                  : m.broken.empty() ? "finished"
                                                                     : "broken"},
                                       {"date", date},
                                       {"device", m.gpu.device},
                                       {"driver", m.gpu.driver},
                                       {"runtime", m.gpu.runtime},
                                       {"cublas", m.gpu.cublas},
                                       {"compute_capability", m.gpu.compute_capability},
                                       {"sms", m.gpu.multiprocessors},
                                       {"memory_bytes", m.gpu.memory_bytes},
                                       {"l2_bytes", m.gpu.l2_bytes},
                                       {"clock_mhz", known_or_null(m.gpu.clock_mhz)},
                                       {"memory_clock_mhz", known_or_null(m.gpu.memory_clock_mhz)},
                                       {"power_limit_w", known_or_null(m.gpu.power_limit_w.value_or(0))},
                                       {"peaks",
                                        {{"copy_gb_s", known_or_null(m.peaks.copy_gb_per_s)},
                                         {"gemm_bf16_tflops", known_or_null(m.peaks.gemm_bf16_tflops)},
                                         {"gemm_fp8_tflops", known_or_null(m.peaks.gemm_fp8_tflops)}}}};
  return json.dump(2) + "\n";
}

std::string against(double measured, double sheet, const char* unit) {
  return sheet > 0 ? fmt::format("{:.4g} {} of {:.4g} on the data sheet ({:.0f} %)", measured, unit, sheet,
                                 100 * measured / sheet)
                   : fmt::format("{:.4g} {}", measured, unit);
}

std::string report(const Measurements& c, const Gpu& gpu) {
  int throttled = 0;
  for (const kernels::Row& row : c.rows) throttled += row.measured.throttled;
  std::string text =
      fmt::format("{}, driver {}, {:.0f} MHz{}\n", c.gpu.device, c.gpu.driver, c.gpu.clock_mhz,
                  c.gpu.power_limit_w ? fmt::format(", limit {:.0f} W", *c.gpu.power_limit_w) : "");
  const auto peak = [&](std::string_view what, double measured, double sheet, const char* unit) {
    if (measured > 0) text += fmt::format("{} {}\n", what, against(measured, sheet, unit));
  };
  peak("copy ", c.peaks.copy_gb_per_s, gpu.hbm_bytes_per_ns, "GB/s");
  peak("gemm  bf16", c.peaks.gemm_bf16_tflops, gpu.bf16_tflops, "TFLOP/s");
  peak("gemm  fp8", c.peaks.gemm_fp8_tflops, gpu.fp8_tflops, "TFLOP/s");
  text += "\n" + achieved(c);
  text += fmt::format("\n{} points measured, {} samples below full clock thrown away\n",
                      c.rows.size() + c.interference.size(), throttled);
  std::map<std::string, int> reasons;
  for (const kernels::NotMeasured& skipped : c.skipped) ++reasons[skipped.why];
  for (const auto& [why, count] : reasons) text += fmt::format("{} points not measured: {}\n", count, why);
  return text;
}

/// Writes the tables and device.json, in place of those of an earlier run. Returns the
/// tables that are fitted.
std::vector<std::filesystem::path> write(const std::string& folder, const Measurements& measured,
                                         const std::string& software, const std::string& date) {
  std::vector<std::pair<std::string, std::string>> files = tables(measured, software);
  files.emplace_back("device.json", device_json(measured, date));
  const std::vector<std::string> written = write_files(folder, files);
  for (const std::string_view name : kernels::kTableNames) {
    const bool fresh =
        std::any_of(files.begin(), files.end(), [&](const auto& file) { return file.first == name; });
    if (!fresh) std::filesystem::remove(std::filesystem::path(folder) / name);
  }
  std::filesystem::remove(std::filesystem::path(folder) / "profile.json");  // until these tables are fitted
  std::vector<std::filesystem::path> fitted;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (files[i].first != "device.json" && files[i].first != "interference.csv")
      fitted.emplace_back(written[i]);
  }
  return fitted;
}

/// profile.json beside the tables. That they cannot be fitted is no fault of the
/// user's: status 1.
int fit(const CalibrateOptions& options, const std::vector<std::filesystem::path>& tables, const Gpu& gpu,
        const std::string& software) {
  const std::filesystem::path folder(options.out);
  try {
    const Profile profile =
        calibrated_profile(read_kernel_tables(tables), gpu, load_device(folder / "device.json"),
                           shipped_engine(gpu), {options.name, "", software, ""});
    write_files(options.out, {{"profile.json", to_json(profile)}});
    return kDone;
  } catch (const InputError& error) {
    fmt::print(stderr, "pdsim: the tables are written, but no profile fits them: {}\n", error.what());
    return kBug;
  }
}

Measurements watched(const std::vector<kernels::Point>& points, kernels::Mode mode, bool quiet,
                     double limit_s = 0) {
  catch_interrupts();
  Progress progress(mode == kernels::Mode::check ? "checking" : "measuring", "points", quiet);
  const kernels::Watch watch{
      interrupted, [&](std::size_t done, std::size_t total) { progress.update(done, total); }, limit_s};
  return measure(points, watch, mode);
}

void complain(const Measurements& measured) {
  for (const auto& [point, why] : measured.wrong)
    fmt::print(stderr, "pdsim: wrong or failed, not timed: {}: {}\n", describe(point), why);
  if (!measured.broken.empty()) fmt::print(stderr, "pdsim: CUDA failed: {}\n", measured.broken);
}

int check(bool quiet) {
  require_gpu();
  const std::vector<kernels::Point> points = kernels::check_points();
  const Measurements measured = watched(points, kernels::Mode::check, quiet);
  complain(measured);
  if (measured.interrupted) return kInterrupted;
  fmt::print("{}: {} cases, {} wrong, {} that this machine cannot run\n", measured.gpu.device, points.size(),
             measured.wrong.size(), measured.skipped.size());
  for (const auto& [point, why] : measured.skipped) fmt::print("  {}: {}\n", describe(point), why);
  return measured.wrong.empty() && measured.broken.empty() ? kDone : kBug;
}

}  // namespace

int calibrate_gpu(const CalibrateOptions& options) {
  const std::vector<kernels::Point> points =
      options.quick ? kernels::quick_plan(quick_shapes())
                    : kernels::full_plan(shapes_of(options.models.empty() ? kModels : options.models,
                                                   options.tensor.empty() ? kTensor : options.tensor));
  if (options.dry_run) return dry_run(points);
  if (options.check) return check(options.quiet);
  if (options.out.empty())
    throw InputError("calibrate", "--out is missing: expected a folder for the tables and the profile");
  require_gpu();
  std::vector<std::string_view> names(std::begin(kernels::kTableNames), std::end(kernels::kTableNames));
  names.insert(names.end(), {"device.json", "profile.json"});
  check_folder(options.out, names);
  const std::string date = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::chrono::system_clock::now()));
  const Gpu& gpu = gpu_of(measured_device(), options.gpu);

  const Measurements measured =
      watched(points, kernels::Mode::measure, options.quiet, options.quick ? kernels::kQuickLimitSeconds : 0);

  const std::string software =
      fmt::format("pdsim " PDSIM_VERSION " CUDA {} cuBLAS {}", measured.gpu.runtime, measured.gpu.cublas);
  const std::vector<std::filesystem::path> tables = write(options.out, measured, software, date);
  fmt::print("{}", report(measured, gpu));
  complain(measured);
  if (measured.interrupted) {
    fmt::print(stderr, "pdsim: interrupted; {} holds what was measured until then, and no profile\n",
               options.out);
    return kInterrupted;
  }
  if (!measured.broken.empty()) return kBug;
  const int fitted = fit(options, tables, gpu, software);
  return measured.wrong.empty() ? fitted : kBug;
}

void add_calibrate_gpu_options(CLI::App& calibrate, CalibrateOptions& options) {
  calibrate.add_option("--out", options.out, "Folder for the tables (CSV), device.json and profile.json");
  CLI::Option* quick = calibrate.add_flag(
      "--quick", options.quick,
      "The fewest shapes that tell the curves of any model (models/quick-shapes.csv): under three minutes");
  calibrate.add_flag("--dry-run", options.dry_run,
                     "List what would be measured and how long that takes; needs no GPU");
  calibrate.add_flag("--check", options.check,
                     "Only compare each kernel with float64, on small cases: times and writes nothing");
  calibrate
      .add_option("--model", options.models,
                  "Measure the layers of these models, by name or config.json (default: five that differ)")
      ->excludes(quick);
  calibrate.add_option("--tp", options.tensor, "... cut so many ways (default: 1 2 4 8)")
      ->check(CLI::Range(1, 1024))
      ->excludes(quick);
  calibrate.add_option(
      "--gpu", options.gpu,
      "Whose data sheet it is held against, a name in models/gpus.json (default: by the driver's)");
  calibrate.add_option("--name", options.name, "The profile's name (default: the GPU's)");
  calibrate.add_flag("--quiet", options.quiet, "No progress");
}

}  // namespace pdsim
