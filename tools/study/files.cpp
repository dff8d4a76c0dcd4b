#include "tools/study/files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"

namespace pdsim {

namespace fs = std::filesystem;

std::string folder_of(const std::string& file) {
  const std::filesystem::path folder = std::filesystem::path(file).parent_path();
  return folder.empty() ? "." : folder.string();
}

std::string digest_of(const std::string& file) {
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return {};
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return {};
  Sha256 digest;
  std::vector<char> bytes(std::size_t{1} << 20);
  while (stream) {
    stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    digest.update(std::span(bytes.data(), static_cast<std::size_t>(stream.gcount())));
  }
  return stream.bad() ? "" : digest.hex();
}

void check_folder(const std::string& folder, std::span<const std::string_view> names) {
  fs::path at = fs::absolute(folder);
  std::error_code error;
  while (!fs::exists(at, error) && at.has_parent_path() && at != at.parent_path()) at = at.parent_path();
  if (!fs::is_directory(at, error)) {
    throw InputError(folder,
                     fmt::format("{} is not a folder; expected a folder for the results", at.string()));
  }
  if (access(at.c_str(), W_OK) != 0) {
    throw InputError(folder, fmt::format("{} cannot be written to: {}", at.string(), std::strerror(errno)));
  }
  for (const std::string_view name : names) {
    const fs::path target = fs::path(folder) / name;
    if (fs::is_directory(target, error)) {
      throw InputError(target.string(), "is a folder; expected a file, or nothing");
    }
  }
}

std::vector<std::string> write_files(const std::string& folder,
                                     const std::vector<std::pair<std::string, std::string>>& files) {
  std::vector<std::string_view> names;
  for (const auto& file : files) names.push_back(file.first);
  check_folder(folder, names);
  std::vector<std::pair<fs::path, fs::path>> moves;  // from, to
  const auto give_up = [&](const fs::path& path, int error) {
    std::error_code ignored;
    for (const auto& [from, to] : moves) fs::remove(from, ignored);
    throw InputError(path.string(), fmt::format("cannot be written: {}", std::strerror(error)));
  };
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) give_up(folder, error.value());
  for (const auto& [name, content] : files) {
    const fs::path to = fs::path(folder) / name;
    const fs::path from = fs::path(folder) / fmt::format(".{}.{}", name, getpid());
    moves.emplace_back(from, to);
    std::FILE* file = std::fopen(from.c_str(), "wb");
    if (file == nullptr) give_up(to, errno);
    const bool whole = std::fwrite(content.data(), 1, content.size(), file) == content.size();
    const int write_error = errno;
    if (std::fclose(file) != 0 || !whole) give_up(to, whole ? errno : write_error);
  }
  std::vector<std::string> paths;
  for (const auto& [from, to] : moves) {
    fs::rename(from, to, error);
    if (error) give_up(to, error.value());
    paths.push_back(to.string());
  }
  return paths;
}

}  // namespace pdsim
