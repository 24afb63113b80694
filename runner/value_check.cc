#include "runner/value_check.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/cast.h"
#include "plan/scratch_windows.h"
#include "runner/fragment_walk.h"
#include "runner/generated_values.h"
#include "runner/quantized_values.h"
#include "runner/rank_threads.h"

namespace refit {
namespace {

constexpr uint64_t kElementsPerPart = uint64_t{1} << 20;
constexpr size_t kBlockElements = 1024;
constexpr size_t kMaxElementBytes = 8;
constexpr size_t kMaxReportedMismatches = 5;

using Block = std::byte[kBlockElements * kMaxElementBytes];

// The tensors of `param` of which `fragment` holds a part.
std::vector<uint64_t> TensorsOf(const fb::Fragment& fragment,
                                const fb::Param& param) {
  std::vector<uint64_t> tensors = {0};
  const uint32_t dims = param.index() == nullptr ? 0 : param.index()->size();
  for (uint32_t d = 0; d < dims; ++d) {
    const uint64_t begin = fragment.lo()->Get(d);
    const uint64_t end = begin + fragment.extent()->Get(d);
    std::vector<uint64_t> inner;
    for (const uint64_t outer : tensors) {
      for (uint64_t i = begin; i < end; ++i) {
        inner.push_back(outer * param.index()->Get(d)->count() + i);
      }
    }
    tensors = std::move(inner);
  }
  return tensors;
}

std::byte* ElementAt(const BoundTensor& tensor, uint64_t element,
                     size_t element_bytes) {
  return static_cast<std::byte*>(tensor.data) + element * element_bytes;
}

// Elements `stride` apart to contiguous ones, and back.
void Gather(const std::byte* from, uint64_t stride, size_t count,
            size_t element_bytes, std::byte* to) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(to + i * element_bytes, from + i * stride * element_bytes,
                element_bytes);
  }
}

void Scatter(const std::byte* from, uint64_t stride, size_t count,
             size_t element_bytes, std::byte* to) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(to + i * stride * element_bytes, from + i * element_bytes,
                element_bytes);
  }
}

// Sets the bits of those of `count` elements of a tensor, `stride` apart from
// element `first` on, which differ from the contiguous ones at `made`. Other
// threads may set bits of the same words.
void MarkDifferent(const std::byte* made, const std::byte* held,
                   uint64_t stride, size_t count, size_t element_bytes,
                   uint64_t first, uint32_t* bits) {
  for (size_t i = 0; i < count; ++i) {
    if (std::memcmp(made + i * element_bytes, held + i * stride * element_bytes,
                    element_bytes) == 0) {
      continue;
    }
    const uint64_t element = first + i * stride;
    std::atomic_ref<uint32_t>(bits[element / 32])
        .fetch_or(uint32_t{1} << (element % 32), std::memory_order_relaxed);
  }
}

std::string HexText(const std::byte* value, size_t element_bytes) {
  std::string text = "0x";
  for (size_t i = element_bytes; i-- > 0;) {
    absl::StrAppend(&text,
                    absl::Hex(static_cast<uint8_t>(value[i]), absl::kZeroPad2));
  }
  return text;
}

}  // namespace

// The wrong elements of a piece; of the first, where it is and what it holds.
struct ValueCheck::Wrong {
  uint64_t elements = 0;
  StackElement buffer;
  StackElement param;
  std::string expected;
  std::string found;

  // Of what the row has from its element `done` on, `range` of the param.
  void Count(const WalkRow& row, uint64_t done, const IndexRange& range,
             const std::byte* found_bytes, const std::byte* expected_bytes,
             size_t element_bytes) {
    for (size_t i = 0; i < range.count; ++i) {
      const std::byte* const found_i = found_bytes + i * element_bytes;
      const std::byte* const expected_i = expected_bytes + i * element_bytes;
      if (std::memcmp(found_i, expected_i, element_bytes) == 0) continue;
      if (elements++ > 0) continue;
      buffer = {.tensor = row.buffer.tensor,
                .element = row.buffer.element + (done + i) * row.buffer_stride};
      param = {.tensor = row.param.tensor,
               .element = range.first + i * range.stride};
      expected = HexText(expected_i, element_bytes);
      found = HexText(found_i, element_bytes);
    }
  }
};

