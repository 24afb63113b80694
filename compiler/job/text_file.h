// The text files a job consists of, read whole and checked to be text.
#ifndef REFIT_COMPILER_JOB_TEXT_FILE_H_
#define REFIT_COMPILER_JOB_TEXT_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/diagnostics.h"

namespace refit {

// Reads `path` ("-": standard input), which may be a pipe. The status' message
// says what is wrong without the path: missing, a directory, more than
// `size_bytes_max` (then it is not read), a NUL byte, not UTF-8.
absl::StatusOr<std::shared_ptr<const SourceFile>> ReadTextFile(
    const std::string& path, int64_t size_bytes_max);

// Whether `text` is UTF-8 without NUL bytes.
absl::Status CheckText(std::string_view text);

// A place in no text, for messages about `path` as a whole.
Place WholeFile(const std::string& path);

// The directory of `path`, "" for the working directory; and `path` as seen
// from a file in `directory`.
std::string DirectoryOf(const std::string& path);
std::string ResolvePath(const std::string& directory, const std::string& path);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_TEXT_FILE_H_
