#!/usr/bin/env python3
"""Write class_defaults.json: what transformers' configuration classes read where a config.json leaves a key out.

  pip install transformers==5.24.0        # torch is not needed
  class_defaults.py > class_defaults.json

For each family the file has a small config with every key, and for each of its keys the value that the class then has
if the config leaves the key out. ClassDefaultsTest in compiler/model_test.cc compares what the compiler reads.
"""
import copy
import json
import re
import sys

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# No weight depends on these, or the class alone decides over them.
IGNORED = re.compile(r"""_name_or_path|architectures|chunk_size.*|dtype|id2label|label2id|model_type|problem_type
    |return_dict|transformers_version|is_encoder_decoder|initializer_range|.*_token_id|.*_token_index|.*dropout|.*_eps
    |output_.*|use_cache|max_position_embeddings|hidden_act.*|mlp_hidden_act|.*_coef|.*_softcapping|time_step_.*
    |routed_scaling_factor|swiglu_.*|.*_jitter_noise|topk_group|n_group|norm_topk_prob|pretraining_tp|rope_.*|attn_.*
    |use_mamba_kernels|rescale_.*|residual_.*|floor_scale|num_logits_to_keep|mamba_ssm_cache_dtype|scoring_func
    |hc_sinkhorn_iters|vision_feature.*|pixel_shuffle_ratio|index_topk|.*sliding_window.*|max_window_layers|expand
    |partial_rotary_factor|query_pre_attn_scalar|use_bidirectional_attention|mm_tokens_per_image
    |moe_shared_expert_overlap|initializer_factor|bos.*|.*_loss.*""", re.VERBOSE)

DENSE = dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=True)
HEADS = DENSE | dict(head_dim=20)
LATENT = dict(vocab_size=300, hidden_size=48, intermediate_size=80, moe_intermediate_size=36, num_hidden_layers=5,
              num_attention_heads=4, kv_lora_rank=12, q_lora_rank=28, qk_rope_head_dim=4, qk_nope_head_dim=8,
              v_head_dim=16, n_routed_experts=6, n_shared_experts=2, tie_word_embeddings=True)
INDEXER = dict(index_n_heads=3, index_head_dim=20)
DELTA = dict(linear_conv_kernel_dim=3, linear_key_head_dim=5, linear_value_head_dim=7, linear_num_key_heads=3,
             linear_num_value_heads=6)
QWEN_TOWER = dict(depth=3, hidden_size=24, intermediate_size=40, num_heads=3, in_channels=2, patch_size=5,
                  spatial_merge_size=3, temporal_patch_size=4, out_hidden_size=48, num_position_embeddings=9)

