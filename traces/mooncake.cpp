// The format of the Mooncake traces (kvcache-ai/Mooncake, FAST '25 release) and of what followed them:
// one JSON object a line. A hash id names 512 tokens and all that stands before them, so equal ids are
// equal prefixes; the last id may stand for fewer. `session_id` (text or integer) and `delay` (ms between
// the end of the turn before and this one) are those of ai-dynamo's aiperf. Other keys are ignored.
#include <fmt/format.h>
#include <simdjson.h>

#include <cmath>
#include <unordered_map>

#include "sim/core/error.hpp"
#include "traces/formats.hpp"

namespace pdsim {

namespace {

constexpr std::int32_t kHashBlockTokens = 512;
constexpr double kMaxMs = 4.0e12;  // 126 years: far from the end of int64 nanoseconds, past any epoch stamp

using simdjson::dom::element;

// The text of a value, short enough for a message.
std::string shown(element value) {
  std::string text = simdjson::minify(value);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

[[noreturn]] void refuse(const LineReader& lines, std::string_view key, element value,
                         std::string_view expected) {
  throw InputError(lines.place(), fmt::format("{} is {}, expected {}", key, shown(value), expected));
}

std::int32_t tokens_of(const LineReader& lines, std::string_view key, element value, std::int32_t least) {
  std::int64_t n = 0;
  if (value.get(n) != simdjson::SUCCESS || n < least || n > INT32_MAX) {
    refuse(lines, key, value, fmt::format("an integer from {} to {}", least, INT32_MAX));
  }
  return static_cast<std::int32_t>(n);
}

// Milliseconds to the nearest nanosecond.
Nanos time_of(const LineReader& lines, std::string_view key, element value) {
  std::int64_t whole = 0;
  if (value.get(whole) == simdjson::SUCCESS && whole >= 0 && static_cast<double>(whole) <= kMaxMs) {
    return whole * kMillisecond;
  }
  double ms = 0;
  if (value.is_bool() || value.get(ms) != simdjson::SUCCESS || !(ms >= 0 && ms <= kMaxMs)) {
    refuse(lines, key, value, fmt::format("milliseconds from 0 to {:.0e}", kMaxMs));
  }
  return static_cast<Nanos>(std::floor(ms * 1e6 + 0.5));
}

void append_ids(const LineReader& lines, element value, Trace& trace, Request& request) {
  simdjson::dom::array ids;
  if (value.get(ids) != simdjson::SUCCESS) refuse(lines, "hash_ids", value, "an array of integers");
  request.hash_begin = trace.hash_ids.size();
  for (const element id : ids) {
    std::uint64_t bits = 0;
    std::int64_t negative = 0;
    if (id.get(bits) != simdjson::SUCCESS) {
      if (id.get(negative) != simdjson::SUCCESS) refuse(lines, "an id in hash_ids", id, "a 64-bit integer");
      bits = static_cast<std::uint64_t>(negative);
    }
    append(trace.hash_ids, bits, lines);
  }
  request.hash_count = static_cast<std::int32_t>(trace.hash_ids.size() - request.hash_begin);
}

// simdjson's reason, or what is usually behind it.
[[noreturn]] void refuse_line(const LineReader& lines, std::string_view line, simdjson::error_code error) {
  for (const std::string_view word : {"NaN", "Infinity"}) {
    if (line.find(word) != std::string_view::npos) {
      throw InputError(lines.place(), fmt::format("{} is not a JSON number, expected a finite one", word));
    }
  }
  throw InputError(lines.place(), fmt::format("not JSON ({}), expected one object a line: {}",
                                              simdjson::error_message(error), line.substr(0, 40)));
}

}  // namespace

void read_mooncake(LineReader& lines, Trace& trace, const ReadOptions& /*options*/) {
  static_assert(kLinePadding >= simdjson::SIMDJSON_PADDING);
  enum Key : unsigned {
    timestamp = 1,
    input_length = 2,
    output_length = 4,
    hash_ids = 8,
    session_id = 16,
    delay = 32
  };
  constexpr std::pair<std::string_view, Key> kKeys[] = {
      {"timestamp", timestamp}, {"input_length", input_length}, {"output_length", output_length},
      {"hash_ids", hash_ids},   {"session_id", session_id},     {"delay", delay}};
  trace.hash_block_tokens = kHashBlockTokens;
  std::unordered_map<std::string, std::int32_t> sessions;
  simdjson::dom::parser parser;
  std::string_view line;
  while (lines.next(line)) {
    element document;
    if (const auto error = parser.parse(line.data(), line.size(), false).get(document))
      refuse_line(lines, line, error);
    simdjson::dom::object row;
    if (document.get(row) != simdjson::SUCCESS) refuse(lines, "the line", document, "a JSON object");
    Request request;
    unsigned seen = 0;
    for (const auto [name, value] : row) {
      unsigned key = 0;
      for (const auto& [known, bit] : kKeys) {
        if (name == known) key = bit;
      }
      if ((seen & key) != 0) throw InputError(lines.place(), fmt::format("{} stands there twice", name));
      seen |= key;
      switch (key) {
        case timestamp:
          request.arrival = time_of(lines, name, value);
          break;
        case input_length:
          request.prompt_tokens = tokens_of(lines, name, value, 1);
          break;
        case output_length:
          request.output_tokens = tokens_of(lines, name, value, 0);
          break;
        case hash_ids:
          append_ids(lines, value, trace, request);
          break;
        case session_id: {
          std::string_view text;
          if (!value.is_int64() && !value.is_uint64() && value.get(text) != simdjson::SUCCESS) {
            refuse(lines, name, value, "text or an integer");
          }
          const auto [entry, is_new] =
              sessions.try_emplace(value.is_string() ? std::string(text) : shown(value),
                                   static_cast<std::int32_t>(trace.sessions.size()));
          if (is_new) trace.sessions.push_back(entry->first);
          request.session = entry->second;
          break;
        }
        case delay:
          request.think_time = time_of(lines, name, value);
          break;
        default:
          break;
      }
    }
    for (const auto& [known, bit] : kKeys) {
      if (bit <= hash_ids && (seen & bit) == 0) {
        throw InputError(lines.place(), fmt::format("{} is missing, expected in every row", known));
      }
    }
    const std::int32_t expected = (request.prompt_tokens - 1) / kHashBlockTokens + 1;
    if (request.hash_count != expected) {
      throw InputError(
          lines.place(),
          fmt::format("hash_ids has {} ids, expected {}: one for each {} of the {} tokens of input_length",
                      request.hash_count, expected, kHashBlockTokens, request.prompt_tokens));
    }
    append(trace.requests, request, lines);
  }
}

namespace {

// Whole milliseconds as an integer, others with the six digits that nanoseconds need.
void append_ms(std::string& text, Nanos time) {
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "{}", time / kMillisecond);
  if (time % kMillisecond != 0) fmt::format_to(out, ".{:06}", time % kMillisecond);
}

void append_json_string(std::string& text, std::string_view value) {
  text += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(text), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      text += c;
    }
  }
  text += '"';
}

}  // namespace

