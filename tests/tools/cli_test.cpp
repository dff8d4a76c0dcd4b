// Theory: whatever goes wrong is one line on stderr and the right status, and nothing has been written;
// results are on stdout alone; the samples are what their README says made them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/tools/run.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

const std::string kRow = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1]}\n";
const std::string kLateRow =
    "{\"timestamp\": 500, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1]}\n";

TEST(CommandLine, VersionAndHelpGoToStdout) {
  const Folder folder;
  const Ran version = run(folder, "--version");
  EXPECT_EQ(version.status, 0);
  EXPECT_TRUE(version.out.starts_with("pdsim ")) << version.out;
  EXPECT_NE(version.out.find("CUDA"), std::string::npos);
  EXPECT_EQ(std::count(version.out.begin(), version.out.end(), '\n'), 1);
  EXPECT_EQ(run(folder, "--help").status, 0);
}

// Every subcommand, theirs too, has a help with an example. Their names come from the help itself.
void expect_examples(const Folder& folder, const std::string& command) {
  const Ran help = run(folder, command + " --help");
  EXPECT_EQ(help.status, 0) << command;
  EXPECT_EQ(help.err, "");
  const std::size_t list = help.out.find("\nSubcommands:\n");
  if (!command.empty()) {
    EXPECT_NE(help.out.find("Example"), std::string::npos) << command;
  }
  if (list == std::string::npos) return;
  std::istringstream lines(help.out.substr(list + 14));
  for (std::string line; std::getline(lines, line) && line.starts_with("  ");) {
    if (line.starts_with("   ")) continue;  // a sentence goes on
    std::string name;
    std::istringstream(line) >> name;
    expect_examples(folder, command + " " + name);
  }
}

TEST(CommandLine, EveryCommandHasAnExample) {
  expect_examples(Folder(), "");
}

struct Refused {
  const char* arguments;
  const char* expected;  ///< within the one line
};

TEST(CommandLine, ErrorsAreOneLineAndStatus2AndNothingIsWritten) {
  const Refused cases[] = {
      {"", "subcommand"},
      {"trase", "'trase' is not known here (did you mean 'trace'?) ('pdsim --help'"},
      {"trace", "subcommand"},
      {"trace stat", "(did you mean 'stats'?) ('pdsim trace --help'"},
      {"trace stats", "required"},
      {"trace stats good", "--format is required"},
      {"trace stats good --format mooncake --jsn", "(did you mean '--json'?) ('pdsim trace stats --help'"},
      {"trace stats good --format moncake",
       "good: trace format 'moncake' is not known (did you mean 'mooncake'?)"},
      {"trace stats none --format mooncake", "none: cannot be opened"},
      {"trace stats . --format mooncake", ".: is a directory"},
      {"trace stats bad --format mooncake --json", "bad:2: not JSON"},
      {"trace stats - --format mooncake", "stdin: the trace is empty"},
      {"trace convert bad --format mooncake --to azure --out new", "bad:2: not JSON"},
      {"trace convert good --format mooncake --to azur --out new",
       "--to: trace format 'azur' is not known (did you"},
      {"trace convert good --format mooncake --to azure --out none/new", "cannot be written"},
      {"trace scale good --format mooncake --out new", "Exactly 1 option"},
      {"trace scale good --format mooncake --out new --rate 1 --time-scale 1", "Exactly 1 option"},
      {"trace scale good --format mooncake --out new --rate 0", "--rate: is 0, expected above 0"},
      {"trace scale good --format mooncake --out new --time-scale -2",
       "--time-scale: is -2, expected above 0"},
      {"trace scale one --format mooncake --out new --rate 2", "one: all requests arrive at once"},
      {"trace generate --out new --requests many", "--requests"},
      {"trace generate --out new --requests 0", "generate: requests: is 0, expected at least 1"},
      {"trace generate --out new --output-tokens mena=3", "--output-tokens: 'mena=3' is not understood"},
      {"trace generate --out new --output-tokens max=0.5", "--output-tokens: 'max=0.5' is not understood"},
      {"trace generate --out new --output-tokens max=5,min=9", "generate: output: max: is 5"},
      {"trace generate --out new --format parquet", "--format: trace format 'parquet' is not known"},
  };
  const Folder folder;
  folder.file("good", kRow + kLateRow);
  folder.file("one", kRow);
  folder.file("bad", kRow + "no\n");
  for (const auto& [arguments, expected] : cases) {
    SCOPED_TRACE(arguments);
    const Ran ran = run(folder, arguments);
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_NE(ran.err.find(expected), std::string::npos) << ran.err;
    const std::string last = ran.err.substr(ran.err.rfind('\n', ran.err.size() - 2) + 1);
    EXPECT_TRUE(last.starts_with("pdsim: ")) << ran.err;
    EXPECT_EQ(folder.files(), 3u);
  }
}

