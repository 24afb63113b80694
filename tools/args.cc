#include "tools/args.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "files/partial_files.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr std::string_view kHelpFlag = "--help";
constexpr std::string_view kShortHelpFlag = "-h";
constexpr std::string_view kVersionFlag = "--version";

// Of the process, for what a thread throws.
std::string_view tool_name;

// Reports the exception that is being handled. Takes no memory, of which there
// may be none.
void ReportException() {
  const char* what = "unknown exception";
  try {
    throw;
  } catch (const std::bad_alloc&) {
    what = "out of memory";
  } catch (const std::exception& exception) {
    what = exception.what();
  } catch (...) {
  }
  std::fprintf(stderr, "%.*s: error: %s\n", static_cast<int>(tool_name.size()),
               tool_name.data(), what);
}

[[noreturn]] void EndProcess() {
  if (std::current_exception() == nullptr) std::abort();
  try {
    std::rethrow_exception(std::current_exception());
  } catch (...) {
    ReportException();
  }
  PartialFiles::OfThisProcess().Unlink();
  std::_Exit(kExitError);
}

std::string Concat(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

const Flag* FindFlag(const ToolInfo& tool, std::string_view name) {
  for (const Flag& flag : tool.flags) {
    if (name == flag.name) return &flag;
    if (!flag.short_name.empty() && name == flag.short_name) return &flag;
  }
  return nullptr;
}

std::string HelpLine(std::string_view short_name, std::string_view name,
                     std::string_view value_name) {
  std::string line =
      short_name.empty() ? "      " : Concat({"  ", short_name, ", "});
  line += name;
  if (!value_name.empty()) {
    line += Concat({value_name[0] == '[' ? "" : " ", value_name});
  }
  return line;
}

void PrintHelp(const ToolInfo& tool) {
  std::vector<std::pair<std::string, std::string_view>> lines;
  for (const Flag& flag : tool.flags) {
    lines.emplace_back(HelpLine(flag.short_name, flag.name, flag.value_name),
                       flag.help);
  }
  lines.emplace_back(HelpLine(kShortHelpFlag, kHelpFlag, ""), "show this help");
  lines.emplace_back(HelpLine("", kVersionFlag, ""), "show the version");
  size_t width = 0;
  for (const auto& line : lines) width = std::max(width, line.first.size());

  std::string text =
      Concat({"Usage: ", tool.usage, "\n\n", tool.summary, "\n\nOptions:\n"});
  for (const auto& [left, help] : lines) {
    text += left;
    text.append(width - left.size() + 2, ' ');
    // A help text of several lines stays in its column.
    for (const char c : help) {
      text += c;
      if (c == '\n') text.append(width + 2, ' ');
    }
    text += '\n';
  }
  std::cout << text;
}

ParsedArgs UsageError(const ToolInfo& tool, std::string_view message) {
  return {.done = true,
          .exit_status = Fail(tool, message),
          .positional = {},
          .flags = {}};
}

std::string RangeText(const Flag& flag) {
  using Any = std::numeric_limits<int64_t>;
  std::string text = "an integer";
  if (flag.max != Any::max()) {
    text += Concat(
        {" from ", std::to_string(flag.min), " to ", std::to_string(flag.max)});
  } else if (flag.min != Any::min()) {
    text += Concat({" of at least ", std::to_string(flag.min)});
  } else {
    text += " of 64 bits";
  }
  return text;
}

// As Store.
std::string StoreInteger(const Flag& flag, std::string_view text,
                         int64_t& target) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (rest != end || error == std::errc::invalid_argument) {
    return Concat({flag.name, " wants an integer, not '", text, "'"});
  }
  if (error != std::errc() || value < flag.min || value > flag.max) {
    return Concat({flag.name, " is ", text, "; wanted ", RangeText(flag)});
  }
  target = value;
  return "";
}

