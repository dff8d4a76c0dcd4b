#include "kernels/mla_reference.hpp"

#include <algorithm>
#include <numeric>

#include "kernels/reference.hpp"

namespace pdsim::kernels {

std::vector<double> reference_mla(const PagedKv<bf16>& latent, std::span<const bf16> q, std::int32_t heads,
                                  double scale) {
  constexpr std::size_t kRow = kMlaRow, kLatent = kMlaLatent;
  PagedKv<bf16> kv = latent;
  kv.v = kv.k;
  const std::size_t rows = q.size() / kRow;
  std::vector<std::int32_t> q_start(rows / static_cast<std::size_t>(heads) + 1);
  std::iota(q_start.begin(), q_start.end(), 0);
  const std::vector<double> wide = reference_attention(kv, q, q_start, heads, scale);
  std::vector<double> result(rows * kLatent);
  for (std::size_t row = 0; row < rows; ++row)
    std::copy_n(&wide[row * kRow], kLatent, &result[row * kLatent]);
  return result;
}

}  // namespace pdsim::kernels
