// Tables of measured kernels become rows without a change of meaning.
//
//   ms and us are both ns here; a message of N elements of b bytes is N b bytes; a prompt of s tokens in a
//   batch of B has s tokens a request; a decode row at `step` has step + 1 keys.
//   MFU = flops / (time x the format's dense peak), of causal attention 4 heads head_dim pairs flops, pairs
//   = s (s + 1) / 2 a request: above 1 no hardware computes, so such rows are refused.
//   Every line is a row or is counted with a reason.
#include "models/kernel_table.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "models/fit.hpp"
#include "models/hardware.hpp"
#include "sim/core/error.hpp"

namespace pdsim {
namespace {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("pdsim_table_{}", testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }
  std::filesystem::path path() const { return path_; }

 private:
  std::filesystem::path path_;
};

KernelTable read(const std::filesystem::path& path) {
  const std::filesystem::path paths[] = {path};
  return read_kernel_tables(paths);
}

KernelTable read_text(const std::string& text) {
  const Folder folder;
  folder.write("t.csv", text);
  return read(folder.path() / "t.csv");
}

std::string error_of(const std::string& text) {
  try {
    read_text(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(KernelTable, ReadsEachFormByItsColumns) {
  const Folder folder;  // names say nothing
  folder.write("a.csv",
               "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
               "VLLM,0.24.0,NVIDIA H200,gemm,cublas,bfloat16,3,4096,1024,0.0125\n");
  folder.write("b.csv",  // an old one: no window_size
               "framework,version,device,op_name,kernel_source,batch_size,isl,num_heads,num_key_value_heads,"
               "head_dim,beam_width,attn_dtype,kv_cache_dtype,step,latency\n"
               "VLLM,0.14.0,NVIDIA H200,context_attention,fa,4,100,32,8,128,1,bfloat16,bfloat16,0,0.02\n"
               "VLLM,0.14.0,NVIDIA H200,generation_attention,fa,4,1,32,8,128,1,bfloat16,fp8,511,0.03\n");
  folder.write(
      "c.csv",
      "framework,version,device,op_name,kernel_source,moe_dtype,num_tokens,hidden_size,inter_size,topk,"
      "num_experts,moe_tp_size,moe_ep_size,distribution,latency\n"
      "VLLM,0.24.0,NVIDIA H200,moe,triton,fp8_block,64,4096,1536,8,128,2,4,power_law_1.2,0.5\n");
  folder.write("d.csv",
               "framework,version,device,op_name,kernel_source,nccl_dtype,num_gpus,message_size,latency\n"
               "TRTLLM,2.29.2,NVIDIA H200,all_gather,NCCL,half,8,1000,0.01\n"
               "TRTLLM,2.29.2,NVIDIA H200,gossip,NCCL,half,8,1000,0.01\n");
  folder.write(
      "e.csv",
      "framework,version,device,op_name,kernel_source,model,architecture,mla_dtype,kv_cache_dtype,"
      "gemm_type,num_heads,batch_size,isl,tp_size,step,latency\n"
      "VLLM,0.24.0,NVIDIA H200,mla_generation_module,FLASHMLA,deepseek-ai/DeepSeek-V3,D,bfloat16,fp8,"
      "fp8_block,16,32,1,8,2047,0.09\n");
  folder.write("notes.csv", "who,what\nme,this\n");
  folder.write("readme.txt", "not a table");
  const KernelTable table = read(folder.path());
  ASSERT_EQ(table.rows.size(), 6u);
  EXPECT_EQ(table.device, "NVIDIA H200");
  EXPECT_EQ(table.software, "vLLM 0.24.0, vLLM 0.14.0, NCCL 2.29.2");
  const auto check = [&](std::size_t i, CurveOp op, Dtype dtype, double ns, const std::string& shape) {
    EXPECT_EQ(table.rows[i].op, op) << i;
    EXPECT_EQ(table.rows[i].dtype, dtype) << i;
    EXPECT_DOUBLE_EQ(table.rows[i].ns, ns) << i;
    EXPECT_EQ(describe_shape(table.rows[i]), shape);
  };
  check(0, CurveOp::gemm, Dtype::bf16, 12'500, "m=3 n=4096 k=1024");
  check(1, CurveOp::attention_prefill, Dtype::bf16, 20'000,
        "tokens=100 prefix=0 requests=4 heads=32 kv_heads=8 head_dim=128 window=0");
  check(2, CurveOp::attention_decode, Dtype::fp8, 30'000,
        "batch=4 context=512 heads=32 kv_heads=8 head_dim=128 window=0");
  check(3, CurveOp::moe, Dtype::fp8_block, 500'000,
        "tokens=64 hidden=4096 intermediate=1536 experts=128 topk=8 tp=2 ep=4 routing=1.2");
  check(4, CurveOp::allgather, Dtype::fp16, 10'000, "bytes=2000 gpus=8");
  check(5, CurveOp::mla_decode, Dtype::fp8, 90'000, "batch=32 context=2048 heads=16");
  EXPECT_EQ(table.rows[5].weights, Dtype::fp8_block);
  EXPECT_EQ(table.models[table.rows[5].model], "deepseek-ai/DeepSeek-V3");
  EXPECT_EQ(table.place(table.rows[2]), (folder.path() / "b.csv").string() + ":3");
  // The line of an unknown operation and the table of another kind are counted.
  EXPECT_EQ(table.set_aside.at("an operation that pdsim does not know: gossip"), 1);
  EXPECT_EQ(table.set_aside.at("notes.csv is no table of kernel times"), 1);
}

TEST(KernelTable, ReadsItsOwnForm) {
  const KernelTable table = read_text(
      "op,dtype,kernel,latency_us,m,n,k,tokens,heads,kv_heads,head_dim,bytes,gpus,device\n"
      "gemm,fp8,mine,12.5,1,2,3,,,,,,,NVIDIA H100 80GB HBM3\n"
      "attention-prefill,bf16,mine,20,,,,100,8,1,128,,,NVIDIA H100 80GB HBM3\n"
      "\n"
      "allreduce,bf16,mine,7,,,,,,,,4096,2,NVIDIA H100 80GB HBM3\n");
  ASSERT_EQ(table.rows.size(), 3u);
  EXPECT_DOUBLE_EQ(table.rows[0].ns, 12'500);
  EXPECT_EQ(describe_shape(table.rows[0]), "m=1 n=2 k=3");
  // No prefix, one request, no window.
  EXPECT_EQ(describe_shape(table.rows[1]),
            "tokens=100 prefix=0 requests=1 heads=8 kv_heads=1 head_dim=128 window=0");
  EXPECT_EQ(describe_shape(table.rows[2]), "bytes=4096 gpus=2");
  EXPECT_EQ(table.rows[2].line, 5u);
  EXPECT_EQ(measured_gpu(table).name, "h100");
}

TEST(KernelTable, MistakesSayWhere) {
  const std::string header = "op,dtype,kernel,latency_us,m,n,k\n";
  EXPECT_NE(error_of(header + "gemn,bf16,x,1,1,1,1\n").find("t.csv:2: op is 'gemn' (did you mean 'gemm'?)"),
            std::string::npos)
      << error_of(header + "gemn,bf16,x,1,1,1,1\n");
  EXPECT_NE(error_of(header + "gemm,bf61,x,1,1,1,1\n").find("t.csv:2: dtype"), std::string::npos);
  EXPECT_NE(error_of(header + "gemm,bf16,x,1,,1,1\n").find("t.csv:2: m is '': expected a number"),
            std::string::npos);
  EXPECT_NE(error_of(header + "gemm,bf16,x,-1,1,1,1\n").find("latency_us is -1: expected more than 0"),
            std::string::npos);
  EXPECT_NE(error_of(header + "allreduce,bf16,x,1,,,\n").find("t.csv:1: has no column 'bytes'"),
            std::string::npos);
  EXPECT_NE(error_of("op,dtype,kernel,latency_us,m,n,k,batsh\ngemm,bf16,x,1,1,1,1,\n")
                .find("t.csv:1: has a column 'batsh' that is not known here (did you mean 'batch'?)"),
            std::string::npos);
  EXPECT_NE(error_of("a,b\n1,2\n").find("is no table of kernel times"), std::string::npos);
  EXPECT_NE(
      error_of("op,dtype,kernel,latency_us,m,n,k,device\ngemm,bf16,x,1,1,1,1,A\ngemm,bf16,x,1,1,1,1,B\n")
          .find("t.csv:3: device is 'B' where others are 'A'"),
      std::string::npos);
}

TEST(KernelTable, RepeatedKeysBecomeTheirMedian) {
  KernelTable table = read_text(
      "op,dtype,kernel,latency_us,m,n,k\n"
      "gemm,bf16,x,5,1,64,64\ngemm,bf16,x,9,1,64,64\ngemm,bf16,x,6,1,64,64\n"
      "gemm,bf16,y,7,1,64,64\ngemm,bf16,x,1,2,64,64\ngemm,bf16,x,3,2,64,64\n");
  merge_repeats(table);
  ASSERT_EQ(table.rows.size(), 3u);
  EXPECT_DOUBLE_EQ(table.rows[0].ns, 6'000);
  EXPECT_DOUBLE_EQ(table.rows[1].ns, 7'000);  // another kernel is another key
  EXPECT_DOUBLE_EQ(table.rows[2].ns, 2'000);  // of an even number the middle two's mean
}

TEST(KernelTable, RefusesWhatNoHardwareCanDo) {
  const Gpu& gpu = find_gpu("h200", "");
  const double peak = peak_ops_per_ns(gpu, Dtype::bf16);
  // 4 heads d s (s + 1) / 2 a request, twice.
  const double flops = 2 * 4 * 8 * 128 * 4096.0 * 4097 / 2;
  const double just_us = flops / peak / 1e3;
  const auto text = [&](double attention_us, double gemm_us) {
    return fmt::format(
        "op,dtype,kernel,latency_us,m,n,k,tokens,requests,heads,kv_heads,head_dim,window\n"
        "gemm,bf16,x,{},4096,4096,4096,,,,,,\n"
        "attention-prefill,bf16,x,{},,,,4096,2,8,8,128,0\n"
        "attention-prefill,bf16,x,{},,,,4096,2,8,8,128,128\n",
        gemm_us, attention_us, attention_us / 5);
  };
  const double gemm_us = 2 * 4096.0 * 4096 * 4096 / peak / 1e3;
  const KernelTable fine = read_text(text(1.01 * just_us, 1.01 * gemm_us));
  EXPECT_NEAR(mfu(fine.rows[0], gpu), 1 / 1.01, 1e-6);
  EXPECT_NEAR(mfu(fine.rows[1], gpu), 1 / 1.01, 1e-6);
  // In a window of w a query sees at most w keys: w (w + 1) / 2 + (s - w) w pairs.
  const double pairs = 128.0 * 129 / 2 + (4096.0 - 128) * 128;
  EXPECT_NEAR(mfu(fine.rows[2], gpu), 2 * 4 * 8 * 128 * pairs / (fine.rows[2].ns * peak), 1e-6);
  EXPECT_NO_THROW(refuse_impossible(fine, gpu));
  try {
    refuse_impossible(read_text(text(0.5 * just_us, 1.01 * gemm_us)), gpu);
    FAIL();
  } catch (const InputError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("1 of 3 rows imply more arithmetic than a"), std::string::npos) << what;
    EXPECT_NE(what.find("t.csv:3: attention-prefill bf16 tokens=4096"), std::string::npos) << what;
    EXPECT_NE(what.find("MFU 2.00"), std::string::npos) << what;
  }
}

TEST(Device, IsFoundByTheWordsOfItsName) {
  const auto gpu_of = [](std::string_view device) {
    const Gpu* gpu = find_device(device);
    return gpu == nullptr ? "none" : gpu->name;
  };
  EXPECT_EQ(gpu_of("NVIDIA H200"), "h200");
  EXPECT_EQ(gpu_of("NVIDIA H100 80GB HBM3"), "h100");
  EXPECT_EQ(gpu_of("NVIDIA A100-SXM4-80GB"), "a100-80gb");
  EXPECT_EQ(gpu_of("NVIDIA A100-SXM4-40GB"), "a100-40gb");
  EXPECT_EQ(gpu_of("NVIDIA L40S"), "l40s");
  EXPECT_EQ(gpu_of("NVIDIA GB200"), "gb200");  // another board than B200
  EXPECT_EQ(gpu_of("NVIDIA GB10"), "none");
  EXPECT_EQ(gpu_of("NVIDIA H100 PCIe"), "none");
  EXPECT_EQ(gpu_of(""), "none");
  EXPECT_EQ(find_gpu("a100", "").name, "a100-80gb");  // the largest of the two
}

}  // namespace
}  // namespace pdsim
