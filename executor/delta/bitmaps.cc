#include "executor/delta/bitmaps.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"
#include "plan/schedule/tensor_table.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

// The memory of a tensor or of its bitmap.
struct NamedRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  const BoundTensor* tensor = nullptr;
  bool is_bitmap = false;

  std::string Text() const {
    return absl::StrCat(is_bitmap ? "the bitmap of \"" : "\"", tensor->name,
                        "\"");
  }
};

uint64_t ElementsOf(const BoundTensor& tensor) {
  return tensor.dtype == DType::kUnspecified
             ? 0
             : tensor.size_bytes / DTypeBytes(tensor.dtype);
}

// Why no tensor of `rank` has use for a bitmap; "" if they have.
std::string WhyNone(const PlanFile& plan, int32_t rank) {
  if (!HasRungs(plan.body())) {
    return "each refit sends all: the plan's job has no options.delta, or the "
           "plan no staged rounds";
  }
  if (plan.body().delta()->changes() != fb::DeltaChanges::kBitmap) {
    return "the plan's options.delta.changes is \"snapshot\", so the executor "
           "finds what changed; wanted no bitmap, or a plan with \"bitmap\"";
  }
  if (plan.side(rank) != fb::Side::kSource) {
    return "this rank is of the destination; wanted bitmaps of source ranks";
  }
  return "";
}

}  // namespace

std::vector<std::string> BitmapProblems(const PlanFile& plan, int32_t rank,
                                        absl::Span<const BoundTensor> tensors) {
  std::vector<std::string> problems;
  std::vector<NamedRange> ranges;
  size_t given = 0;
  const BoundTensor* first = nullptr;
  const std::string why_none = WhyNone(plan, rank);
  for (const BoundTensor& tensor : tensors) {
    const auto data = reinterpret_cast<uintptr_t>(tensor.data);
    if (tensor.data != nullptr && tensor.size_bytes > 0) {
      ranges.push_back({.begin = data,
                        .end = data + tensor.size_bytes,
                        .tensor = &tensor,
                        .is_bitmap = false});
    }
    if (tensor.changes == nullptr) continue;
    if (given++ == 0) first = &tensor;
    const auto begin = reinterpret_cast<uintptr_t>(tensor.changes);
    if (begin % sizeof(uint32_t) != 0 && why_none.empty()) {
      problems.push_back(absl::StrCat(
          "not aligned: the bitmap of \"", tensor.name, "\" is at 0x",
          absl::Hex(begin), "; wanted a multiple of the 4 bytes of its words"));
    }
    const uint64_t size_bytes = BitmapBytes(ElementsOf(tensor));
    if (size_bytes == 0) continue;
    ranges.push_back({.begin = begin,
                      .end = begin + size_bytes,
                      .tensor = &tensor,
                      .is_bitmap = true});
  }
  if (given == 0) return {};
  if (!why_none.empty()) {
    return {absl::StrCat(
        "bitmap: \"", first->name, "\"",
        given == 1 ? std::string(" has")
                   : absl::StrCat(" and ", given - 1, " more tensors have"),
        " a bitmap of changes, but ", why_none)};
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const NamedRange& a, const NamedRange& b) {
              return std::tuple(a.begin, a.end, a.is_bitmap) <
                     std::tuple(b.begin, b.end, b.is_bitmap);
            });
  const NamedRange* reaching = nullptr;  // the one that ends last so far
  for (const NamedRange& range : ranges) {
    // Tensors that overlap are a problem of their own.
    if (reaching != nullptr && range.begin < reaching->end &&
        (range.is_bitmap || reaching->is_bitmap)) {
      problems.push_back(absl::StrCat(
          "overlap: ", reaching->Text(), " and ", range.Text(), " share ",
          std::min(range.end, reaching->end) - range.begin, " bytes"));
    }
    if (reaching == nullptr || range.end > reaching->end) reaching = &range;
  }
  return problems;
}

std::vector<std::byte*> BitmapsByEntry(const PlanFile& plan, int32_t rank,
                                       absl::Span<const BoundTensor> tensors) {
  const TensorTable table(plan, rank);
  std::map<std::string, std::byte*> by_name;
  for (const BoundTensor& tensor : tensors) {
    if (tensor.changes == nullptr) continue;
    by_name[tensor.name] = reinterpret_cast<std::byte*>(tensor.changes);
  }
  std::vector<std::byte*> bitmaps(table.size(), nullptr);
  if (by_name.empty()) return bitmaps;
  for (size_t slot = 0; slot < table.workers_stacks(); ++slot) {
    for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
         ++entry) {
      const auto found =
          by_name.find(table.Name(slot, entry - table.begin(slot)));
      if (found != by_name.end()) bitmaps[entry] = found->second;
    }
  }
  return bitmaps;
}

std::string SentWhole(const PlanFile& plan, int32_t rank,
                      absl::Span<const BoundTensor> tensors) {
  const TensorTable table(plan, rank);
  const std::vector<SentRange> sent = SentRanges(plan, rank);
  const std::vector<std::byte*> bitmaps = BitmapsByEntry(plan, rank, tensors);
  std::string first;
  uint64_t without = 0, bytes = 0;
  for (size_t slot = 0; slot < table.stacks(); ++slot) {
    for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
         ++entry) {
      if (sent[entry].size_bytes() == 0 || bitmaps[entry] != nullptr) continue;
      if (without++ == 0) first = table.Name(slot, entry - table.begin(slot));
      bytes += sent[entry].size_bytes();
    }
  }
  if (without == 0) return "";
  return absl::StrCat(
      "each refit sends ", bytes, " bytes of rank ", rank, " whole, since ",
      without == 1 ? absl::StrCat("\"", first, "\" has")
                   : absl::StrCat(without, " tensors, the first is \"", first,
                                  "\", have"),
      " no bitmap");
}

}  // namespace refit