ValueCheck::ValueCheck(const PlanFile& plan, std::optional<int32_t> only_rank,
                       Division division)
    : plan_(plan), division_(division) {
  const fb::Body& body = plan.body();
  const uint32_t params = body.params() == nullptr ? 0 : body.params()->size();
  source_dtypes_.resize(params);
  seeds_.resize(params);
  for (uint32_t p = 0; p < params; ++p) {
    const fb::Param& param = *body.params()->Get(p);
    seeds_[p].resize(StackTensors(param));
    source_dtypes_[p].assign(seeds_[p].size(), param.dtype());
    for (uint64_t i = 0; i < seeds_[p].size(); ++i) {
      seeds_[p][i] = TensorSeed(TensorName(param, i));
    }
  }
  // Values and scales have the seeds of what they are made of.
  quantizations_.resize(params, nullptr);
  if (body.quantizations() != nullptr) {
    for (const fb::Quantization* quantization : *body.quantizations()) {
      for (const uint32_t made :
           {quantization->data(), quantization->scales()}) {
        quantizations_[made] = quantization;
        seeds_[made] = seeds_[quantization->of()];
      }
    }
  }
  for (const Piece& piece : PiecesOf(0, plan.source_ranks())) {
    if (piece.fragment == nullptr || piece.part > 0) continue;
    const uint32_t p = piece.fragment->param();
    for (const uint64_t tensor :
         TensorsOf(*piece.fragment, *body.params()->Get(p))) {
      source_dtypes_[p][tensor] = buffer(piece).dtype();
    }
  }
  // After the walk above, which is over all source ranks.
  only_rank_ = only_rank;
}

const fb::Buffer& ValueCheck::buffer(const Piece& piece) const {
  const fb::Body& body = plan_.body();
  const fb::RankProgram& program = *body.programs()->Get(piece.rank);
  return *body.buffers()->Get(program.buffers()->Get(piece.slot));
}

std::vector<ValueCheck::Piece> ValueCheck::PiecesOf(int32_t rank_begin,
                                                    int32_t rank_end) const {
  const fb::Body& body = plan_.body();
  std::vector<Piece> pieces;
  const auto add = [&](Piece piece, const FragmentWalk& walk) {
    piece.parts = walk.Parts(kElementsPerPart);
    for (piece.part = 0; piece.part < piece.parts; ++piece.part) {
      pieces.push_back(piece);
    }
  };
  for (int32_t rank = rank_begin; rank < rank_end; ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (program.buffers() == nullptr || !Covers(rank)) continue;
    Piece piece;
    piece.rank = rank;
    for (piece.slot = 0; piece.slot < program.buffers()->size(); ++piece.slot) {
      if (IsScratch(program, piece.slot)) break;  // no worker's; the last ones
      const fb::Buffer& stack = buffer(piece);
      if (stack.fragments() != nullptr) {
        for (const fb::Fragment* fragment : *stack.fragments()) {
          piece.fragment = fragment;
          add(piece,
              FragmentWalk(*fragment, *body.params()->Get(fragment->param()),
                           stack));
        }
        piece.fragment = nullptr;
      }
      if (stack.regions() != nullptr) {
        for (const fb::Region* region : *stack.regions()) {
          piece.region = region;
          add(piece, FragmentWalk(*region, stack));
        }
        piece.region = nullptr;
      }
      piece.first_tensor += StackTensors(stack);
    }
  }
  return pieces;
}

void ValueCheck::FillSources(const TensorsByRank& tensors) const {
  std::vector<const BoundTensor*> sources;
  for (int32_t rank = 0; rank < plan_.source_ranks(); ++rank) {
    for (const BoundTensor& tensor : tensors[rank]) sources.push_back(&tensor);
  }
  ParallelFor(sources.size(), [&](size_t i) {
    if (sources[i]->size_bytes == 0) return;
    std::memset(sources[i]->data, std::to_integer<int>(kSourcePoison),
                sources[i]->size_bytes);
  });
  FillPieces(tensors);
}

void ValueCheck::FillPieces(const TensorsByRank& tensors) const {
  const std::vector<Piece> pieces = PiecesOf(0, plan_.source_ranks());
  ParallelFor(pieces.size(), [&](size_t i) { FillPiece(pieces[i], tensors); });
}

void ValueCheck::ChangeSources(const TensorsByRank& tensors,
                               double change_rate) {
  ++steps_.count;
  steps_.change_rate = change_rate;
  FillPieces(tensors);
}

void ValueCheck::PoisonDestinations(const TensorsByRank& tensors) const {
  std::vector<const BoundTensor*> destinations;
  for (int32_t rank = plan_.source_ranks(); rank < plan_.world_size(); ++rank) {
    for (const BoundTensor& tensor : tensors[rank]) {
      destinations.push_back(&tensor);
    }
  }
  ParallelFor(destinations.size(), [&](size_t i) {
    if (destinations[i]->size_bytes == 0) return;
    std::memset(destinations[i]->data, std::to_integer<int>(kDestinationPoison),
                destinations[i]->size_bytes);
  });
}

