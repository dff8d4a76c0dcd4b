// Absorbed MLA as it is defined, in float64: ordinary attention of all heads to one row a token, whose first
// columns are the value.
#pragma once

#include <span>
#include <vector>

#include "kernels/mla_decode.hpp"

namespace pdsim::kernels {

/// o = sum over j of softmax_j(scale q . row_j) row_j[:512], [request][head][512], of one query token a
/// request. Memory must be the host's. O(requests x heads x length x 576).
std::vector<double> reference_mla(const PagedKv<bf16>& latent, std::span<const bf16> q, std::int32_t heads,
                                  double scale);

}  // namespace pdsim::kernels
