#!/usr/bin/env python3
"""Compares the vllm layout with vLLM's own model classes, on the CPU.

usage: vllm_models_test.py --programs DIRECTORY [--case GLOB | --refitted DIRECTORY]      (vllm.sh installs what it needs)

Of every case vLLM builds its model on each rank of the mesh, a process each (gloo), and reads a checkpoint by its own
load_weights. The plan of the same job moves that checkpoint from one rank into the mesh. Both have to hold the same
tensors: every name, shape, dtype and byte. What vLLM does after loading (process_weights_after_loading) is not run: the
plan's hooks name it.
"""

import importlib
import json
import os
import pathlib
import sys

os.environ |= {
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "VLLM_TARGET_DEVICE": "cpu",
}  # fmt: skip

import table
import torch
import vllm
from tiny_models import ALWAYS_CUT_TOWERS, MODELS, TOWERS, Refit
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, backend_to_kernel_cls
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

torch.set_num_threads(1)
# vLLM inspects a model class in a process of its own, which imports vLLM anew: half a minute for each family.
registry._run_in_subprocess = lambda function: function()


class GpuForExperts:
    """vLLM builds experts without gates for GPUs only. It has no kernel for them here, and none is run."""

    def __getattr__(self, name):
        return getattr(vllm.platforms.current_platform, name)

    def is_cuda_alike(self):
        return True


def select_any_backend(moe_config, select=unquantized_fused_moe_method.select_unquantized_moe_backend):
    if moe_config.is_act_and_mul:
        return select(moe_config)
    backend = UnquantizedMoeBackend.CPU
    return backend, backend_to_kernel_cls(backend)[0]


@classmethod
def without_sparse_attention(
    cls, selected_backend, attn_selector_config, num_heads=None, choose=CpuPlatform.get_attn_backend_cls
):
    """No backend of a CPU computes it; the parameters are those of the modules around it."""
    return choose(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)


class Never:
    """A stream or event of a GPU, which models make and no test uses."""

    def __init__(self, *_, **__):
        pass


def take_gpu_class_of_deepseek_v4():
    """On a CPU vLLM takes a port of its class, which does not share tokens out or pad heads. The real one asks for a Hopper."""
    family = importlib.import_module("vllm.models.deepseek_v4")
    family.DeepseekV4ForCausalLM = importlib.import_module("vllm.models.deepseek_v4.nvidia.model").DeepseekV4ForCausalLM
    torch.cuda.Stream = torch.cuda.Event = Never
    CpuPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))


CpuPlatform.get_attn_backend_cls = without_sparse_attention
# Else ranks meet in shared memory, under names that outlive them.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
fused_moe_config.current_platform = GpuForExperts()
unquantized_fused_moe_method.select_unquantized_moe_backend = select_any_backend