void ValueCheck::FillPiece(const Piece& piece,
                           const TensorsByRank& tensors) const {
  if (piece.fragment == nullptr) return;
  const fb::Buffer& stack = buffer(piece);
  const uint32_t param_id = piece.fragment->param();
  const FragmentWalk walk(*piece.fragment,
                          *plan_.body().params()->Get(param_id), stack);
  const size_t element_bytes = DTypeBytes(stack.dtype());
  Block block;
  walk.Visit(piece.part, piece.parts, [&](const WalkRow& row) {
    const BoundTensor& tensor =
        tensors[piece.rank][piece.first_tensor + row.buffer.tensor];
    const uint64_t seed = seeds_[param_id][row.param.tensor];
    for (uint64_t done = 0; done < row.count; done += kBlockElements) {
      const IndexRange range = {
          .first = row.param.element + done * row.param_stride,
          .stride = std::max<uint64_t>(row.param_stride, 1),
          .count = std::min<size_t>(kBlockElements, row.count - done)};
      const uint64_t element = row.buffer.element + done * row.buffer_stride;
      std::byte* const to = ElementAt(tensor, element, element_bytes);
      const bool in_place = row.buffer_stride == 1 && tensor.changes == nullptr;
      std::byte* const made = in_place ? to : block;
      GenerateValues(seed, stack.dtype(), range, made);
      ChangeValues(seed, stack.dtype(), range, steps_, made);
      if (tensor.changes != nullptr) {
        MarkDifferent(block, to, row.buffer_stride, range.count, element_bytes,
                      element, tensor.changes);
      }
      if (!in_place) {
        Scatter(block, row.buffer_stride, range.count, element_bytes, to);
      }
    }
  });
}

void ValueCheck::CheckPiece(const Piece& piece, const TensorsByRank& tensors,
                            Wrong& wrong) const {
  const fb::Body& body = plan_.body();
  const fb::Buffer& stack = buffer(piece);
  const DType dtype = stack.dtype();
  const size_t element_bytes = DTypeBytes(dtype);
  const fb::Param* param = piece.fragment == nullptr
                               ? nullptr
                               : body.params()->Get(piece.fragment->param());
  // Skipped params stand as fragments; like skipped regions they stay as they
  // were.
  const bool has_value =
      param != nullptr && param->skip() == fb::SkipReason::kUnspecified;
  const bool filled =
      param == nullptr && piece.region->kind() == fb::RegionKind::kFill;
  std::optional<QuantizedValues> quantized;
  const fb::Quantization* quantization =
      has_value ? QuantizationOf(piece.fragment->param()) : nullptr;
  const bool is_data = quantization != nullptr &&
                       quantization->data() == piece.fragment->param();
  Block generated, expected, gathered;
  std::memset(expected, filled ? 0 : std::to_integer<int>(kDestinationPoison),
              sizeof(expected));

  const auto check_row = [&](const WalkRow& row) {
    const BoundTensor& tensor =
        tensors[piece.rank][piece.first_tensor + row.buffer.tensor];
    if (quantization != nullptr && !quantized.has_value()) {
      quantized.emplace(body, *quantization,
                        source_dtypes_[quantization->of()][row.param.tensor],
                        division_);
    }
    const DType source_dtype =
        has_value && quantization == nullptr
            ? source_dtypes_[piece.fragment->param()][row.param.tensor]
            : dtype;
    const CastFunction cast =
        source_dtype == dtype ? nullptr : FindCast(source_dtype, dtype);
    for (uint64_t done = 0; done < row.count; done += kBlockElements) {
      const IndexRange range = {
          .first = row.param.element + done * row.param_stride,
          .stride = std::max<uint64_t>(row.param_stride, 1),
          .count = std::min<size_t>(kBlockElements, row.count - done)};
      const uint64_t seed =
          has_value ? seeds_[piece.fragment->param()][row.param.tensor] : 0;
      if (quantization != nullptr && is_data) {
        quantized->GenerateData(seed, range, expected);
      } else if (quantization != nullptr) {
        quantized->GenerateScales(seed, range, expected);
      } else if (has_value) {
        std::byte* const made = cast == nullptr ? expected : generated;
        GenerateValues(seed, source_dtype, range, made);
        ChangeValues(seed, source_dtype, range, steps_, made);
        if (cast != nullptr) cast(expected, generated, range.count);
      }
      const std::byte* found = ElementAt(
          tensor, row.buffer.element + done * row.buffer_stride, element_bytes);
      if (row.buffer_stride != 1 && range.count > 1) {
        Gather(found, row.buffer_stride, range.count, element_bytes, gathered);
        found = gathered;
      }
      if (std::memcmp(found, expected, range.count * element_bytes) != 0) {
        wrong.Count(row, done, range, found, expected, element_bytes);
      }
    }
  };
  const FragmentWalk walk = param == nullptr
                                ? FragmentWalk(*piece.region, stack)
                                : FragmentWalk(*piece.fragment, *param, stack);
  walk.Visit(piece.part, piece.parts, check_row);
}

