// `pdsim schema NAME`: the JSON Schema of a document that pdsim reads or writes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/data.hpp"
#include "sim/core/error.hpp"
#include "sim/scenario/load.hpp"
#include "tools/pdsim/commands.hpp"

namespace pdsim {
namespace {

std::string shipped(const char* file) {
  const std::string path = (data_dir() / "scenarios" / file).string();
  std::ifstream in(path, std::ios::binary);
  if (!in) throw InputError(path, "cannot be read, expected a schema that pdsim ships");
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Schema {
  std::string_view name;
  std::string_view id;
  std::string_view sentence;
  std::string (*text)();
};

constexpr Schema kSchemas[] = {
    {"scenario", "pdsim.scenario/1", "a cluster and its requests: what replay, compare and describe read",
     scenario_schema},
    {"summary", "pdsim.summary/1", "summary.json: what a replay found",
     [] { return shipped("summary.schema.json"); }},
};

int print_schema(const std::string& name) {
  std::vector<std::string_view> names;
  for (const Schema& schema : kSchemas) {
    if (name == schema.name || name == schema.id) {
      const std::string text = schema.text();
      std::fwrite(text.data(), 1, text.size(), stdout);
      return kDone;
    }
    names.push_back(schema.name);
  }
  throw InputError("schema", fmt::format("there is no '{}', expected one of {}{}", name,
                                         fmt::join(names, ", "), did_you_mean(name, names)));
}

}  // namespace

void add_schema(CLI::App& app, Command& run) {
  std::string known;
  for (const Schema& schema : kSchemas) {
    known += fmt::format("  {:<10} {:<18} {}\n", schema.name, schema.id, schema.sentence);
  }
  CLI::App* schema = app.add_subcommand("schema", "Print the JSON Schema of a document");
  schema->footer("Schemas:\n" + known + "\nExample:\n  pdsim schema scenario > scenario.schema.json");
  auto name = std::make_shared<std::string>();
  schema->add_option("NAME", *name, "A schema's name, or the id that documents carry")->required();
  schema->callback([name, &run] { run = [name] { return print_schema(*name); }; });
}

}  // namespace pdsim
