// Profiles: what is written reads back the same, what is wrong is an error that says where, and an
// operator whose curve was not measured gets the nearest one, flagged.
#include "models/profile.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

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
  curve.windowed = true;
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
  EXPECT_TRUE(read.curves[0].windowed);
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
    EXPECT_NE(text.find("h100, h200"), std::string::npos) << text;
    EXPECT_NE(text.find("did you mean"), std::string::npos) << text;
  }
}

TEST(FindCurve, TakesTheNearestThatWasMeasured) {
  Profile profile;
  profile.name = "x";
  const auto add = [&](CurveOp op, Dtype dtype, std::int32_t head_dim, bool windowed, std::int32_t gpus) {
    Curve curve;
    curve.op = op;
    curve.dtype = dtype;
    curve.head_dim = head_dim;
    curve.windowed = windowed;
    curve.gpus = gpus;
    curve.regimes.resize(1);
    profile.curves.push_back(curve);
  };
  add(CurveOp::gemm, Dtype::bf16, 0, false, 0);
  add(CurveOp::gemm, Dtype::fp8, 0, false, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 64, false, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 128, false, 0);
  add(CurveOp::attention_decode, Dtype::bf16, 128, true, 0);
  add(CurveOp::allreduce, Dtype::bf16, 0, false, 2);
  add(CurveOp::allreduce, Dtype::bf16, 0, false, 8);
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
  EXPECT_EQ(index(find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 128, true)), 4);
  choice = find_curve(profile, CurveOp::attention_decode, Dtype::bf16, "", 64, true);
  EXPECT_EQ(index(choice), 2);
  EXPECT_TRUE(choice.stand_in);
  EXPECT_EQ(index(find_curve(profile, CurveOp::allreduce, Dtype::bf16, "", 0, false, 6)), 6);
  EXPECT_THROW(find_curve(profile, CurveOp::moe, Dtype::bf16, "model 'm'"), InputError);
}

}  // namespace
}  // namespace pdsim