MESHES = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
EXPERT_MESHES = {
    "tp2 ep": {"tensor_parallel": 2, "expert_parallel": True},
    "dp2": {"data_parallel": 2},
    "dp2 ep": {"data_parallel": 2, "expert_parallel": True},
    "tp2 dp2": {"tensor_parallel": 2, "data_parallel": 2},
    "tp2 dp2 ep": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": True},
    "tp2 pp2 dp2 ep": {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": True},
}
# Kernels that pad heads otherwise.
DEEPSEEK_V4_MESHES = {"tp2, flashinfer": {"tensor_parallel": 2, "attention_backend": "flashinfer"}}
# With a vision tower, which vLLM builds on every stage and beside every part of the experts.
TOWER_MESHES = {
    "tower": {},
    "tower, tp2": {"tensor_parallel": 2},
    "tower, tp4": {"tensor_parallel": 4},
    "tower, tp2, whole": {"tensor_parallel": 2, "mm_encoder_tp_mode": "data"},
    "tower, tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
# Buffers of the modules that no checkpoint feeds.
SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "k_scale", "v_scale", "q_scale", "prob_scale")


FILES = pathlib.Path(__file__).resolve().parents[2] / "compiler" / "model" / "families"
# Families that the vllm layout refuses: vLLM has no class of them, or one that holds what no plan does.
UNKNOWN = {rules.stem for rules in FILES.glob("*.json") if '"vllm"' not in rules.read_text()}


def cases():
    for name, config in MODELS.items():
        if config["model_type"] in UNKNOWN:
            continue
        meshes = dict(MESHES)
        text = config.get("text_config", config)
        if any(key in text for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            meshes |= EXPERT_MESHES
        # vLLM keeps this router in fp32 where it has no kernel of a newer GPU for it.
        more = {"router_dtype": "fp32"} if config["model_type"] == "nemotron_h" else {}
        if config["model_type"] == "deepseek_v4":
            meshes |= DEEPSEEK_V4_MESHES
        if config["model_type"] == "mamba2":  # vLLM's class has no pipeline parallelism
            meshes = {mesh: side for mesh, side in meshes.items() if "pipeline_parallel" not in side}
        if config["model_type"] in TOWERS:
            meshes |= {
                mesh: {"vision": True, **side} for mesh, side in TOWER_MESHES.items()
                if "mm_encoder_tp_mode" not in side or config["model_type"] not in ALWAYS_CUT_TOWERS
            }  # fmt: skip
        for mesh, side in meshes.items():
            yield name, mesh, config, {"layout": "vllm", **side, **more}


def engine_config(checkpoint, side):
    towers = "vision_config" in json.loads((checkpoint / "config.json").read_text())
    config = EngineArgs(
        language_model_only=towers and not side.get("vision", False), mm_encoder_tp_mode=side.get("mm_encoder_tp_mode", "weights"),
        model=str(checkpoint), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, load_format="safetensors", use_tqdm_on_load=False,
        tensor_parallel_size=side.get("tensor_parallel", 1), pipeline_parallel_size=side.get("pipeline_parallel", 1),
        enable_expert_parallel=side.get("expert_parallel", False), max_model_len=64, distributed_executor_backend="mp",
    ).create_engine_config()  # fmt: skip
    # As vLLM's data-parallel engines have it, without their coordinator.
    config.parallel_config.data_parallel_size = side.get("data_parallel", 1)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.kernel_config.enable_jit_warmup = False
    if side.get("attention_backend") == "flashinfer":
        config.attention_config.backend = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4
    return config


def load(config, rank, ranks, rendezvous):
    """What vLLM's model holds on this rank after load_weights: name -> tensor."""
    parallel = config.parallel_config
    parallel.data_parallel_rank = rank // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    parallel.rank = rank
    if config.model_config.hf_config.model_type == "deepseek_v4":
        take_gpu_class_of_deepseek_v4()
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{rendezvous}", local_rank=rank, backend="gloo")
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        loader.load_weights(model, config.model_config)
    return table.tensors_of(model, SCALES)


def run_case(programs, config, side, directory):
    """The number of tensors compared, and the differences by rank."""
    # A bias that vLLM's classes leave out, of which the job has to know.
    leaves_out = config["model_type"] in ("qwen3", "qwen3_moe") and config.get("attention_bias")
    refit = Refit(programs, directory, config, side, {"exclude": ["*.o_proj.bias"]} if leaves_out else None)
    refit.write_checkpoint()
    return compare(refit, side)


def compare(refit, side):
    directory, found = refit.directory, refit.execute()
    engine = engine_config(refit.checkpoint, side)
    return table.on_ranks(refit.ranks, directory, lambda rank: table.differences(
        "vLLM", found[rank], load(engine, rank, refit.ranks, directory / "rendezvous")))  # fmt: skip


def refitted(programs, kept):
    """Cases that megatron_bridge_test.py kept."""
    for directory in sorted(kept.iterdir()):
        side = json.loads((directory / "job.json").read_text())["destination"]
        yield f"{directory.name}, by a plan", f"vLLM {side}", Refit.kept(programs, directory), side


def main():
    parser = table.arguments_of(__doc__)
    parser.add_argument("--refitted", type=pathlib.Path, help="what megatron_bridge_test.py kept")
    arguments = parser.parse_args()
    if arguments.refitted is not None:
        return table.run(f"HF by Megatron to vLLM {vllm.__version__}", refitted(arguments.programs, arguments.refitted),
                         lambda family, mesh, refit, side, _: compare(refit, side), arguments.case)  # fmt: skip
    return table.run(f"vLLM {vllm.__version__}", cases(), lambda family, mesh, *case: run_case(arguments.programs, *case),
                     arguments.case)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
