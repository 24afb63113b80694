// Reads JSON objects key by key: checks types and ranges, and reports keys
// that nobody asked for.
#ifndef REFIT_COMPILER_JOB_OBJECT_READER_H_
#define REFIT_COMPILER_JOB_OBJECT_READER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/diagnostics.h"
#include "compiler/job/json.h"

namespace refit {

struct IntegerRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};
// Of extents and of what makes them: products of two stay within int64_t.
inline constexpr IntegerRange kExtentRange = {.min = 1,
                                              .max = (int64_t{1} << 31) - 1};

// Types of single values. Each reports a value of another type, or out of
// range, as "`what` is FOUND; wanted WANTED", and returns nothing then.
class ValueReader {
 public:
  ValueReader(const JsonDocument& document, Diagnostics& diagnostics)
      : document_(document), diagnostics_(diagnostics) {}

  std::optional<int64_t> Integer(const JsonValue& value, std::string_view what,
                                 IntegerRange range) const;
  std::optional<bool> Bool(const JsonValue& value, std::string_view what) const;
  // Finite and more than 0.
  std::optional<double> PositiveNumber(const JsonValue& value,
                                       std::string_view what) const;
  // Not empty.
  const std::string* String(const JsonValue& value, std::string_view what,
                            std::string_view wanted = "a string") const;
  const JsonValue::Array* Array(const JsonValue& value, std::string_view what,
                                std::string_view wanted) const;
  bool IsObject(const JsonValue& value, std::string_view what) const;
  std::optional<std::vector<int64_t>> Integers(const JsonValue& value,
                                               std::string_view what,
                                               IntegerRange range) const;
  std::optional<std::vector<std::string>> Strings(const JsonValue& value,
                                                  std::string_view what) const;

  void Wrong(const JsonValue& value, std::string_view what,
             std::string_view wanted) const;
  // One report of the elements of an array that are wrong, at the first.
  void WrongElements(const JsonValue::Array& array, std::string_view what,
                     const std::vector<size_t>& wrong,
                     std::string_view wanted) const;
  void Error(const JsonValue& value, std::string message) const;
  template <typename... Args>
  void Error(const JsonValue& value, const absl::FormatSpec<Args...>& format,
             const Args&... args) const {
    Error(value, absl::StrFormat(format, args...));
  }
  Place PlaceOf(const JsonValue& value) const {
    return document_.PlaceOf(value);
  }
  const JsonDocument& document() const { return document_; }
  Diagnostics& diagnostics() const { return diagnostics_; }

 private:
  const JsonDocument& document_;
  Diagnostics& diagnostics_;
};

class ObjectReader {
 public:
  // `value` is an object; `path` is what messages call it, "" for the root.
  ObjectReader(const ValueReader& values, const JsonValue& value,
               std::string path);

  // The value of `key`, nullptr without one. The key becomes a known one.
  const JsonValue* Find(std::string_view key);
  // The same, and the key stays as unknown as it was.
  const JsonValue* Peek(std::string_view key) const;
  // The same, and reports that the key is missing.
  const JsonValue* Require(std::string_view key, std::string_view wanted);

  // Reads `key` if it is there and right. Else `target` keeps its value; its
  // place is this object's if the key is missing. T is bool, int64_t, double (a
  // positive number), std::string, or a vector of int64_t or std::string;
  // integers are in `range`.
  template <typename T>
  void Read(std::string_view key, IntegerRange range, Located<T>& target);

  // The index in `words` of the word that `key` has; words.size() if the key is
  // missing or wrong. `place` becomes the word's, or this object's.
  size_t Word(std::string_view key, const std::vector<std::string_view>& words,
              std::string_view wanted, Place& place);

  // Reports `key` if it is there: other objects of this kind may have it.
  void Refuse(std::string_view key, std::string message);
  // Reports every key that is not known by now, with the nearest known one.
  void RejectOtherKeys() const;

  // "source.dtype" for the key "dtype" of "source".
  std::string PathOf(std::string_view key) const;
  Place PlaceOfKey(std::string_view key) const;
  const ValueReader& values() const { return values_; }
  const JsonValue::Object& members() const { return *value_.AsObject(); }
  Place place() const { return values_.PlaceOf(value_); }

 private:
  const ValueReader& values_;
  const JsonValue& value_;
  const std::string path_;
  std::vector<std::string> known_;
  std::vector<std::string> refused_;
};

// "a, b or c", for messages.
std::string Alternatives(const std::vector<std::string_view>& words);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_OBJECT_READER_H_
