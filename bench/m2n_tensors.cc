#include "bench/m2n_tensors.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "plan/scratch_windows.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

constexpr size_t kDimsMax = 3;

struct TensorBox {
  std::vector<uint64_t> lo;
  std::vector<uint64_t> extent;
};

// What one rank holds of one tensor: a strided box of a tensor of its own.
struct Part {
  int32_t rank = 0;
  uint64_t tensor = 0;
  uint64_t offset = 0;  // elements
  DType dtype = DType::kUnspecified;
  TensorBox box;
  std::vector<uint64_t> stride;  // elements
};

bool IsContiguous(const Part& part) {
  uint64_t expected = 1;
  for (size_t d = part.stride.size(); d-- > 0;) {
    if (part.box.extent[d] > 1 && part.stride[d] != expected) return false;
    expected *= part.box.extent[d];
  }
  return true;
}

// What of `part` is at [begin, end) of dimension `d`.
std::optional<Part> Cut(Part part, size_t d, uint64_t begin, uint64_t end) {
  const uint64_t lo = std::max(part.box.lo[d], begin);
  const uint64_t hi = std::min(part.box.lo[d] + part.box.extent[d], end);
  if (lo >= hi) return std::nullopt;
  part.offset += (lo - part.box.lo[d]) * part.stride[d];
  part.box.lo[d] = lo;
  part.box.extent[d] = hi - lo;
  return part;
}

// The mesh of `parts`, ascending by rank, which together are `whole`.
std::optional<M2nSide> MeshOf(absl::Span<const Part> parts,
                              const TensorBox& whole) {
  if (parts.empty()) return std::nullopt;
  const Part& first = parts.front();
  std::vector<size_t> sharded;
  for (size_t d = 0; d < whole.extent.size(); ++d) {
    if (first.box.extent[d] != whole.extent[d]) sharded.push_back(d);
  }
  if (sharded.size() > 1) return std::nullopt;
  const size_t dim = sharded.empty() ? 0 : sharded.front();
  const uint64_t extent = first.box.extent[dim];
  const uint64_t shards = whole.extent[dim] / extent;
  if (whole.extent[dim] % extent != 0 || parts.size() % shards != 0) {
    return std::nullopt;
  }
  const uint64_t replicas = parts.size() / shards;
  bool shards_inner = true;
  bool shards_outer = true;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (part.rank != first.rank + static_cast<int32_t>(i) ||
        part.dtype != first.dtype || part.box.extent != first.box.extent ||
        !IsContiguous(part)) {
      return std::nullopt;
    }
    for (size_t d = 0; d < whole.lo.size(); ++d) {
      if (d != dim && part.box.lo[d] != whole.lo[d]) return std::nullopt;
    }
    const uint64_t begin = part.box.lo[dim] - whole.lo[dim];
    if (begin % extent != 0) return std::nullopt;
    shards_inner &= begin / extent == i % shards;
    shards_outer &= begin / extent == i / replicas;
  }
  if (!shards_inner && !shards_outer) return std::nullopt;
  const auto mesh = [](uint64_t outer, uint64_t inner) {
    return std::array{static_cast<int>(outer), static_cast<int>(inner)};
  };
  const int placement = static_cast<int>(dim);
  return M2nSide{
      .start_rank = first.rank,
      .mesh = shards_inner ? mesh(replicas, shards) : mesh(shards, replicas),
      .placements = shards_inner ? std::array{kM2nReplicate, placement}
                                 : std::array{placement, kM2nReplicate},
      .local_shape = first.box.extent};
}

// A tensor's parts on both sides, each ascending by rank.
struct Parts {
  std::vector<Part> source;
  std::vector<Part> destination;
};

// The runs of `parts` that are meshes with all of `whole`: one of them all, or
// those of as many ranks as there are different parts.
std::vector<absl::Span<const Part>> MeshesIn(absl::Span<const Part> parts,
                                             const TensorBox& whole) {
  if (MeshOf(parts, whole).has_value()) return {parts};
  std::set<std::vector<uint64_t>> corners;
  for (const Part& part : parts) corners.insert(part.box.lo);
  std::vector<absl::Span<const Part>> meshes;
  for (size_t begin = 0; begin + corners.size() <= parts.size();) {
    const absl::Span<const Part> run = parts.subspan(begin, corners.size());
    const bool fits = MeshOf(run, whole).has_value();
    if (fits) meshes.push_back(run);
    begin += fits ? run.size() : 1;
  }
  return meshes;
}

