#include "compiler/job/json.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "rapidjson/reader.h"

namespace refit {
namespace {

constexpr size_t kQuotedBytesMax = 60;
constexpr char kNumberTooLarge[] = "number is too large";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// RapidJSON's input: ends with the NUL it expects, without one in the text.
class TextStream {
 public:
  using Ch = char;

  explicit TextStream(std::string_view text, size_t at)
      : text_(text), at_(at) {}
  Ch Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  Ch Take() { return at_ < text_.size() ? text_[at_++] : '\0'; }
  size_t Tell() const { return at_; }
  // Only parsing in place writes, which the reader is not told to do.
  Ch* PutBegin() { return nullptr; }
  void Put(Ch) {}
  void Flush() {}
  size_t PutEnd(Ch*) { return 0; }

 private:
  std::string_view text_;
  size_t at_;
};

// Where the token after `at` begins: behind blanks, comments, ',' and ':'.
size_t NextToken(std::string_view text, size_t at) {
  while (at < text.size()) {
    const std::string_view rest = text.substr(at);
    if (rest.starts_with("//")) {
      at = std::min(text.find('\n', at), text.size());
    } else if (rest.starts_with("/*")) {
      at = std::min(text.find("*/", at + 2), text.size() - 2) + 2;
    } else if (std::string_view(" \t\r\n,:").find(rest[0]) !=
               std::string_view::npos) {
      ++at;
    } else {
      break;
    }
  }
  return at;
}

struct Mistake {
  size_t offset = 0;
  std::string message;
};

// Builds the tree from the reader's events. The reader reports an event when it
// has consumed a scalar, or stands before a bracket; the start of a token is
// therefore found by walking on from the end of the one before.
class TreeBuilder {
 public:
  TreeBuilder(std::string_view text, const TextStream& stream)
      : text_(text), stream_(stream), end_of_last_(stream.Tell()) {}

  bool Null() { return AddScalar({}); }
  bool Bool(bool value) { return AddScalar(value); }
  // Numbers come as their text: RapidJSON's own conversion reads beyond its
  // tables when a zero has a large exponent.
  bool RawNumber(const char* value, rapidjson::SizeType size, bool) {
    const std::string number(value, size);
    int64_t integer = 0;
    if (absl::SimpleAtoi(number, &integer)) return AddScalar(integer);
    double real = 0;
    if (!absl::SimpleAtod(number, &real)) return false;
    if (std::isinf(real) && number.find("Inf") == std::string::npos) {
      return Refuse(StartOfToken(), kNumberTooLarge);
    }
    return AddScalar(real);
  }
  bool Int(int) { return false; }
  bool Uint(unsigned) { return false; }
  bool Int64(int64_t) { return false; }
  bool Uint64(uint64_t) { return false; }
  bool Double(double) { return false; }
  bool String(const char* value, rapidjson::SizeType size, bool) {
    return AddScalar(std::string(value, size));
  }
  bool Key(const char* value, rapidjson::SizeType size, bool) {
    std::get<JsonValue::Object>(open_.back().data)
        .push_back({.key = std::string(value, size),
                    .key_offset = static_cast<int64_t>(StartOfToken()),
                    .value = {}});
    end_of_last_ = stream_.Tell();
    return true;
  }
  bool StartObject() { return Open(JsonValue::Object()); }
  bool StartArray() { return Open(JsonValue::Array()); }
  bool EndObject(rapidjson::SizeType) {
    return CheckKeysUnique(std::get<JsonValue::Object>(open_.back().data)) &&
           Close();
  }
  bool EndArray(rapidjson::SizeType) { return Close(); }

  // Set when an event returned false.
  const std::optional<Mistake>& mistake() const { return mistake_; }
  JsonValue TakeRoot() { return std::move(root_); }

 private:
  using Data = decltype(JsonValue::data);

  size_t StartOfToken() const { return NextToken(text_, end_of_last_); }

  bool Refuse(size_t offset, std::string message) {
    mistake_ = {.offset = offset, .message = std::move(message)};
    return false;
  }

  bool AddScalar(Data data) {
    const size_t start = StartOfToken();
    end_of_last_ = stream_.Tell();
    return Add(
        {.data = std::move(data), .offset = static_cast<int64_t>(start)});
  }

