// Shell-style patterns over the names of params and buffers.
#ifndef REFIT_PLAN_GLOB_H_
#define REFIT_PLAN_GLOB_H_

#include <string_view>

namespace refit {

// Whether `glob` matches all of `name`: '*' stands for any run of characters,
// '?' for one. Linear in the product of the lengths at worst.
bool GlobMatches(std::string_view glob, std::string_view name);

}  // namespace refit

#endif  // REFIT_PLAN_GLOB_H_
