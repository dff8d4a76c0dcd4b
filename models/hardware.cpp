#include "models/hardware.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/data.hpp"
#include "models/json.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

constexpr std::array<std::string_view, 3> kPlans = {"on_demand", "capacity_block", "spot"};

Gpu read_gpu(const std::string& name, const JsonObject& json) {
  Gpu gpu;
  gpu.name = name;
  gpu.product = json.text("product");
  gpu.memory_bytes = json.integer("memory_MiB", 1) * (Bytes{1} << 20);
  gpu.hbm_bytes_per_ns = json.number("hbm_GB_per_s", 1);
  gpu.fp32_tflops = json.number("fp32_tflops", 1);
  gpu.bf16_tflops = json.number("bf16_tflops", 1);
  gpu.fp8_tflops = json.number_or("fp8_tflops", 0, 0);
  gpu.fp4_tflops = json.number_or("fp4_tflops", 0, 0);
  gpu.int8_tops = json.number_or("int8_tops", 0, 0);
  gpu.nvlink_bytes_per_ns = json.number_or("nvlink_GB_per_s", 0, 0);
  gpu.nvlink_gpus = static_cast<std::int32_t>(json.integer_or("nvlink_gpus", 8, 1));
  gpu.pcie_bytes_per_ns = json.number("pcie_GB_per_s", 1);
  gpu.sm_count = static_cast<std::int32_t>(json.integer("sm_count", 1));
  gpu.compute_capability = static_cast<std::int32_t>(json.integer_or("compute_capability", 0, 10));
  gpu.source = json.text("source");
  return gpu;
}

Instance read_instance(const std::string& name, const JsonObject& json) {
  Instance instance;
  instance.name = name;
  instance.gpu = find_gpu(json.text("gpu"), json.at("gpu")).name;
  instance.gpus = static_cast<std::int32_t>(json.integer("gpus", 1));
  instance.nics = static_cast<std::int32_t>(json.integer("nics", 1));
  instance.nic_gbit_per_s = json.number("nic_Gbit_per_s", 1);
  instance.efa_version = static_cast<std::int32_t>(json.integer_or("efa_version", 0, 1));
  instance.host_memory_bytes = json.integer_or("host_memory_GiB", 0, 1) * (Bytes{1} << 30);
  instance.source = json.text("source");
  const JsonObject prices = json.object("prices");
  for (const auto& item : prices.value().items()) {
    if (std::find(kPlans.begin(), kPlans.end(), item.key()) == kPlans.end()) {
      throw InputError(prices.at(item.key()),
                       fmt::format("is no plan: expected {}", fmt::join(kPlans, ", ")));
    }
    const JsonObject price = prices.object(item.key());
    instance.prices.emplace(
        item.key(), Price{price.number("usd_per_hour", 0), price.text("as_of"), price.text("source")});
  }
  return instance;
}

/// The objects under `key` of a shipped file, in the file's order of names.
template <typename T>
std::vector<T> read_table(std::string_view file, std::string_view key,
                          T (*read)(const std::string&, const JsonObject&)) {
  const auto path = data_dir() / "models" / file;
  const nlohmann::json document = read_json(path);
  const JsonObject table = JsonObject(document, path.string()).object(key);
  std::vector<T> rows;
  for (const auto& item : table.value().items()) rows.push_back(read(item.key(), table.object(item.key())));
  return rows;
}

const std::vector<Gpu>& gpus() {
  static const Remembered<std::vector<Gpu>> table(
      [] { return read_table<Gpu>("gpus.json", "gpus", read_gpu); });
  return table.value();
}

const std::vector<Instance>& instances() {
  static const Remembered<std::vector<Instance>> table(
      [] { return read_table<Instance>("instances.json", "instances", read_instance); });
  return table.value();
}

template <typename T>
const T& find(const std::vector<T>& table, std::string_view name, std::string_view what,
              std::string_view place) {
  for (const T& row : table) {
    if (row.name == name) return row;
  }
  std::vector<std::string_view> known;
  for (const T& row : table) known.push_back(row.name);
  throw InputError(place, fmt::format("'{}' is no {} that pdsim knows{}; known: {}", name, what,
                                      did_you_mean(name, known), fmt::join(known, ", ")));
}

