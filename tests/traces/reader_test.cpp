// Theory: a row is read exactly or refused with its line; how it is stored (compression, line endings, a
// byte order mark) never shows; writing what was read gives the same bytes.
#include "traces/reader.hpp"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <numeric>

#include "sim/core/error.hpp"
#include "sim/core/sha256.hpp"
#include "tests/traces/files.hpp"
#include "traces/reshape.hpp"
#include "traces/writer.hpp"

namespace pdsim {
namespace {

std::string gzip(const std::string& text) {
  std::string out(compressBound(text.size()) + 64, '\0');
  z_stream stream = {};
  deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

const std::string kTwoRows =
    "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 7, \"hash_ids\": [4, 9]}\n"
    "{\"timestamp\": 3000, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [4]}\n";

void expect_two_rows(const Trace& trace) {
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].arrival, 0);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 513);
  EXPECT_EQ(trace.requests[0].output_tokens, 7);
  EXPECT_EQ(trace.requests[1].arrival, 3 * kSecond);
  EXPECT_EQ(trace.requests[1].output_tokens, 0);
  EXPECT_EQ(trace.requests[1].session, -1);
  EXPECT_EQ(trace.requests[1].think_time, -1);
  EXPECT_EQ(trace.hash_ids, (std::vector<std::uint64_t>{4, 9, 4}));
  EXPECT_EQ(trace.ids_of(trace.requests[1]).front(), 4u);
  EXPECT_EQ(trace.hash_block_tokens, 512);
  EXPECT_EQ(trace.report.rows_read, 2u);
  EXPECT_EQ(trace.report.rows_used, 2u);
}

TEST(Reader, HowItIsStoredDoesNotShow) {
  const Folder folder;
  std::string crlf = kTwoRows;
  for (std::size_t at = 0; (at = crlf.find('\n', at)) != std::string::npos; at += 2)
    crlf.replace(at, 1, "\r\n");
  const std::string half = kTwoRows.substr(0, kTwoRows.find('\n') + 1), rest = kTwoRows.substr(half.size());
  const std::pair<const char*, std::string> stored[] = {
      {"plain", kTwoRows},
      {"byte order mark", "\xef\xbb\xbf" + kTwoRows},
      {"CRLF", crlf},
      {"blank lines", "\n  \n" + half + "\r\n\t\n" + rest + "\n\n"},
      {"no last newline", kTwoRows.substr(0, kTwoRows.size() - 1)},
      {"gzip", gzip(kTwoRows)},
      {"gzip of two members", gzip(half) + gzip(rest)},
      {"zstd", zstd(kTwoRows)},
      {"zstd of two frames", zstd(half) + zstd(rest)},
  };
  for (const auto& [what, bytes] : stored) {
    SCOPED_TRACE(what);
    const Trace trace = read_trace(folder.file("trace", bytes), "mooncake");
    expect_two_rows(trace);
    EXPECT_EQ(trace.sha256, sha256_hex(bytes));
  }
}

struct Refused {
  const char* format;
  std::string bytes;
  const char* line;      ///< ":7" or "" where the whole file is at fault
  const char* expected;  ///< within the message
};

