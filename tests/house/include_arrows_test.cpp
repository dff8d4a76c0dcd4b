// The rules of the house that no compiler holds: which folder may include which, what stays out of headers,
// what may not reach a simulated result, and that no two types share a name. The sources are read as text, so
// a rule is one line of a table.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
using std::string;
using std::string_view;

// A folder, and all that it may include besides itself. Rows name only rows above them, and that alone keeps
// the arrows free of cycles; a folder without a row is an error, so this is always the whole house.
struct Folder {
  string_view name, may_include;
};
constexpr Folder kHouse[] = {
    {"sim/core", ""},
    {"kernels", "sim/core"},  // reaches models through a file, never through a header
    {"traces", "sim/core"},
    {"models", "sim/core"},
    {"sim/scenario", "sim/core traces models"},  // names of trace formats; a network profile's defaults
    {"sim/network", "sim/core"},
    {"sim/serving", "sim/core models"},
    {"sim/transfer", "sim/core sim/scenario sim/network"},  // READ or WRITE; the knobs of retention
    {"sim/routing", "sim/core sim/serving"},
    {"sim/metrics", "sim/core traces models sim/scenario"},
    {"sim/cluster",
     "sim/core traces models sim/scenario sim/network sim/serving sim/transfer sim/routing sim/metrics"},
    {"tools", "sim traces models kernels"},
};

// Headers that cost seconds in every unit that sees them: .cpp files only.
constexpr string_view kHeavy[] = {"nlohmann/json.hpp", "CLI/",           "Eigen/", "boost/",
                                  "simdjson",          "models/json.hpp"};
// The exception is heavy itself by the list above: its class is a view of nlohmann's.
constexpr string_view kHeavyHeader = "models/json.hpp";

constexpr string_view kCuda[] = {"cuda", "cub/", "thrust/", "cooperative_groups", "nccl", "cublas", "mma.h"};

// What no line may contain, comments included, in files under `folder` other than those that begin with
// `except`.
struct Banned {
  string_view text, folder, except, why;
};
constexpr string_view kFit = "models/fit";  // .cpp and folder: make a profile, a file, before any simulation
constexpr Banned kBanned[] = {
    {"TODO", "", "", "unfinished work is an issue, not a comment"},
    {"FIXME", "", "", "unfinished work is an issue, not a comment"},
    {"/home/", "", "", "a path of one machine"},
    {"/root"
     "/",
     "", "", "a path of one machine"},
    {"/work"
     "/",
     "", "", "a path of one machine"},
    {"_distribution<", "", "", "differs between standard libraries; see sim/core/random.hpp"},
    // But where numpy's own generator is what is asked for: the standard fixes its values.
    {"std::mt19937", "", "traces/generate.cpp",
     "ties every draw to those before it; see sim/core/random.hpp"},
    {"std::random_device", "", "", "gives no run twice; see sim/core/random.hpp"},
    {"steady_clock", "sim/", "", "the wall clock reaches no result"},
    {"system_clock", "sim/", "", "the wall clock reaches no result"},
    {"std::exp(", "sim/", "", "libm differs between machines; see sim/core/math.hpp"},
    {"std::log(", "sim/", "", "libm differs between machines; see sim/core/math.hpp"},
    {"std::pow(", "sim/", "", "libm differs between machines; see sim/core/math.hpp"},
    {"std::exp(", "models/", kFit, "libm differs between machines; see sim/core/math.hpp"},
    {"std::log(", "models/", kFit, "libm differs between machines; see sim/core/math.hpp"},
    {"std::pow(", "models/", kFit, "libm differs between machines; see sim/core/math.hpp"},
};

// Whether a path is a folder or lies in it.
bool inside(string_view path, string_view folder) {
  return path.starts_with(folder) && (path.size() == folder.size() || path[folder.size()] == '/');
}

const Folder* folder_of(string_view path) {
  const auto* row = std::ranges::find_if(kHouse, [&](const Folder& f) { return inside(path, f.name); });
  return row == std::end(kHouse) ? nullptr : row;
}

std::vector<string_view> words(string_view text) {
  std::vector<string_view> result;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    result.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

bool may_include(const Folder& from, string_view header) {
  return inside(header, from.name) || std::ranges::any_of(words(from.may_include), [&](string_view allowed) {
           return inside(header, allowed);
         });
}

// What an #include line includes, quotes or brackets and all; "" for other lines.
string_view included(string_view line) {
  const auto skip = [&] { line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size())); };
  skip();
  if (!line.starts_with('#')) return "";
  line.remove_prefix(1);
  skip();
  if (!line.starts_with("include")) return "";
  line.remove_prefix(7);
  skip();
  return line.substr(0, line.find_first_of("\">", 1) + 1);
}

