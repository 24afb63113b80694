// Small networks of families whose layers are of several kinds: their
// config.json and their parameters, listed one by one.
#ifndef REFIT_TESTS_PROPERTY_FAMILY_MODEL_H_
#define REFIT_TESTS_PROPERTY_FAMILY_MODEL_H_

#include <string>
#include <vector>

#include "tests/property/draw.h"
#include "tests/property/oracle.h"

namespace refit {

struct FamilyModel {
  std::string config;  // the text of config.json
  bool mtp = false;    // the tensors of multi-token prediction are listed too
  std::vector<LogicalTensor> tensors;
};

// deepseek_v3, glm4_moe, nemotron_h, qwen3_next or gpt_oss.
FamilyModel DrawFamilyModel(Draw& draw);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_FAMILY_MODEL_H_