template <typename T>
std::vector<std::string> names_of(const std::vector<T>& table) {
  std::vector<std::string> names;
  for (const T& row : table) names.push_back(row.name);
  return names;
}

}  // namespace

const Gpu& find_gpu(std::string_view name, std::string_view place) {
  const Gpu* largest = nullptr;  // of those sold in several sizes
  for (const Gpu& gpu : gpus()) {
    if (gpu.name == name) return gpu;
    const bool size_of = gpu.name.starts_with(name) && gpu.name.substr(name.size()).starts_with('-');
    if (size_of && (largest == nullptr || gpu.memory_bytes > largest->memory_bytes)) largest = &gpu;
  }
  return largest != nullptr ? *largest : find(gpus(), name, "GPU", place);
}

const Gpu* find_device(std::string_view device) {
  const auto words = [](std::string_view text) {
    std::vector<std::string> list(1);
    for (const char c : text) {
      if (c == ' ' || c == '-' || c == '_' || c == '/') {
        list.emplace_back();
      } else {
        list.back() += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
      }
    }
    return list;
  };
  const std::vector<std::string> of_device = words(device);
  const auto said = [&](std::string_view word) {
    return std::find(of_device.begin(), of_device.end(), word) != of_device.end();
  };
  if (said("pcie") || said("nvl")) return nullptr;  // other clocks and memory than the boards of gpus.json
  const Gpu* longest = nullptr;
  for (const Gpu& gpu : gpus()) {
    const std::vector<std::string> of_name = words(gpu.name);
    const bool all = std::all_of(of_name.begin(), of_name.end(), said);
    if (all && (longest == nullptr || gpu.name.size() > longest->name.size())) longest = &gpu;
  }
  return longest;
}

const Instance& find_instance(std::string_view name, std::string_view place) {
  return find(instances(), name, "instance type", place);
}

const Price& find_price(const Instance& instance, std::string_view plan, std::string_view place) {
  if (std::find(kPlans.begin(), kPlans.end(), plan) == kPlans.end()) {
    throw InputError(place, fmt::format("'{}' is no plan{}; known: {}", plan, did_you_mean(plan, kPlans),
                                        fmt::join(kPlans, ", ")));
  }
  if (const auto found = instance.prices.find(std::string(plan)); found != instance.prices.end()) {
    return found->second;
  }
  std::vector<std::string_view> plans;
  for (const auto& [known, price] : instance.prices) plans.push_back(known);
  throw InputError(
      place, fmt::format("'{}': no published {} price of {} is known ({}); give usd_per_hour instead", plan,
                         plan, instance.name,
                         plans.empty() ? "nor any other" : fmt::format("only {}", fmt::join(plans, ", "))));
}

double price(const Instance& instance, std::string_view plan, std::string_view place) {
  return find_price(instance, plan, place).usd_per_hour;
}

double peak_ops_per_ns(const Gpu& gpu, Dtype dtype) {
  double tera = gpu.bf16_tflops;
  switch (dtype) {
    case Dtype::bf16:
    case Dtype::fp16:
    case Dtype::int4:  // multiplied as 16-bit numbers
      break;
    case Dtype::fp32:
      tera = gpu.bf16_tflops / 2;  // TF32
      break;
    case Dtype::fp8:
    case Dtype::fp8_block:
      if (gpu.fp8_tflops > 0) tera = gpu.fp8_tflops;
      break;
    case Dtype::nvfp4:
    case Dtype::mxfp4:
      if (gpu.fp4_tflops > 0) tera = gpu.fp4_tflops;
      break;
    case Dtype::int8:
      if (gpu.int8_tops > 0) tera = gpu.int8_tops;
      break;
  }
  return tera * 1e3;
}

std::vector<std::string> gpu_names() {
  return names_of(gpus());
}

std::vector<std::string> instance_names() {
  return names_of(instances());
}

}  // namespace pdsim
