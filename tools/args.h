// Command lines of the tools: one table of flags, one style of help and errors.
//
// Abseil's flag parser exits 1 on --help and on unknown flags, which in our
// tools means "the answer is no"; hence this.
#ifndef REFIT_TOOLS_ARGS_H_
#define REFIT_TOOLS_ARGS_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace refit {

// Exit status of every tool.
enum ExitStatus {
  kExitSuccess = 0,
  kExitNo = 1,     // differs, not valid
  kExitError = 2,  // usage, I/O, bad input
};

// Where a flag's value goes. A bool flag takes no value. A string is not empty.
// One that may have a value has it after "=", and is "" without.
using FlagTarget =
    std::variant<bool*, int64_t*, std::string*, std::optional<std::string>*>;

struct Flag {
  std::string_view name;        // "--output"
  std::string_view short_name;  // "-o", or ""
  std::string_view value_name;  // "FILE"; "" for a bool flag; "[=FORM]"
  std::string_view help;
  FlagTarget target;
  // Of an integer.
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

struct ToolInfo {
  std::string_view name;     // "refitc"
  std::string_view usage;    // "refitc JOB.json -o PLAN.refit"
  std::string_view summary;  // one or two sentences
  std::vector<Flag> flags;
  size_t positional_min = 0;
  size_t positional_max = 0;
};

struct ParsedArgs {
  bool done = false;  // --help or --version was answered, or an error reported
  int exit_status = kExitSuccess;
  std::vector<std::string> positional;
  std::vector<std::string_view> flags;  // full names of those given
};

// Parses argv into the flags' targets: "--flag=value", "--flag value" (not of
// an optional value), "-o value"; "--" ends flags. A flag is given at most
// once. Answers --help, -h and --version on stdout (status 0). A mistake is one
// line on stderr (with the nearest known flag) and status 2.
ParsedArgs ParseArgs(const ToolInfo& tool, int argc, char** argv);

// Reports "TOOL: error: message" on stderr; returns kExitError.
int Fail(const ToolInfo& tool, std::string_view message);
inline int Fail(const ToolInfo& tool, const absl::Status& status) {
  return Fail(tool, std::string(status.message()));
}

// Runs `body`, a tool's main function. A signal that ends the process removes
// its partial files (files/partial_files.h). What `body` or one of its threads
// throws is reported as Fail does, also when there is no memory left: the
// result, or the process's exit status, is kExitError then.
int RunTool(std::string_view name, int (*body)(int argc, char** argv), int argc,
            char** argv);

}  // namespace refit

#endif  // REFIT_TOOLS_ARGS_H_
