// Profiles: what is written reads back the same, what is wrong is an error that says where, and an
// operator whose curve was not measured gets the nearest one, flagged.
#include "models/profile.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "models/datasheet.hpp"
#include "models/hardware.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

class File {
 public:
  explicit File(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("pdsim_profile_{}.json",
                          testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string error_of(const std::string& text) {
  const File file(text);
  try {
    load_profile(file.path());
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string with_curve(const std::string& curve) {
  return fmt::format(
      R"({{"schema": "pdsim.profile/1", "name": "x", "gpu": "h200", "sms": 132, "curves": [{}]}})", curve);
}

TEST(Profile, RoundTrip) {
  Curve curve;
  curve.op = CurveOp::attention_decode;
  curve.dtype = Dtype::fp8;
  curve.head_dim = 128;
  curve.window = 128;
  curve.kernel = "some \"kernel\"";
  curve.rows = 1234;
  curve.range = {{"context", {1, 131072}}, {"heads", {1, 96}}};
  curve.error = {200, 0.04125, 0.125, -0.0075};
  Coefficients small;
  small.upto = 64;
  small.launch_ns = 4250;
  small.flops_per_ns = 1.5e6;
  small.bytes_per_ns = 4096;
  small.overlap = 0;
  small.element_ns = 0.0015;
  small.host_ns = 6e4;
  small.ragged = 1.25;
  small.tile_m = 64;
  small.tile_n = 128;
  small.cluster = 2;
  Coefficients large;
  large.bytes_per_ns = 3500;
  large.wave_ns = 3500;
  large.walk_ns = 12.5;
  large.walk_waves = 15;
  large.split_ns = 2000;
  curve.regimes = {small, large};
  Profile profile;
  profile.name = "test";
  profile.gpu = "h200";
  profile.device = "NVIDIA H200";
  profile.software = "vLLM 0.24.0";
  profile.date = "2026-11";
  profile.source = "here";
  profile.license = "Apache-2.0";
  profile.sms = 132;
  profile.curves = {curve};
  const File file(to_json(profile));
  const Profile read = load_profile(file.path());
  EXPECT_EQ(to_json(read), to_json(profile));
  ASSERT_EQ(read.curves.size(), 1u);
  EXPECT_EQ(read.curves[0].op, CurveOp::attention_decode);
  EXPECT_EQ(read.curves[0].dtype, Dtype::fp8);
  EXPECT_EQ(read.curves[0].window, 128);
  EXPECT_EQ(read.curves[0].range.at("context").most, 131072);
  EXPECT_EQ(read.curves[0].regimes[0].overlap, 0);
  EXPECT_EQ(read.curves[0].regimes[0].cluster, 2);
  EXPECT_EQ(read.curves[0].regimes[1].overlap, 1);
  EXPECT_EQ(&read.curves[0].at(64), &read.curves[0].regimes[0]);
  EXPECT_EQ(&read.curves[0].at(65), &read.curves[0].regimes[1]);
}

TEST(Profile, ShippedOnesAreWhole) {
  const std::vector<std::string> names = profile_names();
  for (const std::string wanted : {"h100", "h200"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), wanted), names.end());
    const Profile profile = load_profile(wanted);
    EXPECT_EQ(profile.gpu, wanted);
    EXPECT_FALSE(profile.source.empty());
    EXPECT_EQ(profile.license, "Apache-2.0");
    for (const Dtype dtype : {Dtype::bf16, Dtype::fp8, Dtype::fp8_block}) {
      EXPECT_FALSE(find_curve(profile, CurveOp::gemm, dtype, "").stand_in);
    }
    for (const Curve& curve : profile.curves) {
      EXPECT_GT(curve.rows, 0);
      EXPECT_LT(curve.error.median_ape, 0.30)
          << name(curve.op) << ' ' << name(curve.dtype) << ' ' << curve.head_dim;
      for (const Coefficients& regime : curve.regimes) EXPECT_GT(regime.bytes_per_ns, 0);
    }
  }
}

TEST(Profile, ErrorsSayWhere) {
  EXPECT_NE(error_of("{}").find("schema"), std::string::npos);
  EXPECT_NE(error_of(R"({"schema": "pdsim.profile/9"})").find("expected 'pdsim.profile/1'"),
            std::string::npos);
  EXPECT_NE(error_of(with_curve(R"({"op": "gem", "dtype": "bf16", "regimes": [{"gb_per_s": 1}]})"))
                .find("/curves/0/op"),
            std::string::npos);
  EXPECT_NE(
      error_of(with_curve(R"({"op": "gemm", "dtype": "bf16", "regims": []})")).find("did you mean 'regimes'"),
      std::string::npos);
  EXPECT_NE(error_of(with_curve(R"({"op": "gemm", "dtype": "bf16", "regimes": []})")).find("at least one"),
            std::string::npos);
  const std::string above = error_of(
      with_curve(R"({"op": "gemm", "dtype": "bf16", "regimes": [{"gb_per_s": 1, "overlap": 1.5}]})"));
  EXPECT_NE(above.find("/curves/0/regimes/0/overlap"), std::string::npos) << above;
  const std::string order = error_of(with_curve(
      R"({"op": "gemm", "dtype": "bf16", "regimes": [{"gb_per_s": 1, "upto": 9}, {"gb_per_s": 1, "upto": 9}, {"gb_per_s": 1}]})"));
  EXPECT_NE(order.find("/curves/0/regimes/1/upto"), std::string::npos) << order;
  EXPECT_NE(
      error_of(with_curve(R"({"op": "gemm", "dtype": "bf16", "regimes": [{"gb_per_s": 1, "upto": 9}]})"))
          .find("none on the last"),
      std::string::npos);
}

TEST(Profile, UnknownNameListsThem) {
  try {
    load_profile("h300", "--gpu");
    FAIL();
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind("--gpu: ", 0), 0u);
    EXPECT_NE(text.find("h100, h20, h200"), std::string::npos) << text;
    EXPECT_NE(text.find("did you mean"), std::string::npos) << text;
  }
}

// A data-sheet profile is another's with each term scaled by the figure that limits it: of a GPU with twice
// the bandwidth and all else equal the memory term halves, exactly, and the launch stays.
TEST(Datasheet, EachTermGoesByItsFigure) {
  Gpu from;
  from.name = "from";
  from.hbm_bytes_per_ns = 1000;
  from.bf16_tflops = 100;
  from.fp8_tflops = 200;
  from.nvlink_bytes_per_ns = 400;
  from.pcie_bytes_per_ns = 64;
  from.sm_count = 100;
  Profile base;
  base.name = base.gpu = "from";
  base.sms = 100;
  Coefficients c;
  c.launch_ns = 3000;
  c.flops_per_ns = 8e4;
  c.bytes_per_ns = 800;
  c.cache_bytes_per_ns = 5000;
  c.element_ns = 0.5;
  c.walk_ns = 12;
  c.wave_ns = 900;
  for (const CurveOp op : {CurveOp::gemm, CurveOp::allreduce}) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::fp8}) {
      Curve curve;
      curve.op = op;
      curve.dtype = dtype;
      curve.gpus = op == CurveOp::allreduce ? 8 : 0;
      curve.rows = 100;
      curve.regimes = {c};
      base.curves.push_back(curve);
    }
  }
  Gpu to = from;
  to.name = "to";
  to.hbm_bytes_per_ns = 2000;
  const Profile wide = scale_profile(base, from, to);
  EXPECT_TRUE(wide.datasheet);
  EXPECT_EQ(wide.gpu, "to");
  EXPECT_EQ(wide.label(), "to (datasheet)");
  const KernelTime before = stream_time(base.curves[0].regimes[0], 1e6);
  const KernelTime after = stream_time(wide.curves[0].regimes[0], 1e6);
  EXPECT_EQ(after.memory, before.memory / 2);
  EXPECT_EQ(after.launch, before.launch);
  EXPECT_EQ(wide.curves[0].regimes[0].flops_per_ns, c.flops_per_ns);
  EXPECT_EQ(wide.curves[0].regimes[0].walk_ns, c.walk_ns);
  EXPECT_EQ(wide.curves[2].regimes[0].bytes_per_ns, c.bytes_per_ns);  // NVLink is as it was

  to = from;
  to.bf16_tflops = 50;
  to.fp8_tflops = 800;
  to.sm_count = 50;
  to.nvlink_bytes_per_ns = 0;
  const Profile other = scale_profile(base, from, to);
  EXPECT_EQ(other.sms, 50);
  EXPECT_EQ(other.curves[0].regimes[0].flops_per_ns, c.flops_per_ns / 2);
  EXPECT_EQ(other.curves[1].regimes[0].flops_per_ns, c.flops_per_ns * 4);
  EXPECT_EQ(other.curves[0].regimes[0].bytes_per_ns, c.bytes_per_ns);
  EXPECT_EQ(other.curves[0].regimes[0].element_ns, c.element_ns * 2);
  EXPECT_EQ(other.curves[0].regimes[0].cache_bytes_per_ns, c.cache_bytes_per_ns / 2);
  EXPECT_DOUBLE_EQ(other.curves[2].regimes[0].bytes_per_ns, c.bytes_per_ns * 64 / 400);
  // Nothing of it was measured: every choice is a stand-in.
  EXPECT_TRUE(find_curve(other, CurveOp::gemm, Dtype::bf16, "").stand_in);
  EXPECT_FALSE(find_curve(base, CurveOp::gemm, Dtype::bf16, "").stand_in);
}

