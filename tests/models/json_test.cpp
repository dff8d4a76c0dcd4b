// Theory: what is read is known to whoever asked, on its own thread alone, and to all around it; what a cache
// keeps counts as read by each that uses it.
#include "models/json.hpp"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "sim/core/sha256.hpp"
#include "tests/traces/files.hpp"

namespace pdsim {
namespace {

TEST(ReadingLog, EachLogHasWhatWasReadWithinIt) {
  const Folder folder;
  const std::string a = folder.file("a.json", "{}"), b = folder.file("b.json", "[]");
  const std::pair<std::string, std::string> read_a{a, sha256_hex(std::string("{}"))},
      read_b{b, sha256_hex(std::string("[]"))};
  read_json(a);  // nobody asks
  const ReadingLog outer;
  read_text(b, "text");
  {
    const ReadingLog inner;
    EXPECT_TRUE(inner.files().empty());
    read_json(a);
    EXPECT_EQ(inner.files(), FilesRead{read_a});
    std::thread([&] {
      read_json(b);
      const ReadingLog other;
      EXPECT_TRUE(other.files().empty());
    }).join();
    EXPECT_EQ(inner.files(), FilesRead{read_a});
  }
  EXPECT_EQ(outer.files(), (FilesRead{read_a, read_b}));
  const std::string now = "{ }";
  folder.file("a.json", now);
  read_json(a);
  EXPECT_EQ(outer.files(), (FilesRead{read_a, read_b, {a, sha256_hex(now)}}));
}

TEST(ReadingLog, WhatACacheKeepsIsReadByEachThatUsesIt) {
  const Folder folder;
  const std::string a = folder.file("a.json", "[5]");
  const Remembered<int> five([&] { return read_json(a)[0].get<int>(); });
  for (int use = 0; use < 2; ++use) {
    const ReadingLog log;
    EXPECT_TRUE(log.files().empty());
    EXPECT_EQ(five.value(), 5);
    EXPECT_EQ(log.files(), (FilesRead{{a, sha256_hex(std::string("[5]"))}}));
  }
}

}  // namespace
}  // namespace pdsim
