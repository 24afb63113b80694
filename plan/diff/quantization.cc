#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/diff/stages.h"
#include "plan/scratch_windows.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

// What is quantized, by the names of what it is made of.
NamedFacts QuantizationsOf(const fb::Body& body) {
  NamedFacts quantizations;
  for (uint32_t i = 0; i < Length(body.quantizations()); ++i) {
    const fb::Quantization& quantization = *body.quantizations()->Get(i);
    const auto name = [&](uint32_t param) {
      const fb::Param& named = *body.params()->Get(param);
      return absl::StrCat(QuotedText(named.name()), IndexText(named.index()));
    };
    quantizations[absl::StrCat("quantization of ", name(quantization.of()))]
        .insert(absl::StrCat(
            quantization.block_rows(), " x ", quantization.block_columns(), " ",
            EnumText(quantization.scale_format()), " as ",
            name(quantization.data()), " and ", name(quantization.scales())));
  }
  return quantizations;
}

// How many elements of each param a rank quantizes, and in which of its
// worker's tensors they are: however it is cut.
std::map<std::string, uint64_t> ElementsOf(const fb::Body& body,
                                           uint32_t rank) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  std::map<std::string, uint64_t> elements;
  for (uint32_t i = 0; i < Length(program.quantizes()); ++i) {
    const fb::Quantize& op = *program.quantizes()->Get(i);
    const uint32_t of = body.quantizations()->Get(op.quantization())->of();
    std::string what = body.params()->Get(of)->name()->str();
    for (const uint32_t slot :
         {op.input_slot(), op.output_slot(), op.scale_slot()}) {
      if (IsScratch(program, slot)) continue;
      absl::StrAppend(
          &what, " ",
          body.buffers()->Get(program.buffers()->Get(slot))->name()->str());
    }
    uint64_t count = op.rows() * op.columns();
    for (const fb::QuantizeLoop& loop : LoopsOf(body, op)) {
      count *= loop.extent();
    }
    elements[what] += count;
  }
  return elements;
}

uint64_t SumOf(const std::map<std::string, uint64_t>& elements) {
  uint64_t sum = 0;
  for (const auto& [what, count] : elements) sum += count;
  return sum;
}

// What a rank's scratch holds, where and when.
std::vector<std::string> ScratchOf(const fb::Body& body, uint32_t rank) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  std::vector<std::string> scratch;
  const std::vector<ScratchRange> ranges = ScratchRanges(body, program);
  for (uint32_t i = 0; i < ranges.size(); ++i) {
    const uint32_t slot =
        program.buffers()->size() - program.scratch_buffers() + i;
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(slot));
    const ScratchRange& range = ranges[i];
    std::string text = absl::StrCat(EnumText(buffer.dtype()), " ",
                                    range.begin_byte, " ", range.end_byte);
    if (WindowOf(program, slot) != nullptr) {
      absl::StrAppend(&text, " ", range.begin, " ", range.end);
    }
    for (uint32_t f = 0; f < Length(buffer.fragments()); ++f) {
      const fb::Fragment& fragment = *buffer.fragments()->Get(f);
      absl::StrAppend(
          &text, " ", body.params()->Get(fragment.param())->name()->str(),
          BoxText(fragment), fragment.offset(), DimsText(fragment.stride()));
    }
    scratch.push_back(std::move(text));
  }
  std::sort(scratch.begin(), scratch.end());
  return scratch;
}

std::string ScratchText(const fb::Body& body, uint32_t rank) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const uint32_t windows = Length(program.scratch_windows());
  return absl::StrCat(
      ScratchBytes(body, program), " bytes",
      windows == 0 ? "" : absl::StrCat(" in ", windows, " windows"));
}

void CompareScratch(const fb::Body& a, const fb::Body& b, int32_t common_ranks,
                    const ChangedTensors& changed, DiffReport& report) {
  for (int32_t r = 0; r < common_ranks; ++r) {
    const auto rank = static_cast<uint32_t>(r);
    if (!changed[rank].empty() || ScratchOf(a, rank) == ScratchOf(b, rank))
      continue;
    const std::string text_a = ScratchText(a, rank);
    const std::string text_b = ScratchText(b, rank);
    report.AddRank(DifferenceClass::kSchedule, "WINDOWS_CHANGED", r,
                   text_a == text_b
                       ? absl::StrCat(text_a, ", elsewhere or at other times")
                       : absl::StrCat(text_a, " -> ", text_b));
  }
}

}  // namespace

void CompareQuantization(const fb::Body& a, const fb::Body& b,
                         int32_t common_ranks, const ChangedTensors& changed,
                         DiffReport& report) {
  const NamedFacts of_a = QuantizationsOf(a);
  const NamedFacts of_b = QuantizationsOf(b);
  report.AddFacts(DifferenceClass::kContract, "QUANTIZATION", of_a, of_b);
  if (of_a != of_b) return;  // what follows is told
  for (int32_t rank = 0; rank < common_ranks; ++rank) {
    const std::map<std::string, uint64_t> elements_a =
        ElementsOf(a, static_cast<uint32_t>(rank));
    const std::map<std::string, uint64_t> elements_b =
        ElementsOf(b, static_cast<uint32_t>(rank));
    if (!changed[static_cast<size_t>(rank)].empty() ||
        elements_a == elements_b) {
      continue;
    }
    report.AddRank(
        DifferenceClass::kTraffic, "QUANTIZES_CHANGED", rank,
        absl::StrCat("quantizes ", SumOf(elements_a), " elements -> ",
                     SumOf(elements_b), " elements"));
  }
  CompareScratch(a, b, common_ranks, changed, report);
}

}  // namespace refit
