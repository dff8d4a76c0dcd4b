#include "kernels/ragged_batch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "sim/core/error.hpp"
#include "sim/core/random.hpp"

namespace pdsim::kernels {
namespace {

constexpr std::int32_t kNoPage = 1 << 24;  // so far away that reading there cannot go well

void check(const RaggedShape& shape) {
  if (shape.kv_heads < 1 || shape.heads < 1 || shape.heads % shape.kv_heads != 0) {
    throw InputError("heads",
                     fmt::format("{} with {} KV heads; expected a multiple", shape.heads, shape.kv_heads));
  }
  if (shape.page_tokens < 1 || !std::has_single_bit(static_cast<std::uint32_t>(shape.page_tokens))) {
    throw InputError("page_tokens", fmt::format("{}; expected a power of two", shape.page_tokens));
  }
  for (const auto& request : shape.requests) {
    if (request.fresh < 0 || request.length < request.fresh) {
      throw InputError("requests", fmt::format("{} new tokens of {}; expected 0 to all of them",
                                               request.fresh, request.length));
    }
  }
}

template <class Element>
Element element(double x) {
  if constexpr (std::is_same_v<Element, fp8>) {
    return to_fp8(static_cast<float>(x));
  } else {
    return to_bf16(static_cast<float>(x));
  }
}

template <class Element>
constexpr Element kNan{static_cast<decltype(Element::bits)>(std::is_same_v<Element, fp8> ? 0x7f : 0x7fff)};

}  // namespace

template <class Element>
PagedKv<Element> RaggedBatch<Element>::kv() const {
  PagedKv<Element> kv;
  kv.k = k.data();
  kv.v = v.data();
  kv.pages = pages.data();
  kv.lengths = lengths.data();
  kv.max_pages = max_pages;
  kv.page_shift = std::countr_zero(static_cast<std::uint32_t>(shape.page_tokens));
  kv.kv_heads = shape.kv_heads;
  kv.head_dim = shape.head_dim;
  kv.k_scale = k_scale;
  kv.v_scale = v_scale;
  return kv;
}

template <class Element>
RaggedBatch<Element> random_batch(const RaggedShape& shape, std::uint64_t seed) {
  check(shape);
  Random random(seed, Purpose::kernel_inputs);
  RaggedBatch<Element> batch;
  batch.shape = shape;
  batch.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  if (std::is_same_v<Element, fp8>) batch.k_scale = 0.5f, batch.v_scale = 0.125f;

  const auto pages_of = [&](std::int32_t tokens) {
    return (tokens + shape.page_tokens - 1) / shape.page_tokens;
  };
  std::int32_t used = 0;
  batch.q_start = {0};
  for (const auto& request : shape.requests) {
    batch.q_start.push_back(batch.q_start.back() + request.fresh);
    batch.lengths.push_back(request.length);
    batch.max_pages = std::max(batch.max_pages, pages_of(request.length));
    used += pages_of(request.length);
  }
  ++batch.max_pages;  // no request fills its row of the table

  std::vector<std::int32_t> free(static_cast<std::size_t>(used + used / 2 + 1));
  std::iota(free.begin(), free.end(), 0);
  for (std::size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[random.below(i)]);

  const std::size_t row = static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.head_dim);
  batch.k.assign(free.size() * static_cast<std::size_t>(shape.page_tokens) * row, kNan<Element>);
  batch.v = batch.k;
  batch.pages.assign(shape.requests.size() * static_cast<std::size_t>(batch.max_pages), kNoPage);
  for (std::size_t r = 0; r < shape.requests.size(); ++r) {
    for (std::int32_t i = 0; i < pages_of(shape.requests[r].length); ++i) {
      batch.pages[r * static_cast<std::size_t>(batch.max_pages) + static_cast<std::size_t>(i)] = free.back();
      free.pop_back();
    }
  }

  const PagedKv<Element> kv = batch.kv();
  for (std::size_t r = 0; r < shape.requests.size(); ++r) {
    for (std::int32_t i = 0; i < shape.requests[r].length; ++i) {
      const auto at = static_cast<std::size_t>(kv.row(kv.slot(static_cast<std::int32_t>(r), i), 0));
      for (std::size_t j = at; j < at + row; ++j) {
        batch.k[j] = element<Element>(random.normal() / double{batch.k_scale});
        batch.v[j] = element<Element>(random.normal() / double{batch.v_scale});
      }
    }
  }
  batch.q.resize(static_cast<std::size_t>(batch.q_start.back()) * static_cast<std::size_t>(shape.heads) *
                 static_cast<std::size_t>(shape.head_dim));
  for (bf16& x : batch.q) x = element<bf16>(2 * random.normal());
  return batch;
}

template struct RaggedBatch<bf16>;
template struct RaggedBatch<fp8>;
template RaggedBatch<bf16> random_batch(const RaggedShape&, std::uint64_t);
template RaggedBatch<fp8> random_batch(const RaggedShape&, std::uint64_t);

}  // namespace pdsim::kernels
