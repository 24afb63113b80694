// The identity of what a plan was compiled from.
#ifndef REFIT_COMPILER_INPUTS_DIGEST_H_
#define REFIT_COMPILER_INPUTS_DIGEST_H_

#include <string>

#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

// Every member of a job and its model that a plan may depend on: no paths,
// places or comments. Equal texts compile to equal plans. Different texts may
// do so too: a default that the job writes out is another text.
std::string CanonicalInputs(const Job& job, const Model& model);

fb::Digest InputsDigest(const Job& job, const Model& model);

}  // namespace refit

#endif  // REFIT_COMPILER_INPUTS_DIGEST_H_
