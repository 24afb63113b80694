// What SGLang's model classes have, family by family, where they differ from
// each other: docs/layouts.md says where it comes from.
#ifndef REFIT_COMPILER_LAYOUT_SGLANG_MODELS_H_
#define REFIT_COMPILER_LAYOUT_SGLANG_MODELS_H_

#include <cstdint>
#include <string_view>

#include "compiler/job/job.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/sizes.h"

namespace refit::sglang {

// Whether the head is a tensor of its own also when it is tied.
bool HasHeadOfItsOwn(std::string_view family);

// Whether every pipeline stage has a head, be it read there or not.
bool BuildsHeadOnEveryStage(std::string_view family);

// How the engine keeps the weight of a router.
enum class RouterForm : uint8_t {
  kPlain,   // in the dtype of the others
  kFp32,    // in fp32
  kCopied,  // as the others, and computes with an fp32 copy that it makes once
};
RouterForm RouterFormOf(const LayoutContext& context);

// How a side holds shared experts: as the job says, else as the engine decides
// on NVIDIA GPUs.
SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table);

// Reports models and meshes that its classes cannot hold.
void CheckModel(const LayoutContext& context, const RoleTable& table,
                SizeChecks& checks);

}  // namespace refit::sglang

#endif  // REFIT_COMPILER_LAYOUT_SGLANG_MODELS_H_
