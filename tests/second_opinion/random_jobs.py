"""Random small models of every family, between random sides.

REFIT_SEED=N draws other jobs, REFIT_RANDOM_JOBS=N so many. A job's name has its own seed: with `--job "random: SEED *"`
and the same REFIT_SEED it is drawn alone.
"""

import math
import os
import random
import re

from deepseek_models import DeepseekModel
from hybrid_models import HybridModel
from models import Model

VOCABULARIES = (64, 65, 100, 192, 260)


def divisors(number, *choices):
    return [choice for choice in choices if number % choice == 0]


def uniform_model(draw):
    """Of a family whose layers are alike: dense, or with experts in some of them."""
    family = draw.choice(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
    layers, by_three = draw.randint(1, 6), draw.random() < 0.3
    config = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": draw.choice([24, 48]),
        "num_attention_heads": 12 if by_three else 8, "head_dim": draw.choice([2, 4]),
        "num_key_value_heads": draw.choice([3, 6] if by_three else [2, 4]), "intermediate_size": 48,
        "vocab_size": draw.choice([180, 192] if by_three else VOCABULARIES), "tie_word_embeddings": draw.random() < 0.4,
    }  # fmt: skip
    if family == "llama":
        config["attention_bias"] = draw.random() < 0.3
    if family == "mixtral":
        config["num_local_experts"] = draw.choice([4, 6])
    if family == "qwen3_moe":
        config |= {"num_experts": draw.choice([4, 6]), "moe_intermediate_size": 24, "num_experts_per_tok": 2}
        if draw.random() < 0.3:
            config["mlp_only_layers"] = [draw.randrange(layers)]
    model = Model(**config)
    model.tensor_sizes = (1, 3, 6) if by_three else (1, 2, 4)
    return model


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
        "moe_intermediate_size": 16, "first_k_dense_replace": draw.randint(0, layers - 1), "num_experts_per_tok": 2, "topk_method": "noaux_tc",
        "num_nextn_predict_layers": draw.choice([0, 1, 2]),
    }  # fmt: skip
    config = {**sizes, **config}
    if config["model_type"] == "glm4_moe_lite":
        dense = config["first_k_dense_replace"]
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    predicts = config["num_nextn_predict_layers"] > 0 and draw.random() < 0.5
    return DeepseekModel(predicts=predicts, **config)


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


def tensor_size(draw, model):
    return draw.choice(getattr(model, "tensor_sizes", (1, 2, 4)))


