// Which link of a plan binds: by the simulator's links, so that both name the
// same.
#ifndef REFIT_COMPILER_BINDING_LINK_H_
#define REFIT_COMPILER_BINDING_LINK_H_

#include <string>

#include "compiler/ir/module.h"

namespace refit {

// The link whose bytes take longest.
struct BindingLink {
  // "network egress of rank 26, 0.842 s for 42131995648 bytes"; "none": nothing
  // moves.
  std::string text = "none";
  double seconds = 0;  // of its bytes
};
// Requires messages.
BindingLink FindBindingLink(const Module& module);

}  // namespace refit

#endif  // REFIT_COMPILER_BINDING_LINK_H_
