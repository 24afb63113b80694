"""A real vLLM on the CPU takes a refit: every tensor and every generated token must equal a fresh engine's.

    python vllm_cpu.py [--family NAME …] [--path extension|backend|checkpoint …] [--tower moved|loaded]

For each family two processes are started: an engine that loads checkpoint B, and one that loads checkpoint A (by the backend: random
values, load_format "dummy"), generates, is refitted to B by a trainer thread of its process, and generates again. The path "checkpoint"
has no trainer: refit.vllm.load writes B into an engine of random values. Checkpoints are random; their names and shapes are those of the plan's source. Without --family the first four run; the others take two minutes each.
Vision towers are part of the checkpoint. Prompts have no images: the towers see one beside them.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "frameworks"))
import tiny_models  # noqa: E402
from trainer import PROMPTS, check_equal, weights_of, write_checkpoint  # noqa: E402

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The last is longer than a block: asked again, its start comes from the prefix cache.
BLOCK = 32
ALL_PROMPTS = [*PROMPTS, [3 + (7 * i * i + i) % 60 for i in range(BLOCK + 8)]]

HIDDEN = {"vocab_size": 512, "hidden_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
          "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": 1,
          "eos_token_id": 2}
ATTENTION = {**HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "intermediate_size": 512, "rope_theta": 10000.0, "hidden_act": "silu"}
FAMILIES = {
    "dense": {**ATTENTION, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "moe": {**ATTENTION, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True},
    "latent": {**ATTENTION, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
               "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
               "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "first_k_dense_replace": 1, "n_routed_experts": 4,
               "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
               "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
               "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
    "hybrid": {**HIDDEN, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"],
               "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 64, "attention_head_dim": 64, "intermediate_size": 512,
               "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4,
               "chunk_size": 64, "expand": 2, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
               "attention_bias": False, "mamba_proj_bias": False, "mlp_hidden_act": "relu2",
               "mamba_hidden_act": "silu", "layer_norm_epsilon": 1e-5, "residual_in_fp32": False,
               "time_step_limit": [0.0, 100.0], "time_step_floor": 1e-4, "time_step_min": 0.001,
               "time_step_max": 0.1, "rescale_prenorm_residual": True, "use_mamba_kernels": True},
}
# vLLM places experts in turn only where a router chooses among groups of them.
FAMILIES["grouped"] = {**FAMILIES["latent"], "n_group": 2}
# Small models of tests/frameworks, with widths that vLLM's kernels for CPUs take.
DELTA_WIDTHS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LATENT_WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WIDTHS = {"llama": {}, "mixtral": {}, "glm4_moe": {}, "gemma3_text": {}, "gpt_oss": {}, "minimax_m2": {},
          "llama4_text": {"attention_chunk_size": 128}, "qwen3_next": DELTA_WIDTHS, "qwen3_5_text": DELTA_WIDTHS,
          "kimi_k2": LATENT_WIDTHS, "glm4_moe_lite": LATENT_WIDTHS}
FAMILIES |= {family: {**tiny_models.MODELS[family], **widths} for family, widths in WIDTHS.items()}
# Those with a vision tower, by the widths of their language models.
TOWERS = {"gemma3": {}, "qwen3_vl": {}, "qwen3_vl_moe": {}, "qwen3_5": DELTA_WIDTHS, "llama4": {"attention_chunk_size": 128},
          "kimi_vl": LATENT_WIDTHS, "kimi_k25": LATENT_WIDTHS}
for family, widths in TOWERS.items():
    model = tiny_models.MODELS[family]
    FAMILIES[family] = {**model, "text_config": {**model["text_config"], **widths}}


def plan_of(family, tensor_parallel=1, delta=False, tower="moved", trainers=1):
    """With several trainers these are colocated with the engine's workers."""
    import refit

    vision = {"vision": tower == "moved"} if family in TOWERS else {}
    return refit.compile({"model": FAMILIES[family], "source": {"layout": "fsdp", "data_parallel": trainers},
                          "options": {"delta": delta, "peer": "staged" if delta else "direct"}, "colocated": trainers > 1,
                          "destination": {"layout": "vllm", "tensor_parallel": tensor_parallel, **vision}})


