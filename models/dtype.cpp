#include "models/dtype.hpp"

#include <fmt/format.h>

#include <array>

#include "sim/core/error.hpp"

namespace pdsim {
namespace {

struct Spelling {
  std::string_view text;
  Dtype dtype;
};

// The first spelling of a format is its name; the table's order is that of the enum for those.
constexpr std::array<Spelling, 19> kSpellings = {{
    {"bf16", Dtype::bf16},     {"fp16", Dtype::fp16},           {"fp32", Dtype::fp32},
    {"fp8", Dtype::fp8},       {"fp8_block", Dtype::fp8_block}, {"nvfp4", Dtype::nvfp4},
    {"mxfp4", Dtype::mxfp4},   {"int4", Dtype::int4},           {"int8", Dtype::int8},
    {"bfloat16", Dtype::bf16}, {"float16", Dtype::fp16},        {"half", Dtype::fp16},
    {"float32", Dtype::fp32},  {"float", Dtype::fp32},          {"float8_e4m3fn", Dtype::fp8},
    {"fp8_e4m3", Dtype::fp8},  {"fp8_e5m2", Dtype::fp8},        {"int4_wo", Dtype::int4},
    {"w4a16", Dtype::int4},
}};
constexpr std::size_t kDtypes = 9;

}  // namespace

double bytes_per_element(Dtype dtype, std::int32_t int4_group) {
  switch (dtype) {
    case Dtype::bf16:
    case Dtype::fp16:
      return 2;
    case Dtype::fp32:
      return 4;
    case Dtype::fp8:
    case Dtype::int8:
      return 1;
    case Dtype::fp8_block:
      return 1 + 4.0 / (128 * 128);
    case Dtype::nvfp4:
      return 0.5 + 1.0 / 16;
    case Dtype::mxfp4:
      return 0.5 + 1.0 / 32;
    case Dtype::int4:
      return 0.5 + 2.0 / int4_group;
  }
  broken(__FILE__, __LINE__, "a Dtype without a size");
}

std::optional<Dtype> parse_dtype(std::string_view text) {
  for (const Spelling& spelling : kSpellings) {
    if (spelling.text == text) return spelling.dtype;
  }
  return std::nullopt;
}

std::string_view name(Dtype dtype) {
  return kSpellings[static_cast<std::size_t>(dtype)].text;
}

Dtype dtype_of(std::string_view text, std::string_view place) {
  if (const auto dtype = parse_dtype(text)) return *dtype;
  std::array<std::string_view, kDtypes> names;
  for (std::size_t i = 0; i < kDtypes; ++i) names[i] = kSpellings[i].text;
  throw InputError(place, fmt::format("'{}' is no number format{}; known: {}", text,
                                      did_you_mean(text, names), fmt::join(names, ", ")));
}

}  // namespace pdsim
