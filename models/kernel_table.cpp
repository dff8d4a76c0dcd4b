#include "models/kernel_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>

#include "models/csv.hpp"
#include "models/hardware.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr std::string_view kGemmAxes[] = {"m", "n", "k"};
constexpr std::string_view kPrefillAxes[] = {"tokens",   "prefix",   "requests", "heads",
                                             "kv_heads", "head_dim", "window"};
constexpr std::string_view kDecodeAxes[] = {"batch", "context", "heads", "kv_heads", "head_dim", "window"};
constexpr std::string_view kLatentPrefillAxes[] = {"tokens", "prefix", "requests", "heads"};
constexpr std::string_view kLatentDecodeAxes[] = {"batch", "context", "heads"};
constexpr std::string_view kMoeAxes[] = {"tokens", "hidden", "intermediate", "experts",
                                         "topk",   "tp",     "ep",           "routing"};
constexpr std::string_view kMessageAxes[] = {"bytes", "gpus"};

std::uint16_t index_of(std::vector<std::string>& names, std::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<std::uint16_t>(found - names.begin());
  names.emplace_back(name);
  return static_cast<std::uint16_t>(names.size() - 1);
}

/// A dtype by the tables' own spellings: int4_wo is int4 weights, w4a16_mxfp4 and its kind mxfp4 weights
/// whatever meets them (the kernel tells).
std::optional<Dtype> table_dtype(std::string_view text) {
  if (text.find("mxfp4") != text.npos) return Dtype::mxfp4;
  return parse_dtype(text);
}

