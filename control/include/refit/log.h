// SetLogSink: where Refit's lines go that belong to no call's status, such as
// "connect: waiting for ranks 3, 5 (10 s)".
//
//   refit::SetLogSink([](refit::LogLevel level, std::string_view line) {
//     my_logger->Write(level == refit::LogLevel::kError, line);
//   });
#ifndef REFIT_CONTROL_INCLUDE_REFIT_LOG_H_
#define REFIT_CONTROL_INCLUDE_REFIT_LOG_H_

#include <functional>
#include <string_view>

namespace refit {

enum class LogLevel {
  kInfo,     // of UCX, where UCX_LOG_LEVEL asks for it
  kWarning,  // a long wait; a meeting that anybody may join; of UCX
  kError,    // of UCX
};

// `line` has no end of line, and is valid during the call only.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

// Sets the sink of the whole process. Null, the default: lines go to the
// standard error, each behind "refit: ".
//
// Any thread may call the sink, also one of Refit's own, but one at a time. The
// library may hold locks meanwhile, so a sink must not call it, nor wait for a
// thread that does, nor throw. When this returns, the sink before is neither
// running nor called again: what it refers to may be destroyed. A sink must not
// call this.
void SetLogSink(LogSink sink);

}  // namespace refit

#endif  // REFIT_CONTROL_INCLUDE_REFIT_LOG_H_
