// Fills source tensors with generated values and checks destination tensors.
#ifndef REFIT_RUNNER_VALUE_CHECK_H_
#define REFIT_RUNNER_VALUE_CHECK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "executor/device/quantize.h"
#include "plan/plan_file.h"
#include "refit/executor.h"
#include "runner/generated_values.h"

namespace refit {

// The tensors of all ranks, by global rank and then in plan order (all tensors
// of the rank's first stack, then of its second …), none left out.
using TensorsByRank = std::vector<std::vector<BoundTensor>>;

struct CheckResult {
  uint64_t checked_bytes = 0;  // of destination tensors, skips included
  uint64_t skipped_bytes = 0;  // the part under declared skips
  uint64_t wrong_elements = 0;
  // One line each for the first wrong elements in order of rank, tensor, index.
  std::vector<std::string> mismatches;
};

// What `--check` knows of a plan. Uses all cores.
class ValueCheck {
 public:
  // `plan` must outlive the result. With `only_rank` all other ranks are passed
  // over, and their tensors may be left out.
  // `division` is that of the device that quantizes.
  explicit ValueCheck(const PlanFile& plan,
                      std::optional<int32_t> only_rank = std::nullopt,
                      Division division = Division::kExact);

  // Source ranks' tensors: each element that holds a param gets its value,
  // every other byte kSourcePoison.
  void FillSources(const TensorsByRank& tensors) const;

  // One more step of a training: a share of the values becomes another, in
  // source ranks' tensors and in what Check expects. `change_rate` is the same
  // each time. Bits of what changes are set where tensors have bitmaps. Not in
  // plans that quantize, whose values follow from whole blocks.
  void ChangeSources(const TensorsByRank& tensors, double change_rate);

  // Destination ranks' tensors: every byte kDestinationPoison.
  void PoisonDestinations(const TensorsByRank& tensors) const;

  // Each element of the destination is the value it should have: of its param,
  // cast to the destination's dtype, or quantized by the reference; zero where
  // the plan fills; poison where it skips. An element of which the plan says
  // nothing is wrong.
  CheckResult Check(const TensorsByRank& tensors) const;

 private:
  // A fragment or region of one rank, or a part of one.
  struct Piece {
    int32_t rank = 0;
    uint32_t slot = 0;
    uint64_t first_tensor = 0;  // of the stack, in the rank's tensors
    const fb::Fragment* fragment = nullptr;
    const fb::Region* region = nullptr;  // if there is no fragment
    uint64_t part = 0;
    uint64_t parts = 1;
  };
  struct Wrong;

  bool Covers(int32_t rank) const {
    return !only_rank_.has_value() || *only_rank_ == rank;
  }
  // What makes the values of a param: a quantization, or nothing.
  const fb::Quantization* QuantizationOf(uint32_t param) const {
    return quantizations_[param];
  }
  std::vector<Piece> PiecesOf(int32_t rank_begin, int32_t rank_end) const;
  const fb::Buffer& buffer(const Piece& piece) const;
  void FillPieces(const TensorsByRank& tensors) const;
  void FillPiece(const Piece& piece, const TensorsByRank& tensors) const;
  void CheckPiece(const Piece& piece, const TensorsByRank& tensors,
                  Wrong& wrong) const;
  std::string MismatchText(const Piece& piece, const Wrong& wrong) const;
  void CheckCoverage(CheckResult& result) const;

  const PlanFile& plan_;
  std::optional<int32_t> only_rank_;
  Division division_;
  ValueSteps steps_;
  // By param and tensor: the dtype its values are made in, and a seed.
  std::vector<std::vector<DType>> source_dtypes_;
  std::vector<std::vector<uint64_t>> seeds_;
  std::vector<const fb::Quantization*> quantizations_;  // by param; may be null
};

}  // namespace refit

#endif  // REFIT_RUNNER_VALUE_CHECK_H_