void expect_refused(const Refused& refused) {
  const Folder folder;
  const std::string path = folder.file("trace", refused.bytes);
  try {
    read_trace(path, refused.format);
    ADD_FAILURE() << "was read: " << refused.bytes.substr(0, 100);
  } catch (const InputError& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with(path + refused.line + ": ")) << message;
    EXPECT_NE(message.find(refused.expected), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

std::string row(const std::string& timestamp, const std::string& input, const std::string& output,
                const std::string& ids, const std::string& more = "") {
  return "{\"timestamp\": " + timestamp + ", \"input_length\": " + input + ", \"output_length\": " + output +
         ", \"hash_ids\": " + ids + more + "}\n";
}

TEST(Reader, RefusesMooncakeRowsByLine) {
  const std::string good = row("0", "5", "1", "[1]");
  const Refused cases[] = {
      {"mooncake", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", ":1",
       "Git LFS pointer"},
      {"mooncake", "", "", "empty"},
      {"mooncake", "\n\r\n  \n", "", "empty"},
      {"mooncake", good + row("NaN", "5", "1", "[1]"), ":2", "NaN is not a JSON number"},
      {"mooncake", good + row("-Infinity", "5", "1", "[1]"), ":2", "Infinity is not a JSON number"},
      {"mooncake", good + row("1e999", "5", "1", "[1]"), ":2", "not JSON"},
      {"mooncake", good + "\n" + row("-1", "5", "1", "[1]"), ":3",
       "timestamp is -1, expected milliseconds from 0"},
      {"mooncake", row("-0.5", "5", "1", "[1]"), ":1", "timestamp is -0.5, expected"},
      {"mooncake", row("5e12", "5", "1", "[1]"), ":1", "timestamp is 5000000000000.0, expected"},
      {"mooncake", row("9000000000000", "5", "1", "[1]"), ":1", "timestamp is 9000000000000, expected"},
      {"mooncake", row("true", "5", "1", "[1]"), ":1", "timestamp is true, expected milliseconds"},
      {"mooncake", row("\"0\"", "5", "1", "[1]"), ":1", "timestamp is \"0\", expected milliseconds"},
      {"mooncake", row("0", "513", "1", "[1]"), ":1", "hash_ids has 1 ids, expected 2"},
      {"mooncake", row("0", "512", "1", "[1, 2]"), ":1", "hash_ids has 2 ids, expected 1"},
      {"mooncake", row("0", "0", "1", "[]"), ":1",
       "input_length is 0, expected an integer from 1 to 2147483647"},
      {"mooncake", row("0", "-4", "1", "[1]"), ":1", "input_length is -4, expected"},
      {"mooncake", row("0", "2147483648", "1", "[1]"), ":1", "input_length is 2147483648, expected"},
      {"mooncake", row("0", "99999999999999999999", "1", "[1]"), ":1", "not JSON"},
      {"mooncake", row("0", "5.5", "1", "[1]"), ":1", "input_length is 5.5, expected an integer"},
      {"mooncake", row("0", "5", "-1", "[1]"), ":1", "output_length is -1, expected an integer from 0"},
      {"mooncake", row("0", "5", "4294967296", "[1]"), ":1", "output_length is 4294967296, expected"},
      {"mooncake", row("0", "5", "null", "[1]"), ":1", "output_length is null, expected"},
      {"mooncake", row("0", "5", "1", "3"), ":1", "hash_ids is 3, expected an array of integers"},
      {"mooncake", row("0", "5", "1", "[\"a\"]"), ":1",
       "an id in hash_ids is \"a\", expected a 64-bit integer"},
      {"mooncake", row("0", "5", "1", "[1.5]"), ":1", "an id in hash_ids is 1.5, expected a 64-bit integer"},
      {"mooncake", row("0", "5", "1", "[1]", ", \"session_id\": []"), ":1",
       "session_id is [], expected text"},
      {"mooncake", row("0", "5", "1", "[1]", ", \"delay\": -3"), ":1", "delay is -3, expected milliseconds"},
      {"mooncake", row("0", "5", "1", "[1]", ", \"timestamp\": 3"), ":1", "timestamp stands there twice"},
      {"mooncake", good + "{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1]}", ":2",
       "timestamp is missing"},
      {"mooncake", "{\"timestamp\": 0, \"output_length\": 1, \"hash_ids\": [1]}", ":1",
       "input_length is missing"},
      {"mooncake", "{\"timestamp\": 0, \"input_length\": 5, \"hash_ids\": [1]}", ":1",
       "output_length is missing"},
      {"mooncake", "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}", ":1",
       "hash_ids is missing"},
      {"mooncake", good + "[1, 2]\n", ":2", "the line is [1,2], expected a JSON object"},
      {"mooncake", good + "hello\n", ":2", "not JSON"},
      {"mooncake", good + "{\"timestamp\": 0, \"inp\n", ":2", "not JSON"},
      {"mooncake", good + good.substr(0, good.size() - 1) + good, ":2", "not JSON"},  // two on one line
      {"mooncake", good + "{\"x\": nope}\n", ":2", "not JSON"},  // even in what is ignored
      {"mooncake", std::string("\x1f\x8b\x08\x00\xff\xff\xff\xff\xff\xff\x07\x07\x07\x07", 14), ":1",
       "gzip data is corrupt"},
      {"mooncake", gzip(good + good).substr(0, 40), ":1", "truncated"},
      {"mooncake", zstd(good).substr(0, 6) + std::string(60, '\xff'), ":1", "zstd data is corrupt"},
      {"mooncake", zstd(good + good).substr(0, 40), ":1", "truncated"},
      {"mooncake", std::string(65 << 20, 'x'), ":1", "longer than 64 MiB"},
      {"mooncakes", good, "",
       "trace format 'mooncakes' is not known (did you mean 'mooncake'?); known are: mooncake, azure"},
  };
  for (const Refused& refused : cases) expect_refused(refused);
}

const std::string kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";

TEST(Reader, RefusesAzureRowsByLine) {
  const std::string good = kAzureHeader + "2023-11-16 18:15:46.6805900,374,44\r\n";
  const Refused cases[] = {
      {"azure", "Timestamp,ContextTokens,GeneratedTokens\n", ":1",
       "the header is 'Timestamp,ContextTokens,Generated"},
      {"azure", kTwoRows, ":1", "the header is"},
      {"azure", kAzureHeader, "", "empty"},
      {"azure", good + "2023-11-16 18:15:46.6805900,374\r\n", ":3", "expected three columns"},
      {"azure", good + "2023-11-16 18:15:46.6805900,374,44,1\r\n", ":3", "expected three columns"},
      {"azure", good + "2023-02-29 18:15:46,374,44\r\n", ":3",
       "TIMESTAMP is '2023-02-29 18:15:46', expected"},
      {"azure", good + "2023-11-16 24:15:46,374,44\r\n", ":3", "TIMESTAMP is"},
      {"azure", good + "2023-11-16 18:15:46.,374,44\r\n", ":3", "TIMESTAMP is"},
      {"azure", good + "2023-11-16 18:15:46.1234567890,374,44\r\n", ":3", "TIMESTAMP is"},
      {"azure", good + "1700158546.68,374,44\r\n", ":3", "TIMESTAMP is '1700158546.68'"},
      {"azure", good + "nan,374,44\r\n", ":3", "TIMESTAMP is 'nan'"},
      {"azure", good + "2023-11-16 18:15:46,0,44\r\n", ":3",
       "ContextTokens is '0', expected an integer from 1"},
      {"azure", good + "2023-11-16 18:15:46,-3,44\r\n", ":3", "ContextTokens is '-3', expected"},
      {"azure", good + "2023-11-16 18:15:46,3.0,44\r\n", ":3", "ContextTokens is '3.0', expected"},
      {"azure", good + "2023-11-16 18:15:46,3,\r\n", ":3", "GeneratedTokens is '', expected"},
      {"azure", good + "2023-11-16 18:15:46,3,2147483648\r\n", ":3",
       "GeneratedTokens is '2147483648', expected"},
  };
  for (const Refused& refused : cases) expect_refused(refused);
}

TEST(Reader, SaysWhyAFileCannotBeRead) {
  const Folder folder;
  for (const auto& [path, expected] :
       {std::pair(folder / "none", "cannot be opened: No such file or directory"),
        std::pair(folder / ".", "is a directory, expected a file")}) {
    try {
      read_trace(path, "mooncake");
      ADD_FAILURE();
    } catch (const InputError& error) {
      EXPECT_EQ(error.what(), path + ": " + expected);
    }
  }
}

// A double holds integers to 2^53 only; an id is 64 bits of identity, whatever its sign.
TEST(Reader, IdsKeep64Bits) {
  const Folder folder;
  const Trace trace = read_trace(
      folder.file(
          "t", row("0", "2000", "1", "[9007199254740993, 18446744073709551615, -2, -9223372036854775808]")),
      "mooncake");
  EXPECT_EQ(trace.hash_ids, (std::vector<std::uint64_t>{9007199254740993u, UINT64_MAX, UINT64_MAX - 1,
                                                        std::uint64_t{1} << 63}));
}

TEST(Reader, TimesAreMillisecondsToTheNanosecond) {
  const Folder folder;
  const Trace trace =
      read_trace(folder.file("t", row("0.000001", "1", "1", "[1]") + row("0.1", "1", "1", "[1]") +
                                      row("1700000000000", "1", "1", "[1]", ", \"delay\": 12.5")),
                 "mooncake");
  EXPECT_EQ(trace.requests[0].arrival, 1);
  EXPECT_EQ(trace.requests[1].arrival, 100'000);
  EXPECT_EQ(trace.requests[2].arrival, 1'700'000'000 * kSecond);  // as recorded, not shifted
  EXPECT_EQ(trace.requests[2].think_time, 12'500'000);
}

TEST(Reader, SortsStablyAndCountsWhatWasOutOfOrder) {
  const Folder folder;
  std::string text;
  for (const char* stamp : {"5", "3", "5", "3", "9", "4"})
    text += row(stamp, "1", std::to_string(text.size()), "[1]");
  const Trace trace = read_trace(folder.file("t", text), "mooncake");
  EXPECT_EQ(trace.report.rows_out_of_order, 3u);  // 3 and 3 after 5, 4 after 9
  EXPECT_EQ(trace.report.rows_used, 6u);
  EXPECT_TRUE(
      std::is_sorted(trace.requests.begin(), trace.requests.end(), [](const Request& a, const Request& b) {
        return std::pair(a.arrival, a.output_tokens) <
               std::pair(b.arrival, b.output_tokens);  // output grows by row
      }));
}

TEST(Reader, TurnsCountWithinASessionByArrival) {
  const Folder folder;
  const std::string text = row("9", "1", "1", "[1]", ", \"session_id\": \"b\", \"unknown\": {\"x\": [1]}") +
                           row("1", "1", "2", "[1]", ", \"session_id\": 7") + row("2", "1", "3", "[1]") +
                           row("3", "1", "4", "[1]", ", \"session_id\": \"b\"") +
                           row("4", "1", "5", "[1]", ", \"session_id\": \"7\", \"delay\": 2");
  const Trace trace = read_trace(folder.file("t", text), "mooncake");
  EXPECT_EQ(trace.sessions, (std::vector<std::string>{"b", "7"}));
  std::vector<std::tuple<int, int, int>> found;  // output, session, turn
  for (const Request& r : trace.requests) found.emplace_back(r.output_tokens, r.session, r.turn);
  EXPECT_EQ(found,
            (std::vector<std::tuple<int, int, int>>{{2, 1, 0}, {3, -1, 0}, {4, 0, 0}, {5, 1, 1}, {1, 0, 1}}));
}

TEST(Reader, AzureTimeCountsFromTheEarliestRow) {
  const Folder folder;
  const Trace trace = read_trace(folder.file("t", kAzureHeader + "2023-12-31 23:59:59.9999999,10,1\r\n"
                                                                 "2024-01-01 00:00:00,20,0\r\n\r\n"
                                                                 "2024-01-01T02:00:00.5+02:00,30,3"),
                                 "azure");
  ASSERT_EQ(trace.requests.size(), 3u);
  EXPECT_EQ(trace.requests[0].arrival, 0);
  EXPECT_EQ(trace.requests[1].arrival, 100);
  EXPECT_EQ(trace.requests[2].arrival, kSecond / 2 + 100);
  EXPECT_EQ(trace.requests[1].output_tokens, 0);
  EXPECT_EQ(trace.hash_block_tokens, 0);
  EXPECT_EQ(trace.requests[2].hash_count, 0);
}

TEST(Reader, ChunksAreJoined) {  // lines across every chunk boundary, arrays past every growth
  const Folder folder;
  std::string text, ids = "0";
  for (int i = 1; i < 700; ++i) ids += ", " + std::to_string(i);
  for (int i = 0; i < 1500; ++i)
    text += row(std::to_string(i), std::to_string(512 * 700), "1", "[" + ids + "]");
  for (const std::string& path :
       {folder.file("t", text), folder.file("t.zst", zstd(text)), folder.file("t.gz", gzip(text))}) {
    const Trace trace = read_trace(path, "mooncake");
    ASSERT_EQ(trace.requests.size(), 1500u);
    for (const Request& r : trace.requests) {
      for (std::uint64_t i = 0; i < 700; ++i) ASSERT_EQ(trace.ids_of(r)[i], i);
    }
  }
}

TEST(Reader, ReportsProgressAndStopsWhereThatThrows) {
  const Folder folder;
  const std::string path = folder.file("t", kTwoRows);
  std::uint64_t last = 0, total = 0;
  ReadOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t all) { last = done, total = all; };
  read_trace(path, "mooncake", options);
  EXPECT_EQ(last, kTwoRows.size());
  EXPECT_EQ(total, kTwoRows.size());
  options.progress = [](std::uint64_t, std::uint64_t) { throw 7; };
  EXPECT_THROW(read_trace(path, "mooncake", options), int);
}

TEST(Writer, GivesBackWhatWasRead) {
  const Folder folder;
  const std::string text = row("0", "513", "7", "[4, 18446744073709551615]",
                               ", \"session_id\": \"q\\\"\\\\\\u0007\", \"delay\": 0.000001") +
                           row("12.345678", "1", "0", "[0]");
  const Trace trace = read_trace(folder.file("in", text), "mooncake");
  for (const char* name : {"out.jsonl", "out.jsonl.gz", "out.jsonl.zst"}) {
    write_trace(trace, folder / name, "mooncake");
    const Trace again = read_trace(folder / name, "mooncake");
    EXPECT_EQ(again.hash_ids, trace.hash_ids);
    EXPECT_EQ(again.sessions, trace.sessions);
    EXPECT_EQ(again.requests[0].think_time, 1);
    EXPECT_EQ(again.requests[1].arrival, 12'345'678);
  }
  EXPECT_EQ(bytes_of(folder / "out.jsonl"), text);
  EXPECT_TRUE(bytes_of(folder / "out.jsonl.gz").starts_with("\x1f\x8b"));
  EXPECT_TRUE(bytes_of(folder / "out.jsonl.zst").starts_with("\x28\xb5\x2f\xfd"));
}

TEST(Writer, LeavesNothingBehindWhenItFails) {
  const Folder folder;
  Trace trace = read_trace(folder.file("in", kTwoRows), "mooncake");
  folder.file("out", "precious");
  WriteOptions options;
  options.progress = [](std::uint64_t, std::uint64_t) { throw 7; };
  trace.requests.resize(10'000, trace.requests[0]);
  EXPECT_THROW(write_trace(trace, folder / "out", "mooncake", options), int);
  EXPECT_EQ(bytes_of(folder / "out"), "precious");
  trace.hash_block_tokens = 16;
  EXPECT_THROW(write_trace(trace, folder / "out", "mooncake"), InputError);
  EXPECT_THROW(write_trace(trace, folder / "none/out", "azure"), InputError);
  EXPECT_THROW(write_trace(trace, folder / "out", "parquet"), InputError);
  EXPECT_EQ(bytes_of(folder / "out"), "precious");
  EXPECT_EQ(folder.files(), 2u);
}

TEST(Writer, AzureKeepsTimesAndLengthsAndSaysWhatItLoses) {
  const Folder folder;
  const Trace trace = read_trace(folder.file("in", row("0", "513", "7", "[1, 2]", ", \"session_id\": 1") +
                                                       row("86399999.9999", "1", "0", "[3]")),
                                 "mooncake");
  EXPECT_EQ(find_trace_format("azure", "").losses(trace).size(), 2u);  // ids, sessions
  write_trace(trace, folder / "out", "azure");
  EXPECT_EQ(bytes_of(folder / "out"),
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2000-01-01 00:00:00.0000000,513,7\n"
            "2000-01-01 23:59:59.9999999,1,0\n");
  const Trace again = read_trace(folder / "out", "azure");
  EXPECT_EQ(again.requests[1].arrival, trace.requests[1].arrival);

  // Back again: no identity was recorded, so nothing may be shared.
  EXPECT_EQ(find_trace_format("mooncake", "").losses(again).size(), 1u);
  write_trace(again, folder / "back", "mooncake");
  const Trace back = read_trace(folder / "back", "mooncake");
  EXPECT_EQ(back.requests[1].prompt_tokens, 1);
  std::vector<std::uint64_t> ids = back.hash_ids;
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
}

TEST(Reshape, DividesEveryTimeByOneFactor) {
  const Folder folder;
  Trace trace =
      read_trace(folder.file("t", row("0", "1", "1", "[1]") + row("1000", "1", "1", "[1]", ", \"delay\": 3") +
                                      row("4000", "1", "1", "[1]")),
                 "mooncake");
  EXPECT_DOUBLE_EQ(rate_of(trace), 0.5);
  scale_time(trace, 3.0);
  EXPECT_EQ(trace.requests[1].arrival, 333'333'333);
  EXPECT_EQ(trace.requests[1].think_time, 1'000'000);
  EXPECT_EQ(span_of(trace), 1'333'333'333);
  EXPECT_EQ(trace.requests[0].think_time, -1);
  EXPECT_THROW(scale_time(trace, 1e-12), InputError);
}

// The published traces, as their sources describe them.
struct Shared {
  const char* file;
  const char* format;
  std::size_t requests;
  std::int64_t prompt_tokens, output_tokens;
  Nanos span;
};

TEST(SharedTraces, AreReadWhole) {
  const std::string folder = PDSIM_SOURCE_DIR "/../shared/traces/";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not there";
  const Shared cases[] = {
      {"conversation_trace.jsonl", "mooncake", 12031, 144793823, 4122048, 3'536'999 * kMillisecond},
      {"synthetic_trace.jsonl", "mooncake", 3993, 61194628, 595432, 1'022'025 * kMillisecond},
      {"dynamo_mooncake_1000.jsonl", "mooncake", 1000, 9792030, 199084, 177'098 * kMillisecond},
      {"AzureLLMInferenceTrace_conv.csv", "azure", 19366, 22361870, 4088665, 3'501'721'937'000},
  };
  for (const Shared& shared : cases) {
    SCOPED_TRACE(shared.file);
    const Trace trace = read_trace(folder + shared.file, shared.format);
    EXPECT_EQ(trace.requests.size(), shared.requests);
    EXPECT_EQ(trace.report.rows_out_of_order, 0u);
    std::int64_t prompt = 0, output = 0;
    for (const Request& request : trace.requests)
      prompt += request.prompt_tokens, output += request.output_tokens;
    EXPECT_EQ(prompt, shared.prompt_tokens);
    EXPECT_EQ(output, shared.output_tokens);
    EXPECT_EQ(span_of(trace), shared.span);
    if (std::string_view(shared.format) == "mooncake") {
      const Folder out;
      write_trace(trace, out / "again", "mooncake");
      EXPECT_EQ(sha256_hex(bytes_of(out / "again")), trace.sha256);
    }
  }
}

}  // namespace
}  // namespace pdsim
