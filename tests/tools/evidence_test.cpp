// Theory: models/evidence.json is what its command makes of the inputs that it names: whatever part of them
// is run again gives the part of the file that it belongs to. Errors are those of `validate serving`, row by
// row.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

using nlohmann::json;

constexpr const char* kPublished = PDSIM_SOURCE_DIR "/scenarios/published/";
constexpr const char* kFigures[] = {"ttft", "tpot", "throughput"};

Ran run_validate(const std::string& arguments) {
  return run("validate " + arguments);
}

// Two rows that were measured, one that cannot be simulated, and one of a GPU that nobody measured.
std::string points(const Folder& folder) {
  return folder.file("points.csv",
                     "model,gpu,engine,precision,tp,isl,osl,concurrency,rate_rps,ttft_ms,tpot_ms\n"
                     "llama-3.1-8b,h200,vllm,bf16,1,128,16,1,,20,5\n"
                     "llama-3.1-8b,h200,vllm,bf16,1,256,16,2,,30,6\n"
                     "llama-3.1-8b,h200,vllm,bf16,1,128,16,,,20,5\n"
                     "llama-3.1-8b,h20,vllm,bf16,1,128,16,1,,20,5\n");
}

const json& entry_of(const json& document, const std::string& grade, const std::string& gpu,
                     const std::string& model = "") {
  for (const json& entry : document["grades"]) {
    if (entry["grade"] == grade && entry.value("gpu", "") == gpu && entry.value("model", "") == model &&
        entry.value("engine", "vllm") == "vllm") {
      return entry;
    }
  }
  static const json none;
  return none;
}

TEST(EvidenceTable, IsWhatServingAndPublishedFind) {
  const Folder folder;
  const std::string table = points(folder);
  const Ran serving = run_validate("serving --json --quiet '" + table + "'");
  const Ran made =
      run_validate("evidence --quiet --serving '" + table + "' --published '" + kPublished + "posting.json'");
  ASSERT_EQ(made.status, 0) << made.err;
  ASSERT_EQ(serving.status, 0) << serving.err;
  const json document = json::parse(made.out), report = json::parse(serving.out);
  EXPECT_EQ(document["schema"], "pdsim.evidence/1");
  EXPECT_EQ(document["command"],
            "pdsim validate evidence --serving POINTS.csv --published scenarios/published/posting.json");
  ASSERT_EQ(document["groups"].size(), 2u);
  const json& here = entry_of(document, "measured here", "h200", "llama-3.1-8b");
  EXPECT_EQ(here["runs"], 2);
  const json& all = report["overall"];  // measured GPUs alone
  for (const char* figure : {"ttft", "tpot"}) {
    EXPECT_NEAR(here[figure]["median"].get<double>(), all[figure]["median_ape"].get<double>(), 1e-4);
    EXPECT_NEAR(here[figure]["p90"].get<double>(), all[figure]["p90_ape"].get<double>(), 1e-4);
    EXPECT_NEAR(here[figure]["bias"].get<double>(), all[figure]["bias"].get<double>(), 1e-4);
    EXPECT_EQ(entry_of(document, "same GPU, other model", "h200")[figure], here[figure]);
    EXPECT_EQ(entry_of(document, "same GPU, other model", "")[figure], here[figure]);
    // Too few rows: the p90 stands in.
    EXPECT_EQ(entry_of(document, "extrapolated", "h200")[figure]["median"], here[figure]["p90"]);
  }
  EXPECT_EQ(here["throughput"], (json{{"n", 0}}));
  // h20 is scaled across architectures: 27 % in the median of the kernels' rows.
  const json& h20 = entry_of(document, "datasheet", "h20");
  EXPECT_EQ(h20["runs"], 1);
  EXPECT_GE(h20["tpot"]["median"], 0.25);
  EXPECT_GE(h20["tpot"]["median"], here["tpot"]["median"]);
  // The parts of a hand-over that the simulator's constants are from say nothing of how well it predicts.
  EXPECT_TRUE(entry_of(document, "published claim", "").is_null());
  EXPECT_TRUE(document["published"].empty());
}

TEST(EvidenceTable, OfWholeLatenciesAndRatiosOfRunsThatHandOver) {
  const Folder folder;
  const Ran made = run_validate("evidence --quiet --serving '" + points(folder) + "' --published '" +
                                kPublished + "recompute-threshold.json'");
  const Ran published =
      run_validate("published --json --quiet '" + std::string(kPublished) + "recompute-threshold.json'");
  ASSERT_EQ(made.status, 0) << made.err;
  const json document = json::parse(made.out), report = json::parse(published.out);
  double least = 1, most = 0;
  for (const json& row : report["rows"]) {
    if (row["error"].is_null() || row["metric"].get<std::string>().find("TTFT") == std::string::npos)
      continue;
    const double error = std::abs(row["error"].get<double>());
    least = std::min(least, error);
    most = std::max(most, error);
  }
  const json& claim = entry_of(document, "published claim", "");
  EXPECT_EQ(claim["ttft"]["n"], 2);
  EXPECT_NEAR(claim["ttft"]["median"].get<double>(), (least + most) / 2, 1e-4);
  EXPECT_EQ(claim["throughput"]["n"], 2);
  EXPECT_EQ(claim["tpot"]["n"], 0);
  EXPECT_EQ(claim["runs"], 4);
}

