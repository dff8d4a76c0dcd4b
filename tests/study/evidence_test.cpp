// Theory: a run is only as well founded as the weakest of its parts, and misses by no less than any of them.
// Which grade a deployment has follows from its GPUs, its model, whether it hands KV over and how many of its
// steps lie outside what was measured; by how much runs of that grade miss is looked up in the shipped table,
// which is what `pdsim validate evidence` finds.
#include "tools/study/evidence.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <tuple>

#include "sim/scenario/load.hpp"
#include "tools/study/runs.hpp"

namespace pdsim {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr GradeError Evidence::*kFigures[] = {&Evidence::ttft, &Evidence::tpot, &Evidence::throughput};

ordered_json summary_of(double outside) {
  return {{"cost_model", {{"extrapolated_step_fraction", outside}}}};
}

std::string pool(const std::string& gpu, const std::string& role = "colocated", int tensor = 4,
                 const std::string& engine = "{}") {
  return json{{"role", role}, {"gpu", gpu}, {"tensor_parallel", tensor}, {"engine", json::parse(engine)}}
      .dump();
}

Evidence evidence(const std::string& model, const std::string& weights, const std::string& pools,
                  double outside = 0) {
  const std::string text =
      R"({"name": "made", "model": ")" + model + R"(", "weights_dtype": ")" + weights + R"(", "pools": [)" +
      pools + R"(], "workload": {"synthetic": {"requests": 1, "isl": 64, "osl": 2, "rate": 1}}})";
  return evidence_of(plan_deployment(parse_scenario(text, "made", "")), summary_of(outside));
}

json table() {
  std::ifstream in(PDSIM_SOURCE_DIR "/models/evidence.json");
  return json::parse(in);
}

TEST(Evidence, MeasuredHere) {
  const Evidence e = evidence("llama-3.1-70b", "fp8", pool("h200"));
  EXPECT_EQ(e.grade, Grade::measured_here);
  EXPECT_TRUE(e.text.starts_with("measured here: 60 vLLM runs of llama-3.1-70b in fp8 on h200 ")) << e.text;
  EXPECT_EQ(e.tpot.n, 60);
  EXPECT_NE(e.source.find("pdsim validate evidence"), std::string::npos);
  EXPECT_NE(e.to_do.find("pdsim validate run"), std::string::npos);
  // In another format its kernels are others.
  EXPECT_EQ(evidence("llama-3.1-70b", "bf16", pool("h200")).grade, Grade::same_gpu);
}

TEST(Evidence, SameGpuOtherModel) {
  const Evidence h200 = evidence("qwen3-32b", "bf16", pool("h200"));
  EXPECT_EQ(h200.grade, Grade::same_gpu);
  EXPECT_NE(h200.text.find("no vLLM run of qwen3-32b in bf16 on h200 was compared; "), std::string::npos)
      << h200.text;
  // No run on this GPU at all: those on others, and the text says so.
  const Evidence a100 = evidence("qwen3-32b", "bf16", pool("a100-80gb"));
  EXPECT_EQ(a100.grade, Grade::same_gpu);
  EXPECT_NE(a100.text.find("no vLLM run on a100-80gb was compared"), std::string::npos) << a100.text;
  EXPECT_GT(a100.tpot.n, h200.tpot.n);
}

TEST(Evidence, HandingOverIsAPublishedClaimAtBest) {
  const Evidence alone = evidence("llama-3.1-70b", "fp8", pool("h200"));
  const Evidence pair =
      evidence("llama-3.1-70b", "fp8", pool("h200", "prefill") + "," + pool("h200", "decode"));
  EXPECT_EQ(pair.grade, Grade::published);
  EXPECT_TRUE(pair.text.starts_with("published claim: ")) << pair.text;
  EXPECT_GT(pair.ttft.median, alone.ttft.median);
  for (const auto figure : kFigures) EXPECT_GE((pair.*figure).median, (alone.*figure).median);
  const LoadedScenario shipped =
      load_scenario(PDSIM_SOURCE_DIR "/scenarios/p5en-1p1d-qwen3-32b.json", {}, {});
  EXPECT_EQ(evidence_of(plan_deployment(shipped), summary_of(0)).grade, Grade::published);
}

TEST(Evidence, BeyondWhatWasMeasured) {
  const double above = table()["extrapolated_above"];
  EXPECT_EQ(evidence("qwen3-32b", "bf16", pool("h200"), above).grade, Grade::same_gpu);
  const Evidence e = evidence("qwen3-32b", "bf16", pool("h200"), 0.4);
  EXPECT_EQ(e.grade, Grade::extrapolated);
  EXPECT_NE(e.text.find("40 % of the steps"), std::string::npos) << e.text;
  EXPECT_NE(e.to_do.find("pdsim fit"), std::string::npos);
  const Evidence inside = evidence("qwen3-32b", "bf16", pool("h200"));
  for (const auto figure : kFigures) EXPECT_GE((e.*figure).median, (inside.*figure).median);
  // The runs of gpt-oss that were compared lay outside as well: their errors are those of such steps.
  EXPECT_EQ(evidence("gpt-oss-120b", "mxfp4", pool("h200"), 1).grade, Grade::measured_here);
  EXPECT_EQ(evidence("llama-3.1-70b", "fp8", pool("h200"), 1).grade, Grade::extrapolated);
  // Handing over as well does not make it better.
  EXPECT_EQ(evidence("qwen3-32b", "bf16", pool("h200", "prefill") + "," + pool("h200", "decode"), 0.4).grade,
            Grade::extrapolated);
}

TEST(Evidence, DataSheets) {
  const Evidence b300 = evidence("qwen3-32b", "bf16", pool("b300"), 1);
  EXPECT_EQ(b300.grade, Grade::datasheet);
  EXPECT_NE(b300.text.find("no kernel of b300 was measured"), std::string::npos) << b300.text;
  const Evidence b200 = evidence("qwen3-32b", "bf16", pool("b200"));
  const Evidence h20 = evidence("qwen3-32b", "bf16", pool("h20"), 1);
  for (const auto figure : kFigures) {
    EXPECT_GE((b300.*figure).median, (b200.*figure).median);
    EXPECT_GT((h20.*figure).median, (b300.*figure).median);  // across architectures
  }
  EXPECT_GT(h20.tpot.median, 0.2);  // what scaling costs there: models/README.md
}

TEST(Evidence, TheWeakestPoolDecides) {
  const auto mixed = [](const std::string& prefill, const std::string& decode) {
    return evidence("llama-3.1-70b", "fp8", pool(prefill, "prefill") + "," + pool(decode, "decode"));
  };
  const Evidence both = mixed("h200", "h100"), other = mixed("h100", "h200");
  EXPECT_EQ(both.grade, Grade::published);
  for (const auto figure : kFigures) {
    EXPECT_EQ((both.*figure).median, (other.*figure).median);
    EXPECT_GE((both.*figure).median, (mixed("h200", "h200").*figure).median);
    EXPECT_GE((both.*figure).median, (mixed("h100", "h100").*figure).median);
  }
}

// Overheads of another engine stand for that engine, whose runs missed TTFT far more.
TEST(Evidence, AnotherEnginesOverheads) {
  const Evidence e =
      evidence("llama-3.1-70b", "fp8", pool("h200", "colocated", 4, R"({"overheads": "sglang"})"));
  EXPECT_EQ(e.grade, Grade::same_gpu);
  EXPECT_NE(e.text.find("SGLang"), std::string::npos) << e.text;
  EXPECT_GT(e.ttft.median, evidence("llama-3.1-70b", "fp8", pool("h200")).ttft.median);
}

// A step that verifies drafts has rows that no table has.
TEST(Evidence, OfARunItself) {
  RunSpec spec;
  spec.file = "made";
  spec.text = R"({"name": "made", "model": "llama-3.1-70b", "weights_dtype": "fp8",
    "pools": [{"role": "colocated", "gpu": "h200", "tensor_parallel": 4, "engine": {"speculative":
      {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}}}],
    "workload": {"synthetic": {"requests": 4, "isl": 64, "osl": 32, "concurrency": 2}}})";
  TraceStore traces;
  const RunOutcome drafting = run(spec, traces);
  EXPECT_EQ(evidence_of(drafting.deployment, *drafting.summary).grade, Grade::extrapolated);
  spec.text = std::regex_replace(spec.text, std::regex(R"("speculative":\s*\{[^}]*\})"), "");
  const RunOutcome plain = run(spec, traces);
  EXPECT_EQ(evidence_of(plain.deployment, *plain.summary).grade, Grade::measured_here);
}