std::string ValueCheck::MismatchText(const Piece& piece,
                                     const Wrong& wrong) const {
  std::string what;
  if (piece.fragment != nullptr) {
    const fb::Param& param =
        *plan_.body().params()->Get(piece.fragment->param());
    what = absl::StrCat(
        "element ", wrong.param.element, " of param \"",
        TensorName(param, wrong.param.tensor), "\"",
        param.skip() == fb::SkipReason::kUnspecified ? "" : ", skipped");
  } else {
    what = piece.region->kind() == fb::RegionKind::kFill ? "zero fill"
                                                         : "a declared skip";
  }
  return absl::StrCat("rank ", piece.rank, ", buffer \"",
                      TensorName(buffer(piece), wrong.buffer.tensor),
                      "\", index ", wrong.buffer.element, ": found ",
                      wrong.found, ", expected ", wrong.expected, " (", what,
                      ")");
}

CheckResult ValueCheck::Check(const TensorsByRank& tensors) const {
  const std::vector<Piece> pieces =
      PiecesOf(plan_.source_ranks(), plan_.world_size());
  std::vector<Wrong> wrongs(pieces.size());
  ParallelFor(pieces.size(),
              [&](size_t i) { CheckPiece(pieces[i], tensors, wrongs[i]); });
  CheckResult result;
  std::vector<size_t> order;
  for (size_t i = 0; i < pieces.size(); ++i) {
    result.wrong_elements += wrongs[i].elements;
    if (wrongs[i].elements > 0) order.push_back(i);
  }
  const auto key = [&](size_t i) {
    return std::tuple(pieces[i].rank, pieces[i].slot, wrongs[i].buffer.tensor,
                      wrongs[i].buffer.element);
  };
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return key(a) < key(b); });
  for (size_t i = 0; i < std::min(order.size(), kMaxReportedMismatches); ++i) {
    result.mismatches.push_back(
        MismatchText(pieces[order[i]], wrongs[order[i]]));
  }
  CheckCoverage(result);
  return result;
}

// Counts bytes, and the elements under no fragment and no region as wrong.
void ValueCheck::CheckCoverage(CheckResult& result) const {
  const fb::Body& body = plan_.body();
  for (int32_t rank = plan_.source_ranks(); rank < plan_.world_size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (program.buffers() == nullptr || !Covers(rank)) continue;
    for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
      if (IsScratch(program, slot)) continue;
      const fb::Buffer& stack =
          *body.buffers()->Get(program.buffers()->Get(slot));
      uint64_t covered = 0;
      uint64_t skipped = 0;
      if (stack.fragments() != nullptr) {
        for (const fb::Fragment* fragment : *stack.fragments()) {
          const fb::Param& param = *body.params()->Get(fragment->param());
          const uint64_t elements =
              FragmentWalk(*fragment, param, stack).elements();
          covered += elements;
          if (param.skip() != fb::SkipReason::kUnspecified) skipped += elements;
        }
      }
      if (stack.regions() != nullptr) {
        for (const fb::Region* region : *stack.regions()) {
          const uint64_t elements = FragmentWalk(*region, stack).elements();
          covered += elements;
          if (region->kind() == fb::RegionKind::kSkip) skipped += elements;
        }
      }
      const uint64_t element_bytes = DTypeBytes(stack.dtype());
      result.checked_bytes += covered * element_bytes;
      result.skipped_bytes += skipped * element_bytes;
      const uint64_t total = TensorElements(stack) * StackTensors(stack);
      if (covered == total) continue;
      result.wrong_elements += total - covered;
      result.mismatches.push_back(absl::StrCat(
          "rank ", rank, ", buffer \"", stack.name()->str(), "\": of ", total,
          " elements the plan says nothing about ", total - covered));
    }
  }
}

}  // namespace refit