def keep_weights_as_loaded():
    """vLLM's CPU kernels take weights that are packed after loading, which drops or reorders the parameters. GPUs' take
    them as loaded, which is what a plan writes. Those of experts are packed here for each use."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain

    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight

    computed = CPUUnquantizedExperts.apply

    def packed_for_each_use(experts, output, hidden_states, w1, w2, *others, **more):
        w1, w2 = (cpu_prepack_moe_weight(weight, experts.isa) for weight in (w1, w2))
        computed(experts, output, hidden_states, w1, w2, *others, **more)

    CPUUnquantizedExperts.apply = packed_for_each_use
    CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None


def inspect_in_this_process(model_type):
    """vLLM inspects a model class in a process of its own, which imports vLLM anew: half a minute."""
    if model_type == "kimi_k25":  # imports numba, and vLLM's registry of kernels then fails at llvmlite
        return
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def route_as_one_group():
    """vLLM's router for CPUs takes the scores of minimax_m2 by groups of experts alone. One group is the same."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    made = CPURouter.__init__

    def made_with_a_group(router, *others, **more):
        made(router, *others, **more)
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = made_with_a_group


def take_text_alone():
    """An engine that builds the tower asks for a tokenizer and a processor of images. No prompt here has an image."""
    from vllm.config.model import ModelConfig

    ModelConfig._supports_multimodal_inputs = lambda config: False


def engine_of(checkpoint, **options):
    config = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
    keep_weights_as_loaded()
    inspect_in_this_process(config["model_type"])
    route_as_one_group()
    take_text_alone()
    from vllm import LLM

    # On a CPU with AMX another backend packs a projection of latent attention.
    options = {"attention_config": {"backend": "CPU_MLA"}, **options} if "kv_lora_rank" in config else options
    return LLM(model=str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
               max_num_seqs=4, seed=0, block_size=BLOCK, **options)


def generated(llm):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    return [llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0].outputs[0].token_ids
            for prompt in ALL_PROMPTS]


def state_of(worker):
    """Every tensor of the worker's model, and what its attention derived."""
    import torch

    model = worker.model_runner.model
    state = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name.startswith("W_"):
                state[f"{path}.{name}"] = value.detach().clone()
    return state