TEST(Evidence, WhichErrorGoesWithAFigure) {
  Evidence e;
  e.ttft.median = 0.3;
  e.tpot.median = 0.2;
  e.throughput.median = 0.1;
  for (const char* path :
       {"latency_ms.ttft.p95", "stages_ms.router.mean", "stages_ms.prefill.mean",
        "stages_ms.prefill_queue.p50", "stages_ms.reuse_transfer.mean", "stages_ms.handoff_dispatch.mean",
        "stages_ms.decode_admission.p99", "stages_ms.transfer_wire.mean", "stages_ms.first_token.mean",
        "stages_ms.failed_attempts.mean", "transfers.wire_ms.mean", "goodput.slo.ttft_ms.p95.value",
        "latency_ms.e2e.mean"}) {
    EXPECT_EQ(&error_for(e, path), &e.ttft) << path;
  }
  for (const char* path : {"latency_ms.tpot.mean", "latency_ms.itl.p99", "stages_ms.decode.mean",
                           "goodput.slo.tpot_ms.p95.value"}) {
    EXPECT_EQ(&error_for(e, path), &e.tpot) << path;
  }
  for (const char* path : {"goodput.requests_per_s", "goodput.fraction", "cost.usd_per_request_in_slo",
                           "cost.usd_per_million_output_tokens", "throughput.output_tokens_per_s_per_gpu"}) {
    EXPECT_EQ(&error_for(e, path), &e.throughput) << path;
  }
  e.tpot.median = 0.4;
  EXPECT_EQ(&error_for(e, "latency_ms.e2e.mean"), &e.tpot);
}