// Stores `value` (nullopt: none was given); returns what is wrong with it, or
// "".
std::string Store(const Flag& flag, std::optional<std::string_view> value) {
  if (bool* const* target = std::get_if<bool*>(&flag.target)) {
    if (value.has_value()) return Concat({flag.name, " takes no value"});
    **target = true;
    return "";
  }
  if (std::optional<std::string>* const* target =
          std::get_if<std::optional<std::string>*>(&flag.target)) {
    **target = std::string(value.value_or(""));
    return "";
  }
  if (!value.has_value()) {
    return Concat({flag.name, " needs a value: ", flag.value_name});
  }
  if (int64_t* const* target = std::get_if<int64_t*>(&flag.target)) {
    return StoreInteger(flag, *value, **target);
  }
  if (value->empty()) {
    return Concat({flag.name, " is \"\"; wanted ", flag.value_name});
  }
  *std::get<std::string*>(flag.target) = std::string(*value);
  return "";
}

bool TakesNextWord(const Flag& flag) {
  return std::holds_alternative<int64_t*>(flag.target) ||
         std::holds_alternative<std::string*>(flag.target);
}

std::string UnknownFlag(const ToolInfo& tool, std::string_view name) {
  std::vector<std::string_view> known = {kHelpFlag, kVersionFlag};
  for (const Flag& flag : tool.flags) known.push_back(flag.name);
  const std::string nearest = NearestWord(name, known);
  if (nearest.empty()) {
    return Concat({"unknown option ", name, "; see ", tool.name, " --help"});
  }
  return Concat({"unknown option ", name, "; did you mean ", nearest, "?"});
}

}  // namespace

ParsedArgs ParseArgs(const ToolInfo& tool, int argc, char** argv) {
  ParsedArgs parsed;
  bool flags_ended = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    // A lone "-" names stdin or stdout.
    if (flags_ended || arg.size() < 2 || arg[0] != '-') {
      parsed.positional.emplace_back(arg);
      continue;
    }
    if (arg == "--") {
      flags_ended = true;
      continue;
    }
    const bool wants_help = arg == kHelpFlag || arg == kShortHelpFlag;
    if (wants_help || arg == kVersionFlag) {
      if (wants_help) {
        PrintHelp(tool);
      } else {
        std::cout << tool.name << " " << REFIT_VERSION << "\n";
      }
      parsed.done = true;
      if (!std::cout.flush()) {
        parsed.exit_status =
            Fail(tool, Concat({"standard output: ", std::strerror(errno)}));
      }
      return parsed;
    }
    const size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    const Flag* flag = FindFlag(tool, name);
    if (flag == nullptr) return UsageError(tool, UnknownFlag(tool, name));
    if (std::find(parsed.flags.begin(), parsed.flags.end(), flag->name) !=
        parsed.flags.end()) {
      return UsageError(tool, Concat({flag->name, " is given twice"}));
    }
    parsed.flags.push_back(flag->name);
    std::optional<std::string_view> value;
    if (equals != std::string_view::npos) {
      value = arg.substr(equals + 1);
    } else if (TakesNextWord(*flag) && i + 1 < argc) {
      value = argv[++i];
    }
    if (const std::string mistake = Store(*flag, value); !mistake.empty()) {
      return UsageError(tool, mistake);
    }
  }
  if (parsed.positional.size() < tool.positional_min) {
    return UsageError(tool, Concat({"missing argument; usage: ", tool.usage}));
  }
  if (parsed.positional.size() > tool.positional_max) {
    return UsageError(tool, Concat({"unexpected argument '",
                                    parsed.positional[tool.positional_max],
                                    "'; usage: ", tool.usage}));
  }
  return parsed;
}

int Fail(const ToolInfo& tool, std::string_view message) {
  std::cerr << tool.name << ": error: " << message << std::endl;
  return kExitError;
}

int RunTool(std::string_view name, int (*body)(int argc, char** argv), int argc,
            char** argv) {
  tool_name = name;
  std::set_terminate(EndProcess);
  try {
    const SignalCleanup cleanup;
    return body(argc, argv);
  } catch (...) {
    ReportException();
    return kExitError;
  }
}

}  // namespace refit