// Everything wrong with one file, a line "path:line: what" each. `path` is relative to the repository root.
string faults(const string& path, string_view text) {
  string result;
  int line_number = 0;
  const auto fault = [&](string_view what) {
    result += path + ":" + std::to_string(line_number) + ": " + string(what) + "\n";
  };
  const Folder* folder = folder_of(path);
  if (folder == nullptr) fault("its folder has no row in kHouse");
  const bool is_header = path.ends_with(".hpp") || path.ends_with(".cuh");
  const string_view stem = string_view(path).substr(0, path.rfind('.'));

  while (!text.empty()) {
    const string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    ++line_number;

    const string_view target = included(line);
    const string_view header = target.empty() ? "" : target.substr(1, target.size() - 2);
    const auto begins = [&](string_view prefix) { return header.starts_with(prefix); };
    if (line_number == 1 && !line.starts_with("//") && !line.starts_with("/*") &&
        header.substr(0, header.rfind('.')) != stem) {
      fault("opens neither with why the file exists nor with its own header, which says so");
    }
    if (target.starts_with('"') && folder != nullptr && !may_include(*folder, header)) {
      fault("includes " + string(header) + "; " + string(folder->name) +
            " may include: " + (folder->may_include.empty() ? "nothing else" : string(folder->may_include)));
    }
    if (is_header && path != kHeavyHeader && std::ranges::any_of(kHeavy, begins)) {
      fault("a header includes " + string(header) + ", which is heavy: .cpp files only");
    }
    if (!inside(path, "kernels") && !inside(path, "tools") && std::ranges::any_of(kCuda, begins)) {
      fault("includes " + string(header) + ": CUDA stays in kernels");
    }
    for (const Banned& banned : kBanned) {
      if (path.starts_with(banned.folder) && (banned.except.empty() || !path.starts_with(banned.except)) &&
          line.find(banned.text) != line.npos) {
        fault("contains " + string(banned.text) + ": " + string(banned.why));
      }
    }
  }
  return result;
}

const fs::path kRoot = PDSIM_SOURCE_DIR;

std::vector<fs::path> sources() {
  std::vector<fs::path> found;
  for (const char* top : {"sim", "models", "traces", "kernels", "tools"}) {
    if (!fs::exists(kRoot / top)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(kRoot / top)) {
      const string extension = entry.path().extension().string();
      if (extension == ".hpp" || extension == ".cpp" || extension == ".cu" || extension == ".cuh") {
        found.push_back(entry.path());
      }
    }
  }
  EXPECT_GT(found.size(), 50u) << "the walk did not find the sources";
  return found;
}

string text_of(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The types that a file defines where other files could meet them, as "namespace::name": what begins in
// column 0 outside anonymous namespaces, which is how clang-format lays them out.
std::vector<string> types_of(string_view text) {
  std::vector<string> spaces, types;
  while (!text.empty()) {
    string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.starts_with("}  // namespace") && !spaces.empty()) spaces.pop_back();
    if (line.starts_with("namespace") && line.ends_with('{')) {
      spaces.emplace_back(line == "namespace {" ? "" : words(line)[1]);
    }
    if (std::ranges::find(spaces, "") != spaces.end()) continue;
    std::vector<string_view> said = words(line);
    if (said.empty() || (said[0] != "struct" && said[0] != "class" && said[0] != "enum")) continue;
    if (said.size() > 1 && said[1] == "class") said.erase(said.begin());
    const bool defines = line.find('{') != line.npos || !line.ends_with(';');
    if (!defines || said.size() < 2 || said[1].find("::") != said[1].npos) continue;
    string type;
    for (const string& space : spaces) type += space + "::";
    types.push_back(type.append(said[1].substr(0, said[1].find_first_of(":{;"))));
  }
  return types;
}

TEST(House, ArrowsPointOneWay) {
  for (const Folder* row = std::begin(kHouse); row != std::end(kHouse); ++row) {
    for (const string_view allowed : words(row->may_include)) {
      EXPECT_TRUE(
          std::any_of(std::begin(kHouse), row, [&](const Folder& f) { return inside(f.name, allowed); }))
          << row->name << " may include " << allowed << ", which has no row above it";
    }
  }
}