CONFIGS = {
    "llama": HEADS | dict(attention_bias=True),
    "qwen2": DENSE,
    "qwen3": HEADS | dict(attention_bias=True),
    "mistral": HEADS,
    "ministral3": HEADS,
    "granite": DENSE | dict(attention_bias=True),
    "gemma": HEADS,
    "gemma2": HEADS,
    "exaone4": HEADS,
    "nemotron": HEADS | dict(attention_bias=True),
    "cohere": DENSE,
    "cohere2": HEADS,
    "ernie4_5": HEADS,
    "hyperclovax": HEADS | dict(attention_bias=True, use_post_norm=False),
    "stablelm": DENSE | dict(use_qkv_bias=True),
    "olmoe": DENSE | dict(num_experts=6),
    "qwen2_moe": DENSE | dict(num_experts=6, moe_intermediate_size=36, shared_expert_intermediate_size=44,
                              decoder_sparse_step=2, mlp_only_layers=[1]),
    "falcon_h1": HEADS | dict(mamba_d_ssm=60, mamba_n_heads=6, mamba_d_head=10, mamba_n_groups=3, mamba_d_state=14,
                              mamba_d_conv=3, mamba_conv_bias=False, mamba_proj_bias=True, mamba_rms_norm=True),
    "mamba2": dict(vocab_size=300, hidden_size=48, num_hidden_layers=5, num_heads=6, head_dim=16, n_groups=3,
                   state_size=14, conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=True),
    "qwen3_moe": HEADS | dict(attention_bias=True, num_experts=6, moe_intermediate_size=36, decoder_sparse_step=2,
                              mlp_only_layers=[1]),
    "mixtral": HEADS | dict(num_local_experts=6),
    "minimax_m2": HEADS | dict(num_local_experts=6, use_routing_bias=True),
    "gpt_oss": HEADS | dict(num_local_experts=6),
    "glm4_moe": HEADS | dict(attention_bias=True, use_qk_norm=True, moe_intermediate_size=36, n_routed_experts=6,
                             n_shared_experts=2, first_k_dense_replace=2, num_nextn_predict_layers=2),
    "glm4_moe_lite": LATENT | dict(mlp_layer_types=["dense"] * 2 + ["sparse"] * 3),
    "deepseek_v2": LATENT | dict(first_k_dense_replace=2),
    "deepseek_v3": LATENT | dict(first_k_dense_replace=2, topk_method="noaux_tc"),
    "deepseek_v32": LATENT | INDEXER | dict(first_k_dense_replace=2, topk_method="noaux_tc"),
    "glm_moe_dsa": LATENT | INDEXER | dict(first_k_dense_replace=2, topk_method="noaux_tc"),
    "deepseek_v4": dict(vocab_size=300, hidden_size=48, num_hidden_layers=5, num_attention_heads=8, head_dim=20,
                        moe_intermediate_size=36, q_lora_rank=28, o_lora_rank=12, o_groups=4, n_routed_experts=6,
                        num_experts_per_tok=3, hc_mult=3,
                        layer_types=["sliding_attention", "compressed_sparse_attention",
                                     "heavily_compressed_attention", "sliding_attention",
                                     "compressed_sparse_attention"],
                        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3) | INDEXER,
    "nemotron_h": dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_attention_heads=4,
                       num_key_value_heads=2, head_dim=20, tie_word_embeddings=True,
                       layers_block_type=["linear_attention", "moe", "mlp", "full_attention"], mamba_num_heads=6,
                       mamba_head_dim=10, n_groups=3, ssm_state_size=14, conv_kernel=3, use_bias=True,
                       mamba_proj_bias=True, use_conv_bias=False, n_routed_experts=6, moe_intermediate_size=36,
                       moe_shared_expert_intermediate_size=44, moe_latent_size=26),
    "qwen3_next": HEADS | DELTA | dict(num_experts=6, moe_intermediate_size=36, shared_expert_intermediate_size=44,
                                       decoder_sparse_step=2, mlp_only_layers=[1],
                                       layer_types=["full_attention"] * 2 + ["linear_attention"] * 3),
    "qwen3_5_text": HEADS | DELTA | dict(layer_types=["full_attention"] * 2 + ["linear_attention"] * 3),
    "qwen3_5_moe_text": HEADS | DELTA | dict(num_experts=6, moe_intermediate_size=36,
                                             shared_expert_intermediate_size=44,
                                             layer_types=["full_attention"] * 2 + ["linear_attention"] * 3),
    "gemma3_text": HEADS | dict(tie_word_embeddings=False),
    "llama4_text": HEADS | dict(intermediate_size_mlp=88, num_local_experts=6, interleave_moe_layer_step=2,
                                moe_layers=[1, 3]),
}

# What these classes make of another key, and save beside it.
DERIVED = {
    "deepseek_v32": ("mlp_layer_types",),
    "glm_moe_dsa": ("mlp_layer_types",),
}


def of(family, **more):
    """The language model's config of a family, as a part of one with a vision tower."""
    config = {key: value for key, value in CONFIGS[family].items() if key != "tie_word_embeddings"} | more
    return config


CONFIGS |= {
    "qwen3_5": dict(text_config=of("qwen3_5_text"), vision_config=QWEN_TOWER, tie_word_embeddings=True),
    "qwen3_5_moe": dict(text_config=of("qwen3_5_moe_text"), vision_config=QWEN_TOWER, tie_word_embeddings=True),
    "qwen3_vl": dict(text_config=of("qwen3"), vision_config=QWEN_TOWER | dict(deepstack_visual_indexes=[1]),
                     tie_word_embeddings=True),
    "qwen3_vl_moe": dict(text_config=of("qwen3_moe"), vision_config=QWEN_TOWER | dict(deepstack_visual_indexes=[1]),
                         tie_word_embeddings=True),
    "gemma3": dict(text_config=of("gemma3_text"), tie_word_embeddings=False,
                   vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
                                      num_channels=2, image_size=20, patch_size=5, vision_use_head=False)),
    "llama4": dict(text_config=of("llama4_text"), tie_word_embeddings=True,
                   vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
                                      num_channels=2, image_size=20, patch_size=5, vision_output_dim=32,
                                      projector_input_dim=28, projector_output_dim=28)),
    "kimi_k25": dict(text_config=of("deepseek_v3"), tie_word_embeddings=False,
                     projection_hidden_size=24,
                     vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                                        num_attention_heads=3, patch_size=5, pos_emb_height=6, pos_emb_width=7,
                                        merge_kernel_size=[3, 2])),
}

