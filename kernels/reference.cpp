#include "kernels/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pdsim::kernels {

template <class Element>
std::vector<double> reference_attention(const PagedKv<Element>& kv, std::span<const bf16> q,
                                        std::span<const std::int32_t> q_start, std::int32_t heads,
                                        double scale) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  const std::int32_t group = heads / kv.kv_heads;
  std::vector<double> result(q.size());
  std::vector<double> weights;

  for (std::size_t request = 0; request + 1 < q_start.size(); ++request) {
    const std::int32_t first = q_start[request], fresh = q_start[request + 1] - first;
    const std::int32_t cached = kv.lengths[request] - fresh;
    for (std::int32_t i = 0; i < fresh; ++i) {
      for (std::int32_t head = 0; head < heads; ++head) {
        const std::size_t at = (static_cast<std::size_t>(first + i) * static_cast<std::size_t>(heads) +
                                static_cast<std::size_t>(head)) *
                               dim;
        const auto row = [&](const Element* pool, std::int32_t position) {
          return pool + kv.row(kv.slot(static_cast<std::int32_t>(request), position), head / group);
        };

        weights.clear();
        for (std::int32_t j = 0; j <= cached + i; ++j) {
          const Element* k = row(kv.k, j);
          double dot = 0;
          for (std::size_t d = 0; d < dim; ++d) dot += double{to_float(q[at + d])} * double{to_float(k[d])};
          weights.push_back(dot * scale * double{kv.k_scale});
        }
        if (weights.empty()) continue;
        const double largest = *std::max_element(weights.begin(), weights.end());
        double total = 0;
        for (double& w : weights) total += w = std::exp(w - largest);

        for (std::int32_t j = 0; j <= cached + i; ++j) {
          const Element* v = row(kv.v, j);
          const double share = weights[static_cast<std::size_t>(j)] / total * double{kv.v_scale};
          for (std::size_t d = 0; d < dim; ++d) result[at + d] += share * double{to_float(v[d])};
        }
      }
    }
  }
  return result;
}

template std::vector<double> reference_attention(const PagedKv<bf16>&, std::span<const bf16>,
                                                 std::span<const std::int32_t>, std::int32_t, double);
template std::vector<double> reference_attention(const PagedKv<fp8>&, std::span<const bf16>,
                                                 std::span<const std::int32_t>, std::int32_t, double);

double largest_error(std::span<const bf16> result, std::span<const double> reference) {
  double squares = 0;
  for (const double x : reference) squares += x * x;
  const double typical = std::sqrt(squares / static_cast<double>(std::max<std::size_t>(1, reference.size())));
  double worst = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double error =
        std::fabs(double{to_float(result[i])} - reference[i]) / (std::fabs(reference[i]) + typical);
    if (!(error <= worst)) worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  return worst;
}

}  // namespace pdsim::kernels
