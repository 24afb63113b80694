#!/usr/bin/env python3
"""Compares the sglang layout with SGLang's own model classes, on the CPU.

usage: sglang_models_test.py --programs DIRECTORY [--case GLOB]      (tests/frameworks/sglang.sh installs what it needs)

Of every case SGLang builds its model on each rank of the mesh, a process each (gloo), as on a Hopper GPU, and reads a
checkpoint by its own load_weights. The plan of the same job moves that checkpoint from one rank into the mesh. Both have to
hold the same tensors: every name, shape, dtype and byte. Kernels are empty (sglang_stand_ins.py): nothing is computed.
"""

import json
import logging
import os
import pathlib
import sys
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.ERROR)  # that there is no nvidia-smi, no torchaudio, and so on
os.environ |= {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore", "SGLANG_PLUGINS": "none",
}  # fmt: skip

import sglang_stand_ins
import torch

sglang_stand_ins.install_empty_packages()
sglang_stand_ins.pretend_hopper()

import sglang
import table
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model, get_model_loader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.models import registry  # noqa: F401  imports every model class, once for all ranks
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import MODELS, Refit

torch.set_num_threads(1)
pynccl.PyNcclCommunicator = lambda **_: None  # it would take GPUs; gloo does what loading asks for

KV_SCALES = (".k_scale", ".v_scale")  # of the cache, which no checkpoint of ours has
MESHES = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
ATTENTION_MESHES = {
    "tp2 dpa2": {"tensor_parallel": 2, "dp_attention": 2},
    "tp4 dpa2": {"tensor_parallel": 4, "dp_attention": 2},
}
TOWER_MESHES = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "tp2, whole": {"tensor_parallel": 2, "mm_encoder_tp_mode": "data"},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp4 dpa2": {"tensor_parallel": 4, "dp_attention": 2},
}
# Families of whose tower refitc knows SGLang's class.
TOWERS = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "kimi_k25", "kimi_vl", "llama4"}
# Of which SGLang builds the tower in any case.
ALWAYS_WITH_TOWER = {"gemma3", "kimi_k25", "kimi_vl"}
EXPERT_MESHES = {
    "tp2 ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "tp4 ep2": {"tensor_parallel": 4, "expert_parallel": 2},
    "tp4 dpa2 ep4": {"tensor_parallel": 4, "dp_attention": 2, "expert_parallel": 4},
    "tp2 pp2 ep2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
}


FILES = pathlib.Path(__file__).resolve().parents[2] / "compiler" / "model" / "families"
# Families of which nobody has looked at SGLang's class: the sglang layout refuses them.
UNKNOWN = {rules.stem for rules in FILES.glob("*.json") if '"sglang"' not in rules.read_text()}
# SGLang reads nemotron_h's groups by another name than transformers, and mixtral's heads are the hidden size divided.
CONFIGS = {
    name: {key: value for key, value in config.items() if key != "head_dim" or name != "mixtral"}
    | ({"mamba_n_groups": config["n_groups"]} if name == "nemotron_h" else {})
    | ({"language_model_only": True} if "text_config" in config else {})  # a vision tower is not moved
    for name, config in MODELS.items()
    # It has experts in every layer of qwen3_moe, and cannot load llama4 without the model that has a vision tower. The sglang
    # layout does not know deepseek_v4.
    if name not in ("qwen3_moe, dense layers", "llama4_text", "llama4_text, tied", "deepseek_v4")
    and config["model_type"] not in UNKNOWN
}
# What its classes cannot hold; refitc refuses or warns of it.
LACKS = {
    "llama": ("dp_attention",), "llama, bias": ("dp_attention",), "llama, tied": ("dp_attention", "pipeline_parallel"),
    "qwen2": ("dp_attention",), "mixtral": ("dp_attention",), "qwen3_next": ("pipeline_parallel",),
    # The last of several stages has a head of its own, which its loader leaves unfilled.
    "qwen3_5_text, tied": ("pipeline_parallel",),
    "llama4": ("pipeline_parallel",), "llama4, tower": ("dp_attention", "mm_encoder_tp_mode"), "gpt_oss": ("expert_parallel",), "gemma3_text": ("dp_attention", "pipeline_parallel"),
    "gemma3": ("dp_attention", "pipeline_parallel", "mm_encoder_tp_mode"), "kimi_vl": ("dp_attention", "pipeline_parallel"),
}  # fmt: skip


