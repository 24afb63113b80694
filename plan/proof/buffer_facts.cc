#include "plan/proof/buffer_facts.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/tiling.h"
#include "plan/proof/violations.h"
#include "plan/vector_length.h"

namespace refit::proof {
namespace {

using Dims = absl::InlinedVector<int64_t, 6>;

template <typename Stack>
Dims VirtualShape(const Stack& stack) {
  Dims shape;
  const uint32_t index = Length(stack.index());
  for (uint32_t d = 0; d < index; ++d) {
    shape.push_back(stack.index()->Get(d)->count());
  }
  const uint32_t dims = Length(stack.shape());
  for (uint32_t d = 0; d < dims; ++d) {
    shape.push_back(static_cast<int64_t>(stack.shape()->Get(d)));
  }
  return shape;
}

Dims RowMajorStrides(const Dims& shape) {
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

Digits DigitsOf(const flatbuffers::Vector<uint64_t>* extent,
                const flatbuffers::Vector<uint64_t>* stride) {
  Digits digits;
  const uint32_t dims = Length(extent);
  for (uint32_t d = 0; d < dims; ++d) {
    digits.push_back({.extent = static_cast<int64_t>(extent->Get(d)),
                      .stride = static_cast<int64_t>(stride->Get(d))});
  }
  return digits;
}

// The buffer's own dimensions.
Lattice WholeBuffer(const fb::Buffer& buffer) {
  const Dims shape = VirtualShape(buffer);
  const Dims strides = RowMajorStrides(shape);
  Digits digits;
  for (size_t d = 0; d < shape.size(); ++d) {
    digits.push_back({.extent = shape[d], .stride = strides[d]});
  }
  return *MakeLattice(0, digits);  // dense, so it nests
}

// A box of the buffer's own coordinates that holds all of `part`.
struct PartHull {
  Box box;
  bool exact = false;  // and nothing else
};

PartHull HullOf(const Lattice& whole, const Lattice& part) {
  Placement placement;
  if (Place(whole, part.offset, part.digits, placement)) {
    return {placement.Hull(), placement.FillsHull()};
  }
  // Everything between the first and the last element: equal coordinates down
  // to the first that differs, all of the dimensions inside it.
  PartHull hull;
  int64_t first = part.offset;
  int64_t last = part.Last();
  bool differs = false;
  for (const Digit& digit : whole.digits) {
    hull.box.lo.push_back(differs ? 0 : first / digit.stride);
    hull.box.hi.push_back((differs ? digit.extent - 1 : last / digit.stride) +
                          1);
    differs = differs || first / digit.stride != last / digit.stride;
    first %= digit.stride;
    last %= digit.stride;
  }
  return hull;
}

std::string PartText(const fb::Body& body, const Part& part) {
  if (part.fragment != nullptr) {
    return ElementText(*body.params()->Get(part.fragment->param()),
                       part.param_base);
  }
  return part.IsFill() ? "a fill region" : "a skip region";
}

}  // namespace

BufferFacts::BufferFacts(const fb::Body& body, const fb::Buffer& buffer,
                         Steps& steps)
    : steps_(&steps),
      tensor_elements_(static_cast<int64_t>(TensorElements(buffer))) {
  elements_ = tensor_elements_ * static_cast<int64_t>(StackTensors(buffer));
  AddParts(body, buffer);
  if (flaw_.has_value() || elements_ == 0) return;

  const Lattice whole = WholeBuffer(buffer);
  std::vector<Box> boxes;
  std::vector<bool> exact;
  bool all_exact = true;
  for (const Part& part : parts_) {
    PartHull hull = HullOf(whole, part.lattice);
    boxes.push_back(std::move(hull.box));
    exact.push_back(hull.exact);
    all_exact = all_exact && hull.exact;
  }
  bool unknown = false;
  const auto overlap = FindOverlap(
      PointersTo(boxes),
      [&](size_t a, size_t b) {
        if (exact[a] && exact[b]) return true;
        const Intersection shared =
            Intersect(parts_[a].lattice, parts_[b].lattice);
        unknown = shared == Intersection::kUnknown;
        return shared != Intersection::kEmpty;
      },
      steps);
  if (overlap.has_value()) {
    const auto [a, b] = *overlap;
    flaw_ = BufferFlaw{.offset = exact[a] && exact[b]
                                     ? whole.At(FirstShared(boxes[a], boxes[b]))
                                     : parts_[b].lattice.offset,
                       .text = absl::StrCat(
                           unknown ? "cannot prove to be disjoint" : "overlap",
                           ": the part from ", PartText(body, parts_[a]),
                           " and that from ", PartText(body, parts_[b]))};
    return;
  }
  SortForFind();

  // Disjoint parts of the buffer's whole volume leave nothing out.
  __int128 covered = 0;
  for (const Part& part : parts_) covered += part.lattice.Volume();
  if (covered == elements_) return;
  gap_ = BufferFlaw{
      .invariant = Invariant::kWrittenOnce,
      .text = absl::StrFormat(
          "is neither of a param nor of a region; the parts hold %d of the "
          "buffer's %d elements",
          static_cast<int64_t>(covered), elements_)};
  if (all_exact) {
    Box space;
    for (const Digit& digit : whole.digits) {
      space.lo.push_back(0);
      space.hi.push_back(digit.extent);
    }
    const auto open = FirstUncovered(space, PointersTo(boxes));
    if (open.has_value()) gap_->offset = whole.At(*open);
  }
}

void BufferFacts::AddParts(const fb::Body& body, const fb::Buffer& buffer) {
  const uint32_t fragments = Length(buffer.fragments());
  const uint32_t regions = Length(buffer.regions());
  parts_.reserve(fragments + regions);
  for (uint32_t i = 0; i < fragments; ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    Part* part = AddPart("fragment", static_cast<int64_t>(fragment.offset()),
                         DigitsOf(fragment.extent(), fragment.stride()));
    if (part == nullptr) return;
    part->fragment = &fragment;
    if (body.params()->Get(fragment.param())->skip() !=
        fb::SkipReason::kUnspecified) {
      skipped_elements_ += part->lattice.Volume();
    }
    const Dims strides =
        RowMajorStrides(VirtualShape(*body.params()->Get(fragment.param())));
    for (size_t d = 0; d < strides.size(); ++d) {
      part->param_base +=
          static_cast<int64_t>(fragment.lo()->Get(static_cast<uint32_t>(d))) *
          strides[d];
    }
    for (uint8_t d : part->lattice.dimensions) {
      part->param_strides.push_back(strides[d]);
    }
  }
  for (uint32_t i = 0; i < regions; ++i) {
    const fb::Region& region = *buffer.regions()->Get(i);
    Part* part = AddPart("region", static_cast<int64_t>(region.offset()),
                         DigitsOf(region.extent(), region.stride()));
    if (part == nullptr) return;
    part->region = &region;
    if (!part->IsFill()) skipped_elements_ += part->lattice.Volume();
  }
}

Part* BufferFacts::AddPart(std::string_view kind, int64_t offset,
                           absl::Span<const Digit> digits) {
  std::optional<Lattice> lattice = MakeLattice(offset, digits);
  if (!lattice.has_value()) {
    flaw_ = BufferFlaw{
        .offset = offset,
        .text = absl::StrFormat("the strides of a %s do not nest, so that its "
                                "elements may coincide",
                                kind)};
    return nullptr;
  }
  Part& part = parts_.emplace_back();
  part.lattice = *lattice;
  return &part;
}

void BufferFacts::SortForFind() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Lattice& lattice = parts_[i].lattice;
    Span span;
    span.part = static_cast<int32_t>(i);
    span.begin = lattice.offset % tensor_elements_;
    span.end = span.begin;
    bool whole_tensors = true;
    for (const Digit& digit : lattice.digits) {
      if (digit.stride < tensor_elements_) {
        span.end += (digit.extent - 1) * digit.stride;
      } else if (digit.stride % tensor_elements_ != 0) {
        whole_tensors = false;
      }
    }
    if (!whole_tensors || span.end >= tensor_elements_) {
      span.begin = 0;
      span.end = tensor_elements_ - 1;
    }
    spans_.push_back(span);
  }
  std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.part < b.part;
  });
  int64_t reach = -1;
  for (Span& span : spans_) {
    reach = std::max(reach, span.end);
    span.reach = reach;
  }
}

