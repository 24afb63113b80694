#include "control/log.h"

#include <cstdio>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// Never destroyed: threads may log while the process exits.
struct Sink {
  std::mutex mutex;
  LogSink call;
};

Sink& TheSink() {
  static auto* const sink = new Sink;
  return *sink;
}

}  // namespace

void SetLogSink(LogSink sink) {
  Sink& the = TheSink();
  {
    const std::lock_guard lock(the.mutex);
    std::swap(the.call, sink);
  }
  // What the old one holds is let go of without the lock, at the end of `sink`.
}

void Log(LogLevel level, const std::string& line) {
  Sink& the = TheSink();
  const std::lock_guard lock(the.mutex);
  if (the.call != nullptr) return the.call(level, line);
  // In one call, so that lines of several processes do not mix.
  std::fputs(absl::StrCat("refit: ", line, "\n").c_str(), stderr);
}

}  // namespace refit