# Sizes of which shards hold whole blocks of 128 x 128.
BLOCKS = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "vocab_size": 512, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 256,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Without llama: SGLang's drops the scales of blocks when it loads.
FP8_MODELS = ("qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "qwen3_next")
FP8_MESHES = {mesh: MESHES[mesh] for mesh in ("tp1", "tp2", "pp2")} | {"tp2 dpa2": ATTENTION_MESHES["tp2 dpa2"]}


def in_blocks(config):
    sizes = {key: value for key, value in BLOCKS.items() if key in config}
    latent = "kv_lora_rank" in config
    heads = 4 if latent or "head_dim" in config else 2  # of 128
    return config | sizes | {"num_attention_heads": heads, "num_key_value_heads": 4 if latent else 2}


def cases():
    for name, config in CONFIGS.items():
        # Its choice for gpt_oss.
        backend = {"moe_backend": "triton_kernel"} if name == "gpt_oss" else {}
        has_experts = any(key in config.get("text_config", config) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        expert_meshes = EXPERT_MESHES if has_experts else {}
        kinds = [(name, config, MESHES | ATTENTION_MESHES | expert_meshes, backend)]
        if config["model_type"] in ALWAYS_WITH_TOWER:
            kinds = []
        if name in FP8_MODELS:
            meshes = FP8_MESHES | ({"tp2 ep2": EXPERT_MESHES["tp2 ep2"]} if has_experts else {})
            kinds.append((name + ", fp8", in_blocks(config), meshes, {"dtype": "fp8_e4m3_block128"}))
        if name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):  # so many that shared experts are fused, of two of them
            meshes = {mesh: (MESHES | EXPERT_MESHES)[mesh] for mesh in ("tp2", "tp2 ep2")}
            many = {"n_routed_experts": 256, "moe_intermediate_size": 16, "num_hidden_layers": 2}
            kinds.append((name + ", 256 experts", config | many, meshes, {}))
        if config["model_type"] in TOWERS:
            whole = {key: value for key, value in config.items() if key != "language_model_only"}
            kinds.append((name + ", tower", whole, TOWER_MESHES | (expert_meshes if not kinds else {}), {"vision": True}))
        if name == "qwen3_moe":
            meshes = {mesh: (MESHES | EXPERT_MESHES)[mesh] for mesh in ("tp2", "tp2 ep2")}
            kinds.append((name + ", flashinfer_cutlass", config, meshes, {"moe_backend": "flashinfer_cutlass"}))
        for kind, of_kind, meshes, more in kinds:
            for mesh, side in meshes.items():
                lacks = any(key in side for key in LACKS.get(name, ()) + LACKS.get(kind, ()))
                # nemotron_h's experts are cut by all of tensor parallelism or by none.
                cut = name == "nemotron_h" and side.get("expert_parallel", 1) not in (1, side.get("tensor_parallel", 1))
                if not lacks and not cut:
                    yield kind, mesh, of_kind, {"layout": "sglang", **side, **more}


def server_args(checkpoint, side):
    return ServerArgs(
        model_path=str(checkpoint), skip_tokenizer_init=True, disable_custom_all_reduce=True, disable_cuda_graph=True, device="cuda",
        random_seed=1, tp_size=side.get("tensor_parallel", 1), pp_size=side.get("pipeline_parallel", 1),
        ep_size=side.get("expert_parallel", 1), attn_dp_size=side.get("dp_attention", 1),
        mm_enable_dp_encoder=side.get("mm_encoder_tp_mode") == "data", enable_multimodal=side.get("vision"),
        moe_runner_backend=side["moe_backend"] if side.get("moe_backend") == "flashinfer_cutlass" else "auto",
    )  # fmt: skip


def load(arguments, rank, rendezvous):
    """What SGLang's model holds on this rank after load_weights: name -> tensor."""
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    bootstrap._resolve_backend = lambda device: "gloo"
    bootstrap._resolve_dist_init_method = lambda dist_port: f"file://{rendezvous}"
    bootstrap.init_parallel_runtime(server_args=arguments, device="cuda", dist_port=0)
    config = ModelConfig.from_server_args(arguments)
    initialize_moe_config()
    bootstrap.init_layer_runtime(model_config=config)
    loader = get_model_loader(LoadConfig(), config)
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, loader.load_config, _get_quantization_config(config, loader.load_config))
        DefaultModelLoader.load_weights_only(model, loader._get_all_weights(config, model), torch.device("cpu"))
    return table.tensors_of(model, KV_SCALES)


def quantized(programs, directory, config, dtype):
    """A checkpoint of the same weights in fp8, which SGLang reads: one rank's, under the checkpoint's names."""
    (directory / "fp8").mkdir()
    refit = Refit(programs, directory / "fp8", config, {"layout": "fsdp", "dtype": dtype})
    refit.write_checkpoint()
    (tensors,) = refit.execute()
    save_file(tensors, refit.checkpoint / "model.safetensors", metadata={"format": "pt"})
    layers = range(config["num_hidden_layers"])
    kept = [f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in layers if config["model_type"] == "qwen3_next"]
    (refit.checkpoint / "config.json").write_text(
        json.dumps(config | {"quantization_config": FP8 | {"modules_to_not_convert": kept}})
    )
    return refit.checkpoint


def run_case(programs, config, side, directory):
    """The number of tensors compared, and the differences by rank."""
    refit = Refit(programs, directory, config, side)
    refit.write_checkpoint()
    if "vision" in side:  # SGLang asks the index whether a llama4 has a tower
        with safe_open(refit.checkpoint / "model.safetensors", "pt") as tensors:
            names = dict.fromkeys(tensors.keys(), "model.safetensors")
        (refit.checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = refit.execute()
    checkpoint = refit.checkpoint if "dtype" not in side else quantized(programs, directory, config, side["dtype"])
    arguments = server_args(checkpoint, side)
    return table.on_ranks(refit.ranks, directory, lambda rank: table.differences(
        "SGLang", found[rank], load(arguments, rank, directory / "rendezvous")))  # fmt: skip


def main():
    arguments = table.arguments_of(__doc__).parse_args()
    return table.run(f"SGLang {sglang.__version__}", cases(),
                     lambda family, mesh, *case: run_case(arguments.programs, *case), arguments.case)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
