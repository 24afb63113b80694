#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/diff/stages.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

// What is quantised, by the names of what it is made of.
std::map<std::string, std::string> QuantisationsOf(const fb::Body& body) {
  std::map<std::string, std::string> quantisations;
  for (uint32_t i = 0; i < Length(body.quantisations()); ++i) {
    const fb::Quantisation& quantisation = *body.quantisations()->Get(i);
    const auto name = [&](uint32_t param) {
      const fb::Param& named = *body.params()->Get(param);
      return absl::StrCat(QuotedText(named.name()), IndexText(named.index()));
    };
    quantisations.emplace(
        absl::StrCat("quantisation of ", name(quantisation.of())),
        absl::StrCat(
            quantisation.block_rows(), " x ", quantisation.block_columns(), " ",
            EnumText(quantisation.scale_format()), " as ",
            name(quantisation.data()), " and ", name(quantisation.scales())));
  }
  return quantisations;
}

// The operations of a rank, in an order of their own.
std::vector<std::string> OperationsOf(const fb::Body& body, uint32_t rank) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const auto name = [&](uint32_t slot) {
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(slot));
    return absl::StrCat(buffer.name()->str(), IndexText(buffer.index()));
  };
  std::vector<std::string> operations;
  for (uint32_t i = 0; i < Length(program.quantises()); ++i) {
    const fb::Quantise& op = *program.quantises()->Get(i);
    const uint32_t of = body.quantisations()->Get(op.quantisation())->of();
    std::string text =
        absl::StrCat(body.params()->Get(of)->name()->str(), " ", op.rows(), " ",
                     op.columns(), " ", name(op.input_slot()), " ",
                     op.input_offset(), " ", op.input_row_stride(), " ");
    absl::StrAppend(&text, name(op.output_slot()), " ", op.output_offset(), " ",
                    op.output_row_stride(), " ", name(op.scale_slot()), " ",
                    op.scale_offset(), " ", op.scale_row_stride());
    for (uint32_t l = 0; l < op.loops_count(); ++l) {
      const fb::QuantiseLoop& loop =
          *body.quantise_loops()->Get(op.loops_begin() + l);
      absl::StrAppend(&text, " ", loop.extent(), " ", loop.input_stride(), " ",
                      loop.output_stride(), " ", loop.scale_stride());
    }
    operations.push_back(std::move(text));
  }
  std::sort(operations.begin(), operations.end());
  return operations;
}

}  // namespace

void CompareQuantisation(const fb::Body& a, const fb::Body& b,
                         int32_t common_ranks, DiffReport& report) {
  constexpr DifferenceClass kContract = DifferenceClass::kContract;
  const std::map<std::string, std::string> of_a = QuantisationsOf(a);
  const std::map<std::string, std::string> of_b = QuantisationsOf(b);
  for (const auto& [name, blocks] : of_a) {
    const auto other = of_b.find(name);
    if (other == of_b.end()) {
      report.Add(kContract, "QUANTISATION_REMOVED",
                 absl::StrCat(name, ": was ", blocks));
    } else if (other->second != blocks) {
      report.Add(kContract, "QUANTISATION_CHANGED",
                 absl::StrCat(name, ": ", blocks, " -> ", other->second));
    }
  }
  for (const auto& [name, blocks] : of_b) {
    if (of_a.count(name) == 0) {
      report.Add(kContract, "QUANTISATION_ADDED",
                 absl::StrCat(name, ": ", blocks));
    }
  }
  if (of_a != of_b) return;  // what follows is told
  for (int32_t rank = 0; rank < common_ranks; ++rank) {
    const std::vector<std::string> ops_a =
        OperationsOf(a, static_cast<uint32_t>(rank));
    const std::vector<std::string> ops_b =
        OperationsOf(b, static_cast<uint32_t>(rank));
    if (ops_a == ops_b) continue;
    report.AddRank(DifferenceClass::kTraffic, "QUANTISES_CHANGED", rank,
                   absl::StrCat("quantises ", ops_a.size(), " boxes -> ",
                                ops_b.size(), ", or others"));
  }
}

}  // namespace refit