  bool Open(Data data) {
    const size_t start = StartOfToken();
    end_of_last_ = start + 1;
    if (static_cast<int64_t>(open_.size()) >= kJsonDepthMax) {
      return Refuse(start, absl::StrCat("values are nested deeper than ",
                                        kJsonDepthMax, " levels"));
    }
    open_.push_back(
        {.data = std::move(data), .offset = static_cast<int64_t>(start)});
    return true;
  }

  bool Close() {
    end_of_last_ = StartOfToken() + 1;
    JsonValue closed = std::move(open_.back());
    open_.pop_back();
    return Add(std::move(closed));
  }

  bool Add(JsonValue value) {
    if (++values_ > kJsonValuesMax) {
      return Refuse(
          static_cast<size_t>(value.offset),
          absl::StrCat("file has more than ", kJsonValuesMax, " values"));
    }
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (auto* array =
                   std::get_if<JsonValue::Array>(&open_.back().data)) {
      array->push_back(std::move(value));
    } else {
      std::get<JsonValue::Object>(open_.back().data).back().value =
          std::move(value);
    }
    return true;
  }

  bool CheckKeysUnique(const JsonValue::Object& object) {
    std::vector<const JsonMember*> by_key;
    by_key.reserve(object.size());
    for (const JsonMember& member : object) by_key.push_back(&member);
    std::stable_sort(by_key.begin(), by_key.end(),
                     [](const JsonMember* a, const JsonMember* b) {
                       return a->key < b->key;
                     });
    const auto twice =
        std::adjacent_find(by_key.begin(), by_key.end(),
                           [](const JsonMember* a, const JsonMember* b) {
                             return a->key == b->key;
                           });
    if (twice == by_key.end()) return true;
    const JsonMember& second = **std::next(twice);
    return Refuse(static_cast<size_t>(second.key_offset),
                  absl::StrCat("key ", Quoted(second.key),
                               " stands twice in this object"));
  }

