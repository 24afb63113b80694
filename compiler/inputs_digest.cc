#include "compiler/inputs_digest.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "plan/enum_text.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

void AppendPlacements(const std::vector<Placement>& placements,
                      std::string& text) {
  for (const Placement& placement : placements) {
    absl::StrAppend(&text, " ", static_cast<int>(placement.kind), "/",
                    placement.dim, "/", placement.split_factor);
  }
}

void AppendGeneric(const GenericSpec& generic, std::string& text) {
  for (const MeshSpec& mesh : generic.meshes) {
    absl::StrAppend(&text, "mesh ", mesh.name, " axes ",
                    absl::StrJoin(mesh.axes, ","), " shape ",
                    absl::StrJoin(mesh.shape, ","), " ranks ",
                    absl::StrJoin(mesh.ranks, ","), "\n");
  }
  for (const TensorRule& rule : generic.tensors) {
    absl::StrAppend(&text, "tensors ", rule.match, " mesh ", rule.mesh);
    AppendPlacements(rule.placements, text);
    absl::StrAppend(
        &text, " rename ", rule.rename.value_or("{name}"), " dtype ",
        std::string(DTypeName(rule.dtype.value_or(DType::kUnspecified))), "\n");
  }
  for (const FlatBufferSpec& flat : generic.flat_buffers) {
    absl::StrAppend(
        &text, "flat ", flat.name, " mesh ", flat.mesh, " length ", flat.length,
        " dtype ",
        std::string(DTypeName(flat.dtype.value_or(DType::kUnspecified))));
    AppendPlacements(flat.placements, text);
    for (const RangeSpec& range : flat.ranges) {
      absl::StrAppend(&text, " [", range.begin, ",", range.end, "]");
    }
    if (flat.layers.has_value()) {
      absl::StrAppend(&text, " layers ", flat.layers->begin, "-",
                      flat.layers->end);
    }
    for (const FlatEntry& entry : flat.entries) {
      absl::StrAppend(&text, "\n", entry.param, " at ", entry.offset);
      if (!entry.rows.has_value()) continue;
      absl::StrAppend(&text, " rows ", entry.rows->begin, "-", entry.rows->end);
    }
    absl::StrAppend(&text, "\n");
  }
}

// What only some sides say; nothing where they do not, so that the digests of
// other jobs stay as they are.
void AppendServing(const SideSpec& side, std::string& text) {
  if (side.experts.given) {
    const ExpertPlacement& experts = side.experts.value;
    absl::StrAppendFormat(&text, "experts %d redundant %d\n",
                          static_cast<int>(experts.kind),
                          experts.redundant_experts);
    for (const std::vector<int64_t>& list : experts.physical_to_logical) {
      absl::StrAppend(&text, "slots ", absl::StrJoin(list, ","), "\n");
    }
  }
  if (side.moe_backend.given) {
    absl::StrAppend(&text, "moe_backend ", side.moe_backend.value, "\n");
  }
  if (side.layout.value == LayoutKind::kSglang) {
    absl::StrAppendFormat(
        &text, "dp_attention %d dp_lm_head %d embedding %d shared_experts %d\n",
        side.dp_attention.value, side.dp_lm_head.value,
        static_cast<int>(side.embedding.value),
        static_cast<int>(side.shared_experts.value));
    // What a job leaves out may not be what it could say.
    if (side.shared_experts.given) {
      absl::StrAppend(&text, "given shared_experts\n");
    }
  }
}

void AppendSide(const SideSpec& side, std::string& text) {
  absl::StrAppendFormat(
      &text,
      "%s layout %s tp %d pp %d vpp %d ep %d ep_flag %d etp %d dp %d cp %d "
      "replicas %d stages %s first %d last %d vocab %d dtype %s version %s "
      "fused %d interleave %d grouped %d\n",
      side.key, LayoutName(side.layout.value), side.tensor_parallel.value,
      side.pipeline_parallel.value, side.virtual_pipeline_parallel.value,
      side.expert_parallel.value, side.expert_parallel_enabled.value,
      side.expert_tensor_parallel.value, side.data_parallel.value,
      side.context_parallel.value, side.replicas.value,
      absl::StrJoin(side.layers_per_stage.value, ","),
      side.num_layers_in_first_pipeline_stage.value,
      side.num_layers_in_last_pipeline_stage.value,
      side.make_vocab_size_divisible_by.value,
      side.dtype.given ? DTypeName(side.dtype.value) : "model",
      side.version.value, side.fused_experts.value,
      side.moe_mlp_glu_interleave_size.value,
      side.moe_single_grouped_weight.value);
  if (side.quantised.given) {
    absl::StrAppendFormat(&text, "quantised %s scales %s\n",
                          side.quantised.value.name,
                          EnumText(side.quantised.value.scale_format));
  }
  if (side.expert_shard_dim.given) {
    absl::StrAppendFormat(&text, "expert_shard_dim %d\n",
                          side.expert_shard_dim.value);
  }
  AppendServing(side, text);
  AppendGeneric(side.generic, text);
}

void AppendModel(const Model& model, std::string& text) {
  const Architecture& a = model.architecture;
  absl::StrAppendFormat(
      &text,
      "model %s layers %d hidden %d heads %d kv_heads %d head_dim %d vocab %d "
      "experts %d tied %d\n",
      a.family, a.layers, a.hidden, a.heads, a.kv_heads, a.head_dim, a.vocab,
      a.experts, a.tied);
  for (const Param& param : model.params) {
    absl::StrAppend(&text, "param ", param.name);
    for (const IndexDim& dim : param.index) {
      absl::StrAppend(&text, " {", absl::StrJoin(dim.numbers, ","), "}");
    }
    absl::StrAppend(&text, " [", absl::StrJoin(param.shape, ","), "] ",
                    std::string(DTypeName(param.dtype)), " skip ",
                    static_cast<int>(param.skip), "\n");
  }
  for (const Skip& skip : model.skips) {
    absl::StrAppend(&text, "skip ", skip.name, " ",
                    static_cast<int>(skip.reason), "\n");
  }
}

}  // namespace

std::string CanonicalInputs(const Job& job, const Model& model) {
  std::string text;
  AppendModel(model, text);
  AppendSide(job.source, text);
  AppendSide(job.destination, text);
  absl::StrAppendFormat(
      &text, "topology gpus_per_host %d hosts %s peer %.17g network %.17g\n",
      job.topology.gpus_per_host.given ? job.topology.gpus_per_host.value : 0,
      absl::StrJoin(job.topology.hosts.value, ","),
      job.topology.peer_gigabytes_per_second.value,
      job.topology.network_gigabytes_per_second.value);
  absl::StrAppendFormat(
      &text,
      "options peer %s bucket %d staging %d slots %d operations %d exclude "
      "%s\n",
      EnumText(job.options.peer.value), job.options.bucket_bytes.value,
      job.options.staging_bytes.value, job.options.slots.value,
      job.options.operations_per_round.value,
      absl::StrJoin(job.options.exclude.value, ","));
  if (job.source.quantised.given || job.destination.quantised.given) {
    absl::StrAppendFormat(&text, "scratch %d\n",
                          job.options.scratch_bytes.value);
  }
  // The default is left out: jobs from before there was a choice keep theirs.
  if (job.options.fan_out.value == FanOutKind::kNone) {
    absl::StrAppend(&text, "fan_out none\n");
  }
  absl::StrAppendFormat(&text, "colocated %d\n", job.colocated.value);
  return text;
}

fb::Digest InputsDigest(const Job& job, const Model& model) {
  const std::string text = CanonicalInputs(job, model);
  return DigestOf(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

}  // namespace refit
