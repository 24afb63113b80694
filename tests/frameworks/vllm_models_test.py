#!/usr/bin/env python3
"""Compares the vllm layout with vLLM's own model classes, on the CPU.

usage: vllm_models_test.py --programs DIRECTORY [--case GLOB | --refitted DIRECTORY]      (vllm.sh installs what it needs)

Of every case vLLM builds its model on each rank of the mesh, a process each (gloo), and reads a checkpoint by its own
load_weights. The plan of the same job moves that checkpoint from one rank into the mesh. Both have to hold the same
tensors: every name, shape, dtype and byte. What vLLM does after loading (process_weights_after_loading) is not run: the
plan's hooks name it.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import sys
import tempfile
import traceback

os.environ |= {
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "VLLM_TARGET_DEVICE": "cpu",
}  # fmt: skip

import torch
import vllm
from tiny_models import MODELS, Refit
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, backend_to_kernel_cls
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

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
# Buffers of the modules that no checkpoint feeds.
SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "k_scale", "v_scale", "q_scale", "prob_scale")


def cases():
    for name, config in MODELS.items():
        meshes = dict(MESHES)
        if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            meshes |= EXPERT_MESHES
        # vLLM keeps this router in fp32 where it has no kernel of a newer GPU for it.
        more = {"router_dtype": "fp32"} if config["model_type"] == "nemotron_h" else {}
        for mesh, side in meshes.items():
            yield name, mesh, config, {"layout": "vllm", **side, **more}


def engine_config(checkpoint, side):
    config = EngineArgs(
        model=str(checkpoint), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, load_format="safetensors", use_tqdm_on_load=False,
        tensor_parallel_size=side.get("tensor_parallel", 1), pipeline_parallel_size=side.get("pipeline_parallel", 1),
        enable_expert_parallel=side.get("expert_parallel", False), max_model_len=64, distributed_executor_backend="mp",
    ).create_engine_config()  # fmt: skip
    # As vLLM's data-parallel engines have it, without their coordinator.
    config.parallel_config.data_parallel_size = side.get("data_parallel", 1)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    return config


def load(config, side, rank, ranks, rendezvous):
    """What vLLM's model holds on this rank after load_weights: name -> tensor."""
    parallel = config.parallel_config
    parallel.data_parallel_rank = rank // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    parallel.rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{rendezvous}", local_rank=rank, backend="gloo")
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        loader.load_weights(model, config.model_config)
    tensors = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.endswith(SCALES)}


def differences(found, wanted):
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            yield f"{name}: the plan has no such tensor; vLLM's is {wanted[name].dtype} {tuple(wanted[name].shape)}"
        elif found[name] is None:
            continue  # some of these vLLM makes after loading
        elif name not in wanted:
            yield f"{name}: vLLM has no such tensor"
        elif found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype:
            yield (
                f"{name}: {found[name].dtype} {tuple(found[name].shape)}; vLLM has {wanted[name].dtype} {tuple(wanted[name].shape)}"
            )
        elif not torch.equal(found[name], wanted[name]):
            wrong = (found[name] != wanted[name]).sum()
            yield f"{name}: {wrong} of {wanted[name].numel()} elements are not vLLM's"


def on_rank(config, side, found, rank, directory):
    """Runs in a process of its own; its differences are lines of a file."""
    status = 1
    try:
        wanted = load(config, side, rank, len(found), directory / "rendezvous")
        lines = list(differences(found[rank], wanted))
        lines.insert(0, str(sum(tensor is not None for tensor in found[rank].values())))
        (directory / f"rank-{rank}.txt").write_text("\n".join(lines))
        status = 0
    except BaseException:
        (directory / f"rank-{rank}.txt").write_text("0\n" + traceback.format_exc())
    finally:
        os._exit(status)


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
    sys.stdout.flush()
    children = []
    for rank in range(refit.ranks):
        child = os.fork()
        if child == 0:
            on_rank(engine, side, found, rank, directory)
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


def refitted(arguments):
    cases, failed = sorted(arguments.refitted.iterdir()), 0
    print(f"| from HF by Megatron and a plan to vLLM {vllm.__version__} | ranks' tensors | |\n|---|---|---|")
    for directory in cases:
        side = json.loads((directory / "job.json").read_text())["destination"]
        try:
            compared, wrong = compare(Refit.kept(arguments.programs, directory), side)
        except Exception as error:
            compared, wrong = 0, [f"{type(error).__name__}: {error}"]
        failed += bool(wrong)
        print(f"| {directory.name}, vLLM {side} | {compared} | {'DIFFERS' if wrong else 'equal'} |", flush=True)
        for line in wrong:
            print(f"{directory.name}: {line}", file=sys.stderr, flush=True)
    return 1 if failed or not cases else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", required=True, type=lambda path: pathlib.Path(path).absolute(), help="where refitc is")
    parser.add_argument("--case", default="*", help="a glob over 'FAMILY: MESH'")
    parser.add_argument("--refitted", type=pathlib.Path, help="what megatron_bridge_test.py kept")
    arguments = parser.parse_args()
    if arguments.refitted is not None:
        return refitted(arguments)
    failed = ran = 0
    print(f"| vLLM {vllm.__version__} | mesh | ranks' tensors | |\n|---|---|---|---|")
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
