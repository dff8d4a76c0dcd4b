#include "kernels/copy_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "kernels/noise.cuh"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

constexpr std::int64_t kHeadBytes = 256;  // 128 numbers of bf16
constexpr std::int32_t kHeads = 8, kPageTokens = 16, kReshardHeads = 2;

std::int32_t held(std::int32_t pages, bool in_order) {
  return in_order ? pages : 2 * pages;
}

}  // namespace

std::int64_t CopyShape::from_bytes() const {
  return held(pages, from_in_order) * std::int64_t{page_tokens} * heads * head_bytes;
}

std::int64_t CopyShape::to_bytes() const {
  return held(pages, to_in_order) * std::int64_t{page_tokens} * to_heads * head_bytes;
}

KvCopy CopyShape::copy(std::uint8_t* from, const std::int32_t* from_pages, std::uint8_t* to,
                       const std::int32_t* to_pages) const {
  const auto target = to_hnd ? hnd : nhd;
  return make_copy(nhd(from, from_in_order ? nullptr : from_pages, held(pages, from_in_order), page_tokens, 0,
                       heads, head_bytes),
                   target(to, to_in_order ? nullptr : to_pages, held(pages, to_in_order), page_tokens,
                          to_first_head, to_heads, head_bytes),
                   tokens, 1);
}

CopyShape copy_shape(Copy copy, std::int64_t run_bytes, std::int64_t runs) {
  if (run_bytes < 16 || !std::has_single_bit(static_cast<std::uint64_t>(run_bytes)))
    throw InputError("run_bytes", fmt::format("is {}; expected a power of two of 16 or more", run_bytes));
  CopyShape shape;
  std::int64_t tokens = runs;
  switch (copy) {
    case Copy::layout:
      shape = {.head_bytes = run_bytes,
               .page_tokens = kPageTokens,
               .heads = kHeads,
               .to_heads = kHeads,
               .to_hnd = true};
      tokens = runs / kHeads;
      break;
    case Copy::reshard:
      shape = {.head_bytes = run_bytes / kReshardHeads,
               .page_tokens = kPageTokens,
               .heads = kHeads,
               .to_first_head = kReshardHeads,
               .to_heads = kReshardHeads};
      break;
    default: {
      shape.head_bytes = std::min(run_bytes, kHeadBytes);
      shape.heads = shape.to_heads =
          static_cast<std::int32_t>(std::min<std::int64_t>(kHeads, run_bytes / shape.head_bytes));
      shape.page_tokens = static_cast<std::int32_t>(run_bytes / (shape.head_bytes * shape.heads));
      shape.from_in_order = copy == Copy::scatter;
      shape.to_in_order = copy == Copy::gather;
      tokens = runs * shape.page_tokens;
    }
  }
  shape.tokens = static_cast<std::int32_t>(tokens);
  shape.pages = shape.tokens / shape.page_tokens;
  if (shape.pages * std::int64_t{shape.page_tokens} != tokens || tokens == 0)
    throw InputError("runs", fmt::format("is {}; expected whole pages of {}", runs, name(copy)));
  return shape;
}

std::vector<std::int32_t> page_table(std::int32_t pages, std::int32_t held, std::uint64_t seed) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(held));
  std::iota(all.begin(), all.end(), 0);
  for (std::size_t i = all.size(); i > 1; --i) {  // Fisher and Yates
    const double share = 0.5 + 0.5 * double{noise(seed, i)};
    std::swap(all[i - 1], all[std::min(i - 1, static_cast<std::size_t>(share * static_cast<double>(i)))]);
  }
  all.resize(static_cast<std::size_t>(pages));
  return all;
}

}  // namespace pdsim::kernels
