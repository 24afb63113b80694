// What the user got wrong, and where. Checking goes on after an error, so that
// one run reports all independent mistakes (at most 20).
#ifndef REFIT_COMPILER_DIAGNOSTICS_H_
#define REFIT_COMPILER_DIAGNOSTICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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

// Collects diagnostics and renders them. Not thread-safe.
class Diagnostics {
 public:
  // `message` starts in lower case, has no final full stop, and gives the
  // value found and the value wanted.
  void Error(const Place& place, std::string message);

  bool ok() const { return error_count_ == 0; }
  int64_t error_count() const { return error_count_; }

  // "file:line:column: error: message", then the source line and a caret; one
  // block per error in the order reported, the first 20 of them.
  std::string Render() const;

 private:
  struct Entry {
    Place place;
    std::string message;
  };
  std::vector<Entry> entries_;
  int64_t error_count_ = 0;
};

}  // namespace refit

#endif  // REFIT_COMPILER_DIAGNOSTICS_H_
