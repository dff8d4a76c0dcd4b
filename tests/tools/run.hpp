// Runs the binary as a user would: through a shell, its two outputs apart.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <string>

#include "tests/traces/files.hpp"

namespace pdsim {

struct Ran {
  int status = -1;  ///< exit status, or 128 + the signal that killed it
  std::string out, err;
};

inline int status_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

/// "pdsim ARGUMENTS"; stdin is empty unless the arguments redirect it. `before`, shell words, stands before
/// it.
inline Ran run(const std::string& arguments, const std::string& before = "") {
  const Folder apart;
  std::string command = before;
  command.append(" '" PDSIM_BINARY "' </dev/null ").append(arguments);
  command.append(" >'").append(apart / "out").append("' 2>'").append(apart / "err").append("'");
  const int status = status_of(std::system(command.c_str()));
  return {status, bytes_of(apart / "out"), bytes_of(apart / "err")};
}

/// Words for `before` of run() that send one Ctrl-C after so many seconds. Without --foreground, timeout
/// sends a second one, to its process group, and the second kills.
inline std::string interrupted_after(const std::string& seconds) {
  return "timeout --foreground --preserve-status -s INT " + seconds;
}

/// run() in `folder`.
inline Ran run(const Folder& folder, const std::string& arguments, const std::string& before = "") {
  return run(arguments, std::string("cd '").append(folder / "").append("' && ").append(before));
}

}  // namespace pdsim
