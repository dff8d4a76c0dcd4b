// Hardware and prices: the shipped tables are complete and mean what their units say.
#include "models/hardware.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "models/data.hpp"
#include "models/dtype.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

std::string error_of(const auto& act) {
  try {
    act();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// bytes/ns = GB/s and operations/ns = 1000 x TFLOP/s.
TEST(Hardware, FiguresAreInTheUnitsOfTheSimulator) {
  const Gpu& h200 = find_gpu("h200", "test");
  EXPECT_EQ(h200.memory_bytes, 143771LL * 1024 * 1024);
  EXPECT_EQ(h200.hbm_bytes_per_ns, 4800);
  EXPECT_EQ(peak_ops_per_ns(h200, Dtype::bf16), 989e3);
  EXPECT_EQ(peak_ops_per_ns(h200, Dtype::fp8_block), 1979e3);
  EXPECT_EQ(find_gpu("h100", "test").memory_bytes, 81559LL * 1024 * 1024);
}

// A format that the GPU does not multiply is widened: fp8 on A100 and MXFP4 on Hopper run in 16 bits.
TEST(Hardware, FormatsWithoutHardwareRunInSixteenBits) {
  const Gpu& a100 = find_gpu("a100-40gb", "test");
  EXPECT_EQ(peak_ops_per_ns(a100, Dtype::fp8), peak_ops_per_ns(a100, Dtype::bf16));
  EXPECT_EQ(peak_ops_per_ns(find_gpu("h100", "test"), Dtype::mxfp4), 989e3);
  EXPECT_EQ(peak_ops_per_ns(find_gpu("b200", "test"), Dtype::nvfp4), 9000e3);
}

// EFA of one node (Mooncake efa_transport.md): p5 32 x 100 and p5en 16 x 200 Gbit/s are 400 GB/s each, 50 a
// GPU.
TEST(Hardware, NetworkCardsAddUpToTheNode) {
  for (const char* name : {"p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"}) {
    const Instance& instance = find_instance(name, "test");
    EXPECT_EQ(instance.nics * instance.nic_bytes_per_ns(), 400) << name;
    EXPECT_EQ(instance.nics_per_gpu() * instance.nic_bytes_per_ns(), 50) << name;
  }
  EXPECT_EQ(find_instance("p5en.48xlarge", "test").nics_per_gpu(), 2);
  EXPECT_EQ(find_instance("p5.48xlarge", "test").nics_per_gpu(), 4);
  EXPECT_EQ(find_instance("p4d.24xlarge", "test").nics_per_gpu(), 0.5);
}

TEST(Hardware, EveryFigureHasASource) {
  for (const std::string& name : gpu_names()) {
    EXPECT_FALSE(find_gpu(name, "test").source.empty()) << name;
  }
  for (const std::string& name : instance_names()) {
    const Instance& instance = find_instance(name, "test");
    EXPECT_EQ(find_gpu(instance.gpu, "test").name, instance.gpu);
    EXPECT_FALSE(instance.source.empty()) << name;
    for (const auto& [plan, price] : instance.prices) {
      EXPECT_GT(price.usd_per_hour, 0) << name << " " << plan;
      EXPECT_GE(price.as_of.size(), std::string("2026-01").size()) << name << " " << plan;
      EXPECT_FALSE(price.source.empty()) << name << " " << plan;
    }
  }
}

TEST(Prices, AreThePublishedOnesOrAnError) {
  const Instance& p5en = find_instance("p5en.48xlarge", "test");
  EXPECT_EQ(price(p5en, "on_demand", "test"), 63.296);
  EXPECT_EQ(price(p5en, "capacity_block", "test"), 41.61);
  EXPECT_EQ(find_price(p5en, "capacity_block", "test").as_of, "2026-01");
  EXPECT_EQ(price(find_instance("p5.48xlarge", "test"), "on_demand", "test"), 55.04);

  const std::string unknown =
      error_of([] { price(find_instance("p5e.48xlarge", "test"), "on_demand", "s.json: /pricing/plan"); });
  EXPECT_EQ(unknown,
            "s.json: /pricing/plan: 'on_demand': no published on_demand price of p5e.48xlarge is known (only "
            "capacity_block); give usd_per_hour instead");
  const std::string none =
      error_of([] { price(find_instance("g6e.48xlarge", "test"), "spot", "s.json: /pricing/plan"); });
  EXPECT_NE(none.find("nor any other"), std::string::npos);
  const std::string plan = error_of([&] { price(p5en, "ondemand", "s.json: /pricing/plan"); });
  EXPECT_NE(plan.find("'ondemand' is no plan (did you mean 'on_demand'?)"), std::string::npos);
}

TEST(Hardware, UnknownNamesListTheKnownOnes) {
  const std::string gpu = error_of([] { find_gpu("h201", "s.json: /pools/0/gpu"); });
  EXPECT_TRUE(gpu.starts_with("s.json: /pools/0/gpu: 'h201' is no GPU that pdsim knows")) << gpu;
  EXPECT_NE(gpu.find("h200"), std::string::npos);
  const std::string instance = error_of([] { find_instance("p5en.48xlrge", "s.json: /pools/0/instance"); });
  EXPECT_NE(instance.find("(did you mean 'p5en.48xlarge'?)"), std::string::npos);
}

TEST(Data, LiesWherePdsimDataSays) {
  ASSERT_EQ(setenv("PDSIM_DATA", PDSIM_SOURCE_DIR, 1), 0);
  EXPECT_EQ(data_dir(), PDSIM_SOURCE_DIR);
  ASSERT_EQ(setenv("PDSIM_DATA", "no/such/folder", 1), 0);
  const std::string message = error_of([] { data_dir(); });
  ASSERT_EQ(unsetenv("PDSIM_DATA"), 0);
  EXPECT_EQ(message, "PDSIM_DATA: is 'no/such/folder', which holds no models/gpus.json");
  EXPECT_TRUE(std::filesystem::exists(data_dir() / "models" / "shapes" / "qwen3-32b.json"));
}

// Sizes with their scales: OCP MX v1.0 (32 elements), NVFP4 (16), 128 x 128 blocks of fp32.
TEST(Dtypes, SizesIncludeTheirScales) {
  EXPECT_EQ(bytes_per_element(Dtype::bf16), 2);
  EXPECT_EQ(bytes_per_element(Dtype::mxfp4) * 32, 17);
  EXPECT_EQ(bytes_per_element(Dtype::nvfp4) * 16, 9);
  EXPECT_EQ(bytes_per_element(Dtype::int4) * 128, 66);
  EXPECT_EQ(bytes_per_element(Dtype::int4, 32) * 32, 18);
  EXPECT_EQ(bytes_per_element(Dtype::fp8_block) * 128 * 128, 128 * 128 + 4);
}

TEST(Dtypes, NamesReadBack) {
  for (int i = 0; i <= static_cast<int>(Dtype::int8); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  }
  EXPECT_EQ(parse_dtype("bfloat16"), Dtype::bf16);
  EXPECT_EQ(parse_dtype("bf17"), std::nullopt);
  EXPECT_NE(error_of([] { dtype_of("fp9", "s.json: /kv_dtype"); }).find("s.json: /kv_dtype: 'fp9'"),
            std::string::npos);
}

}  // namespace
}  // namespace pdsim
