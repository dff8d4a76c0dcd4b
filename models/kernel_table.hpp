// Measured kernel times as rows: what `pdsim fit` fits and `pdsim validate kernels` checks.
//
// A table is a CSV file, gzipped or not, in one of two forms, told by its columns and never by its name:
//   - those of ai-dynamo/aiconfigurator's silicon data (one row a shape, `latency` in ms), of which
//     message_size counts elements, not bytes, and older ones lack window_size;
//   - pdsim's own: `op,dtype,kernel,latency_us` and the axes of shape_axes(), blank where an op has none;
//     optional `device`, `software`, and columns of `pdsim calibrate` that say how a time was measured.
//
// Invariants: every line of every table is a row, a copy or counted in `set_aside` with its reason; a column
// that is not read is named in `not_read`, or is an error.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/copy.hpp"
#include "models/curve.hpp"
#include "models/dtype.hpp"
#include "models/gemm.hpp"
#include "models/moe.hpp"
#include "models/profile.hpp"

namespace pdsim {

struct Gpu;

/// The numbers of an operation's shape, in the order of KernelRow::shape and by the names that
/// `pdsim cost` gives them:
///   gemm                         m n k
///   attention-prefill            tokens prefix requests heads kv_heads head_dim window
///   attention-decode             batch context heads kv_heads head_dim window
///   mla-prefill, dsa-prefill     tokens prefix requests heads
///   mla-decode, dsa-decode       batch context heads      (mla-attention-decode: the attention alone)
///   moe                          tokens hidden intermediate experts topk tp ep routing
///   allreduce, allgather, ...    bytes gpus
/// tokens are of one request; context counts the new token; window 0 is none; intermediate is uncut;
/// routing is the exponent of the power law by which experts are chosen, 0 when balanced (written
/// `balanced` or `power_law_A` in tables).
std::span<const std::string_view> shape_axes(CurveOp op);
inline constexpr std::size_t kShapeAxes = 8;

struct KernelRow {
  CurveOp op = CurveOp::gemm;
  Dtype dtype = Dtype::bf16;    ///< of weights (gemm, moe), KV cache (attention), message (collectives)
  Dtype compute = Dtype::bf16;  ///< attention: of its matrix products (attn_dtype, mla_dtype)
  Dtype weights = Dtype::bf16;  ///< latent attention modules: of their projections (gemm_type)
  std::uint16_t kernel = 0, model = 0, file = 0;  ///< indices in the table's names; model: latent modules
  std::uint32_t line = 0;
  bool bare = false;  ///< mla-attention-decode: the attention alone, without what a module has beside it
  double ns = 0;
  std::array<double, kShapeAxes> shape{};

  /// One axis by its name. Requires that shape_axes(op) holds it.
  double at(std::string_view axis) const;
};

/// A row of op kv-copy: axes run_bytes, runs and sms (0 or blank: a copy engine).
struct CopyRow {
  std::uint16_t kind = 0, file = 0;  ///< indices in the table's kernels and files
  std::uint32_t line = 0;
  double ns = 0;
  CopyShape shape;
};

struct KernelTable {
  std::vector<KernelRow> rows;
  std::vector<CopyRow> copies;
  std::vector<std::string> kernels, models, files;
  std::vector<std::string> not_read;              ///< columns that say how, and not how long
  std::map<std::string, std::int64_t> set_aside;  ///< reason -> lines
  std::string device, software;                   ///< as the tables say; "" where they do not

  std::string place(const KernelRow& row) const;  ///< file:line
};

/// Reads files, and every .csv and .csv.gz of folders (those of another form are set aside there). An
/// InputError: a file that cannot be read or is no such table, a column that is missing, a number that
/// is none (with its line), tables of different devices, or nothing to read.
KernelTable read_kernel_tables(std::span<const std::filesystem::path> tables);

/// "m=1 n=1024 k=1024", for people.
std::string describe_shape(const KernelRow& row);

/// One row, or copy, for each key that was measured more than once, with the median time; order is kept.
void merge_repeats(KernelTable& table);

/// Flops that the row computes at least, over what the GPU's tensor cores could at its format's peak in
/// the measured time; 0 where it is no bound (collectives, latent modules).
double mfu(const KernelRow& row, const Gpu& gpu);

/// InputError that names the first rows whose MFU is above 1, and counts them.
void refuse_impossible(const KernelTable& table, const Gpu& gpu);

GemmShape gemm_shape(const KernelRow& row);
MoeShape moe_shape(const KernelRow& row);

}  // namespace pdsim