std::vector<int64_t> BufferFacts::Geometry() const {
  constexpr int64_t kRegion = -1;
  std::vector<int64_t> geometry = {elements_, tensor_elements_,
                                   flaw_.has_value() ? 1 : 0};
  for (const Part& part : parts_) {
    geometry.push_back(part.lattice.offset);
    geometry.push_back(static_cast<int64_t>(part.lattice.digits.size()));
    for (const Digit& digit : part.lattice.digits) {
      geometry.push_back(digit.extent);
      geometry.push_back(digit.stride);
    }
    geometry.push_back(
        part.fragment != nullptr ? int64_t{part.fragment->param()} : kRegion);
    geometry.insert(geometry.end(), part.param_strides.begin(),
                    part.param_strides.end());
  }
  return geometry;
}

int32_t BufferFacts::Find(int64_t offset, absl::Span<const Digit> digits,
                          Placement& placement) const {
  const int64_t position = offset % tensor_elements_;
  auto span = std::upper_bound(
      spans_.begin(), spans_.end(), position,
      [](int64_t value, const Span& s) { return value < s.begin; });
  while (span != spans_.begin()) {
    --span;
    if (span->reach < position || !steps_->Take(1)) break;
    if (span->end >= position &&
        Place(parts_[static_cast<size_t>(span->part)].lattice, offset, digits,
              placement)) {
      return span->part;
    }
  }
  return -1;
}

int32_t BufferFacts::Find(int64_t offset) const {
  Placement placement;
  return Find(offset, {}, placement);
}

Sequence BufferFacts::ParamSequence(const Part& part,
                                    const Placement& placement) const {
  Sequence sequence;
  sequence.base = part.param_base;
  for (size_t d = 0; d < placement.start.size(); ++d) {
    sequence.base += placement.start[d] * part.param_strides[d];
  }
  for (const Placement::Move& move : placement.moves) {
    sequence.digits.push_back(
        {.extent = move.extent,
         .stride = move.stride * part.param_strides[move.dimension]});
  }
  Canonicalize(sequence);
  return sequence;
}

}  // namespace refit::proof
