#include <algorithm>
#include <string_view>
#include <utility>

#include "plan/glob.h"
#include "plan/text/plan_view.h"
#include "plan/text/strided_box.h"

namespace refit {
namespace {

// Which tensors of a stack a glob matches.
struct MatchedTensors {
  bool all = false;
  bool any = false;
  std::vector<bool> tensors;  // unless all

  bool Has(uint64_t tensor) const { return all || (any && tensors[tensor]); }
};

template <typename Stack>
MatchedTensors MatchTensors(std::string_view glob, const Stack& stack) {
  const flatbuffers::String& pattern = *stack.name();
  if (GlobMatches(glob, std::string_view(pattern.data(), pattern.size()))) {
    return {.all = true, .any = true, .tensors = {}};
  }
  MatchedTensors matched;
  matched.tensors.resize(StackTensors(stack));
  size_t count = 0;
  for (size_t tensor = 0; tensor < matched.tensors.size(); ++tensor) {
    matched.tensors[tensor] = GlobMatches(glob, TensorName(stack, tensor));
    count += matched.tensors[tensor] ? 1 : 0;
  }
  matched.any = count > 0;
  matched.all = count == matched.tensors.size();
  return matched;
}

// The matching elements of one buffer.
struct MatchedElements {
  bool all = false;
  std::vector<StridedBox> boxes;  // unless all

  bool Touch(const StridedBox& box) const {
    return all || std::any_of(boxes.begin(), boxes.end(),
                              [&](const StridedBox& match) {
                                return Meet(match, box);
                              });
  }
};

class ViewSelector {
 public:
  ViewSelector(const PlanFile& plan, const TextOptions& options)
      : plan_(plan), body_(plan.body()), options_(options) {}

  PlanView Select();

 private:
  bool filtered() const { return !options_.tensor_glob.empty(); }
  void MatchNames();
  void MatchFragment(const fb::Fragment& fragment, MatchedElements& elements);
  void SelectProgram(int32_t rank);
  // Shows the copies of `list` that touch a match; returns whether any does.
  bool SelectCopies(const fb::RankProgram& program, uint32_t list);
  void SelectParams();
  void SelectSkips();