/// "balanced" 0, "power_law_A" A; otherwise none.
std::optional<double> table_routing(std::string_view text) {
  constexpr std::string_view kPower = "power_law_";
  if (text.empty() || text == "balanced") return 0;
  if (text.starts_with(kPower)) text.remove_prefix(kPower.size());
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Fills `row` from a line, or says why it is set aside.
using Read = std::string (*)(const Csv&, const std::vector<std::size_t>&, std::size_t, KernelTable&,
                             KernelRow&);

/// A form of table: its columns, those that it may lack, and how a line becomes a row.
struct Form {
  std::vector<std::string_view> columns, optional;
  Read read;
};

std::string unknown_dtype(std::string_view text) {
  return fmt::format("a number format that pdsim does not know: {}", text);
}

std::string read_gemm(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                      KernelRow& row) {
  const auto dtype = table_dtype(in.text(i, at[0]));
  if (!dtype) return unknown_dtype(in.text(i, at[0]));
  row.op = CurveOp::gemm;
  row.dtype = *dtype;
  for (std::size_t axis = 0; axis < 3; ++axis) row.shape[axis] = in.number(i, at[1 + axis], 1);
  row.ns = in.positive(i, at[4]) * 1e6;
  row.kernel = index_of(table.kernels, in.text(i, at[5]));
  return "";
}

std::string read_attention(const Csv& in, const std::vector<std::size_t>& at, std::size_t i,
                           KernelTable& table, KernelRow& row) {
  const auto kv = table_dtype(in.text(i, at[1])), compute = table_dtype(in.text(i, at[2]));
  if (!kv) return unknown_dtype(in.text(i, at[1]));
  if (!compute) return unknown_dtype(in.text(i, at[2]));
  const bool decode = in.text(i, at[0]) == "generation_attention";
  if (!decode && in.text(i, at[0]) != "context_attention")
    return fmt::format("an operation that pdsim does not know: {}", in.text(i, at[0]));
  row.op = decode ? CurveOp::attention_decode : CurveOp::attention_prefill;
  row.dtype = *kv;
  row.compute = *compute;
  const double batch = in.number(i, at[3], 1), length = in.number(i, at[4], 1), step = in.number(i, at[8], 0);
  const double heads = in.number(i, at[5], 1), head_dim = in.number(i, at[7], 1);
  double kv_heads = in.number(i, at[6], 0);
  if (kv_heads == 0) kv_heads = heads;  // the tables' way to write multi-head attention
  const double window = in.number(i, at[11], 0);
  if (decode) {
    row.shape = {batch, step + length, heads, kv_heads, head_dim, window};
  } else {
    row.shape = {length, step, batch, heads, kv_heads, head_dim, window};
  }
  row.ns = in.positive(i, at[9]) * 1e6;
  row.kernel = index_of(table.kernels, in.text(i, at[10]));
  return "";
}

std::string read_latent(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                        KernelRow& row) {
  constexpr std::pair<std::string_view, CurveOp> kOps[] = {{"mla_context_module", CurveOp::mla_prefill},
                                                           {"mla_generation_module", CurveOp::mla_decode},
                                                           {"dsa_context_module", CurveOp::dsa_prefill},
                                                           {"dsa_generation_module", CurveOp::dsa_decode}};
  const auto* op = std::find_if(std::begin(kOps), std::end(kOps),
                                [&](const auto& each) { return each.first == in.text(i, at[0]); });
  if (op == std::end(kOps))
    return fmt::format("an operation that pdsim does not know: {}", in.text(i, at[0]));
  const auto compute = table_dtype(in.text(i, at[1])), kv = table_dtype(in.text(i, at[2])),
             weights = table_dtype(in.text(i, at[3]));
  if (!compute) return unknown_dtype(in.text(i, at[1]));
  if (!kv) return unknown_dtype(in.text(i, at[2]));
  if (!weights) return unknown_dtype(in.text(i, at[3]));
  row.op = op->second;
  row.dtype = *kv;
  row.compute = *compute;
  row.weights = *weights;
  const double heads = in.number(i, at[4], 1), batch = in.number(i, at[5], 1),
               length = in.number(i, at[6], 1), step = in.number(i, at[7], 0);
  if (row.op == CurveOp::mla_decode || row.op == CurveOp::dsa_decode) {
    row.shape = {batch, step + length, heads};
  } else {
    row.shape = {length, step, batch, heads};
  }
  row.ns = in.positive(i, at[8]) * 1e6;
  row.kernel = index_of(table.kernels, in.text(i, at[9]));
  row.model = index_of(table.models, in.text(i, at[10]));
  return "";
}

std::string read_moe(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                     KernelRow& row) {
  const auto dtype = table_dtype(in.text(i, at[0]));
  if (!dtype) return unknown_dtype(in.text(i, at[0]));
  const auto routing = table_routing(in.text(i, at[8]));
  if (!routing) return fmt::format("a routing that pdsim does not know: {}", in.text(i, at[8]));
  row.op = CurveOp::moe;
  row.dtype = *dtype;
  // tokens hidden intermediate topk experts tp ep, as the columns stand
  std::array<double, 7> value;
  for (std::size_t axis = 0; axis < 7; ++axis) value[axis] = in.number(i, at[1 + axis], 1);
  row.shape = {value[0], value[1], value[2], value[4], value[3], value[5], value[6], *routing};
  row.ns = in.positive(i, at[9]) * 1e6;
  row.kernel = index_of(table.kernels, in.text(i, at[10]));
  return "";
}

std::string read_message(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                         KernelRow& row) {
  constexpr std::pair<std::string_view, CurveOp> kOps[] = {{"all_reduce", CurveOp::allreduce},
                                                           {"all_gather", CurveOp::allgather},
                                                           {"reduce_scatter", CurveOp::reducescatter},
                                                           {"alltoall", CurveOp::alltoall}};
  const std::string_view name = at[0] == Csv::kAbsent ? "all_reduce" : in.text(i, at[0]);
  const auto* op =
      std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& each) { return each.first == name; });
  if (op == std::end(kOps)) return fmt::format("an operation that pdsim does not know: {}", name);
  const auto dtype = table_dtype(in.text(i, at[1]));
  if (!dtype) return unknown_dtype(in.text(i, at[1]));
  row.op = op->second;
  row.dtype = *dtype;
  row.shape = {in.number(i, at[3], 1) * bytes_per_element(*dtype), in.number(i, at[2], 2)};
  row.ns = in.positive(i, at[4]) * 1e6;
  row.kernel = index_of(table.kernels, in.text(i, at[5]));
  return "";
}

