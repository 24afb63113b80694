// The headers of safetensors files: names, shapes and dtypes. No tensor data
// is read.
#ifndef REFIT_COMPILER_MODEL_SAFETENSORS_H_
#define REFIT_COMPILER_MODEL_SAFETENSORS_H_

#include <optional>
#include <string>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/model/stacks.h"

namespace refit {

struct Checkpoint {
  std::string directory;
  Place place;                       // the index, the file or the directory
  std::vector<NamedTensor> tensors;  // in the order of files and headers
};

// `path` is a directory (the files that its model.safetensors.index.json names,
// else all *.safetensors in it), an index, or one *.safetensors file. `asked`
// is where the user named it. Reports files that are missing, truncated or
// malformed, tensors that overlap or reach beyond their file, unknown dtypes,
// and names that stand twice.
std::optional<Checkpoint> ReadCheckpoint(const std::string& path,
                                         const Place& asked,
                                         Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_SAFETENSORS_H_
