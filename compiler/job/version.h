// Releases of frameworks, as a side's "version" names them.
#ifndef REFIT_COMPILER_JOB_VERSION_H_
#define REFIT_COMPILER_JOB_VERSION_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "compiler/job/job.h"

namespace refit {

// The leading numbers of a version: {0, 25} of "0.25rc1" and "v0.25". Empty if
// there are none.
std::vector<int64_t> VersionNumbers(std::string_view version);

// Whether the side's framework is this release or a newer one. A side without
// "version" is the newest.
bool IsSince(const SideSpec& side, const std::vector<int64_t>& release);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_VERSION_H_