void write_mooncake(const Trace& trace, std::ptrdiff_t index, std::string& text) {
  if (index < 0) {
    if (trace.hash_block_tokens != 0 && trace.hash_block_tokens != kHashBlockTokens) {
      throw InputError(trace.name,
                       fmt::format("its hash ids cover {} tokens each, the mooncake format wants {}",
                                   trace.hash_block_tokens, kHashBlockTokens));
    }
    return;
  }
  const Request& request = trace.requests[static_cast<std::size_t>(index)];
  const auto out = std::back_inserter(text);
  text += "{\"timestamp\": ";
  append_ms(text, request.arrival);
  fmt::format_to(out, ", \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [", request.prompt_tokens,
                 request.output_tokens);
  if (trace.hash_block_tokens == 0) {
    // Ids of its own: the row's number above, the block's below. No prompt has 2^32 blocks.
    const std::int32_t count = (request.prompt_tokens - 1) / kHashBlockTokens + 1;
    for (std::int32_t i = 0; i < count; ++i) {
      fmt::format_to(out, "{}{}", i == 0 ? "" : ", ",
                     static_cast<std::uint64_t>(index) << 32 | static_cast<std::uint32_t>(i));
    }
  } else {
    const char* separator = "";
    for (const std::uint64_t id : trace.ids_of(request)) {
      text += separator;
      const fmt::format_int digits(id);
      text.append(digits.data(), digits.size());
      separator = ", ";
    }
  }
  text += ']';
  if (request.session >= 0) {
    text += ", \"session_id\": ";
    append_json_string(text, trace.sessions[static_cast<std::size_t>(request.session)]);
  }
  if (request.think_time >= 0) {
    text += ", \"delay\": ";
    append_ms(text, request.think_time);
  }
  text += "}\n";
}

std::vector<std::string> mooncake_losses(const Trace& trace) {
  if (trace.hash_block_tokens != 0) return {};
  return {"the trace has no prefix identity: every prompt gets hash ids of its own, so nothing is shared"};
}

}  // namespace pdsim
