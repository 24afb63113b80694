// Which jobs a fuzzer compiles.
#ifndef REFIT_TESTS_FUZZ_SMALL_JOB_H_
#define REFIT_TESTS_FUZZ_SMALL_JOB_H_

#include <algorithm>
#include <cstdint>

#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

// More does not compile in a moment.
inline constexpr double kFuzzedRanksMax = 24;
inline constexpr double kFuzzedBucketsMax = 500;

inline double RanksOf(const SideSpec& side) {
  double ranks = 1;
  for (const Located<int64_t>& size :
       {side.tensor_parallel, side.pipeline_parallel, side.data_parallel,
        side.context_parallel, side.replicas}) {
    ranks *= static_cast<double>(size.value);
  }
  for (const MeshSpec& mesh : side.generic.meshes) {
    ranks = std::max(ranks, static_cast<double>(mesh.ranks.size()));
  }
  return ranks;
}

inline bool IsSmall(const Job& job, const Model& model) {
  constexpr double kElementBytesMax = 8;
  double bytes = 0;
  for (const Param& param : model.params) {
    double of_param = kElementBytesMax;
    for (const IndexDim& dim : param.index) {
      of_param *= static_cast<double>(dim.extent());
    }
    for (const int64_t extent : param.shape) {
      of_param *= static_cast<double>(extent);
    }
    bytes += of_param;
  }
  return RanksOf(job.source) <= kFuzzedRanksMax &&
         RanksOf(job.destination) <= kFuzzedRanksMax &&
         bytes <= kFuzzedBucketsMax *
                      static_cast<double>(job.options.bucket_bytes.value);
}

}  // namespace refit

#endif  // REFIT_TESTS_FUZZ_SMALL_JOB_H_
