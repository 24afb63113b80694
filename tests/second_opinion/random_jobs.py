"""Random small models of the families that have more than one kind of layer, between random sides.

REFIT_SEED=N draws other jobs, REFIT_RANDOM_JOBS=N so many. A job's name has its own seed: with `--job "random: SEED *"`
and the same REFIT_SEED it is drawn alone.
"""

import math
import os
import random
import re

from deepseek_models import DeepseekModel
from hybrid_models import HybridModel

VOCABULARIES = (64, 65, 100, 192, 260)


def divisors(number, *choices):
    return [choice for choice in choices if number % choice == 0]


def latent_model(draw):
    config = {
        "model_type": draw.choice(["deepseek_v3", "kimi_k2", "glm4_moe_lite"]), "kv_lora_rank": draw.choice([3, 8]),
        "q_lora_rank": draw.choice([None, 6]), "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": draw.choice([3, 4]),
    }  # fmt: skip
    return shared_expert_model(draw, config)


def glm_model(draw):
    config = {
        "model_type": "glm4_moe", "head_dim": draw.choice([2, 6]), "attention_bias": draw.random() < 0.5,
        "use_qk_norm": draw.random() < 0.5,
    }  # fmt: skip
    return shared_expert_model(draw, config)


def shared_expert_model(draw, config):
    layers = draw.randint(2, 5)
    sizes = {
        "num_hidden_layers": layers, "hidden_size": draw.choice([8, 24]), "num_attention_heads": 8,
        "num_key_value_heads": draw.choice([2, 4]), "vocab_size": draw.choice(VOCABULARIES), "intermediate_size": 16,
        "n_routed_experts": draw.choice([4, 8]), "n_shared_experts": draw.choice([0, 1, 2]),
        "moe_intermediate_size": 16, "first_k_dense_replace": draw.randint(0, layers - 1), "num_experts_per_tok": 2,
        "num_nextn_predict_layers": draw.choice([0, 1, 2]),
    }  # fmt: skip
    config = {**sizes, **config}
    predicts = config["num_nextn_predict_layers"] > 0 and draw.random() < 0.5
    return DeepseekModel(predicts=predicts, **{key: value for key, value in config.items() if value is not None})


def nemotron(draw):
    # At least one layer of each kind that an axis cuts.
    layers = list("M*E") + draw.choices("M*E-", k=draw.randint(1, 3))
    draw.shuffle(layers)
    config = {
        "num_hidden_layers": len(layers), "hybrid_override_pattern": "".join(layers),
        "hidden_size": draw.choice([8, 24]), "num_attention_heads": 8, "num_key_value_heads": draw.choice([2, 4]),
        "head_dim": draw.choice([2, 3]), "vocab_size": draw.choice(VOCABULARIES), "intermediate_size": 24,
        "mamba_num_heads": 8, "mamba_head_dim": draw.choice([3, 6]), "n_groups": 4, "ssm_state_size": 5,
        "conv_kernel": draw.choice([2, 4]), "use_conv_bias": True, "n_routed_experts": draw.choice([4, 8]),
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32,
    }  # fmt: skip
    if draw.random() < 0.5:
        config["moe_latent_size"] = 6
    if draw.random() < 0.4:
        config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": draw.choice(["*E", "E", "*EE"])}
        return HybridModel(predicts=True, model_type="nemotron_h", **config)
    return HybridModel(model_type="nemotron_h", **config)


def qwen3_next(draw):
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": draw.randint(2, 6), "hidden_size": draw.choice([8, 24]),
        "num_attention_heads": 8, "num_key_value_heads": draw.choice([2, 4]), "head_dim": draw.choice([2, 6]),
        "vocab_size": draw.choice(VOCABULARIES), "full_attention_interval": draw.choice([2, 3]),
        "linear_num_key_heads": 4, "linear_num_value_heads": draw.choice([4, 8]), "linear_key_head_dim": 3,
        "linear_value_head_dim": draw.choice([2, 5]), "linear_conv_kernel_dim": 4, "num_experts": draw.choice([4, 8]),
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": draw.choice([16, 32]), "num_experts_per_tok": 2,
    }  # fmt: skip
    return HybridModel(predicts=draw.random() < 0.4, **config)


def gpt_oss(draw):
    return HybridModel(
        model_type="gpt_oss", num_hidden_layers=draw.randint(1, 4), hidden_size=draw.choice([6, 24]),
        num_attention_heads=8, num_key_value_heads=draw.choice([2, 4]), head_dim=draw.choice([2, 6]),
        vocab_size=draw.choice(VOCABULARIES), intermediate_size=16, num_local_experts=draw.choice([4, 8]),
        attention_bias=True,
    )  # fmt: skip


