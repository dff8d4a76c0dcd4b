#include "kernels/work.hpp"

#include <algorithm>

namespace pdsim::kernels {
namespace {

constexpr double kActivation = 2;  // bytes of an element of bf16

double element(Format format) {
  return format == Format::bf16 ? 2 : 1;
}

double number(const Point& point, std::string_view axis) {
  return static_cast<double>(point.at(axis));
}

Work gemm(const Point& p) {
  const double m = number(p, "m"), n = number(p, "n"), k = number(p, "k");
  return {2 * m * n * k, element(p.format) * (n * k + m * k) + kActivation * m * n, 0};
}

Work prefill(const Point& p) {
  const double tokens = number(p, "tokens"), prefix = number(p, "prefix"), requests = number(p, "requests");
  const double heads = number(p, "heads"), kv_heads = number(p, "kv_heads"), dim = number(p, "head_dim");
  const double pairs = requests * (tokens * prefix + tokens * (tokens + 1) / 2);
  const double queries = requests * tokens * heads * dim,
               cache = requests * (tokens + prefix) * kv_heads * dim;
  return {4 * dim * heads * pairs, 2 * kActivation * queries + 2 * element(p.format) * cache, 0};
}

Work decode(const Point& p) {
  const double tokens = number(p, "batch") * number(p, "context"), dim = number(p, "head_dim");
  return {4 * tokens * number(p, "heads") * dim, 2 * element(p.format) * tokens * number(p, "kv_heads") * dim,
          0};
}

Work mla_decode(const Point& p) {
  const double tokens = number(p, "batch") * number(p, "context");
  return {2 * (576 + 512) * tokens * number(p, "heads"), 1152 * tokens, 0};
}

Work moe(const Point& p) {
  const double hidden = number(p, "hidden"), width = number(p, "intermediate") / number(p, "tp");
  const double rows = number(p, "tokens") * number(p, "topk") / number(p, "ep");
  const double active = std::min(number(p, "experts") / number(p, "ep"), rows);
  return {6 * hidden * width * rows,
          3 * element(p.format) * hidden * width * active + kActivation * rows * (2 * hidden + 3 * width), 0};
}

Work copied(const Point& p) {
  const double bytes = number(p, "run_bytes") * number(p, "runs");
  if (on_multiprocessors(p.copy) || p.copy == Copy::batch_d2d) return {0, 2 * bytes, 0};
  return {0, 0, bytes};
}

}  // namespace

Work work(const Point& point) {
  switch (point.op) {
    case Op::gemm:
      return gemm(point);
    case Op::attention_prefill:
      return prefill(point);
    case Op::attention_decode:
      return decode(point);
    case Op::mla_decode:
      return mla_decode(point);
    case Op::moe:
      return moe(point);
    case Op::kv_copy:
    case Op::interference:
      return copied(point);
  }
  return {};
}

}  // namespace pdsim::kernels