  std::string_view text_;
  const TextStream& stream_;
  size_t end_of_last_;
  std::vector<JsonValue> open_;
  JsonValue root_;
  int64_t values_ = 0;
  std::optional<Mistake> mistake_;
};

// "found X" for what stands at `offset`.
std::string FoundText(std::string_view text, size_t offset) {
  if (offset >= text.size()) return "found the end of the file";
  if (text[offset] == '\'') return "found a single quotation mark";
  // A word, or one character with its continuation bytes.
  size_t size = 1;
  const auto is_word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  if (is_word(text[offset])) {
    while (offset + size < text.size() && is_word(text[offset + size])) ++size;
  } else {
    while (offset + size < text.size() &&
           (static_cast<unsigned char>(text[offset + size]) & 0xC0) == 0x80) {
      ++size;
    }
  }
  return absl::StrFormat("found '%s'",
                         text.substr(offset, std::min<size_t>(size, 40)));
}

// RapidJSON has one error for a control character and for an unknown escape.
std::string BadCharacterMessage(std::string_view text, size_t offset) {
  if (offset >= text.size() || text[offset] == '\\') {
    return "unknown escape in a string";
  }
  if (text[offset] == '\n' || text[offset] == '\r') {
    return "string has no closing quotation mark";
  }
  return "control character in a string; wanted it escaped";
}

std::string SyntaxMessage(rapidjson::ParseErrorCode code, std::string_view text,
                          size_t offset) {
  const std::string found = FoundText(text, offset);
  switch (code) {
    case rapidjson::kParseErrorNone:
    case rapidjson::kParseErrorTermination:
      break;
    case rapidjson::kParseErrorDocumentEmpty:
      return "file is empty; wanted a JSON object";
    case rapidjson::kParseErrorDocumentRootNotSingular:
      return absl::StrCat(found, " after the end of the value");
    case rapidjson::kParseErrorValueInvalid:
      return absl::StrCat(found, "; wanted a value");
    case rapidjson::kParseErrorObjectMissName:
      return absl::StrCat(found, "; wanted a key in double quotes");
    case rapidjson::kParseErrorObjectMissColon:
      return absl::StrCat(found, "; wanted ':' after the key");
    case rapidjson::kParseErrorObjectMissCommaOrCurlyBracket:
      return absl::StrCat(found, "; wanted ',' or '}' after a value");
    case rapidjson::kParseErrorArrayMissCommaOrSquareBracket:
      return absl::StrCat(found, "; wanted ',' or ']' after a value");
    case rapidjson::kParseErrorStringUnicodeEscapeInvalidHex:
      return "\\u is not followed by four hexadecimal digits";
    case rapidjson::kParseErrorStringUnicodeSurrogateInvalid:
      return "\\u names half of a surrogate pair";
    case rapidjson::kParseErrorStringEscapeInvalid:
    case rapidjson::kParseErrorStringInvalidEncoding:
      return BadCharacterMessage(text, offset);
    case rapidjson::kParseErrorStringMissQuotationMark:
      return "string has no closing quotation mark";
    case rapidjson::kParseErrorNumberTooBig:
      return kNumberTooLarge;
    case rapidjson::kParseErrorNumberMissFraction:
      return "number has no digit after its point";
    case rapidjson::kParseErrorNumberMissExponent:
      return "number has no digit in its exponent";
    case rapidjson::kParseErrorUnspecificSyntaxError:
      return "unfinished comment";
  }
  return "malformed JSON";
}

// A mistake at the end of the file is shown behind its last character that is
// not blank.
size_t ShownOffset(std::string_view text, size_t offset) {
  if (offset < text.size()) return offset;
  const size_t last = text.find_last_not_of(" \t\r\n");
  return last == std::string_view::npos ? 0 : last + 1;
}

}  // namespace

std::string Quoted(std::string_view word) {
  if (word.size() <= kQuotedBytesMax) return absl::StrFormat("\"%s\"", word);
  size_t size = kQuotedBytesMax;
  while (size > 0 && (static_cast<unsigned char>(word[size]) & 0xC0) == 0x80) {
    --size;
  }
  return absl::StrFormat("\"%s…\"", word.substr(0, size));
}

std::string JsonValue::Text() const {
  struct Visitor {
    std::string operator()(std::monostate) const { return "null"; }
    std::string operator()(bool value) const {
      return value ? "true" : "false";
    }
    std::string operator()(int64_t value) const { return absl::StrCat(value); }
    std::string operator()(double value) const {
      // So that 2.0 is not shown as the integer it is refused for not being.
      std::string text = absl::StrFormat("%.17g", value);
      if (const std::string brief = absl::StrFormat("%g", value);
          std::strtod(brief.c_str(), nullptr) == value) {
        text = brief;
      }
      const bool looks_integer =
          text.find_first_not_of("-0123456789") == std::string::npos;
      return looks_integer ? text + ".0" : text;
    }
    std::string operator()(const std::string& value) const {
      return Quoted(value);
    }
    std::string operator()(const Array&) const { return "an array"; }
    std::string operator()(const Object&) const { return "an object"; }
  };
  return std::visit(Visitor(), data);
}

std::optional<JsonDocument> ParseJson(std::shared_ptr<const SourceFile> file,
                                      std::string_view text,
                                      Diagnostics& diagnostics) {
  // Iterative: the depth of a file must not become the depth of our stack.
  constexpr unsigned kFlags =
      rapidjson::kParseIterativeFlag | rapidjson::kParseCommentsFlag |
      rapidjson::kParseNumbersAsStringsFlag | rapidjson::kParseNanAndInfFlag;
  TextStream stream(
      text, text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  TreeBuilder builder(text, stream);
  rapidjson::Reader reader;
  const rapidjson::ParseResult result = reader.Parse<kFlags>(stream, builder);
  if (result.IsError()) {
    Mistake mistake = builder.mistake().has_value()
                          ? *builder.mistake()
                          : Mistake{.offset = result.Offset(),
                                    .message = SyntaxMessage(
                                        result.Code(), text, result.Offset())};
    if (file->text.empty() && !text.empty()) {
      mistake.message = absl::StrFormat("header, byte %d: %s", mistake.offset,
                                        mistake.message);
    }
    diagnostics.Error(
        {.file = std::move(file),
         .offset = static_cast<int64_t>(ShownOffset(text, mistake.offset))},
        std::move(mistake.message));
    return std::nullopt;
  }
  return JsonDocument{.file = std::move(file), .root = builder.TakeRoot()};
}

}  // namespace refit