TEST(CommandLine, ResultsAreAloneOnStdout) {
  const Folder folder;
  folder.file("good", kRow + kLateRow);
  const Ran json = run(folder, "trace stats good --format mooncake --json");
  EXPECT_EQ(json.status, 0);
  EXPECT_EQ(nlohmann::json::parse(json.out)["schema"], "pdsim.trace-stats/1");
  EXPECT_NE(json.err.find("rows: 2 read, 2 used, 0 set aside"), std::string::npos);
  EXPECT_EQ(run(folder, "trace stats good --format mooncake --json --quiet").err, "");
  const Ran copy = run(folder, "trace convert good --format mooncake --to mooncake --out - --quiet");
  EXPECT_EQ(copy.out, kRow + kLateRow);
  EXPECT_EQ(copy.err, "");
  const Ran lossy = run(folder, "trace convert good --format mooncake --to azure --out a.csv --quiet");
  EXPECT_EQ(lossy.err, "a.csv: not in the azure format: prefix identity (hash ids)\n");
  const Ran scaled = run(folder, "trace scale good --format mooncake --rate 4 --out -");
  EXPECT_NE(scaled.out.find("\"timestamp\": 250,"), std::string::npos) << scaled.out;
}

// "-" is stdin or stdout wherever a file is named: the same as the file, and none of that name.
TEST(CommandLine, ADashIsStdinOrStdout) {
  const Folder folder;
  folder.file("table.csv", "op,dtype,kernel,latency_us,m,n,k\ngemm,bf16,cublas,12,64,4096,4096\n");
  folder.file("points.csv",
              "model,gpu,engine,precision,tp,isl,osl,concurrency,ttft_ms,tpot_ms\n"
              "llama-3.1-8b,h200,vllm,bf16,1,128,16,1,20,5\n");
  const std::string rules = PDSIM_SOURCE_DIR "/scenarios/serving/rules.json",
                    profile = PDSIM_SOURCE_DIR "/models/profiles/h200.json",
                    published = PDSIM_SOURCE_DIR "/scenarios/published/posting.json";
  const std::size_t files = folder.files();
  const auto same = [&](const std::string& arguments, const std::string& dashed, const std::string& input) {
    SCOPED_TRACE(dashed);
    const Ran named = run(folder, arguments), piped = run(folder, dashed + " <'" + input + "'");
    EXPECT_EQ(piped.status, 0) << piped.err;
    EXPECT_EQ(piped.out, named.out);
    EXPECT_FALSE(piped.out.empty());
    EXPECT_EQ(folder.files(), files);
  };
  same("validate kernels --worst 0 --gpu h200 table.csv", "validate kernels --worst 0 --gpu h200 -",
       folder / "table.csv");
  same("cost gemm --gpu h200 m=64 n=8192 k=8192 dtype=bf16",
       "cost gemm --gpu h200 m=64 n=8192 k=8192 dtype=bf16 --profile -", profile);
  same("validate serving points.csv --quiet", "validate serving points.csv --quiet --rules -", rules);
  same("validate published --quiet --json " + published, "validate published --quiet --json -", published);
  const std::string evidence = "validate evidence --quiet --serving points.csv --published " + published;
  same(evidence, evidence + " --out -", "/dev/null");
  const Ran csv = run(folder, "validate kernels --gpu h200 table.csv --csv -");
  EXPECT_TRUE(csv.out.starts_with("place,op,dtype,kernel,")) << csv.out;
  EXPECT_EQ(std::count(csv.out.begin(), csv.out.end(), '\n'), 2) << csv.out;
  EXPECT_EQ(folder.files(), files);
  EXPECT_EQ(run(folder, "validate kernels --gpu h200 table.csv --csv - --json").status, 2);
}

