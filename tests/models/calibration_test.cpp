// A calibration: pdsim's kernels measured here, an engine's known elsewhere.
//
//   efficiency = geometric mean over the anchors of (engine / here) / speed,  speed = of large GEMMs alone
//
// Hence, for a GPU of the tables' speed, where our attention takes f times the engine's: efficiency 1 / f,
// and the product is the engine's time. On a GPU that takes g times as long for everything, the efficiency
// stays and the product is g times the engine's: half the simulated times where everything takes half. From
// the engine's own curves every efficiency is 1 and a step takes the same nanoseconds. A copy of known cost
// (launch, run, rate) is fitted back.
#include "models/calibration.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/cost_sources.hpp"
#include "models/gemm.hpp"
#include "models/model.hpp"
#include "models/step_model.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("pdsim_calibration_{}",
                          testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name) << text;
    return path_ / name;
  }
  std::filesystem::path path() const { return path_; }

 private:
  std::filesystem::path path_;
};

const Gpu& l40s() {
  return find_gpu("l40s", "");
}

/// The curve of a kernel that takes `factor` times as long at every shape.
Curve slower(Curve curve, double factor) {
  for (Coefficients& c : curve.regimes) {
    for (double* time : {&c.launch_ns, &c.element_ns, &c.inner_ns, &c.expert_ns, &c.parallel_ns, &c.host_ns,
                         &c.ragged_host_ns, &c.wave_ns, &c.walk_ns, &c.split_ns}) {
      *time *= factor;
    }
    for (double* rate : {&c.flops_per_ns, &c.bytes_per_ns, &c.cache_bytes_per_ns}) *rate /= factor;
  }
  return curve;
}

constexpr CurveOp kHere[] = {CurveOp::gemm, CurveOp::attention_prefill, CurveOp::attention_decode};

/// What a calibration would fit on a GPU that takes `gpu` times as long as that of the tables, by the
/// vendor's library and by attention kernels that take `attention` times as long as the engine's.
Profile measured(double gpu, double attention) {
  const Profile engine = load_profile("l40s");
  Profile here = engine;
  here.name = "here";
  here.curves.clear();
  for (const CurveOp op : kHere) {
    const Curve& curve = *find_curve(engine, op, Dtype::bf16, "", 128).curve;
    here.curves.push_back(slower(curve, op == CurveOp::gemm ? gpu : gpu * attention));
    here.curves.back().kernel = "ours";
  }
  return here;
}

void add(KernelTable& table, CurveOp op, std::initializer_list<double> shape) {
  KernelRow row;
  row.op = op;
  row.ns = 1;  // anchors compare curves
  std::copy(shape.begin(), shape.end(), row.shape.begin());
  table.rows.push_back(row);
}

KernelTable shapes() {
  KernelTable table;
  table.files = {"here.csv"};
  table.kernels = {"ours"};
  for (const double m : {1.0, 16.0, 256.0, 4096.0}) {
    for (const double n : {2048.0, 8192.0, 16384.0}) add(table, CurveOp::gemm, {m, n, 8192});
  }
  for (const double tokens : {128.0, 2048.0}) {
    add(table, CurveOp::attention_prefill, {tokens, 0, 1, 32, 8, 128, 0});
  }
  for (const double context : {256.0, 4096.0}) {
    add(table, CurveOp::attention_decode, {16, context, 32, 8, 128, 0});
  }
  return table;
}

Device device() {
  Device device;
  device.name = "NVIDIA L40S";
  device.driver = "580.65";
  device.clock_mhz = 2520;
  device.power_limit_w = 350;
  device.l2_bytes = 96 << 20;
  device.date = "2026-11-30";
  return device;
}

Profile calibrated(double gpu, double attention) {
  return calibrate_against(measured(gpu, attention), shapes(), l40s(), device(), load_profile("l40s"));
}

