#include "plan/schedule/tensor_table.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "absl/types/span.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// The reason of what is moved or filled.
constexpr fb::SkipReason kNone = fb::SkipReason::kUnspecified;

bool IsSkip(fb::SkipReason reason) { return reason != kNone; }
bool IsNoSkip(fb::SkipReason reason) { return reason == kNone; }

// A loop of a fragment or region, in virtual elements. Unlike a copy's it may
// run on from one tensor of the stack into the next.
struct VirtualLoop {
  uint64_t extent = 1;
  uint64_t stride = 0;
};

// Of a fragment or region.
template <typename Piece>
std::vector<VirtualLoop> LoopsOf(const Piece& piece) {
  std::vector<VirtualLoop> loops;
  if (piece.extent() == nullptr) return loops;
  for (uint32_t d = 0; d < piece.extent()->size(); ++d) {
    loops.push_back(
        {.extent = piece.extent()->Get(d), .stride = piece.stride()->Get(d)});
  }
  return loops;
}

// Calls `visit` for each tensor of the stack that holds an element of the box
// of `loops` at virtual `offset`; for some tensors more than once.
void ForEachTensor(uint64_t offset, absl::Span<const VirtualLoop> loops,
                   uint64_t tensor_elements,
                   const std::function<void(uint64_t)>& visit) {
  // Loops that together stay inside a tensor are only a span of elements; the
  // others are walked.
  std::vector<VirtualLoop> walked;
  for (const VirtualLoop& loop : loops) {
    if (loop.extent == 0) return;
    if (loop.extent > 1) walked.push_back(loop);
  }
  std::sort(walked.begin(), walked.end(),
            [](const VirtualLoop& a, const VirtualLoop& b) {
              return a.stride < b.stride;
            });
  uint64_t span = 0;
  size_t inside = 0;
  for (; inside < walked.size(); ++inside) {
    const VirtualLoop& loop = walked[inside];
    const uint64_t wider = span + (loop.extent - 1) * loop.stride;
    if (offset % tensor_elements + wider >= tensor_elements) break;
    span = wider;
  }
  walked.erase(walked.begin(), walked.begin() + inside);
  std::vector<uint64_t> counts(walked.size(), 0);
  while (true) {
    for (uint64_t tensor = offset / tensor_elements;
         tensor <= (offset + span) / tensor_elements; ++tensor) {
      visit(tensor);
    }
    size_t d = 0;
    while (d < walked.size() && ++counts[d] == walked[d].extent) {
      offset -= (walked[d].extent - 1) * walked[d].stride;
      counts[d] = 0;
      ++d;
    }
    if (d == walked.size()) return;
    offset += walked[d].stride;
  }
}

}  // namespace

TensorTable::TensorTable(const PlanFile& plan, int32_t rank)
    : body_(plan.body()), program_(*plan.body().programs()->Get(rank)) {
  begin_.push_back(0);
  const uint32_t stacks = Length(program_.buffers());
  for (uint32_t slot = 0; slot < stacks; ++slot) {
    begin_.push_back(begin_.back() + StackTensors(buffer(slot)));
  }
  workers_stacks_ = stacks - program_.scratch_buffers();
}

const fb::Buffer& TensorTable::buffer(size_t slot) const {
  return *body_.buffers()->Get(program_.buffers()->Get(slot));
}

std::string TensorTable::Name(size_t slot, uint64_t ordinal) const {
  return TensorName(buffer(slot), ordinal);
}

CopyAddress TensorTable::AddressOf(size_t slot, uint64_t offset) const {
  const fb::Buffer& stack = buffer(slot);
  const uint64_t elements = TensorElements(stack);
  return {.entry = begin(slot) + offset / elements,
          .byte_offset = offset % elements * DTypeBytes(stack.dtype()),
          .dtype = stack.dtype()};
}

CopyStride TensorTable::StrideOf(size_t slot, uint64_t stride) const {
  const fb::Buffer& stack = buffer(slot);
  const uint64_t elements = TensorElements(stack);
  if (stride >= elements && stride % elements == 0) {
    return {.entries = stride / elements};
  }
  return {.bytes = stride * DTypeBytes(stack.dtype())};
}

std::vector<bool> TensorTable::WithPart(
    absl::FunctionRef<bool(fb::SkipReason)> of_reason) const {
  std::vector<bool> with(size(), false);
  for (size_t slot = 0; slot < stacks(); ++slot) {
    const fb::Buffer& stack = buffer(slot);
    const uint64_t elements = TensorElements(stack);
    if (elements == 0) continue;
    const auto mark = [&](const auto& piece) {
      ForEachTensor(
          piece.offset(), LoopsOf(piece), elements,
          [&](uint64_t tensor) { with[begin(slot) + tensor] = true; });
    };
    if (stack.regions() != nullptr) {
      for (const fb::Region* region : *stack.regions()) {
        const bool skips = region->kind() == fb::RegionKind::kSkip;
        if (of_reason(skips ? region->reason() : kNone)) mark(*region);
      }
    }
    if (stack.fragments() == nullptr) continue;
    for (const fb::Fragment* fragment : *stack.fragments()) {
      const fb::Param& param = *body_.params()->Get(fragment->param());
      if (of_reason(param.skip())) mark(*fragment);
    }
  }
  return with;
}

std::vector<bool> TensorTable::Skipped() const {
  std::vector<bool> skipped = WithPart(IsSkip);
  // One element that the refit moves or fills makes its tensor needed.
  const std::vector<bool> needed = WithPart(IsNoSkip);
  for (size_t i = 0; i < skipped.size(); ++i) {
    skipped[i] = skipped[i] && !needed[i];
  }
  return skipped;
}

std::vector<bool> TensorTable::PartlySkipped() const {
  std::vector<bool> partly = WithPart(IsSkip);
  const std::vector<bool> needed = WithPart(IsNoSkip);
  for (size_t i = 0; i < partly.size(); ++i) partly[i] = partly[i] && needed[i];
  return partly;
}

std::vector<bool> TensorTable::LeftAlone() const {
  // Of the other reasons the worker derives the elements or never reads them.
  return WithPart([](fb::SkipReason reason) {
    return reason == fb::SkipReason::kExcluded ||
           reason == fb::SkipReason::kFrozen;
  });
}

void TensorTable::ForEachPostHook(
    absl::FunctionRef<void(size_t slot, uint64_t entry, const fb::PostHook&)>
        visit) const {
  std::optional<std::vector<bool>> skipped;
  for (size_t slot = 0; slot < stacks(); ++slot) {
    const fb::Buffer& stack = buffer(slot);
    if (stack.post_hooks() == nullptr) continue;
    if (!skipped.has_value()) skipped = Skipped();
    for (uint64_t entry = begin(slot); entry < begin(slot + 1); ++entry) {
      // What no refit writes is as the worker made it.
      if ((*skipped)[entry]) continue;
      for (const fb::PostHook* hook : *stack.post_hooks()) {
        visit(slot, entry, *hook);
      }
    }
  }
}

std::set<std::string> TensorTable::PostHookNames() const {
  std::set<std::string> names;
  for (const fb::Buffer* stack : *body_.buffers()) {
    if (stack->post_hooks() == nullptr) continue;
    for (const fb::PostHook* hook : *stack->post_hooks()) {
      names.insert(hook->name()->str());
    }
  }
  return names;
}

}  // namespace refit