M2nTensor TensorOf(absl::Span<const Part> sources,
                   absl::Span<const Part> destinations,
                   const TensorBox& whole) {
  M2nTensor made = {.dtype = sources.front().dtype,
                    .source = *MeshOf(sources, whole),
                    .destination = *MeshOf(destinations, whole),
                    .tiles = {}};
  const auto element_bytes = static_cast<uint64_t>(DTypeBytes(made.dtype));
  const auto add = [&](const Part& part) {
    made.tiles.push_back({.rank = part.rank,
                          .tensor = part.tensor,
                          .offset_bytes = part.offset * element_bytes});
  };
  for (const Part& part : sources) add(part);
  for (const Part& part : destinations) {
    add(part);
    uint64_t bytes = element_bytes;
    for (const uint64_t extent : part.box.extent) bytes *= extent;
    made.received_bytes += bytes;
  }
  return made;
}

// To each mesh of destinations from the first of sources; empty if there is
// none, or a destination is in none.
std::vector<M2nTensor> TensorsOf(const Parts& parts, const TensorBox& whole) {
  const std::vector<absl::Span<const Part>> sources =
      MeshesIn(parts.source, whole);
  std::vector<M2nTensor> tensors;
  size_t reached = 0;
  for (const absl::Span<const Part> run : MeshesIn(parts.destination, whole)) {
    if (sources.empty() || run.front().dtype != sources.front().front().dtype) {
      return {};
    }
    tensors.push_back(TensorOf(sources.front(), run, whole));
    reached += run.size();
  }
  if (reached != parts.destination.size()) return {};
  return tensors;
}

Parts CutAll(const Parts& parts, size_t d, uint64_t begin, uint64_t end) {
  Parts cut;
  for (const auto side : {&Parts::source, &Parts::destination}) {
    for (const Part& part : parts.*side) {
      if (auto of_part = Cut(part, d, begin, end)) {
        (cut.*side).push_back(*std::move(of_part));
      }
    }
  }
  return cut;
}

// The tensor as one, else in slabs of one dimension; empty if neither works.
std::vector<M2nTensor> InMeshes(const Parts& parts, const TensorBox& whole) {
  std::vector<M2nTensor> tensors = TensorsOf(parts, whole);
  if (!tensors.empty()) return tensors;
  for (size_t d = 0; d < whole.extent.size(); ++d) {
    std::set<uint64_t> edges;
    for (const auto side : {&Parts::source, &Parts::destination}) {
      for (const Part& part : parts.*side) {
        edges.insert(part.box.lo[d]);
        edges.insert(part.box.lo[d] + part.box.extent[d]);
      }
    }
    tensors.clear();
    bool fits = true;
    for (auto edge = edges.begin(); fits && std::next(edge) != edges.end();
         ++edge) {
      const uint64_t end = *std::next(edge);
      const Parts cut = CutAll(parts, d, *edge, end);
      if (cut.destination.empty()) continue;
      TensorBox slab = whole;
      slab.lo[d] = *edge;
      slab.extent[d] = end - *edge;
      const std::vector<M2nTensor> made = TensorsOf(cut, slab);
      fits = !made.empty();
      tensors.insert(tensors.end(), made.begin(), made.end());
    }
    if (fits) return tensors;
  }
  return {};
}

// By param and tensor of the stack.
using PartsByTensor = std::map<std::pair<uint32_t, uint64_t>, Parts>;