// Operations of pdsim's own form beside those of curves.
constexpr std::string_view kLatentAlone = "mla-attention-decode", kCopy = "kv-copy";

/// Multi-head latent attention as DeepSeek-V3 has it, whose sizes (latent 512, 64 with position) pdsim's own
/// kernel is made for.
constexpr std::string_view kLatentModel = "deepseek-ai/DeepSeek-V3";

std::string read_simple(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                        KernelRow& row) {
  std::string_view op = in.text(i, at[0]);
  if (op == kLatentAlone) {
    op = name(CurveOp::mla_decode);
    row.bare = true;
    row.model = index_of(table.models, kLatentModel);
  }
  const std::vector<CurveOp> ops = curve_ops();
  const auto known = std::find_if(ops.begin(), ops.end(), [&](CurveOp each) { return name(each) == op; });
  const bool module = known != ops.end() && *known >= CurveOp::mla_prefill && *known <= CurveOp::dsa_decode;
  if (known == ops.end() || (module && !row.bare)) {
    std::vector<std::string_view> names = {kLatentAlone, kCopy};
    for (const CurveOp each : ops) {
      if (each < CurveOp::mla_prefill || each > CurveOp::dsa_decode) names.push_back(name(each));
    }
    throw InputError(in.place(i), fmt::format("op is '{}'{}: expected one of {}", op, did_you_mean(op, names),
                                              fmt::join(names, ", ")));
  }
  row.op = *known;
  row.dtype = dtype_of(in.text(i, at[1]), fmt::format("{}: dtype", in.place(i)));
  row.kernel = index_of(table.kernels, in.text(i, at[2]));
  row.ns = in.positive(i, at[3]) * 1e3;
  const auto axes = shape_axes(row.op);
  for (std::size_t axis = 0; axis < axes.size(); ++axis) {
    const std::size_t column = in.find(axes[axis]);
    if (axes[axis] == "routing") {
      const auto routing = table_routing(in.text(i, column));
      if (!routing) {
        throw InputError(in.place(i), fmt::format("routing is '{}': expected balanced or power_law_A",
                                                  in.text(i, column)));
      }
      row.shape[axis] = *routing;
      continue;
    }
    // What may be left blank: no prefix, no window, one request, experts not cut.
    const bool none = axes[axis] == "prefix" || axes[axis] == "window";
    const bool one = axes[axis] == "requests" || axes[axis] == "tp" || axes[axis] == "ep";
    const bool blank = column == Csv::kAbsent || in.text(i, column).empty();
    row.shape[axis] =
        blank && (none || one) ? (one ? 1 : 0) : in.number(i, in.column(axes[axis]), none ? 0 : 1);
  }
  return "";
}

CopyRow read_copy(const Csv& in, const std::vector<std::size_t>& at, std::size_t i, KernelTable& table,
                  std::uint16_t file) {
  CopyRow row;
  row.file = file;
  row.line = in.line(i);
  row.kind = index_of(table.kernels, in.text(i, at[2]));
  row.ns = in.positive(i, at[3]) * 1e3;
  row.shape = {in.number(i, in.column("run_bytes"), 1), in.number(i, in.column("runs"), 1),
               in.number(i, in.find("sms"), 0)};
  return row;
}