const Curve& curve_of(const Profile& profile, CurveOp op) {
  return *find_curve(profile, op, Dtype::bf16, "", 128).curve;
}

/// us of each operator of a step with decode rows and a prompt.
std::map<std::string, double> step_of(const Profile& profile) {
  const StepModel model(load_model("llama-3.1-8b"), {}, Dtype::bf16, Dtype::bf16, l40s(), profile);
  StepShape shape;
  shape.decode_requests = shape.sampled_requests = 16;
  shape.decode_context = 16 * 3000;
  shape.prefill_requests = 1;
  shape.prefill_tokens = 1024;
  shape.prefill_pairs = 1024 * 1025 / 2;
  shape.prefill_context = 1024;
  std::map<std::string, double> us;
  for (const OpTime& op : model.breakdown(shape)) us[op.name] += op.us;
  return us;
}

bool is_measured(const std::string& name) {
  return name.starts_with("attention") || name.starts_with("qkv") || name.starts_with("o_") ||
         name.starts_with("gate") || name.starts_with("down") || name.starts_with("lm_head");
}

TEST(Calibration, EfficiencyIsTheEnginesTimeOverOurs) {
  const Profile profile = calibrated(1, 2);
  EXPECT_EQ(curve_of(profile, CurveOp::gemm).efficiency.factor, 1);
  for (const CurveOp op : {CurveOp::attention_prefill, CurveOp::attention_decode}) {
    const Curve& curve = curve_of(profile, op);
    EXPECT_EQ(curve.origin, Origin::here);
    EXPECT_EQ(curve.efficiency.factor, 0.5) << name(op);
    EXPECT_EQ(curve.efficiency.spread, 0) << name(op);
    EXPECT_EQ(curve.efficiency.anchors, 2) << name(op);
  }
  EXPECT_EQ(profile.calibration->speed.compute, 1);
  EXPECT_EQ(profile.calibration->speed.memory, 1);
  EXPECT_GT(profile.calibration->speed.compute_anchors, 0);
  EXPECT_GT(profile.calibration->speed.memory_anchors, 0);
  // The product is the engine's time, operator by operator.
  const std::map<std::string, double> engine = step_of(load_profile("l40s"));
  for (const auto& [name, us] : step_of(profile)) {
    if (name == "host") continue;
    EXPECT_NEAR(us, engine.at(name), 1e-9 * us) << name;
  }
}

TEST(Calibration, EfficiencyIsAGeometricMeanWithItsSpread) {
  // Ours takes 2 times the engine's on small prompts and 4.5 on large ones: sqrt(9) = 3, times 1.5 each way.
  Profile here = measured(1, 1);
  Curve& prefill = here.curves[1];
  ASSERT_TRUE(prefill.correction.empty() || prefill.op == CurveOp::attention_prefill);
  const auto at = [&](double tokens) {
    KernelTable one = shapes();
    std::erase_if(one.rows, [&](const KernelRow& row) {
      return row.op == CurveOp::attention_prefill && row.at("tokens") != tokens;
    });
    return calibrate_against(here, one, l40s(), device(), load_profile("l40s")).curves[1].efficiency.factor;
  };
  for (Coefficients& c : prefill.regimes) c.flops_per_ns /= 5;  // hurts the large one alone
  const double small = at(128), large = at(2048);
  ASSERT_GT(small / large, 1.2);
  const Efficiency both =
      calibrate_against(here, shapes(), l40s(), device(), load_profile("l40s")).curves[1].efficiency;
  EXPECT_NEAR(both.factor, std::sqrt(small * large), 2e-4);
  EXPECT_NEAR(both.spread, std::sqrt(small / large) - 1, 2e-3);
}

