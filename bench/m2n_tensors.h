// A plan's tensors as NVIDIA's NCCL M2N describes them, to move the same bytes
// between the same tensors.
//
// M2N moves a tensor from one mesh of ranks to another. A mesh is an interval
// of ranks with two axes, row-major. One axis shards one dimension of the
// tensor evenly, the other replicates. A rank's part is contiguous.
#ifndef REFIT_BENCH_M2N_TENSORS_H_
#define REFIT_BENCH_M2N_TENSORS_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/dtype.h"
#include "plan/plan_file.h"

namespace refit {

inline constexpr int kM2nReplicate = -1;

struct M2nSide {
  int start_rank = 0;
  std::array<int, 2> mesh = {1, 1};
  // Of each axis: the dimension of the tensor that it shards, or kM2nReplicate.
  std::array<int, 2> placements = {kM2nReplicate, 0};
  std::vector<uint64_t> local_shape;
};

// A rank's part of a tensor.
struct M2nTile {
  int32_t rank = 0;
  uint64_t tensor = 0;  // position in TensorsOfRank
  uint64_t offset_bytes = 0;
};

struct M2nTensor {
  DType dtype = DType::kUnspecified;
  M2nSide source;
  M2nSide destination;
  std::vector<M2nTile> tiles;  // ascending by rank, one for each of both meshes
  uint64_t received_bytes = 0;  // by all destination ranks
};

// All that `plan` moves, in the same order on all ranks. A param whose parts
// are no meshes is cut in one dimension, where its parts begin and end: a
// trainer's fused matrix of queries, keys and values, or uneven shards. Of the
// sources that hold the same, M2N gets those that form a mesh. Destinations
// that form several get the tensor several times. Errors: kUnimplemented, with
// the first param that M2N cannot move and why.
absl::StatusOr<std::vector<M2nTensor>> M2nTensors(const PlanFile& plan);

}  // namespace refit

#endif  // REFIT_BENCH_M2N_TENSORS_H_