const std::vector<Form>& forms() {
  static const std::vector<Form> all = {
      {{"gemm_dtype", "m", "n", "k", "latency", "kernel_source"}, {}, read_gemm},
      {{"op_name", "kv_cache_dtype", "attn_dtype", "batch_size", "isl", "num_heads", "num_key_value_heads",
        "head_dim", "step", "latency", "kernel_source"},
       {"window_size"},
       read_attention},
      {{"op_name", "mla_dtype", "kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl", "step",
        "latency", "kernel_source", "model"},
       {},
       read_latent},
      {{"moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        "moe_ep_size", "distribution", "latency", "kernel_source"},
       {},
       read_moe},
      {{"op_name", "allreduce_dtype", "num_gpus", "message_size", "latency", "kernel_source"},
       {},
       read_message},
      {{"op_name", "nccl_dtype", "num_gpus", "message_size", "latency", "kernel_source"}, {}, read_message},
      {{"op", "dtype", "kernel", "latency_us"}, {}, read_simple},
  };
  return all;
}

/// The form whose columns the header has the greatest share of, if more than half.
const Form* form_of(const Csv& in) {
  const Form* best = nullptr;
  double most = 0.5;
  for (const Form& form : forms()) {
    double share = 0;
    for (const std::string_view column : form.columns) share += in.find(column) != Csv::kAbsent ? 1 : 0;
    share /= static_cast<double>(form.columns.size());
    if (share <= most) continue;
    most = share;
    best = &form;
  }
  return best;
}

void add_once(std::string& list, const std::string& item) {
  if (item.empty() || list.find(item) != list.npos) return;
  list += list.empty() ? item : ", " + item;
}

/// How `pdsim calibrate` came to a time: for people.
constexpr std::string_view kHow[] = {"samples",  "spread",    "clock_mhz", "memory_clock_mhz",
                                     "power_w",  "throttled", "stop",      "temperature_c",
                                     "achieved", "date",      "choice"};

/// Columns of pdsim's own form that are neither fixed nor an axis: of kHow, or most likely a slip of the pen.
void check_simple_header(const Csv& in, KernelTable& table) {
  std::vector<std::string_view> known = {"op",       "dtype",     "kernel", "latency_us", "device",
                                         "software", "run_bytes", "runs",   "sms"};
  known.insert(known.end(), std::begin(kHow), std::end(kHow));
  for (const CurveOp op : curve_ops()) {
    for (const std::string_view axis : shape_axes(op)) {
      if (std::find(known.begin(), known.end(), axis) == known.end()) known.push_back(axis);
    }
  }
  for (const std::string_view column : in.header()) {
    if (std::find(std::begin(kHow), std::end(kHow), column) != std::end(kHow)) {
      static_cast<void>(index_of(table.not_read, column));
      continue;
    }
    if (std::find(known.begin(), known.end(), column) != known.end()) continue;
    throw InputError(fmt::format("{}:1", in.file()),
                     fmt::format("has a column '{}' that is not known here{}: expected among {}", column,
                                 did_you_mean(column, known), fmt::join(known, ", ")));
  }
}

void read_table(const Csv& in, const Form& form, KernelTable& table) {
  std::vector<std::size_t> at;
  for (const std::string_view column : form.columns) at.push_back(in.column(column));
  for (const std::string_view column : form.optional) at.push_back(in.find(column));
  if (form.read == read_simple) check_simple_header(in, table);
  const std::size_t device = in.find("device"), framework = in.find("framework"),
                    version = in.find("version"), software = in.find("software");
  const auto file = static_cast<std::uint16_t>(table.files.size());
  table.files.push_back(in.file());
  for (std::size_t i = 0; i < in.rows(); ++i) {
    KernelRow row;
    row.file = file;
    row.line = in.line(i);
    const std::string_view on = in.text(i, device);
    if (!on.empty() && !table.device.empty() && on != table.device) {
      throw InputError(in.place(i),
                       fmt::format("device is '{}' where others are '{}': expected tables of one "
                                   "device",
                                   on, table.device));
    }
    if (table.device.empty()) table.device = on;
    if (form.read == read_simple && in.text(i, at[0]) == kCopy) {
      table.copies.push_back(read_copy(in, at, i, table, file));
      continue;
    }
    const std::string reason = form.read(in, at, i, table, row);
    if (!reason.empty()) {
      ++table.set_aside[reason];
      continue;
    }
    table.rows.push_back(row);
    if (i > 0 && in.text(i, version) == in.text(i - 1, version) &&
        in.text(i, software) == in.text(i - 1, software)) {
      continue;
    }
    add_once(table.software, std::string(in.text(i, software)));
    if (framework != Csv::kAbsent && version != Csv::kAbsent) {
      // The NCCL tables give NCCL's version under the name of the framework that measured it.
      const bool nccl = in.find("nccl_dtype") != Csv::kAbsent;
      const std::string who = nccl                              ? "NCCL"
                              : in.text(i, framework) == "VLLM" ? "vLLM"
                                                                : std::string(in.text(i, framework));
      add_once(table.software, fmt::format("{} {}", who, in.text(i, version)));
    }
  }
}

bool is_csv(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  return name.ends_with(".csv") || name.ends_with(".csv.gz");
}

}  // namespace

