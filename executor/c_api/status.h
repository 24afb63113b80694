// What every function of refit.h does: it checks its arguments, and gives its
// caller a status, never an exception.
#ifndef REFIT_EXECUTOR_C_API_STATUS_H_
#define REFIT_EXECUTOR_C_API_STATUS_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "refit/refit.h"

struct refit_status {
  refit_code code;
  std::string message;
};

namespace refit {

// Of version 0.1, from which a caller may be. A struct that grows keeps here
// what it is now.
template <typename Struct>
constexpr size_t kFirstSizeBytes = sizeof(Struct);
template <>
constexpr size_t kFirstSizeBytes<refit_executor_options> =
    offsetof(refit_executor_options, without_graph);
template <>
constexpr size_t kFirstSizeBytes<refit_bind_options> =
    offsetof(refit_bind_options, changes);
template <>
constexpr size_t kFirstSizeBytes<refit_delta_report> =
    offsetof(refit_delta_report, find_seconds);
// No caller's struct is larger: it is no size then, but memory that nobody set.
constexpr size_t kStructSizeBytesMax = 4096;

// For when there is none for another status.
refit_status& NoMemory();

refit_status* NewStatus(refit_code code, std::string_view message) noexcept;

// Runs the body of a C function: its status, or its exception, for the caller.
template <typename Body>
refit_status* Guarded(const Body& body) noexcept {
  try {
    const absl::Status status = body();
    if (status.ok()) return nullptr;
    const auto message = status.message();
    return NewStatus(static_cast<refit_code>(status.code()),
                     {message.data(), message.size()});
  } catch (const std::bad_alloc&) {
    return &NoMemory();
  } catch (const std::exception& error) {
    return NewStatus(REFIT_INTERNAL, error.what());
  }
}

// The first of `arguments` that is null, as an error.
struct Argument {
  const char* name;
  const void* value;
};
absl::Status CheckNotNull(std::initializer_list<Argument> arguments);

// Runs the body unless one of `arguments` is null.
template <typename Body>
refit_status* Guarded(std::initializer_list<Argument> arguments,
                      const Body& body) noexcept {
  return Guarded([&]() -> absl::Status {
    const absl::Status status = CheckNotNull(arguments);
    return status.ok() ? body() : status;
  });
}

// Likewise of a function that gives `*object`, null if it fails.
template <typename Object, typename Body>
refit_status* Guarded(Object** object, const char* name,
                      std::initializer_list<Argument> arguments,
                      const Body& body) noexcept {
  return Guarded({{name, object}}, [&]() -> absl::Status {
    *object = nullptr;
    const absl::Status status = CheckNotNull(arguments);
    return status.ok() ? body() : status;
  });
}

// That fields which have no meaning yet are 0.
inline absl::Status CheckReserved(int64_t reserved) {
  return reserved == 0 ? absl::OkStatus()
                       : absl::InvalidArgumentError("reserved is not 0");
}

// The first of `flags` that is neither 0 nor 1, as an error.
struct FlagField {
  const char* name;
  int32_t value;
};
absl::Status CheckFlags(std::initializer_list<FlagField> flags);

template <typename Struct>
absl::Status CheckSize(size_t size_bytes, const char* name) {
  if (size_bytes >= kFirstSizeBytes<Struct> &&
      size_bytes <= kStructSizeBytesMax && size_bytes % alignof(Struct) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "struct_size of ", name, " is ", size_bytes, ", it should be sizeof(",
      name, "), which is ", sizeof(Struct), " in Refit ", REFIT_VERSION));
}

// A caller's struct in the form that this library knows.
template <typename Struct>
absl::StatusOr<Struct> Read(const Struct& given, const char* name) {
  const size_t size_bytes = given.struct_size;
  if (absl::Status s = CheckSize<Struct>(size_bytes, name); !s.ok()) return s;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  Struct known = {};
  std::memcpy(&known, bytes, std::min(size_bytes, sizeof(known)));
  if (size_bytes > sizeof(known) &&
      std::any_of(bytes + sizeof(known), bytes + size_bytes,
                  [](unsigned char byte) { return byte != 0; })) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " sets a field that Refit ", REFIT_VERSION, " does not have"));
  }
  return known;
}

// 0 is the default.
absl::StatusOr<std::chrono::nanoseconds> Timeout(int64_t timeout_ms);

}  // namespace refit

#endif  // REFIT_EXECUTOR_C_API_STATUS_H_
