// How a framework keeps values that are not those of the checkpoint. A refit
// moves values as the source has them; what the destination's worker must do
// to get its own form is a post-hook (passes/name_post_hooks.cc).
#ifndef REFIT_COMPILER_IR_VALUE_FORM_H_
#define REFIT_COMPILER_IR_VALUE_FORM_H_

#include <cstdint>

namespace refit {

// A buffer's value as a function of the checkpoint's value x.
enum class ValueForm : uint8_t {
  kPlain,        // x
  kMinusOne,     // x - 1: the weight of a norm that adds 1 to it
  kNegativeExp,  // -exp(x): Mamba's A of A_log
};

}  // namespace refit

#endif  // REFIT_COMPILER_IR_VALUE_FORM_H_