std::span<const std::string_view> shape_axes(CurveOp op) {
  switch (op) {
    case CurveOp::gemm:
      return kGemmAxes;
    case CurveOp::attention_prefill:
      return kPrefillAxes;
    case CurveOp::attention_decode:
      return kDecodeAxes;
    case CurveOp::mla_prefill:
    case CurveOp::dsa_prefill:
      return kLatentPrefillAxes;
    case CurveOp::mla_decode:
    case CurveOp::dsa_decode:
      return kLatentDecodeAxes;
    case CurveOp::moe:
      return kMoeAxes;
    case CurveOp::allreduce:
    case CurveOp::allgather:
    case CurveOp::reducescatter:
    case CurveOp::alltoall:
      return kMessageAxes;
  }
  broken(__FILE__, __LINE__, "an operation without axes");
}

double KernelRow::at(std::string_view axis) const {
  const auto axes = shape_axes(op);
  const auto found = std::find(axes.begin(), axes.end(), axis);
  if (found == axes.end()) broken(__FILE__, __LINE__, "a shape without this axis");
  return shape[static_cast<std::size_t>(found - axes.begin())];
}

std::string KernelTable::place(const KernelRow& row) const {
  return fmt::format("{}:{}", files[row.file], row.line);
}

std::string describe_shape(const KernelRow& row) {
  std::string text;
  const auto axes = shape_axes(row.op);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    text += fmt::format("{}{}={}", i > 0 ? " " : "", axes[i], row.shape[i]);
  }
  return text;
}

KernelTable read_kernel_tables(std::span<const std::filesystem::path> tables) {
  KernelTable table;
  for (const std::filesystem::path& path : tables) {
    std::vector<std::filesystem::path> files = {path};
    const bool folder = std::filesystem::is_directory(path);
    if (folder) {
      files.clear();
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        if (is_csv(entry.path())) files.push_back(entry.path());
      }
      std::sort(files.begin(), files.end());
    }
    for (const std::filesystem::path& file : files) {
      const Csv in(file);
      const Form* form = form_of(in);
      if (form != nullptr) {
        read_table(in, *form, table);
        continue;
      }
      if (!folder) {
        throw InputError(
            file.string(),
            "is no table of kernel times: expected columns op,dtype,kernel,latency_us and a shape "
            "(pdsim fit --help), or those of aiconfigurator's silicon data");
      }
      table.set_aside[fmt::format("{} is no table of kernel times", file.filename().string())] +=
          static_cast<std::int64_t>(in.rows());
    }
  }
  if (table.rows.empty() && table.copies.empty()) {
    throw InputError(tables.empty() ? "tables" : tables.front().string(),
                     "no table to fit: expected measured kernel times (.csv or .csv.gz)");
  }
  return table;
}

namespace {

double median_of(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return 0.5 * (values[(values.size() - 1) / 2] + values[values.size() / 2]);
}

}  // namespace