TEST(Datasheet, ShippedOnesNameAMeasuredProfileAndTheirError) {
  for (const char* name : {"b300", "gb200", "gb300", "h20", "l4", "mi300x"}) {
    const Profile profile = load_profile(name);
    EXPECT_TRUE(profile.datasheet) << name;
    EXPECT_EQ(profile.gpu, name);
    EXPECT_FALSE(load_profile(profile.scaled_from).datasheet) << name;
    for (const Curve& curve : profile.curves) {
      if (curve.op != CurveOp::gemm) continue;
      EXPECT_GT(curve.error.median_ape, load_profile(profile.scaled_from).curves[0].error.median_ape) << name;
    }
  }
  EXPECT_NE(load_profile("h20").sha256, load_profile("h200").sha256);
}

TEST(Datasheet, ErrorsSayWhere) {
  const auto scaled = [](const std::string& from, const std::string& more = "") {
    return error_of(fmt::format(
        R"({{"schema": "pdsim.profile/1", "name": "x", "gpu": "h20", "scaled_from": "{}"{}}})", from, more));
  };
  EXPECT_NE(scaled("h20").find("expected a measured profile; this is a data-sheet one"), std::string::npos);
  EXPECT_NE(scaled("h2000").find("/scaled_from: no kernel profile 'h2000'"), std::string::npos);
  EXPECT_NE(scaled("h200", R"(, "curves": [])").find("/curves: is not known here"), std::string::npos);
  const std::string op =
      scaled("h200", R"(, "stated_error": {"measured_between": "a as b", "gem": {"rows": 1}})");
  EXPECT_NE(op.find("/stated_error/gem: is no operation (did you mean 'gemm'?)"), std::string::npos) << op;
  EXPECT_EQ(scaled("h200"), "no error");
}