// No row of an engine on any GPU that was scaled: its errors are what scaling costs, which no run measured.
TEST(EvidenceTable, RowsOfKernelsAreNoRuns) {
  const Folder folder;
  const Ran made = run_validate("evidence --quiet --serving '" + points(folder) +
                                "' --only gpu=h200 --published '" + kPublished + "posting.json'");
  ASSERT_EQ(made.status, 0) << made.err;
  const json h20 = entry_of(json::parse(made.out), "datasheet", "h20");
  EXPECT_EQ(h20["runs"], 0);
  EXPECT_EQ(h20["throughput"]["n"], 0);
  EXPECT_GT(h20["throughput"]["rows"], 1000);
  EXPECT_GT(h20["throughput"]["median"], 0);
}

TEST(EvidenceTable, BadInputWritesNothing) {
  const Folder folder;
  const std::string table = points(folder), out = folder / "out.json";
  const auto refused = [&](const std::string& arguments, const std::string& words) {
    const Ran ran = run_validate("evidence --quiet --out '" + out + "' " + arguments);
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_NE(ran.err.find(words), std::string::npos) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  const std::string published = std::string(" --published '") + kPublished + "posting.json'";
  refused("--serving '" + (folder / "none.csv") + "'" + published, "none.csv");
  refused("--serving '" + table + "' --published '" + (folder / "none") + "'", "does not exist");
  refused("--serving '" + table + "' --only gpus=h200" + published, "did you mean");
  refused("--serving '" + table + "'", "--published");
  const Ran kept = run_validate("evidence --quiet --out '" + out + "' --serving '" + table + "'" + published);
  EXPECT_EQ(kept.status, 0) << kept.err;
  EXPECT_TRUE(kept.out.empty());
  EXPECT_TRUE(json::parse(bytes_of(out)).contains("grades"));
}

// A part of the inputs run again: one model on one GPU, one published result. The figures are the same bytes
// on any machine; 1e-9 is there for their being read as numbers.
TEST(EvidenceTable, TheShippedOneIsWhatItsCommandMakes) {
  const std::string table = PDSIM_SOURCE_DIR "/../shared/validation/e2e.csv";
  if (!std::filesystem::exists(table)) GTEST_SKIP() << "no " << table;
  const json shipped = json::parse(bytes_of(PDSIM_SOURCE_DIR "/models/evidence.json"));
  const Ran made = run_validate(
      "evidence --quiet --serving '" + table +
      "' --only engine=vllm --only gpu=h200_sxm --only model=meta-llama/Llama-3.1-70B --published '" +
      kPublished + "recompute-threshold.json'");
  ASSERT_EQ(made.status, 0) << made.err;
  const json document = json::parse(made.out);
  EXPECT_EQ(document["inputs"]["serving"], shipped["inputs"]["serving"]);
  EXPECT_EQ(document["inputs"]["rules"], shipped["inputs"]["rules"]);
  EXPECT_EQ(document["extrapolated_above"], shipped["extrapolated_above"]);
  for (const auto& [file, digest] : document["inputs"]["published"].items()) {
    EXPECT_EQ(digest, shipped["inputs"]["published"][file]) << file;
  }
  std::size_t compared = 0;
  const auto compare = [&](const json& mine, const json& its) {
    for (const char* figure : kFigures) {
      for (const auto& [key, value] : mine[figure].items()) {
        EXPECT_NEAR(value.get<double>(), its[figure][key].get<double>(), 1e-9) << mine.dump();
        ++compared;
      }
    }
  };
  for (const json& group : document["groups"]) {
    for (const json& other : shipped["groups"]) {
      if (group["model"] == other["model"] && group["gpu"] == other["gpu"] &&
          group["engine"] == other["engine"] && group["weights"] == other["weights"] &&
          group["mode"] == other["mode"]) {
        EXPECT_EQ(group["runs"], other["runs"]);
        compare(group, other);
      }
    }
  }
  for (const json& other : shipped["published"]) {
    if (other["name"] == "recompute-threshold") compare(document["published"].at(0), other);
  }
  EXPECT_EQ(compared, 12u + 9u);
  EXPECT_EQ(entry_of(document, "measured here", "h200", "llama-3.1-70b"),
            entry_of(shipped, "measured here", "h200", "llama-3.1-70b"));
}

}  // namespace
}  // namespace pdsim
