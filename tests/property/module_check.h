// What each pass ensures of a module (compiler/passes/passes.h), so that a bug
// is named by its pass and not by the proof of the plan.
#ifndef REFIT_TESTS_PROPERTY_MODULE_CHECK_H_
#define REFIT_TESTS_PROPERTY_MODULE_CHECK_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/ir/module.h"

namespace refit {

class ModuleCheck {
 public:
  // To be called after each pass, of one draft after the other.
  void After(std::string_view pass, const Module& module);

  // "", or the first pass that broke what it ensures, and how.
  const std::string& mistake() const { return mistake_; }

 private:
  std::vector<int64_t> wanted_;  // elements, by rank
  std::string mistake_;
};

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_MODULE_CHECK_H_