TEST(Calibration, AFasterGpuWithTheSameKernelsHalvesTheSimulatedTimes) {
  const Profile as_tables = calibrated(1, 2), twice = calibrated(0.5, 2);
  EXPECT_EQ(twice.calibration->speed.compute, 2);
  EXPECT_EQ(twice.calibration->speed.memory, 2);
  for (const CurveOp op : kHere) {
    EXPECT_EQ(curve_of(twice, op).efficiency.factor, curve_of(as_tables, op).efficiency.factor) << name(op);
  }
  const std::map<std::string, double> slow = step_of(as_tables);
  int halved = 0;
  for (const auto& [name, us] : step_of(twice)) {
    if (!is_measured(name)) continue;
    EXPECT_NEAR(us, slow.at(name) / 2, 1e-9 * us) << name;
    ++halved;
  }
  EXPECT_GE(halved, 6);
}

TEST(Calibration, APowerLimitIsCarriedIntoTheSimulation) {
  // With the clock all takes a quarter longer but memory: GEMMs of many rows and prompts slow down.
  Profile here = measured(1, 2);
  for (Curve& curve : here.curves) {
    curve = slower(curve, 1.25);
    for (Coefficients& c : curve.regimes) c.bytes_per_ns *= 1.25;
  }
  const Profile profile = calibrate_against(here, shapes(), l40s(), device(), load_profile("l40s"));
  EXPECT_LT(profile.calibration->speed.compute, 0.87);
  EXPECT_GT(profile.calibration->speed.memory, 0.95);  // terms of a smooth maximum: a little of each
  // Our attention still takes twice the engine's: prompts by arithmetic, decode rows by memory.
  EXPECT_NEAR(curve_of(profile, CurveOp::attention_prefill).efficiency.factor, 0.5, 0.03);
  EXPECT_NEAR(curve_of(profile, CurveOp::attention_decode).efficiency.factor, 0.5, 0.03);
  const std::map<std::string, double> engine = step_of(load_profile("l40s"));
  double gate = 0, of_engine = 0;
  for (const auto& [name, us] : step_of(profile)) {
    if (!name.starts_with("gate")) continue;
    gate += us;
    of_engine += engine.at(name);
  }
  EXPECT_GT(gate, 1.1 * of_engine);
}

TEST(Calibration, OfTheEnginesOwnCurvesIsTheEngine) {
  const Profile engine = load_profile("l40s");
  const Profile profile = calibrate_against(engine, shapes(), l40s(), device(), engine);
  EXPECT_EQ(profile.curves.size(), engine.curves.size());
  for (const Curve& curve : profile.curves) EXPECT_EQ(curve.efficiency.factor, 1) << describe_curve(curve);
  const ModelSpec model = load_model("llama-3.1-8b");
  const StepModel a(model, {}, Dtype::bf16, Dtype::bf16, l40s(), engine),
      b(model, {}, Dtype::bf16, Dtype::bf16, l40s(), profile);
  for (std::int32_t batch = 1; batch <= 256; batch *= 2) {
    StepShape shape;
    shape.decode_requests = shape.sampled_requests = batch;
    shape.decode_context = std::int64_t{batch} * 2000;
    EXPECT_EQ(a.time(shape).ns, b.time(shape).ns) << batch;
    EXPECT_EQ(a.time(shape).extrapolated, b.time(shape).extrapolated) << batch;
  }
}

TEST(Calibration, WithoutAnAnchorItIsOurOwnKernel) {
  const auto origin_of = [](KernelTable table, const std::optional<Profile>& engine) {
    return calibrate_against(measured(1, 2), table, l40s(), device(), engine).curves[1].origin;
  };
  const Profile engine = load_profile("l40s");
  EXPECT_EQ(origin_of(shapes(), engine), Origin::here);
  EXPECT_EQ(origin_of(shapes(), std::nullopt), Origin::own_kernel);
  KernelTable behind_prefix = shapes(), other_heads = shapes();
  for (KernelTable* table : {&behind_prefix, &other_heads}) {
    for (KernelRow& row : table->rows) {
      if (row.op != CurveOp::attention_prefill) continue;
      if (table == &behind_prefix) row.shape[1] = 4096;  // prefix: no table of an engine has one
      if (table == &other_heads) row.shape[3] = 512;     // beyond the heads that were measured
    }
  }
  EXPECT_EQ(origin_of(behind_prefix, engine), Origin::own_kernel);
  EXPECT_EQ(origin_of(other_heads, engine), Origin::own_kernel);
  Profile no_prefill = engine;
  std::erase_if(no_prefill.curves, [](const Curve& c) { return c.op == CurveOp::attention_prefill; });
  EXPECT_EQ(origin_of(shapes(), no_prefill), Origin::own_kernel);
  EXPECT_EQ(calibrated(1, 2).curves[1].efficiency.factor, 0.5);
}