TEST(CommandLine, AFullDiskIsNoticedAndAClosedPipeIsQuiet) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const Folder folder, hidden;
  folder.file("t", kRow);
  for (const char* arguments :
       {"--version >/dev/full", "trace generate --out - >/dev/full", "trace generate --out /dev/full",
        "trace stats t --format mooncake >/dev/full"}) {
    SCOPED_TRACE(arguments);
    const std::string command =
        "cd '" + (folder / "") + "' && '" PDSIM_BINARY "' " + arguments + " 2>'" + (hidden / "err") + "'";
    EXPECT_EQ(status_of(std::system(command.c_str())), 2);
    EXPECT_NE(bytes_of(hidden / "err").find("cannot be written: No space left on device"), std::string::npos);
  }
  const std::string pipe = "('" PDSIM_BINARY "' trace generate --requests 20000 --out -; echo $? >'" +
                           (hidden / "status") + "') 2>'" + (hidden / "err") + "' | head -n 1 >/dev/null";
  EXPECT_EQ(std::system(pipe.c_str()), 0);
  EXPECT_EQ(bytes_of(hidden / "status"), std::to_string(128 + SIGPIPE) + "\n");
  EXPECT_EQ(bytes_of(hidden / "err"), "");
}

// A reader that waits for its next row ends at Ctrl-C, with the status that shells expect.
TEST(CommandLine, CtrlCEndsALongRun) {
  int in[2];
  ASSERT_EQ(pipe(in), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    dup2(in[0], STDIN_FILENO);
    close(in[0]);
    close(in[1]);
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    execl(PDSIM_BINARY, PDSIM_BINARY, "trace", "stats", "-", "--format", "mooncake",
          static_cast<char*>(nullptr));
    _exit(127);
  }
  close(in[0]);
  ASSERT_EQ(write(in[1], kRow.data(), kRow.size()), static_cast<ssize_t>(kRow.size()));
  int waiting = 1;
  for (int tries = 0; tries < 500 && waiting > 0; ++tries) {  // until the row has been taken
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_EQ(ioctl(in[1], FIONREAD, &waiting), 0);
  }
  EXPECT_EQ(waiting, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  kill(child, SIGINT);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status_of(status), 130);
  EXPECT_TRUE(WIFEXITED(status));  // it ended, it was not killed
  close(in[1]);
}

TEST(Samples, AreWhatTheirReadmeSaysMadeThem) {
  const std::string samples = PDSIM_SOURCE_DIR "/traces/samples/";
  std::istringstream readme(bytes_of(samples + "README.md"));
  const Folder folder;
  int made = 0;
  for (std::string line; std::getline(readme, line);) {
    if (!line.starts_with("pdsim trace generate ")) continue;
    ASSERT_EQ(run(folder, line.substr(6)).status, 0) << line;
    const std::string file = line.substr(line.rfind(' ') + 1);
    EXPECT_TRUE(bytes_of(folder / file) == bytes_of(samples + file)) << file;
    ++made;
  }
  EXPECT_EQ(made, 3);
}

}  // namespace
}  // namespace pdsim
