// The JSON files that models are made of.
#ifndef REFIT_COMPILER_MODEL_JSON_FILE_H_
#define REFIT_COMPILER_MODEL_JSON_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "compiler/diagnostics.h"
#include "compiler/job/json.h"

namespace refit {

// The object in the file `path`, of at most `size_bytes_max` bytes, that was
// named at `asked`. `what` is what messages call it. Nullopt after an error.
std::optional<JsonDocument> ReadJsonFile(const std::string& path,
                                         const Place& asked,
                                         int64_t size_bytes_max,
                                         std::string_view what,
                                         Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_JSON_FILE_H_