TEST(Calibration, WhatWasNotMeasuredHereIsTakenAndSaid) {
  const Profile engine = load_profile("l40s"), profile = calibrated(1, 2);
  const auto has = [&](CurveOp op, Dtype dtype, Origin origin) {
    return std::any_of(profile.curves.begin(), profile.curves.end(),
                       [&](const Curve& c) { return c.op == op && c.dtype == dtype && c.origin == origin; });
  };
  EXPECT_TRUE(has(CurveOp::allreduce, Dtype::bf16, Origin::taken));
  EXPECT_TRUE(has(CurveOp::gemm, Dtype::fp8, Origin::taken));
  EXPECT_FALSE(has(CurveOp::gemm, Dtype::bf16, Origin::taken));
  Parallelism two;
  two.tensor = 2;
  const ModelSpec model = load_model("llama-3.1-8b");
  const CostSources sources = StepModel(model, two, Dtype::bf16, Dtype::bf16, l40s(), profile).sources();
  EXPECT_EQ(sources.devices, (std::set<std::string>{"NVIDIA L40S, 2520 MHz, 350 W, 2026-11-30"}));
  EXPECT_EQ(sources.engine_efficiency.at("gemm bf16"), 1);
  EXPECT_EQ(sources.engine_efficiency.at("attention-decode bf16 head_dim 128"), 0.5);
  EXPECT_EQ(sources.taken, (std::set<std::string>{"allreduce 2 GPUs"}));
  EXPECT_TRUE(sources.own_kernel.empty());
  EXPECT_NE(sources.text().find("engine efficiency attention-decode bf16 head_dim 128 0.50"),
            std::string::npos);
  EXPECT_TRUE(StepModel(model, two, Dtype::bf16, Dtype::bf16, l40s(), engine).sources().empty());
  // Without an engine's profile there is none to take: the usual error.
  const Profile alone = calibrate_against(measured(1, 2), shapes(), l40s(), device(), std::nullopt);
  EXPECT_THROW(StepModel(model, two, Dtype::bf16, Dtype::bf16, l40s(), alone), InputError);
  EXPECT_EQ(StepModel(model, {}, Dtype::bf16, Dtype::bf16, l40s(), alone).sources().own_kernel.size(), 3u);
}

TEST(Calibration, ADataSheetTellsNoEfficiency) {
  EXPECT_TRUE(shipped_engine(find_gpu("h100", "")));
  EXPECT_FALSE(shipped_engine(find_gpu("l4", "")));         // scaled from l40s
  EXPECT_FALSE(shipped_engine(find_gpu("a100-40gb", "")));  // none of this size
}

