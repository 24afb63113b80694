#include "compiler/job/key_homes.h"

#include <string_view>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

struct KeyHome {
  std::string_view key;
  JobObject object;
};
constexpr KeyHome kHomes[] = {
    {"model", JobObject::kRoot},
    {"source", JobObject::kRoot},
    {"destination", JobObject::kRoot},
    {"topology", JobObject::kRoot},
    {"options", JobObject::kRoot},
    {"colocated", JobObject::kRoot},
    {"layout", JobObject::kSide},
    {"tensor_parallel", JobObject::kSide},
    {"pipeline_parallel", JobObject::kSide},
    {"virtual_pipeline_parallel", JobObject::kSide},
    {"expert_parallel", JobObject::kSide},
    {"expert_tensor_parallel", JobObject::kSide},
    {"data_parallel", JobObject::kSide},
    {"context_parallel", JobObject::kSide},
    {"replicas", JobObject::kSide},
    {"layers_per_stage", JobObject::kSide},
    {"dtype", JobObject::kSide},
    {"experts", JobObject::kSide},
    {"mtp", JobObject::kSide},
    {"gpus_per_host", JobObject::kTopology},
    {"hosts", JobObject::kTopology},
    {"peer_gigabytes_per_second", JobObject::kTopology},
    {"network_gigabytes_per_second", JobObject::kTopology},
    {"peer", JobObject::kOptions},
    {"fan_out", JobObject::kOptions},
    {"bucket_bytes", JobObject::kOptions},
    {"staging_bytes", JobObject::kOptions},
    {"scratch_bytes", JobObject::kOptions},
    {"slots", JobObject::kOptions},
    {"operations_per_round", JobObject::kOptions},
    {"exclude", JobObject::kOptions},
};

std::string_view NameOf(JobObject object) {
  switch (object) {
    case JobObject::kRoot:
      return "the job itself, beside \"source\"";
    case JobObject::kSide:
      return "source or destination";
    case JobObject::kTopology:
      return "topology";
    case JobObject::kOptions:
      return "options";
  }
  return "";
}

}  // namespace

void RefuseKeysOfOthers(ObjectReader& reader, JobObject here) {
  for (const KeyHome& home : kHomes) {
    if (home.object == here) continue;
    reader.Refuse(home.key, absl::StrFormat("%s is a key of %s",
                                            here == JobObject::kRoot
                                                ? Quoted(home.key)
                                                : reader.PathOf(home.key),
                                            NameOf(home.object)));
  }
}

}  // namespace refit
