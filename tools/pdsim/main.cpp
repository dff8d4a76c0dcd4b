// The command line: parses, runs one subcommand, turns every way to fail into one line and a status.
#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "sim/core/error.hpp"
#include "tools/pdsim/commands.hpp"
#include "tools/study/interrupt.hpp"

namespace pdsim {
namespace {

#ifdef PDSIM_CUDA_BUILD
constexpr const char* kVersion = "pdsim " PDSIM_VERSION " (built with CUDA)";
#else
constexpr const char* kVersion = "pdsim " PDSIM_VERSION " (built without CUDA)";
#endif

// In the order in which --help lists them.
constexpr void (*kCommands[])(CLI::App&, Command&) = {
    add_replay, add_plan, add_compare, add_sweep,     add_merge,    add_thresholds, add_describe,
    add_trace,  add_cost, add_fit,     add_calibrate, add_validate, add_schema,
};

// One message, one line: what the terminal shows is also what a log keeps.
int fail(int status, std::string message) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fprintf(stderr, "pdsim: %s\n", message.c_str());
  return status;
}

// The subcommand that the words so far had reached.
const CLI::App* reached(const CLI::App* app) {
  for (;;) {
    const std::vector<CLI::App*> chosen = app->get_subcommands();
    if (chosen.empty()) return app;
    app = chosen.front();
  }
}

// What a misspelt option or subcommand may have meant.
std::string suggestion(const CLI::App& app, std::string_view word) {
  std::vector<std::string> names;
  if (word.starts_with('-')) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    word = word.substr(0, word.find('='));
  } else {
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(sub->get_name());
    }
  }
  const std::vector<std::string_view> candidates(names.begin(), names.end());
  return did_you_mean(word, candidates);
}

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* at = reached(&app);
  std::string command = at->get_name();
  for (const CLI::App* parent = at->get_parent(); parent != nullptr; parent = parent->get_parent()) {
    command = parent->get_name() + " " + command;
  }
  std::string problem = error.what();
  const std::vector<std::string> extras = app.remaining(true);
  if (!extras.empty()) {
    problem = fmt::format("'{}' is not known here{}", extras.front(), suggestion(*at, extras.front()));
  }
  return fail(kBadInput, fmt::format("{} ('{} --help' shows the usage)", problem, command));
}

int stdout_failed(int error) {
  if (error == EPIPE) {  // the reader has seen enough: die as any filter does
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
  }
  return fail(kBadInput, fmt::format("stdout: cannot be written: {}", std::strerror(error)));
}

// Everything has run; the last of stdout may still fail to be written.
int finish(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return stdout_failed(errno != 0 ? errno : EIO);
}

int run(int argc, char** argv) {
  CLI::App app("Simulates LLM serving clusters: replays request traces against prefill and decode workers.",
               "pdsim");
  app.set_version_flag("--version", kVersion);
  app.set_help_all_flag("--help-all", "Print the help of every subcommand and exit");
  app.require_subcommand(1);
  Command command;
  for (const auto add : kCommands) add(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    return kDone;
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error);
  }
  return command();
}

}  // namespace
}  // namespace pdsim

int main(int argc, char** argv) {
  using namespace pdsim;
  // A closed pipe is a failed write, noticed when files are complete, and not a death in mid-work.
  signal(SIGPIPE, SIG_IGN);
  try {
    return finish(run(argc, argv));
  } catch (const InputError& error) {
    return fail(kBadInput, error.what());
  } catch (const Interrupted&) {
    return fail(kInterrupted, "interrupted");
  } catch (const std::bad_alloc&) {
    return fail(kBug, "out of memory");
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return stdout_failed(error.code().value());
    return fail(kBug, fmt::format("a bug in pdsim: {}", error.what()));
  } catch (const std::exception& error) {
    return fail(kBug, fmt::format("a bug in pdsim: {}", error.what()));
  }
}