// The figures in the sentence are those in force, whichever part of the run they are from.
TEST(Evidence, TheTextHasTheErrorsInForce) {
  const std::string pair = pool("h200", "prefill") + "," + pool("h200", "decode");
  const std::string mixed = pool("h200", "prefill") + "," + pool("h100", "decode");
  for (const Evidence& e :
       {evidence("llama-3.1-70b", "fp8", pool("h200")), evidence("llama-3.1-70b", "fp8", pair),
        evidence("qwen3-32b", "bf16", pair), evidence("qwen3-32b", "bf16", mixed),
        evidence("qwen3-32b", "bf16", pair, 0.4), evidence("qwen3-32b", "bf16", pool("h20"), 1)}) {
    char expected[200];
    std::snprintf(expected, sizeof expected,
                  "; taken to miss TTFT by %.1f %% in the median, TPOT by %.1f %% and throughput by %.1f %%",
                  100 * e.ttft.median, 100 * e.tpot.median, 100 * e.throughput.median);
    EXPECT_TRUE(e.text.ends_with(expected)) << e.text << "\n" << expected;
    EXPECT_EQ(std::ranges::count(e.text, '%'), e.grade == Grade::extrapolated ? 4 : 3) << e.text;
  }
  // Handing over was seen to miss TPOT by less than the runs on this GPU do.
  EXPECT_EQ(evidence("qwen3-32b", "bf16", pair).tpot.median,
            evidence("qwen3-32b", "bf16", pool("h200")).tpot.median);
}

// TensorRT-LLM has no run on such a GPU: what is known is what scaling costs over kernels.
TEST(Evidence, RowsOfKernelsAreNoRuns) {
  const Evidence e =
      evidence("llama-3.1-70b", "fp8", pool("b300", "colocated", 4, R"({"overheads": "trtllm"})"));
  EXPECT_EQ(e.grade, Grade::datasheet);
  for (const auto figure : kFigures) {
    EXPECT_EQ((e.*figure).n, 0);
    EXPECT_GT((e.*figure).rows, 1000);
    EXPECT_TRUE((e.*figure).known());
  }
  EXPECT_EQ(e.text.find("runs"), std::string::npos) << e.text;
}

// The table has what every lookup falls back on, errors in order, and no key twice.
TEST(Evidence, TheShippedTableIsWhole) {
  const json document = table();
  EXPECT_EQ(document["schema"], "pdsim.evidence/1");
  std::set<std::tuple<std::string, std::string, std::string, std::string, std::string>> keys;
  for (const json& entry : document["grades"]) {
    const auto text = [&](const char* key) { return entry.value(key, ""); };
    EXPECT_TRUE(
        keys.emplace(text("grade"), text("engine"), text("gpu"), text("model"), text("weights")).second)
        << entry.dump();
    for (const char* figure : {"ttft", "tpot", "throughput"}) {
      const json& error = entry[figure];
      if (error["n"] == 0 && !error.contains("rows")) continue;
      EXPECT_NE(error["n"] == 0, !error.contains("rows")) << "rows of kernels are no runs: " << entry.dump();
      EXPECT_LE(error["n"], entry["runs"].get<int>() > 0 ? 1000 : 0) << entry.dump();
      EXPECT_LE(error["median"], error["p90"]) << entry.dump();
      EXPECT_LE(std::abs(error["bias"].get<double>()), error["p90"].get<double>()) << entry.dump();
    }
  }
  for (const char* engine : {"vllm", "sglang", "trtllm"}) {
    for (const char* grade : {"same GPU, other model", "extrapolated", "datasheet"}) {
      EXPECT_TRUE(keys.contains({grade, engine, "", "", ""})) << grade << ", " << engine;
    }
  }
  EXPECT_TRUE(keys.contains({"published claim", "", "", "", ""}));
}

}  // namespace
}  // namespace pdsim
