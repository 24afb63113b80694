#include "compiler/diagnostics.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace refit {
namespace {

constexpr int64_t kReportedMax = 20;  // of each severity
// Characters of a source line that are shown. Longer lines are cut to a window
// around the column.
constexpr int64_t kShownColumns = 96;
constexpr int64_t kShownBeforeColumn = 64;
bool IsContinuationByte(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

int64_t CountCharacters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return !IsContinuationByte(c); });
}

// The byte at which the `count`-th character of `text` begins.
size_t ByteOfCharacter(std::string_view text, int64_t count) {
  size_t byte = 0;
  while (byte < text.size()) {
    if (!IsContinuationByte(text[byte]) && count-- == 0) break;
    ++byte;
  }
  return byte;
}

// What a job holds must not steer the terminal that shows it.
std::string WithoutControls(std::string_view text) {
  std::string clean(text);
  for (char& c : clean) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\t') || byte == 0x7F) c = '?';
  }
  return clean;
}

struct Position {
  int64_t line = 1;
  int64_t column = 1;     // in characters
  std::string_view text;  // of the line
};

Position Locate(std::string_view text, int64_t offset) {
  const size_t at = std::min(static_cast<size_t>(offset), text.size());
  const std::string_view before = text.substr(0, at);
  const size_t newline = before.rfind('\n');
  const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
  size_t end = text.find('\n', at);
  if (end == std::string_view::npos) end = text.size();
  if (end > begin && text[end - 1] == '\r') --end;
  return {.line = 1 + std::count(before.begin(), before.end(), '\n'),
          .column = 1 + CountCharacters(text.substr(begin, at - begin)),
          .text = text.substr(begin, end - begin)};
}

// The source line and the line with the caret. The caret's line repeats the
// tabs of the source line, so that they agree at any tab width.
std::string RenderExcerpt(const Position& position) {
  const int64_t characters = CountCharacters(position.text);
  int64_t first = 0;
  int64_t last = characters;
  if (characters > kShownColumns) {
    first = std::max<int64_t>(0, position.column - 1 - kShownBeforeColumn);
    last = std::min(characters, first + kShownColumns);
  }
  const size_t begin = ByteOfCharacter(position.text, first);
  const size_t end = ByteOfCharacter(position.text, last);
  const std::string shown =
      WithoutControls(position.text.substr(begin, end - begin));
  const std::string_view cut_left = first > 0 ? "…" : "";
  const std::string_view cut_right = last < characters ? "…" : "";

  std::string padding(first > 0 ? 1 : 0, ' ');
  const size_t caret = ByteOfCharacter(shown, position.column - 1 - first);
  for (const char c : std::string_view(shown).substr(0, caret)) {
    if (!IsContinuationByte(c)) padding += c == '\t' ? '\t' : ' ';
  }
  const std::string number = absl::StrFormat("%5d", position.line);
  return absl::StrFormat("%s | %s%s%s\n%s | %s^\n", number, cut_left, shown,
                         cut_right, std::string(number.size(), ' '), padding);
}

const char* SeverityName(Severity severity) {
  return severity == Severity::kError ? "error" : "warning";
}

// "file:line:column: error: message"; `position` only of a place in a text.
std::string RenderLine(const Place& place,
                       const std::optional<Position>& position,
                       Severity severity, std::string_view message) {
  std::string line;
  if (place.file != nullptr) absl::StrAppend(&line, place.file->path, ":");
  if (position.has_value()) {
    absl::StrAppend(&line, position->line, ":", position->column, ":");
  }
  if (!line.empty()) line += ' ';
  absl::StrAppend(&line, SeverityName(severity), ": ", WithoutControls(message),
                  "\n");
  return line;
}

// Nothing if `place` is a file as a whole, or no place.
std::optional<Position> PositionOf(const Place& place) {
  if (place.file == nullptr || place.file->text.empty() || place.offset < 0) {
    return std::nullopt;
  }
  return Locate(place.file->text, place.offset);
}

std::string MoreText(int64_t more, Severity severity) {
  if (more <= 0) return "";
  return absl::StrCat("… and ", more, " more ", SeverityName(severity),
                      more == 1 ? "" : "s", "\n");
}

}  // namespace

void Diagnostics::Add(Severity severity, Tally& tally, const Place& place,
                      std::string message) {
  if (++tally.count > kReportedMax) return;
  ++tally.kept;
  entries_.push_back(
      {.severity = severity, .place = place, .message = std::move(message)});
}

bool Diagnostics::Error(const Place& place, std::string message) {
  Add(Severity::kError, errors_, place, std::move(message));
  return false;
}

void Diagnostics::Warning(const Place& place, std::string message) {
  if (warnings_are_errors_) {
    Error(place, std::move(message));
  } else {
    Add(Severity::kWarning, warnings_, place, std::move(message));
  }
}

void Diagnostics::Append(const Diagnostics& other) {
  for (const Entry& entry : other.entries_) {
    if (entry.severity == Severity::kError) {
      Error(entry.place, entry.message);
    } else {
      Warning(entry.place, entry.message);
    }
  }
}

void Diagnostics::Redirect(const SourceFile& file, const Place& place) {
  for (Entry& entry : entries_) {
    if (entry.place.file.get() != &file) continue;
    const std::optional<Position> position = PositionOf(entry.place);
    absl::StrAppend(&entry.message, " (", file.path);
    if (position.has_value()) {
      absl::StrAppend(&entry.message, ":", position->line);
    }
    entry.message += ')';
    entry.place = place;
  }
}

std::string Diagnostics::Render() const {
  std::string text;
  for (const Entry& entry : entries_) {
    const std::optional<Position> position = PositionOf(entry.place);
    text += RenderLine(entry.place, position, entry.severity, entry.message);
    if (position.has_value()) text += RenderExcerpt(*position);
  }
  text += MoreText(errors_.count - errors_.kept, Severity::kError);
  text += MoreText(warnings_.count - warnings_.kept, Severity::kWarning);
  return text;
}

std::vector<std::string> Diagnostics::WarningLines() const {
  std::vector<std::string> lines;
  for (const Entry& entry : entries_) {
    if (entry.severity != Severity::kWarning) continue;
    lines.push_back(RenderLine(entry.place, PositionOf(entry.place),
                               entry.severity, entry.message));
    lines.back().pop_back();  // the line's end
  }
  return lines;
}

}  // namespace refit
