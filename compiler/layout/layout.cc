// Rank order within a side, fastest axis first:
//   megatron  tensor, context, data, pipeline, replica; experts over the same
//             ranks: expert tensor, expert, expert data, pipeline, replica
//   fsdp      tensor, data, replica
//   vllm      tensor, pipeline, data, replica; experts span data x tensor
//   sglang    tensor (attention data parallelism and experts within), pipeline,
//             replica
//   generic   as the meshes list their ranks
#include "compiler/layout/layout.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/macros.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"

namespace refit {
namespace {

SideLayout Dispatch(const LayoutContext& context) {
  switch (context.side.layout.value) {
    case LayoutKind::kMegatron:
      return LayOutMegatron(context);
    case LayoutKind::kFsdp:
      return LayOutFsdp(context);
    case LayoutKind::kVllm:
      return LayOutVllm(context);
    case LayoutKind::kGeneric:
      return LayOutGeneric(context);
    case LayoutKind::kSglang:
      return LayOutSglang(context);
  }
  ABSL_HARDENING_ASSERT(false && "every layout has a frontend");
  return {};
}

// Reports params that no buffer of the side holds: those of a kind of module
// that the layout does not know must not be left out without a word.
void CheckAllPlaced(const LayoutContext& context, const SideLayout& layout) {
  absl::flat_hash_set<BufferId> seen;
  std::vector<bool> placed(context.model.params.size());
  for (const std::vector<BufferId>& rank : layout.ranks) {
    for (const BufferId id : rank) {
      if (!seen.insert(id).second) continue;
      for (const Fragment& fragment : context.buffers[id].fragments) {
        placed[IndexOf(fragment.param)] = true;
      }
    }
  }
  const Param* first = nullptr;
  int64_t count = 0;
  for (size_t i = 0; i < placed.size(); ++i) {
    const Param& param = context.model.params[i];
    if (placed[i] || param.skip != SkipReason::kUnspecified) continue;
    if (Product(param.VirtualShape()) == 0) continue;
    if (count++ == 0) first = &param;
  }
  if (first == nullptr) return;
  context.diagnostics.Error(
      context.side.layout.place,

      "%s has no modules of a %s for parameter \"%s\"%s; wanted another layout "
      "(generic places any tensors)",
      LayoutName(context.side.layout.value),
      context.model.architecture.family->model_type, first->name,
      count > 1 ? absl::StrFormat(" and %d more", count - 1) : "");
}

bool Intersect(const IndexDim& a, const IndexDim& b) {
  return std::any_of(a.numbers.begin(), a.numbers.end(), [&](int32_t number) {
    return std::find(b.numbers.begin(), b.numbers.end(), number) !=
           b.numbers.end();
  });
}

// Reports a name that a rank would have twice, which renames and fused modules
// of a file of rules can give.
void CheckNamesDiffer(const LayoutContext& context, const SideLayout& layout) {
  for (const std::vector<BufferId>& rank : layout.ranks) {
    absl::flat_hash_map<std::string_view, std::vector<const Buffer*>> named;
    for (const BufferId id : rank) {
      const Buffer& buffer = context.buffers[id];
      std::vector<const Buffer*>& others = named[buffer.name];
      for (const Buffer* other : others) {
        bool meet = true;
        for (size_t i = 0; i < buffer.index.size(); ++i) {
          meet &= Intersect(buffer.index[i], other->index[i]);
        }
        if (!meet) continue;
        context.diagnostics.Error(
            context.side.layout.place,
            "%s: two tensors of a rank have the name \"%s\"; wanted \"names\" "
            "and \"fused\" of the rules of %s that keep names apart",
            context.side.key, buffer.name,
            context.model.architecture.family->model_type);
        return;
      }
      others.push_back(&buffer);
    }
  }
}

}  // namespace

SideLayout LayOut(const LayoutContext& context) {
  const int64_t errors_before = context.diagnostics.error_count();
  const Family& family = *context.model.architecture.family;
  const LayoutKind kind = context.side.layout.value;
  const bool is_unknown =
      (kind == LayoutKind::kVllm && !family.vllm.known) ||
      (kind == LayoutKind::kSglang && !family.sglang.known) ||
      (kind == LayoutKind::kMegatron && !family.megatron.known);
  if (is_unknown) {
    const std::string_view name = LayoutName(kind);
    const std::string why =
        family.of_file
            ? absl::StrFormat(
                  "the rules of %s say nothing of %s; wanted "
                  "\"%s\": {…} in their file, once its class was read",
                  family.model_type, name, name)
            : absl::StrFormat(
                  "the layout %s does not know %s; wanted another "
                  "layout (generic places any tensors)",
                  name, family.model_type);
    context.diagnostics.Error(context.side.layout.place, "%s: %s",
                              context.side.key, why);
    return {};
  }
  SideLayout layout = Dispatch(context);
  // generic places by its own rules and reports what none of them names.
  if (context.diagnostics.error_count() == errors_before &&
      context.side.layout.value != LayoutKind::kGeneric) {
    CheckAllPlaced(context, layout);
    if (family.of_file) CheckNamesDiffer(context, layout);
  }
  return layout;
}

}  // namespace refit
