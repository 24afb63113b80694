#!/usr/bin/env python3
"""Compares the sglang layout with SGLang's own model classes, on the CPU.

usage: sglang_models_test.py --programs DIRECTORY [--case GLOB]      (tests/frameworks/sglang.sh installs what it needs)

Of every case SGLang builds its model on each rank of the mesh, a process each (gloo), as on a Hopper GPU, and reads a
checkpoint by its own load_weights. The plan of the same job moves that checkpoint from one rank into the mesh. Both have to
hold the same tensors: every name, shape, dtype and byte. Kernels are empty (sglang_stand_ins.py): nothing is computed.
"""

import argparse
import fnmatch
import json
import logging
import os
import pathlib
import sys
import tempfile
import traceback
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
EXPERT_MESHES = {
    "tp2 ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "tp4 ep2": {"tensor_parallel": 4, "expert_parallel": 2},
    "tp4 dpa2 ep4": {"tensor_parallel": 4, "dp_attention": 2, "expert_parallel": 4},
    "tp2 pp2 ep2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
}


# SGLang reads nemotron_h's groups by another name than transformers, and mixtral's heads are the hidden size divided.
CONFIGS = {
    name: {key: value for key, value in config.items() if key != "head_dim" or name != "mixtral"}
    | ({"mamba_n_groups": config["n_groups"]} if name == "nemotron_h" else {})
    for name, config in MODELS.items()
    if name != "qwen3_moe, dense layers"  # it has experts in every layer
}
# What its classes cannot hold; refitc refuses or warns of it.
LACKS = {
    "llama": ("dp_attention",), "llama, bias": ("dp_attention",), "llama, tied": ("dp_attention", "pipeline_parallel"),
    "qwen2": ("dp_attention",), "mixtral": ("dp_attention",), "qwen3_next": ("pipeline_parallel",),
    "gpt_oss": ("expert_parallel",),
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
        has_experts = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        kinds = [(name, config, MESHES | ATTENTION_MESHES | (EXPERT_MESHES if has_experts else {}), backend)]
        if name in FP8_MODELS:
            meshes = FP8_MESHES | ({"tp2 ep2": EXPERT_MESHES["tp2 ep2"]} if has_experts else {})
            kinds.append((name + ", fp8", in_blocks(config), meshes, {"dtype": "fp8_e4m3_block128"}))
        if name == "qwen3_moe":
            meshes = {mesh: (MESHES | EXPERT_MESHES)[mesh] for mesh in ("tp2", "tp2 ep2")}
            kinds.append((name + ", flashinfer_cutlass", config, meshes, {"moe_backend": "flashinfer_cutlass"}))
        for kind, of_kind, meshes, more in kinds:
            for mesh, side in meshes.items():
                lacks = any(key in side for key in LACKS.get(name, ()))
                # nemotron_h's experts are cut by all of tensor parallelism or by none.
                cut = name == "nemotron_h" and side.get("expert_parallel", 1) not in (1, side.get("tensor_parallel", 1))
                if not lacks and not cut:
                    yield kind, mesh, of_kind, {"layout": "sglang", **side, **more}


def server_args(checkpoint, side):
    return ServerArgs(
        model_path=str(checkpoint), skip_tokenizer_init=True, disable_custom_all_reduce=True, disable_cuda_graph=True, device="cuda",
        random_seed=1, tp_size=side.get("tensor_parallel", 1), pp_size=side.get("pipeline_parallel", 1),
        ep_size=side.get("expert_parallel", 1), attn_dp_size=side.get("dp_attention", 1),
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
    tensors = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.endswith(KV_SCALES)}


def bits(tensor):
    """The bytes of each element."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def differences(found, wanted):
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            yield f"{name}: the plan has no such tensor; SGLang's is {wanted[name].dtype} {tuple(wanted[name].shape)}"
        elif found[name] is None:
            continue  # the plan declares that it leaves the tensor alone
        elif name not in wanted:
            yield f"{name}: SGLang has no such tensor"
        elif found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype:
            yield (
                f"{name}: {found[name].dtype} {tuple(found[name].shape)}; SGLang has {wanted[name].dtype} {tuple(wanted[name].shape)}"
            )
        elif not torch.equal(bits(found[name]), bits(wanted[name])):
            wrong = (bits(found[name]) != bits(wanted[name])).any(-1).sum()
            yield f"{name}: {wrong} of {wanted[name].numel()} elements are not SGLang's"


def on_rank(arguments, found, rank, directory):
    """Runs in a process of its own; its differences are lines of a file."""
    status = 1
    try:
        sys.stdout = sys.stderr = open(directory / f"log-{rank}.txt", "w")
        wanted = load(arguments, rank, directory / "rendezvous")
        lines = list(differences(found[rank], wanted))
        lines.insert(0, str(sum(tensor is not None for tensor in found[rank].values())))
        (directory / f"rank-{rank}.txt").write_text("\n".join(lines))
        status = 0
    except BaseException:
        (directory / f"rank-{rank}.txt").write_text("0\n" + traceback.format_exc())
    finally:
        os._exit(status)


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
    found = refit.execute()
    checkpoint = refit.checkpoint if "dtype" not in side else quantized(programs, directory, config, side["dtype"])
    arguments = server_args(checkpoint, side)
    sys.stdout.flush()
    children = []
    for rank in range(refit.ranks):
        child = os.fork()
        if child == 0:
            on_rank(arguments, found, rank, directory)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    compared, wrong = 0, []
    for rank in range(refit.ranks):
        count, *lines = (directory / f"rank-{rank}.txt").read_text().split("\n")
        compared += int(count)
        wrong += [f"rank {rank}: {line}" for line in lines]
    if compared == 0 and not wrong:
        wrong = ["nothing was compared"]
    return compared, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", required=True, type=lambda path: pathlib.Path(path).absolute(), help="where refitc is")
    parser.add_argument("--case", default="*", help="a glob over 'FAMILY: MESH'")
    arguments = parser.parse_args()
    failed = ran = 0
    print(f"| SGLang {sglang.__version__} | mesh | ranks' tensors | |\n|---|---|---|---|", flush=True)
    for family, mesh, config, side in cases():
        if not fnmatch.fnmatchcase(f"{family}: {mesh}", arguments.case):
            continue
        ran += 1
        with tempfile.TemporaryDirectory(prefix="refit-") as directory:
            try:
                compared, wrong = run_case(arguments.programs, config, side, pathlib.Path(directory))
            except Exception as error:
                compared, wrong = 0, [f"{type(error).__name__}: {error}"]
        failed += bool(wrong)
        print(f"| {family} | {mesh} | {compared} | {'DIFFERS' if wrong else 'equal'} |", flush=True)
        for line in wrong:
            print(f"{family}: {mesh}: {line}", file=sys.stderr, flush=True)
    print(f"{ran} cases, {failed} of them differ")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
