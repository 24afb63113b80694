// The tensors of a layer in vLLM and SGLang: a row for each, a column for each
// engine. rows.inc has the rows.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_ROWS_H_
#define REFIT_COMPILER_LAYOUT_SERVING_ROWS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "plan/post_hooks.h"

namespace refit {

struct Engine;

// The ranks that cut a tensor, or hold it whole together.
enum class Axis : uint8_t {
  kTensor,
  kAttention,  // those that share the heads
  kShared,     // the shared experts
  kDraft,      // what joins the inputs of the draft model
  kExpert,     // an expert
  kEmbedding,
  kHead,
  kTower,      // of vision
  kConnector,  // what joins it to the language model
};
inline constexpr size_t kAxisCount = 9;

// A tensor of some layers on one rank, as functions of cells change it.
struct HeldTensor {
  const LayoutContext& context;
  const Engine& engine;
  const Param& param;  // the first in it
  EvenPart part;
  TensorSpec& spec;
};

// What one engine makes of a row.
struct Cell {
  enum class Layers : uint8_t { kAll, kFirst, kAllButFirst, kHash };

  bool is_held = true;
  // The tensor's module where it joins params; of experts all behind
  // "experts.". "": the param's own.
  std::string_view module = "";
  std::optional<DType> dtype = std::nullopt;  // whatever the side's is
  ValueForm form = ValueForm::kPlain;
  // What a worker must do after a refit.
  std::optional<PostHookName> hook = std::nullopt;
  std::string_view detail = "";
  bool Engine::*condition = nullptr;
  bool wanted = true;
  Layers layers = Layers::kAll;
  void (*change)(const HeldTensor& tensor) = nullptr;

  template <typename Member, typename Value>
  constexpr Cell With(Member Cell::*member, Value value) const {
    Cell cell = *this;
    cell.*member = value;
    return cell;
  }
  constexpr Cell WithDType(DType own) const { return With(&Cell::dtype, own); }
  constexpr Cell WithForm(ValueForm own) const {
    return With(&Cell::form, own);
  }
  constexpr Cell WithHook(PostHookName name, std::string_view text) const {
    return With(&Cell::hook, name).With(&Cell::detail, text);
  }
  constexpr Cell If(bool Engine::*of_engine, bool is = true) const {
    return With(&Cell::condition, of_engine).With(&Cell::wanted, is);
  }
  constexpr Cell In(Layers some) const { return With(&Cell::layers, some); }
  constexpr Cell By(void (*function)(const HeldTensor& tensor)) const {
    return With(&Cell::change, function);
  }
};

// The params of `roles` stand one after the other in a tensor of one layer, or
// of one expert. Those that the model has nowhere are left out.
struct ServingRow {
  std::array<ParamRole, 3> roles;  // kOther: none
  Cut cut;
  Axis axis;
  Cell vllm;
  Cell sglang;
};

// In the order of the tensors of both engines.
absl::Span<const ServingRow> ServingLayerRows();
absl::Span<const ServingRow> ServingExpertRows();

// The heads to which the kernels of a backend pad; 0: there are too many.
int64_t PaddedHeads(AttentionBackend backend, int64_t heads);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_ROWS_H_
