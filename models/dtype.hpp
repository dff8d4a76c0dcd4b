// Number formats of weights, activations and KV cache, and what an element of each costs in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pdsim {

/// fp8 has one scale a tensor or channel; fp8_block one a 128 x 128 block (DeepSeek-V3's format).
enum class Dtype : std::uint8_t { bf16, fp16, fp32, fp8, fp8_block, nvfp4, mxfp4, int4, int8 };

/// Elements that share one scale of an int4 checkpoint, where it does not say: AWQ's and GPTQ's default.
inline constexpr std::int32_t kInt4Group = 128;

/// Bytes of one element, its share of the scales included:
///   fp8_block  1 + 4 / 128^2      fp32 scale a 128 x 128 block
///   nvfp4      1/2 + 1 / 16       E4M3 scale every 16 elements
///   mxfp4      1/2 + 1 / 32       E8M0 scale every 32 elements (OCP MX v1.0)
///   int4       1/2 + 2 / group    16-bit scale every `int4_group` elements
/// Scales of fp8 and int8 are a vector at most and count as nothing.
double bytes_per_element(Dtype dtype, std::int32_t int4_group = kInt4Group);

/// "bf16", "fp8_block", ...; also the checkpoint spellings "bfloat16", "float16", "half", "float32",
/// "float8_e4m3fn" and vLLM's "fp8_e4m3".
std::optional<Dtype> parse_dtype(std::string_view text);
std::string_view name(Dtype dtype);

/// As parse_dtype; a name that is none is an InputError at `place` that lists the known ones.
Dtype dtype_of(std::string_view text, std::string_view place);

}  // namespace pdsim
