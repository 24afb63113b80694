// Reads one side of a job.
#ifndef REFIT_COMPILER_JOB_SIDE_H_
#define REFIT_COMPILER_JOB_SIDE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "compiler/job/job.h"
#include "compiler/job/object_reader.h"

namespace refit {

// `value` is what the job's key `key` holds. After an error the result is only
// good for finding more errors.
SideSpec ReadSide(const ValueReader& values, const JsonValue& value,
                  std::string key);

// Reads "experts" of a serving engine's side.
void ReadExpertPlacement(ObjectReader& side, LayoutKind layout,
                         Located<ExpertPlacement>& target);

// Reads "meshes", "tensors" and "flat_buffers" of a generic side.
GenericSpec ReadGeneric(ObjectReader& side);

// Reads the value of a dtype key that may name any dtype.
std::optional<DType> ReadDType(const ValueReader& values,
                               const JsonValue& value, std::string_view what);

// The number of ranks; capped well above kRanksMax.
int64_t CountRanks(const SideSpec& side);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_SIDE_H_