// Adds what `fragment` holds of each tensor of its param.
void AddParts(const fb::Body& body, const fb::Buffer& buffer,
              const fb::Fragment& fragment, int32_t rank, bool is_source,
              uint64_t first_tensor, PartsByTensor& all) {
  const fb::Param& param = *body.params()->Get(fragment.param());
  const uint32_t index_dims =
      param.index() == nullptr ? 0 : param.index()->size();
  const uint32_t dims = fragment.lo() == nullptr ? 0 : fragment.lo()->size();
  uint64_t tensor_elements = 1;
  if (buffer.shape() != nullptr) {
    for (const uint64_t extent : *buffer.shape()) tensor_elements *= extent;
  }
  Part part = {.rank = rank,
               .tensor = 0,
               .offset = 0,
               .dtype = buffer.dtype(),
               .box = {},
               .stride = {}};
  for (uint32_t d = index_dims; d < dims; ++d) {
    part.box.lo.push_back(fragment.lo()->Get(d));
    part.box.extent.push_back(fragment.extent()->Get(d));
    part.stride.push_back(fragment.stride()->Get(d));
  }
  if (part.stride.empty()) {  // a scalar
    part.box = {.lo = {0}, .extent = {1}};
    part.stride = {1};
  }
  std::vector<uint64_t> at(index_dims, 0);
  while (true) {
    uint64_t ordinal = 0;
    uint64_t offset = fragment.offset();
    for (uint32_t d = 0; d < index_dims; ++d) {
      ordinal = ordinal * param.index()->Get(d)->count() +
                fragment.lo()->Get(d) + at[d];
      offset += at[d] * fragment.stride()->Get(d);
    }
    part.tensor = first_tensor + offset / tensor_elements;
    part.offset = offset % tensor_elements;
    Parts& parts = all[{fragment.param(), ordinal}];
    (is_source ? parts.source : parts.destination).push_back(part);
    uint32_t d = index_dims;
    while (d > 0 && ++at[d - 1] == fragment.extent()->Get(d - 1)) at[--d] = 0;
    if (d == 0) return;
  }
}

PartsByTensor AllParts(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  PartsByTensor all;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const fb::RankProgram& program =
        *body.programs()->Get(static_cast<uint32_t>(rank));
    if (program.buffers() == nullptr) continue;
    uint64_t first_tensor = 0;
    for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
      if (IsScratch(program, slot)) break;
      const fb::Buffer& buffer =
          *body.buffers()->Get(program.buffers()->Get(slot));
      if (buffer.fragments() != nullptr) {
        for (const fb::Fragment* fragment : *buffer.fragments()) {
          const fb::Param& param = *body.params()->Get(fragment->param());
          if (param.skip() != fb::SkipReason::kUnspecified) continue;
          AddParts(body, buffer, *fragment, rank, rank < plan.source_ranks(),
                   first_tensor, all);
        }
      }
      first_tensor += StackTensors(buffer);
    }
  }
  return all;
}

}  // namespace

absl::StatusOr<std::vector<M2nTensor>> M2nTensors(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  if (body.colocated()) {
    return absl::UnimplementedError(
        "nccl_m2n needs a GPU for each rank, and this plan's ranks share GPUs");
  }
  if (body.quantizations() != nullptr && body.quantizations()->size() > 0) {
    return absl::UnimplementedError(
        "nccl_m2n does not quantize, and this plan does");
  }
  std::vector<M2nTensor> tensors;
  for (const auto& [key, parts] : AllParts(plan)) {
    if (parts.destination.empty()) continue;
    const fb::Param& param = *body.params()->Get(key.first);
    TensorBox whole;
    if (param.shape() != nullptr) {
      whole.extent.assign(param.shape()->begin(), param.shape()->end());
    }
    const std::string name = TensorName(param, key.second);
    if (whole.extent.size() > kDimsMax) {
      return absl::UnimplementedError(
          absl::StrCat("nccl_m2n cannot move \"", name, "\": it has ",
                       whole.extent.size(), " dimensions, more than 3"));
    }
    if (whole.extent.empty()) whole.extent = {1};
    whole.lo.assign(whole.extent.size(), 0);
    std::vector<M2nTensor> made = InMeshes(parts, whole);
    if (made.empty()) {
      return absl::UnimplementedError(
          absl::StrCat("nccl_m2n cannot move \"", name,
                       "\": its parts are no even meshes of contiguous tensors "
                       "of one dtype"));
    }
    std::move(made.begin(), made.end(), std::back_inserter(tensors));
  }
  return tensors;
}

}  // namespace refit
