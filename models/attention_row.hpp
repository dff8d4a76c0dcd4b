// A measured row of an attention table as an operation of this program: which operator, which sums, and
// what its time holds beside the attention itself.
//
// Rows of {mla,dsa}_{context,generation}_module are whole attention layers. What a step lists beside the
// attention operator (the projections, by the gemm curves of their format, and two elementwise kernels) is
// taken off; what is left is that operator. A prompt of a single token without prefix runs the decode
// kernel (head attention and MLA): its row is a decode row of one key.
#pragma once

#include <optional>

#include "models/attention.hpp"
#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/model.hpp"
#include "models/profile.hpp"

namespace pdsim {

struct AttentionRow {
  CurveOp op = CurveOp::attention_prefill;  ///< whose curve times it
  Operator operation;
  AttentionShape shape;
  double length = 1;                    ///< new tokens of one request
  double context = 1;                   ///< keys of one request, its own included, a window's cut ones too
  std::int64_t hidden = 0, q_lora = 0;  ///< of latent modules: the projections' other sizes
};

/// Nothing for a latent module of a model that pdsim does not know.
std::optional<AttentionRow> attention_row(const KernelTable& table, const KernelRow& row);

/// The time of what the row's measurement holds beside its attention, ns; 0 for head attention and bare rows.
/// Requires a gemm curve where there are projections.
double beside_attention(const Profile& profile, const Gpu& gpu, const KernelRow& row,
                        const AttentionRow& attention);

/// What the launching host takes at least for a whole latent module, where tables were measured launch by
/// launch: more with quantised projections.
double module_floor(const Coefficients& fit, Dtype weights);

/// The curve that times this row: of its own kernel where that was fitted, of the operator otherwise.
/// InputError at `place` when there is none.
CurveChoice attention_curve(const Profile& profile, const AttentionRow& attention, Dtype kv,
                            std::string_view kernel, std::string_view place);

struct AttentionPrediction {
  KernelTime time;  ///< of the whole row, what is beside the attention included (in `launch`)
  CurveChoice choice;
  bool within = true;  ///< every axis in the curve's measured range
};

/// What the profile says of a measured row. InputError when it has no curve for it, or the row's model is
/// not known.
AttentionPrediction predict_attention(const Profile& profile, const Gpu& gpu, const KernelTable& table,
                                      const KernelRow& row);

}  // namespace pdsim
