// What the user got wrong or may not have meant, and where. Checking goes on
// after an error, so that one run reports all independent mistakes (at most
// 20).
#ifndef REFIT_COMPILER_DIAGNOSTICS_H_
#define REFIT_COMPILER_DIAGNOSTICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"

namespace refit {

// A text that diagnostics point into. `text` is empty for binary files.
struct SourceFile {
  std::string path;  // as the user wrote it
  std::string text;
};

// A place in a source file. A default Place names no file.
struct Place {
  std::shared_ptr<const SourceFile> file;
  int64_t offset = -1;  // bytes into file->text; -1: the file as a whole
};

// A value with the place it was read from. Values that the user left out have
// the place of the object that lacks them.
template <typename T>
struct Located {
  T value{};
  Place place{};
  bool given = false;  // written in the job, not a default
};

enum class Severity : uint8_t {
  kError,    // nothing is compiled
  kWarning,  // the plan is right for the job, but the job may not be what the
             // user means
};

// Collects diagnostics and renders them. Not thread-safe.
class Diagnostics {
 public:
  // With `warnings_are_errors` every warning is reported and counted as an
  // error.
  explicit Diagnostics(bool warnings_are_errors = false)
      : warnings_are_errors_(warnings_are_errors) {}

  // `message` starts in lower case, has no final full stop, and gives the
  // value found and the value wanted. Returns false, for those who return that.
  bool Error(const Place& place, std::string message);
  // The same style. The message also says which key settles the doubt, so that
  // a job without doubts compiles without a word.
  void Warning(const Place& place, std::string message);
  // The same of absl::StrFormat's arguments.
  template <typename... Args>
  bool Error(const Place& place, const absl::FormatSpec<Args...>& format,
             const Args&... args) {
    return Error(place, absl::StrFormat(format, args...));
  }
  template <typename... Args>
  void Warning(const Place& place, const absl::FormatSpec<Args...>& format,
               const Args&... args) {
    Warning(place, absl::StrFormat(format, args...));
  }
  // All that `other` reports, of which there is little.
  void Append(const Diagnostics& other);
  // What was reported in `file` is reported at `place` instead, and ends with
  // "(file:line)".
  void Redirect(const SourceFile& file, const Place& place);

  bool ok() const { return errors_.count == 0; }
  int64_t error_count() const { return errors_.count; }

  // "file:line:column: error: message" or "…: warning: …", then the source line
  // and a caret; one block per diagnostic in the order reported, the first 20
  // errors and the first 20 warnings.
  std::string Render() const;
  // The first line of each of these blocks, of warnings alone.
  std::vector<std::string> WarningLines() const;

 private:
  struct Entry {
    Severity severity = Severity::kError;
    Place place;
    std::string message;
  };
  struct Tally {
    int64_t count = 0;
    int64_t kept = 0;
  };
  void Add(Severity severity, Tally& tally, const Place& place,
           std::string message);

  bool warnings_are_errors_;
  std::vector<Entry> entries_;
  Tally errors_;
  Tally warnings_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_DIAGNOSTICS_H_