def megatron(draw, model):
    tensor, data = draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
    pairs = [
        (expert, expert_tensor)
        for expert in divisors(model.experts, 1, 2, 4, 8)
        for expert_tensor in (1, 2, 4)
        if tensor * data % (expert * expert_tensor) == 0
    ]
    expert, expert_tensor = draw.choice(pairs)
    pipeline = draw.choice(divisors(model.layers, 1, 2, 3))
    side = {
        "layout": "megatron", "tensor_parallel": tensor, "data_parallel": data, "expert_parallel": expert,
        "expert_tensor_parallel": expert_tensor, "pipeline_parallel": pipeline,
    }  # fmt: skip
    if pipeline > 1 and draw.random() < 0.5:
        side["virtual_pipeline_parallel"] = draw.choice(divisors(model.layers // pipeline, 1, 2, 3))
    return side


def vllm(draw, model):
    tensor, data = draw.choice([1, 2, 4]), draw.choice([1, 2])
    return {
        "layout": "vllm", "tensor_parallel": tensor, "data_parallel": data,
        "pipeline_parallel": draw.choice([count for count in (1, 2) if count <= model.layers]),
        "expert_parallel": tensor * data <= model.experts and draw.random() < 0.5,
        "replicas": draw.choice([1, 1, 2]),
    }  # fmt: skip


def sglang(draw, model):
    tensor = draw.choice([1, 2, 4])
    side = {
        "layout": "sglang", "tensor_parallel": tensor, "dp_attention": draw.choice(divisors(tensor, 1, 2, 4)),
        "expert_parallel": draw.choice(divisors(tensor, 1, 2, 4)),
    }  # fmt: skip
    if side["dp_attention"] > 1:
        side["dp_lm_head"] = draw.random() < 0.5
    if model.family != "qwen3_next":
        side["pipeline_parallel"] = draw.choice([count for count in (1, 2) if count <= model.layers])
    if draw.random() < 0.2:
        side["moe_backend"] = "triton_kernel"
    if any("shared_expert" in name for name in model.parameters()) and draw.random() < 0.3:
        side["shared_experts"] = "replicated"
    elif model.family == "glm4_moe" and side["expert_parallel"] == 1 and model.config["n_shared_experts"] == 2:
        side["shared_experts"] = "tensor"  # SGLang would fuse them, and cannot fuse two
    return side


def fsdp(draw, model):
    return {"layout": "fsdp", "data_parallel": draw.randint(1, 6), "replicas": draw.choice([1, 1, 2])}


def ranks(side):
    """As the layouts count them; SGLang's and Megatron's other axes lie within these."""
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel", "replicas")
    return math.prod(side.get(axis, 1) for axis in axes)


def rest_of_job(draw, model, source, destination):
    """What changes the plan, but for excludes not what it does."""
    rest, options = {}, {}
    if draw.random() < 0.6:
        bucket, slots = draw.choice([4096, 5000, 20000]), draw.randint(1, 4)
        arena = (bucket + 15) // 16 * 16 * slots
        options |= {"bucket_bytes": bucket, "slots": slots, "staging_bytes": arena + draw.randint(0, 2) * bucket}
    if draw.random() < 0.5:
        options["peer"] = "staged"
    if draw.random() < 0.5:
        options["operations_per_round"] = draw.choice([1, 2, 3, 5, 32])
    if draw.random() < 0.15:
        options["fan_out"] = "none"
    if draw.random() < 0.3:
        name = draw.choice(list(model.parameters()))
        options["exclude"] = [draw.choice([name, re.sub(r"\d+", "*", name, count=1)])]
    if ranks(destination) <= ranks(source) and draw.random() < 0.2:
        rest["colocated"] = True
    elif draw.random() < 0.5:
        rest["topology"] = {"gpus_per_host": draw.choice([1, 2, 4])}
        # Links so slow that what is relayed is worth many steps.
        if draw.random() < 0.5:
            rest["topology"] |= {"peer_gigabytes_per_second": 1e-3, "network_gigabytes_per_second": 1e-6}
    return {"options": options, **rest}


def draw_job(seed):
    """Returns (name, model, source, destination, rest)."""
    draw = random.Random(seed)
    model = draw.choice([latent_model, glm_model, nemotron, qwen3_next, gpt_oss])(draw)
    predicts = bool(getattr(model, "predicts", False) or getattr(model, "prediction_layers", 0))
    layouts = [megatron, vllm, fsdp] if predicts else [megatron, vllm, sglang, fsdp]
    source, destination = (draw.choice(layouts)(draw, model) for _ in range(2))
    if predicts:
        draw.choice([source, destination])["mtp"] = True
    # Where a framework keeps tensors in fp32, only casts to fp32 are the same in one step and in two.
    casts = {"deepseek_v3": ("bf16", "fp16", "fp32"), "kimi_k2": ("bf16", "fp16", "fp32")}.get(model.family, ("fp32",))
    if draw.random() < 0.3:
        destination["dtype"] = draw.choice(casts)
    name = f"random: {seed} {model.family} {source['layout']} to {destination['layout']}"
    return name, model, source, destination, rest_of_job(draw, model, source, destination)


def draw_jobs():
    first = int(os.environ.get("REFIT_SEED", "1")) * 1_000_000
    return [draw_job(first + i) for i in range(int(os.environ.get("REFIT_RANDOM_JOBS", "150")))]