TEST(House, EverySourceFileKeepsTheRules) {
  for (const fs::path& path : sources()) {
    EXPECT_EQ(faults(path.lexically_relative(kRoot).generic_string(), text_of(path)), "");
  }
}

// Two types of one name in one program break the one-definition rule, of which no compiler or linker speaks:
// the linker keeps one of two vectors of them, and which one depends on the optimisation.
TEST(House, EachTypeHasANameOfItsOwn) {
  std::map<string, string> owners;
  for (const fs::path& path : sources()) {
    const string file = path.lexically_relative(kRoot).generic_string();
    for (const string& type : types_of(text_of(path))) {
      const auto [owner, first] = owners.emplace(type, file);
      EXPECT_TRUE(first || owner->second == file)
          << type << " is defined in " << owner->second << " and " << file;
    }
  }
  EXPECT_GT(owners.size(), 100u) << "the scan did not find the types";

  const std::vector<string> found = types_of(
      "struct Forward;\nnamespace pdsim {\nstruct Range {\nenum class Kind : int { a };\nclass Reader::Part "
      "{\n"
      "namespace {\nstruct Own {\n}  // namespace\nclass Late final {\n}  // namespace pdsim\nstruct Out "
      "{};\n");
  EXPECT_EQ(found, (std::vector<string>{"pdsim::Range", "pdsim::Kind", "pdsim::Late", "Out"}));
}

// The check itself must be able to fail: each rule, broken once, and its nearest lawful neighbour.
TEST(House, EachRuleCanBeBroken) {
  const auto breaks = [](const string& path, const string& line, string_view what) {
    const string found = faults(path, "// why\n" + line + "\n");
    return found.starts_with(path + ":2: ") && found.find(what) != string::npos;
  };
  const auto keeps = [](const string& path, const string& line) {
    return faults(path, "// why\n" + line).empty();
  };

  EXPECT_TRUE(breaks("sim/core/x.hpp", "#include \"models/model.hpp\"", "may include: nothing else"));
  EXPECT_TRUE(
      breaks("models/x.cpp", "  #  include \"sim/serving/engine.hpp\"", "models may include: sim/core"));
  EXPECT_TRUE(breaks("sim/network/x.cpp", "#include \"sim/networks/x.hpp\"", "may include: sim/core"));
  EXPECT_TRUE(breaks("sim/core/x.cpp", "#include \"x.hpp\"", "includes x.hpp"));
  EXPECT_TRUE(keeps("sim/cluster/x.cpp", "#include \"sim/network/network.hpp\""));
  EXPECT_NE(faults("sim/new/x.cpp", "// why\n"), "");

  EXPECT_TRUE(breaks("tools/pdsim/x.hpp", "#include <CLI/CLI.hpp>", "heavy"));
  EXPECT_TRUE(breaks("models/x.hpp", "#include \"models/json.hpp\"", "heavy"));
  EXPECT_TRUE(keeps("tools/pdsim/x.cpp", "#include <CLI/CLI.hpp>"));
  EXPECT_TRUE(keeps("models/x.hpp", "#include <nlohmann/json_fwd.hpp>"));

  EXPECT_TRUE(breaks("sim/serving/x.cpp", "#include <cuda_runtime.h>", "CUDA stays in kernels"));
  EXPECT_TRUE(keeps("kernels/x.cu", "#include <cuda_runtime.h>"));

  EXPECT_TRUE(breaks("sim/core/x.cpp", "double y = std::log(x);", "libm"));
  EXPECT_TRUE(breaks("models/x.cpp", "double y = std::log(x);", "libm"));
  EXPECT_TRUE(keeps("models/fit.cpp", "double y = std::log(x);"));
  EXPECT_TRUE(keeps("models/fit/x.cpp", "double y = std::log(x);"));
  EXPECT_TRUE(breaks("traces/x.cpp", "// TODO: later", "unfinished"));
  EXPECT_TRUE(breaks("tools/x.cpp", "open(\"/home/me/trace\");", "one machine"));

  EXPECT_NE(faults("sim/core/x.hpp", "#pragma once\n"), "");
  EXPECT_NE(faults("sim/core/x.cpp", "#include \"sim/core/y.hpp\"\n"), "");
  EXPECT_EQ(faults("sim/core/x.cpp", "#include \"sim/core/x.hpp\"\n"), "");
}

}  // namespace
