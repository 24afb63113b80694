// What a role says of the shape and the numbers of its params.
#ifndef REFIT_COMPILER_MODEL_ROLE_SHAPE_H_
#define REFIT_COMPILER_MODEL_ROLE_SHAPE_H_

#include <string>

#include "compiler/ir/module.h"
#include "compiler/model/model.h"

namespace refit {

// Whether only multi-head latent attention has the role, or attention like it.
bool IsLatent(ParamRole role);

// What of the param contradicts its role in a model of this architecture, as in
// "has 3 rows; wanted 4"; "" for nothing.
std::string ShapeMistake(const Param& param, const Architecture& architecture);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_ROLE_SHAPE_H_
