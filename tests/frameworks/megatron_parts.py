"""What the tests with megatron-core's own GPTModel share: models, their configuration, the plan's names of their tensors."""

import re

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
MOE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "num_experts_per_tok": 2,
}


def renamed(name, names):
    """The Transformer Engine spec's name of the local spec's `name`, given all names of the rank."""
    layer = re.match(r"(.*\blayers\.\d+\.(?:transformer_layer\.)?)(.*)", name)
    if not layer:
        return name
    prefix, inner = layer.groups()
    is_moe = f"{prefix}mlp.router.weight" in names
    is_latent = any(other.startswith(f"{prefix}self_attention.linear_kv_up_proj") for other in names)
    has_query_rank = any(other.startswith(f"{prefix}self_attention.linear_q_up_proj") for other in names)
    if inner == "input_layernorm.weight" and not is_latent:
        inner = "self_attention.linear_qkv.layer_norm_weight"
    elif inner == "pre_mlp_layernorm.weight" and not is_moe:
        inner = "mlp.linear_fc1.layer_norm_weight"
    elif inner == "self_attention.kv_layernorm.weight":
        inner = "self_attention.linear_kv_up_proj.layer_norm_weight"
    elif inner == "self_attention.q_layernorm.weight" and is_latent and has_query_rank:
        inner = "self_attention.linear_q_up_proj.layer_norm_weight"
    # Releases up to 0.16 call the layer inside a prediction layer otherwise.
    prefix = prefix.replace("transformer_layer.", "mtp_model_layer.")
    # Grouped experts: one tensor per expert, numbered at the end of its name.
    inner = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", inner)
    return prefix + inner


def configuration(model, side, **more):
    sizes = {
        "num_layers": model["num_hidden_layers"], "hidden_size": model["hidden_size"],
        "num_attention_heads": model["num_attention_heads"], "num_query_groups": model["num_key_value_heads"],
        "ffn_hidden_size": model["intermediate_size"], "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm", "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "qk_layernorm": True,
        "tensor_model_parallel_size": side.get("tensor_parallel", 1),
        "pipeline_model_parallel_size": side.get("pipeline_parallel", 1),
        "virtual_pipeline_model_parallel_size": side.get("virtual_pipeline_parallel"),
        "num_layers_in_first_pipeline_stage": side.get("num_layers_in_first_pipeline_stage"),
        "num_layers_in_last_pipeline_stage": side.get("num_layers_in_last_pipeline_stage"),
    }
    experts = model.get("num_experts") or model.get("n_routed_experts")
    if experts:
        dense = model.get("first_k_dense_replace", 0)
        shared = model.get("n_shared_experts", 0) * model["moe_intermediate_size"]
        sizes |= {
            "num_moe_experts": experts, "moe_ffn_hidden_size": model["moe_intermediate_size"],
            "moe_router_topk": model["num_experts_per_tok"], "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": side.get("expert_parallel", 1),
            "expert_tensor_parallel_size": side.get("expert_tensor_parallel", 1),
            "moe_layer_freq": [int(layer >= dense) for layer in range(model["num_hidden_layers"])],
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_router_enable_expert_bias": model["model_type"] == "deepseek_v3",
            "moe_router_score_function": "sigmoid" if model["model_type"] == "deepseek_v3" else "softmax",
        }
    if side.get("mtp"):
        sizes["mtp_num_layers"] = model["num_nextn_predict_layers"]
    sizes |= more
    if "kv_lora_rank" not in model:
        return TransformerConfig(kv_channels=model["head_dim"], **sizes)
    return MLATransformerConfig(
        multi_latent_attention=True, rope_type="rope", q_lora_rank=model["q_lora_rank"], kv_lora_rank=model["kv_lora_rank"],
        qk_head_dim=model["qk_nope_head_dim"], qk_pos_emb_head_dim=model["qk_rope_head_dim"],
        v_head_dim=model["v_head_dim"], **sizes)


def gpt_model(model, config, spec, vp_stage, mtp=None):
    """The model chunk `vp_stage`, None if there is one, on the rank that the process group says it is."""
    unit = 128 * config.tensor_model_parallel_size
    return GPTModel(
        config, spec, vocab_size=-(-model["vocab_size"] // unit) * unit, max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model["tie_word_embeddings"], position_embedding_type="rope",
        mtp_block_spec=mtp, vp_stage=vp_stage)
