// Rank order within a side, fastest axis first:
//   megatron  tensor, context, data, pipeline, replica; experts over the same
//             ranks: expert tensor, expert, expert data, pipeline, replica
//   vllm      tensor, pipeline, data, replica; experts span data x tensor
//   sglang    tensor (attention data parallelism and experts within), pipeline,
//             replica
//   generic   as the meshes list their ranks
#include "compiler/layout/layout.h"

#include "absl/base/macros.h"

namespace refit {

SideLayout LayOut(const LayoutContext& context) {
  switch (context.side.layout.value) {
    case LayoutKind::kMegatron:
      return LayOutMegatron(context);
    case LayoutKind::kVllm:
      return LayOutVllm(context);
    case LayoutKind::kGeneric:
      return LayOutGeneric(context);
    case LayoutKind::kSglang:
      return LayOutSglang(context);
    case LayoutKind::kFsdp:
      break;
  }
  ABSL_HARDENING_ASSERT(false && "ReadJob refuses layouts without a frontend");
  return {};
}

}  // namespace refit
