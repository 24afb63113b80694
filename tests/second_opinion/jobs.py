"""The jobs: models x pairs of layouts."""

import dataclasses
import fnmatch
import math
import re

from deepseek_models import DeepseekModel
from deepseek_v4 import DeepseekV4Model
from hybrid_models import HybridModel
from models import ListedModel, Model
from random_jobs import draw_jobs


@dataclasses.dataclass
class Job:
    group: str
    name: str
    model: object
    source: dict
    destination: dict
    rest: dict = dataclasses.field(default_factory=dict)  # topology, options, colocated
    from_checkpoint: bool = False  # the job names a checkpoint, not a config.json


KEYS = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "vocab_unit": "make_vocab_size_divisible_by",
    "layers": "layers_per_stage",
    "glu_block": "moe_mlp_glu_interleave_size",
    "grouped": "moe_single_grouped_weight",
}


def megatron(**keys):
    return {"layout": "megatron", **{KEYS.get(key, key): value for key, value in keys.items()}}


def fsdp(**keys):
    return {"layout": "fsdp", **{KEYS.get(key, key): value for key, value in keys.items()}}


def vllm(**keys):
    return {"layout": "vllm", **{KEYS.get(key, key): value for key, value in keys.items()}}


def sglang(**keys):
    return {"layout": "sglang", **{KEYS.get(key, key): value for key, value in keys.items()}}


def generic(meshes, *rules):
    """Rules are (match, mesh, placements[, other keys])."""
    words = ("match", "mesh", "placements")
    tensors = [{**dict(zip(words, rule)), **(rule[3] if len(rule) > 3 else {})} for rule in rules]
    return {"layout": "generic", "meshes": meshes, "tensors": tensors}


def dense(family, layers, hidden, heads, kv_heads, intermediate, vocab, **more):
    return Model(
        model_type=family,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        **more,
    )


LLAMA = dense("llama", 4, 32, 8, 4, 48, 200)
LLAMA_BIAS = dense("llama", 3, 32, 8, 2, 48, 200, attention_bias=True)
LLAMA_TIED = dense("llama", 4, 32, 8, 4, 48, 200, tie_word_embeddings=True)
LLAMA_BY_3 = dense("llama", 5, 40, 12, 6, 60, 900, head_dim=8)
LLAMA_BY_5 = dense("llama", 2, 30, 10, 5, 40, 900, head_dim=4, tie_word_embeddings=True)
LLAMA_DEEP = dense("llama", 12, 16, 4, 4, 16, 64)
LLAMA_FP32 = dense("llama", 2, 32, 8, 4, 48, 200, torch_dtype="float32")
LLAMA_FP16 = dense("llama", 2, 32, 8, 4, 48, 200, torch_dtype="float16")
QWEN2 = dense("qwen2", 3, 36, 6, 2, 36, 900)
QWEN2_TIED = dense("qwen2", 4, 32, 8, 2, 48, 333, tie_word_embeddings=True)
QWEN3 = dense("qwen3", 4, 24, 8, 2, 40, 300, head_dim=6)
QWEN3_TIED = dense("qwen3", 4, 24, 8, 4, 40, 300, head_dim=6, tie_word_embeddings=True)
QWEN3_BY_3 = dense("qwen3", 3, 36, 6, 2, 36, 200, head_dim=6)
QWEN3_BIAS = dense("qwen3", 2, 24, 8, 4, 40, 300, head_dim=6, attention_bias=True)


def qwen3_moe(layers=4, heads=12, kv_heads=6, vocab=900, experts=8, **more):
    sizes = {"num_experts": experts, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 4}
    return dense("qwen3_moe", layers, 24, heads, kv_heads, 60, vocab, **{**sizes, **more})


QWEN3_MOE = qwen3_moe()
QWEN3_MOE_TIED = qwen3_moe(tie_word_embeddings=True)
QWEN3_MOE_MLP_ONLY = qwen3_moe(layers=6, mlp_only_layers=[0, 3], experts=6)
QWEN3_MOE_STEP_2 = qwen3_moe(layers=6, decoder_sparse_step=2)
QWEN3_MOE_MIXED = qwen3_moe(layers=7, decoder_sparse_step=3, mlp_only_layers=[2], experts=4)
QWEN3_MOE_4_HEADS = qwen3_moe(kv_heads=4)
QWEN3_MOE_MLP_ONLY_4_HEADS = qwen3_moe(layers=6, kv_heads=4, mlp_only_layers=[0, 3], experts=6)
QWEN3_MOE_6_4_HEADS = qwen3_moe(layers=6, kv_heads=4, experts=6)
QWEN3_MOE_DENSE = qwen3_moe(layers=3, mlp_only_layers=[0, 1, 2])
QWEN3_MOE_10 = qwen3_moe(layers=2, heads=10, kv_heads=5, experts=10, moe_intermediate_size=40)
QWEN3_MOE_BIAS = qwen3_moe(layers=2, attention_bias=True)
MIXTRAL = dense("mixtral", 4, 32, 8, 4, 24, 200, num_local_experts=4)
MIXTRAL_TIED = dense("mixtral", 3, 24, 12, 6, 36, 900, num_local_experts=6, head_dim=4, tie_word_embeddings=True)



def deepseek(family="deepseek_v3", layers=5, heads=8, experts=8, predicts=False, **more):
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 24,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "vocab_size": 300,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    }
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
    }
    if family == "glm4_moe":
        latent = {"head_dim": 4, "num_key_value_heads": 4, "attention_bias": True}
    return DeepseekModel(predicts, model_type=family, **{**sizes, **latent, **more})


