// Structs that ranks and the control plane's server tell each other, field by
// field.
#ifndef REFIT_CONTROL_COMPARED_STRUCTS_H_
#define REFIT_CONTROL_COMPARED_STRUCTS_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "refit/control_plane.h"

namespace refit {

// A struct that ranks tell each other names its fields once, in
// `static auto FieldsOf(auto& self)`, which returns a std::tie of them. What
// has to be looked at more closely has a WriteFields and a ReadFields of its
// own, of which the latter fails the reader where a value is none of the type.
template <typename Value>
void WriteFields(const Value& value, PayloadWriter& writer) {
  if constexpr (std::is_same_v<Value, bool>) {
    writer.Bool(value);
  } else if constexpr (std::is_integral_v<Value>) {
    if constexpr (sizeof(Value) == 2) writer.U16(value);
    if constexpr (sizeof(Value) == 4) writer.U32(static_cast<uint32_t>(value));
    if constexpr (sizeof(Value) == 8) writer.U64(value);
  } else if constexpr (std::is_same_v<Value, std::string>) {
    writer.String(value);
  } else if constexpr (requires { std::tuple_size<Value>::value; }) {
    writer.Bytes({value.data(), value.size()});  // an array of char
  } else if constexpr (requires { value.size(); }) {
    writer.U64(value.size());
    for (const auto& element : value) WriteFields(element, writer);
  } else {
    std::apply([&](auto&... field) { (WriteFields(field, writer), ...); },
               Value::FieldsOf(value));
  }
}

template <typename Value>
void ReadFields(PayloadReader& reader, Value& value) {
  if constexpr (std::is_same_v<Value, bool>) {
    value = reader.Bool();
  } else if constexpr (std::is_integral_v<Value>) {
    if constexpr (sizeof(Value) == 2) value = reader.U16();
    if constexpr (sizeof(Value) == 4) value = static_cast<Value>(reader.U32());
    if constexpr (sizeof(Value) == 8) value = reader.U64();
  } else if constexpr (std::is_same_v<Value, std::string>) {
    value = reader.String();
  } else if constexpr (requires { std::tuple_size<Value>::value; }) {
    const std::string_view bytes = reader.Bytes(value.size());
    std::copy(bytes.begin(), bytes.end(), value.begin());
  } else if constexpr (requires { value.size(); }) {
    using Element = typename Value::value_type;
    // A string is its length at least.
    constexpr size_t kLeast =
        std::is_integral_v<Element> ? sizeof(Element) : sizeof(uint64_t);
    value.resize(reader.Count(kLeast));
    for (Element& element : value) ReadFields(reader, element);
  } else {
    std::apply([&](auto&... field) { (ReadFields(reader, field), ...); },
               Value::FieldsOf(value));
  }
}

template <typename Struct>
std::string StructBytes(const Struct& value) {
  PayloadWriter writer;
  WriteFields(value, writer);
  return writer.Take();
}

// nullopt: the bytes are no Struct.
template <typename Struct>
std::optional<Struct> ParseStruct(std::string_view bytes) {
  Struct value = {};
  PayloadReader reader(bytes);
  ReadFields(reader, value);
  if (!reader.Complete()) return std::nullopt;
  return value;
}

// What `rank` says for `what`. Error: kFailedPrecondition, no Struct.
template <typename Struct>
absl::StatusOr<Struct> ReadStruct(std::string_view bytes, int32_t rank,
                                  std::string_view what) {
  std::optional<Struct> value = ParseStruct<Struct>(bytes);
  if (value.has_value()) return *std::move(value);
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " runs another version of Refit: what it ",
                   "says for \"", std::string(what), "\" cannot be read"));
}

// ControlPlane::Compare of structs.
template <typename Struct>
absl::StatusOr<std::vector<OfRank<Struct>>> CompareStructs(
    ControlPlane& control, const Struct& mine, std::string_view what,
    ControlPlane::Deadline deadline) {
  const absl::StatusOr<std::vector<OfRank<std::string>>> told =
      control.Compare(StructBytes(mine), what, deadline);
  if (!told.ok()) return told.status();
  std::vector<OfRank<Struct>> values;
  for (const auto& [rank, bytes] : *told) {
    absl::StatusOr<Struct> value = ReadStruct<Struct>(bytes, rank, what);
    if (!value.ok()) return value.status();
    values.push_back({rank, *std::move(value)});
  }
  return values;
}

}  // namespace refit

#endif  // REFIT_CONTROL_COMPARED_STRUCTS_H_
