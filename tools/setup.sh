# shellcheck shell=bash
# What tools/quickstart, tools/test and .ci/run share. Sourcing it goes to the repository root and sees to it
# that a script that fails says at which step. The caller sets `program`, its name in messages.
set -euo pipefail
: "${program:?}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
current_step='starting'

at_exit() {
  local status=$?
  [[ $status -eq 0 ]] || echo "$program: FAILED (status $status) while $current_step" >&2
}
trap at_exit EXIT

# Says what comes next: "installing ...".
step() {
  current_step=$1
  printf '\n==> %s\n' "$1"
}

# Ends the script with a message that needs no more said.
die() {
  trap - EXIT
  printf '%s: %s\n' "$program" "$1" >&2
  exit 1
}

# The comment at the head of the calling script.
usage() {
  sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$program"
}

# Installs the named packages that are not installed yet; only then are apt, root and the network needed.
install() {
  local package missing=() as_root=()
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "$program: no apt here, so nothing is installed; tools/packages lists what is needed" >&2
    return
  fi
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status} ' "$package" 2>/dev/null) == installed* ]] || missing+=("$package")
  done
  if [[ ${#missing[@]} -eq 0 ]]; then
    return
  fi
  step "installing ${missing[*]}"
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || die "neither root nor sudo; have root run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  # A new cloud machine is often still upgrading itself: wait for its lock.
  as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  "${as_root[@]}" update || echo "$program: no fresh package lists; trying with those there are" >&2
  "${as_root[@]}" install -y --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install ${missing[*]} (no network? on Ubuntu, is 'universe' enabled?)"
}

# Installs sections of tools/packages and, unless the caller has set CXX, sets it to a g++ of 12 or later.
install_sections() {
  local names compiler
  names=$(awk -v wanted=" $* " '/^\[/ { on = index(wanted, " " substr($1, 2, length($1) - 2) " ") }
                                on && /^[a-z]/ { print $1 }' tools/packages)
  # shellcheck disable=SC2086  # one word a package
  install $names
  if [[ -n ${CXX:-} ]]; then
    return
  fi
  for compiler in g++ g++-14 g++-13; do
    if command -v "$compiler" >/dev/null && [[ $("$compiler" -dumpversion | cut -d. -f1) -ge 12 ]]; then
      export CXX=$compiler
      return
    fi
  done
  install g++-12
  export CXX=g++-12
}

# A variable in the CMake cache of a build folder.
cached() {
  sed -n "s/^$2:[A-Z]*=//p" "$1/CMakeCache.txt"
}

# Whether a build folder was configured for another source folder, generator or compiler: CMake cannot
# change these.
is_foreign() {
  [[ -f $1/CMakeCache.txt ]] || return 1
  ! [[ $(cached "$1" CMAKE_HOME_DIRECTORY) -ef $root && $(cached "$1" CMAKE_GENERATOR) == Ninja &&
    $(realpath -q "$(cached "$1" CMAKE_CXX_COMPILER)") == "$(realpath "$(command -v "$CXX")")" ]]
}

# build PRESET [TARGET]...: configures the preset, with the tests where GoogleTest is installed, and builds the
# targets, or all. PDSIM_WERROR=ON in the environment makes warnings errors.
build() {
  local preset=$1 target options=(-DPDSIM_TESTS=OFF) targets=()
  shift
  command -v "$CXX" >/dev/null || die "CXX names '$CXX', which is not a program here"
  if is_foreign "build/$preset"; then
    step "clearing build/$preset, which was configured otherwise"
    rm -rf "build/$preset/CMakeCache.txt" "build/$preset/CMakeFiles"
  fi
  if pkg-config --exists gtest; then
    options=(-DPDSIM_TESTS=ON)
  fi
  if command -v ccache >/dev/null; then
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  if [[ -n ${PDSIM_WERROR:-} ]]; then
    options+=("-DPDSIM_WERROR=$PDSIM_WERROR")
  fi
  for target in "$@"; do
    targets+=(--target "$target")
  done
  step "configuring build/$preset with $CXX"
  cmake --preset "$preset" "${options[@]}"
  step "building build/$preset"
  cmake --build --preset "$preset" --parallel "$(nproc)" "${targets[@]}"
}
