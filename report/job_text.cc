#include "report/job_text.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace refit::report {
namespace {

std::string MeshText(const MeshSpec& mesh) {
  std::string text = absl::StrCat("mesh ", mesh.name);
  for (size_t i = 0; i < mesh.axes.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? " " : " x ", mesh.axes[i], " ",
                    mesh.shape[i]);
  }
  return text;
}

// The sizes that are not 1, as the job names them.
std::string SideText(const SideSpec& side) {
  std::vector<std::string> parts;
  const std::pair<const char*, int64_t> sizes[] = {
      {"tensor_parallel", side.tensor_parallel.value},
      {"pipeline_parallel", side.pipeline_parallel.value},
      {"virtual_pipeline_parallel", side.virtual_pipeline_parallel.value},
      {"expert_parallel", side.expert_parallel.value},
      {"expert_tensor_parallel", side.expert_tensor_parallel.value},
      {"context_parallel", side.context_parallel.value},
      {"data_parallel", side.data_parallel.value},
      {"replicas", side.replicas.value}};
  for (const auto& [key, size] : sizes) {
    if (size != 1) parts.push_back(absl::StrCat(key, " ", size));
  }
  if (side.expert_parallel_enabled.value) parts.push_back("expert_parallel");
  for (const MeshSpec& mesh : side.generic.meshes) {
    parts.push_back(MeshText(mesh));
  }
  return absl::StrCat(std::string(LayoutName(side.layout.value)),
                      parts.empty() ? "" : ": ", absl::StrJoin(parts, ", "));
}

}  // namespace

JobText TextOfJob(const std::string& path, const Job& job) {
  const ModelSpec& model = job.model;
  return {.path = path,
          .model_path = model.config_path.has_value()
                            ? *model.config_path
                            : model.safetensors_path.value_or(""),
          .source = SideText(job.source),
          .destination = SideText(job.destination)};
}

}  // namespace refit::report