GLM = dict(num_key_value_heads=2, head_dim=20, moe_intermediate_size=36, n_routed_experts=6, n_shared_experts=2)
CONFIGS |= {
    "seed_oss": HEADS | dict(attention_bias=False, attention_out_bias=True),
    "smollm3": DENSE | dict(attention_bias=True),
    "arcee": HEADS | dict(attention_bias=True),
    "olmo2": DENSE,
    "olmo3": DENSE,
    "apertus": DENSE | dict(attention_bias=True),
    "hunyuan_v1_dense": HEADS | dict(attention_bias=True),
    "starcoder2": DENSE | dict(use_bias=False),
    "jais2": HEADS | dict(attention_bias=False, mlp_bias=False),
    "ministral": HEADS,
    "iquestcoder": HEADS | dict(attention_bias=True),
    "helium": HEADS,
    "flex_olmo": DENSE | dict(num_experts=6),
    "dots1": DENSE | GLM | dict(attention_bias=True, first_k_dense_replace=2, topk_method="noaux_tc"),
    "solar_open": DENSE | GLM | dict(attention_bias=True, topk_method="noaux_tc"),
    "phimoe": DENSE | dict(num_local_experts=6, attention_bias=True, lm_head_bias=True),
    "youtu": {key: value for key, value in LATENT.items() if key not in ("moe_intermediate_size", "n_routed_experts", "n_shared_experts")},
    "hunyuan_v1_moe": HEADS | dict(attention_bias=True, num_experts=6),
    "qwen2_vl": dict(text_config=of("qwen2"), tie_word_embeddings=True, vision_config=dict(depth=3)),
    "qwen2_5_vl": dict(text_config=of("qwen2"), tie_word_embeddings=True, vision_config=dict(depth=3)),
    "mistral3": dict(text_config=of("mistral", model_type="mistral"), tie_word_embeddings=True,
                     vision_config=dict(model_type="pixtral", num_hidden_layers=3)),
    "internvl": dict(text_config=of("qwen3", model_type="qwen3"), tie_word_embeddings=True,
                     vision_config=dict(model_type="internvl_vision", num_hidden_layers=3)),
    "glm4v_moe": dict(
        text_config={key: value for key, value in (DENSE | GLM).items() if key != "tie_word_embeddings"} | dict(first_k_dense_replace=2, attention_bias=False),
        tie_word_embeddings=True, vision_config=dict(depth=3)),
}


def is_part(value):
    return isinstance(value, dict) and "model_type" in value


def keys(config, path=()):
    """Paths of all keys that a weight may depend on."""
    for key, value in config.items():
        if IGNORED.fullmatch(key) or isinstance(value, dict) and not is_part(value):
            continue
        if is_part(value):
            yield from keys(value, path + (key,))
        else:
            yield path + (key,)


def part(config, path):
    for key in path:
        config = config[key]
    return config


def resolved(family, config, path):
    """The class's value of a key; None, False where it refuses the config or has no such key."""
    try:
        saved = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)).to_dict()
        return part(saved, path), True
    except Exception:  # whatever a class raises, it has no value
        return None, False


def family_entry(family, wanted):
    saved = CONFIG_MAPPING[family](**copy.deepcopy(wanted)).to_dict()

    # vLLM and transformers take the key beside the language model's config.
    saved.get("text_config", {}).pop("tie_word_embeddings", None)

    def written(config, wanted):
        """The saved keys, and those of `wanted` that the class drops though engines read them."""
        kept = {key: written(value, wanted[key]) if is_part(value) else value for key, value in config.items()
                if key == "model_type" or not IGNORED.fullmatch(key) and (is_part(value) or not isinstance(value, dict))}
        return wanted | {key: value for key, value in kept.items() if key not in DERIVED.get(family, ())}

    config = written(saved, wanted)
    left_out = {}
    for path in keys(config):
        without = copy.deepcopy(config)
        del part(without, path[:-1])[path[-1]]
        value, known = resolved(family, without, path)
        if known:
            left_out[".".join(path)] = value
    return {"config": config, "left_out": left_out}


def main():
    table = {family: family_entry(family, wanted) for family, wanted in sorted(CONFIGS.items())}
    document = {"transformers": transformers.__version__, "families": table}
    # One key a line, lists on theirs.
    text = json.dumps(document, indent=1, sort_keys=True)
    sys.stdout.write(compact(text) + "\n")


def compact(text):
    """The text with each list of plain values on one line."""
    lines, stack = [], None
    for line in text.split("\n"):
        if stack is not None:
            stack.append(line.strip())
            if line.strip() in ("]", "],"):
                lines.append(stack[0] + " ".join(stack[1:-1]) + stack[-1])
                stack = None
        elif line.endswith("["):
            stack = [line]
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