def image_of(family):
    """An image as the family's tower takes it from a processor: one, of four patches a side."""
    import torch

    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    if family == "gemma3":
        return {"pixel_values": image, "num_patches": torch.tensor([1])}
    if family == "llama4":
        return {"pixel_values": image, "patches_per_image": torch.tensor([1]), "aspect_ratios": torch.tensor([[1, 1]])}
    patches = image.reshape(16, 3, 4, 4)
    if family == "kimi_vl":
        return {"pixel_values": patches, "image_grid_hws": torch.tensor([[4, 4]])}
    if family == "kimi_k25":
        return {"pixel_values": patches, "grid_thws": torch.tensor([[1, 4, 4]])}
    return {"pixel_values": patches.repeat(1, 2, 1, 1).flatten(1), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def seen_by(worker, family):
    """What the tower of the worker's model makes of an image."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config), set_forward_context(None, worker.vllm_config):
        features = worker.model_runner.model.embed_multimodal(**image_of(family))
    return torch.cat([part[0] if isinstance(part, tuple) else part for part in features]).clone()


def states_of(llm, family):
    worker = worker_of(llm)
    return [state_of(worker) | ({"an image": seen_by(worker, family)} if family in TOWERS else {})]


def worker_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def fresh(arguments):
    import torch

    llm = engine_of(arguments.work / "b")
    tokens = [list(t) for t in generated(llm)]  # first: a rotary embedding changes its table's dtype when it is used
    torch.save({"states": states_of(llm, arguments.family), "tokens": tokens}, arguments.work / "fresh.pt")


def on_a_thread(call):
    result = {}

    def guarded():
        try:
            result["value"] = call()
        except BaseException as error:
            result["error"] = error

    thread = threading.Thread(target=guarded)
    thread.start()

    def join():
        thread.join()
        if "error" in result:
            raise result["error"]
        return result["value"]
    return join


def refit_by_extension(llm, plan, sources, checkpoint):
    import refit
    import refit.vllm

    fabric = refit.LocalFabric(plan.world_size)
    trainer = refit.Executor(plan, 0, fabric=fabric)
    joined = on_a_thread(lambda: trainer.bind(sources[0]))
    refit.vllm.init(llm, plan, fabric, check_backends=False)
    joined()
    for version, source in enumerate(sources):
        for name, tensor in sources[0].items():
            tensor.copy_(source[name])
        ran = on_a_thread(trainer.run)
        (reply,) = refit.vllm.update(llm, version=f"step-{version}")
        ran()
        assert (reply["state"], reply["refits"], reply["version"]) == ("bound", version + 1, f"step-{version}"), reply
        assert reply["delta"]["is_delta"] == (version > 0), reply
    ran = on_a_thread(trainer.run)
    (reply,) = refit.vllm.update(llm, version=f"step-{version}", dense=True)
    ran()
    assert reply["delta"]["why_dense"] == "rank 1 asked for it", reply
    assert llm.llm_engine.get_weight_version() == f"step-{version}"
    ran = on_a_thread(trainer.run)
    (report,) = refit.vllm.compare(llm, checkpoint)
    ran()
    assert report.ok and report.perturbed and report.refits == len(sources) + 2, report
    print(report)


def refit_by_backend(llm, plan, sources, _):
    import refit
    from refit import weight_memory
    from refit.vllm_weight_transfer import Clients, RefitTrainerInitInfo
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    import torch

    class Client:
        """vLLM's control plane, in the process of its engine."""
        def init_weight_transfer_engine(self, init_info):
            llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

        def start_weight_update(self):
            llm.collective_rpc("start_weight_update")

        def update_weights(self, update_info):
            llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

        def finish_weight_update(self, weight_version=None):
            llm.collective_rpc("finish_weight_update")
            if weight_version is not None:
                llm.llm_engine.set_weight_version(weight_version)
            llm.reset_prefix_cache()
            llm.llm_engine.reset_encoder_cache()

    class Trained(torch.nn.Module):
        """Parameters of any name, which a trainer's own module would have."""
        def __init__(self, tensors):
            super().__init__()
            self.tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

        def named_parameters(self, *_, **__):
            return iter(self.tensors.items())

    changes = {name: torch.zeros((tensor.numel() + 31) // 32, dtype=torch.int32) for name, tensor in sources[0].items()}
    info = RefitTrainerInitInfo(plan=plan, meeting=refit.LocalFabric(plan.world_size), device="cpu", rank=0,
                                check_backends=False, changes=changes)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Clients([Client()]),
                                                        source=ModuleSource(Trained(sources[0])))
    for version, source in enumerate(sources):
        for name, tensor in sources[0].items():
            tensor.copy_(source[name])
            changes[name].fill_(-1)
        trainer.send_weights(version=f"step-{version}")
        assert trainer.delta_report.is_delta == (version > 0), trainer.delta_report
    trainer.send_weights(version=f"step-{version}", dense=True)
    assert trainer.delta_report.why_dense == "rank 0 asked for it", trainer.delta_report
    weight_memory.release(worker_of(llm).model_runner.model)  # as sleep does
    try:
        trainer.send_weights(version="asleep")
    except Exception as error:
        assert "vLLM slept since this worker bound" in str(error), error
    else:
        raise AssertionError("an update into memory that is not that of the bind was not refused")
    some = next(iter(changes))
    changes[some] = changes[some].clone()
    trainer.send_weights(version=f"step-{version}", bind=True)
    assert trainer.delta_report.why_dense.endswith("bound since its last refit"), trainer.delta_report
    assert llm.llm_engine.get_weight_version() == f"step-{version}"
    changes[some] = changes[some].clone()
    try:
        trainer.send_weights(version="another bitmap")
    except refit.FailedPrecondition as error:
        assert f'"{some}.refit_changes" is at another address' in str(error), error
    else:
        raise AssertionError("an update by a bitmap that is not bound was not refused")


def load_checkpoint(llm, plan, _, checkpoint):
    import refit.vllm

    (loaded,) = refit.vllm.load(llm, plan, checkpoint, check_backends=False)
    files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert loaded.tensors > 0 and loaded.bytes_read <= files, (loaded, files)
    print(loaded)


def refitted(arguments):
    import torch
    import vllm

    plan = plan_of(arguments.family, delta={"changes": "bitmap" if arguments.path == "backend" else "snapshot"}, tower=arguments.tower)
    dummy = {"load_format": "dummy" if arguments.tower == "moved" else "auto"}
    options, update = {"extension": ({"worker_extension_cls": "refit.vllm.WorkerExtension"}, refit_by_extension),
                       "backend": ({"weight_transfer_config": {"backend": "refit"}, **dummy}, refit_by_backend),
                       "checkpoint": ({"worker_extension_cls": "refit.vllm.WorkerExtension", **dummy}, load_checkpoint)}[arguments.path]
    llm = engine_of(arguments.work / "a", **options)
    before = [list(t) for t in generated(llm)]
    sources = [weights_of(plan, seed) for seed in (3, 2)]  # another model first, then B
    update(llm, plan, sources, arguments.work / "b")
    if arguments.path == "checkpoint":
        llm.reset_prefix_cache()
    wanted = torch.load(arguments.work / "fresh.pt")
    equal = check_equal(states_of(llm, arguments.family), [list(t) for t in generated(llm)], wanted, before)
    tower = f", tower {arguments.tower}" if arguments.family in TOWERS else ""
    print(f"vLLM {vllm.__version__}, {arguments.family}{tower}, {arguments.path}: {equal}", flush=True)


def run_roles(script):
    """The roles of a script that refits an engine of the family "dense" from checkpoint a to b: one loads b, the other is refitted."""
    with tempfile.TemporaryDirectory(prefix="refit-vllm-") as scratch:
        work = pathlib.Path(scratch)
        plan = plan_of("dense")
        write_checkpoint(work / "a", FAMILIES["dense"], plan, 1)
        write_checkpoint(work / "b", FAMILIES["dense"], plan, 2)
        for role in ("fresh", "refitted"):
            if subprocess.run([sys.executable, script, "--role", role, "--work", str(work)]).returncode != 0:
                sys.exit(f"{role}: failed")


def run(arguments):
    for family in arguments.family:
        with tempfile.TemporaryDirectory(prefix="refit-vllm-") as scratch:
            work = pathlib.Path(scratch)
            plan = plan_of(family, tower=arguments.tower)
            whole = weights_of(plan_of(family), 2)
            write_checkpoint(work / "a", FAMILIES[family], plan, 1, whole)
            write_checkpoint(work / "b", FAMILIES[family], plan, 2, whole)
            for role, path in [("fresh", "extension")] + [("refitted", path) for path in arguments.path]:
                done = subprocess.run([sys.executable, __file__, "--role", role, "--work", str(work), "--family", family,
                                       "--path", path, "--tower", arguments.tower])
                if done.returncode != 0:
                    sys.exit(f"{family}, {role}, {path}: failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=["dense", "moe", "latent", "hybrid"])
    parser.add_argument("--path", nargs="+", choices=("extension", "backend", "checkpoint"),
                        default=["extension", "backend", "checkpoint"])
    parser.add_argument("--tower", choices=("moved", "loaded"), default="moved",
                        help="whether the plan moves vision towers, or each engine loads the same")
    parser.add_argument("--role", choices=("fresh", "refitted"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        run(parsed)
    else:
        parsed.family, parsed.path = parsed.family[0], parsed.path[0]
        {"fresh": fresh, "refitted": refitted}[parsed.role](parsed)