def stages(draw, layers, count):
    """So many stages of a layer or more each."""
    ends = [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
    return [end - begin for begin, end in zip(ends, ends[1:])]


def megatron(draw, model):
    tensor, data = tensor_size(draw, model), draw.choice([1, 2, 4])
    pairs = [
        (expert, expert_tensor)
        for expert in divisors(model.experts, 1, 2, 3, 4, 8)
        for expert_tensor in (1, 2, 3, 4)
        if tensor * data % (expert * expert_tensor) == 0
    ] if model.experts else [(1, 1)]
    expert, expert_tensor = draw.choice(pairs)
    pipeline = draw.choice(divisors(model.layers, 1, 2, 3))
    side = {
        "layout": "megatron", "tensor_parallel": tensor, "data_parallel": data, "expert_parallel": expert,
        "expert_tensor_parallel": expert_tensor, "pipeline_parallel": pipeline,
    }  # fmt: skip
    if pipeline > 1 and draw.random() < 0.5:
        side["virtual_pipeline_parallel"] = draw.choice(divisors(model.layers // pipeline, 1, 2, 3))
    elif pipeline > 1 and draw.random() < 0.5:
        side["layers_per_stage"] = stages(draw, model.layers, pipeline)
    elif pipeline > 1 and draw.random() < 0.5:
        end = draw.choice(["first", "last"])
        side[f"num_layers_in_{end}_pipeline_stage"] = draw.choice(
            [own for own in range(1, model.layers) if (model.layers - own) % (pipeline - 1) == 0])
    if draw.random() < 0.3:
        side["make_vocab_size_divisible_by"] = draw.choice([1, 4, 50])
    return side


def vllm(draw, model):
    tensor, data = tensor_size(draw, model), draw.choice([1, 2])
    pipeline = draw.choice([count for count in (1, 2, 3) if count <= model.layers])
    side = {
        "layout": "vllm", "tensor_parallel": tensor, "data_parallel": data, "pipeline_parallel": pipeline,
        "expert_parallel": model.experts > 0 and tensor * data <= model.experts and draw.random() < 0.5,
        "replicas": draw.choice([1, 1, 2]),
    }  # fmt: skip
    if pipeline > 1 and draw.random() < 0.3:
        side["layers_per_stage"] = stages(draw, model.layers, pipeline)
    if model.experts and draw.random() < 0.2:
        side["version"] = "0.23.1"
    return side


def sglang(draw, model):
    tensor = tensor_size(draw, model)
    attention = divisors(tensor, 1, 2, 3, 4) if model.family not in ("llama", "qwen2", "mixtral") else [1]
    side = {
        "layout": "sglang", "tensor_parallel": tensor, "dp_attention": draw.choice(attention),
        "expert_parallel": draw.choice(divisors(math.gcd(tensor, model.experts), 1, 2, 3, 4)) if model.experts else 1,
    }  # fmt: skip
    if side["dp_attention"] > 1:
        side["dp_lm_head"] = draw.random() < 0.5
    if model.family != "qwen3_next" and not (model.family == "llama" and model.tied):
        side["pipeline_parallel"] = draw.choice([count for count in (1, 2) if count <= model.layers])
    if model.experts and draw.random() < 0.2:
        side["moe_backend"] = "triton_kernel"
    if any("shared_expert" in name for name in model.parameters()) and draw.random() < 0.3:
        side["shared_experts"] = "replicated"
    elif model.family == "glm4_moe" and side["expert_parallel"] == 1 and model.config["n_shared_experts"] == 2:
        side["shared_experts"] = "tensor"  # SGLang would fuse them, and cannot fuse two
    return side


def fsdp(draw, model):
    return {"layout": "fsdp", "data_parallel": draw.randint(1, 6), "replicas": draw.choice([1, 1, 2])}


def generic(draw, model):
    shape = [draw.randint(1, 3), draw.randint(1, 4)]
    numbers = draw.sample(range(math.prod(shape)), math.prod(shape))

    def placements(dims):
        choices = ["Replicate", *(f"Shard({dim})" for dim in range(dims)), f"StridedShard(0, split_factor={shape[1]})"]
        return [draw.choice(choices), draw.choice(choices[:-1])]

    return {
        "layout": "generic", "meshes": {"m": {"axes": dict(zip("ab", shape)), "ranks": numbers}},
        "tensors": [{"match": "*_proj.weight", "mesh": "m", "placements": placements(2)},
                    {"match": "*", "mesh": "m", "placements": placements(1)}],
    }  # fmt: skip


def ranks(side):
    """As the layouts count them; SGLang's and Megatron's other axes lie within these."""
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel", "replicas")
    if side["layout"] == "generic":
        return len(side["meshes"]["m"]["ranks"])
    return math.prod(side.get(axis, 1) for axis in axes)


def rest_of_job(draw, model, source, destination):
    """What changes the plan, but for excludes not what it does."""
    rest, options = {}, {}
    if draw.random() < 0.6:
        bucket = draw.choice([4096, 5000, 20000])
        arena = (bucket + 15) // 16 * 16 * 2
        options |= {"bucket_bytes": bucket, "staging_bytes": arena + draw.randint(0, 2) * bucket}
    if draw.random() < 0.5:
        options["peer"] = "staged"
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
    uniform = draw.random() < 0.3
    model = (uniform_model if uniform else draw.choice([latent_model, glm_model, nemotron, qwen3_next, gpt_oss]))(draw)
    predicts = bool(getattr(model, "predicts", False) or getattr(model, "prediction_layers", 0))
    layouts = [megatron, vllm, fsdp] if predicts else [megatron, vllm, sglang, fsdp]
    if uniform:
        layouts.append(generic)
        if model.config.get("mlp_only_layers"):
            layouts.remove(sglang)
    source, destination = (draw.choice(layouts)(draw, model) for _ in range(2))
    if predicts:
        draw.choice([source, destination])["mtp"] = True
    # Where a framework keeps tensors in fp32, only casts to fp32 are the same in one step and in two.
    casts = ("bf16", "fp16", "fp32") if uniform or model.family in ("deepseek_v3", "kimi_k2") else ("fp32",)
    if draw.random() < 0.3:
        destination["dtype"] = draw.choice(casts)
    name = f"random: {seed} {model.family} {source['layout']} to {destination['layout']}"
    return name, model, source, destination, rest_of_job(draw, model, source, destination)


def draw_jobs():
    first = int(os.environ.get("REFIT_SEED", "1")) * 1_000_000
    return [draw_job(first + i) for i in range(int(os.environ.get("REFIT_RANDOM_JOBS", "200")))]
