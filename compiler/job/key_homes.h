// Keys of a job that stand in the wrong one of its objects.
#ifndef REFIT_COMPILER_JOB_KEY_HOMES_H_
#define REFIT_COMPILER_JOB_KEY_HOMES_H_

#include <cstdint>

#include "compiler/job/object_reader.h"

namespace refit {

// Objects of a job that users mix up. Each has keys that no other has.
enum class JobObject : uint8_t { kRoot, kSide, kTopology, kOptions };

// Reports the keys of `reader`, which reads an object of kind `here`, that are
// keys of another kind, and of which.
void RefuseKeysOfOthers(ObjectReader& reader, JobObject here);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_KEY_HOMES_H_
