// Result files: all of them or none, never a half-written one.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pdsim {

/// The folder that a file is in, "." for one that is named alone.
std::string folder_of(const std::string& file);

/// SHA-256 of a file's bytes; empty when it cannot be read.
std::string digest_of(const std::string& file);

/// InputError unless `folder` is a folder that can be written to, or can be made, and none of `names` in it
/// is a folder itself. Makes nothing.
void check_folder(const std::string& folder, std::span<const std::string_view> names = {});

/// Writes (name, content) pairs into `folder`, made if missing: each beside its name first, then all
/// renamed. Returns the paths. InputError, and nothing left behind, when one cannot be written.
std::vector<std::string> write_files(const std::string& folder,
                                     const std::vector<std::pair<std::string, std::string>>& files);

}  // namespace pdsim