DEEPSEEK = deepseek()
DEEPSEEK_FP8 = deepseek(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
DEEPSEEK_MTP = deepseek(predicts=True)
DEEPSEEK_MTP_2 = deepseek(predicts=True, layers=4, first_k_dense_replace=3, num_nextn_predict_layers=2)
KIMI = deepseek("kimi_k2", experts=12, num_nextn_predict_layers=0)
MOONLIGHT = deepseek(layers=6, q_lora_rank=None, n_shared_experts=2, num_nextn_predict_layers=0)
GLM_LITE = deepseek("glm4_moe_lite", heads=10, predicts=True)
GLM = deepseek("glm4_moe", n_shared_experts=None)
GLM_SHARED = deepseek("glm4_moe")
DEEPSEEK_256 = deepseek(layers=2, experts=256, moe_intermediate_size=2)
GLM_NORM = deepseek("glm4_moe", predicts=True, use_qk_norm=True, first_k_dense_replace=2)

SMALL_BUCKETS = {"options": {"peer": "staged", "bucket_bytes": 4096, "staging_bytes": 16384}}
FOUR_PER_HOST = {"topology": {"gpus_per_host": 4}}

DENSE = [
    ("llama: one rank to one rank", LLAMA, megatron(), vllm()),
    ("llama: tp4 to tp4", LLAMA, megatron(tp=4), vllm(tp=4)),
    ("llama: tp above the kv heads on both sides", LLAMA, megatron(tp=8), vllm(tp=8)),
    ("llama: tp2 pp2 dp2 to two engines", LLAMA, megatron(tp=2, pp=2, dp=2), vllm(tp=4, replicas=2), FOUR_PER_HOST),
    ("llama: cp and replicas of the source", LLAMA, megatron(tp=2, cp=2, replicas=2), vllm(tp=2, dp=2, pp=2)),
    ("llama: uneven first stage", LLAMA, megatron(pp=2, first=1), vllm(tp=2)),
    ("llama: uneven last stage", LLAMA, megatron(pp=2, last=1), vllm(tp=2, pp=3)),
    ("llama: uneven first and last stage", LLAMA_DEEP, megatron(pp=4, first=1, last=3), vllm(tp=2)),
    (
        "llama: layers_per_stage on both sides",
        LLAMA_DEEP,
        megatron(pp=3, layers=[2, 7, 3]),
        vllm(pp=3, layers=[6, 1, 5]),
    ),
    ("llama: vpp2", LLAMA, megatron(tp=2, pp=2, vpp=2), vllm(tp=2)),
    ("llama: vpp3 pp2", LLAMA_DEEP, megatron(pp=2, vpp=3), vllm(tp=4, pp=2), SMALL_BUCKETS),
    ("llama: vpp2 with uneven first and last", LLAMA_DEEP, megatron(pp=3, vpp=2, first=2, last=2), vllm(pp=2)),
    ("llama: vpp2 with layers_per_stage", LLAMA_DEEP, megatron(pp=2, vpp=2, layers=[1, 4, 5, 2]), vllm(tp=2)),
    ("llama: a stage without layers", LLAMA_DEEP, megatron(pp=3, layers=[0, 8, 4]), vllm(tp=2)),
    ("llama: pp remainder in vllm", LLAMA_DEEP, megatron(tp=2), vllm(pp=5)),
    ("llama: vocabulary unit 1 and tp4", LLAMA, megatron(tp=4, vocab_unit=1), vllm(tp=1)),
    ("llama: vocabulary unit 50", LLAMA, megatron(tp=2, vocab_unit=50), vllm(tp=8)),
    ("llama: attention bias", LLAMA_BIAS, megatron(tp=2, pp=3), vllm(tp=8)),
    ("llama: attention bias, tp4 above two kv heads", LLAMA_BIAS, megatron(tp=4), vllm(tp=1, pp=3)),
    ("llama: tied, pp1", LLAMA_TIED, megatron(tp=2, dp=2), vllm(tp=4)),
    ("llama: tied, pp2 to pp2", LLAMA_TIED, megatron(tp=2, pp=2), vllm(tp=2, pp=2)),
    ("llama: tied, vpp2 to pp4", LLAMA_TIED, megatron(pp=2, vpp=2), vllm(pp=4)),
    ("llama: tied, to a head of its own", LLAMA_TIED, megatron(tp=2, pp=2), vllm(tp=2, tie_word_embeddings=False)),
    ("llama: tied, to a last stage with a head of its own", LLAMA_TIED, fsdp(dp=3),
     vllm(tp=2, pp=2, tie_word_embeddings=False)),
    ("llama: tied, from a head of its own", LLAMA_TIED, vllm(pp=2, tie_word_embeddings=False), megatron(tp=2, pp=2)),
    ("llama: tp3 to tp6", LLAMA_BY_3, megatron(tp=3), vllm(tp=6)),
    ("llama: tp6 to tp3", LLAMA_BY_3, megatron(tp=6), vllm(tp=3, pp=2)),
    ("llama: tp3 dp5 to tp12", LLAMA_BY_3, megatron(tp=3, dp=5), vllm(tp=12)),
    ("llama: tp12 above the kv heads to tp2", LLAMA_BY_3, megatron(tp=12), vllm(tp=2, replicas=3)),
    ("llama: tp5 to tp5", LLAMA_BY_5, megatron(tp=5), vllm(tp=5, pp=2)),
    ("llama: tp10 above the kv heads to tp10", LLAMA_BY_5, megatron(tp=10), vllm(tp=10)),
    ("llama: tp5 pp2 to tp1", LLAMA_BY_5, megatron(tp=5, pp=2), vllm(), SMALL_BUCKETS),
    ("qwen2: tp2 to tp6 with replicated kv heads", QWEN2, megatron(tp=2), vllm(tp=6)),
    ("qwen2: tp6 above the kv heads to tp2", QWEN2, megatron(tp=6, pp=3), vllm(tp=2)),
    ("qwen2: tied, pp4 to pp2", QWEN2_TIED, megatron(tp=2, pp=4), vllm(tp=2, pp=2)),
    ("qwen2: tied, tp8 to one rank", QWEN2_TIED, megatron(tp=8), vllm(replicas=2)),
    ("qwen3: untied, tp2 pp2 to tp8", QWEN3, megatron(tp=2, pp=2), vllm(tp=8)),
    ("qwen3: untied, tp8 to tp2 pp2", QWEN3, megatron(tp=8), vllm(tp=2, pp=2), SMALL_BUCKETS),
    ("qwen3: tied, tp2 pp2 to tp4", QWEN3_TIED, megatron(tp=2, pp=2), vllm(tp=4)),
    ("qwen3: tied, pp4 to pp3", QWEN3_TIED, megatron(pp=4), vllm(pp=3, dp=2)),
    ("qwen3: attention bias", QWEN3_BIAS, megatron(tp=4), megatron(tp=2, pp=2)),
    ("qwen3: attention bias, which vllm has not behind it", QWEN3_BIAS, megatron(tp=4), vllm(tp=2),
     {"options": {"exclude": ["*.o_proj.bias"]}}),
    ("qwen3: attention bias, fsdp to sglang", QWEN3_BIAS, fsdp(dp=3), sglang(tp=2)),
    ("llama: vllm to megatron", LLAMA, vllm(tp=8), megatron(tp=4, pp=2)),
    ("llama: vllm to megatron with vpp", LLAMA_DEEP, vllm(tp=2, pp=5), megatron(tp=2, pp=2, vpp=3)),
    ("llama: vllm pads to 64, megatron to 128 x 3", LLAMA_BY_3, vllm(tp=6, replicas=2), megatron(tp=3, cp=2)),
    ("llama: tied, vllm to both copies of megatron", LLAMA_TIED, vllm(tp=2, pp=2), megatron(tp=2, pp=2)),
    ("qwen2: vllm to megatron above the kv heads", QWEN2, vllm(tp=2), megatron(tp=6)),
    ("qwen3: tied, vllm to megatron pp1", QWEN3_TIED, vllm(tp=8), megatron(tp=2, dp=2)),
    ("llama: megatron to megatron, tp4 to pp4", LLAMA, megatron(tp=4), megatron(pp=4)),
    ("llama: megatron to megatron, units 128 and 8", LLAMA, megatron(tp=2, pp=2), megatron(tp=8, vocab_unit=8)),
    ("qwen3: tied, megatron to megatron", QWEN3_TIED, megatron(pp=2, vpp=2), megatron(tp=2, pp=4)),
    ("llama: megatron to megatron, tp3 to tp6", LLAMA_BY_3, megatron(tp=3, pp=2, first=2), megatron(tp=6)),
    ("llama: vllm to vllm, tp2 to tp8 pp2", LLAMA, vllm(tp=2), vllm(tp=8, pp=2)),
    ("llama: colocated", LLAMA, megatron(tp=2, pp=2), vllm(tp=4), {"colocated": True}),
    (
        "llama: hosts written out, small messages",
        LLAMA,
        megatron(tp=2, dp=3),
        vllm(tp=2, replicas=2),
        {
            "topology": {"hosts": [0, 1, 2, 0, 1, 2, 1, 1, 2, 0]},
            "options": {"peer": "staged", "bucket_bytes": 4096, "staging_bytes": 12288},
        },
    ),
    (
        "llama: excluded parameters",
        LLAMA,
        megatron(tp=2),
        vllm(tp=4),
        {"options": {"exclude": ["model.layers.1.*", "*.up_proj.weight", "model.norm.weight"]}},
    ),
]

EXPERTS = [
    ("qwen3_moe: one rank to one rank", QWEN3_MOE, megatron(), vllm()),
    ("qwen3_moe: tp2 pp2 dp2 ep4 to two engines", QWEN3_MOE, megatron(tp=2, pp=2, dp=2, ep=4), vllm(tp=3, replicas=2)),
    ("qwen3_moe: ep8 to tp6", QWEN3_MOE, megatron(dp=8, ep=8), vllm(tp=6)),
    ("qwen3_moe: ep across tp", QWEN3_MOE, megatron(tp=6, dp=2, ep=4), vllm(tp=2)),
    ("qwen3_moe: etp2 ep2", QWEN3_MOE, megatron(tp=2, dp=2, ep=2, etp=2), vllm(tp=3)),
    ("qwen3_moe: etp3 without tp, edp2", QWEN3_MOE, megatron(dp=6, etp=3), vllm(tp=2, replicas=2)),
    (
        "qwen3_moe: etp2 ep2 edp2 cp2",
        QWEN3_MOE,
        megatron(tp=2, cp=2, dp=2, ep=2, etp=2, pp=2),
        vllm(tp=3),
        FOUR_PER_HOST,
    ),
    ("qwen3_moe: experts cut by dp x tp", QWEN3_MOE, megatron(tp=2, ep=2), vllm(tp=3, dp=2)),
    ("qwen3_moe: experts cut by dp x tp, pp2", QWEN3_MOE, megatron(tp=2, ep=2), vllm(tp=2, dp=2, pp=2)),
    ("qwen3_moe: expert_parallel over tp", QWEN3_MOE, megatron(tp=2, dp=2, ep=4), vllm(tp=6, expert_parallel=True)),
    (
        "qwen3_moe: expert_parallel over dp x tp, pp2",
        QWEN3_MOE,
        megatron(ep=2, dp=2),
        vllm(tp=2, dp=2, pp=2, expert_parallel=True),
    ),
    ("qwen3_moe: expert_parallel, eight experts on three", QWEN3_MOE, megatron(tp=3), vllm(tp=3, expert_parallel=True)),
    ("qwen3_moe: expert_parallel of one rank", QWEN3_MOE, megatron(tp=2), vllm(expert_parallel=True, replicas=2)),
    ("qwen3_moe: ten experts, tp5", QWEN3_MOE_10, megatron(tp=5, ep=5), vllm(tp=5)),
    ("qwen3_moe: ten experts on four ranks", QWEN3_MOE_10, megatron(dp=2, ep=2), vllm(dp=4, expert_parallel=True)),
    ("qwen3_moe: vpp2 to pp4", QWEN3_MOE, megatron(tp=2, pp=2, vpp=2, ep=2), vllm(tp=3, pp=4), SMALL_BUCKETS),
    ("qwen3_moe: tied, pp2 to pp3", QWEN3_MOE_TIED, megatron(tp=2, pp=2, ep=2), vllm(tp=2, pp=3)),
    ("qwen3_moe: tied, to heads of their own", QWEN3_MOE_TIED, megatron(tp=2, ep=2),
     vllm(tp=2, pp=2, tie_word_embeddings=False)),
    ("qwen3_moe: mlp_only_layers", QWEN3_MOE_MLP_ONLY, megatron(tp=2, pp=3, dp=3, ep=6), vllm(tp=3, dp=2)),
    ("qwen3_moe: mlp_only_layers, etp2", QWEN3_MOE_MLP_ONLY, megatron(tp=2, ep=3, etp=2, dp=3), vllm(tp=2, pp=4)),
    (
        "qwen3_moe: mlp_only_layers, expert_parallel",
        QWEN3_MOE_MLP_ONLY,
        megatron(tp=3, pp=2, ep=3),
        vllm(tp=2, dp=2, expert_parallel=True),
    ),
    ("qwen3_moe: decoder_sparse_step 2", QWEN3_MOE_STEP_2, megatron(pp=3, dp=4, ep=4), vllm(tp=6)),
    (
        "qwen3_moe: decoder_sparse_step 2, stages that begin sparse",
        QWEN3_MOE_STEP_2,
        megatron(pp=3, layers=[1, 2, 3], dp=2, ep=2),
        vllm(pp=4),
    ),
    (
        "qwen3_moe: decoder_sparse_step 3 and mlp_only_layers",
        QWEN3_MOE_MIXED,
        megatron(pp=2, first=3, tp=2, ep=2),
        vllm(tp=2, pp=3),
    ),
    ("qwen3_moe: no layer has experts", QWEN3_MOE_DENSE, megatron(tp=3), vllm(tp=2, pp=2)),
    ("qwen3_moe: names before 0.24", QWEN3_MOE, megatron(tp=2), vllm(tp=2, version="0.23.1")),
    ("qwen3_moe: names of 0.24", QWEN3_MOE, megatron(tp=2), vllm(tp=2, version="0.24.0")),
    ("qwen3_moe: fp32 router", QWEN3_MOE, megatron(tp=2), vllm(tp=2, router_dtype="fp32")),
    ("mixtral: fp32 router", MIXTRAL, megatron(tp=2), sglang(tp=2, router_dtype="fp32")),
    ("mixtral: names before 0.24", MIXTRAL, megatron(tp=2), vllm(tp=2, version="0.9")),
    ("mixtral: tp2 pp2 dp2 ep4 to tp8", MIXTRAL, megatron(tp=2, pp=2, dp=2, ep=4), vllm(tp=8)),
    ("mixtral: ep2 etp4 to pp4", MIXTRAL, megatron(tp=8, ep=2, etp=4), vllm(tp=2, pp=4)),
    (
        "mixtral: expert_parallel over eight ranks' dp and tp",
        MIXTRAL,
        megatron(ep=2, dp=2),
        vllm(tp=2, dp=2, expert_parallel=True),
    ),
    ("mixtral: vpp2", MIXTRAL, megatron(pp=2, vpp=2, dp=2, ep=2), vllm(tp=4)),
    ("mixtral: tied, tp6", MIXTRAL_TIED, megatron(tp=6, pp=3, ep=6), vllm(tp=6)),
    ("mixtral: tied, tp12 to tp3", MIXTRAL_TIED, megatron(tp=12, ep=3, etp=2), vllm(tp=3, pp=2, dp=2)),
    ("qwen3_moe: vllm to megatron", QWEN3_MOE, vllm(tp=6), megatron(tp=2, dp=2, ep=4)),
    (
        "qwen3_moe: vllm with expert_parallel to megatron with etp",
        QWEN3_MOE,
        vllm(tp=3, dp=2, expert_parallel=True),
        megatron(tp=2, ep=2, etp=2, dp=2, pp=2),
    ),
    ("qwen3_moe: vllm pp3 to megatron", QWEN3_MOE_MLP_ONLY, vllm(tp=2, pp=4), megatron(tp=2, pp=3, ep=2)),
    ("mixtral: vllm of old names to megatron", MIXTRAL, vllm(tp=2, dp=2, version="0.11"), megatron(dp=4, ep=4)),
    ("qwen3_moe: megatron to megatron, ep8 to etp3", QWEN3_MOE, megatron(dp=8, ep=8), megatron(tp=3, etp=3)),
    (
        "qwen3_moe: megatron to megatron, mixed layers",
        QWEN3_MOE_MIXED,
        megatron(pp=7, dp=2, ep=2),
        megatron(tp=2, pp=2, last=2, ep=1),
    ),
    ("qwen3_moe: attention bias, megatron to megatron", QWEN3_MOE_BIAS, megatron(tp=2, ep=2), megatron(tp=3, pp=2)),
    ("mixtral: vllm to vllm, experts whole to cut", MIXTRAL, vllm(tp=4, expert_parallel=True), vllm(tp=2, dp=2)),
    (
        "qwen3_moe: excluded experts",
        QWEN3_MOE,
        megatron(dp=4, ep=4),
        vllm(tp=2),
        {"options": {"exclude": ["*.experts.3.*", "model.layers.2.mlp.experts.*", "*.mlp.gate.weight"]}},
    ),
]

FSDP = [
    ("fsdp: three ranks to vllm", LLAMA, fsdp(dp=3), vllm(tp=4)),
    ("fsdp: uneven and empty shards", QWEN3_TIED, fsdp(dp=7), vllm(tp=8)),
    ("fsdp: more ranks than rows", LLAMA, fsdp(dp=50), vllm(tp=2), {"topology": {"gpus_per_host": 8}}),
    ("fsdp: hsdp to two engines", QWEN2, fsdp(dp=3, replicas=2), vllm(tp=2, replicas=2), FOUR_PER_HOST),
    ("fsdp: to fsdp of another size", LLAMA_BIAS, fsdp(dp=5), fsdp(dp=3, replicas=2)),
    ("fsdp: megatron to fsdp", LLAMA, megatron(tp=2, pp=2), fsdp(dp=6)),
    ("fsdp: fp32 shards to bf16 engines", QWEN3_TIED, fsdp(dp=3, replicas=2, dtype="fp32"), vllm(tp=4, dtype="bf16")),
    ("fsdp: experts one by one", QWEN3_MOE, fsdp(dp=5), vllm(tp=3, dp=2)),
    ("fsdp: experts one by one, expert_parallel", MIXTRAL, fsdp(dp=4), vllm(tp=2, dp=2, expert_parallel=True)),
    ("fsdp: fused experts", QWEN3_MOE, fsdp(dp=3, fused_experts=True), vllm(tp=3, dp=2)),
    ("fsdp: fused experts, empty shards", MIXTRAL, fsdp(dp=6, fused_experts=True), vllm(tp=8)),
    ("fsdp: fused experts of some layers, fp32", QWEN3_MOE_MIXED, fsdp(dp=3, fused_experts=True, dtype="fp32"),
     vllm(tp=2, dtype="bf16"), SMALL_BUCKETS),
    ("fsdp: fused experts to experts one by one", QWEN3_MOE, fsdp(dp=3, fused_experts=True), fsdp(dp=2, replicas=2)),
    ("fsdp: megatron to fused experts", MIXTRAL, megatron(tp=2, ep=2, pp=2), fsdp(dp=3, fused_experts=True)),
    ("fsdp: vllm to fused experts", QWEN3_MOE_MLP_ONLY, vllm(tp=3, expert_parallel=True), fsdp(dp=4, fused_experts=True)),
    ("fsdp: excluded experts of a stack", QWEN3_MOE, fsdp(dp=3, fused_experts=True), vllm(tp=2),
     {"options": {"exclude": ["*.experts.3.*", "model.layers.2.mlp.experts.*"]}}),
    ("fsdp: expert mesh, stacks cut by experts", QWEN3_MOE, fsdp(dp=4, ep=2, fused_experts=True), vllm(tp=3, dp=2)),
    ("fsdp: expert mesh, empty shards", QWEN3_MOE, fsdp(dp=6, ep=2, expert_shard_dim=0, fused_experts=True, replicas=2),
     vllm(tp=2, expert_parallel=True), FOUR_PER_HOST),
    ("fsdp: expert mesh of more ranks than experts", MIXTRAL, fsdp(dp=8, ep=2, fused_experts=True), vllm(tp=4)),
    ("fsdp: expert mesh, stacks cut by rows", QWEN3_MOE_MLP_ONLY, fsdp(dp=6, ep=3, expert_shard_dim=1, fused_experts=True),
     fsdp(dp=4, fused_experts=True)),
    ("fsdp: rows of stacks without an expert mesh", QWEN3_MOE, fsdp(dp=3, expert_shard_dim=1, fused_experts=True), vllm(tp=2)),
    ("fsdp: expert mesh, experts one by one", QWEN3_MOE, fsdp(dp=8, ep=4), vllm(tp=3, dp=2)),
    ("fsdp: into an expert mesh", QWEN3_MOE, megatron(tp=2, ep=4, dp=2), fsdp(dp=4, ep=4, fused_experts=True, replicas=2)),
    ("fsdp: expert mesh, excluded experts", QWEN3_MOE, fsdp(dp=4, ep=4), vllm(tp=2),
     {"options": {"exclude": ["*.experts.2.*", "*.experts.3.*", "model.layers.1.mlp.experts.*"]}}),
    ("fsdp: listed parameters", ListedModel(a=[10, 6], b=[3], c=[4, 3, 2]), fsdp(dp=4), fsdp(dp=3)),
    ("fsdp: inside tensor parallelism", QWEN3_TIED, fsdp(dp=3, tp=4), vllm(tp=2)),
    ("fsdp: inside tensor parallelism, biases", LLAMA_BIAS, fsdp(dp=2, tp=2, replicas=2), vllm(tp=4, pp=3)),
    ("fsdp: into fsdp inside tensor parallelism", LLAMA, megatron(tp=8), fsdp(dp=5, tp=4)),
]  # fmt: skip

DP_3 = {"dp": {"axes": {"dp": 3}}}


def flat_side(meshes, *flat_buffers, tensors=()):
    rules = generic(meshes, *tensors)
    if not tensors:
        del rules["tensors"]
    return {**rules, "flat_buffers": list(flat_buffers)}


def flat(name, mesh, length, entries, placements=("Shard(0)",), **keys):
    """Entries are (param, offset[, rows])."""
    words = ("param", "offset", "rows")
    where = {} if "ranges" in keys else {"placements": list(placements)}
    entries = [dict(zip(words, entry)) for entry in entries]
    return {"name": name, "mesh": mesh, "length": length, "entries": entries, **where, **keys}


def one_after_the_other(model, match, gap=0, unit=1):
    """Entries and length of a flat buffer with all that matches, from back to front."""
    entries, offset = [], gap
    for name, shape in reversed(model.parameters().items()):
        if not fnmatch.fnmatchcase(name, match):
            continue
        layer_name = re.sub(r"^model\.layers\.0\.", "model.layers.{layer}.", name)
        entries.append((layer_name, offset))
        offset = -(-(offset + math.prod(shape) + gap) // unit) * unit
    return entries, offset


def flat_by_layer(model, mesh, shards, gap=0, rest=("Shard(0)",), **keys):
    """As Megatron FSDP groups parameters: a buffer per layer, another one for what is outside of the layers."""
    entries, length = one_after_the_other(model, "model.layers.0.*", gap, shards)
    ends, ends_length = one_after_the_other(model, "[!m]*", 0, shards)
    return [
        flat("decoder.layers.{layer}.flat", mesh, length, entries, layers=[0, model.layers], **keys),
        *([flat("ends.flat", mesh, ends_length, ends, **keys)] if ends else []),
    ], ("model.*", mesh, list(rest))


LLAMA_BY_LAYER, LLAMA_REST = flat_by_layer(LLAMA, "dp", 3, gap=5)
MOE_BY_LAYER, MOE_REST = flat_by_layer(QWEN3_MOE, "dp", 3)
LLAMA_TO_2, LLAMA_TO_2_REST = flat_by_layer(LLAMA, "dp", 7, gap=1)
HSDP_BY_LAYER, HSDP_REST = flat_by_layer(
    LLAMA, "fsdp", 3, gap=2, rest=["Replicate", "Shard(0)"], placements=["Replicate", "Shard(0)"], dtype="fp32"
)
PARTS = ListedModel(qkv=[12, 6], cube=[3, 4, 5], norm=[7], scalar=[])

FLAT = [
    ("flat: layers to vllm", LLAMA, flat_side(DP_3, *LLAMA_BY_LAYER, tensors=[LLAMA_REST]), vllm(tp=4)),
    ("flat: layers of experts to vllm", QWEN3_MOE, flat_side(DP_3, *MOE_BY_LAYER, tensors=[MOE_REST]),
     vllm(tp=3, dp=2)),
    ("flat: megatron to layers of experts", QWEN3_MOE, megatron(tp=2, ep=2),
     flat_side(DP_3, *MOE_BY_LAYER, tensors=[MOE_REST])),
    ("flat: to flat buffers of another size", LLAMA, flat_side(DP_3, *LLAMA_BY_LAYER, tensors=[LLAMA_REST]),
     flat_side({"dp": {"axes": {"dp": 7}}}, *LLAMA_TO_2, tensors=[LLAMA_TO_2_REST]), SMALL_BUCKETS),
    ("flat: fp32 hsdp to bf16 engines", LLAMA,
     {**flat_side({"fsdp": {"axes": {"replica": 2, "shard": 3}}}, *HSDP_BY_LAYER, tensors=[HSDP_REST]), "dtype": "fp32"},
     vllm(tp=2, replicas=2, dtype="bf16")),
    ("flat: uneven ranges, one empty, rows apart", PARTS,
     flat_side(
         DP_3,
         flat("f", "dp", 160, [("qkv", 3, [4, 12]), ("cube", 60), ("qkv", 51, [3, 4]), ("norm", 120), ("scalar", 130),
                               ("qkv", 140, [0, 3])],
              ranges=[[0, 71], [71, 71], [71, 160]]),
     ),
     generic({"row": {"axes": {"dp": 2}}}, ("scalar", "row", ["Replicate"]), ("*", "row", ["Shard(0)"]))),
    ("flat: rows into two buffers, the rest by a rule", PARTS,
     generic({"one": {"axes": {"x": 1}}}, ("*", "one", ["Replicate"])),
     flat_side(
         DP_3,
         flat("head", "dp", 40, [("qkv", 1, [0, 5])]),
         flat("tail", "dp", 50, [("qkv", 0, [5, 12])], ranges=[[0, 20], [10, 50], [49, 50]]),
         tensors=[("scalar", "dp", ["Replicate"]), ("*", "dp", ["Shard(0)"])],
     )),
]  # fmt: skip


# vLLM places experts in turn only where a router chooses among groups of them.
ROUND_ROBIN = {"placement": "round_robin"}
GROUPS = deepseek(heads=12, n_shared_experts=3, n_group=2, vocab_size=370)
GROUPS_10 = deepseek(layers=2, experts=10, n_group=5)
# Physical experts of eight; 1 and 5 have several, two of them neighbours.
TABLE_OF_12 = [3, 1, 1, 0, 7, 5, 2, 1, 6, 4, 5, 0]
# Of six experts; another list for each layer with experts.
TABLES_OF_8 = [[0, 1, 2, 3, 4, 5, 0, 1], [5, 4, 3, 2, 1, 0, 0, 1], [2, 2, 2, 0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5, 0, 1]]

PLACEMENT = [
    ("vllm: round-robin over six", GROUPS, megatron(dp=4, ep=4), vllm(tp=6, expert_parallel=True, experts=ROUND_ROBIN)),
    (
        "vllm: round-robin over dp x tp, pp2",
        DEEPSEEK,
        megatron(tp=2, ep=2),
        vllm(tp=2, dp=2, pp=2, expert_parallel=True, experts=ROUND_ROBIN),
        SMALL_BUCKETS,
    ),
    (
        "vllm: from round-robin to linear",
        GROUPS_10,
        vllm(dp=3, expert_parallel=True, experts=ROUND_ROBIN),
        vllm(dp=4, expert_parallel=True, experts={"placement": "linear"}),
    ),
    (
        "vllm: redundant experts",
        QWEN3_MOE,
        megatron(dp=2, ep=2),
        vllm(tp=2, dp=2, expert_parallel=True, experts={"num_redundant_experts": 4}),
    ),
    (
        "vllm: more redundant experts than experts",
        MIXTRAL,
        megatron(tp=2, ep=2),
        vllm(tp=2, expert_parallel=True, replicas=2, experts={"num_redundant_experts": 6}),
        SMALL_BUCKETS,
    ),
    (
        "vllm: a table",
        QWEN3_MOE,
        megatron(dp=4, ep=4),
        vllm(tp=2, dp=2, expert_parallel=True, experts={"physical_to_logical": TABLE_OF_12}),
    ),
    (
        "vllm: a table per layer with experts",
        QWEN3_MOE_MLP_ONLY,
        megatron(pp=2, dp=2, ep=2),
        vllm(tp=2, pp=2, expert_parallel=True, experts={"physical_to_logical": TABLES_OF_8}),
        FOUR_PER_HOST,
    ),
    (
        "vllm: a table per layer",
        QWEN3_MOE_MLP_ONLY,
        megatron(tp=2),
        vllm(dp=4, expert_parallel=True, experts={"physical_to_logical": TABLES_OF_8[:2] + TABLES_OF_8}),
    ),
    (
        "vllm: from a table to megatron",
        QWEN3_MOE,
        vllm(tp=2, dp=2, expert_parallel=True, experts={"physical_to_logical": TABLE_OF_12}),
        megatron(tp=2, dp=2, ep=4),
    ),
    (
        "vllm: up before gate",
        QWEN3_MOE,
        megatron(tp=2, dp=2, ep=2),
        vllm(tp=3, dp=2, moe_backend="flashinfer_cutlass"),
    ),
    (
        "vllm: up before gate, round-robin",
        DEEPSEEK,
        megatron(tp=2, ep=2),
        vllm(tp=2, dp=2, expert_parallel=True, experts=ROUND_ROBIN, moe_backend="flashinfer_cutlass"),
    ),
    (
        "vllm: from up before gate to triton",
        MIXTRAL,
        vllm(tp=4, moe_backend="flashinfer_cutlass"),
        vllm(tp=2, moe_backend="triton"),
    ),
]

SGLANG = [
    ("sglang: one rank", LLAMA, megatron(tp=2), sglang()),
    ("sglang: tp4 and two engines", LLAMA, megatron(tp=2, pp=2, dp=2), sglang(tp=4, replicas=2), FOUR_PER_HOST),
    ("sglang: two engines of two copies", LLAMA, megatron(tp=2), sglang(tp=2, dp=2, replicas=2), FOUR_PER_HOST),
    ("sglang: tp above the kv heads", LLAMA_BIAS, megatron(tp=2), sglang(tp=8)),
    ("sglang: tp12 of three", LLAMA_BY_3, megatron(tp=3, dp=2), sglang(tp=12)),
    ("sglang: pp remainder", LLAMA_DEEP, megatron(tp=2), sglang(pp=5), SMALL_BUCKETS),
    ("sglang: layers_per_stage", LLAMA_DEEP, megatron(pp=3), sglang(pp=3, layers=[6, 1, 5])),
    ("sglang: tied, pp1", QWEN3_TIED, megatron(tp=2, pp=2), sglang(tp=4)),
    ("sglang: tied, pp3", QWEN3_TIED, megatron(tp=4), sglang(tp=2, pp=3)),
    ("sglang: tied, pp2 to megatron", QWEN2_TIED, sglang(tp=2, pp=2), megatron(tp=2, pp=2)),
    ("sglang: attention over half of tp8", QWEN3, megatron(tp=2, pp=2), sglang(tp=8, dp_attention=2)),
    ("sglang: attention on each rank", QWEN3, megatron(tp=4), sglang(tp=4, dp_attention=4, dp_lm_head=True)),
    (
        "sglang: replicated embedding",
        QWEN3_BY_3,
        megatron(tp=2),
        sglang(tp=6, dp_attention=3, embedding="replicated", dp_lm_head=True),
    ),
    ("sglang: a vocabulary that is padded to 64 x 6", QWEN3_BY_3, megatron(tp=2), sglang(tp=6, dp_attention=3)),
    ("sglang: embedding over tp", QWEN3_TIED, megatron(tp=2), sglang(tp=4, dp_attention=2, embedding="tensor")),
    ("sglang: to megatron", QWEN3_BIAS, sglang(tp=4, dp_attention=2), megatron(tp=2, pp=2)),
    ("sglang: cast", LLAMA, megatron(tp=2, dtype="fp32"), sglang(tp=4, dtype="bf16")),
    ("sglang: experts cut by tp", QWEN3_MOE, megatron(tp=2, dp=2, ep=4), sglang(tp=6)),
    ("sglang: ep2 and tp2 of each expert", QWEN3_MOE_4_HEADS, megatron(tp=2, dp=2, ep=4), sglang(tp=4, ep=2)),
    ("sglang: ep4, pp2", QWEN3_MOE_4_HEADS, megatron(dp=8, ep=8), sglang(tp=4, pp=2, ep=4), FOUR_PER_HOST),
    (
        "sglang: ep2 under attention over half of the ranks",
        QWEN3_MOE_6_4_HEADS,
        megatron(tp=2, ep=3, etp=2, dp=3),
        sglang(tp=4, ep=2, dp_attention=2, pp=2, replicas=2),
        SMALL_BUCKETS,
    ),
    ("sglang: tied experts model", QWEN3_MOE_TIED, megatron(tp=2, pp=2, ep=2), sglang(tp=2, pp=2)),
    ("sglang: mixtral", MIXTRAL, megatron(tp=2, pp=2, dp=2, ep=4), sglang(tp=8, ep=2, pp=2)),
    (
        "sglang: redundant experts",
        QWEN3_MOE_4_HEADS,
        megatron(dp=2, ep=2),
        sglang(tp=4, ep=2, experts={"num_redundant_experts": 2}),
    ),
    (
        "sglang: a table per layer",
        QWEN3_MOE_6_4_HEADS,
        megatron(pp=2, dp=2, ep=2),
        sglang(tp=4, ep=4, experts={"physical_to_logical": TABLES_OF_8[:2] + TABLES_OF_8}),
    ),
    (
        "sglang: up before gate",
        QWEN3_MOE_4_HEADS,
        megatron(tp=2, dp=2, ep=2),
        sglang(tp=4, ep=2, moe_backend="flashinfer_cutlass"),
    ),
    ("sglang: deepseek", DEEPSEEK, megatron(tp=2, dp=2, ep=4), sglang(tp=4, ep=2, pp=2)),
    (
        "sglang: deepseek with attention on each rank",
        DEEPSEEK,
        megatron(tp=2, pp=5, dtype="fp32"),
        sglang(tp=8, ep=8, dp_attention=8, dp_lm_head=True, dtype="bf16"),
        SMALL_BUCKETS,
    ),
    ("sglang: moonlight to megatron", MOONLIGHT, sglang(tp=4, ep=2, dp_attention=2), megatron(tp=2, pp=2, ep=2)),
    ("sglang: glm", GLM, megatron(tp=2, pp=5), sglang(tp=4, ep=4, pp=2)),
    ("sglang: glm before 0.5.19", GLM, megatron(tp=2, pp=5), sglang(tp=4, ep=4, pp=2, version="0.5.18")),
    ("sglang: glm to vllm", GLM_SHARED, sglang(tp=4), vllm(tp=2, dp=2, expert_parallel=True)),
    ("sglang: glm to megatron", GLM_SHARED, sglang(tp=2, pp=2), megatron(tp=2, ep=2)),
    ("sglang: glm fuses its shared expert", GLM_SHARED, megatron(tp=2, pp=5), sglang(tp=4, pp=2)),
    ("sglang: glm fuses none over ep", GLM_SHARED, megatron(tp=2), sglang(tp=4, ep=2)),
    ("sglang: glm lite fuses its shared expert", deepseek("glm4_moe_lite"), megatron(tp=2), sglang(tp=2, dp_attention=2)),
    ("sglang: 256 experts and a shared one, fused", DEEPSEEK_256, megatron(dp=2, ep=2), sglang(tp=2)),
    (
        "sglang: deepseek with fused shared experts",
        DEEPSEEK,
        megatron(tp=2, dp=2, ep=4),
        sglang(tp=4, ep=2, shared_experts="fused"),
        SMALL_BUCKETS,
    ),
    (
        "sglang: fused and redundant experts, up before gate, to megatron",
        DEEPSEEK,
        sglang(
            tp=4,
            ep=2,
            shared_experts="fused",
            experts={"num_redundant_experts": 4},
            moe_backend="flashinfer_cutlass",
        ),
        megatron(tp=2, pp=5),
    ),
    (
        "sglang: moonlight with whole shared experts",
        MOONLIGHT,
        megatron(tp=2, pp=2, ep=2),
        sglang(tp=4, ep=4, pp=2, shared_experts="replicated"),
    ),
    ("sglang: deepseek from vllm", DEEPSEEK, vllm(tp=2, dp=2, expert_parallel=True), sglang(tp=4)),
    ("sglang: to vllm", QWEN3_MOE_4_HEADS, sglang(tp=4, ep=2, dp_attention=2), vllm(tp=2, dp=2, expert_parallel=True)),
    (
        "sglang: from vllm",
        MIXTRAL,
        vllm(tp=2, dp=2, expert_parallel=True, experts={"num_redundant_experts": 4}),
        sglang(tp=4, ep=4),
    ),
]

FSDP_2D = {"fsdp": {"axes": {"replica": 2, "shard": 3}}}
ROWS_OF_THREE = [("*", "fsdp", ["Replicate", "Shard(0)"])]
TWO_BY_TWO = {"grid": {"axes": {"dp": 2, "tp": 2}}}
LISTED = ListedModel(
    layers__0__up=[10, 6], layers__1__up=[10, 6], layers__0__down=[6, 10], layers__1__down=[6, 10],
    table=[7, 5, 3], cube=[4, 6, 5, 2], norm=[5], scalar=[],
)  # fmt: skip

SHARED_EXPERTS = [
    ("deepseek: one rank to one rank", DEEPSEEK, megatron(), vllm()),
    ("deepseek: tp2 ep4 pp2 to tp4", DEEPSEEK, megatron(tp=2, dp=2, ep=4, pp=2, layers=[2, 3]), vllm(tp=4)),
    ("deepseek: fp8 is only how it is stored", DEEPSEEK_FP8, megatron(tp=2, pp=5), vllm(tp=2)),
    (
        "deepseek: etp2 to an expert-parallel engine",
        DEEPSEEK,
        megatron(tp=2, dp=4, ep=4, etp=2),
        vllm(tp=4, expert_parallel=True, replicas=2),
        FOUR_PER_HOST,
    ),
    (
        "deepseek: to shared experts that are whole on each rank",
        DEEPSEEK,
        megatron(tp=4, ep=2, pp=5),
        vllm(tp=2, dp=3, expert_parallel=True),
    ),
    ("deepseek: to data parallelism that cuts experts", DEEPSEEK, megatron(dp=2, ep=2), vllm(tp=2, dp=4, pp=2)),
    ("deepseek: from one engine to another", DEEPSEEK, vllm(tp=2, dp=2, expert_parallel=True), vllm(tp=4, pp=3)),
    ("deepseek: back to megatron", DEEPSEEK, vllm(tp=8), megatron(tp=2, pp=2, ep=2, dp=1, first=2)),
    ("deepseek: prediction layers are left out", DEEPSEEK, megatron(tp=2, mtp=False), vllm(tp=2, mtp=True)),
    ("deepseek: prediction layer", DEEPSEEK_MTP, megatron(tp=2, ep=2, mtp=True), vllm(tp=4, mtp=True)),
    (
        "deepseek: prediction layer on the last stage",
        DEEPSEEK_MTP,
        megatron(tp=2, pp=3, ep=2, layers=[2, 2, 1], mtp=True),
        vllm(tp=2, pp=2, mtp=True),
        SMALL_BUCKETS,
    ),
    (
        "deepseek: two prediction layers in the last chunk",
        DEEPSEEK_MTP_2,
        megatron(pp=2, vpp=2, dp=2, ep=2, mtp=True),
        vllm(tp=2, dp=2, expert_parallel=True, mtp=True),
    ),
    (
        "deepseek: prediction layers to megatron",
        DEEPSEEK_MTP_2,
        vllm(tp=2, pp=2, mtp=True),
        megatron(tp=4, pp=2, mtp=True),
    ),
    (
        "kimi: interleaved gates and ups",
        KIMI,
        megatron(tp=2, dp=2, ep=2, etp=2, glu_block=4),
        vllm(tp=4, expert_parallel=True),
    ),
    ("kimi: one tensor for all experts", KIMI, megatron(dp=4, ep=4, grouped=True), vllm(tp=8)),
    (
        "kimi: one interleaved tensor for all experts, both ways",
        KIMI,
        megatron(dp=2, ep=2, grouped=True, glu_block=8),
        megatron(tp=2, dp=3, ep=3, etp=2, glu_block=2),
    ),
    ("moonlight: pp2 to tp4", MOONLIGHT, megatron(tp=2, pp=2), vllm(tp=4)),
    ("moonlight: virtual stages to stages", MOONLIGHT, megatron(tp=2, pp=2, vpp=3, ep=2), vllm(tp=2, pp=2)),
    (
        "moonlight: colocated",
        MOONLIGHT,
        megatron(tp=2, dp=2, ep=4),
        vllm(tp=4, expert_parallel=True),
        {"colocated": True},
    ),
    ("glm lite: pp2 to tp2", GLM_LITE, megatron(tp=2, pp=2, last=2, mtp=True), vllm(tp=2, mtp=True)),
    ("glm: bias, no shared experts", GLM, megatron(tp=2, pp=5), vllm(tp=4)),
    ("glm: shared experts of a part of the tokens", GLM_SHARED, megatron(tp=2), vllm(tp=2, dp=2, expert_parallel=True)),
    ("glm lite: shared experts of a part of the tokens", GLM_LITE, megatron(tp=2, mtp=True),
     vllm(tp=2, dp=2, expert_parallel=True, mtp=True)),
    (
        "glm: norms of query and key, prediction layer",
        GLM_NORM,
        megatron(tp=4, ep=2, dp=1, mtp=True),
        vllm(tp=8, mtp=True),
    ),
    (
        "glm: layers left out and renamed away",
        GLM_NORM,
        megatron(tp=2, mtp=True),
        vllm(tp=2, mtp=True),
        {"options": {"exclude": ["model.layers.5.*", "*.e_score_correction_bias"]}},
    ),
    (
        "deepseek: casts spare the router's correction",
        DEEPSEEK_MTP,
        megatron(tp=2, dtype="fp32", mtp=True),
        vllm(tp=2, dtype="bf16", mtp=True),
    ),
]

GENERIC = [
    (
        "generic: fsdp of three to vllm",
        LLAMA,
        generic({"fsdp": {"axes": {"dp": 3}}}, ("*", "fsdp", ["Shard(0)"])),
        vllm(tp=4),
    ),
    (
        "generic: fsdp of seven with empty shards to vllm",
        QWEN3_TIED,
        generic({"fsdp": {"axes": {"dp": 7}}}, ("*", "fsdp", ["Shard(0)"])),
        vllm(tp=8),
    ),
    ("generic: hsdp to vllm with experts", QWEN3_MOE, generic(FSDP_2D, *ROWS_OF_THREE), vllm(tp=2, dp=3)),
    (
        "generic: hsdp to vllm with expert_parallel",
        MIXTRAL,
        generic(FSDP_2D, *ROWS_OF_THREE),
        vllm(tp=2, dp=2, expert_parallel=True),
    ),
    (
        "generic: fsdp inside tp to vllm",
        QWEN2_TIED,
        generic(
            {"grid": {"axes": {"fsdp": 2, "tp": 2}}},
            ("*norm.weight", "grid", ["Replicate", "Replicate"]),
            ("*.bias", "grid", ["Shard(0)", "Replicate"]),
            ("*.o_proj.weight", "grid", ["Shard(0)", "Shard(1)"]),
            ("*.down_proj.weight", "grid", ["Shard(0)", "Shard(1)"]),
            ("model.embed_tokens.weight", "grid", ["Shard(1)", "Replicate"]),
            ("*", "grid", ["StridedShard(0, split_factor=2)", "Shard(0)"]),
        ),
        vllm(tp=4),
    ),
    (
        "generic: experts on a mesh of their own to vllm",
        QWEN3_MOE,
        generic(
            {
                "dense": {"axes": {"dp": 4}, "ranks": [3, 1, 0, 2]},
                "experts": {"axes": {"edp": 2, "tp": 2}, "ranks": [4, 0, 2, 5]},
            },
            ("*.experts.*", "experts", ["Replicate", "Shard(1)"]),
            ("*", "dense", ["Shard(0)"]),
        ),
        vllm(tp=3),
    ),
    (
        "generic: megatron to fsdp of five",
        LLAMA_BIAS,
        megatron(tp=4),
        generic({"fsdp": {"axes": {"dp": 5}}}, ("*", "fsdp", ["Shard(0)"])),
    ),
    ("generic: vllm to hsdp", MIXTRAL_TIED, vllm(tp=6, expert_parallel=True), generic(FSDP_2D, *ROWS_OF_THREE)),
    (
        "generic: listed parameters, rows to columns",
        LISTED,
        generic({"row": {"axes": {"dp": 4}}}, ("scalar", "row", ["Replicate"]), ("*", "row", ["Shard(0)"])),
        generic(
            TWO_BY_TWO,
            ("scalar", "grid", ["Replicate", "Replicate"]),
            ("norm", "grid", ["Shard(0)", "Shard(0)"], {"rename": "engine.{name}.weight"}),
            ("*.down", "grid", ["Shard(1)", "Shard(0)"]),
            ("cube", "grid", ["Shard(2)", "Shard(1)"]),
            ("*", "grid", ["Replicate", "Shard(1)"], {"rename": "engine.{name}"}),
        ),
    ),
    (
        "generic: three axes, permuted ranks, two cuts of one dimension",
        LISTED,
        generic(
            {"all": {"axes": {"a": 2, "b": 1, "c": 3}, "ranks": [5, 0, 3, 1, 4, 2]}},
            ("scalar", "all", ["Replicate", "Replicate", "Replicate"]),
            ("norm", "all", ["Replicate", "Shard(0)", "Shard(0)"]),
            ("cube", "all", ["Shard(0)", "Shard(3)", "Shard(2)"]),
            ("*", "all", ["Shard(1)", "Replicate", "Shard(1)"]),
        ),
        generic(
            {"one": {"axes": {"x": 1}}, "rest": {"axes": {"x": 3}, "ranks": [3, 2, 1]}},
            ("scalar", "one", ["Replicate"]),
            ("norm", "rest", ["Shard(0)"]),
            ("layers.?.down", "rest", ["Shard(1)"]),
            ("*", "one", ["Shard(0)"]),
        ),
        SMALL_BUCKETS,
    ),
    (
        "generic: strided shards of three",
        ListedModel(a=[24, 5], b=[5, 36], c=[12]),
        generic(
            {"grid": {"axes": {"fsdp": 2, "tp": 3}}},
            ("b", "grid", ["_StridedShard(1, split_factor=3)", "Shard(1)"]),
            ("*", "grid", ["StridedShard(0, split_factor=3)", "Shard(0)"]),
        ),
        generic({"row": {"axes": {"x": 5}}}, ("*", "row", ["Shard(0)"])),
    ),
    (
        "generic: dtypes by rule",
        LISTED,
        generic(
            {"row": {"axes": {"dp": 2}}},
            ("scalar", "row", ["Replicate"]),
            ("norm", "row", ["Shard(0)"], {"dtype": "fp32"}),
            ("*", "row", ["Shard(0)"]),
        ),
        generic(
            {"row": {"axes": {"dp": 3}}},
            ("scalar", "row", ["Replicate"], {"dtype": "fp32"}),
            ("norm", "row", ["Replicate"], {"dtype": "bf16"}),
            ("table", "row", ["Shard(1)"], {"dtype": "fp32"}),
            ("cube", "row", ["Shard(2)"], {"dtype": "fp16"}),
            ("*", "row", ["Replicate"]),
        ),
    ),
]

CASTS = [
    ("cast: fp32 to bf16", LLAMA, megatron(tp=2, pp=2, dtype="fp32"), vllm(tp=4, dtype="bf16")),
    (
        "cast: fp32 to bf16 with experts",
        QWEN3_MOE,
        megatron(dp=2, ep=2, dtype="fp32"),
        vllm(tp=3, dtype="bf16"),
        SMALL_BUCKETS,
    ),
    ("cast: bf16 to fp32", LLAMA, vllm(tp=8), megatron(tp=2, dtype="fp32")),
    ("cast: bf16 to fp16", QWEN2, megatron(tp=2), vllm(tp=6, dtype="fp16")),
    ("cast: fp16 to bf16", LLAMA, megatron(tp=4, dtype="fp16"), vllm(tp=2, dtype="bf16")),
    ("cast: fp32 to fp16", QWEN3_TIED, megatron(tp=2, pp=2, dtype="fp32"), vllm(tp=2, pp=2, dtype="fp16")),
    ("cast: fp16 to fp32", MIXTRAL, vllm(tp=2, dtype="fp16"), megatron(tp=4, ep=2, dtype="fp32")),
    ("cast: fp32 to fp32", LLAMA, megatron(tp=2, dtype="fp32"), vllm(tp=8, dtype="fp32")),
    ("cast: an fp32 model stays fp32", LLAMA_FP32, megatron(tp=2), vllm(tp=4)),
    ("cast: an fp16 model stays fp16", LLAMA_FP16, megatron(tp=2), vllm(tp=4)),
    ("cast: an fp32 model to bf16", LLAMA_FP32, megatron(tp=2, pp=2), vllm(tp=4, dtype="bf16")),
    (
        "cast: fp32 fsdp to bf16 vllm",
        QWEN3_TIED,
        {**generic(FSDP_2D, *ROWS_OF_THREE), "dtype": "fp32"},
        vllm(tp=4, dtype="bf16"),
    ),
]

# The model as a checkpoint of which the headers are read.
CHECKPOINTS = [
    ("checkpoint: llama, tied", LLAMA_TIED, megatron(tp=2, pp=2), vllm(tp=2)),
    ("checkpoint: deepseek", DEEPSEEK, megatron(tp=2, dp=2, ep=2), vllm(tp=4)),
    ("checkpoint: qwen3_moe with dense layers", QWEN3_MOE_MLP_ONLY, megatron(dp=2, ep=2), vllm(tp=2)),
]


# 320 columns are two blocks and a half; what is cut are heads and features of 128.
FP8_QWEN3 = dense("qwen3", 2, 320, 4, 2, 768, 300, head_dim=128)
FP8_MOE = dense(
    "qwen3_moe", 2, 192, 4, 2, 256, 300, head_dim=128, num_experts=4, moe_intermediate_size=256, num_experts_per_tok=2
)  # fmt: skip
FP8 = {"dtype": "fp8_e4m3_block128"}
MXFP8 = {"dtype": "mxfp8_e4m3"}
UE8M0 = {**FP8, "scale_fmt": "ue8m0"}


def scratch(size):
    """So little of it that ranks quantize in several windows, of both halves of their arenas."""
    return {"options": {"scratch_bytes": size}}


def staged_scratch(size):
    return {"options": {**SMALL_BUCKETS["options"], "scratch_bytes": size}}


EVERY_ROW = generic(FSDP_2D, *ROWS_OF_THREE)
EVERY_COLUMN = generic(FSDP_2D, ("*proj.weight", "fsdp", ["Replicate", "Shard(1)"]), *ROWS_OF_THREE)

QUANTIZED = [
    ("fp8: at the source", FP8_QWEN3, megatron(tp=2), vllm(tp=2, **FP8)),
    ("fp8: one rank to one rank", FP8_QWEN3, megatron(), vllm(**FP8)),
    ("fp8: stages to engines, staged", FP8_QWEN3, megatron(pp=2, dp=2), vllm(tp=2, replicas=2, **FP8), SMALL_BUCKETS),
    ("fp8: ranks that cut blocks, at the destination", FP8_QWEN3, megatron(tp=4, pp=2), vllm(tp=2, **FP8)),
    (
        "fp8: ranks that cut blocks, staged",
        FP8_QWEN3,
        megatron(tp=4),
        vllm(tp=2, pp=2, **FP8),
        SMALL_BUCKETS,
    ),
    ("fp8: rows of fsdp, at the destination", FP8_QWEN3, EVERY_ROW, vllm(tp=2, **FP8)),
    ("fp8: scales are powers of two", FP8_QWEN3, megatron(tp=2, pp=2), vllm(tp=2, **UE8M0)),
    ("fp8: an fp32 source", FP8_QWEN3, megatron(tp=4, dtype="fp32"), vllm(tp=1, **FP8)),
    ("fp8: an fp16 source", FP8_QWEN3, megatron(tp=2, dtype="fp16"), vllm(tp=2, **FP8)),
    ("fp8: experts", FP8_MOE, megatron(tp=2, dp=2, ep=2), vllm(tp=2, **FP8)),
    ("fp8: whole experts", FP8_MOE, megatron(tp=2, pp=2, ep=2), vllm(tp=2, expert_parallel=True, **FP8), SMALL_BUCKETS),
    ("fp8: experts that ranks cut", FP8_MOE, megatron(tp=4, etp=4), vllm(tp=2, **UE8M0)),
    ("fp8: to fp8", FP8_QWEN3, megatron(tp=2, pp=2, **FP8), vllm(**FP8)),
    ("fp8: to fp8, experts", FP8_MOE, megatron(tp=2, ep=2, **FP8), vllm(tp=2, expert_parallel=True, **FP8)),
    ("fp8: to fp8 with powers of two, staged", FP8_QWEN3, megatron(**UE8M0), vllm(tp=2, **UE8M0), SMALL_BUCKETS),
    ("mxfp8: at the source", FP8_QWEN3, megatron(tp=4), vllm(tp=4, **MXFP8)),
    ("mxfp8: experts", FP8_MOE, megatron(tp=2, ep=2), vllm(tp=4, **MXFP8), SMALL_BUCKETS),
    ("mxfp8: rows of fsdp, at the source", FP8_QWEN3, EVERY_ROW, vllm(tp=2, **MXFP8)),
    ("mxfp8: columns of fsdp, at the destination", FP8_QWEN3, EVERY_COLUMN, vllm(tp=2, **MXFP8)),
    ("fp8: in windows, at the source", FP8_QWEN3, megatron(tp=2), vllm(tp=2, **FP8), scratch(400_000)),
    ("fp8: in the smallest windows, at the source", FP8_QWEN3, megatron(tp=2), vllm(tp=2, **FP8), scratch(98_816)),
    (
        "fp8: in windows, stages to engines, staged",
        FP8_QWEN3,
        megatron(pp=2, dp=2),
        vllm(tp=2, replicas=2, **FP8),
        staged_scratch(500_000),
    ),
    ("fp8: in windows, at the destination", FP8_QWEN3, megatron(tp=4, pp=2), vllm(tp=2, **FP8), scratch(1_000_000)),
    ("fp8: in windows, on both sides", FP8_MOE, megatron(tp=4, etp=4), vllm(tp=2, **UE8M0), staged_scratch(500_000)),
    ("fp8: experts in windows", FP8_MOE, megatron(tp=2, dp=2, ep=2), vllm(tp=2, replicas=2, **FP8), scratch(300_000)),
    (
        "fp8: an expert twice on a rank, at the destination",
        FP8_MOE,
        megatron(tp=4, etp=4),
        vllm(tp=2, expert_parallel=True, experts={"physical_to_logical": [0, 0, 1, 2, 3, 3]}, **FP8),
    ),
    (
        "fp8: an expert twice on a rank, in windows",
        FP8_MOE,
        megatron(tp=4, etp=4),
        vllm(tp=2, expert_parallel=True, experts={"physical_to_logical": [3, 1, 3, 2, 0, 3]}, **FP8),
        scratch(500_000),
    ),
    ("mxfp8: in windows", FP8_QWEN3, EVERY_ROW, vllm(tp=2, **MXFP8), staged_scratch(50_000)),
    ("mxfp8: to mxfp8", FP8_MOE, megatron(tp=2, ep=2, **MXFP8), vllm(tp=2, **MXFP8)),
]


def nemotron_h(pattern, **more):
    sizes = {
        "hidden_size": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 900,
        "intermediate_size": 40, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 4, "ssm_state_size": 5,
        "conv_kernel": 4, "use_conv_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    }  # fmt: skip
    config = {**sizes, "num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern, **more}
    return HybridModel(model_type="nemotron_h", **config)


NEMOTRON = nemotron_h("ME*EM-EM*E")
NEMOTRON_LATENT = nemotron_h("M*EMEM*E", moe_latent_size=8)
NEMOTRON_ONE_GROUP = nemotron_h("MME*", n_groups=1)
NEMOTRON_ATTENTION = nemotron_h("*E-*")
NEMOTRON_MTP = nemotron_h("M*EM", predicts=True, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
NEMOTRON_MTPS = nemotron_h("M*EM", predicts=True, num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*ME-")
QWEN3_NEXT_CONFIG = dict(
    model_type="qwen3_next", num_hidden_layers=8, hidden_size=24, num_attention_heads=8, num_key_value_heads=4,
    head_dim=6, vocab_size=900, full_attention_interval=4, linear_num_key_heads=4, linear_num_value_heads=8,
    linear_key_head_dim=3, linear_value_head_dim=5, linear_conv_kernel_dim=4, num_experts=8, moe_intermediate_size=16,
    shared_expert_intermediate_size=32, num_experts_per_tok=2,
)  # fmt: skip
QWEN3_NEXT = HybridModel(**QWEN3_NEXT_CONFIG)
QWEN3_NEXT_FUSED = HybridModel(**{**QWEN3_NEXT_CONFIG, "shared_expert_intermediate_size": 16})
QWEN3_NEXT_MTP = HybridModel(predicts=True, **QWEN3_NEXT_CONFIG)
GPT_OSS = HybridModel(
    model_type="gpt_oss", num_hidden_layers=4, hidden_size=24, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
    vocab_size=900, intermediate_size=16, num_local_experts=8, attention_bias=True,
)  # fmt: skip
LLAMA4 = HybridModel(
    model_type="llama4_text", num_hidden_layers=5, hidden_size=24, num_attention_heads=8, num_key_value_heads=2, head_dim=6,
    vocab_size=900, intermediate_size=16, intermediate_size_mlp=40, num_local_experts=8, interleave_moe_layer_step=2,
)  # fmt: skip
LLAMA4_QUERIES = flat("queries.{layer}", "dp", 48 * 24, [("model.layers.{layer}.self_attn.q_proj.weight", 0)], layers=[0, 5])

MAMBA = [
    ("mamba: one rank to one rank", NEMOTRON, megatron(), vllm()),
    ("mamba: no such layer", NEMOTRON_ATTENTION, megatron(tp=2, pp=2), vllm(tp=2)),
    ("mamba: ep4 tp2 to tp4, two engines", NEMOTRON, megatron(tp=2, dp=4, ep=4), vllm(tp=4, replicas=2)),
    ("mamba: tp4 pp2 ep8 to tp2 pp2", NEMOTRON, megatron(tp=4, pp=2, dp=2, ep=8), vllm(tp=2, pp=2)),
    ("mamba: etp2 to expert_parallel", NEMOTRON, megatron(tp=2, dp=2, ep=2, etp=2), vllm(tp=4, expert_parallel=True)),
    ("mamba: vpp to dp2", NEMOTRON_LATENT, megatron(tp=2, pp=2, vpp=2, dp=2, ep=2), vllm(tp=2, dp=2)),
    (
        "mamba: latent experts to dp2 with expert_parallel",
        NEMOTRON_LATENT,
        megatron(tp=4, pp=2, dp=2, ep=4, etp=2),
        vllm(tp=2, dp=2, expert_parallel=True),
        SMALL_BUCKETS,
    ),
    ("mamba: one group, whole on each of four", NEMOTRON_ONE_GROUP, megatron(dp=4, ep=4), vllm(tp=4)),
    ("mamba: one group, pp2 to tp2 pp2", NEMOTRON_ONE_GROUP, megatron(pp=2), vllm(tp=2, pp=2), FOUR_PER_HOST),
    ("mamba: fp32 scalars, names of 0.16", NEMOTRON, megatron(tp=2, mamba_fp32=True, version="0.16.1"), vllm(tp=2)),
    ("mamba: names of 0.17", NEMOTRON, megatron(tp=2, version="0.17.0"), vllm(tp=2)),
    ("mamba: vllm to fp32 scalars", NEMOTRON, vllm(tp=2), megatron(tp=4, mamba_fp32=True)),
    ("mamba: fp32 router", NEMOTRON, megatron(tp=2), vllm(tp=2, dp=2, expert_parallel=True, router_dtype="fp32")),
    ("mamba: live transformers 5", NEMOTRON, fsdp(dp=2, version="5.19.0"), vllm(tp=2)),
    ("mamba: megatron to megatron", NEMOTRON, megatron(tp=2, dp=2, ep=4), megatron(tp=4, pp=2)),
    ("mamba: vllm to megatron", NEMOTRON, vllm(tp=4), megatron(tp=2, ep=2)),
    ("mamba: ep4 tp2 to sglang", NEMOTRON, megatron(tp=2, dp=2, ep=4), sglang(tp=4)),
    ("mamba: to sglang's dp attention", NEMOTRON, megatron(tp=4, pp=2), sglang(tp=4, dp_attention=2, ep=2, dp_lm_head=True)),
    ("mamba: latent experts to sglang pp2", NEMOTRON_LATENT, megatron(dp=2, ep=2), sglang(tp=2, pp=2, shared_experts="replicated")),
    ("mamba: one group to sglang", NEMOTRON_ONE_GROUP, megatron(pp=2), sglang(tp=4, dp_attention=2), SMALL_BUCKETS),
    ("mamba: sglang to vllm", NEMOTRON, sglang(tp=4, ep=2), vllm(tp=2, expert_parallel=True)),
    ("mamba: fsdp to vllm", NEMOTRON_LATENT, fsdp(dp=3), vllm(tp=2, pp=2)),
    ("mamba: to fsdp with fused experts", NEMOTRON, megatron(tp=2, ep=2), fsdp(dp=3, fused_experts=True)),
    ("mamba: megatron to fsdp", NEMOTRON, megatron(tp=2, ep=2), fsdp(dp=5)),
    ("mamba: predictions to vllm", NEMOTRON_MTP, megatron(tp=2, pp=2, ep=2, mtp=True), vllm(tp=4)),
    ("mamba: predictions to vllm pp2", NEMOTRON_MTP, megatron(tp=4, ep=4, mtp=True), vllm(tp=2, pp=2, expert_parallel=True)),
    ("mamba: two predictions, megatron to megatron", NEMOTRON_MTPS, megatron(tp=2, pp=2, ep=2), megatron(tp=4, mtp=True)),
    ("mamba: predictions from fsdp", NEMOTRON_MTP, fsdp(dp=2, mtp=True), vllm(tp=2)),
]

DELTA_NETS = [
    ("delta net: one rank to one rank", QWEN3_NEXT, megatron(), vllm()),
    ("delta net: ep4 tp2 to tp4", QWEN3_NEXT, megatron(tp=2, dp=4, ep=4), vllm(tp=4)),
    ("delta net: tp4 pp2 to two engines", QWEN3_NEXT, megatron(tp=4, pp=2, ep=4), vllm(tp=2, replicas=2)),
    (
        "delta net: etp2 to expert_parallel",
        QWEN3_NEXT,
        megatron(tp=2, dp=2, ep=2, etp=2),
        vllm(tp=4, expert_parallel=True),
    ),
    (
        "delta net: pp4 to dp2 with expert_parallel",
        QWEN3_NEXT,
        megatron(tp=2, pp=4, dp=2, ep=2),
        vllm(tp=2, dp=2, pp=2, expert_parallel=True),
        SMALL_BUCKETS,
    ),
    ("delta net: vllm to megatron", QWEN3_NEXT, vllm(tp=2, dp=2), megatron(tp=4, ep=2)),
    ("delta net: vllm pp2 to vllm pp2", QWEN3_NEXT, vllm(tp=2, pp=2), vllm(pp=4)),
    ("delta net: ep4 tp2 to sglang", QWEN3_NEXT, megatron(tp=2, dp=2, ep=4), sglang(tp=4)),
    ("delta net: to sglang's dp attention", QWEN3_NEXT, megatron(tp=4, pp=2, ep=4), sglang(tp=4, dp_attention=2, ep=4, dp_lm_head=True)),
    ("delta net: to sglang, swapped", QWEN3_NEXT, megatron(tp=2), sglang(tp=2, moe_backend="flashinfer_cutlass", shared_experts="replicated")),
    ("delta net: a shared expert as the others, to sglang", QWEN3_NEXT_FUSED, megatron(tp=2, ep=2), sglang(tp=4, ep=2)),
    ("delta net: a shared expert as the others, apart", QWEN3_NEXT_FUSED, megatron(), sglang(tp=2, shared_experts="tensor")),
    ("delta net: sglang to megatron", QWEN3_NEXT, sglang(tp=2, ep=2), megatron(tp=2, pp=2), SMALL_BUCKETS),
    ("delta net: fsdp to sglang", QWEN3_NEXT, fsdp(dp=3), sglang(tp=2, replicas=2)),
    ("delta net: vllm to fsdp", QWEN3_NEXT, vllm(tp=2), fsdp(dp=7)),
    ("delta net: a prediction to vllm", QWEN3_NEXT_MTP, megatron(tp=2, pp=2, ep=2, mtp=True), vllm(tp=4)),
    ("delta net: a prediction to vllm pp2", QWEN3_NEXT_MTP, megatron(tp=4, ep=2, mtp=True), vllm(tp=2, dp=2, pp=2, expert_parallel=True)),
    ("delta net: a prediction to megatron", QWEN3_NEXT_MTP, megatron(tp=4, mtp=True), megatron(tp=2, pp=4, ep=2)),
    ("delta net: a prediction from fsdp", QWEN3_NEXT_MTP, fsdp(dp=3), vllm(tp=2, mtp=True)),
]

FUSED_EXPERTS = [
    ("fused experts: columns cut through pairs of gate and up", GPT_OSS, fsdp(dp=2),
     generic({"tp": {"axes": {"tp": 3}}}, ("*.gate_up_proj", "tp", ["Shard(2)"]), ("*", "tp", ["Replicate"]))),
    ("fused experts: pairs of gate and up from rows of them", GPT_OSS,
     generic({"tp": {"axes": {"tp": 3}}}, ("*.gate_up_proj*", "tp", ["Shard(1)"]), ("*", "tp", ["Replicate"])), vllm(tp=2)),
    ("fused experts: one rank to one rank", GPT_OSS, megatron(), vllm()),
    ("fused experts: ep4 tp2 to tp4", GPT_OSS, megatron(tp=2, dp=2, ep=4), vllm(tp=4)),
    (
        "fused experts: etp2 to expert_parallel",
        GPT_OSS,
        megatron(tp=4, dp=2, ep=4, etp=2),
        vllm(tp=2, expert_parallel=True),
    ),
    ("fused experts: pp2 to dp2", GPT_OSS, megatron(pp=2, dp=2, ep=2), vllm(tp=2, dp=2), SMALL_BUCKETS),
    ("fused experts: tp8 to pp2, two engines", GPT_OSS, megatron(tp=8, ep=8), vllm(pp=2, replicas=2), FOUR_PER_HOST),
    ("fused experts: vllm to megatron", GPT_OSS, vllm(tp=4), megatron(tp=2, ep=2)),
    ("fused experts: ep4 tp2 to sglang", GPT_OSS, megatron(tp=2, dp=2, ep=4), sglang(tp=4)),
    ("fused experts: to sglang's dp attention", GPT_OSS, megatron(tp=4, etp=2), sglang(tp=4, dp_attention=2, ep=2)),
    ("fused experts: to sglang pp2", GPT_OSS, megatron(dp=2, ep=2), sglang(tp=2, pp=2, ep=2), SMALL_BUCKETS),
    ("fused experts: to sglang, transposed", GPT_OSS, megatron(tp=2, ep=2), sglang(tp=4, moe_backend="triton_kernel")),
    ("fused experts: from sglang, transposed", GPT_OSS, sglang(tp=2, ep=2, moe_backend="triton_kernel"), vllm(tp=2)),
    ("fused experts: sglang to vllm", GPT_OSS, sglang(tp=2, pp=2), vllm(tp=4)),
    ("fused experts: fsdp to sglang", GPT_OSS, fsdp(dp=3), sglang(tp=2, ep=2)),
    ("fused experts: megatron to fsdp", GPT_OSS, megatron(tp=2, ep=2), fsdp(dp=5)),
    ("fused experts: expert mesh of fsdp", GPT_OSS, fsdp(dp=4, ep=2), vllm(tp=2)),
    ("fused experts: expert mesh of fsdp, by the second dim", GPT_OSS, fsdp(dp=4, ep=2, expert_shard_dim=1), vllm(tp=2)),
    ("fused experts: rotary pairs from rows cut inside of heads", LLAMA4, fsdp(dp=7), vllm(tp=4)),
    ("fused experts: rotary pairs to rows cut inside of heads", LLAMA4, vllm(tp=2), fsdp(dp=5)),
    ("fused experts: rotary pairs to pp2", LLAMA4, fsdp(dp=3), vllm(tp=2, pp=2, replicas=2), FOUR_PER_HOST),
    ("fused experts: rotary pairs to expert_parallel", LLAMA4, fsdp(dp=2), vllm(tp=2, dp=2, expert_parallel=True), SMALL_BUCKETS),
    ("fused experts: rotary pairs to a key head on two ranks", LLAMA4, fsdp(dp=4, ep=2), vllm(tp=2, dp=2)),
    ("fused experts: rotary pairs from an expert mesh by the second dim", LLAMA4, fsdp(dp=4, ep=2, expert_shard_dim=1), vllm(tp=8)),
    ("fused experts: rotary pairs from columns", LLAMA4,
     generic({"tp": {"axes": {"tp": 3}}}, ("*_proj.weight", "tp", ["Shard(1)"]), ("*", "tp", ["Shard(0)"])), vllm(tp=4)),
    ("fused experts: rotary pairs from strided rows", LLAMA4,
     generic({"m": {"axes": {"fsdp": 2, "tp": 2}}}, ("*", "m", ["StridedShard(0, 2)", "Shard(0)"])), vllm(tp=2)),
    ("fused experts: rotary pairs from flat buffers", LLAMA4,
     flat_side(DP_3, LLAMA4_QUERIES, tensors=[("*", "dp", ["Shard(0)"])]), vllm(tp=2, pp=2)),
]

DEEPSEEK_V4 = DeepseekV4Model(
    model_type="deepseek_v4", num_hidden_layers=5, hidden_size=24, num_attention_heads=8, num_key_value_heads=1, head_dim=6,
    vocab_size=200, q_lora_rank=10, o_lora_rank=5, o_groups=4, compress_ratios=[0, 4, 128, 4, 128], num_hash_layers=2,
    index_n_heads=3, index_head_dim=4, hc_mult=2, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=24, topk_method="noaux_tc",
)  # fmt: skip
HYPER_CONNECTIONS = [
    ("hyper: fsdp to tp2", DEEPSEEK_V4, fsdp(dp=3), vllm(tp=2, replicas=2)),
    ("hyper: to tp4 of flashinfer", DEEPSEEK_V4, fsdp(dp=2), vllm(tp=4, attention_backend="flashinfer")),
    ("hyper: live modules to pp2", DEEPSEEK_V4, fsdp(dp=3, version="5.24"), vllm(tp=2, pp=2), FOUR_PER_HOST),
    ("hyper: stacked experts of a mesh to expert_parallel", DEEPSEEK_V4, fsdp(dp=4, ep=2, fused_experts=True),
     vllm(tp=2, dp=2, expert_parallel=True), SMALL_BUCKETS),
    ("hyper: to expert_parallel, pp2", DEEPSEEK_V4, fsdp(dp=2), vllm(tp=2, dp=2, pp=2, expert_parallel=True, version="0.23")),
    ("hyper: of fp32 sources", DEEPSEEK_V4, fsdp(dp=2, version="5", dtype="fp32"), vllm(tp=2, dtype="bf16")),
    ("hyper: to an fp32 router", DEEPSEEK_V4, fsdp(), vllm(router_dtype="fp32")),
    ("hyper: back to fsdp", DEEPSEEK_V4, vllm(tp=2, pp=2), fsdp(dp=3)),
]

# Key heads of one block, value heads of one; hidden size and experts of two.
FP8_QWEN3_NEXT_CONFIG = dict(
    model_type="qwen3_next", num_hidden_layers=4, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
    head_dim=128, vocab_size=200, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=4,
    moe_intermediate_size=256, shared_expert_intermediate_size=256, num_experts_per_tok=2,
)  # fmt: skip
FP8_QWEN3_NEXT = HybridModel(**FP8_QWEN3_NEXT_CONFIG)
FP8_QWEN3_NEXT_MTP = HybridModel(predicts=True, **FP8_QWEN3_NEXT_CONFIG)
QUANTIZED += [
    ("fp8: delta nets to vllm", FP8_QWEN3_NEXT, megatron(tp=2, ep=2), vllm(tp=2, **FP8)),
    ("fp8: delta nets to whole experts", FP8_QWEN3_NEXT, megatron(tp=2, pp=2, ep=2), vllm(tp=2, expert_parallel=True, **UE8M0)),
    ("fp8: delta nets to sglang", FP8_QWEN3_NEXT, megatron(tp=2, ep=2), sglang(tp=2, ep=2, **FP8)),
    ("fp8: delta nets to sglang's dp attention", FP8_QWEN3_NEXT, megatron(), sglang(tp=2, dp_attention=2, **FP8), SMALL_BUCKETS),
    ("fp8: delta nets and a prediction", FP8_QWEN3_NEXT_MTP, megatron(tp=2, mtp=True), vllm(**FP8)),
    ("fp8: delta nets of fsdp, at the destination", FP8_QWEN3_NEXT, fsdp(dp=3), vllm(tp=2, **FP8)),
    ("fp8: experts to sglang", FP8_MOE, megatron(tp=2, dp=2, ep=2), sglang(tp=2, **FP8)),
    ("mxfp8: delta nets", FP8_QWEN3_NEXT, megatron(tp=2, ep=2), sglang(tp=2, **MXFP8)),
]


def all_jobs():
    tables = {
        "dense": DENSE,
        "experts": EXPERTS,
        "shared_experts": SHARED_EXPERTS,
        "mamba": MAMBA,
        "delta_nets": DELTA_NETS,
        "fused_experts": FUSED_EXPERTS,
        "hyper_connections": HYPER_CONNECTIONS,
        "fsdp": FSDP,
        "flat": FLAT,
        "placement": PLACEMENT,
        "sglang": SGLANG,
        "generic": GENERIC,
        "casts": CASTS,
        "checkpoints": CHECKPOINTS,
        "quantized": QUANTIZED,
        "random": draw_jobs(),
    }
    return [
        Job(group, *row, from_checkpoint=group == "checkpoints") for group, table in tables.items() for row in table
    ]
