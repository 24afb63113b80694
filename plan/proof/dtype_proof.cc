#include "plan/proof/dtype_proof.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "plan/dtype.h"
#include "plan/proof/affine.h"
#include "plan/proof/tiling.h"

namespace refit::proof {
namespace {

using Coordinates = absl::InlinedVector<int64_t, 6>;

// Tensors of a param (a box of its index dimensions) in one dtype; by dtype
// first, so that the usual case of a single one is seen at the ends.
using Held = std::tuple<DType, Coordinates, Coordinates>;

// The buffer that holds them first.
struct Holder {
  uint32_t rank = 0;
  uint32_t slot = 0;
  DType dtype = DType::kUnspecified;
};

bool operator<(const Holder& a, const Holder& b) {
  return std::tie(a.rank, a.slot) < std::tie(b.rank, b.slot);
}

using HeldByParam = std::vector<std::map<Held, Holder>>;

void AddFragments(const fb::Body& body, const fb::Buffer& buffer, uint32_t rank,
                  uint32_t slot, HeldByParam& held) {
  if (buffer.fragments() == nullptr) return;
  for (const fb::Fragment* fragment : *buffer.fragments()) {
    const auto* index = body.params()->Get(fragment->param())->index();
    Coordinates lo;
    Coordinates hi;
    for (uint32_t d = 0; index != nullptr && d < index->size(); ++d) {
      lo.push_back(static_cast<int64_t>(fragment->lo()->Get(d)));
      hi.push_back(lo.back() +
                   static_cast<int64_t>(fragment->extent()->Get(d)));
    }
    held[fragment->param()].try_emplace(
        Held(buffer.dtype(), std::move(lo), std::move(hi)),
        Holder{rank, slot, buffer.dtype()});
  }
}

void CheckParam(const fb::Param& param, const std::map<Held, Holder>& held,
                Steps& steps, Violations& violations) {
  if (held.empty() || std::get<DType>(held.begin()->first) ==
                          std::get<DType>(held.rbegin()->first)) {
    return;
  }
  std::vector<Box> boxes;
  std::vector<Holder> holders;
  for (const auto& [tensors, holder] : held) {
    const auto& [dtype, lo, hi] = tensors;
    boxes.push_back({lo, hi});
    holders.push_back(holder);
  }
  const auto overlap = FindOverlap(
      PointersTo(boxes),
      [&](size_t a, size_t b) { return holders[a].dtype != holders[b].dtype; },
      steps);
  if (!overlap.has_value()) return;
  const Holder& one =
      std::min(holders[overlap->first], holders[overlap->second]);
  const Holder& other =
      std::max(holders[overlap->first], holders[overlap->second]);
  uint64_t tensor = 0;
  const Coordinates shared =
      FirstShared(boxes[overlap->first], boxes[overlap->second]);
  for (uint32_t d = 0; d < shared.size(); ++d) {
    tensor = tensor * param.index()->Get(d)->count() +
             static_cast<uint64_t>(shared[d]);
  }
  violations.Report({.rank = other.rank, .buffer_slot = other.slot},
                    Invariant::kWellFormedInputs, [&] {
                      return absl::StrFormat(
                          "holds %s as %s when rank %d holds it as %s",
                          TensorName(param, tensor), DTypeName(other.dtype),
                          one.rank, DTypeName(one.dtype));
                    });
}

}  // namespace

void CheckSourceDTypes(const fb::Body& body, Steps& steps,
                       Violations& violations) {
  HeldByParam held(body.params()->size());
  std::vector<bool> seen(body.buffers()->size(), false);
  for (uint32_t rank = 0; rank < body.source_ranks(); ++rank) {
    const auto& buffers = *body.programs()->Get(rank)->buffers();
    for (uint32_t slot = 0; slot < buffers.size(); ++slot) {
      const uint32_t buffer = buffers.Get(slot);
      if (seen[buffer]) continue;
      seen[buffer] = true;
      AddFragments(body, *body.buffers()->Get(buffer), rank, slot, held);
    }
  }
  for (uint32_t p = 0; p < held.size(); ++p) {
    CheckParam(*body.params()->Get(p), held[p], steps, violations);
  }
}

}  // namespace refit::proof
