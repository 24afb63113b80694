// The parameters of a model as text.
#ifndef REFIT_TESTS_COMPILER_MODEL_LISTING_H_
#define REFIT_TESTS_COMPILER_MODEL_LISTING_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/model/model.h"
#include "compiler/model/stacks.h"
#include "plan/dtype.h"

namespace refit {

// One parameter a line, "name<TAB>DTYPE<TAB>2x3" (safetensors dtype names), in
// no particular order: what shared model lists are compared with.
inline std::string ModelListing(const Model& model) {
  std::string listing;
  for (const Param& param : model.params) {
    const std::string rest =
        absl::StrFormat("\t%s\t%s\n", SafetensorsDTypeName(param.dtype),
                        absl::StrJoin(param.StoredShape(), "x"));
    for (const std::string& name : MemberNames(param)) {
      absl::StrAppend(&listing, name, rest);
    }
  }
  return listing;
}

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_MODEL_LISTING_H_
