// What three small runs printed when their numbers were last looked at: tests/golden/NAME.json and .csv.
//
// A difference is either a bug or a change of the model that was meant. In the latter case look at it, then
//   PDSIM_UPDATE_GOLDEN=1 ctest -R cluster.Golden
// writes the files anew (a fitted profile that changes changes them all), and the diff goes into the commit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/cluster/run.hpp"

namespace pdsim {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(PDSIM_SOURCE_DIR "/tests/golden/") + name;
  if (std::getenv("PDSIM_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  const std::string golden = read(path);
  ASSERT_FALSE(golden.empty()) << path << " is missing; PDSIM_UPDATE_GOLDEN=1 writes it";
  EXPECT_EQ(first_difference(golden, text), "") << path << ", as it was and as it is";
}

void expect_golden(const std::string& name, const Outcomes& o) {
  expect_golden(name + ".json", o.summary.dump(2) + "\n");
  expect_golden(name + ".csv", o.csv);
}

// Two prefill and two decode workers, tied arrivals, pulls, hits on both sides.
TEST(Golden, Disaggregated) {
  expect_golden("disaggregated", run_shipped(kDisaggregated, small_trace(40, 10, 3 * kSecond)));
}

// Three workers whose pools are too small: preemptions and evictions.
TEST(Golden, ColocatedUnderPressure) {
  Trace trace = small_trace(40, 40, kMillisecond);
  for (Request& request : trace.requests) request.output_tokens *= 4;
  const Outcomes o = run_shipped(kColocated, trace, {"pools.worker.engine.num_gpu_blocks_override=450"});
  EXPECT_GT(o.summary["cache"]["preemptions"].get<int>(), 0);
  expect_golden("colocated", o);
}

// A large MLA model on eight GPUs a side: latents, sparse attention, experts, all-reduce, many regions.
TEST(Golden, Glm5OnTwoNodes) {
  expect_golden("glm-5", run_shipped(kDisaggregated, small_trace(30, 2, kMillisecond),
                                     {"model=glm-5-fp8", "weights_dtype=fp8_block",
                                      "pools.prefill.replicas=1", "pools.decode.replicas=1",
                                      "pools.prefill.tensor_parallel=8", "pools.decode.tensor_parallel=8"}));
}

}  // namespace
}  // namespace pdsim