TEST(Calibration, RoundTripsToTheByte) {
  Profile profile = calibrated(1.07, 2.3);
  CopyCurve copy;
  copy.kind = "batch-h2d";
  copy.launch_ns = 8200;
  copy.run_ns = 315;
  copy.bytes_per_ns = 24.8;
  copy.overlap = 0.25;
  copy.rows = 20;
  copy.range["run_bytes"] = {4096, 67108864};
  copy.error = {20, 0.031, 0.08, -0.002};
  profile.copies = {copy};
  profile.curves[1].origin = Origin::own_kernel;
  profile.curves[1].efficiency = {};
  const Folder folder;
  const std::string text = to_json(profile);
  const Profile read = load_profile(folder.write("profile.json", text).string());
  EXPECT_EQ(to_json(read), text);
  EXPECT_EQ(read.calibration->device.power_limit_w, 350);
  EXPECT_EQ(read.calibration->engine, "l40s");
  EXPECT_EQ(read.curves[1].origin, Origin::own_kernel);
  EXPECT_EQ(read.curves[2].efficiency.factor, profile.curves[2].efficiency.factor);
  EXPECT_EQ(copy_time(read.copies[0], {4096, 100, 0}).ns, copy_time(copy, {4096, 100, 0}).ns);
  // Four significant digits once, and nothing after that.
  const std::map<std::string, double> us = step_of(profile);
  for (const auto& [name, read_us] : step_of(read)) EXPECT_NEAR(read_us, us.at(name), 2e-3 * read_us) << name;
  const Profile again = load_profile(folder.write("again.json", to_json(read)).string());
  EXPECT_EQ(step_of(again), step_of(read));
}

TEST(Calibration, ShippedProfilesHaveNothingOfIt) {
  for (const std::string name : {"a100-80gb", "h100", "l40s"}) {
    const std::filesystem::path file =
        std::filesystem::path(PDSIM_SOURCE_DIR) / "models/profiles" / (name + ".json");
    std::ifstream stream(file, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    // Written before values that round to what is left out were left out.
    constexpr std::string_view kNone = "\"ragged\":1.0,";
    for (std::size_t at; (at = bytes.find(kNone)) != bytes.npos;) bytes.erase(at, kNone.size());
    const Profile profile = load_profile(name);
    EXPECT_FALSE(profile.calibration);
    EXPECT_TRUE(to_json(profile) == bytes) << name;
  }
}

std::string error_of(const std::string& profile) {
  const Folder folder;
  try {
    load_profile(folder.write("p.json", profile).string());
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Calibration, AFaultyProfileSaysWhere) {
  const auto with = [](const std::string& curve, const std::string& calibration) {
    return error_of(fmt::format(
        R"({{"schema": "pdsim.profile/1", "name": "x", "gpu": "l40s", "sms": 142{}, "curves": [
          {{"op": "gemm", "dtype": "bf16"{}, "regimes": [{{"gb_per_s": 700}}]}}]}})",
        calibration, curve));
  };
  const std::string fine =
      R"(, "calibration": {"device": {"device": "NVIDIA L40S"}, "speed": {"compute": 1, "memory": 1,
         "compute_anchors": 0, "memory_anchors": 0}})";
  EXPECT_EQ(with(R"(, "own_kernel": true)", fine), "no error");
  EXPECT_NE(with(R"(, "own_kernel": true)", "").find("/curves/0: is a calibration's curve"),
            std::string::npos);
  EXPECT_NE(with(R"(, "engine_efficiency": {"factor": 0, "spread": 0, "anchors": 3})", fine)
                .find("/curves/0/engine_efficiency/factor"),
            std::string::npos);
  EXPECT_NE(with(R"(, "own_kernel": true, "taken_from": "l40s")", fine).find("one of engine_efficiency"),
            std::string::npos);
  EXPECT_NE(with(R"(, "engine_efficency": {})", fine).find("did you mean 'engine_efficiency'"),
            std::string::npos);
}

// Tables and device.json as pdsim calibrate writes them.

constexpr std::string_view kHeader =
    "op,dtype,kernel,latency_us,device,software,{},samples,spread,clock_mhz,throttled,stop\n";

std::string table_of(std::string_view axes, const std::vector<std::string>& rows) {
  std::string text = fmt::format(fmt::runtime(kHeader), axes);
  for (const std::string& row : rows) text += row + ",40,0.004,1980,0,noise\n";
  return text;
}

