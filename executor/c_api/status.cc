#include "executor/c_api/status.h"

#include "refit/log.h"

namespace refit {
namespace {

static_assert(REFIT_UNKNOWN == static_cast<int>(absl::StatusCode::kUnknown));
static_assert(REFIT_DEADLINE_EXCEEDED ==
              static_cast<int>(absl::StatusCode::kDeadlineExceeded));
static_assert(REFIT_UNAVAILABLE ==
              static_cast<int>(absl::StatusCode::kUnavailable));

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kDefaultTimeout = std::chrono::minutes(10);
// Longer ones are no timeout to the executor either.
constexpr auto kTimeoutMax =
    std::chrono::floor<milliseconds>(nanoseconds::max());

refit_log_level LogLevelOf(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return REFIT_LOG_INFO;
    case LogLevel::kWarning:
      return REFIT_LOG_WARNING;
    case LogLevel::kError:
      return REFIT_LOG_ERROR;
  }
  return REFIT_LOG_ERROR;
}

}  // namespace

refit_status& NoMemory() {
  static refit_status status = {REFIT_RESOURCE_EXHAUSTED, "out of memory"};
  return status;
}

refit_status* NewStatus(refit_code code, std::string_view message) noexcept {
  try {
    return new refit_status{code, std::string(message)};
  } catch (const std::bad_alloc&) {
    return &NoMemory();
  }
}

absl::Status CheckNotNull(std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.value != nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat(argument.name, " is NULL"));
  }
  return absl::OkStatus();
}

absl::Status CheckFlags(std::initializer_list<FlagField> flags) {
  for (const auto& [name, value] : flags) {
    if (value == 0 || value == 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", value, ", it should be 0 or 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<nanoseconds> Timeout(int64_t timeout_ms) {
  if (timeout_ms < 0) {
    return absl::InvalidArgumentError(absl::StrCat("timeout_ms is ", timeout_ms,
                                                   ", it should not be below "
                                                   "0"));
  }
  if (timeout_ms == 0) return kDefaultTimeout;
  if (timeout_ms > kTimeoutMax.count()) return nanoseconds::max();
  return milliseconds(timeout_ms);
}

}  // namespace refit

const char* refit_version(void) { return REFIT_VERSION; }

void refit_set_log_function(refit_log_function function, void* context) {
  if (function == nullptr) return refit::SetLogSink(nullptr);
  refit::SetLogSink([=](refit::LogLevel level, std::string_view line) {
    function(refit::LogLevelOf(level), std::string(line).c_str(), context);
  });
}

refit_code refit_status_code(const refit_status* status) {
  return status == nullptr ? REFIT_OK : status->code;
}

const char* refit_status_message(const refit_status* status) {
  return status == nullptr ? "" : status->message.c_str();
}

void refit_status_free(refit_status* status) {
  if (status != &refit::NoMemory()) delete status;
}
