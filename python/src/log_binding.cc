// The library's log lines. Its threads leave them here, since they may hold
// locks that a thread with the interpreter's lock waits for. A thread of Python
// (refit.logs) takes them away.
#include <nanobind/nanobind.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "python/src/bindings.h"
#include "refit/log.h"

namespace refit::python {
namespace {

namespace nb = nanobind;

// More are counted only: UCX can be told to log each message.
constexpr size_t kLinesMax = 1000;

struct Line {
  LogLevel level;
  std::string text;
};

class LogLines {
 public:
  void Add(LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (lines_.size() == kLinesMax) {
      ++left_out_;
      return;
    }
    lines_.push_back({level, std::string(text)});
    changed_.notify_one();
  }
  void End() {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  // Waits for lines. None: it has ended.
  std::deque<Line> Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ends_ || !lines_.empty(); });
    if (left_out_ > 0) {
      lines_.push_back({LogLevel::kWarning,
                        std::to_string(left_out_) + " lines were left out"});
    }
    left_out_ = 0;
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Line> lines_;
  uint64_t left_out_ = 0;
  bool ends_ = false;
};

// Those of this process. Never destroyed: threads may log while it exits, and
// in a child after fork the parent's thread seems to wait for them.
LogLines* lines = nullptr;

void KeepLines() {
  lines = new LogLines;
  SetLogSink([kept = lines](LogLevel level, std::string_view text) {
    kept->Add(level, text);
  });
}

void EndLines() {
  SetLogSink(nullptr);
  lines->End();
}

// As in Python's logging.
int LevelOf(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return 20;
    case LogLevel::kWarning:
      return 30;
    case LogLevel::kError:
      return 40;
  }
  return 40;
}

nb::list NextLines() {
  LogLines& kept = *lines;
  std::deque<Line> next;
  {
    const nb::gil_scoped_release unlocked;
    next = kept.Next();
  }
  nb::list found;
  for (const Line& line : next) {
    // What UCX says need not be UTF-8.
    found.append(nb::make_tuple(
        LevelOf(line.level),
        nb::steal<nb::str>(PyUnicode_DecodeUTF8(
            line.text.data(), static_cast<Py_ssize_t>(line.text.size()),
            "replace"))));
  }
  return found;
}

}  // namespace

void BindLog(nb::module_& module) {
  module.def("keep_log", &KeepLines);
  module.def("next_log", &NextLines);
  module.def("end_log", &EndLines);
}

}  // namespace refit::python
