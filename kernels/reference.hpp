// Attention as it is defined, in float64, for the tests and for the check that goes before every timing. It
// shares no code with the kernels but the layout of their input.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged_kv.cuh"

namespace pdsim::kernels {

/// Causal attention over a ragged batch: for head h, new token i of a request with n new tokens and length L,
///
///   o = sum over j <= L - n + i of softmax_j(scale q . k_j) v_j,   k, v of KV head h / (heads / KV heads).
///
/// q is [new token of all requests][head][head_dim]; request r has those from q_start[r] until q_start[r +
/// 1]; decode is n = 1. Returns the shape of q. Memory must be the host's. O(tokens x heads x length x
/// head_dim).
template <class Element>
std::vector<double> reference_attention(const PagedKv<Element>& kv, std::span<const bf16> q,
                                        std::span<const std::int32_t> q_start, std::int32_t heads,
                                        double scale);

extern template std::vector<double> reference_attention(const PagedKv<bf16>&, std::span<const bf16>,
                                                        std::span<const std::int32_t>, std::int32_t, double);
extern template std::vector<double> reference_attention(const PagedKv<fp8>&, std::span<const bf16>,
                                                        std::span<const std::int32_t>, std::int32_t, double);

/// How far a result is from the reference: the largest |result - reference| / (|reference| + root mean square
/// of the whole reference). A NaN counts as infinitely far.
double largest_error(std::span<const bf16> result, std::span<const double> reference);

}  // namespace pdsim::kernels