TEST(CalibrationTables, ColumnsOnHowAreNamedAndLatentAttentionStandsAlone) {
  const Folder folder;
  folder.write("mla.csv",
               table_of("batch,context,heads",
                        {"mla-attention-decode,bf16,pdsim-mla-decode,31.5,NVIDIA L40S,pdsim,8,1024,16"}));
  folder.write("kv_copy.csv",
               table_of("run_bytes,runs,sms", {"kv-copy,bf16,batch-h2d,12.5,NVIDIA L40S,pdsim,4096,16,0",
                                               "kv-copy,bf16,pdsim-gather,9.5,NVIDIA L40S,pdsim,256,64,16"}));
  folder.write("interference.csv", "copy,sms,run_bytes\npdsim-gather,4,32768\n");
  const std::filesystem::path paths[] = {folder.path()};
  const KernelTable table = read_kernel_tables(paths);
  ASSERT_EQ(table.rows.size(), 1u);
  EXPECT_EQ(table.rows[0].op, CurveOp::mla_decode);
  EXPECT_TRUE(table.rows[0].bare);
  EXPECT_EQ(table.rows[0].ns, 31'500);
  ASSERT_EQ(table.copies.size(), 2u);
  EXPECT_EQ(table.kernels[table.copies[1].kind], "pdsim-gather");
  EXPECT_EQ(table.copies[1].shape.bytes(), 256 * 64);
  EXPECT_EQ(table.copies[1].shape.sms, 16);
  EXPECT_EQ(table.not_read,
            (std::vector<std::string>{"samples", "spread", "clock_mhz", "throttled", "stop"}));
  EXPECT_EQ(table.set_aside.size(), 1u);
  // A slip of the pen is still an error.
  const std::filesystem::path wrong[] = {
      folder.write("w.csv", "op,dtype,kernel,latency_us,run_byte,runs\nkv-copy,bf16,peer,1,1,1\n")};
  EXPECT_THROW(read_kernel_tables(wrong), InputError);
}

TEST(CalibrationTables, KnownCopiesAreFittedBack) {
  // Descriptors: 7 us + 0.4 us each + bytes at 25 GB/s. Multiprocessors: 5 us + the greater of
  // (20 ns a run + bytes at 60 GB/s) / sms and bytes at 1500 GB/s.
  std::vector<std::string> rows;
  for (double run = 4096; run <= 1 << 26; run *= 8) {
    for (double runs = 1; runs <= 4096 && run * runs <= 1 << 28; runs *= 4) {
      rows.push_back(fmt::format("kv-copy,bf16,batch-h2d,{},NVIDIA L40S,pdsim,{},{},0",
                                 7 + 0.4 * runs + run * runs / 25e3, run, runs));
    }
  }
  const double bytes = 1 << 26;
  for (double run = 256; run <= 1 << 18; run *= 4) {
    for (double sms = 2; sms <= 128; sms *= 2) {
      const double lane = (0.02 * bytes / run + bytes / 60e3) / sms;
      rows.push_back(fmt::format("kv-copy,bf16,pdsim-gather,{},NVIDIA L40S,pdsim,{},{},{}",
                                 5 + std::max(lane, bytes / 1500e3), run, bytes / run, sms));
    }
  }
  const Folder folder;
  const std::filesystem::path paths[] = {folder.write("c.csv", table_of("run_bytes,runs,sms", rows))};
  const Profile profile = fit_profile(paths, l40s(), {"x", "", "", ""});
  const CopyCurve& h2d = find_copy(profile, "batch-h2d", "");
  EXPECT_NEAR(h2d.launch_ns, 7000, 150);
  EXPECT_NEAR(h2d.run_ns, 400, 8);
  EXPECT_NEAR(h2d.bytes_per_ns, 25, 0.3);
  EXPECT_LT(h2d.error.p90_ape, 0.03);
  EXPECT_EQ(h2d.error.rows, h2d.rows);
  const CopyCurve& gather = find_copy(profile, "pdsim-gather", "");
  EXPECT_NEAR(gather.sm_bytes_per_ns, 60, 3);
  EXPECT_NEAR(gather.run_ns, 20, 2);
  EXPECT_NEAR(gather.bytes_per_ns, 1500, 45);
  EXPECT_LT(gather.error.median_ape, 0.03);
  // Short runs are slow, and never faster on fewer multiprocessors.
  EXPECT_GT(copy_time(gather, {256, bytes / 256, 16}).ns, copy_time(gather, {8192, bytes / 8192, 16}).ns);
  EXPECT_GT(copy_time(gather, {256, bytes / 256, 4}).ns, copy_time(gather, {256, bytes / 256, 16}).ns);
  EXPECT_TRUE(gather.holds({256, 1000, 64}));
  EXPECT_FALSE(gather.holds({128, 1000, 64}));
  try {
    find_copy(profile, "batch-hd2", "kind");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'batch-h2d'"), std::string::npos);
  }
  EXPECT_THROW(find_copy(load_profile("l40s"), "batch-h2d", "kind"), InputError);
}

TEST(CalibrationTables, AFolderBecomesAProfile) {
  const Profile engine = load_profile("l40s");
  std::vector<std::string> rows;
  for (double m = 1; m <= 4096; m *= 4) {
    for (const double n : {2048.0, 6144.0, 16384.0}) {
      for (const double k : {2048.0, 4096.0, 16384.0}) {
        KernelTable one;
        const GemmShape shape{m, n, k, Dtype::bf16};
        const double ns = gemm_time(curve_of(engine, CurveOp::gemm), l40s().sm_count, shape).ns;
        rows.push_back(
            fmt::format("gemm,bf16,cublasLt,{},NVIDIA L40S,cublasLt 13.0,{},{},{}", ns / 800, m, n, k));
      }
    }
  }
  const Folder folder;
  folder.write("gemm.csv", table_of("m,n,k", rows));
  folder.write("device.json",
               R"({"schema": "pdsim.device/1", "device": "NVIDIA L40S", "driver": "580.65", "runtime": 13000,
                   "sms": 142, "l2_bytes": 100663296, "clock_mhz": 2000, "power_limit_w": null,
                   "date": "2026-11-30", "peaks": {"copy_gb_s": 690.5}, "status": "finished"})");
  const Profile profile = calibrated_profile(folder.path());
  EXPECT_EQ(profile.name, "l40s-calibrated");
  EXPECT_EQ(profile.gpu, "l40s");
  EXPECT_EQ(profile.date, "2026-11-30");
  EXPECT_EQ(profile.calibration->device.copy_gb_per_s, 690.5);
  EXPECT_EQ(profile.calibration->engine, "l40s");
  EXPECT_EQ(profile.calibration->engine_sha256, engine.sha256);
  const Curve& gemm = curve_of(profile, CurveOp::gemm);
  EXPECT_EQ(gemm.origin, Origin::here);
  EXPECT_EQ(gemm.kernel, "cublasLt");
  // 1.25 times the tables' time at every shape: the GPU is that much slower, the library is the same.
  EXPECT_NEAR(profile.calibration->speed.compute, 0.8, 0.03);
  EXPECT_NEAR(gemm.efficiency.factor, 1, 0.05);
  // Twice through the file: nothing is lost.
  EXPECT_EQ(to_json(load_profile(folder.write("profile.json", to_json(profile)).string())), to_json(profile));
  const Profile other = load_profile("h100");
  const std::filesystem::path paths[] = {folder.path() / "gemm.csv"};
  EXPECT_THROW(calibrated_profile(read_kernel_tables(paths), l40s(), device(), other, {}), InputError);
  std::filesystem::remove(folder.path() / "device.json");
  EXPECT_THROW(calibrated_profile(folder.path()), InputError);
}

}  // namespace
}  // namespace pdsim
