#include "compiler/model/json_file.h"

#include <memory>

#include "absl/strings/str_format.h"
#include "compiler/job/object_reader.h"
#include "compiler/job/text_file.h"

namespace refit {

std::optional<JsonDocument> ReadJsonFile(const std::string& path,
                                         const Place& asked,
                                         int64_t size_bytes_max,
                                         std::string_view what,
                                         Diagnostics& diagnostics) {
  const absl::StatusOr<std::shared_ptr<const SourceFile>> file =
      ReadTextFile(path, size_bytes_max);
  if (!file.ok()) {
    diagnostics.Error(asked, "%s: %s", Quoted(path), file.status().message());
    return std::nullopt;
  }
  std::optional<JsonDocument> document =
      ParseJson(*file, (*file)->text, diagnostics);
  if (!document.has_value()) return std::nullopt;
  if (!ValueReader(*document, diagnostics).IsObject(document->root, what)) {
    return std::nullopt;
  }
  return document;
}

}  // namespace refit