TEST(FindCurve, TakesTheNearestThatWasMeasured) {
  Profile profile;
  profile.name = "x";
  const auto add = [&](CurveOp op, Dtype dtype, std::int32_t head_dim, std::int32_t window,
                       std::int32_t gpus) {
    Curve curve;
    curve.op = op;
    curve.dtype = dtype;
    curve.head_dim = head_dim;
    curve.window = window;
    curve.gpus = gpus;
    curve.regimes.resize(1);
    profile.curves.push_back(curve);
  };
  add(CurveOp::gemm, Dtype::bf16, 0, 0, 0);
  add(CurveOp::gemm, Dtype::fp8, 0, 0, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 64, 0, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 128, 0, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 128, 128, 0);
  add(CurveOp::allreduce, Dtype::bf16, 0, 0, 2);
  add(CurveOp::allreduce, Dtype::bf16, 0, 0, 8);
  const auto index = [&](const CurveChoice& choice) { return choice.curve - profile.curves.data(); };

  CurveChoice choice = find_curve(profile, CurveOp::gemm, Dtype::fp16, "");
  EXPECT_EQ(index(choice), 0);
  EXPECT_FALSE(choice.stand_in);  // the same kernels
  choice = find_curve(profile, CurveOp::gemm, Dtype::fp8_block, "");
  EXPECT_EQ(index(choice), 1);
  EXPECT_TRUE(choice.stand_in);
  EXPECT_EQ(index(find_curve(profile, CurveOp::gemm, Dtype::int4, "")), 0);
  EXPECT_FALSE(find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 128).stand_in);
  EXPECT_EQ(index(find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 96)), 3);
  EXPECT_EQ(index(find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 128, 128)), 4);
  choice = find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 64, 128);
  EXPECT_EQ(index(choice), 2);
  EXPECT_TRUE(choice.stand_in);
  EXPECT_EQ(index(find_curve(profile, CurveOp::allreduce, Dtype::bf16, "", 0, 0, 6)), 6);
  EXPECT_THROW(find_curve(profile, CurveOp::moe, Dtype::bf16, "model 'm'"), InputError);
}

}  // namespace
}  // namespace pdsim
