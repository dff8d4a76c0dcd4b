// Fewer shapes: of a table that a formula with few coefficients makes, few shapes are enough, and more are
// asked for where less may be lost. The shipped list for quick calibrations holds on tables of real kernels:
//
//   median error of the fit to the list, over all rows <= that of the fit to all rows + 2 percentage points
#include "models/fit/fewest.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "models/csv.hpp"
#include "models/data.hpp"

namespace pdsim {
namespace {

using Shape = std::array<double, kShapeAxes>;

/// t = 4 us + max(flops / 300 TFLOP/s, bytes / 2000 GB/s), and 15 % more at every other k.
KernelTable table_of(std::string_view device, double factor) {
  KernelTable table;
  table.device = device;
  table.files = {"made"};
  table.kernels = {"k"};
  for (double m = 1; m <= 8192; m *= 4) {
    for (double n = 1024; n <= 16384; n *= 2) {
      for (double k = 1024; k <= 16384; k *= 2) {
        KernelRow row;
        row.shape = {m, n, k};
        row.ns = factor * (4000 + std::max(2 * m * n * k / 3e5, 2 * (n * k + m * k + m * n) / 2000));
        if (std::fmod(std::log2(k), 2) == 0) row.ns *= 1.15;
        table.rows.push_back(row);
      }
    }
  }
  return table;
}

TEST(Fewest, AFormulaNeedsFewShapes) {
  const KernelTable tables[] = {table_of("NVIDIA H100 80GB HBM3", 1), table_of("NVIDIA H200", 1.1)};
  FewestOptions options;
  options.within = 0.05;
  options.most = 40;
  const Fewest rough = fewest_shapes(tables, options);
  ASSERT_EQ(rough.losses.size(), 2u);
  EXPECT_EQ(rough.losses[1].gpu, "h200");
  EXPECT_EQ(rough.losses[0].rows, tables[0].rows.size());
  EXPECT_EQ(rough.losses[0].shapes, rough.shapes.size());
  for (const FewestLoss& loss : rough.losses) {
    EXPECT_LE(loss.quick.median_ape, loss.full.median_ape + 0.05 + 1e-9);
  }
  EXPECT_LE(rough.shapes.size(), 30u);
  EXPECT_EQ(fewest_shapes(tables, options).shapes, rough.shapes);  // deterministic
  // No shape twice, and all of them in the tables.
  std::vector<Shape> sorted = rough.shapes;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
  // Losing less takes more: the list goes on from the same start.
  options.within = -1;
  options.most = rough.shapes.size() + 3;
  const Fewest longer = fewest_shapes(tables, options);
  EXPECT_EQ(longer.shapes.size(), options.most);
  EXPECT_TRUE(std::equal(rough.shapes.begin(), rough.shapes.end(), longer.shapes.begin()));
  options.start = rough.shapes;
  EXPECT_TRUE(
      std::equal(rough.shapes.begin(), rough.shapes.end(), fewest_shapes(tables, options).shapes.begin()));
}

TEST(Fewest, ShapesThatNotAllHoldAreNone) {
  KernelTable tables[] = {table_of("NVIDIA H100 80GB HBM3", 1), table_of("NVIDIA H200", 1)};
  std::erase_if(tables[1].rows, [](const KernelRow& row) { return row.at("k") > 4096; });
  FewestOptions options;
  options.most = 20;
  for (const Shape& shape : fewest_shapes(tables, options).shapes) EXPECT_LE(shape[2], 4096);
}

/// The shipped list of a curve, in the order of shape_axes.
std::vector<Shape> shipped(CurveOp op) {
  const Csv in(data_dir() / "models" / "quick-shapes.csv");
  std::vector<Shape> shapes;
  for (std::size_t i = 0; i < in.rows(); ++i) {
    if (in.text(i, in.column("op")) != name(op)) continue;
    Shape shape{};
    std::size_t axis = 0;
    for (const std::string_view column : shape_axes(op)) shape[axis++] = in.number(i, in.column(column), 0);
    shapes.push_back(shape);
  }
  return shapes;
}

TEST(Fewest, TheShippedListHoldsOnRealTables) {
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "takes minutes without optimisation or with sanitizers; the tests above cover the code";
#endif
  const std::filesystem::path calibration = PDSIM_SOURCE_DIR "/../shared/calibration";
  if (!std::filesystem::exists(calibration)) GTEST_SKIP() << calibration << " is not here";
  struct Case {
    std::string_view folder, file;
    CurveOp op;
  };
  const Case cases[] = {{"h100_sxm", "gemm.csv.gz", CurveOp::gemm},
                        {"h200_sxm", "gemm.csv.gz", CurveOp::gemm},
                        {"h100_sxm", "context_attention.csv.gz", CurveOp::attention_prefill},
                        {"a100_sxm", "context_attention.csv.gz", CurveOp::attention_prefill},
                        {"l40s", "context_attention.csv.gz", CurveOp::attention_prefill},
                        {"b200_sxm", "context_attention.csv.gz", CurveOp::attention_prefill},
                        {"h100_sxm", "generation_attention.csv.gz", CurveOp::attention_decode},
                        {"h200_sxm", "generation_attention.csv.gz", CurveOp::attention_decode},
                        {"b200_sxm", "generation_attention.csv.gz", CurveOp::attention_decode}};
  for (const Case& each : cases) {
    const std::filesystem::path paths[] = {calibration / each.folder / each.file};
    KernelTable table = read_kernel_tables(paths);
    std::erase_if(table.rows, [&](const KernelRow& row) {
      return row.op != each.op || row.dtype != Dtype::bf16 || !serving_shape(row) ||
             (row.op != CurveOp::gemm && row.at("head_dim") != 128);
    });
    merge_repeats(table);
    const std::vector<Shape> shapes = shipped(each.op);
    const FewestLoss loss = fewest_loss(table, shapes);
    EXPECT_EQ(loss.shapes, shapes.size()) << each.folder << ' ' << name(each.op);
    EXPECT_LE(loss.quick.median_ape, loss.full.median_ape + 0.02) << each.folder << ' ' << name(each.op);
    EXPECT_LT(loss.shapes * 10, loss.rows) << each.folder << ' ' << name(each.op);
  }
}

}  // namespace
}  // namespace pdsim