void merge_repeats(KernelTable& table) {
  using Key = std::tuple<CurveOp, Dtype, Dtype, Dtype, std::uint16_t, std::uint16_t, bool,
                         std::array<double, kShapeAxes>>;
  std::map<Key, std::pair<std::size_t, std::vector<double>>> times;  // first row, all times
  std::vector<KernelRow> kept;
  for (const KernelRow& row : table.rows) {
    const Key key(row.op, row.dtype, row.compute, row.weights, row.kernel, row.model, row.bare, row.shape);
    const auto [found, fresh] = times.try_emplace(key, kept.size(), std::vector<double>());
    found->second.second.push_back(row.ns);
    if (fresh) kept.push_back(row);
  }
  for (auto& [key, entry] : times) {
    kept[entry.first].ns = median_of(entry.second);
  }
  table.rows = std::move(kept);
  std::map<std::tuple<std::uint16_t, double, double, double>, std::pair<std::size_t, std::vector<double>>>
      copies;
  std::vector<CopyRow> copied;
  for (const CopyRow& row : table.copies) {
    const auto [found, fresh] = copies.try_emplace(
        {row.kind, row.shape.run_bytes, row.shape.runs, row.shape.sms}, copied.size(), std::vector<double>());
    found->second.second.push_back(row.ns);
    if (fresh) copied.push_back(row);
  }
  for (auto& [key, entry] : copies) copied[entry.first].ns = median_of(entry.second);
  table.copies = std::move(copied);
}

double mfu(const KernelRow& row, const Gpu& gpu) {
  double flops = 0;
  Dtype format = row.dtype;
  switch (row.op) {
    case CurveOp::gemm:
      flops = gemm_work(gemm_shape(row)).flops;
      break;
    case CurveOp::attention_prefill: {
      const double tokens = row.at("tokens"), prefix = row.at("prefix"), window = row.at("window");
      const double keys = prefix + tokens;
      // Query i sees min(prefix + i, window) keys.
      const double growing = window <= 0 ? tokens : std::clamp(window - prefix, 0.0, tokens);
      const double pairs = growing * prefix + growing * (growing + 1) / 2 + (tokens - growing) * window;
      flops = keys > 0 ? row.at("requests") * 4 * row.at("heads") * row.at("head_dim") * pairs : 0;
      format = row.compute;
      break;
    }
    case CurveOp::attention_decode: {
      const double context = row.at("context"), window = row.at("window");
      flops = row.at("batch") * 4 * row.at("heads") * row.at("head_dim") *
              (window > 0 ? std::min(context, window) : context);
      format = row.compute;
      break;
    }
    case CurveOp::moe: {
      if (row.at("routing") != 0) return 0;  // a rank of a skewed layer may have few tokens
      const MoeShape shape = moe_shape(row);
      flops = (shape.gated ? 6 : 4) * shape.hidden * shape.intermediate * shape.tokens * shape.topk /
              shape.expert_parallel;
      break;
    }
    default:
      return 0;
  }
  return flops / (row.ns * peak_ops_per_ns(gpu, format));
}

void refuse_impossible(const KernelTable& table, const Gpu& gpu) {
  constexpr std::size_t kNamed = 5;
  std::string named;
  std::size_t count = 0;
  for (const KernelRow& row : table.rows) {
    const double share = mfu(row, gpu);
    if (share <= 1) continue;
    if (count++ >= kNamed) continue;
    named += fmt::format("; {}: {} {} {} in {:.4g} us, MFU {:.2f}", table.place(row), name(row.op),
                         name(row.dtype), describe_shape(row), row.ns / 1e3, share);
  }
  if (count == 0) return;
  throw InputError(table.files.front(),
                   fmt::format("{} of {} rows imply more arithmetic than a {} can do (MFU above 1), expected "
                               "times of whole operations{}{}",
                               count, table.rows.size(), gpu.product, named, count > kNamed ? "; ..." : ""));
}

GemmShape gemm_shape(const KernelRow& row) {
  return {row.shape[0], row.shape[1], row.shape[2], row.dtype};
}

MoeShape moe_shape(const KernelRow& row) {
  MoeShape shape;
  shape.tokens = row.at("tokens");
  shape.hidden = row.at("hidden");
  shape.intermediate = row.at("intermediate") / row.at("tp");
  shape.experts = row.at("experts");
  shape.topk = row.at("topk");
  shape.expert_parallel = row.at("ep");
  shape.dtype = row.dtype;
  shape.routing = row.at("routing");
  shape.gated = gated_experts(shape.hidden, row.at("intermediate"), shape.experts, shape.topk);
  shape.warm = true;  // the same layer, call after call
  return shape;
}

}  // namespace pdsim