  const PlanFile& plan_;
  const fb::Body& body_;
  const TextOptions& options_;
  PlanView view_;
  // With a glob only.
  std::vector<MatchedTensors> params_;
  std::vector<bool> named_buffers_;  // matched by their own names
  std::vector<MatchedElements> elements_;
};

PlanView ViewSelector::Select() {
  view_.params.resize(Length(body_.params()),
                      !filtered() && !options_.rank.has_value());
  view_.buffers.resize(Length(body_.buffers()));
  view_.partial_buffers.resize(Length(body_.buffers()));
  view_.rounds.resize(Length(body_.rounds()));
  view_.copy_lists.resize(Length(body_.copy_lists()));
  view_.copies.resize(Length(body_.copies()));
  view_.skips.resize(Length(body_.skips()), !filtered());
  if (filtered()) MatchNames();
  if (options_.rank.has_value()) {
    SelectProgram(*options_.rank);
  } else {
    for (int32_t rank = 0; rank < plan_.world_size(); ++rank)
      SelectProgram(rank);
  }
  SelectParams();
  SelectSkips();
  return std::move(view_);
}

void ViewSelector::MatchNames() {
  for (const fb::Param* param : *body_.params()) {
    params_.push_back(MatchTensors(options_.tensor_glob, *param));
  }
  for (const fb::Buffer* buffer : *body_.buffers()) {
    const MatchedTensors tensors = MatchTensors(options_.tensor_glob, *buffer);
    MatchedElements elements = {.all = tensors.all, .boxes = {}};
    const uint64_t tensor_elements = TensorElements(*buffer);
    for (uint64_t tensor = 0; !tensors.all && tensor < tensors.tensors.size();
         ++tensor) {
      if (!tensors.Has(tensor)) continue;
      StridedBox box = {.offset = tensor * tensor_elements, .dims = {}};
      box.Add(tensor_elements, 1);
      elements.boxes.push_back(std::move(box));
    }
    for (uint32_t i = 0; !elements.all && i < Length(buffer->fragments());
         ++i) {
      MatchFragment(*buffer->fragments()->Get(i), elements);
    }
    named_buffers_.push_back(tensors.any);
    elements_.push_back(std::move(elements));
  }
}

// Adds the elements of `fragment` that belong to a matching param.
void ViewSelector::MatchFragment(const fb::Fragment& fragment,
                                 MatchedElements& elements) {
  const MatchedTensors& matched = params_[fragment.param()];
  if (!matched.any) return;
  const IndexDims* index = body_.params()->Get(fragment.param())->index();
  // Of a param that matches in part, one box for every index of the fragment.
  const uint32_t walked_dims = matched.all ? 0 : Length(index);
  std::vector<uint64_t> position(walked_dims, 0);
  while (true) {
    uint64_t tensor = 0;
    StridedBox box = {.offset = fragment.offset(), .dims = {}};
    for (uint32_t dim = 0; dim < walked_dims; ++dim) {
      tensor = tensor * index->Get(dim)->count() + fragment.lo()->Get(dim) +
               position[dim];
      box.offset += position[dim] * fragment.stride()->Get(dim);
    }
    if (matched.Has(tensor)) {
      for (uint32_t dim = walked_dims; dim < Length(fragment.extent()); ++dim) {
        box.Add(fragment.extent()->Get(dim), fragment.stride()->Get(dim));
      }
      box.Normalize();
      elements.boxes.push_back(std::move(box));
    }
    uint32_t dim = walked_dims;
    while (dim > 0 && ++position[dim - 1] == fragment.extent()->Get(dim - 1)) {
      position[--dim] = 0;
    }
    if (dim == 0) return;
  }
}

bool ViewSelector::SelectCopies(const fb::RankProgram& program, uint32_t list) {
  const fb::CopyList& run = *body_.copy_lists()->Get(list);
  bool any = false;
  for (uint32_t i = run.begin(); i < run.begin() + run.count(); ++i) {
    const fb::Copy& copy = *body_.copies()->Get(i);
    if (filtered() &&
        !elements_[program.buffers()->Get(copy.buffer_slot())].Touch(
            BoxOf(body_, copy))) {
      continue;
    }
    view_.copies[i] = true;
    any = true;
  }
  // A message that carries nothing is still worth seeing when all is shown.
  any = any || !filtered();
  if (any) view_.copy_lists[list] = true;
  return any;
}

void ViewSelector::SelectProgram(int32_t rank) {
  const fb::RankProgram& program =
      *body_.programs()->Get(static_cast<uint32_t>(rank));
  PlanView::Program shown = {
      .rank = rank, .messages = {}, .fills = false, .quantizes = {}};
  bool any_buffer = false;
  for (const uint32_t buffer : *program.buffers()) {
    if (filtered() && !elements_[buffer].all && elements_[buffer].boxes.empty())
      continue;
    view_.buffers[buffer] = true;
    view_.partial_buffers[buffer] = filtered() && !named_buffers_[buffer];
    any_buffer = true;
  }
  if (filtered() && !any_buffer) return;
  shown.fills = !CopiesOf(body_, program.fills()).empty() &&
                SelectCopies(program, program.fills());
  const MessageVector& messages = plan_.messages().Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& message = *messages.Get(i);
    if (!SelectCopies(program, message.copies())) continue;
    shown.messages.push_back(i);
    view_.rounds[message.round()] = true;
  }
  // Those of a param or a buffer with a match.
  for (uint32_t i = 0; i < Length(program.quantizes()); ++i) {
    const fb::Quantize& op = *program.quantizes()->Get(i);
    const fb::Quantization& quantization =
        *body_.quantizations()->Get(op.quantization());
    if (!filtered() || params_[quantization.of()].any ||
        params_[quantization.data()].any ||
        params_[quantization.scales()].any ||
        named_buffers_[program.buffers()->Get(op.input_slot())] ||
        named_buffers_[program.buffers()->Get(op.output_slot())] ||
        named_buffers_[program.buffers()->Get(op.scale_slot())]) {
      shown.quantizes.push_back(i);
    }
  }
  view_.programs.push_back(std::move(shown));
}

void ViewSelector::SelectParams() {
  for (uint32_t buffer = 0; buffer < view_.buffers.size(); ++buffer) {
    const auto* fragments = body_.buffers()->Get(buffer)->fragments();
    for (uint32_t i = 0; view_.buffers[buffer] && i < Length(fragments); ++i) {
      const uint32_t param = fragments->Get(i)->param();
      if (!view_.partial_buffers[buffer] || params_[param].any)
        view_.params[param] = true;
    }
  }
  // A match that no rank holds: one that is skipped.
  for (uint32_t param = 0; param < params_.size() && !options_.rank.has_value();
       ++param) {
    if (params_[param].any) view_.params[param] = true;
  }
  for (uint32_t i = 0; i < Length(body_.quantizations()); ++i) {
    const fb::Quantization& quantization = *body_.quantizations()->Get(i);
    view_.quantizations.push_back(view_.params[quantization.of()] ||
                                  view_.params[quantization.data()] ||
                                  view_.params[quantization.scales()]);
  }
}

void ViewSelector::SelectSkips() {
  for (uint32_t skip = 0; filtered() && skip < view_.skips.size(); ++skip) {
    const flatbuffers::String& name = *body_.skips()->Get(skip)->name();
    view_.skips[skip] = GlobMatches(options_.tensor_glob,
                                    std::string_view(name.data(), name.size()));
  }
}

}  // namespace

bool HasTensor(const PlanFile& plan, std::string_view glob) {
  const fb::Body& body = plan.body();
  const auto is_match = [&](const auto* stack) {
    return MatchTensors(glob, *stack).any;
  };
  for (const fb::Param* param : *body.params()) {
    if (is_match(param)) return true;
  }
  for (const fb::Buffer* buffer : *body.buffers()) {
    if (is_match(buffer)) return true;
  }
  for (uint32_t i = 0; i < Length(body.skips()); ++i) {
    const flatbuffers::String& name = *body.skips()->Get(i)->name();
    if (GlobMatches(glob, std::string_view(name.data(), name.size()))) {
      return true;
    }
  }
  return false;
}

PlanView SelectView(const PlanFile& plan, const TextOptions& options) {
  return ViewSelector(plan, options).Select();
}

}  // namespace refit
